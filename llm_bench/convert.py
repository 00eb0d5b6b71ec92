"""convert(path, out): a trace of any format in our own, however long: the file is read twice, and no row is kept.

The first pass finds what is of the whole file (the zero point, the order, the size of a block), the second writes. What
needs its rows together is read as `read` does and held, at about 530 bytes a request: conversations, whose lengths the
whole file says how to take, and a pipe, which cannot be read twice. Else is held: a distinct hash block at about 220
bytes; where rows stand out of order, or stamps are spread, 24 bytes a request.
"""

import tempfile
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from llm_bench import containers, prefixes, ticks, trace
from llm_bench.arrange import (
    NO_TIMES,
    Gaps,
    check_any,
    check_times,
    clock_of,
    late_said,
    no_timestamp,
    prompts_said,
    seconds,
    times_said,
)
from llm_bench.errors import BenchError
from llm_bench.request import Request
from llm_bench.sheet import says_its_own

CHUNK = 1 << 16  # stamps in memory at once
_set = object.__setattr__


class Converted(NamedTuple):
    requests: int
    notes: list[str]
    skipped: dict[str, int]


class _WholeFile(Exception):  # noqa: N818 - no error: the rows are to be read together
    """A file's rows have to be together in memory."""


def convert(path: Path | str, out: Path | str, *, dejitter: str = "off", seed: int = 0, **how: Any) -> Converted:
    """The same bytes as write(out, read(path, **how)), the stamps spread as ticks.dejitter does; `how` as of read.

    Raises BenchError as these do, and where the file changes while it is read.
    """
    path, out = Path(path), Path(out)
    piped = path.exists() and not path.is_dir() and not path.is_file()
    if not piped:
        with suppress(_WholeFile), containers.new_file(out) as part, tempfile.TemporaryFile(dir=out.parent) as spool:
            return _streamed(path, part, spool, dejitter, seed, how)
    found = trace.read(path, **how)
    requests, done = ticks.dejitter(found.requests, dejitter, seed)
    trace.write(out, found._replace(requests=requests))
    held = f"a pipe is read once: all {len(requests):,} requests were in memory; a file of independent rows is not"
    return Converted(len(requests), [*found.notes, *filter(None, [done]), *[held] * piped], found.skipped)


def _streamed(path: Path, part: Path, spool: IO[bytes], dejitter: str, seed: int, how: dict[str, Any]) -> Converted:
    spread = ticks.forced(dejitter) != 0
    with trace.opened(path, **how) as source:
        tally = _Tally(_Stamps(spool), array("q") if spread else None)
        for at, request in trace.rows(source):
            tally.add(at, request, source.left_out)
        tally.leave_out(source.left_out)
        skipped, bad, unit = dict(source.skipped), trace.rows_said(source, source.bad), trace.unit_of(source)
        check_any(path, tally.rows, skipped)
        notes = tally.said(path, unit)
        notes += [f"{n:,} {what}" for what, n in source.reading.known.get("said", {}).items()] + bad
    if len(tally.sizes) > 1:
        raise BenchError(f"{path}: blocks of {sorted(tally.sizes)} tokens in one trace, expected one size")
    moved = None
    if tally.kept is not None:
        since = np.frombuffer(tally.kept, np.int64) - (tally.first[0] - tally.stamps.zero)
        moved, done = _spread(since, dejitter, seed)
        notes += filter(None, [done])
    tally.tree.clear()
    spool.seek(0)
    with trace.opened(path, **how) as source, containers.open_bytes(part, "wb") as file:
        file.write(trace.line(trace.header(max(tally.sizes, default=0), new=False)))
        lines = _lines(source, tally, moved)
        for line in _sorted(lines, spool) if tally.late else (line for _, line in lines):
            file.write(line)
    return Converted(tally.rows, notes, skipped)


def _lines(source: trace.Source, tally: "_Tally", moved: np.ndarray | None) -> Iterator[tuple[int, bytes]]:
    """(stamp since the first, line) of each row, in the file's order, as the first pass has seen them."""
    rows, timed = 0, 0
    for at, request in trace.rows(source):
        since = 0 if at is None else at - tally.first[0]
        if at is not None:
            _set(request, "at_s", since / 10**9 if moved is None or timed >= len(moved) else float(moved[timed]))
            timed += 1
        rows += 1
        if since < 0 or request.session:
            break
        yield since, trace.line(trace.own_values(request, request.tokens_in))
    if (rows, timed) != (tally.rows, tally.timed):
        raise BenchError(f"{source.path}: it changed while it was read; convert it when nothing writes to it")


def _sorted(lines: Iterator[tuple[int, bytes]], spool: IO[bytes]) -> Iterator[bytes]:
    """The lines by their stamps, ties as they stand; they wait in a file."""
    stamps, starts, end = array("q"), array("q"), 0
    for since, line in lines:
        stamps.append(since)
        starts.append(end)
        end += spool.write(line)
    for i in np.argsort(np.frombuffer(stamps, np.int64), kind="stable").tolist():
        spool.seek(starts[i])
        yield spool.readline()


def _spread(since: np.ndarray, dejitter: str, seed: int) -> tuple[np.ndarray | None, str]:
    """Seconds of each stamp (n,), in the file's order, after ticks.dejitter; None: as they are."""
    order = np.argsort(since, kind="stable")
    moved, done = ticks.spread_as(seconds(since[order], int(since.max(initial=0))), dejitter, seed)
    if moved is None:
        return None, done
    placed = np.empty(len(moved))
    placed[order] = moved
    return placed, done


@dataclass
class _Stamps:
    """All stamps in the file's order, on disk: 8 bytes each."""

    file: IO[bytes]
    zero: int = 0  # the first one; the others are kept as their distance from it
    n: int = 0
    newest: int = 0
    in_order: bool = True
    waiting: "array[int]" = field(default_factory=lambda: array("q"))

    def add(self, at: int) -> None:
        if not self.n:
            self.zero = self.newest = at
        self.in_order &= at >= self.newest
        self.newest = at
        try:
            self.waiting.append(at - self.zero)
        except OverflowError:
            raise _WholeFile from None
        self.n += 1
        if len(self.waiting) == CHUNK:
            self._flush()

    def _flush(self) -> None:
        self.file.write(self.waiting.tobytes())
        self.waiting = array("q")

    def gaps(self) -> Gaps:
        self._flush()
        if self.in_order:
            return self._gaps
        self.file.seek(0)
        gaps = np.diff(np.sort(np.frombuffer(self.file.read(), np.int64)))
        return lambda: iter([gaps])

    def _gaps(self) -> Iterator[np.ndarray]:
        before = np.empty(0, np.int64)
        self.file.seek(0)
        while data := self.file.read(8 * CHUNK):
            both = np.concatenate([before, np.frombuffer(data, np.int64)])
            yield np.diff(both)
            before = both[-1:]


@dataclass
class _Tally:
    """What rows say together, each looked at once."""

    stamps: _Stamps
    kept: "array[int] | None"  # stamps of the rows that are sent, since the first one, where they are to be spread
    rows: int = 0
    timed: int = 0
    first: tuple[int, int] = (0, 0)  # the least stamp and its line
    last: tuple[int, int] = (0, 0)
    late: int = 0
    untimed: int = 0  # line of the first row without a time
    own_text: bool = False
    unknown: int = 0
    tokens: int = 0
    saved: int = 0
    sizes: set[int] = field(default_factory=set)
    tree: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, at: int | None, r: Request, left_out: list[int]) -> None:
        if r.session or r.turn > 0:
            raise _WholeFile  # the whole file says how its lengths are meant
        self.leave_out(left_out)
        self.rows += 1
        if at is None:
            self.untimed = self.untimed or r.line
        else:
            self._time(at, r.line)
        self.tokens += r.tokens_in
        self.unknown += r.tokens_in == 0
        if r.hash_ids:
            self.saved += prefixes.saved(r, self.tree)
            self.sizes.add(r.block_size)
        elif not self.own_text:
            self.own_text = says_its_own(r)

    def leave_out(self, stamps: list[int]) -> None:
        """Of rows that came and are not sent: they tell of the clock."""
        for at in stamps:
            self.stamps.add(at)
        stamps.clear()

    def _time(self, at: int, line: int) -> None:
        self.stamps.add(at)
        self.late += self.timed > 0 and at < self.last[0]
        if not self.timed or at < self.first[0]:
            self.first = at, line
        if not self.timed or at > self.last[0]:
            self.last = at, line
        if self.kept is not None:
            self.kept.append(at - self.stamps.zero)
        self.timed += 1

    def said(self, path: Path, unit: str) -> list[str]:
        """Notes as of read. Raises BenchError for times that cannot be right together."""
        if self.timed and self.untimed:
            raise no_timestamp(path, self.untimed)
        notes = [] if self.timed else [NO_TIMES]
        if self.timed:
            check_times(path, self.first, self.last, unit)
            notes += times_said(self.timed, self.last[0] - self.first[0], clock_of(self.stamps.gaps()), unit)
        if self.late:
            notes.append(late_said(self.late))
        saved = (self.saved, self.tokens) if self.sizes else None
        return notes + list(prompts_said(saved, self.own_text, False, self.unknown))
