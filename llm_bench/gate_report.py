"""What a gate found: for a terminal, for a pull request, for a CI's test report and benchmark charts, for programs."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from llm_bench import grid
from llm_bench.gate import Gate, Objection, Test
from llm_bench.pairs import FAIL, INCONCLUSIVE, PASS
from llm_bench.rules import HARMLESS
from llm_bench.words import number

SCHEMA = 1  # of the JSON document; counts up when a key changes its meaning
LEGEND = (
    "Means are of the pairs' figures: geometric for %, where a report's are arithmetic. The change is the candidate's "
    "against the baseline's with its "
    "two-sided 95% interval, p of a change beyond the rule is one-sided by exact sign flips, by Holm over all tests. "
    "The smallest change found is what so many pairs of this spread call FAIL with chance 0.9."
)


def rows(gate: Gate) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row a test."""
    headings = [
        "load",
        "rule",
        gate.baseline,
        gate.candidate,
        "change",
        "95% interval",
        "p (Holm)",
        "smallest found",
        "verdict",
    ]
    return headings, [_row(test) for test in gate.tests]


def _row(test: Test) -> list[str]:
    found, rule, middles = test.comparison, test.rule, test.middles()
    unit = rule.metric.unit
    after = "" if unit in ("1", "share") or not middles else f" {unit}"
    shown = [f"{number(x, unit)}{after}" for x in middles or (None, None)]
    if found is None or test.p is None:
        return [test.load, rule.text, *shown, "–", "–", "–", "–", test.verdict]
    interval = "–"
    if found.low is not None and found.high is not None:
        interval = f"{rule.in_words(found.low)} to {rule.in_words(found.high)}"
    reach = "–" if test.detectable is None else rule.in_words(test.detectable)
    return [test.load, rule.text, *shown, rule.in_words(found.change), interval, f"{test.p:.2g}", reach, test.verdict]


def heading(gate: Gate) -> str:
    """The verdict of all and what it is of: the first line of each format."""
    counts = {verdict: sum(t.verdict == verdict for t in gate.tests) for verdict in (PASS, FAIL, INCONCLUSIVE)}
    said = ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n)
    pairs = ", ".join(f"{n} at {load}" for load, n in gate.pairs.items())
    return f"{gate.verdict}: {gate.candidate} against {gate.baseline}; tests: {said}; pairs: {pairs}"


def counted(objections: Sequence[Objection], accepted: Sequence[str] = (), tests: Sequence[Test] = ()) -> list[str]:
    """Doubts in words, a line a kind: its first, how many more there are, and where it is no reason, why."""
    against = {o.kind for test in tests for o in test.objections}
    spared = {kind: why for test in tests for kind, why in test.spared.items() if kind not in against}
    lines = []
    for kind in dict.fromkeys(o.kind for o in objections):
        first, *more = (o for o in objections if o.kind == kind)
        place = " at ".join(filter(None, [first.where, first.load]))
        others = f" ({len(more)} more such)" if more else ""
        lines.append(f"{kind}: {place}: {first.text}{others}{_reserve(kind, accepted, spared)}")
    return lines


def _reserve(kind: str, accepted: Sequence[str], spared: Mapping[str, str]) -> str:
    """Why a doubt is no reason against a verdict; "" where it is one, or there was no verdict to doubt."""
    if kind in accepted:
        return "; accepted"
    why = {**HARMLESS, **spared}.get(kind)
    return f"; no reason against a verdict: {why}" if why else ""


def text(gate: Gate) -> str:
    """For a terminal."""
    lines = [f"{heading(gate)}\n\n", grid.terminal(*rows(gate), left=(0, 1, 8)), "\n"]
    lines += [f"  {t.name}: {t.verdict}: {t.why}\n" for t in gate.tests]
    lines += [f"  doubt: {line}\n" for line in counted(gate.objections, gate.accepted, gate.tests)] or ["  no doubts\n"]
    return "".join([*lines, f"\n{LEGEND}\n"])


def markdown(gate: Gate) -> str:
    """For the comment on a pull request, or a job's summary."""
    lines = [f"### Gate: {grid.escaped(heading(gate))}\n\n", grid.markdown(*rows(gate), left=(0, 1, 8)), "\n"]
    lines += [f"- **{t.verdict}** {grid.escaped(f'{t.name}: {t.why}')}\n" for t in gate.tests]
    lines += [f"- doubt: {grid.escaped(line)}\n" for line in counted(gate.objections, gate.accepted, gate.tests)]
    return "".join([*lines, f"\n<sub>{LEGEND}</sub>\n"])


# ---- for programs


def document(gate: Gate) -> dict[str, Any]:
    """Changes, bounds and margins are shares: 0.05 is +5%, or 5 percentage points."""
    return {
        "schema": SCHEMA,
        "verdict": gate.verdict,
        "baseline": gate.baseline,
        "candidate": gate.candidate,
        "pairs": gate.pairs,
        "tests": [_document(test) for test in gate.tests],
        "doubts": [o._asdict() for o in gate.objections],
        "accepted": list(gate.accepted),
    }


def _document(test: Test) -> dict[str, Any]:
    found, rule, middles = test.comparison, test.rule, test.middles()

    def share(difference: float | None) -> float | None:
        return None if difference is None else rule.as_change(difference)

    return {
        "rule": rule.text,
        "metric": rule.metric.name,
        "unit": rule.metric.unit,
        "load": test.load,
        "verdict": test.verdict,
        "why": test.why,
        "margin": rule.change,
        "in_points": rule.points,
        "pairs": [
            {"pair": n, "baseline": base.value, "candidate": cand.value}
            for n, (base, cand) in zip(test.numbers, test.values, strict=True)
        ],
        "baseline": middles and middles[0],
        "candidate": middles and middles[1],
        "change": share(found and found.change),
        "interval_95": None if found is None or found.low is None else [share(found.low), share(found.high)],
        "bound_95": share(found and found.bound),
        "p": found and found.p,
        "p_holm": test.p,
        "smallest_change_found": share(test.detectable),
        "doubts": [o.kind for o in test.objections],
        "doubts_weighed": dict(test.spared),  # kind: why it is no reason against the verdict
    }


def json_text(gate: Gate) -> str:
    return json.dumps(document(gate), allow_nan=False) + "\n"


def chart_json(gate: Gate, better: str) -> str:
    """The candidate's figures as `[{name, unit, value, range, extra}]`, of the metrics of which `better` is better.

    `lower` is what github-action-benchmark calls customSmallerIsBetter, `higher` customBiggerIsBetter: a file of it has
    one direction. `range` is half the distance of the smallest and the largest figure of the pairs.
    """
    out = []
    for test in gate.tests:
        middles = test.middles()
        if middles is None or test.rule.metric.better != better:
            continue
        figures = [cand.value for _, cand in test.values if cand.value is not None]
        changed = test.rule.in_words(test.comparison.change) if test.comparison else "–"
        out.append(
            {
                "name": f"{test.rule.metric.name} at {test.load}",
                "unit": test.rule.metric.unit,
                "value": middles[1],
                "range": f"± {(max(figures) - min(figures)) / 2:.4g}",
                "extra": f"{changed} against {gate.baseline}, {test.rule.text}: {test.verdict}\n{test.why}",
            }
        )
    return json.dumps(out, allow_nan=False) + "\n"


# ---- JUnit XML

_UNSAYABLE = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
Case = tuple[str, str, str, str]  # suite, name, verdict, why


def junit(gate: Gate) -> str:
    """A gate's tests as JUnit XML."""
    suite = f"llm-bench gate {gate.candidate} against {gate.baseline}"
    cases = [(suite, test.name, test.verdict, test.why) for test in gate.tests]
    cases += [(suite, f"{o.kind} at {o.load}", INCONCLUSIVE, f"{o.where}: {o.text}") for o in gate.against_all]
    return _xml(cases)


def _xml(cases: Sequence[Case]) -> str:
    root = ElementTree.Element("testsuites")
    for suite in dict.fromkeys(case[0] for case in cases):
        mine = [case for case in cases if case[0] == suite]
        bad = sum(verdict == FAIL for _, _, verdict, _ in mine)
        open_ = sum(verdict not in (PASS, FAIL) for _, _, verdict, _ in mine)
        facts = {"tests": str(len(mine)), "failures": str(bad), "errors": str(open_), "skipped": "0"}
        node = _node(root, "testsuite", {"name": suite, **facts})
        for _, name, verdict, why in mine:
            case = _node(node, "testcase", {"classname": suite, "name": name})
            if verdict == PASS:
                _node(case, "system-out", {}).text = _printable(why)
                continue
            kind = "failure" if verdict == FAIL else "error"  # undecided must not look like a success
            # Some readers show the attribute, some the text.
            _node(case, kind, {"type": verdict, "message": why}).text = _printable(f"{verdict}: {why}")
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _node(parent: ElementTree.Element, tag: str, attributes: Mapping[str, str]) -> ElementTree.Element:
    return ElementTree.SubElement(parent, tag, {key: _printable(value) for key, value in attributes.items()})


def _printable(words: str) -> str:
    """Without what XML 1.0 cannot say (2.2, Char): control characters, halves of surrogate pairs, U+FFFE, U+FFFF."""
    return _UNSAYABLE.sub("\ufffd", words)
