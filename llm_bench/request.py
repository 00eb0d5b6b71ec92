"""Request, one row of work; Trace, what a file of them held."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

MOST_TOKENS = 10_000_000  # of a prompt or an answer: longer than any context, and a text of it still fits in memory
LONGEST_S = (
    10 * 366 * 86400
)  # of a trace, a pause, a plan: ten years. More is a mistake, and ns of it must fit an int64

_NOTHING: Mapping[str, Any] = MappingProxyType({})  # one for all: a dict each would be 64 MB in a million rows


def _quickly_filled(frozen: type[T]) -> type[T]:
    """The same dataclass, as frozen, with an __init__ of the same arguments that fills it four times as fast.

    dataclass fills a frozen class by a call of object.__setattr__ for each field: 7 of the 11 µs that a row of a trace
    took to read. Here the new object is of a class with the same slots that is open, its fields are stored as in any
    other class, and then it is frozen. A factory is called once: what it makes is shared, so it must not change.
    """
    given = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(frozen)}  # type: ignore[arg-type]
    arguments = ", ".join(name if default is MISSING else f"{name}=given[{name!r}]" for name, default in given.items())
    stores = "\n    ".join(f"self.{name} = {name}" for name in given)
    text = f"""
def __init__(self, {arguments}):
    set_(self, "__class__", opened)
    {stores}
    self.__class__ = frozen
"""
    opened = type("Open" + frozen.__name__, (), {"__slots__": tuple(given)})
    made: dict[str, Any] = {"given": given, "set_": object.__setattr__, "opened": opened, "frozen": frozen}
    exec(text, made)  # as dataclass makes its own: the fields are written down once
    made["__init__"].__qualname__ = f"{frozen.__qualname__}.__init__"
    frozen.__init__ = made["__init__"]  # type: ignore[method-assign]
    return frozen


@_quickly_filled
@dataclass(frozen=True, slots=True)
class Request:
    """One row of work. At most one of prompt, messages, prompt_token_ids, body is given; none: text is made up."""

    tokens_in: int  # prompt tokens planned, chat template not counted; cumulative over a session's turns
    tokens_out: int | None  # answer tokens asked; None: the server decides
    at_s: float | None = None  # seconds since the trace's first request
    prompt: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    hash_ids: tuple[int, ...] = ()  # one id per block of the prompt: equal ids in equal places are equal text
    block_size: int = 0  # tokens of a block, 0 without hash_ids
    session: str = ""  # turns of one conversation share it; "" is a conversation of one turn
    turn: int = 0
    tokens_new: int = 0  # of tokens_in, what this turn's user adds (turn > 0 only)
    think_s: float | None = None  # pause after the end of the turn before; None: not before at_s
    request_class: str = ""
    priority: int = 0
    cancel_after_s: float | None = None  # the client leaves this long after sending
    model: str = ""
    extra: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)  # put into the body as it stands
    body: Mapping[str, Any] | None = None  # as captured, sent as it stands but for model and streaming
    client: str = ""  # who sent it, where the trace says so: rates and lengths differ by client
    line: int = 0  # of the trace file, for errors


class Trace(NamedTuple):
    """What a file held, and what its reader has to say about it."""

    requests: list[Request]
    format: str
    path: str
    notes: list[str]  # statements for the user: unit, resolution, reading used, "prompts are unique ..."
    skipped: dict[str, int]  # reason -> rows left out, each counted in the report
    facts: Mapping[str, Any] = _NOTHING  # what the file's own numbers were, by name: FACTS of trace.py
