from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reference_engine.config import EngineConfig
from reference_engine.policies import BATCHING, POLICIES
from reference_engine.scheduler import TooLong, check_fits
from reference_engine.sequence import SamplingParams
from tests.stub_runner import Drive, alone, answer

SMALL = EngineConfig(block_size=4, num_blocks=6, max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64)
P = [1, 2, 3, 4, 5, 6, 7, 8]
Q = [8, 7, 6, 5, 4, 3, 2, 1]


def test_what_can_never_fit_is_refused_on_arrival() -> None:  # case 50; B is refused, too
    config = EngineConfig(block_size=16, num_blocks=50)
    with pytest.raises(TooLong, match="prompt of 900 tokens needs 57 blocks, pool has 50"):
        check_fits(config, 900, 16)
    with pytest.raises(TooLong, match="prompt of 700 tokens and max_tokens 200 needs 57 blocks, pool has 50"):
        check_fits(config, 700, 200)
    check_fits(config, 100, 50)
    for prompt, most, by_prompt in ((900, 1, True), (800, 200, True), (799, 2, False), (1, 800, False)):
        with pytest.raises(TooLong) as refused:
            check_fits(config, prompt, most)
        assert refused.value.by_prompt is by_prompt
    with pytest.raises(TooLong, match="max_model_len, 120 tokens"):
        check_fits(replace(config, max_model_len=120), 100, 50)
    with pytest.raises(TooLong, match="exceeds a step's 64"):
        check_fits(replace(config, chunked_prefill=False, max_num_batched_tokens=64), 100, 50)


def test_a_refused_one_leaves_no_trace() -> None:
    drive = Drive(SMALL)
    with pytest.raises(TooLong):
        drive.submit(P, 100)
    served = drive.submit(P, 4)
    drive.finish()
    assert served.finish_reason == "length"


@pytest.mark.parametrize(("prompt", "cached"), [(P, 4), ([*P, 9], 8), (P[:5], 4)])
def test_a_cached_prefix_changes_no_token(prompt: list[int], cached: int) -> None:  # case 51
    drive = Drive(SMALL)
    drive.submit(P, 2)
    drive.finish()
    again = drive.submit(prompt, 4)
    drive.step()
    assert drive.runner.steps[-1] == [(again.id, len(prompt) - cached)]
    drive.finish()
    assert again.cached == cached
    assert answer(again) == alone(replace(SMALL, prefix_caching=False), prompt, 4)[0]


def test_equal_prompts_in_one_step_each_compute_their_own() -> None:
    drive = Drive(SMALL)
    first, second = drive.submit(P, 3), drive.submit(P, 3)
    drive.step()
    assert drive.runner.steps == [[(0, 8), (1, 8)]]
    drive.finish()
    assert answer(first) == answer(second)


def test_a_choice_waits_for_the_leader_of_its_prompt_and_shares_its_blocks() -> None:
    drive = Drive(replace(SMALL, num_blocks=20))
    leader = drive.submit(P, 4)
    follower = drive.submit(P, 4, leader=leader)
    other = drive.submit(Q, 4)
    drive.step()
    drive.step()
    assert drive.runner.steps == [[(0, 8), (2, 8)], [(0, 1), (2, 1), (1, 4)]]
    drive.finish()
    assert follower.cached == 4
    assert answer(leader) == answer(follower) != answer(other)


def test_preempted_and_resumed_gives_the_same_tokens() -> None:  # case 52
    drive = Drive(SMALL)
    first, second = drive.submit(P, 8), drive.submit(Q, 8)
    steps = drive.finish()
    (alone_first, steps_first), (alone_second, steps_second) = alone(SMALL, P, 8), alone(SMALL, Q, 8)
    assert (answer(first), answer(second)) == (alone_first, alone_second)
    assert drive.scheduler.counts.preemptions >= 1
    assert (first.preemptions, second.preemptions >= 1) == (0, True)  # the newer gave way
    assert second.evicted_total_ns > 0
    assert steps <= 3 * (steps_first + steps_second)
    assert len(drive.scheduler.blocks.free) == 6
    assert not any(drive.scheduler.blocks.refs)


def test_a_step_mixes_decodes_with_a_chunk_of_a_prompt() -> None:
    drive = Drive(replace(SMALL, num_blocks=20, max_num_batched_tokens=8))
    drive.submit(P, 4)
    drive.step()
    drive.submit(list(range(20)), 1)
    drive.finish()
    assert drive.runner.steps == [[(0, 8)], [(0, 1), (1, 7)], [(0, 1), (1, 7)], [(0, 1), (1, 6)]]


def test_without_chunks_a_prompt_is_computed_whole_or_waits() -> None:
    drive = Drive(replace(SMALL, num_blocks=20, max_num_batched_tokens=8, chunked_prefill=False))
    drive.submit(P, 2)
    drive.submit(Q, 1)
    drive.finish()
    assert drive.runner.steps == [[(0, 8)], [(0, 1)], [(1, 8)]]


def test_without_chunks_a_preempted_one_that_outgrew_a_step_comes_back_in_chunks() -> None:
    config = replace(SMALL, max_num_batched_tokens=9, chunked_prefill=False, prefix_caching=False)
    drive = Drive(config)
    first, second = drive.submit(P, 12), drive.submit(Q, 12)
    drive.finish()
    assert second.preemptions >= 1
    assert (answer(first), answer(second)) == (alone(config, P, 12)[0], alone(config, Q, 12)[0])


def test_chunk_size_changes_no_token() -> None:
    prompts = [[(7 * i + j) % 50 for j in range(5 + 4 * i)] for i in range(5)]
    answers = []
    for budget in (1, 7, 16, 1000):
        drive = Drive(replace(SMALL, num_blocks=16, max_num_batched_tokens=budget))
        sequences = [drive.submit(p, 9) for p in prompts]
        drive.finish()
        answers.append([answer(s) for s in sequences])
    assert all(a == [alone(replace(SMALL, num_blocks=16), p, 9)[0] for p in prompts] for a in answers)


def test_priority_is_served_first_and_preempted_last() -> None:
    drive = Drive(replace(SMALL, policy="priority", max_num_seqs=1))
    low, high = drive.submit(P, 2, priority=5), drive.submit(Q, 2, priority=-1)
    drive.finish()
    assert high.finished_ns < low.scheduled_ns
    drive = Drive(replace(SMALL, policy="priority"))
    low, high = drive.submit(P, 8, priority=5), drive.submit(Q, 8, priority=-1)
    drive.finish()
    assert (low.preemptions >= 1, high.preemptions) == (True, 0)


def test_an_unknown_policy_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"policy is 'sjf'.*fcfs, priority"):
        Drive(replace(SMALL, policy="sjf"))


def eos_after(made: int, **params: int) -> tuple[str, int]:
    """Finish reason and length of an answer whose token number `made` is the end token."""
    end = alone(SMALL, P, 8)[0][made - 1]
    drive = Drive(SMALL, frozenset({end}))
    sequence = drive.submit(P, 8, params=SamplingParams(8, **params))
    drive.finish()
    return sequence.finish_reason, sequence.output_len


def test_an_end_token_ends_unless_ignored_or_too_early() -> None:
    made = 1
    assert eos_after(made) == ("stop", 1)
    assert eos_after(made, ignore_eos=True) == ("length", 8)
    assert eos_after(made, min_tokens=2)[1] >= 2


@pytest.mark.parametrize("steps", range(12))
def test_an_abort_frees_everything_in_any_state(steps: int) -> None:
    drive = Drive(replace(SMALL, max_num_batched_tokens=5))
    keeper, leaver = drive.submit(P, 8), drive.submit(Q, 8)
    for _ in range(steps):
        drive.step()
    assert drive.scheduler.abort(leaver, "abort", drive.now)
    assert (leaver.blocks, leaver.finish_reason) == ([], "abort")
    drive.scheduler.check()
    drive.finish()
    assert not drive.scheduler.abort(leaver, "abort", drive.now)
    assert answer(keeper) == alone(SMALL, P, 8)[0]
    assert len(drive.scheduler.blocks.free) == 6


def test_an_abort_while_its_step_runs_drops_the_token() -> None:
    drive = Drive(SMALL)
    sequence = drive.submit(P, 8)
    work = drive.scheduler.step(64, 1)
    drive.scheduler.abort(sequence, "abort", 2)
    assert drive.scheduler.commit(work, [97], 3) == []
    drive.scheduler.check()
    assert sequence.output_len == 0


class Machine(RuleBasedStateMachine):
    """Any mix of submits, aborts and steps on a small pool, against a stub that checks every read and write."""

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(3, 12),
        budget=st.integers(1, 20),
        seats=st.integers(1, 5),
        chunked=st.booleans(),
        caching=st.booleans(),
        policy=st.sampled_from(sorted(POLICIES)),
        batching=st.sampled_from(BATCHING),
    )
    def start(
        self,
        block_size: int,
        num_blocks: int,
        budget: int,
        seats: int,
        chunked: bool,
        caching: bool,
        policy: str,
        batching: str,
    ) -> None:
        self.config = EngineConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_batched_tokens=budget,
            max_num_seqs=seats,
            chunked_prefill=chunked,
            prefix_caching=caching,
            policy=policy,
            batching=batching,
            max_wait_ms=0,
        )
        self.drive = Drive(self.config)
        self.evicted_at: dict[int, int] = {}  # output tokens at the last preemption
        self.emitted: dict[int, list[int]] = {}

    @rule(
        head=st.integers(0, 2),
        tail=st.integers(0, 12),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
        client=st.sampled_from("ab"),
    )
    def submit(self, head: int, tail: int, max_tokens: int, priority: int, client: str) -> None:
        prompt = [head, *range(tail)]  # few beginnings: many shared prefixes
        try:
            check_fits(self.config, len(prompt), max_tokens)
        except TooLong:
            with pytest.raises(TooLong):
                self.drive.submit(prompt, max_tokens)
            return
        self.drive.submit(prompt, max_tokens, priority=priority, client=client)

    @rule(head=st.integers(0, 2), n=st.integers(2, 3), tail=st.integers(0, 8))
    def submit_choices(self, head: int, n: int, tail: int) -> None:
        prompt = [head, *range(tail)]
        try:
            check_fits(self.config, len(prompt), 4)
        except TooLong:
            return
        leader = self.drive.submit(prompt, 4)
        for _ in range(n - 1):
            self.drive.submit(prompt, 4, leader=leader)

    @precondition(lambda self: self.drive.submitted)
    @rule(pick=st.integers(0, 1000), withdraws=st.booleans())
    def abort(self, pick: int, withdraws: bool) -> None:
        """`withdraws`: as for numbers that are not finite."""
        sequence = self.drive.submitted[pick % len(self.drive.submitted)]
        ended = bool(sequence.finish_reason)
        if withdraws:
            self.drive.scheduler.blocks.withdraw(sequence)
        assert self.drive.scheduler.abort(sequence, "abort", self.drive.now) is not ended
        self.drive.scheduler.check()

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            before = {s.id: s.preemptions for s in self.drive.submitted}
            outputs = self.drive.step()
            for sequence in self.drive.submitted:
                if sequence.preemptions > before[sequence.id]:
                    # Progress before each preemption after the first; nobody who was evicted emits in the same step.
                    assert sequence.output_len > self.evicted_at.get(sequence.id, -1)
                    self.evicted_at[sequence.id] = sequence.output_len
            for output in outputs:
                self.emitted.setdefault(output.sequence.id, []).append(output.token)

    @invariant()
    def what_was_emitted_is_what_was_made(self) -> None:
        for sequence in self.drive.submitted:
            assert self.emitted.get(sequence.id, []) == answer(sequence)

    @invariant()
    def first_come_first_scheduled(self) -> None:
        if self.config.policy == "fcfs":
            followers = [s for s in self.drive.submitted if s.leader]
            begun = [s.scheduled_ns for s in self.drive.submitted if s.scheduled_ns and s not in followers]
            assert begun == sorted(begun)

    def teardown(self) -> None:
        if not hasattr(self, "drive"):
            return
        self.drive.finish()
        assert len(self.drive.scheduler.blocks.free) == self.config.num_blocks
        for sequence in self.drive.submitted:
            assert sequence.finish_reason in ("length", "abort")
            if sequence.finish_reason == "length":
                lone = alone(self.config, sequence.token_ids[: sequence.prompt_len], sequence.params.max_tokens)[0]
                assert answer(sequence) == lone
                assert sequence.arrived_ns <= sequence.scheduled_ns <= sequence.first_token_ns <= sequence.finished_ns


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
TestMachine = Machine.TestCase
