"""How many KV blocks there are: as many as given, as fit in so many bytes, or in a share of what is free.

Free is counted with the weights loaded, and what a step of the full token budget takes is taken off it. What is said
of GPUs here follows torch's documentation and is untried on one.
"""

import gc
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from reference_engine.config import EngineConfig, size_bytes
from reference_engine.runner import ModelRunner
from reference_engine.runner_api import Runner
from reference_engine.scheduler import Copies
from reference_engine.sequence import SamplingParams, Sequence

if TYPE_CHECKING:  # takes seconds to import
    import torch

    from reference_engine import attention


class Memory(NamedTuple):
    """Bytes, for the start-up line."""

    weights_bytes: int
    workspace_bytes: int | None  # of the largest step; None: not measured, only memory_fraction needs it
    block_bytes: int
    kv_bytes: int
    free_bytes: int  # beside all of these
    swap_bytes: int = 0  # of the host's memory


def sized_later(config: EngineConfig) -> bool:
    """Whether the pool's size shows only once the model is loaded."""
    return bool(config.kv_memory or config.memory_fraction)


def preliminary(config: EngineConfig) -> EngineConfig:
    """What to load the model with: a pool just large enough to measure by, where its size is to be found."""
    if not sized_later(config):
        return config
    sequences, tokens = _largest_step(config)
    return replace(config, num_blocks=sequences * -(-tokens // config.block_size))


def settle(config: EngineConfig, runner: ModelRunner) -> tuple[EngineConfig, Memory]:
    """The configuration with the pool's size found and the pool made; what memory went where. Raises ValueError."""
    block_bytes = runner.kv_bytes // runner.model.cache.pages.num_blocks
    free, workspace = _free_beside(config, runner)
    if sized_later(config):
        config = replace(config, num_blocks=blocks_in(config, block_bytes, free))
        resize(runner, config)
    return config, Memory(runner.weights_bytes, workspace, block_bytes, runner.kv_bytes, free - runner.kv_bytes)


def _free_beside(config: EngineConfig, runner: ModelRunner) -> tuple[int, int | None]:
    """(bytes that a pool may have, those of the pool that is there among them; bytes that the largest step takes).

    The second is taken off the first already; None where it was not measured, see Memory.
    """
    on_cpu, pool = runner.device.type == "cpu", runner.kv_bytes
    if not config.memory_fraction:  # a CPU's kernel gives a pool's pages only when written: they are free still
        return free_bytes(runner) + (0 if on_cpu else pool), None
    if on_cpu:
        _fill(runner.model.cache)
    before = free_bytes(runner)  # used on a CPU alone
    workspace = workspace_bytes(config, runner)
    # What a step took, a CPU's kernels (native.Scratch) and allocator keep for the next one: read after it, free lacks
    # that already, and it would count twice. A GPU gives it back, but for what the driver loads late.
    return (before if on_cpu else free_bytes(runner)) + pool - workspace, workspace


def _fill(cache: "attention.Cache") -> None:
    """Have the kernel give all pages of a pool now, so that none is taken for a part of what a step takes."""
    for part in (cache.pool, cache.scales):
        if part is not None:
            part.zero_()


def blocks_in(config: EngineConfig, block_bytes: int, free: int) -> int:
    """Raises ValueError for less than a block, or for more than is free."""
    if config.kv_memory:
        wanted = size_bytes("kv_memory", config.kv_memory)
        if wanted > free:
            raise ValueError(f"kv_memory is {config.kv_memory}; would be right: at most the {_mib(free)} that are free")
    else:
        wanted = int(config.memory_fraction * free)
    if wanted < block_bytes:
        given = f"kv_memory {config.kv_memory}" if config.kv_memory else f"memory_fraction {config.memory_fraction}"
        raise ValueError(
            f"{given} is {wanted} bytes; would be right: at least a block of {config.block_size} tokens, {block_bytes}"
        )
    return wanted // block_bytes


def resize(runner: ModelRunner, config: EngineConfig) -> None:
    """Another, empty pool in place of the runner's."""
    from reference_engine import attention, model

    shape = runner.model.shape
    positions = min(config.max_model_len or shape.max_positions, config.pool_tokens)
    window = shape.window if shape.windowed and shape.window < positions else 0
    pages = runner.model.cache.pages._replace(num_blocks=config.num_blocks, window=window)
    rotation, like = model.rotation(shape, positions), runner.model.embedding
    runner.model = replace(
        runner.model, cache=attention.make_cache(shape, pages, like, rotation, config.kv_cache_dtype)
    )
    runner.kv_bytes = runner.model.cache.bytes()


def workspace_bytes(config: EngineConfig, runner: ModelRunner) -> int:
    """What the largest step takes beside weights and pool, measured by taking one: all seats, the whole budget.

    On a CPU from the process's own peak (Linux), elsewhere 0; what the kernel takes back from the process meanwhile is
    missing from it.
    """
    import torch

    sequences, tokens = _largest_step(config)
    tokens = min(tokens, len(runner.model.cache.cos))  # no sequence is longer, however large the budget
    blocks = -(-tokens // config.block_size)
    work = [
        (Sequence(-1, [0] * tokens, tokens, SamplingParams(1), 0, blocks=list(range(i * blocks, (i + 1) * blocks))),
         tokens)
        for i in range(sequences)
    ]  # fmt: skip
    if runner.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        runner.execute(work)
        return torch.cuda.max_memory_allocated() - before
    gc.collect()  # what is collected during the step would be taken off what the step takes
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew (man proc_pid_clear_refs)
        before = _of_process("VmRSS")
        runner.execute(work)
        return max(0, _of_process("VmHWM") - before)
    except OSError:
        return 0


class HostPool:
    """Where blocks wait that were swapped out: as many slots of the cache's layout in host memory.

    Copies are waited for: a step that follows finds every block as it should be. On a GPU the memory is pinned.
    """

    def __init__(self, runner: ModelRunner, slots: int) -> None:
        cache = runner.model.cache
        pinned = runner.device.type == "cuda"
        self.pool = _host_like(cache.pool, slots, pinned)
        self.scales = None if cache.scales is None else _host_like(cache.scales, slots, pinned)

    def copy(self, runner: Runner, copies: Copies) -> None:
        """`out` before `into`: who is swapped out and comes back in one step finds its blocks."""
        assert isinstance(runner, ModelRunner)
        cache = runner.model.cache
        for device, host in ((cache.pool, self.pool), (cache.scales, self.scales)):
            if device is None or host is None:
                continue
            for pairs, source, target in ((copies.out, device, host), (copies.into, host, device)):
                for block, slot in pairs:
                    (a, b) = (block, slot) if source is device else (slot, block)
                    target[:, :, b].copy_(source[:, :, a])


def with_swap(config: EngineConfig, block_bytes: int) -> EngineConfig:
    """With the blocks that swap_memory holds. Raises ValueError if that is none."""
    if not config.swap_memory:
        return config
    slots = size_bytes("swap_memory", config.swap_memory) // block_bytes
    if not slots:
        raise ValueError(f"swap_memory is {config.swap_memory}; would be right: at least a block, {block_bytes} bytes")
    return replace(config, swap_blocks=slots)


def _host_like(device: "torch.Tensor", slots: int, pinned: bool) -> "torch.Tensor":
    """[layers, 2, slots, ...] in host memory."""
    import torch

    return torch.zeros(*device.shape[:2], slots, *device.shape[3:], dtype=device.dtype, pin_memory=pinned)


def free_bytes(runner: ModelRunner) -> int:
    """Of the device; on a CPU what Linux says is available, or what the process's control group has left."""
    if runner.device.type == "cuda":
        import torch

        torch.cuda.empty_cache()  # what torch keeps for itself is free
        return int(torch.cuda.mem_get_info(runner.device)[0])
    return min(_available(), _group_left())


def _largest_step(config: EngineConfig) -> tuple[int, int]:
    """(sequences, tokens of each)."""
    budget = config.max_num_batched_tokens
    sequences = min(config.max_num_seqs, budget)
    return sequences, budget // sequences


def _available() -> int:
    """Raises ValueError where there is no /proc."""
    try:
        return _kib(Path("/proc/meminfo"), "MemAvailable")
    except OSError as error:
        raise ValueError("this system does not say how much memory is free; would be right: num_blocks") from error


def _group_left(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Of a memory limit set on this process by a container (cgroup v2); what its files can be taken back is free."""
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return limit - used + int(kept.get("inactive_file", 0))
    except (OSError, ValueError):  # none, or "max"
        return 1 << 62


def _of_process(name: str) -> int:
    return _kib(Path("/proc/self/status"), name)


def _kib(path: Path, name: str) -> int:
    return int(path.read_text().partition(f"{name}:")[2].split()[0]) * 1024


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
