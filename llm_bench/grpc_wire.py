"""A gRPC target as seen from one event loop: requests in, Exchanges out, as `wire` does it for HTTP.

What differs from HTTP, since the HTTP/2 below is grpcio's: `sent_ns` is when the call is handed to it, once the channel
is connected; `first_byte_ns` is the first message, or the status of a call without one; bytes are those of messages
with their frames, no HTTP/2. The pieces of an Exchange are a message each, in gRPC's framing, and the status as the
last (`grpc_frames`); `status` is the HTTP status of the same meaning, by GRPC_STATUS.
"""

import asyncio
import math
import os
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llm_bench.clock import now_ns
from llm_bench.errors import BenchError
from llm_bench.exchange import (
    CANCELLED,
    COMPLETE,
    CONNECT_ERROR,
    CONNECT_TIMEOUT,
    CUT,
    PROTOCOL_ERROR,
    STALL_TIMEOUT,
    TOTAL_TIMEOUT,
    TRUNCATED,
    TTFT_TIMEOUT,
    Exchange,
    Timeouts,
)
from llm_bench.grpc_frames import GRPC_STATUS, frame, status_frame
from llm_bench.kserve_messages import is_final

# Streams beyond a server's SETTINGS_MAX_CONCURRENT_STREAMS wait inside grpcio, after `sent_ns` and unseen. No server
# should allow fewer than 100 (RFC 9113 6.5.2), and proxies allow just that.
STREAMS_A_CHANNEL = 100
FINAL_S = 1.0  # how long the status of an answer is waited for that has said to be final
_LIMITS = {
    TTFT_TIMEOUT: "no token-bearing message within {limit_s:g} s of sending: {so_far}",
    STALL_TIMEOUT: "silence of {limit_s:g} s after the first token: {so_far}",
    TOTAL_TIMEOUT: "not ended within {limit_s:g} s of sending: {so_far}",
    CANCELLED: "closed by the client {limit_s:g} s after sending, as planned: {so_far}",
}
_MADE_UP = ("CANCELLED", "UNKNOWN", "INTERNAL", "UNAVAILABLE")
_FAILED = re.compile(
    r"(?:Stream removed \()?(?:failed to connect|Socket closed|recvmsg|sendmsg|Connection (?:reset|aborted)|Broken pipe"
    r"|Endpoint |End of TCP|GOAWAY|RST_STREAM|Received (?:RST_STREAM|http2 header)|keepalive|ping timeout|DNS resol)",
    re.I,
)
_NO_GRPC = ("http2 header with status", "http1.x server")  # of errors by what is no gRPC server
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # else channels of one address share one connection
    ("grpc.enable_http_proxy", 0),  # of the environment: no load goes through one by accident
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.primary_user_agent", "llm-bench"),
)


def library() -> Any:
    """grpcio, which only such targets need. Raises BenchError where it is not installed."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # else its C core writes on stderr of each handshake that fails
    try:
        import_module("grpc.aio")
        return import_module("grpc")
    except ImportError:
        raise BenchError("a gRPC target needs grpcio: pip install 'llm-bench[grpc]'") from None


def options(connect_s: float | None) -> list[tuple[str, Any]]:
    """Of every channel, those of a probe too."""
    # So long is an attempt to connect given: longer than the caller's own limit, which is to end it. Of two options of
    # one name grpcio takes the first.
    return [*_OPTIONS, ("grpc.min_reconnect_backoff_ms", 1000 + round(1e3 * (connect_s or 20.0)))]


def address_of(url: str) -> tuple[str, bool]:
    """(HOST:PORT as grpcio takes it, is it TLS?) of http://HOST:PORT or https://HOST:PORT."""
    parts = urlsplit(url)
    if parts.path.strip("/"):
        raise BenchError(f"{url}: a gRPC server has no path; expected {parts.scheme}://{parts.netloc}")
    host = parts.hostname or ""
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{parts.port or (443 if parts.scheme == 'https' else 80)}", parts.scheme == "https"


def credentials(cafile: str, certificate: str = "", key: str = "") -> Any:
    """Of TLS, with a client's certificate where one is given. Raises BenchError for a file that cannot be read."""

    def content(path: str) -> bytes | None:
        try:
            return Path(path).read_bytes() if path else None
        except OSError as e:
            raise BenchError(f"{path}: cannot be read: {e.strerror}; expected a PEM file") from None

    return library().ssl_channel_credentials(content(cafile), content(key), content(certificate))


def metadata_of(headers: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Headers as gRPC has them: names in lower case."""
    return tuple((name.lower(), value) for name, value in headers)


def connection_failed(code: int, text: str) -> bool:
    """Is a status grpcio's own, made up for a connection that failed, and none that a server sent?

    By its words: nothing else tells the two apart (1.60 says `received from peer` of both, 1.85 of none).
    """
    return GRPC_STATUS.get(code, ("", 0))[0] in _MADE_UP and _FAILED.match(text) is not None


def is_no_grpc(text: str) -> bool:
    """Is this grpcio's word for a peer that speaks something else?"""
    return any(word in text.lower() for word in _NO_GRPC)


class _Line:
    """A channel, and how many calls it carries."""

    def __init__(self, channel: Any, path: str) -> None:
        self.channel = channel
        # On the wire a call with one request is the same, be the method unary or a stream in either direction.
        self.call = channel.unary_stream(path)
        self.in_flight = 0
        self.was_ready = False


class GrpcWire:
    """`send` gives one Exchange. Calls share channels, at most STREAMS_A_CHANNEL each.

    `is_token` tells whether a message in its frame bears a token; None: answers are not streamed. Without `reuse` each
    call has a channel of its own. Raises BenchError for a bad URL or file, or where grpcio is not installed.
    """

    stamps = "clock"  # the sockets are grpcio's

    def __init__(
        self,
        url: str,
        path: str,
        headers: Sequence[tuple[str, str]],
        timeouts: Timeouts,
        is_token: Callable[[bytes], bool] | None,
        *,
        cafile: str = "",
        certificate: str = "",
        key: str = "",
        reuse: bool = True,
    ) -> None:
        self._grpc = library()
        self._address, secure = address_of(url)
        self._credentials = credentials(cafile, certificate, key) if secure else None
        self._path, self._metadata, self._timeouts, self._is_token = path, metadata_of(headers), timeouts, is_token
        self._reuse = reuse
        self._lines: list[_Line] = []
        self._calls: set[Any] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._ready = self._grpc.ChannelConnectivity.READY
        self._settled = (self._ready, self._grpc.ChannelConnectivity.TRANSIENT_FAILURE)

    async def send(self, payload: bytes, cancel_after_s: float | None = None) -> Exchange:
        """Send one ModelInferRequest and wait for the end. What fails is in the Exchange.

        A cancelled task gets its Exchange too: CUT, the call cancelled. `cancel_after_s` runs from `sent_ns`.
        """
        exchange = Exchange()
        line = self._take()
        line.in_flight += 1
        try:
            if await self._connected(line, exchange):
                await self._converse(line, payload, exchange, cancel_after_s)
        except asyncio.CancelledError:
            when = "closed by the client: the run ended" if exchange.sent_ns else "not connected yet when the run ended"
            _end(exchange, CUT, when)
        finally:
            line.in_flight -= 1
            if not self._reuse:
                self._close(line)
        return exchange

    def close(self) -> None:
        """Close the channels, and cut what is in flight. The loop's next turns finish it."""
        for call in list(self._calls):
            call.cancel()
        for line in list(self._lines):
            self._close(line)

    def _take(self) -> _Line:
        """The first channel with room: as few connections as can be."""
        for line in self._lines:
            if self._reuse and line.in_flight < STREAMS_A_CHANNEL:
                return line
        aio, args = self._grpc.aio, options(self._timeouts.connect_s)
        if self._credentials is None:
            channel = aio.insecure_channel(self._address, args)
        else:
            channel = aio.secure_channel(self._address, self._credentials, args)
        self._lines.append(_Line(channel, self._path))
        return self._lines[-1]

    def _close(self, line: _Line) -> None:
        if line not in self._lines:  # closed already, with all others
            return
        self._lines.remove(line)
        task = asyncio.get_running_loop().create_task(line.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _connected(self, line: _Line, exchange: Exchange) -> bool:
        """Wait until the channel is connected, or has failed to: the call itself then says why."""
        channel = line.channel
        state = channel.get_state(try_to_connect=True)
        if state == self._ready:
            line.was_ready = True
            return True
        begun_ns, limit_s = now_ns(), self._timeouts.connect_s
        exchange.reconnects += line.was_ready
        line.was_ready = False
        try:
            async with asyncio.timeout(limit_s):
                while state not in self._settled:
                    await channel.wait_for_state_change(state)
                    state = channel.get_state(try_to_connect=True)
        except TimeoutError:
            _end(exchange, CONNECT_TIMEOUT, f"not connected to {self._address} within {limit_s:g} s")
            return False
        finally:
            exchange.connect_ns += now_ns() - begun_ns
        line.was_ready = state == self._ready
        return True

    async def _converse(self, line: _Line, payload: bytes, exchange: Exchange, cancel_after_s: float | None) -> None:
        limits, is_token, loop = self._timeouts, self._is_token, asyncio.get_running_loop()
        connected = line.was_ready
        exchange.sent_ns = begun_ns = now_ns()  # the server may have read it all before the call returns
        exchange.bytes_out = len(payload) + 5
        call = line.call(payload, metadata=self._metadata)
        self._calls.add(call)
        due = _Due(begun_ns, cancel_after_s, limits.ttft_s if is_token else None, limits.total_s)
        final = False
        try:
            async with asyncio.timeout_at(_at(loop, due.first())) as scope:
                async for message in call:
                    now = now_ns()
                    data = frame(message)
                    exchange.read_ns.append(now)
                    exchange.pieces.append(data)
                    exchange.bytes_in += len(data)
                    if is_token is None:
                        continue
                    if exchange.first_token_ns or is_token(data):
                        exchange.first_token_ns = exchange.first_token_ns or now
                        due.phase = (STALL_TIMEOUT, now, limits.stall_s)
                    if is_final(message):
                        final = True
                        due.phase = (COMPLETE, now, FINAL_S)
                    scope.reschedule(_at(loop, due.first()))
            _status(exchange, 0, "")
        except TimeoutError:
            if final:
                _status(exchange, 0, "")
            else:
                _, kind, limit_s = due.first()
                _end(exchange, kind, _LIMITS[kind].format(limit_s=limit_s, so_far=_so_far(exchange, is_token)))
        except self._grpc.aio.AioRpcError as e:
            code, text = int(e.code().value[0]), e.details() or ""
            if not connection_failed(code, text):
                exchange.headers = [(k.lower().encode(), _raw(v)) for k, v in e.trailing_metadata() or ()]
                _status(exchange, code, text)
            elif not connected and not exchange.pieces:
                exchange.sent_ns = exchange.bytes_out = 0  # nothing has left
                _end(exchange, CONNECT_ERROR, text)
            else:
                kind = PROTOCOL_ERROR if is_no_grpc(text) else TRUNCATED
                _end(exchange, kind, f"{GRPC_STATUS[code][0]}: {text}: {_so_far(exchange, is_token)}")
        finally:
            self._calls.discard(call)
            if exchange.pieces:
                exchange.first_byte_ns = exchange.read_ns[0]
                exchange.status = exchange.status or 200
            if final and exchange.ended == COMPLETE:  # the answer's own end; its status may come later
                exchange.end_ns = due.phase[1]


class _Due:
    """The limits of one call: what comes first, and when."""

    def __init__(self, sent_ns: int, cancel_s: float | None, ttft_s: float | None, total_s: float | None) -> None:
        self._fixed = [(CANCELLED, sent_ns, cancel_s), (TOTAL_TIMEOUT, sent_ns, total_s)]
        self.phase: tuple[str, int, float | None] = (TTFT_TIMEOUT, sent_ns, ttft_s)

    def first(self) -> tuple[float, str, float]:
        """(ns, how it would end, its limit in s); inf where there is none."""
        return min(
            ((from_ns + s * 1e9, kind, s) for kind, from_ns, s in (*self._fixed, self.phase) if s is not None),
            default=(float("inf"), "", 0.0),
        )


def _at(loop: asyncio.AbstractEventLoop, due: tuple[float, str, float]) -> float | None:
    """By the loop's clock, never early: uvloop's is of whole ms, and so are its timers, rounded."""
    if due[0] == float("inf"):
        return None
    return loop.time() + math.ceil(max(0.0, due[0] - now_ns()) / 1e6) / 1e3 + 0.001


def _status(exchange: Exchange, code: int, text: str) -> None:
    """The call ended as the server said. An error after a message is one inside a good answer."""
    now, data = now_ns(), status_frame(code, text)
    exchange.status = 200 if exchange.pieces else GRPC_STATUS.get(code, ("", 500))[1]
    exchange.pieces.append(data)
    exchange.read_ns.append(now)
    exchange.bytes_in += len(data)
    exchange.ended, exchange.end_ns = COMPLETE, now


def _end(exchange: Exchange, ended: str, error: str) -> None:
    exchange.ended, exchange.error, exchange.end_ns = ended, error, now_ns()


def _raw(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


def _so_far(exchange: Exchange, is_token: Callable[[bytes], bool] | None) -> str:
    """What had come, for an error text."""
    if not exchange.pieces:
        return "no message of the answer"
    tokens = f"{sum(map(is_token, exchange.pieces))} token-bearing messages, " if is_token else ""
    return f"{tokens}{exchange.bytes_in} bytes, the last read {(now_ns() - exchange.read_ns[-1]) / 1e9:.3f} s ago"
