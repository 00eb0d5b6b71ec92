"""Tests of times on a machine that has more to do: what was held up is tried again, what was not is judged."""

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ParamSpec

import pytest

HELD_S = 0.01  # a fifth of what most bounds allow; a machine with nothing else to do holds nobody up by 1 ms
TRIES = 5
_TICK_S = 0.002
_WAITS = "/proc/self/task/{}/schedstat"  # Linux: ns on a CPU, ns without one while there was work, slices

P = ParamSpec("P")


def undisturbed(test: Callable[P, None]) -> Callable[P, None]:
    """For a test whose bounds a process that stands still breaks. Its failure counts unless it was held up meanwhile.

    What our code does wrong it does in each try, and the last one counts however it went: such a test still fails. One
    that meets its bounds fails only where the machine held up TRIES tries in a row. A wait that ended early is not
    excused by anything but a disturbance in that very try.
    """

    @functools.wraps(test)
    def tried(*args: P.args, **kwargs: P.kwargs) -> None:
        for left in reversed(range(TRIES)):
            watch = Watch()
            with watch:
                try:
                    test(*args, **kwargs)
                    break
                except (Exception, pytest.fail.Exception):
                    if not left or not watch.held_up():
                        raise

    return tried


class Watch:
    """How long this process was held up at a time since its begin: its threads stopped, or the beginner without a CPU.

    At a time: many short waits for a CPU are what a test of a second has on any machine, and no one of them breaks a
    bound.
    """

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._beginner = threading.get_native_id()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, _: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def held_up(self) -> bool:
        self._over.set()
        self._thread.join()  # a stop that has just ended is in its last look
        return self._longest_s > HELD_S

    def _look(self) -> None:
        over, waited_ns = False, _waited_ns(self._beginner)
        while not over:
            begun_s, before_ns = time.monotonic(), waited_ns
            over = self._over.wait(_TICK_S)
            late_s = time.monotonic() - begun_s - _TICK_S
            waited_ns = _waited_ns(self._beginner)
            self._longest_s = max(self._longest_s, late_s, (waited_ns - before_ns) / 1e9)


def _waited_ns(thread: int) -> int:
    """How long a thread has waited for a CPU, in all; it rises when the wait is over."""
    try:
        return int(Path(_WAITS.format(thread)).read_bytes().split()[1])
    except OSError:
        return 0
