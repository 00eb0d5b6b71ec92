"""FRAMINGS: how the events of a streamed answer follow each other in its body: as server-sent events, lines or chunks.

No socket and no clock.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from llm_bench.http1 import Events, Response, Sse, event_in, events, is_event_stream, one_line_events


class ChunkedResponse(Response):
    """A Response that also notes where each HTTP chunk ends: for servers whose chunks are all the framing there is."""

    __slots__ = ("ends", "size")

    def __init__(self, pieces: list[bytes] | None = None) -> None:
        pieces = [] if pieces is None else pieces
        self.ends: list[int] | None = []
        self.size = 0

        def take(data: bytes) -> None:
            pieces.append(data)
            self.size += len(data)

        super().__init__(pieces, take)

    def on_chunk_complete(self) -> None:
        if self.ends is not None and self.size > (self.ends[-1] if self.ends else 0):  # the last chunk is empty
            self.ends.append(self.size)

    def let_go(self) -> None:
        super().let_go()
        self.on_body = self._pieces.append  # `take` holds this object


_ERROR_LINE = re.compile(rb"(?:^|[\r\n])error: *([^\r\n]+)")


def server_sent(read_ns: Sequence[int], pieces: Sequence[bytes], ends: Sequence[int] | None = None) -> Events:
    """The events of a stream, and what stands in lines of a field `error`, which the specification has not.

    llama.cpp said so what went wrong in a stream until September 2025, on OpenAI's routes too: the error object itself
    (https://github.com/ggml-org/llama.cpp/pull/16109). They come last, under the name that makes an event an error:
    the stream has failed wherever such a line stands.
    """
    if (found := one_line_events(read_ns, pieces)) is not None:  # as nearly every stream
        return found
    found, body = events(read_ns, pieces, ends), b"".join(pieces)
    for said in _ERROR_LINE.findall(body):
        found.names[len(found.data)] = "error"
        found.data.append(b'{"error": %b}' % said if said[:1] == b"{" and said[:8] != b'{"error"' else said)
        found.ns.append(read_ns[-1])
    return found


def lines(read_ns: Sequence[int], pieces: Sequence[bytes], ends: Sequence[int] | None = None) -> Events:
    """Each line of a body that is not blank, as JSON lines are streamed. A last one without its end is left over."""
    body = b"".join(pieces)
    *whole, rest = body.split(b"\n")
    if rest.rstrip().endswith(b"}"):  # the last object is whole; many servers end it without a line end
        whole.append(rest)
        rest = b""
    places: list[int] = []
    end = 0
    for line in whole:
        end += len(line) + 1
        places.append(min(end, len(body)))
    stamps = _stamps_at(read_ns, pieces, places)
    said = [(ns, data) for ns, line in zip(stamps, whole, strict=True) if (data := line.strip())]
    return Events([ns for ns, _ in said], [data for _, data in said], 0, rest, {})


def chunks(read_ns: Sequence[int], pieces: Sequence[bytes], ends: Sequence[int] | None = None) -> Events:
    """Each HTTP chunk of a body, or each read of one that was not chunked."""
    if not ends:
        said = [(ns, piece) for ns, piece in zip(read_ns, pieces, strict=True) if piece]
        return Events([ns for ns, _ in said], [piece for _, piece in said], 0, b"", {})
    body = b"".join(pieces)
    begins = [0, *ends[:-1]]
    stamps = _stamps_at(read_ns, pieces, ends)
    return Events(stamps, [body[begin:end] for begin, end in zip(begins, ends, strict=True)], 0, body[ends[-1] :], {})


def _stamps_at(read_ns: Sequence[int], pieces: Sequence[bytes], places: Sequence[int]) -> list[int]:
    """When each place of a body, in rising order, had been read."""
    read, edge, stamps = -1, 0, []
    for place in places:
        while edge < place:
            read += 1
            edge += len(pieces[read])
        stamps.append(read_ns[max(read, 0)])
    return stamps


class _Lines:
    """As Sse, of lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        *whole, self._rest = (self._rest + piece).split(b"\n")
        return [line.strip() for line in whole if line.strip()]


class _Chunks:
    """As Sse, of chunks: any byte is a sign of life from the model, wherever its chunk ends."""

    def feed(self, piece: bytes) -> list[bytes]:
        return [piece] if piece else []


def _is_streamed(
    asked: bool, status: int, headers: Iterable[tuple[bytes, bytes]], pieces: Iterable[bytes]
) -> bool | None:
    """Is this body a stream without events? An error is not, nor what has a length or says that it is JSON."""
    if not any(pieces):
        return None
    for name, value in headers:
        if name == b"content-length" or (name == b"content-type" and value.lower().startswith(b"application/json")):
            return False
    return asked and 200 <= status < 300


def _is_event_stream(
    asked: bool, status: int, headers: Iterable[tuple[bytes, bytes]], pieces: Iterable[bytes]
) -> bool | None:
    return is_event_stream(asked, headers, pieces)


class Feeder(Protocol):
    """Events as they come: body pieces in, the data of the events that each completed out."""

    def feed(self, piece: bytes) -> list[bytes]: ...


class Framing(NamedTuple):
    """How the events of a streamed answer follow each other."""

    response: Callable[[list[bytes]], Response]
    is_stream: Callable[[bool, int, Iterable[tuple[bytes, bytes]], Iterable[bytes]], bool | None]
    feeder: Callable[[], Feeder]
    events: Callable[[Sequence[int], Sequence[bytes], Sequence[int] | None], Events]  # of a finished body
    event_in: Callable[[bytes], bytes] | None = None  # the data of a piece that is one event; b"" of any other


SSE, LINES, CHUNKS = "sse", "lines", "chunks"
FRAMINGS = {
    SSE: Framing(Response, _is_event_stream, Sse, server_sent, event_in),
    LINES: Framing(Response, _is_streamed, _Lines, lines),
    CHUNKS: Framing(ChunkedResponse, _is_streamed, _Chunks, chunks),
}
