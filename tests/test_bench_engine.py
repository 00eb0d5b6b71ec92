"""bench.engine: the model is one and the same for every engine, the ceiling and the table are what they say."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import engine, engine_model
from bench.engine_table import ceiling, render, summary
from reference_engine import gguf, native, weights
from reference_engine.tokenizer import HFTokenizer

pytestmark = pytest.mark.engine
SMALL = {"VOCAB": 300, "HIDDEN": 64, "FFN": 96, "LAYERS": 2, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 16}


def test_the_folder_and_the_gguf_file_hold_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(engine_model, name, value)
    folder, file = engine_model.make(tmp_path)
    (ours, text), theirs = gguf.load(file), weights.read(folder)
    assert all(torch.equal(a, b) for a, b in zip(ours.tensors(), theirs.tensors(), strict=True))
    assert ours.shape.rope_theta == theirs.shape.rope_theta
    words = HFTokenizer(folder)
    for sentence in ("the words of a prompt", "thé 1\n", ""):
        assert words.encode(sentence) == text.encode(sentence)
        assert words.decode(words.encode(sentence)) == sentence
    # What a token's products go through: all of the weights but the embedding.
    assert engine_model.parameters() == sum(t.numel() for t in theirs.tensors()) - 300 * 64
    stamp = file.stat().st_mtime_ns
    assert engine_model.make(tmp_path) == (folder, file)
    assert file.stat().st_mtime_ns == stamp


def test_the_model_has_109_million_parameters() -> None:
    assert round((engine_model.parameters() + engine_model.VOCAB * engine_model.HIDDEN) / 1e6) == 109


def test_the_ceiling_is_the_slower_of_memory_and_arithmetic() -> None:
    # 100 weights, 400 bytes: at 400 B/s a step takes 1 s; a prompt of 3 tokens 600 operations, 0.6 s at 1000 FLOP/s
    assert ceiling(1, 100, 3, 400.0, 1000.0) == pytest.approx(3 / (1 + 2 * 1))
    # ten at a time: a step is 2000 operations, 2 s; the prompts 6 s
    assert ceiling(10, 100, 3, 400.0, 1000.0) == pytest.approx(30 / (6 + 2 * 2))


def test_the_probe_reads_more_than_the_largest_cache_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, size in enumerate(("48K", "2048K", "266240K")):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}/size").write_text(size + "\n")
    monkeypatch.setattr(engine, "CACHES", tmp_path)
    assert engine.cache_bytes() == 260 << 20
    assert engine.probe_matrices(260 << 20) == 9  # 576 MiB
    assert engine.probe_matrices(0) == engine.probe_matrices(32 << 20) == 4
    monkeypatch.setattr(engine, "CACHES", tmp_path / "none")
    assert engine.cache_bytes() == 0


def test_the_probe_does_without_native_kernels_where_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler() -> None:
        raise native.NativeError("native kernels: no C++ compiler on PATH")

    monkeypatch.setattr(native, "library", no_compiler)
    monkeypatch.setattr(engine, "CACHES", tmp_path)  # few matrices
    threads = torch.get_num_threads()
    try:
        assert min(engine.probe()) > 0
    finally:
        torch.set_num_threads(threads)


def cell(name: str, concurrency: int, wall_s: float, cpu_s: float) -> dict[str, Any]:
    return {
        "engine": name, "concurrency": concurrency, "requests": 4, "tokens": 256, "wall_s": wall_s, "cpu_s": cpu_s,
        "ttft_p50_ms": 120.0, "gemv_bytes_per_s": 20e9, "gemm_flop_per_s": 9e10, "ceiling_tokens_per_s": 40.0,
    }  # fmt: skip


def test_a_row_is_the_median_of_its_repeats() -> None:
    found = summary([cell("native", 1, wall, 8.0) for wall in (10.0, 8.0, 16.0)])
    assert found == {"tok_s": 25.6, "tok_cpu_s": 32.0, "cores": 0.8, "of_ceiling": 0.8, "ttft_p50_ms": 120.0}


def test_the_page_says_how_many_times_as_fast() -> None:
    facts = {
        "machine": {"cpu": "a CPU", "cores": 2, "memory_gib": 8, "python": "3", "load_before": 0.1, "load_after": 0.2},
        "versions": {"torch": "2"}, "command": "--repeats 1", "tokens": 64, "missing": ["vllm"],
        "labels": {"native": "ours, native", "llama.cpp": "llama.cpp", "vllm": "vLLM"},
        "start_s": {"native": 3.0, "llama.cpp": 1.0},
        "cells": [cell("native", 8, 8.0, 8.0), cell("llama.cpp", 8, 16.0, 12.8)],
    }  # fmt: skip
    page = render(facts)
    assert "| ours, native | 32.0 | 1.00 | 32.0 | 1.00 | 1.00 | 80% | 120 |" in page
    assert "| llama.cpp | 16.0 | 2.00 | 20.0 | 1.60 | 0.80 | 50% | 120 |" in page
    assert "vLLM: not installed." in page


def test_processor_time_of_a_process_is_what_it_says_of_itself() -> None:
    times = os.times()
    assert engine.cpu_s([os.getpid()]) == pytest.approx(sum(times[:4]), abs=0.2)
    assert os.getpid() in engine.members(os.getsid(0))


def test_every_engine_has_a_command_or_says_that_it_is_not_here(tmp_path: Path) -> None:
    place = engine.Place(tmp_path / "folder", tmp_path / "file.gguf", None, 1)
    without = [name for name, row in engine.ENGINES.items() if row.command(place) is None]
    assert without == ["vllm"]
    assert engine.ENGINES["vllm"].command(place._replace(vllm=tmp_path))
    assert set(engine.DEFAULT.split(",")) <= engine.ENGINES.keys()


def test_with_an_isa_the_labels_and_the_page_say_whom_it_does_not_reach(tmp_path: Path) -> None:
    plain, held = engine.rows_for(None, tmp_path), engine.rows_for("avx2", tmp_path)
    assert plain == engine.ENGINES
    assert {n: r.label for n, r in held.items() if r.label != plain[n].label} == {
        "llama.cpp": "llama.cpp, as built",
        "llama.cpp-2": "llama.cpp, 2 threads, as built",
    }
    facts = {
        "machine": {"cpu": "a CPU", "cores": 2, "memory_gib": 8, "python": "3", "load_before": 0.1, "load_after": 0.2},
        "versions": {}, "command": "--isa avx2", "tokens": 64, "missing": [], "isa": "avx2",
        "labels": {name: held[name].label for name in ("native", "llama.cpp")}, "start_s": {},
        "cells": [cell("native", 8, 8.0, 8.0), cell("llama.cpp", 8, 16.0, 12.8)],
    }  # fmt: skip
    page = render(facts)
    assert "| llama.cpp, as built | 16.0 |" in page
    assert "no more than AVX2, the probes too. What is called *as built* has no such switch" in page
    assert "as built" not in render(facts | {"isa": None, "labels": {n: r.label for n, r in plain.items()}})


def test_an_isa_is_set_for_all_of_this_process_before_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a part of it was set by hand."""
    begun: list[dict[str, str]] = []

    def execve(program: str, command: list[str], env: dict[str, str]) -> None:
        begun.append(env)
        raise SystemExit

    def make(folder: Path) -> None:
        begun.append({})
        raise SystemExit

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(engine_model, "make", make)
    monkeypatch.setattr(sys, "argv", ["engine", "--isa", "avx2"])
    for name in engine.AVX2:
        monkeypatch.delenv(name, raising=False)
    for name, value in engine.AVX2.items():
        with pytest.raises(SystemExit):
            engine.main()
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        engine.main()
    *before, last = begun
    assert [env.items() >= engine.AVX2.items() for env in before] == [True] * len(engine.AVX2)
    assert last == {}  # it went on


TORCH = """
class cpu:
    _is_avx512_supported = _is_avx512_bf16_supported = lambda: True
"""


@pytest.mark.parametrize(
    ("torchs", "code", "said"),
    [
        (TORCH, 0, ""),
        (TORCH.replace("_is_avx512_bf16_supported", "renamed"), 1, "no attribute '_is_avx512_bf16_supported'"),
        ("raise RuntimeError('no such library')", 1, "no such library"),
    ],
)
def test_vllm_has_no_avx512_or_does_not_start(torchs: str, code: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(torchs)
    env = engine.rows_for("avx2", tmp_path)["vllm"].env
    program = "import torch; print(torch.cpu._is_avx512_supported(), torch.cpu._is_avx512_bf16_supported())"
    ran = subprocess.run([sys.executable, "-c", program], env={**os.environ, **env}, capture_output=True, text=True,
                         check=False)  # fmt: skip
    assert (ran.returncode, ran.stdout) == (code, "" if code else "False False\n")
    assert said in ran.stderr
    assert ran.stderr.count("\n") == bool(code)
