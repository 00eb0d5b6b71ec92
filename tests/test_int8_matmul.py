"""The product with int8 weights against float64: any shape, whole or split sums, canaries around every row."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.dense_kernels import (
    Mutation,
    assert_caught,
    assert_close,
    guarded,
    guarded_scratch,
    needs_triton,
    only_read,
    poisoned,
    random,
)
from tests.dense_kernels import few_programs as few_programs

# isort: split
from kernels import int8_matmul, reference_dense

pytestmark = [pytest.mark.engine, needs_triton]


def integers(*shape: int) -> torch.Tensor:
    """All of int8, -128 among them."""
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(4))


def check(
    module: ModuleType,
    m: int = 3,
    n: int = 80,
    k: int = 96,
    dtype: torch.dtype = torch.float32,
    bias: bool = True,
    invariant: bool = True,
) -> None:
    """Fewer than ten programs at every shape used here; float16 in a range that its largest number allows."""
    x, weight = guarded(random(m, k, dtype=dtype)), guarded(integers(n, k))
    scale = guarded(1e-3 + random(n, 1).abs() / 64)
    added = guarded(random(n, 1, seed=2, dtype=dtype)) if bias else None
    out = poisoned(m, n, dtype=dtype)
    # scales and biases are one row each
    scales, biases = scale.view[:, 0].clone(), added.view[:, 0].clone() if added else None
    with guarded_scratch(), only_read(x.view, weight.view, scales, *[] if biases is None else [biases]):
        module.int8_matmul(x.view, weight.view, scales, biases, out.view, invariant)
    assert_close(out.view, reference_dense.int8_matmul(x.view, weight.view, scales, biases), dtype)
    out.assert_whole()


def check_split(module: ModuleType) -> None:
    """Two rows of 2,100 inputs: the outputs are one tile, so K goes to four programs, the last with fewer.

    Their sums are added by two programs a row, the second with fewer outputs.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SUMMED", 32)
        check(module, 2, 40, 2100, invariant=False)


def check_many(module: ModuleType) -> None:
    """More rows than a tile has, in a number of them that is no multiple of it."""
    check(module, 70, 130, 48)


def check_turns(module: ModuleType) -> None:
    """One row tile more than take turns on the same weights, two tiles of these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TOGETHER", 2)
        check(module, 129, 70, 16)


SHAPES: list[tuple[int, int, int, dict[str, Any]]] = [
    (1, 80, 96, {}),
    (1, 1, 1, {}),
    (5, 199, 576, {}),
    (16, 64, 128, {"bias": False}),
    (17, 65, 129, {}),
    (3, 80, 96, {"dtype": torch.float16}),
    (2, 96, 1536, {"dtype": torch.float16, "invariant": False}),
    (1, 64, 1536, {"invariant": False, "bias": False}),
    (65, 140, 80, {"invariant": False}),
]


@pytest.mark.parametrize(("m", "n", "k", "more"), SHAPES)
def test_a_product_is_the_exact_one_rounded(m: int, n: int, k: int, more: dict[str, Any]) -> None:
    check(int8_matmul, m, n, k, **more)


def test_sums_of_parts_of_k_are_whole() -> None:
    check_split(int8_matmul)


@pytest.mark.parametrize("tried", [check_many, check_turns])
def test_rows_beyond_a_tile_are_the_next_tiles(tried: Callable[[ModuleType], None]) -> None:
    tried(int8_matmul)


def test_a_row_is_the_same_in_any_batch() -> None:
    """On a GPU too only where the tile is the same for all M: that is what `invariant` says."""
    x, weight, scale = random(70, 192), integers(40, 192), torch.rand(40)
    together = int8_matmul.int8_matmul(x, weight, scale)
    for row in (0, 63, 64, 69):
        assert torch.equal(int8_matmul.int8_matmul(x[row : row + 1], weight, scale), together[row : row + 1])


def test_invariant_sums_are_of_one_program_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that one row tile does not fill and two do, K would be split for the one and not for the other."""
    monkeypatch.setattr(int8_matmul, "PROGRAMS", 2)
    x, weight, scale = random(65, 1024), integers(40, 1024), torch.rand(40)
    together = int8_matmul.int8_matmul(x, weight, scale)
    assert torch.equal(int8_matmul.int8_matmul(x[:1], weight, scale), together[:1])
    alone = int8_matmul.int8_matmul(x[:1], weight, scale, invariant=False)
    assert not torch.equal(alone, together[:1])  # so it would be seen


def test_quantised_weights_are_off_by_half_a_step_at_most() -> None:
    weight = random(40, 96)
    weight[7] = 0
    whole, scale = reference_dense.quantise(weight)
    assert (whole.double() * scale.double()[:, None] - weight).abs().max(1).values.le(scale * 0.5001).all()
    assert whole[7].eq(0).all()
    assert whole[:7].abs().amax(1).eq(127).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_what_is_on_its_way_fits_the_shared_memory_of_a_small_card(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an L40S or a 4090, 99 KiB a program; the compiler takes no more than every stage's weights and rows."""
    taken = []

    def launched(kernel: Any, grid: Any, x: torch.Tensor, *of: Any, stages: int = 1, **sizes: Any) -> None:
        if "K" in sizes:
            taken.append(stages * sizes["K"] * (sizes["N"] + sizes["M"] * x.element_size()))

    monkeypatch.setattr(int8_matmul, "launch", launched)
    weight, scale = torch.empty(4096, 4096, dtype=torch.int8, device="meta"), torch.empty(4096, device="meta")
    for rows in (1, 64, 200):
        for invariant in (True, False):
            x = torch.empty(rows, 4096, dtype=dtype, device="meta")
            int8_matmul.int8_matmul(x, weight, scale, invariant=invariant)
    assert len(taken) == 6
    assert max(taken) <= 99 * 1024


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_finite_numbers_are_none_when_they_are_multiplied_with(bad: float) -> None:
    """As a row of x is that has one: no other output, and no other row, is another for it."""
    weight, x = random(40, 96), random(3, 96)
    right = int8_matmul.int8_matmul(x, *reference_dense.quantise(weight))
    weight[7, 5], x[1, 95] = bad, float("nan")
    whole, scale = reference_dense.quantise(weight)
    found = int8_matmul.int8_matmul(x, whole, scale)
    assert whole[7].eq(0).all()
    assert found[1].isfinite().sum() == found[[0, 2], 7].isfinite().sum() == 0
    others = [n for n in range(40) if n != 7]
    assert torch.equal(found[[0, 2]][:, others], right[[0, 2]][:, others])


@pytest.mark.parametrize(("m", "n", "k"), [(0, 40, 96), (3, 0, 96), (3, 40, 0)])
def test_nothing_to_multiply(m: int, n: int, k: int) -> None:
    bias = random(n)
    out = int8_matmul.int8_matmul(random(m, k), integers(n, k), torch.rand(n), bias)
    assert torch.equal(out, bias.expand(m, n))


@pytest.mark.parametrize("m", [1, 16, 17, 64, 65, 8192])
def test_the_tile_goes_by_the_rows(m: int) -> None:
    tile = int8_matmul._tile(m)
    assert tile.m >= min(m, 128)
    assert m > 16 or tile.m == 16


@pytest.mark.parametrize(("k", "tiles"), [(4096, 64), (4096, 448), (512, 1), (1000, 1), (14336, 64), (5000, 3)])
def test_splits_fill_the_device_and_are_not_short(k: int, tiles: int) -> None:
    chunk = int8_matmul._chunk(k, tiles, 128)
    splits = -(-k // chunk)
    assert chunk % 128 == 0
    assert splits == 1 or (chunk >= int8_matmul.LEAST_K and splits * tiles <= int8_matmul.PROGRAMS)


X, W, S = torch.empty(3, 96), torch.empty(40, 96, dtype=torch.int8), torch.empty(40)
WRONG: dict[str, tuple[torch.Tensor, ...]] = {
    r"weight is \[40, 96\].*\[40, 95\]": (X[:, :95], W, S),
    r"weight is float32.*int8": (X, W.float(), S),
    r"scale is \[39\].*\[40\]": (X, W, S[:39]),
    r"scale is float16.*float32": (X, W, S.half()),
    r"bias is float16.*float32": (X, W, S, S.half()),
    r"x is \[96\], weight": (X[0], W, S),
    r"weight has stride 40": (X, W.T.contiguous().T, S),
    r"out is \[3, 39\].*\[3, 40\]": (X, W, S, S, torch.empty(3, 39)),
}


@pytest.mark.parametrize("said", WRONG)
def test_what_the_kernel_cannot_take_is_refused(said: str) -> None:
    with pytest.raises(ValueError, match=said):
        int8_matmul.int8_matmul(*WRONG[said])


MUTATIONS = [
    Mutation("inside = start + tl.arange(0, K) < end", "inside = start + tl.arange(0, K) <= end", check),
    Mutation("inside = start + tl.arange(0, K) < end", "inside = start + tl.arange(0, K) < end - 1", check),
    Mutation("end = tl.minimum(inputs, split * chunk + chunk)", "end = inputs", check_split),
    Mutation("range(split * chunk, end, K)", "range(split * chunk + K, end, K)", check_split),
    Mutation("k = split * chunk + tl.arange(0, K)", "k = tl.arange(0, K)", check_split),
    Mutation("m_inside = n < outputs, m < rows", "m_inside = n < outputs, m <= rows", check),
    Mutation("m_inside = n < outputs, m < rows", "m_inside = n <= outputs, m < rows", check),
    Mutation("weight_at += K", "weight_at += K - 1", lambda m: check(m, k=200)),
    Mutation("x_at += K", "x_at += K - 1", lambda m: check(m, k=200)),
    Mutation("sums *= tl.load(scale + n, ", "sums *= tl.load(scale + n * 0, ", check),
    Mutation("sums += tl.load(bias + n, ", "sums += 0 * tl.load(bias + n, ", check),
    Mutation("* x_stride + k[:, None]", "* inputs + k[:, None]", check),
    Mutation("* weight_stride + k[None, :]", "* inputs + k[None, :]", check),
    Mutation("[None, :] * out_stride + n", "[None, :] * outputs + n", check),
    Mutation("first + within % side_by_side", "first", check_many),
    Mutation("// (TOGETHER * n_tiles) * TOGETHER", "// (TOGETHER * n_tiles)", check_turns),
    Mutation("tl.minimum(m_tiles - first, TOGETHER)", "TOGETHER + 0 * m_tiles", check_turns),
    Mutation("within = number % (TOGETHER * n_tiles)", "within = number % TOGETHER", check_turns),
    Mutation("out + split.to(tl.int64) * rows * outputs", "out + split.to(tl.int64) * 0", check_split),
    Mutation("tl.program_id(1) * BLOCK + tl.arange", "tl.arange", check_split),
    Mutation("total.to(out.dtype.element_ty), mask=inside)", "total.to(out.dtype.element_ty))", check_split),
    Mutation("inside = n < outputs\n", "inside = n < outputs - 1\n", check_split),
    Mutation("within // side_by_side * N", "within % side_by_side * N", check_many),
    Mutation("(split * rows + row) * outputs + n", "row * outputs + n", check_split),
    Mutation("total *= tl.load(scale + n, ", "total *= tl.load(scale + n * 0, ", check_split),
    Mutation("total += tl.load(bias + n, ", "total += 0 * tl.load(bias + n, ", check_split),
    Mutation("out + row * out_stride", "out + row * outputs", check_split),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.new)
def test_a_broken_kernel_fails(mutation: Mutation, tmp_path: Path) -> None:
    assert_caught(int8_matmul, mutation, tmp_path)
