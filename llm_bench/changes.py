"""Change points of a history of runs by E-divisive means, each with its significance; numpy only, seeded, no I/O."""

import itertools
from typing import NamedTuple

import numpy as np

ALPHA = 0.05
MIN_SIZE = 5  # values on each side: with fewer, one odd run is a change
PERMUTATIONS = 399  # the least p is 1/400


class ChangePoint(NamedTuple):
    """From the value `at` on they are others: their means before and after, up to the neighbouring change points."""

    at: int
    p: float
    before: float
    after: float

    @property
    def share(self) -> float | None:
        """The change relative to what was before; None where that was 0."""
        return self.after / self.before - 1 if self.before else None


def e_divisive(
    series: np.ndarray, seed: int = 0, alpha: float = ALPHA, min_size: int = MIN_SIZE, permutations: int = PERMUTATIONS
) -> list[ChangePoint]:
    """Where the distribution of `series` (n,), in order of time, changes; in that order.

    The energy distance of the two sides of a cut is greatest at a change (Matteson and James, JASA 109, 2014, with
    exponent 1; without their search for where the later side ends, as in MongoDB's use on CI histories: Daly et al.,
    ICPE 2020). The best cut of all segments is kept while p <= alpha, p from shuffling values within each segment; a
    history without any change so shows one in at most alpha of all cases. Under 2 * min_size values: none.
    ValueError for a value that is not finite, or min_size under 2.
    """
    if min_size < 2 or not np.isfinite(series).all():
        raise ValueError(f"series {series.tolist()}, min_size {min_size}: expected finite numbers and at least 2")
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed])))
    edges, found = [0, len(series)], dict[int, float]()
    while True:
        distances = [_distances(series[a:b]) for a, b in itertools.pairwise(edges)]
        gains, cuts = zip(*(_best(d, min_size) for d in distances), strict=True)
        which = int(np.argmax(gains))
        if gains[which] <= 0:
            break
        shuffled = [_shuffled_best(distances, min_size, random) for _ in range(permutations)]
        # Equal on paper is as extreme: shuffling equal values changes only the rounding.
        p = (1 + sum(g >= gains[which] * (1 - 1e-9) for g in shuffled)) / (1 + permutations)
        if p > alpha:
            break
        at = edges[which] + cuts[which]
        found[at] = p
        edges = sorted([*edges, at])
    means = [float(series[a:b].mean()) for a, b in itertools.pairwise(edges)] if len(edges) > 2 else []
    return [ChangePoint(at, found[at], means[i], means[i + 1]) for i, at in enumerate(edges[1:-1])]


def _distances(segment: np.ndarray) -> np.ndarray:
    return np.asarray(np.abs(segment[:, None] - segment[None, :]))


def _shuffled_best(distances: list[np.ndarray], min_size: int, random: np.random.Generator) -> float:
    orders = [random.permutation(len(d)) for d in distances]
    return max(_best(d[np.ix_(o, o)], min_size)[0] for d, o in zip(distances, orders, strict=True))


def _best(distance: np.ndarray, min_size: int) -> tuple[float, int]:
    """(gain, cut) of the best cut of a segment by its distances (n, n): values before the cut against those from it on.

    gain = mk/(m+k) * (2 mean across - mean within the first m - mean within the last k), means over distinct pairs.
    """
    n = len(distance)
    cuts = np.arange(min_size, n - min_size + 1)
    if not len(cuts):
        return 0.0, 0
    pairs_before = np.cumsum(np.tril(distance).sum(axis=1))[cuts - 1]  # every pair counted once
    across = np.cumsum(distance.sum(axis=1))[cuts - 1] - 2 * pairs_before
    pairs_after = distance.sum() / 2 - pairs_before - across
    m, k = cuts, n - cuts
    within = pairs_before / (m * (m - 1) / 2) + pairs_after / (k * (k - 1) / 2)
    gains = m * k / n * (2 * across / (m * k) - within)
    best = int(np.argmax(gains))
    return float(gains[best]), int(cuts[best])
