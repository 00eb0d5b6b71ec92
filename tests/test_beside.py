"""What runs beside a drive."""

import asyncio
import time
from types import SimpleNamespace

from llm_bench.beside import Clerk

LANDED_A_TURN, TURNS = 8, 200
RECORD_NS = 100_000


def test_records_keep_up_with_answers_that_come_faster_than_a_turns_worth_of_them() -> None:
    """Two or three are made in a turn of 250 µs: so many would leave a thousand waiting."""
    made: list[int] = []

    def record(flight: int) -> SimpleNamespace:
        until_ns = time.monotonic_ns() + RECORD_NS
        while time.monotonic_ns() < until_ns:
            pass
        return SimpleNamespace(outcome="ok", flight=flight)

    async def drive() -> int:
        writer = SimpleNamespace(write=lambda said: made.append(said.flight), flush=lambda: None)
        clerk = Clerk(SimpleNamespace(record=record), writer)  # type: ignore[arg-type]
        task = asyncio.create_task(clerk.run())
        for turn in range(TURNS):
            for k in range(LANDED_A_TURN):
                clerk.put(turn * LANDED_A_TURN + k)  # type: ignore[arg-type]
            await asyncio.sleep(0)
        in_time = len(made)
        clerk.finish()
        task.cancel()
        return in_time

    assert asyncio.run(drive()) > TURNS * LANDED_A_TURN * 2 // 3
    assert made == list(range(TURNS * LANDED_A_TURN))  # in the order in which they landed, none lost
