import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from llm_bench import shards
from llm_bench.errors import BenchError
from llm_bench.shards import Board, SharedSlots
from tests.bench import command, environment
from tests.quiet import undisturbed


def nothing() -> None:
    pass


def started(board, number):
    return asyncio.run(board.wait_for_start(number, asyncio.Event()))


def test_results_come_in_the_order_of_the_workers():
    board = Board(4, 10)

    def body(number):
        started(board, number)
        time.sleep(0.05 * (4 - number))
        return {"number": number}

    assert [o.end for o in shards.run(4, body, board, nothing)] == [{"number": n} for n in range(4)]


def test_no_worker_begins_before_all_are_ready():
    board = Board(3, 10)

    def body(number):
        time.sleep(0.1 * number)
        before_ns = time.monotonic_ns()
        return {"ready_ns": before_ns, "start_ns": started(board, number)}

    ends = [o.end for o in shards.run(3, body, board, nothing)]
    assert len({e["start_ns"] for e in ends}) == 1
    assert ends[0]["start_ns"] > max(e["ready_ns"] for e in ends)


def test_each_number_is_taken_once_whoever_asks():
    board = Board(4, 10)

    def body(number):
        started(board, number)
        return {"got": [board.next() for _ in range(500)]}

    got = sorted(n for o in shards.run(4, body, board, nothing) for n in o.end["got"])
    assert got == list(range(2000))


@undisturbed
def test_a_killed_worker_is_named_within_a_second_and_the_others_are_ended():
    board = Board(3, 10)

    def body(number):
        started(board, number)
        stopped = []
        signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        deadline = time.monotonic() + 60
        while not stopped and time.monotonic() < deadline:
            time.sleep(0.01)
        return {"stopped": bool(stopped)}

    begun = time.monotonic()
    outcomes = shards.run(3, body, board, nothing)
    assert time.monotonic() - begun < 3
    assert [o.died for o in outcomes] == ["", "killed by signal 9", ""]
    assert outcomes[0].end == outcomes[2].end == {"stopped": True}


def test_a_worker_that_dies_with_the_lock_in_hand_does_not_stop_the_others():
    board = Board(2, 10)

    def body(number):
        started(board, number)
        if number == 0:
            import fcntl

            fcntl.lockf(board._lock, fcntl.LOCK_EX)
            os.kill(os.getpid(), signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(0.3)
        return {"took": board.next()}

    outcomes = shards.run(2, body, board, nothing)
    assert outcomes[1].end == {"took": 0}


def test_a_worker_that_dies_before_the_start_is_no_deadlock(capfd):
    board = Board(2, 10)

    def body(number):
        if number == 0:
            raise RuntimeError("no room")
        started(board, number)
        return {}

    outcomes = shards.run(2, body, board, nothing)
    assert outcomes[0].died == "ended with code 1"
    assert outcomes[1].died == "killed by signal 15"  # the default: this body's loop has no handlers
    assert "no room" in capfd.readouterr().err


def test_a_mistake_of_the_users_comes_with_its_text():
    board = Board(2, 10)

    def body(number):
        if number:
            return _until_stopped(board, number)
        raise BenchError(f"the disk of worker {number} is full")

    outcomes = shards.run(2, body, board, nothing)
    assert ("failed", "the disk of worker 0 is full") in [(o.died, o.error) for o in outcomes]


def test_an_interrupt_is_handed_on():
    board = Board(2, 10)
    begun = time.monotonic()

    def body(number):
        stopped = []
        signal.signal(signal.SIGINT, lambda *_: stopped.append(True))
        started(board, number)
        while not stopped:
            time.sleep(0.01)
        return {"stopped": True}

    def interrupt_once() -> None:
        if board.started and time.monotonic() - begun > 0.3:
            os.kill(os.getpid(), signal.SIGINT)

    assert [o.end for o in shards.run(2, body, board, interrupt_once)] == [{"stopped": True}] * 2


def test_workers_do_not_outlive_their_parent(tmp_path):
    script = (
        "import asyncio\nimport time\nfrom llm_bench import shards\nfrom llm_bench.shards import Board\n"
        "board = Board(2, 1)\n"
        "def body(n):\n    import os\n    open(f'{n}.pid', 'w').write(str(os.getpid()))\n"
        "    asyncio.run(board.wait_for_start(n, asyncio.Event()))\n    time.sleep(60)\n    return {}\n"
        "shards.run(2, body, board, lambda: None)\n"
    )
    parent = subprocess.Popen([*command()[:1], "-c", script], cwd=tmp_path, env=environment())
    deadline = time.monotonic() + 60
    files = [tmp_path / "0.pid", tmp_path / "1.pid"]
    while time.monotonic() < deadline and not all(f.exists() and f.read_text() for f in files):
        time.sleep(0.02)
    pids = [int(f.read_text()) for f in files]
    parent.kill()
    parent.wait()

    def alive(pid):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"

    while time.monotonic() < deadline and any(map(alive, pids)):
        time.sleep(0.02)
    assert not any(map(alive, pids))


@pytest.mark.parametrize(("concurrency", "workers"), [(45, 8), (3, 8), (1, 8), (8, 8), (256, 1)])
def test_the_slots_of_all_workers_are_those_of_the_loop(concurrency, workers):
    board = Board(workers, 1000)
    parts = [SharedSlots(board, k, workers, range(1000), concurrency) for k in range(workers)]
    numbers = sorted(n for part in parts for n in part.numbers)
    assert numbers == list(range(concurrency))


def test_the_window_opens_when_the_slots_of_all_workers_are_warm():
    board = Board(2, 10)
    one, two = (SharedSlots(board, k, 2, range(10), 2) for k in range(2))
    first, second = one.take(), two.take()
    assert (first, second) == (0, 1)
    assert not one.warm(2)
    one.ended(first)
    one.leave()
    third = one.take()
    one.ended(third)
    one.leave()
    assert one.take() == 3
    assert not one.warm(2)  # two have ended, but the first wave's second is still under way
    two.ended(second)
    two.leave()
    assert not one.warm(2)  # and now a slot is free
    assert two.take() == 4
    assert one.warm(2)
    one.opened_ns = 77
    assert two.opened_ns == 77


def test_what_was_begun_is_known_after_a_death():
    board = Board(2, 5)

    def body(number):
        started(board, number)
        board.note(number, 1 + 2 * number, 1000 + number)
        os.kill(os.getpid(), signal.SIGKILL)

    shards.run(2, body, board, nothing)
    assert board.taken.tolist() == [0, 1, 0, 2, 0]
    assert board.due_ns.tolist() == [0, 1000, 0, 1001, 0]
    assert board.counters.dtype == np.int64


def _until_stopped(board, number):
    """As a worker's loop: handlers of its own, and nothing is sent after a stop. Returns how long it waited, in s."""

    async def main():
        stop, begun = asyncio.Event(), time.monotonic()
        for name in shards.STOPPING:
            asyncio.get_running_loop().add_signal_handler(name, stop.set)
        start_ns = await board.wait_for_start(number, stop)
        if start_ns:
            await asyncio.wait_for(stop.wait(), 60)
        return {"start_ns": start_ns, "s": time.monotonic() - begun}

    return asyncio.run(main())


@pytest.mark.parametrize("after_the_start", [False, True])
@undisturbed
def test_a_worker_that_fails_ends_the_others_as_a_death_does(after_the_start):
    board = Board(3, 10)

    def body(number):
        if number == 1:
            time.sleep(0.1)
            if after_the_start:
                started(board, number)
            raise BenchError("no sockets left")
        return _until_stopped(board, number)

    begun = time.monotonic()
    outcomes = shards.run(3, body, board, nothing)
    assert time.monotonic() - begun < 3
    assert [o.error for o in outcomes] == ["", "no sockets left", ""]
    assert [o.died for o in outcomes] == ["", "failed", ""]
    assert all((o.end["start_ns"] > 0) is after_the_start for o in (outcomes[0], outcomes[2]))
    assert not board.interrupted


def test_those_that_wait_for_the_start_end_by_the_word_alone():
    board, stop = Board(2, 1), asyncio.Event()

    async def main():
        asyncio.get_running_loop().call_later(0.05, board.stop, False)
        return await asyncio.wait_for(board.wait_for_start(0, stop), 30)

    assert asyncio.run(main()) == 0
    assert stop.is_set()


def test_a_signal_between_fork_and_loop_ends_a_worker_without_a_traceback(capfd):
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as `run` has it outside a cell
    try:
        board = Board(2, 10)

        def body(number):
            if number == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            return _until_stopped(board, number)

        outcomes = shards.run(2, body, board, nothing)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert outcomes[0].died == "killed by signal 15"
    assert "Traceback" not in capfd.readouterr().err


def test_an_interrupt_before_the_loops_run_is_no_death_of_a_worker():
    board, told = Board(2, 10), []

    def body(number):
        time.sleep(60)
        return {}

    def interrupt_once():
        if not told:
            told.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    outcomes = shards.run(2, body, board, interrupt_once)
    assert [o.died for o in outcomes] == [shards.BEFORE_START] * 2
    assert board.interrupted


@pytest.mark.parametrize("signals", [1, 2])
def test_workers_that_do_not_end_are_killed_in_the_end_and_at_once_by_a_second_interrupt(monkeypatch, signals):
    monkeypatch.setattr(shards, "TERM_S", 1.0 if signals == 1 else 60.0)
    board, told = Board(2, 10), []
    begun = time.monotonic()

    def body(number):
        for name in shards.STOPPING:
            signal.signal(name, signal.SIG_IGN)
        started(board, number)
        time.sleep(60)
        return {}

    def interrupt():
        if board.started and len(told) < signals and time.monotonic() > (told[-1] + 0.7 if told else begun + 0.2):
            told.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    outcomes = shards.run(2, body, board, interrupt)
    assert time.monotonic() - begun < 30
    assert [o.died for o in outcomes] == ["killed by signal 9"] * 2
    assert board.interrupted


def test_a_result_of_any_size_comes_back():
    outcomes = shards.run(1, lambda number: {"x": "y" * 300_000}, Board(1, 1), nothing)
    assert len(outcomes[0].end["x"]) == 300_000
