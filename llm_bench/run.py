"""One run: targets x loads, each a cell. Reads the trace, probes the targets, measures cell after cell.

Everything that a cell measured is on disk before the next begins; `run.json` names the cells and how each ended.
"""

import json
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_bench import __version__, clock, plan, probe, prompts, targets, trace
from llm_bench.cell import Cell, Options
from llm_bench.errors import BenchError
from llm_bench.host import host
from llm_bench.measure import Say, measure
from llm_bench.plan import Load
from llm_bench.records import DISK_ERRORS
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
    workers: int = 1  # processes that share each cell


@dataclass(frozen=True)
class Ended:
    """How a run ended, for the exit code."""

    interrupted: bool = False
    gone: str = ""  # the target that no longer answers


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
    _make_folder(options.out)
    book = Book(job, options, rows)
    with ExitStack() as stack:
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
        for target, found, requests, effect in ready:
            for load in job.loads:
                number = len(book.facts["cells"])
                cell = Cell(options, book.run_id, number, target, found, requests, load, exact.get(target.name))
                book.begin_cell(cell.name, {"target": target.name, "load": cell.load_facts()})
                end = measure(cell, book.header({"too_long": effect}), say, live, job.workers)
                _stop_on_term()
                book.end_cell(cell.name, end)
                if end["turns_not_sent"]:
                    say(f"{cell.name}: {end['turns_not_sent']} later turns were not sent: a turn failed or was cut")
                if end["reason"] == "interrupted":
                    return Ended(interrupted=True)
                if end["reason"] == "target gone":
                    say(f"{target.name} no longer answers; what was measured is in {options.out}")
                    return Ended(gone=target.name)
    return Ended()


def _stop_on_term() -> None:
    """Outside a cell SIGTERM ends a run as Ctrl-C does. A cell's event loop has its own handlers, and leaves none."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise BenchError(f"--out {out}: the folder is not empty; give a new name, nothing is overwritten")
    except OSError as e:
        raise BenchError(f"--out {out}: {e.strerror}") from None


class Book:
    """run.json: what was asked, on what machine, how each cell ended. Written anew, atomically, after each cell."""

    def __init__(self, job: Job, options: Options, rows: Trace) -> None:
        self.path = options.out / "run.json"
        self.run_id = secrets.token_hex(4)
        self.facts: dict[str, Any] = {
            "llm_bench_run": 1,
            "run_id": self.run_id,
            "version": __version__,
            "command": sys.argv[1:],
            "anchor": list(clock.anchor()),
            "host": host(),
            "settings": options.public(),
            "targets": [target.name for target in job.targets],
            "loads": [load.label for load in job.loads],
            "trace": {"path": rows.path, "format": rows.format, "notes": rows.notes}
            | {"rows": len(rows.requests), "skipped": rows.skipped},
            "cells": [],
        }
        self.save()

    def header(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What a record file says of the run, so that it can be read alone."""
        facts = {key: value for key, value in self.facts.items() if key != "cells"}
        return facts | {"settings": {**facts["settings"], **settings}}

    def begin_cell(self, name: str, facts: Mapping[str, Any]) -> None:
        self.facts["cells"].append({"name": name, "file": f"{name}.arrow", **facts})
        self.save()

    def end_cell(self, name: str, end: Mapping[str, Any]) -> None:
        next(c for c in self.facts["cells"] if c["name"] == name)["end"] = end
        self.save()

    def save(self) -> None:
        part = self.path.with_suffix(".part")
        try:
            part.write_text(json.dumps(self.facts, indent=1, allow_nan=False) + "\n")
            part.replace(self.path)
        except ValueError as e:
            raise BenchError(f"{self.path}: the settings cannot be stored: {e}") from None
        except OSError as e:
            if e.errno not in DISK_ERRORS:
                raise
            raise BenchError(f"{self.path}: {e.strerror}; what was measured before is readable there") from None
