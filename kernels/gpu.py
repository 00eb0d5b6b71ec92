"""`python -m kernels.gpu`, or `make gpu`: everything that wants a GPU, in one run of at most eight minutes on one card.

Stages run one after the other, in processes of their own; each has its limit and what those before it left of theirs,
and one that fails or runs out of time leaves its text and the rows it had, and takes no other with it. After each stage
the results so far are written: gpu.json and gpu.md in $OUT, or in build/; within one, after each row, to
gpu-STAGE.json, so that nothing measured is lost however the run ends. A row that ends its process, or leaves a CUDA
context that answers every later call with its own error, is followed by the next one in a new process. `--rehearse`
runs the stages at tiny sizes on a CPU: nothing is measured.
"""

import argparse
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kernels.bench import Results, kept, save
from kernels.gpu_engine import (
    BATCHING,
    METRICS,
    SCALES,
    Save,
    Scale,
    answers,
    batching,
    engine,
    environment_of,
)

if TYPE_CHECKING:  # a stage says whether kernels are interpreted before it imports one
    from kernels.bench import Card

ROOT = Path(__file__).parents[1]
WHOLE_S = 480.0
UNDER_WAY = "its process ended before it did"  # what a row says until it is done
# By module: what the stages that run the engine and llm-bench want beside torch and Triton.
NEEDED = (
    "aiohttp", "httptools", "httpx", "jinja2", "numpy", "orjson", "prometheus_client", "pyarrow", "rich", "safetensors",
    "tokenizers", "typer", "uvloop",
)  # fmt: skip


def environment(scale: Scale, save: Save) -> Results:
    import torch

    found: Results = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    found["not_installed"] = ", ".join(missing()) or "nothing"
    try:
        import triton

        found["triton"] = triton.__version__
    except ModuleNotFoundError:
        found["triton"] = None
    if scale.device == "cpu":
        return found | {"card": "none: a rehearsal on a CPU, nothing is measured"}
    card = torch.cuda.get_device_properties(0)
    query = [
        "nvidia-smi",
        "--query-gpu=driver_version,clocks.max.sm,clocks.max.memory,power.limit",
        "--format=csv,noheader",
    ]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=False, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):  # not in every container
        said = "nvidia-smi says nothing"
    return found | {
        "card": card.name, "capability": f"{card.major}.{card.minor}", "multiprocessors": card.multi_processor_count,
        "memory_bytes": card.total_memory, "l2_bytes": card.L2_cache_size, "driver_sm_memory_power": said,
    }  # fmt: skip


def missing() -> list[str]:
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def ceilings(scale: Scale, save: Save) -> Results:
    from kernels import bench

    return bench.ceilings(_card(scale))._asdict()


def _card(scale: Scale) -> "Card":
    from kernels import bench

    if scale.device != "cpu":
        return bench.cuda()
    os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is imported
    return bench.rehearsal()


# Odd sizes, and types that the interpreter cannot compute with. Sizes are small: the reference goes key by key.
ODD: Results = {"batch": 3, "context": 201, "heads": 6, "kv_heads": 2, "head_dim": 80, "hidden": 1536, "ffn": 1000}
ODD |= {"outputs": 576, "vocab": 5003}
ATTENTION: list[Results] = [{"query": 1}, {"query": 17}, {"query": 201}, {"query": 1, "context": 1100, "head_dim": 128}]
CORRECT: list[tuple[str, Results]] = [
    *[("paged_attention", {"dtype": d} | a) for d in ("bfloat16", "float16") for a in ATTENTION],
    *[("paged_attention", {"kv_dtype": kv} | a) for kv in ("int8", "float8") for a in ATTENTION[::3]],
    ("paged_attention", {"dtype": "float32", "query": 17}),
    *[("kv_write", {"query": 9, "kv_dtype": kv}) for kv in ("auto", "int8", "float8")],
    *[
        (name, {"dtype": d})
        for name in ("rms_norm", "add_rms_norm", "norm_rope", "swiglu")
        for d in ("bfloat16", "float16", "float32")
    ],
    *[("int8_matmul", {"batch": b, "dtype": d}) for d in ("bfloat16", "float32") for b in (1, 130)],
    *[("int8_matmul_split", {"batch": b, "outputs": o}) for b, o in ((1, 576), (33, 576), (200, 577))],
    ("int8_matmul_split", {"hidden": 14_336, "outputs": 640}),
    *[("sampling", {"top_k": k, "top_p": p, "batch": 32}) for k, p in ((0, 1.0), (50, 0.9), (0, 0.95))],
    ("sampling", {"vocab": 128_256, "batch": 4}),
]


def _each(tried: list[tuple[str, Results]], one: Callable[[str, Results], Results], found: Results) -> Iterator[None]:
    """A row for each that has none yet, yielding when there is something to save.

    Of those that a process before this one tried, the last may have ended it. Raises SystemExit where this process can
    compute no more.
    """
    rows = found.setdefault("rows", [])
    for name, changes in tried[len(rows) :]:
        rows.append({"kernel": name, "failed": f"{name} {changes}: {UNDER_WAY}", "ok": False})
        yield
        rows[-1] = kept(partial(one, name, changes))
        if "failed" in rows[-1]:
            rows[-1]["failed"] = f"{name} {changes}: {rows[-1]['failed']}"
        yield
        if "failed" in rows[-1] and not _usable():
            raise SystemExit("the device answers no more")


def _usable() -> bool:
    """Whether the device still computes: after an access out of bounds a process gets nothing but that error."""
    import torch

    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.zeros(1, device="cuda").item()
    except RuntimeError:
        return False
    return True


def correctness(scale: Scale, save: Save, found: Results | None = None) -> Results:
    """Every kernel against float64, and rows alone against rows in a batch, bit for bit. `found`: to go on from."""
    import torch

    from kernels import bench, cases

    device = _card(scale).device
    sizes, dtype, tried = cases.Sizes(**ODD), torch.bfloat16, CORRECT
    if scale.device == "cpu":
        sizes, dtype, tried = bench.TINY, torch.float32, [(name, {}) for name in cases.CASES]
    found = found or {"rows": [], "same_in_any_batch": {}}
    for _ in _each(tried, lambda name, changes: bench.correct(name, replace(sizes, **changes), device), found):
        save(found)
    checks = found.setdefault("checks", [])
    for check in (_same_in_any_batch, _attention_in_any_batch)[len(checks) :]:  # as with rows, the last may have failed
        checks.append({"check": check.__name__, "failed": f"{check.__name__}: {UNDER_WAY}", "ok": False})
        save(found)
        made = kept(partial(check, device, dtype))
        if "failed" in made:
            checks[-1]["failed"] = f"{check.__name__}: {made['failed']}"
        else:
            checks[-1] = {"check": check.__name__, "ok": True}  # what it found is in same_in_any_batch
            found["same_in_any_batch"] |= made
        save(found)
        if "failed" in made and not _usable():
            raise SystemExit("the device answers no more")
    return found


def _attention_in_any_batch(device: Any, dtype: Any) -> dict[str, bool]:
    """Each sequence alone and among others that are cut otherwise: decodes of one piece and several, and chunks."""
    import torch

    from kernels.attention_api import plan, tiles_for
    from kernels.paged_attention import paged_attention

    torch.manual_seed(0)
    small = device.type == "cpu"
    counts, lengths = ([1, 2], [20, 5]) if small else ([1, 17, 1, 3], [1100, 40, 5, 700])
    heads, kv_heads, dim, blocks = (2, 1, 16, 2) if small else (32, 8, 128, 69)  # of 16 tokens each
    tiles = tiles_for(dtype, dim, device)
    shape = (len(counts) * blocks, kv_heads, 16, dim)
    keys, values = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    tables = torch.randperm(shape[0], device=device).int().view(len(counts), blocks)
    query = torch.randn(sum(counts), heads, dim, device=device).to(dtype)

    def attended(which: slice, rows: slice) -> torch.Tensor:
        out = torch.empty_like(query[rows])
        work = plan(counts[which], lengths[which], heads // kv_heads, tiles=tiles).to(device)
        paged_attention(out, query[rows], keys, values, tables[which], work)
        return out

    together, first, equal = attended(slice(None), slice(None)), 0, True
    for i, count in enumerate(counts):
        rows = slice(first, first + count)
        equal &= torch.equal(together[rows], attended(slice(i, i + 1), rows))
        first += count
    return {"paged_attention": equal}


def _same_in_any_batch(device: Any, dtype: Any) -> dict[str, bool]:
    """Row 1 alone and among others, by kernel: are they equal to the last bit?"""
    import torch

    from kernels import int8_matmul, norm_rope, sampling

    torch.manual_seed(0)
    rows, size = (5, 96) if device.type == "cpu" else (70, 2048)
    x, residual = (torch.randn(rows, size, device=device).to(dtype) for _ in range(2))
    weight = torch.randint(-128, 128, (96, size), dtype=torch.int8, device=device)
    scale, norm = torch.rand(96, device=device), torch.rand(size, device=device).to(dtype)
    numbers, ones = torch.arange(rows, device=device), torch.ones(rows, dtype=torch.float64, device=device)
    settings = sampling.Settings(ones, 0 * numbers, 0.9 * ones, 0 * ones, numbers, numbers)
    one = slice(1, 2)
    pairs = {
        "int8_matmul": (int8_matmul.int8_matmul(x, weight, scale), int8_matmul.int8_matmul(x[one], weight, scale)),
        "add_rms_norm": (
            norm_rope.add_rms_norm(x, residual.clone(), norm, 1e-5),
            norm_rope.add_rms_norm(x[one], residual[one].clone(), norm, 1e-5),
        ),
        "sampling": (
            sampling.sample(x[:4], sampling.Settings(*(s[:4] for s in settings))),
            sampling.sample(x[one], sampling.Settings(*(s[one] for s in settings))),
        ),
    }
    return {name: torch.equal(together[one], alone) for name, (together, alone) in pairs.items()}


# 8B shapes; decode attention with a gigabyte of keys and values, prefill at 8,192 tokens. First what is to be claimed.
MEASURED: list[tuple[str, Results]] = [
    ("paged_attention", {}),
    ("paged_attention", {"batch": 1, "query": 8192, "context": 8192}),
    ("int8_matmul", {"batch": 1, "hidden": 4096, "outputs": 28_672}),
    ("int8_matmul_split", {"batch": 1, "hidden": 4096, "outputs": 28_672}),
    ("paged_attention", {"kv_dtype": "int8"}),
    ("paged_attention", {"kv_dtype": "float8"}),
    *[("paged_attention", {"batch": b, "context": c}) for b, c in ((1, 8192), (8, 8192), (128, 1024))],
    ("paged_attention", {"batch": 4, "query": 512, "context": 8192}),
    *[
        (name, {"batch": rows})
        for name in ("add_rms_norm", "norm_rope", "swiglu")
        for rows in (64, 8192)
    ],
    ("rms_norm", {"batch": 8192}),
    *[("kv_write", {"batch": rows, "context": 16}) for rows in (64, 8192)],  # pages for no more than is written
    *[
        (name, {"batch": rows, "hidden": hidden, "outputs": outputs})
        for hidden, outputs in ((4096, 4096), (4096, 28_672), (14_336, 4096))
        for rows in (1, 16, 64, 2048)
        for name in ("int8_matmul", "int8_matmul_split")
        if (rows, outputs) != (1, 28_672)
    ],
    *[("sampling", {"batch": rows} | f) for rows in (1, 64) for f in ({}, {"top_k": 0, "top_p": 1.0})],
]  # fmt: skip


def kernels(scale: Scale, save: Save, found: Results | None = None) -> Results:
    from kernels import bench, cases

    card = _card(scale)
    sizes, tried = cases.Sizes(), MEASURED
    if scale.device == "cpu":
        sizes, tried = bench.TINY, [(name, {}) for name in cases.CASES]
    found = found or {"ceilings": bench.ceilings(card)._asdict(), "rows": [], "table": ""}
    limits = bench.Ceilings(**found["ceilings"])
    for _ in _each(tried, lambda name, changes: bench.measure(name, replace(sizes, **changes), limits, card), found):
        found["table"] = bench.table([row for row in found["rows"] if "failed" not in row])
        save(found)
    return found


class Stage(NamedTuple):
    run: Callable[..., Results]  # (scale, save), and of one that goes on: what it had found
    limit_s: float
    goes_on: bool = False  # in a new process, where one has ended at one of its rows


# In this order. Each has its limit and what those before it left of theirs, and the first what is left of the whole:
# a machine that was just started reads torch's libraries from a cold disk.
STAGES: dict[str, Stage] = {
    "environment": Stage(environment, 15),
    "ceilings": Stage(ceilings, 15),
    "correctness": Stage(correctness, 90, goes_on=True),
    "answers": Stage(answers, 45),
    "kernels": Stage(kernels, 95, goes_on=True),
    "engine": Stage(engine, 90),
    "batching": Stage(batching, 120),
}


def run(rehearse: bool, out: Path, only: Sequence[str]) -> int:
    """All stages, or those named. Exit code: 0 every stage was whole and every kernel right, 1 not."""
    begun, found = time.monotonic(), dict[str, Any]()
    chosen = [name for name in STAGES if not only or name in only]
    out.mkdir(parents=True, exist_ok=True)
    for name in ("gpu.json", "gpu.md"):  # of an earlier run: what stands there is this one's
        (out / name).unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `timeout` ends the stage under way as well
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:  # what a stage leaves when it is killed goes with it
        for number, name in enumerate(chosen):
            limit_s = limit(chosen[number:], WHOLE_S - (time.monotonic() - begun))
            print(f"{name}: at most {limit_s:.0f} s", file=sys.stderr, flush=True)
            at, place, failed = time.monotonic(), out / f"gpu-{name}.json", "interrupted"
            place.unlink(missing_ok=True)  # of an earlier run
            try:
                failed = _in_processes(name, rehearse, at + limit_s, place, folder)
            finally:  # an interrupted stage's rows are kept as well
                found[name] = _result(place, failed) | {"took_s": round(time.monotonic() - at, 1)}
                save(out / "gpu.json", found)
                (out / "gpu.md").write_text(report(found))
                place.unlink(missing_ok=True)
    print(report(found))
    return int(any(not whole(result) for result in found.values()))


def limit(stages: Sequence[str], left_s: float) -> float:
    """Seconds for the first of the stages to come: all that the others are not promised, if there is any."""
    return max(left_s - sum(STAGES[name].limit_s for name in stages[1:]), 0.0)


def _in_processes(name: str, rehearse: bool, end: float, place: Path, folder: str) -> str:
    """A stage until it is done, or its time on the monotonic clock is: how it failed at last, or "".

    In a new process as long as the one before had come further.
    """
    failed, come = "no time left", -1
    while (left := end - time.monotonic()) > 1:
        failed = _in_a_process(name, rehearse, left, place, folder)
        before, come = come, _blame(place, failed)
        if not failed or not STAGES[name].goes_on or come <= max(before, 0):
            break
    return failed


def _blame(place: Path, failed: str) -> int:
    """Tells the row or the check under way how its process ended; how many of them a stage has come to."""
    found = _result(place, "")
    tried = [*found.get("rows", ()), *found.get("checks", ())]
    if failed and tried and str(tried[-1].get("failed")).endswith(UNDER_WAY):
        tried[-1]["failed"] += f": {failed}"
        save(place, found)
    return len(tried)


def _in_a_process(name: str, rehearse: bool, limit_s: float, place: Path, folder: str) -> str:
    """Runs a stage, which saves its results at `place`: how it failed, with its last words, or "".

    Past its limit, and where we are interrupted, its whole process group is killed. `folder`: for temporary files of
    all stages.
    """
    words = Path(folder) / f"{name}.log"
    command = [sys.executable, "-m", "kernels.gpu", "--stage", name, "--result", str(place.absolute())]
    command += ["--rehearse"] * rehearse
    with words.open("wb") as log:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment_of() | {"TMPDIR": folder},
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(child)
    if code == 0:
        return ""
    how = f"stopped after {limit_s:.0f} s" if code is None else f"exit code {code}"
    return f"{how}: {words.read_text(errors='replace')[-2000:]}"


def _result(place: Path, failed: str) -> Results:
    """What a stage had saved, and how it failed if it did."""
    result: Results = json.loads(place.read_text()) if place.exists() else {}
    return result | ({"failed": failed} if failed else {})


def _end_group(child: "subprocess.Popen[bytes]") -> None:
    """The stage and what it started; those that have ended already are no matter."""
    try:
        os.killpg(child.pid, 9)
    except ProcessLookupError:
        return
    child.wait()


def whole(result: Results) -> bool:
    """Whether a stage ended, each of its rows is right, each check was made, and rows do not depend on their batch."""
    lists = [rows for rows in result.values() if isinstance(rows, list)]
    rows = all(row.get("ok", True) for rows in lists for row in rows)
    return "failed" not in result and rows and all(result.get("same_in_any_batch", {}).values())


def report(found: Results) -> str:
    """The results as Markdown."""
    lines = [f"# {found.get('environment', {}).get('card', 'unknown card')}", ""]
    for name, result in found.items():
        lines += [f"## {name}: {'whole' if whole(result) else 'NOT whole'}, {result['took_s']:.1f} s", ""]
        if "failed" in result:
            lines += ["```", result["failed"], "```", ""]
        if result.keys() - {"failed", "took_s"}:
            lines += [*SECTIONS[name](result), ""]
    return "\n".join(lines)


def _facts(result: Results) -> list[str]:
    return [f"- {key}: {value}" for key, value in result.items() if key not in ("took_s", "failed", "rows")]


def _errors(result: Results) -> list[str]:
    lines = ["| kernel | shape | error | allowed |", "|---|---|---|---|"]
    for row in result["rows"]:
        if "failed" in row:
            lines.append(f"| failed | {row['failed'].splitlines()[0]} | | |")
            continue
        mark = "" if row["ok"] else " **wrong**"
        cells = [row["kernel"], row["shape"], f"{float(row['error']):.1e}", f"{row['allowed']:.1e}{mark}"]
        lines.append(f"| {' | '.join(cells)} |")
    same = [f"{name} {'yes' if equal else '**no**'}" for name, equal in result["same_in_any_batch"].items()]
    alone = f"A row alone is, bit for bit, the row in a batch: {', '.join(same) or 'no check came to its end'}."
    return [*lines, "", alone, "", *_failed(result.get("checks", ()))]


def _measured(result: Results) -> list[str]:
    return [result.get("table", "nothing measured"), "", *_failed(result["rows"])]


def _failed(rows: Sequence[Results]) -> list[str]:
    return [f"- failed: {row['failed'].splitlines()[0]}" for row in rows if "failed" in row]


def _cells(rows: Sequence[Results]) -> list[str]:
    names = ["load", *METRICS.split(","), "times_floor", "state"]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['load']} failed: {row['failed'].splitlines()[0]} |" + " |" * (len(names) - 1))
            continue
        cells = [f"{row[n]:.4g}" if isinstance(row.get(n), float) else str(row.get(n, "–")) for n in names]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


SECTIONS: dict[str, Callable[[Results], list[str]]] = {
    "environment": _facts,
    "ceilings": _facts,
    "correctness": _errors,
    "answers": _facts,
    "kernels": _measured,
    "engine": lambda r: _cells(r["cells"]),
    "batching": lambda r: _cells(
        [{**row, "load": f"{way}, {row['load']}"} for way in BATCHING for row in r.get(way, ())]
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.gpu", description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on a CPU: nothing is measured")
    parser.add_argument("--only", default="", metavar="STAGE,…", help=f"of {', '.join(STAGES)}")
    default = Path(os.environ.get("OUT") or ROOT / "build")
    parser.add_argument("--out", type=Path, default=default, metavar="FOLDER", help="default: $OUT, or build/")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.stage:
        scale = SCALES["cpu" if options.rehearse else "cuda"]
        try:
            stage, saved = STAGES[options.stage], partial(save, options.result)
            more = [_result(options.result, "")] if stage.goes_on else []
            saved(stage.run(scale, saved, *more))
        except Exception:  # noqa: BLE001  # the parent says what it was; this process ends here
            traceback.print_exc()
            return 1
        return 0
    only = [name for name in options.only.split(",") if name]
    if unknown := [name for name in only if name not in STAGES]:
        print(f"kernels.gpu: --only {unknown[0]!r}; would be right: {', '.join(STAGES)}", file=sys.stderr)
        return 2
    if not options.rehearse and not _has_gpu():
        print("kernels.gpu: torch finds no GPU; would be right: a machine with one, or --rehearse", file=sys.stderr)
        return 2
    if absent := missing():
        said = "answers, engine and batching will fail; would be right: pip install '.[engine]'"
        print(f"kernels.gpu: not installed: {', '.join(absent)}; {said}", file=sys.stderr)
    try:
        return run(options.rehearse, options.out, only)
    except KeyboardInterrupt:
        print(f"kernels.gpu: interrupted; what was measured is in {options.out}", file=sys.stderr)
        return 130


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
