"""From runs and inputs to a plan: ceilings, rate within the SLO, replicas, cost; each figure with its arithmetic."""

import datetime
from collections.abc import Sequence
from typing import NamedTuple

from llm_bench import capacity, carried, curves, knobs, kv_plan
from llm_bench.capacity import Ceiling, Fleet, Prices
from llm_bench.capacity_ask import Ask, Demand, Figure, Section, Table, WhatIf, digits
from llm_bench.carried import Bracket, Carried, Resident
from llm_bench.curves import Estimate, Fit
from llm_bench.errors import BenchError
from llm_bench.results import Run

_KINDS = {"closed": "closed loop", "open": "open loop", "replay": "replay"}


# ---- arithmetic alone


def what_if(given: WhatIf, ask: Ask) -> list[Section]:
    """The same arithmetic on assumed figures. Raises BenchError where they make no ceiling at all."""
    ceilings, sections = _ceilings(given, ask, None)
    if not ceilings:
        raise BenchError(
            "--what-if: expected tokens_per_second and tokens_out, or in_flight and e2e, or resident_tokens with e2e "
            "and --model-config; found none of these pairs"
        )
    each = capacity.sustainable(capacity.binding(ceilings).rate, ask.utilization)
    how = f"{digits(capacity.binding(ceilings).rate)}/s x {ask.utilization:g} ({capacity.binding(ceilings).name})"
    own = [Figure("sustainable", "sustainable rate of one replica", each, "/s", how)]
    if given.stay_s is not None:
        own.append(
            Figure(
                "concurrency",
                "in flight at that rate",
                capacity.concurrency(each, given.stay_s),
                "1",
                f"{digits(each)}/s x {digits(given.stay_s)} s (Little's law)",
            )
        )
    sections.append(Section("sustainable", "Sustainable", own, notes=["assumed figures: nothing of this was measured"]))
    if ask.demand.target is not None:
        how = "the sustainable rate, assumed and not measured"
        sections += _fleet(ask, each, None, _Answers(given.tokens_out, given.stay_s), how)
    return sections


def _ceilings(given: WhatIf, ask: Ask, held: Resident | None) -> tuple[list[Ceiling], list[Section]]:
    found = []
    if given.tokens_per_second is not None and given.tokens_out is not None:
        how = f"{digits(given.tokens_per_second)} tokens/s / {digits(given.tokens_out)} tokens an answer"
        most = capacity.ceiling(given.tokens_per_second, given.tokens_out)
        found.append(Ceiling("token rate", most, how))
    if given.in_flight is not None and given.stay_s is not None:
        how = f"{digits(given.in_flight)} in flight / {digits(given.stay_s)} s each (Little's law)"
        found.append(Ceiling("concurrency limit", capacity.rate_of(given.in_flight, given.stay_s), how))
    sections = []
    if ask.hardware is not None:
        section, sequences = kv_plan.section(ask.hardware, held, given.resident_tokens)
        sections.append(section)
        stay_s = held.active_s if held is not None else given.stay_s
        if sequences is not None and stay_s:
            how = f"{digits(sequences)} sequences fit / {digits(stay_s)} s that each holds its blocks (Little's law)"
            found.append(Ceiling("KV memory", capacity.rate_of(sequences, stay_s), how))
    if found:
        lowest = capacity.binding(found)
        figures = [Figure(c.name.replace(" ", "_"), f"ceiling by {c.name}", c.rate, "/s", c.how) for c in found]
        notes = (
            [f"{lowest.name} binds: {digits(lowest.rate)}/s is the lowest of {len(found)}"] if len(found) > 1 else []
        )
        sections.append(Section("ceilings", "Ceilings of one replica", figures, notes=notes))
    return found, sections


# ---- from runs


def plan(runs: Sequence[Run], ask: Ask) -> list[Section]:
    """What the runs say, and what follows from it. Every run is of the same server, or of one setting of it."""
    by_run = [carried.evidence(run, ask.slo) for run in runs]
    sections = []
    for i, (run, cells) in enumerate(zip(runs, by_run, strict=True)):
        for bracket in carried.brackets(cells):
            title = f"{bracket.target}, {_KINDS.get(bracket.kind, bracket.kind)}" + (
                f", run {run.path.name}" if len(runs) > 1 else ""
            )
            sections += _of_bracket(run, bracket, ask, title, f"{i}_{bracket.target}_{bracket.kind}")
    ways = knobs.compare_settings(runs, by_run, ask.prices)
    if len(ways) > 1:
        sections.append(knobs.settings_section(ways, ask.money))
    if ask.delays_ms:
        sections.append(knobs.windows_section(runs, by_run, ask))
    return sections


def _of_bracket(run: Run, bracket: Bracket, ask: Ask, title: str, key: str) -> list[Section]:
    sections = [_loads(bracket, ask, title), _within(bracket)]
    at = bracket.low or max(bracket.cells, key=lambda c: c.tokens_per_second or 0.0)
    most = max(bracket.cells, key=lambda c: c.tokens_per_second or 0.0)
    measured = next(m for m in run.cells if m.load == at.load and m.target == at.target)
    held: Resident | str = "no --model-config"
    if ask.hardware is not None:
        held = carried.resident(measured.cell, measured.window, ask.hardware.block_size)
    given = WhatIf(most.tokens_per_second, at.tokens_out, at.stay_s)
    ceilings, found = _ceilings(given, ask, held if isinstance(held, Resident) else None)
    for i, section in enumerate(found):
        if section.key == "ceilings":
            low = capacity.binding(ceilings)
            planned = capacity.sustainable(low.rate, ask.utilization)
            how = f"{digits(low.rate)}/s x {ask.utilization:g}"
            figures = [*section.figures, Figure("sustainable", "sustainable", planned, "/s", how)]
            extra = [f"token rate as of {most.load}, the most measured; answers and stays as of {at.load}"]
            extra += _contradiction(bracket, ceilings)
            found[i] = section._replace(figures=figures, notes=[*section.notes, *extra])
        if section.key == "kv_memory" and isinstance(held, str):
            found[i] = section._replace(notes=[*section.notes, f"mean active sequence: {held}"])
    sections += found
    if curves_ := _curves(bracket, ask.at_loads):
        sections.append(curves_)
    if ask.demand.target is not None:
        if bracket.low is None or not bracket.low.rate:
            why = "no load is proven to meet the SLO, so that no number of replicas can be said"
            sections.append(Section("fleet", "Fleet", notes=[why]))
        else:
            how = f"the rate within the SLO at {bracket.low.load}, measured"
            best = bracket.high.rate if bracket.high and bracket.high.rate else None
            sections += _fleet(ask, bracket.low.rate, best, _Answers(bracket.low.tokens_out, bracket.low.stay_s), how)
    return [s._replace(key=f"{key}.{s.key}") for s in sections]


def _contradiction(bracket: Bracket, ceilings: list[Ceiling]) -> list[str]:
    kv = next((c for c in ceilings if c.name == "KV memory"), None)
    low = bracket.low
    if kv is None or low is None or not low.rate or low.rate <= kv.rate:
        return []
    return [
        f"doubt: {digits(low.rate)}/s was carried within the SLO, and KV memory is said to allow {digits(kv.rate)}/s: "
        "the model, memory or precision given is not what was measured"
    ]


def _loads(bracket: Bracket, ask: Ask, title: str) -> Section:
    heads: tuple[str, ...] = ("load", "SLO", "ok answers/s", "within SLO/s", "tokens/s", "mean stay, s", "in flight")
    priced = ask.prices is not None
    rows = []
    for c in bracket.cells:
        row: tuple[str | float | None, ...] = (
            c.load, c.verdict, c.rate, c.goodput, c.tokens_per_second, c.stay_s, c.in_flight,
        )  # fmt: skip
        if ask.prices is not None:
            row += tuple(_prices_at(c, ask.prices))
        rows.append(row)
    if priced:
        unit = ask.money or "cost"
        heads += (f"{unit}/1M tokens", f"{unit}/1M in SLO")
    notes = [f"{c.load}: {c.verdict}: {c.why}" for c in bracket.cells if ask.slo.limits]
    notes += [f"{c.load}: {c.little}" for c in bracket.cells if c.little]
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
    return Section("loads", f"Measured: {title}", _workload(bracket), [Table(heads, rows)], notes)


def _prices_at(c: Carried, prices: Prices) -> list[float | None]:
    each = capacity.cost_at(prices, c.tokens_per_second) if c.tokens_per_second else None
    good = c.tokens_per_second * c.met_share if c.tokens_per_second and c.met_share else None
    return [each, capacity.cost_at(prices, good) if good else None]


def _workload(bracket: Bracket) -> list[Figure]:
    c = bracket.low or bracket.cells[0]
    if c.tokens_out is None:
        kind = "its answers do not say how many tokens they have"
    elif c.single_pass:
        kind = (
            "single pass: one result a request, nothing is decoded. A server that gathers batches for some "
            "milliseconds fits (Triton, TorchServe, MLServer); KV memory plays no part"
        )
    else:
        kind = (
            "LLM decoding: answers grow token by token and hold KV memory while they do. A server with continuous "
            "batching and a paged cache fits (vLLM, SGLang, TensorRT-LLM, TGI, llama.cpp)"
        )
    figures = [Figure("tokens_out", "tokens of a mean answer", c.tokens_out, "tokens", kind)]
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


def _within(bracket: Bracket) -> Section:
    low, high = bracket.low, bracket.high
    if low is None or low.rate is None:
        least = Figure(
            "rate_within_slo", "rate within the SLO of one replica", None, "/s", "no load is proven to meet it"
        )
    else:
        least = Figure("rate_within_slo", "rate within the SLO of one replica", low.rate, "/s", f"proven at {low.load}")
    figures = [least]
    if high is not None:
        figures.append(Figure("missed_at", "the next load misses it, at", high.rate, "/s", f"{high.load}: {high.why}"))
    notes = []
    if high is None:
        notes.append("no load measured misses the SLO: the rate within it is this or more. Measure higher loads")
    if open_ := bracket.undecided:
        loads = ", ".join(c.load for c in open_)
        notes.append(f"undecided: {loads}. The answer is a bracket until more requests decide it")
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
        return None
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
        figures += _fit_figures(key, name, unit, chosen.best)
        for load in at_loads:
            at = curves.predict(chosen.best, load)
            rows.append((name, load, at.value, at.low, at.high, unit))
    tables = [Table(("curve", "load", "value", "low", "high", "unit"), rows)] if rows else []
    return Section("curves", "Curves", figures, tables, notes) if figures or notes else None


def _fit_figures(key: str, name: str, unit: str, fit: Fit) -> list[Figure]:
    out = []
    if key == "throughput":
        out.append(_estimated(f"{key}_ceiling", f"{name}: the most", unit, fit.ceiling))
        out += [
            _estimated(f"{key}_{term}", f"{name}: {term}", "", fit.params[term])
            for term in ("contention", "coherence")
            if term in fit.params
        ]
    out.append(_estimated(f"{key}_knee", f"{name}: knee", "of load", fit.knee))
    return out


def _estimated(key: str, name: str, unit: str, found: Estimate | str) -> Figure:
    if isinstance(found, str):
        return Figure(key, name, None, unit, found)
    return Figure(key, name, found.value, unit, f"95%: {digits(found.low)} to {digits(found.high)}")


# ---- fleet and cost


class _Answers(NamedTuple):
    """Of a mean answer."""

    tokens: float | None
    stay_s: float | None


def _fleet(ask: Ask, each: float, best: float | None, answers: _Answers, how: str) -> list[Section]:
    """`each`: the rate within the SLO of one replica; `best`: what it might be at most, where that is known."""
    demand = ask.demand
    assert demand.target is not None
    target = demand.target * demand.peak
    of = capacity.fleet(target, each, demand.spares)
    figures = [
        Figure(
            "target",
            "rate to carry",
            target,
            "/s",
            f"{digits(demand.target)}/s x {demand.peak:.4g}: {demand.peak_text}",
        ),
        Figure(
            "active", "replicas that carry it", of.active, "1", f"ceil({digits(target)}/s / {digits(each)}/s), {how}"
        ),
        Figure("total", "replicas with spares", of.total, "1", f"{of.active} + {of.spares} spares"),
    ]
    if answers.stay_s:
        in_flight = capacity.concurrency(target, answers.stay_s)
        how = f"{digits(target)}/s x {digits(answers.stay_s)} s (Little's law)"
        figures.append(Figure("in_flight", "in flight in the whole fleet", in_flight, "1", how))
    k = capacity.most_failures(of)
    rest = f"{of.total - k} left carry {digits(of.left(k))}/s"
    figures.append(Figure("failures", "replicas that may be gone at once", k, "1", f"{rest}, which is enough"))
    notes = []
    if best is not None and best > each:
        least = capacity.fleet(target, best, demand.spares).active
        if least < of.active:
            notes.append(
                f"{least} might do: a load between {digits(each)}/s and {digits(best)}/s was not proven either way"
            )
    if demand.warmup_s is not None:
        figures.append(_warmup(of, k + 1, demand.warmup_s))
    else:
        after = of.left(k + 1)
        notes.append(f"with {k + 1} gone: {digits(after)}/s of {digits(target)}/s")
    if demand.growth is not None:
        figures.append(_growth(of, demand))
    sections = [Section("fleet", "Fleet", figures, notes=notes)]
    if ask.prices is not None:
        sections.append(_cost(of, ask, ask.prices, demand.target, answers.tokens))
    return sections


def _warmup(of: Fleet, failed: int, warmup_s: float) -> Figure:
    waiting = capacity.queued(of, failed, warmup_s)
    how = (
        f"with {failed} gone, {max(of.total - failed, 0)} left carry {digits(of.left(failed))}/s of "
        f"{digits(of.target)}/s for the {digits(warmup_s)} s until a replacement is ready"
    )
    return Figure("queued", f"requests that queue up when {failed} fail", waiting, "1", how)


def _growth(of: Fleet, demand: Demand) -> Figure:
    assert demand.growth is not None
    most = of.active * of.each
    days = capacity.exhausted_after(of.target, most, demand.growth)
    name = "days until the active replicas are too few"
    if days is None:
        return Figure("exhausted", name, None, "days", f"at {demand.growth.text} they never are")
    how = f"{digits(of.target)}/s grows by {demand.growth.text} to {digits(most)}/s, spares left out"
    if demand.as_of is not None:
        try:
            how += f": {demand.as_of + datetime.timedelta(days=int(days))}"
        except OverflowError:
            how += ": after the year 9999"
    return Figure("exhausted", name, days, "days", how)


def _cost(of: Fleet, ask: Ask, prices: Prices, demand: float, tokens_out: float | None) -> Section:
    money = ask.money
    hourly = f"{prices.accelerators} x {prices.accelerator_hour:g}/h x {of.total} replicas"
    hourly += f" + {prices.other_hour:g}/h telemetry and gateway" if prices.other_hour else ""
    notes = [f"{name}: {source}" for name, source in prices.sources.items()]
    if not tokens_out:
        how = "how many tokens an answer has is not known"
        return Section(
            "cost", "Cost", [Figure("per_million", "cost per 1M output tokens within the SLO", None, money, how)]
        )
    found = capacity.cost(of, prices, demand, tokens_out)
    tokens = found.served * capacity.HOURS_S * tokens_out
    figures = [
        Figure("per_hour", "cost per hour", found.per_hour, money, hourly),
        Figure(
            "per_million",
            "cost per 1M output tokens within the SLO",
            found.per_million,
            money,
            f"at {digits(found.served)}/s x {digits(tokens_out)} tokens x 3,600 s = {digits(tokens)} tokens an hour",
        ),
        Figure(
            "per_request",
            "cost per answer within the SLO",
            found.per_answer,
            money,
            f"of {digits(tokens_out)} tokens",
        ),
        Figure(
            "idle",
            "idle share, paid for",
            found.idle,
            "share",
            f"of {digits(of.total * of.each)}/s that all could carry",
        ),
    ]
    if demand > of.active * of.each:
        notes.append(
            f"demand is {digits(demand)}/s: what is over {digits(found.served)}/s is not served within the SLO"
        )
    return Section("cost", "Cost", figures, notes=notes)
