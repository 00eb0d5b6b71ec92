"""Any other JSON over HTTP: the body by a template, the answer by paths, as the target's own table says.

    [targets.mine]
    url = "http://host:9000/generate"           # the whole address
    api = "http"
    [targets.mine.http]
    body = '{"text": {{prompt|tojson}}, "length": {{max_tokens}}, "stream": {{stream}}}'
    event = "sse"                               # sse, ndjson, chunks or whole
    text = "choices.0.text"                     # of an event; a number is a place in a list
    done = "[DONE]"                             # the last event, or the path of what is true in it
    usage_out = "usage.completion_tokens"

Without `text` an answer that comes whole is a single pass. The template is jinja2's, sandboxed; its names are VALUES.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import orjson

from llm_bench.bodies import Ask, Asked, JsonObject, messages_of
from llm_bench.errors import BenchError
from llm_bench.framing import CHUNKS, LINES, SSE
from llm_bench.protocol import (
    DONE,
    NOTHING,
    Chunk,
    Comes,
    Delta,
    Dialect,
    Site,
    Takes,
    Usage,
    bears_token,
    failed,
    in_words,
    never_plain,
)
from llm_bench.request import Request

WHOLE = "whole"
EVENTS = {"sse": SSE, "ndjson": LINES, "chunks": CHUNKS, WHOLE: SSE}
# key of the table -> what it is, in words
KEYS = {
    "body": "a template of the body",
    "event": f"one of {', '.join(EVENTS)}",
    "text": "the path of an event's text",
    "whole_text": "the path of the text in an answer that is not streamed; `text` where it is not given",
    "done": "the last event as it stands, or the path of what is true in it",
    "finish": "the path of the reason why an answer ended",
    "usage_in": "the path of the prompt's tokens",
    "usage_out": "the path of the answer's tokens",
    "usage_cached": "the path of the prompt tokens from a cache",
    "error": "the path of an error's text",
}
# name in a template -> what it is of a request
VALUES: Mapping[str, Callable[[Request, Ask], Any]] = {
    "prompt": lambda request, ask: _prompt(request),
    "messages": lambda request, ask: messages_of(request, "http"),
    "max_tokens": lambda request, ask: request.tokens_out,
    "model": lambda request, ask: ask.model or request.model,
    "stream": lambda request, ask: ask.stream,
    "tokens_in": lambda request, ask: request.tokens_in,
    "priority": lambda request, ask: request.priority,
    "session": lambda request, ask: request.session,
    "extra": lambda request, ask: {**ask.extra, **request.extra},
}
EXAMPLE = {
    "body": '{"model": {{model|tojson}}, "prompt": {{prompt|tojson}}, "max_tokens": {{max_tokens}}, '
    '"stream": {{stream}}}',
    "event": "sse",
    "text": "choices.0.text",
    "done": "[DONE]",
    "finish": "choices.0.finish_reason",
    "usage_in": "usage.prompt_tokens",
    "usage_out": "usage.completion_tokens",
    "error": "error.message",
}
Render = Callable[[Mapping[str, Any]], str]  # of the values that a template names
_HARD = 'a "quoted" word,\na new line and a \\'  # a prompt that shows where a template forgets `tojson`


class Said(NamedTuple):
    """A target's table, read: paths are split at their dots."""

    event: str
    text: tuple[str, ...]
    whole_text: tuple[str, ...]
    done: str
    done_path: tuple[str, ...]
    finish: tuple[str, ...]
    usage: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]  # prompt, answer, cached
    error: tuple[str, ...]

    @property
    def single_pass(self) -> bool:
        return self.event == WHOLE and not self.whole_text


def check(table: Mapping[str, Any]) -> None:
    """Raises ValueError, in words, for a table that is no right one; its template is tried on hard values."""
    for key, value in table.items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, 1)
            raise ValueError(f"unknown key {key!r}{f', {near[0]!r} is near' if near else ''}; known: {', '.join(KEYS)}")
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{key} is not a text, or is empty; expected {KEYS[key]}")
    if "body" not in table:
        raise ValueError(f"it has no body, {KEYS['body']}, as {EXAMPLE['body']!r}")
    if table.get("event", WHOLE) not in EVENTS:
        raise ValueError(f"event is {table['event']!r}; expected {KEYS['event']}")
    if table.get("event", WHOLE) == WHOLE and "done" in table:
        raise ValueError("done is of a stream, and event is whole: leave it out, or say which events there are")
    for key in ("text", "whole_text", "finish", "usage_in", "usage_out", "usage_cached", "error"):
        if key in table and not all(table[key].split(".")):
            raise ValueError(
                f"{key} is {table[key]!r}; expected names and places with a dot between, as choices.0.text"
            )
    _try(table["body"])


def _try(template: str) -> None:
    render, names = compiled(template)
    asks = (Ask("m", extra={}), Ask("m", stream=False, extra={}))
    for tokens_out, ask in ((7, asks[0]), (None, asks[1])):
        request = Request(tokens_in=9, tokens_out=tokens_out, prompt=_HARD)
        body = render({name: VALUES[name](request, ask) for name in names if name != "extra"} | {"extra": _Any()})
        if body.lstrip()[:1] in ("{", "["):
            try:
                orjson.loads(body)
            except orjson.JSONDecodeError as e:
                raise ValueError(
                    f"body: filled with a prompt of quotes and line ends it is not JSON ({e}); expected "
                    f"{{{{prompt|tojson}}}}, without quotes of its own: {body[:120]!r}"
                ) from None


class _Any(dict[str, Any]):
    """What a template may ask of `extra` while it is tried."""

    def __missing__(self, key: str) -> "_Part":
        return _Part(1)

    def get(self, key: str, default: object = None) -> "_Part":  # dict's own does not ask __missing__
        return _Part(1)


class _Part(int):
    """A value of `extra` that a target or a trace may give: a number, and as a table or a list it has such parts."""

    def __getitem__(self, key: object) -> "_Part":
        return self

    def __iter__(self) -> Iterator["_Part"]:
        return iter((self,))

    def __len__(self) -> int:
        return 1

    def get(self, key: object, default: object = None) -> "_Part":
        return self

    def keys(self) -> list[str]:
        return ["key"]

    def values(self) -> list["_Part"]:
        return [self]

    def items(self) -> list[tuple[str, "_Part"]]:
        return [("key", self)]


Mapping.register(_Part)  # the filter `items` takes nothing else


def compiled(template: str) -> tuple[Render, frozenset[str]]:
    """(values -> the text, the names that it needs). Raises ValueError for what is no template of VALUES."""
    from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, finalize=_in_json, autoescape=False)
    environment.filters["tojson"] = lambda value: orjson.dumps(value).decode()
    try:
        names = frozenset(meta.find_undeclared_variables(environment.parse(template))) - environment.globals.keys()
        made = environment.from_string(template)
    except TemplateError as e:
        line = f" (its line {e.lineno})" if isinstance(e, TemplateSyntaxError) and "\n" in template.strip() else ""
        raise ValueError(f"body is not a template: {e.message}{line}") from None
    if unknown := sorted(names - VALUES.keys()):
        raise ValueError(f"body names {', '.join(unknown)}; known: {', '.join(VALUES)}")

    def render(values: Mapping[str, Any]) -> str:
        try:
            return made.render(values)
        except Exception as e:  # noqa: BLE001 - a template is a program of the user's, and fails in any way
            said = ": ".join(filter(None, [type(e).__name__, " ".join(str(e).split())]))
            raise ValueError(f"body cannot be filled: {said}") from None

    return render, names


def _in_json(value: Any) -> Any:
    """What stands between {{ and }} without a filter: none, true and false are words of JSON."""
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else value


def _prompt(request: Request) -> str:
    """The text; of messages their contents, a line each."""
    if request.prompt is not None:
        return request.prompt
    contents = [message.get("content") for message in messages_of(request, "http")]
    return "\n".join(content if isinstance(content, str) else in_words(content) for content in contents)


def _encode(render: Render, names: frozenset[str], request: Request, ask: Ask) -> bytes:
    if request.body is not None:
        raise BenchError(f"line {request.line}: http has bodies by its template, and takes no captured one")
    try:
        return render({name: VALUES[name](request, ask) for name in names}).encode()
    except ValueError as e:
        raise BenchError(f"line {request.line}: {e}") from None


# ---- answers


def at(value: Any, path: tuple[str, ...]) -> Any:
    """What stands at a path; None where there is nothing."""
    for name in path:
        if isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, list) and name.isascii() and name.isdigit() and int(name[:9]) < len(value):
            value = value[int(name[:9])]
        else:
            return None
    return value


def _decode(said: Said, data: bytes) -> Chunk:
    """One event, or a whole body; an answer does not tell which: `whole_text` is looked for where `text` is not."""
    stripped = data.strip()
    if said.done and stripped == said.done.encode():
        return DONE
    if not stripped and (said.text or said.event != "chunks"):
        if said.event == WHOLE:
            raise ValueError("a blank body")
        return NOTHING
    if not said.text and not said.single_pass:  # an event is its text
        if stripped[:1] == b"{" and (error := _error(said, _object_in(stripped))):
            return error
        text = data.decode(errors="surrogateescape")  # half a character, until `answer.joined` has the other half
        return Chunk((Delta(0, text, bears_token=bool(text)),))
    if said.single_pass and stripped[:1] not in (b"{", b"["):
        if stripped[:1] == b"<":
            raise ValueError("a page, and no answer")
        return NOTHING  # a picture, a number: whatever it is, it came whole
    event = orjson.loads(stripped)
    if isinstance(event, dict) and (error := _error(said, event)):
        return error
    text = _text(said, event)
    finish = at(event, said.finish) if said.finish else None
    reason = "" if finish is None or finish is False else in_words(finish)
    usage = Usage(*(_count(at(event, path)) if path else -1 for path in said.usage))
    done = bool(said.done_path) and bool(at(event, said.done_path))
    delta = Delta(0, text, finish_reason=reason, bears_token=bool(text))
    deltas = () if said.single_pass or not (text or reason or _has_text(said, event)) else (delta,)
    return Chunk(deltas, usage if max(usage) >= 0 else None, done=done)


def _has_text(said: Said, event: Any) -> bool:
    return any(at(event, path) is not None for path in (said.text, said.whole_text) if path)


def _text(said: Said, event: Any) -> str:
    for path in (said.text, said.whole_text):
        value = at(event, path) if path else None
        if value is not None:
            if isinstance(value, str):
                return value
            raise ValueError(f"{'.'.join(path)} is {in_words(value)[:80]}, not a text")
    return ""


def _count(value: Any) -> int:
    if value is None:
        return -1
    if type(value) is int and 0 <= value < 2**31:
        return value
    raise ValueError(f"a usage is {in_words(value)[:80]}, not a count")


def _object_in(data: bytes) -> JsonObject:
    try:
        value = orjson.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _error(said: Said, event: JsonObject) -> Chunk | None:
    """The error where the table says that it is, else in the shapes that are common."""
    found = at(event, said.error) if said.error else None
    if found:
        return Chunk(error=in_words(found))
    return failed(event)


# ---- rows


def _path(text: str) -> tuple[str, ...]:
    return tuple(text.split(".")) if text else ()


def row(table: Mapping[str, Any]) -> Dialect:
    """The protocol that a target's table words. Raises ValueError as `check` does, but tries no body."""
    return _row(table, *compiled(table["body"]))


def _row(table: Mapping[str, Any], render: Render, names: frozenset[str]) -> Dialect:
    event, done = table.get("event", WHOLE), table.get("done", "")
    text = _path(table.get("text", ""))
    said = Said(
        event,
        text,
        _path(table.get("whole_text", "")) or text,
        done,
        _path(done) if all(done.split(".")) and "[" not in done else (),
        _path(table.get("finish", "")),
        (_path(table.get("usage_in", "")), _path(table.get("usage_out", "")), _path(table.get("usage_cached", ""))),
        _path(table.get("error", "")),
    )
    decode = partial(_decode, said)
    return Dialect(
        "",
        partial(_encode, render, names),
        decode,
        partial(bears_token, decode),
        never_plain,
        takes=Takes(
            "",
            model="body" if "model" in names else "",
            chat=True,
            asked=lambda request, ask: Asked(request.tokens_out if "max_tokens" in names else None, False, 1),
        ),
        comes=Comes(
            EVENTS[event],
            streams=event != WHOLE,
            single_pass=said.single_pass,
            last_word=done,
            proves=bool(done) and not said.finish,
            ends_by_framing=event == WHOLE or (not done and not said.finish),
        ),
        site=Site(ready="/", at_origin=True, is_ready=lambda body: False),
        made=row,
    )


# A row for what is the same in every table. Its template is compiled when it is used: a target that speaks another
# protocol need not wait for jinja2.
_EXAMPLE_NAMES = frozenset(("model", "prompt", "max_tokens", "stream"))
ROWS = {"http": _row(EXAMPLE, lambda values: compiled(EXAMPLE["body"])[0](values), _EXAMPLE_NAMES)}
