"""A real server as a process of its own, on loopback, for as long as a block lasts.

with serving(ENGINES["mlserver"], folder) as roots:      # ["http://127.0.0.1:PORT", ...]
"""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

STOP_LIMIT_S = 20.0
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1"}


class Start(NamedTuple):
    """How a server is started; it is ready when `ready` answers 2xx."""

    command: Sequence[str]
    ready: str  # a path
    env: Mapping[str, str] = MappingProxyType({})
    body: bytes | None = None  # posted to `ready`; None: it is got


class Spoken(NamedTuple):
    """What a server is known to do in one protocol. Errors are (error_kind of a record, a part of its text)."""

    api: str  # a row of DIALECTS
    model: str = "m"
    extra: Mapping[str, Any] = MappingProxyType({})  # into every body
    counts: bool = True  # usage is said: prompt and answer
    finish: str = "length"
    pins: bool = True  # lengths are held to
    unknown: tuple[str, str] | None = ("http_4xx", "")  # of a model that is not there; None: any name is served
    too_long: tuple[str, str] | None = None  # of an answer that does not fit; None: it is cut short
    breaks: tuple[str, str] | None = None  # of an answer that is told to fail half-way
    lasts: int = 400  # tokens of an answer that is still on its way after 0.2 s
    port: int = 0  # of the engine's, the one that it is spoken at
    wrong: str = "tgi"  # a protocol that it does not speak; "": another row of the engine has tried it


def nothing() -> str:
    return ""


def as_installed(home: Path) -> None:
    """Of environments in which pip leaves nothing to do."""


class Engine(NamedTuple):
    """A row of ENGINES."""

    name: str
    packages: Sequence[str]  # of its environment, each what one `pip install` is given; (): the tests' own has it
    start: Callable[[Path, Sequence[int]], Start]  # (an empty folder, ports) -> how
    spoken: Sequence[Spoken]
    ports: int = 1  # that it listens on; the first is HTTP
    needs: Callable[[], str] = nothing  # why it cannot be had on this machine
    start_limit_s: float = 120.0
    after: Callable[[Path], None] = as_installed  # the environment's folder, once pip is done


@contextmanager
def serving(engine: Engine, folder: Path) -> Iterator[list[str]]:
    """http://127.0.0.1:PORT of each of its ports, once it is ready.

    The server is a session of its own, all of which is ended with the block.
    """
    ports = free_ports(engine.ports)
    start = engine.start(folder, ports)
    roots = [f"http://127.0.0.1:{port}" for port in ports]
    with ExitStack() as stack:
        log = stack.enter_context((folder / "server.log").open("wb"))
        child = subprocess.Popen(
            start.command,
            stdin=subprocess.PIPE,  # some end with it
            stdout=log,
            stderr=log,
            env={**os.environ, **QUIET, **start.env},
            cwd=folder,
            start_new_session=True,
        )
        stack.callback(_stop, child)
        _until_ready(child, roots[0] + start.ready, start.body, engine.start_limit_s, folder / "server.log")
        yield roots


def free_ports(n: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(n)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _until_ready(child: subprocess.Popen[bytes], url: str, body: bytes | None, limit_s: float, log: Path) -> None:
    begun_s = time.monotonic()
    while time.monotonic() < begun_s + limit_s and child.poll() is None:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"} if body else {})
        try:
            with urllib.request.urlopen(request, timeout=10):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    ended = "still starting" if child.poll() is None else f"ended with {child.returncode}"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    raise RuntimeError(f"{url}: {ended} after {time.monotonic() - begun_s:.0f} s\n{tail}")


def _stop(child: subprocess.Popen[bytes]) -> None:
    """By its session: a server's own children do not always end with it."""
    assert child.stdin
    child.stdin.close()
    try:
        for number, limit_s in ((signal.SIGTERM, STOP_LIMIT_S), (signal.SIGKILL, STOP_LIMIT_S)):
            os.killpg(child.pid, number)
            try:
                child.wait(limit_s)
            except subprocess.TimeoutExpired:
                continue
            os.killpg(child.pid, signal.SIGKILL)  # whoever of it is left
            return
    except ProcessLookupError:
        child.wait(STOP_LIMIT_S)
