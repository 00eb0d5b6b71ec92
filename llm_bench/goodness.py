"""compare(original, synthetic): how far the load of synth is from the trace that was fitted, in numbers and words.

Each warning has its threshold here. They leave room for what chance does to a sample of the size at hand.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from llm_bench import prefixes
from llm_bench.request import Request, Trace
from llm_bench.stats import percent_name, percentile
from llm_bench.ticks import dejitter, inter_arrival_cv
from llm_bench.workload import DISPERSION_S, LADDER, dispersion, lengths, spearman, stamps, turn_counts, window_cv

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
PARTS = 20  # of the span, for the rate profile
CAPACITIES = 5  # of an LRU cache, the largest of the ladder below all blocks together
OTHER_RATE = 1.2  # rates further apart than this factor, and than chance, were asked for: time was stretched
KS, KS_CHANCE = 0.05, 1.63  # distance of two distributions; 1.63 sqrt(1/n + 1/m) is what chance exceeds once in 100
TAIL, LEAST_FOR_TAIL = 0.25, 1000  # relative error of a p99, from so many requests on
RHO = 0.05  # and three standard errors of the difference, sqrt(1/n + 1/m) each
BURSTS, CV = 1.5, 1.3  # factors: index of dispersion, CV of all gaps; CV inside windows. Chance as for RHO
PROFILE = 0.1  # relative error of the rate, on average, and half as much again as chance would show
BOUND, LRU = 0.03, 0.05  # shares of tokens, of blocks
LEAST_TO_JUDGE = 200  # requests: with fewer, chance leaves room for a fit that is poor
SHARES = 0.05  # of requests in another class, or by another client


class Pair(NamedTuple):
    """The same figure of both; None where it is not defined."""

    original: float | None
    synthetic: float | None


class Distribution(NamedTuple):
    """Values of both: sizes, the Kolmogorov-Smirnov distance (largest difference of their shares), quantiles."""

    n: tuple[int, int]
    ks: float
    quantiles: dict[str, Pair]  # by QUANTILES


@dataclass(frozen=True)
class Goodness:
    """What compare found. Times are those of the original's rate, spread where they stood on ticks."""

    requests: tuple[int, int]
    rate: Pair  # requests per second
    stretched: float  # the synthetic trace's time was multiplied by this to have the original's rate; 1: as it stands
    tokens_in: Distribution | None
    tokens_out: Distribution | None
    spearman: Pair
    profile_error: float | None  # mean |synthetic / original - 1| of the rate in twentieths of the span, weighed by it
    profile_chance: float | None  # what two loads of one profile, as bursty as the original, would show
    cv: Pair
    cv_window: dict[str, Pair]  # p10, p50, p90 inside windows of 60 s
    dispersion: dict[str, Pair]  # by window in s
    token_hits: Pair  # share of prompt tokens in full blocks that an endless cache hits
    lru: dict[int, Pair]  # blocks of the cache -> share of blocks hit
    turns: Distribution | None  # of conversations with a name
    think_s: Distribution | None
    tokens_new: Distribution | None  # what users add in later turns
    class_distance: float | None  # share of requests that would have to change class; None without classes
    top_client: Pair  # share of requests
    warnings: tuple[str, ...]


def compare(original: Trace, synthetic: Trace) -> Goodness:
    """Every figure of both, and where they differ by more than chance and the thresholds above allow.

    Prefix figures are of equally many requests of both, since any cache hits more the longer it runs.
    0 < len(requests) of each.
    """
    before, now = (dejitter(t.requests, "auto", seed=0)[0] for t in (original, synthetic))
    rate = Pair(_rate(before), _rate(now))
    ratio = rate.synthetic / rate.original if rate.original and rate.synthetic else 1.0
    begun = [sum(r.turn == 0 for r in requests) for requests in (before, now)]
    chance = math.exp(3 * math.sqrt(1 / begun[0] + 1 / begun[1]))
    stretched = ratio if max(ratio, 1 / ratio) > max(OTHER_RATE, chance) else 1.0
    times = stamps(before), stamps(now) * stretched
    windows = [window_cv(t) for t in times]
    profile = _profile(*times)
    values = Goodness(
        requests=(len(before), len(now)),
        rate=rate,
        stretched=stretched,
        tokens_in=distribution(lengths(before)[0], lengths(now)[0]),
        tokens_out=distribution(lengths(before)[1], lengths(now)[1]),
        spearman=Pair(_rho(before), _rho(now)),
        profile_error=profile and profile[0],
        profile_chance=profile and profile[1],
        cv=Pair(*map(inter_arrival_cv, times)),
        cv_window={n: Pair(_at(windows[0], i), _at(windows[1], i)) for i, n in enumerate(("p10", "p50", "p90"))},
        dispersion={str(w): Pair(*(dispersion(t, w) for t in times)) for w in DISPERSION_S},
        **_sharing(before, now),  # type: ignore[arg-type]
        turns=distribution(turn_counts(before), turn_counts(now)),
        think_s=distribution(*(_later(r, lambda x: x.think_s) for r in (before, now))),
        tokens_new=distribution(*(_later(r, lambda x: x.tokens_new) for r in (before, now))),
        class_distance=_class_distance(before, now),
        top_client=Pair(_top_client(before), _top_client(now)),
        warnings=(),
    )
    return replace(values, warnings=tuple(_warnings(values, float(times[0][-1]) if len(times[0]) else 0.0)))


def distribution(before: np.ndarray, now: np.ndarray) -> Distribution | None:
    """KS distance and quantiles of two samples (n,), (m,); None where one of them is empty."""
    if not len(before) or not len(now):
        return None
    both = np.sort(np.concatenate([before, now]))
    below = [np.searchsorted(np.sort(x), both, side="right") / len(x) for x in (before, now)]
    table = {percent_name(q): Pair(percentile(before, q), percentile(now, q)) for q in QUANTILES}
    return Distribution((len(before), len(now)), float(np.abs(below[0] - below[1]).max()), table)


def profile(times: np.ndarray) -> np.ndarray:
    """The rate in each of PARTS equal parts of the span of `times` (n,), over its mean."""
    return np.asarray(np.histogram(times, PARTS, (0.0, float(times[-1])))[0] * (PARTS / len(times)))


def hit_curve(requests: Sequence[Request], capacities: Sequence[int]) -> list[float]:
    """Share of blocks hit under an LRU of each capacity; some request has blocks."""
    return prefixes.lru_curve(prefixes.blocks(requests), capacities)


def capacities(requests: Sequence[Request]) -> list[int]:
    """Sizes of a cache, in blocks, that tell something about these prompts; [] where they have no blocks."""
    found = prefixes.blocks(requests)
    distinct = prefixes.infinite(found).distinct if len(found.nodes) else 0
    return [c for c in LADDER if c < distinct][-CAPACITIES:]


def _rate(requests: Sequence[Request]) -> float | None:
    at_s = stamps(requests)
    return len(at_s) / float(at_s[-1]) if len(at_s) and at_s[-1] else None


def _rho(requests: Sequence[Request]) -> float | None:
    both = [(r.tokens_in, r.tokens_out) for r in requests if r.tokens_in and r.tokens_out is not None]
    return spearman(*np.array(both, float).T) if both else None


def _profile(before: np.ndarray, now: np.ndarray) -> tuple[float, float] | None:
    """(mean relative error weighed by the original's rate, that of two loads of one profile): of E|N(0, s)|."""
    if not all(len(t) and t[-1] for t in (before, now)):
        return None
    error = float(np.abs(profile(now) - profile(before)).mean())
    bursts = max([1.0, *(d for w in DISPERSION_S if (d := dispersion(before, w)) is not None)])
    chance = np.sqrt(profile(before) * PARTS * bursts * (1 / len(before) + 1 / len(now)) * 2 / math.pi)
    return error, float(chance.mean())


def _sharing(before: Sequence[Request], now: Sequence[Request]) -> dict[str, object]:
    n = min(len(before), len(now))
    hits: list[float | None] = []
    curves: list[list[float] | None] = []
    sizes = capacities(before[:n])
    for requests in (before[:n], now[:n]):
        found = prefixes.blocks(requests)
        known = len(found.nodes) > 0 and found.prompt_tokens > 0
        bound = prefixes.infinite(found) if known else None
        hits.append(bound.tokens_hit_full / bound.tokens if bound else None)
        curves.append(prefixes.lru_curve(found, sizes) if known else None)
    return {
        "token_hits": Pair(*hits),
        "lru": {c: Pair(_at(curves[0], i), _at(curves[1], i)) for i, c in enumerate(sizes)},
    }


def _at(values: Sequence[float] | None, i: int) -> float | None:
    return None if values is None else values[i]


def _later(requests: Sequence[Request], value: Callable[[Request], float | None]) -> np.ndarray:
    return np.array([x for r in requests if r.session and r.turn and (x := value(r)) is not None], float)


def _class_distance(before: Sequence[Request], now: Sequence[Request]) -> float | None:
    """Total variation distance of the classes, a class with each of its priorities."""
    shares = [Counter((r.request_class, r.priority) for r in requests) for requests in (before, now)]
    keys = shares[0].keys() | shares[1].keys()
    if len(keys) < 2:
        return None
    return sum(abs(shares[0][k] / len(before) - shares[1][k] / len(now)) for k in keys) / 2


def _top_client(requests: Sequence[Request]) -> float | None:
    clients = Counter(r.client for r in requests if r.client)
    return max(clients.values()) / len(requests) if clients else None


# -- words ------------------------------------------------------------------------------------------------------------


def _warnings(g: Goodness, span_s: float) -> list[str]:
    said: list[str] = []
    chance = math.sqrt(1 / g.requests[0] + 1 / g.requests[1])
    for name, d in _distributions(g).items():
        limit = KS + KS_CHANCE * math.sqrt(1 / d.n[0] + 1 / d.n[1]) if d else 0.0
        if d and d.ks > limit:
            said.append(f"{name}: distributions differ by {d.ks:.3f} (KS), more than {limit:.3f}")
        p99 = d.quantiles["p99"] if d and min(d.n) >= LEAST_FOR_TAIL else Pair(None, None)
        if p99.original and p99.synthetic is not None and abs(p99.synthetic / p99.original - 1) > TAIL:
            said.append(f"{name}: p99 is {p99.synthetic:g}, was {p99.original:g}: over {TAIL:.0%} off")
    rho = _difference(g.spearman)
    if rho > RHO + 3 * chance:
        said.append(f"correlation of input and output lengths is {_both(g.spearman, '.2f')}")
    if g.profile_error is not None and g.profile_chance is not None:
        limit = PROFILE + 1.5 * g.profile_chance
        if g.profile_error > limit:
            said.append(f"the rate profile is {g.profile_error:.0%} off on average, more than {limit:.0%}")
    for window, pair in g.dispersion.items():
        # the variance of w counts has a relative standard error of sqrt(2 / w); two of them are compared
        limit = BURSTS * math.exp(math.sqrt(4 * float(window) / span_s) + 3 * chance) if span_s else math.inf
        if _factor(pair) > limit:
            said.append(f"bursts of {window} s: index of dispersion is {_both(pair)}, over a factor of {limit:.2f}")
    if _factor(g.cv_window["p50"]) > (limit := CV * math.exp(3 * chance)):
        said.append(
            f"CV of the gaps inside windows of 60 s is {_both(g.cv_window['p50'])}: over a factor of {limit:.2f}"
        )
    if _factor(g.cv) > (limit := BURSTS * math.exp(3 * chance)):
        said.append(f"CV of all gaps is {_both(g.cv)}: long silences are over a factor of {limit:.2f} off")
    if _difference(g.token_hits) > BOUND:
        said.append(f"prefix hits of an endless cache are {_both(g.token_hits, '.1%')} of prompt tokens")
    held = "more" if g.stretched > 1 else "fewer"
    why = "" if g.stretched == 1 else f"; at another rate the same pauses hold {held} requests"
    for capacity, pair in g.lru.items():
        if _difference(pair) > LRU:
            said.append(f"prefix hits of an LRU cache of {capacity:,} blocks are {_both(pair, '.1%')} of blocks{why}")
    if g.class_distance is not None and g.class_distance > SHARES + chance:
        said.append(f"{g.class_distance:.0%} of requests are of another class or priority than they should")
    if _difference(g.top_client) > SHARES + chance:
        said.append(f"the largest client's share of requests is {_both(g.top_client, '.1%')}")
    undefined = [
        name
        for name, pair in _pairs(g).items()
        if (pair.original is None) != (pair.synthetic is None) and pair.original is not None
    ]
    return said + [f"{name} is not defined in the synthetic trace, too short or without it" for name in undefined]


def _difference(pair: Pair) -> float:
    return abs(pair.original - pair.synthetic) if pair.original is not None and pair.synthetic is not None else 0.0


def _factor(pair: Pair) -> float:
    if not pair.original or not pair.synthetic:
        return 1.0
    return max(pair.original / pair.synthetic, pair.synthetic / pair.original)


def _both(pair: Pair, form: str = ".3g") -> str:
    return f"{pair.synthetic:{form}}, was {pair.original:{form}}"


def _distributions(g: Goodness) -> dict[str, Distribution | None]:
    return {
        "input tokens": g.tokens_in,
        "output tokens": g.tokens_out,
        "turns of a conversation": g.turns,
        "think times (s)": g.think_s,
        "new tokens of later turns": g.tokens_new,
    }


def _pairs(g: Goodness) -> dict[str, Pair]:
    """Every pair by its name in text()."""
    return {
        "rate (requests/s)": g.rate,
        "Spearman correlation of lengths": g.spearman,
        "CV of gaps": g.cv,
        **{f"CV of gaps in 60 s windows, {name}": pair for name, pair in g.cv_window.items()},
        **{f"index of dispersion, {window} s": pair for window, pair in g.dispersion.items()},
        "prefix hits, endless cache (tokens)": g.token_hits,
        **{f"prefix hits, LRU of {size:,} blocks": pair for size, pair in g.lru.items()},
        "largest client's share": g.top_client,
    }


def text(g: Goodness) -> str:
    """The comparison as a page of plain text."""
    lines = [f"{'':44}{'original':>12}{'synthetic':>12}", f"{'requests':44}{g.requests[0]:>12,}{g.requests[1]:>12,}"]
    for name, d in _distributions(g).items():
        if d:
            lines.append(f"{name}, KS distance {d.ks:.3f}")
            lines += [_line(f"  {quantile}", pair) for quantile, pair in d.quantiles.items()]
    lines += [_line(name, pair) for name, pair in _pairs(g).items() if pair != (None, None)]
    if g.profile_error is not None:
        chance = f"(chance alone: {g.profile_chance:.1%})"
        lines.append(f"rate profile in {PARTS} parts: {g.profile_error:.1%} off on average {chance}")
    if g.class_distance is not None:
        lines.append(f"requests in another class: {g.class_distance:.1%}")
    if g.stretched != 1:
        lines.append(f"the synthetic trace's times are multiplied by {g.stretched:.4g}, to compare at one rate")
    few = f"{min(g.requests):,} requests are too few to tell a poor fit from chance"
    good = "no poor fit found" if min(g.requests) >= LEAST_TO_JUDGE else few
    lines += [f"poor fit: {warning}" for warning in g.warnings] or [good]
    return "\n".join(lines) + "\n"


def _line(name: str, pair: Pair) -> str:
    return f"{name:44}" + "".join(f"{'-' if x is None else f'{x:,.4g}':>12}" for x in pair)
