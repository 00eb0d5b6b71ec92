"""What comes in with a request: its body, read within limits, and the client's own id of it."""

import asyncio
import zlib
from typing import Any

import orjson
from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

from reference_engine.openai_api import ApiError, check_nesting, shown

MAX_BODY_BYTES = 16 * 2**20  # a long context's token ids as JSON are about 8 bytes each
WINDOWS = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}  # of Content-Encoding
CHARS_A_TOKEN = 128  # no token of a text is longer: a prompt of more characters need not be tokenised to be refused
LONG_TEXT = 4096  # characters; above, tokenising takes ms and would stall every stream: it goes to a thread
LONGEST_REQUEST_ID = 128  # it stands in every event of its answer


def own_id(request: web.Request) -> str:
    """The client's own id of its request, if it is fit for a header and for JSON; else ""."""
    given = request.headers.get("X-Request-Id", "")
    return given if len(given) <= LONGEST_REQUEST_ID and given.isascii() and given.isprintable() else ""


async def data_of(request: web.Request) -> bytes:
    """The body, unpacked. Raises ApiError, or aiohttp's 413. It has as long to come as a head has, see `listen`."""
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise _too_large(f"{request.content_length} bytes")
    limit_s = request.protocol.keepalive_timeout
    try:
        async with asyncio.timeout(limit_s):
            data = await request.read()
    except TimeoutError as error:
        raise ApiError(408, f"the body took longer than {limit_s:g} s") from error
    except (ClientPayloadError, HttpProcessingError, web.RequestPayloadError) as error:
        raise ApiError(400, f"the body cannot be read: {error}") from error
    packing = request.headers.get("Content-Encoding", "identity").strip().lower()
    return data if packing in ("identity", "") else await asyncio.to_thread(unpacked, data, packing)


def unpacked(data: bytes, packing: str) -> bytes:
    """Raises ApiError. Stops at the limit: 4 MB of gzip can stand for gigabytes, which would stall every stream."""
    if packing not in WINDOWS:
        text = f"Content-Encoding is {shown(packing)}; would be right: gzip, deflate or none"
        raise ApiError(415, text, "Content-Encoding")
    unpacking = zlib.decompressobj(WINDOWS[packing])
    try:
        whole = unpacking.decompress(data, MAX_BODY_BYTES + 1)
    except zlib.error as error:
        raise ApiError(400, f"the body cannot be read: {error}") from error
    if len(whole) > MAX_BODY_BYTES:
        raise _too_large(f"more than {MAX_BODY_BYTES} bytes when unpacked")
    if not unpacking.eof or unpacking.unused_data:
        raise ApiError(400, f"the body cannot be read: its {packing} ends early or is followed by more")
    return whole


def _too_large(found: str) -> ApiError:
    return ApiError(413, f"the body has {found}; would be right: at most {MAX_BODY_BYTES}")


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
