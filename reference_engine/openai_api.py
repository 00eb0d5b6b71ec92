"""The OpenAI protocol as values: a body becomes an Ask, an answer becomes events; nothing here waits or sends.

Field names and error objects are OpenAI's (platform.openai.com/docs/api-reference); extensions have vLLM's names.
"""

import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from reference_engine.sequence import SamplingParams, Sequence

DEFAULT_MAX_TOKENS = 16  # of completions, as OpenAI documents; a chat has the rest of the context
# What a stranger may ask for. A stop string is looked for at every token: 16 of 256 cost at most 0.4 ms there.
MOST_STOPS = 16
LONGEST_STOP = 256  # characters
LONGEST_NAME = 256  # characters of user, cache_salt, role
MOST_MESSAGES = 4096
MOST_NESTING = 32  # lists and objects within each other
LONGEST_ERROR = 500  # characters of an error's message: a body of 16 MB is not sent back


class Range(NamedTuple):
    """What a numeric field may be; whole where the bounds are."""

    default: float | None
    low: float
    high: float | None = None


RANGES = {
    "max_tokens": Range(None, 1),
    "max_completion_tokens": Range(None, 1),  # of chats
    "min_tokens": Range(0, 0),
    "n": Range(1, 1, 128),
    "priority": Range(0, -(2**31), 2**31 - 1),
    "seed": Range(None, -(2**63), 2**63 - 1),
    "temperature": Range(1.0, 0.0, 2.0),
    "top_p": Range(1.0, 1e-6, 1.0),
}
FLAGS = ("stream", "ignore_eos", "include_timings")
STREAM_FLAGS = ("include_usage", "continuous_usage_stats", "include_timings")  # of stream_options
NAMES = ("user", "cache_salt")


class Kind(NamedTuple):
    """What differs between the two routes."""

    id_prefix: str
    chunk_object: str
    object: str
    before_text: bytes  # of an event's choice, after its index
    after_text: bytes


COMPLETION = Kind("cmpl-", "text_completion", "text_completion", b',"text":', b"")
CHAT = Kind("chatcmpl-", "chat.completion.chunk", "chat.completion", b',"delta":{"content":', b"}")

# Fields that change the answer in a way this engine cannot, with the values that ask for nothing. Null always does.
# Unknown fields are ignored, as OpenAI's own servers do.
REFUSED: dict[str, tuple[object, ...]] = {
    "audio": (),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "function_call": ("none",),
    "functions": ([],),
    "guided_json": (),
    "guided_regex": (),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0, 0.0),
    "modalities": (["text"],),
    "presence_penalty": (0, 0.0),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_k": (0, -1),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
}
ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """An answer that is an error object. `param` names the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        return error_body(self.status, str(self), self.param)


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    kind = ERROR_TYPES.get(status, "InternalServerError")
    message = message if len(message) <= LONGEST_ERROR else message[:LONGEST_ERROR] + "…"
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": status}})


class Ask(NamedTuple):
    """What a body asks for, checked. One of text, ids and messages (with plain text in them) is the prompt."""

    text: str
    ids: list[int]
    messages: list[dict[str, Any]]
    max_tokens: int | None
    max_tokens_field: str  # as the body has it, or would: max_tokens | max_completion_tokens
    sampling: SamplingParams  # its max_tokens is not decided yet
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    include_timings: bool
    priority: int
    client: str
    salt: bytes


def parse(body: Mapping[str, Any], kind: Kind, model: str, vocab_size: int) -> Ask:
    """Raises ApiError: 404 for another model, 400 for the rest."""
    asked = body.get("model")
    if asked is not None and asked != model:
        raise ApiError(404, f"the model {shown(asked)} does not exist; there is {model!r}", "model")
    for name, neutral in REFUSED.items():
        value = body.get(name)
        # Types are compared too: False is 0 in Python, but `logprobs: 0` asks for log probabilities.
        if value is not None and not any(type(value) is type(v) and value == v for v in neutral):
            raise ApiError(400, f"{name} is not supported by this engine", name)
    options = body.get("stream_options")
    options = {} if options is None else options
    if type(options) is not dict:
        raise ApiError(400, f"stream_options is {shown(options)}; would be right: an object", "stream_options")
    stream = _flag(body, "stream")
    if options and not stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    n, best_of = _integer(body, "n") or 1, body.get("best_of")
    if best_of is not None and not (type(best_of) is int and best_of == n):
        text = f"best_of is {shown(best_of)}; expected {n}, which is n: every choice that is made is answered"
        raise ApiError(400, text, "best_of")
    max_tokens, field = _integer(body, "max_tokens"), "max_tokens"
    if kind is CHAT and (most := _integer(body, "max_completion_tokens")) is not None:
        max_tokens, field = most, "max_completion_tokens"
    min_tokens = _integer(body, "min_tokens") or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise ApiError(400, f"min_tokens {min_tokens} is more than {field} {max_tokens}", "min_tokens")
    user, salt = (name_of(body, name) for name in NAMES)
    sampling = SamplingParams(
        max_tokens=0,
        min_tokens=min_tokens,
        temperature=_number(body, "temperature"),
        top_p=_number(body, "top_p"),
        seed=_integer(body, "seed"),
        ignore_eos=_flag(body, "ignore_eos"),
        stop=_stops(body),
    )
    text, ids = ("", []) if kind is CHAT else _prompt(body, vocab_size)
    return Ask(
        text=text,
        ids=ids,
        messages=_messages(body) if kind is CHAT else [],
        max_tokens=max_tokens,
        max_tokens_field=field,
        sampling=sampling,
        n=n,
        stream=stream,
        include_usage=_flag(options, "include_usage"),
        continuous_usage=_flag(options, "include_usage") and _flag(options, "continuous_usage_stats"),
        include_timings=_flag(options, "include_timings") or _flag(body, "include_timings"),
        priority=_integer(body, "priority") or 0,
        client=user,
        salt=salt.encode(),
    )


def check_nesting(data: bytes, body: Mapping[str, Any]) -> None:
    """Raises ApiError if the body is too deep for what is done with it: templates, texts of errors.

    `data` is what it was read from: where there are few brackets nothing has to be walked.
    """
    if data.count(b"[") + data.count(b"{") <= MOST_NESTING:
        return
    level: list[Any] = [body]
    for _ in range(MOST_NESTING):
        level = [v for inner in level for v in (inner.values() if type(inner) is dict else inner)
                 if type(v) in (dict, list)]  # fmt: skip
        if not level:
            return
    raise ApiError(400, f"the body is nested more than {MOST_NESTING} deep")


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and type(value) is not bool:
        raise ApiError(400, f"{name} is {shown(value)}; would be right: true or false", name)
    return bool(value)


def name_of(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if value is not None and (type(value) is not str or len(value) > LONGEST_NAME):
        raise ApiError(400, f"{name}: would be right: a string of at most {LONGEST_NAME} characters", name)
    return value or ""


def _integer(body: Mapping[str, Any], name: str) -> int | None:
    value, allowed = body.get(name), RANGES[name]
    if value is None:
        return None if allowed.default is None else int(allowed.default)
    low, high = allowed.low, allowed.high
    if type(value) is not int or value < low or (high is not None and value > high):
        right = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
        raise ApiError(400, f"{name} is {shown(value)}; would be right: {right}", name)
    return value


def _number(body: Mapping[str, Any], name: str) -> float:
    value, (default, low, high) = body.get(name), RANGES[name]
    assert default is not None and high is not None
    if value is None:
        return default
    if type(value) not in (int, float) or not low <= value <= high:
        raise ApiError(400, f"{name} is {shown(value)}; would be right: a number from {low} to {high}", name)
    return float(value)


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    value = body.get("stop")
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > MOST_STOPS
        or not all(isinstance(s, str) and 0 < len(s) <= LONGEST_STOP for s in stops)
    ):
        right = f"a string of 1 to {LONGEST_STOP} characters, or a list of at most {MOST_STOPS} of them"
        raise ApiError(400, f"stop is {shown(value)}; would be right: {right}", "stop")
    return tuple(stops)


def _prompt(body: Mapping[str, Any], vocab_size: int) -> tuple[str, list[int]]:
    """Text or token ids."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise ApiError(400, f"prompt is a batch of {len(prompt)}; would be right: one prompt a request", "prompt")
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt, []
    if isinstance(prompt, list) and prompt and all(type(t) is int for t in prompt):
        wrong = next((t for t in prompt if not 0 <= t < vocab_size), None)
        if wrong is not None:
            raise ApiError(400, f"prompt has the token id {wrong}; would be right: 0 to {vocab_size - 1}", "prompt")
        return "", prompt
    raise ApiError(400, "prompt: would be right: a string or a list of token ids, not empty", "prompt")


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not 0 < len(messages) <= MOST_MESSAGES:
        raise ApiError(400, f"messages: would be right: a list of 1 to {MOST_MESSAGES} messages", "messages")
    return [_message(m, i) for i, m in enumerate(messages)]


def _message(message: Any, i: int) -> dict[str, Any]:
    """Text parts become one string: no template of a text model wants them apart."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or len(message["role"]) > LONGEST_NAME:
        raise ApiError(400, f"messages[{i}]: would be right: an object with a role", "messages")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
            raise ApiError(400, f"messages[{i}].content has a part that is no text", "messages")
        content = "".join(p["text"] for p in content)
    if content is None and message["role"] == "assistant":
        content = ""
    if not isinstance(content, str):
        raise ApiError(400, f"messages[{i}].content: would be right: a string or a list of text parts", "messages")
    return {**message, "content": content}


class StopText:
    """Text on its way out, held back while it may be the beginning of a stop string.

    The stop string that ends first wins, whatever pieces the text comes in.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self.held = ""
        self.found: str | None = None

    def push(self, text: str, last: bool = False) -> str:
        """What may go out; after a stop string was found, nothing more may be pushed."""
        if not self.stops:
            return text
        held = self.held + text
        ends = [(start + len(s), -len(s), s) for s in self.stops if (start := held.find(s)) >= 0]
        if ends:
            end, size, self.found = min(ends)
            return held[: end + size]
        keep = 0 if last else max(_overlap(held, s) for s in self.stops)
        self.held = held[len(held) - keep :]
        return held[: len(held) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((k for k in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:k])), 0)


class Shell:
    """The JSON around the text of an answer's events, encoded once a request: the hot path joins bytes."""

    def __init__(self, kind: Kind, answer_id: str, created: int, model: str) -> None:
        self.kind = kind
        self.id = kind.id_prefix + answer_id
        self.fixed = {"id": self.id, "object": kind.chunk_object, "created": created, "model": model}
        self.head = b"data: " + orjson.dumps(self.fixed)[:-1] + b',"choices":[{"index":'

    def event(self, index: int, text: str, finish_reason: str, stop: str | None, usage: bytes = b"") -> bytes:
        """One token's event."""
        return b"".join((
            self.head, b"%d" % index, self.kind.before_text, orjson.dumps(text), self.kind.after_text,
            b',"logprobs":null,"finish_reason":', orjson.dumps(finish_reason or None),
            b',"stop_reason":', orjson.dumps(stop), b"}]", usage, b"}\n\n",
        ))  # fmt: skip

    def role_event(self, index: int) -> bytes:
        return b'%s%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n' % (
            self.head,
            index,
        )

    def last_event(self, said: dict[str, Any]) -> bytes:
        """The event after the last token's, with usage, metrics or timings."""
        return b"data: " + orjson.dumps({**self.fixed, "choices": []} | said) + b"\n\n"

    def whole(self, choices: list[dict[str, Any]], said: dict[str, Any]) -> bytes:
        """The body of an answer that is not streamed."""
        return orjson.dumps({**self.fixed, "object": self.kind.object, "choices": choices} | said)


def shown(value: Any) -> str:
    """A stranger's value in an error's message: its beginning, and no deeper than that shows."""
    return reprlib.repr(value)


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def metrics_of(sequence: Sequence, tokens: int, last_ns: int) -> dict[str, Any]:
    """The server's own times, in vLLM's shape (--enable-per-request-metrics) with its parts added, in milliseconds.

    queue + prefill = time to first token; generation is from the first to the last token, time preempted included.
    """
    to_first = (sequence.first_token_ns - sequence.arrived_ns) / 1e6
    generation = (last_ns - sequence.first_token_ns) / 1e6
    return {
        "metrics": {
            "time_to_first_token_ms": to_first,
            "generation_time_ms": generation,
            "queue_time_ms": (sequence.scheduled_ns - sequence.arrived_ns) / 1e6,
            "prefill_time_ms": (sequence.first_token_ns - sequence.scheduled_ns) / 1e6,
            "decode_time_ms": generation,
            "preempted_time_ms": sequence.evicted_total_ns / 1e6,
            "preemptions": sequence.preemptions,
            "mean_itl_ms": generation / (tokens - 1) if tokens > 1 else None,
            "tokens_per_second": 1000 * tokens / (to_first + generation),
        }
    }
