"""A run's records in words and tables: terminal, Markdown, JSON, CSV. What is printed is what `metrics` computed."""

import csv
import io
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from llm_bench import metrics, stats, windows
from llm_bench.doubts import Doubt
from llm_bench.errors import BenchError
from llm_bench.metrics import Value
from llm_bench.records import OUTCOMES, Cell
from llm_bench.results import Measured, Run
from llm_bench.results import load_run as load_run
from llm_bench.results import newest as newest
from llm_bench.results import verdict as verdict
from llm_bench.series import due_in, outcome_in

SCHEMA = 1  # of the JSON document; counts up when a key changes its meaning
DEFAULT_METRICS = (
    *("ttft_p50", "ttft_p95", "tpot_p50", "tpot_p95", "e2e_p95"),
    *("tokens_per_second", "requests_per_second", "error_rate"),
)
WIDTH = 100  # columns where the terminal does not say
METRICS_PER_TABLE = 6  # that many fit WIDTH beside the counts


def parse_metrics(text: str) -> list[str]:
    """`ttft_p95,tokens_per_second` -> names; "" is the default list. Raises BenchError for an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        metrics.parse(name)
    return list(dict.fromkeys(names)) or list(DEFAULT_METRICS)


# ---- the figures ----


class Sheet(NamedTuple):
    """All that any format prints of one cell."""

    measured: Measured
    values: list[Value]
    whole_run: list[Value]  # closed loops: the percentiles asked for, with the first wave and the drain
    outcomes: dict[str, int]  # of requests due in the window
    failures: list[tuple[str, int, str]]  # kind, how many in the whole cell, first error text
    doubts: list[Doubt]


def sheets(run: Run, names: Sequence[str]) -> list[Sheet]:
    return [_sheet(run, m, names) for m in run.cells]


def _sheet(run: Run, m: Measured, names: Sequence[str]) -> Sheet:
    cell, window = m.cell, m.window
    values = metrics.compute_all(names, cell, window)
    percentiles = [n for n in names if metrics.parse(n).reducer in metrics.QUANTILES]
    first_wave = window.first_wave and window.state != windows.TOO_SHORT
    whole_run = metrics.compute_all(percentiles, cell, windows.whole(cell)) if first_wave else []
    due = due_in(cell, window)
    outcomes = {o: int((due & outcome_in(cell, o)).sum()) for o in OUTCOMES}
    return Sheet(m, values, whole_run, outcomes, _failures(cell), run.doubts_of(m, values))


def _failures(cell: Cell) -> list[tuple[str, int, str]]:
    failed = np.flatnonzero(outcome_in(cell, "failed"))
    kinds, first, counts = np.unique(cell["error_kind"][failed].astype(str), return_index=True, return_counts=True)
    return [(str(k), int(c), str(cell["error"][failed[i]])) for k, i, c in zip(kinds, first, counts, strict=True)]


def rows(run: Run, names: Sequence[str]) -> list[dict[str, Any]]:
    """One dict a figure: target, load, metric, value, unit, n, ess, label, run."""
    return [
        {
            "target": sheet.measured.target,
            "load": sheet.measured.load,
            "metric": v.name,
            "value": v.value,
            "unit": v.unit,
            "n": v.n,
            "ess": v.ess,
            "label": "; ".join([*v.labels, *([v.reason] if v.reason else [])]),
            "run": run.path.name,
        }
        for sheet in sheets(run, names)
        for v in sheet.values
    ]


def edges(m: Measured) -> str:
    """The window in seconds since the first due time, and the rule that set it."""
    if not m.cell.n:
        return "no request was recorded"
    w, zero = m.window, int(m.cell["due_ns"][0])
    return (
        f"window {(w.start_ns - zero) / 1e9:.3f} s to {(w.end_ns - zero) / 1e9:.3f} s ({w.seconds:.3f} s), "
        f"{w.requests} requests due in it, {w.warmup} before it; {w.rule}"
    )


def number(value: float | str | None, unit: str) -> str:
    """Four digits or so: as many as a measurement carries."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if unit == "share":
        return f"{value:.2%}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.4g}"


def _remarks(sheet: Sheet) -> list[str]:
    """What stands below a table, for one cell: rule and edges, what is missing and why, labels, failures."""
    lines = [edges(sheet.measured)]
    if sheet.measured.window.state:
        lines.append(f"state: {sheet.measured.window.state}")
    said: dict[str, list[str]] = {}  # what holds for several figures is said once
    for v in sheet.values:
        if v.reason:
            said.setdefault(f"– because {v.reason}", []).append(v.name)
        elif v.not_applicable:
            said.setdefault(f"left out of it {_counted(v.not_applicable)}", []).append(v.name)
        for label in v.labels:
            said.setdefault(label, []).append(v.name)
        if v.refusal:
            few = v.ess is not None and v.ess < stats.LEAST_ESS and "largest" not in v.refusal
            text = f"under {stats.LEAST_ESS:.0f} effective samples" if few else v.refusal
            said.setdefault(f"no interval, {text}", []).append(v.name)
    lines += [f"{', '.join(names)}: {text}" for text, names in said.items()]
    if sheet.whole_run:
        whole = ", ".join(
            f"{v.name} {number(v.value, v.unit)} {v.unit}" for v in sheet.whole_run if v.value is not None
        )
        lines.append(f"whole run, first wave of {sheet.measured.window.first_wave} and drain included: {whole}")
    lines += [f"failed: {kind} {count}, first: {error}" for kind, count, error in sheet.failures]
    return lines


def _counted(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count} ({reason})" for reason, count in reasons.items())


def _title(run: Run) -> str:
    facts, host = run.facts, run.facts.get("host") or {}
    trace = (facts.get("trace") or {}).get("path", "")
    parts = [f"llm-bench {facts['version']}" if "version" in facts else "", f"trace {trace}" if trace else ""]
    parts += [f"{host['cpu']}, {host.get('cores')} cores" if host.get("cpu") else ""]
    return "  ·  ".join([f"run {run.path.name}", *filter(None, parts)])


def _counts_text(sheet: Sheet) -> str:
    rest = {o: c for o, c in sheet.outcomes.items() if o != "ok" and c}
    names = {"cut_at_end": "cut"}
    return " ".join([str(sheet.outcomes["ok"]), *(f"{names.get(o, o)} {c}" for o, c in rest.items())])


# ---- formats ----


def _terminal(run: Run, names: Sequence[str]) -> str:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    out = io.StringIO()
    colour = sys.stdout.isatty()
    console = Console(
        file=out, force_terminal=colour, width=shutil.get_terminal_size((WIDTH, 24)).columns, highlight=False
    )
    console.print(Text(_title(run), "bold"))
    of_run = sheets(run, names)
    for target in dict.fromkeys(s.measured.target for s in of_run):
        mine = [s for s in of_run if s.measured.target == target]
        wide = -(-len(names) // -(-len(names) // METRICS_PER_TABLE))  # tables of about equal width
        for at in range(0, len(names), wide):
            table = Table(title=target if not at else None, title_justify="left", title_style="bold", pad_edge=False)
            table.add_column("load")
            table.add_column("ok, others", justify="right")
            for name in names[at : at + wide]:
                table.add_column(_heading(name), justify="right")
            for sheet in mine:
                figures = [_figure_text(v) for v in sheet.values[at : at + wide]]
                counts = Text(_counts_text(sheet).replace(" ", "\n", 1), "red" if sheet.outcomes["failed"] else "")
                table.add_row(sheet.measured.load, counts, *figures)
            console.print(table)
        if any(v.ess is not None for s in mine for v in s.values):
            console.print(
                Text("below a percentile: n, effective n; 95% interval; all: with failures ranked above all", "dim")
            )
        for sheet in mine:
            console.print(Text(f"\n{sheet.measured.load}", "bold"))
            for line in _remarks(sheet):
                console.print(Padding(Text(line), (0, 0, 0, 2)))
            for doubt in sheet.doubts:
                text = Text.assemble(("doubt: ", "bold yellow"), f"{doubt.kind}: {doubt.text}")
                console.print(Padding(text, (0, 0, 0, 2)))
            if not sheet.doubts:
                console.print(Text("  no doubts", "dim"))
        console.print()
    for note in run.notes:
        console.print(Text(note, "yellow"))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _heading(name: str) -> Any:
    """A metric's name over its column: `ttft`, `p95`, `ms` on lines of their own; long names break at underscores."""
    from rich.text import Text

    metric = metrics.parse(name)
    words = metric.of.split("_")
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) < 12:
            lines[-1] += f"_{word}"
        else:
            lines.append(f"_{word}")
    if metric.reducer:
        lines.append(metric.reducer)
    return Text.assemble("\n".join(lines), ("" if metric.unit == "1" else f"\n{metric.unit}", "dim"))


def _figure_text(v: Value) -> Any:
    from rich.text import Text

    small = [f"{v.n}, {v.ess:.0f}"] if v.ess is not None else []
    if v.interval:
        small.append(f"{number(v.interval.low, v.unit)}–{number(v.interval.high, v.unit)}")
    if v.all_requests is not None and v.all_requests != v.value:
        small.append(f"all: {number(v.all_requests, v.unit)}")
    return Text.assemble(number(v.value, v.unit), *((f"\n{line}", "dim") for line in small))


def _markdown(run: Run, names: Sequence[str]) -> str:
    lines = [f"## {_title(run)}", ""]
    of_run = sheets(run, names)
    for target in dict.fromkeys(s.measured.target for s in of_run):
        mine = [s for s in of_run if s.measured.target == target]
        units = [metrics.parse(name).unit for name in names]
        heads = [f"{n} ({u})" if u not in ("1", "share") else n for n, u in zip(names, units, strict=True)]
        lines += [f"### {_md(target)}", "", f"| load | ok, others | {' | '.join(heads)} |"]
        lines += [f"|---|---|{'---:|' * len(names)}"]
        for sheet in mine:
            figures = [number(v.value, v.unit) + _md_small(v) for v in sheet.values]
            lines.append(f"| {_md(sheet.measured.load)} | {_counts_text(sheet)} | {' | '.join(figures)} |")
        for sheet in mine:
            lines += ["", f"**{_md(sheet.measured.load)}**", ""]
            lines += [f"- {_md(line)}" for line in _remarks(sheet)]
            lines += [f"- **doubt: {d.kind}**: {_md(d.text)}" for d in sheet.doubts] or ["- no doubts"]
        lines.append("")
    lines += [_md(note) for note in run.notes]
    return "\n".join(lines) + "\n"


def _md(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _md_small(v: Value) -> str:
    if v.ess is None:
        return ""
    every = f", all: {number(v.all_requests, v.unit)}" if v.all_requests not in (None, v.value) else ""
    bounds = f", {number(v.interval.low, v.unit)} to {number(v.interval.high, v.unit)}" if v.interval else ""
    return f" (n {v.n}, ESS {v.ess:.0f}{bounds}{every})"


def document(run: Run, names: Sequence[str]) -> dict[str, Any]:
    """The run as one JSON-able object."""
    return {
        "schema": SCHEMA,
        "path": str(run.path),
        "run": dict(run.facts),
        "notes": run.notes,
        "cells": [_cell_document(sheet) for sheet in sheets(run, names)],
    }


def _cell_document(sheet: Sheet) -> dict[str, Any]:
    m, w = sheet.measured, sheet.measured.window
    return {
        "name": m.name,
        "target": m.target,
        "load": m.load,
        "header": {key: m.cell.header.get(key) for key in ("target", "load", "plan", "probe")},
        "window": {
            "rule": w.rule,
            "start_ns": w.start_ns,
            "end_ns": w.end_ns,
            "seconds": w.seconds,
            "requests": w.requests,
            "warmup_requests": w.warmup,
            "first_wave": w.first_wave,
            "backlog_growth_per_second": w.growth,
        },
        "state": w.state,
        "complete": m.cell.complete,
        "outcomes": sheet.outcomes,
        "failures": [{"kind": k, "count": c, "first_error": e} for k, c, e in sheet.failures],
        "metrics": {v.name: _value_document(v) for v in sheet.values},
        "whole_run": {v.name: _value_document(v) for v in sheet.whole_run},
        "doubts": [d._asdict() for d in sheet.doubts],
        "end": dict(m.end),
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


def _csv(runs: Sequence[Run], names: Sequence[str]) -> str:
    out = io.StringIO()
    columns = ["target", "load", "metric", "value", "unit", "n", "ess", "label", "run"]
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    for run in runs:
        writer.writerows(rows(run, names))
    return out.getvalue()


def _json(runs: Sequence[Run], names: Sequence[str]) -> str:
    made = [document(run, names) for run in runs]
    whole = made[0] if len(made) == 1 else {"schema": SCHEMA, "runs": made}
    return json.dumps(whole, allow_nan=False) + "\n"


FORMATS: dict[str, Callable[[Sequence[Run], Sequence[str]], str]] = {
    "terminal": lambda runs, names: "\n".join(_terminal(run, names) for run in runs),
    "md": lambda runs, names: "\n".join(_markdown(run, names) for run in runs),
    "json": _json,
    "csv": _csv,
}


def check_format(name: str) -> None:
    if name not in FORMATS:
        raise BenchError(f"--format {name!r}: expected one of {', '.join(FORMATS)}")


def render(run: Run, names: Sequence[str], format: str) -> str:  # noqa: A002
    return render_all([run], names, format)


def render_all(runs: Sequence[Run], names: Sequence[str], format: str) -> str:  # noqa: A002
    """The runs as text in one of FORMATS; JSON is one line. Raises BenchError for an unknown format."""
    check_format(format)
    return FORMATS[format](runs, names or DEFAULT_METRICS)
