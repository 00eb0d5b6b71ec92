"""synth(model): requests of a Model, new ones, the same on any machine for the same seed; at other rates and lengths.

A load must be the same in ten years, and numpy promises no stream of its distributions over versions (NEP 19). So only
PCG64's own bits are used, whose stream it does promise, and each distribution is made from them here. Times are rounded
to 1 µs, so that the last bit of a machine's log and cos does not show.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from itertools import count as naturals
from typing import NamedTuple

import numpy as np

from llm_bench.errors import BenchError
from llm_bench.fields import found
from llm_bench.fit import CUTS, NEW, NEXT, NO_BLOCKS, OWN, Arrivals, Conversation, Model, Stream
from llm_bench.law import conversations, uniforms
from llm_bench.request import LONGEST_S, MOST_TOKENS, Request

MOST_REQUESTS = 20_000_000
PASS = 10_000  # conversations of a law that are drawn at once where no profile of arrivals says how many
NEAR = 32  # conversations are shuffled over this part of the model's, to each side
COLD = 8  # in a repeated pass prompts of the first 1/COLD are not drawn: they found a cache empty that is no longer
BEST = 32  # candidates for a parent that are looked at closely
WINDOW = 32  # requests on each side of a lag among which a parent is looked for
GAPS, RATES, DRAWS = 1, 2, 3  # names of random streams, law.LENGTHS another: a new use never shifts another's numbers


Used = dict[int, int]  # block id -> the request that had it last


class Begun(NamedTuple):
    """A conversation begun: when, and what it is."""

    at_s: float
    conversation: Conversation


def synth(
    model: Model,
    *,
    rate: float | None = None,
    duration_s: float | None = None,
    count: int | None = None,
    seed: int = 1,
    lengths: float = 1.0,
) -> list[Request]:
    """Requests in order of arrival, the first at 0 s.

    rate: conversations begun per second, on average over duration_s, or where none is given over the profile. Its time
    is stretched, so that bursts keep their sizes in requests; pauses inside a conversation are people's and stay.
    duration_s: of arrivals, count: of requests; the first reached ends it; neither: as many conversations as the fitted
    trace had, about one pass of the profile. A shorter load is the profile's beginning, as far as it has rate ×
    duration_s conversations on average; a longer one repeats it with new bursts. lengths: factor of
    all token counts, and of a block's size with them, so that sharing stays.

    Raises BenchError for what cannot be made: a duration without any rate, more than 20 million requests.
    """
    _check(model, rate, duration_s, count, seed, lengths)
    begun: list[Begun] = []
    requests = 0
    for at in _all_begun(model, rate, duration_s, seed):
        if at.at_s > LONGEST_S:
            raise BenchError("these requests take over 10 years, expected a higher --rate or a smaller --count")
        begun.append(at)
        requests += len(at.conversation.turns)
        if requests >= count if count is not None else duration_s is None and len(begun) == model.conversations:
            break
        if requests > MOST_REQUESTS:
            raise BenchError(f"over {MOST_REQUESTS:,} requests, expected a smaller --duration, --rate or --count")
    made = _requests(begun, lengths, timed=model.rate is not None or rate is not None)
    made = made[:count]
    return _with_blocks(model, begun, made, lengths) if model.block_size else [r for r, _, _ in made]


def _check(
    model: Model, rate: float | None, duration_s: float | None, count: int | None, seed: int, lengths: float
) -> None:
    if rate is not None and not 0 < rate < 1e9:
        raise BenchError(f"rate {found(rate, 'conversations a second, more than 0')}")
    if duration_s is not None and not 0 < duration_s <= LONGEST_S:
        raise BenchError(f"duration {found(duration_s, 'seconds, more than 0, 10 years at most')}")
    if count is not None and not 0 < count <= MOST_REQUESTS:
        raise BenchError(f"count {found(count, f'1 to {MOST_REQUESTS:,} requests')}")
    if not 0 < lengths < 1e6:
        raise BenchError(f"lengths {found(lengths, 'a factor above 0')}")
    if seed < 0:
        raise BenchError(f"seed {found(seed, 'a whole number, 0 or more')}")
    if duration_s is not None and rate is None and model.rate is None:
        raise BenchError("the model has no times, expected --rate beside --duration")


# -- when -------------------------------------------------------------------------------------------------------------


def _all_begun(model: Model, rate: float | None, duration_s: float | None, seed: int) -> Iterator[Begun]:
    """Conversations in order of arrival without an end or until duration_s, pass after pass of the profile."""
    span_s = model.span_s
    if model.rate is None or span_s is None:
        yield from _begun_evenly(model, rate, duration_s, seed)
        return
    slower = _slower(model, rate, duration_s)
    first = True
    for number in naturals():
        times, rows = [], []
        for s, stream in enumerate(model.streams):
            assert stream.arrivals is not None
            at = arrivals(stream.arrivals, seed, s, number)
            times.append(at)
            rows += _brought(stream, len(at), number > 0 and model.block_size > 0, model.block_size, (seed, s, number))
        together = np.concatenate(times)
        for i in np.argsort(together, kind="stable"):
            at_s = (number * span_s + float(together[i])) * slower
            if duration_s is not None and at_s >= duration_s and not first:
                return
            yield Begun(0.0 if first else round(at_s, 6), rows[i])  # a trace begins with a request, as the fitted one
            first = False


def _brought(stream: Stream, n: int, warm: bool, block_size: int, key: tuple[int, int, int]) -> list[Conversation]:
    """What n arrivals of one pass bring, in order of arrival."""
    if stream.law is not None:
        return conversations(stream.law, n, block_size, *key)
    drawn = _draw(len(stream.conversations), (np.arange(n) + 0.5) / max(n, 1), warm, *key)
    return [stream.conversations[i] for i in drawn]


def _slower(model: Model, rate: float | None, duration_s: float | None) -> float:
    """By how much the profile's time is stretched: its beginning may be busier than the whole of it, or less busy."""
    assert model.rate is not None and model.span_s is not None
    if rate is None or duration_s is None:
        return 1.0 if rate is None else model.rate / rate
    fitted = [s.arrivals for s in model.streams if s.arrivals is not None]
    edges = np.unique(np.concatenate([np.linspace(0, a.span_s, len(a.rates) + 1) for a in fitted]))
    begun = np.zeros(len(edges))  # conversations from 0 to each edge
    for a in fitted:
        by_bin = np.cumsum([0.0, *a.rates]) * (a.span_s / len(a.rates))
        begun += np.interp(edges, np.linspace(0, a.span_s, len(by_bin)), by_bin)
    passes, rest = divmod(rate * duration_s, float(begun[-1]))
    return duration_s / (passes * model.span_s + float(np.interp(rest, begun, edges)))


def _begun_evenly(model: Model, rate: float | None, duration_s: float | None, seed: int) -> Iterator[Begun]:
    """The same of a trace without times: Poisson at the rate asked, or in order and without times."""
    now, stream = 0.0, Stream(None, tuple(c for s in model.streams for c in s.conversations), model.streams[0].law)
    n = len(stream.conversations) or PASS
    for number in naturals():
        rows = _brought(stream, n, number > 0, model.block_size, (seed, 0, number))
        gaps = -np.log1p(-uniforms(n, seed, GAPS, 0, number)) / (rate or 1.0)
        for row, gap in zip(rows, gaps, strict=True):
            if duration_s is not None and now >= duration_s:
                return
            yield Begun(round(now, 6), row)
            now += float(gap)


def arrivals(model: Arrivals, seed: int, stream: int = 0, number: int = 0) -> np.ndarray:
    """Sorted times (n,) in [0, span_s) of one pass: a renewal of unit mean run through the integral of a random rate.

    Cox and Isham, Point Processes, 1980, 3.3 and 4.2, for both parts.
    """
    load = np.array(model.rates) * (model.span_s / len(model.rates))
    for level, rhos in enumerate(model.splits):
        rho = np.array(rhos)[np.searchsorted(CUTS, load / load.mean())]
        share = beta_shares(uniforms((2, len(load)), seed, RATES, stream, number, level), rho)
        load = np.stack([load * share, load * (1 - share)], axis=1).ravel()
    reached = np.concatenate([[0.0], np.cumsum(load)])
    n = int(reached[-1] + 10 * math.sqrt(reached[-1]) + 10)  # ten standard deviations over the mean
    due = np.cumsum(unit_gaps(n, model.shape, seed, GAPS, stream, number))
    due = due[due < reached[-1]]
    leaf = np.searchsorted(reached, due, side="right") - 1
    within = (due - reached[leaf]) / load[leaf]
    return np.asarray(np.minimum((leaf + within) * (model.span_s / len(load)), model.span_s))


def beta_shares(two: np.ndarray, rho: np.ndarray) -> np.ndarray:
    """Symmetric Beta (n,) of mean 1/2 and variances rho / 4 (n,), 0 <= rho <= 1, from uniforms (2, n).

    Student's t with 2a degrees of freedom by Bailey's polar method (Math. Comp. 62, 1994), and a Beta(a, a) from it.
    """
    a = np.maximum(1 / np.maximum(rho, 1e-12) - 1, 1e-12) / 2
    squared = np.expm1(np.minimum(-np.log1p(-two[0]) / a, 700.0)) * np.cos(2 * np.pi * two[1]) ** 2
    right = np.where((two[1] < 0.25) | (two[1] >= 0.75), 1.0, -1.0)
    return np.asarray(0.5 + 0.5 * right * np.sqrt(squared / (1 + squared)))


def unit_gaps(n: int, shape: float, *key: int) -> np.ndarray:
    """Gaps (n,) of mean 1 and squared CV 1 / shape, shape >= 1: Erlang with m or m + 1 stages of one rate.

    Both moments are met exactly (Tijms, Stochastic Models, 1994, p. 358), and no sample is rejected, so that a gap
    always takes the same number of random words.
    """
    m = math.floor(shape)
    total = np.zeros(n)
    for stage in range(m):
        total -= np.log1p(-uniforms(n, *key, stage))
    if m == shape:
        return np.asarray(total / m)
    c2, k = 1 / shape, m + 1
    fewer = (k * c2 - math.sqrt(k * (1 + c2) - k * k * c2)) / (1 + c2)
    one_more = -np.log1p(-uniforms(n, *key, m))
    return np.asarray((total + np.where(uniforms(n, *key, k) < fewer, 0.0, one_more)) / (k - fewer))


def _draw(n: int, places: np.ndarray, warm: bool, seed: int, stream: int, number: int) -> np.ndarray:
    """Which of n conversations, in order of arrival, each place in [0, 1) of a pass gets.

    Each once where there are n places (a balanced bootstrap: Davison and others, Biometrika 73, 1986): all are shuffled
    within a distance, so that lengths which change over a trace still do, and their quantiles are the model's.
    """
    places = 1 / COLD + places * (1 - 1 / COLD) if warm else places
    moved = np.arange(n) + (2 * uniforms(n, seed, DRAWS, stream, number) - 1) * max(n / NEAR, 8.0)
    return np.argsort(moved, kind="stable")[np.floor(places * n).astype(np.int64)]


# -- what -------------------------------------------------------------------------------------------------------------


def _requests(begun: list[Begun], lengths: float, *, timed: bool) -> list[tuple[Request, int, int]]:
    """(request without blocks, its conversation, its turn), by time; a turn that waits for an answer stays with it."""
    made: list[tuple[float, int, int, Request]] = []
    for number, (at_s, conversation) in enumerate(begun):
        session = f"c{number}" if len(conversation.turns) > 1 else ""
        client = f"client-{conversation.client}" if conversation.client else ""
        floor, now = 0, at_s
        for k, turn in enumerate(conversation.turns):
            new = max(1, round(turn.tokens * lengths)) if turn.tokens else 0
            out = turn.tokens_out and max(1, round(turn.tokens_out * lengths))
            whole = floor + new
            if max(whole, out or 0) > MOST_TOKENS:
                raise BenchError(f"a prompt of {whole:,} tokens, expected {MOST_TOKENS:,} at most: lower --lengths")
            due = at_s if k == 0 else None
            if k and turn.after_s is not None:
                due = now = round(now + turn.after_s, 6)
            request = Request(
                tokens_in=whole,
                tokens_out=out,
                at_s=due if timed else None,
                session=session,
                turn=k,
                tokens_new=new if k else 0,
                think_s=turn.think_s,
                request_class=conversation.request_class,
                priority=conversation.priority,
                client=client,
            )
            made.append((now, number, k, request))
            floor = whole + (out or 0)
    made.sort(key=lambda row: row[:3])
    return [(request, number, k) for _, number, k, request in made]


def _with_blocks(
    model: Model, begun: list[Begun], made: list[tuple[Request, int, int]], lengths: float
) -> list[Request]:
    """The same requests with hash_ids: each takes over whole blocks of an earlier one, and all others are new.

    As many blocks as the model's turn shared, from a request about as long ago as its was: so the bound of an endless
    cache and the distances of reuse, which an LRU of any size lives by, are the model's. The parent is the one near
    that lag whose own blocks fit best: its whole prompt, for a talk that goes on (NEXT); a prompt that branched off at
    the same depth, for a system prompt or document (AGAIN).
    """
    size = max(1, round(model.block_size * lengths))
    n = len(made)
    times, ids = [0.0] * n, list[tuple[int, ...]]()
    whole, branched, goes_on = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, bool)
    last: dict[int, int] = {}  # conversation -> its turn before
    used: Used = {}
    requests, fresh = [], 0
    for i, (request, number, k) in enumerate(made):
        times[i] = request.at_s if request.at_s is not None else times[last[number]] if k else float(i)
        turn = begun[number].conversation.turns[k]
        full = request.tokens_in // size
        # floor by tokens: blocks of 512 become 51 at 0.1, and 250 of them 250, not 251
        shared = min(full, int(turn.shared * model.block_size * lengths / size + 1e-9))
        parent: int | None = None
        if turn.source == NO_BLOCKS:
            whole[i], branched[i] = -1, -1
            ids.append(())
            requests.append(request)
            last[number] = i
            continue
        if turn.source == OWN and k:
            parent = last[number]
        elif turn.source != NEW and shared and i:
            target = bisect_left(times, times[i] - turn.lag, 0, i) if turn.source == NEXT else i - int(turn.lag)
            other = goes_on if turn.source == NEXT else branched != shared
            parent = _parent(whole[:i], other[:i], max(target, 0), shared, turn.source, ids, used)
        shared = min(shared, int(whole[parent])) if parent is not None else 0
        if parent is not None and shared > 0:
            goes_on[parent] |= shared == whole[parent]
            head = ids[parent][:shared]
        else:
            head = ()
        need = -(-request.tokens_in // size)
        own = tuple(range(fresh, fresh + need - len(head)))
        fresh += len(own)
        ids.append(head + own)
        used.update(dict.fromkeys(ids[i], i))
        whole[i], branched[i] = full, len(head)
        requests.append(replace(request, hash_ids=head + own, block_size=size))
        last[number] = i
    return requests


def _parent(
    whole: np.ndarray, other: np.ndarray, target: int, shared: int, source: str, ids: list[tuple[int, ...]], used: Used
) -> int:
    """Of the requests before, the one near `target` whose prompt fits `shared` whole blocks best."""
    n = len(whole)
    half = max(WINDOW, (n - target) // 4)
    while True:
        low, high = max(0, target - half), min(n, target + half + 1)
        fits = np.flatnonzero(whole[low:high] >= shared) + low
        if len(fits) or (low == 0 and high == n):
            break
        half *= 4
    if not len(fits):
        return int(np.argmax(whole))
    # In units that are worth each other: an eighth of the window, a block too many, a parent of the wrong kind.
    cost = 8.0 * other[fits]
    if source == NEXT:
        cost += np.minimum(whole[fits] - shared, 64)
    near = cost + np.abs(fits - target) * (8 / half)
    best = np.argsort(near, kind="stable")[:BEST]
    last = np.array([used[ids[j][shared - 1]] for j in fits[best]])  # the lag is since the last use, of any prompt
    return int(fits[best[np.argmin(cost[best] + np.abs(last - target) * (8 / half))]])
