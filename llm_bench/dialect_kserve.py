"""KServe v2 over HTTP, `/v2/models/{model}/infer`: one pass over named tensors, as JSON or with binary tensors.

https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol and Triton's
docs/protocol/extension_binary_data.md. Which inputs a model has is read from its own metadata (`kserve_tensors`).
Tried on the bundled engine and on recorded answers of Triton 2.51 and MLServer 1.7.1; untried against those two live.
"""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import orjson

from llm_bench.bodies import Ask, JsonObject, dumped
from llm_bench.dialect_pooling import no_length, of_headers
from llm_bench.dialect_triton import ROWS as TRITON
from llm_bench.errors import BenchError
from llm_bench.kserve_messages import tensor
from llm_bench.kserve_tensors import TENSORS, Input, described, inputs_of
from llm_bench.protocol import (
    Chunk,
    Comes,
    Dialect,
    Takes,
    bears_token,
    failed,
    held,
    list_of,
    never_plain,
    object_of,
)
from llm_bench.request import Request

HEAD = "Inference-Header-Content-Length"
_NOT_IN_JSON = "FP16"  # has no JSON form that servers take


def _body(request: Request, ask: Ask, inputs: list[JsonObject], **ours: Any) -> bytes:
    """The JSON. What `extra` has beside the tensors stands at its top: id, parameters, outputs."""
    said: JsonObject = {**ask.extra, **(request.body or {}), **request.extra}
    said.pop(TENSORS, None)
    if request.body is not None:
        return dumped(said, request)
    parameters = {**ours, **held(said, "parameters")}
    if parameters:
        said["parameters"] = parameters
    return dumped({**said, "inputs": inputs}, request)


def _about(one: Input) -> JsonObject:
    return {"name": one.name, "shape": list(one.shape), "datatype": one.datatype}


def _encode_json(request: Request, ask: Ask) -> bytes:
    if request.body is not None:
        return _body(request, ask, [])
    inputs = inputs_of(request, ask, "kserve-http")
    for one in inputs:
        if one.datatype == _NOT_IN_JSON:
            raise BenchError(
                f"line {request.line}: input {one.name} is {one.datatype}, which JSON cannot hold; "
                "use --api kserve-binary"
            )
    return _body(request, ask, [{**_about(one), "data": one.values} for one in inputs])


def _encode_binary(request: Request, ask: Ask) -> bytes:
    """The JSON as one line, then the tensors' bytes: `header_length` finds the line's end again."""
    if request.body is not None:
        return _body(request, ask, [])
    raw, inputs = [], []
    for one in inputs_of(request, ask, "kserve-binary"):
        try:
            data = tensor(one.name, one.datatype, one.shape, one.values).raw
        except ValueError as e:
            raise BenchError(f"line {request.line}: {e}") from None
        raw.append(data)
        inputs.append({**_about(one), "parameters": {"binary_data_size": len(data)}})
    return b"".join([_body(request, ask, inputs, binary_data_output=True), b"\n", *raw])


def no_headers(body: bytes) -> tuple[tuple[str, str], ...]:
    return ()


def binary_headers(body: bytes) -> tuple[tuple[str, str], ...]:
    """Of a body with binary tensors: how long its JSON is. orjson writes no line end within it."""
    length = body.find(b"\n") + 1
    return ((HEAD, str(length)),) if length else ()


BODY_HEADERS = {"kserve-binary": binary_headers}  # transport -> headers that depend on a request's body


def _decode(data: bytes) -> Chunk:
    """A whole answer, its binary tensors behind its JSON; one with fewer bytes than it announces is none."""
    answer, behind = _split(data)
    if (error := failed(answer)) is not None:
        return error
    outputs = [object_of(output, "output") for output in list_of(answer.get("outputs"), "outputs")]
    if not outputs:
        raise ValueError("an answer without outputs")
    sizes = [held(output, "parameters").get("binary_data_size") for output in outputs]
    announced = sum(size for size in sizes if type(size) is int and size >= 0)
    if announced != behind:
        raise ValueError(f"{behind} bytes of binary tensors where the answer announces {announced}")
    for output, size in zip(outputs, sizes, strict=True):
        if size is None and "data" not in output:
            raise ValueError(f"output {str(output.get('name'))[:80]!r} has no data")
    return Chunk(server_ms=_account(answer))


_PARTS = {"queue_ns": "server_queue_ms", "compute_ns": "server_prefill_ms"}  # the bundled engine's


def _account(answer: JsonObject) -> Mapping[str, float]:
    said = answer.get("parameters")
    parameters = said if isinstance(said, dict) else {}
    return {
        ours: parameters[name] / 1e6
        for name, ours in _PARTS.items()
        if type(parameters.get(name)) is int and 0 <= parameters[name] < 2**63
    }


def _split(data: bytes) -> tuple[JsonObject, int]:
    """(the JSON, how many bytes follow it): its length stands in a header that a decoder does not see."""
    try:
        return object_of(orjson.loads(data), "answer"), 0
    except orjson.JSONDecodeError:
        if data.lstrip()[:1] != b"{":
            raise
    try:
        _, end = json.JSONDecoder().raw_decode(data.decode("latin-1"))  # a character a byte
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    return object_of(orjson.loads(data[:end]), "answer"), len(data) - end


_SITE = TRITON["triton-generate"].site._replace(described=("/v2/models/{model}", described), speaks=bool)
_TAKES = Takes("inputs", model="path", asked=no_length)
_COMES = Comes(streams=False, single_pass=True, of_headers=of_headers)

ROWS = {
    "kserve-http": Dialect(
        "/v2/models/{model}/infer",
        _encode_json,
        _decode,
        partial(bears_token, _decode),
        never_plain,
        takes=_TAKES,
        comes=_COMES,
        site=_SITE,
        tried="Triton 2.51, MLServer 1.7.1, the bundled engine",
    ),
    "kserve-binary": Dialect(
        "/v2/models/{model}/infer",
        _encode_binary,
        _decode,
        partial(bears_token, _decode),
        never_plain,
        takes=_TAKES,
        comes=_COMES,
        site=_SITE,
        transport="kserve-binary",
        tried="Triton 2.51, the bundled engine",
    ),
}
