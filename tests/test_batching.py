"""Batching modes, livelock, planted faults and an hour of load, in virtual time: no test here waits or measures."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from reference_engine.account import account
from reference_engine.blocks import Blocks
from reference_engine.config import EngineConfig
from reference_engine.cost_model import CostModel
from reference_engine.scheduler import Output
from reference_engine.sequence import Sequence
from reference_engine.virtual import Arrival, Clock, Simulation
from tests.stub_runner import Drive, PagedStub, alone, answer

SMALL = EngineConfig(block_size=4, num_blocks=20, max_model_len=64, max_num_seqs=3, max_num_batched_tokens=64)
P = [1, 2, 3, 4, 5, 6, 7, 8]
Q = [8, 7, 6, 5, 4, 3, 2, 1]
MS = 1_000_000


def mode(batching: str, max_num_seqs: int = 3, num_blocks: int = 20) -> EngineConfig:
    return replace(SMALL, batching=batching, max_wait_ms=50, max_num_seqs=max_num_seqs, num_blocks=num_blocks)


def ran(drive: Drive) -> list[list[int]]:
    """Sequence ids of each step that had work."""
    return [[number for number, _ in step] for step in drive.runner.steps if step]


# Who may join whom


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_a_batch_runs_to_its_last_before_the_next_begins(batching: str) -> None:
    drive = Drive(mode(batching))
    for answer_len in (1, 4, 2, 1):
        drive.submit(P, answer_len)
    for _ in range(4):
        drive.step()
    assert ran(drive) == [[0, 1, 2], [1, 2], [1], [1]]  # who ended left an empty row; 3 waited all along
    assert (drive.scheduler.queued, drive.scheduler.running) == (1, [])


def test_continuous_fills_a_seat_at_the_next_step() -> None:
    drive = Drive(mode("continuous"))
    for answer_len in (1, 4, 2, 1):
        drive.submit(P, answer_len)
    drive.finish()
    assert ran(drive) == [[0, 1, 2], [1, 2, 3], [1], [1]]


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_a_batch_that_is_not_full_begins_when_it_has_waited(batching: str) -> None:
    drive = Drive(mode(batching))
    drive.submit(P, 1)
    drive.now = 10 * MS
    drive.submit(P, 1)
    assert drive.scheduler.wait_ns(drive.now) == 40 * MS  # from the arrival of the oldest
    drive.now = 50 * MS - 2
    drive.step()
    assert ran(drive) == []
    drive.step()
    assert ran(drive) == [[0, 1]]
    assert drive.scheduler.wait_ns(drive.now) is None


def test_a_static_batch_waits_anew_and_a_dynamic_one_does_not() -> None:
    waits = {}
    for batching in ("static", "dynamic"):
        drive = Drive(mode(batching, max_num_seqs=2))
        for _ in range(3):
            drive.submit(P, 1)
        drive.now = 70 * MS
        drive.step()
        waits[batching] = drive.scheduler.wait_ns(drive.now)
    assert waits == {"static": 50 * MS, "dynamic": 0}  # the third has waited for longer than the window already


def test_a_static_batch_holds_the_blocks_of_its_longest_answers_to_its_end() -> None:
    free = {}
    for batching in ("static", "dynamic"):
        drive = Drive(mode(batching, max_num_seqs=2))
        drive.submit(P, 1)
        drive.submit(Q, 12)
        drive.step()
        drive.step()
        free[batching] = len(drive.scheduler.blocks.free)
        drive.finish()
        assert len(drive.scheduler.blocks.free) == 20
    assert free == {"static": 20 - 3 - 5, "dynamic": 20 - 3}  # 9 and 20 tokens; 10 so far of the second, the first gone


def test_a_static_batch_is_as_large_as_memory_and_never_preempts() -> None:
    drive = Drive(mode("static", num_blocks=9))
    sequences = [drive.submit(prompt, 8) for prompt in (P, Q, P)]
    drive.step()
    assert ran(drive) == [[0, 1]]  # 4 blocks each; for the third 1 is left
    drive.now += 60 * MS  # what the third waits for company
    for _ in range(30):
        drive.step()
        drive.now += 60 * MS
    assert [s.finish_reason for s in sequences] == ["length"] * 3
    assert drive.scheduler.counts.preemptions == 0


def test_an_abort_frees_at_once_and_ends_a_batch_that_it_empties() -> None:
    drive = Drive(mode("static", max_num_seqs=2))
    ended, leaver = drive.submit(P, 1), drive.submit(Q, 8)
    drive.step()
    assert ended.finish_reason == "length"
    assert len(drive.scheduler.blocks.free) < 20
    drive.scheduler.abort(leaver, "abort", drive.now)
    drive.scheduler.check()
    assert len(drive.scheduler.blocks.free) == 20
    assert drive.scheduler.line.seats == 2


@pytest.mark.parametrize("batching", ["static", "dynamic", "continuous"])
def test_how_it_is_batched_changes_no_token(batching: str) -> None:
    prompts = [[(7 * i + j) % 50 for j in range(5 + 4 * i)] for i in range(5)]
    drive = Drive(replace(mode(batching), max_wait_ms=0))
    sequences = [drive.submit(prompt, 9) for prompt in prompts]
    drive.finish()
    assert [answer(s) for s in sequences] == [alone(SMALL, prompt, 9)[0] for prompt in prompts]


def test_an_unknown_mode_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"batching is 'smart'; would be right: static, dynamic, continuous"):
        Drive(replace(SMALL, batching="smart"))


# The lesson: the same machine, the same load, the same seats


class Outcome(NamedTuple):
    tokens_per_s: float
    early_queue_s: float  # mean of the first fifth
    late_queue_s: float  # of the last
    ttft_p95_s: float
    longest_gap_p95_s: float


def load(rate: float, seconds: float) -> list[Arrival]:
    """Poisson arrivals; prompts with a median of 245 tokens, answers of 121, both lognormal."""
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(7)))
    arrivals: list[Arrival] = []
    at_s = random.exponential(1 / rate)
    while at_s < seconds:
        prompt = int(np.clip(245 * np.exp(0.9 * random.standard_normal()), 4, 2000))
        made = int(np.clip(121 * np.exp(0.8 * random.standard_normal()), 1, 1000))
        arrivals.append(Arrival(at_s, [0] * prompt, made))
        at_s += random.exponential(1 / rate)
    return arrivals


def simulate(rate: float, batching: str, budget: int = 2048, seats: int = 64) -> Outcome:
    config = EngineConfig(
        model="sim:7b-h100",
        num_blocks=26_000,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        prefix_caching=False,
        batching=batching,
        max_wait_ms=1000 if batching == "static" else 50,
    )
    gaps: dict[int, int] = {}

    def see(outputs: list[Output]) -> None:
        for output in outputs:
            gaps[output.sequence.id] = max(gaps.get(output.sequence.id, 0), output.gap_ns)

    simulation = Simulation(config, after_step=see)
    sequences = simulation.run(load(rate, 40))
    simulation.scheduler.check()
    queue = [(s.scheduled_ns - s.arrived_ns) / 1e9 for s in sequences]
    fifth = len(queue) // 5
    return Outcome(
        sum(s.output_len for s in sequences) / (simulation.clock.ns - Clock().ns) * 1e9,
        float(np.mean(queue[:fifth])),
        float(np.mean(queue[-fifth:])),
        float(np.percentile([s.first_token_ns - s.arrived_ns for s in sequences], 95)) / 1e9,
        float(np.percentile(list(gaps.values()), 95)) / 1e9,
    )


@pytest.mark.parametrize("rate", [16, 30])
def test_static_and_dynamic_saturate_where_continuous_does_not(rate: int) -> None:
    static, dynamic, continuous = (simulate(rate, batching) for batching in ("static", "dynamic", "continuous"))
    for saturated in (static, dynamic):
        assert saturated.late_queue_s > 10  # of 40 s of load, and it grows with them
        assert saturated.late_queue_s > 3 * saturated.early_queue_s
        assert saturated.tokens_per_s < 0.7 * continuous.tokens_per_s
    assert continuous.late_queue_s < 0.1
    assert continuous.ttft_p95_s < 0.2


def test_a_smaller_budget_trades_time_to_first_token_for_even_gaps() -> None:
    large, small = (simulate(30, "continuous", budget, seats=256) for budget in (2048, 512))
    assert small.longest_gap_p95_s < 0.5 * large.longest_gap_p95_s
    assert small.ttft_p95_s > 1.05 * large.ttft_p95_s
    assert small.tokens_per_s == pytest.approx(large.tokens_per_s, rel=0.03)


def test_a_simulation_is_the_same_every_time() -> None:
    assert simulate(16, "dynamic") == simulate(16, "dynamic")


# No livelock


def test_who_came_back_makes_a_token_before_it_is_preempted_again() -> None:
    config = replace(SMALL, num_blocks=6, max_num_batched_tokens=3, prefix_caching=False)
    drive = Drive(config)
    lengths = ((7, 11), (3, 6), (8, 8))  # found by trying: the third comes back just before the first needs a block
    first, second, third = (drive.submit([i] * prompt, made) for i, (prompt, made) in enumerate(lengths))
    evicted_with, held_back = [], 0
    while drive.scheduler.busy:
        before = third.preemptions
        drive.step()
        if third.preemptions > before:
            evicted_with.append(third.output_len)
        runs = {number for number, _ in drive.runner.steps[-1]}
        held_back += first in drive.scheduler.running and first.id not in runs and third.id in runs
    assert len(evicted_with) == 2
    assert evicted_with[0] < evicted_with[1]
    assert held_back == 1  # the older waited for the younger's token instead of taking its blocks
    assert [s.preemptions for s in (first, second, third)] == [0, 0, 2]
    for i, (sequence, (prompt, made)) in enumerate(zip((first, second, third), lengths, strict=True)):
        assert answer(sequence) == alone(config, [i] * prompt, made)[0]


# Planted faults: what the invariants must catch


def test_a_planted_leak_of_a_block_is_found() -> None:
    drive = Drive(SMALL)
    drive.submit(P, 8)
    drive.step()
    drive.scheduler.blocks.free.popitem()
    with pytest.raises(AssertionError, match="free list and counts differ"):
        drive.step()


class Leaky(Blocks):
    """Forgets the last block of a table that it takes back."""

    def release(self, sequence: Sequence) -> None:
        sequence.blocks = sequence.blocks[:-1]
        super().release(sequence)


def test_a_planted_leak_at_release_is_found_by_the_next_check() -> None:
    drive = Drive(SMALL)
    drive.scheduler.blocks = drive.runner.pool = Leaky(SMALL.num_blocks, SMALL.block_size)
    drive.submit(P, 2)
    drive.step()
    with pytest.raises(AssertionError, match="reference counts differ"):
        drive.step()


def test_a_block_that_two_hold_by_mistake_is_found() -> None:
    drive = Drive(SMALL)
    first, second = drive.submit(P, 8), drive.submit(Q, 8)
    drive.step()
    second.blocks[-1] = first.blocks[-1]
    with pytest.raises(AssertionError, match="another prefix"):
        drive.step()


class Wrong(PagedStub):
    """Says another token, once."""

    def execute(self, work: list[tuple[Sequence, int]]) -> list[int | None]:
        tokens = super().execute(work)
        return [ord("A") if t is not None else None for t in tokens] if len(self.steps) == 3 else tokens


def test_a_planted_wrong_token_is_found() -> None:
    drive = Drive(SMALL)
    sequence = drive.submit(P, 8)
    drive.finish()
    assert answer(sequence) == alone(SMALL, P, 8)[0]
    drive = Drive(SMALL)
    drive.runner = Wrong(SMALL.block_size, drive.scheduler.blocks)
    sequence = drive.submit(P, 8)
    drive.finish()
    assert answer(sequence) != alone(SMALL, P, 8)[0]


def test_a_token_too_early_or_missing_is_found() -> None:
    drive = Drive(replace(SMALL, max_num_batched_tokens=4))
    drive.submit(P, 8)
    work = drive.scheduler.step(4, 1)
    with pytest.raises(AssertionError):
        drive.scheduler.commit(work, [97], 2)  # half of the prompt is computed
    drive = Drive(SMALL)
    drive.submit(P, 8)
    work = drive.scheduler.step(64, 1)
    with pytest.raises(AssertionError):
        drive.scheduler.commit(work, [None], 2)


# An hour of load


def hour(seed: int) -> Iterator[Arrival]:
    """Calm, busy and overloaded minutes; shared beginnings, priorities, clients that leave, some that never fit."""
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
    at_s = 0.0
    while True:
        rate = (0.3, 1.0, 5.0)[int(at_s // 60) % 7 % 3]
        at_s += float(random.exponential(1 / rate))
        if at_s >= 3600:
            return
        prompt = [int(random.integers(4))] * int(random.integers(1, 100)) + [9] * int(random.integers(1, 60))
        made = int(random.integers(1, 60)) if random.random() < 0.99 else 5000
        leaves_after_s = float(random.exponential(20)) if random.random() < 0.1 else None
        yield Arrival(at_s, prompt, made, int(random.integers(3)), f"c{random.integers(5)}", leaves_after_s)


HOURS = [("continuous", "fcfs"), ("continuous", "priority"), ("continuous", "fair"), ("dynamic", "fcfs"),
         ("static", "fcfs")]  # fmt: skip


@pytest.mark.parametrize(("batching", "policy"), HOURS)
def test_an_hour_of_load_leaks_nothing_and_ends_every_request_by_name(batching: str, policy: str) -> None:
    config = EngineConfig(
        model="sim:110m-cpu",
        num_blocks=64,
        max_num_seqs=24,
        max_num_batched_tokens=96,
        batching=batching,
        policy=policy,
        queue_timeout=10,
    )
    steps, last_ns = 0, 0
    outcomes: dict[int, str] = {}

    def see(outputs: list[Output]) -> None:
        nonlocal steps, last_ns
        steps += 1
        if steps % 50 == 0:
            simulation.scheduler.check()
        if outputs:
            assert simulation.clock.ns - last_ns < 120e9, "no output for two minutes"
            last_ns = simulation.clock.ns
        for output in outputs:
            sequence = output.sequence
            if output.finish_reason:
                assert sequence.id not in outcomes
                outcomes[sequence.id] = output.finish_reason

    simulation = Simulation(config, after_step=see)
    sequences = simulation.run(hour(5))
    scheduler = simulation.scheduler
    scheduler.check()
    assert not scheduler.busy
    assert len(scheduler.blocks.free) == config.num_blocks
    assert simulation.clock.ns > 3_500e9
    assert scheduler.line.left == len(sequences)
    assert len(simulation.refused) > 5
    reasons = [s.finish_reason for s in sequences]
    assert set(reasons) == {"length", "abort", "timeout"}
    assert all(outcomes.get(s.id, "abort") == s.finish_reason for s in sequences)
    assert all(s.output_len == s.params.max_tokens for s in sequences if s.finish_reason == "length")
    assert reasons.count("length") > 0.3 * len(reasons)
    if batching == "continuous":
        assert scheduler.counts.preemptions > 100


@pytest.mark.parametrize("seed", range(3))
def test_the_parts_of_every_request_add_up_exactly(seed: int) -> None:
    config = EngineConfig(model="sim:110m-cpu", num_blocks=64, max_num_seqs=24, max_num_batched_tokens=40)
    lasts: dict[Sequence, Output] = {}
    simulation = Simulation(config, after_step=lambda outputs: lasts.update({o.sequence: o for o in outputs}))
    arrivals = [a._replace(at_s=a.at_s / 8, leaves_after_s=None) for a in hour(seed) if a.at_s < 600]
    preempted = recomputed = 0
    for sequence in simulation.run(arrivals):
        received_ns, enqueued_ns = sequence.arrived_ns - 1234, sequence.arrived_ns + 567
        if enqueued_ns > sequence.scheduled_ns:
            enqueued_ns = sequence.arrived_ns
        last = lasts[sequence]
        parts = account(received_ns, enqueued_ns, sequence, last, sequence.last_token_ns + 89)
        assert parts.total == sequence.last_token_ns + 89 - received_ns
        assert min(parts) >= 0
        assert (parts.preempted > 0) == (sequence.preemptions > 0)
        preempted += parts.preempted > 0
        recomputed += parts.recompute > 0
    assert preempted > 5
    assert recomputed > 5


def test_known_times_of_a_preemption() -> None:
    """Steps of 1 ms on a clock of their own: what each part must be can be counted off."""
    config = EngineConfig(model="sim:fast", block_size=4, num_blocks=6, max_num_batched_tokens=64, prefix_caching=False)
    simulation = Simulation(config)
    assert isinstance(simulation.runner, CostModel)
    first, second = simulation.run([Arrival(0, P, 8), Arrival(0, Q, 8)])
    # Both have 3 blocks from the second step on. Token 5 of the first makes 13 tokens, hence its fourth block at the
    # start of step 6: the second, with 5 tokens of its own, gives way until the first has ended after step 8, comes
    # back with step 9, which computes its 13 tokens again and makes its sixth.
    assert (first.preemptions, second.preemptions) == (0, 1)
    begin = Clock().ns
    assert [s.finished_ns - begin for s in (first, second)] == [8 * MS, 11 * MS]
    last = Output(second, 0, second.last_token_ns, MS, "length", second.evicted_total_ns, second.recompute_total_ns)
    parts = account(begin, begin, second, last, second.last_token_ns)
    assert parts == (0, 0, 1 * MS, 6 * MS, 3 * MS, 1 * MS, 0)
