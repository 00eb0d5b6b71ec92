"""tests/conftest.py: what ran before in a process does not decide what a test finds."""

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench import calibration

DRAWN: list[float] = []


def drawn() -> list[tuple[list[int], str]]:
    found: list[tuple[list[int], str]] = []

    @given(st.lists(st.integers()), st.text())
    def draw(numbers: list[int], text: str) -> None:
        found.append((numbers, text))

    draw()
    return found


@pytest.mark.skipif(os.environ.get("HYPOTHESIS_PROFILE", "repeatable") != "repeatable", reason="searches on")
def test_examples_do_not_follow_from_what_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = drawn()
    (tmp_path / "ours.py").write_text(f"FOUND = {list(range(7_654_321, 7_654_400))}\n")
    spec = importlib.util.spec_from_file_location("ours", tmp_path / "ours.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "ours", module)
    assert drawn() == before


@pytest.mark.parametrize("time", ["first", "second"])
def test_draws_without_a_seed_do_not_follow_from_other_tests(time: str) -> None:
    DRAWN.extend((random.random(), np.random.random()))
    assert len(set(DRAWN)) == 2


def test_a_selfcheck_of_this_machine_changes_no_test() -> None:
    """Nor in the processes that tests start."""
    assert calibration.ceiling() is None
    ask = "from llm_bench import calibration; print(calibration.ceiling())"
    found = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "None\n"


def test_what_a_shell_says_of_terminals_and_proxies_changes_no_test() -> None:
    said = {
        "COLUMNS": "43",
        "TERM": "dumb",
        "HTTP_PROXY": "http://127.0.0.1:9",
        "all_proxy": "socks5://127.0.0.1:9",
    }
    ask = f"import os, tests.conftest; print([name for name in {list(said)} if name in os.environ])"
    done = subprocess.run(
        [sys.executable, "-c", ask], env=os.environ | said, cwd=Path(__file__).parents[1], capture_output=True,
        text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == "[]\n"
