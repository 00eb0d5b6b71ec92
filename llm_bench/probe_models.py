"""What a target lists of its models, once it is up, and what it says of the one that is asked."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from llm_bench import answer, mistaken, statuses, talk, targets
from llm_bench.bodies import Ask
from llm_bench.dialects import DIALECTS
from llm_bench.errors import BenchError, TargetError
from llm_bench.exchange import COMPLETE, Exchange
from llm_bench.http1 import is_web_page
from llm_bench.protocol import json_of, path_for
from llm_bench.statuses import Said
from llm_bench.targets import Target

PAGE_S = 10.0  # for a page about a model
_STARTING = (502, 503, 504)  # what a server, or a gateway before it, says while it is not up


def listed(
    client: httpx.Client, target: Target, ready_s: float, say: Callable[[str], None]
) -> tuple[list[str], int | None, Said]:
    """Model names, the context limit where the server says it, and the answer that said so.

    Waits for a server that is still starting.
    """
    deadline_s, waited = time.monotonic() + ready_s, False
    method, address = targets.asked_first(target, target.url)
    while True:
        try:
            said_so = talk.whole_page(client, method, address, max(deadline_s - time.monotonic(), 0.1))
            if said_so.status not in _STARTING:
                break
            why = statuses.listed(target, said_so)
        except httpx.HTTPError as e:
            if said := mistaken.of_tls(target, e):
                raise TargetError(said) from None
            why = f"{type(e).__name__}: {e}"
            if isinstance(e, httpx.RemoteProtocolError) and "illegal" in why:  # no start-up ends in HTTP/1.1 from here
                raise TargetError(
                    f"target {target.name}: {target.url} answers, but not in HTTP/1.1 ({e}); a gRPC server is asked "
                    "with --api kserve-grpc"
                ) from None
        if time.monotonic() >= deadline_s:
            through = f" through the proxy {target.by_proxy()}" if target.by_proxy() else ""
            raise TargetError(
                f"target {target.name}: {target.url}{through} is not ready after {ready_s:g} s ({why}); "
                f"start the server or correct the URL; --ready-timeout waits longer{mistaken.of_close(target, why)}"
            )
        if not waited:
            say(f"waiting for {target.name} at {target.url}, up to {ready_s:g} s ({why})")
            waited = True
        time.sleep(min(0.5, max(deadline_s - time.monotonic(), 0)))
    status, _, body = said_so
    if mistaken.wants_key(status, body):
        raise TargetError(mistaken.of_key(target, address, said_so))
    if said := mistaken.of_page(target, body):
        raise TargetError(said)
    rows = DIALECTS[target.api].site.listed(body) if status // 100 == 2 else []
    limits = [row.limit for row in rows if not target.model or row.model == target.model]
    return [row.model for row in rows], limits[0] if limits else None, said_so


def described(client: httpx.Client, target: Target, model: str, models: list[str]) -> Mapping[str, Any]:
    """The target's `extra`, with what its server says of the model where bodies cannot be made without it.

    Raises BenchError where `extra` itself is wrong, TargetError where the server does not say enough.
    """
    row = target.dialect
    if row.site.described is None:
        return target.extra
    path, read = row.site.described
    address = target.url + path_for(path, model)
    try:
        status, headers, body = talk.whole_page(client, "GET", address, PAGE_S)
        return read(json_of(body) if status // 100 == 2 else {}, target.extra)
    except BenchError as e:
        raise BenchError(f"target {target.name}: {e}") from None
    except httpx.HTTPError as e:
        raise TargetError(f"target {target.name}: {address}: {type(e).__name__}: {e}") from None
    except ValueError as e:
        if status // 100 == 2 and not is_web_page(body):
            raise TargetError(f"target {target.name}: {address}: {e}") from None
    exchange = Exchange(status=status, ended=COMPLETE, headers=list(headers), pieces=[body] if body else [])
    got = answer.read(exchange, row, streamed=False, asked_out=None, pinned=False)
    raise TargetError(mistaken.of_answer(client, target, Ask(model), models, got, exchange, address))
