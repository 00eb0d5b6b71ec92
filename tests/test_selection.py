"""Which rows of a trace are sent: whole conversations, in order, each once; lengths scaled so that sharing survives."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench import selection
from llm_bench.errors import BenchError
from llm_bench.prefixes import prefix_bound
from llm_bench.request import Request
from llm_bench.selection import at_most, between, classes, conversations, factor, fit_context, scaled


def chat(name, *times, **facts):
    """A conversation with a turn at each time."""
    return [Request(10, 5, at_s=at, session=name, turn=k, line=9, **facts) for k, at in enumerate(times)]


def by_time(*parts):
    return sorted((r for part in parts for r in part), key=lambda r: r.at_s)


MIXED = by_time(chat("a", 0.0, 30.0), chat("b", 10.0, 20.0, 50.0), chat("", 15.0), chat("", 40.0))


# -- rows -------------------------------------------------------------------------------------------------------------


@st.composite
def traces(draw):
    """Conversations of one or more turns at any times, in order of time."""
    n = draw(st.integers(1, 12))
    rows = []
    for k in range(n):
        times = sorted(draw(st.lists(st.integers(0, 60), min_size=1, max_size=4)))
        rows.append(chat(f"s{k}" if len(times) > 1 or draw(st.booleans()) else "", *map(float, times)))
    out = by_time(*rows)
    return [replace(r, at_s=round(r.at_s - out[0].at_s, 9), line=i) for i, r in enumerate(out)]


@given(traces())
def test_without_flags_every_row_is_sent_once_in_order(rows):
    assert at_most(between(rows, None, None), None) == rows


@given(traces())
def test_a_turn_and_the_next_are_those_of_one_conversation(rows):
    assert sorted(selection.successive(rows)) == sorted(p for turns in conversations(rows) for p in pairwise(turns))


@given(traces(), st.integers(0, 60), st.integers(1, 30), st.integers(1, 40))
def test_what_is_chosen_is_whole_conversations_in_the_order_of_the_trace(rows, from_s, span_s, limit):
    try:
        chosen = at_most(between(rows, from_s, from_s + span_s), limit)
    except BenchError:
        return
    lines = [r.line for r in chosen]
    assert lines == sorted(set(lines))
    assert len(chosen) <= limit
    kept = set(lines)
    for turns in conversations(rows):
        of_it = {rows[i].line for i in turns}
        assert of_it <= kept or not of_it & kept
    assert chosen[0].at_s == 0.0
    gaps = [round((b.at_s - a.at_s) * 1e9) for a, b in pairwise(chosen)]
    assert gaps == [round((rows[j].at_s - rows[i].at_s) * 1e9) for i, j in pairwise(lines)]


def test_a_conversation_belongs_where_it_begins():
    chosen = between(MIXED, 10.0, 20.0)
    assert [(r.session, r.turn, r.at_s) for r in chosen] == [
        ("b", 0, 0.0),
        ("", 0, 5.0),
        ("b", 1, 10.0),
        ("b", 2, 40.0),
    ]
    assert [r.session for r in between(MIXED, None, 10.0)] == ["a", "a"]
    assert [r.at_s for r in between(MIXED, 40.0, None)] == [0.0]


def test_a_limit_ends_at_the_first_conversation_that_does_not_fit():
    assert [r.session for r in at_most(MIXED, 4)] == ["a", "a"]  # b has three turns: the short one behind it is no part
    assert [r.session for r in at_most(MIXED, 5)] == ["a", "b", "b", "a", "b"]
    assert at_most(MIXED, 7) == MIXED
    with pytest.raises(BenchError, match=r"--limit 1: the first conversation alone has 2 turns"):
        at_most(MIXED, 1)


@pytest.mark.parametrize(
    ("from_s", "to_s", "said"),
    [
        (60.0, None, "--from 60: no conversation begins there; the trace's requests lie between 0 and 50 s"),
        (11.0, 12.0, "--from 11 --to 12: no conversation"),
        (5.0, 5.0, "no time lies between"),
    ],
)
def test_a_part_without_requests_is_refused(from_s, to_s, said):
    with pytest.raises(BenchError, match=said):
        between(MIXED, from_s, to_s)


def test_a_part_of_a_trace_without_times_is_refused():
    with pytest.raises(BenchError, match=r"line 7 has no time; use --limit"):
        between([Request(1, 1, line=7)], 0.0, 5.0)


def test_classes_are_those_of_whole_conversations():
    rows = [Request(1, 1, request_class="chat"), Request(1, 1, request_class="batch")]
    assert classes([*rows, rows[0]]) == ["chat", "batch"]
    for wrong, said in (
        ([Request(1, 1, line=3)], "line 3 has no class"),
        (rows[:1], "only the class 'chat'"),
        ([*chat("s", 0.0, request_class="a"), *chat("s", 1.0, request_class="b")], "turns of the classes 'a'"),
    ):
        with pytest.raises(BenchError, match=said):
            classes(wrong)


# -- lengths ----------------------------------------------------------------------------------------------------------


def test_a_factor_is_read_exactly():
    assert factor("1/32") == factor("0.03125") == Fraction(1, 32)
    assert factor("0.1") == Fraction(1, 10)
    for wrong in ("0", "-1", "1/0", "x", "nan", "inf", "1001"):
        with pytest.raises(BenchError, match="--scale-lengths"):
            factor(wrong)


def test_blocks_of_512_become_blocks_of_16_and_keep_what_they_share():
    rows = [
        Request(1100, 96, hash_ids=(1, 2, 3), block_size=512),
        Request(1536, 32, hash_ids=(1, 2, 4), block_size=512),
        Request(20, 33, hash_ids=(7,), block_size=512),
    ]
    small, by = scaled(rows, Fraction(1, 32))
    assert by == Fraction(1, 32)
    assert [(r.tokens_in, r.tokens_out, r.block_size) for r in small] == [(35, 3, 16), (48, 1, 16), (1, 1, 16)]
    assert [r.hash_ids for r in small] == [r.hash_ids for r in rows]
    assert prefix_bound(rows)[0] == 1024
    assert prefix_bound(small)[0] == 32


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 64)), min_size=1),
    st.fractions(Fraction(1, 64), Fraction(3, 2)),
)
def test_a_scaled_prompt_has_as_many_blocks_as_before(rows, by):
    made = [Request(64 * (len(ids) - 1) + last, 7, hash_ids=tuple(ids), block_size=64) for ids, last in rows]
    out, used = scaled(made, by)
    assert used <= by
    for before, after in zip(made, out, strict=True):
        assert -(-after.tokens_in // after.block_size) == len(before.hash_ids)
        assert 1 <= after.tokens_in <= before.tokens_in * used + 1


@given(st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=6), st.fractions(0.01, 3))
def test_a_scaled_turn_still_holds_what_was_said_before_it(turns, by):
    rows, said = [], 0
    for k, (new, out) in enumerate(turns):
        rows.append(Request(said + new, out, session="s", turn=k, tokens_new=new if k else 0))
        said += new + out
    made, used = scaled(rows, by)
    assert used == by
    for before, after in pairwise(made):
        assert after.tokens_in == before.tokens_in + before.tokens_out + after.tokens_new
    for row, small in zip(rows, made, strict=True):
        assert 0 <= small.tokens_in - row.tokens_in * by < len(turns) + 1
        assert small.tokens_out >= 1


def test_a_text_cannot_be_scaled_nor_a_block_be_less_than_a_token():
    with pytest.raises(BenchError, match="line 4 brings its own text"):
        scaled([Request(5, 5, prompt="x", line=4)], Fraction(1, 2))
    with pytest.raises(BenchError, match="a hash block of 16 tokens"):
        scaled([Request(5, 5, hash_ids=(1,), block_size=16)], Fraction(1, 32))
    with pytest.raises(BenchError, match="line 4: 5000000 tokens times 3"):
        scaled([Request(5_000_000, 5, line=4)], Fraction(3))


# -- what fits a context ----------------------------------------------------------------------------------------------


def test_a_context_limit_refuses_skips_or_clips_and_says_how_many():
    rows = [Request(100, 20, line=2), Request(90, 5, line=3), Request(500, 20, hash_ids=(1, 2), block_size=256, line=4)]
    with pytest.raises(BenchError, match=r"1 of 3 requests \(33\.3%\).*line 4: 500 in \+ 20 out.*skip, clip or scale"):
        fit_context(rows, 200, "refuse")
    kept, effect = fit_context(rows, 200, "skip")
    assert [r.line for r in kept] == [2, 3]
    assert "skipped" in effect
    clipped, effect = fit_context(rows, 200, "clip")
    assert clipped[2].tokens_in == 180
    assert clipped[2].hash_ids == (1,)
    assert "clipped" in effect
    for policy in selection.TOO_LONG:
        assert fit_context(rows, None, policy) == (rows, "")
        assert fit_context(rows, 520, policy) == (rows, "")


def test_skipping_a_turn_skips_its_conversation():
    rows = [Request(10, 5, session="a"), Request(500, 5, session="a", turn=1), Request(10, 5)]
    kept, _ = fit_context(rows, 100, "skip")
    assert kept == [rows[2]]
    with pytest.raises(BenchError, match="skipping them leaves no request"):
        fit_context(rows[:2], 100, "skip")


def test_a_captured_body_cannot_be_clipped():
    with pytest.raises(BenchError, match="line 5 cannot be clipped: its text is given"):
        fit_context([Request(500, 5, body={"prompt": "x"}, line=5)], 100, "clip")


def test_scaling_multiplies_all_lengths_by_what_makes_the_longest_fit():
    rows = [Request(100, 20, line=2), Request(900, 100, line=3)]
    made, effect = fit_context(rows, 500, "scale")
    assert [(r.tokens_in, r.tokens_out) for r in made] == [(50, 10), (450, 50)]
    assert "1 of 2 requests (50.0%) are over the target's context of 500 tokens" in effect
    assert "all lengths of the trace were multiplied by 0.5" in effect
    blocks = [Request(1000, 24, hash_ids=(1, 2), block_size=512)]
    made, effect = fit_context(blocks, 300, "scale")  # 300/1024 of a block is 150 tokens
    assert (made[0].tokens_in, made[0].tokens_out, made[0].block_size) == (293, 7, 150)
    assert "hash blocks of 512 tokens became blocks of 150" in effect


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 90)), min_size=1, max_size=8),
    st.integers(16, 300),
    st.data(),
)
def test_what_was_scaled_fits(sizes, limit, data):
    shape = data.draw(st.sampled_from(["plain", "blocks", "turns"]))
    if shape == "plain":
        rows = [Request(n, out) for n, out in sizes]
    elif shape == "blocks":
        rows = [Request(n, out, hash_ids=tuple(range(-(-n // 64))), block_size=64) for n, out in sizes]
    else:
        rows, said = [], 0
        for k, (n, out) in enumerate(sizes):
            rows.append(Request(said + n, out, session="s", turn=k, tokens_new=n if k else 0))
            said += n + out
    made, _ = fit_context(rows, limit, "scale")
    assert len(made) == len(rows)
    assert all(r.tokens_in + r.tokens_out <= limit for r in made)


def test_what_cannot_be_scaled_so_far_is_refused():
    rows = [Request(3 * k + 1, 1, session="s", turn=k, tokens_new=2 if k else 0) for k in range(40)]
    with pytest.raises(BenchError, match="too many turns"):
        fit_context(rows, 30, "scale")
    with pytest.raises(BenchError, match=r"cannot be scaled: line 8 brings its own text.*use --too-long skip"):
        fit_context([Request(500, 5, prompt="x", line=8)], 100, "scale")
