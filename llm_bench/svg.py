"""Plots as SVG text: scales with round ticks, axes, lines, steps, bands, points. Pure; colours are the page's CSS.

Every plot is WIDTH units wide, so that its text stays legible where it is shown at the width of a phone. Class names
`s0` to `s6` are the colours of series; `dash1` to `dash3` tell apart series that share one.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import Literal, NamedTuple

import numpy as np

WIDTH = 400
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 26, 38  # margins that hold tick labels and the names of the axes
COLOURS, DASHES = 7, 4
CURVE_POINTS = 300  # of an ECDF: under a point a pixel at any width a page is read at
TAIL_POINTS = 60  # of them in the upper tail, where a slope hides what matters
LOG_SPAN = 30  # above this ratio a linear axis shows its largest values and little else
LETTER = 5.6  # units that a letter of the 11-unit text takes on average, a little more than less


class Scale(NamedTuple):
    """Values from `low` to `high` as positions from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    parts: int = 5  # that ticks cut a linear one into, at most

    def at(self, values: np.ndarray | float) -> np.ndarray:
        """Positions; nan stays nan, and what lies outside lies outside."""
        found = np.asarray(values, float)
        low, high = self.low, self.high
        if self.log:
            with np.errstate(divide="ignore", invalid="ignore"):
                found = np.log10(found)
            low, high = math.log10(low), math.log10(high)
        return np.asarray(self.start + (found - low) / (high - low) * (self.end - self.start))

    def ticks(self) -> list[float]:
        return log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high, self.parts)


def series_class(index: int) -> str:
    """The look of the index-th series: each colour once, then again with another dash."""
    return f"s{index % COLOURS} dash{index // COLOURS % DASHES}"


# ---- scales


def _step(span: float, most: int) -> float:
    """The smallest of 1, 2, 5 x 10^k that cuts `span` into `most` parts or fewer."""
    size = 10.0 ** math.floor(math.log10(span / most))
    return next(size * by for by in (1, 2, 5, 10) if span <= size * by * most * (1 + 1e-9))


def linear_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values within [low, high], low < high."""
    step = _step(high - low, most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten within [low, high]; 2 and 5 of each too where those are few; not every one where they are many."""
    first, last = math.floor(math.log10(low) - 1e-9), math.ceil(math.log10(high) + 1e-9)
    decades = math.log10(high / low)
    parts = (1, 2, 5) if decades < 2.5 else (1,)
    every = max(1, round(decades / 5))
    found = [10.0**k * part for k in range(first, last + 1) for part in parts if k % every == 0]
    return [v for v in found if low * (1 - 1e-9) <= v <= high * (1 + 1e-9)]


def scale(
    values: np.ndarray, start: float, end: float, *, zero: bool = True, log: bool = False, parts: int = 5
) -> Scale:
    """A scale with round ends that holds every finite value; from 0 where `zero`. `log`: of the positive ones."""
    finite = values[np.isfinite(values)]
    if log and (finite > 0).any():
        finite = finite[finite > 0]
        low, high = float(finite.min()), float(finite.max())
        low = _round_down(low)
        return Scale(low, -_round_down(-max(high, 1.5 * low)), start, end, True)
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    low, high = (min(low, 0.0), max(high, 0.0)) if zero else (low, high)
    if high <= low:
        low, high = (low, low + 1) if zero or not low else (low - abs(low) / 2, low + abs(low) / 2)
    step = _step(high - low, parts)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return Scale(low, high, start, end, parts=parts)


def _round_down(value: float) -> float:
    """The next of 1, 2, 5 x 10^k below; of a negative value the next above in size."""
    size = 10.0 ** math.floor(math.log10(abs(value)))
    part = abs(value) / size
    if value > 0:
        return size * max(p for p in (1, 2, 5) if p <= part * (1 + 1e-9))
    return -size * min(p for p in (1, 2, 5, 10) if p >= part * (1 - 1e-9))


def wide(values: np.ndarray) -> bool:
    """Whether positive values span so much that a logarithmic axis shows more of them."""
    positive = values[np.isfinite(values) & (values > 0)]
    return len(positive) > 1 and len(positive) == len(values) and float(positive.max() / positive.min()) > LOG_SPAN


def tick_text(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.6g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"


# ---- marks


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _path(xs: np.ndarray, ys: np.ndarray) -> str:
    """A path through the points; it breaks where one of them is not finite."""
    parts, pen = [], "M"
    for x, y in zip(xs.tolist(), ys.tolist(), strict=True):
        if math.isfinite(x) and math.isfinite(y):
            parts.append(f"{pen}{_number(x)} {_number(y)}")
            pen = "L"
        else:
            pen = "M"
    return "".join(parts)


def line(xs: np.ndarray, ys: np.ndarray, css: str) -> str:
    """A line through positions (k,)."""
    return f'<path class="line {css}" d="{_path(xs, ys)}"/>'


def steps(edges: np.ndarray, ys: np.ndarray, css: str) -> str:
    """Level ys[i] from edges[i] to edges[i + 1], as positions: (k + 1,) and (k,)."""
    return line(np.repeat(edges, 2)[1:-1], np.repeat(ys, 2), css)


def band(xs: np.ndarray, low: np.ndarray, high: np.ndarray, css: str) -> str:
    """The area between two lines over the same positions."""
    around = _path(np.concatenate([xs, xs[::-1]]), np.concatenate([low, high[::-1]]))
    return f'<path class="band {css}" d="{around}Z"/>'


def step_band(edges: np.ndarray, low: np.ndarray, high: np.ndarray, css: str) -> str:
    return band(np.repeat(edges, 2)[1:-1], np.repeat(low, 2), np.repeat(high, 2), css)


def dots(xs: np.ndarray, ys: np.ndarray, css: str) -> str:
    """Round points as one path: each is a line of no length with round ends. A tenth of the text of as many circles."""
    seen = np.isfinite(xs) & np.isfinite(ys)
    pairs = zip(xs[seen].tolist(), ys[seen].tolist(), strict=True)
    return f'<path class="dots {css}" d="{"".join(f"M{_number(x)} {_number(y)}h0" for x, y in pairs)}"/>'


def marker(x: float, y: float, css: str, said: str) -> str:
    """A point that says what it is when pointed at."""
    return (
        f'<circle class="marker {css}" cx="{_number(x)}" cy="{_number(y)}" r="4"><title>{escape(said)}</title></circle>'
    )


def interval(x: float, low: float, high: float, css: str) -> str:
    """A vertical interval with its caps, as positions."""
    x_, low_, high_ = _number(x), _number(low), _number(high)
    caps = "".join(f"M{_number(x - 3)} {y}h6" for y in (low_, high_))
    return f'<path class="line {css}" d="M{x_} {low_}V{high_}{caps}"/>'


def bar(x: float, y: float, width: float, height: float, css: str, said: str = "") -> str:
    """A filled box; `said` is shown when it is pointed at."""
    box = (
        f'class="{css}" x="{_number(x)}" y="{_number(y)}" width="{_number(max(width, 0.0))}" height="{_number(height)}"'
    )
    return f"<rect {box}><title>{escape(said)}</title></rect>" if said else f"<rect {box}/>"


def rule(x: float, y: float, x_end: float, css: str) -> str:
    return f'<path class="{css}" d="M{_number(x)} {_number(y)}H{_number(x_end)}"/>'


def label(x: float, y: float, said: str, css: str = "", anchor: Literal["start", "middle", "end"] = "start") -> str:
    at = f'x="{_number(x)}" y="{_number(y)}"'
    return f'<text {at} class="{css}" text-anchor="{anchor}">{escape(said)}</text>'


def text_width(said: str) -> float:
    """About how wide a label is drawn."""
    return LETTER * len(said)


# ---- frames


def x_scale(values: np.ndarray, *, zero: bool = True, log: bool = False) -> Scale:
    return scale(values, LEFT, WIDTH - RIGHT, zero=zero, log=log, parts=7)


def y_scale(values: np.ndarray, height: float, *, zero: bool = True, log: bool = False) -> Scale:
    return scale(values, height - BOTTOM, TOP, zero=zero, log=log)


def axes(x: Scale, y: Scale, x_name: str, y_name: str, *, y_percent: bool = False) -> str:
    """Grid, tick labels and names with units: that of y stands above its axis, where it needs no turned head."""
    parts = []
    for tick in y.ticks():
        at = float(y.at(tick))
        parts.append(rule(x.start, at, x.end, "grid"))
        parts.append(label(x.start - 6, at + 4, f"{tick:.0%}" if y_percent else tick_text(tick), "tick", "end"))
    return "".join([*parts, x_axis(x, y.start, y.end, x_name), label(4, 11, y_name, "name")])


def x_axis(x: Scale, bottom: float, top: float, name: str) -> str:
    """The axis of x alone, at `bottom`, grid lines up to `top`; a tick label that would touch another is left out."""
    parts, taken = [], -math.inf
    for tick in x.ticks():
        at, said = float(x.at(tick)), tick_text(tick)
        parts.append(f'<path class="grid" d="M{_number(at)} {_number(bottom)}V{_number(top)}"/>')
        if at - text_width(said) / 2 > taken:
            parts.append(label(at, bottom + 15, said, "tick", "middle"))
            taken = at + text_width(said) / 2 + 4
    parts.append(rule(x.start, bottom, x.end, "axis"))
    parts.append(label((x.start + x.end) / 2, bottom + 31, name, "name", "middle"))
    return "".join(parts)


def document(parts: Sequence[str], height: float, title: str, described: str) -> str:
    """A whole <svg>. `title` and `described` are what a reader who does not see it is told."""
    head = f'viewBox="0 0 {WIDTH} {_number(height)}" role="img" aria-label="{escape(title)}"'
    return f"<svg {head}><desc>{escape(described)}</desc>{''.join(parts)}</svg>"


# ---- decimation that hides nothing


def ecdf(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points (k,) of the empirical distribution: value, share of values at or below it.

    All of them, or CURVE_POINTS quantiles: each a value that was measured, with the share that holds exactly for it,
    the extremes among them and every one of the largest TAIL_POINTS / 2.
    """
    values = np.sort(values[np.isfinite(values)])
    n = len(values)
    ranks = np.arange(n)
    if n > CURVE_POINTS:
        even = np.linspace(0, n - 1, CURVE_POINTS - TAIL_POINTS)
        tail = n - np.geomspace(1, max(n / 20, TAIL_POINTS), TAIL_POINTS // 2)
        last = np.arange(n - TAIL_POINTS // 2, n)
        ranks = np.unique(np.clip(np.concatenate([even, tail, last]).round().astype(np.int64), 0, n - 1))
    return values[ranks], np.searchsorted(values, values[ranks], "right") / max(n, 1)


def evenly(n: int, most: int) -> np.ndarray:
    """At most `most` of the indices 0..n-1, evenly spread, the first and the last among them."""
    if n <= most:
        return np.arange(n)
    return np.asarray(np.linspace(0, n - 1, most).round().astype(np.int64))
