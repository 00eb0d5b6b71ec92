"""One cell, driven from many hosts: the plan cut once, one start, records and figures fetched while it runs.

What carries questions to a host's agent (`host_agent`) is a Link: a process's pipes here, `ray_hosts` on a cluster. The
hosts share no memory: each is polled, ten times a second until the window is open and once a second from then on, never
a message a request. Its records come with the polls as whole batches, already on this host's clock, and are appended to
NAME.wK.arrow as they are: what was fetched is readable whatever happens next, and a host that is lost takes a second of
records with it.
"""

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from llm_bench import host_clock, host_part
from llm_bench.beside import progress
from llm_bench.cell import Cell
from llm_bench.clock import now_ns
from llm_bench.errors import BenchError
from llm_bench.fault_doing import Trouble
from llm_bench.host_link import LOST_S, SLOW_S, Hello, Host, Link, LostError
from llm_bench.measure import Fleet, disk_errors, together
from llm_bench.order import Order
from llm_bench.shards import BEFORE_START, STOPPING, TERM_S, TWICE_S, Board, Outcome
from llm_bench.sizing import cores_needed

POLL_S, SOON_S = 1.0, 0.1  # between polls; until the window is open
START_DELAY_NS = 500_000_000  # from the last host's being ready to the common start: all have heard of it by then
OPEN_DELAY_NS = 100_000_000


def fleet(links: Sequence[Link], hellos: Sequence[Hello]) -> Fleet:
    """Drives cells on these hosts, for `measure`: each a worker, in their order."""

    def driven(order: Order) -> dict[str, Any]:
        cell, workers = order.cell, order.workers
        refuse(cell, links[:workers], hellos[:workers], order.trouble)
        for line in unknown(hellos[:workers]):
            order.say(f"{cell.name}: {line}")
        hosts = [Host(number, link) for number, link in enumerate(links[:workers])]
        board = Board(workers, len(order.work))
        try:
            with disk_errors(cell.options.out):
                halted = _Drive(order, hosts, board).run()
        finally:
            for host in hosts:
                host.close()
        order.live("")
        end = together(order, board, [host.outcome for host in hosts if host.outcome], halted)
        return end | {"hosts": hosts_facts(hosts, hellos), "ceiling": mean_ceiling(hellos[:workers])}

    return driven


# ---- before the start


def refuse(cell: Cell, links: Sequence[Link], hellos: Sequence[Hello], trouble: Trouble) -> None:
    """Raises BenchError for what these hosts cannot do, before any load."""
    if trouble.urls:
        raise BenchError("--fault net:...: its proxy is on this machine alone, which other hosts cannot ask through")
    away = [link.name for link in links if not link.here]
    near = [url for url in cell.target.urls if any(f"//{name}" in url for name in ("127.", "localhost", "[::1]"))]
    if away and near:
        raise BenchError(f"{near[0]} is this machine's own; the host {away[0]} would ask itself: give its address")
    short = [h.name for h in hellos if (cell.load.concurrency or 0) / len(hellos) > min(h.files, h.ports)]
    if short:
        most = min(min(h.files, h.ports) for h in hellos) * len(hellos)
        raise BenchError(
            f"{short[0]} may open {most // len(hellos)} connections to one address (files and ports); "
            f"{cell.load.label} over {crew(len(hellos))} needs more: {most} slots in all, or more workers"
        )
    if cell.load.concurrency is None and (carried := ceiling_share(cell, hellos)) > 1:
        asked = f"{cell.load.rate:g}/s" if cell.load.rate else cell.load.label
        limit = f", {cell.load.rate / carried:.4g}/s" if cell.load.rate else ""
        known = f"what selfcheck found {crew(len(hellos))} to carry{limit}"
        raise BenchError(f"{asked} is {carried:.0%} of {known}; give more --workers")


def crew(workers: int) -> str:
    return f"{workers} worker{'s' * (workers != 1)}"


def ceiling_share(cell: Cell, hellos: Sequence[Hello]) -> float:
    """A load against the ceilings of hosts that were calibrated, 1: all that they carry. 0 where none was.

    Each worker has an equal part of the plan, so the sum that equals carry is as many times the least of them.
    """
    known = [h.ceiling for h in hellos if h.ceiling]
    return max((cores_needed(cell, ceiling) / len(hellos) for ceiling in known), default=0.0)


def unknown(hellos: Sequence[Hello]) -> list[str]:
    names = list(dict.fromkeys(h.name for h in hellos if not h.ceiling))
    return [f"what {', '.join(names)} can carry is not known: run `llm-bench selfcheck` there"] if names else []


def mean_ceiling(hellos: Sequence[Hello]) -> dict[str, float] | None:
    """Of a worker: as many of it as there are workers are what all carry. None where one was never calibrated."""
    known = [h.ceiling for h in hellos if h.ceiling]
    if len(known) < len(hellos):
        return None
    return {name: sum(c[name] for c in known) / len(known) for name in known[0]}


# ---- the drive


class _Drive:
    """One cell over hosts, from the cut to the last record."""

    def __init__(self, order: Order, hosts: Sequence[Host], board: Board) -> None:
        self.cell, self.work, self.facts, self.hosts, self.board = order.cell, order.work, order.facts, hosts, board
        self.live, self.watch, self.trouble = order.live, order.watch, order.trouble
        self.begun_s = time.monotonic()
        self.halted = ""
        self.told: list[float] = []  # when signals came
        self.deadline_s = float("inf")

    def run(self) -> str:
        """Until every host has an outcome. Returns why the cell was ended before its time, "" where it was not."""
        with _signals(lambda: self.told.append(time.monotonic())):
            self._each(self.hosts, self._prepare)
            while alive := self.alive:
                self.poll(alive)
                self.react()
                if self.alive and not any(host.more for host in self.alive):
                    self.pause(SOON_S if self.soon else POLL_S)
        for host in self.hosts:
            if not host.lost:
                self._each([host], self._leave)
        return self.halted

    @property
    def alive(self) -> list[Host]:
        return [host for host in self.hosts if host.outcome is None]

    @property
    def soon(self) -> bool:
        """Is the next poll waited for: a start, a window, an end that was asked for?"""
        opening = self.cell.load.concurrency is not None and not self.board.opened_ns
        return opening or not self.board.started or self.deadline_s < float("inf")

    def _each(self, hosts: Sequence[Host], do: Callable[[Host], None]) -> None:
        for host in hosts:
            if host.outcome is None or do == self._leave:
                try:
                    do(host)
                except LostError as e:
                    self.lose(host, str(e))
                except BenchError as e:
                    host.outcome = Outcome(host.number, None, "failed", str(e))

    def _prepare(self, host: Host) -> None:
        """Its clock, its part of the plan, its driver, which then waits for the start."""
        if self.told or len(self.alive) < len(self.hosts):
            host.outcome = Outcome(host.number, None, BEFORE_START)
            return
        self.live(f"{self.cell.name}: cutting the plan, worker {host.number} of {len(self.hosts)}")
        workers = len(self.hosts)
        job = host_part.cut(self.cell, self.work, self.facts, host.number, workers, self.trouble.patience_ns)
        host.call("begin", SLOW_S, job=job)
        for piece in host_part.pieces(self.work, job):
            host.call("spool", SLOW_S, piece=piece)
        host.clock = host.read_clock()
        host.readings.clear()
        host.call("go", SLOW_S, offset_ns=host.clock.offset_ns, error_ns=host.clock.error_ns)
        host.readings.clear()  # while it forked

    def _leave(self, host: Host) -> None:
        host.after = host.read_clock()
        host.call("leave", SLOW_S)

    def poll(self, hosts: Sequence[Host]) -> None:
        """Ask all, then hear each: one that is slow keeps nobody from being asked."""
        for host in hosts:
            host.ask("poll")
        until_s = time.monotonic() + LOST_S
        for host in hosts:
            try:
                self.take(host, host.hear(max(until_s - time.monotonic(), 0.2)))
            except LostError as e:
                self.lose(host, str(e))

    def take(self, host: Host, news: Mapping[str, Any]) -> None:
        board, name = self.board, f"{self.cell.name}.w{host.number}"
        board.counters[host.number] = news["counters"]
        board.due_ns[news["rows"]] = news["due_ns"]
        board.taken[news["rows"]] = host.number + 1
        if news["records"]:
            host.keep(news["records"], self.cell.options.out / f"{name}.arrow")
        host.more = news["more"]
        host.outcome = news.get("outcome")
        if news.get("gauge") is not None:
            np.save(self.cell.options.out / f"{name}.gauge.npy", news["gauge"])

    def lose(self, host: Host, why: str) -> None:
        """What a lost host of an open loop was to send since it was last heard of counts as begun by it.

        Of a closed loop, and of later turns, nobody knows what it began in its last second.
        """
        host.lose(why)
        if self.cell.load.concurrency is not None or not self.board.started:
            return
        now = now_ns()
        for row in self.work.first[host.number :: len(self.hosts)]:
            due_ns = self.board.start_ns + self.work.due_ns[row]
            if due_ns <= now and not self.board.taken[row]:
                self.board.note(host.number, row, due_ns)

    def react(self) -> None:
        """What the parent does about what it has heard: start, open, end."""
        board = self.board
        figures = tuple(board.total(name) for name in ("landed", "in_flight", "failed", "tokens"))
        self.live(
            progress(self.cell, (figures[0], figures[1], figures[2], figures[3]), time.monotonic() - self.begun_s)
        )
        if self.told:
            self.stop(interrupted=True)
        if any(host.outcome is not None and host.outcome.died for host in self.hosts):
            self.stop(interrupted=False)
        if len(self.told) > 1 or time.monotonic() > self.deadline_s:
            self.tell("kill", lambda host: {})
        if self.deadline_s < float("inf"):
            return
        if not board.started and board.total("ready") == len(self.hosts):
            at_ns = now_ns() + START_DELAY_NS
            board.start(at_ns)
            self.trouble.begun(at_ns)
            self.tell("start", lambda host: {"at_ns": at_ns + host.clock.offset_ns})
        elif self.opens():
            board.opened_ns = now_ns() + OPEN_DELAY_NS
            self.tell("open", lambda host: {"at_ns": board.opened_ns + host.clock.offset_ns})
        if self.watch is not None and board.started and not self.halted:
            self.halted = self.watch((now_ns() - board.start_ns) / 1e9, figures[1], figures[0])
            if self.halted:
                self.stop(interrupted=False)

    def opens(self) -> bool:
        """Are all slots of all hosts warm, and none yet empty?"""
        if self.cell.load.concurrency is None or self.board.opened_ns or len(self.alive) < len(self.hosts):
            return False
        return self.board.total("warm") == len(self.hosts)

    def stop(self, interrupted: bool) -> None:
        if self.deadline_s < float("inf"):
            return
        self.deadline_s = time.monotonic() + TERM_S
        self.board.stop(interrupted)
        self.tell("stop", lambda host: {"interrupted": interrupted})

    def tell(self, what: str, arguments: Callable[[Host], dict[str, Any]]) -> None:
        for host in self.alive:
            host.ask(what, **arguments(host))
        for host in self.alive:
            try:
                host.hear(LOST_S)
            except LostError as e:
                self.lose(host, str(e))

    def pause(self, seconds: float) -> None:
        """Less, where a signal came."""
        until_s, told = time.monotonic() + seconds, len(self.told)
        while len(self.told) == told and time.monotonic() < until_s:
            time.sleep(min(SOON_S, max(until_s - time.monotonic(), 0)))


@contextmanager
def _signals(told: Callable[[], None]) -> Iterator[None]:
    """SIGINT and SIGTERM are noted, each once, as `shards.run` takes them."""
    last_s = -TWICE_S

    def note(number: int, frame: object) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > TWICE_S:
            last_s = time.monotonic()
            told()

    before = {number: signal.signal(number, note) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- afterwards


def hosts_facts(hosts: Sequence[Host], hellos: Sequence[Hello]) -> list[dict[str, Any]]:
    """For run.json: each worker's host, its clock, how late and how busy it was."""
    found = []
    for host, hello in zip(hosts, hellos, strict=False):
        seen = host_clock.clock(host.clock, host.readings, host.after)
        end = (host.outcome.end if host.outcome else None) or {}
        facts: dict[str, Any] = {"worker": host.number, "name": hello.name, **seen._asdict()}
        facts |= {name: end.get(name) for name in ("loop_lag_p99_ms", "client_cpu_share")}
        found.append(facts | {"calibrated": hello.ceiling is not None, "lost": host.lost})
    return found
