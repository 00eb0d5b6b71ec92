"""Metrics over runs in the order in which they were made: a table, a line of it, and where it changed."""

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from llm_bench import changes, files, grid, metrics
from llm_bench.changes import ChangePoint
from llm_bench.errors import BenchError
from llm_bench.metrics import Metric
from llm_bench.pairing import differing, facts
from llm_bench.results import Run
from llm_bench.rules import OTHER_WORK, changed, counts
from llm_bench.series import NOTHING, Context
from llm_bench.words import number

SCHEMA = 1  # of the JSON document
LAST_NS = 253_402_300_799 * 10**9  # the end of the year 9999: a wall clock that says more has none
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

    @property
    def levels(self) -> list[float]:
        """Of each of `known`: the mean of the runs between the change points around it."""
        values = np.array([p.value for p in self.known], float)
        edges = [0, *(c.at for c in self.found), len(values)]
        return [float(values[a:b].mean()) for a, b in pairwise(edges) for _ in range(a, b)]


class Kept(NamedTuple):
    """What a history keeps of a run: the rest of it may go."""

    at_ns: int
    places: list[tuple[str, str]]  # target and load of each cell
    points: dict[tuple[str, str], list[Point]]  # of those asked for, a point a metric
    work: dict[tuple[str, str], dict[str, str]]


def histories(
    runs: Iterable[Run], names: str | Sequence[str], target: str = "", load: str = "", context: Context = NOTHING
) -> list[History]:
    """One of each target at each load that any run has, or only of `target` and `load`; of each metric in turn.

    Each run is reduced to its figures before the next is asked for: of an iterator of runs one is in memory at a time.
    Raises BenchError for an unknown metric, a run that does not say when it was made, and where nothing is left.
    """
    asked = [metrics.parse(name) for name in ([names] if isinstance(names, str) else names)]
    kept = sorted((_kept(run, asked, target, load, context) for run in runs), key=lambda k: k.at_ns)
    places = list(dict.fromkeys(place for one in kept for place in one.places))
    chosen = [place for place in places if _is_asked(place, target, load)]
    if not chosen:
        known = ", ".join(f"{t} at {at}" for t, at in places)
        raise BenchError(f"no run has {target or 'a target'} at {load or 'any load'}; they have {known}")
    return [_history(kept, metric, i, place) for i, metric in enumerate(asked) for place in chosen]


def _is_asked(place: tuple[str, str], target: str, load: str) -> bool:
    return target in ("", place[0]) and load in ("", place[1])


def _kept(run: Run, asked: Sequence[Metric], target: str, load: str, context: Context) -> Kept:
    cells: dict[tuple[str, str], list[int]] = {}
    for i, m in enumerate(run.cells):
        cells.setdefault((m.target, m.load), []).append(i)
    mine = {place: of for place, of in cells.items() if _is_asked(place, target, load)}
    points = {place: _points(run, of, asked, context) for place, of in mine.items()}
    work = {place: facts(run, run.cells[of[0]]) for place, of in mine.items()}
    return Kept(wall_ns(run), list(cells), points, work)


def _history(kept: Sequence[Kept], metric: Metric, which: int, place: tuple[str, str]) -> History:
    points: list[Point] = []
    before: dict[str, str] = {}
    for one in kept:
        if place not in one.points:
            continue
        work, point = one.work[place], one.points[place][which]
        other = differing(before, work) if before else []
        before = {name: said or before.get(name, "") for name, said in work.items()}
        doubts = [f"{OTHER_WORK} as before: {', '.join(other)}"] * bool(other) + point.doubts
        points.append(point._replace(doubts=doubts))
    values = np.array([p.value for p in points if p.value is not None], float)
    return History(*place, metric, points, changes.e_divisive(values))


def _points(run: Run, cells: Sequence[int], asked: Sequence[Metric], context: Context) -> list[Point]:
    """A metric each: what the cells of a run at one place show together."""
    names = [metric.name for metric in asked]
    of_cells = [metrics.compute_all(names, run.cells[i].cell, run.cells[i].window, context) for i in cells]
    points = []
    for metric, values in zip(asked, zip(*of_cells, strict=True), strict=True):
        kinds = dict.fromkeys(d.kind for i in cells for d in run.doubts[i] if counts(d.kind, metric))
        known = [v.value for v in values if v.value is not None]
        whole = len(known) == len(values)
        reason = "" if whole else next(v.reason for v in values if v.value is None)
        mean = float(np.mean(known)) if whole else None
        points.append(Point(run.path.name, wall_ns(run), mean, len(cells), reason, list(kinds)))
    return points


def wall_ns(run: Run) -> int:
    """When it was begun, by its wall anchor. Raises BenchError where it has none, or one that is no time of ours."""
    anchors = [run.facts.get("anchor"), *(m.cell.header.get("anchor") for m in run.cells)]
    for anchor in anchors:
        if isinstance(anchor, list) and anchor and isinstance(anchor[0], int):
            if not 0 <= anchor[0] <= LAST_NS:
                raise BenchError(f"{run.path}: made {anchor[0]} ns after 1970 (anchor), expected 0 to the year 9999")
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
    out = [sentence(history, change) for change in history.found]
    if history.note:
        return [f"no verdict: {history.note}"]
    return out or [f"no change point in {_runs(len(history.known))} (E-divisive, alpha {changes.ALPHA})"]


def sentence(history: History, change: ChangePoint) -> str:
    """A change point in words."""
    unit = history.metric.unit
    point, rose = history.known[change.at], change.after > change.before
    better = "better" if rose == (history.metric.better == "higher") else "worse"
    points = unit == "share"
    moved = change.after - change.before if points else change.share
    size = "" if moved is None else f", {changed(moved, points=points)}"
    other = other_work(history, change)
    return (
        f"from {point.run} ({when(point.at_ns)}) on {better}: {number(change.before, unit)} to "
        f"{number(change.after, unit)}{size}, p = {change.p:.2g}{other and f'; {other}'}"
    )


def other_work(history: History, change: ChangePoint) -> str:
    """That the work changed where the figure did, so that the change may be of the work alone; "" where it did not."""
    return next((doubt for doubt in history.known[change.at].doubts if doubt.startswith(OTHER_WORK)), "")


def title(history: History) -> str:
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
    out = [f"{h.target} at {h.load}: {sentence(h, c)}" for h in found for c in h.found]
    few = [h for h in found if h.note]
    if few:
        most = max(len(h.known) for h in few)
        need = 2 * changes.MIN_SIZE
        out.append(
            f"no verdict on {len(few)} of {len(found)}: at most {_runs(most)}, {need} are needed for a change point"
        )
    return out or [f"no change point (E-divisive, alpha {changes.ALPHA})"]


def by_metric(found: Sequence[History]) -> list[list[History]]:
    of: dict[str, list[History]] = {}
    for history in found:
        of.setdefault(history.metric.name, []).append(history)
    return list(of.values())


def text(found: Sequence[History], details: bool = False) -> str:
    """For a terminal, metric by metric: one history run by run; of several a line each, and with `details` all."""
    return "\n".join(_text(of, details) for of in by_metric(found))


def _text(found: Sequence[History], details: bool) -> str:
    parts = []
    if len(found) > 1:
        lines = [grid.terminal(*overview(found), left=(0, 1, 5, 6)), "\n", *(f"  {line}\n" for line in _overall(found))]
        parts.append("".join([*lines, "" if details else "  Run by run: --details, or --target and --load\n"]))
    for history in found if details or len(found) == 1 else ():
        lines = [f"{title(history)}\n  {_drawn(history)}\n\n", grid.terminal(*rows(history), left=(0, 1, 2, 4)), "\n"]
        parts.append("".join([*lines, *(f"  {line}\n" for line in sentences(history))]))
    return "\n".join(parts)


def markdown(found: Sequence[History], details: bool = False) -> str:
    return "\n".join(_markdown(of, details) for of in by_metric(found))


def _markdown(found: Sequence[History], details: bool) -> str:
    parts = []
    if len(found) > 1:
        lines = [grid.markdown(*overview(found), left=(0, 1, 5, 6)), "\n"]
        parts.append("".join([*lines, *(f"- {grid.escaped(line)}\n" for line in _overall(found))]))
    for history in found if details or len(found) == 1 else ():
        lines = [f"### {grid.escaped(title(history))}\n\n{_drawn(history)}\n\n"]
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


# ---- as Parquet

_COLUMNS: tuple[tuple[str, pa.DataType, str], ...] = (
    ("run", pa.string(), "name of the run's folder"),
    ("made", pa.timestamp("us", "UTC"), "when it was begun, by its wall clock"),
    ("target", pa.string(), "name of the target"),
    ("load", pa.string(), "load of the cells"),
    ("metric", pa.string(), "name of the metric"),
    ("unit", pa.string(), "of value and level"),
    ("better", pa.string(), "lower or higher"),
    ("value", pa.float64(), "mean of the run's cells at the load; null where one has none"),
    ("cells", pa.int32(), "cells that it is the mean of"),
    ("reason", pa.string(), "why there is no value, else empty"),
    ("doubts", pa.list_(pa.string()), "kinds of doubt about it"),
    ("changed", pa.bool_(), "from this run on it is another level (E-divisive)"),
    ("p", pa.float64(), "of that change, else null"),
    ("level", pa.float64(), "mean of the runs between the change points around it; null without a value"),
)
TABLE = pa.schema([pa.field(name, kind, metadata={"definition": said}) for name, kind, said in _COLUMNS])
TABLE_VERSION = 1  # of the columns; counts up when a name changes its meaning


def table(found: Sequence[History]) -> pa.Table:
    """A row a metric, target, load and run, in order of time: for pandas, duckdb and others."""
    rows_: list[tuple[Any, ...]] = []
    for h in found:
        starts = {id(h.known[c.at]): c for c in h.found}
        level = {id(p): mean for p, mean in zip(h.known, h.levels, strict=True)}
        for p in h.points:
            change = starts.get(id(p))
            rows_.append((p.run, p.at_ns // 1000, h.target, h.load, h.metric.name, h.metric.unit, h.metric.better))
            rows_[-1] += (p.value, p.cells, p.reason, p.doubts)
            rows_[-1] += (change is not None, change and change.p, level.get(id(p)))
    columns = zip(*rows_, strict=True) if rows_ else [()] * len(TABLE)
    arrays = [pa.array(list(of), field.type) for of, field in zip(columns, TABLE, strict=True)]
    told = json.dumps({"version": TABLE_VERSION, "of": "history"})
    return pa.Table.from_arrays(arrays, schema=TABLE.with_metadata({"llm_bench": told}))


def write_parquet(found: Sequence[History], path: Path) -> int:
    """The table as a file, which appears under its name when it is whole. Returns the rows.

    Raises BenchError where it cannot be written.
    """
    from pyarrow import parquet

    made = table(found)
    try:
        with files.whole(path) as part:
            parquet.write_table(made, part)
    except OSError as e:
        raise BenchError(f"{path}: cannot be written: {e.strerror or e}") from None
    return int(made.num_rows)
