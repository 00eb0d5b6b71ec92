"""The batching lesson over HTTP: engines in real time, llm-bench as the client, the virtual clock beside it."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench import process
from bench.engine_client import drive, engine, write_trace
from bench.lesson_sim import BASE, MODEL, Ran, chat, simulate
from llm_bench.columns import Cell
from reference_engine.config import EngineConfig
from reference_engine.virtual import Arrival

RATE = 16.0
REQUESTS = 320


def counterpart(config: EngineConfig, cell: Cell) -> Ran:
    """The same requests on the virtual clock: due when they were due, as long as the server said they were."""
    due_s = (cell["due_ns"] - cell["due_ns"].min()) / 1e9
    each = zip(due_s.tolist(), cell["tokens_in"].tolist(), cell["tokens_out"].tolist(), strict=True)
    return simulate(config, [Arrival(at_s, [0] * prompt, made) for at_s, prompt, made in each])


def figures(cell: Cell) -> dict[str, float]:
    """Of all requests, warm-up included: the same that the virtual figures are of.

    Raises RuntimeError if one has failed: it has no first token, and the virtual clock knows no failures.
    """
    if failed := [str(outcome) for outcome in cell["outcome"] if outcome != "ok"]:
        raise RuntimeError(f"{len(failed)} of {cell.n} requests were not ok but {', '.join(sorted(set(failed)))}")
    due_ns, first_ns, last_ns, counts = cell["due_ns"], cell.first_ns, cell.last_ns, cell.counts
    several = counts > 1
    made = np.concatenate([piece.ns for piece in cell.pieces()])
    arriving_ns = due_ns.max() - due_ns.min()
    return _figures(
        float((made <= due_ns.max()).sum() / arriving_ns * 1e9),
        (first_ns - due_ns) / 1e9,
        ((last_ns - first_ns)[several] / (cell["tokens_out"][several] - 1)) / 1e9,
        (cell["end_ns"] - due_ns) / 1e9,
    )


def _figures(tokens_per_s: float, ttft_s: np.ndarray, tpot_s: np.ndarray, e2e_s: np.ndarray) -> dict[str, float]:
    points = {
        "TTFT p50, s": (ttft_s, 50), "TTFT p95, s": (ttft_s, 95), "TPOT p50, s": (tpot_s, 50), "e2e p95, s": (e2e_s, 95)
    }  # fmt: skip
    return {"tok/s": tokens_per_s} | {name: float(np.percentile(values, q)) for name, (values, q) in points.items()}


def measure(requests: int = REQUESTS, rate: float = RATE) -> dict[str, Any]:
    """Facts for lesson_page.render: metric -> (virtual, measured) for each way of batching."""
    from bench.lessons import MODES, batched

    machine = process.machine()
    arrivals = chat(rate, requests)
    modes: dict[str, dict[str, tuple[float, float]]] = {}
    ok = sent = 0
    tokens = np.zeros(2, np.int64)
    with tempfile.TemporaryDirectory(prefix="lesson-") as folder:
        trace = Path(folder) / "trace.jsonl"
        write_trace(trace, arrivals)
        for mode in MODES:
            print(f"measuring {mode}", file=sys.stderr)
            with engine(batched(mode)) as url:
                cell = drive(url, trace, Path(folder) / mode, "--replay", name=mode)
            ran = counterpart(batched(mode), cell)
            virtual = _figures(ran.tokens_per_s, ran.ttft_s, ran.tpot_s, ran.e2e_s)
            measured = figures(cell)
            modes[mode] = {name: (virtual[name], measured[name]) for name in virtual}
            ok += int((cell["outcome"] == "ok").sum())
            sent += cell.n
            tokens += [int(cell.counts.sum()), int(cell["tokens_out"].sum())]
    ratios = [measured / virtual for metrics in modes.values() for virtual, measured in metrics.values()]
    return {
        "machine": machine, "model": MODEL, "seats": BASE.max_num_seqs, "rate": rate, "requests": requests,
        "modes": modes, "least": min(ratios), "greatest": max(ratios), "ok": ok, "sent": sent,
        "tokens": tokens.tolist(),
    }  # fmt: skip
