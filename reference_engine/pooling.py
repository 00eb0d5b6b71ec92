"""A model as an encoder: whole texts through it in one pass, each one's hidden states made one vector of length 1.

The pass has a KV pool of its own, so that it may run beside the engine's steps, in another thread: the weights are only
read. The hidden states are those after the last norm, transformers' `last_hidden_state`.
"""

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from reference_engine import attention, model
from reference_engine.batch import Batch
from reference_engine.runner_api import Pass
from reference_engine.sequence import SamplingParams, Sequence

if TYPE_CHECKING:
    from reference_engine.runner import ModelRunner


def make(runner: "ModelRunner", pooling: str) -> Pass:
    """A pass of its own for one thread. `pooling`: a row of POOLINGS.

    A text's vector depends on that text alone: exactly where the products do (native kernels), else up to rounding.
    """
    pool = POOLINGS[pooling]
    own = runner.model.cache
    size = own.pages.block_size
    scratch = replace(runner.model, cache=_cache(runner, 0))

    def compute(inputs: list[list[int]]) -> list["array[float]"]:
        nonlocal scratch
        sequences: list[Sequence] = []
        blocks = 0
        for ids in inputs:
            needed = -(-len(ids) // size)
            held = list(range(blocks, blocks + needed))
            sequences.append(Sequence(len(sequences), ids, len(ids), SamplingParams(max_tokens=1), 0, blocks=held))
            blocks += needed
        if blocks > scratch.cache.pages.num_blocks:
            scratch = replace(scratch, cache=_cache(runner, blocks))
        work = [(s, s.prompt_len) for s in sequences]
        laid_out = model.lay_out(scratch, work)
        return _vectors(pool(scratch, laid_out, [n for _, n in work]))

    return compute


def _cache(runner: "ModelRunner", blocks: int) -> attention.Cache:
    """Not quantised, whatever the engine's own pool is: it is small, and lives for one pass."""
    own = runner.model.cache
    pages = own.pages._replace(num_blocks=blocks)
    return attention.make_cache(own.shape, pages, runner.model.embedding, (own.cos, own.sin), "auto")


def _mean(encoder: model.Model, laid_out: Batch, lengths: list[int]) -> torch.Tensor:
    states = model.hidden(encoder, laid_out, slice(None)).float()
    ends = (laid_out.sample_rows + 1).tolist()  # of all work: each text is computed to its end
    return torch.stack([states[end - n : end].mean(0) for end, n in zip(ends, lengths, strict=True)])


def _last(encoder: model.Model, laid_out: Batch, lengths: list[int]) -> torch.Tensor:
    return model.hidden(encoder, laid_out, laid_out.sample_rows).float()


# Which hidden states a text's vector is made of: the mean of all its tokens', or the last token's, which saw them all.
POOLINGS: dict[str, Callable[[model.Model, Batch, list[int]], torch.Tensor]] = {"mean": _mean, "last": _last}


def _vectors(pooled: torch.Tensor) -> list["array[float]"]:
    """Rows [texts, hidden] at length 1; a row of zeros stays one, one with a value that is no number becomes empty."""
    rows = torch.nn.functional.normalize(pooled, dim=-1).cpu()
    finite = rows.isfinite().all(-1).tolist()
    return [array("f", row if whole else ()) for row, whole in zip(rows.tolist(), finite, strict=True)]
