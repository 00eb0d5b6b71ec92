"""Formats of recordings and documents: every item becomes the requests it means, or is refused in words."""

import base64
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace as changed
from decimal import Decimal
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_bench.agentic import AGENTIC
from llm_bench.captured import CAPTURED
from llm_bench.fields import UNITS, Reading, Row, date_time
from llm_bench.formats import FORMATS
from llm_bench.request import Request
from llm_bench.trace import read, write

SHARED = Path(__file__).parents[2] / "shared" / "traces"
RECORDED = CAPTURED | AGENTIC


def reading(name: str) -> Reading:
    return Reading(UNITS.get(RECORDED[name].unit, 0), RECORDED[name].block_size, None)


def parsed(value: object) -> Any:
    """As a file's reader parses it."""
    return json.loads(value if isinstance(value, str) else json.dumps(value), parse_float=Decimal)


def rows(name: str, *items: object) -> list[Row]:
    """Of a file's items, after detection by the first and with its keys checked, as the reader does."""
    values = [parsed(item) for item in items]
    assert [n for n, form in RECORDED.items() if form.detect(values[0])] == [name]
    assert not any(form.detect(values[0]) for n, form in FORMATS.items() if n not in RECORDED)
    assert all(set(v) <= set(RECORDED[name].keys) for v in values)
    file = reading(name)
    return [row for line, v in enumerate(values, 1) for row in RECORDED[name].rows(v, file, line)]


def requests(name: str, *items: object) -> list[Request]:
    return [request for _, request in rows(name, *items)]


def refused(name: str, words: str, *items: object) -> None:
    with pytest.raises(ValueError, match=words):
        rows(name, *items)


# -- recorded bodies --------------------------------------------------------------------------------------------------


def test_a_captured_body_is_kept_as_it_was() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hé"}], "temperature": 0.7, "seed": 2**63 - 1}
    text = f'{{"timestamp": 1700000000.123456789, "session_id": "s", "body": {json.dumps(body)}}}'
    ((at, request),) = rows("captured", text)
    assert at == 1_700_000_000_123_456_789
    assert request.body == body and orjson.loads(orjson.dumps(request.body)) == body
    assert (request.tokens_in, request.tokens_out, request.session) == (0, None, "s")


def test_a_captured_time_may_be_a_date() -> None:
    ((at, request),) = rows(
        "captured",
        {"timestamp": "2026-01-02T03:04:05.5Z", "body": {"prompt": "x", "max_tokens": 9}, "output_length": 4},
    )
    assert at == date_time("2026-01-02 03:04:05.5") and request.tokens_out == 4


def test_captured_dates_have_no_zero_and_no_unit_but_numbers_have_both(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(f'{{"timestamp": "2026-01-02T03:04:0{i}Z", "body": {{"prompt": "x"}}}}\n' for i in (5, 7)))
    trace = read(path)
    assert (trace.facts["zero_s"], trace.facts["unit"], trace.facts["resolution_s"]) == (None, "date-time", 2)
    assert "times read as date-time: 2 timed rows over 2 s" in trace.notes
    path.write_text('{"timestamp": 12.5, "body": {"prompt": "x"}}')
    assert (read(path).facts["zero_s"], read(path).facts["unit"]) == (12.5, "s")


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6, "max_tokens": 5}, 6),
        ({"max_output_tokens": 7}, 7),
        ({"max_tokens": -1}, None),
        ({"max_tokens": "5"}, None),
        ({"max_tokens": None, "prompt": "x"}, None),
    ],
)
def test_answer_tokens_are_what_the_body_asks_for(body: Mapping[str, object], asked: int | None) -> None:
    assert requests("captured", {"timestamp": 0, "body": body})[0].tokens_out == asked


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ('{"timestamp": 0, "body": {"a": 1e999}}', r"1E\+999 is larger than any float"),
        ('{"timestamp": 0, "body": {"a": [{"b": -1e400}]}}', "larger than any float"),
        ({"timestamp": 0, "body": {"seed": 2**64}}, "body cannot be sent as JSON"),
        ({"timestamp": 0, "body": {}}, "body is {}, expected the object that was sent"),
        ({"timestamp": 0, "body": "x"}, "body is 'x', expected an object"),
        ({"timestamp": -1, "body": {"a": 1}}, "timestamp is -1, expected a number, 0 or more"),
        ({"timestamp": "noon", "body": {"a": 1}}, "'noon', expected a date and time"),
    ],
)
def test_what_no_body_can_be_is_refused(item: object, words: str) -> None:
    refused("captured", words, item)


def batch(url: str = "/v1/chat/completions", **more: object) -> dict[str, object]:
    return {"custom_id": "1", "method": "POST", "url": url, "body": {"messages": [], "max_tokens": 3}, **more}


def test_a_batch_line_is_its_body() -> None:
    ((at, request),) = rows("openai-batch", batch())
    assert at is None and request.body == {"messages": [], "max_tokens": 3} and request.tokens_out == 3
    assert [r.body for r in requests("openai-batch", batch("/v1/embeddings", body={"input": "x"}))] == [{"input": "x"}]
    refused("openai-batch", "url is '/v1/images', expected one of /v1/chat/completions, ", batch("/v1/images"))
    refused("openai-batch", "method is 'GET', expected POST", batch(method="GET"))
    refused("openai-batch", "expected /v1/responses, as in the rows before", batch("/v1/responses"), batch())


def sagemaker(
    data: object, encoding: str = "JSON", output: object = None, at: str = "2026-03-04T05:06:07Z"
) -> dict[str, Any]:
    text = json.dumps(data)
    text = base64.b64encode(text.encode()).decode() if encoding == "BASE64" else text
    put = {"observedContentType": "application/json", "mode": "INPUT", "data": text, "encoding": encoding}
    got = {} if output is None else {"endpointOutput": {"data": output, "encoding": "JSON", "mode": "OUTPUT"}}
    return {"captureData": {"endpointInput": put, **got}, "eventMetadata": {"inferenceTime": at}, "eventVersion": "0"}


@pytest.mark.parametrize("encoding", ["JSON", "BASE64"])
def test_a_sagemaker_record_is_its_body(encoding: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "max_tokens": 64}
    usage = json.dumps({"usage": {"prompt_tokens": 9, "completion_tokens": 12}})
    ((at, request),) = rows("sagemaker", sagemaker(body, encoding, usage))
    assert at == date_time("2026-03-04 05:06:07") and request.body == body
    assert (request.tokens_in, request.tokens_out) == (0, 12)
    streamed = requests("sagemaker", sagemaker(body, encoding, 'data: {"usage": {"completion_tokens": 1}}\n\n'))
    assert streamed[0].tokens_out == 64, "no usage in it: what the body asks for"


def test_sagemaker_data_that_is_no_json_is_refused() -> None:
    refused("sagemaker", "encoding is 'CSV', expected JSON, or BASE64 of JSON", sagemaker([1], "CSV"))
    refused("sagemaker", r"endpointInput's data is \[1\], expected the JSON object", sagemaker([1]))
    torn = sagemaker({})
    torn["captureData"]["endpointInput"] |= {"data": "=", "encoding": "BASE64"}
    refused("sagemaker", "data is not BASE64 of a JSON text", torn)
    refused("sagemaker", "captureData is None, expected an object", {"captureData": None, "eventMetadata": {}})


# -- ShareGPT ---------------------------------------------------------------------------------------------------------


def said(*texts: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": who, "value": text} for who, text in texts]


def test_a_sharegpt_turn_is_what_its_user_adds() -> None:
    items = [
        {
            "id": "a",
            "conversations": said(("gpt", "cut"), ("human", "one"), ("gpt", "x"), ("human", "two"), ("gpt", "y")),
        },
        {"id": "a", "conversations": said(("human", "alone"))},
        {"id": "b", "conversations": []},
    ]
    one, two, alone, empty = requests("sharegpt", *items)
    assert (one.prompt, two.prompt, alone.prompt, empty.prompt) == ("one", "two", "alone", None)
    assert one.session == two.session == "a line 1" and alone.session == ""
    assert {r.tokens_out for r in (one, two, alone)} == {None} and {r.tokens_in for r in (one, two, alone)} == {0}
    assert [at for at, _ in rows("sharegpt", *items)] == [None] * 4


def test_a_system_text_opens_a_chat() -> None:
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "user", "content": "ho"},
    ]
    first, second = requests("sharegpt", {"messages": chat})
    assert first.messages == ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"})
    assert first.prompt is None and second.prompt == "ho" and first.session == second.session == "line 1"
    assert requests("sharegpt", {"system": "s", "conversations": said(("human", "q"))})[0].messages == (
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
    )


def test_unknown_speakers_and_texts_are_refused() -> None:
    refused(
        "sharegpt", "a text is from 'observation', expected one of human", {"conversations": said(("observation", ""))}
    )
    refused("sharegpt", "value is 3, expected text", {"conversations": [{"from": "human", "value": 3}]})
    refused("sharegpt", "conversations has 'x', expected objects only", {"conversations": ["x"]})


# -- AIPerf -----------------------------------------------------------------------------------------------------------


def test_mooncake_rows_with_aiperfs_fields() -> None:
    call = {"role": "user", "content": "hi"}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "x": 0.5}}
    kept = rows(
        "aiperf",
        {"timestamp": 10, "text_input": "a b", "output_length": 4, "session_id": "s"},
        {"delay": 2000, "text_input": "c", "output_length": 5, "session_id": "s"},
        {"timestamp": 20, "input_length": 700, "output_length": 6, "hash_ids": [1, 2], "extra": {"nvext": {"p": 0.5}}},
        {"timestamp": 30, "messages": [call], "tools": [tool], "output_length": 7},
        {"timestamp": 40, "messages": [call], "message_mode": "delta", "session_id": "d", "tools": [tool]},
        {"timestamp": 50.5, "payload": {"prompt": "p", "max_tokens": 8}},
    )
    assert [at for at, _ in kept] == [10_000_000, None, 20_000_000, 30_000_000, 40_000_000, 50_500_000]
    first, later, lengths, history, delta, payload = (request for _, request in kept)
    assert (first.prompt, first.tokens_out, first.session) == ("a b", 4, "s")
    assert (later.prompt, later.think_s, later.session) == ("c", 2.0, "s")
    assert (lengths.tokens_in, lengths.hash_ids, lengths.block_size) == (700, (1, 2), 512)
    assert lengths.extra == {"nvext": {"p": 0.5}}
    assert history.body == {"messages": [call], "tools": [tool], "max_tokens": 7} and history.messages is None
    assert delta.messages == (call,) and delta.extra == {"tools": [tool]} and delta.body is None
    assert payload.body == {"prompt": "p", "max_tokens": 8} and payload.tokens_out == 8
    orjson.dumps([history.body, dict(delta.extra), dict(lengths.extra)])


def test_plain_mooncake_rows_are_left_to_their_own_format() -> None:
    plain_row = {"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [0]}
    assert not RECORDED["aiperf"].detect(plain_row) and FORMATS["mooncake"].detect(plain_row)
    assert requests("aiperf", {"session_id": "s", "input_length": 5, "output_length": 2})[0].tokens_in == 5


def test_single_turns_stand_alone_and_multi_turns_add_up() -> None:
    single, whole = requests(
        "aiperf",
        {"text": "hello", "timestamp": 5, "output_length": 3},
        {"texts": [{"name": "q", "contents": ["again"]}], "session_id": "s", "output_length": 9},
    )
    assert (single.prompt, single.tokens_out, single.session) == ("hello", 3, "")
    assert whole.body == {"messages": [{"role": "user", "content": "again"}], "max_tokens": 9} and whole.session == "s"
    one, two = requests("aiperf", {"session_id": "m", "turns": [{"text": "1"}, {"text": "2", "delay": 500}]})
    assert (one.prompt, two.prompt, two.think_s, one.session, two.session) == ("1", "2", 0.5, "m", "m")
    assert requests("aiperf", {"text": "t", "role": "system"})[0].messages == ({"role": "system", "content": "t"},)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"text": "a", "image": "b.png"}, "image is given, expected text alone"),
        ({"texts": ["a", "b"]}, "texts has 2, expected one text a request"),
        ({"text_input": "a", "input_length": 3}, "expected one of input_length, text_input, messages, payload"),
        ({"messages": [], "timestamp": 0, "message_mode": "x"}, "message_mode is 'x', expected history or delta"),
        ({"turns": [{"text": "a", "speed": 1}]}, "turns have the key 'speed'"),
        ({"turns": [{}]}, "text is None, expected text"),
        ({"text_input": "a", "delay": -1}, "delay is -1"),
    ],
)
def test_what_aiperf_rows_cannot_say_is_refused(item: object, words: str) -> None:
    refused("aiperf", words, item)


# -- Weka -------------------------------------------------------------------------------------------------------------


def weka_call(t: float, tokens_in: int, out: int, ids: list[int], kind: str = "n", **more: object) -> dict[str, object]:
    return {"t": t, "type": kind, "model": "m", "in": tokens_in, "out": out, "hash_ids": ids, "stop": "", **more}


def weka(*calls: object, trace_id: str = "w", **more: object) -> dict[str, object]:
    return {"id": trace_id, "models": ["m"], "block_size": 64, "requests": calls, **more}


def test_weka_conversations_are_what_their_prompts_prove() -> None:
    """The same prompt sent twice is two conversations; the next prompt holds the second one's answer."""
    kept = rows(
        "weka",
        weka(
            weka_call(0.0, 130, 20, [1, 2], "s", api_time=2.5),
            weka_call(6.0, 130, 10, [1, 2], api_time=1.0, think_time=3.5),
            weka_call(8.5, 200, 5, [1, 2, 3]),
            weka_call(20.0, 260, 5, [1, 2, 3, 4], think_time=4.5),
        ),
    )
    assert [at for at, _ in kept] == [0, 6 * 10**9, 8_500_000_000, 20 * 10**9]
    calls = [request for _, request in kept]
    assert [(r.session, r.think_s) for r in calls] == [("w", None), ("w/2", None), ("w/2", 1.5), ("w/2", 4.5)]
    assert [(r.tokens_in, r.tokens_out, r.block_size) for r in calls[:2]] == [(130, 20, 64), (130, 10, 64)]


def test_weka_ids_are_their_own_traces_and_partial_blocks_their_own_texts() -> None:
    traces = [
        weka(weka_call(0, 128, 1, [1, 2]), weka_call(9, 130, 1, [1, 2])),
        weka(weka_call(0, 129, 1, [1, 2]), trace_id="x"),
    ]
    one, two, other = requests("weka", *traces)
    assert len(one.hash_ids) == 2 and len(two.hash_ids) == 3 == -(-130 // 64)
    assert one.hash_ids == two.hash_ids[:2] and not set(two.hash_ids) & set(other.hash_ids)
    assert max(two.hash_ids + other.hash_ids) < 2**32
    a, b = requests("weka", *(weka(weka_call(0, 65, 1, [7]), trace_id=t, hash_id_scope="global") for t in "ab"))
    assert a.hash_ids[0] == b.hash_ids[0] == 7 and a.hash_ids[1] != b.hash_ids[1]


@pytest.mark.parametrize(("inner", "told"), [(0.0, "in the agent's time"), (30.0, "in the trace's time")])
def test_a_subagent_is_a_session_of_its_own(inner: float, told: str) -> None:
    agent = {"t": 30.0, "type": "subagent", "agent_id": "a1", "requests": [weka_call(inner, 64, 3, [9], "s")]}
    kept = rows("weka", weka(weka_call(1.0, 64, 2, [1]), agent, weka_call(50.0, 128, 2, [1, 2])))
    assert [(at // 10**9, r.session) for at, r in kept if at is not None] == [(1, "w"), (50, "w"), (30, "w/a1")], told


def test_weka_rows_that_cannot_be_are_refused() -> None:
    refused("weka", "type is 'x', expected s, n or subagent", weka(weka_call(0, 1, 1, [], "x")))
    refused("weka", "hash_ids has one below 0", weka(weka_call(0, 64, 1, [-1])))
    refused("weka", "t is missing", weka({"type": "n", "in": 1, "out": 1}))
    refused("weka", "in is missing", weka({"type": "n", "t": 0}))
    refused("weka", "hash_id_scope is 'x'", weka(hash_id_scope="x"))


# -- TraceLab ---------------------------------------------------------------------------------------------------------


def tracelab(index: int, tokens_in: int, out: int, *events: tuple[str, str], session: str = "s") -> dict[str, object]:
    return {
        "session_id": session,
        "round_index": index,
        "input_tokens_total": tokens_in,
        "prefix_tokens": tokens_in // 2,
        "newly_append_tokens": tokens_in - tokens_in // 2,
        "output_tokens": out,
        "model": "m",
        "user": "u",
        "timing_events": [{"event_type": kind, "timestamp": f"2026-05-06T07:00:{at}Z"} for kind, at in events],
        "tools": [],
    }


def test_a_round_begins_when_its_last_input_is_there() -> None:
    kept = rows(
        "tracelab",
        tracelab(0, 100, 10, ("user_message", "01.000"), ("reasoning", "02.000"), ("tool_call", "03.250")),
        tracelab(1, 150, 20, ("tool_result", "03.500"), ("tool_result", "07.000"), ("text", "09.000")),
        tracelab(2, 160, 5, ("user_message", "20.000"), ("text", "21.000")),  # 150 + 20 > 160: the context was cut
        tracelab(3, 200, 5, ("tool_result", "20.500"), ("text", "23.000")),  # before the answer's last event
    )
    start = date_time("2026-05-06 07:00:00")
    assert [(at or 0) - start for at, _ in kept] == [10**9, 7 * 10**9, 20 * 10**9, 20_500_000_000]
    calls = [request for _, request in kept]
    assert [(r.session, r.think_s) for r in calls] == [("s", None), ("s", 3.75), ("s/2", None), ("s/2", None)]
    assert [(r.tokens_in, r.tokens_out, r.client, r.model) for r in calls[:1]] == [(100, 10, "u", "m")]


def test_rounds_of_several_sessions_do_not_meet_and_none_runs_backwards() -> None:
    def spoken(at: str) -> tuple[tuple[str, str], ...]:
        return ("user_message", at), ("text", at)

    times = ("01.0", "02.0", "03.0", "01.5", "04.0")
    kept = requests(
        "tracelab", *(tracelab(i, 100 + i, 0, *spoken(at), session="ab"[i % 2]) for i, at in enumerate(times))
    )
    assert [r.session for r in kept] == ["a", "b", "a", "b/2", "a"]


def test_no_session_is_taken_for_another_by_its_name() -> None:
    names = ["", "\0", "s", "begun", "s/2", "line 1"]
    items = [tracelab(i, 100, 0, ("text", f"0{i}.0"), session=name) for i, name in enumerate(names)]
    assert [r.session for r in requests("tracelab", *items)][1:5] == names[1:5]


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 30), st.integers(0, 9), st.integers(0, 59)), max_size=9)
)
def test_conversations_opened_anew_are_counted(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[str, int, int, int]]
) -> None:
    items = [
        tracelab(i, tokens_in, out, ("user_message", f"{at:02}.0"), session=session)
        for i, (session, tokens_in, out, at) in enumerate([("a", 1, 1, 0), *calls])
    ]
    path = tmp_path_factory.mktemp("t") / "t.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    trace = read(path)
    opened = {r.session for r in trace.requests} - {"a", "b"}  # what failed in the trace may be all of one
    said = [note for note in trace.notes if "opened anew" in note]
    assert [note.split()[0] for note in said] == [str(len(opened))] * bool(opened)


def test_rounds_that_contradict_themselves_are_refused() -> None:
    item = tracelab(0, 100, 1) | {"prefix_tokens": 99}
    refused("tracelab", r"input_tokens_total is 100, expected prefix \+ newly appended: 99 \+ 50", item)
    refused("tracelab", r"timing_events is \[\], expected one event or more of user_message", tracelab(0, 100, 1))
    refused("tracelab", "timing_events is None, expected a list", tracelab(0, 1, 1) | {"timing_events": None})


@pytest.mark.skipif(not SHARED.exists(), reason="the shared traces are not beside this tree")
def test_published_rounds() -> None:
    lines = (SHARED / "tracelab_sanitized_example.jsonl").read_text().splitlines()
    kept = requests("tracelab", *lines)
    assert len(kept) == 19 and sum(r.tokens_in for r in kept[:2]) == 32_272 + 35_740
    assert len({r.session for r in kept}) == 4, "the first has one conversation; the second's context shrinks twice"
    assert kept[1].think_s == pytest.approx(
        50.938 - 31.647
    )  # the later of two tools' results, after the last tool call


# -- OpenTelemetry ----------------------------------------------------------------------------------------------------


def otlp(*spans: Mapping[str, Any]) -> dict[str, object]:
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {"name": "x"}, "spans": list(spans)}]}]}


def span(start_s: int, end_s: int, tokens_in: object, out: object, **more: Any) -> dict[str, Any]:
    values: dict[str, dict[str, object]] = {
        "gen_ai.operation.name": {"stringValue": more.pop("operation", "chat")},
        "gen_ai.request.model": {"stringValue": "m"},
    }
    if tokens_in is not None:
        values["gen_ai.usage.input_tokens"] = {"intValue": str(tokens_in)}
    if out is not None:
        values["gen_ai.usage.output_tokens"] = {"intValue": out}
    values |= {f"gen_ai.{name}": value for name, value in more.pop("attributes", {}).items()}
    attributes = [{"key": name, "value": value} for name, value in values.items()]
    times = {"startTimeUnixNano": str(start_s * 10**9), "endTimeUnixNano": str(end_s * 10**9)}
    return {"traceId": "t", "spanId": f"s{start_s}", **times, "attributes": attributes, **more}


def test_gen_ai_spans_are_requests_by_their_start() -> None:
    same = {"attributes": {"conversation.id": {"stringValue": "c"}}}
    http = {
        "traceId": "t",
        "spanId": "h",
        "startTimeUnixNano": "1",
        "attributes": [{"key": "http.method", "value": {}}],
    }
    kept = rows("otel", otlp(span(20, 25, 60, "9", **same), http, span(10, 12, 40, 7, **same)))
    assert [(at or 0) - date_time("1970-01-01 00:00:00") for at, _ in kept[1:]] == [10 * 10**9, 20 * 10**9]
    other, first, second = (request for _, request in kept)
    assert (other.tokens_in, other.prompt, other.body) == (0, None, None), "no request of a model: counted as empty"
    assert [(r.tokens_in, r.tokens_out, r.session, r.think_s) for r in (first, second)] == [
        (40, 7, "c", None),
        (60, 9, "c", 8.0),
    ]
    assert first.model == "m"


def test_a_conversation_goes_on_over_the_lines_of_a_file() -> None:
    same = {"attributes": {"conversation.id": {"stringValue": "c"}}}
    lines = [otlp(span(10, 12, 40, 7, **same)), otlp(span(11, 13, 90, 1, **same)), otlp(span(20, 22, 91, 1, **same))]
    assert [r.session for r in requests("otel", *lines)] == ["c", "c/2", "c/2"], "the second began beside the first"


def test_failed_calls_agents_and_calls_without_tokens_are_no_load() -> None:
    failed, agent, silent = requests(
        "otel",
        otlp(
            span(1, 2, 40, None, status={"code": 2}),
        ),
        otlp(span(1, 9, 400, 80, operation="invoke_agent")),
        otlp(span(3, 4, None, None)),
    )
    assert (failed.tokens_in, failed.tokens_out) == (40, 0)
    assert agent.tokens_in == silent.tokens_in == 0


def messages(*listed: object) -> dict[str, object]:
    return {
        "attributes": {"input.messages": {"stringValue": json.dumps(listed)}, "request.top_p": {"doubleValue": 0.5}}
    }


def test_recorded_messages_are_a_body_where_they_are_all_text() -> None:
    text = {"role": "user", "parts": [{"type": "text", "content": "hi"}]}
    call = {"role": "assistant", "parts": [{"type": "tool_call", "name": "f", "arguments": {}}]}
    (said_once,) = requests("otel", otlp(span(1, 2, 9, 3, **messages(text))))
    assert said_once.body == {"messages": [{"role": "user", "content": "hi"}], "top_p": 0.5}
    assert said_once.tokens_in == 9
    (listed,) = requests("otel", otlp(span(1, 2, 9, 3, attributes={"input.messages": LISTED})))
    assert listed.body == {"messages": [{"role": "user", "content": "x"}]}
    for part in (call, "x", {"role": "user"}, {"parts": []}):
        assert requests("otel", otlp(span(1, 2, 9, 3, **messages(text, part))))[0].body is None


def test_calls_below_a_call_continue_it_and_a_fork_begins_anew() -> None:
    spans = [
        span(1, 2, 10, 1, spanId="a"),
        span(3, 4, 20, 1, spanId="b", parentSpanId="a"),
        span(5, 6, 30, 1, spanId="c", parentSpanId="b"),
        span(7, 8, 30, 1, spanId="d", parentSpanId="b"),
        span(9, 10, 40, 1, spanId="e", parentSpanId="agent"),
        span(11, 12, 40, 1, spanId=None, parentSpanId=None),
    ]
    assert [r.session for r in requests("otel", otlp(*spans))] == ["t/a", "t/a", "t/a", "", "", ""]


def test_spans_that_cannot_be_are_refused() -> None:
    refused("otel", "intValue is '1x', expected a whole number of 64 bits", otlp(span(1, 2, "1x", 1)))
    refused("otel", "input_tokens is -4", otlp(span(1, 2, -4, 1)))
    refused("otel", "startTimeUnixNano is missing", otlp(span(1, 2, 4, 1, startTimeUnixNano="0")))
    refused("otel", "startTimeUnixNano is 'now'", otlp(span(1, 2, 4, 1, startTimeUnixNano="now")))
    refused("otel", "spans has 3, expected objects only", {"trace_id": "x", "spans": [3]})


@pytest.mark.skipif(not SHARED.exists(), reason="the shared traces are not beside this tree")
def test_published_spans() -> None:
    kept = rows("otel", (SHARED / "inferenceperf_otel_prefix_sharing.json").read_text())
    calls = [request for _, request in kept]
    assert [(r.tokens_in, r.tokens_out) for r in calls] == [
        *((50, 20), (45, 15), (100, 50), (180, 60), (270, 70), (380, 55), (40, 10))
    ]
    assert [(at or 0) - (kept[0][0] or 0) for at, _ in kept] == [i * 2 * 10**9 for i in range(7)]
    chat = [r for r in calls if r.session]
    assert len(chat) == 4 and {r.session for r in chat} == {"conversation_trace/span_conv_turn1"}
    assert [r.think_s for r in chat] == [None, 1.0, 0.5, 0.2]
    assert all(r.body is not None for r in calls)


# -- all of them ------------------------------------------------------------------------------------------------------

NUMBERS = st.integers(-(2**65), 2**65) | st.decimals(allow_nan=False, allow_infinity=False) | st.just(Decimal("1e999"))
LEAVES = st.none() | st.booleans() | NUMBERS | st.text(max_size=8)
NAMES = sorted(
    {key for form in RECORDED.values() for key in form.keys}
    | {"data", "encoding", "endpointInput", "endpointOutput", "inferenceTime", "from", "value", "role", "content"}
    | {
        "event_type",
        "t",
        "in",
        "out",
        "agent_id",
        "api_time",
        "think_time",
        "attributes",
        "key",
        "scopeSpans",
        "status",
    }
    | {"startTimeUnixNano", "spanId", "parentSpanId", "intValue", "arrayValue", "values", "contents", "parts", "code"}
    | {f"gen_ai.{name}" for name in ("usage.input_tokens", "usage.output_tokens", "conversation.id", "input.messages")}
)
WORDS = st.sampled_from(["JSON", "BASE64", "{}", "human", "gpt", "s", "n", "subagent", "text", "chat", "/v1/responses"])
WORDS |= st.sampled_from(
    ["2026-01-01T00:00:00Z", "tool_result", "text", "history", "local", "12", '[{"role": "user"}]']
)
ANY = st.recursive(
    LEAVES | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=20,
)


LISTED = {  # the same as OTLP's own lists of lists of values
    "arrayValue": {
        "values": [
            {
                "kvlistValue": {
                    "values": [
                        {"key": "role", "value": {"stringValue": "user"}},
                        {"key": "content", "value": {"stringValue": "x"}},
                    ]
                }
            }
        ]
    }
}
SAMPLES: dict[str, Any] = {
    "aiperf": {
        "timestamp": 1,
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"a": 1}],
        "extra": {"b": 1.5},
    },
    "weka": weka(weka_call(0, 64, 1, [1]), {"t": 1, "type": "subagent", "requests": [weka_call(0, 64, 1, [1])]}),
    "tracelab": tracelab(0, 10, 1, ("user_message", "01.0"), ("text", "02.0")),
    "otel": otlp(
        span(1, 2, 9, 3, status={"code": 1}, **messages({"role": "user", "parts": [{"type": "text", "content": "x"}]})),
        span(3, 4, 9, 3, attributes={"input.messages": LISTED, "conversation.id": {"stringValue": "c"}}),
    ),
    "sharegpt": {"id": "1", "system": "s", "conversations": said(("human", "a"), ("gpt", "b"))},
    "sagemaker": sagemaker({"messages": []}, output='{"usage": {"completion_tokens": 3}}'),
    "openai-batch": batch(),
    "captured": {"timestamp": 1.5, "body": {"prompt": "x"}, "session_id": "s", "output_length": 3},
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to every value inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in inner for place in ((*path, key), *places(item, (*path, key)))]


def replace(item: Any, place: tuple[Any, ...], value: object) -> None:
    for key in place[:-1]:
        item = item[key]
    item[place[-1]] = value


@pytest.mark.parametrize("name", RECORDED)
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_object_gives_rows_or_says_why_not(name: str, data: st.DataObject) -> None:
    """Sound items with up to four values replaced by others, some of them of the names that the readers look for."""
    item = parsed(SAMPLES[name])
    for _ in range(data.draw(st.integers(1, 4))):
        replace(item, data.draw(st.sampled_from(places(item))), data.draw(ANY))
    for form in RECORDED.values():
        form.detect(item)
    file = reading(name)
    with suppress(ValueError):
        for _, request in [*RECORDED[name].rows(item, file, 1), *RECORDED[name].rows(item, file, 2)]:
            orjson.dumps([request.body and dict(request.body), request.messages, dict(request.extra), request.prompt])
            assert request.tokens_in >= 0
            assert sum(x is not None for x in (request.prompt, request.messages, request.body)) < 2


@pytest.mark.parametrize("name", RECORDED)
def test_any_value_in_any_place_of_a_sound_item_gives_rows_or_says_why_not(name: str) -> None:
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]
    wrong = [None, True, 0, -1, 2**70, Decimal("1e999"), "", "x", [], {}, [None], [{}], {"x": {}}, [[1]], deep]
    assert rows(name, SAMPLES[name])
    for place in places(parsed(SAMPLES[name])):
        for value in wrong:
            item = parsed(SAMPLES[name])
            replace(item, place, value)
            RECORDED[name].detect(item)
            with suppress(ValueError):
                RECORDED[name].rows(item, reading(name), 1)


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("indent", [None, 2])
def test_files_of_a_format_are_found_and_read(name: str, indent: int | None, tmp_path: Path) -> None:
    """A line of JSONL, or a document over several; numbers with their fractions come through it too."""
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(SAMPLES[name], indent=indent))
    trace = read(path)
    assert trace.format == name and not trace.skipped
    assert len(trace.requests) == len(requests(name, SAMPLES[name]))
    for request in trace.requests:
        orjson.dumps([request.body and dict(request.body), request.messages, dict(request.extra)])


@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_converted_is_read_as_the_same_requests(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps(SAMPLES[name]) + "\n")
    first = read(tmp_path / "a.json")
    assert first.format == name
    write(tmp_path / "b.jsonl", first)
    again = read(tmp_path / "b.jsonl")
    assert [changed(r, line=0) for r in again.requests] == [changed(r, line=0) for r in first.requests]
