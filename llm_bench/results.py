"""Runs as read back from disk: every cell with its records, its window, its figures and the doubts about it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from llm_bench import (
    as_tools,
    energy,
    interference,
    metrics,
    objectives,
    outcomes,
    printable,
    records,
    scrape,
    shapes,
    windows,
)
from llm_bench.as_tools import Table
from llm_bench.client import CLIENT_LIMITED
from llm_bench.columns import Cell
from llm_bench.doubts import Doubt, doubts
from llm_bench.energy import Energy
from llm_bench.errors import BenchError
from llm_bench.facts import EITHER_WAY, NO_END, stopped
from llm_bench.identities import Little, counter_mismatch, little
from llm_bench.interference import Factor
from llm_bench.metrics import Value
from llm_bench.objectives import NO_SLO, Judged, Slo
from llm_bench.outcomes import Attempts, Failure
from llm_bench.records import OUTCOMES
from llm_bench.scrape import Scrape
from llm_bench.sending import Sending, in_flight, sending
from llm_bench.series import due_in, outcome_in
from llm_bench.server_metrics import Figures
from llm_bench.windows import Window

FORMAT = 1  # of run.json, as `book` writes it: counts up when what stands there changes its meaning
NEWER = "newer format"


@dataclass
class Measured:
    """One cell as read back: its records, its window, and what run.json says of how it ended."""

    name: str
    target: str
    load: str
    cell: Cell
    window: Window
    end: Mapping[str, Any]
    stored: Sequence[Doubt]  # what the run itself wrote down
    listed: bool = True  # False: run.json, which is there, does not know it
    scraped: Scrape | None = None  # what its server exported meanwhile

    @property
    def pair(self) -> int | None:
        """Which repeat of its target and load it is, from 0; None in a run that has each once."""
        pair = self.cell.header.get("pair")
        return None if pair is None else int(pair)

    @property
    def load_and_run(self) -> str:
        """Its load and, of several runs at it, which one it is: people count from 1."""
        return self.load if self.pair is None else f"{self.load}, run {self.pair + 1}"

    @property
    def run_id(self) -> str:
        """Of the run that wrote its records; "" where they do not say."""
        return str(self.cell.header.get("run_id") or "")


class Missing(NamedTuple):
    """A cell that was planned and cannot be read."""

    target: str
    load: str
    why: str

    @property
    def text(self) -> str:
        return f"{self.target} at {self.load}: {self.why}"


@dataclass
class Run:
    path: Path
    facts: Mapping[str, Any]  # run.json without its cells; {} where there is none
    cells: list[Measured]
    missing: list[Missing]

    def agreed(self, given: Slo = NO_SLO) -> Slo:
        """The SLO to judge it by: as given or, where limits or deadlines are not, as it was run with.

        Raises BenchError where what run.json holds is none.
        """
        settings = self.facts.get("settings") or {}
        try:
            own = objectives.parse(settings.get("slo") or "", settings.get("deadlines") or "")
        except BenchError as e:
            raise BenchError(f"{self.path / 'run.json'}: settings: {e}; give --slo") from None
        return given if given.limits else own._replace(deadlines=given.deadlines or own.deadlines)

    @cached_property
    def run_id(self) -> str:
        """As run.json has it; without one that of most cells; "" where no more than half of them agree."""
        if self.facts.get("run_id"):
            return str(self.facts["run_id"])
        said = Counter(m.run_id for m in self.cells)
        return next((name for name, count in said.items() if 2 * count > len(self.cells)), "")

    @property
    def own_doubts(self) -> list[Doubt]:
        """Of the run, beside those of its cells."""
        return [Doubt("missing cell", m.text) for m in self.missing]

    @cached_property
    def doubts(self) -> list[list[Doubt]]:
        """Of each cell, without regard to which metrics are asked for."""
        return [self.doubts_of(m, ()) for m in self.cells]

    def doubts_of(self, m: Measured, values: Sequence[Value]) -> list[Doubt]:
        siblings = [other.cell for other in self.cells if other is not m]
        fresh = self._newer() + self._foreign(m) + _counted(m) + doubts(m.cell, m.window, siblings, values, m.end)
        found = fresh + [d for d in m.stored if d.kind not in {f.kind for f in fresh}]
        clean = printable.clean
        return [d._replace(kind=clean(d.kind), text=clean(d.text), advice=clean(d.advice)) for d in found]

    def _newer(self) -> list[Doubt]:
        """Of a run that a later version wrote: what it holds in places that this one does not know is not read."""
        found = self.facts.get("llm_bench_run")
        if not isinstance(found, int) or found <= FORMAT:
            return []
        text = f"run.json is of format {found}, this version of llm-bench knows {FORMAT} and reads what it knows"
        return [Doubt(NEWER, text, EITHER_WAY, "Read it with the version that wrote it")]

    def _foreign(self, m: Measured) -> list[Doubt]:
        """Of a cell that the run did not measure, as far as its header and run.json tell."""
        why = [] if m.listed else ["run.json does not list it"]
        if m.run_id not in ("", self.run_id):
            whose = f"this one is {self.run_id}" if self.run_id else "the cells are of several"
            why.append(f"its records are of the run {m.run_id}, {whose}")
        advice = "Move away what was copied here"
        return [Doubt("foreign cell", "; ".join(why), EITHER_WAY, advice)] if why else []


class ClassSheet(NamedTuple):
    """What a report prints of the requests of one class."""

    values: list[Value]
    outcomes: dict[str, int]  # of those due in the window
    alone: list[Value] | None = None  # the same figures of this class measured alone, at the same times (--alone-too)
    factors: tuple[Factor, ...] = ()  # what the other classes did to it, where it was

    @property
    def interference(self) -> dict[str, float]:
        """Metric -> the figure in the mix over the figure alone."""
        return {f.name: f.value for f in self.factors if f.value is not None}


class Asked(NamedTuple):
    """What a report is asked to print: names of metrics (none: each run's default), against which SLO, as whom."""

    names: Sequence[str] = ()
    slo: Slo = NO_SLO
    tools: tuple[str, ...] = ()  # of as_tools.TOOLS: what they would have printed
    runs: bool = False  # each repeat of a cell alone, not only what they show together


class Sheet(NamedTuple):
    """All that any report prints of one cell."""

    measured: Measured
    values: list[Value]
    whole_run: list[Value]  # closed loops: the percentiles asked for, with the first wave and the drain
    outcomes: dict[str, int]  # of requests due in the window
    failures: list[Failure]  # of the whole cell
    attempts: Attempts | None  # of requests due in the window, where any of the cell was tried twice
    little: Little
    sending: Sending | None
    in_flight: str  # at the client and at the server, in words
    energy: Energy | None  # of this machine's GPUs, where they were read
    reconnected: tuple[int, int]  # attempted requests due in the window: those that reopened a connection, and all
    doubts: list[Doubt]
    judged: list[Judged]  # each limit of the SLO
    by_class: dict[str, ClassSheet]  # where the requests are of several
    as_tools: tuple[Table, ...] = ()  # of the tools asked for

    @property
    def client_limited(self) -> bool:
        return any(d.kind in CLIENT_LIMITED for d in self.doubts)


def sheets(run: Run, asked: Asked) -> list[Sheet]:
    return [_sheet(run, m, asked) for m in run.cells]


def _sheet(run: Run, m: Measured, asked: Asked) -> Sheet:
    cell, window, names = m.cell, m.window, asked.names
    values = metrics.compute_all(names, cell, window, asked.slo.context())
    percentiles = [n for n in names if metrics.parse(n).reducer in metrics.QUANTILES]
    first_wave = window.first_wave and window.state != windows.TOO_SHORT
    whole_run = metrics.compute_all(percentiles, cell, windows.whole(cell)) if first_wave else []
    due = due_in(cell, window)
    tried = due & windows.attempted(cell)
    law = little(cell, window)
    doubts_ = run.doubts_of(m, values)
    limited = any(d.kind in CLIENT_LIMITED for d in doubts_)
    return Sheet(
        measured=m,
        values=values,
        whole_run=whole_run,
        outcomes={o: int((due & outcome_in(cell, o)).sum()) for o in OUTCOMES},
        failures=[_printable(failure) for failure in outcomes.failures(cell)],
        attempts=outcomes.attempts(cell, due),
        little=law,
        sending=sending(cell, window),
        in_flight=in_flight(cell, law, _servers(m)) if cell.n else "",
        energy=energy.of(cell, window, m.scraped),
        reconnected=(int((tried & (cell["reconnects"] > 0)).sum()), int(tried.sum())),
        doubts=doubts_,
        judged=objectives.judge(cell, window, asked.slo, client_limited=limited),
        by_class=_by_class(run, m, asked),
        as_tools=as_tools.tables(cell, window, asked.tools),
    )


def _servers(m: Measured) -> list[Figures]:
    """What each replica exported in or around the window."""
    if m.scraped is None:
        return []
    of = m.scraped.figures(m.window.start_ns, m.window.end_ns)
    return [of[replica.name] for replica in m.scraped.replicas if replica.name in of]


def _printable(failure: Failure) -> Failure:
    """The text of an error is the server's own."""
    return failure._replace(kind=printable.clean(failure.kind), first_error=printable.clean(failure.first_error))


def _by_class(run: Run, m: Measured, asked: Asked) -> dict[str, ClassSheet]:
    cell, window = m.cell, m.window
    classes = sorted(set(cell["request_class"].tolist()))
    found = {}
    for name in classes if len(classes) > 1 else []:
        mine = objectives.of_class(cell, name)
        due = due_in(mine, window)
        counts = {o: int((due & outcome_in(mine, o)).sum()) for o in OUTCOMES}
        values = metrics.compute_all(asked.names, mine, window, asked.slo.context(name))
        own = next((other for other in run.cells if _place_of(other) == (*_place_of(m)[:3], name)), None)
        context = asked.slo.context(name)
        alone = None if own is None else metrics.compute_all(asked.names, own.cell, own.window, context)
        found[name] = ClassSheet(values, counts, alone, interference.factors(values, alone or []))
    return found


def _place_of(m: Measured) -> tuple[str, Any, Any, str]:
    """(target, pair, load, class measured alone) of a cell: what tells a class alone from its mix is the last."""
    load = dict(m.cell.header.get("load") or {})
    alone = load.pop("class_alone", "") or ""
    load.pop("label", None)
    return m.target, m.pair, load, alone


class Verdict(NamedTuple):
    """What an exit code is made of."""

    cells: list[tuple[str, int, float]]  # name, ok requests, error rate of the whole cell
    doubts: list[Doubt]
    client_limited: bool  # of any cell: this client, and not its target, decided the figures
    judged: list[Judged]  # every limit in every cell


def verdict(run: Run, slo: Slo = NO_SLO) -> Verdict:
    cells = []
    for m in run.cells:
        ok, failed = (int(outcome_in(m.cell, outcome).sum()) for outcome in ("ok", "failed"))
        cells.append((m.name, ok, failed / (ok + failed) if ok + failed else 0.0))
    found = [doubt for of_cell in (run.own_doubts, *run.doubts) for doubt in of_cell]
    limited = [any(d.kind in CLIENT_LIMITED for d in of_cell) for of_cell in run.doubts]
    judged = [
        j
        for m, client in zip(run.cells, limited, strict=True)
        for j in objectives.judge(m.cell, m.window, slo, client_limited=client)
    ]
    return Verdict(cells, found, any(limited), judged)


def load_run(path: Path) -> Run:
    """The run in folder `path`; without its run.json every record file found there.

    A cell whose files cannot be read is one that is missing, with the reason. What others wrote into run.json and the
    headers of records is made printable here; what they wrote into records where it is said.

    Raises BenchError where there is no such folder, no cell in it, or none that can be read.
    """
    if not path.is_dir():
        raise BenchError(f"{path}: no such run folder")
    book, facts = path / "run.json", {}
    if book.is_file():
        facts = shapes.parse(book.read_bytes(), shapes.RUN, str(book))
    told = facts.get("cells") is not None  # else it says nothing of which cells are its own
    entries = facts.pop("cells", None) or []
    listed = {_entry_name(entry, f"{book}: cells[{i}]"): printable.cleaned(entry) for i, entry in enumerate(entries)}
    facts = printable.cleaned(facts)
    files = records.files_of(path)
    if not files:
        raise BenchError(f"{path}: no run: no record file (*.arrow) in it")
    there = [name for name in listed if name in files] + [name for name in files if name not in listed]
    gone = [entry for name, entry in listed.items() if name not in files]
    lost = [Missing(*_place(e), f"{_which(e)}it was begun and left no records") for e in gone]
    cells, refused = [], []
    for name in there:
        try:
            cells.append(_measured(path, name, listed.get(name), name in listed or not told))
        except BenchError as e:
            refused.append((name, e))
    if refused and not cells:
        raise refused[0][1]
    unread = []
    for name, why in refused:
        entry = listed.get(name) or {"target": printable.clean(name)}
        unread.append(Missing(*_place(entry), printable.clean(f"{_which(entry)}it cannot be read: {why}")))
    return Run(path, facts, cells, lost + unread + _never_run(facts, list(listed.values())))


def _entry_name(entry: Mapping[str, Any], where: str) -> str:
    """A cell's name: as run.json has it, or that of the file it names."""
    name = entry.get("name") or str(entry.get("file") or "").removesuffix(".arrow")
    if not name:
        raise BenchError(f"{where}: expected the name or the file of a cell, found neither")
    return str(name)


def _place(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Target and load of a cell as run.json has it."""
    load = entry.get("load") or {}
    return str(entry.get("target", "?")), str(load.get("label") or _load_label(load))


def _which(entry: Mapping[str, Any]) -> str:
    """Of several cells of a target at a load."""
    pair = entry.get("pair")
    return "" if pair is None else f"run {pair + 1 if isinstance(pair, int) else pair} of it: "


def _never_run(facts: Mapping[str, Any], begun: Sequence[Mapping[str, Any]]) -> list[Missing]:
    """What the run had still before it when it ended: each target at each load, but for the cells that were begun."""
    repeat = ((facts.get("settings") or {}).get("rounds") or {}).get("repeat") or 1
    planned = Counter((str(t), str(load)) for t in facts.get("targets") or [] for load in facts.get("loads") or [])
    left = Counter({place: repeat * count for place, count in planned.items()}) - Counter(map(_place, begun))
    why = "not run when the run last wrote down where it was"
    for last in begun[-1:]:
        if cause := stopped((last.get("end") or {}).get("reason") or ""):
            why = f"not run, since {cause} ({' at '.join(_place(last))})"
    some = f"{{}} of {repeat} runs of it were " if repeat > 1 else ""
    return [Missing(target, load, some.format(count) + why) for (target, load), count in left.items()]


def _measured(folder: Path, name: str, entry: Mapping[str, Any] | None, listed: bool) -> Measured:
    """`entry`: what run.json says of it. An end that it never got is a reason too."""
    cell, ended = records.read_cell(folder, name), {} if entry is None else {"reason": NO_END}
    cell.header = printable.cleaned(cell.header)
    entry = entry or {}
    end = ended if entry.get("end") is None else entry["end"]
    try:
        window = windows.of(cell, end)
    except BenchError as e:
        raise BenchError(f"{folder / name}.arrow: {e}") from None
    load = cell.header["load"]
    stored = [Doubt(d["kind"], d["text"]) for d in entry.get("doubts") or []]
    label, target = str(load.get("label") or _load_label(load)), cell.header.get("target") or {}
    scraped = _scraped(scrape.path_of(folder, name))
    return Measured(name, str(target.get("name") or "?"), label, cell, window, end, stored, listed, scraped)


def _scraped(path: Path) -> Scrape | None:
    """None where nothing was scraped, or what was cannot be read: `diagnose` says why."""
    with suppress(BenchError):
        return scrape.read(path) if path.is_file() else None
    return None


def _counted(m: Measured) -> list[Doubt]:
    """The records' tokens against the server's own counter."""
    text = counter_mismatch(m.cell, [s.points for s in m.scraped.replicas]) if m.scraped else ""
    advice = "See who else asked this server, and whether its usage counts what it makes"
    return [Doubt("server counters", text, EITHER_WAY, advice)] if text else []


def _load_label(load: Mapping[str, Any]) -> str:
    for key, form in (("concurrency", "c={}"), ("rate", "rate={:g}/s"), ("speed", "replay x{:g}")):
        if load.get(key) is not None:
            return form.format(load[key])
    return str(load.get("kind", "?"))


def newest(runs: Path) -> Path:
    """The run folder that was written to last, of those with records. Raises BenchError where there is none."""
    found = [f for f in runs.glob("*/") if any(f.glob("*.arrow"))] if runs.is_dir() else []
    if not found:
        raise BenchError(f"{runs}: no run with records in it; give a run folder, or make one with `llm-bench run`")
    return max(found, key=lambda f: max(p.stat().st_mtime_ns for p in f.iterdir()))
