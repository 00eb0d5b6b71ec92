"""The Open Inference Protocol (KServe v2) over HTTP as values, with Triton's binary tensors; no I/O.

https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol and
triton-inference-server/server/docs/protocol/extension_binary_data.md. One model, whose inputs are texts and whose
output is a vector of each. A body with binary tensors is JSON of `Inference-Header-Content-Length` bytes, then the
tensors' bytes in the order of the JSON.
"""

import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from reference_engine.embeddings import MOST_INPUTS, Input, little_endian
from reference_engine.openai_api import ApiError, check_nesting, shown

HEADER_LENGTH = "Inference-Header-Content-Length"
VERSION = "1"
LONGEST_ID = 256  # characters of a request's id, which comes back
INTEGERS = {"INT32": "i", "INT64": "q", "UINT32": "I", "UINT64": "Q"}  # of struct, little-endian
MOST_AXES = 2
PLATFORM = "reference_engine"


class InferAsk(NamedTuple):
    id: str
    inputs: list[Input]
    binary: bool  # the output goes out as bytes


class Tensor(NamedTuple):
    name: str
    datatype: str
    shape: tuple[int, ...]
    values: list[Any]  # bytes of BYTES, else ints; row-major


def server_metadata() -> bytes:
    return orjson.dumps({"name": PLATFORM, "version": VERSION, "extensions": ["binary_tensor_data", "parameters"]})


def model_metadata(model: str, embedding_size: int) -> bytes:
    """Exactly one of the inputs is given."""
    return orjson.dumps({
        "name": model,
        "versions": [VERSION],
        "platform": PLATFORM,
        "inputs": [
            {"name": "text", "datatype": "BYTES", "shape": [-1]},
            {"name": "input_ids", "datatype": "INT64", "shape": [-1, -1], "parameters": {"optional": True}},
            {"name": "attention_mask", "datatype": "INT64", "shape": [-1, -1], "parameters": {"optional": True}},
        ],
        "outputs": [{"name": "embedding", "datatype": "FP32", "shape": [-1, embedding_size]}],
    })  # fmt: skip


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """The protocol has a text alone."""
    return orjson.dumps({"error": message[:500]})


def parse(data: bytes, header_length: str | None) -> InferAsk:
    """Raises ApiError. `header_length`: as the header of that name has it; None: the body is JSON alone."""
    size = len(data)
    if header_length is not None:
        if not (header_length.isascii() and header_length.isdigit() and len(header_length) < 12):
            raise ApiError(400, f"{HEADER_LENGTH} is {shown(header_length)}; would be right: a number of bytes")
        size = int(header_length)
        if size > len(data):
            raise ApiError(400, f"{HEADER_LENGTH} is {size}; would be right: at most the body's {len(data)} bytes")
    try:
        body = orjson.loads(data[:size])
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the request is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"the request is a {type(body).__name__}; would be right: an object")
    check_nesting(data[:size], body)
    given = body.get("id")
    if given is not None and (type(given) is not str or len(given) > LONGEST_ID):
        raise ApiError(400, f"id: would be right: a string of at most {LONGEST_ID} characters")
    tensors = _tensors(body.get("inputs"), data[size:])
    return InferAsk(given or "", _inputs(tensors), _wants_binary(body))


def answer(
    ask: InferAsk, model: str, vectors: Sequence["array[float]"], parameters: Mapping[str, int]
) -> tuple[bytes, int | None]:
    """The body, and of one with a binary tensor the bytes of its JSON."""
    output: dict[str, Any] = {"name": "embedding", "datatype": "FP32", "shape": [len(vectors), len(vectors[0])]}
    raw = b"".join(map(little_endian, vectors)) if ask.binary else b""
    if ask.binary:
        output["parameters"] = {"binary_data_size": len(raw)}
    else:
        output["data"] = [value for vector in vectors for value in vector]
    said = {"id": ask.id} if ask.id else {}
    head = orjson.dumps(
        {**said, "model_name": model, "model_version": VERSION, "parameters": parameters, "outputs": [output]}
    )
    return head + raw, len(head) if ask.binary else None


def _parameters(said: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    parameters = said.get("parameters")
    if parameters is not None and type(parameters) is not dict:
        raise ApiError(400, f"{where}parameters: would be right: an object")
    return parameters or {}


def _flag(parameters: Mapping[str, Any], name: str, otherwise: bool) -> bool:
    value = parameters.get(name, otherwise)
    if type(value) is not bool:
        raise ApiError(400, f"{name} is {shown(value)}; would be right: true or false")
    return value


def _wants_binary(body: Mapping[str, Any]) -> bool:
    """Of the one output, asked for by name or not."""
    binary = _flag(_parameters(body, ""), "binary_data_output", False)
    outputs = body.get("outputs")
    if outputs is None or outputs == []:
        return binary
    if not isinstance(outputs, list) or not all(isinstance(o, dict) for o in outputs):
        raise ApiError(400, "outputs: would be right: a list of objects")
    names = [output.get("name") for output in outputs]
    if names != ["embedding"]:
        raise ApiError(400, f"outputs are {shown(names)}; would be right: 'embedding' alone")
    parameters = _parameters(outputs[0], "outputs[0].")
    if parameters.get("classification"):
        raise ApiError(400, "classification is not supported by this engine")
    return _flag(parameters, "binary_data", binary)


def _tensors(given: Any, raw: bytes) -> dict[str, Tensor]:
    """By name, those of the JSON and the bytes behind it. Raises ApiError unless all bytes belong to a tensor."""
    if not isinstance(given, list) or not given:
        raise ApiError(400, "inputs: would be right: a list of tensors, not empty")
    tensors: dict[str, Tensor] = {}
    at = 0
    for i, said in enumerate(given[: len(KINDS) + 1]):
        where = f"inputs[{i}]"
        if not isinstance(said, dict):
            raise ApiError(400, f"{where}: would be right: an object")
        name = said.get("name")
        if type(name) is not str or name not in KINDS or name in tensors:
            raise ApiError(400, f"{where}.name is {shown(name)}; would be right: one of {', '.join(KINDS)}, each once")
        datatype, shape = said.get("datatype"), _shape(said.get("shape"), where)
        if datatype not in KINDS[name]:
            raise ApiError(400, f"{where}.datatype is {shown(datatype)}; would be right: {' or '.join(KINDS[name])}")
        count = shape[0] * (shape[1] if len(shape) == MOST_AXES else 1)
        size = _parameters(said, f"{where}.").get("binary_data_size")
        if size is None:
            values = _from_json(said.get("data"), datatype, shape, where)
        else:
            if type(size) is not int or not 0 <= size <= len(raw) - at:
                left = len(raw) - at
                raise ApiError(
                    400, f"{where}: binary_data_size is {shown(size)}; would be right: 0 to {left}, the rest"
                )
            values = _from_bytes(raw[at : at + size], datatype, where, count)
            at += size
        if len(values) != count:
            raise ApiError(400, f"{where} has {len(values)} values; would be right: {count}, of shape {list(shape)}")
        tensors[name] = Tensor(name, datatype, shape, values)
    if at != len(raw):
        raise ApiError(400, f"{len(raw) - at} bytes behind the last tensor; would be right: none")
    return tensors


def _shape(given: Any, where: str) -> tuple[int, ...]:
    if (
        not isinstance(given, list)
        or not 0 < len(given) <= MOST_AXES
        or not all(type(n) is int and 0 < n < 2**31 for n in given)
    ):
        raise ApiError(400, f"{where}.shape is {shown(given)}; would be right: one or two sizes, each 1 or more")
    return tuple(given)


def _from_json(data: Any, datatype: str, shape: tuple[int, ...], where: str) -> list[Any]:
    """Flat, or in rows as `shape` has them."""
    if isinstance(data, list) and data and all(isinstance(row, list) for row in data):
        if len(shape) < MOST_AXES or not all(len(row) == shape[1] for row in data):
            raise ApiError(400, f"{where}.data has rows that are not of shape {list(shape)}")
        data = [value for row in data for value in row]
    if not isinstance(data, list):
        raise ApiError(400, f"{where}.data: would be right: a list, or parameters.binary_data_size")
    if datatype == "BYTES":
        if not all(type(v) is str for v in data):
            raise ApiError(400, f"{where}.data: would be right: strings")
        return [v.encode() for v in data]
    if not all(type(v) is (bool if datatype == "BOOL" else int) for v in data):
        raise ApiError(400, f"{where}.data: would be right: values of {datatype}")
    return [int(v) for v in data]


def _from_bytes(raw: bytes, datatype: str, where: str, count: int) -> list[Any]:
    """BYTES: each as its length in four bytes, then itself."""
    if datatype == "BOOL":
        return list(raw)
    if datatype != "BYTES":
        code = "<" + INTEGERS[datatype]
        if len(raw) != count * struct.calcsize(code):
            right = count * struct.calcsize(code)
            raise ApiError(400, f"{where} has {len(raw)} bytes; would be right: {right}, {count} of {datatype}")
        return [value for (value,) in struct.iter_unpack(code, raw)]
    values: list[Any] = []
    at = 0
    while at < len(raw) and len(values) <= count:
        size = int.from_bytes(raw[at : at + 4], "little")
        if at + 4 + size > len(raw):
            raise ApiError(400, f"{where}: element {len(values)} ends beyond the tensor's {len(raw)} bytes")
        values.append(raw[at + 4 : at + 4 + size])
        at += 4 + size
    return values


# The inputs that there are, and what each may be made of.
KINDS: dict[str, tuple[str, ...]] = {
    "text": ("BYTES",),
    "input_ids": tuple(INTEGERS),
    "attention_mask": (*INTEGERS, "BOOL"),
}


def _inputs(tensors: Mapping[str, Tensor]) -> list[Input]:
    """Texts, or rows of token ids up to where the mask has its zeros."""
    text, ids, mask = (tensors.get(name) for name in KINDS)
    if (text is None) == (ids is None) or (mask and not ids):
        right = "text, or input_ids with or without attention_mask"
        raise ApiError(400, f"inputs are {', '.join(tensors)}; would be right: {right}")
    if text:
        if text.shape[1:] not in ((), (1,)):
            raise ApiError(400, f"text has the shape {list(text.shape)}; would be right: [n] or [n, 1]")
        inputs: list[Input] = [_text(value, i) for i, value in enumerate(text.values)]
    else:
        assert ids
        inputs = [*_rows(ids, mask)]
    if len(inputs) > MOST_INPUTS:
        raise ApiError(400, f"{len(inputs)} texts; would be right: at most {MOST_INPUTS}")
    return inputs


def _text(value: bytes, i: int) -> str:
    try:
        text = value.decode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"text[{i}] is no UTF-8: {error.reason} at byte {error.start}") from error
    if not text:
        raise ApiError(400, f"text[{i}] is empty; would be right: a text")
    return text


def _rows(ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    if len(ids.shape) < MOST_AXES:
        raise ApiError(400, f"input_ids has the shape {list(ids.shape)}; would be right: [texts, tokens]")
    if mask and mask.shape != ids.shape:
        raise ApiError(400, f"attention_mask has the shape {list(mask.shape)}; would be right: {list(ids.shape)}")
    rows, width = [], ids.shape[1]
    for start in range(0, len(ids.values), width):
        n = width
        if mask:
            seen = mask.values[start : start + width]
            n = sum(v == 1 for v in seen)
            if not n or seen != [1] * n + [0] * (width - n):
                raise ApiError(
                    400, f"row {start // width} of attention_mask is {shown(seen)}; would be right: ones, then zeros"
                )
        rows.append(ids.values[start : start + n])
    return rows
