"""The Llama forward pass over a paged KV pool: one call computes the prompt chunks and decodes of a whole step."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from reference_engine.batch import Batch, Chunk, Group, Pages
from reference_engine.weights import Shape, Weights


@dataclass(slots=True, eq=False)
class Model:
    """Weights, rotation tables and the pool, all on one device and in one dtype."""

    weights: Weights
    cos: torch.Tensor  # [positions, 1, head_dim]
    sin: torch.Tensor  # the same; the first half negated, see `rotate`
    pool: torch.Tensor  # [layers, 2, num_blocks, kv_heads, block_size, head_dim]
    pages: Pages
    gathered: torch.Tensor  # [2, elements] where keys and values of a group or chunk are brought together; grows

    def kv_bytes(self) -> int:
        return self.pool.numel() * self.pool.element_size()


def make(weights: Weights, num_blocks: int, block_size: int, positions: int) -> Model:
    """A model with an empty pool. `positions`: tokens of the longest sequence."""
    shape, like = weights.shape, weights.embedding
    pages = Pages(num_blocks, block_size, shape.kv_heads)
    cos, sin = rotation(shape, positions)
    # zeros, not empty: rows that a mask hides still enter a product with weight 0, and 0 · NaN is NaN
    pool = like.new_zeros(shape.layers, 2, num_blocks, shape.kv_heads, block_size, shape.head_dim)
    return Model(weights, cos.to(like), sin.to(like), pool, pages, like.new_empty(2, 0))


def frequencies(shape: Shape) -> torch.Tensor:
    """Rotary frequencies [head_dim / 2], float32, in radians a position (arXiv 2104.09864; llama3: as transformers)."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    plain = 1.0 / shape.rope_theta**exponents
    if shape.llama3 is None:
        return plain
    factor, low, high, original = shape.llama3
    turns = original * plain / (2 * math.pi)  # full turns within the original context
    blend = ((turns - low) / (high - low)).clamp(0, 1)  # 0: slow ones are stretched, 1: fast ones stay
    return (1 - blend) * plain / factor + blend * plain


def rotation(shape: Shape, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin of the half rotation, [positions, 1, head_dim] float32."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies(shape)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [rows, heads, head_dim], in place: halves (a, b) of a head become (a cos - b sin, b cos + a sin)."""
    swapped = x.roll(x.shape[-1] // 2, -1).mul_(sin)
    return x.mul_(cos).add_(swapped)


@torch.inference_mode()
def forward(model: Model, batch: Batch) -> torch.Tensor:
    """Write the K and V of every row to the pool; logits [sampled, vocab], float32, of the rows that sample."""
    weights, shape = model.weights, model.weights.shape
    eps, size = shape.norm_eps, (shape.hidden_size,)
    q_kv_heads, last = shape.heads + shape.kv_heads, shape.layers - 1
    rows = len(batch.token_ids)
    x = F.embedding(batch.token_ids, weights.embedding)
    cos, sin = model.cos[batch.positions], model.sin[batch.positions]
    attended = x.new_empty(rows, shape.heads, shape.head_dim)
    for number, layer in enumerate(weights.layers):
        qkv = F.linear(F.rms_norm(x, size, layer.attention_norm, eps), layer.qkv).view(rows, -1, shape.head_dim)
        rotate(qkv[:, :q_kv_heads], cos, sin)
        pool = model.pool[number]
        pool.view(-1, shape.head_dim).index_copy_(0, batch.slots, qkv[:, shape.heads :].reshape(-1, shape.head_dim))
        for group in batch.groups:
            _decode(model, pool, group, qkv, attended)
        for chunk in batch.chunks:
            _prefill(model, pool, chunk, qkv, attended)
        x = x + F.linear(attended.view(rows, -1), layer.out)
        if number == last:  # what follows serves only the rows that sample
            x = x[batch.sample_rows]
        gate, up = F.linear(F.rms_norm(x, size, layer.ffn_norm, eps), layer.gate_up).chunk(2, -1)
        x = x + F.linear(F.silu(gate).mul_(up), layer.down)
    return F.linear(F.rms_norm(x, size, weights.norm, eps), weights.head).float()


def _decode(model: Model, pool: torch.Tensor, group: Group, qkv: torch.Tensor, attended: torch.Tensor) -> None:
    """One query a sequence. The heads that share a KV head are the rows of one small product."""
    shape, (start, end) = model.weights.shape, (group.start, group.end)
    keys, values = _gather(model, pool, group.pool_rows, (end - start, group.blocks * model.pages.block_size))
    queries = qkv[start:end, : shape.heads].reshape(end - start, shape.kv_heads, -1, shape.head_dim)
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask)
    attended[start:end] = out.view(end - start, shape.heads, shape.head_dim)


def _prefill(model: Model, pool: torch.Tensor, chunk: Chunk, qkv: torch.Tensor, attended: torch.Tensor) -> None:
    """A chunk of one sequence: from its own rows if nothing was computed before, else from the pool."""
    shape, rows = model.weights.shape, qkv[chunk.start : chunk.end]
    queries, keys, values = torch.split(rows.transpose(0, 1)[None], [shape.heads, shape.kv_heads, shape.kv_heads], 1)
    if chunk.computed:
        length = chunk.computed + len(rows)
        padded = len(chunk.pool_rows) // shape.kv_heads * model.pages.block_size
        keys, values = (t[:, :, :length] for t in _gather(model, pool, chunk.pool_rows, (1, padded)))
    out = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=chunk.mask, is_causal=chunk.mask is None, enable_gqa=True
    )
    attended[chunk.start : chunk.end] = out[0].transpose(0, 1)


def _gather(
    model: Model, pool: torch.Tensor, pool_rows: torch.Tensor, size: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [sequences, kv_heads, positions, head_dim] of the pool's rows, in a buffer that is used again.

    Fresh temporaries of megabytes cost page faults on every layer.
    """
    shape, pages = model.weights.shape, model.pages
    sequences, positions = size
    width = pages.block_size * shape.head_dim
    if model.gathered.shape[1] < len(pool_rows) * width:
        model.gathered = model.pool.new_empty(2, len(pool_rows) * width)
    found = []
    for kind in (0, 1):
        place = model.gathered[kind, : len(pool_rows) * width]
        torch.index_select(pool[kind].view(-1, width), 0, pool_rows, out=place.view(-1, width))
        found.append(place.view(sequences, shape.kv_heads, positions, shape.head_dim))
    return found[0], found[1]
