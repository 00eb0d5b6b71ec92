"""GrpcWire against a scripted gRPC server: stamps, limits, how calls end, connections."""

import asyncio
import contextlib
import socket
import threading
import time

import pytest

from llm_bench import answer, grpc_wire
from llm_bench.bodies import Ask
from llm_bench.clock import run
from llm_bench.dialect_kserve_grpc import ROWS
from llm_bench.errors import BenchError
from llm_bench.exchange import Exchange, Timeouts
from llm_bench.grpc_frames import GRPC_STATUS, Status, read_frames
from llm_bench.grpc_wire import GrpcWire
from llm_bench.kserve_messages import tensor, with_id
from llm_bench.request import Request
from tests.certificates import make_certificate
from tests.scripted import deaf, unused_port

grpc = pytest.importorskip("grpc", reason="grpcio, the extra `grpc`, is not installed")
from tests.scripted_grpc import FINAL_MESSAGE, ScriptedGrpc, error, response, text  # noqa: E402

ROW = ROWS["kserve-grpc"]
REQUEST = with_id("r-0", ROW.encode(Request(tokens_in=3, tokens_out=2, prompt="one two three"), Ask("llm")))
GOOD = [(20, text("a")), (60, text(" b", "length")), (60, FINAL_MESSAGE)]


def ask(url, *, timeouts=Timeouts(), cancel_after_s=None, row=ROW, stream=True, **more):  # noqa: B008
    """One request's Exchange."""

    async def main():
        wire = GrpcWire(url, row.path, [], timeouts, row.is_token if stream else None, **more)
        try:
            return await wire.send(REQUEST, cancel_after_s)
        finally:
            wire.close()

    return run(main())


def read(exchange, row=ROW, stream=True):
    assert exchange.ended
    return answer.read(exchange, row, streamed=stream, asked_out=2, pinned=False)


def outcome(exchange):
    got = read(exchange)
    return got.outcome, got.error_kind, exchange.status


def test_a_good_stream_is_stamped_message_by_message():
    with ScriptedGrpc(GOOD) as server:
        exchange = ask(server.url)
    got = read(exchange)
    assert (got.outcome, got.labels, got.text, got.finish_reason) == ("ok", [], "a b", "length")
    assert (got.tokens_in, got.tokens_out, got.tokens_out_from) == (3, 2, "usage")
    first, second = ((ns - exchange.sent_ns) / 1e6 for ns in got.event_ns)
    assert first >= 20
    assert second >= 60
    assert exchange.first_byte_ns == exchange.first_token_ns == got.event_ns[0]
    assert exchange.end_ns == exchange.read_ns[2]  # the final message, not the status after it
    assert exchange.bytes_in == sum(map(len, exchange.pieces))
    assert exchange.bytes_out == len(REQUEST) + 5
    assert exchange.connect_ns > 0
    assert server.calls[0].request == REQUEST
    assert server.calls[0].method == "/inference.GRPCInferenceService/ModelStreamInfer"


def test_the_kept_bytes_can_be_read_again():
    with ScriptedGrpc(GOOD) as server:
        exchange = ask(server.url)
    messages, status = read_frames(b"".join(exchange.pieces))
    assert messages == [message for _, message in GOOD]
    assert status == Status(0, "")


def test_one_pass():
    row = ROWS["kserve-grpc-infer"]
    with ScriptedGrpc([(5, response([tensor("OUT", "FP32", [1, 2], [0.5, 2.0])]))]) as server:
        exchange = ask(server.url, row=row, stream=False)
    got = read(exchange, row, stream=False)
    assert (got.outcome, got.event_ns, got.tokens_out_from) == ("ok", [], "")
    assert exchange.first_token_ns == 0
    assert server.calls[0].method.endswith("/ModelInfer")


OUTCOMES = {8: "rejected", 14: "rejected", 3: "http_4xx", 5: "http_4xx", 16: "http_4xx", 1: "http_4xx"}


@pytest.mark.parametrize("code", [code for code in GRPC_STATUS if code])
def test_a_status_before_any_message(code):
    with ScriptedGrpc([(0, Status(code, "it says no"))]) as server:
        exchange = ask(server.url)
    status = GRPC_STATUS[code][1]
    assert outcome(exchange) == ("failed", OUTCOMES.get(code, f"http_{status // 100}xx"), status)
    assert read(exchange).error == f"it says no (code {GRPC_STATUS[code][0]})"


@pytest.mark.parametrize("end", [(20, error("injected")), (20, Status(13, "injected")), (20, Status(1, "injected"))])
def test_an_error_inside_a_stream(end):
    with ScriptedGrpc([(0, text("a")), end]) as server:
        exchange = ask(server.url)
    assert outcome(exchange) == ("failed", "server_error_in_stream", 200)
    assert read(exchange).error.startswith("injected")
    assert len(read(exchange).event_ns) == 1


def test_a_message_that_is_none():
    with ScriptedGrpc([(0, b"\xff\xff")]) as server:
        assert outcome(ask(server.url)) == ("failed", "protocol_error", 200)


def test_an_answer_without_a_message():
    with ScriptedGrpc([]) as server:
        assert outcome(ask(server.url)) == ("failed", "empty_output", 200)


@contextlib.contextmanager
def relay(port, after_bytes):
    """The port of a relay to `port` that is gone after so many bytes of the answer."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(to, source, left):
        with contextlib.suppress(OSError):
            while left > 0 and (data := source.recv(4096)):
                to.sendall(data[:left])
                left -= len(data)
        for end in (to, source):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve():
        client, _ = listener.accept()
        with client, socket.create_connection(("127.0.0.1", port)) as server:
            there = threading.Thread(target=pump, args=(server, client, 1 << 30))
            there.start()
            pump(client, server, after_bytes)
            there.join()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        thread.join()
        listener.close()


def test_a_connection_that_is_cut():
    script = [(0, text("a")), (50, text("b" * 3000)), (2000, FINAL_MESSAGE)]
    with ScriptedGrpc(script) as server, relay(server.port, 1500) as port:
        exchange = ask(f"http://127.0.0.1:{port}")
    assert outcome(exchange) == ("failed", "truncated_stream", 200)
    assert "UNAVAILABLE" in exchange.error
    assert "1 token-bearing messages" in exchange.error


def test_a_connection_that_is_cut_before_a_message():
    with ScriptedGrpc([(2000, text("a"))]) as server, relay(server.port, 20) as port:
        exchange = ask(f"http://127.0.0.1:{port}")
    assert read(exchange).outcome == "failed"
    assert read(exchange).error_kind in ("truncated_stream", "connect_error")
    assert exchange.status == 0


def test_nobody_listens():
    exchange = ask(f"http://127.0.0.1:{unused_port()}")
    assert outcome(exchange) == ("failed", "connect_error", 0)
    assert "refused" in exchange.error
    assert exchange.sent_ns == exchange.bytes_out == 0


def test_a_server_that_comes_later_is_found():
    async def main():
        wire = GrpcWire(f"http://127.0.0.1:{port}", ROW.path, [], Timeouts(), ROW.is_token)
        refused = await wire.send(REQUEST)
        with ScriptedGrpc(GOOD, port=port):
            deadline_s = time.monotonic() + 5
            while (exchange := await wire.send(REQUEST)).ended == "connect_error" and time.monotonic() < deadline_s:
                await asyncio.sleep(0.02)
        wire.close()
        return refused, exchange

    port = unused_port()
    refused, exchange = run(main())
    assert refused.ended == "connect_error"
    assert read(exchange).outcome == "ok"


def test_a_server_that_accepts_nothing():
    with deaf() as url:
        exchange = ask(url.removesuffix("/v1"), timeouts=Timeouts(connect_s=0.1))
    assert outcome(exchange) == ("failed", "connect_timeout", 0)
    assert exchange.sent_ns == 0


def test_a_server_that_accepts_and_says_nothing_has_the_whole_time_out_of_a_connect():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        exchange = ask(f"http://127.0.0.1:{silent.getsockname()[1]}", timeouts=Timeouts(connect_s=0.5))
    assert (exchange.ended, exchange.sent_ns) == ("connect_timeout", 0)
    assert exchange.connect_ns > 400e6  # and not 100 ms, as grpcio would have it


LIMITS = {
    "ttft_timeout": (Timeouts(ttft_s=0.08), [(0, FINAL_MESSAGE.replace(b"\x08\x01", b"\x08\x00")), (900, text("a"))]),
    "stall_timeout": (Timeouts(stall_s=0.08), [(0, text("a")), (900, text("b"))]),
    "total_timeout": (Timeouts(total_s=0.1), [(40 * k, text("a")) for k in range(20)]),
}


@pytest.mark.parametrize("kind", LIMITS)
def test_limits(kind):
    timeouts, script = LIMITS[kind]
    with ScriptedGrpc(script) as server:
        exchange = ask(server.url, timeouts=timeouts)
        assert server.cancelled.wait(2)  # the server is told
    assert outcome(exchange) == ("failed", kind, 200)
    assert 0.07 < (exchange.end_ns - exchange.sent_ns) / 1e9 < 0.8


def test_an_answer_that_is_not_streamed_has_the_total_limit_only():
    timeouts = Timeouts(ttft_s=0.02, stall_s=0.02)
    with ScriptedGrpc([(100, response())]) as server:
        exchange = ask(server.url, timeouts=timeouts, row=ROWS["kserve-grpc-infer"], stream=False)
    assert exchange.ended == "complete"


def test_a_planned_cancel_reaches_the_server():
    with ScriptedGrpc([(0, text("a")), (900, text("b"))]) as server:
        exchange = ask(server.url, cancel_after_s=0.1)
        assert server.cancelled.wait(2)
    assert read(exchange).outcome == "cancelled"
    assert len(read(exchange).event_ns) == 1
    assert 0.1 <= (exchange.end_ns - exchange.sent_ns) / 1e9 < 0.8


def test_no_limit_rings_early_whatever_part_of_a_millisecond_it_ends_in():
    with ScriptedGrpc([(0, text("a")), (30_000, text("b"))]) as server:
        for after_s in (0.0201, 0.0204, 0.0207, 0.0209, 0.0212, 0.0213, 0.0215, 0.0218):
            exchange = ask(server.url, cancel_after_s=after_s)
            assert read(exchange).outcome == "cancelled"
            assert exchange.end_ns - exchange.sent_ns >= after_s * 1e9


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_what_is_in_flight_is_cut(how):
    async def main(server):
        wire = GrpcWire(server.url, ROW.path, [], Timeouts(), ROW.is_token)
        task = asyncio.create_task(wire.send(REQUEST))
        async with asyncio.timeout(30):
            while not server.calls:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        if how == "cancel":
            task.cancel()
        else:
            wire.close()
        exchange = await task
        wire.close()
        return exchange

    with ScriptedGrpc([(0, text("a")), (900, text("b"))]) as server:
        exchange = run(main(server))
        assert server.cancelled.wait(2)
    assert read(exchange).outcome == "cut_at_end"
    assert exchange.error == "closed by the client: the run ended"


def test_the_final_message_ends_an_answer_whose_status_does_not_come(monkeypatch):
    monkeypatch.setattr(grpc_wire, "FINAL_S", 0.05)
    with ScriptedGrpc([*GOOD, (900, text("late"))]) as server:
        exchange = ask(server.url)
    assert outcome(exchange) == ("ok", "", 200)
    assert exchange.end_ns == exchange.read_ns[2]


async def gathered(wire: GrpcWire, count: int) -> list[Exchange]:
    return list(await asyncio.gather(*(wire.send(REQUEST) for _ in range(count))))


@pytest.mark.parametrize(("reuse", "connections"), [(True, 2), (False, 4)])
def test_connections(monkeypatch, reuse, connections):
    monkeypatch.setattr(grpc_wire, "STREAMS_A_CHANNEL", 3)

    async def main(server):
        wire = GrpcWire(server.url, ROW.path, [], Timeouts(), ROW.is_token, reuse=reuse)
        exchanges = await gathered(wire, 4)
        if reuse:
            exchanges += await gathered(wire, 4)
        wire.close()
        return exchanges

    with ScriptedGrpc(GOOD) as server:
        exchanges = run(main(server))
    assert {read(exchange).outcome for exchange in exchanges} == {"ok"}
    assert len({seen.peer for seen in server.calls}) == connections
    waited = sum(exchange.connect_ns > 0 for exchange in exchanges)
    assert connections <= waited <= 4  # of the first four: a channel may be there before the next one asks


def test_headers_go_as_metadata_and_no_proxy_of_the_environment_is_used(monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{unused_port()}")

    async def main(url):
        wire = GrpcWire(url, ROW.path, [("Authorization", "Bearer k")], Timeouts(), ROW.is_token)
        exchange = await wire.send(REQUEST)
        wire.close()
        return exchange

    with ScriptedGrpc(GOOD) as server:
        assert read(run(main(server.url))).outcome == "ok"
    seen = server.calls[0].metadata
    assert seen["authorization"] == "Bearer k"
    assert seen["user-agent"].startswith("llm-bench")


def test_tls(tmp_path):
    key, cert = make_certificate(tmp_path)
    identity = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    with ScriptedGrpc(GOOD, identity) as server:
        assert read(ask(server.url, cafile=str(cert))).outcome == "ok"
        untrusted = ask(server.url)
        plain = ask(server.url.replace("https", "http"))
    assert outcome(untrusted) == ("failed", "connect_error", 0)
    assert "CERTIFICATE_VERIFY_FAILED" in untrusted.error
    assert outcome(plain) == ("failed", "connect_error", 0)


def test_tls_with_a_certificate_of_the_clients(tmp_path):
    key, cert = make_certificate(tmp_path)
    pair = [(key.read_bytes(), cert.read_bytes())]
    identity = grpc.ssl_server_credentials(pair, cert.read_bytes(), require_client_auth=True)
    with ScriptedGrpc(GOOD, identity) as server:
        ours = {"cafile": str(cert), "certificate": str(cert), "key": str(key)}
        assert read(ask(server.url, **ours)).outcome == "ok"
        assert read(ask(server.url, cafile=str(cert))).outcome == "failed"


def test_a_file_that_is_none():
    with pytest.raises(BenchError, match=r"none\.pem: cannot be read: No such file"):
        ask("https://localhost:1", cafile="none.pem")


def test_a_url_with_a_path():
    with pytest.raises(BenchError, match="no path; expected http://h:1"):
        ask("http://h:1/v1")


def test_without_grpcio(monkeypatch):
    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(grpc_wire, "import_module", absent)
    with pytest.raises(BenchError, match=r"llm-bench\[grpc\]"):
        ask("http://127.0.0.1:1")
