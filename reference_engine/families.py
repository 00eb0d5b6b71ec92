"""Families of Llama-shaped models: a table of what differs, and a config.json read by it, every field accounted for."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

# A config.json has a few kB, a tokenizer.json with 256,000 tokens about 35 MB; what is larger is not one of them.
JSON_BYTES = 100_000_000
MOST_LAYERS = 1000  # the deepest published have about 130


class WeightsError(ValueError):
    """A model that cannot be loaded; the text names the file, the key, what was found and what would be right."""


class Linear(NamedTuple):
    """Every rotary frequency slower by one factor."""

    factor: float


class Llama3(NamedTuple):
    """Llama 3.1's stretching of the low rotary frequencies (transformers' rope_type "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float


class Yarn(NamedTuple):
    """YaRN (arXiv 2309.00071): slow frequencies stretched, a ramp to those that stay; cos and sin times a factor."""

    factor: float
    original_max_position_embeddings: float
    beta_fast: float
    beta_slow: float
    truncate: bool  # the ends of the ramp are whole dimensions
    attention_factor: float


class Divisors(NamedTuple):
    """A divisor for each frequency, [head_dim / 2]: how a GGUF file says Llama 3.1's stretching."""

    values: tuple[float, ...]


Scaling = Linear | Llama3 | Yarn | Divisors


@dataclass(frozen=True, slots=True)
class Shape:
    """Everything the forward pass must know beside the weights. Sizes in elements, `max_positions` in tokens."""

    vocab_size: int
    hidden_size: int
    ffn_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied: bool  # the output head is the embedding
    scaling: Scaling | None = None  # of the rotary frequencies
    qkv_bias: bool = False
    out_bias: bool = False  # of the product after attention
    qk_norm: bool = False  # an RMS norm of each query and key head, before the rotation
    window: int = 0  # positions that a windowed layer's query sees, its own among them; 0: there is no such layer
    windowed: frozenset[int] = frozenset()  # numbers of the layers with a window


class Family(NamedTuple):
    """How a family differs from the plain Llama, and what its config.json says beyond it."""

    defaults: dict[str, Any]  # of keys that may be absent, where transformers' class has others than the plain Llama
    keys: frozenset[str]  # that decide about its mathematics, beside USED
    qkv_bias: bool = False  # whatever the config says
    qk_norm: bool = False
    label: str = ""


WINDOW_KEYS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
QWEN_DEFAULTS = {
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "max_window_layers": 28,
    "sliding_window": 4096,
}

# SmolLM2, TinyLlama, Yi, and DeepSeek's Llama distillates call themselves llama.
FAMILIES: dict[str, Family] = {
    "llama": Family({}, frozenset({"attention_bias"}), label="a plain Llama"),
    "mistral": Family(
        {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
        frozenset({"sliding_window"}),
        label="a Mistral",
    ),
    "qwen2": Family(QWEN_DEFAULTS, WINDOW_KEYS, qkv_bias=True, label="a Qwen2"),
    "qwen3": Family(
        {**QWEN_DEFAULTS, "head_dim": 128}, WINDOW_KEYS | {"attention_bias"}, qk_norm=True, label="a Qwen3"
    ),
}
LLAMA_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "attention_bias": False}

# What the forward pass computes is decided here, so every field is either used, held to the one value that this engine
# computes, or known not to matter. Any other is refused: it may change the mathematics.
USED = {
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "rms_norm_eps"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters"),
}
FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_interleaved": False,
    "partial_rotary_factor": 1.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "quantization_config": None,
    "is_encoder_decoder": False,
    "is_decoder": False,  # transformers' word for "decoder of an encoder-decoder"
    "add_cross_attention": False,
    "pruned_heads": {},
}
INERT = {
    *("architectures", "bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "problem_type"),
    *("dtype", "torch_dtype", "initializer_range", "attention_dropout", "use_cache", "return_dict"),
    *("output_attentions", "output_hidden_states", "chunk_size_feed_forward", "_attn_implementation_autoset"),
    *("_name_or_path", "transformers_version", "transformers.js_config", "unsloth_version", "is_llama_config"),
    *("use_mrope",),  # of Qwen2's text models: says how images would be placed
    "pretraining_tp",  # slices the products for bit-exactness with a training run; the sums are the same
}

# rope_type -> keys that must be there. `dynamic` stretches only sequences longer than max_position_embeddings, which
# are never served: within it, it is the plain rotation.
ROPE_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "dynamic": frozenset({"factor"}),
    "linear": frozenset(Linear._fields),
    "llama3": frozenset(Llama3._fields),
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
}
YARN_OPTIONS = {"beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"}


def read_shape(path: Path) -> Shape:
    """Shape from a config.json, in the spelling of transformers 4 or 5. Raises WeightsError."""
    return shape_of(path, read_json(path))


def read_json(path: Path) -> dict[str, Any]:
    """An object from a file of bounded size. Raises WeightsError."""
    if not path.is_file():
        raise WeightsError(f"{path}: not there")
    if path.stat().st_size > JSON_BYTES:
        raise WeightsError(f"{path}: {path.stat().st_size:,} bytes; would be right: at most {JSON_BYTES:,}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: no JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: found a {type(value).__name__}; would be right: an object")
    return value


def shape_of(path: Path, config: Mapping[str, Any]) -> Shape:
    """Shape from the fields of a config.json; `path` is for the errors. Raises WeightsError."""
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise WeightsError(f"{path}: model_type is {kind!r}; would be right: {', '.join(FAMILIES)}")
    for key, found in config.items():
        if key in USED or key in INERT or key in family.keys:
            continue
        if key not in FIXED:
            raise WeightsError(
                f"{path}: {key} is {found!r}: unknown here, it may change the mathematics; would be right: "
                f"a config.json of {family.label}"
            )
        if found != FIXED[key]:
            raise WeightsError(f"{path}: {key} is {found!r}; would be right: {FIXED[key]!r}")
    fields = _Fields(path, {**LLAMA_DEFAULTS, **family.defaults, **{k: v for k, v in config.items() if v is not None}})
    heads, hidden = fields.count("num_attention_heads"), fields.count("hidden_size")
    layers = fields.count("num_hidden_layers", most=MOST_LAYERS)
    kv_heads = fields.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise WeightsError(f"{path}: num_key_value_heads is {kv_heads}; would be right: a divisor of {heads} heads")
    if "head_dim" not in fields.values and hidden % heads:
        raise WeightsError(
            f"{path}: hidden_size is {hidden}; would be right: a multiple of {heads} heads, or a head_dim"
        )
    head_dim = fields.count("head_dim", hidden // heads)
    if head_dim % 2:
        raise WeightsError(f"{path}: head_dim is {head_dim}; would be right: an even number, for the rotation")
    theta, scaling = _read_rope(fields)
    biased = fields.flag("attention_bias")
    # Only null says that a Mistral has no window: where the key is absent it has its class's.
    window, windowed = (0, frozenset[int]()) if config.get("sliding_window", 0) is None else _windows(fields, layers)
    return Shape(
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        ffn_size=fields.count("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps"),
        rope_theta=theta,
        max_positions=fields.count("max_position_embeddings"),
        tied=fields.flag("tie_word_embeddings"),
        scaling=scaling,
        qkv_bias=family.qkv_bias or biased,
        out_bias=biased,
        qk_norm=family.qk_norm,
        window=window,
        windowed=windowed,
    )


class _Fields(NamedTuple):
    """Values of a config, each asked for in the form it must have; nulls are absent."""

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""

    def refuse(self, key: str, right: str) -> WeightsError:
        return WeightsError(f"{self.path}: {self.prefix}{key} is {self.values.get(key)!r}; would be right: {right}")

    def count(self, key: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refuse(key, "a positive whole number")
        if value > most:
            raise self.refuse(key, f"at most {most:,}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
            raise self.refuse(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value


def _windows(fields: _Fields, layers: int) -> tuple[int, frozenset[int]]:
    """The window and its layers: all of a Mistral's; of a Qwen's the upper ones or those listed, if it asks for any."""
    if "sliding_window" not in fields.values or not fields.flag("use_sliding_window", True):
        return 0, frozenset()
    types = fields.values.get("layer_types")
    if types is None:
        first = fields.values.get("max_window_layers", 0)
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise fields.refuse("max_window_layers", "a whole number, 0 or more")
        windowed = frozenset(range(first, layers))
    else:
        kinds = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != layers or any(t not in kinds for t in types):
            raise fields.refuse("layer_types", f"{layers} of {' and '.join(kinds)}")
        windowed = frozenset(i for i, t in enumerate(types) if t == kinds[1])
    return (fields.count("sliding_window"), windowed) if windowed else (0, windowed)


def _read_rope(fields: _Fields) -> tuple[float, Scaling | None]:
    """Theta and scaling. transformers 5 writes one rope_parameters, older ones rope_theta and rope_scaling."""
    path, name = fields.path, "rope_parameters" if fields.values.get("rope_parameters") else "rope_scaling"
    found = fields.values.get(name) or {}
    if not isinstance(found, dict):
        raise fields.refuse(name, "an object")
    theta = _Fields(path, {**fields.values, **found}).number("rope_theta", 10_000.0)
    if theta <= 1:  # at 1 every frequency is the same
        raise WeightsError(f"{path}: rope_theta is {theta:g}; would be right: more than 1")
    kind = found.get("rope_type", found.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise WeightsError(f"{path}: {name}.rope_type is {kind!r}; would be right: {', '.join(ROPE_KEYS)}")
    rope = _Fields(path, {k: v for k, v in found.items() if v is not None}, f"{name}.")
    known = ROPE_KEYS[kind] | (YARN_OPTIONS if kind == "yarn" else set()) | {"rope_theta", "rope_type", "type"}
    for key, value in rope.values.items():
        if key not in known and not (key == "partial_rotary_factor" and value == 1.0):
            raise WeightsError(
                f"{path}: {name}.{key} is {value!r}: unknown for rope_type {kind!r}; would be right: no such key"
            )
    if missing := sorted(ROPE_KEYS[kind] - rope.values.keys()):
        raise WeightsError(f"{path}: {name} lacks {missing[0]}; would be right: a number, as rope_type {kind} needs")
    if kind == "linear":
        return theta, Linear(rope.number("factor"))
    if kind == "llama3":
        llama3 = Llama3(*(rope.number(key) for key in Llama3._fields))
        if llama3.high_freq_factor <= llama3.low_freq_factor:
            raise rope.refuse("high_freq_factor", f"more than low_freq_factor, {llama3.low_freq_factor:g}")
        return theta, llama3
    if kind == "yarn":
        return theta, _yarn(rope)
    return theta, None


def _yarn(rope: _Fields) -> Yarn:
    factor = rope.number("factor")

    def magnitude(weight: float) -> float:  # the paper's 0.1 ln s + 1
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if "attention_factor" in rope.values:
        attention = rope.number("attention_factor")
    elif rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        attention = magnitude(rope.number("mscale")) / magnitude(rope.number("mscale_all_dim"))
    else:
        attention = magnitude(1.0)
    return Yarn(
        factor=factor,
        original_max_position_embeddings=rope.number("original_max_position_embeddings"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=attention,
    )
