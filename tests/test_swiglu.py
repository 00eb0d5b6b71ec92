"""SwiGLU's gate against float64, with canaries around every row."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dense_kernels import (
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
from kernels import reference_dense, swiglu

pytestmark = [pytest.mark.engine, needs_triton]


def check(module: ModuleType, ffn: int = 96, dtype: torch.dtype = torch.float32) -> None:
    both, out = guarded(4 * random(3, 2 * ffn, dtype=dtype)), poisoned(3, ffn, dtype=dtype)
    with only_read(both.view):
        assert module.swiglu(both.view, out.view) is out.view
    assert_close(out.view, reference_dense.swiglu(both.view), dtype)
    out.assert_whole()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("ffn", [1, 80, 96, 576, 1536, 2049, 3000])
def test_the_gate_is_the_exact_one_rounded(ffn: int, dtype: torch.dtype) -> None:
    check(swiglu, ffn, dtype)


@settings(max_examples=9, deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=32))
def test_no_gate_is_too_large(gates: list[float]) -> None:
    """exp(-gate) of a gate below -88 has no float32."""
    gate = torch.tensor([gates])
    found = swiglu.swiglu(torch.cat((gate, torch.ones_like(gate)), 1)).double()
    right = gate.double() * torch.sigmoid(gate.double())
    assert ((found - right).abs() <= 2e-6 * right.abs() + 1e-36).all()


def test_a_row_is_the_same_in_any_batch() -> None:
    both = random(4, 192)
    assert torch.equal(swiglu.swiglu(both)[1:2], swiglu.swiglu(both[1:2]))


def test_an_empty_batch_launches_nothing() -> None:
    assert swiglu.swiglu(torch.empty(0, 192)).shape == (0, 96)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (torch.empty(3, 5), r"gate_up is \[3, 5\].*even"),
        (torch.empty(4), r"gate_up is \[4\]"),
        (torch.empty(3, 4, dtype=torch.int8), "gate_up is int8.*float32"),
        (torch.empty(4, 4).T, "stride 4"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused(given: torch.Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        swiglu.swiglu(given)


MUTATIONS = [
    Mutation("    tl.store(out + ", "    tl.store(place, up, mask=inside)\n    tl.store(out + ", check),
    Mutation("inside = column < ffn", "inside = column <= ffn", check),
    Mutation("inside = column < ffn", "inside = column < ffn - 1", check),
    Mutation("tl.load(place + ffn,", "tl.load(place + BLOCK,", check),
    Mutation("gate_up + row * in_stride", "gate_up + row * (2 * ffn)", check),
    Mutation("out + row * out_stride", "out + row * ffn", check),
    Mutation("tl.where(gate < 0, power, 1.0)", "tl.where(gate < 0, 1.0, power)", check),
    Mutation("values = gate * tl.where", "values = tl.where", check),
    Mutation("tl.program_id(1) * BLOCK", "tl.program_id(1) * (BLOCK + 1)", lambda m: check(m, 2049)),
    Mutation("tl.program_id(1) * BLOCK", "tl.program_id(1)", lambda m: check(m, 3000)),
    Mutation("up = tl.load(place + ffn, mask=inside, other=0.0)", "up = tl.load(place + ffn)", check),
    Mutation("/ (1.0 + power) * up", "/ (1.0 + power)", check),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.new)
def test_a_broken_kernel_fails(mutation: Mutation, tmp_path: Path) -> None:
    assert_caught(swiglu, mutation, tmp_path)
