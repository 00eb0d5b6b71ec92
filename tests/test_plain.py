"""Texts of plain events, cut around a template: as the dialect's own `plain` reads each of them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench.dialects import DIALECTS
from llm_bench.plain import plain_reader
from tests.fixtures import unhurried

OPENAI = ("openai-chat", "openai-completions")


def said(name, text, **more) -> dict:
    choice = {"delta": {"content": text}} if name == "openai-chat" else {"text": text}
    return {"id": "x", "choices": [{"index": 0, **choice, "finish_reason": None}], **more}


def read_whole(name, events) -> list[str | None]:
    """What a stream's reader says of each event; None of those that are not plain."""
    texts, found = plain_reader(DIALECTS[name]), []
    while len(found) < len(events):
        found += texts(events, len(found)) or [None]
    return found


def agrees(name, events) -> list[str | None]:
    found = read_whole(name, events)
    assert found == [DIALECTS[name].plain(data) for data in events]
    return found


texts = st.text(max_size=8) | st.sampled_from(
    ['"', "\\", "\n", "é", "content", '"content":"', "}", "a" * 9, "\x7f", "\ud800", '","', ","]
)
dumps = st.sampled_from([{"separators": (",", ":")}, {}, {"ensure_ascii": False}])
more = st.sampled_from([{}, {}, {}, {"created": 1}, {"usage": None}, {"usage": {"completion_tokens": 2}}])
hits = st.lists(st.tuples(st.integers(0, 400), st.binary(min_size=1, max_size=2)), max_size=2)


@unhurried
@given(st.lists(st.tuples(texts, more, hits), max_size=12), dumps)
@pytest.mark.parametrize("name", OPENAI)
def test_a_streams_reader_reads_each_event_as_plain_does(name, events, how):
    stream = []
    for text, rest, bends in events:
        data = json.dumps(said(name, text, **rest), **how).encode(errors="replace")
        stream.append(data)
        for at, bytes_ in bends:  # anything, anywhere in it
            stream.append(data[: at % len(data)] + bytes_ + data[at % len(data) :])
    agrees(name, stream)


INSIDES = [
    b"",
    b'a","b',
    b"\xff",
    b"\xed\xa0\x80",
    b'","x":"',
    b"\\n",
    b"\\",
    rb"\u0000",
    rb"\u00",
    rb"\ud83d",
    rb"\ude00",
    b"\x00",
    b"\t",
    "é".encode(),
    b'\\"',
    b'"',
    b",",
]


@unhurried
@given(st.lists(st.sampled_from(INSIDES) | st.just(b"word"), max_size=10))
@pytest.mark.parametrize("name", OPENAI)
def test_a_streams_reader_is_not_fooled_by_what_stands_where_the_text_was(name, insides):
    """Where strings that swallow a quote stand beside others that bring one, too."""
    event = json.dumps(said(name, "TEXT")).encode()
    agrees(name, [event, *(event.replace(b"TEXT", inside) for inside in insides), event])


@pytest.mark.parametrize("name", OPENAI)
def test_a_text_that_stands_twice_makes_no_template(name):
    key = "content" if name == "openai-chat" else "text"
    twice = [json.dumps(said(name, text, **{"x": {key: text}})).encode() for text in ("a", "b")]
    assert agrees(name, [*twice, twice[0].replace(b'"a"', b'"c"', 1)])[:2] == ["a", "b"]


@pytest.mark.parametrize("odd", [b": not an event", b"[DONE]", b'{"choices": []}'])
@pytest.mark.parametrize("text", ["word", 'a "quoted" one\n', "é"])
def test_a_stream_of_alike_events_is_parsed_once(odd, text):
    parsed = []

    def plain(data):
        parsed.append(data)
        return DIALECTS["openai-chat"].plain(data)

    event = json.dumps(said("openai-chat", text)).encode()
    first = json.dumps(said("openai-chat", "first")).encode()
    read = plain_reader(DIALECTS["openai-chat"]._replace(plain=plain))
    assert read([first, *[event] * 50, event], 0) == ["first", *[text] * 51]
    assert len(parsed) <= 2  # the last event, whose end no other marks, where it holds escapes
    assert read([first, *[event] * 50, first, odd], 0) == ["first", *[text] * 50, "first"]


def test_an_event_without_the_key_of_a_text_is_not_read_as_plain():
    def plain(data):
        raise AssertionError(data)

    read = plain_reader(DIALECTS["openai-chat"]._replace(plain=plain))
    assert read([b'{"choices": [], "usage": {"completion_tokens": 3}}'], 0) == []
