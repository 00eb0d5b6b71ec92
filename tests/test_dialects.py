import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench.dialects import DIALECTS, Chunk, Delta, Usage
from llm_bench.framing import SSE
from llm_bench.http1 import events
from tests.fixtures import NAMES, captured, hostile_events, unhurried, wire

OPENAI = ("openai-chat", "openai-completions")
CHAT, COMPLETIONS = DIALECTS["openai-chat"], DIALECTS["openai-completions"]


def decoded(dialect, obj) -> Chunk:
    return dialect.decode(json.dumps(obj).encode())


def delta(dialect, **choice) -> Delta:
    return decoded(dialect, {"choices": [choice]}).deltas[0]


# Events


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"index": 0, "delta": {"role": "assistant", "content": ""}}, Delta()),
        ({"index": 0, "delta": {"role": "assistant", "content": None}}, Delta()),
        ({"delta": {}, "finish_reason": "stop"}, Delta(finish_reason="stop")),
        ({"delta": None, "finish_reason": "stop"}, Delta(finish_reason="stop")),
        ({"delta": {"content": "a"}, "finish_reason": ""}, Delta(text="a", bears_token=True)),
        ({"index": 2, "delta": {"content": " "}}, Delta(choice=2, text=" ", bears_token=True)),
        ({"delta": {"reasoning": "r"}}, Delta(reasoning="r", bears_token=True)),
        ({"delta": {"reasoning_content": "r", "content": None}}, Delta(reasoning="r", bears_token=True)),
        ({"delta": {"reasoning": "r", "reasoning_content": "r"}}, Delta(reasoning="r", bears_token=True)),
        ({"delta": {"refusal": "no"}}, Delta(text="no", bears_token=True)),
        ({"delta": {"tool_calls": [{"function": {"name": "f", "arguments": ""}}]}}, Delta(tool="f", bears_token=True)),
        ({"delta": {"tool_calls": [{"function": {"arguments": "{}"}}]}}, Delta(tool="{}", bears_token=True)),
        ({"delta": {"tool_calls": [{"function": {"arguments": {"a": 1}}}]}}, Delta(tool='{"a":1}', bears_token=True)),
        ({"delta": {"tool_calls": [{"index": 0, "id": "c"}]}}, Delta()),
        ({"delta": {"tool_calls": []}}, Delta()),
        ({"delta": {"function_call": {"name": "f", "arguments": "1"}}}, Delta(tool="f1", bears_token=True)),
        ({"delta": {"content": ""}, "token_ids": [5, 6]}, Delta(token_ids=2, bears_token=True)),
        ({"delta": {"content": ""}, "token_ids": []}, Delta(token_ids=0)),
        (
            {"message": {"role": "assistant", "content": "whole", "tool_calls": None}, "finish_reason": "length"},
            Delta(text="whole", finish_reason="length", bears_token=True),
        ),
    ],
)
def test_a_chat_choice(choice, expected):
    assert delta(CHAT, **choice) == expected


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"text": "a", "finish_reason": None}, Delta(text="a", bears_token=True)),
        ({"text": "", "finish_reason": None}, Delta(bears_token=True)),  # vLLM's first token can have no text yet
        ({"text": "", "finish_reason": ""}, Delta(bears_token=True)),  # TGI's way to say null
        ({"text": "", "finish_reason": "length"}, Delta(finish_reason="length")),
        ({"text": "b", "finish_reason": "stop"}, Delta(text="b", finish_reason="stop", bears_token=True)),
        (
            {"text": "", "token_ids": [9], "finish_reason": "length"},
            Delta(token_ids=1, finish_reason="length", bears_token=True),
        ),
        ({"text": "", "token_ids": [], "finish_reason": None}, Delta(token_ids=0)),
        ({"index": 1, "text": "c"}, Delta(choice=1, text="c", bears_token=True)),
    ],
)
def test_a_completions_choice(choice, expected):
    assert delta(COMPLETIONS, **choice) == expected


@pytest.mark.parametrize("name", [n for n, row in DIALECTS.items() if row.comes.framing == SSE and row.comes.streams])
@pytest.mark.parametrize("data", [b"[DONE]", b" [DONE] ", b"[DONE]\n"])
def test_done_is_a_word_of_its_own(name, data):
    assert DIALECTS[name].decode(data) == Chunk(done=True)


@pytest.mark.parametrize("name", OPENAI)
def test_a_usage_event_has_no_deltas(name):
    usage = {"prompt_tokens": 40, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 32}}
    assert decoded(DIALECTS[name], {"choices": [], "usage": usage}) == Chunk(usage=Usage(40, 9, 32))
    usage["prompt_tokens_details"] = None
    assert decoded(DIALECTS[name], {"choices": None, "usage": usage}).usage == Usage(40, 9, -1)
    assert decoded(DIALECTS[name], {"choices": [], "usage": None}).usage is None


@pytest.mark.parametrize("name", OPENAI)
@pytest.mark.parametrize(
    ("event", "error", "code"),
    [
        ({"error": {"message": "worker lost", "type": "InternalServerError", "code": 500}}, "worker lost", "500"),
        (
            {"error": {"message": "bad", "type": "json_invalid", "code": "invalid_parameter"}},
            "bad",
            "invalid_parameter",
        ),
        ({"error": {"message": "bad", "type": "kind", "code": None}}, "bad", "kind"),
        ({"error": {"type": "kind"}}, '{"type":"kind"}', "kind"),
        ({"error": "plain words"}, "plain words", ""),
        ({"error": "full", "error_type": "overloaded"}, "full", "overloaded"),
        ({"error": ["a", "b"]}, '["a","b"]', ""),
        ({"object": "error", "message": "too long", "code": 400}, "too long", "400"),
        ({"detail": "Not Found"}, "Not Found", ""),
        ({"detail": [{"loc": ["body", "messages", 0], "msg": "a"}, {"msg": "b"}]}, "body.messages.0: a; b", ""),
        ({"detail": [{"loc": ["body"]}]}, '[{"loc":["body"]}]', ""),
        ({"choices": [], "error": {"message": "late", "code": 503}}, "late", "503"),
        ({"choices": [], "error": None}, "", ""),
        ({"choices": [], "error": ""}, "", ""),
    ],
)
def test_the_shapes_of_an_error(name, event, error, code):
    chunk = decoded(DIALECTS[name], event)
    assert (chunk.error, chunk.error_code) == (error, code)


def test_the_word_error_in_a_text_is_no_error():
    assert decoded(CHAT, {"choices": [{"delta": {"content": "error"}}], "error": None}).error == ""
    assert decoded(COMPLETIONS, {"choices": [{"text": '{"error": "x"}'}], "detail": "x"}).error == ""


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_an_answer_that_the_server_gave_up_is_an_error(reason):
    assert reason in decoded(CHAT, {"choices": [{"delta": {}, "finish_reason": reason}]}).error


def test_the_servers_own_account_goes_by_our_names():
    timings = {"prompt_n": 10, "prompt_ms": 240.0, "predicted_ms": 1723.2, "predicted_per_token_ms": 114.88}
    assert decoded(COMPLETIONS, {"choices": [], "timings": timings}).server_ms == {
        "server_prefill_ms": 240.0,
        "server_ttft_ms": 240.0,
        "server_decode_ms": 1723.2,
        "server_tpot_ms": 114.88,
    }
    metrics = {"time_to_first_token_ms": 115.6, "generation_time_ms": 613.6, "queue_time_ms": 0.06, "mean_itl_ms": 87.7}
    assert decoded(CHAT, {"choices": [], "metrics": metrics | {"speculative_decoding": None}}).server_ms == {
        "server_prefill_ms": 115.6,  # from where it is scheduled
        "server_ttft_ms": 115.66,
        "server_queue_ms": 0.06,
        "server_decode_ms": 613.6,
        "server_tpot_ms": 87.7,
    }


@pytest.mark.parametrize(
    "account", [None, 5, [], {"prompt_ms": -1, "predicted_ms": None, "predicted_per_token_ms": "x"}]
)
def test_an_account_that_says_nothing_is_none(account):
    assert decoded(CHAT, {"choices": [], "timings": account}).server_ms == {}


@pytest.mark.parametrize("name", OPENAI)
@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"null",
        b"5",
        b'"text"',
        b"[1]",
        b"[DONE",
        b"<html>502</html>",
        b"\xff\xfe",
        b'{"choices": "x"}',
        b'{"choices": {"0": {}}}',
        b'{"choices": [5]}',
        b'{"choices": [null]}',
        b'{"choices": [{"index": "0", "text": "", "delta": {}}]}',
        b'{"choices": [{"index": -1, "text": "", "delta": {}}]}',
        b'{"choices": [{"index": 4294967296, "text": "", "delta": {}}]}',
        b'{"choices": [{"finish_reason": 7}]}',
        b'{"choices": [{"token_ids": 3}]}',
        b'{"usage": 5}',
        b'{"usage": {"completion_tokens": -3}}',
        b'{"usage": {"completion_tokens": "9"}}',
        b'{"usage": {"completion_tokens": true}}',
        b'{"usage": {"completion_tokens": 99999999999999999999}}',
        b'{"usage": {"prompt_tokens_details": []}}',
    ],
)
def test_what_is_no_event_is_a_value_error(name, data):
    with pytest.raises(ValueError, match=r"."):
        DIALECTS[name].decode(data)
    assert not DIALECTS[name].is_token(data)


def test_content_in_parts_is_their_text():
    assert delta(CHAT, delta={"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}).text == "ab"


@pytest.mark.parametrize("bad", [{"delta": "x"}, {"delta": {"content": 5}}, {"delta": {"tool_calls": {"a": 1}}}])
def test_what_is_no_chat_choice_is_a_value_error(bad):
    with pytest.raises(ValueError, match="not a"):
        delta(CHAT, **bad)


@unhurried
@given(st.binary(max_size=60) | hostile_events.map(lambda e: json.dumps(e).encode()))
@pytest.mark.parametrize("name", DIALECTS)
def test_hostile_events_raise_only_value_error_and_is_token_agrees(name, data):
    dialect = DIALECTS[name]
    try:
        bears = any(d.bears_token for d in dialect.decode(data).deltas)
    except ValueError:
        bears = False
    assert dialect.is_token(data) is bears
    _plain_agrees(dialect, data)


def _plain_agrees(dialect, data) -> bool:
    """What `plain` takes for content and nothing else, `decode` takes for exactly that."""
    text = dialect.plain(data)
    if text is not None:
        assert dialect.decode(data) == Chunk((Delta(text=text, bears_token=True),))
    return text is not None


# Each field on its own that makes an event more than its text, or null as servers send it.
MORE = [
    {"usage": {"completion_tokens": 3}},
    {"usage": None},
    {"error": {"message": "x"}},
    {"error": None},
    {"timings": {"prompt_ms": 1.0}},
    {"metrics": {"queue_time_ms": 2.0}},
    {"object": "error", "message": "m"},
    {"detail": "d"},
    {"prompt_token_ids": None},
]
CHOICE_MORE = [
    {"index": 1},
    {"index": None},
    {"index": True},
    {"finish_reason": "stop"},
    {"finish_reason": ""},
    {"token_ids": [5]},
    {"token_ids": []},
    {"token_ids": None},
    {"logprobs": None},
    {"stop_reason": None},
]


@pytest.mark.parametrize("name", OPENAI)
@pytest.mark.parametrize("more", [*MORE, *({"choice": c} for c in CHOICE_MORE)], ids=json.dumps)
def test_plain_takes_an_event_for_its_text_only_where_decode_does(name, more):
    said = {"delta": {"content": "hi"}} if name == "openai-chat" else {"text": "hi"}
    choice = {"index": 0, **said, "finish_reason": None, **more.get("choice", {})}
    rest = {k: v for k, v in more.items() if k != "choice"}
    event = {"id": "x", "choices": [choice], **rest}
    _plain_agrees(DIALECTS[name], json.dumps(event).encode())


@pytest.mark.parametrize("delta", [{"role": "assistant", "content": "a"}, {"content": "a", "tool_calls": [{}]}])
def test_plain_sees_a_chat_delta_that_says_more(delta):
    data = json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}).encode()
    assert _plain_agrees(CHAT, data) is ("role" in delta)


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("depth", [100, 300, 900, 5000])
@pytest.mark.parametrize("key", ["error", "detail", "choices", "usage"])
def test_deep_nesting_is_no_way_in(name, depth, key):
    data = f'{{"{key}": {"[" * depth}1{"]" * depth}}}'.encode()
    try:
        chunk = DIALECTS[name].decode(data)
        assert chunk.error or name not in OPENAI
    except ValueError as e:
        assert str(e)  # noqa: PT017 - either answer will do, another exception will not


def _reads(dialect, data) -> bool:
    try:
        dialect.decode(data)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", NAMES)
def test_is_token_agrees_with_decode_on_our_streams(name):
    for dialect in DIALECTS.values():
        for data in events(*zip(*wire(name), strict=True)).data:
            if not _reads(dialect, data):
                assert not dialect.is_token(data)
                continue
            assert dialect.is_token(data) is any(d.bears_token for d in dialect.decode(data).deltas)
            _plain_agrees(dialect, data)


@pytest.mark.parametrize(("chat", "body"), captured())
def test_every_captured_event_is_read_and_is_token_agrees(chat, body):
    dialect = CHAT if chat else COMPLETIONS
    bearing = plain = 0
    for data in events([0], [body]).data:
        chunk = dialect.decode(data)
        bears = any(d.bears_token for d in chunk.deltas)
        bearing += bears
        assert dialect.is_token(data) is bears
        plain += _plain_agrees(dialect, data)
        assert chunk.deltas or chunk.usage or chunk.done or chunk.error
    assert bearing > 0 or b'"finish_reason":"stop"' in body
