"""Drives one cell: plan to disk, requests over the wire, records and gauge to disk, progress to whoever looks."""

import asyncio
import gc
import itertools
import shutil
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llm_bench import (
    calibration,
    clock,
    driver,
    fault_doing,
    faults,
    limits,
    records,
    retry,
    scrape,
    shards,
    sizing,
    targets,
    transport,
    wire,
)
from llm_bench.beside import TICK_S, Clerk, Say, Ticker, longest, progress
from llm_bench.cell import RAW_TOTAL, Cell
from llm_bench.errors import BenchError
from llm_bench.exchange import CONNECT_ERROR, Exchange
from llm_bench.fault_doing import Trouble
from llm_bench.faults import Fault
from llm_bench.flights import Done, Drive, Flight, Gauge, Send
from llm_bench.order import Order, Watch
from llm_bench.plan import Plan
from llm_bench.records import DISK_ERRORS, OUTCOMES, Writer
from llm_bench.shards import Board, Part
from llm_bench.target import Target
from llm_bench.transport import Sender

GONE_AFTER = 20  # refused connections in a row, none answered between: then the target is asked whether it lives

# While a cell is driven only what is young is looked through, and seldom: a pass over all answers in flight stops the
# loop for longer than a read. What it would have found waits until the thresholds are the usual ones again.
COLLECTING = (10_000, 10, 1_000_000)


# Drives a cell by workers elsewhere, as `_share` does by processes of this machine.
Fleet = Callable[[Order], dict[str, Any]]


def measure(
    cell: Cell,
    header: Mapping[str, Any],
    say: Say,
    live: Say,
    workers: int = 1,
    watch: Watch | None = None,
    planned: Sequence[Fault] = (),
    fleet: Fleet | None = None,
) -> dict[str, Any]:
    """Plan, drive, write. Returns how the cell ended, for run.json; `watch` may end it before its time.

    `planned`: faults that are done meanwhile, timed from the start of the drive. `fleet`: drives it on other hosts.

    Raises BenchError where the disk is full or this machine gives no more sockets; what was measured by then is
    readable. SIGINT and SIGTERM, which cut a drive, may be deferred from its end on: `shards.hear_signals`, once the
    book has how it ended.
    """
    out, asked = cell.options.out, workers
    workers = sizing.crew(cell, asked)
    work = Plan(cell.requests, cell.due_ns, out / f"{cell.name}.spool", cell.next_payload)
    try:
        with disk_errors(out):
            _check_disk(out, cell)
            work.write(cell.first_payloads(live))
            live("")
            for line in sizing.announcement(cell, workers, asked):
                say(f"{cell.name}: {line}")
            facts = {**header, **_facts(cell, work, workers)}
            pages = cell.target.metrics or cell.options.metrics_url
            scraped = scrape.Asked(pages, cell.options.scrape_every_s, cell.options.gpu)
            done_at = faults.path_of(out, cell.name)
            with (
                scrape.beside(cell.target, scraped, scrape.path_of(out, cell.name), say),
                fault_doing.beside(cell.target, planned, done_at, say) as trouble,
            ):
                if workers == 1 and fleet is None:
                    end = drive(cell, work, facts, Part(cell.name), live, watch, trouble)
                else:
                    end = (fleet or _share)(Order(cell, work, facts, workers, say, live, watch, trouble))
            end |= fault_doing.ended(done_at, planned)
            return {"workers": workers, "ceiling": calibration.ceiling()} | end
    finally:
        work.close()


@contextmanager
def disk_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        if e.errno not in DISK_ERRORS:
            raise
        raise BenchError(f"{out}: {e.strerror}; {records.left(out)}") from None


def _check_disk(folder: Path, cell: Cell) -> None:
    """Refuse before writing: prompts at 6 bytes a token, records at 16 bytes a token and 1.5 kB a request."""
    need = RAW_TOTAL + sum(6 * r.tokens_in + 16 * (r.tokens_out or 256) + 1500 for r in cell.requests)
    free = shutil.disk_usage(folder).free
    if need > free:
        raise BenchError(
            f"{folder}: the plan and the records of {cell.name} need about {need / 1e9:.3f} GB, "
            f"{free / 1e9:.3f} GB are free; give --requests, or another --out"
        )


def _facts(cell: Cell, work: Plan, workers: int) -> dict[str, Any]:
    plan = {"hash": work.hash, "requests": len(work), **cell.sharing()}
    return {
        "cell": cell.name,
        "target": cell.target.public(),
        "probe": cell.found.public(),
        "load": cell.load_facts(),
        "plan": plan,
        "workers": workers,
        "anchor": list(clock.anchor()),
        "start_ns": clock.now_ns(),
    }


# ---- one process


def drive(
    cell: Cell,
    work: Plan,
    facts: Mapping[str, Any],
    part: Part,
    live: Say,
    watch: Watch | None,
    trouble: Trouble,
) -> dict[str, Any]:
    places = cell.load.concurrency or cell.load.max_in_flight
    need = -(-(places or len(work)) // part.workers)
    limits.raise_file_limit(need + limits.OTHER_FILES, strict=places is not None)
    writer = Writer(cell.options.out / f"{part.name}.arrow", dict(facts))
    gc.freeze()  # a collection over the whole plan would stop the loop for longer than a token takes
    thresholds = gc.get_threshold()
    gc.set_threshold(*COLLECTING)
    try:
        return wire.run(_loop(cell, work, writer, part, live, watch, trouble))
    finally:
        writer.close()
        gc.set_threshold(*thresholds)
        gc.unfreeze()


class _Refusals:
    """Connections refused in a row, none answered between. `patience_ns`: for so long a fault may be the cause."""

    def __init__(self, target: Target, patience_ns: int) -> None:
        self._target, self._patience_ns = target, patience_ns
        self._in_a_row = self._since_ns = 0

    def add(self, flight: Flight) -> bool:
        """Count it. Whether it was one too many, and the target, asked once more, does not answer."""
        refused = flight.tried is not None and flight.tried.exchange.ended == CONNECT_ERROR
        self._in_a_row = self._in_a_row + 1 if refused else 0
        if self._in_a_row == 1:
            self._since_ns = clock.now_ns()
        if self._in_a_row < GONE_AFTER or clock.now_ns() - self._since_ns < self._patience_ns:
            return False
        self._in_a_row = 0  # where it lives it is not asked again at each request
        return not targets.reachable(self._target)


def _senders(cell: Cell, urls: Sequence[str]) -> list[Sender]:
    return [
        transport.TRANSPORTS[cell.dialect.transport].open(
            transport.Asked(
                cell.target,
                url,
                cell.dialect,
                cell.found.model,
                cell.streamed,
                cell.options.timeouts,
                reuse=not cell.options.connect_per_request,
            )
        )
        for url in urls
    ]


def _in_turn(senders: Sequence[Sender], worker: int) -> Callable[[bytes, float | None], Awaitable[Exchange]]:
    """Sends by each of `senders` in turn."""
    first = worker % len(senders)  # else all workers would ask the same one at the same time
    turn = itertools.cycle([*enumerate(senders)][first:] + [*enumerate(senders)][:first])

    async def to_next(payload: bytes, cancel_after_s: float | None) -> Exchange:
        place, sender = next(turn)
        exchange = await sender.send(payload, cancel_after_s)
        exchange.url_index = place
        return exchange

    return to_next


class _Loop(Protocol):
    """A loop of `driver` with its load bound: what is left is shared with the tasks beside it."""

    def __call__(
        self, send: Send, done: Done, *, stop: asyncio.Event, gauge: Gauge, start_ns: int
    ) -> Awaitable[Drive]: ...


def _asked(cell: Cell, work: Plan, part: Part) -> _Loop:
    """The loop that the cell's load asks for."""
    options, load, board = cell.options, cell.load, part.board

    def note(row: int, due_ns: int) -> None:
        if board is not None:
            board.note(part.worker, row, due_ns)

    if load.concurrency is None:
        return partial(
            driver.open_loop,
            work,
            max_in_flight=load.max_in_flight,
            duration_s=options.duration_s,
            drain_s=options.drain_s,
            firsts=part.firsts(work.first),
            note=note,
            spin_ns=round(options.spin_us * 1e3),
        )
    shared = None if board is None else part.slots(board, part.worker, part.workers, work.first, load.concurrency)
    return partial(
        driver.closed_loop,
        work,
        concurrency=load.concurrency,
        warmup=sizing.warmup_requests(cell),
        ramp_s=sizing.ramp_s(cell),
        duration_s=options.duration_s,
        drain_s=options.drain_s,
        slots=shared,
        note=note,
    )


async def _loop(
    cell: Cell, work: Plan, writer: Writer, part: Part, live: Say, watch: Watch | None, trouble: Trouble
) -> dict[str, Any]:
    options, board = cell.options, part.board
    stop, stopped_by = asyncio.Event(), ""
    clerk, refusals = Clerk(cell, writer), _Refusals(cell.target, trouble.patience_ns)

    def halt(reason: str) -> None:
        nonlocal stopped_by
        stopped_by = stopped_by or reason
        stop.set()

    def done(flight: Flight) -> bool:
        if refusals.add(flight):
            halt("target gone")
        if work.next_turn[flight.index] >= 0:  # whether the conversation goes on depends on what the answer is
            return clerk.enter(flight)
        clerk.put(flight)
        return True

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, halt, "interrupted")
    senders = _senders(cell, trouble.urls or cell.target.urls)
    send = retry.retrying(_in_turn(senders, part.worker), options.retries, options.timeouts.total_s)
    gauge = Gauge()
    start_ns = await board.wait_for_start(part.worker, stop) if board is not None else clock.now_ns()
    trouble.begun(start_ns)
    ticker = Ticker(cell, gauge, writer, part, live)

    async def look(watch: Watch) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if reason := watch((clock.now_ns() - start_ns) / 1e9, gauge.now, gauge.ended):
                halt(reason)

    beside = [asyncio.create_task(task) for task in (ticker.run(), ticker.watch_the_loop(), clerk.run())]
    if watch is not None:
        beside.append(asyncio.create_task(look(watch)))
    for task in beside:
        task.add_done_callback(lambda _: stop.set())  # they end by failing only: a full disk, or our own mistake
    cpu_ns, begun_ns = time.process_time_ns(), clock.now_ns()
    try:
        drive = await _asked(cell, work, part)(send, done, stop=stop, gauge=gauge, start_ns=start_ns)
    finally:
        failed = [task for task in beside if task.done()]
        for task in beside:
            task.cancel()
        for sender in senders:
            sender.close()
        live("")
        shards.defer_signals()
        for task in failed:
            task.result()
        clerk.finish()
    ticker.tell()
    stamps = {sender.stamps for sender in senders}
    sent_ns, sent_cpu_ns = ticker.last_sent or (clock.now_ns(), time.process_time_ns())
    np.save(options.out / f"{part.name}.gauge.npy", gauge.steps())
    return {
        "reason": stopped_by or drive.reason,
        "start_ns": drive.start_ns,
        "window_open_ns": drive.window_open_ns,
        "window_close_ns": drive.window_close_ns,
        "turns_not_sent": drive.turns_not_sent,
        "cut": drive.cut,
        "peak_in_flight": gauge.peak,
        "client_cpu_s": (time.process_time_ns() - cpu_ns) / 1e9,
        "client_cpu_share": (sent_cpu_ns - cpu_ns) / max(sent_ns - begun_ns, 1),  # as long as it sent
        "loop_lag_p99_ms": float(np.percentile(ticker.late_ns, 99)) / 1e6 if ticker.late_ns else 0.0,
        "loop_stalls": ticker.stalls(),
        "stamps": "kernel" if stamps == {"kernel"} else "clock",
        "counts": dict(cell.counts),
    }


# ---- several


def _share(order: Order) -> dict[str, Any]:
    """The same drive in `workers` processes, each with records of its own."""
    cell, live, watch = order.cell, order.live, order.watch
    board = Board(order.workers, len(order.work))
    begun_s, halted = time.monotonic(), ""

    def body(number: int) -> dict[str, Any]:
        part = Part(f"{cell.name}.w{number}", number, order.workers, board)
        facts = {**order.facts, "worker": number}
        with disk_errors(cell.options.out):
            return drive(cell, order.work, facts, part, lambda text: None, None, order.trouble)

    def look() -> bool:
        nonlocal halted
        landed, in_flight, failed, tokens = (board.total(name) for name in ("landed", "in_flight", "failed", "tokens"))
        live(progress(cell, (landed, in_flight, failed, tokens), time.monotonic() - begun_s))
        if watch is not None and board.started and not halted:
            halted = watch((clock.now_ns() - board.start_ns) / 1e9, in_flight, landed)
        return bool(halted)

    outcomes = shards.run(order.workers, body, board, look)
    live("")
    return together(order, board, outcomes, halted)


def together(order: Order, board: Board, outcomes: Sequence[shards.Outcome], halted: str) -> dict[str, Any]:
    """How a cell ended, of how its workers did; what dead ones had begun becomes records. `halted`: why it was ended.

    Raises the BenchError of a worker that failed with one.
    """
    cell, say = order.cell, order.say
    ends = [o.end for o in outcomes if o.end is not None]
    reasons = [end["reason"] for end in ends] + ["interrupted"] * board.interrupted
    end: dict[str, Any] = {
        "reason": next((r for r in ("target gone", "interrupted", "duration") if r in reasons), "exhausted"),
        "start_ns": min((e["start_ns"] for e in ends), default=0),
        # Of a closed loop, whose slots are all workers': it opened once, and closed with the first slot of any.
        "window_open_ns": _first(e["window_open_ns"] for e in ends),
        "window_close_ns": _first(e["window_close_ns"] for e in ends),
        "worker_loop_lag_ms": [e["loop_lag_p99_ms"] for e in ends],
        "loop_lag_p99_ms": max((e["loop_lag_p99_ms"] for e in ends), default=0.0),
        "client_cpu_share": max((e["client_cpu_share"] for e in ends), default=0.0),  # of the busiest worker
        "loop_stalls": longest([stall for e in ends for stall in e["loop_stalls"]]),
        "stamps": "kernel" if all(e["stamps"] == "kernel" for e in ends) else "clock",
        "counts": {name: sum(e["counts"][name] for e in ends) for name in OUTCOMES},
    }
    end |= {name: sum(e[name] for e in ends) for name in ("turns_not_sent", "cut", "client_cpu_s")}
    dead = [o for o in outcomes if o.died]
    if dead:
        written, lost = _account_for(cell, order.facts, board, dead)
        for name, count in written.items():
            end["counts"][name] += count
        end["counts"]["cut_at_end"] += lost
        end["cut"] += lost
        for outcome in dead:
            say(f"{cell.name}: worker {outcome.worker} {outcome.died}")
        say(
            f"{cell.name}: {lost} request{'s' * (lost != 1)} that they had begun lost with them"
            if lost
            else f"{cell.name}: none lost"
        )
        if errors := [o.error for o in dead if o.error]:
            raise BenchError(errors[0])
        if not board.interrupted:
            end["reason"] = f"worker {dead[0].worker} {dead[0].died}"
    elif halted and not board.interrupted:
        end["reason"] = halted
    return end


def _first(stamps: Iterable[int]) -> int:
    return min((ns for ns in stamps if ns), default=0)


def _account_for(
    cell: Cell, facts: Mapping[str, Any], board: Board, dead: list[shards.Outcome]
) -> tuple[Counter[str], int]:
    """Records of what dead workers had begun and not written: cut, with the reason.

    Returns how many of each outcome they had written, and how many were lost.
    """
    now, lost, counts = clock.now_ns(), 0, Counter[str]()
    writer = Writer(cell.options.out / f"{cell.name}.lost.arrow", dict(facts))
    for outcome in dead:
        try:
            recorded = records.read(cell.options.out / f"{cell.name}.w{outcome.worker}.arrow")
        except BenchError:  # it had written none, or not even begun a file
            written = set[int]()
        else:
            written = set(recorded["index"].tolist())
            counts.update(recorded["outcome"].tolist())
        for row in np.flatnonzero(board.taken == outcome.worker + 1).tolist():
            if row in written:
                continue
            record = cell.record(Flight(row, int(board.due_ns[row]), 0, None))
            record.outcome, record.end_ns = "cut_at_end", now
            record.error = f"lost with worker {outcome.worker}, {outcome.died}"
            record.labels = ["lost with its worker"]
            writer.write(record)
            lost += 1
    writer.close()
    return counts, lost
