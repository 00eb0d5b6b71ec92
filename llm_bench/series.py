"""SERIES: what has one value a request. Definitions are METRICS.md's, row by row; nan = not applicable, never 0."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from llm_bench.columns import Cell, Piece
from llm_bench.windows import Window, connecting_retried


class Bound(NamedTuple):
    """A limit that each request meets or breaks: `series op value`, the value in the series' unit."""

    series: str
    op: Literal["<", "<=", ">", ">="]
    value: float
    of_class: str = ""  # it binds the requests of this class alone; "": all


@dataclass(frozen=True, slots=True)
class Context:
    """What some metrics need beside the records. `deadlines`: D_ttft, D_tpot in ms."""

    limits: tuple[Bound, ...] = ()
    deadlines: tuple[float, float] | None = None


NOTHING = Context()
ONE_STAMP = "one distinct event stamp"  # burst delivery hid the time between tokens
SEVERAL = "several choices"  # nothing says which of the tokens are whose
WHOLE, UNSAID = "not streamed", "not said by the server"
NO_COUNT, NO_FIRST = "tokens unknown", "size of the first event unknown"
NO_DEADLINES = "no deadlines were given: --deadlines"
# Reasoning alone, whose user waited in vain, or a tool call, which is all that was wanted: METRICS.md has no ttfo of
# either, and records do not tell them apart.
NO_ANSWER = "no answer token"
# There is such a time, and it cannot be known: no limit on it can be called met.
HIDDEN = (ONE_STAMP, SEVERAL, WHOLE, UNSAID, NO_COUNT, NO_FIRST, NO_DEADLINES, NO_ANSWER)


class Column(NamedTuple):
    """Values of a series. One a request unless `rows` (k,), non-decreasing, says to which request each belongs."""

    values: np.ndarray  # float64; nan = not applicable
    why: Mapping[str, np.ndarray] = {}  # reason -> mask (cell.n,) of requests it does not apply to; first match counts
    rows: np.ndarray | None = None


class Series(NamedTuple):
    unit: str
    of: Callable[[Cell, Context], Column]
    better: Literal["lower", "higher"]
    meaning: str
    counts_tokens: bool = False  # depends on tokens_out: an estimate where the server does not say it


def row_sums(offsets: np.ndarray, per_event: np.ndarray) -> np.ndarray:
    """Sums (k,) of a value per event; unlike np.add.reduceat it is right for requests without events."""
    total = np.zeros(len(per_event) + 1, np.float64 if per_event.dtype.kind == "f" else np.int64)
    np.cumsum(per_event, out=total[1:])
    return np.asarray(total[offsets[1:]] - total[offsets[:-1]])


def events_in(cell: Cell, window: Window) -> np.ndarray:
    """Token-bearing events (n,) of each request with a stamp in the window.

    Stamps of a request never fall, so only those requests that are at it when the window opens or closes need a look
    at each event.
    """
    first, last = cell.first_ns, cell.last_ns
    inside = np.where((first >= window.start_ns) & (last < window.end_ns), cell.counts, 0)
    astride = (first < window.end_ns) & (last >= window.start_ns) & (inside == 0) & (cell.counts > 0)
    for piece in cell.pieces() if astride.any() else ():
        if astride[piece.rows].any():
            seen = (piece.ns >= window.start_ns) & (piece.ns < window.end_ns)
            inside[piece.rows] = row_sums(piece.offsets, seen)
    return inside


def reads_in(cell: Cell, window: Window) -> int:
    """Reads of the socket that brought token-bearing events in the window: events of one read share their stamp."""
    reads = 0
    for piece in cell.pieces():
        fresh = np.diff(piece.ns, prepend=-1) != 0
        fresh[piece.offsets[:-1][np.diff(piece.offsets) > 0]] = True  # another request's read, whatever its stamp
        reads += int((fresh & (piece.ns >= window.start_ns) & (piece.ns < window.end_ns)).sum())
    return reads


def due_in(cell: Cell, window: Window) -> np.ndarray:
    """Mask of the requests that belong to the window: by due time."""
    return np.asarray((cell["due_ns"] >= window.start_ns) & (cell["due_ns"] < window.end_ns))


def outcome_in(cell: Cell, *outcomes: str) -> np.ndarray:
    """Mask of the requests with one of these outcomes."""
    return cell.among("outcome", *outcomes)


def exactly_counted(cell: Cell) -> np.ndarray:
    """Mask of the answers whose `tokens_out` is no estimate: the server's usage, or what it said of every event."""
    exact = cell.among("tokens_out_from", "usage")
    if cell.among("tokens_out_from", "events").any():
        for piece in cell.pieces():
            if piece.tokens is not None:
                unsaid = row_sums(piece.offsets, piece.tokens <= 0)  # 0: unknown
                adds_up = row_sums(piece.offsets, piece.tokens) == cell["tokens_out"][piece.rows]
                exact[piece.rows] |= adds_up & (unsaid == 0)
    return np.asarray(exact & (cell["tokens_out"] > 0))


SINGLE_PASS = "single pass: one answer, no tokens streamed"


def single_pass(cell: Cell) -> bool:
    """Is every ok answer of the cell of one pass: none asked for a length, none has a token, an event or a text?

    By the records alone, so that a cell of any age and protocol can be told; False where none is ok.
    """
    ok = outcome_in(cell, "ok")
    decoded = (cell.counts > 0) | (cell["tokens_out"] > 0) | (cell["text_bytes"] > 0) | (cell["asked_out"] >= 0)
    return bool(ok.any()) and not (ok & decoded).any()


def _since_first_due(cell: Cell, stamps: np.ndarray, known: np.ndarray) -> np.ndarray:
    # Stamps of a clock that has run for over 104 days do not fit float64's 53 bits; differences do.
    return np.where(known, (stamps - cell["due_ns"][:1]).astype(np.float64), np.nan)


def event(cell: Cell, last: bool) -> np.ndarray:
    """Each request's first or last event in ns since the cell's first due time, nan without events."""
    return _since_first_due(cell, cell.last_ns if last else cell.first_ns, cell.counts > 0)


def stamp(cell: Cell, name: str) -> np.ndarray:
    """A stamp of each request in ns since the cell's first due time, nan where it never came."""
    return _since_first_due(cell, cell[name], cell[name] > 0)


def elapsed_ms(later: np.ndarray, earlier: np.ndarray) -> np.ndarray:
    return np.asarray((later - earlier) / 1e6)


def _column(values: np.ndarray, why: Mapping[str, np.ndarray]) -> Column:
    for mask in why.values():
        values = np.where(mask, np.nan, values)
    return Column(values, why)


def _last(cell: Cell) -> np.ndarray:
    """Last token: the last event or, not streamed, the end."""
    return np.where(cell.counts > 0, event(cell, last=True), stamp(cell, "end_ns"))


def _short(cell: Cell) -> dict[str, np.ndarray]:
    return {"under 2 tokens": (cell["tokens_out"] >= 0) & (cell["tokens_out"] < 2)}


def _spread(cell: Cell) -> dict[str, np.ndarray]:
    """Why time between tokens does not apply: the reasons of METRICS.md, in the order in which they are counted."""
    return {
        **_short(cell),
        WHOLE: cell.counts == 0,
        ONE_STAMP: event(cell, last=True) == event(cell, last=False),
    }


def _ttft(cell: Cell, since: str) -> Column:
    return _column(elapsed_ms(event(cell, last=False), stamp(cell, since)), {WHOLE: cell.counts == 0})


def _ttfo(cell: Cell, _: Context) -> Column:
    first = stamp(cell, "first_answer_ns")
    values = elapsed_ms(first, stamp(cell, "due_ns"))
    return _column(values, {WHOLE: cell.counts == 0, NO_ANSWER: np.isnan(first)})


def _e2e(cell: Cell, since: str) -> Column:
    return Column(elapsed_ms(_last(cell), stamp(cell, since)))


def _decode_ms(cell: Cell) -> np.ndarray:
    return elapsed_ms(event(cell, last=True), event(cell, last=False))


def _tpot(cell: Cell, _: Context) -> Column:
    why = {NO_COUNT: cell["tokens_out"] < 0, SEVERAL: cell.choices > 1, **_spread(cell)}
    return _column(over(_decode_ms(cell), cell["tokens_out"] - 1), why)


def _tpot_decode(cell: Cell, _: Context) -> Column:
    first = _first_event_tokens(cell)
    values = over(_decode_ms(cell), cell["tokens_out"] - first)
    why = {NO_FIRST: first == 0, "all tokens in the first event": first >= cell["tokens_out"]}
    return _column(values, {SEVERAL: cell.choices > 1} | _spread(cell) | why)


def _first_event_tokens(cell: Cell) -> np.ndarray:
    first = np.zeros(cell.n, np.int64)
    for piece in cell.pieces():
        if piece.tokens is not None:
            some = np.diff(piece.offsets) > 0
            first[piece.rows[some]] = piece.tokens[piece.offsets[:-1][some]]
    return first


def over(values: np.ndarray, by: np.ndarray) -> np.ndarray:
    """values / by where by > 0, else nan: a count of tokens that is not there gives no rate."""
    return np.asarray(np.divide(values, by, out=np.full(len(values), np.nan), where=by > 0))


def gaps(cell: Cell) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(rows, how many gaps each has, all gaps in ns) of some requests at a time.

    Gaps are between successive token-bearing events of one choice of one request.
    """
    for piece in cell.pieces():
        if piece.choice is not None and piece.choice.any():
            yield _gaps_within_choices(piece)
            continue
        between = np.diff(piece.ns)
        borders = piece.offsets[1:-1] - 1  # from the last event of one request to the first of the next
        keep = np.ones(len(between), bool)
        keep[borders[(borders >= 0) & (borders < len(between))]] = False
        yield piece.rows, np.maximum(np.diff(piece.offsets) - 1, 0), between[keep]


def _gaps_within_choices(piece: Piece) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    assert piece.choice is not None
    row = np.repeat(np.arange(len(piece.rows)), np.diff(piece.offsets))
    order = np.lexsort((piece.choice, row))  # stable: events of a choice stay in order
    choice = piece.choice[order]
    same = (row[1:] == row[:-1]) & (choice[1:] == choice[:-1])
    return piece.rows, np.bincount(row[1:][same], minlength=len(piece.rows)), np.diff(piece.ns[order])[same]


def _itl(cell: Cell, _: Context) -> Column:
    why = _spread(cell)
    null = np.logical_or.reduce(list(why.values()))
    many = np.zeros(cell.n, np.int64)
    for rows, count, _gaps in gaps(cell):
        many[rows] = count
    many[null] = 0
    starts = np.cumsum(many) - many
    values = np.empty(int(many.sum()))  # the one array of a report that is as long as there are gaps
    for rows, count, between in gaps(cell):
        mine = np.repeat(~null[rows], count)
        shift = np.repeat(starts[rows] - (np.cumsum(many[rows]) - many[rows]), many[rows])
        values[shift + np.arange(len(shift))] = between[mine]
    values /= 1e6
    return Column(values, why, np.repeat(np.arange(cell.n, dtype=np.int32), many))


def _stall(cell: Cell, _: Context) -> Column:
    values = np.full(cell.n, np.nan)
    for rows, count, between in gaps(cell):
        some = count > 0
        if len(between):
            values[rows[some]] = np.maximum.reduceat(between, (np.cumsum(count) - count)[some]) / 1e6
    return _column(values, _spread(cell) | {"one token a choice": (cell.choices > 1) & np.isnan(values)})


def _lag(cell: Cell, later: str, earlier: str) -> Column:
    return Column(elapsed_ms(stamp(cell, later), stamp(cell, earlier)))


def _lag_client(cell: Cell, _: Context) -> Column:
    """What is left of sent - ready when connecting is taken off. Retries before anything was sent waited as told."""
    lag = _lag(cell, "sent_ns", "ready_ns").values - cell["connect_ns"] / 1e6
    return _column(lag, {"connecting was retried": connecting_retried(cell)})


def _lag_connect(cell: Cell, _: Context) -> Column:
    return Column(np.where(cell["sent_ns"] > 0, cell["connect_ns"] / 1e6, np.nan))


def _normalized(cell: Cell, _: Context) -> Column:
    values = over(_e2e(cell, "due_ns").values, cell["tokens_out"])
    return _column(values, {NO_COUNT: cell["tokens_out"] < 1, SEVERAL: cell.choices > 1})


def _output_speed(cell: Cell, ctx: Context) -> Column:
    tpot = _tpot(cell, ctx)
    return Column(1000 * over(np.ones(cell.n), tpot.values), tpot.why)


def _server(name: str) -> Callable[[Cell, Context], Column]:
    return lambda cell, _: _column(cell[name], {UNSAID: np.isnan(cell[name])})


def _server_tpot(cell: Cell, _: Context) -> Column:
    said = cell["server_tpot_ms"]
    return _column(said, {**_short(cell), UNSAID: np.isnan(said)})


def _by_deadlines(share: Callable[[Cell, float, float], np.ndarray]) -> Callable[[Cell, Context], Column]:
    def column(cell: Cell, ctx: Context) -> Column:
        if ctx.deadlines is None:
            return _column(np.full(cell.n, np.nan), {NO_DEADLINES: np.ones(cell.n, bool)})
        why = {WHOLE: cell.counts == 0, SEVERAL: cell.choices > 1}
        return _column(share(cell, *ctx.deadlines), why)

    return column


def _event_sizes(cell: Cell) -> np.ndarray:
    """Tokens of each event; 1 where the wire does not say (an event bears at least one)."""
    return np.asarray(np.maximum(cell.event_tokens, 1))


def _fluidity(cell: Cell, d_ttft: float, d_tpot: float) -> np.ndarray:
    """Deadlines met / deadlines, all requests walked at once, one event a step (Etalon, arXiv 2407.07000)."""
    sizes, many = _event_sizes(cell), cell.counts
    met, total, slack = np.zeros(cell.n), np.zeros(cell.n), np.zeros(cell.n)
    before = cell["due_ns"].copy()
    longest_first = np.argsort(-many, kind="stable")
    alive = np.searchsorted(-many[longest_first], -np.arange(int(many.max(initial=0))), "left")
    for k, still in enumerate(alive):
        row = longest_first[:still]
        at = cell.offsets[row] + k
        now = cell.event_ns[at]
        late = (now - before[row]) / 1e6 - ((d_ttft if k == 0 else d_tpot) + slack[row])
        missed = np.where(late > 0, 1 + np.floor(late / d_tpot), 0)
        rest = sizes[at] - 1  # tokens of the same event come after no time at all: met, a whole deadline left over
        met[row] += (late <= 0) + rest
        total[row] += np.where(late > 0, missed, 1) + rest
        slack[row] = np.maximum(-late, 0) + rest * d_tpot
        before[row] = now
    return over(met, total)


def _on_time(cell: Cell, d_ttft: float, d_tpot: float) -> np.ndarray:
    """Share of tokens i with stamp <= due + D_ttft + i * D_tpot."""
    sizes, many = _event_sizes(cell), cell.counts
    before = np.cumsum(sizes) - sizes
    first = before - np.repeat(np.append(before, 0)[cell.offsets[:-1]], many)  # i of each event's first token
    late = (cell.event_ns - np.repeat(cell["due_ns"], many)) / 1e6 - d_ttft
    from_i = np.ceil(np.round(late / d_tpot, 9))  # tokens of the event with i at or above this are on time
    return over(row_sums(cell.offsets, np.clip(first + sizes - from_i, 0, sizes)), row_sums(cell.offsets, sizes))


SERIES: dict[str, Series] = {
    "ttft": Series("ms", lambda c, _: _ttft(c, "due_ns"), "lower", "first token from due time, queueing included"),
    "ttft_sent": Series("ms", lambda c, _: _ttft(c, "sent_ns"), "lower", "first token from the send"),
    "ttfo": Series("ms", _ttfo, "lower", "first answer token (not reasoning) from due time"),
    "e2e": Series("ms", lambda c, _: _e2e(c, "due_ns"), "lower", "last token from due time"),
    "e2e_sent": Series("ms", lambda c, _: _e2e(c, "sent_ns"), "lower", "last token from the send"),
    "tpot": Series("ms", _tpot, "lower", "(last - first token) / (tokens - 1)", True),
    "tpot_decode": Series("ms", _tpot_decode, "lower", "(last - first event) / (tokens - tokens of the first)", True),
    "itl": Series("ms", _itl, "lower", "gap between token-bearing events, pooled over requests"),
    "stall": Series("ms", _stall, "lower", "longest gap of a request"),
    "lag": Series("ms", lambda c, _: _lag(c, "sent_ns", "due_ns"), "lower", "sent after due time"),
    "lag_wait": Series("ms", lambda c, _: _lag(c, "ready_ns", "due_ns"), "lower", "of lag: waiting for a slot or cap"),
    "lag_connect": Series("ms", _lag_connect, "lower", "of lag: waiting for a new connection"),
    "lag_client": Series("ms", _lag_client, "lower", "of lag: the client's own lateness"),
    "normalized_latency": Series("ms/token", _normalized, "lower", "e2e / tokens", True),
    "output_speed": Series("tokens/s", _output_speed, "higher", "1000 / tpot: what one user sees", True),
    "fluidity": Series("share", _by_deadlines(_fluidity), "higher", "token deadlines met (Etalon); needs --deadlines"),
    "on_time_share": Series("share", _by_deadlines(_on_time), "higher", "tokens on time; needs --deadlines"),
    "queue": Series("ms", _server("server_queue_ms"), "lower", "the server's own account of its queue"),
    "prefill": Series("ms", _server("server_prefill_ms"), "lower", "the server's own account of its prefill"),
    "decode": Series("ms", _server("server_decode_ms"), "lower", "the server's own account of its decoding"),
    "server_ttft": Series("ms", _server("server_ttft_ms"), "lower", "the server's own account of its TTFT"),
    "server_tpot": Series("ms", _server_tpot, "lower", "the server's own account of its TPOT"),
    "batch": Series("inputs", _server("server_batch"), "higher", "inputs computed at once with it, by the server"),
}
