"""What `selfcheck` found this machine to carry, kept where `run` looks: events/s and requests/s of one core."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_bench import __version__
from llm_bench.host import host


def store() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "llm-bench" / "selfcheck.json"


def save(steps: Mapping[str, Mapping[str, Any]], ceiling: Mapping[str, float]) -> dict[str, Any]:
    """Raises OSError where the cache cannot be written."""
    document = {"version": __version__, "host": host(), "steps": dict(steps), "ceiling": dict(ceiling)}
    path = store()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    return document


def ceiling() -> dict[str, float] | None:
    """`events_per_s` and `requests_per_s` of one core; None where this CPU, this version was never checked."""
    try:
        document = json.loads(store().read_text())
        known = document["version"] == __version__ and document["host"]["cpu"] == host()["cpu"]
        return (
            {name: float(document["ceiling"][name]) for name in ("events_per_s", "requests_per_s")} if known else None
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
