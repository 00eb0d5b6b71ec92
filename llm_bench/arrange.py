"""The rows of a file together, as columns: their order in time, how conversations' lengths are meant, what is said.

Everything here is of the whole file; what one row says is checked where it is read.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llm_bench import prefixes
from llm_bench.errors import BenchError
from llm_bench.fields import BAD, DATE_TIME, NO_TURN, OF_BAD, UNITS, Format, Last, Reading
from llm_bench.request import LONGEST_S
from llm_bench.sheet import Rows, prompts, take, without_blocks

LATEST_ZERO_NS = 10**11 * 10**9  # seconds since 1970: the year 5138
EXACT_NS = 2**53  # of more, a quotient of floats is not the nearest one


class Kept(NamedTuple):
    """What was read of a file; rows in its order."""

    rows: Rows
    left_out: list[int]  # stamps of rows that came, and are not sent, ns on the file's scale
    skipped: dict[str, int]
    bad: list[str]


class Turns(NamedTuple):
    """How a session's input lengths are meant, and why."""

    name: str  # of TURNS
    why: str


class Arranged(NamedTuple):
    places: np.ndarray | None  # of the rows kept, in order of time, among those read; None: all, as they stood
    rows: Rows  # in order, with at_s, turn, tokens_in and tokens_new as they are meant
    notes: list[str]
    skipped: dict[str, int]
    bad: list[str]
    facts: dict[str, object]


def arrange(
    path: Path, form: Format, kept: Kept, reading: Reading, unit: str, *, limit: int | None, skip_bad: int
) -> Arranged:
    """The rows in order of time; raises BenchError where they cannot be right together, or none is left."""
    places, kept, turns = _one_reading(path, form, kept, reading.turns, limit, skip_bad)
    rows, skipped = kept.rows, kept.skipped
    check_any(path, rows.n, skipped)
    count = rows.n + sum(skipped.values())
    order, late = by_time(path, rows)
    if order is not None:
        rows, places = take(rows, order), order if places is None else places[order]
    notes, facts = _timed(path, rows, kept.left_out, unit)
    if late:
        notes.append(late_said(late))
    how, said = _number_turns(path, rows, turns)
    notes += said
    own, several = bool(rows["own_text"].any()), bool(rows["turn"].any())
    saved = prefixes.prefix_bound(prompts(rows)) if "blocks" in rows and rows["blocks"].any() else None
    notes += prompts_said(saved, own, several, int((rows["tokens_in"] == 0).sum()))
    notes += _opened_anew(reading, rows)
    notes += [f"{n:,} {what}" for what, n in reading.known.get("said", {}).items()]
    facts |= {"late_rows": late, "turns": how, "block_size": int(rows["block_size"].max()), "rows": count}
    return Arranged(places, rows, notes, skipped, kept.bad, facts)


def check_any(path: Path, n: int, skipped: dict[str, int]) -> None:
    if not n:
        counts = ", ".join(f"{reason}: {count:,}" for reason, count in skipped.items())
        raise BenchError(f"{path}: no requests in it (left out: {counts or 'none'}), expected at least one row")


# -- conversations ----------------------------------------------------------------------------------------------------


def _one_reading(
    path: Path, form: Format, kept: Kept, turns: str | None, limit: int | None, skip_bad: int
) -> tuple[np.ndarray | None, Kept, Turns]:
    """How all turns of a file are to be read; and the first `limit` of its rows that can be read that way."""
    rows = kept.rows
    later, short = _short_turns(path, rows) if "session" in rows else (0, [])
    first = None if limit is None or limit >= rows.n else np.arange(limit)
    cut = kept if first is None else kept._replace(rows=take(rows, first))
    if turns == "new" or not short:
        why = "as told" if turns else "every turn holds the prompt and answer before it"
        return first, cut, Turns(turns or "cumulative", why)
    if turns == "cumulative":
        sessions = {session: f"{path}:{text}: not cumulative" for session, text in reversed(short)}
        bad = [*kept.bad, *reversed(sessions.values())]
        if len(bad) > skip_bad:
            raise BenchError(f"{bad[skip_bad]}; expected --turns new, or --skip-bad to leave such conversations out")
        left = np.flatnonzero(~np.isin(rows["session"], list(sessions)))
        rest = rows.n - len(left) - len(sessions)
        skipped = kept.skipped | {BAD: kept.skipped.get(BAD, 0) + len(sessions), OF_BAD: rest}
        places = left[:limit]
        return places, Kept(take(rows, places), kept.left_out, skipped, bad), Turns(turns, "as told")
    if 2 * (later - len(short)) < later and not form.opens_anew:
        return first, cut, Turns("new", f"line {short[0][1]}: not cumulative")
    raise BenchError(
        f"{path}:{short[0][1]}, while {later - len(short):,} of {later:,} later turns hold the prompt and answer "
        "before them: say --turns cumulative (and --skip-bad N to leave such conversations out) or --turns new"
    )


def _short_turns(path: Path, rows: Rows) -> tuple[int, list[tuple[int, str]]]:
    """How many later turns have lengths to be judged by; and of those too short to hold the turn before, the session
    and in words, with its line, what is short; by conversation in order of their first turns."""
    order, _ = by_time(path, rows)
    turns = _by_session(rows["session"] if order is None else rows["session"][order])
    turns = turns if order is None else order[turns]
    before, after = turns[:-1], turns[1:]
    session, tokens_in = rows["session"], rows["tokens_in"].astype(np.int64)
    held = tokens_in + np.maximum(rows["tokens_out"], 0)
    judged = (session[before] == session[after]) & (tokens_in[before] > 0) & (tokens_in[after] > 0)
    short = judged & (tokens_in[after] < held[before])
    said = []
    for i, j in zip(before[short].tolist(), after[short].tolist(), strict=True):
        out = max(int(rows["tokens_out"][i]), 0)
        sizes = f"{tokens_in[j]} prompt tokens, fewer than {tokens_in[i]} + {out} of the turn before"
        name = rows.names["session"][session[j]]
        said.append((int(session[j]), f"{rows['line'][j]}: session {name!r} has {sizes}"))
    return int(judged.sum()), said


def _by_session(session: np.ndarray) -> np.ndarray:
    """The places of all turns, conversation after conversation in the order of their first turns."""
    named = np.flatnonzero(session >= 0)
    codes, first, which = np.unique(session[named], return_index=True, return_inverse=True)
    rank = np.empty(len(codes), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(codes))
    return named[np.argsort(rank[which], kind="stable")]


def _number_turns(path: Path, rows: Rows, turns: Turns) -> tuple[str, list[str]]:
    """Give each turn its number, its whole prompt's length and what its user adds, in place; says how it was read.

    Returns one of TURNS, "" where no conversation has several, and the notes on it.
    """
    given, session = rows["turn"].astype(np.int64), rows["session"]
    alone = np.flatnonzero((session < 0) & (given > 0))
    if len(alone):
        line, turn = rows["line"][alone[0]], given[alone[0]]
        raise BenchError(f"{path}:{line}: turn {turn} without a session_id, expected both")
    rows.columns["turn"] = np.zeros(rows.n, np.int32)
    if "session" not in rows:
        return "", []
    places = _by_session(session)
    opens = np.ones(len(places), bool)
    opens[1:] = session[places[1:]] != session[places[:-1]]
    starts = np.maximum.accumulate(np.where(opens, np.arange(len(places)), 0))
    numbers = np.arange(len(places)) - starts
    own, before = given[places], np.where(opens, NO_TURN, np.concatenate([[NO_TURN], given[places[:-1]]]))
    wrong = np.flatnonzero((own != NO_TURN) & (own <= before))
    if len(wrong):
        line = rows["line"][places[wrong[0]]]
        raise BenchError(f"{path}:{line}: turn {own[wrong[0]]} comes after turn {before[wrong[0]]} in time")
    rows.columns["turn"][places] = numbers
    several = int((numbers == 1).sum())
    if not several:
        return "", []
    new = turns.name == "new"
    tokens_in, tokens_new = _lengths(rows, places, numbers, new)
    rows.columns |= {"tokens_in": tokens_in, "tokens_new": tokens_new}
    if new:  # the live answer stands between the ids' blocks: they do not describe the whole prompt
        without_blocks(rows, rows["turn"] > 0)
    which = "what the user adds" if new else "the whole prompt so far (cumulative)"
    note = f"{several:,} conversations of several turns; an input length is {which}: {turns.why}"
    return turns.name, [note]


def _lengths(rows: Rows, places: np.ndarray, numbers: np.ndarray, new: bool) -> tuple[np.ndarray, np.ndarray]:
    """tokens_in and tokens_new (n,) as they are meant; 0 where they are not known."""
    tokens_in, tokens_new = rows["tokens_in"].astype(np.int64), np.zeros(rows.n, np.int64)
    answers = np.maximum(rows["tokens_out"], 0).astype(np.int64)
    if not new:
        before, after = places[:-1][numbers[1:] > 0], places[1:][numbers[1:] > 0]
        known = (tokens_in[before] > 0) & (tokens_in[after] > 0)
        before, after = before[known], after[known]
        tokens_new[after] = tokens_in[after] - tokens_in[before] - answers[before]
        return tokens_in, tokens_new
    floor = 0  # tokens of the conversation so far, 0: not known
    said, out, whole = tokens_in.tolist(), answers.tolist(), tokens_in
    for i, turn in zip(places.tolist(), numbers.tolist(), strict=True):
        tokens = said[i]
        if turn:
            tokens_new[i] = tokens
            tokens = floor + tokens if tokens else 0
            whole[i] = tokens
        floor = tokens + out[i] if tokens else 0
    return whole, tokens_new


def _opened_anew(reading: Reading, rows: Rows) -> Iterator[str]:
    """Of fields.conversation: how many of its NAME/2, NAME/3 ... are among the requests."""
    several = {name: last.part for name, last in reading.memory.items() if isinstance(last, Last) and last.part > 1}
    opened = {f"{name}/{part}" for name, parts in several.items() for part in range(2, parts + 1)}
    names = rows.names["session"]
    kept = len(opened & {names[code] for code in np.unique(rows["session"]).tolist() if code >= 0}) if opened else 0
    if kept:
        why = "by its length or its time, their first prompt cannot continue what went before"
        yield f"{kept:,} conversations are opened anew, as NAME/2, NAME/3 ...: {why}"


# -- times ------------------------------------------------------------------------------------------------------------


def by_time(path: Path, rows: Rows) -> tuple[np.ndarray | None, int]:
    """The rows' places in order of time, None where they stand so; and how many were behind a later one.

    A later turn without a time of its own stays with the turn before.
    """
    timed = rows["timed"]
    if not timed.any():
        return None, 0
    keys = rows["at_ns"]
    if not timed.all():
        keys = _with_the_turn_before(path, rows)
    newest = np.maximum.accumulate(keys)  # a turn without a time has an earlier one's: it makes nothing later
    late = int((keys[1:] < newest[:-1])[timed[1:]].sum())
    if bool((keys[:-1] <= keys[1:]).all()):
        return None, late
    return np.argsort(keys, kind="stable"), late


def _with_the_turn_before(path: Path, rows: Rows) -> np.ndarray:
    keys, of_session = rows["at_ns"].copy(), dict[int, int]()
    for i, (session, timed) in enumerate(zip(rows["session"].tolist(), rows["timed"].tolist(), strict=True)):
        if not timed and session not in of_session:
            raise no_timestamp(path, int(rows["line"][i]))
        if not timed:
            keys[i] = of_session[session]
        if session >= 0:
            of_session[session] = keys[i]
    return keys


def no_timestamp(path: Path, line: int) -> BenchError:
    right = "one in each row that opens a conversation, or in none of the file"
    return BenchError(f"{path}:{line}: no timestamp, expected {right}")


def _timed(path: Path, rows: Rows, left_out: list[int], unit: str) -> tuple[list[str], dict[str, object]]:
    """Gives rows in order their at_s. Returns what is to be said of their times, and the clock's facts."""
    timed = rows["timed"]
    at_ns, kept = rows["at_ns"], np.flatnonzero(timed)
    facts: dict[str, object] = {"unit": unit, "resolution_s": None, "zero_s": None, "instants": 0}
    rows.columns.pop("timed", None)
    if not len(kept):
        rows.columns.pop("at_ns", None)
        return [NO_TIMES], facts
    first, last = int(at_ns[kept[0]]), int(at_ns[kept[-1]])
    line = int(rows["line"][kept[np.argmax(at_ns[kept] == last)]])
    check_times(path, (rows.zero_ns + first, int(rows["line"][kept[0]])), (rows.zero_ns + last, line), unit)
    rows.columns.pop("at_ns", None)
    since = at_ns - first
    at_s = seconds(since, last - first)
    if len(kept) < rows.n:
        at_s[~timed] = np.nan
    rows.columns["at_s"] = at_s
    came = since[kept]
    if left_out:
        late = [at - first - rows.zero_ns for at in left_out]
        came = np.sort(np.concatenate([came, np.array(late, came.dtype if _fits(late) else object)]))
    gaps = np.diff(came)
    clock = clock_of(lambda: iter([gaps]))
    facts["resolution_s"] = clock.step_ns / 10**9 if clock.step_ns else None
    facts["zero_s"] = (rows.zero_ns + first) / 10**9 if unit != DATE_TIME else None
    facts["instants"] = clock.instants
    return list(times_said(len(kept), last - first, clock, unit)), facts


def _fits(values: list[int]) -> bool:
    return all(-(2**63) <= x < 2**63 for x in values)


def seconds(ns: np.ndarray, most: int) -> np.ndarray:
    """Each the float nearest to it."""
    if ns.dtype == object or most >= EXACT_NS:
        return np.array([x / 10**9 for x in ns.tolist()])
    return np.asarray(ns / 1e9)


def check_times(path: Path, first: tuple[int, int], last: tuple[int, int], unit: str) -> None:
    """Raises BenchError where the first or the last stamp, (ns on the file's scale, line), cannot be right."""
    (start, line), (end, last_line) = first, last
    if end - start > LONGEST_S * 10**9:
        years = (end - start) / 1e9 / (365.25 * 86400)
        raise BenchError(
            f"{path}:{last_line}: {years:,.0f} years after line {line}, expected 10 at most; is the unit right?"
        )
    if unit not in UNITS or start <= LATEST_ZERO_NS:
        return
    number, year = start // UNITS[unit], 1970 + round(start / (365.25 * 86400 * 10**9))
    right = next((name for name, ns in UNITS.items() if 10**8 <= number * ns // 10**9 < 10**10), "")
    hint = f"--unit {right}, as seconds since 1970 it is then" if right else "another --unit"
    raise BenchError(f"{path}:{line}: time {number} read as {unit}, which is the year {year:,}; expected {hint}")


# -- in words ---------------------------------------------------------------------------------------------------------

NO_TIMES = "no times in it: it cannot be replayed; order, lengths, prefixes and sessions are used"


class Clock(NamedTuple):
    """What stamps, in order, tell of the clock that made them."""

    rows: int
    instants: int  # that differ
    most: int  # rows that share one
    step_ns: int  # the greatest common factor of all gaps; 0 where there is none
    gap_ns: int  # the median one between instants, the upper of two; 0 unless several rows share an instant


Gaps = Callable[[], Iterator[np.ndarray]]  # those between stamps in order, ns, 0 or more, in parts, as often as asked


def clock_of(gaps: Gaps) -> Clock:
    rows = instants = most = run = 1
    step = 0
    for part in gaps():
        rows, step = rows + len(part), int(np.gcd.reduce(part, initial=step)) if len(part) else step
        ends = np.flatnonzero(part)  # a run of equal stamps ends before each
        instants += len(ends)
        if len(ends):
            most = max(most, run + int(ends[0]), int(np.diff(ends).max(initial=0)))
            run = len(part) - int(ends[-1])
        else:
            run += len(part)
    most = max(most, run)
    return Clock(rows, instants, most, step, _median(gaps, instants - 1) if step and most > 1 else 0)


def _median(gaps: Gaps, n: int) -> int:
    """Of the n gaps above 0 the one with n // 2 below it, by halving: nothing is sorted, and no part is kept."""
    low, high = 1, max(int(part.max(initial=1)) for part in gaps())
    while low < high:
        middle = (low + high) // 2
        if sum(int(((part > 0) & (part <= middle)).sum()) for part in gaps()) > n // 2:
            high = middle
        else:
            low = middle + 1
    return low


def times_said(timed: int, span_ns: int, clock: Clock, unit: str) -> Iterator[str]:
    """`clock`: of the rows that are left out too, as they tell of the file's clock as well as others."""
    yield f"times read as {unit}: {timed:,} timed rows over {span_ns / 1e9:g} s"
    if clock.step_ns:
        on = f"{clock.rows:,} rows on {clock.instants:,} instants, {_amount(clock.gap_ns)} apart at the median"
        shared = f"; {clock.most} rows share one instant ({on})" if clock.most > 1 else ""
        yield f"timestamp resolution {_amount(clock.step_ns)}{shared}"
    elif clock.most > 1:
        yield f"all {clock.most:,} rows share one instant"


_STEPS = ((10**9, "s"), (10**6, "ms"), (10**3, "µs"), (1, "ns"))


def _amount(ns: int) -> str:
    size, name = next((size, name) for size, name in _STEPS if ns % size == 0)
    return f"{ns // size:,} {name}"


def late_said(late: int) -> str:
    return f"{late:,} rows stood behind a later one: sorted by time, ties in the file's order"


def prompts_said(saved: tuple[int, int] | None, own_text: bool, several_turns: bool, unknown: int) -> Iterator[str]:
    """saved: (prompt tokens that an endless cache saves, all of them), where rows have hash ids."""
    if saved is not None:
        text = f"prefix sharing: an endless cache of full blocks saves {saved[0]:,} of {saved[1]:,} prompt tokens"
        yield f"{text} ({100 * saved[0] / saved[1]:.2f}%)"
    elif not own_text:
        beyond = " beyond a conversation's own history" if several_turns else ""
        yield f"prompts are unique; prefix cache hits are not modelled{beyond}"
    if unknown:
        yield f"{unknown:,} rows give a text without its length: what the target counts is not checked"
