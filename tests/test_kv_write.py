"""New keys and values land in their slots, quantised as the reference does it, and nothing else changes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dense_kernels import Mutation, assert_caught, needs_triton, only_read
from tests.dense_kernels import few_programs as few_programs

# isort: split
from kernels import kv_write, reference
from kernels.interpret import interpreted
from kernels.reference import LARGEST

pytestmark = [pytest.mark.engine, needs_triton]
DEVICE = "cuda" if torch.cuda.is_available() and not interpreted() else "cpu"
CANARY = 77.0  # exact in every type
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Small arrays in turn: a second thread of torch's would only spin."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Case(NamedTuple):
    slots: list[int]
    kv_heads: int = 2
    dim: int = 64
    block_size: int = 8
    dtype: torch.dtype = torch.float32
    stored: torch.dtype | None = None  # None: dtype
    slots_first: bool = False  # pages are [num_blocks, block_size, kv_heads, head_dim] in memory


class Pages(NamedTuple):
    """Three blocks between two of canaries, keys and values, and their scales."""

    pool: torch.Tensor  # [2, 5, kv_heads, block_size, head_dim]
    scales: torch.Tensor  # [2, 5, kv_heads, block_size]

    def arguments(self, quantised: bool) -> dict[str, torch.Tensor]:
        found = {"keys": self.pool[0, 1:4], "values": self.pool[1, 1:4]}
        return found | ({"key_scales": self.scales[0, 1:4], "value_scales": self.scales[1, 1:4]} if quantised else {})


def pages(case: Case) -> Pages:
    size = (2, 5, case.kv_heads, case.block_size)
    pool = torch.full((*size, case.dim), CANARY).to(case.stored or case.dtype)
    if case.slots_first:
        pool = pool.transpose(2, 3).contiguous().transpose(2, 3)
    return Pages(pool.to(DEVICE), torch.full(size, CANARY, device=DEVICE))


def rows(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of an engine's product, whose queries are poison; magnitudes far apart, some vectors zero.

    Those of the last head are far apart within a vector, down to what e4m3 has no leading bit for.
    """
    draw = torch.Generator().manual_seed(0)
    qkv = torch.full((len(case.slots), 3 + 2 * case.kv_heads, case.dim), float("nan"))
    new = torch.randn(len(case.slots), 2 * case.kv_heads, case.dim, generator=draw)
    new *= 10 ** torch.empty(*new.shape[:2], 1).uniform_(-3, 3, generator=draw)
    new[:, -1] *= 10 ** torch.empty(new[:, -1].shape).uniform_(-6, 0, generator=draw)
    new[1:2, 0] = 0
    qkv[:, 3:] = new
    qkv = qkv.to(case.dtype).to(DEVICE)
    return qkv[:, 3 : 3 + case.kv_heads], qkv[:, 3 + case.kv_heads :]


def check(case: Case, kernels: ModuleType = kv_write) -> None:
    """Bit for bit, with every byte of the pages beside the slots."""
    new_keys, new_values = rows(case)
    found, right, quantised = pages(case), pages(case), case.stored in LARGEST
    slots = torch.tensor(case.slots, dtype=torch.int32, device=DEVICE)
    with only_read(new_keys, new_values, slots):
        kernels.kv_write(new_keys, new_values, slots=slots, **found.arguments(quantised))
    for kind, new in enumerate((new_keys, new_values)):
        reference.kv_write(new, right.pool[kind, 1:4], case.slots, right.scales[kind, 1:4] if quantised else None)
    # A GPU divides to the last bit but one: a scale may differ by that, and then an element by one step.
    # What rounds to 0 has its sign on a GPU and in the reference, and none where the kernel is interpreted.
    bits = [p.pool.float() if case.stored == FP8 else p.pool.contiguous().view(torch.uint8) for p in (found, right)]
    if DEVICE == "cpu":
        assert torch.equal(*bits), "pages differ"
        assert torch.equal(found.scales, right.scales), "scales differ"
        return
    assert (found.scales / right.scales - 1).abs().max() < 1e-6
    back = [p.pool.double() * (p.scales.double()[..., None] if quantised else 1) for p in (found, right)]
    step = right.scales.double()[..., None] * (32 if case.stored == FP8 else 1) if quantised else 0
    assert bool(((back[0] - back[1]).abs() <= step).all())


CASES = {
    "one token": Case([0]),
    "any order": Case([23, 0, 9, 15, 8]),
    "none": Case([]),
    "some nowhere": Case([5, -1, 17, -(2**31)]),
    "one head": Case([3, 16], kv_heads=1),
    "3 heads": Case([3, 16], kv_heads=3),
    "head_dim 80": Case([3, 16], dim=80),
    "head_dim 96": Case([3, 16], dim=96),
    "head_dim 1": Case([3, 16], dim=1),
    "blocks of 256": Case([255, 256, 257, 767], block_size=256),
    "blocks of 24": Case([23, 24, 71], block_size=24),
    "float16": Case([3, 16], dtype=torch.float16),
    "bfloat16": Case([3, 16], dtype=torch.bfloat16),
    "int8": Case([23, 0, -1, 9], kv_heads=3, dim=80, stored=torch.int8),
    "int8 of float16": Case([23, 0, 9], dtype=torch.float16, stored=torch.int8),
    "int8 of bfloat16": Case([23, 0, 9], dtype=torch.bfloat16, stored=torch.int8),
    "fp8": Case([23, 0, -1, 9], kv_heads=3, dim=80, stored=FP8),
    "fp8 of bfloat16": Case([23, 0, 9], dtype=torch.bfloat16, stored=FP8),
    "other strides": Case([23, 0, 9], slots_first=True),
    "other strides, int8": Case([23, 0, 9], stored=torch.int8, slots_first=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rows_land_in_their_slots_and_nothing_else_changes(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("stored", [torch.int8, FP8], ids=str)
@settings(max_examples=9, deadline=None)
@given(st.data())
def test_what_is_read_back_is_what_was_written_up_to_half_a_step(stored: torch.dtype, data: st.DataObject) -> None:
    """One program an example: four heads of keys and four of values, each a vector of its own."""
    dim = data.draw(st.integers(1, 16))
    number = st.floats(-(2.0**40), 2.0**40, width=32)
    vectors = data.draw(st.lists(st.lists(number, min_size=dim, max_size=dim), min_size=8, max_size=8))
    new = torch.tensor(vectors).view(2, 1, 4, dim).to(DEVICE)
    made = pages(Case([0], kv_heads=4, dim=dim, stored=stored))
    kv_write.kv_write(new[0], new[1], slots=torch.tensor([2], device=DEVICE), **made.arguments(True))
    scale = made.scales[:, 1, :, 2, None].double()
    wide = new[:, 0].double()
    error = (made.pool[:, 1, :, 2].double() * scale - wide).abs()
    # Of an int8, half of one. e4m3 has three bits behind the first, down to steps of 2**-9.
    unit = wide.abs() / scale
    half = torch.full_like(unit, 0.5) if stored == torch.int8 else torch.clamp(unit / 16, min=2**-10)
    assert bool((error <= half * scale * 1.0001 + 1e-30).all())


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU may take numbers below the normal ones for 0")
@pytest.mark.parametrize("stored", [torch.int8, FP8])
def test_what_a_scale_cannot_be_small_enough_for_is_the_largest_number(stored: torch.dtype) -> None:
    """Of the least numbers of float32 a 127th (or 448th) is one of the two nearest, and no quotient by it may pass."""
    case = Case([3], kv_heads=1, dim=16, stored=stored)
    found, right = pages(case), pages(case)
    new = torch.linspace(-1, 1, 16).sign()[None, None] * 190 * 2.0**-149 * (1 if stored == torch.int8 else 3)
    kv_write.kv_write(new, new, slots=torch.tensor([3]), **found.arguments(True))
    for kind in range(2):
        reference.kv_write(new, right.pool[kind, 1:4], [3], right.scales[kind, 1:4])
    assert torch.equal(found.scales, right.scales)
    assert torch.equal(found.pool.float(), right.pool.float())
    assert found.pool[0, 1, 0, 3].float().abs().max() == LARGEST[stored]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("stored", [torch.int8, FP8], ids=str)
def test_a_vector_that_is_no_finite_numbers_is_none_when_it_is_read_back(stored: torch.dtype, bad: float) -> None:
    """And every other one is stored as if it were not there, those of the same token too."""
    case = Case([23, 0, 9], dim=80, stored=stored)
    found, right = pages(case), pages(case)
    new = rows(case)
    kv_write.kv_write(*new, slots=torch.tensor(case.slots, device=DEVICE), **right.arguments(True))
    new[0][0, 1, 3] = new[1][2, 0, 79] = bad
    kv_write.kv_write(*new, slots=torch.tensor(case.slots, device=DEVICE), **found.arguments(True))
    broken = torch.zeros_like(found.scales, dtype=torch.bool)
    broken[0, 1 + 23 // 8, 1, 23 % 8] = broken[1, 1 + 9 // 8, 0, 9 % 8] = True
    assert torch.equal(found.scales.isnan(), broken)
    assert torch.equal(found.scales[~broken], right.scales[~broken])
    assert torch.equal(found.pool[~broken].float(), right.pool[~broken].float())
    assert torch.equal(found.pool[broken].float(), torch.zeros(2, 80, device=DEVICE))
    for vector in (new[0][0, 1], new[1][2, 0]):
        integers, scale = reference.quantise(vector, stored)
        assert scale.isnan()
        assert not integers.float().any()


def test_a_slot_may_be_of_64_bits() -> None:
    case = Case([9])
    made, (new_keys, new_values) = pages(case), rows(case)
    kv_write.kv_write(new_keys, new_values, slots=torch.tensor([9], device=DEVICE), **made.arguments(False))
    assert torch.equal(made.pool[0, 2, :, 1], new_keys[0])


PAGES, NEW = ("keys", "values"), ("new_keys", "new_values")
REFUSED: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "shape": (lambda a: {"new_keys": a["new_keys"][0]}, r"new_keys is \[2, 64\].*\[rows, kv_heads, head_dim\]"),
    "values": (lambda a: {"new_values": a["new_values"][:, :1]}, "new_values is"),
    "values' dtype": (lambda a: {"new_values": a["new_values"].half()}, "new_values is float16"),
    "values' strides": (lambda a: {"new_values": a["new_values"].contiguous()}, "new_values has strides"),
    "heads": (lambda a: {"keys": a["keys"][:, :1]}, r"keys is \[3, 1, 8, 64\]; would be right: \[3, 2, 8, 64\]"),
    "other pages": (lambda a: {"keys": a["keys"].half()}, "keys is float16; would be right: float32"),
    "page strides": (lambda a: {"values": a["values"].mT.contiguous().mT}, "values has stride"),
    "values' pages": (
        lambda a: {"values": a["values"].transpose(1, 2).contiguous().transpose(1, 2)},
        "values has strides",
    ),
    "scales apart": (
        lambda a: (
            {name: a[name].to(torch.int8) for name in ("keys", "values")}
            | {f"{name}_scales": torch.ones(3, 4, 8)[:, ::2] for name in ("key", "value")}
        ),
        "key_scales has strides .*; would be right: contiguous",
    ),
    "pages far apart": (
        lambda a: (
            {name: torch.empty_strided((3, 2, 8, 64), (512, 2**31, 64, 1), device="meta") for name in PAGES}
            | {name: a[name].to("meta") for name in ("new_keys", "new_values", "slots")}
        ),
        r"keys has strides \(512, 2147483648, 64, 1\); would be right: a row within 2\*\*31 elements",
    ),
    "heads far apart": (
        lambda a: {name: torch.empty_strided((2, 2, 64), (64, 2**31, 1), device="meta") for name in NEW},
        "new_keys has strides .*within",
    ),
    "slots": (lambda a: {"slots": a["slots"][:1]}, r"slots is \[1\]; would be right: \[2\]"),
    "slots' dtype": (lambda a: {"slots": a["slots"].float()}, "slots is float32; would be right: int32 or int64"),
    "elsewhere": (lambda a: {"slots": a["slots"].to("meta")}, "slots is on meta"),
    "no scales": (
        lambda a: {"keys": a["keys"].to(torch.int8), "values": a["values"].to(torch.int8)},
        r"key_scales is None; would be right: \[3, 2, 8\] of float32",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernel_cannot_take_is_refused(name: str) -> None:
    case = Case([3, 4])
    new_keys, new_values = rows(case)
    right = {"new_keys": new_keys, "new_values": new_values, **pages(case).arguments(False)}
    right["slots"] = torch.tensor(case.slots, device=DEVICE)
    change, said = REFUSED[name]
    with pytest.raises(ValueError, match=said):
        kv_write.kv_write(**{**right, **change(right)})


# One line broken, and the case that must fail for it.
MUTATIONS: dict[str, tuple[str, str, str]] = {
    "writes what has no slot": ("if slot < 0:", "if slot < -1:", "some nowhere"),
    "another row's slot": ("slots + row)", "slots + 0 * row)", "any order"),
    "another row": ("row * new_row", "0 * new_row", "any order"),
    "another head": ("(head * new_head)[:, None]", "(0 * head)[:, None]", "3 heads"),
    "to another head": ("(head * page_head)[:, None]", "((HEADS - 1 - head) * page_head)[:, None]", "3 heads"),
    "block of a fixed size": ("slot // BLOCK_SIZE, slot", "slot // 32, slot", "blocks of 24"),
    "start of the block": ("slot % BLOCK_SIZE\n", "slot * 0\n", "any order"),
    "heads beyond the last": ("(head < HEADS)[:, None] &", "(head < HEADS_PADDED)[:, None] &", "3 heads"),
    "beyond head_dim": ("& (dim < DIM)[None, :]", "& (dim < DIM_PADDED)[None, :]", "head_dim 80"),
    "values are keys": ("new_keys if kind == 0 else new_values", "new_keys", "one token"),
    "values over keys": ("pages = keys if kind == 0 else values", "pages = keys", "one token"),
    "one scale for both": (
        "key_scales if kind == 0 else value_scales)", "key_scales if kind == 0 else key_scales)", "int8",
    ),
    "scale of another slot": ("* BLOCK_SIZE + in_page\n", "* BLOCK_SIZE\n", "int8"),
    "scale of another head": ("(block * HEADS + head) * BLOCK", "(block * HEADS + 0 * head) * BLOCK", "int8"),
    "scales beyond the last head": ("scale, mask=head < HEADS)", "scale, mask=head < HEADS_PADDED)", "fp8"),
    "largest with its sign": ("size = tl.abs(x)", "size = x", "int8"),
    "largest too large": ("largest / LARGEST", "largest / (LARGEST + 1)", "int8"),
    "zeros divided by zero": ("tl.where(largest > 0, largest / LARGEST, 1.0)", "largest / LARGEST", "int8"),
    "not rounded": ("x = (x + 12582912.0) - 12582912.0", "x = x + 0.0", "int8"),
    "small fp8 not rounded": ("tl.abs(x) < 0.015625", "tl.abs(x) < 0.0", "fp8"),
    "fp8 cut off": ('ROUNDS == "e4m3"', 'ROUNDS == "never"', "fp8"),
}  # fmt: skip


@pytest.mark.skipif(DEVICE == "cuda", reason="a broken kernel may end the CUDA context that the other tests use")
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_kernel_is_caught(name: str, tmp_path: Path) -> None:
    old, new, case = MUTATIONS[name]
    assert_caught(kv_write, Mutation(old, new, lambda broken: check(CASES[case], broken)), tmp_path)
