"""The highest load that meets an SLO: given what was seen so far, what to measure next, or the answer; pure, no I/O.

An answer is a bracket: the highest load that met every limit, the lowest that missed one, and what lies undecided
between them. A load is decided by the intervals of its cells together, as METRICS.md decides the limits of one cell.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from llm_bench import objectives, slo, stats, steady, windows
from llm_bench.columns import Cell
from llm_bench.objectives import Limit, Slo, Verdict
from llm_bench.series import SERIES, due_in, outcome_in
from llm_bench.windows import Window

By = Literal["concurrency", "rate"]
GUARD = "error_rate<1%"  # stands in every search: a server that refuses what it cannot serve is fast
OVERLOADED = "overloaded"  # reason of a cell that was ended since its backlog grew
PROBES_IN_BUDGET = 15  # a search takes about so many cells: a doubling bracket, a bisection, some asked twice
HEADROOM = 1.25  # requests of a window over those that could just decide it
WAVES = 8  # requests a slot of a closed loop's cell: 2 of warm-up, 5 that its window needs, 1 to spare
OPEN_WARMUP = 1.06  # of an open loop 5% of the span is warm-up
PATIENCE = 4  # a load is asked for so many times its first cell's requests before the search goes on around it
LEAST_PATIENCE = 500  # requests: below it going on around a load saves little
DEPENDENCE = (0.5, 0.8, 0.9, 0.95)  # quantiles of a latency at which it is asked how far its requests hang together
SPARE = 2.0  # times within the limit: then it does not matter how they do
# Confidence of the first look at a load, and of later ones: a load that is asked again until it is decided is at last
# called what it is not, and the ends of a bracket are the luckiest of several. With 95% throughout 5 of 40 brackets of
# an M/D/1 queue missed its capacity.
CONFIDENCE = (0.95, 0.99)
WIDER = 3.250 / stats.T9  # a figure's interval at 99% against 95%, with 9 degrees of freedom
DECIMALS = 3  # significant digits of a rate that is tried


class Counts(NamedTuple):
    """Of a limit that requests meet one by one: how many did, in one cell or several."""

    met: float
    decided: float
    ess: float  # effective sample size of `decided`
    open: float = 0  # cut before it was known, or hidden


class Span(NamedTuple):
    """Of a limit on a figure of a whole cell: its 95% interval. Both ends the figure itself: it has no spread."""

    value: float
    low: float
    high: float
    n: float


class Unknown(NamedTuple):
    """A cell has no such figure."""

    why: str


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


@dataclass(frozen=True)
class Plan:
    """What is looked for, where, and how long."""

    by: By
    limits: tuple[Limit, ...]
    guards: int = 0  # the last so many limits were not asked for: they need not be proven, only not be missed
    start: float = 1.0
    least: float = 1.0
    most: float = 1024.0
    tolerance: float = 0.05  # the bracket is narrow enough at this share of its lower end, or at 1 slot
    budget_s: float = 1800.0
    requests: int | None = None  # of a load's first cell; None: as many as its share of the budget carries
    alone_s: float = 0.0  # that one request takes alone, 0: not known; by concurrency, how long a first cell will take

    def narrow(self, low: float, high: float) -> bool:
        """Is there nothing left to try between two loads?"""
        if self.by == "concurrency":
            return high - low <= max(1.0, math.floor(self.tolerance * low))
        return high <= low * (1 + self.tolerance) * (1 + 1e-9) or self.between(low, high) in (low, high)

    def between(self, low: float, high: float) -> float:
        return float((low + high) // 2) if self.by == "concurrency" else _rounded(math.sqrt(low * high))

    def label(self, load: float) -> str:
        return f"{load:g}" if self.by == "concurrency" else f"{load:g}/s"


class Limited(NamedTuple):
    """A limit and what the cells of one load say of it together."""

    limit: Limit
    verdict: Verdict
    why: str
    low: float | None  # interval of the share that met it, or of the figure, at the CONFIDENCE of the look
    high: float | None
    needs: int | None = None  # requests in all that would decide it as it looks; None: decided, or no number would
    hopeless: bool = False  # no number of requests would decide it


class Point(NamedTuple):
    """All that was seen of one load."""

    load: float
    verdict: Verdict
    why: str
    limits: tuple[Limited, ...]
    cells: tuple[str, ...]
    requests: int
    window: int  # requests that the verdict rests on
    seconds: float
    clear: bool  # decided, and not by a hair: no request met it, or all did, or its backlog grew
    more_helps: bool = True  # False: no number of requests would decide it
    trust: str = ""  # what is to be known of the verdict


class Probe(NamedTuple):
    """Measure this load with so many requests."""

    load: float
    requests: int
    seconds: float  # that it will take, about; 0: not known
    why: str


End = Literal["resolved", "budget", "at the cap", "at the floor", "undecided", "interrupted", "target gone"]


class Answer(NamedTuple):
    """The bracket and what it rests on. `met`, `missed`: its ends, where they were found."""

    met: Point | None
    undecided: tuple[Point, ...]  # between them, or contradicting each other
    missed: Point | None
    end: End
    points: tuple[Point, ...]  # all loads, rising
    violations: tuple[str, ...]  # where a higher load met what a lower one missed
    spent_s: float
    asks: tuple[Probe, ...] = ()  # what would be measured next, were there budget


class Result(NamedTuple):
    """What a search found of one target."""

    target: str
    plan: Plan
    answer: Answer


# ---- evidence


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
    return Seen(
        name,
        load,
        tuple(_evidence(cell, window, limit, agreed) for limit in agreed.limits),
        requests=cell.n,
        seconds=seconds,
        window=window.requests if window.opened else 0,
        unsound="" if overloaded or not answered else _unsound(window),
        overloaded=overloaded,
        client_limited=client_limited,
    )


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
            return Unknown("no request that decides it was due in the window")
        samples = _samples(cell, window, limit, agreed, got)
        return Counts(got.met, got.decided, samples, got.undecided)
    if limit.metric.name == "error_rate":
        rows = due_in(cell, window) & outcome_in(cell, "ok", "failed")
        ok = outcome_in(cell, "ok")[rows]
        if not len(ok):
            return Unknown("no request of the window ended")
        share = float(ok.mean())
        ess = stats.ess_of(ok, share * (1 - share)) if 0 < share < 1 else float(len(ok))
        return Counts(int(ok.sum()), len(ok), ess)
    judged = objectives.judge(cell, window, agreed._replace(limits=(limit._replace(of_class=""),)))[0]
    value = judged.value.value
    if value is None:
        return Unknown(judged.why)
    if judged.low is None or judged.high is None:
        reduced = limit.metric.reducer in ("max", "min")
        return Span(value, value, value, judged.value.n) if reduced else Unknown(judged.why)
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
    where cells are alike and less where they are not. Of a figure the mean by n, half-widths added in squares.
    """
    counts = [e for e in evidence if isinstance(e, Counts)]
    spans = [e for e in evidence if isinstance(e, Span)]
    if counts:
        totals = [c.decided + c.open for c in counts]
        n = sum(totals)
        spread = sum(t**2 / c.ess for t, c in zip(totals, counts, strict=True) if c.ess)
        ess = n**2 / spread if spread else 0.0
        met, decided, open_ = (sum(c[i] for c in counts) for i in (0, 1, 3))
        return Counts(met, decided, ess, open_)
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
        return Limited(limit, "UNDECIDED", found.why, None, None, hopeless=True)
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
    if not n or not found.ess:
        return Limited(limit, "UNDECIDED", "no request that decides it", None, None)
    low = stats.wilson(found.met / n * found.ess, found.ess, confidence).low
    high = stats.wilson((found.met + found.open) / n * found.ess, found.ess, confidence).high
    share = found.met / found.decided if found.decided else 0.0
    why = (
        f"{found.met:,.0f} of {found.decided:,.0f} ({share:.2%}, {level} {low:.2%} to {high:.2%}, "
        f"ESS {found.ess:.0f}; {100 * asked:.4g}% asked)"
    )
    if found.open:
        why += f"; of {found.open:,.0f} more it is not known: cut, or hidden by bursts or several choices"
    if guard and high >= asked:
        proven = "" if low >= asked else ", not proven"
        return Limited(limit, "MET" if share >= asked else "UNDECIDED", why + proven, low, high)
    verdict = "MET" if low >= asked else "MISSED" if high < asked else "UNDECIDED"
    needs = needed(share, asked, found.ess, n, confidence) if verdict == "UNDECIDED" else None
    hidden = verdict == "UNDECIDED" and found.open > (1 - asked) * n  # more than may miss
    return Limited(limit, verdict, why, low, high, None if hidden else needs, hidden)


def needed(share: float, asked: float, ess: float, n: float, confidence: float = CONFIDENCE[0]) -> int | None:
    """Requests in all, at this share and dependence, until the interval is clear of what is asked; None: over 1,000 n.

    At a confidence of 95% 73 of 73 have a lower bound of 95%.
    """

    def clear(samples: float) -> bool:
        bounds = stats.wilson(share * samples, samples, confidence)
        return bounds.low >= asked or bounds.high < asked

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


# ---- loads


def points(plan: Plan, seen_: Sequence[Seen]) -> list[Point]:
    """What the cells so far say, a point a load, by rising load."""
    return [_point(plan, load, [s for s in seen_ if s.load == load]) for load in sorted({s.load for s in seen_})]


def _point(plan: Plan, load: float, cells: Sequence[Seen]) -> Point:
    sound = [s for s in cells if not s.unsound and not s.overloaded]
    longest = max(cells, key=lambda s: s.window)
    of = Point(
        load,
        "UNDECIDED",
        "",
        (),
        tuple(s.cell for s in cells),
        sum(s.requests for s in cells),
        sum(s.window for s in sound),
        sum(s.seconds for s in cells),
        clear=False,
    )
    if longest.overloaded:
        return of._replace(verdict="MISSED", why=longest.overloaded, clear=True, window=longest.window)
    # A cell that was not steady, or that this client slowed, says something as long as no other one is better.
    trust = "" if sound else longest.unsound
    using = [s for s in sound if not s.client_limited] or sound or [longest]
    first_guard = len(plan.limits) - plan.guards
    limits = tuple(
        judge(limit, pooled([s.evidence[i] for s in using]), guard=i >= first_guard, again=len(using) > 1)
        for i, limit in enumerate(plan.limits)
    )
    verdicts = {x.verdict for x in limits}
    verdict: Verdict = "MISSED" if "MISSED" in verdicts else "UNDECIDED" if "UNDECIDED" in verdicts else "MET"
    telling = [x for x in limits if x.verdict == verdict]
    why = "; ".join(f"{x.limit.text}: {x.why}" for x in telling)
    fails = any(x.limit.metric.name == "error_rate" for x in telling)  # a slow client makes no server fail
    limited = verdict == "MISSED" and not fails and all(s.client_limited for s in using)
    if limited:
        verdict, trust = "UNDECIDED", "this client was the limit: what was missed may not be the target's fault"
    elif trust:
        verdict = "UNDECIDED"
    hopeless = not trust and any(x.hopeless for x in limits if x.verdict == "UNDECIDED")
    return of._replace(
        verdict=verdict,
        why="; ".join(filter(None, [trust, why])),
        limits=limits,
        window=sum(s.window for s in using),
        clear=verdict != "UNDECIDED" and all(_clear(x) for x in telling),
        more_helps=not hopeless and not (limited and len(cells) > 1),  # a neighbour may have slowed the first
        trust=trust,
    )


def _clear(of: Limited) -> bool:
    """Did all cells together not come near the other verdict?"""
    if of.low is None or of.high is None:
        return True
    if of.limit.share is not None or of.limit.metric.name == "error_rate":
        return of.high >= 1 if of.verdict == "MET" else of.low <= 0
    return of.low == of.high


# ---- what next


def step(plan: Plan, seen_: Sequence[Seen], spent_s: float) -> Probe | Answer:
    """What to measure next, or the answer. The same cells always lead to the same step: a search can be taken up again.

    Bracket by doubling or halving from `start`, then bisection. A load that is not decided is asked again, each time
    with as many requests as it has had; after PATIENCE the search goes on below and above it, and comes back when
    nothing else is left. An end of the bracket that was not decided clearly is asked twice before it is an answer.
    """
    found = points(plan, seen_)
    answer = summary(plan, found, spent_s)
    if not seen_:
        return _affordable(plan, _first(plan, plan.start, [], "the first load"), answer)
    wanted = _wanted(plan, seen_, answer)
    if isinstance(wanted, Probe):
        more = [_again(plan, seen_, p, "undecided") for p in answer.undecided if p.more_helps]
        return _affordable(plan, wanted, answer, more)
    return answer._replace(end=wanted)


def _affordable(plan: Plan, probe: Probe, answer: Answer, more: Sequence[Probe] = ()) -> Probe | Answer:
    if answer.spent_s + probe.seconds > plan.budget_s:
        return answer._replace(end="budget", asks=(probe, *(p for p in more if p.load != probe.load)))
    return probe


def _wanted(plan: Plan, seen_: Sequence[Seen], answer: Answer) -> Probe | End:
    met, missed = answer.met, answer.missed
    open_ = list(answer.undecided)
    # One below a load that met it too: were it to miss, the bracket would be another.
    waits = [p for p in answer.points if p.verdict == "UNDECIDED" and p.more_helps]
    patient = [p for p in waits if (not missed or p.load < missed.load) and not _patience_spent(plan, seen_, p)]
    if patient:
        return _again(plan, seen_, min(patient, key=_left), "undecided")
    lowest = min([p.load for p in open_] + ([missed.load] if missed else []), default=math.inf)
    highest = max([p.load for p in open_] + ([met.load] if met else []), default=0.0)
    if met is None and lowest > plan.least:
        return _first(plan, max(plan.least, _down(plan, lowest)), seen_, "below what was not met")
    if missed is None and highest < plan.most and not _blocked(open_, highest):
        return _first(plan, min(plan.most, 2 * highest), seen_, "above what was not missed")
    for contradicting in open_:
        if contradicting.verdict != "UNDECIDED" and not _patience_spent(plan, seen_, contradicting):
            return _again(plan, seen_, contradicting, "it contradicts another load")
    ends = [p.load for p in ([met] if met else []) + open_ + ([missed] if missed else [])]
    # The widest gap first: of its two parts at least one is left.
    gaps = [(b / a, a, b) for a, b in pairwise(ends) if not plan.narrow(a, b) and not _between_open(open_, a, b)]
    if gaps:
        _, low, high = max(gaps)
        return _first(plan, plan.between(low, high), seen_, f"between {plan.label(low)} and {plan.label(high)}")
    for edge in (met, missed):
        if edge and not edge.clear and len(edge.cells) < 2:
            return _again(plan, seen_, edge, "an end of the bracket that one cell alone has decided")
    waiting = [p for p in open_ if p.more_helps]
    if waiting:
        return _again(plan, seen_, min(waiting, key=_left), "undecided")
    if missed is None and not open_:
        return "at the cap"
    if met is None and not open_:
        return "at the floor"
    return "undecided" if open_ else "resolved"


def _between_open(open_: Sequence[Point], low: float, high: float) -> bool:
    """Are both undecided? Between them nothing is to be found that would narrow the bracket."""
    loads = {p.load for p in open_}
    return low in loads and high in loads


def _blocked(open_: Sequence[Point], load: float) -> bool:
    """A client that is at its limit cannot offer more."""
    return any(p.load == load and not p.more_helps for p in open_)


def _left(point: Point) -> int:
    """Requests that it needs still, as it looks."""
    needs = [x.needs for x in point.limits if x.verdict == "UNDECIDED"]
    return 1 << 62 if None in needs else max([n for n in needs if n is not None], default=0) - point.window


def _down(plan: Plan, load: float) -> float:
    return float(load // 2) if plan.by == "concurrency" else _rounded(load / 2)


def _rounded(load: float) -> float:
    return float(f"{load:.{DECIMALS}g}")


def _patience_spent(plan: Plan, seen_: Sequence[Seen], point: Point) -> bool:
    first = next(s for s in seen_ if s.load == point.load)
    return point.requests >= max(PATIENCE * first.requests, LEAST_PATIENCE)


def _again(plan: Plan, seen_: Sequence[Seen], point: Point, why: str) -> Probe:
    """As many requests as it has had, so that they double. Fewer would be as many looks, each a chance to be wrong."""
    asks = [x.needs for x in point.limits if x.verdict == "UNDECIDED" and x.needs]
    if asks:
        why += f": about {max(asks):,} requests would decide it, it has had {point.window:,}"
    return Probe(point.load, point.requests, _takes(plan, seen_, point.load, point.requests), why)


def _first(plan: Plan, load: float, seen_: Sequence[Seen], why: str) -> Probe:
    """A load's first cell: what decides it where all is well, and more where its share of the budget carries more."""
    least = HEADROOM * least_requests(plan.limits, plan.guards)
    if plan.by == "concurrency":
        least = max(least + 2 * load, WAVES * load)
    else:
        least *= OPEN_WARMUP
    requests = plan.requests
    if requests is None:
        one_s = _takes(plan, seen_, load, 1)
        carries = plan.budget_s / PROBES_IN_BUDGET / one_s if one_s else 0.0
        requests = math.ceil(max(least, carries))
    return Probe(load, requests, _takes(plan, seen_, load, requests), why)


def _takes(plan: Plan, seen_: Sequence[Seen], load: float, requests: int) -> float:
    """Seconds that so many requests will take, about. 0: not known."""
    if plan.by == "rate":
        return requests / load
    near = [s for s in seen_ if s.requests and s.seconds]
    if not near:
        return requests * plan.alone_s / load
    # Throughput never falls much with concurrency, and grows with it at most in proportion.
    last = min(near, key=lambda s: (abs(math.log(s.load / load)), -s.window))
    return requests * last.seconds / last.requests * max(1.0, last.load / load)


# ---- the answer


def summary(plan: Plan, found: Sequence[Point], spent_s: float, end: End = "resolved") -> Answer:
    """The bracket so far. Loads that contradict each other lie between its ends, whatever their verdicts say."""
    met_at = [p.load for p in found if p.verdict == "MET"]
    missed_at = [p.load for p in found if p.verdict == "MISSED"]
    violations = tuple(
        f"{plan.label(high)} met what {plan.label(low)} missed" for low in missed_at for high in met_at if high > low
    )
    met = max((x for x in met_at if x < min(missed_at, default=math.inf)), default=None)
    missed = min((x for x in missed_at if x > max(met_at, default=-math.inf)), default=None)
    low, high = -math.inf if met is None else met, math.inf if missed is None else missed
    between = tuple(p for p in found if low < p.load < high)
    ends = {p.load: p for p in found}
    return Answer(
        None if met is None else ends[met],
        between,
        None if missed is None else ends[missed],
        end,
        tuple(found),
        violations,
        spent_s,
    )


# ---- a backlog that grows


class Backlog:
    """Watches an open loop while it runs: is it clear already that its backlog grows without bound?

    The rule that a window is judged by (steady.growth) is asked at each quarter of the plan, so that chance has three
    looks at most, and what has piled up has to be PILED of what arrived: a load of a third above capacity, or more.
    """

    PILED = 0.25
    QUARTERS = (0.25, 0.5, 0.75)

    def __init__(self, due_ns: np.ndarray, cap: int | None = None) -> None:
        """`due_ns` (n,): when each request is due, from the cell's start; all known before it."""
        self._due_s = np.sort(due_ns) / 1e9
        self._cap = cap
        self._marks = [q * float(self._due_s[-1]) for q in self.QUARTERS] if len(self._due_s) else []
        self._at_s: list[float] = [0.0]
        self._levels: list[tuple[int, int]] = [(0, 0)]

    def __call__(self, at_s: float, in_flight: int, ended: int) -> str:
        """At `at_s` since the start. Returns OVERLOADED when it is clear, else ""."""
        due = int(np.searchsorted(self._due_s, at_s, "right"))
        self._at_s.append(at_s)
        self._levels.append((in_flight, due - ended))
        if not self._marks or at_s < self._marks[0]:
            return ""
        self._marks.pop(0)
        return OVERLOADED if self._grows(self._due_s[:due]) else ""

    def _grows(self, due_s: np.ndarray) -> bool:
        if len(np.unique(due_s)) < windows.GROWTH_INSTANTS:
            return False
        seen_s, levels = np.array(self._at_s), np.array(self._levels)
        at_s = np.linspace(windows.OPEN_WARMUP_SHARE * seen_s[-1], seen_s[-1], steady.SAMPLES)
        # A level that is known at few moments would be a staircase, whose steps look like dependence.
        in_flight, in_system = (np.interp(at_s, seen_s, levels[:, i]) for i in (0, 1))
        inside = due_s[due_s >= at_s[0]]
        found = steady.growth(at_s, in_flight, in_system, inside, limit=self._cap)
        return found.growing and found.gained >= self.PILED * len(inside)
