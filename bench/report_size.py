"""What a report of a large run costs: a synthetic record file, then `llm-bench report` with its wall time and peak RSS.

    python -m bench.report_size [--requests 1000000] [--tokens 200]

The records are made up: an open loop with Gamma-like stays, written batch by batch in the order in which requests end,
so that reading has to put them in due order. The last line of the output is one JSON document.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow as pa

from llm_bench.records import SCHEMA, Record

METRICS = "ttft_p95,tpot_p95,tokens_per_second,error_rate"
BATCH = 2500  # requests a flush: a quarter of a second at 10,000 a second
GAP_NS = 10_000_000
START_NS = 7_000_000_000_000


def write(path: Path, requests: int, tokens: int, seed: int = 0) -> None:
    """`requests` answers of `tokens` events each, one in 1,000 of them failed."""
    rng = np.random.default_rng(seed)
    due = START_NS + np.arange(requests, dtype=np.int64) * 100_000
    first = due + rng.gamma(2.0, 20e6, requests).astype(np.int64)
    header = {
        "cell": "000-a",
        "target": {"name": "a", "url": "http://127.0.0.1:1"},
        "load": {"kind": "open", "label": "rate=10000/s", "rate": 10_000.0, "warmup": None},
        "plan": {"requests": requests, "hash": ""},
        "settings": {"stream": True},
    }
    # A stay is the wait for the first token and equal gaps, so requests end in the order of their first tokens.
    order = np.argsort(first, kind="stable")
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, SCHEMA.with_metadata(_meta(header))) as stream:
        for at in range(0, requests, BATCH):
            stream.write_batch(_batch(order[at : at + BATCH], due, first, tokens, rng))


def _meta(header: dict[str, object]) -> dict[str, str]:
    return {"llm_bench": json.dumps(header)}


def _batch(
    rows: np.ndarray, due: np.ndarray, first: np.ndarray, tokens: int, rng: np.random.Generator
) -> pa.RecordBatch:
    n = len(rows)
    gaps = rng.integers(GAP_NS // 2, GAP_NS * 3 // 2, (n, tokens))
    gaps[:, 0] = 0
    events = first[rows][:, None] + np.cumsum(gaps, axis=1)
    failed = rows % 1000 == 7
    offsets = pa.array(np.arange(n + 1, dtype=np.int32) * tokens)
    none = pa.array(np.zeros(n + 1, np.int32))
    known: dict[str, pa.Array] = {
        "index": pa.array(rows),
        "request_id": pa.array([f"run-0-{i}" for i in rows]),
        "outcome": pa.array(np.where(failed, "failed", "ok")),
        "error_kind": pa.array(np.where(failed, "truncated_stream", "")),
        "error": pa.array(np.where(failed, "the stream broke off", "")),
        "due_ns": pa.array(due[rows]),
        "ready_ns": pa.array(due[rows]),
        "sent_ns": pa.array(due[rows] + 50_000),
        "first_byte_ns": pa.array(first[rows]),
        "end_ns": pa.array(events[:, -1] + 1000),
        "event_ns": pa.ListArray.from_arrays(offsets, pa.array(events.ravel())),
        "first_answer_ns": pa.array(first[rows]),
        "status": pa.array(np.full(n, 200)),
        "tokens_out": pa.array(np.full(n, tokens)),
        "tokens_out_from": pa.array(["usage"] * n),
        "asked_out": pa.array(np.full(n, tokens)),
        "tokens_in": pa.array(np.full(n, 100)),
        "planned_in": pa.array(np.full(n, 100)),
        "attempts": pa.array(np.ones(n, np.int64)),
        "first_attempt": pa.array(np.where(failed, "truncated_stream", "ok")),
        "prompt_hash": pa.array(rng.integers(1, 1 << 62, n)),
    }
    columns = []
    for f in fields(Record):
        type_ = SCHEMA.field(f.name).type
        if f.name in known:
            columns.append(known[f.name].cast(type_))
        elif pa.types.is_list(type_):
            columns.append(pa.ListArray.from_arrays(none, pa.array([], type_.value_type)))
        else:
            columns.append(pa.array([f.default] * n, type_))
    return pa.record_batch(columns, schema=SCHEMA)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--metrics", default=METRICS)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "000-a.arrow"
        write(path, asked.requests, asked.tokens)
        size = path.stat().st_size
        print(f"{asked.requests:,} requests of {asked.tokens} tokens: {size / 1e9:.2f} GB of records", flush=True)
        command = [sys.executable, "-m", "llm_bench.cli", "report", folder, "--format", "json"]
        load, began = os.getloadavg()[0], time.monotonic()
        done = subprocess.run([*command, "--metrics", asked.metrics], stdout=subprocess.PIPE, check=True)
        wall_s = time.monotonic() - began
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
    (cell,) = json.loads(done.stdout)["runs"][0]["cells"]
    for name, value in cell["metrics"].items():
        print(f"  {name} {value['value']} {value['unit']}")
    rss_gib, cpu_s = used.ru_maxrss / 2**20, used.ru_utime + used.ru_stime
    print(f"report: {wall_s:.1f} s, {cpu_s:.1f} s of CPU, {rss_gib:.2f} GiB at most; load average before {load:.1f}")
    print(
        json.dumps(
            {"requests": asked.requests, "tokens": asked.tokens, "file_bytes": size, "wall_s": wall_s}
            | {"cpu_s": cpu_s, "peak_rss_gib": rss_gib, "load_average": load, "cores": os.cpu_count()}
        )
    )


if __name__ == "__main__":
    main()
