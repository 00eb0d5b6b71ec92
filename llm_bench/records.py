"""A Record for each request, in an Arrow stream on disk that can be read after a crash.

A cell (one target at one load) is a file `NAME.arrow`: a JSON header in the schema's metadata, then record batches as
requests finish, flushed every FLUSH_S: by `write` while records come, by the caller's `flush` while none do. After
`kill -9` at most the last FLUSH_S of finished requests is lost.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from llm_bench.errors import BenchError

FLUSH_S = 0.25  # a batch costs about 0.1 ms whatever its size: four a second are not felt, one a request would be
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
    # how much
    planned_in: int = -1
    asked_out: int = -1  # max_tokens, -1 when left to the server
    tokens_in: int = -1  # the server's usage.prompt_tokens
    tokens_cached: int = -1  # prompt tokens the server took from its cache
    tokens_out: int = -1
    tokens_out_from: str = ""  # usage | tokenizer | events | ""
    text_bytes: int = 0
    bytes_in: int = 0
    comments: int = 0  # SSE comment lines: liveness, no tokens
    # circumstances
    reconnects: int = 0
    attempts: int = 0
    first_attempt: str = ""  # ok, or the status or end of the first attempt
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
    raw: bytes = b""  # response bytes, kept for failures and the first --keep-bytes


_LISTS = {"labels": pa.list_(pa.string()), "event_ns": pa.list_(pa.int64())}
_LISTS |= {"event_tokens": pa.list_(pa.int32()), "event_choice": pa.list_(pa.int32())}
_SCALARS: dict[Any, pa.DataType] = {int: pa.int64(), str: pa.string(), float: pa.float64(), bytes: pa.binary()}
SCHEMA = pa.schema([(f.name, _LISTS.get(f.name) or _SCALARS[f.type]) for f in fields(Record)])
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # Arrow IPC: continuation marker, metadata length 0
_NO_GAUGE = np.zeros((0, 2), np.int64)


class Writer:
    """Appends Records to `path`; first `header`, JSON-able: versions, host, settings, target, plan hash, wall anchor.

    Raises OSError when the disk refuses; what was flushed before stays readable.
    """

    def __init__(self, path: Path, header: dict[str, Any], now: Callable[[], float] = time.monotonic) -> None:
        self._file = path.open("wb")
        schema = SCHEMA.with_metadata({"llm_bench": json.dumps(header)})
        self._stream = pa.ipc.new_stream(self._file, schema)
        # Arrow writes the schema with the first batch: an empty one puts the header on disk before the first record.
        self._stream.write_batch(pa.RecordBatch.from_pylist([], schema=SCHEMA))
        self._file.flush()
        self._pending: list[Record] = []
        self._now = now
        self._flushed = now()

    def write(self, record: Record) -> None:
        self._pending.append(record)
        if self._now() - self._flushed >= FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Hand what is pending to the operating system, from where a killed process cannot lose it."""
        self._flushed = self._now()
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        columns = [pa.array([getattr(r, f.name) for r in pending], f.type) for f in SCHEMA]
        self._stream.write_batch(pa.record_batch(columns, schema=SCHEMA))
        self._file.flush()

    def close(self) -> None:
        try:
            self.flush()
            self._stream.close()
        finally:
            self._file.close()


@dataclass(slots=True)
class Cell:
    """A cell's records as columns, in due order. `n` rows; ragged columns are flat arrays with `offsets` (n + 1)."""

    header: dict[str, Any]
    n: int
    columns: dict[str, np.ndarray]  # every scalar field of Record; strings as object arrays
    offsets: np.ndarray  # int64 (n + 1): row i's events are event_ns[offsets[i]:offsets[i + 1]]
    event_ns: np.ndarray  # int64 (events)
    event_tokens: np.ndarray  # int64 (events), 0 where unknown
    event_choice: np.ndarray  # int64 (events)
    labels: list[list[str]]
    complete: bool = True  # False: the file ends in the middle (crash); the rows before are whole
    gauge: np.ndarray = field(default_factory=lambda: _NO_GAUGE)  # (k, 2): at ns, this many in flight

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]


def read(path: Path) -> Cell:
    """The cell in `path`, with its gauge (`NAME.gauge.npy`) where there is one.

    Raises BenchError for a file that is no record file. A file cut short by a crash gives the rows before the cut.
    """
    try:
        data = path.read_bytes()
    except OSError as e:
        raise BenchError(f"{path}: cannot be read: {e.strerror}") from None
    try:
        reader = pa.ipc.open_stream(data)
        header = json.loads((reader.schema.metadata or {})[b"llm_bench"])
    except (pa.ArrowException, OSError, KeyError, ValueError):
        raise BenchError(f"{path}: not a record file of llm-bench (no Arrow stream with its header)") from None
    missing = [f.name for f in SCHEMA if reader.schema.get_field_index(f.name) < 0 or reader.schema.field(f.name) != f]
    if missing:
        raise BenchError(f"{path}: columns missing or of another type: {missing}; another version wrote it")
    batches: list[pa.RecordBatch] = []
    # A stream without its end marker is what kill -9 leaves; pyarrow reads it without complaint, so look.
    complete = data.endswith(_END_OF_STREAM)
    try:
        batches.extend(reader)
    except (pa.ArrowException, OSError):
        complete = False
    gauge, gauge_whole = _gauge_of(path)
    return from_table(pa.Table.from_batches(batches, reader.schema), header, complete and gauge_whole, gauge)


def _gauge_of(path: Path) -> tuple[np.ndarray, bool]:
    """The cell's gauge, and whether it could be read: it is written last, so a crash may leave none or half of one."""
    gauge = path.with_suffix(".gauge.npy")
    if not gauge.exists():
        return _NO_GAUGE, True
    try:
        return np.load(gauge), True
    except (ValueError, EOFError, OSError):
        return _NO_GAUGE, False


def from_records(records: list[Record], header: dict[str, Any] | None = None, gauge: np.ndarray | None = None) -> Cell:
    """The same columns from Records in memory: for tests and small tools."""
    columns = [pa.array([getattr(r, f.name) for r in records], f.type) for f in SCHEMA]
    return from_table(pa.Table.from_arrays(columns, schema=SCHEMA), header or {}, True, gauge)


def from_table(table: pa.Table, header: dict[str, Any], complete: bool = True, gauge: np.ndarray | None = None) -> Cell:
    """Columns in due order (ties by plan row) from rows in the order in which requests ended."""
    order = np.lexsort((table["index"].to_numpy(), table["due_ns"].to_numpy()))
    table = table.take(pa.array(order)).combine_chunks()
    scalars = [f.name for f in SCHEMA if f.name not in _LISTS]
    offsets, event_ns = _ragged(table["event_ns"])
    return Cell(
        header=header,
        n=table.num_rows,
        columns={name: table[name].to_numpy(zero_copy_only=False) for name in scalars},
        offsets=offsets,
        event_ns=event_ns,
        event_tokens=_beside(table["event_tokens"], offsets),
        event_choice=_beside(table["event_choice"], offsets),
        labels=table["labels"].to_pylist(),
        complete=complete,
        gauge=_NO_GAUGE if gauge is None else gauge,
    )


def _ragged(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Offsets (n + 1) and flat values of a list column, without making Python objects of 10 million stamps."""
    lists = column.combine_chunks()
    offsets = lists.offsets.to_numpy().astype(np.int64)
    values = lists.values.to_numpy()[offsets[0] : offsets[-1]].astype(np.int64, copy=False)
    return offsets - offsets[0], values


def _beside(column: pa.ChunkedArray, offsets: np.ndarray) -> np.ndarray:
    """Flat values beside event_ns; rows that left the list empty become zeros."""
    own, values = _ragged(column)
    have, counts = np.diff(own), np.diff(offsets)
    assert ((have == 0) | (have == counts)).all(), "a record's list is neither empty nor as long as its event_ns"
    if len(values) == offsets[-1]:
        return values
    out = np.zeros(int(offsets[-1]), np.int64)
    if len(values):
        out[np.repeat(have > 0, counts)] = values
    return out
