"""read(path): a Trace of any of the FORMATS, checked row by row; read_sheet(path): the same as columns; write(path)."""

import gc
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from llm_bench import containers
from llm_bench.arrange import Arranged, Kept, arrange
from llm_bench.errors import BenchError
from llm_bench.fields import (
    BAD,
    DATE_TIME,
    EMPTY,
    FAILED,
    HEADER,
    HEADER_KEYS,
    TURNS,
    UNITS,
    Format,
    Reading,
    Row,
    Values,
    count,
    found,
    shortened,
)
from llm_bench.formats import ALIASES, FORMATS, PLAIN
from llm_bench.request import Request, Trace
from llm_bench.sheet import Gathering, Rows, Sheet

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # json.dumps makes one each time
_set = object.__setattr__  # a Request is frozen once it is handed out; to copy a million of them thrice takes 20 s


# -- one file ---------------------------------------------------------------------------------------------------------


def _detect(first: Values, asked: str | None) -> str:
    """The one format that the first item can be, which must be the one asked for."""
    asked = ALIASES.get(asked or "", asked)
    if asked and asked not in FORMATS:
        raise ValueError(f"format {found(asked, 'one of ' + ', '.join((*FORMATS, *ALIASES)))}")
    if "llm_bench_model" in first:
        raise ValueError("a model, not a trace; make one from it with: llm-bench trace synth MODEL -o FILE")
    names = [name for name, form in FORMATS.items() if form.detect(first) and asked in (None, name)]
    if not names and asked:
        raise ValueError(f"no {asked} file has the keys {shortened(first)}, expected {FORMATS[asked].about}")
    if not names:
        raise ValueError(
            f"no known format has the keys {shortened(first)}; known: {', '.join(FORMATS)}; or give a map of them"
        )
    if len(names) > 1:
        raise ValueError(
            f"keys of {' and '.join(names)}, expected those of one format; say which with --format-of-trace"
        )
    return names[0]


def _header(form: Format, head: Values, unit: str | None, size: int | None, turns: str | None) -> tuple[Reading, str]:
    """What holds for every row, and the unit's name: as the user says, else the header line, else the format."""
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
    wrong = [name for name in names if name not in PLAIN] or ([] if names.keys() & {"in", "prompt"} else list(names))
    if wrong:
        raise ValueError(f"map of {found(', '.join(wrong), 'in or prompt, and any of ' + ', '.join(PLAIN))}")
    missing = [name for name in names.values() if file.table and name not in file.first]
    if missing:
        raise ValueError(f"no column {missing[0]!r}; there are: {', '.join(shortened(file.first))}")


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
    """No garbage collection: what is read stays, and walks over a million rows would take a fifth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass
class Source:
    """A trace file that is being read, and what its rows so far have told."""

    path: Path
    name: str  # of its format
    reading: Reading
    unit: str  # a key of UNITS, or DATE_TIME, or what the format calls its own
    items: Iterator[containers.Item]
    limit: int | None
    skip_bad: int
    given: list[str]  # what the user says of "unit" and "turns", and is not asked about again
    skipped: Counter[str] = field(default_factory=Counter)
    left_out: list[int] = field(default_factory=list)  # stamps of rows that came, and are not sent
    bad: list[str] = field(default_factory=list)

    @property
    def form(self) -> Format:
        return FORMATS[self.name]


@contextmanager
def opened(
    path: Path,
    format: str | None = None,  # noqa: A002
    limit: int | None = None,
    block_size: int | None = None,
    unit: str | None = None,
    turns: str | None = None,
    skip_bad: int = 0,
    map: Mapping[str, str] | None = None,  # noqa: A002
) -> Iterator[Source]:
    """The file, with what `read` says of each option; its rows are read by `rows`."""
    if path.is_dir():
        made = "make a trace from ServeGen's clients with: llm-bench trace synth FOLDER --duration SECONDS -o FILE"
        raise BenchError(f"{path}: a folder; {made}")
    with containers.reading(path) as file:
        try:
            if map is not None:
                _check_map(map, format, file)
            name = "plain" if map is not None else _detect(file.first, format)
            given = [name for name, said in (("unit", unit), ("turns", turns)) if said]
            reading, unit = _header(FORMATS[name], file.first, unit, block_size, turns)
        except ValueError as e:
            raise BenchError(f"{path}:{file.number}: {e}") from None
        if FORMATS[name].header:
            next(file.items)
        items = ((line, _renamed(map, values)) for line, values in file.items) if map is not None else file.items
        yield Source(path, name, reading, unit, items, limit, skip_bad, given)


def rows(source: Source) -> Iterator[Row]:
    """A file's rows that are sent: no item is looked at that `limit` does not need, or a conversation.

    More than `limit` come where conversations tell how they are meant, or where one item is several rows.
    """
    form, keys, reading = source.form, frozenset(source.form.keys), source.reading
    blocks: dict[int, tuple[int, int]] = {}
    text_ids: dict[str, bool] = {}  # session -> whether its id is text, not a number
    whole = False  # its conversations tell how they are meant
    limit, sent = source.limit, 0
    while limit is None or sent < limit or whole:
        number, values = next(source.items, (0, None))
        if values is None:
            return
        try:
            known = _known(values, keys, source)
            new = form.rows(known, reading, number)
            for _, request in new:
                if request.hash_ids:
                    _check_blocks(request, blocks)
                if request.session:
                    whole = not (form.opens_anew or reading.turns)
                    _check_id(known, text_ids)
        except ValueError as e:
            source.bad.append(f"{source.path}:{number}: {e}")
            if len(source.bad) > source.skip_bad:
                raise BenchError(source.bad[-1]) from None
            source.skipped[BAD] += 1
            continue
        for row in new:
            if reason := _left_out(row[1]):
                source.skipped[reason] += 1
                source.left_out += [] if row[0] is None else [row[0]]
            else:
                sent += 1
                yield row


def _known(values: Values | ValueError, keys: frozenset[str], source: Source) -> Values:
    """The item's values. Raises ValueError for what is no item, and for keys that no row of the format has."""
    if isinstance(values, ValueError):
        raise values
    if not values.keys() <= keys:
        unknown = [key for key in values if key not in keys]
        known = ", ".join(source.form.keys)
        raise ValueError(f"no {source.name} row has the keys {shortened(unknown)}; known: {known}")
    return values


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


def _arranged(source: Source, read: Rows) -> tuple[Arranged, list[str]]:
    """The rows of a file in order of time, and all that is to be said of it."""
    kept = Kept(read, source.left_out, dict(source.skipped), source.bad)
    limit, skip_bad = source.limit, source.skip_bad
    done = arrange(source.path, source.form, kept, source.reading, unit_of(source), limit=limit, skip_bad=skip_bad)
    done.facts["given"] = source.given
    return done, done.notes + rows_said(source, done.bad)


def unit_of(source: Source) -> str:
    return DATE_TIME if source.reading.known.get("dates") else source.unit


def rows_said(source: Source, bad: list[str]) -> list[str]:
    note = source.form.note
    return [note] * bool(note) + [f"left out: {text}" for text in bad]


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

    Trace.facts: "unit", "date-time" of dates in any format; "given", which of "unit" and "turns" the caller said;
    "resolution_s", the greatest common step of all stamps, None where they do not differ; "zero_s", the first kept
    stamp on the file's own scale, None for dates; "instants", how many stamps differ; "late_rows", behind a later one;
    "turns", "" where no conversation has several; "block_size"; "rows", seen in all.

    Raises BenchError with file and line (of a JSON list the item, of Parquet the row) for what breaks a format's rules.
    """
    path, how = Path(path), (format, limit, block_size, unit, turns, skip_bad, map)
    with opened(path, *how) as source:
        read = list(rows(source))
    columns = Gathering()
    columns.add(read)
    done, notes = _arranged(source, columns.rows())
    if done.places is not None:
        read = [read[place] for place in done.places.tolist()]
    requests = [request for _, request in read]
    _mean(requests, done.rows)
    return Trace(requests, source.name, str(path), notes, done.skipped, done.facts)


def _mean(requests: list[Request], rows: Rows) -> None:
    """Give the requests what only the whole file says: when they came, and how their turns' lengths are meant."""
    if "at_s" in rows:
        for request, at_s in zip(requests, rows["at_s"].tolist(), strict=True):
            if at_s == at_s:
                _set(request, "at_s", at_s)
    differ = [r.turn != turn for r, turn in zip(requests, rows["turn"].tolist(), strict=True)]
    names = ("turn", "tokens_in", "tokens_new", "blocks")
    places = np.flatnonzero(np.array(differ) | (rows["turn"] > 0))
    columns = zip(*(rows[name][places].tolist() for name in names), strict=True)
    for i, (turn, tokens_in, tokens_new, blocks) in zip(places.tolist(), columns, strict=True):
        request = requests[i]
        for name, value in (("turn", turn), ("tokens_in", tokens_in), ("tokens_new", tokens_new)):
            _set(request, name, value)
        if not blocks and request.hash_ids:
            _set(request, "hash_ids", ())
            _set(request, "block_size", 0)


@_no_collections()
def read_sheet(path: Path | str, **how: Any) -> Sheet:
    """What read gives, as columns of 20 bytes and more a request; no Request is kept, and no text. `how`: of read."""
    with opened(Path(path), **how) as source:
        gathered = Gathering()
        gathered.add(rows(source))
    done, notes = _arranged(source, gathered.rows())
    return Sheet(done.rows, source.name, str(path), notes, done.skipped, done.facts)


def write(path: Path | str, trace: Trace, about: str = "") -> None:
    """The trace in our own format (`.gz`, `.bz2`, `.zst` too): read(path) gives the same requests but for their lines.

    about: free text of the header. Whole or not at all, and over no other file. Raises BenchError where requests have
    blocks of different sizes, which one header cannot say, and where the file cannot be written.
    """
    path = Path(path)
    sizes = {r.block_size for r in trace.requests if r.hash_ids}
    if len(sizes) > 1:
        raise BenchError(f"{path}: blocks of {sorted(sizes)} tokens in one trace, expected one size")
    new = _only_added_is_known(trace.requests)
    rows = (own_values(r, r.tokens_new if new and r.turn else r.tokens_in) for r in trace.requests)
    with containers.new_file(path) as part, containers.open_bytes(part, "wb") as file:
        for values in chain([header(max(sizes, default=0), new=new, about=about)], rows):
            file.write(line(values))


def header(block_size: int, *, new: bool, about: str = "") -> Values:
    values = {HEADER: 1, "unit": "s", "block_size": block_size, "turns": TURNS[new]}
    return values | ({"about": about} if about else {})


def line(values: Values) -> bytes:
    return _encode(values).encode() + b"\n"


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


def own_values(r: Request, input_length: int) -> Values:
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
