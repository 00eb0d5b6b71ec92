"""The scheduler and a cost model on a clock that jumps: hours of load in seconds, the same on every machine."""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from reference_engine.config import EngineConfig
from reference_engine.cost_model import CostModel
from reference_engine.runner_api import Runner
from reference_engine.scheduler import Output, Scheduler, TooLong
from reference_engine.sequence import SamplingParams, Sequence


class Clock:
    """Nanoseconds that pass only by `sleep` and `advance`. It begins at 1 s: 0 stands for "not yet" in a Sequence."""

    def __init__(self) -> None:
        self.ns = 1_000_000_000

    def now_ns(self) -> int:
        return self.ns

    def sleep(self, seconds: float) -> None:
        self.ns += max(1, round(seconds * 1e9))

    def advance(self, to_ns: int) -> None:
        self.ns = max(self.ns, to_ns)


class Arrival(NamedTuple):
    """One request of one choice. `leaves_after_s`: its client has gone by then; None: it stays."""

    at_s: float
    prompt: list[int]
    max_tokens: int
    priority: int = 0
    client: str = ""
    leaves_after_s: float | None = None


class Simulation:
    """What the engine's step loop does, without threads. `after_step` sees every step's outputs."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner | None = None,
        after_step: Callable[[list[Output]], object] | None = None,
    ) -> None:
        """`runner`: None for the cost model that config.model names, on this clock."""
        self.config = config
        self.clock = Clock()
        self.scheduler = Scheduler(config, frozenset())
        self.runner = runner or CostModel(config.model, config.seed, self.clock.now_ns, self.clock.sleep)
        self.refused: list[Arrival] = []  # could never be served
        self._after_step = after_step or (lambda outputs: None)

    def run(self, arrivals: Iterable[Arrival]) -> list[Sequence]:
        """Until the last has ended; sequences in the order of arrival, which is that of `arrivals`."""
        begin_ns = self.clock.ns
        coming: Iterator[Arrival] = iter(arrivals)
        following = next(coming, None)
        sequences: list[Sequence] = []
        leaving: list[tuple[int, int, Sequence]] = []
        numbers = itertools.count()
        while True:
            while following and begin_ns + round(following.at_s * 1e9) <= self.clock.ns:
                at_ns = begin_ns + round(following.at_s * 1e9)
                number = next(numbers)
                prompt, client = list(following.prompt), following.client
                params = SamplingParams(following.max_tokens)
                sequence = Sequence(
                    number, prompt, len(prompt), params, number, following.priority, client, arrived_ns=at_ns
                )
                try:
                    self.scheduler.submit(sequence)
                    sequences.append(sequence)
                    if following.leaves_after_s is not None:
                        heapq.heappush(leaving, (at_ns + round(following.leaves_after_s * 1e9), number, sequence))
                except TooLong:
                    self.refused.append(following)
                following = next(coming, None)
            while leaving and leaving[0][0] <= self.clock.ns:
                self.scheduler.abort(heapq.heappop(leaving)[2], "abort", self.clock.ns)
            wait_ns = self.scheduler.wait_ns(self.clock.ns)
            if wait_ns != 0:
                dues = [begin_ns + round(following.at_s * 1e9)] if following else []
                dues += [leaving[0][0]] if leaving else []
                dues += [self.clock.ns + wait_ns] if wait_ns else []
                if not following and wait_ns is None:
                    return sequences
                self.clock.advance(min(dues))
                continue
            self.step()

    def step(self) -> None:
        """One step at the clock's time, which it moves on."""
        outputs = self.scheduler.expire(self.clock.ns)
        work = self.scheduler.step(self.config.max_num_batched_tokens, self.clock.ns)
        if work:
            outputs += self.scheduler.commit(work, self.runner.execute(work), self.clock.ns)
        self._after_step(outputs)
