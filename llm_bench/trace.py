"""read(path): a Trace of any of the FORMATS, checked row by row; write(path): the same in our own format."""

import csv
import gc
import gzip
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, Any

import orjson

from llm_bench.errors import BenchError
from llm_bench.fields import (
    BAD,
    EMPTY,
    FAILED,
    HEADER,
    HEADER_KEYS,
    NO_TURN,
    TURNS,
    UNITS,
    Reading,
    Row,
    Values,
    count,
    found,
)
from llm_bench.formats import FORMATS, Format
from llm_bench.request import LONGEST_S, Request, Trace

_set = object.__setattr__  # a Request is frozen once it is handed out; to copy a million of them thrice takes 20 s


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


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:80]} is larger than any float")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = Counter(name for name, _ in pairs)
        raise ValueError(f"the key {names.most_common(1)[0][0]!r} is there twice; keep one of them")
    return values


def _json_values(text: str) -> Values:
    """An object's values. A timestamp keeps all its digits: as a float, seconds since 1970 are good to 0.2 µs only."""
    try:
        values = json.loads(text, parse_constant=_no_number, parse_float=Decimal, object_pairs_hook=_unique)
        if not isinstance(values, dict):
            raise ValueError(f"a JSON {type(values).__name__}, expected an object")
        if "extra" in values or "messages" in values:  # they are sent on, and no body takes a Decimal
            plain = json.loads(text, parse_float=_finite)
            values |= {name: plain[name] for name in ("extra", "messages") if name in values}
        if "\\u" in text:
            orjson.loads(text)  # half a surrogate pair is no text, and only this parser says so
    except json.JSONDecodeError as e:  # orjson's is one too
        raise ValueError(f"not JSON: {e.msg} at column {e.colno}") from None
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    return values


def _cells(text: str) -> list[str]:
    try:
        cells = next(csv.reader([text])) if '"' in text else text.split(",")
        return [cell.strip() for cell in cells]
    except csv.Error as e:
        raise ValueError(f"no line of CSV: {e}") from None


def _csv_values(columns: list[str], text: str) -> Values:
    cells = _cells(text)
    if len(cells) != len(columns):
        raise ValueError(f"{len(cells)} cells, expected {len(columns)}: {', '.join(columns)}")
    return {
        name: int(cell) if cell.isdecimal() and cell.isascii() else cell
        for name, cell in zip(columns, cells, strict=True)
    }


def _detect(first: Values, asked: str | None) -> str:
    """The one format that the first line can be, which must be the one asked for."""
    if asked and asked not in FORMATS:
        raise ValueError(f"format {found(asked, 'one of ' + ', '.join(FORMATS))}")
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
        raise ValueError(f"unit {found(unit, 's or ms')}")
    if turns not in (None, *TURNS):
        raise ValueError(f"turns {found(turns, ' or '.join(TURNS))}")
    size = (count(said, "block_size") or form.block_size) if size is None else size
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


@contextmanager
def _no_collections() -> Iterator[None]:
    """What is read stays: to walk over a million rows again and again frees nothing and takes a fifth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_collections()
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
        head = _json_values(first) if is_json else _unique([(name, None) for name in columns])
        name = _detect(head, format)
        form = FORMATS[name]
        reading, unit = _header(form, head, unit, block_size, turns)
    except ValueError as e:
        raise BenchError(f"{path}:{number}: {e}") from None
    if is_json and not form.header:
        lines = chain([(number, first)], lines)
    rows: list[Row] = []
    keys = frozenset(form.keys)
    seen: dict[int, tuple[int, int]] = {}
    skipped: Counter[str] = Counter()
    bad: list[str] = []
    for number, text in lines:
        if limit is not None and len(rows) >= limit:
            break
        try:
            values = _json_values(text) if is_json else _csv_values(columns, text)
            if not values.keys() <= keys:
                unknown = [key for key in values if key not in keys]
                raise ValueError(f"no {name} row has the keys {unknown}; known: {', '.join(form.keys)}")
            for row in form.rows(values, reading, number):
                reason = _left_out(row[1])
                if reason:
                    skipped[reason] += 1
                    continue
                _check_blocks(row[1], seen)
                rows.append(row)
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
    if stamps and stamps[-1] - stamps[0] > LONGEST_S * 10**9:
        first, last = (next(r.line for at, r in ordered if at == stamp) for stamp in (stamps[0], stamps[-1]))
        years = (stamps[-1] - stamps[0]) / 1e9 / (365.25 * 86400)
        raise BenchError(
            f"{path}:{last}: {years:,.0f} years after line {first}, expected 10 at most; is the unit right?"
        )
    for at, request in ordered:
        if at is not None:
            _set(request, "at_s", (at - stamps[0]) / 1e9)
    requests = [request for _, request in ordered]
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
    if all(before <= after for before, after in pairwise(keys)):
        return rows, late
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
    sessions: dict[str, list[int]] = {}
    for i, request in enumerate(requests):
        if request.session:
            sessions.setdefault(request.session, []).append(i)
        elif request.turn > 0:
            raise BenchError(f"{path}:{request.line}: turn {request.turn} without a session_id, expected both")
        elif request.turn:
            _set(request, "turn", 0)
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
            _set(request, "turn", turn)
            if turn and new:  # the live answer stands between the ids' blocks: they do not describe the whole prompt
                added = request.tokens_in
                whole = floor + added if added else 0  # a text of unknown length leaves the whole unknown
                for name, value in (("tokens_in", whole), ("tokens_new", added), ("hash_ids", ()), ("block_size", 0)):
                    _set(request, name, value)
            elif turn and floor and request.tokens_in:
                _set(request, "tokens_new", request.tokens_in - floor)
            floor = request.tokens_in + (request.tokens_out or 0) if request.tokens_in else 0  # 0: not known
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
