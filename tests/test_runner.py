"""The runner's contract: what a step gives back, what it leaves alone, what is refused at the start."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from reference_engine import weights
from reference_engine.config import EngineConfig
from reference_engine.runner import ModelRunner, load
from reference_engine.runner_api import Runner
from reference_engine.tokenizer import EOS, ByteTokenizer, TokenizerError
from tests.engine_models import drive, llama, outputs, prompts, save, sequence
from tests.test_gguf import metadata_of, write_gguf
from tests.test_tokenizer import byte_level

pytestmark = pytest.mark.engine


def tiny(**knobs: Any) -> ModelRunner:
    runner, _ = load(EngineConfig(**({"num_blocks": 64, "device": "cpu", "threads": 1} | knobs)))
    assert isinstance(runner, ModelRunner)
    return runner


def test_a_token_comes_only_from_work_that_reaches_the_end() -> None:
    runner: Runner = tiny()
    part, whole, decode = (sequence(list(range(40)), i) for i in range(3))
    part.blocks, whole.blocks, decode.blocks = [1, 2, 3], [4, 5, 6], [7, 8, 9]
    assert runner.execute([(decode, 39)]) == [None]
    decode.computed = 39
    nothing, first, second = runner.execute([(part, 39), (whole, 40), (decode, 1)])
    assert nothing is None
    assert first == second
    assert first in range(runner.vocab_size)


def test_a_step_changes_no_sequence() -> None:
    s = sequence([1, 2, 3])
    s.blocks = [5]
    before = (list(s.token_ids), s.computed, list(s.blocks))
    tiny().execute([(s, 3)])
    assert (s.token_ids, s.computed, s.blocks) == before


def test_a_step_writes_only_the_slots_of_its_tokens() -> None:
    runner = tiny(block_size=4)
    s = sequence(list(range(10)))
    s.blocks, s.computed = [9, 3, 20], 5
    runner.execute([(s, 3)])
    written = runner.model.cache.pool.abs().amax((0, 1, 3, 5)) > 0  # [block, position in it]
    assert written.nonzero().tolist() == [[3, 1], [3, 2], [3, 3]]


def test_a_sequence_without_blocks_for_its_work_is_our_bug_and_says_so() -> None:
    s = sequence(list(range(20)))
    s.blocks = [1]
    with pytest.raises(AssertionError, match="too few blocks"):
        tiny().execute([(s, 20)])


def test_end_tokens_are_masked_until_min_tokens() -> None:
    runner = tiny(num_blocks=256)
    runner.eos_ids = frozenset(range(32, 127))  # tiny says nothing else, so an answer would end at its first token
    s = sequence([1, 2, 3], max_tokens=6, min_tokens=6)
    drive(runner, [s])
    assert len(outputs([s])[0]) == 6
    assert not set(outputs([s])[0]) & runner.eos_ids


def test_the_same_seed_is_the_same_tiny_model_and_another_is_not() -> None:
    def bits(seed: int) -> list[torch.Tensor]:
        return list(weights.tiny(seed).tensors())

    assert all(torch.equal(a, b) for a, b in zip(bits(3), bits(3), strict=True))
    assert not torch.equal(bits(3)[0], bits(4)[0])


def test_tiny_answers_in_printable_ascii_and_may_end() -> None:
    sequences = [sequence(ByteTokenizer().encode(f"prompt {i}"), i, max_tokens=40) for i in range(8)]
    drive(tiny(num_blocks=256), sequences)
    made = {token for answer in outputs(sequences) for token in answer}
    assert made <= {*range(32, 127), EOS}
    assert len(made) > 20


def test_tiny_with_tied_embeddings_runs() -> None:
    shape = weights.Shape(264, 32, 48, 1, 2, 1, 16, 1e-5, 10_000.0, 8192, tied=True)
    runner = ModelRunner("t", weights.tiny(0, shape=shape), frozenset(), EngineConfig(device="cpu"))
    sequences = [sequence([1, 2, 3])]
    drive(runner, sequences)
    assert len(outputs(sequences)[0]) == 12


def test_memory_is_stated() -> None:
    facts = tiny(num_blocks=10, block_size=8, cpu_kernels="torch").facts()
    assert facts["kv_bytes"] == 4 * 2 * 10 * 2 * 8 * 32 * 4  # layers, k and v, blocks, kv heads, positions, head, bytes
    assert facts["weights_bytes"] == 4 * int(facts["parameters"])
    half = tiny(num_blocks=10, block_size=8, dtype="bfloat16").facts()
    assert half["kv_bytes"] == int(facts["kv_bytes"]) // 2
    assert (half["dtype"], half["device"], half["threads"]) == ("bfloat16", "cpu", 1)


def test_warmup_leaves_answers_as_they_are() -> None:
    cold, warm = tiny(), tiny()
    warm.warmup()
    answers = []
    for runner in (cold, warm):
        sequences = [sequence(p, i) for i, p in enumerate(prompts(3))]
        drive(runner, sequences)
        answers.append(outputs(sequences))
    assert answers[0] == answers[1]


def test_a_directory_loads_with_its_name_vocabulary_and_end_tokens(tmp_path: Path) -> None:
    folder = save(llama(eos_token_id=7), tmp_path / "small-llama")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not there"):
        load(EngineConfig(model=str(folder), max_model_len=512))
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
    runner, tokenizer = load(EngineConfig(model=str(folder), max_model_len=512, num_blocks=64, device="cpu"))
    assert (runner.name, runner.vocab_size, runner.eos_ids) == ("small-llama", 199, {7})
    assert tokenizer.vocab_size == 2


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"model": "no/such/place"}, "no/such/place: no such directory"),
        ({"dtype": "float8"}, "dtype 'float8'"),
        ({"device": "tpu"}, "device 'tpu'"),
        ({"max_model_len": 40_000}, "max_position_embeddings is 32768, max_model_len is 40000"),
        ({"model": "sim:nothing"}, "sim:nothing"),
    ],
)
def test_what_cannot_be_loaded_is_a_value_error_that_names_it(knobs: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        load(EngineConfig(**knobs))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="finds no GPU"):
        load(EngineConfig(device="cuda"))


def test_a_simulated_model_loads_without_torch() -> None:
    code = (
        "import sys; from reference_engine.runner import load; from reference_engine.config import EngineConfig\n"
        "runner, tokenizer = load(EngineConfig(model='sim:null'))\n"
        "assert runner.vocab_size == tokenizer.vocab_size\n"
        "print(sorted(m for m in sys.modules if m in ('torch', 'tokenizers', 'jinja2', 'transformers')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_gguf_file_and_a_packaged_model_load_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "small.gguf", llama(vocab_size=400), **metadata_of(byte_level()))
    runner, tokenizer = load(EngineConfig(model=str(path), num_blocks=64, device="cpu", max_model_len=512))
    assert (runner.name, runner.vocab_size, runner.eos_ids) == ("small", 400, tokenizer.eos_ids)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "small.gguf", llama(vocab_size=199), **metadata_of(byte_level()))
    with pytest.raises(weights.WeightsError, match=r"tokens; would be right: at most the model's vocab_size, 199"):
        load(EngineConfig(model=str(path), num_blocks=64, device="cpu"))
