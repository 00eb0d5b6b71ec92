"""Logits to tokens: temperature, min-p, top-k, top-p and the draw, one program a row, no sort.

Bytes moved, V values of b bytes a row: greedy reads a row once, V·b, an unfiltered draw three times, a filtered one at
most 38 times: eleven for each of top-k, top-p and the draw itself, five between. A row of 128,256 float32 is 0.5 MB, so
all but the first pass come from an L2 cache of 50 MB while no more than a hundred rows share it, and nothing is written
but the token. A radix sort with ids reads and writes 12 bytes a token in each of its passes, four at least.

One search does everything. What min-p, top-k and top-p keep are beginnings of the row in descending order, and the draw
is the first place in it whose cumulative weight exceeds u of what is kept. Each of the three is the largest logit with
enough tokens, or enough weight, at it and above: a search in the order of float32's bits, eight limits a pass, without
ever making the order. Among equals the lowest ids come first. So the rule is reference_engine/sampler.py's, inversion
of the cumulative distribution at u: in order of id where nothing is filtered, else in descending order.

A draw depends on the row, its settings, and u: given, or Philox4x32-10 of (seed, position). Weights are float32 and are
summed in float32 within 2,048 tokens, in float64 beyond: probabilities are right to 1e-6 of themselves. A row is one
program's, so no batch can matter; at batch 1 a single multiprocessor works.
Meant for: 1 to 256 rows of 32,000 to 256,000. Not yet measured on a GPU.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

from typing import NamedTuple

import torch

from kernels.dense_config import FLOATS, expect, jit, launch, tl

BLOCK = 2048  # tokens that a program looks at together
WAYS = 8  # limits that one pass compares with: 10.1 passes for 32 bits; 16 would be 7.9 passes of twice the work
WARPS = 8


class Settings(NamedTuple):
    """What the rows ask for, each [rows] on the logits' device."""

    temperature: torch.Tensor  # float64; 0: the likeliest, the lowest id among equals
    top_k: torch.Tensor  # int64; 0: all
    top_p: torch.Tensor  # float64; 1: all
    min_p: torch.Tensor  # float64, of the likeliest's probability; 0: all
    seed: torch.Tensor  # int64: of a sequence; which sequence has which, the caller says
    position: torch.Tensor  # int64: of the token in its answer, below 2**32


TYPES = Settings(torch.float64, torch.int64, torch.float64, torch.float64, torch.int64, torch.int64)  # type: ignore[arg-type]


def sample(
    logits: torch.Tensor,
    settings: Settings,
    uniforms: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token for each row of logits [rows, vocabulary] -> [rows] int64.

    Kept are first the tokens of at least min_p times the likeliest's probability, of these the top_k likeliest, of
    these the fewest likeliest with at least top_p of what is left, as vLLM does it. `uniforms` [rows] float64 in [0, 1)
    take the place of (seed, position). A logit may be -inf, not every one of a row. A row that has a NaN or +inf gets
    an id that means nothing, and harms no other row. Raises ValueError.
    """
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits is {list(logits.shape)}; would be right: [rows, vocabulary]")
    rows, vocabulary = logits.shape
    expect("logits", logits, (rows, vocabulary), FLOATS, logits)
    for name, values, dtype in zip(Settings._fields, settings, TYPES, strict=True):
        expect(name, values, (rows,), (dtype,), logits)  # type: ignore[arg-type]
    if uniforms is not None:
        expect("uniforms", uniforms, (rows,), (torch.float64,), logits)
    out = logits.new_empty(rows, dtype=torch.int64) if out is None else out
    expect("out", out, (rows,), (torch.int64,), logits)
    given = settings.temperature if uniforms is None else uniforms
    launch(
        _sample, (rows,), logits, *settings, given, out, vocabulary, logits.stride(0),
        GIVEN=uniforms is not None, BLOCK=BLOCK, WAYS=WAYS, warps=WARPS,
    )  # fmt: skip
    return out


@jit
def _sample(
    logits, temperatures, top_ks, top_ps, min_ps, seeds, positions, uniforms, out, vocabulary, stride,
    GIVEN: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """One row a program."""
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * stride
    highest, token = _likeliest(row, vocabulary, BLOCK)
    temperature = tl.load(temperatures + number)
    if (temperature > 0) & (tl.abs(highest) < float("inf")):  # else there is nothing that weights could be relative to
        if GIVEN:
            u = tl.load(uniforms + number)
        else:
            u = _uniform(tl.load(seeds + number), tl.load(positions + number))
        top_k, top_p, min_p = tl.load(top_ks + number), tl.load(top_ps + number), tl.load(min_ps + number)
        inverse = (1.0 / tl.maximum(temperature, 1e-20)).to(tl.float32)
        floor = min_p.to(tl.float32)
        if (top_k > 0) | (top_p < 1) | (min_p > 0):
            token = _filtered(row, vocabulary, highest, inverse, floor, top_k, top_p, u, BLOCK, WAYS)
        else:
            token = _unfiltered(row, vocabulary, highest, inverse, u, BLOCK, WAYS)
    tl.store(out + number, token.to(tl.int64))


@jit
def _likeliest(row, vocabulary, BLOCK: tl.constexpr):
    """The greatest logit and the lowest id that has it."""
    highest = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    for start in range(0, vocabulary, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        values = tl.load(row + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
        greatest = tl.max(values, 0)
        first = tl.min(tl.where(values == greatest, ids, 2147483647), 0)
        token = tl.where(greatest > highest, first, token)
        highest = tl.maximum(greatest, highest)
    return highest, token


@jit
def _uniform(seed, position):
    """53 bits of Philox as a number in [0, 1)."""
    first, second, _, _ = tl.philox(seed, position.to(tl.uint32), tl.full([], 0, tl.uint32), 0, 0)
    bits = (first.to(tl.uint64) << 32) | second.to(tl.uint64)
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2**-53


@jit
def _weigh(values, highest, inverse, floor):
    """exp((logit - highest) / temperature), 0 where it is below the floor. The clamp keeps what overflows finite."""
    weights = tl.exp(tl.maximum(values - highest, -1e10) * inverse)
    return tl.where((values > float("-inf")) & (weights >= floor), weights, 0.0)


@jit
def _ordered(values):
    """An int32 that is in the order of the floats: their bits, turned over below 0. Both zeros are one."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit
def _value(key):
    """The float of such an int32."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@jit
def _at_or_above(row, vocabulary, highest, inverse, floor, cuts, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """For each of the cuts the weight, or the number, of the tokens that are at it or above; float64."""
    sums = tl.zeros(cuts.shape, tl.float64)
    for start in range(0, vocabulary, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        values = tl.load(row + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
        weights = _weigh(values, highest, inverse, floor)
        if COUNT:
            weights = tl.where(weights > 0, 1.0, 0.0)
        above = _ordered(values)[:, None] >= cuts[None, :]
        sums += tl.sum(tl.where(above, weights[:, None], 0.0), 0).to(tl.float64)
    return sums


@jit
def _search(
    row, vocabulary, highest, inverse, floor, low, high, target,
    COUNT: tl.constexpr, STRICT: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """The largest key with the target (STRICT: more) at it or above, and how much is above it. It is in [low, high].

    Invariant: at `low` there is enough, at `high` + 1 there is not. `low` is taken at its word, so that rounding at the
    very end of a distribution gives its last token.
    """
    number = tl.arange(0, WAYS)
    beyond = tl.full([], 0.0, tl.float64)
    while low < high:
        step = (high - low + WAYS) // (WAYS + 1)
        cuts = tl.minimum(low + step * (number + 1), high + 1)
        sums = _at_or_above(row, vocabulary, highest, inverse, floor, cuts.to(tl.int32), COUNT, BLOCK)
        if STRICT:
            enough = tl.sum((sums > target).to(tl.int64), 0)
        else:
            enough = tl.sum((sums >= target).to(tl.int64), 0)
        if enough < WAYS:
            high = tl.minimum(low + step * (enough + 1), high + 1) - 1
            beyond = tl.sum(tl.where(number == enough, sums, 0.0), 0)
        low += step * enough
    return low, beyond


@jit
def _filtered(row, vocabulary, highest, inverse, floor, top_k, top_p, u, BLOCK: tl.constexpr, WAYS: tl.constexpr):
    """The token at u of what is kept, in descending order."""
    low = tl.full([], -2147483648, tl.int64)
    high = _ordered(highest).to(tl.int64)
    everything = tl.full([WAYS], -2147483648, tl.int32)
    kept = tl.max(_at_or_above(row, vocabulary, highest, inverse, floor, everything, False, BLOCK), 0)
    if top_k > 0:
        count = tl.max(_at_or_above(row, vocabulary, highest, inverse, floor, everything, True, BLOCK), 0)
        if top_k < count:
            low, beyond = _search(
                row, vocabulary, highest, inverse, floor, low, high, top_k.to(tl.float64), True, False, BLOCK, WAYS
            )
            limit = tl.full([WAYS], 0, tl.int64) + tl.minimum(low + 1, 2147483647)
            above = tl.max(_at_or_above(row, vocabulary, highest, inverse, floor, limit.to(tl.int32), False, BLOCK), 0)
            each = _weigh(_value(low.to(tl.int32)), highest, inverse, floor).to(tl.float64)
            kept = above + (top_k.to(tl.float64) - beyond) * each
    if top_p < 1:
        target = top_p * kept
        low, above = _search(row, vocabulary, highest, inverse, floor, low, high, target, False, False, BLOCK, WAYS)
        each = _weigh(_value(low.to(tl.int32)), highest, inverse, floor).to(tl.float64)
        kept = tl.minimum(above + tl.maximum(tl.ceil((target - above) / each), 1.0) * each, kept)
    target = u * kept
    low, above = _search(row, vocabulary, highest, inverse, floor, low, high, target, False, True, BLOCK, WAYS)
    each = _weigh(_value(low.to(tl.int32)), highest, inverse, floor).to(tl.float64)
    rank = tl.maximum(tl.floor((target - above) / each), 0.0).to(tl.int64) + 1
    return _of_rank(row, vocabulary, low.to(tl.int32), rank, BLOCK)


@jit
def _of_rank(row, vocabulary, key, rank, BLOCK: tl.constexpr):
    """The id of that rank, from 1, among the tokens that have the key; the last where there are not so many."""
    token = tl.full([], 0, tl.int32)
    seen = tl.full([], 0, tl.int64)
    for start in range(0, vocabulary, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        values = tl.load(row + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
        equal = (_ordered(values) == key) & (ids < vocabulary)
        ranks = seen + tl.cumsum(equal.to(tl.int64), 0)
        token = tl.maximum(token, tl.max(tl.where(equal & (ranks <= rank), ids, 0), 0))
        seen += tl.sum(equal.to(tl.int64), 0)
    return token


@jit
def _unfiltered(row, vocabulary, highest, inverse, u, BLOCK: tl.constexpr, WAYS: tl.constexpr):
    """The first id whose cumulative weight, in order of id, exceeds u of the whole."""
    everything = tl.full([WAYS], -2147483648, tl.int32)
    target = u * tl.max(_at_or_above(row, vocabulary, highest, inverse, 0.0, everything, False, BLOCK), 0)
    token = tl.full([], -1, tl.int32)
    last = tl.full([], 0, tl.int32)
    before = tl.full([], 0.0, tl.float64)
    for start in range(0, vocabulary, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        values = tl.load(row + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
        weights = _weigh(values, highest, inverse, 0.0)
        sums = tl.cumsum(weights, 0)
        found = before + sums.to(tl.float64) > target
        first = tl.min(tl.where(found, ids, 2147483647), 0)
        token = tl.where((token < 0) & (first < 2147483647), first, token)
        last = tl.maximum(last, tl.max(tl.where(weights > 0, ids, 0), 0))
        before += tl.max(sums, 0).to(tl.float64)
    return tl.where(token < 0, last, token)  # the two sums of a row may differ by their rounding
