"""One value of one row of a trace: read strictly, or refused with what was found and what would be right."""

import re
from collections.abc import Mapping
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


def must(value: int | None, name: str) -> int:
    if value is None:
        raise ValueError(f"{name} is missing, expected a whole number, 0 or more")
    return value


def nanoseconds(values: Values, name: str, unit_ns: int) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if type(value) not in (int, float, Decimal) or not 0 <= value < LATEST:
        raise ValueError(f"{name} is {found(value, 'a number, 0 or more')}")
    return value * unit_ns if type(value) is int else round(Decimal(value) * unit_ns)


def seconds(values: Values, name: str, unit_ns: int = 10**9) -> float | None:
    ns = nanoseconds(values, name, unit_ns)
    if ns is None:
        return None
    if ns > LONGEST_S * 10**9:
        raise ValueError(f"{name} is {found(values[name], '10 years at most')}")
    return ns / 1e9


def sendable(values: Values, name: str) -> Any:
    """A value that goes into a body as it is: what JSON cannot say is found here, and not in the middle of a run."""
    try:
        orjson.dumps(values.get(name))
    except orjson.JSONEncodeError as e:
        raise ValueError(f"{name} cannot be sent as JSON: {e}") from None
    return values.get(name)


def whole_numbers(values: Values, name: str) -> tuple[int, ...]:
    value = values.get(name)
    if value is None:
        return ()
    if type(value) is not list:
        raise ValueError(f"{name} is {str(value)[:60]}, expected a list of whole numbers")
    for x in value:
        if type(x) is not int:
            raise ValueError(f"{name} has {found(x, 'whole numbers only')}")
    return tuple(value)


def vocabulary_ids(values: Values) -> tuple[int, ...]:
    ids = whole_numbers(values, "prompt_token_ids")
    if ids and not 0 <= min(ids) <= max(ids) < 2**31:
        raise ValueError("prompt_token_ids has one below 0 or of more than 31 bits, expected ids of a vocabulary")
    return ids


def label(values: Values, name: str) -> str:
    value = values.get(name)
    if value is None:
        return ""
    if type(value) not in (str, int):
        raise ValueError(f"{name} is {found(value, 'text')}")
    return str(value)


_SECOND = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)", re.A)
_REST = re.compile(r"(?:\.(\d{1,9}))?(?:Z|([+-])(\d\d):?(\d\d))?", re.A)
_SECOND_LENGTH = len("2023-11-16 18:15:46")


def date_time(text: object) -> int:
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
