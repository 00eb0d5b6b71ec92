"""A TCP proxy that can be told to delay, throttle, stall, refuse or reset: the net faults of a run.

    python -m llm_bench.fault_proxy --to HOST:PORT [--to HOST:PORT ...]

Listens on a free port of 127.0.0.1 for each HOST:PORT, which one JSON line on stdout names in their order. A line on
stdin is an order, {"id": 1, "do": "delay", "value": 0.05}, {"id": 1, "do": ""} its end; each is answered with a line
{"at": ns} when it holds. It ends with stdin. It reads nothing of what it forwards.

`Net` starts it, and finds what it adds to a round trip.

A target that refuses a connection cannot be told so to a client whose connection is already made: it gets a reset.
"""

import argparse
import asyncio
import json
import select
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from llm_bench import clock
from llm_bench.clock import now_ns
from llm_bench.limits import raise_file_limit

QUEUE_BYTES = 1 << 20  # held back of one direction; then the sender is no longer read
SLICE_S = 0.005  # a throttled direction sends what its bandwidth carries in so long
READY_S, GRACE_S = 15.0, 10.0  # in which it says that it listens, or an order holds; and ends
PINGS, PING_BYTES = 200, 500  # round trips by which its own cost is found: about a tenth of a second
RESET = struct.pack("ii", 1, 0)  # SO_LINGER of no time: close sends RST


class Order(NamedTuple):
    do: str  # a row of faults.NET
    value: Any


class Line:
    """All connections to one target, and what is the matter with them."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.orders: dict[int, Order] = {}
        self.delay_s, self.bytes_per_s = 0.0, 0.0  # 0: no limit
        self.stalled = self.resets = self.swallows = False
        self.free_s = [0.0, 0.0]  # by direction: when what was sent before has passed the bottleneck
        self.halves: set[Half] = set()
        self.at = 0  # its own port
        self._server: asyncio.Server | None = None

    @property
    def calm(self) -> bool:
        return not (self.delay_s or self.bytes_per_s or self.stalled)

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Half(self, 0), "127.0.0.1", self.at, backlog=4096)
        self.at = self._server.sockets[0].getsockname()[1]

    async def order(self, number: int, order: Order | None) -> None:
        """Begin one, or end it. What is in force of a kind is the sum of delays and the least bandwidth."""
        if order is None:
            self.orders.pop(number, None)
        else:
            self.orders[number] = order
        values: dict[str, list[Any]] = {}
        for do, value in self.orders.values():
            values.setdefault(do, []).append(value)
        self.delay_s, self.bytes_per_s = sum(values.get("delay", ())), min(values.get("bandwidth", ()), default=0.0)
        self.stalled, self.resets = "stall" in values, "reset" in values
        swallowed, self.swallows = self.swallows, "blackhole" in values.get("drop", ())
        if order is not None and order.do == "reset":
            for half in list(self.halves):
                half.reset()
        if swallowed and not self.swallows:  # nobody answers them any more
            for half in [h for h in self.halves if h.way == 0 and h.other is None]:
                half.reset()
        await self._refuse("refuse" in values.get("drop", ()))
        for half in list(self.halves):  # a pump may close one
            half.pump()

    async def _refuse(self, wanted: bool) -> None:
        """Where nothing listens, a connection is refused; those that are made go on."""
        if wanted and self._server is not None:
            self._server.close()
            self._server = None
        elif not wanted and self._server is None:
            await self.listen()


class Half(asyncio.Protocol):
    """One end of a connection: way 0 is the client's, 1 the target's. What it reads goes to `other`."""

    def __init__(self, line: Line, way: int) -> None:
        self.line, self.way = line, way
        self.other: Half | None = None
        self.transport: asyncio.Transport | None = None
        self._queue: deque[tuple[float, bytes | None]] = deque()  # (not before, bytes; None: the end)
        self._queued = 0  # bytes
        self._ended = False  # it has said its last, and that was forwarded
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by type
        self.line.halves.add(self)
        if self.way:
            return
        if self.line.resets:
            self.reset()
        elif not self.line.swallows:
            self._task = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            _, made = await self._loop.create_connection(lambda: Half(self.line, 1), self.line.host, self.line.port)
        except OSError:
            self.reset()
            return
        if self not in self.line.halves:  # the client has left meanwhile
            made.reset()
            return
        made.other, self.other = self, made
        for half in (self, made):
            half.pump()

    def data_received(self, data: bytes) -> None:
        if not self._queue and self.line.calm and self.other:
            self._write(data)
            return
        self._queue.append((self._loop.time() + self.line.delay_s, data))
        self._queued += len(data)
        if self._queued > QUEUE_BYTES and self.transport:
            self.transport.pause_reading()
        self.pump()

    def eof_received(self) -> bool:
        self._queue.append((self._loop.time() + self.line.delay_s, None))
        self.pump()
        return True  # the other way stays open

    def connection_lost(self, exc: Exception | None) -> None:
        self.line.halves.discard(self)
        if self.other is None:
            return
        if exc is not None:
            self.other.reset()
        elif self._queue:
            self.line.halves.add(self)  # what it said last is still on its way
        elif self.other.transport:
            self.other.transport.close()

    def pause_writing(self) -> None:
        if self.other and self.other.transport:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other and self.other.transport and self.other._queued <= QUEUE_BYTES:
            self.other.transport.resume_reading()

    def reset(self) -> None:
        """Both ends, with RST."""
        for half in (self, self.other):
            if half is None or half.transport is None:
                continue
            half._queue.clear()
            self.line.halves.discard(half)
            if half._timer:
                half._timer.cancel()
            with suppress(OSError):
                half.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            half.transport.abort()

    def pump(self) -> None:
        """Forward what may go by now, and come again for the rest."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        line, now = self.line, self._loop.time()
        while self._queue and not line.stalled and self.other:
            due, data = self._queue[0]
            due = max(due, line.free_s[self.way] if line.bytes_per_s else 0.0)
            if due > now:
                self._timer = self._loop.call_at(due, self.pump)
                return
            self._queue.popleft()
            if data is None:
                self._end()
                continue
            if line.bytes_per_s:
                most = max(1, round(line.bytes_per_s * SLICE_S))
                if len(data) > most:
                    self._queue.appendleft((due, data[most:]))
                    data = data[:most]
                line.free_s[self.way] = max(line.free_s[self.way], now) + len(data) / line.bytes_per_s
            self._queued -= len(data)
            self._write(data)
        if not self._queue and self.transport and self.transport.is_closing():
            self.line.halves.discard(self)
            if self.other and self.other.transport:
                self.other.transport.close()
        elif self.transport and self._queued <= QUEUE_BYTES and self.other and not self.transport.is_closing():
            self.transport.resume_reading()

    def _write(self, data: bytes) -> None:
        if self.other and self.other.transport and not self.other.transport.is_closing():
            self.other.transport.write(data)

    def _end(self) -> None:
        self._ended = True
        if self.other is None or self.other.transport is None:
            return
        with suppress(OSError, RuntimeError):  # it is gone
            self.other.transport.write_eof()
        if self.other._ended:
            for half in (self, self.other):
                if half.transport:
                    half.transport.close()


async def serve(targets: list[tuple[str, int]]) -> None:
    lines = [Line(*target) for target in targets]
    for line in lines:
        await line.listen()
    print(json.dumps({"listening": [line.at for line in lines]}), flush=True)
    loop, orders = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any] | None]()

    def hear() -> None:
        for text in sys.stdin.buffer:
            loop.call_soon_threadsafe(orders.put_nowait, json.loads(text))
        loop.call_soon_threadsafe(orders.put_nowait, None)

    threading.Thread(target=hear, daemon=True).start()
    while (order := await orders.get()) is not None:
        for line in lines:
            await line.order(order["id"], Order(order["do"], order.get("value")) if order["do"] else None)
        print(json.dumps({"at": now_ns()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m llm_bench.fault_proxy", description=__doc__)
    parser.add_argument(
        "--to", action="append", required=True, metavar="HOST:PORT", help="of a target; may be repeated"
    )
    targets = []
    for text in parser.parse_args().to:
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            parser.error(f"--to {text!r}: expected HOST:PORT")
        targets.append((host.strip("[]"), int(port)))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's to handle
    raise_file_limit(1 << 16, strict=False)
    clock.run(serve(targets))


# ---- the run's side of it


class Net:
    """The fault proxy before each of the target's URLs, and what it costs."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Raises OSError or ValueError where it does not start."""
        places = [(parts.hostname or "", parts.port or 80) for parts in map(urlsplit, urls)]
        with socket.create_server(("127.0.0.1", 0)) as echo:
            threading.Thread(target=_echo, args=(echo,), daemon=True).start()
            here = echo.getsockname()
            to = [word for host, port in [*places, here] for word in ("--to", f"{host}:{port}")]
            self._child = subprocess.Popen(
                [sys.executable, "-m", "llm_bench.fault_proxy", *to], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            *ports, back = json.loads(self._hear())["listening"]
            direct, through = (statistics.median(_pings(port)) for port in (here[1], back))
        self.added_ms = round(max(through - direct, 0) / 1e6, 4)
        # As the target's own, but for the place that is connected to.
        self.urls = [
            urlsplit(url)._replace(netloc=f"127.0.0.1:{port}").geturl() for url, port in zip(urls, ports, strict=True)
        ]
        self._lock, self._numbers = threading.Lock(), 0

    def _hear(self) -> bytes:
        assert self._child.stdout
        ready, _, _ = select.select([self._child.stdout], [], [], READY_S)
        line = self._child.stdout.readline() if ready else b""
        if not line:
            raise OSError("no word from it")
        return line

    def order(self, do: str, value: Any) -> int:
        """Begin a fault; returns its number when it holds."""
        with self._lock:
            self._numbers += 1
            self._say({"id": self._numbers, "do": do, "value": value})
            return self._numbers

    def lift(self, number: int) -> None:
        with self._lock:
            self._say({"id": number, "do": ""})

    def _say(self, order: Mapping[str, Any]) -> None:
        assert self._child.stdin
        self._child.stdin.write(json.dumps(order).encode() + b"\n")
        self._child.stdin.flush()
        self._hear()

    def close(self) -> None:
        assert self._child.stdin and self._child.stdout
        with suppress(OSError):
            self._child.stdin.close()
        try:
            self._child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()


def _echo(server: socket.socket) -> None:
    """Sends back what comes, on two connections."""
    for _ in range(2):
        with suppress(OSError):
            connection, _ = server.accept()
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while data := connection.recv(4096):
                    connection.sendall(data)


def _pings(port: int) -> list[int]:
    """Times of round trips, ns."""
    times = []
    with socket.create_connection(("127.0.0.1", port), READY_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PINGS):
            begun_ns, left = now_ns(), PING_BYTES
            connection.sendall(b"x" * PING_BYTES)
            while left:
                left -= len(connection.recv(left)) or left
            times.append(now_ns() - begun_ns)
    return times


if __name__ == "__main__":
    main()
