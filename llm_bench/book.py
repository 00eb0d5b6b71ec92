"""run.json: what was asked, on what machine, how each cell ended. Rewritten, atomically, as each cell begins and ends.

A run holds its folder by a lock, and is finished later only where it would go on with the same work.
"""

import errno
import fcntl
import hashlib
import json
import platform
import re
import secrets
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import IO, Any

from llm_bench import __version__, clock, records, shapes
from llm_bench.errors import BenchError
from llm_bench.host import host
from llm_bench.shapes import Shape

ASIDE = "partial"  # folder in a run's: what a cell had measured before a resumed run measured it again
BOOK_FILE = "run.json"
PART = ".part"  # instead of its suffix: what is being written
LOCK = ".lock"  # file in a run's folder: whoever measures holds it, and the kernel lets go of it at death
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of file systems that know none: a run goes on without
DONE = ("exhausted", "duration", "overloaded")  # reasons of a cell that is not measured again
# What has to be equal for a run to be resumed, but for what changes no number: where its files lie, how long we wait.
ASKED = ("version", "versions", "cpu", "settings", "targets", "declared", "loads", "trace", "hashes")
FREE: Mapping[str, tuple[str, ...]] = {
    "settings": ("out", "ready_s", "slo", "deadlines"),
    "trace": ("path", "bytes", "sha256"),  # the rows have a hash of their own: a trace may be packed anew
}
OUR_STACK = ("httptools", "numpy", "orjson", "pyarrow", "uvloop")  # packages whose version can change a number
OF_BOOK = ("cells", "set_aside", "declared", "hashes", "learnt", "probed", "salt")  # and in no header of records

_CELL = re.compile(r"\d{3,9}-[\w=.-]+")
_CELL_NAME = Shape("the name of a cell, as 000-t-c=1", lambda v: isinstance(v, str) and bool(_CELL.fullmatch(v)), True)
_HEX = Shape("hexadecimal digits", lambda v: isinstance(v, str) and bool(re.fullmatch("[0-9a-f]{8,64}", v)), True)
BOOK: dict[str, Shape] = shapes.RUN | {
    "run_id": _HEX,
    "salt": _HEX,
    "host": shapes.ITEM,
    "settings": shapes.ITEM,
    "trace": shapes.ITEM,
    "hashes": shapes.ITEM,
    "probed": shapes.OBJECT,
    "cells": shapes.LIST._replace(required=True),
    "cells[].name": _CELL_NAME,
    "set_aside": shapes.LIST,
    "set_aside[]": shapes.ITEM,
    "set_aside[].name": _CELL_NAME,
    "resumed": shapes.LIST,
}


class Book:
    """The facts of run.json in `folder`, which is held from here to `close`.

    `asked`: the keys of ASKED that the command line decides. `private`: target -> header -> value, of which only salted
    hashes are kept; a key named by its variable is not among them, since keys are renewed.
    """

    def __init__(
        self,
        folder: Path,
        asked: Mapping[str, Any],
        private: Mapping[str, Mapping[str, str]] | None = None,
        *,
        resume: bool = False,
    ) -> None:
        """Opens a new run, or one to be finished. Raises BenchError where the folder holds another, or none."""
        self.path = folder / BOOK_FILE
        resume = resume and self.path.exists()
        self._lock = _hold(folder, resume=resume)
        try:
            resume = resume and not _unbegun(folder)  # nothing was measured that other work could be mixed with
            before = self._read() if resume else {}
            fresh = {"llm_bench_run": 1, "run_id": secrets.token_hex(4), "salt": secrets.token_hex(8)}
            self.facts: dict[str, Any] = fresh | before
            hashes = {**asked.get("hashes", {}), "headers": _salted(private or {}, str(self.facts["salt"]))}
            ours = {"version": __version__, "versions": _versions(), "cpu": host()["cpu"], "hashes": hashes}
            now = _as_stored({**asked, **ours})
            if resume:
                self._compare({**before, "cpu": before["host"].get("cpu")}, now, ASKED)
                self.facts |= {key: now[key] for key in FREE if key in now}
            else:
                here = {"command": sys.argv[1:], "anchor": list(clock.anchor()), "host": host(), "cells": []}
                del now["cpu"]  # it stands in host
                self.facts |= here | now
                self.save()
        except BaseException:
            self.close()
            raise
        self.run_id = str(self.facts["run_id"])
        self._resumes = resume

    def close(self) -> None:
        """Let go of the folder."""
        if self._lock is not None:
            self._lock.close()

    def _read(self) -> dict[str, Any]:
        try:
            found = shapes.parse(self.path.read_bytes(), BOOK, str(self.path))
            names = [cell["name"] for cell in found["cells"]]
            if twice := {name for name in names if names.count(name) > 1}:
                raise BenchError(f"{self.path}: cells: {min(twice)} is listed twice")
            return found
        except BenchError as e:
            raise BenchError(f"{e}; it cannot be resumed: give a new --out") from None
        except OSError as e:
            raise BenchError(f"{self.path}: cannot be resumed: {e.strerror}; give a new --out") from None

    def _compare(self, before: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str]) -> None:
        for key in keys:
            was, is_ = (_without(facts.get(key), FREE.get(key, ())) for facts in (before, now))
            if was != is_:
                raise BenchError(
                    f"--resume: {_difference(key, was, is_)} since the run in {self.path.parent} was begun "
                    f"({len(self.facts['cells'])} cells); ask for the same, or give a new --out"
                )

    def begin(self, probed: Mapping[str, Any], together: Iterable[Collection[str]] = ()) -> None:
        """The targets have answered: `probed` holds what of it decides the work, by target; now cells may begin.

        `together`: names of cells that are one measurement, as those of a pair: where one of them is not done, a
        resumed run measures them all again.

        Raises BenchError, before a file is moved, where a resumed run meets other targets than it was begun with.
        """
        now = _as_stored({"probed": probed})
        if self.facts.get("probed") is not None:
            kept = self.facts["probed"]  # an earlier version kept less of a target: nothing to hold that against
            alike = {t: {k: v for k, v in of.items() if k in kept.get(t, of)} for t, of in now["probed"].items()}
            self._compare(self.facts, {"probed": alike}, ("probed",))
        self.facts |= now
        if self._resumes:
            self.facts["resumed"] = [*(self.facts.get("resumed") or []), list(clock.anchor())]
            try:
                self._set_aside(together)
            except OSError as e:
                raise BenchError(
                    f"{self.path.parent / ASIDE}: what unfinished cells left cannot be moved there: {e.strerror}"
                ) from None
        self.save()

    def keep_learnt(self, facts: Mapping[str, Mapping[str, str]]) -> None:
        """What was asked of the targets when the load was over, by target."""
        self.facts["learnt"] = _as_stored(facts)
        self.save()

    def _set_aside(self, together: Iterable[Collection[str]]) -> None:
        """Move what unfinished cells left out of the reports' sight. Nothing is deleted."""
        aside = self.path.parent / ASIDE
        halves = {name for names in together if not all(map(self.is_done, names)) for name in names}
        for cell in [c for c in self.facts["cells"] if c["name"] in halves or not self._is_done(c)]:
            aside.mkdir(exist_ok=True)
            left = f"{_escaped(cell['name'])}.*"
            free = next(n for n in count(self.attempt(cell["name"])) if not any(aside.glob(f"{n}-{left}")))
            for file in list(self.path.parent.glob(left)):
                file.rename(aside / f"{free}-{file.name}")
            self.facts["cells"].remove(cell)
            self.facts["set_aside"] = [*(self.facts.get("set_aside") or []), cell]

    def attempt(self, name: str) -> int:
        """How often this cell was begun and set aside: each attempt has prompts of its own."""
        return sum(cell["name"] == name for cell in self.facts.get("set_aside") or [])

    def is_done(self, name: str) -> bool:
        return any(cell["name"] == name and self._is_done(cell) for cell in self.facts["cells"])

    def _is_done(self, cell: Mapping[str, Any]) -> bool:
        """Whether it ended as it should, with the files of all its workers in place."""
        end = cell.get("end") or {}
        files = records.files_of(self.path.parent).get(cell["name"], [])
        return end.get("reason") in DONE and sum(f.stat().st_size > 0 for f in files) >= (end.get("workers") or 1)

    def header(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What a record file says of the run, so that it can be read alone."""
        facts = {key: value for key, value in self.facts.items() if key not in OF_BOOK}
        return facts | {"settings": {**facts["settings"], **settings}}

    def begin_cell(self, name: str, facts: Mapping[str, Any]) -> None:
        self.facts["cells"].append({"name": name, "file": f"{name}.arrow", **facts})
        self.facts["cells"].sort(key=lambda cell: int(cell["name"].partition("-")[0]))  # one may be measured again
        self.save()

    def end_cell(self, name: str, end: Mapping[str, Any]) -> None:
        next(c for c in self.facts["cells"] if c["name"] == name)["end"] = end
        self.save()

    def save(self) -> None:
        part = self.path.with_suffix(PART)
        try:
            part.write_text(json.dumps(self.facts, indent=1, allow_nan=False) + "\n")
            part.replace(self.path)
        except ValueError as e:
            raise BenchError(f"{self.path}: the settings cannot be stored: {e}") from None
        except OSError as e:
            with suppress(OSError):
                part.unlink()  # half a book is of no use, and takes room
            raise BenchError(f"{self.path}: {e.strerror}; {records.left(self.path.parent)}") from None


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


def _as_stored(facts: Mapping[str, Any]) -> dict[str, Any]:
    """As it would be read back from JSON."""
    return dict(json.loads(json.dumps(facts)))


def _without(value: Any, names: Sequence[str]) -> Any:
    return {k: v for k, v in value.items() if k not in names} if isinstance(value, dict) else value


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in OUR_STACK:
        with suppress(PackageNotFoundError):  # uvloop is not everywhere
            found[package] = version(package)
    return found


def _salted(private: Mapping[str, Mapping[str, str]], salt: str) -> dict[str, dict[str, str]]:
    """A slow hash of each value (scrypt, RFC 7914): it may be a secret that is short enough to be guessed."""
    return {
        target: {
            name: hashlib.scrypt(f"{name}:{value}".encode(), salt=salt.encode(), n=1 << 14, r=8, p=1, dklen=8).hex()
            for name, value in headers.items()
        }
        for target, headers in private.items()
        if headers
    }


def _hold(folder: Path, *, resume: bool) -> IO[str] | None:
    """The open lock of a run's folder, which is made if it does not exist; None on file systems without locks."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = folder / LOCK
        if not resume and not lock.exists():
            _check_empty(folder)  # before a file is put into a folder of someone else's
        file = lock.open("a")
    except OSError as e:
        raise BenchError(f"--out {folder}: {e.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not resume:
            _check_empty(folder)
    except BlockingIOError:
        file.close()
        raise BenchError(
            f"--out {folder}: another llm-bench is measuring into it; wait until it has ended, or give a new --out"
        ) from None
    except OSError as e:
        file.close()
        if e.errno not in NO_LOCKS:
            raise BenchError(f"--out {folder}: {e.strerror}") from None
        if not resume:
            _check_empty(folder, held=False)
        return None
    except BenchError:
        file.close()
        raise
    return file


def _check_empty(folder: Path, *, held: bool = True) -> None:
    """`held`: nobody else measures into it. Else a run without a cell may be one that is about to begin."""
    if any(path.name != LOCK for path in folder.iterdir()) and not (held and _unbegun(folder)):
        finish = ", or --resume to finish the run in it" if (folder / BOOK_FILE).exists() else ""
        raise BenchError(
            f"--out {folder}: the folder is not empty, and nothing is overwritten; give a new name{finish}"
        )


def _unbegun(folder: Path) -> bool:
    """Whether the folder holds only what a run leaves that ended before its first cell (refused, or interrupted).

    The book itself, and the logs of servers that were started for it: the next run writes both anew.
    """
    book = folder / BOOK_FILE
    part = book.with_suffix(PART)
    if {path.name for path in folder.iterdir()} == {LOCK, part.name}:
        return part.is_file()  # it was killed while it wrote its first book
    try:
        found = shapes.parse(book.read_bytes(), BOOK, str(book))
    except (BenchError, OSError):
        return False
    ours = {LOCK, BOOK_FILE, part.name, *(f"{target}.log" for target in found.get("targets") or [])}
    begun = bool(found["cells"] or found.get("set_aside"))
    return not begun and all(path.is_file() and path.name in ours for path in folder.iterdir())
