"""The same drive in N processes: one plan, one start, one concurrency. What they share lies in memory, not in messages.

Workers are forked, so that a plan of any size is shared and none is built twice. Each worker writes its own row of
the Board; the parent reads. Only taking the next conversation needs a lock, which goes free when its holder dies.
"""

import asyncio
import ctypes
import fcntl
import json
import mmap
import os
import signal
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llm_bench.errors import BenchError

POLL_S = 0.1  # how soon the parent sees that a worker is gone, and looks at the figures
START_DELAY_NS = 50_000_000  # from the last worker's being ready to the common start
TERM_S = 10.0  # for workers to cut and write when another has failed, or the run is interrupted
TWICE_S = 0.5  # a signal this soon after another is the same one: `timeout` tells a process and then its whole group
STOPPING = (signal.SIGINT, signal.SIGTERM)
BEFORE_START = "stopped before it had begun"
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_deferred: list[int] = []  # signals of this process that wait until what it measured is written

# A worker's row of counters.
COUNTERS = ("ready", "in_flight", "landed", "failed", "tokens", "busy", "ended", "wave_ended", "warm")
_COLUMN = {name: i for i, name in enumerate(COUNTERS)}
_NEXT, _OPENED_NS, _START_NS, _STOP = range(4)  # of Board.common
_FAILED, _INTERRUPTED = 1, 2  # in _STOP


class Board:
    """What parent and workers share: counters (workers, len(COUNTERS)), common facts, and who took which request."""

    def __init__(self, workers: int, requests: int) -> None:
        cells = workers * len(COUNTERS) + 4 + 2 * requests
        self._memory = mmap.mmap(-1, max(8 * cells, 8))  # anonymous and shared: children see the same pages
        words = np.frombuffer(self._memory, np.int64, cells)
        at = workers * len(COUNTERS)
        self.counters = words[:at].reshape(workers, len(COUNTERS))
        self.common = words[at : at + 4]
        self.taken = words[at + 4 : at + 4 + requests]  # 1 + number of the worker that began it, 0: nobody yet
        self.due_ns = words[at + 4 + requests :]  # when it became due, 0 before that
        self._lock, name = tempfile.mkstemp()  # a file without a name: record locks need one, nothing is written
        Path(name).unlink()
        weakref.finalize(self, os.close, self._lock)

    def total(self, counter: str) -> int:
        return int(self.counters[:, _COLUMN[counter]].sum())

    def set(self, worker: int, counter: str, value: int) -> None:
        self.counters[worker, _COLUMN[counter]] = value

    def add(self, worker: int, counter: str, change: int) -> None:
        self.counters[worker, _COLUMN[counter]] += change

    def note(self, worker: int, row: int, due_ns: int) -> None:
        """A request became due: should this worker die, it is known what it had begun."""
        self.taken[row] = worker + 1
        self.due_ns[row] = due_ns

    def next(self) -> int:
        """0, 1, 2, ...: each number once, whichever process asks. The lock is the kernel's: it dies with its holder."""
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        try:
            number = int(self.common[_NEXT])
            self.common[_NEXT] = number + 1
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)
        return number

    @property
    def taken_so_far(self) -> int:
        return int(self.common[_NEXT])

    @property
    def opened_ns(self) -> int:
        return int(self.common[_OPENED_NS])

    @opened_ns.setter
    def opened_ns(self, at_ns: int) -> None:
        self.common[_OPENED_NS] = at_ns

    async def wait_for_start(self, worker: int, stop: asyncio.Event) -> int:
        """Say that this worker is ready; returns the common start in ns, which lies ahead.

        0, and `stop` set, where there is none: another worker failed, or the run is interrupted.
        """
        self.set(worker, "ready", 1)
        while not self.started:
            if self.common[_STOP]:
                stop.set()
            if stop.is_set():
                return 0
            await asyncio.sleep(0.001)
        return int(self.common[_START_NS])

    @property
    def interrupted(self) -> bool:
        return bool(self.common[_STOP] == _INTERRUPTED)

    def stop(self, interrupted: bool) -> None:
        """Those that wait for the start end. The first reason stands."""
        self.common[_STOP] = self.common[_STOP] or (_INTERRUPTED if interrupted else _FAILED)

    @property
    def started(self) -> bool:
        return bool(self.common[_START_NS])

    @property
    def start_ns(self) -> int:
        return int(self.common[_START_NS])

    def start(self, at_ns: int) -> None:
        self.common[_START_NS] = at_ns


class SharedSlots:
    """One worker's part of a closed loop's slots; `driver.Slots` in shared memory. 45 slots over 8 workers are 45."""

    def __init__(self, board: Board, worker: int, workers: int, first: Sequence[int], concurrency: int) -> None:
        self.numbers: Sequence[int] = range(worker, min(concurrency, len(first)), workers)
        self.alone = False
        self._concurrency = concurrency
        self._board, self._worker, self._first = board, worker, first
        self._wave = min(concurrency, len(first))
        self._wave_rows: set[int] = set()

    def take(self) -> int:
        number = self._board.next()
        if number >= len(self._first):
            return -1
        row = self._first[number]
        if number < self._wave:
            self._wave_rows.add(row)
        self._board.add(self._worker, "busy", 1)
        return row

    def gone(self) -> bool:
        return self._board.taken_so_far >= len(self._first)

    def leave(self) -> None:
        self._board.add(self._worker, "busy", -1)

    def ended(self, row: int) -> None:
        self._board.add(self._worker, "ended", 1)
        if row in self._wave_rows:
            self._wave_rows.discard(row)
            self._board.add(self._worker, "wave_ended", 1)

    def warm(self, warmup: int) -> bool:
        board = self._board
        return (
            board.total("wave_ended") >= self._wave
            and board.total("ended") >= warmup
            and board.total("busy") >= self._concurrency
        )

    @property
    def opened_ns(self) -> int:
        return self._board.opened_ns

    @opened_ns.setter
    def opened_ns(self, at_ns: int) -> None:
        self._board.opened_ns = at_ns


class Part(NamedTuple):
    """One worker's part of a cell. A cell that is not shared has one, without a board."""

    name: str  # of its files
    worker: int = 0
    workers: int = 1
    board: Board | None = None
    slots: Callable[[Board, int, int, Sequence[int], int], SharedSlots] = SharedSlots
    cut: bool = False  # its plan holds its own conversations alone

    def firsts(self, first: Sequence[int]) -> Sequence[int]:
        """Of a plan's conversations those that this worker begins in an open loop."""
        return first if self.cut else first[self.worker :: self.workers]


class Outcome(NamedTuple):
    """How a worker ended."""

    worker: int
    end: dict[str, Any] | None  # what its body returned
    died: str  # "" or why there is no `end`: "killed by signal 9", "ended with code 1", "failed"
    error: str = ""  # the text of the BenchError that it raised


def run(workers: int, body: Callable[[int], dict[str, Any]], board: Board, watch: Callable[[], bool]) -> list[Outcome]:
    """Fork `workers` processes that each run body(number), in the order of numbers.

    `watch` is called every POLL_S; once it returns True the workers are told to end, with SIGTERM.

    A worker that dies, or raises BenchError, ends the others with SIGTERM, which they take as the end of the run; those
    that do not end within TERM_S are killed. SIGINT and SIGTERM of the parent are handed on in the same way, and a
    second one kills at once. Workers whose parent dies get SIGTERM from the kernel.
    """
    alive: dict[int, Member] = {}
    outcomes: dict[int, Outcome] = {}
    told_s = deadline_s = float("inf")

    def hand_on(number: int) -> None:
        for member in list(alive.values()):
            with suppress(ProcessLookupError):
                os.kill(member.pid, number)

    def stop(number: int, interrupted: bool) -> None:
        nonlocal deadline_s
        board.stop(interrupted)
        deadline_s = min(deadline_s, time.monotonic() + TERM_S)
        hand_on(number)

    def told(number: int, _frame: object = None) -> None:
        nonlocal told_s
        if time.monotonic() - told_s > TWICE_S:
            hand_on(signal.SIGKILL)
        else:
            told_s = min(told_s, time.monotonic())
            stop(number, interrupted=True)

    # No signal is lost around a fork: it waits until both sides have their handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    before: dict[int, Any] = {}
    try:
        for number in range(workers):
            alive[number] = fork(number, body)
        before = {number: signal.signal(number, told) for number in STOPPING}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        while alive:
            for number, member in list(alive.items()):
                pid, status = os.waitpid(member.pid, os.WNOHANG)
                if pid:
                    del alive[number]
                    outcomes[number] = outcome_of(number, member.result, status, board)
            if any(o.died for o in outcomes.values()) and deadline_s == float("inf"):
                stop(signal.SIGTERM, interrupted=False)
            if time.monotonic() > deadline_s:
                hand_on(signal.SIGKILL)
            if board.total("ready") == workers and not board.started and deadline_s == float("inf"):
                board.start(time.monotonic_ns() + START_DELAY_NS)
            if watch() and deadline_s == float("inf"):
                stop(signal.SIGTERM, interrupted=False)
            time.sleep(POLL_S if board.started else 0.001)
    finally:
        hand_on(signal.SIGKILL)  # only where this process itself fails: otherwise none is alive
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    return [outcomes[number] for number in range(workers)]


def defer_signals() -> None:
    """For a process whose loop has ended: what it has yet to write is short, and no signal may tear it.

    They are noted, and not blocked: the kernel gives one to any thread that does not block it, such as BLAS's. Blocked
    is only the moment in which uvloop has set SIGTERM back to what ends a process.
    """
    loop = asyncio.get_running_loop()
    blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        for number in STOPPING:
            loop.remove_signal_handler(number)  # a closed uvloop takes signals and tells nobody
            signal.signal(number, _note)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)


def _note(number: int, _frame: object) -> None:
    _deferred.append(number)


def hear_signals() -> None:
    """Outside a drive SIGINT and SIGTERM raise KeyboardInterrupt: now, where one has come since `defer_signals`."""
    for number in STOPPING:
        signal.signal(number, signal.default_int_handler)
    if _deferred:
        _deferred.clear()
        raise KeyboardInterrupt


class Member(NamedTuple):
    """A forked worker."""

    pid: int
    result: int  # a file in memory: a pipe would hold 64 kB, and 4 where a user has many


def fork(number: int, body: Callable[[int], dict[str, Any]]) -> Member:
    """Run body(number) in a process of its own, which dies with this one."""
    result = os.memfd_create("result")
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Member(pid, result)
    code = 1
    try:
        for stopping in STOPPING:  # the parent's would raise KeyboardInterrupt; a loop brings handlers of its own
            signal.signal(stopping, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before we asked to be told
            os._exit(1)
        try:
            end = body(number)
        except BenchError as e:
            end = {"bench_error": str(e)}
        with open(result, "wb", closefd=False) as file:
            file.write(json.dumps(end).encode())
        code = 0
    except BaseException:  # noqa: BLE001  # nothing may run on in this copy of the parent: say what it was and end
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def outcome_of(number: int, result: int, status: int, board: Board) -> Outcome:
    with open(result, "rb") as file:  # a descriptor, no path; its place in the file is shared with who wrote it
        file.seek(0)
        text = file.read()
    if os.WIFSIGNALED(status):
        by = os.WTERMSIG(status)
        early = by in STOPPING and board.interrupted and not board.started
        return Outcome(number, None, BEFORE_START if early else f"killed by signal {by}")
    if os.WEXITSTATUS(status) or not text:
        return Outcome(number, None, f"ended with code {os.WEXITSTATUS(status)}")
    end = json.loads(text)
    if "bench_error" in end:
        return Outcome(number, None, "failed", str(end["bench_error"]))
    return Outcome(number, end, "")
