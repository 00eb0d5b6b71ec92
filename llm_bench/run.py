"""One run: targets x loads, each a cell. Reads the trace, probes the targets, measures cell after cell.

Everything that a cell measured is on disk before the next begins; `run.json` names the cells and how each ended.
"""

import hashlib
import signal
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llm_bench import plan, probe, prompts, targets, trace
from llm_bench.beside import Say
from llm_bench.book import Book
from llm_bench.cell import Cell, Options, cell_name
from llm_bench.errors import BenchError
from llm_bench.measure import measure
from llm_bench.plan import Load
from llm_bench.request import Trace
from llm_bench.targets import Target


@dataclass(frozen=True)
class Job:
    """A whole run: what is measured, with which trace, at which loads."""

    targets: Sequence[Target]
    loads: Sequence[Load]
    trace: Path
    format: str | None = None
    block_size: int | None = None
    skip_bad: int = 0
    workers: int = 1  # processes that share each cell; 0: as many as the load seems to need
    resume: bool = False  # finish the run in the folder


@dataclass(frozen=True)
class Ended:
    """How a run ended, for the exit code."""

    interrupted: bool = False
    gone: str = ""  # the target that no longer answers
    died: str = ""  # "worker 3 killed by signal 9"


def run(job: Job, options: Options, say: Say, live: Say) -> Ended:
    """Measure every cell; `say` prints a line that stays, `live` one that is overwritten.

    Raises BenchError, before any load is sent, when something asked for cannot be right, and KeyboardInterrupt for
    SIGINT or SIGTERM outside a cell. In a cell they cut it, and what it measured is written.
    """
    exact = {t.name: prompts.exact(t.tokenizer) for t in job.targets if t.tokenizer}
    rows = trace.read(
        job.trace,
        format=job.format,
        limit=None if options.loop_trace else options.requests,
        block_size=job.block_size,
        skip_bad=job.skip_bad,
    )
    if not rows.requests:
        raise BenchError(f"{job.trace}: no request is left to send")
    for note in [*rows.notes, *(f"{count} rows left out: {reason}" for reason, count in rows.skipped.items())]:
        say(f"trace: {note}")
    if any(load.concurrency for load in job.loads) and rows.requests[-1].at_s is not None:
        say("trace: a closed loop does not use its times; its order, lengths, prefixes and sessions are used")
    for load in job.loads:  # a trace without times fails here, not after the first cell
        plan.due_times(rows.requests, load, options.seed)
    if options.requests and not options.loop_trace and len(rows.requests) < options.requests:
        say(f"trace: it has {len(rows.requests)} requests, fewer than --requests {options.requests}: each is sent once")
    private = {target.name: target.headers for target in job.targets}
    with ExitStack() as stack:
        book = stack.enter_context(closing(Book(options.out, _asked(job, options, rows), private, resume=job.resume)))
        _stop_on_term()
        ready = []
        for declared in job.targets:
            target = stack.enter_context(targets.running(declared, say, options.out / f"{declared.name}.log"))
            found = probe.probe(target, say, options.ready_s, stream=options.stream, timeouts=options.timeouts)
            for note in found.notes:
                say(f"{target.name}: {note}")
            requests, effect = plan.fit_context(rows.requests, found.max_model_len, options.too_long)
            if effect:
                say(f"{target.name}: {effect}")
            ready.append((target, found, requests, effect))
        book.begin({target.name: _deciding(found) for target, found, _, _ in ready})
        cells = ((*facts, load) for facts in ready for load in job.loads)
        for number, (target, found, requests, effect, load) in enumerate(cells):
            name = cell_name(number, target, load)
            if book.is_done(name):
                say(f"{name}: done before")
                continue
            attempt = book.attempt(name)
            cell = Cell(options, book.run_id, number, target, found, requests, load, exact.get(target.name), attempt)
            book.begin_cell(name, {"target": target.name, "load": cell.load_facts()})
            end = measure(cell, book.header({"too_long": effect}), say, live, job.workers)
            _stop_on_term()
            book.end_cell(name, end)
            if end["turns_not_sent"]:
                say(f"{name}: {end['turns_not_sent']} later turns were not sent: a turn failed or was cut")
            if end["reason"] == "interrupted":
                return Ended(interrupted=True)
            if end["reason"] == "target gone":
                say(f"{target.name} no longer answers; what was measured is in {options.out}")
                return Ended(gone=target.name)
            if end["reason"].startswith("worker "):
                say(f"{end['reason']}; what was measured is in {options.out}, --resume measures the rest")
                return Ended(died=end["reason"])
            if end["cut"] or end["counts"]["cancelled"]:  # last: whoever interrupts a run does not wait for its target
                probe.settle(target, say)
    return Ended()


def _asked(job: Job, options: Options, rows: Trace) -> dict[str, Any]:
    trace_facts = {"path": rows.path, "format": rows.format, "notes": rows.notes}
    return {
        "settings": options.public(),
        "targets": [target.name for target in job.targets],
        "declared": [target.public() for target in job.targets],
        "loads": [load.label for load in job.loads],
        "trace": trace_facts | {"rows": len(rows.requests), "skipped": rows.skipped},
        "hashes": {
            "trace": _hash(repr(request).encode() for request in rows.requests),
            "tokenizers": {t.name: _hash([Path(t.tokenizer).read_bytes()]) for t in job.targets if t.tokenizer},
            "loads": _hash(repr(asdict(load)).encode() for load in job.loads),  # a label does not say everything
        },
    }


def _deciding(found: probe.Probe) -> dict[str, Any]:
    """What of a probe's findings decides the work, and is the same at every probe of the same server."""
    asks = found.ask._asdict() | {"extra": dict(found.ask.extra)}
    return {"model": found.model, "max_model_len": found.max_model_len, "ask": asks}


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _stop_on_term() -> None:
    """Outside a cell SIGTERM ends a run as Ctrl-C does. A cell's event loop has its own handlers, and leaves none."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
