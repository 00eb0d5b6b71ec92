"""A cell's records in memory: columns in due order, and the stamps of its events where they lie in the file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

NO_GAUGE = np.zeros((0, 2), np.int64)


class Piece(NamedTuple):
    """The token-bearing events of some requests, as they lie in the file: one after the other, without a copy."""

    rows: np.ndarray  # (k,): the requests, as rows of the cell
    offsets: np.ndarray  # (k + 1): request i's events are ns[offsets[i]:offsets[i + 1]]; offsets[0] is 0
    ns: np.ndarray  # int64, never falling within a request
    tokens: np.ndarray | None  # int32, beside ns, 0 where unknown; None: unknown for all
    choice: np.ndarray | None  # int32, beside ns; None: all are choice 0


PIECE_EVENTS = 1 << 22  # a piece of more is cut, so that what is computed from one stays small beside the file


@dataclass
class Cell:
    """A cell's records, in due order (ties by plan row). Columns are made when first asked for, and kept."""

    header: dict[str, Any]
    table: pa.Table  # as in the file: in the order in which requests ended
    order: np.ndarray  # (n,): row i of the cell is row order[i] of the table
    stored: list[Piece]
    counts: np.ndarray  # int64 (n,): token-bearing events of each request
    first_ns: np.ndarray  # int64 (n,): its first one's stamp, 0 where there is none
    last_ns: np.ndarray  # int64 (n,)
    complete: bool = True  # False: the file ends in the middle (crash); the rows before are whole
    gauge: np.ndarray = field(default_factory=lambda: NO_GAUGE)  # (k, 2): at ns, this many in flight
    absent: tuple[str, ...] = ()  # names of the record files that a cell of so many workers has and this one lacks
    _columns: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    _codes: dict[str, tuple[list[str], np.ndarray]] = field(default_factory=dict, repr=False)

    @property
    def n(self) -> int:
        return len(self.order)

    def __getitem__(self, name: str) -> np.ndarray:
        """A scalar field of Record (n,); strings as an object array."""
        if name not in self._columns:
            if pa.types.is_string(self.table.schema.field(name).type):
                words, codes = self._coded(name)
                self._columns[name] = np.array([*words, ""], object)[codes]
            else:
                self._columns[name] = self.table[name].to_numpy()[self.order]
        return self._columns[name]

    def among(self, name: str, *values: str) -> np.ndarray:
        """Mask (n,) of the rows whose string field is one of `values`: no string is made for it."""
        words, codes = self._coded(name)
        return np.asarray(np.array([*(word in values for word in words), False], bool)[codes])

    def _coded(self, name: str) -> tuple[list[str], np.ndarray]:
        if name not in self._codes:
            coded = self.table[name].combine_chunks().dictionary_encode()
            self._codes[name] = coded.dictionary.to_pylist(), coded.indices.to_numpy()[self.order]
        return self._codes[name]

    def at(self, name: str, row: int) -> Any:
        """One value of a field, for columns too large to be read whole."""
        return self.table[name][int(self.order[row])].as_py()

    def labelled(self, label: str) -> np.ndarray:
        """Mask (n,) of the requests that bear a label."""
        import pyarrow.compute as pc  # of reports only: a load need not wait for it

        lists = self.table["labels"].combine_chunks()
        bear = np.zeros(self.table.num_rows, bool)
        bear[pc.list_parent_indices(lists).to_numpy()[pc.equal(pc.list_flatten(lists), label).to_numpy(False)]] = True
        return np.asarray(bear[self.order])

    def only(self, rows: np.ndarray) -> "Cell":
        """The cell of the requests in mask `rows` (n,) alone; without a gauge, which counts them all."""
        place, stored = np.cumsum(rows) - 1, []
        for piece in self.stored:
            kept = rows[piece.rows]
            many = np.diff(piece.offsets)
            events = np.repeat(kept, many)
            offsets = np.concatenate([[0], np.cumsum(many[kept])])
            beside = (None if values is None else values[events] for values in (piece.tokens, piece.choice))
            stored.append(Piece(place[piece.rows[kept]], offsets, piece.ns[events], *beside))
        counts, first_ns, last_ns = self.counts[rows], self.first_ns[rows], self.last_ns[rows]
        return Cell(self.header, self.table, self.order[rows], stored, counts, first_ns, last_ns, self.complete)

    def pieces(self) -> Iterator[Piece]:
        """Every request's events, in the order of the file, some millions at a time at most."""
        for piece in self.stored:
            start, rows = 0, len(piece.rows)
            while start < rows:
                most = int(np.searchsorted(piece.offsets, piece.offsets[start] + PIECE_EVENTS, "right")) - 1
                stop = min(max(most, start + 1), rows)
                yield _part(piece, start, stop)
                start = stop

    @cached_property
    def choices(self) -> np.ndarray:
        """Choices (n,) that each answer was seen to have; where none was counted, as its events have it, or one."""
        found = np.maximum(self["choices"], 1)
        for piece in self.pieces():
            if piece.choice is not None and piece.choice.any():
                np.maximum.at(found, np.repeat(piece.rows, np.diff(piece.offsets)), piece.choice + 1)
        return np.asarray(found)

    # ---- flat and in due order, for tools and tests that read small cells

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 (n + 1): row i's events are event_ns[offsets[i]:offsets[i + 1]]."""
        return np.concatenate([[0], np.cumsum(self.counts)])

    @cached_property
    def event_ns(self) -> np.ndarray:
        return self._flat("ns")

    @cached_property
    def event_tokens(self) -> np.ndarray:
        """0 where unknown."""
        return self._flat("tokens")

    @cached_property
    def event_choice(self) -> np.ndarray:
        return self._flat("choice")

    @cached_property
    def labels(self) -> list[list[str]]:
        found = self.table["labels"].to_pylist()
        return [found[i] for i in self.order]

    def _flat(self, name: str) -> np.ndarray:
        flat = np.zeros(int(self.offsets[-1]), np.int64)
        for piece in self.pieces():
            values = getattr(piece, name)
            if values is not None:
                shift = self.offsets[piece.rows] - piece.offsets[:-1]
                flat[np.repeat(shift, np.diff(piece.offsets)) + np.arange(len(values))] = values
        return flat


def _part(piece: Piece, start: int, stop: int) -> Piece:
    if (start, stop) == (0, len(piece.rows)):
        return piece
    events = slice(int(piece.offsets[start]), int(piece.offsets[stop]))
    tokens, choice = (None if values is None else values[events] for values in (piece.tokens, piece.choice))
    offsets = piece.offsets[start : stop + 1] - piece.offsets[start]
    return Piece(piece.rows[start:stop], offsets, piece.ns[events], tokens, choice)


def from_table(table: pa.Table, header: dict[str, Any], complete: bool = True, gauge: np.ndarray | None = None) -> Cell:
    """A Cell of rows in the order in which requests ended. Raises ValueError for lists that do not belong together."""
    n = table.num_rows
    if any(column.null_count for column in table.columns):
        raise ValueError("a field is null, where 0, -1 or an empty text says that it is unknown")
    order = np.lexsort((table["index"].to_numpy(), table["due_ns"].to_numpy()))
    place = np.empty(n, np.int64)
    place[order] = np.arange(n)
    counts, first_ns, last_ns = (np.zeros(n, np.int64) for _ in range(3))
    stored, at = [], 0
    for batch in table.to_batches():
        piece = _piece(batch, place[at : at + batch.num_rows])
        at += batch.num_rows
        many = np.diff(piece.offsets)
        some = many > 0
        counts[piece.rows] = many
        first_ns[piece.rows[some]] = piece.ns[piece.offsets[:-1][some]]
        last_ns[piece.rows[some]] = piece.ns[piece.offsets[1:][some] - 1]
        stored.append(piece)
    gauge = NO_GAUGE if gauge is None else gauge
    return Cell(header, table, order, stored, counts, first_ns, last_ns, complete, gauge)


def _piece(batch: pa.RecordBatch, rows: np.ndarray) -> Piece:
    offsets, ns = _ragged(batch["event_ns"])
    beside = [_beside(name, batch[name], offsets) for name in ("event_tokens", "event_choice")]
    return Piece(rows, offsets, ns, *beside)


def _ragged(lists: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """Offsets (k + 1) and flat values of a list column, without making Python objects of a million stamps."""
    offsets = lists.offsets.to_numpy()
    return offsets - offsets[0], lists.values.to_numpy()[offsets[0] : offsets[-1]]


def _beside(name: str, lists: pa.ListArray, offsets: np.ndarray) -> np.ndarray | None:
    """Flat values beside the stamps, or None where all lists are empty; a row that left its list empty has zeros."""
    own, values = _ragged(lists)
    if not len(values):
        return None
    have, counts = np.diff(own), np.diff(offsets)
    if ((have != 0) & (have != counts)).any():
        raise ValueError(f"{name} of a record is neither empty nor as long as its event_ns")
    if len(values) == offsets[-1]:
        return values
    out = np.zeros(int(offsets[-1]), values.dtype)
    out[np.repeat(have > 0, counts)] = values
    return out


def merged(gauges: Sequence[np.ndarray]) -> np.ndarray:
    """The sum of step functions (k, 2), each of which is 0 before its first step."""
    if len(gauges) < 2:
        return gauges[0] if gauges else NO_GAUGE
    at_ns = np.concatenate([gauge[:, 0] for gauge in gauges])
    change = np.concatenate([np.diff(gauge[:, 1], prepend=0) for gauge in gauges])
    order = np.argsort(at_ns, kind="stable")
    return np.stack([at_ns[order], np.cumsum(change[order])], axis=1)
