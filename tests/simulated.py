"""The reference engine in virtual time, as records: what a server of known settings does, the same on every machine."""

from collections.abc import Sequence

import numpy as np

from llm_bench.records import Record
from reference_engine.config import EngineConfig
from reference_engine.scheduler import Output
from reference_engine.virtual import Arrival, Simulation
from tests.sample import record


def poisson(rate: float, n: int, lengths: Sequence[tuple[int, int]], seed: int = 0) -> list[Arrival]:
    """`n` arrivals at `rate` a second, of one of `lengths` each (prompt, answer: tokens). None begins as another."""
    rng = np.random.Generator(np.random.PCG64(seed))
    dues, which = np.cumsum(rng.exponential(1 / rate, n)).tolist(), rng.integers(len(lengths), size=n).tolist()
    sizes = [lengths[k] for k in which]
    return [Arrival(due, [i + 10] * size[0], size[1]) for i, (due, size) in enumerate(zip(dues, sizes, strict=True))]


def served(config: EngineConfig, arrivals: Sequence[Arrival], tell: bool = True) -> list[Record]:
    """Each sent when it is due, an event a token. `tell`: the answers say where their time went."""
    events: dict[int, list[float]] = {}

    def after(outputs: list[Output]) -> None:
        for output in outputs:
            if output.token >= 0:
                events.setdefault(output.sequence.id, []).append((output.at_ns - begun_ns) / 1e6)

    simulation = Simulation(config, after_step=after)
    begun_ns, rows = simulation.clock.ns, []
    for i, (one, asked) in enumerate(zip(simulation.run(arrivals), arrivals, strict=True)):
        spent_ns = (
            one.scheduled_ns - one.arrived_ns,
            one.first_token_ns - one.scheduled_ns,
            one.last_token_ns - one.first_token_ns,
        )
        names = ("server_queue_ms", "server_prefill_ms", "server_decode_ms")
        told = {name: ns / 1e6 for name, ns in zip(names, spent_ns, strict=True)} if tell else {}
        lengths = {"tokens_in": len(asked.prompt), "planned_in": len(asked.prompt), "asked_out": asked.max_tokens}
        rows.append(record(i, asked.at_s * 1e3, events=events[one.id], **lengths, **told))
    return rows
