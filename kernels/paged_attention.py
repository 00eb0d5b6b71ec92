"""Causal attention of any mix of decodes and prompt chunks over paged keys and values: one kernel, one merge.

Bytes moved. A decode of a sequence of length L reads its K and V once, 2·L·kv_heads·head_dim·b bytes a layer (b: bytes
of a stored element; quantised pages add 8·L·kv_heads for the scales), and next to nothing else: the query and the
output are heads·head_dim elements, the block table 4·L/block_size bytes, and a split writes and reads
heads·(head_dim + 2)·4 bytes per 512 tokens, 0.8% each way at 8B shapes in bfloat16. It does 4·L·heads·head_dim flops:
heads/kv_heads flops a byte in 16 bits, 4 at 8B shapes, where a GPU balances at 200 to 300. So a decode is as fast as K
and V arrive: each is read once for all query heads that share it (they are the rows of one product, padded to 16), in
pieces that many programs read at a time. A long chunk is the other way round: 128 rows share what is read, the
products decide.

Which program does what is laid out on the host (`attention_api.plan`), which knows every length: nothing is searched
for on the GPU, the longest pieces start first, and no program is launched for work that is not there.

Meant for: 32 query heads, 8 KV heads, head_dim 128, bfloat16; 64 sequences of 4,096 tokens (decode), one of 8,192
(prefill); H100 and H200. Not yet measured on a GPU.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

import math
from typing import Any

import torch

from kernels.attention_api import Work
from kernels.dense_config import FLOATS, expect, expect_near, jit, launch, power_of_two, tl
from kernels.interpret import arithmetic
from kernels.kv_write import check_pages
from kernels.reference import LARGEST

LOG2_E = math.log2(math.e)
MERGED = 16  # splits that the merge reads at a time


@jit
def _attend(
    out,
    partial,
    sums,
    query,
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    items,
    scale,
    cap,
    table_stride,
    query_row,
    query_head,
    out_row,
    out_head,
    page_stride,
    page_head,
    page_slot,
    scale_page,
    scale_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    QUANTISED: tl.constexpr,
    SCORES: tl.constexpr,
    MIXES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One item for one KV head: the queries of a tile against keys [begin, end), by a running softmax in base 2."""
    item = items + tl.program_id(0) * 8
    sequence = tl.load(item)
    if sequence < 0:
        return
    first, queries, position = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    begin, end, place = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    kv_head = tl.program_id(1)

    # Rows are (query, head) pairs; those beyond `queries` compute on zeros, see what the last sees, and are not stored.
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM_PADDED)
    number, head = row // GROUP, kv_head * GROUP + row % GROUP
    held = (number < queries)[:, None] & (dim < DIM)[None, :]
    asking = (first + number).to(tl.int64)
    q = tl.load(query + (asking * query_row + head * query_head)[:, None] + dim[None, :], mask=held, other=0.0)
    q = q.to(SCORES)
    asks_at = position + tl.minimum(number, queries - 1)

    # What no turn of the loop changes is added once: the sequence's table, the KV head's place in a page.
    table = tables + sequence.to(tl.int64) * table_stride
    key_at, value_at = keys + kv_head * page_head + dim[None, :], values + kv_head * page_head + dim[None, :]
    key_scale_at, value_scale_at = key_scales + kv_head * scale_head, value_scales + kv_head * scale_head

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    # Keys that every row sees need no mask. What lies at the end does, and all of a window's, whose start is ragged.
    seen = begin if WINDOW else tl.maximum(begin, tl.minimum(end, position + 1) // KEYS * KEYS)
    for masked in tl.static_range(2):
        if masked or not WINDOW:
            low, high = (seen // KEYS * KEYS, end) if masked else (begin, seen)
            # Blocks are looked up a turn ahead: a lookup in the same turn costs the prefetch of keys one of its stages.
            column = low + tl.arange(0, KEYS)
            block = tl.load(table + column // BLOCK_SIZE, mask=(column >= begin) & (column < high), other=0)
            for start in tl.range(low, high, KEYS):
                column = start + tl.arange(0, KEYS)
                page, ahead = block.to(tl.int64), column + KEYS
                block = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < high, other=0)
                inside = (column >= begin) & (column < end) if masked else column >= 0
                read = inside[:, None] & (dim < DIM)[None, :]
                in_page = column % BLOCK_SIZE
                at = (page * page_stride + in_page * page_slot)[:, None]
                k = tl.load(key_at + at, mask=read, other=0.0).to(SCORES)
                score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
                if QUANTISED:
                    scale_at = page * scale_page + in_page
                    score *= tl.load(key_scale_at + scale_at, mask=inside, other=0.0)[None, :]
                if CAPPED:  # cap · tanh(score / cap), in units of 1 / log2(e)
                    score = cap * (1 - 2 / (1 + tl.exp2(score * (2 * 1.4426950408889634) / cap)))
                if masked:
                    visible = inside[None, :] & (column[None, :] <= asks_at[:, None])
                    if WINDOW:
                        visible &= column[None, :] > asks_at[:, None] - WINDOW
                    score = tl.where(visible, score, float("-inf"))

                risen = tl.maximum(highest, tl.max(score, 1))
                # A row that has seen no key yet stays at -inf, and -inf - -inf is no number.
                level = tl.where(risen == float("-inf"), 0.0, risen) if masked else risen
                weight = tl.exp2(score - level[:, None])
                faded = tl.exp2(highest - level)
                total = total * faded + tl.sum(weight, 1)
                if QUANTISED:
                    times = tl.load(value_scale_at + scale_at, mask=inside, other=0.0)[None, :]
                    # A later row's may be NaN, for a vector that was no finite numbers, and 0 · NaN is NaN.
                    weight *= tl.where(visible, times, 0.0) if masked else times
                v = tl.load(value_at + at, mask=read, other=0.0).to(MIXES)
                mixed = tl.dot(weight.to(MIXES), v, mixed * faded[:, None], input_precision=PRECISION)
                highest = risen

    if place < 0:
        to = out + (asking * out_row + head * out_head)[:, None] + dim[None, :]
        tl.store(to, (mixed / total[:, None]).to(out.dtype.element_ty), mask=held)
    else:
        slot = (place + number).to(tl.int64) * HEADS + head
        tl.store(partial + slot[:, None] * DIM + dim[None, :], mixed, mask=held)
        tl.store(sums + slot * 2, highest, mask=number < queries)
        tl.store(sums + slot * 2 + 1, total, mask=number < queries)


@jit
def _merge(
    out,
    partial,
    sums,
    merges,
    out_row,
    out_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One query of one head: its splits brought to the highest score among them and summed, always in this order."""
    merge = merges + tl.program_id(0) * 4
    row, first, step, splits = tl.load(merge), tl.load(merge + 1), tl.load(merge + 2), tl.load(merge + 3)
    if splits == 0:
        return
    head, dim = tl.program_id(1), tl.arange(0, DIM_PADDED)
    highest = float("-inf")
    total = 0.0
    mixed = tl.zeros([DIM_PADDED], tl.float32)
    for start in tl.range(0, splits, SPLITS):
        number = start + tl.arange(0, SPLITS)
        there = number < splits
        slot = (first + number * step).to(tl.int64) * HEADS + head
        peak = tl.load(sums + slot * 2, mask=there, other=float("-inf"))
        risen = tl.maximum(highest, tl.max(peak, 0))
        level = tl.where(risen == float("-inf"), 0.0, risen)  # splits of which this query sees no key
        weight, faded = tl.exp2(peak - level), tl.exp2(highest - level)
        total = total * faded + tl.sum(weight * tl.load(sums + slot * 2 + 1, mask=there, other=0.0), 0)
        held = there[:, None] & (dim < DIM)[None, :]
        part = tl.load(partial + slot[:, None] * DIM + dim[None, :], mask=held, other=0.0)
        mixed = mixed * faded + tl.sum(part * weight[:, None], 0)
        highest = risen
    to = out + row.to(tl.int64) * out_row + head * out_head + dim
    tl.store(to, (mixed / total).to(out.dtype.element_ty), mask=dim < DIM)


def paged_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    work: Work,
    *,
    scale: float | None = None,
    soft_cap: float = 0.0,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    """Attend `query` [rows, heads, head_dim] to the pages; the result goes to `out`, which looks like it.

    `keys`, `values`: [num_blocks, kv_heads, block_size, head_dim], alike in strides; in query's dtype, or int8 or
    float8_e4m3fn with `key_scales`, `value_scales` [num_blocks, kv_heads, block_size], float32, contiguous. `tables`:
    int32 [sequences, blocks]; entries that no item reads may hold anything. `work`: of `plan`, on query's device.
    Scores are divided by sqrt(head_dim) unless `scale` says otherwise; `soft_cap` c makes s c·tanh(s / c). Nothing is
    written but rows that have an item. Raises ValueError.
    """
    _check(out, query, keys, values, tables, work, key_scales, value_scales)
    heads, dim = query.shape[1:]
    kv_heads, block_size = keys.shape[1:3]
    quantised = keys.dtype in LARGEST
    scores = arithmetic(query.dtype)
    # A weight times a value's scale is small: below float16's normal numbers, not below bfloat16's, in which every int8
    # and e4m3 value is exact.
    mixes = arithmetic(torch.bfloat16 if quantised and query.dtype == torch.float16 else query.dtype)
    shape: dict[str, Any] = {"HEADS": heads, "DIM": dim, "DIM_PADDED": power_of_two(max(dim, 16))}
    partial = query.new_empty((work.slots, heads, dim), dtype=torch.float32)
    sums = query.new_empty((work.slots, heads, 2), dtype=torch.float32)  # highest score, sum of weights
    scale = LOG2_E * (dim**-0.5 if scale is None else scale)
    key_scales, value_scales = (t if quantised else sums for t in (key_scales, value_scales))  # sums: not read
    for tile, items in work.launches:
        launch(
            _attend,
            (len(items), kv_heads),
            *(out, partial, sums, query, keys, values, key_scales, value_scales, tables, items),
            *(scale, soft_cap * LOG2_E, tables.stride(0)),
            *(query.stride(0), query.stride(1), out.stride(0), out.stride(1)),
            *(keys.stride(0), keys.stride(1), keys.stride(2), kv_heads * block_size, block_size),
            **shape,
            GROUP=work.group,
            BLOCK_SIZE=block_size,
            ROWS=tile.rows,
            KEYS=tile.keys,
            WINDOW=work.window,
            CAPPED=soft_cap > 0,
            QUANTISED=quantised,
            SCORES=scores,
            MIXES=mixes,
            PRECISION="tf32x3",  # of float32: three products of tf32 are as good; in 16 bits it says nothing
            warps=tile.warps,
            stages=tile.stages,
        )
    rows = (len(work.merges), heads)
    launch(_merge, rows, out, partial, sums, work.merges, *out.stride()[:2], **shape, SPLITS=MERGED, warps=2)


def _check(
    out: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    work: Work,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> None:
    """Everything about the arguments that can be seen without reading them. Raises ValueError."""
    if query.dim() != 3 or keys.dim() != 4:
        raise ValueError(
            f"query is {list(query.shape)}, keys {list(keys.shape)}; would be right: [rows, heads, head_dim] and "
            "[num_blocks, kv_heads, block_size, head_dim]"
        )
    rows, heads, dim = query.shape
    expect("query", query, (rows, keys.shape[1] * work.group, dim), FLOATS, query)
    expect("out", out, (rows, heads, dim), (query.dtype,), query)
    expect_near("query", query)
    expect_near("out", out)
    expect("keys", keys, (*keys.shape[:3], dim), (query.dtype, *LARGEST), query)
    check_pages(keys, values, key_scales, value_scales, query)
    expect("tables", tables, (tables.shape[0], tables.shape[-1]), (torch.int32,), query)
    for given in (work.merges, *(items for _, items in work.launches)):
        if given.device != query.device:
            raise ValueError(f"work is on {given.device}; would be right: {query.device}, where query is")
    if work.rows > rows or work.sequences > len(tables):
        raise ValueError(
            f"work is of {work.rows} rows of {work.sequences} sequences; "
            f"would be right: at most {rows} of {len(tables)}"
        )
