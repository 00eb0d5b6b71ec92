"""Ticks: found where they are, left alone where they are not, and spread without changing the order."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench.errors import BenchError
from llm_bench.request import Request
from llm_bench.ticks import dejitter, inter_arrival_cv, spread, step_s


def rows(*at_s: float | None) -> list[Request]:
    return [Request(tokens_in=10 + i, tokens_out=5, at_s=at) for i, at in enumerate(at_s)]


def times(requests: list[Request]) -> list[float | None]:
    return [r.at_s for r in requests]


def test_rows_of_one_second_are_spread_evenly_in_it_and_the_rest_stay():
    made, said = dejitter(rows(0, 0, 0, 2, 9), "even")
    assert times(made) == pytest.approx([0, 1 / 3, 2 / 3, 2, 9], abs=1e-9)
    assert [r.tokens_in for r in made] == [10, 11, 12, 13, 14]
    assert said.startswith("timestamps stand on 1 s ticks (5 requests on 3 instants): spread evenly inside each tick")
    # gaps 0 0 2 7: mean 2.25, population variance 8.1875; then 1/3 1/3 4/3 7: variance (1/9 + 1/9 + 16/9 + 49)/4 - m²
    assert "CV 1.27 -> 1.23" in said


def test_ticks_that_shake_by_milliseconds_are_ticks_of_their_median_gap():
    shaken = np.repeat(np.arange(0, 300, 3) + np.random.default_rng(1).integers(-3, 4, 100) / 1000, 4)
    assert step_s(shaken) == pytest.approx(3, abs=0.002)
    made, said = dejitter(rows(*shaken.tolist()), "even")
    assert "3 s ticks (400 requests on 100 instants)" in said.replace("2.999", "3").replace("3.001", "3")
    assert np.all(np.diff([r.at_s for r in made]) > 0)


@pytest.mark.parametrize(
    ("at_s", "step"),
    [
        ([], None),
        ([0.0], None),
        ([5.0, 5.0, 5.0], None),  # one instant has no step
        ([0, 1, 2, 3, 5, 8], None),  # whole seconds, and nobody shares one
        ([0, 0, 4, 4, 8, 10], 1.0),  # of four instants a factor of 2 s may be chance
        ([0, 0, *range(4, 40, 4)], 4.0),  # of ten it is not
        ([0, 0, *range(60, 1200, 60)], 60.0),
        ([0, 0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4], None),  # finer than 0.1 s
    ],
)
def test_the_step_is_the_common_one_of_stamps_that_are_shared(at_s, step):
    assert step_s(np.array(at_s, float)) == step


def test_a_poisson_stream_in_milliseconds_has_no_ticks_though_some_stamps_are_equal():
    at_s = np.round(np.cumsum(np.random.default_rng(0).exponential(0.5, 5000)), 3)
    assert len(np.unique(at_s)) < 5000
    assert step_s(at_s) is None
    requests = rows(*at_s.tolist())
    assert dejitter(requests, "auto") == (requests, "")


def test_off_changes_nothing_and_a_number_forces_the_step():
    requests = rows(0, 0, 0.004, 0.007, 1)
    assert dejitter(requests, "off") == (requests, "")
    assert dejitter(requests, "auto") == (requests, "")  # their step is a millisecond
    made, said = dejitter(requests, "even:0.002")
    assert times(made) == [0, 0.001, 0.004, 0.007, 1]
    assert said.startswith("timestamps taken to stand on 0.002 s ticks")


def test_a_step_longer_than_the_gap_stops_at_the_next_instant():
    made, _ = dejitter(rows(0, 0, 1, 1), "even:4")
    assert times(made) == [0, 0.5, 1, 3]


@pytest.mark.parametrize("mode", ["", "on", "even:", "even3", "0", "-3", "nan", "inf", "3 s"])
def test_another_mode_is_refused(mode):
    with pytest.raises(BenchError, match="expected auto, even, off, or the tick's length"):
        dejitter(rows(0, 0, 1), mode)


def test_later_turns_move_with_their_tick_and_stay_behind_the_turn_before():
    requests = [
        Request(10, 5, at_s=0.0, session="a"),
        Request(20, 5, at_s=0.0, session="a", turn=1),
        Request(30, 5, session="a", turn=2, think_s=1.0),
        Request(10, 5, at_s=3.0, session="b"),
        Request(40, 5, at_s=4.0, session="a", turn=3),
    ]
    assert times(dejitter(requests, "even")[0]) == [0, 0.5, None, 3, 4]


def test_at_random_a_poisson_stream_on_ticks_gets_its_burstiness_back_and_evenly_it_is_smoother():
    true = np.cumsum(np.random.default_rng(3).exponential(0.3, 10_000))
    ticked = np.floor(true / 3) * 3
    requests = rows(*(ticked - ticked[0]).tolist())
    evenly, said = dejitter(requests, "even")
    random, _ = dejitter(requests, "auto", seed=1)
    assert inter_arrival_cv(ticked) > 2.5
    assert inter_arrival_cv(np.array(times(random))) == pytest.approx(1, abs=0.03)
    assert inter_arrival_cv(np.array(times(evenly))) < 0.5
    assert "at random places in the tick: 0.99" in said
    assert dejitter(requests, "auto", seed=1)[0] == random
    assert random[0].at_s == 0


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.floats(0.1, 5), st.none() | st.integers(0, 9))
def test_spreading_keeps_order_and_never_leaves_the_tick(places, step, seed):
    at_s = np.sort(np.array(places, float))
    moved = spread(at_s, step, seed)
    assert all(before <= after for before, after in pairwise(moved.tolist()))
    first = moved[0] - at_s[0]
    assert first == 0
    assert np.all(np.abs(moved - at_s) <= step + 1e-9)
    if seed is None:
        assert np.all(moved >= at_s)
        assert len(np.unique(moved)) == len(at_s)


def test_the_cv_is_the_population_one():
    assert inter_arrival_cv(np.array([0.0, 1, 4])) == pytest.approx(0.5)  # gaps 1 and 3: deviation 1, mean 2
    assert inter_arrival_cv(np.array([0.0, 1])) is None
    assert inter_arrival_cv(np.zeros(5)) is None
