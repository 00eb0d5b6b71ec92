"""fit(trace): a Model of where its load comes from, small enough to keep, from which synth makes new load.

A Model holds when conversations begin (a rate profile, a cascade for its bursts, the shape of the gaps), what they say
(lengths, turns, pauses, as whole conversations to draw from) and whose prompt each repeats. It holds no text, no id.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from llm_bench.errors import BenchError
from llm_bench.fields import found
from llm_bench.request import LONGEST_S, Request, Trace
from llm_bench.ticks import dejitter

MOST_CONVERSATIONS = 20_000  # kept of a trace, evenly taken over it: a quantile of so many is off by 0.4% of rank
MOST_STREAMS = 32  # clients with arrivals of their own; all others are one more stream
LEAST_STREAM = 200  # conversations: fewer show neither a profile nor bursts
MOST_BINS, MOST_LEVELS = 100_000, 20
MOST_LEAVES = 2**22  # of a stream's cascade: 32 MB each
LEAVES_A_REQUEST = 8  # the finest interval of the cascade is about an eighth of the mean gap
CUTS = (0.5, 1.5)  # loads, over their level's mean, at which rho changes
SHOWS_LOAD = 8.0  # requests of a part, on average, from which on its count says whether its load is low
GAPS = 16  # neighbours whose mean a gap is measured by
REGULAR = 0.9  # squared CV of gaps below which they are called more even than Poisson's
EVENEST = 64.0  # largest shape of a gap: CV 0.125, a metronome for every purpose of a load

# Whose prompt a turn repeats: nobody's (it has no blocks; or new ones), its own turn before, the whole of an earlier
# prompt (another request of the same talk), a part of an earlier prompt (a system prompt, a document).
NO_BLOCKS, NEW, OWN, NEXT, AGAIN = SOURCES = ("none", "new", "own", "next", "again")


class Turn(NamedTuple):
    """One request of a conversation."""

    tokens: int  # the prompt of a first turn; of a later one, what its user adds
    tokens_out: int | None
    think_s: float | None  # pause after the answer before
    after_s: float | None  # seconds after the turn before began, where the trace says no pause
    source: str  # one of SOURCES
    shared: int  # whole blocks that an earlier request had in the same places
    lag: float  # since their last use: requests; seconds where the source is NEXT


class Conversation(NamedTuple):
    """What one arrival brings."""

    client: int  # by share, 1 the largest; 0 where the trace names none
    request_class: str
    priority: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When conversations of one stream begin: a gamma renewal in operational time under a random rate.

    The rate is piecewise constant, `rates` of equal bins over span_s. Inside a bin it is random, where traffic is more
    bursty than its profile: a bin is halved again and again, and level l gives its left half the share p of the rate,
    p symmetric Beta with variance splits[l] / 4 (0: always half; 1: all to one side). Kolaczyk, "Bayesian multiscale
    models for Poisson processes", JASA 94 (1999). It keeps the index of dispersion at every scale from a bin to a gap.
    """

    span_s: float
    rates: tuple[float, ...]  # conversations begun per second
    splits: tuple[tuple[float, float, float], ...]
    shape: float  # of the gaps, over the local rate: 1 is Poisson, larger is more even


Quantiles = tuple[tuple[float, float], ...]  # (level, value), both rising, levels from 0 to 1


@dataclass(frozen=True, slots=True)
class Law:
    """What arrivals bring where only a distribution is known, as one is published; `law` draws conversations of it."""

    rows: int  # that the quantiles are of: the largest value stands for the level 1 - 1 / rows
    tokens_in: Quantiles  # of a conversation's first prompt
    tokens_out: Quantiles
    spearman: float  # rank correlation of a first prompt and its answer
    turns: Quantiles = ()  # (): one
    tokens_new: Quantiles = ()  # what a later turn's user adds
    think_s: Quantiles = ()
    common: int = 0  # whole blocks that all prompts begin with
    again: float = 0.0  # share of first prompts that take over more of an earlier one
    again_part: float = 0.0  # of their whole blocks, how many
    again_lag_s: float = 0.0  # mean time since that one


@dataclass(frozen=True, slots=True)
class Stream:
    """One client, or all that are too small to be fitted apart. Conversations are in order of arrival."""

    arrivals: Arrivals | None  # None: the trace has no times
    conversations: tuple[Conversation, ...]
    law: Law | None = None  # conversations are drawn of it, and none are given


@dataclass(frozen=True, slots=True)
class Model:
    """What fit found in a trace, or what was published of one."""

    block_size: int  # tokens of a block, 0 where prompts share nothing that is known
    requests: int  # of the trace
    conversations: int
    streams: tuple[Stream, ...]
    notes: tuple[str, ...]
    source: str = ""  # of the figures, where they are not from a trace that was fitted
    date: str = ""  # of the source: a year, a month or a day

    @property
    def rate(self) -> float | None:
        """Conversations begun per second; None where the trace has no times."""
        fitted = [s.arrivals for s in self.streams if s.arrivals]
        return sum(sum(a.rates) / len(a.rates) for a in fitted) if fitted else None

    @property
    def span_s(self) -> float | None:
        return max((s.arrivals.span_s for s in self.streams if s.arrivals), default=None)


# -- fit --------------------------------------------------------------------------------------------------------------


def fit(trace: Trace, *, bin_s: float | None = None) -> Model:
    """A Model of the trace. bin_s: width of the rate profile's bins, by default the span over 2 n^(1/3) of them.

    Times on ticks are spread first (ticks.dejitter). Of a request the model has its lengths, class and priority; texts,
    bodies, models, cancellations and extra values are not kept. Raises BenchError for a trace whose lengths are not
    known, whose blocks are of several sizes, or which is too short for a rate.
    """
    if bin_s is not None and not 0 < bin_s <= LONGEST_S:
        raise BenchError(f"bins of {found(bin_s, 'seconds, more than 0')}")
    unknown = next((r for r in trace.requests if not r.tokens_in), None)
    if unknown is not None:
        raise BenchError(f"{trace.path}:{unknown.line}: a prompt of unknown length, expected input lengths to fit")
    sizes = sorted({r.block_size for r in trace.requests if r.hash_ids})
    if len(sizes) > 1:
        raise BenchError(f"{trace.path}: blocks of {sizes} tokens in one trace, expected one size")
    requests, spread = dejitter(trace.requests, "auto", seed=0)
    notes = [spread] if spread else []
    timed = any(r.at_s is not None for r in requests)
    begun = _begun(requests)
    begun -= begun.min() if len(begun) else 0.0
    sharing = _sharing(requests, begun if timed else None)
    places = _conversations(requests)
    if timed and len(places) < LEAST_STREAM:
        notes.append(
            f"{len(places)} conversations are too few to show a rate profile or bursts: both are mostly chance"
        )
    clients = Counter(requests[p[0]].client for p in places)
    ranks = {name: rank for rank, (name, _) in enumerate(clients.most_common(), 1)} if set(clients) != {""} else {"": 0}
    large = {c for c, n in clients.most_common(MOST_STREAMS) if n >= LEAST_STREAM} if len(clients) > 1 else set()
    streams: dict[str | None, list[list[int]]] = {}
    for p in places:
        client = requests[p[0]].client
        streams.setdefault(client if client in large else None, []).append(p)
    span_s = _span(trace.path, begun) if timed else 0.0
    fitted = []
    for name in sorted(streams, key=lambda c: (c is None, ranks.get(c or "", 0))):
        own = streams[name]
        times = np.array([begun[p[0]] for p in own])
        arrivals = fit_arrivals(times, span_s, bin_s) if timed else None
        kept = [own[i * len(own) // MOST_CONVERSATIONS] for i in range(MOST_CONVERSATIONS)]
        kept = own if len(own) <= MOST_CONVERSATIONS else kept
        rows = tuple(_conversation(requests, p, sharing, ranks) for p in kept)
        fitted.append(Stream(arrivals, rows))
        if kept is not own:
            notes.append(f"{len(kept):,} of {len(own):,} conversations kept, evenly taken: extremes may be lost")
    if large:
        notes.append(f"{len(large)} of {len(clients)} clients have arrivals and lengths of their own")
    return Model(max(sizes, default=0), len(requests), len(places), tuple(fitted), tuple(notes))


def _begun(requests: Sequence[Request]) -> np.ndarray:
    """When each came (n,), s; a turn without a time of its own counts with the last of its conversation."""
    times, of_session = np.zeros(len(requests)), dict[str, float]()
    for i, r in enumerate(requests):
        times[i] = r.at_s if r.at_s is not None else of_session.get(r.session, 0.0)
        if r.session:
            of_session[r.session] = times[i]
    return times


def _span(path: str, begun: np.ndarray) -> float:
    """The span that n requests stand for: n gaps, of which the trace shows n - 1."""
    shown = float(begun.max() - begun.min())
    if len(begun) < 2 or not shown:
        raise BenchError(f"{path}: all {len(begun)} requests at one time, expected a span to fit a rate to")
    return shown * len(begun) / (len(begun) - 1)


def _conversations(requests: Sequence[Request]) -> list[list[int]]:
    """Places of the requests of each conversation, by its first."""
    places: dict[str | int, list[int]] = {}
    for i, r in enumerate(requests):
        places.setdefault(r.session or i, []).append(i)
    return list(places.values())


def _conversation(
    requests: Sequence[Request], places: list[int], sharing: list[tuple[str, int, float]], ranks: dict[str, int]
) -> Conversation:
    first = requests[places[0]]
    turns = []
    for before, i in zip([None, *places], places, strict=False):
        r = requests[i]
        tokens, after = (r.tokens_in, None) if before is None else (r.tokens_new, requests[before].at_s)
        after_s = r.at_s - after if r.at_s is not None and after is not None and r.think_s is None else None
        source, shared, lag = sharing[i]
        turns.append(Turn(tokens, r.tokens_out, r.think_s, after_s, source, shared, lag))
    return Conversation(ranks[first.client], first.request_class, first.priority, tuple(turns))


def _sharing(requests: Sequence[Request], times: np.ndarray | None) -> list[tuple[str, int, float]]:
    """(source, whole blocks shared with any earlier request, lag since the deepest of them was last used) of each."""
    used: dict[int, int] = {}  # id -> the request that had it last; an id has one parent, so that it names a prefix
    whole: list[int] = []
    facts: list[tuple[str, int, float]] = []
    for i, r in enumerate(requests):
        full = r.tokens_in // r.block_size if r.hash_ids else 0
        ids = r.hash_ids[:full]
        shared = next((k for k, x in enumerate(ids) if x not in used), full)
        if not r.hash_ids:
            facts.append((NO_BLOCKS, 0, 0.0))
        elif not shared:
            facts.append((NEW, 0, 0.0))
        else:
            j = used[ids[shared - 1]]
            if r.session and requests[j].session == r.session:
                facts.append((OWN, shared, 0.0))
            elif times is not None and whole[j] == shared:
                facts.append((NEXT, shared, round(float(times[i] - times[j]), 3)))
            else:
                facts.append((AGAIN, shared, float(i - j)))
        used.update(dict.fromkeys(ids, i))
        whole.append(full)
    return facts


def fit_arrivals(times: np.ndarray, span_s: float, bin_s: float | None = None) -> Arrivals:
    """Arrivals whose rate, bursts and gaps are those of `times` (n,), s, in [0, span_s].

    A bin's count is its rate plus the noise of a renewal process; drawn anew, noise would come twice. So the profile
    is drawn to its mean by the share of the counts' variance that noise explains.
    """
    n = len(times)
    bins = max(1, round(span_s / bin_s)) if bin_s else max(1, round(2 * n ** (1 / 3)))
    bins = min(bins, MOST_BINS)
    levels = min(max(0, math.ceil(math.log2(LEAVES_A_REQUEST * n / bins))), MOST_LEVELS)
    while bins * 2**levels > MOST_LEAVES:
        levels -= 1
    noise = _evenness(times)
    leaves = np.minimum((times / span_s * (bins * 2**levels)).astype(np.int64), bins * 2**levels - 1)
    counts = np.bincount(leaves, minlength=bins * 2**levels)
    splits: list[tuple[float, float, float]] = []
    for _ in range(levels):
        left, both = counts[::2], counts[::2] + counts[1::2]
        mean = n / len(both)
        part = np.searchsorted(CUTS, both / mean) if mean >= SHOWS_LOAD else np.zeros(len(both), np.int64)
        rhos = [_split(left[part == k], both[part == k], noise) for k in range(len(CUTS) + 1)]
        splits.append((rhos[0], rhos[1], rhos[2]) if mean >= SHOWS_LOAD else (rhos[0],) * 3)
        counts = both
    mean = n / bins
    dispersion = float(np.var(counts)) / mean
    kept = math.sqrt(max(0.0, 1 - noise / dispersion)) if dispersion else 0.0
    rates = (mean + kept * (counts - mean)) * bins / span_s
    return Arrivals(span_s, tuple(float(f"{x:.6g}") for x in rates), tuple(reversed(splits)), round(1 / noise, 4))


def _evenness(times: np.ndarray) -> float:
    """Squared CV of gaps over their local mean, where that is below REGULAR; else 1: bursts are the cascade's part."""
    gaps = np.diff(np.sort(times))
    blocks = gaps[: len(gaps) // GAPS * GAPS].reshape(-1, GAPS)
    means = blocks.mean(axis=1)
    if not (means > 0).any():
        return 1.0
    squared = np.var(blocks[means > 0], axis=1, ddof=1) / means[means > 0] ** 2
    local = float(squared.mean()) * (GAPS + 1) / GAPS  # of exponential gaps this is 1 on average, whatever GAPS is
    return 1.0 if local >= REGULAR else max(local, 1 / EVENEST)


def _split(left: np.ndarray, both: np.ndarray, noise: float) -> float:
    """Correlation of two requests' halves: 0 where each falls by itself, 1 where all fall together.

    Var(left | both) = both / 4 · (1 + (both - 1) · rho) of a symmetric Beta-binomial; rho by moments over all
    intervals. What chance alone would show is 0: two standard errors of it, sqrt(2 / pairs) each.
    """
    pairs = float((both * (both - 1.0)).sum())
    if not pairs:
        return 0.0
    even = noise if both.sum() > 4 * np.count_nonzero(both) else 1.0  # of few a half holds, the gaps' shape shows not
    rho = float(((2.0 * left - both) ** 2 - even * both).sum()) / pairs
    return round(min(rho, 1.0), 5) if rho > 2 * math.sqrt(2 / pairs) else 0.0
