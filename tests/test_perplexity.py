"""Perplexity and bits per byte of a scored text: by hand, for any tokens, and refused where an answer has none."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench import perplexity
from llm_bench.perplexity import Scored, furthest, read


def answer(tokens, logprobs, text=None, **usage):
    choice = {"text": "".join(tokens) if text is None else text, "logprobs": {"tokens": tokens}}
    choice["logprobs"]["token_logprobs"] = logprobs
    return {"choices": [choice], "usage": usage}


def test_by_hand_a_coin_a_byte_is_one_bit_and_a_perplexity_of_two():
    found = read(answer(["a", "b", "c"], [None, math.log(0.5), math.log(0.5)]), "abc")
    assert (found.perplexity, found.bits_per_byte, found.bytes) == (pytest.approx(2), pytest.approx(1), 2)


@given(st.lists(st.text(min_size=1, max_size=4), min_size=2, max_size=20), st.integers(2, 10**6))
def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary(tokens, vocabulary):
    """Whatever the text is cut into; and bits a byte are those of the tokens by the bytes of what was counted."""
    tokens[0] = "x"
    logprob = -math.log(vocabulary)
    found = read(answer(tokens, [None] + [logprob] * (len(tokens) - 1)), "".join(tokens))
    assert found.perplexity == pytest.approx(vocabulary)
    size = len("".join(tokens[1:]).encode())
    assert found.bytes == size
    assert found.bits_per_byte * size == pytest.approx((len(tokens) - 1) * math.log2(vocabulary))


@pytest.mark.parametrize(
    ("first", "size"),
    [("<s>", 5), ("<|begin_of_text|>", 5), ("ab", 3), ("\u2581ab", 3), (" ab", 3), ("", 5), ("token_id:7", 5)],
)
def test_what_a_first_token_spells_is_not_counted_and_a_begin_of_text_spells_nothing(first, size):
    assert read(answer([first, "x", "y"], [None, -1.0, -2.0], text="ab\u00e9d"), "ab\u00e9d").bytes == size


def test_a_text_whose_first_token_has_a_probability_is_counted_whole():
    assert read(answer(["a", "b"], [-1.0, -2.0]), "ab") == Scored(("a", "b"), (-1.0, -2.0), 2)


def test_tokens_that_were_made_all_the_same_are_taken_off():
    said = answer(["a", "b", "!"], [None, -1.0, -9.0], prompt_tokens=2, completion_tokens=1)
    assert read(said, "ab") == Scored(("a", "b"), (-1.0,), 1)


def test_vllms_usage_counts_a_token_that_the_answer_has_not():
    said = answer(["a", "b"], [None, -1.0], prompt_tokens=2, completion_tokens=1, total_tokens=3)
    assert read(said, "ab") == Scored(("a", "b"), (-1.0,), 1)


def test_what_cannot_be_is_infinitely_unlikely():
    assert read(answer(["a", "b"], [None, -9999.0]), "ab").perplexity == math.inf


GOOD = answer(["a", "b"], [None, -1.0])
WRONG = [
    ({}, "no log probabilities of the prompt"),
    ([], "no log probabilities"),
    (None, "no log probabilities"),
    ({"choices": []}, "no log probabilities"),
    ({"choices": [{"text": "ab"}]}, "no log probabilities"),
    ({"choices": [{"text": "ab", "logprobs": None}]}, "no log probabilities"),
    ({"choices": [{"text": "ab", "logprobs": {"content": []}}]}, "no log probabilities"),  # llama.cpp's, of chats
    (answer(["w"], [-1.0]), "echo is not heard"),
    (GOOD | {"choices": [GOOD["choices"][0] | {"text": 5}]}, "echo is not heard"),
    (answer(["a", "b"], [None]), "one log probability a token"),
    (answer("ab", [None, -1.0]), "one log probability a token"),
    (answer(["a", "b", "c"], [None, -1.0, -1.0]), "goes on behind the prompt"),
    (answer(["a", "b", "c"], [None, -1.0, -1.0], prompt_tokens="2"), "goes on behind the prompt"),
    (answer(["a", "b"], [None, None]), "that are none"),
    (answer(["a", "b", "c"], [-1.0, None, -1.0], text="ab"), "that are none"),
    (answer(["a", "b"], [None, 0.5]), "that are none"),
    (answer(["a", "b"], [None, math.nan]), "that are none"),
    (answer(["a", "b"], [None, True]), "that are none"),
    (answer(["a", 7], [None, -1.0], text="ab"), "tokens that are no text"),
    (answer(["ab", ""], [None, -1.0]), "no log probabilities of the prompt"),
]


@pytest.mark.parametrize(("said", "named"), WRONG)
def test_an_answer_that_is_not_the_prompts_is_refused(said, named):
    with pytest.raises(ValueError, match=named):
        read(said, "ab")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["ab", "a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "text", "logprobs", "tokens", "token_logprobs", "usage", "prompt_tokens"]),
            inner,
        )
    ),
)


@given(JSON | st.fixed_dictionaries({"choices": st.lists(JSON, min_size=1, max_size=1), "usage": JSON}))
def test_any_json_is_read_or_a_value_error(said):
    try:
        found = read(said, "ab")
    except ValueError:
        return
    assert found.bytes > 0


def test_the_furthest_token_is_found_where_the_tokens_are_the_same():
    x = Scored(("<s>", "a", "b", "c"), (-1.0, -2.0, -3.0), 3)
    assert furthest(x, x._replace(logprobs=(-1.5, -4.0, -3.0))) == (2, 2.0)
    assert furthest(x, x._replace(tokens=("<s>", "a", "b", "d"))) is None
    assert furthest(x, x._replace(logprobs=(-2.0, -3.0))) is None


def test_the_text_is_plain_english_of_about_a_page():
    assert 1000 < len(perplexity.TEXT) < 2000
    assert perplexity.TEXT.isascii()
    assert "\n" not in perplexity.TEXT
