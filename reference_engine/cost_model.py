"""A runner that only takes time: real queueing, chunking and preemption at the speed of a machine that is not there.

A step of n tokens takes overhead + max(weights / bandwidth, 2·P·n / FLOP/s) + contexts · kv bytes / bandwidth +
attention's operations / FLOP/s: the roofline of a dense decoder (weights read once a step, two operations a parameter
and token, every context read once, 4·layers·heads·head_dim operations for each query and key that it sees).
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from reference_engine.config import EngineConfig
from reference_engine.sequence import Sequence
from reference_engine.tokenizer import ByteTokenizer


class Profile(NamedTuple):
    """A device with a model on it; the rates are those attained, not those of the data sheet."""

    overhead_s: float  # of a step, whatever is in it
    weight_bytes: float
    kv_bytes: float  # keys and values of one token, all layers
    parameters: float
    bytes_per_s: float
    flop_per_s: float
    pair_flop: float = 0.0  # attention of one query to one key, all layers


PROFILES: dict[str, Profile] = {
    # Qwen2.5-7B in bf16 (28 layers, 28 heads of 128, 4 KV heads) on an H100 SXM: 75 % of 3.35 TB/s, 50 % of 989
    # TFLOP/s. A guess.
    "7b-h100": Profile(1.5e-3, 15.2e9, 57_344, 7.6e9, 2.5e12, 495e12, 401_408),
    # 109M Llama in float32 on one AVX2 core: 12 GB/s, 70 GFLOP/s.
    "110m-cpu": Profile(4e-3, 436e6, 24_576, 109e6, 12e9, 70e9, 36_864),
    # A step takes 1 ms: known times for tests of clients.
    "fast": Profile(1e-3, 0, 0, 0, 1e12, 1e12),
    # A step takes no time: what is left is the engine's and server's own cost.
    "null": Profile(0, 0, 0, 0, 1e12, 1e12),
}


class CostModel:
    """A Runner. Its tokens are lower-case letters that depend on (seed, position) only; it never says eos."""

    vocab_size = ByteTokenizer.vocab_size
    eos_ids = ByteTokenizer.eos_ids
    max_positions = 131_072  # takes no time: any model's may be claimed

    def __init__(
        self,
        name: str,
        seed: int = 0,
        now_ns: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Raises ValueError for a name that is no `sim:` and a row of PROFILES."""
        self.name = name
        profile = PROFILES.get(name.removeprefix("sim:"))
        if profile is None:
            raise ValueError(f"model is {name!r}; would be right: {', '.join('sim:' + p for p in PROFILES)}")
        self.profile = profile
        self.seed = seed
        self._now_ns = now_ns
        self._sleep = sleep
        self._end_ns = 0  # of the step before

    def execute(self, work: list[tuple[Sequence, int]]) -> list[int | None]:
        """Sleeps until the step is due to end. Steps that follow at once start where the last was due to end.

        A profile's overhead includes the host's work between steps, so ours is not added to it.
        """
        profile, now_ns = self.profile, self._now_ns()
        follows = now_ns - self._end_ns < profile.overhead_s * 1e9
        self._end_ns = (self._end_ns if follows else now_ns) + round(step_s(profile, work) * 1e9)
        while (left_ns := self._end_ns - self._now_ns()) > 0:
            self._sleep(left_ns / 1e9)
        return [self._token(s) if s.computed + n == len(s.token_ids) else None for s, n in work]

    def _token(self, sequence: Sequence) -> int:
        seed = self.seed if sequence.params.seed is None else sequence.params.seed
        # splitmix64's finaliser: neighbours in seed or position have nothing in common.
        x = (seed * 0x9E3779B97F4A7C15 + len(sequence.token_ids) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        x = (x ^ (x >> 30)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        return ord("a") + (x ^ (x >> 31)) % 26


def step_s(profile: Profile, work: list[tuple[Sequence, int]]) -> float:
    """Seconds that a step with this work takes."""
    tokens = context = 0
    pairs = 0.0
    for sequence, n in work:
        tokens += n
        context += sequence.computed + n
        pairs += n * (sequence.computed + (n + 1) / 2)
    linear = max(profile.weight_bytes / profile.bytes_per_s, 2 * profile.parameters * tokens / profile.flop_per_s)
    reading = context * profile.kv_bytes / profile.bytes_per_s
    return profile.overhead_s + linear + reading + pairs * profile.pair_flop / profile.flop_per_s


def load(config: EngineConfig) -> tuple[CostModel, ByteTokenizer]:
    """The runner and tokenizer of a `sim:` model, as `runner.load` gives them for a real one."""
    return CostModel(config.model, config.seed), ByteTokenizer()
