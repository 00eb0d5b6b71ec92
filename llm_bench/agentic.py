"""AGENTIC: formats of what agents and the tools around them recorded of their calls. No files.

Where only lengths were recorded, a conversation is what its prompts prove it to be.
"""

from collections.abc import Iterator
from typing import Any

import orjson

from llm_bench.fields import (
    DATE_TIME,
    NO_TURN,
    Format,
    Last,
    Reading,
    Row,
    Values,
    body_of,
    bounded,
    conversation,
    count,
    date_time,
    found,
    inside,
    label,
    must,
    nanoseconds,
    objects,
    seconds,
    whole_numbers,
)
from llm_bench.request import MOST_TOKENS, Request

_UNIX_NS = date_time("1970-01-01 00:00:00")


def _turn(
    reading: Reading, session: str, at: int, end: int | None, tokens: tuple[int, int], *, serial: bool = False
) -> tuple[str, float | None]:
    """`fields.conversation` for calls that may run side by side or be out of order.

    One that begins before the call before it began or, unless the session is `serial`, before that one's answer ended,
    continues nothing, however long its prompt is.
    """
    last: Last | None = reading.memory.get(session)
    begun: dict[str, int] = reading.known.setdefault("begun", {})
    if last is not None and at < max(begun[session], 0 if serial else last.end_ns or 0):
        reading.memory[session] = last._replace(floor=2 * MOST_TOKENS + 1)
    begun[session] = at
    return conversation(reading, session, at, end, tokens)


# -- Weka (callanjfox/kv-cache-tester: docs/trace_replay_tester.md; ai-dynamo/aiperf: weka_trace_models.py) -----------

_WEKA = ("id", "models", "block_size", "hash_id_scope", "tool_tokens", "system_tokens", "requests", "totals")
_PARTIAL = 1 << 31  # the first id of a partial block; those of whole ones stay below it, and both within 32 bits


def _weka_rows(v: Values, reading: Reading, line: int) -> list[Row]:
    """One coding session; a subagent's requests are a session of their own, begun at their own time.

    Ids of scope "local" (the default) mean something in their own trace only, and are moved apart from other traces'.
    A partial last block has no id in the file: it gets one of its own, as nothing says that its text came twice.
    """
    session = label(v, "id") or f"line {line}"
    size = reading.block_size or must(v, "block_size")
    scope = v.get("hash_id_scope") or "local"
    if scope not in ("local", "global"):
        raise ValueError(f"hash_id_scope is {found(scope, 'local or global')}")
    free, partial = reading.known.get("ids", (0, _PARTIAL))  # that no trace before has
    base = 0 if scope == "global" else free
    rows: list[Row] = []
    for name, at, r in _weka_requests(v, session, reading):
        tokens_in, tokens_out = must(r, "in"), must(r, "out")
        hash_ids = tuple(base + i for i in whole_numbers(r, "hash_ids"))
        if hash_ids and not base <= min(hash_ids) <= max(hash_ids) < _PARTIAL:
            raise ValueError("hash_ids has one below 0 or of more than 31 bits, expected ids counted from 1")
        free = max(free, max(hash_ids, default=0) + 1)
        if hash_ids and size and tokens_in % size and len(hash_ids) == tokens_in // size:
            hash_ids, partial = (*hash_ids, partial), partial + 1
        api_ns = nanoseconds(r, "api_time", reading.unit_ns)
        before = reading.memory.get(name)
        part, pause_s = _turn(reading, name, at, None if api_ns is None else at + api_ns, (tokens_in, tokens_out))
        opens = before is None or before.part != reading.memory[name].part
        think_s = seconds(r, "think_time", reading.unit_ns)
        request = Request(
            tokens_in=tokens_in,
            tokens_out=tokens_out,
            hash_ids=hash_ids,
            block_size=size if hash_ids else 0,
            session=part,
            turn=NO_TURN,
            think_s=None if opens else pause_s if think_s is None else think_s,
            model=label(r, "model"),
            line=line,
        )
        rows.append((at, request))
    reading.known["ids"] = (free, partial)
    return rows


def _weka_requests(v: Values, session: str, reading: Reading) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(session, ns since the trace's start, values) of each call.

    A subagent's calls are told in its own time (kv-cache-tester) or in the trace's (corpora made for AgentX): the
    first, where any of them would lie before its agent.
    """
    agents: list[tuple[str, int, list[tuple[int, dict[str, Any]]]]] = []
    for n, r in enumerate(objects(v, "requests")):
        kind, at = r.get("type"), _at(r, reading)
        if kind in ("s", "n"):
            yield session, at, r
        elif kind == "subagent":
            name = f"{session}/{label(r, 'agent_id') or f'agent {n}'}"
            agents.append((name, at, [(_at(inner, reading), inner) for inner in objects(r, "requests")]))
        else:
            raise ValueError(f"type is {found(kind, 's, n or subagent')}")
    own = any(inner < at for _, at, calls in agents for inner, _ in calls)
    for name, at, calls in agents:
        for inner, r in calls:
            yield name, at + inner if own else inner, r


def _at(r: Values, reading: Reading) -> int:
    at = nanoseconds(r, "t", reading.unit_ns)
    if at is None:
        raise ValueError("t is missing, expected seconds since the trace's start")
    return at


# -- TraceLab (uw-syfi/TraceLab: README.md, "Data format") ------------------------------------------------------------

_TRACELAB_INPUTS, _TRACELAB_OUTPUTS = ("user_message", "tool_result"), ("reasoning", "text", "tool_call")
_TRACELAB_MUST = ("session_id", "round_index", "input_tokens_total", "output_tokens", "timing_events")
_TRACELAB = (
    *_TRACELAB_MUST,
    *("provider", "project", "user", "round_id", "turn_id", "model", "prefix_tokens", "newly_append_tokens"),
    *("claude_uncached_input_tokens", "claude_cache_creation_input_tokens", "claude_cache_read_input_tokens"),
    *("reasoning_output_tokens", "tools", "store", "trace_key", "first_input_event_type", "current_input_chars"),
    *("current_input_event_count", "current_user_message_count", "current_tool_result_count"),
    *("current_user_message_chars", "current_tool_result_chars"),
    *("home", "cwd", "workdir", "session_file"),  # of traces that were not made public
)


def _tracelab_rows(v: Values, reading: Reading, line: int) -> list[Row]:
    """One round: sent at the last input before the model's first output, answered with its last output.

    Server time and time to first token are not in the trace. The pause before a round is its tools' and its user's.
    """
    tokens_in = must(v, "input_tokens_total")
    tokens_out = count(v, "output_tokens")
    cached, added = count(v, "prefix_tokens"), count(v, "newly_append_tokens")
    if cached is not None and added is not None and cached + added != tokens_in:
        raise ValueError(f"input_tokens_total is {tokens_in}, expected prefix + newly appended: {cached} + {added}")
    sent, answered = _round_times(v)
    session = label(v, "session_id") or f"line {line}"
    session, pause_s = _turn(reading, session, sent, answered, (tokens_in, tokens_out or 0), serial=True)
    request = Request(
        tokens_in=tokens_in,
        tokens_out=tokens_out,
        session=session,
        turn=NO_TURN,
        think_s=pause_s,
        model=label(v, "model"),
        client=label(v, "user"),
        line=line,
    )
    return [(sent, request)]


def _round_times(v: Values) -> tuple[int, int | None]:
    """When its request was sent, and when its answer ended."""
    stamps: dict[str, list[int]] = {"in": [], "out": []}
    for event in objects(v, "timing_events"):
        kind = event.get("event_type")
        if kind in (*_TRACELAB_INPUTS, *_TRACELAB_OUTPUTS) and event.get("timestamp") is not None:
            stamps["in" if kind in _TRACELAB_INPUTS else "out"].append(date_time(event["timestamp"], "timestamp"))
    first = min(stamps["out"], default=None)
    sent = max((at for at in stamps["in"] if first is None or at <= first), default=first)
    if sent is None:
        kinds = ", ".join((*_TRACELAB_INPUTS, *_TRACELAB_OUTPUTS))
        raise ValueError(f"timing_events is {found(v['timing_events'], f'one event or more of {kinds}')}")
    return sent, max(stamps["out"], default=None)


# -- OpenTelemetry (semantic conventions, gen-ai/gen-ai-spans; OTLP/JSON of opentelemetry-proto) ----------------------

_OTEL = ("resourceSpans", "spans", "trace_id", "span_count", "collected_at")
_INFERENCE = ("chat", "text_completion", "generate_content")  # an agent's span repeats the usage of its calls
_USAGE_IN = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")  # the second: its name before v1.27
_USAGE_OUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")


def _otel_rows(v: Values, reading: Reading, line: int) -> list[Row]:
    """The calls of a model among the spans of an OTLP document, or of {"trace_id": ..., "spans": [...]}.

    Turns of a conversation share gen_ai.conversation.id, or are each the child of the call before. Other spans, and
    calls of which neither tokens nor messages were recorded, are requests of nothing: the reader counts them as empty.
    """
    calls: list[tuple[int, int, dict[str, Any], dict[str, Any]]] = []
    rows: list[Row] = []
    for span in _spans(v):
        attributes = _attributes(span.get("attributes"))
        if not _is_call(attributes):
            rows.append((None, Request(0, None, line=line)))
            continue
        at = _span_time(span, "startTimeUnixNano", "start_time")
        if at is None:
            raise ValueError("startTimeUnixNano is missing, expected one in each gen_ai span")
        calls.append((at, len(calls), span, attributes))
    calls.sort(key=lambda call: call[:2])
    names = _conversations([(span, attributes) for _, _, span, attributes in calls])
    for (at, _, span, attributes), name in zip(calls, names, strict=True):
        rows.append(_call(span, attributes, at, name, reading, line))
    return rows


def _is_call(attributes: dict[str, Any]) -> bool:
    kind = attributes.get("gen_ai.operation.name")
    return kind in _INFERENCE if kind is not None else any(name in attributes for name in _USAGE_IN)


def _call(span: Values, attributes: dict[str, Any], at: int, name: str, reading: Reading, line: int) -> Row:
    tokens_in, tokens_out = count(attributes, *_USAGE_IN), count(attributes, *_USAGE_OUT)
    status = span.get("status")
    code = status.get("code") if isinstance(status, dict) else None
    if code in (2, "STATUS_CODE_ERROR", "ERROR") and tokens_out is None:
        tokens_out = 0  # how a row says that its request failed
    body = _recorded_body(attributes)
    pause_s = None
    if name and tokens_in is not None:
        end = _span_time(span, "endTimeUnixNano", "end_time")
        name, pause_s = _turn(reading, name, at, end, (tokens_in, tokens_out or 0))
    request = Request(
        tokens_in=tokens_in or 0,
        tokens_out=tokens_out,
        session=name,
        turn=NO_TURN,
        think_s=pause_s,
        model=label(attributes, "gen_ai.request.model"),
        body=body,
        line=line,
    )
    return at, request


def _spans(v: Values) -> Iterator[dict[str, Any]]:
    if v.get("resourceSpans") is None:
        yield from objects(v, "spans")
        return
    for resource in objects(v, "resourceSpans"):
        for scope in objects(resource, "scopeSpans"):
            yield from objects(scope, "spans") if scope.get("spans") is not None else ()


def _attributes(listed: object) -> dict[str, Any]:
    """By name; OTLP lists {"key": ..., "value": {"intValue": "12"}}, an int64 as text."""
    if listed is None or isinstance(listed, dict):
        return listed or {}
    pairs = objects({"attributes": listed}, "attributes")
    return {inside(pair, "key", str): _any_value(pair.get("value")) for pair in pairs}


def _any_value(value: object) -> Any:
    kind, inner = next(iter(value.items()), ("", None)) if isinstance(value, dict) else ("", None)
    if kind == "intValue" and isinstance(inner, str):
        if not (inner.isascii() and inner.removeprefix("-").isdecimal() and len(inner) <= 20):
            raise ValueError(f"intValue is {found(inner, 'a whole number of 64 bits')}")
        return int(inner)
    if kind == "arrayValue" and isinstance(inner, dict):
        return [_any_value(item) for item in (objects(inner, "values") if inner.get("values") is not None else ())]
    if kind == "kvlistValue" and isinstance(inner, dict):
        return _attributes(inner.get("values"))
    return inner


def _span_time(span: Values, unix: str, text: str) -> int | None:
    """ns since year 1, as date_time's; None where the span does not say it (0 in OTLP)."""
    value = span.get(unix)
    if value is None:
        return None if span.get(text) is None else date_time(span[text], text)
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 20:
        value = int(value)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{unix} is {found(value, 'nanoseconds since 1970')}")
    return value + _UNIX_NS if value else None


def _conversations(calls: list[tuple[Values, dict[str, Any]]]) -> list[str]:
    """Each call's session: as recorded, else by descent from another call; "" for a call that stands alone.

    Of several calls below one, the first continues its conversation and the others begin their own.
    """
    ids = [(_id(span, "trace_id", "traceId"), _id(span, "span_id", "spanId")) for span, _ in calls]
    parents = [
        (trace, _id(span, "parent_span_id", "parentSpanId")) for (trace, _), (span, _) in zip(ids, calls, strict=True)
    ]
    asked, names = set(parents), dict[tuple[str, str], str]()
    continued: set[tuple[str, str]] = set()
    sessions: list[str] = []
    for me, parent, (_, attributes) in zip(ids, parents, calls, strict=True):
        name = label(attributes, "gen_ai.conversation.id")
        if not name and parent in names and parent not in continued:
            continued.add(parent)
            name = names[parent]
        elif not name and me[1] and me in asked:
            name = "/".join(me)
        if name:
            names[me] = name
        sessions.append(name)
    return sessions


def _id(span: Values, *names: str) -> str:
    return next((value for name in names if isinstance(value := span.get(name), str)), "")


def _recorded_body(attributes: dict[str, Any]) -> dict[str, Any] | None:
    """The request's body, where all of it was recorded and is text: spans of tools or pictures tell lengths alone."""
    messages = _json(attributes.get("gen_ai.input.messages"))
    first = _json(attributes.get("gen_ai.system_instructions"))
    if not isinstance(messages, list) or not messages or attributes.get("gen_ai.tool.definitions") is not None:
        return None
    said: list[Any] = [] if first is None else [{"role": "system", "parts": first}]
    chat = []
    for message in [*said, *messages]:
        role = message.get("role") if isinstance(message, dict) else None
        text = _said(message) if isinstance(role, str) else None
        if text is None:
            return None
        chat.append({"role": role, "content": text})
    body: dict[str, Any] = {"messages": chat}
    for name in ("max_tokens", "temperature", "top_p"):
        if attributes.get(f"gen_ai.request.{name}") is not None:
            body[name] = attributes[f"gen_ai.request.{name}"]
    return body_of({"gen_ai.input.messages": body}, "gen_ai.input.messages")


def _json(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:  # cut at the exporter's limit, as a rule
        return None


def _said(message: dict[str, Any]) -> str | None:
    """The text of {"content": text} or {"parts": [{"type": "text", "content": text}]}; None: more than one text."""
    parts = message.get("parts")
    if isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], dict) and parts[0].get("type") == "text":
        message = parts[0]
    elif parts is not None:
        return None
    text = message.get("content")
    return text if isinstance(text, str) else None


# -- the table ---------------------------------------------------------------------------------------------------------

AGENTIC: dict[str, Format] = {
    "weka": Format(
        about="JSON of an agent's session: id, block_size, requests of t, type, in, out, hash_ids",
        keys=_WEKA,
        detect=lambda first: isinstance(first.get("requests"), list) and "block_size" in first,
        rows=bounded(_weka_rows),
        unit="s",
        note="calls below an agent and of shortened contexts begin at their recorded times, their shared blocks kept",
        opens_anew=True,
    ),
    "tracelab": Format(
        about="JSONL of TraceLab's rounds: session_id, round_index, input_tokens_total, timing_events",
        keys=_TRACELAB,
        detect=lambda first: set(_TRACELAB_MUST) <= first.keys(),
        rows=bounded(_tracelab_rows),
        unit=DATE_TIME,
        note="a shortened context is a conversation of its own; what it shares with the one before is not modelled",
        opens_anew=True,
    ),
    "otel": Format(
        about="JSON or JSONL of OpenTelemetry's gen_ai spans: resourceSpans, or trace_id and spans",
        keys=_OTEL,
        detect=lambda first: any(isinstance(first.get(name), list) for name in ("resourceSpans", "spans")),
        rows=bounded(_otel_rows),
        unit=DATE_TIME,
        note="spans that are no call of a model, or of which neither tokens nor text are known, are left out as empty",
        opens_anew=True,
    ),
}
