"""The one clock: monotonic nanoseconds, a wall-clock anchor for server logs, and waking at an absolute time."""

import asyncio
import ctypes
import heapq
import os
import time
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")

now_ns = time.monotonic_ns  # CLOCK_MONOTONIC: a step of the wall clock moves no number

_CLOCK_MONOTONIC, _TFD_TIMER_ABSTIME = 1, 1  # <time.h>, <sys/timerfd.h>


class _TimeSpec(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))  # time_t is a long on every 64-bit Linux


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


def anchor() -> tuple[int, int]:
    """(wall ns since 1970, now_ns) of one moment: how stamps are compared with server logs. Read once a run."""
    return time.time_ns(), now_ns()


_STEP_NS = 20_000  # two clocks are read within this, or the process was stopped between, or one of them was set


class Wall:
    """CLOCK_REALTIME, of which kernel stamps are, minus `now_ns`. Constant but for steps: both are slewed alike."""

    def __init__(self) -> None:
        self.ahead_ns = _ahead_ns()

    def stepped(self) -> bool:
        """Has the wall clock been set since it was last asked? Stamps of before are then of no use."""
        before = now_ns()
        if -_STEP_NS < time.time_ns() - before - self.ahead_ns < _STEP_NS:
            return False
        known, self.ahead_ns = self.ahead_ns, _ahead_ns()
        if abs(self.ahead_ns - known) > _STEP_NS:
            return True
        self.ahead_ns = known  # stopped between the two looks
        return False


def _ahead_ns() -> int:
    """By the reading of five that took least: whatever stops one in its middle makes it long."""
    readings = [(now_ns(), time.time_ns(), now_ns()) for _ in range(5)]
    before, wall, after = min(readings, key=lambda r: r[2] - r[0])
    return wall - (before + after) // 2


class Timer:
    """Calls back at absolute times of `now_ns`, never early. One a pacer, for any number of waiters.

    On Linux a timerfd (timerfd_create(2)) beside a heap: uvloop's own timers, like epoll's time-outs, are 1 ms coarse,
    which would be read as the client's lateness. Elsewhere the loop's timers. Needs a running loop.
    """

    def __init__(self, spin_ns: int = 0) -> None:
        """`spin_ns`: wake so much earlier and look at the clock until the time has come; the kernel wakes late."""
        self._spin_ns = spin_ns
        self._loop = asyncio.get_running_loop()
        self._heap: list[tuple[int, int, Callable[[], object]]] = []
        self._order = count()  # equal times in the order of asking
        self._armed_ns = 0  # 0: not armed
        self._handle: asyncio.TimerHandle | None = None
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = -1
        if hasattr(self._libc, "timerfd_create"):
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
            if self._fd < 0:
                raise OSError(ctypes.get_errno(), "timerfd_create")
            self._loop.add_reader(self._fd, self._expired)

    def call_at(self, due_ns: int, callback: Callable[[], object]) -> None:
        """Call once now_ns() >= due_ns; at the loop's next turn when that has passed."""
        heapq.heappush(self._heap, (due_ns, next(self._order), callback))
        self._arm()

    async def sleep_until(self, due_ns: int) -> None:
        """Return at or after due_ns, at once and without a turn of the loop when it has passed."""
        if now_ns() >= due_ns:
            return
        reached = self._loop.create_future()
        self.call_at(due_ns, lambda: None if reached.done() else reached.set_result(None))
        await reached

    def close(self) -> None:
        """Forget every waiter and give the descriptor back."""
        self._heap.clear()
        if self._handle is not None:
            self._handle.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _arm(self) -> None:
        if not self._heap or self._heap[0][0] == self._armed_ns:
            return
        self._armed_ns = self._heap[0][0]
        due_ns = self._armed_ns - self._spin_ns
        if self._fd < 0:
            if self._handle is not None:
                self._handle.cancel()
            self._handle = self._loop.call_later(max(0.0, (due_ns - now_ns()) / 1e9), self._expired)
            return
        # An all-zero value would disarm; a time that has passed expires at once.
        spec = _TimerSpec(value=_TimeSpec(*divmod(max(due_ns, 1), 1_000_000_000)))
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _expired(self) -> None:
        if self._fd >= 0:
            try:
                os.read(self._fd, 8)
            except BlockingIOError:
                return  # re-armed for later after the loop had seen it readable
        self._armed_ns = 0
        if self._spin_ns and self._heap:
            wake_ns = self._heap[0][0]
            while 0 < wake_ns - now_ns() <= self._spin_ns:
                pass
        now = now_ns()  # what a callback asks for waits for the loop's next turn: one that asks again would never end
        while self._heap and self._heap[0][0] <= now:
            heapq.heappop(self._heap)[2]()
        self._arm()


def run(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run on uvloop where it is installed: less time per read."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
