"""Text to token ids and back: bytes for the tiny model, tokenizer.json and its chat template for a real one."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from reference_engine.families import JSON_BYTES, WeightsError, read_json

if TYPE_CHECKING:  # imported where a real model is loaded
    from tokenizers import Tokenizer as Tokens

BOS, EOS, SYSTEM, USER, ASSISTANT, TOOL = range(256, 262)
ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}
BYTE_VOCAB = 264  # 256 bytes, the six marks above, two spare ids: a multiple of 8 for the matrix kernels

# The text of a token depends on its left neighbour (a leading space, a shared character); vLLM looks back as far.
CONTEXT_TOKENS = 6
# A character has at most four bytes, hence four tokens. Text that ends in half a character for longer is no text.
HELD_TOKENS = 16


SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")  # as chat templates call them


class ChatError(ValueError):
    """Messages that the model's chat template does not take; the text says which and why."""


class TokenizerError(ValueError):
    """A tokenizer file is missing or malformed; the text names it."""


class Tokenizer(Protocol):
    """Tokens of one model. `vocab_size` counts what the tokenizer knows; the model's own may be padded above it."""

    vocab_size: int
    eos_ids: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Token ids of a completion prompt, with the special tokens the model expects in front."""
        ...

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation up to where the assistant is to answer. Raises ChatError."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; special tokens have none, half a character is U+FFFD."""
        ...


class ByteTokenizer:
    """One token a byte of UTF-8, so a prompt of n ASCII characters is n tokens; eos also ends every turn of a chat."""

    vocab_size = BYTE_VOCAB
    eos_ids = frozenset({EOS})

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        ids = [BOS]
        for message in messages:
            role = message.get("role")
            if role not in ROLES:
                raise ChatError(f"role {role!r}: would be right: {', '.join(ROLES)}")
            ids += [ROLES[role], *text_of(message).encode(), EOS]
        return [*ids, ASSISTANT]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


def text_of(message: Mapping[str, Any]) -> str:
    """Content of a message: a string, nothing, or OpenAI's list of text parts. Raises ChatError."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(p["text"] for p in content)
    raise ChatError(f"content of the {message.get('role')} message: would be right: a string or a list of text parts")


class TextTokenizer:
    """A tokenizer of the `tokenizers` library, and a chat template run in a sandbox, as transformers runs it."""

    def __init__(
        self,
        path: Path,
        tokens: "Tokens",
        eos_ids: frozenset[int],
        special: Mapping[str, str],
        template: str,
        prefix: tuple[int, ...] = (),
    ) -> None:
        """`special`: texts by the names of SPECIAL; `prefix`: ids before a prompt that `tokens` adds not itself.

        Raises TokenizerError, naming path, for a template that is none.
        """
        self.tokens = tokens
        self.prefix = prefix
        self.vocab_size: int = tokens.get_vocab_size(with_added_tokens=True)
        self.eos_ids = eos_ids
        self.special = special
        self.template = _compile(template, path)

    def encode(self, text: str) -> list[int]:
        return [*self.prefix, *self.tokens.encode(text).ids]

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if self.template is None:
            raise ChatError("the model has no chat template; would be right: /v1/completions")
        from reference_engine import chat_template

        plain = [{**m, "content": text_of(m)} for m in messages]
        try:
            text = self.template(messages=plain, add_generation_prompt=True, tools=None, **self.special)
        except chat_template.Unfit as error:
            raise ChatError(f"chat template: {error}") from error
        ids: list[int] = self.tokens.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokens.decode(list(ids), skip_special_tokens=True)
        return text


class HFTokenizer(TextTokenizer):
    """tokenizer.json and the chat template of a Hugging Face directory."""

    def __init__(self, directory: str | Path) -> None:
        """Reads tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json, config.json.

        Only tokenizer.json must be there. Raises TokenizerError.
        """
        from tokenizers import Tokenizer as Tokens

        folder = Path(directory)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path}: not there; would be right: the tokenizer.json of the `tokenizers` library")
        tokens: Tokens = _made(path, lambda: Tokens.from_str(json.dumps(_read_json(path))))
        path = folder / "tokenizer_config.json"
        config = _read_json(path)
        special = {k: _token_text(path, k, config[k]) for k in SPECIAL if config.get(k)}
        super().__init__(
            folder, tokens, self._read_eos(tokens, folder, config), special, _read_template(folder, config)
        )

    @staticmethod
    def _read_eos(tokens: "Tokens", folder: Path, config: dict[str, Any]) -> frozenset[int]:
        """generation_config.json wins over config.json, as in vLLM; the tokenizer's own eos_token always counts."""
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            ids = _read_json(folder / name).get("eos_token_id")
            if ids is not None:
                listed = ids if isinstance(ids, list) else [ids]
                if not all(isinstance(i, int) and i >= 0 for i in listed):
                    raise TokenizerError(f"{folder / name}: eos_token_id is {ids!r}; would be right: token ids")
                found.update(listed)
                break
        if config.get("eos_token"):
            own = tokens.token_to_id(_token_text(folder / "tokenizer_config.json", "eos_token", config["eos_token"]))
            found.update(() if own is None else (own,))
        return frozenset(found)


class Detokenizer:
    """Text of a growing answer: `push` gives what a token completes, never half a character.

    The prefix-offset technique of TGI and vLLM: decode a few tokens with and without the new ones, the difference is
    the new text. So a leading space survives that a decoder strips from the first token of a text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        """`prompt`: ids before the answer. Without them it starts a text, whose first space some decoders strip."""
        self.tokenizer = tokenizer
        self.ids = list(prompt[-CONTEXT_TOKENS:])  # context, then held tokens; never longer than a few
        self.sent = len(self.ids)  # ids[:sent] are given out
        self.sent_text = tokenizer.decode(self.ids) if self.ids else ""

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while half a character, and for a special token."""
        self.ids.append(token_id)
        text = self.tokenizer.decode(self.ids)
        if text.endswith("\ufffd") and len(self.ids) - self.sent < HELD_TOKENS:
            return ""
        return self._give(text)

    def flush(self) -> str:
        """What is held at the end of the answer, half characters as U+FFFD."""
        return self._give(self.tokenizer.decode(self.ids)) if len(self.ids) > self.sent else ""

    def _give(self, text: str) -> str:
        new = text[len(self.sent_text) :]
        if not new and len(self.ids) - self.sent < HELD_TOKENS:  # a special token: part of the context of the next
            return ""
        self.ids = self.ids[self.sent :]  # what was just completed is the context of what follows
        self.sent = len(self.ids)
        self.sent_text = self.tokenizer.decode(self.ids)
        return new


def _made(path: Path, make: Callable[[], "Tokens"]) -> "Tokens":
    """What `make` gives. Raises TokenizerError, naming path, for what the `tokenizers` library refuses."""
    try:
        return make()
    except Exception as error:  # the library raises nothing more special; whatever is, is our bug
        if type(error) is not Exception:
            raise
        raise TokenizerError(f"{path}: no tokenizer: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """An object; an empty one where there is no file."""
    if not path.is_file():
        return {}
    try:
        return read_json(path)
    except WeightsError as error:
        raise TokenizerError(str(error)) from error


def _token_text(path: Path, key: str, token: object) -> str:
    """Older files write an added token as an object with its flags."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise TokenizerError(f"{path}: {key} is {token!r}; would be right: a string, or an object with its content")
    return text


def _read_template(folder: Path, config: dict[str, Any]) -> str:
    """chat_template.jinja wins over tokenizer_config.json, as in transformers; of a list the one named default."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        if path.stat().st_size > JSON_BYTES:
            raise TokenizerError(f"{path}: would be right: at most {JSON_BYTES:,} bytes")
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{path}: no UTF-8 at byte {error.start}") from error
    template = config.get("chat_template") or ""
    if isinstance(template, list):
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[0].get("template", "") if named else ""
    return str(template)


def _compile(template: str, folder: Path) -> Callable[..., str] | None:
    """None where there is no template. Raises TokenizerError."""
    if not template:
        return None
    from reference_engine import chat_template

    try:
        return chat_template.compiled(template)
    except chat_template.Unfit as error:
        raise TokenizerError(f"{folder}: chat template: {error}") from error


class Pre(NamedTuple):
    """How a byte-level BPE cuts text before merging: what `tokenizer.ggml.pre` of a GGUF file names."""

    pattern: str = ""  # pieces; empty: those of GPT-2
    digits: bool = False  # each on its own
    nfc: bool = False  # characters composed first
    whole: bool = False  # a piece that is a token is not merged
    bos: bool = False  # a prompt begins with one unless the file says otherwise


# As the tokenizer.json of the models themselves.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRES: dict[str, Pre] = {
    "gpt-2": Pre(),
    "smollm": Pre(digits=True),
    "qwen2": Pre(WORDS + r"\p{N}" + REST, nfc=True),
    "llama-bpe": Pre(WORDS + r"\p{N}{1,3}" + REST, whole=True, bos=True),
}
CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
LONGEST_MERGED = 64  # characters: SentencePiece's own limit is 16, and every cut of a token is tried


def of_gguf(path: Path, metadata: Mapping[str, Any]) -> TextTokenizer:
    """Tokenizer and chat template of a GGUF file's metadata. Raises TokenizerError."""
    from tokenizers import AddedToken

    said = {k.removeprefix("tokenizer.ggml."): v for k, v in metadata.items() if k.startswith("tokenizer.ggml.")}
    makers = {"gpt2": _byte_level, "llama": _sentencepiece}
    if said.get("model") not in makers:
        raise TokenizerError(f"{path}: tokenizer.ggml.model is {said.get('model')!r}; would be right: gpt2 or llama")
    texts = _list(path, said, "tokens", str)
    kinds = said.get("token_type", [1] * len(texts))
    if not isinstance(kinds, list) or len(kinds) != len(texts) or len(set(texts)) != len(texts):
        raise TokenizerError(
            f"{path}: {len(texts)} tokens; would be right: all different, and a tokenizer.ggml.token_type for each"
        )
    ids = {key: _gguf_id(path, said, key, len(texts)) for key in GGUF_IDS}
    tokens, begins = makers[said["model"]](path, said, {text: i for i, text in enumerate(texts)})
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [t for t, k in zip(texts, kinds, strict=True) if k == kind]
        tokens.add_tokens([AddedToken(text, normalized=False, special=special) for text in added])
    bos = ids["bos_token_id"]
    return TextTokenizer(
        path,
        tokens,
        frozenset(i for key in ENDS if (i := ids[key]) is not None),
        {name: texts[i] for key, name in GGUF_IDS.items() if name and (i := ids[key]) is not None},
        str(metadata.get("tokenizer.chat_template", "")),
        (bos,) if bos is not None and said.get("add_bos_token", begins) is True else (),
    )


def _byte_level(path: Path, said: Mapping[str, Any], vocabulary: dict[str, int]) -> tuple["Tokens", bool]:
    """A BPE over bytes, with its merges, and whether a prompt begins with a bos unless the file says otherwise."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Tokens

    pre = PRES.get(name) if isinstance(name := said.get("pre"), str) else None
    if pre is None:
        raise TokenizerError(f"{path}: tokenizer.ggml.pre is {name!r}; would be right: {', '.join(PRES)}")
    pairs = [(left, right) for left, _, right in (m.partition(" ") for m in _list(path, said, "merges", str))]
    tokens = _made(path, lambda: Tokens(models.BPE(vocabulary, pairs, ignore_merges=pre.whole)))
    digits = [pre_tokenizers.Digits(individual_digits=True)] if pre.digits else []
    pieces = [pre_tokenizers.Split(Regex(pre.pattern), "isolated")] if pre.pattern else []
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pre.pattern)
    tokens.pre_tokenizer = pre_tokenizers.Sequence([*digits, *pieces, to_bytes])
    tokens.decoder = decoders.ByteLevel()
    if pre.nfc:
        tokens.normalizer = normalizers.NFC()
    return tokens, pre.bos


def _sentencepiece(path: Path, said: Mapping[str, Any], vocabulary: dict[str, int]) -> tuple["Tokens", bool]:
    """SentencePiece's BPE, of Llama 2 and Mistral: a token's score is its rank. The same pair as of `_byte_level`."""
    from tokenizers import Tokenizer as Tokens
    from tokenizers import decoders, models, normalizers

    scores = _list(path, said, "scores", float)
    if len(scores) != len(vocabulary):
        raise TokenizerError(f"{path}: {len(scores)} tokenizer.ggml.scores; would be right: {len(vocabulary)}")
    merges = [
        (scores[i], -i, text[:cut], text[cut:])
        for text, i in vocabulary.items()
        if len(text) <= LONGEST_MERGED
        for cut in range(1, len(text))
        if text[:cut] in vocabulary and text[cut:] in vocabulary
    ]
    merges.sort(key=lambda merge: merge[:2], reverse=True)
    unknown = _gguf_id(path, said, "unknown_token_id", len(vocabulary))
    names = list(vocabulary)
    bpe = models.BPE(
        vocabulary,
        [(left, right) for *_, left, right in merges],
        unk_token=None if unknown is None else names[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokens = _made(path, lambda: Tokens(bpe))
    prefixed = said.get("add_space_prefix", True) is True
    first = [normalizers.Prepend("▁")] if prefixed else []
    tokens.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    to_text = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokens.decoder = decoders.Sequence([*to_text, *([decoders.Strip(" ", 1, 0)] if prefixed else [])])
    return tokens, True


ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")  # of a text, of a turn, of a message to a tool
GGUF_IDS = {
    **dict.fromkeys(ENDS, ""),
    "bos_token_id": "bos_token",
    "eos_token_id": "eos_token",
    "padding_token_id": "pad_token",
    "unknown_token_id": "unk_token",
}


def _list(path: Path, said: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    values = said.get(key)
    if not isinstance(values, list) or not values or not all(isinstance(v, kind) for v in values):
        raise TokenizerError(
            f"{path}: tokenizer.ggml.{key} is missing or holds no {kind.__name__}s; would be right: those"
        )
    return values


def _gguf_id(path: Path, said: Mapping[str, Any], key: str, count: int) -> int | None:
    value = said.get(key)
    if value is None or (isinstance(value, int) and 0 <= value < count):
        return value
    raise TokenizerError(f"{path}: tokenizer.ggml.{key} is {value!r}; would be right: an id below {count:,}")
