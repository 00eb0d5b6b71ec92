"""How each public trace format says its Requests: FORMATS, found by keys that only they have. No files.

A format's reader gets an item's values by name and gives its Rows; ValueError says what was found, what would be right.
"""

from llm_bench.agentic import AGENTIC
from llm_bench.captured import CAPTURED
from llm_bench.fields import (
    DATE_TIME,
    HEADER,
    NO_TURN,
    Format,
    Reading,
    Row,
    Values,
    conversation,
    count,
    found,
    integral,
    label,
    must,
    nanoseconds,
    numeric,
    seconds,
    sendable,
    seven_decimals,
    vocabulary_ids,
    when,
    whole_numbers,
)
from llm_bench.request import Request

# -- Azure (Azure/AzurePublicDataset: AzureLLMInferenceDataset2023.md, ...2024.md, AzureLMMInferenceDataset2025.md) ---

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_AZURE_IMAGES = ("TIMESTAMP", "NumImages", "ContextTokens", "GeneratedTokens")


def _azure_rows(v: Values, reading: Reading, line: int) -> list[Row]:
    tokens_in = must(v, "ContextTokens")
    tokens_out = must(v, "GeneratedTokens")
    return [(seven_decimals(v.get("TIMESTAMP"), "TIMESTAMP"), Request(tokens_in, tokens_out, line=line))]


def _azure_images_rows(v: Values, reading: Reading, line: int) -> list[Row]:
    must(v, "NumImages")
    return _azure_rows(v, reading, line)


# -- BurstGPT (HPMLL/BurstGPT; arXiv 2401.17644) ----------------------------------------------------------------------

_BURSTGPT_TOKENS = ("Request tokens", "Response tokens", "Total tokens")
_BURSTGPT = ("Timestamp", "Session ID", "Elapsed time", "Model", *_BURSTGPT_TOKENS, "Log Type")


def _sums(v: Values, *names: str) -> tuple[int, int]:
    """Prompt and answer tokens; the third name's value, where it is given, must be their sum."""
    tokens_in, tokens_out, total = (
        must(v, names[0]),
        must(v, names[1]),
        count(v, names[2]),
    )
    if total not in (None, tokens_in + tokens_out):
        raise ValueError(f"{names[2]} is {total}, expected {tokens_in} + {tokens_out}")
    return tokens_in, tokens_out


def _burstgpt_rows(v: Values, reading: Reading, line: int) -> list[Row]:
    """Elapsed time is how long the answer took (v3), so that the pause before a conversation's next turn is known."""
    tokens_in, tokens_out = _sums(v, *_BURSTGPT_TOKENS)
    at = when(v, "Timestamp", reading.unit_ns)
    elapsed = when(v, "Elapsed time", reading.unit_ns)
    session, think_s = label(v, "Session ID"), None
    if session and tokens_in and tokens_out:  # a failed request is no turn
        end = None if at is None or elapsed is None else at + elapsed
        session, think_s = conversation(reading, session, at, end, (tokens_in, tokens_out))
    kind = label(v, "Model")
    request = Request(
        tokens_in, tokens_out, session=session, turn=NO_TURN, think_s=think_s, request_class=kind, line=line
    )
    return [(at, request)]


# -- Mooncake (kvcache-ai/Mooncake: FAST25-release/traces) ------------------------------------------------------------

_MOONCAKE = ("timestamp", "input_length", "output_length", "output_tokens", "hash_ids", "session_id", "delay")


def _is_mooncake(first: Values) -> bool:
    if not {"timestamp", "input_length"} <= first.keys() <= set(_MOONCAKE):
        return False
    return not isinstance(first["timestamp"], str) and not isinstance(first.get("hash_ids"), dict)


def _mooncake_rows(v: Values, reading: Reading, line: int) -> list[Row]:
    tokens_out = must(v, "output_length", "output_tokens")
    hash_ids = whole_numbers(v, "hash_ids")
    request = Request(
        tokens_in=must(v, "input_length"),
        tokens_out=tokens_out,
        hash_ids=hash_ids,
        block_size=reading.block_size if hash_ids else 0,
        session=label(v, "session_id"),
        turn=NO_TURN,
        think_s=seconds(v, "delay", reading.unit_ns),
        line=line,
    )
    return [(nanoseconds(v, "timestamp", reading.unit_ns), request)]


# -- Qwen-Bailian (alibaba-edu/qwen-bailian-usagetraces-anon: README.md, docs/qa-context-growth-pattern.md) -----------

_BAILIAN_CHAT = ("chat_id", "parent_chat_id")
_BAILIAN = (*_BAILIAN_CHAT, "timestamp", "input_length", "output_length", "type", "turn", "hash_ids")


def _bailian_rows(v: Values, reading: Reading, line: int) -> list[Row]:
    """A conversation has the name of its first chat. A parent has one next turn: a second child (the same question once
    more) and a prompt too short to hold what went before it (thinking is stripped) open one of their own.
    """
    chat, parent = label(v, "chat_id"), label(v, "parent_chat_id")
    if not chat or not parent:
        raise ValueError(f"chat_id {chat!r}, parent_chat_id {parent!r}, expected both; -1 is no parent")
    tokens_in, tokens_out = (
        must(v, "input_length"),
        must(v, "output_length"),
    )
    session, floor = reading.memory.pop(parent, (chat, 0))
    if tokens_in < floor and reading.turns != "new":
        session = chat
    reading.memory[chat] = (session, tokens_in + tokens_out)
    count(v, "turn")
    hash_ids = whole_numbers(v, "hash_ids")
    request = Request(
        tokens_in,
        tokens_out,
        hash_ids=hash_ids,
        block_size=reading.block_size if hash_ids else 0,
        session=session,
        turn=NO_TURN,
        request_class=label(v, "type"),
        line=line,
    )
    return [(nanoseconds(v, "timestamp", reading.unit_ns), request)]


# -- RAGPulse (flashserve/RAGPulse; arXiv 2511.12979) -----------------------------------------------------------------

_RAGPULSE = ("timestamp", "input_length", "output_length", "hash_ids", "session_id")
_RAGPULSE_PARTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")


def _is_ragpulse(first: Values) -> bool:
    return first.keys() <= set(_RAGPULSE) and isinstance(first.get("hash_ids"), dict)


def _ragpulse_rows(v: Values, reading: Reading, line: int) -> list[Row]:
    """The ids are of components, whose lengths stand in other files: no block size says how much of a prompt is shared.
    Each prompt is whole, its passages fetched anew: what shares a session is no growing history, but one client's.
    """
    ids = v.get("hash_ids")
    if not isinstance(ids, dict) or not ids.keys() <= set(_RAGPULSE_PARTS):
        raise ValueError(f"hash_ids is {found(ids, 'an object of ' + ', '.join(_RAGPULSE_PARTS))}")
    for name in ids:
        whole_numbers(ids, name)
    request = Request(
        must(v, "input_length"),
        must(v, "output_length"),
        client=label(v, "session_id"),
        line=line,
    )
    return [(nanoseconds(numeric(v, "timestamp"), "timestamp", reading.unit_ns), request)]


# -- lengths without times (project-etalon/etalon, microsoft/vidur: data/processed_traces) ----------------------------

_LENGTHS_TOKENS = ("num_prefill_tokens", "num_decode_tokens", "num_total_tokens")
_LENGTHS = (*_LENGTHS_TOKENS, "pd_ratio")


def _lengths_rows(v: Values, reading: Reading, line: int) -> list[Row]:
    return [(None, Request(*_sums(v, *_LENGTHS_TOKENS), line=line))]


# -- any table, by a map of its columns -------------------------------------------------------------------------------

PLAIN = ("at", "in", "out", "prompt", "session", "think", "class", "client", "model")  # what --map gives columns to


def _plain_rows(v: Values, reading: Reading, line: int) -> list[Row]:
    """A number may be text or have a fraction of nothing (374.0), as tables that went through other tools have them."""
    v = integral(integral(integral(integral(v, "in"), "out"), "session"), "client")
    tokens_in, prompt = count(v, "in"), v.get("prompt")
    if prompt is not None and (not isinstance(prompt, str) or not prompt):
        raise ValueError(f"prompt is {found(prompt, 'text')}")
    request = Request(
        must(v, "in") if prompt is None else tokens_in or 0,
        count(v, "out"),
        prompt=prompt,
        session=label(v, "session"),
        turn=NO_TURN,
        think_s=seconds(numeric(v, "think"), "think"),
        request_class=label(v, "class"),
        client=label(v, "client"),
        model=label(v, "model"),
        line=line,
    )
    return [(when(v, "at", reading.unit_ns), request)]


# -- our own ----------------------------------------------------------------------------------------------------------

_OWN_TEXT = ("prompt", "messages", "prompt_token_ids", "body")
_OWN_REST = ("turn", "think_s", "class", "client", "priority", "cancel_after_s", "model", "extra")
_OWN = (*_MOONCAKE, *_OWN_TEXT, *_OWN_REST)


def _own_rows(v: Values, reading: Reading, line: int) -> list[Row]:
    prompt, messages, token_ids, body = (
        sendable(v, "prompt"),
        sendable(v, "messages"),
        vocabulary_ids(v),
        sendable(v, "body"),
    )
    given = [name for name in _OWN_TEXT if v.get(name) is not None]
    if len(given) > 1:
        raise ValueError(f"both {given[0]} and {given[1]} are given, expected at most one of them")
    if prompt is not None and not isinstance(prompt, str):
        raise ValueError(f"prompt is {found(prompt, 'text')}")
    if messages is not None and not (isinstance(messages, list) and all(isinstance(m, dict) for m in messages)):
        raise ValueError(f"messages is {found(messages, 'a list of objects')}")
    if body is not None and not isinstance(body, dict):
        raise ValueError(f"body is {found(body, 'an object')}")
    extra = sendable(v, "extra") or {}
    if not isinstance(extra, dict):
        raise ValueError(f"extra is {found(extra, 'an object')}")
    priority = v.get("priority") or 0
    if type(priority) is not int or not -(2**31) <= priority < 2**31:
        raise ValueError(f"priority is {found(priority, 'a whole number of 32 bits')}")
    tokens_in, turn = count(v, "input_length"), count(v, "turn")
    if tokens_in is None:  # only a text may leave its length to the target
        tokens_in = len(token_ids) if given else must(v, "input_length")
    elif token_ids and tokens_in != len(token_ids):
        raise ValueError(f"input_length is {tokens_in}, but there are {len(token_ids)} prompt_token_ids")
    hash_ids = whole_numbers(v, "hash_ids")
    request = Request(
        tokens_in=tokens_in,
        tokens_out=count(v, "output_length", "output_tokens"),
        prompt=prompt,
        messages=None if messages is None else tuple(messages),
        prompt_token_ids=token_ids or None,
        body=body,
        hash_ids=hash_ids,
        block_size=reading.block_size if hash_ids else 0,
        session=label(v, "session_id"),
        turn=NO_TURN if turn is None else turn,
        think_s=seconds(v, "delay", reading.unit_ns) if v.get("think_s") is None else seconds(v, "think_s"),
        request_class=label(v, "class"),
        client=label(v, "client"),
        priority=priority,
        cancel_after_s=seconds(v, "cancel_after_s"),
        model=label(v, "model"),
        extra=extra,
        line=line,
    )
    return [(nanoseconds(v, "timestamp", reading.unit_ns), request)]


FORMATS: dict[str, Format] = {
    "llm-bench": Format(
        about=f'JSONL, first line {{"{HEADER}": 1}}',
        keys=_OWN,
        detect=lambda first: HEADER in first,
        rows=_own_rows,
        unit="s",
        header=True,
    ),
    "azure": Format(
        about=f"CSV of {', '.join(_AZURE)}: Azure 2023 and 2024",
        keys=_AZURE,
        detect=lambda first: set(_AZURE) <= first.keys() and "NumImages" not in first,
        rows=_azure_rows,
        unit=DATE_TIME,
    ),
    "azure-2025-multimodal": Format(
        about=f"CSV of {', '.join(_AZURE_IMAGES)}",
        keys=_AZURE_IMAGES,
        detect=lambda first: set(_AZURE_IMAGES) <= first.keys(),
        rows=_azure_images_rows,
        unit=DATE_TIME,
        note="images are not sent: a request is a text of ContextTokens tokens, however many images its row has",
    ),
    "burstgpt": Format(
        about="CSV of Timestamp, Model, Request tokens, Response tokens, ...; v3 with Session ID, Elapsed time",
        keys=_BURSTGPT,
        detect=lambda first: {"Timestamp", "Request tokens", "Response tokens"} <= first.keys(),
        rows=_burstgpt_rows,
        unit="s",
        opens_anew=True,
    ),
    "mooncake": Format(
        about="JSONL of timestamp, input_length, output_length, hash_ids",
        keys=_MOONCAKE,
        detect=_is_mooncake,
        rows=_mooncake_rows,
        unit="ms",
        block_size=512,
    ),
    "bailian": Format(
        about="JSONL of chat_id, parent_chat_id, timestamp, input_length, output_length, type, turn, hash_ids",
        keys=_BAILIAN,
        detect=lambda first: set(_BAILIAN_CHAT) <= first.keys(),
        rows=_bailian_rows,
        unit="s",
        block_size=16,
        opens_anew=True,
    ),
    "ragpulse": Format(
        about="JSONL of timestamp (text), input_length, output_length, session_id, hash_ids (an object of lists)",
        keys=_RAGPULSE,
        detect=_is_ragpulse,
        rows=_ragpulse_rows,
        unit="s",
        note="lengths and times are replayed, a session_id is kept as the client; shared components (system prompt, "
        "passages, history) are not modelled, as their lengths stand in other files",
    ),
    "lengths": Format(
        about="CSV of num_prefill_tokens, num_decode_tokens; no times",
        keys=_LENGTHS,
        detect=lambda first: set(_LENGTHS_TOKENS[:2]) <= first.keys(),
        rows=_lengths_rows,
        unit="s",
    ),
    "plain": Format(
        about=f"CSV, Parquet or JSONL of any of {', '.join(PLAIN)}, or with a map from other names",
        keys=PLAIN,
        detect=lambda first: "in" in first and first.keys() <= set(PLAIN),
        rows=_plain_rows,
        unit="s",
        any_unit=True,
    ),
    **CAPTURED,
    **AGENTIC,
}
ALIASES = {"azure-2023": "azure", "azure-2024": "azure"}  # other names by which a format may be asked for
