"""Which cells are a pair, in one run or in two, and whether they did the same work."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from llm_bench import metrics, same_work
from llm_bench.client import BUSY, LATE, STALLED
from llm_bench.columns import Cell
from llm_bench.doubts import Doubt
from llm_bench.errors import BenchError
from llm_bench.facts import EITHER_WAY, TOO_HIGH, TOO_LOW, Effect
from llm_bench.gate import Name, Objection, Pair, Side
from llm_bench.results import Measured, Run
from llm_bench.rules import DRIFT, MISSING, NETWORK, NOT_INTERLEAVED, OTHER_WORK, TARGETS, WARMING
from llm_bench.series import NOTHING, SERIES
from llm_bench.steady import DRIFT_BATCHES

# Settings that do not change what is sent; the seed is a fact of its own.
NO_WORK = ("out", "ready_s", "seed", "slo", "deadlines", "rounds")

ROUND_TRIPS = 3  # in a latency at most: to connect, for TLS, for the answer

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
            objections += [*_of_cell(baseline, a, "baseline"), *_of_cell(candidate, b, "candidate")]
            objections += differences(baseline, a, candidate, b)
            ours, other = (m.cell.header.get("order") for m in (a, b))
            known = baseline.run is candidate.run and ours is not None and other is not None
            first.append(ours < other if known else None)  # type: ignore[operator]
    apart = _apart(baseline, candidate, first)
    return Paired(found, objections + apart, not apart)


def _of_cell(of: Arm, m: Measured, arm_: Name) -> list[Objection]:
    """The doubts about a cell; what it differs in from other targets is left to what is said of the pair."""
    where, number = f"{of.name}, pair {number_of(m)}", number_of(m)
    found = []
    for d in of.doubts(m):
        if d.kind in (TARGETS, NETWORK):
            continue
        # A window whose later half alone is steady, by MSER-5, is too short: as much a matter of chance as warming.
        kind = WARMING if d.kind == "too short" and m.window.settling else d.kind
        p = m.window.drift.p if kind == DRIFT and m.window.drift else None
        found.append(Objection(m.load, where, kind, d.text, d.effect, arm_, number, p, _off(kind, m)))
    return found


def _off(kind: str, m: Measured) -> tuple[float, float] | None:
    """By how much figures are off at most for a doubt: (ms, factor). None where that cannot be told."""
    if kind in (LATE, STALLED, BUSY):
        late = [m.end.get("loop_lag_p99_ms") or 0.0, *(m.end.get("worker_loop_lag_ms") or [])]
        late += [ms for _, ms in m.end.get("loop_stalls") or []]
        sent = SERIES["lag_client"].of(m.cell, NOTHING).values
        sent_ms = 0.0 if np.isnan(sent).all() else float(np.nanmax(sent))
        return (sent_ms + max(late), 1.0) if max(late) or sent_ms else None  # sent late, and stamped late
    if kind == WARMING and m.window.settling:
        early, rest = m.window.settling.early_ms, m.window.settling.rest_ms
        return (0.0, max(early, rest) / min(early, rest)) if min(early, rest) > 0 else None
    if kind == DRIFT and m.window.drift:
        change = abs(m.window.drift.latency.slope) * (DRIFT_BATCHES - 1)
        mean = metrics.compute("e2e_mean", m.cell, m.window).value or 0.0
        return (0.0, (mean + change / 2) / (mean - change / 2)) if change < 2 * mean else None
    return None


def _missing(of: Arm) -> list[Objection]:
    mine = [m for m in of.run.missing if m.target == of.cells[0].target]
    return [Objection(m.load, of.name, MISSING, m.why) for m in mine]


def _apart(baseline: Arm, candidate: Arm, first: Sequence[bool | None]) -> list[Objection]:
    """Why the arms did not take turns: [] where they did."""
    who = f"{baseline.name}, {candidate.name}"
    if None in first:
        how = "one after the other, not in turns (--interleave)" if baseline.run is candidate.run else "in two runs"
        text = f"measured apart, {how}: what changed on the machine in between looks like a change of the target"
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
KINDS = dict.fromkeys(("prompt tokens", "delivered tokens", "finish reasons"), OTHER_WORK) | {"network path": NETWORK}


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


def differences(baseline: Arm, a: Measured, candidate: Arm, b: Measured) -> list[Objection]:
    """In what the work of two cells of a pair, the targets and the ways to them differ."""
    mine, theirs = facts(baseline.run, a), facts(candidate.run, b)
    work = [f"{name} {mine[name]} and {theirs[name]}" for name in differing(mine, theirs) if name not in IDENTITY]
    ours, other = (_section(m.cell.header, "settings") for m in (a, b))
    changed = [k for k in ours if k in other and ours[k] != other[k] and k not in NO_WORK]
    work += [f"settings.{k} {ours[k]!r} and {other[k]!r}" for k in changed] + _planned(a.cell, b.cell)
    said: dict[str, list[str]] = {OTHER_WORK: work, TARGETS: [], NETWORK: []}
    cached = _cached(a, b, one_run=baseline.run is candidate.run)
    found: list[Objection] = []
    for check, text in same_work.differences(
        same_work.Side(baseline.name, a.cell), same_work.Side(candidate.name, b.cell)
    ):
        if check != "cached share":
            said[KINDS.get(check, TARGETS)].append(text)
        elif cached:
            found.append(_between(a, TARGETS, text, TOO_LOW, cached))
    found += [_between(a, kind, "; ".join(said[kind])) for kind in (OTHER_WORK, TARGETS) if said[kind]]
    for text in said[NETWORK]:
        x, y = (float(_section(m.cell.header, "probe")["rtt_ms"]) for m in (a, b))
        longer: Name = "baseline" if x > y else "candidate"
        found.append(_between(a, NETWORK, text, TOO_HIGH, longer)._replace(off=(ROUND_TRIPS * abs(x - y), 1.0)))
    return found


def _between(m: Measured, kind: str, text: str, effect: Effect = EITHER_WAY, of: Name | None = None) -> Objection:
    return Objection(m.load, f"pair {number_of(m)}", kind, text, effect, of, number_of(m))


def _cached(a: Measured, b: Measured, *, one_run: bool) -> Name | None:
    """The arm whose cache answered more, where that is no merit of its build: None where it is, or hardly more.

    In one run either arm meets prompts of its own, so that what the trace plans to share is for the build to keep.
    """
    plan = _section(a.cell.header, "plan")
    if one_run and (plan.get("shares") or plan.get("sessions")):
        return None
    x, y = (metrics.compute("cached_prompt_share", m.cell, m.window).value for m in (a, b))
    if x is None or y is None or abs(x - y) <= same_work.MAX_CACHED_APART:
        return None
    return "baseline" if x > y else "candidate"


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
