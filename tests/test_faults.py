"""Faults on order: what is struck, the same by seed; and that the server, and who was not struck, get over each."""

import asyncio
import threading
import time
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_engine.config import EngineConfig
from reference_engine.faults import FAULTS, Choice, Number, fields_of, held_share, read, struck, trouble
from reference_engine.scheduler import Scheduler
from tests.quiet import undisturbed
from tests.stub_runner import Drive, alone, answer
from tests.test_engine_server import (
    CHAT,
    COMPLETIONS,
    Reply,
    call,
    end,
    launch,
    metric,
    request_bytes,
    serving,
    start,
    text_of,
    until,
)

BODY = {"prompt": "hello", "max_tokens": 20}
STREAM = {**BODY, "stream": True}
WHOLE = text_of(list(b"hello"), 20)


async def plant(port: int, kind: str, **fields: Any) -> None:
    reply = await call(port, "/fault", {"kind": kind, **fields})
    assert reply.status == 200, reply.body


async def delete(port: int) -> Reply:
    return await call(port, "/fault", method="DELETE")


def text(reply: Reply) -> str:
    return "".join(e["choices"][0]["text"] for e in reply.events if "choices" in e)


# What is struck


def test_a_fault_of_steps_strikes_those_it_names() -> None:
    fault = read({"kind": "stall", "at_step": 2, "steps": 3, "seconds": 0.5})
    assert [trouble([fault]).stall_s for _ in range(7)] == [0, 0, 0.5, 0.5, 0.5, 0, 0]
    assert (fault.seen, fault.hits, fault.active) == (7, 3, False)


def test_faults_of_one_step_add_up() -> None:
    faults = [read({"kind": "slow_step", "factor": 3}), read({"kind": "slow_step", "factor": 2}),
              read({"kind": "oom", "calls": 4}), read({"kind": "crash", "at_step": 1})]  # fmt: skip
    assert trouble(faults) == (4, 6.0, 0.0, False)
    assert trouble(faults).crash


def test_pressure_is_told_before_the_step_and_counted_by_it() -> None:
    fault = read({"kind": "memory_pressure", "share": 0.25, "steps": 2, "at_step": 1})
    shares = []
    for _ in range(4):
        shares.append((held_share([fault]), held_share([fault])))
        trouble([fault])
    assert shares == [(0, 0), (0.25, 0.25), (0.25, 0.25), (0, 0)]


@given(st.integers(0, 2**63 - 1), st.floats(0, 1))
def test_a_share_of_requests_is_struck_the_same_ones_for_a_seed(seed: int, share: float) -> None:
    def hits() -> list[bool]:
        fault = read({"kind": "http_error", "share": share, "seed": seed})
        return [bool(struck([fault], "request")) for _ in range(400)]

    assert hits() == hits()
    assert abs(sum(hits()) / 400 - share) < 0.15  # six standard errors


def test_other_seeds_strike_others_and_no_more_than_asked() -> None:
    def hits(**fields: Any) -> list[int]:
        fault = read({"kind": "cut_stream", "share": 0.5, **fields})
        return [i for i in range(100) if struck([fault], "stream")]

    assert hits(seed=1) != hits(seed=2)
    assert hits(seed=1, requests=7) == hits(seed=1)[:7]
    assert struck([read({"kind": "cut_stream"})], "request") == {}


def test_of_two_of_a_kind_the_first_acts() -> None:
    first, second = read({"kind": "http_error", "requests": 1}), read({"kind": "http_error", "status": 429})
    assert [struck([first, second], "request")["http_error"].fields["status"] for _ in range(2)] == ["500", "429"]


ORDERS = [(kind, field, rule) for kind, row in FAULTS.items() for field, rule in fields_of(row).items()]


@pytest.mark.parametrize(("kind", "field", "rule"), ORDERS, ids=lambda x: x if isinstance(x, str) else "")
def test_every_field_has_its_limits(kind: str, field: str, rule: Number | Choice) -> None:
    if isinstance(rule, Choice):
        good: list[Any] = list(rule.values)
        bad: list[Any] = ["", "no", [], 5, True, {}]
    else:
        whole = type(rule.default) is int
        good = [rule.low, rule.high, rule.default]
        bad = [rule.low - 1, rule.high * 2, "1", True, [], float("nan"), *([1.5] if whole else [])]
        good = [int(g) if whole else g for g in good]
    for value in good:
        assert read({"kind": kind, field: value}).fields[field] == value
    for value in bad:
        with pytest.raises(ValueError, match=f"{field}: would be right"):
            read({"kind": kind, field: value})


@pytest.mark.parametrize("body", [{}, {"kind": 5}, {"kind": []}, {"kind": "fire"}])
def test_an_unknown_kind_is_told_the_known_ones(body: Any) -> None:
    with pytest.raises(ValueError, match=r"oom, memory_pressure, .*error_event"):
        read(body)
    with pytest.raises(ValueError, match=r"stall has no field 'steep'; would be right: at_step, steps, seconds"):
        read({"kind": "stall", "steep": 1})


# Memory pressure in the scheduler


@pytest.mark.parametrize("batching", ["continuous", "dynamic", "static"])
@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_pressure_makes_a_storm_of_preemptions_and_changes_no_token(batching: str, share: float) -> None:
    config = EngineConfig(block_size=4, num_blocks=20, max_num_seqs=4, max_num_batched_tokens=64, batching=batching,
                          max_wait_ms=0)  # fmt: skip
    drive = Drive(config)
    prompts = [[i] * (5 + 3 * i) for i in range(6)]
    sequences = [drive.submit(prompt, 12) for prompt in prompts]
    for _ in range(400):
        drive.scheduler.blocks.hold(round(share * 20))
        drive.step()
        if not drive.scheduler.busy:
            break
    assert [answer(s) for s in sequences] == [alone(config, prompt, 12)[0] for prompt in prompts]
    if batching == "continuous":
        assert drive.scheduler.counts.preemptions > 1  # what they are without
    drive.scheduler.blocks.hold(0)
    drive.scheduler.check()
    assert len(drive.scheduler.blocks.free) == 20


def test_blocks_that_are_held_are_nobodys_and_come_back() -> None:
    scheduler = Scheduler(EngineConfig(block_size=4, num_blocks=8), frozenset())
    blocks = scheduler.blocks
    for hold, free in ((5, 3), (5, 3), (100, 0), (2, 6), (0, 8)):
        blocks.hold(hold)
        scheduler.check()
        assert (len(blocks.free), len(blocks.held)) == (free, 8 - free)
    blocks.held.append(blocks.free.popitem()[0])
    with pytest.raises(AssertionError, match="reference counts differ"):
        scheduler.check()


# Over HTTP


def test_what_is_planted_is_listed_with_its_hits_and_cleared() -> None:
    async def main() -> None:
        async with serving() as served:
            assert (await call(served.port, "/fault")).json == {"active": []}
            await plant(served.port, "stall", seconds=0.001, steps=3)
            await plant(served.port, "http_error", requests=1)
            listed = (await call(served.port, "/fault")).json["active"]
            assert listed[0] == {"kind": "stall", "at_step": 0, "steps": 3, "seconds": 0.001, "seen": 0, "hits": 0}
            assert listed[1]["status"] == "500"
            assert (await call(served.port, COMPLETIONS, {**BODY, "max_tokens": 2})).status == 500
            assert (await call(served.port, COMPLETIONS, {**BODY, "max_tokens": 2})).status == 200
            (stall,) = (await call(served.port, "/fault")).json["active"]
            assert (stall["seen"], stall["hits"]) == (2, 2)
            assert (await delete(served.port)).json == {"active": []}
            for wrong in ({"kind": "fire"}, {"kind": "oom", "calls": 0}, {}, [1]):
                reply = await call(served.port, "/fault", wrong)
                assert (reply.status, reply.json["error"]["code"]) == (400, 400)

    asyncio.run(main())


def test_a_request_that_memory_does_not_hold_ends_with_503_and_the_next_is_served() -> None:
    async def main() -> None:
        async with serving() as served:
            await plant(served.port, "oom", at_step=2, calls=1000)
            streamed = await call(served.port, COMPLETIONS, STREAM)
            assert text(streamed) == WHOLE[:2]
            assert streamed.events[-1]["error"]["code"] == 503  # and no [DONE]
            await plant(served.port, "oom", at_step=2, calls=1000)
            whole = await call(served.port, COMPLETIONS, BODY)
            assert (whole.status, whole.json["error"]["type"]) == (503, "ServiceUnavailableError")
            assert int(whole.headers["retry-after"]) >= 1
            assert (await call(served.port, COMPLETIONS, BODY)).json["choices"][0]["text"] == WHOLE
            assert (await call(served.port, "/health")).status == 200
            assert [line["outcome"] for line in served.log] == ["oom", "oom", "length"]
            assert await metric(served.port, "vllm:request_success_total", finished_reason="oom") == 2
            assert await metric(served.port, "reference_engine:failed_allocations_total") == 2

    asyncio.run(main())


def test_pressure_over_http_preempts_and_is_given_back_though_nothing_runs() -> None:
    async def main() -> None:
        config = EngineConfig(block_size=4, num_blocks=32, prefix_caching=False)
        gate = threading.Semaphore(0)
        async with serving(config, gate.acquire) as served:
            await plant(served.port, "memory_pressure", share=0.5, steps=1000)
            prompts, calls = [[i + 1] * 16 for i in range(4)], []
            for i, prompt in enumerate(prompts):  # all are there before the second step
                body = {"prompt": prompt, "max_tokens": 12}
                calls.append(asyncio.create_task(call(served.port, COMPLETIONS, body)))
                await until(lambda i=i: served.engine._submitted == i + 1)
            gate.release(1000)
            replies = await asyncio.gather(*calls)
            assert [r.json["choices"][0]["text"] for r in replies] == [text_of(p, 12, config) for p in prompts]
            assert await metric(served.port, "vllm:num_preemptions_total") > 0
            state = (await call(served.port, "/v1/engine")).json
            assert (state["free_blocks"], state["check"]) == (16, "ok")
            await delete(served.port)  # that all are free then is checked at the end of `serving`

    asyncio.run(main())


def test_slow_steps_and_stalls_take_their_time() -> None:
    async def main() -> None:
        async with serving(before=lambda: time.sleep(0.01)) as served:
            times = []
            for kind, fields in ((None, {}), ("slow_step", {"factor": 5.0, "steps": 4}), ("stall", {"seconds": 0.3})):
                if kind:
                    await plant(served.port, kind, **fields)
                reply = await call(served.port, COMPLETIONS, {**BODY, "max_tokens": 4, "include_timings": True})
                times.append(reply.json["timings"]["total_ns"] / 1e9)
            assert times[1] > 4 * 5 * 0.01  # sleeps are never short
            assert times[2] > 4 * 0.01 + 0.3

    asyncio.run(main())


def test_after_a_crash_all_is_503_until_the_worker_is_back_and_nothing_hangs() -> None:
    async def main() -> None:
        async with serving(before=lambda: time.sleep(0.005), backoff_s=60) as served:
            served.runner.pool = None  # its blocks are replaced
            streamed = asyncio.create_task(call(served.port, COMPLETIONS, STREAM))
            whole = asyncio.create_task(call(served.port, CHAT, {"messages": [{"role": "user", "content": "x"}]}))
            await until(lambda: served.server.open == 2)
            await plant(served.port, "crash")
            await until(lambda: served.engine.down)
            for path, body in (("/health", None), ("/ready", None), ("/v1/engine", None), (COMPLETIONS, BODY)):
                reply = await call(served.port, path, body)
                assert (reply.status, reply.headers["retry-after"]) == (503, "61"), path
                assert "a planted crash; it is being restarted" in reply.json["error"]["message"]
            last = (await streamed).events[-1]
            assert last == "[DONE]" or last["error"]["code"] == 503
            assert (await whole).status in (200, 503)
            assert served.engine._restart is not None
            served.engine._restart.cancel()
            served.engine.start()  # as it would a minute later
            await until(lambda: not served.engine.down)
            for path in ("/health", "/ready"):
                assert (await call(served.port, path)).status == 200
            assert (await call(served.port, COMPLETIONS, BODY)).json["choices"][0]["text"] == WHOLE
            assert (await call(served.port, "/v1/engine")).json["restarts"] == 1

    asyncio.run(main())


def test_a_request_in_a_crash_ends_with_an_error_event_and_no_done() -> None:
    async def main() -> None:
        async with serving() as served:
            served.runner.pool = None
            await plant(served.port, "crash", at_step=5)
            reply = await call(served.port, COMPLETIONS, STREAM)
            assert text(reply) == WHOLE[:5]
            assert (reply.events[-1]["error"]["code"], len(reply.events)) == (503, 6)
            await until(lambda: not served.engine.down)
            await plant(served.port, "crash", at_step=5)
            reply = await call(served.port, COMPLETIONS, BODY)
            assert (reply.status, reply.json["error"]["code"]) == (503, 503)
            assert [line["outcome"] for line in served.log] == ["error", "error"]
            await until(lambda: not served.engine.down)

    asyncio.run(main())


@pytest.mark.parametrize("status", ["500", "429", "503", "reset"])
def test_a_share_of_requests_fails_over_http(status: str) -> None:
    async def main() -> None:
        async with serving() as served:
            await plant(served.port, "http_error", share=0.5, status=status, seed=3)
            expected = read({"kind": "http_error", "share": 0.5, "seed": 3})
            for _ in range(12):
                hit = bool(struck([expected], "request"))
                try:
                    reply = await call(served.port, COMPLETIONS, {**BODY, "max_tokens": 1})
                except ConnectionResetError:
                    assert (hit, status) == (True, "reset")
                    continue
                assert reply.status == (int(status) if hit else 200)
                assert ("retry-after" in reply.headers) == (hit and status != "500")
            assert sum(line["outcome"] == "fault" for line in served.log) == expected.hits > 2

    asyncio.run(main())


@pytest.mark.parametrize("after", [0, 1, 4])
@pytest.mark.parametrize("how", ["rst", "fin", "half_chunk"])
def test_a_stream_is_cut_after_so_many_tokens(how: str, after: int) -> None:
    async def main() -> None:
        async with serving(before=lambda: time.sleep(0.002)) as served:
            await plant(served.port, "cut_stream", how=how, after=after, requests=1)
            reader, writer = await start(served.port, list(b"hello"))
            got = b""
            try:
                while piece := await reader.read(65536):
                    got += piece
                assert how != "rst"
            except ConnectionResetError:
                assert how == "rst"
            writer.close()
            head, _, rest = got.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            half = how == "half_chunk"
            assert rest.count(b'"choices"') in (after, after + half)
            assert rest.endswith(b"}\n\n\r\n") == (bool(after) and not half) or how == "rst"
            assert b"[DONE]" not in rest
            assert not rest.endswith(b"0\r\n\r\n")
            await until(lambda: served.log)
            assert served.log[0]["outcome"] == "cut"
            await until(lambda: not served.engine.scheduler.running)
            whole = await call(served.port, COMPLETIONS, STREAM)
            assert (text(whole), whole.events[-1]) == (WHOLE, "[DONE]")

    asyncio.run(main())


def test_an_answer_that_is_too_short_to_be_cut_ends_well() -> None:
    async def main() -> None:
        async with serving() as served:
            await plant(served.port, "cut_stream", after=20)
            assert (await call(served.port, COMPLETIONS, STREAM)).events[-1] == "[DONE]"
            assert (await call(served.port, COMPLETIONS, BODY)).status == 200  # no stream, nothing to cut

    asyncio.run(main())


def test_an_error_event_ends_a_stream_and_openais_client_raises_it() -> None:
    async def main() -> None:
        async with serving() as served:
            await plant(served.port, "error_event", after=3)
            reply = await call(served.port, COMPLETIONS, STREAM)
            assert (text(reply), reply.events[-1]["error"]["message"]) == (WHOLE[:3], "a planted fault")
            async with openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{served.port}/v1", api_key="x", max_retries=0
            ) as client:
                chunks = await client.completions.create(model="stub", prompt="hello", max_tokens=20, stream=True)
                for letter in WHOLE[:3]:
                    assert (await anext(chunks)).choices[0].text == letter
                with pytest.raises(openai.APIError, match="a planted fault"):
                    await anext(chunks)
            assert [line["outcome"] for line in served.log] == ["error", "error"]

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
@undisturbed
def test_headers_are_delayed_while_tokens_are_made(stream: bool) -> None:
    async def main() -> None:
        async with serving() as served:
            await plant(served.port, "delay_headers", seconds=0.3)
            begun = time.monotonic()
            reader, writer = await start(served.port, list(b"hello"), stream=stream)
            await until(lambda: served.engine.telemetry.finished["length"] == 1)
            made = time.monotonic()
            await reader.readline()
            assert time.monotonic() - begun >= 0.3
            assert made - begun < 0.3 or time.monotonic() - made < 0.3
            writer.close()
            await until(lambda: not served.server.open)

    asyncio.run(main())


def test_faults_are_not_served_unless_allowed_and_then_ask_for_the_key() -> None:
    async def main() -> None:
        async with serving(api_key="k") as served:
            for body in (None, {"kind": "crash"}):
                assert (await call(served.port, "/fault", body)).status == 401
            assert (await call(served.port, "/fault", headers={"Authorization": "Bearer k"})).status == 200
        program = launch()
        try:
            async with httpx.AsyncClient(base_url=program.url.removesuffix("/v1")) as client:
                assert (await client.post("/fault", json={"kind": "crash"})).status_code == 404
                assert "/fault" not in (await client.get("/openapi.json")).json()["paths"]
        finally:
            assert end(program) == 0

    asyncio.run(main())


def test_the_program_that_crashes_too_often_says_so_and_exits() -> None:
    async def main(port: int) -> list[bytes]:
        said = []
        await plant(port, "crash", steps=6)
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request_bytes(COMPLETIONS, {**BODY, "stream": True}, {"Connection": "close"}))
                said.append(await reader.read(-1))
                writer.close()
            except OSError:
                return said
            await asyncio.sleep(0.05)

    program = launch("--allow-faults")
    said = asyncio.run(main(program.port))
    assert b"not restarted any more" in b"".join(said)
    assert not any(b"[DONE]" in reply for reply in said)
    assert program.process.wait(60) == 1
    assert program.process.stderr
    lines = program.process.stderr.read().decode().splitlines()
    assert sum("being restarted" in line for line in lines) == 5
    assert "it is not restarted any more" in lines[-1]
    assert end(program) == 1
