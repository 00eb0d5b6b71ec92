"""Same weights, same prompt: logits and tokens are those of transformers, in whatever pieces the engine computes."""

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from reference_engine import batch, weights
from reference_engine.config import EngineConfig
from reference_engine.scheduler import Scheduler
from reference_engine.sequence import Sequence
from tests.engine_models import (
    FAMILIES,
    assert_same_logits,
    drive,
    family,
    greedy,
    llama,
    logits_at,
    outputs,
    prompts,
    runner,
    save,
    sequence,
)
from tests.native_builds import KERNELS

pytestmark = pytest.mark.engine
TOKENS = 12


class Oracle(NamedTuple):
    weights: weights.Weights
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module", params=FAMILIES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    hf = family(request.param)
    asked = prompts(32)
    read = weights.read(save(hf, tmp_path_factory.mktemp(request.param)))
    return Oracle(read, asked, [greedy(hf, p, TOKENS) for p in asked])


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 1},
        {"tie_word_embeddings": True},
        {"head_dim": 24},
        {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1000.0, **LLAMA3}},
        {"rms_norm_eps": 1e-2, "num_hidden_layers": 1},
    ],
    ids=lambda c: ",".join(c),
)
def test_logits_are_those_of_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    hf = llama(peak=1.0, **changes)
    assert_same_logits(hf, weights.read(save(hf, tmp_path)))


def test_shards_are_read_as_one_file_is(tmp_path: Path) -> None:
    hf = llama()
    save(hf, tmp_path / "whole")
    save(hf, tmp_path / "shards", shard="60KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    whole, shards = (list(weights.read(tmp_path / name).tensors()) for name in ("whole", "shards"))
    assert all(torch.equal(a, b) for a, b in zip(whole, shards, strict=True))


@pytest.mark.parametrize("scaling", [None, {"type": "llama3", **LLAMA3}])
def test_config_spelled_as_before_transformers_5_is_the_same_model(
    scaling: dict[str, Any] | None, tmp_path: Path
) -> None:
    rope = {"rope_theta": 77_000.0, "rope_type": "llama3" if scaling else "default", **(LLAMA3 if scaling else {})}
    hf = llama(peak=1.0, rope_parameters=rope)
    path = save(hf, tmp_path) / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps({**config, "rope_theta": 77_000.0, "rope_scaling": scaling, "torch_dtype": "float32"}))
    assert_same_logits(hf, weights.read(tmp_path))


def test_bfloat16_is_as_near_to_float32_as_transformers_is(tmp_path: Path) -> None:
    hf = llama()
    engine = runner(weights.read(save(hf, tmp_path), torch.bfloat16), dtype="bfloat16")
    tokens = prompts(1, seed=7)[0] + list(range(30))
    with torch.inference_mode():
        exact = hf(torch.tensor([tokens])).logits[0]
        theirs = (hf.to(torch.bfloat16)(torch.tensor([tokens])).logits[0].float() - exact).abs().mean()
    for chunk in (1, 8):
        ours = (logits_at(engine, tokens, chunk) - exact[chunk - 1 :: chunk]).abs().mean()
        assert 0 < ours < 1.25 * theirs


@pytest.mark.parametrize("budget", [1, 7, 16, 10_000])
@pytest.mark.parametrize("kernels", KERNELS)
def test_tokens_are_those_of_transformers_at_any_budget(oracle: Oracle, budget: int, kernels: str) -> None:
    alone = [sequence(p) for p in oracle.prompts[:4]]
    engine = runner(oracle.weights, cpu_kernels=kernels)
    for s in alone:
        drive(engine, [s], budget)
    together = [sequence(p, i) for i, p in enumerate(oracle.prompts)]
    drive(engine, together, budget)
    assert outputs(alone) == oracle.expected[:4]
    assert outputs(together) == oracle.expected


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_sequence_that_was_preempted_goes_on_as_if_it_had_not_been(oracle: Oracle, every: int, kernels: str) -> None:
    again = [sequence(p, i) for i, p in enumerate(oracle.prompts[:8])]
    # every=1 with the whole budget: one sequence starts again in each step and is recomputed in it
    engine = runner(oracle.weights, cpu_kernels=kernels)
    drive(engine, again, budget=10_000 if every == 1 else 64, preempt_every=every)
    assert outputs(again) == oracle.expected[:8]


def test_a_decode_is_grouped_with_others_of_any_length(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(batch.GROUP_POSITIONS, "cpu", 60)  # of contexts of 1 to 52: groups of 1 to 8
    together = [sequence(p, i) for i, p in enumerate(oracle.prompts)]
    drive(runner(oracle.weights), together)
    assert outputs(together) == oracle.expected


def scheduled(oracle: Oracle, asked: list[list[int]], **knobs: Any) -> tuple[list[Sequence], Scheduler]:
    """Through the engine's own scheduler."""
    knobs = {"block_size": 4, "num_blocks": 600, "max_model_len": 512, "device": "cpu"} | knobs
    engine, scheduler = runner(oracle.weights, **knobs), Scheduler(EngineConfig(**knobs), frozenset())
    sequences = [sequence(p, i, max_tokens=TOKENS) for i, p in enumerate(asked)]
    for s in sequences:
        scheduler.submit(s)
    while scheduler.busy:
        work = scheduler.step(scheduler.config.max_num_batched_tokens, 0)
        scheduler.commit(work, engine.execute(work), 0)
        scheduler.check()
    return sequences, scheduler


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize(("budget", "blocks"), [(7, 600), (512, 600), (512, 30), (5, 30)])
@pytest.mark.parametrize("kernels", KERNELS)
def test_scheduled_preempted_and_cached_alike(
    oracle: Oracle, budget: int, blocks: int, prefix_caching: bool, kernels: str
) -> None:
    knobs: dict[str, Any] = {"max_num_batched_tokens": budget, "num_blocks": blocks, "cpu_kernels": kernels}
    knobs["prefix_caching"] = prefix_caching
    sequences, scheduler = scheduled(oracle, oracle.prompts, **knobs)
    assert outputs(sequences) == oracle.expected
    assert (scheduler.counts.preemptions > 0) == (blocks == 30)


def test_a_cached_prefix_changes_no_token(oracle: Oracle) -> None:
    prompt = max(oracle.prompts, key=len)
    expected = oracle.expected[oracle.prompts.index(prompt)]
    sequences, _ = scheduled(oracle, [prompt] * 3, max_num_seqs=1)
    assert [s.cached for s in sequences] == [0, *[(len(prompt) - 1) // 4 * 4] * 2]
    assert outputs(sequences) == [expected] * 3


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def widen(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(65)


def add_bias(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)


def quantise(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)


def poison(value: float, dtype: torch.dtype = torch.float32) -> Any:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensor = tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].to(dtype)
        tensor[-1, -1] = value

    return damage


NOT_FINITE = "model.layers.1.mlp.up_proj.weight has a value that is no finite number in float32; would be right: only"


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (poison(float("nan")), NOT_FINITE),
        (poison(float("inf"), torch.float16), NOT_FINITE),
        (poison(float("-inf"), torch.bfloat16), NOT_FINITE),
        (drop, "lacks model.layers.1.mlp.up_proj.weight; would be right: a tensor of [112, 64]"),
        (widen, "model.norm.weight is [65]; would be right: [64]"),
        (add_bias, "model.layers.0.self_attn.q_proj.bias has no place"),
        (quantise, "lm_head.weight holds torch.int8"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(damage: Any, named: str, tmp_path: Path) -> None:
    path = save(llama(), tmp_path) / "model.safetensors"
    tensors = load_file(path)
    damage(tensors)
    save_file(tensors, path)
    with pytest.raises(weights.WeightsError) as error:
        weights.read(tmp_path)
    assert str(error.value).startswith(str(path))
    assert named in str(error.value)


def test_files_that_are_not_there_or_not_whole_are_named(tmp_path: Path) -> None:
    shards = save(llama(), tmp_path / "shards", shard="60KB")
    lost = sorted(shards.glob("*.safetensors"))[1]
    lost.rename(tmp_path / "elsewhere")
    with pytest.raises(weights.WeightsError, match=lost.name):
        weights.read(shards)
    lost.write_bytes((tmp_path / "elsewhere").read_bytes()[:-10])
    with pytest.raises(weights.WeightsError, match=f"{lost.name}: no readable safetensors"):
        weights.read(shards)
    with pytest.raises(weights.WeightsError, match=r"config\.json: not there"):
        weights.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(weights.WeightsError, match=r"config\.json: no JSON"):
        weights.read(tmp_path)
    (tmp_path / "config.json").write_bytes((shards / "config.json").read_bytes())
    with pytest.raises(weights.WeightsError, match=r"would be right: a model\.safetensors"):
        weights.read(tmp_path)


def with_header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(64)


def one(**changes: Any) -> bytes:
    return json.dumps({"t": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04\x95",  # how a pickle begins
        with_header(one())[:20],
        with_header(one(), 2**63),
        with_header(one(), 2**30),
        with_header(b"{" * 1000),
        with_header(b"[1]"),
        with_header(one(dtype="F99")),
        with_header(one(dtype=3)),
        with_header(one(shape=[2**62, 2**62])),
        with_header(one(shape=[-4])),
        with_header(one(shape="many")),
        with_header(one(data_offsets=[0, 2**40])),
        with_header(one(data_offsets=[16, 0])),
        with_header(one(data_offsets=[0])),
    ],
    ids=lambda content: repr(content[8:48]),
)
def test_a_hostile_safetensors_file_ends_in_one_sentence_that_names_it(content: bytes, tmp_path: Path) -> None:
    path = save(llama(), tmp_path) / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(weights.WeightsError, match=r"no readable safetensors file") as error:
        weights.read(tmp_path)
    assert str(error.value).startswith(f"{path}: ")


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "pytorch_model.bin", ".", "", 3])
def test_an_index_that_points_elsewhere_is_refused(name: object, tmp_path: Path) -> None:
    path = save(llama(), tmp_path) / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(weights.WeightsError, match=r"index\.json: weight_map"):
        weights.read(tmp_path)


def test_a_pickled_model_is_not_opened(tmp_path: Path) -> None:
    save(llama(), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(weights.WeightsError, match=r"would be right: a model\.safetensors"):
        weights.read(tmp_path)


def test_sizes_of_a_config_are_held_against_the_file_before_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(llama(), tmp_path) / "config.json"
    config = json.loads(path.read_text()) | {"hidden_size": 2**30, "head_dim": 2**20, "vocab_size": 2**31 - 1}
    path.write_text(json.dumps(config))
    monkeypatch.setattr(torch, "empty", None)  # taking memory would fail
    with pytest.raises(
        weights.WeightsError, match=r"input_layernorm\.weight is \[64\]; would be right: \[1073741824\]"
    ):
        weights.read(tmp_path)
