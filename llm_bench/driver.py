"""Sends a plan: open loop, closed loop, conversations. Lateness is never forgiven: a due time stands, however late.

The driver knows neither bytes nor sockets. It gets `send`, calls `done` at each end, and counts what is in flight.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from llm_bench.clock import now_ns
from llm_bench.flights import Done, Drive, Flight, Flights, Gauge, Note, Plan, Send

OTHERS_NS = 50_000_000  # where several processes share a closed loop: how often one looks how far the others are


def _no_note(row: int, due_ns: int) -> None:
    pass


class Slots(Protocol):
    """What the slots of a closed loop know of each other, in this process and in those that share the loop."""

    numbers: Sequence[int]  # of this process's slots, among all
    alone: bool  # no other process takes conversations of this plan
    opened_ns: int  # when the window opened, 0: not yet

    def take(self) -> int:
        """The row that begins the next conversation, which now holds a slot; -1: none is left."""
        ...

    def gone(self) -> bool: ...  # none is left to take
    def leave(self) -> None: ...  # a conversation has given its slot back
    def ended(self, row: int) -> None: ...  # a request has ended
    def warm(self, warmup: int) -> bool: ...  # `warmup` requests and the first wave have ended, and all slots are held


class OwnSlots:
    """The slots of a loop that is all in this process."""

    def __init__(self, first: Sequence[int], concurrency: int) -> None:
        self.numbers: Sequence[int] = range(min(concurrency, len(first)))
        self.alone = True
        self.opened_ns = 0
        self._concurrency = concurrency
        self._first, self._taken = first, 0
        self._wave = set(first[:concurrency])  # rows of the first wave that have not ended
        self._busy = self._ended = 0

    def take(self) -> int:
        if self.gone():
            return -1
        self._taken += 1
        self._busy += 1
        return self._first[self._taken - 1]

    def gone(self) -> bool:
        return self._taken >= len(self._first)

    def leave(self) -> None:
        self._busy -= 1

    def ended(self, row: int) -> None:
        self._ended += 1
        self._wave.discard(row)

    def warm(self, warmup: int) -> bool:
        return not self._wave and self._ended >= warmup and self._busy >= self._concurrency


async def closed_loop(
    plan: Plan,
    send: Send,
    done: Done,
    *,
    concurrency: int,
    warmup: int,
    ramp_s: float,
    duration_s: float | None,
    drain_s: float | None,
    stop: asyncio.Event,
    gauge: Gauge | None = None,
    slots: Slots | None = None,
    start_ns: int = 0,
    note: Note = _no_note,
) -> Drive:
    """`concurrency` slots, each with one conversation at a time; the first wave is spread evenly over `ramp_s`.

    A request is due when its slot became free. The window opens, without draining, at the first moment at which
    `warmup` requests and the whole first wave have ended and every slot is busy (a user who thinks is busy); after
    `duration_s` of window no request is sent. What is in flight `drain_s` later is cut; None: `send` ends each request
    by the limits of its own, and nothing is cut. Exceptions of `send` and `done` end the drive. `slots`: this process's
    part where several share the loop; `start_ns`: their common start. `note` is told each (row, due_ns).
    """
    if stop.is_set():
        return Drive(start_ns or now_ns(), reason="interrupted")
    held: Slots = OwnSlots(plan.first, concurrency) if slots is None else slots
    armed = False

    def look_for_window(row: int, due_ns: int) -> None:
        note(row, due_ns)
        if not held.opened_ns and held.warm(warmup):
            held.opened_ns = due_ns
        look_for_end()

    def look_for_end() -> None:
        nonlocal armed
        if armed or not held.opened_ns:
            return
        armed = True
        drive.window_open_ns = held.opened_ns
        if duration_s is not None:
            flights.timer.call_at(held.opened_ns + round(duration_s * 1e9), lambda: flights.end("duration"))

    def ended(flight: Flight) -> bool | None:
        held.ended(flight.index)
        return done(flight)

    flights = Flights(plan, send, ended, gauge or Gauge(), look_for_window, shared=not held.alone)
    drive = flights.drive

    def look_at_the_others() -> None:
        """They may have opened the window or taken the last conversation, while nothing of ours ended to say so."""
        look_for_end()
        if held.gone():
            flights.none_left()
        if not drive.reason:
            flights.timer.call_at(now_ns() + OTHERS_NS, look_at_the_others)

    async def slot(due_ns: int) -> None:
        await flights.sleep_until(due_ns)
        while not drive.reason and (first := held.take()) >= 0:
            flights.begin(first, due_ns)
            due_ns = await flights.conversation(first, due_ns)
            held.leave()
            look_for_end()  # another process may have seen the window open
        if held.gone():
            flights.none_left()
        drive.window_close_ns = drive.window_close_ns or due_ns

    drive.start_ns = start_ns or now_ns()
    for number in held.numbers:
        flights.start(slot(drive.start_ns + round(ramp_s * 1e9 * number / concurrency)))
    if not held.alone:
        look_at_the_others()
    await flights.run(stop, drain_s)
    return drive


async def open_loop(
    plan: Plan,
    send: Send,
    done: Done,
    *,
    max_in_flight: int | None,
    duration_s: float | None,
    drain_s: float | None,
    stop: asyncio.Event,
    gauge: Gauge | None = None,
    firsts: Sequence[int] | None = None,
    start_ns: int = 0,
    note: Note = _no_note,
    spin_ns: int = 0,
) -> Drive:
    """Each request at start + due_ns, whatever became of those before; beyond `max_in_flight` they queue in due order.

    Requests due after `duration_s` are no part of the drive. `drain_s` runs from the last due time (with conversations:
    from when no turn can become due any more): what is in flight at its end is cut, what still queues is dropped;
    `stop` does both at once. None: all fly to their end, within the limits that `send` gives each. A server that fell
    behind then works off what piled up, the queue under the cap too, after the window has closed: no latency of an
    overload is cut short, and the drive lasts as long as that takes. Exceptions of `send` and `done` end it. `firsts`:
    the conversations of this process where several share the plan; `start_ns`: their common start. `note` is told each
    (row, due_ns). `spin_ns`: of clock.Timer.
    """
    if stop.is_set():
        return Drive(start_ns or now_ns(), reason="interrupted")
    mine = plan.first if firsts is None else firsts
    last_ns = round(duration_s * 1e9) if duration_s is not None else 1 << 62
    order = sorted((i for i in mine if plan.due_ns[i] <= last_ns), key=plan.due_ns.__getitem__)
    flights = Flights(plan, send, done, gauge or Gauge(), note, max_in_flight, order, spin_ns=spin_ns)
    drive = flights.drive
    launched = 0

    def launch(first: int, due_ns: int) -> None:
        nonlocal launched
        launched += 1
        flights.begin(first, due_ns)
        flights.start(flights.conversation(first, due_ns))

    async def pacer() -> None:
        dues = ((first, drive.start_ns + plan.due_ns[first]) for first in order)
        try:
            await pace(dues, flights.sleep_until, launch)
        finally:
            drive.window_open_ns = drive.start_ns + plan.due_ns[order[0]] if launched else 0
            drive.window_close_ns = drive.start_ns + plan.due_ns[order[launched - 1]] if launched else 0
            for first in order[launched:]:  # stopped: those that were due are dropped, the others are no part of it
                if drive.start_ns + plan.due_ns[first] <= now_ns():
                    flights.begin(first, drive.start_ns + plan.due_ns[first])

    drive.start_ns = start_ns or now_ns()
    flights.last_due_ns = drive.start_ns + last_ns
    flights.drain_from_ns = drive.start_ns + max((d for i in plan.first if (d := plan.due_ns[i]) <= last_ns), default=0)
    if duration_s is not None:
        flights.timer.call_at(flights.last_due_ns, lambda: flights.end("duration"))
    if order:
        flights.start(pacer())
    await flights.run(stop, drain_s)
    if len(order) < len(mine) and drive.reason == "exhausted":
        drive.reason = "duration"
    return drive


async def pace(
    dues: Iterable[tuple[int, int]],
    sleep_until: Callable[[int], Awaitable[None]],
    launch: Callable[[int, int], None],
) -> None:
    """Launch each (row, due_ns) once it is due. Waits for absolute times, so what a launch costs never adds up."""
    for row, due_ns in dues:
        await sleep_until(due_ns)
        launch(row, due_ns)
