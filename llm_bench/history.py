"""A metric over runs in the order in which they were made: a table, a line of it, and where it changed."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from llm_bench import changes, grid, metrics
from llm_bench.changes import ChangePoint
from llm_bench.errors import BenchError
from llm_bench.metrics import Metric
from llm_bench.pairing import differing, facts
from llm_bench.results import Measured, Run
from llm_bench.rules import OTHER_WORK, changed, counts
from llm_bench.series import NOTHING, Context
from llm_bench.words import number

SCHEMA = 1  # of the JSON document
BARS = "▁▂▃▄▅▆▇█"


class Point(NamedTuple):
    """A run's figure at a load: the mean of its cells. None where it has none, with the reason."""

    run: str
    at_ns: int  # wall clock, since 1970
    value: float | None
    cells: int
    reason: str
    doubts: list[str]  # kinds of those against this metric; and that its work is not that of the run before


class History(NamedTuple):
    target: str
    load: str
    metric: Metric
    points: list[Point]
    found: list[ChangePoint]  # `at` counts the points that have a value

    @property
    def known(self) -> list[Point]:
        return [p for p in self.points if p.value is not None]

    @property
    def note(self) -> str:
        """Why no change point can be found; "" where one could."""
        need = 2 * changes.MIN_SIZE
        if len(self.known) >= need:
            return ""
        n = len(self.known)
        return f"{n} {'run has' if n == 1 else 'runs have'} the figure, {need} are needed for a change point"


def histories(
    runs: Sequence[Run], name: str, target: str = "", load: str = "", context: Context = NOTHING
) -> list[History]:
    """One of each target at each load that any run has, or only of `target` and `load`.

    Raises BenchError for an unknown metric, a run that does not say when it was made, and where nothing is left.
    """
    metric = metrics.parse(name)
    ordered = sorted(runs, key=wall_ns)
    places = [(m.target, m.load) for run in ordered for m in run.cells]
    chosen = [p for p in dict.fromkeys(places) if target in ("", p[0]) and load in ("", p[1])]
    if not chosen:
        known = ", ".join(f"{t} at {at}" for t, at in dict.fromkeys(places))
        raise BenchError(f"no run has {target or 'a target'} at {load or 'any load'}; they have {known}")
    return [_history(ordered, metric, place, context) for place in chosen]


def _history(ordered: Sequence[Run], metric: Metric, place: tuple[str, str], context: Context) -> History:
    points: list[Point] = []
    before: dict[str, str] = {}
    for run in ordered:
        mine = [i for i, m in enumerate(run.cells) if (m.target, m.load) == place]
        if mine:
            work = facts(run, run.cells[mine[0]])
            other = differing(before, work) if before else []
            before = {name: said or before.get(name, "") for name, said in work.items()}
            points.append(_point(run, mine, metric, context, other))
    values = np.array([p.value for p in points if p.value is not None], float)
    return History(*place, metric, points, changes.e_divisive(values))


def _point(run: Run, cells: Sequence[int], metric: Metric, context: Context, other: Sequence[str]) -> Point:
    """`other`: what of its work differs from that of the run before."""
    values = [_value(run.cells[i], metric, context) for i in cells]
    kinds = dict.fromkeys(d.kind for i in cells for d in run.doubts[i] if counts(d.kind, metric))
    known = [v.value for v in values if v.value is not None]
    whole = len(known) == len(values)
    reason = "" if whole else next(v.reason for v in values if v.value is None)
    mean = float(np.mean(known)) if whole else None
    doubts = [f"{OTHER_WORK} as before: {', '.join(other)}"] * bool(other) + list(kinds)
    return Point(run.path.name, wall_ns(run), mean, len(cells), reason, doubts)


def _value(m: Measured, metric: Metric, context: Context) -> metrics.Value:
    return metrics.compute(metric.name, m.cell, m.window, context)


def wall_ns(run: Run) -> int:
    """When it was begun, by its wall anchor. Raises BenchError where it has none."""
    anchors = [run.facts.get("anchor"), *(m.cell.header.get("anchor") for m in run.cells)]
    for anchor in anchors:
        if isinstance(anchor, list) and anchor and isinstance(anchor[0], int):
            return anchor[0]
    raise BenchError(f"{run.path}: neither run.json nor a record file says when it was made (anchor)")


# ---- as text


def when(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M")


def line_of(values: Sequence[float]) -> str:
    """The values as bars between the least and the largest of them."""
    least, most = min(values), max(values)
    steps = [(v - least) / (most - least) if most > least else 0.5 for v in values]
    return "".join(BARS[min(int(step * len(BARS)), len(BARS) - 1)] for step in steps)


def rows(history: History) -> tuple[list[str], list[list[str]]]:
    unit = history.metric.unit
    heading = f"{history.metric.name}{'' if unit in ('1', 'share') else f', {unit}'}"
    starts = {id(history.known[c.at]) for c in history.found}
    return ["", "made (UTC)", "run", heading, "doubts"], [
        [
            "→" if id(p) in starts else "",
            when(p.at_ns),
            p.run,
            number(p.value, unit),
            f"! {', '.join(p.doubts)}" if p.doubts else p.reason,
        ]
        for p in history.points
    ]


def sentences(history: History) -> list[str]:
    """The change points in words, or why there can be none."""
    unit = history.metric.unit
    out = [_sentence(history, change, unit) for change in history.found]
    if history.note:
        return [f"no verdict: {history.note}"]
    return out or [f"no change point in {_runs(len(history.known))} (E-divisive, alpha {changes.ALPHA})"]


def _sentence(history: History, change: ChangePoint, unit: str) -> str:
    point, rose = history.known[change.at], change.after > change.before
    better = "better" if rose == (history.metric.better == "higher") else "worse"
    points = unit == "share"
    moved = change.after - change.before if points else change.share
    size = "" if moved is None else f", {changed(moved, points=points)}"
    return (
        f"from {point.run} ({when(point.at_ns)}) on {better}: {number(change.before, unit)} to "
        f"{number(change.after, unit)}{size}, p = {change.p:.2g}"
    )


def _title(history: History) -> str:
    return f"{history.metric.name} of {history.target} at {history.load}, {_runs(len(history.points))}"


def _runs(n: int) -> str:
    return "1 run" if n == 1 else f"{n} runs"


def _drawn(history: History) -> str:
    values = [p.value for p in history.points if p.value is not None]
    if not values:
        return "no run has the figure"
    unit = history.metric.unit
    return f"{line_of(values)}  {number(min(values), unit)} to {number(max(values), unit)}"


def overview(found: Sequence[History]) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row a target and load: its first and last figure, all of them as bars, and where it changed."""
    unit = found[0].metric.unit
    heading = f"{found[0].metric.name}{'' if unit in ('1', 'share') else f', {unit}'}"
    rows_ = []
    for h in found:
        values = [p.value for p in h.known if p.value is not None]
        ends = [number(v, unit) for v in (values[0], values[-1])] if values else ["–", "–"]
        doubtful = sum(bool(p.doubts) for p in h.points)
        changed_ = ", ".join(h.known[c.at].run for c in h.found) or "–"
        line = line_of(values) if values else "–"
        rows_.append([h.target, h.load, str(len(h.points)), *ends, line, changed_, str(doubtful or "–")])
    return ["target", "load", "runs", f"first {heading}", "last", "all", "changed at", "doubtful runs"], rows_


def _overall(found: Sequence[History]) -> list[str]:
    """The changes of all in words; why there can be none is said once."""
    out = [f"{h.target} at {h.load}: {_sentence(h, c, h.metric.unit)}" for h in found for c in h.found]
    few = [h for h in found if h.note]
    if few:
        most = max(len(h.known) for h in few)
        need = 2 * changes.MIN_SIZE
        out.append(
            f"no verdict on {len(few)} of {len(found)}: at most {_runs(most)}, {need} are needed for a change point"
        )
    return out or [f"no change point (E-divisive, alpha {changes.ALPHA})"]


def text(found: Sequence[History], details: bool = False) -> str:
    """For a terminal: one history run by run; of several a line each, and with `details` each run by run too."""
    parts = []
    if len(found) > 1:
        lines = [grid.terminal(*overview(found), left=(0, 1, 5, 6)), "\n", *(f"  {line}\n" for line in _overall(found))]
        parts.append("".join([*lines, "" if details else "  Run by run: --details, or --target and --load\n"]))
    for history in found if details or len(found) == 1 else ():
        lines = [f"{_title(history)}\n  {_drawn(history)}\n\n", grid.terminal(*rows(history), left=(0, 1, 2, 4)), "\n"]
        parts.append("".join([*lines, *(f"  {line}\n" for line in sentences(history))]))
    return "\n".join(parts)


def markdown(found: Sequence[History], details: bool = False) -> str:
    parts = []
    if len(found) > 1:
        lines = [grid.markdown(*overview(found), left=(0, 1, 5, 6)), "\n"]
        parts.append("".join([*lines, *(f"- {grid.escaped(line)}\n" for line in _overall(found))]))
    for history in found if details or len(found) == 1 else ():
        lines = [f"### {grid.escaped(_title(history))}\n\n{_drawn(history)}\n\n"]
        lines += [grid.markdown(*rows(history), left=(0, 1, 2, 4)), "\n"]
        parts.append("".join([*lines, *(f"- {grid.escaped(line)}\n" for line in sentences(history))]))
    return "\n".join(parts)


def document(found: Sequence[History]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "histories": [
            {
                "target": h.target,
                "load": h.load,
                "metric": h.metric.name,
                "unit": h.metric.unit,
                "points": [p._asdict() for p in h.points],
                "change_points": [c._asdict() | {"from": h.known[c.at].run, "share": c.share} for c in h.found],
                "note": h.note,
            }
            for h in found
        ],
    }


def json_text(found: Sequence[History]) -> str:
    return json.dumps(document(found), allow_nan=False) + "\n"
