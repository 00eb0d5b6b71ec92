"""A step on a GPU asks to wait for its tokens and for nothing else: the runner's code on a device without memory.

`meta` stands for the GPU. Kernels are not launched, everything else runs as it does there, and what asks the host to
wait for the device is an error where it is done. A decode by graphs copies from pinned memory alone; other steps from
pageable memory too, where CUDA may still wait while it stages a copy: untried.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.dense_kernels import needs_triton

# isort: split
from reference_engine import gpu, graphs, runner, weights
from reference_engine.config import EngineConfig
from reference_engine.runner import ModelRunner
from reference_engine.sequence import Sequence
from tests.engine_models import drive, sequence

pytestmark = [pytest.mark.engine, needs_triton]
DEVICE = torch.device("meta")
MADE_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)  # copied, and waited for
BY_INDEX = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


class WaitError(AssertionError):
    """The host would wait for the device."""


@dataclass
class Seen:
    """What crossed between host and device, and how often the host waited, since it was last cleared."""

    pinned: set[int] = field(default_factory=set)  # memory that the device copies from and to by itself
    there: list[bool] = field(default_factory=list)  # a copy to the device: from pinned memory? Else CUDA may wait
    back: list[tuple[int, ...]] = field(default_factory=list)  # a copy to the host: its shape
    waited: int = 0

    def clear(self) -> None:
        self.there, self.back, self.waited = [], [], 0

    def crossed(self, source: torch.Tensor, to: torch.device, non_blocking: bool, target: torch.Tensor | None) -> None:
        """A copy. To the device it may come from any memory: not waited for by us; `there` says where CUDA may wait."""
        if not non_blocking:
            raise WaitError(f"a copy of {list(source.shape)} to {to} that is waited for")
        if to == DEVICE:
            self.there.append(self.is_pinned(source))
        elif target is None or not self.is_pinned(target):
            raise WaitError(f"a copy of {list(source.shape)} to memory that is not pinned")
        else:
            self.back.append(tuple(source.shape))

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pinned

    def device(self) -> graphs.Device:
        """As graphs.cuda, a step being run where a graph would be replayed."""

        def host(*size: Any, dtype: torch.dtype) -> torch.Tensor:
            made = torch.zeros(*size, dtype=dtype)
            self.pinned.add(made.untyped_storage().data_ptr())
            return made

        def wait() -> None:
            self.waited += 1

        return graphs.Device(host, graphs.in_place().capture, lambda: wait)


class Watch(TorchDispatchMode):
    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        name, tensors = (
            str(func.overloadpacket),
            [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)],
        )
        there = [t for t in tensors if t.device == DEVICE]
        if name == "aten.copy_" and args[0].device != args[1].device:
            non_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2])
            self.seen.crossed(args[1], args[0].device, non_blocking, args[0])
            return args[0]
        if name == "aten._to_copy" and (kwargs.get("device") or args[0].device) != args[0].device:
            self.seen.crossed(args[0], kwargs["device"], kwargs.get("non_blocking", False), None)
        elif there:
            _assert_all_there(func, name, tensors)
        return func(*args, **kwargs)


def _assert_all_there(func: Any, name: str, tensors: list[torch.Tensor]) -> None:
    """An operation on the device must not ask for a value, nor for a size that values decide, nor bring its own."""
    if torch.Tag.data_dependent_output in func.tags:
        raise WaitError(f"{name} reads a value")
    by_mask = any(t.dtype in (torch.bool, torch.uint8) for t in tensors[1:])  # index and index_put: of numbers, or not
    if (torch.Tag.dynamic_output_shape in func.tags or name == "aten.index_put_") and (
        by_mask or not name.startswith("aten.index")
    ):
        raise WaitError(f"{name} has a size that values decide")
    if any(t.device != DEVICE and t.dim() for t in tensors):
        raise WaitError(f"{name} takes a tensor of the host")


class NoNumbers(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        if func in MADE_OF_NUMBERS and made.device == DEVICE:
            raise WaitError(f"{func.__name__} on the device, of the host's numbers")
        if func in BY_INDEX and args[0].device == DEVICE:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, list | np.ndarray) for i in index):
                raise WaitError("an index of the host's numbers")
        return made


@contextmanager
def watched(seen: Seen) -> Iterator[None]:
    def waits(*of: Any) -> None:
        raise WaitError("synchronize")

    with pytest.MonkeyPatch.context() as patch, NoNumbers(), Watch(seen):
        patch.setattr(torch.cuda, "synchronize", waits)
        yield


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def made(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModelRunner]:
    """-> A runner of the smallest model on the device, its graphs captured."""
    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setattr(InterpretedFunction, "run", lambda self, *a, **k: None)
    monkeypatch.setattr(runner, "_device", lambda wanted: "meta")
    monkeypatch.setattr(ModelRunner, "_free", lambda self: 0)
    device = seen.device()
    monkeypatch.setattr(graphs, "in_place", lambda: device)

    def make(**knobs: Any) -> ModelRunner:
        limits = {"block_size": 4, "num_blocks": 40, "max_num_seqs": 3, "max_model_len": 64, "graphs": "on"}
        config = EngineConfig(**limits | {"cpu_kernels": "triton"} | knobs)  # type: ignore[arg-type]
        engine = ModelRunner("tiny", weights.tiny(0, torch.bfloat16), frozenset([2, 3]), config)
        engine.capture()
        return engine

    return make


SETTINGS = {"temperature": 0.8, "top_p": 0.9, "seed": 1, "min_tokens": 3, "max_tokens": 9}  # nothing is left out


def decodes(engine: ModelRunner, seen: Seen, count: int = 3) -> Iterator[list[Sequence]]:
    """Prompts at once; then, a turn each, steps of decodes alone, `seen` being what each did."""
    sequences = [sequence([5, 6, 7 + i], i, **SETTINGS) for i in range(count)]
    for number, s in enumerate(sequences):
        s.blocks = [3 * number, 3 * number + 1, 3 * number + 2]
    work = [(s, 3) for s in sequences]
    while True:
        seen.clear()
        with watched(seen):
            tokens = engine.execute(work)
        for (s, n), token in zip(work, tokens, strict=True):
            assert token is not None
            s.computed += n
            s.token_ids.append(token)
        yield sequences
        work = [(s, 1) for s in sequences]


@pytest.mark.parametrize("knobs", [{}, {"ahead": False}, {"kv_cache_dtype": "int8"}, {"quantization": "int8-weights"}])
def test_a_decode_waits_for_its_tokens_and_for_nothing_else(
    made: Callable[..., ModelRunner], seen: Seen, knobs: dict[str, Any]
) -> None:
    """Its inputs in two copies, its tokens in one, all between pinned memory and the device."""
    engine = made(**knobs)
    steps = decodes(engine, seen)
    next(steps)
    for _ in range(5):
        next(steps)
        assert seen.there == [True, True]
        assert len(seen.back) == 1
        assert seen.back[0] == (3,)
        assert seen.waited == 1


def test_a_decode_larger_than_any_graph_asks_to_wait_for_nothing_else_either(
    made: Callable[..., ModelRunner], seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its inputs come from pageable memory as well."""
    monkeypatch.setattr(graphs, "MOST_ROWS", 2)
    steps = decodes(made(), seen)
    for _ in range(4):
        next(steps)
        assert seen.there
        assert not all(seen.there)
        assert (seen.back, seen.waited) == ([(3,)], 1)


def test_chunks_beside_decodes_ask_to_wait_for_no_guess(made: Callable[..., ModelRunner], seen: Seen) -> None:
    """Nothing of ours but the end of a step waits: what was launched ahead may run while the next chunk is laid out."""
    engine = made()
    with watched(seen):
        drive(engine, [sequence(list(range(1, 20)), i, **SETTINGS) for i in range(3)], budget=11)
    assert engine._stepper
    assert engine._stepper.guessed
    assert seen.back
    assert seen.waited <= len(seen.back)  # of a guess that nobody asked for, no token is read


PLANTED: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x[0]),
    "bool": lambda x: bool((x > 0).any()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "cpu, as if it did not wait": lambda x: x.to("cpu", non_blocking=True),
    "into pageable memory": lambda x: torch.empty(len(x), dtype=x.dtype).copy_(x, non_blocking=True),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "a mask": lambda x: x[x > 0],
    "to a mask": lambda x: x.clone().__setitem__(x > 0, x[:1]),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: x.repeat_interleave(x),
    "equal": lambda x: torch.equal(x, x + 1),
    "a list as index": lambda x: x[[0]],
    "an index of the host": lambda x: x[torch.tensor([0])],
    "to an index of the host": lambda x: x.clone().__setitem__(torch.tensor([0]), 0),
    "numbers": lambda x: torch.tensor([1.0], device=x.device),
    "new numbers": lambda x: x.new_tensor([1]),
    "to the device": lambda x: torch.zeros(1).to(x.device),
    "copy to the device": lambda x: x.clone().copy_(torch.zeros(len(x))),
    "synchronize": lambda x: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("place", ["captured", "around"])
@pytest.mark.parametrize("planted", PLANTED)
def test_whatever_waits_is_found(
    planted: str, place: str, made: Callable[..., ModelRunner], seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within what a graph is captured from, and beside its replay."""
    engine = made()
    steps = decodes(engine, seen)
    next(steps)
    sample, sent = gpu.sample, graphs.Graphs._sent

    def sampled(logits: torch.Tensor, draws: Any, eos_ids: torch.Tensor, out: torch.Tensor) -> None:
        sample(logits, draws, eos_ids, out)
        PLANTED[planted](out)

    def after(self: graphs.Graphs, *of: int) -> graphs.Launch:
        PLANTED[planted](self.made)
        return sent(self, *of)

    owner, name, changed = (gpu, "sample", sampled) if place == "captured" else (graphs.Graphs, "_sent", after)
    monkeypatch.setattr(owner, name, changed)
    with pytest.raises(WaitError):
        next(steps)


def test_a_copy_from_pageable_memory_is_seen(seen: Seen) -> None:
    with watched(seen):
        torch.zeros(4, device=DEVICE).copy_(torch.zeros(4), non_blocking=True)
    assert seen.there == [False]
