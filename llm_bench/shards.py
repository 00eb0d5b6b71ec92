"""The same drive in N processes: one plan, one start, one concurrency. What they share lies in memory, not in messages.

Workers are forked, so that a plan of any size is shared and none is built twice. Each worker writes its own row of
the Board; the parent reads. Only taking the next conversation needs a lock, which goes free when its holder dies.
"""

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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llm_bench.errors import BenchError

POLL_S = 0.1  # how soon the parent sees that a worker is gone, and looks at the figures
START_DELAY_NS = 50_000_000  # from the last worker's being ready to the common start
TERM_S = 10.0  # for workers to cut and write when another has died
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

# A worker's row of counters.
COUNTERS = ("ready", "in_flight", "landed", "failed", "tokens", "busy", "ended", "wave_ended")
_COLUMN = {name: i for i, name in enumerate(COUNTERS)}
_NEXT, _OPENED_NS, _START_NS = range(3)  # of Board.common


class Board:
    """What parent and workers share: counters (workers, len(COUNTERS)), common facts, and who took which request."""

    def __init__(self, workers: int, requests: int) -> None:
        cells = workers * len(COUNTERS) + 3 + 2 * requests
        self._memory = mmap.mmap(-1, max(8 * cells, 8))  # anonymous and shared: children see the same pages
        words = np.frombuffer(self._memory, np.int64, cells)
        at = workers * len(COUNTERS)
        self.counters = words[:at].reshape(workers, len(COUNTERS))
        self.common = words[at : at + 3]
        self.taken = words[at + 3 : at + 3 + requests]  # 1 + number of the worker that began it, 0: nobody yet
        self.due_ns = words[at + 3 + requests :]  # when it became due, 0 before that
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
    def opened_ns(self) -> int:
        return int(self.common[_OPENED_NS])

    @opened_ns.setter
    def opened_ns(self, at_ns: int) -> None:
        self.common[_OPENED_NS] = at_ns

    def wait_for_start(self, worker: int) -> int:
        """Say that this worker is ready; returns the common start in ns, which lies ahead."""
        self.set(worker, "ready", 1)
        while not self.common[_START_NS]:
            time.sleep(0.001)
        return int(self.common[_START_NS])

    @property
    def started(self) -> bool:
        return bool(self.common[_START_NS])

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


class Outcome(NamedTuple):
    """How a worker ended."""

    worker: int
    end: dict[str, Any] | None  # what its body returned
    died: str  # "" or why there is no `end`: "killed by signal 9", "ended with code 1"


def run(workers: int, body: Callable[[int], dict[str, Any]], board: Board, watch: Callable[[], None]) -> list[Outcome]:
    """Fork `workers` processes that each run body(number); `watch` is called every POLL_S. In the order of numbers.

    A worker that dies without a result ends the others with SIGTERM, which they take as the end of the run; those that
    do not end within TERM_S are killed. SIGINT and SIGTERM of the parent are handed on; workers whose parent dies get
    SIGTERM from the kernel. Raises BenchError as the first worker that raised one did.
    """
    crew = [_fork(number, body) for number in range(workers)]
    alive = dict(enumerate(crew))
    outcomes: dict[int, Outcome] = {}

    def hand_on(number: int, _frame: object = None) -> None:
        for member in alive.values():
            os.kill(member.pid, number)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    deadline_s = float("inf")
    try:
        while alive:
            for number, member in list(alive.items()):
                pid, status = os.waitpid(member.pid, os.WNOHANG)
                if pid:
                    del alive[number]
                    outcomes[number] = _outcome(number, member.pipe, status)
            if any(o.died for o in outcomes.values()) and alive and deadline_s == float("inf"):
                hand_on(signal.SIGTERM)
                deadline_s = time.monotonic() + TERM_S
            if time.monotonic() > deadline_s:
                hand_on(signal.SIGKILL)
            if board.total("ready") == workers and not board.started:
                board.start(time.monotonic_ns() + START_DELAY_NS)
            watch()
            time.sleep(POLL_S if board.started else 0.001)
    finally:
        hand_on(signal.SIGKILL)  # only where this process fails itself: else none is alive
        for number, handler in before.items():
            signal.signal(number, handler)
    for outcome in (outcomes[number] for number in range(workers)):
        if outcome.end is not None and "bench_error" in outcome.end:
            raise BenchError(outcome.end["bench_error"])
    return [outcomes[number] for number in range(workers)]


class _Member(NamedTuple):
    pid: int
    pipe: int  # its result comes here


def _fork(number: int, body: Callable[[int], dict[str, Any]]) -> _Member:
    read, write = os.pipe()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(write)
        return _Member(pid, read)
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before we asked to be told
            os._exit(1)
        try:
            end = body(number)
        except BenchError as e:
            end = {"bench_error": str(e)}
        os.write(write, json.dumps(end).encode())
        code = 0
    except BaseException:  # noqa: BLE001  # nothing may run on in this copy of the parent: say what it was and end
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _outcome(number: int, pipe: int, status: int) -> Outcome:
    with open(pipe, "rb") as file:  # a descriptor, no path
        text = file.read()
    if os.WIFSIGNALED(status):
        return Outcome(number, None, f"killed by signal {os.WTERMSIG(status)}")
    if os.WEXITSTATUS(status) or not text:
        return Outcome(number, None, f"ended with code {os.WEXITSTATUS(status)}")
    return Outcome(number, json.loads(text), "")
