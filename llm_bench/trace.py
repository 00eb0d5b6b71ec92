"""read(path): a Trace of any of the FORMATS, checked row by row; write(path): the same in our own format."""

import gc
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

from llm_bench import containers, prefixes
from llm_bench.errors import BenchError
from llm_bench.fields import (
    BAD,
    DATE_TIME,
    EMPTY,
    FAILED,
    HEADER,
    HEADER_KEYS,
    NO_TURN,
    OF_BAD,
    TURNS,
    UNITS,
    Format,
    Last,
    Reading,
    Row,
    Values,
    count,
    found,
)
from llm_bench.formats import ALIASES, FORMATS, PLAIN
from llm_bench.request import LONGEST_S, Request, Trace

LATEST_ZERO_NS = 10**11 * 10**9  # seconds since 1970: the year 5138

_set = object.__setattr__  # a Request is frozen once it is handed out; to copy a million of them thrice takes 20 s


# -- one file ---------------------------------------------------------------------------------------------------------


def _detect(first: Values, asked: str | None) -> str:
    """The one format that the first item can be, which must be the one asked for."""
    asked = ALIASES.get(asked or "", asked)
    if asked and asked not in FORMATS:
        raise ValueError(f"format {found(asked, 'one of ' + ', '.join((*FORMATS, *ALIASES)))}")
    names = [name for name, form in FORMATS.items() if form.detect(first) and asked in (None, name)]
    if not names and asked:
        raise ValueError(f"no {asked} file has the keys {list(first)}, expected {FORMATS[asked].about}")
    if not names:
        raise ValueError(
            f"no known format has the keys {list(first)}; known: {', '.join(FORMATS)}; or give a map of them"
        )
    if len(names) > 1:
        raise ValueError(
            f"keys of {' and '.join(names)}, expected those of one format; say which with --format-of-trace"
        )
    return names[0]


def _header(form: Format, head: Values, unit: str | None, size: int | None, turns: str | None) -> tuple[Reading, str]:
    """What holds for every row, and the unit's name: what the user says, else the header line, else the format."""
    said = head if form.header else {}
    if form.header and (said[HEADER] != 1 or not said.keys() <= HEADER_KEYS):
        right = f"{HEADER}: 1 and at most {', '.join(sorted(HEADER_KEYS))}"
        raise ValueError(f"header {found(dict(said), right)}")
    if unit and form.unit == DATE_TIME:
        raise ValueError(f"unit {unit}, but this format's times are a {form.unit}: leave the unit out")
    unit = unit or said.get("unit") or form.unit
    turns = turns or said.get("turns")
    units = (*UNITS, *[DATE_TIME] * form.any_unit)
    if unit not in units and unit != form.unit:
        raise ValueError(f"unit {found(unit, 'one of ' + ', '.join(units))}")
    if turns not in (None, *TURNS):
        raise ValueError(f"turns {found(turns, ' or '.join(TURNS))}")
    size = (count(said, "block_size") or form.block_size) if size is None else size
    return Reading(UNITS.get(unit, 0), size, turns), unit


def _check_map(names: Mapping[str, str], asked: str | None, file: containers.Items) -> None:
    """ValueError where a map says what a file cannot have."""
    if asked not in (None, "plain"):
        raise ValueError(f"format {asked} and a map, expected one of the two")
    if names.keys() - set(PLAIN) or not names.keys() & {"in", "prompt"}:
        raise ValueError(f"map {found(', '.join(names), 'in or prompt, and any of ' + ', '.join(PLAIN))}")
    missing = [name for name in names.values() if file.table and name not in file.first]
    if missing:
        raise ValueError(f"no column {missing[0]!r}; there are: {', '.join(file.first)}")


def _renamed(names: Mapping[str, str], values: Values | ValueError) -> Values | ValueError:
    if isinstance(values, ValueError):
        return values
    return {ours: values[theirs] for ours, theirs in names.items() if theirs in values}


def _check_blocks(request: Request, seen: dict[int, tuple[int, int]]) -> None:
    """ceil(tokens / block size) ids, and an id is one text: its tokens never change. `seen`: id -> (tokens, line)."""
    ids, size, tokens = request.hash_ids, request.block_size, request.tokens_in
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
    map: Mapping[str, str] | None = None,  # noqa: A002
) -> Trace:
    """The requests of a trace file, read item by item, each checked, by time; ties keep the file's order.

    format: a name of FORMATS or ALIASES, else found by its keys. limit: stop after so many requests. block_size: tokens
    of a hash block. unit: of UNITS, not the format's own; of a plain table also "date-time". turns: "cumulative" or
    "new", how a session's lengths are meant; by default cumulative where every later turn holds the prompt and answer
    before it, new where fewer than half do, else refused. As told cumulative, a turn that does not is a bad row and its
    conversation goes with it. skip_bad: leave out up to so many bad rows, and count them. map: names of PLAIN -> the
    file's own names; its other columns are read over.
    at_s is relative to the first request kept, exact to 1 ns. tokens_in is 0 where a given text leaves it open.

    How turns are meant is a fact of the whole file, so that a part of it is never read otherwise: with `limit` the rest
    of a file of conversations is read too, unless `turns` or its header says it or its format does.

    Trace.facts: "unit", "date-time" of dates in any format; "resolution_s", the greatest common step of all stamps,
    None where they do not differ; "zero_s", the first kept stamp on the file's own scale, None for dates; "instants",
    how many stamps differ; "late_rows", behind a later one; "turns", "" where no conversation has several;
    "block_size"; "rows", seen in all.

    Raises BenchError with file and line (of a JSON list the item, of Parquet the row) for what breaks a format's rules.
    """
    path = Path(path)
    if path.is_dir():
        made = "ServeGen's clients are made a trace by: llm-bench trace synth FOLDER --duration SECONDS -o FILE"
        raise BenchError(f"{path}: a folder; {made}")
    with containers.reading(path) as file:
        try:
            if map is not None:
                _check_map(map, format, file)
            name = "plain" if map is not None else _detect(file.first, format)
            form = FORMATS[name]
            reading, unit = _header(form, file.first, unit, block_size, turns)
        except ValueError as e:
            raise BenchError(f"{path}:{file.number}: {e}") from None
        if form.header:
            next(file.items)
        items = ((line, _renamed(map, values)) for line, values in file.items) if map is not None else file.items
        kept = _rows(path, name, reading, items, limit, skip_bad)
    kept, turns_said = _one_reading(path, form, kept, reading.turns, limit, skip_bad)
    rows, _, skipped, bad = kept
    if not rows:
        counts = ", ".join(f"{reason}: {count:,}" for reason, count in skipped.items())
        raise BenchError(f"{path}: no requests in it (left out: {counts or 'none'}), expected at least one row")
    unit = DATE_TIME if reading.known.get("dates") else unit
    requests, notes, facts = _arrange(path, kept, unit, turns_said)
    notes += _opened_anew(reading, requests)
    notes += [f"{count:,} {what}" for what, count in reading.known.get("said", {}).items()]
    notes += [form.note] * bool(form.note) + [f"left out: {text}" for text in bad]
    facts |= {"block_size": max(r.block_size for r in requests), "rows": len(rows) + sum(skipped.values())}
    return Trace(requests, name, str(path), notes, skipped, facts)


class _Kept(NamedTuple):
    rows: list[Row]
    left_out: list[int]  # stamps of rows that came, and are not sent
    skipped: dict[str, int]
    bad: list[str]


def _rows(
    path: Path, name: str, reading: Reading, items: Iterator[containers.Item], limit: int | None, skip_bad: int
) -> _Kept:
    """The rows of a file's items: no item is looked at that `limit` does not need, or a conversation."""
    form, keys = FORMATS[name], frozenset(FORMATS[name].keys)
    rows: list[Row] = []
    left_out: list[int] = []
    blocks: dict[int, tuple[int, int]] = {}
    skipped: Counter[str] = Counter()
    bad: list[str] = []
    text_ids: dict[str, bool] = {}  # session -> whether its id is text, not a number
    whole = False  # its conversations tell how they are meant
    while limit is None or len(rows) < limit or whole:
        number, values = next(items, (0, None))
        if values is None:
            break
        try:
            if isinstance(values, ValueError):
                raise values
            if not values.keys() <= keys:
                unknown = [key for key in values if key not in keys]
                raise ValueError(f"no {name} row has the keys {unknown}; known: {', '.join(form.keys)}")
            new = form.rows(values, reading, number)
            for _, request in new:
                if request.hash_ids:
                    _check_blocks(request, blocks)
                if request.session:
                    whole = not (form.opens_anew or reading.turns)
                    _check_id(values, text_ids)
            for at, request in new:
                if reason := _left_out(request):
                    skipped[reason] += 1
                    left_out += [] if at is None else [at]
                else:
                    rows.append((at, request))
        except ValueError as e:
            bad.append(f"{path}:{number}: {e}")
            if len(bad) > skip_bad:
                raise BenchError(bad[-1]) from None
            skipped[BAD] += 1
    return _Kept(rows if whole else rows[:limit], left_out, dict(skipped), bad)


def _check_id(values: Values, text_ids: dict[str, bool]) -> None:
    """1 and "1" may be two conversations or one: nothing in the file says which."""
    given = values.get("session_id", values.get("session"))
    if text_ids.setdefault(str(given), isinstance(given, str)) != isinstance(given, str):
        raise ValueError(f"session {given} is a number in some rows and text in others, expected one of the two")


def _left_out(request: Request) -> str:
    """Why a sound row is not sent: an answer of no tokens is how traces show a failure, no wish for max_tokens=0."""
    if request.tokens_in == 0 and request.prompt is None and request.messages is None and request.body is None:
        return EMPTY
    return FAILED if request.tokens_out == 0 else ""


# -- all rows together ------------------------------------------------------------------------------------------------


class _Turns(NamedTuple):
    """How a session's input lengths are meant, and why."""

    name: str  # of TURNS
    why: str


def _one_reading(
    path: Path, form: Format, kept: _Kept, turns: str | None, limit: int | None, skip_bad: int
) -> tuple[_Kept, _Turns]:
    """How all turns of a file are meant; and of its rows, the first `limit` of those that can be meant so."""
    later, short = _short_turns(path, kept.rows) if any(r.session for _, r in kept.rows) else (0, [])
    cut = kept._replace(rows=kept.rows[:limit])
    if turns == "new" or not short:
        return cut, _Turns(
            turns or "cumulative", "as told" if turns else "every turn holds the prompt and answer before it"
        )
    if turns == "cumulative":
        sessions = {after.session: f"{path}:{text}: not cumulative" for after, text in reversed(short)}
        bad = [*kept.bad, *reversed(sessions.values())]
        if len(bad) > skip_bad:
            raise BenchError(f"{bad[skip_bad]}; expected --turns new, or --skip-bad to leave such conversations out")
        rows = [row for row in kept.rows if row[1].session not in sessions]
        rest = len(kept.rows) - len(rows) - len(sessions)
        skipped = kept.skipped | {BAD: kept.skipped.get(BAD, 0) + len(sessions), OF_BAD: rest}
        return _Kept(rows[:limit], kept.left_out, skipped, bad), _Turns(turns, "as told")
    if 2 * (later - len(short)) < later and not form.opens_anew:
        return cut, _Turns("new", f"line {short[0][1]}: not cumulative")
    raise BenchError(
        f"{path}:{short[0][1]}, while {later - len(short):,} of {later:,} later turns hold the prompt and answer "
        "before them: say --turns cumulative (and --skip-bad N to leave such conversations out) or --turns new"
    )


def _short_turns(path: Path, rows: list[Row]) -> tuple[int, list[tuple[Request, str]]]:
    """How many later turns have lengths to be judged by; and those too short to hold the turn before, with the line."""
    sessions: dict[str, list[Request]] = {}
    for _, request in _by_time(path, rows)[0]:
        if request.session:
            sessions.setdefault(request.session, []).append(request)
    later, short = 0, list[tuple[Request, str]]()
    for session, requests in sessions.items():
        for before, after in pairwise(requests):
            later += bool(before.tokens_in and after.tokens_in)
            if before.tokens_in and 0 < after.tokens_in < before.tokens_in + (before.tokens_out or 0):
                sizes = f"{after.tokens_in} prompt tokens, fewer than {before.tokens_in} + {before.tokens_out or 0}"
                short.append((after, f"{after.line}: session {session!r} has {sizes} of the turn before"))
    return later, short


def _check_zero(path: Path, line: int, zero_ns: int, unit: str) -> None:
    """A file's own first stamp beyond any date tells of another unit."""
    if unit not in UNITS or zero_ns <= LATEST_ZERO_NS:
        return
    number, year = zero_ns // UNITS[unit], 1970 + round(zero_ns / (365.25 * 86400 * 10**9))
    right = next((name for name, ns in UNITS.items() if 10**8 <= number * ns // 10**9 < 10**10), "")
    hint = f"--unit {right}, as seconds since 1970 it is then" if right else "another --unit"
    raise BenchError(f"{path}:{line}: time {number} read as {unit}, which is the year {year:,}; expected {hint}")


def _arrange(path: Path, kept: _Kept, unit: str, turns: _Turns) -> tuple[list[Request], list[str], dict[str, object]]:
    rows, left_out = kept.rows, kept.left_out
    ordered, late = _by_time(path, rows)
    stamps = [at for at, _ in ordered if at is not None]
    if stamps and stamps[-1] - stamps[0] > LONGEST_S * 10**9:
        first, last = (next(r.line for at, r in ordered if at == stamp) for stamp in (stamps[0], stamps[-1]))
        years = (stamps[-1] - stamps[0]) / 1e9 / (365.25 * 86400)
        raise BenchError(
            f"{path}:{last}: {years:,.0f} years after line {first}, expected 10 at most; is the unit right?"
        )
    if stamps:
        _check_zero(path, ordered[0][1].line, stamps[0], unit)
    for at, request in ordered:
        if at is not None:
            _set(request, "at_s", (at - stamps[0]) / 10**9)
    requests = [request for _, request in ordered]
    came = sorted(stamps + left_out) if left_out else stamps
    notes = list(_times_said(stamps, came, unit))
    if late:
        notes.append(f"{late:,} rows stood behind a later one: sorted by time, ties in the file's order")
    how, said = _number_turns(path, requests, turns)
    notes += said
    if any(r.hash_ids for r in requests):
        shared, total = prefixes.prefix_bound(requests)
        notes.append(f"prefix sharing: an endless cache of full blocks saves {shared:,} of {total:,} prompt tokens")
        notes[-1] += f" ({100 * shared / total:.2f}%)"
    elif not any(_says_its_own(r) for r in requests):
        beyond = " beyond a conversation's own history" if any(r.turn for r in requests) else ""
        notes.append(f"prompts are unique; prefix cache hits are not modelled{beyond}")
    unknown = sum(r.tokens_in == 0 for r in requests)
    if unknown:
        notes.append(f"{unknown:,} rows give a text without its length: what the target counts is not checked")
    step = _step(came)
    facts: dict[str, object] = {
        "unit": unit,
        "resolution_s": step / 10**9 if step else None,
        "zero_s": stamps[0] / 10**9 if stamps and unit != DATE_TIME else None,
        "instants": len(set(came)),
        "late_rows": late,
        "turns": how,
    }
    return requests, notes, facts


def _says_its_own(r: Request) -> bool:
    return not (r.prompt is None and r.messages is None and r.prompt_token_ids is None and r.body is None)


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


def _times_said(stamps: list[int], came: list[int], unit: str) -> Iterator[str]:
    """`came`: the stamps of the rows that are left out too, as they tell of the file's clock as well as others."""
    if not stamps:
        yield "no times in it: it cannot be replayed; order, lengths, prefixes and sessions are used"
        return
    yield f"times read as {unit}: {len(stamps):,} timed rows over {(stamps[-1] - stamps[0]) / 1e9:g} s"
    step = _step(came)
    instants = Counter(came)
    most = max(instants.values())
    if step:
        gaps = sorted(after - before for before, after in pairwise(instants))
        on = f"{len(came):,} rows on {len(instants):,} instants, {_amount(gaps[len(gaps) // 2])} apart at the median"
        yield f"timestamp resolution {_amount(step)}" + (f"; {most} rows share one instant ({on})" if most > 1 else "")
    elif most > 1:
        yield f"all {most:,} rows share one instant"


def _step(stamps: list[int]) -> int:
    return math.gcd(*(at - stamps[0] for at in stamps))


_STEPS = ((10**9, "s"), (10**6, "ms"), (10**3, "µs"), (1, "ns"))


def _amount(ns: int) -> str:
    size, name = next((size, name) for size, name in _STEPS if ns % size == 0)
    return f"{ns // size:,} {name}"


def _number_turns(path: Path, requests: list[Request], turns: _Turns) -> tuple[str, list[str]]:
    """Give each turn its number, its whole prompt's length and what its user adds, in place; says how it was read.

    Returns one of TURNS, "" where no conversation has several, and the notes on it.
    """
    sessions: dict[str, list[int]] = {}
    for i, request in enumerate(requests):
        if request.session:
            sessions.setdefault(request.session, []).append(i)
        elif request.turn > 0:
            raise BenchError(f"{path}:{request.line}: turn {request.turn} without a session_id, expected both")
        elif request.turn:
            _set(request, "turn", 0)
    several = [places for places in sessions.values() if len(places) > 1]
    new = turns.name == "new"
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
        return "", []
    which = "what the user adds" if new else "the whole prompt so far (cumulative)"
    note = f"{len(several):,} conversations of several turns; an input length is {which}: {turns.why}"
    return turns.name, [note]


def _opened_anew(reading: Reading, requests: list[Request]) -> Iterator[str]:
    """Of fields.conversation: how many of its NAME/2, NAME/3 ... are among the requests."""
    several = {name: last.part for name, last in reading.memory.items() if isinstance(last, Last) and last.part > 1}
    opened = {f"{name}/{part}" for name, parts in several.items() for part in range(2, parts + 1)}
    kept = len(opened & {r.session for r in requests}) if opened else 0
    if kept:
        why = "by its length or its time, their first prompt cannot continue what went before"
        yield f"{kept:,} conversations are opened anew, as NAME/2, NAME/3 ...: {why}"


def write(path: Path | str, trace: Trace) -> None:
    """The trace in our own format (`.gz`, `.bz2`, `.zst` too): read(path) gives the same requests but for their lines.

    Whole or not at all, and over no other file. Raises BenchError where requests have blocks of different sizes, which
    one header cannot say, and where the file cannot be written.
    """
    path = Path(path)
    sizes = {r.block_size for r in trace.requests if r.hash_ids}
    if len(sizes) > 1:
        raise BenchError(f"{path}: blocks of {sorted(sizes)} tokens in one trace, expected one size")
    new = _only_added_is_known(trace.requests)
    header = {HEADER: 1, "unit": "s", "block_size": max(sizes, default=0), "turns": TURNS[new]}
    rows = (_own_values(r, r.tokens_new if new and r.turn else r.tokens_in) for r in trace.requests)
    with containers.new_file(path) as part, containers.open_bytes(part, "wb") as file:
        for values in chain([header], rows):
            file.write(json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")


def _only_added_is_known(requests: list[Request]) -> bool:
    """Whether a turn says what its user adds where its whole prompt's length cannot: behind a text of unknown length,
    or in token ids, which are those that are added.
    """
    known: dict[str, bool] = {}  # session -> its newest turn's length is
    for r in requests:
        if r.turn and r.tokens_new and not known.get(r.session, True):
            return True
        if r.turn and r.prompt_token_ids and r.tokens_in != len(r.prompt_token_ids):
            return True
        known[r.session] = r.tokens_in > 0
    return False


def _own_values(r: Request, input_length: int) -> Values:
    values = {
        "timestamp": r.at_s,
        "input_length": input_length or None,
        "output_length": r.tokens_out,
        "hash_ids": r.hash_ids or None,
        "prompt": r.prompt,
        "messages": r.messages and [dict(m) for m in r.messages],
        "prompt_token_ids": r.prompt_token_ids,
        "body": r.body and dict(r.body),
        "session_id": r.session or None,
        "turn": r.turn if r.session else None,
        "think_s": r.think_s,
        "class": r.request_class or None,
        "client": r.client or None,
        "priority": r.priority or None,
        "cancel_after_s": r.cancel_after_s,
        "model": r.model or None,
        "extra": dict(r.extra) or None,
    }
    return {name: value for name, value in values.items() if value is not None}
