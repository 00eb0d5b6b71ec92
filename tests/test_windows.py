"""Where windows open and close, on loops whose every moment is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench import windows
from llm_bench.errors import BenchError
from llm_bench.metrics import compute
from llm_bench.records import Cell
from llm_bench.windows import Window
from tests.sample import START_NS, cell, closed_loop, ns, record, stood_still

CLOSED_1 = {"kind": "closed", "concurrency": 1}


def ms(at_ns: int) -> float:
    return (at_ns - START_NS) / 1e6


def test_closed_loop_opens_after_two_rounds_and_closes_at_the_first_slot_left_empty() -> None:
    # 10 slots, 100 requests of 100 ms, wave staggered by 10 ms. The 20th request ends at 290 ms, when its slot is
    # refilled; the last leaves at 990 ms and the next end, at 1000 ms, finds nothing to send.
    w = windows.of(closed_loop(100, 10))
    assert (ms(w.start_ns), ms(w.end_ns)) == (290, 1000)
    assert (w.warmup, w.requests, w.first_wave, w.state) == (29, 71, 10, windows.STATIONARY)


def test_first_wave_outlasts_a_shorter_warmup() -> None:
    rows = [record(0, 0, events=[500]), record(1, 0, events=[50])]
    rows += [record(2 + i, 50 + 10 * i, events=[60 + 10 * i]) for i in range(60)]
    rows += [record(62 + i, 500 + 10 * i, events=[510 + 10 * i]) for i in range(40)]
    rows += [record(102, 650, events=[655])]
    w = windows.closed(cell(rows), 2, 3, None)
    assert ms(w.start_ns) == 500  # not 60 ms, when the third request ended


def test_a_moment_below_n_at_the_end_of_warmup_delays_the_window() -> None:
    # One slot, refilled 7 ms after each end.
    w = windows.of(cell([record(i, 100 * i, events=[100 * i + 93]) for i in range(20)], load=CLOSED_1))
    assert ms(w.start_ns) == 200  # two requests have ended at 193 ms; nothing is in flight until 200


def test_duration_ends_the_window_and_the_shorter_of_both_decides() -> None:
    load = {"kind": "closed", "concurrency": 10, "duration_s": 0.5}
    assert ms(windows.of(closed_loop(100, 10, load=load)).end_ns) == 790
    assert ms(windows.of(closed_loop(100, 10, load=load | {"duration_s": 9.0})).end_ns) == 1000


def test_under_five_requests_a_slot_is_too_short() -> None:
    w = windows.of(closed_loop(60, 10))
    assert (w.requests, w.state) == (31, windows.TOO_SHORT)
    assert windows.of(closed_loop(79, 10)).state == windows.STATIONARY


@pytest.mark.parametrize("n", [0, 1, 10, 20])
def test_a_window_that_never_opens_is_the_whole_run_and_says_so(n: int) -> None:
    w = windows.of(closed_loop(n, 10))
    assert w.state == windows.TOO_SHORT
    assert w.requests == n
    assert w.rule.startswith("whole run, because")


def test_the_gauge_decides_where_there_is_one() -> None:
    rows = [record(i, 100 * i, events=[100 * i + 100]) for i in range(20)]
    gauge = [(0.0, 1), (350.0, 0), (420.0, 1), (2000.0, 0)]
    assert ms(windows.of(cell(rows, gauge, load=CLOSED_1)).start_ns) == 200
    gauge = [(0.0, 1), (150.0, 0), (420.0, 1), (2000.0, 0)]
    assert ms(windows.of(cell(rows, gauge, load=CLOSED_1)).start_ns) == 420


def test_a_user_who_thinks_keeps_the_slot() -> None:
    # One slot, conversations of two turns with 50 ms of thought between: in flight falls to 0 in each.
    rows = []
    for i in range(12):
        begin = 250 * i
        rows.append(record(2 * i, begin, events=[begin + 100], session=f"s{i}"))
        rows.append(record(2 * i + 1, begin + 150, events=[begin + 250], session=f"s{i}", turn=1))
    w = windows.of(cell(rows, load=CLOSED_1))
    assert (ms(w.start_ns), ms(w.end_ns)) == (250, 3000)


def thinkers(until: float, duration_s: float | None = 5.0) -> Cell:
    """Two slots, 12 conversations of two turns with a second of thought between, of which those due before `until` ms.

    The slots are full from 600 ms on, the first wave has ended at 1,800 ms, the last conversation begins at 6,600 ms,
    and the first slot for which none is left falls free at 7,200 ms.
    """
    rows = []
    for i in range(12):
        begin = 1200 * (i // 2) + 600 * (i % 2)
        rows.append(record(2 * i, begin, events=[begin + 100], session=f"s{i}"))
        rows.append(record(2 * i + 1, begin + 1100, events=[begin + 1200], session=f"s{i}", turn=1))
    load = {"kind": "closed", "concurrency": 2, "warmup": 0, "duration_s": duration_s}
    return cell([r for r in rows if r.due_ns < ns(until)], load=load)


def driven(reason: str, opened: float, closed: float) -> dict[str, object]:
    return {"reason": reason, "window_open_ns": ns(opened), "window_close_ns": ns(closed)}


def test_a_user_still_thinking_when_the_duration_is_over_left_no_slot_empty() -> None:
    # The drive ends 5 s after its window opened. By then all conversations have begun, and both users think: of the one
    # who is heard of last before that, nothing more would have come for 300 ms.
    c = thinkers(until=6800)
    shown = windows.of(c)  # nothing says how it ended
    w = windows.of(c, driven("duration", 1800, 6800))
    assert (ms(shown.start_ns), ms(w.start_ns)) == (1800, 1800)
    assert (ms(shown.end_ns), ms(w.end_ns)) == (6700, 6800)
    assert shown.rule.endswith("to the first slot that was not refilled")
    assert w.rule.endswith("to 5 s later")
    late = windows.of(c, driven("duration", 1800.02, 6800.3))  # the loop's timer, and what it took to notice
    assert ms(late.end_ns) == 6800
    early = windows.of(c, driven("duration", 1799.9, 6799.9))  # never past the moment when slots were refilled no more
    assert ms(early.end_ns) == pytest.approx(6799.9)


def test_the_driver_knows_when_a_slot_could_not_be_refilled() -> None:
    w = windows.of(thinkers(until=9000, duration_s=60.0), driven("exhausted", 1800, 7200))
    assert ms(w.end_ns) == 7200
    assert w.rule.endswith("to the first slot that was not refilled")
    assert windows.of(thinkers(until=9000, duration_s=None)).end_ns == w.end_ns  # as the records show it
    interrupted = windows.of(thinkers(until=6300), driven("interrupted", 1800, 6300))
    assert ms(interrupted.end_ns) == 6300
    # A duration that was over after a slot had been left empty does not lengthen the window.
    short = windows.of(thinkers(until=9000, duration_s=6.0), driven("duration", 1800, 7200))
    assert (ms(short.end_ns), short.rule.endswith("not refilled")) == (7200, True)


def test_open_loop_runs_from_its_share_of_warmup_to_the_last_due_time() -> None:
    rows = [record(i, 100 * i, events=[100 * i + 30]) for i in range(101)]
    w = windows.open_(cell(rows))
    assert (ms(w.start_ns), w.end_ns, w.warmup, w.requests) == (500, ns(10_000) + 1, 5, 96)
    w = windows.open_(cell(rows), 2.0)
    assert (ms(w.start_ns), w.warmup) == (2000, 20)
    assert windows.open_(cell(rows), 11.0).state == windows.TOO_SHORT
    assert windows.open_(cell(rows[:1])).state == windows.TOO_SHORT


def test_under_twenty_requests_an_open_window_is_too_short() -> None:
    rows = [record(i, 100 * i, events=[100 * i + 30]) for i in range(22)]
    assert [(w.requests, w.state) for n in (19, 20) for w in [windows.open_(cell(rows[:n]), 0.0)]] == [
        (19, windows.TOO_SHORT),
        (20, windows.STATIONARY),
    ]


def test_a_window_that_opened_is_told_from_one_that_did_not() -> None:
    assert windows.of(closed_loop(60, 10)).opened
    assert not windows.of(closed_loop(20, 10)).opened
    assert not windows.open_(cell([record()])).opened


@pytest.mark.parametrize("end", ["ok", "cut_at_end"])
def test_the_rule_names_no_cause_for_a_slot_that_stayed_empty(end: str) -> None:
    rows = [record(i, 100 * i, events=[100 * i + 93]) for i in range(20)]
    rows[-1].outcome = end
    assert windows.of(cell(rows, load=CLOSED_1)).rule.endswith("to the first slot that was not refilled")


def overloaded(served_per_s: float) -> Window:
    """Five requests a second for 30 s; one server; what is left at 30 s is cut."""
    rows, free = [], 0.0
    for k in range(150):
        due = 200.0 * k
        free = max(free, due) + 1000 / served_per_s
        late = record(k, due, end=30_000, outcome="cut_at_end")
        rows.append(record(k, due, events=[free]) if free <= 30_000 else late)
    return windows.of(cell(rows, load={"kind": "open", "rate": 5.0}))


def test_a_backlog_that_grows_is_named_with_its_rate() -> None:
    # Case 17. Window 1.49 s to 29.8 s: 8 were due and 1 had ended before it, 150 and 29 at its end.
    w = overloaded(1.0)
    assert w.state == windows.GROWING
    assert w.growth == pytest.approx(4.0, rel=0.005)
    assert w.evidence.startswith(f"over the window the backlog grew by {(150 - 29) - (8 - 1)} (chance: 24)")


@pytest.mark.parametrize("served", [5.0, 5.5, 20.0])
def test_at_and_below_capacity_nothing_grows(served: float) -> None:
    assert (overloaded(served).growth, overloaded(served).state) == (0, windows.STATIONARY)


@pytest.mark.parametrize("stay_s", [25, 40, 59, 90])
def test_filling_an_empty_system_is_no_overload(stay_s: int) -> None:
    # 10/s for 60 s with answers of 25 s: in flight rises to 250 and stays there. Over 60 s none has ended yet.
    rows = [record(i, 100 * i, events=[100 * i + 1000 * stay_s]) for i in range(600)]
    w = windows.open_(cell(rows))
    assert (w.growth, w.state) == (0, windows.TOO_SHORT if stay_s > 60 else windows.STATIONARY)


def test_few_requests_or_few_moments_say_nothing_of_growth() -> None:
    # 12 requests on 5 instants over 230 ms, each of 1.3 s: no backlog, and none can be told from it.
    rows = [record(i, 57.5 * (i * 5 // 12), events=[57.5 * (i * 5 // 12) + 1300]) for i in range(12)]
    assert windows.open_(cell(rows), 0.0).growth == 0
    late = [record(i, 10 * (i // 20), events=[4000 + 10 * i]) for i in range(400)]  # 400 requests, 20 instants
    assert windows.open_(cell(late), 0.0).growth == 0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 2000)), min_size=30, max_size=120), st.floats(0, 0.5))
def test_a_backlog_never_grows_faster_than_requests_arrive(gaps_and_stays: list[tuple[int, int]], warm: float) -> None:
    due, rows = 0.0, []
    for i, (gap, stay) in enumerate(gaps_and_stays):
        due += gap
        rows.append(record(i, due, events=[due + stay * i]))
    c = cell(rows)
    w = windows.open_(c, warm)
    assert 0 <= w.growth <= compute("arrival_rate", c, w).value + 1e-9


def test_what_the_cap_held_back_until_the_end_is_backlog() -> None:
    served = [record(k, 200 * k, sent=1000 * k, events=[1000 * k + 1000]) for k in range(30)]
    dropped = [record(k, 200 * k, outcome="dropped") for k in range(30, 150)]
    load = {"kind": "open", "rate": 5.0, "max_in_flight": 1}
    assert windows.of(cell(served + dropped, load=load)).growth == overloaded(1.0).growth


def test_a_cap_keeps_in_flight_level_while_the_backlog_grows() -> None:
    # 5/s offered, one in flight at a time, 1 s each, all of them sent in the end.
    rows = [record(k, 200 * k, sent=1000 * k, events=[1000 * k + 1000]) for k in range(150)]
    w = windows.of(cell(rows, load={"kind": "open", "rate": 5.0, "max_in_flight": 1}))
    assert (w.state, w.growth) == (windows.GROWING, pytest.approx(4.0, rel=0.01))


def test_a_backlog_that_ends_is_not_growing() -> None:
    # 10/s for 60 s. A pause of the server from 30 s to 33 s, made good at twice the rate until 36 s.
    rows, free = [], 0.0
    for k in range(600):
        due = 100.0 * k
        free = max(free + 50, due + 50)
        free = 33_000.0 if 30_000 <= free < 33_000 else free
        rows.append(record(k, due, events=[free]))
    w = windows.of(cell(rows, load={"kind": "open", "rate": 10.0, "warmup": 0.0}))
    assert (w.state, w.growth) == (windows.STATIONARY, 0)


def test_a_warm_up_that_was_too_short_is_found_and_said() -> None:
    # 200 requests, 10 a second, the first 40 of them of 500 ms, later ones of 100: steady from the 40th on.
    rows = [record(k, 100 * k, events=[100 * k + (500 if k < 40 else 100)]) for k in range(200)]
    late, enough = (windows.of(cell(rows, load={"kind": "open", "rate": 10.0, "warmup": s})) for s in (1.0, 4.0))
    assert late.state == windows.WARMING
    assert late.settling == windows.Settling(40, 200, 10, False, 500.0, 100.0)
    assert (enough.state, enough.settling) == (windows.STATIONARY, None)
    assert enough.evidence.startswith("a warm-up of 40 of 200 requests is enough (MSER-5); over the window the backlog")
    slow = [record(k, 100 * k, events=[100 * k + (500 if k < 110 else 100)]) for k in range(200)]
    half = windows.of(cell(slow, load={"kind": "open", "rate": 10.0, "warmup": 1.0}))
    assert half.state == windows.TOO_SHORT
    assert half.settling == windows.Settling(100, 200, 10, True, pytest.approx(500), pytest.approx(140))


@pytest.mark.parametrize("n", [20, 100, 400])
def test_independent_latencies_are_seldom_called_warming(n: int) -> None:
    found = 0
    for seed in range(40):
        stays = np.random.Generator(np.random.PCG64([n, seed])).lognormal(5, 0.8, n)
        rows = [record(k, 100 * k, events=[100 * k + stay]) for k, stay in enumerate(stays)]
        found += windows.of(cell(rows, load={"kind": "open", "rate": 10.0, "warmup": None})).settling is not None
    assert found <= 3  # MSER-5 alone: about 15, 8 and 2


def slowing(n: int, slots: int, share: float = 0.5) -> Cell:
    """A closed loop of `slots` whose requests take about 100 ms and longer and longer, by `share` at the end."""
    noise = np.random.Generator(np.random.PCG64(5)).lognormal(0, 0.3, n)
    free, rows = [25.0 * k for k in range(slots)], []
    for i in range(n):
        slot = int(np.argmin(free))
        due = free[slot]
        free[slot] += 100 * noise[i] * (1 + share * i / n)
        rows.append(record(i, due, events=[due + 30, free[slot]]))
    return cell(rows, load={"kind": "closed", "concurrency": slots, "warmup": None})


def test_a_closed_loop_that_slows_down_drifts() -> None:
    w = windows.of(slowing(400, 4))
    assert w.state == windows.WARMING
    assert w.drift is not None
    assert w.drift.drifting
    assert (w.drift.latency.slope > 0, w.drift.rate.slope < 0) == (True, True)
    steady = windows.of(slowing(400, 4, share=0.0))
    assert (steady.state, steady.drift and steady.drift.drifting) == (windows.STATIONARY, False)
    few = windows.of(slowing(40, 2))
    assert (few.state, few.drift) == (windows.STATIONARY, None)
    assert few.evidence.endswith("drift untested: under 40 requests")


def test_in_flight_is_counted_half_open() -> None:
    at_ns, level = windows.in_flight(cell([record(0, 0, events=[10]), record(1, 10, events=[20])]))
    assert [ms(t) for t in at_ns] == [0, 10, 20]
    assert level.tolist() == [1, 1, 0]
    assert windows.level_at(at_ns, level, at_ns - 1).tolist() == [0, 1, 1]


def test_step_integral_and_overlaps_agree() -> None:
    c = closed_loop(100, 10)
    w = Window(ns(55), ns(777), 0, 0, "")
    of_steps = windows.integral_s(*windows.in_flight(c), w)
    assert of_steps == pytest.approx(windows.overlap_s(c["sent_ns"], c["end_ns"], w)) == pytest.approx(7.22, abs=0.2)


def test_an_unknown_load_is_refused() -> None:
    with pytest.raises(BenchError, match="closed, open, replay"):
        windows.of(cell([record()], load={"kind": "spiral"}))


def test_who_is_due_at_the_last_moment_belongs_to_the_open_window() -> None:
    rows = [record(i, 200 * i, sent=400 * i, events=[400 * i + 400]) for i in range(6)]  # case 16
    c = cell(rows, load={"kind": "open", "rate": 5.0, "warmup": 0.0})
    assert [compute(f"ttft_{r}", c, windows.of(c)).value for r in ("mean", "max")] == [900, 1400]
    dues = [0, 314.579, 541.877, 541.877]  # case 24: two at the last moment
    tied = cell([record(i, due, events=[due + 10]) for i, due in enumerate(dues)])
    w = windows.open_(tied, 0.0)
    assert (w.requests, round(w.seconds, 6)) == (4, 0.541877)
    assert compute("ttft_mean", tied, w).n == 4


def test_a_window_of_one_moment_is_none() -> None:
    w = windows.open_(cell([record(i, 0, events=[10]) for i in range(50)]), 0.0)
    assert (w.opened, w.requests, w.seconds) == (False, 50, pytest.approx(0.01))


AT_100 = {"kind": "open", "rate": 100.0, "warmup": 0.0}


def held_up(seconds: float, stop: float, hold: float, each: float, lag: float = 0.0, easy: int = 0) -> Cell:
    """100/s of a server that takes `each` ms a request, one at a time; the client stands still for `hold` ms at `stop`.

    What it would have sent meanwhile it sends then, and what came meanwhile it reads then; each request `lag` ms late.
    `easy` of ten take 5 ms, whoever else is there.
    """
    free, rows = 0.0, []
    for i in range(round(100 * seconds)):
        due = 10.0 * i
        sent = done = stop + hold if stop <= due < stop + hold else due + lag
        if i % 10 < easy:
            done += 5
        else:
            done = free = max(free, sent) + each
        read = stop + hold if stop <= done < stop + hold else done
        rows.append(record(i, due, sent, [read], ready_ns=ns(due)))
    return cell(rows, load=AT_100)


@pytest.mark.parametrize(
    ("made", "in_time"),
    [
        (held_up(10, 20_000, 0, 11), True),  # nothing is held up: of 1,000 requests 91 are left
        (held_up(10, 20_000, 0, 11, lag=20), True),  # nor by a client that is always a little late
        (cell(stood_still(27), load=AT_100), False),  # it stands still until all is over
        (held_up(10, 2000, 2000, 15), False),  # 330 left, of a heap of 200: not without a doubt in a short run
        (held_up(40, 2000, 2000, 15), True),  # and in a longer one
        # 30/s at a seat for 18/s: 200 more are left than were held up. The 70/s that are answered at once take nothing
        # off it, where they came after the moment that is looked at.
        (held_up(40, 5000, 2000, 55, easy=7), True),
    ],
)
def test_a_backlog_grows_in_time_only_where_more_is_left_than_the_client_held_up(made, in_time):
    window = windows.open_(made)
    assert window.state == windows.GROWING
    assert windows.grows_in_time(made, window) is in_time


def test_a_heap_that_the_window_ends_before_it_is_worked_off_is_no_backlog_in_time():
    made = held_up(10, 5000, 1000, 9.98)  # it takes 500 s
    window = windows.open_(made)
    assert window.state == windows.GROWING
    assert not windows.grows_in_time(made, window)


@pytest.mark.parametrize(
    ("first", "in_time"), [("connect_error", True), ("connect_timeout", True), ("rejected", False)]
)
def test_what_a_request_waits_before_it_connects_again_is_no_lateness_of_the_clients(first: str, in_time: bool) -> None:
    """91 of 1,000 are left of a server that takes 11 ms each; one is sent 9 s after its turn."""
    rows = [record(i, 10.0 * i, events=[11.0 * (i + 1)]) for i in range(1000)]
    rows[300] = record(300, 3000, 12_000, [12_010], ready_ns=ns(3000), attempts=2, first_attempt=first)
    made = cell(rows, load=AT_100)
    window = windows.open_(made)
    assert window.state == windows.GROWING
    assert windows.grows_in_time(made, window) is in_time


def test_a_backlog_is_the_clients_only_where_it_was_the_limit_and_the_backlog_grew() -> None:
    late, steady = cell(stood_still(27), load=AT_100), held_up(10, 20_000, 0, 5)
    grown, still = windows.open_(late), windows.open_(steady)
    assert windows.by_client(late, grown, True)
    assert not windows.by_client(late, grown, False)
    assert not windows.by_client(steady, still, True)
    assert windows.by_client(steady, still, True, grew=True)


def test_what_a_client_without_a_cap_never_sent_is_its_own_backlog_and_with_one_it_waited_for_the_target():
    sent = [record(i, 10.0 * i, events=[10.0 * i + 5]) for i in range(100)]
    rows = sent + [record(i, 10.0 * i, outcome="dropped") for i in range(100, 200)]
    for cap, in_time in ((None, False), (1, True)):
        made = cell(rows, load=AT_100 | {"max_in_flight": cap})
        assert windows.grows_in_time(made, windows.open_(made, 0.0, cap)) is in_time
