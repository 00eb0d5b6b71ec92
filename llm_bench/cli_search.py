"""`llm-bench search`: its options and its exit code."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from llm_bench import terminal
from llm_bench.cli_run import cut_code, new_folder
from llm_bench.errors import BenchError
from llm_bench.options import (
    CELLS,
    JOB,
    Api,
    BlockSize,
    Ca,
    ConnectTimeout,
    Deadlines,
    Drain,
    Gpu,
    Insecure,
    KeyEnv,
    Limit,
    Map,
    MaxInFlight,
    MaxLen,
    MetricsUrl,
    Model,
    NoStream,
    Output,
    Proxy,
    Ready,
    Retries,
    ScaleLengths,
    ScrapeEvery,
    SkipBad,
    SloText,
    StallTimeout,
    TargetsFile,
    Tokenizer,
    TooLong,
    TotalTimeout,
    TraceFormat,
    TtftTimeout,
    Turns,
    Unit,
    Warmup,
    Workers,
    check_numbers,
    check_word,
    columns,
    crew,
    fields,
    given,
)

BYS = ("concurrency", "rate")
MOST = {"concurrency": 1024.0, "rate": 10_000.0}
LEAST = {"concurrency": 1.0, "rate": 0.01}
LIMITS: dict[str, tuple[float, float]] = {
    "start": (1e-6, 1e6),
    "least": (1e-6, 1e6),
    "most": (1e-6, 1e6),
    "tolerance": (0, 1),
}
_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def seconds(text: str, option: str) -> float:
    """`90s`, `30m` or `2h` in seconds. Raises BenchError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)", text.strip())
    if match is None or not 0 < (found := float(match[1]) * _SECONDS[match[2]]) <= 1e7:
        raise BenchError(f"--{option} {text!r}: expected a time with its unit, such as 90s, 30m or 2h")
    return found


def search(
    context: typer.Context,
    targets: Annotated[str, typer.Option(help="name,name=url,url: each is searched with the whole budget.")],
    trace: Annotated[Path, typer.Option(help="Trace file; repeated as often as needed, with new prompts.")],
    slo: SloText,
    by: Annotated[str, typer.Option(help="What is raised: concurrency (slots) or rate (requests per second).")],
    budget: Annotated[str, typer.Option(help="Time to measure, e.g. 90s, 30m, 2h.")] = "30m",
    start: Annotated[
        float | None, typer.Option(help="First load; default: 1 slot, or the rate of one request after the other.")
    ] = None,
    least: Annotated[float | None, typer.Option("--min", help="Lowest load; default: 1 slot, 0.01/s.")] = None,
    most: Annotated[float | None, typer.Option("--max", help="Highest load; default: 1024 slots, 10000/s.")] = None,
    tolerance: Annotated[
        float, typer.Option(help="Stop when the bracket is as narrow as this share of its lower end, or one slot.")
    ] = 0.05,
    requests: Annotated[
        int | None, typer.Option(help="Requests in a load's first cell, warm-up included; default: from the budget.")
    ] = None,
    burstiness: Annotated[float, typer.Option(help="By rate: gamma shape of the gaps, 1 Poisson, 0.25 CV 2.")] = 1.0,
    constant: Annotated[bool, typer.Option("--constant", help="By rate: space the arrivals evenly.")] = False,
    max_in_flight: MaxInFlight = None,
    limit: Limit = None,
    warmup: Warmup = None,
    drain: Drain = None,
    seed: Annotated[int, typer.Option(help="Seed of the arrivals.")] = 0,
    retries: Retries = 0,
    too_long: TooLong = "refuse",
    scale_lengths: ScaleLengths = "",
    history: Annotated[str, typer.Option(help="Answers in later turns: live or recorded.")] = "live",
    no_stream: NoStream = False,
    trace_format: TraceFormat = None,
    block_size: BlockSize = None,
    unit: Unit = None,
    turns: Turns = None,
    mapping: Map = "",
    skip_bad: SkipBad = 0,
    api: Api = "",
    model: Model = "",
    key_env: KeyEnv = "",
    tokenizer: Tokenizer = "",
    max_model_len: MaxLen = 0,
    ca: Ca = "",
    insecure: Insecure = False,
    proxy: Proxy = "",
    targets_file: TargetsFile = Path("targets.toml"),
    ready_timeout: Ready = 30.0,
    connect_timeout: ConnectTimeout = 10.0,
    ttft_timeout: TtftTimeout = 300.0,
    stall_timeout: StallTimeout = 120.0,
    total_timeout: TotalTimeout = 3600.0,
    deadlines: Deadlines = "",
    metrics_url: MetricsUrl = "",
    scrape_every: ScrapeEvery = 1.0,
    gpu: Gpu = False,
    format: Annotated[str, typer.Option(help="terminal, md or json.")] = "terminal",  # noqa: A002
    output: Output = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; default: runs/TIME-search-TARGETS.")] = None,
    workers: Workers = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the search in --out from the cells it has.")
    ] = False,
) -> None:
    """Find the highest load that meets an SLO, with its evidence.

    The answer is a bracket. Doubles the load until a limit is missed, then halves the gap. A load that its requests
    leave undecided is asked again, with as many again, until they decide it or the budget ends. An error rate under
    1% is always part of the SLO. Every cell is kept in the run's folder. Exit code 0: a bracket as narrow as asked
    for, or met at --max; 1: missed at --min; 3: left open when the budget ended.
    """
    from llm_bench import search_report, search_run, selection
    from llm_bench import targets as known
    from llm_bench.cell import HISTORIES, Options
    from llm_bench.exchange import Timeouts
    from llm_bench.run import Job

    check_word("by", by, BYS)
    check_word("format", format, tuple(search_report.FORMATS))
    check_word("too-long", too_long, selection.TOO_LONG)
    check_word("history", history, HISTORIES)
    check_numbers(context.params, LIMITS)
    low, high = LEAST[by] if least is None else least, MOST[by] if most is None else most
    _check_loads(by, start, low, high)
    if by == "concurrency" and (constant or burstiness != 1 or max_in_flight is not None):
        raise BenchError("--burstiness, --constant and --max-in-flight are for --by rate")
    if resume and out is None:
        raise BenchError("--resume: give the search's folder with --out, and what it was begun with")
    agreed, guards = search_run.guarded(slo, deadlines)
    chosen = known.parse(targets, targets_file, given(context.params))
    timeouts = (connect_timeout, ttft_timeout, stall_timeout, total_timeout)
    job = Job(
        **fields(context.params, JOB),
        targets=chosen,
        loads=(),
        map=columns(mapping),
        workers=crew(workers),
    )
    options = Options(
        **fields(context.params, CELLS, but=("requests", "slo")),  # the search's own, not each cell's
        out=out or new_folder(["search", *(t.name for t in chosen)]),
        stream=not no_stream,
        timeouts=Timeouts(*(limit or None for limit in timeouts)),
    )
    asked = search_run.Search(
        by=by,  # type: ignore[arg-type]
        agreed=agreed,
        guards=guards,
        budget_s=seconds(budget, "budget"),
        start=start,
        least=low,
        most=high,
        tolerance=tolerance,
        requests=requests,
        burstiness=None if constant else burstiness,
        max_in_flight=max_in_flight,
    )
    say, live = terminal.voice()
    results, ended = search_run.find(job, options, asked, say, live)
    say(f"records: {options.out}")
    shown = search_report.FORMATS[format](results)
    if output is not None:
        terminal.save(output, shown)
    else:
        terminal.show(shown)
    raise typer.Exit(_code(ended, [search_report.code(r.answer) for r in results]))


def _check_loads(by: str, start: float | None, low: float, high: float) -> None:
    if low > high or not low <= (low if start is None else start) <= high:
        raise BenchError(f"--min {low:g}, --max {high:g}: expected a --min below --max, and --start between them")
    for name, value in (("start", start), ("min", low), ("max", high)):
        if by == "concurrency" and value is not None and (value != int(value) or value < 1):
            raise BenchError(f"--{name} {value:g}: expected whole slots, 1 or more")


def _code(ended: Any, codes: list[int]) -> int:
    return cut_code(ended) or next((code for code in (1, 3) if code in codes), 0)
