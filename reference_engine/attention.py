"""Attention over a paged KV pool: rows' keys and values into it, queries over it. In torch, and through native.py."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from reference_engine import native, quant
from reference_engine.batch import Batch, Chunk, Group, Grouped, Paged, Pages
from reference_engine.families import Shape

# Of the pool: as the model has it (None), or eight bits with a float32 scale for each token and head.
STORED: dict[str, torch.dtype | None] = {"auto": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
KV_DTYPES = ("auto", "int8")  # of these functions and the native ones; kernels/ have all of STORED


@dataclass(slots=True, eq=False)
class Cache:
    """Keys and values of all layers, on one device."""

    shape: Shape
    pages: Pages
    pool: torch.Tensor  # [layers, 2, num_blocks, kv_heads, block_size, head_dim]
    scales: torch.Tensor | None  # of a pool of eight bits: [layers, 2, num_blocks, kv_heads, block_size] float32
    cos: torch.Tensor  # [positions, 1, head_dim]
    sin: torch.Tensor  # the same; the first half negated, see `rotate`
    gathered: torch.Tensor  # [2, elements] where keys and values of a group or chunk are brought together; grows
    sizes: native.Geometry
    windows: torch.Tensor  # [layers] int64: keys that a query sees; 0: all
    scratch: native.Scratch = field(default_factory=native.Scratch)  # `gathered` of the native kernels

    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.pool, self.scales) if t is not None)


def make_cache(shape: Shape, pages: Pages, like: torch.Tensor, rotation: tuple[torch.Tensor, ...], kind: str) -> Cache:
    """An empty cache on the device of `like` and in its dtype or that of `kind`; rotation: cos and signed sin."""
    # zeros, not empty: rows that a mask hides still enter a product with weight 0, and 0 · NaN is NaN
    size = (shape.layers, 2, pages.num_blocks, shape.kv_heads, pages.block_size)
    stored = STORED[kind]
    make = native.zeros if like.device.type == "cpu" else like.new_zeros
    pool = make(*size, shape.head_dim, dtype=stored or like.dtype)
    scales = like.new_zeros(size, dtype=torch.float32) if stored else None
    cos, sin = (t.to(like) for t in rotation)
    sizes = native.geometry(shape, pages.num_blocks, pages.block_size)
    windows = torch.tensor([pages.window if n in shape.windowed else 0 for n in range(shape.layers)])
    return Cache(shape, pages, pool, scales, cos, sin, pool.new_empty(2, 0), sizes, windows)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [rows, heads, head_dim], in place: halves (a, b) of a head become (a cos - b sin, b cos + a sin)."""
    swapped = x.roll(x.shape[-1] // 2, -1).mul_(sin)
    return x.mul_(cos).add_(swapped)


Norms = tuple[torch.Tensor | None, torch.Tensor | None]  # Qwen3's of query and key heads, [head_dim]


def store(cache: Cache, number: int, qkv: torch.Tensor, norms: Norms, batch: Batch) -> None:
    """Norm and rotate the heads of qkv [rows, heads + 2 kv_heads, head_dim] in place; keys and values into the pool.

    An int8 pool's rounding is written back into qkv: a prompt computed at once sees what one in chunks reads back.
    """
    assert isinstance(batch.layout, Grouped)
    shape, pool, slots = cache.shape, cache.pool[number], batch.layout.pool_slots
    _norm_heads(shape, qkv, norms)
    rotate(qkv[:, : shape.heads + shape.kv_heads], cache.cos[batch.positions], cache.sin[batch.positions])
    new = qkv[:, shape.heads :]
    if cache.scales is None:
        pool.view(-1, shape.head_dim).index_copy_(0, slots, new.reshape(-1, shape.head_dim))
        return
    integers, scales = quant.rows(new)
    pool.view(-1, shape.head_dim).index_copy_(0, slots, integers.view(-1, shape.head_dim))
    cache.scales[number].view(-1).index_copy_(0, slots, scales.view(-1))
    new.copy_(integers * scales)


def attend(cache: Cache, number: int, qkv: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[rows, heads · head_dim]: what the queries of each row find in the pool."""
    assert isinstance(batch.layout, Grouped)
    shape, windowed = cache.shape, number in cache.shape.windowed
    attended = qkv.new_empty(len(qkv), shape.heads, shape.head_dim)
    for group in batch.layout.groups:
        _decode(cache, number, group, windowed, qkv, attended)
    for chunk in batch.layout.chunks:
        _prefill(cache, number, chunk, windowed, qkv, attended)
    return attended.view(len(qkv), -1)


def _norm_heads(shape: Shape, qkv: torch.Tensor, norms: Norms) -> None:
    """Qwen3's norm of every query and key head, in place, before the rotation."""
    if norms[0] is None or norms[1] is None:
        return
    queries, keys = qkv[:, : shape.heads], qkv[:, shape.heads : shape.heads + shape.kv_heads]
    queries.copy_(F.rms_norm(queries, (shape.head_dim,), norms[0], shape.norm_eps))
    keys.copy_(F.rms_norm(keys, (shape.head_dim,), norms[1], shape.norm_eps))


def _decode(cache: Cache, number: int, group: Group, windowed: bool, qkv: torch.Tensor, attended: torch.Tensor) -> None:
    """One query a sequence. The heads that share a KV head are the rows of one small product."""
    shape, (start, end) = cache.shape, (group.start, group.end)
    size = (end - start, group.blocks * cache.pages.block_size)
    keys, values = _gather(cache, number, group.pool_rows, size, qkv.dtype)
    queries = qkv[start:end, : shape.heads].reshape(end - start, shape.kv_heads, -1, shape.head_dim)
    mask = group.masks[windowed]
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    if not out.isfinite().all():  # a block may still hold what another's sequence came to, and 0 · NaN is NaN
        hidden = mask.isinf().transpose(2, 3)
        keys, values = keys.masked_fill(hidden, 0), values.masked_fill(hidden, 0)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    attended[start:end] = out.view(end - start, shape.heads, shape.head_dim)


def _prefill(
    cache: Cache, number: int, chunk: Chunk, windowed: bool, qkv: torch.Tensor, attended: torch.Tensor
) -> None:
    """A chunk of one sequence: from its own rows if nothing was computed before, else from the pool."""
    shape, rows, mask = cache.shape, qkv[chunk.start : chunk.end], chunk.masks[windowed]
    queries, keys, values = torch.split(rows.transpose(0, 1)[None], [shape.heads, shape.kv_heads, shape.kv_heads], 1)
    if chunk.computed:
        length = chunk.computed + len(rows)
        padded = len(chunk.pool_rows) // shape.kv_heads * cache.pages.block_size
        found = _gather(cache, number, chunk.pool_rows, (1, padded), qkv.dtype)
        keys, values = (t[:, :, :length] for t in found)
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    attended[chunk.start : chunk.end] = out[0].transpose(0, 1)


def _gather(
    cache: Cache, number: int, pool_rows: torch.Tensor, size: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [sequences, kv_heads, positions, head_dim] of the pool's rows, in a buffer that is used again.

    Fresh temporaries of megabytes cost page faults on every layer.
    """
    shape, pages, pool = cache.shape, cache.pages, cache.pool[number]
    sequences, positions = size
    width = pages.block_size * shape.head_dim
    if cache.gathered.shape[1] < len(pool_rows) * width:
        cache.gathered = cache.pool.new_empty(2, len(pool_rows) * width)
    found = []
    for kind in (0, 1):
        place = cache.gathered[kind, : len(pool_rows) * width]
        torch.index_select(pool[kind].view(-1, width), 0, pool_rows, out=place.view(-1, width))
        heads = place.view(sequences, shape.kv_heads, positions, shape.head_dim)
        if cache.scales is not None:
            scales = cache.scales[number, kind].view(-1, pages.block_size)[pool_rows]
            heads = (heads * scales.view(sequences, shape.kv_heads, positions, 1)).to(dtype)
        found.append(heads)
    return found[0], found[1]


def store_native(cache: Cache, number: int, qkv: torch.Tensor, norms: Norms, batch: Batch) -> None:
    """`store`, but that qkv keeps what it had: `attend_native` reads keys and values from the pool alone."""
    scales = None if cache.scales is None else cache.scales[number]
    native.store(
        cache.sizes, qkv, cache.pool[number], scales, batch.positions, batch.slots, (cache.cos, cache.sin), norms,
        cache.shape.norm_eps,
    )  # fmt: skip


def attend_native(cache: Cache, number: int, qkv: torch.Tensor, batch: Batch) -> torch.Tensor:
    """`attend`; a row's result has the same bits however its prompt was cut and whatever stands beside it."""
    assert isinstance(batch.layout, Paged)
    window = cache.pages.window if number in cache.shape.windowed else 0
    scales = None if cache.scales is None else cache.scales[number]
    return native.attend(
        cache.sizes, qkv, cache.pool[number], scales, batch.positions, batch.layout, window, cache.scratch
    )


def all_layers(
    cache: Cache, stack: native.Stack, x: torch.Tensor, batch: Batch, kept: torch.Tensor | None
) -> torch.Tensor:
    """What model.hidden computes in parts, bit for bit."""
    assert isinstance(batch.layout, Paged)
    return native.all_layers(
        stack, x, cache.sizes, cache.pool, cache.scales, (cache.cos, cache.sin), cache.windows, batch.positions,
        batch.slots, batch.layout, kept, cache.scratch,
    )  # fmt: skip
