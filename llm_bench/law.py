"""conversations(law, n): what n arrivals bring, drawn of published distributions; the same on any machine for a seed.

Lengths have the law's quantiles, and a prompt and its answer its rank correlation, by a Gaussian copula (Nelsen, An
Introduction to Copulas, 2006, 2.3.6; of normals r = 2 sin(pi rho / 6), Pearson 1907).
"""

import math
from itertools import accumulate
from statistics import NormalDist

import numpy as np

from llm_bench.fit import AGAIN, NEW, NEXT, NO_BLOCKS, OWN, Conversation, Law, Quantiles, Turn
from llm_bench.request import MOST_TOKENS

LENGTHS = 4  # the name of this random stream, beside those of synth
TAIL = 0.99  # from this level on a distribution falls as a power law, below it is as even as may be


def uniforms(shape: int | tuple[int, ...], *key: int) -> np.ndarray:
    """Numbers in [0, 1) of the stream named by `key` (seed first): PCG64's bits, 53 of each word."""
    size = math.prod(shape) if isinstance(shape, tuple) else shape
    bits = np.random.PCG64(np.random.SeedSequence(key[0], spawn_key=key[1:])).random_raw(size)
    return ((bits >> np.uint64(11)) * 2.0**-53).reshape(shape)


def conversations(law: Law, n: int, block_size: int, seed: int, stream: int, number: int) -> list[Conversation]:
    """n of them. block_size: tokens of a hash block, 0: prompts have none."""

    def levels(size: int, *key: int) -> np.ndarray:
        return uniforms(size, seed, LENGTHS, stream, number, *key)

    of_prompt = levels(n, 0)
    of_answer = correlated(of_prompt, levels(n, 1), law.spearman)
    prompts, answers = tokens(law.tokens_in, of_prompt, law.rows), tokens(law.tokens_out, of_answer, law.rows)
    turns = tokens(law.turns, levels(n, 2), law.rows) if law.turns else [1] * n
    shared = _first(law, np.array(prompts), block_size, levels(n, 3), levels(n, 4))
    later = sum(turns) - n
    added = tokens(law.tokens_new, levels(later, 5), law.rows) if later else []
    more = tokens(law.tokens_out, levels(later, 6), law.rows) if later else []
    pauses = quantile(law.think_s, levels(later, 7), law.rows).round(3).tolist() if later and law.think_s else []
    own = OWN if block_size else NO_BLOCKS
    rest = [
        Turn(added[i], more[i], pauses[i] if pauses else 0.0, None, own, MOST_TOKENS if block_size else 0, 0.0)
        for i in range(later)
    ]
    ends = list(accumulate((k - 1 for k in turns), initial=0))
    return [
        Conversation(0, "", 0, (Turn(prompts[i], answers[i], None, None, *shared[i]), *rest[ends[i] : ends[i + 1]]))
        for i in range(n)
    ]


def _first(
    law: Law, prompts: np.ndarray, block_size: int, chosen: np.ndarray, lags: np.ndarray
) -> list[tuple[str, int, float]]:
    """Source, whole blocks shared and lag of each first prompt."""
    if not block_size:
        return [(NO_BLOCKS, 0, 0.0)] * len(prompts)
    rest = (AGAIN, law.common, 1.0) if law.common else (NEW, 0, 0.0)
    parts = np.maximum(np.floor(prompts // block_size * law.again_part), law.common).astype(int).tolist()
    waits = (-np.log1p(-lags) * law.again_lag_s).round(3).tolist()
    again = (chosen < law.again).tolist()
    return [(NEXT, parts[i], waits[i]) if again[i] else rest for i in range(len(prompts))]


def correlated(levels: np.ndarray, others: np.ndarray, rho: float) -> np.ndarray:
    """Uniforms (n,) whose ranks correlate by rho (Spearman) with `levels`, made of `others`, both uniform (n,)."""
    if not rho:
        return others
    r, normal = 2 * math.sin(math.pi * rho / 6), NormalDist()
    rest = math.sqrt(1 - r * r)
    least = 2.0**-54  # of the words 0 alone has no normal
    pairs = zip(np.maximum(levels, least).tolist(), np.maximum(others, least).tolist(), strict=True)
    return np.array([normal.cdf(r * normal.inv_cdf(u) + rest * normal.inv_cdf(v)) for u, v in pairs])


def tokens(table: Quantiles, levels: np.ndarray, rows: int) -> list[int]:
    whole: list[int] = np.maximum(np.rint(quantile(table, levels, rows)), 1).astype(int).tolist()
    return whole


def quantile(table: Quantiles, levels: np.ndarray, rows: int) -> np.ndarray:
    """Values (n,) at levels (n,) of a distribution with these quantiles; between them the logarithm is linear.

    Beyond the last one from TAIL on it is linear in log(1 - level), as of a power law, up to the largest of `rows`.
    """
    places, values = np.array(table).T
    logs = np.log(values)
    found = np.interp(levels, places, logs)
    if len(places) > 1 and places[-2] >= TAIL:
        low, high = -math.log1p(-places[-2]), math.log(max(rows, 2))
        part = (-np.log1p(-np.minimum(levels, 1 - 2.0**-53)) - low) / max(high - low, 1e-9)
        above = logs[-2] + np.clip(part, 0, 1) * (logs[-1] - logs[-2])
        found = np.where(levels > places[-2], above, found)
    return np.asarray(np.exp(found))
