"""A trace beside its neighbours: it keeps its own arrivals, and so do they, or each takes its share of all requests."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from llm_bench import mix, parts
from llm_bench.errors import BenchError
from llm_bench.mix import Talk
from llm_bench.request import Trace

_RIGHT = "expected PATH[:SHARE][:priority=N][:name=CLASS], such as batch.jsonl:0.2"
_SILENT_GAPS = 5  # mean gaps at its end after which a neighbour is over: a Poisson one is so silent in 1 of 150
_SHORT = 0.05  # of a share's requests may be lacking: whole conversations cannot meet it exactly


class Neighbour(NamedTuple):
    """A trace that is played beside the one that is measured, as the command line names it."""

    path: str
    name: str  # class of its requests
    share: float | None = None  # of all requests per second; None: it keeps its own arrivals
    priority: int | None = None  # of its requests; None: each row's own


def parse(text: str) -> Neighbour:
    """PATH[:SHARE][:priority=N][:name=CLASS]; the path may hold colons. Raises BenchError saying what is wrong."""
    found = parts.parse(text, "--beside", _RIGHT)
    if found.share is not None and not 0 < found.share < 1:
        raise BenchError(
            f"--beside {text!r}: a share of {found.share:g}, expected one of all requests, over 0 and under 1; without "
            "one it keeps its own arrivals"
        )
    return Neighbour(found.path, found.name, found.share, found.priority)


def together(own: Trace, beside: Sequence[tuple[Trace, Neighbour]], seed: int = 0) -> Trace:
    """The trace and its neighbours as one, by time; conversations whole, nothing shared between them, each a class.

    The trace keeps every request and its time: only then is what it does beside others to be held against what it does
    alone. How long it takes, from its first conversation to a mean gap after the last, is how long its neighbours play.
    A neighbour without a share keeps its own arrivals, cut where the trace ends. One with a share has its starts
    stretched by one factor, as `mix` does it, so that so much of all requests per second is its; a pause within a
    conversation stays as long. A neighbour without times arrives as a Poisson process: all of it, or its share.
    Where the trace has no times none has: conversations are dealt in the proportion of the counts, or of the shares.

    Classes are the parts' names, with a row's own class behind it ("chat/vip"); a neighbour's priority goes over its
    rows'. A request's line is that of its own file. Deterministic by `seed` (NumPy's PCG64). Raises BenchError for
    parts that cannot stand beside each other, and for shares that leave the trace nothing.
    """
    assert beside, "checked by the caller"
    traces = [own, *(trace for trace, _ in beside)]
    names = [Neighbour(own.path, parts.class_of(own.path)), *(neighbour for _, neighbour in beside)]
    taken = sum(n.share or 0.0 for n in names)
    if taken >= 1:
        raise BenchError(f"--beside: shares of {taken:g} in all, expected under 1: the trace has what they leave")
    talks = [mix.conversations(trace.requests) for trace in traces]
    if not talks[0] or talks[0][0][0].at_s is None:
        return _untimed(traces, names, talks, taken)
    starts = [_starts_s(of) for of in talks]
    span_s = _span_s(starts[0])
    rates = _rates(talks, starts, names, span_s, taken)
    placed, notes = [_Placed(talks[0], starts[0])], [f"{names[0].name}: {_requests(len(own.requests))}, its own times"]
    for i in range(1, len(names)):
        draws = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, i])))
        found, said = _beside(names[i], talks[i], starts[i], rates[i], span_s, draws)
        placed.append(found)
        notes += said
    return _one(traces, names, placed, notes)


# -- one trace --------------------------------------------------------------------------------------------------------


class _Placed(NamedTuple):
    """The conversations of a part that are played, in the order of their starts."""

    talks: list[Talk]
    at_s: list[float]  # their starts


def _starts_s(talks: Sequence[Talk]) -> list[float]:
    """[] where the part has no times: every conversation opens with one, or none does (`trace.read`)."""
    return [talk[0].at_s for talk in talks if talk[0].at_s is not None]


def _span_s(starts: Sequence[float]) -> float:
    """From the first start to a mean gap after the last: what so many gaps take. 0 where all start at once."""
    return (starts[-1] - starts[0]) * len(starts) / max(len(starts) - 1, 1) if starts else 0.0


def _rates(
    talks: Sequence[Sequence[Talk]],
    starts: Sequence[Sequence[float]],
    names: Sequence[Neighbour],
    span_s: float,
    taken: float,
) -> list[float]:
    """Requests per second that each part is to have; 0 where nothing of it depends on that."""
    own = []
    for of, times, name in zip(talks, starts, names, strict=True):
        takes_s = _span_s(times) or span_s  # without times: all of it while the trace lasts
        own.append(sum(map(len, of)) / takes_s if takes_s and name.share is None else 0.0)
    if taken and not own[0]:
        raise BenchError("--beside: the trace starts at one moment, so it has no rate that a share could be beside")
    return [rate if n.share is None else n.share * sum(own) / (1 - taken) for rate, n in zip(own, names, strict=True)]


def _beside(
    name: Neighbour, talks: list[Talk], own: list[float], rate: float, span_s: float, draws: np.random.Generator
) -> tuple[_Placed, list[str]]:
    """A neighbour's conversations with their starts; how it came to them, and a doubt where it ends too early."""
    had = sum(map(len, talks))
    wanted = had if name.share is None else rate * span_s
    if own and name.share is None:
        starts, how = np.array(own), "its own times"
    elif own:
        takes_s = had / rate
        stretch = takes_s / _span_s(own) if _span_s(own) else 1.0  # a single start has nothing to be stretched
        phase_s = draws.uniform(0, min(takes_s / len(own), span_s))  # else evenly spaced parts would fall together
        starts, how = (
            phase_s + stretch * (np.array(own) - own[0]),
            f"its own arrivals, starts stretched by {stretch:.4g}",
        )
    else:
        talks = talks if name.share is None else _first(talks, wanted)
        starts, how = np.sort(draws.uniform(0, span_s, len(talks))), "Poisson arrivals"
    kept = int(np.searchsorted(starts, span_s)) if span_s else len(talks)
    found = _Placed(talks[:kept], starts[:kept].tolist())
    if not found.talks:
        raise BenchError(f"--beside: nothing of {name.name!r} ({name.path}) falls into the {span_s:g} s of the trace")
    count = sum(map(len, found.talks))
    notes = [f"{name.name}: {count:,} of {_requests(had)}, {how}" + (f", {count / span_s:.4g}/s" if span_s else "")]
    silent_s = span_s - found.at_s[-1]
    if own and silent_s > _SILENT_GAPS * _span_s(found.at_s) / kept:
        notes.append(
            f"doubt: {name.name} has no more in the last {silent_s:.3g} s of {span_s:.3g} s: what is due then has no "
            "such neighbour; give a longer one, or --to"
        )
    elif not own and count < (1 - _SHORT) * wanted:
        notes.append(
            f"doubt: {name.name} has {count:,} of the {_requests(round(wanted))} of its share; give a longer one"
        )
    return found, notes


def _first(talks: list[Talk], requests: float) -> list[Talk]:
    """The first conversations that have so many requests or fewer, at least one."""
    whole = np.cumsum([len(talk) for talk in talks])
    return talks[: max(int(np.searchsorted(whole, requests, "right")), 1)]


def _untimed(
    traces: Sequence[Trace], names: Sequence[Neighbour], talks: Sequence[Sequence[Talk]], taken: float
) -> Trace:
    """Dealt by `mix`: by counts, or by shares until one part has no more."""
    counts = [float(sum(map(len, of))) if n.share is None else 0.0 for n, of in zip(names, talks, strict=True)]
    shares = [
        n.share * sum(counts) / (1 - taken) if n.share is not None else c for n, c in zip(names, counts, strict=True)
    ]
    timed = [n.name for n, of in zip(names, talks, strict=True) if _starts_s(of)]
    found = mix.mix([(_without_times(t), _part(n, s)) for t, n, s in zip(traces, names, shares, strict=True)])
    unused = [f"the trace has no times: those of {', '.join(timed)} are not used"] if timed else []
    return found._replace(notes=[*_notes(traces, names), *found.notes, *unused])


def _one(traces: Sequence[Trace], names: Sequence[Neighbour], placed: Sequence[_Placed], said: Sequence[str]) -> Trace:
    """Kept apart by `mix`, which is given no times, so that it deals out all of each part; then put at their times."""
    pieces = []
    for trace, name, of in zip(traces, names, placed, strict=True):
        requests = [r for talk in of.talks for r in talk]
        pieces.append((_without_times(trace._replace(requests=requests)), _part(name, float(len(requests)))))
    apart = mix.mix(pieces)
    times = {name.name: iter(_times(of)) for name, of in zip(names, placed, strict=True)}
    rows = [(r, *next(times[r.request_class.split("/")[0]])) for r in apart.requests]
    rows.sort(key=lambda row: row[2])  # stable: turns of a conversation stay in their order
    requests = [replace(r, at_s=at_s, line=line) for r, at_s, _, line in rows]
    return apart._replace(requests=requests, notes=[*_notes(traces, names), *said])


def _times(placed: _Placed) -> list[tuple[float | None, float, int]]:
    """(its time, where it stands, its line) of each request, in the order of `conversations`."""
    found: list[tuple[float | None, float, int]] = []
    for talk, start in zip(placed.talks, placed.at_s, strict=True):
        key = start
        for turn, r in enumerate(talk):
            own = start if not turn else None
            if turn and r.at_s is not None and talk[0].at_s is not None:
                own = start + (r.at_s - talk[0].at_s)
            key = max(key, own) if own is not None else key
            found.append((None if own is None else round(own, 9), key, r.line))
    return found


def _requests(count: int) -> str:
    return f"{count:,} request{'s' * (count != 1)}"


def _part(name: Neighbour, share: float) -> mix.Part:
    return mix.Part(name.path, share, name.name, name.priority)


def _without_times(trace: Trace) -> Trace:
    return trace._replace(requests=[replace(r, at_s=None) for r in trace.requests])


def _notes(traces: Sequence[Trace], names: Sequence[Neighbour]) -> list[str]:
    """What was said of each file, the neighbours' with their names."""
    return [
        note if name is names[0] else f"{name.name}: {note}"
        for trace, name in zip(traces, names, strict=True)
        for note in trace.notes
    ]
