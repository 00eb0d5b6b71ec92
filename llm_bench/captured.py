"""CAPTURED: formats whose items are recorded requests or the texts of conversations. No files.

Bodies are kept as captured; of a text whose length the file does not say, the length is left to the target.
"""

import base64
import binascii
from typing import Any

import orjson

from llm_bench.fields import (
    DATE_TIME,
    NO_TURN,
    Format,
    Reading,
    Row,
    Values,
    body_of,
    bounded,
    count,
    date_time,
    found,
    inside,
    label,
    nanoseconds,
    objects,
    said,
    seconds,
    sendable_as,
    whole_numbers,
)
from llm_bench.request import MOST_TOKENS, Request


def _asked(body: Values) -> int | None:
    """Answer tokens that a body asks for; None: it leaves them to the server."""
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        if type(body.get(name)) is int and 0 < body[name] <= MOST_TOKENS:
            return int(body[name])
    return None


def _text(values: Values, name: str) -> str:
    return sendable_as(values, name, str)


# -- AIPerf (ai-dynamo/aiperf: docs/benchmark-modes/trace-replay.md, src/aiperf/dataset/loader/models.py) -------------

_MOONCAKE_EXTENDED = ("text_input", "messages", "payload", "tools", "message_mode", "extra")
_MOONCAKE = ("timestamp", "input_length", "output_length", "hash_ids", "session_id", "delay", *_MOONCAKE_EXTENDED)
_MEDIA = ("image", "images", "image_uuids", "audio", "audios", "video", "videos")
_SINGLE_TURN = ("type", "text", "texts", *_MEDIA, "timestamp", "delay", "role", "session_id", "output_length", "extra")
_AIPERF = tuple(dict.fromkeys(("turns", *_MOONCAKE, *_SINGLE_TURN)))


def _is_aiperf(first: Values) -> bool:
    if not first.keys() <= set(_AIPERF):
        return False
    if isinstance(first.get("turns"), list):
        return True
    if isinstance(first.get("messages"), list):  # alone they are a chat of its own format
        return bool({"timestamp", "delay", "output_length", "session_id", "message_mode"} & first.keys())
    texts = [isinstance(first.get(name), str) for name in ("text", "text_input")]
    if any(texts) or isinstance(first.get("texts"), list) or isinstance(first.get("payload"), dict):
        return True
    # lengths alone: what plain Mooncake rows are not
    return type(first.get("input_length")) is int and ("extra" in first or "timestamp" not in first)


def _aiperf_rows(v: Values, reading: Reading, line: int) -> list[Row]:
    if v.get("turns") is not None:
        session = label(v, "session_id") or f"line {line}"
        turns = objects(v, "turns")
        for key in (key for turn in turns for key in turn if key not in _SINGLE_TURN):
            raise ValueError(f"turns have the key {found(key, 'one of ' + ', '.join(_SINGLE_TURN))}")
        return [_single_turn({**turn, "session_id": session}, reading, line, adds=True) for turn in turns]
    if any(v.get(name) is not None for name in ("text", "texts", *_MEDIA)):
        return [_single_turn(v, reading, line, adds=False)]
    return [_mooncake_extended(v, reading, line)]


def _single_turn(v: Values, reading: Reading, line: int, *, adds: bool) -> Row:
    """One text of single_turn, random_pool or multi_turn; only multi_turn's are added to the history before them."""
    media = [name for name in _MEDIA if v.get(name) is not None]
    if media:
        raise ValueError(f"{media[0]} is given, expected text alone: other media are not sent")
    text = _only_text(v)
    role = label(v, "role") or "user"
    session = label(v, "session_id")
    extra = sendable_as(v, "extra", dict) if v.get("extra") is not None else {}
    tokens_out = count(v, "output_length")
    asked: dict[str, Any] = {}
    if session and not adds:  # sent whole, whatever was said before it in the session
        limit = {} if tokens_out is None else {"max_tokens": tokens_out}
        asked["body"] = {"messages": [{"role": role, "content": text}], **limit, **extra}
    elif role != "user":
        asked |= {"messages": ({"role": role, "content": text},), "extra": extra}
    else:
        asked |= {"prompt": text, "extra": extra}
    pause_s = seconds(v, "delay", reading.unit_ns)
    request = Request(0, tokens_out, session=session, turn=NO_TURN, think_s=pause_s, line=line, **asked)
    return nanoseconds(v, "timestamp", reading.unit_ns), request


def _only_text(v: Values) -> str:
    """The one text of `text` or `texts`: ["..."] or [{"name": ..., "contents": ["..."]}]."""
    if v.get("texts") is None:
        return _text(v, "text")
    texts = [
        inner
        for text in inside(v, "texts", list)
        for inner in (inside(text, "contents", list) if isinstance(text, dict) else [text])
    ]
    if v.get("text") is not None or len(texts) != 1:
        raise ValueError(f"texts has {len(texts)}, expected one text a request: batches of texts are not sent")
    return _text({"texts": texts[0]}, "texts")


def _mooncake_extended(v: Values, reading: Reading, line: int) -> Row:
    given = [name for name in ("input_length", "text_input", "messages", "payload") if v.get(name) is not None]
    if len(given) != 1:
        raise ValueError(f"{given or 'no input'} given, expected one of input_length, text_input, messages, payload")
    mode = v.get("message_mode") or "history"
    if mode not in ("history", "delta"):
        raise ValueError(f"message_mode is {found(mode, 'history or delta')}")
    extra = sendable_as(v, "extra", dict) if v.get("extra") is not None else {}
    tokens_out = count(v, "output_length")
    tools = {"tools": sendable_as(v, "tools", list)} if v.get("tools") is not None else {}
    hash_ids = whole_numbers(v, "hash_ids") if given == ["input_length"] else ()
    asked: dict[str, Any] = {"extra": extra}
    if given == ["payload"]:
        asked = {"body": {**body_of(v, "payload"), **extra}}
        tokens_out = _asked(asked["body"]) if tokens_out is None else tokens_out
    elif given == ["text_input"]:
        asked["prompt"] = _text(v, "text_input")
    elif given == ["messages"]:
        messages = objects({"messages": sendable_as(v, "messages", list)}, "messages")
        limit = {} if tokens_out is None else {"max_tokens": tokens_out}
        if mode == "history":  # the whole conversation so far, recorded answers among it
            asked = {"body": {"messages": messages, **tools, **limit, **extra}}
        else:
            asked = {"messages": tuple(messages), "extra": {**tools, **extra}}
    request = Request(
        tokens_in=count(v, "input_length") or 0,
        tokens_out=tokens_out,
        hash_ids=hash_ids,
        block_size=reading.block_size if hash_ids else 0,
        session=label(v, "session_id"),
        turn=NO_TURN,
        think_s=seconds(v, "delay", reading.unit_ns),
        line=line,
        **asked,
    )
    return nanoseconds(v, "timestamp", reading.unit_ns), request


# -- recorded bodies --------------------------------------------------------------------------------------------------


def _captured_rows(v: Values, reading: Reading, line: int) -> list[Row]:
    body = body_of(v, "body")
    tokens_out = count(v, "output_length")
    if isinstance(v.get("timestamp"), str):
        at: int | None = date_time(v["timestamp"], "timestamp")
        reading.known["dates"] = True
    else:
        at = nanoseconds(v, "timestamp", reading.unit_ns)
    request = Request(
        tokens_in=0,
        tokens_out=_asked(body) if tokens_out is None else tokens_out,
        session=label(v, "session_id"),
        turn=NO_TURN,
        body=body,
        line=line,
    )
    return [(at, request)]


_ROUTES = ("chat/completions", "completions", "embeddings", "responses")


def _batch_rows(v: Values, reading: Reading, line: int) -> list[Row]:
    """A line of OpenAI's batch input (platform.openai.com/docs/guides/batch): no times, one route a file."""
    url = inside(v, "url", str)
    if url.strip("/").removeprefix("v1/") not in _ROUTES:
        raise ValueError(f"url is {found(url, 'one of ' + ', '.join(f'/v1/{route}' for route in _ROUTES))}")
    before = reading.known.setdefault("url", url)
    if url != before:
        raise ValueError(f"url is {found(url, f'{before}, as in the rows before: a file is sent to one route')}")
    if v.get("method") not in (None, "POST"):
        raise ValueError(f"method is {found(v['method'], 'POST')}")
    body = body_of(v, "body")
    return [(None, Request(0, _asked(body), body=body, line=line))]


def _sagemaker_rows(v: Values, reading: Reading, line: int) -> list[Row]:
    """A record of SageMaker's data capture (docs.aws.amazon.com/sagemaker, "Capture data from real-time endpoint")."""
    capture = inside(v, "captureData", dict)
    asked = _payload(inside(capture, "endpointInput", dict))
    if not isinstance(asked, dict):
        raise ValueError(f"endpointInput's data is {found(asked, 'the JSON object that was sent')}")
    body = body_of({"endpointInput": asked}, "endpointInput")
    output = capture.get("endpointOutput")
    try:
        answer = _payload(output) if isinstance(output, dict) else None
    except ValueError:  # a stream of events, or text: it says no usage
        answer = None
    usage = answer.get("usage") if isinstance(answer, dict) else None
    tokens_out = count(usage, "completion_tokens") if isinstance(usage, dict) else None
    at = date_time(inside(inside(v, "eventMetadata", dict), "inferenceTime", str), "inferenceTime")
    return [(at, Request(0, _asked(body) if tokens_out is None else tokens_out, body=body, line=line))]


def _payload(captured: Values) -> object:
    data, encoding = inside(captured, "data", str), captured.get("encoding")
    if encoding not in ("JSON", "BASE64"):
        raise ValueError(f"encoding is {found(encoding, 'JSON, or BASE64 of JSON')}")
    try:
        value: object = orjson.loads(data if encoding == "JSON" else base64.b64decode(data, validate=True))
    except (orjson.JSONDecodeError, binascii.Error) as e:
        raise ValueError(f"data is not {encoding} of a JSON text: {e}") from None
    return value


# -- ShareGPT and other lists of messages -----------------------------------------------------------------------------

_SHAREGPT = ("id", "conversations", "messages", "system", "tools", "source", "model")
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "bard", "bing", "model"), "assistant"),
    "system": "system",
}


def _sharegpt_rows(v: Values, reading: Reading, line: int) -> list[Row]:
    """A conversation (anon8231489123/ShareGPT_Vicuna_unfiltered; FastChat's format): what its user adds, turn by turn.

    Recorded answers say no count of tokens: a turn asks for none, and the history holds the target's own answers.
    What stands before the first user's text is an answer to what was cut away, and is left out.
    """
    name = "messages" if v.get("conversations") is None else "conversations"
    system = _text(v, "system") if v.get("system") else ""
    texts: list[str] = []
    if next((r for r in map(_role, objects(v, name)) if r != "system"), "") == "assistant":
        said(reading, "conversations open with an answer, which is dropped: what it answers is not in the file")
    for item in objects(v, name):
        role, text = _role(item), _text(item, "value" if "value" in item else "content")
        if role == "user" and text.strip():
            texts.append(text)
        elif role == "system" and not texts:
            system = text
    session = f"{label(v, 'id')} line {line}".strip() if len(texts) > 1 else ""
    requests = [Request(0, None, prompt=text, session=session, turn=NO_TURN, line=line) for text in texts]
    if system and texts:
        opening = ({"role": "system", "content": system}, {"role": "user", "content": texts[0]})
        requests[0] = Request(0, None, messages=opening, session=session, turn=NO_TURN, line=line)
    return [(None, request) for request in requests or [Request(0, None, line=line)]]  # one of nothing: counted


def _role(item: Values) -> str:
    role = item.get("from", item.get("role"))
    if not isinstance(role, str) or role not in _ROLES:
        raise ValueError(f"a text is from {found(role, 'one of ' + ', '.join(_ROLES))}")
    return _ROLES[role]


# -- the table ---------------------------------------------------------------------------------------------------------


def _is_chat(first: Values) -> bool:
    lists = [isinstance(first.get(name), list) for name in ("conversations", "messages")]
    return any(lists) and first.keys() <= set(_SHAREGPT)


CAPTURED: dict[str, Format] = {
    "aiperf": Format(
        about="JSONL of AIPerf: Mooncake rows with text_input, messages or payload; single_turn, multi_turn",
        keys=_AIPERF,
        detect=_is_aiperf,
        rows=bounded(_aiperf_rows),
        unit="ms",
        block_size=512,
    ),
    "sharegpt": Format(
        about="JSON of conversations (from, value) or messages (role, content)",
        keys=_SHAREGPT,
        detect=_is_chat,
        rows=bounded(_sharegpt_rows),
        unit="s",
        note="recorded answers have no count of tokens: how long an answer is, the target decides",
    ),
    "sagemaker": Format(
        about="JSONL of SageMaker's data capture: captureData, eventMetadata",
        keys=("captureData", "eventMetadata", "eventVersion"),
        detect=lambda first: {"captureData", "eventMetadata"} <= first.keys(),
        rows=bounded(_sagemaker_rows),
        unit=DATE_TIME,
    ),
    "openai-batch": Format(
        about="JSONL of custom_id, method, url, body",
        keys=("custom_id", "method", "url", "body"),
        detect=lambda first: {"url", "body"} <= first.keys(),
        rows=bounded(_batch_rows),
        unit="s",
    ),
    "captured": Format(
        about="JSONL of timestamp, body",
        keys=("timestamp", "body", "session_id", "output_length"),
        detect=lambda first: {"timestamp", "body"} <= first.keys() and "url" not in first,
        rows=bounded(_captured_rows),
        unit="s",
    ),
}
