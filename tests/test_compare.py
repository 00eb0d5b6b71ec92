"""Runs and targets side by side: what work they did, what changed, and when a change may have an interval."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llm_bench import compare, grid, pairs, results
from llm_bench.compare import Compared
from llm_bench.errors import BenchError
from llm_bench.records import Record
from tests import sample_arms
from tests.sample_arms import BASE, LOAD, SAME, SLOW, write_arms
from tests.test_gate_report import invoke, refused

NAMES = ["ttft_p95", "tokens_per_second", "error_rate", "wasted_tokens"]


def compared(*folders: Path, names: list[str] = NAMES) -> Compared:
    return compare.compare([results.load_run(folder) for folder in folders], names)


def test_interleaved_pairs_give_each_change_an_interval(tmp_path: Path) -> None:
    got = compared(write_arms(tmp_path / "run", {"base": BASE, "cand": SLOW}))
    assert (got.arms, got.objections) == (["base", "cand"], [])
    assert got.first == "Interleaved, the same work, 8 pairs at the load with the fewest"
    ttft, tokens, errors, wasted = got.lines
    change = ttft.figures[1].change
    d = np.log(np.array(SLOW) / BASE)
    by_hand = pairs.compare(d, 0.0)
    assert change is not None and by_hand.low is not None and by_hand.high is not None
    assert (change.pairs, change.points) == (8, False)
    assert change.change == pytest.approx(math.expm1(d.mean()), abs=1e-6)
    assert (change.low, change.high) == pytest.approx((math.expm1(by_hand.low), math.expm1(by_hand.high)), abs=1e-6)
    assert ttft.figures[0].change is None
    assert ttft.figures[0].value == pytest.approx(float(np.mean(BASE)) * 117.7 / 100, rel=1e-3)
    assert tokens.figures[1].change is not None and tokens.figures[1].change.change < 0
    assert errors.figures[1].change == (0, 0, 0, 8, True)
    assert wasted.figures[1].change is None  # 0 has no percent


def test_few_pairs_have_a_change_and_no_interval(tmp_path: Path) -> None:
    got = compared(write_arms(tmp_path / "run", {"base": BASE[:4], "cand": SLOW[:4]}))
    change = got.lines[0].figures[1].change
    assert change is not None and (change.low, change.high, change.pairs) == (None, None, 4)
    assert change.text == "+6%"
    assert got.first.endswith("4 pairs at the load with the fewest; an interval needs 6")


def test_runs_apart_are_said_to_be_first_of_all_and_have_no_interval(tmp_path: Path) -> None:
    old = write_arms(tmp_path / "old", {"t": BASE}, interleaved=False)
    new = write_arms(tmp_path / "new", {"t": SLOW}, interleaved=False)
    got = compared(old, new)
    assert got.arms == ["old", "new"]
    assert got.first.startswith("NOT INTERLEAVED: measured apart, in two runs")
    change = got.lines[0].figures[1].change
    assert change is not None and (change.low, change.high, change.pairs) == (None, None, 8)
    for text in (compare.text(got), compare.markdown(got)):
        assert "NOT INTERLEAVED" in text.splitlines()[0]


def test_other_work_is_said_before_everything(tmp_path: Path) -> None:
    def longer(ttft_ms: float, salt: int) -> list[Record]:
        made = sample_arms.rows(ttft_ms, tokens=5 if ttft_ms in SLOW else 4, salt=salt)
        return [replace(r, tokens_in=120) for r in made] if ttft_ms in SLOW else made

    got = compared(write_arms(tmp_path / "run", {"base": BASE, "cand": SLOW}, of=longer))
    assert got.first.startswith("NOT THE SAME WORK: ")
    change = got.lines[0].figures[1].change
    assert change is not None and change.low is None
    facts = dict(got.facts)
    assert facts["delivered tokens"] == ["4 a request", "5 a request"]
    assert facts["prompt tokens"] == ["100.0 a request", "120.0 a request"]
    shown = compare.text(got)
    assert "delivered tokens ≠" in shown and "model ≠" not in shown


def test_other_work_at_one_load_takes_the_interval_there_only(tmp_path: Path) -> None:
    def longer(ttft_ms: float, salt: int) -> list[Record]:
        return sample_arms.rows(ttft_ms, tokens=5 if salt > 16_000 and ttft_ms in SLOW else 4, salt=salt)

    other = LOAD | {"label": "c=8"}
    got = compared(write_arms(tmp_path / "run", {"base": BASE, "cand": SLOW}, [LOAD, other], of=longer))
    lows = {line.load: line.figures[1].change.low for line in got.lines if line.figures[1].change}
    assert lows["c=8"] is None and lows["rate=100/s"] is not None
    assert got.first.startswith("NOT THE SAME WORK: ")


def test_several_runs_of_several_targets_are_named_by_both(tmp_path: Path) -> None:
    a = write_arms(tmp_path / "a", {"x": BASE[:1], "y": SAME[:1]})
    b = write_arms(tmp_path / "b", {"x": SLOW[:1]}, interleaved=False)
    twin = write_arms(tmp_path / "deep" / "b", {"x": SLOW[:1]}, interleaved=False)
    assert compared(a, b).arms == ["a:x", "a:y", "b"]
    assert compared(b, twin).arms == [str(b), str(twin)]


def test_what_an_arm_does_not_have_is_missing_with_its_reason(tmp_path: Path) -> None:
    a = write_arms(tmp_path / "a", {"x": BASE[:1]}, interleaved=False)
    b = write_arms(tmp_path / "b", {"x": BASE[:1]}, [LOAD | {"label": "c=8"}], interleaved=False)
    got = compared(a, b, names=["ttft_p95", "goodput"])
    assert [(line.load, line.metric) for line in got.lines[:2]] == [
        ("rate=100/s", "ttft_p95"),
        ("rate=100/s", "goodput"),
    ]
    assert [f.reason for f in got.lines[0].figures] == ["", "it was not measured at this load"]
    assert got.lines[1].figures[0].reason == "no limits were given: --slo"
    shown = compare.text(got)
    assert "–: no limits were given: --slo: goodput" in shown
    # Once, however many metrics that is.
    assert [line for line in shown.splitlines() if "not measured" in line] == [
        "  –: not measured: b at rate=100/s, a at c=8"
    ]
    assert got.first == "NO LOAD IN COMMON WITH THE FIRST: b"


def test_how_arms_were_apart_is_said_of_each(tmp_path: Path) -> None:
    a = write_arms(tmp_path / "a", {"x": BASE[:1], "y": SAME[:1]}, interleaved=False)
    b = write_arms(tmp_path / "b", {"x": SLOW[:1]}, interleaved=False)
    first = compared(a, b).first
    assert "a:x, a:y: measured apart, one after the other, not in turns (--interleave): what changed" in first
    assert "a:x, b: measured apart, in two runs: what changed" in first


def test_one_arm_alone_is_nothing_to_compare(tmp_path: Path) -> None:
    assert "one target, expected two runs or targets" in refused(
        "compare", write_arms(tmp_path / "a", {"x": BASE[:1]}, interleaved=False)
    )
    with pytest.raises(BenchError, match="one target"):
        compared(tmp_path / "a")


def test_every_format_says_the_same_and_json_is_strict(tmp_path: Path) -> None:
    folder = write_arms(tmp_path / "run", {"base": BASE, "cand": SLOW})
    got = compared(folder)
    found = json.loads(
        invoke("compare", folder, "--metrics", ",".join(NAMES), "--format", "json").output,
        parse_constant=lambda word: pytest.fail(word),
    )
    assert found["arms"] == got.arms and found["first"] == got.first
    assert [f["arms"][1]["change"] and f["arms"][1]["change"]["change"] for f in found["figures"]] == [
        line.figures[1].change and line.figures[1].change.change for line in got.lines
    ]
    text, md = (
        invoke("compare", folder, "--metrics", ",".join(NAMES), "--format", f).output for f in ("terminal", "md")
    )
    for _, rows in compare.tables(got):
        for cell in (cell for row in rows for cell in row):
            assert cell in text and grid.escaped(cell) in md
    assert "tpot_p95" in invoke("compare", folder).output  # by default what a report has
