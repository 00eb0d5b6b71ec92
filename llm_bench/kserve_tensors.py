"""The tensors of a KServe v2 request, filled from the model's own metadata: which inputs, of which shape, with what.

`extra.tensors` names them: NAME -> {datatype, shape, data}. What the target's table leaves out of an input, the model's
metadata fills in; where the table names inputs, those alone are sent, else all that the model does not call optional.
No I/O and no clock.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llm_bench.bodies import Ask, JsonObject, prompt_of
from llm_bench.errors import BenchError
from llm_bench.kserve_messages import DATATYPES
from llm_bench.prompts import prompt_hash
from llm_bench.request import Request

TENSORS = "tensors"  # of `extra`
MOST_ELEMENTS = 1 << 24  # of one tensor: a larger one is a mistake in its shape, and would fill the memory
_RIGHT = 'name them in targets.toml: [targets.NAME.extra.tensors]  INPUT = {datatype = "FP32", shape = [1, 4]}'
_LENGTHS = ("max_tokens", "max_new_tokens", "request_output_len")  # inputs that ask for an answer's length
_TURN = 97  # values of a filled tensor: below any vocabulary, a prime so that rows differ


class Input(NamedTuple):
    name: str
    datatype: str  # a key of DATATYPES
    shape: tuple[int, ...]
    values: Sequence[Any]  # row-major, as many as the shape says


def described(page: JsonObject, extra: Mapping[str, Any]) -> Mapping[str, Any]:
    """`extra` with the inputs of a model's metadata page in `extra.tensors`, the target's own words before its.

    Raises ValueError where neither names an input, BenchError where the target's own words are no table.
    """
    inputs = page.get("inputs")
    listed = {
        row["name"]: {"datatype": row["datatype"], "shape": row["shape"]} | _optional(row)
        for row in (inputs if isinstance(inputs, list) else [])
        if isinstance(row, dict) and isinstance(row.get("name"), str) and {"datatype", "shape"} <= row.keys()
    }
    own = extra.get(TENSORS)
    if own is not None and not isinstance(own, Mapping):
        raise BenchError(f"extra.{TENSORS} is of type {type(own).__name__}, expected a table; {_RIGHT}")
    if own:
        tables = {name: about if isinstance(about, Mapping) else {"data": about} for name, about in own.items()}
        return {**extra, TENSORS: {name: {**listed.get(name, {}), **about} for name, about in tables.items()}}
    needed = {name: about for name, about in listed.items() if not about.get("optional")}
    if not needed:
        raise ValueError(f"the model's metadata lists no inputs; {_RIGHT}")
    return {**extra, TENSORS: needed}


def _optional(row: JsonObject) -> JsonObject:
    parameters = row.get("parameters")
    said = parameters.get("optional") if isinstance(parameters, dict) else row.get("optional")
    return {"optional": True} if said is True else {}


def inputs_of(request: Request, ask: Ask, api: str) -> list[Input]:
    """Every input, filled: the same request has the same bytes, another text other ones.

    BYTES hold the request's text; numbers go round from a place that the text decides; an input by the name of a
    length holds the answer's. `data` of `extra.tensors` stands for all of this, a single value for the whole tensor.
    An open first size is the batch, 1; another is a length, as many as the prompt has tokens.
    """
    declared = _declared(request, ask)
    if not declared:
        raise _wrong(
            request,
            f"the model's inputs are not known; {_RIGHT}",
        )
    text = prompt_of(request, api)
    seed = prompt_hash(text.encode(errors="replace"))
    return [_filled(name, about, request, text, seed) for name, about in declared.items()]


def _declared(request: Request, ask: Ask) -> dict[str, JsonObject]:
    """`extra.tensors` of the target, and over it what the trace says of the same inputs."""
    found: dict[str, JsonObject] = {}
    for extra in (ask.extra, request.extra):
        tensors = extra.get(TENSORS) or {}
        if not isinstance(tensors, Mapping):
            raise _wrong(request, f"extra.{TENSORS} is not a table of tensors")
        for name, about in tensors.items():
            found[name] = {**found.get(name, {}), **(about if isinstance(about, Mapping) else {"data": about})}
    for name, about in found.items():
        shape = about.get("shape")
        sound = isinstance(shape, list | tuple) and all(type(size) is int and size >= -1 for size in shape)
        if about.get("datatype") not in tuple(DATATYPES) or not sound:  # whatever stands there: a list has no hash
            raise _wrong(
                request,
                f"extra.{TENSORS}.{name} has datatype {about.get('datatype')!r} and shape {shape!r}; expected "
                f"one of {', '.join(DATATYPES)}, and a list of sizes, -1 for one that is open",
            )
    return found


def _filled(name: str, about: JsonObject, request: Request, text: str, seed: int) -> Input:
    datatype, declared, given = about["datatype"], about["shape"], about.get("data")
    if isinstance(given, list | tuple):
        return _given(name, datatype, declared, flat(given), request)
    shape = _shape(declared, request.tokens_in or 1)
    count = math.prod(shape)
    if count > MOST_ELEMENTS:
        raise _wrong(request, f"input {name} of shape {list(declared)} would have {count:,} values; give its shape")
    if given is not None:
        return Input(name, datatype, shape, [given] * count)
    values: Sequence[Any] = [text] * count if datatype == "BYTES" else numbers(datatype, seed, count)
    if name in _LENGTHS and datatype.startswith(("INT", "UINT")):
        values = [min(request.tokens_out or 16, 2**31 - 1 if datatype[-1] in "24" else 127)] * count
    return Input(name, datatype, shape, values)


def _shape(declared: Sequence[int], length: int) -> tuple[int, ...]:
    return tuple(size if size != -1 else length if at else 1 for at, size in enumerate(declared))


def _given(name: str, datatype: str, declared: Sequence[int], values: list[Any], request: Request) -> Input:
    known = math.prod(size for size in declared if size != -1)
    shape = [1 if size == -1 else size for size in declared]
    if -1 in declared:  # the last open size takes what there is
        shape[len(declared) - 1 - list(declared)[::-1].index(-1)] = len(values) // max(known, 1)
    if math.prod(shape) != len(values):
        raise _wrong(request, f"extra.{TENSORS}.{name}: {len(values)} values for the shape {list(declared)}")
    return Input(name, datatype, tuple(shape), values)


def flat(value: Any) -> list[Any]:
    """Elements in row-major order."""
    return [one for part in value for one in flat(part)] if isinstance(value, list | tuple) else [value]


def numbers(datatype: str, seed: int, count: int) -> list[Any]:
    """0 to 96 in turn, begun where the prompt says; real ones below 1, bools in a pattern of them."""
    turn = [(seed + at) % _TURN for at in range(count)]
    if datatype == "BOOL":
        return [bool(value % 2) for value in turn]
    return [value / _TURN for value in turn] if datatype.startswith("FP") else turn


def _wrong(request: Request, what: str) -> BenchError:
    return BenchError(f"line {request.line}: {what}")
