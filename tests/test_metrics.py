"""Every definition of METRICS.md, worked by hand on a few records."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_bench import metrics, windows
from llm_bench.errors import BenchError
from llm_bench.metrics import compute
from llm_bench.records import Cell, Record
from llm_bench.series import SERIES, Context
from llm_bench.slo import attainment
from llm_bench.windows import Window
from tests.sample import cell, closed_loop, ns, record

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
    assert attainment(c, ALL, {"ttft": 700}).share == pytest.approx(2 / 6)
    assert attainment(c, ALL, {"ttft_sent": 700}).share == 1


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
    assert (w.first_wave, w.state) == (10, "")
    assert 600 < value("ttft_p50", c, w) < value("ttft_max", c, w) <= 1380
    assert value("ttft_p99", c, windows.whole(c)) > 40_000


def test_a_run_that_ends_with_its_first_wave_says_so_and_shows_the_wave() -> None:
    c = burst_start(after=90)  # nine slots do the rest while the slowest of the wave still waits
    w = windows.of(c)
    assert w.state == windows.TOO_SHORT
    p50, p95, p99 = (value(f"ttft_{q}", c, w) for q in ("p50", "p95", "p99"))
    assert 600 <= p50 <= 1380
    assert 40_000 < p95 < p99 < 58_000


def judged(i: int, ttft: float, tpot: float | None, outcome: str = "ok") -> Record:
    events = [ttft] if tpot is None else [ttft, ttft + tpot]
    return record(i, events=events, outcome=outcome, end=None if outcome == "ok" else 180)


def test_attainment_counts_failures_and_leaves_cut_requests_undecided() -> None:
    rows = [judged(1, 150, 20), judged(2, 200, 30), judged(3, 250, 10), judged(4, 100, None), judged(5, 90, 31)]
    rows += [judged(6, 80, None, "failed"), judged(7, 50, None, "cut_at_end"), record(8, outcome="failed", end=10_000)]
    c, ten_s = cell(rows), Window(ns(0), ns(10_000), 0, 0, "")
    got = attainment(c, ten_s, {"ttft": 200, "tpot": 30})
    assert (got.met, got.decided, got.undecided) == (3, 7, 1)
    assert (got.share, got.lower, got.upper) == (3 / 7, 3 / 8, 4 / 8)
    assert got.each == {"ttft": (4, 7), "tpot": (3, 6)}
    assert got.interval is not None
    assert got.interval.low < 3 / 7 < got.interval.high
    limits = {"ttft": 200.0, "tpot": 30.0}
    assert value("slo_attainment", c, ten_s, limits=limits) == pytest.approx(0.428571, abs=1e-6)
    assert value("goodput", c, ten_s, limits=limits) == pytest.approx(0.3)


def test_a_cut_request_that_already_broke_a_limit_is_decided() -> None:
    cut = [record(0, end=900, outcome="cut_at_end"), record(1, events=[300], end=900, outcome="cut_at_end")]
    c = cell([*cut, record(2, events=[10])])
    assert attainment(c, ALL, {"ttft": 500})[:3] == (1, 2, 1)  # the first has waited 900 ms without a token
    assert attainment(c, ALL, {"ttft": 200})[:3] == (1, 3, 0)
    assert attainment(c, ALL, {"e2e": 500})[:3] == (1, 3, 0)
    assert attainment(c, ALL, {"e2e": 1000})[:3] == (1, 1, 2)


def test_a_figure_that_burst_delivery_hid_is_not_met() -> None:
    c = cell([record(0, events=[10, 10, 10]), record(1, events=[10])])
    assert attainment(c, ALL, {"tpot": 1000})[:3] == (1, 2, 0)
    assert compute("tpot_mean", c, ALL).not_applicable == {"under 2 tokens": 1, "one distinct event stamp": 1}


def test_limits_of_things_where_more_is_better_are_floors() -> None:
    c = cell([record(0, events=[0, 10]), record(1, events=[0, 50])])
    assert attainment(c, ALL, {"output_speed": 50}).met == 1
    with pytest.raises(BenchError, match="no such series"):
        attainment(c, ALL, {"ttftt": 50})


def steady(drop_every: int = 0) -> Cell:
    """An arrival every 0.5 s that stays 3 s, and a gauge that saw all of them."""
    rows = [record(i, 500 * i, events=[500 * i + 3000]) for i in range(40)]
    at_ns, level = windows.in_flight(cell(rows))
    gauge = [((t - ns(0)) / 1e6, int(n)) for t, n in zip(at_ns.tolist(), level, strict=True)]
    return cell([r for r in rows if not drop_every or r.index % drop_every], gauge)


def test_littles_law_holds_for_whole_records_and_names_lost_ones() -> None:
    w = Window(ns(5000), ns(15_000), 0, 0, "")
    assert (value("arrival_rate", steady(), w), value("e2e_mean", steady(), w)) == (2, 3000)
    assert value("in_flight", steady(), w) == value("concurrency_effective", steady(), w) == 6
    run = Window(ns(0), ns(22_500), 0, 0, "")
    assert value("in_flight", steady(), run) == pytest.approx(5.3333, abs=1e-4)
    assert value("arrival_rate", steady(), run) == pytest.approx(1.7778, abs=1e-4)
    assert metrics.identities(steady(), w) == []
    (broken,) = metrics.identities(steady(drop_every=4), w)
    assert broken.startswith("records are incomplete")
    assert "25.0% apart" in broken


def test_a_gauge_that_counts_from_the_hand_over_is_no_broken_identity() -> None:
    # Each is handed over at its due time, sent 40 ms later, and the driver hears of its end 2 ms after the read.
    rows = [record(i, 100 * i, sent=100 * i + 40, ready_ns=ns(100 * i), events=[100 * i + 90]) for i in range(50)]
    gauge = [edge for i in range(50) for edge in ((100.0 * i, 1), (100.0 * i + 92, 0))]
    assert metrics.identities(cell(rows, gauge), windows.whole(cell(rows))) == []


def test_counts_that_do_not_add_up_are_named() -> None:
    c = cell([record(0, events=[1]), record(0, 5, events=[6]), record(2, outcome="dropped", sent_ns=ns(3))])
    broken = " | ".join(metrics.identities(c, ALL, {"counts": {"ok": 3, "failed": 0}}))
    assert "1 dropped requests were sent" in broken
    assert "1 requests of the plan are recorded twice" in broken
    assert "the driver counted {'ok': 3" in broken
    counts = {"ok": 1, "failed": 0, "cancelled": 0, "cut_at_end": 0, "dropped": 0}
    assert metrics.identities(cell([record(events=[1])]), ALL, {"counts": counts}) == []
    assert "others: lost" in metrics.identities(cell([record(outcome="lost", events=[1])]), ALL)[0]


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
    assert compute("fluidity_mean", c, ALL).reason == "not applicable: no deadlines given (1)"
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


def test_a_growing_backlog_marks_the_percentiles() -> None:
    w = Window(ns(0), ns(100), 0, 0, "", state=windows.GROWING)
    assert "depends on run length" in compute("ttft_p50", closed_loop(10, 2), w).labels


@pytest.mark.parametrize("name", metrics.names())
def test_every_name_has_a_figure_or_a_reason_on_any_cell(name: str) -> None:
    context = Context({"ttft": 100.0}, (100.0, 20.0))
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
