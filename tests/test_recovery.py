"""What a fault did, of records made by hand: each verdict, and moments that are known to the millisecond."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_bench import faults, objectives, recovery
from llm_bench.faults import Done, Log
from llm_bench.records import Record
from llm_bench.recovery import Recovery
from llm_bench.windows import Window
from tests.sample import START_NS, cell, ns, record

BASE, GAP, TOKENS = 50.0, 20.0, 3  # ms: TTFT on a quiet day, between requests, and tokens of each 5 ms apart


def done(at: float, what: str = "engine:stall", *, ok: bool = True, begun: bool = True) -> Done:
    stamps = (ns(at), ns(at + 1)) if begun else (0, 0)
    return Done(what, "engine", ns(at), *stamps, ok, "HTTP 200" if ok else "HTTP 404")


def log(*of: Done) -> Log:
    return Log(START_NS, None, of)


def answered(index: int, due: float, ttft: float, **fields: Any) -> Record:
    first = due + ttft
    return record(index, due, events=[first + 5 * k for k in range(TOKENS)], **fields)


def refused(index: int, due: float, **fields: Any) -> Record:
    return record(index, due, end=due + 2, outcome="failed", **fields)


def load(each: Callable[[int, float], Record], seconds: float = 20, gap: float = GAP) -> list[Record]:
    return [each(i, i * gap) for i in range(int(1e3 * seconds / gap))]


def noise(index: int) -> float:
    return 3 * math.sin(index)


def only(rows: Sequence[Record], *of: Done, slo: str = "", reason: str = "exhausted") -> Recovery:
    """The first fault's."""
    c = cell(list(rows))
    window = Window(ns(0), int(c["due_ns"][-1]) + 1, 0, c.n, "by hand")
    return recovery.of(c, window, log(*of), objectives.parse(slo).limits, reason)[0]


def stalled(at: float, ms: float, gap: float = GAP, seconds: float = 20) -> list[Record]:
    """A server that stands still, and then answers all that waits at once."""

    def one(i: int, due: float) -> Record:
        waits = at + ms - due if at <= due < at + ms else 0.0
        return answered(i, due, waits + BASE + noise(i))

    return load(one, seconds, gap)


@settings(max_examples=25, deadline=None)
@given(st.floats(200, 6000), st.floats(10, 40), st.floats(0, 20))
def test_the_end_of_a_stall_is_found_to_a_gap_between_requests(ms: float, gap: float, shift: float) -> None:
    found = only(stalled(6000 + shift, ms, gap), done(6000 + shift))
    assert found.verdict == recovery.RECOVERED
    assert found.after_s is not None
    assert abs(1e3 * found.after_s - ms) <= gap + 2 * 0.1 * (BASE + 3)  # what is within 10% is no longer bad
    assert found.before is not None
    assert found.before.window_s == pytest.approx(1.0)
    assert found.failed == found.lost == 0
    assert found.backlog == pytest.approx(ms / gap, abs=BASE / gap + 3)


@settings(max_examples=25, deadline=None)
@given(st.floats(300, 5000), st.floats(0.3, 1.0), st.integers(0, 1000))
def test_a_share_of_errors_is_over_with_the_last_of_them(ms: float, share: float, seed: int) -> None:
    strikes = np.random.default_rng(seed).random(1000) < share

    def one(i: int, due: float) -> Record:
        struck = 6000 <= due < 6000 + ms and strikes[i]
        return refused(i, due) if struck else answered(i, due, BASE + noise(i))

    rows = load(one)
    found = only(rows, done(6000, "engine:http_error"))
    bad = [r for r in rows if r.outcome == "failed"]
    last = (bad[-1].due_ns - ns(6000)) / 1e9
    assert found.verdict == recovery.RECOVERED
    assert found.after_s == pytest.approx(last, abs=GAP / 1e3 + 1e-6)
    assert (found.failed, found.errors) == (len(bad), (f"http_5xx 503 x{len(bad)}",))
    assert found.first_error_s == pytest.approx((bad[0].end_ns - ns(6000)) / 1e9)
    assert found.queue is not None
    assert (found.queue.unavailable, found.queue.busy, found.queue.again) == (len(bad), 0, 0)
    assert found.queue.retry_after == "not honoured: no retries (--retries)"


def test_a_slowdown_that_stays_within_the_slo_is_degraded_and_without_one_of_errors_too() -> None:
    rows = load(lambda i, due: answered(i, due, (BASE if due < 6000 else 2 * BASE) + noise(i)))
    found = only(rows, done(6000), slo="ttft_p95<200ms,error_rate<1%")
    assert (found.verdict, found.after_s) == (recovery.DEGRADED, None)
    assert found.worst_ms == pytest.approx(2 * BASE, abs=4)
    assert only(rows, done(6000)).verdict == recovery.DEGRADED  # no limit says that it is too slow
    assert only(rows, done(6000), slo="ttft_p95<80ms").verdict == recovery.NOT_RECOVERED


def test_errors_that_go_on_are_not_recovered() -> None:
    rows = load(lambda i, due: refused(i, due) if due >= 6000 and i % 2 else answered(i, due, BASE + noise(i)))
    found = only(rows, done(6000))
    assert found.verdict == recovery.NOT_RECOVERED
    assert found.after_s is None


def test_an_end_too_near_the_loads_own_is_not_called_a_failure_to_recover() -> None:
    found = only(stalled(6000, 2000, seconds=9.5), done(6000))
    assert found.verdict == recovery.UNDECIDED
    assert "well again after 2.0" in found.why or "well again after 1.9" in found.why
    assert "too soon to tell" in found.why


def test_a_target_that_is_gone_is_not_recovered_with_what_was_measured() -> None:
    rows = load(lambda i, due: answered(i, due, BASE + noise(i)), 6) + [refused(300 + i, 6000 + i) for i in range(20)]
    found = only(rows, done(6000), reason="target gone")
    assert (found.verdict, found.why, found.failed) == (recovery.NOT_RECOVERED, "the target no longer answered", 20)


def test_a_quiet_cell_shows_no_effect() -> None:
    found = only(load(lambda i, due: answered(i, due, BASE + noise(i))), done(6000))
    assert found.verdict == recovery.NO_EFFECT
    assert found.amplification == 1.0


def test_errors_of_requests_in_flight_alone_are_an_effect_that_is_over_at_once() -> None:
    def one(i: int, due: float) -> Record:
        ends = due + 60 > 6000 >= due
        return record(i, due, end=6001, outcome="failed") if ends else answered(i, due, BASE + noise(i))

    found = only(load(one), done(6001))
    assert (found.verdict, found.after_s) == (recovery.RECOVERED, 0.0)
    assert "in flight" in found.why
    assert found.lost == found.failed > 0  # they were sent, and not a byte came


def test_what_stands_still_in_a_closed_loop_is_seen_by_its_silence() -> None:
    """Nothing comes due while all slots wait: only the tokens that do not come show it."""
    rows, index, at = [], 0, 0.0
    while at < 20_000:
        for slot in range(4):
            due = at + slot
            events = [due + BASE + noise(index) + 50 * k for k in range(4)]
            stall = 1500 if at <= 6000 < at + 200 else 0  # after the second token
            rows.append(record(index, due, events=[e + (stall if k >= 2 else 0) for k, e in enumerate(events)]))
            index += 1
        at += 210 + stall
    begun = next(r.event_ns[1] for r in rows if r.event_ns[2] - r.event_ns[1] > 1e9)
    fault = Done("engine:stall", "engine", begun, begun, begun, True, "")
    found = only(rows, fault)
    assert found.verdict == recovery.RECOVERED
    assert found.after_s == pytest.approx(1.55, abs=0.02)
    assert found.silence_s == pytest.approx(1.55, abs=0.02)


def test_retries_multiply_attempts_and_hide_refusals() -> None:
    def one(i: int, due: float) -> Record:
        if not 6000 <= due < 7000:
            return answered(i, due, BASE + noise(i))
        again: dict[str, Any] = {"attempts": 3, "first_attempt": "http_503", "retry_wait_ns": 10**9}
        return answered(i, due, 1000 + BASE, **again)

    found = only(load(one), done(6000))
    assert found.after_s == pytest.approx(1.0)
    assert (found.attempts, found.requests, found.amplification) == (150, 50, 3.0)
    assert found.queue is not None
    assert (found.queue.unavailable, found.queue.again, found.queue.saved) == (50, 50, 50)
    assert found.queue.waited_s == pytest.approx(50)
    assert found.queue.retry_after == "honoured wherever it was sent"


@pytest.mark.parametrize(
    ("seconds", "fault", "why"),
    [
        (20, done(100), "2 requests were due in the 0.1 s before it"),
        (20, done(6000, ok=False), "it was not done as asked: HTTP 404"),
        (
            20,
            done(19_500),
            "25 requests were due in the 0.48 s until the load ended: windows of 1 s need at least 2 s of load",
        ),
    ],
)
def test_what_cannot_be_told_is_undecided(seconds: float, fault: Done, why: str) -> None:
    found = only(load(lambda i, due: answered(i, due, BASE + noise(i)), seconds), fault)
    assert found.verdict == recovery.UNDECIDED
    assert why in found.why


def test_a_fault_that_was_not_begun_is_undecided_and_others_are_judged() -> None:
    c = cell(stalled(6000, 2000))
    window = Window(ns(0), int(c["due_ns"][-1]) + 1, 0, c.n, "by hand")
    first, second = recovery.of(c, window, log(done(6000), done(90_000, begun=False, ok=False)))
    assert (first.verdict, second.verdict, second.at_s) == (recovery.RECOVERED, recovery.UNDECIDED, None)


def test_a_fault_before_the_last_was_over_is_undecided() -> None:
    c = cell(stalled(6000, 6000))
    window = Window(ns(0), int(c["due_ns"][-1]) + 1, 0, c.n, "by hand")
    first, second = recovery.of(c, window, log(done(6000), done(9000)))
    assert (first.verdict, first.why) == (recovery.UNDECIDED, "the next fault began before this one was over")
    assert second.verdict == recovery.RECOVERED
    assert second.after_s == pytest.approx(3.0, abs=0.03)


@pytest.mark.parametrize("name", ["CONT", "SIGCONT"])
def test_what_lets_a_stopped_process_go_on_is_the_end_of_a_fault_and_none_itself(name: str) -> None:
    c = cell(stalled(6000, 2000))
    window = Window(ns(0), int(c["due_ns"][-1]) + 1, 0, c.n, "by hand")
    stop, go_on = (
        Done(f"signal:{what}:77", "signal", ns(at), ns(at), ns(at), True, "")
        for what, at in (("STOP", 6000), (name, 8000))
    )
    first, second = recovery.of(c, window, log(stop, go_on))
    assert first.verdict == recovery.RECOVERED
    assert first.after_s == pytest.approx(2.0, abs=0.03)
    assert second.verdict == recovery.NO_EFFECT
    gone = recovery.of(c, window, log(stop, go_on), reason="target gone")
    assert [found.verdict for found in gone] == [recovery.NOT_RECOVERED] * 2


def test_one_is_one() -> None:
    rows = load(lambda i, due: answered(i, due, BASE))
    assert "1 request was due in the 0.07 s before it" in only(rows, done(70)).why


def test_a_few_slow_requests_after_it_do_not_undo_a_recovery() -> None:
    rows = stalled(6000, 2000)
    rows[600:610] = [answered(i, i * GAP, 10 * BASE) for i in range(600, 610)]
    found = only(rows, done(6000))
    assert found.after_s == pytest.approx(2.0, abs=0.03)
    assert "were worse again" in found.why


def test_a_limit_that_was_not_kept_before_the_fault_does_not_forbid_a_recovery() -> None:
    assert only(stalled(6000, 2000), done(6000), slo="ttft_p95<10ms").verdict == recovery.RECOVERED


def test_a_cell_without_faults_has_none() -> None:
    c = cell(stalled(6000, 2000))
    window = Window(ns(0), ns(20_000), 0, c.n, "by hand")
    assert recovery.of(c, window, None) == []
    assert faults.of_end({"reason": "exhausted"}) is None


def test_what_was_given_up_at_the_end_has_not_drained() -> None:
    def one(i: int, due: float) -> Record:
        if due < 6000:
            return answered(i, due, BASE)
        return record(i, due, end=10_500, outcome="cut_at_end", error_kind="")

    found = only(load(one, 10), done(6000))
    assert found.backlog >= 190
    assert found.drained_s is None


def test_answers_that_are_not_streamed_have_no_silence_between_tokens() -> None:
    rows = load(lambda i, due: record(i, due, end=due + BASE + noise(i)))
    found = only(rows, done(5000))
    assert found.verdict == recovery.NO_EFFECT
    assert found.silence_s < 0.1
