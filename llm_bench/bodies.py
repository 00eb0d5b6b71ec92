"""What a request says: its body as JSON, made from its parts or as it was captured.

No I/O and no clock. Field names are OpenAI's (https://platform.openai.com/docs/api-reference), extensions vLLM's; a
protocol that calls things otherwise brings its `Words`, and a trace's or a target's `extra` is put into them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from llm_bench.errors import BenchError
from llm_bench.request import Request

JsonObject = dict[str, Any]  # of a peer's or a trace's: every value is checked before it is used


class Ask(NamedTuple):
    """What is sent with every request of a cell, decided by the target's probe and the user."""

    model: str
    stream: bool = True
    include_usage: bool = True  # stream_options.include_usage, where the target takes it
    pin_lengths: bool = True  # ignore_eos + min_tokens, where the target takes them
    extra: Mapping[str, Any] = {}  # put into every body


PINS = ("ignore_eos", "min_tokens")  # what holds an answer to its length, in vLLM's words


class Asked(NamedTuple):
    """What a request's final body asks of its answer's length."""

    out: int | None  # tokens of each choice at most; None: left to the server
    pinned: bool  # fewer are not allowed either: ignore_eos and min_tokens, and nothing to stop at
    choices: int


def encode_chat(request: Request, ask: Ask) -> bytes:
    if request.body is not None:
        return _captured(request, ask)
    if request.messages is not None:
        messages = [dict(m) for m in request.messages]
    elif request.prompt is not None:
        messages = [{"role": "user", "content": request.prompt}]
    else:
        raise BenchError(f"line {request.line}: a chat needs messages or a prompt; token ids go to openai-completions")
    return _body({"messages": messages}, request, ask)


def encode_completions(request: Request, ask: Ask) -> bytes:
    if request.body is not None:
        return _captured(request, ask)
    if request.prompt_token_ids is not None:
        return _body({"prompt": request.prompt_token_ids}, request, ask)
    if request.prompt is None:
        raise BenchError(f"line {request.line}: completions take a prompt or token ids; messages go to openai-chat")
    return _body({"prompt": request.prompt}, request, ask)


def _body(what: JsonObject, request: Request, ask: Ask) -> bytes:
    """What the trace asks for in `extra` wins over what the user asks for every request, and that over ours."""
    # A trace's model is the one that its traffic once met ("GPT-4"); the target serves its own.
    body: JsonObject = {"model": ask.model or request.model, **what, "stream": ask.stream, "temperature": 0}
    if ask.stream and ask.include_usage:
        body["stream_options"] = {"include_usage": True}
    body |= _length(request, ask, PINS)
    if request.priority:
        body["priority"] = request.priority
    return dumped({**body, **ask.extra, **request.extra}, request)


def _length(request: Request, ask: Ask, pins: Sequence[str]) -> JsonObject:
    """The fields that ask for an answer's length, held to it by `pins` where the target takes them."""
    if request.tokens_out is None:
        return {}
    values = {"ignore_eos": True, "min_tokens": request.tokens_out}
    return {"max_tokens": request.tokens_out} | {pin: values[pin] for pin in pins if ask.pin_lengths}


def _final_body(request: Request, ask: Ask) -> JsonObject:
    """A captured body as it is sent: its own fields but for model, stream and stream_options, which are ours.

    What the target's `extra` has and the body has not is added, since the user wants it in every request.
    """
    body = {**ask.extra, **(request.body or {}), **request.extra}
    body |= {"model": ask.model or body.get("model"), "stream": ask.stream}
    options = [o for o in (ask.extra.get("stream_options"), body.pop("stream_options", None)) if isinstance(o, dict)]
    if ask.stream and ask.include_usage:
        body["stream_options"] = {key: value for option in options for key, value in option.items()}
        body["stream_options"]["include_usage"] = True
    return body


def _captured(request: Request, ask: Ask) -> bytes:
    return dumped(_final_body(request, ask), request)


def dumped(body: JsonObject, request: Request) -> bytes:
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError as e:
        raise BenchError(f"line {request.line}: this request cannot be written as JSON: {e}") from None


def asked(request: Request, ask: Ask) -> Asked:
    """What stands in the body after `extra`: the trace's wins over the target's, and that over what we would ask.

    A captured body says all of it: nothing is pinned there that it does not pin.
    """
    body: Mapping[str, Any] = {**_length(request, ask, PINS), **ask.extra, **request.extra}
    if request.body is not None:
        body = _final_body(request, ask)
    out = whole(body.get("max_completion_tokens"), whole(body.get("max_tokens")))  # servers take the newer name first
    free = body.get("ignore_eos") is not True or bool(body.get("stop") or body.get("stop_token_ids"))
    pinned = not free and out is not None and (whole(body.get("min_tokens")) or 0) >= out
    return Asked(out, pinned, (whole(body.get("n")) or 1) * _prompts(body.get("prompt")))


def _prompts(prompt: Any) -> int:
    """A completions body may hold several prompts, each with choices of its own; a list of numbers is one of ids."""
    return len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1


def whole(value: Any, other: int | None = None) -> int | None:
    """The value where it is a count that a record can hold, else `other`."""
    return value if type(value) is int and 0 <= value < 2**31 else other


# ---- protocols that are not OpenAI's


class Words(NamedTuple):
    """How a protocol names what the sampler is to do."""

    names: Mapping[str, str]  # OpenAI's or vLLM's word -> its own; a word that is not here goes out as it stands
    section: str = ""  # of the body, where they stand; "": at its top
    pins: tuple[str, ...] = ()  # of PINS, those that it has
    stream: bool = True  # the body says whether the answer is streamed
    model: bool = True  # the body names the model
    as_text: bool = False  # the section may be given as a text that is JSON, and then stands as it is


SAME = {word: word for word in ("temperature", "top_p", "top_k", "seed", "stop")}  # words that most have taken over


def body_in(words: Words, what: JsonObject, request: Request, ask: Ask) -> JsonObject:
    """A request's whole body: `what` is its prompt and what else is always asked for.

    As for OpenAI's the trace's `extra` wins over the target's, and that over ours; one that is itself a table is merged
    with the table of the same name. A captured body goes as it stands but for model and stream.
    """
    ours: JsonObject = {"model": ask.model or request.model} if words.model else {}
    if words.stream:
        ours["stream"] = ask.stream
    if request.body is not None:
        return {**ask.extra, **request.body, **request.extra, **ours}
    said: JsonObject = {"temperature": 0, **_length(request, ask, words.pins), **ask.extra, **request.extra}
    if "max_completion_tokens" in said:
        said["max_tokens"] = said.pop("max_completion_tokens")  # the same by a newer name
    body: JsonObject = {**ours, **what}
    section: JsonObject = body.setdefault(words.section, {}) if words.section else body
    for word, value in said.items():
        if word in words.names:
            section[words.names[word]] = value
        elif word in _OURS:
            if word in ask.extra or word in request.extra:
                section[word] = value
        elif isinstance(value, Mapping) and isinstance(body.get(word), dict):
            body[word] |= value
        elif isinstance(body.get(word), dict) and not (words.as_text and isinstance(value, str)):
            raise BenchError(f"line {request.line}: extra.{word} is of type {type(value).__name__}, expected a table")
        else:
            body[word] = value
    return body


_OURS = {"temperature", "max_tokens", *PINS}  # that we would ask for; not where the protocol has no word for it


def asked_by(words: Words) -> Callable[[Request, Ask], Asked]:
    """Reads what a request's final body asks of its answer's length; its prompt need not be made up yet."""
    return lambda request, ask: _asked_in(words, body_in(words, {}, request, ask))


def _asked_in(words: Words, body: Mapping[str, Any]) -> Asked:
    section = body.get(words.section) if words.section else body
    if isinstance(section, str):  # Triton's vLLM backend takes a text that is JSON
        section = json_object(section)
    if not isinstance(section, Mapping):
        return Asked(None, False, 1)
    out = whole(section.get(words.names.get("max_tokens", "max_tokens")))
    held = {
        "ignore_eos": section.get(words.names.get("ignore_eos", "")) is True,
        "min_tokens": out is not None and (whole(section.get(words.names.get("min_tokens", ""))) or 0) >= out,
    }
    pinned = bool(words.pins) and out is not None and all(held[pin] for pin in words.pins)
    pinned = pinned and not section.get(words.names.get("stop", "stop"))
    return Asked(out, pinned, whole(section.get(words.names.get("n", ""))) or 1)


def json_object(text: str) -> JsonObject:
    """The object that a text is as JSON; {} for any other text."""
    try:
        value = orjson.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def messages_of(request: Request, api: str) -> list[JsonObject]:
    """What a chat says; a prompt is its user's one message. Raises BenchError for what no chat can say."""
    if request.messages is not None:
        return [dict(message) for message in request.messages]
    if request.prompt is None:
        raise BenchError(f"line {request.line}: {api} takes messages or a prompt, no token ids")
    return [{"role": "user", "content": request.prompt}]


def prompt_of(request: Request, api: str) -> str:
    """The one text of a protocol that takes one. Raises BenchError for what it cannot say."""
    if request.prompt is None:
        raise BenchError(f"line {request.line}: {api} takes a prompt as text, no messages and no token ids")
    return request.prompt
