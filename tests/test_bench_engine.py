"""bench.engine: the model is one and the same for every engine, the ceiling and the table are what they say."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import engine, engine_model
from bench.engine_table import ceiling, render, summary
from reference_engine import gguf, weights
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
