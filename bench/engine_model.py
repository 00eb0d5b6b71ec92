"""A Llama of 109M random float32 weights that every engine can load: a Hugging Face folder, and the same as GGUF."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, POSITIONS = 8192, 768, 2816, 12, 12, 4, 64, 2048
THETA, EPS = 10_000.0, 1e-5
SPECIAL = ["<unk>", "<s>", "</s>"]
END = 2
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
FOLDER, FILE = "llama-109m", "llama-109m.gguf"


def parameters() -> int:
    """What a token's products go through: all but the embedding, of which it reads one row."""
    attention = HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS)
    return LAYERS * (attention + 3 * HIDDEN * FFN + 2 * HIDDEN) + HIDDEN + VOCAB * HIDDEN


def make(out: Path) -> tuple[Path, Path]:
    """The folder and the GGUF file in `out`, made if they are not there: 1 GB on disk together."""
    folder, file = out / FOLDER, out / FILE
    if not file.is_file():  # it is made last
        folder.mkdir(parents=True, exist_ok=True)
        tensors = weights()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config(), indent=1))
        tokens = vocabulary()
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer(tokens)))
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "model_max_length": POSITIONS}
        about |= {"unk_token": SPECIAL[0], "bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "pad_token": SPECIAL[2]}
        (folder / "tokenizer_config.json").write_text(json.dumps(about))
        write_gguf(file, tensors, tokens)
    return folder, file


def config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": POSITIONS, "rms_norm_eps": EPS,
        "rope_theta": THETA, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32",
        "bos_token_id": 1, "eos_token_id": END,
    }  # fmt: skip


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(columns**-0.5)

    across, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    made = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator)}
    for i in range(LAYERS):
        sizes = {
            "self_attn.q_proj": (across, HIDDEN), "self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN),
            "self_attn.o_proj": (HIDDEN, across), "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN),
            "mlp.down_proj": (HIDDEN, FFN),
        }  # fmt: skip
        made |= {f"model.layers.{i}.{name}.weight": matrix(*size) for name, size in sizes.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        made |= {f"model.layers.{i}.{name}.weight": torch.ones(HIDDEN) for name in norms}
    return made | {"model.norm.weight": torch.ones(HIDDEN), "lm_head.weight": matrix(VOCAB, HIDDEN)}


def vocabulary() -> list[str]:
    """Specials, the 256 bytes as byte-level BPE spells them, one merge (some readers want one), and fillers."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    letters = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]
    tokens = [*SPECIAL, *letters, "th"]
    return tokens + [f"~{i}~" for i in range(VOCAB - len(tokens))]


def tokenizer(tokens: list[str]) -> dict[str, object]:
    """tokenizer.json: a byte is a token, but for th."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": i, "content": text, "special": True, **flags} for i, text in enumerate(SPECIAL)],
        "pre_tokenizer": level, "decoder": level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {text: i for i, text in enumerate(tokens)}, "merges": [["t", "h"]],
        },
    }  # fmt: skip


def write_gguf(path: Path, tensors: dict[str, torch.Tensor], tokens: list[str]) -> None:
    import gguf

    kinds = [gguf.TokenType.CONTROL if i < len(SPECIAL) else gguf.TokenType.NORMAL for i in range(VOCAB)]
    partial = path.with_suffix(".partial")
    w = gguf.GGUFWriter(partial, "llama")
    w.add_name(FOLDER)
    w.add_context_length(POSITIONS)
    w.add_embedding_length(HIDDEN)
    w.add_block_count(LAYERS)
    w.add_feed_forward_length(FFN)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_layer_norm_rms_eps(EPS)
    w.add_rope_freq_base(THETA)
    w.add_rope_dimension_count(HEAD_DIM)
    w.add_vocab_size(VOCAB)
    w.add_file_type(0)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens)
    w.add_token_types(kinds)
    w.add_token_merges(["t h"])
    w.add_bos_token_id(1)
    w.add_eos_token_id(END)
    w.add_pad_token_id(END)
    w.add_add_bos_token(False)
    w.add_chat_template(TEMPLATE)
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for key, tensor in tensors.items():
        stem, values = key.removesuffix(".weight"), tensor.numpy()
        if stem in outer:
            w.add_tensor(f"{outer[stem]}.weight", values)
            continue
        _, _, number, part = stem.split(".", 3)
        if heads := {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(part):
            # llama.cpp rotates neighbours, transformers halves: rows i and i + half of a head stand together there.
            halves = values.reshape(heads, 2, HEAD_DIM // 2, HIDDEN)
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        w.add_tensor(f"blk.{number}.{names[part]}.weight", values)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    partial.replace(path)
