"""A server on a real socket that does what a script says: the target of every test that needs one.

    def answer(number: int, seen: Seen) -> Script:      # number: 0 for the first request the server ever saw
        return [(0, SSE_HEAD), (20, sse(token("a"))), (40, sse(token("b"), FINISH, "[DONE]") + END)]

    with Scripted(answer) as server:                     # or Scripted([...]): the same script for every request
        ... server.url ...                               # http://127.0.0.1:PORT/v1
    server.requests, server.peak, server.connections, server.closed

A script is a list of (at_ms, bytes): the bytes are written at_ms after the whole request was read. Its last item may
be a word instead: "keep" (the default: wait for the next request), "close" (FIN), "reset" (RST) or "hang" (stay open,
answer nothing more). An empty list with "hang" accepts and never answers; `deaf()` is a server that never accepts.
The server lives in a thread of its own, so its times hold while the test's event loop is busy.
"""

import asyncio
import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"  # the last chunk
FINISH = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}


class Seen(NamedTuple):
    """One request as the server read it."""

    connection: int  # 0, 1, ... in the order of accepting
    method: str
    path: str
    headers: dict[str, str]  # names in lower case
    body: bytes
    at_ns: int  # CLOCK_MONOTONIC, when its last byte was read

    def json(self) -> Any:
        return json.loads(self.body)


Script = Sequence["tuple[float, bytes] | str"]
Answer = Script | Callable[[int, Seen], Script]


def token(text: str) -> dict[str, Any]:
    """A chat event that bears `text`."""
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """The event after the last one, with `choices: []`."""
    total = prompt_tokens + completion_tokens
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}
    return {"choices": [], "usage": counts}


def chunk(data: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def sse(*events: dict[str, Any] | str) -> bytes:
    """Events as one HTTP chunk each; a str is sent as it stands after `data: `."""
    texts = (e if isinstance(e, str) else json.dumps(e) for e in events)
    return b"".join(chunk(b"data: %b\n\n" % text.encode()) for text in texts)


def comment(text: str = "ping") -> bytes:
    """An SSE comment as one HTTP chunk."""
    return chunk(b": %b\n\n" % text.encode())


def http_response(status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
    """A whole answer with a Content-Length."""
    lines = {"Content-Type": "application/json", "Content-Length": str(len(body))} | (headers or {})
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status} Scripted\r\n{head}\r\n".encode() + body


def chat_script(texts: Sequence[str], ttft_ms: float = 0.0, itl_ms: float = 0.0, prompt_tokens: int = 1) -> Script:
    """A whole streamed chat answer: token k of `texts` at ttft_ms + k * itl_ms, then finish, usage, [DONE]."""
    script: list[tuple[float, bytes] | str] = [(0.0, SSE_HEAD)]
    script += [(ttft_ms + k * itl_ms, sse(token(text))) for k, text in enumerate(texts)]
    last_ms = ttft_ms + max(0, len(texts) - 1) * itl_ms
    return [*script, (last_ms, sse(FINISH, usage(prompt_tokens, len(texts)), "[DONE]") + END)]


class Scripted:
    """The server of this module's docstring; `with Scripted(script) as server`."""

    def __init__(self, script: Answer) -> None:
        self._script = script
        self.requests: list[Seen] = []
        self.in_flight = 0  # read whole, and the script not yet played to its end
        self.peak = 0
        self.connections = 0  # accepted so far
        self.closed: list[tuple[int, int]] = []  # (connection, ns): closed or reset by the client
        self._loop = asyncio.new_event_loop()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> "Scripted":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        if self._failure is not None and error is None:
            raise self._failure

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        server = await self._loop.create_server(
            lambda: asyncio.StreamReaderProtocol(_Reader(), self._accept), sock=self._socket, backlog=4096
        )
        await self._ended.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._left)
        number, self.connections = self.connections, self.connections + 1
        # asyncio sets it only on sockets made with an explicit protocol; without it small writes wait 40 ms for an ACK.
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await self._converse(number, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed.append((number, time.monotonic_ns()))
        finally:
            writer.transport.abort()

    def _left(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()  # a wrong script must fail its test, not vanish in this thread

    async def _converse(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        then = "keep"
        while then == "keep":
            seen = await _read(number, reader)
            order = len(self.requests)
            self.requests.append(seen)
            self.in_flight += 1
            self.peak = max(self.peak, self.in_flight)
            try:
                then = await self._play(
                    self._script(order, seen) if callable(self._script) else self._script, seen, reader, writer
                )
            finally:
                self.in_flight -= 1
        if then == "hang":
            await self._until_client_leaves(reader)
        if then == "reset":
            # Linger 0: the close sends RST and drops what is unsent.
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def _play(
        self, script: Script, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> str:
        for step in script:
            if isinstance(step, str):
                return step
            at_ms, data = step
            wait_s = (seen.at_ns + at_ms * 1e6 - time.monotonic_ns()) / 1e9
            if wait_s > 0:
                await self._sleep(wait_s, reader)
            writer.write(data)
            await writer.drain()
        return "keep"

    async def _sleep(self, wait_s: float, reader: asyncio.StreamReader) -> None:
        """Raises ConnectionError as soon as the client leaves."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._until_client_leaves(reader)

    async def _until_client_leaves(self, reader: asyncio.StreamReader) -> None:
        assert isinstance(reader, _Reader)
        await reader.gone.wait()
        raise ConnectionAbortedError


class _Reader(asyncio.StreamReader):
    """A reader that also tells, without reading, that the client has left."""

    def __init__(self) -> None:
        super().__init__(limit=1 << 26)
        self.gone = asyncio.Event()

    def feed_eof(self) -> None:
        super().feed_eof()
        self.gone.set()

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        self.gone.set()


async def _read(connection: int, reader: asyncio.StreamReader) -> Seen:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip("\r\n").split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Seen(connection, method, path, headers, body, time.monotonic_ns())


@contextlib.contextmanager
def deaf() -> Iterator[str]:
    """The URL of a server whose accept queue is full: a connect to it neither succeeds nor fails."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(listener.getsockname())
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            for filler in fillers:
                filler.close()


_held: list[socket.socket] = []


def unused_port() -> int:
    """A port of 127.0.0.1 on which nobody listens, nor will: it stays bound while this process lives.

    What other tests bind meanwhile is given another one. A server that shares ports, as gRPC's do, may still have it.
    """
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    probe.bind(("127.0.0.1", 0))
    port = int(probe.getsockname()[1])
    _held.append(probe)
    return port
