"""Routes of single passes: OpenAI's embeddings, and KServe v2. Each is a function of the server and a request."""

import asyncio
import uuid
from array import array
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

import orjson
from aiohttp import web

from reference_engine import embeddings, kserve
from reference_engine.batcher import Job
from reference_engine.faults import Fault
from reference_engine.intake import CHARS_A_TOKEN, LONG_TEXT, body_of, data_of, own_id
from reference_engine.openai_api import ApiError, shown
from reference_engine.reply import delay, json_response
from reference_engine.single_pass import PassEntry, headers_of

if TYPE_CHECKING:
    from reference_engine.server import Server


Answer = Callable[["Server", web.Request, PassEntry], Awaitable[web.Response]]


async def embed(server: "Server", request: web.Request) -> web.StreamResponse:
    return await _passed(server, request, _embed)


async def infer(server: "Server", request: web.Request) -> web.StreamResponse:
    return await _passed(server, request, _infer)


async def _passed(server: "Server", request: web.Request, answer: Answer) -> web.StreamResponse:
    entry = PassEntry(own_id(request) or uuid.uuid4().hex, server.engine.now_ns())

    async def answered(troubles: dict[str, Fault]) -> web.Response:
        response = await answer(server, request, entry)
        response.headers.update(headers_of(entry))
        await delay(troubles)
        return response

    return await server.logged(request, entry, answered)


async def _embed(server: "Server", request: web.Request, entry: PassEntry) -> web.Response:
    ask = embeddings.parse(await body_of(request, server.bodies), server.model)
    vectors = await _vectors(server, ask.inputs, entry, "input")
    timings = entry.said(server.engine.now_ns())
    said = {"timings": timings} if ask.include_timings else {}
    return json_response(200, embeddings.answer(vectors, ask.base64, server.model, entry.tokens, said))


async def _infer(server: "Server", request: web.Request, entry: PassEntry) -> web.Response:
    _check_model(server, request)
    ask = kserve.parse(await data_of(request, server.bodies), request.headers.get(kserve.HEADER_LENGTH))
    param = "text" if isinstance(ask.inputs[0], str) else "input_ids"
    vectors = await _vectors(server, ask.inputs, entry, param)
    said = entry.said(server.engine.now_ns())
    parts = {f"{name}_ns": ns for name, ns in said["parts_ns"].items()}
    parameters = {"batch_size": said["batch_size"], "batches": said["batches"], **parts}
    body, head = kserve.answer(ask, server.model, vectors, parameters)
    if head is None:
        return json_response(200, body)
    return web.Response(body=body, content_type="application/octet-stream", headers={kserve.HEADER_LENGTH: str(head)})


async def _vectors(
    server: "Server", inputs: list[embeddings.Input], entry: PassEntry, param: str
) -> list["array[float]"]:
    """Raises ApiError for what the model cannot take, naming `param`, and what `SinglePass.compute` raises."""
    longest, size = server.passes.limits.max_tokens, sum(len(one) for one in inputs if isinstance(one, str))
    most = longest * CHARS_A_TOKEN
    for i, one in enumerate(inputs):
        if isinstance(one, str) and len(one) > most:
            right = f"at most {longest} tokens, which are not more than {most}"
            raise ApiError(400, f"{param}[{i}] has {len(one)} characters; would be right: {right}", param)
    turn = partial(_ids, server, inputs)
    ids = await asyncio.to_thread(turn) if size > LONG_TEXT else turn()
    embeddings.check_ids(ids, server.vocab_size, longest, param)
    entry.job, entry.tokens = Job(ids, server.engine.now_ns()), sum(map(len, ids))
    return await server.passes.compute(entry.job)


def _ids(server: "Server", inputs: list[embeddings.Input]) -> list[list[int]]:
    return [server.tokenizer.encode(one) if isinstance(one, str) else one for one in inputs]


def _check_model(server: "Server", request: web.Request) -> None:
    """Raises ApiError for another model than this, as the path names it."""
    if request.match_info["model"] != server.model:
        name = shown(request.match_info["model"])
        raise ApiError(404, f"the model {name} does not exist; there is {server.model!r}")


async def v2(server: "Server", request: web.Request) -> web.StreamResponse:
    return json_response(200, kserve.server_metadata())


async def v2_live(server: "Server", request: web.Request) -> web.StreamResponse:
    await server.health(request)
    return json_response(200, b'{"live":true}')


async def v2_ready(server: "Server", request: web.Request) -> web.StreamResponse:
    await server.ready(request)
    return json_response(200, b'{"ready":true}')


async def v2_model(server: "Server", request: web.Request) -> web.StreamResponse:
    _check_model(server, request)
    return json_response(200, kserve.model_metadata(server.model, server.passes.encoder().embedding_size))


async def v2_model_ready(server: "Server", request: web.Request) -> web.StreamResponse:
    _check_model(server, request)
    await server.ready(request)
    return json_response(200, orjson.dumps({"name": server.model, "ready": True}))
