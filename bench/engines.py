"""The same weights, tokenizer, precision and trace on several real engines, `llm-bench run` as the client.

    python -m bench.engines [--engines reference,llama.cpp,vllm] [--out reports/engines]

A 109M-parameter Llama of random float32 weights (bench.engine_model), served by the reference engine, llama.cpp and
vLLM's CPU build, one thread each. All are up at once and idle but for the one that is measured, in one run, so that the
run's own check of same work compares them. On a machine that is not idle the order of engines means something, and
their figures little: the page says how busy it was.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from bench import engine_model
from bench.process import machine
from tests.engines import environments, vllm
from tests.engines.serve import Engine, Start, serving

REPOSITORY = Path(__file__).resolve().parents[1]
CONTEXT = 2048
SLOTS = 32
TOKENS_IN, TOKENS_OUT = (24, 64), (12, 24)  # of a request: even over these
REQUESTS = {1: 10, 8: 60, 32: 232}  # of a cell, by its concurrency; the first that many of them are warm-up
ASKED = f"Requests of {TOKENS_IN[0]} to {TOKENS_IN[1]} tokens in, {TOKENS_OUT[0]} to {TOKENS_OUT[1]} out, " + ", ".join(
    f"{requests} of them at concurrency {slots}" for slots, requests in REQUESTS.items()
)
RUN_LIMIT_S = 1800
METRICS = "ttft_p50,ttft_p95,tpot_p50,tpot_p95,tokens_per_second,error_rate"


def _engine(name: str, command: Callable[[Path, Path, int], list[str]], ready: str = "/health", **env: str) -> Engine:
    def start(folder: Path, ports: Sequence[int]) -> Start:
        model, file = engine_model.make(environments.HOME)
        return Start(command(model, file, ports[0]), ready, {"PYTHONPATH": str(REPOSITORY), **env})

    return Engine(name, (), start, (), start_limit_s=400.0)


def _reference(model: Path, file: Path, port: int) -> list[str]:
    return [
        sys.executable, "-m", "reference_engine", "--model", str(model), "--served-name", "m", "--port", str(port),
        "--device", "cpu", "--threads", "1", "--max-num-seqs", str(SLOTS), "--num-blocks", "4096", "--exit-with-stdin",
    ]  # fmt: skip


def _llamacpp(model: Path, file: Path, port: int) -> list[str]:
    return [sys.executable, "-m", "tests.engines.llamacpp", str(SLOTS), str(port), str(file), str(CONTEXT)]


def _vllm(model: Path, file: Path, port: int) -> list[str]:
    return vllm.command(model, port, CONTEXT)


ENGINES: dict[str, Engine] = {
    "reference": _engine("reference", _reference),
    "llama.cpp": _engine("llama.cpp", _llamacpp),
    "vllm": _engine("vllm", _vllm, **vllm.ENV),
}
API = "openai-completions"  # no template: the same bytes are the same tokens


def write_trace(path: Path, requests: int, seed: int = 0) -> None:
    draw = random.Random(seed)
    rows = [
        {"input_length": draw.randint(*TOKENS_IN), "output_length": draw.randint(*TOKENS_OUT)} for _ in range(requests)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in [{"llm_bench_trace": 1}, *rows]))


def lacks(name: str) -> str:
    """Why an engine cannot be had here; "" where it can."""
    return environments.lacks("vllm", vllm.ENGINE.packages) if name == "vllm" else ""


def bench(arguments: Sequence[str], folder: Path) -> str:
    """What `llm-bench` printed. Raises RuntimeError where it failed; doubts are no failure."""
    done = subprocess.run(
        [sys.executable, "-m", "llm_bench.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "160"},
        check=False,
    )
    if done.returncode not in (0, 3):
        raise RuntimeError(f"llm-bench {arguments[0]} ended with {done.returncode}: {done.stderr[-3000:]}")
    return done.stdout


class Measured(NamedTuple):
    checked: str  # what `targets check --agree` printed
    minutes: float
    load_after: float


def measure(names: Sequence[str], folder: Path) -> Measured:
    """Runs into folder/run-N, all engines in each."""
    write_trace(folder / "trace.jsonl", max(REQUESTS.values()))
    tokenizer = engine_model.make(environments.HOME)[0] / "tokenizer.json"
    with ExitStack() as stack:
        lines = []
        for name in names:
            (folder / name).mkdir()
            url = stack.enter_context(serving(ENGINES[name], folder / name))[0]
            print(f"{name} is up at {url}", flush=True)
            lines += [f'[targets."{name}"]', f'url = "{url}/v1"', f'api = "{API}"', 'model = "m"']
            lines += [f"max_model_len = {CONTEXT}", f'tokenizer = "{tokenizer}"', ""]
        (folder / "targets.toml").write_text("\n".join(lines))
        targets = ",".join(names)
        checked = bench(["targets", "check", targets, "--agree"], folder)
        begun_s = time.monotonic()
        for slots, requests in REQUESTS.items():
            how = ["--concurrency", str(slots), "--requests", str(requests), "--warmup", str(slots)]
            bench(["run", "--targets", targets, "--trace", "trace.jsonl", "--out", f"run-{slots}", *how], folder)
            print(f"concurrency {slots}: {(time.monotonic() - begun_s) / 60:.1f} minutes", flush=True)
        return Measured(checked, (time.monotonic() - begun_s) / 60, os.getloadavg()[0])


def summary(document: Mapping[str, Any]) -> str:
    """A row an engine and concurrency, of `report --format json`."""
    lines = ["| engine | load | requests | TTFT p50, ms | TPOT p50, ms | tokens/s |", "|---|---|---:|---:|---:|---:|"]
    for cell in (cell for run in document["runs"] for cell in run["cells"]):
        figures = [cell["metrics"][name]["value"] for name in ("ttft_p50", "tpot_p50", "tokens_per_second")]
        shown = " | ".join(f"{figure:,.1f}" for figure in figures)
        lines.append(f"| {cell['target']} | {cell['load']} | {cell['metrics']['ttft_p50']['n']} | {shown} |")
    return "\n".join(lines)


def page(names: Sequence[str], facts: dict[str, Any], got: Measured, table: str, report: str) -> str:
    """README.md of the comparison."""
    return f"""# One model on several engines

Written by `python -m bench.engines`; do not edit. The same report with its pictures: `report.html`.

The weights, the tokenizer, the precision (float32), the trace and the lengths of answers are the same: a random Llama
of 109M parameters, as a Hugging Face folder and as GGUF.
{ASKED}.
One thread each, all up at once, all but the measured one idle. Greedy text is no invariant across engines, which round
differently: how far it agrees is a figure below.

{facts["cpu"]}, {facts["cores"]} cores, {facts["memory_gib"]} GiB; Python {facts["python"]}; load average before:
{facts["load_before"]:.2f}, after: {got.load_after:.2f}; {got.minutes:.1f} minutes of measuring.
**{busy(facts["load_before"], facts["cores"])}**

{table}

The report below has each cell's doubts. `usage disputed` is the made-up vocabulary's: a random model says fillers,
which no text would be split into; the engines' own counts agree.

To repeat it, on an idle machine for figures that can be quoted:

    python -m tests.engines.environments vllm     # once, 3 GB
    python -m bench.engines --engines {",".join(names)}

## What the engines were asked before the run

```
{got.checked.rstrip()}
```

## The report

{deeper(report)}
"""


def deeper(markdown: str) -> str:
    """Its headings a level lower."""
    return re.sub("^#", "##", markdown, flags=re.MULTILINE).strip()


def busy(load: float, cores: int) -> str:
    """How far the figures can be quoted. The client and an engine of one thread keep about one core busy."""
    if load < cores / 4:
        return "The machine was idle before it."
    return "The machine was busy with other work: the order of engines may mean something, their figures do not."


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.engines")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--out", type=Path, default=REPOSITORY / "reports" / "engines")
    asked = parser.parse_args()
    names = asked.engines.split(",")
    for name in names:
        if why := lacks(name):
            print(f"left out: {why}")
    names = [name for name in names if not lacks(name)]
    facts = machine()
    with tempfile.TemporaryDirectory(prefix="engines-") as scratch:
        folder = Path(scratch)
        got = measure(names, folder)
        runs = [f"run-{slots}" for slots in REQUESTS]
        asked.out.mkdir(parents=True, exist_ok=True)
        html = str((asked.out / "report.html").resolve())
        bench(["report", *runs, "--format", "html", "-o", html], folder)
        report = bench(["report", *runs, "--format", "md", "--metrics", METRICS], folder)
        table = summary(json.loads(bench(["report", *runs, "--format", "json", "--metrics", METRICS], folder)))
        (asked.out / "README.md").write_text(page(names, facts, got, table, report))
    print(asked.out / "README.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
