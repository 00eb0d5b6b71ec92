"""Triton Inference Server, as nvidia-pytriton ships it, with its Python backend and the model in numpy.

The tensors have the names of Triton's vLLM backend, so that its generate extension is spoken as that backend speaks it.
"""

import json
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from tests.engines import environments
from tests.engines.serve import Engine, Spoken, Start
from tests.engines.served import lm

SERVED = Path(__file__).parent / "served"
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
MODEL, PASS = "words", "pass"


def start(folder: Path, ports: Sequence[int]) -> Start:
    site = environments.packages_of("triton")
    server = site / "pytriton" / "tritonserver"
    backend = folder / "backends" / "python"  # the backend and the stub of this Python, side by side
    shutil.copytree(server / "backends" / "python", backend)
    shutil.copy(server / "python_backend_stubs" / VERSION / "triton_python_backend_stub", backend)
    model = folder / "models" / MODEL
    (model / "1").mkdir(parents=True)
    shutil.copy(SERVED / "triton.pbtxt", model / "config.pbtxt")
    shutil.copy(SERVED / "triton_model.py", model / "1" / "model.py")
    shutil.copy(SERVED / "lm.py", model / "1")
    lm.make(model / "1" / "weights.npz")
    (model / "1" / "paths.json").write_text(json.dumps([str(site)]))
    one_pass = folder / "models" / PASS
    (one_pass / "1").mkdir(parents=True)
    shutil.copy(SERVED / "triton_pass.pbtxt", one_pass / "config.pbtxt")
    shutil.copy(SERVED / "triton_pass.py", one_pass / "1" / "model.py")
    (one_pass / "1" / "paths.json").write_text(json.dumps([str(site)]))
    http, grpc, metrics = ports
    libraries = [str(site / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR")]
    command = [
        str(server / "bin" / "tritonserver"), f"--model-repository={model.parent}",
        f"--backend-directory={backend.parent}", "--http-address=127.0.0.1", f"--http-port={http}",
        "--grpc-address=127.0.0.1", f"--grpc-port={grpc}", "--metrics-address=127.0.0.1", f"--metrics-port={metrics}",
        "--allow-gpu-metrics=false", "--disable-auto-complete-config",
    ]  # fmt: skip
    env = {"LD_LIBRARY_PATH": ":".join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")]).strip(":")}
    return Start(command, f"/v2/models/{MODEL}/ready", env)


def needs() -> str:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "its wheel is for Linux on x86-64"
    return "" if VERSION in ("3.8", "3.9", "3.10", "3.11", "3.12") else f"it has no backend for Python {VERSION}"


TENSORS = {
    "tensors": {
        "numbers": {"datatype": "FP32", "shape": [-1, 4]},
        "text": {"datatype": "BYTES", "shape": [-1, 1]},
    }
}
ENGINE = Engine(
    "triton",
    ("nvidia-pytriton==0.7.0 numpy<2",),  # the Python backend crashes with numpy 2
    start,
    (
        Spoken(
            "triton-generate", MODEL, unknown=("http_4xx", "unknown model"), too_long=("http_4xx", "can be asked for"),
            breaks=("server_error_in_stream", "told to fail at token 3"),
        ),
        Spoken(
            "kserve-grpc", MODEL, port=1, unknown=("server_error_in_stream", "unknown model"),
            breaks=("server_error_in_stream", "told to fail at token 3"), wrong="",
        ),
        *(
            Spoken(api, PASS, TENSORS, port=port, counts=False, finish="", pins=False, wrong="")
            for api, port in (("kserve-http", 0), ("kserve-binary", 0), ("kserve-grpc-infer", 1))
        ),
    ),
    ports=3,
    needs=needs,
)  # fmt: skip
