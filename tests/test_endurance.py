"""bench.endurance in small, and that it would find what it looks for."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from bench.endurance import GROWTH_BYTES, Client, Found, endure
from tests.test_engine_server import Program, call, end, launch


@pytest.fixture
def program() -> Iterator[Program]:
    started = launch("--allow-faults")
    yield started
    assert started.process.stdin
    assert started.process.stderr
    started.process.stdin.close()
    assert b"Traceback" not in started.process.stderr.read()
    assert end(started) == 0


def test_500_clients_that_come_and_go_cost_nobody_anything(program: Program) -> None:
    found = asyncio.run(endure(program.port, program.process.pid, 500, 3.0, 20))
    assert found.faults == []
    assert set(found.outcomes) == {"connect", "headers", "tokens", "stays"}
    assert found.outcomes["stays"] > 200
    assert (found.free_blocks, found.check) == (2048, "ok")


def test_answers_that_are_cut_are_found(program: Program) -> None:
    async def main() -> Found:

        await call(program.port, "/fault", {"kind": "cut_stream", "how": "fin", "after": 5, "share": 0.2})
        return await endure(program.port, program.process.pid, 50, 0.2, 20)

    found = asyncio.run(main())
    assert found.outcomes["wrong"] > 2
    assert found.faults[0].startswith("wrong: b'HTTP/1.1 200 OK")


def test_what_was_not_given_back_is_a_fault() -> None:
    well = Found({"stays": 5}, 10**9, 10**9 + GROWTH_BYTES, 64, 64, "ok", [])
    assert well.faults == []
    ill = well._replace(rss_after_bytes=10**9 + GROWTH_BYTES + 2**20, free_blocks=60, check="free list", wrong=["x"])
    assert ill.faults == ["x", "memory grew by 21.0 MiB", "4 blocks are missing", "check: free list"]


def test_where_there_is_no_engine_that_is_said() -> None:
    client = Client(1, 5)

    asyncio.run(client.one(np.random.default_rng(1)))
    assert client.outcomes == {"no connection": 1}
