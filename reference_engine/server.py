"""The engine over HTTP: a table of routes, who may use them, and what becomes of each request."""

import asyncio
import hmac
import logging
import math
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CONTENT_TYPE_LATEST

from reference_engine import faults, kserve, openapi, pass_routes, scoring
from reference_engine.admission import Refused
from reference_engine.answer import FAILURES, Answer, Choice, Entry
from reference_engine.engine import Engine, EngineDownError, out_of_memory
from reference_engine.faults import Fault
from reference_engine.intake import CHARS_A_TOKEN as CHARS_A_TOKEN
from reference_engine.intake import LONG_TEXT, body_of, own_id
from reference_engine.intake import MAX_BODY_BYTES as MAX_BODY_BYTES
from reference_engine.lora import Adapters, Loaded
from reference_engine.openai_api import (
    CHAT,
    COMPLETION,
    DEFAULT_MAX_TOKENS,
    ApiError,
    Ask,
    Kind,
    Shell,
    error_body,
    parse,
    shown,
    usage_of,
)
from reference_engine.reply import delay, error_response, json_response, outcome_of, reset, stream, whole
from reference_engine.scheduler import TooLong
from reference_engine.single_pass import SinglePass
from reference_engine.telemetry import REFUSED as REFUSED_REASONS
from reference_engine.tokenizer import ChatError, Tokenizer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

SHUTDOWN_S = 2.0


class Server:
    """Routes over one engine. `api_key` guards what is not open; None: everybody may. `log` takes a line a request."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        vocab_size: int,
        model: str,
        api_key: str | None = None,
        log: Callable[[bytes], object] | None = None,
        allow_faults: bool = False,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.model = model
        self.api_key = api_key
        self.log = log
        self.allow_faults = allow_faults
        self.passes = SinglePass(engine)
        self.adapters = Adapters(engine, model, engine.config.lora_dir, engine.config.max_lora_rank)
        self._scores = asyncio.Lock()  # a text that is scored has KV beside the pool: one at a time
        self._limited: WeakSet[asyncio.BaseTransport] = WeakSet()  # connections whose reader has a limit
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
        app.on_cleanup.append(self._close)
        for (method, path), route in ROUTES.items():
            if self.allow_faults or path != "/fault":
                app.router.add_route(method, path, partial(route.handle, self))
                if method == "GET":
                    app.router.add_route("HEAD", path, partial(route.handle, self))
        return app

    async def _close(self, app: web.Application) -> None:
        await self.passes.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Key, request id, and every refusal as an error object: OpenAI's, or KServe's below /v2."""
        said = kserve.error_body if request.path.startswith("/v2") else error_body
        self._limit_reading(request)
        try:
            self._check_key(request)
            response = await handler(request)
        except (ApiError, EngineDownError, Refused) as error:
            response = error_response(error, said)
        except web.HTTPException as error:  # aiohttp's own: no such route, wrong method, body too large
            text = error.text or error.reason
            if error.status in (404, 405):
                text = f"{request.method} {shown(request.path)} is not served; would be right: what /openapi.json lists"
            response = json_response(error.status, said(error.status, text, None))
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
        if not response.prepared and "X-Request-Id" not in response.headers:
            response.headers["X-Request-Id"] = own_id(request) or uuid.uuid4().hex
        return response

    def _limit_reading(self, request: web.Request) -> None:
        """Who reads nothing for so long is cut off by the kernel (Linux): we wait for none and keep his answer."""
        transport = request.transport
        if transport is None or transport in self._limited or not hasattr(socket, "TCP_USER_TIMEOUT"):
            return
        self._limited.add(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self.engine.config.client_timeout * 1000)

    def _check_key(self, request: web.Request) -> None:
        """Raises ApiError. In constant time: how much of a wrong key is right must not show."""
        route = ROUTES.get(("GET" if request.method == "HEAD" else request.method, request.path))
        if self.api_key is None or (route and route.open):
            return
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), b"Bearer " + self.api_key.encode()):
            raise ApiError(401, "the API key is missing or wrong", "Authorization")

    async def health(self, request: web.Request) -> web.StreamResponse:
        self.engine.check_alive()
        return json_response(200, b'{"status":"ok"}')

    async def ready(self, request: web.Request) -> web.StreamResponse:
        """503 also where health is 500: not ready is not ready."""
        self._check_draining()
        try:
            return await self.health(request)
        except EngineDownError as error:
            raise ApiError(503, str(error), retry_after_s=error.retry_after_s) from error

    def _check_draining(self) -> None:
        """Raises Refused; it is worth another try when this process is gone and its successor may be there."""
        if self.drained_by_ns:
            left_s = math.ceil((self.drained_by_ns - self.engine.now_ns()) / 1e9)
            raise Refused("draining", "the server is shutting down", max(1, left_s))

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self.engine.telemetry.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def openapi(self, request: web.Request) -> web.StreamResponse:
        served = [route for route in ROUTES if self.allow_faults or route[1] != "/fault"]
        return json_response(200, orjson.dumps(openapi.document(served, self.vocab_size, MAX_BODY_BYTES)))

    async def models(self, request: web.Request) -> web.StreamResponse:
        common = {"object": "model", "created": self.created, "owned_by": "reference_engine"}
        limits = {"max_model_len": self.engine.config.context}
        rows = [{"id": self.model, **common, **limits}]
        rows += [
            {"id": adapter.name, **common, "parent": self.model, "root": adapter.path, **limits}
            for adapter in self.adapters.loaded.values()
        ]
        return json_response(200, orjson.dumps({"object": "list", "data": rows}))

    async def load_adapter(self, request: web.Request) -> web.StreamResponse:
        self._check_draining()
        return web.Response(text=await self.adapters.load(await body_of(request)))

    async def unload_adapter(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=await self.adapters.unload(await body_of(request)))

    async def state(self, request: web.Request) -> web.StreamResponse:
        """Effective configuration and state; at idle also whether every block came back."""
        return json_response(200, orjson.dumps(await self.engine.ask(self._state)))

    def _state(self) -> dict[str, Any]:
        scheduler = self.engine.scheduler
        return {
            "config": asdict(self.engine.config),
            "context": self.engine.config.context,
            "running": len(scheduler.running),
            "waiting": scheduler.queued,
            "free_blocks": len(scheduler.blocks.free),
            "counts": asdict(scheduler.counts),
            "restarts": self.engine.telemetry.restarts,
            "check": None if scheduler.busy else _verdict(scheduler.check),
        }

    async def plant_fault(self, request: web.Request) -> web.StreamResponse:
        try:
            self.engine.plant(faults.read(await body_of(request)))
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        return await self.list_faults(request)

    async def list_faults(self, request: web.Request) -> web.StreamResponse:
        active = [{"kind": f.kind, **f.fields, "seen": f.seen, "hits": f.hits} for f in self.engine.faults if f.active]
        return json_response(200, orjson.dumps({"active": active}))

    async def clear_faults(self, request: web.Request) -> web.StreamResponse:
        await self.engine.clear_faults()
        return await self.list_faults(request)

    async def generate(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        entry = Entry(own_id(request) or uuid.uuid4().hex, self.engine.now_ns())
        return await self.logged(request, entry, partial(self._answer, kind, request, entry))

    async def logged(
        self, request: web.Request, entry: Entry, answer: Callable[[dict[str, Fault]], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """One request from its arrival to its line in the log, whatever becomes of it. `answer` takes its troubles."""
        self.open += 1
        try:
            self._check_draining()
            troubles = faults.struck(self.engine.faults, "request") if self.engine.faults else {}
            if "http_error" in troubles:
                return self._http_error(troubles["http_error"].fields["status"], request, entry)
            response = await answer(troubles)
            response.headers.setdefault("X-Request-Id", entry.request_id)
            return response
        except asyncio.CancelledError:
            entry.outcome = entry.outcome or "abort"
            raise
        except (Refused, EngineDownError) as error:
            entry.outcome = outcome_of(error)
            if entry.outcome in REFUSED_REASONS:
                self.engine.telemetry.refused[entry.outcome] += 1
            raise
        except (ApiError, web.HTTPException) as error:
            entry.outcome = entry.outcome or ("error" if error.status >= 500 else "refused")
            raise
        finally:
            self.open -= 1
            if self.log:
                self.log(entry.line(self.engine.now_ns()))

    async def _answer(
        self, kind: Kind, request: web.Request, entry: Entry, troubles: dict[str, Fault]
    ) -> web.StreamResponse:
        body = await body_of(request)
        if kind is COMPLETION and scoring.is_scoring(body):
            return await self._score(body, entry, troubles)
        with self.adapters.used(body.get("model")) as adapter:
            model = adapter.name if adapter else self.model
            ask = parse(body, kind, model, self.vocab_size)
            if ask.priority and self.engine.config.policy != "priority":
                raise ApiError(
                    400, f"priority needs the policy 'priority', this is {self.engine.config.policy!r}", "priority"
                )
            choices = self._choices(kind, ask, await self._tokens(ask), entry.received_ns, adapter)
            shell = Shell(kind, entry.request_id, int(time.time()), model)
            self.engine.check_queue()
            entry.answer = answer = Answer(self.engine, kind, ask, shell, choices)
            try:
                answer.submit()
                if not ask.stream:
                    return await whole(answer, troubles)
                if self.engine.faults:
                    troubles |= faults.struck(self.engine.faults, "stream")
                return await stream(answer, request, entry, troubles)
            finally:
                answer.close()

    async def _score(self, body: dict[str, Any], entry: Entry, troubles: dict[str, Fault]) -> web.StreamResponse:
        """The log probabilities of a prompt, a piece of it between two steps; who leaves ends it after that piece."""
        self.engine.check_alive()
        model = body.get("model")
        if isinstance(model, str) and model in self.adapters.loaded:
            raise ApiError(400, "echo: a LoRA adapter scores nothing; would be right: the model itself", "model")
        ask = scoring.parse_scoring(body, self.model, self.vocab_size)
        ids = await self._tokens(ask)
        if len(ids) > self.engine.config.context:
            text = f"the prompt has {len(ids)} tokens; would be right: at most {self.engine.config.context}"
            raise ApiError(400, text, "prompt")
        scored: list[scoring.Scored] = []
        async with self._scores:
            self.engine.check_alive()
            runner = scoring.scorer(self.engine.runner)
            if runner is None:
                raise ApiError(400, f"echo: the model {self.model!r} is simulated and has no log probabilities", "echo")
            try:
                pieces = scoring.score(runner, ids, body["logprobs"])
            except ValueError as error:
                raise ApiError(400, str(error), "prompt") from error
            while piece := await self.engine.ask(partial(_piece, pieces)):
                scored += piece
                if any(s.logprob is not None and not math.isfinite(s.logprob) for s in piece):
                    raise FAILURES["nonfinite"](self.engine)
        if piece is None:
            self.engine.telemetry.failed_allocations += 1
            raise Refused("oom", "memory did not suffice to score the prompt", self.engine.retry_after_s())
        logprobs = await asyncio.to_thread(scoring.as_completion, self.tokenizer, scored)
        text = ask.text or self.tokenizer.decode(ids)
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": "length", "stop_reason": None}
        entry.outcome = "length"
        await delay(troubles)
        shell = Shell(COMPLETION, entry.request_id, int(time.time()), self.model)
        return json_response(200, shell.whole([choice], {"usage": usage_of(len(ids), 0, 0)}))

    def _http_error(self, status: str, request: web.Request, entry: Entry) -> web.StreamResponse:
        """A planted fault. Raises ApiError unless it is a reset."""
        entry.outcome = "fault"
        if status != "reset":
            raise ApiError(int(status), "a planted fault", retry_after_s=None if status == "500" else 1)
        if request.transport:
            reset(request.transport)
        return web.Response()  # to nobody

    async def _tokens(self, ask: Ask) -> list[int]:
        """Token ids of the prompt. Raises ApiError."""
        if ask.ids:
            return ask.ids
        turn: Callable[[], list[int]]
        if ask.messages:
            turn, size = partial(self.tokenizer.chat, ask.messages), sum(len(m["content"]) for m in ask.messages)
        else:
            turn, size = partial(self.tokenizer.encode, ask.text), len(ask.text)
        most = self.engine.config.context * CHARS_A_TOKEN
        if size > most:
            param = "messages" if ask.messages else "prompt"
            raise ApiError(400, f"a prompt of {size} characters; would be right: at most {most}", param)
        try:
            return await asyncio.to_thread(turn) if size > LONG_TEXT else turn()
        except ChatError as error:
            raise ApiError(400, str(error), "messages") from error

    def _choices(self, kind: Kind, ask: Ask, ids: list[int], arrived_ns: int, adapter: Loaded | None) -> list[Choice]:
        """n sequences of one prompt; where blocks are shared, the first computes it. Raises ApiError: too long."""
        room = max(1, self.engine.config.context - len(ids))
        default = room if kind is CHAT else min(DEFAULT_MAX_TOKENS, room)
        params = replace(ask.sampling, max_tokens=default if ask.max_tokens is None else ask.max_tokens)
        if params.min_tokens > params.max_tokens:
            raise ApiError(
                400, f"min_tokens {params.min_tokens} is more than max_tokens {params.max_tokens}", "min_tokens"
            )
        shares = self.engine.config.prefix_caching and len(ids) > self.engine.config.block_size
        choices: list[Choice] = []
        for i in range(ask.n):
            try:
                sequence = self.engine.sequence(
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
            choices.append(Choice(i, sequence, self.tokenizer))
        return choices


class Route(NamedTuple):
    handle: Callable[[Server, web.Request], Awaitable[web.StreamResponse]]
    open: bool = False  # to everybody, also where a key is asked for


# What is served; `openapi` describes each.
ROUTES: dict[tuple[str, str], Route] = {
    ("GET", "/health"): Route(Server.health, open=True),
    ("GET", "/ready"): Route(Server.ready, open=True),
    ("GET", "/metrics"): Route(Server.metrics, open=True),
    ("GET", "/openapi.json"): Route(Server.openapi, open=True),
    ("GET", "/v1/models"): Route(Server.models),
    ("GET", "/v1/engine"): Route(Server.state),
    ("POST", "/v1/completions"): Route(partial(Server.generate, kind=COMPLETION)),
    ("POST", "/v1/chat/completions"): Route(partial(Server.generate, kind=CHAT)),
    ("POST", "/v1/embeddings"): Route(pass_routes.embed),
    ("POST", "/v1/load_lora_adapter"): Route(Server.load_adapter),
    ("POST", "/v1/unload_lora_adapter"): Route(Server.unload_adapter),
    ("GET", "/v2"): Route(pass_routes.v2),
    ("GET", "/v2/health/live"): Route(pass_routes.v2_live, open=True),
    ("GET", "/v2/health/ready"): Route(pass_routes.v2_ready, open=True),
    ("GET", "/v2/models/{model}"): Route(pass_routes.v2_model),
    ("GET", "/v2/models/{model}/ready"): Route(pass_routes.v2_model_ready),
    ("POST", "/v2/models/{model}/infer"): Route(pass_routes.infer),
    ("POST", "/fault"): Route(Server.plant_fault),
    ("GET", "/fault"): Route(Server.list_faults),
    ("DELETE", "/fault"): Route(Server.clear_faults),
}


def _piece(pieces: Iterator[list[scoring.Scored]]) -> list[scoring.Scored] | None:
    """The next; empty: there is none. None: memory did not suffice, which is no fault of the step loop it runs in."""
    try:
        return next(pieces, [])
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return None


def _verdict(check: Callable[[], None]) -> str:
    try:
        check()
    except AssertionError as error:
        return str(error)
    return "ok"


def _not_a_strangers(record: logging.LogRecord) -> bool:
    """Whether an error is ours: who sends what is no HTTP, or a body that cannot be read, fills no log."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | web.RequestPayloadError))


async def listen(server: Server, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Start to accept; (runner to clean up, port that was bound). A client that leaves cancels its handler.

    aiohttp's keep-alive time-out runs from a connection's start (since 3.14.4) and from an answer's end until the next
    head is whole.
    """
    logger = logging.getLogger(__name__)
    logger.addFilter(_not_a_strangers)
    runner = web.AppRunner(
        server.app(), access_log=None, logger=logger, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S,
        auto_decompress=False,  # `intake` does it, to a limit
        keepalive_timeout=server.engine.config.client_timeout,
    )  # fmt: skip
    await runner.setup()
    await web.TCPSite(runner, host, port, backlog=1024).start()
    return runner, port_of(runner.addresses)


def port_of(addresses: Sequence[tuple[Any, ...]]) -> int:
    """The port of the first IPv4 address, which is the one that is named; of several, each may have its own."""
    ipv4 = [address for address in addresses if len(address) == 2]  # IPv6 has four parts
    return int((ipv4 or addresses)[0][1])
