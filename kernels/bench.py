"""`python -m kernels.bench KERNEL`: bytes, GB/s (10^9) and TFLOP/s beside what this card copies and multiplies.

On a GPU a call is timed within a CUDA graph, so that Python's launches are no part of it, over as many sets of inputs
as make over half a gigabyte: an L2 cache of 50 MB holds none of them when its turn comes again. Without a GPU the
kernels run tiny shapes under Triton's interpreter for their correctness: nothing is measured.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kernels.cases import CASES, Case, Sizes, error, tolerance

ROTATED_BYTES = 512 * 10**6  # of all sets of inputs together: ten times an H100's L2 cache
MOST_SETS = 256
REPLAYS = 20
WARM_REPLAYS = 3  # clocks rise
CEILING_BYTES = 2 * 10**9
CEILING_SIZE = 8192
# What the interpreter can do in a second or two; sizes that are no power of two.
TINY = Sizes(
    batch=2, context=21, heads=4, kv_heads=2, head_dim=80, block_size=8, hidden=96, ffn=96, outputs=80, vocab=150,
    dtype="float32", top_k=9,
)  # fmt: skip


class Ceilings(NamedTuple):
    """What the card does with nothing else to do."""

    copy_gb_s: float  # read + written, of a 2 GB tensor
    matmul_tflop_s: float  # bfloat16, 8,192 cubed


class Timing(NamedTuple):
    """Of one call, microseconds."""

    median: float
    least: float
    greatest: float
    sets: int
    graph: bool  # False: launched one by one from Python, whose time is then part of it


def ceilings() -> Ceilings:
    """Measured now: clocks and neighbours differ from day to day. About a second and 5 GB."""
    source = torch.empty(CEILING_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = _time([lambda: target.copy_(source)])
    a, b = (torch.randn(CEILING_SIZE, CEILING_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    multiplied = _time([lambda: torch.matmul(a, b, out=out)])
    return Ceilings(2 * CEILING_BYTES / copied.median / 1e3, 2 * CEILING_SIZE**3 / multiplied.median / 1e6)


def measure(name: str, sizes: Sizes, limits: Ceilings) -> dict[str, Any]:
    """One kernel at one size as a row of results: its own figures and torch's."""
    case = CASES[name](sizes)
    device = torch.device("cuda")
    inputs = [case.make(device) for _ in range(sets(case))]
    ours = _time([partial(case.ours, i) for i in inputs])
    row = {"kernel": name, "shape": case.shape, "bytes": case.moved_bytes, "flops": case.flops}
    row |= _figures(case, ours, limits)
    if case.torchs:
        theirs = _time([partial(case.torchs, i) for i in inputs]).median
        row |= {"torch_us": theirs, "times_torch": theirs / ours.median}
    return row


def sets(case: Case) -> int:
    """How many sets of inputs take turns: two at least, so that the end of one is not the beginning of the next."""
    return min(max(2, -(-ROTATED_BYTES // case.moved_bytes)), MOST_SETS)


def _figures(case: Case, timing: Timing, limits: Ceilings) -> dict[str, Any]:
    gb_s, tflop_s = case.moved_bytes / timing.median / 1e3, case.flops / timing.median / 1e6
    return {
        "us": timing.median, "us_least": timing.least, "us_greatest": timing.greatest, "sets": timing.sets,
        "timed_in": "graph" if timing.graph else "eager",
        "gb_s": gb_s, "percent_of_copy": 100 * gb_s / limits.copy_gb_s,
        "tflop_s": tflop_s, "percent_of_matmul": 100 * tflop_s / limits.matmul_tflop_s,
    }  # fmt: skip


def _time(calls: Sequence[Callable[[], object]]) -> Timing:
    """One call on average over all of them in turn, REPLAYS times over."""
    calls[0]()  # compiles, allocates
    torch.cuda.synchronize()
    graph = _captured(calls)

    def once() -> None:
        if graph:
            graph.replay()
        else:
            for call in calls:
                call()

    took = []
    for turn in range(WARM_REPLAYS + REPLAYS):
        begin, end = _event(), _event()
        begin.record()
        once()
        end.record()
        end.synchronize()
        if turn >= WARM_REPLAYS:
            took.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return Timing(statistics.median(took), min(took), max(took), len(calls), graph is not None)


def _captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph | None:
    """All calls as one graph; None where something in them cannot be captured, which the figures then say."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def correct(name: str, sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """A kernel's error at those sizes, and whether it is within what its types allow."""
    case, allowed = CASES[name](sizes), tolerance(name, sizes)
    off = error(case, device)
    return {"kernel": name, "shape": case.shape, "error": off, "allowed": allowed, "ok": off <= allowed}


def as_compiled(name: str, sizes: Sizes, capability: int) -> list[dict[str, Any]]:
    """What the compiler makes of a kernel for a card that need not be there."""
    from kernels.compile_check import compiled

    case = CASES[name](sizes)
    inputs = case.make(torch.device("meta"))
    made = compiled(lambda: case.ours(inputs), capability)
    return [{"kernel": name, "shape": case.shape, "launched": m._asdict() | {"ptx": len(m.ptx)}} for m in made]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Measured rows as a Markdown table."""
    head = ["kernel", "shape", "µs", "GB/s", "% of copy", "TFLOP/s", "% of matmul", "× torch"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in rows:
        products = [f"{r['tflop_s']:.1f}", f"{r['percent_of_matmul']:.1f}"] if r["flops"] else ["–", "–"]
        beside = f"{r['times_torch']:.2f}" if "times_torch" in r else "–"
        took = f"{r['us']:.1f}" + (" (eager)" if r["timed_in"] == "eager" else "")
        cells = [r["kernel"], r["shape"], took, f"{r['gb_s']:.0f}", f"{r['percent_of_copy']:.1f}", *products, beside]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def arguments() -> argparse.ArgumentParser:
    """Every field of Sizes is a flag."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__)
    parser.add_argument("kernels", nargs="+", metavar="KERNEL", help=f"all, or of {', '.join(CASES)}")
    for field in fields(Sizes):
        kind = field.type if isinstance(field.type, type) else str
        parser.add_argument(
            "--" + field.name.replace("_", "-"), type=kind, default=field.default, metavar=kind.__name__
        )
    parser.add_argument(
        "--compile", type=int, metavar="CAPABILITY", help="only compile, for a card of 90 (H100), 80, …"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 a kernel is wrong, 2 usage."""
    options = arguments().parse_args(argv)
    names = list(CASES) if options.kernels == ["all"] else options.kernels
    if unknown := [name for name in names if name not in CASES]:
        return _usage(f"{unknown[0]!r} is no kernel; would be right: all, {', '.join(CASES)}")
    try:
        sizes = Sizes(**{f.name: getattr(options, f.name) for f in fields(Sizes)})
        results = _run(names, sizes, options.compile)
        text = json.dumps(results, indent=1)
        if options.json:
            options.json.write_text(text + "\n")
    except (ValueError, OSError) as problem:
        return _usage(str(problem))
    print(results.get("table", text))
    return int(any(not row["ok"] for row in results.get("correct", ())))


def _run(names: Sequence[str], sizes: Sizes, capability: int | None) -> dict[str, Any]:
    if capability:
        if capability < 75:
            raise ValueError(f"--compile {capability}; would be right: 80 (A100), 89 (L40S), 90 (H100)")
        return {"compiled": [made for name in names for made in as_compiled(name, sizes, capability)]}
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is imported
        tiny = replace(TINY, query=min(sizes.query, 3))
        about = "no GPU: interpreted at tiny shapes for correctness; nothing is measured"
        return {"measured": False, "about": about, "correct": [correct(n, tiny, torch.device("cpu")) for n in names]}
    limits = ceilings()
    rows = [measure(name, sizes, limits) for name in names]
    able = f"copies {limits.copy_gb_s:.0f} GB/s, multiplies {limits.matmul_tflop_s:.0f} TFLOP/s"
    text = f"{torch.cuda.get_device_name()}: {able}\n\n{table(rows)}"
    return {"measured": True, "ceilings": limits._asdict(), "rows": rows, "table": text}


def _usage(text: str) -> int:
    print(f"kernels.bench: {text}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
