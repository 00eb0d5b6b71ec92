"""Each mistake with a target, in every protocol, is one clear sentence before any load is sent."""

import asyncio
import contextlib
import json
import re
import socket
import ssl
import threading
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from llm_bench import mistaken, pins, probe, probe_report, statuses, targets
from llm_bench.cli import app
from llm_bench.dialect_http import EXAMPLE
from llm_bench.dialects import DIALECTS
from llm_bench.errors import BenchError, TargetError
from llm_bench.protocol import json_of, same_build
from llm_bench.targets import Target
from tests.bench import rows, trace_file
from tests.certificates import make_certificate
from tests.fixtures.protocols import MODEL, OVER_HTTP, SPEAKS, body_of, serve
from tests.quiet import undisturbed
from tests.scripted import Scripted, http_response, unused_port

every = pytest.mark.parametrize("name", OVER_HTTP)
NONE = Path("no-such-targets.toml")
PAGE = b"<!DOCTYPE html>\n<html><head><title>Welcome to nginx!</title></head><body>hello</body></html>"
WITHOUT_LIST = [name for name in OVER_HTTP if not DIALECTS[name].site.models]


def silent(_: str) -> None:
    pass


def at(server, name, api="", **facts) -> Target:
    """A server of the protocol `name`, given as `api`; with the model's name where there is no list of them."""
    root = server.url.removesuffix("/v1")
    row = DIALECTS[api or name]
    if row.takes.model and not row.site.models:
        facts = {"model": MODEL} | facts
    return Target("t", root + DIALECTS[name].site.base, api=api or name, **facts)


def refused(target, ready_s=30.0) -> str:
    """What is said of it: one line, however the server answers."""
    with pytest.raises(TargetError) as caught:
        probe.probe(target, silent, ready_s)
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith("target t: ")
    assert any(urlsplit(url).netloc in said for url in target.urls)  # where, what was found, what would be right
    assert len(said) < 600
    return said


@every
def test_a_good_server_is_found_out_by_its_own_pages(name):
    speaks, row = SPEAKS[name], DIALECTS[name]
    with Scripted(serve(name)) as server:
        found = probe.probe(at(server, name), silent, 5.0)
        assert not any("x-request-id" in seen.headers for seen in server.requests)
    listed = name not in WITHOUT_LIST
    assert found.models == ([MODEL] if listed else [])
    assert found.model == (MODEL if row.takes.model or listed else "")
    assert found.told == speaks.told
    assert found.lengths_pinned is (bool(row.takes.pins))
    assert found.finish_reason_seen is bool(speaks.finish)
    assert found.usage_in_stream is (name not in ("trtllm-triton", "torchserve", "ray-serve") and row.comes.streams)
    assert found.cached_reported is (speaks.counts[2] >= 0)
    assert (found.ttft_ms is not None) is row.comes.streams
    assert found.rtt_ms is not None
    assert any("has no way to ask for it" in n for n in found.notes) is (not row.takes.pins and row.comes.streams)
    says_limit = row.site == DIALECTS["openai-chat"].site or name in ("openai-responses", "tgi", "llamacpp")
    assert found.max_model_len == (512 if says_limit else None)
    rows = dict(probe_report.check_rows(at(server, name), found))
    assert rows["protocol (api)"] == name


@every
def test_a_model_that_is_not_there(name):
    row = DIALECTS[name]
    with Scripted(serve(name)) as server:
        target = at(server, name, model="nope")
        if row.takes.model == "" and not row.site.models:  # one model, whatever it is called
            assert probe.probe(target, silent, 5.0).model == "nope"
            return
        said = refused(target)
    assert "nope" in said
    if row.takes.model == "":  # no request would name it, and its answers would be reported as another model's
        assert f"and a request of {name} names none" in said
        assert ", m, " in said
        return
    assert SPEAKS[name].unknown[2] in said


def test_of_several_models_the_one_that_was_asked_is_said():
    """Triton lists a model of tensors before one of text, and the user named none."""
    good = serve("triton-generate")

    def answer(number, seen):
        if seen.path == "/v2/repository/index":
            return body_of([{"name": name, "state": "READY"} for name in ("pass", MODEL)])
        return body_of({"error": "expected 2 inputs"}, 400) if "/models/pass/" in seen.path else good(number, seen)

    with Scripted(answer) as server:
        said = refused(at(server, "triton-generate"))
        assert said.endswith(
            f"; asked was 'pass', the first of those that it lists (pass, {MODEL}): --model names another"
        )
        assert "the first of those" not in refused(at(server, "triton-generate", model="pass"))
        assert probe.probe(at(server, "triton-generate", model=MODEL), silent, 5.0).model == MODEL


def test_a_part_of_the_servers_name_is_no_wrong_one():
    """Of a file /models/Llama-3-8B.gguf, llama-3-8b."""
    target = Target("t", "http://h", api="llamacpp", model="llama-3-8b")
    assert mistaken.of_name(target, ["/models/Llama-3-8B.gguf"]) == ""
    assert mistaken.of_name(target, ["/models/Qwen3-8B.gguf"])


@every
def test_a_missing_and_a_wrong_key(name, monkeypatch):
    header, form = DIALECTS[name].site.key_header
    monkeypatch.setenv("SOME_KEY", "wrong-key-1234")
    with Scripted(serve(name, key=(header.lower(), form.format(key="the-right-key")))) as server:
        assert "HTTP 401: it wants a key; name its variable with --key-env" in refused(at(server, name))
        said = refused(at(server, name, key_env="SOME_KEY"))
        assert "HTTP 401: its key was refused" in said
        assert "wrong-key-1234" not in said
        monkeypatch.setenv("SOME_KEY", "the-right-key")
        assert probe.probe(at(server, name, key_env="SOME_KEY"), silent, 5.0).alone_tokens > 0


def test_a_key_of_another_makers_protocol_is_said_as_openais_routes_have_it_too(monkeypatch):
    """vLLM's /v1/messages looks for it in Authorization alone; the protocol's maker gets its own header alone."""
    monkeypatch.setenv("SOME_KEY", "the-right-key")
    with Scripted(serve("anthropic-messages", key=("authorization", "Bearer the-right-key"))) as server:
        target = at(server, "anthropic-messages", key_env="SOME_KEY")
        assert probe.probe(target, silent, 5.0).alone_tokens > 0
    both = dict(targets.auth_headers(target))
    assert (both["x-api-key"], both["Authorization"]) == ("the-right-key", "Bearer the-right-key")
    assert dict(targets.auth_headers(replace(target, headers={"authorization": "mine"})))["authorization"] == "mine"
    maker = replace(target, url="https://api.anthropic.com/v1")
    assert "Authorization" not in dict(targets.auth_headers(maker))


def test_torchserve_says_of_a_key_that_the_request_is_bad(monkeypatch):
    """As 0.12 answers every route, the one that asks for its health too."""
    monkeypatch.setenv("SOME_KEY", "wrong-key-1234")
    refusal = {"code": 400, "type": "InvalidKeyException", "message": "Token Authorization failed."}
    with Scripted(lambda number, seen: body_of(refusal, 400)) as server:
        assert "/ping answers HTTP 400: it wants a key" in refused(at(server, "torchserve"))
        said = refused(at(server, "torchserve", key_env="SOME_KEY"))
        assert "HTTP 400: its key was refused; correct the value of the variable SOME_KEY (it says: Token" in said


@every
def test_a_key_that_only_the_generation_wants(name):
    good = serve(name)

    def answer(number, seen):
        own = seen.method == "POST" and "repository" not in seen.path
        return body_of({"error": "no valid key"}, 401) if own else good(number, seen)

    with Scripted(answer) as server:
        assert "it wants a key; name its variable with --key-env" in refused(at(server, name))


def answers_as(said: str) -> list[str]:
    """The protocols that a refusal offers in place of what was asked."""
    found = re.search(r"it answers as (?:one of )?--api (.+) would at", said)
    return found[1].split(", ") if found else []


def _others():
    """Each row as OpenAI's chat and the reverse: what a user most often mixes up."""
    for name in OVER_HTTP:
        row = DIALECTS[name]
        if row.site != DIALECTS["openai-chat"].site and name not in ("anthropic-messages", "http"):
            yield "openai-chat", name
            yield name, "openai-chat"


@pytest.mark.parametrize(("name", "api"), list(_others()))
def test_a_protocol_given_as_another(name, api):
    with Scripted(serve(name)) as server:
        said = refused(at(server, name, api))
    if name not in ("torchserve", "ray-serve"):  # their pages are at other places
        sign = {"tei-rerank": "tgi"}.get(name, "triton-generate" if "tri" in name or "kserve" in name else name)
        assert sign in answers_as(said)
        assert re.search(r" would at http://127\.0\.0\.1", said)
    assert "correct the URL" in said or f"is it {api}?" in said or "probe request failed" in said


@pytest.mark.parametrize(
    ("page", "sign"),
    [
        ({"name": "triton", "version": "2.51.0", "extensions": ["statistics"]}, "triton-generate"),
        ({"name": "mlserver", "version": "1.7.1", "extensions": []}, "kserve-http"),
        ({"name": "our-own", "version": "1"}, "kserve-http"),
    ],
)
def test_of_the_servers_that_speak_kserve_only_triton_has_a_generate_extension(page, sign):
    def answer(number, seen):
        return body_of(page) if seen.path == "/v2" else body_of({"detail": "Not Found"}, 404)

    with Scripted(answer) as server:
        said = refused(Target("t", server.url))
    assert sign in answers_as(said)
    assert said.endswith(f" would at {server.url.removesuffix('/v1')}")
    assert ("triton-generate" in answers_as(said)) == (sign == "triton-generate")


@pytest.mark.parametrize("name", DIALECTS)
def test_what_a_right_url_looks_like_is_said_by_the_one_that_was_given(name):
    """And what is said of it is one: a target of that URL asks where the protocol's servers answer."""
    row = DIALECTS[name]
    said = mistaken._right(Target("t", "http://host:9000/wrong/v7", api=name))
    url = said.rpartition("such as ")[2]
    assert said.startswith(f"{'an' if name[0] in 'aeio' else 'a'} {name} URL ")
    assert url == ("http://host:9000/ROUTE" if not row.path else f"http://host:9000{row.site.base}")
    targets.parse(f"t={url}", NONE, {"api": name} | ({"http": EXAMPLE} if name == "http" else {}))
    assert "OpenAI" not in said


def test_an_openai_url_without_its_version_is_told_the_right_one():
    with Scripted(serve("openai-chat")) as server:
        root = server.url.removesuffix("/v1")
        said = refused(Target("t", root, model=MODEL))
    assert "openai-chat" in answers_as(said)
    assert said.endswith(f" would at {root}/v1")


def test_protocols_that_share_a_page_are_named_together():
    """A list of models does not tell which of them are served: the first of them would be a guess."""
    with Scripted(serve("embeddings")) as server:
        said = refused(at(server, "embeddings", "openai-chat"))
    others = ["openai-completions", "openai-responses", "anthropic-messages", "embeddings", "rerank"]
    assert answers_as(said) == others


@every
@pytest.mark.parametrize("status", [200, 404, 502])
@undisturbed
def test_a_server_that_speaks_html(name, status):
    with Scripted([(0, http_response(status, PAGE, {"Content-Type": "text/html"}))]) as server:
        said = refused(at(server, name), ready_s=0.8)
        also = refused(at(server, name, model=MODEL), ready_s=0.8) if status != 502 else ""
    if status == 502:  # a gateway whose server is still starting
        assert "is not ready after 0.8 s (HTTP 502, a web page (HTML)" in said
    else:
        assert "a web page (HTML)" in said
        assert f"answers HTTP {status} with a web page (HTML), not {name}" in also


@pytest.mark.parametrize("name", DIALECTS)
@undisturbed
def test_nobody_listens(name):
    if DIALECTS[name].transport == "grpc":
        pytest.importorskip("grpc")
    url = f"http://127.0.0.1:{unused_port()}"
    said = refused(Target("t", url, api=name, model=MODEL), ready_s=0.2)
    assert said.startswith(f"target t: {url} is not ready after 0.2 s (ConnectError: ")
    assert "refused" in said
    assert said.endswith("; start the server or correct the URL; --ready-timeout waits longer")


@every
def test_a_server_that_has_nothing_at_any_address(name):
    """404 for all, with and without a model's name."""
    with Scripted([(0, http_response(404, b'{"detail": "Not Found"}'))]) as server:
        asked = server.url.removesuffix("/v1")
        texts = [refused(at(server, name)), refused(at(server, name, model=MODEL))]
    for said in texts:
        assert "HTTP 404" in said
        assert asked in said
        assert "correct the URL" in said or f"is it {name}?" in said
        assert "answers as" not in said


@pytest.mark.parametrize(("name", "extra", "said"), [
    ("tgi", {"parameters": 3}, "extra.parameters is of type int, expected a table"),
    ("tgi", {"parameters": "{}"}, "extra.parameters is of type str, expected a table"),
    ("sglang", {"sampling_params": [{"n": 2}]}, "extra.sampling_params is of type list, expected a table"),
    ("triton-generate", {"sampling_parameters": 3}, "extra.sampling_parameters is of type int, expected a table"),
    ("rerank", {"documents": 3}, "extra.documents is not a list of documents"),
    ("kserve-http", {"tensors": [1]}, "extra.tensors is of type list, expected a table"),
    ("kserve-http", {"tensors": {"a": {"datatype": ["FP32"], "shape": [1]}}}, "extra.tensors.a has datatype ['FP32']"),
    ("kserve-binary", {"tensors": {"a": {"datatype": "BYTES", "shape": [1], "data": [{"b": 1}]}}}, "tensor a: a value"),
    ("http", {"documents": 3}, ""),  # its template takes what it names
])  # fmt: skip
def test_a_table_of_extra_that_no_request_can_be_made_of_names_the_target_and_no_line(name, extra, said):
    with Scripted(serve(name)) as server:
        if not said:
            assert probe.probe(at(server, name, extra=extra), silent, 5.0).model == MODEL
            return
        with pytest.raises(BenchError) as caught:
            probe.probe(at(server, name, extra=extra), silent, 5.0)
        assert not [seen for seen in server.requests if seen.method == "POST" and "infer" in seen.path]
    assert str(caught.value).startswith("target t: ")
    assert said in str(caught.value)
    assert "line 0" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2  # the user's own mistake, no fault of the target's


def test_a_table_of_tensors_that_is_none_is_told_where_the_models_page_is_none_either():
    def answers(number, seen):
        missing = seen.path == f"/v2/models/{MODEL}"
        return (
            [(0, http_response(404, b'{"error": "no such model"}'))] if missing else serve("kserve-http")(number, seen)
        )

    with Scripted(answers) as server, pytest.raises(BenchError, match=r"^target t: extra.tensors is of type list") as e:
        probe.probe(at(server, "kserve-http", extra={"tensors": [1]}), silent, 5.0)
    assert e.value.exit_code == 2


def test_a_text_may_stand_where_triton_takes_one():
    with Scripted(serve("triton-generate")) as server:
        target = at(server, "triton-generate", extra={"sampling_parameters": '{"max_tokens": 4}'})
        assert probe.probe(target, silent, 5.0).model == MODEL


@every
def test_a_run_ends_before_its_load_with_the_code_of_a_wrong_target(name, tmp_path, monkeypatch):
    """As the command: one sentence, no measured request, no record."""
    monkeypatch.chdir(tmp_path)
    trace = trace_file(tmp_path, rows(4))
    with Scripted([(0, http_response(404, PAGE, {"Content-Type": "text/html"}))]) as server:
        (tmp_path / "targets.toml").write_text(_declared(at(server, name)))
        ran = CliRunner().invoke(app, ["run", "--targets", "t", "--trace", str(trace), "--rate", "9", "--out", "run"])
        assert not any("x-request-id" in seen.headers for seen in server.requests)
    assert isinstance(ran.exception, TargetError)
    assert ran.exception.exit_code == 4
    assert str(ran.exception).startswith("target t: ")
    assert not list((tmp_path / "run").glob("*.arrow"))


def _declared(target) -> str:
    table = {"url": target.url, "api": target.api, "model": target.model}
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items() if value]
    lines += [f"http.{key} = {json.dumps(value)}" for key, value in EXAMPLE.items()] if target.api == "http" else []
    return "\n".join(["[targets.t]", *lines, ""])


@every
@undisturbed
def test_a_server_that_closes_at_once(name):
    with _closes() as port:
        said = refused(Target("t", f"http://127.0.0.1:{port}", api=name, model=MODEL), ready_s=0.2)
    assert "is not ready after 0.2 s" in said
    assert "disconnected" in said or "reset" in said


@contextlib.contextmanager
def _closes(word=b""):
    """The port of a server that says `word` to whoever comes, and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended = threading.Event()

        def accept():
            while not ended.is_set():
                with contextlib.suppress(OSError):
                    client = listener.accept()[0]
                    client.recv(1 if word else 0)
                    client.sendall(word)
                    client.close()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        ended.set()
        with contextlib.suppress(OSError):
            socket.create_connection(listener.getsockname(), 1).close()
        thread.join(2)


@pytest.fixture(scope="module")
def secure(tmp_path_factory):
    """(port, certificate) of an https server that nobody vouches for; it answers anything with 404."""
    key, cert = make_certificate(tmp_path_factory.mktemp("tls"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    loop, ready, port = asyncio.new_event_loop(), threading.Event(), []

    async def answer(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(http_response(404, b"{}", {"Connection": "close"}))
            await writer.drain()
        writer.close()

    async def main():
        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        port.append(server.sockets[0].getsockname()[1])
        ready.set()
        async with server:
            await ended.wait()

    ended = asyncio.Event()
    loop.set_exception_handler(lambda loop, context: None)  # handshakes that the client gives up
    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert ready.wait(60)
    yield port[0], cert
    loop.call_soon_threadsafe(ended.set)
    thread.join(2)
    loop.close()


@every
def test_a_self_signed_certificate(name, secure):
    port, cert = secure
    target = Target("t", f"https://localhost:{port}", api=name, model=MODEL)
    said = refused(target, ready_s=30.0)  # at once: waiting makes no certificate
    assert "certificate is not trusted (self-signed certificate); name its authority with --ca FILE" in said
    assert "--insecure" in said
    trusted = refused(Target("t", target.url, api=name, model=MODEL, cafile=str(cert)))
    assert "certificate" not in trusted


def test_https_to_a_server_without_it():
    with _closes(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        said = refused(Target("t", f"https://127.0.0.1:{port}", api="tgi"), ready_s=30.0)
    assert "it does not speak TLS; use http:// instead of https://" in said


def test_nothing_answers_to_a_guess():
    with Scripted(lambda number, seen: [(0, http_response(404, b"not found"))]) as server:
        said = refused(Target("t", server.url))
        assert "lists no model (HTTP 404, it says: not found); give --model, or correct the URL" in said
        assert "answers as" not in said
        assert {seen.method for seen in server.requests} == {"GET"}  # what a stranger's POST would do is not known


# What an answer's status and head tell


PROXY = b"<html>\r\n<head><title>502 Bad Gateway</title></head>\r\n<body>nginx/1.18.0</body></html>"
FASTAPI = {"detail": [{"type": "missing", "loc": ["body", "messages"], "msg": "Field required", "input": {}}]}
# status, head, body -> what is said of it on a page, what of a request
ANSWERS = {
    "too many": (429, {"Retry-After": "7"}, {"error": {"message": "slow down"}}, ("Retry-After: 7", "wait 7 s"), ()),
    "overloaded": (
        503,
        {"Retry-After": "Wed, 21 Oct"},
        {"error": "busy"},
        None,
        ("Retry-After: Wed", "wait until Wed"),
    ),
    "key": (401, {"WWW-Authenticate": 'Bearer realm="x"'}, {"error": "no"}, ('Bearer realm="x"', "--key-env"), ()),
    "basic": (401, {"WWW-Authenticate": 'Basic realm="x"'}, {}, ('Basic realm="x"',), ()),
    "plan": (403, {}, {"error": "not in your plan"}, ("not in your plan", "--key-env"), ()),
    "method": (405, {"Allow": "PUT"}, {"detail": "Method Not Allowed"}, ("Allow: PUT",), ("is it ",)),
    "proxy": (407, {"Proxy-Authenticate": "Basic"}, {}, ("--proxy http://USER:PASSWORD@",), ()),
    "type": (415, {}, {"detail": "Unsupported Media Type"}, ("Unsupported Media Type",), ("is it ",)),
    "fields": (422, {}, FASTAPI, ("body.messages: Field required",), ("is it ",)),
    "fault": (500, {}, {"error": "boom"}, ("boom", "its log says more"), ()),
    "gateway": (502, {"Content-Type": "text/html"}, PROXY, None, ("(HTML) '502 Bad Gateway'", "cannot reach it")),
    "late": (504, {"Content-Type": "text/html"}, PROXY, None, ("(HTML) '502 Bad Gateway'", "gave up waiting")),
}


@pytest.mark.parametrize("what", [what for what, answer in ANSWERS.items() if answer[3] is not None])
@pytest.mark.parametrize("name", ["openai-chat", "tgi", "triton-generate"])  # by GET, at the root, by POST
def test_a_list_of_models_that_is_refused_says_by_what_and_what_would_be_right(name, what):
    status, head, body, on_page, _ = ANSWERS[what]
    answer = http_response(status, body if isinstance(body, bytes) else json.dumps(body).encode(), head)
    with Scripted([(0, answer)]) as server:
        said = refused(at(server, name))
    assert f"HTTP {status}" in said
    assert [word for word in on_page if word not in said] == []


@pytest.mark.parametrize("name", [name for name in OVER_HTTP if DIALECTS[name].site.described])
def test_a_models_page_that_is_refused_says_by_what_and_what_would_be_right(name):
    good = serve(name)

    def answer(number, seen):
        refusal = body_of({"error": "slow down"}, 429, Retry_After="7")
        return refusal if seen.path == f"/v2/models/{MODEL}" else good(number, seen)

    with Scripted(answer) as server:
        said = refused(at(server, name))
        assert f"{server.url.removesuffix('/v1')}/v2/models/{MODEL} answers HTTP 429 (Retry-After: 7)" in said
    assert "slow down" in said
    assert "wait 7 s" in said


@pytest.mark.parametrize(
    ("name", "what"),
    [*((name, "too many") for name in OVER_HTTP), *(("openai-chat", what) for what in list(ANSWERS)[1:])],
)
def test_a_first_request_that_is_refused_says_by_what_and_what_would_be_right(name, what):
    status, head, body, on_page, on_request = ANSWERS[what]
    refusal = http_response(status, body if isinstance(body, bytes) else json.dumps(body).encode(), head)
    good = serve(name)

    def answer(number, seen):
        own = seen.method == "POST" and "repository" not in seen.path
        return [(0, refusal)] if own else good(number, seen)

    with Scripted(answer) as server:
        said = refused(at(server, name))
    assert f"answers HTTP {status}" in said
    assert [word for word in (*(on_page or ()), *on_request) if word not in said] == []
    assert "<html>" not in said


def test_a_key_of_another_kind_is_a_header_of_the_target():
    refusal = http_response(401, b"", {"WWW-Authenticate": 'Basic realm="staff"'})
    with Scripted([(0, refusal)]) as server:
        said = refused(at(server, "openai-chat"))
    assert "it wants Basic and no key; give Authorization in [targets.t.headers] of targets.toml" in said


@pytest.mark.parametrize(
    ("lines", "schemes"),
    [
        (["Negotiate, NTLM"], ["Negotiate", "NTLM"]),
        (['Basic realm="a, Bearer b", charset="UTF-8", Bearer realm="x", error=invalid_token'], ["Basic", "Bearer"]),
        (['Basic realm="x"', "Bearer", "Basic"], ["Basic", "Bearer"]),
        (["Basic dTpw=="], ["Basic"]),
        (['Digest qop = "auth",nonce=abc,  opaque="\\", NTLM"'], ["Digest"]),
        (["", ","], []),
    ],
)
def test_the_ways_to_say_who_asks_are_all_read(lines, schemes):
    head = [(b"www-authenticate", line.encode()) for line in lines]
    assert statuses.schemes(statuses.Said(401, head, b"")) == schemes


@pytest.mark.parametrize(
    "head",
    [
        {"WWW-Authenticate": 'Basic realm="x", Bearer realm="y"'},
        {"WWW-Authenticate": 'Basic realm="x"', "www-authenticate": "Bearer"},
    ],
)
def test_where_a_key_is_one_of_several_ways_it_is_what_is_asked_for(head):
    with Scripted([(0, http_response(401, b"", head))]) as server:
        said = refused(at(server, "openai-chat"))
    assert "HTTP 401: it wants a key; name its variable with --key-env" in said
    assert re.search("WWW-Authenticate: Basic.*, Bearer", said)


@pytest.mark.parametrize(("name", "header"), [("openai-chat", "authorization"), ("anthropic-messages", "X-API-Key")])
def test_a_key_in_the_targets_own_headers_that_is_refused_is_what_is_to_be_corrected(name, header):
    refusal = http_response(401, b"", {"WWW-Authenticate": 'Basic realm="staff"'})
    with Scripted([(0, refusal)]) as server:
        said = refused(at(server, name, headers={header: "Basic c2VjcmV0"}))
    assert f"HTTP 401: the {header} of its headers was refused; correct it in [targets.t.headers] of targets" in said
    assert "it wants" not in said
    assert "c2VjcmV0" not in said


@pytest.mark.parametrize("name", ["openai-chat", "tgi", "anthropic-messages", "sglang"])
def test_a_redirect_says_which_url_to_give(name):
    row = DIALECTS[name]
    base = row.site.base

    def answer(number, seen):
        return [(0, http_response(308, b"", {"Location": f"https://other.example{seen.path}"}))]

    with Scripted(answer) as server:
        texts = [refused(at(server, name)), refused(at(server, name, model=MODEL))]
    for said in texts:
        assert "HTTP 308" in said
        assert "Location: https://other.example/" in said
        assert f"redirects are not followed: give https://other.example{base} as the URL" in said


@pytest.mark.parametrize(
    "to", ["https://login.example/?next={}", "https://login.example/#{}", "app://other.example{}", "https://me@other{}"]
)
def test_a_redirect_to_a_page_to_log_in_at_is_no_url_to_give(to):
    def answer(number, seen):
        return [(0, http_response(302, b"", {"Location": to.format(seen.path)}))]

    with Scripted(answer) as server:
        texts = [refused(at(server, "openai-chat")), refused(at(server, "openai-chat", model=MODEL))]
    assert [said for said in texts if re.search(r"give (https?|app)://", said)] == []
    assert "redirects are not followed; an openai-chat URL ends in /v1" in texts[1]


def test_a_redirect_to_what_is_no_url_of_the_protocol_says_what_one_looks_like():
    good = serve("openai-chat")

    def answer(number, seen):
        to = {"Location": seen.path + "/"}
        return [(0, http_response(307, b"", to))] if seen.method == "POST" else good(number, seen)

    with Scripted(answer) as server:
        said = refused(at(server, "openai-chat"))
    assert "Location: /v1/chat/completions/" in said
    assert "redirects are not followed; an openai-chat URL ends in /v1" in said


# Builds


@pytest.mark.parametrize(
    ("declared", "found", "same"),
    [
        ("abc", "abc", True),
        ("abc123", "abc123def456", True),
        ("abc123def456", "abc123", True),
        ("abc123", "abd123", False),
        ("0.32.0", "0.32.0+cpu", True),
        ("v0.9.1", "0.9.1", True),
        ("0.9.1", "0.9.2", False),
        ("fp16", "torch.float16", True),
        ("bfloat16", "bf16", True),
        ("float16", "bfloat16", False),
        ("a", "abc", False),
    ],
)
def test_when_two_names_are_of_one_build(declared, found, same):
    assert same_build(declared, found) is same
    assert same_build(found, declared) is same


@pytest.mark.parametrize("fact", pins.FACTS)
def test_a_build_other_than_the_declared_one_is_refused(fact):
    with Scripted(serve("tgi")) as server:
        said = refused(at(server, "tgi", **{fact: "something-else"}))
        assert f"{fact.replace('_', ' ')} 'something-else' is declared" in said
        assert repr(SPEAKS["tgi"].told[fact]) in said
        good = at(server, "tgi", **{fact: SPEAKS["tgi"].told[fact]})
        assert probe.probe(good, silent, 5.0).told == SPEAKS["tgi"].told


def test_two_builds_under_one_name_are_refused():
    def older(number, seen):
        if seen.path == "/info":
            return body_of(SPEAKS["tgi"].about[1] | {"model_sha": "fff999"})
        return serve("tgi")(number, seen)

    with Scripted(serve("tgi")) as one, Scripted(older) as other:
        urls = "|".join(server.url.removesuffix("/v1") for server in (one, other))
        said = refused(Target("t", urls, api="tgi"))
    assert "revision 'abc123' at" in said
    assert "'fff999' at" in said
    assert "one name is one build" in said


@every
def test_any_page_about_a_server_is_facts_or_none(name):
    for path, read in DIALECTS[name].site.about:
        for body in (b"", b"[1]", b"null", b"<html>", b"{}", b'{"version": 5, "model_sha": [], "name": {}}'):
            assert read(json_of(body)) == {}, path


@every
@pytest.mark.parametrize("body", [b"", b"[", b"null", b"5", b'"x"', b"[5]", b'{"data": 5}', b"{}", PAGE])
def test_any_list_of_models_is_one_or_none(name, body):
    site = DIALECTS[name].site
    assert site.listed(body) == []
    assert site.models or not site.is_ready(body)


def test_declared_builds_are_keys_of_targets_toml(tmp_path):
    file = tmp_path / "targets.toml"
    table = (
        '[targets.t]\nurl = "http://h"\napi = "tgi"\nimage = "i@sha256:1"\nengine-version = "3.3"\nprecision = "fp16"\n'
    )
    file.write_text(table)
    (found,) = targets.parse("t", file, {})
    assert (found.api, found.image, found.engine_version, found.precision) == ("tgi", "i@sha256:1", "3.3", "fp16")
    assert {"image", "engine_version", "revision", "precision"} <= json.loads(json.dumps(found.public())).keys()
    file.write_text('[targets.t]\nurl = "http://h"\nengine-version = 3\n')
    with pytest.raises(BenchError, match="engine_version is of type int, expected a text"):
        targets.parse("t", file, {})


@every
def test_every_row_is_an_api_that_can_be_named(name, tmp_path):
    table = {"http": EXAMPLE} if name == "http" else {}
    (found,) = targets.parse("t=http://h:1", tmp_path / "none.toml", {"api": name, **table})
    assert found.api == name


def test_some_of_many_names_are_a_sentence():
    assert mistaken.some([f"m{i}" for i in range(7)]) == "m0, m1, m2, m3, m4 and 2 more"


def test_a_file_of_targets_that_is_named_before_the_command_is_the_one_that_is_read(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(f'[targets.far]\nurl = "http://127.0.0.1:{unused_port()}/v1"\n')
    for words in (["--targets-file", str(file), "check", "far"], ["check", "far", "--targets-file", str(file)]):
        ran = CliRunner().invoke(app, ["targets", *words, "--ready-timeout", "0.1"])
        assert isinstance(ran.exception, TargetError)
        assert "is not ready after 0.1 s" in str(ran.exception)
