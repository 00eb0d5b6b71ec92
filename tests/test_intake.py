"""What comes in with a request: a body packed or not, to its limits and no further; the client's own id."""

import asyncio
import gzip
import json
import re
import socket
import threading
import time
import tracemalloc
import zlib
from dataclasses import replace
from typing import Any

import pytest

from reference_engine import intake
from reference_engine.intake import MAX_BODY_BYTES, SMALL_BODY_BYTES
from reference_engine.openai_api import ApiError
from tests.test_engine_server import COMPLETIONS, CONFIG, Reply, call, metric, request_bytes, serving, until

IMPATIENT = replace(CONFIG, client_timeout=1)
BODY = b'{"prompt": "x", "max_tokens": 1}'


async def packed(port: int, data: bytes, name: str) -> Reply:
    return await call(port, COMPLETIONS, data, {"Content-Encoding": name})


def test_a_body_over_the_limit_is_413_packed_or_not() -> None:
    body = b'{"prompt": "' + b"x" * MAX_BODY_BYTES + b'"}'

    async def main() -> None:
        async with serving() as served:
            for data, name in ((body, "identity"), (gzip.compress(body), "gzip")):
                reply = await packed(served.port, data, name)
                assert (reply.status, reply.json["error"]["code"]) == (413, 413)

    asyncio.run(main())


def test_a_packed_body_is_unpacked() -> None:
    async def main() -> None:
        async with serving() as served:
            for name, data in (("gzip", gzip.compress(BODY)), ("deflate", zlib.compress(BODY)), ("identity", BODY)):
                assert (await packed(served.port, data, name)).status == 200
            for data in (gzip.compress(BODY)[:-1], gzip.compress(BODY) + b"x", b"", b"x"):
                reply = await packed(served.port, data, "gzip")
                assert reply.status == 400
                assert reply.json["error"]["message"].startswith("the body cannot be read:")
            for name in ("br", "zstd", "gzip, gzip"):
                reply = await packed(served.port, BODY, name)
                assert (reply.status, reply.json["error"]["param"]) == (415, "Content-Encoding")

    asyncio.run(main())


def test_unpacking_ends_at_the_limit() -> None:
    assert sum(map(len, intake.unpacked(gzip.compress(bytes(MAX_BODY_BYTES)), "gzip"))) == MAX_BODY_BYTES
    bomb = gzip.compress(bytes(4 * MAX_BODY_BYTES))  # in a thousandth
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match="more than 16777216 bytes when unpacked"):
            list(intake.unpacked(bomb, "gzip"))
        assert tracemalloc.get_traced_memory()[1] < 3 * MAX_BODY_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("packed_too", [False, True])
def test_all_bodies_together_have_a_limit_and_small_ones_always_have_room(packed_too: bool) -> None:
    """Counted as they come; who leaves or has been answered makes room."""

    async def main() -> None:
        async with serving() as served:
            served.server.bodies.limit = 2**20
            held = SMALL_BODY_BYTES + 700_000
            opened = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(2)]
            (_, writer), (_, only_announces) = opened
            only_announces.write(HEAD % MAX_BODY_BYTES)
            writer.write(HEAD % (held + 1) + b" " * held)
            await until(lambda: served.server.bodies.held == 700_000)

            large = BODY + b" " * held
            headers = {"Content-Encoding": "gzip"} if packed_too else {}
            sent = gzip.compress(large) if packed_too else large
            reply = await call(served.port, COMPLETIONS, sent, headers)
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")
            said = re.fullmatch(
                r"the bodies of all requests together would have (\d+) bytes; expected at most 1048576",
                reply.json["error"]["message"],
            )
            assert said
            assert int(said[1]) > 2**20
            assert await metric(served.port, "reference_engine:refused_total", reason="bodies") == 1
            assert served.log[-1]["outcome"] == "bodies"
            assert (await call(served.port, COMPLETIONS, BODY + b" " * (SMALL_BODY_BYTES - len(BODY)))).status == 200
            assert served.server.bodies.held == 700_000

            writer.close()
            await until(lambda: not served.server.bodies.held)
            assert (await call(served.port, COMPLETIONS, sent, headers)).status == 200
            assert served.server.bodies.held == 0
            only_announces.close()

    asyncio.run(main())


def test_an_answer_keeps_nothing_of_its_requests_body() -> None:
    """Of 8 MB that stand in fields that nobody knows; a stream may last for hours."""
    go_on = threading.Event()

    async def main() -> None:
        async with serving(before=lambda: go_on.wait(60)) as served:
            tracemalloc.start()
            try:
                messages = [{"role": "user", "content": "x", "own": "y" * 4_000_000}]
                body = json.dumps(
                    {"messages": messages, "own": "z" * 4_000_000, "max_tokens": 1, "stream": True}
                ).encode()
                reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
                writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
                writer.write(body)
                await writer.drain()
                del messages, body
                await reader.readline()
                await until(lambda: served.server.bodies.held == 0 and tracemalloc.get_traced_memory()[0] < 2_000_000)
            finally:
                go_on.set()
                tracemalloc.stop()
            writer.close()
            await until(lambda: served.log)

    asyncio.run(main())


def test_a_body_that_is_announced_too_large_is_not_waited_for() -> None:
    async def main() -> None:
        async with serving() as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
            assert (await reader.readline()).split()[1] == b"413"
            writer.close()

    asyncio.run(main())


def test_a_body_that_does_not_come_is_408() -> None:
    async def main() -> None:
        async with serving(IMPATIENT) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(request_bytes(COMPLETIONS, b"{")[:-1])
            assert (await reader.readline()).split()[1] == b"408"
            error = (await until_json(reader))["error"]
            assert (error["code"], error["message"]) == (408, "the body took longer than 1 s")
            writer.close()
            assert served.log[0]["outcome"] == "refused"

    async def until_json(reader: asyncio.StreamReader) -> Any:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(re.search(rb"Content-Length: (\d+)", head)[1])  # type: ignore[index]
        return json.loads(await reader.readexactly(size))

    asyncio.run(main())


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


def test_who_sends_no_whole_head_in_time_is_cut_off_and_who_is_answered_is_not() -> None:
    """Before the first request and after one; a stream goes on however long it takes."""

    async def main() -> None:
        async with serving(IMPATIENT, before=lambda: time.sleep(0.02)) as served:
            body = json.dumps({"prompt": [1], "max_tokens": 100, "stream": True}).encode()
            beginnings = [b"", b"POST /v1/comp", HEAD[:-4] % 1, request_bytes("/health", None) + b"GET /h"]
            streams = [HEAD % len(body) + body]
            opened = [await asyncio.open_connection("127.0.0.1", served.port) for _ in beginnings + streams]
            for (_, writer), begun in zip(opened, beginnings + streams, strict=True):
                writer.write(begun)
            *cut, streamed = [await asyncio.wait_for(reader.read(-1), 30) for reader, _ in opened]
            assert [got[:15] for got in cut] == [b"", b"", b"", b"HTTP/1.1 200 OK"]
            assert streamed.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert len(served.log) == 1
            for _, writer in opened:
                writer.close()

    asyncio.run(main())


def test_many_who_never_finish_a_request_keep_nobody_from_being_served() -> None:
    async def main() -> None:
        async with serving(IMPATIENT) as served:
            # Two descriptors each, of the 1024 that a process has at first.
            opened = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(300)]
            for i, (_, writer) in enumerate(opened):
                writer.write((b"", b"POST /v1/comp", HEAD % 2**20 + bytes(1000))[i % 3])
            assert (await call(served.port, COMPLETIONS, {"prompt": [1], "max_tokens": 1})).status == 200
            for reader, _ in opened:
                got = await asyncio.wait_for(reader.read(12), 30)
                assert got in (b"", b"HTTP/1.1 408")
            for _, writer in opened:
                writer.close()
            assert served.server.open == 0

    asyncio.run(main())


def test_who_reads_nothing_is_cut_off() -> None:
    """What was made for him is kept no longer: 64 answers of 700 tokens are more than the sockets hold."""

    async def main() -> None:
        async with serving(IMPATIENT) as served:
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.connect(("127.0.0.1", served.port))
                body = json.dumps({"prompt": [1] * 10, "max_tokens": 700, "n": 64, "stream": True}).encode()
                sock.sendall(HEAD % len(body) + body)
                await until(lambda: served.log)
            assert served.log[0]["outcome"] == "abort"

    asyncio.run(main())


def test_a_system_without_that_limit_serves_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "TCP_USER_TIMEOUT")

    async def main() -> None:
        async with serving() as served:
            assert (await call(served.port, COMPLETIONS, {"prompt": [1], "max_tokens": 1})).status == 200

    asyncio.run(main())


@pytest.mark.parametrize("value", [b"\xe9\xff", b"x" * 129, b"a\tb", b"x" * 5000, b"\xf0\x9f\x98\x80"])
def test_a_request_id_that_is_unfit_is_replaced(value: bytes) -> None:
    async def main() -> None:
        async with serving() as served:
            for body in (b'{"prompt":"x","max_tokens":1,"stream":true}', b"{"):
                reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
                head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: %b\r\nContent-Length: %d\r\n"
                writer.write(head % (value, len(body)) + b"Connection: close\r\n\r\n" + body)
                got = await reader.read(-1)
                writer.close()
                assert got.split(b" ")[1] in (b"200", b"400")
                assert value not in got

    asyncio.run(main())
