"""Ray Serve with an own app around the model in numpy: a StreamingResponse, a token a chunk."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.engines import environments
from tests.engines.serve import Engine, Spoken, Start
from tests.engines.served import lm

SERVED = Path(__file__).parent / "served"


def start(folder: Path, ports: Sequence[int]) -> Start:
    for name in ("ray_app.py", "lm.py"):
        shutil.copy(SERVED / name, folder)
    lm.make(folder / "weights.npz")
    sockets = Path(tempfile.gettempdir()) / "llm-bench-ray"  # the path of a Unix socket has 107 characters at most
    shutil.rmtree(sockets, ignore_errors=True)
    command = [str(environments.python("ray")), "ray_app.py", str(ports[0]), str(folder), str(sockets)]
    env = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_MEMORY_MONITOR": "1"}
    return Start(command, "/", env, b'{"prompt": "a", "max_tokens": 1, "stream": false}')


ENGINE = Engine(
    "ray",
    ("ray[serve]>=2.60,<2.61 numpy",),
    start,
    (
        Spoken(
            "ray-serve", counts=False, finish="", pins=False, unknown=None, too_long=("http_4xx", "can be asked for"),
            breaks=("truncated_stream", ""),
        ),
    ),
    start_limit_s=180.0,
)  # fmt: skip
