"""Pairs of cells against rules: PASS, FAIL or INCONCLUSIVE of each rule at each load, and of all of them.

The unit is the pair (METRICS.md, Statistics): requests of one run are no sample.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from llm_bench import metrics, pairs
from llm_bench.columns import Cell
from llm_bench.errors import BenchError
from llm_bench.metrics import WHOLE, Metric, Value
from llm_bench.pairs import ALPHA, FAIL, INCONCLUSIVE, PASS, Comparison
from llm_bench.rules import NEEDS_SLO, Rule
from llm_bench.series import NOTHING, SERIES, Context
from llm_bench.windows import Window

NOT_INTERLEAVED, OTHER_WORK, MISSING = "not interleaved", "not the same work", "missing cell"

# Doubts about a cell that are no reason against comparing it with another, and why.
HARMLESS: Mapping[str, str] = {
    "too few requests": "it is about the interval of one run; here the spread between pairs decides",
    "lengths not pinned": "what the arms delivered is compared itself",
    "end unproven": "a server that never says it is the same in both arms, and what they delivered is compared",
    "retries": "latency runs from the first attempt, so that it holds them",
    "trace changed": "what the arms sent is compared itself",
}
# Doubts of which a user may say that they are meant so. Others are about the figures themselves.
ACCEPTABLE: tuple[str, ...] = (NOT_INTERLEAVED, "targets differ", "network path", "delivered tokens", "prompt tokens")
ACCEPTABLE += ("repeated prompts", "cached prompts")
FAILED, ESTIMATED = "failed requests", "estimated tokens"  # against some metrics only
COUNT_FAILURES = ("error_rate", "first_attempt_success", "drop_rate", *NEEDS_SLO)  # of others the failed are left out

MOST_PAIRS = 48  # looked at when saying how many would decide


class Objection(NamedTuple):
    """A doubt and what it is about, for instance `cand, pair 3`; `load` "" is every load."""

    load: str
    where: str
    kind: str
    text: str


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
    objections: list[Objection]

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
    accepted: tuple[str, ...]  # kinds of doubts that the user says are meant so

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
        for i, rule in enumerate(rules):
            values = [(base[i], cand[i]) for base, cand in sides]
            against = [o for o in objections if o.load in ("", load) and counts(o.kind, rule.metric, accepted)]
            tests.append(_test(rule, load, [p.number for p in mine], values, against, names))
    return Gate(*names, _verdicts(tests), list(objections), tuple(accepted))


def check_enough(counted: Mapping[str, int], rules: int) -> None:
    """Pairs of each load, and rules. Raises BenchError."""
    tests = len(counted) * rules
    least = pairs.needed(tests) if tests else 0
    for load, n in counted.items():
        if n < least:
            raise BenchError(
                f"{n} pairs at {load}, and {tests} tests (rules x loads) need {least} at least: with fewer no change, "
                f"however large, is significant. Measure {least} pairs or more (--repeat)"
            )


def _values(side: Side, rules: Sequence[Rule], context: Context) -> list[Value]:
    return metrics.compute_all([rule.metric.name for rule in rules], side.cell, side.window, context)


def counts(kind: str, metric: Metric, accepted: Sequence[str] = ()) -> bool:
    """Whether a doubt of a kind is a reason against a verdict on a metric. A kind not known here is."""
    if kind in HARMLESS or kind in accepted:
        return False
    if kind == FAILED:
        return metric.name not in COUNT_FAILURES
    if kind == ESTIMATED:
        return bool(SERIES[metric.of].counts_tokens if metric.reducer else WHOLE[metric.of].tokens_of)
    return True


def _test(
    rule: Rule,
    load: str,
    numbers: list[int],
    values: list[tuple[Value, Value]],
    against: list[Objection],
    names: tuple[str, str],
) -> Test:
    """Without its verdict, which depends on the others; `why` says only what is undefined."""
    for number, of_pair in zip(numbers, values, strict=True):
        for name, value in zip(names, of_pair, strict=True):
            if value.value is None:
                why = f"{value.name} of {name} in pair {number} is undefined: {value.reason}"
                return Test(rule, load, numbers, values, None, None, None, INCONCLUSIVE, why, None, against)
    base, cand = (np.array([v[i].value for v in values], float) for i in (0, 1))
    try:
        d = rule.differences(base, cand)
    except ValueError as e:
        return Test(rule, load, numbers, values, None, None, None, INCONCLUSIVE, str(e), None, against)
    return Test(rule, load, numbers, values, d, pairs.compare(d, rule.margin, rule.op), None, "", "", None, against)


def _verdicts(tests: Sequence[Test]) -> list[Test]:
    """Holm's family is every test that was asked for; one that cannot be judged is in it with p = 1.

    A doubtful one says beside its INCONCLUSIVE what it would be, were none of them doubtful.
    """
    raw = [1.0 if t.comparison is None else t.comparison.p for t in tests]
    sure = [1.0 if t.objections else p for t, p in zip(tests, raw, strict=True)]
    out = []
    for test, adjusted, would_be in zip(tests, pairs.holm(sure), pairs.holm(raw), strict=True):
        p = would_be if test.objections else adjusted
        if test.comparison is None or test.differences is None:
            out.append(test)
            continue
        verdict = INCONCLUSIVE if test.comparison.verdict == FAIL and p > ALPHA else test.comparison.verdict
        why = _why(test, verdict, p, len(tests))
        if test.objections:
            kinds = ", ".join(dict.fromkeys(o.kind for o in test.objections))
            why, verdict = f"doubt: {kinds} (else {verdict}: {why})", INCONCLUSIVE
        out.append(test._replace(p=p, verdict=verdict, why=why, detectable=detectable(test, len(tests))))
    return out


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
        return f"{found.pairs} pairs give no bound"
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
        return f"equal arms of this spread would not pass with {MOST_PAIRS} pairs: a quieter machine, or a wider margin"
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
