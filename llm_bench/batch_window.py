"""What a batch window buys and costs: two cells with and without a delay, and what is left of an SLO's budget.

A server that waits some milliseconds for a batch to fill carries more, and everyone waits. Both changes are differences
of two measurements and have intervals of their own; no I/O.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from llm_bench import metrics, stats
from llm_bench.columns import Cell
from llm_bench.objectives import SECTIONS, Slo
from llm_bench.windows import Window

TTFT = "ttft_p95"


class Measure(NamedTuple):
    """A figure of one arm. `half`: half of its 95% interval, None for the reason in `refusal`."""

    value: float | None
    half: float | None
    refusal: str = ""


class Arm(NamedTuple):
    """One run at one load: output tokens a second, and p95 TTFT in ms."""

    load: str
    throughput: Measure
    ttft_p95: Measure


class Change(NamedTuple):
    """From one arm to the other. Bounds are None for the reason in `refusal`."""

    value: float
    low: float | None
    high: float | None
    refusal: str = ""

    @property
    def proven(self) -> bool:
        """The interval does not hold 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


class Trade(NamedTuple):
    """`gain`: relative change of throughput; `cost_ms`: of p95 TTFT; `left_ms`: budget minus p95 with the delay."""

    load: str
    delay_ms: float  # how much longer the window is
    gain: Change | str
    cost_ms: Change | str
    left_ms: Change | str

    @property
    def text(self) -> str:
        """2 ms buys 28% (26% to 30%) and costs 90 ms of p95 TTFT (70 to 110 ms); 290 ms of budget left (...)."""
        buys, costs, left = self.gain, self.cost_ms, self.left_ms
        first = buys if isinstance(buys, str) else _said(buys, "buys", "loses", 100, "%")
        second = costs if isinstance(costs, str) else f"{_said(costs, 'costs', 'saves', 1, ' ms')} of p95 TTFT"
        if isinstance(left, str):
            third = left
        elif left.value >= 0:
            third = f"{left.value:.3g} ms of budget left{_bounds(left, 1, ' ms')}"
        else:
            third = f"over budget by {-left.value:.3g} ms{_bounds(left, -1, ' ms')}"
        return f"{self.load}: {self.delay_ms:.3g} ms {first} and {second}; {third}"


def _said(change: Change, more: str, less: str, scale: float, unit: str) -> str:
    side = 1 if change.value >= 0 else -1
    unproven = "" if change.proven or change.low is None else ", so not proven"
    shown = f"{abs(change.value) * scale:.3g}{unit}"
    return f"{more if side > 0 else less} {shown}{_bounds(change, side * scale, unit, unproven)}"


def _bounds(change: Change, scale: float, unit: str, more: str = "") -> str:
    if change.low is None or change.high is None:
        return f" (no interval: {change.refusal})"
    low, high = sorted((change.low * scale, change.high * scale))
    return f" (95%: {low:.3g}{unit} to {high:.3g}{unit}{more})"


def arm(cell: Cell, window: Window, load: str) -> Arm:
    """A cell's two figures. Throughput's interval is t9 of ten sections of the window, p95's of order statistics."""
    value = metrics.compute("tokens_per_second", cell, window)
    ttft = metrics.compute(TTFT, cell, window)
    half = None if ttft.interval is None else (ttft.interval.high - ttft.interval.low) / 2
    return Arm(load, _throughput(cell, window, value), Measure(ttft.value, half, ttft.reason or ttft.refusal))


def _throughput(cell: Cell, window: Window, value: metrics.Value) -> Measure:
    if value.value is None:
        return Measure(None, None, value.reason)
    edges = np.linspace(window.start_ns, window.end_ns, SECTIONS + 1).astype(np.int64).tolist()
    parts = []
    for start, end in pairwise(edges):
        part = metrics.compute("tokens_per_second", cell, replace(window, start_ns=start, end_ns=end)).value
        if part is None:
            return Measure(value.value, None, "a tenth of the window has no such figure")
        parts.append(part)
    return Measure(value.value, stats.T9 * float(np.std(parts, ddof=1)) / math.sqrt(SECTIONS))


def trade(without: Arm, with_delay: Arm, delay_ms: float, agreed: Slo) -> Trade:
    """The change from one arm to the other. The budget is the SLO's limit on ttft_p95, of all classes."""
    limit = next((x.value for x in agreed.limits if x.metric.name == TTFT and not x.of_class), None)
    a, b = without.ttft_p95, with_delay.ttft_p95
    if limit is None:
        left: Change | str = "no budget: the SLO has no limit on ttft_p95"
    elif b.value is None:
        left = f"no budget to be said: {b.refusal}"
    else:
        left = _change(limit - b.value, b.half, b.refusal)
    return Trade(with_delay.load, delay_ms, _gain(without.throughput, with_delay.throughput), _difference(a, b), left)


def _change(value: float, half: float | None, refusal: str) -> Change:
    return Change(value, None, None, refusal) if half is None else Change(value, value - half, value + half)


def _difference(a: Measure, b: Measure) -> Change | str:
    """b - a; the halves of two independent intervals add in squares."""
    if a.value is None or b.value is None:
        return f"its p95 TTFT is not known ({a.refusal or b.refusal})"
    if a.half is None or b.half is None:
        return Change(b.value - a.value, None, None, a.refusal or b.refusal)
    return _change(b.value - a.value, math.hypot(a.half, b.half), "")


def _gain(a: Measure, b: Measure) -> Change | str:
    """b / a - 1, by the logarithms' halves, which are those of the figures as shares of them."""
    if a.value is None or b.value is None or a.value <= 0 or b.value <= 0:
        return f"its throughput is not known ({a.refusal or b.refusal or 'none'})"
    ratio = b.value / a.value
    if a.half is None or b.half is None:
        return Change(ratio - 1, None, None, a.refusal or b.refusal)
    half = math.hypot(a.half / a.value, b.half / b.value)
    return Change(ratio - 1, ratio * math.exp(-half) - 1, ratio * math.exp(half) - 1)


class Longest(NamedTuple):
    """The longest window that meets the SLO, and the shortest that does not, in ms; None where there is none."""

    meets: float | None
    misses: float | None
    undecided: tuple[float, ...]  # between them

    @property
    def text(self) -> str:
        if self.meets is None:
            least = "no window measured is proven to meet the SLO"
        else:
            least = f"the longest window proven to meet the SLO is {self.meets:.3g} ms"
        most = f", {self.misses:.3g} ms does not" if self.misses is not None else ", none measured misses it"
        open_ = f"; undecided: {', '.join(f'{x:.3g} ms' for x in self.undecided)}" if self.undecided else ""
        return least + most + open_


def longest(verdicts: Sequence[tuple[float, str]]) -> Longest:
    """From (delay in ms, MET, MISSED or UNDECIDED) of runs at one load."""
    misses = min((delay for delay, verdict in verdicts if verdict == "MISSED"), default=None)
    below = [(delay, verdict) for delay, verdict in verdicts if misses is None or delay < misses]
    meets = max((delay for delay, verdict in below if verdict == "MET"), default=None)
    open_ = (d for d, verdict in below if verdict == "UNDECIDED" and (meets is None or d > meets))
    return Longest(meets, misses, tuple(sorted(open_)))
