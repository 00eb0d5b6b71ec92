"""Every knob of the engine in one frozen dataclass; the server prints the effective values at start."""

import os
import re
from dataclasses import dataclass, field, fields
from typing import TypeVar

T = TypeVar("T")
MOST_INSTANCES = 256  # threads
MOST_CLIENT_S = 86_400  # the kernel counts it in ms of 32 bits
MOST_THREADS = 1024  # OpenMP ends the process where the machine does not give as many as it asks for
POOLINGS = ("mean", "last")  # of all tokens' hidden states, or the last token's, which saw all


def knob(default: T, text: str) -> T:
    """A dataclass field whose text becomes the flag's help: each knob is described once."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes in tokens, blocks or sequences. Names are vLLM's where the knob is the same. Raises ValueError."""

    model: str = knob("tiny", "tiny | smollm2 | a Hugging Face directory | FILE.gguf | sim:NAME")
    served_name: str = knob("", "model name on the wire; empty: the model's own")
    dtype: str = knob("float32", "float32 | bfloat16")
    device: str = knob("auto", "auto | cpu | cuda")
    cpu_kernels: str = knob(
        "auto",
        "auto: native on a CPU, triton on a GPU | torch | native: C++, flags of $REFERENCE_ENGINE_CXXFLAGS | triton",
    )
    graphs: str = knob("auto", "auto: on a GPU with triton | on | off: decodes as CUDA graphs, sampled on the device")
    ahead: bool = knob(True, "graphs: launch the next decode before this one's tokens are read")
    quantization: str = knob("none", "none | int8-weights: 8 bits, by output | int8: activations too, by row")
    kv_cache_dtype: str = knob("auto", "auto: the dtype | int8 | fp8 (triton): keys and values, by token and head")
    block_size: int = knob(16, "tokens of a KV block")
    num_blocks: int = knob(2048, "KV blocks in the pool")
    kv_memory: str = knob("", "bytes of the pool instead of its blocks: 512MiB, 4GB; the start-up line says how many")
    memory_fraction: float = knob(0.0, "pool of this share of what is free after weights and workspace; 0: not so")
    preemption: str = knob("recompute", "recompute | swap: KV of who gives way goes to host memory and back")
    swap_blocks: int = knob(0, "swap: KV blocks in host memory; when they are full, who gives way recomputes")
    swap_memory: str = knob("", "swap: bytes of host memory instead of blocks: 512MiB, 4GB")
    max_model_len: int = knob(0, "longest prompt + answer; 0: the model's own limit")
    max_num_seqs: int = knob(64, "most sequences that run at once")
    max_num_batched_tokens: int = knob(512, "token budget of a step")
    chunked_prefill: bool = knob(True, "off: a prompt is computed in one step or waits")
    long_prefill_token_threshold: int = knob(
        0, "most tokens of a step for each prompt by itself; 0: as many as the step has"
    )
    prefix_caching: bool = knob(True, "keep the KV of finished prompts for equal beginnings")
    batching: str = knob("continuous", "static | dynamic | continuous: when who waits may join who runs")
    max_wait_ms: int = knob(50, "static, dynamic: longest that a batch waits to be filled")
    instances: int = knob(1, "single passes (embeddings, infer): workers that compute a batch each at a time")
    max_batch: int = knob(32, "single passes: most inputs of a batch; their tokens: max_num_batched_tokens")
    batch_wait_ms: float = knob(0.0, "single passes: longest that a batch waits to be filled while a worker is idle")
    pooling: str = knob("mean", "single passes: mean | last: whose hidden states make a text's vector")
    lora_dir: str = knob("", "folder below which LoRA adapters may be loaded at run time; empty: none are")
    max_loras: int = knob(8, "most adapters in one step; who brings one more waits, and who comes after it")
    max_lora_rank: int = knob(16, "largest rank of an adapter")
    policy: str = knob("fcfs", "who is served first: fcfs | priority | fair (by the client that `user` names)")
    max_queue: int = knob(0, "most sequences that wait for a seat, later ones get 429; 0: no limit")
    queue_timeout: int = knob(0, "seconds in the queue until 503; 0: no limit")
    client_timeout: int = knob(
        75, "seconds for a request's head, for its body, for reading on, and until the next on a kept connection"
    )
    drain_timeout: int = knob(30, "seconds that requests in flight have to end after SIGTERM")
    threads: int = knob(0, "threads that compute; 0: one less than there are cores")
    seed: int = knob(0, "of random weights and of requests that bring none")
    time_scale: float = knob(1.0, "sim: real seconds of a model's second; 0.1: ten times as fast, times as the model's")

    def __post_init__(self) -> None:
        for name in POSITIVE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; would be right: 1 or more")
        for name in ZERO_TOO:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; would be right: 0 or more")
        if not 0 <= self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction is {self.memory_fraction}; would be right: more than 0, at most 1")
        if self.kv_memory:
            size_bytes("kv_memory", self.kv_memory)
            if self.memory_fraction:
                raise ValueError("kv_memory and memory_fraction both size the pool; would be right: one of them")
        if self.swap_memory:
            size_bytes("swap_memory", self.swap_memory)
        if (self.preemption == "swap") != bool(self.swap_blocks or self.swap_memory):
            raise ValueError("preemption swap and swap_memory or swap_blocks go together; would be right: both or none")
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling is {self.pooling!r}; would be right: {' or '.join(POOLINGS)}")
        if not 0 <= self.batch_wait_ms <= 60_000:
            raise ValueError(f"batch_wait_ms is {self.batch_wait_ms}; would be right: 0 to 60000")
        if self.long_prefill_token_threshold and not self.chunked_prefill:
            raise ValueError(
                f"long_prefill_token_threshold is {self.long_prefill_token_threshold} and chunked prefill is off; "
                "would be right: 0, or chunked prefill"
            )
        if self.client_timeout > MOST_CLIENT_S:
            raise ValueError(f"client_timeout is {self.client_timeout}; would be right: 1 to {MOST_CLIENT_S}")
        if self.instances > MOST_INSTANCES:
            raise ValueError(f"instances is {self.instances}; would be right: 1 to {MOST_INSTANCES}")
        if self.threads > MOST_THREADS:
            raise ValueError(f"threads is {self.threads}; would be right: 0 to {MOST_THREADS}")
        if not 0.001 <= self.time_scale <= 1000:
            raise ValueError(f"time_scale is {self.time_scale}; would be right: 0.001 to 1000")
        if self.time_scale != 1 and not self.model.startswith("sim:"):
            raise ValueError(f"time_scale is {self.time_scale} and the model {self.model!r}; would be right: sim:NAME")

    @property
    def pool_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def compute_threads(self) -> int:
        """Asked for, or one less than there are cores: the server and its client need one."""
        return self.threads or max(1, len(os.sched_getaffinity(0)) - 1)

    @property
    def context(self) -> int:
        """The longest prompt + answer that can be served: what the model may and the pool can hold."""
        return min(self.max_model_len or self.pool_tokens, self.pool_tokens)


UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for unit, base in (("B", 1000), ("iB", 1024))
}


def size_bytes(name: str, text: str) -> int:
    """Bytes of a text such as 512MiB or 1.5GB (powers of 1024 and of 1000). Raises ValueError, naming the knob."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text)
    unit = found and next((scale for u, scale in UNITS.items() if u.lower() == found[2].lower()), None)
    if not found or not unit or float(found[1]) * unit < 1:
        raise ValueError(f"{name} is {text!r}; would be right: a number and {', '.join(filter(None, UNITS))}")
    return int(float(found[1]) * unit)


# A seed may be anything; 0 of these says: no such limit, or not at all.
ZERO_TOO = (
    "threads", "max_model_len", "swap_blocks", "max_wait_ms", "max_queue", "queue_timeout", "drain_timeout",
    "long_prefill_token_threshold",
)  # fmt: skip
POSITIVE = [f.name for f in fields(EngineConfig) if f.type is int and f.name not in ("seed", *ZERO_TOO)]
