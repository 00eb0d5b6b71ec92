"""Histories as one HTML page that needs nothing else: a panel a metric, its change points marked, every run below."""

import base64
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from llm_bench import history, svg
from llm_bench.changes import ALPHA, ChangePoint
from llm_bench.definitions import definitions
from llm_bench.history import History, Point
from llm_bench.metrics import Metric
from llm_bench.printable import clean, lines
from llm_bench.rules import changed
from llm_bench.words import number

HEIGHT = 210
MOST_MARKERS = 200  # points that say what they are when pointed at; of more, a line and the doubtful ones
DATES = 4  # below a panel, at most: each is as wide as 60 of its 400 units
DATA = ("trend.html.j2", "report.css", "trend.css", "report.js")
BOLD = 1.15  # as wide as plain letters
Anchor = Literal["start", "middle", "end"]


class Panel(NamedTuple):
    title: str
    svg: str
    note: str


class Td(NamedTuple):
    text: str
    sort: float | None
    why: str
    mark: str  # better or worse, where it is the first run of another level


class Row(NamedTuple):
    run: str
    at_ns: int
    made: str
    values: Sequence[Td]
    doubts: str


class Place(NamedTuple):
    target: str
    load: str
    panels: Sequence[Panel]
    rows: Sequence[Row]


class Change(NamedTuple):
    mark: str
    metric: str
    where: str
    text: str


def page(found: Sequence[History]) -> str:
    """The histories as one self-contained HTML document, at least one of them.

    Every text that a run brings is escaped by the template, or by `svg`. A policy in the page forbids every script but
    its own, and every request to anywhere.
    """
    from jinja2 import Environment, StrictUndefined

    template, *css, script = ((resources.files("llm_bench") / "data" / name).read_text("utf-8") for name in DATA)
    style = "".join(css)
    metrics = [of[0].metric for of in history.by_metric(found)]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    runs = {(p.run, p.at_ns) for h in found for p in h.points}
    text = environment.from_string(template).render(
        runs=f"{len(runs)} run" + "s" * (len(runs) != 1),
        lead=_lead(found),
        summary=_summary(found),
        changes=[_change(h, c) for h in found for c in h.found],
        notes=_notes(found),
        places=_places(found),
        heads=[("run", ""), ("made (UTC)", ""), *((m.name, _unit(m)) for m in metrics), ("doubts", "")],
        definitions=list(definitions([m.name for m in metrics])),
        css=style,
        script=script,
        hashed={"style": _policy(style), "script": _policy(script)},
    )
    return lines(text)


def _policy(text: str) -> str:
    """How a content security policy names an inline style or script: by the hash of what stands between its tags."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _lead(found: Sequence[History]) -> list[str]:
    at = [p.at_ns for h in found for p in h.points]
    places = {(h.target, h.load) for h in found}
    return [
        f"{history.when(min(at))} to {history.when(max(at))} UTC",
        ", ".join(of[0].metric.name for of in history.by_metric(found)),
        "1 target at 1 load" if len(places) == 1 else f"{len(places)} targets and loads",
    ]


# ---- what changed


def _change(h: History, c: ChangePoint) -> Change:
    return Change(_mark(h, c), h.metric.name, f"{h.target} at {h.load}", history.sentence(h, c))


def _mark(h: History, c: ChangePoint) -> str:
    return "better" if (c.after > c.before) == (h.metric.better == "higher") else "worse"


def _summary(found: Sequence[History]) -> str:
    marks = [_mark(h, c) for h in found for c in h.found]
    worse, better = marks.count("worse"), marks.count("better")
    looked = sum(not h.note for h in found)
    if not looked:
        return "No verdict: too few runs for a change point."
    of = f"in {looked} histor{'y that is' if looked == 1 else 'ies that are'} long enough"
    if not marks:
        return f"No change {of}."
    other = sum(bool(history.other_work(h, c)) for h in found for c in h.found)
    said = f" At {other} of these the work changed too, which may be all that it is." if other else ""
    return f"{worse} changed for the worse, {better} for the better, {of}.{said}"


def _notes(found: Sequence[History]) -> list[str]:
    several = f"; of so many histories {ALPHA * len(found):.1g} may show one by chance" if len(found) > 1 else ""
    notes = [f"Change points by E-divisive, alpha {ALPHA}, of each history by itself{several}."]
    notes += [f"No verdict on {h.metric.name} of {h.target} at {h.load}: {h.note}." for h in found if h.note][:10]
    return [
        *notes,
        "Axes of values need not begin at 0. A hollow point is a run that is in doubt; it counts all the same.",
    ]


# ---- panels


def _places(found: Sequence[History]) -> list[Place]:
    of: dict[tuple[str, str], list[History]] = {}
    for h in found:
        of.setdefault((h.target, h.load), []).append(h)
    return [Place(*place, [panel(h) for h in mine], _rows(mine)) for place, mine in of.items()]


def panel(h: History) -> Panel:
    """A metric over the runs, in their order: a point a run, the levels between change points, each of those named."""
    said = "; ".join(history.sentences(h))
    name = f"{h.metric.name}{f', {unit}' if (unit := _unit(h.metric)) else ''}"
    if not h.known:
        empty = svg.label(svg.WIDTH / 2, HEIGHT / 2, "no run has the figure", "name", "middle")
        return Panel(name, svg.document([empty], HEIGHT, name, said), said)
    values = np.array([np.nan if p.value is None else p.value for p in h.points], float)
    xs = np.linspace(svg.LEFT + 8, svg.WIDTH - svg.RIGHT - 8, len(values)) if len(values) > 1 else np.array([220.0])
    y = svg.y_scale(values, HEIGHT, zero=False)
    ys = y.at(values)
    parts = [*_frame(y, h.metric), _dates(h.points, xs), svg.line(xs, ys, "s0 run-line")]
    parts += [*_points(h, xs, ys), *_levels(h, xs, y)]
    return Panel(name, svg.document(parts, HEIGHT, f"{name} of {h.target} at {h.load}", said), said)


def _frame(y: svg.Scale, metric: Metric) -> list[str]:
    parts = []
    for tick in y.ticks():
        at = float(y.at(tick))
        said = f"{100 * tick:.6g}%" if metric.unit == "share" else svg.tick_text(tick)
        parts.append(svg.rule(svg.LEFT, at, svg.WIDTH - svg.RIGHT, "grid"))
        parts.append(svg.label(svg.LEFT - 6, at + 4, said, "tick", "end"))
    return [*parts, svg.rule(svg.LEFT, y.start, svg.WIDTH - svg.RIGHT, "axis")]


def _dates(points: Sequence[Point], xs: np.ndarray) -> str:
    """When some of the runs were made, the first and the last among them; hours where all are of one day."""
    days = {p.at_ns // (86_400 * 10**9) for p in points}
    shape = "%Y-%m-%d" if len(days) > 1 else "%H:%M"
    at = svg.evenly(len(points), DATES)
    parts = []
    for i in at.tolist():
        said = datetime.fromtimestamp(points[i].at_ns / 1e9, UTC).strftime(shape)
        first, last = i == 0 < len(points) - 1, i == len(points) - 1 > 0
        anchor: Anchor = "start" if first else "end" if last else "middle"
        x = float(xs[i]) + 8 * (last - first)
        parts.append(svg.label(x, HEIGHT - svg.BOTTOM + 15, said, "tick", anchor))
    name = "runs in order of time" if len(days) > 1 else f"runs of {history.when(points[0].at_ns)[:10]}"
    return "".join([*parts, svg.label(svg.WIDTH / 2 + 16, HEIGHT - 7, name, "name", "middle")])


def _points(h: History, xs: np.ndarray, ys: np.ndarray) -> list[str]:
    many, parts = len(h.points) > MOST_MARKERS, list[str]()
    if many:
        parts.append(svg.dots(np.where([not p.doubts for p in h.points], xs, np.nan), ys, "s0"))
    for p, x, y in zip(h.points, xs.tolist(), ys.tolist(), strict=True):
        if p.value is not None and (p.doubts or not many):
            said = f"{p.run}, {history.when(p.at_ns)}: {number(p.value, h.metric.unit)} {_unit(h.metric)}".rstrip()
            doubted = f"; in doubt: {', '.join(p.doubts)}" if p.doubts else ""
            parts.append(svg.marker(x, y, f"s0 of-run{' hollow' if p.doubts else ''}", clean(said + doubted)))
    return parts


def _levels(h: History, xs: np.ndarray, y: svg.Scale) -> list[str]:
    """The mean between change points as a line, each change point as a rule with its size."""
    if not h.found:
        return []
    places = np.array([x for p, x in zip(h.points, xs.tolist(), strict=True) if p.value is not None])
    levels, edges = h.levels, [0, *(c.at for c in h.found), len(places)]
    parts = []
    for a, b in pairwise(edges):
        ends = np.array([places[a], places[b - 1]])
        parts.append(svg.line(ends, np.full(2, float(y.at(levels[a]))), "level"))
    taken = -np.inf  # up to where the upper line of labels is written on
    for c in h.found:
        x, mark = float(places[c.at - 1] + places[c.at]) / 2, _mark(h, c)
        said = f"{_size(h, c)} {mark}".lstrip()
        parts.append(svg.line(np.array([x, x]), np.array([y.start, y.end]), f"change {mark}"))
        left = min(x + 4, svg.WIDTH - svg.RIGHT - BOLD * svg.text_width(said))
        above = left > taken
        parts.append(svg.label(left, y.end - 4 if above else y.end + 9, said, mark))
        taken = left + BOLD * svg.text_width(said) + 4 if above else taken
    return parts


def _size(h: History, c: ChangePoint) -> str:
    points = h.metric.unit == "share"
    moved = c.after - c.before if points else c.share
    return "" if moved is None else changed(moved, points=points)


# ---- run by run


def _rows(mine: Sequence[History]) -> list[Row]:
    starts = [{id(h.known[c.at]): _mark(h, c) for c in h.found} for h in mine]
    rows = []
    for points in zip(*(h.points for h in mine), strict=True):
        values = [
            Td(number(p.value, h.metric.unit), p.value, p.reason, of.get(id(p), ""))
            for p, h, of in zip(points, mine, starts, strict=True)
        ]
        doubts = dict.fromkeys(doubt for p in points for doubt in p.doubts)
        rows.append(Row(points[0].run, points[0].at_ns, history.when(points[0].at_ns), values, ", ".join(doubts)))
    return rows


def _unit(metric: Metric) -> str:
    return "" if metric.unit in ("1", "share") else metric.unit
