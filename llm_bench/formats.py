"""How each public trace format says its Requests: FORMATS, found by keys that only they have. No files.

A format's reader gets a line's values by name and gives its Rows; ValueError says what was found, what would be right.
"""

from collections.abc import Callable
from typing import NamedTuple

from llm_bench.fields import (
    HEADER,
    NO_TURN,
    Reading,
    Row,
    Values,
    count,
    date_time,
    found,
    label,
    must,
    nanoseconds,
    seconds,
    sendable,
    vocabulary_ids,
    whole_numbers,
)
from llm_bench.request import Request


class Format(NamedTuple):
    """How one public trace format says a Request. A new format is a new row of FORMATS."""

    about: str
    keys: tuple[str, ...]  # every name that a row may have; another one is refused
    detect: Callable[[Values], bool]  # of the first line: its values by name (a CSV's column names, each None)
    rows: Callable[[Values, Reading, int], list[Row]]  # of (a line's values, how they are read, its number)
    unit: str  # of its times: a key of UNITS, or "date-time"
    block_size: int = 0
    header: bool = False  # a first JSON line says how the rows are meant


def _azure_rows(v: Values, reading: Reading, line: int) -> list[Row]:
    tokens_in = must(count(v, "ContextTokens"), "ContextTokens")
    tokens_out = must(count(v, "GeneratedTokens"), "GeneratedTokens")
    return [(date_time(v["TIMESTAMP"]), Request(tokens_in, tokens_out, line=line))]


def _mooncake_rows(v: Values, reading: Reading, line: int) -> list[Row]:
    tokens_out = must(count(v, "output_length", "output_tokens"), "output_length")
    hash_ids = whole_numbers(v, "hash_ids")
    request = Request(
        tokens_in=must(count(v, "input_length"), "input_length"),
        tokens_out=tokens_out,
        hash_ids=hash_ids,
        block_size=reading.block_size if hash_ids else 0,
        session=label(v, "session_id"),
        turn=NO_TURN,
        think_s=seconds(v, "delay", reading.unit_ns),
        line=line,
    )
    return [(nanoseconds(v, "timestamp", reading.unit_ns), request)]


def _own_rows(v: Values, reading: Reading, line: int) -> list[Row]:
    prompt, messages, token_ids = sendable(v, "prompt"), sendable(v, "messages"), vocabulary_ids(v)
    given = [name for name in ("prompt", "messages", "prompt_token_ids") if v.get(name) is not None]
    if len(given) > 1:
        raise ValueError(f"both {given[0]} and {given[1]} are given, expected at most one of them")
    if prompt is not None and not isinstance(prompt, str):
        raise ValueError(f"prompt is {found(prompt, 'text')}")
    if messages is not None and not (isinstance(messages, list) and all(isinstance(m, dict) for m in messages)):
        raise ValueError(f"messages is {found(messages, 'a list of objects')}")
    extra = sendable(v, "extra") or {}
    if not isinstance(extra, dict):
        raise ValueError(f"extra is {found(extra, 'an object')}")
    priority = v.get("priority") or 0
    if type(priority) is not int or not -(2**31) <= priority < 2**31:
        raise ValueError(f"priority is {found(priority, 'a whole number of 32 bits')}")
    tokens_in, turn = count(v, "input_length"), count(v, "turn")
    if tokens_in is None:  # only a text may leave its length to the target
        tokens_in = len(token_ids) if given else must(None, "input_length")
    elif token_ids and tokens_in != len(token_ids):
        raise ValueError(f"input_length is {tokens_in}, but there are {len(token_ids)} prompt_token_ids")
    hash_ids = whole_numbers(v, "hash_ids")
    request = Request(
        tokens_in=tokens_in,
        tokens_out=count(v, "output_length", "output_tokens"),
        prompt=prompt,
        messages=None if messages is None else tuple(messages),
        prompt_token_ids=token_ids or None,
        hash_ids=hash_ids,
        block_size=reading.block_size if hash_ids else 0,
        session=label(v, "session_id"),
        turn=NO_TURN if turn is None else turn,
        think_s=seconds(v, "delay", reading.unit_ns) if v.get("think_s") is None else seconds(v, "think_s"),
        request_class=label(v, "class"),
        priority=priority,
        cancel_after_s=seconds(v, "cancel_after_s"),
        model=label(v, "model"),
        extra=extra,
        line=line,
    )
    return [(nanoseconds(v, "timestamp", reading.unit_ns), request)]


_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE = ("timestamp", "input_length", "output_length", "output_tokens", "hash_ids", "session_id", "delay")
_OWN_TEXT = ("prompt", "messages", "prompt_token_ids")
_OWN = (*_MOONCAKE, *_OWN_TEXT, "turn", "think_s", "class", "priority", "cancel_after_s", "model", "extra")


FORMATS: dict[str, Format] = {
    "llm-bench": Format(
        about=f'JSONL, first line {{"{HEADER}": 1}}',
        keys=_OWN,
        detect=lambda first: HEADER in first,
        rows=_own_rows,
        unit="s",
        header=True,
    ),
    "azure-2023": Format(
        about=f"CSV of {', '.join(_AZURE)}",
        keys=_AZURE,
        detect=lambda first: set(_AZURE) <= first.keys(),
        rows=_azure_rows,
        unit="date-time",
    ),
    "mooncake": Format(
        about="JSONL of timestamp, input_length, output_length, hash_ids",
        keys=_MOONCAKE,
        detect=lambda first: {"timestamp", "input_length"} <= first.keys() <= set(_MOONCAKE),
        rows=_mooncake_rows,
        unit="ms",
        block_size=512,
    ),
}
