"""Who may wait, for how long, and where a request's time went: refusals, drain, fair shares, timings, the log."""

import asyncio
import json
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from reference_engine.admission import LONGEST_RETRY_S, Rate, is_full, retry_after_s
from reference_engine.answer import Answer
from reference_engine.config import EngineConfig
from reference_engine.policies import Shares
from tests.stub_runner import Drive
from tests.test_engine_server import (
    CHAT,
    COMPLETIONS,
    Reply,
    Served,
    call,
    end,
    launch,
    leave,
    metric,
    request_bytes,
    serving,
    start,
    text_of,
    until,
)

PARTS = ["http_in", "queue", "prefill", "decode", "preempted", "recompute", "http_out"]


class Later:
    """The real clock, some seconds ahead."""

    def __init__(self) -> None:
        self.ahead_s = 0

    def now_ns(self) -> int:
        return time.monotonic_ns() + self.ahead_s * 1_000_000_000


def submitted(served: Served) -> int:
    return served.engine.queued + served.engine.scheduler.line.left


# When to come back


def test_the_rate_is_of_busy_time_and_forgets() -> None:
    rate = Rate()
    assert rate.per_s() is None
    for _ in range(100):
        rate.observe(50, 0.1)
    assert rate.per_s() == pytest.approx(500)
    for _ in range(1000):
        rate.observe(10, 0.1)
    assert rate.per_s() == pytest.approx(100, rel=1e-3)


def test_retry_after_is_the_queues_tokens_over_the_rate() -> None:
    assert [retry_after_s(tokens, 100.0) for tokens in (0, 1, 100, 101, 950)] == [1, 1, 1, 2, 10]
    assert retry_after_s(10**9, 1.0) == LONGEST_RETRY_S
    assert retry_after_s(500, None) == 1


def test_a_queue_is_full_beyond_its_length_and_the_free_seats() -> None:
    assert not is_full(10**6, 0, 0)  # no limit
    assert [is_full(queued, 0, 2) for queued in (0, 1, 2, 3)] == [False, False, True, True]
    assert [is_full(queued, 3, 2) for queued in (4, 5)] == [False, True]


# The queue over HTTP


def test_a_full_queue_is_429_with_retry_after_and_those_in_it_are_served() -> None:
    async def main() -> None:
        gate = threading.Semaphore(0)
        config = EngineConfig(max_num_seqs=1, max_queue=2)
        async with serving(config, gate.acquire) as served:
            calls = []
            for i in range(3):  # one runs, two wait
                calls.append(asyncio.create_task(call(served.port, COMPLETIONS, {"prompt": [i + 1], "max_tokens": 5})))
                await until(lambda i=i: served.server.open == i + 1)
                if not i:
                    await until(lambda: served.engine.scheduler.running)
            await until(lambda: submitted(served) == 3)
            for stream in (False, True):
                reply = await call(served.port, COMPLETIONS, {"prompt": [9], "stream": stream})
                assert (reply.status, reply.json["error"]["code"]) == (429, 429)
                assert reply.json["error"]["type"] == "RateLimitError"
                assert int(reply.headers["retry-after"]) >= 1
                assert reply.headers["content-type"] == "application/json"
            gate.release(1000)
            for i, reply in enumerate(await asyncio.gather(*calls)):
                assert reply.json["choices"][0]["text"] == text_of([i + 1], 5)
            assert await metric(served.port, "reference_engine:refused_total", reason="queue_full") == 2
            assert (await call(served.port, COMPLETIONS, {"prompt": [9]})).status == 200
            assert [line["outcome"] for line in served.log] == ["queue_full"] * 2 + ["length"] * 4

    asyncio.run(main())


def test_a_burst_at_an_idle_server_takes_the_seats_and_the_queue() -> None:
    async def main() -> None:
        gate = threading.Semaphore(0)
        async with serving(EngineConfig(max_num_seqs=4, max_queue=3), gate.acquire) as served:
            body = {"prompt": [1], "max_tokens": 2}
            calls = [asyncio.create_task(call(served.port, COMPLETIONS, body)) for _ in range(12)]
            await until(lambda: sum(c.done() for c in calls) == 5)
            gate.release(1000)
            assert sorted(r.status for r in await asyncio.gather(*calls)) == [200] * 7 + [429] * 5

    asyncio.run(main())


def test_who_leaves_the_queue_makes_place() -> None:
    async def main() -> None:
        gate = threading.Semaphore(0)
        async with serving(EngineConfig(max_num_seqs=1, max_queue=1), gate.acquire) as served:
            first = asyncio.create_task(call(served.port, COMPLETIONS, {"prompt": [1], "max_tokens": 9}))
            await until(lambda: served.engine.scheduler.running)
            _, writer = await start(served.port, [2])
            await until(lambda: submitted(served) == 2)
            assert (await call(served.port, COMPLETIONS, {"prompt": [3]})).status == 429
            leave(writer, "fin")
            await until(lambda: served.server.open == 1)
            gate.release(2)  # between two steps the scheduler hears of it
            await until(lambda: served.engine.scheduler.line.left == 2)
            third = asyncio.create_task(call(served.port, COMPLETIONS, {"prompt": [3], "max_tokens": 2}))
            await until(lambda: submitted(served) == 3)
            gate.release(1000)
            assert [(await c).status for c in (first, third)] == [200, 200]

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_who_waits_too_long_gets_503_with_retry_after(stream: bool) -> None:
    async def main() -> None:
        gate, clock = threading.Semaphore(0), Later()
        config = EngineConfig(max_num_seqs=1, queue_timeout=5)
        async with serving(config, gate.acquire, now_ns=clock.now_ns) as served:
            body = {"max_tokens": 9, "stream": stream}
            first = asyncio.create_task(call(served.port, COMPLETIONS, {"prompt": [1], **body}))
            await until(lambda: served.engine.scheduler.running)
            late = asyncio.create_task(call(served.port, COMPLETIONS, {"prompt": [2], **body}))
            await until(lambda: submitted(served) == 2)
            clock.ahead_s = 6
            gate.release(1000)
            reply = await late
            assert (reply.status, reply.json["error"]["code"]) == (503, 503)
            assert int(reply.headers["retry-after"]) >= 1
            assert "5 s in the queue" in reply.json["error"]["message"]
            reply = await first  # it had begun
            assert reply.status == 200
            if stream:
                assert "".join(e["choices"][0]["text"] for e in reply.events[:-1]) == text_of([1], 9)
            assert await metric(served.port, "vllm:request_success_total", finished_reason="timeout") == 1
            late_line = next(line for line in served.log if line["outcome"] == "timeout")
            assert late_line["parts_ns"]["queue"] >= 5e9
            assert sum(late_line["parts_ns"].values()) == late_line["total_ns"]

    asyncio.run(main())


# Drain


def test_a_draining_server_ends_what_it_has_and_takes_nothing() -> None:
    async def main() -> None:
        gate = threading.Semaphore(0)
        async with serving(EngineConfig(drain_timeout=7), gate.acquire) as served:
            assert (await call(served.port, "/ready")).status == 200
            body = {"prompt": [1], "max_tokens": 5, "stream": True}
            open_one = asyncio.create_task(call(served.port, COMPLETIONS, body))
            await until(lambda: served.engine.scheduler.running)
            served.server.drain()
            for path, asked in (("/ready", None), (COMPLETIONS, body), (CHAT, body)):
                reply = await call(served.port, path, asked)
                assert (reply.status, 1 <= int(reply.headers["retry-after"]) <= 7) == (503, True)
            assert (await call(served.port, "/health")).status == 200
            assert not served.server.drained
            gate.release(1000)
            assert (await open_one).events[-1] == "[DONE]"
            await until(lambda: served.server.drained)
            assert [line["outcome"] for line in served.log] == ["draining", "draining", "length"]

    asyncio.run(main())


async def long_stream(port: int, tokens: int) -> tuple[asyncio.StreamReader, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = {"prompt": [1], "max_tokens": tokens, "stream": True}
    writer.write(request_bytes(COMPLETIONS, body, {"Connection": "close"}))
    await reader.readuntil(b'"choices"')
    return reader, writer


def test_sigterm_lets_a_stream_end() -> None:
    async def main(port: int) -> bytes:
        reader, writer = await long_stream(port, 300)
        program.process.send_signal(signal.SIGTERM)
        rest = await reader.read(-1)
        writer.close()
        return rest

    program = launch()
    rest = asyncio.run(main(program.port))
    assert rest.rstrip().endswith(b"data: [DONE]\n\n\r\n0")
    assert rest.count(b'"choices"') >= 290
    assert program.process.wait(60) == 0
    assert end(program) == 0


@pytest.mark.parametrize("how", ["a second signal", "the limit"])
def test_a_drain_has_an_end(how: str) -> None:
    async def main(port: int) -> bytes:
        reader, writer = await long_stream(port, 60_000)  # a minute
        program.process.send_signal(signal.SIGTERM)
        if how == "a second signal":
            await until_draining(port)
            program.process.send_signal(signal.SIGTERM)
        rest = await reader.read(-1)
        writer.close()
        return rest

    async def until_draining(port: int) -> None:
        while (await call(port, "/ready")).status != 503:
            await asyncio.sleep(0.01)

    flags = ("--drain-timeout", "1") if how == "the limit" else ()
    program = launch("--num-blocks", "4000", *flags)
    rest = asyncio.run(main(program.port))
    assert b"shutting down" in rest
    assert b"[DONE]" not in rest
    assert program.process.wait(60) == 0
    assert end(program) == 0


# Fair shares


def test_shares_begin_where_the_clients_last_would_have_ended() -> None:
    shares = Shares()
    assert [shares.tag("a", 10), shares.tag("a", 10), shares.tag("b", 5), shares.tag("b", 5)] == [0, 10, 0, 5]
    shares.scheduled(10)
    assert shares.tag("c", 1) == 10  # who was away has saved nothing up
    assert shares.tag("a", 1) == 20


def test_shares_forget_those_who_are_not_ahead() -> None:
    shares = Shares()
    for i in range(3 * Shares.MOST_CLIENTS):
        shares.scheduled(i)
        shares.tag(f"client {i}", 1)
    assert len(shares._ends) <= Shares.MOST_CLIENTS


def test_a_client_with_many_requests_does_not_push_aside_one_with_few() -> None:
    order = {}
    for policy in ("fcfs", "fair"):
        drive = Drive(EngineConfig(block_size=4, num_blocks=20, max_num_seqs=1, policy=policy))
        for _ in range(5):
            drive.submit([1, 2], 3, client="many")
        for _ in range(2):
            drive.submit([3, 4], 3, client="few")
        drive.finish()
        order[policy] = [s.id for s in sorted(drive.submitted, key=lambda s: s.scheduled_ns)]
    assert order == {"fcfs": [0, 1, 2, 3, 4, 5, 6], "fair": [0, 5, 1, 6, 2, 3, 4]}


# Timings and the log


def timings(reply: Reply, stream: bool) -> dict[str, Any]:
    said: dict[str, Any] = (reply.events[-2] if stream else reply.json)["timings"]
    return said


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_timings_come_when_asked_for_and_add_up(stream: bool, n: int) -> None:
    async def main() -> None:
        async with serving() as served:
            body: dict[str, Any] = {"prompt": [1] * 40, "max_tokens": 6, "stream": stream, "n": n}
            plain = await call(served.port, COMPLETIONS, body)
            assert b"timings" not in plain.body
            asked = {"stream_options": {"include_timings": True}} if stream else {"include_timings": True}
            reply = await call(served.port, COMPLETIONS, {**body, **asked}, {"X-Request-Id": "mine"})
            said = timings(reply, stream)
            assert list(said["parts_ns"]) == PARTS
            assert all(type(ns) is int and ns >= 0 for ns in said["parts_ns"].values())
            assert sum(said["parts_ns"].values()) == said["total_ns"]
            assert said["e2e_ms"] == said["total_ns"] / 1e6
            assert (said["prompt_n"], said["predicted_n"], said["cache_n"], said["preemptions"]) == (40, 6, 32, 0)
            assert said["predicted_per_token_ms"] == pytest.approx(said["predicted_ms"] / 5)
            first = sum(said["parts_ns"][p] for p in ("http_in", "queue", "prefill")) / 1e6
            assert said["ttft_ms"] == pytest.approx(first)
            if stream:
                assert ("usage" in reply.events[-2]) is False  # not asked for
            else:
                header = dict(p.split(";dur=") for p in reply.headers["server-timing"].split(", "))
                assert {p: float(ms) for p, ms in header.items()} == {
                    p: pytest.approx(ns / 1e6, abs=6e-4) for p, ns in said["parts_ns"].items()
                }
            line = served.log[-1]
            assert (line["request_id"], line["outcome"], line["stream"]) == ("mine", "length", stream)
            assert (line["parts_ns"], line["total_ns"]) == (said["parts_ns"], said["total_ns"])
            assert (line["prompt_tokens"], line["completion_tokens"], line["cached_tokens"]) == (40, 6 * n, 32)

    asyncio.run(main())


def test_a_preempted_request_says_what_it_lost() -> None:
    async def main() -> None:
        config = EngineConfig(block_size=4, num_blocks=6, prefix_caching=False)
        gate = threading.Semaphore(0)
        async with serving(config, gate.acquire) as served:
            calls = []
            for ids in ([1, 2, 3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3, 2, 1]):
                body = {"prompt": ids, "max_tokens": 8, "include_timings": True}
                calls.append(asyncio.create_task(call(served.port, COMPLETIONS, body)))
                await until(lambda: submitted(served) == len(calls))
            gate.release(1000)
            first, second = (timings(reply, False) for reply in await asyncio.gather(*calls))
            assert (first["preemptions"], first["parts_ns"]["preempted"], first["parts_ns"]["recompute"]) == (0, 0, 0)
            assert second["preemptions"] == 1
            assert min(second["parts_ns"]["preempted"], second["parts_ns"]["recompute"]) > 0
            assert sum(second["parts_ns"].values()) == second["total_ns"]

    asyncio.run(main())


def test_a_stop_string_closes_the_account_at_the_token_that_ended_it() -> None:
    async def main() -> None:
        stop = text_of(list(b"hello"), 30)[9:12]
        async with serving() as served:
            body = {"prompt": "hello", "max_tokens": 30, "stop": stop, "include_timings": True}
            said = timings(await call(served.port, COMPLETIONS, body), False)
            assert said["predicted_n"] == 12
            assert sum(said["parts_ns"].values()) == said["total_ns"]
            assert min(said["parts_ns"].values()) >= 0

    asyncio.run(main())


@pytest.mark.parametrize("fails", [False, True])
def test_an_account_is_closed_when_the_last_event_is_made_and_not_when_it_was_read(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asked for it. 64 answers of 700 tokens are more than the sockets hold: their end waits for the reader."""
    made: list[Answer] = []
    init = Answer.__init__

    def seen(answer: Answer, *given: Any) -> None:
        init(answer, *given)
        made.append(answer)

    monkeypatch.setattr(Answer, "__init__", seen)

    async def main() -> None:
        async with serving() as served:
            if fails:
                fault = {"kind": "error_event", "after": 64 * 600}
                assert (await call(served.port, "/fault", fault)).status == 200
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", served.port))
            body = {"prompt": [1] * 10, "max_tokens": 700, "n": 64, "stream": True}
            sock.sendall(request_bytes(COMPLETIONS, body, {"Connection": "close"}))
            await until(lambda: made and made[0].done.done())
            for _ in range(3):  # its handler has gone on to where it waits
                await asyncio.sleep(0)
            assert not served.log
            begun_to_read_ns = time.monotonic_ns()
            reader, writer = await asyncio.open_connection(sock=sock)
            while await reader.read(2**20):
                pass
            writer.close()
            await until(lambda: served.log)
            assert served.log[0]["outcome"] == ("error" if fails else "length")
            assert served.log[0]["received_ns"] + served.log[0]["total_ns"] < begun_to_read_ns
            assert min(served.log[0]["parts_ns"].values()) >= 0

    asyncio.run(main())


def test_the_log_has_a_line_for_whatever_became_of_a_request() -> None:
    async def main() -> None:
        gate = threading.Semaphore(0)
        async with serving(before=gate.acquire) as served:
            reader, writer = await start(served.port, [1, 2])
            gate.release(3)
            await reader.readuntil(b'"choices"')
            leave(writer, "rst")
            await until(lambda: len(served.log) == 1)
            gate.release(1000)
            await call(served.port, COMPLETIONS, {"prompt": [1] * 900}, {"X-Request-Id": "long"})
            await call(served.port, COMPLETIONS, b"{", {"X-Request-Id": "broken"})
            await call(served.port, COMPLETIONS, {"prompt": "x", "max_tokens": 2}, {"X-Request-Id": "good"})
            assert [line["outcome"] for line in served.log] == ["abort", "refused", "refused", "length"]
            assert [line["request_id"] for line in served.log[1:]] == ["long", "broken", "good"]
            for line in served.log:
                assert sum(line["parts_ns"].values()) == line["total_ns"] > 0

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_request_that_the_engine_failed_is_logged_as_an_error() -> None:
    async def main() -> None:
        def fault() -> None:
            raise RuntimeError("device lost")

        async with serving(before=fault, backoff_s=60) as served:
            body = {"prompt": "x", "max_tokens": 2}
            await asyncio.gather(*(call(served.port, COMPLETIONS, {**body, "stream": s}) for s in (True, False)))
            assert [line["outcome"] for line in served.log] == ["error", "error"]

    asyncio.run(main())


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_batches_are_served_over_http(batching: str) -> None:
    async def main() -> None:
        async with serving(EngineConfig(max_num_seqs=4, batching=batching, max_wait_ms=1000)) as served:
            prompts = [[i, 1] for i in range(10)]
            replies = await asyncio.gather(
                *(call(served.port, COMPLETIONS, {"prompt": p, "max_tokens": 3}) for p in prompts)
            )
            assert [r.json["choices"][0]["text"] for r in replies] == [text_of(p, 3) for p in prompts]
            assert max(len(step) for step in served.runner.steps) == 4

    asyncio.run(main())


def test_the_program_writes_its_log_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    program = launch("--log-requests", str(path))
    asyncio.run(call(program.port, COMPLETIONS, {"prompt": "x", "max_tokens": 3}, {"X-Request-Id": "mine"}))
    assert end(program) == 0
    (line,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert (line["request_id"], line["outcome"], line["completion_tokens"]) == ("mine", "length", 3)
    assert sum(line["parts_ns"].values()) == line["total_ns"]
