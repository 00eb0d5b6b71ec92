"""Another host's clock against ours, and its records on ours. Pure: who exchanges the stamps is elsewhere.

A host drives and stamps by its own monotonic clock, so that a latency is a difference of one clock's stamps, whatever
two clocks think of each other. All of a host's stamps in a cell are moved by one offset, which changes no such
difference: it only says when the host starts, and where its requests lie on the cell's timeline.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # Arrow IPC: continuation marker, metadata length 0
STAMPS = ("due_ns", "ready_ns", "sent_ns", "first_byte_ns", "end_ns", "first_answer_ns")  # of a Record; 0: never
STAMPS_OF_END = ("start_ns", "window_open_ns", "window_close_ns")  # of how a drive ended; 0: never


class Reading(NamedTuple):
    """One exchange: the other clock was ahead of ours by offset_ns, give or take error_ns, at at_ns of ours."""

    at_ns: int
    offset_ns: int
    error_ns: int


def reading(asked_ns: int, received_ns: int, replied_ns: int, heard_ns: int) -> Reading:
    """The four stamps of an exchange (RFC 5905, section 8): ours, theirs, theirs, ours.

    Half of the time on the way bounds the error, however unlike the two ways are.
    """
    on_the_way = max((heard_ns - asked_ns) - (replied_ns - received_ns), 0)
    offset = ((received_ns - asked_ns) + (replied_ns - heard_ns)) // 2
    return Reading((asked_ns + heard_ns) // 2, offset, on_the_way // 2 + 1)


def best(readings: Sequence[Reading]) -> Reading:
    """The one that was shortest on the way: others waited in a queue, and one way may have waited longer."""
    return min(readings, key=lambda r: r.error_ns)


class Clock(NamedTuple):
    """What is known of a host's clock over a cell. Its records were moved by `offset_ns`."""

    offset_ns: int
    error_ns: int  # of the offset, when it was taken
    drift_ppm: float | None  # None: too short to tell from the error of two readings
    moved_ns: int  # by how much the offset was seen to leave what it was, beyond the error of both readings

    @property
    def off_ns(self) -> int:
        """How far the host's requests may lie off their place on the cell's timeline."""
        return self.error_ns + self.moved_ns


def clock(before: Reading, during: Sequence[Reading], after: Reading | None) -> Clock:
    """`before`: the best reading before the start, by which the records are moved; `after`: the best one at the end."""
    later = [*during, *([after] if after else [])]
    moved = max((abs(r.offset_ns - before.offset_ns) - r.error_ns - before.error_ns for r in later), default=0)
    drift = None
    if after is not None and after.at_ns > before.at_ns:
        change, error = after.offset_ns - before.offset_ns, after.error_ns + before.error_ns
        if abs(change) > error:
            drift = round(change / (after.at_ns - before.at_ns) * 1e6, 3)
    return Clock(before.offset_ns, before.error_ns, drift, max(moved, 0))


# ---- records


def messages(stream: bytes) -> Iterator[tuple[int, pa.Message | None]]:
    """The whole messages at the head of a part of an Arrow stream, and where each ends; None is the end's marker.

    https://arrow.apache.org/docs/format/Columnar.html#encapsulated-message-format: a continuation marker, the length of
    the metadata, the metadata, which holds the length of the body, the body.
    """
    at, reader = 0, pa.BufferReader(stream)
    while len(stream) - at >= len(END_OF_STREAM):
        if stream[at : at + 8] == END_OF_STREAM:
            yield at + 8, None
            return
        if len(stream) - at < 8 + int.from_bytes(stream[at + 4 : at + 8], "little"):
            return
        reader.seek(at)
        try:
            message = pa.ipc.read_message(reader)
        except (pa.ArrowException, OSError, EOFError):
            return  # its body is not all there yet
        at = reader.tell()
        yield at, message


def moved(batch: pa.RecordBatch, by_ns: int) -> pa.RecordBatch:
    """The same records on another clock; what never was stays 0."""
    columns = []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if field.name in STAMPS:
            stamps = column.to_numpy()
            columns.append(pa.array(np.where(stamps, stamps + by_ns, 0), pa.int64()))
        elif field.name == "event_ns":
            columns.append(pa.ListArray.from_arrays(column.offsets, pa.array(column.values.to_numpy() + by_ns)))
        else:
            columns.append(column)
    return pa.record_batch(columns, schema=batch.schema)


def moved_end(end: dict[str, Any], by_ns: int) -> dict[str, Any]:
    """How a drive ended, on another clock."""
    stamps = {name: end[name] + by_ns if end[name] else 0 for name in STAMPS_OF_END}
    return end | stamps | {"loop_stalls": [[at + by_ns, ms] for at, ms in end["loop_stalls"]]}


def moved_gauge(steps: np.ndarray, by_ns: int) -> np.ndarray:
    """Steps (k, 2): of this ns, this many in flight."""
    return steps + np.array([by_ns, 0], np.int64)
