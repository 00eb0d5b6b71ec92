"""Anthropic's Messages API, which vLLM, llama.cpp and SGLang speak too.

https://docs.anthropic.com/en/api/messages-streaming. Tried on llama.cpp's server alone.
"""

from functools import partial
from typing import Any

import orjson

from llm_bench.bodies import SAME, Ask, JsonObject, Words, asked_by, body_in, dumped, messages_of
from llm_bench.dialect_openai import OPENAI_SITE
from llm_bench.protocol import (
    NOTHING,
    Chunk,
    Comes,
    Delta,
    Dialect,
    Takes,
    Usage,
    bears_token,
    count_in,
    failed,
    held,
    list_of,
    object_of,
    read_object,
    text_in,
    word_of,
)
from llm_bench.request import Request

LEAST_ASKED = 4096  # max_tokens, which may not be left out, where a trace leaves the length to the server
_WORDS = Words(
    {name: ours for name, ours in SAME.items() if name not in ("seed", "stop")}
    | {"stop": "stop_sequences", "max_tokens": "max_tokens"}
)
_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}


def _body(request: Request, ask: Ask) -> JsonObject:
    what: JsonObject = {}
    if request.body is None:
        said = messages_of(request, "anthropic-messages")
        system = "\n".join(_text_of(m.get("content")) for m in said if m.get("role") == "system")
        what = {"messages": [m for m in said if m.get("role") != "system"]} | ({"system": system} if system else {})
    body = body_in(_WORDS, what, request, ask)
    if body.get("max_tokens") is None:
        body["max_tokens"] = LEAST_ASKED
    return body


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return content if isinstance(content, str) else ""


def _decode(data: bytes) -> Chunk:
    if (word := word_of(data)) is not None:
        return word  # vLLM says [DONE] at the end
    event = read_object(data, "event")
    kind = event.get("type")
    if kind == "content_block_delta":
        said = _said(held(event, "delta"))
        return Chunk((said,)) if said.bears_token else NOTHING
    if kind == "content_block_start":
        said = _said(held(event, "content_block"))
        return Chunk((said,)) if said.bears_token else NOTHING
    if kind == "message_start":  # its output_tokens is a beginning, not yet a count
        return Chunk(usage=_usage(held(held(event, "message"), "usage"))._replace(completion_tokens=-1))
    if kind == "message_delta":
        return Chunk((Delta(finish_reason=_reason(held(event, "delta"))),), _usage(held(event, "usage")))
    if kind == "message_stop":
        return Chunk(done=True)
    if kind == "message":
        return _whole(event)
    return failed(event) or NOTHING


def _said(block: JsonObject) -> Delta:
    """A block's delta, or the block itself."""
    text, reasoning = text_in(block, "text"), text_in(block, "thinking")
    tool = text_in(block, "partial_json")
    if block.get("type") == "tool_use":
        tool += text_in(block, "name")
    return Delta(0, text, reasoning, tool, -1, "", bool(text or reasoning or tool))


def _reason(holder: JsonObject) -> str:
    reason = text_in(holder, "stop_reason")
    return _REASONS.get(reason, reason)


def _whole(message: JsonObject) -> Chunk:
    blocks = [object_of(block, "block") for block in list_of(message.get("content") or [], "content")]
    said = list(map(_said, blocks))
    inputs = [orjson.dumps(b["input"]).decode() for b in blocks if b.get("type") == "tool_use" and b.get("input")]
    text, reasoning = "".join(d.text for d in said), "".join(d.reasoning for d in said)
    tool = "".join([*(d.tool for d in said), *inputs])
    delta = Delta(0, text, reasoning, tool, -1, _reason(message), bool(text or reasoning or tool))
    return Chunk((delta,), _usage(held(message, "usage")))


def _usage(usage: JsonObject) -> Usage:
    """input_tokens leaves out what came from the cache or went into it; the prompt is all three."""
    read, written = (count_in(usage, f"cache_{way}_input_tokens") for way in ("read", "creation"))
    fresh = count_in(usage, "input_tokens")
    prompt = -1 if fresh < 0 else fresh + max(read, 0) + max(written, 0)
    return Usage(prompt, count_in(usage, "output_tokens"), read)


def _plain(data: bytes) -> str | None:
    try:
        event = orjson.loads(data)
        delta = event["delta"]
        plain = event["type"] == "content_block_delta" and delta["type"] == "text_delta"
        text = delta["text"] if plain else None
    except (ValueError, LookupError, TypeError):
        return None
    return text if isinstance(text, str) and text else None


ROWS = {
    "anthropic-messages": Dialect(
        "/messages",
        lambda request, ask: dumped(_body(request, ask), request),
        _decode,
        partial(bears_token, _decode),
        _plain,
        b'"text"',
        takes=Takes("messages", chat=True, asked=asked_by(_WORDS)),
        comes=Comes(last_word="message_stop"),
        site=OPENAI_SITE._replace(headers=(("anthropic-version", "2023-06-01"),), key_header=("x-api-key", "{key}")),
        tried="vLLM 0.32, llama.cpp",
    )
}
