"""What a delay buys and costs: words and bounds by hand, from given arms and from cells."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_bench import capacity_plan, windows
from llm_bench.batch_window import Arm, Longest, Measure, arm, longest, trade
from llm_bench.capacity_ask import Ask
from llm_bench.columns import Cell
from llm_bench.objectives import NO_SLO, parse
from llm_bench.windows import Window
from reference_engine.config import EngineConfig
from tests import simulated
from tests.sample import cell, ns, record, stood_still
from tests.test_carried import run_of

SLO = parse("ttft_p95<800ms,error_rate<1%")
RATE_100 = {"kind": "open", "rate": 100.0, "label": "rate=100/s", "warmup": 0.0}
BEFORE = Arm("rate=20/s", Measure(1000.0, 10.0), Measure(420.0, 12.0))
AFTER = Arm("rate=20/s", Measure(1280.0, 12.8), Measure(510.0, 16.0))


def test_the_example_of_two_milliseconds():
    found = trade(BEFORE, AFTER, 2, SLO)
    # Halves of 1% each: sqrt(2)% on the logarithm. 12 and 16 ms: 20 ms.
    half = math.hypot(0.01, 0.01)
    assert not isinstance(found.gain, str)
    assert found.gain[:3] == pytest.approx((0.28, 1.28 * math.exp(-half) - 1, 1.28 * math.exp(half) - 1))
    assert found.cost_ms[:3] == (90, 70, 110)
    assert found.left_ms[:3] == (290, 274, 306)
    assert found.text == (
        "rate=20/s: 2 ms buys 28% (95%: 26.2% to 29.8%) and costs 90 ms (95%: 70 ms to 110 ms) of p95 TTFT; "
        "290 ms of budget left (95%: 274 ms to 306 ms)"
    )


def test_a_change_that_is_not_proven_is_said_to_be():
    found = trade(BEFORE, BEFORE._replace(throughput=Measure(1005.0, 10.0)), 2, SLO)
    assert "buys 0.5%" in found.text
    assert "so not proven" in found.text
    assert not isinstance(found.gain, str)
    assert not found.gain.proven


def test_what_gets_worse_and_over_the_budget_reads_so():
    found = trade(AFTER, BEFORE._replace(p95=Measure(900.0, 20.0)), 5, SLO)
    assert "5 ms loses 21.9%" in found.text
    assert "costs 390 ms" in found.text
    assert "over budget by 100 ms (95%: 80 ms to 120 ms)" in found.text
    assert "saves 90 ms" in trade(AFTER, BEFORE, 5, SLO).text


def test_no_interval_and_no_limit_are_said_with_their_reason():
    bare = AFTER._replace(p95=Measure(510.0, None, "p95: ESS 40 of 100, under 150"))
    found = trade(BEFORE, bare, 2, NO_SLO)
    assert "costs 90 ms (no interval: p95: ESS 40 of 100, under 150)" in found.text
    assert "no limit on ttft_p95" in found.text
    none = AFTER._replace(p95=Measure(None, None, "not streamed"), throughput=Measure(None, None, "no tokens"))
    text = trade(BEFORE, none, 2, SLO).text
    assert "its p95 TTFT is not known (not streamed)" in text
    assert "its throughput is not known (no tokens)" in text
    assert "no budget can be given: not streamed" in text


def served(n: int, ttft: float, seed: int) -> Cell:
    """n requests 10 ms apart, each of five tokens 10 ms apart after about `ttft` ms."""
    rng = np.random.Generator(np.random.PCG64(seed))
    first = ttft * (1 + 0.1 * rng.standard_normal(n))
    return cell([record(i, 10.0 * i, events=[10.0 * i + first[i] + 10 * k for k in range(5)]) for i in range(n)])


def test_a_cells_figures_are_its_metrics_and_its_sections_scatter():
    measured, window = served(1000, 100, 1), Window(ns(1000), ns(9000), 100, 800, "")
    found = arm(measured, window, "rate=100/s")
    assert found.throughput.value == pytest.approx(500, rel=0.01)  # 100 a second of five tokens
    edges = np.linspace(1000, 9000, 11)
    stamps = (measured.event_ns - ns(0)) / 1e6
    tenths = [((stamps >= a) & (stamps < b)).sum() / 0.8 for a, b in pairwise(edges)]
    assert found.throughput.half == pytest.approx(2.262 * np.std(tenths, ddof=1) / math.sqrt(10))
    assert found.p95.half is not None
    slower = arm(served(1000, 140, 2), window, "rate=100/s")
    moved = trade(found, slower, 2, SLO)
    assert not isinstance(moved.cost_ms, str)
    assert moved.cost_ms.proven
    assert moved.cost_ms.low is not None
    assert moved.cost_ms.high is not None
    assert moved.cost_ms.low < 40 * 1.16 < moved.cost_ms.high


def test_a_cell_without_tokens_has_no_figure():
    found = arm(cell([record(0, 10, outcome="failed", end=20)]), Window(ns(0), ns(100), 0, 1, ""), "c=1")
    assert found.p95.value is None
    assert isinstance(trade(BEFORE, found, 2, SLO).gain, str)


@pytest.mark.parametrize(("verdicts", "expected"), [
    ([(0, "MET"), (2, "MET"), (5, "UNDECIDED"), (10, "MISSED")], Longest(2, 10, (5,))),
    ([(0, "MET"), (2, "MISSED"), (5, "MET")], Longest(0, 2, ())),
    ([(0, "UNDECIDED"), (2, "UNDECIDED")], Longest(None, None, (0, 2))),
    ([(0, "MISSED")], Longest(None, 0, ())),
])  # fmt: skip
def test_the_longest_window_within_the_slo_is_a_bracket(verdicts, expected):
    assert longest(verdicts) == expected


def test_the_longest_window_in_words():
    assert Longest(2, 10, (5,)).text == (
        "the longest window proven to meet the SLO is 2 ms, 10 ms does not; undecided: 5 ms"
    )
    assert Longest(None, None, ()).text == "no window measured is proven to meet the SLO, none measured misses it"


def test_what_was_offered_and_carried_both_times_shows_no_gain():
    open_ = BEFORE._replace(offered=True)
    text = trade(open_, AFTER._replace(offered=True), 2, SLO).text
    assert "2 ms buys nothing that this load can show (tokens/s are what was offered, and carried, both times" in text
    assert "costs 90 ms" in text
    assert "2 ms more than 5 ms buys 28%" in trade(BEFORE, AFTER, 2, SLO, base_ms=5).text


@pytest.mark.parametrize(
    ("without", "with_delay", "said"),
    [
        (BEFORE, AFTER._replace(offered=True), "2 ms buys at least 28%"),  # more than what came may be carried with it
        (AFTER, BEFORE._replace(offered=True), "2 ms loses at most 21.9%"),
        (AFTER._replace(offered=True), BEFORE, "2 ms loses at least 21.9%"),  # and without it
        (BEFORE._replace(offered=True), AFTER, "2 ms buys at most 28%"),
    ],
)
def test_who_carried_all_that_came_may_carry_more_which_bounds_the_change_on_one_side(without, with_delay, said):
    assert said in trade(without, with_delay, 2, SLO).text


def test_without_a_figure_there_is_nothing_to_bound():
    unknown = AFTER._replace(throughput=Measure(None, None, "no tokens"), offered=True)
    assert "2 ms its throughput is not known (no tokens) and" in trade(BEFORE, unknown, 2, SLO).text


@pytest.mark.parametrize(("outcome", "every", "carried"), [("failed", 5, False), ("dropped", 5, False),
                                                           ("failed", 200, True)])  # fmt: skip
def test_a_server_that_refuses_did_not_carry_what_came(outcome, every, carried):
    """100/s at which one in so many is refused; with the delay all are served."""
    rows = [record(i, 10.0 * i, events=[10.0 * i + 50 + 10 * k for k in range(5)]) for i in range(1000)]
    some = [record(i, 10.0 * i, outcome=outcome) if i % every == 0 else row for i, row in enumerate(rows)]
    window = Window(ns(1000), ns(9000), 100, 800, "", state=windows.STATIONARY)
    rate = {"kind": "open", "rate": 100.0}
    before, after = (arm(cell(of, load=rate), window, "rate=100/s") for of in (some, rows))
    assert (before.offered, after.offered) == (carried, True)
    text = trade(before, after, 2, SLO).text
    assert ("buys nothing that this load can show" if carried else "2 ms buys at least 25") in text


def test_a_backlog_that_the_client_made_is_no_sign_of_a_full_server(tmp_path: Path):
    late = cell(stood_still(27), load=RATE_100)
    window = windows.open_(late)
    assert window.state == windows.GROWING
    assert [arm(late, window, "rate=100/s", by_client=of).offered for of in (True, False)] == [True, False]
    runs = [run_of(tmp_path / name, {"000-a": (stood_still(seed), RATE_100)}) for name, seed in (("a", 27), ("b", 28))]
    sections = capacity_plan.plan(runs, Ask(parse("ttft_p95<100s"), delays_ms=(0.0, 5.0)))
    (section,) = (s for s in sections if s.key == "batch_window")
    assert "5 ms buys nothing that this load can show" in section.notes[0]


def whole(stay: float, slots: int, kind: dict[str, Any]) -> Arm:
    """Single passes of `stay` ms, one after another on each of `slots`."""
    rng = np.random.Generator(np.random.PCG64(3))
    rows = [
        record(i, at := (i // slots + i % slots / slots) * stay, end=at + stay * (0.9 + 0.09 * rng.random()),
               tokens_out=-1, text_bytes=0)
        for i in range(2000)
    ]  # fmt: skip
    window = Window(ns(1000), ns(9000), 100, 800, "", state="stationary")
    return arm(cell(rows, load=kind), window, "c=8")


def test_of_answers_that_come_whole_answers_a_second_and_their_time_are_traded():
    closed = {"kind": "closed", "concurrency": 8}
    found = trade(whole(40, 8, closed), whole(50, 10, closed), 10, parse("e2e_p95<60ms"))
    assert (found.waited, found.bound) == ("e2e_p95", "")
    text = found.text
    assert "10 ms loses 0" in text or "10 ms buys 0" in text  # 200 a second both times
    # 95% of 0.9 to 0.99 of 40 and 50 ms: 39.4 and 49.3 ms.
    assert "costs 9.86 ms (95%: " in text
    assert " of p95 e2e; 10.7 ms of budget left (95%: " in text
    assert "no limit on e2e_p95" in trade(whole(40, 8, closed), whole(50, 10, closed), 10, SLO).text
    assert whole(40, 8, {"kind": "open", "rate": 200.0}).offered
    assert not whole(40, 8, closed).offered
    assert (
        "10 ms cannot be compared (one of the two answered whole, the other in tokens) and has a cost that cannot be "
        "given; " in trade(BEFORE, whole(40, 8, closed), 10, SLO).text
    )


def test_a_delay_that_a_server_really_makes_is_what_the_plan_says_it_costs(tmp_path: Path):
    """Two-token answers four times a second: who comes to an idle engine waits the whole window for company."""
    runs, p95 = [], {}
    load = {"kind": "open", "rate": 4.0, "label": "rate=4/s", "warmup": 0.0}
    for wait in (0, 50):
        engine = EngineConfig(model="sim:7b-h100", batching="dynamic", max_wait_ms=wait)
        rows = simulated.served(engine, simulated.poisson(4.0, 800, [(40, 2)]))
        runs.append(run_of(tmp_path / f"wait{wait}", {"000-a": (rows, load)}))
        window = runs[-1].cells[0].window
        p95[wait] = np.quantile([(r.event_ns[0] - r.due_ns) / 1e6 for r in rows if r.due_ns < window.end_ns], 0.95)
    sections = capacity_plan.plan(runs, Ask(parse("ttft_p95<200ms"), delays_ms=(0.0, 50.0)))
    (section,) = (s for s in sections if s.key == "batch_window")
    said, longest_ = section.notes
    assert p95[0] < 50 < p95[50] < 100
    assert "50 ms buys nothing that this load can show" in said
    assert f"costs {p95[50] - p95[0]:.3g} ms (95%: " in said
    assert f"{200 - p95[50]:.3g} ms of budget left (95%: " in said
    assert "the longest window proven to meet the SLO is 50 ms, none measured misses it" in longest_
