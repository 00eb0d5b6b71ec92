"""TorchServe with the model in numpy: HTTP chunks without events. No longer maintained; needs Java 17."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.engines import environments
from tests.engines.environments import TORCH
from tests.engines.serve import Engine, Spoken, Start
from tests.engines.served import lm

SERVED = Path(__file__).parent / "served"
MODEL = "words"
WORKER = """minWorkers: 1
maxWorkers: 1
batchSize: 1
maxBatchDelay: 1
responseTimeout: 120
"""


def start(folder: Path, ports: Sequence[int]) -> Start:
    http, management, metrics, grpc, grpc_management = ports
    lm.make(folder / "weights.npz")
    (folder / "store").mkdir()
    (folder / "worker.yaml").write_text(WORKER)
    bin_ = environments.python("torchserve").parent
    files = ",".join(str(path) for path in (SERVED / "lm.py", folder / "weights.npz"))
    subprocess.run(
        [
            str(bin_ / "torch-model-archiver"), "--model-name", MODEL, "--version", "1", "--handler",
            str(SERVED / "torchserve_handler.py"), "--extra-files", files, "--config-file", str(folder / "worker.yaml"),
            "--export-path", str(folder / "store"),
        ],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    settings = {
        "inference_address": f"http://127.0.0.1:{http}",
        "management_address": f"http://127.0.0.1:{management}",
        "metrics_address": f"http://127.0.0.1:{metrics}",
        "grpc_inference_address": "127.0.0.1",
        "grpc_management_address": "127.0.0.1",
        "grpc_inference_port": grpc,
        "grpc_management_port": grpc_management,
        "disable_token_authorization": "true",
        "job_queue_size": 100,
        "install_py_dep_per_model": "false",
    }
    (folder / "config.properties").write_text("".join(f"{k}={v}\n" for k, v in settings.items()))
    command = [
        str(bin_ / "torchserve"), "--start", "--foreground", "--ncs", "--model-store", "store", "--models",
        f"{MODEL}={MODEL}.mar", "--ts-config", "config.properties", "--disable-token-auth",
    ]  # fmt: skip
    env = {"LOG_LOCATION": str(folder), "METRICS_LOCATION": str(folder), "PATH": f"{bin_}:/usr/bin:/bin"}
    return Start(command, f"/predictions/{MODEL}", env, b'{"prompt": "a", "max_tokens": 1, "stream": false}')


def needs() -> str:
    java = shutil.which("java")
    if java is None:
        return "it needs Java 17: apt-get install openjdk-17-jre-headless"
    said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False).stderr
    number = said.partition('version "')[2].partition(".")[0]
    return "" if number.isdigit() and int(number) >= 17 else f"it needs Java 17, {java} is {number or 'unknown'}"


ENGINE = Engine(
    "torchserve",
    (TORCH, "torch torchserve==0.12.0 torch-model-archiver==0.12.0 numpy pyyaml psutil setuptools<81"),
    start,
    (
        Spoken(
            "torchserve", MODEL, counts=False, finish="", pins=False, unknown=("http_4xx", "Model not found"),
            too_long=("rejected", "Prediction failed"), breaks=("truncated_stream", ""),
        ),
    ),
    ports=5,
    needs=needs,
)  # fmt: skip
