"""The forward pass of Llama and its relatives over a paged KV pool: one call computes a whole step."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from reference_engine.batch import Batch, Chunk, Group, Pages
from reference_engine.families import Divisors, Linear, Llama3, Shape, Yarn
from reference_engine.weights import Layer, Weights


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
    window = shape.window if shape.windowed and shape.window < positions else 0  # else none is ever reached
    pages = Pages(num_blocks, block_size, shape.kv_heads, window)
    cos, sin = rotation(shape, positions)
    # zeros, not empty: rows that a mask hides still enter a product with weight 0, and 0 · NaN is NaN
    pool = like.new_zeros(shape.layers, 2, num_blocks, shape.kv_heads, block_size, shape.head_dim)
    return Model(weights, cos.to(like), sin.to(like), pool, pages, like.new_empty(2, 0))


def frequencies(shape: Shape) -> tuple[torch.Tensor, float]:
    """Rotary frequencies [head_dim / 2], float32, in radians a position, and what cos and sin are multiplied by.

    arXiv 2104.09864; stretched as transformers does it.
    """
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    plain = 1.0 / shape.rope_theta**exponents
    match shape.scaling:
        case None:
            return plain, 1.0
        case Linear(factor):
            return plain / factor, 1.0
        case Divisors(values):
            return plain / torch.tensor(values), 1.0
        case Llama3(factor, low, high, original):
            turns = original * plain / (2 * math.pi)  # full turns within the original context
            blend = ((turns - low) / (high - low)).clamp(0, 1)  # 0: slow ones are stretched, 1: fast ones stay
            return (1 - blend) * plain / factor + blend * plain, 1.0
        case Yarn() as yarn:
            blend = _ramp(shape, yarn)  # 0: stays, 1: stretched
            return (1 - blend) * plain + blend * plain / yarn.factor, yarn.attention_factor


def _ramp(shape: Shape, yarn: Yarn) -> torch.Tensor:
    """[head_dim / 2]: 0 where a frequency makes beta_fast turns in the original context, 1 where beta_slow."""

    def dimension(turns: float) -> float:
        return (
            shape.head_dim
            * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(shape.rope_theta))
        )

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, shape.head_dim - 1)
    numbers = torch.arange(shape.head_dim // 2, dtype=torch.float32)
    return ((numbers - low) / (high - low or 0.001)).clamp(0, 1)  # 0.001: a step where the ends meet


def rotation(shape: Shape, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin of the half rotation, [positions, 1, head_dim] float32."""
    per_position, scale = frequencies(shape)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * per_position
    cos, sin = angles.cos() * scale, angles.sin() * scale
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
        qkv = F.linear(F.rms_norm(x, size, layer.attention_norm, eps), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(rows, -1, shape.head_dim)
        _norm_heads(shape, layer, qkv)
        rotate(qkv[:, :q_kv_heads], cos, sin)
        pool = model.pool[number]
        pool.view(-1, shape.head_dim).index_copy_(0, batch.slots, qkv[:, shape.heads :].reshape(-1, shape.head_dim))
        for group in batch.groups:
            _decode(model, pool, group, number in shape.windowed, qkv, attended)
        for chunk in batch.chunks:
            _prefill(model, pool, chunk, number in shape.windowed, qkv, attended)
        x = x + F.linear(attended.view(rows, -1), layer.out, layer.out_bias)
        if number == last:  # what follows serves only the rows that sample
            x = x[batch.sample_rows]
        gate, up = F.linear(F.rms_norm(x, size, layer.ffn_norm, eps), layer.gate_up).chunk(2, -1)
        x = x + F.linear(F.silu(gate).mul_(up), layer.down)
    return F.linear(F.rms_norm(x, size, weights.norm, eps), weights.head).float()


def _norm_heads(shape: Shape, layer: Layer, qkv: torch.Tensor) -> None:
    """Qwen3's norm of every query and key head, in place, before the rotation."""
    if layer.q_norm is None or layer.k_norm is None:
        return
    queries, keys = qkv[:, : shape.heads], qkv[:, shape.heads : shape.heads + shape.kv_heads]
    queries.copy_(F.rms_norm(queries, (shape.head_dim,), layer.q_norm, shape.norm_eps))
    keys.copy_(F.rms_norm(keys, (shape.head_dim,), layer.k_norm, shape.norm_eps))


def _decode(
    model: Model, pool: torch.Tensor, group: Group, windowed: bool, qkv: torch.Tensor, attended: torch.Tensor
) -> None:
    """One query a sequence. The heads that share a KV head are the rows of one small product."""
    shape, (start, end) = model.weights.shape, (group.start, group.end)
    keys, values = _gather(model, pool, group.pool_rows, (end - start, group.blocks * model.pages.block_size))
    queries = qkv[start:end, : shape.heads].reshape(end - start, shape.kv_heads, -1, shape.head_dim)
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=group.masks[windowed])
    attended[start:end] = out.view(end - start, shape.heads, shape.head_dim)


def _prefill(
    model: Model, pool: torch.Tensor, chunk: Chunk, windowed: bool, qkv: torch.Tensor, attended: torch.Tensor
) -> None:
    """A chunk of one sequence: from its own rows if nothing was computed before, else from the pool."""
    shape, rows, mask = model.weights.shape, qkv[chunk.start : chunk.end], chunk.masks[windowed]
    queries, keys, values = torch.split(rows.transpose(0, 1)[None], [shape.heads, shape.kv_heads, shape.kv_heads], 1)
    if chunk.computed:
        length = chunk.computed + len(rows)
        padded = len(chunk.pool_rows) // shape.kv_heads * model.pages.block_size
        keys, values = (t[:, :, :length] for t in _gather(model, pool, chunk.pool_rows, (1, padded)))
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
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
