"""What the dense kernels share: Triton or a stand-in for it, checks of arguments, launches.

Nothing here or in the kernels is tuned by trying: settings come from tables, so that a result depends on shapes alone.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from kernels.interpret import runs_here as runs_here  # named again: compile_check puts another in its place

# Triton 3.9 warns at its first compilation where this is unset; 1 is what it then does.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

try:
    import triton
    import triton.language

    tl = triton.language
except ModuleNotFoundError:  # the kernels' modules can be read, their arguments checked; a launch says what is missing
    triton = tl = None

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def jit(function: Callable[..., None]) -> Any:
    """triton.jit, or the function itself where there is no Triton."""
    return function if triton is None else triton.jit(function)


def expect(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], like: torch.Tensor
) -> None:
    """Raises ValueError unless the tensor has the shape, one of the dtypes, like's device and adjacent elements.

    Rows may be apart: only the last dimension must have stride 1.
    """
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {list(tensor.shape)}; would be right: {list(shape)}")
    if tensor.dtype not in dtypes:
        right = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}; would be right: {right}")
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}; would be right: {like.device}, where the rest is")
    if tensor.ndim and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension; would be right: 1")


def expect_near(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError where elements of one row (whatever the first dimension counts) are 2**31 or more apart.

    Kernels count rows in 64 bits and what is within one in 32, which is enough where a row's elements lie side by side.
    """
    apart = sum((n - 1) * stride for n, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    if apart >= 2**31:
        raise ValueError(f"{name} has strides {tensor.stride()}; would be right: a row within 2**31 elements")


def warps(elements: int) -> int:
    """Warps of a program that holds so many elements: 16 a thread, by the block alone and never by the batch."""
    return min(max(elements // 512, 1), 16)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, stages: int = 1, **constants: Any) -> None:
    """One launch on the current stream; none where there is nothing to do. The first argument says on which device.

    Raises ValueError where no kernel can run.
    """
    if 0 in grid:
        return
    if triton is None:
        raise ValueError("triton is not installed; would be right: pip install 'triton>=3.7,<4'")
    runs_here(arguments[0])
    kernel[grid](*arguments, **constants, num_warps=warps, num_stages=stages)


def power_of_two(n: int) -> int:
    """The least power of two that is n or more: Triton's blocks have no other sizes."""
    return 1 << max(n - 1, 0).bit_length()


def blocks(n: int, size: int) -> int:
    """How many blocks of `size` hold n."""
    return -(-n // size)
