"""Runs as read back from disk: every cell with its records, its window and the doubts about it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from llm_bench import records, windows
from llm_bench.doubts import Doubt, doubts
from llm_bench.errors import BenchError
from llm_bench.metrics import Value
from llm_bench.records import Cell
from llm_bench.series import outcome_in
from llm_bench.windows import Window


@dataclass
class Measured:
    """One cell as read back: its records, its window, and what run.json says of how it ended."""

    name: str
    target: str
    load: str
    cell: Cell
    window: Window
    end: Mapping[str, Any]
    stored: Sequence[Doubt]  # what the run itself wrote down


@dataclass
class Run:
    path: Path
    facts: Mapping[str, Any]  # run.json without its cells; {} after a crash
    cells: list[Measured]
    notes: list[str]  # cells that were begun and left no records

    @cached_property
    def doubts(self) -> list[list[Doubt]]:
        """Of each cell, without regard to which metrics are asked for."""
        return [self.doubts_of(m, ()) for m in self.cells]

    def doubts_of(self, m: Measured, values: Sequence[Value]) -> list[Doubt]:
        siblings = [other.cell for other in self.cells if other is not m]
        fresh = doubts(m.cell, m.window, siblings, values, m.end)
        return fresh + [d for d in m.stored if d.kind not in {f.kind for f in fresh}]


class Verdict(NamedTuple):
    """What an exit code is made of."""

    cells: list[tuple[str, int, float]]  # name, ok requests, error rate of the whole cell
    doubts: list[Doubt]


def verdict(run: Run) -> Verdict:
    cells = []
    for m in run.cells:
        ok, failed = (int(outcome_in(m.cell, outcome).sum()) for outcome in ("ok", "failed"))
        cells.append((m.name, ok, failed / (ok + failed) if ok + failed else 0.0))
    return Verdict(cells, [doubt for of_cell in run.doubts for doubt in of_cell])


def load_run(path: Path) -> Run:
    """The run in folder `path`; without its run.json (a crash) every record file found there.

    Raises BenchError where there is no such folder, no cell, or a file that is none of ours.
    """
    book = path / "run.json"
    if not path.is_dir():
        raise BenchError(f"{path}: no such run folder")
    facts: dict[str, Any] = {}
    if book.exists():
        try:
            facts = json.loads(book.read_text())
        except ValueError as e:
            raise BenchError(f"{book}: not JSON ({e}); remove it to read the record files alone") from None
        if not isinstance(facts, dict) or not isinstance(facts.get("cells", []), list):
            raise BenchError(f"{book}: expected an object with a list of cells, as `llm-bench run` writes it")
    listed = {str(entry.get("file", "")): entry for entry in facts.pop("cells", [])}
    files = [*listed, *sorted(f.name for f in path.glob("*.arrow") if f.name not in listed)]
    there = [name for name in files if (path / name).is_file()]
    notes = [f"{name}: the cell was begun and left no records" for name in files if name not in there]
    if not there:
        raise BenchError(f"{path}: no run: no record file (*.arrow) in it")
    return Run(path, facts, [_measured(path / name, listed.get(name, {})) for name in there], notes)


def _measured(file: Path, entry: Mapping[str, Any]) -> Measured:
    cell = records.read(file)
    header = cell.header
    target = header.get("target") or {}
    load = header.get("load") or {}
    stored = [Doubt(str(d["kind"]), str(d["text"])) for d in entry.get("doubts", [])]
    label = load.get("label") or _load_label(load)
    return Measured(file.stem, target.get("name", "?"), label, cell, windows.of(cell), entry.get("end") or {}, stored)


def _load_label(load: Mapping[str, Any]) -> str:
    for key, form in (("concurrency", "c={}"), ("rate", "rate={:g}/s"), ("speed", "replay x{:g}")):
        if load.get(key) is not None:
            return form.format(load[key])
    return str(load.get("kind", "?"))


def newest(runs: Path) -> Path:
    """The run folder that was written to last. Raises BenchError where there is none."""
    found = [f for f in runs.glob("*/") if (f / "run.json").exists() or any(f.glob("*.arrow"))] if runs.is_dir() else []
    if not found:
        raise BenchError(f"{runs}: no run in it; give a run folder, or make one with `llm-bench run`")
    return max(found, key=lambda f: max(p.stat().st_mtime_ns for p in f.iterdir()))
