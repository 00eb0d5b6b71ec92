"""The batcher on a clock that jumps: who is in which batch, and that no request is lost, doubled or begun too early."""

import heapq
import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_engine.batcher import Batch, Batcher, Job, Limits, spent
from reference_engine.cost_model import PROFILES, Costs, pass_load

MS = 1_000_000


class Arrival(NamedTuple):
    at_ns: int
    lengths: tuple[int, ...]  # tokens of each input
    leaves_after_ns: int | None = None


class Played(NamedTuple):
    jobs: list[Job]  # in order of arrival, those that were refused left out
    batches: list[Batch]
    late: list[Job]
    left: list[Job]
    refused: int


def play(limits: Limits, arrivals: list[Arrival], seconds: Callable[[list[list[int]]], float]) -> Played:
    """What SinglePass does, in virtual time."""
    batcher, numbers = Batcher(limits), itertools.count()
    played = Played([], [], [], [], 0)
    refused = 0
    events: list[tuple[int, int, object]] = [(a.at_ns, next(numbers), a) for a in arrivals]
    heapq.heapify(events)
    while events:
        now_ns, _, what = heapq.heappop(events)
        if isinstance(what, Arrival):
            if batcher.full:
                refused += 1
            else:
                job = Job([[1] * n for n in what.lengths], now_ns)
                played.jobs.append(job)
                batcher.submit(job)
                if what.leaves_after_ns is not None:
                    heapq.heappush(events, (now_ns + what.leaves_after_ns, next(numbers), job))
        elif isinstance(what, Batch):
            batcher.end(what, now_ns)
        elif isinstance(what, Job) and not what.ended:
            batcher.drop(what)
            played.left.append(what)
        played.late.extend(batcher.expire(now_ns))
        while batch := batcher.take(now_ns):
            played.batches.append(batch)
            heapq.heappush(events, (now_ns + max(1, round(seconds(batch.inputs) * 1e9)), next(numbers), batch))
        due_ns = batcher.due_ns()
        if due_ns is not None:
            assert due_ns > now_ns, "it is due and was not done"
            heapq.heappush(events, (due_ns, next(numbers), None))
    assert not batcher.waiting
    assert batcher.idle == limits.instances
    return played._replace(refused=refused)


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        st.integers(0, 30 * MS),
        st.lists(st.integers(1, 8), min_size=1, max_size=6).map(tuple),
        st.none() | st.integers(0, 20 * MS),
    ),
    max_size=20,
)
LIMITS = st.builds(
    Limits,
    st.integers(1, 5),
    st.integers(8, 20),
    st.sampled_from([0, MS, 7 * MS]),
    st.sampled_from([0, 1, 4]),
    st.sampled_from([0, 5 * MS]),
    st.integers(1, 3),
)


@given(LIMITS, ARRIVALS)
def test_every_input_is_computed_once_in_order_within_the_limits(limits: Limits, arrivals: list[Arrival]) -> None:
    played = play(limits, arrivals, lambda inputs: 0.001 * len(inputs))
    for batch in played.batches:
        assert 0 < len(batch.members) <= limits.max_batch
        assert batch.tokens <= limits.max_tokens
    for ns in {batch.begun_ns for batch in played.batches}:
        assert sum(b.begun_ns <= ns < b.ended_ns for b in played.batches) <= limits.instances
    order = [member for batch in played.batches for member in batch.members]
    places = {job: place for place, job in enumerate(played.jobs)}
    assert [(places[job], i) for job, i in order] == sorted((places[job], i) for job, i in order)
    gone = {*played.late, *played.left}
    for job in played.jobs:
        inputs = [i for other, i in order if other is job]
        assert inputs == list(range(len(inputs)))
        assert job in gone or len(inputs) == len(job.inputs)
        assert job.ended == (len(inputs) == len(job.inputs))
    assert not any(job.batches for job in played.late)
    assert len(played.jobs) + played.refused == len(arrivals)


@given(LIMITS, ARRIVALS)
def test_a_batch_begins_as_soon_as_it_may_and_no_sooner(limits: Limits, arrivals: list[Arrival]) -> None:
    """It is filled, or its oldest has waited as long as it has to; and an input waits longer only for an instance."""
    played = play(limits, arrivals, lambda inputs: 0.002)
    left = played.left or played.late  # who stood behind a filled batch may be among them
    for batch, following in itertools.zip_longest(played.batches, played.batches[1:]):
        filled = len(batch.members) == limits.max_batch or batch.tokens == limits.max_tokens
        cut = following and batch.tokens + len(following.inputs[0]) > limits.max_tokens
        waited_ns = batch.begun_ns - batch.members[0][0].arrived_ns
        assert filled or cut or waited_ns >= limits.max_wait_ns or left
        if waited_ns > limits.max_wait_ns:
            busy = [b for b in played.batches if b.begun_ns < batch.begun_ns <= b.ended_ns]
            assert len(busy) == limits.instances or any(b.ended_ns == batch.begun_ns for b in busy)


@given(LIMITS, ARRIVALS)
def test_queue_and_compute_add_up_to_a_requests_time(limits: Limits, arrivals: list[Arrival]) -> None:
    played = play(limits, arrivals, lambda inputs: 0.001 * sum(map(len, inputs)))
    for job in played.jobs:
        if job.ended:
            parts = spent(job)
            assert min(parts) >= 0
            assert sum(parts) == max(batch.ended_ns for batch in job.batches) - job.arrived_ns
            busy = {ns for b in job.batches for ns in range(b.begun_ns // MS, b.ended_ns // MS)}
            assert parts.compute <= (len(busy) + 2 * len(job.batches)) * MS


def job_of(arrived_ns: int, *spans: tuple[int, int]) -> Job:
    job = Job([[1]] * len(spans), arrived_ns)
    job.batches = [Batch([(job, i)], begun, ended) for i, (begun, ended) in enumerate(spans)]
    return job


@pytest.mark.parametrize(
    ("spans", "queue", "compute"),
    [
        ([(15, 20)], 5, 5),
        ([(15, 20), (30, 31)], 15, 6),  # waited between its batches too
        ([(15, 30), (18, 20)], 5, 15),  # two instances: no nanosecond counts twice
        ([(15, 20), (18, 25)], 5, 10),
    ],
)
def test_time_between_a_requests_batches_is_queue(spans: list[tuple[int, int]], queue: int, compute: int) -> None:
    assert spent(job_of(10, *spans)) == (queue, compute)


def test_known_batches() -> None:
    """Two instances, batches of two, 5 ms to fill one, 10 ms to compute one."""
    limits = Limits(max_batch=2, max_tokens=100, max_wait_ns=5 * MS, instances=2)
    times = [0, 1, 2, 3, 4, 20, 40, 44]
    played = play(limits, [Arrival(t * MS, (1,)) for t in times], lambda inputs: 0.010)
    assert [(b.begun_ns // MS, len(b.members)) for b in played.batches] == [(1, 2), (3, 2), (11, 1), (25, 1), (44, 2)]


def test_a_full_queue_refuses_only_while_nobody_is_idle() -> None:
    limits = Limits(max_batch=1, max_tokens=100, max_queue=2)
    played = play(limits, [Arrival(0, (1,))] + [Arrival(1, (1,))] * 4, lambda inputs: 0.010)
    assert (len(played.jobs), played.refused) == (3, 2)


def test_who_waits_too_long_is_ended_in_time_unless_begun() -> None:
    limits = Limits(max_batch=1, max_tokens=100, timeout_ns=5 * MS)
    played = play(limits, [Arrival(0, (1, 1)), Arrival(1 * MS, (1,))], lambda inputs: 0.010)
    assert [played.jobs.index(job) for job in played.late] == [1]
    assert len(played.jobs[0].batches) == 2


# The first decision: an answer word by word, or a single pass?


def rate_and_p95(costs: Costs, per_s: float, max_batch: int, count: int = 2000) -> tuple[float, float]:
    """Texts a second, and the 95th percentile of a request's time in s, of texts of 100 tokens that come evenly."""
    arrivals = [Arrival(round(i / per_s * 1e9), (100,)) for i in range(count)]
    played = play(Limits(max_batch, 8192), arrivals, lambda inputs: costs.step_s(pass_load(inputs)))
    took = sorted(sum(spent(job)) / 1e9 for job in played.jobs)
    return count / (max(b.ended_ns for b in played.batches) / 1e9), took[int(0.95 * count)]


def test_batches_of_single_passes_carry_a_load_that_lone_passes_do_not() -> None:
    """Weights are read once a batch: where that is what a pass takes, a batch costs hardly more than one text."""
    costs = PROFILES["8b-h100"].costs
    alone = 1 / costs.step_s(pass_load([[1] * 100]))
    lone_rate, lone_p95 = rate_and_p95(costs, 2 * alone, max_batch=1)
    rate, p95 = rate_and_p95(costs, 2 * alone, max_batch=32)
    assert lone_rate == pytest.approx(alone, rel=0.01)
    assert rate == pytest.approx(2 * alone, rel=0.01)
    assert p95 < 3 / alone
    assert lone_p95 > 100 * p95


def test_a_pass_costs_what_the_cost_model_says() -> None:
    costs = Costs(overhead_s=1.0, weights_s=10.0, token_s=0.5, context_s=1e9, pair_s=0.01)
    assert costs.step_s(pass_load([[1] * 4, [1] * 2])) == pytest.approx(1 + 10 + 0.01 * (10 + 3))  # weights prevail
    assert costs.step_s(pass_load([[1] * 40])) == pytest.approx(1 + 20 + 0.01 * 820)
