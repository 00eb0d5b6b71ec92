"""`llm-bench canary`: two versions take turns on the same work, a gate judges, the exit code says what to do."""

from pathlib import Path
from typing import Annotated, Any

import typer

from llm_bench import terminal
from llm_bench.cli_gate import TextFormat, check_format, judge, write
from llm_bench.cli_run import cut_code, new_folder, parse_loads
from llm_bench.errors import BenchError
from llm_bench.options import (
    CELLS,
    JOB,
    Api,
    BlockSize,
    Burstiness,
    Ca,
    Concurrency,
    Constant,
    Deadlines,
    Drain,
    Duration,
    Insecure,
    KeyEnv,
    LoopTrace,
    Map,
    MaxInFlight,
    MaxLen,
    Model,
    Proxy,
    Rate,
    Ready,
    Replay,
    Requests,
    Retries,
    SameSalt,
    ScaleLengths,
    SkipBad,
    SloText,
    Speed,
    TargetsFile,
    Tokenizer,
    TooLong,
    TraceFormat,
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

LIMITS: dict[str, tuple[float, float]] = {"pairs": (1, 1000)}
ACTIONS = {"PASS": "PROMOTE", "FAIL": "ROLL BACK", "INCONCLUSIVE": "INCONCLUSIVE"}  # what a gate's verdict means here


def canary(
    context: typer.Context,
    base: Annotated[str, typer.Option(help="What serves today: a declared target, NAME=URL or a URL.")],
    candidate: Annotated[str, typer.Option(help="What would replace it, given likewise.")],
    trace: Annotated[Path, typer.Option(help="Trace file; its format is detected from its keys.")],
    rule: Annotated[
        list[str], typer.Option(help="ttft_p95<=+5%, tokens_per_second>=-3%, error_rate<=+0.5pp; may be given again.")
    ],
    accept: Annotated[
        list[str] | None, typer.Option(help="Kind of doubt to accept as intended, as for `gate`; may be given again.")
    ] = None,
    pairs: Annotated[int, typer.Option(help="Pairs at each load: each target once, in turns A B B A.")] = 10,
    concurrency: Concurrency = "",
    rate: Rate = "",
    burstiness: Burstiness = 1.0,
    constant: Constant = False,
    replay: Replay = False,
    speed: Speed = 1.0,
    max_in_flight: MaxInFlight = None,
    requests: Requests = None,
    duration: Duration = None,
    warmup: Warmup = None,
    drain: Drain = None,
    loop_trace: LoopTrace = False,
    seed: Annotated[int, typer.Option(help="Seed of the arrivals; the same within a pair.")] = 0,
    same_salt: SameSalt = False,
    retries: Retries = 0,
    too_long: TooLong = "refuse",
    scale_lengths: ScaleLengths = "",
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
    slo: SloText = "",
    deadlines: Deadlines = "",
    format: TextFormat = "terminal",  # noqa: A002
    markdown: Annotated[Path | None, typer.Option(help="Write Markdown there, for a pull request.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML there; INCONCLUSIVE is an error in it.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write everything as JSON there.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; default: runs/TIME-canary-TARGETS.")] = None,
    workers: Workers = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Finish the canary in --out: measure its missing cells.")
    ] = False,
) -> None:
    """Measure a candidate beside what it would replace, and judge.

    `run --interleave --repeat N` and `gate` in one: PROMOTE 0, ROLL BACK 1, INCONCLUSIVE 3. The pins that were declared
    or probed (model, revision, version, precision, image) are kept in the run. A doubt that could have produced
    the verdict makes it INCONCLUSIVE; --accept names the kinds of doubt that are intended.
    """
    from llm_bench import gate as gates
    from llm_bench import gate_report, objectives, pairing, results, rules, selection
    from llm_bench import run as runs
    from llm_bench import targets as known
    from llm_bench.arms import Rounds
    from llm_bench.cell import Options
    from llm_bench.pairs import needed as required

    check_format(format)
    check_word("too-long", too_long, selection.TOO_LONG)
    check_numbers(context.params, LIMITS)
    accepted, asked = gates.check_accepted(accept or []), rules.parse(rule)
    agreed = objectives.parse(slo, deadlines)
    loads = parse_loads(concurrency, rate, replay, speed, burstiness, constant, max_in_flight)
    for one in asked:
        if one.metric.name in rules.NEEDS_SLO and not agreed.limits:
            raise BenchError(f"--rule {one.text!r}: {one.metric.name} needs the limits of --slo")
    tests = len(asked) * len(loads)
    if pairs < (needed := required(tests)):
        raise BenchError(
            f"--pairs {pairs}: expected {needed} or more: fewer cannot decide {tests} test{'s' * (tests != 1)} at 0.05"
        )
    if resume and out is None:
        raise BenchError("--resume: give the canary's folder with --out, and what it was begun with")
    arms = known.parse(f"{_named(base, 'base')},{_named(candidate, 'candidate')}", targets_file, given(context.params))
    if len(arms) != 2:
        raise BenchError("canary: --base and --candidate are one target each; several URLs of one: URL|URL")
    job = runs.Job(
        **fields(context.params, JOB),
        targets=arms,
        loads=loads,
        map=columns(mapping),
        workers=crew(workers),
    )
    options = Options(
        **fields(context.params, CELLS),
        out=out or new_folder(["canary", *(t.name for t in arms)]),
        rounds=Rounds(pairs, interleave=True, same_salt=same_salt),
    )
    say, live = terminal.voice()
    ended = runs.run(job, options, say, live)
    say(f"records: {options.out}")
    if code := cut_code(ended):
        raise typer.Exit(code)
    found = results.load_run(options.out)
    judged = judge(pairing.arm(found, arms[0].name), pairing.arm(found, arms[1].name), asked, accepted, agreed)
    said = {"terminal": gate_report.text, "md": gate_report.markdown, "json": gate_report.json_text}
    write(markdown, lambda: _headed(judged, gate_report.markdown(judged)))
    write(json, lambda: gate_report.json_text(judged))
    write(junit, lambda: gate_report.junit(judged))
    text = said[format](judged)
    terminal.show(text if format == "json" else _headed(judged, text))
    raise typer.Exit(gates.EXIT_CODES[judged.verdict])


def _named(text: str, name: str) -> str:
    """A bare URL gets the arm's own name."""
    return f"{name}={text}" if text.startswith(("http://", "https://")) else text


def _headed(judged: Any, text: str) -> str:
    return f"canary: {ACTIONS[judged.verdict]}\n\n{text}"
