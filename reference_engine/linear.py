"""How a matrix of weights is kept and multiplied with: a table by precision and kernels. All give x Wᵀ + bias."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from reference_engine import gpu, native, quant


class Matrix(NamedTuple):
    """A matrix [outputs, inputs] made ready for products."""

    times: Callable[[torch.Tensor], torch.Tensor]  # x [rows, inputs] -> [rows, outputs] of x's dtype
    parts: tuple[torch.Tensor, ...]  # what is kept of it
    packed: native.Matrix | None = None  # the same for native.all_layers

    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.parts)


Prepare = Callable[[torch.Tensor, torch.Tensor | None], Matrix]  # weight [outputs, inputs], bias [outputs]

# Up to so many rows MKL is faster with the weights on the left: 1.5 times at two and four, slower from six on.
FEW_ROWS = 4


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
    def times(x: torch.Tensor) -> torch.Tensor:
        if 1 < len(x) <= FEW_ROWS and x.dtype == torch.float32 and x.device.type == "cpu":
            out = torch.mm(weight, x.t()).t().contiguous()
            return out if bias is None else out.add_(bias)
        return F.linear(x, weight, bias)

    return Matrix(times, _parts(weight, bias))


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
    panels, outputs = native.pack(weight), len(weight)
    packed = native.matrix("float32", weight.shape[1], outputs, panels, None, bias)
    return Matrix(lambda x: native.product(x, panels, outputs, bias), _parts(panels, bias), packed)


def _weights8(weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
    integers, scales = quant.rows(weight)
    by_output = scales[:, 0].contiguous()
    return Matrix(lambda x: quant.product_of_weights(x, integers, by_output, bias), _parts(integers, by_output, bias))


def _triton_weights8(weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
    integers, scales = quant.rows(weight)
    by_output = scales[:, 0].contiguous()
    return Matrix(lambda x: gpu.product_of_weights(x, integers, by_output, bias), _parts(integers, by_output, bias))


def _packed_weights8(weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
    integers, scales = quant.rows(weight)
    panels, by_output = native.pack(integers), scales[:, 0].contiguous()
    packed = native.matrix("weights8", weight.shape[1], len(weight), panels, by_output, bias)
    return Matrix(
        lambda x: native.product_weights8(x, panels, by_output, bias), _parts(panels, by_output, bias), packed
    )


def _int8(weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
    integers, scales = quant.rows(weight)
    by_output = scales[:, 0].contiguous()
    return Matrix(lambda x: quant.product(x, integers, by_output, bias), _parts(integers, by_output, bias))


def _packed_int8(weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
    integers, scales = quant.rows(weight)
    panels, by_output = native.pack_int8(integers), scales[:, 0].contiguous()
    packed = native.matrix("int8", weight.shape[1], len(weight), panels, by_output, bias)
    return Matrix(lambda x: native.product_int8(x, panels, by_output, bias), _parts(panels, by_output, bias), packed)


def _parts(*tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return tuple(t for t in tensors if t is not None)


# (quantization, kernels) ->
FORMS: dict[tuple[str, str], Prepare] = {
    ("none", "torch"): _plain,
    ("none", "triton"): _plain,
    ("none", "native"): _packed,
    ("int8-weights", "torch"): _weights8,
    ("int8-weights", "triton"): _triton_weights8,
    ("int8-weights", "native"): _packed_weights8,
    ("int8", "torch"): _int8,
    ("int8", "triton"): _int8,
    ("int8", "native"): _packed_int8,
}
