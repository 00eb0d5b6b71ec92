import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench.http1 import ProtocolError, Response, Sse, events, is_event_stream, one_line_events
from tests.fixtures import captured, cut, cuts, raw_reads, unhurried

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nAccess-Control-Allow-Origin: \r\n"
    b"TRANSFER-encoding: Chunked\r\n\r\n"
    b"5;name=value\r\nhello\r\n7\r\n, world\r\n0\r\nX-Trailer: late\r\n\r\n"
)
LENGTH = b"HTTP/1.1 200 OK\r\ncontent-length: 12\r\nX-Empty:\r\n\r\nhello, world"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + LENGTH
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\nServer: old\r\n\r\nhello, world"


def fed(*reads: bytes) -> tuple[Response, bytes]:
    response = Response()
    return response, b"".join(piece for read in reads for piece in response.feed(read))


@pytest.mark.parametrize("message", [CHUNKED, LENGTH, INTERIM], ids=["chunked", "length", "interim"])
@unhurried
@given(cuts)
def test_any_split_of_a_response_gives_the_same_body(message, at):
    response, body = fed(*cut(message, at))
    assert (response.status, body, response.complete, response.keep_alive) == (200, b"hello, world", True, True)
    assert response.eof()


@pytest.mark.parametrize("message", [CHUNKED, LENGTH, UNTIL_CLOSE], ids=["chunked", "length", "until close"])
def test_a_byte_at_a_time_gives_each_byte_of_the_body_when_it_comes(message):
    response = Response()
    came = [response.feed(message[i : i + 1]) for i in range(len(message))]
    assert b"".join(piece for pieces in came for piece in pieces) == b"hello, world"
    assert max(map(len, came)) == 1


@unhurried
@given(cuts)
def test_a_body_without_length_ends_when_the_peer_closes(at):
    response, body = fed(*cut(UNTIL_CLOSE, at))
    assert (body, response.close_delimited, response.complete, response.keep_alive) == (
        b"hello, world",
        True,
        False,
        False,
    )
    assert response.eof()
    assert response.complete


@pytest.mark.parametrize("message", [CHUNKED, LENGTH, INTERIM], ids=["chunked", "length", "interim"])
def test_a_close_before_the_end_is_no_proper_end(message):
    for length in range(len(message)):
        response, _ = fed(message[:length])
        assert not response.complete
        assert not response.eof()


def test_an_answer_that_has_not_begun_has_no_proper_end():
    assert not Response().eof()
    assert not fed(b"HTTP/1.1 200 OK\r\nServer: x\r\n")[0].eof()


def test_header_names_are_lower_case_values_as_they_came_and_trailers_left_out():
    response, _ = fed(CHUNKED)
    assert response.headers == [
        (b"content-type", b"text/event-stream"),
        (b"access-control-allow-origin", b""),
        (b"transfer-encoding", b"Chunked"),
    ]


def test_headers_of_an_interim_response_are_not_those_of_the_answer():
    assert fed(INTERIM)[0].headers == [(b"content-length", b"12"), (b"x-empty", b"")]


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_a_status_without_a_body_is_complete_after_its_head(status):
    response, body = fed(b"HTTP/1.1 " + status + b"\r\nServer: x\r\n\r\n")
    assert (response.complete, response.close_delimited, response.keep_alive, body) == (True, False, True, b"")


@pytest.mark.parametrize(
    ("head", "keep_alive"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", False),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nCONNECTION: Close\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\nConnection: keep-alive\r\n\r\n", True),
    ],
)
def test_keep_alive_is_what_the_head_promises(head, keep_alive):
    response, _ = fed(head)
    assert (response.complete, response.keep_alive) == (True, keep_alive)


@pytest.mark.parametrize("message", [CHUNKED, LENGTH, LENGTH.replace(b"X-Empty:", b"Connection: close")])
@pytest.mark.parametrize("extra", [b"x", LENGTH, b"\r\n\r\nHTTP/1.1 200 OK\r\n"])
def test_bytes_after_the_end_are_an_error_that_keeps_the_body(message, extra):
    with pytest.raises(ProtocolError, match="after the end") as e:
        fed(message + extra)
    assert b"".join(e.value.pieces) == b"hello, world"
    response, body = fed(message)
    with pytest.raises(ProtocolError, match="after the end"):
        response.feed(extra)
    assert body == b"hello, world"


@unhurried
@given(cuts)
def test_blanks_that_pad_a_chunks_size_are_no_error(at):
    padded = CHUNKED.replace(b"\r\n7\r\n", b"\r\n7  \r\n").replace(b"\r\n0\r\n", b"\r\n0\t \r\n")
    assert padded != CHUNKED
    response, body = fed(*cut(padded, at))
    assert (body, response.complete, response.keep_alive) == (b"hello, world", True, True)


def test_an_empty_line_after_the_end_is_nothing():
    assert fed(LENGTH + b"\r\n")[1] == b"hello, world"
    assert fed(LENGTH, b"\r\n")[1] == b"hello, world"


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcdef\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n\x00",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n\x00",
    ],
)
def test_what_is_not_http_is_an_error_with_words(data):
    with pytest.raises(ProtocolError, match=r"not HTTP/1\.1: |switched protocols"):
        fed(data)


@unhurried
@given(st.binary(max_size=300), cuts)
def test_hostile_bytes_raise_only_protocol_error(tail, at):
    for start in (b"", b"HTTP/1.1 200 OK\r\n", CHUNKED[:-40], LENGTH):
        response = Response()
        with contextlib.suppress(ProtocolError):
            for read in cut(start + tail, at):
                response.feed(read)
        response.eof()


@pytest.mark.parametrize("server", ["llamacpp", "vllm", "ray-serve", "ray-serve-llm"])
def test_a_captured_answer_is_framed_as_it_was_read(server):
    reads = raw_reads(f"{server}/raw_tcp_stream.txt")
    response = Response()
    pieces = [(at_ms, piece) for at_ms, read in reads for piece in response.feed(read)]
    assert response.complete
    assert not response.keep_alive  # it was asked with Connection: close
    got = events([round(at_ms) for at_ms, _ in pieces], [piece for _, piece in pieces])
    assert (got.data[-1], got.comments, got.leftover, got.names) == (b"[DONE]", 0, b"", {})
    assert len(got.data) == b"".join(read for _, read in reads).count(b"data: ")


# Event streams


def whatwg(stream: bytes) -> tuple[list[bytes], int, dict[int, bytes]]:
    """The specification's own algorithm, line by line: (data of each event that has any, comments, names)."""
    found: list[bytes] = []
    names: dict[int, bytes] = {}
    data, name, comments, counted = b"", b"", 0, 0
    for line in re.split(rb"\r\n|\n|\r", stream.removeprefix(b"\xef\xbb\xbf"))[:-1]:
        if not line:
            if data[:-1]:
                if name:
                    names[len(found)] = name
                found.append(data[:-1])
            data, name, counted = b"", b"", comments
        elif line.startswith(b":"):
            comments += 1
        else:
            key, _, value = line.partition(b":")
            value = value[1:] if value.startswith(b" ") else value
            if key == b"data":
                data += value + b"\n"
            elif key == b"event":
                name = value
    return found, counted, names


WORDS = [b"data: ", b"data:", b"data", b"\n", b"\n\n", b"\r", b"\r\n", b"\r\n\r\n", b":", b": ping", b" ", b"{x}", b"y"]
WORDS += [b"event: e", b"id: 7", b"\xef\xbb\xbf", b"\x00", b"retry: 9\n"]
streams = st.lists(st.sampled_from(WORDS), max_size=25).map(b"".join)


@unhurried
@given(streams, cuts)
def test_any_split_gives_what_the_specification_gives(stream, at):
    sse = Sse()
    found: list[bytes] = []
    names: dict[int, bytes] = {}
    for piece in cut(stream, at):
        new = sse.feed(piece)
        names |= {len(found) + k: name for k, name in sse.names.items()}
        found += new
    assert (found, sse.comments, names) == whatwg(stream)


@unhurried
@given(streams)
def test_a_byte_at_a_time_gives_the_same_events(stream):
    whole, single = Sse(), Sse()
    assert whole.feed(stream) == [e for i in range(len(stream)) for e in single.feed(stream[i : i + 1])]
    assert (whole.comments, whole.empties, whole.leftover()) == (single.comments, single.empties, single.leftover())


@pytest.mark.parametrize(
    ("stream", "found"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data:a\r\n\r\ndata:  b\r\r", [b"a", b" b"]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"data: a\ndata\ndata: b\n\n", [b"a\n\nb"]),
        (b"id: 1\nretry: 5\nevent: ping\ndata: a\nother: x\n\n", [b"a"]),
        (b"\n\n\ndata: a\n\n\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data:\n\ndata\n\n: data: a\n\n", []),
        (b"data: a\n", []),
        (b"data: caf\xc3\xa9\n\n", ["café".encode()]),
    ],
)
def test_line_ends_spaces_and_fields(stream, found):
    assert Sse().feed(stream) == found


def test_a_crlf_cut_in_two_dispatches_once_and_at_its_first_byte():
    sse = Sse()
    assert [sse.feed(p) for p in (b"data: a\r", b"\n", b"\r", b"\n", b"data: b\r\r", b"\n")] == [
        [],
        [],
        [b"a"],
        [],
        [b"b"],
        [],
    ]


def test_comments_and_empty_events_are_counted_and_give_no_event():
    sse = Sse()
    assert sse.feed(b": one\n\n:\n\nevent: ping\ndata:\n\ndata: \n\ndata: x\n: two\n\n") == [b"x"]
    assert (sse.comments, sse.empties) == (3, 2)


def test_an_events_name_stands_at_its_place_in_the_last_feed():
    sse = Sse()
    assert sse.feed(b"data: a\n\nevent: stop\ndata: b\n\n") == [b"a", b"b"]
    assert sse.names == {1: b"stop"}
    assert sse.feed(b"data: c\n\n") == [b"c"]
    assert sse.names == {}


def test_an_event_has_the_stamp_of_the_read_that_completed_it_and_events_of_one_read_share_it():
    pieces = [b"data: a\n\ndata: b\n\ndata: c", b"c\n", b"\ndata: d\n\nda"]
    assert events([10, 20, 30], pieces) == (
        [10, 10, 30, 30],
        [b"a", b"b", b"cc", b"d"],
        0,
        b"da",
        {},
    )


BLOCKS = [b"data: {}", b"data: one", b"data:  two ", b"data: data: x", b"data:none", b"data: ", b"data", b": ping", b""]
BLOCKS += [b"event: e\ndata: x", b"data: a\ndata: b", b"data: a\n: c", b"id: 1"]


@unhurried
@given(
    st.lists(st.sampled_from(BLOCKS[:2] * 6 + BLOCKS), max_size=12),
    st.sampled_from([b"", b"\n", b"data: x", b"\n: "]),
    cuts,
)
def test_a_whole_body_gives_the_events_that_its_pieces_give_one_by_one(blocks, tail, at):
    body = b"".join(block + b"\n\n" for block in blocks) + tail
    pieces = [piece for piece in cut(body, at) if piece]
    read_ns = [10 * (k + 1) for k in range(len(pieces))]
    sse, stamped = Sse(), []
    for ns, piece in zip(read_ns, pieces, strict=True):
        stamped += [(ns, data) for data in sse.feed(piece)]
    got = events(read_ns, pieces)
    assert list(zip(got.ns, got.data, strict=True)) == stamped
    assert (got.comments, got.leftover) == (sse.comments, sse.leftover())
    assert events([7], [body]).data == got.data
    short_cut = one_line_events(read_ns, pieces)
    assert short_cut in (None, got)
    if blocks and not tail and all(block.startswith(b"data: ") and block != b"data: " for block in blocks):
        assert short_cut == got if b"\n" not in b"".join(blocks) else short_cut is None


@unhurried
@given(streams, cuts)
def test_an_events_name_stands_at_its_place_in_the_whole_stream_whatever_the_split(stream, at):
    stream = stream.replace(b"event: e", b"event: error") + b"event: message\ndata: z\n\nevent: \xff\ndata: z\n\n"
    pieces = cut(stream, at)
    got = events(range(len(pieces)), pieces)
    assert got.names == {k: n.decode(errors="replace") for k, n in whatwg(stream)[2].items() if n != b"message"}
    assert max(got.names) == len(got.data) - 1


SSE_TYPE = [(b"content-type", b"Text/Event-Stream; charset=utf-8")]


@pytest.mark.parametrize(
    ("asked", "headers", "pieces", "is_stream"),
    [
        (True, SSE_TYPE, [b"data: a\n\n"], True),
        (True, [(b"content-type", b"text/plain")], [b"data: a\n\n"], True),
        (True, [], [b"\r\n", b" \n: ping\n\n"], True),
        (True, SSE_TYPE, [b"\n", b' {"error": 1}'], False),
        (True, SSE_TYPE, [b'[{"error": 1}]'], False),
        (False, SSE_TYPE, [b"data: a\n\n"], True),
        (False, [(b"content-type", b"application/json")], [b"data: a\n\n"], False),
        (True, SSE_TYPE, [], None),
        (True, SSE_TYPE, [b"", b" \r\n"], None),
    ],
)
def test_a_body_is_an_event_stream_by_its_first_byte_and_by_what_was_asked(asked, headers, pieces, is_stream):
    assert is_event_stream(asked, headers, pieces) is is_stream


@pytest.mark.parametrize(("chat", "body"), captured())
@unhurried
@given(cuts)
def test_any_split_of_a_captured_stream_gives_the_same_events(chat, body, at):
    pieces = cut(body, at)
    got = events(range(len(pieces)), pieces)
    assert (got.data, got.comments) == whatwg(body)[:2]
    assert got.leftover == b""
    assert len(got.data) == body.count(b"data: ")


@unhurried
@given(st.binary(max_size=200), cuts)
def test_hostile_bytes_never_fail_an_event_stream(data, at):
    pieces = cut(data, at)
    assert events(range(len(pieces)), pieces).data == whatwg(data)[0]
