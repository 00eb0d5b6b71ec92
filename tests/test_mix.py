"""Mixes: shares as asked, arrivals of each part as they were, conversations whole, nothing shared between parts."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_bench.errors import BenchError
from llm_bench.mix import Part, mix, parse_part
from llm_bench.prefixes import prefix_bound
from llm_bench.request import Request, Trace
from llm_bench.ticks import inter_arrival_cv
from llm_bench.trace import read, write

BLOCK = 16
CHAT, BATCH = Part("chat.jsonl", 0.8, "chat"), Part("batch.jsonl", 0.2, "batch")


def trace(*requests: Request) -> Trace:
    return Trace(list(requests), "llm-bench", "", [], {})


def arrivals(n: int, gaps: list[float], **facts: object) -> Trace:
    at = np.concatenate([[0.0], np.cumsum(np.resize(gaps, n - 1))])
    return trace(*(Request(10, 5, at_s=round(float(t), 6), **facts) for t in at))  # type: ignore[arg-type]


def of(requests: list[Request], name: str) -> list[Request]:
    return [r for r in requests if r.request_class.split("/")[0] == name]


def gaps_of(requests: list[Request]) -> np.ndarray:
    return np.diff([r.at_s for r in requests if r.at_s is not None and not r.turn])


# -- shares and times -------------------------------------------------------------------------------------------------


def test_shares_are_of_requests_per_second_and_the_sum_of_rates_is_kept():
    chat, batch = arrivals(1000, [0.1]), arrivals(301, [0.25, 0.75])  # 10 and 2 requests/s
    mixed = mix([(chat, CHAT), (batch, BATCH)], seed=1)
    # 12/s in sum: all of chat at 9.6/s in 104.2 s, and 250 of batch at 2.4/s in the same time, gaps x 2 / 2.4
    assert Counter(r.request_class for r in mixed.requests) == {"chat": 1000, "batch": 250}
    assert mixed.requests[-1].at_s == pytest.approx(1000 / 9.6, abs=0.5)
    assert mixed.requests[0].at_s == 0
    assert np.allclose(gaps_of(of(mixed.requests, "chat")), 0.1 * 10 / 9.6, rtol=1e-3)
    gaps = gaps_of(of(mixed.requests, "batch"))
    assert np.allclose(gaps[::2], 0.25 * 2 / 2.4, rtol=0.01)
    assert np.allclose(gaps[1::2], 3 * gaps[0])
    how = "its own arrivals, starts stretched by 1.04"
    assert mixed.notes[0].startswith(f"chat: 1,000 requests, 80.00% of the mix (80.00% asked); {how}")
    assert mixed.notes[0].endswith("; all of the part")


def test_shares_hold_though_a_part_starts_slowly():
    slow = arrivals(100, [1.0] * 50 + [0.01] * 49)
    mixed = mix([(slow, BATCH), (arrivals(120, [0.5]), CHAT)], seed=1)
    batch = of(mixed.requests, "batch")
    assert len(batch) == pytest.approx(30, abs=1)
    assert (batch[-1].at_s or 0) - (batch[0].at_s or 0) == pytest.approx(
        (mixed.requests[-1].at_s or 0) * 29 / 30, rel=0.05
    )


def test_a_rate_is_the_whole_mixes():
    chat, batch = arrivals(1000, [0.1]), arrivals(1000, [0.5])
    mixed = mix([(chat, CHAT), (batch, BATCH)], seed=1, rate=50)
    assert len(mixed.requests) / (mixed.requests[-1].at_s or 0) == pytest.approx(50, rel=0.01)
    assert "the mix has 50 requests per second" in mixed.notes
    assert np.allclose(gaps_of(of(mixed.requests, "batch")), 1 / 10, rtol=1e-6)


def test_evenly_spaced_parts_do_not_fall_together():
    mixed = mix(
        [(arrivals(50, [1.0]), CHAT._replace(share=1.0)), (arrivals(50, [1.0]), BATCH._replace(share=1.0))], seed=1
    )
    assert len({r.at_s for r in mixed.requests}) == 100


def test_a_part_of_one_instant_stays_a_burst_and_takes_the_rate_of_the_others():
    mixed = mix([(arrivals(25, [0.0]), BATCH), (arrivals(100, [0.5]), CHAT)], seed=1)
    assert len({r.at_s for r in of(mixed.requests, "batch")}) == 1
    assert np.allclose(gaps_of(of(mixed.requests, "chat")), 0.5, rtol=1e-6)


def test_later_turns_keep_their_distance_from_the_start_of_their_conversation():
    rows = [
        Request(10 + 20 * t, 5, at_s=10.0 * k + 3 * t, session=str(k), turn=t, tokens_new=5 * t)
        for k in range(40)
        for t in range(2)
    ]
    chat = trace(*rows)
    mixed = mix([(chat, CHAT), (arrivals(500, [1.0]), BATCH)], seed=3, rate=2)
    at = {}
    for r in of(mixed.requests, "chat"):
        at.setdefault(r.session, []).append(r.at_s)
    assert all(turns[1] - turns[0] == pytest.approx(3, abs=1e-8) for turns in at.values())
    assert np.allclose(gaps_of(of(mixed.requests, "chat")), 2 / 1.6, rtol=1e-6)  # two requests a conversation


def test_parts_without_times_arrive_as_poisson_at_their_share():
    untimed = trace(*[Request(10, 5)] * 4000)
    mixed = mix([(arrivals(9000, [0.125]), CHAT), (untimed, BATCH)], seed=5)
    gaps = gaps_of(of(mixed.requests, "batch"))
    assert gaps.mean() == pytest.approx(0.5, rel=0.01)  # 8/s are 0.8 of the mix: 2/s, in 2,250 gaps
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.1)
    assert np.allclose(gaps_of(of(mixed.requests, "chat")), 0.125, rtol=1e-6)
    assert any("Poisson arrivals, seed 5" in note for note in mixed.notes)


def test_without_times_and_rate_conversations_are_dealt_by_shares():
    chat, batch = trace(*(Request(n, 1) for n in range(1, 9))), trace(*(Request(n, 1) for n in range(11, 19)))
    mixed = mix([(chat, CHAT._replace(share=3)), (batch, BATCH._replace(share=1))])
    assert [r.tokens_in for r in mixed.requests] == [1, 11, 2, 3, 4, 12, 5, 6, 7, 13, 8]
    assert all(r.at_s is None for r in mixed.requests)


def test_a_count_ends_the_mix_with_a_whole_conversation():
    talk = [Request(10 + 20 * t, 5, session="s", turn=t, tokens_new=5 * t) for t in range(3)]
    chat = trace(Request(1, 1), *talk, Request(2, 1))
    mixed = mix([(chat, CHAT)], count=2)
    assert [r.tokens_in for r in mixed.requests] == [1, 10, 30, 50]
    mixed = mix([(chat, CHAT)], count=9)
    assert len(mixed.requests) == 5
    assert "5 of 9 requests: a part had no more" in mixed.notes


# -- any parts --------------------------------------------------------------------------------------------------------


@st.composite
def parts(draw: st.DrawFn) -> Trace:
    timed = draw(st.booleans())
    known: dict[object, int] = {}
    rows: list[Request] = []
    start = 0.0
    for number in range(draw(st.integers(2, 12))):
        start += draw(st.integers(1, 40)) / 8
        session = f"s{number}" if draw(st.booleans()) else ""
        at, end = start, 0
        for turn in range(draw(st.integers(1, 3)) if session else 1):
            new = draw(st.integers(1, 50))
            tokens = end + new
            path = draw(st.none() | st.tuples(st.booleans(), st.booleans(), st.booleans()))
            held = [BLOCK] * ((tokens - 1) // BLOCK) + [(tokens - 1) % BLOCK + 1]
            ids = (
                ()
                if path is None
                else tuple(known.setdefault((path[: k + 1], min(k, 9), h), len(known)) for k, h in enumerate(held))
            )
            has_time = timed and (turn == 0 or draw(st.booleans()))
            rows.append(
                Request(
                    tokens,
                    draw(st.integers(1, 9)),
                    at_s=at if has_time else None,
                    hash_ids=ids,
                    block_size=BLOCK if ids else 0,
                    session=session,
                    turn=turn,
                    tokens_new=new if turn else 0,
                    think_s=draw(st.sampled_from([None, 0.5])),
                    request_class=draw(st.sampled_from(["", "vip"])),
                    priority=draw(st.integers(0, 1)),
                    client=draw(st.sampled_from(["", "c"])),
                    body=None if ids else draw(st.sampled_from([None, {"messages": [{"content": "?"}], "top_p": 0.5}])),
                    line=len(rows) + 1,
                )
            )
            end = tokens + (rows[-1].tokens_out or 0)
            at += draw(st.integers(0, 20)) / 8
    keys = []
    for r in rows:
        keys.append(keys[-1] if r.at_s is None and r.turn else r.at_s or 0.0)
    return trace(*(rows[i] for i in sorted(range(len(rows)), key=keys.__getitem__)))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mix")


@given(parts(), parts(), st.integers(0, 9), st.sampled_from([None, 3.0]), st.sampled_from([None, 7]))
@settings(deadline=None)
def test_any_mix_reads_back_equal_with_whole_conversations_in_order(folder, a, b, seed, rate, count):
    sources = [(a, CHAT._replace(share=2.0, priority=3)), (b, BATCH._replace(share=1.0))]
    mixed = mix(sources, seed=seed, rate=rate, count=count)
    assert mixed == mix(sources, seed=seed, rate=rate, count=count)
    file = folder / "mixed.jsonl"
    file.unlink(missing_ok=True)
    write(file, mixed)
    assert read(file).requests == mixed.requests
    ids = {name: {i for r in of(mixed.requests, name) for i in r.hash_ids} for name in ("chat", "batch")}
    assert not ids["chat"] & ids["batch"]
    for source, part in sources:
        came = [r for r in mixed.requests if r.request_class.split("/")[0] == part.name]
        talks = Counter(r.session for r in came if r.session)
        whole = Counter(f"{part.name}/{r.session}" for r in source.requests if r.session)
        assert all(whole[session] == turns for session, turns in talks.items())
        same = ("tokens_in", "tokens_out", "turn", "tokens_new", "think_s")
        left = Counter(tuple(getattr(r, n) for n in same) for r in source.requests)
        assert not Counter(tuple(getattr(r, n) for n in same) for r in came) - left
        assert part.priority is None or all(r.priority == part.priority for r in came)
        if len(came) == len(source.requests) and not any(r.session for r in came):
            assert prefix_bound(came) == prefix_bound(source.requests)
    times = [r.at_s for r in mixed.requests if r.at_s is not None]
    assert times == sorted(times)


@given(st.lists(st.integers(1000, 10**6), min_size=2, max_size=60), st.integers(0, 5), st.floats(0.05, 0.95))
@settings(deadline=None)
def test_the_cv_of_a_parts_arrivals_is_kept(gaps_us, seed, share):
    source = arrivals(len(gaps_us) + 1, [us / 1e6 for us in gaps_us])
    other = arrivals(400, [0.1])
    mixed = mix([(source, CHAT._replace(share=share)), (other, BATCH._replace(share=1 - share))], seed=seed)
    came = gaps_of(of(mixed.requests, "chat"))
    before = gaps_of(source.requests)[: len(came)]
    if len(came):
        assert came.std() / came.mean() == pytest.approx(before.std() / before.mean(), rel=1e-3, abs=1e-6)


# -- kept apart -------------------------------------------------------------------------------------------------------


def test_sessions_clients_and_classes_are_the_parts_own():
    row = Request(4, 1, session="s", client="c", request_class="vip")
    requests = mix([(trace(row), CHAT), (trace(row), BATCH)]).requests
    assert {(r.session, r.client, r.request_class) for r in requests} == {
        (f"{name}/s", f"{name}/c", f"{name}/vip") for name in ("chat", "batch")
    }


def test_blocks_are_cut_to_the_smallest_size_where_it_divides_the_others():
    large = trace(Request(70, 1, hash_ids=(5, 9), block_size=64), Request(64, 1, hash_ids=(5,), block_size=64))
    small = trace(*[Request(20, 1, hash_ids=(5, 7), block_size=16)] * 2)
    requests = mix([(large, CHAT), (small, BATCH)]).requests
    a, b, c = requests[0], requests[1], requests[2]
    assert (a.hash_ids, b.hash_ids, c.hash_ids) == ((0, 1, 2, 3, 4), (5, 6), (0, 1, 2, 3))
    odd = trace(Request(20, 1, hash_ids=(5,), block_size=24))
    with pytest.raises(BenchError, match=r"blocks of different sizes in the mix \(chat: 64; batch: 24 tokens\)"):
        mix([(large, CHAT), (odd, BATCH)])


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ([(arrivals(3, [1]), CHAT), (arrivals(3, [1]), CHAT)], "two parts of the mix are named 'chat'"),
        ([(arrivals(3, [1]), CHAT._replace(name="a/b"))], "named 'a/b', expected a name without '/'"),
        ([(arrivals(1, [1]), CHAT)], "no part of the mix starts at two times or more, so none has a rate"),
        ([(arrivals(3, [0]), CHAT)], "no part of the mix starts at two times or more"),
        ([(trace(), CHAT)], "part 'chat' (chat.jsonl) has no requests"),
    ],
)
def test_parts_that_cannot_be_mixed_are_named(sources, words):
    with pytest.raises(BenchError) as e:
        mix(sources)
    assert words in str(e.value)


def test_a_mix_of_years_is_refused():
    with pytest.raises(BenchError, match="expected 10 years at most"):
        mix([(arrivals(100, [1]), CHAT)], rate=1e-8)


# -- the command line's words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("chat.jsonl:0.8", Part("chat.jsonl", 0.8, "chat")),
        ("a/b/prod.jsonl.gz:20:priority=-1", Part("a/b/prod.jsonl.gz", 20, "prod", -1)),
        ("x.csv:1:name=batch:priority=2", Part("x.csv", 1, "batch", 2)),
        ("C:/at 12:30.jsonl:.5", Part("C:/at 12:30.jsonl", 0.5, "at 12:30")),
        ("a=b.jsonl:1", Part("a=b.jsonl", 1, "a=b")),
        ("folder:3", Part("folder", 3, "folder")),
    ],
)
def test_a_part_is_a_path_a_share_and_options(text, part):
    assert parse_part(text) == part


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("chat.jsonl", "no share, expected PATH:SHARE"),
        ("chat.jsonl:most", "no share"),
        (":0.5", "no path"),
        ("", "no path"),
        ("chat.jsonl:0", "a share of 0, expected a number over 0"),
        ("chat.jsonl:-1", "a share of -1"),
        ("chat.jsonl:nan", "a share of nan"),
        ("chat.jsonl:inf", "a share of inf"),
        ("chat.jsonl:1:color=red", "no option 'color'"),
        ("chat.jsonl:1:priority=high", "priority 'high', expected a whole number"),
        ("chat.jsonl:1:priority=1.5", "priority '1.5'"),
        ("chat.jsonl:1:priority=nan", "priority 'nan'"),
        ("chat.jsonl:1:priority=1:priority=2", "priority twice"),
        ("chat.jsonl:1:name=", "name without a value"),
    ],
)
def test_a_wrong_part_is_refused_in_words(text, words):
    with pytest.raises(BenchError) as e:
        parse_part(text)
    assert words in str(e.value)
    assert str(e.value).startswith(f"part {text!r}: ")


# -- ticks ------------------------------------------------------------------------------------------------------------


def on_ticks(n: int, step: float = 3.0, together: int = 10) -> Trace:
    return trace(*(Request(10, 5, at_s=step * (i // together)) for i in range(n)))


def test_ticks_are_spread_before_other_times_hide_them():
    mixed = mix([(on_ticks(400), CHAT), (arrivals(100, [1.19]), BATCH)], seed=1)
    chat = np.array([r.at_s for r in of(mixed.requests, "chat")])
    assert len(np.unique(chat)) == 400
    assert inter_arrival_cv(chat) < 1.3  # as they stood: 3.0
    assert next(n for n in mixed.notes if "ticks" in n).startswith("chat: timestamps stand on 3 s ticks")
    assert mixed == mix([(on_ticks(400), CHAT), (arrivals(100, [1.19]), BATCH)], seed=1)


def test_ticks_stay_where_that_is_asked_and_two_parts_on_them_are_spread_apart():
    kept = mix([(on_ticks(400), CHAT), (on_ticks(100), BATCH)], seed=1, dejitter="off")
    assert len({r.at_s for r in of(kept.requests, "chat")}) == 40
    assert not [n for n in kept.notes if "ticks" in n]
    two = mix([(on_ticks(100), CHAT._replace(share=1)), (on_ticks(100), BATCH._replace(share=1))], seed=1)
    chat, batch = ([r.at_s or 0.0 for r in of(two.requests, name)] for name in ("chat", "batch"))
    inside = np.array([[at % 3 for at in part] for part in (chat, batch)])
    assert abs(np.corrcoef(inside)[0, 1]) < 0.98  # draws of its own in each


def test_a_tick_that_cannot_be_one_is_refused():
    with pytest.raises(BenchError, match="--dejitter 'soon': expected auto, even, off"):
        mix([(on_ticks(40), CHAT), (on_ticks(40), BATCH)], dejitter="soon")
