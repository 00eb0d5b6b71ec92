"""Runs as a Parquet file for other tools: one row a request, its record and every series that has one value a request.

What is unknown is null, never 0 or -1; beside a series stands the reason. Units and definitions are in the metadata of
the columns, windows and settings of the cells in that of the file (key `llm_bench`, JSON).
"""

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from llm_bench import files
from llm_bench.errors import BenchError
from llm_bench.printable import clean
from llm_bench.records import SCHEMA as RECORD
from llm_bench.results import Asked, Measured, Run
from llm_bench.series import SERIES, Column, Context, due_in

VERSION = 1  # of the file's columns and of its metadata; counts up when a name changes its meaning
ROWS = 16_384  # of a row group: what is held in memory at a time, lists of stamps included
POOLED = ("itl",)  # a value a gap: the gaps of a request are those of its event_ns
_STAMP = "ns of the client's monotonic clock, the run's anchor to the wall clock is in the file's metadata"
_NEVER_0 = ("ready_ns", "sent_ns", "first_byte_ns", "end_ns", "first_answer_ns", "status")
_UNKNOWN_MINUS_1 = ("planned_in", "asked_out", "tokens_in", "tokens_cached", "tokens_out", "tokens_reasoning")
_PLACE = {
    "run": "name of the run's folder",
    "cell": "name of the cell: one target at one load",
    "target": "name of the target",
    "load": "load of the cell",
    "in_window": "whether the request was due in the measured window",
}
_FIELDS = {
    "index": ("", "row in the cell's plan"),
    "request_id": ("", "sent as X-Request-Id"),
    "outcome": ("", "ok, failed, cancelled, cut_at_end or dropped"),
    "due_ns": (_STAMP, "when the plan said that the request is to leave"),
    "ready_ns": (_STAMP, "when a slot or the cap let it go"),
    "sent_ns": (_STAMP, "when its last byte was handed to the socket"),
    "connect_ns": ("ns", "of sent - ready: waiting for a new connection"),
    "first_byte_ns": (_STAMP, "first byte of the response"),
    "end_ns": (_STAMP, "terminal event, or close, or the moment it was given up"),
    "event_ns": (_STAMP, "when each token-bearing event was read"),
    "event_tokens": ("tokens", "of each event; empty where the wire does not say"),
    "event_choice": ("", "choice index of each event; empty where all are choice 0"),
    "first_answer_ns": (_STAMP, "first content event, not reasoning"),
    "error_kind": ("", "kind of a failure, else empty"),
    "error": ("", "text of a failure, else empty"),
    "status": ("", "HTTP status"),
    "finish_reason": ("", "of choice 0, as the wire has it"),
    "labels": ("", "what else is to be known of it"),
    "choices": ("", "that the answer was seen to have"),
    "planned_in": ("tokens", "planned of the prompt"),
    "asked_out": ("tokens", "most that were asked for; null: left to the server"),
    "tokens_in": ("tokens", "of the prompt, by the server's usage"),
    "tokens_cached": ("tokens", "of the prompt, that the server took from its cache"),
    "tokens_reasoning": ("tokens", "of the answer, that were reasoning"),
    "tokens_out": ("tokens", "of the answer, by tokens_out_from"),
    "tokens_out_from": ("", "usage, tokenizer or events: the last two are estimates"),
    "tokens_counted": ("tokens", "of the same text by the target's tokenizer, where that was checked"),
    "text_bytes": ("bytes", "of the tokens' text"),
    "bytes_in": ("bytes", "received in all"),
    "bytes_out": ("bytes", "sent: head and body of the last attempt"),
    "comments": ("", "SSE comment lines"),
    "reconnects": ("", "connections found closed and opened anew"),
    "attempts": ("", "attempts, the first included"),
    "url_index": ("", "which of the target's URLs had the last attempt, from 0"),
    "first_attempt": ("", "ok or the kind of error of the first attempt"),
    "retry_wait_ns": ("ns", "waited between attempts"),
    "priority": ("", "asked of the server"),
    "turn": ("", "of its conversation, from 0"),
    "session": ("", "conversation; empty: of one turn"),
    "request_class": ("", "class of the request"),
    "prompt_hash": ("", "64 bits of the body as sent"),
    "raw": ("", "response bytes, where they were kept"),
}


def _columns() -> pa.Schema:
    """Every column with its unit and definition; a record's server_* fields are series under their own names."""

    def field(name: str, kind: pa.DataType, unit: str, meaning: str) -> pa.Field:
        return pa.field(name, kind, metadata={"unit": unit, "definition": meaning})

    words = pa.dictionary(pa.int32(), pa.string())
    made = [field(n, pa.bool_() if n == "in_window" else words, "", text) for n, text in _PLACE.items()]
    made += [field(n, RECORD.field(n).type, *text) for n, text in _FIELDS.items()]
    for name, series in SERIES.items():
        if name not in POOLED:
            made.append(field(name, pa.float64(), series.unit, series.meaning))
            made.append(field(f"{name}_reason", words, "", f"why {name} is null"))
    return pa.schema(made)


COLUMNS = _columns()


def write(runs: Sequence[Run], asked: Asked, path: Path) -> int:
    """Every request of every cell of `runs`; series that need deadlines take those of `asked`. Returns the rows.

    The file appears under its name when it is whole. Raises BenchError where it cannot be written.
    """
    from pyarrow import parquet

    rows = 0
    told = {"version": VERSION, "runs": [_run_document(run) for run in runs]}
    context = asked.slo.context()
    schema = COLUMNS.with_metadata({"llm_bench": json.dumps(told, allow_nan=False)})
    try:
        with files.whole(path) as part, parquet.ParquetWriter(part, schema) as file:
            for batch in chain.from_iterable(_batches(run, m, context) for run in runs for m in run.cells):
                file.write_batch(batch.cast(schema))
                rows += batch.num_rows
    except OSError as e:
        raise BenchError(f"{path}: cannot be written: {e.strerror or e}") from None
    return rows


def _run_document(run: Run) -> dict[str, Any]:
    cells = [
        {
            "cell": clean(m.name),
            "target": m.target,
            "load": m.load,
            "header": m.cell.header,
            "window": {"start_ns": m.window.start_ns, "end_ns": m.window.end_ns, "rule": m.window.rule},
            "complete": m.cell.complete,
        }
        for m in run.cells
    ]
    return {
        "run": clean(run.path.name),
        "facts": dict(run.facts),
        "cells": cells,
        "missing": [m._asdict() for m in run.missing],
    }


def _batches(run: Run, m: Measured, context: Context) -> Iterator[pa.RecordBatch]:
    """The cell in due order, ROWS at a time."""
    cell = m.cell
    series = {name: SERIES[name].of(cell, context) for name in SERIES if name not in POOLED}
    inside = due_in(cell, m.window)
    for start in range(0, cell.n, ROWS):
        part = slice(start, min(start + ROWS, cell.n))
        taken = cell.table.select(list(_FIELDS)).take(pa.array(cell.order[part])).combine_chunks()
        made = [_repeated(text, taken.num_rows) for text in (clean(run.path.name), clean(m.name), m.target, m.load)]
        made.append(pa.array(inside[part]))
        made += [_known(name, taken[name]) for name in _FIELDS]
        for column in series.values():
            values = column.values[part]
            made += [pa.array(values, mask=np.isnan(values)), _reasons(column, part)]
        yield pa.record_batch(made, names=COLUMNS.names)


def _repeated(text: str, rows: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([text], pa.string()))


def _known(name: str, column: pa.ChunkedArray) -> pa.Array:
    """A field of the records, with null where it says that it is unknown."""
    values = column.combine_chunks()
    if name in _NEVER_0 or name in _UNKNOWN_MINUS_1:
        unknown = pc.equal(values, 0 if name in _NEVER_0 else -1)
        values = pc.if_else(unknown, pa.scalar(None, values.type), values)
    return values


def _reasons(column: Column, part: slice) -> pa.DictionaryArray:
    """The first reason that a series gives for each of the rows where it is null, else that a stamp is missing."""
    missing = np.isnan(column.values[part])
    said, codes = list(column.why), np.full(len(missing), -1, np.int32)
    for code, mask in enumerate(column.why.values()):
        codes[missing & mask[part] & (codes < 0)] = code
    codes[missing & (codes < 0)] = len(said)
    return pa.DictionaryArray.from_arrays(
        pa.array(codes, mask=~missing), pa.array([*said, "stamp missing"], pa.string())
    )
