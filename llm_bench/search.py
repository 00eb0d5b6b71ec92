"""The highest load that meets an SLO: given what was seen so far, what to measure next, or the answer; pure, no I/O.

An answer is a bracket: the highest load that met every limit, the lowest that missed one, and what lies undecided
between them. A load is decided by the intervals of its cells together, as METRICS.md decides the limits of one cell.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from llm_bench.objectives import Limit, Verdict
from llm_bench.printable import counted
from llm_bench.search_evidence import Limited, Seen, judge, least_requests, pooled

By = Literal["concurrency", "rate"]
GUARD = "error_rate<1%"  # stands in every search: a server that refuses what it cannot serve is fast
PROBES_IN_BUDGET = 15  # a search takes about so many cells: a doubling bracket, a bisection, some asked twice
HEADROOM = 1.25  # requests of a window over those that could just decide it
WAVES = 8  # requests a slot of a closed loop's cell: 2 of warm-up, 5 that its window needs, 1 to spare
OPEN_WARMUP = 1.06  # of an open loop 5% of the span is warm-up
PATIENCE = 4  # a load is asked for so many times its first cell's requests before the search goes on around it
LEAST_PATIENCE = 500  # requests: below it going on around a load saves little
DECIMALS = 3  # significant digits of a rate that is tried


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


class Point(NamedTuple):
    """All that was seen of one load."""

    load: float
    verdict: Verdict
    why: str
    limits: tuple[Limited, ...]
    cells: tuple[str, ...]
    requests: int
    window: int  # requests that the verdict rests on
    longest: int  # of these, in one cell
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
        max((s.window for s in sound), default=0),
        sum(s.seconds for s in cells),
        clear=False,
    )
    if longest.overloaded:
        return of._replace(
            verdict="MISSED", why=longest.overloaded, clear=True, window=longest.window, longest=longest.window
        )
    # A cell that was not steady, or that this client slowed, says something as long as no other one is better.
    trust = "" if sound else longest.unsound
    using = [s for s in sound if not s.client_limited] or sound or [longest]
    aside = _aside([s for s in cells if s not in using], len(cells))
    first_guard = len(plan.limits) - plan.guards
    limits = tuple(
        judge(limit, pooled([s.evidence[i] for s in using]), guard=i >= first_guard, again=len(using) > 1)
        for i, limit in enumerate(plan.limits)
    )
    verdicts = {x.verdict for x in limits}
    verdict: Verdict = "MISSED" if "MISSED" in verdicts else "UNDECIDED" if "UNDECIDED" in verdicts else "MET"
    telling = [x for x in limits if x.verdict == verdict]
    why = "; ".join(f"{x.limit.text}: {x.why}" for x in telling)
    fails = any(s.fails for s in using)
    limited = verdict == "MISSED" and not fails and all(s.client_limited for s in using)
    if limited:
        verdict, trust = "UNDECIDED", "this client was the limit: what was missed may not be the target's fault"
    elif trust:
        verdict = "UNDECIDED"
    hopeless = not trust and any(x.hopeless for x in limits if x.verdict == "UNDECIDED")
    return of._replace(
        verdict=verdict,
        why="; ".join(filter(None, [trust, why, aside])),
        limits=limits,
        window=sum(s.window for s in using),
        longest=max(s.window for s in using),
        clear=verdict != "UNDECIDED" and all(_clear(x) for x in telling),
        more_helps=not hopeless and not (limited and len(cells) > 1),  # a neighbour may have slowed the first
        trust=trust,
    )


def _aside(cells: Sequence[Seen], of: int) -> str:
    """Which of a load's cells its verdict leaves out, and why; "" where all are in it."""
    whys = Counter(s.unsound or s.overloaded or "this client was the limit" for s in cells)
    said = "; ".join(f"{n} as {why}" if n < len(cells) else why for why, n in whys.items())
    return f"{len(cells)} of {of} cells left out: {said}" if cells else ""


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
    """Would no more requests decide it? A client at its limit cannot offer more, and what is hidden stays so."""
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
        why += f": about {counted(max(asks), 'request')} would decide it, it has had {point.window:,}"
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
