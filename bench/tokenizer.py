"""A tokenizer that every tool can load and that costs next to nothing."""

import json
from pathlib import Path


def write(folder: Path) -> Path:
    """A Hugging Face folder whose words are tokens, so that every tool makes prompts of the length asked, cheaply."""
    words = {"word": 0, "<|end|>": 1} | {f"w{i}": i for i in range(2, 2000)}
    end: dict[str, object] = {"id": 1, "content": "<|end|>", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    model: dict[str, object] = {"type": "WordLevel", "vocab": words, "unk_token": "word"}
    whole: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
    }
    whole |= {"pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None, "model": model}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "word", "model_max_length": 100000}
    about |= dict.fromkeys(("eos_token", "bos_token", "pad_token"), "<|end|>")
    about["chat_template"] = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    folder.mkdir(parents=True, exist_ok=True)
    files = {"tokenizer.json": whole, "tokenizer_config.json": about, "config.json": {"model_type": "llama"}}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder
