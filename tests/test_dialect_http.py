"""Protocols that a target words for itself: its template, its paths, its rule of events."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench import answer, clock, dialect_http, targets
from llm_bench.bodies import Ask
from llm_bench.dialect_http import EXAMPLE, VALUES, at, check, row
from llm_bench.dialects import DIALECTS, spoken, unsayable
from llm_bench.errors import BenchError
from llm_bench.exchange import TRUNCATED, Timeouts
from llm_bench.request import Request
from llm_bench.targets import Target
from llm_bench.transport import TRANSPORTS, Asked
from tests.fixtures import exchange as seen_by_the_socket
from tests.fixtures import trees, unhurried
from tests.scripted import END, Scripted, chunk, http_response

BODY = '{"text": {{prompt|tojson}}, "n": {{max_tokens}}}'
ASK = Ask("m/1", stream=True, extra={"user": "u", "deep": {"a": [1]}})
ROW = Request(5, 12, prompt='say "hi"\n', session="s", priority=2, extra={"user": "of the trace"}, line=3)


def rendered(template, request=ROW, ask=ASK) -> str:
    return row({"body": template}).encode(request, ask).decode()


def sent(table, script):
    """(answer, what the server saw) of one request through the row's own transport."""
    check(table)
    with Scripted(script) as server:
        target = Target("t", f"{server.url}/ask", api="http", http=table)
        made = target.dialect
        ask = Ask("m", stream=made.comes.streams)

        async def one():
            limits = Timeouts(total_s=5.0)
            sender = TRANSPORTS["http"].open(Asked(target, target.url, made, "m", ask.stream, limits))
            try:
                return await sender.send(TRANSPORTS["http"].frame("r", made.encode(ROW, ask)))
            finally:
                sender.close()

        x = clock.run(one())
        seen = server.requests[0]
    out = made.takes.asked(ROW, ask).out
    return answer.read(x, made, streamed=ask.stream, asked_out=out, pinned=False, finish_expected=False), seen


def streamed(pieces, then=END, kind="text/event-stream"):
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    steps = [(0, head), *((5.0 * k, chunk(piece)) for k, piece in enumerate(pieces))]
    return [*steps, then if isinstance(then, str) else (5.0 * len(pieces), then)]


# Bodies


def test_every_value_of_a_request_can_be_said():
    said = json.loads(rendered("{" + ", ".join(f'"{name}": {{{{{name}|tojson}}}}' for name in VALUES) + "}"))
    assert said == {
        "prompt": 'say "hi"\n',
        "messages": [{"role": "user", "content": 'say "hi"\n'}],
        "max_tokens": 12,
        "model": "m/1",
        "stream": True,
        "tokens_in": 5,
        "priority": 2,
        "session": "s",
        "extra": {"user": "of the trace", "deep": {"a": [1]}},
    }


def test_what_json_has_words_for_needs_no_filter():
    assert rendered("[{{max_tokens}}, {{stream}}]", Request(5, None, prompt="p")) == "[null, true]"
    assert rendered("[{{max_tokens}}, {{stream}}]", ask=ASK._replace(stream=False)) == "[12, false]"
    assert rendered("{{prompt}}, as it is: <&'") == 'say "hi"\n, as it is: <&\''


def test_a_chat_is_its_messages_or_their_text():
    chat = Request(5, 1, messages=({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}))
    assert json.loads(rendered("{{messages|tojson}}", chat)) == [dict(m) for m in chat.messages]
    assert rendered("{{prompt}}", chat) == "be brief\nhi"
    loop = "{% for m in messages %}{{m.role}}: {{m.content}};{% endfor %}"
    assert rendered(loop, chat) == "system: be brief;user: hi;"


def test_what_a_template_cannot_fill_names_the_line():
    with pytest.raises(BenchError, match=r"line 3: body cannot be filled: UndefinedError: .*missing"):
        rendered("{{extra.missing}}")
    with pytest.raises(BenchError, match="line 3: http takes messages or a prompt, no token ids"):
        rendered("{{prompt}}", Request(1, 1, prompt_token_ids=(5,), line=3))
    with pytest.raises(BenchError, match="line 3: http has bodies by its template"):
        rendered("{{prompt}}", Request(1, 1, body={"prompt": "x"}, line=3))
    assert "takes no captured one" in unsayable(Request(1, 1, body={"prompt": "x"}), "http")


def test_a_template_is_a_strangers_program():
    for hostile in ("{{prompt.__class__.__mro__}}", "{{''.__class__}}", "{{extra.__init__.__globals__}}"):
        with pytest.raises(BenchError, match=r"body cannot be filled: (SecurityError|UndefinedError)"):
            rendered(hostile)
    with pytest.raises(BenchError, match="body cannot be filled"):
        rendered("{% for i in range(10 ** 9) %}x{% endfor %}")
    with pytest.raises(BenchError, match="body cannot be filled"):
        rendered("{{messages.append(1)}}")


# A table


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, 'it has no body, a template of the body, as \'{"model"'),
        ({"body": BODY, "txt": "a"}, "unknown key 'txt', 'text' is near; known: body, event, text"),
        ({"body": BODY, "text": 5}, "text is not a text, or is empty; expected the path of an event's text"),
        ({"body": BODY, "text": ""}, "text is not a text, or is empty"),
        ({"body": ["x"]}, "body is not a text"),
        ({"body": BODY, "text": "a..b"}, "text is 'a..b'; expected names and places with a dot between"),
        ({"body": BODY, "error": "."}, "error is '.'"),
        ({"body": BODY, "event": "websocket"}, "event is 'websocket'; expected one of sse, ndjson, chunks, whole"),
        ({"body": BODY, "done": "[DONE]"}, "done is of a stream, and event is whole"),
        ({"body": "{{promt}}"}, "body names promt; known: prompt, messages"),
        ({"body": "{{prompt"}, "body is not a template: unexpected end of template"),
        ({"body": "{% for %}"}, "body is not a template"),
        (
            {"body": '{"text": "{{prompt}}"}'},
            r"filled with a prompt of quotes and line ends it is not JSON .* expected {{p",
        ),
        ({"body": '{"n": {{max_tokens}}'}, "is not JSON"),
        ({"body": "{{prompt|nosuch}}"}, r"body is not a template: No filter named 'nosuch'\.$"),  # and no second line
        ({"body": "{\n{{prompt|nosuch}}\n}"}, r"No filter named 'nosuch'\. \(its line 2\)$"),
        ({"body": "{{'a' * 4611686018427387904}}"}, "be filled: MemoryError$"),  # 2**62: no machine has that much
        ({"body": "  "}, "body is not a text, or is empty"),
    ],
)
def test_a_wrong_table_is_told_what_is_right(table, said):
    with pytest.raises(ValueError, match=said):
        check(table)


NESTED = (
    '{"p": {{prompt|tojson}}, "t": {{extra.sampling.top_p}}, "k": {{extra.options["k"][0]|tojson}}, '
    '"s": [{% for word in extra.stop %}{{word|tojson}}{% endfor %}], "n": {{extra.stop|length}}, '
    '"o": { {% for k, v in extra.options.items() %}"{{k}}": {{v}}{% endfor %} }, "g": {{extra.options.get("k", 0)}}, '
    '"l": [{% for k in extra.options.keys() %}"{{k}}"{% endfor %}, {{extra.options.values()|list|length}}], '
    '"i": {{extra.options|items|list|length}}, "h": {{extra.get("options").get("k", 0)}}}'
)


@pytest.mark.parametrize("table", [
    EXAMPLE, {"body": BODY}, {"body": "q={{prompt|urlencode}}"}, {"body": "{{prompt}}"}, {"body": NESTED},
])  # fmt: skip
def test_a_right_table_is_taken(table):
    check(table)
    assert row(table).takes.prompt == ""


def test_a_table_stands_in_targets_toml(tmp_path):
    file = tmp_path / "targets.toml"
    head = '[targets.t]\nurl = "http://h:1/ask"\napi = "http"\n'
    file.write_text(f"{head}[targets.t.http]\nbody = '{BODY}'\ntext = \"a.0\"\n")
    (found,) = targets.parse("t", file, {})
    assert found.dialect.decode(b'{"a": ["hi"]}').deltas[0].text == "hi"
    assert json.loads(json.dumps(found.public()))["http"] == {"body": BODY, "text": "a.0"}
    file.write_text(f'{head}[targets.t.http]\nbody = "{{{{x}}}}"\n')
    with pytest.raises(BenchError, match=r"targets.toml: \[targets.t.http\]: body names x; known"):
        targets.parse("t", file, {})
    file.write_text(f"{head}http = 5\n")
    with pytest.raises(BenchError, match=r"\[targets.t\] http is of type int, expected a table of texts"):
        targets.parse("t", file, {})
    file.write_text(head)
    with pytest.raises(BenchError, match=r"api http needs a table \[targets.t.http\]: body = "):
        targets.parse("t", file, {})
    file.write_text(f"{head}[targets.t.http]\nbody = '{BODY}'\n".replace('"http"', '"tgi"'))
    with pytest.raises(BenchError, match=r"api tgi has a table \[targets.t.http\], which is of api http"):
        targets.parse("t", file, {})


def test_a_target_is_spoken_to_by_its_own_table_and_any_other_by_its_row():
    assert spoken("tgi", {}) is DIALECTS["tgi"]
    assert spoken("http", EXAMPLE) is spoken("http", dict(EXAMPLE))  # made once
    assert spoken("http", {"body": "{{model}}"}).takes.model == "body"
    assert spoken("http", {"body": "{{prompt}}"}).takes.model == ""


# Answers


@given(trees, st.lists(st.sampled_from(["choices", "0", "text", "99999999999", "-1", "²"]), max_size=3))
def test_a_path_finds_what_is_there_or_nothing(value, path):
    found = at(value, tuple(path))
    for name in path:
        try:
            value = value[int(name) if isinstance(value, list) else name]
        except (LookupError, TypeError, ValueError):
            value = None
    if "-1" not in path and "²" not in path:
        assert found == value or found is value or found != found  # nan is what it is


SSE = {"body": BODY, "event": "sse", "text": "t"}


def data(*events):
    return [b"data: " + (e if isinstance(e, bytes) else json.dumps(e).encode()) + b"\n\n" for e in events]


def test_server_sent_events_by_paths():
    table = SSE | {"done": "[DONE]", "usage_in": "u.in", "usage_out": "u.out", "usage_cached": "u.c", "finish": "why"}
    events = data({"t": "a"}, {"t": ""}, {"t": "b", "why": None}, {"why": "length", "u": {"in": 5, "out": 3, "c": 2}})
    got, seen = sent(table, streamed([*events, *data(b"[DONE]")]))
    assert (got.outcome, got.text, got.finish_reason, got.labels) == ("ok", "ab", "length", [])
    assert (got.tokens_in, got.tokens_out, got.tokens_cached, got.tokens_out_from) == (5, 3, 2, "usage")
    assert len(got.event_ns) == 2
    assert (seen.method, seen.path) == ("POST", "/v1/ask")
    assert seen.json() == {"text": 'say "hi"\n', "n": 12}


def test_json_lines_by_paths():
    lines = [b'{"t": "a"}\n', b'{"t": "b"}\n', b'{"ended": true, "n": 2}\n']
    table = {"body": BODY, "event": "ndjson", "text": "t", "done": "ended", "usage_out": "n"}
    got, _ = sent(table, streamed(lines, kind="application/x-ndjson"))
    assert (got.outcome, got.text, got.tokens_out, len(got.event_ns), got.labels) == ("ok", "ab", 2, 2, [])
    joined = b"".join(lines)
    got, _ = sent(table, streamed([joined[:7], joined[7:]], kind="application/x-ndjson"))
    assert (got.outcome, got.text, len(got.event_ns)) == ("ok", "ab", 2)


@pytest.mark.parametrize("event", ["sse", "ndjson", "chunks"])
def test_without_a_path_an_event_is_its_text(event):
    pieces = {"sse": data(b"one", b"two"), "ndjson": [b"one\n", b"two\n"], "chunks": [b"one", b"two"]}[event]
    got, _ = sent({"body": BODY, "event": event}, streamed(pieces, kind="text/event-stream" if event == "sse" else "x"))
    assert (got.outcome, got.text, len(got.event_ns), got.tokens_out) == ("ok", "onetwo", 2, 2)
    assert got.tokens_out_from == "events"


def test_chunks_keep_their_blanks_and_a_chunk_of_json_may_hold_the_text():
    got, _ = sent({"body": BODY, "event": "chunks"}, streamed([b" a", b" ", b"\n{"], kind="x"))
    assert got.text == " a \n{"
    got, _ = sent({"body": BODY, "event": "chunks", "text": "t"}, streamed([b'{"t": "a"}', b'{"t": " b"}\n'], kind="x"))
    assert (got.outcome, got.text) == ("ok", "a b")


@pytest.mark.parametrize("then", [END, "close", "reset"])
def test_where_a_last_word_is_owed_an_answer_without_it_is_truncated(then):
    got, _ = sent(SSE | {"done": "[DONE]"}, streamed(data({"t": "a"}, {"t": "b"}), then))
    assert (got.outcome, got.error_kind) == ("failed", "truncated_stream")
    assert len(got.event_ns) == 2
    good, _ = sent(SSE | {"done": "[DONE]"}, streamed(data({"t": "a"}, b"[DONE]"), then))
    assert good.outcome == "ok"  # whatever its framing does after the last word


def test_where_none_is_owed_the_last_chunk_is_the_end():
    assert sent(SSE, streamed(data({"t": "a"})))[0].outcome == "ok"
    assert sent(SSE, streamed(data({"t": "a"}), "close"))[0].error_kind == "truncated_stream"


def test_a_last_word_proves_no_answer():
    assert sent(SSE | {"done": "[DONE]"}, streamed(data(b"[DONE]")))[0].error_kind == "empty_output"
    table = SSE | {"done": "[DONE]", "error": "oh.no"}
    got, _ = sent(table, streamed(data({"t": "a"}, {"oh": {"no": "out of memory"}}, b"[DONE]")))
    assert (got.error_kind, got.error) == ("server_error_in_stream", "out of memory")


def test_errors_of_the_common_shapes_need_no_path():
    for event in ({"error": {"message": "no memory"}}, {"error": "no memory"}, {"detail": "no memory"}):
        for table in (SSE, {"body": BODY, "event": "sse"}):
            got, _ = sent(table, streamed(data({"t": "a"}, event)))
            assert (got.error_kind, got.error) == ("server_error_in_stream", "no memory")
    got, _ = sent(SSE, [(0, http_response(503, b'{"error": "full"}', {"Retry-After": "1"}))])
    assert (got.error_kind, got.error) == ("rejected", "full")


def test_an_answer_that_comes_whole():
    table = {"body": BODY, "text": "a.0.t", "usage_out": "n", "finish": "why"}
    got, _ = sent(table, [(0, http_response(200, b'{"a": [{"t": "hi"}], "n": 4, "why": "stop"}'))])
    assert (got.outcome, got.text, got.tokens_out, got.finish_reason, got.event_ns) == ("ok", "hi", 4, "stop", [])
    assert sent(table, [(0, http_response(200, b'{"a": []}'))])[0].error_kind == "empty_output"
    assert sent(table, [(0, http_response(200, b"<html>"))])[0].error_kind == "protocol_error"
    assert sent(table, [(0, http_response(200, b'{"a": [{"t": 5}]}'))])[0].error_kind == "protocol_error"


def test_the_text_of_an_answer_that_was_not_streamed_may_stand_elsewhere():
    made = row(SSE | {"whole_text": "all", "done": "[DONE]"})
    x = seen_by_the_socket([(5, b'{"all": "hi"}')])
    got = answer.read(x, made, streamed=False, asked_out=1, pinned=False)
    assert (got.outcome, got.text, got.labels) == ("ok", "hi", [])
    half = seen_by_the_socket([(5, b'{"all": "h')], TRUNCATED, error="left")
    assert answer.read(half, made, streamed=False, asked_out=1, pinned=False).error_kind == "truncated_stream"


@pytest.mark.parametrize("body", [b'{"label": "cat"}', b"[0.5]", b"\x89PNG\r\n", b"0.25"])
def test_without_a_text_whatever_came_whole_is_a_single_pass(body):
    table = {"body": BODY}
    assert row(table).comes.single_pass
    got, _ = sent(table, [(0, http_response(200, body))])
    assert (got.outcome, got.labels, got.tokens_out, got.event_ns) == ("ok", [], 0, [])


@pytest.mark.parametrize(
    ("body", "kind"), [(b"", "empty_output"), (b"<html>", "protocol_error"), (b"{", "protocol_error")]
)
def test_a_single_pass_without_an_answer_has_failed(body, kind):
    assert sent({"body": BODY}, [(0, http_response(200, body))])[0].error_kind == kind


@unhurried
@given(trees | st.dictionaries(st.sampled_from(["t", "u", "why", "n"]), trees, max_size=4), st.binary(max_size=8))
@pytest.mark.parametrize("event", dialect_http.EVENTS)
@pytest.mark.parametrize("text", ["t", ""])
def test_any_event_is_one_or_a_value_error(event, text, value, bent):
    table = {"body": BODY, "event": event, "usage_out": "u.0", "finish": "why", "error": "n"}
    made = row(table | ({"text": text} if text else {}) | ({"done": "why"} if event != "whole" else {}))
    for bytes_ in (json.dumps(value).encode(), json.dumps(value).encode() + bent, bent):
        try:
            chunk = made.decode(bytes_)
        except ValueError:
            assert not made.is_token(bytes_)
            continue
        assert made.is_token(bytes_) is any(delta.bears_token for delta in chunk.deltas)


def test_the_row_of_the_table_is_the_example_and_compiles_nothing_until_it_is_used() -> None:
    assert dialect_http.compiled(EXAMPLE["body"])[1] == dialect_http._EXAMPLE_NAMES
    assert dialect_http.ROWS["http"].takes.model == row(EXAMPLE).takes.model == "body"
    assert dialect_http.ROWS["http"].encode(ROW, ASK) == row(EXAMPLE).encode(ROW, ASK)
    loaded = "import sys; import llm_bench.dialects; print('jinja2' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
