"""A run's records in words and tables: terminal, Markdown, JSON, CSV. What is printed is what `metrics` computed."""

import csv
import io
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from llm_bench import metrics, outcomes, stats
from llm_bench.doubts import Doubt
from llm_bench.errors import BenchError
from llm_bench.metrics import Value
from llm_bench.records import OUTCOMES
from llm_bench.results import Measured, Run, Sheet, sheets
from llm_bench.results import load_run as load_run
from llm_bench.results import newest as newest
from llm_bench.results import verdict as verdict

SCHEMA = 1  # of the JSON document; counts up when a key changes its meaning
_OF_A_CELL = ("tokens_per_second", "requests_per_second", "error_rate")
DEFAULT_METRICS = ("ttft_p50", "ttft_p95", "tpot_p50", "tpot_p95", "e2e_p95", *_OF_A_CELL)
RETRIED = "first_attempt_success"  # by default too, where retries hide it
DEFAULT_UNSTREAMED = ("e2e_p50", "e2e_p95", "e2e_p99", *_OF_A_CELL)  # whole answers have no TTFT and no TPOT
UNLISTED = "run.json does not list this cell: of another run, or copied here"
LIMITED = "client-limited: upper bounds of latency, lower bounds of throughput"
RECONNECTED_SHARE = 0.1  # above it the target closes what a client would have kept open
DROPS_SHARE, DROPS_ALIKE = 0.5, "a server that drops requests within 50 ms would look the same"
WIDTH = 100  # columns where the terminal does not say
SHORT = {"cut_at_end": "cut"}  # outcomes as column heads


def parse_metrics(text: str) -> list[str]:
    """`ttft_p95,tokens_per_second` -> names; "" -> [], each run's own default. Raises BenchError for an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        metrics.parse(name)
    return list(dict.fromkeys(names))


def _streamed(run: Run) -> bool:
    return any((m.cell.header.get("settings") or {}).get("stream", True) for m in run.cells)


def _or_default(names: Sequence[str], run: Run) -> Sequence[str]:
    if names:
        return names
    tried_again = any(outcomes.retried(m.cell).any() for m in run.cells)
    return (DEFAULT_METRICS if _streamed(run) else DEFAULT_UNSTREAMED) + ((RETRIED,) if tried_again else ())


# ---- what every format says ----


def rows(run: Run, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One dict a figure, by COLUMNS; a cell that cannot be read has its rows too, without values."""
    for sheet in sheets(run, names):
        for v in sheet.values:
            low, high = v.interval or (None, None)
            yield {
                "target": sheet.measured.target,
                "load": sheet.measured.load,
                "metric": v.name,
                "value": v.value,
                "unit": v.unit,
                "n": v.n,
                "ess": v.ess,
                "interval_low": low,
                "interval_high": high,
                "state": "; ".join(filter(None, [sheet.measured.window.state, LIMITED * sheet.client_limited])),
                "failures": "; ".join(f.text for f in sheet.failures),
                "doubts": len(sheet.doubts),
                "label": "; ".join([*v.labels, *([v.reason] if v.reason else [])]),
                "run": run.path.name,
            }
    for m in run.missing:
        for name in names:
            unit = metrics.parse(name).unit
            yield {"target": m.target, "load": m.load, "metric": name, "unit": unit, "state": "missing"} | {
                "doubts": 1,
                "label": m.why,
                "run": run.path.name,
            }


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
    """What stands below a table, for one cell: rule and edges, what is missing and why, labels, failures.

    What a doubt says is not said here too: the window's state, and that a percentile is of too few.
    """
    lines = [] if sheet.measured.listed else [UNLISTED]
    lines += [edges(sheet.measured), *([sheet.little.text] if sheet.little.rate else [])]
    said: dict[str, list[str]] = {}  # what holds for several figures is said once
    for v in sheet.values:
        if v.reason:
            said.setdefault(f"– because {v.reason}", []).append(v.name)
        elif v.not_applicable:
            said.setdefault(f"left out of it {_counted(v.not_applicable)}", []).append(v.name)
        for label in v.labels:
            if not (v.few and "≈ max" in label):
                said.setdefault(label, []).append(v.name)
        if v.refusal and not v.few:
            few = v.ess is not None and v.ess < stats.LEAST_ESS
            text = f"ESS under {stats.LEAST_ESS:.0f}" if few else v.refusal
            said.setdefault(f"no interval, {text}", []).append(v.name)
    lines += [f"{', '.join(names)}: {text}" for text, names in said.items()]
    whole = [f"{v.name} {number(v.value, v.unit)} {v.unit}" for v in sheet.whole_run if v.value is not None]
    if whole:
        wave = sheet.measured.window.first_wave
        lines.append(f"whole run, first wave of {wave} and drain included: {', '.join(whole)}")
    if sheet.attempts:
        lines.append(sheet.attempts.text)
    anew, tried = sheet.reconnected
    if anew > RECONNECTED_SHARE * tried:
        alike = f"; {DROPS_ALIKE}" if anew > DROPS_SHARE * tried else ""
        lines.append(f"{anew} of {tried} requests found their kept-alive connection closed and opened it anew{alike}")
    lines += [f"failed: {failure.text}, first: {failure.first_error}" for failure in sheet.failures]
    return lines


def _legend(run: Run, names: Sequence[str], mine: Sequence[Sheet], where: str) -> list[str]:
    """What the columns of a target's tables hold, where it is not plain."""
    heads = ", ".join(SHORT.get(o, o) for o in _outcomes(mine))
    per_second = "; requests_per_second counts the ok ones that ended in it" if "requests_per_second" in names else ""
    lines = [f"{heads}: requests due in the window{per_second}"]
    if any(v.ess is not None for s in mine for v in s.values):
        lines.append(f"{where} a percentile: n, ESS (effective sample size), 95% interval, all: with failures on top")
    if not _streamed(run):
        lines.append("nothing was streamed: no TTFT and no TPOT; e2e runs to the end of the answer")
    return lines


def _warnings(mine: Sequence[Sheet]) -> list[str]:
    """What stands above a target's figures."""
    return [f"{s.measured.load}: {LIMITED}" for s in mine if s.client_limited]


def _outcomes(mine: Iterable[Sheet]) -> list[str]:
    """Those that need a column: ok, and what else occurred."""
    mine = list(mine)
    return [o for o in OUTCOMES if o == "ok" or any(s.outcomes[o] for s in mine)]


def _by_target(of_run: Sequence[Sheet]) -> dict[str, list[Sheet]]:
    found: dict[str, list[Sheet]] = {}
    for sheet in of_run:
        found.setdefault(sheet.measured.target, []).append(sheet)
    return found


def _counted(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count} ({reason})" for reason, count in reasons.items())


def _title(run: Run) -> str:
    facts, host = run.facts, run.facts.get("host") or {}
    trace = (facts.get("trace") or {}).get("path", "")
    parts = [f"llm-bench {facts['version']}" if "version" in facts else "", f"trace {trace}" if trace else ""]
    parts += [f"{host['cpu']}, {host.get('cores')} cores" if host.get("cpu") else ""]
    return "  ·  ".join([f"run {run.path.name}", *filter(None, parts)])


# ---- formats ----


def _terminal(run: Run, names: Sequence[str]) -> str:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    out, colour = io.StringIO(), sys.stdout.isatty()
    width = shutil.get_terminal_size((WIDTH, 24)).columns
    console = Console(file=out, force_terminal=colour, width=width, highlight=False)
    # A table is as wide as its numbers: one that no terminal so narrow can hold is broken by the terminal, not cut.
    unbound = Console(file=out, force_terminal=colour, width=10_000, highlight=False)
    console.print(Text(_title(run), "bold"))
    for target, mine in _by_target(sheets(run, names)).items():
        console.print(Text(target, "bold"))
        for line in _warnings(mine):
            console.print(Text(line, "bold yellow"))
        for table in _tables(names, mine, width):
            unbound.print(table)
        for line in _legend(run, names, mine, "below"):
            console.print(Text(line, "dim"))
        for sheet in mine:
            console.print(Text(f"\n{sheet.measured.load}", "bold"))
            for line in _remarks(sheet):
                console.print(Padding(Text(line), (0, 0, 0, 2)))
            for doubt in sheet.doubts:
                console.print(Padding(_doubt_text(doubt), (0, 0, 0, 2)))
            if not sheet.doubts:
                console.print(Text("  no doubts", "dim"))
        console.print()
    for doubt in run.own_doubts:
        console.print(_doubt_text(doubt))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _doubt_text(doubt: Doubt) -> Any:
    from rich.text import Text

    return Text.assemble(("doubt: ", "bold yellow"), f"{doubt.kind}: {doubt.text}")


def _tables(names: Sequence[str], mine: Sequence[Sheet], width: int) -> Iterator[Any]:
    """As few tables as `width` allows, of about as many metrics each, every one with its load and its counts."""
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    fixed = [[Text("load"), *(Text(s.measured.load) for s in mine)]]
    for outcome in _outcomes(mine):
        style = "red" if outcome == "failed" else ""
        counts = (Text(str(s.outcomes[outcome]), style if s.outcomes[outcome] else "") for s in mine)
        fixed.append([Text(SHORT.get(outcome, outcome)), *counts])
    figures = [[_heading(name), *(_figure_text(s.values[at]) for s in mine)] for at, name in enumerate(names)]

    def wide(columns: Iterable[Sequence[Text]]) -> int:
        """Each column has a space on either side and a line before it; the last has a line behind it too."""
        return 1 + sum(3 + max(cell_len(line) for text in c for line in text.plain.split("\n")) for c in columns)

    for tables in range(1, len(figures) + 1):
        each = -(-len(figures) // tables)
        parts = [figures[at : at + each] for at in range(0, len(figures), each)]
        if all(wide([*fixed, *part]) <= width for part in parts):
            break
    for part in parts:
        table = Table()
        for number_, column in enumerate([*fixed, *part]):
            table.add_column(column[0], justify="right" if number_ else "left", no_wrap=True)
        for row in zip(*(column[1:] for column in [*fixed, *part]), strict=True):
            table.add_row(*row)
        yield table


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
    return Text.assemble("\n".join(lines), ("" if metric.unit in ("1", "share") else f"\n{metric.unit}", "dim"))


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
    units = [metrics.parse(name).unit for name in names]
    heads = [f"{n} ({u})" if u not in ("1", "share") else n for n, u in zip(names, units, strict=True)]
    for target, mine in _by_target(sheets(run, names)).items():
        outcomes = _outcomes(mine)
        columns = ["load", *(SHORT.get(o, o) for o in outcomes), *heads]
        lines += [f"### {_md(target)}", "", *(f"**{_md(line)}**\n" for line in _warnings(mine))]
        lines += [f"| {' | '.join(columns)} |", f"|---|{'---:|' * (len(columns) - 1)}"]
        for sheet in mine:
            counts = [str(sheet.outcomes[o]) for o in outcomes]
            figures = [number(v.value, v.unit) + _md_small(v) for v in sheet.values]
            lines.append(f"| {' | '.join([_md(sheet.measured.load), *counts, *figures])} |")
        lines += ["", *(f"{_md(line)}  " for line in _legend(run, names, mine, "beside"))]
        for sheet in mine:
            lines += ["", f"**{_md(sheet.measured.load)}**", ""]
            lines += [f"- {_md(line)}" for line in _remarks(sheet)]
            lines += [_md_doubt(d) for d in sheet.doubts] or ["- no doubts"]
        lines.append("")
    lines += [_md_doubt(d) for d in run.own_doubts]
    return "\n".join(lines) + "\n"


def _md_doubt(doubt: Doubt) -> str:
    return f"- **doubt: {doubt.kind}**: {_md(doubt.text)}"


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
        "path": str(run.path),
        "run": dict(run.facts),
        "missing": [m._asdict() for m in run.missing],
        "doubts": [d._asdict() for d in run.own_doubts],
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
            "opened": w.opened,
            "start_ns": w.start_ns,
            "end_ns": w.end_ns,
            "seconds": round(w.seconds, 6),
            "requests": w.requests,
            "warmup_requests": w.warmup,
            "first_wave": w.first_wave,
            "backlog_growth_per_second": w.growth,
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
        "reconnected": sheet.reconnected[0],
        "client_limited": sheet.client_limited,
        "listed": m.listed,
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


COLUMNS = ["target", "load", "metric", "value", "unit", "n", "ess", "interval_low", "interval_high"]
COLUMNS += ["state", "failures", "doubts", "label", "run"]


def _csv(runs: Sequence[Run], names: Sequence[str]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for run in runs:
        writer.writerows(rows(run, _or_default(names, run)))
    return out.getvalue()


def _json(runs: Sequence[Run], names: Sequence[str]) -> str:
    made = [document(run, _or_default(names, run)) for run in runs]
    return json.dumps({"schema": SCHEMA, "runs": made}, allow_nan=False) + "\n"


FORMATS: dict[str, Callable[[Sequence[Run], Sequence[str]], str]] = {
    "terminal": lambda runs, names: "\n".join(_terminal(run, _or_default(names, run)) for run in runs),
    "md": lambda runs, names: "\n".join(_markdown(run, _or_default(names, run)) for run in runs),
    "json": _json,
    "csv": _csv,
}


def check_format(name: str) -> None:
    if name not in FORMATS:
        raise BenchError(f"--format {name!r}: expected one of {', '.join(FORMATS)}")


def render(run: Run, names: Sequence[str], format: str) -> str:  # noqa: A002
    return render_all([run], names, format)


def render_all(runs: Sequence[Run], names: Sequence[str], format: str) -> str:  # noqa: A002
    """The runs as text in one of FORMATS, without `names` each run's default; JSON is one line.

    Raises BenchError for an unknown format.
    """
    check_format(format)
    return FORMATS[format](runs, names)
