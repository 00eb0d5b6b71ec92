"""Sends a request again, if asked to, after a refusal that may pass; the first attempt stays visible."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from typing import NamedTuple

from llm_bench.clock import now_ns
from llm_bench.exchange import CLOSED, COMPLETE, CONNECT_ERROR, CONNECT_TIMEOUT, CUT, Exchange

RETRIED_STATUSES = frozenset((429, 500, 502, 503, 504))
_FIRST_WAIT_S = 0.5  # doubles with each attempt; Retry-After comes before it
_LONGEST_WAIT_S = 3600.0  # without a total time-out: a server's word alone must not stop a run for a day

Send = Callable[[bytes, float | None], Awaitable[Exchange]]


class Tried(NamedTuple):
    """A request and its attempts. `exchange` is the last one's, with the *first* one's sent_ns.

    Latency so runs from the first attempt, and the waiting between attempts is in it.
    """

    exchange: Exchange
    attempts: int
    first: Exchange  # the same object as `exchange` when there was one attempt
    retry_wait_ns: int


def retrying(
    send: Send, retries: int, limit_s: float | None = None
) -> Callable[[bytes, float | None], Awaitable[Tried]]:
    """`send`, again up to `retries` times after a status of 429, 500, 502, 503, 504 or a failed connect.

    Waits as long as Retry-After says, else 0.5 s, doubled each time. A wait of more than `limit_s` (the total time-out;
    None: an hour) is not begun: the last answer stands, and its error says why. A task cancelled while it waits gives a
    CUT. What `send` raises is passed on.
    """

    async def tried(payload: bytes, cancel_after_s: float | None) -> Tried:
        exchange = first = await send(payload, cancel_after_s)
        attempts, waited_ns = 1, 0
        sent_ns, connect_ns = first.sent_ns, first.connect_ns  # a connect that failed sent nothing
        while attempts <= retries and _worth_another(exchange) and not _being_cancelled():
            wait_s, said = _wait(exchange, attempts)
            if wait_s > (_LONGEST_WAIT_S if limit_s is None else limit_s):
                over = "an hour, the longest wait" if limit_s is None else "the total time-out"
                exchange.error = "; ".join(filter(None, (exchange.error, f"{said} is over {over}")))
                break
            begun_ns = now_ns()
            try:
                await asyncio.sleep(wait_s)
            except asyncio.CancelledError:
                waited_ns += now_ns() - begun_ns
                why = f"the run ended while waiting to retry after: {first.error or first.status}"
                exchange = Exchange(end_ns=now_ns(), status=exchange.status, ended=CUT, error=why)
                break
            waited_ns += now_ns() - begun_ns
            exchange = await send(payload, cancel_after_s)
            attempts += 1
            if not sent_ns:
                sent_ns, connect_ns = exchange.sent_ns, connect_ns + exchange.connect_ns
        exchange.sent_ns, exchange.connect_ns = sent_ns, connect_ns
        return Tried(exchange, attempts, first, waited_ns)

    return tried


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _worth_another(exchange: Exchange) -> bool:
    if exchange.ended in (CONNECT_ERROR, CONNECT_TIMEOUT):
        return True
    return exchange.ended in (COMPLETE, CLOSED) and exchange.status in RETRIED_STATUSES


def _wait(exchange: Exchange, attempts: int) -> tuple[float, str]:
    """Seconds, and whose word they are. What is no time at all (a word, a negative number) counts as nothing said.

    A date is read against the answer's own Date: the two clocks need not agree (RFC 9110 10.2.3).
    """
    headers = {name: value.decode("latin-1").strip() for name, value in exchange.headers}
    after = headers.get(b"retry-after", "")
    if re.fullmatch(r"[0-9]+(\.[0-9]*)?", after):  # a fraction is against the RFC, and clear all the same
        return float(after), f"Retry-After {after if len(after) < 20 else after[:16] + '...'} s"
    try:
        wait = parsedate_to_datetime(after) - parsedate_to_datetime(headers[b"date"])
        return max(0.0, wait.total_seconds()), f"Retry-After {after[:40]}"
    except (ValueError, KeyError, TypeError, OverflowError):
        backoff_s = _FIRST_WAIT_S * 2.0 ** min(attempts - 1, 64)
        return backoff_s, f"a wait of {backoff_s:g} s before attempt {attempts + 1}"
