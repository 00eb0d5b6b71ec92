"""Continuous batching: each step hands a token budget to the sequences in order, preempting the last when memory ends.

Pure: no clock, no tensors, no I/O. The algorithm is vLLM V1's (v1/core/sched/scheduler.py): there is no prefill or
decode phase, `computed` chases `len(token_ids)`.
"""

from bisect import insort
from dataclasses import dataclass
from typing import NamedTuple

from reference_engine.blocks import Blocks
from reference_engine.config import EngineConfig
from reference_engine.policies import POLICIES
from reference_engine.sequence import Sequence


class TooLong(ValueError):  # noqa: N818 - says what the request is
    """A request that could never be served, however long it waited."""


class Output(NamedTuple):
    """One token of one sequence, or (token -1) the news that it ended without one."""

    sequence: Sequence
    token: int
    at_ns: int
    gap_ns: int  # since its token before; 0 for the first
    finish_reason: str  # "" while it goes on


@dataclass(slots=True)
class Counts:
    """Totals since the start."""

    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up, once a sequence
    prefix_hits: int = 0  # of them found
    prompt_tokens: int = 0
    generation_tokens: int = 0


def check_fits(config: EngineConfig, prompt_len: int, max_tokens: int) -> None:
    """Raises TooLong for what can never fit: a lone sequence then always can, which is what guarantees progress."""
    size, pool, limit = config.block_size, config.num_blocks, config.max_model_len or config.pool_tokens
    for what, tokens in (
        (f"a prompt of {prompt_len} tokens", prompt_len),
        (f"a prompt of {prompt_len} tokens and max_tokens {max_tokens}", prompt_len + max_tokens),
    ):
        if tokens > config.pool_tokens <= limit:  # the tighter of the two is named
            raise TooLong(f"{what} needs {-(-tokens // size)} blocks, pool has {pool} of {size} tokens")
        if tokens > limit:
            raise TooLong(f"{what} is longer than max_model_len, {limit} tokens")
    if not config.chunked_prefill and prompt_len > config.max_num_batched_tokens:
        budget = config.max_num_batched_tokens
        raise TooLong(f"a prompt of {prompt_len} tokens exceeds a step's {budget}, and chunked prefill is off")


class Scheduler:
    """Sequences that wait and that run, both in the policy's order, and the blocks that they hold.

    A prompt's blocks are given whole at admission though it may be computed in chunks: only growing answers can run out
    of memory, so a prompt is never preempted by its own second half.
    """

    def __init__(self, config: EngineConfig, eos_ids: frozenset[int]) -> None:
        if config.policy not in POLICIES:
            raise ValueError(f"policy is {config.policy!r}; would be right: {', '.join(POLICIES)}")
        self.config = config
        self.eos_ids = eos_ids
        self.key = POLICIES[config.policy]
        self.blocks = Blocks(config.num_blocks, config.block_size, config.prefix_caching)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.counts = Counts()

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def submit(self, sequence: Sequence) -> None:
        """Raises TooLong."""
        check_fits(self.config, sequence.prompt_len, sequence.params.max_tokens)
        insort(self.waiting, sequence, key=self.key)

    def abort(self, sequence: Sequence, reason: str, now_ns: int) -> bool:
        """End it in whatever state; False if it has ended already. Its blocks are free before the next step."""
        if sequence.finish_reason:
            return False
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._finish(sequence, reason, now_ns)
        return True

    def step(self, budget: int, now_ns: int) -> list[tuple[Sequence, int]]:
        """Share out `budget` tokens: (sequence, n) with blocks for n more positions. First who runs, then who waits."""
        work: list[tuple[Sequence, int]] = []
        self.counts.steps += 1
        preemptions = self.counts.preemptions
        # `running` is in the policy's order, so a victim comes from its end: never one that this step already serves.
        i = 0
        while i < len(self.running) and budget:
            sequence = self.running[i]
            if not self._make_room(sequence, now_ns):
                break  # it was itself the last
            n = min(len(sequence.token_ids) - sequence.computed, budget)
            work.append((sequence, n))
            budget -= n
            i += 1
        if self.counts.preemptions == preemptions:
            self._admit(work, budget, now_ns)
        assert work or not self.busy, "a step without progress"
        return work

    def commit(self, work: list[tuple[Sequence, int]], tokens: list[int | None], now_ns: int) -> list[Output]:
        """Take in what a step computed: `tokens[i]` is the sample of `work[i]`, None where it is not at its end yet."""
        outputs = []
        for (sequence, n), token in zip(work, tokens, strict=True):
            if sequence.finish_reason:
                continue  # aborted while the step ran
            sequence.computed += n
            self.blocks.publish(sequence)
            assert (token is None) == (sequence.computed < len(sequence.token_ids))
            if token is not None:
                outputs.append(self._append(sequence, token, now_ns))
        return outputs

    def check(self) -> None:
        """Every invariant of the pool and the queues; AssertionError says which one is broken."""
        assert not any(s.blocks or s.computed for s in self.waiting), "a waiting sequence holds blocks"
        self.blocks.check(self.running)
        assert len(self.running) <= self.config.max_num_seqs
        for queue in (self.waiting, self.running):
            assert queue == sorted(queue, key=self.key), "a queue is out of order"

    def _make_room(self, sequence: Sequence, now_ns: int) -> bool:
        """Blocks for all its tokens, at the cost of those behind it; False if it was preempted itself."""
        while not self.blocks.extend(sequence):
            victim = self.running.pop()
            self.blocks.release(victim)
            victim.preemptions += 1
            victim.evicted_ns = now_ns
            self.counts.preemptions += 1
            insort(self.waiting, victim, key=self.key)  # before all that came later: first to come back
            if victim is sequence:
                return False
        return True

    def _admit(self, work: list[tuple[Sequence, int]], budget: int, now_ns: int) -> None:
        """Waiting sequences in order until budget, seats or blocks end: none overtakes the first in line."""
        i = 0
        while i < len(self.waiting) and budget and len(self.running) < self.config.max_num_seqs and self.blocks.free:
            sequence = self.waiting[i]
            if _awaits_leader(sequence):
                i += 1
                continue
            hits = self.blocks.match(sequence)
            n = len(sequence.token_ids) - len(hits) * self.config.block_size
            # Without chunks it must fit whole. A preempted one may have outgrown every budget: it comes back in chunks.
            if not self.config.chunked_prefill and budget < n <= self.config.max_num_batched_tokens:
                return
            if not self.blocks.admit(sequence, hits):
                return
            del self.waiting[i]
            insort(self.running, sequence, key=self.key)
            self._count_admission(sequence, now_ns)
            n = min(n, budget)
            work.append((sequence, n))
            budget -= n

    def _count_admission(self, sequence: Sequence, now_ns: int) -> None:
        if sequence.scheduled_ns:
            sequence.evicted_total_ns += now_ns - sequence.evicted_ns
            sequence.evicted_ns = 0
            return
        sequence.scheduled_ns = now_ns
        sequence.cached = sequence.computed
        if self.config.prefix_caching:
            self.counts.prefix_queries += sequence.prompt_len
            self.counts.prefix_hits += sequence.cached

    def _append(self, sequence: Sequence, token: int, now_ns: int) -> Output:
        gap_ns = now_ns - sequence.last_token_ns if sequence.first_token_ns else 0
        if not sequence.first_token_ns:
            sequence.first_token_ns = now_ns
            self.counts.prompt_tokens += sequence.prompt_len
        sequence.last_token_ns = now_ns
        sequence.token_ids.append(token)
        self.counts.generation_tokens += 1
        params, made = sequence.params, sequence.output_len
        reason = ""
        if token in self.eos_ids and not params.ignore_eos and made >= params.min_tokens:
            reason = "stop"
        elif made >= params.max_tokens:
            reason = "length"
        if reason:
            self.running.remove(sequence)
            self._finish(sequence, reason, now_ns)
        return Output(sequence, token, now_ns, gap_ns, reason)

    def _finish(self, sequence: Sequence, reason: str, now_ns: int) -> None:
        self.blocks.release(sequence)
        sequence.finish_reason = reason
        sequence.finished_ns = now_ns


def _awaits_leader(sequence: Sequence) -> bool:
    """Choices of one request share a prompt: the first computes it, the others wait for its blocks to be offered."""
    leader = sequence.leader
    return leader is not None and not leader.finish_reason and not leader.first_token_ns
