"""What many workers cost the parent: the plan cut for each, records collected, files merged; no load is sent.

    python -m bench.control_path --shards 256 --records 10000000

The parts are cut, pickled and their bytes read as for real, one after the other, and what 256 hosts would tell is told:
each part's records, stamped by a clock of its own, in answers of eight megabytes at most, moved onto the parent's clock
by the code that an agent runs. Then the cell is read back, and a few figures of it are computed.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from bench.process import machine
from llm_bench import host_clock, host_part, metrics, records, targets, windows
from llm_bench.bodies import Ask
from llm_bench.cell import Cell, Options
from llm_bench.host_link import Host, Pipe
from llm_bench.plan import Load, Plan
from llm_bench.probe import Probe
from llm_bench.records import SCHEMA
from llm_bench.request import Request

BATCH = 250  # records: what a worker at 1,000 requests/s flushes four times a second
EVENTS = 4  # of an answer: the records' own work, and not that of their stamps, is what the parent has most of
RATE = 100_000.0  # requests/s of the plan, over all shards
FIGURES = ("ttft_p50", "ttft_p99", "e2e_p99", "lag_p99", "requests_per_second", "error_rate")


class Step(NamedTuple):
    name: str
    seconds: float
    peak_rss_gb: float  # of this process so far, pages of mapped files counted


def run(shards: int, count: int, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Plan, cut, collect, merge. Returns the steps' cost and what was found; `lost` is 0 where nothing was."""
    steps: list[Step] = []
    begun = time.monotonic()

    def done(name: str, of_others_s: float = 0.0) -> None:
        nonlocal begun
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        steps.append(Step(name, round(time.monotonic() - begun - of_others_s, 2), round(peak, 2)))
        say(f"{name}: {steps[-1].seconds} s, peak {steps[-1].peak_rss_gb} GB")
        begun = time.monotonic()

    cell, work = _planned(count, folder)
    done("plan")
    facts = {"run_id": "00000000", "cell": cell.name, "plan": {"hash": work.hash}, "workers": shards}
    facts |= {"load": cell.load_facts(), "target": cell.target.public()}
    sent, of_hosts_s = 0, 0.0
    for k in range(shards):
        job = host_part.cut(cell, work, facts, k, shards)
        sent += len(host_part.dumps(job)) + sum(map(len, host_part.pieces(work, job)))
        asked_s = time.monotonic()
        _host_writes(job, folder / f"{k}.raw")
        of_hosts_s += time.monotonic() - asked_s
        del job
    work.close()
    done("cut", of_hosts_s)
    for k in range(shards):
        _collect(k, folder / f"{k}.raw", folder / f"{cell.name}.w{k}.arrow")
    done("collect")
    read = records.read_cell(folder, cell.name)
    done("merge")
    values = metrics.compute_all(FIGURES, read, windows.whole(read))
    done("figures")
    rows = read["index"]
    lost = count - len(np.unique(rows))
    return {
        "shards": shards, "records": count, "lost": lost, "complete": read.complete, "told_bytes": sent,
        "steps": [step._asdict() for step in steps], "figures": {v.name: v.value for v in values},
    }  # fmt: skip


def _planned(count: int, folder: Path) -> tuple[Cell, Plan]:
    found = Probe(["m"], "m", None, True, True, True, False, Ask("m"), 4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 10.0, 4, [])
    request = Request(tokens_in=8, tokens_out=EVENTS)
    cell = Cell(Options(out=folder), "00000000", 0, targets.Target("t", "http://h/v1"), found, [request] * count,
                Load(rate=RATE, burstiness=None))  # fmt: skip
    work = Plan(cell.requests, cell.due_ns, folder / "spool", cell.next_payload)
    work.write(b"Content-Length: 100\r\n\r\n" + b"x" * 92 + b"%08d" % i for i in range(count))  # a body costs 15 us
    return cell, work


# ---- what hosts do, each on a machine of its own


def _host_writes(job: host_part.Job, path: Path) -> None:
    """A part's records on a host whose clock is 21 minutes ahead for every second worker: columns at once, not one by
    one as a driver does."""
    rng, ahead_ns = np.random.default_rng(job.worker), job.worker % 2 * 1_260_000_000_000
    header = json.dumps(job.facts)
    with path.open("wb") as file:
        file.write(SCHEMA.with_metadata({"llm_bench": header}).serialize())
        for at in range(0, len(job.rows), BATCH):
            part = slice(at, at + BATCH)
            file.write(_batch(job.rows[part], job.due_ns[part] + 10**12 + ahead_ns, rng).serialize())
        file.write(host_clock.END_OF_STREAM)


def _batch(rows: np.ndarray, due_ns: np.ndarray, rng: np.random.Generator) -> pa.RecordBatch:
    n = len(rows)
    sent = due_ns + rng.integers(10_000, 90_000, n)
    events = sent[:, None] + np.cumsum(rng.integers(1_000_000, 9_000_000, (n, EVENTS)), axis=1)
    offsets = pa.array(np.arange(n + 1, dtype=np.int32) * EVENTS)
    known: dict[str, Any] = {
        "index": rows, "due_ns": due_ns, "ready_ns": due_ns, "sent_ns": sent, "first_byte_ns": events[:, 0],
        "end_ns": events[:, -1] + 1000, "first_answer_ns": events[:, 0], "asked_out": np.full(n, EVENTS),
        "tokens_in": np.full(n, 8), "tokens_out": np.full(n, EVENTS), "attempts": np.ones(n, np.int64),
    }  # fmt: skip
    texts = {"request_id": [f"00000000-0-{row}" for row in rows.tolist()], "outcome": ["ok"] * n,
             "tokens_out_from": ["usage"] * n, "finish_reason": ["length"] * n}  # fmt: skip
    columns = []
    for field in SCHEMA:
        if field.name == "event_ns":
            columns.append(pa.ListArray.from_arrays(offsets, pa.array(events.reshape(-1))))
        elif field.name in known:
            columns.append(pa.array(known[field.name], field.type))
        else:
            columns.append(pa.array(texts.get(field.name) or [records.UNKNOWN[field.name]] * n, field.type))
    return pa.record_batch(columns, schema=SCHEMA)


# ---- collected


def _collect(worker: int, raw: Path, path: Path) -> None:
    """As `hosts` does with what `host_agent` tells: whole messages, on the parent's clock, appended as they are."""
    host = Host(worker, _NoLink())
    ahead_ns = worker % 2 * 1_260_000_000_000
    with raw.open("rb") as file:
        for told in _told(file.read(), -ahead_ns):
            host.keep(told, path)
    host.close()
    raw.unlink()


class _NoLink(Pipe):
    """Nothing is asked: what a host tells is made here."""

    def __init__(self) -> None:
        self.name, self.here = "none", True


def _told(stream: bytes, by_ns: int) -> Iterator[bytes]:
    held, size, at, schema = list[bytes](), 0, 0, None
    for end, message in host_clock.messages(stream):
        data = stream[at:end]
        if message is not None and schema is None:
            schema = pa.ipc.read_schema(message)
        elif message is not None:
            data = bytes(host_clock.moved(pa.ipc.read_record_batch(message, schema), by_ns).serialize())
        held.append(data)
        at, size = end, size + len(data)
        if size >= host_part.PIECE:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.control_path")
    parser.add_argument("--shards", type=int, default=256)
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path, help="for some GB of files; default: the system's for temporary ones")
    asked = parser.parse_args()
    if not 1 <= asked.shards <= asked.records:
        parser.error(f"--shards {asked.shards} of --records {asked.records}: expected 1 or more, each with a record")
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        found = run(asked.shards, asked.records, Path(folder), lambda text: print(text, file=sys.stderr, flush=True))
    print(json.dumps({"machine": machine(), **found}, indent=1))


if __name__ == "__main__":
    main()
