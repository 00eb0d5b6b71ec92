"""What a diagnosis says, to people and programs: where the time of a cell went, what was found, what was not judged."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from llm_bench import diagnose_replicas, grid, printable, scrape
from llm_bench.decompose import Decomposition, pooled
from llm_bench.diagnose import Diagnosis, diagnose
from llm_bench.errors import BenchError
from llm_bench.evidence import SERVERS, SUREST, Case, Finding, related
from llm_bench.printable import counted
from llm_bench.results import Measured, Run
from llm_bench.server_metrics import FELL, Figure, Figures
from llm_bench.server_names import METRICS_OF
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
    urls = str((m.cell.header.get("target") or {}).get("url") or "").split("|")
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
    case.silent = [s.name for s in found.replicas if s.name not in of]
    case.host, case.gpu, case.every_s = of.get(scrape.HOST), of.get(scrape.GPU), found.every_s
    lines = [f"{name}: every {found.every_s:g} s, {figures.edges()}" for name, figures in of.items()]
    for source in found.sources:
        if source.name not in of:
            lines.append(f"{source.name}: {counted(len(source.points), 'scrape')}, too few in or around the window")
        if source.errors:
            lines.append(f"{source.name}: {counted(len(source.errors), 'scrape')} failed, first: {source.errors[0]}")
    return case, [*lines, found.cost]


class Block(NamedTuple):
    """What is said of a cell, or of the repeats of one together."""

    head: str
    time: list[str]
    figures: list[str]
    scraped: list[str]
    findings: list[tuple[str, str, Finding]]  # kind, how sure and in how many runs, the surest of them
    rest: list[str]


def blocks(cells: Sequence[Diagnosed]) -> list[Block]:
    """One of each target at each load, in the order of the run."""
    groups: dict[tuple[str, str], list[Diagnosed]] = {}
    for of in cells:
        groups.setdefault((of.diagnosis.case.target, of.diagnosis.case.load), []).append(of)
    return [_block(mine) for mine in groups.values()]


def _block(of: list[Diagnosed]) -> Block:
    cases, runs = [one.diagnosis.case for one in of], len(of)
    head = _head(of[0])
    if runs > 1:
        states = Counter(case.window.state for case in cases if case.window.state)
        shown = ", ".join(state if count == runs else f"{count} {state}" for state, count in states.items())
        head = f"{cases[0].target} at {cases[0].load} ({runs} runs{f', {shown}' if shown else ''})"
    parts = [case.parts for case in cases if case.parts is not None]
    together = pooled(parts) if parts else None
    time = _time(together)
    if parts and together is None:
        time = ["where the time went: its runs account for different parts; --format json has each"]
    figures = _figures(cases[0]) if runs == 1 else []
    if runs > 1 and any(_figures(case) for case in cases):
        figures = ["what was scraped of each run: --format json"]
    found: dict[str, list[Finding]] = {}
    for one in of:
        for kind, finding in one.diagnosis.findings.items():
            found.setdefault(kind, []).append(finding)
    findings = []
    for kind, mine in found.items():
        surest = min(mine, key=lambda f: SUREST.index(f.sure))
        where = f"{surest.sure}; in {len(mine)} of {runs} runs; of one" if runs > 1 else surest.sure
        findings.append((kind, where, surest))
    return Block(head, time, figures, _counted(of, runs), findings, _rest([one.diagnosis for one in of]))


def works(cells: Sequence[Diagnosed]) -> list[str]:
    """Which kind of workload each target was asked to do, and what that means for the choice of server."""
    found: dict[str, list[str]] = {}
    for case in (of.diagnosis.case for of in cells):
        if case.ok.any():
            targets = found.setdefault(SERVERS[case.work], [])
            targets += [case.target] if case.target not in targets else []
    return [f"workload of {', '.join(targets)}: {meaning}" for meaning, targets in found.items()]


def _counted(of: Sequence[Diagnosed], runs: int) -> list[str]:
    """What was said of the scrapes, once; of repeats only what went wrong differs by more than its counts."""
    said = Counter(line for one in of for line in dict.fromkeys(one.scraped))
    if runs == 1 or all(count == runs for count in said.values()):
        return list(said)
    return [line if count == runs else f"{line} (in {count} of {runs} runs)" for line, count in said.items()]


def text(run: Run, cells: Sequence[Diagnosed]) -> str:
    """For a terminal."""
    lines = [f"run {printable.clean(run.path.name)}", *works(cells)]
    for of in blocks(cells):
        lines += ["", of.head, *(f"  {line}" for line in (*of.time, *of.figures))]
        lines += [f"  scraped: {line}" for line in of.scraped]
        for kind, where, found in of.findings:
            lines += [f"  {kind.upper()} ({where}): {found.seen}"]
            lines += [f"    seen by: {found.sources}", f"    check next: {found.check}"]
        lines += [f"  {line}" for line in of.rest]
    return "\n".join(lines) + "\n"


def markdown(run: Run, cells: Sequence[Diagnosed]) -> str:
    lines = [f"# Diagnosis of {grid.escaped(printable.clean(run.path.name))}", ""]
    lines += [f"- {line}" for line in works(cells)]
    for of in blocks(cells):
        lines += ["", f"## {of.head}", ""]
        lines += [f"- {line}" for line in (*of.time, *of.figures)]
        lines += [f"- scraped: {line}" for line in of.scraped]
        for kind, where, found in of.findings:
            lines += ["", f"**{kind}** ({where}): {found.seen}", ""]
            lines += [f"- seen by: {found.sources}", f"- check next: {found.check}"]
        lines += ["", *of.rest]
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
    shown = [f"{p.name} {_ms(p.ms)}" for p in parts.parts] + [f"rest {_ms(parts.rest_ms)}"]
    verdict = "it adds up" if parts.adds_up else "it does not add up"
    if parts.unknown:
        verdict = f"{' and '.join(parts.unknown)} unknown, and in the rest"
    lines = [
        f"where the time went, mean of {counted(parts.requests, 'ok request')}: e2e {_ms(parts.e2e_ms)} = "
        f"{' | '.join(shown)} (rest {parts.error:.1%} of it: {verdict})"
    ]
    why: dict[str, list[str]] = {}
    for p in parts.parts:
        if p.ms is None:
            why.setdefault(p.why, []).append(p.name)
    sources = [f"{p.name}: {p.source}" for p in parts.parts if p.source]
    return [
        *lines,
        f"by {'; '.join(sources)}",
        *(f"unknown: {' and '.join(names)}: {line}" for line, names in why.items()),
        *parts.notes,
    ]


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{number(value, 'ms')} ms"


def _figures(case: Case) -> list[str]:
    """What each URL did by the records, and what was scraped in the window, under canonical names."""
    lines = [diagnose_replicas.text(of) for of in diagnose_replicas.of_urls(case)]
    for figures in filter(None, (case.server, case.host, case.gpu)):
        if shown := [_figure(name, of, figures) for name, of in figures.of.items()]:
            lines.append(", ".join(shown))
            lines += [f"what fell is a counter: {FELL}"] if any(of.resets for of in figures.of.values()) else []
    if batch := _mean_batch(case):
        lines.append(batch)
    return [*lines, case.energy.text] if case.energy else lines


def _mean_batch(case: Case) -> str:
    """By the server's counters; only of single passes, since a stream's batch changes at each step."""
    made, runs = case.said("inferences"), case.said("executions")
    if case.work != "single pass" or not made or not runs:
        return ""
    return f"{made / runs:.3g} inputs a batch on average, by the server's counters"


_OF_ONE = {
    "running": "request",
    "waiting": "request",
}  # what a metric whose unit is 1 counts, where its name does not


def _figure(metric: str, of: Figure, figures: Figures) -> str:
    kind, unit = METRICS_OF[metric].kind, METRICS_OF[metric].unit
    words = "" if unit in ("1", "share") else f" {unit}"
    if metric in _OF_ONE:
        words = f" {_OF_ONE[metric]}{'' if of.value == 1 else 's'}"
    name = metric.replace("_", " ")
    if of.value is None:
        return f"{name} –"
    if of.resets:
        return f"{name} – (fell {counted(of.resets, 'time')})"
    if unit == "bytes":
        return f"{name} {of.value / 2**30:.3g} GiB"
    if kind == "counter":
        rate = figures.rate(metric)
        assert rate is not None  # its increase is known
        if unit == "s":
            return f"{name} {number(rate, '')} cores"
        return f"{name} {number(of.value, unit)}{words}, {number(rate, '')}{words}/s"
    shown, most = number(of.value, unit), number(of.most, unit) if kind == "gauge" and of.most is not None else ""
    at_most = f", at most {most}" if most not in ("", shown) else ""
    return f"{name} {shown}{words}{at_most}"


def _rest(of: Sequence[Diagnosis]) -> list[str]:
    lines = []
    if not any(one.findings for one in of):
        judged = [kind for kind in of[0].judged if all(kind in one.judged for one in of)]
        lines.append(f"nothing found; looked for: {', '.join(judged)}")
    by_why: dict[str, list[str]] = {}
    for one in of:
        for kind, why in one.unjudged.items():
            kinds = by_why.setdefault(why, [])
            kinds += [kind] if kind not in kinds else []
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
        "work": case.work,
        "time": time,
        "scraped": of.scraped,
        "every_s": case.every_s,
        "energy": case.energy and {**case.energy._asdict(), "watts": case.energy.watts},
        "urls": [of._asdict() for of in diagnose_replicas.of_urls(case)],
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
