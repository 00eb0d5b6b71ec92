"""Stamps of arrival: the kernel's where they can be believed, the clock's where not; and rests between two rounds."""

import asyncio
import contextlib
import json
import os
import select
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from llm_bench import arrivals, clock, limits
from llm_bench.arrivals import COUNTED, LONGEST_REST_NS, MUCH_BYTES, RESTS_AN_ANSWER, SHORTEST_REST_NS, Arrivals, Source
from llm_bench.clock import Wall, now_ns
from llm_bench.connection import Connection
from llm_bench.exchange import CLOSED, COMPLETE, TRUNCATED, Exchange, Timeouts
from llm_bench.wire import Wire
from tests.certificates import make_certificate
from tests.quiet import undisturbed
from tests.scripted import END, SSE_HEAD, Scripted, sse, token

linux = pytest.mark.skipif(not arrivals.AVAILABLE, reason="kernel stamps of TCP are Linux's")
Run = Callable[[Coroutine[Any, Any, Any]], Any]
RUNS = [asyncio.run, clock.run]
NOW_NS = 50_000_000_000
AHEAD_NS = 1_700_000_000_000_000_000


class Stamped:
    """A socket that can be waited for, whose kernel says what it is told to say."""

    def __init__(self, came_ns: int | None, out_of_order: int = 0, info: int = 240) -> None:
        self.came_ns, self.out_of_order, self.info = came_ns, out_of_order, info
        self.data = b"bytes"
        self.ends = os.pipe()
        os.write(self.ends[1], b"x")

    def close(self) -> None:
        for fd in self.ends:
            os.close(fd)

    def setsockopt(self, *_: int) -> None:
        pass

    def fileno(self) -> int:
        return self.ends[0]

    def recvmsg(self, size: int, room: int) -> tuple[bytes, list[tuple[int, int, bytes]], int, None]:
        if self.came_ns is None:
            return self.data, [], 0, None
        stamp = struct.pack("qq", *divmod(AHEAD_NS + self.came_ns, 1_000_000_000))
        return self.data, [(socket.SOL_SOCKET, 35, stamp)], 0, None

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert size == 228  # up to and with tcpi_rcv_ooopack
        return (b"\xff" * 224 + self.out_of_order.to_bytes(4, sys.byteorder))[: min(size, self.info)]


MS = 1_000_000
STAMPS: dict[str, tuple[dict[str, Any], int, bool, int]] = {
    # what the kernel says, when nothing was there yet, has the wall clock been set: the stamp of the read; from now
    "it came a moment ago": ({"came_ns": -MS}, -5 * MS, False, -MS),
    "it came while the loop was held up": ({"came_ns": -80 * MS}, -90 * MS, False, -80 * MS),
    "a segment that another overtook": ({"came_ns": -80 * MS, "out_of_order": 1}, -90 * MS, False, 0),
    "a Linux that does not count those": ({"came_ns": -80 * MS, "info": 192}, -90 * MS, False, 0),
    "before a look that found nothing": ({"came_ns": -MS}, -MS // 2, False, 0),
    "later than now": ({"came_ns": 1}, -5 * MS, False, 0),
    "the wall clock was set": ({"came_ns": -MS}, -5 * MS, True, 0),
    "no stamp": ({"came_ns": None}, -5 * MS, False, 0),
}


def stamps_of(sock: Stamped, looks: int, looked_ns: int, stepped: bool, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of so many reads at NOW_NS, from NOW_NS."""
    stamps: list[int] = []
    monkeypatch.setattr(Wall, "stepped", lambda _: stepped)

    async def main() -> None:
        watched = Arrivals()
        watched._wall.ahead_ns = AHEAD_NS
        watched.add(Source(sock, lambda data, came_ns: stamps.append(came_ns - NOW_NS), pytest.fail))  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr(arrivals, "now_ns", lambda: NOW_NS)
            for _ in range(looks):
                watched._looked_ns = NOW_NS + looked_ns
                watched.look()
        watched.close()

    asyncio.run(main())
    return stamps


@linux
@pytest.mark.parametrize("case", STAMPS)
def test_a_kernels_stamp_is_believed_only_where_nothing_speaks_against_it(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, looked_ns, stepped, right_ns = STAMPS[case]
    if said["came_ns"] is not None:
        said = said | {"came_ns": NOW_NS + said["came_ns"]}
    with contextlib.closing(Stamped(**said)) as sock:
        assert stamps_of(sock, 1, looked_ns, stepped, monkeypatch) == [right_ns]


@linux
def test_segments_out_of_order_are_held_against_the_reads_since_the_last_question_only() -> None:
    with contextlib.closing(Stamped(NOW_NS, out_of_order=3)) as sock:
        source = Source(sock, pytest.fail, pytest.fail)  # type: ignore[arg-type]
        assert [source.in_order() for _ in range(3)] == [False, True, True]
        sock.out_of_order = 4
        assert [source.in_order() for _ in range(2)] == [False, True]


@linux
def test_stamps_of_one_connection_never_run_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(Stamped(NOW_NS - 80 * MS, out_of_order=1)) as sock:  # overtook, so that the clock stamps
        assert stamps_of(sock, 3, -90 * MS, False, monkeypatch) == [0, 0, 0]


@linux
def test_a_loop_whose_kernel_stamps_nothing_does_not_say_that_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(came_ns: int | None) -> str:
        monkeypatch.setattr(arrivals, "now_ns", lambda: NOW_NS)
        wire = Wire("http://127.0.0.1:9/v1", "/", [], Timeouts(), None)
        wire.pool.arrivals = watched = Arrivals()
        watched._wall.ahead_ns = AHEAD_NS
        with contextlib.closing(Stamped(came_ns)) as sock:
            watched.add(Source(sock, lambda *_: None, pytest.fail))  # type: ignore[arg-type]
            watched.look()
            watched.close()
        return wire.stamps

    monkeypatch.setattr(Wall, "stepped", lambda _: False)
    assert asyncio.run(main(None)) == "clock"
    assert asyncio.run(main(NOW_NS - MS)) == "kernel"


@linux
def test_a_mistake_of_ours_in_one_reader_is_told_to_it_and_the_others_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[object] = []

    def fails(data: bytes, came_ns: int) -> None:
        raise ZeroDivisionError

    async def main() -> None:
        with contextlib.closing(Stamped(None)) as one, contextlib.closing(Stamped(None)) as other:
            watched = Arrivals()
            watched.add(Source(one, fails, lambda why: heard.append(type(why))))  # type: ignore[arg-type]
            watched.add(Source(other, lambda data, came_ns: heard.append(data), pytest.fail))  # type: ignore[arg-type]
            watched.look()
            watched.close()

    asyncio.run(main())
    assert sorted(map(str, heard)) == [str(ZeroDivisionError), str(b"bytes")]


@linux
def test_this_kernel_keeps_the_counter_where_it_is_looked_for() -> None:
    """On loopback nothing overtakes: a place with a moving figure would be noticed; its neighbours are 0 here too."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            source = Source(ours, pytest.fail, pytest.fail)
            for k in range(20):
                theirs.sendall(b"x" * (1 + 997 * k))
                time.sleep(0.001)
                ours.recv(65536)
                assert source.in_order()


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


@pytest.mark.parametrize("run", RUNS)
def test_an_answer_given_before_the_request_was_read_is_read_where_the_write_fails(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An early 413: the server closes with most of the body unread, which resets the connection under our write."""
    monkeypatch.setattr(Arrivals, "look", lambda self: None)  # it rests all the time
    answer = b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\n{}"

    def serve(server: socket.socket) -> None:
        peer, _ = server.accept()
        peer.recv(1000)
        peer.sendall(answer)
        peer.close()

    async def main() -> list[Exchange]:
        got = []
        for _ in range(20):
            with socket.create_server(("127.0.0.1", 0)) as server:
                thread = threading.Thread(target=serve, args=(server,))
                thread.start()
                wire = Wire(f"http://127.0.0.1:{server.getsockname()[1]}/v1", "/", [], Timeouts(), None)
                body = bytes(8_000_000)
                got.append(await wire.send(b"Content-Length: %d\r\n\r\n" % len(body) + body))
                wire.close()
                await asyncio.sleep(0)
                thread.join()
        return got

    assert {exchange.status for exchange in run(main())} == {413}


@linux
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("how", "limits", "ended", "error"),
    [
        ("reset", Timeouts(ttft_s=2.0, stall_s=60.0), TRUNCATED, "ConnectionResetError"),
        ("close", Timeouts(total_s=2.0), CLOSED, ""),
    ],
)
def test_an_end_that_is_found_where_a_limit_is_looked_at_is_what_it_was(
    run: Run, how: str, limits: Timeouts, ended: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells a reset once; of an answer that only a close delimits, the next read would find the end."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    events = [b"data: %b\n\n" % json.dumps(token(text)).encode() for text in "ab"]
    look, ring = Arrivals.look, Connection._ring
    held = threading.Event()

    def rung(connection: Connection) -> None:
        ring(connection)
        held.clear()

    monkeypatch.setattr(Arrivals, "look", lambda self: None if held.is_set() else look(self))
    monkeypatch.setattr(Connection, "_ring", rung)
    with Scripted([(0, head + events[0]), (50, events[1]), how]) as server:

        async def main() -> Exchange:
            def is_token(data: bytes) -> bool:
                held.set()
                return True

            wire = Wire(server.url, "/", [], limits, is_token)
            exchange = await wire.send(b"Content-Length: 0\r\n\r\n")
            wire.close()
            await asyncio.sleep(0)
            return exchange

        exchange = run(main())
    assert exchange.ended == ended
    assert exchange.error.partition(":")[0] == error
    assert b"".join(exchange.pieces) == b"".join(events)


@linux
@pytest.mark.parametrize("run", RUNS)
def test_a_wire_that_was_closed_can_send_again(run: Run) -> None:
    with Scripted([(0, SSE_HEAD + sse(token("a"), "[DONE]") + END)]) as server:

        async def main() -> list[str]:
            wire = Wire(server.url, "/chat/completions", [], Timeouts(), lambda _: True)
            ended = []
            for _ in range(2):
                ended.append((await wire.send(b"Content-Length: 0\r\n\r\n")).ended)
                wire.close()
                await asyncio.sleep(0)
            return ended

        assert run(main()) == [COMPLETE, COMPLETE]


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


async def rounds(answer_ns: int, count: int, since_ns: int = 0, data: bytes = b"bytes") -> list[int]:
    """When the loop looked, at eight sockets that are always ready: how soon it looks again is all that differs."""
    ready = [Stamped(None) for _ in range(8)]
    for sock in ready:
        sock.data = data
    looks: list[int] = []
    enough = asyncio.Event()
    watched = Arrivals()
    watched.answer_ns = answer_ns
    watched._begun_ns -= since_ns

    def look(data: bytes, came_ns: int) -> None:
        looks.append(now_ns())
        if len(looks) >= count:
            enough.set()

    sources = [Source(ready[0], look, pytest.fail)]  # type: ignore[arg-type]
    sources += [Source(sock, lambda data, came_ns: None, pytest.fail) for sock in ready[1:]]  # type: ignore[arg-type]
    for source in sources:
        watched.add(source)
    await enough.wait()
    watched.close()
    for source, sock in zip(sources, ready, strict=True):
        watched.drop(source)  # as a connection does that is lost after the end
        sock.close()
    return looks


@linux
@pytest.mark.parametrize("run", RUNS)
@undisturbed
def test_a_busy_loop_rests_between_rounds_and_one_with_short_answers_does_not(run: Run) -> None:
    looks = run(rounds(2_000_000_000, 60))  # two seconds an answer: the longest rest
    begun = COUNTED // 8 + 1
    assert looks[-1] - looks[begun] >= (58 - begun) * LONGEST_REST_NS
    looks = run(rounds(RESTS_AN_ANSWER * SHORTEST_REST_NS - 1, 2000))
    assert min(b - a for a, b in pairwise(looks)) < SHORTEST_REST_NS


@linux
@pytest.mark.parametrize("run", RUNS)
@undisturbed
def test_a_sender_that_waits_for_room_is_not_kept_waiting(run: Run) -> None:
    looks = run(rounds(2_000_000_000, 2000, data=bytes(MUCH_BYTES)))
    assert min(b - a for a, b in pairwise(looks[COUNTED:])) < SHORTEST_REST_NS


@linux
@pytest.mark.parametrize("run", RUNS)
def test_looks_that_take_longer_than_a_rest_leave_the_loop_its_turns(run: Run) -> None:
    async def main() -> None:
        watched = Arrivals()
        watched.answer_ns = 10_000_000_000
        looks = turns = 0
        seen: list[int] = []

        def slow(data: bytes, came_ns: int) -> None:
            nonlocal looks
            looks += 1
            if looks > COUNTED:
                seen.append(turns)
                time.sleep(2 * LONGEST_REST_NS / 1e9)

        def turn() -> None:
            nonlocal turns
            turns += 1
            asyncio.get_running_loop().call_soon(turn)

        with contextlib.closing(Stamped(None)) as sock:
            watched.add(Source(sock, slow, pytest.fail))  # type: ignore[arg-type]
            turn()
            async with asyncio.timeout(60):
                while looks < COUNTED + 40:
                    await asyncio.sleep(0)
            watched.close()
        assert all(a < b for a, b in pairwise(seen))

    run(main())


@linux
@pytest.mark.parametrize("run", RUNS)
@undisturbed
def test_before_the_first_answers_end_they_are_as_long_as_this_has_taken(run: Run) -> None:
    looks = run(rounds(0, 60, since_ns=2_000_000_000))
    assert looks[-1] - looks[COUNTED // 8 + 1] >= (57 - COUNTED // 8) * LONGEST_REST_NS
    looks = run(rounds(0, 2000))  # just begun
    assert min(b - a for a, b in pairwise(looks)) < SHORTEST_REST_NS


@linux
@pytest.mark.parametrize("run", RUNS)
def test_a_loop_that_rested_hears_what_comes_after_a_silence(run: Run) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        watched = Arrivals()
        watched.answer_ns = 10_000_000_000
        heard: asyncio.Queue[bytes] = asyncio.Queue()
        source = Source(ours, lambda data, _: heard.put_nowait(data), pytest.fail)
        source.receive = lambda size, room: (ours.recv(1), [], 0, None)  # type: ignore[misc, assignment]
        watched.add(source)
        for _ in range(3):
            theirs.sendall(b"m" * 2 * COUNTED)
            async with asyncio.timeout(60):
                assert b"".join([await heard.get() for _ in range(2 * COUNTED)]) == b"m" * 2 * COUNTED
            await asyncio.sleep(0.005)
        watched.close()
        ours.close()
        theirs.close()

    run(main())


@linux
def test_more_sockets_than_one_look_shows_by_default_are_all_read() -> None:
    """What a look did not show counts as having had nothing to read."""

    async def main() -> None:
        ready = [Stamped(None) for _ in range(1100)]  # epoll.poll shows 1,023 unless told otherwise
        seen: list[bytes] = []
        watched = Arrivals()
        for sock in ready:
            watched.add(Source(sock, lambda data, _: seen.append(data), pytest.fail))  # type: ignore[arg-type]
        watched.look()
        assert len(seen) == len(ready)
        watched.close()
        for sock in ready:
            sock.close()

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
    assert not wall.stepped() and abs(wall.ahead_ns - AHEAD_NS) <= 40
    times["ahead"] += 1_000_000_000
    assert wall.stepped() and not wall.stepped()
    assert abs(wall.ahead_ns - AHEAD_NS - 1_000_000_000) <= 40
