"""Runs and targets side by side: what work each did first, then figures, and changes as far as pairs carry them."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from llm_bench import grid, metrics, pairing, pairs
from llm_bench.errors import BenchError
from llm_bench.gate import Objection, Pair
from llm_bench.gate_report import counted
from llm_bench.metrics import Value
from llm_bench.pairing import Arm
from llm_bench.results import Asked, Run
from llm_bench.rules import NOT_INTERLEAVED, OTHER_WORK, Rule, changed, free
from llm_bench.series import Context, outcome_in
from llm_bench.words import number, or_default

SCHEMA = 1  # of the JSON document
LEAST_PAIRS = pairs.needed(1, pairs.ALPHA / 2)  # for a two-sided interval
NOT_MEASURED = "it was not measured at this load"
WORK = (OTHER_WORK, "targets differ", "network path", "delivered tokens", "prompt tokens")


class Change(NamedTuple):
    """Of an arm against the first: 0.05 is +5% or, `points`, 5 percentage points. 95% interval where pairs allow."""

    change: float
    low: float | None
    high: float | None
    pairs: int
    points: bool

    @property
    def text(self) -> str:
        shown = changed(self.change, points=self.points)
        if self.low is None or self.high is None:
            return shown
        return f"{shown} ({changed(self.low, points=self.points)} to {changed(self.high, points=self.points)})"


class Figure(NamedTuple):
    """A metric of an arm at a load: the mean of its cells."""

    value: float | None
    cells: int
    reason: str
    change: Change | None  # None: the first arm, or there is no pair with a figure on both sides


class Line(NamedTuple):
    load: str
    metric: str
    unit: str
    figures: list[Figure]  # one an arm


class Compared(NamedTuple):
    arms: list[str]
    facts: list[tuple[str, list[str]]]  # what of the work each arm says; "" where it does not
    lines: list[Line]
    first: str  # whether the comparison can be believed at all
    objections: list[Objection]


def arms(runs: Sequence[Run]) -> list[Arm]:
    """Every target of every run. Raises BenchError where there is only one."""
    several = len(runs) > 1
    names = [run.path.name for run in runs]
    found = []
    for run in runs:
        name = run.path.name if names.count(run.path.name) == 1 else str(run.path)
        targets = list(dict.fromkeys(m.target for m in run.cells))
        for target in targets:
            said = f"{name}:{target}" if len(targets) > 1 else name
            found.append(pairing.arm(run, target, said if several else target))
    if len(found) < 2:
        raise BenchError(f"{runs[0].path}: one target, expected two runs or targets to compare")
    return found


def compare(runs: Sequence[Run], names: Sequence[str] = (), context: Context | None = None) -> Compared:
    """Every arm against the first. Without `names` the metrics that a report of the first run has."""
    mine = arms(runs)
    names = names or or_default(Asked(), runs[0]).names
    context = context or Context()
    paired = [pairing.pair_up(mine[0], other) for other in mine[1:]]
    objections = list(dict.fromkeys(o for p in paired for o in p.objections))
    loads = list(dict.fromkeys(load for arm in mine for load in arm.loads))
    lines = []
    for load in loads:
        figures = [_figures(arm, load, names, context) for arm in mine]
        believed = [p.interleaved and not _work(p.objections, load) for p in paired]
        changes = [
            _changes([x for x in p.pairs if x.load == load], names, context, interval)
            for p, interval in zip(paired, believed, strict=True)
        ]
        for i, name in enumerate(names):
            of_arms = [figures[0][i], *(f[i]._replace(change=c[i]) for f, c in zip(figures[1:], changes, strict=True))]
            lines.append(Line(load, name, metrics.parse(name).unit, of_arms))
    return Compared(
        [arm.name for arm in mine],
        _facts(mine),
        lines,
        _first([a.name for a in mine[1:]], paired, objections),
        objections,
    )


def _figures(arm: Arm, load: str, names: Sequence[str], context: Context) -> list[Figure]:
    cells = [m for m in arm.cells if m.load == load]
    of_cells = [metrics.compute_all(names, m.cell, m.window, context) for m in cells]
    return [_mean([values[i] for values in of_cells]) for i in range(len(names))]


def _mean(values: Sequence[Value]) -> Figure:
    known = [v.value for v in values if v.value is not None]
    if not values or len(known) < len(values):
        reason = next((v.reason for v in values if v.value is None), NOT_MEASURED)
        return Figure(None, len(values), reason, None)
    return Figure(float(np.mean(known)), len(known), "", None)


def _changes(mine: Sequence[Pair], names: Sequence[str], context: Context, interval: bool) -> list[Change | None]:
    rows = [
        [metrics.compute_all(names, side.cell, side.window, context) for side in (p.baseline, p.candidate)]
        for p in mine
    ]
    return [_change(free(name), [(base[i], cand[i]) for base, cand in rows], interval) for i, name in enumerate(names)]


def _change(rule: Rule, values: Sequence[tuple[Value, Value]], interval: bool) -> Change | None:
    if not values or any(v.value is None for pair in values for v in pair):
        return None
    base, cand = (np.array([pair[i].value for pair in values], float) for i in (0, 1))
    try:
        found = pairs.compare(rule.differences(base, cand), 0.0, rule.op)
    except ValueError:  # a figure of 0 has no change in percent
        return None
    low, high = (found.low, found.high) if interval else (None, None)
    edges = [None if x is None else rule.as_change(x) for x in (found.change, low, high)]
    assert edges[0] is not None
    return Change(edges[0], edges[1], edges[2], found.pairs, rule.points)


def _work(objections: Sequence[Objection], load: str = "") -> list[Objection]:
    return [o for o in objections if o.kind in WORK and (not load or o.load in ("", load))]


def _first(others: Sequence[str], paired: Sequence[pairing.Paired], objections: Sequence[Objection]) -> str:
    apart = [o for o in objections if o.kind == NOT_INTERLEAVED]
    said = [f"NOT THE SAME WORK: {line}" for line in counted(_work(objections))[:1]]
    texts = {text: [o.where for o in apart if o.text == text] for text in dict.fromkeys(o.text for o in apart)}
    each = [text if len(texts) == 1 else f"{' and '.join(where)}: {text}" for text, where in texts.items()]
    said += [f"NOT INTERLEAVED: {'; '.join(each)}"] if each else []
    alone = [name for name, of in zip(others, paired, strict=True) if not of.pairs]
    said += [f"NO LOAD IN COMMON WITH THE FIRST: {', '.join(alone)}"] if alone else []
    if said:
        return ". ".join(said)
    fewest = min(
        (sum(p.load == load for p in of.pairs) for of in paired for load in {p.load for p in of.pairs}), default=0
    )
    few = f"; an interval needs {LEAST_PAIRS}" if fewest < LEAST_PAIRS else ""
    return f"Interleaved, the same work, {fewest} pairs at the load with the fewest{few}"


def _facts(mine: Sequence[Arm]) -> list[tuple[str, list[str]]]:
    """Rows of what each arm says of its work; one that all leave out is left out."""
    of_arms = [_facts_of(arm) for arm in mine]
    rows = [(name, [facts[name] for facts in of_arms]) for name in of_arms[0]]
    return [row for row in rows if any(row[1])]


def _facts_of(arm: Arm) -> dict[str, str]:
    said = [pairing.facts(arm.run, m) for m in arm.cells]
    facts = {name: ", ".join(dict.fromkeys(f[name] for f in said if f[name])) for name in said[0]}
    if facts["work"].count(",") > 1:  # a hash a cell says no more than that there are several
        facts["work"] = f"{facts['work'].count(',') + 1} different"
    for name, column in (("prompt tokens", "tokens_in"), ("delivered tokens", "tokens_out")):
        mean = _per_request(arm, column)
        facts[name] = "" if mean is None else number(mean, "tokens") + " a request"
    facts["cells"] = str(len(arm.cells))
    return facts


def _per_request(arm: Arm, column: str) -> float | None:
    """The mean over ok requests of all cells, of those where it is known."""
    known = [x[x >= 0] for m in arm.cells for x in [m.cell[column][outcome_in(m.cell, "ok")]]]
    flat = np.concatenate(known) if known else np.zeros(0)
    return float(flat.mean()) if len(flat) else None


# ---- as text


def tables(compared: Compared) -> list[tuple[list[str], list[list[str]]]]:
    """Headings and rows: of the work, then of the figures."""
    differs = [len({v for v in values if v}) > 1 and name != "cells" for name, values in compared.facts]
    work = [[f"{name} ≠" if d else name, *(v or "unknown" for v in values)]
            for (name, values), d in zip(compared.facts, differs, strict=True)]  # fmt: skip
    figures = [
        [line.load, f"{line.metric}{'' if line.unit in ('1', 'share') else f', {line.unit}'}"]
        + [text for i, f in enumerate(line.figures) for text in _figure(f, line.unit, first=not i)]
        for line in compared.lines
    ]
    first, *others = compared.arms
    headings = ["load", "metric", first, *(text for name in others for text in (name, "change"))]
    return [(["work", *compared.arms], work), (headings, figures)]


def _figure(f: Figure, unit: str, *, first: bool) -> list[str]:
    return [number(f.value, unit), *([] if first else [f.change.text if f.change else "–"])]


def _notes(compared: Compared) -> list[str]:
    """Why figures are missing, a line a reason, and the doubts."""
    of_reason: dict[str, list[str]] = {}
    for line in compared.lines:
        for name, figure in zip(compared.arms, line.figures, strict=True):
            if figure.reason == NOT_MEASURED:
                of_reason.setdefault("not measured", []).append(f"{name} at {line.load}")
            elif figure.reason:
                of_reason.setdefault(figure.reason, []).append(line.metric)
    said = [f"–: {reason}: {', '.join(dict.fromkeys(what))}" for reason, what in sorted(of_reason.items())]
    return said + [f"doubt: {line}" for line in counted(compared.objections)]


def text(compared: Compared) -> str:
    """For a terminal."""
    work, figures = tables(compared)
    lines = [f"{compared.first}\n\n", grid.terminal(*work), "\n", grid.terminal(*figures, left=(0, 1)), "\n"]
    lines.append(f"  Changes are against {compared.arms[0]}, with a 95% interval where interleaved pairs carry one.\n")
    return "".join([*lines, *(f"  {line}\n" for line in _notes(compared))])


def markdown(compared: Compared) -> str:
    work, figures = tables(compared)
    lines = [f"**{grid.escaped(compared.first)}**\n\n", grid.markdown(*work), "\n"]
    lines += [grid.markdown(*figures, left=(0, 1)), "\n"]
    return "".join([*lines, *(f"- {grid.escaped(line)}\n" for line in _notes(compared))])


def document(compared: Compared) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "first": compared.first,
        "arms": compared.arms,
        "work": dict(compared.facts),
        "figures": [
            {
                "load": line.load,
                "metric": line.metric,
                "unit": line.unit,
                "arms": [f._asdict() | {"change": f.change and f.change._asdict()} for f in line.figures],
            }
            for line in compared.lines
        ],
        "doubts": [o._asdict() for o in compared.objections],
    }


def json_text(compared: Compared) -> str:
    return json.dumps(document(compared), allow_nan=False) + "\n"
