"""Runs of one target under several settings: which is cheapest within the SLO, and what a batch window trades."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llm_bench import batch_window, capacity, carried
from llm_bench.capacity import Prices
from llm_bench.capacity_ask import Ask, Section, Table, digits
from llm_bench.carried import Bracket, Carried
from llm_bench.errors import BenchError
from llm_bench.printable import counted
from llm_bench.results import Run


class Setting(NamedTuple):
    """One way to run a target: what sets it apart from the others compared, and what it is proven to carry."""

    run: str
    target: str
    differs: Mapping[str, Any]
    bracket: Bracket
    rate: float  # of arrivals, to plan one replica with; 0 where nothing is proven
    cost: float | None  # per million output tokens within the SLO at that rate; None: no price, nothing proven

    @property
    def text(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.differs.items()) or "no recorded setting"


# What differs between any two runs and is no setting.
_INCIDENTAL = ("out", "name", "url", "headers", "key_env", "management", "management_key_env")


def settings_of(run: Run, target: str) -> dict[str, Any]:
    """What the headers of a run's cells say of how it was made: settings of the run and of the target, flat."""
    header = next((m.cell.header for m in run.cells if m.target == target), {})
    found: dict[str, Any] = {}
    for section in ("settings", "target"):
        found |= _flat(section, header.get(section) or {})
    return found


def _flat(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        if key not in _INCIDENTAL:
            out |= _flat(f"{prefix}.{key}", value) if isinstance(value, dict) else {f"{prefix}.{key}": value}
    return out


def differing(of_runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each, the settings that are not the same in all; None where one does not have it."""
    names = sorted({name for found in of_runs for name in found})
    odd = [name for name in names if any(found.get(name) != of_runs[0].get(name) for found in of_runs)]
    return [{name: found.get(name) for name in odd} for found in of_runs]


def compare_settings(
    runs: Sequence[Run], by_run: Sequence[Sequence[Carried]], prices: Prices | None, utilization: float
) -> list[Setting]:
    """Every target of every run under each kind of load. `by_run`: `carried.evidence` of each."""
    pairs = [
        (run, target, [c for c in cells if c.target == target])
        for run, cells in zip(runs, by_run, strict=True)
        for target in dict.fromkeys(c.target for c in cells)
    ]
    apart = differing([settings_of(run, target) for run, target, _ in pairs])
    return [
        _setting(run, target, differs, bracket, prices, utilization)
        for (run, target, cells), differs in zip(pairs, apart, strict=True)
        for bracket in carried.brackets(cells)
    ]


def _setting(
    run: Run, target: str, differs: Mapping[str, Any], bracket: Bracket, prices: Prices | None, utilization: float
) -> Setting:
    low = bracket.low
    rate = (low.planned(utilization) or 0.0) if low else 0.0
    cost = capacity.cost_at(prices, rate * low.tokens_out) if prices and low and low.tokens_out and rate else None
    return Setting(run.path.name, target, differs, bracket, rate, cost)


def cheapest(ways: Sequence[Setting], money: str = "") -> str:
    """The cheapest setting that is proven to meet the SLO; without prices the one that carries most."""
    priced = [way for way in ways if way.cost is not None]
    if priced:
        best = min(priced, key=lambda way: way.cost or 0.0)
        what = f"{digits(best.cost)} {money or 'money'} per 1M output tokens within the SLO"
    else:
        best = max(ways, key=lambda way: way.rate)
        if not best.rate:
            return "no setting is proven to meet the SLO"
        what = f"planned with {digits(best.rate)}/s within the SLO; without prices the one that carries most counts"
    return f"cheapest: {best.run}, {best.target} ({best.text}): {what}"


def settings_section(ways: Sequence[Setting], money: str) -> Section:
    rows: list[tuple[str | float | None, ...]] = [
        (way.run, way.target, way.text, way.bracket.low.load if way.bracket.low else None, way.rate or None, way.cost)
        for way in ways
    ]
    heads = (
        "run",
        "target",
        "what differs",
        "proven at",
        "rate planned with, /s",
        f"{money or 'cost'} per 1M within SLO",
    )
    return Section("settings", "Settings compared", tables=[Table(heads, rows)], notes=[cheapest(ways, money)])


def windows_section(runs: Sequence[Run], by_run: Sequence[Sequence[Carried]], ask: Ask) -> Section:
    """The batch-window trade at each load that all runs share."""
    if len(ask.delays_ms) != len(runs):
        given = counted(len(ask.delays_ms), "delay")
        raise BenchError(f"--window-delay: {given} for {counted(len(runs), 'run')}; expected one a run")
    order = sorted(range(len(runs)), key=lambda i: ask.delays_ms[i])
    notes = []
    first = runs[order[0]]
    for m in first.cells:
        arms = []
        for i in order:
            same = next((x for x in runs[i].cells if (x.target, x.load) == (m.target, m.load)), None)
            known = next((c for c in by_run[i] if (c.target, c.load) == (m.target, m.load)), None)
            if same is None or known is None:
                break
            made = batch_window.arm(same.cell, same.window, f"{m.target}, {m.load}", by_client=known.by_client)
            arms.append((ask.delays_ms[i], made, known.verdict))
        if len(arms) < len(runs):
            notes.append(f"{m.target}, {m.load}: not measured by every run")
            continue
        base_ms, base, _ = arms[0]
        notes += [batch_window.trade(base, made, delay - base_ms, ask.slo, base_ms).text for delay, made, _ in arms[1:]]
        notes.append(f"{m.target}, {m.load}: {batch_window.longest([(d, v) for d, _, v in arms]).text}")
    return Section("batch_window", "Batch window", notes=notes)
