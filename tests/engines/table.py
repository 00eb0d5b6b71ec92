"""ENGINES: the real servers that run on an ordinary machine, each as its own file here starts it."""

from tests.engines import llamacpp, mlserver, ray_serve, torchserve, triton, vllm
from tests.engines.serve import Engine

ENGINES: dict[str, Engine] = {
    "llama.cpp": llamacpp.ENGINE,
    "mlserver": mlserver.ENGINE,
    "triton": triton.ENGINE,
    "torchserve": torchserve.ENGINE,
    "ray": ray_serve.ENGINE,
    "vllm": vllm.ENGINE,
}
QUICK = ("mlserver", "triton")  # enough for `make test`, beside llama.cpp, which has tests of its own there
