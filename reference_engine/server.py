"""The engine over HTTP: a table of routes, who may use them, and what becomes of each request."""

import asyncio
import hmac
import logging
import math
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CONTENT_TYPE_LATEST

from reference_engine import faults, kserve, openapi, pass_routes, text_routes
from reference_engine.admission import Refused
from reference_engine.answer import Entry
from reference_engine.engine import Engine, EngineDownError
from reference_engine.faults import Fault
from reference_engine.intake import MAX_BODY_BYTES, Bodies, body_of, own_id
from reference_engine.lora import Adapters
from reference_engine.openai_api import CHAT, COMPLETION, ApiError, error_body, shown
from reference_engine.reply import error_response, json_response, outcome_of, reset
from reference_engine.single_pass import SinglePass
from reference_engine.telemetry import REFUSED as REFUSED_REASONS
from reference_engine.tokenizer import Tokenizer

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
        self.bodies = Bodies()
        self.scores = asyncio.Lock()  # a text that is scored has KV beside the pool: one at a time
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
        app = web.Application(middlewares=[self._guard])
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
        except web.HTTPException as error:  # aiohttp's own: no such route, wrong method
            text = error.text or error.reason
            if error.status in (404, 405):
                text = f"{request.method} {shown(request.path)} is not served; would be right: what /openapi.json lists"
            response = json_response(error.status, said(error.status, text, None))
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
        finally:
            self.bodies.release(request)
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
        return web.Response(text=await self.adapters.load(await body_of(request, self.bodies)))

    async def unload_adapter(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=await self.adapters.unload(await body_of(request, self.bodies)))

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
            self.engine.plant(faults.read(await body_of(request, self.bodies)))
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        return await self.list_faults(request)

    async def list_faults(self, request: web.Request) -> web.StreamResponse:
        active = [{"kind": f.kind, **f.fields, "seen": f.seen, "hits": f.hits} for f in self.engine.faults if f.active]
        return json_response(200, orjson.dumps({"active": active}))

    async def clear_faults(self, request: web.Request) -> web.StreamResponse:
        await self.engine.clear_faults()
        return await self.list_faults(request)

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

    def _http_error(self, status: str, request: web.Request, entry: Entry) -> web.StreamResponse:
        """A planted fault. Raises ApiError unless it is a reset."""
        entry.outcome = "fault"
        if status != "reset":
            raise ApiError(int(status), "a planted fault", retry_after_s=None if status == "500" else 1)
        if request.transport:
            reset(request.transport)
        return web.Response()  # to nobody


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
    ("POST", "/v1/completions"): Route(partial(text_routes.generate, kind=COMPLETION)),
    ("POST", "/v1/chat/completions"): Route(partial(text_routes.generate, kind=CHAT)),
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
