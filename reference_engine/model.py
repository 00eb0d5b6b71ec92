"""The forward pass of Llama and its relatives over a paged KV pool: one call computes a whole step."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F

from reference_engine import attention, gpu, native
from reference_engine.attention import Cache, Norms
from reference_engine.batch import Batch, Pages, Work, build
from reference_engine.families import Divisors, Linear, Llama3, Shape, Yarn
from reference_engine.linear import FORMS, Matrix
from reference_engine.weights import Weights


class Block(NamedTuple):
    """A layer, its matrices made ready; sizes as weights.Layer has them."""

    attention_norm: torch.Tensor
    qkv: Matrix
    head_norms: Norms
    out: Matrix
    ffn_norm: torch.Tensor
    gate_up: Matrix
    down: Matrix


class Kernels(NamedTuple):
    """The parts of a pass beside its products."""

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]  # x [rows, size], weight [size], eps
    # x, sum [rows, size], weight, eps: sum += x in place, and its norm
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
    store: Callable[[Cache, int, torch.Tensor, Norms, Batch], None]
    attend: Callable[[Cache, int, torch.Tensor, Batch], torch.Tensor]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]  # [rows, 2 size] -> [rows, size]


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _add_rms_norm(x: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _rms_norm(total.add_(x), weight, eps)


def _add_rms_norm_native(x: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return native.rms_norm(total.add_(x), weight, eps)


def _silu_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


KERNELS: dict[str, Kernels] = {
    "torch": Kernels(_rms_norm, _add_rms_norm, attention.store, attention.attend, _silu_mul),
    "triton": Kernels(gpu.rms_norm, gpu.add_rms_norm, gpu.store, gpu.attend, gpu.silu_mul),
    "native": Kernels(
        native.rms_norm, _add_rms_norm_native, attention.store_native, attention.attend_native, native.silu_mul
    ),
}


# Of each layer, by the product's name in Block: what a LoRA adapter adds to it, of the product's own input.
Adapter = tuple[dict[str, Callable[[torch.Tensor], torch.Tensor]], ...]
NONE: Mapping[int, Adapter] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """All on one device and in one dtype."""

    shape: Shape
    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[Block, ...]
    norm: torch.Tensor  # [hidden]
    head: Matrix
    cache: Cache
    kernels: str  # of KERNELS
    stack: native.Stack | None = None  # the layers for kernels that take all of them at once

    def bytes(self) -> int:
        """Of the weights, a head that is the embedding itself counted once."""
        matrices = [m for layer in self.layers for m in layer if isinstance(m, Matrix)]
        norms = [n for layer in self.layers for n in (layer.attention_norm, layer.ffn_norm, *layer.head_norms)]
        plain = sum(t.numel() * t.element_size() for t in (self.embedding, self.norm, *norms) if t is not None)
        head = 0 if self.head.parts[0] is self.embedding else self.head.bytes()
        return plain + head + sum(m.bytes() for m in matrices)


def make(
    weights: Weights,
    num_blocks: int,
    block_size: int,
    positions: int,
    kernels: str = "torch",
    quantization: str = "none",
    kv_cache_dtype: str = "auto",
) -> Model:
    """A model with an empty pool. `positions`: tokens of the longest sequence."""
    shape, prepare = weights.shape, FORMS[quantization, kernels]
    window = shape.window if shape.windowed and shape.window < positions else 0  # else none is ever reached
    pages = Pages(num_blocks, block_size, shape.kv_heads, window)
    layers = tuple(
        Block(
            layer.attention_norm,
            prepare(layer.qkv, layer.qkv_bias),
            (layer.q_norm, layer.k_norm),
            prepare(layer.out, layer.out_bias),
            layer.ffn_norm,
            prepare(layer.gate_up, None),
            prepare(layer.down, None),
        )
        for layer in weights.layers
    )
    cache = attention.make_cache(shape, pages, weights.embedding, rotation(shape, positions), kv_cache_dtype)
    stack = _stack(shape, layers, weights.norm) if kernels == "native" else None
    return Model(shape, weights.embedding, layers, weights.norm, prepare(weights.head, None), cache, kernels, stack)


def _stack(shape: Shape, layers: tuple[Block, ...], norm: torch.Tensor) -> native.Stack:
    return native.stack(
        [
            (
                layer.attention_norm, *layer.head_norms, layer.ffn_norm,
                *(m.packed for m in (layer.qkv, layer.out, layer.gate_up, layer.down)),
            )
            for layer in layers
        ],
        norm,
        shape.norm_eps,
    )  # fmt: skip


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


def lay_out(model: Model, work: Work) -> Batch:
    """One step as the model's kernels and cache want it; see batch.build."""
    pages, like = model.cache.pages, model.embedding
    own = gpu.planner(model.shape, pages, like.dtype, like.device) if model.kernels == "triton" else None
    return build(work, pages, like.device, like.dtype, model.kernels == "native", own)


@torch.inference_mode()
def forward(model: Model, batch: Batch, adapters: Mapping[int, Adapter] = NONE) -> torch.Tensor:
    """Write the K and V of every row to the pool; logits [sampled, vocab], float32, of the rows that sample.

    `adapters`: those that the batch names.
    """
    return model.head.times(hidden(model, batch, batch.sample_rows, adapters)).float()


@torch.inference_mode()
def hidden(
    model: Model, batch: Batch, kept: torch.Tensor | slice, adapters: Mapping[int, Adapter] = NONE
) -> torch.Tensor:
    """The same up to the head: [rows, hidden] after the last norm, of the rows that are `kept`.

    Those are the rows that sample, or, by slice(None), all of a batch without adapters.
    """
    assert isinstance(kept, torch.Tensor) or (kept == slice(None) and not batch.adapters), kept
    shape, cache, eps = model.shape, model.cache, model.shape.norm_eps
    kernels = KERNELS[model.kernels]
    rows, last = len(batch.token_ids), shape.layers - 1
    added = [(adapters[group.adapter], group.rows) for group in batch.adapters]
    x = F.embedding(batch.token_ids, model.embedding)  # the sum of what the layers add; in place from here
    if model.stack is not None and not added:
        return attention.all_layers(cache, model.stack, x, batch, kept if isinstance(kept, torch.Tensor) else None)
    normed = kernels.rms_norm(x, model.layers[0].attention_norm, eps)
    for number, layer in enumerate(model.layers):
        product = partial(_product, layer, number, added) if added else partial(_bare, layer)
        qkv = product("qkv", normed).view(rows, -1, shape.head_dim)
        kernels.store(cache, number, qkv, layer.head_norms, batch)
        found = product("out", kernels.attend(cache, number, qkv, batch))
        if number == last:  # what follows serves only the rows that are kept
            x, found = x[kept], found[kept]
            added[:] = [(adapters[group.adapter], group.sampled) for group in batch.adapters]
        normed = kernels.add_rms_norm(found, x, layer.ffn_norm, eps)
        made = product("down", kernels.silu_mul(product("gate_up", normed)))
        normed = kernels.add_rms_norm(
            made, x, model.norm if number == last else model.layers[number + 1].attention_norm, eps
        )
    return normed


def _bare(layer: Block, name: str, x: torch.Tensor) -> torch.Tensor:
    matrix: Matrix = getattr(layer, name)
    return matrix.times(x)


def _product(
    layer: Block, number: int, added: list[tuple[Adapter, torch.Tensor]], name: str, x: torch.Tensor
) -> torch.Tensor:
    """One of the layer's products, and what adapters add to it for the rows that are theirs."""
    out = _bare(layer, name, x)
    for adapter, rows in added:
        delta = adapter[number].get(name)
        if delta and len(rows):
            out.index_add_(0, rows, delta(x[rows]))
    return out
