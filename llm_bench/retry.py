"""Sends a request again, if asked to, after a refusal that may pass; the first attempt stays visible."""

import asyncio
import math
import re
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from typing import NamedTuple

from llm_bench.clock import now_ns
from llm_bench.exchange import ANSWERED, CANCELLED, CUT, NOT_CONNECTED, TOTAL_TIMEOUT, Exchange

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

    Waits as long as Retry-After says, else 0.5 s, doubled each time. `limit_s` (the total time-out) and the planned
    cancel count from the first sending, over all attempts: a wait that would end after the limit (None: one of more
    than an hour) is not begun, the last answer stands, and its error says why; an attempt that is under way then ends
    as TOTAL_TIMEOUT. A task cancelled while it waits gives a CUT. What `send` raises is passed on.
    """

    async def tried(payload: bytes, cancel_after_s: float | None) -> Tried:
        asked_ns = now_ns()
        exchange = first = await send(payload, cancel_after_s)
        attempts, waited_ns = 1, 0
        begun_ns = max(asked_ns, first.sent_ns)  # a connect that failed counts too
        sent_ns, connect_ns = first.sent_ns, first.connect_ns  # a connect that failed sent nothing
        while attempts <= retries and _worth_another(exchange) and not _being_cancelled():
            wait_s, said = _wait(exchange, attempts)
            wait_ns = now_ns()
            left_s = _left(limit_s, begun_ns, wait_ns)
            user_s = cancel_after_s if sent_ns else None  # leaves so long after the first attempt that left
            patience_s = _left(user_s, max(asked_ns, sent_ns), wait_ns)
            too_long = _too_long(wait_s, left_s, limit_s)
            if too_long and patience_s >= min(wait_s, left_s):  # else its user leaves before the limit comes into it
                exchange.error = "; ".join(filter(None, (exchange.error, f"{said} {too_long}")))
                break
            try:
                await _sleep_until(wait_ns + math.ceil(min(wait_s, max(patience_s, 0.0)) * 1e9))
            except asyncio.CancelledError:
                waited_ns += now_ns() - wait_ns
                why = f"the run ended while waiting to retry after: {first.error or first.status}"
                exchange = Exchange(end_ns=now_ns(), status=exchange.status, ended=CUT, error=why)
                break
            waited_ns += now_ns() - wait_ns
            if patience_s <= wait_s:
                why = f"closed by the client {user_s:g} s after sending, as planned: waiting to send again"
                exchange = Exchange(end_ns=now_ns(), status=exchange.status, ended=CANCELLED, error=why)
                break
            patience_s = _left(cancel_after_s, max(asked_ns, sent_ns) if sent_ns else now_ns(), now_ns())
            exchange = await _again(send, payload, patience_s, limit_s, begun_ns)
            attempts += 1
            if not sent_ns:
                sent_ns, connect_ns = exchange.sent_ns, connect_ns + exchange.connect_ns
        exchange.sent_ns, exchange.connect_ns = sent_ns, connect_ns
        return Tried(exchange, attempts, first, waited_ns)

    return tried


async def _sleep_until(until_ns: int) -> None:
    """Never early, and a turn of the loop at least: uvloop rounds its own time-outs to milliseconds, downwards too."""
    left_ns = until_ns - now_ns()
    while True:
        await asyncio.sleep(max(left_ns, 0) / 1e9)
        left_ns = until_ns - now_ns()
        if left_ns <= 0:
            return


async def _again(send: Send, payload: bytes, patience_s: float, limit_s: float | None, begun_ns: int) -> Exchange:
    """A further attempt within what is left since `begun_ns`. `send`'s own total limit counts from its own sending."""
    left_s = _left(limit_s, begun_ns, now_ns())
    least_s = max(min(patience_s, left_s), 0.0)
    exchange = await send(payload, None if least_s == math.inf else least_s)
    if exchange.ended == CANCELLED and left_s < patience_s:
        so_far = exchange.error.partition(": ")[2]
        exchange.ended = TOTAL_TIMEOUT
        exchange.error = f"not ended within {limit_s:g} s of the first sending: {so_far}"
    return exchange


def _left(limit_s: float | None, begun_ns: int, now: int) -> float:
    return math.inf if limit_s is None else limit_s - (now - begun_ns) / 1e9


def _too_long(wait_s: float, left_s: float, limit_s: float | None) -> str:
    if limit_s is None:
        return "is over an hour, the longest wait" if wait_s > _LONGEST_WAIT_S else ""
    if wait_s > limit_s:
        return "is over the total time-out"
    return f"would end after the total time-out, {limit_s:g} s from the first sending" if wait_s > left_s else ""


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _worth_another(exchange: Exchange) -> bool:
    if exchange.ended in NOT_CONNECTED:
        return True
    return exchange.ended in ANSWERED and exchange.status in RETRIED_STATUSES


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
