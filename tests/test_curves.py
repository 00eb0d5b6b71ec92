"""Fits find the curve that made the data, say how sure they are, and do not speak of loads far from any measured."""

import math

import numpy as np
import pytest

from llm_bench import curves
from llm_bench.curves import Estimate, Fit, fit_latency, fit_throughput, predict, student_t
from llm_bench.errors import BenchError

LOADS = np.array([1, 2, 4, 8, 12, 16, 24, 32, 48, 64], float)
SEEDS = 20
RATE, CONTENTION, COHERENCE = 50.0, 0.03, 0.0006


def usl(n: np.ndarray) -> np.ndarray:
    return RATE * n / (1 + CONTENTION * (n - 1) + COHERENCE * n * (n - 1))


def segments(n: np.ndarray) -> np.ndarray:
    return np.minimum(RATE * n, 900)


def noisy(values: np.ndarray, seed: int, scatter: float = 0.03) -> np.ndarray:
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
    return np.asarray(values * np.exp(scatter * rng.standard_normal(len(values))))


def of_form(form: str, loads: np.ndarray, values: np.ndarray) -> Fit:
    chosen = fit_throughput(loads, values)
    return next(f for f in (chosen.best, *chosen.others) if f.form == form)


def holds(found: Estimate | str, truth: float) -> bool:
    assert isinstance(found, Estimate)
    return found.low <= truth <= found.high


PEAK = math.sqrt((1 - CONTENTION) / COHERENCE)


@pytest.mark.parametrize("scatter", [0.01, 0.05])
def test_the_usls_truth_is_inside_its_intervals_in_nine_of_ten(scatter):
    truths = {"rate_per_load": RATE, "contention": CONTENTION, "coherence": COHERENCE}
    inside = dict.fromkeys([*truths, "ceiling", "knee"], 0)
    for seed in range(SEEDS):
        fit = of_form("usl", LOADS, noisy(usl(LOADS), seed, scatter))
        for name, truth in truths.items():
            inside[name] += holds(fit.params[name], truth)
        top = float(usl(np.array([PEAK]))[0])
        inside["ceiling"] += holds(fit.ceiling, top)
        inside["knee"] += holds(fit.knee, top / RATE)
    assert min(inside.values()) >= 0.9 * SEEDS, inside


@pytest.mark.parametrize("scatter", [0.01, 0.05])
def test_two_segments_truth_is_inside_its_intervals_in_nine_of_ten(scatter):
    inside = {"rate": 0, "ceiling": 0, "knee": 0}
    for seed in range(SEEDS):
        fit = of_form("two segments", LOADS, noisy(segments(LOADS), 100 + seed, scatter))
        inside["rate"] += holds(fit.params["rate_per_load"], RATE)
        inside["ceiling"] += holds(fit.ceiling, 900)
        inside["knee"] += holds(fit.knee, 18)
    assert min(inside.values()) >= 0.9 * SEEDS, inside


@pytest.mark.parametrize(("form", "truth"), [("usl", usl), ("two segments", segments)])
def test_aicc_picks_the_family_that_made_the_data(form, truth):
    picked = [fit_throughput(LOADS, noisy(truth(LOADS), seed)).best.form for seed in range(SEEDS)]
    assert picked.count(form) >= 0.9 * SEEDS


def test_exact_data_give_the_exact_curve():
    fit = of_form("usl", LOADS, usl(LOADS))
    assert [fit.params[n].value for n in ("rate_per_load", "contention", "coherence")] == pytest.approx(
        [RATE, CONTENTION, COHERENCE], rel=1e-6
    )
    two = of_form("two segments", LOADS, segments(LOADS))
    assert isinstance(two.knee, Estimate)
    assert (two.params["rate_per_load"].value, two.params["ceiling"].value, two.knee.value) == pytest.approx(
        (50, 900, 18)
    )
    assert isinstance(fit.ceiling, Estimate)
    assert fit.ceiling.value == pytest.approx(float(usl(np.array([PEAK]))[0]), rel=1e-6)


def test_a_line_that_still_rises_has_no_knee():
    for seed in range(SEEDS):
        chosen = fit_throughput(LOADS, noisy(RATE * LOADS, seed))
        for fit in (chosen.best, *chosen.others):
            if fit.form == "two segments":
                assert fit.name == "straight line"
                assert isinstance(fit.knee, str)
                assert "largest load measured (64)" in fit.knee


def test_one_load_alone_is_no_flat_segment():
    loads = np.array([1, 2, 4, 8, 16, 24], float)
    fit = of_form("two segments", loads, noisy(np.minimum(50 * loads, 1100), 1, 0.001))
    assert isinstance(fit.knee, str)


def test_data_flat_from_the_start_have_a_ceiling_and_no_knee():
    fit = of_form("two segments", LOADS, noisy(np.full(10, 700.0), 3))
    assert holds(fit.ceiling, 700)
    assert isinstance(fit.knee, str)
    assert "flat from the smallest" in fit.knee


def test_latency_has_the_curve_that_littles_law_makes_of_throughput():
    inside = {"usl": 0, "segments": 0}
    for seed in range(SEEDS):
        chosen = fit_latency(LOADS, noisy(LOADS / usl(LOADS), seed))
        inside["usl"] += holds(predict(chosen.best, 32), float(32 / usl(np.array([32.0]))[0]))
        flat = fit_latency(LOADS, noisy(np.maximum(0.02, 0.02 * LOADS / 18), seed))
        inside["segments"] += holds(flat.best.knee, 18) and holds(predict(flat.best, 4), 0.02)
    assert min(inside.values()) >= 0.85 * SEEDS, inside


def test_prediction_is_refused_past_twice_the_largest_load():
    for fit in (of_form("usl", LOADS, noisy(usl(LOADS), 1)), of_form("two segments", LOADS, noisy(segments(LOADS), 1))):
        assert predict(fit, 128).low < predict(fit, 128).high
        for load in (128.1, 0.0, -1.0, math.inf, math.nan):
            with pytest.raises(BenchError, match="the largest measured is 64"):
                predict(fit, load)


def test_a_peak_past_twice_the_largest_load_is_not_said():
    near = LOADS[:7]  # up to 24; the peak is at 40
    assert isinstance(of_form("usl", near, usl(near)).ceiling, Estimate)
    near = np.array([1, 2, 3, 4, 6, 8], float)
    ceiling = of_form("usl", near, usl(near)).ceiling
    assert isinstance(ceiling, str)
    assert "2 times the largest load measured (8)" in ceiling


@pytest.mark.parametrize(("loads", "rates", "said"), [
    ([1, 2, 4], [1, 2, 3], "3 different loads"),
    ([1, 1, 2, 2, 2, 2], [1] * 6, "2 different loads"),
    ([1, 2, 3, 4], [1, 2, 3, 4], "4 points, at least 5"),
    ([1, 2, 3, 4, 0], [1] * 5, "above 0"),
    ([1, 2, 3, 4, 5], [1, 2, 3, 4, math.nan], "above 0"),
])  # fmt: skip
def test_too_little_is_refused(loads, rates, said):
    with pytest.raises(BenchError, match=said):
        fit_throughput(loads, rates)


def test_five_points_are_too_few_for_the_usl_and_rates_below_one_are_no_slots():
    chosen = fit_throughput([1, 2, 4, 8, 16], [1, 2, 4, 5, 5])
    assert (chosen.best.form, chosen.others) == ("two segments", ())
    assert "too few for the Universal Scalability Law" in chosen.text
    assert fit_throughput([0.5, 1, 2, 4, 8, 16], [0.5, 1, 2, 4, 5, 5]).others == ()
    assert "of 6 points it favours fewer parameters" in fit_throughput(LOADS[:6], usl(LOADS[:6])).text
    with pytest.raises(BenchError, match="latency"):
        fit_latency([1, 2, 4, 8, 16], [1, 2, 4, 5, 0])


def test_forms_that_are_not_told_apart_are_said_to_be():
    texts = [fit_throughput(LOADS, noisy(usl(LOADS), seed, 0.2)).text for seed in range(SEEDS)]
    assert any("do not tell them apart" in text for text in texts)


def test_students_t():
    assert [student_t(n) for n in (1, 9, 30)] == [12.706, 2.262, 2.042]
    assert [student_t(n) for n in (60, 120)] == pytest.approx([2.000, 1.980], abs=1e-3)


def test_order_of_points_does_not_matter():
    y = noisy(usl(LOADS), 5)
    a, b = fit_throughput(LOADS, y), fit_throughput(LOADS[::-1], y[::-1])
    assert a.best.theta == pytest.approx(b.best.theta)
    assert a.best.aicc == pytest.approx(b.best.aicc)
    assert curves.REACH == 2
