"""OpenAI's embeddings as values: a body becomes texts to be passed through the model, vectors become an answer.

Fields are those of platform.openai.com/docs/api-reference/embeddings; `include_timings` is this engine's own.
"""

import base64
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from reference_engine.openai_api import ApiError, name_of, shown

MOST_INPUTS = 2048  # of a request, as OpenAI documents
FORMATS = ("float", "base64")
# Fields that would change the vectors, which this engine cannot. Null asks for nothing; others are ignored.
REFUSED = ("dimensions", "truncate_prompt_tokens")

Input = str | list[int]  # a text, or the token ids of one


class EmbeddingAsk(NamedTuple):
    inputs: list[Input]
    base64: bool
    include_timings: bool


def parse(body: Mapping[str, Any], model: str) -> EmbeddingAsk:
    """Token ids are not looked at yet, see `check_ids`. Raises ApiError: 404 for another model, 400 for the rest."""
    asked = body.get("model")
    if asked is not None and asked != model:
        raise ApiError(404, f"the model {shown(asked)} does not exist; there is {model!r}", "model")
    for name in REFUSED:
        if body.get(name) is not None:
            raise ApiError(400, f"{name} is not supported by this engine", name)
    name_of(body, "user")
    encoding = body.get("encoding_format")
    if encoding not in (None, *FORMATS):
        raise ApiError(
            400, f"encoding_format is {shown(encoding)}; would be right: {' or '.join(FORMATS)}", "encoding_format"
        )
    timings = body.get("include_timings")
    if timings not in (None, True, False) or type(timings) is int:
        raise ApiError(400, f"include_timings is {shown(timings)}; would be right: true or false", "include_timings")
    return EmbeddingAsk(_inputs(body.get("input")), encoding == "base64", bool(timings))


def _inputs(given: Any) -> list[Input]:
    """A text, the ids of one, or a list of either kind."""
    alone = isinstance(given, str) or (isinstance(given, list) and bool(given) and _is_ids(given))
    inputs: Any = [given] if alone else given
    if not isinstance(inputs, list) or not 0 < len(inputs) <= MOST_INPUTS:
        right = f"a string, a list of token ids, or a list of 1 to {MOST_INPUTS} of either"
        raise ApiError(400, f"input: would be right: {right}", "input")
    for i, one in enumerate(inputs):
        if not one or not (isinstance(one, str) or (isinstance(one, list) and _is_ids(one))):
            right = "a string or a list of token ids, not empty"
            raise ApiError(400, f"input[{i}] is {shown(one)}; would be right: {right}", "input")
    return inputs


def _is_ids(value: list[Any]) -> bool:
    return all(type(token) is int for token in value)


def check_ids(inputs: Iterable[list[int]], vocab_size: int, longest: int, param: str) -> None:
    """Raises ApiError for a text that the model cannot take in one pass; nothing is cut off silently."""
    for i, ids in enumerate(inputs):
        if not 0 < len(ids) <= longest:
            raise ApiError(
                400, f"{param}[{i}] has {len(ids)} tokens; would be right: 1 to {longest}, those of a pass", param
            )
        wrong = next((t for t in ids if not 0 <= t < vocab_size), None)
        if wrong is not None:
            raise ApiError(400, f"{param}[{i}] has the token id {wrong}; would be right: 0 to {vocab_size - 1}", param)


def answer(
    vectors: Sequence["array[float]"], in_base64: bool, model: str, tokens: int, said: Mapping[str, Any]
) -> bytes:
    """The body, in the order of the inputs; `said` is added to it."""
    data = [
        {"object": "embedding", "index": i, "embedding": packed(v) if in_base64 else v.tolist()}
        for i, v in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return orjson.dumps({"object": "list", "data": data, "model": model, "usage": usage, **said})


def packed(vector: "array[float]") -> str:
    """Base64 of its float32 values, little-endian, as OpenAI's clients unpack it."""
    return base64.b64encode(little_endian(vector)).decode()


def little_endian(vector: "array[float]") -> bytes:
    if sys.byteorder == "big":
        vector = array("f", vector)
        vector.byteswap()
    return vector.tobytes()
