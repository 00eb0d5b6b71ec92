"""SwiGLU's gate: silu(gate) · up from the one product that made both.

Bytes moved, n = rows · ffn values of b bytes: gate, up and the result once each, 3·n·b; silu and then the product by
torch's operators read and write a temporary more, 5·n·b. Bound by memory: some ten operations a value.
Each value is computed alone, so no batch can matter.
Meant for: ffn 8,192 to 28,672, rows 1 to 8,192. Not yet measured on a GPU.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

import torch

from kernels.dense_config import FLOATS, blocks, expect, jit, launch, power_of_two, tl, warps

BLOCK = 2048  # values a program: two loads of 16 bytes a thread at 4 warps and 16 bit


def swiglu(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """gate_up [rows, 2 ffn], the gate first -> silu(gate) · up [rows, ffn]; arXiv 2002.05202. Raises ValueError."""
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up is {list(gate_up.shape)}; would be right: [rows, an even number]")
    rows, ffn = gate_up.shape[0], gate_up.shape[1] // 2
    expect("gate_up", gate_up, (rows, 2 * ffn), FLOATS, gate_up)
    out = gate_up.new_empty(rows, ffn) if out is None else out
    expect("out", out, (rows, ffn), (gate_up.dtype,), gate_up)
    block = min(BLOCK, power_of_two(ffn))
    launch(
        _swiglu, (rows, blocks(ffn, block)), gate_up, out, gate_up.stride(0), out.stride(0), ffn,
        BLOCK=block, warps=warps(block),
    )  # fmt: skip
    return out


@jit
def _swiglu(gate_up, out, in_stride, out_stride, ffn, BLOCK: tl.constexpr):
    """BLOCK values of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < ffn
    place = gate_up + row * in_stride + column
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + ffn, mask=inside, other=0.0).to(tl.float32)
    power = tl.exp(-tl.abs(gate))  # at most 1: exp(-gate) is infinite at gates below -88
    values = gate * tl.where(gate < 0, power, 1.0) / (1.0 + power) * up
    tl.store(out + row * out_stride + column, values.to(out.dtype.element_ty), mask=inside)
