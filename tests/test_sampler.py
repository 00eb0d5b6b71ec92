"""Greedy and drawn tokens: the distribution is right, and a draw depends on (seed, position) only."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TopPLogitsWarper

from reference_engine.runner_api import NOT_FINITE
from reference_engine.sampler import draw, sample, uniform
from reference_engine.sequence import Sequence
from tests.engine_models import sequence

pytestmark = pytest.mark.engine
NO_EOS: frozenset[int] = frozenset()


def rows(count: int, vocab: int = 50, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed))


def answered(n: int, number: int = 0, **params: object) -> Sequence:
    """A sequence with n tokens of answer."""
    s = sequence([1, 2, 3], number, **params)
    s.token_ids += [4] * n
    return s


def test_temperature_0_is_the_argmax_and_the_lowest_id_among_equals() -> None:
    logits = rows(3)
    logits[1, [7, 30]] = 99.0
    assert sample(logits, [sequence([1])] * 3, NO_EOS, 0) == [logits[0].argmax(), 7, logits[2].argmax()]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_of_no_finite_numbers_has_no_token_and_its_neighbours_have_theirs(
    value: float, temperature: float
) -> None:
    logits = rows(4)
    right = sample(logits.clone(), [answered(1, i, temperature=temperature) for i in range(4)], NO_EOS, 0)
    logits[1, 30] = value
    logits[2] = -torch.inf
    sampled = sample(logits, [answered(1, i, temperature=temperature) for i in range(4)], NO_EOS, 0)
    assert sampled == [right[0], NOT_FINITE, NOT_FINITE, right[3]]


def test_nothing_to_sample_is_no_token() -> None:
    assert sample(torch.empty(0, 50), [], NO_EOS, 0) == []


def test_a_draw_is_the_same_in_any_batch() -> None:
    logits = rows(6)
    sequences = [answered(i, i, temperature=0.5 * (i % 3), top_p=0.9, seed=i) for i in range(6)]
    together = sample(logits.clone(), sequences, NO_EOS, seed=0)
    alone = [sample(logits[i : i + 1].clone(), [s], NO_EOS, seed=99)[0] for i, s in enumerate(sequences)]
    backwards = sample(logits.flip(0), sequences[::-1], NO_EOS, seed=5)[::-1]
    assert together == alone == backwards


def test_the_draw_depends_on_seed_and_position_and_not_on_whose_it_is() -> None:
    draws = {
        (seed, k): uniform(answered(k, temperature=1.0, seed=seed), 0) for seed in (0, 1, -1, 2**63) for k in range(50)
    }
    assert len(set(draws.values())) == len(draws)
    for (seed, k), u in draws.items():
        assert u == uniform(answered(k, number=77, temperature=1.0, seed=seed), seed=123)


def test_without_a_seed_sequences_differ_and_the_engine_seed_decides() -> None:
    first, second = (answered(0, number, temperature=1.0) for number in (0, 1))
    seeded = answered(0, temperature=1.0, seed=0)
    assert len({uniform(first, 0), uniform(second, 0), uniform(first, 1), uniform(seeded, 0)}) == 4
    assert uniform(first, 0) == uniform(answered(0, 0, temperature=1.0), 0)


def test_uniform_draws_are_uniform() -> None:
    """Kolmogorov's distance of 4,000 draws; 1.95 / sqrt(n) is exceeded by one set of draws in a thousand."""
    draws = np.sort([uniform(answered(k, temperature=1.0, seed=3), 0) for k in range(4000)])
    assert draws[0] >= 0
    assert draws[-1] < 1
    assert np.abs(draws - (np.arange(4000) + 0.5) / 4000).max() < 1.95 / 4000**0.5


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 0.8), (1.0, 0.3)])
def test_tokens_come_with_the_probability_that_transformers_gives_them(temperature: float, top_p: float) -> None:
    """A grid of u inverts the distribution exactly, so frequencies are probabilities to a grid step on either side."""
    logits, n = rows(1)[0], 5000
    kept = TopPLogitsWarper(top_p)(torch.empty(0), (logits / temperature)[None].double()) if top_p < 1 else None
    right = torch.softmax((logits / temperature).double() if kept is None else kept[0], -1).numpy()
    found = np.bincount([draw(logits.numpy(), temperature, top_p, (i + 0.5) / n) for i in range(n)], minlength=50) / n
    assert np.abs(found - right).max() < 1.5 / n
    assert not found[right == 0].any()


@given(
    logits=st.lists(st.floats(-30, 30, width=32) | st.just(float("-inf")), min_size=1, max_size=20),
    temperature=st.floats(1e-300, 100),
    top_p=st.floats(1e-9, 1.0),
    u=st.floats(0, 1, exclude_max=True) | st.just(1 - 2.0**-53),
)
def test_a_drawn_token_is_always_a_possible_one(
    logits: list[float], temperature: float, top_p: float, u: float
) -> None:
    logits.append(0.0)
    token = draw(np.array(logits, np.float32), temperature, top_p, u)
    assert logits[token] > float("-inf")
    if top_p < 1 / len(logits):  # the likeliest token alone has at least this probability
        assert np.exp((logits[token] - max(logits)) / temperature) == 1  # logits this near are equally likely


def test_as_temperature_falls_the_draw_becomes_the_argmax() -> None:
    logits = rows(20).numpy()
    assert [draw(row, 1e-6, 1.0, 0.999) for row in logits] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_end_tokens_wait_for_min_tokens(temperature: float) -> None:
    logits = rows(1).repeat(3, 1)
    logits[:, [5, 6]] = 50.0
    made = [answered(n, n, temperature=temperature, min_tokens=2, seed=1) for n in (0, 1, 2)]
    tokens = sample(logits, made, frozenset({5, 6}), 0)
    assert [t in (5, 6) for t in tokens] == [False, False, True]
