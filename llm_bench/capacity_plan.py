"""From runs and inputs to a plan: ceilings, rate within the SLO, replicas, cost; each figure with its arithmetic."""

import math
from collections.abc import Sequence

from llm_bench import capacity, capacity_fleet, carried, curves, knobs, kv_gauge, kv_plan, windows
from llm_bench.capacity import Ceiling, Prices
from llm_bench.capacity_ask import Ask, Figure, Section, Table, WhatIf, digits
from llm_bench.capacity_fleet import Answers
from llm_bench.carried import Bracket, Busiest, Carried, Resident
from llm_bench.curves import Estimate, Fit
from llm_bench.errors import BenchError
from llm_bench.evidence import SERVERS
from llm_bench.printable import counted
from llm_bench.results import Measured, Run

_KINDS = {"closed": "closed loop", "open": "open loop", "replay": "replay"}
_LEVELS = {"closed": "slots", "open": "requests/s", "replay": "times the trace's speed"}  # unit of a load
TOKEN_RATE, PASS_RATE = "token rate", "pass rate"
MADE = (TOKEN_RATE, PASS_RATE)  # ceilings that are the most that was measured
SHOWN_OVER = 1.001  # times a ceiling: what ended beside it is explained where it is more
NO_LIMITS = "no --slo, and the run keeps none: without limits no load is proven, and only ceilings can be given"


# ---- arithmetic alone


def what_if(given: WhatIf, ask: Ask) -> list[Section]:
    """The same arithmetic on assumed figures. Raises BenchError where they make no ceiling at all."""
    ceilings, sections = _ceilings(given, ask, None, None)
    if not ceilings:
        raise BenchError(
            "--what-if: expected tokens_per_second and tokens_out, or in_flight and e2e, or resident_tokens with e2e "
            "and --model-config; found none of these pairs"
        )
    each = capacity.sustainable(capacity.binding(ceilings).rate, ask.utilization)
    how = f"{digits(capacity.binding(ceilings).rate)}/s x {ask.utilization:g} ({capacity.binding(ceilings).name})"
    own = [Figure("sustainable", "sustainable rate of one replica", each, "answers/s", how)]
    if given.stay_s is not None:
        own.append(
            Figure(
                "concurrency",
                "in flight at that rate",
                capacity.concurrency(each, given.stay_s),
                "requests",
                f"{digits(each)}/s x {digits(given.stay_s)} s (Little's law)",
            )
        )
    sections.append(Section("sustainable", "Sustainable", own, notes=["assumed figures: none of this was measured"]))
    if ask.demand.target is not None:
        how = "the sustainable rate, assumed and not measured"
        sections += capacity_fleet.fleet(ask, each, None, Answers(given.tokens_out, given.stay_s), how)
    return sections


def _ceilings(
    given: WhatIf, ask: Ask, held: Resident | None, busiest: Busiest | None
) -> tuple[list[Ceiling], list[Section]]:
    """`busiest`: the measured cell that `given` has its token rate and answers from."""
    found = []
    if given.tokens_per_second is not None and given.tokens_out is not None:
        how = f"{digits(given.tokens_per_second)} tokens/s / {counted(digits(given.tokens_out), 'token')} an answer"
        how += f" at {busiest.cell.load}; {busiest.text}" if busiest else ""
        most = capacity.ceiling(given.tokens_per_second, given.tokens_out)
        found.append(Ceiling(TOKEN_RATE, most, how))
    if busiest and busiest.cell.work == "single pass" and busiest.cell.served:
        how = f"{digits(busiest.cell.served)} results/s at {busiest.cell.load}; {busiest.text}"
        found.append(Ceiling(PASS_RATE, busiest.cell.served, how))
    if given.in_flight is not None and given.stay_s is not None:
        how = f"{digits(given.in_flight)} in flight / {digits(given.stay_s)} s each (Little's law)"
        found.append(Ceiling("concurrency limit", capacity.rate_of(given.in_flight, given.stay_s), how))
    sections = []
    if ask.hardware is not None:
        section, sequences = kv_plan.section(ask.hardware, held, given.resident_tokens)
        sections.append(section)
        stay_s = held.active_s if held is not None else given.stay_s
        if sequences is not None and stay_s:
            how = f"{counted(digits(sequences), 'sequence')} in its memory / {digits(stay_s)} s that each holds its "
            how += "blocks (Little's law)"
            found.append(Ceiling("KV memory", capacity.rate_of(sequences, stay_s), how))
        roof = next((f.value for f in section.figures if f.key == "memory_roof"), None)
        if roof and given.tokens_out and roof < (given.tokens_per_second or 0.0):
            how = f"{digits(roof)} tokens/s / {counted(digits(given.tokens_out), 'token')} an answer: fewer than the "
            how += "rate given"
            found.append(Ceiling("memory bandwidth", capacity.ceiling(roof, given.tokens_out), how))
    if found:
        lowest = capacity.binding(found)
        figures = [Figure(c.name.replace(" ", "_"), f"ceiling by {c.name}", c.rate, "answers/s", c.how) for c in found]
        notes = []
        if len(found) > 1 and lowest.name in MADE and busiest and not busiest.saturated:
            notes.append(
                f"{lowest.name} is the lowest of {len(found)} and may be higher: which of them binds is not known"
            )
        elif len(found) > 1:
            notes.append(f"{lowest.name} binds: {digits(lowest.rate)}/s is the lowest of {len(found)}")
        sections.append(Section("ceilings", "Ceilings of one replica", figures, notes=notes))
    return found, sections


# ---- from runs


def plan(runs: Sequence[Run], ask: Ask) -> list[Section]:
    """What the runs say, and what follows from it. Every run is of the same server, or of one setting of it.

    Judged by the SLO asked for, else by the one that the runs were made with. Raises BenchError where they were made
    with several, and for a fleet without any.
    """
    agreed = {slo.text: slo for slo in (run.agreed(ask.slo) for run in runs)}
    if len(agreed) > 1:
        raise BenchError(f"the runs were made with different SLOs ({' | '.join(map(repr, agreed))}): give --slo")
    kept = not ask.slo.limits
    ask = ask._replace(slo=next(iter(agreed.values())))
    if ask.demand.target is not None and not ask.slo.limits:
        raise BenchError(
            "--target-rate without --slo, and the run keeps none: how many replicas carry a rate depends on the limits "
            "they are to meet; expected one such as --slo 'ttft_p95<800ms,error_rate<1%'"
        )
    by_run = [carried.evidence(run, ask.slo) for run in runs]
    sections = [_slo(ask, kept)]
    for i, (run, cells) in enumerate(zip(runs, by_run, strict=True)):
        for bracket in carried.brackets(cells):
            title = f"{bracket.target}, {_KINDS.get(bracket.kind, bracket.kind)}" + (
                f", run {run.path.name}" if len(runs) > 1 else ""
            )
            sections += _of_bracket(run, cells, bracket, ask, title, f"{i}_{bracket.target}_{bracket.kind}")
    ways = knobs.compare_settings(runs, by_run, ask.prices, ask.utilization)
    if len(ways) > 1:
        sections.append(knobs.settings_section(ways, ask.money))
    if ask.delays_ms:
        sections.append(knobs.windows_section(runs, by_run, ask))
    return sections


def _slo(ask: Ask, kept: bool) -> Section:
    if not ask.slo.limits:
        return Section("limits", "SLO", notes=[NO_LIMITS])
    return Section("limits", "SLO", notes=[f"{ask.slo.text}{', as the run was made with' if kept else ''}"])


def _of_bracket(run: Run, evidence: list[Carried], bracket: Bracket, ask: Ask, title: str, key: str) -> list[Section]:
    busiest = carried.busiest(bracket.cells)
    most = busiest.cell if isinstance(busiest, Busiest) else None
    loads = _loads(bracket, most, ask, title)
    cells = [m for m in run.cells if any((c.target, c.load) == (m.target, m.load) for c in bracket.cells)]
    several = _several(cells)
    sections = [loads._replace(notes=[*several, *loads.notes])]
    sections += [_within(bracket, ask)] if ask.slo.limits else []
    at = bracket.low or most or bracket.cells[0]
    measured = next(m for m, c in zip(run.cells, evidence, strict=True) if c is at)
    held: Resident | str = "no --model-config"
    if ask.hardware is not None:
        held = carried.resident(measured.cell, measured.window, ask.hardware.block_size)
    given = WhatIf(stay_s=at.stay_s)
    if most and most.work != "single pass":
        given = WhatIf(most.tokens_per_second, most.tokens_out, at.stay_s)
    ceilings, found = _ceilings(
        given, ask, held if isinstance(held, Resident) else None, busiest if isinstance(busiest, Busiest) else None
    )
    for i, section in enumerate(found):
        if section.key == "ceilings":
            known = isinstance(busiest, Busiest) and busiest.saturated
            found[i] = _planned_with(section, ceilings, known, bracket, ask)
        if section.key == "kv_memory":
            whose = f"mean active sequence: {held}" if isinstance(held, str) else f"sequences and stays: of {at.load}"
            found[i] = section._replace(notes=[*section.notes, whose])
    if isinstance(busiest, str):
        none = Figure("token_rate", f"ceiling by {TOKEN_RATE}", None, "answers/s", busiest)
        found.append(Section("token_rate", "Token rate of one replica", [none]))
    sections += found
    if gauge := kv_gauge.section(cells, kv_plan.tokens(ask.hardware) if ask.hardware else None):
        sections.append(gauge)
    if curves_ := _curves(bracket, ask.at_loads):
        sections.append(curves_)
    if ask.demand.target is not None:
        sections += capacity_fleet.of_bracket(bracket, ask)
    return [s._replace(key=f"{key}.{s.key}") for s in sections]


def _several(cells: Sequence[Measured]) -> list[str]:
    """What "one replica" is of a target with several URLs."""
    urls = max(str((m.cell.header.get("target") or {}).get("url") or "").count("|") + 1 for m in cells)
    said = f"the target has {urls} URLs: what is called one replica below is all {urls} together, and so are its prices"
    return [said] if urls > 1 else []


def _planned_with(section: Section, ceilings: list[Ceiling], known: bool, bracket: Bracket, ask: Ask) -> Section:
    """The ceilings with what of the lowest is planned with, and where they do not agree with what was measured."""
    low = capacity.binding(ceilings)
    planned = Figure("sustainable", "sustainable", None, "answers/s", "the ceiling is only known to be this or more")
    if known or low.name not in MADE:
        how = f"{digits(low.rate)}/s x {ask.utilization:g} (--utilization)"
        planned = Figure(
            "sustainable", "sustainable", capacity.sustainable(low.rate, ask.utilization), "answers/s", how
        )
    notes = [*section.notes, *_contradiction(bracket, ceilings)]
    return section._replace(figures=[*section.figures, planned], notes=notes)


def _contradiction(bracket: Bracket, ceilings: list[Ceiling]) -> list[str]:
    rates = {c.name: c.rate for c in ceilings}
    low, said = bracket.low, []
    if low is not None and low.rate and low.rate > rates.get("KV memory", math.inf):
        said.append(
            f"doubt: {digits(low.rate)}/s was carried within the SLO, and KV memory is said to allow "
            f"{digits(rates['KV memory'])}/s: the model, memory or precision given is not what was measured"
        )
    steady = [c for c in bracket.cells if c.steady and c.served]
    most = max(steady, key=lambda c: c.served or 0.0, default=None)
    if most is not None and most.served and most.served > SHOWN_OVER * rates.get(TOKEN_RATE, math.inf):
        said.append(
            f"at {most.load} {digits(most.served)}/s ended, {most.served / rates[TOKEN_RATE] - 1:.1%} over the ceiling "
            "by token rate: answers under way at the window's edges have their tokens on one side and their end on the "
            "other, and that much a ceiling of this window may be off"
        )
    return said


def _loads(bracket: Bracket, most: Carried | None, ask: Ask, title: str) -> Section:
    closed = bracket.kind == "closed"
    heads: tuple[str, ...] = (
        "load",
        "state",
        *(("SLO",) if ask.slo.limits else ()),
        *(() if closed else ("offered/s",)),
    )
    heads += ("served/s", *(("goodput/s",) if ask.slo.limits else ()), "tokens/s", "mean stay, s", "in flight")
    priced, drawn = ask.prices is not None, any(c.energy for c in bracket.cells)
    rows = []
    for c in bracket.cells:
        row: tuple[str | float | None, ...] = (c.load, c.state, *((c.verdict,) if ask.slo.limits else ()))
        row += (() if closed else (c.offered,)) + (c.served, *((c.goodput,) if ask.slo.limits else ()))
        row += (c.tokens_per_second, c.stay_s, c.in_flight)
        if ask.prices is not None:
            row += tuple(_prices_at(c, ask.prices))
        if drawn:
            row += (c.energy.per_thousand_tokens, c.energy.per_answer) if c.energy else (None, None)
        rows.append(row)
    if priced:
        unit = ask.money or "cost"
        heads += (f"{unit}/1M tokens", f"{unit}/1M in SLO")
    heads += ("J/1k tokens", "J/answer") if drawn else ()
    notes = [_legend(closed, bool(ask.slo.limits))]
    notes += [f"{c.load}: {c.verdict}: {c.why}" for c in bracket.cells if ask.slo.limits]
    notes += [f"{c.load}: {c.why}" for c in bracket.cells if not ask.slo.limits and c.state == windows.GROWING]
    notes += [f"{c.load}: {c.little}" for c in bracket.cells if c.little and c.steady]
    notes += [
        f"{c.load}: its window of {c.window_s:.3g} s is shorter than the mean stay of its requests, {c.stay_s:.3g} s: "
        "served and tokens/s are not what it makes when full"
        for c in bracket.cells
        if c.stay_s and c.window_s < c.stay_s
    ]
    notes += [
        f"doubts at {c.load}: {', '.join(c.doubts)} (llm-bench report says more)" for c in bracket.cells if c.doubts
    ]
    lost = [f"{digits(c.wasted)} at {c.load}" for c in bracket.cells if c.wasted]
    if lost:
        notes.append(f"tokens of failed and cancelled requests, paid and of no use: {', '.join(lost)}")
    if priced:
        notes.append(
            "cost at a load: per 1M output tokens, and per 1M of answers within the limits, of one replica that is "
            "always at it: no spares, nothing idle"
        )
    notes += [f"{c.load}: {c.energy.text}" for c in bracket.cells if c.energy]
    return Section("loads", f"Measured: {title}", _workload(bracket, most), [Table(heads, rows)], notes)


def _legend(closed: bool, judged: bool) -> str:
    """What the table's rates are, under the names of a report."""
    said = [] if closed else ["offered: requests due in the window, a second (arrival_rate)"]
    said.append(f"served: ok answers ended in {'the window, a second' if closed else 'it'} (requests_per_second)")
    said += ["goodput: requests due in it that met every limit, whenever they ended"] if judged else []
    return "; ".join([*said, "in flight: requests, on average"])


def _prices_at(c: Carried, prices: Prices) -> list[float | None]:
    rates = (c.tokens_per_second, c.tokens_within)
    return [capacity.cost_at(prices, rate) if rate else None for rate in rates]


def _workload(bracket: Bracket, most: Carried | None) -> list[Figure]:
    c = bracket.low or most or bracket.cells[0]
    figures = [
        Figure("tokens_out", "tokens of a mean answer", c.tokens_out, "tokens", f"at {c.load}; {SERVERS[c.work]}")
    ]
    share = c.cached_share
    if c.tokens_in is not None:
        how = f"at {c.load}" if share is None else f"at {c.load}, {share:.1%} of them from the server's cache"
        figures.append(Figure("tokens_in", "tokens of a mean prompt", c.tokens_in, "tokens", how))
        if share is not None and c.tokens_out:
            cached = share * c.tokens_in / c.tokens_out * 1e6
            rest = (1 - share) * c.tokens_in / c.tokens_out * 1e6
            how = "not computed, and cheap only as long as the cache is as warm"
            figures.append(Figure("cached", "cached prompt tokens per 1M output tokens", cached, "tokens", how))
            figures.append(Figure("computed", "computed prompt tokens per 1M output tokens", rest, "tokens"))
    return figures


def _within(bracket: Bracket, ask: Ask) -> Section:
    low, high = bracket.low, bracket.high
    name = "rate within the SLO of one replica"
    if low is None or low.rate is None:
        figures = [Figure("rate_within_slo", name, None, "answers/s", "no load is proven to meet it")]
    elif low.kind == "closed":
        share = f"{digits(low.rate)}/s x {ask.utilization:g} (--utilization)"
        figures = [
            Figure("rate_within_slo", f"{name}, in a closed loop", low.rate, "answers/s", f"proven at {low.load}"),
            Figure("planned", "rate planned with", low.planned(ask.utilization), "answers/s", share),
        ]
    else:
        figures = [Figure("rate_within_slo", name, low.rate, "answers/s", f"proven at {low.load}: so many arrived")]
    if high is not None:
        closed = high.offered is None
        at, how = high.offered, f"{high.load}, {digits(high.served)}/s served: {high.why}"
        if closed:
            at, how = high.served, f"{high.load}: {high.why}"
        figures.append(
            Figure("missed_at", "the next load misses it, at", at, "answers/s" if closed else "requests/s", how)
        )
    notes = []
    if low is not None and low.kind == "closed":
        notes.append(
            "a closed loop sends when it is answered; users come at random and queue, so that as many of them may miss "
            "the SLO: measure with --rate or --replay what arrivals are carried"
        )
    if low is not None and low.even:
        notes.append(
            "arrivals were evenly spaced (--constant): as many that come at random queue longer, and may miss it"
        )
    if high is None and low is not None:
        notes.append("no load measured misses the SLO: the rate within it is this or more. Measure higher loads")
    elif high is None:
        notes.append("no load measured is proven to meet the SLO, and none to miss it: nothing is known of the rate")
    if open_ := bracket.undecided:
        loads = ", ".join(c.load for c in open_)
        notes.append(f"undecided: {loads}. What would decide each stands above")
    return Section("within_slo", "Rate within the SLO", figures, notes=notes)


# ---- curves


def _curves(bracket: Bracket, at_loads: Sequence[float]) -> Section | None:
    """Throughput, TTFT and TPOT against the load. Raises BenchError for a load past what a curve may be asked."""
    figures, notes = [], []
    rows: list[tuple[str | float | None, ...]] = []
    closed = bracket.kind == "closed"
    forms = ("usl", "two segments") if closed else ("two segments",)
    usable = [c for c in bracket.cells if c.level > 0]
    if len(usable) < curves.LEAST_LOADS:
        few = f"{counted(len(usable), 'load')} measured, a curve needs {curves.LEAST_LOADS}"
        few += ": --at-load cannot be answered"
        return Section("curves", "Curves", notes=[few]) if at_loads else None
    what = (("throughput", "throughput", "tokens/s"), ("ttft", "mean TTFT", "s"), ("tpot", "mean TPOT", "s"))
    for key, name, unit in what:
        picked = {"throughput": "tokens_per_second", "ttft": "ttft_s", "tpot": "tpot_s"}[key]
        points = [(c.level, getattr(c, picked)) for c in usable if getattr(c, picked)]
        if not points:
            continue
        loads, values = [p[0] for p in points], [p[1] for p in points]
        fit = curves.fit_throughput if key == "throughput" else curves.fit_latency
        try:
            chosen = fit(loads, values, forms)
        except BenchError as e:
            notes.append(f"{name}: {e}")
            continue
        notes.append(f"{name} against load: {chosen.text}; scatter {chosen.best.scatter:.2%}")
        figures += _fit_figures(key, name, unit, chosen.best, _LEVELS.get(bracket.kind, "of load"))
        for load in at_loads:
            at = curves.predict(chosen.best, load)
            rows.append((name, load, at.value, at.low, at.high, unit))
    tables = (
        [Table(("curve", f"load, {_LEVELS.get(bracket.kind, bracket.kind)}", "value", "low", "high", "unit"), rows)]
        if rows
        else []
    )
    return Section("curves", "Curves", figures, tables, notes) if figures or notes else None


def _fit_figures(key: str, name: str, unit: str, fit: Fit, level: str) -> list[Figure]:
    out = []
    if key == "throughput":
        out.append(_estimated(f"{key}_ceiling", f"{name}: the most", unit, fit.ceiling))
        out += [
            _estimated(f"{key}_{term}", f"{name}: {term}", "", fit.params[term])
            for term in ("contention", "coherence")
            if term in fit.params
        ]
    out.append(_estimated(f"{key}_knee", f"{name}: knee", level, fit.knee))
    return out


def _estimated(key: str, name: str, unit: str, found: Estimate | str) -> Figure:
    if isinstance(found, str):
        return Figure(key, name, None, unit, found)
    return Figure(key, name, found.value, unit, f"95%: {digits(found.low)} to {digits(found.high)}")
