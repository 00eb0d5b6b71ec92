"""The engine over HTTP: OpenAI's completions and chat, health, metrics. One event a token, written without a queue."""

import asyncio
import hmac
import math
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import orjson
from aiohttp import HttpVersion11, web
from prometheus_client import CONTENT_TYPE_LATEST

from reference_engine.account import Account, account, server_timing, timings_of
from reference_engine.admission import Refused
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
        self.last: Output | None = None  # with a token; the sequence may be a step ahead when a stop string ends it
        self.parts: list[str] = []
        self.finish_reason = ""
        self.detokenizer = Detokenizer(tokenizer, sequence.token_ids)
        self.stops = StopText(sequence.params.stop)

    def take(self, output: Output) -> str:
        """The text that goes out with this token: the end token has none, a stop string ends the choice unseen."""
        self.tokens += 1
        self.last = output
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
        self.begun = asyncio.Event()  # its first output, be it an error, is there
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.open = len(choices)
        self.received_ns = choices[0].sequence.arrived_ns
        self.enqueued_ns = 0
        self.sent_ns = 0  # when its account was closed
        self.ended_last = choices[0]

    def submit(self) -> None:
        """Raises EngineDownError. From here on `close` must follow."""
        self.enqueued_ns = self.engine.now_ns()
        for choice in self.choices:
            self.engine.submit(choice.sequence, partial(self._sink, choice))

    def close(self) -> None:
        """However the request was left, also by cancellation, nothing of it goes on running."""
        for choice in self.choices:
            self.engine.abort(choice.sequence)
        if self.done.done() and not self.done.cancelled():
            self.done.exception()  # seen: its client may have left before

    def said(self) -> dict[str, Any]:
        """What the last event or the body says beside the choices; this closes the account."""
        first, *others = self.choices
        usage = usage_of(first.sequence.prompt_len, sum(c.tokens for c in self.choices), first.sequence.cached)
        said: dict[str, Any] = {}
        if self.ask.include_usage or not self.ask.stream:
            said["usage"] = usage
            if first.last and not others:  # several have no one first token
                said |= metrics_of(first.sequence, first.tokens, first.last.at_ns)
        if self.ask.include_timings:
            said["timings"] = timings_of(self.account(), self.ended_last.sequence, self.ended_last.tokens)
        return said

    def account(self) -> Account:
        """Closed at the first call."""
        self.sent_ns = self.sent_ns or self.engine.now_ns()
        choice = self.ended_last
        return account(self.received_ns, self.enqueued_ns, choice.sequence, choice.last, self.sent_ns)

    def _sink(self, choice: Choice, output: Output) -> None:
        self.begun.set()
        if output.finish_reason in ("error", "timeout"):
            if not self.done.done():
                self.done.set_exception(self._failure(output.finish_reason))
            return
        text = choice.take(output)
        if choice.finish_reason and not output.finish_reason:
            self.engine.abort(choice.sequence, "stop")
        if self.write:
            self.write(self._event(choice, text))
        else:
            choice.parts.append(text)
        if choice.finish_reason:
            self.ended_last = choice
            self.open -= 1
            if not self.open and not self.done.done():
                self.done.set_result(None)

    def _failure(self, reason: str) -> Exception:
        if reason == "error":
            return EngineDownError(self.engine.stopped)
        limit_s = self.engine.config.queue_timeout
        return Refused("timeout", f"not begun within {limit_s} s in the queue", self.engine.retry_after_s())

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
    """Routes over one engine. `api_key` guards /v1; None: everybody may. `log` takes one line a request."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        vocab_size: int,
        model: str,
        api_key: str | None = None,
        log: Callable[[bytes], object] | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.model = model
        self.api_key = api_key
        self.log = log
        self.open = 0  # requests that are being answered
        self.drained_by_ns = 0  # when what is open will be cut off; 0: not draining
        self.created = int(time.time())  # the wall clock: OpenAI's `created` is a date

    def drain(self) -> None:
        """Take no more requests, and say so to load balancers; who is being answered has `drain_timeout` to end."""
        self.drained_by_ns = self.engine.now_ns() + self.engine.config.drain_timeout * 1_000_000_000

    @property
    def drained(self) -> bool:
        """Whether there is nothing to wait for any more."""
        return not self.open or bool(self.engine.stopped) or self.engine.now_ns() >= self.drained_by_ns

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
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
        except Refused as error:
            status = 429 if error.reason == "queue_full" else 503
            response = _json(status, error_body(status, str(error)))
            response.headers["Retry-After"] = str(error.retry_after_s)
        except web.HTTPException as error:  # aiohttp's own: no such route, wrong method, body too large
            response = _json(error.status, error_body(error.status, error.text or error.reason))
        if not response.prepared and "X-Request-Id" not in response.headers:
            response.headers["X-Request-Id"] = _request_id(request)
        return response

    async def _health(self, request: web.Request) -> web.StreamResponse:
        if self.engine.stopped:
            raise EngineDownError(self.engine.stopped)
        return _json(200, b'{"status":"ok"}')

    async def _ready(self, request: web.Request) -> web.StreamResponse:
        self._check_draining()
        return await self._health(request)

    def _check_draining(self) -> None:
        """Raises Refused; it is worth another try when this process is gone and its successor may be there."""
        if self.drained_by_ns:
            left_s = math.ceil((self.drained_by_ns - self.engine.now_ns()) / 1e9)
            raise Refused("draining", "the server is shutting down", max(1, left_s))

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
            "waiting": scheduler.queued,
            "free_blocks": len(scheduler.blocks.free),
            "counts": asdict(scheduler.counts),
            "check": None if scheduler.busy else _verdict(scheduler.check),
        }

    async def _generate(self, kind: Kind, request: web.Request) -> web.StreamResponse:
        """One request from its arrival to its line in the log, whatever becomes of it."""
        entry = Entry(_request_id(request), self.engine.now_ns())
        self.open += 1
        try:
            response = await self._answer(kind, request, entry)
            response.headers.setdefault("X-Request-Id", entry.request_id)
            return response
        except asyncio.CancelledError:
            entry.outcome = "abort"
            raise
        except Refused as error:
            entry.outcome = error.reason
            self.engine.telemetry.refused[error.reason] += error.reason != "timeout"
            raise
        except EngineDownError:
            entry.outcome = "error"
            raise
        except (ApiError, TooLong, web.HTTPException):
            entry.outcome = "refused"
            raise
        finally:
            self.open -= 1
            if self.log:
                self.log(entry.line(self.engine.now_ns()))

    async def _answer(self, kind: Kind, request: web.Request, entry: "Entry") -> web.StreamResponse:
        self._check_draining()
        ask = parse(await _body(request), kind, self.model, self.vocab_size)
        if ask.priority and self.engine.config.policy != "priority":
            raise ApiError(
                400, f"priority needs the policy 'priority', this is {self.engine.config.policy!r}", "priority"
            )
        choices = self._choices(kind, ask, await self._tokens(ask), entry.received_ns)
        shell = Shell(kind, entry.request_id, int(time.time()), self.model)
        self.engine.check_queue()
        entry.answer = answer = Answer(self.engine, kind, ask, shell, choices)
        try:
            answer.submit()
            return await (_stream(answer, request, entry) if ask.stream else _whole(answer))
        finally:
            answer.close()

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
                client=ask.client,
            )
            choices.append(Choice(i, sequence, self.tokenizer))
        return choices


class Entry:
    """What is known of a request, as a line of the log."""

    def __init__(self, request_id: str, received_ns: int) -> None:
        self.request_id = request_id
        self.received_ns = received_ns
        self.outcome = ""  # why it has no whole answer; "": it has, and the finish reason says more
        self.answer: Answer | None = None

    def line(self, now_ns: int) -> bytes:
        """JSON. Of a request that never reached the scheduler all the time is http_in."""
        said: dict[str, Any] = {"request_id": self.request_id, "received_ns": self.received_ns}
        if self.answer is None:
            parts = Account(now_ns - self.received_ns, 0, 0, 0, 0, 0, 0)
            said["outcome"] = self.outcome
        else:
            parts = self.answer.account()
            choices = self.answer.choices
            said |= {
                "outcome": self.outcome or self.answer.ended_last.finish_reason or "abort",
                "stream": self.answer.ask.stream,
                "prompt_tokens": choices[0].sequence.prompt_len,
                "completion_tokens": sum(c.tokens for c in choices),
                "cached_tokens": choices[0].sequence.cached,
                "preemptions": sum(c.sequence.preemptions for c in choices),
            }
        return orjson.dumps(said | {"parts_ns": parts._asdict(), "total_ns": parts.total}) + b"\n"


async def _whole(answer: Answer) -> web.StreamResponse:
    await answer.done
    choices = []
    for choice in answer.choices:
        text = "".join(choice.parts)
        body = {"message": {"role": "assistant", "content": text}} if answer.kind is CHAT else {"text": text}
        end = {"logprobs": None, "finish_reason": choice.finish_reason, "stop_reason": choice.stops.found}
        choices.append({"index": choice.index} | body | end)
    response = _json(200, answer.shell.whole(choices, answer.said()))
    response.headers["Server-Timing"] = server_timing(answer.account())
    return response


async def _stream(answer: Answer, request: web.Request, entry: Entry) -> web.StreamResponse:
    """Headers at once, then an event a token, straight to the transport: a queue and a task switch double its cost.

    Where the queue has a time limit the headers wait for the first token: until then the status may have to be 503.
    Nothing waits for a slow reader: what it has not read is kept, at most one answer.
    """
    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers={**headers, "X-Request-Id": entry.request_id})
    early: list[bytes] = []  # events made before the headers were out
    answer.write = early.append
    if answer.engine.config.queue_timeout:
        await answer.begun.wait()
        if answer.done.done():
            answer.done.result()  # raises what there is to be said with a status
    transport = request.transport
    try:
        await response.prepare(request)
    except ConnectionError:
        transport = None
    if transport is None:
        entry.outcome = "abort"
        return response  # left before the headers
    chunked = request.version >= HttpVersion11

    def write(event: bytes) -> None:
        if not transport.is_closing():
            transport.write(b"%x\r\n%b\r\n" % (len(event), event) if chunked else event)

    for event in early:
        write(event)
    answer.write = write
    try:
        await answer.done
        said = answer.said()
        last = (answer.shell.last_event(said) if said else b"") + b"data: [DONE]\n\n"
    except (EngineDownError, Refused) as error:  # the status is sent: the stream says it, and ends without [DONE]
        down = isinstance(error, EngineDownError)
        entry.outcome = "error" if down else "timeout"
        last = b"data: " + error_body(500 if down else 503, str(error)) + b"\n\n"
    try:
        await response.write_eof(last)
    except ConnectionError:  # it left in this very moment; its handler could not be cancelled in time
        entry.outcome = entry.outcome or "abort"
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
