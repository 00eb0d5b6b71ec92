"""What neighbours do to a class: factors by hand, how often their bounds hold, what has none and why."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench import interference, metrics, report, results, stats, words
from llm_bench.interference import Factor
from llm_bench.metrics import Value
from llm_bench.repeats import factor_over_runs, groups, student_t
from llm_bench.results import Asked, sheets
from llm_bench.stats import Interval
from tests.sample import record
from tests.test_report import write_cell

LOAD = {"kind": "open", "rate": 20.0, "warmup": 0.0, "label": "rate=20/s", "class_alone": ""}
NAMES = ["ttft_p50", "ttft_mean", "error_rate", "requests_per_second"]


def value(figure: float | None, low: float = 0.0, high: float = 0.0, **facts: Any) -> Value:
    interval = Interval(low, high) if high else None
    return Value("ttft_p95", "ms", figure, **{"n": 40, "interval": interval} | facts)


# ---- one run


def test_the_bounds_are_those_of_the_ratio_while_each_figure_is_in_its_interval() -> None:
    found = interference.factor(value(90, 80, 120), value(30, 20, 40))
    assert (found.value, found.interval, found.refusal) == (3.0, Interval(2.0, 6.0), "")
    assert (found.together, found.alone, found.confidence) == (90, 30, "at least 90%")


@pytest.mark.parametrize(
    ("together", "alone", "why"),
    [
        (value(90, refusal="ESS 9 of 9"), value(30, 20, 40), "together: ESS 9 of 9"),
        (value(90, 80, 120), value(30, refusal="ESS 9 of 9"), "alone: ESS 9 of 9"),
        (value(90, 80, 120), value(30, 0.0, 40), "alone: its interval begins at 0"),
    ],
)
def test_without_both_intervals_there_is_a_factor_and_why_it_has_no_bounds(
    together: Value, alone: Value, why: str
) -> None:
    found = interference.factor(together, alone)
    assert (found.value, found.interval, found.refusal) == (3.0, None, why)


@pytest.mark.parametrize(
    ("together", "alone", "why"),
    [
        (value(None, reason="no ok request"), value(30, 20, 40), "together: no ok request"),
        (value(90, 80, 99), value(None, reason="no ok request"), "alone: no ok request"),
        (value(90, 80, 99), value(0.0), "alone it is 0"),
    ],
)
def test_a_factor_of_what_there_is_not_is_none_with_the_reason(together: Value, alone: Value, why: str) -> None:
    found = interference.factor(together, alone)
    assert (found.value, found.interval, found.reason) == (None, None, why)


def test_rates_and_shares_have_no_factor_and_a_mean_no_bounds() -> None:
    both = [Value(n, metrics.parse(n).unit, 2.0, 9) for n in ("ttft_mean", "error_rate", "tokens_per_second")]
    (only,) = interference.factors(both, both)
    assert (only.name, only.value, only.refusal) == ("ttft_mean", 1.0, "a mean of one run has none")


@given(st.lists(st.floats(1e-3, 1e6), min_size=3, max_size=3), st.lists(st.floats(1e-3, 1e6), min_size=3, max_size=3))
def test_a_factor_lies_in_its_bounds(mine: list[float], own: list[float]) -> None:
    (a, b, c), (x, y, z) = sorted(mine), sorted(own)
    found = interference.factor(value(b, a, c), value(y, x, z))
    assert found.interval is not None and found.value is not None
    assert found.interval.low <= found.value <= found.interval.high


def test_the_bounds_hold_the_true_factor_in_ninety_of_a_hundred_runs_or_more() -> None:
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(11)))
    held = []
    for _ in range(400):
        sides = []
        for scale in (3.0, 1.0):  # the true factor of every quantile is 3
            x = scale * random.lognormal(0, 0.5, 600)
            bounds = stats.interval(x, 0.9)
            assert isinstance(bounds, Interval)
            sides.append(value(stats.percentile(x, 0.9), *bounds))
        low, high = interference.factor(*sides).interval or (math.inf, 0)
        held.append(low <= 3 <= high)
    assert np.mean(held) >= 0.95  # 0.9 is what is promised of any two figures: these know nothing of each other


# ---- several runs


def factor(x: float | None, **facts: Any) -> Factor:
    return Factor("ttft_p95", "ms", None if x is None else 10 * x, 10.0, x, **facts)


def test_five_runs_have_the_geometric_mean_and_the_t_interval_of_their_logarithms() -> None:
    xs = [2.0, 4.0, 8.0, 2.0, 8.0]  # logarithms 1 2 3 1 3 of 2: mean 2, squares of the differences 1 0 1 1 1
    found = factor_over_runs([factor(x) for x in xs], 5)
    half = 2.7764 * math.sqrt(4 / 4) / math.sqrt(5)
    assert found.value == pytest.approx(4)
    assert found.interval == pytest.approx((2 ** (2 - half), 2 ** (2 + half)), rel=1e-3)
    assert (found.together, found.alone, found.runs) == (pytest.approx(48), 10, 5)
    assert found.confidence == "95%"


def test_under_five_runs_there_is_a_factor_and_why_it_has_no_interval() -> None:
    found = factor_over_runs([factor(2.0), factor(8.0)], 2)
    assert (found.value, found.interval) == (pytest.approx(4), None)
    assert found.refusal == "2 runs, 5 are needed for an interval of their spread"


@pytest.mark.parametrize(
    ("found", "runs", "why"),
    [
        ([factor(2.0), factor(None, reason="alone it is 0")], 2, "1 of 2 runs have none: alone it is 0"),
        ([factor(2.0)], 3, "2 of 3 runs have none: the class was not measured alone"),
        ([factor(2.0), factor(0.0)], 2, "1 of 2 runs have none: it is 0"),
    ],
)
def test_a_run_without_a_factor_is_not_made_up_for_by_the_others(found: list[Factor], runs: int, why: str) -> None:
    got = factor_over_runs(found, runs)
    assert (got.value, got.interval, got.reason) == (None, None, why)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9))
def test_turned_round_the_factor_over_runs_is_its_inverse(xs: list[float]) -> None:
    there, back = (factor_over_runs([factor(x) for x in of], len(xs)) for of in (xs, [1 / x for x in xs]))
    assert there.value is not None and back.value is not None
    assert there.value * back.value == pytest.approx(1)
    if there.interval and back.interval:
        assert there.interval.low * back.interval.high == pytest.approx(1)


def test_the_interval_over_runs_covers_as_often_as_it_says() -> None:
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(5)))
    drawn = np.exp(math.log(3) + 0.3 * random.standard_normal((2000, 6)))
    found = [factor_over_runs([factor(float(x)) for x in row], 6).interval for row in drawn]
    assert np.mean([i is not None and i.low <= 3 <= i.high for i in found]) == pytest.approx(0.95, abs=0.015)
    assert student_t(5) == pytest.approx(2.571, rel=1e-3)


# ---- as reports have them


def rows(ttft_ms: float, n: int, klass: str = "") -> list[Any]:
    """Every 50 ms a request, of classes a and b in turn; TTFT within 20% of `ttft_ms`."""
    made = []
    for i in range(n):
        name = klass or "ab"[i % 2]
        first = ttft_ms * (0.8 + 0.4 * (37 * i % n) / n)
        made.append(record(i, 50 * i, events=[50 * i + first], request_class=name))
    return made


def disturbed(folder: Path, runs: int = 1, alone: int | None = None) -> results.Run:
    """Cells of both together, TTFT about 90 ms, and of `b` alone, about 30 ms (run k: k ms more), in as many runs."""
    entries, many = [], 1000 if runs == 1 else 60  # of several runs no interval of one of them is looked at
    for k in range(runs):
        round_ = {} if runs == 1 else {"pair": k, "arm": "a", "order": 0, "repeat": runs}
        names = [(f"{k}0-a", rows(90, many), LOAD)]
        if k < (runs if alone is None else alone):
            own = LOAD | {"label": "rate=20/s [b alone]", "class_alone": "b"}
            names.append((f"{k}1-a", rows(30 + k, many // 2, "b"), own))
        for name, of, load in names:
            write_cell(folder, name, of, load=load, **round_)
            entries.append({"name": name, "end": {"reason": "exhausted"}, **round_})
    (folder / "run.json").write_text(json.dumps({"cells": entries}))
    return results.load_run(folder)


def together(run: results.Run) -> Any:
    return groups(sheets(run, Asked(NAMES)))[0]


def said(run: results.Run, format_: str) -> str:
    return " ".join(report.render([run], Asked(NAMES), format_).split())


def test_one_run_says_its_factor_with_bounds_that_hold_nine_times_in_ten(tmp_path: Path) -> None:
    run = disturbed(tmp_path)
    (f,) = [f for f in together(run).by_class["b"].factors if f.name == "ttft_p50"]
    assert f.interval is not None and f.interval.low < 3 < f.interval.high
    for format_ in ("terminal", "md", "html"):
        text = said(run, format_)
        assert "b in the mix: ttft_p50 90" in text
        bounds = f"{f.interval.low:.2f} to {f.interval.high:.2f}"
        assert f"({f.value:.2f} times; {bounds}, at least 90% sure)" in text
        assert "no interval, a mean of one run has none" in text
        assert "a in the mix" not in text


def test_five_runs_say_the_mean_of_their_factors_and_how_far_they_lie_apart(tmp_path: Path) -> None:
    run = disturbed(tmp_path, 5)
    (f,) = [f for f in together(run).by_class["b"].factors if f.name == "ttft_p50"]
    mean = math.exp(np.mean([math.log(90 / (30 + k)) for k in range(5)]))
    assert f.value == pytest.approx(mean, rel=0.02) and f.interval is not None
    assert f.together == pytest.approx(90, rel=0.02) and f.alone == pytest.approx(32, rel=0.02)
    bounds = f"{f.interval.low:.2f} to {f.interval.high:.2f}"
    for format_ in ("terminal", "md", "html"):
        assert f"({f.value:.2f} times, geometric mean of 5 runs; {bounds}, 95% sure)" in said(run, format_)


def test_runs_of_which_some_lack_the_class_alone_have_no_factor(tmp_path: Path) -> None:
    group = together(disturbed(tmp_path, 5, alone=3))
    assert group.by_class["b"].alone is None
    assert {f.reason for f in group.by_class["b"].factors} == {
        "2 of 5 runs have none: the class was not measured alone"
    }
    assert "ttft_p50, ttft_mean: no factor, 2 of 5 runs have none" in said(results.load_run(tmp_path), "md")


def test_the_table_of_factors_has_a_line_a_class_and_metric(tmp_path: Path) -> None:
    group = together(disturbed(tmp_path))
    p50, mean = words.interference_rows(group)
    assert p50.cells[0] == "b: ttft_p50" and p50.cells[3] == f"{p50.factor:.2f}" and p50.unit == "ms"
    assert " to " in p50.cells[4] and mean.cells[4] == "–"
    assert mean.why == "no interval: a mean of one run has none" and not p50.why
    assert [line[:19] for line in words.interference_legend([group])] == ["at least 90% sure: "]
    assert len(p50.cells) == len(words.INTERFERENCE_HEADS)
    assert [words.times(x) for x in (None, 0.123, 3.14159, 99.994, 1234.5)] == ["–", "0.12", "3.14", "99.99", "1,234"]


def test_the_page_has_a_table_of_factors_and_json_every_bound(tmp_path: Path) -> None:
    run = disturbed(tmp_path, 5)
    page = said(run, "html")
    assert "<caption>Interference</caption>" in page and "b: ttft_p50" in page
    (found,) = json.loads(report.render([run], Asked(NAMES), "json"))["runs"]
    (group,) = [g for g in found["repeats"] if g["load"] == "rate=20/s"]
    f = group["classes"]["b"]["factors"]["ttft_p50"]
    assert (f["runs"], f["confidence"], len(f["interval"])) == (5, "95%", 2)
    one = found["cells"][0]["classes"]["b"]
    assert one["factors"]["ttft_p50"]["value"] == one["interference"]["ttft_p50"]
    assert one["factors"]["ttft_mean"]["refusal"] == "a mean of one run has none"
    assert group["classes"]["a"]["factors"] == {} and group["classes"]["a"]["alone"] is None
