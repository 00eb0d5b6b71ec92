"""One HTTP/1.1 connection that stamps what arrives and interprets nothing, and the pool of those to one target.

One exception: until the first token-bearing event each framed event goes, after stamping, to the dialect's `is_token`,
so that time-outs mean what they say. Stamps are the kernel's where it gives any (`arrivals`); under https they are of
decrypted bytes, by the clock.
"""

import asyncio
import select
import socket
from collections.abc import Callable
from typing import cast

from llm_bench import arrivals
from llm_bench.arrivals import Arrivals, Source
from llm_bench.clock import now_ns
from llm_bench.exchange import (
    CANCELLED,
    CLOSED,
    COMPLETE,
    CUT,
    PROTOCOL_ERROR,
    STALL_TIMEOUT,
    TOTAL_TIMEOUT,
    TRUNCATED,
    TTFT_TIMEOUT,
    Exchange,
    Timeouts,
)
from llm_bench.framing import FRAMINGS, SSE, Feeder
from llm_bench.http1 import FRAMING_ERRORS, Response, Sse

# A close this soon after the request left had crossed it on its way; a server that reads, works and drops takes longer.
_CROSSING_NS = 50_000_000
NEVER_NS = 1 << 62
_LIMITS = {  # what is said of an exchange whose limit has passed; {so_far} is counted when it has
    TTFT_TIMEOUT: "no token-bearing event within {limit_s:g} s of sending: {so_far}",
    STALL_TIMEOUT: "silence of {limit_s:g} s after the first token: {so_far}",
    TOTAL_TIMEOUT: "not ended within {limit_s:g} s of sending: {so_far}",
    CANCELLED: "closed by the client {limit_s:g} s after sending, as planned: {so_far}",
}


class Pool:
    """The connections to one target, as many as requests in flight: those at work, and those that rest between two.

    `is_token` tells whether an event's data bears a token; None: answers are not streamed. Without `reuse` none rests.
    `framing`: how the events of a streamed answer follow each other, a row of FRAMINGS.
    """

    def __init__(
        self, timeouts: Timeouts, is_token: Callable[[bytes], bool] | None, reuse: bool, framing: str = SSE
    ) -> None:
        self.timeouts = timeouts
        self.is_token = is_token
        self.framing = FRAMINGS[framing]
        self.reuse = reuse
        self.idle: list[Connection] = []  # the one used last is taken first: the others may rest or time out
        self.busy: set[Connection] = set()
        self.lost = 0  # idle connections that the server closed and that no request has replaced yet
        self.fastest_connect_ns = NEVER_NS  # about a round trip
        self.arrivals: Arrivals | None = None  # of plain sockets, from the first one on

    def take(self) -> "Connection | None":
        """The idle one used last; those whose close has come already, unnoticed by the loop, are lost."""
        while self.idle:
            connection = self.idle.pop()
            if not connection.has_something_to_read():
                return connection
            self.lost += 1
            connection.transport.abort()
        return None

    def close(self) -> None:
        """Close what is idle, and cut what is in flight. The loop's next turn finishes it."""
        for connection in list(self.busy):
            connection.end(CUT, "closed by the client: the run ended")
        for connection in list(self.idle):
            connection.transport.abort()
        self.idle.clear()
        if self.arrivals is not None:
            self.arrivals.close()


class Connection(asyncio.Protocol):
    """One socket. While it is asked, `exchange` is the request in flight; between requests it lies in pool.idle."""

    transport: asyncio.Transport

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._limits = pool.timeouts
        self._exchange: Exchange | None = None
        self._answered: asyncio.Future[None] = self._loop.create_future()
        self._response = Response()
        self._feeder: Feeder = Sse()
        self._look: Callable[[list[bytes], int], None] | None = None  # what to look for in the next read
        self.begun_ns = 0  # the write; limits run from the end of it, or from here as long as it has none
        self._written = False
        self._source: Source | None = None  # what the kernel stamps for us; None: the transport reads
        self._phase_limit: tuple[str, float | None] = (TTFT_TIMEOUT, None)
        self._cancel_after_s: float | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._rings_ns = float("inf")  # when: no later than the first limit of the exchange in flight

    def ask(self, message: bytes, exchange: Exchange, cancel_after_s: float | None) -> "asyncio.Future[None]":
        """Write a whole request; the future is done when `exchange` has ended."""
        self._exchange = exchange
        self._answered = self._loop.create_future()
        self._response, self._look = self._pool.framing.response(exchange.pieces), self._look_for_head
        # An answer that is not streamed has no first token to wait for: only the total limit is left.
        self._phase_limit = (TTFT_TIMEOUT, self._limits.ttft_s if self._pool.is_token is not None else None)
        self._cancel_after_s = cancel_after_s
        self._pool.busy.add(self)
        # Stamped before the call: the server may have read it all, and begun, before the call returns.
        self.begun_ns = now_ns()
        self.transport.write(message)
        exchange.bytes_out += len(message)
        self._written = not self.transport.get_write_buffer_size()
        if self._written and not exchange.sent_ns:
            exchange.sent_ns = self.begun_ns
        self._set_alarm()
        return self._answered

    def has_something_to_read(self) -> bool:
        """Between requests that is a close, or bytes that nobody asked for: no connection to send on."""
        return self.transport.is_closing() or bool(self._poll.poll(0))

    def closed_unread(self, exchange: Exchange) -> bool:
        """Had the server closed this connection before it read the request that `exchange` was cut short of?"""
        crossing_ns = max(_CROSSING_NS, 2 * self._pool.fastest_connect_ns)
        return not exchange.first_byte_ns and exchange.end_ns - self.begun_ns <= crossing_ns

    def read_stamped(self, sock: socket.socket) -> None:
        """From now on `arrivals` reads, and not the transport, where the kernel stamps what comes."""
        pool = self._pool
        closed = pool.arrivals is not None and pool.arrivals.closed
        if not arrivals.AVAILABLE or closed or self.transport.is_closing():
            return
        try:
            self._source = Source(sock, self._received, self._lost)
        except OSError:
            return
        if pool.arrivals is None:
            pool.arrivals = Arrivals()
        self.transport.pause_reading()
        pool.arrivals.add(self._source)

    # ---- called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass
        # 0: resume_writing tells when the last byte has left, and uvloop writes at once instead of at its next turn.
        self.transport.set_write_buffer_limits(0)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLIN)

    def resume_writing(self) -> None:
        exchange = self._exchange
        self._written = True
        if exchange is not None and not exchange.sent_ns:
            exchange.sent_ns = now_ns()

    def data_received(self, data: bytes) -> None:
        self._received(data, now_ns())

    def _lost(self, why: Exception | None) -> None:
        """As the transport would tell it, which does not read."""
        if why is None:
            self.eof_received()
        self.connection_lost(why)
        self.transport.abort()

    def _received(self, data: bytes, now: int) -> None:
        """The hot path: with a token a read, what is done here is done a token. No call that is not needed."""
        exchange = self._exchange
        if exchange is None:
            self.transport.abort()  # bytes that nobody asked for: the next answer would begin with them
            return
        if now < exchange.sent_ns:  # it answered while the clock was being read for the end of a long request
            now = exchange.sent_ns
        exchange.bytes_in += len(data)
        response = self._response
        try:
            response.parse(data)  # appends to exchange.pieces
        except FRAMING_ERRORS as e:
            self._stamp(now)
            self.end(PROTOCOL_ERROR, response.failure(e, data), now)
            return
        if self._look is None and len(exchange.pieces) - len(exchange.read_ns) == 1:
            exchange.read_ns.append(now)  # as _stamp does: the common case
        else:
            self._stamp(now)
        if response.complete:
            self.end(COMPLETE, "", now)

    def eof_received(self) -> None:
        if self._exchange is not None and self._response.eof():
            self.end(CLOSED)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        if self._source is not None:
            assert self._pool.arrivals is not None
            source, self._source = self._source, None
            self._pool.arrivals.drop(source)
            if isinstance(exc, OSError):  # who answers before it has read all, and closes: our write fails first
                source.read_out()
        if self in self._pool.idle:
            self._pool.idle.remove(self)
            self._pool.lost += 1
        if self._exchange is None:
            return
        if exc is not None and not isinstance(exc, OSError):
            if not self._answered.done():
                self._answered.set_exception(exc)  # a mistake of ours in data_received is no failure of the target
            self.end(TRUNCATED, repr(exc))
            return
        how = f"{type(exc).__name__}: {exc}" if exc else "the server closed the connection"
        if self._exchange.first_byte_ns:
            seen = f"after {self._so_far()}"
        else:
            seen = f"{(now_ns() - self.begun_ns) / 1e6:.0f} ms after it was sent, before a byte of the answer"
        self.end(TRUNCATED, f"{how} {seen}")

    # ----

    def _stamp(self, now: int) -> None:
        """One piece and one stamp a read: an answer of a hundred chunks that came at once is parsed at once."""
        exchange = self._exchange
        assert exchange is not None
        if not exchange.first_byte_ns:
            exchange.first_byte_ns = now
        pieces, before = exchange.pieces, len(exchange.read_ns)
        new = pieces[before:]
        if new:
            pieces[before:] = [new[0] if len(new) == 1 else b"".join(new)]
            exchange.read_ns.append(now)
        if self._look is not None and not self._response.complete:  # else no limit asks any more for the first token
            self._look(new, now)

    def end(self, ended: str, error: str = "", at_ns: int = 0) -> None:
        """End the exchange in flight, once; the connection goes back to the pool only after a clean answer."""
        exchange = self._exchange
        if exchange is None:
            return
        self._exchange = None
        self._pool.busy.discard(self)
        response = self._response
        response.let_go()
        exchange.status, exchange.headers, exchange.chunk_ends = response.status, response.headers, response.ends
        exchange.ended, exchange.error, exchange.end_ns = ended, error, at_ns or now_ns()
        if self._pool.arrivals is not None and exchange.sent_ns:
            self._pool.arrivals.ended(exchange.end_ns - exchange.sent_ns)
        open_still = response.keep_alive and self._written and not self.transport.is_closing()
        if ended == COMPLETE and self._pool.reuse and open_still:
            self._pool.idle.append(self)
        else:
            self.transport.abort()
        if not self._answered.done():  # done already when the task that waits was cancelled
            self._answered.set_result(None)

    # ---- what is looked for until the first token: each step sets the next one

    def _look_for_head(self, pieces: list[bytes], now: int) -> None:
        response = self._response
        if not response.head_done:
            return
        if response.status == 200 and self._pool.is_token is not None:
            self._look = self._look_for_kind
        else:
            self._look = self._look_for_body
        self._look(pieces, now)

    def _look_for_kind(self, pieces: list[bytes], now: int) -> None:
        exchange = self._exchange
        assert exchange is not None
        streamed = self._pool.framing.is_stream(True, self._response.status, self._response.headers, pieces)
        if streamed is None:
            return
        if streamed:
            self._feeder = self._pool.framing.feeder()
            self._look = self._look_for_token
        else:
            self._look = self._look_for_body
        self._look(exchange.pieces, now)  # the blanks before them too: they begin its first line

    def _look_for_token(self, pieces: list[bytes], now: int) -> None:
        is_token = self._pool.is_token
        assert is_token is not None
        for piece in pieces:
            begin = 0
            while begin < len(piece):  # an event at a time: a read may hold a whole answer, and one token is enough
                end = piece.find(b"\n\n", begin) + 2
                part = piece[begin:end] if end > 1 else piece[begin:]
                begin += len(part)
                if any(map(is_token, self._feeder.feed(part))):
                    assert self._exchange is not None
                    self._exchange.first_token_ns = now
                    self._look = None
                    self._phase_limit = (STALL_TIMEOUT, self._limits.stall_s)
                    self._set_alarm()
                    return

    def _look_for_body(self, pieces: list[bytes], now: int) -> None:
        if pieces:  # without events there is no telling tokens from silence: only the total limit is left
            self._look = None
            self._phase_limit = (TTFT_TIMEOUT, None)

    # ---- limits: one alarm a connection, which looks again where its time has moved. It rings at the time of the limit
    # that comes first, or earlier: to move it at each request, and each first token, would cost as much as a read.

    def _due(self) -> tuple[float, str, float]:
        """(ns, how it would end, its limit in s) of the limit that comes first; inf when there is none."""
        exchange = self._exchange
        assert exchange is not None
        sent_ns = exchange.sent_ns or self.begun_ns
        phase, phase_s = self._phase_limit
        phase_ns = exchange.read_ns[-1] if phase == STALL_TIMEOUT else sent_ns
        limits = (
            (sent_ns, CANCELLED, self._cancel_after_s),
            (phase_ns, phase, phase_s),
            (sent_ns, TOTAL_TIMEOUT, self._limits.total_s),
        )
        return min(
            ((from_ns + s * 1e9, kind, s) for from_ns, kind, s in limits if s is not None),
            default=(float("inf"), "", 0.0),
        )

    def _set_alarm(self) -> None:
        due_ns = self._due()[0]
        if due_ns >= self._rings_ns:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._rings_ns = due_ns
        self._alarm = self._loop.call_later(max(0.0, (due_ns - now_ns()) / 1e9), self._ring)

    def _ring(self) -> None:
        self._alarm, self._rings_ns = None, float("inf")
        if self._exchange is None:
            return
        if self._source is not None:
            assert self._pool.arrivals is not None
            for _ in range(arrivals.MOST_READS):  # what came in time counts, read or not, and so does an end behind it
                if not self.has_something_to_read():
                    break
                self._pool.arrivals.read()
                if self._exchange is None:
                    return
        due_ns, kind, limit_s = self._due()
        if now_ns() < due_ns:
            self._set_alarm()
        else:
            self.end(kind, _LIMITS[kind].format(limit_s=limit_s, so_far=self._so_far()))

    def _so_far(self) -> str:
        """What had come, for an error text. Counts tokens, so it is called when nothing is measured any more."""
        exchange, is_token = self._exchange, self._pool.is_token
        assert exchange is not None
        if not exchange.bytes_in:
            return "no byte of the answer"
        found = self._pool.framing.events(exchange.read_ns, exchange.pieces, self._response.ends)
        count = sum(map(is_token, found.data)) if is_token else 0
        last_ns = exchange.read_ns[-1] if exchange.read_ns else exchange.first_byte_ns
        events = f"{count} token-bearing events, " if is_token else ""
        return f"{events}{exchange.bytes_in} bytes, the last read {(now_ns() - last_ns) / 1e9:.3f} s ago"
