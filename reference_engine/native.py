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
from contextlib import suppress
from pathlib import Path

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

_POINTER, _COUNT, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES: dict[str, tuple[type, ...]] = {
    "set_threads": (ctypes.c_int,),
    "product_float32": (*[_POINTER] * 2, *[_COUNT] * 3, *[_POINTER] * 2),
    "product_weights8": (*[_POINTER] * 2, *[_COUNT] * 3, *[_POINTER] * 3),
    "product_int8": (*[_POINTER] * 2, *[_COUNT] * 3, *[_POINTER] * 3),
    "store_rows": (*[_POINTER] * 4, _COUNT, *[_POINTER] * 6, _REAL),
    "attend_rows": (*[_POINTER] * 5, _COUNT, *[_POINTER] * 2, _COUNT, _POINTER, _COUNT),
    "all_layers": (*[_POINTER] * 4,),
    "rms_norm": (*[_POINTER] * 3, _COUNT, _COUNT, _REAL),
    "silu_mul": (*[_POINTER] * 2, _COUNT, _COUNT),
}


class NativeError(ValueError):
    """The kernels cannot be had on this machine; the text says why."""


class Geometry(ctypes.Structure):
    """native.cpp's struct of the same name, as all here are."""

    _fields_ = [(name, _COUNT) for name in ("heads", "kv_heads", "dim", "block_size", "num_blocks")]


KINDS = ("float32", "weights8", "int8")  # of products, in native.cpp's order


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
    for name, kinds in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = kinds, None
    return loaded


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
    x = _checked(x)
    out = x.new_empty(len(x), outputs)
    library().product_float32(
        out.data_ptr(), x.data_ptr(), len(x), x.shape[1], outputs, panels.data_ptr(), _pointer(bias)
    )
    return out


def product_weights8(
    x: torch.Tensor, panels: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """[rows, outputs] of x [rows, inputs] and a packed int8 matrix with scales [outputs], in float32."""
    x = _checked(x)
    out = x.new_empty(len(x), len(scales))
    library().product_weights8(
        out.data_ptr(), x.data_ptr(), len(x), x.shape[1], len(scales), panels.data_ptr(), scales.data_ptr(),
        _pointer(bias),
    )  # fmt: skip
    return out


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
    x = _checked(x)
    out = x.new_empty(len(x), len(scales))
    library().product_int8(
        out.data_ptr(), x.data_ptr(), len(x), x.shape[1], len(scales), panels.data_ptr(), scales.data_ptr(),
        _pointer(bias),
    )  # fmt: skip
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [rows, size] over its root mean square, times weight [size]."""
    x = _checked(x)
    out = torch.empty_like(x)
    library().rms_norm(out.data_ptr(), x.data_ptr(), weight.data_ptr(), len(x), x.shape[1], eps)
    return out


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(first half of each row) times its second half: [rows, 2 size] -> [rows, size]."""
    x = _checked(x)
    size = x.shape[1] // 2
    out = x.new_empty(len(x), size)
    library().silu_mul(out.data_ptr(), x.data_ptr(), len(x), size)
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
    assert qkv.is_contiguous()
    library().store_rows(
        qkv.data_ptr(), pool.data_ptr(), _pointer(scales), ctypes.addressof(sizes), len(qkv), positions.data_ptr(),
        slots.data_ptr(), tables[0].data_ptr(), tables[1].data_ptr(), _pointer(norms[0]), _pointer(norms[1]), eps,
    )  # fmt: skip


def attend(
    sizes: Geometry,
    qkv: torch.Tensor,
    pool: torch.Tensor,
    scales: torch.Tensor | None,
    positions: torch.Tensor,
    layout: Paged,
    window: int,
) -> torch.Tensor:
    """[rows, heads · dim]: the queries of each row over the keys of its sequence up to its position."""
    out = qkv.new_empty(len(qkv), sizes.heads * sizes.dim)
    library().attend_rows(
        out.data_ptr(), qkv.data_ptr(), pool.data_ptr(), _pointer(scales), ctypes.addressof(sizes), len(qkv),
        positions.data_ptr(), layout.tables.data_ptr(), layout.tables.shape[1], layout.table_of_row.data_ptr(), window,
    )  # fmt: skip
    return out


def matrix(
    kind: str, inputs: int, outputs: int, panels: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None
) -> Matrix:
    """For a Layer."""
    return Matrix(KINDS.index(kind), inputs, outputs, panels.data_ptr(), _pointer(scales), _pointer(bias))


def stack(layers: list[tuple[torch.Tensor | Matrix | None, ...]], norm: torch.Tensor, eps: float) -> Stack:
    """layers: the fields of a Layer each. It holds addresses alone, as Matrix does."""
    made = [Layer(*(x if isinstance(x, Matrix) else _pointer(x) for x in layer)) for layer in layers]
    return Stack((Layer * len(made))(*made), len(made), len(norm), norm.data_ptr(), eps)


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
) -> torch.Tensor:
    """[kept, hidden]: x [rows, hidden], which changes, through all layers and the last norm. pool: of all layers."""
    out = x.new_empty(len(x) if kept is None else len(kept), x.shape[1])
    rows = Rows(
        len(x), positions.data_ptr(), slots.data_ptr(), layout.tables.data_ptr(), layout.tables.shape[1],
        layout.table_of_row.data_ptr(),
    )  # fmt: skip
    context = Context(
        Pool(pool.data_ptr(), _pointer(scales), sizes), rows, tables[0].data_ptr(), tables[1].data_ptr(),
        windows.data_ptr(), _pointer(kept), -1 if kept is None else len(kept),
    )  # fmt: skip
    library().all_layers(out.data_ptr(), x.data_ptr(), ctypes.addressof(stack), ctypes.addressof(context))
    return out


def _checked(x: torch.Tensor) -> torch.Tensor:
    assert x.dtype == torch.float32, x.dtype
    return x.contiguous()


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
