"""Faults in every format of a report, and in a whole run: the reference engine stands still, fails and comes back."""

import csv
import io
import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llm_bench import faults, recovery, recovery_words, report, results, targets
from llm_bench.client import BUSY, LATE, LIMITED, STALLED
from llm_bench.doubts import Doubt
from llm_bench.faults import Done, Log
from llm_bench.results import Asked
from tests.bench import Ran, bench, rows, trace_file
from tests.sample import ns
from tests.test_html_report import write_cell
from tests.test_recovery import stalled

WHAT = "engine:stall,seconds=2,<b>"
ENGINE = ("-m", "reference_engine", "--model", "sim:fast", "--port", "0", "--allow-faults", "--exit-with-stdin")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of one cell, whose target stood still for 2 s from its 6th on."""
    done = Done(WHAT, "engine", ns(6000), ns(6000), ns(8000), True, "HTTP 200")
    late = Done("cmd:true", "cmd", ns(90_000), 0, 0, False, "not done: the cell had ended before")
    load = {"kind": "open", "label": "rate=50/s", "rate": 50.0, "warmup": 0.0}
    write_cell(tmp_path, "000-a", stalled(6000, 2000), target={"name": "a"}, load=load)
    end = {"reason": "exhausted", "faults": faults.document(Log(ns(0), None, (done, late)))}
    cell = {"name": "000-a", "target": "a", "load": load, "end": end}
    (tmp_path / "run.json").write_text(json.dumps({"targets": ["a"], "loads": ["rate=50/s"], "cells": [cell]}))
    return tmp_path


def rendered(folder: Path, format_: str) -> str:
    return str(report.render([results.load_run(folder)], Asked(), format_))


@pytest.mark.parametrize("format_", ["terminal", "md", "html"])
def test_each_fault_is_in_every_format_with_its_verdict(folder: Path, format_: str) -> None:
    text = " ".join(rendered(folder, format_).replace("\\", "").replace("<wbr>", "").split())
    assert "fault 1 at 6.000 s, engine:stall,seconds=2," in text
    assert "RECOVERED after 2.000 s" in text
    assert "p95 at worst" in text
    assert "in the system at most" in text
    assert "fault 2 not begun, cmd:true: UNDECIDED: not done: the cell had ended before" in text
    assert "rolling windows of 1 s" in text
    assert "<b>:" not in text if format_ == "html" else True


def test_what_came_of_it_is_said_once(folder: Path) -> None:
    said = "HTTP 404 no such fault"
    run = json.loads((folder / "run.json").read_text())
    done = Done(WHAT, "engine", ns(6000), ns(6000), ns(8000), False, said)
    run["cells"][0]["end"]["faults"] = faults.document(Log(ns(0), None, (done,)))
    (folder / "run.json").write_text(json.dumps(run))
    (sheet,) = results.sheets(results.load_run(folder), Asked(("ttft_p95",)))
    (line, _) = recovery_words.fault_lines(sheet)
    assert line.count(said) == 1


def test_attempts_of_a_single_request_are_of_one() -> None:
    done = Done("cmd:a", "cmd", 0, 1, 2, True, "")
    found = recovery.Recovery(done, 0.0, recovery.RECOVERED, "", "ttft", attempts=3, requests=1)
    assert "3 attempts of 1 request" in recovery_words._evidence(found)


def test_the_page_marks_each_fault_on_every_picture_over_time(folder: Path) -> None:
    page = rendered(folder, "html")
    over_time = page.count("seconds since the first due time</text>")
    assert over_time >= 3
    assert page.count('<rect class="fault"') == over_time  # the one that was not begun has no mark
    assert page.count(">1 engine:stall,seconds=2,…</text>") == over_time
    assert "Turned away during faults" in page
    assert ".fault {" in page


def test_json_and_csv_hold_the_verdict_with_all_its_digits(folder: Path) -> None:
    found = json.loads(rendered(folder, "json"))["runs"][0]["cells"][0]["faults"]
    assert [f["verdict"] for f in found] == ["RECOVERED", "UNDECIDED"]
    assert found[0]["after_s"] == pytest.approx(2.0, abs=0.021)
    assert (found[0]["resolution_s"], found[0]["done"]["what"]) == (1.0, WHAT)
    assert found[0]["queue"]["retry_after"] == "nothing to honour"
    lines = [r for r in csv.DictReader(io.StringIO(rendered(folder, "csv"))) if r["metric"].startswith("fault ")]
    assert [(r["metric"], r["unit"]) for r in lines] == [(f"fault 1: {WHAT}", "s"), ("fault 2: cmd:true", "s")]
    assert float(lines[0]["value"]) == found[0]["after_s"]
    assert lines[0]["label"].startswith("RECOVERED")


@pytest.mark.parametrize("kind", [STALLED, BUSY, LIMITED])
def test_a_client_that_was_the_limit_leaves_no_verdict_but_of_a_target_that_is_gone(folder: Path, kind: str) -> None:
    (sheet,) = results.sheets(results.load_run(folder), Asked(("ttft_p95",)))
    late = sheet._replace(doubts=[Doubt(kind, "late"), Doubt(LATE, "late")])
    assert late.client_limited
    first, _ = recovery_words.recoveries(late)
    assert (first.verdict, first.after_s) == (recovery.UNDECIDED, recovery_words.recoveries(sheet)[0].after_s)
    assert first.why == "RECOVERED after 2.000 s as measured, but this client was the limit"
    sheet.measured.end = {**sheet.measured.end, "reason": "target gone"}
    gone, _ = recovery_words.recoveries(late)
    assert (gone.verdict, gone.why) == (recovery.NOT_RECOVERED, recovery.GONE)


@pytest.mark.parametrize(
    ("late_until", "late_ms", "stands"),
    [
        (20_000, 1, True),  # all the time, which no p95 within 10% notices
        (9_500, 80, False),  # as if the target had been slow for another 1.5 s
        (20_000, 80, True),  # before and after alike
    ],
)
def test_a_verdict_that_stands_without_this_clients_lateness_is_given(
    tmp_path: Path, late_until: float, late_ms: float, stands: bool
) -> None:
    done = Done(WHAT, "engine", ns(6000), ns(6000), ns(8000), True, "HTTP 200")
    load = {"kind": "open", "label": "rate=50/s", "rate": 50.0, "warmup": 0.0}
    begins = 0 if late_until > 10_000 else 8_000
    by_ns = round(late_ms * 1e6)
    records = [
        replace(r, sent_ns=r.sent_ns + by_ns, end_ns=r.end_ns + by_ns, event_ns=[ns_ + by_ns for ns_ in r.event_ns])
        if ns(begins) <= r.due_ns < ns(late_until)
        else r
        for r in stalled(6000, 2000)
    ]
    write_cell(tmp_path, "000-a", records, target={"name": "a"}, load=load)
    cell = {"name": "000-a", "target": "a", "load": load, "end": {"faults": faults.document(Log(ns(0), None, (done,)))}}
    (tmp_path / "run.json").write_text(json.dumps({"targets": ["a"], "loads": ["rate=50/s"], "cells": [cell]}))
    (sheet,) = results.sheets(results.load_run(tmp_path), Asked(("ttft_p95",)))
    (found,) = recovery_words.recoveries(sheet._replace(doubts=[Doubt(LATE, "late")]))
    assert (found.verdict == recovery.RECOVERED) is stands
    if stands:
        assert found.after_s == pytest.approx(2.0, abs=0.021)
    else:
        assert found.verdict == recovery.UNDECIDED
        assert "RECOVERED after 3.5" in found.why


# ---- a whole run


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """60 requests a second for 13 s: from the 4th on the engine stands still, then answers 503, then dies."""
    pytest.importorskip("aiohttp")
    folder = tmp_path_factory.mktemp("faults")
    given = [
        "3s:engine:stall,seconds=1.5",
        "7s:engine:http_error,status=503,requests=60",
        "10s:engine:crash,steps=2",
    ]  # twice: down for 0.1 s, then for 0.2 s
    given += ["12.5s:sh:echo done; exit 3", "60s:cmd:true"]
    trace = trace_file(folder, rows(800, 16, 8))
    with ExitStack() as stack:
        engine = stack.enter_context(targets.running(targets.Target("t", launch=ENGINE), lambda text: None))
        options = ["--rate", "60", "--constant", "--duration", "13", "--fail-on-error-rate", "1"]
        options += [word for text in given for word in ("--fault", text)]
        return bench(engine.url, folder, trace, *options)


def of(ran: Ran) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ran.cell()["faults"]
    return found


def test_a_run_goes_on_through_its_faults_and_keeps_when_they_were_done(ran: Ran) -> None:
    assert ran.rc == 0, ran.err
    log = faults.read(faults.path_of(ran.folder, ran.cell()["name"]))
    assert log.start_ns == ran.cell()["end"]["start_ns"]
    assert [d.begun_ns > 0 for d in log.done] == [True] * 4 + [False]
    assert all(d.begun_ns >= d.planned_ns for d in log.done[:4])
    assert (log.done[3].ok, log.done[3].result) == (False, "exit code 3: done")
    assert faults.of_end(ran.cell()["end"]) == log
    kinds = [d["kind"] for d in ran.cell()["doubts"]]
    assert "faults on purpose" in kinds
    assert "fault proxy" not in kinds


def test_what_the_engine_did_is_what_was_found(ran: Ran) -> None:
    stall, errors, crash, command, never = of(ran)
    assert 1.3 < stall["silence_s"] < 4.0
    assert stall["failed"] == 0
    assert stall["backlog"] >= 80  # 90 came due meanwhile
    assert (errors["failed"], errors["queue"]["unavailable"]) == (60, 60)
    assert errors["queue"]["retry_after"] == "not honoured: no retries (--retries)"
    assert crash["failed"] > 0
    assert crash["queue"]["unavailable"] > 0
    assert command["verdict"] == never["verdict"] == recovery.UNDECIDED
    # A machine that is busy otherwise may leave no verdict; a wrong one it must not give.
    for found, seconds in ((stall, 1.5), (errors, 1.0), (crash, 0.3)):
        assert found["verdict"] not in (recovery.NO_EFFECT, recovery.NOT_RECOVERED)
        if found["verdict"] == recovery.RECOVERED:
            assert seconds - 0.2 < found["after_s"] < seconds + 2.0
