"""A server that answers at once, or at known times: what is measured against it is the client itself.

    python -m llm_bench.null_target --port 0 --ttft-ms 50 --itl-ms 20 --truth truth.jsonl
    python -m llm_bench.null_target --servers 16 --service lognormal --service-ms 80     # a queue whose theory is known

OpenAI chat and plain completions, streamed or not. With both times 0 an answer is one write. `--truth` gets a JSON line
for each answer, stamps of CLOCK_MONOTONIC: `request_id`, `read_ns` (the request's last byte was read), `write_ns` (one
a token event, taken just before its write).
"""

import argparse
import asyncio
import heapq
import math
import os
import random
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import orjson

from llm_bench import clock
from llm_bench.clock import Timer, now_ns
from llm_bench.limits import raise_file_limit

LONGEST_MS = 86_400_000  # a day: nobody means more, and it fits a timer
MOST_TOKENS = 1_000_000  # of an answer
MOST_SERVERS = 1_000_000
DEFAULT_TOKENS = 16  # what OpenAI's completions give when max_tokens is absent
_WORD = "word "  # the text of one token
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
_REASONS = {200: b"OK", 400: b"Bad Request", 404: b"Not Found", 411: b"Length Required"}
_DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


@dataclass(frozen=True)
class Times:
    """When an answer's token events leave, counted from its request's last byte."""

    ttft_ns: int = 0
    itl_ns: int = 0
    tokens_per_event: int = 1


def _lognormal(draw: random.Random) -> float:
    return draw.lognormvariate(-math.log(2) / 2, math.sqrt(math.log(2)))


# How long a request is served, with mean 1; the lognormal has a coefficient of variation of 1.
SERVICES: dict[str, Callable[[random.Random], float]] = {
    "exponential": lambda draw: draw.expovariate(1.0),
    "constant": lambda _: 1.0,
    "lognormal": _lognormal,
}


class Queue:
    """Servers that each take one request at a time, first come, first served, for a time drawn anew for each.

    Begin and end are known as soon as a request is read: nobody overtakes, and one whose client leaves is served all
    the same. So no lateness of a timer is ever passed on to the next.
    """

    def __init__(self, servers: int, service: str, mean_ns: int, seed: int) -> None:
        self._free_ns = [0] * servers
        self._draw, self._of, self._mean_ns = random.Random(seed), SERVICES[service], mean_ns

    def place(self, read_ns: int) -> tuple[int, int]:
        """When the service of a request begins and ends."""
        begin_ns = max(read_ns, self._free_ns[0])
        end_ns = begin_ns + round(self._of(self._draw) * self._mean_ns)
        heapq.heapreplace(self._free_ns, end_ns)
        return begin_ns, end_ns


def _event(route: str, delta: dict[str, Any], text: str | None, finish_reason: str | None) -> bytes:
    """One event as one HTTP chunk, in the words of the route."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
    choice |= {"delta": delta} if route == "chat" else {"text": text or ""}
    kind = "chat.completion.chunk" if route == "chat" else "text_completion"
    body = {"id": "null-0", "object": kind, "created": 0, "model": "null", "choices": [choice]}
    return _chunk(b"data: " + orjson.dumps(body) + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    return {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}


def _words(value: Any) -> int:
    """Whitespace-separated words of a prompt or of messages; token ids count themselves."""
    if isinstance(value, str):
        return len(value.split())
    if isinstance(value, dict):
        return _words(value.get("content", value.get("text", "")))
    if isinstance(value, list):
        return sum(1 if isinstance(item, int) else _words(item) for item in value)
    return 0


class NullTarget:
    """What all connections share: times, truth, events made once. Needs a running loop."""

    def __init__(self, times: Times, truth: IO[bytes] | None = None, queue: Queue | None = None) -> None:
        self._times, self._queue = times, queue
        self.truth = truth
        self.timer = Timer()
        self._events: dict[tuple[str, int], bytes] = {}

    def times_of(self, read_ns: int, tokens: int) -> Times:
        """Of the next answer: as given or, from a queue, first event after its wait, last at the end of its service."""
        times = self._times
        if self._queue is None:
            return times
        begin_ns, end_ns = self._queue.place(read_ns)
        more = -(-tokens // times.tokens_per_event) - 1
        if not more:
            return Times(end_ns - read_ns, 0, times.tokens_per_event)
        first_ns = begin_ns - read_ns + times.ttft_ns
        return Times(first_ns, max(end_ns - read_ns - first_ns, 0) // more, times.tokens_per_event)

    def token_event(self, route: str, tokens: int) -> bytes:
        """The event that bears this many tokens; made once."""
        event = self._events.get((route, tokens))
        if event is None:
            text = _WORD * tokens
            event = self._events[route, tokens] = _event(route, {"content": text}, text, None)
        return event

    async def serve(self, port: int) -> asyncio.Server:
        # The whole first wave of a large closed loop may connect in one turn of the loop.
        return await asyncio.get_running_loop().create_server(lambda: _Peer(self), "127.0.0.1", port, backlog=4096)


class _Peer(asyncio.Protocol):
    """One connection: requests in, answers out, one after another."""

    transport: asyncio.Transport

    def __init__(self, target: NullTarget) -> None:
        self._target = target
        self._input = bytearray()
        self._answering = False
        self._gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass
        self.transport.set_write_buffer_limits(0)  # uvloop then writes at once, and what is stamped has left

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = True

    def data_received(self, data: bytes) -> None:
        read_ns = now_ns()
        self._input += data
        self._next(read_ns)

    def _next(self, read_ns: int) -> None:
        while not self._answering and not self._gone:
            end = self._input.find(b"\r\n\r\n")
            if end < 0:
                return
            first, *lines = bytes(self._input[:end]).split(b"\r\n")
            headers = {n.lower(): v.strip() for n, _, v in (line.partition(b":") for line in lines)}
            length = headers.get(b"content-length", b"0")
            if b"transfer-encoding" in headers or not length.isdigit():
                self._refuse(411, "a request body with a Content-Length is what this server reads")
                self.transport.close()
                return
            size = end + 4 + int(length)
            if len(self._input) < size:
                return
            body = bytes(self._input[end + 4 : size])
            del self._input[:size]
            self._answer(first, headers, body, read_ns)

    def _answer(self, first: bytes, headers: dict[bytes, bytes], body: bytes, read_ns: int) -> None:
        method, _, rest = first.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method == b"GET" and path in _GETS:
            self._whole(200, _GETS[path])
            return
        route = _ROUTES.get(path) if method == b"POST" else None
        if route is None:
            self._refuse(
                404, f"{first.decode('latin-1')!r}: known are {sorted(p.decode() for p in (*_ROUTES, *_GETS))}"
            )
            return
        try:
            asked = orjson.loads(body)
            tokens = asked.get("max_completion_tokens") or asked.get("max_tokens") or DEFAULT_TOKENS
            prompt_tokens = _words(asked.get("messages") or asked.get("prompt"))
            if not isinstance(tokens, int) or not 0 < tokens <= MOST_TOKENS:
                raise ValueError(f"max_tokens is {tokens!r}, expected a whole number from 1 to {MOST_TOKENS}")
            include_usage = (asked.get("stream_options") or {}).get("include_usage", False)
        except (ValueError, AttributeError, RecursionError) as e:
            self._refuse(400, str(e))
            return
        self._answering = True
        request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        times = self._target.times_of(read_ns, tokens)
        if asked.get("stream"):
            usage = _usage(prompt_tokens, tokens) if include_usage else None
            _Stream(self, route, tokens, times, usage, request_id, read_ns)
            return
        text = _WORD * tokens
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if route == "chat" else {"text": text}
        kind = "chat.completion" if route == "chat" else "text_completion"
        answer = {"id": "null-0", "object": kind, "created": 0, "model": "null", "choices": [choice]}
        answer["usage"] = _usage(prompt_tokens, tokens)
        events = -(-tokens // times.tokens_per_event)
        due_ns = read_ns + times.ttft_ns + (events - 1) * times.itl_ns

        def leave() -> None:
            body, write_ns = orjson.dumps(answer), now_ns()
            self._whole(200, body)
            self.ended(request_id, read_ns, [write_ns])

        if now_ns() >= due_ns:
            leave()
        else:
            self._target.timer.call_at(due_ns, leave)

    def _whole(self, status: int, body: bytes) -> None:
        head = b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self.write(head % (status, _REASONS[status], len(body)) + body)

    def _refuse(self, status: int, text: str) -> None:
        self._whole(status, orjson.dumps({"error": {"message": text, "type": "invalid_request_error", "code": status}}))

    def write(self, data: bytes) -> None:
        if not self._gone:
            self.transport.write(data)

    @property
    def gone(self) -> bool:
        return self._gone

    def ended(self, request_id: str, read_ns: int, write_ns: list[int]) -> None:
        """The answer has left: note its truth, and look for a request that came meanwhile."""
        self._answering = False
        if self._target.truth is not None:
            line = {"request_id": request_id, "read_ns": read_ns, "write_ns": write_ns}
            self._target.truth.write(orjson.dumps(line) + b"\n")
        if self._input:
            asyncio.get_running_loop().call_soon(self._next, now_ns())


class _Stream:
    """One streamed answer: event k leaves at read + ttft + k * itl, never earlier; a client that leaves ends it."""

    def __init__(
        self,
        peer: _Peer,
        route: str,
        tokens: int,
        times: Times,
        usage: dict[str, int] | None,
        request_id: str,
        read_ns: int,
    ) -> None:
        self._peer, self._route, self._request_id, self._read_ns = peer, route, request_id, read_ns
        target = peer._target
        self._timer, self._times = target.timer, times
        self._token_event = target.token_event
        self._left = tokens
        self._write_ns: list[int] = []
        tail = [_event(route, {}, None, "length")]
        if usage is not None:
            body = {"id": "null-0", "object": "chat.completion.chunk", "created": 0, "model": "null", "choices": []}
            tail.append(_chunk(b"data: " + orjson.dumps(body | {"usage": usage}) + b"\n\n"))
        self._tail = b"".join((*tail, _DONE))
        role = _event(route, {"role": "assistant", "content": ""}, None, None) if route == "chat" else b""
        self._step(_STREAM_HEAD + role)

    def _step(self, begin: bytes = b"") -> None:
        """Write every event that is due, in one write; come back for the next."""
        if self._peer.gone:
            return
        times, out, sent = self._times, [begin], 0
        while self._left:
            due_ns = self._read_ns + times.ttft_ns + (len(self._write_ns) + sent) * times.itl_ns
            if due_ns > now_ns():
                break
            tokens = min(times.tokens_per_event, self._left)
            out.append(self._token_event(self._route, tokens))
            self._left -= tokens
            sent += 1
        if not self._left:
            out.append(self._tail)
        self._write_ns += [now_ns()] * sent
        data = b"".join(out)
        if data:
            self._peer.write(data)
        if self._left:
            self._timer.call_at(due_ns, self._step)
        else:
            self._peer.ended(self._request_id, self._read_ns, self._write_ns)


_ROUTES = {b"/v1/chat/completions": "chat", b"/v1/completions": "text"}
_GETS = {
    b"/v1/models": orjson.dumps({"object": "list", "data": [{"id": "null", "object": "model", "created": 0}]}),
    b"/health": b"{}",
}


class CannotServe(Exception):  # noqa: N818 - says what happened
    """Where nobody can be served, or told."""


async def _main(port: int, target: Callable[[], NullTarget], exit_with_stdin: bool) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    if exit_with_stdin:
        threading.Thread(target=_watch_stdin, args=(loop, ended.set), daemon=True).start()
    try:
        server = await target().serve(port)
    except OSError as e:
        problem = f"--port {port}: {e.strerror or e}; expected another, or 0 for any that is free"
        raise CannotServe(problem) from e
    try:
        print(f'{{"listening": "http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"}}', flush=True)
    except OSError as e:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still in the buffer goes nowhere at the end
        raise CannotServe(f"standard output cannot be written: {e.strerror}") from e
    await ended.wait()
    server.close()


def _watch_stdin(loop: asyncio.AbstractEventLoop, end: Callable[[], None]) -> None:
    """A thread, for a loop can wait for a pipe and not for /dev/null or a file."""
    with suppress(OSError):  # what cannot be read is at its end
        while os.read(0, 4096):
            pass
    with suppress(RuntimeError):  # the loop has ended before it
        loop.call_soon_threadsafe(end)


def _hold_standard_files() -> list[int]:
    """Which of 0, 1 and 2 were closed before the start: the next socket would be one, and libuv aborts on that."""
    closed = []
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        closed.append(fd)
    os.close(fd)
    return closed


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit code 2 for what cannot be served, in one sentence."""
    parser = argparse.ArgumentParser(prog="python -m llm_bench.null_target", description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, default=0, help="0: a free one; it is printed")
    parser.add_argument("--ttft-ms", type=float, default=0.0, help="from the request's last byte to the first token")
    parser.add_argument("--itl-ms", type=float, default=0.0, help="between token events")
    parser.add_argument("--tokens-per-event", type=int, default=1)
    parser.add_argument(
        "--servers", type=int, default=0, help="serve from a queue, so many requests at a time; 0: none"
    )
    parser.add_argument("--service", choices=SERVICES, default="exponential", help="how long one is served")
    parser.add_argument("--service-ms", type=float, default=10.0, help="mean of that; the last token leaves at its end")
    parser.add_argument("--seed", type=int, default=0, help="of the services")
    parser.add_argument("--truth", type=Path, help="a JSON line for each answer: what left when")
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when stdin is closed")
    asked = parser.parse_args(arguments)
    if not all(0 <= ms <= LONGEST_MS for ms in (asked.ttft_ms, asked.itl_ms)) or asked.tokens_per_event < 1:
        parser.error(f"expected times of 0 to {LONGEST_MS:.0f} ms, and one token an event or more")
    if not 0 <= asked.port <= 65535:  # uvloop takes it modulo 65,536
        parser.error("expected a --port of 0 to 65535")
    if not 0 <= asked.servers <= MOST_SERVERS or not 0 < asked.service_ms <= LONGEST_MS:
        parser.error(f"expected --servers of 0 to {MOST_SERVERS}, and a --service-ms above 0, at most {LONGEST_MS:.0f}")
    times = Times(round(asked.ttft_ms * 1e6), round(asked.itl_ms * 1e6), asked.tokens_per_event)
    raise_file_limit(1 << 20, strict=False)  # a client kept waiting for want of one would look slow
    mean_ns = round(asked.service_ms * 1e6)
    queue = Queue(asked.servers, asked.service, mean_ns, asked.seed) if asked.servers else None
    if 1 in _hold_standard_files():
        problem = "standard output is closed; expected it open, since the address of this server is written there"
        parser.exit(2, f"{parser.prog}: {problem}\n")
    try:
        truth = asked.truth.open("wb") if asked.truth else None
    except OSError as e:
        parser.exit(2, f"{parser.prog}: --truth {asked.truth}: {e.strerror}\n")
    try:
        clock.run(_main(asked.port, lambda: NullTarget(times, truth, queue), asked.exit_with_stdin))
    except CannotServe as e:
        parser.exit(2, f"{parser.prog}: {e}\n")
    finally:
        if truth:
            truth.close()


if __name__ == "__main__":
    main()
