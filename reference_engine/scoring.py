"""Log probabilities of a given text, token by token: what agreement and perplexity of two precisions are made of.

A text is scored in a cache of its own, a few tokens at a time between two steps of the engine, so that those who are
being served wait for one piece and not for a whole text. Nothing of it is cached, and nothing cached is read: a token
whose KV came from the prefix cache has no logits.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from reference_engine import openai_api
from reference_engine.openai_api import COMPLETION, ApiError, Ask
from reference_engine.runner_api import Runner
from reference_engine.sequence import SamplingParams, Sequence
from reference_engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from reference_engine.runner import ModelRunner

PIECE = 128  # tokens of a step
MOST_TOP = 20  # likeliest tokens that may be asked for at each place


class Scored(NamedTuple):
    """A token that is there, given all before it."""

    token: int
    logprob: float | None  # natural; None of the first, which follows nothing
    top: list[tuple[int, float]]  # the likeliest tokens here, best first, lowest id first among equals


def is_scoring(body: Mapping[str, Any]) -> bool:
    """Whether a body of /v1/completions asks for the log probabilities of its own prompt, as OpenAI's first API has
    it and vLLM keeps it: `echo` without an answer, and `logprobs` likeliest tokens at each place."""
    numbers = [body.get("max_tokens"), body.get("logprobs")]
    return body.get("echo") is True and all(type(n) is int for n in numbers) and numbers[0] == 0


def parse_scoring(body: Mapping[str, Any], model: str, vocab_size: int) -> Ask:
    """Of a body that `is_scoring`. Raises ApiError as `openai_api.parse` does."""
    plain = {**body, "echo": None, "logprobs": None, "max_tokens": 1}
    ask = openai_api.parse(plain, COMPLETION, model, vocab_size)
    if ask.stream or ask.n != 1:
        raise ApiError(400, "echo without an answer is one whole choice; would be right: stream false, n 1", "echo")
    if not 0 <= body["logprobs"] <= MOST_TOP:
        shown = openai_api.shown(body["logprobs"])
        raise ApiError(400, f"logprobs is {shown}; would be right: an integer from 0 to {MOST_TOP}", "logprobs")
    return ask


def scorer(runner: Runner | None) -> "ModelRunner | None":
    """The runner if it computes logits: one that only takes the time has no model. Told without importing torch."""
    return cast("ModelRunner", runner) if hasattr(runner, "model") else None


def score(runner: "ModelRunner", token_ids: list[int], top: int) -> Iterator[list[Scored]]:
    """Pieces of the text's tokens; each `next` takes one step of the device, in the thread that owns the runner.

    Raises ValueError for a text that is empty or longer than the model's positions, for `top` beyond MOST_TOP and for
    tokens that the model does not have.
    """
    longest = len(runner.model.cache.cos)
    if not 0 < len(token_ids) <= longest:
        raise ValueError(f"the text has {len(token_ids)} tokens; would be right: 1 to {longest}")
    if not 0 <= top <= MOST_TOP:
        raise ValueError(f"{top} likeliest tokens; would be right: 0 to {MOST_TOP}")
    if not 0 <= min(token_ids) <= max(token_ids) < runner.vocab_size:
        raise ValueError(f"a token outside the vocabulary; would be right: 0 to {runner.vocab_size - 1}")
    return _pieces(runner, token_ids, top)


def _pieces(runner: "ModelRunner", token_ids: list[int], top: int) -> Iterator[list[Scored]]:
    import torch

    from reference_engine import attention, model

    size = runner.model.cache.pages.block_size
    blocks = -(-len(token_ids) // size)
    own, kind = runner.model.cache, runner.kv_cache_dtype
    pages = own.pages._replace(num_blocks=blocks)
    cache = attention.make_cache(own.shape, pages, runner.model.embedding, (own.cos, own.sin), kind)
    scoring = replace(runner.model, cache=cache)
    sequence = Sequence(-1, token_ids, len(token_ids), SamplingParams(max_tokens=1), 0, blocks=list(range(blocks)))
    yield [Scored(token_ids[0], None, [])]
    for start in range(0, len(token_ids) - 1, PIECE):  # the last token's logits are of a token that is not there
        n = min(PIECE, len(token_ids) - 1 - start)
        sequence.computed = start
        laid_out = replace(model.lay_out(scoring, [(sequence, n)]), sample_rows=torch.arange(n, device=runner.device))
        logprobs = model.forward(scoring, laid_out).double().log_softmax(-1)
        following = token_ids[start + 1 : start + 1 + n]
        yield [Scored(t, float(row[t]), likeliest(row, top)) for t, row in zip(following, logprobs.cpu(), strict=True)]


def likeliest(row: Any, top: int) -> list[tuple[int, float]]:
    """The `top` best of a tensor [vocab], the lowest id first among equals."""
    if not top:
        return []
    values, ids = row.topk(min(top, len(row)))
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))


def as_completion(tokenizer: Tokenizer, scored: list[Scored]) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/completions, as OpenAI's and vLLM's have them for `echo`."""
    tokens = [tokenizer.decode([s.token]) for s in scored]
    offsets = [0]
    for text in tokens:
        offsets.append(offsets[-1] + len(text))
    best: list[dict[str, float] | None] = []
    for place in scored:
        if place.logprob is None:
            best.append(None)
            continue
        # The token that is there is among them, as vLLM has it; of two with one spelling the likelier is kept.
        shown = {tokenizer.decode([place.token]): place.logprob}
        shown |= {tokenizer.decode([token]): value for token, value in reversed(place.top)}
        best.append(shown)
    return {
        "tokens": tokens,
        "token_logprobs": [s.logprob for s in scored],
        "top_logprobs": best,
        "text_offset": offsets[:-1],
    }
