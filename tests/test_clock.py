import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from llm_bench import clock
from llm_bench.clock import Timer, now_ns
from tests.quiet import undisturbed

LOOPS = [asyncio.run, uvloop.run]
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.mark.parametrize("spin_ns", [0, 100_000])
@pytest.mark.parametrize("run", LOOPS)
@undisturbed
def test_a_sleeper_never_wakes_early_and_lateness_does_not_add_up(run: Run, spin_ns: int) -> None:
    async def main() -> list[int]:
        timer = Timer(spin_ns)
        start = now_ns()
        late = []
        for i in range(50):
            due = start + i * 3_300_000  # not a whole millisecond: loops round those to 1 ms
            await timer.sleep_until(due)
            late.append(now_ns() - due)
        timer.close()
        return late

    late = run(main())
    assert min(late) >= 0
    # A sleep that started when the one before had ended would be late by the sum: the typical one is not.
    assert sorted(late)[25] < 1_000_000


@pytest.mark.parametrize("run", LOOPS)
@undisturbed
def test_waiters_wake_in_due_order_whatever_the_order_of_asking(run: Run) -> None:
    async def main() -> list[int]:
        timer = Timer()
        start, woken = now_ns(), []

        async def sleeper(ms: int) -> None:
            await timer.sleep_until(start + ms * 1_000_000)
            assert now_ns() >= start + ms * 1_000_000
            woken.append(ms)

        await asyncio.gather(*(sleeper(ms) for ms in (30, 10, 40, 20, 10, 0)))
        timer.close()
        return woken

    assert run(main()) == [0, 10, 10, 20, 30, 40]


def test_a_time_that_has_passed_is_called_at_once_and_a_cancelled_sleeper_does_no_harm() -> None:
    async def main() -> None:
        timer = Timer()
        called = asyncio.Event()
        cancelled = asyncio.create_task(timer.sleep_until(now_ns() + 10_000_000))
        await asyncio.sleep(0)
        cancelled.cancel()
        timer.call_at(0, called.set)
        await asyncio.wait_for(called.wait(), 30)
        await timer.sleep_until(now_ns() + 20_000_000)
        assert cancelled.cancelled()
        timer.close()

    asyncio.run(main())


def test_without_a_timerfd_the_loops_own_timers_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: object())

    async def main() -> None:
        timer = Timer()
        start = now_ns()
        for ms in (5, 10, 15):
            await timer.sleep_until(start + ms * 1_000_000)
            assert now_ns() >= start + ms * 1_000_000
        timer.close()

    asyncio.run(main())


def test_a_step_of_the_wall_clock_moves_no_stamp(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, mono = clock.anchor()
    assert abs(wall - time.time_ns()) < 1e9
    before = now_ns()
    monkeypatch.setattr("time.time", lambda: 0.0)
    monkeypatch.setattr("time.time_ns", lambda: 0)
    assert 0 <= now_ns() - before < 1e9
    assert clock.anchor()[0] == 0  # the anchor is the one reader of the wall clock
    assert clock.anchor()[1] >= mono
