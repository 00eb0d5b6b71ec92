"""Logits that are no finite numbers end their own request, by name, and nobody else's."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf, nan
from typing import Any, NamedTuple

import pytest

from reference_engine import weights
from reference_engine.config import EngineConfig
from reference_engine.engine import Engine
from reference_engine.runner import ModelRunner
from reference_engine.server import Server, listen
from reference_engine.tokenizer import ByteTokenizer
from tests.test_engine_server import COMPLETIONS, Reply, call, metric

pytestmark = pytest.mark.engine
BAD = 7  # the token whose embedding is no number
SAID = "the model came to numbers that are not finite"


class Served(NamedTuple):
    port: int
    log: list[bytes]


@asynccontextmanager
async def serving(
    kernels: str,
    change: Callable[[weights.Weights], object] = lambda made: made.embedding[BAD].fill_(nan),
    **knobs: Any,
) -> AsyncIterator[Served]:
    """The tiny model with one embedding that is NaN, as no file's may be: other weights come to it in a layer."""
    config = EngineConfig(
        cpu_kernels=kernels, device="cpu", threads=1, max_model_len=100, block_size=4, **{"num_blocks": 60} | knobs
    )
    made = weights.tiny(0)
    change(made)
    runner = ModelRunner("tiny", made, frozenset(), config)
    engine = Engine(config, runner, runner.eos_ids, "tiny")
    log: list[bytes] = []
    server = Server(engine, ByteTokenizer(), runner.vocab_size, "tiny", log=log.append)
    app, port = await listen(server, "127.0.0.1", 0)
    engine.start()
    try:
        yield Served(port, log)
    finally:
        await engine.stop()
        await app.cleanup()


async def ask(port: int, prompt: list[int], **more: Any) -> Reply:
    return await call(port, COMPLETIONS, {"prompt": prompt, "max_tokens": 12, "temperature": 0, **more})


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize(
    ("quantization", "kv"), [("none", "auto"), ("none", "int8"), ("int8-weights", "auto"), ("int8", "int8")]
)
def test_it_ends_alone_with_a_500_and_its_blocks_harm_nobody(kernels: str, quantization: str, kv: str) -> None:
    good = [[i + 20] * (3 + 5 * i) for i in range(4)]

    async def main() -> None:
        async with serving(kernels, quantization=quantization, kv_cache_dtype=kv) as served:
            alone = [(await ask(served.port, prompt)).json["choices"] for prompt in good]
            bad = [[BAD, 9], [8] * 30 + [BAD], [BAD] * 40]
            for _ in range(3):  # blocks that held what is no number are given to others
                replies = await asyncio.gather(*(ask(served.port, prompt) for prompt in [*bad, *good]))
                for reply in replies[: len(bad)]:
                    error = reply.json["error"]
                    assert (reply.status, error["type"]) == (500, "InternalServerError")
                    assert error["message"].startswith(SAID)
                assert [reply.json["choices"] for reply in replies[len(bad) :]] == alone
            state = (await call(served.port, "/v1/engine")).json
            assert (state["check"], state["restarts"], state["free_blocks"]) == ("ok", 0, 60)
            assert await metric(served.port, "vllm:request_success_total", finished_reason="nonfinite") == 9
            assert sum(b'"outcome":"error"' in line for line in served.log) == 9

    asyncio.run(main())


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_what_it_computed_in_earlier_chunks_is_reused_by_nobody(kernels: str) -> None:
    """A first block without the bad token, in one chunk with it, of which no logits were taken."""

    async def main() -> None:
        first = [20, 21, 22, 23]
        async with serving(kernels, max_num_batched_tokens=8) as served:
            alone = [(await ask(served.port, prompt)).json["choices"] for prompt in ([*first, 30], [*first, 31])]
        async with serving(kernels, max_num_batched_tokens=8) as served:
            assert (await ask(served.port, [*first, BAD, *[9] * 20])).status == 500
            replies = [await ask(served.port, [*first, token]) for token in (30, 31)]
            assert [reply.status for reply in replies] == [200, 200]
            assert [reply.json["choices"] for reply in replies] == alone
            assert [reply.json["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies] == [0, 4]
            state = (await call(served.port, "/v1/engine")).json
            assert (state["check"], state["free_blocks"]) == ("ok", 60)

    asyncio.run(main())


def test_a_stream_says_it_in_an_event() -> None:
    async def main() -> None:
        async with serving("torch") as served:
            reply = await ask(served.port, [BAD], stream=True)
            (event,) = reply.events
            assert (reply.status, event["error"]["code"]) == (200, 500)
            assert event["error"]["message"].startswith(SAID)
            drawn = await ask(served.port, [BAD], temperature=1, top_p=0.5, n=2)
            assert drawn.status == 500

    asyncio.run(main())


def test_scores_and_vectors_are_no_null() -> None:
    """JSON has no NaN: it would be written as null."""

    async def main() -> None:
        async with serving("torch", batch_wait_ms=50.0) as served:
            scored = await call(
                served.port, COMPLETIONS, {"prompt": [5, BAD, 9], "max_tokens": 0, "echo": True, "logprobs": 1}
            )
            inputs = [[[5, 6], [BAD, 6]], [[5, 6]]]
            both = await asyncio.gather(*(call(served.port, "/v1/embeddings", {"input": texts}) for texts in inputs))
            assert [scored.status, *(reply.status for reply in both)] == [500, 500, 200]
            assert None not in both[1].json["data"][0]["embedding"]
            assert all(r.json["error"]["message"].startswith(SAID) for r in (scored, both[0]))

    asyncio.run(main())


def test_an_infinite_logit_is_no_score() -> None:
    """All others are infinitely unlikely then: JSON has no -Infinity either."""

    async def main() -> None:
        async with serving("torch", lambda made: made.head[BAD, 0].fill_(inf)) as served:
            body = {"prompt": [*range(20, 60)], "max_tokens": 0, "echo": True, "logprobs": 1}
            reply = await call(served.port, COMPLETIONS, body)
            assert (reply.status, reply.json["error"]["message"][: len(SAID)]) == (500, SAID)

    asyncio.run(main())
