"""Properties draw the same examples each time, so that a change fails by what it changed; `make fuzz` searches on."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton, as transformers does

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.register_profile("search", max_examples=1000, print_blob=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
