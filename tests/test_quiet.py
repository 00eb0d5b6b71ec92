"""A test that is tried again where the machine held it up, and only there."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests import quiet
from tests.quiet import undisturbed

STOP = f"kill -STOP {os.getpid()}; sleep 0.1; kill -CONT {os.getpid()}"


def failing(times: int, calls: list[int], meanwhile: str = "") -> None:
    calls.append(len(calls))
    if meanwhile:
        subprocess.run(["sh", "-c", meanwhile], check=True)
    assert len(calls) > times


def test_what_holds_is_done_once() -> None:
    calls: list[int] = []
    undisturbed(failing)(0, calls)
    assert calls == [0]


def test_a_failure_in_quiet_counts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "HELD_S", 1e9)
    calls: list[int] = []
    with pytest.raises(AssertionError):
        undisturbed(failing)(1, calls)
    assert calls == [0]


def test_what_fails_in_each_try_fails_on_a_machine_that_is_never_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "HELD_S", -1.0)
    calls: list[int] = []
    with pytest.raises(AssertionError):
        undisturbed(failing)(1000, calls)
    assert len(calls) == quiet.TRIES


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_a_process_that_was_stopped_is_tried_again() -> None:
    calls: list[int] = []
    undisturbed(failing)(1, calls, STOP)
    assert calls == [0, 1]


@pytest.mark.parametrize(("waits_s", "disturbed"), [([30.0] * 1000, False), ([0.0, 0.0, 90.0, 0.0], True)])
def test_many_short_waits_for_a_cpu_are_no_disturbance_and_a_long_one_is(
    monkeypatch: pytest.MonkeyPatch, waits_s: list[float], disturbed: bool
) -> None:
    """On another scale of time, so that what this machine does meanwhile is neither."""
    left, waited_ns = iter(waits_s), [0.0]

    def waited(thread: int) -> int:
        assert thread == threading.main_thread().native_id
        waited_ns[0] += next(left, 0.0) * 1e9
        return int(waited_ns[0])

    monkeypatch.setattr(quiet, "HELD_S", 60.0)
    monkeypatch.setattr(quiet, "_waited_ns", waited)
    calls: list[int] = []
    with contextlib.nullcontext() if disturbed else pytest.raises(AssertionError):
        undisturbed(failing)(1, calls, "sleep 0.1")
    assert calls == ([0, 1] if disturbed else [0])
    assert waited_ns[0] > 60e9


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not say it")
def test_what_a_thread_has_waited_for_a_cpu_only_grows() -> None:
    looks = [quiet._waited_ns(threading.get_native_id()) for _ in range(100)]
    assert looks == sorted(looks)
    assert looks[0] > 0
