"""Routes of generated text: OpenAI's completions and chats. Each is a function of the server and a request."""

import asyncio
import math
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from reference_engine import faults, scoring
from reference_engine.admission import Refused
from reference_engine.answer import FAILURES, Answer, Choice, Entry
from reference_engine.engine import out_of_memory
from reference_engine.faults import Fault
from reference_engine.intake import CHARS_A_TOKEN, LONG_TEXT, body_of, own_id
from reference_engine.lora import Loaded
from reference_engine.openai_api import (
    CHAT,
    COMPLETION,
    DEFAULT_MAX_TOKENS,
    ApiError,
    Ask,
    Kind,
    Shell,
    parse,
    usage_of,
)
from reference_engine.reply import delay, json_response, stream, whole
from reference_engine.scheduler import TooLong
from reference_engine.tokenizer import ChatError

if TYPE_CHECKING:
    from reference_engine.server import Server


async def generate(server: "Server", request: web.Request, kind: Kind) -> web.StreamResponse:
    entry = Entry(own_id(request) or uuid.uuid4().hex, server.engine.now_ns())
    return await server.logged(request, entry, partial(_answer, server, kind, request, entry))


async def _answer(
    server: "Server", kind: Kind, request: web.Request, entry: Entry, troubles: dict[str, Fault]
) -> web.StreamResponse:
    body = await body_of(request, server.bodies)
    if kind is COMPLETION and scoring.is_scoring(body):
        ask, top = _to_score(server, body)
        del body  # it may wait long for its turn
        return await _score(server, request, ask, top, entry, troubles)
    with server.adapters.used(body.get("model")) as adapter:
        model = adapter.name if adapter else server.model
        ask = parse(body, kind, model, server.vocab_size)
        del body  # an answer may take long, and needs nothing of it
        if ask.priority and server.engine.config.policy != "priority":
            raise ApiError(
                400, f"priority needs the policy 'priority', this is {server.engine.config.policy!r}", "priority"
            )
        choices = _choices(server, kind, ask, await _tokens(server, ask), entry.received_ns, adapter)
        ask = ask._replace(text="", ids=[], messages=[])
        server.bodies.release(request)
        shell = Shell(kind, entry.request_id, int(time.time()), model)
        server.engine.check_queue()
        entry.answer = answer = Answer(server.engine, kind, ask, shell, choices)
        try:
            answer.submit()
            if not ask.stream:
                return await whole(answer, troubles)
            if server.engine.faults:
                troubles |= faults.struck(server.engine.faults, "stream")
            return await stream(answer, request, entry, troubles)
        finally:
            answer.close()


def _to_score(server: "Server", body: dict[str, Any]) -> tuple[Ask, int]:
    """What to score, and how many likeliest tokens to tell of. Raises ApiError or EngineDownError."""
    server.engine.check_alive()
    model = body.get("model")
    if isinstance(model, str) and model in server.adapters.loaded:
        raise ApiError(400, "echo: a LoRA adapter scores nothing; would be right: the model itself", "model")
    return scoring.parse_scoring(body, server.model, server.vocab_size), body["logprobs"]


async def _score(
    server: "Server", request: web.Request, ask: Ask, top: int, entry: Entry, troubles: dict[str, Fault]
) -> web.StreamResponse:
    """The log probabilities of a prompt, a piece of it between two steps; who leaves ends it after that piece."""
    ids = await _tokens(server, ask)
    if len(ids) > server.engine.config.context:
        text = f"the prompt has {len(ids)} tokens; would be right: at most {server.engine.config.context}"
        raise ApiError(400, text, "prompt")
    server.bodies.count(request, len(ask.text or ids))  # what of it waits: text or ids
    scored: list[scoring.Scored] = []
    async with server.scores:
        server.engine.check_alive()
        runner = scoring.scorer(server.engine.runner)
        if runner is None:
            raise ApiError(400, f"echo: the model {server.model!r} is simulated and has no log probabilities", "echo")
        try:
            pieces = scoring.score(runner, ids, top)
        except ValueError as error:
            raise ApiError(400, str(error), "prompt") from error
        while piece := await server.engine.ask(partial(_piece, pieces)):
            scored += piece
            if any(s.logprob is not None and not math.isfinite(s.logprob) for s in piece):
                raise FAILURES["nonfinite"](server.engine)
    if piece is None:
        server.engine.telemetry.failed_allocations += 1
        raise Refused("oom", "memory did not suffice to score the prompt", server.engine.retry_after_s())
    logprobs = await asyncio.to_thread(scoring.as_completion, server.tokenizer, scored)
    text = ask.text or server.tokenizer.decode(ids)
    choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": "length", "stop_reason": None}
    entry.outcome = "length"
    await delay(troubles)
    shell = Shell(COMPLETION, entry.request_id, int(time.time()), server.model)
    return json_response(200, shell.whole([choice], {"usage": usage_of(len(ids), 0, 0)}))


async def _tokens(server: "Server", ask: Ask) -> list[int]:
    """Token ids of the prompt. Raises ApiError."""
    if ask.ids:
        return ask.ids
    turn: Callable[[], list[int]]
    if ask.messages:
        turn, size = partial(server.tokenizer.chat, ask.messages), sum(len(m["content"]) for m in ask.messages)
    else:
        turn, size = partial(server.tokenizer.encode, ask.text), len(ask.text)
    most = server.engine.config.context * CHARS_A_TOKEN
    if size > most:
        param = "messages" if ask.messages else "prompt"
        raise ApiError(400, f"a prompt of {size} characters; would be right: at most {most}", param)
    try:
        return await asyncio.to_thread(turn) if size > LONG_TEXT else turn()
    except ChatError as error:
        raise ApiError(400, str(error), "messages") from error


def _choices(
    server: "Server", kind: Kind, ask: Ask, ids: list[int], arrived_ns: int, adapter: Loaded | None
) -> list[Choice]:
    """n sequences of one prompt; where blocks are shared, the first computes it. Raises ApiError: too long."""
    room = max(1, server.engine.config.context - len(ids))
    default = room if kind is CHAT else min(DEFAULT_MAX_TOKENS, room)
    params = replace(ask.sampling, max_tokens=default if ask.max_tokens is None else ask.max_tokens)
    if params.min_tokens > params.max_tokens:
        raise ApiError(400, f"min_tokens {params.min_tokens} is more than max_tokens {params.max_tokens}", "min_tokens")
    shares = server.engine.config.prefix_caching and len(ids) > server.engine.config.block_size
    choices: list[Choice] = []
    for i in range(ask.n):
        try:
            sequence = server.engine.sequence(
                ids,
                params if params.seed is None else replace(params, seed=params.seed + i),
                arrived_ns=arrived_ns,
                priority=ask.priority,
                salt=adapter.salt(ask.salt) if adapter else ask.salt,
                adapter=adapter.number if adapter else 0,
                leader=choices[0].sequence if choices and shares else None,
                client=ask.client,
            )
        except TooLong as error:
            prompt = "messages" if kind is CHAT else "prompt"
            raise ApiError(400, str(error), prompt if error.by_prompt else ask.max_tokens_field) from error
        choices.append(Choice(i, sequence, server.tokenizer))
    return choices


def _piece(pieces: Iterator[list[scoring.Scored]]) -> list[scoring.Scored] | None:
    """The next; empty: there is none. None: memory did not suffice, which is no fault of the step loop it runs in."""
    try:
        return next(pieces, [])
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return None
