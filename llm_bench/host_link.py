"""The way to a host's agent: questions and answers, one at a time, each answer also a reading of its clock."""

import os
import pickle
import select
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from llm_bench import __version__, host_agent, host_clock, host_part
from llm_bench.clock import now_ns
from llm_bench.errors import BenchError
from llm_bench.host_agent import FRAME
from llm_bench.host_clock import Reading
from llm_bench.shards import TERM_S, Outcome

PINGS = 8  # exchanges by which a clock is read before and after
LOST_S = 5.0  # a host that does not answer a poll for so long is lost
SLOW_S = 120.0  # for what takes its time on a host: taking its part, making ready


class LostError(Exception):
    """A host does not answer any more; says why."""


class Link(Protocol):
    """The way to one host's agent: one question at a time, one answer to each."""

    name: str  # of the host, as a user knows it
    here: bool  # it is this machine

    def send(self, question: bytes) -> None: ...
    def receive(self, timeout_s: float) -> bytes: ...  # a frame of host_agent; raises LostError
    def close(self) -> None: ...


class Pipe:
    """An agent as a process, asked over its pipes; the command may lead into another namespace, or through a shell."""

    def __init__(self, command: Sequence[str] = (), name: str = "here", *, here: bool = True) -> None:
        self.name, self.here = name, here
        self.process = subprocess.Popen(
            command or (sys.executable, "-m", "llm_bench.host_agent"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the run's to handle
        )

    def send(self, question: bytes) -> None:
        assert self.process.stdin
        with suppress(BrokenPipeError):  # `receive` says so
            host_agent.write(self.process.stdin.fileno(), question)

    def receive(self, timeout_s: float) -> bytes:
        assert self.process.stdout
        out = self.process.stdout.fileno()
        if not select.select([out], [], [], timeout_s)[0]:
            raise LostError(f"not heard from for {timeout_s:g} s")
        head = host_agent.read(out, FRAME.size)
        length = FRAME.unpack(head)[0] if len(head) == FRAME.size else 0
        body = host_agent.read(out, length)
        if not body or len(body) < length:
            raise LostError("its process has ended")
        return head + body

    def close(self) -> None:
        """Its agent sees the end of its input, ends a driver that still runs, and goes."""
        assert self.process.stdin and self.process.stdout
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()  # it may be about to answer what nobody hears any more
        try:
            self.process.wait(TERM_S + 2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Hello(NamedTuple):
    """What a host said of itself."""

    name: str
    host: dict[str, Any]
    ceiling: dict[str, float] | None
    files: int  # it may open
    ports: int  # local ones, for each address of the target
    pid: int = 0  # of its agent, there


class Host:
    """A worker's host in one cell, as the parent sees it."""

    def __init__(self, number: int, link: Link) -> None:
        self.number, self.link = number, link
        self.clock = Reading(0, 0, 0)  # the reading by which its records are moved
        self.readings: list[Reading] = []  # later ones
        self.after: Reading | None = None
        self.outcome: Outcome | None = None
        self.more = False  # has records that it could not tell at once
        self._asked_ns = 0
        self._file: IO[bytes] | None = None
        self._size = 0

    @property
    def lost(self) -> bool:
        return self.outcome is not None and self.outcome.died.startswith("lost")

    def ask(self, name: str, **arguments: Any) -> None:
        said = host_part.dumps((name, arguments))
        self._asked_ns = now_ns()
        self.link.send(FRAME.pack(len(said), 0, 0) + said)

    def hear(self, timeout_s: float) -> Any:
        """The answer to what was asked last, and what it says of the host's clock. Raises LostError, BenchError."""
        frame = self.link.receive(timeout_s)
        heard_ns = now_ns()
        _, received_ns, replied_ns = FRAME.unpack(frame[: FRAME.size])
        self.readings.append(host_clock.reading(self._asked_ns, received_ns, replied_ns, heard_ns))
        answer = pickle.loads(frame[FRAME.size :])
        if isinstance(answer, BenchError):
            raise BenchError(f"{self.link.name}: {answer}")
        return answer

    def call(self, name: str, timeout_s: float = LOST_S, **arguments: Any) -> Any:
        self.ask(name, **arguments)
        return self.hear(timeout_s)

    def read_clock(self) -> Reading:
        """The best of PINGS exchanges."""
        for _ in range(PINGS):
            self.call("clock")
        return host_clock.best(self.readings[-PINGS:])

    def lose(self, why: str) -> None:
        if self.outcome is None:
            self.outcome = Outcome(self.number, None, f"lost with its host {self.link.name} ({why})")

    def keep(self, records: bytes, path: Path) -> None:
        """Append whole messages to its record file, or none. Raises OSError where the disk takes no more."""
        if self._file is None:
            self._file = path.open("wb", buffering=0)
        try:
            host_agent.write(self._file.fileno(), records)
        except OSError:
            os.ftruncate(self._file.fileno(), self._size)
            raise
        self._size += len(records)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def greet(links: Sequence[Link]) -> list[Hello]:
    """What each host says of itself. Raises BenchError for one that does not answer, or runs another version."""
    found = []
    for number, link in enumerate(links):
        try:
            said = Host(number, link).call("hello", SLOW_S)
        except LostError as e:
            raise BenchError(
                f"host {link.name} does not answer ({e}); expected llm-bench {__version__} there"
            ) from None
        if said.pop("version") != __version__:
            raise BenchError(f"host {link.name} runs another version of llm-bench; expected {__version__} as here")
        found.append(Hello(link.name, **said))
    return found
