"""How many replicas carry a rate, with spares and growth, and what they cost, as sections of a plan."""

import datetime
from typing import NamedTuple

from llm_bench import capacity
from llm_bench.capacity import Fleet, Prices
from llm_bench.capacity_ask import Ask, Demand, Figure, Section, digits
from llm_bench.carried import Bracket
from llm_bench.printable import counted


class Answers(NamedTuple):
    """Of a mean answer."""

    tokens: float | None
    stay_s: float | None


def of_bracket(bracket: Bracket, ask: Ask) -> list[Section]:
    low, high = bracket.low, bracket.high
    each = low.planned(ask.utilization) if low else None
    if low is None or not each:
        why = "no load is proven to meet the SLO, so no number of replicas can be given"
        return [Section("fleet", "Fleet", notes=[why])]
    how = f"the rate within the SLO at {low.load}, measured"
    if low.kind == "closed":
        how = f"the rate planned with: {digits(low.rate)}/s at {low.load} x {ask.utilization:g}"
    best = None
    if high is not None:
        best = high.offered if high.kind != "closed" else high.planned(ask.utilization)
    return fleet(ask, each, best, Answers(low.tokens_out, low.stay_s), how)


def fleet(ask: Ask, each: float, best: float | None, answers: Answers, how: str) -> list[Section]:
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
            "requests/s",
            f"{digits(demand.target)}/s x {demand.peak:.4g}: {demand.peak_text}",
        ),
        Figure(
            "active",
            "replicas that carry it",
            of.active,
            "replicas",
            f"ceil({digits(target)}/s / {digits(each)}/s), {how}",
        ),
        Figure("total", "replicas with spares", of.total, "replicas", f"{of.active} + {counted(of.spares, 'spare')}"),
    ]
    if answers.stay_s:
        in_flight = capacity.concurrency(target, answers.stay_s)
        how = f"{digits(target)}/s x {digits(answers.stay_s)} s (Little's law)"
        figures.append(Figure("in_flight", "in flight in the whole fleet", in_flight, "requests", how))
    k = capacity.most_failures(of)
    rest = f"{of.total - k} left carry {digits(of.left(k))}/s"
    figures.append(Figure("failures", "replicas that may be gone at once", k, "replicas", f"{rest}, which is enough"))
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
    return Figure("queued", f"requests that queue up when {failed} fail", waiting, "requests", how)


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
    money, within = ask.money or "money", " within the SLO" if ask.slo.limits else ""  # assumed figures meet none
    hourly = f"{prices.accelerators} x {prices.accelerator_hour:g}/h x {counted(of.total, 'replica')}"
    hourly += f" + {prices.other_hour:g}/h telemetry and gateway" if prices.other_hour else ""
    notes = [f"{name}: {source}" for name, source in prices.sources.items()]
    found = capacity.cost(of, prices, demand, tokens_out or 1.0)
    figures = [Figure("per_hour", "cost per hour", found.per_hour, f"{money}/h", hourly)]
    answers, name = found.served * capacity.HOURS_S, f"cost per 1M output tokens{within}"
    if tokens_out:
        each = counted(digits(tokens_out), "token")
        how = f"at {digits(found.served)}/s x {each} x 3,600 s = {digits(answers * tokens_out)} tokens an hour"
        figures.append(Figure("per_million", name, found.per_million, money, how))
        how = f"of {each}"
    else:
        figures.append(Figure("per_million", name, None, money, "how many tokens an answer has is not known"))
        how = f"at {digits(found.served)}/s x 3,600 s = {digits(answers)} answers an hour"
    figures += [
        Figure("per_request", f"cost per answer{within}", found.per_answer, money, how),
        Figure(
            "idle",
            "idle share, paid for",
            found.idle,
            "share",
            f"of {digits(of.total * of.each)}/s that all could carry",
        ),
    ]
    if demand > of.active * of.each:
        notes.append(f"demand is {digits(demand)}/s: what is over {digits(found.served)}/s is not served{within}")
    return Section("cost", "Cost", figures, notes=notes)
