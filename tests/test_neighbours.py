"""A trace beside its neighbours: its own times to the nanosecond, shares as asked, conversations whole."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from llm_bench.errors import BenchError
from llm_bench.neighbours import Neighbour, parse, together
from llm_bench.parts import class_of
from llm_bench.request import Request, Trace

BATCH = Neighbour("batch.jsonl", "batch")


def trace(*requests: Request, path: str = "x/chat.jsonl", notes: tuple[str, ...] = ()) -> Trace:
    return Trace(list(requests), "llm-bench", path, list(notes), {})


def arrivals(n: int, gaps: list[float], **facts: Any) -> Trace:
    at = np.concatenate([[0.0], np.cumsum(np.resize(gaps, n - 1))])
    return trace(*(Request(10, 5, at_s=round(float(t), 9), line=i + 1, **facts) for i, t in enumerate(at)))


def of(found: Trace, name: str) -> list[Request]:
    return [r for r in found.requests if r.request_class.split("/")[0] == name]


def times(found: Trace, name: str) -> list[float]:
    return [r.at_s for r in of(found, name) if r.at_s is not None]


# -- as typed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("batch.jsonl", BATCH),
        ("a/batch.jsonl.gz", Neighbour("a/batch.jsonl.gz", "batch")),
        ("batch.jsonl:0.2", BATCH._replace(share=0.2)),
        ("batch.jsonl:0.2:priority=-3:name=b", Neighbour("batch.jsonl", "b", 0.2, -3)),
        ("a:b.jsonl:name=c", Neighbour("a:b.jsonl", "c")),
        ("a:b.jsonl", Neighbour("a:b.jsonl", "a:b")),
        ("a:7:0.5", Neighbour("a:7", "a:7", 0.5)),  # a path that ends in a number needs a share behind it
    ],
)
def test_a_neighbour_is_read_as_typed(text: str, right: Neighbour) -> None:
    assert parse(text) == right


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "no path"),
        (":0.2", "no path"),
        ("b.jsonl:1", "a share of 1, expected one of all requests, over 0 and under 1"),
        ("b.jsonl:0", "a share of 0"),
        ("b.jsonl:0.2:colour=red", "no option 'colour', expected PATH\\[:SHARE\\]"),
        ("b.jsonl:name=", "name without a value"),
        ("b.jsonl:name=a:name=b", "name twice"),
        ("b.jsonl:priority=high", "priority 'high', expected a whole number"),
        ("b.jsonl:priority=1e40", "priority '1e40', expected a whole number of 32 bits"),
    ],
)
def test_what_is_no_neighbour_is_refused_in_words(text: str, wrong: str) -> None:
    with pytest.raises(BenchError, match=wrong):
        parse(text)


def test_shares_leave_the_trace_something() -> None:
    others = [(arrivals(9, [1.0]), BATCH._replace(name=f"b{i}", share=0.5)) for i in range(2)]
    with pytest.raises(BenchError, match="shares of 1 in all, expected under 1"):
        together(arrivals(9, [1.0]), others)


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(BenchError, match="two parts of the mix are named 'chat'; give one of them another with :name"):
        together(arrivals(9, [1.0]), [(arrivals(9, [1.0]), Neighbour("chat.jsonl.gz", class_of("chat.jsonl.gz")))])


# -- times ------------------------------------------------------------------------------------------------------------


def test_without_a_share_each_keeps_its_own_arrivals_and_the_trace_says_when_it_ends() -> None:
    chat, batch = arrivals(100, [0.1]), arrivals(30, [0.25, 0.75])  # 10 s, and 15 s
    found = together(chat, [(batch, BATCH)])
    assert times(found, "chat") == [r.at_s for r in chat.requests]
    assert times(found, "batch") == [r.at_s for r in batch.requests if r.at_s is not None and r.at_s < 10]
    assert "chat: 100 requests, its own times" in found.notes
    assert "batch: 20 of 30 requests, its own times, 2/s" in found.notes
    assert not any("doubt" in note for note in found.notes)
    assert [r.at_s for r in found.requests] == sorted(r.at_s for r in found.requests if r.at_s is not None)


def test_a_share_is_of_all_requests_and_the_trace_keeps_its_rate() -> None:
    chat, batch = arrivals(800, [0.1]), arrivals(1000, [0.05, 0.15])  # 10/s for 80 s
    found = together(chat, [(batch, BATCH._replace(share=0.2))], seed=3)
    assert times(found, "chat") == [r.at_s for r in chat.requests]
    assert Counter(r.request_class for r in found.requests)["batch"] == pytest.approx(
        200, abs=1
    )  # 10 / 0.8 * 0.2 = 2.5
    gaps = np.diff(times(found, "batch"))
    assert sorted({round(float(g), 6) for g in gaps}) == pytest.approx([0.2, 0.6], rel=2e-3)  # 1000 gaps of 999
    assert any("its own arrivals, starts stretched by 4.0" in note for note in found.notes)


def test_several_shares_and_an_own_rate_add_up() -> None:
    chat, own = arrivals(600, [0.1]), arrivals(300, [0.2])  # 10/s and 5/s for 60 s: half of 30/s
    shared = [(arrivals(2000, [0.01]), Neighbour("p", name, share)) for name, share in (("p", 0.2), ("q", 0.3))]
    found = together(chat, [(own, BATCH), *shared])
    counts = Counter(r.request_class for r in found.requests)
    assert counts["batch"] == 300
    assert (counts["p"], counts["q"]) == (pytest.approx(360, abs=1), pytest.approx(540, abs=1))


def test_a_neighbour_without_times_arrives_as_poisson_with_all_of_it_or_its_share() -> None:
    chat, untimed = arrivals(1000, [0.1]), trace(*[Request(10, 5)] * 4000)
    every = together(chat, [(untimed, BATCH)], seed=5)
    gaps = np.diff(times(every, "batch"))
    assert len(gaps) == 3999 and gaps.std() / gaps.mean() == pytest.approx(1, abs=0.05)
    assert max(times(every, "batch")) < 100
    shared = together(chat, [(untimed, BATCH._replace(share=0.5))], seed=5)
    assert len(of(shared, "batch")) == 1000
    assert times(together(chat, [(untimed, BATCH)], seed=5), "batch") == times(every, "batch")
    assert times(together(chat, [(untimed, BATCH)], seed=6), "batch") != times(every, "batch")


def test_a_neighbour_that_ends_early_is_a_doubt() -> None:
    chat = arrivals(100, [1.0])
    early = together(chat, [(arrivals(40, [1.0]), BATCH)]).notes
    assert any(n.startswith("doubt: batch has no more in the last 61 s of 100 s") for n in early)
    few = together(chat, [(trace(*[Request(10, 5)] * 30), BATCH._replace(share=0.5))]).notes
    assert "doubt: batch has 30 of the 100 requests of its share; give a longer one" in few


def test_a_neighbour_of_which_nothing_is_due_meanwhile_is_refused() -> None:
    late = trace(Request(9, 1, at_s=50.0))
    with pytest.raises(BenchError, match=r"nothing of 'batch' \(batch.jsonl\) falls into the 10 s"):
        together(arrivals(10, [1.0]), [(late, BATCH)])
    with pytest.raises(BenchError, match="starts at one moment, so it has no rate"):
        together(arrivals(10, [0.0]), [(late, BATCH._replace(share=0.5))])


def test_a_trace_that_is_one_burst_stands_beside_all_of_the_other() -> None:
    found = together(arrivals(10, [0.0]), [(arrivals(20, [1.0]), BATCH)])
    assert times(found, "batch") == [float(i) for i in range(20)]


def test_without_times_parts_are_dealt_by_their_counts_or_shares() -> None:
    chat, batch = trace(*(Request(n, 1) for n in range(1, 9))), trace(*(Request(n, 1) for n in range(11, 15)))
    found = together(chat, [(batch, BATCH)])
    assert sorted(r.tokens_in for r in found.requests) == [*range(1, 9), *range(11, 15)]
    assert [r.request_class for r in found.requests[:6]].count("batch") == 2
    assert all(r.at_s is None for r in found.requests)
    half = together(chat, [(batch, BATCH._replace(share=0.5))])
    assert Counter(r.request_class for r in half.requests) == {"chat": 5, "batch": 4}  # batch has no more
    timed = together(chat, [(arrivals(4, [1.0]), BATCH)])
    assert "the trace has no times: those of batch are not used" in timed.notes
    assert all(r.at_s is None for r in timed.requests)


# -- rows -------------------------------------------------------------------------------------------------------------


def test_parts_share_nothing_and_keep_their_lines_classes_and_notes() -> None:
    chat = trace(
        Request(32, 1, at_s=0.0, hash_ids=(1, 2), block_size=16, session="s", client="c", request_class="vip", line=2),
        Request(48, 1, at_s=2.0, hash_ids=(1, 2, 3), block_size=16, session="s", turn=1, tokens_new=15, line=3),
        notes=("unit: s",),
    )
    batch = trace(Request(32, 1, at_s=1.0, hash_ids=(1, 2), block_size=16, session="s", line=7), notes=("ticks",))
    found = together(chat, [(batch, BATCH._replace(priority=5))])
    first, other, second = found.requests
    assert (first.request_class, other.request_class, second.request_class) == ("chat/vip", "batch", "chat")
    assert (first.session, other.session, first.client) == ("chat/s", "batch/s", "chat/c")
    assert (first.line, other.line, second.line, other.priority, first.priority) == (2, 7, 3, 5, 0)
    assert first.hash_ids == second.hash_ids[:2] and not set(first.hash_ids) & set(other.hash_ids)
    assert found.notes[:2] == ["unit: s", "batch: ticks"]
    assert found.path == "x/chat.jsonl + x/chat.jsonl"


@st.composite
def part(draw: st.DrawFn) -> Trace:
    """Conversations of one to three turns that start in order; a later turn has a time, or a pause before it."""
    rows, start = [], 0.0
    for k in range(draw(st.integers(1, 12))):
        timed = draw(st.booleans())
        for turn in range(draw(st.integers(1, 3))):
            at_s = round(start + 0.7 * turn, 9) if timed or not turn else None
            think = None if timed or not turn else 0.1
            rows.append(Request(10 + turn, 5, at_s=at_s, session=str(k), turn=turn, think_s=think))
        start = round(start + draw(st.floats(0, 3)), 9)
    return trace(*rows)


@settings(deadline=None)
@given(own=part(), other=part(), share=st.none() | st.floats(0.05, 0.9), seed=st.integers(0, 9))
def test_the_trace_keeps_all_its_requests_and_times_and_no_conversation_is_cut(
    own: Trace, other: Trace, share: float | None, seed: int
) -> None:
    try:
        found = together(own, [(other, BATCH._replace(share=share))], seed)
    except BenchError:
        event("refused")
        return
    kept = {(r.session, r.turn): r.at_s for r in of(found, "chat")}
    assert kept == {(f"chat/{r.session}", r.turn): r.at_s for r in own.requests}
    turns: dict[str, list[int]] = {}
    for r in found.requests:
        turns.setdefault(r.session, []).append(r.turn)
    assert all(seen == list(range(len(seen))) for seen in turns.values())  # in order, none missing before another
    whole = Counter(r.session for r in other.requests)
    assert all(len(seen) == whole[name[6:]] for name, seen in turns.items() if name.startswith("batch/"))
