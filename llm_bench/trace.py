"""Request: one row of work. FORMATS: how each public trace format says it. read(path): a Trace, checked row by row."""

import csv
import gzip
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from decimal import Decimal
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

from llm_bench.errors import BenchError


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace. Exactly one of prompt, messages, prompt_token_ids may be given; none: text is made up."""

    tokens_in: int  # prompt tokens planned, chat template not counted; cumulative over a session's turns
    tokens_out: int | None  # answer tokens asked; None: the server decides
    at_s: float | None = None  # seconds since the trace's first request
    prompt: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    hash_ids: tuple[int, ...] = ()  # one id per block of the prompt: equal ids in equal places are equal text
    block_size: int = 0  # tokens of a block, 0 without hash_ids
    session: str = ""  # turns of one conversation share it; "" is a conversation of one turn
    turn: int = 0
    tokens_new: int = 0  # of tokens_in, what this turn's user adds (turn > 0 only)
    think_s: float | None = None  # pause after the end of the turn before; None: not before at_s
    request_class: str = ""
    priority: int = 0
    cancel_after_s: float | None = None  # the client leaves this long after sending
    model: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)  # put into the body as it stands
    line: int = 0  # of the trace file, for errors


class Trace(NamedTuple):
    """What a file held, and what its reader has to say about it."""

    requests: list[Request]
    format: str
    path: str
    notes: list[str]  # statements for the user: unit, resolution, reading used, "prompts are unique ..."
    skipped: dict[str, int]  # reason -> rows left out, each counted in the report


# -- one row ----------------------------------------------------------------------------------------------------------
# A row's reader gets the line's values by name and gives a Row. ValueError: what was found, what would be right.

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
    row: Callable[[Values, Reading], Row]
    unit: str  # of its times: a key of UNITS, or "date-time"
    block_size: int = 0
    header: bool = False  # a first JSON line says how the rows are meant


def _found(value: object, right: str) -> str:
    return f"{value!r}, expected {right}"


def _count(values: Values, *names: str) -> int | None:
    """The whole number under the first of `names` that is there; the others are other names of the same thing."""
    given = {name: values[name] for name in names if values.get(name) is not None}
    for name, value in given.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} is {_found(value, 'a whole number, 0 or more')}")
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
        raise ValueError(f"{name} is {_found(value, 'a number, 0 or more')}")
    return round(Decimal(value) * unit_ns)


def _seconds(values: Values, name: str, unit_ns: int = 10**9) -> float | None:
    ns = _nanoseconds(values, name, unit_ns)
    return None if ns is None else ns / 1e9


def _whole_numbers(values: Values, name: str) -> tuple[int, ...]:
    value = values.get(name)
    if value is None:
        return ()
    if type(value) is not list or any(type(x) is not int for x in value):
        raise ValueError(f"{name} is {str(value)[:60]}, expected a list of whole numbers")
    return tuple(value)


def _text(values: Values, name: str) -> str:
    value = values.get(name)
    if value is None:
        return ""
    if type(value) not in (str, int):
        raise ValueError(f"{name} is {_found(value, 'text')}")
    return str(value)


_STAMP = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:(Z)|([+-])(\d\d):?(\d\d))?", re.A)


def _date_time(text: object) -> int:
    """Nanoseconds since year 1, UTC where no zone is said; exact, where datetime would stop at microseconds."""
    match = _STAMP.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"TIMESTAMP is {_found(text, 'a date and time like 2023-11-16 18:15:46.6805900')}")
    year, month, day, hour, minute, second = map(int, match.groups()[:6])
    fraction, _, sign, zone_hours, zone_minutes = match.groups()[6:]
    if hour > 23 or minute > 59 or second > 59:
        raise ValueError(f"TIMESTAMP is {_found(text, 'an hour of a day')}")
    try:
        days = date(year, month, day).toordinal()
    except ValueError as e:
        raise ValueError(f"TIMESTAMP is {text!r}: {e}") from None
    seconds = ((days * 24 + hour) * 60 + minute) * 60 + second
    if sign:
        seconds -= (1 if sign == "+" else -1) * (int(zone_hours) * 60 + int(zone_minutes)) * 60
    return seconds * 10**9 + int((fraction or "").ljust(9, "0"))


def _azure_row(v: Values, reading: Reading) -> Row:
    tokens_in, tokens_out = _count(v, "ContextTokens"), _count(v, "GeneratedTokens")
    return _date_time(v["TIMESTAMP"]), Request(_must(tokens_in, "ContextTokens"), _must(tokens_out, "GeneratedTokens"))


def _mooncake_row(v: Values, reading: Reading) -> Row:
    tokens_out = _must(_count(v, "output_length", "output_tokens"), "output_length")
    hash_ids = _whole_numbers(v, "hash_ids")
    return _nanoseconds(v, "timestamp", reading.unit_ns), Request(
        tokens_in=_must(_count(v, "input_length"), "input_length"),
        tokens_out=tokens_out,
        hash_ids=hash_ids,
        block_size=reading.block_size if hash_ids else 0,
        session=_text(v, "session_id"),
        turn=NO_TURN,
        think_s=_seconds(v, "delay", reading.unit_ns),
    )


def _own_row(v: Values, reading: Reading) -> Row:
    prompt, messages, token_ids = v.get("prompt"), v.get("messages"), _whole_numbers(v, "prompt_token_ids")
    given = [name for name in ("prompt", "messages", "prompt_token_ids") if v.get(name) is not None]
    if len(given) > 1:
        raise ValueError(f"both {given[0]} and {given[1]} are given, expected at most one of them")
    if prompt is not None and not isinstance(prompt, str):
        raise ValueError(f"prompt is {_found(prompt, 'text')}")
    if messages is not None and not (isinstance(messages, list) and all(isinstance(m, dict) for m in messages)):
        raise ValueError(f"messages is {_found(messages, 'a list of objects')}")
    extra = v.get("extra") or {}
    if not isinstance(extra, dict):
        raise ValueError(f"extra is {_found(extra, 'an object')}")
    priority = v.get("priority") or 0
    if type(priority) is not int:
        raise ValueError(f"priority is {_found(priority, 'a whole number')}")
    tokens_in, turn = _count(v, "input_length"), _count(v, "turn")
    if tokens_in is None:  # only a text may leave its length to the target
        tokens_in = len(token_ids) if given else _must(None, "input_length")
    elif token_ids and tokens_in != len(token_ids):
        raise ValueError(f"input_length is {tokens_in}, but there are {len(token_ids)} prompt_token_ids")
    hash_ids = _whole_numbers(v, "hash_ids")
    return _nanoseconds(v, "timestamp", reading.unit_ns), Request(
        tokens_in=tokens_in,
        tokens_out=_count(v, "output_length", "output_tokens"),
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


# -- one file ---------------------------------------------------------------------------------------------------------


def _open(path: Path, mode: str) -> IO[bytes]:
    return gzip.open(path, mode) if path.suffix == ".gz" else path.open(mode)  # type: ignore[return-value]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, text) of each line that is not blank; LF or CRLF, a BOM or none, the last line ended or not."""
    try:
        with _open(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    yield number, text
    except UnicodeDecodeError as e:
        raise BenchError(f"{path}:{number}: byte {e.start} of the line is not UTF-8") from None
    except (OSError, EOFError, zlib.error) as e:
        raise BenchError(f"{path}: cannot be read: {getattr(e, 'strerror', None) or e}") from None


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON number, expected a number or null")


def _json_values(text: str) -> Values:
    """An object's values. A timestamp keeps all its digits: as a float, seconds since 1970 are good to 0.2 µs only."""
    try:
        values = json.loads(text, parse_constant=_no_number)
        if isinstance(values, dict) and isinstance(values.get("timestamp"), float):
            values["timestamp"] = json.loads(text, parse_float=Decimal)["timestamp"]
    except json.JSONDecodeError as e:
        raise ValueError(f"not JSON: {e.msg} at column {e.colno}") from None
    if not isinstance(values, dict):
        raise ValueError(f"a JSON {type(values).__name__}, expected an object")
    return values


def _cells(text: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([text]))]
    except csv.Error as e:
        raise ValueError(f"no line of CSV: {e}") from None


def _csv_values(columns: list[str], text: str) -> Values:
    cells = _cells(text)
    if len(cells) != len(columns):
        raise ValueError(f"{len(cells)} cells, expected {len(columns)}: {', '.join(columns)}")
    return {name: int(cell) if cell.isdecimal() else cell for name, cell in zip(columns, cells, strict=True)}


def _detect(first: Values, asked: str | None) -> str:
    """The one format that the first line can be, which must be the one asked for."""
    if asked and asked not in FORMATS:
        raise ValueError(f"format {_found(asked, 'one of ' + ', '.join(FORMATS))}")
    names = [name for name, form in FORMATS.items() if form.detect(first) and asked in (None, name)]
    if not names:
        known = "; ".join(f"{name} ({form.about})" for name, form in FORMATS.items())
        raise ValueError(f"no {asked or 'known'} format has the keys {list(first)}; known: {known}")
    assert len(names) == 1, f"{names} claim the same keys"
    return names[0]


def _header(form: Format, head: Values, unit: str | None, size: int | None, turns: str | None) -> tuple[Reading, str]:
    """What holds for every row, and the unit's name: what the user says, else the header line, else the format."""
    said = head if form.header else {}
    if form.header and (said[HEADER] != 1 or not said.keys() <= HEADER_KEYS):
        raise ValueError(f"header {dict(said)}, expected {HEADER}: 1 and at most {sorted(HEADER_KEYS)}")
    if unit and form.unit not in UNITS:
        raise ValueError(f"unit {unit}, but this format's times are a {form.unit}: leave the unit out")
    unit = unit or said.get("unit") or form.unit
    turns = turns or said.get("turns")
    if unit not in (*UNITS, form.unit):
        raise ValueError(f"unit {_found(unit, 's or ms')}")
    if turns not in (None, *TURNS):
        raise ValueError(f"turns {_found(turns, ' or '.join(TURNS))}")
    size = (_count(said, "block_size") or form.block_size) if size is None else size
    return Reading(UNITS.get(unit, 1), size, turns), unit


def _check_blocks(request: Request, seen: dict[int, tuple[int, int]]) -> None:
    """ceil(tokens / block size) ids, and an id is one text: its tokens never change. `seen`: id -> (tokens, line)."""
    ids, size, tokens = request.hash_ids, request.block_size, request.tokens_in
    if not ids:
        return
    if size <= 0:
        raise ValueError("hash_ids without a block size, expected block_size in the header line, or --block-size")
    need = -(-tokens // size)
    if len(ids) != need:
        raise ValueError(f"{tokens} tokens need {need} block{'s' * (need != 1)} of {size}, got {len(ids)}")
    full, last = (size, request.line), (tokens - (need - 1) * size, request.line)
    new = [*((i, full) for i in ids[:-1]), (ids[-1], last)]
    for i, (now, _) in new:
        before, line = seen.get(i, (now, 0))
        if before != now:
            raise ValueError(f"id {i} was {before} tokens, now {now}; an id is one text (line {line} has it first)")
    for i, facts in new:
        seen.setdefault(i, facts)


def read(
    path: Path | str,
    *,
    format: str | None = None,  # noqa: A002 (the flag has this name)
    limit: int | None = None,
    block_size: int | None = None,
    unit: str | None = None,
    turns: str | None = None,
    skip_bad: int = 0,
) -> Trace:
    """The requests of a trace file (`.gz` too), read line by line, each checked, by time; ties keep the file's order.

    format: a name of FORMATS, else found by its keys. limit: stop after so many requests. block_size: tokens of a hash
    block. unit: "s" or "ms", instead of the format's own. turns: "cumulative" or "new", how a session's lengths are
    meant; by default cumulative where every turn allows it. skip_bad: leave out up to so many bad rows, and count them.
    at_s is relative to the first request kept, exact to 1 ns. tokens_in is 0 where a given text leaves it open.

    Raises BenchError with file and line for a row that breaks its format's rules.
    """
    path = Path(path)
    lines = _lines(path)
    number, first = next(lines, (1, ""))
    if not first:
        raise BenchError(f"{path}: empty, expected a trace")
    is_json = first.startswith("{")
    try:
        columns = [] if is_json else _cells(first)
        head = _json_values(first) if is_json else dict.fromkeys(columns)
        name = _detect(head, format)
        form = FORMATS[name]
        reading, unit = _header(form, head, unit, block_size, turns)
    except ValueError as e:
        raise BenchError(f"{path}:{number}: {e}") from None
    if is_json and not form.header:
        lines = chain([(number, first)], lines)
    rows: list[Row] = []
    seen: dict[int, tuple[int, int]] = {}
    skipped: Counter[str] = Counter()
    bad: list[str] = []
    for number, text in lines:
        if limit is not None and len(rows) >= limit:
            break
        try:
            values = _json_values(text) if is_json else _csv_values(columns, text)
            unknown = [key for key in values if key not in form.keys]
            if unknown:
                raise ValueError(f"no {name} row has the keys {unknown}; known: {', '.join(form.keys)}")
            at_ns, request = form.row(values, reading)
            reason = _left_out(request)
            if reason:
                skipped[reason] += 1
                continue
            request = replace(request, line=number)
            _check_blocks(request, seen)
            rows.append((at_ns, request))
        except ValueError as e:
            bad.append(f"{path}:{number}: {e}")
            if len(bad) > skip_bad:
                raise BenchError(bad[-1]) from None
            skipped[BAD] += 1
    if not rows:
        raise BenchError(f"{path}: no requests in it (left out: {dict(skipped) or 'none'}), expected at least one row")
    requests, notes = _arrange(path, rows, unit, reading.turns)
    return Trace(requests, name, str(path), notes + [f"left out: {text}" for text in bad], dict(skipped))


def _left_out(request: Request) -> str:
    """Why a sound row is not sent: an answer of no tokens is how traces show a failure, no wish for max_tokens=0."""
    if request.tokens_in == 0 and request.prompt is None and request.messages is None:
        return EMPTY
    return FAILED if request.tokens_out == 0 else ""


# -- all rows together ------------------------------------------------------------------------------------------------


def _arrange(path: Path, rows: list[Row], unit: str, turns: str | None) -> tuple[list[Request], list[str]]:
    ordered, late = _by_time(path, rows)
    stamps = [at for at, _ in ordered if at is not None]
    requests = [replace(r, at_s=None if at is None else (at - stamps[0]) / 1e9) for at, r in ordered]
    notes = list(_times_said(stamps, unit))
    if late:
        notes.append(f"{late:,} rows stood behind a later one: sorted by time, ties in the file's order")
    notes += _number_turns(path, requests, turns)
    if any(r.hash_ids for r in requests):
        shared, total = prefix_bound(requests)
        notes.append(f"prefix sharing: an endless cache of full blocks saves {shared:,} of {total:,} prompt tokens")
        notes[-1] += f" ({100 * shared / total:.2f}%)"
    elif all(r.prompt is None and r.messages is None and r.prompt_token_ids is None for r in requests):
        beyond = " beyond a conversation's own history" if any(r.turn for r in requests) else ""
        notes.append(f"prompts are unique; prefix cache hits are not modelled{beyond}")
    unknown = sum(r.tokens_in == 0 for r in requests)
    if unknown:
        notes.append(f"{unknown:,} rows give a text without its length: what the target counts is not checked")
    return requests, notes


def _by_time(path: Path, rows: list[Row]) -> tuple[list[Row], int]:
    """Sorted, and how many were out of order. A later turn without a time of its own stays with the turn before."""
    if all(at is None for at, _ in rows):
        return rows, 0
    keys: list[int] = []
    of_session: dict[str, int] = {}
    newest = late = 0
    for at, request in rows:
        if at is None and request.session not in of_session:
            right = "one in each row that opens a conversation, or in none of the file"
            raise BenchError(f"{path}:{request.line}: no timestamp, expected {right}")
        late += at is not None and at < newest
        newest = max(newest, at or 0)
        keys.append(of_session[request.session] if at is None else at)
        if request.session:
            of_session[request.session] = keys[-1]
    return [rows[i] for i in sorted(range(len(rows)), key=keys.__getitem__)], late


def _times_said(stamps: list[int], unit: str) -> Iterator[str]:
    if not stamps:
        yield "no times in it: it cannot be replayed; order, lengths, prefixes and sessions are used"
        return
    yield f"times read as {unit}: {len(stamps):,} timed rows over {(stamps[-1] - stamps[0]) / 1e9:g} s"
    step = math.gcd(*(at - stamps[0] for at in stamps))
    instants = Counter(stamps)
    most = max(instants.values())
    if step:
        gaps = sorted(after - before for before, after in pairwise(instants))
        on = f"{len(stamps):,} rows on {len(instants):,} instants, {_amount(gaps[len(gaps) // 2])} apart at the median"
        yield f"timestamp resolution {_amount(step)}" + (f"; {most} rows share one instant ({on})" if most > 1 else "")
    elif most > 1:
        yield f"all {most:,} rows share one instant"


_STEPS = ((10**9, "s"), (10**6, "ms"), (10**3, "µs"), (1, "ns"))


def _amount(ns: int) -> str:
    size, name = next((size, name) for size, name in _STEPS if ns % size == 0)
    return f"{ns // size:,} {name}"


def _number_turns(path: Path, requests: list[Request], turns: str | None) -> list[str]:
    """Give each turn its number, its whole prompt's length and what its user adds, in place; says how it was read."""
    sessions: dict[str | int, list[int]] = {}
    for i, request in enumerate(requests):
        if not request.session and request.turn > 0:
            raise BenchError(f"{path}:{request.line}: turn {request.turn} without a session_id, expected both")
        sessions.setdefault(request.session or i, []).append(i)
    several = [places for places in sessions.values() if len(places) > 1]
    broken = _broken_turn(requests, several)
    if broken and turns == "cumulative":
        raise BenchError(f"{path}:{broken}; read it with turns new")
    new = turns == "new" or bool(broken)
    for places in sessions.values():
        before, floor = NO_TURN, 0
        for turn, i in enumerate(places):
            request = requests[i]
            if request.turn != NO_TURN and request.turn <= before:
                raise BenchError(f"{path}:{request.line}: turn {request.turn} comes after turn {before} in time")
            before = request.turn
            request = replace(request, turn=turn)
            if turn and new:  # the live answer stands between the ids' blocks: they do not describe the whole prompt
                added = request.tokens_in
                whole = floor + added if added else 0  # a text of unknown length leaves the whole unknown
                request = replace(request, tokens_in=whole, tokens_new=added, hash_ids=(), block_size=0)
            elif turn and floor and request.tokens_in:
                request = replace(request, tokens_new=request.tokens_in - floor)
            floor = request.tokens_in + (request.tokens_out or 0) if request.tokens_in else 0  # 0: not known
            requests[i] = request
    if not several:
        return []
    which = "what the user adds" if new else "the whole prompt so far (cumulative)"
    why = "as told" if turns else f"line {broken}" if broken else "every turn holds the prompt and answer before it"
    return [f"{len(several):,} conversations of several turns; an input length is {which}: {why}"]


def _broken_turn(requests: list[Request], sessions: list[list[int]]) -> str:
    """Line and reason of the first turn too short to hold the prompt and answer before it; "" where none is."""
    for places in sessions:
        for before, after in pairwise(requests[i] for i in places):
            floor = before.tokens_in + (before.tokens_out or 0)
            if before.tokens_in and 0 < after.tokens_in < floor:
                sizes = f"{after.tokens_in} prompt tokens, fewer than {before.tokens_in} + {before.tokens_out or 0}"
                return f"{after.line}: session {after.session!r} has {sizes} of the turn before: not cumulative"
    return ""


def prefix_bound(requests: Iterable[Request]) -> tuple[int, int]:
    """(prompt tokens that an endless prefix cache of full blocks would save, all prompt tokens), in arrival order."""
    shared = total = 0
    tree: dict[tuple[int, int], int] = {}  # (node before, id) -> node: a block is cached only behind the same blocks
    for request in requests:
        total += request.tokens_in
        node, hit = 0, True
        for i in request.hash_ids[: request.tokens_in // (request.block_size or 1)]:
            hit = hit and (node, i) in tree
            shared += request.block_size * hit
            node = tree.setdefault((node, i), len(tree) + 1)
    return shared, total


def write(path: Path | str, trace: Trace) -> None:
    """The trace in our own format (`.gz` too), so that read(path) gives the same requests but for their lines.

    Raises BenchError where requests have blocks of different sizes, which one header cannot say.
    """
    path = Path(path)
    sizes = {r.block_size for r in trace.requests if r.hash_ids}
    if len(sizes) > 1:
        raise BenchError(f"{path}: blocks of {sorted(sizes)} tokens in one trace, expected one size")
    header = {HEADER: 1, "unit": "s", "block_size": max(sizes, default=0), "turns": "cumulative"}
    with _open(path, "wb") as file:
        for values in chain([header], map(_own_values, trace.requests)):
            file.write(json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")


def _own_values(r: Request) -> Values:
    values = {
        "timestamp": r.at_s,
        "input_length": r.tokens_in or None,
        "output_length": r.tokens_out,
        "hash_ids": r.hash_ids or None,
        "prompt": r.prompt,
        "messages": r.messages and [dict(m) for m in r.messages],
        "prompt_token_ids": r.prompt_token_ids,
        "session_id": r.session or None,
        "turn": r.turn if r.session else None,
        "think_s": r.think_s,
        "class": r.request_class or None,
        "priority": r.priority or None,
        "cancel_after_s": r.cancel_after_s,
        "model": r.model or None,
        "extra": dict(r.extra) or None,
    }
    return {name: value for name, value in values.items() if value is not None}
