"""What `kernels.gpu` measures of the whole engine: a random model, the server in its own process, llm-bench as load.

Nothing of the engine or of llm-bench is imported: both are run as their users run them.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple
from urllib.request import Request, urlopen

import torch

from kernels import random_model
from kernels.bench import Results, kept

ROOT = Path(__file__).parents[1]
STOP_S = 20.0
METRICS = "tokens_per_second,ttft_p50,ttft_p95,tpot_p50,tpot_p95,itl_p99,error_rate"
PROMPTS, ANSWERS = (245, 0.8, 1024), (121, 0.6, 384)  # median, sigma, most: lognormal, as in chat
BATCHING = ("static", "dynamic", "continuous")


class Scale(NamedTuple):
    """What a run is made of."""

    device: str
    dtype: str
    model: str  # of random_model
    concurrency: str
    seconds: int  # a load is kept up
    num_blocks: int
    lengths: float  # of the trace's prompts and answers, relative to PROMPTS and ANSWERS


SCALES = {
    "cuda": Scale("cuda", "bfloat16", "LLAMA_1B", "1,32,128", 8, 16_384, 1.0),
    "cpu": Scale("cpu", "float32", "SMALL", "1,4", 1, 1024, 0.1),
}


Save = Callable[[Results], None]  # what a stage has so far, which is kept should it not come to its end
ASKED, ANSWERED = 8, 32  # requests at once, and tokens of each, whose answers are compared


def answers(scale: Scale, save: Save) -> Results:
    """Greedy answers of a small float32 model at once, by what `scale` computes with, beside a CPU's by torch alone."""
    small = scale._replace(dtype="float32", model="SMALL", num_blocks=1024)
    with _model(small) as model:
        with _server(small._replace(device="cpu"), model, ["--cpu-kernels", "torch"]) as url:
            right = _greedy(url)
        with _server(small, model, []) as url:
            found = _greedy(url)
    alike = [{"kernel": "answer", "ok": a == b} for a, b in zip(found, right, strict=True)]
    return {"asked": ASKED, "tokens": ANSWERED, "same": sum(row["ok"] for row in alike), "rows": alike}


def _greedy(url: str) -> list[str]:
    random = Random(1)
    prompts = [[random.randrange(1, random_model.SMALL.vocab) for _ in range(5 + 9 * i)] for i in range(ASKED)]

    def ask(prompt: list[int]) -> str:
        body = {"prompt": prompt, "max_tokens": ANSWERED, "temperature": 0, "ignore_eos": True}
        place = f"{url.removesuffix('/v1')}/v1/completions"
        request = Request(place, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as answer:
            text: str = json.load(answer)["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(ASKED) as pool:
        return list(pool.map(ask, prompts))


def engine(scale: Scale, save: Save) -> Results:
    """The engine on a 1B-shaped model of random weights at each concurrency, and its step beside the bytes it reads.

    `times_floor`: time per output token over the time that this card's copy bandwidth needs for the weights and the
    keys and values of so many contexts of mean length; chunks of other prompts in the same steps are in it.
    """
    from kernels import bench

    copy_gb_s = None if scale.device == "cpu" else bench.ceilings(bench.cuda()).copy_gb_s
    found: Results = {"copy_gb_s": copy_gb_s, "cells": []}
    with _model(scale) as model, _server(scale, model, []) as url:
        for concurrency in scale.concurrency.split(","):
            cell = kept(partial(_cell, scale, url, concurrency, copy_gb_s))
            found["cells"].append({"load": f"c={concurrency}"} | cell)
            save(found)
    return found


def _cell(scale: Scale, url: str, concurrency: str, copy_gb_s: float | None) -> Results:
    (cell,) = _load(scale, url, concurrency)
    return cell | beside_floor(cell, step_bytes(scale, int(concurrency)), copy_gb_s)


def beside_floor(cell: Results, floor_bytes: int, copy_gb_s: float | None) -> Results:
    """`tpot_p50`, milliseconds, over the time that so many bytes take at that rate; nothing over none of the two."""
    if not copy_gb_s or not cell["tpot_p50"]:
        return {"step_floor_bytes": floor_bytes}
    return {"step_floor_bytes": floor_bytes, "times_floor": cell["tpot_p50"] / 1e3 * copy_gb_s * 1e9 / floor_bytes}


def step_bytes(scale: Scale, concurrency: int) -> int:
    """What a decode step of so many sequences reads: the weights, and contexts as long as they are on average."""
    shape: random_model.Shape = getattr(random_model, scale.model)
    size = getattr(torch, scale.dtype).itemsize
    pairs = lengths(scale)
    context = sum(n_out * (n_in + n_out / 2) for n_in, n_out in pairs) / sum(n_out for _, n_out in pairs)
    return shape.weight_bytes(size) + int(concurrency * context) * shape.kv_bytes(size)


def batching(scale: Scale, save: Save) -> Results:
    """The same load under each way of batching."""
    found: Results = {}
    slots = scale.concurrency.split(",")[1]
    with _model(scale) as model:
        for way in BATCHING:
            made = kept(partial(_batched, scale, model, way, slots))
            found[way] = made.get("cells", [{"load": f"c={slots}"} | made])
            save(found)
    return found


def _batched(scale: Scale, model: Path, way: str, slots: str) -> Results:
    with _server(scale, model, ["--batching", way, "--max-num-seqs", slots]) as url:
        return {"cells": _load(scale, url, slots)}


@contextmanager
def _model(scale: Scale) -> Iterator[Path]:
    """Written once for all stages: they share TMPDIR, which `kernels.gpu` makes and removes."""
    place = Path(tempfile.gettempdir()) / f"gpu-model-{scale.model}-{scale.dtype}"
    if not place.is_dir():
        with tempfile.TemporaryDirectory(prefix="gpu-model-", dir=place.parent) as folder:
            shape = getattr(random_model, scale.model)
            random_model.write(Path(folder) / "new", shape, getattr(torch, scale.dtype), torch.device(scale.device))
            (Path(folder) / "new").rename(place)  # whole or not at all
    yield place


@contextmanager
def _server(scale: Scale, model: Path, more: Sequence[str]) -> Iterator[str]:
    """URL of an engine in a process of its own, which ends with the block. Raises RuntimeError with its last words."""
    command = [sys.executable, "-m", "reference_engine", "--port", "0", "--exit-with-stdin", "--model", str(model)]
    command += ["--device", scale.device, "--dtype", scale.dtype, "--num-blocks", str(scale.num_blocks)]
    command += ["--max-num-seqs", "128", "--max-num-batched-tokens", "2048", "--no-prefix-caching", *more]
    with tempfile.TemporaryFile("w+") as words:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment_of(), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words,
        )  # fmt: skip
        with child:
            assert child.stdin and child.stdout
            try:
                line = child.stdout.readline()
                if not line:
                    words.seek(0)
                    raise RuntimeError(f"the engine did not start: {words.read()[-1500:]}")
                yield json.loads(line)["listening"]
            finally:
                child.stdin.close()
                try:
                    child.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    child.kill()


def _load(scale: Scale, url: str, concurrency: str) -> list[Results]:
    """What llm-bench measures at each concurrency, a row of metrics each."""
    with tempfile.TemporaryDirectory(prefix="gpu-run-") as folder:
        trace = Path(folder) / "trace.jsonl"
        trace.write_text(_trace(scale))
        command = [sys.executable, "-c", "from llm_bench.cli import main; main()", "run", "--targets", f"engine={url}"]
        command += [
            "--trace",
            str(trace),
            "--concurrency",
            concurrency,
            "--duration",
            str(scale.seconds),
            "--loop-trace",
        ]
        command += ["--api", "openai-completions", "--metrics", METRICS, "--format", "json", "--out", f"{folder}/run"]
        ran = subprocess.run(command, cwd=ROOT, env=environment_of(), capture_output=True, text=True, check=False)
        if ran.returncode not in (0, 3):
            raise RuntimeError(f"llm-bench run exited with {ran.returncode}: {(ran.stderr or ran.stdout)[-1500:]}")
        made = json.loads(ran.stdout)["runs"][0]
    return [
        {"load": cell["load"], "state": cell["state"], "doubts": [d["kind"] for d in cell["doubts"]]}
        | {name: found["value"] for name, found in cell["metrics"].items()}
        for cell in made["cells"]
    ]


def lengths(scale: Scale) -> list[tuple[int, int]]:
    """Of prompts and answers, as in chat, the same each time; they differ, which static batching suffers from."""
    random = Random(0)

    def length(median: int, sigma: float, most: int) -> int:
        return max(2, int(scale.lengths * min(random.lognormvariate(0, sigma) * median, most)))

    return [(length(*PROMPTS), length(*ANSWERS)) for _ in range(400)]


def _trace(scale: Scale) -> str:
    lines = [json.dumps({"llm_bench_trace": 1, "unit": "s"})]
    lines += [
        json.dumps({"timestamp": float(i), "input_length": n_in, "output_length": n_out})
        for i, (n_in, n_out) in enumerate(lengths(scale))
    ]
    return "\n".join(lines) + "\n"


def environment_of() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": path}
