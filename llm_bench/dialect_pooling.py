"""Single passes over texts: OpenAI's embeddings, and rerankers in Jina's and Cohere's words or TEI's.

An answer comes whole and has no tokens: it is ok when what was asked for is in it, and has a latency and no TTFT.

`embeddings`: https://platform.openai.com/docs/api-reference/embeddings, as vLLM, TEI, llama.cpp and SGLang serve it.
`rerank`: https://jina.ai/reranker and https://docs.cohere.com/reference/rerank, as vLLM serves it under the same path.
`tei-rerank`: https://huggingface.github.io/text-embeddings-inference. All are from their documents: embeddings
are tried on the bundled engine, rerankers on no real server.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import orjson

from llm_bench.bodies import Ask, Asked, JsonObject, Words, body_in, dumped, prompt_of
from llm_bench.dialect_openai import OPENAI_SITE, TGI_INFO
from llm_bench.errors import BenchError
from llm_bench.protocol import (
    Chunk,
    Comes,
    Dialect,
    Headers,
    Listed,
    Site,
    Takes,
    Usage,
    bears_token,
    count_in,
    failed,
    held,
    json_of,
    list_of,
    named,
    never_plain,
    object_of,
    read_object,
)
from llm_bench.request import Request

_WORDS = Words({}, stream=False)
_TEI = Words({}, stream=False, model=False)


def no_length(request: Request, ask: Ask) -> Asked:
    """`Takes.asked` of a single pass: nothing is asked of an answer's length, whatever the trace says of others'."""
    return Asked(None, False, 1)


# ---- what the head of an answer says

_HEADERS = {b"x-queue-time": "server_queue_ms", b"x-inference-time": "server_prefill_ms"}  # TEI's, in ms
_TIMING = {"queue": "server_queue_ms", "compute": "server_prefill_ms", "inference": "server_prefill_ms"}
_NUMBER = re.compile(r"\d{1,10}(?:\.\d{1,10})?")
_PART = re.compile(r"([\w-]+)\s*;\s*dur=(\d{1,10}(?:\.\d{1,10})?)", re.A)  # https://www.w3.org/TR/server-timing
BATCH = b"x-batch-size"  # of the bundled engine: inputs that were computed at once
COMPUTED = b"x-compute-tokens"  # TEI's: of all texts of the request, padding left out


def of_headers(headers: Headers) -> Chunk:
    """The server's own times, by TEI's headers or a Server-Timing, and its batch; the one pass is its prefill."""
    ms: dict[str, float] = {}
    usage = None
    for name, value in headers:
        text = value.decode("latin-1").strip()
        if name == b"server-timing":
            ms |= {_TIMING[part]: float(dur) for part, dur in _PART.findall(text) if part in _TIMING}
        elif name in _HEADERS and _NUMBER.fullmatch(text):
            ms[_HEADERS[name]] = float(text)
        elif name in (COMPUTED, BATCH) and text.isascii() and text.isdigit() and 0 < len(text) < 10:
            if name == COMPUTED:
                usage = Usage(int(text))
            elif int(text):
                ms["server_batch"] = float(text)
    return Chunk(usage=usage, server_ms=ms)


_SINGLE_PASS = Comes(streams=False, single_pass=True, of_headers=of_headers)


def _usage(answer: JsonObject) -> Usage | None:
    """The input's tokens: `prompt_tokens`, or `total_tokens` of those who make no other."""
    usage = held(answer, "usage")
    if not usage:  # Cohere's place for it
        usage = {"prompt_tokens": held(held(answer, "meta"), "tokens").get("input_tokens")}
    tokens = count_in(usage, "prompt_tokens")
    tokens = tokens if tokens >= 0 else count_in(usage, "total_tokens")
    return Usage(tokens) if tokens >= 0 else None


# ---- embeddings


def _embed_body(request: Request, ask: Ask) -> JsonObject:
    if request.body is not None:
        return body_in(_WORDS, {}, request, ask)
    what = request.prompt_token_ids if request.prompt_token_ids is not None else prompt_of(request, "embeddings")
    return body_in(_WORDS, {"input": what}, request, ask)


def _embeddings(data: bytes) -> Chunk:
    answer = read_object(data, "answer")
    if (error := failed(answer)) is not None:
        return error
    vectors = [object_of(one, "embedding").get("embedding") for one in list_of(answer.get("data"), "data")]
    if not vectors or not all(isinstance(vector, list | str | dict) and vector for vector in vectors):
        raise ValueError("data holds no embedding, or an empty one")  # a text: base64; a table: by datatype
    return Chunk(usage=_usage(answer))


# ---- rerankers

DOCUMENTS = 8  # that a prompt is cut into, behind as much for the query; real ones come by `extra`


def query_and_documents(prompt: str) -> tuple[str, list[str]]:
    """One text in DOCUMENTS + 1 parts of as many words: what a pass over all pairs costs grows as the text does.

    A text of few words has fewer documents, and one of a single word is its own.
    """
    words = prompt.split()
    if len(words) < 2:
        return prompt, [prompt]
    parts = min(DOCUMENTS + 1, len(words))
    at = [len(words) * k // parts for k in range(parts + 1)]
    query, *documents = (" ".join(words[a:b]) for a, b in pairwise(at))
    return query, documents


def _rerank_body(api: str, words: Words, documents_key: str, request: Request, ask: Ask) -> JsonObject:
    """Of documents that the trace or the target gives in `extra` the whole prompt is the query."""
    if request.body is not None:
        return body_in(words, {}, request, ask)
    query = prompt_of(request, api)
    given = request.extra.get(documents_key, ask.extra.get(documents_key))
    if given is None:
        query, given = query_and_documents(query)
    elif not isinstance(given, list | tuple) or not given:
        raise BenchError(f"line {request.line}: extra.{documents_key} is not a list of documents, or is empty")
    return body_in(words, {"query": query, documents_key: given}, request, ask)


def _rerank(data: bytes) -> Chunk:
    answer = read_object(data, "answer")
    if (error := failed(answer)) is not None:
        return error
    _check_scores(list_of(answer.get("results"), "results"), "relevance_score")
    return Chunk(usage=_usage(answer))


def _tei_rerank(data: bytes) -> Chunk:
    answer = orjson.loads(data)
    if isinstance(answer, dict):
        return failed(answer) or _refuse(answer)
    _check_scores(list_of(answer, "answer"), "score")
    return Chunk()


def _refuse(answer: Mapping[str, Any]) -> Chunk:
    raise ValueError("an object, not a list of scores")


def _check_scores(ranks: list[Any], key: str) -> None:
    if not ranks:
        raise ValueError("an answer without a score")
    for rank in ranks:
        score = object_of(rank, "rank").get(key)
        if isinstance(score, bool) or not isinstance(score, int | float):
            raise ValueError(f"a rank without {key}")


def _listed_by_tei(body: bytes) -> list[Listed]:
    """The one model of /info."""
    model = json_of(body).get("model_id")
    return [Listed(model)] if isinstance(model, str) and model else []


def _row(
    path: str,
    body: Callable[[Request, Ask], JsonObject],
    decode: Callable[[bytes], Chunk],
    takes: Takes,
    site: Site = OPENAI_SITE,
    tried: str = "",
) -> Dialect:
    return Dialect(
        path,
        lambda request, ask: dumped(body(request, ask), request),
        decode,
        partial(bears_token, decode),
        never_plain,
        takes=takes._replace(asked=no_length),
        comes=_SINGLE_PASS,
        site=site,
        tried=tried,
    )


ROWS = {
    "embeddings": _row(
        "/embeddings", _embed_body, _embeddings, Takes("input", token_ids=True), tried="the bundled engine"
    ),
    "rerank": _row("/rerank", partial(_rerank_body, "rerank", _WORDS, "documents"), _rerank, Takes("query")),
    "tei-rerank": _row(
        "/rerank",
        partial(_rerank_body, "tei-rerank", _TEI, "texts"),
        _tei_rerank,
        Takes("query", model=""),
        Site(models="GET /info", listed=_listed_by_tei, about=(("/info", lambda page: named(page, TGI_INFO)),)),
    ),
}
