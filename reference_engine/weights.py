"""Weights of a Llama-shaped model: made from a seed, or read from safetensors files, every tensor checked and used."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open

from reference_engine.families import Shape as Shape  # said again: part of what this module gives
from reference_engine.families import WeightsError as WeightsError
from reference_engine.families import read_json, read_shape
from reference_engine.tokenizer import BYTE_VOCAB, EOS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Layer(NamedTuple):
    """One block. Matrices are [out, in], as in the files; those with the same input are one matrix, for one product."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 kv_heads) head_dim, hidden]
    out: torch.Tensor  # [hidden, heads head_dim]
    ffn_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 ffn, hidden]
    down: torch.Tensor  # [hidden, ffn]
    qkv_bias: torch.Tensor | None = None  # [(heads + 2 kv_heads) head_dim]
    out_bias: torch.Tensor | None = None  # [hidden]
    q_norm: torch.Tensor | None = None  # [head_dim], one for all query heads
    k_norm: torch.Tensor | None = None  # [head_dim]


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
            yield from (t for t in layer if t is not None)
        yield self.norm
        if not self.shape.tied:
            yield self.head

    def to(self, device: torch.device) -> "Weights":
        """The same weights on the device; itself if they are there."""
        if self.embedding.device == device:
            return self
        embedding = self.embedding.to(device)
        layers = tuple(Layer._make(None if t is None else t.to(device) for t in layer) for layer in self.layers)
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


def check_finite(tensor: torch.Tensor, path: Path, name: str) -> None:
    """Raises WeightsError: one value that is none makes every answer nonsense. One pass, and no copy."""
    low, high = tensor.aminmax()  # a NaN is both
    if not (low.isfinite() and high.isfinite()):
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise WeightsError(f"{path}: {name} has a value that is no finite number in {dtype}; would be right: only such")


class Source(Protocol):
    """Named tensors of one model in files. Keys are those of transformers' state dict without `model.`."""

    def expect(self, key: str, *size: int) -> None:
        """Raises WeightsError unless the tensor is there in that size: before memory is taken for it."""
        ...

    def read_into(self, place: torch.Tensor, key: str) -> None:
        """Fill `place` with an expected tensor of finite numbers, converted to its dtype. Raises WeightsError."""
        ...


def read(directory: str | Path, dtype: torch.dtype = torch.float32) -> Weights:
    """Weights of a Hugging Face directory: config.json, model.safetensors or its shards and their index.

    Tensors are converted to `dtype`. Raises WeightsError.
    """
    folder = Path(directory)
    shape = read_shape(folder / "config.json")
    files = _Files(folder, dtype)
    weights = build(files, shape, dtype)
    files.refuse_leftovers(shape)
    return weights


def fit_in_memory(path: Path, elements: int, dtype: torch.dtype) -> None:
    """Raises WeightsError if the machine has not the memory for so many elements, whatever else it may hold."""
    needed, there = elements * dtype.itemsize, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        name = str(dtype).removeprefix("torch.")
        raise WeightsError(
            f"{path}: {elements:,} weights are {needed / 1e9:.1f} GB in {name}, this machine has {there / 1e9:.1f} GB; "
            "would be right: a smaller model or dtype"
        )


def build(source: Source, shape: Shape, dtype: torch.dtype) -> Weights:
    """Read what a model of this shape needs. Raises WeightsError."""
    hidden, ffn = shape.hidden_size, shape.ffn_size
    q_rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def stacked(parts: dict[str, int], *columns: int) -> torch.Tensor:
        """Tensors of the same columns, read one after the other into one: no second copy in memory."""
        for key, rows in parts.items():
            source.expect(key, rows, *columns)
        whole = torch.empty(sum(parts.values()), *columns, dtype=dtype)
        start = 0
        for key, rows in parts.items():
            source.read_into(whole[start : start + rows], key)
            start += rows
        return whole

    def single(key: str, *size: int) -> torch.Tensor:
        return stacked({key: size[0]}, *size[1:])

    layers = []
    for i in range(shape.layers):
        block, attention = f"layers.{i}.", f"layers.{i}.self_attn."
        projections = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        biases = {f"{attention}{name}.bias": rows for name, rows in projections.items()}
        layers.append(
            Layer(
                attention_norm=single(f"{block}input_layernorm.weight", hidden),
                qkv=stacked({f"{attention}{name}.weight": rows for name, rows in projections.items()}, hidden),
                out=single(f"{attention}o_proj.weight", hidden, q_rows),
                ffn_norm=single(f"{block}post_attention_layernorm.weight", hidden),
                gate_up=stacked({f"{block}mlp.gate_proj.weight": ffn, f"{block}mlp.up_proj.weight": ffn}, hidden),
                down=single(f"{block}mlp.down_proj.weight", hidden, ffn),
                qkv_bias=stacked(biases) if shape.qkv_bias else None,
                out_bias=single(f"{attention}o_proj.bias", hidden) if shape.out_bias else None,
                q_norm=single(f"{attention}q_norm.weight", shape.head_dim) if shape.qk_norm else None,
                k_norm=single(f"{attention}k_norm.weight", shape.head_dim) if shape.qk_norm else None,
            )
        )
    embedding = single("embed_tokens.weight", shape.vocab_size, hidden)
    head = embedding if shape.tied else single("lm_head.weight", shape.vocab_size, hidden)
    return Weights(shape, embedding, tuple(layers), single("norm.weight", hidden), head)


class _Files:
    """The safetensors files of a directory and which of them holds which tensor."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        self.folder = folder
        self.named_by = index if index.is_file() else single
        table: dict[str, str] = {}
        if index.is_file():
            table = read_json(index).get("weight_map", {})
            if not isinstance(table, dict) or not all(_is_file_name(name) for name in table.values()):
                raise WeightsError(
                    f"{index}: weight_map; would be right: an object of tensor names and their files in this folder"
                )
        elif not single.is_file():
            raise WeightsError(f"{folder}: would be right: a model.safetensors, or shards and {index.name}")
        self.open = {name: self._open(folder / name) for name in sorted(set(table.values()) or {single.name})}
        self.files = {key: name for name, file in self.open.items() for key in file.keys()}  # noqa: SIM118  no mapping
        self.left = {key for key in self.files if not key.endswith("rotary_emb.inv_freq")}  # a buffer of old exporters
        fit_in_memory(folder, sum(math.prod(self._header(key)) for key in self.left), dtype)
        if lost := sorted(table.keys() - self.files.keys()):
            raise WeightsError(f"{folder / table[lost[0]]}: lacks {lost[0]}, which {index.name} says it holds")

    def _open(self, path: Path) -> Any:
        if not path.is_file():
            raise WeightsError(f"{path}: not there, but {self.named_by.name} names it")
        try:
            return safe_open(path, framework="pt")
        except SafetensorError as error:
            raise WeightsError(f"{path}: no readable safetensors file: {error}") from error

    def expect(self, key: str, *size: int) -> None:
        name = _full(key)
        if name not in self.files:
            raise WeightsError(f"{self.named_by}: lacks {name}; would be right: a tensor of {list(size)}")
        found = self._header(name)
        if found != list(size):
            raise WeightsError(f"{self._path(name)}: {name} is {found}; would be right: {list(size)}")

    def read_into(self, place: torch.Tensor, key: str) -> None:
        name = _full(key)
        tensor = self.open[self.files[name]].get_tensor(name)
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise WeightsError(
                f"{self._path(name)}: {name} holds {tensor.dtype}; would be right: float32, bfloat16 or float16"
            )
        place.copy_(tensor)
        check_finite(place, self._path(name), name)
        self.left.discard(name)

    def _path(self, name: str) -> Path:
        return self.folder / self.files[name]

    def _header(self, name: str) -> list[int]:
        """Sizes as the header has them, which safetensors held against the length of the file."""
        sizes: list[int] = self.open[self.files[name]].get_slice(name).get_shape()
        return sizes

    def refuse_leftovers(self, shape: Shape) -> None:
        """A tensor that nothing read is mathematics that nothing does, a bias for one. Raises WeightsError."""
        if shape.tied:
            self.left.discard("lm_head.weight")  # some exporters write the copy too; transformers reads the embedding
        if self.left:
            key = min(self.left)
            raise WeightsError(
                f"{self._path(key)}: {key} has no place in a model of this config.json; would be right: no such tensor"
            )


def _full(key: str) -> str:
    """The name in transformers' files, where all but the head is the `model` of a causal language model."""
    return key if key == "lm_head.weight" else f"model.{key}"


def _is_file_name(name: object) -> bool:
    """An index names files beside it: none elsewhere, and nothing but safetensors."""
    return isinstance(name, str) and name == Path(name).name and name.endswith(".safetensors")
