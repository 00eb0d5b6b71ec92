"""Runs a command on one core and says what its whole process tree cost; starts the server that is measured against."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_POLL_S = 0.05  # of the tree's memory: a peak that is shorter is missed, processor time is not
_LEAVE_S = 3.0  # what the client leaves running gets this long to end by itself
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Ran(NamedTuple):
    """One run of a client. Processor time is user + system of every process it started; memory the sum of their RSS."""

    begun_ns: int
    wall_s: float
    cpu_s: float
    peak_rss_bytes: int  # pages that processes share count once in each
    processes: int  # at the peak
    exit_code: int  # negative: ended by that signal
    timed_out: bool


def adopt_orphans() -> None:
    """Become the parent of what a client leaves behind: its processor time would else be lost."""
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError("prctl(PR_SET_CHILD_SUBREAPER) failed")


def run(command: Sequence[str], core: int, limit_s: float, log: Path, env: Mapping[str, str], cwd: Path) -> Ran:
    """Run `command` pinned to `core`; its output goes to `log`. Past `limit_s` it gets SIGTERM, then SIGKILL.

    wait4 gives the command's own time and that of all descendants it waited for; those it did not wait for become our
    children and are added.
    """
    ours = set(_children(os.getpid()))
    with log.open("wb") as out:
        begun_ns = time.monotonic_ns()
        pinned = ["taskset", "-c", str(core), *command]
        child = subprocess.Popen(
            pinned, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            env=dict(env), cwd=cwd,
        )  # fmt: skip
    peak, processes, timed_out, usage = 0, 0, False, None
    try:
        while True:
            pid, status, used = os.wait4(child.pid, os.WNOHANG)
            if pid:
                usage = used
                break
            rss, count = _memory(child.pid)
            if rss > peak:
                peak, processes = rss, count
            if not timed_out and time.monotonic_ns() - begun_ns > limit_s * 1e9:
                timed_out = True
                _end(child.pid)
            time.sleep(_POLL_S)
    finally:
        if usage is None:  # we were interrupted: nothing of ours goes on alone
            _end(child.pid)
    wall_s = (time.monotonic_ns() - begun_ns) / 1e9
    child.returncode = os.waitstatus_to_exitcode(status)
    cpu_s = usage.ru_utime + usage.ru_stime
    deadline = time.monotonic() + _LEAVE_S
    while left := set(_children(os.getpid())) - ours:
        for orphan in left:
            if time.monotonic() > deadline:
                _end(orphan)
            pid, _, usage = os.wait4(orphan, os.WNOHANG)
            cpu_s += usage.ru_utime + usage.ru_stime if pid else 0.0
        time.sleep(0.02)
    return Ran(begun_ns, wall_s, cpu_s, peak, max(processes, 1), child.returncode, timed_out)


def _end(pid: int) -> None:
    """SIGTERM to a whole tree, and SIGKILL to what is left of it two seconds later."""
    tree = list(_tree(pid))
    for number, wait_s in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 0.0)):
        for member in tree:
            with suppress(ProcessLookupError):
                os.kill(member, number)
        time.sleep(wait_s)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    except OSError:  # it has ended meanwhile
        pass
    return found


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for child in _children(pid):
        yield from _tree(child)


def _memory(pid: int) -> tuple[int, int]:
    """Bytes resident in a tree, and how many processes it has."""
    total = count = 0
    for member in _tree(pid):
        try:
            total += int(Path(f"/proc/{member}/statm").read_text().split()[1]) * _PAGE_BYTES
            count += 1
        except OSError:
            continue
    return total, count


class Server(NamedTuple):
    url: str  # http://127.0.0.1:PORT/v1
    truth: Path


@contextmanager
def server(core: int, truth: Path, ttft_ms: float, itl_ms: float) -> Iterator[Server]:
    """The null target in a process of its own, pinned to `core`; `truth` is whole once the block has ended."""
    command = ["taskset", "-c", str(core), sys.executable, "-m", "llm_bench.null_target", "--exit-with-stdin"]
    command += ["--truth", str(truth), "--ttft-ms", str(ttft_ms), "--itl-ms", str(itl_ms)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin and child.stdout
        try:
            yield Server(json.loads(child.stdout.readline())["listening"], truth)
        finally:
            child.stdin.close()


def machine() -> dict[str, Any]:
    """What a reader must know of the machine: no host name, no user."""
    names = [x.partition(":")[2].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
    return {
        "cpu": names[0] if names else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES / 2**30, 1),
        "load_before": os.getloadavg()[0],
        "python": sys.version.split()[0],
    }
