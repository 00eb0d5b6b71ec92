"""What the server serves, as an OpenAPI 3.1 document made from the tables that requests are checked by.

Field names and types are OpenAI's; limits are this server's. A body may have more fields: unknown ones are ignored.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from reference_engine.embeddings import FORMATS, MOST_INPUTS
from reference_engine.embeddings import REFUSED as NO_SUCH
from reference_engine.faults import FAULTS, Choice, Field, fields_of
from reference_engine.kserve import KINDS, LONGEST_ID, MOST_AXES
from reference_engine.openai_api import (
    CHAT,
    COMPLETION,
    ERROR_TYPES,
    FLAGS,
    LONGEST_NAME,
    LONGEST_STOP,
    MOST_MESSAGES,
    MOST_STOPS,
    NAMES,
    RANGES,
    REFUSED,
    STREAM_FLAGS,
    Kind,
    Range,
)
from reference_engine.scoring import MOST_TOP

Schema = dict[str, Any]
JSON, SSE, TEXT, BYTES = "application/json", "text/event-stream", "text/plain", "application/octet-stream"

# Of each route: what it is for, and the statuses that an answer may have beside 200.
ROUTES: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {
    ("GET", "/health"): ("Whether the engine runs: 503 while it is being restarted, 500 if it never will", (500, 503)),
    ("GET", "/ready"): ("Whether a request would be taken: not while draining or down", (503,)),
    ("GET", "/metrics"): ("Prometheus text, vLLM's names", ()),
    ("GET", "/openapi.json"): ("This document", ()),
    ("GET", "/v1/models"): ("The model, in OpenAI's list", (401,)),
    ("GET", "/v1/engine"): ("Effective configuration and state", (401, 500, 503)),
    ("POST", "/v1/completions"): ("An answer to a prompt", (400, 401, 404, 408, 413, 415, 429, 500, 503)),
    ("POST", "/v1/chat/completions"): ("An answer to a conversation", (400, 401, 404, 408, 413, 415, 429, 500, 503)),
    ("POST", "/v1/embeddings"): ("A vector of each text", (400, 401, 404, 408, 413, 415, 429, 500, 503)),
    ("POST", "/v1/load_lora_adapter"): ("Load a LoRA adapter (--lora-dir)", (400, 401, 408, 413, 415, 500, 503)),
    ("POST", "/v1/unload_lora_adapter"): ("Unload one that nobody uses", (400, 401, 404, 408, 409, 413, 415, 500, 503)),
    ("GET", "/v2"): ("The server, in KServe v2's words", (401,)),
    ("GET", "/v2/health/live"): ("As /health", (500, 503)),
    ("GET", "/v2/health/ready"): ("As /ready", (503,)),
    ("GET", "/v2/models/{model}"): ("Its inputs and outputs", (400, 401, 404, 500, 503)),
    ("GET", "/v2/models/{model}/ready"): ("As /ready", (401, 404, 503)),
    ("POST", "/v2/models/{model}/infer"): (
        "A vector of each text, by KServe v2; with binary tensors the header Inference-Header-Content-Length says how "
        "many bytes are JSON",
        (400, 401, 404, 408, 413, 415, 429, 500, 503),
    ),
    ("POST", "/fault"): ("Plant a fault (--allow-faults)", (400, 401, 408, 413, 415, 503)),
    ("GET", "/fault"): ("Faults that are active", (401,)),
    ("DELETE", "/fault"): ("No faults any more", (401, 500, 503)),
}


def document(routes: Iterable[tuple[str, str]], vocab_size: int, max_body_bytes: int) -> Schema:
    """`routes`: those of ROUTES that are served."""
    bodies = {
        "/v1/completions": {"anyOf": [_generate(COMPLETION, vocab_size), _score(vocab_size)]},
        "/v1/chat/completions": _generate(CHAT, vocab_size),
        "/v1/embeddings": _embed(vocab_size),
        "/v1/load_lora_adapter": _texts("lora_name", "lora_path"),
        "/v1/unload_lora_adapter": _texts("lora_name"),
        "/v2/models/{model}/infer": INFER,
        "/fault": {"oneOf": [_fault(name) for name in FAULTS]},
    }
    paths: dict[str, Schema] = {}
    for method, path in routes:
        summary, statuses = ROUTES[method, path]
        said: Schema = {"summary": summary, "responses": {"200": _answer(path)}}
        kind = "kserve_error" if path.startswith("/v2") else "error"
        said["responses"] |= {str(status): {"$ref": f"#/components/responses/{kind}"} for status in statuses}
        if method == "POST":
            said["requestBody"] = {
                "required": True,
                "description": f"at most {max_body_bytes} bytes",
                "content": {JSON: {"schema": bodies[path]}} | ({BYTES: {}} if path.endswith("/infer") else {}),
            }
        if "{model}" in path:
            said["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        if 401 in statuses:
            said["security"] = [{}, {"key": []}]  # a key is asked for only where the server was given one
        paths.setdefault(path, {})[method.lower()] = said
    return {
        "openapi": "3.1.0",
        "info": {"title": "reference_engine", "version": "1"},
        "paths": paths,
        "components": {
            "responses": {
                "error": {"description": "no answer", "content": {JSON: {"schema": ERROR}}},
                "kserve_error": {"description": "no answer", "content": {JSON: {"schema": KSERVE_ERROR}}},
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": [*ERROR_TYPES.values(), "InternalServerError"]},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
        }
    },
}
KSERVE_ERROR: Schema = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


def _answer(path: str) -> Schema:
    kinds = {
        "/metrics": (TEXT,),
        "/v1/load_lora_adapter": (TEXT,),
        "/v1/unload_lora_adapter": (TEXT,),
        "/v2/models/{model}/infer": (JSON, BYTES),
        "/v1/completions": (JSON, SSE),
        "/v1/chat/completions": (JSON, SSE),
    }
    return {"description": "the answer", "content": {kind: {} for kind in kinds.get(path, (JSON,))}}


def _prompt(vocab_size: int) -> Schema:
    ids: Schema = {
        "type": "array",
        "minItems": 1,
        "items": {"type": "integer", "minimum": 0, "maximum": vocab_size - 1},
    }
    text: Schema = {"type": "string", "minLength": 1}
    alone: Schema = {"type": "array", "minItems": 1, "maxItems": 1, "items": {"anyOf": [text, ids]}}
    return {"anyOf": [text, ids, alone]}


def _score(vocab_size: int) -> Schema:
    return {
        "type": "object",
        "description": "The log probabilities of the prompt's own tokens; not of a simulated model",
        "required": ["prompt", "echo", "max_tokens", "logprobs"],
        "properties": {
            "model": {"type": ["string", "null"]},
            "prompt": _prompt(vocab_size),
            "echo": {"const": True},
            "max_tokens": {"const": 0},
            "logprobs": {"type": "integer", "minimum": 0, "maximum": MOST_TOP},
            "stream": {"enum": [None, False]},
            "n": {"enum": [None, 1]},
        },
    }


def _generate(kind: Kind, vocab_size: int) -> Schema:
    stop: Schema = {"type": "string", "minLength": 1, "maxLength": LONGEST_STOP}
    flags: Schema = {name: _or_null({"type": "boolean"}) for name in STREAM_FLAGS}
    properties: Schema = {
        "model": {"type": ["string", "null"]},
        "stop": {"anyOf": [stop, {"type": "array", "maxItems": MOST_STOPS, "items": stop}, {"type": "null"}]},
        "stream_options": _or_null({"type": "object", "properties": flags}),
        "best_of": {"type": ["integer", "null"], "description": "n or nothing"},
    }
    properties |= {name: _range(allowed) for name, allowed in RANGES.items()}
    properties |= {name: _or_null({"type": "boolean"}) for name in FLAGS}
    properties |= {name: _or_null({"type": "string", "maxLength": LONGEST_NAME}) for name in NAMES}
    properties |= {name: {"enum": [None, *neutral]} for name, neutral in REFUSED.items()}
    if kind is CHAT:
        properties["messages"] = {"type": "array", "minItems": 1, "maxItems": MOST_MESSAGES, "items": MESSAGE}
        return {"type": "object", "required": ["messages"], "properties": properties}
    del properties["max_completion_tokens"]
    properties["prompt"] = _prompt(vocab_size)
    return {"type": "object", "required": ["prompt"], "properties": properties}


def _embed(vocab_size: int) -> Schema:
    ids: Schema = {
        "type": "array",
        "minItems": 1,
        "items": {"type": "integer", "minimum": 0, "maximum": vocab_size - 1},
    }
    text: Schema = {"type": "string", "minLength": 1}
    many: Schema = {"type": "array", "minItems": 1, "maxItems": MOST_INPUTS, "items": {"anyOf": [text, ids]}}
    properties: Schema = {
        "input": {"anyOf": [text, ids, many]},
        "model": {"type": ["string", "null"]},
        "encoding_format": {"enum": [None, *FORMATS]},
        "user": _or_null({"type": "string", "maxLength": LONGEST_NAME}),
        "include_timings": _or_null({"type": "boolean"}),
    }
    properties |= {name: {"enum": [None]} for name in NO_SUCH}
    return {"type": "object", "required": ["input"], "properties": properties}


def _texts(*names: str) -> Schema:
    text: Schema = {"type": "string", "minLength": 1, "maxLength": LONGEST_NAME}
    return {"type": "object", "required": [*names], "properties": dict.fromkeys(names, text)}


TENSOR: Schema = {
    "type": "object",
    "required": ["name", "datatype", "shape"],
    "properties": {
        "name": {"enum": [*KINDS]},
        "datatype": {"enum": sorted({kind for kinds in KINDS.values() for kind in kinds})},
        "shape": {"type": "array", "minItems": 1, "maxItems": MOST_AXES, "items": {"type": "integer", "minimum": 1}},
        "data": {"type": "array", "description": "row-major, flat or in rows"},
        "parameters": {"type": "object", "properties": {"binary_data_size": {"type": "integer", "minimum": 0}}},
    },
}
INFER: Schema = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": ["string", "null"], "maxLength": LONGEST_ID},
        "parameters": {"type": ["object", "null"], "properties": {"binary_data_output": {"type": "boolean"}}},
        "inputs": {"type": "array", "minItems": 1, "maxItems": 2, "items": TENSOR},
        "outputs": {"type": ["array", "null"], "maxItems": 1, "items": {"type": "object", "required": ["name"]}},
    },
}

PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
MESSAGE: Schema = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"type": "string", "maxLength": LONGEST_NAME, "description": "those of the model's chat template"},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": PART}]},
    },
}


def _range(allowed: Range) -> Schema:
    whole = type(allowed.low) is int
    limits: Schema = {"type": ["integer" if whole else "number", "null"], "minimum": allowed.low}
    limits |= {} if allowed.high is None else {"maximum": allowed.high}
    return limits | ({} if allowed.default is None else {"default": allowed.default})


def _or_null(schema: Schema) -> Schema:
    return {**schema, "type": [schema["type"], "null"]}


def _fault(name: str) -> Schema:
    fields: Mapping[str, Field] = fields_of(FAULTS[name])
    return {
        "type": "object",
        "description": FAULTS[name].text,
        "required": ["kind"],
        "additionalProperties": False,
        "properties": {"kind": {"const": name}, **{field: _field(rule) for field, rule in fields.items()}},
    }


def _field(rule: Field) -> Schema:
    if isinstance(rule, Choice):
        return {"enum": [*rule.values, None], "default": rule.values[0], "description": rule.text}
    kind = "integer" if type(rule.default) is int else "number"
    limits = {"minimum": rule.low, "maximum": rule.high, "default": rule.default}
    return {"type": [kind, "null"], "description": rule.text, **limits}
