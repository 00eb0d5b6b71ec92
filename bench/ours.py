"""Our own rows beside the rivals': the tool as a user runs it, the same without its stagger, and the floor."""

import json
import sys
from pathlib import Path

import numpy as np

from bench.row import Claim, Rival, Work
from llm_bench import records


def _run(work: Work, *load: str) -> list[str]:
    trace = work.out / "trace.jsonl"
    row = json.dumps({"input_length": work.prompt_tokens, "output_length": work.tokens})
    trace.write_text("\n".join(['{"llm_bench_trace": 1}', *[row] * work.requests]) + "\n")
    head = [sys.executable, "-m", "llm_bench.cli", "run", "--targets", f"null={work.url}", "--trace", f"{trace}"]
    return [*head, *load, "--out", f"{work.out}/run"]


def _read(out: Path, printed: str) -> Claim:
    """Of every ok request, warm-up and first wave included: the same that the truth is of."""
    (path,) = out.glob("run/*.arrow")
    cell = records.read(path)
    ok = cell["outcome"] == "ok"
    rows = [cell.event_ns[a:b] for a, b in zip(cell.offsets[:-1], cell.offsets[1:], strict=True)]
    ttft = [row[0] - sent for row, sent, good in zip(rows, cell["sent_ns"], ok, strict=True) if good]
    gaps = [gap for row, good in zip(rows, ok, strict=True) if good for gap in np.diff(row)]
    each = zip(cell["request_id"], cell["sent_ns"], rows, ok, strict=True)
    stamps = {name: (sent, row) for name, sent, row, good in each if good}
    return Claim(int(ok.sum()), points(ttft), points(gaps), stamps=stamps)


def points(ns: "np.ndarray | list[int]") -> tuple[float | None, float | None]:
    """p50 and p99 in ms; None of nothing."""
    if not len(ns):
        return None, None
    p50, p99 = np.percentile(ns, (50, 99)) / 1e6
    return float(p50), float(p99)


def _control(work: Work) -> list[str]:
    return [
        sys.executable, "-m", "bench.control", work.url, "--concurrency", f"{work.concurrency}",
        "--requests", f"{work.requests}", "--tokens", f"{work.tokens}",
    ]  # fmt: skip


def _read_control(out: Path, printed: str) -> Claim:
    return Claim(json.loads(printed.splitlines()[-1])["answers"])


OURS = "llm-bench"
CONTROL = "control"
ROWS: dict[str, Rival] = {
    OURS: Rival("llm-bench", (), lambda home, work: _run(work, "--concurrency", f"{work.concurrency}"), _read),
    # Others send their first wave in one tick; our closed loop spreads it. This row sends it in one tick too.
    "llm-bench, burst": Rival(
        "llm-bench",
        (),
        lambda home, work: _run(work, "--rate", "1000000", "--constant", "--max-in-flight", f"{work.concurrency}"),
        _read,
    ),
    CONTROL: Rival("llm-bench", (), lambda home, work: _control(work), _read_control),
}
