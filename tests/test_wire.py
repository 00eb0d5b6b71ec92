import asyncio
import select
import ssl
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from llm_bench.clock import now_ns
from llm_bench.connection import Connection, Pool
from llm_bench.errors import BenchError, TargetError
from llm_bench.exchange import (
    CANCELLED,
    CLOSED,
    COMPLETE,
    CONNECT_ERROR,
    CONNECT_TIMEOUT,
    CUT,
    PROTOCOL_ERROR,
    STALL_TIMEOUT,
    TOTAL_TIMEOUT,
    TRUNCATED,
    TTFT_TIMEOUT,
    Exchange,
    Timeouts,
)
from llm_bench.http1 import ProtocolError, Response, Sse
from llm_bench.wire import Wire, request_head
from tests.certificates import make_certificate
from tests.fixtures import unhurried
from tests.quiet import undisturbed
from tests.scripted import (
    END,
    FINISH,
    SSE_HEAD,
    Script,
    Scripted,
    Seen,
    chat_script,
    chunk,
    comment,
    deaf,
    http_response,
    sse,
    token,
    unused_port,
)

LOOPS = [asyncio.run, uvloop.run]
Run = Callable[[Coroutine[Any, Any, Any]], Any]
NOTICE_S = 0.05  # a limit may be passed by the time it takes to notice, and by no more
BODY = b"Content-Length: 2\r\n\r\n{}"
OK = http_response(200, b"{}")
ROLE = sse({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})


def bears_token(data: bytes) -> bool:
    return b'"content": "' in data and b'"content": ""' not in data


def wire_to(url: str, timeouts: Timeouts | None = None, **more: Any) -> Wire:
    return Wire(url, "/chat/completions", [], timeouts or Timeouts(), bears_token, **more)


def exchange_with(url: str, timeouts: Timeouts | None = None, run: Run = asyncio.run, **more: Any) -> Exchange:
    async def main() -> Exchange:
        wire = wire_to(url, timeouts)
        exchange = await wire.send(BODY, **more)
        wire.close()
        return exchange

    exchange: Exchange = run(main())
    return exchange


# ---- what is sent


def test_the_head_holds_keys_and_the_payload_the_rest() -> None:
    head = request_head("http://host.example:8000/v1/", "/completions", [("Authorization", "Bearer k")])
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: host.example:8000\r\n")
    assert b"Authorization: Bearer k\r\n" in head
    assert b"content-type: application/json\r\n" in head
    assert head.endswith(b"\r\n")
    assert not head.endswith(b"\r\n\r\n")


def test_a_header_of_the_user_replaces_ours_and_a_query_stays_at_the_end() -> None:
    head = request_head("https://h/openai?api-version=1", "/chat", [("content-type", "text/plain")])
    assert head.startswith(b"POST /openai/chat?api-version=1 HTTP/1.1\r\nHost: h\r\n")
    assert head.lower().count(b"content-type") == 1


@pytest.mark.parametrize("header", [("A", "x\r\nB: y"), ("A\n", "x"), ("", "x"), ("A:", "x")])
def test_a_header_that_would_break_the_lines_is_refused(header: tuple[str, str]) -> None:
    with pytest.raises(BenchError, match="header"):
        request_head("http://h", "/", [header])


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://h/", "http://", "http://h:x/"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(BenchError, match="is not the address of a server; expected http://HOST:PORT/v1"):
        wire_to(url)


def test_a_name_that_cannot_be_resolved_is_the_targets_error() -> None:
    with pytest.raises(TargetError, match=r"name.invalid"):
        wire_to("http://name.invalid/v1")


@pytest.mark.parametrize("run", LOOPS)
def test_the_server_reads_what_was_given_whole_and_in_order(run: Run) -> None:
    body = b"x" * 8_000_000  # more than any socket buffer holds: sent is when the last byte has left
    with Scripted([(0, OK)]) as server:

        async def main() -> Exchange:
            wire = Wire(server.url, "/c", [("Authorization", "Bearer k")], Timeouts(), None)
            exchange = await wire.send(b"X-Request-Id: 7\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            wire.close()
            return exchange

        begun = now_ns()
        exchange = run(main())
    seen = server.requests[0]
    assert (seen.method, seen.path, seen.body) == ("POST", "/v1/c", body)
    assert seen.headers["x-request-id"] == "7"
    assert seen.headers["authorization"] == "Bearer k"
    assert seen.headers["host"] == f"127.0.0.1:{server.port}"
    assert begun < exchange.sent_ns <= exchange.first_byte_ns
    assert 0 < exchange.bytes_out - len(body) < 400  # its head


# ---- what is stamped


@pytest.mark.parametrize("run", LOOPS)
@undisturbed
def test_stamps_are_in_order_and_the_first_token_is_not_the_role(run: Run) -> None:
    script: Script = [(0, SSE_HEAD), (20, ROLE), (40, comment()), (80, sse(token("a"))), (120, sse(FINISH) + END)]
    with Scripted(script) as server:
        exchange = exchange_with(server.url, run=run)
    assert (exchange.ended, exchange.status, exchange.error) == (COMPLETE, 200, "")
    assert (b"content-type", b"text/event-stream") in exchange.headers
    assert len(exchange.read_ns) == len(exchange.pieces) == 4
    assert exchange.sent_ns <= exchange.first_byte_ns <= exchange.read_ns[0]
    assert exchange.first_token_ns == exchange.read_ns[2]
    assert exchange.read_ns[2] - exchange.read_ns[0] > 50e6
    assert list(exchange.read_ns) == sorted(exchange.read_ns)
    assert exchange.end_ns >= exchange.read_ns[3]
    assert exchange.bytes_in == sum(len(step[1]) for step in script if not isinstance(step, str))


def test_events_of_one_read_share_its_stamp() -> None:
    with Scripted([(0, SSE_HEAD + sse(token("a"), token("b"), token("c"), FINISH) + END)]) as server:
        exchange = exchange_with(server.url)
    assert len(exchange.pieces) == len(exchange.read_ns) == 1  # a piece a read, however many chunks were in it
    assert exchange.pieces[0].count(b"data: ") == 4


class NoSocket:
    """The transport of a connection that is fed by hand."""

    def write(self, data: bytes) -> None: ...
    def abort(self) -> None: ...
    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False


WHOLE = SSE_HEAD + ROLE + comment() + sse(*map(token, "abcdef"), FINISH, "[DONE]") + END


@unhurried
@given(
    st.sampled_from([WHOLE, WHOLE + b"\r\n", WHOLE + b"more", WHOLE[:-5] + b"zz", OK, b"HTTP/1.0 200 \r\n\r\ntext"]),
    st.lists(st.integers(1, len(WHOLE)), max_size=40),
)
def test_whatever_the_split_a_read_gives_one_piece_and_one_stamp(message: bytes, at: list[int]) -> None:
    edges = [0, *sorted({k for k in at if k < len(message)}), len(message)]
    reads = [message[a:b] for a, b in pairwise(edges)]

    async def main() -> Exchange:
        connection = Connection(Pool(Timeouts(), bears_token, reuse=True))
        connection.transport = cast(asyncio.Transport, NoSocket())
        exchange = Exchange()
        connection.ask(b"", exchange, None)
        for data in reads:
            connection.data_received(data)
        connection.end(CUT, "no more")
        return exchange

    exchange, response, pieces, seen = asyncio.run(main()), Response(), [], 0
    before_the_end: list[bytes] = []
    for data in reads:
        seen += len(data)
        before_the_end = [*pieces]
        try:
            new = response.feed(data)
        except ProtocolError as e:
            new = e.pieces
        pieces += [b"".join(new)] if new else []
        if exchange.bytes_in == seen:
            break
    assert exchange.pieces == pieces
    assert len(exchange.read_ns) == len(pieces)
    assert (exchange.status, exchange.headers) == (response.status, response.headers)
    complete = response.complete and exchange.ended != PROTOCOL_ERROR
    assert exchange.ended == COMPLETE if complete else exchange.ended in (CUT, PROTOCOL_ERROR)
    bears = any(map(bears_token, Sse().feed(b"".join(before_the_end if response.complete else pieces))))
    assert bool(exchange.first_token_ns) == (bears and response.headers[0][1] == b"text/event-stream")


def test_a_step_of_the_wall_clock_moves_no_stamp(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(number: int, seen: Seen) -> Script:
        monkeypatch.setattr("time.time", lambda: 0.0)
        monkeypatch.setattr("time.time_ns", lambda: 0)
        return chat_script(["a", "b", "c"], ttft_ms=50, itl_ms=20)

    with Scripted(answer) as server:
        exchange = exchange_with(server.url)
    assert 45e6 < exchange.read_ns[0] - exchange.sent_ns < 60e9
    gaps = [b - a for a, b in pairwise(exchange.read_ns)]
    assert min(gaps) >= 0


# ---- how it ends


@pytest.mark.parametrize("run", LOOPS)
@pytest.mark.parametrize(
    ("script", "ended", "text"),
    [
        ([(0, b"HTTP/1.1 200 OK\r\n\r\nabc"), "close"], CLOSED, ""),
        ([(0, b"HTTP/1.1 200 OK\r\n\r\nabc"), (20, b""), "reset"], TRUNCATED, "ConnectionResetError"),
        ([(0, SSE_HEAD + sse(token("a"))), "close"], TRUNCATED, "1 token-bearing events"),
        ([(0, SSE_HEAD + sse(token("a"))), (20, b""), "reset"], TRUNCATED, "ConnectionResetError"),
        ([(0, b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"), "close"], TRUNCATED, "closed the connection"),
        (["close"], TRUNCATED, "before a byte of the answer"),
        (["reset"], TRUNCATED, "before a byte of the answer"),
        ([(0, b"SSH-2.0-x\r\n\r\n")], PROTOCOL_ERROR, "HTTP/1.1"),
        ([(0, http_response(500, b"{}"))], COMPLETE, ""),
        ([(0, b"HTTP/1.1 100 Continue\r\n\r\n" + OK)], COMPLETE, ""),
    ],
)
def test_an_end_has_the_name_of_what_the_socket_saw(script: Script, ended: str, text: str, run: Run) -> None:
    with Scripted(script) as server:
        exchange = exchange_with(server.url, run=run)
    assert (exchange.ended, bool(exchange.error)) == (ended, ended not in (COMPLETE, CLOSED))
    assert text in exchange.error
    assert exchange.end_ns >= exchange.sent_ns > 0


def test_a_refused_connect_names_its_class() -> None:
    exchange = exchange_with(f"http://127.0.0.1:{unused_port()}/v1")
    assert exchange.ended == CONNECT_ERROR
    assert exchange.error.startswith("ConnectionRefusedError: ")
    assert (exchange.sent_ns, exchange.status) == (0, 0)
    assert exchange.end_ns > 0


def test_a_name_with_an_address_on_which_nobody_listens_is_reached_by_the_other() -> None:
    with Scripted([(0, OK)]) as server:

        async def main() -> list[Exchange]:
            wire = wire_to(server.url)
            wire._addresses.insert(0, ("127.0.0.1", unused_port()))
            got = [await wire.send(BODY), await wire.send(BODY)]
            assert wire._addresses[0] == ("127.0.0.1", server.port)
            wire.close()
            return got

        assert [e.ended for e in asyncio.run(main())] == [COMPLETE, COMPLETE]


def test_a_mistake_in_our_own_code_is_raised_and_is_no_failure_of_the_target() -> None:
    def broken(data: bytes) -> bool:
        raise KeyError("ours")

    async def main(url: str) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        wire = Wire(url, "/c", [], Timeouts(), broken)
        with pytest.raises(KeyError, match="ours"):
            await wire.send(BODY)
        wire.close()

    with Scripted([(0, SSE_HEAD + sse(token("a"))), "hang"]) as server:  # its end never comes with the token
        asyncio.run(main(server.url))


# ---- limits (case 31)

SLOW_HEAD: Script = ["hang"]
PINGS: Script = [(0, SSE_HEAD + ROLE), *((20 * k, comment()) for k in range(1, 40)), "hang"]
SILENT: Script = [(0, SSE_HEAD + sse(token("a"), token("b"))), "hang"]
LIMITS = Timeouts(connect_s=0.2, ttft_s=0.3, stall_s=0.2, total_s=0.4)


@pytest.mark.parametrize("run", LOOPS)
@pytest.mark.parametrize(
    ("script", "ended", "limit_s", "text"),
    [
        (SLOW_HEAD, TTFT_TIMEOUT, 0.3, "within 0.3 s of sending: no byte of the answer"),
        (PINGS, TTFT_TIMEOUT, 0.3, "0 token-bearing events"),
        (SILENT, STALL_TIMEOUT, 0.2, "2 token-bearing events, "),
        (chat_script(["a"] * 40, 0, 25), TOTAL_TIMEOUT, 0.4, "not ended within 0.4 s"),
    ],
)
@undisturbed
def test_each_limit_has_a_name_a_text_and_is_noticed_at_once(
    script: Script, ended: str, limit_s: float, text: str, run: Run
) -> None:
    with Scripted(script) as server:
        exchange = exchange_with(server.url, LIMITS, run)
    assert exchange.ended == ended
    assert text in exchange.error
    since = exchange.read_ns[-1] if ended == STALL_TIMEOUT else exchange.sent_ns
    assert 0 <= (exchange.end_ns - since) / 1e9 - limit_s < NOTICE_S


@pytest.mark.parametrize("run", LOOPS)
@undisturbed
def test_a_server_that_never_accepts_is_a_connect_timeout(run: Run) -> None:
    with deaf() as url:
        begun = now_ns()
        exchange = exchange_with(url, LIMITS, run)
    assert exchange.ended == CONNECT_TIMEOUT
    assert "within 0.2 s" in exchange.error
    assert 0 <= (exchange.end_ns - begun) / 1e9 - 0.2 < NOTICE_S


@undisturbed
def test_the_last_reads_age_is_in_the_text_of_a_stall() -> None:
    with Scripted(SILENT) as server:
        exchange = exchange_with(server.url, LIMITS)
    age_s = float(exchange.error.rpartition("the last read ")[2].removesuffix(" s ago"))
    assert 0.2 <= age_s < 0.2 + NOTICE_S


@undisturbed
def test_comments_after_the_first_token_hold_the_stall_off_and_no_hidden_limit_ends_a_steady_stream() -> None:
    pings: Script = [(0, SSE_HEAD + sse(token("a"))), *((50 * k, comment()) for k in range(1, 8)), (400, END)]
    with Scripted(pings) as server:
        exchange = exchange_with(server.url, Timeouts(0.5, 0.3, 0.2, None))
    assert exchange.ended == COMPLETE


@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream"])  # Triton's errors come as the latter
@undisturbed
def test_a_body_that_is_no_event_stream_is_held_to_the_first_byte_and_the_total_only(kind: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: " + kind + b"\r\nContent-Length: 4\r\n\r\n"
    with Scripted([(0, head), (50, b" {"), (450, b"} ")]) as server:
        assert exchange_with(server.url, replace(LIMITS, total_s=60.0)).ended == COMPLETE
    with Scripted([(0, head), (50, b"  "), "hang"]) as server:  # blanks are no sign of an answer yet
        assert exchange_with(server.url, LIMITS).ended == TTFT_TIMEOUT


@pytest.mark.parametrize("kind", [b"Content-Type: text/plain\r\n", b""])
@undisturbed
def test_an_event_stream_under_another_type_or_none_has_a_first_token_and_the_limits_of_a_stream(kind: bytes) -> None:
    head = SSE_HEAD.replace(b"Content-Type: text/event-stream\r\n", kind) + chunk(b"\r\n")
    pings: Script = [(0, head), *((20 * k, comment()) for k in range(1, 40)), "hang"]
    with Scripted(pings) as server:
        assert exchange_with(server.url, LIMITS).ended == TTFT_TIMEOUT
    with Scripted([(0, head), (20, ROLE), (50, sse(token("a"))), "hang"]) as server:
        exchange = exchange_with(server.url, LIMITS)
    assert exchange.ended == STALL_TIMEOUT
    assert exchange.first_token_ns == exchange.read_ns[-1] > exchange.read_ns[1]


def test_without_limits_a_slow_answer_is_waited_for() -> None:
    with Scripted([(400, OK)]) as server:
        assert exchange_with(server.url, Timeouts(None, None, None, None)).ended == COMPLETE


@pytest.mark.parametrize("run", LOOPS)
@undisturbed
def test_a_cancel_closes_the_socket_at_its_time_and_the_server_sees_it(run: Run) -> None:
    with Scripted(chat_script(["a"] * 50, 0, 20)) as server:
        exchange = exchange_with(server.url, run=run, cancel_after_s=0.15)
        until = time.monotonic() + 30
        while not server.closed and time.monotonic() < until:
            time.sleep(0.005)
        assert len(server.closed) == 1
        assert abs(server.closed[0][1] - exchange.end_ns) < NOTICE_S * 1e9
    assert exchange.ended == CANCELLED
    assert "as planned" in exchange.error
    assert 0 <= (exchange.end_ns - exchange.sent_ns) / 1e9 - 0.15 < NOTICE_S


@pytest.mark.parametrize("run", LOOPS)
@undisturbed
def test_on_a_kept_connection_each_request_has_its_own_limits_whatever_those_before_it_had(run: Run) -> None:
    """The alarm of a request that was answered is left to ring: it ends no later one, nor lets one live too long."""
    takes_ms = [0, 400, 0, 2000]  # the second outlives the first one's limit, the last does not outlive its own

    def answer(number: int, seen: Seen) -> Script:
        return [(takes_ms[number], http_response(200, b"{}"))]

    async def main(url: str) -> list[Exchange]:
        wire = wire_to(url, Timeouts(total_s=30))
        got = [await wire.send(BODY, cancel_after_s=limit_s) for limit_s in (0.2, None, 20, 0.3)]
        wire.close()
        return got

    with Scripted(answer) as server:
        got = run(main(server.url))
        assert server.connections == 1
    assert [exchange.ended for exchange in got] == [COMPLETE] * 3 + [CANCELLED]
    last_s = (got[-1].end_ns - got[-1].sent_ns) / 1e9
    assert 0.3 <= last_s < 1.5


# ---- the pool


def test_answers_one_after_another_share_a_connection() -> None:
    with Scripted(chat_script(["a"])) as server:

        async def main() -> list[Exchange]:
            wire = wire_to(server.url)
            got = [await wire.send(BODY) for _ in range(5)]
            wire.close()
            return got

        got = asyncio.run(main())
    assert {e.ended for e in got} == {COMPLETE}
    assert (server.connections, len(server.requests)) == (1, 5)
    assert sum(e.reconnects for e in got) == 0


@pytest.mark.parametrize("answer", [http_response(200, b"{}", {"Connection": "close"}), b"HTTP/1.0 200 OK\r\n\r\n{}"])
def test_a_connection_that_the_server_ends_is_not_kept(answer: bytes) -> None:
    with Scripted([(0, answer), "close"]) as server:

        async def main() -> list[Exchange]:
            wire = wire_to(server.url)
            got = [await wire.send(BODY) for _ in range(3)]
            wire.close()
            return got

        got = asyncio.run(main())
    assert {e.ended for e in got} <= {COMPLETE, CLOSED}
    assert server.connections == 3
    assert sum(e.reconnects for e in got) == 0


@pytest.mark.parametrize("run", LOOPS)
@pytest.mark.parametrize("then", ["close", "reset"])
@pytest.mark.parametrize("pause_s", [0.0, 0.02])
def test_a_server_that_promises_keep_alive_and_closes_costs_reconnects_and_no_errors(
    run: Run, then: str, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp closes 0.1 ms after each streamed reply: the next request meets the close before or after its write."""
    monkeypatch.setattr("llm_bench.connection._CROSSING_NS", 10**10)  # however busy this machine is
    with Scripted([*chat_script(["a", "b"]), then]) as server:

        async def user(wire: Wire) -> list[Exchange]:
            got = []
            for _ in range(20):
                got.append(await wire.send(BODY))
                await asyncio.sleep(pause_s)
            return got

        async def main() -> list[Exchange]:
            wire = wire_to(server.url)
            got = [e for each in await asyncio.gather(*(user(wire) for _ in range(4))) for e in each]
            wire.close()
            return got

        got = run(main())
    failed = [e.error for e in got if e.ended != COMPLETE]
    assert failed == []
    assert server.connections >= 80
    assert 70 <= sum(e.reconnects for e in got) <= server.connections


def test_a_fresh_connection_that_closes_without_an_answer_is_the_servers_failure_and_is_not_sent_again() -> None:
    with Scripted(lambda number, seen: [(0, OK)] if number == 0 else ["close"]) as server:

        async def main() -> list[Exchange]:
            wire = wire_to(server.url)
            got = [await wire.send(BODY), await wire.send(BODY)]
            wire.close()
            return got

        first, second = asyncio.run(main())
    assert first.ended == COMPLETE
    assert (second.ended, second.reconnects) == (TRUNCATED, 1)  # once more, and no third time
    assert len(server.requests) == 3


def one_after_another(
    url: str, count: int, run: Run, pause: Callable[[Wire], object] = lambda wire: None
) -> list[Exchange]:
    async def main() -> list[Exchange]:
        wire, got = wire_to(url), []
        for _ in range(count):
            got.append(await wire.send(BODY))
            pause(wire)
        wire.close()
        return got

    exchanges: list[Exchange] = run(main())
    return exchanges


@pytest.mark.parametrize("run", LOOPS)
@pytest.mark.parametrize("then", ["close", "reset"])
def test_a_server_that_read_the_request_worked_and_dropped_it_has_failed_it_on_a_kept_connection_too(
    run: Run, then: str
) -> None:
    with Scripted(lambda number, seen: [(400, b""), then] if number == 1 else [(0, OK)]) as server:
        got = one_after_another(server.url, 3, run)
    assert [e.ended for e in got] == [COMPLETE, TRUNCATED, COMPLETE]
    assert [e.reconnects for e in got] == [0, 0, 0]
    assert len(server.requests) == 3  # none was sent again
    assert "before a byte of the answer" in got[1].error
    said_ms = float(got[1].error.partition(" ms after it was sent")[0].rpartition(" ")[2])
    assert said_ms == pytest.approx((got[1].end_ns - got[1].sent_ns) / 1e6, abs=20)


@pytest.mark.parametrize("run", LOOPS)
def test_a_request_that_crossed_the_close_is_sent_again_and_its_latency_runs_from_the_first_sending(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llm_bench.connection._CROSSING_NS", 10**10)  # however busy this machine is
    with Scripted(lambda number, seen: [(50, b""), "close"] if number == 1 else [(0, OK)]) as server:
        _, again = one_after_another(server.url, 2, run)
    assert (again.ended, again.reconnects, server.connections, len(server.requests)) == (COMPLETE, 1, 2, 3)
    assert again.sent_ns <= server.requests[1].at_ns
    assert again.end_ns - again.sent_ns > 50e6
    assert again.connect_ns == 0  # the new connection came after it was sent: it is in the latency


@pytest.mark.parametrize("run", LOOPS)
@undisturbed
def test_the_limits_and_the_cancel_of_a_request_sent_again_run_from_the_first_sending(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llm_bench.connection._CROSSING_NS", 10**10)

    def answer(number: int, seen: Seen) -> Script:
        return [(0, OK)] if number == 0 else [(200, b""), "close"] if number == 1 else ["hang"]

    with Scripted(answer) as server:

        async def main() -> Exchange:
            wire = wire_to(server.url)
            await wire.send(BODY)
            got = await wire.send(BODY, 0.3)
            wire.close()
            return got

        exchange: Exchange = run(main())
    assert (exchange.ended, exchange.reconnects) == (CANCELLED, 1)
    assert exchange.sent_ns <= server.requests[1].at_ns
    assert 0 <= (exchange.end_ns - exchange.sent_ns) / 1e9 - 0.3 < NOTICE_S


def until_it_is_closed(wire: Wire) -> None:
    """The loop sees nothing meanwhile."""
    (resting,) = wire.idle
    assert select.select([resting.transport.get_extra_info("socket").fileno()], [], [], 30)[0]


@pytest.mark.parametrize("run", LOOPS)
@pytest.mark.parametrize("then", ["close", "reset"])
def test_a_close_that_has_come_unnoticed_costs_a_new_connection_and_nothing_is_sent_on_the_old_one(
    run: Run, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llm_bench.connection._CROSSING_NS", -(10**18))  # so that nothing would be sent a second time
    with Scripted([(0, OK), then]) as server:
        got = one_after_another(server.url, 4, run, until_it_is_closed)
    assert [e.error for e in got] == [""] * 4
    assert [e.reconnects for e in got] == [0, 1, 1, 1]
    assert (server.connections, len(server.requests)) == (4, 4)
    assert all(e.connect_ns > 0 for e in got)


@undisturbed
def test_waiting_for_a_connection_is_told_apart_and_is_nothing_on_a_kept_one() -> None:
    with Scripted([(0, OK)]) as server:
        begun = now_ns()
        first, second = one_after_another(server.url, 2, asyncio.run)
    assert 0 < first.connect_ns <= first.sent_ns - begun
    assert second.connect_ns == 0
    with deaf() as url:
        exchange = exchange_with(url, LIMITS)
    assert exchange.connect_ns == pytest.approx(0.2e9, abs=NOTICE_S * 1e9)


def test_bytes_that_nobody_asked_for_cost_the_connection_and_no_answer() -> None:
    with Scripted([(0, OK), (30, OK)]) as server:

        async def main() -> list[Exchange]:
            wire = wire_to(server.url)
            first = await wire.send(BODY)
            async with asyncio.timeout(30):
                while wire.idle:
                    await asyncio.sleep(0.005)
            second = await wire.send(BODY)
            wire.close()
            return [first, second]

        assert [e.ended for e in asyncio.run(main())] == [COMPLETE, COMPLETE]
    assert server.connections == 2


@pytest.mark.parametrize("run", LOOPS)
@undisturbed
def test_256_requests_in_flight_have_256_connections(run: Run) -> None:
    with Scripted([(2000, OK)]) as server:

        async def main() -> list[Exchange]:
            wire = wire_to(server.url)
            got = await asyncio.gather(*(wire.send(BODY) for _ in range(256)))
            wire.close()
            return list(got)

        got = run(main())
    assert {e.ended for e in got} == {COMPLETE}
    assert (server.peak, server.connections) == (256, 256)


# ---- the end of a run


@pytest.mark.parametrize("run", LOOPS)
@pytest.mark.parametrize("script", [["hang"], [(0, SSE_HEAD + sse(token("a"))), "hang"]])
@undisturbed
def test_a_cancelled_task_gets_what_was_seen_so_far_as_cut(script: Script, run: Run) -> None:
    with Scripted(script) as server:

        async def main() -> Exchange:
            wire = wire_to(server.url)
            task = asyncio.create_task(wire.send(BODY))
            await asyncio.sleep(0.1)
            task.cancel()
            exchange = await task
            assert not wire.pool.busy
            wire.close()
            return exchange

        exchange = run(main())
    assert exchange.ended == CUT
    assert len(exchange.pieces) == len(script) - 1
    assert exchange.error


def test_a_task_cancelled_while_it_connects_is_cut_and_was_never_sent() -> None:
    async def main(url: str) -> Exchange:
        task = asyncio.create_task(wire_to(url).send(BODY))
        await asyncio.sleep(0.05)
        task.cancel()
        return await task

    with deaf() as url:
        exchange = asyncio.run(main(url))
    assert (exchange.ended, exchange.sent_ns) == (CUT, 0)


def test_close_cuts_what_is_in_flight() -> None:
    with Scripted(["hang"]) as server:

        async def main() -> Exchange:
            wire = wire_to(server.url)
            task = asyncio.create_task(wire.send(BODY))
            async with asyncio.timeout(30):
                while not server.requests:
                    await asyncio.sleep(0.005)
            wire.close()
            return await task

        assert asyncio.run(main()).ended == CUT


# ---- https


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.mark.parametrize("run", LOOPS)
def test_https_is_checked_by_name_and_carries_a_stream(certificate: tuple[Path, Path], run: Run) -> None:
    key, cert = certificate

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(SSE_HEAD + sse(token("a"), FINISH) + END)
        await reader.read()
        writer.close()

    async def main() -> tuple[Exchange, Exchange, Exchange]:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # the refused handshake
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(cert, key)
        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        url = f"https://localhost:{server.sockets[0].getsockname()[1]}/v1"
        wires = wire_to(url, cafile=str(cert)), wire_to(url), wire_to(url, insecure=True)
        trusting, wary, credulous = wires
        got = await trusting.send(BODY), await wary.send(BODY), await credulous.send(BODY)
        for wire in wires:
            wire.close()
        await asyncio.sleep(0.05)
        server.close()
        return got

    trusted, refused, believed = run(main())
    assert believed.ended == COMPLETE, believed.error
    assert trusted.ended == COMPLETE, trusted.error
    assert 0 < trusted.sent_ns <= trusted.first_byte_ns
    assert trusted.connect_ns > 0
    assert refused.ended == CONNECT_ERROR
    assert "certificate" in refused.error.lower()


def test_a_connection_a_request_where_none_is_to_be_reused() -> None:
    with Scripted([(0, SSE_HEAD + sse(token("a"), FINISH) + END)]) as server:

        async def main() -> list[Exchange]:
            wire = wire_to(server.url, reuse=False)
            got = [await wire.send(BODY) for _ in range(4)]
            wire.close()
            return got

        got = asyncio.run(main())
    assert [e.ended for e in got] == [COMPLETE] * 4
    assert server.connections == 4
    assert all(s.headers["connection"] == "close" for s in server.requests)
    assert not any(e.reconnects for e in got)


def test_a_file_without_certificates_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    with pytest.raises(BenchError, match=r"empty.pem"):
        wire_to("https://localhost/v1", cafile=str(empty))


# ---- what servers of the field do besides


@pytest.mark.parametrize("run", LOOPS)
def test_an_ipv6_address_in_a_url_is_reached(run: Run) -> None:
    async def main() -> tuple[Exchange, bytes, int]:
        heads: list[bytes] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heads.append(await reader.readuntil(b"\r\n\r\n{}"))
            writer.write(SSE_HEAD + sse(token("a"), FINISH) + END)
            await reader.read()
            writer.close()

        try:
            server = await asyncio.start_server(answer, "::1", 0)
        except OSError as e:
            pytest.skip(f"this machine has no IPv6: {e}")
        port = server.sockets[0].getsockname()[1]
        wire = wire_to(f"http://[::1]:{port}/v1")
        exchange = await wire.send(BODY)
        wire.close()
        await asyncio.sleep(0.05)
        server.close()
        return exchange, heads[0], port

    exchange, head, port = run(main())
    assert exchange.ended == COMPLETE, exchange.error
    assert f"\r\nHost: [::1]:{port}\r\n".encode() in head


@pytest.mark.parametrize("run", LOOPS)
def test_a_large_prompt_that_its_server_does_not_read_stalls_no_other_stream(run: Run) -> None:
    large = b"x" * (16 << 20)  # more than the buffers of both sides hold
    payload = b"Content-Length: %d\r\n\r\n%b" % (len(large), large)

    async def main() -> tuple[Exchange, Exchange]:
        other_is_done = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            if b"Content-Length: 2\r\n" not in head:
                await other_is_done.wait()
                await reader.readexactly(len(large))
            writer.write(SSE_HEAD)
            for text in "abcde":  # a read each
                writer.write(sse(token(text)))
                await asyncio.sleep(0.01)
            writer.write(sse(FINISH) + END)
            await reader.read()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=1 << 16)
        wire = wire_to(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        slow = asyncio.create_task(wire.send(payload))
        await asyncio.sleep(0.05)  # it has filled what can be filled
        quick = await wire.send(BODY)
        other_is_done.set()
        got = await slow, quick
        wire.close()
        await asyncio.sleep(0.05)
        server.close()
        return got

    slow, quick = run(main())
    assert (slow.ended, quick.ended) == (COMPLETE, COMPLETE), (slow.error, quick.error)
    assert len(quick.pieces) > 1
    assert slow.sent_ns > quick.end_ns  # its last byte left after the other had its whole answer
    assert slow.first_byte_ns > slow.sent_ns


def test_trailers_and_a_redirect_are_no_failure_of_the_connection_and_are_not_followed() -> None:
    trailed = SSE_HEAD + sse(token("a"), FINISH) + b"0\r\nX-Took-Ms: 12\r\nX-Late: yes\r\n\r\n"
    moved = http_response(307, b"", {"Location": "http://127.0.0.1:1/elsewhere"})

    async def main(url: str) -> list[Exchange]:
        wire = wire_to(url)
        got = [await wire.send(BODY) for _ in range(3)]
        wire.close()
        return got

    with Scripted(lambda number, seen: [(0, moved if number == 1 else trailed)]) as server:
        first, redirect, last = asyncio.run(main(server.url))
    assert [e.ended for e in (first, redirect, last)] == [COMPLETE] * 3
    assert [e.status for e in (first, redirect, last)] == [200, 307, 200]
    assert b"".join(first.pieces) == b"".join(last.pieces)
    assert first.pieces[-1].endswith(b"\n\n")  # the trailer is no part of the body
    assert not any(name.startswith(b"x-") for name, _ in first.headers)
    assert (server.connections, len(server.requests)) == (1, 3)
