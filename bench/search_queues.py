"""Does the search find the capacity of queues whose truth is known?

    python -m bench.search_queues [--seeds 40] [--budgets 10,30,100]
    python -m bench.search_queues --sockets [--seeds 10] [--budgets 10] [--queues M/M/1]

M/M/1 and M/D/1 by theory, M/G/16 with lognormal service by a long simulation: the highest rate at which 95% of requests
wait less than the limit. Each probe is a simulated cell, judged by the code that judges a real one; nothing sleeps.
With --sockets each is a cell of `llm-bench search` against a null target in a process of its own, in real time.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench import queue_sim
from bench.queue_sim import rng
from llm_bench import objectives, records, search, search_evidence, search_run, targets, windows
from llm_bench.cell import Options
from llm_bench.columns import Cell
from llm_bench.records import Record
from llm_bench.run import Ended, Job
from llm_bench.search import Answer, Plan, Probe
from llm_bench.search_evidence import Seen

SHARE = 0.95
MEAN_S = 0.1  # of the service
OTHER_MS = 1.0  # from the begin of the service to the first token
SOCKET_MEAN_S = 0.005  # of one server; k of them serve k times as long, so that each queue has the same rates
SLACK_MS = 0.5  # of a socket's way there and back and of two timers, on top of the limit
TRUTH_REQUESTS = 2_000_000
TRUTH, PROBE = range(2)  # the first number of every seed


class Queue(NamedTuple):
    """`wait`: the limit on the wait in mean services, under which 95% shall lie."""

    name: str
    servers: int
    wait: float
    services: Callable[[np.random.Generator, int], np.ndarray]  # of mean 1
    service: str  # what the null target calls them


def _exponential(random: np.random.Generator, n: int) -> np.ndarray:
    return random.exponential(1.0, n)


def _constant(_: np.random.Generator, n: int) -> np.ndarray:
    return np.ones(n)


QUEUES = (
    Queue("M/M/1", 1, 5.0, _exponential, "exponential"),
    Queue("M/D/1", 1, 4.0, _constant, "constant"),
    Queue("M/G/16", 16, 0.5, queue_sim.services, "lognormal"),
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
    return search_evidence.seen(str(seed[-1]), probe.load, found, window, agreed, seconds=seconds)


def asked(queue: Queue, budget: float, start: float = 1.0) -> tuple[Plan, objectives.Slo]:
    """`budget` in thousands of mean services of all servers: requests at full load."""
    limit_ms = 1e3 * MEAN_S * queue.wait + OTHER_MS
    agreed = objectives.parse(f"ttft_p95<{limit_ms:g}ms,{search.GUARD}")
    budget_s = 1e3 * budget * MEAN_S / queue.servers
    return Plan("rate", agreed.limits, guards=1, start=start, least=0.01, most=1e4, budget_s=budget_s), agreed


# ---- the same on real sockets


@contextmanager
def served(queue: Queue, mean_s: float, seed: int) -> Iterator[str]:
    """A null target in a process of its own that serves as the queue does. Yields its URL."""
    command = [sys.executable, "-m", "llm_bench.null_target", "--servers", str(queue.servers)]
    command += ["--service", queue.service, "--service-ms", f"{1e3 * mean_s:g}", "--ttft-ms", f"{OTHER_MS:g}"]
    command += ["--seed", str(seed), "--exit-with-stdin"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin
    assert child.stdout
    try:
        yield json.loads(child.stdout.readline())["listening"]
    finally:
        child.stdin.close()
        child.wait(10)
        child.stdout.close()


def find_on_sockets(queue: Queue, truth: float, budget: float, seed: int) -> Found:
    """One search as `llm-bench search` makes it. `budget` in thousands of requests at full load."""
    mean_s = SOCKET_MEAN_S * queue.servers
    agreed, guards = search_run.guarded(f"ttft_p95<{1e3 * mean_s * queue.wait + OTHER_MS + SLACK_MS:g}ms")
    start = float(f"{truth * queue.servers / mean_s / 4:.2g}")
    wanted = search_run.Search("rate", agreed, guards, 1e3 * budget * SOCKET_MEAN_S, start, least=0.01, most=1e4)
    with tempfile.TemporaryDirectory() as folder, served(queue, mean_s, seed) as url:
        trace = Path(folder) / "trace.jsonl"
        rows = [{"llm_bench_trace": 1}, *[{"input_length": 8, "output_length": 2}] * 50]
        trace.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        job = Job(targets.parse(f"t={url}", Path(folder) / "none.toml", {}), (), trace, workers=1)
        options = Options(out=Path(folder) / "run", seed=seed)
        results, ended = search_run.find(job, options, wanted, lambda _: None, lambda _: None)
    if ended != Ended():
        raise SystemExit(f"{queue.name}, seed {seed}: {ended}")  # a bracket of a search that was cut is none
    answer = results[0].answer
    return Found(answer, sum(len(p.cells) for p in answer.points), sum(p.requests for p in answer.points))


# ---- many searches


class Row(NamedTuple):
    queue: str
    capacity: float  # requests/s
    budget: float
    seeds: int
    covered: int
    resolved: int
    width: float  # median of missed / met
    open: int  # brackets without a lower or an upper end
    cells: float  # median
    requests: float


def trial(queue: Queue, truth: float, budget: float, seeds: int) -> Row:
    """So many searches: in how many does the capacity lie within the reported bracket?"""
    rate = truth * queue.servers / MEAN_S
    plan, agreed = asked(queue, budget, start=1 / MEAN_S)
    return row_of(queue.name, rate, budget, [find(queue, plan, agreed, seed) for seed in range(seeds)])


def row_of(queue: str, rate: float, budget: float, found: list[Found]) -> Row:
    """`rate`: the capacity, in requests/s."""
    ends = [_ends(f.answer) for f in found]
    return Row(
        queue,
        rate,
        budget,
        len(found),
        sum(low <= rate <= high for low, high in ends),
        sum(f.answer.end == "resolved" for f in found),
        float(np.median([high / low if low else math.inf for low, high in ends])),
        sum(not low or high == math.inf for low, high in ends),
        float(np.median([f.cells for f in found])),
        float(np.median([f.requests for f in found])),
    )


def _ends(answer: Answer) -> tuple[float, float]:
    return answer.met.load if answer.met else 0.0, answer.missed.load if answer.missed else math.inf


def trial_on_sockets(queue: Queue, truth: float, budget: float, seeds: int) -> Row:
    rate, found = truth / SOCKET_MEAN_S, list[Found]()
    for seed in range(seeds):
        found.append(find_on_sockets(queue, truth, budget, seed))
        low, high = _ends(found[-1].answer)
        print(f"{queue.name} seed {seed}: {low:g} to {high:g}, capacity {rate:.4g}/s", file=sys.stderr, flush=True)
    return row_of(queue.name, rate, budget, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sockets", action="store_true", help="against null targets, in real time")
    parser.add_argument("--seeds", type=int, help="searches of each queue; default: 40, with --sockets 10")
    parser.add_argument("--budgets", help="thousands of requests at full load; default: 10,30,100, with --sockets 10")
    parser.add_argument("--queues", default=",".join(q.name for q in QUEUES))
    given = parser.parse_args()
    measure, seeds, budgets = (trial_on_sockets, 10, "10") if given.sockets else (trial, 40, "10,30,100")
    for queue in (q for q in QUEUES if q.name in given.queues.split(",")):
        truth = capacity(queue)
        for budget in map(float, (given.budgets or budgets).split(",")):
            print(json.dumps(measure(queue, truth, budget, given.seeds or seeds)._asdict()), flush=True)


if __name__ == "__main__":
    main()
