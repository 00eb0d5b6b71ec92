"""Text to ids and back: nothing lost, no half characters, chats as transformers renders them."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from reference_engine.tokenizer import (
    ASSISTANT,
    BOS,
    CONTEXT_TOKENS,
    EOS,
    HELD_TOKENS,
    SYSTEM,
    USER,
    ByteTokenizer,
    ChatError,
    Detokenizer,
    HFTokenizer,
    TokenizerError,
)

BYTES = ByteTokenizer()
TEXTS = [
    "Hello, world",
    " leading and trailing ",
    "naïve café",
    "你好，世界",
    "👩‍👩‍👧 family",
    "a\n\n\tb  c",
    "e\u0301 ﬁ",
    "\ufffd kept",
]


def pieces(tokenizer: Any, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [])
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@given(st.text())
def test_bytes_give_the_text_back_piece_by_piece(text: str) -> None:
    ids = BYTES.encode(text)
    given_out = pieces(BYTES, ids)
    assert "".join(given_out) == BYTES.decode(ids) == text
    assert len(ids) == len(text.encode())


@given(st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"])))
def test_no_piece_holds_half_a_character(text: str) -> None:
    assert not any("\ufffd" in piece for piece in pieces(BYTES, BYTES.encode(text)))


@given(st.lists(st.integers(0, BYTES.vocab_size - 1)))
def test_any_ids_give_the_text_that_they_give_at_once(ids: list[int]) -> None:
    """Unless they are no text for so long that half characters are let go."""
    detokenizer = Detokenizer(BYTES)
    found, held = "", 0
    for i in ids:
        found += detokenizer.push(i)
        held = max(held, len(detokenizer.ids) - detokenizer.sent)
        assert len(detokenizer.ids) <= 2 * HELD_TOKENS
    found += detokenizer.flush()
    assert held < HELD_TOKENS
    if held < HELD_TOKENS - 1:
        assert found == BYTES.decode(ids)


def test_an_endless_half_character_is_let_go_and_memory_stays_small() -> None:
    detokenizer = Detokenizer(BYTES)
    given_out = [detokenizer.push(0xE4) for _ in range(1000)]
    assert "".join(given_out).count("\ufffd") > 900
    assert len(detokenizer.ids) <= 2 * HELD_TOKENS


def test_special_tokens_have_no_text() -> None:
    assert pieces(BYTES, [BOS, 104, USER, 105, *[EOS] * 50, 106]) == ["", "h", "", "i", *[""] * 50, "j", ""]


def test_a_chat_is_roles_and_contents_up_to_where_the_assistant_answers() -> None:
    ids = BYTES.chat(
        [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    )
    assert ids == [BOS, SYSTEM, 115, EOS, USER, 104, 105, EOS, ASSISTANT]


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "boss", "content": ""}, "role 'boss'"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "user message"),
    ],
)
def test_messages_that_no_template_takes_are_refused(message: dict[str, Any], named: str) -> None:
    with pytest.raises(ChatError, match=named):
        BYTES.chat([message])


CHATML = """{% for m in messages %}
  {% if m['content'] %}
<|im_start|>{{ m['role'] }}
{{ m['content'] | trim }}<|im_end|>
  {% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
CORPUS = [*TEXTS, "the quick brown fox jumps over the lazy dog", "the cat and the hat and the bat"]


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3, Qwen and SmolLM2 have it."""
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokens.train_from_iterator(CORPUS, trainer)
    tokens.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokens


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral have it: ▁ for a space, <0xE4> for what has no token, a text's first space stripped."""
    vocab = {"<unk>": 0, "<s>": 1, "<|im_start|>": 2, "<|im_end|>": 3, **{f"<0x{b:02X}>": 4 + b for b in range(256)}}
    for character in "▁abcdefghijklmnopqrstuvwxyzH,你":
        vocab[character] = len(vocab)
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "w"), ("▁w", "o")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokens = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokens.add_special_tokens(["<unk>", "<s>", "<|im_start|>", "<|im_end|>"])
    tokens.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokens.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokens.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokens


def write(folder: Path, tokens: Tokenizer, **config: Any) -> Path:
    tokens.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|im_end|>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(params=[byte_level, byte_fallback])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path, request.param(), chat_template=CHATML)


@pytest.mark.parametrize("text", TEXTS)
def test_a_real_tokenizer_gives_the_text_back_piece_by_piece(folder: Path, text: str) -> None:
    tokenizer = HFTokenizer(folder)
    ids = tokenizer.encode(text)
    given_out = pieces(tokenizer, ids)
    assert "".join(given_out) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in given_out)


@pytest.mark.parametrize("text", ["the world wo", "a 你好 the", "你 好 好 the"])
def test_an_answer_goes_on_where_the_prompt_ended_with_its_space(folder: Path, text: str) -> None:
    """Whatever token the answer begins with, prompt and answer make the whole text."""
    tokenizer = HFTokenizer(folder)
    ids = tokenizer.encode(text)
    for cut in range(2, len(ids)):
        prompt = tokenizer.decode(ids[:cut])
        if not prompt.endswith("\ufffd"):
            assert prompt + "".join(pieces(tokenizer, ids[cut:], ids[:cut])) == text
    assert CONTEXT_TOKENS > 4  # a character's worth of byte tokens, and one more for the space before


def test_encode_adds_what_the_model_expects_and_chat_leaves_it_to_the_template(folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = HFTokenizer(folder)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    messages = [{"role": "system", "content": " be brief "}, {"role": "user", "content": "the wörld 你"}]
    assert tokenizer.chat(messages) == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokenizer.encode("the hat") == theirs("the hat")["input_ids"]
    assert tokenizer.vocab_size == len(theirs)
    assert tokenizer.eos_ids == {theirs.eos_token_id}


def test_a_template_file_wins_over_the_config_and_sees_special_tokens(tmp_path: Path) -> None:
    write(tmp_path, byte_level(), chat_template=CHATML)
    skip_tools = "{% if m.role == 'tool' %}{% continue %}{% endif %}"
    template = "{{ bos_token }}{% for m in messages %}" + skip_tools + "{{ m | tojson }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = HFTokenizer(tmp_path)
    ids = tokenizer.chat([{"role": "user", "content": "<é>"}, {"role": "tool", "content": "x"}])
    assert ids[0] == 0
    assert tokenizer.tokens.decode(ids, skip_special_tokens=False) == '<s>{"role": "user", "content": "<é>"}'


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    write(tmp_path, byte_level())
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert HFTokenizer(tmp_path).eos_ids == {9, 2}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert HFTokenizer(tmp_path).eos_ids == {5, 6, 2}


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('system comes first') }}", "chat template: system comes first"),
        ("", "the model has no chat template; would be right: /v1/completions"),
    ],
)
def test_a_template_that_refuses_is_a_chat_error(template: str, said: str, tmp_path: Path) -> None:
    tokenizer = HFTokenizer(write(tmp_path, byte_level(), chat_template=template))
    with pytest.raises(ChatError) as refused:
        tokenizer.chat([{"role": "user", "content": "hi"}])
    assert str(refused.value) == said


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not there"):
        HFTokenizer(tmp_path)
    write(tmp_path, byte_level(), chat_template="{% if %}")
    with pytest.raises(TokenizerError, match="chat template: line 1"):
        HFTokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: no JSON"):
        HFTokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("tokenizer.json", '{"model": 3}', "no tokenizer: "),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}', "no tokenizer: "),
        ("tokenizer.json", "[]", "found a list"),
        ("tokenizer.json", "[" * 200_000, "no JSON"),
        ("tokenizer_config.json", '{"eos_token": 7}', "eos_token is 7"),
        ("tokenizer_config.json", '{"bos_token": {"text": "a"}}', "bos_token is {'text': 'a'}"),
        ("generation_config.json", '{"eos_token_id": ["a"]}', "eos_token_id is ['a']"),
        ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id is '2'"),
        ("chat_template.jinja", b"{{ \xff }}", "no UTF-8 at byte 3"),
    ],
)
def test_a_file_of_the_wrong_form_is_named(file: str, content: str | bytes, named: str, tmp_path: Path) -> None:
    write(tmp_path, byte_level())
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TokenizerError) as error:
        HFTokenizer(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / file}: ")
    assert named in str(error.value)
