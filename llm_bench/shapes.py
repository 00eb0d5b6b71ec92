"""What JSON that is read back must look like where a report relies on it: run.json, and the header of a record file.

A row of a table is a path and what stands there; `[]` is each item of a list. Null says the same as nothing, and what
no row names is free.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from llm_bench.errors import BenchError


class Shape(NamedTuple):
    name: str  # in words, with its article
    holds: Callable[[Any], bool]
    required: bool = False


def _number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and _number(value)


OBJECT = Shape("an object", lambda v: isinstance(v, dict))
ITEM = Shape("an object", lambda v: isinstance(v, dict), required=True)
LIST = Shape("a list", lambda v: isinstance(v, list))
TEXT = Shape("a text", lambda v: isinstance(v, str))
SAID = Shape("a text", lambda v: isinstance(v, str), required=True)
NAME = Shape("a file name without a folder", lambda v: isinstance(v, str) and v not in ("", ".", "..") and "/" not in v)
NUMBER = Shape("a number", _number)
AMOUNT = Shape("a number of 0 or more", lambda v: _number(v) and v >= 0)
INTEGER = Shape("a whole number", _whole)
COUNT = Shape("a whole number of 1 or more", lambda v: _whole(v) and v >= 1)
PLACE = Shape("a whole number of 0 or more", lambda v: _whole(v) and v >= 0)

WORKERS = Shape("a whole number of 1 to 4096", lambda v: _whole(v) and 1 <= v <= 4096)
STALL = Shape(
    "a stall, [ns, ms of 0 to 1e9]",
    lambda v: isinstance(v, list) and len(v) == 2 and _whole(v[0]) and _number(v[1]) and 0 <= v[1] <= 1e9,
    required=True,
)

_LOAD = {"kind": TEXT, "label": TEXT, "concurrency": COUNT, "rate": NUMBER, "speed": NUMBER}
_LOAD |= {"warmup": AMOUNT, "duration_s": AMOUNT, "max_in_flight": COUNT}

# Of a cell in a run of several rounds.
_ROUND = {"pair": PLACE, "arm": TEXT, "order": PLACE, "repeat": COUNT, "arrivals_seed": PLACE, "work_hash": TEXT}

HEADER: dict[str, Shape] = {
    "target": OBJECT,
    "target.name": TEXT,
    "target.url": TEXT,
    "load": OBJECT,
    **{f"load.{key}": shape for key, shape in _LOAD.items()},
    "plan": OBJECT,
    "plan.requests": INTEGER,
    "workers": WORKERS,
    **_ROUND,
    "probe": OBJECT,
    "probe.rtt_ms": NUMBER,
    "probe.base_tokens": NUMBER,
    "settings": OBJECT,
}

RUN: dict[str, Shape] = {
    "llm_bench_run": COUNT,
    "version": TEXT,
    "targets": LIST,
    "loads": LIST,
    "host": OBJECT,
    "learnt": OBJECT,
    "trace": OBJECT,
    "trace.sha256": TEXT,
    "trace.bytes": AMOUNT,
    "settings": OBJECT,
    "settings.slo": TEXT,
    "settings.deadlines": TEXT,
    "settings.rounds": OBJECT,
    "settings.rounds.repeat": COUNT,
    "cells": LIST,
    "cells[]": ITEM,
    "cells[].name": NAME,
    "cells[].file": NAME,
    "cells[].target": TEXT,
    "cells[].load": OBJECT,
    **{f"cells[].{key}": shape for key, shape in _ROUND.items()},
    **{f"cells[].load.{key}": shape for key, shape in _LOAD.items()},
    "cells[].end": OBJECT,
    "cells[].end.reason": TEXT,
    "cells[].end.counts": OBJECT,
    "cells[].end.turns_not_sent": INTEGER,
    "cells[].end.start_ns": INTEGER,
    "cells[].end.loop_lag_p99_ms": NUMBER,
    "cells[].end.worker_loop_lag_ms": LIST,
    "cells[].end.worker_loop_lag_ms[]": NUMBER._replace(required=True),
    "cells[].end.loop_stalls": LIST,
    "cells[].end.loop_stalls[]": STALL,
    "cells[].end.stamps": TEXT,
    "cells[].end.client_cpu_share": NUMBER,
    "cells[].end.workers": COUNT,
    "cells[].end.ceiling": OBJECT,
    "cells[].end.ceiling.events_per_s": NUMBER,
    "cells[].end.ceiling.requests_per_s": NUMBER,
    "cells[].doubts": LIST,
    "cells[].doubts[]": ITEM,
    "cells[].doubts[].kind": SAID,
    "cells[].doubts[].text": SAID,
}


def parse(text: str | bytes, shapes: Mapping[str, Shape], where: str) -> dict[str, Any]:
    """The object in `text`. Raises BenchError, which begins with `where`, for what is no JSON or of another shape."""
    try:
        found = json.loads(text)
        # JSON has no NaN, no infinity (1e999 reads as one) and no half characters: no report could be written of them.
        json.dumps(found, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as e:
        raise BenchError(f"{where}: not JSON ({e})") from None
    if not isinstance(found, dict):
        raise BenchError(f"{where}: expected an object, found {_short(found)}")
    for path, shape in shapes.items():
        for place, value in _at(found, path.split("."), ""):
            if shape.required if value is None else not shape.holds(value):
                raise BenchError(f"{where}: {place}: expected {shape.name}, found {_short(value)}")
    return found


def _at(value: dict[str, Any], path: list[str], place: str) -> Iterator[tuple[str, Any]]:
    """(place in words, value) of everything that a path names. What stands above it has been checked before."""
    key, *rest = path
    name, inside = key.removesuffix("[]"), value.get(key.removesuffix("[]"))
    here = f"{place}.{name}" if place else name
    found = [(f"{here}[{i}]", item) for i, item in enumerate(inside or [])] if key.endswith("[]") else [(here, inside)]
    for where, item in found:
        if not rest:
            yield where, item
        elif item is not None:
            yield from _at(item, rest, where)


def _short(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
