"""How each protocol of the field says the same things: encode(Request) -> body, decode(event) -> Chunk.

No I/O and no clock. A new protocol is a new row of DIALECTS.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import orjson

from llm_bench.bodies import Ask, JsonObject, encode_chat, encode_completions
from llm_bench.request import Request


class Usage(NamedTuple):
    prompt_tokens: int = -1  # -1: not said
    completion_tokens: int = -1
    cached_tokens: int = -1


class Delta(NamedTuple):
    """One choice of one event."""

    choice: int = 0
    text: str = ""  # content of the answer
    reasoning: str = ""
    tool: str = ""  # tool-call names and arguments
    token_ids: int = -1  # how many, where the wire lists them; -1: it does not
    finish_reason: str = ""
    bears_token: bool = False  # by METRICS.md's rule for this protocol


class Chunk(NamedTuple):
    """One event (or one whole body, when not streamed) in the words all protocols share."""

    deltas: tuple[Delta, ...] = ()
    usage: Usage | None = None  # cumulative, as the wire has it
    error: str = ""  # text of an error object; such an answer has failed whatever its status
    error_code: str = ""
    done: bool = False  # the protocol's own last word, e.g. [DONE]; proves nothing alone
    server_ms: Mapping[str, float] = {}  # keys of Record: server_ttft_ms, server_queue_ms, ...


class Dialect(NamedTuple):
    path: str  # appended to the target's base URL
    encode: Callable[[Request, Ask], bytes]  # the body; request.prompt or .messages or .prompt_token_ids is filled in
    decode: Callable[[bytes], Chunk]  # one event's data, or a whole body; raises ValueError on what is no such thing
    is_token: Callable[[bytes], bool]  # does this event's data bear a token? Cheap: run until the first that does
    # Content of an event that says nothing else: choice 0, no finish_reason, usage, error, ids. None: ask `decode`.
    # Most events of a stream are such, and a Chunk for each would cost three times as much as reading its JSON.
    plain: Callable[[bytes], str | None]
    text_key: bytes = b""  # of that content in the JSON, for `plain_reader`


# OpenAI (https://platform.openai.com/docs/api-reference) as vLLM, llama.cpp, Ray Serve, SGLang and TGI speak it.


_BROKEN = ("error", "abort")  # finish reasons of vLLM and SGLang for an answer that the server gave up
_DONE = Chunk(done=True)
_NOTHING = Chunk()


def _decode(choice_of: Callable[[JsonObject], Delta], data: bytes) -> Chunk:
    if data[:1] != b"{":
        word = data.strip()
        if word == b"[DONE]":
            return _DONE
        if not word:
            return _NOTHING
    event = _object(orjson.loads(data), "event")  # JSONDecodeError is a ValueError
    choices = event.get("choices")
    error, code = _error(event)
    deltas: tuple[Delta, ...] = ()
    if choices:
        deltas = tuple([choice_of(_object(choice, "choice")) for choice in _list(choices, "choices")])
        broken = [d.finish_reason for d in deltas if d.finish_reason in _BROKEN]
        if broken and not error:
            error = f"the server gave the answer up: finish_reason {broken[0]!r}"
    usage = event.get("usage")
    return Chunk(
        deltas,
        None if usage is None else _usage(_object(usage, "usage")),
        error,
        code,
        False,
        _server_ms(event),
    )


def _chat_choice(choice: JsonObject) -> Delta:
    delta = choice.get("delta")
    if delta is None:
        delta = choice.get("message")  # a whole body has the same fields under this name
    delta = {} if delta is None else _object(delta, "delta")
    content = delta.get("content")
    text = (_parts(content, "text") if isinstance(content, list) else _text(delta, "content")) + _text(delta, "refusal")
    reasoning = _text(delta, "reasoning")
    other = _text(delta, "reasoning_content")
    if other != reasoning:  # gateways send both names at once, with the same text
        reasoning += other
    calls = delta.get("tool_calls")
    tool = "".join(map(_tool, _list(calls, "tool_calls"))) if calls else ""
    if delta.get("function_call"):
        tool += _tool({"function": delta["function_call"]})
    ids = _ids(choice)
    bears = bool(text or reasoning or tool or ids > 0)
    return Delta(_index(choice), text, reasoning, tool, ids, _text(choice, "finish_reason"), bears)


def _parts(parts: list[Any], kind: str) -> str:
    """Text of the parts of a content that is a list, as some servers of multimodal models send it."""
    return "".join(_text(_object(part, "content part"), kind) for part in parts)


def _completions_choice(choice: JsonObject) -> Delta:
    text = _text(choice, "text")
    finish_reason = _text(choice, "finish_reason")
    ids = _ids(choice)
    # Without text and finish_reason it carries a token all the same: half a character, or a special one.
    bears = bool(text) or ids > 0 or (ids < 0 and not finish_reason)
    return Delta(_index(choice), text, "", "", ids, finish_reason, bears)


_UNPLAIN = re.compile(rb'["\\\x00-\x1f]')  # ends a JSON string, begins an escape, or may not stand in one
_LESSONS = 8  # templates that were of no use before a reader stops to make them: some servers change a field each event


def plain_reader(dialect: Dialect) -> Callable[[bytes], str | None]:
    """`plain` for the events of one stream, three times as fast where they differ in nothing but their text.

    An event that begins and ends as one that `plain` has read, with neither quote nor backslash nor control character
    between, is the same JSON but for that one string. So only the first event, and every odd one, is parsed.
    """
    plain, key = dialect.plain, dialect.text_key
    before = after = b""
    lessons = 0

    def read(data: bytes) -> str | None:
        nonlocal before, after, lessons
        if before and len(data) > len(before) + len(after) and data.startswith(before) and data.endswith(after):
            middle = data[len(before) : -len(after)]
            if _UNPLAIN.search(middle) is None:
                try:
                    return middle.decode()
                except UnicodeDecodeError:
                    return None  # no JSON either
        text = plain(data)
        if text is not None and lessons < _LESSONS:
            lessons += 1
            before, after = _around(data, text.encode(), key) or (before, after)
        return text

    return read


def _around(data: bytes, text: bytes, key: bytes) -> tuple[bytes, bytes] | None:
    """What stands before and after the one text of an event; None where it is escaped, or has not the only such key."""
    if not key or data.count(key) != 1 or _UNPLAIN.search(text):
        return None
    for opening in (key + b':"', key + b': "'):
        begin = data.find(opening + text + b'"')
        if begin >= 0:
            begin += len(opening)
            return data[:begin], data[begin + len(text) :]
    return None


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
    function = _object(call, "tool call").get("function")
    if function is None:
        return ""
    function = _object(function, "function")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):  # TGI sends the object itself
        return _text(function, "name") + _words(arguments)
    return _text(function, "name") + _text(function, "arguments")


def _usage(usage: JsonObject) -> Usage:
    details = usage.get("prompt_tokens_details")
    cached = -1 if details is None else _count(_object(details, "prompt_tokens_details"), "cached_tokens")
    return Usage(_count(usage, "prompt_tokens"), _count(usage, "completion_tokens"), cached)


def _error(event: JsonObject) -> tuple[str, str]:
    """Text and code of the error object, in each of the shapes that servers send; ("", "") for none."""
    error = event.get("error")
    if not error and not event.get("choices"):
        if event.get("object") == "error":  # vLLM before 0.10, SGLang
            error = event
        elif event.get("detail"):  # FastAPI: a text, or a list of what it refused
            error = {"message": event["detail"]}
    if not error:
        return "", ""
    if not isinstance(error, dict):
        return _words(error), _words(event.get("error_type"))  # TGI: {"error": text, "error_type": kind}
    code = error.get("code")
    return _words(error.get("message") or error), _words(error.get("type") if code is None else code)


# A server's own account -> the Record's names. llama.cpp's predicted_per_token_ms is over the gaps, as TPOT is, and its
# first token comes out of the prompt's pass; vLLM's generation_time_ms is first to last token.
_TIMINGS = {
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
_SILENT: Mapping[str, float] = {}


def _server_ms(event: JsonObject) -> Mapping[str, float]:
    timings = event.get("timings")
    account, names = (timings, _TIMINGS) if timings is not None else (event.get("metrics"), _METRICS)
    if not isinstance(account, dict):
        return _SILENT
    return {
        name: float(account[key])
        for key, ours in names.items()
        if type(account.get(key)) in (int, float) and account[key] >= 0  # below 0: llama.cpp did not measure it
        for name in ours
    }


# Readers of a peer's JSON: null and absent are the same, a wrong type is a ValueError that names the field.


def _object(value: Any, what: str) -> JsonObject:
    if isinstance(value, dict):
        return value
    raise ValueError(f"{what} is {_words(value)[:80]}, not an object")


def _list(value: Any, what: str) -> list[Any]:
    if isinstance(value, list):
        return value
    raise ValueError(f"{what} is {_words(value)[:80]}, not a list")


def _text(holder: JsonObject, key: str) -> str:
    value = holder.get(key)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    raise ValueError(f"{key} is {_words(value)[:80]}, not a text")


def _count(holder: JsonObject, key: str) -> int:
    value = holder.get(key)
    if value is None:
        return -1
    if type(value) is int and 0 <= value < 2**31:  # the records' columns hold no more
        return value
    raise ValueError(f"{key} is {_words(value)[:80]}, not a count")


def _index(choice: JsonObject) -> int:
    return max(0, _count(choice, "index"))


def _ids(choice: JsonObject) -> int:
    ids = choice.get("token_ids")
    return -1 if ids is None else len(_list(ids, "token_ids"))


def _words(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:  # orjson reads deeper nesting than it writes
        return "(an object nested too deeply to show)"


def _is_token(decode: Callable[[bytes], Chunk], data: bytes) -> bool:
    try:
        return any(delta.bears_token for delta in decode(data).deltas)
    except ValueError:
        return False


def _openai(
    path: str,
    encode: Callable[[Request, Ask], bytes],
    choice_of: Callable[[JsonObject], Delta],
    text_of: Callable[[JsonObject], Any],
    text_key: bytes,
) -> Dialect:
    decode = partial(_decode, choice_of)
    return Dialect(path, encode, decode, partial(_is_token, decode), partial(_plain, text_of), text_key)


# name -> how it is spoken. A target's base URL ends in /v1 for the OpenAI rows.
DIALECTS: dict[str, Dialect] = {
    "openai-chat": _openai("/chat/completions", encode_chat, _chat_choice, _chat_text, b'"content"'),
    "openai-completions": _openai(
        "/completions", encode_completions, _completions_choice, _completions_text, b'"text"'
    ),
}
