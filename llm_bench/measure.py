"""Drives one cell: plan to disk, requests over the wire, records and gauge to disk, progress to whoever looks."""

import asyncio
import errno
import gc
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from llm_bench import clock, driver, targets, wire
from llm_bench.cell import Cell
from llm_bench.errors import BenchError
from llm_bench.plan import Plan
from llm_bench.records import Writer

GONE_AFTER = 20  # refused connections in a row, none answered between: then the target is asked whether it lives
TICK_S = 0.25  # progress, at 4 Hz
MAX_RAMP_S = 10.0  # a first wave is spread over one request's time, but no longer than this

Say = Callable[[str], None]


def measure(cell: Cell, header: Mapping[str, Any], say: Say, live: Say) -> dict[str, Any]:
    """Plan, drive, write. Returns how the cell ended, for run.json.

    Raises BenchError where the disk is full, before or during the load; what was measured by then is readable.
    """
    out = cell.options.out
    work = Plan(cell.requests, cell.due_ns, out / f"{cell.name}.spool", cell.next_payload)
    try:
        _check_disk(out, cell)
        work.write(cell.first_payloads(live))
        for line in announcement(cell):
            say(f"{cell.name}: {line}")
        return _drive(cell, work, header, live)
    except OSError as e:
        if e.errno != errno.ENOSPC:
            raise
        raise BenchError(f"{out}: the disk is full; what was measured before is readable there") from None
    finally:
        work.close()


def _check_disk(folder: Path, cell: Cell) -> None:
    """Refuse before writing: prompts at 6 bytes a token, records at 16 bytes a token and 1.5 kB a request."""
    need = sum(6 * r.tokens_in + 16 * (r.tokens_out or 256) + 1500 for r in cell.requests)
    free = shutil.disk_usage(folder).free
    if need > free:
        raise BenchError(
            f"{folder}: the plan and the records of {cell.name} need about {need / 1e9:.3f} GB, "
            f"{free / 1e9:.3f} GB are free; give --requests, or another --out"
        )


def warmup_requests(cell: Cell) -> int:
    """Closed loop: by default two rounds of the slots; the driver also waits for the whole first wave."""
    asked = cell.options.warmup
    return round(asked) if asked is not None else 2 * (cell.load.concurrency or 0)


def ramp_s(cell: Cell) -> float:
    """The first wave is spread over what one request takes alone, so that the slots do not march in step."""
    return min(cell.alone_s, MAX_RAMP_S)


def announcement(cell: Cell) -> list[str]:
    """The effective settings, and what can be known of the cell before it runs."""
    load, count = cell.load, len(cell.requests)
    limits = asdict(cell.options.timeouts).items()
    shown = ", ".join(f"{name[:-2]} {'none' if s is None else f'{s:g} s'}" for name, s in limits)
    lines = [f"{cell.target.name} at {load.label}, {count} requests; time-outs: {shown}"]
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
    elif load.rate is not None:
        sent = cell.due_ns[cell.due_ns >= 0]
        span_s = max(float(sent.max()) / 1e9, 1e-9)
        rate = (len(sent) - 1) / span_s
        lines.append(f"these arrivals (seed {cell.options.seed}) come at {rate:.4g}/s over {span_s:.1f} s")
    return lines


def _drive(cell: Cell, work: Plan, header: Mapping[str, Any], live: Say) -> dict[str, Any]:
    facts = {
        "cell": cell.name,
        "target": cell.target.public(),
        "probe": cell.found.public(),
        "load": cell.load_facts(),
        "plan": {"hash": work.hash, "requests": len(work)}
        | {"shares": any(r.hash_ids for r in cell.requests), "sessions": any(r.session for r in cell.requests)},
        "anchor": list(clock.anchor()),
        "start_ns": clock.now_ns(),
    }
    writer = Writer(cell.options.out / f"{cell.name}.arrow", {**header, **facts})
    gc.collect()
    gc.freeze()  # a collection over the whole plan would stop the loop for longer than a token takes
    try:
        return wire.run(_loop(cell, work, writer, live))
    finally:
        gc.unfreeze()
        writer.close()


async def _loop(cell: Cell, work: Plan, writer: Writer, live: Say) -> dict[str, Any]:
    options, load = cell.options, cell.load
    stop, stopped_by = asyncio.Event(), ""
    refused_in_a_row = 0

    def halt(reason: str) -> None:
        nonlocal stopped_by
        stopped_by = stopped_by or reason
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, halt, "interrupted")

    def done(flight: driver.Flight) -> bool:
        nonlocal refused_in_a_row
        record = cell.record(flight)
        writer.write(record)
        refused_in_a_row = refused_in_a_row + 1 if record.error_kind == "connect_error" else 0
        if refused_in_a_row == GONE_AFTER and not targets.reachable(cell.target):
            halt("target gone")
        return record.outcome in ("ok", "cancelled")

    line = wire.Wire(
        cell.target.url,
        cell.dialect.path,
        targets.auth_headers(cell.target),
        options.timeouts,
        cell.dialect.is_token if options.stream else None,
        cafile=cell.target.cafile or None,
    )
    send, gauge = wire.retrying(line.send, options.retries), driver.Gauge()
    drain_s = options.drain_s if options.drain_s is not None else options.timeouts.total_s
    ticker = _Ticker(cell, len(work), gauge, writer, live)
    ticking = asyncio.create_task(ticker.run())
    cpu_ns, begun_ns = time.process_time_ns(), clock.now_ns()
    try:
        if load.concurrency is not None:
            drive = await driver.closed_loop(
                work,
                send,
                done,
                concurrency=load.concurrency,
                warmup=warmup_requests(cell),
                ramp_s=ramp_s(cell),
                duration_s=options.duration_s,
                drain_s=drain_s,
                stop=stop,
                gauge=gauge,
            )
        else:
            drive = await driver.open_loop(
                work,
                send,
                done,
                max_in_flight=load.max_in_flight,
                duration_s=options.duration_s,
                drain_s=drain_s,
                stop=stop,
                gauge=gauge,
            )
    finally:
        ticking.cancel()
        line.close()
        live("")
    np.save(options.out / f"{cell.name}.gauge.npy", gauge.steps())
    return {
        "reason": stopped_by or drive.reason,
        "start_ns": drive.start_ns,
        "turns_not_sent": drive.turns_not_sent,
        "cut": drive.cut,
        "peak_in_flight": gauge.peak,
        "client_cpu_share": (time.process_time_ns() - cpu_ns) / max(clock.now_ns() - begun_ns, 1),
        "loop_lag_p99_ms": float(np.percentile(ticker.late_ms, 99)) if ticker.late_ms else 0.0,
        "counts": dict(cell.counts),
    }


class _Ticker:
    """Progress at 4 Hz, records to disk, and how late the event loop is: a tick that comes late says so."""

    def __init__(self, cell: Cell, planned: int, gauge: driver.Gauge, writer: Writer, live: Say) -> None:
        self.late_ms: list[float] = []
        self._cell, self._planned, self._gauge, self._writer, self._live = cell, planned, gauge, writer, live
        self._begun_s = time.monotonic()

    async def run(self) -> None:
        while True:
            due_s = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self.late_ms.append((time.monotonic() - due_s) * 1e3)
            self._writer.flush()
            self._live(self.line(time.monotonic() - self._begun_s))

    def line(self, ran_s: float) -> str:
        cell, ended = self._cell, sum(self._cell.counts.values())
        if cell.options.duration_s is not None:
            left = f"about {max(cell.options.duration_s - ran_s, 0):.0f} s left, warm-up and drain not counted"
        elif ended:
            left = f"about {ran_s / ended * (self._planned - ended):.0f} s left"
        else:
            left = "waiting for the first answer"
        return (
            f"{cell.name}: {ended} of {self._planned} done, {self._gauge.now} in flight, "
            f"{cell.counts['failed']} failed, {cell.tokens / ran_s:,.0f} tokens/s so far, {left}"
        )
