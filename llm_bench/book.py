"""run.json: what was asked, on what machine, how each cell ended. Written anew, atomically, at each cell's ends."""

import json
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llm_bench import __version__, clock
from llm_bench.errors import BenchError
from llm_bench.host import host
from llm_bench.records import DISK_ERRORS

ASIDE = "partial"  # folder in a run's: what a cell had measured before a resumed run measured it again
DONE = ("exhausted", "duration")  # reasons of a cell that is not measured again
ASKED = ("settings", "targets", "declared", "loads", "trace")  # what has to be equal for a run to be resumed


class Book:
    """The facts of run.json. `asked` holds the keys of ASKED; `folder` is the run's."""

    def __init__(self, folder: Path, asked: Mapping[str, Any], *, resume: bool = False) -> None:
        """Opens a new run, or one to be finished. Raises BenchError where the folder holds another, or none."""
        self.path = folder / "run.json"
        if resume and self.path.exists():
            self.facts = self._reopened(asked)
            self.facts.setdefault("resumed", []).append(list(clock.anchor()))
            self._set_aside()
        else:
            _make_folder(folder)
            self.facts = {
                "llm_bench_run": 1,
                "run_id": secrets.token_hex(4),
                "version": __version__,
                "command": sys.argv[1:],
                "anchor": list(clock.anchor()),
                "host": host(),
                **asked,
                "cells": [],
            }
        self.run_id = str(self.facts["run_id"])
        self.save()

    def _reopened(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        try:
            facts = json.loads(self.path.read_text())
            cells = [cell["name"] for cell in facts["cells"]]
        except (OSError, ValueError, LookupError, TypeError) as e:
            raise BenchError(f"{self.path}: cannot be resumed: {type(e).__name__}: {e}; give a new --out") from None
        for key, now in json.loads(json.dumps(asked)).items():  # as it would be read back
            before = facts.get(key)
            if before != now:
                raise BenchError(
                    f"--resume: {_difference(key, before, now)} since the run in {self.path.parent} was begun "
                    f"({len(cells)} cells); ask for the same, or give a new --out"
                )
        return dict(facts)

    def _set_aside(self) -> None:
        """Move what unfinished cells left out of the reports' sight. Nothing is deleted."""
        for cell in [c for c in self.facts["cells"] if not _is_done(c)]:
            attempt = self.attempt(cell["name"])
            (self.path.parent / ASIDE).mkdir(exist_ok=True)
            for file in self.path.parent.glob(f"{_escaped(cell['name'])}.*"):
                file.rename(self.path.parent / ASIDE / f"{attempt}-{file.name}")
            self.facts["cells"].remove(cell)
            self.facts.setdefault("set_aside", []).append(cell)

    def attempt(self, name: str) -> int:
        """How often this cell was begun and set aside: each attempt has prompts of its own."""
        return sum(cell["name"] == name for cell in self.facts.get("set_aside", []))

    def is_done(self, name: str) -> bool:
        return any(cell["name"] == name and _is_done(cell) for cell in self.facts["cells"])

    def header(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What a record file says of the run, so that it can be read alone."""
        facts = {key: value for key, value in self.facts.items() if key not in ("cells", "set_aside", "declared")}
        return facts | {"settings": {**facts["settings"], **settings}}

    def begin_cell(self, name: str, facts: Mapping[str, Any]) -> None:
        self.facts["cells"].append({"name": name, "file": f"{name}.arrow", **facts})
        self.save()

    def end_cell(self, name: str, end: Mapping[str, Any]) -> None:
        next(c for c in self.facts["cells"] if c["name"] == name)["end"] = end
        self.save()

    def save(self) -> None:
        part = self.path.with_suffix(".part")
        try:
            part.write_text(json.dumps(self.facts, indent=1, allow_nan=False) + "\n")
            part.replace(self.path)
        except ValueError as e:
            raise BenchError(f"{self.path}: the settings cannot be stored: {e}") from None
        except OSError as e:
            if e.errno not in DISK_ERRORS:
                raise
            raise BenchError(f"{self.path}: {e.strerror}; what was measured before is readable there") from None


def _is_done(cell: Mapping[str, Any]) -> bool:
    return (cell.get("end") or {}).get("reason") in DONE


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _difference(key: str, before: Any, now: Any) -> str:
    """The first thing in which two JSON values differ, with both readings."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in [*before, *now]:
            if before.get(name) != now.get(name):
                return _difference(f"{key}.{name}", before.get(name), now.get(name))
    if _is_list(before) and _is_list(now) and len(before) == len(now):
        for i, (a, b) in enumerate(zip(before, now, strict=True)):
            if a != b:
                return _difference(f"{key}[{i}]", a, b)
    return f"{key} has changed from {before!r} to {now!r}"


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            finish = ", or --resume to finish the run in it" if (out / "run.json").exists() else ""
            raise BenchError(
                f"--out {out}: the folder is not empty, and nothing is overwritten; give a new name{finish}"
            )
    except OSError as e:
        raise BenchError(f"--out {out}: {e.strerror}") from None
