"""The lessons' machine and loads: the engine's scheduler and a cost model on a clock that jumps, metered."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from reference_engine.config import EngineConfig
from reference_engine.runner_api import Runner
from reference_engine.scheduler import Output
from reference_engine.sequence import Sequence
from reference_engine.virtual import Arrival, Clock, Simulation

MODEL = "sim:8b-h100"
BASE = EngineConfig(
    model=MODEL, num_blocks=26_000, max_num_seqs=64, max_num_batched_tokens=2048, prefix_caching=False, max_wait_ms=50
)
ABOUT = "An 8B decoder (Llama-3.1-8B's shape) on an H100, 75% of its bandwidth and 50% of its FLOP/s (guesses)"
REQUESTS = 1200
LOAD = f"{REQUESTS:,} Poisson arrivals, prompts with a median of 245 tokens, answers of 121, both lognormal"


class Metered:
    """A Runner that also counts what passes through it."""

    def __init__(self, runner: Runner, now_ns: Callable[[], int]) -> None:
        self.name, self.vocab_size = runner.name, runner.vocab_size
        self.eos_ids, self.max_positions = runner.eos_ids, runner.max_positions
        self._runner, self._now_ns = runner, now_ns
        self.busy_ns = self.steps = self.tokens = self.sequences = 0

    def execute(self, work: list[tuple[Sequence, int]]) -> list[int | None]:
        began_ns = self._now_ns()
        tokens = self._runner.execute(work)
        self.busy_ns += self._now_ns() - began_ns
        self.steps += 1
        self.tokens += sum(n for _, n in work)
        self.sequences += len(work)
        return tokens


class Ran(NamedTuple):
    """One simulated load. Arrays are over requests in order of arrival, seconds."""

    tokens_per_s: float  # that came out until the last request arrived: what is left then is no part of the load
    queue_s: np.ndarray
    ttft_s: np.ndarray
    tpot_s: np.ndarray  # of answers of two tokens or more
    e2e_s: np.ndarray
    longest_gap_s: np.ndarray  # of those too
    clients: np.ndarray  # names
    busy: float  # share of the time that the machine computed
    batch: float  # sequences of a step, mean
    computed: int  # tokens, those computed again among them
    preemptions: int
    hits: float  # share of prompt tokens that were found in the prefix cache

    @property
    def fifths_s(self) -> tuple[float, float]:
        """Mean time in the queue of the first fifth of the requests, and of the last."""
        fifth = max(1, len(self.queue_s) // 5)
        return float(self.queue_s[:fifth].mean()), float(self.queue_s[-fifth:].mean())

    @property
    def saturated(self) -> bool:
        """Who comes last waits over a second, and twice as long as who comes first: more comes than is served."""
        early_s, late_s = self.fifths_s
        return late_s > 1 and late_s > 2 * early_s


def rng(*seed: int) -> np.random.Generator:
    """One stream of random numbers for each tuple of small integers."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))


def chat(rate: float, requests: int = REQUESTS) -> list[Arrival]:
    """The lessons' load, see LOAD; the same requests at each rate, closer together."""
    random, arrivals, at_s = rng(7), list[Arrival](), 0.0
    for _ in range(requests):
        at_s += random.exponential(1 / rate)
        prompt = int(np.clip(245 * np.exp(0.9 * random.standard_normal()), 4, 2000))
        made = int(np.clip(121 * np.exp(0.8 * random.standard_normal()), 1, 1000))
        arrivals.append(Arrival(at_s, [0] * prompt, made))
    return arrivals


def simulate(config: EngineConfig, arrivals: Iterable[Arrival]) -> Ran:
    """All of `arrivals` served. The scheduler's invariants are checked at the end."""
    longest: dict[int, int] = {}
    made_ns: list[int] = []

    def see(outputs: list[Output]) -> None:
        for output in outputs:
            longest[output.sequence.id] = max(longest.get(output.sequence.id, 0), output.gap_ns)
            made_ns.append(output.at_ns)

    simulation = Simulation(config, after_step=see)
    simulation.runner = meter = Metered(simulation.runner, simulation.clock.now_ns)
    sequences = simulation.run(arrivals)
    simulation.scheduler.check()
    assert not simulation.refused
    begun_ns, last_ns = Clock().ns, sequences[-1].arrived_ns
    several = [s for s in sequences if s.output_len > 1]
    counts = simulation.scheduler.counts
    return Ran(
        tokens_per_s=float((np.array(made_ns) <= last_ns).sum() / max(1, last_ns - begun_ns) * 1e9),
        queue_s=np.array([s.scheduled_ns - s.arrived_ns for s in sequences]) / 1e9,
        ttft_s=np.array([s.first_token_ns - s.arrived_ns for s in sequences]) / 1e9,
        tpot_s=np.array([(s.last_token_ns - s.first_token_ns) / (s.output_len - 1) for s in several]) / 1e9,
        e2e_s=np.array([s.finished_ns - s.arrived_ns for s in sequences]) / 1e9,
        longest_gap_s=np.array([longest[s.id] for s in several]) / 1e9,
        clients=np.array([s.client for s in sequences]),
        busy=meter.busy_ns / (simulation.clock.ns - begun_ns),
        batch=meter.sequences / meter.steps,
        computed=meter.tokens,
        preemptions=counts.preemptions,
        hits=counts.prefix_hits / counts.prefix_queries if counts.prefix_queries else 0.0,
    )


def p(values: np.ndarray, percent: float) -> float:
    return float(np.percentile(values, percent))


def said(seconds: float) -> str:
    """Three digits, in the unit that suits."""
    if seconds >= 1:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"
