"""Requests under way: the plan's rows as they fall due, pass the cap, fly and land, and how a drive of them ends.

The driver decides when a conversation begins; from then on it is here. Neither knows bytes nor sockets.
"""

import asyncio
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from llm_bench.clock import Timer, now_ns
from llm_bench.exchange import ANSWERED, CANCELLED, CUT, Exchange
from llm_bench.retry import Tried


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


class Gauge:
    """How many requests are in flight, counted as the driver starts them and hears of their ends, not from records."""

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


class Flights:
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
            freed_ns = 0
            try:
                tried = await self._send(self._plan.payload(index, previous), self._plan.cancel_s(index))
                freed_ns = tried.exchange.end_ns
            finally:
                self.gauge.down()
                self._leave_cap(freed_ns or now_ns())
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
        answered = exchange.ended in ANSWERED and exchange.status // 100 == 2
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
        return max(due_ns, await place)

    def _leave_cap(self, freed_ns: int) -> None:
        """`freed_ns`: when the answer ended, and not when this client had time to hear of it."""
        while self._queue:
            place = self._queue.popleft()
            if not place.done():  # done: its task was cancelled
                place.set_result(freed_ns)
                return
        if not self._free:
            self._freed_ns = freed_ns
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
            drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            if drain_s is not None:  # by our timer: after a long turn of the loop uvloop's own time-outs come early
                until_ns = max(self.drain_from_ns, now_ns()) + round(drain_s * 1e9)
                self.timer.call_at(until_ns, lambda: drained.set_result(None))
            await asyncio.wait((self._idle, stopping, drained), return_when=asyncio.FIRST_COMPLETED)
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
