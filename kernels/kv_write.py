"""New keys and values scattered into their pages, quantised on the way where pages are int8 or fp8.

Bytes moved. A token's K and V are read once and written once, 2·kv_heads·head_dim·(b_in + b_stored) bytes a layer, and
8·kv_heads more for the scales of quantised pages, 4 bytes for the slot: 8 KiB a token at 8B shapes in bfloat16. A step
of 64 decodes moves half a megabyte, far less than a launch costs, so K and V share one launch; a chunk of 8,192 tokens
moves 67 MB. A quantised vector's scale needs its largest element, so one program holds whole vectors: all heads of a
token, K then V.

Meant for: 8 KV heads, head_dim 128, 1 to 8,192 tokens. Not yet measured on a GPU.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

import torch

from kernels.dense_config import FLOATS, expect, expect_near, jit, launch, power_of_two, tl
from kernels.interpret import interpreted
from kernels.reference import LARGEST


@jit
def _write(
    new_keys,
    new_values,
    keys,
    values,
    key_scales,
    value_scales,
    slots,
    new_row,
    new_head,
    page_stride,
    page_head,
    page_slot,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUANTISED: tl.constexpr,
    LARGEST: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """One token: K, then V, of all its heads."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    head, dim = tl.arange(0, HEADS_PADDED), tl.arange(0, DIM_PADDED)
    held = (head < HEADS)[:, None] & (dim < DIM)[None, :]
    block, in_page = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    source = row * new_row + (head * new_head)[:, None] + dim[None, :]
    target = block * page_stride + in_page * page_slot + (head * page_head)[:, None] + dim[None, :]
    scale_at = (block * HEADS + head) * BLOCK_SIZE + in_page
    for kind in tl.static_range(2):
        x = tl.load((new_keys if kind == 0 else new_values) + source, mask=held, other=0.0)
        pages = keys if kind == 0 else values
        if QUANTISED:
            x = x.to(tl.float32)
            size = tl.abs(x)
            # Infinite where an element is no finite number: tl.max alone would pass over a NaN. Its scale then is NaN,
            # so that whatever is computed with the vector shows it, whichever eight bits stand beside it.
            largest = tl.max(tl.where(size < float("inf"), size, float("inf")), 1)
            finite = largest < float("inf")
            scale = tl.where(largest > 0, largest / LARGEST, 1.0)
            scale = tl.where(finite, scale, float("nan"))
            tl.store((key_scales if kind == 0 else value_scales) + scale_at, scale, mask=head < HEADS)
            x = tl.where(finite[:, None], x / scale[:, None], 0.0)
            x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
            if ROUNDS == "integer":  # 1.5 · 2**23 added and taken away leaves the nearest integer, ties to even
                x = (x + 12582912.0) - 12582912.0
            if ROUNDS == "e4m3":  # four significant bits (Dekker's split), or multiples of 2**-9 where that is more
                wide = x * 1048577.0
                x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, wide - (wide - x))
        tl.store(pages + target, x.to(pages.dtype.element_ty), mask=held)


def kv_write(
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    *,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    """Put each row of `new_keys` and `new_values` [rows, kv_heads, head_dim] into its slot of the pages, in place.

    `keys`, `values`: [num_blocks, kv_heads, block_size, head_dim], alike in strides, in the rows' dtype, or int8 or
    float8_e4m3fn with `key_scales`, `value_scales` [num_blocks, kv_heads, block_size], float32, contiguous: a stored
    element times its vector's scale is what was given, up to rounding; the scale of a vector with a NaN or an infinity
    is NaN. `slots`: int32 or int64 [rows], block · block_size + place in it, each at most once; below 0 a row is
    written nowhere; beyond the last page nothing checks it. Raises ValueError.
    """
    _check(new_keys, new_values, keys, values, slots, key_scales, value_scales)
    rows, heads, dim = new_keys.shape
    quantised = keys.dtype in LARGEST
    held = power_of_two(heads) * power_of_two(dim)
    launch(
        *(_write, (rows,), new_keys, new_values, keys, values),
        *(key_scales if quantised else slots, value_scales if quantised else slots, slots),  # slots: not touched
        *(new_keys.stride(0), new_keys.stride(1), keys.stride(0), keys.stride(1), keys.stride(2)),
        HEADS=heads,
        HEADS_PADDED=power_of_two(heads),
        DIM=dim,
        DIM_PADDED=power_of_two(dim),
        BLOCK_SIZE=keys.shape[2],
        QUANTISED=quantised,
        LARGEST=LARGEST.get(keys.dtype, 0.0),
        ROUNDS="integer" if keys.dtype == torch.int8 else "e4m3" if quantised and interpreted() else "",
        warps=min(max(held // 512, 1), 8),
    )


def _check(
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> None:
    """Everything about the arguments that can be seen without reading them. Raises ValueError."""
    if new_keys.dim() != 3 or keys.dim() != 4:
        raise ValueError(
            f"new_keys is {list(new_keys.shape)}, keys {list(keys.shape)}; would be right: [rows, kv_heads, head_dim] "
            "and [num_blocks, kv_heads, block_size, head_dim]"
        )
    rows, heads, dim = new_keys.shape
    expect("new_keys", new_keys, (rows, heads, dim), FLOATS, new_keys)
    expect("new_values", new_values, (rows, heads, dim), (new_keys.dtype,), new_keys)
    _same_strides("new_values", new_values, new_keys)
    expect_near("new_keys", new_keys)
    expect("keys", keys, (keys.shape[0], heads, keys.shape[2], dim), (new_keys.dtype, *LARGEST), new_keys)
    check_pages(keys, values, key_scales, value_scales, new_keys)
    expect("slots", slots, (rows,), (torch.int32, torch.int64), new_keys)


def check_pages(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    like: torch.Tensor,
) -> None:
    """`keys`, `values` [num_blocks, kv_heads, block_size, head_dim] in like's dtype, or quantised, and scales."""
    shape = tuple(keys.shape)
    expect("keys", keys, shape, (like.dtype, *LARGEST), like)
    expect("values", values, shape, (keys.dtype,), like)
    _same_strides("values", values, keys)
    expect_near("keys", keys)
    if keys.dtype == torch.float8_e4m3fn and keys.is_cuda and torch.cuda.get_device_capability(keys.device) < (8, 9):
        raise ValueError("pages are float8_e4m3fn, which this GPU cannot convert; would be right: int8 or 16 bits")
    if keys.dtype not in LARGEST:
        return
    for name, given in (("key_scales", key_scales), ("value_scales", value_scales)):
        if given is None:
            raise ValueError(f"{name} is None; would be right: {list(shape[:3])} of float32, for keys of {keys.dtype}")
        expect(name, given, shape[:3], (torch.float32,), like)
        if not given.is_contiguous():
            raise ValueError(f"{name} has strides {given.stride()}; would be right: contiguous")


def _same_strides(name: str, given: torch.Tensor, like: torch.Tensor) -> None:
    if given.stride() != like.stride():
        raise ValueError(f"{name} has strides {given.stride()}; would be right: {like.stride()}, as its keys have")
