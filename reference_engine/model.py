"""The forward pass of Llama and its relatives over a paged KV pool: one call computes a whole step."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from reference_engine import attention, native
from reference_engine.attention import Cache, Norms
from reference_engine.batch import Batch, Pages
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
    store: Callable[[Cache, int, torch.Tensor, Norms, Batch], None]
    attend: Callable[[Cache, int, torch.Tensor, Batch], torch.Tensor]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]  # [rows, 2 size] -> [rows, size]


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _silu_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


KERNELS: dict[str, Kernels] = {
    "torch": Kernels(_rms_norm, attention.store, attention.attend, _silu_mul),
    "native": Kernels(native.rms_norm, attention.store_native, attention.attend_native, native.silu_mul),
}


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
    return Model(shape, weights.embedding, layers, weights.norm, prepare(weights.head, None), cache, kernels)


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


@torch.inference_mode()
def forward(model: Model, batch: Batch) -> torch.Tensor:
    """Write the K and V of every row to the pool; logits [sampled, vocab], float32, of the rows that sample."""
    return model.head.times(hidden(model, batch, batch.sample_rows)).float()


@torch.inference_mode()
def hidden(model: Model, batch: Batch, kept: torch.Tensor | slice) -> torch.Tensor:
    """The same up to the head: [rows, hidden] after the last norm, of the rows that are `kept`."""
    shape, cache, eps = model.shape, model.cache, model.shape.norm_eps
    rms_norm, store, attend, silu_mul = KERNELS[model.kernels]
    rows, last = len(batch.token_ids), shape.layers - 1
    x = F.embedding(batch.token_ids, model.embedding)
    for number, layer in enumerate(model.layers):
        qkv = layer.qkv.times(rms_norm(x, layer.attention_norm, eps)).view(rows, -1, shape.head_dim)
        store(cache, number, qkv, layer.head_norms, batch)
        x = x + layer.out.times(attend(cache, number, qkv, batch))
        if number == last:  # what follows serves only the rows that are kept
            x = x[kept]
        x = x + layer.down.times(silu_mul(layer.gate_up.times(rms_norm(x, layer.ffn_norm, eps))))
    return rms_norm(x, model.norm, eps)
