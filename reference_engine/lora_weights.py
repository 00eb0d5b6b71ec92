"""An adapter's matrices, read from PEFT's files and made ready for the products of a step: x Wᵀ + (x Aᵀ) Bᵀ · scale."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from reference_engine.families import Shape, WeightsError
from reference_engine.linear import FORMS
from reference_engine.lora import CONFIG, TARGETS, WEIGHTS, read_config
from reference_engine.model import Adapter, Model
from reference_engine.weights import check_finite

# base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, as PEFT saves a causal language model's.
KEY = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])\.weight")
DTYPES = ("F32", "BF16", "F16")


class Part(NamedTuple):
    """A projection within the matrix that the engine makes of several with one input."""

    name: str
    rows: int
    inputs: int


def parts_of(shape: Shape) -> dict[str, list[Part]]:
    """The projections of each product, in the order of their rows."""
    hidden, ffn = shape.hidden_size, shape.ffn_size
    q_rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "qkv": [Part("q_proj", q_rows, hidden), Part("k_proj", kv_rows, hidden), Part("v_proj", kv_rows, hidden)],
        "out": [Part("o_proj", hidden, q_rows)],
        "gate_up": [Part("gate_proj", ffn, hidden), Part("up_proj", ffn, hidden)],
        "down": [Part("down_proj", hidden, ffn)],
    }


def read(folder: Path, model: Model, max_rank: int) -> tuple[Adapter, int]:
    """What the adapter adds to each layer's products, and its rank. Every tensor is checked and used.

    Raises WeightsError. B holds the scale; matrices are float32 or of the model's dtype, as the model's weights are.
    """
    config = read_config(folder / CONFIG)
    if config.rank > max_rank:
        raise WeightsError(f"{folder / CONFIG}: r is {config.rank}; would be right: at most max_lora_rank, {max_rank}")
    path = folder / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            keys = _keys(file, path, model.shape, config.rank)
            tensors = {key: _tensor(file, path, key, model) for key in keys}
            for key, tensor in tensors.items():
                if keys[key][2] == "B":
                    check_finite(tensor.mul_(config.scale), path, f"{key} times the scale, {config.scale:g},")
    except SafetensorError as error:
        raise WeightsError(f"{path}: no readable safetensors file: {error}") from error
    by_place = {keys[key]: tensor for key, tensor in tensors.items()}
    layers = []
    for number in range(model.shape.layers):
        products = {}
        for product, parts in parts_of(model.shape).items():
            pairs = [(part, by_place.get((number, part.name, "A")), by_place.get((number, part.name, "B")))
                     for part in parts]  # fmt: skip
            if any(a is not None for _, a, _ in pairs):
                products[product] = _delta(pairs, model)
        layers.append(products)
    return tuple(layers), config.rank


def _keys(file: Any, path: Path, shape: Shape, rank: int) -> dict[str, tuple[int, str, str]]:
    """Every tensor's layer, projection and side; their sizes are those of the model, before memory is taken."""
    sizes = {part.name: part for parts in parts_of(shape).values() for part in parts}
    keys: dict[str, tuple[int, str, str]] = {}
    for key in file.keys():  # noqa: SIM118  no mapping
        found = KEY.fullmatch(key)
        if not found or found[2] not in TARGETS or int(found[1][:9]) >= shape.layers:
            right = f"lora_A and lora_B of {', '.join(TARGETS)} in layers 0 to {shape.layers - 1}"
            raise WeightsError(f"{path}: {key[:200]} has no place; would be right: {right}")
        part, header = sizes[found[2]], file.get_slice(key)
        right_size = [rank, part.inputs] if found[3] == "A" else [part.rows, rank]
        if header.get_shape() != right_size:
            raise WeightsError(f"{path}: {key} is {header.get_shape()}; would be right: {right_size}")
        if header.get_dtype() not in DTYPES:
            raise WeightsError(f"{path}: {key} holds {header.get_dtype()}; would be right: {', '.join(DTYPES)}")
        keys[key] = (int(found[1]), found[2], found[3])
    places = set(keys.values())
    for number, name, side in sorted(places):
        other = "B" if side == "A" else "A"
        if (number, name, other) not in places:
            raise WeightsError(f"{path}: layer {number} has lora_{side} of {name} and no lora_{other}")
    if not keys:
        raise WeightsError(f"{path}: holds no tensor; would be right: those of an adapter")
    return keys


def _tensor(file: Any, path: Path, key: str, model: Model) -> torch.Tensor:
    tensor: torch.Tensor = file.get_tensor(key).to(model.embedding.device, torch.float32)
    check_finite(tensor, path, key)
    return tensor


Pair = tuple[Part, torch.Tensor | None, torch.Tensor | None]


def _delta(pairs: list[Pair], model: Model) -> Callable[[torch.Tensor], torch.Tensor]:
    """One pair of matrices for all parts of a product: A below each other, B as blocks on a diagonal."""
    a = torch.cat([a for _, a, _ in pairs if a is not None])
    b = a.new_zeros(sum(part.rows for part, _, _ in pairs), len(a))
    row = column = 0
    for part, _, block in pairs:
        if block is not None:
            b[row : row + part.rows, column : column + block.shape[1]] = block
            column += block.shape[1]
        row += part.rows
    prepare, dtype = FORMS["none", model.kernels], model.embedding.dtype
    down, up = prepare(a.to(dtype), None).times, prepare(b.to(dtype), None).times
    return lambda x: up(down(x))
