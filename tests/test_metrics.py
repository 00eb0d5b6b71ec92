"""Every definition of METRICS.md, worked by hand on a few records."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_bench import columns, identities, metrics, outcomes, windows
from llm_bench.columns import from_table
from llm_bench.errors import BenchError
from llm_bench.metrics import compute
from llm_bench.records import Cell, Record
from llm_bench.series import SERIES, Bound, Context, events_in
from llm_bench.server_metrics import Point
from llm_bench.slo import attainment
from llm_bench.windows import Window
from tests.sample import cell, closed_loop, gauge_of, ns, record

ALL = Window(ns(0), ns(1e9), 0, 0, "")


def value(name: str, c: Cell, window: Window = ALL, **context: object) -> float | None:
    return compute(name, c, window, Context(**context)).value  # type: ignore[arg-type]


def test_four_events_of_twelve_tokens() -> None:
    c = cell([record(events=[100, 160, 190, 250], tokens_out=12)])
    assert value("tpot_mean", c) == pytest.approx(150 / 11)
    assert [value(f"itl_{r}", c) for r in ("mean", "min", "max")] == [50, 30, 60]
    assert value("stall_max", c) == 60
    assert value("tokens_per_event", c) == 3
    assert compute("tpot_decode_mean", c, ALL).reason == "not applicable: size of the first event unknown (1)"
    sized = cell([record(events=[100, 160, 190, 250], tokens_out=12, event_tokens=[3, 4, 1, 4])])
    assert value("tpot_decode_mean", sized) == pytest.approx(150 / 9)


def test_mean_tpot_leaves_the_one_token_answer_out() -> None:
    a = record(0, events=np.linspace(100, 1090, 100))
    c = cell([a, record(1, events=[100, 200, 300]), record(2, events=[100])])
    got = compute("tpot_mean", c, ALL)
    assert got.value == pytest.approx(55)
    assert (got.n, got.not_applicable) == (2, {"under 2 tokens": 1})


def test_empty_answers_are_failures_and_in_no_latency() -> None:
    rows = [record(i, events=[40 + 10 * i]) for i in range(3)]
    rows += [record(3 + i, end=11, outcome="failed", error_kind="empty_output", error="no token") for i in range(2)]
    c = cell(rows)
    got = compute("ttft_p50", c, ALL)
    assert (got.value, got.n, got.all_requests) == (50, 3, 60)
    assert compute("ttft_p90", c, ALL).all_requests == "error"
    assert value("ttft_mean", c) == 50
    assert value("error_rate", c) == pytest.approx(0.4)


def test_waiting_for_the_cap_is_part_of_the_latency() -> None:
    c = cell([record(i, 200 * i, sent=400 * i, events=[400 * i + 400]) for i in range(6)])
    assert (value("ttft_sent_min", c), value("ttft_sent_max", c)) == (400, 400)
    assert (value("ttft_mean", c), value("ttft_max", c)) == (900, 1400)
    assert (value("lag_mean", c), value("lag_max", c)) == (500, 1000)
    assert (value("lag_wait_max", c), value("lag_client_max", c)) == (1000, 0)
    assert attainment(c, ALL, bounds(ttft=700)).share == pytest.approx(2 / 6)
    assert attainment(c, ALL, bounds(ttft_sent=700)).share == 1


def straddling() -> Cell:
    stamps = {0: [900, 950, 1000, 1050, 1100], 200: [1200, 1250, 1300]}
    stamps |= {1100: [1400, 1450, 1500, 1550], 1700: [1950, 2000, 2050, 2100]}
    return cell([record(i, due, events=events) for i, (due, events) in enumerate(stamps.items())])


def test_tokens_belong_by_event_time_and_requests_by_due_time() -> None:
    w = Window(ns(1000), ns(2000), 0, 0, "")
    assert value("tokens_per_second", straddling(), w) == 11
    got = compute("ttft_mean", straddling(), w)
    assert (got.value, got.n) == (275, 2)  # 300 and 250; the first two left in warm-up
    assert compute("itl_mean", straddling(), w).n == 6
    # A prompt is credited at its first token: requests 1, 2, 3.
    assert value("total_tokens_per_second", straddling(), w) == 311


def test_a_long_tail_is_in_the_whole_run_and_not_in_the_window() -> None:
    rows = [record(i, events=np.arange(1, 401) * 25.0) for i in range(7)]
    c = cell([*rows, record(7, events=np.arange(1, 2001) * 25.0)])
    # Tokens evenly over (0, 10 s]; the window is half-open the other way round.
    assert value("tokens_per_second", c, Window(ns(0) + 1, ns(10_000) + 1, 0, 0, "")) == 320
    assert value("tokens_per_second_run", c) == pytest.approx(96)
    assert value("in_flight", c, Window(ns(0), ns(50_000), 0, 0, "")) == pytest.approx(2.4)
    assert value("in_flight", c, Window(ns(0), ns(10_000), 0, 0, "")) == 8


def burst_start(after: int) -> Cell:
    """Ten slots that start together on a cold engine: ten TTFTs of 40.1 to 57.6 s, then `after` of 0.60 to 1.38 s."""
    free, rows = [0.0] * 10, []
    for i, ttft in enumerate([*np.linspace(40_100, 57_600, 10), *np.linspace(600, 1380, after)]):
        slot = int(np.argmin(free))
        rows.append(record(i, free[slot], events=[free[slot] + ttft]))
        free[slot] += ttft
    return cell(rows, load={"kind": "closed", "concurrency": 10})


def test_the_first_wave_is_in_the_whole_run_and_not_in_the_window() -> None:
    c = burst_start(after=190)
    w = windows.of(c)
    assert (w.first_wave, w.state) == (10, windows.WARMING)  # the short ones grow from 0.60 to 1.38 s: a drift
    assert 600 < value("ttft_p50", c, w) < value("ttft_max", c, w) <= 1380
    assert value("ttft_p99", c, windows.whole(c)) > 40_000


def test_a_run_that_ends_with_its_first_wave_says_so_and_shows_the_wave() -> None:
    c = burst_start(after=90)  # nine slots do the rest while the slowest of the wave still waits
    w = windows.of(c)
    assert w.state == windows.TOO_SHORT
    p50, p95, p99 = (value(f"ttft_{q}", c, w) for q in ("p50", "p95", "p99"))
    assert 600 <= p50 <= 1380
    assert 40_000 < p95 < p99 < 58_000


def bounds(op: Literal["<=", ">="] = "<=", **limits: float) -> tuple[Bound, ...]:
    return tuple(Bound(name, op, float(limit)) for name, limit in limits.items())


def judged(i: int, ttft: float, tpot: float | None, outcome: str = "ok") -> Record:
    events = [ttft] if tpot is None else [ttft, ttft + tpot]
    return record(i, events=events, outcome=outcome, end=None if outcome == "ok" else 180)


def test_attainment_counts_failures_and_leaves_cut_requests_undecided() -> None:
    rows = [judged(1, 150, 20), judged(2, 200, 30), judged(3, 250, 10), judged(4, 100, None), judged(5, 90, 31)]
    rows += [judged(6, 80, None, "failed"), judged(7, 50, None, "cut_at_end"), record(8, outcome="failed", end=10_000)]
    c, ten_s = cell(rows), Window(ns(0), ns(10_000), 0, 0, "")
    got = attainment(c, ten_s, bounds(ttft=200, tpot=30))
    assert (got.met, got.decided, got.undecided) == (3, 7, 1)
    assert (got.share, got.lower, got.upper) == (3 / 7, 3 / 8, 4 / 8)
    assert got.interval is not None
    assert got.interval.low < 3 / 7 < got.interval.high
    limits = bounds(ttft=200.0, tpot=30.0)
    assert value("slo_attainment", c, ten_s, limits=limits) == pytest.approx(0.428571, abs=1e-6)
    assert value("goodput", c, ten_s, limits=limits) == pytest.approx(0.3)


def test_a_cut_request_that_already_broke_a_limit_is_decided() -> None:
    cut = [record(0, end=900, outcome="cut_at_end"), record(1, events=[300], end=900, outcome="cut_at_end")]
    c = cell([*cut, record(2, events=[10])])
    assert attainment(c, ALL, bounds(ttft=500))[:3] == (1, 2, 1)  # the first has waited 900 ms without a token
    assert attainment(c, ALL, bounds(ttft=200))[:3] == (1, 3, 0)
    assert attainment(c, ALL, bounds(e2e=500))[:3] == (1, 3, 0)
    assert attainment(c, ALL, bounds(e2e=1000))[:3] == (1, 1, 2)


def test_a_figure_that_burst_delivery_hid_is_neither_met_nor_missed() -> None:
    c = cell([record(0, events=[10, 10, 10]), record(1, events=[10])])
    got = attainment(c, ALL, bounds(tpot=1000))
    assert got[:3] == (1, 1, 1)
    assert (got.lower, got.upper, got.hidden) == (0.5, 1.0, 1)
    assert attainment(c, ALL, bounds(tpot=1000, ttft=9))[:3] == (0, 2, 0)  # late all the same
    assert compute("tpot_mean", c, ALL).not_applicable == {"under 2 tokens": 1, "one distinct event stamp": 1}


def test_limits_of_things_where_more_is_better_are_floors() -> None:
    c = cell([record(0, events=[0, 10]), record(1, events=[0, 50])])
    assert attainment(c, ALL, bounds(">=", output_speed=50)).met == 1
    with pytest.raises(BenchError, match="no such series"):
        attainment(c, ALL, bounds(ttftt=50))


def steady(drop_every: int = 0) -> Cell:
    """An arrival every 0.5 s that stays 3 s, and a gauge that saw all of them."""
    rows = [record(i, 500 * i, events=[500 * i + 3000]) for i in range(40)]
    return cell([r for r in rows if not drop_every or r.index % drop_every], gauge_of(rows))


def test_littles_law_holds_for_whole_records_and_names_lost_ones() -> None:
    w = Window(ns(5000), ns(15_000), 0, 0, "")
    assert (value("arrival_rate", steady(), w), value("e2e_mean", steady(), w)) == (2, 3000)
    assert value("in_flight", steady(), w) == value("concurrency_effective", steady(), w) == 6
    run = Window(ns(0), ns(22_500), 0, 0, "")
    assert value("in_flight", steady(), run) == pytest.approx(5.3333, abs=1e-4)
    assert value("arrival_rate", steady(), run) == pytest.approx(1.7778, abs=1e-4)
    assert identities.identities(steady(), w) == []
    lost, apart = identities.identities(steady(drop_every=4), w)
    assert lost.startswith("records are incomplete: the driver's gauge saw 40 requests begin and 40 end, 30 are")
    assert "25.0% apart" in apart


def test_a_gauge_that_counts_from_the_hand_over_is_no_broken_identity() -> None:
    # Each is handed over at its due time, sent 40 ms later, and the driver hears of its end 2 ms after the read.
    rows = [record(i, 100 * i, sent=100 * i + 40, ready_ns=ns(100 * i), events=[100 * i + 90]) for i in range(50)]
    gauge = [edge for i in range(50) for edge in ((100.0 * i, 1), (100.0 * i + 92, 0))]
    assert identities.identities(cell(rows, gauge), windows.whole(cell(rows))) == []


@pytest.mark.parametrize("served", [0, 5])
def test_refused_connects_have_no_stay_that_the_gauge_could_miss(served: int) -> None:
    # Due and free to leave at once, handed over 3 ms later by a busy loop, refused within 1 ms; some others answered.
    refused = {"outcome": "failed", "error_kind": "connect_error", "sent": 0.0, "sent_ns": 0}
    rows = [record(i, 100 * i, ready_ns=ns(100 * i), end=100 * i + 4, **refused) for i in range(50)]
    rows[:served] = [record(i, 100 * i, events=[100 * i + 90]) for i in range(served)]
    stays = [(100.0 * i, 100.0 * i + 90) if i < served else (100.0 * i + 3, 100.0 * i + 4) for i in range(50)]
    gauge = [edge for begun, ended in stays for edge in ((begun, 1), (ended, 0))]
    w = windows.whole(cell(rows))
    assert identities.identities(cell(rows, gauge), w) == []
    assert identities.little(cell(rows, gauge), w).agrees
    # What was answered is owed all the same: a gauge that saw none of it is no edge.
    blind = [(at, 0 if at < 100.0 * served else up) for at, up in gauge]
    assert identities.little(cell(rows, blind), w).agrees == (not served)


def test_counts_that_do_not_add_up_are_named() -> None:
    c = cell([record(0, events=[1]), record(0, 5, events=[6]), record(2, outcome="dropped", sent_ns=ns(3))])
    broken = " | ".join(identities.identities(c, ALL, {"counts": {"ok": 3, "failed": 0}}))
    assert "1 dropped requests were sent" in broken
    assert "1 requests of the plan are recorded twice" in broken
    assert "the driver counted {'ok': 3" in broken
    counts = {"ok": 1, "failed": 0, "cancelled": 0, "cut_at_end": 0, "dropped": 0}
    assert identities.identities(cell([record(events=[1])]), ALL, {"counts": counts}) == []
    assert "others: lost" in identities.identities(cell([record(outcome="lost", events=[1])]), ALL)[0]


def test_gaps_of_several_choices_are_taken_within_a_choice() -> None:
    c = cell([record(events=[10, 11, 30, 36], event_choice=[0, 1, 0, 1])])
    assert compute("itl_mean", c, ALL).n == 2
    assert (value("itl_min", c), value("itl_max", c)) == (20, 25)


def test_an_answer_that_was_not_streamed_has_an_end_and_no_first_token() -> None:
    c = cell([record(0, events=[], end=800, tokens_out=16)])
    assert (value("e2e_mean", c), value("normalized_latency_mean", c)) == (800, 50)
    for name in ("ttft", "tpot", "itl", "ttfo", "stall"):
        got = compute(f"{name}_p50", c, ALL)
        assert (got.value, got.reason) == (None, "not applicable: not streamed (1)")
    assert value("tokens_per_second", c, Window(ns(0), ns(800), 0, 0, "")) == 0
    assert value("tokens_per_second", c, Window(ns(800), ns(1800), 0, 0, "")) == 16


def test_reasoning_comes_before_the_answer() -> None:
    c = cell([record(events=[10, 20, 30], first_answer_ns=ns(30)), record(1, events=[5], first_answer_ns=0)])
    got = compute("ttfo_mean", c, ALL)
    assert (got.value, got.not_applicable) == (30, {"no answer token": 1})


def test_deadlines_with_slack_and_without() -> None:
    # D_ttft 100, D_tpot 20. 90: met, slack 10. 105: 15 <= 30, slack 15. 160: 55 > 35 by 20: 1 + 1 missed. 175: met.
    c = cell([record(due=1000, events=[1090, 1105, 1160, 1175])])
    assert value("fluidity_mean", c, deadlines=(100, 20)) == pytest.approx(3 / 5)
    assert value("on_time_share_mean", c, deadlines=(100, 20)) == pytest.approx(2 / 4)
    assert compute("fluidity_mean", c, ALL).reason == "not applicable: no deadlines were given: --deadlines (1)"
    # An event of three tokens at 130: late by 30 for i = 0 (100), by 10 for i = 1 (120), in time for i = 2 (140).
    c = cell([record(events=[130, 150], tokens_out=4, event_tokens=[3, 1])])
    assert value("on_time_share_mean", c, deadlines=(100, 20)) == pytest.approx(2 / 4)
    # Late by 30: 2 missed; its two others leave 40 of slack, so that 20 ms later is in time.
    assert value("fluidity_mean", c, deadlines=(100, 20)) == pytest.approx(3 / 5)


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(1, 400), max_size=12), min_size=1, max_size=5))
def test_fluidity_of_many_requests_is_that_of_each(gaps: list[list[int]]) -> None:
    d_ttft, d_tpot = 100.0, 20.0
    rows = [record(i, 7 * i, events=(7 * i + np.cumsum(g)).tolist(), end=9999) for i, g in enumerate(gaps)]
    got = SERIES["fluidity"].of(cell(rows), Context(deadlines=(d_ttft, d_tpot))).values
    for one, share in zip(gaps, got, strict=True):
        met = total = slack = 0.0
        for k, gap in enumerate(one):
            late = gap - (d_tpot if k else d_ttft) - slack
            met, total = (met + 1, total + 1) if late <= 0 else (met, total + 1 + late // d_tpot)
            slack = max(-late, 0)
        assert share == pytest.approx(met / total) if one else np.isnan(share)


def test_the_other_figures_of_a_cell() -> None:
    rows = [record(0, events=[10, 20], tokens_in=200, tokens_cached=50), record(1, 10, events=[30], tokens_cached=0)]
    rows += [record(2, 20, events=[40, 50, 60], outcome="cancelled"), record(3, 30, outcome="dropped")]
    rows += [record(4, 40, events=[45, 50], outcome="failed"), record(5, 50, events=[60, 70], outcome="cut_at_end")]
    c, w = cell(rows), Window(ns(0), ns(100), 0, 0, "")
    expected = {
        "tokens_per_second": 50,  # ok 2 + 1, cut 2
        "total_tokens_per_second": 4050,  # + 200 + 100 + 100 prompt tokens
        "wasted_tokens": 5,
        "requests_per_second": 20,
        "arrival_rate": 60,
        "error_rate": 1 / 3,
        "cancel_rate": 1 / 6,
        "drop_rate": 1 / 6,
        "cached_prompt_share": 50 / 300,
        "in_system": (20 + 20 + 40 + 10 + 20) / 100,
        "concurrency_effective": 1.1,
        "payload_mbit_per_second": 12 * 8 / 1e6 / 0.1,
        "payload_share": 12 / 600,
        "zero_gap_share": 0,
    }
    for name, figure in expected.items():
        assert value(name, c, w) == pytest.approx(figure), name


def test_planned_prompts_in_a_figure_are_labelled() -> None:
    silent = record(1, events=[1, 2], tokens_in=-1)
    c = cell([record(0, events=[1, 2, 3]), silent])
    assert compute("total_tokens_per_second", c, ALL).labels == ("prompt tokens as planned",)
    assert compute("tokens_per_second", c, ALL).labels == ()
    cut = record(1, events=[1, 2], tokens_in=-1, outcome="cut_at_end")  # its usage would have come at its end
    assert compute("total_tokens_per_second", cell([record(0, events=[1, 2, 3]), cut]), ALL).labels == ()


def test_the_servers_own_account_is_shown_as_it_is() -> None:
    c = cell([record(0, events=[1], server_queue_ms=4.0, server_prefill_ms=9.0, server_ttft_ms=13.5)])
    assert [value(f"{s}_mean", c) for s in ("queue", "prefill", "server_ttft", "decode")] == [4, 9, 13.5, None]


def test_estimated_tokens_are_labelled_wherever_they_enter() -> None:
    c = cell([record(0, events=[1, 2, 3], tokens_out_from="events"), record(1, events=[1, 2])])
    for name in ("tpot_mean", "tokens_per_second", "normalized_latency_p50"):
        assert "estimated from events" in compute(name, c, ALL).labels
    assert compute("ttft_mean", c, ALL).labels == ()


def test_p99_of_71_is_labelled_and_bounded_by_nothing() -> None:
    got = compute("ttft_p99", cell([record(i, i, events=[2 * i + 1]) for i in range(71)]), ALL)
    assert got.labels == ("p99 ≈ max (n=71 < 101)",)
    assert got.interval is None
    assert "no upper bound" in got.refusal
    assert compute("ttft_p99", cell([record(i, i, events=[2 * i + 1]) for i in range(101)]), ALL).labels == ()


@pytest.mark.parametrize("name", metrics.names())
def test_a_growing_backlog_marks_every_figure_but_what_was_offered(name: str) -> None:
    w = Window(ns(0), ns(100), 0, 0, "", state=windows.GROWING)
    got = compute(name, closed_loop(10, 2), w, Context(bounds(ttft=100), (100.0, 20.0)))
    marked = "depends on run length" in got.labels
    assert marked == (got.value is not None and name != "arrival_rate")
    settled = compute(name, closed_loop(10, 2), Window(ns(0), ns(100), 0, 0, ""))
    assert "depends on run length" not in settled.labels


@pytest.mark.parametrize("name", ["slo_attainment", "goodput", "fluidity_mean", "on_time_share_mean"])
def test_what_needs_limits_names_the_flag_that_gives_them(name: str) -> None:
    got = compute(name, closed_loop(10, 2), ALL)
    assert "limits were given: --slo" in got.reason or "deadlines were given: --deadlines" in got.reason


def test_percentiles_of_few_are_known_as_such() -> None:
    c = closed_loop(30, 3)
    few = {v.name: v.few for v in metrics.compute_all(["ttft_p50", "ttft_p95", "ttft_p99", "ttft_max"], c, ALL)}
    assert few == {"ttft_p50": False, "ttft_p95": False, "ttft_p99": True, "ttft_max": False}
    assert compute("ttft_p50", cell([record(events=[5])]), ALL).few


@pytest.mark.parametrize("name", metrics.names())
def test_every_name_has_a_figure_or_a_reason_on_any_cell(name: str) -> None:
    context = Context(bounds(ttft=100), (100.0, 20.0))
    for c in (closed_loop(30, 3), cell([]), cell([record(outcome="failed", end=5)]), cell([record(outcome="dropped")])):
        got = compute(name, c, windows.whole(c), context)
        assert (got.value is None) == bool(got.reason)
        assert got.value is None or np.isfinite(got.value)


stays = st.lists(st.floats(0.001, 1e5), min_size=1, max_size=60)


@given(stays, st.integers(0, 5))
def test_percentiles_are_ordered_in_both_readings(ttfts: list[float], failures: int) -> None:
    rows = [record(i, i, events=[i + t]) for i, t in enumerate(ttfts)]
    c = cell([*rows, *(record(100 + i, i, outcome="failed", end=i + 1) for i in range(failures))])
    got = metrics.compute_all([f"ttft_{r}" for r in ("min", "p50", "p90", "p95", "p99", "p99_9", "max")], c, ALL)
    assert [v.value for v in got] == sorted(v.value for v in got)
    readings = [np.inf if v.all_requests == "error" else v.all_requests for v in got[1:-1]]
    assert readings == sorted(readings)
    assert all(r >= v.value for r, v in zip(readings, got[1:-1], strict=True))


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(BenchError, match=r"nearest: .*ttft_p95"):
        metrics.parse("ttft_95")
    with pytest.raises(BenchError, match="needs a reducer"):
        metrics.parse("ttft")
    with pytest.raises(BenchError, match="tokens_per_second"):
        metrics.parse("token_per_second")
    with pytest.raises(BenchError, match="unknown; known"):
        metrics.parse("")
    assert metrics.parse("e2e_p99_9") == ("e2e_p99_9", "e2e", "p99_9")


def short(n: int = 1000, lose: int = 0, late: float = 0.5) -> Cell:
    """`n` requests of 1 ms, one each 2 ms, of which the last `lose` left no record; the gauge saw all of them."""
    rows = [record(i, 2 * i, events=[2 * i + 1]) for i in range(n)]
    return cell(rows[: n - lose], gauge_of(rows, late), plan={"requests": n})


def test_lost_records_are_found_however_short_their_requests_were() -> None:
    w = Window(ns(0), ns(2000), 0, 0, "")
    assert identities.identities(short(), w, {"reason": "exhausted"}) == []
    lost, apart = identities.identities(short(lose=1), w, {"reason": "exhausted"})
    seen = "the driver's gauge saw 1000 requests begin and 1000 end, 999 are recorded"
    assert lost == f"records are incomplete: 1000 requests were planned, 999 are recorded; {seen}"
    assert apart.startswith("over the window the driver had 0.75 in flight on average, the records account for 0.4995")
    # The plan was not gone through: the gauge alone counts.
    assert identities.identities(short(lose=1), w, {"reason": "interrupted"})[0] == f"records are incomplete: {seen}"


def test_turns_that_were_never_due_are_no_lost_records() -> None:
    c = cell([record(i, i, events=[i + 1]) for i in range(7)], plan={"requests": 10})
    assert identities.identities(c, ALL, {"reason": "exhausted", "turns_not_sent": 3}) == []
    (broken,) = identities.identities(c, ALL, {"reason": "exhausted", "turns_not_sent": 2})
    assert broken.endswith("10 requests were planned, of which 2 turns never became due, 7 are recorded")


def test_a_blocked_event_loop_is_not_taken_for_lost_records() -> None:
    (broken,) = identities.identities(short(late=40.0), Window(ns(0), ns(2000), 0, 0, ""))
    assert broken.endswith(
        "apart), though none is lost by its count: it heard late of starts or ends, or its stamps are wrong"
    )
    assert "incomplete" not in broken


def test_littles_law_is_told_with_its_edges_and_the_gauge() -> None:
    w = Window(ns(5000), ns(15_000), 0, 0, "")
    assert identities.little(steady(), w).text == ("Little: 2/s x 3 s = 6, in flight 6 on average (gauge), edges +0.0%")
    late = identities.little(short(late=0.5), Window(ns(0), ns(2000), 0, 0, ""))
    assert "in flight 0.75 on average (gauge) and 0.5 on average (records)" in late.text
    run = Window(ns(0), ns(20_000), 0, 0, "")  # the stays of the last five end up to 2.5 s after it
    assert identities.little(cell([record(i, 500 * i, events=[500 * i + 3000]) for i in range(40)]), run).text == (
        "Little: 2/s x 3 s = 6, in flight 5.625 on average (records), edges +6.7%"
    )


TOKENS = ("tokens_per_second", "total_tokens_per_second", "tokens_per_second_run")


def test_unknown_tokens_are_no_zero() -> None:
    rows = [record(i, 10 * i, end=10 * i + 5, tokens_out=-1, tokens_out_from="") for i in range(3)]
    c = cell([*rows, record(3, 50, end=60, tokens_out=4)])
    for name in TOKENS:
        got = compute(name, c, ALL)
        assert (got.value, got.reason) == (None, "how many tokens they have is unknown of 3 of 4 answers")
    assert value("wasted_tokens", c) == 0
    # Outside the window nothing is unknown.
    assert value("tokens_per_second", c, Window(ns(55), ns(155), 0, 0, "")) == 40


def test_prompts_of_unknown_length_are_no_zero() -> None:
    c = cell([record(0, events=[5], tokens_in=-1, planned_in=-1), record(1, 1, events=[6])])
    assert compute("total_tokens_per_second", c, ALL).reason == "how long they are is unknown of 1 of 2 prompts"


PER_TOKEN = ("tpot_mean", "tpot_decode_mean", "output_speed_mean", "normalized_latency_mean")


def test_tokens_of_several_choices_are_not_those_of_one() -> None:
    two = record(events=[10, 11, 30, 36], event_choice=[0, 1, 0, 1], event_tokens=[1, 1, 1, 1])
    for name in PER_TOKEN:
        assert compute(name, cell([two]), ALL).reason == "not applicable: several choices (1)"
    assert value("stall_max", cell([two])) == 25
    assert compute("tpot_mean", cell([two, record(1, events=[0, 10])]), ALL).value == 10
    assert attainment(cell([two]), ALL, bounds(tpot=1000)).met == 0  # there is such a time, and nobody knows it
    once = record(events=[10, 11], event_choice=[0, 1])
    assert compute("stall_mean", cell([once]), ALL).reason == "not applicable: one token a choice (1)"


def test_estimates_of_wasted_tokens_are_those_of_its_own_requests() -> None:
    ok = record(0, events=[1, 2], tokens_out_from="events")
    c = cell([ok, record(1, events=[1, 2], outcome="failed")])
    assert compute("wasted_tokens", c, ALL).labels == ()
    c = cell([record(0, events=[1, 2]), record(1, events=[1, 2], outcome="failed", tokens_out_from="events")])
    assert compute("wasted_tokens", c, ALL).labels == ("estimated from events",)
    assert compute("tokens_per_second", c, ALL).labels == ()


def test_lag_is_waiting_connecting_and_the_clients_own() -> None:
    c = cell([record(due=0, sent=60, ready_ns=ns(10), connect_ns=30_000_000, events=[70])])
    assert [value(f"{name}_max", c) for name in ("lag", "lag_wait", "lag_connect", "lag_client")] == [60, 10, 30, 20]
    again = record(sent=900, ready_ns=ns(0), attempts=2, first_attempt="connect_error", events=[901])
    assert compute("lag_client_max", cell([again]), ALL).reason == "not applicable: connecting was retried (1)"


def case_30() -> Cell:
    """`--retries 1`: four 503, two 429 with Retry-After: 1, four answers in 100 ms at once."""
    rows = [
        record(i, i, events=[i + 600], attempts=2, first_attempt="http_503", retry_wait_ns=5 * 10**8) for i in range(4)
    ]
    rows += [record(i, i, events=[i + 1100], attempts=2, first_attempt="http_429", retry_wait_ns=10**9) for i in (4, 5)]
    return cell([*rows, *(record(i, i, events=[i + 100]) for i in range(6, 10))])


def test_first_attempts_stay_visible_behind_retries() -> None:
    c = case_30()
    assert (value("error_rate", c), value("first_attempt_success", c)) == (0, 0.4)
    assert value("ttft_p50", c) == 600
    found = outcomes.attempts(c, np.ones(10, bool))
    assert found == (10, 4, 16, 4.0)
    assert found.text.startswith("4 of 10 ok at the first attempt; 16 attempts in all, 4 s of waiting")
    assert outcomes.attempts(closed_loop(10, 2), np.ones(10, bool)) is None


def test_failures_are_listed_by_kind_and_status() -> None:
    def failed(i: int, kind: str, status: int) -> Record:
        return record(i, i, outcome="failed", error_kind=kind, status=status, error=f"{kind} {i}", end=i)

    kinds = [("http_5xx", 502), ("http_5xx", 500), ("http_5xx", 500), ("rejected", 503), ("rejected", 429)]
    kinds += [
        ("rejected", 503),
        ("empty_output", 200),
        ("server_error_in_stream", 200),
        ("server_error_in_stream", 500),
    ]
    found = outcomes.failures(cell([failed(i, *kind) for i, kind in enumerate(kinds)]))
    assert [f.text for f in found] == [
        "empty_output 1",
        "http_5xx 500 x2, 502 x1",
        "rejected 503 x2, 429 x1",
        "server_error_in_stream 2 (500 x1)",
    ]
    assert [f.first_error for f in found] == ["empty_output 6", "http_5xx 0", "rejected 3", "server_error_in_stream 7"]


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 90), max_size=8), st.integers(0, 60)), min_size=1, max_size=8),
    st.integers(0, 120),
    st.integers(1, 120),
    st.booleans(),
)
def test_windows_and_gaps_of_many_batches_are_those_of_a_plain_loop(
    shapes: list[tuple[list[int], int]], start: int, long: int, choices: bool
) -> None:
    rows = [
        record(
            i,
            due,
            events=sorted(due + e for e in events),
            end=due + 99,
            tokens_out=3 * len(events),
            asked_out=30,  # of a single pass no length is asked
            event_choice=[k % 2 for k in range(len(events))] if choices and i % 2 else [],
        )
        for i, (events, due) in enumerate(shapes)
    ]
    batches = pa.concat_tables([cell([r]).table for r in rows])
    c, w = from_table(batches, {}), Window(ns(start), ns(start + long), 0, 0, "")
    stamps = [[(at - ns(0)) / 1e6 for at in r.event_ns] for r in sorted(rows, key=lambda r: (r.due_ns, r.index))]
    assert events_in(c, w).tolist() == [sum(start <= at < start + long for at in each) for each in stamps]
    held = 3 * sum(start <= at < start + long for each in stamps for at in each)
    assert value("tokens_per_second", c, w) == pytest.approx(held / long * 1000)
    expected = []
    for r in sorted(rows, key=lambda r: (r.due_ns, r.index)):
        for choice in (0, 1):
            mine = [
                at for at, of in zip(r.event_ns, r.event_choice or [0] * len(r.event_ns), strict=True) if of == choice
            ]
            if len(set(r.event_ns)) > 1:
                expected += [(r.index, (b - a) / 1e6) for a, b in pairwise(mine)]
    column = SERIES["itl"].of(c, Context())
    assert list(zip(c["index"][column.rows].tolist(), column.values.tolist(), strict=True)) == expected


def test_a_large_piece_is_worked_through_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [record(i, 10 * i, events=[10 * i + k * (i + 1) for k in range(i % 4)], end=500) for i in range(30)]
    names = ["itl_mean", "itl_p50", "stall_mean", "tokens_per_second", "zero_gap_share"]
    w = Window(ns(35), ns(155), 0, 0, "")
    whole = metrics.compute_all(names, cell(rows), w)
    monkeypatch.setattr(columns, "PIECE_EVENTS", 5)
    parts = cell(rows)
    assert max(len(piece.ns) for piece in parts.pieces()) <= 5
    assert metrics.compute_all(names, parts, w) == whole
    np.testing.assert_array_equal(parts.event_ns, cell(rows).event_ns)


def counted(*tokens: float, at: Sequence[float] = (-100, 5000, 50_000)) -> list[Point]:
    return [Point(ns(t), {"vllm:generation_tokens_total": n}) for t, n in zip(at, tokens, strict=True)]


def test_tokens_of_the_records_are_held_against_the_servers_counter() -> None:
    c = cell([record(i, 100 * i, events=[100 * i + 10.0, 100 * i + 20]) for i in range(50)])  # 100 tokens
    check = identities.counter_mismatch
    assert check(c, []) == check(c, [[]]) == check(c, [counted(7, 50, 107)]) == check(c, [counted(0, 50, 102)]) == ""
    assert check(c, [counted(0, 50, 103)]) == (
        "the server counted 103 tokens made meanwhile, the records hold 100 (+3.0%)"
    )
    assert "(-50.0%)" in check(c, [counted(0, 20, 50)])
    assert check(c, [counted(0, 20, 50), counted(0, 30, 50)]) == ""  # two servers of one target
    assert check(c, [counted(0, 20, 50, at=(50, 60, 50_000))]) == ""  # its first scrape came too late to tell
    assert check(c, [counted(90, 20, 50)]) == ""  # it was started anew
    cut = cell([record(0, 0, events=[10.0], outcome="cut_at_end", end=20.0)])
    assert check(cut, [counted(0, 20, 50)]) == ""
