"""Reasons to distrust a trace before any load is made of it."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from llm_bench import prefixes, ticks
from llm_bench.fields import BAD, UNITS
from llm_bench.request import Trace
from llm_bench.sheet import Rows, Sheet, prompts, sheet, take
from llm_bench.workload import lengths, stamps

LEAST_ROWS = 20  # of fewer rows, nothing is said about a spread or a rate
RATES = (1e-3, 1e3)  # requests a second of any service whose trace is public: outside of it a unit is likely wrong
FEW = 0.1  # requests a second below which whole numbers of a table that names no unit are as likely ms as s
EPOCH = (1e9, 4e9)  # seconds since 1970, from 2001 to 2096
CHANCE = 14.0  # nats: what is less likely than e^-14, one in a million, is no chance
LONGEST = 200  # gaps looked at: a trace of more holes than these is not one with holes
HOLE = 3.0  # times as long as any gap that is none
NEIGHBOURS = (5, 50)  # gaps to either side that tell the local rate: at least, at most
THIN = 5.0  # times fewer requests a second than the rest: a day's tides stay within it, a start of recording does not
THIN_SHARE = 0.01  # of the span, at least: less of it changes no figure
LEAST_TO_SPLIT = 40  # rows, to tell a thin part from the rest
NEAR = 5  # steps of the stamps' resolution: in bursts, about as many gaps are one step as are none
SHARED_SHARE = 0.1  # of the rows stand on a tick with others: below it ticks are finer than the traffic
DUPLICATES = 5  # times as many equal stamps as chance brings, and ten more
CLIP_BAND = 0.005  # of a length: as wide as a limit looks that was set in other tokens than those counted here
CLIP_SHARE, CLIP_TIMES, CLIP_ABOVE = 0.002, 5.0, 0.02  # rows in the band; times the density beneath; rows beyond it
LEAST_CLIP = 32  # tokens: shorter ones are few values, each with many rows
CUMULATIVE_SHARE = 0.5  # of the later turns hold all before them: then the exceptions want a word


class Finding(NamedTuple):
    """A doubt has evidence in it, what it does to a load, and what to do; a statement (doubt False) is harmless."""

    kind: str
    text: str
    doubt: bool = True


class _Case(NamedTuple):
    """What the checks look at, found once."""

    trace: Sheet
    at_s: np.ndarray  # (n,) stamps in order
    tick_s: float | None
    silent: list[tuple[float, float, float]]  # gaps that the rate around them does not explain: start, length, mean gap
    faults: prefixes.Faults


def examine(trace: Trace | Sheet) -> list[Finding]:
    """What the trace gives reason to doubt, in the order of CHECKS; 0 < len(trace.requests)."""
    looked_at = sheet(trace)
    at_s = stamps(looked_at.rows)
    case = _Case(looked_at, at_s, ticks.step_s(at_s), _silences(at_s), prefixes.faults(prompts(looked_at.rows)))
    found = ((kind, check(case)) for kind, check in CHECKS.items())
    return [Finding(kind, text, kind not in STATEMENTS) for kind, text in found if text]


def warnings(trace: Trace, *, timed: bool = True) -> list[str]:
    """The doubts that change what a run sends: how turns are read and, where times are used, unit and ticks."""
    looked_at = sheet(trace)
    at_s = stamps(looked_at.rows)
    case = _Case(looked_at, at_s, ticks.step_s(at_s), [], prefixes.faults([]))
    kinds = ("turns", "unit", "ticks") if timed else ("turns",)
    return [f"{kind}: {text}" for kind in kinds if (text := CHECKS[kind](case))]


# -- times ------------------------------------------------------------------------------------------------------------


def _untimed(case: _Case) -> str:
    if len(case.at_s) == 0:
        return "no row has a time: a load from it needs a rate or a concurrency"
    if len(case.at_s) > 1 and case.at_s[0] == case.at_s[-1]:
        return f"all {len(case.at_s):,} rows share one instant: replayed as they stand they are one burst. Give a rate"
    return ""


def _unit(case: _Case) -> str:
    if "unit" in case.trace.facts.get("given", ()):
        return ""
    unit = case.trace.facts.get("unit", "")
    n, span, zero = len(case.at_s), _span(case.at_s), case.trace.facts.get("zero_s") or 0.0
    right = [other for other in UNITS if unit in UNITS and EPOCH[0] <= zero * UNITS[other] / UNITS[unit] <= EPOCH[1]]
    if right and unit not in right:
        first = figure(zero * UNITS["s"] / UNITS[unit])
        return f"the first stamp, {first}, read as {unit}, would be a date of our time in {right[0]}. Give the unit"
    if n < LEAST_ROWS or not span or unit == "date-time":
        return ""
    rate = n / span
    if RATES[0] <= rate <= RATES[1]:
        return _perhaps_ms(case, rate, span)
    way, other = ("many", "s") if rate > RATES[1] else ("few", "ms")
    read = f" read as {unit}" if unit else ""
    return f"{figure(rate)} requests/s over {figure(span)} s{read}: very {way}. Is the unit {other}? Give the unit"


def _perhaps_ms(case: _Case, rate: float, span: float) -> str:
    """Of a table of one's own, which has seconds where nothing is said: 4 requests/s in ms would be 0.004/s."""
    whole = (case.trace.facts.get("resolution_s") or 0.0) >= 1
    if case.trace.format != "plain" or case.trace.facts.get("unit") != "s" or not whole or rate >= FEW:
        return ""
    return (
        f"whole numbers read as s are {figure(rate)} requests/s over {figure(span)} s; as ms they would be "
        f"{figure(1000 * rate)}/s over {figure(span / 1000)} s. If they are, give --unit ms"
    )


def _order(case: _Case) -> str:
    late = case.trace.facts.get("late_rows", 0)
    if not late:
        return ""
    rows = case.trace.facts.get("rows") or case.trace.rows.n
    return (
        f"{late:,} of {rows:,} rows stood behind a later one and were sorted by time. Where rows were logged as "
        "requests ended, check that the time is the arrival"
    )


def _zero(case: _Case) -> str:
    zero = case.trace.facts.get("zero_s")
    if not zero or zero >= 1e9:  # seconds since 1970 have no zero to begin at
        return ""
    return f"the first stamp is {figure(zero)} s on the file's own scale, subtracted: perhaps a piece of a longer trace"


def _on_ticks(case: _Case) -> str:
    if case.tick_s is None:
        return ""
    raw, apart = (ticks.inter_arrival_cv(at) for at in (case.at_s, ticks.spread(case.at_s, case.tick_s, 0)))
    if raw is None or apart is None:
        return ""
    instants, rows = np.unique(case.at_s, return_counts=True)
    if rows[rows > 1].sum() < SHARED_SHARE * len(case.at_s):
        return ""
    return (
        f"timestamps stand on {case.tick_s:g} s ticks: {len(case.at_s):,} rows on {len(instants):,} instants, up to "
        f"{rows.max()} at once. Replayed as they stand they come in bursts that no user made (inter-arrival CV "
        f"{raw:.2f}; at random inside the tick {apart:.2f}). Spread them with --dejitter auto"
    )


def _duplicates(case: _Case) -> str:
    n, span = len(case.at_s), _span(case.at_s)
    if case.tick_s is not None or n < LEAST_ROWS or not span:
        return ""
    equal = n - len(np.unique(case.at_s))
    resolution, gaps = case.trace.facts.get("resolution_s") or 0.0, np.diff(case.at_s)
    close = float(((gaps > 0) & (gaps <= (NEAR + 0.5) * resolution)).sum()) / NEAR
    chance = max(close, n * -math.expm1(-n / span * resolution))
    if equal <= DUPLICATES * chance + 10:
        return ""
    copies = _copies(case.trace.rows)
    return (
        f"{equal:,} of {n:,} rows have the stamp of the row before, where chance brings {chance:.0f}; {copies:,} have "
        "its lengths too. Copies of a row would load the target twice; batches are sent at once"
    )


def _copies(rows: Rows) -> int:
    """Rows that say the same as another one before them; of one instant, so that few are looked at."""
    at_s = np.where(np.isnan(rows["at_s"]), -1.0, rows["at_s"])
    _, which, n = np.unique(at_s, return_inverse=True, return_counts=True)
    places = np.flatnonzero(n[which] > 1)
    some = take(rows, places)
    ids = np.zeros(len(places), np.int64)
    if "blocks" in some:
        known: dict[tuple[int, ...], int] = {}
        ids[some["blocks"] > 0] = [known.setdefault(p.hash_ids, len(known) + 1) for p in prompts(some) if p.hash_ids]
    said = np.stack([which[places], some["session"], some["tokens_in"], some["tokens_out"], ids], axis=1)
    return len(places) - len(np.unique(said, axis=0))


def _head(case: _Case) -> str:
    return _thin(case, "first", _without_silence(case))


def _tail(case: _Case) -> str:
    return _thin(case, "last", _without_silence(case))


def _thin(case: _Case, which: str, at_s: np.ndarray) -> str:
    """Two rates explain the arrivals far better than one, and the rarer part stands at this end of the trace."""
    n = len(at_s)
    if n < LEAST_TO_SPLIT or not _span(at_s):
        return ""
    since = at_s - at_s[0] if which == "first" else (at_s[-1] - at_s)[::-1]
    k = np.arange(1, n // 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        thin, rest = k / since[k], (n - k) / (since[-1] - since[k])
        gain = k * np.log(thin) + (n - k) * np.log(rest) - n * math.log(n / since[-1])
    gain[~np.isfinite(gain) | (thin * THIN > rest) | (since[k] < THIN_SHARE * since[-1])] = 0
    at = int(np.argmax(gain))
    cv = ticks.inter_arrival_cv(since[k[at] :]) or 1.0
    if gain[at] <= CHANCE * max(1.0, cv**2):  # arrivals in bursts make any split look better than it is
        return ""
    edge = f"--from {_shown(case, k[at])}" if which == "first" else f"--to {_shown(case, n - 1 - k[at])}"
    return (
        f"the {which} {figure(since[k[at]])} s have {thin[at]:.4g} requests/s ({k[at]:,} rows), the rest "
        f"{rest[at]:.4g}: there the target is idle. Cut with {edge}"
    )


def _shown(case: _Case, row: int) -> str:
    return f"{case.at_s[row]:.1f}"


def _silence(case: _Case) -> str:
    if not case.silent:
        return ""
    start, length, mean = max(case.silent, key=lambda gap: gap[1])
    several = f"; {len(case.silent)} such gaps, {figure(sum(gap[1] for gap in case.silent))} s in all"
    return (
        f"nothing arrives for {figure(length)} s from {figure(start)} s on, where {figure(mean)} s lie between "
        f"stamps around it{several if len(case.silent) > 1 else ''}: an outage, or a hole in the recording? "
        "The target is idle there. Cut with --from or --to"
    )


def _silences(at_s: np.ndarray) -> list[tuple[float, float, float]]:
    """Gaps longer than chance allows at the rate around them, and three times as long as all other gaps.

    An exponential gap of mean m exceeds m (ln n + 14) somewhere among n once in a million traces; bursts widen the tail
    by about CV². The longest gap of each side is left out, so that two holes do not hide each other. The second rule is
    for on-off traffic, whose gaps are of every length: there none is a hole.
    """
    instants = np.unique(at_s)
    gaps = np.diff(instants)
    least, most = NEIGHBOURS
    order = np.argsort(-gaps, kind="stable")[: LONGEST + 1].tolist()
    found: list[tuple[float, float, float]] = []
    holes = 0
    for i, shorter in pairwise(order):
        sides = [side for side in (gaps[max(0, i - most) : i], gaps[i + 1 : i + 1 + most]) if len(side) >= least]
        scale = max(map(_scale, sides), default=math.inf)
        if gaps[i] <= scale * (CHANCE + math.log(len(gaps))):
            break
        found.append((float(instants[i]), float(gaps[i]), max(float(side.mean()) for side in sides)))
        if gaps[i] >= HOLE * gaps[shorter]:
            holes = len(found)
    return sorted(found[:holes])


def _scale(gaps: np.ndarray) -> float:
    rest = np.delete(gaps, np.argmax(gaps))
    mean = float(rest.mean())
    return mean * max(1.0, float(rest.var()) / mean**2)


def _without_silence(case: _Case) -> np.ndarray:
    """The stamps as if each silent gap were one of its neighbourhood: a hole is no thin part."""
    at_s = case.at_s.copy()
    for start, length, mean in case.silent:
        at_s[case.at_s > start] -= length - min(mean, length)
    return at_s


def _span(at_s: np.ndarray) -> float:
    return float(at_s[-1] - at_s[0]) if len(at_s) else 0.0


# -- rows, lengths, turns ---------------------------------------------------------------------------------------------


def _left_out(case: _Case) -> str:
    skipped = case.trace.skipped
    if not skipped:
        return ""
    left = sum(skipped.values())
    rows = case.trace.facts.get("rows") or left + case.trace.rows.n
    counts = ", ".join(f"{reason}: {count:,}" for reason, count in skipped.items())
    bad = ". Look at the bad rows before trusting the rest" if skipped.get(BAD) else ""
    return f"{left:,} of {rows:,} rows are left out ({counts}): the load is lighter than the recorded one{bad}"


def _unknown(case: _Case) -> str:
    known_in, known_out = lengths(case.trace.rows)
    n = case.trace.rows.n
    counts = (("prompt", n - len(known_in)), ("answer", n - len(known_out)))
    said = " and ".join(f"{count:,} of {n:,} rows do not say the {name}'s length" for name, count in counts if count)
    return f"{said}: the load depends on the target's own count" if said else ""


def _clipped(case: _Case) -> str:
    said = (_clip(name, values) for name, values in zip(("prompts", "answers"), lengths(case.trace.rows), strict=True))
    return "; ".join(filter(None, said))


def _clip(name: str, values: np.ndarray) -> str:
    """A cliff: many rows in a narrow band, few just beneath it, fewer above, and hardly any beyond it."""
    n = len(values)
    if n < LEAST_ROWS or values.min() == values.max():
        return ""
    ranked = np.sort(values)
    edge = np.unique(ranked)
    edge = edge[edge >= LEAST_CLIP]
    width = np.maximum(1, np.round(edge * CLIP_BAND))

    def up_to(limit: np.ndarray) -> np.ndarray:
        return np.searchsorted(ranked, limit, side="right")

    band = up_to(edge) - up_to(edge - width)
    beneath, above = up_to(edge - width) - up_to(edge - 11 * width), up_to(edge + 10 * width) - up_to(edge)
    steep = (band > CLIP_TIMES * beneath / 10) & (band > 2 * CLIP_TIMES * above / 10)
    cliff = (band >= max(10, CLIP_SHARE * n)) & steep & (n - up_to(edge) <= CLIP_ABOVE * n)
    if not cliff.any():
        return ""
    at = int(np.argmax(np.where(cliff, band, 0)))
    limit, rows = int(edge[at]), int(band[at])
    over, low = n - int(up_to(edge)[at]), limit - int(width[at]) + 1
    sizes = f"{low:,} to {limit:,}" if low < limit else f"{limit:,}"
    return (
        f"{rows:,} {name} ({rows / n:.1%}) have {sizes} tokens, {over:,} more: they look cut by a limit of the "
        "recorded service, and what they would have been is missing from the load"
    )


def _constant(case: _Case) -> str:
    said = [
        f"every {name} has {int(values[0]):,} tokens"
        for name, values in zip(("prompt", "answer"), lengths(case.trace.rows), strict=True)
        if len(values) >= LEAST_ROWS and values.min() == values.max()
    ]
    return (
        f"{' and '.join(said)}: no real service has lengths that are all equal; queues are shorter than real ones"
        if said
        else ""
    )


def _turns(case: _Case) -> str:
    if case.trace.facts.get("turns") != "new" or "turns" in case.trace.facts.get("given", ()):
        return ""
    rows = case.trace.rows
    named = np.flatnonzero(rows["session"] >= 0)
    places = named[np.argsort(rows["session"][named], kind="stable")]  # conversation after conversation
    turn, session = rows["turn"][places], rows["session"][places]
    own = np.where(turn > 0, rows["tokens_new"][places], rows["tokens_in"][places])  # the row's own input length
    before = own + np.maximum(rows["tokens_out"][places], 0)
    follows = (turn[1:] > 0) & (session[1:] == session[:-1])
    later, whole = int(follows.sum()), int((own[1:] >= before[:-1])[follows].sum())
    if not later or whole <= CUMULATIVE_SHARE * later:
        return ""
    return (
        f"an input length is read as what the user adds, yet {whole:,} of {later:,} later turns would hold all before "
        "them: are lengths cumulative, with a history cut now and then? Then prompts are far too long here"
    )


# -- hash blocks ------------------------------------------------------------------------------------------------------


def _miscounted(case: _Case) -> str:
    f = case.faults
    if not f.miscounted:
        return ""
    return (
        f"{f.miscounted:,} rows have not ceil(tokens / block size) ids ({f.miscounted_example}). Check the block size"
    )


def _parents(case: _Case) -> str:
    f = case.faults
    if not f.several_parents:
        return ""
    return (
        f"{f.several_parents:,} ids follow different blocks ({f.parents_example}): they name a block's own text, not "
        "the prefix up to it, so equal ids are shared only where all before them is equal too"
    )


def _partial(case: _Case) -> str:
    f = case.faults
    if not f.partial_reused:
        return ""
    return f"{f.partial_reused:,} ids have two sizes ({f.partial_example}): one id is one text, so one of them is wrong"


def _aliased(case: _Case) -> str:
    f = case.faults
    if not f.aliased:
        return ""
    return f"{f.aliased:,} ids equal another in their low 32 bits: a tool that keeps 32 would share what is not shared"


def _wide(case: _Case) -> str:
    f = case.faults
    return f"{f.wide:,} ids need more than 32 bits; all of them are kept here" if f.wide else ""


def _unshared(case: _Case) -> str:
    rows = case.trace.rows
    hashed = int((rows["blocks"] > 0).sum())
    if hashed < LEAST_ROWS:
        return ""
    found = prefixes.infinite(prefixes.blocks(prompts(rows)))
    if found.blocks_hit:
        return ""
    return f"no prefix comes twice in {hashed:,} rows with hash ids: were ids made anew for each row? No cache can help"


CHECKS: dict[str, Callable[[_Case], str]] = {
    "no times": _untimed,
    "unit": _unit,
    "order": _order,
    "zero point": _zero,
    "ticks": _on_ticks,
    "equal stamps": _duplicates,
    "thin head": _head,
    "thin tail": _tail,
    "silence": _silence,
    "rows left out": _left_out,
    "unknown lengths": _unknown,
    "clipped lengths": _clipped,
    "constant lengths": _constant,
    "turns": _turns,
    "block count": _miscounted,
    "parents": _parents,
    "partial blocks": _partial,
    "aliased ids": _aliased,
    "wide ids": _wide,
    "nothing shared": _unshared,
}
STATEMENTS = frozenset({"no times", "zero point", "wide ids"})


def figure(value: float) -> str:
    """Four digits or so; whole numbers whole."""
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 1000 else f"{value:.4g}"
