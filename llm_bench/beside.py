"""What runs beside a drive: records made a little at a time, flushed at 4 Hz, progress, how late the event loop is."""

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable

from llm_bench import clock
from llm_bench.cell import Cell
from llm_bench.flights import Flight, Gauge
from llm_bench.records import Writer
from llm_bench.shards import Part

TICK_S = 0.25  # progress and records to disk, at 4 Hz
LAG_TICK_S = 0.02  # how late the event loop is: looked at 50 times a second, for a thousandth of a core
CLERK_NS = 250_000  # at a time, on records: about the reads of five sockets
CLERK_FLUSHES = 32  # records at a time: 0.4 ms of the loop's time; 250 at once (1,000 a second) take 2 ms
CLERK_HOLDS = 1000  # landed flights without a record
STALL_NS = 10_000_000  # a tick of the loop that is later than this is a stall of its own
STALLS_KEPT = 1000  # the longest

Say = Callable[[str], None]
Stalls = list[list[float]]  # [from, in ns of clock.now_ns; how long, in ms] each


class Clerk:
    """Makes records out of landed flights, a little at a time, so that sends and stamps need not wait for it.

    Reading an answer of a hundred tokens takes as long as ten reads of a socket.
    """

    def __init__(self, cell: Cell, writer: Writer) -> None:
        self._cell, self._writer = cell, writer
        self._landed: deque[Flight] = deque()
        self._wake = asyncio.Event()
        self._unflushed = 0

    def enter(self, flight: Flight) -> bool:
        """Make its record now. Is the answer a success, or left by plan?"""
        record = self._cell.record(flight)
        self._writer.write(record)
        self._unflushed += 1
        return record.outcome in ("ok", "cancelled")

    def put(self, flight: Flight) -> None:
        """Make its record soon; at once where too many wait, since answers that came are held in memory until then."""
        self._landed.append(flight)
        self._wake.set()
        while len(self._landed) > CLERK_HOLDS:
            self.enter(self._landed.popleft())

    async def run(self) -> None:
        while True:
            until_ns = clock.now_ns() + CLERK_NS
            while self._landed and clock.now_ns() < until_ns:
                self.enter(self._landed.popleft())
            if self._unflushed >= CLERK_FLUSHES:
                await asyncio.sleep(0)
                self._writer.flush()
                self._unflushed = 0
            if self._landed:
                await asyncio.sleep(0)  # the sockets' turn
            else:
                self._wake.clear()
                await self._wake.wait()

    def finish(self) -> None:
        """Make the records that are left."""
        while self._landed:
            self.enter(self._landed.popleft())


class Ticker:
    """Progress at 4 Hz, records to disk, and how late the event loop is: a tick that comes late says so."""

    def __init__(self, cell: Cell, gauge: Gauge, writer: Writer, part: Part, live: Say) -> None:
        self.due_ns, self.late_ns = array("q"), array("q")  # of each tick of the loop
        self.last_sent: tuple[int, int] | None = None  # (now, CPU time), ns, of the tick after the last request began
        self._cell, self._gauge, self._writer, self._part, self._live = cell, gauge, writer, part, live
        self._begun_s = time.monotonic()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._writer.flush()
            self.tell()
            if self._part.board is None:
                counts = self._cell.counts
                figures = (sum(counts.values()), self._gauge.now, counts["failed"], self._cell.tokens)
                self._live(progress(self._cell, figures, time.monotonic() - self._begun_s))

    def tell(self) -> None:
        """This worker's figures for the parent's line."""
        part, counts = self._part, self._cell.counts
        if part.board is not None:
            for name, value in (
                ("in_flight", self._gauge.now),
                ("landed", sum(counts.values())),
                ("failed", counts["failed"]),
                ("tokens", self._cell.tokens),
            ):
                part.board.set(part.worker, name, value)

    async def watch_the_loop(self) -> None:
        begun = 0
        while True:
            due_ns = clock.now_ns() + round(LAG_TICK_S * 1e9)
            await asyncio.sleep(LAG_TICK_S)
            now = clock.now_ns()
            self.due_ns.append(due_ns)
            self.late_ns.append(now - due_ns)
            if self._gauge.now + self._gauge.ended > begun:
                begun = self._gauge.now + self._gauge.ended
                self.last_sent = now, time.process_time_ns()

    def stalls(self) -> Stalls:
        """[ns from which on the loop did not turn, ms that it did not], in order: a percentile hides them."""
        late = zip(self.due_ns, self.late_ns, strict=True)
        return longest([[due_ns, round(ns / 1e6, 3)] for due_ns, ns in late if ns > STALL_NS])


def longest(stalls: Stalls) -> Stalls:
    """The longest, in the order of time."""
    return sorted(sorted(stalls, key=lambda stall: -stall[1])[:STALLS_KEPT])


def progress(cell: Cell, figures: tuple[int, int, int, int], ran_s: float) -> str:
    """One line of (ended, in flight, failed, tokens of ok answers)."""
    ended, in_flight, failed, tokens = figures
    planned = len(cell.requests)
    if cell.options.duration_s is not None:
        left = f"about {max(cell.options.duration_s - ran_s, 0):.0f} s left, warm-up and drain not counted"
    elif ended:
        left = f"about {ran_s / ended * (planned - ended):.0f} s left"
    else:
        left = "waiting for the first answer"
    return (
        f"{cell.name}: {ended} of {planned} done, {in_flight} in flight, {failed} failed, "
        f"{tokens / max(ran_s, 1e-9):,.0f} tokens/s so far, {left}"
    )
