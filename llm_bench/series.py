"""SERIES: what has one value a request. Definitions are METRICS.md's, row by row; nan = not applicable, never 0."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from llm_bench.records import Cell
from llm_bench.windows import Window


@dataclass(frozen=True, slots=True)
class Context:
    """What some metrics need beside the records. `limits`: series -> in its unit; `deadlines`: D_ttft, D_tpot in ms."""

    limits: Mapping[str, float] = field(default_factory=dict)
    deadlines: tuple[float, float] | None = None


NOTHING = Context()
ONE_STAMP = "one distinct event stamp"  # burst delivery hid the time between tokens


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


def counts(cell: Cell) -> np.ndarray:
    """Token-bearing events of each request (n,)."""
    return np.diff(cell.offsets)


def row_sums(cell: Cell, per_event: np.ndarray) -> np.ndarray:
    """Sums (n,) of a value per event; unlike np.add.reduceat it is right for requests without events."""
    total = np.concatenate([[0], np.cumsum(per_event)])
    return np.asarray(total[cell.offsets[1:]] - total[cell.offsets[:-1]])


def due_in(cell: Cell, window: Window) -> np.ndarray:
    """Mask of the requests that belong to the window: by due time."""
    return np.asarray((cell["due_ns"] >= window.start_ns) & (cell["due_ns"] < window.end_ns))


def outcome_in(cell: Cell, *outcomes: str) -> np.ndarray:
    """Mask of the requests with one of these outcomes."""
    return np.asarray(np.logical_or.reduce([cell["outcome"] == outcome for outcome in outcomes]), bool)


def _since_first_due(cell: Cell, stamps: np.ndarray, known: np.ndarray) -> np.ndarray:
    # Stamps of a clock that has run for over 104 days do not fit float64's 53 bits; differences do.
    return np.where(known, (stamps - cell["due_ns"][:1]).astype(np.float64), np.nan)


def event(cell: Cell, last: bool) -> np.ndarray:
    """Each request's first or last event in ns since the cell's first due time, nan without events."""
    if not len(cell.event_ns):
        return np.full(cell.n, np.nan)
    at = cell.offsets[1:] - 1 if last else cell.offsets[:-1]
    return _since_first_due(cell, cell.event_ns[np.clip(at, 0, len(cell.event_ns) - 1)], counts(cell) > 0)


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
    return np.where(counts(cell) > 0, event(cell, last=True), stamp(cell, "end_ns"))


def _spread(cell: Cell) -> dict[str, np.ndarray]:
    """Why time between tokens does not apply: the reasons of METRICS.md, in the order in which they are counted."""
    return {
        "under 2 tokens": (cell["tokens_out"] >= 0) & (cell["tokens_out"] < 2),
        "not streamed": counts(cell) == 0,
        ONE_STAMP: event(cell, last=True) == event(cell, last=False),
    }


def _ttft(cell: Cell, since: str) -> Column:
    return _column(elapsed_ms(event(cell, last=False), stamp(cell, since)), {"not streamed": counts(cell) == 0})


def _ttfo(cell: Cell, _: Context) -> Column:
    first = stamp(cell, "first_answer_ns")
    values = elapsed_ms(first, stamp(cell, "due_ns"))
    return _column(values, {"not streamed": counts(cell) == 0, "no answer token": np.isnan(first)})


def _e2e(cell: Cell, since: str) -> Column:
    return Column(elapsed_ms(_last(cell), stamp(cell, since)))


def _decode_ms(cell: Cell) -> np.ndarray:
    return elapsed_ms(event(cell, last=True), event(cell, last=False))


def _tpot(cell: Cell, _: Context) -> Column:
    why = {"tokens unknown": cell["tokens_out"] < 0, **_spread(cell)}
    return _column(over(_decode_ms(cell), cell["tokens_out"] - 1), why)


def _tpot_decode(cell: Cell, _: Context) -> Column:
    first = _first_event_tokens(cell)
    values = over(_decode_ms(cell), cell["tokens_out"] - first)
    why = {"size of the first event unknown": first == 0, "all tokens in the first event": first >= cell["tokens_out"]}
    return _column(values, _spread(cell) | why)


def _first_event_tokens(cell: Cell) -> np.ndarray:
    if not len(cell.event_tokens):
        return np.zeros(cell.n, np.int64)
    at = np.minimum(cell.offsets[:-1], len(cell.event_tokens) - 1)
    return np.where(counts(cell) > 0, cell.event_tokens[at], 0)


def over(values: np.ndarray, by: np.ndarray) -> np.ndarray:
    """values / by where by > 0, else nan: a count of tokens that is not there gives no rate."""
    return np.asarray(np.divide(values, by, out=np.full(len(values), np.nan), where=by > 0))


def gaps_ms(cell: Cell) -> tuple[np.ndarray, np.ndarray]:
    """Every gap between successive token-bearing events of one choice of one request, and its request's row."""
    rows = np.repeat(np.arange(cell.n), counts(cell))
    stamps, choice = cell.event_ns, cell.event_choice
    same = rows[1:] == rows[:-1]
    if choice.any():
        order = np.lexsort((choice, rows))  # stable: events of a choice stay in order
        stamps, choice = stamps[order], choice[order]
        same &= choice[1:] == choice[:-1]
    return np.diff(stamps)[same] / 1e6, rows[1:][same]


def _itl(cell: Cell, _: Context) -> Column:
    gaps, rows = gaps_ms(cell)
    why = _spread(cell)
    null = np.logical_or.reduce(list(why.values()))[rows]
    return Column(gaps[~null], why, rows[~null])


def _stall(cell: Cell, ctx: Context) -> Column:
    gaps, why, rows = _itl(cell, ctx)
    assert rows is not None
    values = np.full(cell.n, -np.inf)
    starts = np.flatnonzero(np.concatenate([[True], rows[1:] != rows[:-1]])) if len(rows) else rows
    values[rows[starts]] = np.maximum.reduceat(gaps, starts) if len(rows) else gaps
    return Column(np.where(np.isinf(values), np.nan, values), why)


def _lag(cell: Cell, later: str, earlier: str) -> Column:
    return Column(elapsed_ms(stamp(cell, later), stamp(cell, earlier)))


def _normalized(cell: Cell, _: Context) -> Column:
    return _column(over(_e2e(cell, "due_ns").values, cell["tokens_out"]), {"tokens unknown": cell["tokens_out"] < 1})


def _output_speed(cell: Cell, ctx: Context) -> Column:
    tpot = _tpot(cell, ctx)
    return Column(1000 * over(np.ones(cell.n), tpot.values), tpot.why)


def _server(name: str) -> Callable[[Cell, Context], Column]:
    return lambda cell, _: _column(cell[name], {"not said by the server": np.isnan(cell[name])})


def _deadline_walk(cell: Cell, ctx: Context, share: Callable[[Cell, float, float], np.ndarray]) -> Column:
    if ctx.deadlines is None:
        return _column(np.full(cell.n, np.nan), {"no deadlines given": np.ones(cell.n, bool)})
    why = {"not streamed": counts(cell) == 0, "several choices": row_sums(cell, cell.event_choice) > 0}
    return _column(share(cell, *ctx.deadlines), why)


def _event_sizes(cell: Cell) -> np.ndarray:
    """Tokens of each event; 1 where the wire does not say (an event bears at least one)."""
    return np.asarray(np.maximum(cell.event_tokens, 1))


def _fluidity(cell: Cell, d_ttft: float, d_tpot: float) -> np.ndarray:
    """Deadlines met / deadlines, all requests walked at once, one event a step (Etalon, arXiv 2407.07000)."""
    sizes, many = _event_sizes(cell), counts(cell)
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
    sizes, many = _event_sizes(cell), counts(cell)
    before = np.cumsum(sizes) - sizes
    first = before - np.repeat(np.append(before, 0)[cell.offsets[:-1]], many)  # i of each event's first token
    late = (cell.event_ns - np.repeat(cell["due_ns"], many)) / 1e6 - d_ttft
    from_i = np.ceil(np.round(late / d_tpot, 9))  # tokens of the event with i at or above this are on time
    return over(row_sums(cell, np.clip(first + sizes - from_i, 0, sizes)), row_sums(cell, sizes))


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
    "lag_client": Series("ms", lambda c, _: _lag(c, "sent_ns", "ready_ns"), "lower", "of lag: the client's lateness"),
    "normalized_latency": Series("ms/token", _normalized, "lower", "e2e / tokens", True),
    "output_speed": Series("tokens/s", _output_speed, "higher", "1000 / tpot: what one user sees", True),
    "fluidity": Series("share", lambda c, x: _deadline_walk(c, x, _fluidity), "higher", "token deadlines met (Etalon)"),
    "on_time_share": Series("share", lambda c, x: _deadline_walk(c, x, _on_time), "higher", "tokens on time"),
    "queue": Series("ms", _server("server_queue_ms"), "lower", "the server's own account"),
    "prefill": Series("ms", _server("server_prefill_ms"), "lower", "the server's own account"),
    "decode": Series("ms", _server("server_decode_ms"), "lower", "the server's own account"),
    "server_ttft": Series("ms", _server("server_ttft_ms"), "lower", "the server's own account"),
    "server_tpot": Series("ms", _server("server_tpot_ms"), "lower", "the server's own account"),
}
