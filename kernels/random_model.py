"""A Llama of random weights as a Hugging Face directory: what the engine is measured with where none can be had."""

import json
from pathlib import Path
from typing import NamedTuple

import torch


class Shape(NamedTuple):
    """The figures of a config.json; embedding and head are one matrix."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int = 8192

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Of one layer, [out, in]."""
        width, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (width, self.hidden), "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden), "self_attn.o_proj": (self.hidden, width),
            "mlp.gate_proj": (self.ffn, self.hidden), "mlp.up_proj": (self.ffn, self.hidden),
            "mlp.down_proj": (self.hidden, self.ffn),
        }  # fmt: skip

    def weight_bytes(self, itemsize: int) -> int:
        """What a decode step reads of the weights: all of them once, the embedding as the head."""
        layer = sum(rows * columns for rows, columns in self.matrices.values()) + 2 * self.hidden
        return (self.layers * layer + self.vocab * self.hidden + self.hidden) * itemsize

    def kv_bytes(self, itemsize: int) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


LLAMA_1B = Shape(layers=16, hidden=2048, ffn=8192, heads=32, kv_heads=8, head_dim=64, vocab=128_256)  # Llama 3.2 1B
SMALL = Shape(layers=2, hidden=64, ffn=128, heads=4, kv_heads=2, head_dim=16, vocab=300, positions=2048)


def write(folder: Path, shape: Shape, dtype: torch.dtype, device: torch.device) -> Path:
    """Weights of variance 1/inputs made on the device, a tokenizer whose every token is a word, no end token."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device).manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        made = torch.empty(rows, columns, dtype=dtype, device=device)
        return made.normal_(0, columns**-0.5, generator=generator).cpu()

    ones = torch.ones(shape.hidden, dtype=dtype)
    tensors = {"model.embed_tokens.weight": matrix(shape.vocab, shape.hidden), "model.norm.weight": ones}
    for number in range(shape.layers):
        name = f"model.layers.{number}"
        tensors |= {f"{name}.{kind}.weight": matrix(*size) for kind, size in shape.matrices.items()}
        tensors |= {f"{name}.{norm}.weight": ones.clone() for norm in ("input_layernorm", "post_attention_layernorm")}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_config(shape, dtype)))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(shape.vocab)))
    return folder


def _config(shape: Shape, dtype: torch.dtype) -> dict[str, object]:
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "tie_word_embeddings": True,
        "hidden_size": shape.hidden, "intermediate_size": shape.ffn, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "vocab_size": shape.vocab, "max_position_embeddings": shape.positions, "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0, "attention_bias": False, "mlp_bias": False, "rope_scaling": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip


def _tokenizer(vocab: int) -> dict[str, object]:
    words = {"word": 0} | {f"w{i}": i for i in range(1, vocab)}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "word"},
    }  # fmt: skip
