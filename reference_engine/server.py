"""The engine over HTTP: OpenAI's completions and chat, health, metrics. One event a token, written without a queue."""

import asyncio
import hmac
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import orjson
from aiohttp import HttpVersion11, web
from prometheus_client import CONTENT_TYPE_LATEST

from reference_engine.engine import Engine, EngineDownError
from reference_engine.openai_api import (
    CHAT,
    COMPLETION,
    DEFAULT_MAX_TOKENS,
    ApiError,
    Ask,
    Kind,
    Shell,
    StopText,
    error_body,
    metrics_of,
    parse,
    usage_of,
)
from reference_engine.scheduler import Output, TooLong
from reference_engine.sequence import Sequence
from reference_engine.tokenizer import ChatError, Detokenizer, Tokenizer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES = 16 * 2**20  # a long context's token ids as JSON are about 8 bytes each
LONG_TEXT = 4096  # characters; above, tokenising takes ms and would stall every stream: it goes to a thread
SHUTDOWN_S = 2.0


class Choice:
    """One sequence and the text it has become so far."""

    def __init__(self, index: int, sequence: Sequence, tokenizer: Tokenizer) -> None:
        self.index = index
        self.sequence = sequence
        self.tokens = 0
        self.last_ns = 0  # of the last token taken; the sequence may be a step ahead when a stop string ends it
        self.parts: list[str] = []
        self.finish_reason = ""
        self.detokenizer = Detokenizer(tokenizer, sequence.token_ids)
        self.stops = StopText(sequence.params.stop)

    def take(self, output: Output) -> str:
        """The text that goes out with this token: the end token has none, a stop string ends the choice unseen."""
        self.tokens += 1
        self.last_ns = output.at_ns
        self.finish_reason = output.finish_reason
        text = "" if output.finish_reason == "stop" else self.detokenizer.push(output.token)
        if output.finish_reason:
            text += self.detokenizer.flush()
        if self.tokens >= self.sequence.params.min_tokens:
            text = self.stops.push(text, last=bool(output.finish_reason))
            if self.stops.found is not None:
                self.finish_reason = "stop"
        return text


class Answer:
    """The choices of one request on their way to its client."""

    def __init__(self, engine: Engine, kind: Kind, ask: Ask, shell: Shell, choices: list[Choice]) -> None:
        self.engine = engine
        self.kind = kind
        self.ask = ask
        self.shell = shell
        self.choices = choices
        self.write: Callable[[bytes], None] | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.open = len(choices)

    async def run(self) -> None:
        """Until the last choice has ended. However it is left, also by cancellation, nothing of it goes on running."""
        try:
            for choice in self.choices:
                self.engine.submit(choice.sequence, partial(self._sink, choice))
            await self.done
        finally:
            for choice in self.choices:
                self.engine.abort(choice.sequence)

    def usage(self) -> dict[str, Any]:
        first = self.choices[0].sequence
        return usage_of(first.prompt_len, sum(c.tokens for c in self.choices), first.cached)

    def metrics(self) -> dict[str, Any]:
        """Of one choice; several have no one first token."""
        first, *others = self.choices
        return {} if others else metrics_of(first.sequence, first.tokens, first.last_ns)

    def _sink(self, choice: Choice, output: Output) -> None:
        if output.finish_reason == "error":
            if not self.done.done():
                self.done.set_exception(EngineDownError(self.engine.stopped))
            return
        text = choice.take(output)
        if choice.finish_reason and not output.finish_reason:
            self.engine.abort(choice.sequence, "stop")
        if self.write:
            self.write(self._event(choice, text))
        else:
            choice.parts.append(text)
        if choice.finish_reason:
            self.open -= 1
            if not self.open and not self.done.done():
                self.done.set_result(None)

    def _event(self, choice: Choice, text: str) -> bytes:
        usage = b""
        if self.ask.continuous_usage:
            sequence = choice.sequence
            usage = b',"usage":' + orjson.dumps(usage_of(sequence.prompt_len, choice.tokens, sequence.cached))
        event = self.shell.event(choice.index, text, choice.finish_reason, choice.stops.found, usage)
        if choice.tokens == 1 and self.kind is CHAT:
            return self.shell.role_event(choice.index) + event
        return event


class Server:
    """Routes over one engine. `api_key` guards /v1; None: everybody may."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, vocab_size: int, model: str, api_key: str | None = None
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.model = model
        self.api_key = api_key
        self.created = int(time.time())  # the wall clock: OpenAI's `created` is a date

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/engine", self._engine)
        app.router.add_post("/v1/completions", partial(self._generate, COMPLETION))
        app.router.add_post("/v1/chat/completions", partial(self._generate, CHAT))
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Key, request id, and every refusal as an OpenAI error object."""
        try:
            if self.api_key is not None and request.path.startswith("/v1/"):
                given = request.headers.get("Authorization", "")
                if not hmac.compare_digest(given.encode(errors="surrogateescape"), b"Bearer " + self.api_key.encode()):
                    raise ApiError(401, "the API key is missing or wrong", "Authorization")
            response = await handler(request)
        except ApiError as error:
            response = _json(error.status, error.body())
        except TooLong as error:
            response = _json(400, error_body(400, str(error), "max_tokens"))
        except EngineDownError as error:
            response = _json(500, error_body(500, str(error)))
        except web.HTTPException as error:  # aiohttp's own: no such route, wrong method, body too large
            response = _json(error.status, error_body(error.status, error.text or error.reason))
        if not response.prepared and "X-Request-Id" not in response.headers:
            response.headers["X-Request-Id"] = _request_id(request)
        return response

    async def _health(self, request: web.Request) -> web.StreamResponse:
        if self.engine.stopped:
            raise EngineDownError(self.engine.stopped)
        return _json(200, b'{"status":"ok"}')

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self.engine.telemetry.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        model = {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "reference_engine",
            "max_model_len": self.engine.config.context,
        }
        return _json(200, orjson.dumps({"object": "list", "data": [model]}))

    async def _engine(self, request: web.Request) -> web.StreamResponse:
        """Effective configuration and state; at idle also whether every block came back."""
        return _json(200, orjson.dumps(await self.engine.ask(self._state)))

    def _state(self) -> dict[str, Any]:
        scheduler = self.engine.scheduler
        return {
            "config": asdict(self.engine.config),
            "context": self.engine.config.context,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "free_blocks": len(scheduler.blocks.free),
            "counts": asdict(scheduler.counts),
            "check": None if scheduler.busy else _verdict(scheduler.check),
        }

    async def _generate(self, kind: Kind, request: web.Request) -> web.StreamResponse:
        arrived_ns = self.engine.now_ns()
        ask = parse(await _body(request), kind, self.model, self.vocab_size)
        if ask.priority and self.engine.config.policy != "priority":
            raise ApiError(
                400, f"priority needs the policy 'priority', this is {self.engine.config.policy!r}", "priority"
            )
        choices = self._choices(kind, ask, await self._tokens(ask), arrived_ns)
        answer_id = _request_id(request)
        shell = Shell(kind, answer_id, int(time.time()), self.model)
        answer = Answer(self.engine, kind, ask, shell, choices)
        if ask.stream:
            return await _stream(answer, request, answer_id)
        response = await _whole(answer)
        response.headers["X-Request-Id"] = answer_id
        return response

    async def _tokens(self, ask: Ask) -> list[int]:
        """Token ids of the prompt. Raises ApiError."""
        if ask.ids:
            return ask.ids
        turn: Callable[[], list[int]]
        if ask.messages:
            turn, size = partial(self.tokenizer.chat, ask.messages), sum(len(m["content"]) for m in ask.messages)
        else:
            turn, size = partial(self.tokenizer.encode, ask.text), len(ask.text)
        try:
            return await asyncio.to_thread(turn) if size > LONG_TEXT else turn()
        except ChatError as error:
            raise ApiError(400, str(error), "messages") from error

    def _choices(self, kind: Kind, ask: Ask, ids: list[int], arrived_ns: int) -> list[Choice]:
        """n sequences of one prompt; where blocks are shared, the first computes it. Raises TooLong."""
        room = max(1, self.engine.config.context - len(ids))
        default = room if kind is CHAT else min(DEFAULT_MAX_TOKENS, room)
        params = replace(ask.sampling, max_tokens=default if ask.max_tokens is None else ask.max_tokens)
        shares = self.engine.config.prefix_caching and len(ids) > self.engine.config.block_size
        choices: list[Choice] = []
        for i in range(ask.n):
            sequence = self.engine.sequence(
                ids,
                params if params.seed is None else replace(params, seed=params.seed + i),
                arrived_ns=arrived_ns,
                priority=ask.priority,
                salt=ask.salt,
                leader=choices[0].sequence if choices and shares else None,
            )
            choices.append(Choice(i, sequence, self.tokenizer))
        return choices


async def _whole(answer: Answer) -> web.StreamResponse:
    await answer.run()
    choices = []
    for choice in answer.choices:
        text = "".join(choice.parts)
        body = {"message": {"role": "assistant", "content": text}} if answer.kind is CHAT else {"text": text}
        end = {"logprobs": None, "finish_reason": choice.finish_reason, "stop_reason": choice.stops.found}
        choices.append({"index": choice.index} | body | end)
    return _json(200, answer.shell.whole(choices, answer.usage(), answer.metrics()))


async def _stream(answer: Answer, request: web.Request, answer_id: str) -> web.StreamResponse:
    """Headers at once, then an event a token, straight to the transport: a queue and a task switch double its cost.

    Nothing waits for a slow reader: what it has not read is kept, at most one answer.
    """
    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers={**headers, "X-Request-Id": answer_id})
    transport = request.transport
    try:
        await response.prepare(request)
    except ConnectionError:
        transport = None
    if transport is None:
        return response  # left before the headers
    chunked = request.version >= HttpVersion11

    def write(event: bytes) -> None:
        if not transport.is_closing():
            transport.write(b"%x\r\n%b\r\n" % (len(event), event) if chunked else event)

    answer.write = write
    try:
        await answer.run()
    except EngineDownError as error:  # the status is sent: the stream says it, and ends without [DONE]
        await response.write_eof(b"data: " + error_body(500, str(error)) + b"\n\n")
        return response
    usage = answer.shell.last_event(answer.usage(), answer.metrics()) if answer.ask.include_usage else b""
    await response.write_eof(usage + b"data: [DONE]\n\n")
    return response


def _request_id(request: web.Request) -> str:
    """The client's own, or one made up."""
    return request.headers.get("X-Request-Id") or uuid.uuid4().hex


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a {type(body).__name__}; would be right: an object")
    return body


def _json(status: int, body: bytes) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json")


def _verdict(check: Callable[[], None]) -> str:
    try:
        check()
    except AssertionError as error:
        return str(error)
    return "ok"


async def listen(server: Server, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Start to accept; (runner to clean up, port that was bound). A client that leaves cancels its handler."""
    runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    await web.TCPSite(runner, host, port, backlog=1024).start()
    return runner, int(runner.addresses[0][1])
