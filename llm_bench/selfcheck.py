"""Drives the null target, a server with known times, over a real socket: this client's own floor and ceiling.

Its stamps are compared with the server's own, taken on the same clock just before each write.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson

from llm_bench import probe, records, targets
from llm_bench.cell import Cell, Options
from llm_bench.measure import measure
from llm_bench.plan import Load
from llm_bench.request import Request
from llm_bench.targets import BUILT_IN, Target

Say = Callable[[str], None]


class Step(NamedTuple):
    """One load on the null target. With both times 0 an answer is one write, and one read."""

    load: Load
    requests: int
    tokens: int
    ttft_ms: float = 0.0
    itl_ms: float = 0.0


BUSY_MS = 5.0  # p99 error of a stamp: an idle machine of our time is below 1
# Streams at 50 tokens/s, as FINDINGS of the field's clients are given; the last three find where one core ends.
STEPS: dict[str, Step] = {
    "1 stream": Step(Load(concurrency=1), 20, 8, 20.0, 20.0),
    "64 streams": Step(Load(concurrency=64), 256, 64, 50.0, 20.0),
    "256 streams": Step(Load(concurrency=256), 1024, 64, 50.0, 20.0),
    "pacing": Step(Load(rate=1000.0, burstiness=None), 3000, 1),
    "requests": Step(Load(concurrency=32), 10_000, 1),
    "whole answers": Step(Load(concurrency=32), 3_000, 100),
}


class Found(NamedTuple):
    """What one step showed. ms; None where the step has no such thing."""

    ttft_error_ms: tuple[float, float] | None  # p50, p99: first token's stamp minus the server's write of it
    gap_error_ms: tuple[float, float] | None  # p50, p99 of |gap seen - gap written|
    lag_ms: tuple[float, float]  # p50, p99 of sent - due
    cpu_per_1k_events_s: float
    requests_per_core_s: float  # what a core would carry if it did nothing else
    events_per_core_s: float
    ok: int
    failed: int


def run(steps: Mapping[str, Step], say: Say, live: Say) -> dict[str, Found]:
    """Each step in turn, about half a minute in all. Raises TargetError where the null target cannot start."""
    with tempfile.TemporaryDirectory(prefix="llm-bench-selfcheck-") as folder:
        return {
            name: _step(name, step, Path(folder) / str(i), say, live) for i, (name, step) in enumerate(steps.items())
        }


def _step(name: str, step: Step, out: Path, say: Say, live: Say) -> Found:
    out.mkdir(parents=True)
    truth = out / "truth.jsonl"
    times = ("--ttft-ms", f"{step.ttft_ms}", "--itl-ms", f"{step.itl_ms}", "--truth", str(truth))
    target = Target("null", api="openai-completions", launch=(*BUILT_IN["null"], *times))
    requests = [Request(tokens_in=16, tokens_out=step.tokens) for _ in range(step.requests)]
    options = Options(out=out, warmup=0)
    with targets.running(target, lambda text: None) as running:
        found = probe.probe(running, lambda text: None, options.ready_s)
        cell = Cell(options, "selfcheck", 0, running, found, requests, step.load)
        say(f"{name}: {step.requests} requests of {step.tokens} tokens")
        end = measure(cell, {}, lambda text: None, live)
    seen = records.read(out / f"{cell.name}.arrow")
    written = {row["request_id"]: row["write_ns"] for row in map(orjson.loads, truth.read_bytes().splitlines())}
    return _compare(seen, written, end["client_cpu_s"], paced=step.ttft_ms > 0)


def _compare(seen: records.Cell, written: Mapping[str, list[int]], cpu_s: float, *, paced: bool) -> Found:
    """The client's stamps against the server's. A request whose events and writes do not pair off is a failure."""
    ttft, gaps, failed = [], [], int((seen["outcome"] != "ok").sum())
    for i, request_id in enumerate(seen["request_id"]):
        mine = seen.event_ns[seen.offsets[i] : seen.offsets[i + 1]]
        theirs = np.array(written.get(request_id, []), np.int64)
        if len(mine) != len(theirs) or not len(mine):
            failed += seen["outcome"][i] == "ok"
            continue
        ttft.append((mine[0] - theirs[0]) / 1e6)
        gaps.append((np.diff(mine) - np.diff(theirs)) / 1e6)
    events = len(seen.event_ns)
    lag_ms = (seen["sent_ns"] - seen["due_ns"]) / 1e6
    return Found(
        ttft_error_ms=_p50_p99(np.array(ttft)) if paced and ttft else None,
        gap_error_ms=_p50_p99(np.abs(np.concatenate(gaps))) if paced and gaps else None,
        lag_ms=_p50_p99(lag_ms),
        cpu_per_1k_events_s=cpu_s / events * 1000,
        requests_per_core_s=seen.n / cpu_s,
        events_per_core_s=events / cpu_s,
        ok=int((seen["outcome"] == "ok").sum()),
        failed=int(failed),
    )


def _p50_p99(values: np.ndarray) -> tuple[float, float]:
    return float(np.percentile(values, 50)), float(np.percentile(values, 99))


def ceiling(found: Mapping[str, Found]) -> dict[str, float]:
    """What one core carries: paced events, each a read of its own, and requests of one token."""
    return {
        "events_per_s": found["256 streams"].events_per_core_s,
        "requests_per_s": found["requests"].requests_per_core_s,
    }


def busy(found: Mapping[str, Found], load_average: float | None, cores: int) -> str:
    """Why these figures are of a machine that did other work too; "" for one that seems to have been idle.

    `load_average`: of the minute before the first step; None where the system has none.
    """
    why = []
    if load_average is not None and load_average > cores / 2:
        why.append(f"its load average before was {load_average:.1f} on {cores} cores")
    errors = [pair[1] for f in found.values() for pair in (f.ttft_error_ms, f.gap_error_ms) if pair is not None]
    if max(errors, default=0.0) > BUSY_MS:
        why.append(f"a p99 error of {max(errors):,.1f} ms is over {BUSY_MS:g} ms")
    return f"this machine was busy ({'; '.join(why)}): do it again when it is idle" if why else ""


def rows(found: Mapping[str, Found]) -> list[tuple[str, ...]]:
    """What `llm-bench selfcheck` prints, under HEADINGS: lines of p50, then of p99."""

    def pair(values: tuple[float, float] | None) -> str:
        return "–\n–" if values is None else "\n".join(f"{v:.2f}" if v < 100 else f"{v:,.0f}" for v in values)

    return [
        (
            name,
            pair(f.ttft_error_ms),
            pair(f.gap_error_ms),
            pair(f.lag_ms),
            f"{f.cpu_per_1k_events_s:.4f}",
            f"{f.requests_per_core_s:,.0f}",
            f"{f.events_per_core_s:,.0f}",
            f"{f.failed:,}",
        )
        for name, f in found.items()
    ]


HEADINGS = ("step", "TTFT\nerror", "gap\nerror", "lag", "CPU s\nper 1k", "req/s", "events/s", "failed")
LEGEND = (
    "Errors and lag in ms: p50, under it p99. TTFT error: the first token's stamp\n"
    "here minus the server's own, taken just before its write. Lag: sent after due.\n"
    "CPU s per 1k: CPU seconds per 1,000 token events, records written. req/s and\n"
    "events/s: what one core would carry if it did nothing else. Streams of\n"
    "50 tokens/s; `requests` and `whole answers` come at once.\n"
)
