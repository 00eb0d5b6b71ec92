"""An answer over its connection: whole, or an event a token written without a queue; and both gone wrong on order."""

import asyncio
import socket
import struct
from collections.abc import Callable, Mapping

from aiohttp import HttpVersion11, web

from reference_engine.account import server_timing
from reference_engine.admission import Refused
from reference_engine.answer import Answer, Entry
from reference_engine.engine import EngineDownError
from reference_engine.faults import Fault
from reference_engine.openai_api import CHAT, ApiError, error_body

Write = Callable[[bytes], None]
LINGER_0 = struct.pack("ii", 1, 0)  # close sends a reset, what was not sent is lost


class Cut(Exception):  # noqa: N818 - not an error: it was asked for
    """A planted fault has ended the connection."""


async def whole(answer: Answer, troubles: Mapping[str, Fault]) -> web.StreamResponse:
    await answer.done
    await delay(troubles)
    choices = []
    for choice in answer.choices:
        text = "".join(choice.parts)
        body = {"message": {"role": "assistant", "content": text}} if answer.kind is CHAT else {"text": text}
        end = {"logprobs": None, "finish_reason": choice.finish_reason, "stop_reason": choice.stops.found}
        choices.append({"index": choice.index} | body | end)
    response = json_response(200, answer.shell.whole(choices, answer.said()))
    response.headers["Server-Timing"] = server_timing(answer.account())
    return response


async def stream(
    answer: Answer, request: web.Request, entry: Entry, troubles: Mapping[str, Fault]
) -> web.StreamResponse:
    """Headers at once, then an event a token, straight to the transport: a queue and a task switch double its cost.

    Where the queue has a time limit the headers wait for the first token: until then the status may have to be 503.
    Nothing waits for a slow reader: what it has not read is kept, at most one answer.
    """
    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers={**headers, "X-Request-Id": entry.request_id})
    early: list[bytes] = []  # events made before the headers were out
    answer.write = early.append
    await delay(troubles)
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

    answer.write = troubled(write, answer, entry, transport, troubles)
    for event in early:
        answer.write(event)
    try:
        await answer.done
        said = answer.said()
        last = (answer.shell.last_event(said) if said else b"") + b"data: [DONE]\n\n"
    except Cut:
        return response
    except (ApiError, EngineDownError, Refused) as error:  # the status is sent: the stream says it, without [DONE]
        entry.outcome = outcome_of(error)
        answer.close()  # its other choices end too: nothing may follow the last event, nor move what the account says
        answer.account()
        last = b"data: " + error_body(status_of(error), str(error)) + b"\n\n"
    try:
        await response.write_eof(last)
    except ConnectionError:  # it left in this very moment; its handler could not be cancelled in time
        entry.outcome = entry.outcome or "abort"
    return response


async def delay(troubles: Mapping[str, Fault]) -> None:
    if "delay_headers" in troubles:
        await asyncio.sleep(troubles["delay_headers"].fields["seconds"])


def troubled(
    write: Write, answer: Answer, entry: Entry, transport: asyncio.Transport, troubles: Mapping[str, Fault]
) -> Write:
    """`write`, that after so many tokens does what was planted for this stream."""
    fault = troubles.get("cut_stream") or troubles.get("error_event")
    if fault is None:
        return write
    left = int(fault.fields["after"])
    cuts = fault.kind == "cut_stream"
    strike, outcome = (CUTS[fault.fields["how"]], "cut") if cuts else (_error_event, "error")

    def counted(event: bytes) -> None:
        nonlocal left
        if left:
            left -= 1
            write(event)
        elif not answer.done.done():
            entry.outcome = outcome  # now: the connection's end cancels the handler
            strike(answer, transport, event)

    return counted


def _reset(answer: Answer, transport: asyncio.Transport, event: bytes) -> None:
    reset(transport)
    answer.fail(Cut())


def _close(answer: Answer, transport: asyncio.Transport, event: bytes) -> None:
    transport.close()
    answer.fail(Cut())


def _half_chunk(answer: Answer, transport: asyncio.Transport, event: bytes) -> None:
    transport.write(b"%x\r\n%b" % (len(event), event[: len(event) // 2]))
    _close(answer, transport, event)


def _error_event(answer: Answer, transport: asyncio.Transport, event: bytes) -> None:
    answer.fail(ApiError(500, "a planted fault"))


CUTS: dict[str, Callable[[Answer, asyncio.Transport, bytes], None]] = {
    "rst": _reset,
    "fin": _close,
    "half_chunk": _half_chunk,
}


def reset(transport: asyncio.Transport) -> None:
    """End a connection so that its peer sees ECONNRESET."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)
    transport.abort()


# What a request that has no answer is told, and what its line in the log calls it.
def status_of(error: Exception) -> int:
    if isinstance(error, ApiError):
        return error.status
    if isinstance(error, EngineDownError):
        return 500 if error.retry_after_s is None else 503
    assert isinstance(error, Refused)
    return 429 if error.reason == "queue_full" else 503


def outcome_of(error: Exception) -> str:
    return error.reason if isinstance(error, Refused) else "error"


def json_response(status: int, body: bytes) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json")


ErrorBody = Callable[[int, str, str | None], bytes]  # of status, message, name of the field at fault


def error_response(error: ApiError | EngineDownError | Refused, body: ErrorBody = error_body) -> web.Response:
    """An error object, OpenAI's unless `body` makes another; with Retry-After where another try may succeed."""
    status = status_of(error)
    response = json_response(status, body(status, str(error), getattr(error, "param", None)))
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response
