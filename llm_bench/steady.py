"""Where a cell's steady state begins and whether it is one: MSER-5, Mann-Kendall trends, drift; numpy only, no I/O."""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from llm_bench import stats

MSER_BATCH = 5
WORTH = 1.25  # a cut past the warm-up counts where the squared error at the warm-up is that many times the least
ALPHA = 0.05
SAMPLES = 200  # moments at which the levels of an open loop are read: 19,900 pairs, 10 a batch of the coarsest ESS
DRIFT_BATCHES = 20
SWINGS = 2.0  # the backlog grows by more than so many times the chance swing of that many Poisson bursts
LEAST_SHARE_OF_LINE = 0.5  # of what a straight line gives to the later part; a system that only fills keeps less


class Start(NamedTuple):
    """Where MSER-5 cuts: `cut` requests are warm-up. `too_short`: the least is at half of them, so no cut is known.

    `late`: the cut is past the warm-up given, and to cut there is worth it.
    """

    cut: int
    statistic: float
    too_short: bool
    late: bool


class Trend(NamedTuple):
    """Mann-Kendall: S, its standard score, the chance of as high a one without a trend, Sen's slope a step, the ESS."""

    s: int
    z: float
    p: float  # one-sided, upward
    slope: float
    ess: float

    @property
    def p_two_sided(self) -> float:
        return min(1.0, 2 * min(self.p, 1 - self.p))


class Growth(NamedTuple):
    """Whether the backlog of an open loop grows without bound, by how many requests a second, and what said so."""

    growing: bool
    per_second: float  # Sen's slope of what is in the system; a figure even where it does not count as growing
    in_flight: Trend
    in_system: Trend
    gained: int  # arrivals minus completions, from the first moment to the last
    swing: float  # what it had to exceed


class Drift(NamedTuple):
    """Whether the batches of a closed loop drift, either way, and what said so."""

    drifting: bool
    p: float  # two-sided, of both series together
    latency: Trend
    rate: Trend


def mser5(latency: np.ndarray, warmup: int = 0) -> Start:
    """The start of the steady state of `latency` (n,), in due order, of which the first `warmup` are left out anyway.

    Batches of 5; the cut d <= n/2 that makes the squared standard error of the mean of what is left least (White,
    Simulation 69(6), 1997; White, Cobb and Spratt, WSC 2000). Up to four requests at the end are in no batch.

    The error is reckoned as if batches were independent, so that the swings of a busy queue look like warm-up: a bare
    "past the warm-up" doubts up to half of the steady runs. Two things help (reports/statistics): e2e rather than TTFT,
    which is nearly all waiting, and WORTH.
    """
    batches = len(latency) // MSER_BATCH
    furthest = len(latency) // 2 // MSER_BATCH
    if not furthest:
        return Start(0, 0.0, True, False)
    means = latency[: batches * MSER_BATCH].reshape(batches, MSER_BATCH).mean(axis=1)
    away = means - means.mean()
    left = np.arange(batches, batches - furthest - 1, -1)  # batches that each cut leaves
    total = np.cumsum(away[::-1])[::-1][: furthest + 1]
    squares = np.cumsum(away[::-1] ** 2)[::-1][: furthest + 1]
    spread = squares - total**2 / left
    # Equal values have no spread; what rounding leaves of it must not choose the cut.
    spread[spread <= 1e-12 * batches * float(np.abs(means).max()) ** 2] = 0.0
    statistic = spread / left**2
    cut = int(np.argmin(statistic))
    given = min(-(-warmup // MSER_BATCH), furthest)
    late = cut > given and bool(statistic[given] > WORTH * statistic[cut])
    return Start(cut * MSER_BATCH, float(statistic[cut]), cut == furthest, late)


def mann_kendall(values: np.ndarray, ess_correct: bool = True) -> Trend:
    """Is there a trend in `values` (n,), taken at equal steps? n from 2 to some thousands: every pair is compared.

    Mann (Econometrica 13, 1945) with Kendall's variance for ties and a continuity correction; the slope is Sen's (JASA
    63, 1968). Neighbours that are alike make S swing more: its variance is multiplied by n / ESS, as Hamed and Rao (J.
    Hydrology 204, 1998) do, with the ESS of batch means of the values themselves. Theirs are of what is left when the
    trend is taken out, which calls more queues without a trend growing (reports/statistics). The price: z <= 4.5.
    """
    n = len(values)
    if n < 2:
        raise ValueError(f"a trend of {n} values: at least 2 needed")
    early, late = np.triu_indices(n, 1)
    rises = values[late] - values[early]
    s = int(np.sign(rises).sum())
    slope = float(np.median(rises / (late - early)))
    _, ties = np.unique(values, return_counts=True)
    variance = (n * (n - 1) * (2 * n + 5) - int((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    spread = float(np.var(values, ddof=1))
    if variance <= 0 or spread == 0:
        return Trend(s, 0.0, 0.5, slope, float(n))  # equal values lean neither way
    samples = stats.ess_of(values, spread) if ess_correct else float(n)
    z = (s - float(np.sign(s))) / math.sqrt(variance * n / samples)
    return Trend(s, z, NormalDist().cdf(-z), slope, samples)


def growth(
    at_s: np.ndarray,
    in_flight: np.ndarray,
    in_system: np.ndarray,
    due_s: np.ndarray,
    filled_s: float = -math.inf,
    limit: int | None = None,
) -> Growth:
    """Does the backlog of an open loop grow without bound?

    `at_s` (m,): moments at equal steps over the window, SAMPLES of them. `in_flight`, `in_system` (m,): requests sent
    and not ended, due and not ended (dropped ones never end) at each: the second changes by arrivals minus completions.
    `due_s`: when each arrival of the window was due. `filled_s`: until then a system that began empty fills.
    `limit`: how many may be in flight; where that is reached in flight cannot rise, and its trend is not asked.

    Growing needs all of three, for each alone is fooled: the trends by a slow swing of a stable queue in a short
    window, what is gained by the filling of an empty system, both by one late burst.
    1. Mann-Kendall upward in both series, p <= 0.05 each.
    2. More gained than twice the chance swing of the arrivals, the root of the sum of squares of arrivals at one
       moment: a stable queue gains about nothing in the long run.
    3. The later part, the second half or what is after `filled_s`, gains at least half of a straight line's share.
    """
    flight, system = mann_kendall(in_flight), mann_kendall(in_system)
    step_s = float(at_s[-1] - at_s[0]) / (len(at_s) - 1)
    bursts = np.unique(due_s, return_counts=True)[1].astype(float)
    gained, swing = int(in_system[-1] - in_system[0]), SWINGS * math.sqrt(float((bursts**2).sum()))
    later = max(len(at_s) // 2, int(np.searchsorted(at_s, filled_s)))
    growing = flight.p <= ALPHA or (limit is not None and bool(np.median(in_flight[len(at_s) // 2 :]) >= limit))
    growing = growing and system.p <= ALPHA and gained > swing and later < len(at_s) - 1
    if growing:
        share = (len(at_s) - 1 - later) / (len(at_s) - 1)
        growing = bool(in_system[-1] - in_system[later] >= LEAST_SHARE_OF_LINE * share * gained)
    return Growth(growing, system.slope / step_s, flight, system, gained, swing)


def drift(latency: np.ndarray, ended_s: np.ndarray, start_s: float, end_s: float) -> Drift | None:
    """Do the means of 20 batches of a closed loop's window drift, in latency or in completion rate?

    `latency` (n,) in due order; `ended_s`: when requests ended within [start_s, end_s). Batches are of equal counts
    for latency, of equal times for the rate. Either trend counts, up or down, p <= 0.025 each (Bonferroni). None with
    under two requests a batch.
    """
    each = len(latency) // DRIFT_BATCHES
    if each < 2 or len(ended_s) < 2 * DRIFT_BATCHES:
        return None
    means = latency[: each * DRIFT_BATCHES].reshape(DRIFT_BATCHES, each).mean(axis=1)
    counts = np.histogram(ended_s, DRIFT_BATCHES, (start_s, end_s))[0]
    slow, rate = mann_kendall(means), mann_kendall(counts * (DRIFT_BATCHES / (end_s - start_s)))
    p = min(1.0, 2 * min(slow.p_two_sided, rate.p_two_sided))
    return Drift(p <= ALPHA, p, slow, rate)
