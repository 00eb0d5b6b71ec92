"""ServeGen's folders of clients, each with a rate, a burstiness and lengths that shift over a day, made requests."""

import ast
import csv
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llm_bench.errors import BenchError
from llm_bench.request import LONGEST_S, MOST_TOKENS, Request

Floats = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Floats]

MOST_BYTES = 64 * 2**20  # of a file; the largest published ones are far below a tenth of it
MOST_LITERAL = 4 * 2**20  # characters of one distribution, parsed as a Python literal: some 100,000 lengths
MOST_REQUESTS = 20_000_000  # of one generation: some 10 GB of Requests
_CONSTANT_CV = 1e-3  # gaps that vary less are made equal: a Gamma shape of a million, and no scheduler keeps them apart
_LENGTHS = ("input_tokens", "output_tokens")
_IGNORED = ("reason_ratio",)  # which part of the answer is reasoning: the same tokens, told apart


class Pmf(NamedTuple):
    """A distribution of token counts."""

    tokens: npt.NDArray[np.int64]
    probability: Floats  # of each, of sum 1

    @property
    def mean(self) -> float:
        return float(self.tokens @ self.probability)


class Window(NamedTuple):
    """What a client does from start_s on, until its next window."""

    start_s: float
    end_s: float
    rate: float  # requests a second; 0: silent
    cv: float  # coefficient of variation of the gaps between its requests
    pattern: str  # "Gamma", "Weibull"; "" where silent
    params: tuple[float, float]  # (shape, scale) as fitted upstream; the gaps drawn here follow rate and cv
    input: Pmf | None  # None: silent
    output: Pmf | None


@dataclass(frozen=True, slots=True)
class ClientModel:
    """One client of a ServeGen folder, its windows in order and without gaps."""

    client: str
    windows: tuple[Window, ...]


# -- reading ----------------------------------------------------------------------------------------------------------


def read_folder(path: Path) -> list[ClientModel]:
    """The clients of a folder of chunk-N-trace.csv and chunk-N-dataset.json, by N (alibaba/ServeGen, clientpool.py).

    A trace's line is start in s, requests/s, CV of the gaps, Gamma or Weibull, shape, scale; no header. A dataset gives
    by its start in s the distributions of input_tokens and output_tokens, each a string that holds a Python dict. A
    window takes the lengths of the latest dataset entry that is not empty and begins no later, as upstream does, and
    before the first of them that first one's.

    Raises BenchError with file and line.
    """
    names: dict[int, set[str]] = {}
    try:
        for file in path.iterdir():
            match = re.fullmatch(r"chunk-(\d{1,9})-(trace\.csv|dataset\.json)", file.name, re.A)
            if match:
                names.setdefault(int(match[1]), set()).add(match[2])
    except OSError as e:
        raise BenchError(f"{path}: cannot be read: {e.strerror}") from None
    if not names:
        raise BenchError(f"{path}: no chunk-N-trace.csv in it, expected a ServeGen folder")
    for n, kinds in sorted(names.items()):
        for kind in {"trace.csv", "dataset.json"} - kinds:
            raise BenchError(f"{path / f'chunk-{n}-{kind}'}: missing, expected it beside chunk-{n}-{min(kinds)}")
    return [ClientModel(str(n), _client(path, n)) for n in sorted(names)]


def _client(path: Path, n: int) -> tuple[Window, ...]:
    trace = path / f"chunk-{n}-trace.csv"
    silent = list(_trace_lines(trace))
    lengths = _lengths(path / f"chunk-{n}-dataset.json")
    windows = []
    for line, window in silent:
        if window.rate == 0:
            windows.append(window)
            continue
        if not lengths:
            raise BenchError(f"{trace}:{line}: a rate of {window.rate:g}, but its dataset has no lengths at all")
        start = max((s for s in lengths if s <= window.start_s), default=min(lengths))
        prompt, answer = lengths[start]
        windows.append(window._replace(input=prompt, output=answer))
    return tuple(windows)


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise BenchError(f"{path}: {path.stat().st_size:,} bytes, expected {MOST_BYTES:,} at most")
        return path.read_text("utf-8")
    except UnicodeDecodeError as e:
        raise BenchError(f"{path}: byte {e.start} is not UTF-8") from None
    except OSError as e:
        raise BenchError(f"{path}: cannot be read: {e.strerror}") from None


def _trace_lines(path: Path) -> Iterator[tuple[int, Window]]:
    """(line, window without lengths); the last one is as long as the one before it."""
    found: list[tuple[int, Window]] = []
    for line, text in enumerate(_read(path).split("\n"), 1):
        if not text.strip():
            continue
        try:
            window = _window(next(csv.reader([text])))
            if found and window.start_s <= found[-1][1].start_s:
                raise ValueError(f"start {window.start_s:g} s after {found[-1][1].start_s:g} s, expected a later one")
        except (ValueError, csv.Error) as e:
            raise BenchError(f"{path}:{line}: {e}") from None
        found.append((line, window))
    if len(found) < 2:
        raise BenchError(f"{path}: {len(found)} windows, expected two or more: they tell each other's length")
    ends = [window.start_s for _, window in found[1:]]
    ends.append(2 * ends[-1] - found[-2][1].start_s)
    for (line, window), end in zip(found, ends, strict=True):
        yield line, window._replace(end_s=end)


def _window(cells: list[str]) -> Window:
    if len(cells) != 6:
        raise ValueError(f"{len(cells)} cells, expected 6: start, rate, CV, pattern, shape, scale")
    start, rate, cv, shape, scale = (_number(cells[i]) for i in (0, 1, 2, 4, 5))
    pattern = cells[3].strip()
    if start > LONGEST_S:
        raise ValueError(f"start {start:g} s, expected 10 years at most")
    if pattern not in ("", *_GAPS):
        raise ValueError(f"pattern {pattern[:80]!r}, expected {' or '.join(_GAPS)}, or nothing where it is silent")
    if not pattern:  # upstream: no requests, whatever the rate says
        rate = 0.0
    if rate and cv > 100:  # that is bursts of 10,000 at once
        raise ValueError(f"CV {cv:g}, expected 100 at most")
    return Window(start, math.inf, rate, cv, pattern, (shape, scale), None, None)


def _number(text: str) -> float:
    value = float(text)  # its ValueError says what was found
    if not 0 <= value < math.inf:
        raise ValueError(f"{text!r}, expected a number, 0 or more")
    return value


def _lengths(path: Path) -> dict[float, tuple[Pmf, Pmf]]:
    """By start in s: distributions of prompts and answers, of the entries that are not empty."""
    text = _read(path)
    try:
        entries = json.loads(text, parse_int=float)  # no such number is used, but int() refuses thousands of digits
    except json.JSONDecodeError as e:
        raise BenchError(f"{path}:{e.lineno}: not JSON: {e.msg}") from None
    except RecursionError:
        raise BenchError(f"{path}:1: JSON nested too deeply") from None
    if not isinstance(entries, dict):
        raise BenchError(f"{path}:1: a JSON {type(entries).__name__}, expected an object of starts in s")
    found: dict[float, tuple[Pmf, Pmf]] = {}
    for key, fields in entries.items():
        at = text.find(json.dumps(key))
        try:
            start = _number(key)
            if not isinstance(fields, dict):
                raise ValueError(f"start {key} has a {type(fields).__name__}, expected an object")
            others = fields.keys() - {*_LENGTHS, *_IGNORED}
            if others:
                raise ValueError(f"start {key} has {sorted(others)}: only {', '.join(_LENGTHS)} make requests of text")
            pmfs = []
            for name in _LENGTHS:
                at = max(at, text.find(f'"{name}"', at))
                pmfs.append(_pmf(fields.get(name), f"{name} of start {key}"))
        except ValueError as e:
            raise BenchError(f"{path}:{text.count(chr(10), 0, max(at, 0)) + 1}: {e}") from None
        prompt, answer = pmfs
        if prompt is not None and answer is not None:
            found[start] = (prompt, answer)
    return found


def _pmf(literal: object, name: str) -> Pmf | None:
    """A dict literal of whole numbers and their probabilities; None where it is empty."""
    if not isinstance(literal, str):
        raise ValueError(f"{name} is a {type(literal).__name__}, expected the text of a dict")
    if len(literal) > MOST_LITERAL:
        raise ValueError(f"{name} has {len(literal):,} characters, expected {MOST_LITERAL:,} at most")
    pair = r"\s*\d{1,9}\s*:\s*[\d.]{1,40}(?:e[+-]?\d{1,3})?\s*"  # nothing that could nest, or take long to build
    if not re.fullmatch(rf"\{{(?:{pair},)*(?:{pair})?\}}", literal.strip(), re.A):
        raise ValueError(f"{name} is {literal[:60]!r}, expected a dict like {{12: 0.25, 40: 0.75}}")
    try:
        values: dict[int, float] = ast.literal_eval(literal.strip())
    except (SyntaxError, ValueError, MemoryError, RecursionError) as e:
        raise ValueError(f"{name} is not a Python dict: {e.__class__.__name__}") from None
    if not values:
        return None
    tokens, p = np.array(list(values), np.int64), np.array(list(values.values()), np.float64)
    if p.max() > 1 + 1e-6 or abs(p.sum() - 1) > 1e-6:
        raise ValueError(f"{name} has {len(p)} probabilities, {p.max():g} the largest, expected some of sum 1")
    if tokens.min() < 1 or tokens.max() > MOST_TOKENS:
        raise ValueError(f"{name} has {tokens.min()} to {tokens.max()} tokens, expected 1 to {MOST_TOKENS:,}")
    order = np.argsort(tokens)
    return Pmf(tokens[order], p[order] / p.sum())


# -- generating -------------------------------------------------------------------------------------------------------


def generate(
    clients: Sequence[ClientModel], *, duration_s: float, start_s: float = 0.0, rate: float | None = None, seed: int
) -> list[Request]:
    """Requests of all clients over [start_s, start_s + duration_s) of their day, by time; at_s counts from start_s.

    In each window a client's arrivals are a stationary renewal process of the window's rate and CV, gaps Gamma or
    Weibull, so that a window has rate × length arrivals on average however bursty it is; prompt and answer lengths are
    drawn independently. `rate`: requests/s over the whole span and all clients, reached by scaling every rate alike;
    None: as recorded. The same seed gives a client the same requests, whichever clients stand beside it.

    Raises BenchError where the clients' windows do not cover the span, or no one sends in it.
    """
    if not (start_s >= 0 and 0 < duration_s <= LONGEST_S):
        raise BenchError(f"{duration_s:g} s from {start_s:g} s on, expected a span of 10 years at most, from 0 s on")
    if rate is not None and not 0 < rate < math.inf:
        raise BenchError(f"rate {rate:g}, expected requests a second, more than 0")
    if not clients or seed < 0:
        raise BenchError(f"{len(clients)} clients, seed {seed}, expected one client or more and a seed of 0 or more")
    end_s = start_s + duration_s
    for model in clients:
        first, last = model.windows[0].start_s, model.windows[-1].end_s
        if start_s < first or end_s > last:
            raise BenchError(
                f"client {model.client}: windows from {first:g} to {last:g} s, asked for {start_s:g} to {end_s:g} s"
            )
    recorded = sum(w.rate * _inside(w, start_s, end_s) for model in clients for w in model.windows)
    if recorded == 0:
        raise BenchError(f"no client sends anything from {start_s:g} to {end_s:g} s, expected a span with traffic")
    factor = 1.0 if rate is None else rate * duration_s / recorded
    if recorded * factor > MOST_REQUESTS:
        raise BenchError(f"some {recorded * factor:,.0f} requests, expected {MOST_REQUESTS:,} at most")
    requests = [
        request
        for model in clients
        for request in _requests(model, start_s, end_s, factor, np.random.SeedSequence(seed))
    ]
    requests.sort(key=lambda r: r.at_s or 0.0)
    return requests


def _inside(window: Window, start_s: float, end_s: float) -> float:
    return max(0.0, min(window.end_s, end_s) - max(window.start_s, start_s))


def _requests(
    model: ClientModel, start_s: float, end_s: float, factor: float, seed: np.random.SeedSequence
) -> Iterator[Request]:
    own = int.from_bytes(hashlib.blake2b(model.client.encode(), digest_size=8).digest(), "little")
    for k, window in enumerate(model.windows):
        length_s = _inside(window, start_s, end_s)
        if window.rate == 0 or length_s == 0 or window.input is None or window.output is None:
            continue
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed.entropy, spawn_key=(own, k))))
        begin_s = max(window.start_s, start_s) - start_s
        times = begin_s + arrivals(window.pattern, window.rate * factor, window.cv, length_s, rng)
        prompts, answers = _draw(window.input, len(times), rng), _draw(window.output, len(times), rng)
        for at, tokens_in, tokens_out in zip(times.tolist(), prompts.tolist(), answers.tolist(), strict=True):
            yield Request(tokens_in, tokens_out, at_s=at, client=model.client)


def _draw(pmf: Pmf, size: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    places = np.searchsorted(np.cumsum(pmf.probability), rng.random(size), side="right")
    return pmf.tokens[np.minimum(places, len(pmf.tokens) - 1)]  # the sum may end a rounding below 1


def arrivals(pattern: str, rate: float, cv: float, length_s: float, rng: np.random.Generator) -> Floats:
    """Times in [0, length_s) of a stationary renewal process: gaps of mean 1/rate, the first one's rest included.

    A process that began with a whole gap would have (CV² − 1)/2 arrivals more or less than rate × length: for the
    burstiest windows that is half of them. So the first arrival is the rest of a gap found under way: a gap drawn in
    proportion to its length, cut at a uniform place (Cox, Renewal Theory, 1962, ch. 5).
    """
    gap, gap_under_way = _GAPS[pattern](cv) if cv >= _CONSTANT_CV else (_one, _one)
    span = length_s * rate  # in mean gaps
    times = gap_under_way(rng, 1) * rng.random(1)
    while times[-1] < span:
        more = int((span - times[-1]) * 1.05) + 64
        times = np.concatenate((times, times[-1] + np.cumsum(gap(rng, more))))
    times = times[times < span] / rate
    return times[times < length_s]  # a rounding could reach it


def _one(rng: np.random.Generator, size: int) -> Floats:
    return np.ones(size)


def _gamma(cv: float) -> tuple[Draw, Draw]:
    """(gaps of mean 1, the same drawn in proportion to their length): a Gamma of one more in shape."""
    shape = cv**-2
    return (
        lambda rng, size: rng.gamma(shape, 1 / shape, size),
        lambda rng, size: rng.gamma(shape + 1, 1 / shape, size),
    )


def _weibull(cv: float) -> tuple[Draw, Draw]:
    """(gaps of mean 1, the same drawn in proportion to their length).

    With (gap/scale)^shape exponential, weighting by the gap makes it a Gamma of shape 1 + 1/shape.
    """
    shape = weibull_shape(cv)
    scale = math.exp(-math.lgamma(1 + 1 / shape))
    return (
        lambda rng, size: scale * rng.weibull(shape, size),
        lambda rng, size: scale * rng.gamma(1 + 1 / shape, 1.0, size) ** (1 / shape),
    )


_GAPS: dict[str, Callable[[float], tuple[Draw, Draw]]] = {"Gamma": _gamma, "Weibull": _weibull}


def weibull_shape(cv: float) -> float:
    """The shape k whose Weibull has this CV: CV² + 1 = Γ(1 + 2/k) / Γ(1 + 1/k)², by bisection; CV falls as k grows."""
    low, high = 0.05, 1e4
    target = math.log1p(cv * cv)
    for _ in range(200):  # halves the bracket to the last bit long before
        middle = math.sqrt(low * high)
        value = math.lgamma(1 + 2 / middle) - 2 * math.lgamma(1 + 1 / middle)
        low, high = (middle, high) if value > target else (low, middle)
    return math.sqrt(low * high)
