"""Other people's clients against the engine's server: OpenAI's, curl, and readers of the kinds that frameworks have."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.test_engine_server import Program, end, launch

MESSAGES: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    started = launch()
    yield started
    assert started.process.stdin
    assert started.process.stderr
    started.process.stdin.close()
    assert b"Traceback" not in started.process.stderr.read()
    assert end(started) == 0


# OpenAI's


def test_openais_client_reads_completions_and_chats(program: Program) -> None:
    with openai.OpenAI(base_url=program.url, api_key="none", max_retries=0) as client:
        whole = client.completions.create(model="sim:fast", prompt="hello", max_tokens=8, seed=3)
        assert whole.usage
        assert whole.usage.completion_tokens == len(whole.choices[0].text) == 8
        pieces = client.completions.create(model="sim:fast", prompt="hello", max_tokens=8, seed=3, stream=True)
        assert "".join(p.choices[0].text for p in pieces) == whole.choices[0].text
        stream = client.chat.completions.create(
            model="sim:fast",
            messages=MESSAGES,
            max_completion_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert len("".join(c.choices[0].delta.content or "" for c in chunks[:-1])) == 8
        assert chunks[-1].usage
        assert chunks[-1].usage.completion_tokens == 8
        assert [m.id for m in client.models.list()] == ["sim:fast"]
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="nope", prompt="x")
        with pytest.raises(openai.BadRequestError, match="pool has 2048"):
            client.completions.create(model="sim:fast", prompt="x", max_tokens=100_000)


def test_openais_raw_responses_and_its_helper_of_streams(program: Program) -> None:
    with openai.OpenAI(base_url=program.url, api_key="none", max_retries=0) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="sim:fast", messages=MESSAGES, max_tokens=4, seed=1, extra_headers={"X-Request-Id": "mine"}
        )
        assert raw.headers["x-request-id"] == "mine"
        assert raw.parse().choices[0].finish_reason == "length"
        text = raw.parse().choices[0].message.content or ""
        with (
            client.chat.completions.stream(  # refuses an answer that is cut by its length
                model="sim:fast", messages=MESSAGES, max_tokens=50, seed=1, stop=[text[1:]]
            ) as stream
        ):
            kinds = [event.type for event in stream]
            final = stream.get_final_completion()
        assert kinds.count("content.delta") >= 1
        assert (final.choices[0].message.content, final.choices[0].finish_reason) == (text[:1], "stop")


def test_openais_client_that_leaves_a_stream_leaves_nothing_running(program: Program) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=program.url, api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="sim:fast", messages=MESSAGES, max_tokens=20_000, stream=True
            )
            for _ in range(3):
                await anext(stream)
            await stream.close()
            async with httpx.AsyncClient(base_url=program.url) as other:
                for _ in range(1000):
                    if not (await other.get("/engine")).json()["running"]:
                        return
                    await asyncio.sleep(0.005)
        raise AssertionError("it runs on")

    asyncio.run(main())


# As LangChain's ChatOpenAI reads a stream: dumped chunks, a role in the first delta or none, one chunk without choices.


def langchain_like(chunks: Any) -> tuple[str, str, str, dict[str, Any]]:
    """(role, text, finish reason, usage), by the steps of langchain_openai's _convert_chunk_to_generation_chunk."""
    role = text = finish_reason = ""
    usage: dict[str, Any] = {}
    for chunk in chunks:
        dumped = chunk if isinstance(chunk, dict) else chunk.model_dump()
        if dumped.get("usage"):
            usage = dumped["usage"]
        choices = dumped.get("choices", [])
        if not choices:
            continue
        (choice,) = choices
        if choice["delta"] is None:
            continue
        role = choice["delta"].get("role") or role
        text += choice["delta"].get("content") or ""
        finish_reason = choice.get("finish_reason") or finish_reason
    return role, text, finish_reason, usage


def test_a_langchain_style_reader_gets_role_text_reason_and_usage(program: Program) -> None:
    asked: dict[str, Any] = {"model": "sim:fast", "messages": MESSAGES, "max_tokens": 6, "seed": 2, "temperature": 0.7}
    asked |= {"stream": True, "stream_options": {"include_usage": True}, "n": 1}
    with openai.OpenAI(base_url=program.url, api_key="none", max_retries=0) as client:
        by_openai = langchain_like(client.chat.completions.create(**asked))
    assert (by_openai[0], len(by_openai[1]), by_openai[2]) == ("assistant", 6, "length")
    assert by_openai[3]["completion_tokens"] == 6
    assert by_openai[3]["total_tokens"] == by_openai[3]["prompt_tokens"] + 6
    chunks = []
    with httpx.stream("POST", f"{program.url}/chat/completions", json=asked) as response:
        for line in response.iter_lines():  # as those read who have requests, and no client
            if line.startswith("data: ") and line != "data: [DONE]":
                chunks.append(json.loads(line.removeprefix("data: ")))
            else:
                assert line in ("", "data: [DONE]")
    assert langchain_like(chunks)[:3] == by_openai[:3]


# curl


def curl(*arguments: str) -> "subprocess.CompletedProcess[str]":
    if not shutil.which("curl"):
        pytest.skip("needs curl")
    return subprocess.run(["curl", "-sS", *arguments], capture_output=True, text=True, timeout=30, check=False)


def test_curl_gets_a_whole_answer_and_a_stream(program: Program) -> None:
    as_json = ("-H", "Content-Type: application/json")
    whole = curl(f"{program.url}/completions", *as_json, "-d", '{"prompt": "hello", "max_tokens": 5}')
    assert len(json.loads(whole.stdout)["choices"][0]["text"]) == 5
    stream = curl(
        "-N", f"{program.url}/completions", *as_json, "-d", '{"prompt": "hi", "max_tokens": 3, "stream": true}'
    )
    assert stream.stdout.count("data: {") == 3
    assert stream.stdout.endswith("data: [DONE]\n\n")
    for version in ("--http1.0", "--http1.1"):
        old = curl(
            version, "-N", f"{program.url}/completions", "-d", '{"prompt": "hi", "max_tokens": 3, "stream": true}'
        )
        assert (old.returncode, old.stdout.count("data: {")) == (0, 3)


def test_curl_fails_where_it_should(program: Program, tmp_path: Any) -> None:
    refused = curl("--fail", f"{program.url}/completions", "-d", '{"prompt": ""}')
    assert refused.returncode == 22
    assert "400" in refused.stderr
    large = tmp_path / "large.json"  # more than a kilobyte: curl asks to continue first
    large.write_text(json.dumps({"prompt": "x" * 5000, "max_tokens": 1}))
    sent = curl("-H", "Expect: 100-continue", f"{program.url}/completions", "-d", f"@{large}")
    assert json.loads(sent.stdout)["usage"]["prompt_tokens"] == 5000
    limited = curl("--max-time", "0.3", "-N", f"{program.url}/completions", "-d",
                   '{"prompt": "x", "max_tokens": 20000, "stream": true}')  # fmt: skip
    assert limited.returncode == 28
