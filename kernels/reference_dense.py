"""What the dense kernels compute, in plain PyTorch and NumPy: as exact as the types of what they are given allow.

Each takes the kernel's arguments; those a kernel writes in place are left as they are and come back as results.
"""

import numpy as np
import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[rows, size] in float64; arXiv 1910.07467."""
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum, rounded to residual's type, and its norm in float64."""
    total = (residual.double() + x.double()).to(residual.dtype)
    return total, rms_norm(total, weight, eps)


def norm_rope(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: tuple[int, int],
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """qkv [rows, heads + 2 kv_heads, head_dim] in float64 with its queries and keys normed and rotated."""
    query_heads, kv_heads = heads
    queries, keys, values = torch.split(qkv.double(), [query_heads, kv_heads, kv_heads], 1)
    if norms:
        queries, keys = (rms_norm(part, weight, eps) for part, weight in zip((queries, keys), norms, strict=True))
    turned = torch.cat((queries, keys), 1)
    c, s = cos[positions.long()].double(), sin[positions.long()].double()
    return torch.cat((turned * c + turned.roll(qkv.shape[-1] // 2, -1) * s, values), 1)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[rows, ffn] in float64; arXiv 2002.05202."""
    gate, up = gate_up.double().chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] -> int8 [N, K] and scale [N] float32, symmetric: each output's largest weight becomes ±127.

    The scale of an output with a weight that is no finite number is NaN, its integers are 0.
    """
    wide = weight.float()
    scale = wide.abs().amax(1) / 127
    finite = scale.isfinite()
    scale = torch.where(scale > 0, scale, 1.0).where(finite, torch.nan)
    return (wide / scale[:, None]).round().clamp(-127, 127).where(finite[:, None], 0).to(torch.int8), scale


def int8_matmul(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """[M, N] in float64."""
    product = x.double() @ weight.double().T * scale.double()
    return product if bias is None else product + bias.double()


def kept(logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """Weights [vocabulary] float64 relative to the likeliest's, 0 for what the filters drop: min-p, top-k, top-p."""
    wide = logits.astype(np.float64)
    weights: np.ndarray = np.exp(np.maximum((wide - wide.max()) / temperature, -1e4))
    weights[(weights < min_p) | np.isneginf(wide)] = 0
    order = np.argsort(-wide, kind="stable")
    sums = np.cumsum(weights[order][: top_k or None])
    if top_p < 1:
        sums = sums[: np.searchsorted(sums, top_p * sums[-1], side="left") + 1]
    weights[order[len(sums) :]] = 0
    return weights


def draw(
    logits: np.ndarray, u: float, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> int:
    """The token at u: in order of id where nothing is filtered, else in descending order; temperature 0: the argmax."""
    if temperature <= 0:
        return int(logits.argmax())
    weights = kept(logits, temperature, top_k, top_p, min_p)
    plain = top_k <= 0 and top_p >= 1 and min_p <= 0
    order = np.arange(len(logits)) if plain else np.argsort(-logits.astype(np.float64), kind="stable")
    sums = np.cumsum(weights[order])
    return int(order[np.searchsorted(sums, u * sums[-1], side="right")])


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) of 53 bits: Philox4x32-10, key `seed`, counter (position, 0, 0, 0).

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    c = [position & 0xFFFFFFFF, 0, 0, 0]
    k = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return ((c[0] << 32 | c[1]) >> 11) * 2.0**-53
