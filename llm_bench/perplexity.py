"""How likely a model finds a given text, from the log probabilities that a server says of its tokens.

Perplexity is exp of the mean of -ln p over tokens: it falls as tokens get shorter, so it compares builds of one
tokenizer only. Bits per byte of the text is the same sum by what no tokenizer changes.
"""

import math
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

TEXT = files("llm_bench").joinpath("data/scored.txt").read_text(encoding="ascii").rstrip("\n")
ROUNDING = 1e-3  # a log probability of 0 may have come out so much above it


class Scored(NamedTuple):
    """A text as a server has it. The first tokens may follow nothing and have no probability: they are not counted."""

    tokens: tuple[str, ...]  # all of them, as spelled
    logprobs: tuple[float, ...]  # natural, of the last tokens
    bytes: int  # of UTF-8, that those tokens spell

    @property
    def perplexity(self) -> float:
        mean = self.nats / len(self.logprobs)
        return math.exp(mean) if mean < 700 else math.inf  # a server says -9999 of what cannot be

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes

    @property
    def nats(self) -> float:
        return -math.fsum(self.logprobs)


def read(answer: Any, text: str) -> Scored:
    """An answer to `echo: true, max_tokens: 0, logprobs: N` of OpenAI's /v1/completions, with `text` as its prompt.

    A token that was made all the same is beyond the prompt's, which usage counts, and is taken off; its count of made
    ones says nothing (vLLM: 1, of an answer that has none). Raises ValueError for an answer that is not of the prompt,
    or has no log probabilities of it.
    """
    try:
        choice = answer["choices"][0]
        said, tokens, values = choice["text"], choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]
        prompt = (answer.get("usage") or {}).get("prompt_tokens")
    except (LookupError, TypeError, AttributeError):
        raise ValueError("the answer has no log probabilities of the prompt") from None
    if not isinstance(said, str) or not said.startswith(text):
        raise ValueError("the answer does not repeat the prompt: echo is not heard")
    if not (isinstance(tokens, list) and isinstance(values, list) and len(tokens) == len(values)):
        raise ValueError("the answer has not one log probability a token")
    if type(prompt) is int and prompt > 0:
        tokens, values = tokens[:prompt], values[:prompt]
    elif said != text:
        raise ValueError("the answer goes on behind the prompt, by an unknown number of tokens")
    skipped = next((i for i, value in enumerate(values) if value is not None), len(values))
    counted = values[skipped:]
    if not counted or not all(type(v) in (int, float) and math.isfinite(v) and v < ROUNDING for v in counted):
        raise ValueError("the answer has log probabilities that are none")
    if not all(isinstance(token, str) for token in tokens):
        raise ValueError("the answer has tokens that are no text")
    size = len(text.encode()) - _spelled(tokens[:skipped], text)
    if size <= 0:
        raise ValueError("the answer has no log probabilities of the prompt")
    return Scored(tuple(tokens), tuple(map(float, counted)), size)


def _spelled(tokens: Sequence[str], text: str) -> int:
    """Bytes at the beginning of the text that these tokens are; a begin-of-text token is none of it."""
    at = 0
    for token in tokens:
        plain = token.replace("\u2581", " ")  # SentencePiece's space, and one that it puts before a text
        if at == 0 and not text.startswith(" "):
            plain = plain.removeprefix(" ")
        if plain and text.startswith(plain, at):
            at += len(plain)
    return len(text[:at].encode())


def furthest(x: Scored, y: Scored) -> tuple[int, float] | None:
    """(place, how far apart) of the token whose log probabilities differ most; None: they are not the same tokens."""
    if x.tokens != y.tokens or len(x.logprobs) != len(y.logprobs):
        return None
    apart = [abs(a - b) for a, b in zip(x.logprobs, y.logprobs, strict=True)]
    most = max(range(len(apart)), key=apart.__getitem__)
    return len(x.tokens) - len(apart) + most, apart[most]
