"""Two arms compared pair by pair: exact sign flips, the bounds that invert them, Holm, pairs needed; numpy, no I/O."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"
ALPHA = 0.05
EXACT_PAIRS = 16  # up to 65,536 sign flips are all tried; with more pairs as many are drawn
DRAWN = 2**EXACT_PAIRS - 1
SEED = 38  # of the sign flips drawn and of the noise in `detectable`: the same data give the same verdict everywhere
NOISES = 2000  # simulated comparisons behind `detectable`
TIE = 1e-12  # relative: differences that are equal on paper must tie

Rule = Literal["<=", ">="]  # the change is to be at most, or at least, the margin


class Comparison(NamedTuple):
    """What pairs say of one rule. Changes are in the unit of the differences; a bound is None with too few pairs."""

    verdict: str
    p: float  # one-sided, of a change beyond the margin
    p_worse: float  # the same against no change: is it worse at all?
    change: float  # the mean difference
    low: float | None  # two-sided 95% interval of the change
    high: float | None
    bound: float | None  # one-sided 95%, on the side that the rule limits: PASS where it keeps the margin
    pairs: int


def sign_flip(d: np.ndarray, margin: float = 0.0, rule: Rule = "<=") -> float:
    """One-sided p of the differences `d` (n,) against a true change that keeps the rule: `<= margin` or `>= margin`.

    Pairs whose arms are equal but for `margin` are as likely to differ either way, so each sign of d - margin may be
    flipped; p is the share of the 2^n flips whose sum is at least as far on the wrong side (Fisher, Design of
    Experiments, 1935). Over EXACT_PAIRS pairs DRAWN random flips and the one seen stand for all (Phipson and Smyth,
    SAGMB 9, 2010).
    """
    side = 1 if rule == "<=" else -1
    return _p(_subset_means(side * d), side * margin, _tie(d, margin))


def log_ratios(baseline: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """d (n,) of a % rule, whose margin is then log(1 + x). ValueError for a figure that has no logarithm."""
    for of, figures in (("baseline", baseline), ("candidate", candidate)):
        if not (np.isfinite(figures) & (figures > 0)).all():
            raise ValueError(f"{of} {figures.tolist()}: a change in percent needs figures above 0")
    return np.asarray(np.log(candidate / baseline))


def bound(d: np.ndarray, alpha: float = ALPHA) -> float | None:
    """The one-sided 1 - alpha upper bound of the change: the least upper limit of the changes that are not rejected.

    Flipping the signs of a subset S moves the sum below zero exactly where the mean of S does, so the test inverts to
    order statistics of the 2^n - 1 subset means (Hartigan, JASA 64, 1969). None where n pairs can reject nothing.
    """
    means = _subset_means(d)
    k = int(alpha * (len(means) + 1))
    return float(np.partition(means, len(means) - k)[len(means) - k]) if k else None


def compare(d: np.ndarray, margin: float, rule: Rule = "<=") -> Comparison:
    """The verdict on one rule, from differences (n,) candidate against baseline: log ratios or, in points, plain ones.

    FAIL where the test of d - margin rejects at ALPHA; PASS where the one-sided 95% bound keeps the margin; else
    INCONCLUSIVE. Of several rules: `holm`. 0 < n; ValueError where a difference is not finite.
    """
    if not len(d) or not np.isfinite(d).all():
        raise ValueError(f"differences {d.tolist()}: expected one or more finite numbers")
    side = 1 if rule == "<=" else -1
    worst = bound(side * d)
    low, high = bound(-d, ALPHA / 2), bound(d, ALPHA / 2)
    p = sign_flip(d, margin, rule)
    return Comparison(
        verdict(p, worst, side * margin, _tie(d, margin)),
        p,
        sign_flip(d, 0.0, rule),
        float(np.mean(d)),
        None if low is None else -low,
        high,
        None if worst is None else side * worst,
        len(d),
    )


def verdict(p: float, worst: float | None, margin: float, tie: float = 0.0) -> str:
    """FAIL, PASS or INCONCLUSIVE from the p of a change beyond the margin and the bound; larger is worse."""
    if p <= ALPHA:
        return FAIL
    return PASS if worst is not None and worst <= margin + tie else INCONCLUSIVE


def holm(p: Sequence[float]) -> list[float]:
    """p adjusted for all the tests made, in their order: reject where <= alpha (Holm, Scand. J. Stat. 6, 1979)."""
    adjusted, least = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        least = max(least, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = least
    return adjusted


def judge(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The comparisons of one gate, each p by Holm over them all, with the verdict that then holds.

    Only a FAIL has to pay for the number of tests: PASS is said where every bound keeps its margin, and no more than
    alpha of the gates that should not pass all their rules do (Berger, Technometrics 24, 1982).
    """
    out = []
    for one, p in zip(comparisons, holm([c.p for c in comparisons]), strict=True):
        failed = one.verdict == FAIL and p > ALPHA
        out.append(one._replace(p=p, verdict=INCONCLUSIVE if failed else one.verdict))
    return out


def needed(tests: int, alpha: float = ALPHA) -> int:
    """Pairs with which the strictest of Holm's tests can reject at all: 2^-n <= alpha / tests. 0 < tests."""
    return math.ceil(math.log2(tests / alpha))


def detectable(
    d: np.ndarray, margin: float, power: float = 0.9, alpha: float = ALPHA, n_pairs: int | None = None
) -> float | None:
    """The smallest true change that `n_pairs`, or as many as `d` (n,) has, call FAIL with chance `power` at `margin`.

    Their noise is taken to be normal with the standard deviation of `d`. `alpha`: 0.05 over the number of tests.
    None where so many pairs can reject nothing, or one pair shows no noise. For `>=` rules: of -d and -margin.
    """
    reach = _reach(n_pairs or len(d), power, alpha)
    if reach is None or len(d) < 2:
        return None
    return margin + reach * float(np.std(d, ddof=1))


@lru_cache
def _reach(n: int, power: float, alpha: float) -> float | None:
    """How many standard deviations beyond the margin a change must lie to be found with chance `power`, by n pairs.

    The test rejects where its lower bound, a low subset mean, is over the margin; shifting every pair shifts it alike.
    """
    subsets = _subsets(n, 1023)  # with more pairs a drawn thousand serve: how far they reach hardly depends on it
    k = int(alpha * (len(subsets) + 1))
    if not k:
        return None
    noise = _random(n).standard_normal((n, NOISES))
    means = (subsets @ noise) / subsets.sum(axis=1, keepdims=True)
    return -float(np.quantile(np.partition(means, k - 1, axis=0)[k - 1], 1 - power))


def _p(means: np.ndarray, margin: float, tie: float) -> float:
    """A flip is as extreme as what was seen where the flipped subset's mean is at most the margin, or it is empty."""
    return (1 + int((means <= margin + tie).sum())) / (1 + len(means))


def _tie(d: np.ndarray, margin: float) -> float:
    return TIE * (float(np.abs(d).max()) + abs(margin))


def _subset_means(d: np.ndarray) -> np.ndarray:
    subsets = _subsets(len(d), DRAWN)
    return np.asarray((subsets @ d) / subsets.sum(axis=1))


@lru_cache(maxsize=4)
def _subsets(n: int, most: int) -> np.ndarray:
    """(s, n) of 0 and 1: every subset of n but the empty one or, where they are over `most`, so many drawn."""
    if 2**n - 1 <= most:
        return ((np.arange(1, 2**n)[:, None] >> np.arange(n)) & 1).astype(float)
    drawn = _random(n).integers(0, 2, (most + most // 64 + 64, n))
    return drawn[drawn.any(axis=1)][:most].astype(float)


def _random(n: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([SEED, n])))
