"""Faults on purpose: `--fault WHEN:WHAT` -> Fault, what each is made of, and what of it is found beside the records.

Pure. `fault_doing` does them, in a process of its own; `recovery` reads from the records what became of the requests.
"""

import json
import re
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from llm_bench.errors import BenchError

MOST = 100  # faults of a run: each has a thread, and none can be told apart from the next if there are more
LONGEST_S = 86_400.0
MOST_PID = 4_194_304  # of Linux
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
SIGNALS = ("TERM", "INT", "HUP", "KILL", "QUIT", "STOP", "CONT", "USR1", "USR2", "ABRT")
DROPS = ("refuse", "blackhole")
_TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s|min)", re.A)
_TIMES = {"ms": 1e-3, "s": 1.0, "min": 60.0}
_RATE = re.compile(r"(\d+(?:\.\d+)?)(bit|kbit|Mbit|Gbit)", re.A)
_RATES = {"bit": 1.0, "kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9}
_WORD = re.compile(r"[a-z_]+", re.A)
# A word, its quotes kept, that only a shell gives a meaning to. An & or > within one may be a URL's, or a name's.
_SHELL = re.compile(r"\|\|?|&&?|;|.*[^\\];|\d*[<>].*|\"?\$[({A-Za-z_].*|\"?`.*|~(/.*)?", re.A)
_SETTING = re.compile(r"[A-Za-z_]\w*=.*", re.A)


class Fault(NamedTuple):
    """One that was asked for. It is done in each cell, `at_ns` after the cell's drive began."""

    text: str  # as typed, WHEN too
    at_ns: int
    kind: str  # a row of FAULTS
    what: str  # as typed, without WHEN
    args: Mapping[str, Any]  # by kind, JSON-able


class Kind(NamedTuple):
    """A kind of fault. `read` makes args of what follows its name, or raises ValueError saying what would be right."""

    read: Callable[[str], dict[str, Any]]
    example: str
    text: str


# ---- what is typed


def parse(texts: Sequence[str]) -> tuple[Fault, ...]:
    """In the order of their times. Raises BenchError."""
    if len(texts) > MOST:
        raise BenchError(f"--fault: {len(texts)} faults, expected at most {MOST}")
    found = tuple(sorted(map(_parse, texts), key=lambda fault: fault.at_ns))
    _check_apart([fault for fault in found if fault.kind == "net"])
    return found


def _check_apart(net: Sequence[Fault]) -> None:
    """What lasts while the next begins has no end of its own to be found. Those of one moment are one trouble."""
    for fault, then in combinations(net, 2):
        for_s = fault.args["for_s"]
        moment = for_s is None and fault.args["do"] == "reset"
        if fault.at_ns == then.at_ns or moment:
            continue
        if for_s is None or fault.at_ns + for_s * 1e9 > then.at_ns:
            until = "to the cell's end" if for_s is None else f"until {fault.at_ns / 1e9 + for_s:g}s"
            raise BenchError(
                f"--fault {then.text!r}: {fault.text!r} still lasts then ({until}), and neither's end could be told; "
                "expected one after the other, each with for=, or both at one moment"
            )


def _parse(text: str) -> Fault:
    when, _, what = text.partition(":")
    what = what.strip()
    try:
        at_s = _seconds(when.strip())
        if not what.isprintable():
            raise ValueError("a character that cannot be printed")
        kind, rest = _kind_of(what)
        args = FAULTS[kind].read(rest.strip())
    except ValueError as e:
        raise BenchError(f"--fault {text!r}: {e}") from None
    return Fault(text, round(at_s * 1e9), kind, what, args)


def _kind_of(what: str) -> tuple[str, str]:
    method, _, rest = what.partition(" ")
    if method in METHODS:
        return "http", what
    kind, sign, rest = what.partition(":")
    if not sign or kind not in FAULTS or kind == "http":
        examples = "; ".join(f"30s:{kind.example}" for kind in FAULTS.values())
        raise ValueError(f"expected WHEN:WHAT, such as {examples}")
    return kind, rest


def _seconds(text: str, what: str = "WHEN") -> float:
    match = _TIME.fullmatch(text)
    seconds = float(match[1]) * _TIMES[match[2]] if match else -1.0
    if not 0 <= seconds <= LONGEST_S:
        raise ValueError(f"{what} is {text!r}, expected a time of at most a day with its unit: 500ms, 30s or 2min")
    return seconds


def _http(text: str) -> dict[str, Any]:
    method, url, body = (*text.split(maxsplit=2), "", "")[:3]
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or "@" in url or not url.isascii():
        raise ValueError("expected METHOD URL [JSON], the URL without user or key, as POST http://host:8000/fault {}")
    if body:
        try:
            json.loads(body)
        except ValueError as e:
            raise ValueError(f'the body is not JSON ({e}), expected such as {{"kind": "oom"}}') from None
    return {"method": method, "url": url, "body": body}


def _cmd(text: str) -> dict[str, Any]:
    try:
        words = shlex.split(text)
    except ValueError as e:
        raise ValueError(f"{e}, expected a command as a shell would split it: cmd:systemctl restart vllm") from None
    if not words:
        raise ValueError("no command after cmd:, expected such as cmd:systemctl restart vllm")
    if (word := _for_a_shell(text)) is not None:
        raise ValueError(f"{word} is for a shell, and cmd: has none: expected sh:{text}, or the word in quotes")
    return {"words": words}


def _for_a_shell(text: str) -> str | None:
    """The first word that a shell would not hand on as it is: of |, a redirection, $NAME; A=1 before the program."""
    found = shlex.shlex(text, posix=False)
    found.whitespace_split, found.commenters = True, ""
    for number, word in enumerate(found):
        if _SHELL.fullmatch(word) or (not number and _SETTING.fullmatch(word)):
            return word
    return None


def _sh(text: str) -> dict[str, Any]:
    if not text:
        raise ValueError("nothing for the shell after sh:, expected such as sh:kill $(cat server.pid)")
    return {"text": text}


def _signal(text: str) -> dict[str, Any]:
    name, _, pid = text.partition(":")
    name = name.removeprefix("SIG")
    if name not in SIGNALS:
        raise ValueError(f"signal {name!r}, expected one of {', '.join(SIGNALS)}, as signal:TERM:4711")
    if not re.fullmatch(r"\d{1,10}", pid, re.A) or not 2 <= int(pid) <= MOST_PID:
        raise ValueError(f"process {pid!r}, expected the id of one process, 2 or more, as signal:TERM:4711")
    return {"signal": int(signal.Signals[f"SIG{name}"]), "pid": int(pid)}


def _net(text: str) -> dict[str, Any]:
    """{"do": a row of NET, "value": of its unit, "for_s": None until the cell's end}."""
    first, *others = [part.strip() for part in text.split(",")]
    name, _, value = first.partition("=")
    if name not in NET:
        raise ValueError(f"net:{name}, expected one of {', '.join(NET.values())}; more with for=5s")
    read = {"delay": _delay, "bandwidth": _bandwidth, "drop": _drop}.get(name, _nothing)
    for_s = None
    for part in others:
        if not part.startswith("for=") or for_s is not None:
            raise ValueError(f"net:{name} has no {part!r}, expected for=TIME once, such as {NET[name]},for=5s")
        for_s = _some_seconds(part.removeprefix("for="), "for")
    return {"do": name, "value": read(value), "for_s": for_s}


NET = {
    "delay": "delay=50ms",
    "bandwidth": "bandwidth=1Mbit",
    "stall": "stall",
    "drop": "drop (or drop=blackhole)",
    "reset": "reset",
}


def _delay(text: str) -> float:
    return _some_seconds(text, "delay")


def _some_seconds(text: str, what: str) -> float:
    seconds = _seconds(text, what)
    if not seconds:
        raise ValueError(f"{what} is {text!r}, which is no fault, expected more than nothing: 50ms or 5s")
    return seconds


def _bandwidth(text: str) -> float:
    """Bytes a second."""
    match = _RATE.fullmatch(text)
    if match is None or not float(match[1]):
        raise ValueError(f"bandwidth is {text!r}, expected bits a second such as 1Mbit or 500kbit")
    return float(match[1]) * _RATES[match[2]] / 8


def _drop(text: str) -> str:
    if text not in ("", *DROPS):
        raise ValueError(f"drop={text}, expected {' or '.join(DROPS)}")
    return text or DROPS[0]


def _nothing(text: str) -> None:
    if text:
        raise ValueError(f"={text} after what has no value, expected stall or reset alone")


def _engine(text: str) -> dict[str, Any]:
    """{"body": what the engine's /fault is sent}; which kinds and fields there are is its own word."""
    kind, *others = [part.strip() for part in text.split(",")]
    if not _WORD.fullmatch(kind):
        raise ValueError(f"engine:{kind}, expected a kind of the bundled engine's faults, as engine:stall,seconds=2")
    body: dict[str, Any] = {"kind": kind}
    for part in others:
        name, sign, value = part.partition("=")
        if not sign or not _WORD.fullmatch(name) or name in body:
            raise ValueError(f"{part!r}, expected field=value once each, as engine:slow_step,steps=100,factor=5")
        try:
            body[name] = json.loads(value)
        except ValueError:
            body[name] = value
    return {"body": body}


def wrong_order(body: Mapping[str, Any], kinds: Mapping[str, Mapping[str, Any]]) -> str:
    """What an engine that describes its faults so would refuse in an order, and what would be right; "" for nothing.

    `kinds`: by kind, each field's JSON schema: an enum, or a type with a minimum and a maximum.
    """
    fields = kinds.get(body["kind"])
    if fields is None:
        return f"this engine has no fault {body['kind']!r}, expected one of {', '.join(kinds)}"
    for name, value in body.items():
        if name not in fields:
            own = ", ".join(field for field in fields if field != "kind")
            return f"{body['kind']} has no field {name!r}, expected of {own}"
        rule = fields[name]
        if "enum" in rule and str(value) not in (words := [str(word) for word in rule["enum"] if word is not None]):
            return f"{name} is {value!r}, expected one of {', '.join(words)}"
        if "minimum" in rule:
            whole = "integer" in rule["type"]
            low, high = rule["minimum"], rule["maximum"]
            if type(value) not in ((int,) if whole else (int, float)) or not low <= value <= high:
                number = "a whole number" if whole else "a number"
                return f"{name} is {value!r}, expected {number} from {low:g} to {high:g}"
    return ""


FAULTS: dict[str, Kind] = {
    "http": Kind(_http, 'POST http://host:8000/fault {"kind": "oom"}', "a request to any URL"),
    "cmd": Kind(_cmd, "cmd:systemctl restart vllm", "a command, without a shell"),
    "sh": Kind(_sh, "sh:kill $(cat server.pid)", "a command for /bin/sh"),
    "signal": Kind(_signal, "signal:TERM:4711", "a signal to a process"),
    "net": Kind(_net, "net:delay=50ms,for=5s", "the way to the target, through a TCP proxy beside the run"),
    "engine": Kind(_engine, "engine:crash", "a fault of the bundled engine, served with --allow-faults"),
}


# ---- what became of it


class Done(NamedTuple):
    """A fault as it was done in one cell; stamps of clock.now_ns, 0 where it was not begun."""

    what: str
    kind: str
    planned_ns: int
    begun_ns: int
    ended_ns: int
    ok: bool  # it was done as asked; what the target made of it is another matter
    result: str  # its answer, exit code and last words, or why it was not done

    @property
    def is_remedy(self) -> bool:
        return self.kind == "signal" and re.match(r"signal:\s*(SIG)?CONT:", self.what) is not None

    @property
    def text(self) -> str:
        how = f": {self.result}" if self.result else ""
        return f"{self.what}{'' if self.ok else ', which failed'}{how}"


class Log(NamedTuple):
    """NAME.faults.jsonl: what was done in a cell. `added_ms`: of a round trip through the proxy; None without one."""

    start_ns: int
    added_ms: float | None
    done: tuple[Done, ...]


def path_of(folder: Path, name: str) -> Path:
    """Where what was done in a cell lies."""
    return folder / f"{name}.faults.jsonl"


def read(path: Path) -> Log:
    """Raises BenchError for a file that is none; a torn last line is left out."""
    try:
        head, *lines = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
        if head["llm_bench_faults"] != 1:
            raise ValueError("another version wrote it")
        return of_document({**head, "done": lines})
    except OSError as e:
        raise BenchError(f"{path}: cannot be read: {e.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise BenchError(f"{path}: no faults of llm-bench: {type(e).__name__}: {e}") from None


def document(log: Log) -> dict[str, Any]:
    """The same as run.json holds it, in how a cell ended."""
    return {"start_ns": log.start_ns, "added_ms": log.added_ms, "done": [done._asdict() for done in log.done]}


def of_document(found: Mapping[str, Any]) -> Log:
    """Raises ValueError, KeyError, TypeError or AttributeError for what is none."""
    rows = [
        Done(
            str(d["what"]),
            str(d["kind"]),
            int(d["planned_ns"]),
            int(d["begun_ns"]),
            int(d["ended_ns"]),
            bool(d["ok"]),
            str(d["result"]),
        )
        for d in found["done"]
    ]
    added = found["added_ms"]
    rows.sort(key=lambda done: (done.begun_ns or done.planned_ns, done.planned_ns))
    return Log(int(found["start_ns"]), None if added is None else float(added), tuple(rows))


def of_end(end: Mapping[str, Any]) -> Log | None:
    """What the word on how a cell ended says of its faults; None where there were none, or it cannot be read."""
    try:
        return of_document(end["faults"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
