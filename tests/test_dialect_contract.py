"""What every row of DIALECTS owes, over a real socket: equal outcomes, stamps, counts and words for equal events."""

import itertools
import json
from dataclasses import replace

import pytest

from llm_bench import answer, clock, exchange, retry
from llm_bench.bodies import Ask
from llm_bench.dialects import DIALECTS, Chunk
from llm_bench.exchange import Timeouts
from llm_bench.framing import CHUNKS, FRAMINGS, SSE
from llm_bench.request import Request
from llm_bench.targets import Target
from llm_bench.transport import TRANSPORTS, Asked
from tests.fixtures import cut, raw_reads
from tests.fixtures import exchange as seen_by_the_socket
from tests.fixtures.protocols import MODEL, OVER_HTTP, SPEAKS, body_of, script, serve
from tests.quiet import undisturbed
from tests.scripted import Scripted, http_response

TEXTS = ["ebb ", "and ", "flöw"]
GAP_MS = 10.0
REQUEST = Request(tokens_in=5, tokens_out=len(TEXTS), prompt="low water")
OPENAI = ("openai-chat", "openai-completions")
every = pytest.mark.parametrize("name", OVER_HTTP)
STREAM = [name for name in OVER_HTTP if DIALECTS[name].comes.streams]
streamed = pytest.mark.parametrize("name", STREAM)


def target_of(name, server, **facts) -> Target:
    root = server.url.removesuffix("/v1")
    return Target("t", root + DIALECTS[name].site.base, api=name, model=MODEL, **facts)


def ask_of(name: str, stream: bool) -> Ask:
    """As a probe would have it, with what the server's own page says of the model."""
    row = DIALECTS[name]
    described = row.site.described
    extra = described[1](SPEAKS[name].pages[f"/v2/models/{MODEL}"], {}) if described else {}
    return Ask(MODEL, stream=stream and row.comes.streams, extra=extra)


def sent(name, server, *, stream=True, cancel_after_s=None, retries=0, timeouts=None):
    """One request through the row's own transport, as a run sends it."""
    row, limits = DIALECTS[name], timeouts or Timeouts(total_s=5.0)
    transport = TRANSPORTS[row.transport]
    target = target_of(name, server)

    async def one():
        ask = ask_of(name, stream)
        sender = transport.open(Asked(target, target.url, row, MODEL, ask.stream, limits))
        payload = transport.frame("r-0", row.encode(REQUEST, ask))
        try:
            return await retry.retrying(sender.send, retries)(payload, cancel_after_s)
        finally:
            sender.close()

    return clock.run(one())


def read(name, tried, *, stream=True):
    row = DIALECTS[name]
    asked_out = row.takes.asked(REQUEST, ask_of(name, stream)).out
    stream = stream and row.comes.streams
    return answer.read(tried.exchange, row, streamed=stream, asked_out=asked_out, pinned=False, finish_expected=True)


def answered(name, script_, **more):
    with Scripted(script_) as server:
        tried = sent(name, server, **more)
    return read(name, tried, stream=more.get("stream", True)), tried


def test_every_row_has_a_server_to_be_tried_on():
    assert list(SPEAKS) == OVER_HTTP


@streamed
@undisturbed
def test_a_good_stream_is_ok_with_its_text_its_stamps_and_its_counts(name):
    speaks = SPEAKS[name]
    got, tried = answered(name, script(name, speaks.stream(TEXTS), GAP_MS))
    assert (got.outcome, got.error, got.labels) == ("ok", "", [])
    assert got.text == "".join(TEXTS)
    assert got.finish_reason == speaks.finish
    assert (got.tokens_in, got.tokens_out, got.tokens_cached, got.tokens_reasoning) == speaks.counts
    said = name not in ("trtllm-triton", "torchserve", "ray-serve")  # the rest count no tokens
    assert got.tokens_out_from == ("usage" if said else "events")
    # A stamp a token, of its own read: gaps are the script's, and what the socket took for the first token is it.
    assert len(got.event_ns) == len(TEXTS)
    assert all(b > a for a, b in itertools.pairwise(got.event_ns))
    assert tried.exchange.first_token_ns == got.event_ns[0] == got.first_answer_ns
    assert (got.event_ns[-1] - got.event_ns[0]) / 1e6 > GAP_MS  # two gaps, less what the reads were late


@streamed
def test_a_stream_that_comes_at_once_is_as_many_tokens(name):
    pieces = SPEAKS[name].stream(TEXTS)
    joined = b"".join(data for _, data in script(name, pieces))
    got, _ = answered(name, [(0, joined)])
    assert (got.outcome, got.labels, got.text, len(got.event_ns)) == ("ok", [], "".join(TEXTS), len(TEXTS))
    assert len(set(got.event_ns)) == 1


@every
def test_an_error_before_the_stream_is_its_status_and_the_servers_text(name):
    status, body, text = SPEAKS[name].refused
    got, _ = answered(name, body_of(body, status))
    kind = "rejected" if status in (429, 503) else f"http_{status // 100}xx"
    assert (got.outcome, got.error_kind, got.status) == ("failed", kind, status)
    assert text in got.error


@every
def test_a_model_that_is_not_there_is_its_status_and_the_servers_text(name):
    status, body, text = SPEAKS[name].unknown
    got, _ = answered(name, body_of(body, status))
    assert (got.outcome, got.error_kind) == ("failed", "http_4xx")
    assert text in got.error


@streamed
def test_an_error_inside_the_stream_fails_it_with_the_servers_text(name):
    speaks = SPEAKS[name]
    begun = [*speaks.begins(5), *speaks.tokens(TEXTS, 5)[:1]]
    if speaks.broken is None:
        got, _ = answered(name, script(name, begun, then="reset"))
        assert (got.outcome, got.error_kind) == ("failed", "truncated_stream")
        assert got.error
        return
    got, _ = answered(name, script(name, [*begun, speaks.broken]))
    assert (got.outcome, got.error_kind) == ("failed", "server_error_in_stream")
    assert speaks.broken_says in got.error
    got, _ = answered(name, script(name, [*begun, speaks.broken, b"data: [DONE]\n\n"]))  # as vLLM's does
    assert got.error_kind == "server_error_in_stream"


@streamed
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_stream_that_is_cut_is_truncated_and_its_tokens_are_kept(name, how):
    speaks = SPEAKS[name]
    begun = [*speaks.begins(5), *speaks.tokens([*TEXTS, "more"], 5)[:2]]
    got, _ = answered(name, script(name, begun, then=how))
    assert (got.outcome, got.error_kind) == ("failed", "truncated_stream")
    assert "2 tokens" in got.error
    assert len(got.event_ns) == 2


@streamed
def test_a_stream_that_ends_cleanly_without_its_last_words_is_truncated_where_it_owes_some(name):
    speaks = SPEAKS[name]
    begun = [*speaks.begins(5), *speaks.tokens([*TEXTS, "more"], 5)[:2]]
    got, _ = answered(name, script(name, begun))
    if DIALECTS[name].comes.ends_by_framing:
        assert got.outcome == "ok"
    else:
        assert (got.outcome, got.error_kind) == ("failed", "truncated_stream")


@streamed
def test_an_answer_without_a_token_is_empty(name):
    speaks = SPEAKS[name]
    got, _ = answered(name, script(name, [*speaks.begins(5), *speaks.ends([], 5)]))
    owed = "empty_output" if DIALECTS[name].comes.ends_by_framing or speaks.ends([], 5) else "truncated_stream"
    if name == "sglang":  # its last word is no proof: the finish reason rides on a token's event
        owed = "truncated_stream"
    assert (got.outcome, got.error_kind) == ("failed", owed)


@streamed
@undisturbed
def test_a_planned_cancel_closes_the_connection_and_is_no_failure(name):
    speaks = SPEAKS[name]
    begun = [*speaks.begins(5), *speaks.tokens([*TEXTS, "more"], 5)[:2]]
    with Scripted(script(name, begun, then="hang")) as server:
        tried = sent(name, server, cancel_after_s=0.05)
        clock.run(_until(lambda: server.closed))
    got = read(name, tried)
    assert (got.outcome, got.error_kind) == ("cancelled", "")
    assert len(got.event_ns) == 2
    assert "2 token-bearing events" in tried.exchange.error


async def _until(true) -> None:
    import asyncio

    for _ in range(3000):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the server has not seen the client leave")


@every
@pytest.mark.parametrize("status", [429, 503])
@undisturbed
def test_overload_is_rejected_and_retry_after_is_heard(name, status):
    refusal = body_of(SPEAKS[name].refused[1], status, Retry_After="0")
    got, tried = answered(name, refusal)
    assert (got.outcome, got.error_kind, got.status) == ("failed", "rejected", status)
    assert SPEAKS[name].refused[2] in got.error
    good = serve(name)
    with Scripted(lambda number, seen: refusal if number == 0 else good(number, seen)) as server:
        tried = sent(name, server, retries=1)
    assert (tried.attempts, tried.first.status) == (2, status)
    assert read(name, tried).outcome == "ok"
    assert tried.retry_wait_ns < 400e6  # as Retry-After said, and not the half second of our own


@streamed
def test_a_whole_answer_is_ok_without_stamps(name):
    speaks = SPEAKS[name]
    reply = [(0, http_response(200, json.dumps(speaks.whole(TEXTS, 5)).encode(), dict(speaks.head)))]
    got, _ = answered(name, reply, stream=False)
    assert (got.outcome, got.error, got.event_ns) == ("ok", "", [])
    assert (got.text, got.finish_reason) == ("".join(TEXTS), speaks.finish)
    if name != "trtllm-triton":  # which does not count
        assert (got.tokens_in, got.tokens_out, got.tokens_cached, got.tokens_reasoning) == speaks.counts
        assert got.tokens_out_from == "usage"


@streamed
@undisturbed
def test_no_token_in_time_is_a_timeout_of_the_first_token_and_silence_after_it_one_of_stall(name):
    speaks = SPEAKS[name]
    limits = Timeouts(ttft_s=0.1, stall_s=0.1, total_s=5.0)
    got, _ = answered(name, script(name, speaks.begins(5), then="hang"), timeouts=limits)
    assert got.error_kind == "ttft_timeout"
    begun = [*speaks.begins(5), *speaks.tokens([*TEXTS, "more"], 5)[:1]]
    got, _ = answered(name, script(name, begun, then="hang"), timeouts=limits)
    assert got.error_kind == "stall_timeout"


@every
@pytest.mark.parametrize("stream", [True, False])
def test_a_good_server_of_the_protocol_is_asked_where_it_listens_with_its_headers(name, stream):
    with Scripted(serve(name)) as server:
        tried = sent(name, server, stream=stream)
        (seen,) = server.requests
    assert read(name, tried, stream=stream).outcome == "ok"
    assert seen.headers["content-type"] == "application/json"
    for header, value in DIALECTS[name].site.headers:
        assert seen.headers[header] == value


def test_the_key_goes_where_the_protocol_has_it(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "secret-key")
    for name in OVER_HTTP:
        row = DIALECTS[name]
        header, form = row.site.key_header
        with Scripted(serve(name)) as server:
            target = target_of(name, server, key_env="SOME_KEY")

            async def one(target=target, row=row, name=name):
                sender = TRANSPORTS[row.transport].open(Asked(target, target.url, row, MODEL, True, Timeouts()))
                await sender.send(TRANSPORTS[row.transport].frame("r", row.encode(REQUEST, ask_of(name, True))))
                sender.close()

            clock.run(one())
            assert server.requests[0].headers[header.lower()] == form.format(key="secret-key")


# Any split of the bytes


def _read_in(name, pieces):
    """The answer in a body that came in these pieces, stamped 1 ms apart."""
    framing = FRAMINGS[DIALECTS[name].comes.framing]
    response = framing.response([])
    response.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    reads = []
    for at_ms, piece in enumerate(pieces):
        got = response.feed(piece)
        if got:
            reads.append((float(at_ms), b"".join(got)))
    x = seen_by_the_socket(reads)
    x.chunk_ends = response.ends
    return answer.read(x, DIALECTS[name], streamed=True, asked_out=3, pinned=False)


@streamed
def test_every_split_of_a_stream_gives_the_same_answer(name):
    body = b"".join(data for _, data in script(name, SPEAKS[name].stream(TEXTS))[1:])
    whole = _read_in(name, [body])
    assert (whole.outcome, whole.text) == ("ok", "".join(TEXTS))
    timeless = {"event_ns": [], "first_answer_ns": 0}
    for at in range(0, len(body), 7):
        split = _read_in(name, cut(body, [at, at + 1, at * 3]))
        assert split._replace(**timeless) == whole._replace(**timeless)
        assert len(split.event_ns) == len(whole.event_ns)


def test_chunks_are_borders_wherever_the_reads_fall():
    chunked = [name for name in STREAM if DIALECTS[name].comes.framing == CHUNKS]
    for name in chunked:
        body = b"".join(data for _, data in script(name, [b"one", b" two", b"{", b" three"])[1:])
        got = [_read_in(name, cut(body, [at])) for at in range(len(body))]
        assert {(g.text, len(g.event_ns), g.tokens_out) for g in got} == {("one two{ three", 4, 4)}


@pytest.mark.parametrize(
    ("name", "file", "tokens", "outcome"),
    [
        ("torchserve", "torchserve/raw_tcp_stream.txt", 6, "ok"),
        ("torchserve", "torchserve/raw_tcp_aborted.txt", 7, "failed"),
        ("triton-generate", "triton/raw_tcp_stream.txt", 6, "ok"),
        ("triton-generate", "triton/raw_tcp_aborted.txt", 10, "failed"),
    ],
)
def test_what_real_servers_were_seen_to_send_is_read_token_by_token(name, file, tokens, outcome):
    framing = FRAMINGS[DIALECTS[name].comes.framing]
    response, reads = framing.response([]), []
    for at_ms, data in raw_reads(file):
        if pieces := response.feed(data):
            reads.append((at_ms, b"".join(pieces)))
    x = seen_by_the_socket(reads, exchange.COMPLETE if response.complete else exchange.TRUNCATED, error="left")
    x.headers, x.chunk_ends = response.headers, response.ends
    got = answer.read(x, DIALECTS[name], streamed=True, asked_out=tokens, pinned=False)
    assert (got.outcome, len(got.event_ns), len(set(got.event_ns))) == (outcome, tokens, tokens)
    assert got.text.startswith(" handledlampedLAlamped")


# What some protocols alone say


def test_sglangs_text_is_the_sum_of_what_each_event_adds_and_half_a_character_is_a_token():
    def event(text, n, reason=None):
        meta = {"finish_reason": reason, "prompt_tokens": 4, "completion_tokens": n, "cached_tokens": 0}
        return b"data: " + json.dumps({"text": text, "meta_info": meta}).encode() + b"\n\n"

    pieces = [event("a", 1), event("a", 2), event("aé", 3), event("aé b", 5, {"type": "stop", "matched": 2})]
    got, _ = answered("sglang", script("sglang", [*pieces, b"data: [DONE]\n\n"], GAP_MS))
    assert (got.outcome, got.text, got.tokens_out, got.event_tokens) == ("ok", "aé b", 5, [1, 1, 1, 2])


@pytest.mark.parametrize("kind", ["function_call_arguments", "mcp_call_arguments", "code_interpreter_call_code"])
def test_what_the_responses_api_streams_for_a_tool_is_a_token(kind):
    event = json.dumps({"type": f"response.{kind}.delta", "output_index": 0, "delta": "fib(30)"}).encode()
    (delta,) = DIALECTS["openai-responses"].decode(event).deltas
    assert (delta.tool, delta.text, delta.bears_token) == ("fib(30)", "", True)


def _sglang(text, n, index):
    meta = {"id": str(index), "finish_reason": {"type": "length", "length": 2} if n == 2 else None}
    return {"text": text, "index": index, "meta_info": meta | {"prompt_tokens": 4, "completion_tokens": n}}


def test_each_choice_of_sglangs_repeats_its_own_text_and_counts_its_own_tokens():
    request = replace(REQUEST, tokens_out=2)
    several, dialect = Ask("m", extra={"n": 2}), DIALECTS["sglang"]
    assert json.loads(dialect.encode(request, several))["sampling_params"]["n"] == 2
    assert dialect.takes.asked(request, several) == (2, True, 2)
    said = [_sglang("a", 1, 0), _sglang("é", 1, 1), _sglang("éx", 2, 1), _sglang("ab", 2, 0)]
    stream = [b"data: %b\n\n" % json.dumps(event).encode() for event in said]
    got, _ = answered("sglang", script("sglang", [*stream, b"data: [DONE]\n\n"], GAP_MS))
    assert (got.outcome, got.text, got.tokens_out, got.tokens_in, got.text_bytes) == ("ok", "ab", 4, 4, 5)
    assert (got.event_choice, got.event_tokens) == ([0, 1, 1, 0], [1, 1, 1, 1])
    whole = dialect.decode(json.dumps([said[3], said[2]]).encode())
    assert [(d.choice, d.text, d.finish_reason) for d in whole.deltas] == [(0, "ab", "length"), (1, "éx", "length")]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (4, 4)


def test_tritons_counts_of_each_event_are_its_usage():
    def event(text, n, reason="None"):
        said = {"text_output": text, "finish_reason": reason, "num_output_tokens": n, "num_input_tokens": 4}
        return b"data: " + json.dumps(said).encode() + b"\n\n"

    pieces = [event("a", 1), event("", 1), event("b c", 3), event("", 0, "length")]
    got, _ = answered("triton-generate", script("triton-generate", pieces, GAP_MS))
    assert (got.tokens_out, got.tokens_out_from, got.event_tokens) == (5, "usage", [1, 1, 3])


def test_a_triton_model_that_gives_no_reason_ends_by_its_last_chunk():
    pieces = [b'data: {"model_name":"llm","model_version":"1","text_output":"x"}\n\n'] * 3
    got, _ = answered("triton-generate", script("triton-generate", pieces))
    assert (got.outcome, got.labels, got.tokens_out, got.tokens_out_from) == ("ok", [], 3, "events")
    got, _ = answered("triton-generate", script("triton-generate", pieces, then="close"))
    assert got.error_kind == "truncated_stream"


def test_where_a_servers_time_went_is_kept_by_our_names():
    got, _ = answered("trtllm-triton", script("trtllm-triton", SPEAKS["trtllm-triton"].stream(TEXTS)))
    assert {k: round(v, 3) for k, v in got.server_ms.items()} == {
        "server_queue_ms": 4.0,
        "server_prefill_ms": 16.0,
        "server_ttft_ms": 20.0,
        "server_decode_ms": 30.0,
    }
    got, _ = answered("llamacpp", script("llamacpp", SPEAKS["llamacpp"].stream(TEXTS)))
    assert got.server_ms == {
        "server_prefill_ms": 40.0,
        "server_ttft_ms": 40.0,
        "server_decode_ms": 60.0,
        "server_tpot_ms": 30.0,
    }
    speaks = SPEAKS["tgi"]
    reply = [(0, http_response(200, json.dumps(speaks.whole(TEXTS, 5)).encode(), dict(speaks.head)))]
    got, _ = answered("tgi", reply, stream=False)
    assert got.server_ms == {"server_queue_ms": 7.0}  # x-time-per-token has the prompt's pass in it: no TPOT


@pytest.mark.parametrize("value", [b"", b"-1", b"x", b"9" * 5000, b"1.5", b"\xb2", b"99999999999"])
def test_a_head_that_says_no_count_is_none(value):
    said = DIALECTS["tgi"].comes.of_headers([(b"x-prompt-tokens", value), (b"x-queue-time", value)])
    assert said == Chunk()


def test_tools_and_thoughts_are_tokens_but_no_answer():
    def event(obj):
        return b"data: " + json.dumps(obj).encode() + b"\n\n"

    thought = [
        event({"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}}),
        event({"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "name": "f"}}),
        event({"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": "{}"}}),
        event({"type": "content_block_delta", "index": 1, "delta": {"type": "signature_delta", "signature": "x"}}),
        event({"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 9}}),
        event({"type": "message_stop"}),
    ]
    got, _ = answered("anthropic-messages", script("anthropic-messages", thought, GAP_MS))
    assert (got.outcome, got.text, got.finish_reason, got.tokens_out) == ("ok", "", "tool_calls", 9)
    assert (len(got.event_ns), got.first_answer_ns) == (3, 0)
    thought = [
        event({"type": "response.reasoning_text.delta", "delta": "hm"}),
        event({"type": "response.output_item.added", "item": {"type": "function_call", "name": "f"}}),
        event({"type": "response.function_call_arguments.delta", "delta": "{}"}),
        event({"type": "response.completed", "response": {"status": "completed", "usage": {"output_tokens": 9}}}),
    ]
    got, _ = answered("openai-responses", script("openai-responses", thought, GAP_MS))
    assert (got.outcome, got.text, got.finish_reason, got.tokens_out) == ("ok", "", "stop", 9)
    assert (len(got.event_ns), got.first_answer_ns) == (3, 0)


def test_a_handlers_json_lines_are_chunks_with_a_text():
    pieces = [b'{"text": " a", "n": 1}\n', b'{"text": "b", "n": 1}\n']
    got, _ = answered("torchserve", script("torchserve", pieces, GAP_MS))
    assert (got.outcome, got.text, got.tokens_out) == ("ok", " ab", 2)
    got, _ = answered("torchserve", script("torchserve", [b"a", b'{"error": "no memory"}\n']))
    assert (got.error_kind, got.error) == ("server_error_in_stream", "no memory")


def test_trtllm_serves_blanks_after_an_event_are_read_over():
    pieces = [piece.replace(b"}\n\n", b"} \n\n") for piece in SPEAKS["openai-chat"].stream(TEXTS)]
    got, _ = answered("openai-chat", script("openai-chat", pieces))
    assert (got.outcome, got.labels, got.text) == ("ok", [], "".join(TEXTS))


@pytest.mark.parametrize("name", [n for n in STREAM if DIALECTS[n].comes.framing == CHUNKS])
@pytest.mark.parametrize("stream", [True, False])
def test_a_character_that_is_cut_between_chunks_is_whole_in_the_text_and_each_chunk_is_a_token(name, stream):
    euro, wave = "€".encode(), "🌊".encode()
    parts = [b"a " + euro[:1], euro[1:2], euro[2:] + wave[:2], wave[2:], b" \xff\xe2\x82"]  # the last is no UTF-8
    body = b"".join(parts)
    script_ = script(name, parts) if stream else [(0, http_response(200, body, {"Content-Type": "text/plain"}))]
    got, _ = answered(name, script_, stream=stream)
    assert (got.outcome, got.text, got.text_bytes) == ("ok", "a €🌊 \ufffd\ufffd", len(body))
    assert (got.tokens_out, len(got.event_ns)) == ((5, 5) if stream else (-1, 0))


@pytest.mark.parametrize("name", [n for n in STREAM if DIALECTS[n].comes.framing == SSE])
@pytest.mark.parametrize(
    "line",
    [
        b'error: {"code": 400, "message": "the request exceeds the context", "type": "invalid_request_error"}\n\n',
        b'error: {"error": {"code": 400, "message": "the request exceeds the context"}}\n\n',
        b'error:{"code": 400, "message": "the request exceeds the context"}',
    ],
)
def test_an_error_in_a_line_of_its_own_fails_the_stream_with_the_servers_text(name, line):
    """As llama.cpp before September 2025, which said [DONE] after it."""
    pieces = [*SPEAKS[name].begins(5), *SPEAKS[name].tokens(TEXTS, 5)[:2], line]
    got, _ = answered(name, script(name, [*pieces, b"\n\ndata: [DONE]\n\n"]))
    assert (got.outcome, got.error_kind) == ("failed", "server_error_in_stream")
    assert got.error == "the request exceeds the context (code 400)" or name == "http"
    assert "the request exceeds the context" in got.error
    assert len(got.event_ns) == 2


def test_the_word_error_in_the_text_of_a_stream_is_none():
    name = "openai-chat"
    texts = ["error: {", "\nerror: {}", "a"]
    got, _ = answered(name, script(name, SPEAKS[name].stream(texts)))
    assert (got.outcome, got.text) == ("ok", "".join(texts))
