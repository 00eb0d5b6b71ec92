"""What the instrument adds: llm-bench against an engine that accounts for each request to the nanosecond.

    python -m bench.instrument [--loads fast,8b-h100] [--out DIR]

The engine is `python -m reference_engine --model sim:NAME --log-requests FILE`: its account of a request runs from the
moment when its headers were read to the moment when its last event was written. The client's records are joined with it
by X-Request-Id. Client minus engine is then what the sockets, the machine's scheduling and this client add: an upper
bound of the instrument's own error. Both sides read CLOCK_MONOTONIC of one machine, each from a core of its own. Exit
code: 0 the limit is held, 1 it is not, 3 it is not and others were at work on the machine.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench import process
from bench.engine_client import drive, engine, write_trace
from bench.lesson_sim import BASE, chat
from llm_bench.columns import Cell
from reference_engine.config import EngineConfig
from reference_engine.virtual import Arrival

LIMIT_MS = 5.0  # of p99 of |client - engine|, for each metric
IDLE_LOAD = 0.25  # load average a core, before: above, others' work is in the figure
ENGINE_CORE, CLIENT_CORE = 0, 1
MEASURED = ("ttft_ms", "tpot_ms", "e2e_ms", "there_ms")


class Load(NamedTuple):
    """One workload on an engine whose steps take known times."""

    about: str
    config: EngineConfig
    arrivals: list[Arrival]
    flags: tuple[str, ...]  # of llm-bench run


class Apart(NamedTuple):
    """Client minus engine. Arrays are over the ok requests that both know, milliseconds."""

    ttft_ms: np.ndarray  # of those that were never preempted: else the log does not say when the first token was made
    tpot_ms: np.ndarray  # of answers of two tokens or more
    e2e_ms: np.ndarray
    there_ms: np.ndarray  # from the client's sent stamp to the engine's received: part of ttft and e2e
    unknown: int  # ok records of the client that the engine has no line of
    tokens: tuple[int, int]  # that came, as events and as the engine counted
    in_flight_s: tuple[float, float]  # ∫N dt: the client's gauge, the sum of the engine's requests


def loads(requests: int) -> dict[str, Load]:
    """What is driven; `requests` in each."""
    short = [Arrival(0.0, [0] * 64, 32 + i * 37 % 64) for i in range(requests)]  # unequal: they do not end together
    return {
        "fast": Load(
            "steps of 1 ms, 8 streams, 32 to 95 tokens each",
            replace(BASE, model="sim:fast"),
            short,
            ("--concurrency", "8"),
        ),
        "8b-h100": Load("the lessons' chat load, 16 requests/s", BASE, chat(16, requests), ("--replay",)),
    }


def apart(cell: Cell, log: Iterable[str]) -> Apart:
    """Join the client's records with the engine's log, by request id; lines of probes have no record, and no part."""
    lines = {line["request_id"]: line for line in map(json.loads, log)}
    rows = np.flatnonzero(cell["outcome"] == "ok")
    known = [(row, lines[name]) for row in rows.tolist() if (name := cell["request_id"][row]) in lines]
    ttft, tpot, e2e, there = [], [], [], []
    for row, line in known:
        parts, sent_ns = line["parts_ns"], int(cell["sent_ns"][row])
        first_ns, last_ns, tokens = int(cell.first_ns[row]), int(cell.last_ns[row]), line["completion_tokens"]
        there.append(line["received_ns"] - sent_ns)
        e2e.append(int(cell["end_ns"][row]) - sent_ns - line["total_ns"])
        if not line["preemptions"]:
            ttft.append(first_ns - sent_ns - (parts["http_in"] + parts["queue"] + parts["prefill"]))
        if tokens > 1:
            decode_ns = parts["decode"] + parts["preempted"] + parts["recompute"]
            tpot.append((last_ns - first_ns - decode_ns) / (tokens - 1))
    gauge = cell.gauge
    client_s = float(np.diff(gauge[:, 0]) @ gauge[:-1, 1]) / 1e9 if len(gauge) else 0.0
    at = np.array([row for row, _ in known], int)
    return Apart(
        np.array(ttft, float) / 1e6,
        np.array(tpot, float) / 1e6,
        np.array(e2e, float) / 1e6,
        np.array(there, float) / 1e6,
        unknown=len(rows) - len(known),
        tokens=(int(cell.counts[at].sum()), sum(line["completion_tokens"] for _, line in known)),
        in_flight_s=(client_s, sum(line["total_ns"] for _, line in known) / 1e9),
    )


def run(load: Load, cores: tuple[int, int] | None) -> Apart:
    """One load through both programs. Raises RuntimeError if the client fails."""
    engine_core, client_core = cores or (None, None)
    with tempfile.TemporaryDirectory(prefix="instrument-") as name:
        folder = Path(name)
        write_trace(folder / "trace.jsonl", load.arrivals)
        with engine(load.config, f"--log-requests={folder / 'log'}", core=engine_core) as url:
            cell = drive(url, folder / "trace.jsonl", folder / "run", *load.flags, core=client_core)
        return apart(cell, (folder / "log").read_text().splitlines())


def points(ms: np.ndarray) -> dict[str, float]:
    """Of the size of the differences; the least keeps its sign: below 0 the client was before the engine."""
    return {
        "p50": float(np.percentile(abs(ms), 50)),
        "p99": float(np.percentile(abs(ms), 99)),
        "max": float(abs(ms).max()),
        "least": float(ms.min()),
    }


def facts_of(load: Load, found: Apart) -> dict[str, Any]:
    ours_s, theirs_s = found.in_flight_s
    return {
        "about": load.about,
        "joined": len(found.e2e_ms),
        "unknown": found.unknown,
        "tokens": found.tokens,
        "in_flight_s": found.in_flight_s,
        "in_flight_apart": ours_s / theirs_s - 1 if theirs_s else None,
        **{name: points(getattr(found, name)) for name in MEASURED if len(getattr(found, name))},
    }


def held(facts: dict[str, Any]) -> bool:
    """Whether p99 is within the limit for TTFT, TPOT and e2e, every request was known and every token counted."""
    small = all(facts[name]["p99"] < LIMIT_MS for name in MEASURED[:3] if name in facts)
    return bool(small and not facts["unknown"] and facts["tokens"][0] == facts["tokens"][1])


def table(found: dict[str, dict[str, Any]], machine: dict[str, Any]) -> str:
    """In words and Markdown."""
    named = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "e2e", "there_ms": "of these: sent → received"}
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}; load average before: "
        f"{machine['load_before']:.2f}.",
        "",
        "| load | client - engine | p50 ms | p99 ms | max ms | least ms |",
        "|---|---|---|---|---|---|",
    ]
    for name, facts in found.items():
        for metric, words in named.items():
            if metric in facts:
                cells = [f"{facts[metric][q]:.3f}" for q in ("p50", "p99", "max", "least")]
                lines.append(f"| {name} | {words} | {' | '.join(cells)} |")
    lines.append("")
    for name, facts in found.items():
        ours, theirs = facts["tokens"]
        client_s, engine_s = facts["in_flight_s"]
        lines.append(
            f"- {name} ({facts['about']}): {facts['joined']:,} requests joined, {facts['unknown']} not in the engine's "
            f"log; tokens {ours:,} and {theirs:,}; ∫N dt {client_s:.2f} and {engine_s:.2f} request-seconds."
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.instrument", description=__doc__.partition("\n")[0])
    parser.add_argument("--loads", default=",".join(loads(0)), help="which: %(default)s")
    parser.add_argument("--requests", type=int, default=320, help="of each load (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for instrument.json")
    asked = parser.parse_args()
    every = loads(asked.requests)
    names = asked.loads.split(",")
    if unknown := set(names) - every.keys():
        parser.error(f"--loads {sorted(unknown)}: known are {', '.join(every)}")
    apart_cores = {ENGINE_CORE, CLIENT_CORE} <= os.sched_getaffinity(0)
    machine = process.machine()
    found = {}
    for name in names:
        load = every[name]
        found[name] = facts_of(load, run(load, (ENGINE_CORE, CLIENT_CORE) if apart_cores else None))
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "instrument.json").write_text(json.dumps({"machine": machine, "loads": found}, indent=1) + "\n")
    print(table(found, machine))
    if all(map(held, found.values())):
        print(f"\nHeld: p99 of |client - engine| under {LIMIT_MS:g} ms for TTFT, TPOT and e2e; every token counted.")
        return 0
    busy = machine["load_before"] > IDLE_LOAD * machine["cores"]
    print(f"\nNot held: p99 under {LIMIT_MS:g} ms" + ("; but others were at work on this machine." if busy else "."))
    return 3 if busy else 1


if __name__ == "__main__":
    sys.exit(main())
