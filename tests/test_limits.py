"""Faults of the measuring machine, in processes of their own whose limits are lowered."""

import errno
import json
import subprocess
import sys
from typing import Any

import pytest

from llm_bench.errors import BenchError, ClientLimit
from llm_bench.limits import client_limit
from tests.scripted import Scripted, http_response


def in_a_process(script: str, soft: int, hard: int, *arguments: str) -> Any:
    """What `script` printed as JSON, run under these limits of open files."""
    lowered = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
    ran = subprocess.run(
        [sys.executable, "-c", lowered + script, *arguments], capture_output=True, text=True, timeout=180
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


RAISING = """
import json, sys
from llm_bench.errors import ClientLimit
from llm_bench.limits import raise_file_limit
error = ""
try:
    raise_file_limit(int(sys.argv[1]), strict=sys.argv[2] == "strict")
except ClientLimit as e:
    error = str(e)
print(json.dumps([resource.getrlimit(resource.RLIMIT_NOFILE)[0], error]))
"""


def test_the_soft_limit_of_files_is_raised_to_what_is_needed_and_never_lowered() -> None:
    assert in_a_process(RAISING, 64, 256, "200", "strict") == [200, ""]
    assert in_a_process(RAISING, 64, 256, "256", "strict") == [256, ""]
    assert in_a_process(RAISING, 64, 256, "20", "strict") == [64, ""]


def test_a_hard_limit_below_the_need_is_refused_with_both_figures_and_the_way_out() -> None:
    soft, error = in_a_process(RAISING, 64, 256, "1064", "strict")
    assert soft == 64
    for word in ("1064 open files", "hard limit", "256", "`ulimit -n 1064`"):
        assert word in error
    assert in_a_process(RAISING, 64, 256, "1064", "as far as it goes") == [256, ""]


DRIVING = """
import asyncio, json, sys, uvloop
from types import SimpleNamespace
from llm_bench.driver import closed_loop
from llm_bench.errors import ClientLimit
from llm_bench.exchange import Timeouts
from llm_bench.retry import retrying
from llm_bench.wire import Wire

class Plan:
    first, next_turn, due_ns, think_ns = range(400), [-1] * 400, [-1] * 400, [-1] * 400
    __len__ = lambda self: 400
    payload = lambda self, index, previous: b"Content-Length: 2\\r\\n\\r\\n{}"
    cancel_s = lambda self, index: None

async def main():
    wire, ended, error = Wire(sys.argv[1], "/c", [], Timeouts(), None), [], ""
    try:
        await closed_loop(
            Plan(), retrying(wire.send, 3), lambda flight: ended.append(flight.tried.exchange.ended),
            concurrency=100, warmup=0, ramp_s=1.0, duration_s=None, drain_s=None, stop=asyncio.Event(),
        )
    except ClientLimit as e:
        error = f"{type(e).__name__} {e}"
    wire.close()
    return [sorted(set(ended)), error]

print(json.dumps({"asyncio": asyncio.run, "uvloop": uvloop.run}[sys.argv[2]](main())))
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_client_out_of_files_stops_the_drive_keeps_what_was_measured_and_blames_no_target(loop: str) -> None:
    with Scripted([(100, http_response(200, b"{}"))]) as server:
        ended, error = in_a_process(DRIVING, 40, 40, server.url, loop)
    assert error.startswith("ClientLimit no connection to 127.0.0.1: ")
    assert "this process may open 40 files; `ulimit -n`" in error
    assert ended == ["complete", "cut"]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM])
def test_what_this_machine_lacks_is_named_with_a_way_out(number: int) -> None:
    limit = client_limit(OSError(number, "said the kernel"), "10.0.0.1", False)
    assert isinstance(limit, ClientLimit)
    assert "said the kernel: this " in str(limit)
    assert limit.exit_code == BenchError.exit_code


@pytest.mark.parametrize("number", [errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ETIMEDOUT])
def test_what_the_other_side_did_is_no_limit_of_this_machine(number: int) -> None:
    assert client_limit(OSError(number, ""), "10.0.0.1", True) is None


def test_an_ipv6_address_on_a_machine_without_ipv6_is_no_lack_of_ports() -> None:
    error = OSError(errno.EADDRNOTAVAIL, "")
    assert client_limit(error, "::1", False) is None
    assert client_limit(error, "::1", True) is not None
