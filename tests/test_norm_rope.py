"""RMSNorm, the residual's addition and the rotation against float64, row by row, with canaries around every row."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.functional import pad

from tests.dense_kernels import (
    GAP,
    Mutation,
    assert_caught,
    assert_close,
    guarded,
    needs_triton,
    only_read,
    poisoned,
    random,
)
from tests.dense_kernels import few_programs as few_programs

# isort: split
from kernels import norm_rope, reference_dense
from reference_engine.families import Shape
from reference_engine.model import rotation

pytestmark = [pytest.mark.engine, needs_triton]
EPS = 1e-5
DTYPES = [torch.float32, torch.float16]
SIZES = [1, 80, 96, 576, 1536]


def check_norm(module: ModuleType, size: int = 96, dtype: torch.dtype = torch.float32) -> None:
    x, weight, out = (
        guarded(5 * random(3, size, dtype=dtype)),
        random(size, dtype=dtype),
        poisoned(3, size, dtype=dtype, gap=GAP + 4),
    )
    with only_read(x.whole, weight):
        assert module.rms_norm(x.view, weight, EPS, out.view) is out.view
    assert_close(out.view, reference_dense.rms_norm(x.view, weight, EPS), dtype)
    out.assert_whole()


def check_add(module: ModuleType, size: int = 96, dtype: torch.dtype = torch.float32) -> None:
    # Three strides: each is its own tensor's.
    x, residual = guarded(random(3, size, dtype=dtype)), guarded(3 * random(3, size, dtype=dtype, seed=1), GAP + 2)
    weight, out = random(size, dtype=dtype), poisoned(3, size, dtype=dtype, gap=GAP + 4)
    total, right = reference_dense.add_rms_norm(x.view, residual.view, weight, EPS)
    with only_read(x.whole, weight):
        module.add_rms_norm(x.view, residual.view, weight, EPS, out.view)
    assert torch.equal(residual.view, total)
    assert_close(out.view, right, dtype)
    for buffer in (residual, out):
        buffer.assert_whole()


def tables(size: int, positions: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin as the engine has them."""
    shape = Shape(
        vocab_size=1, hidden_size=size, ffn_size=1, layers=1, heads=1, kv_heads=1, head_dim=size, norm_eps=EPS,
        rope_theta=10_000.0, max_positions=positions, tied=False,
    )  # fmt: skip
    return rotation(shape, positions)


def check_rope(
    module: ModuleType,
    size: int = 80,
    heads: tuple[int, int] = (3, 2),
    normed: bool = True,
    dtype: torch.dtype = torch.float32,
) -> None:
    qkv = guarded(4 * random(3, heads[0] + 2 * heads[1], size, dtype=dtype))
    positions = torch.tensor([49, 0, 7])
    cos, sin = (
        pad(table.to(dtype), (0, more), value=9.0)[..., :size] for table, more in zip(tables(size), (3, 5), strict=True)
    )
    norms = (random(size, dtype=dtype, seed=1), random(size, dtype=dtype, seed=2)) if normed else None
    right = reference_dense.norm_rope(qkv.view, positions, cos, sin, heads, norms, EPS)
    values = qkv.view[:, heads[0] + heads[1] :].clone()
    with only_read(positions, cos, sin, *norms or ()):
        module.norm_rope(qkv.view, positions, cos, sin, heads, norms, EPS)
    assert_close(qkv.view, right, dtype)
    assert torch.equal(qkv.view[:, heads[0] + heads[1] :], values)
    qkv.assert_whole()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_a_norm_is_the_exact_one_rounded(size: int, dtype: torch.dtype) -> None:
    check_norm(norm_rope, size, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_the_sum_is_stored_and_what_was_stored_is_normed(size: int, dtype: torch.dtype) -> None:
    check_add(norm_rope, size, dtype)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("size", "heads", "dtype"),
    [
        (80, (3, 2), torch.float32),
        (96, (4, 2), torch.float16),
        (2, (1, 1), torch.float32),
        (64, (33, 1), torch.float32),
        (64, (32, 2), torch.float32),  # the queries fill their programs, the keys have one of their own
    ],
)
def test_queries_and_keys_are_normed_and_rotated_and_values_are_left(
    size: int, heads: tuple[int, int], dtype: torch.dtype, normed: bool
) -> None:
    check_rope(norm_rope, size, heads, normed, dtype)


def test_the_engines_tables_turn_pairs_by_their_angles() -> None:
    """Values i and i + half of a head, as one complex number, times e^(i · position · frequency)."""
    cos, sin = tables(96)
    positions = torch.tensor([3, 49], dtype=torch.int32)
    qkv = random(2, 4, 96)
    pairs = torch.complex(qkv[:, :3, :48].double(), qkv[:, :3, 48:].double())
    angles = positions[:, None].double() / 10_000 ** (torch.arange(48).double() / 48)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    right = torch.cat((torch.cat((turned.real, turned.imag), -1), qkv[:, 3:].double()), 1)
    norm_rope.norm_rope(qkv, positions, cos, sin, (2, 1))
    assert (qkv - right).abs().max() < 1e-5  # angles up to 49, in float32, are off by 4e-6


def test_a_row_is_the_same_in_any_batch() -> None:
    x, residual, weight = random(5, 576), random(5, 576, seed=1), random(576)
    alone = norm_rope.add_rms_norm(x[2:3], residual[2:3].clone(), weight, EPS)
    assert torch.equal(norm_rope.add_rms_norm(x, residual, weight, EPS)[2:3], alone)


def test_a_norm_may_be_written_over_what_it_reads() -> None:
    x, weight = random(2, 80), random(80)
    right = reference_dense.rms_norm(x, weight, EPS)
    assert_close(norm_rope.rms_norm(x, weight, EPS, x), right, torch.float32)


def test_bfloat16_is_widened_before_anything_is_computed() -> None:
    """What the interpreter can say of bfloat16: it cuts where a GPU rounds, so within one last place, 2**-7."""
    x, weight = random(2, 96, dtype=torch.bfloat16), random(96, dtype=torch.bfloat16)
    right = reference_dense.rms_norm(x, weight, EPS)
    assert (norm_rope.rms_norm(x, weight, EPS).double() - right).abs().max() <= right.abs().max() * 2**-7


def test_an_empty_batch_launches_nothing() -> None:
    nothing, weight = torch.empty(0, 96), random(96)
    assert norm_rope.rms_norm(nothing, weight, EPS).shape == (0, 96)
    assert norm_rope.add_rms_norm(nothing, nothing.clone(), weight, EPS).shape == (0, 96)
    cos, sin = tables(80)
    qkv = torch.empty(0, 5, 80)
    assert norm_rope.norm_rope(qkv, torch.empty(0, dtype=torch.int64), cos, sin, (3, 1)) is qkv


WRONG = {
    r"x is \[96\].*rows, size": lambda x, w: norm_rope.rms_norm(x[0], w, EPS),
    r"x is \[1, 16385\].*16,384": lambda x, w: norm_rope.rms_norm(torch.empty(1, 16_385), torch.empty(16_385), EPS),
    r"weight is \[95\].*\[96\]": lambda x, w: norm_rope.rms_norm(x, w[:-1], EPS),
    r"weight is float16.*float32": lambda x, w: norm_rope.rms_norm(x, w.half(), EPS),
    r"x is float64.*float32 or float16 or bfloat16": lambda x, w: norm_rope.rms_norm(x.double(), w, EPS),
    r"out is on meta.*cpu": lambda x, w: norm_rope.rms_norm(x, w, EPS, x.to("meta")),
    r"residual is \[1, 96\]": lambda x, w: norm_rope.add_rms_norm(x, x[:1].clone(), w, EPS),
    r"x has stride 3.*1": lambda x, w: norm_rope.rms_norm(x.T.contiguous().T, w, EPS),
}


@pytest.mark.parametrize("said", WRONG)
def test_what_the_kernel_cannot_take_is_refused(said: str) -> None:
    with pytest.raises(ValueError, match=said):
        WRONG[said](random(3, 96), random(96))


def test_heads_that_cannot_be_rotated_are_refused() -> None:
    cos, sin = tables(80)
    positions = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"qkv is \[3, 4, 80\].*\[3, 5, 80\]"):
        norm_rope.norm_rope(random(3, 4, 80), positions, cos, sin, (3, 1))
    with pytest.raises(ValueError, match="80, 160 apart"):
        norm_rope.norm_rope(random(3, 10, 80)[:, ::2], positions, cos, sin, (3, 1))
    with pytest.raises(ValueError, match=r"positions is \[2\]"):
        norm_rope.norm_rope(random(3, 5, 80), positions[:2], cos, sin, (3, 1))
    with pytest.raises(ValueError, match=r"sin is \[50, 1, 78\]"):
        norm_rope.norm_rope(random(3, 5, 80), positions, cos, sin[..., :78], (3, 1))


MUTATIONS = [
    Mutation("inside = columns < size", "inside = columns <= size", check_norm),
    Mutation("inside = columns < size", "inside = columns < size - 1", check_norm),
    Mutation("/ size + eps", "/ BLOCK + eps", check_norm),
    Mutation("/ size + eps", "/ size", lambda m: check_tiny(m)),
    Mutation("x + row * x_stride", "x + row * size", check_norm),
    Mutation("out + row * out_stride", "out + row * x_stride", check_norm),
    Mutation("residual.stride(0), out.stride(0)", "x.stride(0), out.stride(0)", check_add),
    Mutation("residual.stride(0), out.stride(0)", "residual.stride(0), x.stride(0)", check_add),
    Mutation("blocks(query_heads + kv_heads, tile)", "blocks(query_heads, tile)", lambda m: check_rope(m, 64, (32, 2))),
    Mutation(
        "values * scale * tl.load(weight + columns", "values * scale * tl.load(weight + size - 1 - columns", check_norm
    ),
    Mutation("values = total.to(tl.float32)", "values = values + 0", check_add),
    Mutation("tl.store(place, total, mask=inside)", "tl.store(place, values, mask=inside)", check_add),
    Mutation("residual + row * residual_stride", "residual + row * size", check_add),
    Mutation("(head[:, None] < heads) &", "(head[:, None] <= heads) &", check_rope),
    Mutation(
        "values * scale * tl.load(weight + columns, mask=inside,",
        "values * scale * tl.load(weight + columns, mask=columns >= 0,",
        check_norm,
    ),
    Mutation("sin_stride + half + column, mask=narrow,", "sin_stride + half + column, mask=column >= 0,", check_rope),
    Mutation("k_norm + half + column, mask=narrow,", "k_norm + half + column, mask=column >= 0,", check_rope),
    Mutation("tl.program_id(1) * HEADS", "tl.program_id(1)", lambda m: check_rope(m, 64, (33, 1))),
    Mutation("head[:, None] * (2 * half)", "head[:, None] * half", check_rope),
    Mutation("a * scale * tl.where(query, q_a, k_a)", "a * scale * q_a", check_rope),
    Mutation("b * scale * tl.where(query, q_b, k_b)", "b * tl.where(query, q_b, k_b)", check_rope),
    Mutation("narrow = column < half", "narrow = column <= half", check_rope),
    Mutation("/ (2 * half) + eps", "/ half + eps", check_rope),
    Mutation("query = (head < query_heads)", "query = (head <= query_heads)", check_rope),
    Mutation("q_b = tl.load(q_norm + half + column", "q_b = tl.load(q_norm + column", check_rope),
    Mutation("k_b = tl.load(k_norm + half + column", "k_b = tl.load(k_norm + column", check_rope),
    Mutation("a * c - b * s", "a * c + b * s", check_rope),
    Mutation("sin_stride + half + column", "sin_stride + column", check_rope),
    Mutation("cos.stride(0), sin.stride(0)", "size, sin.stride(0)", check_rope),
    Mutation("cos.stride(0), sin.stride(0)", "cos.stride(0), size", check_rope),
    Mutation("tl.load(positions + row)", "tl.load(positions)", check_rope),
    Mutation("qkv + row * row_stride", "qkv + row * (heads * 2 * half)", check_rope),
]


def check_tiny(module: ModuleType) -> None:
    """A row so small that eps is most of its mean square."""
    x, weight = 1e-4 * random(2, 96), random(96)
    assert_close(module.rms_norm(x, weight, EPS), reference_dense.rms_norm(x, weight, EPS), torch.float32)


def test_eps_counts() -> None:
    check_tiny(norm_rope)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.new)
def test_a_broken_kernel_fails(mutation: Mutation, tmp_path: Path) -> None:
    assert_caught(norm_rope, mutation, tmp_path)
