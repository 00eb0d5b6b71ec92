"""`llm-bench canary`: two versions take turns on the same work, a gate judges, the exit code says what to do."""

from pathlib import Path
from typing import Annotated, Any

import typer

from llm_bench import terminal
from llm_bench.cli_gate import TextFormat, check_format, judge, write
from llm_bench.cli_run import new_folder, parse_loads
from llm_bench.errors import BenchError
from llm_bench.options import (
    Api,
    BlockSize,
    Ca,
    Deadlines,
    Insecure,
    KeyEnv,
    Map,
    MaxLen,
    Model,
    Proxy,
    Ready,
    SkipBad,
    SloText,
    TargetsFile,
    Tokenizer,
    TraceFormat,
    Turns,
    Unit,
    check_numbers,
    check_word,
    columns,
    given,
    numbers,
)

LIMITS: dict[str, tuple[float, float]] = {"pairs": (1, 1000)}
ACTIONS = {"PASS": "PROMOTE", "FAIL": "ROLL BACK", "INCONCLUSIVE": "INCONCLUSIVE"}  # what a gate's verdict means here


def canary(
    context: typer.Context,
    base: Annotated[str, typer.Option(help="What serves today: a declared target, NAME=URL or a URL.")],
    candidate: Annotated[str, typer.Option(help="What would replace it, given likewise.")],
    trace: Annotated[Path, typer.Option(help="Trace file; its format is found by its keys.")],
    rule: Annotated[
        list[str], typer.Option(help="ttft_p95<=+5%, tokens_per_second>=-3%, error_rate<=+0.5pp; may be given again.")
    ],
    accept: Annotated[
        list[str] | None, typer.Option(help="Kind of doubt that is meant so, as of `gate`; may be given again.")
    ] = None,
    pairs: Annotated[int, typer.Option(help="Pairs at each load: each target once, in turns A B B A.")] = 10,
    concurrency: Annotated[str, typer.Option(help="Closed loop: this many slots, e.g. 8,32.")] = "",
    rate: Annotated[str, typer.Option(help="Open loop: requests per second, e.g. 2,4.")] = "",
    burstiness: Annotated[float, typer.Option(help="Gamma shape of --rate's gaps: 1 Poisson, 0.25 CV 2.")] = 1.0,
    constant: Annotated[bool, typer.Option("--constant", help="Space --rate's arrivals evenly.")] = False,
    replay: Annotated[bool, typer.Option("--replay", help="The trace's own times (the default).")] = False,
    speed: Annotated[float, typer.Option(help="Replay this many times as fast: 2 takes half as long.")] = 1.0,
    max_in_flight: Annotated[int | None, typer.Option(help="Open loop's only cap; late ones queue.")] = None,
    requests: Annotated[int | None, typer.Option(help="Send the first N rows in each run; default: all.")] = None,
    duration: Annotated[
        float | None, typer.Option(help="Seconds: of the window (closed) or of sending (open).")
    ] = None,
    warmup: Annotated[float | None, typer.Option(help="Requests (closed) or seconds (open).")] = None,
    drain: Annotated[float | None, typer.Option(help="Seconds to wait for a run's last answers.")] = None,
    loop_trace: Annotated[bool, typer.Option("--loop-trace", help="Go round the trace, with new prompts.")] = False,
    seed: Annotated[int, typer.Option(help="Of arrivals; a pair has the same.")] = 0,
    same_salt: Annotated[
        bool, typer.Option("--same-salt", help="Equal prompts in both of a pair; separate servers only.")
    ] = False,
    retries: Annotated[int, typer.Option(help="Retries of 429, 5xx and refused connections.")] = 0,
    too_long: Annotated[
        str, typer.Option(help="Requests over the context limit: refuse, skip, clip or scale.")
    ] = "refuse",
    scale_lengths: Annotated[str, typer.Option(help="Multiply all lengths of the trace, e.g. 0.5 or 1/32.")] = "",
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
    json: Annotated[Path | None, typer.Option(help="Write the whole as JSON there.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; default: runs/TIME-canary-TARGETS.")] = None,
    workers: Annotated[str, typer.Option(help="Processes that share each cell: a number, or auto.")] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Finish the canary in --out: its missing runs.")] = False,
) -> None:
    """Measure a candidate beside what it would replace, and judge.

    `run --interleave --repeat N` and `gate` in one: PROMOTE 0, ROLL BACK 1, INCONCLUSIVE 3. The pins that were declared
    or probed (model, revision, version, precision, image) stand in the run. A doubt that could have produced the
    verdict makes it INCONCLUSIVE; what is meant so is said with --accept.
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
        raise BenchError(f"--pairs {pairs}: expected {needed} or more: fewer cannot decide {tests} tests at 0.05")
    if resume and out is None:
        raise BenchError("--resume: give the canary's folder with --out, and what it was begun with")
    arms = known.parse(f"{_named(base, 'base')},{_named(candidate, 'candidate')}", targets_file, given(context.params))
    if len(arms) != 2:
        raise BenchError("canary: --base and --candidate are one target each; several URLs of one: URL|URL")
    job = runs.Job(
        targets=arms,
        loads=loads,
        trace=trace,
        format=trace_format,
        block_size=block_size,
        skip_bad=skip_bad,
        unit=unit,
        turns=turns,
        map=columns(mapping),
        workers=0 if workers == "auto" else numbers(workers, "workers", int)[0],
        resume=resume,
    )
    options = Options(
        out=out or new_folder(["canary", *(t.name for t in arms)]),
        requests=requests,
        duration_s=duration,
        warmup=warmup,
        drain_s=drain,
        loop_trace=loop_trace,
        seed=seed,
        retries=retries,
        too_long=too_long,
        scale_lengths=scale_lengths,
        ready_s=ready_timeout,
        rounds=Rounds(pairs, interleave=True, same_salt=same_salt),
        slo=slo,
        deadlines=deadlines,
    )
    say, live = terminal.voice()
    ended = runs.run(job, options, say, live)
    say(f"records: {options.out}")
    if code := 130 if ended.interrupted else 4 if ended.gone else 5 if ended.died else 0:
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
