"""Log probabilities over HTTP: those of transformers, refused where there are none, and nobody else is disturbed."""

import asyncio
import json
import math
import re
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from llm_bench import perplexity
from llm_bench.cli import app as bench
from reference_engine import scoring, weights
from reference_engine.config import EngineConfig
from reference_engine.engine import Engine
from reference_engine.lora import Loaded
from reference_engine.server import Server, listen
from reference_engine.tokenizer import ByteTokenizer
from tests.engine_models import llama, prompts, runner, save
from tests.test_engine_server import COMPLETIONS, call, leave, metric, request_bytes, serving, until

pytestmark = pytest.mark.engine

VOCAB = 264  # of a tokenizer of bytes
TEXT = "A text that is scored, token by token: é."
SCORE: dict[str, Any] = {"echo": True, "max_tokens": 0, "logprobs": 2}


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> weights.Weights:
    return weights.read(save(llama(vocab_size=VOCAB), tmp_path_factory.mktemp("m")))


@asynccontextmanager
async def scoring_server(read: weights.Weights, **knobs: Any) -> AsyncIterator[tuple[int, Server]]:
    made = runner(read, **knobs)
    config = EngineConfig(**({"block_size": 4, "num_blocks": 600, "max_model_len": 512} | knobs))
    log: list[bytes] = []
    engine = Engine(config, made, made.eos_ids, "tiny", backoff_s=0.001)
    server = Server(engine, ByteTokenizer(), VOCAB, "tiny", log=log.append)
    app, port = await listen(server, "127.0.0.1", 0)
    engine.start()
    try:
        yield port, server
        if not engine.down:
            assert (await call(port, "/v1/engine")).json["check"] == "ok"
    finally:
        await engine.stop()
        await app.cleanup()


def test_they_are_those_of_transformers_in_openais_shape(read: weights.Weights) -> None:
    async def main() -> None:
        ids = list(TEXT.encode())
        right = llama(vocab_size=VOCAB)(torch.tensor([ids])).logits[0].detach().double().log_softmax(-1)
        async with scoring_server(read) as (port, _):
            said = (await call(port, COMPLETIONS, SCORE | {"prompt": TEXT, "model": "tiny"})).json
            (choice,) = said["choices"]
            assert (said["object"], said["model"], choice["index"]) == ("text_completion", "tiny", 0)
            assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
            usage = {key: said["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
            assert usage == {"prompt_tokens": len(ids), "completion_tokens": 0, "total_tokens": len(ids)}
            first, *rest = choice["logprobs"]["token_logprobs"]
            assert first is None
            wanted = [float(right[i, token]) for i, token in enumerate(ids[1:])]
            assert rest == pytest.approx(wanted, abs=2e-4)
            tops = choice["logprobs"]["top_logprobs"]
            assert [max(row.values()) for row in tops[1:]] == pytest.approx(
                right[:-1].max(-1).values.tolist(), abs=2e-4
            )
            by_ids = (await call(port, COMPLETIONS, SCORE | {"prompt": ids})).json["choices"][0]
            assert by_ids["logprobs"] == choice["logprobs"]
            assert by_ids["text"] == TEXT

    asyncio.run(main())


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"stream": True}, "echo", "one whole choice"),
    ({"n": 2}, "echo", "one whole choice"),
    ({"logprobs": 21}, "logprobs", "would be right: an integer from 0 to 20"),
    ({"logprobs": -1}, "logprobs", "would be right: an integer from 0 to 20"),
    ({"logprobs": True}, "echo", "not supported"),
    ({"logprobs": None}, "echo", "not supported"),
    ({"max_tokens": 1}, "echo", "not supported"),
    ({"echo": 1}, "echo", "not supported"),
    ({"prompt": ""}, "prompt", "not empty"),
    ({"prompt": [1] * 513}, "prompt", "513 tokens; would be right: at most 512"),
    ({"prompt": "x" * 513}, "prompt", "513 tokens; would be right: at most 512"),
    ({"prompt": [VOCAB]}, "prompt", "would be right: 0 to 263"),
    ({"suffix": "x"}, "suffix", "not supported"),
]


def test_what_cannot_be_scored_is_refused_by_name(read: weights.Weights) -> None:
    async def main() -> None:
        async with scoring_server(read) as (port, server):
            for changes, param, text in REFUSALS:
                reply = await call(port, COMPLETIONS, SCORE | {"prompt": "x"} | changes)
                assert reply.status == 400, changes
                assert (reply.json["error"]["param"], text in reply.json["error"]["message"]) == (param, True), reply
            unknown: Any
            for unknown in ("no", ["tiny"], {}):
                assert (await call(port, COMPLETIONS, SCORE | {"prompt": "x", "model": unknown})).status == 404
            server.adapters.loaded["a"] = Loaded("a", 1, "a", 4)
            reply = await call(port, COMPLETIONS, SCORE | {"prompt": "x", "model": "a"})
            assert (reply.status, reply.json["error"]["param"]) == (400, "model")
            assert "a LoRA adapter scores nothing" in reply.json["error"]["message"]
            assert (await call(port, COMPLETIONS, SCORE | {"prompt": "x"})).status == 200

    asyncio.run(main())


def test_a_runner_that_only_takes_the_time_has_none() -> None:
    async def main() -> None:
        async with serving() as served:
            reply = await call(served.port, COMPLETIONS, SCORE | {"prompt": "x"})
            assert (reply.status, reply.json["error"]["param"]) == (400, "echo")
            assert "is simulated and has no log probabilities" in reply.json["error"]["message"]
            assert served.log[-1]["outcome"] == "refused"

    asyncio.run(main())


def test_a_client_that_leaves_ends_it_after_the_piece_and_frees_the_next(
    read: weights.Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first text stops in its second piece until its client is gone; the one behind it is scored all the same."""
    begun, gate = threading.Event(), threading.Semaphore(0)
    pieces: list[int] = []
    whole = scoring.score

    def score(*given: Any) -> Iterator[list[scoring.Scored]]:
        made = whole(*given)

        def slow() -> Iterator[list[scoring.Scored]]:
            for number, piece in enumerate(made):
                pieces.append(len(given[1]))
                if number == 1:
                    begun.set()
                    gate.acquire()
                yield piece

        return slow()

    monkeypatch.setattr(scoring, "PIECE", 8)
    monkeypatch.setattr(scoring, "score", score)

    async def main() -> None:
        async with scoring_server(read) as (port, server):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_bytes(COMPLETIONS, SCORE | {"prompt": [7] * 400}))
            await asyncio.to_thread(begun.wait, 10)
            second = asyncio.create_task(call(port, COMPLETIONS, SCORE | {"prompt": [7] * 9}))
            while server.open < 2:
                await asyncio.sleep(0.002)
            leave(writer, "rst")
            while server.open > 1:
                await asyncio.sleep(0.002)
            gate.release(1000)
            assert (await second).json["usage"]["prompt_tokens"] == 9
            assert pieces.count(400) == 2  # of 51
            assert server.open == 0

    asyncio.run(main())


def test_who_waits_for_his_turn_keeps_nothing_of_his_body() -> None:
    """Of 8 MB that stand in fields that nobody knows."""

    async def main() -> None:
        async with serving() as served, served.server.scores:
            tracemalloc.start()
            try:
                body = json.dumps(SCORE | {"prompt": "x", "own": ["y" * 8_000_000]}).encode()
                _, writer = await asyncio.open_connection("127.0.0.1", served.port)
                writer.write(request_bytes(COMPLETIONS, body))
                await writer.drain()
                del body
                await until(lambda: served.server.bodies.held)
                await until(lambda: not served.server.bodies.held and tracemalloc.get_traced_memory()[0] < 2_000_000)
                assert served.server.open == 1
                assert not served.log
            finally:
                tracemalloc.stop()
            leave(writer, "rst")
            await until(lambda: served.log)

    asyncio.run(main())


def test_memory_that_does_not_suffice_is_a_503_and_no_fault(
    read: weights.Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(*_: Any) -> Iterator[list[scoring.Scored]]:
        yield [scoring.Scored(7, None, [])]
        raise MemoryError

    monkeypatch.setattr(scoring, "score", score)

    async def main() -> None:
        async with scoring_server(read) as (port, _):
            reply = await call(port, COMPLETIONS, SCORE | {"prompt": "xy"})
            assert (reply.status, reply.json["error"]["message"]) == (503, "memory did not suffice to score the prompt")
            assert int(reply.headers["retry-after"]) >= 1
            assert await metric(port, "reference_engine:failed_allocations_total") == 1
            assert (await call(port, "/health")).status == 200

    asyncio.run(main())


def test_whoever_is_being_served_gets_the_same_answer(read: weights.Weights) -> None:
    async def main() -> None:
        asked = {"prompt": prompts(1)[0], "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        async with scoring_server(read) as (port, _):
            alone = (await call(port, COMPLETIONS, asked)).json["choices"]
            score = SCORE | {"prompt": [9] * 300}
            together, *scores = await asyncio.gather(
                call(port, COMPLETIONS, asked), *(call(port, COMPLETIONS, score) for _ in range(3))
            )
            assert together.json["choices"] == alone
            assert len({reply.body.partition(b'"choices"')[2] for reply in scores}) == 1

    asyncio.run(main())


def test_the_bench_compares_two_precisions_by_it(read: weights.Weights, tmp_path: Path, monkeypatch: Any) -> None:
    """The figures of the command are those of transformers for the model itself; the one of 8 bits is near it."""
    monkeypatch.chdir(tmp_path)
    ids = list(perplexity.TEXT.encode())
    room = {"max_model_len": 2048}

    def check(*urls: str) -> list[str]:
        targets = ",".join(f"{name}={url}" for name, url in zip("abc", urls, strict=True))
        ran = CliRunner().invoke(bench, ["targets", "check", targets, "--agree"])
        assert ran.exit_code == 0, ran.output
        return [line for line in ran.output.splitlines() if "bits a byte" in line or "not scored" in line]

    async def main() -> None:
        long = llama(vocab_size=VOCAB, max_position_embeddings=2048)
        model = long(torch.tensor([ids])).logits[0].detach().double().log_softmax(-1)
        nats = -sum(float(model[i, token]) for i, token in enumerate(ids[1:])) / (len(ids) - 1)
        big = weights.read(save(long, tmp_path / "m"))
        async with (
            scoring_server(big, **room) as (one, _),
            scoring_server(big, quantization="int8", **room) as (two, _),
            scoring_server(read) as (three, _),
        ):
            urls = [f"http://127.0.0.1:{port}/v1" for port in (one, two, three)]
            a, b, c, apart = await asyncio.to_thread(check, *urls)
            said = re.fullmatch(r"  a: perplexity (\S+) over (\d+) tokens, (\S+) bits a byte", a)
            assert said
            assert float(said[1]) == pytest.approx(math.exp(nats), rel=1e-3)
            assert int(said[2]) == len(ids) - 1
            assert float(said[3]) == pytest.approx(nats / math.log(2), abs=1e-3)
            assert b.startswith("  b: perplexity ")
            assert "c: not scored: HTTP 400: " in c
            assert "would be right: at most 512" in c
            far = re.fullmatch(
                r"a and b: perplexity \S+, (\S+) bits a byte; (\S+) nats apart at most, at token .*", apart
            )
            assert far
            assert 0 < abs(float(far[1])) < 0.5
            assert float(far[2]) > 0

    asyncio.run(main())
