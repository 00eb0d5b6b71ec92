"""How each public trace format says a Request: FORMATS, found by keys that only they have. A row at a time, no files.

A row's reader gets the line's values by name and gives a Row; ValueError says what was found, what would be right.
"""

import re
from collections.abc import Callable, Mapping
from datetime import date
from decimal import Decimal
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

from llm_bench.request import LONGEST_S, MOST_TOKENS, Request

Values = Mapping[str, Any]
Row = tuple[int | None, Request]  # (its time in ns, on the trace's own scale; the request without at_s)
UNITS = {"s": 10**9, "ms": 10**6}  # ns
LATEST = 10**16  # of any unit: a larger time is a mistake, and would not fit in an int64 of ns
HEADER = "llm_bench_trace"  # first key of our own format's header line; its value is the version
HEADER_KEYS = {HEADER, "unit", "block_size", "turns", "about"}
TURNS = ("cumulative", "new")  # a turn's input length: the whole prompt, or what the user adds
NO_TURN = -1  # the row names no turn: its place in the file does
FAILED, EMPTY, BAD = "failed in the trace", "empty", "bad row"  # reasons of Trace.skipped


class Reading(NamedTuple):
    """What holds for every row of one file."""

    unit_ns: int
    block_size: int
    turns: str | None  # one of TURNS; None: to be found out


class Format(NamedTuple):
    """How one public trace format says a Request. A new format is a new row of FORMATS."""

    about: str
    keys: tuple[str, ...]  # every name that a row may have; another one is refused
    detect: Callable[[Values], bool]  # of the first line: its values by name (a CSV's column names, each None)
    row: Callable[[Values, Reading, int], Row]  # of (a line's values, how they are read, its number)
    unit: str  # of its times: a key of UNITS, or "date-time"
    block_size: int = 0
    header: bool = False  # a first JSON line says how the rows are meant


def found(value: object, right: str) -> str:
    shown = str(value) if isinstance(value, Decimal) else repr(value)
    return f"{shown[:200]}, expected {right}"


def count(values: Values, *names: str) -> int | None:
    """The whole number under the first of `names` that is there; the others are other names of the same thing."""
    value = values.get(names[0])
    if len(names) == 1 and type(value) is int and 0 <= value <= MOST_TOKENS:
        return value  # nearly every row's
    given = {name: values[name] for name in names if values.get(name) is not None}
    for name, value in given.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} is {found(value, 'a whole number, 0 or more')}")
        if value > MOST_TOKENS:
            raise ValueError(f"{name} is {found(value, f'{MOST_TOKENS:,} at most')}")
    if len(set(given.values())) > 1:
        raise ValueError(f"{given} name the same thing and differ; keep one of them")
    return next(iter(given.values()), None)


def _must(value: int | None, name: str) -> int:
    if value is None:
        raise ValueError(f"{name} is missing, expected a whole number, 0 or more")
    return value


def _nanoseconds(values: Values, name: str, unit_ns: int) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if type(value) not in (int, float, Decimal) or not 0 <= value < LATEST:
        raise ValueError(f"{name} is {found(value, 'a number, 0 or more')}")
    return value * unit_ns if type(value) is int else round(Decimal(value) * unit_ns)


def _seconds(values: Values, name: str, unit_ns: int = 10**9) -> float | None:
    ns = _nanoseconds(values, name, unit_ns)
    if ns is None:
        return None
    if ns > LONGEST_S * 10**9:
        raise ValueError(f"{name} is {found(values[name], '10 years at most')}")
    return ns / 1e9


def _sendable(values: Values, name: str) -> Any:
    """A value that goes into a body as it is: what JSON cannot say is found here, and not in the middle of a run."""
    try:
        orjson.dumps(values.get(name))
    except orjson.JSONEncodeError as e:
        raise ValueError(f"{name} cannot be sent as JSON: {e}") from None
    return values.get(name)


def _whole_numbers(values: Values, name: str) -> tuple[int, ...]:
    value = values.get(name)
    if value is None:
        return ()
    if type(value) is not list:
        raise ValueError(f"{name} is {str(value)[:60]}, expected a list of whole numbers")
    for x in value:
        if type(x) is not int:
            raise ValueError(f"{name} has {found(x, 'whole numbers only')}")
    return tuple(value)


def _token_ids(values: Values) -> tuple[int, ...]:
    ids = _whole_numbers(values, "prompt_token_ids")
    if ids and not 0 <= min(ids) <= max(ids) < 2**31:
        raise ValueError("prompt_token_ids has one below 0 or of more than 31 bits, expected ids of a vocabulary")
    return ids


def _text(values: Values, name: str) -> str:
    value = values.get(name)
    if value is None:
        return ""
    if type(value) not in (str, int):
        raise ValueError(f"{name} is {found(value, 'text')}")
    return str(value)


_SECOND = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)", re.A)
_REST = re.compile(r"(?:\.(\d{1,9}))?(?:Z|([+-])(\d\d):?(\d\d))?", re.A)
_SECOND_LENGTH = len("2023-11-16 18:15:46")


def _date_time(text: object) -> int:
    """Nanoseconds since year 1, UTC where no zone is said; exact, where datetime would stop at microseconds."""
    rest = _REST.fullmatch(text, _SECOND_LENGTH) if isinstance(text, str) else None
    if rest is None:
        raise _no_date_time(text)
    fraction, sign, zone_hours, zone_minutes = rest.groups("0")
    seconds = _whole_seconds(str(text)[:_SECOND_LENGTH])
    if sign != "0":
        seconds -= (1 if sign == "+" else -1) * (int(zone_hours) * 60 + int(zone_minutes)) * 60
    return seconds * 10**9 + int(fraction.ljust(9, "0"))


@lru_cache(maxsize=1024)  # rows of one second stand together
def _whole_seconds(text: str) -> int:
    match = _SECOND.fullmatch(text)
    if match is None:
        raise _no_date_time(text)
    year, month, day, hour, minute, second = map(int, match.groups())
    if hour > 23 or minute > 59 or second > 59:
        raise ValueError(f"TIMESTAMP is {found(text, 'an hour of a day')}")
    try:
        days = date(year, month, day).toordinal()
    except ValueError as e:
        raise ValueError(f"TIMESTAMP is {text!r}: {e}") from None
    return ((days * 24 + hour) * 60 + minute) * 60 + second


def _no_date_time(text: object) -> ValueError:
    return ValueError(f"TIMESTAMP is {found(text, 'a date and time like 2023-11-16 18:15:46.6805900')}")


def _azure_row(v: Values, reading: Reading, line: int) -> Row:
    tokens_in = _must(count(v, "ContextTokens"), "ContextTokens")
    tokens_out = _must(count(v, "GeneratedTokens"), "GeneratedTokens")
    return _date_time(v["TIMESTAMP"]), Request(tokens_in, tokens_out, line=line)


def _mooncake_row(v: Values, reading: Reading, line: int) -> Row:
    tokens_out = _must(count(v, "output_length", "output_tokens"), "output_length")
    hash_ids = _whole_numbers(v, "hash_ids")
    return _nanoseconds(v, "timestamp", reading.unit_ns), Request(
        tokens_in=_must(count(v, "input_length"), "input_length"),
        tokens_out=tokens_out,
        hash_ids=hash_ids,
        block_size=reading.block_size if hash_ids else 0,
        session=_text(v, "session_id"),
        turn=NO_TURN,
        think_s=_seconds(v, "delay", reading.unit_ns),
        line=line,
    )


def _own_row(v: Values, reading: Reading, line: int) -> Row:
    prompt, messages, token_ids = _sendable(v, "prompt"), _sendable(v, "messages"), _token_ids(v)
    given = [name for name in ("prompt", "messages", "prompt_token_ids") if v.get(name) is not None]
    if len(given) > 1:
        raise ValueError(f"both {given[0]} and {given[1]} are given, expected at most one of them")
    if prompt is not None and not isinstance(prompt, str):
        raise ValueError(f"prompt is {found(prompt, 'text')}")
    if messages is not None and not (isinstance(messages, list) and all(isinstance(m, dict) for m in messages)):
        raise ValueError(f"messages is {found(messages, 'a list of objects')}")
    extra = _sendable(v, "extra") or {}
    if not isinstance(extra, dict):
        raise ValueError(f"extra is {found(extra, 'an object')}")
    priority = v.get("priority") or 0
    if type(priority) is not int or not -(2**31) <= priority < 2**31:
        raise ValueError(f"priority is {found(priority, 'a whole number of 32 bits')}")
    tokens_in, turn = count(v, "input_length"), count(v, "turn")
    if tokens_in is None:  # only a text may leave its length to the target
        tokens_in = len(token_ids) if given else _must(None, "input_length")
    elif token_ids and tokens_in != len(token_ids):
        raise ValueError(f"input_length is {tokens_in}, but there are {len(token_ids)} prompt_token_ids")
    hash_ids = _whole_numbers(v, "hash_ids")
    return _nanoseconds(v, "timestamp", reading.unit_ns), Request(
        tokens_in=tokens_in,
        tokens_out=count(v, "output_length", "output_tokens"),
        prompt=prompt,
        messages=None if messages is None else tuple(messages),
        prompt_token_ids=token_ids or None,
        hash_ids=hash_ids,
        block_size=reading.block_size if hash_ids else 0,
        session=_text(v, "session_id"),
        turn=NO_TURN if turn is None else turn,
        think_s=_seconds(v, "delay", reading.unit_ns) if v.get("think_s") is None else _seconds(v, "think_s"),
        request_class=_text(v, "class"),
        priority=priority,
        cancel_after_s=_seconds(v, "cancel_after_s"),
        model=_text(v, "model"),
        extra=extra,
        line=line,
    )


_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE = ("timestamp", "input_length", "output_length", "output_tokens", "hash_ids", "session_id", "delay")
_OWN_TEXT = ("prompt", "messages", "prompt_token_ids")
_OWN = (*_MOONCAKE, *_OWN_TEXT, "turn", "think_s", "class", "priority", "cancel_after_s", "model", "extra")


FORMATS: dict[str, Format] = {
    "llm-bench": Format(
        about=f'JSONL, first line {{"{HEADER}": 1}}',
        keys=_OWN,
        detect=lambda first: HEADER in first,
        row=_own_row,
        unit="s",
        header=True,
    ),
    "azure-2023": Format(
        about=f"CSV of {', '.join(_AZURE)}",
        keys=_AZURE,
        detect=lambda first: set(_AZURE) <= first.keys(),
        row=_azure_row,
        unit="date-time",
    ),
    "mooncake": Format(
        about="JSONL of timestamp, input_length, output_length, hash_ids",
        keys=_MOONCAKE,
        detect=lambda first: {"timestamp", "input_length"} <= first.keys() <= set(_MOONCAKE),
        row=_mooncake_row,
        unit="ms",
        block_size=512,
    ),
}
