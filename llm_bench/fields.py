"""One value of one row of a trace: read strictly, or refused with what was found and what would be right."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import orjson

from llm_bench.request import LONGEST_S, MOST_TOKENS, Request

T = TypeVar("T")
_KINDS: dict[type, str] = {dict: "an object", list: "a list", str: "text"}
Values = Mapping[str, Any]
Row = tuple[int | None, Request]  # (its time in ns, on the trace's own scale; the request without at_s)
UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}  # ns
DATE_TIME = "date-time"  # the unit of times that are a date and a time of day
MOST_NAMED, LONGEST_NAME = 20, 60  # keys of a file in one sentence, characters of each
LATEST_NS = 10**28  # on a file's own scale; a larger time is a mistake, and arithmetic on it may take for ever
HEADER = "llm_bench_trace"  # first key of our own format's header line; its value is the version
HEADER_KEYS = {HEADER, "unit", "block_size", "turns", "about"}
TURNS = ("cumulative", "new")  # a turn's input length: the whole prompt, or what the user adds
NO_TURN = -1  # the row names no turn: its place in the file does
FAILED, EMPTY, BAD = "failed in the trace", "empty", "bad row"  # reasons of Trace.skipped
OF_BAD = "of a bad row's conversation"


@dataclass(frozen=True)
class Reading:
    """What holds for every row of one file, and what a format has to remember of the rows before."""

    unit_ns: int  # of a time; 0 where times are dates and times of day
    block_size: int
    turns: str | None  # one of TURNS; None: to be found out
    memory: dict[str, Any] = field(default_factory=dict)  # what the rows of each conversation tell those behind them
    known: dict[str, Any] = field(default_factory=dict)  # what else they tell; "dates": times were, whatever the unit


class Last(NamedTuple):
    """What a session's next request must hold to be its next turn."""

    part: int  # conversations that the session has had
    floor: int  # tokens of its prompt and answer
    end_ns: int | None  # of its answer, on the file's scale


Rows = Callable[[Values, Reading, int], list[Row]]  # of (an item's values, how they are read, its number)


class Format(NamedTuple):
    """How one public trace format says a Request. A new format is a new row of FORMATS."""

    about: str
    keys: tuple[str, ...]  # every name that a row may have; another one is refused
    detect: Callable[[Values], bool]  # of the first line: its values by name (a CSV's column names, each None)
    rows: Rows
    unit: str  # of its times: a key of UNITS, or DATE_TIME
    block_size: int = 0
    header: bool = False  # a first JSON line says how the rows are meant
    any_unit: bool = False  # dates as well as numbers, as the user says
    note: str = ""  # what its rows hold that is not modelled
    opens_anew: bool = (
        False  # lengths are of whole prompts; one that cannot hold what went before begins a conversation
    )


def shortened(names: Iterable[str]) -> list[str]:
    """Names that a file gives, for a message: the first of them, each cut, as a file may be one line of anything."""
    every = list(names)
    more = [f"... {len(every) - MOST_NAMED:,} more"] if len(every) > MOST_NAMED else []
    return [x if len(x) <= LONGEST_NAME else f"{x[:LONGEST_NAME]}..." for x in every[:MOST_NAMED]] + more


def found(value: object, right: str) -> str:
    return f"{_shown(value)[:200]}, expected {right}"


def _shown(value: object) -> str:
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False, default=lambda x: float(x) if isinstance(x, Decimal) else str(x))
    return str(value) if isinstance(value, Decimal) else repr(value)


def said(reading: Reading, what: str) -> None:
    """Count a statement on the rows: the reader gives it as a note, its count before it."""
    counts: Counter[str] = reading.known.setdefault("said", Counter())
    counts[what] += 1


def count(values: Values, *names: str) -> int | None:
    """The whole number under the first of `names` that is there; the others are other names of the same thing."""
    if len(names) == 1:
        value = values.get(names[0])
        if type(value) is int and 0 <= value <= MOST_TOKENS:
            return value
    given = {name: values[name] for name in names if values.get(name) is not None}
    for name, value in given.items():
        if isinstance(value, str) and _UNCLEAR.fullmatch(value):
            raise ValueError(f"{name} is {found(value, 'digits alone: its point may be meant to part thousands')}")
        if type(value) is not int or value < 0:
            digits = ", in digits alone" if isinstance(value, str) else ""
            raise ValueError(f"{name} is {found(value, f'a whole number, 0 or more{digits}')}")
        if value > MOST_TOKENS:
            raise ValueError(f"{name} is {found(value, f'{MOST_TOKENS:,} at most')}")
    if len(set(given.values())) > 1:
        both = " and ".join(f"{name} {value}" for name, value in given.items())
        raise ValueError(f"{both} name the same thing and differ; keep one of them")
    return next(iter(given.values()), None)


def must(values: Values, name: str, *others: str) -> int:
    """count, of a value that a row cannot be without."""
    value = values.get(name)
    if type(value) is int and 0 <= value <= MOST_TOKENS and not others:
        return value  # nearly every row's
    value = count(values, name, *others)
    if value is None:
        raise ValueError(f"{name} is missing, expected a whole number, 0 or more")
    return value


def nanoseconds(values: Values, name: str, unit_ns: int) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if type(value) not in (int, float, Decimal) or not 0 <= value < LATEST_NS // unit_ns:
        large = type(value) in (int, float, Decimal) and value > 0
        raise ValueError(f"{name} is {found(value, 'a time, fewer than 10^28 ns' if large else 'a number, 0 or more')}")
    return value * unit_ns if type(value) is int else round(Decimal(value) * unit_ns)


_WHOLE = re.compile(r"\d{1,40}\.0{0,40}", re.A)
_NUMBER = re.compile(r"\d{1,40}(?:\.\d{0,40})?(?:[eE][+-]?\d{1,2})?", re.A)


def numeric(values: Values, name: str) -> Values:
    """The values, with the number that a cell of text holds under `name` (82, 19440110.0) as one."""
    value = values.get(name)
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return {**values, name: Decimal(value)}
    return values


_UNCLEAR = re.compile(r"\d{1,3}(?:\.\d{3})+", re.A)  # 2.000 is 2 here and 2,000 there


def integral(values: Values, name: str) -> Values:
    """The values, with a whole number under `name` as an int: tables with gaps hold 374 as 374.0.

    Text that may be meant otherwise (2.000, 1e3) stays text, which no count is.
    """
    value = values.get(name)
    if isinstance(value, str) and _WHOLE.fullmatch(value) and not _UNCLEAR.fullmatch(value):
        value = Decimal(value)
    if isinstance(value, (float, Decimal)) and 0 <= value < LATEST_NS and value == int(value):
        return {**values, name: int(value)}
    return values


def seconds(values: Values, name: str, unit_ns: int = 10**9) -> float | None:
    ns = nanoseconds(values, name, unit_ns)
    if ns is None:
        return None
    if ns > LONGEST_S * 10**9:
        raise ValueError(f"{name} is {found(values[name], '10 years at most')}")
    return ns / 10**9


def sendable(values: Values, name: str) -> Any:
    """A value that goes into a body as it is, numbers as floats: what JSON cannot say is found here, before any run."""
    value = values.get(name)
    if value is None:
        return None
    try:
        return orjson.loads(orjson.dumps(value, default=_float))
    except (orjson.JSONEncodeError, orjson.JSONDecodeError) as e:
        raise ValueError(f"{name} cannot be sent as JSON: {e.__cause__ or e}") from None


def _float(value: object) -> float:
    if not isinstance(value, Decimal):
        raise TypeError(f"a {type(value).__name__} is not JSON")
    if math.isinf(float(value)):
        raise ValueError(f"{value} is larger than any float")
    return float(value)


def sendable_as(values: Values, name: str, kind: type[T]) -> T:
    inside(values, name, kind)
    kept: T = sendable(values, name)
    return kept


def body_of(values: Values, name: str) -> dict[str, Any]:
    body = sendable_as(values, name, dict)
    if not body:
        raise ValueError(f"{name} is {found(body, 'the object that was sent')}")
    return body


def inside(values: Values, name: str, kind: type[T]) -> T:
    """The object, list or text that must stand under `name`."""
    value = values.get(name)
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {found(value, _KINDS[kind])}")
    return value


def objects(values: Values, name: str) -> list[dict[str, Any]]:
    listed = inside(values, name, list)
    for item in listed:
        if not isinstance(item, dict):
            raise ValueError(f"{name} has {found(item, 'objects only')}")
    return listed


def whole_numbers(values: Values, name: str) -> tuple[int, ...]:
    value = values.get(name)
    if value is None:
        return ()
    if type(value) is not list:
        raise ValueError(f"{name} is {_shown(value)[:60]}, expected a list of whole numbers")
    for x in value:
        if type(x) is not int:
            raise ValueError(f"{name} has {found(x, 'whole numbers only')}")
    return tuple(value)


def conversation(
    reading: Reading, session: str, at_ns: int | None, end_ns: int | None, tokens: tuple[int, int]
) -> tuple[str, float | None]:
    """(the conversation that a session's next request is a turn of, the pause since the answer before it or None).

    For formats whose lengths are of whole prompts: one too short for the prompt and the answer before it (a history
    trimmed, or begun anew) opens SESSION/2, SESSION/3 ... at its own time, as its tokens are all that is known.
    """
    last: Last | None = reading.memory.get(session)
    fits = last is None or reading.turns == "new" or tokens[0] >= last.floor
    part = 1 if last is None else last.part + (not fits)
    reading.memory[session] = Last(part, sum(tokens), end_ns)
    pause_s = None
    if last is not None and fits and at_ns is not None and last.end_ns is not None and at_ns >= last.end_ns:
        pause_s = (at_ns - last.end_ns) / 10**9
    return (session if part == 1 else f"{session}/{part}"), pause_s


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


def date_time(text: object, name: str = "TIMESTAMP") -> int:
    """Nanoseconds since year 1, UTC where no zone is said; exact, where datetime would stop at microseconds."""
    try:
        if not isinstance(text, str):
            raise _no_date_time(text)
        rest = _REST.fullmatch(text, _SECOND_LENGTH)
        if rest is None:
            raise _no_date_time(text)
        fraction, sign, zone_hours, zone_minutes = rest.groups("0")
        ns = _whole_seconds(text[:_SECOND_LENGTH])
    except ValueError as e:
        raise ValueError(f"{name} is {e}") from None
    if sign != "0":
        ns -= (1 if sign == "+" else -1) * (int(zone_hours) * 60 + int(zone_minutes)) * 60 * 10**9
    return ns + int(fraction.ljust(9, "0"))


def seven_decimals(text: object, name: str) -> int:
    """date_time, faster where seven decimals and no zone are given, as in each row of the largest traces."""
    if type(text) is str and len(text) == _SECOND_LENGTH + 8 and text[16] == ":" and text[19] == ".":
        ticks = text[17:19] + text[20:]  # of 100 ns
        if ticks.isdecimal() and ticks.isascii() and ticks < "60":
            try:
                return _whole_seconds(text[:17] + "00") + int(ticks) * 100
            except ValueError:
                pass  # of the whole text, as it is told below
    return date_time(text, name)


@lru_cache(maxsize=1024)  # rows of one second, or minute, stand together
def _whole_seconds(text: str) -> int:
    match = _SECOND.fullmatch(text)
    if match is None:
        raise _no_date_time(text)
    year, month, day, hour, minute, second = map(int, match.groups())
    if hour > 23 or minute > 59 or second > 59:
        raise ValueError(found(text, "an hour of a day"))
    try:
        days = date(year, month, day).toordinal()
    except ValueError as e:
        raise ValueError(f"{text!r}: {e}") from None
    return (((days * 24 + hour) * 60 + minute) * 60 + second) * 10**9


def _no_date_time(text: object) -> ValueError:
    return ValueError(found(text, "a date and time like 2023-11-16 18:15:46.6805900"))


def when(values: Values, name: str, unit_ns: int) -> int | None:
    """A time as a number of units, in text or not, or, where unit_ns is 0, as a date and time of day."""
    if unit_ns:
        return nanoseconds(numeric(values, name), name, unit_ns)
    return None if values.get(name) is None else date_time(values[name], name)


def bounded(rows: Rows) -> Rows:
    """`rows`, with a document nested too deeply for a walk over it refused like any other."""

    def checked(values: Values, reading: Reading, line: int) -> list[Row]:
        try:
            return rows(values, reading, line)
        except RecursionError:
            raise ValueError("JSON nested too deeply") from None

    return checked
