"""Decodes from static buffers and the step ahead: every answer is what a sequence gets alone, whatever was guessed.

The graphs' stand-in for a CPU runs, and in place of the model a memory that knows what belongs where.
"""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine import gpu, graphs, weights
from reference_engine.ahead import Stepper
from reference_engine.batch import Batch
from reference_engine.config import EngineConfig
from reference_engine.graphs import Graphs, Row, Size
from reference_engine.model import Model
from reference_engine.runner import ModelRunner
from reference_engine.scheduler import Scheduler
from reference_engine.sequence import SamplingParams, Sequence
from tests.stub_runner import PagedStub, alone, answer, chain

pytestmark = pytest.mark.engine
KNOBS = {"block_size": 4, "num_blocks": 40, "max_num_seqs": 5, "max_num_batched_tokens": 16, "graphs": "on"}
CONFIG = EngineConfig(**KNOBS)  # type: ignore[arg-type]


def small() -> Model:
    """A model whose pool has the geometry; nothing is computed with it."""
    config = EngineConfig(**KNOBS | {"graphs": "off", "cpu_kernels": "torch"})  # type: ignore[arg-type]
    return ModelRunner("tiny", weights.tiny(0, torch.float32), frozenset(), config).model


MODEL = small()


class Memory(PagedStub):
    """A stub whose steps are decodes read out of the graphs' buffers as well."""

    def compute(self, batch: Batch, draws: gpu.Draws, out: torch.Tensor) -> None:
        assert isinstance(batch.layout, gpu.Layout)
        step, size = batch.layout.step, self.block_size
        out.fill_(-1)  # what padding makes is nobody's
        tokens, positions, slots = batch.token_ids.tolist(), batch.positions.tolist(), step.slots.tolist()
        for row, (token, position, slot) in enumerate(zip(tokens, positions, slots, strict=True)):
            if slot < 0:
                continue
            table = step.tables[row].tolist()
            before = [divmod(table[p // size] * size + p % size, size) for p in range(position)]
            state = self.memory[before[-1]] if before else 0
            state = chain(state, token)
            assert self.pool is None or self.pool.writable(slot // size), "a guess wrote to a block that others read"
            assert slot == table[position // size] * size + position % size
            self.memory[divmod(slot, size)] = state
            out[row] = ord("a") + state % 26

    def eager(self, work: list[tuple[Sequence, int]]) -> tuple[list[int], torch.Tensor]:
        tokens = super().execute(work)
        ends = [i for i, token in enumerate(tokens) if token is not None]
        return ends, torch.tensor([tokens[i] for i in ends], dtype=torch.int64)


def stepper(memory: Memory, ahead: bool = True, rows: int = graphs.MOST_ROWS) -> Stepper:
    """`rows`: of the largest graph."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "MOST_ROWS", rows)
        made = Graphs(MODEL, CONFIG.max_num_seqs, memory.compute, graphs.in_place())
    made.capture()
    return Stepper(made, memory.eager, 0, ahead)


requests = st.lists(
    st.tuples(
        st.integers(0, 12),  # steps before it comes
        st.lists(st.integers(0, 3), min_size=1, max_size=13),
        st.integers(1, 14),  # tokens of its answer
        st.integers(0, 30),  # the step at which its client leaves, if that is at all
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(requests, st.booleans(), st.sampled_from([9, 14, 40]), st.sampled_from([2, 5]))
def test_answers_are_those_of_a_sequence_alone(
    asked: list[tuple[int, list[int], int, int]], ahead: bool, blocks: int, rows: int
) -> None:
    """With arrivals, aborts, preemptions (9 blocks), shared prompts, and steps with more rows than a graph has (2)."""
    config = EngineConfig(**KNOBS | {"num_blocks": blocks, "ahead": ahead})  # type: ignore[arg-type]
    scheduler = Scheduler(config, frozenset())
    memory = Memory(config.block_size, scheduler.blocks)
    runner = stepper(memory, ahead, rows)
    sequences = [
        Sequence(i, list(prompt), len(prompt), SamplingParams(n), i) for i, (_, prompt, n, _) in enumerate(asked)
    ]
    for now in range(600):
        for sequence, (due, _, _, leaves) in zip(sequences, asked, strict=True):
            if due == now:
                scheduler.submit(sequence)
            if leaves == now > due:
                scheduler.abort(sequence, "abort", now)
        if now > 12 and not scheduler.busy:
            break
        work = scheduler.step(config.max_num_batched_tokens, now)
        scheduler.commit(work, runner.execute(work), now)
        scheduler.check()
    for sequence, (_, prompt, n, _) in zip(sequences, asked, strict=True):
        right, _ = alone(config, prompt, n)
        assert sequence.finish_reason in ("length", "abort")
        assert answer(sequence) == right[: len(answer(sequence))]
        assert len(answer(sequence)) == n or sequence.finish_reason == "abort"
    scheduler.blocks.check([])


def decode(count: int, tokens: int = 12) -> tuple[Scheduler, Memory, list[Sequence]]:
    scheduler = Scheduler(CONFIG, frozenset())
    sequences = [Sequence(i, [i, 1, 2], 3, SamplingParams(tokens), i) for i in range(count)]
    for sequence in sequences:
        scheduler.submit(sequence)
    return scheduler, Memory(CONFIG.block_size, scheduler.blocks), sequences


def steps(scheduler: Scheduler, runner: Stepper) -> Iterator[None]:
    now = 0
    while scheduler.busy:
        now += 1
        work = scheduler.step(CONFIG.max_num_batched_tokens, now)
        scheduler.commit(work, runner.execute(work), now)
        yield


def test_a_guess_comes_true_at_every_step_of_decodes_alone() -> None:
    """Though every fourth token wants another block: the scheduler gives it a step ahead."""
    scheduler, memory, sequences = decode(3)
    runner = stepper(memory)
    assert len(list(steps(scheduler, runner))) == 12
    assert (runner.guessed, runner.wasted) == (3 * 11, 0)
    assert [answer(s) for s in sequences] == [alone(CONFIG, [i, 1, 2], 12)[0] for i in range(3)]


def test_of_a_guess_only_who_has_vanished_is_lost() -> None:
    scheduler, memory, sequences = decode(3)
    runner = stepper(memory)
    moves = steps(scheduler, runner)
    for _ in range(4):
        next(moves)
    eager = len(memory.steps)
    scheduler.abort(sequences[1], "abort", 9)
    next(moves)
    assert len(memory.steps) == eager, "the others' tokens were under way already"
    assert runner.wasted == 1


def test_without_looking_ahead_nothing_is_guessed() -> None:
    scheduler, memory, _ = decode(2)
    runner = stepper(memory, ahead=False)
    list(steps(scheduler, runner))
    assert (runner.guessed, len(memory.steps)) == (0, 1)  # the prompts; decodes by graphs


@pytest.mark.parametrize("change", ["position", "blocks", "token"])
def test_a_guess_that_is_not_what_was_asked_does_not_count(change: str) -> None:
    """A step with other tokens, or other blocks of the same content, is computed anew."""
    memory = Memory(4)
    runner = stepper(memory)
    sequence = Sequence(0, [1, 2, 3], 3, SamplingParams(9), 0, blocks=[5, 6])
    (token,) = runner.execute([(sequence, 3)])
    assert token is not None
    sequence.computed = 3
    sequence.token_ids.append(token)
    if change == "position":  # one further on, after the same token: the guess itself has computed that one's keys
        sequence.computed = 4
        sequence.token_ids.append(token)
    if change == "blocks":
        sequence.blocks = [7, 8]
        memory.memory |= {(7, k): memory.memory[5, k] for k in range(3)}
    if change == "token":
        sequence.token_ids[-1] = token + 1
    found = runner.execute([(sequence, len(sequence.token_ids) - sequence.computed)])
    assert runner.wasted == 1
    state = 0
    for t in sequence.token_ids:
        state = chain(state, t)
    assert found == [ord("a") + state % 26]


def row(position: int, blocks: list[int], token: int = 1) -> Row:
    return Row(token, -1, position, blocks, False, 0.0, 1.0, 0.0)


def test_padding_neither_writes_nor_reads_nor_works() -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def look(batch: Batch, draws: gpu.Draws, out: torch.Tensor) -> None:
        assert isinstance(batch.layout, gpu.Layout)
        step = batch.layout.step
        assert not step.works[0].merges.any()
        ((_, items),) = step.works[0].launches
        seen.append((step.slots.tolist(), items[:, 0].tolist()))

    made = Graphs(MODEL, 8, look, graphs.in_place())
    made.capture()
    assert seen == [([-1] * s.rows, [-1] * s.pieces) for s in reversed(made.sizes)], "largest first, all padding"
    seen.clear()
    made.launch([row(3, [1, 2]), row(9, [3, 4, 5]), row(0, [7]), row(1, [8]), row(2, [9])])
    ((slots, sequences),) = seen
    assert slots == [7, 21, 28, 33, 38, -1, -1, -1]
    assert sorted(sequences) == [-1, -1, -1, 0, 1, 2, 3, 4]


def test_a_step_after_a_larger_one_finds_nothing_of_it() -> None:
    seen: list[list[int]] = []
    made = Graphs(MODEL, 4, lambda b, d, o: seen.append(b.layout.step.slots.tolist()), graphs.in_place())  # type: ignore[attr-defined]
    made.capture()
    made.launch([row(0, [k]) for k in range(4)])
    made.launch([row(0, [k]) for k in (7, 8, 9)])
    assert seen[-1] == [28, 32, 36, -1]


def test_a_table_that_grew_is_copied_on_from_where_it_was() -> None:
    tables: list[list[int]] = []
    made = Graphs(MODEL, 1, lambda b, d, o: tables.append(b.layout.step.tables[0].tolist()), graphs.in_place())  # type: ignore[attr-defined]
    made.capture()
    blocks = [3]
    for position in range(30):
        if position // 4 >= len(blocks):
            blocks.append(20 - position // 4)
        made.launch([row(position, blocks)])
        assert tables[-1][: len(blocks)] == blocks
    made.launch([row(0, [2])])
    assert tables[-1][0] == 2


def test_more_than_the_largest_graph_is_refused() -> None:
    made = Graphs(MODEL, 2, Memory(4).compute, graphs.in_place())
    made.capture()
    assert made.launch([row(0, [1])] * 3) is None


@given(st.integers(1, 700), st.integers(1, 40), st.data())
def test_every_step_has_a_size_not_much_larger(most: int, pieces: int, data: st.DataObject) -> None:
    found = graphs.sizes(most, pieces)
    assert found == sorted(set(found))
    assert max(s.rows for s in found) == min(most, graphs.MOST_ROWS)
    rows = data.draw(st.integers(1, min(most, graphs.MOST_ROWS)))
    each = data.draw(st.integers(1, pieces))
    size = next(s for s in found if s.rows >= rows and s.pieces >= rows * each)
    assert size.rows <= max(8, 1.5 * rows)
    assert size.pieces <= 2 * max(size.rows, rows * each) * max(1, size.rows / rows)


@given(st.integers(1, 9), st.integers(1, 30), st.sampled_from([1, 2]))
def test_the_parts_of_a_room_lie_apart_and_at_sixteen_bytes(rows: int, pieces: int, kinds: int) -> None:
    size = Size(rows, pieces)
    room = graphs._room(torch.zeros(size.words(kinds), dtype=torch.int32), size, kinds)
    parts = [*room[:8], *room.merges, *room.items]
    for number, part in enumerate(parts, 1):
        assert part.data_ptr() % 16 == room.tokens.data_ptr() % 16
        assert not part.any(), "it shares memory with another"
        part.fill_(number)
    assert all((part == number).all() for number, part in enumerate(parts, 1))


class Cuda:
    """torch.cuda as far as a capture goes: what is asked of it, in order, and which stream is current."""

    def __init__(self, patch: pytest.MonkeyPatch, fails: bool = False) -> None:
        said, self.current = [], "main"
        self.said: list[str] = said
        self.streams = self.threads_own = 0  # made; captures that another thread's allocations do not break off
        cuda = self

        class Stream:
            def __init__(self, name: str = "side") -> None:
                self.name = name
                cuda.streams += name == "side"

            def wait_stream(self, other: "Stream") -> None:
                said.append(f"{self.name} waits for {other.name}")

        class Graph:
            def replay(self) -> None:
                said.append(f"replay on {cuda.current}")

        @contextmanager
        def stream(chosen: Stream) -> Iterator[None]:
            before, cuda.current = cuda.current, chosen.name
            try:
                yield
            finally:
                cuda.current = before

        @contextmanager
        def graph(made: Graph, pool: object = None, capture_error_mode: str = "global") -> Iterator[None]:
            """As torch's: a capture that was broken off is an error at its end, and leaves its stream the current."""
            before, cuda.current = cuda.current, "capture"
            said.append(f"begin in {pool}")
            cuda.threads_own += capture_error_mode == "thread_local"
            try:
                yield
            finally:
                if fails:
                    raise RuntimeError("operation failed due to a previous error during capture")
                said.append("end")
                cuda.current = before

        names = {"Stream": Stream, "stream": stream, "CUDAGraph": Graph, "graph": graph}
        names |= {"current_stream": lambda: Stream(self.current), "graph_pool_handle": lambda: "the pool"}
        names |= {"synchronize": lambda: said.append("synchronize")}
        for name, value in names.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(graphs, "_side", functools.cache(graphs._side.__wrapped__))  # no stream of another test's

    def run(self) -> None:
        self.said.append(f"run on {self.current}")


def test_a_step_is_captured_as_torch_asks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run once on a side stream that is ordered before and after, then captured, all graphs in one pool.

    One side stream for all, those of a model that is loaded anew too: cuBLAS keeps a workspace for each.
    """
    assert "capture_error_mode" in inspect.signature(torch.cuda.graph).parameters
    cuda = Cuda(monkeypatch)
    replays = [graphs.cuda().capture(cuda.run) for _ in range(2)]
    once = ["side waits for main", "run on side", "main waits for side", "begin in the pool", "run on capture", "end"]
    assert cuda.said == 2 * once
    assert (cuda.streams, cuda.threads_own) == (1, 2)
    cuda.said.clear()
    for replay in replays:
        replay()
    assert cuda.said == ["replay on main"] * 2, "what was captured is not run again"


@pytest.mark.parametrize("fails", [False, True])
def test_a_bench_that_cannot_be_captured_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    from kernels import bench

    cuda = Cuda(monkeypatch, fails)
    way, once = bench._captured([cuda.run, cuda.run])
    assert (way, cuda.current) == ("eager" if fails else "graph", "main")
    cuda.said.clear()
    once()
    assert cuda.said == (["run on main"] * 2 if fails else ["replay on main"])
