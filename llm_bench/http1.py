"""HTTP/1.1 responses and event streams: bytes in, body and events out, the same for any split of the bytes.

No socket and no clock. `Response` takes the reads of a connection, `Sse` the body pieces that it gives back.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import httptools

_BOM = b"\xef\xbb\xbf"
_DATA = b"data: "  # as LLM servers begin an event
_BETWEEN = b"\n\ndata: "  # as one ends and the next begins
# Spaces that pad a chunk's size (some proxies) are no reason to lose an answer: RFC 9112 7.1.1 lets readers skip them.
# Older versions of httptools cannot be told; llhttp has no leniency for spaces within an extension.
_LENIENT = hasattr(httptools.HttpResponseParser, "set_dangerous_leniencies")


class ProtocolError(ValueError):
    """What came is not HTTP/1.1; `pieces` is the body that the failing read had completed before it went wrong."""

    def __init__(self, text: str, pieces: Sequence[bytes] = ()) -> None:
        super().__init__(text)
        self.pieces = list(pieces)


FRAMING_ERRORS = (ProtocolError, httptools.HttpParserError, httptools.HttpParserUpgrade)


def _after_the_end(data: bytes) -> None:
    if data.strip(b"\r\n"):  # RFC 9112 2.2: an empty line between messages is to be ignored
        raise ProtocolError(f"bytes after the end of the response: {data[:60]!r}")


class Response:
    """One response to a POST, framed by llhttp (RFC 9112). Interim 1xx responses are skipped.

    The C parser calls `list.append` for a body piece, so a read costs no call of Python's, whatever it holds. The
    parser and this object hold each other; it is let go at the end, so that no request waits for the garbage collector.
    """

    __slots__ = (
        "_parser",
        "_pieces",
        "close_delimited",
        "complete",
        "head_done",
        "headers",
        "keep_alive",
        "on_body",
        "parse",
        "status",
    )

    ends: list[int] | None = None  # places in the body where its HTTP chunks end, of a framing.ChunkedResponse

    def __init__(self, pieces: list[bytes] | None = None, on_body: Callable[[bytes], object] | None = None) -> None:
        """`pieces`: the list to which the body is appended as it comes; None: one of our own, for `feed`."""
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []  # names in lower case
        self.head_done = False
        self.complete = False
        self.keep_alive = False  # what the head promises; llama.cpp promises and closes all the same
        self.close_delimited = False  # neither Content-Length nor chunked: the body ends when the peer closes
        self._pieces: list[bytes] = [] if pieces is None else pieces
        self.on_body = on_body or self._pieces.append
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        if _LENIENT:
            self._parser.set_dangerous_leniencies(lenient_spaces_after_chunk_size=True)
        # The parser's own method, for who reads a token at a time: `failure` says what a FRAMING_ERROR of it means.
        self.parse: Callable[[bytes], object] = self._parser.feed_data

    def feed(self, data: bytes) -> list[bytes]:
        """The body pieces that this read completed. Raises ProtocolError, also for bytes after the end."""
        before = len(self._pieces)
        try:
            self.parse(data)
        except FRAMING_ERRORS as e:
            raise ProtocolError(self.failure(e, data), self._pieces[before:]) from None
        if self.complete:
            self.let_go()
        return self._pieces[before:]

    def let_go(self) -> None:
        """Nothing more is expected: only empty lines are no failure now."""
        self._parser, self.parse = None, _after_the_end

    def eof(self) -> bool:
        """The peer closed: is that a proper end of this response?"""
        if self.head_done and self.close_delimited:
            self.complete = True
        self.let_go()
        return self.complete

    def failure(self, e: Exception, data: bytes) -> str:
        """What is wrong with the read at which `parse` raised `e`; the response is over."""
        self.let_go()
        if isinstance(e, ProtocolError):
            return str(e)
        if self.complete:
            return f"bytes after the end of the response, in the read {data[:60]!r}"
        if isinstance(e, httptools.HttpParserUpgrade):
            return "the server switched protocols (101), which nobody asked for"
        return f"not HTTP/1.1: {e}, in the read {data[:60]!r}"

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self.complete:
            raise ProtocolError("a second response")  # feed() says so; llhttp must not add its body to ours

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.head_done:  # a trailer's fields come by the same door
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 200:
            self.headers.clear()
            return
        self.status = status
        self.head_done = True
        self.keep_alive = self._parser.should_keep_alive()
        self.close_delimited = status not in (204, 304) and not any(map(_delimits, self.headers))

    def on_message_complete(self) -> None:
        self.complete = self.head_done


def _delimits(header: tuple[bytes, bytes]) -> bool:
    name, value = header
    return name == b"content-length" or (name == b"transfer-encoding" and value.strip().lower().endswith(b"chunked"))


class Sse:
    """An event stream's data (WHATWG HTML, "Server-sent events"), with LF, CRLF or CR as line ends, in any split.

    An event whose data is empty is dropped and counted in `empties`: no protocol of the field says anything by it.
    """

    __slots__ = ("_at_start", "_ended_in_cr", "_parts", "comments", "empties", "names")

    def __init__(self) -> None:
        self.comments = 0  # comment lines: liveness, no tokens
        self.empties = 0
        self.names: dict[int, bytes] = {}  # position in what feed() last returned -> the event's name, where it has one
        self._parts: list[bytes] = []  # of the event not yet complete; joined only when a line end comes
        self._at_start = True
        self._ended_in_cr = False

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that this piece completed. Never raises."""
        if self.names:
            self.names = {}
        if self._ended_in_cr and piece:
            self._ended_in_cr = False
            if piece[0] == 0x0A:  # the second half of a CRLF cut in two: its CR has ended the line already
                piece = piece[1:]
        if b"\r" in piece:
            self._ended_in_cr = piece[-1] == 0x0D
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if b"\n" not in piece:
            if piece:
                self._parts.append(piece)
            return []
        if self._parts:
            self._parts.append(piece)
            piece = b"".join(self._parts)
            self._parts.clear()
        if self._at_start:
            self._at_start = False
            piece = piece.removeprefix(_BOM)
        # Invariant: `piece` begins where a block of lines begins; each block but the last ended in an empty line.
        blocks = piece.split(b"\n\n")
        rest = blocks.pop()
        if rest:
            self._parts.append(rest)
        events: list[bytes] = []
        for block in blocks:
            if block[:5] == b"data:" and b"\n" not in block:  # one line of data: all that LLM servers send, bar pings
                data = block[6:] if block[5:6] == b" " else block[5:]
                if data:
                    events.append(data)
                else:
                    self.empties += 1
            elif block:
                self._lines(block, events)
        return events

    def lines(self, block: bytes) -> list[bytes]:
        """The data, if any, of one block of lines; its name is then `names[0]`."""
        self.names = {}
        events: list[bytes] = []
        self._lines(block, events)
        return events

    def _lines(self, block: bytes, events: list[bytes]) -> None:
        values: list[bytes] = []
        event_name = b""
        for line in block.split(b"\n"):
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data":
                values.append(value)
            elif name == b"event":
                event_name = value
            elif not name and line:
                self.comments += 1
        data = b"\n".join(values)
        if data:
            if event_name:
                self.names[len(events)] = event_name
            events.append(data)
        elif values:
            self.empties += 1

    def leftover(self) -> bytes:
        """The bytes of an event that no empty line has ended; such an event is not one (the spec discards it)."""
        return b"".join(self._parts)


def is_event_stream(asked: bool, headers: Iterable[tuple[bytes, bytes]], pieces: Iterable[bytes]) -> bool | None:
    """Is this body an event stream? By what came, not by what was asked or declared; None while only blanks have come.

    Where a stream was asked for, servers send one as text/plain or under no type, and answer an error with JSON under
    text/event-stream (Triton): no event stream begins with a brace or a bracket. `headers`: names in lower case.
    """
    first = next((start for piece in pieces if (start := piece.lstrip())), b"")
    if not first:
        return None
    if first[:1] in (b"{", b"["):
        return False
    return asked or any(name == b"content-type" and b"event-stream" in value.lower() for name, value in headers)


def is_web_page(body: bytes) -> bool:
    """Is this HTML, which no protocol of ours answers with?"""
    head = body.lstrip()[:200].lower()
    return head.startswith((b"<!doctype", b"<html")) or (head.startswith(b"<") and b"<head" in head)


def event_in(piece: bytes) -> bytes:
    """The data of a piece of a body that is one event of one line, as most servers write them; b"" of any other."""
    one_line = piece.startswith(_DATA) and piece.endswith(b"\n\n") and piece.find(b"\n") == len(piece) - 2
    return piece[len(_DATA) : -2] if one_line and b"\r" not in piece else b""


class Events(NamedTuple):
    """The events of a finished body, in columns: pairs would have to be made, and taken apart again."""

    ns: list[int]  # when the read came that completed the event
    data: list[bytes]
    comments: int
    leftover: bytes
    names: dict[int, str]  # place in `data` -> the event's name, of those that have one other than "message"


def events(read_ns: Sequence[int], pieces: Sequence[bytes], ends: Sequence[int] | None = None) -> Events:
    """All events of a body whose piece k was read at read_ns[k]; the events that one read completed share its stamp."""
    body = b"".join(pieces)
    if b"\r" in body or body.startswith(_BOM):
        return _events_by_piece(read_ns, pieces)
    # The same in one go: where an event ends in the body tells in which read it did.
    sse = Sse()
    blocks = body.split(b"\n\n")
    rest = blocks.pop()
    stamps: list[int] = []
    found: list[bytes] = []
    names: dict[int, str] = {}
    read, end, edge = -1, 0, 0  # `edge`: where the piece of this read ends; `end`: where the block does
    ns = 0
    for block in blocks:
        end += len(block) + 2
        while edge < end:
            read += 1
            edge += len(pieces[read])
            ns = read_ns[read]
        if block[:5] == b"data:" and b"\n" not in block:
            data = block[6:] if block[5:6] == b" " else block[5:]
            if data:
                stamps.append(ns)
                found.append(data)
            else:
                sse.empties += 1
        elif block:
            for data in sse.lines(block):
                stamps.append(ns)
                found.append(data)
            _note_names(sse, len(found) - 1, names)
    return Events(stamps, found, sse.comments, rest, names)


def one_line_events(read_ns: Sequence[int], pieces: Sequence[bytes]) -> Events | None:
    """As `events`, in a fifth of the time, of a body that is nothing but events of one line; None of any other."""
    body = b"".join(pieces)
    if not body.startswith(_DATA) or not body.endswith(b"\n\n") or b"\r" in body:
        return None
    lines = body[len(_DATA) : -2].split(_BETWEEN)
    if not all(lines) or b"\n" in b"".join(lines):
        return None
    return Events(_stamps(read_ns, pieces, lines), lines, 0, b"", {})


def _stamps(read_ns: Sequence[int], pieces: Sequence[bytes], lines: list[bytes]) -> list[int]:
    """When the read came that completed each event of one line."""
    if len(pieces) == 1:
        return [read_ns[0]] * len(lines)
    if len(pieces) == len(lines) and [len(piece) - len(_BETWEEN) for piece in pieces] == list(map(len, lines)):
        return list(read_ns)  # an event a read
    read, end, edge, ns = -1, 0, 0, 0
    stamps: list[int] = []
    for line in lines:
        end += len(line) + len(_BETWEEN)
        while edge < end:
            read += 1
            edge += len(pieces[read])
            ns = read_ns[read]
        stamps.append(ns)
    return stamps


def _events_by_piece(read_ns: Sequence[int], pieces: Sequence[bytes]) -> Events:
    sse = Sse()
    stamps: list[int] = []
    found: list[bytes] = []
    names: dict[int, str] = {}
    for ns, piece in zip(read_ns, pieces, strict=True):
        new = sse.feed(piece)
        _note_names(sse, len(found), names)
        stamps += [ns] * len(new)
        found += new
    return Events(stamps, found, sse.comments, sse.leftover(), names)


def _note_names(sse: Sse, place: int, names: dict[int, str]) -> None:
    """Names of the events that begin at `place`, of those that have one other than the spec's default."""
    for k, name in sse.names.items():
        if name != b"message":
            names[place + k] = name.decode(errors="replace")
