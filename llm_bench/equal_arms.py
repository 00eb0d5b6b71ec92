"""A gate on equal arms: how often it would cry wolf, and what it could find, on this machine with these pairs."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from llm_bench import grid, pairs
from llm_bench.gate import Gate, Objection, Test, detectable, settle
from llm_bench.gate_report import counted, document, heading
from llm_bench.pairs import ALPHA, FAIL, INCONCLUSIVE, PASS

DEFAULT_RULES = ("ttft_p95<=+0%", "tpot_p95<=+0%", "tokens_per_second>=-0%", "error_rate<=+0pp")
RELABELLINGS = 300  # a share of 5% is then known to about 2.5 points; at 16 pairs each takes 4 ms a test
ALL_PAIRS = 8  # so many pairs of one load have 256 relabellings: all are tried
SEED = 38


class Relabelled(NamedTuple):
    """What the gate says where arms of these pairs change names: shares of all relabellings tried."""

    tried: int
    every: bool  # all that there are; else drawn at random
    failed: float  # at least one FAIL, by Holm, at the rules' margins
    failed_at_zero: float  # the same at no margin, doubts aside: what ALPHA promises
    passed: float  # PASS of every test
    doubted: float  # INCONCLUSIVE where doubts alone forbid a verdict on one of the tests


def relabel(gate: Gate) -> Relabelled:
    """The arms are equal, so either name in a pair is as likely: within each pair of each load they are swapped.

    A swap turns the sign of all metrics of the pair, and what is doubted of one arm is doubted of the other. A test
    with an undefined figure is left aside.
    """
    tests = [test for test in gate.tests if test.differences is not None]
    counts = {test.load: len(test.numbers) for test in tests}
    signs, every = _signs(list(counts.values()))
    edges = np.cumsum([0, *counts.values()])
    columns = {load: slice(int(a), int(b)) for load, a, b in zip(counts, edges[:-1], edges[1:], strict=True)}
    said = np.array([_says(tests, row, columns) for row in signs]).reshape(-1, 4)
    if gate.against_all:
        said[:, 2] = False
    return Relabelled(len(signs), every, *(float(share) for share in said.mean(axis=0)))


def _signs(counts: Sequence[int]) -> tuple[np.ndarray, bool]:
    """(k, pairs of all loads) of 1 and -1."""
    n = sum(counts)
    if n <= ALL_PAIRS:
        return 1 - 2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1), True
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([SEED, n])))
    return 1 - 2 * random.integers(0, 2, (RELABELLINGS, n)), False


def _says(tests: Sequence[Test], signs: np.ndarray, columns: dict[str, slice]) -> tuple[bool, bool, bool, bool]:
    """(a FAIL, a FAIL at no margin, all PASS, a verdict that only doubts forbid) with one set of names."""
    renamed = [_renamed(test, signs[columns[test.load]]) for test in tests]
    found, p_zero, passed = list[tuple[str, float]](), [], True
    for test in renamed:
        assert test.differences is not None
        d, rule = test.differences, test.rule
        if not d.any() and rule.side * rule.margin >= 0:  # an error rate of 0 throughout: as it is, whatever the names
            found.append((PASS, 1.0))
            p_zero.append(1.0)
            continue
        p = pairs.sign_flip(d, rule.margin, rule.op)
        p_zero.append(pairs.sign_flip(d, 0.0, rule.op) if rule.margin else p)
        verdict = FAIL if p <= ALPHA else INCONCLUSIVE
        # The bound is the slow part, and of no use once one test does not pass and there is no doubt to weigh.
        if verdict != FAIL and (passed or test.doubts):
            verdict = pairs.verdict(p, pairs.bound(rule.side * d), rule.side * rule.margin)
        passed = passed and verdict == PASS
        found.append((verdict, p))
    settled = settle(renamed, found)
    failed = any(verdict == FAIL and not weighed.against for verdict, _, weighed in settled)
    doubted = any(weighed.against for _, _, weighed in settled)
    at_zero = any(p <= ALPHA for p in pairs.holm(p_zero))
    return failed, at_zero, passed and not doubted, doubted and not failed


def _renamed(test: Test, signs: np.ndarray) -> Test:
    """With the arms of those pairs swapped whose sign is -1."""
    assert test.differences is not None
    swapped = {number for number, sign in zip(test.numbers, signs, strict=True) if sign < 0}
    values = [(b, a) if n in swapped else (a, b) for n, (a, b) in zip(test.numbers, test.values, strict=True)]
    doubts = [_of_other(o) if o.pair in swapped else o for o in test.doubts]
    return test._replace(values=values, differences=test.differences * signs, doubts=doubts)


def _of_other(o: Objection) -> Objection:
    if o.arm is None:
        return o
    return o._replace(arm="candidate" if o.arm == "baseline" else "baseline")


def rows(gate: Gate) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row a test: spread of a pair, and the smallest change that is found with these and more pairs."""
    headings = ["load", "metric", "pairs", "difference seen", "spread of a pair", "found with these", "with twice them"]
    return headings, [_row(test, len(gate.tests)) for test in gate.tests]


def _row(test: Test, tests: int) -> list[str]:
    rule, d, n = test.rule, test.differences, len(test.numbers)
    if d is None:
        return [test.load, rule.metric.name, str(n), *["–"] * 4]
    found = []
    for many in (n, 2 * n):
        reach = detectable(test, tests, many)
        found.append("–" if reach is None else rule.in_words(reach))
    spread = "–" if n < 2 else rule.in_words(float(np.std(d, ddof=1))).lstrip("+")
    return [test.load, rule.metric.name, str(n), rule.in_words(float(np.mean(d))), spread, *found]


def sentences(gate: Gate, relabelled: Relabelled) -> list[str]:
    """What was tried and what came of it, as sentences."""
    which = "all" if relabelled.every else "drawn of all"
    return [
        f"Simulated from these data: the names of the arms swapped within pairs, {relabelled.tried} ways ({which}); "
        "no request was sent anew, so that it knows only the noise that these pairs met.",
        f"False alarms: {relabelled.failed:.1%} of the ways FAIL at the rules given, {relabelled.failed_at_zero:.1%} "
        f"with no margin, doubts aside ({ALPHA:.0%} allowed). PASS of all tests: {relabelled.passed:.1%}. INCONCLUSIVE "
        f"because doubts forbid a verdict: {relabelled.doubted:.1%}.",
        "The smallest change found fails with chance 0.9 among these tests, were the noise of pairs normal with the "
        "spread seen here.",
        *(f"{t.name}: {t.why}" for t in gate.tests if t.verdict == FAIL or t.differences is None),
    ]


def text(gate: Gate, relabelled: Relabelled) -> str:
    """For a terminal."""
    lines = [f"Equal arms, as they were named: {heading(gate)}\n\n", grid.terminal(*rows(gate), left=(0, 1)), "\n"]
    lines += [f"  {line}\n" for line in sentences(gate, relabelled)]
    lines += [f"  doubt: {line}\n" for line in counted(gate.objections, gate.accepted, gate.tests)] or ["  no doubts\n"]
    return "".join(lines)


def markdown(gate: Gate, relabelled: Relabelled) -> str:
    lines = [
        f"### Gate on equal arms: {grid.escaped(heading(gate))}\n\n",
        grid.markdown(*rows(gate), left=(0, 1)),
        "\n",
    ]
    lines += [f"- {grid.escaped(line)}\n" for line in sentences(gate, relabelled)]
    return "".join(
        [*lines, *(f"- doubt: {grid.escaped(line)}\n" for line in counted(gate.objections, gate.accepted, gate.tests))]
    )


def json_text(gate: Gate, relabelled: Relabelled) -> str:
    whole: dict[str, Any] = document(gate) | {"relabelled": relabelled._asdict()}
    return json.dumps(whole, allow_nan=False) + "\n"


def exit_code(gate: Gate) -> int:
    """1: equal arms were called different. 3: a doubt, so that nothing is known. A margin too narrow is neither."""
    if gate.verdict == FAIL:
        return 1
    return 3 if gate.against_all or any(t.objections or t.differences is None for t in gate.tests) else 0
