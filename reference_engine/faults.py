"""Faults on order: which step or request goes wrong, and how; the same ones each time for the same seed.

Pure: the engine and the server do what is said here. A fault is planted by `POST /fault` as {"kind": ..., fields}.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple


class Number(NamedTuple):
    default: float  # an int where the field is whole
    low: float
    high: float
    text: str


class Choice(NamedTuple):
    values: tuple[str, ...]  # the first is the default
    text: str


Field = Number | Choice


class Kind(NamedTuple):
    """What a fault does. `of`: step | request | stream, what it counts and strikes."""

    of: str
    text: str
    fields: Mapping[str, Field]


def _steps(default: int) -> Number:
    return Number(default, 1, 10**6, "so many steps in a row")


AFTER = Number(1, 0, 10**6, "tokens that go out before; an answer that has no more ends well")
FAULTS: dict[str, Kind] = {
    "oom": Kind(
        "step",
        "allocations fail in the runner: the step is computed in halves, who fails alone ends with 503",
        {"steps": _steps(1), "calls": Number(1, 1, 10**6, "calls of the runner that fail in such a step")},
    ),
    "memory_pressure": Kind(
        "step",
        "KV blocks are kept from everybody, as far as the last who runs can do without",
        {"steps": _steps(50), "share": Number(0.5, 0.0, 1.0, "of all blocks")},
    ),
    "slow_step": Kind(
        "step", "steps take longer", {"steps": _steps(10), "factor": Number(2.0, 1.0, 1000.0, "times as long")}
    ),
    "stall": Kind("step", "nothing happens for a while", {"steps": _steps(1), "seconds": Number(1.0, 0.0, 600.0, "")}),
    "crash": Kind("step", "the step loop dies, and is restarted", {"steps": _steps(1)}),
    "http_error": Kind(
        "request",
        "a request is answered with an error, or its connection reset",
        {"status": Choice(("500", "429", "503", "reset"), "what it gets")},
    ),
    "delay_headers": Kind(
        "request",
        "an answer's first byte waits, its tokens do not: they come at once then",
        {"seconds": Number(1.0, 0.0, 600.0, "from when it would have gone")},
    ),
    "cut_stream": Kind(
        "stream",
        "the connection ends in the middle of an answer",
        {
            "after": AFTER,
            "how": Choice(("rst", "fin", "half_chunk"), "a reset; a close without the last chunk, or within a chunk"),
        },
    ),
    "error_event": Kind("stream", "an error event ends the answer, no [DONE]", {"after": AFTER}),
}
COMMON: dict[str, dict[str, Field]] = {
    "step": {"at_step": Number(0, 0, 10**9, "steps that go well before, counted from now")},
    "request": {
        "share": Number(1.0, 0.0, 1.0, "of requests"),
        "requests": Number(0, 0, 10**9, "most that are struck; 0: no limit"),
        "seed": Number(0, 0, 2**63 - 1, "decides who is struck"),
    },
}
COMMON["stream"] = COMMON["request"]


@dataclass(slots=True)
class Fault:
    """One that was planted. `seen` and `hits` grow in the thread that it strikes, nowhere else."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    seen: int = 0  # steps or requests that came since
    hits: int = 0  # of them struck

    @property
    def of(self) -> str:
        return FAULTS[self.kind].of

    @property
    def active(self) -> bool:
        if self.of == "step":
            return bool(self.seen < self.fields["at_step"] + self.fields["steps"])
        return not self.fields["requests"] or self.hits < self.fields["requests"]

    def strikes(self) -> bool:
        """Whether the step or request that comes next is struck."""
        if not self.active:
            return False
        if self.of == "step":
            return bool(self.seen >= self.fields["at_step"])
        return bool(_draw(self.fields["seed"], self.kind, self.seen) < self.fields["share"])

    def pass_one(self) -> bool:
        """The same, and it has come."""
        struck = self.strikes()
        self.seen += 1
        self.hits += struck
        return struck


class Trouble(NamedTuple):
    """What goes wrong in one step."""

    failing_calls: int = 0
    factor: float = 1.0
    stall_s: float = 0.0
    crash: bool = False


class WorkerCrash(Exception):  # noqa: N818 - not an error: it was asked for
    """The step loop dies of a planted fault."""


def read(body: Mapping[str, Any]) -> Fault:
    """A fault as ordered, its other fields by default. Raises ValueError."""
    name = body.get("kind")
    kind = FAULTS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"kind: would be right: {', '.join(FAULTS)}")
    known = fields_of(kind)
    unknown = next((f for f in body if f not in known and f != "kind"), None)
    if unknown is not None:
        raise ValueError(f"{name} has no field {unknown[:50]!r}; would be right: {', '.join(known)}")
    return Fault(str(name), {f: _value(f, rule, body.get(f)) for f, rule in known.items()})


def fields_of(kind: Kind) -> dict[str, Field]:
    return {**COMMON[kind.of], **kind.fields}


def trouble(faults: Iterable[Fault]) -> Trouble:
    """Of the step that comes now; counts it."""
    calls, factor, stall_s, crash = 0, 1.0, 0.0, False
    for fault in faults:
        if fault.of != "step" or not fault.pass_one():
            continue
        calls += fault.fields.get("calls", 0)
        factor *= fault.fields.get("factor", 1.0)
        stall_s += fault.fields.get("seconds", 0.0)
        crash = crash or fault.kind == "crash"
    return Trouble(calls, factor, stall_s, crash)


def held_share(faults: Iterable[Fault]) -> float:
    """Share of all blocks that nobody may have in the step that comes next; counts nothing."""
    return max((f.fields["share"] for f in faults if f.kind == "memory_pressure" and f.strikes()), default=0.0)


def struck(faults: Iterable[Fault], of: str) -> dict[str, Fault]:
    """The faults of the request or stream that comes now, by kind; of two of a kind the first planted. Counts it."""
    found: dict[str, Fault] = {}
    for fault in faults:
        if fault.of == of and fault.pass_one():
            found.setdefault(fault.kind, fault)
    return found


def _value(name: str, rule: Field, value: Any) -> Any:
    if isinstance(rule, Choice):
        text = str(value) if type(value) in (int, str) else rule.values[0] if value is None else ""
        if text not in rule.values:
            raise ValueError(f"{name}: would be right: {' | '.join(rule.values)}")
        return text
    if value is None:
        return rule.default
    whole = type(rule.default) is int
    if type(value) not in ((int,) if whole else (int, float)) or not rule.low <= value <= rule.high:
        right = "an integer" if whole else "a number"
        raise ValueError(f"{name}: would be right: {right} from {rule.low:g} to {rule.high:g}")
    return value if whole else float(value)


def _draw(seed: int, kind: str, number: int) -> float:
    """In [0, 1), by seed, kind and number alone."""
    digest = blake2b(struct.pack("<qq", seed, number) + kind.encode(), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) / 2**53
