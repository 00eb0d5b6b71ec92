"""Cells that repeat each other: what one target at one load shows over several runs, and how far they lie apart.

Each run is one observation: its own figures are computed first, and their spread over the runs is the uncertainty
(METRICS.md, Statistics). Requests of several runs are never thrown together.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np

from llm_bench.doubts import Doubt
from llm_bench.interference import SEVERAL_RUNS, Factor
from llm_bench.metrics import Value
from llm_bench.objectives import Limit, Verdict
from llm_bench.outcomes import Failure
from llm_bench.results import ClassSheet, Sheet
from llm_bench.stats import Interval

LEAST_RUNS = 5  # fewer say too little of their own spread (METRICS.md)
_WORST: tuple[Verdict, ...] = ("MISSED", "UNDECIDED", "MET")


class Limited(NamedTuple):
    """A limit of the SLO over several runs."""

    limit: Limit
    verdict: Verdict  # the worst of any run
    runs: dict[Verdict, int]  # how many runs say what, the worst first


class Group(NamedTuple):
    """The cells of one target at one load, by pair; a single one where nothing was repeated, with its own figures."""

    target: str
    load: str
    sheets: list[Sheet]
    values: list[Value]
    outcomes: dict[str, int]  # of all its runs
    by_class: dict[str, ClassSheet]

    @property
    def runs(self) -> int:
        return len(self.sheets)

    def range_of(self, name: str) -> tuple[float, float] | None:
        """The least and the largest figure of any run; None where a run has none."""
        found = [v.value for sheet in self.sheets for v in sheet.values if v.name == name and v.value is not None]
        return (min(found), max(found)) if len(found) == self.runs else None

    def doubts(self) -> list[Doubt]:
        """Each kind once, with the runs that give rise to it and the text of the first of them."""
        if self.runs == 1:
            return self.sheets[0].doubts
        found: dict[str, dict[int | None, Doubt]] = {}
        for sheet in self.sheets:
            for doubt in sheet.doubts:
                found.setdefault(doubt.kind, {}).setdefault(sheet.measured.pair, doubt)
        out = []
        for of_kind in found.values():
            run, doubt = next(iter(of_kind.items()))
            first = "" if run is None else f", first in run {run + 1}"
            out.append(doubt._replace(text=f"in {len(of_kind)} of {self.runs} runs{first}: {doubt.text}"))
        return out

    def failures(self) -> list[Failure]:
        """Of all its runs, by kind: counts are sums, the text is that of the first run that has one."""
        found: dict[str, Failure] = {}
        for failure in (f for sheet in self.sheets for f in sheet.failures):
            before = found.get(failure.kind, failure._replace(requests=0, statuses={}))
            statuses = Counter(before.statuses) + Counter(failure.statuses)
            counted = before.requests + failure.requests
            found[failure.kind] = before._replace(requests=counted, statuses=dict(statuses.most_common()))
        return list(found.values())

    def limits(self) -> list[Limited]:
        """Every limit, judged in each run alone: a run that missed it is not made up for by another."""
        out = []
        for of_limit in zip(*(sheet.judged for sheet in self.sheets), strict=True):
            said = Counter(judged.verdict for judged in of_limit)
            runs = {verdict: said[verdict] for verdict in _WORST if said[verdict]}
            out.append(Limited(of_limit[0].limit, next(iter(runs)), runs))
        return out


def groups(sheets: Iterable[Sheet], *, apart: bool = False) -> list[Group]:
    """The cells of one run, in their order; those of one target at one load that are its repeats stand together.

    `apart`: each cell is a group of its own, whose load says which run of it it is.
    """
    found: dict[tuple[str, str, str], list[Sheet]] = {}
    for sheet in sheets:
        m = sheet.measured
        alone = m.name if apart or m.pair is None or not m.listed else ""
        load = m.load_and_run if apart else m.load
        found.setdefault((m.target, load, alone), []).append(sheet)
    return [
        _group(target, load, sorted(mine, key=lambda s: s.measured.pair or 0))
        for (target, load, _), mine in found.items()
    ]


def _group(target: str, load: str, mine: list[Sheet]) -> Group:
    if len(mine) == 1:
        return Group(target, load, mine, mine[0].values, mine[0].outcomes, mine[0].by_class)
    classes = dict.fromkeys(name for sheet in mine for name in sheet.by_class)
    by_class = {}
    for name in classes:
        of_class = [sheet.by_class[name] for sheet in mine if name in sheet.by_class]
        alone = [of.alone for of in of_class if of.alone is not None]
        by_class[name] = ClassSheet(
            _over([of.values for of in of_class]),
            _summed([of.outcomes for of in of_class]),
            _over(alone) if len(alone) == len(mine) else None,
            _factors([of.factors for of in of_class if of.factors], len(mine)),
        )
    return Group(
        target, load, mine, _over([sheet.values for sheet in mine]), _summed([s.outcomes for s in mine]), by_class
    )


def _over(of_runs: Sequence[Sequence[Value]]) -> list[Value]:
    return [over_runs(of_metric) for of_metric in zip(*of_runs, strict=True)]


def _factors(of_runs: Sequence[Sequence[Factor]], runs: int) -> tuple[Factor, ...]:
    """`of_runs`: of those of the `runs` that have any."""
    return tuple(factor_over_runs(of_metric, runs) for of_metric in zip(*of_runs, strict=True))


def _summed(of_runs: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: sum(of[name] for of in of_runs) for name in of_runs[0]}


def over_runs(values: Sequence[Value]) -> Value:
    """One metric over several runs: the mean of their figures, and the 95% t interval of that mean over the runs.

    `n` is of all runs. None where any run has no figure: the mean of the others would be of the runs that went well. In
    the all-requests reading one "error" is one of them all.
    """
    first, runs = values[0], len(values)
    found = [v.value for v in values if v.value is not None]
    labels = tuple(dict.fromkeys(label for v in values for label in v.labels))
    missing = Counter[str]()
    for v in values:
        missing.update(v.not_applicable)
    n = sum(v.n for v in values)
    if len(found) < runs:
        lacking = next(v for v in values if v.value is None)
        some = f"{runs - len(found)} of {runs} runs have" if found else f"none of {runs} runs has"
        reason = f"{some} {'none' if found else 'one'}: {lacking.reason}"
        return Value(first.name, first.unit, None, n, reason, labels, missing)
    low_high = interval(np.array(found), most=1.0 if first.unit == "share" else math.inf)
    return Value(
        first.name,
        first.unit,
        float(np.mean(found)),
        n,
        "",
        (f"mean of {runs} runs", *labels),
        missing,
        _all_requests(values),
        None,
        None if isinstance(low_high, str) else low_high,
        low_high if isinstance(low_high, str) else "",
    )


def factor_over_runs(found: Sequence[Factor], runs: int) -> Factor:
    """A class's factor over runs, each a pair of its figures together and alone, of which `found` have them.

    The geometric mean of the runs' factors, and the 95% t interval of the mean of their logarithms: twice and half as
    slow are as far from 1. None where any run has none.
    """
    first = found[0]
    known = [f.value for f in found if f.value is not None and f.value > 0]
    together, alone = (_mean_of_all(of, runs) for of in ([f.together for f in found], [f.alone for f in found]))
    made = Factor(first.name, first.unit, together, alone, None, confidence=SEVERAL_RUNS, runs=runs)
    if len(known) < runs:
        lacking = next((f for f in found if not f.value), None)
        why = "the class was not measured alone" if lacking is None else lacking.reason or "it is 0"
        return made._replace(reason=f"{runs - len(known)} of {runs} runs have none: {why}")
    logs = np.log(known)
    made = made._replace(value=float(np.exp(logs.mean())))
    if runs < LEAST_RUNS:
        return made._replace(refusal=_few(runs))
    half = student_t(runs - 1) * float(np.std(logs, ddof=1)) / math.sqrt(runs)
    return made._replace(interval=Interval(*np.exp([logs.mean() - half, logs.mean() + half]).tolist()))


def _mean_of_all(figures: Sequence[float | None], runs: int) -> float | None:
    known = [x for x in figures if x is not None]
    return float(np.mean(known)) if len(known) == runs else None


def _all_requests(values: Sequence[Value]) -> float | Literal["error"] | None:
    every = [v.value if v.all_requests is None else v.all_requests for v in values]
    if all(v.all_requests is None for v in values):
        return None
    numbers = [x for x in every if isinstance(x, float | int)]
    return float(np.mean(numbers)) if len(numbers) == len(every) else "error"


def interval(figures: np.ndarray, most: float = math.inf) -> Interval | str:
    """The 95% interval of the mean of one figure a run (n,), by Student's t over the runs; or why there is none.

    No figure of a run is below 0 or over `most`, and so is no bound.
    """
    runs = len(figures)
    if runs < LEAST_RUNS:
        return _few(runs)
    middle, half = float(np.mean(figures)), student_t(runs - 1) * float(np.std(figures, ddof=1)) / math.sqrt(runs)
    return Interval(max(middle - half, 0.0), min(middle + half, most))


def _few(runs: int) -> str:
    return f"{runs} runs, {LEAST_RUNS} are needed for an interval of their spread"


def student_t(freedom: int, conf: float = 0.95) -> float:
    """Two-sided quantile of Student's t, to 0.04% from 4 degrees of freedom on: the normal one and four corrections.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    z = NormalDist().inv_cdf((1 + conf) / 2)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return float(sum(term / freedom**power for power, term in enumerate(terms)))
