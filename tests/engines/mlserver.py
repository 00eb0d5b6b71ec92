"""MLServer with the model in numpy: KServe v2 over HTTP and gRPC."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.engines import environments
from tests.engines.serve import Engine, Spoken, Start
from tests.engines.served import lm

SERVED = Path(__file__).parent / "served"
MODEL, INPUTS = "words", ("text_input", "sampling_parameters")


def start(folder: Path, ports: Sequence[int]) -> Start:
    for name in ("mlserver_model.py", "lm.py"):
        shutil.copy(SERVED / name, folder)
    lm.make(folder / "weights.npz")
    tensors = [{"name": name, "datatype": "BYTES", "shape": [1]} for name in INPUTS]
    model = {"name": MODEL, "implementation": "mlserver_model.Words", "inputs": tensors, "parameters": {"version": "1"}}
    model["outputs"] = [{"name": "text_output", "datatype": "BYTES", "shape": [1]}]
    (folder / "model-settings.json").write_text(json.dumps(model))
    http, grpc, metrics = ports
    # gzip buffers a stream; several workers know no streaming
    settings = {"host": "127.0.0.1", "http_port": http, "grpc_port": grpc, "metrics_port": metrics}
    (folder / "settings.json").write_text(json.dumps(settings | {"parallel_workers": 0, "gzip_enabled": False}))
    command = [str(environments.python("mlserver").parent / "mlserver"), "start", "."]
    return Start(command, f"/v2/models/{MODEL}/ready")


# As its metadata lists them; a run reads them there.
TENSORS = {"tensors": {name: {"datatype": "BYTES", "shape": [1]} for name in INPUTS}}
ENGINE = Engine(
    "mlserver",
    ("mlserver==1.7.1",),
    start,
    (
        Spoken("kserve-http", MODEL, TENSORS, counts=False, finish="", pins=False),
        Spoken("kserve-grpc", MODEL, counts=False, finish="", port=1, wrong=""),
        Spoken("kserve-grpc-infer", MODEL, TENSORS, counts=False, finish="", pins=False, port=1, wrong=""),
    ),
    ports=3,
)
