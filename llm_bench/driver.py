"""Sends a plan: open loop, closed loop, conversations. Lateness is never forgiven: a due time stands, however late.

The driver knows neither bytes nor sockets. It gets `send`, calls `done` at each end, and counts what is in flight.
"""

import asyncio
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from llm_bench.clock import Timer, now_ns
from llm_bench.exchange import CANCELLED, CLOSED, COMPLETE, CUT, Exchange
from llm_bench.retry import Tried

OTHERS_NS = 50_000_000  # where several processes share a closed loop: how often one looks how far the others are


class Plan(Protocol):
    """What the driver needs to know of a plan. Its rows are requests; offsets are ns from the start of the drive."""

    @property
    def due_ns(self) -> Sequence[int]: ...  # -1: the driver decides (closed loop, later turns)
    @property
    def first(self) -> Sequence[int]: ...  # rows that begin a conversation, in order
    @property
    def next_turn(self) -> Sequence[int]: ...  # the row that follows in the same conversation, or -1
    @property
    def think_ns(self) -> Sequence[int]: ...  # pause before this turn; -1: not before due_ns, or at once without one
    def __len__(self) -> int: ...
    def payload(self, index: int, previous: Exchange | None, /) -> bytes: ...
    def cancel_s(self, index: int, /) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Flight:
    """One request's way. Stamps are of clock.now_ns."""

    index: int
    due_ns: int
    ready_ns: int  # a slot or the cap let it go; 0 when dropped
    tried: Tried | None  # None: dropped, due but never attempted


Send = Callable[[bytes, float | None], Awaitable[Tried]]  # cancelled, it returns what it has, ended as CUT
Done = Callable[[Flight], bool | None]  # False: the answer is a failure, so its conversation ends


Note = Callable[[int, int], None]  # (row, due_ns) of a request that has become due


def _no_note(row: int, due_ns: int) -> None:
    pass


class Gauge:
    """How many requests are in flight, counted at each start and end and not from records."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self.ended = 0
        self._at_ns = array("q")
        self._count = array("q")

    def up(self) -> None:
        self.now += 1
        self.peak = max(self.peak, self.now)
        self._at_ns.append(now_ns())
        self._count.append(self.now)

    def down(self) -> None:
        self.now -= 1
        self.ended += 1
        self._at_ns.append(now_ns())
        self._count.append(self.now)

    def steps(self) -> np.ndarray:
        """int64 (k, 2): from this ns on, this many were in flight."""
        return np.array([self._at_ns, self._count], np.int64).T.copy()


@dataclass(slots=True)
class Drive:
    """What a drive did. Stamps are of clock.now_ns, 0 = never."""

    start_ns: int = 0
    window_open_ns: int = 0  # closed loop: all slots busy after the warm-up; open loop: the first due time
    window_close_ns: int = 0  # closed loop: a slot could not be refilled; open loop: the last due time
    reason: str = ""  # exhausted | duration | interrupted
    turns_not_sent: int = 0  # later turns that never became due: a turn before failed, or the drive ended
    cut: int = 0  # closed by us in flight


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

    flights = _Flights(plan, send, ended, gauge or Gauge(), look_for_window, shared=not held.alone)
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
    flights = _Flights(plan, send, done, gauge or Gauge(), note, max_in_flight, order, spin_ns=spin_ns)
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


class _Flights:
    """What both loops share: the tasks that fly, the cap they pass, and how a drive ends.

    Invariant: `due` holds each request from becoming due until `done` was told, so that none is lost, whenever its task
    is cancelled. `coming` counts the requests that may still become due.
    """

    def __init__(
        self,
        plan: Plan,
        send: Send,
        done: Done,
        gauge: Gauge,
        became_due: Note,
        cap: int | None = None,
        firsts: Sequence[int] | None = None,
        shared: bool = False,
        spin_ns: int = 0,
    ) -> None:
        self.drive = Drive()
        self.gauge = gauge
        self.timer = Timer(spin_ns)
        self.last_due_ns = 1 << 62
        self.drain_from_ns = 0  # not before this: others may still send
        self._plan, self._send, self._done, self._became_due = plan, send, done, became_due
        self._free = cap if cap is not None else 1 << 62  # places under the cap
        self._freed_ns = 0  # since when there has been one
        self._queue: deque[asyncio.Future[int]] = deque()
        self._due: dict[int, int] = {}
        self._shared = shared
        self._coming = len(plan) if firsts is None else sum(self._turns(i) for i in firsts)
        if shared:
            self._coming = 1  # that more may be taken; `begin` adds what was
        self._asleep: dict[asyncio.Task[object], int] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._failure: BaseException | None = None
        loop = asyncio.get_running_loop()
        self._all_sent: asyncio.Future[None] = loop.create_future()
        self._idle: asyncio.Future[None] = loop.create_future()

    # ---- one conversation

    def begin(self, first: int, due_ns: int) -> None:
        turns = self._turns(first)
        self.drive.turns_not_sent += turns
        if self._shared:
            self._coming += turns
        self._falls_due(first, due_ns)

    def none_left(self) -> None:
        """No conversation of those that several processes share is left to begin."""
        if self._shared:
            self._shared = False
            self._lose(1)

    async def conversation(self, index: int, due_ns: int) -> int:
        """The turns that follow each other from a row that `begin` has seen. Returns when the last one ended, in ns."""
        previous: Exchange | None = None
        while True:
            ready_ns = await self._pass_cap(due_ns)
            self.gauge.up()
            try:
                tried = await self._send(self._plan.payload(index, previous), self._plan.cancel_s(index))
            finally:
                self.gauge.down()
                self._leave_cap()
            goes_on = self._land(Flight(index, due_ns, ready_ns, tried))
            previous, end_ns = tried.exchange, tried.exchange.end_ns
            following = self._plan.next_turn[index]
            if following < 0:
                return end_ns
            due_ns = self._due_after(following, end_ns)
            if not goes_on or self.drive.reason or due_ns > self.last_due_ns:
                self._lose(self._turns(following))
                return end_ns
            if due_ns > now_ns():
                await self.sleep_until(due_ns)
            index = following
            self._falls_due(index, due_ns)

    def _due_after(self, index: int, end_ns: int) -> int:
        think_ns, planned_ns = self._plan.think_ns[index], self._plan.due_ns[index]
        if think_ns >= 0:
            return end_ns + think_ns
        return end_ns if planned_ns < 0 else max(end_ns, self.drive.start_ns + planned_ns)

    def _land(self, flight: Flight) -> bool:
        """Report a flight; may its conversation go on? A cancelled turn is no failure: its user asks again."""
        del self._due[flight.index]
        accepted = self._done(flight) is not False
        if flight.tried is None:
            return False
        exchange = flight.tried.exchange
        self.drive.cut += exchange.ended == CUT
        answered = exchange.ended in (COMPLETE, CLOSED) and exchange.status // 100 == 2
        return accepted and (answered or exchange.ended == CANCELLED)

    def _turns(self, index: int) -> int:
        turns = 0
        while index >= 0:
            turns += 1
            index = self._plan.next_turn[index]
        return turns

    def _falls_due(self, index: int, due_ns: int) -> None:
        self._due[index] = due_ns
        self.drive.turns_not_sent -= 1
        self._became_due(index, due_ns)
        self._lose(1)

    def _lose(self, coming: int) -> None:
        self._coming -= coming
        assert self._coming >= 0
        if not self._coming:
            self.end("exhausted")

    # ---- waiting

    async def sleep_until(self, due_ns: int) -> None:
        """As Timer's, but a drive that ends wakes the sleeper by cancelling it. Late: one turn of the loop."""
        if now_ns() >= due_ns:
            await asyncio.sleep(0)  # let those launched before go first, however many are late
            return
        task = asyncio.current_task()
        assert task is not None
        self._asleep[task] = due_ns
        try:
            await self.timer.sleep_until(due_ns)
        finally:
            del self._asleep[task]

    async def _pass_cap(self, due_ns: int) -> int:
        """Wait in the order of coming for a place under the cap. Returns the moment it was given, in ns.

        Where a place was free that is the due time, or when it became free: what passed since then was the client's own
        lateness, no waiting.
        """
        if self._free:
            self._free -= 1
            return max(due_ns, self._freed_ns)
        place: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        return await place

    def _leave_cap(self) -> None:
        while self._queue:
            place = self._queue.popleft()
            if not place.done():  # done: its task was cancelled
                place.set_result(now_ns())
                return
        if not self._free:
            self._freed_ns = now_ns()
        self._free += 1

    # ---- the whole drive

    def start(self, flight: Coroutine[object, object, object]) -> None:
        task = asyncio.get_running_loop().create_task(flight)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failure = self._failure or failure
        if (not self._tasks or self._failure) and not self._idle.done():
            self._idle.set_result(None)

    def end(self, reason: str) -> None:
        """Nothing becomes due any more; what is due already still flies."""
        if self.drive.reason:
            return
        self.drive.reason = reason
        now = now_ns()
        if not self.drive.window_close_ns and reason != "exhausted":
            self.drive.window_close_ns = now
        for task, due_ns in list(self._asleep.items()):
            if due_ns > now:  # others have been woken and are about to go
                task.cancel()
        if not self._all_sent.done():
            self._all_sent.set_result(None)

    async def run(self, stop: asyncio.Event, drain_s: float | None) -> None:
        """Until all have landed, or `drain_s` after the last became due, or `stop`. Raises what a flight raised."""
        stopping = asyncio.ensure_future(stop.wait())
        if not self._tasks:
            self.end("exhausted")
            self._idle.set_result(None)
        try:
            await asyncio.wait((self._all_sent, self._idle, stopping), return_when=asyncio.FIRST_COMPLETED)
            if drain_s is not None:
                drain_s += max(0.0, (self.drain_from_ns - now_ns()) / 1e9)
            await asyncio.wait((self._idle, stopping), timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done() and not self._idle.done():
                self.end("interrupted")
                self.drive.reason = "interrupted"
            self.end("exhausted")  # where others took the last conversations, nothing here has said so
        finally:
            for task in (stopping, *self._tasks):
                task.cancel()
            await asyncio.wait((stopping, *self._tasks))
            self.timer.close()
        if self._failure is not None:
            raise self._failure
        for index, due_ns in list(self._due.items()):
            self._land(Flight(index, due_ns, 0, None))
