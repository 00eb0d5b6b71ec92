"""Pairs of cells against rules: PASS, FAIL or INCONCLUSIVE of each rule at each load, and of all of them.

The unit is the pair (METRICS.md, Statistics): requests of one run are no sample.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from llm_bench import metrics, pairs
from llm_bench.client import BUSY, CLIENT_LIMITED, LATE, LIMITED, STALLED
from llm_bench.columns import Cell
from llm_bench.errors import BenchError
from llm_bench.facts import EITHER_WAY, TOO_HIGH, TOO_LOW, Effect
from llm_bench.metrics import Value
from llm_bench.pairs import ALPHA, FAIL, INCONCLUSIVE, PASS, Comparison
from llm_bench.rules import ACCEPTABLE, BURST, DRIFT, IDLE, WARMING, Rule, counts
from llm_bench.series import NOTHING, Context
from llm_bench.windows import Window

# Kinds that come and go from cell to cell. As often in either arm, they are the noise that a test over pairs carries.
OF_CELLS = (LATE, STALLED, BUSY, LIMITED, IDLE, BURST, DRIFT, WARMING)
UNEQUAL = 0.1  # one-sided, exact: one arm has a kind in more of its cells than the other
CLIENT_CELLS = 0.5  # of both arms: where this client was the limit in more of them, nothing of the targets is judged
MOST_CELLS = 0.25  # of both arms; in more of them a PASS would be one of a measurement that was seldom sound
WARMING_RATE, WARMING_ALPHA = 0.1, 0.01  # steady cells that look like warming, and when an arm has too many of them

MOST_PAIRS = 48  # looked at when saying how many would decide


Name = Literal["baseline", "candidate"]


class Objection(NamedTuple):
    """A doubt and what it is about, for instance `cand, pair 3`; `load` "" is every load."""

    load: str
    where: str
    kind: str
    text: str
    effect: Effect = EITHER_WAY  # on the latencies of `arm`; rates err the other way
    arm: Name | None = None  # None: both
    pair: int | None = None
    p: float | None = None  # of a drift: how likely chance would bring it in this cell
    off: tuple[float, float] | None = None  # figures are off by at most (ms, factor); None: nobody knows

    def could_make(self, verdict: str) -> bool:
        """Whether its likely effect may be what made the verdict: a candidate that looks worse than it is, or better.

        What makes latencies too low makes rates too high: it flatters in either.
        """
        if self.effect == EITHER_WAY or self.arm is None:
            return True
        return (self.effect == TOO_LOW) == (self.arm == ("baseline" if verdict == FAIL else "candidate"))


class Weighed(NamedTuple):
    """What doubts do to a verdict: those that forbid it, and of the other kinds why they do not."""

    against: list[Objection]
    spared: dict[str, str]


class Side(NamedTuple):
    """One arm of a pair: a cell as measured."""

    cell: Cell
    window: Window


class Pair(NamedTuple):
    """The same work on both arms, one after the other."""

    load: str
    number: int
    baseline: Side
    candidate: Side


class Test(NamedTuple):
    """A rule at a load. Differences and what is made of them are in the rule's differences, see Rule.as_change."""

    rule: Rule
    load: str
    numbers: list[int]  # of the pairs
    values: list[tuple[Value, Value]]  # baseline, candidate
    differences: np.ndarray | None  # (n,); None: a figure is undefined
    comparison: Comparison | None
    p: float | None  # by Holm over all tests
    verdict: str
    why: str
    detectable: float | None  # the smallest true change that so many pairs call FAIL with chance 0.9
    doubts: list[Objection]  # that concern its metric
    objections: Sequence[Objection] = ()  # of them, those that forbid the verdict
    spared: Mapping[str, str] = MappingProxyType({})  # kind -> why it forbids none

    @property
    def name(self) -> str:
        return f"{self.rule.text} at {self.load}"

    def middles(self) -> tuple[float, float] | None:
        """Mean figures of baseline and candidate; None where one is undefined."""
        if self.differences is None:
            return None
        base, cand = (np.array([v[i].value for v in self.values], float) for i in (0, 1))
        return self.rule.middle(base), self.rule.middle(cand)


class Gate(NamedTuple):
    baseline: str
    candidate: str
    tests: list[Test]
    objections: list[Objection]  # every doubt, those that count against no test among them
    accepted: tuple[str, ...]  # kinds of doubts that the user accepts as intended

    @property
    def pairs(self) -> dict[str, int]:
        return {test.load: len(test.numbers) for test in self.tests}

    @property
    def against_all(self) -> list[Objection]:
        """What forbids a PASS of the whole, though it is about no test's load."""
        loads = {test.load for test in self.tests}
        return [o for o in self.objections if o.load and o.load not in loads and o.kind not in self.accepted]

    @property
    def verdict(self) -> str:
        """FAIL where one fails; PASS where all pass."""
        said = {test.verdict for test in self.tests}
        if FAIL in said:
            return FAIL
        return INCONCLUSIVE if INCONCLUSIVE in said or self.against_all else PASS


EXIT_CODES = {PASS: 0, FAIL: 1, INCONCLUSIVE: 3}


def check_accepted(kinds: Sequence[str]) -> tuple[str, ...]:
    for kind in kinds:
        if kind not in ACCEPTABLE:
            raise BenchError(f"--accept {kind!r}: expected one of {', '.join(ACCEPTABLE)}")
    return tuple(kinds)


def judge(
    found: Sequence[Pair],
    names: tuple[str, str],
    rules: Sequence[Rule],
    objections: Sequence[Objection] = (),
    accepted: Sequence[str] = (),
    context: Context = NOTHING,
) -> Gate:
    """Every rule at every load of the pairs; `names` of baseline and candidate.

    Raises BenchError where a load has fewer pairs than so many tests need: nothing could fail.
    """
    loads = {load: [p for p in found if p.load == load] for load in dict.fromkeys(p.load for p in found)}
    check_enough({load: len(mine) for load, mine in loads.items()}, len(rules))
    tests = []
    for load, mine in loads.items():
        sides = [[_values(side, rules, context) for side in (p.baseline, p.candidate)] for p in mine]
        blind = _client_limited([o for o in objections if o.load in ("", load)], len(mine))
        for i, rule in enumerate(rules):
            values = [(base[i], cand[i]) for base, cand in sides]
            doubts = [o for o in objections if o.load in ("", load) and counts(o.kind, rule.metric, accepted)]
            doubts += [o for o in blind if o not in doubts]
            tests.append(_test(rule, load, [p.number for p in mine], values, doubts, names))
    return Gate(*names, _verdicts(tests), list(objections), tuple(accepted))


def _client_limited(found: Sequence[Objection], n: int) -> list[Objection]:
    """What says that this client was the limit, where it was in over CLIENT_CELLS of the 2n cells; else nothing."""
    mine = [o for o in found if o.kind in CLIENT_LIMITED]
    return mine if len({(o.arm, o.pair) for o in mine}) > CLIENT_CELLS * 2 * n else []


def check_enough(counted: Mapping[str, int], rules: int) -> None:
    """Pairs of each load, and rules. Raises BenchError."""
    tests = len(counted) * rules
    least = pairs.needed(tests) if tests else 0
    of = "1 test" if tests == 1 else f"{tests} tests (rules x loads)"
    for load, n in counted.items():
        if n < least:
            raise BenchError(
                f"{n} pair{'s' * (n != 1)} at {load}, and {of} need{'s' * (tests == 1)} {least} at least: with fewer "
                f"no change, however large, is significant. Measure {least} pairs or more (--repeat)"
            )


def _values(side: Side, rules: Sequence[Rule], context: Context) -> list[Value]:
    return metrics.compute_all([rule.metric.name for rule in rules], side.cell, side.window, context)


def _test(
    rule: Rule,
    load: str,
    numbers: list[int],
    values: list[tuple[Value, Value]],
    doubts: list[Objection],
    names: tuple[str, str],
) -> Test:
    """Without its verdict, which depends on the others; `why` says only what is undefined."""
    for number, of_pair in zip(numbers, values, strict=True):
        for name, value in zip(names, of_pair, strict=True):
            if value.value is None:
                why = f"{value.name} of {name} in pair {number} is undefined: {value.reason}"
                return Test(rule, load, numbers, values, None, None, None, INCONCLUSIVE, why, None, doubts)
    base, cand = (np.array([v[i].value for v in values], float) for i in (0, 1))
    try:
        d = rule.differences(base, cand)
    except ValueError as e:
        return Test(rule, load, numbers, values, None, None, None, INCONCLUSIVE, str(e), None, doubts)
    return Test(rule, load, numbers, values, d, pairs.compare(d, rule.margin, rule.op), None, "", "", None, doubts)


def _verdicts(tests: Sequence[Test]) -> list[Test]:
    """A verdict that doubts forbid is said beside the INCONCLUSIVE, as it would be were none doubtful."""
    found = [None if t.comparison is None else (t.comparison.verdict, t.comparison.p) for t in tests]
    out = []
    for test, (verdict, p, weighed) in zip(tests, settle(tests, found), strict=True):
        if test.comparison is None or test.differences is None:
            out.append(test)
            continue
        why = _why(test, verdict, p, len(tests))
        if weighed.against:
            kinds = ", ".join(dict.fromkeys(o.kind for o in weighed.against))
            why, verdict = f"doubt: {kinds} (else {verdict}: {why})", INCONCLUSIVE
        test = test._replace(p=p, verdict=verdict, why=why, objections=weighed.against, spared=weighed.spared)
        out.append(test._replace(detectable=detectable(test, len(tests))))
    return out


def settle(tests: Sequence[Test], found: Sequence[tuple[str, float] | None]) -> list[tuple[str, float, Weighed]]:
    """(verdict, p, doubts) of each test of a gate, from what each is by itself; None: it cannot be judged.

    Holm's family is every test that was asked for; one that cannot be judged, or whose FAIL doubts forbid, is in it
    with p = 1. The verdict is as if no doubt forbade it.
    """
    nothing = Weighed([], {})
    fails = [
        weigh(FAIL, test, len(tests)) if said and said[0] == FAIL else nothing
        for test, said in zip(tests, found, strict=True)
    ]
    raw = [1.0 if said is None else said[1] for said in found]
    sure = [1.0 if fail.against else p for fail, p in zip(fails, raw, strict=True)]
    out = []
    for test, said, fail, adjusted, would_be in zip(
        tests, found, fails, pairs.holm(sure), pairs.holm(raw), strict=True
    ):
        p = would_be if fail.against else adjusted
        verdict = INCONCLUSIVE if said is None or (said[0] == FAIL and p > ALPHA) else said[0]
        if verdict == PASS:
            out.append((verdict, p, weigh(PASS, test, len(tests))))
        else:
            out.append((verdict, p, fail if verdict == FAIL else nothing))
    return out


# ---- what doubts do to a verdict


def weigh(verdict: str, test: Test, tests: int) -> Weighed:
    """Which doubts forbid a PASS or a FAIL of one of `tests`: those whose likely effect could have produced it."""
    if blind := _client_limited(test.doubts, len(test.numbers)):
        return Weighed(blind, {})  # what was measured is this client, whatever the verdict and the metric
    against: list[Objection] = []
    spared: dict[str, str] = {}
    for kind in dict.fromkeys(o.kind for o in test.doubts):
        mine = [o for o in test.doubts if o.kind == kind]
        could = [o for o in mine if o.could_make(verdict)]
        if not could:
            spared[kind] = f"without it the candidate would look {'even worse' if verdict == FAIL else 'even better'}"
        elif kind in OF_CELLS and not _too_often(kind, mine, verdict, len(test.numbers)):
            base, cand = (len({o.pair for o in mine if o.arm == arm}) for arm in ("baseline", "candidate"))
            spared[kind] = (
                f"so often, {base} of {len(test.numbers)} cells of the baseline and {cand} of the candidate, it is "
                "noise, which a test over pairs carries"
            )
        elif verdict == FAIL and not _of_one_arm(could, mine):
            spared[kind] = "it is in both cells of those pairs, the same way"
        else:
            against += could
    sized = [o for o in against if o.off is not None]
    if sized and _stands(verdict, test, sized, tests):
        kinds = {o.kind for o in sized}
        spared |= {o.kind: f"with all that it can have done taken off, it is still a {verdict}" for o in sized}
        against = [o for o in against if o.off is None]
        spared = {kind: why for kind, why in spared.items() if kind not in kinds & {o.kind for o in against}}
    return Weighed(against, spared)


def _of_one_arm(could: Sequence[Objection], mine: Sequence[Objection]) -> list[Objection]:
    """Without what flatters, or slanders, both cells of a pair alike: a FAIL takes the arms to differ."""
    known = {(o.arm, o.pair, o.effect) for o in mine if o.effect != EITHER_WAY}
    other: dict[Name | None, Name] = {"baseline": "candidate", "candidate": "baseline"}
    return [o for o in could if (other.get(o.arm), o.pair, o.effect) not in known]


def _too_often(kind: str, mine: Sequence[Objection], verdict: str, n: int) -> bool:
    """Of a kind that comes and goes, in `n` cells an arm: whether one arm has it more often, so that it is no noise.

    A FAIL takes nearly every pair to be worse, and noise of both arms alike does not do that. A PASS is not given where
    a kind is in more cells than chance brings, either: it may hide a difference.
    """

    def cells(arm: Name, *effects: Effect) -> int:
        return len({o.pair for o in mine if o.arm == arm and o.effect in effects})

    arms: tuple[Name, Name] = ("baseline", "candidate")
    flattered, slandered = arms if verdict == FAIL else arms[::-1]
    if _unequal(cells(flattered, TOO_LOW, EITHER_WAY), cells(slandered, TOO_LOW, EITHER_WAY), n):
        return True
    if _unequal(cells(slandered, TOO_HIGH, EITHER_WAY), cells(flattered, TOO_HIGH, EITHER_WAY), n):
        return True
    if verdict == FAIL:
        return False
    if kind == WARMING:
        return any(_chance_of(cells(arm, TOO_LOW, TOO_HIGH, EITHER_WAY), n) <= WARMING_ALPHA for arm in arms)
    known = [o.p for o in mine if o.p is not None]
    if kind == DRIFT and len(known) == len(mine):
        return min(known) <= ALPHA / (2 * n)  # Bonferroni over the cells of the load
    return len({(o.arm, o.pair) for o in mine}) > MOST_CELLS * 2 * n


def _unequal(more: int, less: int, n: int) -> bool:
    """Fisher's exact test, one-sided: `more` of n cells against `less` of n."""
    both = more + less
    ways = sum(math.comb(n, k) * math.comb(n, both - k) for k in range(more, min(n, both) + 1))
    return ways <= UNEQUAL * math.comb(2 * n, both)


def _chance_of(k: int, n: int) -> float:
    """That k or more of n steady cells look like warming."""
    return sum(math.comb(n, i) * WARMING_RATE**i * (1 - WARMING_RATE) ** (n - i) for i in range(k, n + 1))


def _stands(verdict: str, test: Test, sized: Sequence[Objection], tests: int) -> bool:
    """Whether the verdict holds when each figure is moved against it by all that doubts can have done to it."""
    moved = []
    for number, values in zip(test.numbers, test.values, strict=True):
        of_pair = []
        for arm, value in zip(("baseline", "candidate"), values, strict=True):
            mine = [o.off for o in sized if o.arm == arm and o.pair == number and o.off is not None]
            ms, factor = sum(off[0] for off in mine), math.prod(off[1] for off in mine)
            x, smaller = value.value or 0.0, (arm == "candidate") == (verdict == FAIL)
            if test.rule.metric.unit == "ms":
                of_pair.append((x - ms) / factor if smaller else x * factor + ms)
            elif ms or test.rule.points:
                return False  # what a delay does to it is not known
            else:
                of_pair.append(x / factor if smaller == (test.rule.side > 0) else x * factor)
        moved.append(of_pair)
    base, cand = np.array(moved, float).T
    try:
        found = pairs.compare(test.rule.differences(base, cand), test.rule.margin, test.rule.op)
    except ValueError:  # nothing is left of a figure
        return False
    return found.p <= ALPHA / tests if verdict == FAIL else found.verdict == PASS


def detectable(test: Test, tests: int, n_pairs: int | None = None) -> float | None:
    """pairs.detectable for either kind of rule, as a difference; None too where pairs show no noise at all."""
    d, side = test.differences, test.rule.side
    if d is None or not np.ptp(d):
        return None
    reach = pairs.detectable(side * d, side * test.rule.margin, alpha=ALPHA / tests, n_pairs=n_pairs)
    return None if reach is None else side * reach


def _why(test: Test, verdict: str, p: float, tests: int) -> str:
    rule, found = test.rule, test.comparison
    assert found is not None
    change, margin = rule.in_words(found.change), rule.in_words(rule.margin)
    of = f" (Holm, {tests} tests)" if tests > 1 else ""
    if verdict == FAIL:
        return f"{change} is worse than {margin}, p = {p:.2g}{of}"
    if found.bound is None:
        return f"{found.pairs} pair{'s give' if found.pairs != 1 else ' gives'} no bound"
    bound = f"95% bound {rule.in_words(found.bound)}"
    if verdict == PASS:
        return f"{change}, its {bound} is within {margin}"
    if found.verdict == FAIL:
        return f"{change} is worse than {margin} by itself, p = {found.p:.2g}, but not among {tests} tests, p = {p:.2g}"
    if rule.side * found.change > rule.side * rule.margin:
        return f"noise exceeds the margin: {change} is beyond {margin}, but may be chance, p = {p:.2g}{of}"
    return f"noise exceeds the margin: {change}, its {bound} is beyond {margin}; {_more(test)}"


def _more(test: Test) -> str:
    """How many pairs would let equal arms pass, at this spread: by symmetry as many as would find the margin."""
    assert test.differences is not None
    room = test.rule.side * test.rule.margin
    if room <= 0:
        return "equal arms cannot be shown to keep such a margin"
    pairs_needed = _pairs_within(test.differences, room)
    if pairs_needed is None:
        return (
            f"equal arms of this spread would not pass with {MOST_PAIRS} pairs: use a quieter machine or a wider margin"
        )
    return f"with {pairs_needed} pairs of this spread equal arms would pass in 90%"


def _pairs_within(d: np.ndarray, room: float) -> int | None:
    """The fewest pairs, at least as many as `d` (n,) has, that find a change of `room`; None over MOST_PAIRS."""
    few, many = len(d) - 1, MOST_PAIRS  # `few` do not do, `many` do
    if (pairs.detectable(d, 0.0, n_pairs=many) or math.inf) > room:
        return None
    while many - few > 1:
        middle = (few + many) // 2
        if (pairs.detectable(d, 0.0, n_pairs=middle) or math.inf) > room:
            few = middle
        else:
            many = middle
    return many
