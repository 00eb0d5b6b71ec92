"""TRANSPORTS: how a dialect's bodies reach a target: the bytes of a plan, and who sends them.

A plan holds what `frame` makes of a body before the clock starts; `open` gives the sender that the driver uses.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from llm_bench import targets
from llm_bench.dialect_kserve import BODY_HEADERS
from llm_bench.exchange import Exchange, Timeouts
from llm_bench.grpc_wire import GrpcWire
from llm_bench.kserve_messages import with_id
from llm_bench.protocol import Dialect
from llm_bench.targets import Target
from llm_bench.wire import Wire


class Sender(Protocol):
    """Requests in, Exchanges out, from one event loop."""

    @property
    def stamps(self) -> str:
        """Who stamps what arrives: "kernel", as it comes, or "clock", as it is read."""
        ...

    async def send(self, payload: bytes, cancel_after_s: float | None = None) -> Exchange:
        """Send what `frame` made, and wait for the end. What fails is in the Exchange."""
        ...

    def close(self) -> None:
        """Close what is idle, and cut what is in flight."""
        ...


class Asked(NamedTuple):
    """A target as one sender knows it."""

    target: Target
    url: str  # of its URLs, the one to be asked
    dialect: Dialect
    model: str
    stream: bool
    timeouts: Timeouts
    reuse: bool = True  # connections


class Transport(NamedTuple):
    frame: Callable[[str, bytes], bytes]  # (request id, body) -> what a plan holds
    open: Callable[[Asked], Sender]


def _http_frame(request_id: str, body: bytes, headers: Sequence[tuple[str, str]] = ()) -> bytes:
    """The rest of the HTTP head and the body. What stands before it, keys included, is the wire's."""
    own = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return f"X-Request-Id: {request_id}\r\n{own}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _http(asked: Asked) -> Wire:
    target, dialect = asked.target, asked.dialect
    wire = Wire(
        asked.url,
        dialect.path_of(asked.model, asked.stream),
        targets.auth_headers(target),
        asked.timeouts,
        dialect.is_token if asked.stream else None,
        cafile=target.cafile or None,
        insecure=target.insecure,
        reuse=asked.reuse,
        proxy=targets.proxy_of(target, asked.url),
        framing=dialect.comes.framing,
    )
    if target.cert and wire._tls is not None:
        targets.certify(target, wire._tls)
    return wire


def _grpc(asked: Asked) -> GrpcWire:
    target, dialect = asked.target, asked.dialect
    return GrpcWire(
        asked.url,
        dialect.path_of(asked.model, asked.stream),
        targets.auth_headers(target),
        asked.timeouts,
        dialect.is_token if asked.stream else None,
        cafile=target.cafile,
        certificate=target.cert,
        key=target.key or target.cert,
        reuse=asked.reuse,
    )


def _with_headers(of_body: Callable[[bytes], Sequence[tuple[str, str]]]) -> Transport:
    """HTTP, with headers that depend on the body."""
    return Transport(lambda request_id, body: _http_frame(request_id, body, of_body(body)), _http)


TRANSPORTS: dict[str, Transport] = {
    "http": Transport(_http_frame, _http),
    "grpc": Transport(with_id, _grpc),
    **{name: _with_headers(of_body) for name, of_body in BODY_HEADERS.items()},
}
