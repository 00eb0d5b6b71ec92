"""A language model small enough for any server that has numpy: random weights, a token a word, greedy.

    lm = Model("weights.npz");  ids = lm.ids("low water");  for text in lm.answer(ids, 8): ...

Each token is a product with a matrix of VOCAB x WIDTH, and `step_s` of waiting, so that a stream is spread in time.
"""

import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

VOCAB, WIDTH, CONTEXT = 4096, 256, 1024
KEEPS = 0.9  # of what was read before, a token on
BREAKS = "BREAK_AT_3"  # a word of the prompt at which the answer fails after three tokens


class RefusedError(ValueError):
    """What cannot be answered."""


def make(path: Path, seed: int = 0) -> None:
    """Writes the weights."""
    draw = np.random.default_rng(seed)
    embed = draw.standard_normal((VOCAB, WIDTH), dtype=np.float32)
    np.savez(path, embed=embed, out=draw.standard_normal((VOCAB, WIDTH), dtype=np.float32) / 16)


def word(token: int) -> str:
    """A token's text: a syllable for each two hexadecimal digits, and a blank."""
    return "".join("bdfgklmnprstvwxz"[d >> 4] + "aeiouyàéîöüêâôäè"[d & 15] for d in divmod(token, 256)) + " "


class Model:
    def __init__(self, path: str, step_s: float = 0.002) -> None:
        with np.load(path) as saved:
            self.embed, self.out = saved["embed"], saved["out"]
        self.step_s = step_s

    def ids(self, text: str) -> list[int]:
        return [zlib.crc32(w.encode()) % VOCAB for w in text.split()]

    def answer(self, text: str, tokens: int) -> Iterator[str]:
        """Texts of the next `tokens` tokens. Raises RefusedError for what does not fit, RuntimeError where told to."""
        ids = self.ids(text)
        if tokens < 1 or len(ids) + tokens > CONTEXT:
            raise RefusedError(f"{len(ids)} + {tokens} tokens; 1 to {CONTEXT - len(ids)} can be asked for")
        state = np.zeros(WIDTH, np.float32)
        for token in ids:
            state = KEEPS * state + self.embed[token]
        for i in range(tokens):
            if i == 3 and BREAKS in text:
                raise RuntimeError("told to fail at token 3")
            time.sleep(self.step_s)
            token = int(np.argmax(self.out @ np.tanh(state)))
            state = KEEPS * state + self.embed[token]
            yield word(token)
