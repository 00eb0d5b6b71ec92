"""Which cells are a pair, in one run or in two, and whether they did the same work."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from llm_bench import same_work
from llm_bench.columns import Cell
from llm_bench.doubts import Doubt
from llm_bench.errors import BenchError
from llm_bench.gate import MISSING, NOT_INTERLEAVED, OTHER_WORK, Objection, Pair, Side
from llm_bench.results import Measured, Run

# Settings that change nothing of what is sent; the seed is a fact of its own.
NO_WORK = ("out", "ready_s", "seed", "slo", "deadlines", "rounds")

MOST_LEADS = 0.75  # of the pairs may have the same arm first: of five that take turns it is three


class Arm(NamedTuple):
    """The cells of one target of one run. `name`: as reports say it."""

    name: str
    run: Run
    cells: Sequence[Measured]

    def at(self, load: str) -> dict[int, Measured]:
        """By the number of the pair."""
        return {number_of(m): m for m in self.cells if m.load == load}

    def doubts(self, m: Measured) -> Sequence[Doubt]:
        return next(d for other, d in zip(self.run.cells, self.run.doubts, strict=True) if other.name == m.name)

    @property
    def loads(self) -> list[str]:
        return list(dict.fromkeys(m.load for m in self.cells))


class Paired(NamedTuple):
    pairs: list[Pair]
    objections: list[Objection]
    interleaved: bool


def number_of(m: Measured) -> int:
    """Of a cell's pair; one that was measured once is the first."""
    return m.pair or 0


def arm(run: Run, target: str, name: str = "") -> Arm:
    """Raises BenchError where the run has no such target, or two of its cells have one place."""
    cells = [m for m in run.cells if m.target == target]
    if not cells:
        known = ", ".join(dict.fromkeys(m.target for m in run.cells))
        raise BenchError(f"{run.path}: no target {target!r} in it, expected one of {known}")
    for (load, number), count in Counter((m.load, number_of(m)) for m in cells).items():
        if count > 1:
            raise BenchError(f"{run.path}: {target} has {count} cells at {load} that are pair {number}, expected one")
    return Arm(name or target, run, cells)


def only_arm(run: Run) -> Arm:
    """Of a stored run, which has one target. Raises BenchError where it has several."""
    targets = list(dict.fromkeys(m.target for m in run.cells))
    if len(targets) > 1:
        raise BenchError(f"{run.path}: {len(targets)} targets ({', '.join(targets)}), expected a run of one")
    return arm(run, targets[0], run.path.name)


def halves(whole: Arm) -> tuple[Arm, Arm]:
    """One arm as two, for a gate on itself: two neighbouring repeats are a pair, taken in turn from either side.

    Raises BenchError where nothing was repeated.
    """
    sides: tuple[list[Measured], list[Measured]] = ([], [])
    for load in whole.loads:
        of_load = [m for _, m in sorted(whole.at(load).items())]
        for k, m in enumerate(of_load[: len(of_load) // 2 * 2]):
            pair, order = divmod(k, 2)
            header = {**m.cell.header, "pair": pair, "order": order}
            sides[order ^ (pair % 2)].append(replace(m, cell=replace(m.cell, header=header)))
    if not sides[0]:
        raise BenchError(
            f"{whole.run.path}: {whole.name} was measured once; expected two targets, or --repeat 2 or more"
        )
    return Arm(f"{whole.name}/1", whole.run, sides[0]), Arm(f"{whole.name}/2", whole.run, sides[1])


def pair_up(baseline: Arm, candidate: Arm) -> Paired:
    """The pairs of two arms by load and number, with every doubt about their cells, their work and their order."""
    found, objections = [], _missing(baseline) + _missing(candidate)
    first: list[bool | None] = []  # was the baseline? None: not known to be one after the other
    for load in dict.fromkeys([*baseline.loads, *candidate.loads]):
        mine, theirs = baseline.at(load), candidate.at(load)
        for number in sorted({*mine, *theirs}):
            if number not in mine or number not in theirs:
                lacks = candidate if number in mine else baseline
                objections.append(Objection(load, lacks.name, MISSING, f"it has no pair {number}"))
                continue
            a, b = mine[number], theirs[number]
            found.append(Pair(load, number, Side(a.cell, a.window), Side(b.cell, b.window)))
            said = [(f"{of.name}, pair {number}", d) for of, m in ((baseline, a), (candidate, b)) for d in of.doubts(m)]
            said += [(f"pair {number}", d) for d in differences(baseline, a, candidate, b)]
            objections += [Objection(load, where, d.kind, d.text) for where, d in said]
            ours, other = (m.cell.header.get("order") for m in (a, b))
            known = baseline.run is candidate.run and ours is not None and other is not None
            first.append(ours < other if known else None)  # type: ignore[operator]
    apart = _apart(baseline, candidate, first)
    return Paired(found, objections + apart, not apart)


def _missing(of: Arm) -> list[Objection]:
    mine = [m for m in of.run.missing if m.target == of.cells[0].target]
    return [Objection(m.load, of.name, MISSING, m.why) for m in mine]


def _apart(baseline: Arm, candidate: Arm, first: Sequence[bool | None]) -> list[Objection]:
    """Why the arms did not take turns: [] where they did."""
    who = f"{baseline.name}, {candidate.name}"
    if None in first:
        where = "one run" if baseline.run is candidate.run else "two runs"
        text = f"measured apart, in {where}: what changed on the machine in between looks like a change of the target"
        machines = [_machine(of.run.facts) for of in (baseline, candidate)]
        if all(machines) and machines[0] != machines[1]:
            text += f"; and on two machines: {machines[0]}; {machines[1]}"
        return [Objection("", who, NOT_INTERLEAVED, text)]
    leads = max(sum(map(bool, first)), len(first) - sum(map(bool, first)))
    if leads <= MOST_LEADS * len(first):
        return []
    text = f"one came before the other in {leads} of {len(first)} pairs: who comes second may meet another machine"
    return [Objection("", who, NOT_INTERLEAVED, text)]


# ---- the same work?


IDENTITY = ("model", "revision", "precision", "tokenizer")
PLANNED = {"planned_in": "prompt lengths planned", "asked_out": "answer lengths asked"}
# Checks of same_work -> the kind of doubt; others are about who answers: "targets differ".
KINDS = dict.fromkeys(("prompt tokens", "delivered tokens", "finish reasons"), OTHER_WORK)
KINDS |= {"network path": "network path"}


def facts(run: Run, m: Measured) -> dict[str, str]:
    """What a cell was asked to do, and of whom, in words; "" where it does not say."""
    header = m.cell.header
    target, probe, settings = (_section(header, name) for name in ("target", "probe", "settings"))
    trace = _section(run.facts, "hashes").get("trace") or _section(header, "trace").get("path")
    said = {"trace": trace, "seed": settings.get("seed"), "work": header.get("work_hash")}
    said |= {name: target.get(name) for name in IDENTITY} | {"model": probe.get("model") or target.get("model")}
    said["llm-bench"] = header.get("version")
    return {name: "" if value is None else str(value) for name, value in said.items()}


def differing(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Names of facts in which two cells differ; what only one of them says is no difference.

    A hash is of what this version writes down, so that another version's says nothing; nor is a version other work.
    """
    of_version = ("trace", "work") if mine["llm-bench"] != theirs["llm-bench"] else ()
    return [
        name
        for name in mine
        if mine[name] and theirs[name] and mine[name] != theirs[name] and name not in ("llm-bench", *of_version)
    ]


def differences(baseline: Arm, a: Measured, candidate: Arm, b: Measured) -> list[Doubt]:
    """In what the work of two cells of a pair differs, as doubts."""
    mine, theirs = facts(baseline.run, a), facts(candidate.run, b)
    work = [f"{name} {mine[name]} and {theirs[name]}" for name in differing(mine, theirs) if name not in IDENTITY]
    ours, other = (_section(m.cell.header, "settings") for m in (a, b))
    changed = [k for k in ours if k in other and ours[k] != other[k] and k not in NO_WORK]
    work += [f"settings.{k} {ours[k]!r} and {other[k]!r}" for k in changed] + _planned(a.cell, b.cell)
    said: dict[str, list[str]] = {OTHER_WORK: work}
    for check, text in same_work.differences(
        same_work.Side(baseline.name, a.cell), same_work.Side(candidate.name, b.cell)
    ):
        said.setdefault(KINDS.get(check, "targets differ"), []).append(text)
    # Of one run the doubts about each cell have said what differs between targets, and on the way to them.
    kinds = (OTHER_WORK,) if baseline.run is candidate.run else said
    return [Doubt(kind, "; ".join(said[kind])) for kind in kinds if said[kind]]


def _planned(a: Cell, b: Cell) -> list[str]:
    """Lengths as planned of the requests that both have."""
    _, left, right = np.intersect1d(a["index"], b["index"], return_indices=True)
    if not len(left):
        return ["no request was sent to both"]
    off = {name: int((a[name][left] != b[name][right]).sum()) for name in ("planned_in", "asked_out")}
    return [f"{PLANNED[name]} of {count} of {len(left)} requests" for name, count in off.items() if count]


def _machine(facts_: Mapping[str, Any]) -> str:
    host = _section(facts_, "host")
    return f"{host['cpu']}, {host.get('cores')} cores" if host.get("cpu") else ""


def _section(facts_: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = facts_.get(name)
    return found if isinstance(found, Mapping) else {}
