"""A runner that keeps account of its memory: what it reads through a block table must be what belongs there."""

from collections.abc import Callable

from reference_engine.blocks import Blocks
from reference_engine.config import EngineConfig
from reference_engine.scheduler import Output, Scheduler
from reference_engine.sequence import SamplingParams, Sequence


def chain(state: int, token: int) -> int:
    """Stands for keys and values: depends on every token up to its own."""
    return hash((state, token))


class PagedStub:
    """Its tokens are letters that depend on the whole prefix as read from memory: a wrong block changes the answer."""

    name = "stub"
    vocab_size = 264
    eos_ids: frozenset[int] = frozenset()
    max_positions = 4096

    def __init__(self, block_size: int, pool: Blocks | None = None, before: Callable[[], object] | None = None) -> None:
        """`pool`: whose rules each write must keep. `before`: called at the beginning of each step."""
        self.block_size = block_size
        self.pool = pool
        self.before = before or (lambda: None)
        self.memory: dict[tuple[int, int], int] = {}
        self.steps: list[list[tuple[int, int]]] = []  # (sequence id, n) of each

    def execute(self, work: list[tuple[Sequence, int]]) -> list[int | None]:
        self.before()
        self.steps.append([(s.id, n) for s, n in work])
        states = [self._read(s) for s, _ in work]  # all read before any writes: nobody may need what this step computes
        written: set[tuple[int, int]] = set()
        tokens: list[int | None] = []
        for (sequence, n), state in zip(work, states, strict=True):
            assert n > 0
            for position in range(sequence.computed, sequence.computed + n):
                state = chain(state, sequence.token_ids[position])
                slot = self._slot(sequence, position)
                assert slot not in written, "two tokens in one slot"
                assert self.pool is None or self.pool.writable(slot[0]), "a write to a shared or published block"
                written.add(slot)
                self.memory[slot] = state
            at_end = sequence.computed + n == len(sequence.token_ids)
            tokens.append(ord("a") + state % 26 if at_end else None)
        return tokens

    def _read(self, sequence: Sequence) -> int:
        state = 0
        for position in range(sequence.computed):
            state = chain(state, sequence.token_ids[position])
            assert self.memory[self._slot(sequence, position)] == state, "a block holds another prefix"
        return state

    def _slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.blocks[position // self.block_size], position % self.block_size


class Drive:
    """A scheduler and a stub, stepped by hand on a clock that counts steps."""

    def __init__(self, config: EngineConfig, eos_ids: frozenset[int] = frozenset()) -> None:
        self.config = config
        self.scheduler = Scheduler(config, eos_ids)
        self.runner = PagedStub(config.block_size, self.scheduler.blocks)
        self.now = 0
        self.submitted: list[Sequence] = []

    def submit(self, prompt: list[int], max_tokens: int, **fields: object) -> Sequence:
        number = len(self.submitted)
        params = fields.pop("params", SamplingParams(max_tokens))
        sequence = Sequence(number, list(prompt), len(prompt), params, number, arrived_ns=self.now, **fields)  # type: ignore[arg-type]
        self.scheduler.submit(sequence)
        self.submitted.append(sequence)
        return sequence

    def step(self) -> list[Output]:
        self.now += 1
        work = self.scheduler.step(self.config.max_num_batched_tokens, self.now)
        assert sum(n for _, n in work) <= self.config.max_num_batched_tokens
        outputs = self.scheduler.commit(work, self.runner.execute(work), self.now)
        self.scheduler.check()
        return outputs

    def finish(self, most_steps: int = 10_000) -> int:
        """Step until nothing is left; how many steps that took."""
        for steps in range(most_steps):
            if not self.scheduler.busy:
                return steps
            self.step()
        raise AssertionError(f"not finished after {most_steps} steps")


def answer(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.prompt_len :]


def alone(config: EngineConfig, prompt: list[int], max_tokens: int) -> tuple[list[int], int]:
    """What a prompt is answered when nothing else runs, and the steps it took."""
    drive = Drive(config)
    sequence = drive.submit(prompt, max_tokens)
    steps = drive.finish()
    return answer(sequence), steps
