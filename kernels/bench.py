"""`python -m kernels.bench KERNEL`: bytes, GB/s (10^9) and TFLOP/s beside what this card copies and multiplies.

On a GPU a call is timed within a CUDA graph, so that Python's launches are no part of it, over as many sets of inputs
as make over half a gigabyte: an L2 cache of 50 MB holds none of them when its turn comes again. Without a GPU there is
nothing to measure: `--interpret` runs tiny shapes under Triton's interpreter for their correctness.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
MOST_S = 1.5  # of one timing: replays that take longer are fewer, so that no row takes all others' time
LEAST_REPLAYS = 3  # however long they take
CEILING_BYTES = 2 * 10**9
CEILING_SIZE = 8192
# What the interpreter can do in a second or two; sizes that are no power of two.
TINY = Sizes(
    batch=2, context=21, heads=4, kv_heads=2, head_dim=80, block_size=8, hidden=96, ffn=96, outputs=80, vocab=150,
    dtype="float32", top_k=9,
)  # fmt: skip

Results = dict[str, Any]


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
    way: str  # graph; eager: launched one by one from Python, whose time is then part of it; rehearsed: on a CPU
    replays: int  # that it is the median of


Calls = Sequence[Callable[[], object]]


class Card(NamedTuple):
    """What calls are timed on, and how often: a GPU, or something in its place, whose times mean nothing."""

    device: torch.device
    settle: Callable[[], object]  # waits for all that was launched
    capture: Callable[[Calls], tuple[str, Callable[[], object]]]  # -> Timing.way, all the calls in turn
    stopwatch: Callable[[], Callable[[], float]]  # starts; the result waits for what was launched since: microseconds
    rotated_bytes: int = ROTATED_BYTES
    warm: int = WARM_REPLAYS
    replays: int = REPLAYS
    copied_bytes: int = CEILING_BYTES
    multiplied: int = CEILING_SIZE


def cuda() -> Card:
    def stopwatch() -> Callable[[], float]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()

        def stop() -> float:
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) * 1e3

        return stop

    return Card(torch.device("cuda"), torch.cuda.synchronize, _captured, stopwatch)


def rehearsal() -> Card:
    """A CPU: each call once or twice, so that what a GPU would be asked to do has been done before."""

    def stopwatch() -> Callable[[], float]:
        begin = time.perf_counter_ns()
        return lambda: max(time.perf_counter_ns() - begin, 1) / 1e3

    return Card(
        torch.device("cpu"), lambda: None, lambda calls: ("rehearsed", partial(_in_turn, calls)), stopwatch,
        rotated_bytes=0, warm=0, replays=1, copied_bytes=10**6, multiplied=64,
    )  # fmt: skip


def ceilings(card: Card) -> Ceilings:
    """Measured now: clocks and neighbours differ from day to day. About a second and 5 GB, which are given back."""
    found = Ceilings(_copied(card), _multiplied(card))
    torch.cuda.empty_cache()  # without a GPU it does nothing
    return found


def _copied(card: Card) -> float:
    source = torch.empty(card.copied_bytes, dtype=torch.uint8, device=card.device)
    target = torch.empty_like(source)
    return 2 * card.copied_bytes / _time([lambda: target.copy_(source)], card).median / 1e3


def _multiplied(card: Card) -> float:
    size = card.multiplied
    a, b = (torch.randn(size, size, device=card.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / _time([lambda: torch.matmul(a, b, out=out)], card).median / 1e6


def measure(name: str, sizes: Sizes, limits: Ceilings, card: Card) -> Results:
    """One kernel at one size as a row of results: its own figures and torch's."""
    case = CASES[name](sizes)
    inputs = [case.make(card.device) for _ in range(sets(case, card.rotated_bytes))]
    ours = _time([partial(case.ours, i) for i in inputs], card)
    row = {"kernel": name, "shape": case.shape, "bytes": case.moved_bytes, "flops": case.flops}
    row |= _figures(case, ours, limits)
    if case.torchs:
        theirs = _time([partial(case.torchs, i) for i in inputs], card)
        row |= {"torch_us": theirs.median, "torch_in": theirs.way, "torch_replays": theirs.replays}
        row |= {"times_torch": theirs.median / ours.median}
    return row


def sets(case: Case, rotated_bytes: int = ROTATED_BYTES) -> int:
    """How many sets of inputs take turns: two at least, so that the end of one is not the beginning of the next."""
    return min(max(2, -(-rotated_bytes // case.moved_bytes)), MOST_SETS)


def _figures(case: Case, timing: Timing, limits: Ceilings) -> Results:
    gb_s, tflop_s = case.moved_bytes / timing.median / 1e3, case.flops / timing.median / 1e6
    return {
        "us": timing.median, "us_least": timing.least, "us_greatest": timing.greatest, "sets": timing.sets,
        "replays": timing.replays, "timed_in": timing.way,
        "gb_s": gb_s, "percent_of_copy": 100 * gb_s / limits.copy_gb_s,
        "tflop_s": tflop_s, "percent_of_matmul": 100 * tflop_s / limits.matmul_tflop_s,
    }  # fmt: skip


def _time(calls: Calls, card: Card) -> Timing:
    """One call on average over all of them in turn, the median of `replays` times over.

    Of fewer where all, those that warm up among them, would take longer than MOST_S, but of LEAST_REPLAYS at least.
    """
    calls[0]()  # compiles, allocates
    card.settle()
    way, once = card.capture(calls)
    took, spent_us = list[float](), 0.0
    for turn in range(card.warm + card.replays):
        stop = card.stopwatch()
        once()
        us = stop()
        spent_us += us
        if turn >= card.warm:
            took.append(us / len(calls))
        if len(took) >= LEAST_REPLAYS and spent_us > MOST_S * 1e6:
            break
    return Timing(statistics.median(took), min(took), max(took), len(calls), way, len(took))


def _in_turn(calls: Calls) -> None:
    for call in calls:
        call()


def _captured(calls: Calls) -> tuple[str, Callable[[], object]]:
    """All calls as one graph; where something in them cannot be captured, from Python, which the figures then say.

    A capture that fails leaves its stream the current one and torch's generator as it was within it: hence the stream
    around it, and hence nothing in `cases` may read a value on the host (its tests run it on tensors without memory).
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            _in_turn(calls)
    except RuntimeError:
        torch.cuda.synchronize()
        return "eager", partial(_in_turn, calls)
    return "graph", graph.replay


def correct(name: str, sizes: Sizes, device: torch.device) -> Results:
    """A kernel's error at those sizes, and whether it is within what its types allow."""
    case, allowed = CASES[name](sizes), tolerance(name, sizes)
    off = error(case, device)
    return {"kernel": name, "shape": case.shape, "error": off, "allowed": allowed, "ok": off <= allowed}


def as_compiled(name: str, sizes: Sizes, capability: int) -> list[Results]:
    """What the compiler makes of a kernel for a card that need not be there."""
    from kernels.compile_check import compiled

    case = CASES[name](sizes)
    inputs = case.make(torch.device("meta"))
    made = compiled(lambda: case.ours(inputs), capability)
    return [{"kernel": name, "shape": case.shape, "launched": m._asdict() | {"ptx": len(m.ptx)}} for m in made]


def table(rows: Sequence[Results]) -> str:
    """Measured rows as a Markdown table."""
    head = ["kernel", "shape", "µs", "GB/s", "% of copy", "TFLOP/s", "% of matmul", "× torch"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in rows:
        products = [f"{r['tflop_s']:.1f}", f"{r['percent_of_matmul']:.1f}"] if r["flops"] else ["–", "–"]
        beside = f"{r['times_torch']:.2f}{_how(r['torch_in'], r['torch_replays'])}" if "times_torch" in r else "–"
        took = f"{r['us']:.1f}{_how(r['timed_in'], r['replays'])}"
        cells = [r["kernel"], r["shape"], took, f"{r['gb_s']:.0f}", f"{r['percent_of_copy']:.1f}", *products, beside]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _how(way: str, replays: int) -> str:
    """What of a timing is not as usual: not in a graph, or the median of fewer."""
    said = [way] * (way != "graph") + [f"of {replays}"] * (replays < REPLAYS and way != "rehearsed")
    return f" ({', '.join(said)})" if said else ""


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
    parser.add_argument("--interpret", action="store_true", help="no GPU: are they right, at tiny shapes of ours")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 a kernel is wrong, 2 it cannot be done, 130 interrupted.

    However it ends, the rows that it had are printed and, with --json, written.
    """
    options = arguments().parse_args(argv)
    names = list(CASES) if options.kernels == ["all"] else options.kernels
    if unknown := [name for name in names if name not in CASES]:
        return _usage(f"{unknown[0]!r} is no kernel; would be right: all, {', '.join(CASES)}")
    results = Results()
    try:
        sizes = Sizes(**{f.name: getattr(options, f.name) for f in fields(Sizes)})
        if options.json and options.json.exists() and not options.json.is_file():  # a device must not be replaced
            raise ValueError(f"--json {options.json} is no file; would be right: a file's name")
        way = _way(sizes, options.compile, options.interpret)
        if options.json:
            save(options.json, _so_far(way, [], names))  # before minutes of measuring, not after
        for results in _run(names, way):
            if options.json:
                save(options.json, results)
        return int(any(not row["ok"] for row in results.get("correct", ())))
    except KeyboardInterrupt:
        print("kernels.bench: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as problem:
        return _usage(str(problem))
    finally:
        if results:
            print(_words(results))


class Way(NamedTuple):
    """How kernels are tried."""

    about: Results
    rows: str  # what its rows are called
    each: Callable[[str], list[Results]]  # of a kernel


def _way(sizes: Sizes, capability: int | None, interpret: bool) -> Way:
    if capability:
        if capability < 75:
            raise ValueError(f"--compile {capability}; would be right: 80 (A100), 89 (L40S), 90 (H100)")
        return Way({}, "compiled", lambda name: as_compiled(name, sizes, capability))
    if interpret:
        if sizes != Sizes(query=sizes.query):
            raise ValueError("--interpret takes tiny shapes of its own; would be right: no other size than --query")
        os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is imported
        tiny = replace(TINY, query=min(sizes.query, 3))
        about = "interpreted at tiny shapes for correctness; nothing is measured"
        return Way(
            {"measured": False, "about": about}, "correct", lambda name: [correct(name, tiny, torch.device("cpu"))]
        )
    if not torch.cuda.is_available():
        raise ValueError(
            "no GPU to measure on; would be right: --interpret, for correctness, or --compile 90, for code"
        )
    card = cuda()
    limits = ceilings(card)
    measured = {"measured": True, "card": torch.cuda.get_device_name(), "ceilings": limits._asdict()}
    return Way(measured, "rows", lambda name: [measure(name, sizes, limits, card)])


def _run(names: Sequence[str], way: Way) -> Iterator[Results]:
    """The results so far, after each kernel."""
    rows: list[Results] = []
    for number, name in enumerate(names, 1):
        rows += way.each(name)
        yield _so_far(way, rows, names[number:])


def _so_far(way: Way, rows: list[Results], left: Sequence[str]) -> Results:
    """`left`: the kernels that are not among the rows."""
    return way.about | {"left": list(left), way.rows: rows}


def save(place: Path, results: Results) -> None:
    """Whole or not at all: the process may be killed at any time. Raises OSError, leaving nothing of its own.

    What is no finite number is written as a string: JSON has none.
    """
    new = place.with_name(place.name + ".new")
    try:
        new.write_text(json.dumps(_finite(results), indent=1, allow_nan=False) + "\n")
        new.replace(place)
    finally:
        new.unlink(missing_ok=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def kept(one: Callable[[], Results]) -> Results:
    """Its result, or how it failed: one row's failure is a row among others."""
    try:
        return one()
    except Exception as problem:  # noqa: BLE001  # a compiler, a driver or the kernel: whatever it is, it is the result
        return {"failed": f"{type(problem).__name__}: {problem}"[:2000], "ok": False}


def _words(results: Results) -> str:
    if "ceilings" not in results:
        return json.dumps(_finite(results), indent=1)
    limits = Ceilings(**results["ceilings"])
    able = f"copies {limits.copy_gb_s:.0f} GB/s, multiplies {limits.matmul_tflop_s:.0f} TFLOP/s"
    return f"{results['card']}: {able}\n\n{table(results['rows'])}"


def _usage(text: str) -> int:
    print(f"kernels.bench: {text}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
