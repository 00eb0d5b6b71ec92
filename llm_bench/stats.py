"""Percentiles, effective sample size and the intervals that may be printed; numpy only, no clock, no I/O."""

import math
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np

BATCHES = (10, 20, 40)  # batch counts tried; the one that shows the most dependence counts
T9 = 2.262  # two-sided 95% of Student's t with 9 degrees of freedom, those of the coarsest batching
LEAST_ESS = 150.0  # below it over 10% of printed intervals missed the truth in simulated queues (METRICS.md)


class Interval(NamedTuple):
    low: float
    high: float


def percentile(values: np.ndarray, q: float) -> float:
    """The q-quantile (0 <= q <= 1) by numpy's `linear` method (type 7 of Hyndman and Fan, Am. Stat. 50(4), 1996)."""
    return float(np.quantile(values, q))


def percentile_all(values: np.ndarray, failures: int, q: float) -> float | Literal["error"] | None:
    """The q-quantile when each of `failures` requests ranks above every latency.

    "error" where the rank above q(N - 1) is a failure; None without any request. Nothing is computed on infinity.
    """
    n = len(values) + failures
    if not failures or not n:
        return percentile(values, q) if n else None
    at = round(q * (n - 1), 9)  # 0.07 * 100 is 7.000000000000001, and its ceiling must be 7
    below, above = math.floor(at), math.ceil(at)
    if above >= len(values):
        return "error"
    ranks = np.partition(values, (below, above))
    return float(ranks[below] + (ranks[above] - ranks[below]) * (at - below))


def ess(values: np.ndarray, q: float, groups: np.ndarray | None = None) -> float:
    """Effective sample size for the q-quantile of `values` in due order, 0 < q < 1.

    Batch means of I = [x <= q-quantile] (Heidelberger and Lewis, Oper. Res. 32(1), 1984). `groups` (n,),
    non-decreasing, names the request of each value where one request gives several: they stay in one batch.
    """
    if not len(values):
        return 0.0
    return ess_of(values <= percentile(values, q), q * (1 - q), groups)


def ess_of(indicator: np.ndarray, variance: float, groups: np.ndarray | None = None) -> float:
    """n / tau of a 0/1 series in due order whose independent variance would be `variance`; tau >= 1."""
    n = len(indicator)
    if groups is not None:
        return _ess_of_groups(indicator, variance, groups)
    taus = [1.0]
    for m in BATCHES:
        length = n // m
        if length:
            means = indicator[: m * length].reshape(m, length).mean(axis=1)
            taus.append(float(np.var(means, ddof=1)) * length / variance)
    return n / max(taus)


def _ess_of_groups(indicator: np.ndarray, variance: float, groups: np.ndarray) -> float:
    """The same with batches that end where a group ends. Too few groups to batch: each counts as one sample."""
    n = len(indicator)
    starts = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]]))
    sums, sizes = np.add.reduceat(indicator, starts, dtype=np.int64), np.diff(np.append(starts, n))
    taus = []
    for m in BATCHES:
        batch = starts * m // n
        weight = np.bincount(batch, sizes, m)
        if weight.all():
            taus.append(float(np.var(np.bincount(batch, sums, m) / weight, ddof=1)) * (n / m) / variance)
    return n / max([1.0, *taus]) if taus else float(len(starts))


def interval(
    values: np.ndarray, q: float, groups: np.ndarray | None = None, samples: float | None = None
) -> Interval | str:
    """The 95% interval of the q-quantile of `values` in due order, or the reason in words why there is none.

    q ± t9 · sqrt(q(1 - q) / ESS) on the probability axis, read off the sorted sample (METRICS.md, Statistics).
    `samples`: their ESS, where it is known already.
    """
    n, name = len(values), percent_name(q)
    if n < 2:
        return f"{name} of {n}: no interval"
    if among_largest(q, n):
        return f"{name} of {n} lies between the two largest: no upper bound (at least {least_n_for_max(q)} needed)"
    samples = ess(values, q, groups) if samples is None else samples
    if samples < LEAST_ESS:
        return f"{name}: ESS {samples:.0f} of {n}, under {LEAST_ESS:.0f}: no interval can be trusted"
    half = T9 * math.sqrt(q * (1 - q) / samples)
    if q + half >= 1:
        return f"{name}: ESS {samples:.0f} of {n} gives no upper bound"
    if q - half <= 0:
        return f"{name}: ESS {samples:.0f} of {n} gives no lower bound"
    low, high = np.quantile(values, (q - half, q + half))
    return Interval(float(low), float(high))


def wilson(k: float, n: float, conf: float = 0.95) -> Interval:
    """Two-sided score interval of a share k / n (Wilson, JASA 22, 1927); n may be an effective size. 0 < n."""
    z2 = NormalDist().inv_cdf((1 + conf) / 2) ** 2
    p = k / n
    middle = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (p * (1 - p) + z2 / (4 * n)) / n) / (1 + z2 / n)
    # At k = 0 and k = n the bound is exactly 0 and 1; rounding would leave 1e-17.
    return Interval(0.0 if k <= 0 else middle - half, 1.0 if k >= n else middle + half)


def among_largest(q: float, n: int) -> bool:
    """Whether the q-quantile of n samples lies between their two largest, or is the only one."""
    return (1 - q) * (n - 1) < 1


def least_n_for_max(q: float, conf: float = 0.95) -> int:
    """How many independent samples until their maximum is an upper bound of the q-quantile: 1 - q^n >= conf."""
    return math.ceil(math.log(1 - conf) / math.log(q))


def percent_name(q: float) -> str:
    """0.95 -> p95, 0.999 -> p99.9: how a quantile is said in reports."""
    return f"p{q * 100:.10g}"
