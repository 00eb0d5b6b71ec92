"""What other load-testing tools would have printed for the same records, by their own definitions (TOOLS).

These tools know no window: they count the whole run. How each figure is computed is in `tool_figures`.
"""

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from llm_bench import metrics
from llm_bench import tool_figures as figures
from llm_bench.columns import Cell
from llm_bench.errors import BenchError
from llm_bench.series import SERIES, outcome_in
from llm_bench.tool_figures import Of, Quantile, Rate, Sample, Span
from llm_bench.windows import Window

REDUCERS = ("mean", "p50", "p99")


F = TypeVar("F")


class Figure(NamedTuple, Generic[F]):
    name: str  # as the tool calls it
    ours: str  # the series or the figure of the cell that a reader would hold it against
    why: str  # what sets them apart
    of: F


class Tool(NamedTuple):
    version: str  # that the definitions are of
    quantile: str  # one of tool_figures.QUANTILES
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


def _throughput(span: Span, window: str, tokens: str, requests: str, but: int = 0) -> tuple[Figure[Rate], ...]:
    return (
        Figure(tokens, "tokens_per_second", window, figures.tokens(span)),
        Figure(requests, "requests_per_second", window, figures.requests(span, but)),
    )


# ---- the tools

_SHORT, _IN_STREAM = "short_output", "server_error_in_stream"
_RAMP = "ramp and drain are in"
TOOLS: dict[str, Tool] = {
    "vllm": Tool(
        "vllm bench serve 0.32", "linear", False, (_SHORT, _IN_STREAM),
        (
            Figure("TTFT", "ttft", "from send; role-only event counts", figures.ttft_of_choices),
            Figure("TPOT", "tpot", "role-only event to last event", figures.tpot_of_choices),
            Figure("ITL", "itl", "gaps of all events", figures.never(figures.EXTRA_GAPS)),
            Figure("E2EL", "e2e", "from send to last event", figures.elapsed_until_late),
        ),
        _throughput(figures.wall_s, _RAMP, "Output token throughput", "Request throughput"),
    ),
    "sglang": Tool(
        "sglang bench_serving 0.5.23", "linear", False, (_SHORT, _IN_STREAM),
        (
            Figure("TTFT", "ttft", "from send, not due time", figures.elapsed("f", "d")),
            Figure("TPOT", "tpot", "to last event, not token", figures.tpot("f", until_late=True)),
            Figure("ITL", "itl", "bursts' zero gaps are in", figures.event_gaps),
            Figure("E2E Latency", "e2e", "from send to last event", figures.elapsed_until_late),
        ),
        _throughput(figures.wall_s, _RAMP, "Output token throughput", "Request throughput"),
    ),
    "guidellm": Tool(
        "guidellm 0.8", "nearest rank by weight", False, (_SHORT,),
        (
            Figure("TTFT", "ttft", "from send, not due time", figures.elapsed("f", "d")),
            Figure("ITL", "tpot", "our TPOT, weighted by tokens", figures.tpot("f", weighted=True)),
            Figure("TPOT", "normalized_latency", "first token in; weighted by tokens",
                   figures.per_token("l", weighted=True)),
            Figure("Request Latency", "e2e", "from send to response's end", figures.elapsed("e", "d")),
        ),
        _throughput(figures.sent_to_end_s, "no warm-up cut by default", "Output Tok/s mean", "Req/s mean"),
    ),
    "aiperf": Tool(
        "aiperf 0.13", "linear", True, (_SHORT, _IN_STREAM),
        (
            Figure("Time to First Token", "ttft", "from send, not due time", figures.elapsed("f", "d")),
            Figure("Inter Token Latency", "tpot", "our TPOT; packet-aware where known", figures.itl_after_first),
            Figure("Inter Chunk Latency", "itl", "bursts' zero gaps are in", figures.event_gaps),
            Figure("Request Latency", "e2e", "from send, not due time", figures.elapsed("l", "d")),
        ),
        _throughput(figures.sent_to_token_s, "first send to last token", "Output Token Throughput",
                    "Request Throughput"),
    ),
    "inference-perf": Tool(
        "inference-perf 0.7", "linear", True, (_SHORT, _IN_STREAM),
        (
            Figure("time_to_first_token", "ttft", "from send; one-token answers out", figures.ttft_of_several),
            Figure("time_per_output_token", "tpot", "from content, reasoning left out", figures.tpot("f of content")),
            Figure("inter_token_latency", "itl", "per token: zero within events", figures.token_gaps),
            Figure("normalized_time_per_output_token", "normalized_latency", "from send to response's end",
                   figures.per_token("e", weighted=False)),
            Figure("request_latency", "e2e", "from send to response's end", figures.elapsed("e", "d")),
        ),
        _throughput(figures.sent_to_end_s, _RAMP, "output_tokens_per_sec", "requests_per_sec"),
    ),
    "llmperf": Tool(
        "LLMPerf (token_benchmark_ray.py)", "linear", False, (_SHORT,),
        (
            Figure("ttft_s", "ttft", "from send; content only", figures.elapsed("f of content", "d")),
            Figure("inter_token_latency_s", "tpot", "TTFT in, divided by events", figures.per_event),
            Figure("end_to_end_latency_s", "e2e", "from send to response's end", figures.elapsed("e", "d")),
        ),
        (
            Figure("mean_output_throughput_token_per_s", "tokens_per_second", _RAMP, figures.never(figures.LLAMA)),
            Figure("num_completed_requests_per_min / 60", "requests_per_second", _RAMP,
                   figures.requests(figures.wall_s)),
        ),
    ),
    "genai-perf": Tool(
        "genai-perf (as NVIDIA documents it)", "linear", True, (_SHORT,),
        (
            Figure("Time To First Token", "ttft", "from send, not due time", figures.elapsed("f", "d")),
            Figure("Inter Token Latency", "tpot", "our TPOT, rounded to ns", figures.tpot("f", rounded=True)),
            Figure("Request Latency", "e2e", "from send, not due time", figures.elapsed("l", "d")),
        ),
        _throughput(figures.sent_to_token_s, "first send to last token", "Output Token Throughput",
                    "Request Throughput"),
    ),
    "mlperf": Tool(
        "MLPerf LoadGen (server scenario)", "rank floor(n q), from 0", False, (_SHORT,),
        (
            Figure("first token latency", "ttft", "from due time, as ours", figures.elapsed("f", "due")),
            Figure("time to output token", "tpot", "as ours, other percentiles", figures.tpot_of_due),
            Figure("latency", "e2e", "from due time, as ours", figures.elapsed("l", "due")),
        ),
        _throughput(figures.due_to_last_s, "to the last due's end", "Completed tokens per second",
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
            value, least, most, reason = _reduced(found, reducer, figures.QUANTILES[tool.quantile])
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
        return figures.NOT_STREAMED
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
        seconds, lost = figures.wall_s(cell, rows), cell.n - int(rows.sum())
        if isinstance(seconds, float) and seconds < LEAST_MLPERF_S:
            notes.append(f"not valid there: {seconds:.1f} s, under {LEAST_MLPERF_S} s")
        if lost:
            notes.append(f"not valid there: {lost} requests without an answer")
    return tuple(notes)
