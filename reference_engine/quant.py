"""Eight-bit integers with a scale for each row: weights by output, activations and the KV cache by token.

A scale is of one row alone, so that no token depends on what else is in its batch.
"""

import torch
import torch.nn.functional as F

LEVELS = 127  # both ways from 0: -128 is not used
# Products of so many pairs of integers up to 127 sum to less than 2**24: exact in float32, whatever the order.
EXACT = 1040


def rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., n] as int8 of the same size and scales [..., 1] float32, so that x is about integer times scale.

    The scale of a row that is not finite is not finite either: what is made of it shows it.
    """
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / LEVELS
    scale = torch.where(scale == 0, 1.0, scale)  # not `> 0`, which a NaN would not be
    return torch.round(wide / scale).clamp_(-LEVELS, LEVELS).to(torch.int8), scale


def product_of_weights(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """[rows, outputs] of x [rows, inputs] and weight [outputs, inputs] int8 with scales [outputs]; x as it is."""
    out = F.linear(x.float(), weight.float()) * scales
    return (out if bias is None else out + bias).to(x.dtype)


def product(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[rows, outputs] of x [rows, inputs], quantised by row, and weight [outputs, inputs] int8, scales [outputs].

    The sums are exact, as those of the native kernel are: both give the same bits.
    """
    left, row_scales = rows(x)
    sums: torch.Tensor | None = None
    for start in range(0, x.shape[1], EXACT):
        part = F.linear(left[:, start : start + EXACT].float(), weight[:, start : start + EXACT].float())
        sums = part if sums is None else sums.double() + part
    assert sums is not None
    out = sums.float() * (row_scales * scales)
    return (out if bias is None else out + bias).to(x.dtype)
