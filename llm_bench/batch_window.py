"""What a batch window buys and costs: two cells with and without a delay, and what is left of an SLO's budget.

A server that waits some milliseconds for a batch to fill carries more, and everyone waits. Both changes are differences
of two measurements and have intervals of their own; no I/O. What is carried is output tokens and what is waited for the
first one; of answers that come whole, as those of single passes do, it is answers and their whole time.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from llm_bench import metrics, stats
from llm_bench.columns import Cell
from llm_bench.objectives import SECTIONS, Slo
from llm_bench.series import due_in, outcome_in
from llm_bench.windows import GROWING, Window

LOST = 0.01  # of the requests due, failed or dropped: what a search allows; with more not all that came was carried
MADE = {"tokens_per_second": "tokens/s", "requests_per_second": "answers/s"}  # the first that a cell has, in words
WAITED = {"ttft_p95": "p95 TTFT", "e2e_p95": "p95 e2e"}


class Measure(NamedTuple):
    """A figure of one arm. `half`: half of its 95% interval, None for the reason in `refusal`."""

    value: float | None
    half: float | None
    refusal: str = ""


class Arm(NamedTuple):
    """One run at one load: MADE a second, and WAITED in ms. `offered`: it carried all that came, and may carry more."""

    load: str
    throughput: Measure
    p95: Measure
    made: str = "tokens_per_second"
    waited: str = "ttft_p95"
    offered: bool = False


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
    """`gain`: relative change of throughput; `cost_ms`: of the p95; `left_ms`: budget minus p95 with the delay."""

    load: str
    delay_ms: float  # how much longer the window is
    gain: Change | str
    cost_ms: Change | str
    left_ms: Change | str
    base_ms: float = 0.0  # the window that it is longer than
    waited: str = "ttft_p95"
    bound: str = ""  # "at least" or "at most": one of the two carried all that came, and may carry more

    @property
    def text(self) -> str:
        """2 ms buys 28% (26% to 30%) and costs 90 ms of p95 TTFT (70 to 110 ms); 290 ms of budget left (...)."""
        buys, costs, left = self.gain, self.cost_ms, self.left_ms
        bound = f" {self.bound}" if self.bound else ""
        first = buys if isinstance(buys, str) else _said(buys, f"buys{bound}", f"loses{bound}", 100, "%")
        second = costs
        if not isinstance(costs, str):
            second = f"{_said(costs, 'costs', 'saves', 1, ' ms')} of {WAITED[self.waited]}"
        if isinstance(left, str):
            third = left
        elif left.value >= 0:
            third = f"{left.value:.3g} ms of budget left{_bounds(left, 1, ' ms')}"
        else:
            third = f"over budget by {-left.value:.3g} ms{_bounds(left, -1, ' ms')}"
        base = f" more than {self.base_ms:.3g} ms" if self.base_ms else ""
        return f"{self.load}: {self.delay_ms:.3g} ms{base} {first} and {second}; {third}"


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


def arm(cell: Cell, window: Window, load: str, *, by_client: bool = False) -> Arm:
    """A cell's two figures. Throughput's interval is t9 of ten sections of the window, p95's of order statistics.

    `by_client`: its backlog grows by no more than this client's lateness explains, which is no sign of a full server.
    """
    made, value = _first(MADE, cell, window)
    waited, p95 = _first(WAITED, cell, window)
    half = None if p95.interval is None else (p95.interval.high - p95.interval.low) / 2
    measured = Measure(p95.value, half, p95.reason or p95.refusal)
    return Arm(load, _throughput(made, cell, window, value), measured, made, waited, _offered(cell, window, by_client))


def _offered(cell: Cell, window: Window, by_client: bool) -> bool:
    """Whether it carried all that came. A closed loop sends no more than is carried; what is refused is not carried."""
    closed = (cell.header.get("load") or {}).get("kind") == "closed"
    full = window.state == GROWING and not by_client
    due = due_in(cell, window)
    lost = int((due & outcome_in(cell, "failed", "dropped")).sum())
    return not closed and not full and lost <= LOST * int(due.sum())


def _first(names: Iterable[str], cell: Cell, window: Window) -> tuple[str, metrics.Value]:
    """The first of these metrics that the cell has; if it has none, the first, with the reason."""
    found = [(name, metrics.compute(name, cell, window)) for name in names]
    return next((of for of in found if of[1].value), found[0])


def _throughput(made: str, cell: Cell, window: Window, value: metrics.Value) -> Measure:
    if value.value is None:
        return Measure(None, None, value.reason)
    edges = np.linspace(window.start_ns, window.end_ns, SECTIONS + 1).astype(np.int64).tolist()
    parts = []
    for start, end in pairwise(edges):
        part = metrics.compute(made, cell, replace(window, start_ns=start, end_ns=end)).value
        if part is None:
            return Measure(value.value, None, "a tenth of the window has no such figure")
        parts.append(part)
    return Measure(value.value, stats.T9 * float(np.std(parts, ddof=1)) / math.sqrt(SECTIONS))


def trade(without: Arm, with_delay: Arm, delay_ms: float, agreed: Slo, base_ms: float = 0.0) -> Trade:
    """The change from one arm to the other, whose window is `delay_ms` longer than the first one's of `base_ms`.

    The budget is the SLO's limit on the p95 that is waited, of all classes.
    """
    waited = with_delay.waited
    limit = next((x.value for x in agreed.limits if x.metric.name == waited and not x.of_class), None)
    a, b = without.p95, with_delay.p95
    if limit is None:
        left: Change | str = f"no budget: the SLO has no limit on {waited}"
    elif b.value is None:
        left = f"no budget can be given: {b.refusal}"
    else:
        left = _change(limit - b.value, b.half, b.refusal)
    cost = _difference(a, b, WAITED[waited])
    gain = _gain(without.throughput, with_delay.throughput)
    if (without.made, without.waited) != (with_delay.made, waited):
        gain = "cannot be compared (one of the two answered whole, the other in tokens)"
        cost = "has a cost that cannot be given"
    elif without.offered and with_delay.offered:
        gain = (
            f"buys nothing that this load can show ({MADE[with_delay.made]} are what was offered, and carried, both "
            "times: a closed loop, or more than it carries, would show it)"
        )
    return Trade(with_delay.load, delay_ms, gain, cost, left, base_ms, waited, _bound(without, with_delay, gain))


def _bound(without: Arm, with_delay: Arm, gain: Change | str) -> str:
    """On which side of the change the true one lies, where one of the two carried all that came and may carry more.

    With the delay, it buys at least or loses at most what was seen; without it, buys at most or loses at least that.
    """
    if isinstance(gain, str) or without.offered == with_delay.offered:
        return ""
    return "at least" if (gain.value >= 0) == with_delay.offered else "at most"


def _change(value: float, half: float | None, refusal: str) -> Change:
    return Change(value, None, None, refusal) if half is None else Change(value, value - half, value + half)


def _difference(a: Measure, b: Measure, what: str) -> Change | str:
    """b - a; the halves of two independent intervals add in squares."""
    if a.value is None or b.value is None:
        return f"its {what} is not known ({a.refusal or b.refusal})"
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
