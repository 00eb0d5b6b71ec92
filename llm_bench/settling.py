"""Between two cells: a target is given time to let go of the requests that were cut."""

import time
from collections.abc import Callable

import httpx

from llm_bench import talk, targets
from llm_bench.exchange import Timeouts
from llm_bench.targets import Target

SETTLE_S = 10.0  # for a target to let go of what we have cut
# Gauges of requests at work, of servers that tell: vLLM and the bundled engine, llama.cpp, TGI, SGLang.
_RUNNING = (
    "vllm:num_requests_running",
    "llamacpp:requests_processing",
    "tgi_batch_current_size",
    "sglang:num_running_reqs",
)


def settle(target: Target, say: Callable[[str], None], limit_s: float = SETTLE_S) -> None:
    """Wait until the target has let go of the requests we have cut, or say that this could not be checked.

    What it still computes for nobody would slow the next cell.
    """
    with talk.client_of(target, Timeouts()) as client:
        for url in (f"{targets.root_of(url)}/metrics" for url in target.urls):
            deadline_s = time.monotonic() + limit_s
            while (running := _running(client, url)) and time.monotonic() < deadline_s:
                time.sleep(0.1)
            if running is None:
                say(f"{target.name}: whether it still works on requests that were cut could not be checked ({url})")
            elif running:
                say(f"{target.name}: after {limit_s:g} s it still works on {running:g} requests that were cut")


def _running(client: httpx.Client, url: str) -> float | None:
    """Requests that a server says it works on; None where it does not say."""
    try:
        status, body = talk.page(client, "GET", url, 5.0)
        lines = body.decode(errors="replace").splitlines() if status == 200 else []
        found = [line.rsplit(" ", 1)[1] for line in lines if line.startswith(_RUNNING)]
        return sum(map(float, found)) if found else None
    except (httpx.HTTPError, ValueError, IndexError):
        return None
