"""What a gRPC target is asked before a load: its pages, the probe, and a mistake in one sentence."""

import contextlib
import json
import re
import socketserver
import subprocess
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import orjson
import pytest

from llm_bench import mistaken, probe, records, statuses, talk, targets
from llm_bench.errors import BenchError, TargetError
from llm_bench.exchange import Timeouts
from llm_bench.grpc_frames import GRPC_STATUS, Status
from llm_bench.targets import Target
from tests.bench import command, environment, rows, trace_file
from tests.certificates import make_certificate, sign
from tests.scripted import unused_port
from tests.test_mtls import in_front_of

grpc = pytest.importorskip("grpc", reason="grpcio, the extra `grpc`, is not installed")
from tests.quiet import undisturbed  # noqa: E402
from tests.scripted_grpc import SERVICE, ScriptedGrpc, serve  # noqa: E402

BOTH = pytest.mark.parametrize(("api", "model"), [("kserve-grpc", "llm"), ("kserve-grpc-infer", "echo")])
MODELS = ("llm", "echo")


def target_of(server, api="kserve-grpc", model="llm", **facts):
    return Target("t", getattr(server, "url", server), api=api, model=model, **facts)


def probed(target, ready_s=30.0):
    return probe.probe(target, lambda text: None, ready_s, timeouts=Timeouts(connect_s=1.0, ttft_s=30.0))


def mistake(target, ready_s=30.0):
    with pytest.raises(TargetError) as caught:
        probed(target, ready_s)
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith("target t: ")
    assert target.url.partition("://")[2] in said
    return said


def test_the_pages_are_those_of_kserves_http():
    with ScriptedGrpc(serve(models=MODELS)) as server, talk.client_of(target_of(server), Timeouts()) as client:
        page = {path: client.get(server.url + path) for path in ("/v2", "/v2/models/echo", "/v2/models/no", "/metrics")}
        index = talk.page(client, "POST", server.url + "/v2/repository/index", 2.0)
    assert page["/v2"].json() == {"name": "triton", "version": "2.51.0"}
    assert page["/v2/models/echo"].json()["inputs"] == [{"name": "IN", "datatype": "FP32", "shape": [-1, 4]}]
    assert (page["/v2/models/no"].status_code, page["/v2/models/no"].json()["error"]) == (404, "no such model")
    assert page["/metrics"].status_code == 404
    assert orjson.loads(index[1]) == [{"name": name, "state": "READY"} for name in MODELS]


def test_a_probe_of_a_decoupled_model():
    with ScriptedGrpc(serve(models=MODELS)) as server:
        found = probed(target_of(server))
        sent = [seen for seen in server.calls if seen.method == SERVICE + "ModelStreamInfer"]
    assert (found.models, found.usage_in_stream, found.lengths_pinned) == (list(MODELS), True, True)
    assert found.told == {"engine_version": "triton 2.51.0"}
    assert found.ttft_ms > 0
    assert found.rtt_ms > 0
    assert next(iter(found.ask.extra["tensors"])) == "text_input"
    assert b"return_finish_reason" in sent[0].request
    assert b"exclude_input_in_output" not in sent[0].request  # the model has no such input


def test_a_probe_of_a_single_pass():
    with ScriptedGrpc(serve(models=MODELS)) as server:
        found = probed(target_of(server, "kserve-grpc-infer", "echo"))
    assert (found.model, found.ttft_ms, found.alone_ms > 0) == ("echo", None, True)
    assert found.ask.extra["tensors"] == {"IN": {"datatype": "FP32", "shape": [-1, 4]}}


@BOTH
def test_a_model_that_is_not_there(api, model):
    with ScriptedGrpc(serve(models=MODELS)) as server:
        said = mistake(target_of(server, api, "nope"))
    assert "no such model" in said
    assert "'nope' is not among those that it lists: llm, echo" in said


@BOTH
def test_a_call_that_its_server_refuses_is_said_in_its_words_and_no_page_of_http_is_offered(api, model):
    """As Triton refuses ModelInfer of a decoupled model, after a good page of metadata."""
    good = serve(models=MODELS)

    def answer(number, seen):
        refuses = seen.method.endswith(("ModelInfer", "ModelStreamInfer"))
        return [(0, Status(12, "no decoupled model"))] if refuses else good(number, seen)

    with ScriptedGrpc(answer) as server:
        said = mistake(target_of(server, api, model))
    assert said.startswith("target t: a small probe request failed (")
    assert "no decoupled model" in said
    other = {"kserve-grpc": "kserve-grpc-infer", "kserve-grpc-infer": "kserve-grpc"}[api]
    assert said.endswith(f"; it answers as --api {other} would at {server.url}")


# What refuses -> the last words of the methods' names, and the model that is asked for
REFUSES = {
    "list": ("RepositoryIndex", ""),
    "page": ("ModelMetadata", "x"),
    "call": (("ModelInfer", "ModelStreamInfer"), "x"),
}
NAMES = {name for name, _ in GRPC_STATUS.values()}


@BOTH
@pytest.mark.parametrize("what", REFUSES)
@pytest.mark.parametrize(
    ("status", "right"),
    [
        (Status(13, "boom"), "its log says more"),  # UNKNOWN and DATA_LOSS are of the same HTTP status
        (Status(13, ""), "its log says more"),
        (Status(9, "not loaded yet"), ""),
        (Status(8, "message larger than 4194304"), ""),  # and no rate that a key allows
    ],
)
def test_a_refusal_is_said_by_its_own_name_in_the_servers_words_and_no_proxy_is_blamed(api, model, what, status, right):
    good = serve(models=MODELS)
    refusing, asked = REFUSES[what]

    def answer(number, seen):
        return [(0, status)] if seen.method.endswith(refusing) else good(number, seen)

    with ScriptedGrpc(answer) as server:
        said = mistake(target_of(server, api, asked and model))
    assert {word for word in re.findall("[A-Z_]+", said) if word in NAMES} == {status.name}
    assert not status.text or said.count(status.text) == 1
    assert "it says: INTERNAL" not in said
    assert right in said
    assert [word for word in ("grpc-message", "\\x00", "\ufffd", "HTTP", "proxy", "key", "wait") if word in said] == []


def test_a_page_that_is_no_call_is_named_by_the_status_of_the_same_meaning():
    """Our own answer, whose page holds no code: of several that share a number all are said."""
    target = target_of("http://127.0.0.1:1")
    assert statuses.number(target, statuses.Said(404, [], b'{"error": "no call"}')) == "NOT_FOUND"
    assert statuses.number(target, statuses.Said(500, [], b"")) == "UNKNOWN or INTERNAL or DATA_LOSS"
    assert statuses.number(target, statuses.Said(502, [], b"")) == "another status"


@BOTH
def test_a_missing_and_a_wrong_key(api, model, monkeypatch):
    monkeypatch.setenv("GRPC_KEY", "wrong-key")
    with ScriptedGrpc(serve("right-key", MODELS)) as server:
        said = mistake(target_of(server, api, model))
        assert said.startswith(f"target t: {server.url}/v2/repository/index answers UNAUTHENTICATED: it wants a key; ")
        assert "name its variable with --key-env" in said
        assert ": its key was refused; " in mistake(target_of(server, api, model, key_env="GRPC_KEY"))
        monkeypatch.setenv("GRPC_KEY", "right-key")
        assert probed(target_of(server, api, model, key_env="GRPC_KEY")).model == model


class _Page(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html><body>hello</body></html>")

    def log_message(self, *_):
        pass


class _ClosesOnHttp2(_Page):
    """As Triton's HTTP port does."""

    def handle(self):
        if not self.rfile.peek(3).startswith(b"PRI"):
            super().handle()


@BOTH
@pytest.mark.parametrize("pages", [_Page, _ClosesOnHttp2])
def test_a_server_of_http(api, model, pages):
    with ThreadingHTTPServer(("127.0.0.1", 0), pages) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            said = mistake(target_of(url, api, model))
        finally:
            server.shutdown()
            thread.join()
    assert said.startswith(f"target t: {url} speaks HTTP/1.1, no gRPC: give the port of its gRPC server")


@contextlib.contextmanager
def closing():
    """The URL of a server that closes what it accepts."""
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@BOTH
@undisturbed
def test_a_server_that_closes_at_once(api, model):
    with closing() as url:
        assert "is not ready after 0.2 s" in mistake(target_of(url, api, model), 0.2)


def test_a_url_with_a_path():
    with pytest.raises(BenchError, match=r"a gRPC server has no path; expected http://127\.0\.0\.1:1"):
        probed(target_of("http://127.0.0.1:1/v1"))


@undisturbed
def test_nobody_listens():
    url = f"http://127.0.0.1:{unused_port()}"
    said = mistake(target_of(url), 0.2)
    assert f"{url} is not ready after 0.2 s" in said
    assert "refused" in said
    assert not targets.reachable(target_of(url))


def test_a_grpc_server_is_reachable():
    with ScriptedGrpc(serve()) as server:
        assert targets.reachable(target_of(server))


@BOTH
def test_a_self_signed_certificate(api, model, tmp_path):
    key, cert = make_certificate(tmp_path)
    identity = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    with ScriptedGrpc(serve(models=MODELS), identity) as server:
        assert mistake(target_of(server, api, model)) == (
            f"target t: {server.url}: its certificate is not trusted (self-signed certificate); name its authority "
            "with --ca FILE"
        )
        assert probed(target_of(server, api, model, cafile=str(cert))).model == model


def test_no_tls_where_it_is_spoken_is_one_sentence_and_nothing_of_grpcs_own_log(tmp_path):
    key, cert = make_certificate(tmp_path)
    identity = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    with ScriptedGrpc(serve(models=MODELS), identity) as server:
        plain = f"http://localhost:{server.port}"
        asked = ["--api", "kserve-grpc", "--model", "llm", "--ready-timeout"]
        said = [
            subprocess.run(
                command("targets", "check", f"t={url}", *asked, limit_s),
                capture_output=True, text=True, timeout=180, cwd=tmp_path, env=environment(), check=False,
            ).stderr.strip().splitlines()
            for url, limit_s in ((plain, "0.2"), (server.url, "30"))  # the second is known at once
        ]  # fmt: skip
    assert all(line.startswith(("waiting for t at", "llm-bench: target t:")) for line in (*said[0], *said[1])), said
    assert "its certificate is not trusted" in said[1][-1]
    assert "try https://" in mistaken.of_close(target_of(plain), "UNAVAILABLE: Socket closed")


@pytest.fixture(scope="module")
def demanding(tmp_path_factory):
    """(bare target, name -> (key, certificate)) of a server that lets in whom one authority has signed."""
    folder = tmp_path_factory.mktemp("mtls")
    for name in ("theirs", "authority", "another", "good", "wrong", "expired"):
        (folder / name).mkdir()
    theirs, authority, another = (make_certificate(folder / name) for name in ("theirs", "authority", "another"))
    made = {"good": (authority, 2), "wrong": (another, 2), "expired": (authority, -1)}
    pairs = {name: sign(folder / name, *by) for name, by in made.items()}
    pair = [(theirs[0].read_bytes(), theirs[1].read_bytes())]
    identity = grpc.ssl_server_credentials(pair, authority[1].read_bytes(), require_client_auth=True)
    with ScriptedGrpc(serve(models=MODELS), identity) as server:
        yield target_of(server, cafile=str(theirs[1])), pairs, server


@BOTH
def test_a_client_certificate_is_shown(api, model, demanding):
    bare, pairs, _ = demanding
    key, cert = pairs["good"]
    assert probed(replace(bare, api=api, model=model, key=str(key), cert=str(cert))).model == model


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "a client certificate is asked for: `cert` and `key` of its table in targets.toml"),
        ("wrong", "the client certificate of `cert` is not one of its authority's, or has expired"),
        ("expired", "the client certificate of `cert` is not one of its authority's, or has expired"),
    ],
)
@undisturbed
def test_without_its_certificate_nobody_is_measured(name, said, demanding):
    """Each time: what grpcio says of it depends on which address of `localhost` it tried last."""
    bare, pairs, server = demanding
    key, cert = pairs.get(name, ("", ""))
    before = len(server.calls)
    text = mistake(replace(bare, key=str(key), cert=str(cert)), 0.5)
    assert text.endswith(f"; it closes without a word, as where {said}")
    assert len(server.calls) == before


def test_a_key_of_another_certificate_is_refused_before_anyone_is_asked(demanding):
    bare, pairs, _ = demanding
    files = {"cert": str(pairs["good"][1]), "key": str(pairs["wrong"][0]), "cafile": bare.cafile, "api": bare.api}
    with pytest.raises(BenchError, match=r"its client certificate cannot be used .key values mismatch"):
        targets.parse(f"t={bare.url}", Path("none.toml"), files)


def test_a_server_that_says_why_by_an_alert(tmp_path):
    """As those do that are not built on grpcio: OpenSSL's word is read, and at once."""
    for name in ("ours", "others", "theirs"):
        (tmp_path / name).mkdir()
    ours, others = (make_certificate(tmp_path / name) for name in ("ours", "others"))
    with ScriptedGrpc(serve()) as server, in_front_of(server, tmp_path / "theirs", ours[1]) as (port, cert):
        bare = target_of(f"https://localhost:{port}", cafile=str(cert))
        assert ": it asks for a client certificate; name its files by `cert` and `key`" in mistake(bare)
        wrong = replace(bare, key=str(others[0]), cert=str(others[1]))
        assert ": it refused the client certificate of `cert` (" in mistake(wrong)


def test_a_grpc_server_given_as_http():
    with ScriptedGrpc(serve()) as server:
        said = mistake(target_of(server, "triton-generate"))
    assert "--api kserve-grpc" in said
    assert "not in HTTP/1.1" in said


@pytest.mark.parametrize(
    ("facts", "said"), [({"insecure": True}, "--ca FILE"), ({"proxy": "http://p:1"}, "through a proxy")]
)
def test_what_grpc_cannot_do(tmp_path, facts, said):
    flags = {"api": "kserve-grpc", "url": "http://127.0.0.1:1", **facts}
    with pytest.raises(BenchError, match=said):
        targets.parse("t=http://127.0.0.1:1", tmp_path / "none.toml", flags)


def test_a_silent_server_is_given_up():
    with (
        ScriptedGrpc([(3000, b"")]) as server,
        talk.client_of(target_of(server), Timeouts()) as client,
        pytest.raises(httpx.ReadTimeout),
    ):
        talk.page(client, "GET", server.url + "/v2", 0.05)


def test_a_run_of_both_kinds_by_two_workers(tmp_path):
    """From the plan to the records, with a probe before the workers are forked."""
    trace = trace_file(tmp_path, rows(12))
    with ScriptedGrpc(serve(models=MODELS), threads=32) as server:
        (tmp_path / "targets.toml").write_text(
            f'[targets.llm]\nurl = "{server.url}"\napi = "kserve-grpc"\nmodel = "llm"\n'
            f'[targets.one]\nurl = "{server.url}"\napi = "kserve-grpc-infer"\nmodel = "echo"\n'
        )
        asked = ["--targets", "llm,one", "--concurrency", "4", "--workers", "2", "--warmup", "0"]
        done = subprocess.run(
            command("run", *asked, "--trace", trace, "--out", tmp_path / "run", "--format", "json"),
            capture_output=True,
            text=True,
            timeout=180,
            cwd=tmp_path,
            env=environment(),
            check=False,
        )
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "run" / "run.json").read_text())["cells"]
    for cell in cells:
        recorded = [records.read(file) for file in sorted((tmp_path / "run").glob(f"{cell['file'][:-6]}*.arrow"))]
        assert [x for one in recorded for x in one["outcome"].tolist()] == ["ok"] * 12
        streamed = sum(len(one.event_ns) for one in recorded)
        assert streamed == (48 if cell["target"] == "llm" else 0)
