"""save(model), load(path): a Model as a file, each value of which is checked before anything is made of it."""

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from llm_bench.containers import new_file
from llm_bench.errors import BenchError
from llm_bench.fields import found
from llm_bench.fit import (
    CUTS,
    EVENEST,
    MOST_BINS,
    MOST_CONVERSATIONS,
    MOST_LEAVES,
    MOST_LEVELS,
    MOST_STREAMS,
    SOURCES,
    Arrivals,
    Conversation,
    Law,
    Model,
    Quantiles,
    Stream,
    Turn,
)
from llm_bench.request import LONGEST_S, MOST_TOKENS

VERSION = 1
RIGHT = "a model that `trace fit` wrote, or one of traces/models"
PUBLISHED = ["source", "date"]  # of a model whose figures are not fitted to a trace
MOST_LEVELS_OF_LAW = 1001
_DATE = re.compile(r"\d{4}(-\d\d){0,2}", re.A)
LONGEST_INT = 40  # digits: more than any count here has
MOST_ARRIVALS = 20_000_000  # of one pass of a profile


def save(model: Model, path: Path | str) -> None:
    """The model as one JSON object, of the same bytes wherever it is written; whole or not at all.

    Raises BenchError for a file that is there already or cannot be written.
    """
    values: dict[str, Any] = {
        "llm_bench_model": VERSION,
        "block_size": model.block_size,
        "requests": model.requests,
        "conversations": model.conversations,
        "notes": list(model.notes),
        "turn": list(Turn._fields),
        "streams": [_stream_values(s) for s in model.streams],
    }
    if model.source:
        values |= {"source": model.source, "date": model.date}
    with new_file(Path(path)) as part:
        part.write_text(json.dumps(values, separators=(",", ":"), allow_nan=False) + "\n", encoding="utf-8")


def _stream_values(s: Stream) -> dict[str, Any]:
    a, law = s.arrivals, s.law
    arrivals = a and {"span_s": a.span_s, "rates": list(a.rates), "splits": list(a.splits), "shape": a.shape}
    if law is not None:
        said = {name: getattr(law, name) for name in LAW}
        return {"arrivals": arrivals, "law": {name: x for name, x in said.items() if x or name == "spearman"}}
    rows = [[c.client, c.request_class, c.priority, [list(turn) for turn in c.turns]] for c in s.conversations]
    return {"arrivals": arrivals, "conversations": rows}


def load(path: Path | str) -> Model:
    """The model that save wrote. Raises BenchError naming the file and the key of what cannot be right."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        if text.lstrip()[:1] not in "{[":
            raise ValueError(f"no model, which is JSON: it begins {found(text[:40], RIGHT)}")
        return _model(json.loads(text, parse_constant=_no_number, parse_int=_int))
    except OSError as e:
        raise BenchError(f"{path}: cannot be read: {e.strerror}") from None
    except RecursionError:
        raise BenchError(f"{path}: JSON nested too deeply, expected {RIGHT}") from None
    except json.JSONDecodeError as e:
        raise BenchError(f"{path}: not JSON: {e.msg} in line {e.lineno}, expected {RIGHT}") from None
    except UnicodeDecodeError as e:
        raise BenchError(f"{path}: byte {e.start} of the file is not UTF-8, expected {RIGHT}") from None
    except ValueError as e:
        raise BenchError(f"{path}: {e}") from None


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _int(text: str) -> int:
    if len(text) > LONGEST_INT:
        raise ValueError(f"{text[:20]}...: a number of {len(text):,} digits, expected {LONGEST_INT} at most")
    return int(text)


def _model(values: object) -> Model:
    keys = ["llm_bench_model", "block_size", "requests", "conversations", "notes", "turn", "streams"]
    version = values.get("llm_bench_model") if isinstance(values, dict) else None
    if version != VERSION:
        raise ValueError(f"llm_bench_model is {found(version, f'{VERSION}: {RIGHT}')}")
    assert isinstance(values, dict)
    published = "source" in values or "date" in values
    top = _object({"turn": list(Turn._fields)} | values, "the file", [*keys, *PUBLISHED] if published else keys)
    if top["turn"] != list(Turn._fields):
        raise ValueError(f"turn is {found(top['turn'], str(list(Turn._fields)))}")
    if published and not (_text(top["source"], "source") and _DATE.fullmatch(_text(top["date"], "date"))):
        raise ValueError(f"source, date are {found([top['source'], top['date']], 'whose figures; when, as 2025-11')}")
    streams = [_stream(s, f"streams[{i}]") for i, s in enumerate(_list(top["streams"], "streams", MOST_STREAMS + 1))]
    if not streams:
        raise ValueError("streams is empty, expected one at least")
    if any(s.law for s in streams) and not (published and len(streams) == 1):
        raise ValueError("a law of conversations: expected one stream, and the source and date of its figures")
    timed = {s.arrivals is not None for s in streams}
    if len(timed) > 1:
        raise ValueError("streams have arrivals in part, expected all or none")
    return Model(
        _whole(top["block_size"], "block_size", MOST_TOKENS),
        _whole(top["requests"], "requests", 10**12),
        _whole(top["conversations"], "conversations", 10**12, 1),
        tuple(streams),
        tuple(_text(x, f"notes[{i}]") for i, x in enumerate(_list(top["notes"], "notes", 100))),
        *([top["source"], top["date"]] if published else []),
    )


def _stream(values: object, at: str) -> Stream:
    by_law = isinstance(values, dict) and "law" in values
    stream = _object(values, at, ["arrivals", "law" if by_law else "conversations"])
    arrivals = None if stream["arrivals"] is None else _arrivals(stream["arrivals"], f"{at}.arrivals")
    if by_law:
        return Stream(arrivals, (), _law(stream["law"], f"{at}.law"))
    rows = _list(stream["conversations"], f"{at}.conversations", MOST_CONVERSATIONS)
    if not rows:
        raise ValueError(f"{at}.conversations is empty, expected one at least")
    return Stream(arrivals, tuple(_row(row, f"{at}.conversations[{i}]") for i, row in enumerate(rows)))


def _law(values: object, at: str) -> Law:
    """Keys that a law leaves out say nothing."""
    must = ["rows", "tokens_in", "tokens_out", "spearman"]
    if not isinstance(values, dict) or not set(must) <= set(values) <= set(LAW):
        has = list(values) if isinstance(values, dict) else values
        raise ValueError(f"{at} has {found(has, f'the keys {must} and any of {LAW}')}")
    law = Law(**{name: LAW[name](value, f"{at}.{name}") for name, value in values.items()})
    if bool(law.turns) != bool(law.tokens_new):
        raise ValueError(f"{at} has turns or tokens_new, expected both or neither")
    return law


def _quantiles(most: float) -> Callable[[object, str], Quantiles]:
    def read(value: object, at: str) -> Quantiles:
        rows = [_numbers(row, f"{at}[{i}]", most, 2) for i, row in enumerate(_list(value, at, MOST_LEVELS_OF_LAW))]
        table = tuple((row[0], row[1]) for row in rows if len(row) == 2)
        rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(table))
        ends = len(table) > 1 and table[0][0] == 0 and table[-1][0] == 1 and table[0][1] > 0
        if table and len(table) == len(rows) and rising and ends:
            return table
        raise ValueError(f"{at} is {found(value, '[level, value] from level 0 to level 1, rising, values above 0')}")

    return read


def _rho(value: object, at: str) -> float:
    if type(value) not in (int, float) or not -1 <= value <= 1:  # type: ignore[operator]
        raise ValueError(f"{at} is {found(value, 'a rank correlation, -1 to 1')}")
    return float(value)  # type: ignore[arg-type]


LAW: dict[str, Callable[[object, str], Any]] = {  # key of a law -> how it is read
    "rows": lambda value, at: _whole(value, at, 10**12, 2),
    "tokens_in": _quantiles(MOST_TOKENS),
    "tokens_out": _quantiles(MOST_TOKENS),
    "spearman": _rho,
    "turns": _quantiles(100_000),
    "tokens_new": _quantiles(MOST_TOKENS),
    "think_s": _quantiles(LONGEST_S),
    "common": lambda value, at: _whole(value, at, MOST_TOKENS),
    "again": lambda value, at: _number(value, at, 1),
    "again_part": lambda value, at: _number(value, at, 1),
    "again_lag_s": lambda value, at: _number(value, at, LONGEST_S),
}


def _arrivals(values: object, at: str) -> Arrivals:
    a = _object(values, at, ["span_s", "rates", "splits", "shape"])
    rates = _numbers(a["rates"], f"{at}.rates", 1e9, MOST_BINS)
    levels = enumerate(_list(a["splits"], f"{at}.splits", MOST_LEVELS))
    splits = tuple(_thirds(x, f"{at}.splits[{i}]") for i, x in levels)
    if len(rates) * 2 ** len(splits) > MOST_LEAVES:
        raise ValueError(f"{at}.splits: {len(rates)} bins of 2^{len(splits)} parts, expected {MOST_LEAVES:,} at most")
    span_s, shape = _number(a["span_s"], f"{at}.span_s", LONGEST_S), _number(a["shape"], f"{at}.shape", EVENEST)
    if not span_s or shape < 1:
        raise ValueError(f"{at}: span_s {span_s:g}, shape {shape:g}; expected above 0, and 1 to {EVENEST:g}")
    expected = sum(rates) / len(rates) * span_s if rates else 0.0
    if not 1 <= expected <= MOST_ARRIVALS:
        raise ValueError(f"{at}.rates give {expected:,.4g} arrivals in span_s, expected 1 to {MOST_ARRIVALS:,}")
    return Arrivals(span_s, rates, splits, shape)


def _thirds(values: object, at: str) -> tuple[float, float, float]:
    rhos = _numbers(values, at, 1.0, len(CUTS) + 1)
    if len(rhos) != len(CUTS) + 1:
        raise ValueError(f"{at} has {len(rhos)} numbers, expected {len(CUTS) + 1}")
    return rhos[0], rhos[1], rhos[2]


def _row(values: object, at: str) -> Conversation:
    row = _list(values, at, 4)
    if len(row) != 4:
        raise ValueError(f"{at} has {len(row)} values, expected client, class, priority, turns")
    many = _list(row[3], f"{at}[3]", 100_000)
    if not many:
        raise ValueError(f"{at} has no turn, expected one at least")
    turns = tuple(_turn(x, f"{at}[3][{i}]") for i, x in enumerate(many))
    client = _whole(row[0], f"{at}[0]", 10**9)
    if type(row[2]) is not int or not -(2**31) <= row[2] < 2**31:
        raise ValueError(f"{at}[2] is {found(row[2], 'a priority, a whole number of 32 bits')}")
    if not turns[0].tokens:
        raise ValueError(f"{at}[3][0][0] is 0, expected a prompt of one token at least")
    return Conversation(client, _text(row[1], f"{at}[1]"), row[2], turns)


def _turn(values: object, at: str) -> Turn:
    turn = _list(values, at, len(Turn._fields))
    if len(turn) != len(Turn._fields):
        raise ValueError(f"{at} has {len(turn)} values, expected {', '.join(Turn._fields)}")
    tokens, out, think_s, after_s, source, shared, lag = turn
    if source not in SOURCES:
        raise ValueError(f"{at}[4] is {found(source, 'one of ' + ', '.join(SOURCES))}")
    return Turn(
        _whole(tokens, f"{at}[0]", MOST_TOKENS),
        None if out is None else _whole(out, f"{at}[1]", MOST_TOKENS, 1),
        None if think_s is None else _number(think_s, f"{at}[2]", LONGEST_S),
        None if after_s is None else _number(after_s, f"{at}[3]", LONGEST_S),
        source,
        _whole(shared, f"{at}[5]", MOST_TOKENS),
        _number(lag, f"{at}[6]", 1e12),
    )


def _object(value: object, at: str, keys: list[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != set(keys):
        has = list(value) if isinstance(value, dict) else value
        raise ValueError(f"{at} has {found(has, f'the keys {keys}')}")
    return value


def _list(value: object, at: str, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        has = f"a list of {len(value):,}" if isinstance(value, list) else value
        raise ValueError(f"{at} is {found(has, f'a list of {most:,} at most')}")
    return value


def _text(value: object, at: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{at} is {found(value, 'text')}")
    return value


def _whole(value: object, at: str, most: int, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{at} is {found(value, f'a whole number, {least} to {most:,}')}")
    return value


def _number(value: object, at: str, most: float) -> float:
    if type(value) not in (int, float) or not 0 <= value <= most:  # type: ignore[operator]
        raise ValueError(f"{at} is {found(value, f'a number, 0 to {most:g}')}")
    return float(value)  # type: ignore[arg-type]


def _numbers(value: object, at: str, most: float, many: int) -> tuple[float, ...]:
    return tuple(_number(x, f"{at}[{i}]", most) for i, x in enumerate(_list(value, at, many)))
