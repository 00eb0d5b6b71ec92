"""Does the search find the capacity of queues whose truth is known?

    python -m bench.search_queues [--seeds 40] [--budgets 10,30,100]

M/M/1 and M/D/1 by theory, M/G/16 with lognormal service by a long simulation: the highest rate at which 95% of requests
wait less than the limit. Each probe is a simulated cell, judged by the code that judges a real one; nothing sleeps.
"""

import argparse
import json
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from bench import queue_sim
from bench.queue_sim import rng
from llm_bench import objectives, records, search, windows
from llm_bench.columns import Cell
from llm_bench.records import Record
from llm_bench.search import Answer, Plan, Probe, Seen

SHARE = 0.95
MEAN_S = 0.1  # of the service
OTHER_MS = 1.0  # from the begin of the service to the first token
TRUTH_REQUESTS = 2_000_000
TRUTH, PROBE = range(2)  # the first number of every seed


class Queue(NamedTuple):
    """`wait`: the limit on the wait in mean services, under which 95% shall lie."""

    name: str
    servers: int
    wait: float
    services: Callable[[np.random.Generator, int], np.ndarray]  # of mean 1


def _exponential(random: np.random.Generator, n: int) -> np.ndarray:
    return random.exponential(1.0, n)


def _constant(_: np.random.Generator, n: int) -> np.ndarray:
    return np.ones(n)


QUEUES = (
    Queue("M/M/1", 1, 5.0, _exponential),
    Queue("M/D/1", 1, 4.0, _constant),
    Queue("M/G/16", 16, 0.5, queue_sim.services),
)


# ---- the truth, as load on one server


def within_mm1(load: float, wait: float) -> float:
    """P(W <= wait), in mean services (Erlang)."""
    return 1 - load * math.exp(-(1 - load) * wait)


def within_md1(load: float, wait: float) -> float:
    """P(W <= wait), in services (Erlang 1909). Terms alternate: good to 1e-9 for waits of up to ten services."""
    terms = (
        (load * (k - wait)) ** k / math.factorial(k) * math.exp(-load * (k - wait)) for k in range(math.floor(wait) + 1)
    )
    return (1 - load) * sum(terms)


def within_simulated(queue: Queue, load: float, n: int, seed: int = 0) -> float:
    """P(W <= wait) in a long run; the same random numbers at each load, so that it falls smoothly with it."""
    random = rng(TRUTH, queue.servers, seed)
    due, service = random.exponential(1.0, n), queue.services(random, n)
    stays = queue_sim.fcfs(np.cumsum(due) / (load * queue.servers), service, queue.servers).after(queue_sim.WARMUP)
    return float((stays.begin_s - stays.due_s < queue.wait).mean())


def capacity(queue: Queue, n: int = TRUTH_REQUESTS) -> float:
    """The highest load on one server at which SHARE of the requests wait less than the limit."""
    within = {"M/M/1": within_mm1, "M/D/1": within_md1}.get(queue.name)
    low, high, steps = 0.05, 0.999, 40 if within else 10
    for _ in range(steps):
        load = (low + high) / 2
        found = within(load, queue.wait) if within else within_simulated(queue, load, n)
        low, high = (load, high) if found >= SHARE else (low, load)
    return (low + high) / 2


# ---- a cell of it


def cell(queue: Queue, rate: float, n: int, *seed: int) -> Cell:
    """n requests at `rate` a second, from an empty queue, as the records of a cell of an open loop."""
    random = rng(PROBE, *seed)
    due_s = np.concatenate([[0.0], np.cumsum(random.exponential(1 / rate, n - 1))])
    stays = queue_sim.fcfs(due_s, MEAN_S * queue.services(random, n), queue.servers)
    rows = zip(stays.due_s.tolist(), stays.begin_s.tolist(), stays.end_s.tolist(), strict=True)
    header = {"load": {"kind": "open", "rate": rate, "warmup": None}, "settings": {}, "target": {"name": queue.name}}
    return records.from_records([_record(i, *row) for i, row in enumerate(rows)], header)


def _record(index: int, due_s: float, begin_s: float, end_s: float) -> Record:
    due, first = round(due_s * 1e9) + 1, round((begin_s + OTHER_MS / 1e3) * 1e9) + 1
    end = max(first + 1, round(end_s * 1e9) + 1)
    return Record(
        index=index,
        request_id="",
        outcome="ok",
        due_ns=due,
        ready_ns=due,
        sent_ns=due,
        first_byte_ns=first,
        end_ns=end,
        event_ns=[first, end],
        tokens_out=2,
    )


# ---- searches


class Found(NamedTuple):
    answer: Answer
    cells: int
    requests: int


def find(queue: Queue, plan: Plan, agreed: objectives.Slo, *seed: int) -> Found:
    """One search. Time is that of the simulation: a cell takes from its first due time to its last end."""
    seen: list[Seen] = []
    while True:
        step = search.step(plan, seen, sum(s.seconds for s in seen))
        if isinstance(step, Answer):
            return Found(step, len(seen), sum(s.requests for s in seen))
        seen.append(_measure(queue, step, agreed, *seed, len(seen)))


def _measure(queue: Queue, probe: Probe, agreed: objectives.Slo, *seed: int) -> Seen:
    found = cell(queue, probe.load, probe.requests, *seed)
    window = windows.of(found)
    last_s = float(found["due_ns"].max() - found["due_ns"][0]) / 1e9
    drained_s = float(found["end_ns"].max() - found["due_ns"][0]) / 1e9
    seconds = last_s if window.state == windows.GROWING else drained_s  # an overloaded cell is cut
    return search.seen(str(seed[-1]), probe.load, found, window, agreed, seconds=seconds)


def asked(queue: Queue, budget: float, start: float = 1.0) -> tuple[Plan, objectives.Slo]:
    """`budget` in thousands of mean services of all servers: requests at full load."""
    limit_ms = 1e3 * MEAN_S * queue.wait + OTHER_MS
    agreed = objectives.parse(f"ttft_p95<{limit_ms:g}ms,{search.GUARD}")
    budget_s = 1e3 * budget * MEAN_S / queue.servers
    return Plan("rate", agreed.limits, guards=1, start=start, least=0.01, most=1e4, budget_s=budget_s), agreed


class Row(NamedTuple):
    queue: str
    capacity: float  # requests/s
    budget: float
    seeds: int
    covered: int
    resolved: int
    width: float  # median of missed / met
    cells: float  # median
    requests: float


def trial(queue: Queue, truth: float, budget: float, seeds: int) -> Row:
    """So many searches: in how many does the capacity lie within the reported bracket?"""
    rate = truth * queue.servers / MEAN_S
    plan, agreed = asked(queue, budget, start=1 / MEAN_S)
    found = [find(queue, plan, agreed, seed) for seed in range(seeds)]
    ends = [
        (f.answer.met.load if f.answer.met else 0.0, f.answer.missed.load if f.answer.missed else math.inf)
        for f in found
    ]
    return Row(
        queue.name,
        rate,
        budget,
        seeds,
        sum(low <= rate <= high for low, high in ends),
        sum(f.answer.end == "resolved" for f in found),
        float(np.median([high / low if low else math.inf for low, high in ends])),
        float(np.median([f.cells for f in found])),
        float(np.median([f.requests for f in found])),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--budgets", default="10,30,100", help="in thousands of requests at full load")
    given = parser.parse_args()
    for queue in QUEUES:
        truth = capacity(queue)
        for budget in map(float, given.budgets.split(",")):
            print(json.dumps(trial(queue, truth, budget, given.seeds)._asdict()), flush=True)


if __name__ == "__main__":
    main()
