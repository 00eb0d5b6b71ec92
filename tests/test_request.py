"""A Request is made as any frozen dataclass is, only faster: same arguments, same defaults, closed once it is made."""

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from llm_bench.request import Request

NAMES = [f.name for f in fields(Request)]


def test_every_field_is_an_argument_and_is_kept() -> None:
    assert list(inspect.signature(Request).parameters) == NAMES
    values = {name: (name, i) for i, name in enumerate(NAMES)}
    assert {name: getattr(Request(**values), name) for name in NAMES} == values  # type: ignore[arg-type]
    assert Request(*values.values()) == Request(**values)  # type: ignore[arg-type]


def test_what_is_not_said_is_the_default() -> None:
    request, said = Request(5, None, line=7), {"tokens_in": 5, "tokens_out": None, "line": 7}
    defaults = {f.name: f.default for f in fields(Request) if f.name not in (*said, "extra")}
    assert {name: getattr(request, name) for name in NAMES} == defaults | said | {"extra": {}}
    assert repr(request).startswith("Request(tokens_in=5, tokens_out=None, at_s=None")
    with pytest.raises(TypeError, match=r"Request.__init__\(\) missing .*'tokens_out'"):
        Request(5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'tokens'"):
        Request(5, 6, tokens=7)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "made",
    [
        Request(5, 6, line=7),
        replace(Request(5, 6), line=7),
        copy.copy(Request(5, 6, line=7)),
        pickle.loads(pickle.dumps(Request(5, 6, line=7, extra={}))),
    ],
)
def test_a_request_cannot_be_changed_however_it_came_to_be(made: Request) -> None:
    assert type(made) is Request
    assert made == Request(5, 6, line=7)
    with pytest.raises(FrozenInstanceError):
        made.line = 8  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del made.line
    with pytest.raises((AttributeError, TypeError)):
        made.unknown = 8  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        Request(5, 6).extra["x"] = 1  # type: ignore[index]
