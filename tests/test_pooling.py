"""Vectors of texts beside transformers' hidden states, alone and in batches, and beside the engine's own steps."""

import math
import threading
from typing import Any

import pytest
import torch

from reference_engine import pooling
from reference_engine.config import POOLINGS
from reference_engine.weights import read
from tests.engine_models import drive, family, outputs, prompts, runner, save, sequence

TEXTS = [*prompts(6, seed=3), [5], list(range(48))]
DIFFERENCE = 1e-5  # of values up to 1; seen 2e-6


def test_the_knob_names_what_there_is() -> None:
    assert set(POOLINGS) == set(pooling.POOLINGS)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("name", ["llama", "qwen2-windows"])
def test_vectors_are_those_of_transformers(tmp_path: Any, name: str, kernels: str) -> None:
    hf = family(name)
    engine = runner(read(save(hf, tmp_path), torch.float32), cpu_kernels=kernels)
    for kind in POOLINGS:
        vectors = engine.single_pass(kind)(TEXTS)
        for ids, vector in zip(TEXTS, vectors, strict=True):
            with torch.inference_mode():
                states = hf.model(torch.tensor([ids])).last_hidden_state[0]
            right = states.mean(0) if kind == "mean" else states[-1]
            right = right / right.norm()
            assert (torch.tensor(vector.tolist()) - right).abs().max() < DIFFERENCE
            assert math.hypot(*vector) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("kind", POOLINGS)
def test_a_vector_does_not_depend_on_its_batch(tmp_path: Any, kind: str, kernels: str) -> None:
    engine = runner(read(save(family("llama"), tmp_path), torch.float32), cpu_kernels=kernels)
    compute = engine.single_pass(kind)
    together = compute(TEXTS)
    exact = engine.kernels == "native"  # MKL's sums depend on the number of rows
    for ids, vector in zip(TEXTS, together, strict=True):
        (alone,) = compute([ids])
        assert alone == vector if exact else max(abs(a - b) for a, b in zip(alone, vector, strict=True)) < DIFFERENCE
    assert compute(TEXTS) == together  # what a pass left in its pool is not seen


def test_passes_beside_steps_change_neither(tmp_path: Any) -> None:
    """Two threads that pass while the engine computes: each has a pool of its own."""
    engine = runner(read(save(family("llama"), tmp_path), torch.float32))
    alone = [sequence(prompt, i) for i, prompt in enumerate(prompts(4))]
    drive(engine, alone)
    right = engine.single_pass("mean")(TEXTS)
    found: list[Any] = []

    def work() -> None:
        compute = engine.single_pass("mean")
        found.extend(compute(TEXTS) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        beside = [sequence(prompt, i) for i, prompt in enumerate(prompts(4))]
        drive(engine, beside)
        assert outputs(beside) == outputs(alone)
    for thread in threads:
        thread.join()
    assert len(found) == 40
    assert all(vectors == right for vectors in found)
