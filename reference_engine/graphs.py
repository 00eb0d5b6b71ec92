"""Decode steps from buffers that never move: what a CUDA graph replays, one graph for each size of step.

A graph repeats its launches with the sizes and addresses that it was captured with. So a step is padded to the next
size there is: rows of padding have slot -1, which writes no keys and values, and no work in attention. A step's inputs
go to the device in two copies, its tokens come back in one; a row may take its token from where an earlier step on the
device leaves it. The graphs share one pool of memory, the largest captured first, for only one runs at a time.

`Device` holds all that is CUDA's, and is untried on a GPU. Its stand-in for the CPU runs the same steps in place of a
graph, which is what tests do.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from reference_engine import gpu
from reference_engine.batch import Batch
from reference_engine.model import Model

TURNS = 4  # steps whose inputs may wait on the host: what is in flight is three at most
MOST_ROWS = 512  # of a graph; larger steps are launched one by one, and take their time anyway


class Device(NamedTuple):
    """What a GPU does, or something in its place."""

    host: Callable[..., torch.Tensor]  # (size, dtype=): zeros in memory that the device copies from by itself
    capture: Callable[[Callable[[], None]], Callable[[], object]]  # a step -> its replay
    mark: Callable[[], Callable[[], object]]  # -> waits for all that was launched until now


def in_place() -> Device:
    """Of a CPU: a step is run where a graph would be replayed, and once where it would be captured."""

    def capture(run: Callable[[], None]) -> Callable[[], object]:
        run()
        return run

    return Device(torch.zeros, capture, lambda: lambda: None)


def cuda() -> Device:
    pool = torch.cuda.graph_pool_handle()
    side = _side()

    def capture(run: Callable[[], None]) -> Callable[[], object]:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()  # compiles and allocates what a capture may not
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: after a crash it is captured anew while another thread may make vectors, and allocate for them.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            run()
        return graph.replay

    def mark() -> Callable[[], object]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.synchronize

    return Device(partial(torch.zeros, pin_memory=True), capture, mark)


@cache
def _side() -> torch.cuda.Stream:
    """One for all captures on the device, after a restart too: cuBLAS keeps 32 MiB for each stream it was used on."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


class Row(NamedTuple):
    """A sequence's next position in a step of decodes."""

    token: int
    source: int  # place in `made` where its token is, or will be; -1: `token` is it
    position: int
    blocks: list[int]  # block table; only ever appended to
    early: bool
    temperature: float
    top_p: float
    uniform: float


class Launch(NamedTuple):
    """A step under way."""

    place: int  # of its first token in `made`
    tokens: torch.Tensor  # [rows] on the host, once `wait` has returned
    wait: Callable[[], object]

    def read(self) -> dict[int, int]:
        """Place in `made` -> token. Waits."""
        self.wait()
        return dict(enumerate(self.tokens.tolist(), self.place))


class Room(NamedTuple):
    """The inputs of a step of one size, parts of one buffer. int32 [rows] unless said otherwise."""

    tokens: Any
    sources: Any
    positions: Any
    slots: Any
    early: Any
    temperature: Any  # float64
    top_p: Any  # float64
    uniforms: Any  # float64
    merges: list[Any]  # of each kind of layer: [rows, 4]
    items: list[Any]  # [pieces, 8]


class Size(NamedTuple):
    """Of a graph."""

    rows: int
    pieces: int  # of sequences, that attention reads side by side

    def parts(self, kinds: int) -> list[tuple[int, ...]]:
        """In the order of Room: words of four bytes."""
        return [*[(self.rows,)] * 5, *[(self.rows, 2)] * 3, *[(self.rows, 4)] * kinds, *[(self.pieces, 8)] * kinds]

    def words(self, kinds: int) -> int:
        return sum(_aligned(part) for part in self.parts(kinds))


def sizes(most_rows: int, most_pieces: int) -> list[Size]:
    """Smallest first. `most_pieces`: of the longest sequence. Rows are at most 1.5 times what they need to be, from
    eight on; pieces at most twice."""
    rows, found = 1, []
    steps = []
    while rows < min(most_rows, MOST_ROWS):
        steps += [rows] + [rows + rows // 2] * (rows >= 8)
        rows *= 2
    for n in [*(r for r in steps if r < min(most_rows, MOST_ROWS)), min(most_rows, MOST_ROWS)]:
        pieces = n
        while pieces < n * most_pieces:
            found.append(Size(n, pieces))
            pieces *= 2
        found.append(Size(n, n * most_pieces))
    return found


def _aligned(part: tuple[int, ...]) -> int:
    """Words up to the next multiple of 16 bytes: Triton compiles another kernel for addresses that are none."""
    return -(-int(np.prod(part)) // 4) * 4


def _room(buffer: torch.Tensor, size: Size, kinds: int) -> Room:
    found: list[Any] = []
    start = 0
    for part in size.parts(kinds):
        found.append(buffer[start : start + int(np.prod(part))].view(part))
        start += _aligned(part)
    found[5:8] = [part.view(torch.float64)[:, 0] for part in found[5:8]]
    return Room._make([*found[:8], found[8 : 8 + kinds], found[8 + kinds :]])


def _arrays(room: Room) -> Room:
    """The same memory for numpy."""
    return Room._make([*(t.numpy() for t in room[:8]), *([t.numpy() for t in kind] for kind in room[8:])])


Compute = Callable[[Batch, gpu.Draws, torch.Tensor], None]  # a batch of decodes; a token for each row to the tensor


class Graphs:
    """Of one model and its pool: another pool needs other graphs."""

    def __init__(self, model: Model, most_rows: int, compute: Compute, device: Device) -> None:
        """Captures nothing yet."""
        from kernels import attention_api

        shape, pages, like = model.shape, model.cache.pages, model.embedding
        self.model, self.device, self._compute = model, device, compute
        self._group, self._window = shape.heads // shape.kv_heads, pages.window
        self._tiles = gpu.tiles(like.dtype, shape.head_dim, like.device)
        self._plan = partial(attention_api.plan, group=self._group, tiles=self._tiles)
        self._tile = self._plan([1], [1]).launches[0][0]
        self._kinds = 2 if pages.window else 1
        self.block_size = pages.block_size
        self.context = context = len(model.cache.cos)
        self.sizes = sizes(most_rows, -(-context // self._tile.split))
        self.most_rows = self.sizes[-1].rows
        on = partial(torch.zeros, device=like.device)
        # Tokens that steps made: of graphs from 0 on, of all others from most_rows on.
        self.made = on(2 * max(most_rows, self.most_rows), dtype=torch.int64)
        self._attended = on((self.most_rows, shape.heads, shape.head_dim), dtype=like.dtype)
        words, table = max(s.words(self._kinds) for s in self.sizes), -(-context // pages.block_size)
        self._words, self._tables = on(words, dtype=torch.int32), on((self.most_rows, table), dtype=torch.int32)
        self._host = [device.host(words, dtype=torch.int32) for _ in range(TURNS)]
        self._host_tables = [device.host((self.most_rows, table), dtype=torch.int32) for _ in range(TURNS)]
        # Which list each row of those tables was copied from, and how far: lists grow, and are not copied anew.
        self._copied: list[list[tuple[list[int], int]]] = [[([], 0)] * self.most_rows for _ in range(TURNS)]
        self._host_made = [device.host(len(self.made), dtype=torch.int64) for _ in range(TURNS)]
        self._turn = 0
        self.replays: dict[Size, Callable[[], object]] = {}

    def capture(self) -> None:
        """All sizes; writes no keys and values, since all rows are padding."""
        with torch.inference_mode():
            for size in reversed(self.sizes):
                room = _room(self._words, size, self._kinds)
                self._words.zero_()
                _clear(room)
                self.replays[size] = self.device.capture(partial(self._step, room, size))

    def launch(self, rows: Sequence[Row]) -> Launch | None:
        """The tokens of these rows, into `made` from 0 on; None where no graph is large enough. Waits for nothing."""
        lengths = [row.position + 1 for row in rows]
        works = [self._plan([1] * len(rows), lengths, window=w) for w in (0, self._window)[: self._kinds]]
        pieces = max(len(items) for work in works for _, items in work.launches)
        size = next((s for s in self.sizes if s.rows >= len(rows) and s.pieces >= pieces), None)
        if size is None:
            return None
        turn = self._next_turn()
        words = size.words(self._kinds)
        self._host[turn][:words].zero_()
        self._fill(_arrays(_room(self._host[turn], size, self._kinds)), rows, works)
        self._fill_tables(turn, rows)
        with torch.inference_mode():
            self._words[:words].copy_(self._host[turn][:words], non_blocking=True)
            self._tables[: len(rows)].copy_(self._host_tables[turn][: len(rows)], non_blocking=True)
            self.replays[size]()
            return self._sent(turn, 0, len(rows))

    def beside(self, tokens: torch.Tensor) -> Launch:
        """Tokens [n] that another step has made on the device, into `made` from most_rows on."""
        start = len(self.made) // 2
        self.made[start : start + len(tokens)].copy_(tokens)
        return self._sent(self._next_turn(), start, len(tokens))

    def _next_turn(self) -> int:
        self._turn = (self._turn + 1) % TURNS
        return self._turn

    def _sent(self, turn: int, start: int, n: int) -> Launch:
        tokens = self._host_made[turn][start : start + n]
        tokens.copy_(self.made[start : start + n], non_blocking=True)
        return Launch(start, tokens, self.device.mark())

    def _fill(self, room: Room, rows: Sequence[Row], works: Sequence[Any]) -> None:
        n, size = len(rows), self.block_size
        _clear(room)
        room.tokens[:n] = [row.token for row in rows]
        room.sources[:n] = [row.source for row in rows]
        room.positions[:n] = [row.position for row in rows]
        room.slots[:n] = [row.blocks[row.position // size] * size + row.position % size for row in rows]
        room.early[:n] = [row.early for row in rows]
        room.temperature[:n] = [row.temperature for row in rows]
        room.top_p[:n] = [row.top_p for row in rows]
        room.uniforms[:n] = [row.uniform for row in rows]
        for merges, items, work in zip(room.merges, room.items, works, strict=True):
            merges[: len(work.merges)] = work.merges.numpy()
            items[: len(work.launches[0][1])] = work.launches[0][1].numpy()

    def _fill_tables(self, turn: int, rows: Sequence[Row]) -> None:
        tables, copied = self._host_tables[turn].numpy(), self._copied[turn]
        for number, row in enumerate(rows):
            source, end = copied[number]
            done = end if source is row.blocks else 0
            tables[number, done : len(row.blocks)] = row.blocks[done : tables.shape[1]]
            copied[number] = (row.blocks, min(len(row.blocks), tables.shape[1]))

    def _step(self, room: Room, size: Size) -> None:
        """What a graph is captured from: all that it reads and writes is in buffers that stay."""
        from kernels.attention_api import Step, Work

        works = [
            Work(window, self._group, ((self._tile, items),), merges, size.pieces)
            for window, items, merges in zip((0, self._window), room.items, room.merges, strict=False)
        ]
        step = Step(room.slots, self._tables[: size.rows], (works[0], works[-1]))
        made = self.made.index_select(0, room.sources.clamp(min=0))
        tokens = torch.where(room.sources < 0, room.tokens.long(), made).clamp(min=0)  # NOT_FINITE is no row
        layout = gpu.Layout(step, self._attended[: size.rows])
        batch = Batch(tokens, room.positions, room.slots, layout, room.positions, [])
        draws = gpu.Draws(room.early, room.temperature, room.top_p, room.uniforms)
        self._compute(batch, draws, self.made[: size.rows])


def _clear(room: Room) -> None:
    """All padding, in a buffer of zeros: no token from elsewhere, nothing written, no work."""
    room.sources[:] = -1
    room.slots[:] = -1
    for items in room.items:
        items[:, 0] = -1
