"""SGLang's own route: each event repeats the whole text so far, and counts the tokens so far.

https://docs.sglang.ai/basic_usage/native_api.html and its tokenizer manager's source: untried on a real server.
"""

from collections.abc import Sequence
from functools import partial

import orjson

from llm_bench.bodies import PINS, SAME, Ask, JsonObject, Words, asked_by, body_in, dumped, prompt_of, whole
from llm_bench.dialect_openai import SGLANG_INFO
from llm_bench.protocol import (
    NOTHING,
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
    error_in,
    held,
    json_of,
    list_of,
    named,
    never_plain,
    object_of,
    read_object,
    text_in,
    word_of,
)
from llm_bench.request import Request

_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "ignore_eos": "ignore_eos", "n": "n"}
_PENALTIES = {name: name for name in ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")}
_WORDS = Words(
    {k: v for k, v in SAME.items() if k != "seed"} | _NAMES | _PENALTIES, "sampling_params", PINS, model=False
)


def _body(request: Request, ask: Ask) -> JsonObject:
    what: JsonObject = {}
    if request.body is None and request.prompt_token_ids is not None:
        what = {"input_ids": list(request.prompt_token_ids)}
    elif request.body is None:
        what = {"text": prompt_of(request, "sglang")}
    return body_in(_WORDS, what, request, ask)


def _decode(data: bytes) -> Chunk:
    if (word := word_of(data)) is not None:
        return word
    if data[:1] == b"[":  # a whole answer of several choices
        return _together([_event(object_of(one, "answer")) for one in list_of(orjson.loads(data), "answers")])
    return _event(read_object(data, "event"))


def _together(chunks: Sequence[Chunk]) -> Chunk:
    """Choices of one answer, in their order: nothing else numbers them. Each counts its own tokens, and the prompt."""
    counts = [chunk.usage.completion_tokens if chunk.usage else -1 for chunk in chunks]
    deltas = [delta._replace(choice=k) for k, chunk in enumerate(chunks) for delta in chunk.deltas]
    first = next((chunk for chunk in chunks if chunk.error), chunks[0] if chunks else NOTHING)
    usage = first.usage and first.usage._replace(completion_tokens=-1 if min(counts) < 0 else sum(counts))
    return first._replace(deltas=tuple(deltas), usage=usage)


def _event(event: JsonObject) -> Chunk:
    said, code = error_in(event)
    meta, text = held(event, "meta_info"), text_in(event, "text")
    if said or not meta:
        return Chunk(error=said, error_code=code)
    reason = meta.get("finish_reason")
    finish = "" if reason is None else text_in(object_of(reason, "finish_reason"), "type")
    if finish in ("abort", "error"):
        why = text_in(object_of(reason, "finish_reason"), "message")
        said = why or f"the server gave up on the answer: finish_reason {finish!r}"
    out = count_in(meta, "completion_tokens")
    usage = Usage(
        count_in(meta, "prompt_tokens"), out, count_in(meta, "cached_tokens"), count_in(meta, "reasoning_tokens")
    )
    queue_s = meta.get("queue_time")
    queue = {"server_queue_ms": queue_s * 1e3} if type(queue_s) is float and queue_s >= 0 else {}
    # All so far: `answer` takes from it what was said before.
    choice = max(0, count_in(event, "index"))  # with n > 1 each event is of one of the choices
    return Chunk((Delta(choice, text, "", "", -1, finish, bool(text) or out > 0),), usage, said, code, server_ms=queue)


def _listed(body: bytes) -> list[Listed]:
    """The one model of /get_model_info."""
    info = json_of(body)
    path = info.get("model_path")
    return [Listed(path, whole(info.get("context_length")) or None)] if isinstance(path, str) else []


ROWS = {
    "sglang": Dialect(
        "/generate",
        lambda request, ask: dumped(_body(request, ask), request),
        _decode,
        partial(bears_token, _decode),
        never_plain,
        takes=Takes(
            "text",
            model="",
            token_ids=True,
            pins=PINS,
            asked=asked_by(_WORDS),
        ),
        comes=Comes(last_word="[DONE]", cumulative=True),
        site=Site(
            models="GET /get_model_info",
            listed=_listed,
            about=(("/get_server_info", lambda page: named(page, SGLANG_INFO)),),
        ),
    )
}
