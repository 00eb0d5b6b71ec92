"""How the native kernels come to a machine: compiled once, kept, and done without where there is no compiler."""

import ctypes
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from reference_engine import model, native, weights
from reference_engine.config import EngineConfig
from reference_engine.engine import out_of_memory
from reference_engine.runner import ModelRunner
from reference_engine.sequence import SamplingParams, Sequence
from tests.native_builds import needs_compiler

pytestmark = [pytest.mark.engine, needs_compiler]


def test_a_source_is_compiled_once_and_anew_when_it_or_a_flag_changes(tmp_path: Path) -> None:
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    flags = ("-O0", *native.FLAGS[1:])
    first = native.build(tmp_path / "cache", source, flags)
    assert ctypes.CDLL(str(first)).answer() == 42
    stamp = first.stat().st_mtime_ns
    assert native.build(tmp_path / "cache", source, flags) == first
    assert first.stat().st_mtime_ns == stamp
    assert native.build(tmp_path / "cache", source, ("-O1", *native.FLAGS[1:])) != first
    source.write_text('extern "C" int answer() { return 43; }')
    assert ctypes.CDLL(str(native.build(tmp_path / "cache", source, flags))).answer() == 43
    assert sorted(p.suffix for p in (tmp_path / "cache").iterdir()) == [".so"] * 3  # nothing half made is left
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700


def test_flags_of_the_environment_come_last_and_make_a_library_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int answer() { return ANSWER; }')
    flags = ("-O0", *native.FLAGS[1:], "-DANSWER=1")
    for asked, answer in (("", 1), ("-UANSWER -DANSWER=2", 2)):
        monkeypatch.setenv(native.EXTRA_FLAGS, asked)
        assert ctypes.CDLL(str(native.build(tmp_path / "cache", source, flags))).answer() == answer
    monkeypatch.setenv("CXXFLAGS", "-UANSWER -DANSWER=3")  # as conda sets it for whoever builds anything
    assert ctypes.CDLL(str(native.build(tmp_path / "cache", source, flags))).answer() == 2


def test_flags_that_no_shell_would_take_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.EXTRA_FLAGS, "-DNAME='x")
    with pytest.raises(
        native.NativeError, match=r"REFERENCE_ENGINE_CXXFLAGS is .*No closing quotation; would be right"
    ):
        native.build(tmp_path / "cache")


def test_what_cannot_be_compiled_is_said_in_the_compilers_words(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cpp"
    source.write_text("int f() { return nowhere; }")
    with pytest.raises(native.NativeError, match=r"cannot compile wrong\.cpp: .*nowhere"):
        native.build(tmp_path / "cache", source)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_compiler_without_openmp_still_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = next(filter(None, map(shutil.which, native.COMPILERS)))
    monkeypatch.setenv("PATH", str(tmp_path))
    fake = tmp_path / native.COMPILERS[0]
    fake.write_text(f'#!/bin/sh\ncase "$*" in *-fopenmp*) echo "error: no -fopenmp" >&2; exit 1;; esac\n'
                    f'export PATH="{os.environ["PATH"]}:/usr/bin:/bin"\nexec {real} "$@"\n')  # fmt: skip
    fake.chmod(0o755)
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    assert ctypes.CDLL(str(native.build(tmp_path / "cache", source, ("-O0", *native.FLAGS[1:])))).answer() == 42


# native.cpp with what shows how its threads work together.
INSIDE = """
#include "%s"

extern "C" {
void one_is_late(int count, int ms) {
    together(count, true, [=](Team& team) {
        team.each(count, [=](int64_t i) { if (i == 0) std::this_thread::sleep_for(std::chrono::milliseconds(ms)); });
    });
}
int shared(int64_t rows, int64_t hidden, int64_t ffn, int64_t keys) {
    Layer layer = {};
    layer.gate_up = {0, hidden, 2 * ffn, nullptr, nullptr, nullptr};
    return worth_sharing(layer, Rows{rows, nullptr, nullptr, nullptr, keys / 16, nullptr}, Geometry{4, 2, 32, 16, 9});
}
}
"""


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    place = tmp_path_factory.mktemp("inside")
    source = place / "inside.cpp"
    source.write_text(INSIDE % native.SOURCE)
    loaded = ctypes.CDLL(str(native.build(place, source, ("-O0", *native.FLAGS[1:]))))
    loaded.shared.argtypes = [ctypes.c_int64] * 4
    return loaded


def test_who_waits_long_for_another_thread_leaves_the_processor_to_others(inside: ctypes.CDLL) -> None:
    begun_s = time.process_time()
    inside.one_is_late(2, 600)
    assert time.process_time() - begun_s < 0.3


@pytest.mark.parametrize(
    ("rows", "hidden", "ffn", "keys", "worth"),
    [
        (1, 128, 96, 512, False),
        (8, 128, 96, 512, False),
        (1, 768, 2048, 16, True),  # much to read
        (2000, 64, 96, 16, True),  # many rows
        (8, 64, 96, 8192, True),  # many keys
    ],
)
def test_threads_share_what_is_large_in_any_of_three_ways(
    inside: ctypes.CDLL, rows: int, hidden: int, ffn: int, keys: int, worth: bool
) -> None:
    assert bool(inside.shared(rows, hidden, ffn, keys)) is worth


def tiny(**knobs: Any) -> ModelRunner:
    asked = {"device": "cpu", "num_blocks": 16} | knobs
    return ModelRunner("t", weights.tiny(0), frozenset(), EngineConfig(**asked))


def no_compiler() -> ctypes.CDLL:
    raise native.NativeError("native kernels: no C++ compiler on PATH")


def test_without_a_compiler_torch_computes_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "library", no_compiler)
    assert tiny().facts()["cpu_kernels"] == "torch"
    (line,) = capsys.readouterr().err.splitlines()
    assert "no C++ compiler on PATH; torch computes instead" in line
    with pytest.raises(ValueError, match="no C\\+\\+ compiler on PATH"):
        tiny(cpu_kernels="native")


def test_no_compiler_on_the_path_is_named_with_those_that_would_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(native.NativeError, match=r"no C\+\+ compiler on PATH; would be right: one of g\+\+"):
        native.build(tmp_path / "cache")


def test_native_kernels_are_for_float32_only() -> None:
    bfloat16 = weights.tiny(0, torch.bfloat16)
    knobs = {"device": "cpu", "num_blocks": 16}
    with pytest.raises(ValueError, match=r"cpu_kernels 'native' with torch\.bfloat16 on cpu"):
        ModelRunner("t", bfloat16, frozenset(), EngineConfig(cpu_kernels="native", **knobs))
    assert ModelRunner("t", bfloat16, frozenset(), EngineConfig(**knobs)).kernels == "torch"
    assert tiny().facts()["cpu_kernels"] == "native"


def test_flags_of_the_environment_stand_among_the_effective_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.EXTRA_FLAGS, raising=False)
    assert tiny().facts()["cpu_kernels_flags"] == ""
    monkeypatch.setenv(native.EXTRA_FLAGS, "-mno-avx512f  '-DA=b c'")
    monkeypatch.setattr(native, "set_threads", lambda count: None)  # nothing is compiled: this is about what is said
    assert tiny(cpu_kernels="native").facts()["cpu_kernels_flags"] == "-mno-avx512f '-DA=b c'"
    assert tiny(cpu_kernels="torch").facts()["cpu_kernels_flags"] == ""


def in_little_memory() -> None:
    """A step that needs 150 MB where 40 are left, then a small one. What a process has freed would serve for it."""
    import resource

    whole = model.make(weights.tiny(0), 8, 16, 20_000, "native")
    work = []
    for n in (20_000, 20):
        s = Sequence(n, [3] * n, n, SamplingParams(1), 0)
        s.blocks = [0] * -(-n // 16) if n > 100 else [1, 2]
        work.append((s, n))
    large, small = (model.lay_out(whole, [each]) for each in work)
    right = model.hidden(whole, small, small.sample_rows)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used + (40 << 20), hard))  # 10 MB of it for the embeddings
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        model.hidden(whole, large, large.sample_rows)
    assert out_of_memory(caught.value)
    assert torch.equal(model.hidden(whole, small, small.sample_rows), right)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_step_too_large_for_memory_is_an_error_and_a_smaller_one_goes_on() -> None:
    """The engine computes such a step in halves. In a process of its own: others leave memory that would do."""
    call = "from tests.test_native_build import in_little_memory; in_little_memory()"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
