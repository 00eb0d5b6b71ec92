"""A run for programs: JSON, CSV. What stands in them is what `metrics` computed, with all its digits."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

from llm_bench import metrics
from llm_bench.metrics import Value
from llm_bench.objectives import Judged
from llm_bench.printable import clean, lines
from llm_bench.recovery import Recovery
from llm_bench.recovery_words import recoveries
from llm_bench.repeats import Group, groups
from llm_bench.results import Asked, ClassSheet, Run, Sheet, sheets
from llm_bench.words import LIMITED, agreements, group_lines, name_of, not_the_same_work, or_default

SCHEMA = 1  # of the JSON document; counts up when a key changes its meaning


def rows(run: Run, asked: Asked) -> Iterator[dict[str, Any]]:
    """One dict a figure, by COLUMNS; a cell that cannot be read has its rows too, without values."""
    for group in groups(sheets(run, asked)):
        yield from _rows(run, group)
        for one in groups(group.sheets, apart=True) if group.runs > 1 else ():
            yield from _rows(run, one)
        for sheet in group.sheets:
            yield from _fault_rows(run, sheet)
            yield from _tool_rows(run, sheet)
    for m in run.missing:
        for name in asked.names:
            unit = metrics.parse(name).unit
            yield {"target": m.target, "load": m.load, "metric": name, "unit": unit, "state": "missing"} | {
                "doubts": 1,
                "doubt_kinds": "missing cell",
                "label": m.why,
                "run": name_of(run),
            }


def _rows(run: Run, group: Group) -> Iterator[dict[str, Any]]:
    first, alone = group.sheets[0].measured, group.runs == 1
    slo = {(x.limit.of_class, x.limit.metric.name): f"{x.limit.text} {x.verdict}" for x in group.limits()}
    states = [s for sheet in group.sheets for s in (sheet.measured.window.state, LIMITED * sheet.client_limited)]
    for line in group_lines(group):
        for v in line.values:
            low, high = v.interval or (None, None)
            yield {
                "target": group.target,
                "load": first.load,
                "class": clean(line.of_class),
                "metric": v.name,
                "value": v.value,
                "unit": v.unit,
                "n": v.n,
                "runs": group.runs,
                "pair": first.pair if alone else None,
                "ess": v.ess,
                "interval_low": low,
                "interval_high": high,
                "slo": slo.get((line.of_class, v.name), ""),
                "state": "; ".join(filter(None, dict.fromkeys(states))),
                "failures": "; ".join(f.text for sheet in group.sheets for f in sheet.failures),
                "doubts": len(group.doubts()),
                "doubt_kinds": "; ".join(d.kind for d in group.doubts()),
                "label": "; ".join([*v.labels, *([v.reason] if v.reason else [])]),
                "run": name_of(run),
            }


def _fault_rows(run: Run, sheet: Sheet) -> Iterator[dict[str, Any]]:
    """A row a fault: the seconds after which it was over."""
    for number, r in enumerate(recoveries(sheet), 1):
        yield {
            "target": sheet.measured.target,
            "load": sheet.measured.load,
            "class": "",
            "metric": f"fault {number}: {r.done.what}",
            "value": r.after_s,
            "unit": "s",
            "n": r.requests,
            "pair": sheet.measured.pair,
            "label": "; ".join(filter(None, [r.verdict, r.why])),
            "failures": "; ".join(r.errors),
            "run": name_of(run),
        }


def _fault_document(r: Recovery) -> dict[str, Any]:
    found = r._asdict() | {"done": r.done._asdict(), "resolution_s": r.resolution_s, "amplification": r.amplification}
    found |= {"before": r.before and r.before._asdict()}
    return found | {"queue": r.queue and r.queue._asdict() | {"retry_after": r.queue.retry_after}}


def _tool_rows(run: Run, sheet: Sheet) -> Iterator[dict[str, Any]]:
    for table in sheet.as_tools:
        for line in table.lines:
            bounds = [] if line.least is None else [f"between {line.least} and {line.most}"]
            yield {
                "target": sheet.measured.target,
                "load": sheet.measured.load,
                "class": "",
                "metric": f"{table.tool}: {line.name}",
                "value": line.value,
                "unit": line.unit,
                "n": table.requests,
                "label": "; ".join([f"ours: {line.ours}", line.why, *bounds, *([line.reason] if line.reason else [])]),
                "run": name_of(run),
            }


def document(run: Run, asked: Asked) -> dict[str, Any]:
    """The run as one JSON-able object."""
    found = sheets(run, asked)
    return {
        "path": str(run.path),
        "run": dict(run.facts),
        "missing": [m._asdict() for m in run.missing],
        "not_the_same_work": not_the_same_work(run),
        "agreement": agreements(run),
        "doubts": [d._asdict() for d in run.own_doubts],
        "cells": [_cell_document(sheet) for sheet in found],
        "repeats": [_group_document(group) for group in groups(found) if group.runs > 1],
    }


def _group_document(group: Group) -> dict[str, Any]:
    """What the runs of one target at one load show together; each run's own figures are in `cells`."""
    return {
        "target": group.target,
        "load": group.load,
        "cells": [sheet.measured.name for sheet in group.sheets],
        "outcomes": group.outcomes,
        "metrics": {v.name: _value_document(v) for v in group.values},
        "classes": {name: _class_document(of) for name, of in group.by_class.items()},
        "slo": [
            {"limit": x.limit.text, "class": x.limit.of_class, "verdict": x.verdict, "runs": dict(x.runs)}
            for x in group.limits()
        ],
        "doubts": [d._asdict() for d in group.doubts()],
    }


def _class_document(of: ClassSheet) -> dict[str, Any]:
    return {
        "outcomes": of.outcomes,
        "metrics": {v.name: _value_document(v) for v in of.values},
        "alone": None if of.alone is None else {v.name: _value_document(v) for v in of.alone},
        "interference": of.interference,
        "factors": _factors(of),
    }


def _cell_document(sheet: Sheet) -> dict[str, Any]:
    m, w = sheet.measured, sheet.measured.window
    return {
        "name": m.name,
        "target": m.target,
        "load": m.load,
        "header": {key: m.cell.header.get(key) for key in ("target", "load", "plan", "probe", "pair", "order")},
        "window": {
            "rule": w.rule,
            "opened": w.opened,
            "start_ns": w.start_ns,
            "end_ns": w.end_ns,
            "seconds": round(w.seconds, 6),
            "requests": w.requests,
            "warmup_requests": w.warmup,
            "first_wave": w.first_wave,
            "backlog_growth_per_second": w.growth,
            "state_evidence": w.evidence,
            "settling": w.settling and w.settling._asdict(),
            "drift_p": w.drift and w.drift.p,
        },
        "state": w.state,
        "complete": m.cell.complete,
        "outcomes": sheet.outcomes,
        "failures": [
            {"kind": f.kind, "count": f.requests, "statuses": f.statuses, "first_error": f.first_error}
            for f in sheet.failures
        ],
        "attempts": sheet.attempts and sheet.attempts._asdict(),
        "little": sheet.little._asdict(),
        "sending": sheet.sending and sheet.sending._asdict(),
        "energy": sheet.energy and sheet.energy._asdict(),
        "reconnected": sheet.reconnected[0],
        "client_limited": sheet.client_limited,
        "listed": m.listed,
        "metrics": {v.name: _value_document(v) for v in sheet.values},
        "whole_run": {v.name: _value_document(v) for v in sheet.whole_run},
        "classes": {name: _class_document(of) for name, of in sheet.by_class.items()},
        "slo": [_judged_document(j) for j in sheet.judged],
        "as_tools": {
            table.tool: table._asdict() | {"lines": [line._asdict() for line in table.lines]}
            for table in sheet.as_tools
        },
        "faults": [_fault_document(r) for r in recoveries(sheet)],
        "doubts": [d._asdict() for d in sheet.doubts],
        "end": dict(m.end),
    }


def _factors(of: ClassSheet) -> dict[str, Any]:
    return {
        f.name: {key: value for key, value in f._asdict().items() if key not in ("name", "interval")}
        | {"interval": list(f.interval) if f.interval else None}
        for f in of.factors
    }


def _judged_document(j: Judged) -> dict[str, Any]:
    return {
        "limit": j.limit.text,
        "metric": j.limit.metric.name,
        "class": j.limit.of_class,
        "verdict": j.verdict,
        "why": j.why,
        "value": j.value.value,
        "unit": j.value.unit,
        "attained": j.attained,
        "interval_95": None if j.low is None else [j.low, j.high],
        "n": j.n,
    }


def _value_document(v: Value) -> dict[str, Any]:
    return {
        "value": v.value,
        "unit": v.unit,
        "n": v.n,
        "ess": v.ess,
        "interval_95": list(v.interval) if v.interval else None,
        "no_interval": v.refusal,
        "all_requests": v.all_requests,
        "not_applicable": dict(v.not_applicable),
        "labels": list(v.labels),
        "reason": v.reason,
    }


COLUMNS = ["target", "load", "class", "metric", "value", "unit", "n", "runs", "pair", "ess"]
COLUMNS += ["interval_low", "interval_high", "slo", "state", "failures", "doubts", "doubt_kinds", "label", "run"]


def csv_text(runs: Sequence[Run], asked: Asked) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for run in runs:
        writer.writerows(rows(run, or_default(asked, run)))
    return lines(out.getvalue())


def json_text(runs: Sequence[Run], asked: Asked) -> str:
    made = [document(run, or_default(asked, run)) for run in runs]
    return lines(json.dumps({"schema": SCHEMA, "runs": made}, allow_nan=False)) + "\n"
