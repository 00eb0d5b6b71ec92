"""What the kernels' tests share: buffers with canaries around every row, tolerances, broken copies of a module.

Imported before any kernel: Triton looks at TRITON_INTERPRET when a kernel's module is read.
"""

import importlib.util
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

HAVE_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAVE_TRITON, reason="triton is not installed")

GAP = 37  # elements of canary before, between and after rows: odd, so that rows begin at every alignment
# Largest error relative to the largest value. float32: sums of up to 2,000 rounded products, in another order than the
# reference's float64; seen 2e-7. float16: the one rounding of the result, 2**-11, and what the reference's own has not.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-4}


class Guarded(NamedTuple):
    """A tensor whose rows lie apart in a larger buffer of canaries.

    Those are a number, not NaN: a kernel that reads one is far off, and one that writes what it read is seen too.
    """

    view: torch.Tensor
    whole: torch.Tensor
    mine: torch.Tensor  # bool: what of `whole` is the tensor's

    def assert_whole(self) -> None:
        """Nothing was written outside the tensor."""
        assert bool((self.whole[~self.mine] == self.whole[0]).all()), "a canary is dead"


def guarded(values: torch.Tensor) -> Guarded:
    """The values, rows being what the first dimension counts."""
    rows, width = values.shape[0], math.prod(values.shape[1:])
    canary = 12344 if values.is_floating_point() else 77
    # one row more at the end: a broken kernel must hit canaries, not the heap
    whole = torch.full((GAP + (rows + 1) * (width + GAP),), canary, dtype=values.dtype)
    mine = torch.zeros_like(whole, dtype=torch.bool)
    inner = [math.prod(values.shape[i + 1 :]) for i in range(1, values.ndim)]
    place = ((rows, *values.shape[1:]), (width + GAP, *inner), GAP)
    whole.as_strided(*place).copy_(values)
    mine.as_strided(*place).fill_(True)
    return Guarded(whole.as_strided(*place), whole, mine)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Guarded:
    """A place for results that hold NaN until they are written."""
    return guarded(torch.full(shape, math.nan, dtype=dtype))


def assert_close(found: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> None:
    """Within TOLERANCE of the largest right value; NaN is never close."""
    assert found.shape == right.shape
    error = (found.double() - right).abs().max().item()
    assert error <= TOLERANCE[dtype] * right.abs().max().item(), f"off by {error}"


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Mutation(NamedTuple):
    """One line of a kernel, broken."""

    old: str
    new: str
    check: Callable[[ModuleType], None]


def assert_caught(module: ModuleType, mutation: Mutation, folder: Path) -> None:
    """The check, which passes with the module in a test of its own, fails with the broken copy."""
    assert module.__file__
    source = Path(module.__file__).read_text()
    assert source.count(mutation.old) == 1, f"{mutation.old!r} must stand once in {module.__name__}"
    path = folder / f"broken_{module.__name__.rpartition('.')[2]}.py"
    path.write_text(source.replace(mutation.old, mutation.new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    broken = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(broken)
    from triton.runtime.errors import InterpreterError  # a warning of NumPy's within the kernel

    with pytest.raises((AssertionError, InterpreterError)):
        mutation.check(broken)
