"""Every number that a report prints, recomputed by hand from five records; and what is said about what is missing."""

import csv
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from llm_bench import export, objectives, report, results, words
from llm_bench.cli import app
from llm_bench.errors import BenchError
from llm_bench.records import Record, Writer
from llm_bench.results import Asked
from tests.sample import header, ns, record

# In ms. The window is from 0, the first due time, without warm-up, to the last, 400, whose request is in it.
FIVE = [
    record(0, 0, sent=10, events=[50, 60, 70]),
    record(1, 100, events=[180, 200, 240], tokens_out=6),
    record(2, 200, end=210, outcome="failed", error="HTTP 503: busy | later"),
    record(3, 300, events=[330]),
    record(4, 400, events=[470, 520]),
]
BY_HAND = {
    "ttft_min": 30,
    "ttft_p50": 60,  # of 30, 50, 70, 80
    "ttft_p90": 77,  # rank 2.7
    "ttft_p95": 78.5,  # rank 2.85
    "ttft_p99": 79.7,  # rank 2.97
    "ttft_max": 80,
    "ttft_mean": 57.5,
    "ttft_std": ((27.5**2 + 7.5**2 + 12.5**2 + 22.5**2) / 3) ** 0.5,
    "ttft_sent_p50": 55,  # of 30, 40, 70, 80
    "e2e_p50": 95,  # of 30, 70, 120, 140
    "e2e_sent_p50": 90,
    "tpot_mean": 24,  # 20 / 2, 60 / 5 and 50 / 1; one token has none
    "output_speed_max": 100,
    "itl_mean": 26,  # 10, 10, 20, 40, 50
    "stall_mean": 100 / 3,  # 10, 40, 50
    "lag_max": 10,
    "normalized_latency_max": 60,  # 70 / 3, 140 / 6, 30 / 1, 120 / 2
    "tokens_per_second": 25,  # 3 + 6 + 1 tokens in 0.4 s
    "total_tokens_per_second": 775,  # and 3 prompts of 100
    "tokens_per_second_run": 12 / 0.52,
    "wasted_tokens": 0,
    "requests_per_second": 7.5,
    "arrival_rate": 12.5,
    "in_flight": 0.6,  # 60 + 140 + 10 + 30 ms of 400
    "in_system": 0.625,
    "concurrency_effective": 0.925,  # 70 + 140 + 10 + 30 + 120 ms
    "error_rate": 0.2,
    "first_attempt_success": 0.8,
    "cancel_rate": 0,
    "drop_rate": 0,
    "payload_mbit_per_second": 28 * 8 / 1e6 / 0.4,
    "payload_share": 0.02,  # 28 of 1400 bytes
    "tokens_per_event": 12 / 9,
    "zero_gap_share": 0,
}
ALL_REQUESTS = {"ttft_p50": 70, "ttft_p90": "error", "ttft_p95": "error", "ttft_p99": "error"}
ALL_REQUESTS |= {"ttft_sent_p50": 70, "e2e_p50": 120, "e2e_sent_p50": 120}


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


def classed(folder: Path) -> results.Run:
    """Two classes, `chat` of 100 ms and `batch` of 900 ms, 400 requests in all, and one that failed."""
    rows = [
        record(i, 10 * i, events=[10 * i + (900 if i % 2 else 100)], request_class=("chat", "batch")[i % 2])
        for i in range(400)
    ]
    write_cell(folder, "000-a", [*rows, record(400, 4000, end=4001, outcome="failed", request_class="chat")])
    return results.load_run(folder)


SLO = objectives.parse("chat:ttft_p95<=200ms,ttft_p95<=200ms,error_rate<1%")


def test_every_format_has_each_class_and_each_limit_with_its_verdict(tmp_path: Path) -> None:
    run = classed(tmp_path / "run")
    asked = Asked(["ttft_p95", "error_rate"], SLO)
    (cell,) = json.loads(report.render([run], asked, "json"))["runs"][0]["cells"]
    assert {name: of["metrics"]["ttft_p95"]["value"] for name, of in cell["classes"].items()} == {
        "chat": 100,
        "batch": 900,
    }
    assert cell["classes"]["chat"]["outcomes"]["failed"] == 1
    assert [(j["limit"], j["class"], j["verdict"]) for j in cell["slo"]] == [
        ("chat:ttft_p95<=200ms", "chat", "MET"),
        ("ttft_p95<=200ms", "", "MISSED"),
        ("error_rate<1%", "", "UNDECIDED"),
    ]
    rows = list(csv.DictReader(report.render([run], asked, "csv").splitlines()))
    assert [(r["class"], r["metric"], r["slo"]) for r in rows] == [
        ("", "ttft_p95", "ttft_p95<=200ms MISSED"),
        ("", "error_rate", "error_rate<1% UNDECIDED"),
        ("batch", "ttft_p95", ""),
        ("batch", "error_rate", ""),
        ("chat", "ttft_p95", "chat:ttft_p95<=200ms MET"),
        ("chat", "error_rate", ""),
    ]
    for format_ in ("terminal", "md"):
        flat = " ".join(report.render([run], asked, format_).replace("*", "").replace("&lt;", "<").split())
        assert "SLO chat:ttft_p95<=200ms: MET: 200 of 201 met ttft<=200ms" in flat
        assert "SLO ttft_p95<=200ms: MISSED" in flat
        assert re.search(r"[|│] *batch *[|│] *200 *[|│]", flat)


@pytest.mark.parametrize("format_", ["terminal", "md"])
def test_a_report_says_what_stood_between_the_client_and_its_target(tmp_path: Path, format_: str) -> None:
    target = {"name": "a", "proxy": "http://proxy:3128", "insecure": True}
    write_cell(tmp_path / "run", "000-a", FIVE, target=target)
    text = " ".join(report.render([results.load_run(tmp_path / "run")], Asked(), format_).split())
    assert "asked through the proxy http://proxy:3128" in text
    assert "its https certificate was not checked (--insecure)" in text


def test_a_class_that_was_measured_alone_too_shows_what_the_others_did_to_it(tmp_path: Path) -> None:
    load = {"kind": "open", "rate": 5.0, "warmup": 0.0, "label": "rate=5/s", "class_alone": ""}
    rows = [record(i, 100 * i, events=[100 * i + 60.0 + 30 * (i % 2)], request_class="ab"[i % 2]) for i in range(60)]
    write_cell(tmp_path / "run", "000-a", rows, load=load)
    own = [record(r.index, 100 * r.index, events=[100 * r.index + 30.0], request_class="b") for r in rows[1::2]]
    write_cell(tmp_path / "run", "001-a", own, load=load | {"label": "rate=5/s [b alone]", "class_alone": "b"})
    write_cell(tmp_path / "run", "002-a", own, load=load | {"rate": 9.0, "class_alone": "b", "label": "other"})
    run = results.load_run(tmp_path / "run")
    mix = json.loads(report.render([run], Asked(["ttft_p50", "error_rate"]), "json"))["runs"][0]["cells"][0]
    assert mix["classes"]["a"]["alone"] is None
    assert mix["classes"]["b"]["alone"]["ttft_p50"]["value"] == 30
    assert mix["classes"]["b"]["interference"] == {"ttft_p50": 3.0}
    for format_ in ("terminal", "md", "html"):
        text = " ".join(report.render([run], Asked(["ttft_p50", "error_rate"]), format_).split())
        assert "b in the mix: ttft_p50 90 against 30 ms alone (3.00 times)" in text


def test_by_default_what_the_slo_limits_is_shown_too(tmp_path: Path) -> None:
    run = classed(tmp_path / "run")
    slo = objectives.parse("ttft_p99<=200ms,itl_p99<1s")
    names = list(json.loads(report.render([run], Asked(slo=slo), "json"))["runs"][0]["cells"][0]["metrics"])
    assert names == [*words.DEFAULT_METRICS, "ttft_p99", "itl_p99", "slo_attainment", "goodput"]


@pytest.mark.parametrize(("slo", "code"), [
    ("chat:ttft_p95<=200ms", 0), ("ttft_p95<=200ms", 1), ("error_rate<1%", 3), ("error_rate<1%,ttft_p95<=200ms", 1),
])  # fmt: skip
def test_the_exit_code_of_a_report_is_that_of_its_worst_limit(tmp_path: Path, slo: str, code: int) -> None:
    classed(tmp_path / "run")
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--slo", slo, "--fail-on-slo"])
    assert done.exit_code == code
    assert CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--slo", slo]).exit_code == 0


def test_every_number_is_the_one_worked_by_hand(five: Path) -> None:
    (line,) = report.render([results.load_run(five)], Asked(list(BY_HAND)), "json").splitlines()
    (run,) = json.loads(line)["runs"]
    (cell,) = run["cells"]
    got = cell["metrics"]
    assert {name: v["value"] for name, v in got.items()} == pytest.approx(BY_HAND)
    assert {n: v["all_requests"] for n, v in got.items() if v["all_requests"] is not None} == pytest.approx(
        ALL_REQUESTS
    )
    assert {n: v["ess"] for n, v in got.items() if v["ess"] is not None} == dict.fromkeys(ALL_REQUESTS, 4)
    assert all(v["n"] == 4 for n, v in got.items() if n.startswith(("ttft", "e2e", "lag", "norm")))
    assert (got["tpot_mean"]["n"], got["itl_mean"]["n"], got["stall_mean"]["n"]) == (3, 5, 3)
    assert all(got[n]["n"] == 5 for n in ("tokens_per_second", "error_rate", "in_flight"))
    assert got["tpot_mean"]["not_applicable"] == {"under 2 tokens": 1}
    assert got["ttft_p95"]["interval_95"] is None
    assert got["ttft_p95"]["no_interval"].startswith("p95 of 4 lies between the two largest")
    w = cell["window"]
    assert (w["seconds"], w["requests"], w["warmup_requests"], w["first_wave"]) == (0.4, 5, 0, 0)
    assert cell["outcomes"] == {"ok": 4, "failed": 1, "cancelled": 0, "cut_at_end": 0, "dropped": 0}
    assert cell["failures"] == [
        {"kind": "http_5xx", "count": 1, "statuses": {"503": 1}, "first_error": "HTTP 503: busy | later"}
    ]
    assert {"kind": "weather", "text": "it rained", "effect": "either way", "advice": ""} in cell["doubts"]


def test_csv_is_long_and_carries_the_same_numbers(five: Path) -> None:
    text = report.render([results.load_run(five)], Asked([*BY_HAND, "goodput"]), "csv")
    lines = list(csv.DictReader(text.splitlines()))
    assert list(lines[0]) == export.COLUMNS
    assert {(row["state"], row["doubts"], row["interval_low"]) for row in lines} == {("too short", "4", "")}
    assert {row["metric"]: float(row["value"]) for row in lines[:-1]} == pytest.approx(BY_HAND)
    assert (lines[-1]["value"], lines[-1]["label"]) == ("", "no limits were given: --slo")
    assert {(row["target"], row["load"], row["run"]) for row in lines} == {("a", "rate=5/s", "five")}


NAMES = ["ttft_p50", "ttft_p95", "tpot_mean", "tokens_per_second", "error_rate", "goodput", "in_flight"]


def test_the_terminal_says_numbers_window_reasons_failures_and_doubts(
    five: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = report.render([results.load_run(five)], Asked(NAMES), "terminal")
    assert max(map(len, text.splitlines())) <= 100
    flat = " ".join(text.split())
    for said in (
        "│ 4 │ 1 │ 60 │",
        "all: 70",
        "all: error",
        "4, 4",
        "20.00%",
        "window 0.000 s to 0.400 s (0.400 s), 5 requests due in it, 0 before it; open loop",
        "tpot_mean: left out of it 1 (under 2 tokens)",
        "goodput: – because no limits were given: --slo",
        "ttft_p50: no interval, ESS under 150",
        "ok, failed: requests due in the window below a percentile: n, ESS",
        "failed, of all requests: http_5xx 503 x1, first: HTTP 503: busy | later",
        "doubt: failed requests: 20.0% (http_5xx 503 x1)",
        "doubt: too few requests: ttft_p95: p95 of 4 lies between the two largest",
        "doubt: weather: it rained",
    ):
        assert said in flat, said
    assert "\x1b" not in text
    assert flat.count("≈ max") + flat.count("two largest") == 1  # one fact, said once
    assert flat.count("too short") == 1


MANY = ["ttft_p50", "ttft_p95", "tpot_p50", "itl_p99", "e2e_p95", "e2e_max", "tokens_per_second", "requests_per_second"]
MANY += ["error_rate", "concurrency_effective", "payload_mbit_per_second", "total_tokens_per_second"]


@pytest.mark.parametrize(("columns", "tables"), [(20, 12), (60, 6), (100, 3), (200, 1)])
def test_tables_hold_as_many_metrics_as_the_terminal_and_never_cut_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int, tables: int
) -> None:
    rows = [
        record(i, 10 * i, events=[10 * i + 1000 + i % 97, 10 * i + 123_456 + i % 89], tokens_out=50_000, bytes_in=9**6)
        for i in range(2000)
    ]
    write_cell(tmp_path / "run", "000-a", [*rows, record(2000, 5000, outcome="failed", end=6000)])
    run = results.load_run(tmp_path / "run")
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = report.render([run], Asked(MANY), "terminal").splitlines()
    drawn = [line for line in lines if line.startswith(("┏", "┃", "┡", "│", "└"))]
    assert columns == 20 or max(map(len, lines)) <= columns
    assert sum(line[0] == "┏" for line in drawn) == tables
    assert "…" not in "".join(drawn)
    assert all(line[1] == line[-2] == " " for line in drawn if line[0] in "┃│")  # a space on either side
    (cell,) = export.document(run, Asked(MANY))["cells"]
    shown = " ".join(drawn).replace("│", " ").split()
    for name, value in cell["metrics"].items():
        assert words.number(value["value"], value["unit"]) in shown, name
    (firsts,) = {tuple(cell.strip() for cell in line.split("│")[1:4]) for line in drawn if "rate=5/s" in line}
    assert firsts == ("rate=5/s", "2000", "1")


def test_markdown_has_a_table_and_the_same_remarks(five: Path) -> None:
    text = report.render([results.load_run(five)], Asked(NAMES), "md")
    assert (
        "| rate=5/s | 4 | 1 | 60 (n 4, ESS 4, all: 70) | 78.5 (n 4, ESS 4, all: error) | 24 | 25 | 20.00% | – | 0.6 |"
        in text
    )
    assert "- failed, of all requests: http_5xx 503 x1, first: HTTP 503: busy \\| later" in text
    assert "**doubt: weather**: it rained" in text


def test_a_whole_run_without_a_figure_is_not_spoken_of(tmp_path: Path) -> None:
    rows = [record(i, 10 * i, end=10 * i + 9, outcome="failed") for i in range(50)]
    write_cell(tmp_path / "run", "000-a", rows, load={"kind": "closed", "concurrency": 1})
    for format_ in ("terminal", "md"):
        text = report.render([results.load_run(tmp_path / "run")], Asked(), format_)
        assert "whole run" not in text
        assert "latencies are of the others" not in " ".join(text.split())


def test_requests_per_second_is_told_apart_from_the_requests_counted_as_ok(five: Path) -> None:
    said = "requests due in the window; requests_per_second counts the ok ones that ended in it"
    for format_ in ("terminal", "md"):
        text = " ".join(report.render([results.load_run(five)], Asked(["requests_per_second"]), format_).split())
        assert text.count(said) == 1


def test_a_run_that_streamed_nothing_shows_whole_answers_by_default(tmp_path: Path, five: Path) -> None:
    rows = [record(i, 10 * i, end=10 * i + 9) for i in range(50)]
    write_cell(tmp_path / "run", "000-a", rows, settings={"stream": False})
    run, streamed = results.load_run(tmp_path / "run"), results.load_run(five)
    runs = json.loads(report.render([run, streamed], Asked(), "json"))["runs"]
    assert [list(r["cells"][0]["metrics"])[:3] for r in runs] == [
        ["e2e_p50", "e2e_p95", "e2e_p99"],
        ["ttft_p50", "ttft_p95", "tpot_p50"],
    ]
    assert "nothing was streamed: no TTFT" in report.render([run], Asked(), "md")
    assert "nothing was streamed" not in report.render([streamed], Asked(), "md")
    assert list(json.loads(report.render([run], Asked(["ttft_p50"]), "json"))["runs"][0]["cells"][0]["metrics"]) == [
        "ttft_p50"
    ]


def test_a_closed_loop_is_shown_with_and_without_its_first_wave(tmp_path: Path) -> None:
    rows = [record(0, 0, events=[5000])] + [record(1 + i, 5000 + 10 * i, events=[5010 + 10 * i]) for i in range(50)]
    write_cell(tmp_path / "run", "000-a", rows, load={"kind": "closed", "concurrency": 1})
    run = results.load_run(tmp_path / "run")
    cell = export.document(run, Asked(["ttft_p99", "error_rate"]))["cells"][0]
    assert cell["metrics"]["ttft_p99"]["value"] == 10
    assert cell["whole_run"]["ttft_p99"]["value"] == pytest.approx(2505)  # rank 49.5 of 0..50: between 10 and 5000
    assert list(cell["whole_run"]) == ["ttft_p99"]
    assert "first wave of 1 and drain included: ttft_p99 2,505 ms" in report.render([run], Asked(["ttft_p99"]), "md")


def test_a_crashed_run_is_read_from_its_record_files_alone(tmp_path: Path) -> None:
    whole = write_cell(tmp_path / "run", "000-a", FIVE)
    cut = write_cell(tmp_path / "run", "001-a", FIVE)
    cut.write_bytes(cut.read_bytes()[:-300])
    run = results.load_run(tmp_path / "run")
    assert [(m.name, m.cell.n, m.cell.complete) for m in run.cells] == [("000-a", 5, True), ("001-a", 4, False)]
    assert run.facts == {}
    assert "incomplete file: the record file ends in the middle" in report.render([run], Asked(), "terminal")
    assert whole.exists()


def test_cells_that_run_json_does_not_know_are_added_and_those_without_records_named(five: Path) -> None:
    write_cell(five, "001-b", FIVE)
    facts = json.loads((five / "run.json").read_text())
    facts["cells"].append({"name": "002-c", "file": "002-c.arrow", "target": "c"})
    (five / "run.json").write_text(json.dumps(facts))
    run = results.load_run(five)
    assert [m.name for m in run.cells] == ["000-a", "001-b"]
    assert "missing cell: c at ?: it was begun and left no records" in report.render([run], Asked(), "terminal")


@pytest.mark.parametrize("torn", [b"", b"\xff\xff\xff\xff\x10\x00", b"nonsense"])
@pytest.mark.parametrize("format_", report.FORMATS)
def test_a_cell_that_cannot_be_read_is_named_and_the_others_are_shown(five: Path, torn: bytes, format_: str) -> None:
    (five / "001-b.arrow").write_bytes(torn)
    (five / "002-c.arrow").write_bytes(torn)  # of which run.json knows nothing
    facts = json.loads((five / "run.json").read_text())
    facts["cells"].append({"name": "001-b", "target": "b", "load": {"label": "c=4"}})
    (five / "run.json").write_text(json.dumps(facts))
    run = results.load_run(five)
    assert [m.name for m in run.cells] == ["000-a"]
    said = [d.text for d in results.verdict(run).doubts if d.kind == "missing cell"]
    assert [text.split(": ")[0] for text in said] == ["b at c=4", "002-c at ?"]
    assert all("it cannot be read: " in text and "not a record file of llm-bench" in text for text in said)
    said = report.render([run], Asked(["error_rate"]), format_)
    assert "001-b.arrow" in "".join(said.split())  # a long folder may break it over two lines
    (five / "000-a.arrow").write_bytes(torn)
    with pytest.raises(BenchError, match=r"000-a\.arrow: not a record file"):
        results.load_run(five)


def test_a_cell_that_run_json_lists_without_an_end_is_a_doubt(five: Path) -> None:
    def early() -> list[str]:
        return [d.text for d in results.verdict(results.load_run(five)).doubts if d.kind == "ended early"]

    assert early() == []
    facts = json.loads((five / "run.json").read_text())
    del facts["cells"][0]["end"]
    (five / "run.json").write_text(json.dumps(facts))
    (text,) = early()
    assert text.startswith("it has no end: killed, or stopped by an error; 5 of at most 5 requests")
    (five / "run.json").unlink()
    assert early() == []


PLANNED = {"targets": ["a", "b"], "loads": ["c=2", "c=4"]}


def begun(target: str, load: str, **end: Any) -> dict[str, Any]:
    return {"file": f"{target}-{load}.arrow", "target": target, "load": {"label": load}, "end": end}


@pytest.mark.parametrize(
    ("cells", "missing", "why"),
    [
        (
            [begun("a", "c=2", reason="exhausted"), begun("a", "c=4", reason="interrupted")],
            ["b at c=2", "b at c=4"],
            "not run, since the run was interrupted (a at c=4)",
        ),
        (
            [begun("a", "c=2", reason="target gone")],
            ["a at c=4", "b at c=2", "b at c=4"],
            "not run, since the target no longer answered (a at c=2)",
        ),
        (
            [begun("a", "c=2")],
            ["a at c=4", "b at c=2", "b at c=4"],
            "not run when the run last wrote down where it was",
        ),
        ([begun(t, load, reason="exhausted") for t in "ab" for load in ("c=2", "c=4")], [], ""),
    ],
)
@pytest.mark.parametrize("format_", report.FORMATS)
def test_cells_that_never_ran_are_named_everywhere(
    tmp_path: Path, cells: list[dict[str, Any]], missing: list[str], why: str, format_: str
) -> None:
    for entry in cells:
        write_cell(tmp_path, entry["file"].removesuffix(".arrow"), FIVE)
    (tmp_path / "run.json").write_text(json.dumps(PLANNED | {"cells": cells}))
    run = results.load_run(tmp_path)
    assert [(d.kind, d.text) for d in results.verdict(run).doubts if d.kind == "missing cell"] == [
        ("missing cell", f"{cell}: {why}") for cell in missing
    ]
    text = report.render([run], Asked(["error_rate"]), format_)
    if format_ == "csv":
        rows = [row for row in csv.DictReader(text.splitlines()) if row["state"] == "missing"]
        assert [f"{row['target']} at {row['load']}" for row in rows] == missing
        assert {(row["value"], row["label"]) for row in rows} == ({("", why)} if missing else set())
    else:
        assert text.count("not run") == (2 * len(missing) if format_ == "json" else len(missing))
        assert all(cell in text for cell in missing)


def test_a_load_asked_for_twice_is_missed_when_it_ran_once(tmp_path: Path) -> None:
    write_cell(tmp_path, "a-c=2", FIVE)
    facts = {"targets": ["a"], "loads": ["c=2", "c=2"], "cells": [begun("a", "c=2", reason="interrupted")]}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    assert [(m.target, m.load) for m in results.load_run(tmp_path).missing] == [("a", "c=2")]


def test_verdict_counts_ok_requests_failures_and_doubts(five: Path) -> None:
    got = results.verdict(results.load_run(five))
    assert got.cells == [("000-a", 4, 0.2)]
    assert "failed requests" in [d.kind for d in got.doubts]


def test_several_runs_stand_in_one_document(five: Path) -> None:
    run = results.load_run(five)
    both = json.loads(report.render([run, run], Asked(["error_rate"]), "json"))
    one = json.loads(report.render([run], Asked(["error_rate"]), "json"))
    assert both == {"schema": 1, "runs": 2 * one["runs"]}  # the same shape however many there are
    assert [r["cells"][0]["metrics"]["error_rate"]["value"] for r in both["runs"]] == [0.2, 0.2]
    assert len(report.render([run, run], Asked(["error_rate"]), "csv").splitlines()) == 3


@pytest.mark.parametrize("format_", report.FORMATS)
def test_every_format_takes_an_empty_cell(tmp_path: Path, format_: str) -> None:
    write_cell(tmp_path / "run", "000-a", [])
    text = report.render([results.load_run(tmp_path / "run")], Asked(), format_)
    assert "no ok request was due in the window" in " ".join(text.split())
    assert text.endswith("\n")


def test_the_newest_run_is_the_one_last_written(tmp_path: Path) -> None:
    for age, name in enumerate(("b", "a", "c")):
        file = write_cell(tmp_path / name, "000-a", FIVE)
        os.utime(file, (1_700_000_000 - age, 1_700_000_000 - age))
    (tmp_path / "failed").mkdir()
    (tmp_path / "failed" / "run.json").write_text('{"cells": []}')  # newer, but it failed before its first request
    (tmp_path / "empty").mkdir()
    assert results.newest(tmp_path) == tmp_path / "b"
    (tmp_path / "only" / "failed").mkdir(parents=True)
    (tmp_path / "only" / "failed" / "run.json").write_text('{"cells": []}')
    for folder in ("empty", "only"):
        with pytest.raises(BenchError, match="no run with records in it"):
            results.newest(tmp_path / folder)
    with pytest.raises(BenchError, match="no run with records in it"):
        results.newest(tmp_path / "none")


def test_bad_folders_files_names_and_formats_are_refused(tmp_path: Path, five: Path) -> None:
    with pytest.raises(BenchError, match="no such run folder"):
        results.load_run(tmp_path / "none")
    with pytest.raises(BenchError, match="no record file"):
        results.load_run(tmp_path)
    with pytest.raises(BenchError, match="nearest"):
        report.parse_metrics("ttft_p95,tpt_p95")
    with pytest.raises(BenchError, match="terminal, md, json, csv"):
        report.check_format("pdf")
    assert report.parse_metrics(" ttft_p95 , error_rate,ttft_p95") == ["ttft_p95", "error_rate"]
    assert report.parse_metrics("") == []
    for text in ("{", "[]"):
        (five / "run.json").write_text(text)
        with pytest.raises(BenchError, match=r"run\.json"):
            results.load_run(five)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        *[(None, "ms", "–"), ("error", "ms", "error"), (0.123456, "share", "12.35%"), (12345.6, "ms", "12,346")],
        *[(123.456, "ms", "123.5"), (12.3456, "ms", "12.35"), (0.00123456, "ms", "0.001235"), (0.0, "1", "0")],
    ],
)
def test_numbers_carry_four_digits(value: float | str | None, unit: str, text: str) -> None:
    assert words.number(value, unit) == text


def refused(i: int, kind: str, status: int) -> Record:
    return record(i, 10 * i, outcome="failed", error_kind=kind, status=status, error=f"HTTP {status}", end=10 * i + 1)


@pytest.mark.parametrize("format_", report.FORMATS)
def test_every_format_lists_failures_with_their_statuses(tmp_path: Path, format_: str) -> None:
    kinds = [("http_5xx", 500)] * 3 + [("http_5xx", 502)] + [("rejected", 503)] * 4 + [("rejected", 429)] * 2
    rows = [refused(i, *kind) for i, kind in enumerate(kinds)]
    write_cell(tmp_path / "run", "000-a", [*rows, record(10, 100, events=[105])])
    text = report.render([results.load_run(tmp_path / "run")], Asked(["error_rate"]), format_)
    if format_ == "json":
        found = json.loads(text)["runs"][0]["cells"][0]["failures"]
        assert [(f["kind"], f["count"], f["statuses"]) for f in found] == [
            ("http_5xx", 4, {"500": 3, "502": 1}),
            ("rejected", 6, {"503": 4, "429": 2}),
        ]
    else:
        assert "http_5xx 500 x3, 502 x1" in text
        assert "rejected 503 x4, 429 x2" in text


def test_an_error_of_a_page_is_said_by_its_beginning_and_kept_whole(tmp_path: Path) -> None:
    page = "<p>overloaded</p>" * 1000
    rows = [record(i, 10 * i, outcome="failed", error=page, end=10 * i + 1) for i in range(3)]
    write_cell(tmp_path / "run", "000-a", [*rows, record(3, 100, events=[105])])
    texts = {
        format_: report.render([results.load_run(tmp_path / "run")], Asked(["error_rate"]), format_)
        for format_ in ("terminal", "md", "html", "json")
    }
    assert json.loads(texts.pop("json"))["runs"][0]["cells"][0]["failures"][0]["first_error"] == page
    for text in texts.values():
        assert 5 <= text.count("overloaded") <= 60  # of 1,000; the page has it in its verdict, its tables, its remarks
        assert "of 17,000 characters; the records have them)" in " ".join(text.split())


@pytest.mark.parametrize("format_", report.FORMATS)
def test_retries_show_the_first_attempts_unasked(tmp_path: Path, five: Path, format_: str) -> None:
    rows = [
        record(i, i, events=[i + 600], attempts=2, first_attempt="http_503", retry_wait_ns=500_000_000)
        for i in range(4)
    ]
    write_cell(tmp_path / "run", "000-a", [*rows, *(record(i, i, events=[i + 100]) for i in range(4, 10))])
    text = report.render([results.load_run(tmp_path / "run")], Asked(), format_)
    if format_ in ("terminal", "md"):
        flat = " ".join(text.split())
        assert "60.00%" in flat
        assert "6 of 10 ok at the first attempt; 14 attempts in all, 2 s of waiting between them" in flat
    if format_ == "json":
        cell = json.loads(text)["runs"][0]["cells"][0]
        assert cell["metrics"]["first_attempt_success"]["value"] == 0.6
        assert cell["attempts"] == {"requests": 10, "first_ok": 6, "attempts": 14, "waited_s": 2.0}
    if format_ == "csv":
        (row,) = [r for r in csv.DictReader(text.splitlines()) if r["metric"] == "first_attempt_success"]
        assert float(row["value"]) == 0.6
    assert "first_attempt_success" not in report.render([results.load_run(five)], Asked(), "csv")


def test_littles_law_stands_below_each_cell_and_many_reconnects_too(tmp_path: Path) -> None:
    rows = [record(i, 100 * i, events=[100 * i + 50], reconnects=int(i < 11)) for i in range(101)]
    write_cell(tmp_path / "run", "000-a", rows)
    text = report.render([results.load_run(tmp_path / "run")], Asked(), "md")
    assert "- Little: 10.1/s x 0.05 s = 0.505, in flight 0.5 on average (records), edges +1.0%\n" in text
    assert "- 11 of 101 requests found their kept-alive connection closed and opened it anew\n" in text
    assert "reconnect" not in " ".join(d.kind for d in results.verdict(results.load_run(tmp_path / "run")).doubts)
    rows[0].reconnects = 0
    write_cell(tmp_path / "run", "000-a", rows)
    assert "opened it anew" not in report.render([results.load_run(tmp_path / "run")], Asked(), "md")
    for row in rows:
        row.reconnects = 1
    write_cell(tmp_path / "run", "000-a", rows)
    assert "a server that drops requests within 50 ms would look the same" in report.render(
        [results.load_run(tmp_path / "run")], Asked(), "md"
    )
    for row in rows:
        row.reconnects = 0
    write_cell(tmp_path / "run", "000-a", rows)
    assert "opened it anew" not in report.render([results.load_run(tmp_path / "run")], Asked(), "md")


@pytest.mark.parametrize("format_", report.FORMATS)
@pytest.mark.parametrize(
    "end",
    [
        {"loop_stalls": [[ns(500), 300.0]]},
        {"loop_lag_p99_ms": 30.0},
        {"worker_loop_lag_ms": [1, 40]},
        {"ceiling": {"requests_per_s": 10}},
    ],
)
def test_figures_that_the_client_limited_are_headed_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: dict[str, Any], format_: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    rows = [record(i, 100 * i, events=[100 * i + 50]) for i in range(101)]
    for name in ("000-a", "001-a"):
        write_cell(tmp_path / "run", name, rows)
    cells = [{"name": "000-a", "end": end}, {"name": "001-a", "end": {}}]
    (tmp_path / "run" / "run.json").write_text(json.dumps({"cells": cells}))
    run = results.load_run(tmp_path / "run")
    assert results.verdict(run).client_limited
    text = report.render([run], Asked(["ttft_p95"]), format_)
    if format_ == "json":
        assert [c["client_limited"] for c in json.loads(text)["runs"][0]["cells"]] == [True, False]
    else:
        assert text.count("client-limited: upper bounds") == 1
    (tmp_path / "run" / "run.json").unlink()
    assert not results.verdict(results.load_run(tmp_path / "run")).client_limited


def test_a_cell_of_several_workers_is_read_as_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for k in range(2):
        write_cell(folder, f"000-a.w{k}", [record(i, 10 * i, events=[10 * i + 5]) for i in range(k, 40, 2)])
    write_cell(folder, "000-a.lost", [record(40, 400, outcome="failed", error_kind="worker_died", end=401)])
    write_cell(folder, "001-a", FIVE)
    crashed = results.load_run(folder)  # without run.json
    (folder / "run.json").write_text(json.dumps({"cells": [{"name": "000-a"}, {"file": "001-a.arrow"}]}))
    for run in (crashed, results.load_run(folder)):
        assert [(m.name, m.cell.n, m.listed) for m in run.cells] == [("000-a", 41, True), ("001-a", 5, True)]
        assert run.cells[0].cell["index"].tolist() == list(range(41))


FOREIGN = [
    ({"cells": [{"name": "000-a"}]}, {}, ["001-b"], "run.json does not list it"),
    ({"cells": [{"name": "000-a"}, {"name": "001-b"}], "run_id": "aa"}, {"run_id": "bb"}, ["001-b"], "run bb, this"),
    (None, {"run_id": "bb"}, ["000-a", "001-b"], "the cells are of several"),
    ({"cells": [{"name": "000-a"}, {"name": "001-b"}], "run_id": "aa"}, {"run_id": "aa"}, [], ""),
    ({"version": "0.1.0"}, {"run_id": "aa"}, [], ""),  # it lists no cells at all: of that it says nothing
    (None, {}, [], ""),
]


@pytest.mark.parametrize(("book", "head", "foreign", "why"), FOREIGN)
def test_a_cell_of_another_run_is_a_doubt(
    tmp_path: Path, book: dict[str, Any] | None, head: dict[str, Any], foreign: list[str], why: str
) -> None:
    write_cell(tmp_path / "run", "000-a", FIVE, **({"run_id": "aa"} if head else {}))
    write_cell(tmp_path / "run", "001-b", FIVE, **head)
    if book is not None:
        (tmp_path / "run" / "run.json").write_text(json.dumps(book))
    run = results.load_run(tmp_path / "run")
    found = {m.name: [d.text for d in run.doubts_of(m, ()) if d.kind == "foreign cell"] for m in run.cells}
    assert [name for name, said in found.items() if said] == foreign
    assert all(why in said for texts in found.values() for said in texts)
    for format_ in report.FORMATS:
        text = " ".join(report.render([run], Asked(["error_rate"]), format_).split())
        assert ("foreign cell" in text) == bool(foreign)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--fail-on-doubt", "--format", "csv"])
    assert done.exit_code == 3
    assert [c["listed"] for c in export.document(run, Asked(["error_rate"]))["cells"]] == [m.listed for m in run.cells]


def test_csv_names_the_kinds_of_doubt_that_it_counts(five: Path) -> None:
    run = results.load_run(five)
    (row,) = csv.DictReader(report.render([run], Asked(["error_rate"]), "csv").splitlines())
    kinds = [d.kind for d in results.sheets(run, Asked(["error_rate"]))[0].doubts]
    assert row["doubt_kinds"].split("; ") == kinds
    assert int(row["doubts"]) == len(kinds) == 3


def test_a_remark_that_holds_at_every_load_is_said_once(tmp_path: Path) -> None:
    for at in range(3):
        load = {"kind": "open", "rate": 5.0, "label": f"rate={at}", "warmup": 0.0}
        write_cell(tmp_path / "run", f"00{at}-a", FIVE[: 5 - (at == 2)], load=load)
    run = results.load_run(tmp_path / "run")
    text = " ".join(report.render([run], Asked(["ttft_p50", "tpot_mean"]), "terminal").split())
    assert text.count("at every load: tpot_mean: left out of it 1 (under 2 tokens)") == 1
    assert text.count("left out of it 1 (under 2 tokens)") == 1
    assert text.count("5 requests due in it") == 2  # the windows of the first two are the same, and not the third's
    alone = " ".join(report.render([results.load_run(tmp_path / "run")], Asked(["tpot_mean"]), "md").split())
    assert alone.count("left out of it 1 (under 2 tokens)") == 3


def test_goodput_above_requests_per_second_is_explained_where_both_are_shown(five: Path) -> None:
    run, slo = results.load_run(five), objectives.parse("ttft_p95<1s")
    for format_ in ("terminal", "md", "html"):
        both, one = (
            " ".join(report.render([run], Asked(names, slo), format_).split())
            for names in (["goodput", "requests_per_second"], ["goodput"])
        )
        assert both.count("either may be the larger") == (2 if format_ == "html" else 1)  # among its definitions too
        assert "either may be the larger" not in one


def test_the_interval_of_attainment_is_shown_as_that_of_any_figure(tmp_path: Path) -> None:
    run = classed(tmp_path / "run")
    asked = Asked(["slo_attainment"], objectives.parse("ttft_p95<=200ms"))
    (cell,) = json.loads(report.render([run], asked, "json"))["runs"][0]["cells"]
    low, high = (words.number(edge, "share") for edge in cell["metrics"]["slo_attainment"]["interval_95"])
    assert f"{low} to {high})" in report.render([run], asked, "md")
    assert f"<small>{low} to {high}</small>" in report.render([run], asked, "html")
    assert f"{low}–{high}" in report.render([run], asked, "terminal")
    (row, *_) = csv.DictReader(report.render([run], asked, "csv").splitlines())
    assert [words.number(float(row[k]), "share") for k in ("interval_low", "interval_high")] == [low, high]


CELL = {"name": "000-a"}
HOSTILE_BOOKS = {
    "[]": "expected an object",
    '{"cells": {}}': "cells: expected a list, found {}",
    '{"cells": [1]}': "cells[0]: expected an object, found 1",
    '{"cells": [null]}': "cells[0]: expected an object, found nothing",
    '{"cells": [{}]}': "cells[0]: expected the name or the file",
    '{"cells": [{"name": "../x"}]}': "cells[0].name: expected a file name without a folder",
    '{"cells": [{"file": 3}]}': "cells[0].file: expected a file name",
    '{"cells": [{"name": "000-a", "end": "x"}]}': 'cells[0].end: expected an object, found "x"',
    '{"cells": [{"name": "000-a", "end": {"reason": []}}]}': "cells[0].end.reason: expected a text",
    '{"cells": [{"name": "000-a", "end": {"turns_not_sent": 1.5}}]}': "turns_not_sent: expected a whole number",
    '{"cells": [{"name": "000-a", "end": {"loop_lag_p99_ms": "3"}}]}': "loop_lag_p99_ms: expected a number",
    '{"cells": [{"name": "000-a", "end": {"worker_loop_lag_ms": [1, "2"]}}]}': "worker_loop_lag_ms[1]: expected a num",
    '{"cells": [{"name": "000-a", "end": {"worker_loop_lag_ms": [null]}}]}': "[0]: expected a number, found nothing",
    '{"cells": [{"name": "000-a", "end": {"loop_stalls": [[1]]}}]}': "loop_stalls[0]: expected a stall, [ns, ms of 0",
    '{"cells": [{"name": "000-a", "end": {"loop_stalls": [[1, 1e300]]}}]}': "loop_stalls[0]: expected a stall, [ns, ms",
    '{"cells": [{"name": "000-a", "end": {"workers": 0}}]}': "workers: expected a whole number of 1 or more",
    '{"cells": [{"name": "000-a", "end": {"ceiling": {"events_per_s": true}}}]}': "events_per_s: expected a number",
    '{"cells": [{"name": "000-a", "doubts": [{"text": "x"}]}]}': "doubts[0].kind: expected a text, found nothing",
    '{"cells": [{"name": "000-a", "doubts": ["x"]}]}': "doubts[0]: expected an object",
    '{"cells": [{"name": "000-a", "load": 3}]}': "cells[0].load: expected an object",
    '{"targets": "a"}': "targets: expected a list",
    '{"host": "here"}': "host: expected an object",
    '{"x": NaN}': "not JSON",
    '{"x": 1e999}': "not JSON",
    '{"x": "\\ud800"}': "not JSON",
    "[" * 5000: "not JSON",
}


@pytest.mark.parametrize("book", HOSTILE_BOOKS)
def test_a_run_json_of_another_shape_is_refused_with_its_place(five: Path, book: str) -> None:
    (five / "run.json").write_text(book)
    with pytest.raises(BenchError) as refused:
        results.load_run(five)
    assert str(refused.value).startswith(f"{five / 'run.json'}: ")
    assert HOSTILE_BOOKS[book] in str(refused.value)


HOSTILE_HEADERS = {
    "target": ("x", "target: expected an object"),
    "probe": ([], "probe: expected an object"),
    "plan": ({"requests": "9"}, "plan.requests: expected a whole number"),
    "settings": (1, "settings: expected an object"),
    "workers": (10**9, "workers: expected a whole number of 1 to 4096, found 1000000000"),
    "load": (None, "load kind None, known are closed, open, replay"),
    **{
        f"load {i}": (load, words)
        for i, (load, words) in enumerate(
            [
                (7, "load: expected an object"),
                ({"kind": "spiral"}, "load kind 'spiral'"),
                ({"kind": "closed"}, "a closed load without its concurrency"),
                ({"kind": "closed", "concurrency": 0}, "load.concurrency: expected a whole number of 1 or more"),
                ({"kind": "open", "warmup": "2"}, "load.warmup: expected a number of 0 or more"),
                ({"kind": "open", "warmup": -1}, "load.warmup: expected a number of 0 or more"),
                ({"kind": "closed", "concurrency": 1, "duration_s": []}, "load.duration_s: expected a number"),
                ({"kind": "open", "rate": "fast"}, "load.rate: expected a number"),
            ]
        )
    },
}


@pytest.mark.parametrize("part", HOSTILE_HEADERS)
def test_a_header_of_another_shape_is_refused_with_its_file(tmp_path: Path, part: str) -> None:
    value, words = HOSTILE_HEADERS[part]
    file = write_cell(tmp_path / "run", "000-a", FIVE, **{part.split()[0]: value})
    with pytest.raises(BenchError) as refused:
        results.load_run(tmp_path / "run")
    assert str(refused.value).startswith(f"{file}: ")
    assert words in str(refused.value)


NULLS = [
    {"cells": None},
    {"cells": [CELL | {"end": None, "doubts": None, "load": None}], "targets": None, "host": None},
]
NULLS += [{"cells": [CELL | {"end": dict.fromkeys(("reason", "counts", "turns_not_sent", "ceiling", "workers"))}]}]
NULLS += [{"cells": [CELL | {"end": dict.fromkeys(("start_ns", "loop_lag_p99_ms", "worker_loop_lag_ms"))}]}]


@pytest.mark.parametrize("book", NULLS)
def test_null_says_the_same_as_nothing(five: Path, book: dict[str, Any]) -> None:
    (five / "run.json").write_text(json.dumps(book))
    for format_ in report.FORMATS:
        assert report.render([results.load_run(five)], Asked(["ttft_p50"]), format_)


def test_a_run_of_an_earlier_version_is_recomputed_from_its_records() -> None:
    """What its own report said of it, by the code of that day, on a column fewer."""
    folder = Path(__file__).parent / "fixtures" / "run-before-tokens-counted"
    names = ["ttft_p50", "ttft_p95", "e2e_mean", "tokens_per_second", "requests_per_second", "error_rate"]
    run = results.load_run(folder)
    (cell,) = json.loads(report.render([run], Asked([*names, "slo_attainment"], SLO), "json"))["runs"][0]["cells"]
    told = [0.363763, 0.5971724999999998, 0.3847199130434782, 147454.52722834155, 4783.43318230163, 0.0]
    assert [cell["metrics"][name]["value"] for name in names] == pytest.approx(told)
    assert cell["metrics"]["slo_attainment"]["value"] == 1.0  # a metric that it could not have had
    assert run.cells[0].cell["tokens_counted"].tolist() == [-1] * 30
