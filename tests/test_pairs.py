"""Pairs: sign flips against plain counting, bounds against the test they invert, verdicts on noise that is known."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.statistics import differences
from llm_bench import pairs

CASES = Path(__file__).parents[2] / "shared" / "cases"
few = st.lists(st.integers(-9, 9), min_size=1, max_size=8)


def flips(d: list[int]) -> list[int]:
    """The sum of every sign flip."""
    return [sum(s * x for s, x in zip(signs, d, strict=True)) for signs in itertools.product((1, -1), repeat=len(d))]


@settings(deadline=None)
@given(few, st.integers(-9, 9))
def test_p_is_the_share_of_flips_at_least_as_extreme(d: list[int], margin: int) -> None:
    moved = [x - margin for x in d]
    sums = flips(moved)
    assert pairs.sign_flip(np.array(d), margin) == sum(s >= sum(moved) for s in sums) / len(sums)
    assert pairs.sign_flip(np.array(d), margin, ">=") == sum(s <= sum(moved) for s in sums) / len(sums)


def test_p_and_bound_by_hand() -> None:
    # -1, 2, 3: of eight flips those with sums 4 and 6 are as far up. Subset means: -1, 0.5, 1, 4/3, 2, 2.5, 3.
    d = np.array([-1.0, 2, 3])
    assert pairs.sign_flip(d) == 2 / 8
    assert pairs.bound(d, alpha=0.26) == 2.5  # the second largest: with 2 of 8 a change is not yet rejected
    assert pairs.bound(d, alpha=0.125) == 3
    assert pairs.bound(d) is None


@settings(deadline=None)
@given(st.lists(st.integers(-9, 9), min_size=5, max_size=9))
def test_the_bound_inverts_the_test(d: list[int]) -> None:
    at = pairs.bound(np.array(d))
    assert at is not None
    assert pairs.sign_flip(np.array(d), at - 1e-6, ">=") > pairs.ALPHA >= pairs.sign_flip(np.array(d), at + 1e-6, ">=")


@settings(deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=5, max_size=8, unique=True))
def test_equal_arms_are_rejected_in_at_most_five_percent_whatever_the_noise(sizes: list[int]) -> None:
    """Exact: where arms are equal every sign pattern of these sizes is as likely."""
    rejected = [
        pairs.sign_flip(np.array(signs) * sizes) <= pairs.ALPHA
        for signs in itertools.product((1, -1), repeat=len(sizes))
    ]
    assert sum(rejected) / len(rejected) <= 0.05


def test_drawn_flips_stand_for_all() -> None:
    random = np.random.default_rng(0)
    d = random.normal(0.4, 1, 17)
    subsets = (np.arange(2**17)[:, None] >> np.arange(17)) & 1
    exact = float(np.mean(subsets @ d <= 1e-12))
    assert pairs.sign_flip(d) == pytest.approx(exact, abs=0.006)  # three standard deviations of 65,535 draws
    assert pairs.sign_flip(d) == pairs.sign_flip(d.copy())
    many = random.normal(0.01, 0.02, 60)
    assert pairs.bound(many) == pytest.approx(many.mean() + 1.671 * many.std(ddof=1) / math.sqrt(60), rel=0.05)


@settings(deadline=None)
@given(st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=9), st.floats(-0.2, 0.2))
def test_a_rule_the_other_way_round_is_the_mirror(d: list[float], margin: float) -> None:
    up, down = pairs.compare(np.array(d), margin), pairs.compare(-np.array(d), -margin, ">=")
    assert (up.verdict, up.p, up.p_worse) == (down.verdict, down.p, down.p_worse)
    assert up.bound == (None if down.bound is None else -down.bound)
    assert up.change == -down.change


@settings(deadline=None)
@given(st.lists(st.floats(-0.5, 0.5), min_size=6, max_size=9))
def test_the_interval_holds_the_change_and_the_bound(d: list[float]) -> None:
    got = pairs.compare(np.array(d), 0.0)
    assert got.low is not None and got.high is not None and got.bound is not None
    assert got.low - 1e-9 <= got.change <= got.bound + 1e-9 <= got.high + 2e-9


def test_a_change_that_is_the_margin_in_every_pair_passes() -> None:
    d = np.full(8, math.log(1.02))
    got = pairs.compare(d, math.log1p(0.02))
    assert (got.verdict, got.p) == (pairs.PASS, 1)


def test_four_pairs_can_prove_nothing_and_five_can() -> None:
    assert pairs.compare(np.full(4, 0.5), 0.0).verdict == pairs.INCONCLUSIVE
    assert pairs.compare(np.full(4, -0.5), 0.0).verdict == pairs.INCONCLUSIVE
    assert pairs.compare(np.full(5, 0.5), 0.0)[:2] == (pairs.FAIL, 1 / 32)
    assert pairs.compare(np.full(5, -0.5), 0.0).verdict == pairs.PASS
    assert [pairs.needed(tests) for tests in (1, 2, 8, 20)] == [5, 6, 8, 9]


def test_holm_by_hand() -> None:
    assert pairs.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert pairs.holm([0.5, 0.9]) == [1, 1]
    assert pairs.holm([]) == []


def test_of_many_rules_a_fail_pays_for_their_number() -> None:
    slow, equal = pairs.compare(np.full(6, 0.1), 0.0), pairs.compare(np.array([1, -1, 1, -1, 1, -1]) * 1e-3, 0.02)
    assert [c.verdict for c in pairs.judge([slow, equal])] == [pairs.FAIL, pairs.PASS]
    assert pairs.judge([slow, *[equal] * 3])[0].verdict == pairs.INCONCLUSIVE  # 4 / 64
    assert pairs.judge([slow, *[equal] * 3])[1].verdict == pairs.PASS


def test_what_has_no_logarithm_or_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"baseline \[0.0\]: a change in percent needs figures above 0"):
        pairs.log_ratios(np.array([0.0]), np.array([1.0]))
    with pytest.raises(ValueError, match="expected one or more finite numbers"):
        pairs.compare(np.array([math.nan]), 0.0)
    with pytest.raises(ValueError, match="expected one or more finite numbers"):
        pairs.compare(np.zeros(0), 0.0)


def test_detectable_change_is_found_as_often_as_it_says() -> None:
    random, n, sd = np.random.default_rng(1), 8, 0.01
    change = pairs.detectable(np.array([-sd, sd] * 2) * math.sqrt(3) / 2, 0.02, n_pairs=n)
    assert change is not None
    found = [pairs.sign_flip(change + sd * random.standard_normal(n), 0.02) <= 0.05 for _ in range(600)]
    assert np.mean(found) == pytest.approx(0.9, abs=0.04)


def test_more_pairs_detect_less() -> None:
    d = np.array([-0.01, 0.01, 0.0])
    reach = [pairs.detectable(d, 0.0, n_pairs=n) for n in (5, 6, 8, 10, 12, 16, 24)]
    assert all(a and b and a > b for a, b in itertools.pairwise(reach))
    assert pairs.detectable(d, 0.0) is None and pairs.detectable(d[:1], 0.0, n_pairs=8) is None
    assert pairs.detectable(d, 0.0, alpha=0.05 / 8, n_pairs=7) is None


def test_a_gate_that_passes_equal_code_and_catches_six_percent() -> None:
    random = np.random.default_rng(38)
    base, noise = 100 * np.exp(0.01 * random.standard_normal(8)), np.exp(0.01 * random.standard_normal(8))
    margin = math.log1p(0.03)
    assert pairs.compare(pairs.log_ratios(base, base * noise), margin).verdict == pairs.PASS
    slow = pairs.compare(pairs.log_ratios(base, 1.06 * base * noise), margin)
    assert slow.verdict == pairs.FAIL and math.expm1(slow.change) == pytest.approx(0.06, abs=0.01)
    restless = np.array([1.26, 0.8, 0.99, 1.25, 0.81, 1.01, 0.78, 1.27])  # the same code on a machine that others use
    assert pairs.compare(pairs.log_ratios(base, base * restless), margin).verdict == pairs.INCONCLUSIVE


@pytest.mark.skipif(not CASES.exists(), reason="the shared cases are not beside this repository")
@pytest.mark.parametrize(
    ("arms", "p", "verdict"),
    [
        (("base", "same"), 89 / 256, pairs.PASS),
        (("base", "slow"), 1 / 256, pairs.FAIL),
        (("noisyA", "noisyB"), 118 / 256, pairs.INCONCLUSIVE),
    ],
)
def test_case_38(arms: tuple[str, str], p: float, verdict: str) -> None:
    rows = [json.loads(line) for line in (CASES / "38-gate-noise.runs.jsonl").read_text().splitlines()]
    a, b = (np.array([r["ttft_p95_ms"] for r in rows if r["set"] == arm]) for arm in arms)
    got = pairs.compare(pairs.log_ratios(a, b), math.log1p(0.03))
    assert (got.p_worse, got.verdict) == (p, verdict)


def test_gate_on_queues() -> None:
    """Reduced from reports/statistics: load 0.8, 10 pairs, 1% run noise, a 2% margin."""
    margin = math.log1p(0.02)
    equal = [differences((1, k), 0.0, 0.01) for k in range(12)]
    slower = [differences((2, k), 0.05, 0.01) for k in range(12)]
    for metric in ("ttft_p95", "tpot_p50"):
        assert sum(pairs.compare(d[metric], margin).verdict == pairs.FAIL for d in equal) <= 1
        assert sum(pairs.compare(d[metric], margin).verdict == pairs.FAIL for d in slower) >= 11
