"""Text Generation Inference's own routes: /generate_stream, and /generate for an answer that is not streamed.

https://huggingface.co/docs/text-generation-inference/reference/api_reference and its router's source. A stream is
always HTTP 200: overload and refusals are error events in it. From its source: untried on a real server.
"""

from functools import partial

from llm_bench.bodies import SAME, Ask, JsonObject, Words, asked_by, body_in, dumped, prompt_of, whole
from llm_bench.dialect_openai import TGI_INFO
from llm_bench.protocol import (
    Chunk,
    Comes,
    Delta,
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
    named,
    never_plain,
    object_of,
    read_object,
    text_in,
    word_of,
)
from llm_bench.request import Request

_NAMES = {"max_tokens": "max_new_tokens", "repetition_penalty": "repetition_penalty"}
_WORDS = Words(SAME | _NAMES | {"frequency_penalty": "frequency_penalty"}, "parameters", stream=False, model=False)
_REASONS = {"eos_token": "stop", "stop_sequence": "stop"}


def _body(request: Request, ask: Ask) -> JsonObject:
    if request.body is not None:
        return body_in(_WORDS, {}, request, ask)
    body = body_in(_WORDS, {"inputs": prompt_of(request, "tgi"), "parameters": {"details": True}}, request, ask)
    parameters = body["parameters"]
    if not parameters.get("temperature"):  # 0 is refused there: greedy is the absence of sampling
        parameters.pop("temperature", None)
        parameters.setdefault("do_sample", False)
    else:
        parameters.setdefault("do_sample", True)
    return body


def _decode(data: bytes) -> Chunk:
    if (word := word_of(data)) is not None:
        return word
    if data[:1] == b"[":  # the compatible route "/" wraps a whole answer in a list
        data = data.strip()[1:-1]
    event = read_object(data, "event")
    if (error := failed(event)) is not None:
        return error
    details, token = held(event, "details"), event.get("token")
    reason = text_in(details, "finish_reason")
    ended = event.get("generated_text") is not None
    usage = Usage(count_in(details, "input_length"), count_in(details, "generated_tokens")) if details else None
    if token is not None:
        # A special token's text is no part of the answer.
        token = object_of(token, "token")
        text = "" if token.get("special") is True else text_in(token, "text")
    else:
        text = text_in(event, "generated_text")
    bears = token is not None or bool(text)
    finish = _REASONS.get(reason, reason) or ("stop" if ended else "")
    return Chunk((Delta(0, text, "", "", -1, finish, bears),), usage)


def _of_headers(headers: Headers) -> Chunk:
    """What the head of a whole answer says. x-time-per-token is no TPOT: the prompt's pass is in it."""
    said = {name: value for name, value in headers if name in _COUNTS or name == b"x-queue-time"}
    prompt, out = (_number(said.get(name, b"")) for name in _COUNTS)
    queue_ms = _number(said.get(b"x-queue-time", b""))
    usage = (
        Usage(-1 if prompt is None else prompt, -1 if out is None else out) if (prompt, out) != (None, None) else None
    )
    return Chunk(usage=usage, server_ms={} if queue_ms is None else {"server_queue_ms": float(queue_ms)})


_COUNTS = (b"x-prompt-tokens", b"x-generated-tokens")
MOST_DIGITS = 10  # of a count; Python refuses to read thousands of them


def _number(value: bytes) -> int | None:
    return whole(int(value)) if value.isdigit() and len(value) <= MOST_DIGITS else None


def _listed(body: bytes) -> list[Listed]:
    """The one model of /info; the limit is of prompt and answer together."""
    info = json_of(body)
    limit = whole(info.get("max_total_tokens")) or None
    return [Listed(info["model_id"], limit)] if isinstance(info.get("model_id"), str) else []


ROWS = {
    "tgi": Dialect(
        "/generate_stream",
        lambda request, ask: dumped(_body(request, ask), request),
        _decode,
        partial(bears_token, _decode),
        never_plain,
        whole_path="/generate",
        takes=Takes("inputs", model="", asked=asked_by(_WORDS)),
        comes=Comes(of_headers=_of_headers),
        site=Site(models="GET /info", listed=_listed, about=(("/info", lambda page: named(page, TGI_INFO)),)),
    )
}
