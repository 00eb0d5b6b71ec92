"""Compiles what kernels launch for a GPU that is not there: registers, spills and shared memory of each.

Triton brings its own ptxas, so that a kernel which the interpreter runs and a GPU's compiler refuses is found on any
machine. Tensors are made on torch's `meta` device: shapes and types without memory.
"""

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

# Triton's names of what a launch's arguments are.
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64", torch.int8: "i8",
    torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip
ALIGNED = [["tt.divisibility", 16]]  # what Triton assumes of pointers and sizes that are multiples of 16


class Compiled(NamedTuple):
    """One kernel as it would be launched."""

    kernel: str
    registers: int  # of a thread
    spilled_bytes: int  # of a thread that did not fit its registers: written to memory and read again
    shared_bytes: int  # of a program
    warps: int
    ptx: str


def compiled(run: Callable[[], object], capability: int = 90) -> list[Compiled]:
    """Compile every launch that `run` makes, for that compute capability (90: H100 and H200). Nothing is launched.

    Raises what Triton raises for a kernel that does not compile. Not under TRITON_INTERPRET=1.
    """
    found: list[Compiled] = []
    with _instead_of_launching(
        lambda kernel, given, options: found.append(_compile(kernel, given, options, capability))
    ):
        run()
    return found


@contextmanager
def _instead_of_launching(record: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    from triton.runtime.jit import JITFunction

    from kernels import dense_config

    launches, guard = JITFunction.run, dense_config.runs_here

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        record(self, arguments, options)

    JITFunction.run = run
    dense_config.runs_here = lambda tensor: None  # tensors on `meta` are on no GPU
    try:
        yield
    finally:
        JITFunction.run, dense_config.runs_here = launches, guard


def _compile(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any], capability: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    settings = {name: options[name] for name in ("num_warps", "num_stages") if name in options}
    given = dict(zip(kernel.arg_names, arguments, strict=False)) | {
        name: value for name, value in options.items() if name not in settings
    }
    constants = {p.name: given[p.name] for p in kernel.params if p.is_constexpr or given[p.name] is None}
    # Triton takes a 1 for a constant, as it does at a launch
    constants |= {n: v for n, v in given.items() if n not in constants and isinstance(v, int) and v == 1}
    signature = {n: "constexpr" if n in constants else _type(given[n]) for n in kernel.arg_names}
    aligned = {
        (i,): ALIGNED
        for i, n in enumerate(kernel.arg_names)
        if n not in constants and (isinstance(v := given[n], torch.Tensor) or (isinstance(v, int) and v % 16 == 0))
    }
    source = ASTSource(kernel, signature, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=settings)
    registers, spilled = _assembled(made.asm["ptx"], capability)
    return Compiled(kernel.__name__, registers, spilled, made.metadata.shared, made.metadata.num_warps, made.asm["ptx"])


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _assembled(ptx: str, capability: int) -> tuple[int, int]:
    """Registers a thread and bytes spilled, as ptxas says them."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"\.target (sm_\w+)", ptx)
    assert target, "PTX names its target"
    with TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        ptxas = get_ptxas(capability).path
        command = [ptxas, "-v", f"--gpu-name={target[1]}", source, "-o", Path(folder) / "kernel.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    assert registers and spilled, said
    return int(registers[1]), int(spilled[1])
