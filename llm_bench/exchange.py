"""What the socket saw of one request: stamps and bytes, uninterpreted; and the limits it was given.

`wire` fills an Exchange, `answer` reads it. All stamps are integer nanoseconds of CLOCK_MONOTONIC; 0 means "never".
"""

from array import array
from dataclasses import dataclass, field

# How an exchange ended, as the socket saw it. Only the first two can become `ok`.
COMPLETE = "complete"  # the HTTP message ended as its framing said
CLOSED = "closed"  # the peer closed a body that only a close delimits (no Content-Length, not chunked)
TRUNCATED = "truncated"  # the peer closed or reset before the framing was complete
CANCELLED = "cancelled"  # closed by us because the trace said so
CUT = "cut"  # closed by us because the run ended
CONNECT_ERROR = "connect_error"
CONNECT_TIMEOUT = "connect_timeout"
TTFT_TIMEOUT = "ttft_timeout"  # no token-bearing event in time; comments and role events do not count
STALL_TIMEOUT = "stall_timeout"  # after the first token, no data or comment byte in time
TOTAL_TIMEOUT = "total_timeout"
PROTOCOL_ERROR = "protocol_error"  # what came is not HTTP/1.1

ANSWERED = frozenset((COMPLETE, CLOSED))  # a whole message came, whatever it says
NOT_CONNECTED = frozenset((CONNECT_ERROR, CONNECT_TIMEOUT))  # nothing was sent


@dataclass(frozen=True)
class Timeouts:
    """Limits of one request in seconds; None is no limit. Printed at start, stored in the header: none is hidden."""

    connect_s: float | None = 10.0
    ttft_s: float | None = 300.0
    stall_s: float | None = 120.0
    total_s: float | None = 3600.0


@dataclass(slots=True)
class Exchange:
    """One attempt, or the last of several, at one request."""

    sent_ns: int = 0  # the last byte was handed to the socket; after a reopening, that of the first sending
    first_byte_ns: int = 0  # first byte of the response
    first_token_ns: int = 0  # the read that brought the first token-bearing event; HTTP/1.1: 0 if the end came with it
    end_ns: int = 0  # terminal byte, close, or the moment it was given up
    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)  # names in lower case
    # The body as it came, a piece a read: the last of piece k had come at read_ns[k], by the kernel's stamp where
    # `arrivals` has one, else by the clock at the read, before parsing.
    read_ns: "array[int]" = field(default_factory=lambda: array("q"))
    pieces: list[bytes] = field(default_factory=list)
    chunk_ends: list[int] | None = None  # places in the body where HTTP chunks end, where they are all its framing
    bytes_in: int = 0  # all bytes received, heads and framing included
    bytes_out: int = 0  # handed to the socket, over all sendings of this attempt
    url_index: int = 0  # of the target's URLs, the one it went to
    ended: str = ""  # one of the constants above
    error: str = ""  # text of a failure: never empty when `ended` is a failure; else why no retry was made
    reconnects: int = 0  # kept-alive connections found closed before the server had read the request
    connect_ns: int = 0  # waiting for new connections, TLS included, until `sent_ns`; 0 where one was reused
