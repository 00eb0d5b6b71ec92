"""A test that is tried again where the machine held it up, and only there."""

import os
import subprocess
import sys

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
