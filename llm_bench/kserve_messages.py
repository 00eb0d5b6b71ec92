"""Messages of KServe v2 over gRPC, as bytes: of protobuf's wire format what these few messages need.

No I/O and no clock. By hand, since generated code ties its users to a range of protobuf's versions, and grpcio needs no
protobuf for bytes; unknown fields are skipped as protobuf does. Messages: kserve/open-inference-protocol
`specification/protocol/open_inference_grpc.proto` and Triton's `grpc_service.proto`; wire format:
https://protobuf.dev/programming-guides/encoding. How messages follow each other: `grpc_frames`.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

Value = int | bytes
_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5  # wire types


class Tensor(NamedTuple):
    """A named tensor: `raw` is row-major and little-endian, BYTES elements each after their length in 4 bytes."""

    name: str
    datatype: str  # a key of DATATYPES
    shape: tuple[int, ...]
    raw: bytes = b""


# datatype -> the letter of `struct`; "": elements of any length
DATATYPES = {
    **{"BOOL": "?", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q"},
    **{"INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q"},
    **{"FP16": "e", "FP32": "f", "FP64": "d", "BYTES": ""},
}


# ---- protobuf


def varint(value: int) -> bytes:
    """An int64 or uint64; one below 0 has ten bytes."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, value: int | bytes | str) -> bytes:
    """One field: a whole number or bool, or a text, bytes or message with its length."""
    if isinstance(value, int):
        return varint(number << 3 | _VARINT) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | _LEN) + varint(len(data)) + data


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("a number of a protobuf message has no end")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, at
        shift += 7


def read_fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """(number, value) of each field; a value is a whole number, or bytes. Raises ValueError for what is no message."""
    at, end = 0, len(data)
    while at < end:
        key = data[at]  # nearly all are of one byte
        at += 1
        if key > 0x7F:
            key, at = _read_varint(data, at - 1)
        kind, number = key & 7, key >> 3
        if not number:
            raise ValueError("a protobuf message has a field 0")
        if kind == _VARINT:
            number_value, at = _read_varint(data, at)
            yield number, number_value
            continue
        if kind == _LEN:
            if at < end and data[at] < 0x80:
                size = data[at]
                at += 1
            else:
                size, at = _read_varint(data, at)
        elif kind in (_I64, _I32):
            size = 8 if kind == _I64 else 4
        else:
            raise ValueError(f"a protobuf message has wire type {kind}")
        if size > end - at:
            raise ValueError(f"a field of a protobuf message has {size} bytes, {end - at} are left")
        yield number, data[at : at + size]
        at += size


def _text(value: Value) -> str:
    return _bytes(value).decode()  # UnicodeDecodeError is a ValueError


def _bytes(value: Value) -> bytes:
    if isinstance(value, bytes):
        return value
    raise ValueError("a field of a protobuf message is a number, not bytes")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _numbers(value: Value) -> list[int]:
    """Of a repeated whole number: packed, or one of several fields."""
    if isinstance(value, int):
        return [_signed(value)]
    found, at = [], 0
    while at < len(value):
        one, at = _read_varint(value, at)
        found.append(_signed(one))
    return found


# ---- tensors


# Where struct says nothing: it takes any value for a truth, "no" as well.
_KINDS: dict[str, tuple[type, ...]] = {"BOOL": (int,), "BYTES": (str, bytes)}


def tensor(name: str, datatype: str, shape: Sequence[int], values: Sequence[Any]) -> Tensor:
    """Raises ValueError where the values are not of the datatype, or not as many as the shape says."""
    count = 1
    for size in shape:
        count *= size
    if count != len(values) or any(size < 0 for size in shape):
        raise ValueError(f"tensor {name}: {len(values)} values for the shape {list(shape)}")
    if datatype not in DATATYPES:
        raise ValueError(f"tensor {name}: datatype {datatype}; known: {', '.join(DATATYPES)}")
    letter = DATATYPES[datatype]
    for value in values if datatype in _KINDS else ():
        if not isinstance(value, _KINDS[datatype]):
            raise ValueError(f"tensor {name}: a value of type {type(value).__name__} is not of datatype {datatype}")
        if datatype == "BOOL" and value not in (0, 1):
            raise ValueError(f"tensor {name}: {value} is not of datatype BOOL; expected true, false, 1 or 0")
    try:
        if letter:
            return Tensor(name, datatype, tuple(shape), struct.pack(f"<{len(values)}{letter}", *values))
        texts = [v if isinstance(v, bytes) else v.encode() for v in values]
    except (struct.error, OverflowError, UnicodeEncodeError) as e:
        raise ValueError(f"tensor {name}: not of datatype {datatype}: {e}") from None
    return Tensor(name, datatype, tuple(shape), b"".join(struct.pack("<I", len(t)) + t for t in texts))


def values_of(tensor: Tensor) -> list[Any]:
    """Its elements in row-major order: numbers, bools or bytes. Raises ValueError where the bytes are not such."""
    raw, letter = tensor.raw, DATATYPES.get(tensor.datatype)
    if letter is None:
        raise ValueError(f"tensor {tensor.name}: datatype {tensor.datatype!r}")
    if letter:
        count, rest = divmod(len(raw), struct.calcsize("<" + letter))
        if rest:
            raise ValueError(f"tensor {tensor.name}: {len(raw)} bytes of {tensor.datatype}")
        return list(struct.unpack(f"<{count}{letter}", raw))
    found, at = [], 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4], "little")
        at += 4 + size
        if at > len(raw):
            raise ValueError(f"tensor {tensor.name}: an element has {size} bytes, fewer are left")
        found.append(raw[at - size : at])
    return found


def _of_bytes(value: Value) -> bytes:
    data = _bytes(value)
    return struct.pack("<I", len(data)) + data


def _of_varints(letter: str) -> Callable[[Value], bytes]:
    def pack(value: Value) -> bytes:
        numbers = _numbers(value)
        if letter in "IQ?":  # unsigned: as the wire has them
            numbers = [number & (1 << 64) - 1 for number in numbers]
        try:
            return struct.pack(f"<{len(numbers)}{letter}", *numbers)
        except struct.error as e:
            raise ValueError(f"a number of a tensor is out of its range: {e}") from None

    return pack


# field of InferTensorContents -> how its elements stand in `raw`, and the size they have there: servers that send
# typed contents (MLServer) widen the smaller types.
_CONTENTS: dict[int, tuple[str, Callable[[Value], bytes]]] = {
    1: ("?", _of_varints("?")),
    2: ("i", _of_varints("i")),
    3: ("q", _of_varints("q")),
    4: ("I", _of_varints("I")),
    5: ("Q", _of_varints("Q")),
    6: ("f", _bytes),
    7: ("d", _bytes),
    8: ("", _of_bytes),
}


def _contents(message: bytes, datatype: str) -> bytes:
    """InferTensorContents as raw bytes of the datatype."""
    letter = DATATYPES.get(datatype)
    parts: list[bytes] = []
    for number, value in read_fields(message):
        wide, pack = _CONTENTS.get(number, ("", lambda value: b""))
        part = pack(value)
        if wide and letter and wide != letter:
            try:
                numbers = struct.unpack(f"<{len(part) // struct.calcsize(wide)}{wide}", part)
                part = struct.pack(f"<{len(numbers)}{letter}", *numbers)
            except struct.error as e:
                raise ValueError(f"the contents of a tensor are not of datatype {datatype}: {e}") from None
        parts.append(part)
    return b"".join(parts)


def _read_tensor(message: bytes) -> Tensor:
    """A tensor's name, type and shape are the same in each message of a stream: read once, they are kept."""
    return _kept_tensor(message) if len(message) <= _KEPT_BYTES else _new_tensor(message)


_KEPT_BYTES = 200


def _new_tensor(message: bytes) -> Tensor:
    """InferOutputTensor, InferInputTensor or TensorMetadata: they share their first three fields."""
    name = datatype = ""
    shape: list[int] = []
    contents: list[bytes] = []
    for number, value in read_fields(message):
        if number == 1:
            name = _text(value)
        elif number == 2:
            datatype = _text(value)
        elif number == 3:
            shape += _numbers(value)
        elif number == 5:
            contents.append(_bytes(value))
    return Tensor(name, datatype, tuple(shape), b"".join(_contents(part, datatype) for part in contents))


_kept_tensor = lru_cache(maxsize=256)(_new_tensor)


def _about_tensor(tensor: Tensor) -> bytes:
    shape = b"".join(varint(size) for size in tensor.shape)
    return field(1, tensor.name) + field(2, tensor.datatype) + (field(3, shape) if shape else b"")


# ---- requests and answers

FINAL, WANT_FINAL = "triton_final_response", "triton_enable_empty_final_response"
# As it stands in a message, were its two fields in order, as every protobuf library writes them. In any other order the
# answer's end is its status, a moment later.
_FINAL = FINAL.encode() + field(2, field(1, True))


def infer_request(
    model: str, inputs: Sequence[Tensor], parameters: Mapping[str, bool | int | str] | None = None
) -> bytes:
    """ModelInferRequest, its tensors raw."""
    parts = [field(1, model)]
    for name, value in (parameters or {}).items():
        choice = 1 if isinstance(value, bool) else 2 if isinstance(value, int) else 3
        parts.append(field(4, field(1, name) + field(2, field(choice, value))))
    parts += [field(5, _about_tensor(tensor)) for tensor in inputs]
    return b"".join([*parts, *(field(7, tensor.raw) for tensor in inputs)])


def with_id(request_id: str, request: bytes) -> bytes:
    """A ModelInferRequest with its id: fields of a message come in any order."""
    return field(3, request_id) + request


class Response(NamedTuple):
    """ModelInferResponse, or what a ModelStreamInferResponse holds in its place."""

    outputs: Mapping[str, Tensor]
    parameters: Mapping[str, bool | int | str]
    error: str = ""  # of a stream's message; the stream may go on with other requests' answers


def infer_response(message: bytes) -> Response:
    """Raises ValueError for what is no ModelInferResponse."""
    tensors: list[Tensor] = []
    raw: list[bytes] = []
    parameters: dict[str, bool | int | str] = {}
    for number, value in read_fields(message):
        if number == 4:
            entry = _bytes(value)
            parameters.update([_kept_parameter(entry) if len(entry) <= _KEPT_BYTES else _parameter(entry)])
        elif number == 5:
            tensors.append(_read_tensor(_bytes(value)))
        elif number == 6:
            raw.append(_bytes(value))
    if raw and len(raw) != len(tensors):
        raise ValueError(f"{len(raw)} raw contents for {len(tensors)} outputs")
    if raw:
        tensors = [tensor._replace(raw=data) for tensor, data in zip(tensors, raw, strict=True)]
    return Response({tensor.name: tensor for tensor in tensors}, parameters)


def stream_response(message: bytes) -> Response:
    """A message of ModelStreamInfer. Raises ValueError for what is none.

    Triton's is {1: error text, 2: ModelInferResponse}; MLServer streams bare ModelInferResponses, {1: model, 2: version
    or none, ...: outputs}: only those have fields beyond the second.
    """
    found = list(read_fields(message))
    if any(number > 2 for number, _ in found):
        return infer_response(message)
    error = "".join(_text(value) for number, value in found if number == 1)
    inner = b"".join(_bytes(value) for number, value in found if number == 2)
    return infer_response(inner)._replace(error=error)


def is_final(message: bytes) -> bool:
    """Does this message of a stream end the answer? Cheap: run for each."""
    return _FINAL in message and _is_final(message)


def _is_final(message: bytes) -> bool:
    try:
        return stream_response(message).parameters.get(FINAL) is True
    except ValueError:
        return False


def _parameter(entry: bytes) -> tuple[str, bool | int | str]:
    name, found = "", b""
    for number, value in read_fields(entry):
        if number == 1:
            name = _text(value)
        elif number == 2:
            found = _bytes(value)
    said: bool | int | str = ""
    for number, value in read_fields(found):
        if isinstance(value, int):
            said = bool(value) if number == 1 else _signed(value)
        elif number == 3:
            said = _text(value)
    return name, said


_kept_parameter = lru_cache(maxsize=256)(_parameter)


# ---- what a server says of itself, in the JSON of KServe's HTTP protocol


def server_ready(message: bytes) -> bool:
    """Of ServerLive, ServerReady, ModelReady."""
    return any(number == 1 and value == 1 for number, value in read_fields(message))


def server_metadata(message: bytes) -> dict[str, Any]:
    texts = {number: _text(value) for number, value in read_fields(message) if number in (1, 2)}
    return {"name": texts.get(1, ""), "version": texts.get(2, "")}


def model_metadata(message: bytes) -> dict[str, Any]:
    about: dict[str, Any] = {"name": "", "platform": "", "inputs": [], "outputs": []}
    for number, value in read_fields(message):
        if number in (1, 3):
            about["name" if number == 1 else "platform"] = _text(value)
        elif number in (4, 5):
            found = _read_tensor(_bytes(value))
            row = {"name": found.name, "datatype": found.datatype, "shape": list(found.shape)}
            about["inputs" if number == 4 else "outputs"].append(row)
    return about


def repository_index(message: bytes) -> list[dict[str, str]]:
    names = {1: "name", 2: "version", 3: "state"}  # MLServer calls READY State.READY
    return [
        {names[n]: _text(value).removeprefix("State.") for n, value in read_fields(_bytes(row)) if n in names}
        for number, row in read_fields(message)
        if number == 1
    ]
