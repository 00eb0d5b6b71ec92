"""The arithmetic of METRICS.md with its worked example, by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench import capacity
from llm_bench.capacity import Ceiling, Fleet, Growth, Prices


def test_the_worked_example():
    most = capacity.ceiling(18_000, 450)
    assert most == 40
    planned = capacity.sustainable(most, 0.70)
    assert planned == pytest.approx(28)
    assert capacity.concurrency(planned, 6) == pytest.approx(168)


def test_a_limit_on_requests_in_flight_is_a_rate():
    assert capacity.rate_of(64, 3) == pytest.approx(21.3333, abs=1e-4)
    assert capacity.concurrency(2, 3) == 6


def test_the_lowest_ceiling_binds():
    token, memory = Ceiling("token rate", 40, ""), Ceiling("KV memory", 12.5, "")
    assert capacity.binding([token, memory]) is memory
    assert capacity.binding([memory, token]) is memory


def test_memory_bandwidth_by_hand():
    # 16 GB of weights and 100 sequences of 0.16 GB are 32 GB a step: 3,200 GB/s make 100 steps of 100 tokens.
    assert capacity.memory_roof(3200e9, 16e9, 16e9, 100) == pytest.approx(10_000)


# ---- fleet


@pytest.mark.parametrize(("target", "each", "spares", "active", "total"), [
    (100, 28, 1, 4, 5),  # 3.57
    (112, 28, 0, 4, 4),  # exactly four
    (8.4, 2.8, 1, 3, 4),  # 3.0000000000000004 in floating point, and three carry it
    (113, 28, 2, 5, 7),
    (0.1, 28, 0, 1, 1),
])  # fmt: skip
def test_replicas_are_the_ceiling_and_the_spares(target, each, spares, active, total):
    of = capacity.fleet(target, each, spares)
    assert (of.active, of.total) == (active, total)


def test_what_is_left_when_some_fail():
    of = capacity.fleet(100, 28, 1)  # five replicas, 140/s
    assert [of.left(k) for k in (0, 1, 2, 5, 6)] == [140, 112, 84, 0, 0]
    assert [of.survives(k) for k in (0, 1, 2)] == [True, True, False]
    assert capacity.most_failures(of) == 1
    # Two gone for five minutes: 16/s too little, 4,800 requests wait.
    assert capacity.queued(of, 2, 300) == 4800
    assert capacity.queued(of, 1, 300) == 0


@given(st.floats(0.01, 1e5), st.floats(0.01, 1e3), st.integers(0, 20))
def test_as_many_may_fail_as_there_are_spares_and_no_fewer_replicas_would_do(target, each, spares):
    of = capacity.fleet(target, each, spares)
    assert capacity.most_failures(of) >= spares
    assert of.active * each >= target * (1 - 1e-8)
    assert of.active == 1 or (of.active - 1) * each < target * (1 + 1e-8)


def test_a_fleet_that_cannot_carry_it_survives_nothing():
    assert capacity.most_failures(Fleet(100, 1, 2, 0)) == 0


def test_peak_over_mean_by_hand():
    # Twelve windows of 10 s: one arrival each but for the third, which has five; the last arrival begins a thirteenth.
    times = [10.0 * i for i in range(13)] + [21.0, 22.0, 23.0, 24.0]
    ratio, windows = capacity.peak_to_mean(times, 10) or (0, 0)
    assert (ratio, windows) == (5 / (16 / 12), 12)
    assert capacity.peak_to_mean(times, 60) is None
    assert capacity.peak_to_mean([], 60) is None
    assert capacity.peak_to_mean([t + 1e6 for t in times], 10) == (ratio, windows)


# ---- growth


def test_growth_reaches_a_ceiling_when_it_should():
    # 28/s doubles to 56/s: ln 2 / ln 1.05 = 14.2067 months of 30.436875 days.
    found = capacity.exhausted_after(28, 56, Growth(0.05, "month"))
    assert found == pytest.approx(14.20669908 * 30.436875)
    assert capacity.exhausted_after(100, 121, Growth(0.1, "year")) == pytest.approx(2 * 365.2425)
    assert capacity.exhausted_after(57, 56, Growth(0.05, "month")) == 0
    assert capacity.exhausted_after(28, 56, Growth(0.0, "month")) is None
    assert Growth(0.05, "month").text == "5%/month"


# ---- cost


def test_cost_by_hand():
    # 5 replicas x 4 accelerators x 2.50 + 10 = 60 an hour. 100/s x 450 tokens x 3,600 s = 162 million tokens.
    of = capacity.fleet(100, 28, 1)
    found = capacity.cost(of, Prices(4, 2.5, 10), 100, 450)
    assert found.per_hour == 60
    assert found.served == 100
    assert found.per_million == pytest.approx(60 / 162)
    assert found.per_answer == pytest.approx(60 / 360_000)
    assert found.idle == pytest.approx(1 - 100 / 140)


def test_what_a_fleet_cannot_serve_within_the_slo_is_not_in_the_divisor():
    found = capacity.cost(capacity.fleet(56, 28, 1), Prices(1, 3), 100, 100)
    assert found.served == 56  # two active replicas; the spare is not counted on
    assert found.per_million == pytest.approx(9 / (56 * 3600 * 100) * 1e6)
    assert found.idle == pytest.approx(1 / 3)


def test_cost_at_a_load_has_no_spares():
    assert capacity.cost_at(Prices(2, 2.5, 99), 1000) == pytest.approx(5 / 3.6)


@given(st.floats(0.1, 1e4), st.floats(0.1, 1e3), st.integers(0, 5), st.floats(0.01, 1e4))
def test_idle_capacity_is_a_share_and_less_demand_never_makes_a_token_cheaper(target, each, spares, demand):
    of, prices = capacity.fleet(target, each, spares), Prices(1, 2.0)
    found = capacity.cost(of, prices, demand, 100)
    assert 0 <= found.idle < 1
    assert capacity.cost(of, prices, demand / 2, 100).per_million >= found.per_million * (1 - 1e-9)
    assert math.isfinite(found.per_million)
