"""The pictures of a report: what of a run is drawn, and what each picture says in words."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from llm_bench import faults, metrics, svg
from llm_bench.columns import Cell
from llm_bench.metrics import Value
from llm_bench.objectives import Slo
from llm_bench.results import Measured, Sheet
from llm_bench.series import NOTHING, SERIES, due_in, elapsed_ms, event, outcome_in, stamp
from llm_bench.server_metrics import Point, figures
from llm_bench.timeline import Timeline
from llm_bench.words import number

HEIGHT, LOW_HEIGHT = 250, 140
SCATTER_MOST = 1500  # points; more of them hide each other
WATERFALL_EACH = 14  # requests of each kind
ROW, WATERFALL_TOP = 14, 6  # height of one of them, and of what is above them
LATENCIES = ("ttft", "tpot", "e2e", "ttft_sent", "e2e_sent", "ttfo")  # those drawn against throughput, where asked for
THROUGHPUT = ("tokens_per_second", "requests_per_second")  # against the first of them that has a value everywhere
# The parts of a request's life, in order.
LIFE = (
    ("waiting for a slot or cap", "part-wait"),
    ("being sent", "part-send"),
    ("until the first token", "part-first"),
    ("until the last token", "part-rest"),
)


class Figure(NamedTuple):
    title: str
    svg: str
    note: str = ""
    keys: Sequence[tuple[str, str]] = ()  # (classes of the mark, what it stands for)


# ---- of a run


def curves(by_target: dict[str, list[Sheet]], slo: Slo) -> list[Figure]:
    """Latency against throughput, a picture for each latency; none where no target has two loads.

    What is drawn are the figures of the tables. A point without an interval is hollow. A class of a mix by itself is
    other work than the mix, and no load of it.
    """
    by_target = {target: [s for s in mine if not _of_one_class(s.measured)] for target, mine in by_target.items()}
    if all(len(mine) < 2 for mine in by_target.values()):
        return []
    first = next(mine[0] for mine in by_target.values() if mine)
    parsed = [metrics.parse(v.name) for v in first.values]
    asked = [m for m in parsed if m.of in LATENCIES and m.reducer in metrics.QUANTILES]
    limited = {limit.metric.name for limit in slo.limits if not limit.of_class}
    shown = [m for m in asked if m.reducer == "p95" or m.name in limited] or asked[:1]
    every = [sheet for mine in by_target.values() for sheet in mine]
    for name in THROUGHPUT:
        speeds = {sheet.measured.name: value_of(sheet, name) for sheet in every}
        if all(v.value is not None for v in speeds.values()):
            return [f for m in shown if (f := _curve(by_target, m.name, speeds, slo)) is not None]
    return []


def _of_one_class(m: Measured) -> bool:
    """Of a mix, only this class was sent (--alone-too)."""
    return bool((m.cell.header.get("load") or {}).get("class_alone"))


def value_of(sheet: Sheet, name: str) -> Value:
    """A figure of a cell: that of its tables where it is there."""
    found = [v for v in sheet.values if v.name == name]
    return found[0] if found else metrics.compute(name, sheet.measured.cell, sheet.measured.window)


class _Point(NamedTuple):
    sheet: Sheet
    x: Value
    y: Value


def _curve(by_target: dict[str, list[Sheet]], name: str, speeds: dict[str, Value], slo: Slo) -> Figure | None:
    """`speeds`: throughput of each cell, by the cell's name."""
    every = {
        target: [_Point(s, speeds[s.measured.name], v) for s in mine if (v := value_of(s, name)).value is not None]
        for target, mine in by_target.items()
    }
    points = {target: of for target, of in every.items() if of}
    if all(len(of) < 2 for of in points.values()):
        return None
    limits = [limit for limit in slo.limits if limit.metric.name == name and not limit.of_class]
    shown = [p for of in points.values() for p in of]
    heights = [p.y.value for p in shown] + [edge for p in shown for edge in p.y.interval or ()]
    measured = np.array(heights, float)
    # A limit far above everything measured would press the curve flat: then it is said, and not drawn.
    drawn = [limit for limit in limits if limit.value <= 3 * measured.max()]
    x = svg.x_scale(np.array([p.x.value for p in shown], float))
    y = svg.y_scale(np.append(measured, [limit.value for limit in drawn]), HEIGHT)
    unit = shown[0].x.unit
    parts = [svg.axes(x, y, {"tokens/s": "output tokens/s", "1/s": "ok requests/s"}[unit], f"{name} (ms)")]
    placed: list[tuple[float, float, float]] = []
    for limit in drawn:
        at, width = float(y.at(limit.value)), svg.text_width(limit.text)
        parts += [svg.rule(x.start, at, x.end, "limit"), svg.label(x.start + 4, at - 4, limit.text, "limit-name")]
        placed.append((x.start + 4, at - 4, width))  # left, where a curve that begins above 0 is not
    for index, of in enumerate(points.values()):
        parts += _of_one_target(of, x, y, svg.series_class(index), placed)
    keys = [(f"marker {svg.series_class(i)}", target) for i, target in enumerate(points)]
    notes = ["Bars: 95% interval; hollow: none can be given."] if any(p.y.interval for p in shown) else []
    notes = notes or ["No 95% interval can be given for any point: see n and ESS in the table."]
    notes += [f"{limit.text} lies above the picture." for limit in limits if limit not in drawn]
    limited = [f"{p.sheet.measured.target} at {p.sheet.measured.load}" for p in shown if p.sheet.client_limited]
    if limited:
        which = "every point" if len(limited) == len(shown) else ", ".join(dict.fromkeys(limited))
        notes.append(f"Limited by the client, so that the target itself may be faster: {which}.")
    described = "; ".join(f"{target}: {', '.join(map(_said, of))}" for target, of in points.items())
    title = f"{name} against throughput"
    return Figure(title, svg.document(parts, HEIGHT, title, described), " ".join(notes), keys if len(keys) > 1 else ())


def _of_one_target(
    of: Sequence[_Point], x: svg.Scale, y: svg.Scale, css: str, placed: list[tuple[float, float, float]]
) -> list[str]:
    """A target's curve: its line, each point with its interval, and names of loads clear of those `placed`."""
    parts: list[str] = []
    xs, ys = x.at(np.array([p.x.value for p in of], float)), y.at(np.array([p.y.value for p in of], float))
    loads = [p.sheet.measured.load for p in of]
    if len(set(loads)) == len(loads):  # of repeats there is no order to connect them in
        parts.append(svg.line(xs, ys, css))
    named: set[str] = set()
    for p, at_x, at_y in zip(of, xs.tolist(), ys.tolist(), strict=True):
        if p.y.interval:
            low, high = (float(y.at(edge)) for edge in p.y.interval)
            parts.append(svg.interval(at_x, low, high, css))
        parts.append(svg.marker(at_x, at_y, css if p.y.interval else f"{css} hollow", _said(p)))
        if p.sheet.measured.load not in named:
            parts += _beside(p.sheet.measured.load, at_x, at_y, placed)
        named.add(p.sheet.measured.load)
    return parts


def _said(p: _Point) -> str:
    between = f" ({number(p.y.interval.low, '')} to {number(p.y.interval.high, '')})" if p.y.interval else ""
    return (
        f"{p.sheet.measured.load}: {number(p.x.value, p.x.unit)} {p.x.unit}, "
        f"{number(p.y.value, p.y.unit)}{between} {p.y.unit}"
    )


def _beside(said: str, x: float, y: float, placed: list[tuple[float, float, float]]) -> list[str]:
    """A label at the first place about a point where no other label is; none where there is no such place."""
    width = svg.text_width(said)
    for dx, dy in ((7, -7), (7, 14), (-7 - width, -7), (-7 - width, 14)):
        left, base = x + dx, y + dy
        free = all(abs(base - line) > 11 or left > at + w or at > left + width for at, line, w in placed)
        if free and left > svg.LEFT and left + width < svg.WIDTH and base > svg.TOP:
            placed.append((left, base, width))
            return [svg.label(left, base, said, "point")]
    return []


def ecdfs(mine: Sequence[Sheet], slo: Slo) -> list[Figure]:
    """Of one target: the distributions of TTFT and TPOT (not streamed: of e2e), a line a load."""
    found = [f for name in ("ttft", "tpot") if (f := _ecdf(mine, name, slo)) is not None]
    return found or [f for f in [_ecdf(mine, "e2e", slo)] if f is not None]


def _ecdf(mine: Sequence[Sheet], name: str, slo: Slo) -> Figure | None:
    repeats: dict[str, list[np.ndarray]] = {}
    for sheet in mine:
        values = ok_values(sheet.measured, name)
        if len(values):
            repeats.setdefault(sheet.measured.load, []).append(values)
    if not repeats:
        return None
    of_load = [(i, load, values) for i, (load, each) in enumerate(repeats.items()) for values in each]
    every = np.concatenate([values for _, _, values in of_load])
    bounds = [limit for limit in slo.limits if limit.bound and limit.metric.of == name and not limit.of_class]
    drawn = [limit for limit in bounds if limit.value <= 3 * float(every.max())]
    span = np.append(every, [limit.value for limit in drawn])
    log = svg.wide(span)
    x, y = svg.x_scale(span, log=log), svg.y_scale(np.array([0.0, 1.0]), HEIGHT)
    parts = [svg.axes(x, y, f"{name} (ms{', log scale' if log else ''})", "share of requests", y_percent=True)]
    for limit in drawn:
        at, share = float(x.at(limit.value)), limit.share or 0.0
        parts.append(svg.line(np.array([at, at]), np.array([y.start, y.end]), "limit"))
        parts.append(svg.marker(at, float(y.at(share)), "limit-point", f"{limit.text}: {share:.4g} asked"))
    for index, _, values in of_load:
        at_ms, share_ = svg.ecdf(values)
        parts.append(svg.line(x.at(at_ms), y.at(share_), svg.series_class(index)))
    keys = [
        (f"line {svg.series_class(i)}", f"{load} (n {', '.join(f'{len(v):,}' for v in each)})")
        for i, (load, each) in enumerate(repeats.items())
    ]
    notes = [f"{SERIES[name].meaning}; ok requests due in the window."]
    notes += [f"{limit.text} lies to the right of the picture." for limit in bounds if limit not in drawn]
    if any(len(v) > svg.CURVE_POINTS for _, _, v in of_load):
        notes.append(f"Drawn through {svg.CURVE_POINTS} measured values at most, the largest ones among them.")
    described = "; ".join(
        f"{load}: p50 {np.quantile(v, 0.5):.4g} ms, p95 {np.quantile(v, 0.95):.4g} ms, max {v.max():.4g} ms, n {len(v)}"
        for _, load, v in of_load
    )
    title = f"Distribution of {name}"
    return Figure(title, svg.document(parts, HEIGHT, title, described), " ".join(notes), keys)


def ok_values(m: Measured, name: str) -> np.ndarray:
    """The values of a per-request series of ok requests due in the window, those it applies to."""
    values = SERIES[name].of(m.cell, NOTHING).values[_ok(m)]
    return np.asarray(values[~np.isnan(values)])


def _ok(m: Measured) -> np.ndarray:
    return np.asarray(due_in(m.cell, m.window) & outcome_in(m.cell, "ok"))


# ---- of a cell


def over_time(m: Measured, line: Timeline) -> list[Figure]:
    """In flight, arrivals, tokens and failures over the whole cell, its window shaded."""
    by = line.by
    at_s = (by.edges_ns - int(m.cell["due_ns"][0])) / 1e9
    each = f"Bins of {number(by.seconds, 's')} s; shaded: the window."
    level = line.in_flight
    found = [
        _over_time(
            m,
            at_s,
            level.mean,
            "Requests in flight",
            "requests",
            f"Line: time average; band: least to most. {each}",
            (level.low, level.high),
        ),
        _over_time(m, at_s, line.arrivals, "Arrivals", "requests due/s", each),
    ]
    if line.tokens is not None:
        found.append(_over_time(m, at_s, line.tokens, "Output tokens", "tokens/s", f"Of ok and cut requests. {each}"))
    found += _of_server(m)
    if line.failed.any():
        total = f"{int(line.failed.sum()):,} failed in all, each where it ended. {each}"
        found.append(
            _over_time(m, at_s, line.failed.astype(float), "Failed requests", "requests a bin", total, css="bad")
        )
    return found


SERVER_SHOWN = {"running": "Running at the server", "waiting": "Waiting at the server", "kv_usage": "KV memory in use"}
MOST_SCRAPES = 300  # of a cell that are drawn: a picture is no wider


def _of_server(m: Measured) -> list[Figure]:
    """Gauges that the server exported: means between scrapes, summed over replicas (KV memory: their mean)."""
    if m.scraped is None or not m.scraped.replicas:
        return []
    found = []
    for metric, title in SERVER_SHOWN.items():
        steps = [_steps(source.points, metric) for source in m.scraped.replicas]
        if not all(len(at_ns) > 1 for at_ns, _ in steps):
            continue
        edges_ns = steps[0][0]
        levels = [
            values[np.searchsorted(at_ns, edges_ns[:-1], "right").clip(1, len(values)) - 1] for at_ns, values in steps
        ]
        values = np.mean(levels, axis=0) if metric == "kv_usage" else np.sum(levels, axis=0)
        at_s = (edges_ns - int(m.cell["due_ns"][0])) / 1e9
        servers = f"{len(steps)} server{'s' * (len(steps) > 1)}"
        note = f"As scraped every {m.scraped.every_s:g} s, {servers}; shaded: the window."
        found.append(_over_time(m, at_s, values, title, "share" if metric == "kv_usage" else "requests", note))
    return found


def _steps(points: Sequence[Point], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """(edges in ns (k + 1,), level between them (k,)) of a gauge; empty where some scrape lacks it."""
    kept = list(points[:: -(-len(points) // MOST_SCRAPES)]) if points else []
    values = []
    for before, after in pairwise(kept):
        between = figures([before, after], before.at_ns, after.at_ns + 1)
        value = between.value(metric) if between else None
        if value is None:
            return np.zeros(0, np.int64), np.zeros(0)
        values.append(value)
    return np.array([p.at_ns for p in kept], np.int64), np.array(values)


def _over_time(
    m: Measured,
    at_s: np.ndarray,
    values: np.ndarray,
    title: str,
    unit: str,
    note: str,
    between: tuple[np.ndarray, np.ndarray] | None = None,
    css: str = "s0",
) -> Figure:
    x, y = svg.x_scale(at_s, zero=False), svg.y_scale(np.concatenate([values, *(between or ())]), LOW_HEIGHT)
    x = x._replace(low=float(at_s[0]), high=float(at_s[-1]))  # time is shown as far as there is any
    zero = int(m.cell["due_ns"][0])
    window = [float(x.at((edge - zero) / 1e9)) for edge in (m.window.start_ns, m.window.end_ns)]
    parts = [svg.bar(window[0], y.end, window[1] - window[0], y.start - y.end, "window")]
    parts.append(svg.axes(x, y, "seconds since the first due time", unit))
    parts += _faults(m, x, y)
    if between is not None:
        parts.append(svg.step_band(x.at(at_s), y.at(between[0]), y.at(between[1]), css))
    parts.append(svg.steps(x.at(at_s), y.at(values), css))
    inside = (at_s[:-1] >= (m.window.start_ns - zero) / 1e9 - 1e-9) & (
        at_s[1:] <= (m.window.end_ns - zero) / 1e9 + 1e-6
    )
    mine = values[inside] if inside.any() else values
    described = (
        f"{unit} in the window by bins: least {mine.min():.4g}, mean {mine.mean():.4g}, most {mine.max():.4g}; "
        f"the cell lasts {at_s[-1] - at_s[0]:.4g} s"
    )
    return Figure(title, svg.document(parts, LOW_HEIGHT, f"{title} over time", described), note)


FAULT_LABEL = 26  # characters; the whole of it is said where it is pointed at


def _faults(m: Measured, x: svg.Scale, y: svg.Scale) -> list[str]:
    """A mark for each fault from its beginning to its end, with a label where there is room for it."""
    log, zero, parts, free = faults.of_end(m.end), int(m.cell["due_ns"][0]), list[str](), -math.inf
    for number_, done in enumerate(log.done if log else (), 1):
        if not done.begun_ns:
            continue
        from_, to = (float(x.at((ns - zero) / 1e9)) for ns in (done.begun_ns, done.ended_ns))
        from_, to = (min(max(at, x.start), x.end) for at in (from_, to))
        parts.append(svg.bar(from_, y.end, max(to - from_, 1.5), y.start - y.end, "fault", f"{number_} {done.text}"))
        said = f"{number_} {done.what}"
        said = said if len(said) <= FAULT_LABEL else f"{said[: FAULT_LABEL - 1]}…"
        left = min(from_ + 3, x.end - svg.text_width(said))
        if left > free:
            parts.append(svg.label(left, y.end + 10, said, "limit-name"))
            free = left + svg.text_width(said)
    return parts


def scatter(m: Measured) -> Figure | None:
    """TTFT (not streamed: e2e) against prompt length, ok requests of the window; None where lengths are unknown."""
    cell = m.cell
    length = np.where(cell["tokens_in"] >= 0, cell["tokens_in"], cell["planned_in"])
    name = "ttft" if (cell.counts[_ok(m)] > 0).any() else "e2e"
    values = SERIES[name].of(cell, NOTHING).values
    rows = np.flatnonzero(_ok(m) & (length >= 0) & ~np.isnan(values))
    if len(rows) < 2:
        return None
    shown = rows[svg.evenly(len(rows), SCATTER_MOST)]
    tokens, ms = length[shown].astype(float), values[shown]
    x_log, y_log = svg.wide(tokens), svg.wide(ms)
    x, y = svg.x_scale(tokens, log=x_log, zero=not x_log), svg.y_scale(ms, HEIGHT, log=y_log)
    y_name = f"{name} (ms{', log scale' if y_log else ''})"
    parts = [svg.axes(x, y, f"prompt tokens{' (log scale)' if x_log else ''}", y_name)]
    parts.append(svg.dots(x.at(tokens), y.at(ms), "s0"))
    many = f"all {len(rows):,}" if len(shown) == len(rows) else f"{len(shown):,} of {len(rows):,}, evenly in due order"
    counted = "" if (cell["tokens_in"][rows] >= 0).all() else " Lengths that the server did not count are as planned."
    title = f"{name} against prompt length"
    described = (
        f"prompts of {tokens.min():.0f} to {tokens.max():.0f} tokens, {name} of {ms.min():.4g} to {ms.max():.4g} ms"
    )
    return Figure(
        title, svg.document(parts, HEIGHT, title, described), f"ok requests due in the window: {many}.{counted}"
    )


def waterfalls(m: Measured) -> list[Figure]:
    """The lives of single requests: the slowest of the window, and some that are spread evenly over it."""
    rows = np.flatnonzero(_ok(m))
    if not len(rows):
        return []
    e2e = SERIES["e2e"].of(m.cell, NOTHING).values[rows]
    slowest = rows[np.argsort(-np.nan_to_num(e2e), kind="stable")[:WATERFALL_EACH]]
    even = rows[svg.evenly(len(rows), WATERFALL_EACH)]
    kinds = [("Slowest requests", slowest, f"The {len(slowest)} with the largest e2e, the slowest first.")]
    if len(rows) > WATERFALL_EACH:
        kinds.append(("Sampled requests", even, f"{len(even)} of {len(rows):,}, evenly in due order."))
    return [_waterfall(m.cell, chosen, title, note) for title, chosen, note in kinds]


def _waterfall(cell: Cell, rows: np.ndarray, title: str, note: str) -> Figure:
    due = stamp(cell, "due_ns")
    first = np.where(cell.counts > 0, event(cell, last=False), np.nan)
    last = np.where(cell.counts > 0, event(cell, last=True), stamp(cell, "end_ns"))
    stamps = np.stack([elapsed_ms(t, due) for t in (due, stamp(cell, "ready_ns"), stamp(cell, "sent_ns"), first, last)])
    lives = stamps[:, rows].T
    height = WATERFALL_TOP + ROW * len(rows) + svg.BOTTOM
    names = [f"#{cell['index'][row]}" for row in rows]
    left = max(svg.LEFT, 10 + max(map(svg.text_width, names)))
    x = svg.x_scale(lives)._replace(start=left)
    parts = [svg.x_axis(x, height - svg.BOTTOM, WATERFALL_TOP, "ms since its due time")]
    for i, (row, life, name) in enumerate(zip(rows, lives, names, strict=True)):
        top = WATERFALL_TOP + ROW * i
        parts.append(svg.label(left - 6, top + 10, name, "tick", "end"))
        ends = np.maximum.accumulate(np.where(np.isnan(life), -math.inf, life))  # a stamp that never came has no part
        for (_, css), from_, to in zip(LIFE, ends[:-1], ends[1:], strict=True):
            at = x.at(np.array([from_, to]))
            if to > from_:
                parts.append(svg.bar(float(at[0]), top + 2, float(at[1] - at[0]), ROW - 4, css))
        said = ", ".join(
            f"{what} {ms:.4g}"
            for what, ms in zip(("ready", "sent", "first", "last"), life[1:].tolist(), strict=True)
            if ms == ms
        )
        sizes = f"{cell['tokens_in'][row]} → {cell['tokens_out'][row]} tokens"
        parts.append(svg.bar(left, top, x.end - left, ROW, "hit", f"{name}: {said} ms; {sizes}"))
    described = f"{len(rows)} requests; the longest took {np.nanmax(lives):.4g} ms from its due time"
    keys = [(css, what) for what, css in LIFE]
    return Figure(title, svg.document(parts, height, title, described), note, keys)
