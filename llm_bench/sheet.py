"""Requests as columns, 20 bytes each where a Request takes 530: what figures over a long trace are computed from.

A column that holds its default throughout is not kept, so that lengths and stamps alone take no room for sessions.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from llm_bench.fields import Row
from llm_bench.request import Request, Trace

CHUNK = 1 << 16  # rows that are Requests at once, before they become columns
LABELS = ("session", "request_class", "client", "model")  # kept as codes of their names; -1 is ""
DEFAULTS: dict[str, tuple[Any, Any]] = {  # column -> (type, what a row has that says nothing)
    "at_ns": (np.int64, 0),  # as read, since Rows.zero_ns; object (Python's own) where a file spans centuries
    "timed": (np.bool_, True),  # whether at_ns is known
    "at_s": (np.float64, np.nan),  # NaN: no time of its own
    "tokens_in": (np.int64, 0),  # int32 where that is enough, as of the other whole numbers
    "tokens_out": (np.int32, -1),  # -1: the server decides
    "tokens_new": (np.int64, 0),
    "turn": (np.int64, 0),
    "think_s": (np.float64, np.nan),
    "block_size": (np.int64, 0),
    "blocks": (np.int32, 0),  # hash ids of a row; all of them, one row's after the other's, are Rows.ids
    "own_text": (np.bool_, False),  # it brings what it says
    "line": (np.int64, 0),
    **dict.fromkeys(LABELS, (np.int32, -1)),
}
_NUMBERS = ("tokens_in", "tokens_new", "turn", "block_size", "line")  # as a Request has them


@dataclass
class Rows:
    """n requests; rows[name] is a column (n,) of DEFAULTS."""

    n: int
    columns: dict[str, np.ndarray]
    ids: np.ndarray  # all hash ids; object where one has over 63 bits
    names: Mapping[str, list[str]]  # of LABELS, by code
    zero_ns: int = 0

    def __getitem__(self, name: str) -> np.ndarray:
        column = self.columns.get(name)
        return np.full(self.n, DEFAULTS[name][1], DEFAULTS[name][0]) if column is None else column

    def __contains__(self, name: str) -> bool:
        """Whether any row says something of it."""
        return name in self.columns


class Sheet(NamedTuple):
    """A Trace, its requests as columns in order of time."""

    rows: Rows
    format: str
    path: str
    notes: list[str]
    skipped: dict[str, int]
    facts: Mapping[str, Any]


class Prompt(NamedTuple):
    """What is known of a prompt's blocks, as `prefixes` reads it of a Request."""

    tokens_in: int
    block_size: int
    hash_ids: tuple[int, ...]
    line: int


def sheet(trace: Trace | Sheet) -> Sheet:
    return trace if isinstance(trace, Sheet) else Sheet(of(trace.requests), *trace[1:])


def of(requests: Sequence[Request] | Rows) -> Rows:
    """The columns of requests that have been read; columns as they are."""
    if isinstance(requests, Rows):
        return requests
    gathered = Gathering()
    for start in range(0, len(requests), CHUNK):
        part = requests[start : start + CHUNK]
        at_s = _floats([r.at_s for r in part])
        gathered.parts.append(_part(part, gathered.codes, {"at_s": at_s}))
    return gathered.rows()


@dataclass
class Gathering:
    """Rows as they are read, become columns part by part."""

    zero_ns: int | None = None  # the first stamp
    codes: dict[str, dict[str, int]] = field(default_factory=lambda: {name: {} for name in LABELS})
    parts: list[Rows] = field(default_factory=list)

    def add(self, rows: Iterable[Row]) -> None:
        rest = iter(rows)
        while self._add(list(islice(rest, CHUNK))):  # nothing holds a part while the next one is read
            pass

    def _add(self, part: list[Row]) -> bool:
        """Whether there was one; of no rows at all there is one empty part."""
        if not part and self.parts:
            return False
        if self.zero_ns is None:
            self.zero_ns = next((at for at, _ in part if at is not None), None)
        zero = self.zero_ns or 0
        timed = np.array([at is not None for at, _ in part], bool)
        at_ns = integers([0 if at is None else at - zero for at, _ in part])
        requests = [request for _, request in part]
        self.parts.append(_part(requests, self.codes, {"at_ns": at_ns, "timed": timed}))
        return bool(part)

    def rows(self) -> Rows:
        if not self.parts:
            self._add([])
        names = {name: list(codes) for name, codes in self.codes.items()}
        parts, self.parts = self.parts, []
        columns = {}
        for name in DEFAULTS:  # one column after the other, each let go of in its parts: twice the room for one only
            if any(name in part for part in parts):
                columns[name] = np.concatenate([part[name] for part in parts])
            for part in parts:
                part.columns.pop(name, None)
        ids = np.concatenate([part.ids for part in parts])
        return Rows(sum(part.n for part in parts), columns, ids, names, self.zero_ns or 0)


def _part(requests: Sequence[Request], codes: dict[str, dict[str, int]], columns: dict[str, np.ndarray]) -> Rows:
    n = len(requests)
    for name in _NUMBERS:
        column = np.fromiter(map(attrgetter(name), requests), np.int64, n)
        columns[name] = column.astype(np.int32) if int(column.max(initial=0)) < 2**31 else column
    columns["tokens_out"] = np.array([-1 if r.tokens_out is None else r.tokens_out for r in requests], np.int32)
    columns["think_s"] = _floats([r.think_s for r in requests])
    columns["blocks"] = np.array([len(r.hash_ids) for r in requests], np.int32)
    columns["own_text"] = np.array([texts != _NO_TEXTS for texts in map(_texts, requests)], bool)
    for label in LABELS:
        columns[label] = _coded(list(map(attrgetter(label), requests)), codes[label])
    said = {name: column for name, column in columns.items() if not _is_default(name, column)}
    ids = integers(list(chain.from_iterable(r.hash_ids for r in requests))) if "blocks" in said else np.empty(0, int)
    return Rows(n, said, ids, {})


_texts, _NO_TEXTS = attrgetter("prompt", "messages", "prompt_token_ids", "body"), (None,) * 4


def says_its_own(r: Request) -> bool:
    return _texts(r) != _NO_TEXTS


def _is_default(name: str, column: np.ndarray) -> bool:
    default = DEFAULTS[name][1]
    return bool((np.isnan(column) if default != default else column == default).all())


def integers(values: list[int]) -> np.ndarray:
    """int64, or Python's own where one of them has more bits."""
    try:
        return np.array(values, np.int64)
    except OverflowError:
        return np.array(values, object)


def _floats(values: list[float | None]) -> np.ndarray:
    return np.array([np.nan if x is None else x for x in values], np.float64)


def _coded(labels: list[str], codes: dict[str, int]) -> np.ndarray:
    if not any(labels):
        return np.full(len(labels), -1, np.int32)
    return np.array([codes.setdefault(label, len(codes)) if label else -1 for label in labels], np.int32)


def take(rows: Rows, places: np.ndarray) -> Rows:
    """The rows at these places, in their order."""
    columns = {name: column[places] for name, column in rows.columns.items()}
    ids = rows.ids[_id_places(rows, places)] if "blocks" in rows else rows.ids
    return Rows(len(places), columns, ids, rows.names, rows.zero_ns)


def _id_places(rows: Rows, places: np.ndarray) -> np.ndarray:
    """Where in rows.ids those of the rows at `places` stand."""
    counts = rows["blocks"].astype(np.int64)
    starts, kept = np.cumsum(counts) - counts, counts[places]
    return np.repeat(starts[places] - (np.cumsum(kept) - kept), kept) + np.arange(int(kept.sum()))


def without_blocks(rows: Rows, gone: np.ndarray) -> None:
    """Take their hash ids from the rows where `gone` (n,), in place."""
    if "blocks" not in rows:
        return
    rows.ids = rows.ids[np.repeat(~gone, rows["blocks"])]
    for name in ("blocks", "block_size"):
        rows.columns[name] = np.where(gone, np.int32(0), rows[name])


def prompts(rows: Rows) -> Iterator[Prompt]:
    """Each prompt that has blocks, in order; before them one of nothing that has all others' tokens."""
    counts = rows["blocks"]
    has = np.flatnonzero(counts)
    tokens_in = rows["tokens_in"]
    yield Prompt(int(tokens_in.sum(dtype=np.int64)) - int(tokens_in[has].sum(dtype=np.int64)), 0, (), 0)
    ends = np.cumsum(counts[has], dtype=np.int64)
    for start in range(0, len(has), CHUNK):  # as Python's own numbers, but not all at once
        part = slice(start, start + CHUNK)
        at = has[part]
        first = int(ends[start] - counts[at[0]])
        ids, before = rows.ids[first : int(ends[part][-1])].tolist(), 0
        columns = (tokens_in[at], rows["block_size"][at], rows["line"][at], ends[part] - first)
        for tokens, size, line, end in zip(*(column.tolist() for column in columns), strict=True):
            yield Prompt(tokens, size, tuple(ids[before:end]), line)
            before = end
