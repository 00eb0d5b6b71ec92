"""Every number that a report prints, recomputed by hand from five records; and what is said about what is missing."""

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest

from llm_bench import report
from llm_bench.errors import BenchError
from llm_bench.records import Record, Writer
from tests.sample import header, record

# In ms. The window is [0, 400): from the first due time, without warm-up, to the last, whose request is outside.
FIVE = [
    record(0, 0, sent=10, events=[50, 60, 70]),
    record(1, 100, events=[180, 200, 240], tokens_out=6),
    record(2, 200, end=210, outcome="failed", error="HTTP 503: busy | later"),
    record(3, 300, events=[330]),
    record(4, 400, events=[450, 500]),
]
BY_HAND = {
    "ttft_min": 30,
    "ttft_p50": 50,  # of 30, 50, 80
    "ttft_p90": 74,  # rank 1.8
    "ttft_p95": 77,  # rank 1.9
    "ttft_p99": 79.4,  # rank 1.98
    "ttft_max": 80,
    "ttft_mean": 160 / 3,
    "ttft_std": (((30 - 160 / 3) ** 2 + (50 - 160 / 3) ** 2 + (80 - 160 / 3) ** 2) / 2) ** 0.5,
    "ttft_sent_p50": 40,  # of 30, 40, 80
    "e2e_p50": 70,  # of 30, 70, 140
    "e2e_sent_p50": 60,
    "tpot_mean": 11,  # 20 / 2 and 60 / 5; one token has none
    "output_speed_max": 100,
    "itl_mean": 20,  # 10, 10, 20, 40
    "stall_mean": 25,  # 10 and 40
    "lag_max": 10,
    "normalized_latency_max": 30,  # 70 / 3, 140 / 6, 30 / 1
    "tokens_per_second": 25,  # 3 + 6 + 1 tokens in 0.4 s
    "total_tokens_per_second": 775,  # and 3 prompts of 100
    "tokens_per_second_run": 24,  # 12 tokens in 0.5 s
    "wasted_tokens": 0,
    "requests_per_second": 7.5,
    "arrival_rate": 10,
    "in_flight": 0.6,  # 60 + 140 + 10 + 30 ms of 400
    "in_system": 0.625,
    "concurrency_effective": 0.625,
    "error_rate": 0.25,
    "cancel_rate": 0,
    "drop_rate": 0,
    "payload_mbit_per_second": 28 * 8 / 1e6 / 0.4,
    "payload_share": 0.02,  # 28 of 1400 bytes
    "tokens_per_event": 10 / 7,
    "zero_gap_share": 0,
}
ALL_REQUESTS = {"ttft_p50": 65, "ttft_p90": "error", "ttft_p95": "error", "ttft_p99": "error"}
ALL_REQUESTS |= {"ttft_sent_p50": 60, "e2e_p50": 105, "e2e_sent_p50": 100}


def write_cell(folder: Path, name: str, rows: list[Record], **head: Any) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    writer = Writer(folder / f"{name}.arrow", header(**head))
    for row in rows:
        writer.write(row)
        writer.flush()
    writer.close()
    return folder / f"{name}.arrow"


@pytest.fixture
def five(tmp_path: Path) -> Path:
    write_cell(tmp_path / "five", "000-a", FIVE)
    entry = {"name": "000-a", "file": "000-a.arrow", "target": "a", "load": {}, "end": {"reason": "exhausted"}}
    facts = {"version": "0.1.0", "cells": [entry | {"doubts": [{"kind": "weather", "text": "it rained"}]}]}
    (tmp_path / "five" / "run.json").write_text(json.dumps(facts))
    return tmp_path / "five"


def test_every_number_is_the_one_worked_by_hand(five: Path) -> None:
    (line,) = report.render(report.load_run(five), list(BY_HAND), "json").splitlines()
    (cell,) = json.loads(line)["cells"]
    got = cell["metrics"]
    assert {name: v["value"] for name, v in got.items()} == pytest.approx(BY_HAND)
    assert {n: v["all_requests"] for n, v in got.items() if v["all_requests"] is not None} == pytest.approx(
        ALL_REQUESTS
    )
    assert {n: v["ess"] for n, v in got.items() if v["ess"] is not None} == dict.fromkeys(ALL_REQUESTS, 3)
    assert all(v["n"] == 3 for n, v in got.items() if n.startswith(("ttft", "e2e", "lag", "norm")))
    assert (got["tpot_mean"]["n"], got["itl_mean"]["n"], got["stall_mean"]["n"]) == (2, 4, 2)
    assert all(got[n]["n"] == 4 for n in ("tokens_per_second", "error_rate", "in_flight"))
    assert got["tpot_mean"]["not_applicable"] == {"under 2 tokens": 1}
    assert got["ttft_p95"]["interval_95"] is None
    assert got["ttft_p95"]["no_interval"].startswith("p95 of 3 lies between the two largest")
    w = cell["window"]
    assert (w["seconds"], w["requests"], w["warmup_requests"], w["first_wave"]) == (0.4, 4, 0, 0)
    assert cell["outcomes"] == {"ok": 3, "failed": 1, "cancelled": 0, "cut_at_end": 0, "dropped": 0}
    assert cell["failures"] == [{"kind": "http_5xx", "count": 1, "first_error": "HTTP 503: busy | later"}]
    assert {"kind": "weather", "text": "it rained"} in cell["doubts"]


def test_csv_is_long_and_carries_the_same_numbers(five: Path) -> None:
    text = report.render(report.load_run(five), [*BY_HAND, "goodput"], "csv")
    lines = list(csv.DictReader(text.splitlines()))
    assert list(lines[0]) == ["target", "load", "metric", "value", "unit", "n", "ess", "label", "run"]
    assert {row["metric"]: float(row["value"]) for row in lines[:-1]} == pytest.approx(BY_HAND)
    assert (lines[-1]["value"], lines[-1]["label"]) == ("", "no --slo was given")
    assert {(row["target"], row["load"], row["run"]) for row in lines} == {("a", "rate=5/s", "five")}


NAMES = ["ttft_p50", "ttft_p95", "tpot_mean", "tokens_per_second", "error_rate", "goodput", "in_flight"]


def test_the_terminal_says_numbers_window_reasons_failures_and_doubts(
    five: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = report.render(report.load_run(five), NAMES, "terminal")
    assert max(map(len, text.splitlines())) <= 100
    flat = " ".join(text.split())
    for words in (
        "│ 50 │",
        "all: 65",
        "all: error",
        "3, 3",
        "25.00%",
        "window 0.000 s to 0.400 s (0.400 s), 4 requests due in it, 0 before it; open loop",
        "tpot_mean: left out of it 1 (under 2 tokens)",
        "goodput: – because no --slo was given",
        "ttft_p95: p95 ≈ max (n=3 < 21)",
        "ttft_p50: no interval, under 150 effective samples",
        "failed: http_5xx 1, first: HTTP 503: busy | later",
        "doubt: failed requests: 25.0% of the requests failed (http_5xx 1)",
        "doubt: weather: it rained",
    ):
        assert words in flat, words
    assert "\x1b" not in text


def test_markdown_has_a_table_and_the_same_remarks(five: Path) -> None:
    text = report.render(report.load_run(five), NAMES, "md")
    assert "| 50 (n 3, ESS 3, all: 65) | 77 (n 3, ESS 3, all: error) | 11 | 25 | 25.00% | – | 0.6 |" in text
    assert "- failed: http_5xx 1, first: HTTP 503: busy \\| later" in text
    assert "**doubt: weather**: it rained" in text


def test_a_closed_loop_is_shown_with_and_without_its_first_wave(tmp_path: Path) -> None:
    rows = [record(0, 0, events=[5000])] + [record(1 + i, 5000 + 10 * i, events=[5010 + 10 * i]) for i in range(50)]
    write_cell(tmp_path / "run", "000-a", rows, load={"kind": "closed", "concurrency": 1})
    run = report.load_run(tmp_path / "run")
    cell = report.document(run, ["ttft_p99", "error_rate"])["cells"][0]
    assert cell["metrics"]["ttft_p99"]["value"] == 10
    assert cell["whole_run"]["ttft_p99"]["value"] == pytest.approx(2505)  # rank 49.5 of 0..50: between 10 and 5000
    assert list(cell["whole_run"]) == ["ttft_p99"]
    assert "first wave of 1 and drain included: ttft_p99 2,505 ms" in report.render(run, ["ttft_p99"], "md")


def test_a_crashed_run_is_read_from_its_record_files_alone(tmp_path: Path) -> None:
    whole = write_cell(tmp_path / "run", "000-a", FIVE)
    cut = write_cell(tmp_path / "run", "001-a", FIVE)
    cut.write_bytes(cut.read_bytes()[:-300])
    run = report.load_run(tmp_path / "run")
    assert [(m.name, m.cell.n, m.cell.complete) for m in run.cells] == [("000-a", 5, True), ("001-a", 4, False)]
    assert run.facts == {}
    assert "incomplete file: the record file ends in the middle" in report.render(run, [], "terminal")
    assert whole.exists()


def test_cells_that_run_json_does_not_know_are_added_and_those_without_records_named(five: Path) -> None:
    write_cell(five, "001-b", FIVE)
    facts = json.loads((five / "run.json").read_text())
    facts["cells"].append({"name": "002-c", "file": "002-c.arrow"})
    (five / "run.json").write_text(json.dumps(facts))
    run = report.load_run(five)
    assert [m.name for m in run.cells] == ["000-a", "001-b"]
    assert "002-c.arrow: the cell was begun and left no records" in report.render(run, [], "terminal")


def test_verdict_counts_ok_requests_failures_and_doubts(five: Path) -> None:
    got = report.verdict(report.load_run(five))
    assert got.cells == [("000-a", 4, 0.2)]
    assert "failed requests" in [d.kind for d in got.doubts]


def test_several_runs_stand_in_one_document(five: Path) -> None:
    run = report.load_run(five)
    both = json.loads(report.render_all([run, run], ["error_rate"], "json"))
    assert [r["cells"][0]["metrics"]["error_rate"]["value"] for r in both["runs"]] == [0.25, 0.25]
    assert len(report.render_all([run, run], ["error_rate"], "csv").splitlines()) == 3


@pytest.mark.parametrize("format_", report.FORMATS)
def test_every_format_takes_an_empty_cell(tmp_path: Path, format_: str) -> None:
    write_cell(tmp_path / "run", "000-a", [])
    text = report.render(report.load_run(tmp_path / "run"), [], format_)
    assert "no ok request was due in the window" in text
    assert text.endswith("\n")


def test_the_newest_run_is_the_one_last_written(tmp_path: Path) -> None:
    for age, name in enumerate(("b", "a", "c")):
        file = write_cell(tmp_path / name, "000-a", FIVE)
        os.utime(file, (1_700_000_000 - age, 1_700_000_000 - age))
    (tmp_path / "empty").mkdir()
    assert report.newest(tmp_path) == tmp_path / "b"
    with pytest.raises(BenchError, match="no run in it"):
        report.newest(tmp_path / "empty")
    with pytest.raises(BenchError, match="no run in it"):
        report.newest(tmp_path / "none")


def test_bad_folders_files_names_and_formats_are_refused(tmp_path: Path, five: Path) -> None:
    with pytest.raises(BenchError, match="no such run folder"):
        report.load_run(tmp_path / "none")
    with pytest.raises(BenchError, match="no record file"):
        report.load_run(tmp_path)
    with pytest.raises(BenchError, match="nearest"):
        report.parse_metrics("ttft_p95,tpt_p95")
    with pytest.raises(BenchError, match="terminal, md, json, csv"):
        report.check_format("html")
    assert report.parse_metrics(" ttft_p95 , error_rate,ttft_p95") == ["ttft_p95", "error_rate"]
    assert report.parse_metrics("") == list(report.DEFAULT_METRICS)
    for text in ("{", "[]"):
        (five / "run.json").write_text(text)
        with pytest.raises(BenchError, match=r"run\.json"):
            report.load_run(five)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        *[(None, "ms", "–"), ("error", "ms", "error"), (0.123456, "share", "12.35%"), (12345.6, "ms", "12,346")],
        *[(123.456, "ms", "123.5"), (12.3456, "ms", "12.35"), (0.00123456, "ms", "0.001235"), (0.0, "1", "0")],
    ],
)
def test_numbers_carry_four_digits(value: float | str | None, unit: str, text: str) -> None:
    assert report.number(value, unit) == text
