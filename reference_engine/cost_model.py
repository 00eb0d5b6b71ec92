"""A runner that only takes time: real queueing, chunking and preemption at the speed of a machine that is not there.

A step of n tokens takes overhead + max(weights / bandwidth, 2·P·n / FLOP/s) + contexts · kv bytes / bandwidth +
attention's operations / FLOP/s: the roofline of a dense decoder (weights read once a step, two operations a parameter
and token, every context read once, 4·layers·heads·head_dim operations for each query and key that it sees). What a step
takes is so the sum of five costs times what it has to do; `fit_cost` finds the five from a real engine's steps.
"""

import json
import math
import time
from array import array
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import NamedTuple

from reference_engine.config import EngineConfig
from reference_engine.runner_api import Pass
from reference_engine.sequence import Sequence
from reference_engine.tokenizer import ByteTokenizer


class Load(NamedTuple):
    """What one step has to do."""

    tokens: int  # computed by it
    context: int  # tokens whose keys and values it reads, its own among them
    pairs: float  # of a query and a key that it sees


class Costs(NamedTuple):
    """Seconds that a step takes, by what makes it take them."""

    overhead_s: float  # of a step, whatever is in it
    weights_s: float  # to read the weights once
    token_s: float  # to compute a token, attention apart; tokens and weights overlap: the longer of the two counts
    context_s: float  # to read the keys and values of a token
    pair_s: float  # attention of one query to one key
    jitter: float = 0.0  # sigma of the lognormal factor of mean 1 that each step's seconds are multiplied by

    def step_s(self, load: Load) -> float:
        """Without jitter."""
        linear = max(self.weights_s, self.token_s * load.tokens)
        return self.overhead_s + linear + self.context_s * load.context + self.pair_s * load.pairs


class Profile(NamedTuple):
    """A device with a model on it; the rates are those attained, not those of the data sheet."""

    overhead_s: float  # of a step, whatever is in it
    weight_bytes: float
    kv_bytes: float  # keys and values of one token, all layers
    parameters: float  # that a token is multiplied with: an embedding table that is only looked up is not among them
    bytes_per_s: float
    flop_per_s: float
    pair_flop: float = 0.0  # attention of one query to one key, all layers
    jitter: float = 0.0

    @property
    def costs(self) -> Costs:
        reading_s, computing_s = 1 / self.bytes_per_s, 1 / self.flop_per_s
        return Costs(
            self.overhead_s,
            self.weight_bytes * reading_s,
            2 * self.parameters * computing_s,
            self.kv_bytes * reading_s,
            self.pair_flop * computing_s,
            self.jitter,
        )


class Shape(NamedTuple):
    """A published dense decoder in bfloat16; figures of its config.json."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    source: str

    @property
    def parameters(self) -> int:
        """In matrix products: attention's four, the gated MLP's three, the output layer. Norms and biases are not."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.vocabulary * self.hidden

    @property
    def kv_values(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def pair_flop(self) -> int:
        return 4 * self.layers * self.heads * self.head_dim


class Card(NamedTuple):
    """One accelerator by its data sheet: memory as its driver reports it, bfloat16 without sparsity."""

    memory_bytes: float
    bytes_per_s: float
    flop_per_s: float
    linked: bool  # by NVLink: what an all-reduce takes over PCIe is not even guessed here
    source: str


SHAPES: dict[str, Shape] = {
    "0.5b": Shape(24, 896, 4864, 14, 2, 64, 151_936, "Qwen/Qwen2.5-0.5B config.json"),
    "1b": Shape(16, 2048, 8192, 32, 8, 64, 128_256, "meta-llama/Llama-3.2-1B config.json"),
    "7b": Shape(28, 3584, 18_944, 28, 4, 128, 152_064, "Qwen/Qwen2.5-7B config.json"),
    "8b": Shape(32, 4096, 14_336, 32, 8, 128, 128_256, "meta-llama/Llama-3.1-8B config.json"),
    "32b": Shape(64, 5120, 27_648, 40, 8, 128, 152_064, "Qwen/Qwen2.5-32B config.json"),
    "70b": Shape(80, 8192, 28_672, 64, 8, 128, 128_256, "meta-llama/Llama-3.1-70B config.json"),
}
_NVIDIA = "https://www.nvidia.com/en-us/data-center"
CARDS: dict[str, Card] = {
    "l4": Card(23_034 * 2**20, 300e9, 121e12, False, f"{_NVIDIA}/l4/"),
    "l40s": Card(46_068 * 2**20, 864e9, 362.05e12, False, f"{_NVIDIA}/l40s/"),
    "a100": Card(81_920 * 2**20, 2039e9, 312e12, True, f"{_NVIDIA}/a100/"),
    "h100": Card(81_559 * 2**20, 3350e9, 989.5e12, True, f"{_NVIDIA}/h100/"),
    "h200": Card(143_771 * 2**20, 4800e9, 989.5e12, True, f"{_NVIDIA}/h200/"),
}
# What is attained of a data sheet's figures, and the rest of a step, are guesses: nothing of a GPU was measured here.
ATTAINED_BANDWIDTH = 0.75
ATTAINED_FLOPS = 0.5
OVERHEAD_S = 1.5e-3  # launches, sampling, the host's work between steps
ALL_REDUCE_S = 10e-6  # of a small message between cards of one node; two a layer
JITTER = 0.03
VALUE_BYTES = 2  # bfloat16
LEAST_POOL_TOKENS = 32_768  # the default pool of EngineConfig: must fit beside the weights
USABLE_MEMORY = 0.9  # of a card, as engines take it by default
CARD_COUNTS = (1, 2, 4, 8)
CATCH_UP_NS = 20_000_000  # what a step may end late without the next one ending later too


def placed(shape: Shape, card: Card, cards: int = 1, weight_bytes: float = 2, kv_bytes: float = 2) -> Profile:
    """A shape on cards of one node that share each layer; bytes are those of one weight, one key or value.

    Smaller weights and keys are read faster and computed with as before (weight-only quantisation).
    """
    return Profile(
        OVERHEAD_S + (2 * shape.layers * ALL_REDUCE_S if cards > 1 else 0.0),
        shape.parameters * weight_bytes,
        shape.kv_values * kv_bytes,
        shape.parameters,
        ATTAINED_BANDWIDTH * card.bytes_per_s * cards,
        ATTAINED_FLOPS * card.flop_per_s * cards,
        shape.pair_flop,
        JITTER,
    )


def fewest_cards(shape: Shape, card: Card) -> int | None:
    """On which its weights and the default pool have room; None: on none of CARD_COUNTS."""
    embedding = shape.vocabulary * shape.hidden
    needed = VALUE_BYTES * (shape.parameters + embedding + shape.kv_values * LEAST_POOL_TOKENS)
    counts = CARD_COUNTS if card.linked else (1,)
    return next((n for n in counts if n * card.memory_bytes * USABLE_MEMORY >= needed), None)


def _everywhere() -> dict[str, Profile]:
    """Each shape on each card, on the fewest that hold it: 8b-h100, 70b-tp4-h100."""
    found = {}
    for shape_name, shape in SHAPES.items():
        for card_name, card in CARDS.items():
            if cards := fewest_cards(shape, card):
                many = f"-tp{cards}" if cards > 1 else ""
                found[f"{shape_name}{many}-{card_name}"] = placed(shape, card, cards)
    return found


PROFILES: dict[str, Profile] = {
    # A step takes 1 ms: known times for tests of clients.
    "fast": Profile(1e-3, 0, 0, 0, 1e12, 1e12),
    # A step takes no time: what is left is the engine's and server's own cost.
    "null": Profile(0, 0, 0, 0, 1e12, 1e12),
    # 109M Llama in float32 on one AVX2 core: 12 GB/s, 70 GFLOP/s.
    "110m-cpu": Profile(4e-3, 436e6, 24_576, 109e6, 12e9, 70e9, 36_864),
    **_everywhere(),
}

# Between shape and card: what differs from bfloat16 on one card.
OPTIONS: dict[str, dict[str, float]] = {
    **{f"tp{n}": {"cards": n} for n in CARD_COUNTS},
    "w8": {"weight_bytes": 1},
    "w4": {"weight_bytes": 0.5},
    "kv8": {"kv_bytes": 1},
}


def costs_of(model: str) -> Costs:
    """Of `sim:NAME`, a row of PROFILES or SHAPE[-OPTION…]-CARD, or of `sim:FILE.json`. Raises ValueError, OSError."""
    name = model.removeprefix("sim:")
    if name.endswith(".json"):
        return read_costs(Path(name))
    if name in PROFILES:
        return PROFILES[name].costs
    shape, *options, card = name.split("-") if "-" in name else ("", "")
    if shape not in SHAPES or card not in CARDS or not set(options) <= OPTIONS.keys():
        raise ValueError(
            f"model is {model!r}; would be right: sim:fast, sim:null, sim:110m-cpu, sim:FILE.json, or sim:SHAPE-CARD "
            f"of shapes {', '.join(SHAPES)} and cards {', '.join(CARDS)}, between them {', '.join(OPTIONS)}"
        )
    changed = {key: value for option in options for key, value in OPTIONS[option].items()}
    if changed.get("cards", 1) > 1 and not CARDS[card].linked:
        linked = ", ".join(name for name, other in CARDS.items() if other.linked)
        raise ValueError(f"model is {model!r}, and {card} has no NVLink; would be right: one card, or one of {linked}")
    return placed(
        SHAPES[shape],
        CARDS[card],
        int(changed.get("cards", 1)),
        changed.get("weight_bytes", VALUE_BYTES),
        changed.get("kv_bytes", VALUE_BYTES),
    ).costs


def read_costs(path: Path) -> Costs:
    """A file of Costs' fields; `about` in it is for its reader. Raises ValueError, OSError."""
    try:
        said = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON: {error}") from None
    if not isinstance(said, dict):
        raise ValueError(f"{path}: found a {type(said).__name__}; would be right: an object of {_wanted()}")
    said.pop("about", None)
    least = set(Costs._fields) - set(Costs._field_defaults)
    if set(said) - set(Costs._fields) or least - set(said):
        raise ValueError(f"{path}: has {', '.join(sorted(said)) or 'no key'}; would be right: {_wanted()}")
    for key, value in said.items():
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ValueError(f"{path}: {key} is {value!r}; would be right: a number, 0 or more")
    return Costs(**{key: float(value) for key, value in said.items()})


def _wanted() -> str:
    return ", ".join(Costs._fields) + " (jitter may be missing)"


def load_of(work: list[tuple[Sequence, int]]) -> Load:
    """What a step with this work has to do, asked before it is committed."""
    tokens = context = 0
    pairs = 0.0
    for sequence, n in work:
        tokens += n
        context += sequence.computed + n
        pairs += n * (sequence.computed + (n + 1) / 2)
    return Load(tokens, context, pairs)


def pass_load(inputs: list[list[int]]) -> Load:
    """What a single pass over these texts has to do: the keys and values that it makes are never read back."""
    return Load(sum(map(len, inputs)), 0, sum(len(ids) * (len(ids) + 1) / 2 for ids in inputs))


def step_line(load: Load, seconds: float) -> bytes:
    """A line of a log of steps, for `fit_cost`."""
    return json.dumps(load._asdict() | {"seconds": round(seconds, 9)}).encode() + b"\n"


def step_s(profile: Profile, work: list[tuple[Sequence, int]]) -> float:
    """Seconds that a step with this work takes, without jitter."""
    return profile.costs.step_s(load_of(work))


def clock(time_scale: float) -> tuple[Callable[[], int], Callable[[float], None]]:
    """(now_ns, sleep) in the model's time, of which `time_scale` real seconds are one: 0.1 is ten times as fast.

    An engine that reads this clock has every stamp, limit and report in the model's seconds. What the client, the
    sockets and the scheduler really take is then worth 1 / time_scale as much of them.
    """
    if time_scale == 1:
        return time.monotonic_ns, time.sleep
    ppb = round(time_scale * 1e9)  # integers: a float would round the nanoseconds of a machine that is up for long
    return lambda: time.monotonic_ns() * 1_000_000_000 // ppb, lambda seconds: time.sleep(seconds * time_scale)


class CostModel:
    """A Runner. Its tokens are lower-case letters that depend on (seed, position) only; it never says eos."""

    vocab_size = ByteTokenizer.vocab_size
    eos_ids = ByteTokenizer.eos_ids
    embedding_size = 64
    max_positions = 131_072  # takes no time: any model's may be claimed

    def __init__(
        self,
        name: str,
        seed: int = 0,
        now_ns: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Raises ValueError for a name that is no `sim:` and known to `costs_of`; OSError."""
        self.costs = costs_of(name)
        self.name = f"sim:{Path(name.removeprefix('sim:')).stem}" if name.endswith(".json") else name
        self.seed = seed
        self._random = Random(seed)
        self._now_ns = now_ns
        self._sleep = sleep
        # Of the step before: when it was due to end, when it did, whom it served.
        self._end_ns = self._woke_ns = 0
        self._served: set[int] = set()

    def execute(self, work: list[tuple[Sequence, int]]) -> list[int | None]:
        """Sleeps until the step is due to end. A step that follows at once starts where the last was due to end.

        So neither a late wake-up adds up nor the engine's own work, which a profile's overhead includes; a machine that
        lost more than CATCH_UP_NS goes on from there. At once: it serves on whom the last one served.
        """
        now_ns, served = self._now_ns(), {sequence.id for sequence, _ in work}
        at_once = not served.isdisjoint(self._served) and now_ns - self._woke_ns < self.costs.overhead_s * 1e9
        begun_ns = max(self._end_ns, self._woke_ns - CATCH_UP_NS) if at_once else now_ns
        self._end_ns = begun_ns + round(self._step_s(work) * 1e9)
        while (left_ns := self._end_ns - self._now_ns()) > 0:
            self._sleep(left_ns / 1e9)
        self._woke_ns, self._served = self._now_ns(), served
        return [self._token(s) if s.computed + n == len(s.token_ids) else None for s, n in work]

    def single_pass(self, pooling: str) -> Pass:
        """Takes as long as a step over all the texts that reads no KV pool; each pass has a card of its own.

        A vector depends on its text alone, and means nothing.
        """
        random, sigma = Random(self.seed), self.costs.jitter

        def compute(inputs: list[list[int]]) -> list["array[float]"]:
            begun_ns, seconds = self._now_ns(), self.costs.step_s(pass_load(inputs))
            seconds *= random.lognormvariate(-sigma * sigma / 2, sigma) if sigma else 1
            while (left_ns := begun_ns + round(seconds * 1e9) - self._now_ns()) > 0:
                self._sleep(left_ns / 1e9)
            return [_vector(ids) for ids in inputs]

        return compute

    def _step_s(self, work: list[tuple[Sequence, int]]) -> float:
        seconds, sigma = self.costs.step_s(load_of(work)), self.costs.jitter
        return seconds * self._random.lognormvariate(-sigma * sigma / 2, sigma) if sigma else seconds

    def _token(self, sequence: Sequence) -> int:
        seed = self.seed if sequence.params.seed is None else sequence.params.seed
        # splitmix64's finaliser: neighbours in seed or position have nothing in common.
        x = (seed * 0x9E3779B97F4A7C15 + len(sequence.token_ids) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        x = (x ^ (x >> 30)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        return ord("a") + (x ^ (x >> 31)) % 26


def _vector(ids: list[int]) -> "array[float]":
    """Of length 1: the digest's bytes, none of which counts as 0."""
    values = [byte - 127.5 for byte in blake2b(array("q", ids).tobytes()).digest()]
    length = math.hypot(*values)
    return array("f", (value / length for value in values))


def load(config: EngineConfig) -> tuple[CostModel, ByteTokenizer]:
    """The runner and tokenizer of a `sim:` model, as `runner.load` gives them for a real one."""
    now_ns, sleep = clock(config.time_scale)
    return CostModel(config.model, config.seed, now_ns, sleep), ByteTokenizer()
