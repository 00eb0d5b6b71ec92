"""A target is asked for the log probabilities of the bundled text; one that cannot says why in a line."""

import json

import pytest

from llm_bench import perplexity, scoring_ask
from llm_bench.perplexity import TEXT
from llm_bench.targets import Target
from tests.scripted import Scripted, http_response

WORDS = [word + " " for word in TEXT.split(" ")]
WORDS[-1] = WORDS[-1].rstrip()


def vllms(seen):
    """As vLLM 0.32 was seen to answer, its count of one made token too, with the begin-of-text of some models."""
    body = seen.json()
    tokens = ["<s>", *WORDS]
    logprobs = {
        "text_offset": [0] * len(tokens),
        "token_logprobs": [None] + [-1.5] * len(WORDS),
        "tokens": tokens,
        "top_logprobs": [None] + [{word: -1.5} for word in WORDS],
    }
    choice = {"index": 0, "text": body["prompt"], "logprobs": logprobs, "finish_reason": "length"}
    usage = {"prompt_tokens": len(tokens), "completion_tokens": 1, "total_tokens": len(tokens) + 1}
    return {"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [choice], "usage": usage}


def says(body, status=200):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return [(0, http_response(status, data))]


@pytest.mark.parametrize("api", ["openai-chat", "openai-completions", "openai-responses"])
def test_it_is_asked_as_vllm_wants_it_and_read(api, monkeypatch):
    monkeypatch.setenv("KEY", "a-secret-of-the-test")
    with Scripted(lambda _, seen: says(vllms(seen))) as server:
        target = Target("x", server.url, api=api, key_env="KEY", extra={"logprobs": 7, "adapter": "z", "stream": True})
        found = scoring_ask.ask(target, "m")
    assert found == perplexity.Scored(("<s>", *WORDS), (-1.5,) * len(WORDS), len(TEXT))
    (seen,) = server.requests
    assert (seen.method, seen.path) == ("POST", "/v1/completions")
    assert seen.headers["authorization"] == "Bearer a-secret-of-the-test"
    assert seen.json() == {
        "model": "m", "prompt": TEXT, "echo": True, "max_tokens": 0, "logprobs": 1, "stream": False, "n": 1,
        "adapter": "z",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (says({"error": {"message": "echo is not supported", "code": 400}}, 400), "HTTP 400: echo is not supported"),
        (says(b"<html>no</html>", 404), "HTTP 404"),
        (says({"detail": "Not Found"}, 404), "HTTP 404: Not Found"),
        (says({"error": "x" * 999}, 500), "HTTP 500: " + "x" * scoring_ask.MOST_SHOWN),
        (says({"error": {"message": "what is a-secret-of-the-test?"}}, 401), "HTTP 401: what is "),
        (says({"choices": [{"text": "w0", "logprobs": None}]}), "the answer has no log probabilities of the prompt"),
        (says(b"[]"), "the answer has no log probabilities of the prompt"),
        ([(0, b""), "reset"], ""),
    ],
)
def test_one_that_cannot_says_why_in_a_line_and_no_secret(script, why, monkeypatch):
    monkeypatch.setenv("KEY", "a-secret-of-the-test")
    with Scripted(script) as server:
        found = scoring_ask.ask(Target("x", server.url, key_env="KEY"), "m")
    assert isinstance(found, str)
    assert found.startswith(why)
    assert found
    assert "a-secret-of-the-test" not in found
    assert "\n" not in found


def test_a_protocol_without_it_is_not_asked():
    with Scripted(says({})) as server:
        assert scoring_ask.ask(Target("x", server.url, api="tgi"), "m") == "the protocol tgi has no way to ask for it"
    assert server.requests == []
