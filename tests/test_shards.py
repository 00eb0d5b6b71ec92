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


def nothing() -> None:
    pass


def started(board, number):
    board.wait_for_start(number)
    return number


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
        return {"ready_ns": before_ns, "start_ns": board.wait_for_start(number)}

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


def test_a_killed_worker_is_named_within_a_second_and_the_others_are_ended():
    board = Board(3, 10)

    def body(number):
        started(board, number)
        stopped = []
        signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        deadline = time.monotonic() + 8
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
    assert outcomes[1].died  # it never started, so SIGTERM ended it
    assert "no room" in capfd.readouterr().err


def test_a_mistake_of_the_users_is_raised_as_such():
    board = Board(2, 10)

    def body(number):
        raise BenchError(f"the disk of worker {number} is full")

    with pytest.raises(BenchError, match="worker 0 is full"):
        shards.run(2, body, board, nothing)


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
        "import time\nfrom llm_bench import shards\nfrom llm_bench.shards import Board\nboard = Board(2, 1)\n"
        "def body(n):\n    import os\n    open(f'{n}.pid', 'w').write(str(os.getpid()))\n"
        "    board.wait_for_start(n)\n    time.sleep(60)\n    return {}\n"
        "shards.run(2, body, board, lambda: None)\n"
    )
    parent = subprocess.Popen([*command()[:1], "-c", script], cwd=tmp_path, env=environment())
    deadline = time.monotonic() + 10
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
