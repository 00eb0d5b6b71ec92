"""llama.cpp's own route: one event a token that counts the tokens so far, and the server's own times in the last.

https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md (POST /completion). Tried on its server.
"""

from functools import partial

from llm_bench.bodies import SAME, Ask, JsonObject, Words, asked_by, body_in, dumped, prompt_of, whole
from llm_bench.dialect_openai import LLAMACPP_PROPS, TIMINGS
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
    held,
    json_of,
    list_of,
    ms_by,
    named,
    never_plain,
    read_object,
    text_in,
    word_of,
)
from llm_bench.request import Request

_NAMES = {"max_tokens": "n_predict", "ignore_eos": "ignore_eos", "repetition_penalty": "repeat_penalty"}
_SAMPLER = {name: name for name in ("min_p", "presence_penalty", "frequency_penalty")}
_WORDS = Words(SAME | _NAMES | _SAMPLER, pins=("ignore_eos",), model=False)  # it serves its model whatever is named
_REASONS = {"eos": "stop", "word": "stop", "limit": "length", "none": ""}


def _body(request: Request, ask: Ask) -> JsonObject:
    what: JsonObject = {}
    if request.body is None and request.prompt_token_ids is not None:
        what = {"prompt": list(request.prompt_token_ids)}
    elif request.body is None:
        what = {"prompt": prompt_of(request, "llamacpp")}
    return body_in(_WORDS, what, request, ask)


def _decode(data: bytes) -> Chunk:
    if (word := word_of(data)) is not None:
        return word
    event = read_object(data, "event")
    if (error := failed(event)) is not None:
        return error
    text, ended = text_in(event, "content"), event.get("stop") is True
    timings = held(event, "timings")
    usage = Usage(
        count_in(event, "tokens_evaluated"), count_in(event, "tokens_predicted"), count_in(timings, "cache_n")
    )
    reason = _reason(event) if ended else ""
    ids = len(list_of(event.get("tokens") or [], "tokens")) or -1  # filled only where return_tokens was asked for
    bears = bool(text) or (not ended and "content" in event)  # half a character is a token too
    return Chunk((Delta(0, text, "", "", ids, reason, bears),), usage, server_ms=ms_by(timings, TIMINGS))


def _reason(event: JsonObject) -> str:
    """Before stop_type (end of 2024) three flags said it."""
    word = text_in(event, "stop_type")
    if word:
        return _REASONS.get(word, word)
    return "length" if event.get("stopped_limit") is True else "stop"


def _listed(body: bytes) -> list[Listed]:
    """The one model of /props, by its alias or its file; the context is a slot's."""
    props = json_of(body)
    settings = props.get("default_generation_settings")
    if not isinstance(settings, dict):
        return []
    name = props.get("model_alias") or props.get("model_path") or "the model"
    limit = whole(settings.get("n_ctx")) or whole(props.get("n_ctx")) or None
    return [Listed(str(name).rsplit("/", 1)[-1], limit)]


ROWS = {
    "llamacpp": Dialect(
        "/completion",
        lambda request, ask: dumped(_body(request, ask), request),
        _decode,
        partial(bears_token, _decode),
        never_plain,
        takes=Takes(
            "prompt",
            model="",
            token_ids=True,
            pins=_WORDS.pins,
            asked=asked_by(_WORDS),
        ),
        comes=Comes(),
        site=Site(
            models="GET /props",
            listed=_listed,
            about=(("/props", lambda page: named(page, LLAMACPP_PROPS)),),
        ),
        tried="llama.cpp",
    )
}
