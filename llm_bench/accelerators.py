"""What an accelerator has: memory as its driver reports it, bandwidth and dense arithmetic of its data sheet."""

import difflib
from typing import NamedTuple

from llm_bench.errors import BenchError

MIB = 2**20


class Accelerator(NamedTuple):
    """One device. Data sheets print arithmetic "with sparsity", which no ordinary model has: here is half of that."""

    name: str
    memory_bytes: int
    bandwidth: float  # bytes/s
    flops: dict[str, float]  # dense operations/s by precision; a missing one is not in the hardware, or not known
    source: str


def _row(name: str, memory_mib: float, gb_per_s: float, tera: dict[str, float], source: str) -> Accelerator:
    flops = {precision: value * 1e12 for precision, value in tera.items()}
    return Accelerator(name, round(memory_mib * MIB), gb_per_s * 1e9, flops, source)


_NVIDIA, _AMD = "https://www.nvidia.com/en-us/data-center", "https://www.amd.com/en/products/accelerators/instinct"
# Memory: a data sheet's "80 GB" is neither 80 GB nor 80 GiB to a server, so NVIDIA's rows hold the total that
# nvidia-smi prints on the device in MiB, AMD's the VRAM in GiB of ROCm's own table
# (https://rocm.docs.amd.com/en/latest/reference/gpu-specs.html).
# Bandwidth and arithmetic: the maker's data sheet or product page, named in each row; where it says "with sparsity",
# half of it.
_ROWS = [
    # A100 80 GB SXM4: 2,039 GB/s; BF16 and FP16 312 dense, INT8 624 dense. nvidia-smi: 81920 MiB.
    _row("A100", 81_920, 2039, {"bf16": 312, "fp16": 312, "int8": 624}, f"{_NVIDIA}/a100/"),
    # H100 SXM5: 3.35 TB/s; BF16 and FP16 1,979, FP8 and INT8 3,958, all with sparsity. nvidia-smi: 81559 MiB.
    _row("H100", 81_559, 3350, {"bf16": 989.5, "fp16": 989.5, "fp8": 1979, "int8": 1979}, f"{_NVIDIA}/h100/"),
    # H200 SXM5: 4.8 TB/s; arithmetic as of the H100. nvidia-smi: 143771 MiB.
    _row("H200", 143_771, 4800, {"bf16": 989.5, "fp16": 989.5, "fp8": 1979, "int8": 1979}, f"{_NVIDIA}/h200/"),
    # B200 in HGX and DGX, 1,000 W (Blackwell architecture technical brief, table 3, per GPU, dense): BF16 2,250,
    # FP8 and INT8 4,500, FP4 9,000; 8 TB/s. nvidia-smi: 183359 MiB.
    _row(
        "B200",
        183_359,
        8000,
        {"bf16": 2250, "fp16": 2250, "fp8": 4500, "int8": 4500, "fp4": 9000},
        "https://resources.nvidia.com/en-us-blackwell-architecture/blackwell-architecture-technical-brief",
    ),
    # L40S: 864 GB/s; BF16 and FP16 362.05 dense, FP8 733 dense. nvidia-smi with ECC: 46068 MiB.
    _row("L40S", 46_068, 864, {"bf16": 362.05, "fp16": 362.05, "fp8": 733}, f"{_NVIDIA}/l40s/"),
    # L4: 300 GB/s; BF16 and FP16 242, FP8 and INT8 485, all with sparsity. nvidia-smi with ECC: 23034 MiB.
    _row("L4", 23_034, 300, {"bf16": 121, "fp16": 121, "fp8": 242.5, "int8": 242.5}, f"{_NVIDIA}/l4/"),
    # MI300X: 5.3 TB/s; BF16 and FP16 1,307.4, FP8 and INT8 2,614.9, dense. 192 GiB.
    _row(
        "MI300X",
        192 * 1024,
        5300,
        {"bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9, "int8": 2614.9},
        f"{_AMD}/mi300/mi300x.html",
    ),
    # MI325X: 6 TB/s; arithmetic as of the MI300X. 256 GiB.
    _row(
        "MI325X",
        256 * 1024,
        6000,
        {"bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9, "int8": 2614.9},
        f"{_AMD}/mi300/mi325x.html",
    ),
]
ACCELERATORS: dict[str, Accelerator] = {row.name: row for row in _ROWS}


def find(name: str) -> Accelerator:
    """By name, in any case. Raises BenchError with the names there are."""
    found = ACCELERATORS.get(name.strip().upper())
    if found is None:
        near = difflib.get_close_matches(name.upper(), ACCELERATORS, 1, 0.5)
        hint = f"nearest: {near[0]}; " if near else ""
        raise BenchError(
            f"--accelerator {name!r} is not in the table; {hint}known: {', '.join(ACCELERATORS)}. "
            "For another give --memory-gib, what its driver reports"
        )
    return found
