"""The engine with kernels/, interpreted: its tokens are those of the path in torch, by graphs and a step ahead too.

A test here is of hundreds of programs, not of fewer than ten as the kernels' own: a model has two layers, each with
several kernels, an answer has steps, and a graph of each size is run once where it would be captured. None of the
programs may touch anything but the tensors that it was given.
"""

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dense_kernels import needs_triton
from tests.dense_kernels import nothing_beside as nothing_beside

# isort: split
from kernels import attention_api
from kernels.attention_api import Tile
from reference_engine import gpu, model, weights
from reference_engine.runner import ModelRunner
from reference_engine.runner_api import NOT_FINITE
from reference_engine.weights import Weights
from tests.engine_models import drive, family, outputs, prompts, runner, save, sequence

pytestmark = [pytest.mark.engine, needs_triton]
ROOT = Path(__file__).parents[1]
EOS = 3


@pytest.fixture(scope="module", params=["llama", "qwen2-windows", "qwen3"])
def read(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return made(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return made("llama", tmp_path_factory.mktemp("llama"))


def made(name: str, folder: Path) -> Weights:
    return weights.read(save(family(name, num_hidden_layers=2), folder))


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attention cut every 16 tokens instead of 512: decodes of several pieces that are merged, at a test's lengths."""
    tiles = {"few": Tile(16, 16, 16), "many": Tile(16, 16, 16)}
    monkeypatch.setitem(attention_api.TILES, (4, "roomy"), tiles)
    gpu.tiles.cache_clear()
    yield
    gpu.tiles.cache_clear()


def generated(engine: ModelRunner, count: int = 3, longest: int = 14, **params: Any) -> list[list[int]]:
    """Prompts in chunks beside decodes."""
    sequences = [sequence(p, i, **{"max_tokens": 3} | params) for i, p in enumerate(prompts(count, longest=longest))]
    drive(engine, sequences, budget=11)
    return outputs(sequences)


@pytest.mark.parametrize("stored", ["auto", "int8"])
def test_greedy_tokens_are_those_of_the_path_in_torch(read: Weights, stored: str) -> None:
    ours, torchs = (runner(read, cpu_kernels=k, kv_cache_dtype=stored) for k in ("triton", "torch"))
    assert generated(ours) == generated(torchs)


def test_greedy_tokens_with_eight_bit_weights_are_those_of_the_path_in_torch(llama: Weights) -> None:
    ours, torchs = (runner(llama, cpu_kernels=k, quantization="int8-weights") for k in ("triton", "torch"))
    assert generated(ours) == generated(torchs)


def test_logits_over_keys_and_values_in_fp8_are_near(llama: Weights) -> None:
    """Three bits of mantissa err by a sixteenth at most, of each key and value, in each of two layers; seen 0.063."""
    asked, found = sequence(list(range(9))), []
    asked.blocks = [7, 2, 5]
    for kind in ("auto", "fp8"):
        engine = runner(llama, cpu_kernels="triton", kv_cache_dtype=kind)
        found.append(model.forward(engine.model, model.lay_out(engine.model, [(asked, 9)])))
    plain, rounded = found
    assert 0 < (rounded - plain).norm() / plain.norm() < 2 / 16


@pytest.mark.parametrize("read", ["llama", "qwen2-windows"], indirect=True)
@pytest.mark.usefixtures("short_pieces")
def test_by_graphs_greedy_tokens_are_the_same(read: Weights) -> None:
    engine = by_graphs(read, max_model_len=48, max_num_seqs=2)
    asked = {"count": 2, "longest": 40}
    found = generated(engine, **asked)
    assert found == generated(runner(read, cpu_kernels="torch"), **asked)
    stepper = engine._stepper
    assert stepper
    assert stepper.guessed


def test_by_graphs_sampled_tokens_are_the_same(llama: Weights) -> None:
    """Drawn on the device by the same numbers, end tokens masked as long as they are too early."""
    params: dict[str, Any] = {"temperature": 0.9, "top_p": 0.8, "seed": 7, "min_tokens": 3}
    engine = by_graphs(llama, eos_ids=range(0, 199, 2))
    found = generated(engine, **params)
    assert found == generated(runner(llama, range(0, 199, 2), cpu_kernels="torch"), **params)
    assert all(token % 2 for answer in found for token in answer)


def by_graphs(read: Weights, eos_ids: range = range(0), **knobs: Any) -> ModelRunner:
    limits: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 64} | knobs
    engine = runner(read, eos_ids, cpu_kernels="triton", graphs="on", **limits)
    engine.capture()
    assert engine.facts()["graphs"]
    return engine


BAD = 7  # the token whose embedding is no number, as a sum in fp16 may come to be


@pytest.mark.parametrize(
    ("graphs", "knobs"),
    [
        (False, {"kv_cache_dtype": "fp8"}),
        (False, {"quantization": "int8-weights"}),
        (True, {"kv_cache_dtype": "int8"}),
        (True, {}),
    ],
    ids=str,
)
def test_what_is_computed_with_no_numbers_gives_no_token_and_harms_no_other(
    knobs: dict[str, str], graphs: bool, tmp_path: Path
) -> None:
    """Whether it is a row's own or comes out of the pool; what made none goes on to nothing, in a step ahead either."""
    broken = made("llama", tmp_path)
    broken.embedding[BAD] = math.nan
    asked = {"max_tokens": 2, "temperature": 0.9, "seed": 3}

    def answers(prompts: list[list[int]]) -> list[list[int]]:
        """Each prompt token by token, a step each, and then a token more of those that have one."""
        limits: dict[str, Any] = {"max_model_len": 16, "max_num_seqs": 3} | knobs
        engine = by_graphs(broken, **limits) if graphs else runner(broken, cpu_kernels="triton", **limits)
        sequences = [sequence(prompt, i, **asked) for i, prompt in enumerate(prompts)]
        for i, s in enumerate(sequences):
            s.blocks = [3 * i, 3 * i + 1]
        for _ in range(3):
            for s, token in zip(sequences, engine.execute([(s, 1) for s in sequences]), strict=True):
                s.computed += 1
                if s.computed == len(s.token_ids) and token is not None:
                    s.token_ids.append(token)
            sequences = [s for s in sequences if s.token_ids[-1] != NOT_FINITE]
        return outputs(sequences)

    good = [9, 12]
    alone = answers([good])
    assert answers([[9, BAD], good, [BAD, 9]]) == alone


def test_graphs_of_another_pool_are_not_replayed(llama: Weights) -> None:
    from reference_engine import kv_memory
    from reference_engine.config import EngineConfig

    engine = by_graphs(llama)
    before = engine._stepper
    kv_memory.resize(engine, EngineConfig(block_size=4, num_blocks=50, max_model_len=64))
    generated(engine, max_tokens=1)
    assert before
    assert before.guessed == 0
    engine.capture()
    assert engine._stepper is not before


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"cpu_kernels": "torch", "graphs": "on"}, "graphs 'on' with kernels 'torch': would be right: triton"),
        ({"graphs": "yes"}, "graphs 'yes': would be right: auto or off or on"),
        ({"cpu_kernels": "torch", "kv_cache_dtype": "fp8"}, "kv_cache_dtype 'fp8': would be right: auto or int8"),
    ],
)
def test_what_cannot_be_had_is_said(llama: Weights, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        runner(llama, **knobs)


def test_kernels_on_a_cpu_are_for_tests_and_float32(llama: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = llama.shape
    assert gpu.problem(wide, torch.float32, torch.device("cpu")) == ""
    assert "bfloat16 on the cpu" in gpu.problem(wide, torch.bfloat16, torch.device("cpu"))
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="kernels on the cpu; would be right: a GPU, or TRITON_INTERPRET=1"):
        runner(llama, cpu_kernels="triton")


def test_the_engine_does_without_triton_and_kernels() -> None:
    """Where they are not installed: `auto` computes, `triton` says what is missing."""
    program = """
import sys
sys.modules |= {"triton": None, "kernels": None}
from reference_engine.config import EngineConfig
from reference_engine.runner import load
from reference_engine.sequence import SamplingParams, Sequence
runner, _ = load(EngineConfig(device="cpu", num_blocks=8))
assert isinstance(runner.execute([(Sequence(0, [1, 2], 2, SamplingParams(1), 0, blocks=[0]), 2)])[0], int)
try:
    load(EngineConfig(device="cpu", num_blocks=8, cpu_kernels="triton"))
except ValueError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "triton is not installed; would be right: pip install 'triton>=3.7,<4'" in ran.stdout
