"""What a search found, for a terminal, for Markdown, for programs; and the bracket so far, for whoever waits."""

import json
import math
import shutil
import textwrap
from collections.abc import Mapping, Sequence

from llm_bench import grid, steady
from llm_bench.objectives import Limit
from llm_bench.printable import counted
from llm_bench.search import Answer, Plan, Point, Probe, Result

SCHEMA = 1  # of the JSON document; counts up when a key changes its meaning
HEADINGS = ["load", "verdict", "cells", "requests", "judged", "evidence"]
LEGEND = (
    "MET and MISSED: the 95% interval of a load's first cell, or the 99% interval of its cells together once it was "
    "asked again, is clear of what is asked. Judged: requests of the windows."
)
_ENDS = {
    "resolved": "",
    "undecided": "; more requests would not decide what is open",
    "budget": "; budget ended",
    "at the cap": "; no higher load was asked for (--max)",
    "at the floor": "; no lower load was asked for (--min)",
    "interrupted": "; interrupted",
    "target gone": "; the target no longer answers",
}


def so_far(answer: Answer, plan: Plan) -> str:
    """The bracket: `met at 24, undecided at 32, missed at 40`."""
    parts = []
    if answer.met:
        parts.append(f"met at {plan.label(answer.met.load)}")
    for verdict in ("UNDECIDED", "MET", "MISSED"):  # the last two where loads contradict each other
        loads = [plan.label(p.load) for p in answer.undecided if p.verdict == verdict]
        if loads:
            word = "undecided" if verdict == "UNDECIDED" else f"contradicting: {verdict.lower()}"
            parts.append(f"{word} at {' and '.join(loads)}")
    if answer.missed:
        parts.append(f"missed at {plan.label(answer.missed.load)}")
    return ", ".join(parts) or "nothing measured"


def sentence(answer: Answer, plan: Plan) -> str:
    """The answer in a line. Never one number: the ends of the bracket, what lies between, and why it ended."""
    bracket = so_far(answer, plan) + _ENDS[answer.end]
    if answer.end == "at the cap" and answer.met:
        return f"at least {plan.label(answer.met.load)}: {bracket}"
    if answer.end == "at the floor":
        return f"the SLO is not met at the lowest load: {bracket}"
    return bracket


def code(answer: Answer) -> int:
    """Exit code: 0 a bracket as narrow as asked for, or met at the cap; 1 missed at the lowest load; 3 left open."""
    return {"resolved": 0, "at the cap": 0, "at the floor": 1, "interrupted": 130, "target gone": 4}.get(answer.end, 3)


def _rows(answer: Answer, plan: Plan) -> list[list[str]]:
    return [
        [plan.label(p.load), p.verdict, str(len(p.cells)), f"{p.requests:,}", f"{p.window:,}", p.why]
        for p in answer.points
    ]


def remarks(answer: Answer, plan: Plan) -> list[str]:
    """What else is to be known of the answer."""
    lines = [
        f"contradiction: {text}: chance, or the target changed; the bracket holds both" for text in answer.violations
    ]
    below = [p for p in answer.points if answer.met and p.verdict == "UNDECIDED" and p.load < answer.met.load]
    lines += [f"undecided at {plan.label(p.load)}, below what was met: {p.why}" for p in below]
    for which, end in (("lower", answer.met), ("upper", answer.missed)):
        if end and not end.clear and len(end.cells) == 1:
            lines.append(f"the {which} end, {plan.label(end.load)}, rests on one cell alone")
    lines += _unseen(answer, plan)
    lines += [f"not asked for, and not proven but not missed: {limit.text}" for limit in _guards(plan)]
    lines += [f"next would be {_next(probe, plan)}" for probe in answer.asks]
    spent = f"{answer.spent_s:.0f} of {plan.budget_s:.0f} s"
    sent = counted(sum(p.requests for p in answer.points), "request")
    return [*lines, f"{sent} in {counted(_cells(answer), 'cell')}, {spent} of budget"]


def _unseen(answer: Answer, plan: Plan) -> list[str]:
    """Which growth of a backlog the lower end is too short to show: less than chance makes of so many arrivals.

    It is looked for in each cell alone: more cells as long as the longest show none that is smaller.
    """
    met = answer.met
    if plan.by != "rate" or met is None or not met.longest:
        return []
    growth = steady.SWINGS / math.sqrt(met.longest) * met.load
    if growth <= plan.tolerance * met.load:
        return []
    return [
        f"the lower end, {plan.label(met.load)}, rests on cells of at most {counted(met.longest, 'request')}: a "
        f"backlog that grows by less than {growth:.3g}/s ({growth / met.load:.0%} of it) would not show in so few; a "
        "longer --budget, or more --requests, would show smaller ones"
    ]


def _guards(plan: Plan) -> Sequence[Limit]:
    return plan.limits[len(plan.limits) - plan.guards :]


def _cells(answer: Answer) -> int:
    return sum(len(p.cells) for p in answer.points)


def _next(probe: Probe, plan: Plan) -> str:
    return (
        f"{counted(probe.requests, 'request')} at {plan.label(probe.load)} ({probe.why}), about {probe.seconds:.0f} s"
    )


def _title(result: Result) -> str:
    limits = ", ".join(limit.text for limit in result.plan.limits)
    return f"{result.target}: highest {result.plan.by} within {limits}: {sentence(result.answer, result.plan)}"


def text(results: Sequence[Result]) -> str:
    """For a terminal."""
    parts = []
    for r in results:
        rows = [row[:-1] for row in _rows(r.answer, r.plan)]
        parts.append(f"{_title(r)}\n\n{grid.terminal(HEADINGS[:-1], rows, left=(0, 1))}\n")
        evidence = [f"{r.plan.label(p.load)}: {p.why}" for p in r.answer.points]
        parts += [f"{_wrapped(line)}\n" for line in [*evidence, "", *remarks(r.answer, r.plan)]]
    return "".join([*parts, f"\n{textwrap.fill(LEGEND, _width())}\n"])


def _wrapped(line: str) -> str:
    return textwrap.fill(line, _width(), initial_indent="  ", subsequent_indent="    ", break_long_words=False)


def _width() -> int:
    return max(shutil.get_terminal_size((100, 24)).columns, 40)


def markdown(results: Sequence[Result]) -> str:
    parts = []
    for r in results:
        table = grid.markdown(HEADINGS, _rows(r.answer, r.plan), left=(0, 1, 5))
        parts.append(f"### {grid.escaped(_title(r))}\n\n{table}\n")
        parts += [f"- {grid.escaped(line)}\n" for line in remarks(r.answer, r.plan)]
    return "".join([*parts, f"\n<sub>{LEGEND}</sub>\n"])


def document(result: Result) -> Mapping[str, object]:
    """The answer as JSON values, a point a load. Loads are slots, or requests a second; shares are of 1."""
    answer, plan = result.answer, result.plan
    return {
        "target": result.target,
        "by": plan.by,
        "slo": [limit.text for limit in plan.limits],
        "not_asked_for": [limit.text for limit in _guards(plan)],
        "answer": sentence(answer, plan),
        "end": answer.end,
        "met": answer.met and answer.met.load,
        "undecided": [p.load for p in answer.undecided],
        "missed": answer.missed and answer.missed.load,
        "contradictions": list(answer.violations),
        "tolerance": plan.tolerance,
        "spent_s": answer.spent_s,
        "budget_s": plan.budget_s,
        "next": [probe._asdict() for probe in answer.asks],
        "loads": [_point(p) for p in answer.points],
    }


def _point(p: Point) -> Mapping[str, object]:
    limits = [
        {"limit": x.limit.text, "verdict": x.verdict, "why": x.why, "low": x.low, "high": x.high, "needs": x.needs}
        for x in p.limits
    ]
    shown = ("load", "verdict", "why", "requests", "window", "seconds", "clear")
    return {key: getattr(p, key) for key in shown} | {"cells": list(p.cells), "limits": limits}


def json_text(results: Sequence[Result]) -> str:
    return json.dumps({"schema": SCHEMA, "searches": [document(r) for r in results]}, allow_nan=False) + "\n"


FORMATS = {"terminal": text, "md": markdown, "json": json_text}
