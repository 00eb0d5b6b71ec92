"""OpenAI's Responses API: typed events, of which the last carries usage and why the answer ended.

https://platform.openai.com/docs/api-reference/responses-streaming. Tried on llama.cpp's server alone, which says
`completed`, so `stop`, of an answer that its limit cut too.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import orjson

from llm_bench.bodies import Ask, JsonObject, Words, asked_by, body_in, dumped, messages_of
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

_WORDS = Words({"temperature": "temperature", "top_p": "top_p", "max_tokens": "max_output_tokens"})


def _body(request: Request, ask: Ask) -> JsonObject:
    # `store`: OpenAI keeps an answer unless told not to.
    what = {} if request.body is not None else {"input": messages_of(request, "openai-responses"), "store": False}
    return body_in(_WORDS, what, request, ask)


# kind of an event -> the field of Delta that its text belongs to
_FIELDS = {
    "response.output_text.delta": "text",
    "response.refusal.delta": "text",
    "response.reasoning_text.delta": "reasoning",
    "response.reasoning_summary_text.delta": "reasoning",
    "response.reasoning.delta": "reasoning",  # vLLM before 0.11
    "response.function_call_arguments.delta": "tool",
    "response.custom_tool_call_input.delta": "tool",
    "response.mcp_call_arguments.delta": "tool",
    "response.code_interpreter_call_code.delta": "tool",
}
_ENDS = ("response.completed", "response.incomplete", "response.failed")


def _decode(data: bytes) -> Chunk:
    if (word := word_of(data)) is not None:
        return word
    event = read_object(data, "event")
    kind = event.get("type")
    if not isinstance(kind, str):
        return _whole(event) if event.get("object") == "response" else failed(event) or NOTHING
    if kind in _FIELDS:
        text = text_in(event, "delta")
        return Chunk((_delta({_FIELDS[kind]: text}),)) if text else NOTHING
    if kind == "response.output_item.added":
        name = _name(held(event, "item"))
        return Chunk((_delta({"tool": name}),)) if name else NOTHING
    if kind in _ENDS:
        return _end(held(event, "response"))._replace(done=True)
    if kind == "error":
        return failed({"error": event.get("error") or event}) or NOTHING
    return failed(event) or NOTHING


def _delta(said: Mapping[str, str]) -> Delta:
    return Delta(bears_token=True, **said)  # type: ignore[arg-type]  # texts only


def _name(item: JsonObject) -> str:
    return text_in(item, "name") if item.get("type") in ("function_call", "custom_tool_call", "mcp_call") else ""


def _end(response: JsonObject) -> Chunk:
    """What a response's own object says at its end: usage, why, what went wrong."""
    usage = response.get("usage")
    status = response.get("status")
    error = failed(response)
    if status == "failed" and error is None:
        error = Chunk(error="the server gave up on the answer: status 'failed'")
    reason = {"completed": "stop"}.get(status if isinstance(status, str) else "", "")
    if status == "incomplete":
        why = text_in(held(response, "incomplete_details"), "reason")
        reason = {"max_output_tokens": "length", "": "incomplete"}.get(why, why)
    return (error or NOTHING)._replace(
        deltas=(Delta(finish_reason=reason),) if reason else (),
        usage=None if usage is None else _usage(object_of(usage, "usage")),
    )


def _whole(response: JsonObject) -> Chunk:
    end = _end(response)
    text = reasoning = tool = ""
    for item in map(_item, list_of(response.get("output") or [], "output")):
        parts = list_of(item.get("content") or [], "content")
        said = "".join(text_in(p, "text") + text_in(p, "refusal") for p in map(_item, parts))
        if item.get("type") == "reasoning":
            reasoning += said
        else:
            text += said
        tool += _name(item) + (text_in(item, "arguments") if _name(item) else "")
    reason = end.deltas[0].finish_reason if end.deltas else ""
    return end._replace(deltas=(Delta(0, text, reasoning, tool, -1, reason, bool(text or reasoning or tool)),))


def _item(value: Any) -> JsonObject:
    return object_of(value, "output item")


def _usage(usage: JsonObject) -> Usage:
    return Usage(
        count_in(usage, "input_tokens"),
        count_in(usage, "output_tokens"),
        count_in(held(usage, "input_tokens_details"), "cached_tokens"),
        count_in(held(usage, "output_tokens_details"), "reasoning_tokens"),
    )


def _plain(data: bytes) -> str | None:
    try:
        event = orjson.loads(data)
        text = event["delta"] if event["type"] == "response.output_text.delta" else None
    except (ValueError, LookupError, TypeError):
        return None
    return text if isinstance(text, str) and text else None


ROWS = {
    "openai-responses": Dialect(
        "/responses",
        lambda request, ask: dumped(_body(request, ask), request),
        _decode,
        partial(bears_token, _decode),
        _plain,
        b'"delta"',
        takes=Takes("input", chat=True, asked=asked_by(_WORDS)),
        comes=Comes(last_word="response.completed"),
        site=OPENAI_SITE,
        tried="vLLM 0.32, llama.cpp",
    )
}
