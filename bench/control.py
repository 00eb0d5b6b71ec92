"""The floor: a bare Protocol with httptools on uvloop that counts events and bytes, and keeps nothing.

    python -m bench.control URL --concurrency 32 --requests 320 --tokens 100

What a client spends beyond this is the price of its records.
"""

import argparse
import asyncio
import json
from functools import partial
from typing import cast
from urllib.parse import urlsplit

import httptools
import uvloop


class Counts:
    def __init__(self, left: int) -> None:
        self.left, self.answers, self.events, self.bytes = left, 0, 0, 0


class _Slot(asyncio.Protocol):
    """One connection, one request after another until none is left."""

    transport: asyncio.Transport

    def __init__(self, request: bytes, counts: Counts, ended: asyncio.Future[None]) -> None:
        self._request, self._counts, self._ended = request, counts, ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._ask()

    def _ask(self) -> None:
        if not self._counts.left:
            self.transport.close()
            return
        self._counts.left -= 1
        self._parser = httptools.HttpResponseParser(self)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._counts.bytes += len(data)
        self._parser.feed_data(data)

    def on_body(self, piece: bytes) -> None:
        self._counts.events += piece.count(b"data: ")

    def on_message_complete(self) -> None:
        self._counts.answers += 1
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


async def load(url: str, concurrency: int, requests: int, tokens: int) -> Counts:
    target = urlsplit(url)
    asked = {"model": "null", "messages": [{"role": "user", "content": "word " * 32}], "max_tokens": tokens}
    body = json.dumps(asked | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST {target.path}/chat/completions HTTP/1.1\r\nHost: {target.netloc}\r\nContent-Length: {len(body)}\r\n"
    request = head.encode() + b"Content-Type: application/json\r\n\r\n" + body
    loop, counts = asyncio.get_running_loop(), Counts(requests)
    ends: list[asyncio.Future[None]] = [loop.create_future() for _ in range(concurrency)]
    for end in ends:
        await loop.create_connection(partial(_Slot, request, counts, end), target.hostname or "", target.port or 80)
    await asyncio.gather(*ends)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.control")
    parser.add_argument("url")
    for name in ("concurrency", "requests", "tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    asked = parser.parse_args()
    counts = uvloop.run(load(asked.url, asked.concurrency, asked.requests, asked.tokens))
    print(json.dumps({"answers": counts.answers, "events": counts.events, "bytes": counts.bytes}))


if __name__ == "__main__":
    main()
