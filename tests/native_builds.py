"""The native kernels as this machine compiles them, with its vectors and without; or why there are none."""

import ctypes
import functools
import shutil
import tempfile
from pathlib import Path

import pytest

from reference_engine import native

HERE = any(map(shutil.which, native.COMPILERS))
needs_compiler = pytest.mark.skipif(not HERE, reason="no C++ compiler on PATH")
# Rows of model.KERNELS, for tests that hold for each.
KERNELS = ["torch", pytest.param("native", marks=needs_compiler)]
# As it is by default, the plain loops of machines without AVX2, and AVX2 on a machine that has more.
_PLAIN = tuple(f for f in native.FLAGS if f != "-march=native")
BUILDS = {"vectors": native.FLAGS, "loops": _PLAIN}
if {"avx2", "fma", "avx512f"} <= set(native.processor().split()):
    BUILDS["avx2"] = (*_PLAIN, "-mavx2", "-mfma")

_library = native.library  # tests put others in its place


@functools.cache
def built(name: str) -> ctypes.CDLL:
    if name == "vectors":
        return _library()
    folder = Path(tempfile.mkdtemp())  # compiled anew in each session: it is what is tested
    try:
        return native.bind(native.build(folder, flags=BUILDS[name]))
    finally:
        shutil.rmtree(folder)
