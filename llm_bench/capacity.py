"""Capacity arithmetic: Little's law, ceilings and which binds, replicas and spares, growth, cost (METRICS.md).

Rates are requests a second, times seconds, sizes bytes, prices per hour in whatever money the user means.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

HOURS_S = 3600
DAYS = {"day": 1.0, "week": 7.0, "month": 365.2425 / 12, "year": 365.2425}  # mean Gregorian lengths


# ---- Little's law and ceilings


def ceiling(tokens_per_second: float, tokens_per_answer: float) -> float:
    """lambda_max: answers a second that a token rate makes. 18,000 tokens/s / 450 = 40/s."""
    return tokens_per_second / tokens_per_answer


def sustainable(most: float, utilization: float) -> float:
    """What of a ceiling is planned with: queues grow without bound as it is approached. 40/s x 0.7 = 28/s."""
    return most * utilization


def concurrency(rate: float, stay_s: float) -> float:
    """L = lambda W: 28/s x 6 s = 168 in flight (Little, Oper. Res. 9(3), 1961)."""
    return rate * stay_s


def rate_of(in_flight: float, stay_s: float) -> float:
    """lambda = L / W: 64 in flight that stay 3 s each are at most 21.33/s."""
    return in_flight / stay_s


def memory_roof(bandwidth: float, weights: float, cache: float, sequences: float) -> float:
    """Output tokens/s that memory bandwidth allows: each decode step reads all weights and the whole cache once and
    makes one token a sequence. `cache`: bytes of the sequences together.
    """
    return sequences * bandwidth / (weights + cache)


class Ceiling(NamedTuple):
    """A limit on the rate of one replica, and the arithmetic behind it."""

    name: str
    rate: float
    how: str


def binding(ceilings: Sequence[Ceiling]) -> Ceiling:
    """The lowest. At least one."""
    return min(ceilings, key=lambda c: c.rate)


# ---- fleet


class Fleet(NamedTuple):
    """Replicas for a rate: `active` carry it, `spares` stand by for failures and rollouts."""

    target: float  # peak rate they are sized for
    each: float  # rate within the SLO of one
    active: int
    spares: int

    @property
    def total(self) -> int:
        return self.active + self.spares

    def left(self, failed: int) -> float:
        """The rate within the SLO of those that are left."""
        return max(self.total - failed, 0) * self.each

    def survives(self, failed: int) -> bool:
        return self.left(failed) >= self.target * (1 - 1e-9)


def fleet(target: float, each: float, spares: int) -> Fleet:
    """ceil(target / rate within the SLO of one) + spares. 0 < each."""
    return Fleet(target, each, _needed(target, each), spares)


def _needed(target: float, each: float) -> int:
    # 8.4 / 2.8 is 3.0000000000000004, and three replicas carry it.
    return max(1, math.ceil(round(target / each, 9)))


def most_failures(of: Fleet) -> int:
    """How many replicas may be gone at once while the rest still meets the SLO."""
    return max(of.total - _needed(of.target, of.each), 0)


def queued(of: Fleet, failed: int, warmup_s: float) -> float:
    """Requests that queue up while `failed` replicas are replaced, a replica being ready after `warmup_s`."""
    return max(of.target - of.left(failed), 0.0) * warmup_s


def peak_to_mean(times_s: Sequence[float], window_s: float) -> tuple[float, int] | None:
    """(most arrivals of a window over the mean of windows, windows) of arrival times; None of under 10 whole windows.

    Windows begin at the first arrival; what is left after the last whole one does not count.
    """
    if not times_s:
        return None
    first = min(times_s)
    windows = int((max(times_s) - first) / window_s)
    if windows < 10:
        return None
    counts = [0] * windows
    for at in times_s:
        place = int((at - first) / window_s)
        if place < windows:
            counts[place] += 1
    return max(counts) / (sum(counts) / windows), windows


# ---- growth


class Growth(NamedTuple):
    """A steady rate of growth: 0.05 a month."""

    share: float
    period: str  # of DAYS

    @property
    def text(self) -> str:
        return f"{100 * self.share:.4g}%/{self.period}"


def exhausted_after(now: float, most: float, growth: Growth) -> float | None:
    """Days until a rate that grows by a constant share a period passes `most`; 0: it has, None: it never does.

    now (1 + g)^n = most, n = ln(most / now) / ln(1 + g) periods.
    """
    if now > most:
        return 0.0
    if growth.share <= 0:
        return None
    return math.log(most / now) / math.log1p(growth.share) * DAYS[growth.period]


# ---- cost


class Prices(NamedTuple):
    """What a fleet is charged. `sources`: name of an input -> where its figure is from, and of when."""

    accelerators: int  # of a replica
    accelerator_hour: float
    other_hour: float = 0.0  # telemetry and gateway, of the whole fleet
    sources: Mapping[str, str] = {}


class Cost(NamedTuple):
    """What a fleet costs, and what for. Answers are those within the SLO; failed tokens are in the cost alone."""

    per_hour: float
    served: float  # answers a second within the SLO
    per_million: float  # output tokens within the SLO
    per_answer: float
    idle: float  # share of what all replicas, spares too, could carry within the SLO and were not asked for


def cost(of: Fleet, prices: Prices, demand: float, tokens_per_answer: float) -> Cost:
    """Of an hour at a mean demand (METRICS.md, Capacity arithmetic).

    (accelerators x price x replicas with spares + telemetry and gateway) / (min(demand, active x rate within the SLO)
    x tokens per answer x 3600) x 10^6. 0 < demand.
    """
    per_hour = prices.accelerators * prices.accelerator_hour * of.total + prices.other_hour
    served = min(demand, of.active * of.each)
    answers = served * HOURS_S
    idle = 1 - served / (of.total * of.each)
    return Cost(per_hour, served, per_hour / (answers * tokens_per_answer) * 1e6, per_hour / answers, idle)


def cost_at(prices: Prices, tokens_per_second: float) -> float:
    """Per million output tokens of one replica that is always at this load: no spares, nothing idle."""
    return prices.accelerators * prices.accelerator_hour / (tokens_per_second * HOURS_S) * 1e6
