"""What the kernels' tests share: buffers with canaries around every row and around a wrapper's own scratch, inputs that
may only be read, tolerances, broken copies of a module.

A file of tests is held to what it imports. `few_programs`: a test launches fewer than ten programs in all, and a kernel
accesses no memory but elements of the tensors it was given. `nothing_beside`: the latter alone.

Imported before any kernel: Triton looks at TRITON_INTERPRET when a kernel's module is read.
"""

import importlib.util
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import pytest
import torch

HAVE_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAVE_TRITON, reason="triton is not installed")

MOST_PROGRAMS = 9  # of a test: the interpreter takes 10 to 40 ms for each
GAP = 37  # elements of canary before, between and after rows: odd, so that rows begin at every alignment
# Largest error relative to the largest value. float32: sums of up to 2,000 rounded products, in another order than the
# reference's float64; seen 2e-7. float16: the one rounding of the result, 2**-11, and what the reference's own has not.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-4}


@contextmanager
def watched() -> Iterator[list[int]]:
    """Every access of an interpreted kernel must be to an element of a tensor it was given; -> programs, by launch.

    Looked at before the access is made: a broken mask ends as an assertion, not as a heap that is no more. Between rows
    that lie apart are no elements, so that reading beyond one is seen even if nothing comes of it.
    """
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

    launched, given = list[int](), list[_Elements]()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    run = InterpretedFunction.run

    def counted(self: Any, *arguments: Any, grid: tuple[int, ...], **options: Any) -> Any:
        launched.append(math.prod(grid))
        given[:] = [_elements(t) for t in arguments if isinstance(t, torch.Tensor) and t.numel()]
        return run(self, *arguments, grid=grid, **options)

    def loads(self: Any, places: Any, mask: Any, *more: Any) -> Any:
        _assert_among(given, places.data[mask.data], "read")
        return load(self, places, mask, *more)

    def stores(self: Any, places: Any, values: Any, mask: Any, *more: Any) -> Any:
        _assert_among(given, places.data[mask.data], "written")
        return store(self, places, values, mask, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", counted)
        patch.setattr(InterpreterBuilder, "create_masked_load", loads)
        patch.setattr(InterpreterBuilder, "create_masked_store", stores)
        yield launched


class _Elements(NamedTuple):
    """Where a tensor's are: `mine` counts from `start` in steps of `size` bytes."""

    start: int
    size: int
    mine: np.ndarray


def _elements(tensor: torch.Tensor) -> _Elements:
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    mine = torch.zeros(span, dtype=torch.bool)
    mine.as_strided(tensor.shape, tensor.stride()).fill_(True)
    return _Elements(tensor.data_ptr(), tensor.element_size(), mine.numpy())


def _assert_among(given: list[_Elements], places: np.ndarray, done: str) -> None:
    left = places.astype(np.int64)
    for start, size, mine in given:
        offset = left - start
        within = (offset >= 0) & (offset < len(mine) * size)
        within[within] = mine[offset[within] // size]
        left = left[~within]
    assert not len(left), f"{len(left)} places that are in no tensor would have been {done}"


@pytest.fixture(autouse=True)
def few_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Mutants and hypothesis's examples are programs of the test as well. On a GPU nothing is counted."""
    if not HAVE_TRITON:
        yield
        return
    with watched() as launched:
        yield
    assert sum(launched) <= MOST_PROGRAMS, f"{request.node.name}: {sum(launched)} programs, at most {MOST_PROGRAMS}"


@pytest.fixture(autouse=True)
def nothing_beside() -> Iterator[None]:
    """Only where accesses go, for tests of a whole engine. On a GPU nothing is looked at."""
    if not HAVE_TRITON:
        yield
        return
    with watched():
        yield


@contextmanager
def guarded_scratch() -> Iterator[None]:
    """What a wrapper allocates for itself by Tensor.new_empty: NaN until it is written, and canaries on either side.

    So a kernel that reads a place which nobody wrote, or writes beyond its last one, is seen, and the heap stays whole.
    """
    plain, made = torch.Tensor.new_empty, list[Guarded]()

    def new_empty(self: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        found = plain(self, *size, **options)
        if not found.numel() or not found.is_floating_point():
            return found
        gap = max(found.numel(), 4096)  # as far as a broken kernel's last block may reach
        whole = torch.full((found.numel() + 2 * gap,), 12344.0, dtype=found.dtype, device=found.device)
        mine = torch.zeros_like(whole, dtype=torch.bool)
        mine[gap : gap + found.numel()] = True
        whole[mine] = math.nan
        made.append(Guarded(whole[gap : gap + found.numel()].view(found.shape), whole, mine))
        return made[-1].view

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", new_empty)
        yield
    for buffer in made:
        buffer.assert_whole()


@contextmanager
def only_read(*tensors: torch.Tensor) -> Iterator[None]:
    """What a kernel is given to read has the same bytes afterwards."""
    before = [_bytes(t) for t in tensors]
    yield
    for number, (tensor, was) in enumerate(zip(tensors, before, strict=True)):
        assert torch.equal(_bytes(tensor), was), f"input {number} was written to"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


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


def guarded(values: torch.Tensor, gap: int = GAP) -> Guarded:
    """The values, rows being what the first dimension counts; `gap`: elements between two of them."""
    rows, width = values.shape[0], math.prod(values.shape[1:])
    canary = 12344 if values.is_floating_point() else 77
    # one row more at the end: a broken kernel must hit canaries, not the heap
    whole = torch.full((gap + (rows + 1) * (width + gap),), canary, dtype=values.dtype)
    mine = torch.zeros_like(whole, dtype=torch.bool)
    inner = [math.prod(values.shape[i + 1 :]) for i in range(1, values.ndim)]
    place = ((rows, *values.shape[1:]), (width + gap, *inner), gap)
    whole.as_strided(*place).copy_(values)
    mine.as_strided(*place).fill_(True)
    return Guarded(whole.as_strided(*place), whole, mine)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32, gap: int = GAP) -> Guarded:
    """A place for results that hold NaN until they are written."""
    return guarded(torch.full(shape, math.nan, dtype=dtype), gap)


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
