"""Bins and slices add up to the figures of the whole, whatever the records are."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from llm_bench import metrics, series, timeline, windows
from llm_bench.columns import Cell
from llm_bench.records import Record
from llm_bench.timeline import Bins
from llm_bench.windows import Window
from tests.sample import cell, closed_loop, gauge_of, ns, record

OUTCOMES = ("ok", "ok", "ok", "failed", "cut_at_end", "cancelled", "dropped")


@st.composite
def loads(draw: st.DrawFn) -> tuple[Cell, Window]:
    """A cell of any outcomes, with and without sizes of events, and any window in it."""
    rows = []
    for i in range(draw(st.integers(1, 25))):
        due = draw(st.integers(0, 2000))
        outcome = draw(st.sampled_from(OUTCOMES))
        gaps = draw(st.lists(st.integers(0, 300), max_size=6)) if outcome != "dropped" else []
        events = (due + 1 + np.cumsum(gaps)).tolist()
        sizes = {"event_tokens": [1 + k % 3 for k in range(len(events))]} if events and draw(st.booleans()) else {}
        out = sum(sizes["event_tokens"]) if sizes else draw(st.integers(0, 9))
        rows.append(
            record(i, due, events=events, end=max([due + 2, *events]), outcome=outcome, tokens_out=out, **sizes)
        )
    start = draw(st.integers(0, 1500))
    end = start + draw(st.integers(1, 2000))
    return cell(rows), Window(ns(start), ns(end), 0, draw(st.integers(0, 500)), "any")


@given(
    st.integers(-(10**6), 10**6), st.integers(1, 10**9), st.integers(1, 300), st.integers(-50, 50), st.integers(1, 99)
)
def test_a_moment_lies_between_the_edges_of_its_bin(at: int, span: int, parts: int, first: int, n: int) -> None:
    by = Bins(0, span, parts, first, n)
    moments = np.array([at, 0, span, span // 2, *by.edges_ns[:5].tolist()])
    place, edges = by.place(moments), by.edges_ns
    assert len(edges) == n + 1
    for moment, i in zip(moments.tolist(), place.tolist(), strict=True):
        if i == -1:
            assert moment < edges[0]
        elif i == n:
            assert moment >= edges[-1]
        else:
            assert edges[i] <= moment < edges[i + 1]


@given(loads())
def test_bins_hold_the_whole_cell_and_begin_and_end_with_the_window(load: tuple[Cell, Window]) -> None:
    measured, window = load
    by, whole = timeline.bins(measured, window), windows.whole(measured)
    edges = by.edges_ns
    assert by.n <= timeline.MOST_BINS
    if by.span_ns == window.end_ns - window.start_ns:
        inside = edges[(edges >= window.start_ns) & (edges <= window.end_ns)]
        assert not len(inside) or by.parts in timeline.BINS
        if whole.start_ns <= window.start_ns and window.end_ns <= whole.end_ns:
            assert {window.start_ns, window.end_ns} <= set(edges.tolist())
    assert edges[0] <= whole.start_ns
    assert edges[-1] >= whole.end_ns


@given(loads())
def test_tokens_of_all_bins_are_those_of_the_whole_run(load: tuple[Cell, Window]) -> None:
    measured, window = load
    assume(not series.single_pass(measured))
    by = timeline.bins(measured, window)
    found = timeline.tokens(measured, by)
    whole = metrics.compute("tokens_per_second_run", measured, window).value
    assert found is not None
    assert whole is not None
    assert found.sum() * by.seconds == pytest.approx(whole * windows.whole(measured).seconds)


@given(loads())
def test_slices_of_a_window_average_to_its_figures(load: tuple[Cell, Window]) -> None:
    measured, window = load
    assume(not series.single_pass(measured))
    parts = timeline.slices(measured, window, timeline.timeline(measured, window))
    figures = metrics.compute_all(["tokens_per_second", "in_flight", "arrival_rate"], measured, window)
    assert parts.tokens is not None
    means = [parts.tokens.mean(), parts.in_flight.mean(), parts.due.sum() / timeline.SLICES / parts.seconds]
    assert means == pytest.approx([v.value for v in figures])
    assert parts.due[parts.busiest] == parts.due.max()


@given(loads())
def test_levels_lie_between_the_least_and_the_most(load: tuple[Cell, Window]) -> None:
    measured, window = load
    level = timeline.in_flight(measured, timeline.bins(measured, window))
    known = ~np.isnan(level.mean)
    assert (level.low[known] <= level.mean[known] + 1e-9).all()
    assert (level.mean[known] <= level.high[known] + 1e-9).all()


def two_at_a_time() -> list[Record]:
    """In flight: 1 from 0 to 100 ms, 2 to 150, 1 to 200, none to 300, 1 to 400."""
    rows = [record(0, 0, events=[150]), record(1, 100, events=[200]), record(2, 300, events=[400])]
    return [replace(r, tokens_out=4) for r in rows]


@pytest.mark.parametrize("gauge", [True, False])
def test_in_flight_by_hand(gauge: bool) -> None:
    rows = two_at_a_time()
    measured = cell(rows, gauge_of(rows) if gauge else ())
    by = Bins(ns(0), 400_000_000, 4, 0, 4)
    level = timeline.in_flight(measured, by)
    assert level.mean.tolist() == [1, 1.5, 0, 1]
    assert level.high.tolist() == [1, 2, 0, 1]
    assert level.low.tolist() == [1, 1, 0, 1]
    assert timeline.arrivals(measured, by).tolist() == [10, 10, 0, 10]


def test_tokens_by_hand_are_where_their_events_are() -> None:
    rows = [
        record(0, 0, events=[50, 150, 350], event_tokens=[1, 5, 2], tokens_out=8),
        record(1, 0, events=[50, 250], tokens_out=6),  # 3 an event
        record(2, 0, end=399, tokens_out=7),  # not streamed: at its end
        record(3, 0, events=[50, 60], outcome="failed"),
    ]
    by = Bins(ns(0), 400_000_000, 4, 0, 4)
    assert timeline.tokens(cell(rows), by) == pytest.approx([40, 50, 30, 90])
    assert timeline.failed(cell(rows), by).tolist() == [1, 0, 0, 0]
    rows[2] = replace(rows[2], tokens_out=-1)
    assert timeline.tokens(cell(rows), by) is None
    assert timeline.tokens(cell(rows), by._replace(n=3)) is not None  # it ends after them


def test_percentiles_of_a_slice_are_of_what_is_due_in_it() -> None:
    rows = [record(i, 10 * i, events=[10 * i + 1 + i]) for i in range(100)]
    measured = cell(rows)
    window = Window(ns(0), ns(1000), 0, 100, "by hand")
    parts = timeline.slices(measured, window, timeline.timeline(measured, window))
    assert parts.ttft_p95 == pytest.approx([10 * k + 1 + 0.95 * 9 for k in range(10)])
    assert np.isnan(parts.tpot_p95).all()  # of one token each


def test_the_busiest_slice_has_the_most_due_and_of_several_the_most_in_flight() -> None:
    rows = [
        record(i, due, end=due + stay) for i, (due, stay) in enumerate([(5, 1), (55, 4), (56, 1), (85, 1), (86, 2)])
    ]
    measured = cell(rows)
    window = Window(ns(0), ns(100), 0, 5, "by hand")
    parts = timeline.slices(measured, window, timeline.timeline(measured, window))
    assert parts.due.tolist() == [1, 0, 0, 0, 0, 2, 0, 0, 2, 0]
    assert parts.busiest == 5  # 5 ms of stays, and 3 of the other


def test_a_closed_loop_is_full_in_every_bin_of_its_window() -> None:
    measured = closed_loop(200, 4)
    window = windows.of(measured)
    line = timeline.timeline(measured, window)
    edges = line.by.edges_ns
    inside = (edges[:-1] >= window.start_ns) & (edges[1:] <= window.end_ns)
    assert line.in_flight.mean[inside] == pytest.approx(4)
    assert line.by.parts >= timeline.SLICES
