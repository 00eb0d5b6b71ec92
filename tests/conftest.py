"""Properties draw the same examples each time, so that a change fails by what it changed; `make fuzz` searches on."""

import os
import signal
import sys
from collections.abc import Iterator

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton, as transformers does

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.register_profile("search", max_examples=1000, print_blob=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """What a run in this process did to its signals goes no further than its test: Ctrl-C ends all of them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    if shards := sys.modules.get("llm_bench.shards"):
        shards._deferred.clear()
