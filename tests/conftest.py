"""What a test finds is the same each time, whatever this machine is and whichever tests its process ran before.

Properties draw the same examples, so that a change fails by what it changed; `make fuzz` searches on.
"""

import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton, as transformers does

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

# What a shell or a CI says of terminals and proxies decides how wide and how coloured we print, and what `run` refuses.
OF_A_TERMINAL = set("COLUMNS LINES TERM COLORTERM NO_COLOR FORCE_COLOR PY_COLORS CLICOLOR_FORCE GITHUB_ACTIONS".split())
for name in [name for name in os.environ if name in OF_A_TERMINAL or name.lower().endswith("_proxy")]:
    del os.environ[name]
# Native kernels are compiled here; what `selfcheck` found on this machine is not here: `run` would go by it.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / "build" / "tests-cache")

settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.register_profile("search", max_examples=1000, print_blob=True, deadline=None)
if (profile := os.environ.get("HYPOTHESIS_PROFILE", "repeatable")) == "repeatable":
    # Examples hold constants of whatever modules are imported by then: they would follow from the tests run before,
    # and from any line of ours. Hypothesis has no setting for it.
    providers._get_local_constants = lambda: providers._local_constants  # none
settings.load_profile(profile)


@pytest.fixture(autouse=True)
def _draws() -> None:
    """What a test draws by no seed of its own does not follow from what others drew."""
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """What a run in this process did to its signals goes no further than its test: Ctrl-C ends all of them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    if shards := sys.modules.get("llm_bench.shards"):
        shards._deferred.clear()
