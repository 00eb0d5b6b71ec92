"""Change points: steps at known places are found, noise shows none, and equal values are no change."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_bench import changes


def noise(seed: int, n: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([9, seed]))).standard_normal(n)


def test_a_step_is_found_where_it_is_with_its_size() -> None:
    series = 100 + noise(1, 60)
    series[40:] += 5
    (found,) = changes.e_divisive(series)
    assert found.at == 40 and found.p == 1 / 400
    assert (found.before, found.after) == (series[:40].mean(), series[40:].mean())
    assert found.share == pytest.approx(0.05, abs=0.01)


def test_two_steps_are_found_in_order() -> None:
    series = 100 + noise(2, 90)
    series[30:60] += 6
    first, second = changes.e_divisive(series)
    assert (first.at, second.at) == (30, 60)
    assert first.after == second.before == series[30:60].mean()


def test_a_change_of_spread_alone_is_a_change_of_distribution() -> None:
    series = noise(3, 200)
    series[100:] *= 8
    assert [abs(c.at - 100) <= 10 for c in changes.e_divisive(series)][:1] == [True]


def test_white_noise_shows_a_change_in_about_one_of_twenty_at_most() -> None:
    shown = sum(bool(changes.e_divisive(noise(seed, 40), seed, permutations=99)) for seed in range(100, 300))
    assert shown <= 18  # 200 * 0.05, and 2.6 standard deviations of chance


@settings(deadline=None)
@given(st.floats(-1e9, 1e9), st.integers(0, 60))
def test_equal_values_never_change(value: float, n: int) -> None:
    assert changes.e_divisive(np.full(n, value), permutations=19) == []


def test_few_distinct_values_are_no_trouble() -> None:
    assert [c.at for c in changes.e_divisive(np.repeat([1.0, 2.0, 1.0], 20))] == [20, 40]
    assert changes.e_divisive(np.tile([1.0, 2.0], 30)) == []
    assert [c.share for c in changes.e_divisive(np.repeat([0.0, 1.0], 20))] == [None]


@settings(deadline=None)
@given(st.integers(0, 9))
def test_too_short_a_history_has_no_change(n: int) -> None:
    assert changes.e_divisive(np.arange(float(n)) ** 3) == []


def test_no_side_is_shorter_than_asked() -> None:
    series = noise(4, 30)
    series[27:] += 50
    assert all(8 <= c.at <= 22 for c in changes.e_divisive(series, min_size=8))


def test_the_same_seed_gives_the_same_answer() -> None:
    series = noise(5, 50)
    series[25:] += 0.9
    assert changes.e_divisive(series, seed=3) == changes.e_divisive(series, seed=3)


def test_the_gain_is_the_energy_distance_of_its_formula() -> None:
    x = np.array([1.0, 2, 4, 8, 9, 11, 10])
    gains = {}
    for cut in range(2, 6):
        a, b = x[:cut], x[cut:]
        m, k = len(a), len(b)
        across = np.abs(a[:, None] - b).sum() * 2 / (m * k)
        within = np.abs(a[:, None] - a).sum() / (m * (m - 1)) + np.abs(b[:, None] - b).sum() / (k * (k - 1))
        gains[m * k / (m + k) * (across - within)] = cut
    gain, cut = changes._best(changes._distances(x), 2)
    assert gain == pytest.approx(max(gains)) and cut == gains[max(gains)] == 3


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="expected finite numbers"):
        changes.e_divisive(np.array([1.0, np.nan]))
    with pytest.raises(ValueError, match="at least 2"):
        changes.e_divisive(np.zeros(9), min_size=1)
