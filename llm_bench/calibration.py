"""What `selfcheck` found this machine to carry, kept where `run` looks: events/s and requests/s of one core."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_bench import __version__
from llm_bench.errors import BenchError
from llm_bench.host import host

LEAST = 1.0  # a second: what is less is no core's ceiling


def store() -> Path:
    """Raises RuntimeError where this user has no home."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "llm-bench" / "selfcheck.json"


def save(steps: Mapping[str, Mapping[str, Any]], ceiling: Mapping[str, float]) -> dict[str, Any]:
    """Whole or not at all. Raises BenchError where the cache cannot be written."""
    document = {"version": __version__, "host": host(), "steps": dict(steps), "ceiling": dict(ceiling)}
    try:
        path = store()
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(document, indent=1) + "\n")
        part.replace(path)
    except (OSError, RuntimeError) as e:
        where = f"{e.filename}: {e.strerror}" if isinstance(e, OSError) else str(e)
        raise BenchError(
            f"what was found cannot be kept ({where}); set XDG_CACHE_HOME to a folder that takes it"
        ) from None
    return document


def ceiling() -> dict[str, float] | None:
    """`events_per_s` and `requests_per_s` of one core; None where this CPU, this version was never checked."""
    try:
        document = json.loads(store().read_bytes())
        if document["version"] != __version__ or document["host"]["cpu"] != host()["cpu"]:
            return None
        found = {name: document["ceiling"][name] for name in ("events_per_s", "requests_per_s")}
        sound = all(type(v) in (int, float) and math.isfinite(v) and v >= LEAST for v in found.values())
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, OverflowError):  # whatever a file may hold
        return None
    return {name: float(v) for name, v in found.items()} if sound else None
