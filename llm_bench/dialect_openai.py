"""OpenAI's chat and completions, which every engine of the field speaks.

https://platform.openai.com/docs/api-reference, as vLLM, llama.cpp, Ray Serve, SGLang, TGI and Triton's frontend read
it. trtllm-serve needs no row of its own: blanks after an event's JSON are read over, and ignore_eos and min_tokens are
its own words too.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import orjson

from llm_bench.bodies import PINS, Ask, JsonObject, encode_chat, encode_completions
from llm_bench.protocol import (
    NOTHING,
    Chunk,
    Comes,
    Delta,
    Dialect,
    Site,
    Takes,
    Usage,
    bears_token,
    count_in,
    error_in,
    held,
    in_words,
    list_of,
    listed_by_openai,
    ms_by,
    named,
    object_of,
    text_in,
    word_of,
)
from llm_bench.request import Request

_BROKEN = ("error", "abort")  # finish reasons of vLLM and SGLang for an answer that the server gave up


def _decode(choice_of: Callable[[JsonObject], Delta], data: bytes) -> Chunk:
    if data[:1] != b"{" and (word := word_of(data)) is not None:
        return word
    event = object_of(orjson.loads(data), "event")  # JSONDecodeError is a ValueError
    choices = event.get("choices")
    error, code = error_in(event)
    deltas: tuple[Delta, ...] = ()
    if choices:
        deltas = tuple([choice_of(object_of(choice, "choice")) for choice in list_of(choices, "choices")])
        broken = [d.finish_reason for d in deltas if d.finish_reason in _BROKEN]
        if broken and not error:
            error = f"the server gave up on the answer: finish_reason {broken[0]!r}"
    usage = event.get("usage")
    return Chunk(
        deltas,
        None if usage is None else _usage(object_of(usage, "usage")),
        error,
        code,
        False,
        _server_ms(event),
    )


def _chat_choice(choice: JsonObject) -> Delta:
    delta = choice.get("delta")
    if delta is None:
        delta = choice.get("message")  # a whole body has the same fields under this name
    delta = {} if delta is None else object_of(delta, "delta")
    content = delta.get("content")
    text = (_parts(content, "text") if isinstance(content, list) else text_in(delta, "content")) + text_in(
        delta, "refusal"
    )
    reasoning = text_in(delta, "reasoning")
    other = text_in(delta, "reasoning_content")
    if other != reasoning:  # gateways send both names at once, with the same text
        reasoning += other
    calls = delta.get("tool_calls")
    tool = "".join(map(_tool, list_of(calls, "tool_calls"))) if calls else ""
    if delta.get("function_call"):
        tool += _tool({"function": delta["function_call"]})
    ids = _ids(choice)
    bears = bool(text or reasoning or tool or ids > 0)
    return Delta(_index(choice), text, reasoning, tool, ids, text_in(choice, "finish_reason"), bears)


def _parts(parts: list[Any], kind: str) -> str:
    """Text of the parts of a content that is a list, as some servers of multimodal models send it."""
    return "".join(text_in(object_of(part, "content part"), kind) for part in parts)


def _completions_choice(choice: JsonObject) -> Delta:
    text = text_in(choice, "text")
    finish_reason = text_in(choice, "finish_reason")
    ids = _ids(choice)
    # Without text and finish_reason it carries a token all the same: half a character, or a special one.
    bears = bool(text) or ids > 0 or (ids < 0 and not finish_reason)
    return Delta(_index(choice), text, "", "", ids, finish_reason, bears)


_PLAIN_EVENT = frozenset(("id", "object", "created", "model", "system_fingerprint", "service_tier", "choices"))
_SAYS_MORE = ("usage", "error", "timings", "metrics")
_ROLE_AND_CONTENT = {"role", "content"}  # TGI repeats the role


def _plain(text_of: Callable[[JsonObject], Any], data: bytes) -> str | None:
    try:
        event = orjson.loads(data)
        (choice,) = event["choices"]
        text = text_of(choice)
        plain = (
            type(text) is str
            and text
            and choice["index"] == 0
            and choice["finish_reason"] is None
            and choice.get("token_ids") is None
            and (event.keys() <= _PLAIN_EVENT or not any(event.get(key) for key in _SAYS_MORE))
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return text if plain else None


def _chat_text(choice: JsonObject) -> Any:
    delta = choice["delta"]
    return delta["content"] if len(delta) == 1 or delta.keys() == _ROLE_AND_CONTENT else None


def _completions_text(choice: JsonObject) -> Any:
    return choice["text"]


def _tool(call: Any) -> str:
    function = object_of(call, "tool call").get("function")
    if function is None:
        return ""
    function = object_of(function, "function")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):  # TGI sends the object itself
        return text_in(function, "name") + in_words(arguments)
    return text_in(function, "name") + text_in(function, "arguments")


def _usage(usage: JsonObject) -> Usage:
    details = usage.get("prompt_tokens_details")
    cached = -1 if details is None else count_in(object_of(details, "prompt_tokens_details"), "cached_tokens")
    reasoning = -1
    if usage.get("completion_tokens_details") is not None:
        reasoning = count_in(held(usage, "completion_tokens_details"), "reasoning_tokens")
    return Usage(count_in(usage, "prompt_tokens"), count_in(usage, "completion_tokens"), cached, reasoning)


# A server's own account -> the Record's names. llama.cpp's predicted_per_token_ms is over the gaps, as TPOT is, and its
# first token comes out of the prompt's pass; vLLM's generation_time_ms is first to last token.
TIMINGS = {
    "prompt_ms": ("server_prefill_ms", "server_ttft_ms"),
    "queue_ms": ("server_queue_ms",),
    "ttft_ms": ("server_ttft_ms",),  # the reference engine's: it holds the queue too, which prompt_ms does not
    "predicted_ms": ("server_decode_ms",),
    "predicted_per_token_ms": ("server_tpot_ms",),
}
_METRICS = {
    "time_to_first_token_ms": ("server_ttft_ms",),
    "queue_time_ms": ("server_queue_ms",),
    "prefill_time_ms": ("server_prefill_ms",),  # ours; vLLM's has none
    "generation_time_ms": ("server_decode_ms",),
    "mean_itl_ms": ("server_tpot_ms",),
}


def _server_ms(event: JsonObject) -> Mapping[str, float]:
    timings, metrics = event.get("timings"), event.get("metrics")
    if timings is None and metrics is None:  # as in nearly every event
        return NOTHING.server_ms
    if timings is not None:
        return ms_by(timings, TIMINGS)
    said = dict(ms_by(metrics, _METRICS))
    if isinstance(metrics, dict) and "prefill_time_ms" not in metrics and "server_ttft_ms" in said:
        said["server_prefill_ms"] = said["server_ttft_ms"]  # vLLM's begins where a request is scheduled (0.32)
        said["server_ttft_ms"] += said.get("server_queue_ms", 0.0)
    return said


def _index(choice: JsonObject) -> int:
    return max(0, count_in(choice, "index"))


def _ids(choice: JsonObject) -> int:
    ids = choice.get("token_ids")
    return -1 if ids is None else len(list_of(ids, "token_ids"))


# Who answers under these routes is not known: each engine's own page is asked in turn. /version is vLLM's and
# trtllm-serve's, /props llama.cpp's, /info TGI's, /get_server_info SGLang's.
TGI_INFO = {"version": "engine_version", "model_sha": "revision", "model_dtype": "precision", "docker_label": "image"}
SGLANG_INFO = {"version": "engine_version", "revision": "revision", "dtype": "precision"}
LLAMACPP_PROPS = {"build_info": "engine_version", "model_ftype": "precision"}
_ABOUT = (
    ("/version", lambda page: named(page, {"version": "engine_version"})),
    ("/info", lambda page: named(page, TGI_INFO)),
    ("/props", lambda page: named(page, LLAMACPP_PROPS)),
    ("/get_server_info", lambda page: named(page, SGLANG_INFO)),
)
OPENAI_SITE = Site(base="/v1", models="GET /models", listed=listed_by_openai, about=_ABOUT)


def _row(
    path: str,
    encode: Callable[[Request, Ask], bytes],
    choice_of: Callable[[JsonObject], Delta],
    text_of: Callable[[JsonObject], Any],
    text_key: bytes,
    takes: Takes,
) -> Dialect:
    decode = partial(_decode, choice_of)
    return Dialect(
        path,
        encode,
        decode,
        partial(bears_token, decode),
        partial(_plain, text_of),
        text_key,
        takes=takes,
        comes=Comes(last_word="[DONE]"),
        site=OPENAI_SITE,
        tried="vLLM 0.32, llama.cpp",
    )


ROWS = {
    "openai-chat": _row(
        "/chat/completions",
        encode_chat,
        _chat_choice,
        _chat_text,
        b'"content"',
        Takes("messages", chat=True, pins=PINS, usage_option=True),
    ),
    "openai-completions": _row(
        "/completions",
        encode_completions,
        _completions_choice,
        _completions_text,
        b'"text"',
        Takes("prompt", token_ids=True, pins=PINS, usage_option=True),
    ),
}
