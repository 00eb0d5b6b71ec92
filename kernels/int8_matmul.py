"""x Wᵀ with W in int8, a scale for each output channel, activations as they are.

Bytes moved for M rows, N outputs, K inputs: N·K + 4·N of weights, b·M·(K + N) of activations; in bfloat16 the weights
are 2·N·K, so a decode, which is bound by them, is at best twice as fast. 2·M·N·K operations: bound by memory up to
about 100 rows on an H100 or H200 (a byte of weight serves 2·M operations, the machine balances at 200 to 300), by the
product above. Scales belong to outputs, hence they are applied once, to sums; -128 to 127 is exact in bfloat16 and
float16, so a product is as exact as in the activations' own type.

The weights are the product's left side: N fills the tensor cores' rows, which 1 row of x could not, and Hopper's left
side may come from registers, where int8 becomes 16 bit, without a way back through shared memory.

`invariant`: one tile for every M and each sum in one program, k ascending, so that a row's result does not depend on
how many others there are. Otherwise the tile goes by M, and where the outputs make too few programs to fill the device
(one row of 4,096 outputs) K is split over several, whose sums are added in a fixed order: the same in every run.
Meant for 8B and 1B shapes: N, K of 2,048 to 28,672; M 1 to 64 (decode) and 512 to 8,192 (prefill). Not yet measured on
a GPU.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

from typing import NamedTuple

import torch

from kernels.dense_config import FLOATS, blocks, expect, jit, launch, tl
from kernels.interpret import arithmetic


class Tile(NamedTuple):
    """Outputs × rows × inputs that a program multiplies at a time."""

    n: int
    m: int
    k: int
    warps: int
    stages: int


# By the most rows of x that a tile is for; the last is for any number.
TILES: dict[int, Tile] = {
    16: Tile(64, 16, 128, warps=4, stages=5),  # 8 KiB of weights a step, five on their way in each program
    64: Tile(64, 64, 128, warps=4, stages=4),
    0: Tile(128, 128, 64, warps=8, stages=3),
}
INVARIANT = Tile(64, 64, 128, warps=4, stages=4)  # 64 rows cost a decode no bytes: W is what is read
WIDE_STAGES = 2  # of float32: with four, 152 KiB of shared memory, where an L40S or a 4090 has 99; with two, 72
PROGRAMS = 264  # two for each of 132 multiprocessors (H100, H200): with fewer, K is split
LEAST_K = 512  # inputs of a split: shorter ones cost more to start and to add than they bring
TOGETHER = 8  # row tiles that take turns on the same weights, so that these come from the L2 cache
SUMMED = 1024  # outputs that one program adds up


def int8_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    invariant: bool = True,
) -> torch.Tensor:
    """x [M, K] times weight [N, K] int8 times scale [N] float32, plus bias [N] -> [M, N] in x's type.

    Sums in float32, rounds once. Raises ValueError.
    """
    if x.ndim != 2 or weight.ndim != 2:
        raise ValueError(f"x is {list(x.shape)}, weight {list(weight.shape)}; would be right: [M, K], [N, K]")
    (rows, inputs), outputs = x.shape, len(weight)
    expect("x", x, (rows, inputs), FLOATS, x)
    expect("weight", weight, (outputs, inputs), (torch.int8,), x)
    expect("scale", scale, (outputs,), (torch.float32,), x)
    if bias is not None:
        expect("bias", bias, (outputs,), (x.dtype,), x)
    out = x.new_empty(rows, outputs) if out is None else out
    expect("out", out, (rows, outputs), (x.dtype,), x)
    tile = INVARIANT if invariant else _tile(rows)
    tiles = blocks(outputs, tile.n) * blocks(rows, tile.m)
    chunk = inputs if invariant else _chunk(inputs, tiles, tile.k)
    splits = max(blocks(inputs, chunk), 1) if chunk else 1
    sums = x.new_empty(splits, rows, outputs, dtype=torch.float32) if splits > 1 else out
    launch(
        _multiply, (tiles, splits), x, weight, scale, scale if bias is None else bias, sums,
        rows, outputs, inputs, chunk, x.stride(0), weight.stride(0), sums.stride(-2),
        BIAS=bias is not None, SPLIT=splits > 1, DOT=arithmetic(x.dtype),
        N=tile.n, M=tile.m, K=tile.k, TOGETHER=TOGETHER, warps=tile.warps,
        stages=min(tile.stages, WIDE_STAGES) if x.dtype == torch.float32 else tile.stages,
    )  # fmt: skip
    if splits > 1:
        launch(
            _add, (rows, blocks(outputs, SUMMED)), sums, scale, scale if bias is None else bias, out,
            rows, outputs, out.stride(0), BIAS=bias is not None, SPLITS=splits, BLOCK=SUMMED, warps=4,
        )  # fmt: skip
    return out


def _tile(rows: int) -> Tile:
    return next((tile for most, tile in TILES.items() if rows <= most), TILES[0])


def _chunk(inputs: int, tiles: int, step: int) -> int:
    """Inputs of a split: so many splits that the device is full, none shorter than LEAST_K, whole steps."""
    splits = max(min(PROGRAMS // max(tiles, 1), inputs // LEAST_K), 1)
    return blocks(blocks(inputs, splits), step) * step


@jit
def _multiply(
    x, weight, scale, bias, out, rows, outputs, inputs, chunk, x_stride, weight_stride, out_stride,
    BIAS: tl.constexpr, SPLIT: tl.constexpr, DOT: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """N outputs of M rows a program, over `chunk` inputs. SPLIT: bare sums to out [splits, rows, outputs]."""
    number, split = tl.program_id(0), tl.program_id(1)
    n_tiles, m_tiles = tl.cdiv(outputs, N), tl.cdiv(rows, M)
    first = number // (TOGETHER * n_tiles) * TOGETHER  # TOGETHER row tiles go through all outputs side by side
    side_by_side = tl.minimum(m_tiles - first, TOGETHER)
    within = number % (TOGETHER * n_tiles)
    n = within // side_by_side * N + tl.arange(0, N)
    m = (first + within % side_by_side) * M + tl.arange(0, M)
    k = split * chunk + tl.arange(0, K)
    end = tl.minimum(inputs, split * chunk + chunk)
    weight_at = weight + n.to(tl.int64)[:, None] * weight_stride + k[None, :]
    x_at = x + m.to(tl.int64)[None, :] * x_stride + k[:, None]
    n_inside, m_inside = n < outputs, m < rows
    sums = tl.zeros([N, M], tl.float32)
    for start in range(split * chunk, end, K):
        inside = start + tl.arange(0, K) < end
        w = tl.load(weight_at, mask=n_inside[:, None] & inside[None, :], other=0)
        values = tl.load(x_at, mask=m_inside[None, :] & inside[:, None], other=0.0)
        # ieee: of float32 the tensor cores would drop 13 bits
        sums = tl.dot(w.to(DOT), values.to(DOT), sums, input_precision="ieee")
        weight_at += K
        x_at += K
    place = m.to(tl.int64)[None, :] * out_stride + n[:, None]
    inside = n_inside[:, None] & m_inside[None, :]
    if SPLIT:
        tl.store(out + split.to(tl.int64) * rows * outputs + place, sums, mask=inside)
    else:
        sums *= tl.load(scale + n, mask=n_inside, other=0.0)[:, None]
        if BIAS:
            sums += tl.load(bias + n, mask=n_inside, other=0.0).to(tl.float32)[:, None]
        tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside)


@jit
def _add(
    sums, scale, bias, out, rows, outputs, out_stride, BIAS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK outputs of one row a program: the splits' sums, in their order."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < outputs
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(sums + (split * rows + row) * outputs + n, mask=inside, other=0.0)
    total *= tl.load(scale + n, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + n, total.to(out.dtype.element_ty), mask=inside)
