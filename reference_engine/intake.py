"""What comes in with a request: its body, read within limits, and the client's own id of it."""

import asyncio
from typing import Any

import orjson
from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

from reference_engine.openai_api import ApiError, check_nesting

CHARS_A_TOKEN = 128  # no token of a text is longer: a prompt of more characters need not be tokenised to be refused
LONG_TEXT = 4096  # characters; above, tokenising takes ms and would stall every stream: it goes to a thread
BODY_S = 60.0  # that a body may take to come
LONGEST_REQUEST_ID = 128  # it stands in every event of its answer


def own_id(request: web.Request) -> str:
    """The client's own id of its request, if it is fit for a header and for JSON; else ""."""
    given = request.headers.get("X-Request-Id", "")
    return given if len(given) <= LONGEST_REQUEST_ID and given.isascii() and given.isprintable() else ""


async def data_of(request: web.Request) -> bytes:
    """The body. Raises ApiError."""
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError as error:
        raise ApiError(408, f"the body took longer than {BODY_S:g} s") from error
    except (ClientPayloadError, HttpProcessingError, web.RequestPayloadError) as error:
        raise ApiError(400, f"the body cannot be read: {error}") from error


async def body_of(request: web.Request) -> dict[str, Any]:
    """The body as JSON. Raises ApiError."""
    data = await data_of(request)
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a {type(body).__name__}; would be right: an object")
    check_nesting(data, body)
    return body
