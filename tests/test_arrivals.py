"""Stamps of arrival: the kernel's where they can be believed, the clock's where not; and rests between two rounds."""

import asyncio
import os
import select
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable, Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from llm_bench import arrivals, clock, limits
from llm_bench.arrivals import LONGEST_PAUSE_NS, PAUSES_AN_ANSWER, SHORTEST_PAUSE_NS, Arrivals, Source
from llm_bench.clock import Wall, now_ns
from llm_bench.exchange import COMPLETE, Exchange, Timeouts
from llm_bench.wire import Wire
from tests.certificates import make_certificate
from tests.scripted import END, SSE_HEAD, Scripted, sse, token

linux = pytest.mark.skipif(not arrivals.AVAILABLE, reason="kernel stamps of TCP are Linux's")
Run = Callable[[Coroutine[Any, Any, Any]], Any]
RUNS = [asyncio.run, clock.run]
NOW_NS = 50_000_000_000
AHEAD_NS = 1_700_000_000_000_000_000


class Stamped:
    """A socket whose kernel says what it is told to say."""

    def __init__(self, came_ns: int | None, out_of_order: int = 0, info: int = 240) -> None:
        self.came_ns, self.out_of_order, self.info = came_ns, out_of_order, info

    def setsockopt(self, *_: int) -> None:
        pass

    def fileno(self) -> int:
        return 7

    def recvmsg(self, size: int, room: int) -> tuple[bytes, list[tuple[int, int, bytes]], int, None]:
        if self.came_ns is None:
            return b"bytes", [], 0, None
        stamp = struct.pack("qq", *divmod(AHEAD_NS + self.came_ns, 1_000_000_000))
        return b"bytes", [(socket.SOL_SOCKET, 35, stamp)], 0, None

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert size == 228  # up to and with tcpi_rcv_ooopack
        return (b"\xff" * 224 + self.out_of_order.to_bytes(4, sys.byteorder))[: min(size, self.info)]


MS = 1_000_000
STAMPS = {
    # the kernel's stamp, when nothing was there to read, the clock's offset: the stamp of the read
    "it came a moment ago": (Stamped(NOW_NS - 300_000), NOW_NS - 5 * MS, AHEAD_NS, NOW_NS - 300_000),
    "it came while the loop was held up": (Stamped(NOW_NS - 80 * MS), NOW_NS - 90 * MS, AHEAD_NS, NOW_NS - 80 * MS),
    "a segment that another overtook": (Stamped(NOW_NS - 80 * MS, 1), NOW_NS - 90 * MS, AHEAD_NS, NOW_NS),
    "a Linux that does not count those": (Stamped(NOW_NS - 80 * MS, 0, 192), NOW_NS - 90 * MS, AHEAD_NS, NOW_NS),
    "before a look that found nothing": (Stamped(NOW_NS - 300_000), NOW_NS - 200_000, AHEAD_NS, NOW_NS),
    "later than now": (Stamped(NOW_NS + 1), NOW_NS - 5 * MS, AHEAD_NS, NOW_NS),
    "the wall clock was set": (Stamped(NOW_NS - 300_000), NOW_NS - 5 * MS, 0, NOW_NS),
    "no stamp": (Stamped(None), NOW_NS - 5 * MS, AHEAD_NS, NOW_NS),
}


@linux
@pytest.mark.parametrize("case", STAMPS)
def test_a_kernels_stamp_is_believed_only_where_nothing_speaks_against_it(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sock, looked_ns, ahead_ns, right_ns = STAMPS[case]
    monkeypatch.setattr(arrivals, "now_ns", lambda: NOW_NS)
    assert Source(sock).read(ahead_ns, looked_ns) == (b"bytes", right_ns)  # type: ignore[arg-type]


@linux
def test_segments_out_of_order_are_held_against_the_reads_since_the_last_look_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sock = Stamped(NOW_NS - 80 * MS, out_of_order=3)
    source = Source(sock)  # type: ignore[arg-type]
    monkeypatch.setattr(arrivals, "now_ns", lambda: NOW_NS)
    assert source.read(AHEAD_NS, 0)[1] == NOW_NS
    assert source.read(AHEAD_NS, 0)[1] == NOW_NS - 80 * MS  # none came since
    sock.out_of_order = 4
    assert source.read(AHEAD_NS, 0)[1] == NOW_NS


@linux
def test_this_kernel_keeps_the_counter_where_it_is_looked_for() -> None:
    """On loopback nothing overtakes: a wrong place in struct tcp_info would hold another, moving figure."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            source = Source(ours)
            for k in range(20):
                theirs.sendall(b"x" * (1 + 997 * k))
                time.sleep(0.001)
                ours.recv(65536)
                assert source._in_order()


@linux
@pytest.mark.parametrize("run", RUNS)
def test_what_came_while_the_loop_was_held_up_has_the_time_at_which_it_came(run: Run) -> None:
    with Scripted(
        [(0, SSE_HEAD + sse(token("a"))), (60, sse(token("b"))), (600, sse(token("c"), "[DONE]") + END)]
    ) as server:

        async def main() -> tuple[Exchange, int]:
            first = asyncio.Event()

            def is_token(data: bytes) -> bool:
                first.set()
                return True

            wire = Wire(server.url, "/chat/completions", [], Timeouts(), is_token)
            sending = asyncio.create_task(wire.send(b"Content-Length: 0\r\n\r\n"))
            await first.wait()
            (connection,) = wire.pool.busy
            select.select([connection.transport.get_extra_info("socket").fileno()], [], [], 10)
            time.sleep(0.1)  # what has come lies there, and the loop does not look
            held_ns = now_ns()
            exchange = await sending
            wire.close()
            await asyncio.sleep(0)
            return exchange, held_ns

        exchange, held_ns = run(main())
    assert exchange.ended == COMPLETE
    assert exchange.read_ns[1] < held_ns - 90 * MS
    assert exchange.end_ns > held_ns


@linux
@pytest.mark.parametrize("run", RUNS)
def test_under_tls_the_transport_reads_and_the_clock_stamps(run: Run, tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    key, cert = make_certificate(tmp_path)
    context.load_cert_chain(cert, key)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(SSE_HEAD + sse(token("a"), "[DONE]") + END)

    async def main() -> tuple[Exchange, str]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        wire = Wire(f"https://127.0.0.1:{port}/v1", "/", [], Timeouts(), lambda _: True, insecure=True)
        exchange = await wire.send(b"Content-Length: 0\r\n\r\n")
        stamps = wire.stamps
        wire.close()
        server.close()
        await asyncio.sleep(0.01)
        return exchange, stamps

    exchange, stamps = run(main())
    assert exchange.ended == COMPLETE, exchange.error
    assert stamps == "clock"


# ---- rests between two rounds


@linux
@pytest.mark.parametrize("run", RUNS)
def test_a_busy_loop_rests_between_rounds_and_one_with_short_answers_does_not(run: Run) -> None:
    """A pipe that is never emptied is always ready: how soon the loop looks again is all that differs."""

    async def rounds(answer_ns: int, count: int) -> list[int]:
        source, sink = os.pipe()
        os.write(sink, b"x")
        looks: list[int] = []
        enough = asyncio.Event()
        watched = Arrivals()
        watched.answer_ns = answer_ns

        def look(ahead_ns: int, looked_ns: int) -> None:
            looks.append(now_ns())
            if len(looks) >= count:
                enough.set()

        watched.add(source, look)
        await enough.wait()
        watched.drop(source)
        watched.close()
        os.close(source)
        os.close(sink)
        return looks

    looks = run(rounds(2_000_000_000, 40))  # two seconds an answer: the longest rest
    assert looks[-1] - looks[1] >= 37 * LONGEST_PAUSE_NS  # the first two say that the loop is busy
    looks = run(rounds(PAUSES_AN_ANSWER * SHORTEST_PAUSE_NS - 1, 2000))
    assert min(b - a for a, b in pairwise(looks)) < SHORTEST_PAUSE_NS


@linux
@pytest.mark.parametrize("run", RUNS)
def test_a_loop_that_rested_hears_what_comes_after_a_silence(run: Run) -> None:
    async def main() -> None:
        source, sink = os.pipe()
        heard: asyncio.Queue[bytes] = asyncio.Queue()
        watched = Arrivals()
        watched.answer_ns = 10_000_000_000
        watched.add(source, lambda *_: heard.put_nowait(os.read(source, 1)))
        for _ in range(3):
            os.write(sink, b"many bytes")
            async with asyncio.timeout(20):
                assert b"".join([await heard.get() for _ in range(10)]) == b"many bytes"
            await asyncio.sleep(0.005)
        watched.close()
        watched.drop(source)  # as a connection does that is lost after the end
        os.close(source)
        os.close(sink)

    run(main())


@linux
def test_more_sockets_than_one_look_shows_by_default_are_all_seen() -> None:
    """What a look did not show counts as having had nothing to read."""

    async def main() -> None:
        pipes = [os.pipe() for _ in range(1100)]  # epoll.poll shows 1,023 unless told otherwise
        seen: set[int] = set()
        watched = Arrivals()
        for source, sink in pipes:
            os.write(sink, b"x")
            watched.add(source, lambda *_, fd=source: seen.add(fd))
        watched.look()
        assert len(seen) == len(pipes)
        watched.close()
        for ends in pipes:
            for fd in ends:
                os.close(fd)

    limits.raise_file_limit(2300)
    asyncio.run(main())


# ---- the wall clock


def test_a_wall_clock_that_is_set_is_noticed_once_and_a_stop_between_two_looks_is_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {"ns": 1_000, "ahead": AHEAD_NS, "stop": 0}

    def tick() -> int:
        times["ns"] += 40
        return times["ns"]

    def wall_ns() -> int:
        times["ns"] += times["stop"]
        times["stop"] = 0
        return times["ns"] + times["ahead"]

    monkeypatch.setattr(clock, "now_ns", tick)
    monkeypatch.setattr(clock.time, "time_ns", wall_ns)
    wall = Wall()
    assert not wall.stepped()
    times["stop"] = 3_000_000
    assert not wall.stepped() and wall.ahead_ns == AHEAD_NS
    times["ahead"] += 1_000_000_000
    assert wall.stepped() and not wall.stepped()
    assert wall.ahead_ns == AHEAD_NS + 1_000_000_000
