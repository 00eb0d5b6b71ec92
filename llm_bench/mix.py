"""Several traces as one: each part keeps its arrivals, sessions and shared prefixes, at its share of the requests."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from llm_bench.errors import BenchError
from llm_bench.parts import parse as parse_text
from llm_bench.request import LONGEST_S, Request, Trace
from llm_bench.ticks import dejitter as off_ticks

_RIGHT = "expected PATH:SHARE[:priority=N][:name=CLASS], such as chat.jsonl:0.8"


class Part(NamedTuple):
    """One trace of a mix, as the command line names it."""

    path: str
    share: float  # of the mix's requests per unit of time, relative to the other parts'
    name: str  # class of its requests in the mix
    priority: int | None = None  # of its requests; None: each row's own


def parse_part(text: str) -> Part:
    """PATH:SHARE[:priority=N][:name=CLASS]; the path may hold colons. Raises BenchError saying what is wrong."""
    found = parse_text(text, "part", _RIGHT)
    if found.share is None:
        raise BenchError(f"part {text!r}: no share, {_RIGHT}")
    if not (found.share > 0 and math.isfinite(found.share)):
        raise BenchError(f"part {text!r}: a share of {found.share:g}, expected a number over 0")
    return Part(found.path, found.share, found.name, found.priority)


def mix(
    parts: Sequence[tuple[Trace, Part]],
    *,
    seed: int = 0,
    rate: float | None = None,
    count: int | None = None,
    dejitter: str = "auto",
) -> Trace:
    """One trace of several; conversations are never cut.

    Which: the parts' conversations are dealt in their order, always one of the part furthest behind its share of the
    requests, until that part has no more. None is repeated, so none fades out of the mix. count: end earlier, with the
    conversation that brings so many requests.
    When: times on ticks are spread first (`dejitter`, a mode of ticks.dejitter): between other parts' times nobody
    would see the ticks any more, and a replay would send their bursts. All parts take the same time. A part keeps the
    shape of its arrivals: the starts of its conversations are stretched by one factor, and later turns keep their
    distance from the start (a user thinks no faster under more load). Each part is moved by a random share of its mean
    gap, so that evenly spaced parts do not fall together. Parts without times arrive as a Poisson process of known
    count. `rate` is the mix's requests per second; by default the timed parts keep the sum of theirs. Where no part has
    times and no rate is given, the mix has none either.
    Kept apart: sessions and clients get the part's name before theirs, hash ids are numbered anew; blocks are cut to
    the smallest size where that divides the others. A request's class is the part's name, with its own class behind
    it: "chat/vip". The part's priority goes over its rows'.

    Deterministic by seed (NumPy's PCG64). Raises BenchError for parts that cannot be mixed.
    """
    assert parts and (rate is None or rate > 0) and (count is None or count > 0), "checked by the command line"
    _check(parts)
    parts, spread = _off_ticks(parts, dejitter, seed)
    named = [part for _, part in parts]
    size, said = _block_size(parts)
    notes = [*spread, *said]
    total = sum(part.share for part in named)
    shares = [part.share / total for part in named]
    talks = [conversations(trace.requests) for trace, _ in parts]
    dealt = _dealt(talks, shares, count)
    if rate is None:
        rate = _own_rate(talks, shares)
    if rate is None:
        rows, how = [_Row(part, turn, None, 0) for part, talk in dealt for turn in talk], ["no times"] * len(parts)
    else:
        rows, how = _placed(dealt, len(parts), rate, seed)
    requests = _kept_apart(rows, named, size)
    counts = Counter(row.part for row in rows)
    for i, part in enumerate(named):
        share = 100 * counts[i] / len(rows)
        notes.append(
            f"{part.name}: {counts[i]:,} requests, {share:.2f}% of the mix ({100 * shares[i]:.2f}% asked); {how[i]}"
        )
        if counts[i] == len(parts[i][0].requests):
            notes[-1] += "; all of the part"
    notes += [f"the mix has {rate:.6g} requests per second"] if rate is not None else []
    notes += [f"{len(requests):,} of {count:,} requests: a part had no more"] if count and len(requests) < count else []
    skipped: Counter[str] = Counter()
    for trace, _ in parts:
        skipped.update(trace.skipped)
    return Trace(requests, "llm-bench", " + ".join(trace.path for trace, _ in parts), notes, dict(skipped))


# -- what may be mixed ------------------------------------------------------------------------------------------------


def _check(parts: Sequence[tuple[Trace, Part]]) -> None:
    for trace, part in parts:
        if not trace.requests:
            raise BenchError(f"part {part.name!r} ({part.path}) has no requests, expected at least one")
    names = Counter(part.name for _, part in parts)
    twice = next((name for name, times in names.items() if times > 1), None)
    if twice is not None:
        raise BenchError(f"two parts of the mix are named {twice!r}; give one of them another with :name=CLASS")
    wrong = next((name for name in names if "/" in name or not name), None)
    if wrong is not None:
        raise BenchError(
            f"a part of the mix is named {wrong!r}, expected a name without '/': it divides part and class"
        )


def _block_size(parts: Sequence[tuple[Trace, Part]]) -> tuple[int, list[str]]:
    """Tokens of a block of the mix (0: no ids), and what is to be said of it."""
    sizes = {part.name: sorted({r.block_size for r in trace.requests if r.hash_ids}) for trace, part in parts}
    every = sorted({size for of in sizes.values() for size in of})
    if any(size % every[0] for size in every):
        found = "; ".join(f"{name}: {', '.join(map(str, of))}" for name, of in sizes.items() if of)
        raise BenchError(f"blocks of different sizes in the mix ({found} tokens), expected one that divides the others")
    said = [f"blocks of {', '.join(map(str, every))} tokens: all cut to {every[0]}"] if len(every) > 1 else []
    return every[0] if every else 0, said


def _off_ticks(parts: Sequence[tuple[Trace, Part]], mode: str, seed: int) -> tuple[list[tuple[Trace, Part]], list[str]]:
    """The parts, each off its ticks by draws of its own, and what was done. Times of one conversation stay in order."""
    found, notes = [], []
    for i, (trace, part) in enumerate(parts):
        requests, done = off_ticks(trace.requests, mode, seed + i)
        found.append((trace._replace(requests=requests) if done else trace, part))
        notes += [f"{part.name}: {done}"] if done else []
    return found, notes


# -- which conversations, and when ------------------------------------------------------------------------------------

Talk = list[Request]  # the turns of one conversation; one request where it has no session


class _Row(NamedTuple):
    part: int
    request: Request  # as in its own trace
    at_s: float | None
    key_ns: int  # where it stands: its time, or that of the turn before


def conversations(requests: Sequence[Request]) -> list[Talk]:
    """The requests by conversation, in the order of their first turns."""
    talks: list[Talk] = []
    of_session: dict[str, Talk] = {}
    for r in requests:
        if r.session in of_session:
            of_session[r.session].append(r)
            continue
        talks.append([r])
        if r.session:
            of_session[r.session] = talks[-1]
    return talks


def _dealt(talks: Sequence[list[Talk]], shares: Sequence[float], count: int | None) -> list[tuple[int, Talk]]:
    """(part, conversation) in the order of dealing."""
    dealt: list[tuple[int, Talk]] = []
    requests = [0] * len(talks)
    left = [iter(of) for of in talks]
    while count is None or sum(requests) < count:
        part = min(range(len(talks)), key=lambda i: requests[i] / shares[i])
        talk = next(left[part], None)
        if talk is None:
            break
        dealt.append((part, talk))
        requests[part] += len(talk)
    return dealt


def _starts_ns(talks: Sequence[Talk]) -> list[int]:
    """[] where the part has no times: every conversation opens with one, or none does (`trace.read`)."""
    return [round(talk[0].at_s * 1e9) for talk in talks if talk[0].at_s is not None]


def _span_ns(starts: Sequence[int]) -> float:
    """From the first start to a mean gap after the last: what so many gaps take."""
    return (starts[-1] - starts[0]) * len(starts) / max(len(starts) - 1, 1) if starts else 0.0


def _own_rate(talks: Sequence[list[Talk]], shares: Sequence[float]) -> float | None:
    """Requests per second at which the timed parts keep the sum of their own rates; None where no part has times."""
    rates: dict[int, float] = {}
    for part, of in enumerate(talks):
        span_ns = _span_ns(_starts_ns(of))
        if span_ns:
            rates[part] = 1e9 * sum(map(len, of)) / span_ns
    if rates:
        return sum(rates.values()) / sum(shares[part] for part in rates)
    if any(map(_starts_ns, talks)):
        raise BenchError("no part of the mix starts at two times or more, so none has a rate; give the mix's --rate")
    return None


def _placed(dealt: Sequence[tuple[int, Talk]], parts: int, rate: float, seed: int) -> tuple[list[_Row], list[str]]:
    """Rows by time, the first at 0; and how each part came to its times."""
    span_ns = 1e9 * sum(len(talk) for _, talk in dealt) / rate
    if span_ns > LONGEST_S * 1e9:
        raise BenchError(f"a mix of {rate:g} requests/s would last {span_ns / 1e9:.3g} s, expected 10 years at most")
    how: list[str] = []
    placed: list[tuple[int, int, Talk]] = []
    for part in range(parts):
        talks = [talk for of, talk in dealt if of == part]
        draws = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, part])))
        own = _starts_ns(talks)
        if own:
            stretch = span_ns / (_span_ns(own) or span_ns)  # a single start has nothing to be stretched
            phase = draws.uniform(0, span_ns / len(own))
            starts = phase + stretch * (np.array(own, float) - own[0])
            how.append(f"its own arrivals, starts stretched by {stretch:.4g}")
        else:
            starts = np.sort(draws.uniform(0, span_ns, len(talks)))
            how.append(f"Poisson arrivals, seed {seed}")
        placed += [(round(start), part, talk) for start, talk in zip(starts.tolist(), talks, strict=True)]
    placed.sort(key=lambda row: row[0])
    rows = [row for start, part, talk in placed for row in _turns(part, talk, start - placed[0][0])]
    return sorted(rows, key=lambda row: row.key_ns), how


def _turns(part: int, talk: Talk, start_ns: int) -> Iterator[_Row]:
    yield _Row(part, talk[0], start_ns / 1e9, start_ns)
    key_ns = start_ns
    for turn in talk[1:]:
        if turn.at_s is None or talk[0].at_s is None:
            yield _Row(part, turn, None, key_ns)
        else:
            key_ns = start_ns + round(turn.at_s * 1e9) - round(talk[0].at_s * 1e9)
            yield _Row(part, turn, key_ns / 1e9, key_ns)


# -- rows of the mix --------------------------------------------------------------------------------------------------


def _kept_apart(rows: Sequence[_Row], parts: Sequence[Part], size: int) -> list[Request]:
    numbers: dict[tuple[int, int, int], int] = {}  # (part, its id, piece of the block) -> id in the mix
    requests: list[Request] = []
    for part, r, at_s, _ in rows:
        name, priority = parts[part].name, parts[part].priority
        pieces = ((part, i, k) for i in r.hash_ids for k in range(r.block_size // size))
        blocks = islice(pieces, -(-r.tokens_in // size)) if r.hash_ids else ()
        requests.append(
            replace(
                r,
                at_s=at_s,
                hash_ids=tuple(numbers.setdefault(block, len(numbers)) for block in blocks),
                block_size=size if r.hash_ids else 0,
                session=r.session and f"{name}/{r.session}",
                client=r.client and f"{name}/{r.client}",
                request_class=f"{name}/{r.request_class}" if r.request_class else name,
                priority=r.priority if priority is None else priority,
                line=len(requests) + 2,  # of the file that `trace.write` makes: a header stands before the rows
            )
        )
    return requests
