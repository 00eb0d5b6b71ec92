"""Logits to tokens. A draw depends on a sequence's seed and the position in its answer, on nothing else in a batch."""

import struct
from collections.abc import Sequence as Items
from hashlib import blake2b

import numpy as np
import torch

from reference_engine.runner_api import NOT_FINITE
from reference_engine.sequence import Sequence


def sample(logits: torch.Tensor, sequences: Items[Sequence], eos_ids: frozenset[int], seed: int) -> list[int]:
    """One token for each row of logits [len(sequences), vocab] float32; writes -inf into logits of masked end tokens.

    `seed`: of the engine, for sequences without their own. Temperature 0 is the argmax, the lowest id among equals.
    NOT_FINITE for a row with a NaN or +inf, or of nothing but -inf.
    """
    if not sequences:
        return []
    early = [row for row, s in enumerate(sequences) if s.output_len < s.params.min_tokens]
    if early and eos_ids:
        logits[torch.tensor(early)[:, None], torch.tensor(sorted(eos_ids))] = -torch.inf
    best = logits.argmax(-1)  # a NaN is the greatest of all
    finite = logits.gather(1, best[:, None])[:, 0].isfinite()
    tokens: list[int] = best.where(finite, NOT_FINITE).tolist()
    drawn = [row for row, s in enumerate(sequences) if s.params.temperature > 0 and tokens[row] != NOT_FINITE]
    if drawn:
        rows = logits[drawn].cpu().numpy()
        for row, values in zip(drawn, rows, strict=True):
            params = sequences[row].params
            tokens[row] = draw(values, params.temperature, params.top_p, uniform(sequences[row], seed))
    return tokens


def uniform(sequence: Sequence, seed: int, later: int = 0) -> float:
    """A number in [0, 1) for the next token: a hash of (seed, position), so it survives preemption and any batching.

    A sequence without a seed takes the engine's and its own id. `later`: for the token so many after the next.
    """
    own = sequence.params.seed
    stream = (0, seed, sequence.id) if own is None else (1, own, 0)
    low = 2**64 - 1  # clients may send any integer; Python's & makes it a 64-bit pattern
    key = struct.pack("<4Q", *(part & low for part in (*stream, sequence.output_len + later)))
    return (int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def draw(logits: np.ndarray, temperature: float, top_p: float, u: float) -> int:
    """Invert the cumulative distribution at u over the nucleus: the fewest likeliest tokens of probability >= top_p.

    Nucleus: arXiv 1904.09751. Equal probabilities are taken in order of id. float64, so that the sums are exact enough.
    """
    wide = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # to -inf at a temperature near 0, which is right
        weights = np.exp((wide - wide.max()) / temperature)  # the largest is 1
    if top_p >= 1:
        return _invert(np.cumsum(weights), u)
    order = np.argsort(-weights, kind="stable")
    sums = np.cumsum(weights[order])
    kept = int(np.searchsorted(sums, top_p * sums[-1], side="left")) + 1
    return int(order[_invert(sums[:kept], u)])


def _invert(sums: np.ndarray, u: float) -> int:
    """The first index whose sum exceeds u of the whole. u <= 1 - 2**-53, so u·whole does not round up to the whole."""
    return int(np.searchsorted(sums, u * sums[-1], side="right"))
