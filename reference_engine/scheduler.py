"""Each step hands a token budget to the sequences in order, preempting the last when memory ends.

Pure: no clock, no tensors, no I/O. The algorithm is vLLM V1's (v1/core/sched/scheduler.py): there is no prefill or
decode phase, `computed` chases `len(token_ids)`. Static and dynamic batching differ only in who may be admitted when.
"""

from bisect import insort
from dataclasses import dataclass
from typing import NamedTuple

from reference_engine.admission import Line
from reference_engine.blocks import Blocks
from reference_engine.config import EngineConfig
from reference_engine.policies import BATCHING, POLICIES, PREEMPTIONS, Shares
from reference_engine.sequence import Sequence


class TooLong(ValueError):  # noqa: N818 - says what the request is
    """A request that could never be served, however long it waited."""

    def __init__(self, text: str, by_prompt: bool) -> None:
        """`by_prompt`: its prompt leaves no room for one token of an answer; else the answer that it asks for is it."""
        super().__init__(text)
        self.by_prompt = by_prompt


class Output(NamedTuple):
    """One token of one sequence, or (token -1) the news that it ended without one."""

    sequence: Sequence
    token: int
    at_ns: int
    gap_ns: int  # since its token before; 0 for the first
    finish_reason: str  # "" while it goes on
    preempted_ns: int = 0  # of its life so far, waiting after a preemption
    recompute_ns: int = 0  # and computing again what that took


@dataclass(slots=True)
class Counts:
    """Totals since the start."""

    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up, once a sequence
    prefix_hits: int = 0  # of them found
    prompt_tokens: int = 0
    generation_tokens: int = 0
    swapped_out: int = 0  # blocks copied to the host's pool
    swapped_in: int = 0


class Copies(NamedTuple):
    """Blocks to be copied before a step computes, all `out` before all `into`: (block, slot of the host's pool)."""

    out: list[tuple[int, int]]
    into: list[tuple[int, int]]


def check_fits(config: EngineConfig, prompt_len: int, max_tokens: int) -> None:
    """Raises TooLong for what can never fit: a lone sequence then always can, which is what guarantees progress."""
    size, pool, limit = config.block_size, config.num_blocks, config.max_model_len or config.pool_tokens
    for what, tokens in (
        (f"a prompt of {prompt_len} tokens", prompt_len),
        (f"a prompt of {prompt_len} tokens and max_tokens {max_tokens}", prompt_len + max_tokens),
    ):
        if tokens > config.pool_tokens <= limit:  # the tighter of the two is named
            text = f"{what} needs {-(-tokens // size)} blocks, pool has {pool} of {size} tokens"
            raise TooLong(text, prompt_len >= config.pool_tokens)
        if tokens > limit:
            raise TooLong(f"{what} is longer than max_model_len, {limit} tokens", prompt_len >= limit)
    if not config.chunked_prefill and prompt_len > config.max_num_batched_tokens:
        budget = config.max_num_batched_tokens
        text = f"a prompt of {prompt_len} tokens exceeds a step's {budget}, and chunked prefill is off"
        raise TooLong(text, by_prompt=True)


class Scheduler:
    """Sequences that wait and that run, both in the policy's order, and the blocks that they hold.

    A prompt's blocks are given whole at admission though it may be computed in chunks: only growing answers can run out
    of memory, so a prompt is never preempted by its own second half.

    No livelock: a sequence that came back from a preemption has the blocks of all its tokens, and is no victim before
    it has one more; who stands before it and needs a block waits so long. So every admission makes a token.
    """

    def __init__(self, config: EngineConfig, eos_ids: frozenset[int]) -> None:
        if config.policy not in POLICIES:
            raise ValueError(f"policy is {config.policy!r}; would be right: {', '.join(POLICIES)}")
        if config.batching not in BATCHING:
            raise ValueError(f"batching is {config.batching!r}; would be right: {', '.join(BATCHING)}")
        if config.preemption not in PREEMPTIONS:
            raise ValueError(f"preemption is {config.preemption!r}; would be right: {', '.join(PREEMPTIONS)}")
        self.config = config
        self.eos_ids = eos_ids
        self.key = POLICIES[config.policy]
        self.blocks = Blocks(config.num_blocks, config.block_size, config.prefix_caching)
        self.continuous = config.batching == "continuous"
        self.waiting: list[Sequence] = []
        # Those who may be admitted now: all that wait, or the members of the batch that have no seat yet or no more.
        self.next: list[Sequence] = self.waiting if self.continuous else []
        self.running: list[Sequence] = []
        self.ended: list[Sequence] = []  # static: members that have ended, whose blocks are the batch's to its end
        self.counts = Counts()
        self.slots = list(range(config.swap_blocks if config.preemption == "swap" else 0))  # free ones
        self.copies = Copies([], [])  # of the step that was planned last
        self.line = Line(seats=config.max_num_seqs)
        # Tokens that a running sequence has room for beyond its next: the runner computes them before it is asked to.
        self._ahead = int(config.graphs == "on" and config.ahead)
        # Of a step, for one sequence: a decode takes one, so only prompts and what is computed again ever feel it.
        # As in vLLM it is no share for all long prompts together: as many as fill the budget keep the others out.
        self._part = config.long_prefill_token_threshold or config.max_num_batched_tokens
        self._left = self._left_tokens = 0
        self._shares = Shares()
        self._batch_ended_ns = 0

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting or self.next)

    @property
    def queued(self) -> int:
        """Sequences without a seat."""
        return len(self.waiting) + (0 if self.continuous else len(self.next))

    def submit(self, sequence: Sequence) -> None:
        """Raises TooLong."""
        check_fits(self.config, sequence.prompt_len, sequence.params.max_tokens)
        if self.config.policy == "fair":
            sequence.share = self._shares.tag(sequence.client, demand(sequence))
        insort(self.waiting, sequence, key=self.key)

    def wait_ns(self, now_ns: int) -> int | None:
        """How long a step would have nothing to do: 0 if it has, None if only a submission can change that."""
        if self.running or self.next:
            return 0
        if not self.waiting:
            return None
        members = len(self._members())
        if members == self.config.max_num_seqs or members < len(self.waiting):
            return 0  # filled: no seat more, or no memory
        dues = [self._batch_due_ns()]
        if self.config.queue_timeout:
            dues += [s.arrived_ns + self.config.queue_timeout * 1_000_000_000 for s in self.waiting]
        return max(0, min(dues) - now_ns)

    def expire(self, now_ns: int) -> list[Output]:
        """End those that waited longer than queue_timeout without ever having run; choices whose leader runs may wait.

        Their outputs have no token and the finish reason "timeout".
        """
        limit_ns = self.config.queue_timeout * 1_000_000_000
        if not limit_ns:
            return []
        late = [
            s
            for s in (*self.waiting, *(() if self.continuous else self.next))
            if now_ns - s.arrived_ns >= limit_ns and not s.scheduled_ns and not (s.leader and s.leader.scheduled_ns)
        ]
        for sequence in late:
            self.abort(sequence, "timeout", now_ns)
        return [Output(s, -1, now_ns, 0, "timeout") for s in late]

    def abort(self, sequence: Sequence, reason: str, now_ns: int) -> bool:
        """End it in whatever state; False if it has ended already. Its blocks are free before the next step."""
        if sequence.finish_reason:
            return False
        next(queue for queue in (self.running, self.next, self.waiting) if sequence in queue).remove(sequence)
        if not sequence.scheduled_ns:
            self._leave_line(sequence)
        self._finish(sequence, reason, now_ns)
        self._look()
        return True

    def step(self, budget: int, now_ns: int) -> list[tuple[Sequence, int]]:
        """Share out `budget` tokens: (sequence, n) with blocks for n more positions. First who runs, then who waits.

        Nothing at all while a batch waits to be filled.
        """
        self.copies = Copies([], [])
        work = self._share_out(budget, now_ns)
        if not work and self.blocks.held and self.wait_ns(now_ns) == 0:
            self.blocks.hold(0)  # pressure makes the going hard, never impossible
            work = self._share_out(budget, now_ns)
        assert work or self.wait_ns(now_ns) != 0, "a step without progress"
        self.counts.steps += bool(work)
        self._look()
        return work

    def _share_out(self, budget: int, now_ns: int) -> list[tuple[Sequence, int]]:
        work: list[tuple[Sequence, int]] = []
        if not self.continuous and not self.running and not self.next and self.wait_ns(now_ns) == 0:
            self.next[:] = self._members()
            chosen = set(self.next)
            self.waiting[:] = [s for s in self.waiting if s not in chosen]
        preemptions = self.counts.preemptions
        # `running` is in the policy's order and victims stand behind: never one that this step already serves.
        i = 0
        while i < len(self.running) and budget:
            sequence = self.running[i]
            if self._make_room(i, now_ns):
                n = min(len(sequence.token_ids) - sequence.computed, budget, self._part)
                work.append((sequence, n))
                budget -= n
            i += 1
        if self.counts.preemptions == preemptions:
            self._admit(work, budget, now_ns)
        return work

    def commit(self, work: list[tuple[Sequence, int]], tokens: list[int | None], now_ns: int) -> list[Output]:
        """Take in what a step computed: `tokens[i]` is the sample of `work[i]`, None where it is not at its end yet."""
        outputs = []
        for (sequence, n), token in zip(work, tokens, strict=True):
            if sequence.finish_reason:
                continue  # aborted while the step ran
            sequence.computed += n
            self.blocks.publish(sequence)
            if sequence.recompute_ns and sequence.computed >= sequence.recompute_to:
                _count_recompute(sequence, now_ns)
            assert (token is None) == (sequence.computed < len(sequence.token_ids))
            if token is not None:
                outputs.append(self._append(sequence, token, now_ns))
        self._look()
        return outputs

    def check(self) -> None:
        """Every invariant of the pool and the queues; AssertionError says which one is broken."""
        queues = (self.running, self.waiting) if self.continuous else (self.running, self.waiting, self.next)
        waiting = [s for queue in queues[1:] for s in queue]
        assert not any(s.blocks or s.computed for s in waiting), "a waiting sequence holds blocks"
        slots = self.slots + [slot for s in waiting for slot in s.slots]
        assert len(set(slots)) == len(slots), "a slot of the host's pool is held twice"
        assert self.config.preemption != "swap" or len(slots) == self.config.swap_blocks, "a slot is missing"
        assert not any(s.slots for s in (*self.running, *self.ended)), "a running sequence holds slots"
        alive = [*self.running, *waiting]
        assert len(set(alive)) == len(alive), "a sequence stands in two places"
        assert not any(s.finish_reason for s in alive), "a sequence runs on after its end"
        assert all(s.computed < len(s.token_ids) for s in alive), "a sequence has nothing to compute"
        assert not self.ended or self.running or self.next, "a batch has ended and holds blocks"
        self.blocks.check([*self.running, *self.ended])
        assert len(self.running) <= self.config.max_num_seqs
        assert len({s.adapter for s in self.running} - {0}) <= self.config.max_loras, "a step has too many adapters"
        for queue in queues:
            assert queue == sorted(queue, key=self.key), "a queue is out of order"

    def _members(self) -> list[Sequence]:
        """Who would be in a batch that began now: as many as there are seats; if static, as memory holds to the end."""
        members = self.waiting[: self.config.max_num_seqs]
        if self.config.batching == "dynamic":
            return members
        room = self.config.num_blocks
        for i, sequence in enumerate(members):
            room -= self.blocks.needed(demand(sequence))
            if room < 0:
                return members[:i]
        return members

    def _batch_due_ns(self) -> int:
        """When a batch begins though not full: max_wait after its oldest came, or (static) after it could be filled."""
        oldest_ns = min(s.arrived_ns for s in self.waiting)
        began_ns = oldest_ns if self.config.batching == "dynamic" else max(oldest_ns, self._batch_ended_ns)
        return began_ns + self.config.max_wait_ms * 1_000_000

    def _look(self) -> None:
        """What the line looks like from outside."""
        if self.continuous:
            seats = 0 if self.waiting else self.config.max_num_seqs - len(self.running)
        else:
            seats = 0 if self.running or self.next else self.config.max_num_seqs
        self.line = Line(self._left, self._left_tokens, seats)

    def _leave_line(self, sequence: Sequence) -> None:
        self._left += 1
        self._left_tokens += demand(sequence)

    def _make_room(self, i: int, now_ns: int) -> bool:
        """Blocks for all tokens of running[i], at the cost of those behind it.

        False: it keeps what it has and waits for those behind it, all of them spared; or it was the last and gave way.
        """
        sequence = self.running[i]
        ahead = self._ahead if sequence.output_len + 1 < sequence.params.max_tokens else 0
        while not self.blocks.extend(sequence, ahead):
            behind = self.running[i + 1 :]
            # Spared is who has made nothing since its last preemption. Such a one needs no room: it has its blocks.
            victim = next((v for v in reversed(behind) if len(v.token_ids) > v.evicted_len), None)
            if victim is None:
                if not behind:
                    self._preempt(sequence, now_ns)
                return False
            self._preempt(victim, now_ns)
        return True

    def _preempt(self, victim: Sequence, now_ns: int) -> None:
        assert len(victim.token_ids) > victim.evicted_len, "preempted twice without a token in between"
        self.running.remove(victim)
        victim.preemptions += 1
        victim.evicted_len = len(victim.token_ids)
        victim.evicted_ns = now_ns
        victim.recompute_to = max(victim.recompute_to, victim.computed)
        assert not victim.recompute_ns, "preempted while it made good its last preemption"
        self._swap_out(victim)
        self.blocks.release(victim)
        self.counts.preemptions += 1
        insort(self.next, victim, key=self.key)  # before all that came later: first to come back

    def _swap_out(self, victim: Sequence) -> None:
        """What it has computed goes to the host's pool if there is room for all of it; else it is computed again."""
        blocks = victim.blocks[: self.blocks.needed(victim.computed)]
        if len(blocks) > len(self.slots):
            return
        victim.slots = [self.slots.pop() for _ in blocks]
        victim.swapped = victim.computed
        self.copies.out.extend(zip(blocks, victim.slots, strict=True))
        self.counts.swapped_out += len(blocks)

    def _swap_in(self, sequence: Sequence, cached: int) -> None:
        """It has a table again, whose first `cached` blocks were still there. Its slots are free for the next step.

        A slot is not given to another in this step: who comes back comes after all victims of the step.
        """
        pairs = list(zip(sequence.blocks, sequence.slots, strict=False))[cached:]
        self.copies.into.extend(pairs)
        self.counts.swapped_in += len(pairs)
        sequence.computed = max(sequence.computed, sequence.swapped)
        self._free_slots(sequence)

    def _free_slots(self, sequence: Sequence) -> None:
        self.slots += sequence.slots
        sequence.slots, sequence.swapped = [], 0

    def _admit(self, work: list[tuple[Sequence, int]], budget: int, now_ns: int) -> None:
        """Waiting sequences in order until budget, seats or blocks end: none overtakes the first in line."""
        i = 0
        while i < len(self.next) and budget and len(self.running) < self.config.max_num_seqs and self.blocks.free:
            sequence = self.next[i]
            if _awaits_leader(sequence):
                i += 1
                continue
            if sequence.adapter and not self._has_room_for(sequence.adapter):
                return
            hits = self.blocks.match(sequence)
            n = len(sequence.token_ids) - max(len(hits) * self.config.block_size, sequence.swapped)
            # Without chunks it must fit whole. A preempted one may have outgrown every budget: it comes back in chunks.
            if not self.config.chunked_prefill and budget < n <= self.config.max_num_batched_tokens:
                return
            if not self.blocks.admit(sequence, hits, demand(sequence) if self.config.batching == "static" else 0):
                return
            del self.next[i]
            self._swap_in(sequence, len(hits))
            insort(self.running, sequence, key=self.key)
            self._count_admission(sequence, now_ns)
            n = min(n, budget, self._part)
            work.append((sequence, n))
            budget -= n

    def _has_room_for(self, adapter: int) -> bool:
        """Whether a step may have it, beside those of all who run."""
        adapters = {s.adapter for s in self.running} - {0}
        return adapter in adapters or len(adapters) < self.config.max_loras

    def _count_admission(self, sequence: Sequence, now_ns: int) -> None:
        if sequence.scheduled_ns:
            sequence.evicted_total_ns += now_ns - sequence.evicted_ns
            sequence.evicted_ns = 0
            if sequence.computed < sequence.recompute_to:
                sequence.recompute_ns = now_ns
            return
        self._leave_line(sequence)
        self._shares.scheduled(sequence.share)
        sequence.scheduled_ns = now_ns
        sequence.cached = sequence.computed
        if self.config.prefix_caching:
            self.counts.prefix_queries += sequence.prompt_len
            self.counts.prefix_hits += sequence.cached

    def _append(self, sequence: Sequence, token: int, now_ns: int) -> Output:
        gap_ns = now_ns - sequence.last_token_ns if sequence.first_token_ns else 0
        if not sequence.first_token_ns:
            sequence.first_token_ns = now_ns
            sequence.lost_to_first_ns = sequence.evicted_total_ns + sequence.recompute_total_ns
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
        return Output(sequence, token, now_ns, gap_ns, reason, sequence.evicted_total_ns, sequence.recompute_total_ns)

    def _finish(self, sequence: Sequence, reason: str, now_ns: int) -> None:
        """It stands in no queue any more. In a static batch its blocks stay taken, unless its client left."""
        sequence.finish_reason = reason
        sequence.finished_ns = now_ns
        self._free_slots(sequence)
        if self.config.batching == "static" and reason in ("stop", "length"):
            self.ended.append(sequence)
        else:
            self.blocks.release(sequence)
        if not self.running and not self.next:
            for member in self.ended:
                self.blocks.release(member)
            self.ended.clear()
            if sequence.scheduled_ns:
                self._batch_ended_ns = now_ns


def demand(sequence: Sequence) -> int:
    """Tokens of its prompt and of the longest answer it may get."""
    return sequence.prompt_len + sequence.params.max_tokens


def _count_recompute(sequence: Sequence, now_ns: int) -> None:
    sequence.recompute_total_ns += now_ns - sequence.recompute_ns
    sequence.recompute_ns = 0


def _awaits_leader(sequence: Sequence) -> bool:
    """Choices of one request share a prompt: the first computes it, the others wait for its blocks to be offered."""
    leader = sequence.leader
    return leader is not None and not leader.finish_reason and not leader.first_token_ns
