"""One small request to a target outside of any load: through httpx, read by the dialect and answer code of the load."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import httpx

from llm_bench import answer, clock, targets
from llm_bench.bodies import Ask
from llm_bench.dialect_kserve import BODY_HEADERS, no_headers
from llm_bench.errors import BenchError
from llm_bench.exchange import (
    CLOSED,
    COMPLETE,
    CONNECT_ERROR,
    CONNECT_TIMEOUT,
    PROTOCOL_ERROR,
    TOTAL_TIMEOUT,
    TRUNCATED,
    TTFT_TIMEOUT,
    Exchange,
    Timeouts,
)
from llm_bench.grpc_talk import GrpcPages
from llm_bench.request import Request
from llm_bench.statuses import Said
from llm_bench.targets import Target

PAGE_BYTES = 1 << 24  # of a page; what is longer is no list of models
_BUSY = (429, 503)  # what a server says that takes fewer at once, and how an exchange ends with one that says nothing
_CROWDED = (CONNECT_ERROR, CONNECT_TIMEOUT, TTFT_TIMEOUT, TOTAL_TIMEOUT, TRUNCATED)

T = TypeVar("T")


def client_of(target: Target, timeouts: Timeouts) -> httpx.Client:
    """One that says what the load says: same headers, no proxy of the environment, nothing compressed."""
    headers = targets.auth_headers(target)
    if target.dialect.transport == "grpc":
        limits = httpx.Timeout(_answer_s(timeouts), connect=timeouts.connect_s)
        pages = GrpcPages(target.name, target.url, headers, target.cafile, target.cert, target.key or target.cert)
        return httpx.Client(transport=pages, timeout=limits, trust_env=False)
    ours = {"User-Agent": "llm-bench", "Accept": "*/*", "Accept-Encoding": "identity"}
    ours["Content-Type"] = "application/json"
    theirs = {name.lower() for name, _ in headers}
    headers += [(name, value) for name, value in ours.items() if name.lower() not in theirs]
    limits = httpx.Timeout(_answer_s(timeouts), connect=timeouts.connect_s)
    return httpx.Client(
        headers=headers, timeout=limits, verify=targets.tls(target), trust_env=False, proxy=targets.httpx_proxy(target)
    )


def _answer_s(timeouts: Timeouts) -> float | None:
    return min((s for s in (timeouts.ttft_s, timeouts.total_s) if s is not None), default=None)


def page(client: httpx.Client, method: str, url: str, limit_s: float) -> tuple[int, bytes]:
    """Status and body, as `whole_page`."""
    said = whole_page(client, method, url, limit_s)
    return said.status, said.body


def whole_page(client: httpx.Client, method: str, url: str, limit_s: float) -> Said:
    """Read for `limit_s` in all. Raises httpx.HTTPError."""
    begun_s, body = time.monotonic(), b""
    with client.stream(method, url, content=b"{}" if method == "POST" else None, timeout=limit_s) as response:
        for piece in response.iter_bytes():
            body += piece
            if time.monotonic() - begun_s > limit_s:
                raise httpx.ReadTimeout(f"the answer has not ended after {limit_s:g} s")
            if len(body) > PAGE_BYTES:
                body = b""
                break
    return Said(response.status_code, [(name.lower(), value) for name, value in response.headers.raw], body)


def ask(
    client: httpx.Client, target: Target, request: Request, ask: Ask, timeouts: Timeouts
) -> tuple[answer.Answer, Exchange]:
    """One probe request, stamped as `wire` would."""
    dialect = target.dialect
    exchange = Exchange()
    try:
        body = dialect.encode(request, ask)
    except BenchError as e:  # no line of a trace: what cannot be said is the target's own
        raise BenchError(f"target {target.name}: {str(e).removeprefix(f'line {request.line}: ')}") from None
    url = target.url + dialect.path_of(ask.model, ask.stream)
    exchange.sent_ns = clock.now_ns()
    last_ns = None if timeouts.total_s is None else exchange.sent_ns + round(timeouts.total_s * 1e9)
    try:
        # A connection of its own: one kept alive may be closed by the server just now (llama.cpp after each stream).
        headers = {"Connection": "close", **dict(BODY_HEADERS.get(dialect.transport, no_headers)(body))}
        with client.stream("POST", url, content=body, headers=headers) as response:
            exchange.status = response.status_code
            exchange.headers = [(k.lower(), v) for k, v in response.headers.raw]
            exchange.ended = COMPLETE if response.headers.get("transfer-encoding") else CLOSED
            for piece in response.iter_raw():
                exchange.read_ns.append(clock.now_ns())
                exchange.pieces.append(piece)
                if last_ns is not None and exchange.read_ns[-1] > last_ns:
                    exchange.ended, exchange.error = TOTAL_TIMEOUT, f"not ended within {timeouts.total_s:g} s"
                    break
    except httpx.ConnectTimeout:
        exchange.ended, exchange.error = CONNECT_TIMEOUT, f"not connected within {timeouts.connect_s:g} s"
    except httpx.TimeoutException:
        exchange.ended, exchange.error = TTFT_TIMEOUT, f"no answer within {client.timeout.read:g} s"
    except httpx.HTTPError as e:
        exchange.ended, exchange.error = _end_of(e, exchange), f"{type(e).__name__}: {e}"
    exchange.end_ns = clock.now_ns()
    want = dialect.takes.asked(request, ask)
    got = answer.read(
        exchange,
        dialect,
        streamed=ask.stream,
        asked_out=want.out,
        pinned=False,
        finish_expected=False,
        choices=want.choices,
    )
    return got, exchange


def _end_of(e: httpx.HTTPError, exchange: Exchange) -> str:
    """As `wire` would have it: what had begun to answer was reached, and a cut behind the last word loses nothing."""
    if not exchange.status:
        return CONNECT_ERROR
    return TRUNCATED if isinstance(e, httpx.NetworkError) or "peer closed connection" in str(e) else PROTOCOL_ERROR


def aside(what: Callable[[], T]) -> "Future[T]":
    """Asked in a thread of its own, while the caller asks something else; `result()` gives or raises what it did."""
    future: Future[T] = Future()

    def answer() -> None:
        try:
            future.set_result(what())
        except BaseException as e:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(e)

    threading.Thread(target=answer, daemon=True).start()  # a daemon: Ctrl-C waits for no server
    return future


def ask_together(
    client: httpx.Client, target: Target, requests: Sequence[Request], asked: Ask, timeouts: Timeouts
) -> list[tuple[answer.Answer, Exchange]]:
    """Each request at once, on a connection of its own: for what is read of the answers, and not of their times.

    Those that failed for want of room are asked again, alone: turned away, refused, or behind the others for too long.
    """

    def one(request: Request) -> tuple[answer.Answer, Exchange]:
        return ask(client, target, request, asked, timeouts)

    waiting = [aside(partial(one, request)) for request in requests]
    found = [future.result() for future in waiting]
    return [
        one(request)
        if exchange.status in _BUSY or (exchange.ended in _CROWDED and got.outcome != "ok")
        else (got, exchange)
        for request, (got, exchange) in zip(requests, found, strict=True)
    ]
