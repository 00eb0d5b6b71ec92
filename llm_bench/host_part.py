"""One host's part of a cell: cut from the plan by the parent, put together again on the host, without shared memory.

Worker k of N has every Nth conversation from k on, in an open and in a closed loop, and the slots with number k mod N.
A closed loop differs from one over processes of one machine in this: there the next conversation goes to whichever slot
is free, here a worker's slots go through its own conversations only. Concurrency is the same until a worker has none
left: one with longer answers ends later than the others, and the window closes with the first slot that cannot be
filled, as always. In an open loop `drain_s` counts from the last due time of the worker's own part.
"""

import copyreg
import io
import math
import mmap
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from llm_bench import prompts, targets
from llm_bench.cell import Cell
from llm_bench.exchange import Exchange
from llm_bench.plan import NEVER, Plan
from llm_bench.records import OUTCOMES
from llm_bench.shards import Board, Part, SharedSlots
from llm_bench.transport import TRANSPORTS

PIECE = 8 << 20  # bytes of the plan that are sent at once
FILES = ("tokenizer", "cafile", "cert", "key")  # of a Target: paths of this machine, whose content is sent
_BEGUN, _TOLD = 1, 2  # in PartBoard.taken; 0: not due yet
_OF_A_ROW = ("requests", "_numbers", "_salts", "_hashes")  # of a Cell: one for each of its requests
_MADE_THERE = ("dialect", "_frame", "_hide", "_count_tokens", "due_ns")  # what cannot, or need not, be sent


class Job(NamedTuple):
    """What a host has to know of its part. Rows are places in the cell's whole plan."""

    cell: dict[str, Any]  # the state of the Cell, with its own rows alone
    worker: int
    workers: int
    firsts: list[int]  # rows that begin a conversation, in order
    rows: np.ndarray  # all of its rows, conversation after conversation
    sizes: np.ndarray  # of each row's bytes; 0: made when the turn before it has ended
    due_ns: np.ndarray
    next_turn: np.ndarray
    think_ns: np.ndarray
    requests: int  # of the whole plan
    facts: dict[str, Any]  # header of its record file
    patience_ns: int  # of Trouble
    environ: dict[str, str]  # keys that a target names by their variables: held in memory, never written
    files: dict[str, bytes]  # of FILES


def rows_of(work: Plan, worker: int, workers: int) -> tuple[list[int], list[int]]:
    """The conversations of a worker, by their first rows, and all of their rows."""
    firsts, rows = work.first[worker::workers], list[int]()
    for first in firsts:
        row = first
        while row != NEVER:
            rows.append(row)
            row = work.next_turn[row]
    return firsts, rows


def cut(cell: Cell, work: Plan, facts: Mapping[str, Any], worker: int, workers: int, patience_ns: int = 0) -> Job:
    """A worker's part of the plan, but for its bytes. Costs as much as the part is large, not the plan."""
    firsts, rows = rows_of(work, worker, workers)
    mine = np.array(rows, np.int64)
    state = {name: value for name, value in vars(cell).items() if name not in _MADE_THERE}
    state |= {name: {row: state[name][row] for row in rows} for name in _OF_A_ROW}
    for name in ("_before", "_said"):
        state[name] = {row: state[name][row] for row in rows if row in state[name]}
    state["_go_on"] = {row for row in rows if row in state["_go_on"]}
    named = cell.target.key_env
    return Job(
        cell=state,
        worker=worker,
        workers=workers,
        firsts=firsts,
        rows=mine,
        sizes=work._offsets[mine + 1] - work._offsets[mine],
        due_ns=np.array([work.due_ns[row] for row in rows], np.int64),
        next_turn=np.array([work.next_turn[row] for row in rows], np.int64),
        think_ns=np.array([work.think_ns[row] for row in rows], np.int64),
        requests=len(work),
        facts={**facts, "worker": worker},
        patience_ns=patience_ns,
        environ={named: os.environ[named]} if named in os.environ else {},
        files={name: Path(path).read_bytes() for name in FILES if (path := getattr(cell.target, name))},
    )


def pieces(work: Plan, job: Job) -> Iterator[bytes]:
    """The part's bytes, in the order of its rows, some megabytes at a time."""
    held, size = list[bytes](), 0
    for row, length in zip(job.rows.tolist(), job.sizes.tolist(), strict=True):
        if length:
            held.append(work.payload(row, None))
        size += length
        if size >= PIECE:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


def dumps(value: Any) -> bytes:
    """Pickled, views of dicts too, as Requests have them: one that many share is one there as well."""
    held = io.BytesIO()
    pickler = pickle.Pickler(held, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | {MappingProxyType: lambda view: (_view, (dict(view),))}
    pickler.dump(value)
    return held.getvalue()


def _view(value: dict[Any, Any]) -> Mapping[Any, Any]:
    return MappingProxyType(value)


# ---- on the host


def cell_of(job: Job, folder: Path) -> Cell:
    """The Cell again, for the rows of the part, with its files in `folder`."""
    os.environ.update(job.environ)
    target = job.cell["target"]
    for name, content in job.files.items():
        (folder / name).write_bytes(content)
        target = replace(target, **{name: str(folder / name)})
    cell = Cell.__new__(Cell)
    vars(cell).update(job.cell)
    cell.target, cell.options = target, replace(cell.options, out=folder)
    cell.dialect = target.dialect
    cell._frame = TRANSPORTS[cell.dialect.transport].frame
    cell._hide = targets.hider(target)
    cell._count_tokens = prompts.counter(target.tokenizer) if target.tokenizer else None
    cell.counts, cell.tokens = dict.fromkeys(OUTCOMES, 0), 0
    return cell


class PartPlan(Plan):
    """The part as the driver reads a plan: rows are numbered as in the whole one, and only its own are there."""

    def __init__(self, job: Job, cell: Cell, spool: Path) -> None:
        """`spool`: the part's bytes, which are all there."""
        rows = job.rows.tolist()
        columns = (job.due_ns, job.next_turn, job.think_ns)
        by_row: list[Any] = [dict(zip(rows, column.tolist(), strict=True)) for column in columns]
        self.due_ns, self.next_turn, self.think_ns = by_row  # they are looked up by row, as lists are
        self.requests, self.first = cell.requests, job.firsts
        self._offsets = np.concatenate([[0], np.cumsum(job.sizes)]).astype(np.int64)
        self._next_payload = lambda place, previous: cell.next_payload(rows[place], previous)
        self._place = {row: place for place, row in enumerate(rows)}
        self._whole, self._spool, self._map = job.requests, spool, None
        if self._offsets[-1]:
            with spool.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return self._whole

    def payload(self, index: int, previous: Exchange | None) -> bytes:
        return super().payload(self._place[index], previous)


class PartBoard(Board):
    """What a host's agent and its driver share: a Board of one worker, whatever its number, and its own rows."""

    def __init__(self, rows: np.ndarray) -> None:
        super().__init__(1, len(rows))
        self._rows = rows
        self._place = {row: place for place, row in enumerate(rows.tolist())}

    def set(self, worker: int, counter: str, value: int) -> None:
        super().set(0, counter, value)

    def add(self, worker: int, counter: str, change: int) -> None:
        super().add(0, counter, change)

    def note(self, worker: int, row: int, due_ns: int) -> None:
        place = self._place[row]
        self.due_ns[place] = due_ns  # first: who reads sees the row as taken only once this stands
        self.taken[place] = _BEGUN

    def news(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows (k,) that have become due since it was last asked, and when, in ns."""
        fresh = np.flatnonzero(self.taken == _BEGUN)
        self.taken[fresh] = _TOLD
        return self._rows[fresh], self.due_ns[fresh]


class PartSlots(SharedSlots):
    """A host's slots: it goes through its own conversations, and the parent opens the window of all hosts at once."""

    def __init__(self, board: Board, worker: int, workers: int, first: Sequence[int], concurrency: int) -> None:
        super().__init__(board, worker, workers, first, concurrency)
        own = range(worker, concurrency, workers)
        self.numbers = own[: len(first)]
        self._wave, self._concurrency = len(self.numbers), len(own)
        self._share = len(own) / concurrency

    def warm(self, warmup: int) -> bool:
        """Never by itself: says that this host is, of its share of the warm-up, and waits for the others."""
        if super().warm(math.ceil(warmup * self._share)):
            self._board.set(self._worker, "warm", 1)
        return False


def part_of(cell: Cell, job: Job, board: Board) -> Part:
    return Part(f"{cell.name}.w{job.worker}", job.worker, job.workers, board, PartSlots, cut=True)
