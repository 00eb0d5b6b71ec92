"""PATH[:SHARE][:priority=N][:name=CLASS]: a trace that is a part of something, as the command line names it."""

from pathlib import Path
from typing import NamedTuple

from llm_bench.errors import BenchError

_COMPRESSED = (".gz", ".zst", ".bz2")


class Part(NamedTuple):
    path: str
    share: float | None  # any number, nan and inf too; None: none was given
    name: str  # class of its requests
    priority: int | None  # of its requests; None: each row's own


def parse(text: str, where: str, right: str) -> Part:
    """The path may hold colons. Raises BenchError that says where it was found, what is wrong and what is right."""
    path, *fields = text.split(":")
    options: dict[str, str] = {}
    while fields and "=" in fields[-1]:
        name, _, value = fields.pop().partition("=")
        if name not in ("priority", "name"):
            raise BenchError(f"{where} {text!r}: no option {name!r}, {right}")
        if name in options or not value:
            raise BenchError(f"{where} {text!r}: {name} {'twice' if value else 'without a value'}, {right}")
        options[name] = value
    share = _number(fields[-1]) if fields else None
    path = ":".join([path, *(fields if share is None else fields[:-1])])
    if not path.strip(":"):
        raise BenchError(f"{where} {text!r}: no path, {right}")
    priority = _number(options.get("priority", "0"))
    if priority is None or not (priority.is_integer() and -(2**31) <= priority < 2**31):
        raise BenchError(f"{where} {text!r}: priority {options['priority']!r}, expected a whole number of 32 bits")
    name = options.get("name") or class_of(path)
    return Part(path, share, name, int(priority) if "priority" in options else None)


def class_of(path: str) -> str:
    """The class of a trace's requests that is given no name: its file's, without what says its format."""
    name = Path(path)
    return Path(name.stem).stem if name.suffix in _COMPRESSED else name.stem


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
