"""How an answer's messages and its status stand in an Exchange, and in a record's raw bytes: in gRPC-Web's frames.

No I/O and no clock. https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-WEB.md: messages as gRPC frames them, the
trailers with the status in a last frame of their own.
"""

import struct
from typing import NamedTuple
from urllib.parse import quote, unquote

_TRAILERS = 0x80


def frame(message: bytes) -> bytes:
    """A message as gRPC sends it: a flag, its length in 4 bytes, the message."""
    return struct.pack(">BI", 0, len(message)) + message


def status_frame(code: int, text: str) -> bytes:
    """How the call ended, as the last frame: gRPC-Web's trailers."""
    lines = f"grpc-status: {code}\r\ngrpc-message: {quote(text, safe=' ')}\r\n".encode()
    return struct.pack(">BI", _TRAILERS, len(lines)) + lines


# gRPC's codes, and the HTTP status of the same meaning by which an answer is read (google/rpc/code.proto)
GRPC_STATUS: dict[int, tuple[str, int]] = {
    0: ("OK", 200),
    1: ("CANCELLED", 499),
    2: ("UNKNOWN", 500),
    3: ("INVALID_ARGUMENT", 400),
    4: ("DEADLINE_EXCEEDED", 504),
    5: ("NOT_FOUND", 404),
    6: ("ALREADY_EXISTS", 409),
    7: ("PERMISSION_DENIED", 403),
    8: ("RESOURCE_EXHAUSTED", 429),
    9: ("FAILED_PRECONDITION", 400),
    10: ("ABORTED", 409),
    11: ("OUT_OF_RANGE", 400),
    12: ("UNIMPLEMENTED", 501),
    13: ("INTERNAL", 500),
    14: ("UNAVAILABLE", 503),
    15: ("DATA_LOSS", 500),
    16: ("UNAUTHENTICATED", 401),
}


class Status(NamedTuple):
    code: int
    text: str

    @property
    def name(self) -> str:
        return GRPC_STATUS.get(self.code, (str(self.code), 0))[0]

    @property
    def page(self) -> dict[str, str]:
        """The error object that a page of HTTP would hold in its place."""
        return {"error": self.text or self.name, "code": self.name}


def read_frames(data: bytes) -> tuple[list[bytes], Status | None]:
    """Messages and status in the frames. Raises ValueError for half a frame."""
    messages: list[bytes] = []
    status, at = None, 0
    while at < len(data):
        size = int.from_bytes(data[at + 1 : at + 5], "big")
        if at + 5 + size > len(data):
            raise ValueError("half a gRPC frame")
        body = data[at + 5 : at + 5 + size]
        if data[at] & _TRAILERS:
            status = _read_status(body)
        else:
            messages.append(body)
        at += 5 + size
    return messages, status


def _read_status(lines: bytes) -> Status:
    said = dict(line.split(": ", 1) for line in lines.decode().split("\r\n") if ": " in line)
    code = said.get("grpc-status", "")
    if not code.isdecimal():
        raise ValueError("trailers without a grpc-status")
    return Status(int(code), unquote(said.get("grpc-message", "")))
