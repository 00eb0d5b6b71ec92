"""What a target protocol is: the words that all share, the row where they differ, readers of a peer's JSON.

No I/O and no clock. The rows stand in `dialect_*.py`, one file a family; `dialects` holds them all.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from llm_bench.bodies import Ask, Asked, JsonObject, whole
from llm_bench.bodies import asked as asked_in_openais_words
from llm_bench.framing import SSE
from llm_bench.request import Request


class Usage(NamedTuple):
    prompt_tokens: int = -1  # -1: not said
    completion_tokens: int = -1
    cached_tokens: int = -1
    reasoning_tokens: int = -1  # of completion_tokens


class Delta(NamedTuple):
    """One choice of one event."""

    choice: int = 0
    text: str = ""  # content of the answer
    reasoning: str = ""
    tool: str = ""  # tool-call names and arguments
    token_ids: int = -1  # how many tokens, where the wire lists or counts them; -1: it does not
    finish_reason: str = ""  # OpenAI's word for it, where it has one: stop, length, tool_calls, content_filter
    bears_token: bool = False  # by METRICS.md's rule for this protocol


class Chunk(NamedTuple):
    """One event (or one whole body, when not streamed) in the words all protocols share."""

    deltas: tuple[Delta, ...] = ()
    usage: Usage | None = None  # cumulative, as the wire has it
    error: str = ""  # text of an error object; such an answer has failed whatever its status
    error_code: str = ""
    done: bool = False  # the protocol's own last word, e.g. [DONE]; proves nothing alone
    server_ms: Mapping[str, float] = {}  # keys of Record: server_ttft_ms, server_queue_ms, ..., server_batch


NOTHING = Chunk()
DONE = Chunk(done=True)
Headers = Sequence[tuple[bytes, bytes]]  # names in lower case


class Listed(NamedTuple):
    """A model that a server names, and its context limit where it says one."""

    model: str
    limit: int | None = None


def no_list(body: bytes) -> list[Listed]:
    return []


class Loaded(NamedTuple):
    """A model as a management port tells of it."""

    version: str
    ready: int  # workers
    workers: int
    batch: int  # requests that it computes at once, at most


class Management(NamedTuple):
    """A port of its own where a server tells of its models. Paths follow scheme, host and that port."""

    port: int  # where the target declares none
    models: str  # path of the list
    listed: Callable[[bytes], list[Listed]]
    model: str  # path of one, {model} in it
    loaded: Callable[[bytes], Loaded | None]  # its reader; None for any other page


class Takes(NamedTuple):
    """What a request can say in a protocol."""

    prompt: str = "prompt"  # key of the body that holds what is asked
    model: str = "body"  # where the model is named: "body", "path" ({model} in it) or "" (the server has but one)
    chat: bool = False  # messages; else one text
    token_ids: bool = False  # a prompt as ids, under the same key or one of its own
    pins: tuple[str, ...] = ()  # OpenAI's words for what holds an answer to its length; (): nothing does
    usage_option: bool = False  # usage in a stream has to be asked for
    asked: Callable[[Request, Ask], Asked] = asked_in_openais_words  # what a final body asks of its answer's length


class Comes(NamedTuple):
    """How an answer comes, and what proves that it is whole."""

    framing: str = SSE  # of a streamed answer: a row of FRAMINGS
    streams: bool = True  # False: whole bodies only
    single_pass: bool = False  # an answer without tokens: ok without one, and without a TTFT
    last_word: str = ""  # what ends a stream beside the finish reason; its lack is a label
    proves: bool = False  # that word alone is the end that a stream owes, and no finish reason is
    ends_by_framing: bool = False  # no finish reason is owed: the HTTP message's own end is the answer's
    cumulative: bool = False  # each event repeats the text before it
    counts_events: bool = False  # the server counts the tokens of each event: their sum is its usage
    of_headers: Callable[[Headers], Chunk] | None = None  # what the head of an answer says beside its body


class Site(NamedTuple):
    """Where a server of the protocol tells what it is. Paths follow the target's URL, but for `about`."""

    base: str = ""  # what the target's URL ends in
    models: str = ""  # method and path of the list of models, or of what names the one; "": there is none
    listed: Callable[[bytes], list[Listed]] = no_list  # its reader: [] for any other answer
    ready: str = ""  # path that answers 2xx when the server is there, where `models` is ""
    is_ready: Callable[[bytes], bool] = bool  # is the body of that such a server's?
    at_origin: bool = False  # `ready` follows scheme, host and port, whatever path the target has
    # (path after the URL without `base`, its body -> revision, engine_version, precision, image): the first that tells
    about: tuple[tuple[str, Callable[[JsonObject], Mapping[str, str]]], ...] = ()
    # (path of a model's page, {model} in it; the page and the target's `extra` -> the `extra` of every request): where
    # a body cannot be made without what the server says of its model. Raises ValueError for a page that says too
    # little, BenchError for an `extra` that is wrong
    described: tuple[str, Callable[[JsonObject, Mapping[str, Any]], Mapping[str, Any]]] | None = None
    speaks: Callable[[JsonObject], bool] = bool  # of the first page of `about`: is that server one of this protocol?
    managed: Management | None = None
    headers: tuple[tuple[str, str], ...] = ()  # of every request
    key_header: tuple[str, str] = ("Authorization", "Bearer {key}")


class Dialect(NamedTuple):
    """A row of DIALECTS."""

    path: str  # appended to the target's URL; may hold {model}
    encode: Callable[[Request, Ask], bytes]  # the body; request.prompt or .messages or .prompt_token_ids is filled in
    decode: Callable[[bytes], Chunk]  # one event's data, or a whole body; raises ValueError on anything else
    is_token: Callable[[bytes], bool]  # does this event's data bear a token? Cheap: run until the first that does
    # Content of an event that says nothing else: choice 0, no finish_reason, usage, error, ids. None: ask `decode`.
    # Most events of a stream are such, and a Chunk for each would cost three times as much as reading its JSON.
    plain: Callable[[bytes], str | None]
    text_key: bytes = b""  # of that content in the JSON, for `plain.plain_reader`
    whole_path: str = ""  # of an answer that is not streamed; "": the same
    takes: Takes = Takes()
    comes: Comes = Comes()
    site: Site = Site()
    transport: str = "http"  # a row of TRANSPORTS
    tried: str = ""  # real servers whose answers were read by it; "": it is from its documents or source alone
    made: "Callable[[Mapping[str, Any]], Dialect] | None" = None  # of a target's own table, which words the protocol

    def path_of(self, model: str, stream: bool) -> str:
        return path_for(self.path if stream or not self.whole_path else self.whole_path, model)


def path_for(path: str, model: str) -> str:
    """`path` with the model's name in it: what would end the path or the request line is escaped, a slash is not."""
    keep = b"/-._~:@!$&'()*+,;=0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    name = "".join(chr(byte) if byte in keep else f"%{byte:02X}" for byte in model.encode(errors="replace"))
    return path.replace("{model}", name)


def never_plain(data: bytes) -> None:
    """Of protocols whose events all say more than their text."""


def bears_token(decode: Callable[[bytes], Chunk], data: bytes) -> bool:
    """`is_token` by way of `decode`."""
    try:
        return any(delta.bears_token for delta in decode(data).deltas)
    except ValueError:
        return False


# Readers of a peer's JSON: null and absent are the same, a wrong type is a ValueError that names the field.


def read_object(data: bytes, what: str) -> JsonObject:
    return object_of(orjson.loads(data), what)  # JSONDecodeError is a ValueError


def word_of(data: bytes) -> Chunk | None:
    """An event that is no JSON: [DONE], or blanks. None: read it."""
    if data[:1] == b"{":
        return None
    word = data.strip()
    return DONE if word == b"[DONE]" else None if word else NOTHING


def object_of(value: Any, what: str) -> JsonObject:
    if isinstance(value, dict):
        return value
    raise ValueError(f"{what} is {in_words(value)[:80]}, not an object")


def held(holder: JsonObject, key: str) -> JsonObject:
    """The object under a key; {} where it is null or absent."""
    value = holder.get(key)
    return {} if value is None else object_of(value, key)


def list_of(value: Any, what: str) -> list[Any]:
    if isinstance(value, list):
        return value
    raise ValueError(f"{what} is {in_words(value)[:80]}, not a list")


def text_in(holder: JsonObject, key: str) -> str:
    value = holder.get(key)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    raise ValueError(f"{key} is {in_words(value)[:80]}, not a text")


def count_in(holder: JsonObject, key: str) -> int:
    value = holder.get(key)
    if value is None:
        return -1
    if type(value) is int and 0 <= value < 2**31:  # the records' columns hold no more
        return value
    raise ValueError(f"{key} is {in_words(value)[:80]}, not a count")


def in_words(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:  # orjson reads deeper nesting than it writes
        return "(an object nested too deeply to show)"


def error_in(event: JsonObject) -> tuple[str, str]:
    """Text and code of the error object, in each of the shapes that servers send; ("", "") for none."""
    error = event.get("error")
    if not error and not event.get("choices"):
        if event.get("object") == "error":  # vLLM before 0.10, SGLang
            error = event
        elif event.get("detail"):  # FastAPI: a text, or a list of what it refused
            error = {"message": _refused(event["detail"])}
    if not error:
        return "", ""
    if not isinstance(error, dict):
        return in_words(error), in_words(event.get("error_type"))  # TGI: {"error": text, "error_type": kind}
    code = error.get("code")
    return in_words(error.get("message") or error), in_words(error.get("type") if code is None else code)


def _refused(detail: Any) -> str:
    """FastAPI's list of what it refused in a body, a field a part: `body.messages: Field required`."""
    if not isinstance(detail, list) or not all(isinstance(one, dict) and one.get("msg") for one in detail):
        return in_words(detail)
    places = (one["loc"] if isinstance(one.get("loc"), list) else [] for one in detail)
    said = (
        f"{'.'.join(map(in_words, place))}: {in_words(one['msg'])}" for place, one in zip(places, detail, strict=True)
    )
    return "; ".join(words.removeprefix(": ") for words in said)


def failed(event: JsonObject) -> Chunk | None:
    """The Chunk of an event that holds an error object, None for any other."""
    error, code = error_in(event)
    return Chunk(error=error, error_code=code) if error else None


def ms_by(account: Any, names: Mapping[str, Sequence[str]]) -> Mapping[str, float]:
    """A server's own account of times in ms, by the Record's names."""
    if not isinstance(account, dict):
        return _SILENT
    return {
        name: float(account[key])
        for key, ours in names.items()
        if type(account.get(key)) in (int, float) and account[key] >= 0  # below 0: llama.cpp did not measure it
        for name in ours
    }


_SILENT: Mapping[str, float] = {}


# Readers of what servers say of themselves: anything may come, and what is of another shape gives no list, no fact.


def listed_by_openai(body: bytes) -> list[Listed]:
    """{"data": [{"id": ...}]}, with the context limit of vLLM and SGLang or of llama.cpp."""
    try:
        rows = orjson.loads(body)["data"]
    except (ValueError, LookupError, TypeError):
        return []
    if not isinstance(rows, list):
        return []
    return [Listed(r["id"], _limit(r)) for r in rows if isinstance(r, dict) and isinstance(r.get("id"), str)]


def _limit(row: Mapping[str, Any]) -> int | None:
    for holder, name in ((row, "max_model_len"), (row.get("meta"), "n_ctx")):  # vLLM, llama.cpp
        if limit := whole(holder.get(name)) if isinstance(holder, dict) else None:
            return limit
    return None


def json_of(body: bytes) -> JsonObject:
    """The object that a body is; {} for any other body."""
    try:
        value = orjson.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def named(facts: JsonObject, keys: Mapping[str, str]) -> Mapping[str, str]:
    """Of a page's facts those under `keys` (its key -> our name) that are texts."""
    return {ours: facts[key] for key, ours in keys.items() if isinstance(facts.get(key), str) and facts[key]}


_PRECISIONS = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32"}
_PRECISIONS |= {"f16": "float16", "mostly f16": "float16", "f32": "float32", "all f32": "float32"}  # llama.cpp's


def same_build(x: str, y: str) -> bool:
    """Of two revisions, versions or precisions: a short one stands for the longer one that it begins."""
    x, y = (_plain_build(value) for value in (x, y))
    return x == y or (min(len(x), len(y)) >= 3 and (x.startswith(y) or y.startswith(x)))


def _plain_build(value: str) -> str:
    word = value.strip().lower().removeprefix("torch.").removeprefix("v")
    return _PRECISIONS.get(word, word)
