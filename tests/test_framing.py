"""Streams without events: lines and chunks, the same for any split of the bytes, each with the stamp of its read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench.framing import CHUNKS, FRAMINGS, LINES, SSE, ChunkedResponse
from tests.fixtures import cut, cuts, unhurried

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
parts = st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=8)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@unhurried
@given(parts, cuts)
def test_each_chunk_is_an_event_wherever_the_reads_fall_with_the_stamp_of_the_read_that_ended_it(chunks, at):
    body = HEAD + b"".join(map(chunk, chunks)) + b"0\r\n\r\n"
    response, read_ns, pieces, seen = ChunkedResponse([]), [], [], 0
    ended_in = {}  # chunk -> the read that brought its last byte
    edges, end = [], len(HEAD)
    for data in chunks:
        end += len(chunk(data))
        edges.append(end - 2)  # the line end after it is framing
    for ns, piece in enumerate(cut(body, at), 1):
        seen += len(piece)
        for k, edge in enumerate(edges):
            if edge <= seen:
                ended_in.setdefault(k, ns)
        if got := response.feed(piece):
            read_ns.append(ns)
            pieces.append(b"".join(got))
    assert response.complete
    found = FRAMINGS[CHUNKS].events(read_ns, pieces, response.ends)
    assert found.data == chunks
    assert found.ns == [ended_in[k] for k in range(len(chunks))]
    assert found.leftover == b""


@unhurried
@given(parts, st.integers(1, 60))
def test_half_a_chunk_is_left_over_and_no_event(chunks, cut_off):
    body = HEAD + b"".join(map(chunk, chunks))
    body = body[: max(len(HEAD), len(body) - cut_off)]
    response = ChunkedResponse([])
    pieces = response.feed(body)
    found = FRAMINGS[CHUNKS].events([1] * len(pieces), pieces, response.ends)
    whole = found.data
    if response.ends:
        assert whole == chunks[: len(whole)]
        assert b"".join(chunks).startswith(b"".join(whole) + found.leftover)


def test_a_body_that_is_not_chunked_is_an_event_a_read():
    found = FRAMINGS[CHUNKS].events([5, 9], [b"a", b"bc"], None)
    assert (found.ns, found.data) == ([5, 9], [b"a", b"bc"])


lines = st.lists(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5), max_size=3), max_size=6)


@unhurried
@given(lines, st.sampled_from([b"\n", b"\r\n", b"\n\n"]), cuts, st.booleans())
def test_each_line_is_an_event_for_any_split_and_a_last_object_needs_no_line_end(objects, end, at, open_ended):
    said = [json.dumps(o).encode() for o in objects]
    body = b"".join(line + end for line in said)
    body = body[: -len(end)] if open_ended and body else body
    pieces = [piece for piece in cut(body, at) if piece]
    found = FRAMINGS[LINES].events(list(range(len(pieces))), pieces, None)
    assert found.data == said
    assert found.ns == sorted(found.ns)
    feeder = FRAMINGS[LINES].feeder()
    fed = [data for piece in pieces for data in feeder.feed(piece)]
    assert fed == (said[:-1] if open_ended and said else said)


def test_half_a_line_is_left_over():
    found = FRAMINGS[LINES].events([1, 2], [b'{"a": 1}\n{"b"', b": "], None)
    assert (found.ns, found.data, found.leftover) == ([1], [b'{"a": 1}'], b'{"b": ')


@pytest.mark.parametrize("framing", [LINES, CHUNKS])
@pytest.mark.parametrize(
    ("asked", "status", "headers", "pieces", "is_stream"),
    [
        (True, 200, [], [b"x"], True),
        (True, 200, [(b"content-type", b"text/plain")], [b"{"], True),
        (True, 200, [(b"content-type", b"application/json")], [b"{"], False),
        (True, 200, [(b"content-length", b"5")], [b"x"], False),
        (True, 503, [], [b"x"], False),
        (False, 200, [], [b"x"], False),
        (True, 200, [], [b""], None),
    ],
)
def test_what_is_a_stream_without_events(framing, asked, status, headers, pieces, is_stream):
    assert FRAMINGS[framing].is_stream(asked, status, headers, pieces) is is_stream


def test_a_chunked_response_lets_go_of_itself():
    response = ChunkedResponse([])
    response.feed(HEAD + b"0\r\n\r\n")
    assert response.complete
    assert response.on_body.__self__ is response._pieces  # no closure over the response is left


@pytest.mark.parametrize("framing", [SSE, LINES, CHUNKS])
def test_every_framing_reads_an_empty_body(framing):
    assert FRAMINGS[framing].events([], [], None).data == []
