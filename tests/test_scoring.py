"""Log probabilities of a given text are those of transformers, in pieces of any size, and serving is not disturbed."""

import math

import pytest
import torch

from reference_engine import scoring, weights
from reference_engine.scoring import Scored
from reference_engine.tokenizer import ByteTokenizer
from tests.engine_models import drive, llama, outputs, prompts, runner, save, sequence
from tests.native_builds import KERNELS

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> weights.Weights:
    return weights.read(save(llama(), tmp_path_factory.mktemp("m")))


def scored(engine: object, text: list[int], top: int = 0) -> list[Scored]:
    return [s for piece in scoring.score(engine, text, top) for s in piece]  # type: ignore[arg-type]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("piece", [1, 7, 128])
def test_they_are_those_of_transformers(
    read: weights.Weights, kernels: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "PIECE", piece)
    text = prompts(1, seed=4)[0] + list(range(50, 80))
    right = llama()(torch.tensor([text])).logits[0].detach().double().log_softmax(-1)
    found = scored(runner(read, cpu_kernels=kernels), text, top=3)
    assert [s.token for s in found] == text
    assert (found[0].logprob, found[0].top) == (None, [])
    for place, s in enumerate(found[1:]):
        assert s.logprob == pytest.approx(float(right[place, s.token]), abs=2e-4)
        assert [token for token, _ in s.top] == right[place].topk(3).indices.tolist()
        assert [value for _, value in s.top] == pytest.approx(right[place].topk(3).values.tolist(), abs=2e-4)


def test_one_token_follows_nothing(read: weights.Weights) -> None:
    assert scored(runner(read), [5], top=2) == [Scored(5, None, [])]


@pytest.mark.parametrize("mode", [("none", "auto"), ("int8", "int8")])
@pytest.mark.parametrize("kernels", KERNELS)
def test_scoring_between_steps_changes_no_answer(read: weights.Weights, kernels: str, mode: tuple[str, str]) -> None:
    knobs = {"cpu_kernels": kernels, "quantization": mode[0], "kv_cache_dtype": mode[1]}
    asked, engine = prompts(4), runner(read, **knobs)
    undisturbed = [sequence(p, i) for i, p in enumerate(asked)]
    drive(engine, undisturbed)
    again, before = [sequence(p, i) for i, p in enumerate(asked)], engine.execute
    pieces = scoring.score(engine, list(range(150)), 1)

    def execute(work: object) -> object:
        next(pieces, None)
        return before(work)  # type: ignore[arg-type]

    engine.execute = execute  # type: ignore[method-assign,assignment]
    drive(engine, again)
    assert outputs(again) == outputs(undisturbed)


def test_greedy_tokens_are_the_likeliest_of_their_places(read: weights.Weights) -> None:
    engine, asked = runner(read), sequence(prompts(1)[0])
    drive(engine, [asked])
    found = scored(engine, asked.token_ids, top=1)[asked.prompt_len :]
    assert [s.top[0][0] for s in found] == outputs([asked])[0]
    assert all(s.top[0][1] == s.logprob for s in found)


@pytest.mark.parametrize(
    ("text", "top", "named"),
    [
        ([], 0, "0 tokens; would be right: 1 to 512"),
        ([1] * 513, 0, "513 tokens"),
        ([1], 21, "21 likeliest tokens; would be right: 0 to 20"),
        ([1, 199], 0, "outside the vocabulary; would be right: 0 to 198"),
        ([-1], 0, "outside the vocabulary"),
    ],
)
def test_what_cannot_be_scored_is_refused_at_once(read: weights.Weights, text: list[int], top: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        scoring.score(runner(read), text, top)


def test_the_likeliest_of_equals_has_the_lowest_id() -> None:
    assert scoring.likeliest(torch.tensor([-1.0, -3.0, -1.0, -2.0]), 3) == [(0, -1.0), (2, -1.0), (3, -2.0)]


def test_as_a_completion_it_has_the_shape_of_openais() -> None:
    found = [Scored(104, None, []), Scored(105, -0.5, [(106, -0.25), (105, -0.5)]), Scored(33, -3.0, [(105, -1.0)])]
    shown = scoring.as_completion(ByteTokenizer(), found)
    assert shown["tokens"] == ["h", "i", "!"]
    assert shown["token_logprobs"] == [None, -0.5, -3.0]
    assert shown["top_logprobs"] == [None, {"i": -0.5, "j": -0.25}, {"!": -3.0, "i": -1.0}]
    assert shown["text_offset"] == [0, 1, 2]
    mean = sum(x for x in shown["token_logprobs"] if x is not None) / 2
    assert math.exp(-mean) == pytest.approx(math.exp(1.75))  # perplexity, as a client computes it
