"""KV bytes and weights of known models by hand; whatever a config says that is not understood is refused by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench import accelerators, kv_cache
from llm_bench.errors import BenchError
from llm_bench.kv_cache import (
    GIB,
    KV_BYTES,
    WEIGHT_BYTES,
    Memory,
    by_context,
    bytes_per_token,
    context_of,
    copies,
    fits,
    parameters_of,
    sequence_bytes,
    shape_of,
    size,
)

LLAMA3_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    "max_position_embeddings": 8192, "attention_bias": False, "attention_dropout": 0.0, "rope_scaling": None,
}  # fmt: skip
LLAMA2_7B = LLAMA3_8B | {"intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 32000}
QWEN25_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    "sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "hidden_size": 7168, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "num_nextn_predict_layers": 1, "first_k_dense_replace": 3,
}  # fmt: skip
MISTRAL_7B = LLAMA3_8B | {"model_type": "mistral", "vocab_size": 32000, "sliding_window": 4096}
GEMMA2_9B = {
    "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000, "sliding_window": 4096,
}  # fmt: skip
GEMMA3_1B = GEMMA2_9B | {
    "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
    "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 262144, "sliding_window": 512,
    "sliding_window_pattern": 6,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "num_hidden_layers": 36, "hidden_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18, "num_local_experts": 128, "attention_bias": True,
}  # fmt: skip
QWEN3_8B = LLAMA3_8B | {
    "model_type": "qwen3", "intermediate_size": 12288, "num_hidden_layers": 36, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip


@pytest.mark.parametrize(("config", "expected", "attention"), [
    (LLAMA3_8B, 131_072, "GQA"),  # 2 x 32 layers x 8 heads x 128 x 2 bytes
    (LLAMA2_7B, 524_288, "MHA"),  # 2 x 32 x 32 x 128 x 2
    (QWEN25_7B, 57_344, "GQA"),  # 2 x 28 x 4 x 128 x 2
    (DEEPSEEK_V3, 70_272, "MLA"),  # 61 x (512 + 64) x 2
    (GEMMA3_1B, 26_624, "MQA"),  # 2 x 26 x 1 x 256 x 2
    (GPT_OSS, 73_728, "GQA"),  # 2 x 36 x 8 x 64 x 2
])  # fmt: skip
def test_bytes_of_a_token_in_bf16(config, expected, attention):
    shape = shape_of(config)
    assert bytes_per_token(shape, KV_BYTES["bf16"]) == expected
    assert bytes_per_token(shape, KV_BYTES["fp8"]) == bytes_per_token(shape, KV_BYTES["int8"]) == expected / 2
    assert shape.attention == attention
    assert attention in shape.text


def test_sliding_layers_keep_the_window_or_the_context_whichever_is_shorter():
    one = 2 * 8 * 256 * 2  # bytes of a token in a layer of Gemma-2: 8,192
    shape = shape_of(GEMMA2_9B)
    assert [(x.number, x.window) for x in shape.layers] == [(21, 4096), (21, None)]
    assert sequence_bytes(shape, 1000, 2, 1) == 42 * 1000 * one
    assert sequence_bytes(shape, 8000, 2, 1) == (21 * 4096 + 21 * 8000) * one
    assert sequence_bytes(shape, 8000, 2, 16) == (21 * 4096 + 21 * 8000) * one  # 500 blocks, whole
    assert sequence_bytes(shape, 1, 2, 16) == 42 * 16 * one


@pytest.mark.parametrize(("config", "windows"), [
    (MISTRAL_7B, [4096] * 32),
    (MISTRAL_7B | {"sliding_window": None}, [None] * 32),
    (QWEN25_7B, [None] * 28),  # its window is there and not in use
    ({k: v for k, v in QWEN25_7B.items() if k != "use_sliding_window"}, [None] * 28),
    (QWEN25_7B | {"use_sliding_window": True, "max_window_layers": 21, "sliding_window": 4096},
     [None] * 21 + [4096] * 7),
    (GEMMA3_1B | {"sliding_window_pattern": None, "_sliding_window_pattern": 2}, [512, None] * 13),
    (GEMMA3_1B, ([512] * 5 + [None]) * 4 + [512] * 2),
    (GPT_OSS, [128, None] * 18),
    (GEMMA2_9B | {"sliding_window_size": 4096}, [4096, None] * 21),  # as published, twice the same
])  # fmt: skip
def test_which_layers_slide_is_each_familys_own_rule(config, windows):
    counted = {w: windows.count(w) for w in set(windows)}
    assert {x.window: x.number for x in shape_of(config).layers} == counted


def test_head_size_is_said_or_derived_and_never_both():
    assert shape_of(LLAMA3_8B | {"head_dim": 64}).values_per_token == 2 * 32 * 8 * 64
    assert shape_of({k: v for k, v in LLAMA3_8B.items() if k != "num_key_value_heads"}).attention == "MHA"
    with pytest.raises(BenchError, match="no head_dim"):
        shape_of({k: v for k, v in GEMMA2_9B.items() if k != "head_dim"})
    with pytest.raises(BenchError, match="no multiple"):
        shape_of(LLAMA3_8B | {"hidden_size": 4097})


@pytest.mark.parametrize(("field", "value"), [
    ("index_head_dim", 128), ("is_encoder_decoder", True), ("hybrid_override_pattern", "M*M*"),
    ("full_attention_interval", 4), ("num_kv_shared_layers", 20), ("mamba_d_state", 128),
    ("attention_chunk_size", 8192), ("swa_num_key_value_heads", 4), ("num_global_key_value_heads", 2),
    ("linear_key_head_dim", 128), ("ssm_cfg", {"a": 1}), ("attn_layer_period", 8), ("block_configs", [1]),
    ("v_head_dim", 128), ("some_new_kv_trick", 3), ("window_size", 256), ("attention_k_eq_v", True),
    ("multi_query_group_num", 2), ("sliding_window_size", 4096),
])  # fmt: skip
def test_what_may_change_the_cache_and_is_not_understood_is_refused_by_name(field, value):
    with pytest.raises(BenchError, match=field):
        shape_of(LLAMA3_8B | {field: value})
    assert shape_of(LLAMA3_8B | {field: None}).heads == 8  # said not to be in force


@pytest.mark.parametrize(("config", "said"), [
    (LLAMA3_8B | {"layer_types": ["linear_attention"] * 32, "sliding_window": 4}, "linear_attention"),
    (LLAMA3_8B | {"layer_types": ["linear_attention"] * 32}, "linear_attention"),
    (GPT_OSS | {"layer_types": ["full_attention"]}, "expected a list of 36"),
    (LLAMA3_8B | {"sliding_window": 4096}, "which layers slide is not known"),
    (GEMMA3_1B | {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern"),
    (DEEPSEEK_V3 | {"sliding_window": 512}, "beside kv_lora_rank"),
    (LLAMA3_8B | {"num_key_value_heads": 5}, "does not divide"),
    (LLAMA3_8B | {"num_key_value_heads": "8"}, "expected a whole number"),
    (LLAMA3_8B | {"num_hidden_layers": True}, "expected a whole number"),
    ({"model_type": "llama"}, "no num_hidden_layers"),
    ({k: v for k, v in QWEN25_7B.items() if k != "num_key_value_heads"}, "no num_key_value_heads"),
    (LLAMA3_8B | {"new_decoder_architecture": True}, "no num_kv_heads"),
])  # fmt: skip
def test_a_config_that_does_not_say_enough_is_refused(config, said):
    with pytest.raises(BenchError, match=said):
        shape_of(config)


def test_multi_query_models_and_text_configs_are_read():
    falcon = {"model_type": "falcon", "n_layer": 32, "n_head": 71, "hidden_size": 4544, "multi_query": True}
    assert bytes_per_token(shape_of(falcon), 2) == 2 * 32 * 1 * 64 * 2
    assert (
        shape_of(
            falcon | {"new_decoder_architecture": True, "n_head": 64, "hidden_size": 4096, "num_kv_heads": 8}
        ).heads
        == 8
    )
    assert shape_of({"model_type": "any", "text_config": LLAMA3_8B}).heads == 8
    assert context_of({"text_config": LLAMA3_8B}) == 8192
    assert context_of({}) is None


def test_tensor_parallelism_splits_heads_and_no_latent():
    llama, latent = shape_of(LLAMA3_8B), shape_of(DEEPSEEK_V3)
    assert [copies(llama, n) for n in (1, 4, 8, 16)] == [1, 1, 1, 2]
    assert [copies(latent, n) for n in (1, 8)] == [1, 8]
    assert copies(shape_of(QWEN25_7B), 3) == 3 * 2 / 4  # two heads on each of three


@pytest.mark.parametrize(("config", "expected"), [
    (LLAMA3_8B, 8_030_261_248),
    (LLAMA2_7B, 6_738_415_616),
    (QWEN25_7B, 7_615_616_512),
    (MISTRAL_7B, 7_241_732_096),
    (MISTRAL_7B | {"model_type": "mixtral", "num_local_experts": 8, "sliding_window": None}, 46_702_792_704),
    (GEMMA2_9B, 9_241_705_984),
    (GEMMA3_1B, 999_885_952),
    (QWEN3_8B, 8_190_735_360),
])  # fmt: skip
def test_weights_are_those_of_the_published_checkpoints(config, expected):
    assert parameters_of(config) == expected


def test_weights_of_other_families_are_asked_for():
    with pytest.raises(BenchError, match="--parameters"):
        parameters_of(DEEPSEEK_V3)
    with pytest.raises(BenchError, match="attention_bias"):
        parameters_of(LLAMA3_8B | {"attention_bias": True})


def test_sequences_that_fit_by_hand():
    # 80 GiB x 0.9 = 72; - 16 of weights - 4 of workspace = 52 GiB; a sequence of 1,024 tokens of Llama-3-8B is 0.125.
    memory = Memory(80 * GIB, 0.9, 16 * GIB, 4 * GIB)
    assert memory.for_cache == pytest.approx(52 * GIB)
    held = sequence_bytes(shape_of(LLAMA3_8B), 1024, 2, 16)
    assert held == 0.125 * GIB
    assert fits(memory, held) == pytest.approx(416)
    assert fits(Memory(10 * GIB, 0.9, 16 * GIB, 0), held) == 0
    table = by_context(memory, lambda n: sequence_bytes(shape_of(LLAMA3_8B), n, 2, 16), (1024, 8192))
    assert table == [(1024, 0.125 * GIB, 416), (8192, GIB, 52)]


def test_both_units_are_shown():
    assert size(80 * GIB) == "80 GiB (85.9 GB)"


@given(
    st.integers(1, 200_000),
    st.integers(1, 200_000),
    st.integers(1, 512),
    st.sampled_from([GEMMA2_9B, GPT_OSS, LLAMA3_8B]),
)
def test_a_longer_sequence_never_holds_less_and_blocks_never_save_memory(a, b, block, config):
    shape = shape_of(config)
    short, long = sorted((a, b))
    assert sequence_bytes(shape, short, 2, block) <= sequence_bytes(shape, long, 2, block)
    assert (
        sequence_bytes(shape, a, 2, 1) <= sequence_bytes(shape, a, 2, block) <= bytes_per_token(shape, 2) * (a + block)
    )


def test_precisions_are_bytes():
    assert WEIGHT_BYTES == {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "int4": 0.5}


# ---- the table of accelerators


@pytest.mark.parametrize("row", accelerators.ACCELERATORS.values(), ids=lambda row: row.name)
def test_every_accelerator_has_memory_bandwidth_dense_arithmetic_and_a_source(row):
    assert 20 * GIB < row.memory_bytes < 300 * GIB
    assert 1e11 < row.bandwidth < 1e13
    assert row.flops["bf16"] == row.flops["fp16"]
    assert row.source.startswith("https://")
    for eight in ("fp8", "int8"):
        if eight in row.flops:
            assert row.flops[eight] == pytest.approx(2 * row.flops["bf16"], rel=0.02)


def test_an_accelerator_is_found_in_any_case_and_a_strange_one_is_refused():
    assert accelerators.find("h100").memory_bytes == 81_559 * 2**20
    with pytest.raises(BenchError, match="nearest: H100"):
        accelerators.find("H1000")
    with pytest.raises(BenchError, match="--memory-gib"):
        accelerators.find("abacus")


@pytest.mark.parametrize(("config", "stored"), [
    ({}, None),
    ({"torch_dtype": "float32"}, "fp32"),
    ({"dtype": "bfloat16"}, "bf16"),
    ({"text_config": {"torch_dtype": "float16", "num_hidden_layers": 2}}, "fp16"),
    ({"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}, "fp8"),  # DeepSeek-V3
    ({"torch_dtype": "float16", "quantization_config": {"quant_method": "awq", "bits": 4}}, "int4"),
    ({"torch_dtype": "float16", "quantization_config": {"quant_method": "gptq", "bits": 8}}, "int8"),
    ({"torch_dtype": "float16", "quantization_config": {"quant_method": "gptq", "bits": 3}}, None),
    ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}}, "int4"),
    ({"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "compressed-tensors"}}, None),
    ({"torch_dtype": ["bfloat16"], "quantization_config": "none"}, None),
    ({"quantization_config": {"bits": [4], "quant_method": {}}}, None),
])  # fmt: skip
def test_what_a_config_says_that_its_weights_are_kept_in(config, stored):
    assert kv_cache.stored_in(config) == stored
