"""A whole run against every protocol at once: what is planned, sent, read and stored, and that none is another's."""

import contextlib
import json
import subprocess

import pytest

from llm_bench import records
from llm_bench.dialect_http import EXAMPLE
from llm_bench.dialect_kserve import HEAD
from llm_bench.dialects import DIALECTS
from tests.bench import command, environment, rows, trace_file
from tests.fixtures.protocols import MODEL, OVER_HTTP, SPEAKS, serve
from tests.scripted import Scripted

REQUESTS = 6


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(folder of the run, what was said, name -> the requests of its load)."""
    folder = tmp_path_factory.mktemp("all")
    trace = trace_file(folder, rows(REQUESTS))
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(Scripted(serve(name))) for name in OVER_HTTP}
        tables = []
        for name, server in servers.items():
            url = server.url.removesuffix("/v1") + DIALECTS[name].site.base
            tables.append(f'[targets.{name}]\nurl = "{url}"\napi = "{name}"\nmodel = "{MODEL}"\n')
            if name == "http":
                tables += ["[targets.http.http]", *(f"{key} = {json.dumps(said)}" for key, said in EXAMPLE.items()), ""]
        (folder / "targets.toml").write_text("\n".join(tables))
        asked = ["--targets", ",".join(OVER_HTTP), "--concurrency", "2", "--workers", "1", "--warmup", "0"]
        done = subprocess.run(
            command("run", *asked, "--trace", trace, "--out", folder / "run", "--format", "json"),
            capture_output=True,
            text=True,
            timeout=120,
            cwd=folder,
            env=environment(),
            check=False,
        )
        assert done.returncode == 0, done.stderr
        load = {n: [s for s in server.requests if "x-request-id" in s.headers] for n, server in servers.items()}
    return folder / "run", done, load


def _recorded(folder, name):
    cells = json.loads((folder / "run.json").read_text())["cells"]
    (file,) = [cell["file"] for cell in cells if cell["target"] == name]
    return records.read(folder / file)


@pytest.mark.parametrize("name", OVER_HTTP)
def test_every_request_of_the_load_is_answered_and_read(name, ran):
    folder, _, load = ran
    assert len(load[name]) == REQUESTS
    recorded = _recorded(folder, name)
    assert recorded["outcome"].tolist() == ["ok"] * REQUESTS
    tokens = 4 if DIALECTS[name].comes.streams else 0
    assert recorded["tokens_out"].tolist() == [tokens] * REQUESTS
    assert recorded["asked_out"].tolist() == [tokens or -1] * REQUESTS  # of a single pass no length is asked
    assert len(recorded.event_ns) == tokens * REQUESTS
    counted = SPEAKS[name].counts[0] >= 0
    assert (recorded["tokens_in"] > 0).tolist() == [counted] * REQUESTS


@pytest.mark.parametrize("name", OVER_HTTP)
def test_what_the_probe_found_is_in_the_header(name, ran):
    folder, _, _ = ran
    header = _recorded(folder, name).header
    assert header["probe"]["told"] == dict(SPEAKS[name].told)
    assert header["probe"]["lengths_pinned"] is bool(DIALECTS[name].takes.pins)
    assert header["target"]["api"] == name


def test_no_request_has_another_protocols_words(ran):
    _, _, load = ran
    for name, seen in load.items():
        body = json.loads(seen[0].body[: int(seen[0].headers.get(HEAD.lower(), len(seen[0].body)))])
        assert (DIALECTS[name].takes.prompt or "prompt") in body, name
        assert ("model" in body) is (DIALECTS[name].takes.model == "body"), name


def test_a_run_is_not_resumed_with_another_revision_under_the_same_name(tmp_path):
    trace = trace_file(tmp_path, rows(2))
    table = '[targets.t]\nurl = "{}"\napi = "tgi"\nrevision = "{}"\n'

    def run(revision, *more):
        (tmp_path / "targets.toml").write_text(table.format(server.url.removesuffix("/v1"), revision))
        asked = ["run", "--targets", "t", "--concurrency", "1", "--warmup", "0", "--trace", trace]
        return subprocess.run(
            command(*asked, "--out", tmp_path / "run", *more),
            capture_output=True,
            text=True,
            timeout=180,
            cwd=tmp_path,
            env=environment(),
            check=False,
        )

    with Scripted(serve("tgi")) as server:
        assert run("abc123").returncode == 0
        other = run("abc", "--resume")
        sent = sum("x-request-id" in seen.headers for seen in server.requests)
        mistaken = run("fff999", "--out", tmp_path / "two")
        assert sum("x-request-id" in seen.headers for seen in server.requests) == sent  # nothing of a load
    assert other.returncode == 2
    assert "revision" in other.stderr
    assert mistaken.returncode == 4
    assert "revision 'fff999' is declared" in mistaken.stderr
