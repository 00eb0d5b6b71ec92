"""Each family's logits are those of transformers; a config.json that means other mathematics is refused by name."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference_engine import families, model, weights
from reference_engine.families import FAMILIES, INERT, WeightsError
from tests.engine_models import FAMILIES as ORACLES
from tests.engine_models import WINDOWS, assert_same_logits, drive, family, llama, outputs, runner, save, sequence

pytestmark = pytest.mark.engine


def test_every_family_has_an_oracle() -> None:
    assert {name.split("-")[0] for name in ORACLES} == set(FAMILIES)


LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"attention_bias": True}),
        ("mistral", {}),
        ("mistral", {"sliding_window": None, "head_dim": 24}),
        ("mistral", {"sliding_window": 1}),
        ("mistral", {"sliding_window": 512}),  # never reached
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("qwen2", WINDOWS),
        ("qwen2", {**WINDOWS, "max_window_layers": 0}),
        ("qwen2", {**WINDOWS, "layer_types": LAYERS}),
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
        ("qwen3", WINDOWS),
    ],
    ids=lambda c: c if isinstance(c, str) else ",".join(f"{k}={v}" for k, v in c.items() if k != "layer_types"),
)
def test_logits_are_those_of_transformers(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    hf = family(name, peak=1.0, **changes)
    assert_same_logits(hf, weights.read(save(hf, tmp_path)))


YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
        YARN,
        {**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
        {**YARN, "attention_factor": 0.7},
        {**YARN, "mscale": 0.9, "mscale_all_dim": 0.6},
        {**YARN, "factor": 0.5},
    ],
    ids=lambda rope: ",".join(str(rope[k]) for k in rope if k not in ("rope_theta", "factor")),
)
@pytest.mark.filterwarnings("ignore")  # transformers doubts some of these; it computes them all the same
def test_stretched_rotations_are_those_of_transformers(rope: dict[str, Any], tmp_path: Path) -> None:
    hf = llama(peak=1.0, rope_parameters=dict(rope), head_dim=32)
    assert_same_logits(hf, weights.read(save(hf, tmp_path)))


def test_a_stretched_rotation_is_not_the_plain_one() -> None:
    """Else the tests above would hold for any reading of the config."""
    plain = shape(config())
    for rope in ({**YARN}, {"rope_type": "linear", "factor": 4.0}):
        other = shape(config() | {"rope_parameters": rope})
        assert not torch.equal(model.rotation(plain, 8)[0], model.rotation(other, 8)[0])
    assert plain == shape(config() | {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}})


def test_a_window_changes_what_is_said(tmp_path: Path) -> None:
    prompt = [list(range(60, 100))]
    said = []
    for window in (4, None):
        hf = family("mistral", sliding_window=window)
        sequences = [sequence(p) for p in prompt]
        drive(runner(weights.read(save(hf, tmp_path / str(window)))), sequences)
        said.append(outputs(sequences))
    assert said[0] != said[1]


def config(name: str = "llama") -> dict[str, Any]:
    """The least that a config.json must say."""
    sizes = {"vocab_size": 11, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    return {"model_type": name, "num_attention_heads": 32, "head_dim": 8, **sizes}


def shape(fields: dict[str, Any]) -> families.Shape:
    return families.shape_of(Path("config.json"), fields)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_takes(name: str) -> None:
    ours, theirs = shape(config(name)), ORACLES[name][0](**{k: v for k, v in config(name).items() if k != "model_type"})
    assert ours.max_positions == theirs.max_position_embeddings
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.window == (theirs.sliding_window or 0 if name == "mistral" else 0)
    assert shape({**config(name), "hidden_size": 320, "head_dim": None}).head_dim == (128 if name == "qwen3" else 10)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_transformers_writes_is_understood(name: str, tmp_path: Path) -> None:
    ORACLES[name][0](**{k: v for k, v in config(name).items() if k != "model_type"}).save_pretrained(tmp_path)
    assert families.read_shape(tmp_path / "config.json").layers == 4


# Fields of configs as published, each with values of the real one.
PUBLISHED = {
    "SmolLM2-135M-Instruct": (
        {"model_type": "llama", "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2}
        | {"hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664, "mlp_bias": False}
        | {"intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "pad_token_id": 2}
        | {"num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1}
        | {"rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000}
        | {"tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 49152},
        {"layers": 30, "head_dim": 64, "tied": True, "rope_theta": 100_000.0},
    ),
    "Mistral-7B-v0.1": (
        {"model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02}
        | {"intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32}
        | {"num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0}
        | {"sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000, "use_cache": True},
        {"window": 4096, "windowed": frozenset(range(32)), "head_dim": 128},
    ),
    "Qwen2.5-7B-Instruct": (
        {"model_type": "qwen2", "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 3584}
        | {"intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28}
        | {"num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06}
        | {"rope_theta": 1000000.0, "sliding_window": 131072, "use_sliding_window": False, "vocab_size": 152064}
        | {"tie_word_embeddings": False, "use_cache": True, "transformers_version": "4.43.1"},
        {"window": 0, "qkv_bias": True, "out_bias": False, "kv_heads": 4},
    ),
    "Qwen3-0.6B": (
        {"model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024}
        | {"intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "vocab_size": 151936}
        | {"num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06}
        | {"rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True}
        | {"use_sliding_window": False},
        {"qk_norm": True, "head_dim": 128, "qkv_bias": False, "window": 0},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str) -> None:
    fields, expected = PUBLISHED[name]
    read = shape(fields)
    assert {key: getattr(read, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; would be right: llama, mistral, qwen2, qwen3"),
        ({"model_type": ["llama"]}, "model_type is ['llama']"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"logit_softcap": 30.0}, "logit_softcap is 30.0: unknown here"),
        ({"no_rope_layers": [1]}, "no_rope_layers is [1]: unknown here"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias is True; would be right: False"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window is -1"),
        ({"model_type": "qwen2", "attention_bias": True}, "attention_bias is True"),
        ({"model_type": "qwen2", "use_sliding_window": 1}, "use_sliding_window is 1; would be right: true or false"),
        ({"model_type": "qwen2", **WINDOWS, "layer_types": ["full_attention"]}, "layer_types is"),
        ({"model_type": "qwen2", **WINDOWS, "layer_types": ["chunked_attention"] * 4}, "layer_types is"),
        ({"model_type": "qwen2", **WINDOWS, "max_window_layers": -1}, "max_window_layers is -1"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type is 'longrope'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_parameters lacks original_max_position_emb"),
        ({"rope_parameters": YARN | {"beta_fast": -1}}, "rope_parameters.beta_fast is -1"),
        ({"rope_parameters": YARN | {"truncate": 1}}, "rope_parameters.truncate is 1"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling lacks factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor is 0"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "rope_parameters lacks high_freq_factor"),
        ({"rope_parameters": {"rope_type": "default", "beta": 2.0}}, "rope_parameters.beta is 2.0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor is 0.5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; would be right: at most 1,000"),
        ({"vocab_size": 2**31}, "vocab_size is 2147483648; would be right: at most"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"head_dim": None, "hidden_size": 33}, "hidden_size is 33"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": 1}, "rope_theta is 1; would be right: more than 1"),
        (
            {
                "rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}
                | {"original_max_position_embeddings": 32}
            },
            "rope_scaling.high_freq_factor is 4.0; would be right: more than low_freq_factor, 4",
        ),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
    ],
    ids=lambda c: c if isinstance(c, str) else "",
)
def test_a_config_that_means_other_mathematics_is_refused_by_name(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config() | changes))
    with pytest.raises(WeightsError) as error:
        families.read_shape(path)
    assert str(error.value).startswith(f"{path}: ")
    assert named in str(error.value)
    assert "would be right" in str(error.value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
KEYS = st.sampled_from(sorted(families.USED | families.WINDOW_KEYS | {"attention_bias", *families.FIXED} - INERT))


@given(st.sampled_from(sorted(FAMILIES)), st.dictionaries(KEYS, VALUES, max_size=4))
def test_any_values_give_a_shape_or_one_sentence(name: str, changes: dict[str, Any]) -> None:
    with contextlib.suppress(WeightsError):  # any other error fails the test
        read = shape(config(name) | changes)
        assert read.heads % read.kv_heads == 0
        assert max(read.windowed, default=0) < read.layers


def test_a_deeply_nested_or_enormous_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[" * 200_000)
    with pytest.raises(WeightsError, match=r"config\.json: no JSON"):
        families.read_shape(path)
    with path.open("wb") as file:
        file.truncate(families.JSON_BYTES + 1)
    with pytest.raises(WeightsError, match="would be right: at most 100,000,000"):
        families.read_shape(path)
