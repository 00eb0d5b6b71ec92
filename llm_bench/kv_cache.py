"""How large a model's KV cache and weights are, by its config.json alone; what is not known to the letter is refused.

Sizes are bytes, never bits. Field names and their defaults are those of the models' own configuration classes
(huggingface/transformers, src/transformers/models/*/configuration_*.py).
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from llm_bench.errors import BenchError
from llm_bench.printable import clean

GIB, GB = 2**30, 10**9

# Bytes of one cached number. A quantised cache has scales too: one a tensor or head, which is nothing beside it.
KV_BYTES: dict[str, float] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
# Bytes of one weight. int4: without its scales, and embeddings are often left at 16 bits; --weights-gib is the truth.
WEIGHT_BYTES: dict[str, float] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "int4": 0.5}


class Layers(NamedTuple):
    """Layers alike: what each keeps of every token, and how many tokens back it keeps them."""

    number: int
    values: int  # numbers cached a token and layer: K and V of all KV heads, or the latent with its rotary part
    window: int | None  # tokens; None: all


class KvShape(NamedTuple):
    """What a model caches. `heads`: KV heads, 0 for a latent, which tensor parallelism cannot split."""

    layers: tuple[Layers, ...]
    heads: int
    attention: str  # MHA, GQA, MQA or MLA
    text: str  # the arithmetic in words

    @property
    def values_per_token(self) -> int:
        return sum(layer.number * layer.values for layer in self.layers)


# ---- the shape


def shape_of(config: Mapping[str, Any], where: str = "config.json") -> KvShape:
    """What the model of this config.json caches. Raises BenchError for a field missing, wrong, or not understood."""
    config = _text_part(config)
    _refuse_unknown(config, where)
    layers = _count(config, ("num_hidden_layers", "n_layer", "num_layers"), where)
    latent = config.get("kv_lora_rank")
    if latent is not None:
        rank, rotary = _count(config, ("kv_lora_rank",), where), _count(config, ("qk_rope_head_dim",), where)
        heads, values = 0, rank + rotary
        kinds: list[int | None] = [None] * layers
        attention, said = "MLA", f"(latent {rank} + rotary {rotary})"
        if config.get("sliding_window") is not None:
            raise _not_understood(config, "sliding_window", where, "beside kv_lora_rank")
    else:
        queries = _count(config, ("num_attention_heads", "n_head"), where)
        heads, dim = _kv_heads(config, queries, where), _head_dim(config, queries, where)
        kinds, values = _windows(config, layers, where), 2 * heads * dim
        attention = "MQA" if heads == 1 and queries > 1 else "MHA" if heads == queries else "GQA"
        said = f"2 (K and V) x {heads} KV heads x {dim}"
    windows = sorted(set(kinds), key=lambda window: math.inf if window is None else window)
    groups = tuple(Layers(kinds.count(window), values, window) for window in windows)
    parts = [f"{g.number} layers" + (f" of the last {g.window:,} tokens" if g.window else "") for g in groups]
    return KvShape(groups, heads, attention, f"{attention}: {' + '.join(parts)}, each {said}")


def bytes_per_token(shape: KvShape, kv_bytes: float) -> float:
    """Bytes one more token takes while every layer still keeps it: 2 x layers x KV heads x head_dim x bytes, or MLA."""
    return shape.values_per_token * kv_bytes


def sequence_bytes(shape: KvShape, tokens: float, kv_bytes: float, block_size: int) -> float:
    """Bytes a sequence of so many tokens holds, in whole blocks; a sliding layer keeps min(window, tokens) of them."""
    held = 0.0
    for layer in shape.layers:
        kept = tokens if layer.window is None else min(layer.window, tokens)
        held += layer.number * layer.values * math.ceil(kept / block_size) * block_size
    return held * kv_bytes


def copies(shape: KvShape, accelerators: int) -> float:
    """How often the cache lies on the accelerators of a replica together, where they split each layer's heads.

    Tensor parallelism gives each accelerator whole KV heads, so those are copied where there are fewer of them than
    accelerators, and a latent lies whole on each, unless it is split along the context (decode context parallelism)
    or attention is data parallel (vLLM Ascend, Design_Documents/kvpp; SGLang, advanced_features/dcp).
    """
    if not shape.heads:
        return float(accelerators)
    return accelerators * math.ceil(shape.heads / accelerators) / shape.heads


def context_of(config: Mapping[str, Any]) -> int | None:
    """The longest context the model is made for, in tokens; None where its config does not say."""
    value = _text_part(config).get("max_position_embeddings")
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


# A window is kept by: all layers, or by those of a pattern. Rules of the families whose config.json may not say
# layer_types; (i + 1) % pattern == 0 is a full layer.
_PATTERN = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
# sliding_window without any other word: all layers.
_ALL_SLIDE = ("mistral", "mixtral", "phi3", "starcoder2", "ministral")


def _windows(config: Mapping[str, Any], layers: int, where: str) -> list[int | None]:
    """Each layer's window."""
    kind = str(config.get("model_type", ""))
    in_use = config.get("use_sliding_window", not kind.startswith("qwen"))  # Qwen's own default is False
    if not in_use or config.get("sliding_window") is None:
        _need_no_window(config, where)
        return [None] * layers
    window = _count(config, ("sliding_window",), where)
    types = config.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            raise BenchError(f"{where}: layer_types: expected a list of {layers}, one a layer")
        odd = sorted({str(t) for t in types} - {"full_attention", "sliding_attention"})
        if odd:
            raise BenchError(f"{where}: layer_types has {', '.join(odd)}: how much these keep is not known here")
        return [window if t == "sliding_attention" else None for t in types]
    if kind in _PATTERN:
        pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or _PATTERN[kind]
        if not isinstance(pattern, int) or isinstance(pattern, bool) or pattern < 1:
            raise _not_understood(config, "sliding_window_pattern", where)
        return [None if (i + 1) % pattern == 0 else window for i in range(layers)]
    if kind.startswith("qwen") and "max_window_layers" in config:
        first = _count(config, ("max_window_layers",), where, least=0)
        return [window if i >= first else None for i in range(layers)]
    if kind in _ALL_SLIDE:
        return [window] * layers
    raise BenchError(
        f"{where}: sliding_window {window} of model_type {kind!r} without layer_types: which layers slide is not known "
        "here. Add layer_types, a list of full_attention and sliding_attention"
    )


def _need_no_window(config: Mapping[str, Any], where: str) -> None:
    types = config.get("layer_types")
    odd = sorted({str(t) for t in types} - {"full_attention"}) if isinstance(types, list) else []
    if odd:
        raise BenchError(f"{where}: layer_types has {', '.join(odd)}, and no sliding_window is in force")


def _kv_heads(config: Mapping[str, Any], queries: int, where: str) -> int:
    """KV heads. Without a word of them a family of plain multi-head attention has as many as query heads."""
    if config.get("new_decoder_architecture"):  # Falcon 40B and later
        return _count(config, ("num_kv_heads",), where)
    if "multi_query" in config:
        return 1 if config["multi_query"] else queries
    if config.get("num_key_value_heads") is not None or config.get("num_kv_heads") is not None:
        heads = _count(config, ("num_key_value_heads", "num_kv_heads"), where)
        if queries % heads:
            raise BenchError(f"{where}: num_key_value_heads {heads} does not divide num_attention_heads {queries}")
        return heads
    if config.get("model_type") in ("llama", "gpt2", "gpt_neox", "opt", "gptj", "bloom", "phi"):
        return queries
    raise BenchError(
        f"{where}: no num_key_value_heads, and what model_type {config.get('model_type')!r} has without it is not "
        "known here. Add the number"
    )


def _head_dim(config: Mapping[str, Any], queries: int, where: str) -> int:
    """`head_dim` where it is said, else hidden_size / heads, which Gemma and Mistral-Nemo among others are not."""
    if config.get("head_dim") is not None:
        return _count(config, ("head_dim",), where)
    hidden = _count(config, ("hidden_size", "n_embd"), where)
    if str(config.get("model_type", "")).startswith(("gemma", "gpt_oss", "qwen3")):
        raise BenchError(f"{where}: no head_dim; of this family it is not hidden_size / heads. Add the number")
    if hidden % queries:
        raise BenchError(f"{where}: hidden_size {hidden} is no multiple of num_attention_heads {queries}: no head_dim")
    return hidden // queries


# What shape_of reads, or what is known not to matter to it.
_KNOWN = frozenset(
    """num_key_value_heads num_kv_heads head_dim sliding_window use_sliding_window sliding_window_pattern
    _sliding_window_pattern pre_allocate_kv_cache max_window_layers kv_lora_rank q_lora_rank v_head_dim qk_head_dim
    qk_rope_head_dim qk_nope_head_dim attention_bias attention_dropout layer_types multi_query
    new_decoder_architecture""".split()
)
# Names that decide how much is cached in one family or another, and by name what they make of it.
_OTHER_CACHES = {
    "index_head_dim": "a sparse-attention indexer has a cache of its own",
    "is_encoder_decoder": "cross attention has a cache of its own",
    "block_configs": "each layer has its own attention",
    "hybrid_override_pattern": "some layers keep a state instead of tokens",
    "full_attention_interval": "some layers keep a state instead of tokens",
    "attn_layer_period": "some layers keep a state instead of tokens",
    "attention_layers": "each layer has its own attention",
    "global_attn_every_n_layers": "which layers slide is said by another name",
    "cross_attention_layers": "cross attention has a cache of its own",
    "attention_chunk_size": "chunked attention keeps another part",
    "attn_config": "its attention is said inside attn_config",
}
_SUSPECT = re.compile(
    r"(^|_)(kv|key_value|window|swa|mamba|ssm|conv_l_cache|linear_attn|linear_key|linear_value|linear_num|head_dim|"
    r"recurrent|rnn|state_size|chunk|multi_query|group_num|k_eq_v|latent)(_|$)|^(local|global)_attn|^attn_layer",
)


def _refuse_unknown(config: Mapping[str, Any], where: str) -> None:
    """A guessed cache size is worse than none: whatever may change it and is not understood is named."""
    for name, value in config.items():
        if name in _KNOWN and not (name == "v_head_dim" and config.get("kv_lora_rank") is None):
            continue
        if value in (None, False, 0, [], {}):
            continue
        if name == "sliding_window_size" and value == config.get("sliding_window"):  # Gemma 2 says it twice
            continue
        if name in _OTHER_CACHES:
            raise BenchError(f"{where}: {name}: {_OTHER_CACHES[name]}, which is not known here. Give --kv-bytes")
        if _SUSPECT.search(name):
            raise _not_understood(config, name, where)


def _not_understood(config: Mapping[str, Any], name: str, where: str, beside: str = "") -> BenchError:
    shown = repr(config[name])[:60]
    return BenchError(
        f"{where}: {name} {shown} {beside}".rstrip()
        + ": it may change what is cached, and how is not known here. Give --kv-bytes, bytes a token"
    )


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Multimodal models keep their language model's fields inside text_config."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) and "num_hidden_layers" not in config else config


_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_BITS = {8: "int8", 4: "int4"}


def quantised_as(config: Mapping[str, Any]) -> str:
    """What a config.json says of its weights' quantisation, in a word; "" where it says nothing."""
    quantised = config.get("quantization_config") or _text_part(config).get("quantization_config")
    if not quantised:
        return ""
    method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
    return clean(str(method or "quantization_config"))[:40]


def stored_in(config: Mapping[str, Any]) -> str | None:
    """The row of WEIGHT_BYTES that a config.json says its weights are kept in; None where it does not, or in another.

    Its quantization_config stands above its dtype, which is that of what is computed. Layers left out of a quantisation
    (embeddings, often the output) are larger: --weights-gib is the truth.
    """
    quantised = config.get("quantization_config") or _text_part(config).get("quantization_config")
    if isinstance(quantised, Mapping):
        if quantised.get("quant_method") == "fp8":
            return "fp8"
        loads = next((bits for bits in _BITS if quantised.get(f"load_in_{bits}bit") is True), None)
        bits = quantised.get("bits", loads)
        return _BITS.get(bits) if isinstance(bits, int) else None
    of = _text_part(config)
    return _DTYPES.get(str(of.get("dtype") or of.get("torch_dtype") or config.get("torch_dtype")))


def _count(config: Mapping[str, Any], names: tuple[str, ...], where: str, least: int = 1) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**40:
            raise BenchError(f"{where}: {name}: expected a whole number of {least} or more, found {value!r:.60}")
        return value
    raise BenchError(
        f"{where}: no {names[0]}; expected the config.json of a transformers model. Where it leaves out what its class "
        "has by default, as some multimodal ones do, add the number"
    )


# ---- weights


class _Dense(NamedTuple):
    """How a family of decoder layers differs from Llama's. Counts of vectors a layer."""

    tied: bool = False  # default of tie_word_embeddings
    qkv_bias: bool = False
    qk_norms: bool = False  # of one head's size, on Q and K
    norms: int = 2  # of hidden size


_FAMILIES: dict[str, _Dense] = {
    "llama": _Dense(),
    "mistral": _Dense(),
    "mixtral": _Dense(),
    "qwen2": _Dense(qkv_bias=True),
    "qwen3": _Dense(qk_norms=True),
    "gemma": _Dense(tied=True),
    "gemma2": _Dense(tied=True, norms=4),
    "gemma3_text": _Dense(tied=True, qk_norms=True, norms=4),
}


def parameters_of(config: Mapping[str, Any], where: str = "config.json") -> int:
    """Weights of the model, counted from its shape. Raises BenchError for a family that is not counted here."""
    config = _text_part(config)
    family = _FAMILIES.get(str(config.get("model_type", "")))
    if family is None or config.get("attention_bias") or config.get("mlp_bias"):
        raise BenchError(
            f"{where}: weights of model_type {config.get('model_type')!r} are not counted here (known: "
            f"{', '.join(_FAMILIES)}, without attention_bias or mlp_bias). Give --parameters, e.g. 8.03e9, or "
            "--weights-gib"
        )
    hidden, layers = _count(config, ("hidden_size",), where), _count(config, ("num_hidden_layers",), where)
    queries, vocabulary = _count(config, ("num_attention_heads",), where), _count(config, ("vocab_size",), where)
    dim = _head_dim(config, queries, where)
    q, kv = queries * dim, _kv_heads(config, queries, where) * dim
    mlp = 3 * hidden * _count(config, ("intermediate_size",), where)
    if config.get("model_type") == "mixtral":
        experts = _count(config, ("num_local_experts",), where)
        mlp = experts * (mlp + hidden)  # a router's row each
    layer = hidden * (2 * q + 2 * kv) + mlp + family.norms * hidden
    layer += (q + 2 * kv) * family.qkv_bias + 2 * dim * family.qk_norms
    tables = 1 if config.get("tie_word_embeddings", family.tied) else 2
    return tables * vocabulary * hidden + layers * layer + hidden


# ---- what fits


class Memory(NamedTuple):
    """What a replica's accelerators have for the cache. Bytes, of all of them together."""

    total: float
    fraction: float  # of it that the server may use
    weights: float
    workspace: float  # activations, graphs, communication buffers

    @property
    def for_cache(self) -> float:
        return self.total * self.fraction - self.weights - self.workspace


def fits(memory: Memory, bytes_per_sequence: float) -> float:
    """Sequences whose cache fits: (memory x fraction - weights - workspace) / bytes of one; 0 where weights do not."""
    return max(memory.for_cache, 0.0) / bytes_per_sequence


def by_context(memory: Memory, held: Callable[[int], float], contexts: tuple[int, ...]) -> list[tuple[int, float, int]]:
    """(context in tokens, bytes of one such sequence, how many of them fit whole)."""
    return [(n, held(n), int(fits(memory, held(n)))) for n in contexts]


def size(value: float) -> str:
    """16.06 GB (14.96 GiB): both units, for the one is often printed and the other meant."""
    return f"{value / GIB:,.4g} GiB ({value / GB:,.4g} GB)"
