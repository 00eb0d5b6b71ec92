"""`llm-bench run`: its options, the loads they name, its exit code."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from llm_bench import terminal
from llm_bench.errors import BenchError
from llm_bench.options import (
    CELLS,
    JOB,
    Api,
    BlockSize,
    Burstiness,
    Ca,
    Concurrency,
    ConnectTimeout,
    Constant,
    Deadlines,
    Dejitter,
    Drain,
    Duration,
    FailOnSlo,
    Fault,
    Format,
    Gpu,
    Insecure,
    KeyEnv,
    Limit,
    LoopTrace,
    Map,
    MaxInFlight,
    MaxLen,
    Metrics,
    MetricsUrl,
    Model,
    NoStream,
    Proxy,
    Rate,
    Ready,
    Replay,
    Requests,
    Retries,
    SameSalt,
    ScaleLengths,
    ScrapeEvery,
    SkipBad,
    SloText,
    Speed,
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
    numbers,
)


def parse_loads(
    concurrency: str, rate: str, replay: bool, speed: float, burstiness: float, constant: bool, cap: int | None
) -> list[Any]:
    """The loads that a command line names. Raises BenchError for two kinds at once."""
    from llm_bench.plan import Load

    given = [name for name, on in (("--concurrency", concurrency), ("--rate", rate), ("--replay", replay)) if on]
    if len(given) > 1:
        raise BenchError(f"{' and '.join(given)}: give one of them; each is a different kind of load")
    if cap is not None and concurrency:
        raise BenchError("--max-in-flight is the cap of an open loop (--rate or --replay)")
    if (concurrency or rate) and speed != 1:
        raise BenchError("--speed is for a replay (--replay); --concurrency and --rate do not use the trace's times")
    if not rate and (constant or burstiness != 1):
        raise BenchError("--burstiness and --constant shape the arrivals of --rate")
    if concurrency:
        return [Load(concurrency=n) for n in numbers(concurrency, "concurrency", int)]
    if rate:
        shape = None if constant else burstiness
        return [Load(rate=r, burstiness=shape, max_in_flight=cap) for r in numbers(rate, "rate", float)]
    return [Load(speed=speed, max_in_flight=cap)]


def run(
    context: typer.Context,
    targets: Annotated[str, typer.Option(help="name,name=url,url: a name alone is one of targets.toml, or built in.")],
    trace: Annotated[Path, typer.Option(help="Trace file; its format is detected from its keys.")],
    concurrency: Concurrency = "",
    rate: Rate = "",
    burstiness: Burstiness = 1.0,
    constant: Constant = False,
    replay: Replay = False,
    speed: Speed = 1.0,
    max_in_flight: MaxInFlight = None,
    requests: Requests = None,
    limit: Limit = None,
    from_s: Annotated[
        float | None, typer.Option("--from", help="Seconds of the trace: conversations that begin from here on.")
    ] = None,
    to_s: Annotated[
        float | None, typer.Option("--to", help="Seconds of the trace: conversations that begin before this.")
    ] = None,
    duration: Duration = None,
    warmup: Warmup = None,
    drain: Drain = None,
    loop_trace: LoopTrace = False,
    seed: Annotated[int, typer.Option(help="Seed of the arrivals; with --reuse-prompts, of the prompts too.")] = 0,
    retries: Retries = 0,
    too_long: TooLong = "refuse",
    scale_lengths: ScaleLengths = "",
    history: Annotated[
        str, typer.Option(help="Answers in later turns: live, the server's own; recorded, made up at their lengths.")
    ] = "live",
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="Make prompts of token ids (needs --tokenizer).")
    ] = False,
    keep_model: Annotated[
        bool, typer.Option("--keep-model", help="Ask for the model that a row names; default: the target's.")
    ] = False,
    beside: Annotated[
        list[str] | None,
        typer.Option(
            help="Trace played beside it: PATH[:SHARE][:priority=N][:name=CLASS]. May be given again; each class is "
            "measured alone too. SHARE is of all requests per second; without it the trace keeps its own times."
        ),
    ] = None,
    alone_too: Annotated[
        bool, typer.Option("--alone-too", help="Also measure each class of a mix alone: same rows, same times.")
    ] = False,
    repeat: Annotated[
        int, typer.Option(help="Measure each target at each load N times; 5 or more give an interval of their spread.")
    ] = 1,
    interleave: Annotated[
        bool, typer.Option("--interleave", help="Targets take turns, A B B A, --repeat pairs at each load: for gate.")
    ] = False,
    same_salt: SameSalt = False,
    reuse_prompts: Annotated[
        bool, typer.Option("--reuse-prompts", help="The same prompts in every cell and run.")
    ] = False,
    no_stream: NoStream = False,
    trace_format: TraceFormat = None,
    block_size: BlockSize = None,
    unit: Unit = None,
    turns: Turns = None,
    mapping: Map = "",
    dejitter: Dejitter = "auto",
    skip_bad: SkipBad = 0,
    api: Api = "",
    model: Model = "",
    key_env: KeyEnv = "",
    tokenizer: Tokenizer = "",
    max_model_len: MaxLen = 0,
    ca: Ca = "",
    insecure: Insecure = False,
    proxy: Proxy = "",
    metrics_url: MetricsUrl = "",
    scrape_every: ScrapeEvery = 1.0,
    gpu: Gpu = False,
    fault: Fault = [],  # noqa: B006 - typer's own
    connect_per_request: Annotated[
        bool, typer.Option("--connect-per-request", help="A new connection for each request.")
    ] = False,
    spin: Annotated[float, typer.Option(help="Open loop: spin for the last N µs before a due time.")] = 0.0,
    targets_file: TargetsFile = Path("targets.toml"),
    ready_timeout: Ready = 30.0,
    connect_timeout: ConnectTimeout = 10.0,
    ttft_timeout: TtftTimeout = 300.0,
    stall_timeout: StallTimeout = 120.0,
    total_timeout: TotalTimeout = 3600.0,
    keep_bytes: Annotated[int, typer.Option(help="Keep the first N bytes of good answers too.")] = 0,
    metrics: Metrics = "",
    slo: SloText = "",
    deadlines: Deadlines = "",
    fail_on_slo: FailOnSlo = False,
    fail_on_error_rate: Annotated[
        float, typer.Option(help="Exit 1 when a cell's share of failures is over this.")
    ] = 0.5,
    fail_on_doubt: Annotated[bool, typer.Option("--fail-on-doubt", help="Exit 3 when there is any doubt.")] = False,
    format: Format = "terminal",  # noqa: A002
    out: Annotated[Path | None, typer.Option(help="Folder of the run; default: runs/TIME-TARGETS.")] = None,
    workers: Workers = "auto",
    ray: Annotated[str, typer.Option(help="Drive from a Ray cluster: auto, or HOST:PORT.")] = "",
    resume: Annotated[
        bool, typer.Option("--resume", help="Finish the run in --out: measure its missing cells.")
    ] = False,
) -> None:
    """Replay a trace against targets at each load, and report.

    Without --concurrency, --rate or --replay the trace is replayed at its own times. Several loads, or several targets,
    are measured one after the other. Metrics are listed in docs/reference.md.
    """
    from llm_bench import neighbours, objectives, report, results, selection
    from llm_bench import run as runs
    from llm_bench import targets as known
    from llm_bench.arms import Rounds
    from llm_bench.cell import HISTORIES, Options
    from llm_bench.exchange import Timeouts

    check_word("too-long", too_long, selection.TOO_LONG)
    check_word("history", history, HISTORIES)
    check_numbers(context.params)
    loads = parse_loads(concurrency, rate, replay, speed, burstiness, constant, max_in_flight)
    asked = results.Asked(report.parse_metrics(metrics), objectives.parse(slo, deadlines))
    report.check_format(format)
    if fail_on_slo and not asked.slo.limits:
        raise BenchError("--fail-on-slo: no limit is given; give --slo, such as ttft_p95<800ms")
    chosen = known.parse(targets, targets_file, given(context.params))
    limits = (connect_timeout, ttft_timeout, stall_timeout, total_timeout)
    if resume and out is None:
        raise BenchError("--resume: give the run's folder with --out, and what it was begun with")
    processes = crew(workers)
    job = runs.Job(
        **fields(context.params, JOB),
        targets=chosen,
        loads=loads,
        map=columns(mapping),
        beside=[neighbours.parse(text) for text in beside or []],
        alone_too=alone_too or bool(beside),
        limited=sorted({limit.of_class for limit in asked.slo.limits} - {""}),
        workers=processes,
    )
    options = Options(
        **fields(context.params, CELLS),
        out=out or new_folder([t.name for t in chosen]),
        stream=not no_stream,
        faults=tuple(fault),
        timeouts=Timeouts(*(limit or None for limit in limits)),
        rounds=Rounds(repeat, interleave, same_salt),
    )
    say, live = terminal.voice()
    if ray and workers == "auto":
        raise BenchError("--ray: give --workers, how many actors drive")
    with ExitStack() as stack:
        if ray:
            from llm_bench import host_link, hosts, ray_hosts

            links = stack.enter_context(ray_hosts.connected(ray, processes))
            job = replace(job, fleet=hosts.fleet(links, host_link.greet(links)))
        ended = runs.run(job, options, say, live)
    say(f"records: {options.out}")
    found = results.load_run(options.out)
    terminal.show(report.render([found], asked, format), f"; the records are whole: llm-bench report {options.out}")
    fails = Fails(fail_on_error_rate, fail_on_doubt, fail_on_slo)
    raise typer.Exit(_exit_code(ended, results.verdict(found, asked.slo), fails, say))


class Fails(NamedTuple):
    """What of a finished run is a failure."""

    error_rate: float
    doubt: bool
    slo: bool


def _exit_code(ended: Any, verdict: Any, fails: Fails, say: Callable[[str], None]) -> int:
    if cut := cut_code(ended):
        return cut
    bad = [name for name, ok, rate in verdict.cells if not ok or rate > fails.error_rate]
    if bad:
        say(f"failed: no ok request, or an error rate over {fails.error_rate:.0%}, in {', '.join(bad)}")
        return 1
    return slo_code(verdict) if fails.slo and slo_code(verdict) else 3 if fails.doubt and verdict.doubts else 0


def cut_code(ended: Any) -> int:
    """Exit code of a run that did not come to its end: Ctrl-C, a target that is gone, a worker that died; else 0."""
    return 130 if ended.interrupted else 4 if ended.gone else 5 if ended.died else 0


def slo_code(verdict: Any) -> int:
    """Exit code of --fail-on-slo: 1 for a limit that was missed, 3 for one that is undecided."""
    said = {judged.verdict for judged in verdict.judged}
    return 1 if "MISSED" in said else 3 if "UNDECIDED" in said else 0


def new_folder(names: list[str]) -> Path:
    from datetime import datetime

    stem = f"runs/{datetime.now():%Y%m%d-%H%M%S}-{'-'.join(names)[:60]}"
    stem = "".join(c if c.isalnum() or c in "-_./=" else "_" for c in stem)
    return next(path for path in map(Path, (stem, *(f"{stem}-{i}" for i in range(2, 1000)))) if not path.exists())
