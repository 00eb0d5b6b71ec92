"""Against real servers that install in a minute and start in seconds: MLServer and Triton.

Skipped where they are not installed: python -m tests.engines.environments mlserver triton
"""

import subprocess
from pathlib import Path

import pytest

from tests.bench import command, environment
from tests.engines.serve import Spoken
from tests.engines.table import QUICK
from tests.engines.trying import Up, each, hold, up

__all__ = ["up"]


@each(QUICK)
def test_it_keeps_the_contract(up: Up, name: str, spoken: Spoken, check: str, tmp_path: Path) -> None:
    hold(up, name, spoken, check, tmp_path)


@pytest.mark.parametrize("api", ["tgi", "triton-generate"])
def test_a_protocol_that_mlserver_does_not_speak_ends_in_one_sentence(up: Up, api: str) -> None:
    """Its list of models is Triton's, so that only an answer tells the two apart."""
    asked = command("targets", "check", f"t={up('mlserver')[0]}", "--api", api, "--model", "words")
    done = subprocess.run(asked, capture_output=True, text=True, timeout=180, env=environment(), check=False)
    assert done.returncode == 4
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith("llm-bench: target t: a small probe request failed (http_4xx")
