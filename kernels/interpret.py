"""Whether Triton compiles kernels for a GPU or interprets them on the CPU, and what the interpreter cannot compute.

The interpreter keeps bfloat16 and fp8 as bare integers: products, sums and comparisons of them are silently wrong,
while loading one and widening it to float32 is exact. So arithmetic is float32 there wherever a GPU would compute in
bfloat16, and storing a float32 as bfloat16 cuts off bits instead of rounding. `@triton.autotune` wants a GPU's driver:
configurations come from tables in the kernels' own files.
"""

from typing import Any

import torch


def interpreted() -> bool:
    """True under TRITON_INTERPRET=1. Triton looks when a kernel's module is imported, so set it before that."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def arithmetic(dtype: torch.dtype) -> Any:
    """Triton's type for products of values of `dtype`: its own on a GPU, float32 where the interpreter would err."""
    import triton.language as tl

    if dtype == torch.float32 or (dtype == torch.bfloat16 and interpreted()):
        return tl.float32
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


def runs_here(tensor: torch.Tensor) -> None:
    """Raises ValueError if no kernel can touch the tensor: it is on the CPU and kernels are not interpreted."""
    if not tensor.is_cuda and not interpreted():
        raise ValueError(
            f"a kernel was given a tensor on {tensor.device}; would be right: cuda, or TRITON_INTERPRET=1 set before "
            "the kernel's module is imported"
        )
