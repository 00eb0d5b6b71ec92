"""What comes in with a request: its body, read within limits, and the client's own id of it."""

import asyncio
import zlib
from collections.abc import Iterator
from typing import Any

import orjson
from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

from reference_engine.admission import Refused
from reference_engine.openai_api import ApiError, check_nesting, shown

MAX_BODY_BYTES = 16 * 2**20  # a long context's token ids as JSON are about 8 bytes each
MOST_BODIES_BYTES = 16 * MAX_BODY_BYTES  # of all requests together, see Bodies
SMALL_BODY_BYTES = 2**16  # of each, which aiohttp would hold anyway, unread: not counted, so that it always has room
COUNTED = web.RequestKey("counted", int)  # bytes of its body that `Bodies` holds for it
PIECE_BYTES = 2**20  # of unpacking, between two looks at the limits
WINDOWS = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}  # of Content-Encoding
CHARS_A_TOKEN = 128  # no token of a text is longer: a prompt of more characters need not be tokenised to be refused
LONG_TEXT = 4096  # characters; above, tokenising takes ms and would stall every stream: it goes to a thread
LONGEST_REQUEST_ID = 128  # it stands in every event of its answer


def own_id(request: web.Request) -> str:
    """The client's own id of its request, if it is fit for a header and for JSON; else ""."""
    given = request.headers.get("X-Request-Id", "")
    return given if len(given) <= LONGEST_REQUEST_ID and given.isascii() and given.isprintable() else ""


class Bodies:
    """How many bytes of requests' bodies are in memory, from their coming until nobody needs them any more.

    Counted as they come, not as they are announced: who says much and sends little keeps nobody out. Who has no room is
    refused: if he waited, those who have a part each would wait for one another.
    """

    def __init__(self, limit: int = MOST_BODIES_BYTES) -> None:
        self.limit = limit
        self.held = 0

    def count(self, request: web.Request, size: int) -> None:
        """Of this request it is `size` bytes now. Raises Refused."""
        counted = max(0, size - SMALL_BODY_BYTES)
        more = counted - request.get(COUNTED, 0)
        if more > 0 and self.held + more > self.limit:
            found = f"the bodies of all requests together would have {self.held + more} bytes"
            raise Refused("bodies", f"{found}; expected at most {self.limit}", 1)
        request[COUNTED] = counted
        self.held += more

    def release(self, request: web.Request) -> None:
        """All of it, unless that was done before."""
        self.held -= request.get(COUNTED, 0)
        request[COUNTED] = 0


async def data_of(request: web.Request, bodies: Bodies) -> bytes:
    """The body, unpacked. Raises ApiError or Refused. It has as long to come as a head has, see `listen`.

    It counts until the request has ended or is released.
    """
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise _too_large(f"{request.content_length} bytes")
    limit_s = request.protocol.keepalive_timeout
    coming = bytearray()
    try:
        async with asyncio.timeout(limit_s):
            async for piece in request.content.iter_any():  # request.read would keep it for as long as the request
                coming += piece
                if len(coming) > MAX_BODY_BYTES:
                    raise _too_large(f"more than {MAX_BODY_BYTES} bytes")
                bodies.count(request, len(coming))
    except TimeoutError as error:
        raise ApiError(408, f"the body took longer than {limit_s:g} s") from error
    except (ClientPayloadError, HttpProcessingError, web.RequestPayloadError) as error:
        raise ApiError(400, f"the body cannot be read: {error}") from error
    data = bytes(coming)
    del coming
    packing = request.headers.get("Content-Encoding", "identity").strip().lower()
    if packing in ("identity", ""):
        return data
    whole, pieces = bytearray(), unpacked(data, packing)
    while piece := await asyncio.to_thread(next, pieces, b""):
        whole += piece
        bodies.count(request, len(data) + len(whole))
    bodies.count(request, len(whole))
    return bytes(whole)


def unpacked(data: bytes, packing: str) -> Iterator[bytes]:
    """In pieces. Raises ApiError. Stops at the limit: 4 MB of gzip can stand for gigabytes."""
    if packing not in WINDOWS:
        text = f"Content-Encoding is {shown(packing)}; would be right: gzip, deflate or none"
        raise ApiError(415, text, "Content-Encoding")
    unpacking = zlib.decompressobj(WINDOWS[packing])
    size, left = 0, data
    try:
        while piece := unpacking.decompress(left, PIECE_BYTES):
            size, left = size + len(piece), unpacking.unconsumed_tail
            if size > MAX_BODY_BYTES:
                raise _too_large(f"more than {MAX_BODY_BYTES} bytes when unpacked")
            yield piece
    except zlib.error as error:
        raise ApiError(400, f"the body cannot be read: {error}") from error
    if not unpacking.eof or unpacking.unused_data:
        raise ApiError(400, f"the body cannot be read: its {packing} ends early or is followed by more")


def _too_large(found: str) -> ApiError:
    return ApiError(413, f"the body has {found}; would be right: at most {MAX_BODY_BYTES}")


async def body_of(request: web.Request, bodies: Bodies) -> dict[str, Any]:
    """The body as JSON. Raises ApiError or Refused."""
    data = await data_of(request, bodies)
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a {type(body).__name__}; would be right: an object")
    check_nesting(data, body)
    return body
