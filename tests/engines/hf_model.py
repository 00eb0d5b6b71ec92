"""A random Llama small enough to be no part of a test's time: a Hugging Face folder, made once under build/engines."""

import json
from pathlib import Path

from tests.engines import environments

VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, POSITIONS = 1024, 256, 704, 4, 4, 2, 2048
BYTES = 256
SPECIAL = ["<unk>", "<s>", "</s>"]
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}\n{% endfor %}"


def tiny() -> Path:
    """The folder; a byte is a token, so that any text is one."""
    folder = environments.HOME / "tiny-llama-words"
    if not (folder / "tokenizer_config.json").is_file():  # written last
        folder.mkdir(parents=True, exist_ok=True)
        _weights(folder)
        _tokenizer(folder)
    return folder


def _weights(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    # Answers are fillers alone: a lone byte is half a character, and a server shows it when the rest has come.
    with torch.no_grad():
        model.lm_head.weight[: len(SPECIAL) + BYTES] = 0
    model.save_pretrained(folder)


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [*SPECIAL, *letters]
    texts += [f"~{i}~" for i in range(VOCAB - len(texts))]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "model_max_length": POSITIONS}
    about |= dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
