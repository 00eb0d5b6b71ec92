"""Retries (case 30): what is sent again, after which wait, and what stays visible of the first attempt."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_bench.clock import now_ns
from llm_bench.exchange import CANCELLED, COMPLETE, CONNECT_ERROR, CUT, TOTAL_TIMEOUT, Exchange, Timeouts
from llm_bench.retry import Tried, retrying
from llm_bench.wire import Wire
from tests.quiet import undisturbed
from tests.scripted import Script, Scripted, Seen, http_response, unused_port

BODY = b"Content-Length: 2\r\n\r\n{}"
OK = http_response(200, b"{}")


def sending(
    url: str,
    retries: int,
    act: Callable[[Callable[[], Awaitable[Tried]]], Awaitable[Any]],
    limit_s: float | None = None,
) -> Any:
    async def main() -> Any:
        wire = Wire(url, "/chat/completions", [], Timeouts(), None)
        send = retrying(wire.send, retries, limit_s)
        got = await act(lambda: send(BODY, None))
        wire.close()
        return got

    return asyncio.run(main())


def ten(send: Callable[[], Awaitable[Tried]]) -> Awaitable[list[Tried]]:
    return asyncio.gather(*(send() for _ in range(10)))


def ten_of_case_30(number: int, seen: Seen) -> Script:
    if number < 4:
        return [(0, http_response(503, b"{}"))]
    if number < 6:
        return [(0, http_response(429, b"{}", {"Retry-After": "1"}))]
    return [(100, OK)]


def test_without_retries_a_503_is_a_503() -> None:
    with Scripted(ten_of_case_30) as server:
        got = sending(server.url, 0, ten)
    assert sorted(t.exchange.status for t in got) == [200] * 4 + [429] * 2 + [503] * 4
    assert {(t.attempts, t.retry_wait_ns, t.exchange is t.first) for t in got} == {(1, 0, True)}


@undisturbed
def test_with_a_retry_the_latency_runs_from_the_first_attempt_and_the_first_stays_visible() -> None:
    with Scripted(ten_of_case_30) as server:
        got = sending(server.url, 1, ten)
    assert [t.exchange.status for t in got] == [200] * 10
    assert sum(t.attempts for t in got) == len(server.requests) == 16
    assert sum(t.first.status == 200 for t in got) == 4

    def latency_s(t: Tried) -> float:
        return (t.exchange.end_ns - t.exchange.sent_ns) / 1e9

    for t in got:
        wait_s = {503: 0.5, 429: 1.0, 200: 0.0}[t.first.status]  # 429 said 1 s; 503 said nothing
        assert wait_s <= t.retry_wait_ns / 1e9 < wait_s + 0.1
        assert t.exchange.sent_ns == t.first.sent_ns
        assert wait_s + 0.1 <= latency_s(t) + 0.01 < wait_s + 0.3


@undisturbed
def test_a_date_in_retry_after_is_read_against_the_servers_own_clock() -> None:
    later = {"Date": "Mon, 01 Jan 2001 00:00:00 GMT", "Retry-After": "Mon, 01 Jan 2001 00:00:01 GMT"}
    with Scripted(lambda number, seen: [(0, http_response(503, b"{}", later) if number == 0 else OK)]) as server:
        tried = sending(server.url, 1, lambda send: send())
    assert 1.0 <= tried.retry_wait_ns / 1e9 < 1.1


@undisturbed
def test_retries_end_and_their_waits_double() -> None:
    with Scripted([(0, http_response(500, b"{}"))]) as server:
        tried = sending(server.url, 2, lambda send: send())
    assert (tried.attempts, tried.exchange.status, len(server.requests)) == (3, 500, 3)
    assert 1.5 <= tried.retry_wait_ns / 1e9 < 1.6


def test_a_refused_connect_is_tried_again_and_a_400_is_not() -> None:
    refused = sending(f"http://127.0.0.1:{unused_port()}/v1", 1, lambda send: send())
    assert (refused.attempts, refused.exchange.ended, refused.first.ended) == (2, CONNECT_ERROR, CONNECT_ERROR)
    with Scripted([(0, http_response(400, b"{}"))]) as server:
        assert sending(server.url, 3, lambda send: send()).attempts == 1


@undisturbed
def test_a_run_that_ends_during_a_wait_cuts_the_request_and_keeps_its_first_attempt() -> None:
    async def act(send: Callable[[], Awaitable[Tried]]) -> Tried:
        task = asyncio.ensure_future(send())
        await asyncio.sleep(0.1)
        task.cancel()
        return await task

    with Scripted([(0, http_response(503, b"{}", {"Retry-After": "30"}))]) as server:
        tried = sending(server.url, 1, act)
    assert (tried.exchange.ended, tried.first.status, tried.attempts) == (CUT, 503, 1)
    assert "503" in tried.exchange.error
    assert 0.05 < tried.retry_wait_ns / 1e9 < 0.5


# ---- what a server may say of the wait


async def answered_in_turn(answers: list[Exchange], retries: int, limit_s: float | None) -> Tried:
    left = iter(answers)

    async def send(payload: bytes, cancel_after_s: float | None) -> Exchange:
        return next(left)

    return await retrying(send, retries, limit_s)(b"", None)


def refusal(retry_after: bytes, date: bytes = b"Wed, 21 Oct 2015 07:28:00 GMT") -> Exchange:
    headers = [(b"date", date), (b"retry-after", retry_after)]
    return Exchange(sent_ns=1, end_ns=2, status=429, headers=headers, ended=COMPLETE)


@pytest.mark.parametrize(
    ("retry_after", "limit_s", "text"),
    [
        (b"86400", 3600.0, "Retry-After 86400 s is over the total time-out"),
        (b"4", 3.0, "Retry-After 4 s is over the total time-out"),
        (b"9" * 400, 3.0, "Retry-After 9999999999999999... s is over the total time-out"),
        (b"9" * 5000, None, "Retry-After 9999999999999999... s is over an hour"),
        (b"3601", None, "Retry-After 3601 s is over an hour"),
        (b"7200.5", None, "Retry-After 7200.5 s is over an hour"),
        (b"Wed, 21 Oct 2037 07:28:00 GMT", 3.0, "Retry-After Wed, 21 Oct 2037 07:28:00 GMT is over the total time-out"),
    ],
)
def test_a_wait_over_the_limit_is_not_begun_and_the_last_answer_stands_with_the_reason(
    retry_after: bytes, limit_s: float | None, text: str
) -> None:
    answer = refusal(retry_after)
    tried = asyncio.run(answered_in_turn([answer], 5, limit_s))
    assert (tried.attempts, tried.exchange, tried.retry_wait_ns) == (1, answer, 0)
    assert (tried.exchange.ended, tried.exchange.status) == (COMPLETE, 429)
    assert tried.exchange.error.startswith(text)


def test_a_failed_connect_keeps_its_own_words_when_the_wait_is_over_the_limit() -> None:
    refused = Exchange(end_ns=1, ended=CONNECT_ERROR, error="ConnectionRefusedError: no")
    tried = asyncio.run(answered_in_turn([refused], 3, 0.4))
    assert tried.exchange.error.startswith("ConnectionRefusedError: no; a wait of 0.5 s before attempt 2 is over")


def test_waits_that_double_end_at_the_limit_however_many_retries_were_asked() -> None:
    tried = asyncio.run(answered_in_turn([refusal(b"-1") for _ in range(9)], 10**6, 0.6))
    assert (tried.attempts, tried.exchange.error) == (2, "a wait of 1 s before attempt 3 is over the total time-out")


@pytest.mark.parametrize(
    ("retry_after", "wait_s"),
    [
        (b"0", 0.0),
        (b"0.2", 0.2),
        (b" 0 ", 0.0),
        (b"Wed, 21 Oct 2015 07:27:00 GMT", 0.0),  # has passed
        # What is no time is as if nothing had been said.
        (b"-5", 0.5),
        (b"nan", 0.5),
        (b"1e9", 0.5),
        (b"soon", 0.5),
        (b"\xb2", 0.5),
        (b"Wed, 21 Oct 99999999999999999999 07:28:00 GMT", 0.5),
        (b"Wed, 21 Oct 2015 07:28:00 +99999999999999999999", 0.5),
    ],
)
@undisturbed
def test_a_wait_is_as_long_as_was_said_or_half_a_second(retry_after: bytes, wait_s: float) -> None:
    tried = asyncio.run(answered_in_turn([refusal(retry_after), Exchange(status=200, ended=COMPLETE)], 1, 3.0))
    assert tried.attempts == 2
    assert wait_s <= tried.retry_wait_ns / 1e9 < wait_s + 0.4


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_no_wait_is_short_though_uvloop_rounds_it_down(run: Callable[[Any], Any]) -> None:
    async def tried(wait_s: float, patience_s: float | None) -> Tried:
        answers = iter([refusal(b"%.4f" % wait_s), Exchange(status=200, ended=COMPLETE)])

        async def send(payload: bytes, cancel_after_s: float | None) -> Exchange:
            answer = next(answers)
            answer.sent_ns = now_ns()
            return answer

        return await retrying(send, 1)(b"", patience_s)

    async def main() -> tuple[list[Tried], list[Tried]]:
        waiting = asyncio.gather(*(tried(s, None) for s in waits_s))
        leaving = asyncio.gather(*(tried(9.0, s) for s in waits_s))
        return await waiting, await leaving

    waits_s = [0.05 + 0.0007 * k for k in range(50)]  # no two of one fraction of a millisecond, and a loop that turns
    waited, left = run(main())
    assert all(t.retry_wait_ns >= round(s * 1e4) * 1e5 for t, s in zip(waited, waits_s, strict=True))
    assert all(t.exchange.end_ns - t.exchange.sent_ns >= s * 1e9 for t, s in zip(left, waits_s, strict=True))
    assert {t.exchange.ended for t in left} == {CANCELLED}


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.binary(max_size=40), st.from_regex(rb"\A(Wed, )?[0-9]+ Oct [0-9]{1,30} [0-9:]+ [-+GMT0-9]+\Z")))
def test_hostile_words_never_fail_the_run_and_never_wait(said: bytes) -> None:
    async def main() -> Tried | None:
        got = asyncio.ensure_future(answered_in_turn([refusal(said), refusal(said)], 1, 0.01))
        done, _ = await asyncio.wait([got], timeout=180)
        return got.result() if done else None

    assert asyncio.run(main()) is not None


# ---- the client's own time


def test_sent_and_connect_are_those_up_to_the_first_attempt_that_left() -> None:
    answers = [
        Exchange(end_ns=1, ended=CONNECT_ERROR, error="x", connect_ns=3),
        Exchange(sent_ns=50, end_ns=60, status=503, ended=COMPLETE, connect_ns=4, headers=[(b"retry-after", b"0")]),
        Exchange(sent_ns=70, end_ns=80, status=200, ended=COMPLETE, connect_ns=5),
    ]
    tried = asyncio.run(answered_in_turn(answers, 2, None))
    assert (tried.exchange.sent_ns, tried.exchange.connect_ns, tried.exchange.end_ns) == (50, 7, 80)


# ---- the total time-out and the planned cancel are of one request, over all of its attempts


def refused_then(later: Script, retry_after: str) -> Callable[[int, Seen], Script]:
    refused = http_response(503, b"{}", {"Retry-After": retry_after})
    return lambda number, seen: [(0, refused)] if number == 0 else later


def lasting(server: Scripted, cancel_after_s: float | None, limit_s: float | None) -> tuple[Tried, float]:
    async def main() -> Tried:
        wire = Wire(server.url, "/chat/completions", [], Timeouts(total_s=limit_s), None)
        tried = await retrying(wire.send, 5, limit_s)(BODY, cancel_after_s)
        wire.close()
        return tried

    tried = asyncio.run(main())
    return tried, (tried.exchange.end_ns - tried.exchange.sent_ns) / 1e9


@undisturbed
def test_a_second_attempt_has_what_is_left_of_the_total_time_out() -> None:
    with Scripted(refused_then([(30_000, OK)], "0.3")) as server:
        tried, lasted_s = lasting(server, None, 0.6)
    assert (tried.attempts, tried.exchange.ended) == (2, TOTAL_TIMEOUT)
    assert tried.exchange.error.startswith("not ended within 0.6 s of the first sending")
    assert 0.55 < lasted_s < 0.8


@undisturbed
def test_waits_that_are_short_each_do_not_add_up_past_the_total_time_out() -> None:
    with Scripted([(0, http_response(503, b"{}", {"Retry-After": "0.25"}))]) as server:
        tried, lasted_s = lasting(server, None, 0.6)
    assert (tried.attempts, tried.exchange.status, len(server.requests)) == (3, 503, 3)
    assert "would end after the total time-out, 0.6 s from the first sending" in tried.exchange.error
    assert lasted_s < 0.6


@pytest.mark.parametrize(("retry_after", "attempts"), [("0.1", 2), ("20", 1)])
@undisturbed
def test_a_user_leaves_as_planned_from_the_first_sending_in_an_attempt_or_in_a_wait(
    retry_after: str, attempts: int
) -> None:
    with Scripted(refused_then([(30_000, OK)], retry_after)) as server:
        tried, lasted_s = lasting(server, 0.4, 60.0)
    assert (tried.attempts, tried.exchange.ended) == (attempts, CANCELLED)
    assert "as planned" in tried.exchange.error
    assert 0.38 < lasted_s < 0.6
