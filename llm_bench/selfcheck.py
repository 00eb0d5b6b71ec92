"""Drives the null target, a server with known times, over a real socket: this client's own floor and ceiling.

Its stamps are compared with the server's own, taken on the same clock just before each write.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson

from llm_bench import probe, records, shards, targets
from llm_bench.cell import Cell, Options
from llm_bench.errors import ClientLimit
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
    fills_a_core: bool = True  # else what a core would carry cannot be told from what this step cost


BUSY_MS = 5.0  # p99 error of a stamp: an idle machine of our time is below 1
ITL_MS = 20.0  # 50 tokens/s a stream, at which the field's clients are compared
SERVED = 1.05  # the null target's own gaps may be so much longer; above it, it was the limit and not this client
MAX_CPU_SHARE = 0.85  # of a core: `run` calls a client over it limited
FLOOR = ("1 stream", "64 streams", "256 streams")  # what any machine of our time carries, when it is idle
# The floor, then where one core ends: by streams, and by requests and events that come at once.
STEPS: dict[str, Step] = {
    "1 stream": Step(Load(concurrency=1), 20, 8, 20.0, ITL_MS, fills_a_core=False),
    "64 streams": Step(Load(concurrency=64), 256, 64, 50.0, ITL_MS),
    "256 streams": Step(Load(concurrency=256), 1024, 64, 50.0, ITL_MS),
    **{f"{n} streams": Step(Load(concurrency=n), 2 * n, 64, 50.0, ITL_MS) for n in (512, 1024, 2048, 4096)},
    "pacing": Step(Load(rate=1000.0, burstiness=None), 3000, 1, fills_a_core=False),
    "requests": Step(Load(concurrency=32), 10_000, 1),
    "bursts": Step(Load(concurrency=32), 3_000, 100),
}


class Found(NamedTuple):
    """What one step showed. ms; None where the step has no such thing."""

    ttft_error_ms: tuple[float, float] | None  # p50, p99: first token's stamp minus the server's write of it
    gap_error_ms: tuple[float, float] | None  # p50, p99 of |gap seen - gap written|
    lag_ms: tuple[float, float]  # p50, p99 of sent - due
    cpu_per_1k_events_s: float
    requests_per_core_s: float | None  # what a core would carry if it did nothing else; None: the step is too light
    events_per_core_s: float | None
    cpu_share: float  # of a core, while requests were in flight
    served_itl_ms: float | None  # the server's own gaps, median: longer than asked where it was the limit
    ok: int
    failed: int


def run(steps: Mapping[str, Step], say: Say, live: Say) -> dict[str, Found]:
    """Each step in turn, about a minute in all; more streams are left out once fewer were too many.

    Raises TargetError where the null target cannot start.
    """
    done: dict[str, Found] = {}
    with tempfile.TemporaryDirectory(prefix="llm-bench-selfcheck-") as folder:
        for i, (name, step) in enumerate(steps.items()):
            most = streams(done, steps)
            if step.itl_ms and most.why and name not in FLOOR:  # the ceilings are of these
                say(f"{name}: left out, since {most.why}")
                continue
            try:
                done[name] = _step(name, step, Path(folder) / str(i), say, live)
            except ClientLimit as e:
                say(f"{name}: left out: {e}")
    return done


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
        shards.hear_signals()
    seen = records.read(out / f"{cell.name}.arrow")
    written = {row["request_id"]: row["write_ns"] for row in map(orjson.loads, truth.read_bytes().splitlines())}
    return _compare(seen, written, end["client_cpu_s"], end["client_cpu_share"], step)


def _compare(seen: records.Cell, written: Mapping[str, list[int]], cpu_s: float, cpu_share: float, step: Step) -> Found:
    """The client's stamps against the server's. A request whose events and writes do not pair off is a failure."""
    ttft, gaps, served, failed = [], [], [], int((seen["outcome"] != "ok").sum())
    paced = step.ttft_ms > 0
    for i, request_id in enumerate(seen["request_id"]):
        mine = seen.event_ns[seen.offsets[i] : seen.offsets[i + 1]]
        theirs = np.array(written.get(request_id, []), np.int64)
        if len(mine) != len(theirs) or not len(mine):
            failed += seen["outcome"][i] == "ok"
            continue
        ttft.append((mine[0] - theirs[0]) / 1e6)
        gaps.append((np.diff(mine) - np.diff(theirs)) / 1e6)
        served.append((theirs[-1] - theirs[0]) / 1e6 / max(len(theirs) - 1, 1))
    events = len(seen.event_ns)
    lag_ms = (seen["sent_ns"] - seen["due_ns"]) / 1e6
    return Found(
        ttft_error_ms=_p50_p99(np.array(ttft)) if paced and ttft else None,
        gap_error_ms=_p50_p99(np.abs(np.concatenate(gaps))) if paced and gaps else None,
        lag_ms=_p50_p99(lag_ms),
        cpu_per_1k_events_s=cpu_s / events * 1000,
        requests_per_core_s=seen.n / cpu_s if step.fills_a_core else None,
        events_per_core_s=events / cpu_s if step.fills_a_core else None,
        cpu_share=cpu_share,
        served_itl_ms=float(np.median(served)) if paced and served else None,
        ok=int((seen["outcome"] == "ok").sum()),
        failed=int(failed),
    )


def _p50_p99(values: np.ndarray) -> tuple[float, float]:
    return float(np.percentile(values, 50)), float(np.percentile(values, 99))


class Streams(NamedTuple):
    """How many streams one worker carries: at least `carried`, and fewer than the next that was tried."""

    carried: int
    why: str  # what stopped the next; "" where every step was carried


def streams(found: Mapping[str, Found], steps: Mapping[str, Step]) -> Streams:
    """The most streams at which every stamp was good: nothing failed, p99 errors within BUSY_MS, CPU to spare."""
    carried = 0
    for name, f in found.items():
        if not steps[name].itl_ms:
            continue
        error = max((pair[1] for pair in (f.ttft_error_ms, f.gap_error_ms) if pair is not None), default=0.0)
        at = f"at {steps[name].load.concurrency:,}"
        if f.failed:
            return Streams(carried, f"{at} {f.failed:,} requests failed")
        if f.served_itl_ms is None or f.served_itl_ms > SERVED * steps[name].itl_ms:
            return Streams(carried, f"{at} the null target itself fell behind ({f.served_itl_ms or 0:.1f} ms a token)")
        if f.cpu_share > MAX_CPU_SHARE:
            return Streams(carried, f"{at} this client used {f.cpu_share:.0%} of a core")
        if error > BUSY_MS:
            return Streams(carried, f"{at} stamps were up to {error:.1f} ms late (p99)")
        carried = steps[name].load.concurrency or 0
    return Streams(carried, "")


def summary(found: Mapping[str, Found], steps: Mapping[str, Step]) -> str:
    """The ceilings in a sentence each."""
    most, core = streams(found, steps), ceiling(found)
    end = f"; {most.why}" if most.why else ", the most that were tried"
    return (
        f"One worker carries {most.carried:,} streams of {1000 / ITL_MS:.0f} tokens/s{end}.\n"
        f"A core carries {core['events_per_s']:,.0f} events/s, or {core['requests_per_s']:,.0f} requests/s.\n"
    )


def ceiling(found: Mapping[str, Found]) -> dict[str, float]:
    """What one core carries: paced events, each a read of its own, and requests of one token."""
    events, requests = found["256 streams"].events_per_core_s, found["requests"].requests_per_core_s
    assert events is not None, "256 streams fill a core"
    assert requests is not None, "requests fill a core"
    return {"events_per_s": events, "requests_per_s": requests}


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
    return f"this machine was busy ({'; '.join(why)}): repeat this when it is idle" if why else ""


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
            f"{f.cpu_share:.0%}",
            f"{f.cpu_per_1k_events_s:.4f}",
            "–" if f.requests_per_core_s is None else f"{f.requests_per_core_s:,.0f}",
            "–" if f.events_per_core_s is None else f"{f.events_per_core_s:,.0f}",
            f"{f.failed:,}",
        )
        for name, f in found.items()
    ]


HEADINGS = ("step", "TTFT\nerror", "gap\nerror", "lag", "core\nused", "CPU s\nper 1k", "req/s", "events/s", "failed")
LEGEND = (
    "Errors and lag in ms: p50, under it p99. TTFT error: the first token's stamp\n"
    "here minus the server's own, taken just before its write. Lag: sent after due.\n"
    "Core used: by this client while it sent. CPU s per 1k: CPU seconds per 1,000\n"
    "token events, records written. req/s and events/s: what one core would carry\n"
    "if it did nothing else, from steps that fill one. Streams of 50 tokens/s;\n"
    "`requests` and `bursts` come at once.\n"
)
