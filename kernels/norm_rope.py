"""RMSNorm with the residual's addition, and the norm and rotation of query and key heads.

Bytes moved, b a value's size, n = rows · hidden: a norm reads and writes n·b. The addition and the norm one after the
other move 5·n·b (x, residual, sum; sum, out), together 4·n·b (x, residual; sum, out). The heads of a row are read and
written once, 2·rows·(heads + kv_heads)·head_dim·b, where a norm and then a rotation would do it twice and torch's
operators (norm, copy, roll, two products, a sum) 6.5 times. Weights, cos and sin are small beside that: of cos and sin,
whose halves say the same, one half each is read. All are bound by memory: some ten operations a value.

A row is summed by one program in one order, whatever the batch: the result of a row depends on that row alone.
Meant for: hidden 2,048 to 8,192; 32 + 8 heads of 64 and 128; rows 1 to 8,192. Not yet measured on a GPU.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

import torch

from kernels.dense_config import FLOATS, blocks, expect, jit, launch, power_of_two, tl, warps

WIDEST = 16_384  # of a row that one program holds in registers
HEAD_VALUES = 2048  # of a program that rotates: as many heads as make this many values


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, size] over the root of its mean square, times weight [size]. Sums in float32, rounds once.

    arXiv 1910.07467. `out`: where to write, may be x. Raises ValueError.
    """
    out = torch.empty_like(x) if out is None else out
    _check_rows(x, weight, out=out)
    _launch_norm(x, weight, x, out, eps, add=False)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """residual += x in place, then the norm of that sum as it was rounded to be stored. All [rows, size].

    `out`: where to write, may be x. Raises ValueError.
    """
    out = torch.empty_like(x) if out is None else out
    _check_rows(x, weight, out=out, residual=residual)
    _launch_norm(x, weight, residual, out, eps, add=True)
    return out


def norm_rope(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: tuple[int, int],
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Norm (where given) and rotate the query and key heads of qkv [rows, heads + 2 kv_heads, head_dim], in place.

    heads: (query heads, KV heads). norms: weights [head_dim] of queries and of keys. cos and sin: the engine's tables
    [positions, 1, head_dim]; cos has equal halves, sin's first half is negated, and only the second is read. Halves
    (a, b) of a head become (a cos - b sin, b cos + a sin), arXiv 2104.09864. positions [rows] must lie in the tables:
    nothing checks that on a GPU. Raises ValueError.
    """
    query_heads, kv_heads = heads
    rows, size = len(qkv), qkv.shape[-1]
    expect("qkv", qkv, (rows, query_heads + 2 * kv_heads, size), FLOATS, qkv)
    if size % 2 or (qkv.numel() and qkv.stride(1) != size):
        raise ValueError(f"qkv has heads of {size}, {qkv.stride(1)} apart; would be right: of an even size, adjacent")
    expect("positions", positions, (rows,), (torch.int64, torch.int32), qkv)
    for name, table in (("cos", cos), ("sin", sin)):
        expect(name, table, (len(cos), 1, size), FLOATS, qkv)
    for name, weight in zip(("q_norm", "k_norm"), norms or (), strict=False):
        expect(name, weight, (size,), (qkv.dtype,), qkv)
    q_norm, k_norm = norms or (qkv, qkv)
    half = power_of_two(size // 2)
    tile = min(max(HEAD_VALUES // (2 * half), 1), power_of_two(query_heads + kv_heads))
    launch(
        _norm_rope, (rows, blocks(query_heads + kv_heads, tile)),
        qkv, positions, cos, sin, q_norm, k_norm, qkv.stride(0), cos.stride(0), sin.stride(0),
        query_heads, query_heads + kv_heads, size // 2, eps,
        NORM=norms is not None, HEADS=tile, HALF=half, warps=warps(2 * half * tile),
    )  # fmt: skip
    return qkv


def _check_rows(x: torch.Tensor, weight: torch.Tensor, **others: torch.Tensor) -> None:
    if x.ndim != 2 or x.shape[1] > WIDEST:
        raise ValueError(f"x is {list(x.shape)}; would be right: [rows, size], size at most {WIDEST:,}")
    expect("x", x, (x.shape[0], x.shape[1]), FLOATS, x)
    expect("weight", weight, (x.shape[1],), (x.dtype,), x)
    for name, other in others.items():
        expect(name, other, (x.shape[0], x.shape[1]), (x.dtype,), x)


def _launch_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, out: torch.Tensor, eps: float, add: bool
) -> None:
    block = power_of_two(x.shape[1])
    launch(
        _rms_norm, (len(x),), x, weight, residual, out, x.stride(0), residual.stride(0), out.stride(0), x.shape[1], eps,
        ADD=add, BLOCK=block, warps=warps(block),
    )  # fmt: skip


@jit
def _rms_norm(
    x, weight, residual, out, x_stride, residual_stride, out_stride, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)  # rows · stride may pass 2**31
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        place = residual + row * residual_stride + columns
        total = (values + tl.load(place, mask=inside, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(place, total, mask=inside)
        values = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    values = values * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, values.to(out.dtype.element_ty), mask=inside)


@jit
def _norm_rope(
    qkv, positions, cos, sin, q_norm, k_norm, row_stride, cos_stride, sin_stride, query_heads, heads, half, eps,
    NORM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one row a program: both halves are loaded before either is stored."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, HALF)
    narrow = column < half
    inside = (head[:, None] < heads) & narrow[None, :]
    place = qkv + row * row_stride + head[:, None] * (2 * half) + column[None, :]
    a = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(place + half, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * half) + eps)[:, None]
        query = (head < query_heads)[:, None]
        q_a = tl.load(q_norm + column, mask=narrow, other=0.0).to(tl.float32)[None, :]
        q_b = tl.load(q_norm + half + column, mask=narrow, other=0.0).to(tl.float32)[None, :]
        k_a = tl.load(k_norm + column, mask=narrow, other=0.0).to(tl.float32)[None, :]
        k_b = tl.load(k_norm + half + column, mask=narrow, other=0.0).to(tl.float32)[None, :]
        a = a * scale * tl.where(query, q_a, k_a)
        b = b * scale * tl.where(query, q_b, k_b)
    position = tl.load(positions + row).to(tl.int64)
    c = tl.load(cos + position * cos_stride + column, mask=narrow, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + position * sin_stride + half + column, mask=narrow, other=0.0).to(tl.float32)[None, :]
    tl.store(place, (a * c - b * s).to(qkv.dtype.element_ty), mask=inside)
    tl.store(place + half, (b * c + a * s).to(qkv.dtype.element_ty), mask=inside)
