"""Texts streamed as HTTP chunks, without events: TorchServe, and what an own app of Ray Serve yields.

A chunk is a token border and no more: how many tokens it holds, why the answer ended and what the prompt cost are not
said, and only the last chunk proves that it is whole. What a handler reads is its author's: here it is sent `prompt`,
`max_tokens` and `stream`, and more by the target's `extra`. Tried on TorchServe 0.12
(https://pytorch.org/serve/inference_api.html); an own app of Ray Serve is from its documents
(https://docs.ray.io/en/latest/serve/tutorials/streaming.html).
"""

from collections.abc import Mapping
from functools import partial

import orjson

from llm_bench.bodies import PINS, SAME, Ask, JsonObject, Words, asked_by, body_in, dumped, prompt_of
from llm_bench.framing import CHUNKS
from llm_bench.protocol import (
    Chunk,
    Comes,
    Delta,
    Dialect,
    Listed,
    Loaded,
    Management,
    Site,
    Takes,
    Usage,
    bears_token,
    count_in,
    failed,
    held,
    in_words,
    json_of,
    list_of,
    named,
    object_of,
    text_in,
)
from llm_bench.request import Request

_WORDS = Words(SAME | {"max_tokens": "max_tokens"} | {pin: pin for pin in PINS}, model=False)


def _body(api: str, request: Request, ask: Ask) -> JsonObject:
    what = {} if request.body is not None else {"prompt": prompt_of(request, api)}
    return body_in(_WORDS, what, request, ask)


def _decode(data: bytes) -> Chunk:
    """A chunk is text; one that is an object, as some handlers write, has its text under a name of its own.

    A character may be cut between two chunks: its bytes stay as they are until `answer.joined` has them all.
    """
    if data[:1] == b"{" and (event := _object_in(data)):
        if error := _error(event):
            return error
        for key in ("text", "token", "generated_text", "output"):
            if isinstance(event.get(key), str):
                usage = Usage(completion_tokens=count_in(event, "tokens")) if "tokens" in event else None
                return Chunk((Delta(0, text_in(event, key), bears_token=bool(event[key])),), usage)
    return Chunk((Delta(0, data.decode(errors="surrogateescape"), bears_token=bool(data)),))


def _object_in(data: bytes) -> JsonObject:
    try:
        value = orjson.loads(data)
    except ValueError:
        return {}  # a token that is a brace
    return value if isinstance(value, dict) else {}


def _error(event: JsonObject) -> Chunk | None:
    """TorchServe's own shape beside the usual ones."""
    if {"code", "type", "message"} <= event.keys():
        return Chunk(error=in_words(event["message"]), error_code=in_words(event["code"]))
    return failed(event)


def _plain(data: bytes) -> str | None:
    if not data or data[:1] == b"{":
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _row(api: str, path: str, takes: Takes, site: Site, tried: str = "") -> Dialect:
    return Dialect(
        path,
        lambda request, ask: dumped(_body(api, request, ask), request),
        _decode,
        partial(bears_token, _decode),
        _plain,
        takes=takes._replace(asked=asked_by(_WORDS)),
        comes=Comes(CHUNKS, ends_by_framing=True),
        site=site,
        tried=tried,
    )


# TorchServe's management API: https://pytorch.org/serve/management_api.html, as 0.12 answers.


def _listed(body: bytes) -> list[Listed]:
    models = json_of(body).get("models")
    names = [row.get("modelName") for row in models if isinstance(row, dict)] if isinstance(models, list) else []
    return [Listed(name) for name in names if isinstance(name, str)]


def _loaded(body: bytes) -> Loaded | None:
    """The default version, which comes first and alone."""
    try:
        (page, *_) = map(partial(object_of, what="model"), list_of(orjson.loads(body), "models"))
        workers = [object_of(worker, "worker").get("status") for worker in list_of(page.get("workers"), "workers")]
        most = max(count_in(page, "minWorkers"), len(workers))
        return Loaded(text_in(page, "modelVersion"), workers.count("READY"), most, max(count_in(page, "batchSize"), 1))
    except ValueError:  # of unpacking too
        return None


def _about(page: JsonObject) -> Mapping[str, str]:
    try:
        return named(held(page, "info"), {"version": "engine_version"})
    except ValueError:
        return {}


ROWS = {
    "torchserve": _row(
        "torchserve",
        "/predictions/{model}",
        Takes("prompt", model="path"),
        Site(
            ready="/ping",
            is_ready=lambda body: json_of(body).get("status") == "Healthy",
            about=(("/api-description", _about),),
            managed=Management(8081, "/models", _listed, "/models/{model}", _loaded),
        ),
        "TorchServe 0.12",
    ),
    # The target's URL is the app's route, whatever it is; the proxy's own pages are at the origin.
    "ray-serve": _row(
        "ray-serve",
        "",
        Takes("prompt", model=""),
        Site(ready="/-/routes", is_ready=lambda body: any(route[:1] == "/" for route in json_of(body)), at_origin=True),
        "Ray Serve 2.60 with an app of our own",
    ),
}
