"""Proxies: none unless asked for, the two ways through one, and passwords that nobody sees."""

import asyncio
import base64
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from llm_bench import proxy, targets
from llm_bench.errors import BenchError, TargetError
from llm_bench.exchange import COMPLETE, CONNECT_ERROR, CONNECT_TIMEOUT, Exchange, Timeouts
from llm_bench.proxy import Proxy
from llm_bench.targets import Target
from llm_bench.wire import Wire, request_head
from tests.bench import bench, good, llm_server, rows, trace_file
from tests.certificates import make_certificate
from tests.quiet import undisturbed
from tests.scripted import END, FINISH, SSE_HEAD, Scripted, http_response, sse, token, unused_port

NONE = Path("no-such-targets.toml")
SECRET = "pass-0123456789"
BASIC = base64.b64encode(f"user:{SECRET}".encode()).decode()
LOOPS = [asyncio.run, uvloop.run]
Run = Callable[[Coroutine[Any, Any, Any]], Any]
BODY = b"Content-Length: 2\r\n\r\n{}"
ANSWER = SSE_HEAD + sse(token("a"), FINISH) + END


def at(port: int, authorization: str = "") -> Proxy:
    return Proxy("127.0.0.1", port, authorization)


def wire_to(url: str, through: Proxy, connect_s: float = 10.0, **more: Any) -> Wire:
    timeouts = Timeouts(connect_s=connect_s)
    return Wire(url, "/chat/completions", [], timeouts, lambda data: b'"a"' in data, proxy=through, **more)


# ---- which proxy


@pytest.mark.parametrize(
    ("url", "host", "port", "authorization"),
    [
        ("http://p", "p", 80, ""),
        ("http://p:3128/", "p", 3128, ""),
        ("HTTP://[::1]:8080", "::1", 8080, ""),
        (f"http://user:{SECRET}@p:1", "p", 1, f"Basic {BASIC}"),
        ("http://u%40b:%3A@p:1", "p", 1, "Basic dUBiOjo="),  # u@b and a colon, RFC 7617
    ],
)
def test_a_url_says_where_a_proxy_is_and_what_it_wants(url: str, host: str, port: int, authorization: str) -> None:
    found = proxy.read(url, "x")
    assert found == Proxy(host, port, authorization)
    assert SECRET not in found.shown
    assert found.shown == f"http://{'[::1]' if ':' in host else host}:{port}"


@pytest.mark.parametrize("kind", ["socks5", "socks4", "socks5h", "https", "SOCKS5"])
def test_other_kinds_of_proxies_are_refused_in_words(kind: str) -> None:
    with pytest.raises(BenchError, match=rf"{kind.lower()}://, which is not supported; .*http://HOST:PORT") as caught:
        proxy.read(f"{kind}://user:{SECRET}@p:1080", "x")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("url", ["", "p", "enviroment", "p:3128", "ftp://p", "http://", "http://p:0", "http://p:x",
                                 "http://[::1", "http://p/path", "http://p?q=1", "http://a b"])  # fmt: skip
def test_what_is_no_proxy_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(BenchError, match=r"^--proxy is not the URL of a proxy; expected http://HOST:PORT$"):
        proxy.read(url, "--proxy")


def test_the_environment_names_a_proxy_by_scheme_unless_the_host_is_excepted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert proxy.of_environment("http://h:8000/v1") is None
    monkeypatch.setenv("http_proxy", f"user:{SECRET}@p:3128")  # without a scheme, as curl takes it
    monkeypatch.setenv("ALL_PROXY", "http://q:1")
    found = proxy.of_environment("http://h:8000/v1")
    assert found == Proxy("p", 3128, f"Basic {BASIC}", "HTTP_PROXY")
    assert proxy.of_environment("https://h/v1") == Proxy("q", 1, "", "ALL_PROXY")
    monkeypatch.setenv("NO_PROXY", "other,.inside,h:8000")
    assert proxy.of_environment("http://h:8000/v1") is None
    assert proxy.of_environment("http://h:8001/v1") is not None
    assert proxy.of_environment("https://gpu.inside/v1") is None
    monkeypatch.setenv("ALL_PROXY", f"socks5://user:{SECRET}@q")
    with pytest.raises(BenchError, match="what ALL_PROXY holds is a proxy of socks5://") as caught:
        proxy.of_environment("https://h/v1")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("name", ["HTTP_PROXY", "all_proxy"])
def test_a_proxy_that_is_set_and_not_asked_for_stops_the_run_unless_the_target_is_this_machine(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, f"http://user:{SECRET}@p:3128")
    with pytest.raises(BenchError, match=f"target a: {name.upper()} is set, .*--proxy env .*--proxy none") as caught:
        targets.parse("a=http://h:8000/v1", NONE, {})
    assert SECRET not in str(caught.value)
    for local in ("http://127.0.0.1:8000/v1", "http://localhost:8000/v1", "http://[::1]:8000/v1"):
        [target] = targets.parse(f"a={local}", NONE, {})
        assert "is not used" in targets.proxy_line(target)
    [straight] = targets.parse("a=http://h:8000/v1", NONE, {"proxy": "none"})
    assert targets.proxy_of(straight, straight.url) is None
    assert "straight to the target" in targets.proxy_line(straight)
    [through] = targets.parse("a=http://h:8000/v1", NONE, {"proxy": "env"})
    assert targets.proxy_of(through, through.url) == Proxy("p", 3128, f"Basic {BASIC}", name.upper())
    assert targets.proxy_line(through) == f"a: probes and load go through the proxy http://p:3128 ({name.upper()})"
    monkeypatch.setenv("NO_PROXY", "h")
    assert targets.parse("a=http://h:8000/v1", NONE, {})
    assert targets.proxy_of(through, through.url) is None
    assert targets.proxy_line(through) == ""


def test_each_url_of_a_target_is_excepted_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://p:3128")
    monkeypatch.setenv("NO_PROXY", "near")
    with pytest.raises(BenchError, match="HTTP_PROXY is set"):
        targets.parse("a=http://near/v1|http://far/v1", NONE, {})
    [target] = targets.parse("a=http://near/v1|http://far/v1", NONE, {"proxy": "env"})
    assert [targets.proxy_of(target, url) is None for url in target.urls] == [True, False]
    assert target.by_proxy() == "none, http://p:3128 (HTTP_PROXY)"


def test_a_server_of_ours_is_never_asked_through_a_proxy() -> None:
    [ours] = targets.parse("null", NONE, {"proxy": "http://p:3128"})
    assert targets.proxy_of(ours, "http://127.0.0.1:1/v1") is None


def test_a_wrong_proxy_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"target a: proxy .* socks5://, which is not supported"):
        targets.parse("a=http://h/v1", NONE, {"proxy": "socks5://p:1"})
    file = tmp_path / "targets.toml"
    file.write_text('[targets.a]\nurl = "http://h/v1"\nproxy = "http://p/with/path"\n')
    with pytest.raises(BenchError, match=r"target a: proxy \(--proxy\) is not the URL of a proxy"):
        targets.parse("a", file, {})


def test_a_proxys_password_is_hidden_and_not_stored() -> None:
    target = Target("t", "http://h/v1", proxy=f"http://user:{SECRET}@p:3128")
    hide = targets.hider(target)
    assert hide(f"refused Basic {BASIC}, {SECRET}") == "refused [key], [key]"
    assert target.public()["proxy"] == "http://p:3128"
    assert SECRET not in repr(target.public())
    assert BASIC not in repr(target.public())
    assert SECRET not in targets.proxy_line(target)


# ---- http: the proxy is told the whole URL


def test_the_whole_url_and_the_password_are_in_the_head_for_http_only() -> None:
    through = Proxy("p", 1, f"Basic {BASIC}")
    head = request_head("http://h:8000/v1", "/c", [], through)
    assert head.startswith(b"POST http://h:8000/v1/c HTTP/1.1\r\nHost: h:8000\r\n")
    assert f"Proxy-Authorization: Basic {BASIC}\r\n".encode() in head
    assert request_head("https://h/v1", "/c", [], through) == request_head("https://h/v1", "/c", [])


@pytest.mark.parametrize("run", LOOPS)
def test_requests_to_http_go_to_the_proxy_whose_connections_are_kept(run: Run) -> None:
    async def main(port: int) -> list[Exchange]:
        wire = wire_to("http://name.invalid:8000/v1", at(port, f"Basic {BASIC}"))  # nobody here can resolve it
        got = [await wire.send(BODY) for _ in range(3)]
        wire.close()
        return got

    with Scripted([(0, ANSWER)]) as server:
        got = run(main(server.port))
    assert [e.ended for e in got] == [COMPLETE] * 3
    assert server.connections == 1
    for seen in server.requests:
        assert seen.path == "http://name.invalid:8000/v1/chat/completions"
        assert seen.headers["host"] == "name.invalid:8000"
        assert seen.headers["proxy-authorization"] == f"Basic {BASIC}"


def test_a_proxy_that_is_not_there_is_named_by_its_own_words() -> None:
    with pytest.raises(TargetError, match=r"the proxy http://p\.invalid:1: the name 'p\.invalid' cannot be resolved"):
        wire_to("http://h/v1", Proxy("p.invalid", 1, ""))

    async def main() -> Exchange:
        wire = wire_to("http://name.invalid/v1", at(unused_port()))
        exchange = await wire.send(BODY)
        wire.close()
        return exchange

    assert asyncio.run(main()).ended == CONNECT_ERROR


def test_httpx_takes_the_same_way_and_says_the_same_to_the_proxy() -> None:
    with Scripted([(0, http_response(200, b"{}"))]) as server:
        target = Target("t", "http://name.invalid:8000/v1", proxy=f"http://user:{SECRET}@127.0.0.1:{server.port}")
        assert targets.reachable(target)
        with httpx.Client(trust_env=False, proxy=targets.httpx_proxy(target)) as client:
            client.post(f"{target.url}/chat/completions", content=b"{}")
    assert [s.path.removeprefix(target.url) for s in server.requests] == ["/models", "/chat/completions"]
    assert all(s.headers["proxy-authorization"] == f"Basic {BASIC}" for s in server.requests)
    assert not targets.reachable(Target("t", "http://h/v1", proxy=f"http://127.0.0.1:{unused_port()}"))


# ---- https: a tunnel


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
    writer.close()


@contextlib.asynccontextmanager
async def scripted_proxy(answer: bytes, to: int = 0, pause_s: float = 0.0) -> AsyncIterator[tuple[int, list[bytes]]]:
    """(its port, the heads that it was asked). Answers CONNECT with `answer` in two writes, then joins both ends."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(answer[:9])
            await asyncio.sleep(pause_s)
            writer.write(answer[9:])
            if to:
                inside, outside = await asyncio.open_connection("127.0.0.1", to)
                await asyncio.gather(copy(reader, outside), copy(inside, writer))
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], heads
    finally:
        server.close()
        await asyncio.sleep(0.05)  # for what was closed to be gone


@pytest.mark.parametrize("run", LOOPS)
def test_https_goes_through_a_tunnel_that_sees_neither_key_nor_request(
    certificate: tuple[Path, Path], run: Run
) -> None:
    key, cert = certificate
    inside: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                inside.append(await reader.readuntil(b"\r\n\r\n{}"))
                writer.write(ANSWER)
        writer.close()

    async def main() -> tuple[list[Exchange], list[bytes], int]:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(cert, key)
        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        said = b"HTTP/1.1 200 Connection established\r\nContent-Length: 0\r\n\r\n"  # the length has no meaning here
        async with scripted_proxy(said, port) as (listens, heads):
            wire = wire_to(f"https://localhost:{port}/v1", at(listens, f"Basic {BASIC}"), cafile=str(cert))
            got = [await wire.send(BODY) for _ in range(2)]
            wire.close()
        server.close()
        return got, heads, port

    got, heads, port = run(main())
    assert [e.ended for e in got] == [COMPLETE, COMPLETE], got[0].error
    assert 0 < got[0].sent_ns <= got[0].first_byte_ns
    assert got[0].connect_ns > 0
    assert got[1].connect_ns == 0  # the tunnel is kept
    assert heads == [
        f"CONNECT localhost:{port} HTTP/1.1\r\nHost: localhost:{port}\r\n"
        f"Proxy-Authorization: Basic {BASIC}\r\n\r\n".encode()
    ]
    assert all(request.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n") for request in inside)
    assert not any(b"Proxy-" in request for request in inside)


@pytest.mark.parametrize("run", LOOPS)
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (
            b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 2\r\n\r\nno",
            "with HTTP 407: it wants a user",
        ),
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "refused CONNECT localhost:1 with HTTP 403"),
        (b"HTTP/1.1 200", "ended without an answer to CONNECT"),
        (b"SSH-2.0-OpenSSH\r\n", "answered CONNECT with what is not HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000, "ended without an answer to CONNECT"),
    ],
)
def test_a_tunnel_that_is_refused_is_a_connect_error_with_the_status(answer: bytes, text: str, run: Run) -> None:
    async def main() -> tuple[Exchange, int]:
        async with scripted_proxy(answer) as (port, _):
            wire = wire_to("https://localhost:1/v1", at(port, f"Basic {BASIC}"))
            exchange = await wire.send(BODY)
            wire.close()
            return exchange, port

    exchange, port = run(main())
    assert exchange.ended == CONNECT_ERROR
    assert exchange.sent_ns == exchange.status == 0
    assert text in exchange.error
    assert f"the proxy http://127.0.0.1:{port}" in exchange.error
    assert BASIC not in exchange.error


@undisturbed
def test_a_proxy_that_never_answers_is_a_connect_timeout() -> None:
    async def main() -> Exchange:
        async with scripted_proxy(b"HTTP/1.1 200 OK\r\n\r\n", pause_s=0.5) as (port, _):
            wire = wire_to("https://localhost:1/v1", at(port), connect_s=0.1)
            exchange = await wire.send(BODY)
            wire.close()
            await asyncio.sleep(0.6)
            return exchange

    exchange = asyncio.run(main())
    assert exchange.ended == CONNECT_TIMEOUT
    assert "not connected to localhost through the proxy http://127.0.0.1" in exchange.error


def test_an_ipv6_target_is_in_brackets_in_a_tunnel() -> None:
    async def main() -> list[bytes]:
        async with scripted_proxy(b"HTTP/1.1 403 Forbidden\r\n\r\n") as (port, heads):
            wire = wire_to("https://[2001:db8::1]:8443/v1", at(port))
            assert (await wire.send(BODY)).ended == CONNECT_ERROR
            wire.close()
            return heads

    assert asyncio.run(main()) == [b"CONNECT [2001:db8::1]:8443 HTTP/1.1\r\nHost: [2001:db8::1]:8443\r\n\r\n"]


# ---- a whole run


def test_a_run_through_a_proxy_goes_there_whole_says_so_and_keeps_the_password_to_itself(tmp_path: Path) -> None:
    trace = trace_file(tmp_path, rows(8))
    with Scripted(llm_server(lambda n, seen: good(seen))) as server:
        table = f'[targets.t]\nproxy = "http://user:{SECRET}@127.0.0.1:{server.port}"\n'
        (tmp_path / "targets.toml").write_text(table)
        ran = bench("http://name.invalid:8000/v1", tmp_path, trace, "--concurrency", "2")
    assert ran.rc == 0, ran.err
    assert sum("x-request-id" in s.headers for s in server.requests) == 8
    assert f"t: probes and load go through the proxy http://127.0.0.1:{server.port}" in ran.err
    assert {s.headers.get("proxy-authorization") for s in server.requests} == {f"Basic {BASIC}"}
    assert all(s.path.startswith("http://name.invalid:8000/") for s in server.requests)
    written = b"".join(path.read_bytes() for path in ran.folder.rglob("*") if path.is_file())
    for text in (written, ran.err.encode(), ran.out.encode()):
        assert SECRET.encode() not in text
        assert BASIC.encode() not in text
    assert f'"proxy": "http://127.0.0.1:{server.port}"'.encode() in written
