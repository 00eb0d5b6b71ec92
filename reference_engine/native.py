"""Kernels for CPUs in C++ (native.cpp): compiled once by the machine's own compiler, kept in the user's cache, called
through ctypes. Each function here has a form in torch beside it in linear.py, quant.py, attention.py or model.py.

They take float32 on the CPU. A row's result depends on that row alone, bit for bit, whatever else is in the batch.
"""

import ctypes
import functools
import hashlib
import math
import mmap
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from reference_engine.batch import Paged
from reference_engine.families import Shape

SOURCE = Path(__file__).with_name("native.cpp")
COMPILERS = ("g++", "c++", "clang++", "cc")
# A variable of flags that come last. Not CXXFLAGS: conda sets that to -march=nocona, and nobody would see it.
EXTRA_FLAGS = "REFERENCE_ENGINE_CXXFLAGS"
# No contraction: a loop's vectors and its tail would else round differently. Where it is wanted the source says fma.
FLAGS = ("-O3", "-std=c++17", "-march=native", "-ffp-contract=off", "-shared", "-fPIC", "-x", "c++")
LIBRARIES = ("-lm", "-lstdc++")
THREADED = (("-fopenmp",), ())  # tried in this order; without OpenMP one thread computes
COMPILE_LIMIT_S = 120
HUGE = 2 << 20  # bytes of a huge page
PANEL = 16  # outputs that stand together in a packed matrix
# Of products, in native.cpp's order: what their panels hold.
KINDS = {"float32": torch.float32, "weights8": torch.int8, "int8": torch.int8}

_POINTER, _COUNT, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
# What each returns, then what it takes.
SIGNATURES: dict[str, tuple[type | None, ...]] = {
    "set_threads": (None, ctypes.c_int),
    "product_scratch": (_COUNT, _COUNT, _COUNT),
    "product_float32": (None, *[_POINTER] * 2, *[_COUNT] * 3, *[_POINTER] * 3),
    "product_weights8": (None, *[_POINTER] * 2, *[_COUNT] * 3, *[_POINTER] * 4),
    "product_int8": (None, *[_POINTER] * 2, *[_COUNT] * 3, *[_POINTER] * 4),
    "store_rows": (None, *[_POINTER] * 4, _COUNT, *[_POINTER] * 6, _REAL),
    "attend_rows": (_COUNT, *[_POINTER] * 5, _COUNT, *[_POINTER] * 2, _COUNT, _POINTER, _COUNT, _POINTER, _COUNT),
    "all_layers": (_COUNT, *[_POINTER] * 5, _COUNT),
    "rms_norm": (None, *[_POINTER] * 3, _COUNT, _COUNT, _REAL),
    "silu_mul": (None, *[_POINTER] * 2, _COUNT, _COUNT),
}


class NativeError(ValueError):
    """The kernels cannot be had on this machine; the text says why."""


class Geometry(ctypes.Structure):
    """native.cpp's struct of the same name, as all here are."""

    _fields_ = [(name, _COUNT) for name in ("heads", "kv_heads", "dim", "block_size", "num_blocks")]


class Matrix(ctypes.Structure):
    """A packed matrix. It holds addresses alone: who has it keeps the tensors."""

    _fields_ = [
        *((name, _COUNT) for name in ("kind", "inputs", "outputs")),
        *((name, _POINTER) for name in ("panels", "scales", "bias")),
    ]


class Layer(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("attention_norm", "q_norm", "k_norm", "ffn_norm")),
        *((name, Matrix) for name in ("qkv", "out", "gate_up", "down")),
    ]


class Stack(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(Layer)),
        ("count", _COUNT),
        ("hidden", _COUNT),
        ("norm", _POINTER),
        ("eps", _REAL),
    ]


class Pool(ctypes.Structure):
    _fields_ = [("numbers", _POINTER), ("scales", _POINTER), ("sizes", Geometry)]


class Rows(ctypes.Structure):
    _fields_ = [
        ("count", _COUNT),
        ("positions", _POINTER),
        ("slots", _POINTER),
        ("tables", _POINTER),
        ("width", _COUNT),
        ("table_of_row", _POINTER),
    ]


class Context(ctypes.Structure):
    _fields_ = [
        ("pool", Pool),
        ("rows", Rows),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("windows", _POINTER),
        ("kept", _POINTER),
        ("kept_count", _COUNT),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels, compiled now if this machine has none of this source yet. Raises NativeError."""
    try:
        return bind(build(cache_folder()))
    except OSError as error:
        raise NativeError(f"native kernels: {error}") from error


def cache_folder() -> Path:
    """Of this user alone: what lies there is loaded and run."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "llm-bench"


def build(folder: Path, source: Path = SOURCE, flags: tuple[str, ...] = FLAGS) -> Path:
    """Compile into `folder`, or find it compiled there for this source, compiler and processor. Raises NativeError.

    With `extra_flags`: -mno-avx512f makes what a processor without AVX-512 runs.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NativeError(f"native kernels: no C++ compiler on PATH; would be right: one of {', '.join(COMPILERS)}")
    release = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    # The processor counts: -march=native makes code that another one may not have the instructions for.
    flags = (*flags, *extra_flags())
    parts = (source.read_text(), compiler, release, " ".join((*flags, *LIBRARIES)), processor())
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    path = folder / f"native-{name}.so"
    if path.is_file():
        return path
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:  # moved when whole: several may compile at once
        made = Path(place) / "native.so"
        for threaded in THREADED:
            command = [compiler, *flags, *threaded, "-o", str(made), str(source), *LIBRARIES]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False)
            except subprocess.TimeoutExpired as error:
                raise NativeError(f"native kernels: {compiler} took more than {COMPILE_LIMIT_S} s") from error
            if done.returncode == 0:
                made.replace(path)
                return path
    said = next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")
    raise NativeError(f"native kernels: {compiler} cannot compile {source.name}: {said.strip()}")


def extra_flags() -> list[str]:
    """Those of the environment. Raises NativeError for what no shell would take."""
    given = os.environ.get(EXTRA_FLAGS, "")
    try:
        return shlex.split(given)
    except ValueError as error:
        raise NativeError(
            f"native kernels: {EXTRA_FLAGS} is {given!r}: {error}; would be right: -mno-avx512f"
        ) from error


def processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return "\n".join(sorted({x for x in lines if x.partition("\t")[0].strip() in ("model name", "flags", "Features")}))


def bind(path: Path) -> ctypes.CDLL:
    """Load, and say what each function takes. torch is loaded already, so that its OpenMP is the one that is found."""
    loaded = ctypes.CDLL(str(path))
    for name, (result, *taken) in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = taken, result
    return loaded


@dataclass(slots=True, eq=False)
class Scratch:
    """Memory that kernels compute in, for one thread at a time. It grows, and stays for the next call: fresh megabytes
    cost page faults each time."""

    place: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def lent(self, kernel: Callable[..., int], *given: Any) -> None:
        """Call one that says how much it needs where this is too little. Raises what torch does where there is none."""
        while needed := kernel(*given, self.place.data_ptr(), len(self.place)):
            self.place = torch.empty(0)  # not both at once
            self.place = torch.empty(needed, dtype=torch.float32)


def set_threads(count: int) -> None:
    library().set_threads(count)


def zeros(*size: int, dtype: torch.dtype) -> torch.Tensor:
    """torch.zeros on the CPU, of 2 MiB and more in huge pages where the system has them. Raises MemoryError.

    Of small ones a virtual machine's core spends up to a third of a pass in looking up where they are. What is left
    beyond the last whole huge page stands in small ones, so that no memory is wasted.
    """
    taken = math.prod(size) * dtype.itemsize
    if taken < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=dtype)
    try:
        place = mmap.mmap(-1, taken + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{taken} bytes: {error}") from error
    begin = -torch.frombuffer(place, dtype=torch.uint8).data_ptr() % HUGE
    with suppress(OSError):  # a kernel without them
        place.madvise(mmap.MADV_HUGEPAGE, begin, taken // HUGE * HUGE)
    return torch.frombuffer(place, dtype=dtype, count=math.prod(size), offset=begin).view(size)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[outputs, inputs] float32 or int8 as panels [outputs / 16, inputs, 16], filled up with 0."""
    inputs = weight.shape[1]
    filled = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % PANEL))
    panels = filled.view(-1, PANEL, inputs).transpose(1, 2)
    return zeros(*panels.shape, dtype=panels.dtype).copy_(panels)


def product(x: torch.Tensor, panels: torch.Tensor, outputs: int, bias: torch.Tensor | None) -> torch.Tensor:
    """[rows, outputs] of x [rows, inputs] and a packed matrix."""
    return _product("float32", x, panels, outputs, _pointer(bias))


def product_weights8(
    x: torch.Tensor, panels: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """[rows, outputs] of x [rows, inputs] and a packed int8 matrix with scales [outputs], in float32."""
    return _product("weights8", x, panels, len(scales), _pointer(scales), _pointer(bias))


def pack_int8(weight: torch.Tensor) -> torch.Tensor:
    """[outputs, inputs] int8 as panels [outputs / 16, inputs / 2, 16, 2], filled up with 0."""
    outputs, inputs = weight.shape
    filled = torch.nn.functional.pad(weight, (0, inputs % 2, 0, -outputs % PANEL))
    panels = filled.view(-1, PANEL, (inputs + 1) // 2, 2).transpose(1, 2)
    return zeros(*panels.shape, dtype=panels.dtype).copy_(panels)


def product_int8(
    x: torch.Tensor, panels: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """[rows, outputs] of x [rows, inputs] and a packed int8 matrix; scales [outputs]. x is quantised row by row."""
    return _product("int8", x, panels, len(scales), _pointer(scales), _pointer(bias))


def _product(
    kind: str, x: torch.Tensor, panels: torch.Tensor, outputs: int, *scales_and_bias: int | None
) -> torch.Tensor:
    x, kernels = x.contiguous(), library()
    rows, inputs = x.shape
    out, packed = x.new_empty(rows, outputs), x.new_empty(kernels.product_scratch(rows, inputs))
    getattr(kernels, f"product_{kind}")(
        _pointer(out), _pointer(x), rows, inputs, outputs, _pointer(panels, KINDS[kind]), *scales_and_bias,
        _pointer(packed),
    )  # fmt: skip
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [rows, size] over its root mean square, times weight [size]."""
    x = x.contiguous()
    out = torch.empty_like(x)
    library().rms_norm(_pointer(out), _pointer(x), _pointer(weight), len(x), x.shape[1], eps)
    return out


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(first half of each row) times its second half: [rows, 2 size] -> [rows, size]."""
    x = x.contiguous()
    size = x.shape[1] // 2
    out = x.new_empty(len(x), size)
    library().silu_mul(_pointer(out), _pointer(x), len(x), size)
    return out


def geometry(shape: Shape, num_blocks: int, block_size: int) -> Geometry:
    return Geometry(shape.heads, shape.kv_heads, shape.head_dim, block_size, num_blocks)


def store(
    sizes: Geometry,
    qkv: torch.Tensor,
    pool: torch.Tensor,
    scales: torch.Tensor | None,
    positions: torch.Tensor,
    slots: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor | None, torch.Tensor | None],
    eps: float,
) -> None:
    """Norm and rotate the heads of qkv [rows, heads + 2 kv_heads, dim] in place; keys and values into a layer's pool.

    pool [2, num_blocks, kv_heads, block_size, dim], int8 with scales [2, num_blocks, kv_heads, block_size];
    tables: cos and signed sin [positions, 1, dim].
    """
    library().store_rows(
        _pointer(qkv), *_pool(pool, scales), ctypes.addressof(sizes), len(qkv), _pointer(positions, torch.int64),
        _pointer(slots, torch.int64), *map(_pointer, tables), *map(_pointer, norms), eps,
    )  # fmt: skip


def attend(
    sizes: Geometry,
    qkv: torch.Tensor,
    pool: torch.Tensor,
    scales: torch.Tensor | None,
    positions: torch.Tensor,
    layout: Paged,
    window: int,
    scratch: Scratch,
) -> torch.Tensor:
    """[rows, heads · dim]: the queries of each row over the keys of its sequence up to its position."""
    out = qkv.new_empty(len(qkv), sizes.heads * sizes.dim)
    scratch.lent(
        library().attend_rows, _pointer(out), _pointer(qkv), *_pool(pool, scales), ctypes.addressof(sizes), len(qkv),
        _pointer(positions, torch.int64), *_tables(layout), window,
    )  # fmt: skip
    return out


def matrix(
    kind: str, inputs: int, outputs: int, panels: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None
) -> Matrix:
    """For a Layer."""
    number = list(KINDS).index(kind)
    return Matrix(number, inputs, outputs, _pointer(panels, KINDS[kind]), _pointer(scales), _pointer(bias))


def stack(layers: list[tuple[torch.Tensor | Matrix | None, ...]], norm: torch.Tensor, eps: float) -> Stack:
    """layers: the fields of a Layer each. It holds addresses alone, as Matrix does."""
    made = [Layer(*(x if isinstance(x, Matrix) else _pointer(x) for x in layer)) for layer in layers]
    return Stack((Layer * len(made))(*made), len(made), len(norm), _pointer(norm), eps)


def all_layers(
    stack: Stack,
    x: torch.Tensor,
    sizes: Geometry,
    pool: torch.Tensor,
    scales: torch.Tensor | None,
    tables: tuple[torch.Tensor, torch.Tensor],
    windows: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    layout: Paged,
    kept: torch.Tensor | None,
    scratch: Scratch,
) -> torch.Tensor:
    """[kept, hidden]: x [rows, hidden], which changes, through all layers and the last norm. pool: of all layers."""
    assert x.shape[1] == stack.hidden, (x.shape, stack.hidden)
    assert kept is None or len(kept) <= len(x), (len(kept), len(x))
    out = x.new_empty(len(x) if kept is None else len(kept), x.shape[1])
    rows = Rows(len(x), _pointer(positions, torch.int64), _pointer(slots, torch.int64), *_tables(layout))
    context = Context(
        Pool(*_pool(pool, scales), sizes), rows, *map(_pointer, tables), _pointer(windows, torch.int64),
        _pointer(kept, torch.int64), -1 if kept is None else len(kept),
    )  # fmt: skip
    scratch.lent(library().all_layers, _pointer(out), _pointer(x), ctypes.addressof(stack), ctypes.addressof(context))
    return out


def _pool(numbers: torch.Tensor, scales: torch.Tensor | None) -> tuple[int | None, int | None]:
    return _pointer(numbers, torch.float32 if scales is None else torch.int8), _pointer(scales)


def _tables(layout: Paged) -> tuple[int | None, int, int | None]:
    """As Rows has them."""
    return _pointer(layout.tables, torch.int32), layout.tables.shape[1], _pointer(layout.table_of_row, torch.int32)


def _pointer(tensor: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
    """What a kernel gets of it: it takes what lies there for numbers of this type without gaps."""
    if tensor is None:
        return None
    assert tensor.dtype == dtype and tensor.is_cpu and tensor.is_contiguous(), (tensor.dtype, dtype, tensor.stride())
    return tensor.data_ptr()
