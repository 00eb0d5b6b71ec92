"""How other load-testing tools compute a figure from a cell's records: percentiles, values of requests, rates.

In a definition d is the send, f the first token-bearing event, l the last, e the end of the response, n the output
tokens. A stamp that no record keeps gives bounds, never a guess.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from llm_bench import stats
from llm_bench.columns import Cell
from llm_bench.series import NOTHING, SERIES, elapsed_ms, event, gaps, stamp
from llm_bench.windows import attempted


class Sample(NamedTuple):
    """A value (k,) in ms of each request or gap. With `most` (k,) the truth lies between both, for the `reason`."""

    values: np.ndarray
    most: np.ndarray | None = None
    weights: np.ndarray | None = None
    reason: str = ""


Of = Callable[[Cell, np.ndarray], Sample | str]  # of the requests in a mask (n,); a str: why there is none
Rate = Callable[[Cell, np.ndarray], float | str]


# ---- percentiles as the tools take them


def _linear(values: np.ndarray, weights: np.ndarray | None, q: float) -> float:
    return stats.percentile(values, q)


def _nearest(values: np.ndarray, weights: np.ndarray | None, q: float) -> float:
    """The least value at which the share of the weights reaches q."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(np.ones(len(values)) if weights is None else weights[order])
    # 0.07 * 100 is 7.000000000000001, and its rank must be 7
    return float(values[order][np.searchsorted(reached, round(q * float(reached[-1]), 9))])


def _floor_rank(values: np.ndarray, weights: np.ndarray | None, q: float) -> float:
    return float(np.sort(values)[int(len(values) * q)])


Quantile = Callable[[np.ndarray, np.ndarray | None, float], float]
QUANTILES: dict[str, Quantile] = {
    "linear": _linear,
    "nearest rank by weight": _nearest,
    "rank floor(n q), from 0": _floor_rank,
}


# ---- what a request's value is made of

_STAMPS: dict[str, Callable[[Cell], np.ndarray]] = {
    "due": lambda cell: stamp(cell, "due_ns"),
    "d": lambda cell: stamp(cell, "sent_ns"),
    "first byte": lambda cell: stamp(cell, "first_byte_ns"),
    "f": lambda cell: event(cell, last=False),
    "f of content": lambda cell: stamp(cell, "first_answer_ns"),
    "l": lambda cell: event(cell, last=True),
    "e": lambda cell: stamp(cell, "end_ns"),
}
ROLE = "the first event with choices, maybe of a role alone, is not recorded"
LATE = "the stamp of its last event is not recorded"
EVENTS = "it divides by all data events, of roles, ends and usage too, which are not recorded"
EXTRA_GAPS = "gaps to events without a token are in it, which are not recorded"
REASONING = "it leaves reasoning out, and which events were reasoning is not recorded"
SEVERAL = "answers have several choices, which it does not tell apart"
NOT_STREAMED = "answers were not streamed"
LLAMA = "it counts with a Llama tokenizer, and no text is recorded"


def _ms(cell: Cell, rows: np.ndarray, later: str, earlier: str) -> np.ndarray:
    return np.asarray(elapsed_ms(_STAMPS[later](cell), _STAMPS[earlier](cell))[rows])


def _uncountable(cell: Cell, rows: np.ndarray) -> str:
    """Why tokens of the requests in the mask cannot be counted, or "" when they can."""
    if (cell.choices[rows] > 1).any():
        return SEVERAL
    unknown = int((cell["tokens_out"][rows] < 0).sum())
    return f"how many tokens they have is unknown of {unknown} of {int(rows.sum())} answers" if unknown else ""


def elapsed(later: str, earlier: str) -> Of:
    return lambda cell, rows: Sample(_ms(cell, rows, later, earlier))


def elapsed_until_late(cell: Cell, rows: np.ndarray) -> Sample:
    """To a last event at or after the last token."""
    return Sample(_ms(cell, rows, "l", "d"), _ms(cell, rows, "e", "d"), reason=LATE)


def _of_completions(cell: Cell) -> bool:
    return (cell.header.get("target") or {}).get("api") == "openai-completions"


def ttft_of_choices(cell: Cell, rows: np.ndarray) -> Sample:
    """To the first event with non-empty choices: in the completions protocol that one carries a token."""
    first = _ms(cell, rows, "f", "d")
    if _of_completions(cell):
        return Sample(first)
    return Sample(_ms(cell, rows, "first byte", "d"), first, reason=ROLE)


def ttft_of_several(cell: Cell, rows: np.ndarray) -> Sample | str:
    """To the first content event, of answers of two tokens or more."""
    if reason := _uncountable(cell, rows):
        return reason
    return Sample(_ms(cell, rows & (cell["tokens_out"] > 1), "f of content", "d"))


def tpot(earlier: str, first: str = "", until_late: bool = False, weighted: bool = False, rounded: bool = False) -> Of:
    """(l - f) / (n - 1) of answers of two tokens or more.

    `until_late`: to a last event between l and e. `first`: from one between that stamp and `earlier`. `weighted`: each
    request counts n - 1 times. `rounded`: to whole ns.
    """

    def of(cell: Cell, rows: np.ndarray) -> Sample | str:
        if reason := _uncountable(cell, rows):
            return reason
        rows = rows & (cell["tokens_out"] > 1)
        after = cell["tokens_out"][rows] - 1
        values = _ms(cell, rows, "l", earlier) / after
        most = _ms(cell, rows, "e", first or earlier) / after if until_late else None
        reason = f"{ROLE}, nor is that of its last" if first else LATE
        return Sample(np.round(values, 6) if rounded else values, most, after if weighted else None, reason)

    return of


def tpot_of_choices(cell: Cell, rows: np.ndarray) -> Sample | str:
    return tpot("f", "" if _of_completions(cell) else "first byte", until_late=True)(cell, rows)


def tpot_of_due(cell: Cell, rows: np.ndarray) -> Sample | str:
    if (rows & (cell["tokens_out"] == 1)).any():
        return "what a one-token answer counts as is not said"
    return tpot("f")(cell, rows)


def per_token(later: str, weighted: bool) -> Of:
    """(later - d) / n, the first token in it; `weighted`: each request counts n times."""

    def of(cell: Cell, rows: np.ndarray) -> Sample | str:
        if reason := _uncountable(cell, rows):
            return reason
        rows = rows & (cell["tokens_out"] > 0)
        tokens = cell["tokens_out"][rows]
        return Sample(_ms(cell, rows, later, "d") / tokens, weights=tokens if weighted else None)

    return of


def itl_after_first(cell: Cell, rows: np.ndarray) -> Sample | str:
    """(l - f) / (n - k1): k1, the tokens of the first event, is 1 where it is not known or leaves none."""
    found = tpot("f")(cell, rows)
    if isinstance(found, str):
        return found
    aware = SERIES["tpot_decode"].of(cell, NOTHING).values[rows & (cell["tokens_out"] > 1)]
    return Sample(np.where(np.isnan(aware), found.values, aware))


def per_event(cell: Cell, rows: np.ndarray) -> Sample | str:
    """(l - d) / events, of which those that bear tokens are known."""
    if (cell.choices[rows] > 1).any():
        return SEVERAL
    most = _ms(cell, rows, "l", "d") / np.maximum(cell.counts[rows], 1)
    return Sample(np.zeros(len(most)), most, reason=EVENTS)


def event_gaps(cell: Cell, rows: np.ndarray) -> Sample | str:
    if (cell.choices[rows] > 1).any():
        return SEVERAL
    kept = [between[np.repeat(rows[of], count)] for of, count, between in gaps(cell)]
    return Sample(np.concatenate([np.zeros(0, np.int64), *kept]) / 1e6)


def token_gaps(cell: Cell, rows: np.ndarray) -> Sample | str:
    """Gaps between tokens: those of one event came with no gap. How many did is n - events, whichever they were."""
    if reason := _uncountable(cell, rows):
        return reason
    rows = rows & (cell["tokens_out"] > 1)
    if (_ms(cell, rows, "f of content", "f") != 0).any():
        return REASONING
    beside = (cell["tokens_out"] - cell.counts)[rows]
    if (beside < 0).any():
        return "answers have more events than tokens"
    between = event_gaps(cell, rows)
    return between if isinstance(between, str) else Sample(np.append(between.values, np.zeros(int(beside.sum()))))


def never(reason: str) -> Callable[[Cell, np.ndarray], str]:
    return lambda cell, rows: reason


# ---- rates


def _between_s(later_ns: np.ndarray, earlier_ns: np.ndarray) -> float | str:
    """From the earliest stamp to the latest."""
    later_ns, earlier_ns = later_ns[~np.isnan(later_ns)], earlier_ns[~np.isnan(earlier_ns)]
    if not len(later_ns) or not len(earlier_ns) or later_ns.max() <= earlier_ns.min():
        return "no time passed from its first stamp to its last"
    return float(later_ns.max() - earlier_ns.min()) / 1e9


def wall_s(cell: Cell, rows: np.ndarray) -> float | str:
    """From the first due time to the end of all that was attempted, ramp and drain included."""
    return _between_s(_STAMPS["e"](cell)[attempted(cell)], _STAMPS["due"](cell))


def sent_to_end_s(cell: Cell, rows: np.ndarray) -> float | str:
    tried = attempted(cell)
    return _between_s(_STAMPS["e"](cell)[tried], _STAMPS["d"](cell)[tried])


def sent_to_token_s(cell: Cell, rows: np.ndarray) -> float | str:
    """From the first send to the last token, of what the tool counts."""
    return _between_s(_STAMPS["l"](cell)[rows], _STAMPS["d"](cell)[rows])


def due_to_last_s(cell: Cell, rows: np.ndarray) -> float | str:
    """From the first due time to the last token of the request that was due last."""
    if not rows[-1]:
        return "it would not have counted the request that was due last"
    return _between_s(_STAMPS["l"](cell)[-1:], _STAMPS["due"](cell))


Span = Callable[[Cell, np.ndarray], float | str]  # seconds, or why there are none


def tokens(span: Span) -> Rate:
    def of(cell: Cell, rows: np.ndarray) -> float | str:
        if reason := _uncountable(cell, rows):
            return reason
        seconds = span(cell, rows)
        return seconds if isinstance(seconds, str) else float(cell["tokens_out"][rows].sum()) / seconds

    return of


def requests(span: Span, but: int = 0) -> Rate:
    def of(cell: Cell, rows: np.ndarray) -> float | str:
        seconds = span(cell, rows)
        return seconds if isinstance(seconds, str) else (int(rows.sum()) - but) / seconds

    return of
