"""Small models of each family with transformers as their oracle, and a few lines of scheduler that drive a runner."""

from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from reference_engine import batch, model
from reference_engine.config import EngineConfig
from reference_engine.runner import ModelRunner
from reference_engine.sequence import SamplingParams, Sequence
from reference_engine.weights import Weights

# Largest difference in float32, of logits up to 8; seen 3e-5, and float64 is nearer to ours than to transformers'.
LOGITS = 1e-4
MARGIN = 1e-3  # least gap of the two best logits: a hundred times the rounding between ways to compute the same


# Windows of 9 positions: shorter than most prompts here, and neither a multiple of a block nor of a chunk.
WINDOWS = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 9}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2-windows": (Qwen2Config, Qwen2ForCausalLM, WINDOWS),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24}),
}


def llama(peak: float = 5.0, **changes: Any) -> PreTrainedModel:
    return family("llama", peak, **changes)


def family(name: str, peak: float = 5.0, **changes: Any) -> PreTrainedModel:
    """A model of random weights whose every part matters; untied, its logits have a standard deviation of 1.6 peak."""
    config, kind, differs = FAMILIES[name]
    sizes: dict[str, Any] = {
        "vocab_size": 199,  # a size that no kernel likes
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "bos_token_id": None,
        "eos_token_id": None,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    made: PreTrainedModel = kind(config(**(sizes | differs | changes))).float().eval()
    with torch.no_grad():
        for key, weight in made.named_parameters():
            if "norm" in key:  # ones by default, which would hide a norm that is not applied
                weight.uniform_(0.5, 1.5)
            if key.endswith(".bias"):  # zeros by default
                weight.uniform_(-1, 1)
        if not made.config.tie_word_embeddings:
            made.lm_head.weight *= peak
    return made


def save(model: PreTrainedModel, folder: Path, shard: str = "5GB") -> Path:
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def greedy(model: PreTrainedModel, prompt: list[int], n: int) -> list[int]:
    """What transformers generates, having seen to it that no token is a toss-up between equals."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=n,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    best = torch.cat(out.logits).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > MARGIN, "a near tie: choose another seed"
    return out.sequences[0, len(prompt) :].tolist()


def prompts(count: int, vocab: int = 199, longest: int = 40, seed: int = 0) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(vocab) for _ in range(random.randint(1, longest))] for _ in range(count)]


def runner(weights: Weights, eos_ids: Iterable[int] = (), **knobs: Any) -> ModelRunner:
    defaults = {"block_size": 4, "num_blocks": 600, "max_model_len": 512, "device": "cpu", "cpu_kernels": "torch"}
    return ModelRunner("test", weights, frozenset(eos_ids), EngineConfig(**(defaults | knobs)))


def logits_of(engine: ModelRunner, tokens: list[int], computed: int) -> torch.Tensor:
    """[vocab] of the last token, the `computed` first being in the pool (blocks are handed out backwards)."""
    s = sequence(tokens)
    s.computed = computed
    s.blocks = list(range(40, 0, -1))
    work, pages, dtype = [(s, len(tokens) - computed)], engine.model.cache.pages, engine.model.embedding.dtype
    laid_out = batch.build(work, pages, engine.device, dtype, engine.kernels == "native")
    return model.forward(engine.model, laid_out)[0]


def logits_at(engine: ModelRunner, tokens: list[int], chunk: int) -> torch.Tensor:
    """[len(tokens) // chunk, vocab]: of the last token of each chunk, computed chunk after chunk."""
    ends = range(chunk, len(tokens) + 1, chunk)
    return torch.stack([logits_of(engine, tokens[:end], end - chunk) for end in ends])


def assert_same_logits(hf: PreTrainedModel, read: Weights) -> None:
    """At every position of a prompt: computed token by token, in chunks, and at once."""
    tokens = prompts(1, seed=7)[0] + list(range(30))
    with torch.inference_mode():
        right = hf(torch.tensor([tokens])).logits[0]
    for kernels in ("torch", "auto"):  # auto: native where there is a compiler
        engine = runner(read, cpu_kernels=kernels)
        for chunk in (1, 5, 16, len(tokens)):
            difference = (logits_at(engine, tokens, chunk) - right[chunk - 1 :: chunk]).abs().max().item()
            assert difference < LOGITS, (kernels, chunk)


def sequence(prompt: list[int], number: int = 0, **params: Any) -> Sequence:
    return Sequence(number, list(prompt), len(prompt), SamplingParams(**({"max_tokens": 12} | params)), number)


def outputs(sequences: list[Sequence]) -> list[list[int]]:
    return [s.token_ids[s.prompt_len :] for s in sequences]


def drive(model: ModelRunner, sequences: list[Sequence], budget: int = 10_000, preempt_every: int = 0) -> None:
    """Run them to max_tokens: blocks in no order, chunks of any size, and every so many steps one starts again."""
    random = Random(1)
    free = list(range(model.model.cache.pages.num_blocks))
    random.shuffle(free)
    steps = 0
    while alive := [s for s in sequences if s.output_len < s.params.max_tokens]:
        steps += 1
        if preempt_every and steps % preempt_every == 0:
            _release(random.choice(alive), free)
        random.shuffle(alive)  # no order of the batch may matter
        work, left = [], budget
        for s in alive:
            n = min(left, len(s.token_ids) - s.computed)
            if n == 0:
                break
            while len(s.blocks) * model.model.cache.pages.block_size < s.computed + n:
                s.blocks.append(free.pop())
            work.append((s, n))
            left -= n
        for (s, n), token in zip(work, model.execute(work), strict=True):
            s.computed += n
            assert (token is not None) == (s.computed == len(s.token_ids))
            if token is not None:
                s.token_ids.append(token)
                if s.output_len == s.params.max_tokens:
                    _release(s, free)


def _release(s: Sequence, free: list[int]) -> None:
    free[:0] = s.blocks
    s.blocks, s.computed = [], 0
