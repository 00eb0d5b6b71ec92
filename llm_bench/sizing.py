"""What a cell needs of this client, and what can be said of it before it runs: workers, warm-up, ramp."""

import math
from collections.abc import Mapping
from dataclasses import asdict

import numpy as np

from llm_bench import calibration
from llm_bench.cell import Cell
from llm_bench.host import cores

MAX_RAMP_S = 10.0  # a first wave is spread over one request's time, but no longer than this
UNCALIBRATED = {"events_per_s": 20_000.0, "requests_per_s": 4_000.0}  # half of what a core of 2023 was seen to carry
SHARE_OF_A_CORE = 0.5  # a worker that is busier than this stamps late now and then


def crew(cell: Cell, asked: int) -> int:
    """Workers: as asked, 0 as many as the load seems to need; with no more than slots or conversations.

    A cap is held by one worker: its queue is one, in order, and shares of it would stand empty beside a full one.
    By the probe: what the streams would send, alone as fast as they go, against half of what a core is known to carry.
    """
    load = cell.load
    if load.max_in_flight is not None:
        return 1
    if not asked:
        busy = cores_needed(cell, calibration.ceiling() or UNCALIBRATED)
        asked = min(math.ceil(busy / SHARE_OF_A_CORE), max(1, cores() - 1))
    places = load.concurrency or asked
    return max(1, min(asked, places, sum(r.turn == 0 for r in cell.requests)))


def cores_needed(cell: Cell, core: Mapping[str, float]) -> float:
    """Busy cores that a cell's load makes of what one carries: of a closed loop as fast as its target alone."""
    load = cell.load
    tokens = float(np.mean([r.tokens_out or 1 for r in cell.requests]))
    requests_per_s = load.rate or (load.concurrency or 1) / max(cell.alone_s, 1e-4)
    if load.speed is not None:
        requests_per_s = len(cell.requests) / max(float(cell.due_ns.max()) / 1e9, 1.0)
    return requests_per_s * tokens / core["events_per_s"] + requests_per_s / core["requests_per_s"]


def warmup_requests(cell: Cell) -> int:
    """Closed loop: by default two rounds of the slots; the driver also waits for the whole first wave."""
    asked = cell.options.warmup
    return round(asked) if asked is not None else 2 * (cell.load.concurrency or 0)


def ramp_s(cell: Cell) -> float:
    """The first wave is spread over what one request takes alone, so that the slots do not march in step."""
    return min(cell.alone_s, MAX_RAMP_S)


def announcement(cell: Cell, workers: int = 1, asked: int = 0) -> list[str]:
    """The effective settings, and what can be known of the cell before it runs. `asked`: workers, 0 as many as fit."""
    load, count = cell.load, len(cell.requests)
    limits_s = asdict(cell.options.timeouts).items()
    shown = ", ".join(f"{name[:-2]} {'none' if s is None else f'{s:g} s'}" for name, s in limits_s)
    by = f" by {workers} workers" if workers > 1 else ""
    lines = [f"{cell.target.name} at {load.label}, {count} requests{by}; time-outs: {shown}"]
    if load.concurrency is not None:
        warmup = warmup_requests(cell)
        lines.append(f"warm-up {warmup} requests, first wave spread over {ramp_s(cell):.2f} s")
        if any(r.turn for r in cell.requests):
            lines.append("a slot is a user who also thinks between turns: fewer requests than slots are in flight")
        if cell.options.duration_s is None and count < warmup + 6 * load.concurrency:
            lines.append(
                f"{count} requests are few for {load.concurrency} slots: {warmup} of warm-up and a window of "
                f"{5 * load.concurrency} at least, or the cell is `too short`"
            )
    if load.max_in_flight is not None and asked > 1:
        lines.append(f"a cap is held by one worker: {asked} were asked for, 1 is used")
    if load.concurrency is None and load.rate is not None:
        sent = cell.due_ns[cell.due_ns >= 0]
        span_s = max(float(sent.max()) / 1e9, 1e-9)
        rate = (len(sent) - 1) / span_s
        lines.append(f"these arrivals (seed {cell.arrivals_seed}) come at {rate:.4g}/s over {span_s:.1f} s")
    return lines
