"""What a cell did over time, in bins of equal length that begin and end with its window; and the window in slices."""

from typing import NamedTuple

import numpy as np

from llm_bench import stats, windows
from llm_bench.columns import Cell
from llm_bench.series import NOTHING, SERIES, due_in, outcome_in, over, row_sums
from llm_bench.windows import Window

BINS = (100, 50, 20, 10)  # of the window: the most that leave no more than MOST_BINS in all
MOST_BINS = 240  # of a whole cell: each is over a pixel wide on any screen
BIN_REQUESTS = 4  # requests a bin at least, on average: fewer bins where there are few
SLICES = 10
DELIVERED = ("ok", "cut_at_end")  # whose tokens count in tokens_per_second


class Bins(NamedTuple):
    """Bin i is [zero + (first + i)·span / parts, zero + (first + i + 1)·span / parts), in ns."""

    zero_ns: int
    span_ns: int
    parts: int
    first: int  # of bins before `zero_ns`, negative
    n: int

    @property
    def edges_ns(self) -> np.ndarray:
        """(n + 1,)."""
        at = np.arange(self.first, self.first + self.n + 1)
        return np.asarray(self.zero_ns - (-at * self.span_ns) // self.parts)

    @property
    def seconds(self) -> float:
        """Length of each."""
        return self.span_ns / self.parts / 1e9

    def place(self, ns: np.ndarray) -> np.ndarray:
        """The bin of each moment, -1 before the first and `n` after the last."""
        found = ns - self.zero_ns
        found *= self.parts
        found //= self.span_ns
        found -= self.first
        return np.clip(found, -1, self.n, out=found)

    def counts(self, ns: np.ndarray) -> np.ndarray:
        """How many moments lie in each bin, int64 (n,)."""
        return self.sums(self.place(ns))

    def sums(self, place: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        """Sum of the weights, 1 where there are none, of what has a place in each bin (n,)."""
        return np.bincount(place + 1, weights, self.n + 2)[1:-1]


def bins(cell: Cell, window: Window) -> Bins:
    """The whole cell, and the window, in bins of which a round number makes up the window.

    Where the window is so small a part of the cell that ten bins of it would leave more than MOST_BINS, the cell is cut
    into MOST_BINS parts that know nothing of it.
    """
    whole = windows.whole(cell)
    begin_ns, end_ns = min(whole.start_ns, window.start_ns), max(whole.end_ns, window.end_ns)
    span = window.end_ns - window.start_ns
    most = max(BINS[-1], window.requests // BIN_REQUESTS)
    for parts in BINS:
        first = (begin_ns - window.start_ns) * parts // span
        last = -(-(end_ns - window.start_ns) * parts // span)
        if parts <= most and last - first <= MOST_BINS:
            return Bins(window.start_ns, span, parts, first, last - first)
    return Bins(begin_ns, end_ns - begin_ns, MOST_BINS, 0, MOST_BINS)


class Levels(NamedTuple):
    """A step function by bins: (n,) each."""

    mean: np.ndarray  # time average
    low: np.ndarray
    high: np.ndarray


def in_flight(cell: Cell, by: Bins) -> Levels:
    """Requests in flight: as the driver counted them where it did, else as the records have it."""
    at_ns, level = windows.in_flight(cell)
    edges = by.edges_ns
    at = np.concatenate([edges, at_ns])
    order = np.argsort(at, kind="stable")  # an edge before the step of the same moment
    at, all_levels = at[order], np.concatenate([windows.level_at(at_ns, level, edges), level])[order]
    starts = np.flatnonzero(order < len(edges))
    area = np.concatenate([[0.0], np.cumsum(np.diff(at) * all_levels[:-1])])[starts]
    inside = slice(int(starts[0]), int(starts[-1]))
    from_ = starts[:-1] - starts[0]
    low, high = (reduce.reduceat(all_levels[inside], from_) for reduce in (np.minimum, np.maximum))
    return Levels(over(np.diff(area), np.diff(edges)), low, high)


def arrivals(cell: Cell, by: Bins) -> np.ndarray:
    """Requests due a second in each bin (n,)."""
    return np.asarray(by.counts(cell["due_ns"]) / by.seconds)


def failed(cell: Cell, by: Bins) -> np.ndarray:
    """Failed requests that ended in each bin, int64 (n,)."""
    return by.counts(cell["end_ns"][outcome_in(cell, "failed")])


def tokens(cell: Cell, by: Bins) -> np.ndarray | None:
    """Output tokens a second in each bin (n,), of requests and with weights as `tokens_per_second` has them.

    None where a whole answer does not say how many it has.
    """
    rows, many, out = outcome_in(cell, *DELIVERED), cell.counts, cell["tokens_out"]
    whole = rows & (many == 0)
    at_end = by.place(cell["end_ns"][whole])
    if (out[whole][(at_end >= 0) & (at_end < by.n)] < 0).any():
        return None
    found = np.zeros(by.n) + by.sums(at_end, out[whole].astype(float))
    share = np.where(out > 0, over(out.astype(float), many), 1.0)
    for piece in cell.pieces():
        place, many_ = by.place(piece.ns), np.diff(piece.offsets)
        kept, weight = rows[piece.rows], share[piece.rows]
        if not kept.all():
            place[np.repeat(~kept, many_)] = by.n
        weights = None if (weight[kept] == 1.0).all() else np.repeat(weight, many_)
        if piece.tokens is not None:
            said = np.repeat(row_sums(piece.offsets, piece.tokens) > 0, many_)
            weights = np.where(said, piece.tokens, 1.0 if weights is None else weights)
        found += by.sums(place, weights)
    return np.asarray(found / by.seconds)


class Timeline(NamedTuple):
    """A whole cell over time, by bins (n,)."""

    by: Bins
    in_flight: Levels
    arrivals: np.ndarray  # a second
    tokens: np.ndarray | None  # a second
    failed: np.ndarray


def timeline(cell: Cell, window: Window) -> Timeline:
    by = bins(cell, window)
    return Timeline(by, in_flight(cell, by), arrivals(cell, by), tokens(cell, by), failed(cell, by))


class Slices(NamedTuple):
    """A window in SLICES equal parts; each array is (SLICES,)."""

    edges_ns: np.ndarray  # (SLICES + 1,)
    due: np.ndarray  # requests due
    failed: np.ndarray  # of them
    in_flight: np.ndarray  # time average
    tokens: np.ndarray | None  # a second
    ttft_p95: np.ndarray  # ms, of ok requests due in the slice; nan where there is none
    tpot_p95: np.ndarray

    @property
    def seconds(self) -> float:
        """Length of each."""
        return float(self.edges_ns[-1] - self.edges_ns[0]) / SLICES / 1e9

    @property
    def busiest(self) -> int:
        """The slice with the most requests due; of several the one with the most in flight."""
        return int(np.lexsort((self.in_flight, self.due))[-1])


def slices(cell: Cell, window: Window, whole: Timeline) -> Slices:
    """`whole`: the timeline of the same cell and window, whose bins the slices are made of where they can be."""
    by = Bins(window.start_ns, window.end_ns - window.start_ns, SLICES, 0, SLICES)
    due, ok = due_in(cell, window), outcome_in(cell, "ok")
    place = by.place(cell["due_ns"])
    p95 = {}
    for name in ("ttft", "tpot"):
        values = SERIES[name].of(cell, NOTHING).values
        mine = [values[due & ok & (place == i) & ~np.isnan(values)] for i in range(SLICES)]
        p95[name] = np.array([stats.percentile(v, 0.95) if len(v) else np.nan for v in mine])
    lost = by.counts(cell["due_ns"][due & outcome_in(cell, "failed")])
    per_second = whole.tokens
    if whole.by[:2] != by[:2]:
        per_second = tokens(cell, by)
    elif per_second is not None:  # every event is looked at once: a large run has tens of millions
        per_second = per_second[-whole.by.first :][: whole.by.parts].reshape(SLICES, -1).mean(axis=1)
    level = in_flight(cell, by).mean
    return Slices(by.edges_ns, by.counts(cell["due_ns"][due]), lost, level, per_second, p95["ttft"], p95["tpot"])
