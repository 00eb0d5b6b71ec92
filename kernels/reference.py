"""What the attention kernels must compute, in plain PyTorch and in the precision of what they are given.

Written to be read, sequence by sequence and key by key, not to be fast: tests call these with float64.
"""

from collections.abc import Sequence as Items

import torch

# The largest number of each type that pages are quantised to: a token's and head's largest element becomes it.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    counts: Items[int],
    lengths: Items[int],
    *,
    window: int = 0,
    scale: float | None = None,
    soft_cap: float = 0.0,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """[rows, heads, head_dim] of query's dtype: each row attends to the keys at its own position and before.

    `query` [rows, heads, head_dim]: the last counts[i] of lengths[i] tokens of each sequence, one after the other.
    `keys`, `values` [num_blocks, kv_heads, block_size, head_dim], `tables` [sequences, blocks]; `window`: positions
    that a query sees, its own among them, 0 for all; scales [num_blocks, kv_heads, block_size] of quantised pages.
    """
    heads, dim = query.shape[1:]
    group = heads // keys.shape[1]
    out, row = torch.empty_like(query), 0
    for table, count, length in zip(tables.tolist(), counts, lengths, strict=True):
        base = max(length - count + 1 - window, 0) if window else 0  # nothing before is seen by any row
        k = gathered(keys, key_scales, table, base, length).to(query.dtype).repeat_interleave(group, 0)
        v = gathered(values, value_scales, table, base, length).to(query.dtype).repeat_interleave(group, 0)
        for position in range(length - count, length):
            seen = slice(max(position + 1 - window, 0) - base if window else 0, position + 1 - base)
            scores = torch.einsum("hd,hkd->hk", query[row], k[:, seen]) * (dim**-0.5 if scale is None else scale)
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            out[row] = torch.einsum("hk,hkd->hd", torch.softmax(scores, -1), v[:, seen])
            row += 1
    return out


def gathered(pages: torch.Tensor, scales: torch.Tensor | None, table: Items[int], first: int, end: int) -> torch.Tensor:
    """[kv_heads, end - first, head_dim]: a sequence's positions [first, end), multiplied by their scales in float64."""
    positions = torch.arange(first, end, device=pages.device)
    blocks = torch.tensor(table, device=pages.device)[positions // pages.shape[2]]
    found = pages[blocks, :, positions % pages.shape[2]].transpose(0, 1)
    if scales is None:
        return found
    return found.double() * scales[blocks, :, positions % pages.shape[2]].T.double()[..., None]


def quantise(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., head_dim] as `dtype` and the scale [...], float32, that each vector is multiplied by to get it back.

    Symmetric: the largest magnitude of a vector becomes the type's largest number. A vector of zeros has scale 1.
    One with an element that is no finite number has scale NaN, and 0 for every element.
    """
    largest = x.float().abs().amax(-1)
    finite = largest.isfinite()
    scale = torch.where(largest > 0, largest / LARGEST[dtype], 1.0).where(finite, torch.nan)
    unit = (x.float() / scale[..., None]).clamp(-LARGEST[dtype], LARGEST[dtype]).where(finite[..., None], 0.0)
    return (unit.round() if dtype == torch.int8 else unit).to(dtype), scale


def kv_write(new: torch.Tensor, pages: torch.Tensor, slots: Items[int], scales: torch.Tensor | None = None) -> None:
    """Put `new` [rows, kv_heads, head_dim] into `pages` [num_blocks, kv_heads, block_size, head_dim], in place.

    slots[i] = block · block_size + place in it; below 0, row i is written nowhere.
    """
    for row, slot in enumerate(slots):
        if slot < 0:
            continue
        block, place = divmod(slot, pages.shape[2])
        if scales is None:
            pages[block, :, place] = new[row].to(pages.dtype)
        else:
            pages[block, :, place], scales[block, :, place] = quantise(new[row], pages.dtype)
