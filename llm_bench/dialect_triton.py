"""Triton Inference Server's generate extension: one text in, texts out, by its vLLM backend or a TensorRT-LLM ensemble.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_generate.md, the backends' sources.
`triton-generate` is tried on Triton 2.51 with a Python backend of the same names; `trtllm-triton` on no ensemble.
"""

from collections.abc import Mapping
from functools import partial

import orjson

from llm_bench.bodies import SAME, Ask, JsonObject, Words, asked_by, body_in, dumped, prompt_of
from llm_bench.protocol import (
    Chunk,
    Comes,
    Delta,
    Dialect,
    Listed,
    Site,
    Takes,
    Usage,
    bears_token,
    count_in,
    failed,
    never_plain,
    read_object,
    text_in,
    word_of,
)
from llm_bench.request import Request

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_SAMPLER = SAME | {name: name for name in ("max_tokens", "min_p", *_PENALTIES)}
_VLLM = Words(
    _SAMPLER | {"ignore_eos": "ignore_eos", "min_tokens": "min_tokens"},
    "sampling_parameters",
    ("ignore_eos", "min_tokens"),
    model=False,
    as_text=True,
)
# The ensemble is greedy unless told otherwise, and takes no temperature of 0.
_TENSORRT = Words(
    {k: v for k, v in _SAMPLER.items() if k != "stop"}
    | {"seed": "random_seed", "min_tokens": "min_tokens", "stop": "stop_words"},
    pins=("min_tokens",),
    model=False,
)


def _vllm_body(request: Request, ask: Ask) -> JsonObject:
    if request.body is not None:
        return body_in(_VLLM, {}, request, ask)
    told = ("exclude_input_in_output", "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
    what = {"text_input": prompt_of(request, "triton-generate"), **dict.fromkeys(told, True)}
    return body_in(_VLLM, what, request, ask)


def _tensorrt_body(request: Request, ask: Ask) -> JsonObject:
    if request.body is not None:
        return body_in(_TENSORRT, {}, request, ask)
    what = {
        "text_input": prompt_of(request, "trtllm-triton"),
        "bad_words": "",  # older ensembles refuse a request without these two
        "stop_words": "",
        "exclude_input_in_output": True,
        "return_perf_metrics": True,
    }
    body = body_in(_TENSORRT, what, request, ask)
    if not body.get("temperature"):
        body.pop("temperature", None)
    return body


def _encode_vllm(request: Request, ask: Ask) -> bytes:
    body = _vllm_body(request, ask)
    if isinstance(body.get("sampling_parameters"), Mapping):  # a tensor of one text
        body["sampling_parameters"] = dumped(body["sampling_parameters"], request).decode()
    return dumped(body, request)


_REASONS = {"None": "", "eos": "stop"}  # "None": the answer goes on


def _decode(data: bytes) -> Chunk:
    if (word := word_of(data)) is not None:
        return word
    event = read_object(data, "event")
    if (error := failed(event)) is not None:
        return error
    text = text_in(event, "text_output")
    finish = text_in(event, "finish_reason")
    count, prompt = count_in(event, "num_output_tokens"), count_in(event, "num_input_tokens")
    delta = Delta(0, text, "", "", count, _REASONS.get(finish, finish), bool(text) or count > 0)
    return Chunk((delta,), Usage(prompt) if prompt >= 0 else None, server_ms=_account(event))


_SPANS = {  # of TensorRT-LLM's own stamps
    "server_queue_ms": ("arrival_time_ns", "first_scheduled_time_ns"),
    "server_prefill_ms": ("first_scheduled_time_ns", "first_token_time_ns"),
    "server_ttft_ms": ("arrival_time_ns", "first_token_time_ns"),
    "server_decode_ms": ("first_token_time_ns", "last_token_time_ns"),
}


def _account(event: JsonObject) -> Mapping[str, float]:
    """Where a request's time went; a stamp of 0 has not been yet."""
    stamps = {k: event.get(k) for pair in _SPANS.values() for k in pair} if "arrival_time_ns" in event else {}
    known = {k: float(v) for k, v in stamps.items() if isinstance(v, int | float) and v > 0}
    return {
        name: (known[end] - known[begin]) / 1e6
        for name, (begin, end) in _SPANS.items()
        if begin in known and end in known and known[end] >= known[begin]
    }


def _listed(body: bytes) -> list[Listed]:
    """The models of POST /v2/repository/index that are ready."""
    try:
        rows = orjson.loads(body)
    except ValueError:
        return []
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    ready = [row.get("name") for row in rows if row.get("state", "READY") == "READY"]
    return [Listed(name) for name in ready if isinstance(name, str)]


def _about(page: JsonObject) -> Mapping[str, str]:
    name, version = page.get("name"), page.get("version")
    return {"engine_version": f"{name} {version}"} if isinstance(name, str) and isinstance(version, str) else {}


_SITE = Site(
    models="POST /v2/repository/index",
    listed=_listed,
    about=(("/v2", _about),),
    speaks=lambda page: page.get("name") == "triton",  # others of KServe's servers have no generate extension
)

ROWS = {
    "triton-generate": Dialect(
        "/v2/models/{model}/generate_stream",
        _encode_vllm,
        _decode,
        partial(bears_token, _decode),
        never_plain,
        whole_path="/v2/models/{model}/generate",
        takes=Takes(
            "text_input",
            model="path",
            pins=_VLLM.pins,
            asked=asked_by(_VLLM),
        ),
        comes=Comes(ends_by_framing=True, counts_events=True),
        site=_SITE,
        tried="Triton 2.51 with a Python backend of the same names",
    ),
    "trtllm-triton": Dialect(
        "/v2/models/{model}/generate_stream",
        lambda request, ask: dumped(_tensorrt_body(request, ask), request),
        _decode,
        partial(bears_token, _decode),
        never_plain,
        whole_path="/v2/models/{model}/generate",
        takes=Takes(
            "text_input",
            model="path",
            pins=_TENSORRT.pins,
            asked=asked_by(_TENSORRT),
        ),
        comes=Comes(ends_by_framing=True, counts_events=True),
        site=_SITE,
    ),
}
