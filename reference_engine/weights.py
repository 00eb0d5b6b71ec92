"""Weights of a Llama-shaped model: made from a seed, or read from a Hugging Face directory, every field checked."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from reference_engine.tokenizer import BYTE_VOCAB, EOS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class WeightsError(ValueError):
    """A model that cannot be loaded; the text names the file, the key, what was found and what would be right."""


class Llama3Rope(NamedTuple):
    """Llama 3.1's stretching of the low rotary frequencies (transformers' rope_type "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


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
    llama3: Llama3Rope | None = None


class Layer(NamedTuple):
    """One block. Matrices are [out, in], as in the files; those with the same input are one matrix, for one product."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 kv_heads) head_dim, hidden]
    out: torch.Tensor  # [hidden, heads head_dim]
    ffn_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 ffn, hidden]
    down: torch.Tensor  # [hidden, ffn]


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    shape: Shape
    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [vocab, hidden]; the embedding itself where tied

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor once."""
        yield self.embedding
        for layer in self.layers:
            yield from layer
        yield self.norm
        if not self.shape.tied:
            yield self.head

    def to(self, device: torch.device) -> "Weights":
        """The same weights on the device; itself if they are there."""
        if self.embedding.device == device:
            return self
        embedding = self.embedding.to(device)
        layers = tuple(Layer(*(t.to(device) for t in layer)) for layer in self.layers)
        head = embedding if self.shape.tied else self.head.to(device)
        return Weights(self.shape, embedding, layers, self.norm.to(device), head)


TINY = Shape(
    vocab_size=BYTE_VOCAB,
    hidden_size=128,
    ffn_size=352,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=32,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    max_positions=32_768,
    tied=False,
)


def tiny(seed: int, dtype: torch.dtype = torch.float32, shape: Shape = TINY) -> Weights:
    """A model of random weights, the same for the same seed on every run. Greedy, it writes printable nonsense.

    Matrices have variance 1/inputs, so that activations keep their size and rounding stays far below the gaps between
    logits. Head rows outside printable ASCII and the end token are 0: their logits lose to the best of the others. At
    temperature 1 about one token in fifty is one of them nevertheless.
    """
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(columns**-0.5).to(dtype)

    hidden, width = shape.hidden_size, shape.heads * shape.head_dim
    ones = torch.ones(hidden, dtype=dtype)
    embedding = (torch.randn(shape.vocab_size, hidden, generator=generator)).to(dtype)
    layers = tuple(
        Layer(
            attention_norm=ones,
            qkv=matrix(width + 2 * shape.kv_heads * shape.head_dim, hidden),
            out=matrix(hidden, width),
            ffn_norm=ones,
            gate_up=matrix(2 * shape.ffn_size, hidden),
            down=matrix(hidden, shape.ffn_size),
        )
        for _ in range(shape.layers)
    )
    head = embedding
    if not shape.tied:
        head = 3 * matrix(
            shape.vocab_size, hidden
        )  # logits of standard deviation 3: a peaked choice, as in a trained model
        readable = torch.zeros(shape.vocab_size, 1, dtype=dtype)
        readable[32:127] = readable[EOS] = 1
        head.mul_(readable)
    return Weights(shape, embedding, layers, ones, head)


# config.json: what the forward pass computes is decided here, so every field is either used, held to the one value
# that this engine computes, or known not to matter. Any other is refused: it may change the mathematics.
USED = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "rms_norm_eps"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters"),
}
FIXED: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_interleaved": False,
    "partial_rotary_factor": 1.0,
    "sliding_window": None,
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
    "pretraining_tp",  # slices the products for bit-exactness with a training run; the sums are the same
}


def read(directory: str | Path, dtype: torch.dtype = torch.float32) -> Weights:
    """Weights of a Hugging Face directory: config.json, model.safetensors or its shards and their index.

    Tensors are converted to `dtype`. Raises WeightsError.
    """
    folder = Path(directory)
    shape = read_shape(folder / "config.json")
    files = _Files(folder)
    weights = _read_weights(files, shape, dtype)
    files.refuse_leftovers()
    return weights


def read_shape(path: Path) -> Shape:
    """Shape from a config.json of model_type llama, in the spelling of transformers 4 or 5. Raises WeightsError."""
    config = _json(path)
    for key, right in FIXED.items():
        found = config.get(key, right if key != "model_type" else None)
        if found != right:
            raise WeightsError(f"{path}: {key} is {found!r}; would be right: {right!r}")
    for key, found in config.items():
        if key not in USED and key not in FIXED and key not in INERT:
            raise WeightsError(
                f"{path}: {key} is {found!r}: unknown here, it may change the mathematics; would be right: "
                "a config.json of a plain Llama"
            )

    def positive(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise WeightsError(f"{path}: {key} is {value!r}; would be right: a positive whole number")
        return value

    heads, hidden = positive("num_attention_heads"), positive("hidden_size")
    kv_heads = positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise WeightsError(f"{path}: num_key_value_heads is {kv_heads}; would be right: a divisor of {heads} heads")
    if config.get("head_dim") is None and hidden % heads:
        raise WeightsError(
            f"{path}: hidden_size is {hidden}; would be right: a multiple of {heads} heads, or a head_dim"
        )
    head_dim = positive("head_dim", hidden // heads)
    if head_dim % 2:
        raise WeightsError(f"{path}: head_dim is {head_dim}; would be right: an even number, for the rotation")
    max_positions = positive("max_position_embeddings", 2048)  # this and the following: LlamaConfig's own defaults
    theta, llama3 = _read_rope(path, config)
    return Shape(
        vocab_size=positive("vocab_size"),
        hidden_size=hidden,
        ffn_size=positive("intermediate_size"),
        layers=positive("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=_number(path, config, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        max_positions=max_positions,
        tied=config.get("tie_word_embeddings", False) is True,
        llama3=llama3,
    )


def _read_rope(path: Path, config: dict[str, Any]) -> tuple[float, Llama3Rope | None]:
    """Theta and scaling. transformers 5 writes one rope_parameters, older ones rope_theta and rope_scaling."""
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = dict(config.get(name) or {})
    theta = _number(path, {**config, **rope}, "rope_theta", 10_000.0)
    rope.pop("rope_theta", None)
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    if kind not in ("default", "llama3"):
        raise WeightsError(f"{path}: {name}.rope_type is {kind!r}; would be right: 'default' or 'llama3'")
    known = set(Llama3Rope._fields) if kind == "llama3" else set()
    for key, found in rope.items():
        if key not in known and not (key == "partial_rotary_factor" and found == 1.0):
            raise WeightsError(
                f"{path}: {name}.{key} is {found!r}: unknown for rope_type {kind!r}; would be right: no such key"
            )
    if kind == "default":
        return theta, None
    missing = sorted(known - rope.keys())
    if missing:
        raise WeightsError(f"{path}: {name} lacks {missing[0]}; would be right: a number, as rope_type llama3 needs")
    values = {key: _number(path, rope, key, 0.0) for key in Llama3Rope._fields}
    original = int(values.pop("original_max_position_embeddings"))
    return theta, Llama3Rope(**values, original_max_position_embeddings=original)


def _read_weights(files: "_Files", shape: Shape, dtype: torch.dtype) -> Weights:
    hidden, ffn = shape.hidden_size, shape.ffn_size
    q_rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def stacked(columns: int, **parts: int) -> torch.Tensor:
        """Matrices of the same input, read one after the other into one tensor: no second copy in memory."""
        whole = torch.empty(sum(parts.values()), columns, dtype=dtype)
        start = 0
        for part, rows in parts.items():
            files.read_into(whole[start : start + rows], f"{prefix}{part.replace('__', '.')}.weight")
            start += rows
        return whole

    def single(key: str, *size: int) -> torch.Tensor:
        whole = torch.empty(*size, dtype=dtype)
        files.read_into(whole, key)
        return whole

    layers = []
    for i in range(shape.layers):
        prefix = f"model.layers.{i}."
        layers.append(
            Layer(
                attention_norm=single(f"{prefix}input_layernorm.weight", hidden),
                qkv=stacked(hidden, self_attn__q_proj=q_rows, self_attn__k_proj=kv_rows, self_attn__v_proj=kv_rows),
                out=stacked(q_rows, self_attn__o_proj=hidden),
                ffn_norm=single(f"{prefix}post_attention_layernorm.weight", hidden),
                gate_up=stacked(hidden, mlp__gate_proj=ffn, mlp__up_proj=ffn),
                down=stacked(ffn, mlp__down_proj=hidden),
            )
        )
    embedding = single("model.embed_tokens.weight", shape.vocab_size, hidden)
    if shape.tied:
        files.ignore("lm_head.weight")  # some exporters write the tied copy too; transformers reads the embedding
        head = embedding
    else:
        head = single("lm_head.weight", shape.vocab_size, hidden)
    return Weights(shape, embedding, tuple(layers), single("model.norm.weight", hidden), head)


class _Files:
    """The safetensors files of a directory and which of them holds which tensor."""

    def __init__(self, folder: Path) -> None:
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        self.folder = folder
        self.named_by = index if index.is_file() else single
        table: dict[str, str] = {}
        if index.is_file():
            table = _json(index).get("weight_map", {})
            if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
                raise WeightsError(f"{index}: weight_map; would be right: an object of tensor names and their files")
        elif not single.is_file():
            raise WeightsError(f"{folder}: would be right: a model.safetensors, or shards and {index.name}")
        self.open = {name: self._open(folder / name) for name in sorted(set(table.values()) or {single.name})}
        self.files = {key: name for name, file in self.open.items() for key in file.keys()}  # noqa: SIM118  no mapping
        self.left = {key for key in self.files if not key.endswith("rotary_emb.inv_freq")}  # a buffer of old exporters
        if lost := sorted(table.keys() - self.files.keys()):
            raise WeightsError(f"{folder / table[lost[0]]}: lacks {lost[0]}, which {index.name} says it holds")

    def _open(self, path: Path) -> Any:
        if not path.is_file():
            raise WeightsError(f"{path}: not there, but {self.named_by.name} names it")
        try:
            return safe_open(path, framework="pt")
        except SafetensorError as error:
            raise WeightsError(f"{path}: no readable safetensors file: {error}") from error

    def read_into(self, place: torch.Tensor, key: str) -> None:
        """Fill `place` with the tensor, converted to its dtype. Raises WeightsError unless it is there in that size."""
        if key not in self.files:
            raise WeightsError(f"{self.named_by}: lacks {key}; would be right: a tensor of {list(place.shape)}")
        path = self.folder / self.files[key]
        tensor = self.open[self.files[key]].get_tensor(key)
        if tensor.shape != place.shape:
            raise WeightsError(f"{path}: {key} is {list(tensor.shape)}; would be right: {list(place.shape)}")
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise WeightsError(f"{path}: {key} holds {tensor.dtype}; would be right: float32, bfloat16 or float16")
        place.copy_(tensor)
        self.left.discard(key)

    def ignore(self, key: str) -> None:
        self.left.discard(key)

    def refuse_leftovers(self) -> None:
        """A tensor that nothing read is mathematics that nothing does, a bias for one. Raises WeightsError."""
        if self.left:
            key = min(self.left)
            raise WeightsError(
                f"{self.folder / self.files[key]}: {key} has no place in a plain Llama; would be right: "
                "a model without it"
            )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise WeightsError(f"{path}: not there")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WeightsError(f"{path}: no JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: found a {type(value).__name__}; would be right: an object")
    return value


def _number(path: Path, config: dict[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise WeightsError(f"{path}: {key} is {value!r}; would be right: a positive number")
    return float(value)
