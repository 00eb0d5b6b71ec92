"""What a diagnosis says, to people and programs: where the time of a cell went, what was found, what was not judged."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llm_bench import scrape
from llm_bench.decompose import Decomposition
from llm_bench.diagnose import Diagnosis, diagnose
from llm_bench.errors import BenchError
from llm_bench.evidence import Case, related
from llm_bench.results import Measured, Run
from llm_bench.server_metrics import METRICS_OF, Figure, Figures
from llm_bench.words import number

SCHEMA = 1  # of the JSON document; counts up when a key changes its meaning


@dataclass
class Diagnosed:
    """One cell, diagnosed. `scraped`: of its scrape in words, what went wrong with it included."""

    diagnosis: Diagnosis
    scraped: list[str]


def diagnosed(run: Run) -> list[Diagnosed]:
    """Every cell of a run. A scrape that cannot be read is said, and the cell is judged by its records."""
    cases, said = [], []
    for measured in run.cells:
        case, lines = _case(run, measured)
        cases.append(case)
        said.append(lines)
    return [Diagnosed(diagnose(case), lines) for case, lines in zip(related(cases), said, strict=True)]


def _case(run: Run, m: Measured) -> tuple[Case, list[str]]:
    urls = str((m.cell.header.get("target") or {}).get("url") or "").count("|") + 1
    case = Case(m.name, m.target, m.load, m.cell, m.window, m.end, urls=urls)
    path = scrape.path_of(run.path, m.name)
    if not path.is_file():
        return case, ["nothing: the server's own account is what its answers say"]
    try:
        found = scrape.read(path)
    except BenchError as e:
        return case, [str(e)]
    of = found.figures(m.window.start_ns, m.window.end_ns)
    case.replicas = {s.name: of[s.name] for s in found.replicas if s.name in of}
    case.host, case.gpu, case.every_s = of.get(scrape.HOST), of.get(scrape.GPU), found.every_s
    lines = [f"{name}: every {found.every_s:g} s, {figures.edges()}" for name, figures in of.items()]
    for source in found.sources:
        if source.name not in of:
            lines.append(f"{source.name}: {len(source.points)} scrapes, too few in or around the window")
        if source.errors:
            lines.append(f"{source.name}: {len(source.errors)} scrapes failed, first: {source.errors[0]}")
    return case, [*lines, found.cost]


def text(run: Run, cells: Sequence[Diagnosed]) -> str:
    """For a terminal."""
    lines = [f"run {run.path.name}"]
    for of in cells:
        lines += ["", _head(of), *(f"  {line}" for line in _time(of.diagnosis.case.parts))]
        lines += [f"  {line}" for line in _figures(of.diagnosis.case)]
        lines += [f"  scraped: {line}" for line in of.scraped]
        for kind, found in of.diagnosis.findings.items():
            lines += [f"  {kind.upper()} ({found.sure}): {found.seen}"]
            lines += [f"    seen by: {found.sources}", f"    check next: {found.check}"]
        lines += [f"  {line}" for line in _rest(of.diagnosis)]
    return "\n".join(lines) + "\n"


def markdown(run: Run, cells: Sequence[Diagnosed]) -> str:
    lines = [f"# Diagnosis of {run.path.name}"]
    for of in cells:
        lines += ["", f"## {_head(of)}", ""]
        lines += [f"- {line}" for line in (*_time(of.diagnosis.case.parts), *_figures(of.diagnosis.case))]
        lines += [f"- scraped: {line}" for line in of.scraped]
        for kind, found in of.diagnosis.findings.items():
            lines += ["", f"**{kind}** ({found.sure}): {found.seen}", ""]
            lines += [f"- seen by: {found.sources}", f"- check next: {found.check}"]
        lines += ["", *_rest(of.diagnosis)]
    return "\n".join(lines) + "\n"


def json_text(run: Run, cells: Sequence[Diagnosed]) -> str:
    document = {"schema": SCHEMA, "run": str(run.path), "cells": [_document(of) for of in cells]}
    return json.dumps(document, allow_nan=False) + "\n"


FORMS: dict[str, Callable[[Run, Sequence[Diagnosed]], str]] = {"terminal": text, "md": markdown, "json": json_text}


def _head(of: Diagnosed) -> str:
    case = of.diagnosis.case
    state = f", {case.window.state}" if case.window.state else ""
    return f"{case.target} at {case.load} ({case.name}{state})"


def _time(parts: Decomposition | None) -> list[str]:
    if parts is None:
        return ["where the time went: no ok request in the window"]
    shown = [f"{p.name} {number(p.ms, 'ms')}" for p in parts.parts] + [f"rest {number(parts.rest_ms, 'ms')}"]
    verdict = "it adds up" if parts.adds_up else "it does not add up"
    if parts.unknown:
        verdict = f"{' and '.join(parts.unknown)} unknown, and in the rest"
    lines = [
        f"where the time went, mean of {parts.requests} ok requests: e2e {number(parts.e2e_ms, 'ms')} ms = "
        f"{' | '.join(shown)} (error {parts.error:.1%}: {verdict})"
    ]
    why = dict.fromkeys(p.why for p in parts.parts if p.ms is None)
    sources = [f"{p.name}: {p.source}" for p in parts.parts if p.source]
    return [*lines, f"by {'; '.join(sources)}", *(f"unknown: {line}" for line in why), *parts.notes]


def _figures(case: Case) -> list[str]:
    """What was scraped in the window, under canonical names."""
    lines = []
    for figures in (case.server, case.host, case.gpu):
        shown = [_figure(name, of, figures) for name, of in figures.of.items()] if figures else []
        if shown:
            lines.append(", ".join(shown))
    return lines


def _figure(metric: str, of: Figure, figures: Figures) -> str:
    kind, unit = METRICS_OF[metric].kind, METRICS_OF[metric].unit
    words = "" if unit in ("1", "share") else f" {unit}"
    name = metric.replace("_", " ")
    if of.value is None:
        return f"{name} –"
    resets = " (server started anew)" if of.resets else ""
    if kind == "counter":
        return f"{name} {number(of.value, unit)}{words}, {number(of.value / figures.seconds, '')}/s{resets}"
    most = f", at most {number(of.most, unit)}" if kind == "gauge" and of.most != of.value else ""
    return f"{name} {number(of.value, unit)}{words}{most}{resets}"


def _rest(diagnosis: Diagnosis) -> list[str]:
    lines = []
    if not diagnosis.findings:
        lines.append(f"nothing found; looked for: {', '.join(diagnosis.judged)}")
    by_why: dict[str, list[str]] = {}
    for kind, why in diagnosis.unjudged.items():
        by_why.setdefault(why, []).append(kind)
    return [*lines, *(f"not judged: {', '.join(kinds)}: {why}" for why, kinds in by_why.items())]


def _document(of: Diagnosed) -> dict[str, Any]:
    diagnosis, case = of.diagnosis, of.diagnosis.case
    parts = case.parts
    time = None
    if parts is not None:
        time = {
            "e2e_ms": parts.e2e_ms,
            "requests": parts.requests,
            "parts": [p._asdict() for p in parts.parts],
            "rest_ms": parts.rest_ms,
            "error": parts.error,
            "adds_up": parts.adds_up,
            "notes": parts.notes,
        }
    return {
        "cell": case.name,
        "target": case.target,
        "load": case.load,
        "state": case.window.state,
        "time": time,
        "scraped": of.scraped,
        "every_s": case.every_s,
        "server": _values(case.replicas),
        "host": _values({"host": case.host} if case.host else {}),
        "gpu": _values({"gpu": case.gpu} if case.gpu else {}),
        "findings": [{"kind": kind, **found._asdict()} for kind, found in diagnosis.findings.items()],
        "looked_for": list(diagnosis.judged),
        "not_judged": dict(diagnosis.unjudged),
    }


def _values(sources: Mapping[str, Figures]) -> dict[str, Any]:
    return {
        source: {
            "seconds": of.seconds,
            "scrapes": of.scrapes,
            "within_window": of.inside,
            "figures": {
                metric: {
                    "name": figure.name,
                    "unit": METRICS_OF[metric].unit,
                    "value": figure.value,
                    "observed": figure.observed,
                    "least": figure.least,
                    "most": figure.most,
                    "resets": figure.resets,
                }
                for metric, figure in of.of.items()
            },
        }
        for source, of in sources.items()
    }
