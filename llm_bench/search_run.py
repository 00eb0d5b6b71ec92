"""Drives a search: each probe is a cell of one run, measured and judged as any; what it says decides the next.

The run's folder is the search's state: taken up again, it goes on from what the cells on disk say.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

from llm_bench import arms, doubts, objectives, plan, probe, records, run, scrape_machine, search, shards, windows
from llm_bench.beside import Say
from llm_bench.book import Book
from llm_bench.cell import Cell, Options, seconds_alone
from llm_bench.client import CLIENT_LIMITED
from llm_bench.errors import BenchError, TargetError
from llm_bench.objectives import Slo
from llm_bench.plan import Load
from llm_bench.printable import counted
from llm_bench.request import Request
from llm_bench.run import Arm, Ended, Job
from llm_bench.search import Answer, By, Plan, Probe, Result
from llm_bench.search_backlog import Backlog
from llm_bench.search_evidence import Seen, seen
from llm_bench.search_report import so_far

RECOVERED, RECOVERED_MS = 1.5, 20.0  # times what a request took alone at first, and ms more: the server is idle again
_ARRIVALS = {"--by": "kind", "--burstiness or --constant": "burstiness", "--max-in-flight": "max_in_flight"}
RECOVERIES = 5


@dataclass(frozen=True)
class Search:
    """What is looked for. `start` None: the model's guess."""

    by: By
    agreed: Slo  # its last `guards` limits were not asked for
    guards: int
    budget_s: float
    start: float | None = None
    least: float = 1.0
    most: float = 1024.0
    tolerance: float = 0.05
    requests: int | None = None  # of a load's first cell
    burstiness: float | None = 1.0  # of the arrivals, by rate
    max_in_flight: int | None = None


def guarded(text: str, deadlines: str = "") -> tuple[Slo, int]:
    """An SLO as typed, and how many limits were added to it: the error rate has one in every search.

    Raises BenchError for an SLO that no load can be judged by.
    """
    typed = objectives.parse(text, deadlines)
    if not typed.limits:
        raise BenchError("--slo: a search needs a limit, such as ttft_p95<800ms")
    if any(limit.metric.name == "error_rate" and not limit.of_class for limit in typed.limits):
        return typed, 0
    return typed._replace(limits=(*typed.limits, *objectives.parse(search.GUARD).limits)), 1


def find(job: Job, options: Options, asked: Search, say: Say, live: Say) -> tuple[list[Result], Ended]:
    """Search each target, one after the other, each with the whole budget. `job.loads` is not used.

    Returns what was found, and how it ended; an interrupt, and a target that is gone, end it with the bracket so far.
    Raises BenchError where what is asked for cannot be right, or where the budget is too small for a first cell, and
    KeyboardInterrupt for SIGINT or SIGTERM before it has begun.
    """
    options = replace(options, slo=asked.agreed.text, loop_trace=True, requests=None, duration_s=None)
    if options.gpu:
        scrape_machine.gpu_reader()  # refused now, not at the first cell
    rows, exact = run.read(job, options, say)
    private = {target.name: target.headers for target in job.targets}
    results: list[Result] = []
    with ExitStack() as stack:
        facts = run.asked(job, options, rows, [])
        book = stack.enter_context(closing(Book(options.out, facts, private, resume=job.resume)))
        shards.hear_signals()
        ready = [run.begin(t, options, rows, exact.get(t.name), say, stack) for t in job.targets]
        ready = run.sized_alike(ready, say)
        book.begin({arm.target.name: run.deciding(arm.found) for arm in ready})
        searched = [_Searched(job, options, asked, arm, book) for arm in ready]
        for target in searched:  # all before the first cell: no answer is lost to the next target's refusal
            target.check_begun()
        for target in searched:
            result, ended = target.run(say, live)
            results.append(result)
            if ended != Ended():
                return results, ended
    return results, Ended()


class _Searched:
    """One target, and what is known of it."""

    def __init__(self, job: Job, options: Options, asked: Search, arm: Arm, book: Book) -> None:
        self._job, self._options, self._asked, self._arm, self._book = job, options, asked, arm, book
        self.plan = _plan(asked, seconds_alone(arm.requests, arm.found))
        cells = [c for c in book.facts["cells"] if c["target"] == arm.target.name and book.is_done(c["name"])]
        cells.sort(key=lambda c: int(c["end"].get("place", 0)))
        for c in cells:
            self._check_arrivals(c["name"], c["load"])
        self.seen = [self._said(c["name"], c["end"]) for c in cells]

    def _check_arrivals(self, name: str, had: dict[str, Any]) -> None:
        """Raises BenchError for a cell of other arrivals, which is no evidence of a load of this search."""
        asked = self._load(1)
        for option, key in _ARRIVALS.items():
            if had[key] != (now := getattr(asked, key)):
                raise BenchError(
                    f"--resume: {option} has changed ({key} from {had[key]} to {now}) since {name} was measured in "
                    f"{self._options.out}; ask for the same, or give a new --out"
                )

    def check_begun(self) -> None:
        """Raises BenchError where nothing was measured yet and the budget is too small for a first cell."""
        step = search.step(self.plan, self.seen, self._spent_s())
        if isinstance(step, Answer) and not self.seen and step.asks:
            first = step.asks[0]
            raise BenchError(
                f"{self._arm.target.name}: --budget {self.plan.budget_s:g} s: the first cell, {first.requests:,} "
                f"requests at {self.plan.label(first.load)}, would take about {first.seconds:.0f} s; give more, or "
                "another --start"
            )

    def run(self, say: Say, live: Say) -> tuple[Result, Ended]:
        name = self._arm.target.name
        if self.seen:
            say(f"{name}: {counted(len(self.seen), 'cell')} measured before: {so_far(self._answer(), self.plan)}")
        while True:
            step = search.step(self.plan, self.seen, self._spent_s())
            if isinstance(step, Answer):
                return Result(name, self.plan, step), Ended()
            try:
                ended = self._measure(step, say, live)
            except KeyboardInterrupt:  # between cells; in one it is cut, and says so
                ended = Ended(interrupted=True)
            if ended.interrupted:
                return Result(name, self.plan, self._answer("interrupted")), ended
            if ended != Ended():
                return Result(name, self.plan, self._answer("target gone" if ended.gone else "undecided")), ended

    def _measure(self, asked: Probe, say: Say, live: Say) -> Ended:
        """Measure one cell, and hear what it says."""
        book, arm, begun_s = self._book, self._arm, time.monotonic()
        number = len(book.facts["cells"]) + len(book.facts.get("set_aside") or [])  # never one that was used before
        load = self._load(asked.load)
        cell = Cell(
            replace(self._options, requests=asked.requests, seed=arms.arrivals_seed(self._options.seed, number)),
            book.run_id,
            number,
            arm.target,
            arm.found,
            rotated(arm.requests, sum(s.requests for s in self.seen if s.load == asked.load)),
            load,
            arm.exact,
        )
        takes = f", about {asked.seconds:.0f} s" if asked.seconds else ""
        bracket = so_far(self._answer(), self.plan)
        say(f"{cell.name}: {asked.requests:,} requests{takes}: {asked.why}; so far: {bracket}")

        def shown(text: str) -> None:
            spent = f"{self._spent_s() + time.monotonic() - begun_s:.0f} of {self.plan.budget_s:.0f} s"
            live(f"[{bracket}; {spent}] {text}" if text else "")

        watch = None
        if load.rate is not None and (cell.due_ns != plan.NEVER).all():  # when later turns are due, none can know
            watch = Backlog(cell.due_ns, load.max_in_flight)
        gone = ""
        end = run.one(cell, arm, book, say, shown, self._job.workers, watch)
        end |= {"took_s": time.monotonic() - begun_s, "place": len(self.seen)}
        book.end_cell(cell.name, end)
        shards.hear_signals()
        if end["reason"] not in ("interrupted", "target gone") and not end["reason"].startswith("worker "):
            run.settle(end, arm.target, say)
            if end["cut"]:
                try:
                    self._recover(say)
                except TargetError as e:  # what the cell measured stands; the next search step would meet nobody
                    say(str(e))
                    gone = arm.target.name
            end["took_s"] = time.monotonic() - begun_s  # of the budget: what the target needed to recover too
            book.end_cell(cell.name, end)
        if end["reason"] == "interrupted":
            return Ended(interrupted=True)
        if end["reason"] == "target gone":
            say(f"{arm.target.name} no longer answers; what was measured is in {self._options.out}")
            return Ended(gone=arm.target.name)
        if end["reason"].startswith("worker "):
            return Ended(died=end["reason"])
        self.seen.append(self._said(cell.name, end))
        point = next(p for p in search.points(self.plan, self.seen) if p.load == asked.load)
        say(f"{cell.name}: {point.verdict}: {point.why}")
        return Ended(gone=gone)

    def _recover(self, say: Say) -> None:
        """Wait until a target that was overloaded answers one request as fast as at first.

        Many servers work on for clients that have left: what they hold would fail every lower load too. A probe waits
        behind it, so that it ends when that has. Raises TargetError.
        """
        options, first_ms = self._options, self._arm.found.alone_ms
        for _ in range(RECOVERIES):
            found = probe.probe(
                self._arm.target, lambda _: None, options.ready_s, stream=options.stream, timeouts=options.timeouts
            )
            if found.alone_ms <= RECOVERED * first_ms + RECOVERED_MS:
                return
        say(f"{self._arm.target.name}: one request alone takes {found.alone_ms:.0f} ms, at first {first_ms:.0f}")

    def _load(self, load: float) -> Load:
        if self._asked.by == "concurrency":
            return Load(concurrency=round(load))
        return Load(rate=load, burstiness=self._asked.burstiness, max_in_flight=self._asked.max_in_flight)

    def _said(self, name: str, end: dict[str, Any]) -> Seen:
        cell = records.read_cell(self._options.out, name)
        window = windows.of(cell, end)
        limited = any(d.kind in CLIENT_LIMITED for d in doubts.doubts(cell, window, (), (), end))
        load = cell.header["load"]
        return seen(
            name,
            float(load["concurrency"] if self._asked.by == "concurrency" else load["rate"]),
            cell,
            window,
            self._asked.agreed,
            reason=end["reason"],
            seconds=float(end["took_s"]),
            client_limited=limited,
        )

    def _spent_s(self) -> float:
        return sum(s.seconds for s in self.seen)

    def _answer(self, end: search.End = "undecided") -> Answer:
        return search.summary(self.plan, search.points(self.plan, self.seen), self._spent_s(), end)


def _plan(asked: Search, alone_s: float) -> Plan:
    """By rate a search starts where one request follows the other, as the probe saw them alone; by slots at one."""
    guess = 1.0 if asked.by == "concurrency" else float(f"{1 / max(alone_s, 1e-6):.2g}")
    start = guess if asked.start is None else asked.start
    return Plan(
        asked.by,
        asked.agreed.limits,
        asked.guards,
        min(max(start, asked.least), asked.most),
        asked.least,
        asked.most,
        asked.tolerance,
        asked.budget_s,
        asked.requests,
        alone_s,
    )


def rotated(requests: Sequence[Request], by: int) -> list[Request]:
    """The conversations after the first `by` rows, then the others: cells of one load go on where the last one ended.

    No conversation is torn: one that began before the place comes whole at the end.
    """
    by %= len(requests)
    earlier = {r.session for r in requests[:by] if r.session}
    behind = [i < by or r.session in earlier for i, r in enumerate(requests)]
    later = [r for r, waits in zip(requests, behind, strict=True) if not waits]
    return later + [r for r, waits in zip(requests, behind, strict=True) if waits]
