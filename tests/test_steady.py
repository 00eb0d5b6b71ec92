"""Starts of steady state, trends, drift: by hand, against the definition, and on queues whose truth is known."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import queue_sim
from bench.queue_sim import Stays, rng
from llm_bench import steady

latencies = st.lists(st.integers(0, 1000), min_size=10, max_size=200)


def mser5_by_definition(values: list[int]) -> list[float]:
    """The statistic at each cut, from the formula."""
    means = [float(np.mean(values[i : i + 5])) for i in range(0, len(values) // 5 * 5, 5)]
    left = [means[cut:] for cut in range(len(values) // 2 // 5 + 1)]
    return [float(np.sum((np.array(m) - np.mean(m)) ** 2)) / len(m) ** 2 for m in left]


@settings(deadline=None)
@given(latencies)
def test_mser5_is_the_least_of_its_formula(values: list[int]) -> None:
    got, statistics = steady.mser5(np.array(values, float)), mser5_by_definition(values)
    assert got.cut % 5 == 0 and got.cut <= len(values) / 2
    assert got.statistic == pytest.approx(min(statistics), abs=1e-9)
    assert statistics[got.cut // 5] == pytest.approx(min(statistics), abs=1e-9)
    assert got.too_short == (got.cut // 5 == len(values) // 2 // 5)


def test_a_slow_beginning_is_cut_off() -> None:
    # Batches 100, 60, then eight of 10 or 12: from the third on 8 left, mean 11, squares 8, statistic 8 / 64.
    values = np.repeat([100, 60, *[10, 12] * 4], 5).astype(float)
    assert steady.mser5(values) == (10, pytest.approx(0.125), False, True)
    assert not steady.mser5(values, warmup=10).late  # the warm-up given is enough
    assert steady.mser5(values, warmup=5).late  # not with the batch of 60: 9 left, squares 2142, statistic 26


def test_a_cut_that_gains_little_is_not_late() -> None:
    # Without the first batch 20 / 20^2 = 0.05, with it (20 + 3.81) / 21^2 = 0.054: not a quarter more.
    values = np.repeat([13, *[10, 12] * 10], 5).astype(float)
    got = steady.mser5(values)
    assert (got.cut, got.late) == (5, False)


def test_a_run_that_never_settles_is_too_short() -> None:
    falls = np.arange(200.0, 0, -1)
    assert steady.mser5(falls).too_short and steady.mser5(falls).cut == 100
    assert steady.mser5(falls[:9]).too_short  # under one batch in the first half: nothing to choose


@pytest.mark.parametrize("value", [0.0, 0.1, 1e9])
def test_equal_latencies_are_steady_from_the_first(value: float) -> None:
    assert steady.mser5(np.full(1000, value)) == (0, 0.0, False, False)


def test_mann_kendall_by_hand() -> None:
    # Ten pairs, all rising; variance 5 * 4 * 15 / 18, one off for continuity.
    got = steady.mann_kendall(np.array([1.0, 2, 3, 4, 5]), ess_correct=False)
    assert (got.s, got.slope) == (10, 1)
    assert got.z == pytest.approx(9 / math.sqrt(50 / 3)) and got.p == pytest.approx(0.01374, abs=1e-5)
    # A tie: five of six pairs rise, and 2 * 1 * 9 leaves the variance.
    tied = steady.mann_kendall(np.array([1.0, 1, 2, 3]), ess_correct=False)
    assert tied.s == 5 and tied.z == pytest.approx(4 / math.sqrt((4 * 3 * 13 - 2 * 1 * 9) / 18))


def test_sens_slope_is_not_moved_by_one_value() -> None:
    values = 2.0 * np.arange(21)
    values[10] = 1e6
    assert steady.mann_kendall(values).slope == 2


@settings(deadline=None)
@given(st.lists(st.integers(-50, 50), min_size=2, max_size=60))
def test_a_trend_of_the_mirrored_series_is_its_mirror(values: list[int]) -> None:
    up, down = steady.mann_kendall(np.array(values)), steady.mann_kendall(-np.array(values))
    assert (up.s, up.slope) == (-down.s, -down.slope)
    assert up.z == pytest.approx(-down.z) and up.p_two_sided == pytest.approx(down.p_two_sided)


@settings(deadline=None)
@given(st.integers(2, 300))
def test_equal_values_have_no_trend(n: int) -> None:
    got = steady.mann_kendall(np.full(n, 7))
    assert (got.p, got.p_two_sided) == (0.5, 1)


def test_dependence_weakens_a_trend_but_leaves_a_plain_one() -> None:
    line = np.arange(200.0)
    plain, corrected = steady.mann_kendall(line, ess_correct=False), steady.mann_kendall(line)
    assert corrected.ess == pytest.approx(9, abs=0.2)  # tau is 20 * 10/9: ten batch means carry the whole variance
    assert 4 < corrected.z < plain.z and corrected.p < 1e-4
    with pytest.raises(ValueError, match="a trend of 1 values: at least 2"):
        steady.mann_kendall(line[:1])


def one_by_one(rate: float) -> steady.Growth:
    """Case 17: a server that takes one request a second, 1 s each, offered `rate` a second for 30 s."""
    due = np.arange(round(30 * rate)) / rate
    begin = np.arange(len(due), dtype=float)
    return verdict(Stays(due, begin, begin + 1))


def verdict(stays: Stays, start: float = 0.05, **more: float) -> steady.Growth:
    """Of the window from `start`, a share of the span, to the last due time."""
    at_s = np.linspace(start * stays.due_s[-1], stays.due_s[-1], steady.SAMPLES)
    level = queue_sim.levels(stays, at_s)
    return steady.growth(at_s, level, level, stays.due_s[stays.due_s >= at_s[0]], **more)


def test_five_times_the_capacity_grows_by_four_a_second() -> None:
    got = one_by_one(5)
    assert got.growing and got.per_second == pytest.approx(4, rel=0.01)


def test_exactly_at_capacity_nothing_grows() -> None:
    got = one_by_one(1)
    assert not got.growing and (got.per_second, got.in_system.p) == (0, 0.5)


@pytest.mark.parametrize("load", [0.5, 0.8, 0.9])
@pytest.mark.parametrize("n", [300, 3000])
def test_a_stable_queue_is_not_said_to_grow(load: float, n: int) -> None:
    """Not even where it began empty and fills during the window."""
    said = [verdict(queue_sim.open_loop(rng(17, n, run), n, load, warmup=0)).growing for run in range(50)]
    assert sum(said) <= 2


def test_overload_is_found() -> None:
    found = [verdict(queue_sim.fcfs(*queue_sim.trace(rng(17, run), 1000, 1.25))) for run in range(20)]
    assert sum(g.growing for g in found) >= 19
    assert np.median([g.per_second for g in found]) == pytest.approx(4, rel=0.15)  # 20 offered, 16 served


def test_a_system_that_only_fills_does_not_grow() -> None:
    due = np.arange(3000) / 100.0
    takes_10_s = Stays(due, due, due + 10)
    assert not verdict(takes_10_s).growing
    # Stays of 25 of 30 s: the second half still fills, and what is after them is all there is to judge by.
    takes_25_s = Stays(due, due, due + 25)
    assert verdict(takes_25_s).growing and not verdict(takes_25_s, filled_s=25.0).growing
    assert not verdict(takes_25_s, filled_s=40.0).growing  # nothing is left of the window


def test_a_burst_at_the_end_is_no_growth() -> None:
    due = np.concatenate([np.arange(300) / 10, np.full(200, 30.0)])
    assert not verdict(Stays(due, due, due + 0.5)).growing


def test_a_backlog_behind_the_clients_own_limit_grows() -> None:
    at_s, due_s = np.linspace(0, 30, steady.SAMPLES), np.arange(300) / 10
    in_system, in_flight = np.floor(5 * at_s), np.minimum(np.floor(5 * at_s), 4)
    in_flight[:100] = 4
    assert not steady.growth(at_s, in_flight, in_system, due_s).growing
    assert steady.growth(at_s, in_flight, in_system, due_s, limit=4).growing
    assert not steady.growth(at_s, in_flight, in_system, due_s, limit=5).growing


def closed(seed: int, slowdown: float, slots: int = 32, n: int = 3200) -> steady.Drift | None:
    every = queue_sim.closed_loop(rng(20, seed), n + 2 * slots, slots, slowdown=slowdown)
    window = every.after(2 * slots)
    start_s, end_s = float(window.due_s[0]), float(window.due_s[-1])
    ended_s = every.end_s[(every.end_s >= start_s) & (every.end_s < end_s)]
    return steady.drift(window.e2e_s, ended_s, start_s, end_s)


def test_a_closed_loop_drifts_where_its_server_slows_down_only() -> None:
    assert sum(d is not None and d.drifting for d in (closed(seed, 0.0) for seed in range(40))) <= 4
    slower = [closed(seed, 0.5) for seed in range(10)]
    assert all(d and d.drifting and d.latency.slope > 0 > d.rate.slope for d in slower)


def test_too_few_requests_for_twenty_batches_say_nothing() -> None:
    assert closed(0, 0.5, slots=2, n=39) is None


def test_a_drift_down_is_a_drift_too() -> None:
    latency, ended_s = np.linspace(2, 1, 400), np.arange(400) / 10 + 0.05
    got = steady.drift(latency, ended_s, 0.0, 40.0)
    assert got and got.drifting and got.rate.p_two_sided == 1 and got.latency.slope < 0
