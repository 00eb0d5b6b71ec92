"""Text of a planned number of tokens: the same for the same (salt, index) on every machine, another for any other.

The words all have four letters, so that n of them with the space before each are 5n bytes cut from one array.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llm_bench.errors import BenchError
from llm_bench.request import Request

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WORDS = tuple(files("llm_bench").joinpath("data/words.txt").read_text(encoding="ascii").split())
WORD_BYTES = 5  # " word"
MIN_WORDS = 256  # fewer words that cost the same under a tokenizer would make prompts alike
MIN_IDS = 26  # an alphabet: of fewer tokens prompts would be alike
REPAIRS = 16  # tries to bring a text to its exact count, under tokenizers whose words do not all cost the same


@dataclass(frozen=True)
class Sizer:
    """How many tokens a text of n words has: base + per_word * n.

    A tokenizer that takes each byte for a token (per_word 5) is met exactly, by cutting inside a word.
    """

    base: float = 0.0
    per_word: float = 1.0
    template: int = 0  # tokens that the target puts around a text, where base does not hold them
    words: tuple[str, ...] = WORDS
    tokenizer: "Tokenizer | None" = None  # only where words do not add up: each text is then counted and repaired

    @classmethod
    def fit(cls, probes: Iterable[tuple[int, int]]) -> "Sizer":
        """From (words, tokens) of two or more probe texts (`probe_text`): the tokens are the target's own usage.

        So base holds the chat template, and a filled prompt costs tokens_in with it.

        Raises BenchError where they have one length, or where more words cost no more tokens.
        """
        pairs = list(probes)
        if len({words for words, _ in pairs}) < 2:
            raise BenchError(f"probe prompts {pairs} (words, tokens), expected two lengths or more")
        mean_words, mean_tokens = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
        spread = sum((words - mean_words) ** 2 for words, _ in pairs)
        per_word = sum((words - mean_words) * (tokens - mean_tokens) for words, tokens in pairs) / spread
        if per_word <= 0:
            raise BenchError(f"probe prompts {pairs} (words, tokens): more words, expected more tokens")
        if abs(per_word - round(per_word)) < 1e-9:
            per_word = float(round(per_word))
        return cls(mean_tokens - per_word * mean_words, per_word)

    @classmethod
    def from_tokenizer(cls, path: Path | str) -> "Sizer":
        """Exact, from a tokenizer.json: the words are those that all cost the same, one token where possible.

        Special tokens and a chat template are not counted (set `template` with dataclasses.replace to have them in).
        Needs the extra `llm-bench[tokenizer]`. Raises BenchError.
        """
        tokenizer = _load(path)
        # The first word of a text has no space before it, and may cost another number of tokens than the later ones.
        costs = [tuple(_counts(tokenizer, [w, f"{w} {w}"])) for w in WORDS]
        common = [cost for cost, words in Counter(costs).items() if words >= MIN_WORDS]
        if common:
            first, both = min(common, key=sum)
            words = tuple(word for word, cost in zip(WORDS, costs, strict=True) if cost == (first, both))
        else:
            first, both = (sum(column) / len(WORDS) for column in zip(*costs, strict=True))
            words = WORDS
        sizer = cls(base=2 * first - both, per_word=both - first, words=words)
        lengths = range(1, 400, 13)
        counts = _counts(tokenizer, [probe_text(n, f"check {n}", sizer) for n in lengths])
        adds_up = counts == [sizer.base + sizer.per_word * n for n in lengths]
        return sizer if adds_up and sizer.per_word in (1, WORD_BYTES) else replace(sizer, tokenizer=tokenizer)

    @property
    def cuts_words(self) -> bool:
        return self.per_word == WORD_BYTES

    @cached_property
    def table(self) -> np.ndarray:
        """The words with their spaces, as S5: a text is table[indices].tobytes()."""
        return np.array([f" {word}" for word in self.words], f"S{WORD_BYTES}")

    def length_bytes(self, tokens: float) -> int:
        """Length of a text of so many tokens, with the space before its first word; whole words but for byte tokens."""
        return round(tokens) if self.cuts_words else WORD_BYTES * round(tokens / self.per_word)


def fill(request: Request, salt: str, index: int, sizer: Sizer) -> Request:
    """The request with a `prompt` of tokens_in tokens (at least a word); one that brings its own text is left as it is.

    The text is a function of (salt, index) from its first word on; with hash ids, each block's is one of (salt, id), so
    that requests share the text of the blocks they share and no other. For a later turn of a session the prompt is what
    its user adds, `turn_text`; whoever sends it puts the history before it.
    """
    if any(own is not None for own in (request.prompt, request.messages, request.prompt_token_ids, request.body)):
        return request
    if request.turn > 0:
        return replace(request, prompt=turn_text(request, salt, index, sizer))
    tokens = request.tokens_in - sizer.template
    length = max(sizer.length_bytes(tokens - sizer.base), WORD_BYTES)
    if not request.hash_ids:
        text = _stream(f"{salt}\0request\0{index}", length, sizer)
    else:  # ends are rounded, not sizes: what one block loses the next one gains
        free = min(sizer.base, 0)  # where the first word's missing space is a token less, block 0 is longer by it
        ends = [sizer.length_bytes((k + 1) * request.block_size - free) for k in range(len(request.hash_ids))]
        blocks = [
            _stream(f"{salt}\0block\0{i}", end - start, sizer)
            for i, start, end in zip(request.hash_ids, [0, *ends], ends, strict=False)
            if start < length
        ]
        text = b"".join(blocks).ljust(length, b".")[:length]
    return replace(request, prompt=_exact(text[1:].decode("ascii"), tokens, f"{salt}\0{index}", sizer))


def turn_text(request: Request, salt: str, index: int, sizer: Sizer) -> str:
    """What the user adds in a later turn: tokens_new tokens of text, at least a word; no template is counted."""
    return _message(request.tokens_new, f"{salt}\0turn\0{index}", sizer)


def answer_text(request: Request, salt: str, index: int, sizer: Sizer) -> str:
    """An answer of the recorded length, tokens_out, made up for the history of the turns behind it."""
    return _message(request.tokens_out or 0, f"{salt}\0answer\0{index}", sizer)


def _message(tokens: int, key: str, sizer: Sizer) -> str:
    free_byte = 1 if sizer.cuts_words else 0  # the space that no text begins with
    length = max(sizer.length_bytes(tokens) + free_byte, WORD_BYTES)
    return _exact(_stream(key, length, sizer)[1:].decode("ascii"), tokens, key, sizer)


def continued(before: Request, request: Request, salt: str, indices: tuple[int, int], sizer: Sizer) -> Request:
    """The next turn of a conversation that is one text: all that was said before, an answer made up, what is new.

    `before` is the filled turn before, `indices` both turns' own. The whole has tokens_in tokens, and begins with the
    whole of the turn before.
    """
    tokens = request.tokens_in - sizer.template
    starts = [before.tokens_in - sizer.template, before.tokens_in + (before.tokens_out or 0) - sizer.template]
    keys = (f"{salt}\0answer\0{indices[0]}", f"{salt}\0turn\0{indices[1]}")
    # Ends are rounded, not sizes, as with blocks; each part begins with the space before its first word.
    ends = [max(sizer.length_bytes(t - sizer.base), WORD_BYTES) for t in (*starts, tokens)]
    parts = [_stream(key, ends[k + 1] - ends[k], sizer).decode("ascii") for k, key in enumerate(keys)]
    text = "".join([before.prompt or "", *parts])
    return replace(request, prompt=_exact(text, tokens, keys[1], sizer))


# -- token ids --------------------------------------------------------------------------------------------------------


def fill_ids(request: Request, salt: str, index: int, ids: np.ndarray) -> Request:
    """The request with `prompt_token_ids`, tokens_in of them, drawn from `ids`; as `fill` shares and parts texts."""
    if request.hash_ids:
        blocks = [_draws(f"{salt}\0block\0{i}", request.block_size, ids) for i in request.hash_ids]
        drawn = np.concatenate(blocks)[: request.tokens_in]
    else:
        drawn = _draws(f"{salt}\0request\0{index}", request.tokens_in, ids)
    return replace(request, prompt_token_ids=tuple(drawn.tolist()))


def continued_ids(before: Request, request: Request, salt: str, indices: tuple[int, int], ids: np.ndarray) -> Request:
    """`continued` in token ids."""
    answer = _draws(f"{salt}\0answer\0{indices[0]}", before.tokens_out or 0, ids)
    added = _draws(f"{salt}\0turn\0{indices[1]}", request.tokens_new, ids)
    return replace(request, prompt_token_ids=(*(before.prompt_token_ids or ()), *answer.tolist(), *added.tolist()))


def plain_ids(path: Path | str) -> np.ndarray:
    """The ids of a tokenizer.json that are plain letters: no special token, no half of a character. Raises BenchError.

    Every such id is a token of the model's own vocabulary, whatever ids above it are padding or marks of a template.
    """
    tokenizer = _load(path)
    marks = set(tokenizer.get_added_tokens_decoder())
    ids = sorted(set(tokenizer.get_vocab(with_added_tokens=False).values()) - marks)
    texts = tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)
    plain = [i for i, text in zip(ids, texts, strict=True) if text.isascii() and text.strip(" ").isalpha()]
    if len(plain) < MIN_IDS:
        raise BenchError(f"{path}: {len(plain)} tokens are plain letters, expected {MIN_IDS} or more for --token-ids")
    return np.array(plain)


def probe_text(words: int, salt: str, sizer: Sizer | None = None) -> str:
    """A text of so many words, to learn from a target's usage what words cost."""
    sizer = sizer or Sizer()
    return _stream(f"{salt}\0probe", WORD_BYTES * words, sizer)[1:].decode("ascii")


def prompt_hash(body: bytes) -> int:
    """64 bits of BLAKE2b of a request's body, signed, as Record.prompt_hash keeps it."""
    return int.from_bytes(hashlib.blake2b(body, digest_size=8).digest(), "little", signed=True)


class Exact(NamedTuple):
    """What a target's own tokenizer gives."""

    sizer: Sizer
    count: Callable[[str], int]  # tokens of any text: for answers whose server sends no usage
    ids: np.ndarray | None = None  # that prompts may be made of; None: prompts are texts


def exact(path: Path | str, *, token_ids: bool = False) -> Exact:
    """The uses of a tokenizer.json. Raises BenchError."""
    return Exact(Sizer.from_tokenizer(path), counter(path), plain_ids(path) if token_ids else None)


def counter(path: Path | str) -> Callable[[str], int]:
    """Tokens of any text, by a tokenizer.json. Raises BenchError."""
    tokenizer = _load(path)
    return lambda text: _counts(tokenizer, [text])[0]


def encoder(path: Path | str) -> Callable[[str], list[int]]:
    """Token ids of any text, by a tokenizer.json. Raises BenchError."""
    tokenizer = _load(path)
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def _load(path: Path | str) -> "Tokenizer":
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise BenchError(
            "a tokenizer.json needs the extra: in the project's folder, pip install '.[tokenizer]'"
        ) from None
    try:
        text = Path(path).read_text(encoding="utf-8")
        whole = isinstance(json.loads(text), dict)
    except (OSError, ValueError, RecursionError) as e:
        raise BenchError(f"{path}: {getattr(e, 'strerror', None) or e}, expected a tokenizer.json") from None
    if not (whole and '"model"' in text):
        raise BenchError(f"{path}: JSON without a model, expected a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as e:  # noqa: BLE001  # the library raises nothing narrower
        raise BenchError(f"{path}: {e}, expected a tokenizer.json") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _stream(key: str, length_bytes: int, sizer: Sizer) -> bytes:
    """The first bytes of the endless text that `key` names: a shorter one is a prefix of a longer one.

    SHAKE-128 as the generator: its stream is fixed by a standard (FIPS 202), where NumPy's may change with its version.
    """
    text: bytes = _draws(key, -(-length_bytes // WORD_BYTES), sizer.table).tobytes()
    return text[:length_bytes]


def _draws(key: str, count: int, table: np.ndarray) -> np.ndarray:
    draws = np.frombuffer(hashlib.shake_128(key.encode()).digest(4 * count), "<u4")
    drawn: np.ndarray = table[draws % len(table)]
    return drawn


def _counts(tokenizer: "Tokenizer", texts: list[str]) -> list[int]:
    return [len(encoding.ids) for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def _exact(text: str, tokens: int, key: str, sizer: Sizer) -> str:
    """The text with its tail mended until it has exactly `tokens` tokens, or the nearest of REPAIRS tries."""
    if sizer.tokenizer is None:
        return text
    tried: dict[int, str] = {}  # miss -> text
    for k in range(REPAIRS):
        miss = tokens - _counts(sizer.tokenizer, [text])[0]
        tried.setdefault(abs(miss), text)
        if miss == 0:
            break
        words = max(1, round(abs(miss) / sizer.per_word))
        if miss < 0 and text.count(" ") < words:
            break
        if miss < 0:
            text = text.rsplit(" ", words)[0]
        elif miss >= sizer.per_word:
            text += _stream(f"{key}\0more\0{k}", WORD_BYTES * words, sizer).decode("ascii")
        else:
            text += _FILLERS[k % len(_FILLERS)]
    return tried[min(tried)]


_FILLERS = (" a", ".", " I", "!", "s", ",", " x", "?")  # one token each in most vocabularies
