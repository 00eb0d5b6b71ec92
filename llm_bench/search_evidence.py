"""What the cells of a search say of each limit: counts and figures, pooled over the cells of a load, and judged.

A load is decided by the intervals of its cells together, as METRICS.md decides the limits of one cell.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from llm_bench import objectives, slo, stats, windows
from llm_bench.columns import Cell
from llm_bench.objectives import Limit, Slo, Verdict
from llm_bench.series import SERIES, due_in, outcome_in
from llm_bench.windows import Window

OVERLOADED = "overloaded"  # reason of a cell that was ended since its backlog grew
DEPENDENCE = (0.5, 0.8, 0.9, 0.95)  # quantiles of a latency at which it is asked how far its requests hang together
SPARE = 2.0  # times within the limit: then it does not matter how they do
# Confidence of the first look at a load, and of later ones: a load that is asked again until it is decided is at last
# called what it is not, and the ends of a bracket are the luckiest of several. With 95% throughout 5 of 40 brackets of
# an M/D/1 queue missed its capacity.
CONFIDENCE = (0.95, 0.99)
WIDER = 3.250 / stats.T9  # a figure's interval at 99% against 95%, with 9 degrees of freedom


class Counts(NamedTuple):
    """Of a limit that requests meet one by one: how many did, in one cell or several."""

    met: float
    decided: float
    ess: float  # effective sample size of `decided`
    open: float = 0  # cut before it was known, or hidden
    hidden: float = 0  # of `open`: what the limit is on exists and is not known
    hidden_by: tuple[str, ...] = ()  # why


class Span(NamedTuple):
    """Of a limit on a figure of a whole cell: its 95% interval. Both ends the figure itself: it has no spread."""

    value: float
    low: float
    high: float
    n: float


class Unknown(NamedTuple):
    """A cell has no such figure."""

    why: str
    more_helps: bool = False  # a longer cell may have it


Evidence = Counts | Span | Unknown


class Seen(NamedTuple):
    """What one cell says of its load."""

    cell: str
    load: float
    evidence: tuple[Evidence, ...]  # one a limit, in the order of the SLO
    requests: int  # sent, warm-up included
    seconds: float  # from its begin to the next one's, drain included
    window: int = 0  # requests that count
    unsound: str = ""  # why its window cannot carry a verdict: too short, not yet steady
    overloaded: str = ""  # by how much its backlog grows
    client_limited: bool = False  # this client was the limit: what was missed may not be the target's fault
    fails: bool = False  # failures that are not this client's doing miss a limit by themselves


class Limited(NamedTuple):
    """A limit and what the cells of one load say of it together."""

    limit: Limit
    verdict: Verdict
    why: str
    low: float | None  # interval of the share that met it, or of the figure, at the CONFIDENCE of the look
    high: float | None
    needs: int | None = None  # requests in all that would decide it as it looks; None: decided, none, or not known
    hopeless: bool = False  # no number of requests would decide it


def seen(
    name: str,
    load: float,
    cell: Cell,
    window: Window,
    agreed: Slo,
    *,
    reason: str = "",
    seconds: float = 0.0,
    client_limited: bool = False,
) -> Seen:
    """What a cell says of each limit of `agreed`. `reason`: how it ended."""
    answered = bool((due_in(cell, window) & outcome_in(cell, "ok")).any())  # else it fails, steady or not
    grows = window.state == windows.GROWING
    overloaded = f"the backlog grew by {window.growth:.3g} requests/s" if grows else ""
    if reason == OVERLOADED and not overloaded:
        overloaded = "it was ended early, since its backlog grew"
    unsound = "" if overloaded or not answered else _unsound(window)
    if windows.by_client(cell, window, client_limited, grew=bool(overloaded)):
        overloaded, unsound = "", f"{overloaded}, {windows.BY_CLIENT}"
    return Seen(
        name,
        load,
        tuple(_evidence(cell, window, limit, agreed) for limit in agreed.limits),
        requests=cell.n,
        seconds=seconds,
        window=window.requests if window.opened else 0,
        unsound=unsound,
        overloaded=overloaded,
        client_limited=client_limited,
        fails=client_limited and any(_fails(cell, window, limit) for limit in agreed.limits),
    )


def _fails(cell: Cell, window: Window, limit: Limit) -> bool:
    mine = objectives.of_class(cell, limit.of_class) if limit.of_class else cell
    return objectives.failed_by_target(limit, mine, window)


def _unsound(window: Window) -> str:
    """Why a window's figures are not those of a steady state, where they are not."""
    if not window.opened or window.state == windows.TOO_SHORT:
        return f"too short ({window.evidence})"
    if window.state == windows.WARMING:
        return f"not steady ({window.evidence})"
    return ""


def _evidence(cell: Cell, window: Window, limit: Limit, agreed: Slo) -> Evidence:
    if limit.of_class:
        cell = objectives.of_class(cell, limit.of_class)
    if limit.bound is not None:
        got = slo.attainment(cell, window, [limit.bound], agreed.context(limit.of_class))
        if not got.decided + got.undecided:
            return Unknown("no request that decides it was due in the window", more_helps=True)
        samples = _samples(cell, window, limit, agreed, got)
        return Counts(got.met, got.decided, samples, got.undecided, got.hidden, got.hidden_by)
    if limit.metric.name == "error_rate":
        rows = due_in(cell, window) & outcome_in(cell, "ok", "failed")
        ok = outcome_in(cell, "ok")[rows]
        if not len(ok):
            return Unknown("no request of the window ended", more_helps=True)
        share = float(ok.mean())
        ess = stats.ess_of(ok, share * (1 - share)) if 0 < share < 1 else float(len(ok))
        return Counts(int(ok.sum()), len(ok), ess)
    judged = objectives.judge(cell, window, agreed._replace(limits=(limit._replace(of_class=""),)))[0]
    value = judged.value.value
    if value is None:
        return Unknown(judged.why)
    if judged.low is None or judged.high is None:
        reduced = limit.metric.reducer in ("max", "min")
        return Span(value, value, value, judged.value.n) if reduced else Unknown(judged.why, more_helps=True)
    return Span(value, judged.low, judged.high, judged.value.n)


def _samples(cell: Cell, window: Window, limit: Limit, agreed: Slo, got: slo.Attainment) -> float:
    """Effective size of what was decided: the least of METRICS' and those of the figures at DEPENDENCE.

    A short cell that had luck holds one burst of misses or none, which look independent of each other. That requests
    wait behind each other is seen in the latencies far from the limit too: in simulated queues (bench/search_queues)
    brackets of cells of some hundred requests missed the capacity in 28% of searches without this. Where every request
    keeps within half the limit it does not matter how its little noise hangs together.
    """
    assert limit.bound is not None
    values = SERIES[limit.bound.series].of(cell, agreed.context(limit.of_class)).values[due_in(cell, window)]
    values = values[~np.isnan(values)]
    easy = limit.value / SPARE if limit.op[0] == "<" else limit.value * SPARE
    if got.met == got.decided and bool(slo.WITHIN[limit.op](values, easy).all()):
        return float(got.decided)
    return min([got.ess, *(stats.ess(values, q) for q in DEPENDENCE if len(values))])


def pooled(evidence: Sequence[Evidence]) -> Evidence:
    """What several cells of one load say together.

    Counts add. Cells are independent, so that their variances do: ESS = N² / sum of n² / ess, which is the sum of ess
    where cells are alike and less where they are not, N and n of the cells that decided any. Of a figure the mean by n,
    half-widths added in squares.
    """
    counts = [e for e in evidence if isinstance(e, Counts)]
    spans = [e for e in evidence if isinstance(e, Span)]
    if counts:
        deciding = [(c.decided + c.open, c.ess) for c in counts if c.ess]
        spread = sum(n**2 / ess for n, ess in deciding)
        ess = sum(n for n, _ in deciding) ** 2 / spread if spread else 0.0
        sums = zip(*((c.met, c.decided, c.open, c.hidden) for c in counts), strict=True)
        met, decided, open_, hidden = (sum(of) for of in sums)
        reasons = dict.fromkeys(reason for c in counts for reason in c.hidden_by)
        return Counts(met, decided, ess, open_, hidden, tuple(reasons))
    if spans:
        n = sum(s.n for s in spans) or 1.0
        value = sum(s.value * s.n for s in spans) / n
        below = math.sqrt(sum(((s.value - s.low) * s.n) ** 2 for s in spans)) / n
        above = math.sqrt(sum(((s.high - s.value) * s.n) ** 2 for s in spans)) / n
        return Span(value, value - below, value + above, n)
    return evidence[0] if evidence else Unknown("no cell of this load has a window that can carry it")


def judge(limit: Limit, found: Evidence, *, guard: bool = False, again: bool = False) -> Limited:
    """MET, MISSED or UNDECIDED by the rule of METRICS.md.

    `guard`: it is met where it is not missed. `again`: a later look, whose intervals are of the second CONFIDENCE.
    """
    confidence = CONFIDENCE[again]
    level = f"{confidence:.0%} interval"
    if isinstance(found, Unknown):
        return Limited(limit, "UNDECIDED", found.why, None, None, hopeless=not found.more_helps)
    if isinstance(found, Span):
        if again:
            below, above = (WIDER * (edge - found.value) for edge in (found.low, found.high))
            found = found._replace(low=found.value + below, high=found.value + above)
        within = slo.WITHIN[limit.op]
        sides = [bool(within(np.array(edge), limit.value)) for edge in (found.low, found.high)]
        verdict: Verdict = "MET" if all(sides) else "UNDECIDED" if any(sides) else "MISSED"
        why = f"{found.value:.4g}, {level} {found.low:.4g} to {found.high:.4g}"
        if verdict != "UNDECIDED":
            return Limited(limit, verdict, why, found.low, found.high)
        # The half-width shrinks with the root of n, until it is as long as the way from the value to the limit.
        half, way = (found.high - found.low) / 2, abs(found.value - limit.value)
        needs = math.ceil(found.n * (half / way) ** 2) if way > half / 100 else None
        return Limited(limit, verdict, why, found.low, found.high, needs)
    asked = 1 - limit.value if limit.share is None else limit.share
    n = found.decided + found.open
    may_miss = (1 - asked) * n
    # A longer cell has as large a part that is hidden: where more than may miss, it is never met; where it would be met
    # with them, nor missed. Held against all, cut ones too, so that few requests do not give a load up.
    could = found.met + found.hidden >= asked * (found.decided + found.hidden)
    hopeless = found.hidden > may_miss and could
    if not n or not found.ess:
        why = f"no request that decides it{_not_known(found)}"
        return Limited(limit, "UNDECIDED", why, None, None, hopeless=hopeless)
    low = stats.wilson(found.met / n * found.ess, found.ess, confidence).low
    high = stats.wilson((found.met + found.open) / n * found.ess, found.ess, confidence).high
    share = found.met / found.decided if found.decided else 0.0
    why = (
        f"{found.met:,.0f} of {found.decided:,.0f} ({share:.2%}, {level} {low:.2%} to {high:.2%}, "
        f"ESS {found.ess:.0f}; {100 * asked:.4g}% asked){_not_known(found)}"
    )
    if guard and high >= asked:
        proven = "" if low >= asked else ", not proven"
        return Limited(limit, "MET" if share >= asked else "UNDECIDED", why + proven, low, high)
    verdict = "MET" if low >= asked else "MISSED" if high < asked else "UNDECIDED"
    if verdict != "UNDECIDED":
        return Limited(limit, verdict, why, low, high)
    seen = found.decided + found.hidden  # a longer cell has no more that are cut
    most = (found.met + found.hidden) / seen
    needs = None if found.open > may_miss else needed(found.met / seen, asked, found.ess, n, confidence, most)
    return Limited(limit, verdict, why, low, high, needs, hopeless)


def _not_known(of: Counts) -> str:
    """Of how many requests it is not known whether they met the limit, and why, in words; "" where it is of all."""
    hidden = [f"hidden ({', '.join(of.hidden_by)}), as it would be of more"] if of.hidden else []
    cut = ["cut"] if of.open > of.hidden else []
    return f"; of {of.open:,.0f} it is not known: {', or '.join(hidden + cut)}" if of.open else ""


def needed(
    share: float, asked: float, ess: float, n: float, confidence: float = CONFIDENCE[0], most: float | None = None
) -> int | None:
    """Requests in all, at this share and dependence, until the interval is clear of what is asked; None: over 1,000 n.

    `most`: the share were all hidden ones to meet it. At a confidence of 95% 73 of 73 have a lower bound of 95%.
    """

    def clear(samples: float) -> bool:
        low = stats.wilson(share * samples, samples, confidence).low
        high = stats.wilson((share if most is None else most) * samples, samples, confidence).high
        return low >= asked or high < asked

    low, high = 1, math.ceil(1000 * n)
    if not clear(high * ess / n):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if clear(middle * ess / n) else (middle + 1, high)
    return high


def least_requests(limits: Sequence[Limit], guards: int = 0) -> int:
    """So many requests, all of which meet it, prove each of the limits that are to be proven."""
    least = windows.LEAST_OPEN
    for limit in limits[: len(limits) - guards]:
        asked = limit.share or (1 - limit.value if limit.metric.name == "error_rate" else 0.0)
        if 0 < asked < 1:
            least = max(least, needed(1.0, asked, 1.0, 1.0) or 0, math.ceil(_Z2 * asked / (1 - asked)))
    return least


_Z2 = 1.959963984540054**2  # of Wilson's interval: n of n have the lower bound n / (n + z²)
