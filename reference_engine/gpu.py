"""The row of model.KERNELS that computes with kernels/: the one place where the engine imports them, and only then.

Untried on a GPU: tests run it with the kernels interpreted on a CPU.
"""

import functools
import importlib.util
import os
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from reference_engine.batch import Batch, LayOut, Pages
from reference_engine.families import Shape
from reference_engine.runner_api import NOT_FINITE
from reference_engine.sequence import Sequence

if TYPE_CHECKING:
    from kernels.attention_api import Step, Tile
    from reference_engine.attention import Cache, Norms

WIDEST = 16_384  # values of a row that the norm's one program holds


class Layout(NamedTuple):
    """Of a batch."""

    step: "Step"
    # [rows, heads, head_dim] where attention goes; None: to a new tensor. Rows of padding are written by nobody: theirs
    # must hold numbers, not what memory happened to hold.
    attended: torch.Tensor | None = None


def problem(shape: Shape, dtype: torch.dtype, device: torch.device) -> str:
    """Why the kernels cannot compute this model here, as "found; would be right: …"; "" if they can."""
    if missing := [name for name in ("triton", "kernels") if importlib.util.find_spec(name) is None]:
        return f"{missing[0]} is not installed; would be right: pip install 'triton>=3.7,<4' beside llm-bench's source"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "kernels on the cpu; would be right: a GPU, or TRITON_INTERPRET=1 (slow: for tests)"
    if device.type == "cpu" and dtype != torch.float32:
        return f"{dtype} on the cpu, where Triton's interpreter errs; would be right: float32"
    if max(shape.hidden_size, shape.head_dim) > WIDEST or shape.head_dim % 2:
        return f"hidden size {shape.hidden_size}, heads of {shape.head_dim}; would be right: at most {WIDEST}, even"
    try:
        tiles(dtype, shape.head_dim, device)
    except ValueError as error:
        return str(error)
    return ""


@functools.cache
def tiles(dtype: torch.dtype, head_dim: int, device: torch.device) -> dict[str, "Tile"]:
    """How attention cuts its work; asked of the device once. Raises ValueError."""
    from kernels import attention_api

    return attention_api.tiles_for(dtype, head_dim, device)


def planner(shape: Shape, pages: Pages, dtype: torch.dtype, device: torch.device) -> LayOut:
    """What lays out each step for `store` and `attend`."""
    from kernels import attention_api

    group, cut = shape.heads // shape.kv_heads, tiles(dtype, shape.head_dim, device)

    def lay_out(sequences: list[Sequence], counts: list[int]) -> Layout:
        computed, blocks = [s.computed for s in sequences], [s.blocks for s in sequences]
        return Layout(
            attention_api.lay_out(counts, computed, blocks, pages.block_size, group, cut, device, window=pages.window)
        )

    return lay_out


def store(cache: "Cache", number: int, qkv: torch.Tensor, norms: "Norms", batch: Batch) -> None:
    """As attention.store, but that qkv keeps what a pool of eight bits rounds: `attend` reads the pool alone."""
    from kernels import attention_api, norm_rope

    shape, both = cache.shape, None if norms[0] is None or norms[1] is None else (norms[0], norms[1])
    heads = (shape.heads, shape.kv_heads)
    norm_rope.norm_rope(qkv, batch.positions, cache.cos, cache.sin, heads, both, shape.norm_eps)
    attention_api.write(_layout(batch).step, cache.pool[number], qkv, _scales(cache, number))


def attend(cache: "Cache", number: int, qkv: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[rows, heads · head_dim]; a row's result has the same bits whatever stands beside it."""
    from kernels import attention_api

    step, out = _layout(batch)
    if out is None:
        out = qkv.new_empty(len(qkv), cache.shape.heads, cache.shape.head_dim)
    windowed = number in cache.shape.windowed
    attention_api.attend(step, cache.pool[number], qkv, out, _scales(cache, number), windowed=windowed)
    return out.view(len(qkv), -1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from kernels import norm_rope

    return norm_rope.rms_norm(x, weight, eps)


def add_rms_norm(x: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """total += x in place, and its norm."""
    from kernels import norm_rope

    return norm_rope.add_rms_norm(x, total, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    from kernels import swiglu

    return swiglu.swiglu(gate_up)


def product_of_weights(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """quant.product_of_weights; a row's result has the same bits whatever stands beside it."""
    from kernels import int8_matmul

    return int8_matmul.int8_matmul(x, weight, scales, bias)


def _layout(batch: Batch) -> Layout:
    return cast(Layout, batch.layout)


def _scales(cache: "Cache", number: int) -> torch.Tensor | None:
    return None if cache.scales is None else cache.scales[number]


class Draws(NamedTuple):
    """What the rows of a step ask of the sampler, each [rows] on the device."""

    early: torch.Tensor  # int32; 1: end tokens may not come yet
    temperature: torch.Tensor  # float64; 0: the likeliest
    top_p: torch.Tensor  # float64
    uniforms: torch.Tensor  # float64, of sampler.uniform


def sample(logits: torch.Tensor, draws: Draws, eos_ids: torch.Tensor, out: torch.Tensor) -> None:
    """sampler.sample on the device: a token, or NOT_FINITE, to out [rows] int64 for each row of logits.

    It may write into those.
    """
    from kernels import sampling

    if len(eos_ids):
        ends = logits.index_select(1, eos_ids)
        logits.index_copy_(1, eos_ids, ends.masked_fill_(draws.early[:, None] > 0, -torch.inf))
    zeros = torch.zeros_like(out)
    settings = sampling.Settings(draws.temperature, zeros, draws.top_p, zeros.double(), zeros, zeros)
    sampling.sample(logits, settings, draws.uniforms, out)
    out.masked_fill_(~logits.amax(-1).isfinite(), NOT_FINITE)  # of a row with a NaN that is the NaN
