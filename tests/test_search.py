"""The search as a function of what it has seen: known answers, hostile targets, queues whose capacity is known."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import search_queues
from llm_bench import objectives, search, search_evidence, search_report, windows
from llm_bench.search import Answer, Plan, Probe, Result
from llm_bench.search_backlog import Backlog
from llm_bench.search_evidence import Counts, Seen, Span, Unknown
from tests import sample
from tests.sample import cell, ns, record

SLO = objectives.parse("ttft_p95<=700ms,error_rate<1%")
PLAN = Plan("concurrency", SLO.limits, guards=1, budget_s=1e6, requests=100)


def says(load: float, met: float, n: int, cell: str = "", **fields: object) -> Seen:
    """A cell of n requests, of which so many met the first limit, and none failed."""
    seen = Seen(cell or f"c{load:g}", load, (Counts(met, n, n), Counts(n, n, n)), n, float(n), n)
    return seen._replace(**fields)  # type: ignore[arg-type]


def drive(plan: Plan, target: Callable[[Probe], Seen], most: int = 200) -> tuple[Answer, list[Seen]]:
    seen: list[Seen] = []
    while len(seen) < most:
        step = search.step(plan, seen, sum(s.seconds for s in seen))
        if isinstance(step, Answer):
            return step, seen
        seen.append(target(step)._replace(cell=f"{len(seen)}"))
    raise AssertionError(f"no answer after {most} cells")


def up_to(capacity: float) -> Callable[[Probe], Seen]:
    """A target without noise: every request meets the limit up to a load, none above."""
    return lambda probe: says(probe.load, probe.requests if probe.load <= capacity else 0, probe.requests)


def loads(seen: Sequence[Seen]) -> list[float]:
    return [s.load for s in seen]


# ---- case 41


def test_a_deterministic_server_is_found_exactly_in_twelve_probes():
    def server(probe: Probe) -> Seen:
        ttft_ms = 20 * probe.load + (2000 if probe.load >= 33 else 0)
        return says(probe.load, probe.requests if ttft_ms <= 700 else 0, probe.requests)

    answer, seen = drive(PLAN, server)
    assert loads(seen) == [1, 2, 4, 8, 16, 32, 64, 48, 40, 36, 34, 33]
    assert answer.met is not None
    assert answer.missed is not None
    assert (answer.met.load, answer.missed.load, answer.undecided, answer.end) == (32, 33, (), "resolved")


def test_with_a_tolerance_fewer_probes_are_made():
    answer, seen = drive(dataclasses.replace(PLAN, tolerance=0.25), up_to(32))
    assert loads(seen) == [1, 2, 4, 8, 16, 32, 64, 48, 40]
    assert search_report.so_far(answer, PLAN) == "met at 32, missed at 40"


def test_scripted_attainments_are_undecided_and_more_is_asked_for_before_the_bracket_is_closed():
    seen = [says(load, met, 50) for load, met in ((8, 50), (16, 47), (24, 50), (32, 30))]
    points = {p.load: p for p in search.points(PLAN, seen)}
    assert {load: p.verdict for load, p in points.items()} == {
        8: "UNDECIDED",  # met, not proven: the lower bound of 50 of 50 is 92.9%
        16: "UNDECIDED",
        24: "UNDECIDED",
        32: "MISSED",
    }
    low, high = points[16].limits[0].low, points[16].limits[0].high
    assert (low, high) == (pytest.approx(0.838, abs=1e-3), pytest.approx(0.979, abs=1e-3))
    assert points[8].limits[0].low == pytest.approx(0.929, abs=1e-3)
    assert points[32].limits[0].high == pytest.approx(0.724, abs=1e-3)
    assert points[8].limits[0].needs == 73
    plan = dataclasses.replace(PLAN, least=8, start=8, requests=50)
    asked = []
    for _ in range(8):
        step = search.step(plan, seen, 0.0)
        assert isinstance(step, Probe)
        asked.append(step.load)
        seen.append(says(step.load, {8: 1.0, 16: 0.94, 24: 1.0}[step.load] * step.requests, step.requests))
    assert 16 in asked
    out_of_time = search.step(dataclasses.replace(plan, budget_s=200), seen[:4], 200.0)
    assert isinstance(out_of_time, Answer)
    assert search_report.sentence(out_of_time, plan) == "undecided at 8 and 16 and 24, missed at 32; budget ended"
    assert {probe.load for probe in out_of_time.asks} == {8, 16, 24}
    assert search_report.code(out_of_time) == 3


def test_a_proof_without_a_miss_takes_73_requests_at_95_percent_and_381_at_99():
    assert search_evidence.least_requests(SLO.limits, guards=1) == 73
    assert search_evidence.least_requests(SLO.limits) == 381
    assert search_evidence.judge(SLO.limits[0], Counts(73, 73, 73)).verdict == "MET"
    assert search_evidence.judge(SLO.limits[0], Counts(72, 72, 72)).verdict == "UNDECIDED"


# ---- evidence


def test_cells_of_one_load_are_judged_together():
    assert search_evidence.pooled([Counts(90, 100, 50), Counts(95, 100, 50, 2)]) == Counts(
        185, 200, pytest.approx(100, rel=0.01), 2
    )
    # Unlike cells: 400² / (100²/100 + 300²/30) is 51.6, and not 130.
    pooled = search_evidence.pooled([Counts(100, 100, 100), Counts(300, 300, 30)])
    assert isinstance(pooled, Counts)
    assert pooled.ess == pytest.approx(160_000 / 3100)
    # A cell that decided none adds none to what the others are worth.
    pooled = search_evidence.pooled([Counts(100, 100, 100), Counts(0, 0, 0.0, 100, 100, ("not streamed",))])
    assert pooled == Counts(100, 100, 100, 100, 100, ("not streamed",))
    assert search_evidence.pooled([Span(10.0, 8.0, 12.0, 50), Span(20.0, 18.0, 22.0, 50)]) == Span(
        15.0, pytest.approx(15 - math.sqrt(2)), pytest.approx(15 + math.sqrt(2)), 100
    )
    assert search_evidence.pooled([Unknown("none")]) == Unknown("none")


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0.01, 1) | st.just(0.0)), min_size=1, max_size=6))
def test_pooled_cells_never_count_for_more_than_their_sum(cells):
    found = [Counts(n, n, share * n) if share else Counts(0, 0, 0.0, n) for n, share in cells]
    pooled = search_evidence.pooled(found)
    assert isinstance(pooled, Counts)
    assert pooled.ess <= sum(c.ess for c in found) * (1 + 1e-9)


def test_a_later_look_has_to_be_surer():
    once, again = Counts(80, 80, 80), Counts(126, 126, 126)
    assert search_evidence.judge(SLO.limits[0], once).verdict == "MET"
    assert search_evidence.judge(SLO.limits[0], once, again=True).verdict == "UNDECIDED"
    assert search_evidence.judge(SLO.limits[0], again, again=True).verdict == "UNDECIDED"
    assert search_evidence.judge(SLO.limits[0], Counts(127, 127, 127), again=True).verdict == "MET"  # 19 z², z = 2.576


def test_a_limit_that_was_not_asked_for_need_not_be_proven_but_must_not_be_missed():
    guard = SLO.limits[1]
    assert search_evidence.judge(guard, Counts(100, 100, 100)).verdict == "UNDECIDED"
    assert search_evidence.judge(guard, Counts(100, 100, 100), guard=True).verdict == "MET"
    assert search_evidence.judge(guard, Counts(98, 100, 100), guard=True).verdict == "UNDECIDED"
    assert search_evidence.judge(guard, Counts(80, 100, 100), guard=True).verdict == "MISSED"


def test_figures_of_a_cell_are_judged_by_their_interval():
    limit = objectives.parse("tokens_per_second>100").limits[0]
    assert search_evidence.judge(limit, Span(120, 110, 130, 10)).verdict == "MET"
    assert search_evidence.judge(limit, Span(105, 95, 115, 10)).verdict == "UNDECIDED"
    assert (
        search_evidence.judge(limit, Span(105, 95, 115, 10)).needs == 40
    )  # half of the half-width: four times as many
    assert search_evidence.judge(limit, Span(90, 85, 95, 10)).verdict == "MISSED"


def test_a_cell_says_of_each_limit_how_many_met_it():
    rows = [
        sample.record(i, 100.0 * i, events=[100.0 * i + (50 if i % 10 else 900), 100.0 * i + 950]) for i in range(100)
    ]
    cell = sample.cell(rows)
    seen = search_evidence.seen("c", 5.0, cell, windows.of(cell), SLO)
    first, second = seen.evidence
    assert isinstance(first, Counts)
    assert (first.met, first.decided, seen.requests, seen.window) == (90, 100, 100, 100)
    assert second == Counts(100, 100, 100.0)
    assert not seen.overloaded


def test_what_is_not_known_is_said_with_its_own_reasons_alone():
    cut, hidden = Counts(90, 95, 95, 5), Counts(90, 95, 95, 5, 5, ("not streamed",))
    limit = SLO.limits[0]
    assert search_evidence.judge(limit, cut).why.endswith("; of 5 it is not known: cut")
    needs = search_evidence.judge(limit, Counts(96, 96, 96.0, 4, 4, ("not streamed",))).needs
    assert needs is None or needs > 1000  # hidden ones count as misses below: 96% of all, not 100%
    assert search_evidence.judge(limit, hidden).why.endswith(
        "; of 5 it is not known: hidden (not streamed), as it would be of more"
    )
    both = search_evidence.pooled([cut, hidden, hidden._replace(hidden_by=("several choices", "not streamed"))])
    assert search_evidence.judge(limit, both).why.endswith(
        "; of 15 it is not known: hidden (not streamed, several choices), as it would be of more, or cut"
    )
    rare = search_evidence.Unknown("no request that decides it was due in the window", more_helps=True)
    assert not search_evidence.judge(limit, rare).hopeless  # a longer cell may have one
    whole = sample.cell([sample.record(i, 100.0 * i, events=[], end=100.0 * i + 5, tokens_out=2) for i in range(100)])
    first, _ = search_evidence.seen("c", 5.0, whole, windows.of(whole), SLO).evidence
    assert isinstance(first, Counts)
    assert (first.open, first.hidden, first.hidden_by) == (100, 100, ("not streamed",))
    told = search_evidence.judge(limit, first)
    assert told.hopeless
    assert told.why == (
        "no request that decides it; of 100 it is not known: hidden (not streamed), as it would be of more"
    )


@pytest.mark.parametrize(
    ("counts", "hopeless"),
    [
        (Counts(0, 0, 0.0, 5), False),  # cut ones may be decided in a longer cell
        (Counts(0, 0, 0.0, 100, 1, ("not streamed",)), False),  # one of them is hidden, where 5 may miss
        (Counts(0, 0, 0.0, 100, 6, ("not streamed",)), True),
        (Counts(90, 90, 90, 10), False),
        (Counts(90, 90, 90, 10, 5, ("not streamed",)), False),
        (Counts(90, 90, 90, 10, 6, ("not streamed",)), True),
        (Counts(40, 45, 45, 5, 5, ("not streamed",)), False),  # were all hidden ones to meet it, 90% did: it is missed
    ],
)
def test_only_where_what_is_hidden_decides_would_no_number_of_requests_do(counts: Counts, hopeless: bool):
    told = search_evidence.judge(SLO.limits[0], counts)
    assert (told.verdict, told.hopeless, told.needs) == ("UNDECIDED", hopeless, None)
    (point,) = search.points(PLAN, [says(8, 0, 100)._replace(evidence=(counts, Counts(100, 100, 100)))])
    assert point.more_helps is not hopeless


def test_a_growing_backlog_is_a_miss_whatever_the_requests_say():
    (point,) = search.points(PLAN, [says(8, 100, 100, overloaded="the backlog grew by 4 requests/s")])
    assert (point.verdict, point.clear) == ("MISSED", True)
    assert "4 requests/s" in point.why


def test_a_cell_that_was_not_steady_decides_nothing_and_gives_way_to_one_that_was():
    warming = says(8, 100, 100, "a", unsound="not steady")
    assert search.points(PLAN, [warming])[0].verdict == "UNDECIDED"
    both = search.points(PLAN, [warming, says(8, 0, 100, "b")])[0]
    assert (both.verdict, both.window) == ("MISSED", 100)
    assert both.why.endswith("; 1 of 2 cells left out: not steady")


def test_cells_that_a_verdict_leaves_out_are_said_with_their_reasons():
    slow = [says(8, 50, 100, f"s{i}", client_limited=True) for i in range(2)]
    (point,) = search.points(PLAN, [says(8, 97, 100), *slow, says(8, 100, 100, "w", unsound="too short")])
    assert (point.verdict, point.window, point.requests) == ("UNDECIDED", 100, 400)
    assert point.why.endswith("; 3 of 4 cells left out: 2 as this client was the limit; 1 as too short")
    assert "left out" not in search.points(PLAN, [says(8, 97, 100), says(8, 97, 100, "b")])[0].why


def test_what_this_client_slowed_is_no_miss_of_the_target():
    seen = [says(1, 100, 100), says(2, 0, 100, client_limited=True), says(2, 0, 100, "d", client_limited=True)]
    answer = search.step(dataclasses.replace(PLAN, start=1), seen, 0.0)
    assert isinstance(answer, Answer)
    assert search_report.so_far(answer, PLAN) == "met at 1, undecided at 2"
    assert "this client was the limit" in answer.points[1].why


def test_a_slow_client_is_no_excuse_for_requests_that_fail():
    failed = says(2, 0, 100, client_limited=True)._replace(evidence=(Counts(0, 100, 100), Counts(0, 100, 100)))
    assert search.points(PLAN, [failed])[0].verdict == "UNDECIDED"  # it may have timed out by this client's late clock
    assert search.points(PLAN, [failed._replace(fails=True)])[0].verdict == "MISSED"


# ---- hostile targets


@given(st.integers(0, 1100), st.integers(1, 1024), st.sampled_from([0.0, 0.05, 0.3]))
def test_the_bracket_of_a_target_without_noise_holds_its_capacity(capacity, start, tolerance):
    plan = dataclasses.replace(PLAN, start=float(start), tolerance=tolerance)
    answer, seen = drive(plan, up_to(capacity))
    assert len(seen) <= 22
    assert len(set(loads(seen))) == len(seen)  # nothing is in doubt, so nothing is asked twice
    if capacity < 1:
        assert (answer.end, answer.met) == ("at the floor", None)
    elif capacity >= 1024:
        assert (answer.end, answer.missed) == ("at the cap", None)
    else:
        assert answer.met is not None
        assert answer.missed is not None
        assert answer.met.load <= capacity < answer.missed.load
        assert plan.narrow(answer.met.load, answer.missed.load)


@given(st.floats(0.02, 9000))
def test_the_same_by_rate_to_five_percent(capacity):
    plan = dataclasses.replace(PLAN, by="rate", least=0.01, most=10_000.0)
    answer, _ = drive(plan, up_to(capacity))
    assert answer.met is not None
    assert answer.missed is not None
    assert answer.met.load <= capacity < answer.missed.load
    assert answer.missed.load <= 1.06 * answer.met.load


def test_what_is_missed_at_the_lowest_load_is_said_and_fails():
    answer, seen = drive(PLAN, up_to(0))
    assert loads(seen) == [1]
    assert search_report.sentence(answer, PLAN).startswith("the SLO is not met at the lowest load: missed at 1")
    assert search_report.code(answer) == 1


def test_what_is_met_at_the_highest_load_is_at_least_that():
    answer, _ = drive(dataclasses.replace(PLAN, most=100.0), up_to(1e9))
    assert search_report.sentence(answer, PLAN).startswith("at least 100: met at 100")
    assert search_report.code(answer) == 0


def test_a_budget_that_no_cell_fits_in_is_an_answer_without_a_load_and_what_it_would_have_taken():
    plan = Plan("rate", SLO.limits, guards=1, start=1.0, budget_s=10.0)
    step = search.step(plan, [], 0.0)
    assert isinstance(step, Answer)
    assert (step.end, step.points) == ("budget", ())
    assert step.asks[0].seconds > 73
    slow = dataclasses.replace(plan, by="concurrency", alone_s=2.0)
    assert isinstance(search.step(slow, [], 0.0), Answer)


def test_a_share_that_is_just_what_is_asked_is_never_decided_and_the_search_goes_on_around_it():
    def server(probe: Probe) -> Seen:
        share = 1.0 if probe.load < 20 else 0.0 if probe.load > 24 else 0.95
        return says(probe.load, share * probe.requests, probe.requests)

    answer, _ = drive(dataclasses.replace(PLAN, budget_s=20_000), server)
    assert answer.met is not None
    assert answer.missed is not None
    assert (answer.met.load, answer.missed.load, answer.end) == (19, 25, "budget")
    assert [p.load for p in answer.undecided] == [20, 24]
    assert search_report.sentence(answer, PLAN) == "met at 19, undecided at 20 and 24, missed at 25; budget ended"


def test_loads_that_contradict_each_other_lie_within_the_bracket_and_are_evidence():
    seen = [says(8, 100, 100), says(12, 0, 100), says(16, 100, 100), says(32, 0, 100)]
    answer = search.summary(PLAN, search.points(PLAN, seen), 0.0)
    assert answer.met is not None
    assert answer.missed is not None
    assert (answer.met.load, answer.missed.load) == (8, 32)
    assert answer.violations == ("16 met what 12 missed",)
    assert search_report.so_far(answer, PLAN) == (
        "met at 8, contradicting: met at 16, contradicting: missed at 12, missed at 32"
    )
    step = search.step(PLAN, seen, 0.0)
    assert isinstance(step, Probe)
    assert step.load in (12, 16)


def test_an_end_that_one_cell_alone_has_decided_is_asked_again():
    def server(probe: Probe) -> Seen:
        share = 1.0 if probe.load <= 3 else 0.995 if probe.load == 4 else 0.2
        return says(probe.load, share * probe.requests, probe.requests)

    answer, seen = drive(dataclasses.replace(PLAN, requests=400), server)
    assert answer.end == "resolved"
    assert loads(seen).count(4) == 2
    assert loads(seen).count(5) == 2
    assert search_report.sentence(answer, PLAN) == "met at 4, missed at 5"


def test_requests_double_with_each_look_and_a_search_taken_up_again_takes_the_same_step():
    seen = [says(1, 95, 100)]
    first = search.step(PLAN, seen, 100.0)
    assert isinstance(first, Probe)
    assert (first.load, first.requests) == (1, 100)
    seen.append(says(1, 95, 100, "b"))
    second = search.step(PLAN, seen, 200.0)
    assert isinstance(second, Probe)
    assert second.requests == 200
    assert search.step(PLAN, list(seen), 200.0) == second


def test_a_first_cell_is_as_long_as_its_share_of_the_budget_carries_and_never_too_short():
    long = search.step(Plan("rate", SLO.limits, guards=1, start=10.0, budget_s=1800.0), [], 0.0)
    assert isinstance(long, Probe)
    assert (long.requests, long.seconds) == (1200, 120.0)
    slots = search.step(Plan("concurrency", SLO.limits, guards=1, start=100.0, budget_s=60.0, alone_s=1.0), [], 0.0)
    assert isinstance(slots, Probe)
    assert slots.requests == 800  # 8 a slot: 2 of warm-up, 5 for the window


# ---- the backlog while it runs


def watched(rate: float, service_s: float, span_s: float) -> float | None:
    """When a server that serves one at a time, `service_s` each, is called overloaded; None: never."""
    due_s = np.arange(round(rate * span_s)) / rate
    end_s = np.empty(len(due_s))
    free = 0.0
    for i, due in enumerate(due_s):
        free = end_s[i] = max(free, due) + service_s
    watch = Backlog(np.round(due_s * 1e9).astype(np.int64))
    for tick in range(1, round(4 * span_s) + 1):
        at_s = tick / 4
        ended = int((end_s <= at_s).sum())
        if watch(at_s, int((due_s <= at_s).sum()) - ended, ended):
            return at_s
    return None


def test_five_times_the_capacity_is_seen_after_a_quarter_of_the_plan_and_the_capacity_itself_never():
    assert watched(5.0, 1.0, 30.0) == pytest.approx(7.5, abs=0.5)  # case 17
    assert watched(1.0, 1.0, 200.0) is None
    assert watched(5.0, 0.1, 30.0) is None


def test_a_queue_that_is_merely_busy_is_not_ended_early():
    for seed in range(20):
        random = np.random.default_rng(seed)
        due_s = np.cumsum(random.exponential(1 / 9, 500))
        end_s, free = [], 0.0
        for due in due_s:
            free = max(free, due) + random.exponential(0.1)
            end_s.append(free)
        watch, ended = Backlog((due_s * 1e9).astype(np.int64)), np.array(end_s)
        ticks = np.arange(0.25, due_s[-1], 0.25)
        said = [watch(t, int((due_s <= t).sum() - (ended <= t).sum()), int((ended <= t).sum())) for t in ticks]
        assert not any(said)


# ---- known queues


def test_theory_and_simulation_of_the_queues_agree():
    queue = search_queues.QUEUES[1]
    for load in (0.5, 0.8):
        assert search_queues.within_simulated(queue, load, 200_000) == pytest.approx(
            search_queues.within_md1(load, queue.wait), abs=0.005
        )
    assert search_queues.within_mm1(0.5, 0.0) == 0.5
    assert search_queues.capacity(search_queues.QUEUES[0]) == pytest.approx(0.5284, abs=1e-4)


@pytest.mark.parametrize("queue", search_queues.QUEUES, ids=lambda q: q.name)
def test_the_capacity_of_a_known_queue_lies_within_the_bracket_of_nine_searches_of_ten(queue):
    row = search_queues.trial(queue, search_queues.capacity(queue, 200_000), budget=10.0, seeds=10)
    assert row.covered >= 9
    assert row.width < 4


# ---- reports


def test_every_format_says_the_bracket_and_its_evidence():
    seen = [says(8, 100, 100), says(16, 95, 100), says(32, 0, 100)]
    answer = search.summary(PLAN, search.points(PLAN, seen), 300.0, "budget")
    results = [Result("t|1", PLAN, answer)]
    for format_, report in search_report.FORMATS.items():
        said = report(results)
        assert "met at 8, undecided at 16, missed at 32; budget ended" in said, format_
        assert "95 of 100" in said
    assert "t\\|1" in search_report.markdown(results)
    document = search_report.document(results[0])
    assert (document["met"], document["undecided"], document["missed"]) == (8, [16], 32)
    assert document["not_asked_for"] == ["error_rate<1%"]


def test_which_growth_the_lower_end_of_a_rate_is_too_short_to_show_is_said():
    """Of 100 arrivals chance makes 2 x 10 more or fewer: at 50/s, which they take 2 s for, 10/s may be hidden."""
    by_rate = dataclasses.replace(PLAN, by="rate")
    text = (
        "the lower end, 50/s, rests on cells of at most {} requests: a backlog that grows by less than {} of it) would "
        "not show in so few; a longer --budget, or more --requests, would show smaller ones"
    )
    short, two = text.format(100, "10/s (20%"), text.format(800, "3.54/s (7%")
    for plan, lengths, said in (
        (by_rate, [100], [short]),
        (by_rate, [1600], []),
        (by_rate, [800, 800], [two]),  # each cell is looked at alone: 2 x 28 of 800, and not 2 x 40 of 1,600
        (by_rate, [1600, 100], []),
        (PLAN, [100], []),
    ):
        met = [says(50, n, n, f"m{i}") for i, n in enumerate(lengths)]
        answer = search.summary(plan, search.points(plan, [*met, says(52, 0, 100)]), 30.0)
        assert [line for line in search_report.remarks(answer, plan) if "would not show" in line] == said


def test_of_many_searches_it_is_counted_how_many_brackets_hold():
    def found(met: float | None, missed: float | None) -> search_queues.Found:
        ends = [None if load is None else _at(load) for load in (met, missed)]
        return search_queues.Found(Answer(ends[0], (), ends[1], "budget", (), (), 0.0), 3, 100)

    row = search_queues.row_of("q", 10.0, 1.0, [found(8, 16), found(11, 16), found(None, 12), found(8, None)])
    assert (row.seeds, row.covered, row.open, row.resolved) == (4, 3, 2, 0)


def _at(load: float) -> search.Point:
    return search.Point(load, "MET", "", (), (), 0, 0, 0, 0.0, True)


@pytest.mark.parametrize(("kind", "fails"), [("connect_error", True), ("rejected", False), ("ttft_timeout", False)])
def test_failures_of_a_limited_client_miss_only_where_they_are_not_its_own(kind, fails):
    rows = [
        record(i, 10 * i, end=10 * i + 1, outcome="failed", error_kind=kind)
        if i % 10 == 0
        else record(i, 10 * i, events=[10 * i + 5.0])
        for i in range(1000)
    ]
    c, agreed = cell(rows, load={"kind": "open", "rate": 100.0}), objectives.parse("ttft_p95<800ms,error_rate<1%")
    found = search_evidence.seen("c", 100.0, c, windows.open_(c), agreed, client_limited=True)
    plan = dataclasses.replace(PLAN, by="rate", limits=agreed.limits, guards=1)
    assert found.fails is fails
    assert search.points(plan, [found])[0].verdict == ("MISSED" if fails else "UNDECIDED")
    sound = search_evidence.seen("c", 100.0, c, windows.open_(c), agreed)
    assert search.points(plan, [sound])[0].verdict == "MISSED"


@pytest.mark.parametrize(("late", "verdict"), [(True, "UNDECIDED"), (False, "MISSED")])
def test_a_backlog_that_a_client_made_by_sending_late_is_no_miss_of_the_target(late, verdict):
    """Cut at 2 s. Either the client stood still from 1 s on and sent all then, or the server did."""
    rows = []
    for i in range(200):
        due = 10.0 * i
        if due < 1000:
            rows.append(record(i, due, events=[due + 5.0]))
        elif late:
            rows.append(record(i, due, 1999.0, end=2001.0, outcome="cut_at_end", ready_ns=ns(due)))
        else:
            rows.append(record(i, due, due + 12.0, end=2001.0, outcome="cut_at_end", ready_ns=ns(due)))
    c, agreed = cell(rows, load={"kind": "open", "rate": 100.0}), objectives.parse("ttft_p95<800ms")
    window = windows.open_(c)
    plan = dataclasses.replace(PLAN, by="rate", limits=agreed.limits, guards=0)
    for limited, expected in ((True, verdict), (False, "MISSED")):
        found = search_evidence.seen("c", 1.0, c, window, agreed, reason="overloaded", client_limited=limited)
        assert search.points(plan, [found])[0].verdict == expected
