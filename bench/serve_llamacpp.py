"""llama.cpp's own HTTP server (PyPI: xllamacpp) with a GGUF file, as a process of its own.

python -m bench.serve_llamacpp FILE.gguf SLOTS THREADS     prints {"listening": ".../v1"}, ends with its stdin
"""

import json
import socket
import sys

CONTEXT_OF_A_SLOT = 1024


def main() -> None:
    import xllamacpp

    path, slots, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = slots
    params.n_ctx = CONTEXT_OF_A_SLOT * slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_threads_http = slots + 8  # each stream holds one
    params.model_alias = {"m"}
    params.cache_ram_mib = 0
    server = xllamacpp.Server(params)
    print(json.dumps({"listening": f"http://127.0.0.1:{port}/v1"}), flush=True)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    main()
