"""Text to token ids and back: bytes for the tiny model, tokenizer.json and its chat template for a real one."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

BOS, EOS, SYSTEM, USER, ASSISTANT, TOOL = range(256, 262)
ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}
BYTE_VOCAB = 264  # 256 bytes, the six marks above, two spare ids: a multiple of 8 for the matrix kernels

# The text of a token depends on its left neighbour (a leading space, a shared character); vLLM looks back as far.
CONTEXT_TOKENS = 6
# A character has at most four bytes, hence four tokens. Text that ends in half a character for longer is no text.
HELD_TOKENS = 16


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


class HFTokenizer:
    """tokenizer.json through `tokenizers`; the chat template of the directory in a sandbox, as transformers runs it."""

    def __init__(self, directory: str | Path) -> None:
        """Reads tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json, config.json.

        Only tokenizer.json must be there. Raises TokenizerError.
        """
        from tokenizers import Tokenizer as Tokens

        folder = Path(directory)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path}: not there; would be right: the tokenizer.json of the `tokenizers` library")
        self.tokens = Tokens.from_str(json.dumps(_read_json(path)))  # a truncated file is named, not a bare Exception
        config = _read_json(folder / "tokenizer_config.json")
        self.vocab_size: int = self.tokens.get_vocab_size(with_added_tokens=True)
        self.eos_ids = self._read_eos(folder, config)
        self.special = {
            k: _token_text(config[k]) for k in ("bos_token", "eos_token", "pad_token", "unk_token") if config.get(k)
        }
        self.template = _compile(_read_template(folder, config), folder)

    def _read_eos(self, folder: Path, config: dict[str, Any]) -> frozenset[int]:
        """generation_config.json wins over config.json, as in vLLM; the tokenizer's own eos_token always counts."""
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            ids = _read_json(folder / name).get("eos_token_id")
            if ids is not None:
                found.update([ids] if isinstance(ids, int) else ids)
                break
        if config.get("eos_token"):
            own = self.tokens.token_to_id(_token_text(config["eos_token"]))
            found.update(() if own is None else (own,))
        return frozenset(found)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokens.encode(text).ids
        return ids

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if self.template is None:
            raise ChatError("the model has no chat template; would be right: /v1/completions")
        import jinja2

        plain = [{**m, "content": text_of(m)} for m in messages]
        try:
            text = self.template.render(messages=plain, add_generation_prompt=True, tools=None, **self.special)
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise ChatError(f"chat template: {error}") from error
        ids: list[int] = self.tokens.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokens.decode(list(ids), skip_special_tokens=True)
        return text


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


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path}: no JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: found a {type(value).__name__}; would be right: an object")
    return value


def _token_text(token: str | dict[str, Any]) -> str:
    """Older files write an added token as an object with its flags."""
    return token if isinstance(token, str) else str(token["content"])


def _read_template(folder: Path, config: dict[str, Any]) -> str:
    """chat_template.jinja wins over tokenizer_config.json, as in transformers; of a list the one named default."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template") or ""
    if isinstance(template, list):
        template = next((t["template"] for t in template if t.get("name") == "default"), "")
    return str(template)


def _compile(template: str, folder: Path) -> Any:
    """A jinja2 template with the helpers that transformers gives it; a template is a stranger's program: sandboxed."""
    if not template:
        return None
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **how: Any) -> str:  # jinja's own escapes HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    env.filters["tojson"] = tojson
    try:
        return env.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(f"{folder}: chat template, line {error.lineno}: {error.message}") from error
