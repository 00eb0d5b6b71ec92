"""A Record for each request, in an Arrow stream on disk that can be read after a crash.

A cell (one target at one load) is a file `NAME.arrow`: a JSON header in the schema's metadata, then record batches as
requests finish, flushed every FLUSH_S: by `write` while records come, by the caller's `flush` while none do. After
`kill -9` at most the last FLUSH_S of finished requests is lost.
"""

import errno
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from llm_bench import shapes
from llm_bench.columns import NO_GAUGE, from_table, merged
from llm_bench.columns import Cell as Cell
from llm_bench.errors import BenchError

FLUSH_S = 0.25  # a batch costs about 0.1 ms whatever its size: four a second are not felt, one a request would be
# What a disk says that takes no more: full, over a quota, over the largest file, read-only after a fault.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
OUTCOMES = ("ok", "failed", "cancelled", "cut_at_end", "dropped")


@dataclass(slots=True)
class Record:
    """All that is kept of one request. Stamps are CLOCK_MONOTONIC nanoseconds, 0 = never; counts -1 = unknown."""

    index: int  # row in the cell's plan
    request_id: str  # sent as X-Request-Id, so that server logs can be joined
    outcome: str  # one of OUTCOMES
    # when
    due_ns: int
    ready_ns: int = 0  # a slot or the cap let it go: ready - due is waiting, sent - ready the client's own lateness
    sent_ns: int = 0
    connect_ns: int = 0  # of sent - ready: waiting for a new connection
    first_byte_ns: int = 0
    end_ns: int = 0
    event_ns: list[int] = field(default_factory=list)  # token-bearing events, stamped once per read
    event_tokens: list[int] = field(default_factory=list)  # tokens of each, or empty where the wire does not say
    event_choice: list[int] = field(default_factory=list)  # choice index of each, or empty when all are choice 0
    first_answer_ns: int = 0  # first content event (not reasoning), 0 when none
    # how it ended
    error_kind: str = ""  # "" or a kind of METRICS: empty_output, truncated_stream, http_4xx, ...
    error: str = ""  # never empty on a failure
    status: int = 0  # HTTP status, 0 when none came
    finish_reason: str = ""  # of choice 0, as the wire has it
    labels: list[str] = field(default_factory=list)  # e.g. "end unproven", "no [DONE]"
    choices: int = -1  # that the answer was seen to have, streamed or whole
    # how much
    planned_in: int = -1
    asked_out: int = -1  # max_tokens, -1 when left to the server
    tokens_in: int = -1  # the server's usage.prompt_tokens
    tokens_cached: int = -1  # prompt tokens the server took from its cache
    tokens_out: int = -1
    tokens_out_from: str = ""  # usage | tokenizer | events | ""
    tokens_reasoning: int = -1  # of tokens_out, where the server says so
    tokens_counted: int = -1  # of the same text by the target's tokenizer, of the first answers of a cell
    text_bytes: int = 0
    bytes_in: int = 0
    bytes_out: int = -1  # of the last attempt: head and body, as handed to the socket
    comments: int = 0  # SSE comment lines: liveness, no tokens
    # circumstances
    reconnects: int = 0
    attempts: int = 0
    url_index: int = -1  # which of the target's URLs had the last attempt
    first_attempt: str = ""  # ok, or the error kind; where there were more attempts, the status or end of the first
    retry_wait_ns: int = 0  # waited between attempts, Retry-After included
    priority: int = 0
    turn: int = 0
    session: str = ""
    request_class: str = ""
    prompt_hash: int = 0  # 64 bits of the body as sent: repeated prompts are found even where no cache is reported
    # the server's own account, ms; nan where it gives none
    server_ttft_ms: float = np.nan
    server_tpot_ms: float = np.nan
    server_queue_ms: float = np.nan
    server_prefill_ms: float = np.nan
    server_decode_ms: float = np.nan
    server_batch: float = np.nan  # requests' inputs that were computed at once, in the largest batch it was in; no ms
    raw: bytes = b""  # response bytes, kept for failures as far as cell.RAW_TOTAL goes, and the first --keep-bytes


_LISTS = {"labels": pa.list_(pa.string()), "event_ns": pa.list_(pa.int64())}
_LISTS |= {"event_tokens": pa.list_(pa.int32()), "event_choice": pa.list_(pa.int32())}
_SCALARS: dict[Any, pa.DataType] = {int: pa.int64(), str: pa.string(), float: pa.float64(), bytes: pa.binary()}
SCHEMA = pa.schema([(f.name, _LISTS.get(f.name) or _SCALARS[f.type]) for f in fields(Record)])
_ROW = pa.struct(list(SCHEMA))
_VALUES = attrgetter(*SCHEMA.names)
UNKNOWN: dict[str, Any] = {
    f.name: [] if f.name in _LISTS else f.default for f in fields(Record)
}  # a field that nobody recorded
# What every version has recorded: without one of these no figure means anything.
REQUIRED = ("index", "request_id", "outcome", "due_ns", "ready_ns", "sent_ns", "first_byte_ns", "end_ns", "event_ns")
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # Arrow IPC: continuation marker, metadata length 0


class Writer:
    """Appends Records to `path`; first `header`, JSON-able: versions, host, settings, target, plan hash, wall anchor.

    Raises BenchError for a header that JSON cannot hold, and OSError (of DISK_ERRORS, most likely) when the disk takes
    no more: then the file ends with the last batch that fitted, nothing more is written to it, and every later call
    raises that first error again, so that it cannot get lost in a background task.
    """

    def __init__(self, path: Path, header: dict[str, Any], now: Callable[[], float] = time.monotonic) -> None:
        try:
            text = json.dumps(header, allow_nan=False)
        except ValueError as e:
            raise BenchError(f"{path}: the settings cannot be stored: {e}") from None
        self._file = path.open("wb", buffering=0)  # a buffer would hold what did not fit, and write it later
        self._size = 0  # bytes of whole messages
        self._refused: OSError | None = None
        self._pending: list[Record] = []
        try:
            self._append(SCHEMA.with_metadata({"llm_bench": text}).serialize())
        except OSError:
            self._file.close()
            path.unlink(missing_ok=True)  # an empty file would be no record file, and the run beside it unreadable
            raise
        self._now = now
        self._flushed = now()

    def write(self, record: Record) -> None:
        self._pending.append(record)
        if self._now() - self._flushed >= FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Hand what is pending to the operating system, from where a killed process cannot lose it."""
        self._flushed = self._now()
        if self._refused is not None:
            raise self._refused
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        self._append(_batch(pending).serialize())

    def close(self) -> None:
        try:
            self.flush()
            self._append(_END_OF_STREAM)
        finally:
            self._file.close()

    def _append(self, message: bytes) -> None:
        """One IPC message (https://arrow.apache.org/docs/format/Columnar.html#ipc-streaming-format), whole or not."""
        rest = memoryview(message)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as e:
            self._refused = e
            with suppress(OSError):
                os.ftruncate(self._file.fileno(), self._size)
            raise
        self._size += len(memoryview(message))


def read(path: Path) -> Cell:
    """The cell in the record file `path`, with its gauge (`NAME.gauge.npy`) where there is one.

    Raises BenchError for a file that is no record file. A file cut short by a crash gives the rows before the cut.
    """
    return _pooled([path])


def read_cell(folder: Path, name: str) -> Cell:
    """The cell `name` of a run's folder, pooled from all of its record files: the workers' and what the parent added.

    Its gauge is the sum of theirs; where the gauge of one that has records is missing there is none. Where the file of
    a worker is missing, the cell names it and is not complete. Raises BenchError as `read` does, where the cell has no
    file, and where its files are of different runs, cells or plans.
    """
    files = files_of(folder).get(name)
    if not files:
        raise BenchError(f"{folder}: no record file of a cell {name!r} ({name}.arrow, {name}.w0.arrow, ...)")
    cell = _pooled(files)
    workers = cell.header.get("workers") or 1
    expected = [f"{name}.w{k}.arrow" for k in range(workers)] if workers > 1 else []
    absent = tuple(file for file in expected if file not in {path.name for path in files})
    return replace(cell, absent=absent, complete=cell.complete and not absent)


_SHARD = re.compile(r"(.+?)(?:\.w(\d+)|\.(lost))?\.arrow")  # NAME.arrow, NAME.w0.arrow, NAME.lost.arrow


def files_of(folder: Path) -> dict[str, list[Path]]:
    """The record files of each cell in a run's folder; workers by number, what was lost last."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for path in folder.glob("*.arrow"):
        if (match := _SHARD.fullmatch(path.name)) and path.is_file():
            rank = 1 << 62 if match[3] else int(match[2] or -1)
            found.setdefault(match[1], []).append((rank, path))
    return {name: [path for _, path in sorted(files)] for name, files in sorted(found.items())}


def left(folder: Path) -> str:
    """What a disk that takes no more has left of the run in `folder`, in words: are there requests to report on?"""
    files = (path for paths in files_of(folder).values() for path in paths)
    return "what was measured before is readable there" if any(map(_has_a_row, files)) else "nothing had been measured"


def _has_a_row(path: Path) -> bool:
    try:
        return bool(pa.ipc.open_stream(pa.memory_map(os.fsencode(path))).read_next_batch().num_rows)
    except (pa.ArrowException, OSError, StopIteration):  # empty, cut within its header, or nothing behind that
        return False


def _pooled(paths: Sequence[Path]) -> Cell:
    parts = [_open(path) for path in paths]
    for path, part in zip(paths[1:], parts[1:], strict=True):
        _check_same(paths[0], parts[0].header, path, part.header)
    gauges, whole = [], True
    for path, part in zip(paths, parts, strict=True):
        gauge, readable = _gauge_of(path)
        whole &= readable
        if len(gauge) or (part.table.num_rows and not path.name.endswith(".lost.arrow")):
            gauges.append(gauge)
    gauge = merged(gauges) if all(map(len, gauges)) else NO_GAUGE
    table = pa.concat_tables([part.table for part in parts])
    try:
        return from_table(table, parts[0].header, whole and all(part.complete for part in parts), gauge)
    except ValueError as e:
        raise BenchError(f"{paths[0]}: {e}") from None


def _check_same(first: Path, mine: Mapping[str, Any], other: Path, theirs: Mapping[str, Any]) -> None:
    """Files pooled into one cell were written by one run: a copied one would count another run's requests."""
    for key in ("run_id", "cell", "plan.hash", "workers"):
        a, b = (_inside(header, key) for header in (mine, theirs))
        if a != b:
            raise BenchError(
                f"{other}: {key} is {b!r}, and {a!r} in {first}: files of two runs or cells cannot be read as one. "
                "Move the one that does not belong here"
            )


def _inside(header: Mapping[str, Any], key: str) -> Any:
    section, _, name = key.partition(".")
    found = header.get(section)
    return (found or {}).get(name) if name else found


class _Opened(NamedTuple):
    header: dict[str, Any]
    table: pa.Table
    complete: bool


def _open(path: Path) -> _Opened:
    """A record file, mapped into memory: what is never looked at is never read."""
    try:
        if not path.stat().st_size:
            raise BenchError(f"{path}: not a record file of llm-bench (it is empty)")
        data = pa.memory_map(os.fsencode(path)).read_buffer()
    except OSError as e:
        raise BenchError(f"{path}: cannot be read: {e.strerror or e}") from None
    try:
        reader = pa.ipc.open_stream(data)
        text = (reader.schema.metadata or {})[b"llm_bench"]
        names = reader.schema.names  # decoded here: a flipped bit makes one that is no text
    except (pa.ArrowException, OSError, KeyError, ValueError):
        raise BenchError(f"{path}: not a record file of llm-bench (no Arrow stream with its header)") from None
    wrong = [f.name for f in SCHEMA if f not in reader.schema and (f.name in names or f.name in REQUIRED)]
    if wrong:
        raise BenchError(f"{path}: columns missing or of another type: {wrong}; another version wrote it")
    header = shapes.parse(text, shapes.HEADER, f"{path}: header")
    batches: list[pa.RecordBatch] = []
    # A stream without its end marker is what kill -9 leaves; pyarrow reads it without complaint, so look.
    complete = data.slice(max(data.size - len(_END_OF_STREAM), 0)).to_pybytes() == _END_OF_STREAM
    try:
        for batch in reader:
            batch.validate(full=True)  # a flipped byte in an offset would end in a crash, and not in an error
            batches.append(batch)
    except (pa.ArrowException, OSError, ValueError, IndexError):
        complete = False
    table = pa.Table.from_batches(batches, reader.schema)
    for f in SCHEMA:
        if f.name not in table.schema.names:  # an older version did not record it: it is unknown
            table = table.append_column(f, pa.array([UNKNOWN[f.name]] * table.num_rows, f.type))
    return _Opened(header, table.select(SCHEMA.names).replace_schema_metadata(None), complete)


def _gauge_of(path: Path) -> tuple[np.ndarray, bool]:
    """The cell's gauge, and whether it could be read: it is written last, so a crash may leave none or half of one.

    Raises BenchError for an array that is no gauge.
    """
    gauge = path.with_suffix(".gauge.npy")
    if not gauge.exists():
        return NO_GAUGE, True
    try:
        steps = np.load(gauge)
    except (ValueError, EOFError, OSError):
        return NO_GAUGE, False
    if not isinstance(steps, np.ndarray) or steps.ndim != 2 or steps.shape[1] != 2 or steps.dtype.kind != "i":
        found = f"{steps.dtype} {steps.shape}" if isinstance(steps, np.ndarray) else type(steps).__name__
        raise BenchError(f"{gauge}: expected whole numbers (k, 2), the ns and how many are in flight, found {found}")
    if (np.diff(steps[:, 0]) < 0).any() or (steps[:, 1] < 0).any():
        raise BenchError(f"{gauge}: expected moments in order and counts of 0 or more")
    return steps.astype(np.int64, copy=False), True


def from_records(records: list[Record], header: dict[str, Any] | None = None, gauge: np.ndarray | None = None) -> Cell:
    """The same columns from Records in memory: for tests and small tools."""
    return from_table(pa.Table.from_batches([_batch(records)]), header or {}, True, gauge)


def _batch(records: Sequence[Record]) -> pa.RecordBatch:
    """In one call of Arrow's: a call a column costs 3 µs each before it has looked at a value."""
    return pa.RecordBatch.from_struct_array(pa.array([*map(_VALUES, records)], _ROW))
