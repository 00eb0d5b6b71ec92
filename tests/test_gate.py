"""Gates on record files of eight pairs: PASS, FAIL, INCONCLUSIVE; what doubts and missing figures do to them."""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_bench import equal_arms, gate, gate_report, metrics, objectives, pairing, pairs, results, rules
from llm_bench.client import CLIENT_LIMITED
from llm_bench.doubts import CHECKS
from llm_bench.errors import BenchError
from llm_bench.facts import EITHER_WAY, TOO_HIGH, TOO_LOW, Effect
from llm_bench.gate import Gate, Objection
from llm_bench.pairs import FAIL, INCONCLUSIVE, PASS
from llm_bench.records import Record
from llm_bench.series import SERIES
from tests import sample_arms
from tests.sample_arms import BASE, LOAD, NOISY, SAME, SLOW, write_arms, write_book

CASES = Path(__file__).parents[2] / "shared" / "cases"
FASTER = LOAD | {"rate": 200.0, "label": "rate=200/s"}


def judged(folder: Path, *texts: str, accepted: tuple[str, ...] = (), slo: str = "") -> Gate:
    run = results.load_run(folder)
    base, cand = pairing.arm(run, "base"), pairing.arm(run, "cand")
    return of_arms(base, cand, *texts, accepted=accepted, slo=slo)


def of_arms(base: pairing.Arm, cand: pairing.Arm, *texts: str, accepted: tuple[str, ...] = (), slo: str = "") -> Gate:
    paired = pairing.pair_up(base, cand)
    context = objectives.parse(slo).context()
    names = base.name, cand.name
    return gate.judge(paired.pairs, names, rules.parse(texts), paired.objections, accepted, context)


@pytest.mark.parametrize(("candidate", "verdict"), [(SAME, PASS), (SLOW, FAIL), (NOISY, INCONCLUSIVE), (BASE, PASS)])
def test_equal_code_passes_six_percent_fails_and_noise_is_neither(
    tmp_path: Path, candidate: list[float], verdict: str
) -> None:
    got = judged(write_arms(tmp_path / "run", {"base": BASE, "cand": candidate}), "ttft_p95<=+3%")
    (test,) = got.tests
    assert (test.verdict, got.verdict, got.objections) == (verdict, verdict, [])
    # TTFTs of a cell are in proportion to the figure that it was made of.
    by_hand = pairs.compare(np.log(np.array(candidate) / BASE), math.log(1.03))
    assert test.comparison is not None
    assert test.comparison.change == pytest.approx(by_hand.change, abs=1e-6)
    assert test.p == by_hand.p
    assert gate.EXIT_CODES[got.verdict] == {PASS: 0, FAIL: 1, INCONCLUSIVE: 3}[verdict]


def test_why_says_the_change_the_margin_and_what_would_help(tmp_path: Path) -> None:
    slow = judged(write_arms(tmp_path / "a", {"base": BASE, "cand": SLOW}), "ttft_p95<=+3%").tests[0]
    assert slow.why == "+6.01% is worse than +3%, p = 0.0039"
    same = judged(write_arms(tmp_path / "b", {"base": BASE, "cand": SAME}), "ttft_p95<=+3%").tests[0]
    assert same.why == "+0.014%, its 95% bound +0.352% is within +3%"
    restless = [*reversed(NOISY)]
    noisy = judged(write_arms(tmp_path / "c", {"base": NOISY, "cand": restless}), "ttft_p95<=+3%").tests[0]
    assert noisy.why.startswith("noise exceeds the margin: +0%, its 95% bound +")
    assert noisy.why.endswith("use a quieter machine or a wider margin")
    wide = judged(tmp_path / "c", "ttft_p95<=+12%").tests[0]
    assert "pairs of this spread equal arms would pass in 90%" in wide.why


def test_how_many_pairs_would_decide_is_how_many_would(tmp_path: Path) -> None:
    """The figure is checked by drawing so many pairs of equal arms with the spread seen."""
    candidate = [b * f for b, f in zip(BASE, (1.03, 0.98, 1.02, 0.97, 1.03, 0.97, 1.01, 1.0), strict=True)]
    (test,) = judged(write_arms(tmp_path / "run", {"base": BASE, "cand": candidate}), "ttft_p95<=+1.6%").tests
    assert test.differences is not None
    said = int(test.why.split("with ")[-1].split()[0])
    random, spread = np.random.default_rng(5), float(np.std(test.differences, ddof=1))
    passed = [
        pairs.compare(spread * random.standard_normal(said), test.rule.margin).verdict == PASS for _ in range(100)
    ]
    assert np.mean(passed) == pytest.approx(0.9, abs=0.1)


def test_a_throughput_may_fall_by_its_margin_and_no_further(tmp_path: Path) -> None:
    def fewer(ttft_ms: float, salt: int) -> list[Record]:
        return sample_arms.rows(tokens=round(ttft_ms), salt=salt)

    arms = {"base": [10.0] * 6, "cand": [9.0] * 6}
    folder = write_arms(tmp_path / "run", arms, of=fewer)
    accepted = ("delivered tokens",)
    (fine,) = judged(folder, "tokens_per_second>=-20%", accepted=accepted).tests
    assert "not the same work" in fine.why  # 10% fewer tokens are asked of the candidate
    assert fine.comparison is not None and fine.comparison.verdict == PASS
    assert fine.detectable is None  # pairs without any noise do not say what they could find
    (bad,) = judged(folder, "tokens_per_second>=-5%", accepted=accepted).tests
    assert bad.comparison is not None and bad.comparison.verdict == FAIL


@pytest.mark.skipif(not CASES.exists(), reason="the shared cases are not beside this repository")
@pytest.mark.parametrize(
    ("arms", "p_worse", "said"),
    [
        (("base", "same"), 89 / 256, "PASS: +0.0"),
        (("base", "slow"), 1 / 256, "FAIL: +5.9"),
        (("noisyA", "noisyB"), 118 / 256, "INCONCLUSIVE: noise exceeds the margin: +0.1"),
    ],
)
def test_case_38(tmp_path: Path, arms: tuple[str, str], p_worse: float, said: str) -> None:
    rows = [json.loads(line) for line in (CASES / "38-gate-noise.runs.jsonl").read_text().splitlines()]
    base, cand = ([r["ttft_p95_ms"] for r in rows if r["set"] == arm] for arm in arms)
    (test,) = judged(write_arms(tmp_path / "run", {"base": base, "cand": cand}), "ttft_p95<=+3%").tests
    assert test.comparison is not None and test.comparison.p_worse == p_worse
    assert f"{test.verdict}: {test.why}".startswith(said)


# ---- several tests


def test_rules_times_loads_are_one_family(tmp_path: Path) -> None:
    folder = write_arms(tmp_path / "run", {"base": BASE, "cand": SLOW}, [LOAD, FASTER])
    got = judged(folder, "ttft_p95<=+3%", "error_rate<=+1pp")
    assert [(t.load, t.rule.metric.name, t.verdict) for t in got.tests] == [
        ("rate=100/s", "ttft_p95", FAIL),
        ("rate=100/s", "error_rate", PASS),
        ("rate=200/s", "ttft_p95", FAIL),
        ("rate=200/s", "error_rate", PASS),
    ]
    assert [t.p for t in got.tests] == pytest.approx([4 / 256, 1, 4 / 256, 1])
    assert (got.verdict, got.pairs) == (FAIL, {"rate=100/s": 8, "rate=200/s": 8})


def test_a_fail_pays_for_the_number_of_tests(tmp_path: Path) -> None:
    """7 of 8 flips: p = 5 / 256 alone, over 0.05 among four."""
    candidate = [b * f for b, f in zip(BASE, [1.05] * 7 + [0.98], strict=True)]
    folder = write_arms(tmp_path / "run", {"base": BASE, "cand": candidate})
    (alone,) = judged(folder, "ttft_p95<=+1.5%").tests
    assert alone.verdict == FAIL and alone.p is not None and 0.0125 < alone.p <= 0.05
    more = judged(folder, "ttft_p95<=+1.5%", "error_rate<=+1pp", "drop_rate<=+1pp", "cancel_rate<=+1pp").tests[0]
    assert more.verdict == INCONCLUSIVE
    assert "by itself" in more.why and "not among 4 tests" in more.why


@pytest.mark.parametrize(("texts", "need"), [(1, 5), (2, 6), (4, 7), (8, 8)])
def test_too_few_pairs_are_refused_with_how_many_are_needed(tmp_path: Path, texts: int, need: int) -> None:
    names = ["ttft_p50", "ttft_p90", "ttft_p95", "ttft_p99", "e2e_p50", "e2e_p90", "e2e_p95", "e2e_p99"][:texts]
    few, enough = BASE[: need - 1], BASE[:need]
    folder = write_arms(tmp_path / "few", {"base": few, "cand": few})
    of = "1 test needs" if texts == 1 else f"{texts} tests .* need"
    with pytest.raises(BenchError, match=f"{need - 1} pairs at rate=100/s, and {of} {need} at least"):
        judged(folder, *(f"{name}<=+5%" for name in names))
    folder = write_arms(tmp_path / "enough", {"base": enough, "cand": enough})
    assert judged(folder, *(f"{name}<=+5%" for name in names)).verdict == PASS


# ---- doubts


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_arms(tmp_path_factory.mktemp("slow") / "run", {"base": BASE, "cand": SLOW})


@pytest.fixture(scope="module")
def same(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_arms(tmp_path_factory.mktemp("same") / "run", {"base": BASE, "cand": SAME})


def with_doubt(run: Path, folder: Path, kind: str, arm: str) -> Path:
    """A copy of the run whose own book says a doubt of the arm's third cell."""
    shutil.copytree(run, folder)
    entries = [
        {"name": m.name, "target": m.target, "load": LOAD, "end": {"reason": "exhausted"}}
        | ({"doubts": [{"kind": kind, "text": "so it was"}]} if (m.target, pairing.number_of(m)) == (arm, 2) else {})
        for m in results.load_run(folder).cells
    ]
    write_book(folder, cells=entries)
    return folder


def doubt(kind: str, effect: Effect, base: Sequence[int] = (), cand: Sequence[int] = ()) -> list[Objection]:
    """Of the cells of those pairs."""
    sides: tuple[tuple[gate.Name, str, Sequence[int]], ...] = (("baseline", "base", base), ("candidate", "cand", cand))
    return [
        Objection(LOAD["label"], f"{name}, pair {pair}", kind, "so it was", effect, arm, pair)
        for arm, name, numbers in sides
        for pair in numbers
    ]


def doubted(folder: Path, doubts: Sequence[Objection], *texts: str) -> Gate:
    run = results.load_run(folder)
    found = pairing.pair_up(pairing.arm(run, "base"), pairing.arm(run, "cand"))
    return gate.judge(found.pairs, ("base", "cand"), rules.parse(texts), [*found.objections, *doubts])


OF_PAIRS = (rules.TARGETS, rules.NETWORK)  # the gate finds out for itself in what the two arms differ


@pytest.mark.parametrize("kind", [k for k in [*CHECKS, "a kind that is not known"] if k not in OF_PAIRS])
@pytest.mark.parametrize("arm", ["base", "cand"])
def test_a_doubt_of_either_way_forbids_a_verdict_or_says_why_not(
    tmp_path: Path, slow: Path, same: Path, kind: str, arm: str
) -> None:
    for folder, verdict in ((slow, FAIL), (same, PASS)):
        got = judged(with_doubt(folder, tmp_path / verdict, kind, arm), "ttft_p95<=+3%")
        (test,) = got.tests
        assert (kind, f"{arm}, pair 2") in {(o.kind, o.where) for o in got.objections}
        if kind in gate.OF_CELLS:
            about = rules.counts(kind, metrics.parse("ttft_p95"))
            assert got.verdict == verdict and (kind in test.spared) == about
        elif kind in rules.HARMLESS or not rules.counts(kind, metrics.parse("ttft_p95")):
            assert (got.verdict, test.doubts) == (verdict, [])
        else:
            assert got.verdict == INCONCLUSIVE and test.why.startswith(f"doubt: {kind} (else {verdict}: ")
    if got.verdict == INCONCLUSIVE:
        assert test.why == f"doubt: {kind} (else PASS: +0.014%, its 95% bound +0.352% is within +3%)"


@pytest.mark.parametrize(
    ("arm", "effect", "fail", "passes"),
    [
        ("cand", TOO_LOW, FAIL, INCONCLUSIVE),  # overload: a longer run would be worse
        ("cand", TOO_HIGH, INCONCLUSIVE, PASS),
        ("base", TOO_LOW, INCONCLUSIVE, PASS),
        ("base", TOO_HIGH, FAIL, INCONCLUSIVE),
        ("cand", EITHER_WAY, INCONCLUSIVE, INCONCLUSIVE),
        ("base", EITHER_WAY, INCONCLUSIVE, INCONCLUSIVE),
    ],
)
def test_a_doubt_forbids_only_what_it_could_have_made(
    slow: Path, same: Path, arm: str, effect: Effect, fail: str, passes: str
) -> None:
    said = doubt("overloaded", effect, **{arm: [0, 1]})
    worse, alike = doubted(slow, said, "ttft_p95<=+3%"), doubted(same, said, "ttft_p95<=+3%", "tokens_per_second>=-3%")
    assert (worse.verdict, alike.verdict) == (fail, passes)
    for got, verdict in ((worse, fail), (alike, passes)):
        spared = "without it the candidate would look" in gate_report.text(got)
        assert spared == (verdict != INCONCLUSIVE)


def test_what_is_doubted_of_both_cells_of_a_pair_alike_made_no_difference_between_them(slow: Path, same: Path) -> None:
    """Arms that both answer too briefly, or both fall behind: it may hide a difference, and makes none."""
    alike = doubt("delivered tokens", TOO_LOW, range(8), range(8))
    assert doubted(slow, alike, "ttft_p95<=+3%").verdict == FAIL
    assert doubted(same, alike, "ttft_p95<=+3%").verdict == INCONCLUSIVE
    more = doubt("delivered tokens", TOO_LOW, range(8), range(7))
    assert doubted(slow, more, "ttft_p95<=+3%").verdict == INCONCLUSIVE
    unknown = doubt("delivered tokens", EITHER_WAY, range(8), range(8))
    assert doubted(slow, unknown, "ttft_p95<=+3%").verdict == INCONCLUSIVE


def test_a_rate_errs_the_other_way_and_a_doubt_flatters_it_too(tmp_path: Path) -> None:
    """Fewer tokens a second is worse; latencies that are too low come with rates that are too high."""

    def fewer(ttft_ms: float, salt: int) -> list[Record]:
        return sample_arms.rows(100.0, tokens=3 if ttft_ms in SLOW else 4, salt=salt)

    folder = write_arms(tmp_path / "run", {"base": BASE, "cand": SLOW}, of=fewer)
    run = results.load_run(folder)
    found = pairing.pair_up(pairing.arm(run, "base"), pairing.arm(run, "cand"))
    for said, verdict in ((doubt("x", TOO_LOW, cand=[1]), FAIL), (doubt("x", TOO_LOW, base=[1]), INCONCLUSIVE)):
        of = rules.parse(["tokens_per_second>=-5%"])
        assert gate.judge(found.pairs, ("base", "cand"), of, said).verdict == verdict


def test_a_candidate_that_cannot_carry_the_load_fails(tmp_path: Path) -> None:
    """Records of a backlog that grows: its percentiles depend on how long the run was, and grow with it."""

    def queueing(ttft_ms: float, salt: int) -> list[Record]:
        made = sample_arms.rows(100.0, salt=salt)
        behind = 6_000_000 if ttft_ms in SLOW else 0  # ns a request: 10 ms apart they come, 16 ms apart they leave
        return [
            replace(r, event_ns=[t + i * behind for t in r.event_ns], end_ns=r.end_ns + i * behind)
            for i, r in enumerate(made)
        ]

    got = judged(write_arms(tmp_path / "run", {"base": BASE, "cand": SLOW}, of=queueing), "ttft_p95<=+5%",
                 "error_rate<=+1pp")  # fmt: skip
    assert len([o for o in got.objections if o.kind == "overloaded"]) == 8
    assert [t.verdict for t in got.tests] == [FAIL, INCONCLUSIVE]  # nothing failed yet: a longer run may tell
    assert gate.EXIT_CODES[got.verdict] == 1


# ---- doubts that come and go


@pytest.mark.parametrize(
    ("base", "cand", "verdict"),
    [
        ([0, 3], [1], FAIL),
        ([], [1, 5], FAIL),  # a FAIL takes nearly every pair
        ([0, 1, 2, 3], [0, 1, 2, 3], FAIL),  # the same noise in both
        ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], INCONCLUSIVE),  # in over half of all cells: it is this client that is seen
        ([], [0, 1, 2], INCONCLUSIVE),  # Fisher, one-sided: 56 / 560
        ([], [*range(8)], INCONCLUSIVE),
        ([*range(8)], [], FAIL),
    ],
)
def test_stalls_of_the_client_forbid_a_fail_where_the_candidate_has_more_of_them(
    slow: Path, base: list[int], cand: list[int], verdict: str
) -> None:
    got = doubted(slow, doubt("client stalled", TOO_HIGH, base, cand), "ttft_p95<=+3%")
    assert got.verdict == verdict
    if base and cand and verdict == FAIL:
        assert f"{len(base)} of 8 cells of the baseline and {len(cand)} of the candidate" in gate_report.text(got)


@pytest.mark.parametrize("kind", CLIENT_LIMITED)
@pytest.mark.parametrize("rule", ["ttft_p95<=+3%", "tokens_per_second>=-3%", "error_rate<=+1pp"])
def test_where_this_client_was_the_limit_in_most_cells_no_rule_is_judged(
    slow: Path, same: Path, kind: str, rule: str
) -> None:
    for folder in (slow, same):
        got = doubted(folder, doubt(kind, TOO_HIGH, [*range(8)], [*range(8)]), rule)
        assert (got.verdict, gate.EXIT_CODES[got.verdict]) == (INCONCLUSIVE, 3)
        assert f"doubt: {kind}" in got.tests[0].why


@pytest.mark.parametrize(
    ("base", "cand", "verdict"),
    [([0, 3], [1], PASS), ([0, 1, 2], [3, 4], INCONCLUSIVE), ([0, 1, 2], [], INCONCLUSIVE), ([], [0, 1, 2], PASS)],
)
def test_they_forbid_a_pass_where_they_are_many_or_the_baselines(
    same: Path, base: list[int], cand: list[int], verdict: str
) -> None:
    assert doubted(same, doubt("client stalled", TOO_HIGH, base, cand), "ttft_p95<=+3%").verdict == verdict


@pytest.mark.parametrize(("cells", "verdict"), [([0, 4, 7], PASS), ([0, 2, 4, 7], INCONCLUSIVE)])
def test_warming_forbids_a_pass_where_an_arm_has_more_of_it_than_chance(
    same: Path, cells: list[int], verdict: str
) -> None:
    """Of 8 steady cells 3 or more look so once in 26 times, 4 or more once in 200."""
    got = doubted(same, doubt("warming", TOO_LOW, cells, cells[:3]), "ttft_p95<=+3%")
    assert got.verdict == verdict


@pytest.mark.parametrize(("p", "verdict"), [(0.004, PASS), (0.003, INCONCLUSIVE)])
def test_a_drift_counts_after_bonferroni_over_the_cells_of_its_load(same: Path, p: float, verdict: str) -> None:
    """16 cells: 0.05 / 16 = 0.0031. By chance 0.05 comes up in more than half of such gates."""
    (test,) = judged(same, "ttft_p95<=+3%").tests
    drift = Objection(LOAD["label"], "base, pair 1", "drift", "it drifts", TOO_HIGH, "baseline", 1, p)
    chance = drift._replace(arm="candidate", pair=2, p=0.04)
    assert bool(gate.weigh(PASS, test._replace(doubts=[drift, chance]), 1).against) == (verdict == INCONCLUSIVE)
    assert not gate.weigh(FAIL, test._replace(doubts=[drift, chance]), 1).against
    one_sided = [drift._replace(arm="candidate", pair=k, p=0.04) for k in range(4)]
    assert gate.weigh(FAIL, test._replace(doubts=one_sided), 1).against


def test_what_chance_alone_brings_seldom_forbids_a_pass_of_steady_cells(same: Path) -> None:
    """One doubt anywhere would forbid 1 - (0.95 x 0.9)^16 = 92% of them."""
    (test,) = judged(same, "ttft_p95<=+3%").tests
    random, forbidden = np.random.default_rng(7), 0
    for _ in range(1000):
        said = []
        for arm, pair in product(("baseline", "candidate"), range(8)):
            p, warming, effect = float(random.random()), random.random() < 0.1, random.choice([TOO_LOW, TOO_HIGH])
            place = (LOAD["label"], "", "drift", "", str(effect), arm, pair, p)
            said += [Objection(*place)] * (p <= 0.05)  # type: ignore[arg-type]
            said += [Objection(*place[:2], "warming", *place[3:7])] * warming  # type: ignore[arg-type]
        forbidden += bool(gate.weigh(PASS, test._replace(doubts=said), 1).against)
    assert forbidden / 1000 < 0.1


def test_noise_of_every_kind_in_a_few_cells_lets_a_real_regression_fail(tmp_path: Path) -> None:
    """Sixteen cells nearly always have one of these; a release that is five times as slow must not pass for that."""
    folder = write_arms(tmp_path / "run", {"base": BASE, "cand": [5 * x for x in BASE]})
    said = [
        *doubt("drift", TOO_LOW, base=[1]),
        *doubt("client stalled", TOO_HIGH, base=[1], cand=[2]),
        *doubt("warming", TOO_HIGH, cand=[2]),
        *doubt("burst streams", EITHER_WAY, cand=[2]),
        *doubt("client busy", TOO_HIGH, cand=[5]),
        *doubt("overloaded", TOO_LOW, cand=[5]),
        *doubt("cut requests", TOO_LOW, cand=[5]),
    ]
    got = doubted(folder, said, "ttft_p95<=+5%", "tpot_p95<=+5%", "error_rate<=+1pp")
    assert [t.verdict for t in got.tests] == [FAIL, INCONCLUSIVE, INCONCLUSIVE]
    assert "overloaded" in got.tests[2].why and "else PASS" in got.tests[2].why
    assert (got.verdict, gate.EXIT_CODES[got.verdict]) == (FAIL, 1)


@pytest.mark.parametrize(("slower_ms", "verdict"), [(80.0, FAIL), (20.0, INCONCLUSIVE)])
def test_a_verdict_that_stands_without_all_that_a_client_can_have_added_is_given(
    tmp_path: Path, slower_ms: float, verdict: str
) -> None:
    """The client stood still for 30 ms in every cell of the candidate: that may be why it is 20 ms slower, not 80."""
    folder = write_arms(tmp_path / "run", {"base": BASE, "cand": [x + slower_ms for x in BASE]})
    run = results.load_run(folder)
    end = {"reason": "exhausted", "loop_stalls": [[sample_arms.START_NS, 30.0]], "loop_lag_p99_ms": 0.1}
    write_book(folder, cells=[{"name": m.name, "end": end if m.target == "cand" else {}} for m in run.cells])
    got = judged(folder, "ttft_p95<=+1%")
    assert got.verdict == verdict
    if verdict == FAIL:
        assert "with all that it can have done taken off, it is still a FAIL" in gate_report.text(got)


# ---- what the two arms differ in


def paths(folder: Path, base_ms: float, cand_ms: float, candidate: list[float]) -> Path:
    """A run whose targets lie at the ends of two ways."""
    for pair, ttfts in enumerate(zip(BASE, candidate, strict=True)):
        for k, (name, ttft, rtt) in enumerate(zip(("base", "cand"), ttfts, (base_ms, cand_ms), strict=True)):
            order = k ^ (pair % 2)
            place = {"pair": pair, "order": order, "target": sample_arms.target(name), "load": LOAD}
            made = sample_arms.rows(ttft, salt=1000 * (2 * pair + k + 1))
            sample_arms.write(folder, f"{2 * pair + order:03d}-{name}", made, probe={"rtt_ms": rtt}, **place)
    return folder


@pytest.mark.parametrize(
    ("base_ms", "cand_ms", "candidate", "verdict"),
    [
        (0.1, 15.0, SLOW, INCONCLUSIVE),  # 6 ms slower, by a way that is 15 ms longer
        (15.0, 0.1, SLOW, FAIL),  # by the shorter way at that
        (0.1, 15.0, [5 * x for x in BASE], FAIL),  # no way that is 15 ms longer takes 400 ms
        (0.1, 15.0, SAME, PASS),  # as fast in spite of it
        (15.0, 0.1, SAME, INCONCLUSIVE),
    ],
)
def test_a_longer_way_forbids_what_it_could_have_made(
    tmp_path: Path, base_ms: float, cand_ms: float, candidate: list[float], verdict: str
) -> None:
    got = judged(paths(tmp_path / "run", base_ms, cand_ms, candidate), "ttft_p95<=+3%", "error_rate<=+1pp")
    assert {o.kind for o in got.objections} == {"network path"}
    assert [t.verdict for t in got.tests] == [verdict, PASS]  # what failed is counted the same by any way


@pytest.mark.parametrize(
    ("base", "cand", "plan", "verdict"),
    [
        (26, 25, {}, FAIL),  # a point or two is no other work
        (26, 5, {}, INCONCLUSIVE),  # the baseline met a warm cache
        (5, 26, {}, FAIL),
        (26, 5, {"shares": True}, FAIL),  # what the trace shares is for the build to keep
    ],
)
def test_cached_shares_are_other_work_where_they_are_far_apart_and_not_the_builds_own(
    tmp_path: Path, base: int, cand: int, plan: dict[str, Any], verdict: str
) -> None:
    def caching(ttft_ms: float, salt: int) -> list[Record]:
        cached = cand if ttft_ms in SLOW else base
        return [replace(r, tokens_cached=cached) for r in sample_arms.rows(ttft_ms, salt=salt)]

    head = {"plan": plan, "probe": {"base_tokens": 30.0}}
    got = judged(write_arms(tmp_path / "run", {"base": BASE, "cand": SLOW}, of=caching, **head), "ttft_p95<=+3%")
    assert got.verdict == verdict
    assert {o.kind for o in got.objections} <= {"targets differ"}


def test_the_tables_of_doubts_name_doubts_that_there_are() -> None:
    known = set(CHECKS) | {rules.NOT_INTERLEAVED}
    assert set(rules.HARMLESS) | set(rules.CONCERNS) | set(gate.OF_CELLS) <= set(CHECKS)
    assert set(rules.ACCEPTABLE) <= known
    assert not set(rules.ACCEPTABLE) & set(rules.HARMLESS)
    names = {*metrics.WHOLE, *SERIES}
    assert {*rules.COUNTED, *rules.OF_GAPS, *rules.OF_SERVER} <= names


@pytest.mark.parametrize(
    ("kind", "metric", "against"),
    [
        ("failed requests", "error_rate", False),
        ("failed requests", "goodput", False),
        ("failed requests", "ttft_p95", True),
        ("failed requests", "tokens_per_second", True),
        ("planned prompt tokens", "total_tokens_per_second", True),
        ("planned prompt tokens", "tokens_per_second", False),
        ("planned prompt tokens", "ttft_p95", False),
        ("estimated tokens", "ttft_p95", False),
        ("estimated tokens", "tpot_p95", True),
        ("estimated tokens", "tokens_per_second", True),
        ("estimated tokens", "error_rate", False),
        ("overloaded", "error_rate", True),
        ("network path", "error_rate", False),
        ("network path", "ttft_p95", True),
        ("network path", "tpot_p95", False),
        ("client lateness", "error_rate", False),
        ("client lateness", "queue_p95", False),
        ("client stalled", "tokens_per_second", True),
        ("drift", "error_rate", False),
        ("warming", "error_rate", False),
        ("drift", "ttft_p95", True),
        ("burst streams", "ttft_p95", False),
        ("burst streams", "tpot_p95", True),
        ("burst streams", "tokens_per_second", False),
        ("usage disputed", "ttft_p95", False),
        ("a kind that is not known", "error_rate", True),
    ],
)
def test_some_doubts_are_against_some_metrics_only(kind: str, metric: str, against: bool) -> None:
    assert rules.counts(kind, metrics.parse(metric)) == against


def test_failures_are_judged_by_their_rate_and_latency_of_the_rest_is_not(tmp_path: Path) -> None:
    def failing(ttft_ms: float, salt: int) -> list[Record]:
        return sample_arms.rows(100.0, salt=salt, failed=round(ttft_ms))

    folder = write_arms(tmp_path / "run", {"base": [0.0] * 8, "cand": [12.0] * 8}, of=failing)
    latency, rate = judged(folder, "ttft_p95<=+5%", "error_rate<=+1pp").tests
    assert latency.why.startswith("doubt: failed requests (else PASS")
    assert (latency.verdict, rate.verdict) == (INCONCLUSIVE, FAIL)
    assert rate.why == "+10pp is worse than +1pp, p = 0.0078 (Holm, 2 tests)"
    assert rate.middles() == pytest.approx((0.0, 0.1))


def test_a_doubt_at_one_load_leaves_the_other_its_verdict(tmp_path: Path) -> None:
    folder = write_arms(tmp_path / "run", {"base": BASE, "cand": SLOW}, [LOAD, FASTER])
    run = results.load_run(folder)
    late = [m.name for m in run.cells if m.load == "rate=200/s"]
    doubts = {"doubts": [{"kind": "overloaded", "text": "it grows"}]}
    entries = [{"name": m.name, "end": {"reason": "exhausted"}} | (doubts if m.name in late else {}) for m in run.cells]
    write_book(folder, cells=entries)
    got = judged(folder, "ttft_p95<=+3%")
    assert [t.verdict for t in got.tests] == [FAIL, INCONCLUSIVE]
    assert got.tests[0].p == 2 / 256  # the doubtful one is still in the family
    assert got.verdict == FAIL


def test_the_p_of_a_doubtful_test_lightens_no_other(tmp_path: Path) -> None:
    """Were its 1 / 256 believed, the other would be the second of two, and pay nothing."""
    mild = [b * f for b, f in zip(BASE, [1.05] * 7 + [0.98], strict=True)]
    folder = write_arms(tmp_path / "run", {"base": BASE, "cand": mild})
    alone = judged(folder, "ttft_p95<=+1.5%").tests[0].p
    at = len(results.load_run(folder).cells)
    for pair, (base, cand) in enumerate(zip(BASE, SLOW, strict=True)):
        for k, (name, ttft) in enumerate((("base", base), ("cand", cand))):
            place = {"pair": pair, "order": k ^ (pair % 2), "target": sample_arms.target(name), "load": FASTER}
            made = sample_arms.rows(ttft, salt=100_000 * (pair + 1) + 1000 * k, failed=60 * (name == "base"))
            sample_arms.write(folder, f"{at + 2 * pair + k:03d}-{name}", made, **place)
    sure, doubtful = judged(folder, "ttft_p95<=+1.5%").tests
    assert doubtful.objections and doubtful.comparison is not None and doubtful.comparison.p == 1 / 256
    assert alone is not None and sure.p == pytest.approx(2 * alone)


def test_the_smallest_change_found_lies_on_the_bad_side(tmp_path: Path) -> None:
    ttft, tokens = judged(write_arms(tmp_path / "run", {"base": BASE, "cand": SAME}), "ttft_p95<=+3%",
                          "tokens_per_second>=-3%").tests  # fmt: skip
    assert ttft.detectable is not None and ttft.detectable > ttft.rule.margin > 0
    assert tokens.detectable is not None and tokens.detectable < tokens.rule.margin < 0


def test_what_a_user_says_is_meant_so_is_shown_and_no_obstacle(tmp_path: Path) -> None:
    old, new = stored(tmp_path, "old", BASE), stored(tmp_path, "new", SAME, probe={"model": "other"})
    apart = ("not interleaved",)
    assert of_arms(old, new, "ttft_p95<=+3%", accepted=apart).verdict == INCONCLUSIVE
    meant = gate.check_accepted([*apart, "targets differ"])
    got = of_arms(old, new, "ttft_p95<=+3%", accepted=meant)
    assert (got.verdict, got.accepted, len(got.objections)) == (PASS, meant, 9)
    with pytest.raises(BenchError, match="--accept 'overloaded': expected one of not interleaved"):
        gate.check_accepted(["overloaded"])


# ---- pairs that are none


def test_an_undefined_figure_in_one_pair_makes_its_test_inconclusive(tmp_path: Path) -> None:
    def short(ttft_ms: float, salt: int) -> list[Record]:
        return sample_arms.rows(ttft_ms, tokens=1 if ttft_ms == SAME[3] else 4, salt=salt)

    folder = write_arms(tmp_path / "run", {"base": BASE, "cand": SAME}, of=short)
    tpot, ttft = judged(folder, "tpot_p95<=+5%", "ttft_p95<=+5%", accepted=("delivered tokens",)).tests
    assert tpot.verdict == INCONCLUSIVE and tpot.comparison is None and tpot.p is None
    assert tpot.why.startswith("tpot_p95 of cand in pair 3 is undefined: ")
    assert ttft.comparison is not None


def test_a_zero_has_no_percent(tmp_path: Path) -> None:
    (test,) = judged(write_arms(tmp_path / "run", {"base": BASE, "cand": SAME}), "wasted_tokens<=+5%").tests
    assert test.verdict == INCONCLUSIVE
    assert "a change in percent needs figures above 0" in test.why


def test_a_pair_without_its_other_arm_is_a_doubt(tmp_path: Path) -> None:
    folder = write_arms(tmp_path / "run", {"base": BASE, "cand": SAME})
    (lost,) = [m.name for m in results.load_run(folder).cells if m.target == "cand" and pairing.number_of(m) == 7]
    (folder / f"{lost}.arrow").unlink()
    got = judged(folder, "ttft_p95<=+3%")
    assert got.pairs == {"rate=100/s": 7}
    assert got.objections == [Objection("rate=100/s", "cand", "missing cell", "it has no pair 7")]
    assert got.verdict == INCONCLUSIVE


def test_a_load_that_one_arm_lacks_forbids_the_pass(tmp_path: Path) -> None:
    folder = write_arms(tmp_path / "run", {"base": BASE, "cand": SAME}, [LOAD, FASTER])
    for m in results.load_run(folder).cells:
        if (m.target, m.load) == ("cand", "rate=200/s"):
            (folder / f"{m.name}.arrow").unlink()
    got = judged(folder, "ttft_p95<=+3%")
    assert [t.verdict for t in got.tests] == [PASS]
    assert got.verdict == INCONCLUSIVE and len(got.against_all) == 8


def test_an_order_that_is_always_the_same_is_not_interleaved(tmp_path: Path) -> None:
    for at, (name, ttft) in enumerate((name, ttft) for name in ("base", "cand") for ttft in BASE):
        place = {"pair": at % 8, "order": at // 8, "target": sample_arms.target(name), "load": LOAD}
        sample_arms.write(tmp_path, f"{at:03d}-{name}", sample_arms.rows(ttft, salt=1000 * at), **place)
    got = judged(tmp_path, "ttft_p95<=+3%")
    assert [o.kind for o in got.objections] == ["not interleaved"]
    assert "one came before the other in 8 of 8 pairs" in got.objections[0].text
    assert got.verdict == INCONCLUSIVE


def test_a_target_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    run = results.load_run(write_arms(tmp_path / "run", {"base": BASE, "cand": SAME}))
    with pytest.raises(BenchError, match="no target 'other' in it, expected one of base, cand"):
        pairing.arm(run, "other")
    with pytest.raises(BenchError, match=r"2 targets \(base, cand\), expected a run of one"):
        pairing.only_arm(run)
    write_arms(tmp_path / "twice", {"base": [100.0, 100.0]}, pair=0)
    with pytest.raises(BenchError, match="base has 2 cells at rate=100/s that are pair 0"):
        pairing.arm(results.load_run(tmp_path / "twice"), "base")


# ---- stored runs


def stored(folder: Path, name: str, ttfts: list[float], **head: Any) -> pairing.Arm:
    return pairing.only_arm(results.load_run(write_arms(folder / name, {"t": ttfts}, interleaved=False, **head)))


def test_stored_runs_are_paired_and_doubtful_until_that_is_accepted(tmp_path: Path) -> None:
    old, new = stored(tmp_path, "old", BASE), stored(tmp_path, "new", SLOW)
    got = of_arms(old, new, "ttft_p95<=+3%")
    assert [o.kind for o in got.objections] == ["not interleaved"]
    assert (got.verdict, got.baseline, got.candidate) == (INCONCLUSIVE, "old", "new")
    assert "else FAIL: +6.01%" in got.tests[0].why
    assert of_arms(old, new, "ttft_p95<=+3%", accepted=("not interleaved",)).verdict == FAIL


@pytest.mark.parametrize(
    ("head", "kind", "words"),
    [
        ({"work_hash": "22"}, "not the same work", "work 11 and 22"),
        ({"settings": {"seed": 5}}, "not the same work", "seed 4 and 5"),
        ({"settings": {"seed": 4, "stream": False}}, "not the same work", "settings.stream True and False"),
        ({"trace": {"path": "b.jsonl"}}, "not the same work", "trace a.jsonl and b.jsonl"),
        ({"target": sample_arms.target("t", revision="r2")}, "targets differ", "revision 'r1' at old, 'r2' at other"),
        ({"probe": {"model": "other"}}, "targets differ", "model 'm' at old, 'other' at other"),
    ],
)
def test_runs_that_did_other_work_are_not_judged(tmp_path: Path, head: dict[str, Any], kind: str, words: str) -> None:
    alike: dict[str, Any] = {
        "work_hash": "11",
        "settings": {"seed": 4, "stream": True, "out": "a"},
        "trace": {"path": "a.jsonl"},
        "target": sample_arms.target("t", revision="r1"),
        "probe": {"rtt_ms": 0.1},
    }
    old = stored(tmp_path, "old", BASE, **alike)
    new = stored(tmp_path, "new", SAME, **alike | {"settings": alike["settings"] | {"out": "b"}})
    assert {o.kind for o in pairing.pair_up(old, new).objections} == {"not interleaved"}
    other = stored(tmp_path, "other", SAME, **alike | head)
    found = [o for o in pairing.pair_up(old, other).objections if o.kind == kind]
    assert len(found) == 8 and words in found[0].text
    assert of_arms(old, other, "ttft_p95<=+3%", accepted=("not interleaved",)).verdict == INCONCLUSIVE


def test_work_is_compared_request_by_request(tmp_path: Path) -> None:
    def asked(ttft_ms: float, salt: int) -> list[Record]:
        long = ttft_ms in SLOW
        made = sample_arms.rows(ttft_ms, tokens=5 if long else 4, salt=salt)
        return [replace(r, planned_in=110 if long else 100, tokens_in=110 if long else 100) for r in made]

    folder = write_arms(tmp_path / "run", {"base": BASE, "cand": SLOW}, of=asked)
    (first, *_) = [o for o in judged(folder, "ttft_p95<=+3%").objections if o.kind == "not the same work"]
    assert first.text == (
        "prompt lengths planned of 120 of 120 requests; answer lengths asked of 120 of 120 requests; "
        "prompt tokens a request 100 at base, 110 at cand (+10.0%); "
        "delivered tokens a request 4 at base, 5 at cand (+25.0%)"
    )


def test_two_machines_are_named(tmp_path: Path) -> None:
    for name, cpu in (("old", "A"), ("new", "B")):
        write_arms(tmp_path / name, {"t": BASE}, interleaved=False)
        write_book(tmp_path / name, host={"cpu": cpu, "cores": 4})
    old, new = (pairing.only_arm(results.load_run(tmp_path / name)) for name in ("old", "new"))
    (doubt,) = [o for o in pairing.pair_up(old, new).objections if o.kind == "not interleaved"]
    assert "on two machines: A, 4 cores; B, 4 cores" in doubt.text


# ---- equal arms


def test_relabelling_equal_arms_counts_what_the_gate_would_say(tmp_path: Path) -> None:
    got = judged(write_arms(tmp_path / "run", {"base": BASE, "cand": SAME}), "ttft_p95<=+0%")
    (test,) = got.tests
    assert test.differences is not None
    d = test.differences
    failed = [pairs.sign_flip(d * signs, 0.0) <= 0.05 for signs in product((1, -1), repeat=8)]
    passed = [pairs.compare(d * signs, 0.0).verdict == PASS for signs in product((1, -1), repeat=8)]
    relabelled = equal_arms.relabel(got)
    assert relabelled == (256, True, np.mean(failed), np.mean(failed), np.mean(passed), 0)
    assert 0 < relabelled.failed <= 0.05
    wide = equal_arms.relabel(judged(tmp_path / "run", "ttft_p95<=+3%"))
    assert (wide.failed, wide.failed_at_zero, wide.passed) == (0, relabelled.failed, 1)


def test_relabelling_counts_what_doubts_do_to_the_gate(same: Path) -> None:
    """A kind that blocks whoever has which name, one that blocks by the name, and one that is noise."""
    kinds: list[tuple[str, Effect, float, float]] = [
        ("incomplete file", EITHER_WAY, 1, 0),
        ("overloaded", TOO_LOW, 0.5, 0.5),
        ("client stalled", TOO_HIGH, 0, 1),
    ]
    for kind, effect, withheld, passed in kinds:
        relabelled = equal_arms.relabel(doubted(same, doubt(kind, effect, cand=[2]), "ttft_p95<=+3%"))
        assert (relabelled.doubted, relabelled.passed, relabelled.failed) == (withheld, passed, 0)
    got = doubted(same, doubt("overloaded", TOO_LOW, cand=[2]), "ttft_p95<=+3%")
    assert "INCONCLUSIVE because doubts forbid a verdict: 50.0%" in equal_arms.text(got, equal_arms.relabel(got))
    assert equal_arms.exit_code(got) == 3


def test_of_many_relabellings_a_sample_is_drawn_and_stays_within_what_is_promised(tmp_path: Path) -> None:
    folder = write_arms(tmp_path / "run", {"base": BASE, "cand": SAME}, [LOAD, FASTER])
    got = judged(folder, "ttft_p95<=+0%", "e2e_p95<=+0%", "tokens_per_second>=-0%")
    relabelled = equal_arms.relabel(got)
    assert (relabelled.tried, relabelled.every) == (equal_arms.RELABELLINGS, False)
    assert 0 < relabelled.failed <= 0.05
    assert relabelled == equal_arms.relabel(got)


def test_one_arm_is_split_into_neighbours(tmp_path: Path) -> None:
    run = results.load_run(write_arms(tmp_path / "run", {"t": [*BASE, *SAME]}, interleaved=False))
    left, right = pairing.halves(pairing.arm(run, "t"))
    assert [len(arm.cells) for arm in (left, right)] == [8, 8]
    paired = pairing.pair_up(left, right)
    assert (paired.interleaved, paired.objections) == (True, [])
    first = [p.baseline.cell.header["order"] for p in paired.pairs]
    assert first == [0, 1, 0, 1, 0, 1, 0, 1]
    assert of_arms(left, right, "ttft_p95<=+5%").verdict == PASS


def test_one_repeat_cannot_be_split(tmp_path: Path) -> None:
    run = results.load_run(write_arms(tmp_path / "run", {"t": BASE[:1]}, interleaved=False))
    with pytest.raises(BenchError, match="t was measured once; expected two targets, or --repeat 2 or more"):
        pairing.halves(pairing.arm(run, "t"))


def test_self_test_says_what_it_can_find_and_that_nothing_was_sent(tmp_path: Path) -> None:
    got = judged(write_arms(tmp_path / "run", {"base": BASE, "cand": SAME}), "ttft_p95<=+3%")
    relabelled = equal_arms.relabel(got)
    for said in (equal_arms.text(got, relabelled), equal_arms.markdown(got, relabelled)):
        assert "no request was sent anew" in said
        assert "256 ways (all)" in said
        assert "0.0% of the ways FAIL at the rules given" in said
    (row,) = equal_arms.rows(got)[1]
    spread = 100 * math.expm1(float(np.std(np.log(np.array(SAME) / BASE), ddof=1)))
    assert float(row[4].rstrip("%")) == pytest.approx(spread, abs=0.01)
    eight, sixteen = (float(text.rstrip("%")) for text in row[5:7])
    assert 3 < sixteen < eight < 4
    assert equal_arms.exit_code(got) == 0
    assert equal_arms.exit_code(judged(tmp_path / "run", "ttft_p95<=-3%")) == 1
