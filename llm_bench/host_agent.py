"""The process on a host that drives one worker's part of a cell: `python -m llm_bench.host_agent`, asked over pipes.

The parent asks, it answers, and never speaks first, so that whatever carries bytes both ways carries it: a pipe, a Ray
actor, a shell on another machine. Its driver is a process forked from it, so that no question of the parent's is ever
in the way of a request. Who asks and who answers trust each other: what is said are Python's pickles.

Frames: `=qqq` of length, received_ns, replied_ns, and so many bytes; in a question both stamps are 0.
"""

import os
import pickle
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from llm_bench import __version__, calibration, host_clock, shards
from llm_bench.clock import now_ns
from llm_bench.errors import BenchError
from llm_bench.fault_doing import Trouble
from llm_bench.host import host
from llm_bench.host_part import Job, PartBoard, PartPlan, cell_of, dumps, part_of
from llm_bench.limits import OTHER_FILES
from llm_bench.measure import disk_errors, drive

FRAME = struct.Struct("=qqq")
PIECE = 8 << 20  # bytes of records that an answer holds, and at least one batch of them
LOOK_S = 0.25  # how often it looks after its driver while it is asked nothing
ORPHAN_S = 30.0  # not asked anything for so long while it drives: the parent, or the way to it, is gone


class Agent:
    """What it knows of the part that it drives: one at a time."""

    def __init__(self) -> None:
        self.hide: Callable[[], None] = lambda: None  # closes the pipes in the driver, so that their ends are seen
        self.heard_s = time.monotonic()
        self._forget()

    def _forget(self) -> None:
        self.folder: Path | None = None
        self.job: Job | None = None
        self.board: PartBoard | None = None
        self.member: shards.Member | None = None
        self.outcome: shards.Outcome | None = None
        self.by_ns, self.read, self.schema = 0, 0, None
        self.whole = False  # all that the driver has written was told

    # ---- what it can be asked

    def hello(self) -> dict[str, Any]:
        """What a run has to know of this host before it begins."""
        return {
            "version": __version__,
            "pid": os.getpid(),
            "host": host(),
            "ceiling": calibration.ceiling(),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[1] - OTHER_FILES,
            "ports": _ports(),
        }

    def clock(self) -> None:
        """Nothing: the stamps of the answer are what is asked for."""

    def begin(self, job: Job) -> None:
        """Take a part. Its bytes come next."""
        self.leave()
        self.folder, self.job = Path(tempfile.mkdtemp(prefix="llm-bench-")), job
        (self.folder / "spool").touch(mode=0o600)

    def spool(self, piece: bytes) -> None:
        assert self.folder is not None
        with disk_errors(self.folder), (self.folder / "spool").open("ab") as file:
            file.write(piece)

    def go(self, offset_ns: int, error_ns: int) -> None:
        """Fork the driver, which then waits for the start. This host's clock is ahead of the parent's by offset_ns."""
        assert self.folder is not None and self.job is not None
        folder, job = self.folder, self.job
        board = self.board = PartBoard(job.rows)
        cell = cell_of(job, folder)
        work = PartPlan(job, cell, folder / "spool")
        part = part_of(cell, job, board)
        self.path = folder / f"{part.name}.arrow"
        self.by_ns = -offset_ns
        clocks = {"worker_host": host(), "clock": {"offset_ns": offset_ns, "error_ns": error_ns}}

        def body(_: int) -> dict[str, Any]:
            self.hide()
            with disk_errors(folder):
                trouble = Trouble(patience_ns=job.patience_ns)
                return drive(cell, work, job.facts | clocks, part, lambda text: None, None, trouble)

        self.member = shards.fork(job.worker, body)

    def start(self, at_ns: int) -> bool:
        """The common start, on this host's clock. Was it in time?"""
        assert self.board is not None
        self.board.start(at_ns)
        return now_ns() < at_ns

    def open(self, at_ns: int) -> None:
        """The window of a closed loop is open from at_ns of this host's clock on."""
        assert self.board is not None
        self.board.opened_ns = at_ns

    def stop(self, interrupted: bool) -> None:
        """End as when a run is interrupted: cut what flies, write what there is."""
        if self.board is not None:
            self.board.stop(interrupted)
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def poll(self) -> dict[str, Any]:
        """What is new: counters, rows that became due, whole batches of records, how it ended; on the parent's clock.

        A driver that has ended is told as such once all of its records are.
        """
        assert self.board is not None
        ended = self.look()
        rows, due_ns = self.board.news()
        records, more = self._records()
        news: dict[str, Any] = {
            "counters": self.board.counters[0].tolist(),
            "rows": rows,
            "due_ns": due_ns + self.by_ns,
            "records": records,
            "more": more,
        }
        if ended is not None and not more:
            end = None if ended.end is None else host_clock.moved_end(ended.end, self.by_ns)
            news |= {"outcome": ended._replace(end=end), "gauge": self._gauge()}
        return news

    def leave(self) -> None:
        """The parent has all that there was: nothing is left behind on this host."""
        self.kill()
        if self.member is not None and self.outcome is None:
            os.waitpid(self.member.pid, 0)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._forget()

    # ---- its driver

    def look(self) -> shards.Outcome | None:
        """How the driver ended; None while it runs."""
        if self.member is None or self.outcome is not None:
            return self.outcome
        assert self.board is not None
        pid, status = os.waitpid(self.member.pid, os.WNOHANG)
        if pid:
            self.outcome = shards.outcome_of(self.worker, self.member.result, status, self.board)
        return self.outcome

    @property
    def worker(self) -> int:
        assert self.job is not None
        return self.job.worker

    def orphaned(self) -> None:
        """Nobody asks any more: the driver cuts and writes, and what it measured stays in its folder."""
        if self.member is None:
            if self.folder is not None:
                shutil.rmtree(self.folder, ignore_errors=True)
            return
        self.stop(interrupted=True)
        deadline_s = time.monotonic() + shards.TERM_S
        while self.look() is None and time.monotonic() < deadline_s:
            time.sleep(0.02)
        self.kill()
        assert self.folder is not None
        (self.folder / "spool").unlink(missing_ok=True)
        print(
            f"llm-bench: the run that asked this host is gone; what was measured is in {self.folder}", file=sys.stderr
        )

    def _signal(self, number: int) -> None:
        if self.member is not None and self.outcome is None:
            with suppress(ProcessLookupError):
                os.kill(self.member.pid, number)

    def _records(self) -> tuple[bytes, bool]:
        """Whole messages of the record file that were not told yet, on the parent's clock; are there more?"""
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                data = os.pread(file.fileno(), PIECE, self.read)
                found = list(host_clock.messages(data))
                if not found and len(data) == PIECE:  # one that is larger than a piece
                    data = os.pread(file.fileno(), size - self.read, self.read)
                    found = list(host_clock.messages(data))[:1]
        except FileNotFoundError:
            return b"", False
        told, at = [], 0
        for end, message in found:
            told.append(self._on_parents_clock(data[at:end], message))
            at = end
        self.read += at
        return b"".join(told), bool(at) and self.read < size

    def _on_parents_clock(self, data: bytes, message: Any) -> bytes:
        import pyarrow as pa

        if message is None:
            return data
        if self.schema is None:
            self.schema = pa.ipc.read_schema(message)
            return data
        batch = pa.ipc.read_record_batch(message, self.schema)
        return bytes(host_clock.moved(batch, self.by_ns).serialize())

    def _gauge(self) -> np.ndarray | None:
        path = self.path.with_suffix(".gauge.npy")
        return host_clock.moved_gauge(np.load(path), self.by_ns) if path.exists() else None


def _ports() -> int:
    """Local ports for connections to one address and port (ip(7), ip_local_port_range)."""
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except OSError:
        low, high = 32768, 60999  # the kernel's own default
    return high - low + 1


ASKED = ("hello", "clock", "begin", "spool", "go", "start", "open", "stop", "kill", "poll", "leave")


def answer(agent: Agent, question: bytes) -> Any:
    """What the agent says, or the BenchError that it raised."""
    name, arguments = pickle.loads(question)
    assert name in ASKED
    try:
        return getattr(agent, name)(**arguments)
    except BenchError as e:
        return e


def serve(into: int, out: int) -> None:
    """Answer what comes from the descriptor `into` until its end."""
    agent = Agent()

    def hide() -> None:
        os.close(into)
        os.close(out)

    agent.hide = hide
    while True:
        ready, _, _ = select.select([into], [], [], LOOK_S)
        if not ready:
            running = agent.look() is None and agent.board is not None and agent.board.started
            if running and time.monotonic() - agent.heard_s > ORPHAN_S:
                break
            continue
        head = read(into, FRAME.size)
        if len(head) < FRAME.size:
            break
        received_ns, length = now_ns(), FRAME.unpack(head)[0]
        question = read(into, length)
        agent.heard_s = time.monotonic()
        said = dumps(answer(agent, question))
        try:
            write(out, FRAME.pack(len(said), received_ns, now_ns()) + said)
        except BrokenPipeError:
            break
    agent.orphaned()


def read(file: int, length: int) -> bytes:
    """So many bytes; fewer at the end of the stream."""
    held = bytearray()
    while len(held) < length:
        piece = os.read(file, min(length - len(held), 1 << 20))
        if not piece:
            break
        held += piece
    return bytes(held)


def write(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def main() -> None:
    into, out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # what a library prints is no answer
    serve(into, out)


if __name__ == "__main__":
    main()
