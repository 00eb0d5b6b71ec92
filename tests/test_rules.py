"""Rules of a gate: what is typed, in which direction, and what a difference is."""

import math
import re
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench import rules
from llm_bench.errors import BenchError


def test_a_rule_says_metric_side_and_margin() -> None:
    found = rules.parse(["ttft_p95 <= +5%", "tokens_per_second>=-3%,error_rate<=+.5pp"])
    assert [(r.text, r.metric.name, r.op, r.points) for r in found] == [
        ("ttft_p95<=+5%", "ttft_p95", "<=", False),
        ("tokens_per_second>=-3%", "tokens_per_second", ">=", False),
        ("error_rate<=+.5pp", "error_rate", "<=", True),
    ]
    assert [r.change for r in found] == [0.05, -0.03, 0.005]
    assert [r.margin for r in found] == pytest.approx([math.log(1.05), math.log(0.97), 0.005])
    assert [r.side for r in found] == [1, -1, 1]


def test_a_candidate_may_be_asked_to_be_better() -> None:
    (rule,) = rules.parse(["ttft_p95<=-10%"])
    assert rule.margin == pytest.approx(math.log(0.9))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ttft_p95<=5%", "expected metric<=+x%"),
        ("ttft_p95<+5%", "expected metric<=+x%"),
        ("ttft_p95", "expected metric<=+x%"),
        ("ttft_p95<=+5", "expected metric<=+x%"),
        ("ttft_p95<=+5ms", "expected metric<=+x%"),
        ("ttft_p95<=+nan%", "expected metric<=+x%"),
        ("ttft_p95>=-5%", "of ttft_p95 lower is better, expected <="),
        ("tokens_per_second<=+5%", "of tokens_per_second higher is better, expected >="),
        ("ttft_p96<=+5%", "nearest: ttft_p9"),
        ("ttft<=+5%", "a series needs a reducer"),
        ("ttft_p95<=+5pp", "ttft_p95 is in ms, expected a change in percent, +5%"),
        ("error_rate<=+5%", "error_rate is in share, expected a change in points, +5pp"),
        ("ttft_p95<=-100%", "expected a change from -99.9 to +1000%"),
        ("error_rate<=+101pp", "expected a change from -100 to +100pp"),
        ("ttft_p95<=+5%,ttft_p95<=+9%", "ttft_p95 has two rules"),
    ],
)
def test_what_is_no_rule_is_refused_with_what_would_be_one(text: str, words: str) -> None:
    with pytest.raises(BenchError, match=re.escape(words)):
        rules.parse([text])


def test_differences_are_log_ratios_or_points_and_come_back_as_changes() -> None:
    percent, points = rules.parse(["ttft_p95<=+5%", "error_rate<=+1pp"])
    base, cand = np.array([100.0, 200.0]), np.array([110.0, 210.0])
    d = percent.differences(base, cand)
    assert d == pytest.approx([math.log(1.1), math.log(1.05)])
    assert [percent.as_change(x) for x in d] == pytest.approx([0.1, 0.05])
    assert percent.middle(base) == pytest.approx(math.sqrt(20_000))
    assert percent.middle(cand) / percent.middle(base) - 1 == pytest.approx(percent.as_change(float(d.mean())))
    assert points.differences(np.array([0.0]), np.array([0.02])) == [0.02]
    assert points.middle(np.array([0.0, 0.02])) == 0.01
    with pytest.raises(ValueError, match="a change in percent needs figures above 0"):
        percent.differences(np.zeros(1), np.ones(1))


@pytest.mark.parametrize(("share", "shown"), [
    (0.05, "+5%"), (0.059234, "+5.92%"), (-0.2345, "-23.4%"), (12.345, "+1230%"), (1e-9, "+0%"), (-1e-9, "+0%"),
    (0.000456, "+0.046%"), (0.0, "+0%"),
])  # fmt: skip
def test_a_change_is_said_in_three_digits(share: float, shown: str) -> None:
    assert rules.changed(share, points=False) == shown
    assert rules.changed(share, points=True) == shown.replace("%", "pp")


@given(st.text(max_size=30))
def test_any_text_is_a_rule_or_refused(text: str) -> None:
    with suppress(BenchError):
        rules.parse([text])


def test_how_differences_are_taken_without_a_rule() -> None:
    assert (rules.free("error_rate").points, rules.free("ttft_p50").points) == (True, False)
    assert (rules.free("goodput").op, rules.free("ttft_p50").op) == (">=", "<=")
