"""The server over real sockets: a paged stub in this process, or the program itself with a simulated model."""

import asyncio
import hmac
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_engine.__main__ import _in_url, _watch_stdin, exposed
from reference_engine.config import EngineConfig
from reference_engine.engine import Engine
from reference_engine.intake import MAX_BODY_BYTES
from reference_engine.openai_api import REFUSED, StopText
from reference_engine.server import Server, listen, port_of
from reference_engine.tokenizer import ByteTokenizer
from tests.stub_runner import PagedStub, alone

CONFIG = EngineConfig(block_size=16, num_blocks=50, max_num_batched_tokens=2048)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Data of the events; the last, [DONE], as text."""
        lines = [e.removeprefix("data: ") for e in self.body.decode().split("\n\n") if e]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


def request_bytes(path: str, body: Any, headers: dict[str, str] | None = None) -> bytes:
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "Host: x", f"Content-Length: {len(data)}"]
    lines += [f"{k}: {v}" for k, v in (headers or {}).items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def dechunk(body: bytes) -> bytes:
    """Raises if the framing is broken or its end is missing."""
    whole = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        assert body[length : length + 2] == b"\r\n"
        if not length:
            return whole
        whole, body = whole + body[:length], body[length + 2 :]


async def call(
    port: int, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str = ""
) -> Reply:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = request_bytes(path, body, {"Connection": "close"} | (headers or {}))
    writer.write(request.replace(b"GET", method.encode(), 1) if method else request)
    head, _, rest = (await reader.read(-1)).partition(b"\r\n\r\n")
    writer.close()
    status, *lines = head.decode().split("\r\n")
    named = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}
    return Reply(int(status.split()[1]), named, dechunk(rest) if "transfer-encoding" in named else rest)


class Served(NamedTuple):
    port: int
    engine: Engine
    runner: PagedStub
    server: Server
    log: list[Any]  # its lines, read


@asynccontextmanager
async def serving(
    config: EngineConfig = CONFIG,
    before: Callable[[], object] | None = None,
    api_key: str | None = None,
    now_ns: Callable[[], int] = time.monotonic_ns,
    backoff_s: float = 0.001,
) -> AsyncIterator[Served]:
    runner = PagedStub(config.block_size, before=before)
    engine = Engine(config, runner, runner.eos_ids, "stub", now_ns, backoff_s=backoff_s)
    runner.pool = engine.scheduler.blocks
    log: list[Any] = []
    made = Server(engine, ByteTokenizer(), 264, "stub", api_key, lambda line: log.append(json.loads(line)), True)
    app, port = await listen(made, "127.0.0.1", 0)
    engine.start()
    try:
        yield Served(port, engine, runner, made, log)
        if not engine.down:
            state = (await call(port, "/v1/engine", headers={"Authorization": f"Bearer {api_key}"})).json
            assert (state["check"], state["free_blocks"]) == ("ok", config.num_blocks)
    finally:
        await engine.stop()
        await app.cleanup()


def text_of(ids: list[int], max_tokens: int, config: EngineConfig = CONFIG) -> str:
    return bytes(alone(config, ids, max_tokens)[0]).decode()


async def until(condition: Callable[[], Any]) -> None:
    """Waits for what comes by itself, however busy this machine is."""
    limit_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit_s, "waited in vain"
        await asyncio.sleep(0.002)


async def metric(port: int, name: str, **labels: str) -> float:
    """The one sample of this name that has these labels."""
    lines = (await call(port, "/metrics")).body.decode().splitlines()
    wanted = [f'{k}="{v}"' for k, v in labels.items()]
    (value,) = [s.split()[-1] for s in lines if re.match(rf"{name}{{", s) and all(w in s for w in wanted)]
    return float(value)


# Case 50


def test_what_can_never_fit_is_refused_at_once_and_others_are_served() -> None:
    async def main() -> None:
        async with serving() as served:
            a = await call(served.port, COMPLETIONS, {"prompt": [1] * 900})
            b = await call(served.port, COMPLETIONS, {"prompt": [1] * 700, "max_tokens": 200})
            assert (a.status, b.status, served.runner.steps) == (400, 400, [])
            assert "needs 57 blocks, pool has 50" in a.json["error"]["message"]
            c = await call(served.port, COMPLETIONS, {"prompt": [1] * 100, "max_tokens": 50})
            assert (c.status, c.json["usage"]["completion_tokens"]) == (200, 50)
            streamed = await call(served.port, COMPLETIONS, {"prompt": [1] * 900, "stream": True})
            assert (streamed.status, streamed.headers["content-type"]) == (400, "application/json")

    asyncio.run(main())


# Case 51


def test_cached_tokens_are_said_and_change_no_text() -> None:
    async def main() -> None:
        config = EngineConfig(block_size=4, num_blocks=50)
        prompt = [1, 2, 3, 4, 5, 6, 7, 8]
        async with serving(config) as served:
            for ids, cached in ((prompt, 0), (prompt, 4), ([*prompt, 9], 8), (prompt[:5], 4)):
                answer = (await call(served.port, COMPLETIONS, {"prompt": ids, "max_tokens": 6})).json
                assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
                assert answer["choices"][0]["text"] == text_of(ids, 6, config)
            assert await metric(served.port, "vllm:prefix_cache_hits_total") == 16
            assert await metric(served.port, "vllm:prefix_cache_queries_total") == 30

    asyncio.run(main())


# Case 52


def test_a_preemption_loses_and_repeats_nothing_and_is_said() -> None:
    async def main() -> None:
        config = EngineConfig(block_size=4, num_blocks=6)
        prompts = [[1, 2, 3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3, 2, 1]]
        gate = threading.Semaphore(0)
        async with serving(config, gate.acquire) as served:
            calls = []
            for ids in prompts:
                body = {"prompt": ids, "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}
                calls.append(asyncio.create_task(call(served.port, COMPLETIONS, body)))
                await until(lambda: served.engine._submitted == len(calls))  # both are there before the second step
            gate.release(1000)
            replies = await asyncio.gather(*calls)
            preempted = []
            for ids, reply in zip(prompts, replies, strict=True):
                *tokens, last, done = reply.events
                assert "".join(e["choices"][0]["text"] for e in tokens) == text_of(ids, 8, config)
                assert (len(tokens), last["usage"]["completion_tokens"], done) == (8, 8, "[DONE]")
                preempted.append(last["metrics"]["preemptions"])
                assert (last["metrics"]["preempted_time_ms"] > 0) == (preempted[-1] > 0)
            assert preempted[0] == 0
            assert sum(preempted) == await metric(served.port, "vllm:num_preemptions_total") >= 1

    asyncio.run(main())


# Case 54


def leave(writer: asyncio.StreamWriter, how: str) -> None:
    if how == "rst":  # linger 0: close sends a reset
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    else:
        writer.close()


async def start(port: int, ids: list[int], n: int = 1, stream: bool = True) -> tuple[asyncio.StreamReader, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes(COMPLETIONS, {"prompt": ids, "max_tokens": 20, "stream": stream, "n": n}))
    return reader, writer


def steps_of(runner: PagedStub, number: int) -> int:
    return sum(number == n for step in runner.steps for n, _ in step)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["fin", "rst"])
def test_a_client_that_leaves_the_queue_disturbs_nobody(how: str, stream: bool) -> None:
    async def main() -> None:
        gate = threading.Semaphore(0)
        async with serving(EngineConfig(max_num_seqs=1), gate.acquire) as served:
            first = asyncio.create_task(call(served.port, COMPLETIONS, {"prompt": [1, 2], "max_tokens": 20}))
            await until(lambda: served.engine._submitted == 1)
            _, writer = await start(served.port, [3, 4], stream=stream)
            await until(lambda: served.engine._submitted == 2)
            leave(writer, how)
            await until(lambda: served.server.open == 1)
            gate.release(1000)
            assert (await first).json["choices"][0]["text"] == text_of([1, 2], 20)
            assert steps_of(served.runner, 1) == 0
            assert await metric(served.port, "vllm:request_success_total", finished_reason="abort") == 1

    asyncio.run(main())


@pytest.mark.parametrize(("stream", "n"), [(True, 1), (False, 1), (True, 3), (False, 3)])
@pytest.mark.parametrize("how", ["fin", "rst"])
def test_a_client_that_leaves_stops_within_two_steps(how: str, stream: bool, n: int) -> None:
    async def main() -> None:
        gate = threading.Semaphore(0)
        async with serving(EngineConfig(max_num_seqs=n), gate.acquire) as served:
            reader, writer = await start(served.port, [1, 2], n, stream)
            gate.release(3)
            await until(lambda: len(served.runner.steps) == 3)
            if stream:
                await reader.readuntil(b'"choices"')
            second = asyncio.create_task(call(served.port, COMPLETIONS, {"prompt": [3, 4], "max_tokens": 5}))
            await until(lambda: served.engine._submitted == n + 1)
            leave(writer, how)
            await until(lambda: served.server.open == 1)
            gate.release(1000)
            assert (await second).json["choices"][0]["text"] == text_of([3, 4], 5)
            assert all(steps_of(served.runner, i) <= 3 + 2 for i in range(n))
            assert await metric(served.port, "vllm:request_success_total", finished_reason="abort") == n

    asyncio.run(main())


# The protocol


def test_a_completion_streams_one_event_a_token_then_usage_then_done() -> None:
    async def main() -> None:
        async with serving() as served:
            options = {"include_usage": True, "continuous_usage_stats": True}
            body = {"model": "stub", "prompt": "hello", "max_tokens": 5, "stream": True, "stream_options": options}
            reply = await call(served.port, COMPLETIONS, body, {"X-Request-Id": "mine"})
            *tokens, last, done = reply.events
            assert (reply.status, reply.headers["x-request-id"]) == (200, "mine")
            assert reply.headers["content-type"].startswith("text/event-stream")
            assert [e["id"] for e in tokens] == ["cmpl-mine"] * 5
            assert "".join(e["choices"][0]["text"] for e in tokens) == text_of(list(b"hello"), 5)
            assert [e["choices"][0]["finish_reason"] for e in tokens] == [None] * 4 + ["length"]
            assert [e["usage"]["completion_tokens"] for e in tokens] == [1, 2, 3, 4, 5]
            assert (last["choices"], last["usage"]["total_tokens"], done) == ([], 10, "[DONE]")
            times = last["metrics"]
            parts = times["queue_time_ms"] + times["prefill_time_ms"]
            assert times["time_to_first_token_ms"] == pytest.approx(parts)
            assert times["generation_time_ms"] == pytest.approx(4 * times["mean_itl_ms"])

    asyncio.run(main())


def test_a_chat_streams_its_role_first_for_each_choice() -> None:
    async def main() -> None:
        async with serving() as served:
            messages = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
            body = {"messages": messages, "max_completion_tokens": 3, "n": 2, "stream": True}
            *events, done = (await call(served.port, CHAT, body)).events
            ids = ByteTokenizer().chat([{"role": "user", "content": "hi"}])
            for index in (0, 1):
                first, *rest = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
                assert first["delta"] == {"role": "assistant", "content": ""}
                assert "".join(c["delta"]["content"] for c in rest) == text_of(ids, 3)
                assert [c["finish_reason"] for c in rest] == [None, None, "length"]
            assert done == "[DONE]"
            whole = (await call(served.port, CHAT, {"messages": messages})).json
            assert whole["object"] == "chat.completion"
            assert whole["usage"]["completion_tokens"] == CONFIG.context - len(ids)

    asyncio.run(main())


def test_choices_share_the_prompt_and_are_counted_together() -> None:
    async def main() -> None:
        async with serving() as served:
            answer = (await call(served.port, COMPLETIONS, {"prompt": [5] * 40, "max_tokens": 3, "n": 3})).json
            assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
            assert answer["usage"]["completion_tokens"] == 9
            assert answer["usage"]["prompt_tokens"] == 40
            computed = {i: sum(n for step in served.runner.steps for k, n in step if k == i) for i in range(3)}
            assert computed == {0: 42, 1: 10, 2: 10}  # 32 of 40 come from the first's blocks

    asyncio.run(main())


def test_a_stop_string_ends_the_answer_and_is_not_sent() -> None:
    async def main() -> None:
        text = text_of(list(b"hello"), 30)
        stop = text[9:12]
        cut = text.index(stop)
        async with serving() as served:
            body = {"prompt": "hello", "max_tokens": 30, "stop": ["~~~", stop]}
            whole = (await call(served.port, COMPLETIONS, body)).json
            (choice,) = whole["choices"]
            assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[:cut], "stop", stop)
            assert whole["usage"]["completion_tokens"] == cut + 3
            events = (await call(served.port, COMPLETIONS, {**body, "stream": True})).events[:-1]
            assert "".join(e["choices"][0]["text"] for e in events) == text[:cut]
            assert len(events) == cut + 3  # held-back text still makes an event a token
            late = (await call(served.port, COMPLETIONS, {**body, "min_tokens": cut + 4})).json["choices"][0]
            assert late["text"].startswith(text[: cut + 3])
            assert await metric(served.port, "vllm:request_success_total", finished_reason="abort") == 0

    asyncio.run(main())


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30)),
)
def test_any_split_of_the_text_stops_at_the_same_place(text: str, stops: list[str], cuts: list[int]) -> None:
    def run(pieces: list[str]) -> tuple[str, bool]:
        matcher, out = StopText(tuple(stops)), ""
        for i, piece in enumerate(pieces):
            out += matcher.push(piece, last=i == len(pieces) - 1)
            if matcher.found is not None:
                break
        return out, matcher.found is not None

    edges = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    pieces = [text[a:b] for a, b in pairwise(edges)] or [""]
    ends = [text.find(s) + len(s) for s in stops if s in text]
    assert run(pieces) == run([text])
    assert run(pieces)[1] == bool(ends)
    if ends:
        longest = max(len(s) for s in stops if text[: min(ends)].endswith(s))
        assert run(pieces)[0] == text[: min(ends) - longest]
    else:
        assert run(pieces)[0] == text


REFUSALS: dict[str, Any] = {
    "audio": {}, "echo": True, "frequency_penalty": 0.5, "function_call": "auto", "functions": [{}],
    "guided_json": {}, "guided_regex": "a", "logit_bias": {"1": 1}, "logprobs": 0, "min_p": 0.1,
    "modalities": ["audio"],
    "presence_penalty": 1, "prompt_embeds": "x", "prompt_logprobs": 1, "repetition_penalty": 1.1,
    "response_format": {"type": "json_object"}, "stop_token_ids": [1], "structured_outputs": {}, "suffix": "x",
    "tool_choice": "required", "tools": [{}], "top_k": 5, "top_logprobs": 2, "use_beam_search": True,
}  # fmt: skip
BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [1, -1]}, "prompt"),
    ({"prompt": [264]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ({"min_tokens": 17}, "min_tokens"),  # max_tokens is 16 where none is asked for
    ({"temperature": -1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"seed": 1.5}, "seed"),
    ({"n": 0}, "n"),
    ({"stop": [""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"priority": 1}, "priority"),
    ({"cache_salt": 1}, "cache_salt"),
    ({"user": 1}, "user"),
    ({"best_of": 2}, "best_of"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"n": 2, "best_of": 3}, "best_of"),
    *(({"stream": True, "stream_options": wrong}, "stream_options") for wrong in (0, "", [], False, 1, "x")),
    ({"include_timings": "yes"}, "include_timings"),
]


def test_every_refused_field_has_its_test() -> None:
    assert set(REFUSALS) == set(REFUSED)


def test_bad_requests_are_refused_naming_the_field() -> None:
    async def main() -> None:
        async with serving() as served:
            for wrong, field in [({k: v}, k) for k, v in REFUSALS.items()] + BAD:
                reply = await call(served.port, COMPLETIONS, {"prompt": "x", **wrong})
                assert (reply.status, reply.json["error"]["param"]) == (400, field), wrong
                assert field in reply.json["error"]["message"]
            for messages in (None, [], ["x"], [{"content": "x"}], [{"role": "user"}], [{"role": "bot", "content": ""}],
                             [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]):  # fmt: skip
                reply = await call(served.port, CHAT, {"messages": messages})
                assert (reply.status, reply.json["error"]["param"]) == (400, "messages"), messages
            for body in (b"{", b"[1]", b"\xff"):
                assert (await call(served.port, COMPLETIONS, body)).status == 400
            assert served.runner.steps == []

    asyncio.run(main())


def test_too_long_names_the_prompt_or_the_answer_that_was_asked_for() -> None:
    """The pool has 800 tokens. A byte is a token; a chat has three more: its beginning, its role and its end, and asks
    for the assistant's by a fourth."""

    async def main() -> None:
        message = [{"role": "user", "content": "x" * 796}]
        async with serving() as served:
            for path, body, param in (
                (COMPLETIONS, {"prompt": [1] * 900}, "prompt"),
                (COMPLETIONS, {"prompt": [1] * 801, "max_tokens": 1}, "prompt"),
                (COMPLETIONS, {"prompt": [1] * 800, "max_tokens": 5}, "prompt"),  # no room for any answer
                (COMPLETIONS, {"prompt": "x" * 800}, "prompt"),
                (COMPLETIONS, {"prompt": [1] * 799, "max_tokens": 2}, "max_tokens"),
                (COMPLETIONS, {"prompt": "x", "max_tokens": 800}, "max_tokens"),
                (COMPLETIONS, {"prompt": "x", "max_tokens": 800, "max_completion_tokens": 1}, "max_tokens"),
                (COMPLETIONS, {"prompt": "x", "max_tokens": 800, "stream": True, "n": 2}, "max_tokens"),
                (CHAT, {"messages": message}, "messages"),
                (CHAT, {"messages": message, "max_completion_tokens": 1}, "messages"),
                (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 799}, "max_tokens"),
                (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 799, "max_tokens": 1},
                 "max_completion_tokens"),
            ):  # fmt: skip
                reply = await call(served.port, path, body)
                assert (reply.status, reply.json["error"]["param"]) == (400, param), body
                assert {k: reply.json["error"][k] for k in ("type", "code")} == {"type": "BadRequestError", "code": 400}
                assert re.match(r"a prompt of \d+ tokens", reply.json["error"]["message"])
            assert {line["outcome"] for line in served.log} == {"refused"}
            assert served.runner.steps == []
            for path, body in (
                (COMPLETIONS, {"prompt": [1] * 799}),
                (CHAT, {"messages": [{"role": "user", "content": "x" * 795}]}),
            ):
                assert (await call(served.port, path, body)).json["usage"]["total_tokens"] == 800

    asyncio.run(main())


def test_neutral_values_and_unknown_fields_are_taken() -> None:
    async def main() -> None:
        neutral = {name: values[-1] if values else None for name, values in REFUSED.items()}
        async with serving() as served:
            body = {"prompt": ["x"], "max_tokens": 1, "user": "u", "no_such_field": 1, "n": 2, "best_of": 2, **neutral}
            assert (await call(served.port, COMPLETIONS, body)).status == 200

    asyncio.run(main())


def test_other_refusals_are_error_objects_with_their_status() -> None:
    async def main() -> None:
        async with serving() as served:
            unknown = await call(served.port, COMPLETIONS, {"model": "nope", "prompt": "x"})
            assert (unknown.status, unknown.json["error"]["code"]) == (404, 404)
            assert (await call(served.port, "/v1/images/generations", {})).json["error"]["type"] == "NotFoundError"
            wrong = await call(served.port, COMPLETIONS)
            assert (wrong.status, wrong.headers["allow"], wrong.json["error"]["code"]) == (405, "POST", 405)
            forgotten = (await call(served.port, "/chat/completions", {})).json["error"]["message"]
            assert forgotten == "POST '/chat/completions' is not served; would be right: what /openapi.json lists"
            huge = await call(served.port, COMPLETIONS, b'{"prompt": "' + b"x" * MAX_BODY_BYTES + b'"}')
            assert (huge.status, huge.json["error"]["code"]) == (413, 413)

    asyncio.run(main())


def test_a_key_guards_the_api_but_not_health() -> None:
    async def main() -> None:
        async with serving(api_key="s3cret") as served:
            for headers, status in (
                ({}, 401),
                ({"Authorization": "Bearer wrong"}, 401),
                ({"Authorization": "s3cret"}, 401),
                ({"Authorization": "Bearer s3cret"}, 200),
            ):
                assert (await call(served.port, "/v1/models", headers=headers)).status == status
            assert (await call(served.port, "/health")).status == 200
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer \xe9\r\n\r\n")
            assert (await reader.readline()).split()[1] == b"401"  # bytes that are no text are no key
            writer.close()

    asyncio.run(main())


def test_the_whole_key_is_compared_however_much_of_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    async def main() -> None:
        async with serving(api_key="s3cret") as served:
            monkeypatch.setattr(hmac, "compare_digest", compare)
            for given in ("", "Bearer s3cre", "Bearer s3cret"):
                await call(served.port, "/v1/models", headers={"Authorization": given})
            assert [a for a, _ in compared] == [b"", b"Bearer s3cre", b"Bearer s3cret"]
            assert {b for _, b in compared} == {b"Bearer s3cret"}

    asyncio.run(main())


def test_routes_that_are_read_answer_head_too() -> None:
    async def main() -> None:
        async with serving(api_key="k") as served:
            for path, status in (("/health", 200), ("/metrics", 200), ("/v1/models", 401)):
                reply = await call(served.port, path, method="HEAD")
                assert (reply.status, reply.body) == (status, b"")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("host", "said"),
    [("127.0.0.1", ""), ("::1", ""), ("localhost", ""), ("127.8.8.8", ""), ("0.0.0.0", "anybody on the network"),
     ("::", "anybody"), ("", "anybody"), ("example.org", "anybody"), ("10.0.0.7", "--api-key-env NAME asks for a key")],
)  # fmt: skip
def test_an_address_that_others_reach_is_warned_of(host: str, said: str) -> None:
    warning = exposed(host, False, False)
    assert said in warning
    assert bool(warning) == bool(said)
    if warning:
        assert "whoever has the key" in exposed(host, True, False)
        assert "/fault" not in warning
        assert "/fault" in exposed(host, True, True)


@pytest.mark.parametrize("how", ["fin", "rst"])
def test_a_client_that_leaves_at_once_is_no_error_of_the_server(how: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serving() as served:
            for _ in range(50):
                _, writer = await asyncio.open_connection("127.0.0.1", served.port)
                writer.write(request_bytes(COMPLETIONS, {"prompt": "x", "max_tokens": 2, "stream": True}))
                leave(writer, how)
            await asyncio.sleep(0.2)
            assert (await call(served.port, "/health")).status == 200

    asyncio.run(main())
    assert "Traceback" not in caplog.text


def test_a_planted_leak_is_told_by_the_engines_own_check() -> None:
    async def main() -> None:
        async with serving() as served:
            free = served.engine.scheduler.blocks.free
            block, _ = await served.engine.ask(free.popitem)
            assert "free list" in (await call(served.port, "/v1/engine")).json["check"]
            await served.engine.ask(lambda: free.setdefault(block))

    asyncio.run(main())


def test_an_http_1_0_client_gets_an_unchunked_stream() -> None:
    async def main() -> None:
        async with serving() as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            raw = request_bytes(COMPLETIONS, {"prompt": "x", "max_tokens": 2, "stream": True})
            writer.write(raw.replace(b"HTTP/1.1", b"HTTP/1.0"))
            _, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
            writer.close()
            assert body.startswith(b"data: {")
            assert body.endswith(b"data: [DONE]\n\n")

    asyncio.run(main())


def test_a_connection_serves_a_stream_and_then_the_next_request() -> None:
    async def main() -> None:
        async with serving() as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            for _ in range(3):
                writer.write(request_bytes(COMPLETIONS, {"prompt": "x", "max_tokens": 2, "stream": True}))
                assert (await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")).startswith(b"HTTP/1.1 200")
            writer.close()

    asyncio.run(main())


# The program


class Program(NamedTuple):
    process: "subprocess.Popen[bytes]"
    url: str
    port: int


def launch(*flags: str) -> Program:
    command = [sys.executable, "-m", "reference_engine", "--model", "sim:fast", "--port", "0", "--exit-with-stdin"]
    process = subprocess.Popen(
        [*command, *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout
    url = json.loads(process.stdout.readline())["listening"]
    return Program(process, url, int(url.rsplit(":", 1)[1].split("/")[0]))


def end(program: Program) -> int:
    """Exit code after the parent's end of the pipe has closed."""
    assert program.process.stdin
    program.process.stdin.close()
    code = program.process.wait(60)
    for pipe in (program.process.stdout, program.process.stderr):
        assert pipe
        pipe.close()
    return code


@pytest.fixture(scope="module")
def sim() -> Iterator[Program]:
    program = launch("--max-num-seqs", "256")
    yield program
    assert program.process.stdin
    assert program.process.stderr
    program.process.stdin.close()
    assert b"Traceback" not in program.process.stderr.read()
    assert end(program) == 0


def test_a_simulated_model_needs_no_torch(sim: Program) -> None:
    maps = Path(f"/proc/{sim.process.pid}/maps")
    if not maps.exists():
        pytest.skip("needs Linux's /proc")
    assert "libtorch" not in maps.read_text()


def test_models_and_effective_configuration_are_told(sim: Program) -> None:
    (model,) = asyncio.run(call(sim.port, "/v1/models")).json["data"]
    assert (model["id"], model["max_model_len"]) == ("sim:fast", 2048 * 16)
    assert asyncio.run(call(sim.port, "/v1/engine")).json["config"]["max_num_seqs"] == 256


def test_choices_have_the_seeds_that_follow(sim: Program) -> None:
    def texts(**fields: int) -> list[str]:
        reply = asyncio.run(call(sim.port, COMPLETIONS, {"prompt": "x", "max_tokens": 20, **fields}))
        return [c["text"] for c in reply.json["choices"]]

    assert texts(seed=7, n=3) == texts(seed=7) + texts(seed=8) + texts(seed=9)


def test_256_streams_at_once_all_end_well(sim: Program) -> None:
    async def main() -> None:
        body = {"prompt": "hello", "max_tokens": 16, "stream": True, "stream_options": {"include_usage": True}}
        replies = await asyncio.gather(*(call(sim.port, COMPLETIONS, {**body, "seed": i}) for i in range(256)))
        for reply in replies:
            *tokens, last, done = reply.events
            assert (reply.status, len(tokens), done) == (200, 16, "[DONE]")
            assert last["usage"]["completion_tokens"] == 16
        assert len({"".join(e["choices"][0]["text"] for e in r.events[:-2]) for r in replies}) == 256
        state = (await call(sim.port, "/v1/engine")).json
        assert (state["check"], state["free_blocks"]) == ("ok", state["config"]["num_blocks"])

    asyncio.run(main())


def test_it_stops_on_sigterm_with_streams_open() -> None:
    async def main(program: Program) -> None:
        reader, writer = await start(program.port, [1], stream=True)
        await reader.readuntil(b'"choices"')
        program.process.send_signal(signal.SIGTERM)
        await reader.read(-1)
        writer.close()

    program = launch("--num-blocks", "4000")
    asyncio.run(main(program))
    assert program.process.wait(60) == 0
    assert end(program) == 0


@pytest.mark.parametrize("how", ["</dev/null", "<&-", "</dev/null 2>&-"])
def test_it_ends_cleanly_whatever_its_stdin_is(how: str) -> None:
    flags = "-m reference_engine --model sim:fast --port 0 --exit-with-stdin"
    command = ["/bin/sh", "-c", f"exec {sys.executable} {flags} {how}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert set(json.loads(done.stdout)) == {"listening", "model"}  # that line alone, whatever was closed


@pytest.mark.parametrize("host", ["::1", "::", "", "0.0.0.0", "127.0.0.1"])
def test_the_address_it_names_is_a_url(host: str) -> None:
    if ":" in host:
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()  # "::" can be had where no address is
        except OSError:
            pytest.skip("this machine has no IPv6")
    program = launch("--host", host)
    try:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"{program.url}/models", timeout=10) as reply:
            assert reply.status == 200
    finally:
        assert end(program) == 0


def test_of_all_addresses_one_is_named_that_is_there() -> None:
    hosts = ("", "0.0.0.0", "::", "::1", "example.org")
    assert [*map(_in_url, hosts)] == ["127.0.0.1", "127.0.0.1", "[::1]", "[::1]", "example.org"]
    assert port_of([("::", 1, 0, 0), ("0.0.0.0", 2)]) == port_of([("0.0.0.0", 2), ("::", 1, 0, 0)]) == 2
    assert port_of([("::1", 1, 0, 0)]) == 1


def test_a_pipe_that_ends_after_the_loop_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "read", lambda *of: b"")
    loop = asyncio.new_event_loop()
    loop.close()
    _watch_stdin(loop, lambda: None)


def test_a_closed_standard_output_is_refused() -> None:
    """The address would be told to nobody."""
    flags = "-m reference_engine --model sim:fast --port 0 --exit-with-stdin"
    command = ["/bin/sh", "-c", f"exec {sys.executable} {flags} </dev/null >&-"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("reference_engine: standard output is closed; would be right: open")


@pytest.mark.parametrize("flags", [["--host", "0.0.0.0"], ["--num-blocks", "0"]], ids=["warned", "refused"])
def test_what_cannot_be_said_is_no_traceback(flags: list[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs Linux's /dev/full")
    command = [sys.executable, "-m", "reference_engine", "--model", "sim:fast", "--port", "0", *flags]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")


def test_an_output_that_nobody_can_read_is_said_and_ends_it() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs Linux's /dev/full")
    command = [sys.executable, "-m", "reference_engine", "--model", "sim:fast", "--port", "0"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "cannot be written: No space left on device" in done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--num-blocks", "0"], "num_blocks is 0"),
        (["--model", "sim:nope"], "model is 'sim:nope'"),
        (["--policy", "lifo"], "policy is 'lifo'"),
        (["--batching", "lazy"], "batching is 'lazy'"),
        (["--port", "99999"], "--port is 99999; would be right: 0 to 65535"),
        (["--threads", "1000000"], "threads is 1000000; would be right: 0 to 1024"),
        (["--quantization", "int8"], "sim:fast computes nothing, so that quantization has no effect"),
        (["--kv-cache-dtype", "int8"], "so that kv_cache_dtype has no effect"),
        (["--max-queue", "-1"], "max_queue is -1; would be right: 0 or more"),
        (["--log-requests", "/no/such/folder/log"], "--log-requests, --log-steps: "),
        (["--api-key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE"),
    ],
)
def test_bad_flags_end_with_one_line(flags: list[str], said: str) -> None:
    command = [sys.executable, "-m", "reference_engine", "--model", "sim:fast", "--port", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ})
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr
