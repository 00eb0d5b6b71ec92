"""What each kernel is tried on: inputs of a size, the least bytes, the calls of ours, of torch's and of the exact.

CASES has a row a kernel: sizes -> Case. Kernels are imported when their row is asked for: whether Triton compiles or
interprets is settled by then.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

Inputs = dict[str, Any]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
KV_DTYPES = {"int8": torch.int8, "float8": torch.float8_e4m3fn}
EPS = 1e-5
SCALES = ("key_scales", "value_scales")
# Largest error relative to the largest right value: float32 sums in another order, else one or two roundings of the
# result (2**-11, 2**-8) and, in attention, of the probabilities. int8 and float8 pages: reference and kernel read the
# same ones, so that quantisation is no error here.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The defaults are a decode of an 8B model (Llama 3.1) of 64 sequences. Raises ValueError."""

    batch: int = 64  # sequences
    query: int = 1  # tokens that each computes in the step
    context: int = 4096  # tokens of each, those of the step included
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16  # tokens of a page
    hidden: int = 4096
    ffn: int = 14_336
    outputs: int = 4096  # of the product
    vocab: int = 128_256
    dtype: str = "bfloat16"
    kv_dtype: str = "auto"  # auto: dtype
    top_k: int = 50
    top_p: float = 0.9

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self) if f.type is int and f.name != "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; would be right: 1 or more")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; would be right: {', '.join(DTYPES)}")
        if self.kv_dtype not in ("auto", *KV_DTYPES):
            raise ValueError(f"kv_dtype is {self.kv_dtype!r}; would be right: auto, {', '.join(KV_DTYPES)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}, kv_heads {self.kv_heads}; would be right: a multiple of kv_heads")
        if self.query > self.context:
            raise ValueError(
                f"query is {self.query}, context {self.context}; would be right: a query within the context"
            )
        if not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(f"top_p is {self.top_p}, top_k {self.top_k}; would be right: 0 < top_p <= 1, top_k >= 0")

    @property
    def rows(self) -> int:
        return self.batch * self.query

    @property
    def type(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def kv_type(self) -> torch.dtype:
        return KV_DTYPES.get(self.kv_dtype, self.type)


class Case(NamedTuple):
    """One kernel at one size. `exact` is called before `ours`, on inputs that `ours` may then write to."""

    shape: str  # what of the sizes matters, in words
    moved_bytes: int  # the least that crosses the memory: each input read once, each result written once
    flops: int  # multiplications and additions of products; 0 where there are none worth counting
    make: Callable[[torch.device], Inputs]
    ours: Callable[[Inputs], torch.Tensor]
    torchs: Callable[[Inputs], object] | None  # the same by torch's operators
    exact: Callable[[Inputs], torch.Tensor]
    read: Callable[[Inputs], torch.Tensor] | None = None  # what to compare, where that is not what `ours` returns


def tolerance(name: str, s: Sizes) -> float:
    """The largest error that a kernel may have at those sizes; half a step where it is the one that quantises."""
    if name == "kv_write" and s.kv_dtype != "auto":
        return {"int8": 0.51 / 127, "float8": 1.02 * 2**-4}[s.kv_dtype]
    return TOLERANCE[s.dtype]


def error(case: Case, device: torch.device) -> float:
    """The largest difference from the exact result, relative to the largest value of that; NaN where ours has one."""
    torch.manual_seed(0)
    inputs = case.make(device)
    right = case.exact(inputs).double()
    returned = case.ours(inputs)
    found = (case.read(inputs) if case.read else returned).double()
    if found.shape != right.shape:
        raise ValueError(f"the result is {list(found.shape)}; would be right: {list(right.shape)}")
    return float((found - right).abs().max() / right.abs().max().clamp(min=1e-30))


def _random(device: torch.device, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def rms_norm(s: Sizes) -> Case:
    from kernels import norm_rope, reference_dense

    def make(device: torch.device) -> Inputs:
        return {
            "x": _random(device, s.rows, s.hidden, dtype=s.type), "weight": _random(device, s.hidden, dtype=s.type),
            "out": torch.empty(s.rows, s.hidden, dtype=s.type, device=device),
        }  # fmt: skip

    return Case(
        f"{s.rows} × {s.hidden} {s.dtype}", (2 * s.rows + 1) * s.hidden * s.type.itemsize, 0, make,
        lambda i: norm_rope.rms_norm(i["x"], i["weight"], EPS, i["out"]),
        lambda i: F.rms_norm(i["x"], (s.hidden,), i["weight"], EPS),
        lambda i: reference_dense.rms_norm(i["x"], i["weight"], EPS),
    )  # fmt: skip


def add_rms_norm(s: Sizes) -> Case:
    from kernels import norm_rope, reference_dense

    plain = rms_norm(s)

    def make(device: torch.device) -> Inputs:
        return plain.make(device) | {"residual": _random(device, s.rows, s.hidden, dtype=s.type)}

    return Case(
        f"{s.rows} × {s.hidden} {s.dtype}", (4 * s.rows + 1) * s.hidden * s.type.itemsize, 0, make,
        lambda i: norm_rope.add_rms_norm(i["x"], i["residual"], i["weight"], EPS, i["out"]),
        lambda i: F.rms_norm(i["residual"].add_(i["x"]), (s.hidden,), i["weight"], EPS),
        lambda i: reference_dense.add_rms_norm(i["x"], i["residual"], i["weight"], EPS)[1],
    )  # fmt: skip


def norm_rope(s: Sizes) -> Case:
    from kernels import norm_rope as module
    from kernels import reference_dense

    heads = (s.heads, s.kv_heads)
    turned = s.heads + s.kv_heads

    def make(device: torch.device) -> Inputs:
        angles = torch.rand(s.context, s.head_dim // 2, device=device) * 6
        cos, sin = angles.cos(), angles.sin()
        return {
            "qkv": _random(device, s.rows, turned + s.kv_heads, s.head_dim, dtype=s.type),
            "positions": torch.randint(s.context, (s.rows,), device=device),
            "cos": torch.cat((cos, cos), -1)[:, None].to(s.type),
            "sin": torch.cat((-sin, sin), -1)[:, None].to(s.type),
            "norms": tuple(1 + 0.1 * _random(device, s.head_dim, dtype=s.type) for _ in range(2)),
        }

    def torchs(i: Inputs) -> object:
        queries, keys = i["qkv"][:, : s.heads], i["qkv"][:, s.heads : turned]
        for part, weight in zip((queries, keys), i["norms"], strict=True):
            part.copy_(F.rms_norm(part, (s.head_dim,), weight, EPS))
        both = i["qkv"][:, :turned]
        swapped = both.roll(s.head_dim // 2, -1).mul_(i["sin"][i["positions"]])
        return both.mul_(i["cos"][i["positions"]]).add_(swapped)

    values = 2 * s.rows * turned * s.head_dim + s.rows * s.head_dim  # of cos and sin a half each
    return Case(
        f"{s.rows} rows of {s.heads} + {s.kv_heads} heads of {s.head_dim}, normed, {s.dtype}",
        values * s.type.itemsize, 0, make,
        lambda i: module.norm_rope(i["qkv"], i["positions"], i["cos"], i["sin"], heads, i["norms"], EPS), torchs,
        lambda i: reference_dense.norm_rope(i["qkv"], i["positions"], i["cos"], i["sin"], heads, i["norms"], EPS),
    )  # fmt: skip


def swiglu(s: Sizes) -> Case:
    from kernels import reference_dense
    from kernels import swiglu as module

    def make(device: torch.device) -> Inputs:
        return {
            "gate_up": _random(device, s.rows, 2 * s.ffn, dtype=s.type),
            "out": torch.empty(s.rows, s.ffn, dtype=s.type, device=device),
        }

    def torchs(i: Inputs) -> object:
        gate, up = i["gate_up"].chunk(2, -1)
        return F.silu(gate).mul_(up)

    return Case(
        f"{s.rows} × {s.ffn} {s.dtype}", 3 * s.rows * s.ffn * s.type.itemsize, 0, make,
        lambda i: module.swiglu(i["gate_up"], i["out"]), torchs, lambda i: reference_dense.swiglu(i["gate_up"]),
    )  # fmt: skip


def int8_matmul(s: Sizes, invariant: bool = True) -> Case:
    """torch's way is the product with weights in the activations' type."""
    from kernels import int8_matmul as module
    from kernels import reference_dense

    def make(device: torch.device) -> Inputs:
        return {
            "x": _random(device, s.rows, s.hidden, dtype=s.type),
            "weight": torch.randint(-128, 128, (s.outputs, s.hidden), dtype=torch.int8, device=device),
            "scale": torch.rand(s.outputs, device=device) / 1000,
            "plain": torch.empty(s.outputs, s.hidden, dtype=s.type, device=device),
            "out": torch.empty(s.rows, s.outputs, dtype=s.type, device=device),
        }

    moved = s.outputs * (s.hidden + 4) + s.rows * (s.hidden + s.outputs) * s.type.itemsize
    return Case(
        f"{s.rows} rows, {s.hidden} to {s.outputs}, {s.dtype}" + ", invariant" * invariant,
        moved, 2 * s.rows * s.outputs * s.hidden, make,
        lambda i: module.int8_matmul(i["x"], i["weight"], i["scale"], None, i["out"], invariant),
        lambda i: F.linear(i["x"], i["plain"]),
        lambda i: reference_dense.int8_matmul(i["x"], i["weight"], i["scale"]),
    )  # fmt: skip


def sampling(s: Sizes) -> Case:
    from kernels import reference_dense
    from kernels import sampling as module

    def make(device: torch.device) -> Inputs:
        ones = torch.ones(s.batch, dtype=torch.float64, device=device)
        numbers = torch.arange(s.batch, device=device)
        settings = module.Settings(ones, 0 * numbers + s.top_k, s.top_p * ones, 0 * ones, numbers, numbers)
        return {"logits": 3 * torch.randn(s.batch, s.vocab, device=device), "settings": settings}

    def torchs(i: Inputs) -> object:
        """As vLLM's plain path does it: the draw by exponential numbers, since multinomial reads a sum on the host."""
        values, order = i["logits"].sort(-1, descending=True)
        weights = torch.softmax(values, -1)
        weights[:, s.top_k or s.vocab :] = 0
        weights *= weights.cumsum(-1) - weights < s.top_p * weights.sum(-1, keepdim=True)
        return order.gather(1, (weights / torch.empty_like(weights).exponential_()).argmax(-1, keepdim=True))

    def exact(i: Inputs) -> torch.Tensor:
        rows, numbers = i["logits"].cpu().numpy(), range(s.batch)
        drawn = [
            reference_dense.draw(rows[n], reference_dense.uniform(n, n), 1.0, s.top_k, s.top_p, 0.0) for n in numbers
        ]
        return torch.tensor(drawn, device=i["logits"].device)

    return Case(
        f"{s.batch} × {s.vocab} float32, top_k {s.top_k}, top_p {s.top_p}", s.batch * s.vocab * 4, 0, make,
        lambda i: module.sample(i["logits"], i["settings"]), torchs, exact,
    )  # fmt: skip


def _pages(s: Sizes, device: torch.device) -> Inputs:
    """Keys and values in pages in no order, quantised where asked for."""
    per = -(-s.context // s.block_size)
    size = (s.batch * per, s.kv_heads, s.block_size, s.head_dim)
    pages: Inputs = {"tables": torch.randperm(s.batch * per, dtype=torch.int32).view(s.batch, per).to(device)}
    for name in ("keys", "values"):
        if s.kv_dtype == "int8":
            pages[name] = torch.randint(-127, 128, size, dtype=torch.int8, device=device)
        else:
            pages[name] = torch.empty(size, dtype=s.type, device=device).normal_().to(s.kv_type)
        if s.kv_dtype != "auto":
            largest = 64 if s.kv_dtype == "int8" else 1  # values of about 1
            pages[f"{name[:-1]}_scales"] = (0.5 + torch.rand(size[:3], device=device)) / largest
    return pages


def _kv_bytes(s: Sizes, tokens: int) -> int:
    return tokens * 2 * s.kv_heads * (s.head_dim * s.kv_type.itemsize + 4 * (s.kv_dtype != "auto"))


def paged_attention(s: Sizes) -> Case:
    """torch's way has keys and values that lie one after the other, not in pages, and are never quantised."""
    from kernels.attention_api import plan, tiles_for
    from kernels.paged_attention import paged_attention as attend
    from kernels.reference import paged_attention as reference

    counts, lengths = [s.query] * s.batch, [s.context] * s.batch

    def make(device: torch.device) -> Inputs:
        tiles = tiles_for(s.type, s.head_dim, device)
        work = plan(counts, lengths, s.heads // s.kv_heads, tiles=tiles)
        query = _random(device, s.rows, s.heads, s.head_dim, dtype=s.type)
        return _pages(s, device) | {"query": query, "out": torch.empty_like(query), "work": work.to(device)}

    def ours(i: Inputs) -> torch.Tensor:
        given: Any = {name: i.get(name) for name in SCALES}
        attend(i["out"], i["query"], i["keys"], i["values"], i["tables"], i["work"], **given)
        out: torch.Tensor = i["out"]
        return out

    def torchs(i: Inputs) -> object:
        query = i["query"].view(s.batch, s.query, s.heads, s.head_dim).transpose(1, 2)
        tokens = -(-s.context // s.block_size) * s.block_size
        keys, values = (
            i[n].view(s.batch, s.kv_heads, tokens, s.head_dim)[:, :, : s.context] for n in ("keys", "values")
        )
        return F.scaled_dot_product_attention(query, keys, values, is_causal=s.query > 1, enable_gqa=True)

    def exact(i: Inputs) -> torch.Tensor:
        given: Any = {name: i.get(name) for name in SCALES}
        wide = [t if t.dtype == torch.int8 else t.double() for t in (i["keys"], i["values"])]
        return reference(i["query"].double(), wide[0], wide[1], i["tables"], counts, lengths, **given)

    pairs = s.batch * (s.query * (s.context - s.query) + s.query * (s.query + 1) // 2)
    alike = s.kv_dtype == "auto" and s.query in (1, s.context)
    return Case(
        f"{s.batch} × {s.query} of {s.context} tokens, {s.heads} / {s.kv_heads} heads of {s.head_dim}, "
        f"{s.dtype}, pages of {s.block_size} {s.kv_dtype}",
        _kv_bytes(s, s.batch * s.context) + 2 * s.rows * s.heads * s.head_dim * s.type.itemsize,
        4 * pairs * s.heads * s.head_dim, make, ours, torchs if alike else None, exact,
    )  # fmt: skip


def kv_write(s: Sizes) -> Case:
    """Compared are the pages as attention would read them; torch's way is index_copy_, which quantises nothing."""
    from kernels.kv_write import kv_write as write

    def make(device: torch.device) -> Inputs:
        pages = _pages(s, device)
        slots = torch.randperm(len(pages["keys"]) * s.block_size)[: s.rows].to(device)
        new = {f"new_{n}": _random(device, s.rows, s.kv_heads, s.head_dim, dtype=s.type) for n in ("keys", "values")}
        return pages | new | {"slots": slots}

    def read(i: Inputs) -> torch.Tensor:
        block, place = i["slots"] // s.block_size, i["slots"] % s.block_size
        stored = i["keys"].dtype  # of eight bits it is indexed as integers: not every torch can index float8 on a GPU
        same = torch.uint8 if stored.itemsize == 1 else stored
        found = [i[n].view(same)[block, :, place].view(stored).double() for n in ("keys", "values")]
        if s.kv_dtype != "auto":
            found = [f * i[n][block, :, place, None].double() for f, n in zip(found, SCALES, strict=True)]
        return torch.cat(found)

    def ours(i: Inputs) -> torch.Tensor:
        given: Any = {name: i.get(name) for name in SCALES}
        write(i["new_keys"], i["new_values"], i["keys"], i["values"], i["slots"], **given)
        keys: torch.Tensor = i["keys"]
        return keys

    def torchs(i: Inputs) -> object:
        block, place = i["slots"] // s.block_size, i["slots"] % s.block_size
        for name in ("keys", "values"):
            i[name][block, :, place] = i[f"new_{name}"]
        return None

    moved = _kv_bytes(s, s.rows) + 2 * s.rows * s.kv_heads * s.head_dim * s.type.itemsize
    return Case(
        f"{s.rows} rows of {s.kv_heads} heads of {s.head_dim} {s.dtype} to pages of {s.block_size} {s.kv_dtype}",
        moved, 0, make, ours, torchs if s.kv_dtype == "auto" else None,
        lambda i: torch.cat((i["new_keys"], i["new_values"])).double(), read,
    )  # fmt: skip


CASES: dict[str, Callable[[Sizes], Case]] = {
    "paged_attention": paged_attention,
    "kv_write": kv_write,
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "norm_rope": norm_rope,
    "swiglu": swiglu,
    "int8_matmul": int8_matmul,
    "int8_matmul_split": lambda s: int8_matmul(s, invariant=False),
    "sampling": sampling,
}
