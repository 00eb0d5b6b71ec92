"""KServe v2 over gRPC: texts from decoupled models (Triton's vLLM backend), and models of one pass.

`kserve-grpc` says in tensors what `triton-generate` says in JSON: their names are its keys. Of those it sends what the
model's metadata lists, in its types and shapes; MLServer's lists nothing, and has its one input in `extra.tensors`.
`kserve-grpc-infer` fills the inputs as `kserve-http` does. Messages: `kserve_messages`; calls: `grpc_wire`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import orjson

from llm_bench.bodies import Ask, JsonObject, json_object
from llm_bench.dialect_pooling import no_length
from llm_bench.dialect_triton import ROWS as TRITON
from llm_bench.errors import BenchError
from llm_bench.framing import CHUNKS
from llm_bench.grpc_frames import read_frames
from llm_bench.kserve_messages import (
    WANT_FINAL,
    Response,
    Tensor,
    infer_request,
    infer_response,
    stream_response,
    tensor,
    values_of,
)
from llm_bench.kserve_tensors import TENSORS, Input, described, flat, inputs_of
from llm_bench.protocol import NOTHING, Chunk, Comes, Dialect, Takes, bears_token, never_plain
from llm_bench.request import Request

SERVICE = "/inference.GRPCInferenceService/"
_GENERATE = TRITON["triton-generate"]
_TYPES = {bool: "BOOL", int: "INT32", float: "FP32"}  # of a value whose datatype nobody declared; else BYTES


def _message(model: str, inputs: list[Input], request: Request, parameters: Mapping[str, bool] | None = None) -> bytes:
    try:
        return infer_request(model, [tensor(*one) for one in inputs], parameters)
    except ValueError as e:
        raise BenchError(f"line {request.line}: {e}") from None


# ---- texts in, texts out


def _encode_text(request: Request, ask: Ask) -> bytes:
    """The generate extension's body as tensors; a word of the sampler is one too where the model has such an input."""
    declared = ask.extra.get(TENSORS) or {}
    plain = ask._replace(extra=_without_tensors(ask.extra))
    body: JsonObject = orjson.loads(_GENERATE.encode(replace(request, extra=_without_tensors(request.extra)), plain))
    text = body["text_input"]
    if "model" not in declared:  # of a captured body: the message names the model
        body.pop("model", None)
    values = {**json_object(str(body.get("sampling_parameters"))), **body} if declared else body
    if declared and "text_input" not in declared:
        values[_text_input(declared, request)] = values.pop("text_input")
    table = {name: _about(name, value, declared) for name, value in values.items() if name in declared or name in body}
    if declared:  # a server refuses inputs that the model lacks, so only what was asked for by name is sent
        asked = {*plain.extra, *request.extra}
        table = {name: about for name, about in table.items() if name in declared or name in asked}
        table |= {name: about for name, about in declared.items() if name not in table and _is_given(about)}
    filled = replace(request, prompt=str(text), messages=None, body=None)
    inputs = inputs_of(filled, ask._replace(extra={TENSORS: table}), "kserve-grpc")
    return _message(ask.model or request.model, inputs, request, {WANT_FINAL: True})


def _without_tensors(extra: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in extra.items() if name != TENSORS}


def _is_given(about: Any) -> bool:
    return not isinstance(about, Mapping) or "data" in about


def _text_input(declared: Mapping[str, Any], request: Request) -> str:
    """The first BYTES input, of a model that calls its prompt otherwise."""
    for name, about in declared.items():
        if isinstance(about, Mapping) and about.get("datatype") == "BYTES":
            return name
    raise BenchError(f"line {request.line}: the model has no BYTES input for a prompt; it has {', '.join(declared)}")


def _about(name: str, value: Any, declared: Mapping[str, Any]) -> Any:
    about = declared.get(name)
    if about is not None and _is_given(about):
        return about
    values = flat(value)
    known = about or {"datatype": _TYPES.get(type(values[0]) if values else str, "BYTES"), "shape": [-1]}
    if known.get("datatype") == "BYTES":
        values = [one if isinstance(one, str) else orjson.dumps(one).decode() for one in values]
    return {**known, "data": values}


def _decode_text(data: bytes) -> Chunk:
    return _decode(data, stream_response, _text_chunk)


_HEARD = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens")


def _text_chunk(response: Response) -> Chunk:
    outputs = response.outputs
    others = [one for one in outputs.values() if one.datatype == "BYTES" and one.name not in _HEARD]
    text = outputs.get("text_output", others[0] if others else None)
    if text is None:
        return NOTHING  # the empty final response
    event: JsonObject = {name: _said(outputs[name]) for name in _HEARD if name in outputs}
    event["text_output"] = _said(text)
    chunk = _GENERATE.decode(orjson.dumps({key: value for key, value in event.items() if value is not None}))
    if text.datatype != "BYTES":
        return chunk
    said = _bytes_of(text).decode(errors="surrogateescape")  # half a character, which no JSON can hold
    return chunk._replace(deltas=tuple(delta._replace(text=said) for delta in chunk.deltas))


def _said(one: Tensor) -> Any:
    """The one element of a tensor, or the texts of several together; None of an empty one."""
    values = values_of(one)
    if one.datatype == "BYTES":
        return _bytes_of(one).decode(errors="replace") if values else None
    return values[0] if values else None


def _bytes_of(one: Tensor) -> bytes:
    return b"".join(values_of(one))


# ---- one pass


def _encode_infer(request: Request, ask: Ask) -> bytes:
    """A captured body is KServe's JSON: its inputs go as they stand."""
    if request.body is not None:
        inputs = [_captured(one, request) for one in request.body.get("inputs") or []]
    else:
        inputs = inputs_of(request, ask, "kserve-grpc-infer")
    return _message(ask.model or request.model, inputs, request)


def _captured(one: Any, request: Request) -> Input:
    try:
        return Input(str(one["name"]), str(one["datatype"]), tuple(map(int, one["shape"])), flat(one["data"]))
    except (KeyError, TypeError, ValueError):
        raise BenchError(
            f"line {request.line}: an input of its body is {str(one)[:80]}; expected name, datatype, shape and data"
        ) from None


def _infer_chunk(response: Response) -> Chunk:
    if not response.outputs:
        raise ValueError("an answer without outputs")
    return NOTHING


def _decode_infer(data: bytes) -> Chunk:
    chunk = _decode(data, infer_response, _infer_chunk)
    if chunk.done and not read_frames(data)[0]:
        raise ValueError("an answer without a message")
    return chunk


# ---- both


def _decode(data: bytes, read: Callable[[bytes], Response], chunk_of: Callable[[Response], Chunk]) -> Chunk:
    """Of one frame, or of all that a whole answer has."""
    messages, status = read_frames(data)
    chunk = NOTHING
    for message in messages:
        response = read(message)
        if response.error:
            return Chunk(error=response.error)
        new = chunk_of(response)
        chunk = chunk._replace(deltas=chunk.deltas + new.deltas, usage=new.usage or chunk.usage)
    if status is not None and status.code:
        return Chunk(error=status.text or status.name, error_code=status.name)
    return chunk if status is None else chunk._replace(done=True)


_SITE = _GENERATE.site._replace(described=("/v2/models/{model}", described))

ROWS = {
    "kserve-grpc": Dialect(
        SERVICE + "ModelStreamInfer",
        _encode_text,
        _decode_text,
        partial(bears_token, _decode_text),
        never_plain,
        takes=_GENERATE.takes._replace(model="body"),
        comes=Comes(CHUNKS, ends_by_framing=True, counts_events=True),
        site=_SITE,
        transport="grpc",
        tried="Triton 2.51 with a Python backend of the same names, MLServer 1.7.1",
    ),
    "kserve-grpc-infer": Dialect(
        SERVICE + "ModelInfer",
        _encode_infer,
        _decode_infer,
        partial(bears_token, _decode_infer),
        never_plain,
        takes=Takes("inputs", asked=no_length),
        comes=Comes(CHUNKS, streams=False, single_pass=True, ends_by_framing=True),
        site=_SITE,
        transport="grpc",
        tried="Triton 2.51 with a Python backend, MLServer 1.7.1",
    ),
}
