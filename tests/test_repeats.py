"""Repeats of a target at a load: figures over runs by hand, how often the interval covers, what lacks."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench import objectives, results
from llm_bench.metrics import Value
from llm_bench.repeats import Group, groups, interval, over_runs, student_t
from llm_bench.results import Asked, sheets
from llm_bench.stats import Interval
from tests.sample import record
from tests.test_report import write_cell

FIVE = (100.0, 110.0, 90.0, 105.0, 95.0)  # mean 100, squares of the differences 0, 100, 100, 25, 25


def value(figure: float | None, **facts: Any) -> Value:
    return Value("ttft_p95", "ms", figure, **{"n": 40} | facts)


# ---- a figure over runs


def test_five_runs_have_their_mean_and_the_t_interval_of_it() -> None:
    found = over_runs([value(x, ess=200.0, interval=Interval(1, 2)) for x in FIVE])
    half = 2.776 * math.sqrt(250 / 4) / math.sqrt(5)
    assert (found.value, found.n, found.refusal) == (100, 200, "")
    assert found.interval == pytest.approx((100 - half, 100 + half), rel=1e-3)
    assert found.ess is None  # of one run's requests, which are no sample of runs
    assert found.labels == ("mean of 5 runs",)


def test_under_five_runs_there_is_no_interval_and_why() -> None:
    found = over_runs([value(x) for x in FIVE[:4]])
    assert (found.value, found.interval) == (101.25, None)
    assert found.refusal == "4 runs, 5 are needed for an interval of their spread"


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        ((1.0, None, 2.0), "1 of 3 runs have none: too few"),
        ((None, None), "none of 2 runs has one: too few"),
    ],
)
def test_a_run_without_a_figure_is_not_made_up_for_by_the_others(figures: tuple[Any, ...], reason: str) -> None:
    found = over_runs([value(x, reason="" if x else "too few") for x in figures])
    assert (found.value, found.interval, found.reason) == (None, None, reason)


def test_labels_and_what_was_left_out_are_of_any_run() -> None:
    one = value(1.0, labels=("depends on run length",), not_applicable={"one token": 2})
    found = over_runs([one, value(2.0, not_applicable={"one token": 1, "not streamed": 4})])
    assert found.labels == ("mean of 2 runs", "depends on run length")
    assert found.not_applicable == {"one token": 3, "not streamed": 4}


@pytest.mark.parametrize(
    ("readings", "all_requests"),
    [((None, None), None), ((3.0, None), 2.5), ((3.0, "error"), "error"), ((None, "error"), "error")],
)
def test_one_error_among_the_all_requests_readings_is_one_of_them_all(readings: Any, all_requests: Any) -> None:
    assert over_runs([value(x, all_requests=y) for x, y in zip((1.0, 2.0), readings, strict=True)]).all_requests == (
        all_requests
    )


def test_the_bounds_of_a_share_are_shares() -> None:
    shares = [0.0, 0.0, 0.0, 0.0, 1.0]
    found = over_runs([Value("error_rate", "share", x, 10) for x in shares])
    assert found.interval is not None and found.interval.low == 0
    assert over_runs([Value("error_rate", "share", 1 - x, 10) for x in shares]).interval == pytest.approx(
        (1 - found.interval.high, 1.0)
    )


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), min_size=1, max_size=12))
def test_percentiles_stay_in_their_order_and_a_mean_in_its_interval(pairs: list[tuple[float, float]]) -> None:
    low, high = (over_runs([value(f(pair)) for pair in pairs]) for f in (min, max))
    assert low.value is not None and high.value is not None and low.value <= high.value
    if high.interval is not None:
        assert high.interval.low <= high.value <= high.interval.high


@pytest.mark.parametrize(
    ("freedom", "t"), [(4, 2.77645), (5, 2.57058), (7, 2.36462), (9, 2.26216), (14, 2.14479), (100, 1.98397)]
)
def test_students_t_is_that_of_the_tables(freedom: int, t: float) -> None:
    assert student_t(freedom) == pytest.approx(t, rel=4e-4)


@pytest.mark.parametrize("runs", [5, 10])
def test_the_interval_covers_the_mean_of_runs_as_often_as_it_says(runs: int) -> None:
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(5)))
    drawn = [interval(row) for row in 100 + random.standard_normal((4000, runs))]
    covered = np.mean([isinstance(x, Interval) and x.low <= 100 <= x.high for x in drawn])
    assert covered == pytest.approx(0.95, abs=0.012)


# ---- cells of a run


def repeated(folder: Path, runs: int = 5) -> results.Run:
    """One target: `runs` runs at c=1, run k with TTFT of 50 + k ms, its last one with a failure; and one at c=2."""
    entries = []
    for k in range(runs):
        rows = [record(i, 100 * i, events=[100 * i + 50 + k]) for i in range(40)]
        if k == runs - 1:
            rows.append(record(40, 4000, end=4001, outcome="failed"))
        load = {"kind": "open", "rate": 10.0, "warmup": 0.0, "label": "c=1"}
        write_cell(folder, f"{k:03d}-a-p{k}", rows, load=load, pair=k, arm="a", order=0, repeat=runs)
        entries.append({"name": f"{k:03d}-a-p{k}", "end": {"reason": "exhausted"}, "pair": k})
    write_cell(folder, "099-a", [record(i, 100 * i, events=[100 * i + 9]) for i in range(40)])
    facts = {"cells": [*entries, {"name": "099-a", "end": {"reason": "exhausted"}}]}
    (folder / "run.json").write_text(json.dumps(facts))
    return results.load_run(folder)


def grouped(run: results.Run, slo: str = "") -> list[Group]:
    return groups(sheets(run, Asked(["ttft_p50", "error_rate"], objectives.parse(slo))))


def test_repeats_of_a_load_stand_together_and_a_cell_alone_is_as_it_is(tmp_path: Path) -> None:
    five, alone = grouped(repeated(tmp_path))
    assert (five.target, five.load, five.runs, alone.runs) == ("a", "c=1", 5, 1)
    assert [sheet.measured.pair for sheet in five.sheets] == list(range(5))
    assert five.values[0].value == pytest.approx(52)
    assert five.range_of("ttft_p50") == pytest.approx((50, 54))
    assert five.outcomes["ok"] == 200 and five.outcomes["failed"] == 1
    assert five.values[1].value == pytest.approx(1 / 41 / 5)
    assert alone.values == alone.sheets[0].values
    assert alone.doubts() == alone.sheets[0].doubts


def test_single_runs_are_told_apart_by_their_number(tmp_path: Path) -> None:
    found = groups(sheets(repeated(tmp_path, runs=2), Asked(["ttft_p50"])), apart=True)
    assert [(group.load, group.runs) for group in found] == [("c=1, run 1", 1), ("c=1, run 2", 1), ("rate=5/s", 1)]
    assert [group.values[0].value for group in found[:2]] == pytest.approx([50, 51])


def test_each_run_is_judged_alone_and_the_worst_counts(tmp_path: Path) -> None:
    five, _ = grouped(repeated(tmp_path), "ttft_p50<54.5ms,ttft_p90<51ms")
    assert [(said.limit.text, said.verdict, said.runs) for said in five.limits()] == [
        ("ttft_p50<54.5ms", "MET", {"MET": 5}),
        ("ttft_p90<51ms", "MISSED", {"MISSED": 4, "MET": 1}),
    ]


def test_a_doubt_is_said_once_with_the_runs_that_have_it(tmp_path: Path) -> None:
    five, _ = grouped(repeated(tmp_path))
    (failed,) = [doubt for doubt in five.doubts() if doubt.kind == "failed requests"]
    assert failed.text.startswith("in 1 of 5 runs, first in run 5: 2.4%")


def test_failures_of_all_runs_are_counted_together(tmp_path: Path) -> None:
    for k in range(2):
        rows = [record(i, 100 * i, outcome="failed", end=100 * i + 1, status=500 + k) for i in range(3)]
        write_cell(tmp_path, f"00{k}-a", rows, pair=k)
    (both,) = grouped(results.load_run(tmp_path))
    assert [f.text for f in both.failures()] == ["http_5xx 500 x3, 501 x3"]


def test_a_cell_that_run_json_does_not_list_is_no_repeat(tmp_path: Path) -> None:
    run = repeated(tmp_path, runs=2)
    facts = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(facts | {"cells": facts["cells"][1:]}))
    assert [group.runs for group in grouped(run)] == [2, 1]
    assert sorted(group.runs for group in grouped(results.load_run(tmp_path))) == [1, 1, 1]
