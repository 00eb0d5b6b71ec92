"""What other load-testing tools would have printed for the same records, by their own definitions (TOOLS).

In a definition d is the send, f the first token-bearing event, l the last, e the end of the response, n the output
tokens. These tools know no window: they count the whole run. A stamp that no record keeps gives bounds, never a guess.
"""

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from llm_bench import metrics, stats
from llm_bench.columns import Cell
from llm_bench.errors import BenchError
from llm_bench.series import NOTHING, SERIES, elapsed_ms, event, gaps, outcome_in, stamp
from llm_bench.windows import Window, attempted

REDUCERS = ("mean", "p50", "p99")


class Sample(NamedTuple):
    """A value (k,) in ms of each request or gap. With `most` (k,) the truth lies between both, for the `reason`."""

    values: np.ndarray
    most: np.ndarray | None = None
    weights: np.ndarray | None = None
    reason: str = ""


Of = Callable[[Cell, np.ndarray], Sample | str]  # of the requests in a mask (n,); a str: why there is none
Rate = Callable[[Cell, np.ndarray], float | str]


F = TypeVar("F")


class Figure(NamedTuple, Generic[F]):
    name: str  # as the tool calls it
    ours: str  # the series or the figure of the cell that a reader would hold it against
    why: str  # what sets them apart
    of: F


class Tool(NamedTuple):
    version: str  # that the definitions are of
    quantile: str  # one of QUANTILES
    retokenises: bool  # the n in its figures is of a tokenizer of its own, and the records keep no text
    also_ok: tuple[str, ...]  # kinds of our failures that it takes for successes, where tokens came
    series: tuple[Figure[Of], ...]
    rates: tuple[Figure[Rate], ...]


class Line(NamedTuple):
    """A figure of the tool's and ours. `value` is None for a `reason`; it may still lie between `least` and `most`."""

    name: str
    unit: str
    value: float | None
    least: float | None
    most: float | None
    reason: str
    ours: str
    our_value: float | None
    why: str


class Table(NamedTuple):
    tool: str
    version: str
    requests: int  # that the tool would have counted
    notes: tuple[str, ...]
    lines: tuple[Line, ...]


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


def _elapsed(later: str, earlier: str) -> Of:
    return lambda cell, rows: Sample(_ms(cell, rows, later, earlier))


def _elapsed_until_late(cell: Cell, rows: np.ndarray) -> Sample:
    """To a last event at or after the last token."""
    return Sample(_ms(cell, rows, "l", "d"), _ms(cell, rows, "e", "d"), reason=LATE)


def _of_completions(cell: Cell) -> bool:
    return (cell.header.get("target") or {}).get("api") == "openai-completions"


def _ttft_of_choices(cell: Cell, rows: np.ndarray) -> Sample:
    """To the first event with non-empty choices: in the completions protocol that one carries a token."""
    first = _ms(cell, rows, "f", "d")
    if _of_completions(cell):
        return Sample(first)
    return Sample(_ms(cell, rows, "first byte", "d"), first, reason=ROLE)


def _ttft_of_several(cell: Cell, rows: np.ndarray) -> Sample | str:
    """To the first content event, of answers of two tokens or more."""
    if reason := _uncountable(cell, rows):
        return reason
    return Sample(_ms(cell, rows & (cell["tokens_out"] > 1), "f of content", "d"))


def _tpot(earlier: str, first: str = "", until_late: bool = False, weighted: bool = False, rounded: bool = False) -> Of:
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


def _tpot_of_choices(cell: Cell, rows: np.ndarray) -> Sample | str:
    return _tpot("f", "" if _of_completions(cell) else "first byte", until_late=True)(cell, rows)


def _tpot_of_due(cell: Cell, rows: np.ndarray) -> Sample | str:
    if (rows & (cell["tokens_out"] == 1)).any():
        return "what a one-token answer counts as is not said"
    return _tpot("f")(cell, rows)


def _per_token(later: str, weighted: bool) -> Of:
    """(later - d) / n, the first token in it; `weighted`: each request counts n times."""

    def of(cell: Cell, rows: np.ndarray) -> Sample | str:
        if reason := _uncountable(cell, rows):
            return reason
        rows = rows & (cell["tokens_out"] > 0)
        tokens = cell["tokens_out"][rows]
        return Sample(_ms(cell, rows, later, "d") / tokens, weights=tokens if weighted else None)

    return of


def _itl_after_first(cell: Cell, rows: np.ndarray) -> Sample | str:
    """(l - f) / (n - k1): k1, the tokens of the first event, is 1 where it is not known or leaves none."""
    found = _tpot("f")(cell, rows)
    if isinstance(found, str):
        return found
    aware = SERIES["tpot_decode"].of(cell, NOTHING).values[rows & (cell["tokens_out"] > 1)]
    return Sample(np.where(np.isnan(aware), found.values, aware))


def _per_event(cell: Cell, rows: np.ndarray) -> Sample | str:
    """(l - d) / events, of which those that bear tokens are known."""
    if (cell.choices[rows] > 1).any():
        return SEVERAL
    most = _ms(cell, rows, "l", "d") / np.maximum(cell.counts[rows], 1)
    return Sample(np.zeros(len(most)), most, reason=EVENTS)


def _event_gaps(cell: Cell, rows: np.ndarray) -> Sample | str:
    if (cell.choices[rows] > 1).any():
        return SEVERAL
    kept = [between[np.repeat(rows[of], count)] for of, count, between in gaps(cell)]
    return Sample(np.concatenate([np.zeros(0, np.int64), *kept]) / 1e6)


def _token_gaps(cell: Cell, rows: np.ndarray) -> Sample | str:
    """Gaps between tokens: those of one event came with no gap. How many did is n - events, whichever they were."""
    if reason := _uncountable(cell, rows):
        return reason
    rows = rows & (cell["tokens_out"] > 1)
    if (_ms(cell, rows, "f of content", "f") != 0).any():
        return REASONING
    beside = (cell["tokens_out"] - cell.counts)[rows]
    if (beside < 0).any():
        return "answers have more events than tokens"
    between = _event_gaps(cell, rows)
    return between if isinstance(between, str) else Sample(np.append(between.values, np.zeros(int(beside.sum()))))


def _never(reason: str) -> Callable[[Cell, np.ndarray], str]:
    return lambda cell, rows: reason


# ---- rates


def _between_s(later_ns: np.ndarray, earlier_ns: np.ndarray) -> float | str:
    """From the earliest stamp to the latest."""
    later_ns, earlier_ns = later_ns[~np.isnan(later_ns)], earlier_ns[~np.isnan(earlier_ns)]
    if not len(later_ns) or not len(earlier_ns) or later_ns.max() <= earlier_ns.min():
        return "no time passed from its first stamp to its last"
    return float(later_ns.max() - earlier_ns.min()) / 1e9


def _wall_s(cell: Cell, rows: np.ndarray) -> float | str:
    """From the first due time to the end of all that was attempted, ramp and drain included."""
    return _between_s(_STAMPS["e"](cell)[attempted(cell)], _STAMPS["due"](cell))


def _sent_to_end_s(cell: Cell, rows: np.ndarray) -> float | str:
    tried = attempted(cell)
    return _between_s(_STAMPS["e"](cell)[tried], _STAMPS["d"](cell)[tried])


def _sent_to_token_s(cell: Cell, rows: np.ndarray) -> float | str:
    """From the first send to the last token, of what the tool counts."""
    return _between_s(_STAMPS["l"](cell)[rows], _STAMPS["d"](cell)[rows])


def _due_to_last_s(cell: Cell, rows: np.ndarray) -> float | str:
    """From the first due time to the last token of the request that was due last."""
    if not rows[-1]:
        return "it would not have counted the request that was due last"
    return _between_s(_STAMPS["l"](cell)[-1:], _STAMPS["due"](cell))


Span = Callable[[Cell, np.ndarray], float | str]  # seconds, or why there are none


def _tokens(span: Span) -> Rate:
    def of(cell: Cell, rows: np.ndarray) -> float | str:
        if reason := _uncountable(cell, rows):
            return reason
        seconds = span(cell, rows)
        return seconds if isinstance(seconds, str) else float(cell["tokens_out"][rows].sum()) / seconds

    return of


def _requests(span: Span, but: int = 0) -> Rate:
    def of(cell: Cell, rows: np.ndarray) -> float | str:
        seconds = span(cell, rows)
        return seconds if isinstance(seconds, str) else (int(rows.sum()) - but) / seconds

    return of


def _throughput(span: Span, window: str, tokens: str, requests: str, but: int = 0) -> tuple[Figure[Rate], ...]:
    return (
        Figure(tokens, "tokens_per_second", window, _tokens(span)),
        Figure(requests, "requests_per_second", window, _requests(span, but)),
    )


# ---- the tools

_SHORT, _IN_STREAM = "short_output", "server_error_in_stream"
_RAMP = "ramp and drain are in"
TOOLS: dict[str, Tool] = {
    "vllm": Tool(
        "vllm bench serve 0.32", "linear", False, (_SHORT, _IN_STREAM),
        (
            Figure("TTFT", "ttft", "from send; role-only event counts", _ttft_of_choices),
            Figure("TPOT", "tpot", "role-only event to last event", _tpot_of_choices),
            Figure("ITL", "itl", "gaps of all events", _never(EXTRA_GAPS)),
            Figure("E2EL", "e2e", "from send to last event", _elapsed_until_late),
        ),
        _throughput(_wall_s, _RAMP, "Output token throughput", "Request throughput"),
    ),
    "sglang": Tool(
        "sglang bench_serving 0.5.23", "linear", False, (_SHORT, _IN_STREAM),
        (
            Figure("TTFT", "ttft", "from send, not due time", _elapsed("f", "d")),
            Figure("TPOT", "tpot", "to last event, not token", _tpot("f", until_late=True)),
            Figure("ITL", "itl", "bursts' zero gaps are in", _event_gaps),
            Figure("E2E Latency", "e2e", "from send to last event", _elapsed_until_late),
        ),
        _throughput(_wall_s, _RAMP, "Output token throughput", "Request throughput"),
    ),
    "guidellm": Tool(
        "guidellm 0.8", "nearest rank by weight", False, (_SHORT,),
        (
            Figure("TTFT", "ttft", "from send, not due time", _elapsed("f", "d")),
            Figure("ITL", "tpot", "our TPOT, weighted by tokens", _tpot("f", weighted=True)),
            Figure("TPOT", "normalized_latency", "first token in; weighted by tokens", _per_token("l", weighted=True)),
            Figure("Request Latency", "e2e", "from send to response's end", _elapsed("e", "d")),
        ),
        _throughput(_sent_to_end_s, "no warm-up cut by default", "Output Tok/s mean", "Req/s mean"),
    ),
    "aiperf": Tool(
        "aiperf 0.13", "linear", True, (_SHORT, _IN_STREAM),
        (
            Figure("Time to First Token", "ttft", "from send, not due time", _elapsed("f", "d")),
            Figure("Inter Token Latency", "tpot", "our TPOT; packet-aware where known", _itl_after_first),
            Figure("Inter Chunk Latency", "itl", "bursts' zero gaps are in", _event_gaps),
            Figure("Request Latency", "e2e", "from send, not due time", _elapsed("l", "d")),
        ),
        _throughput(_sent_to_token_s, "first send to last token", "Output Token Throughput", "Request Throughput"),
    ),
    "inference-perf": Tool(
        "inference-perf 0.7", "linear", True, (_SHORT, _IN_STREAM),
        (
            Figure("time_to_first_token", "ttft", "from send; one-token answers out", _ttft_of_several),
            Figure("time_per_output_token", "tpot", "from content, reasoning left out", _tpot("f of content")),
            Figure("inter_token_latency", "itl", "per token: zero within events", _token_gaps),
            Figure("normalized_time_per_output_token", "normalized_latency", "from send to response's end",
                   _per_token("e", weighted=False)),
            Figure("request_latency", "e2e", "from send to response's end", _elapsed("e", "d")),
        ),
        _throughput(_sent_to_end_s, _RAMP, "output_tokens_per_sec", "requests_per_sec"),
    ),
    "llmperf": Tool(
        "LLMPerf (token_benchmark_ray.py)", "linear", False, (_SHORT,),
        (
            Figure("ttft_s", "ttft", "from send; content only", _elapsed("f of content", "d")),
            Figure("inter_token_latency_s", "tpot", "TTFT in, divided by events", _per_event),
            Figure("end_to_end_latency_s", "e2e", "from send to response's end", _elapsed("e", "d")),
        ),
        (
            Figure("mean_output_throughput_token_per_s", "tokens_per_second", _RAMP, _never(LLAMA)),
            Figure("num_completed_requests_per_min / 60", "requests_per_second", _RAMP, _requests(_wall_s)),
        ),
    ),
    "genai-perf": Tool(
        "genai-perf (as NVIDIA documents it)", "linear", True, (_SHORT,),
        (
            Figure("Time To First Token", "ttft", "from send, not due time", _elapsed("f", "d")),
            Figure("Inter Token Latency", "tpot", "our TPOT, rounded to ns", _tpot("f", rounded=True)),
            Figure("Request Latency", "e2e", "from send, not due time", _elapsed("l", "d")),
        ),
        _throughput(_sent_to_token_s, "first send to last token", "Output Token Throughput", "Request Throughput"),
    ),
    "mlperf": Tool(
        "MLPerf LoadGen (server scenario)", "rank floor(n q), from 0", False, (_SHORT,),
        (
            Figure("first token latency", "ttft", "from due time, as ours", _elapsed("f", "due")),
            Figure("time to output token", "tpot", "as ours, other percentiles", _tpot_of_due),
            Figure("latency", "e2e", "from due time, as ours", _elapsed("l", "due")),
        ),
        _throughput(_due_to_last_s, "to the last due's end", "Completed tokens per second",
                    "Completed samples per second", but=1),
    ),
}  # fmt: skip
LEAST_MLPERF_S = 600  # a shorter server run is not valid there


def parse(text: str) -> tuple[str, ...]:
    """`vllm,aiperf` -> names of TOOLS, each once; "" -> none. Raises BenchError for an unknown one."""
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in TOOLS:
            raise BenchError(f"--as {name!r}: expected some of {', '.join(TOOLS)}")
    return names


def tables(cell: Cell, window: Window, tools: Sequence[str]) -> tuple[Table, ...]:
    """What each of `tools` would have printed for the cell, and beside it ours over the window.

    Raises KeyError for a tool that is none of TOOLS.
    """
    chosen = [(name, TOOLS[name]) for name in tools]
    names = [f"{f.ours}_{r}" for _, tool in chosen for f in tool.series for r in REDUCERS]
    names += [f.ours for _, tool in chosen for f in tool.rates]
    distinct = list(dict.fromkeys(names))
    ours = {v.name: v.value for v in metrics.compute_all(distinct, cell, window)}
    return tuple(_table(name, tool, cell, ours) for name, tool in chosen)


def _table(name: str, tool: Tool, cell: Cell, ours: dict[str, float | None]) -> Table:
    also = outcome_in(cell, "failed") & cell.among("error_kind", *tool.also_ok) & (cell.counts > 0)
    rows = outcome_in(cell, "ok") | also
    lines = []
    for figure in tool.series:
        found = _checked(figure.of, cell, rows)
        for reducer in REDUCERS:
            compared = f"{figure.ours}_{reducer}"
            value, least, most, reason = _reduced(found, reducer, QUANTILES[tool.quantile])
            given = (f"{figure.name} {reducer}", SERIES[figure.ours].unit, value, least, most, reason)
            lines.append(Line(*given, compared, ours[compared], figure.why))
    for rate in tool.rates:
        got = rate.of(cell, rows) if rows.any() else NONE
        value, reason = (None, got) if isinstance(got, str) else (got, "")
        unit = metrics.WHOLE[rate.ours].unit
        lines.append(Line(rate.name, unit, value, None, None, reason, rate.ours, ours[rate.ours], rate.why))
    return Table(name, tool.version, int(rows.sum()), _notes(name, tool, cell, rows, int(also.sum())), tuple(lines))


NONE = "no request that it would have counted"


def _checked(of: Of, cell: Cell, rows: np.ndarray) -> Sample | str:
    """The sample, or the reason why there is none: of no request, of none that applies, of a stamp that is missing."""
    if not rows.any():
        return NONE
    if (cell.counts[rows] == 0).any():
        return NOT_STREAMED
    found = of(cell, rows)
    if isinstance(found, str):
        return found
    if not len(found.values):
        return "no answer has two tokens"
    unknown = int(np.isnan(found.values if found.most is None else found.values + found.most).sum())
    return f"a stamp that it needs is missing of {unknown}" if unknown else found


def _reduced(
    found: Sample | str, reducer: str, quantile: Quantile
) -> tuple[float | None, float | None, float | None, str]:
    """(value, least, most, reason). Means and percentiles rise with each value, so bounds of these bound those."""
    if isinstance(found, str):
        return None, None, None, found

    def reduce(values: np.ndarray) -> float:
        if reducer == "mean":
            return float(np.average(values, weights=found.weights))
        return quantile(values, found.weights, metrics.QUANTILES[reducer])

    least = reduce(found.values)
    if found.most is None:
        return least, None, None, ""
    most = reduce(found.most)
    return (least, None, None, "") if least == most else (None, least, most, found.reason)


def _notes(name: str, tool: Tool, cell: Cell, rows: np.ndarray, also: int) -> tuple[str, ...]:
    notes = (
        [] if name == "mlperf" else ["its send is taken as ours, without the lateness that its own client would add"]
    )
    if tool.quantile != "linear":
        notes.append(f"its percentiles: {tool.quantile}")
    if also:
        notes.append(f"{also} failed requests are successes there")
    if tool.retokenises and rows.any():
        notes.append("it counts tokens with a tokenizer of its own; here as the records have them")
    estimated = int((rows & cell.among("tokens_out_from", "events", "tokenizer")).sum())
    if estimated:
        notes.append(f"tokens of {estimated} answers are estimates")
    if name == "mlperf":
        seconds, lost = _wall_s(cell, rows), cell.n - int(rows.sum())
        if isinstance(seconds, float) and seconds < LEAST_MLPERF_S:
            notes.append(f"not valid there: {seconds:.1f} s, under {LEAST_MLPERF_S} s")
        if lost:
            notes.append(f"not valid there: {lost} requests without an answer")
    return tuple(notes)
