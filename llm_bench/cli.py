"""The command line: parse, call one function, print. The help texts are the manual; README's blocks come from them."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from llm_bench import __version__, terminal
from llm_bench.errors import BenchError


class InterruptError(BenchError):
    exit_code = 130


class _Commands(TyperGroup):
    def invoke(self, context: Any) -> Any:
        try:
            return super().invoke(context)
        except KeyboardInterrupt:  # typer itself would end without a word
            raise InterruptError("interrupted; what was measured before is on disk") from None


app = typer.Typer(
    name="llm-bench",
    cls=_Commands,
    help="Load-test LLM serving engines: replay a trace, record what users feel, report what the data carry.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
targets_app = typer.Typer(help="List the targets that are declared, or look at them.", invoke_without_command=True)
app.add_typer(targets_app, name="targets")


def _show_version(asked: bool) -> None:
    if asked:
        terminal.show(f"llm-bench {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


TargetsFile = Annotated[Path, typer.Option(help="File of declared targets.")]
Api = Annotated[str, typer.Option(help="Protocol: a row of the README's table; default: openai-chat.")]
Model = Annotated[str, typer.Option(help="Model name to ask for; default: the first that the target lists.")]
KeyEnv = Annotated[str, typer.Option(help="Environment variable that holds the targets' API key.")]
Tokenizer = Annotated[str, typer.Option(help="tokenizer.json: prompts of an exact token count.")]
Ca = Annotated[str, typer.Option(help="PEM file of a private authority for https.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Believe any https certificate; the records say so.")]
MaxLen = Annotated[int, typer.Option(help="Context limit in tokens; default: what the target says.")]
Ready = Annotated[float, typer.Option(help="Seconds to wait for a target that is still starting.")]
Metrics = Annotated[str, typer.Option(help="Comma-separated names of README's table Metrics, e.g. ttft_p95.")]
Format = Annotated[str, typer.Option(help="terminal, md, json or csv.")]


_SECONDS = (0, 1_000_000)  # eleven days; some libraries keep time-outs as milliseconds in 31 bits
# Every option that takes a number -> (least, most). What is outside has no meaning or would not fit where it goes.
LIMITS: dict[str, tuple[float, float]] = {
    "concurrency": (1, 100_000),
    "rate": (1e-6, 1e6),  # requests/s
    "burstiness": (1e-3, 1e6),
    "speed": (1e-6, 1e6),
    "max_in_flight": (1, 1_000_000),
    "requests": (1, 10_000_000),
    "duration": (1e-3, 1_000_000),
    "warmup": (0, 1_000_000),
    "drain": _SECONDS,
    "seed": (0, 2**63 - 1),
    "retries": (0, 100),
    "block_size": (1, 10_000_000),
    "skip_bad": (0, 10_000_000),
    "max_model_len": (0, 100_000_000),
    "ready_timeout": _SECONDS,
    "connect_timeout": _SECONDS,
    "ttft_timeout": _SECONDS,
    "stall_timeout": _SECONDS,
    "total_timeout": _SECONDS,
    "keep_bytes": (0, 1_000_000_000),
    "workers": (1, 1024),
    "spin": (0, 1000),
    "fail_on_error_rate": (0, 1),
}


def _check_number(name: str, value: float) -> None:
    least, most = LIMITS[name]
    if not least <= value <= most:  # nan too is outside
        raise BenchError(f"--{name.replace('_', '-')} {value}: expected a number from {least:,} to {most:,}")


def _check_numbers(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if type(value) in (int, float):
            _check_number(name, value)


def _numbers(text: str, name: str, kind: Callable[[str], Any]) -> list[Any]:
    option = f"--{name}"
    try:
        values = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise BenchError(f"{option} {text!r}: expected numbers such as 1,8,32") from None
    if not values:
        raise BenchError(f"{option} {text!r}: expected a number")
    for value in values:
        _check_number(name, value)
    if len(set(values)) < len(values):
        raise BenchError(f"{option} {text!r}: a load is named twice")
    return values


def _loads(
    concurrency: str, rate: str, replay: bool, speed: float, burstiness: float, constant: bool, cap: int | None
) -> list[Any]:
    from llm_bench.plan import Load

    given = [name for name, on in (("--concurrency", concurrency), ("--rate", rate), ("--replay", replay)) if on]
    if len(given) > 1:
        raise BenchError(f"{' and '.join(given)}: give one of them; each is another kind of load")
    if cap is not None and concurrency:
        raise BenchError("--max-in-flight is the cap of an open loop (--rate or --replay)")
    if (concurrency or rate) and speed != 1:
        raise BenchError("--speed is of a replay (--replay); --concurrency and --rate do not use the trace's times")
    if not rate and (constant or burstiness != 1):
        raise BenchError("--burstiness and --constant shape the arrivals of --rate")
    if concurrency:
        return [Load(concurrency=n) for n in _numbers(concurrency, "concurrency", int)]
    if rate:
        shape = None if constant else burstiness
        return [Load(rate=r, burstiness=shape, max_in_flight=cap) for r in _numbers(rate, "rate", float)]
    return [Load(speed=speed, max_in_flight=cap)]


@app.command()
def run(
    context: typer.Context,
    targets: Annotated[str, typer.Option(help="name,name=url,url: declared in targets.toml, or reference, or null.")],
    trace: Annotated[Path, typer.Option(help="Trace file; its format is found by its keys.")],
    concurrency: Annotated[str, typer.Option(help="Closed loop: this many slots, e.g. 1,8,32.")] = "",
    rate: Annotated[str, typer.Option(help="Open loop: requests per second, e.g. 1,2,4.")] = "",
    burstiness: Annotated[float, typer.Option(help="Gamma shape of --rate's gaps: 1 Poisson, 0.25 CV 2.")] = 1.0,
    constant: Annotated[bool, typer.Option("--constant", help="Space --rate's arrivals evenly.")] = False,
    replay: Annotated[
        bool, typer.Option("--replay", help="The trace's own times (the default where it has them).")
    ] = False,
    speed: Annotated[float, typer.Option(help="Replay this many times as fast: 2 takes half as long.")] = 1.0,
    max_in_flight: Annotated[
        int | None, typer.Option(help="Open loop's only cap; late ones queue, and it shows.")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Send the first N rows, warm-up included; default: all.")] = None,
    duration: Annotated[
        float | None, typer.Option(help="Seconds: of the window (closed) or of sending (open).")
    ] = None,
    warmup: Annotated[
        float | None, typer.Option(help="Requests (closed; 2 x slots) or seconds (open; 5% of the span).")
    ] = None,
    drain: Annotated[
        float | None, typer.Option(help="Seconds to wait for the last answers; default: each has its own time-outs.")
    ] = None,
    loop_trace: Annotated[
        bool, typer.Option("--loop-trace", help="Go round the trace, each lap with a new salt.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of arrivals; of the prompts with --reuse-prompts.")] = 0,
    retries: Annotated[
        int, typer.Option(help="Retries of 429, 5xx and refused connections; latency runs from the first.")
    ] = 0,
    too_long: Annotated[str, typer.Option(help="Requests over the context limit: refuse, skip or clip.")] = "refuse",
    reuse_prompts: Annotated[
        bool, typer.Option("--reuse-prompts", help="The same prompts in every cell and run.")
    ] = False,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Ask for whole answers: no TTFT, no TPOT.")] = False,
    trace_format: Annotated[
        str | None, typer.Option("--format-of-trace", help="Override the format that is found.")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens of a hash block, where the format's is not right.")
    ] = None,
    skip_bad: Annotated[int, typer.Option(help="Tolerate up to N bad rows; they are counted.")] = 0,
    api: Api = "",
    model: Model = "",
    key_env: KeyEnv = "",
    tokenizer: Tokenizer = "",
    max_model_len: MaxLen = 0,
    ca: Ca = "",
    insecure: Insecure = False,
    connect_per_request: Annotated[
        bool, typer.Option("--connect-per-request", help="A new connection for each request.")
    ] = False,
    spin: Annotated[float, typer.Option(help="Open loop: spin for the last so many µs before a due time.")] = 0.0,
    targets_file: TargetsFile = Path("targets.toml"),
    ready_timeout: Ready = 30.0,
    connect_timeout: Annotated[float, typer.Option(help="Seconds; 0: none.")] = 10.0,
    ttft_timeout: Annotated[float, typer.Option(help="Seconds from sending to the first token; 0: none.")] = 300.0,
    stall_timeout: Annotated[
        float, typer.Option(help="Seconds without a byte after the first token; 0: none.")
    ] = 120.0,
    total_timeout: Annotated[float, typer.Option(help="Seconds of one request in all, retries too; 0: none.")] = 3600.0,
    keep_bytes: Annotated[int, typer.Option(help="Keep the first N bytes of good answers too.")] = 0,
    metrics: Metrics = "",
    fail_on_error_rate: Annotated[
        float, typer.Option(help="Exit 1 when a cell's share of failures is over this.")
    ] = 0.5,
    fail_on_doubt: Annotated[bool, typer.Option("--fail-on-doubt", help="Exit 3 when there is any doubt.")] = False,
    format: Format = "terminal",  # noqa: A002
    out: Annotated[Path | None, typer.Option(help="Folder of the run; default: runs/TIME-TARGETS.")] = None,
    workers: Annotated[
        str, typer.Option(help="Processes that share each cell: a number, or auto; a cap is held by one.")
    ] = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Finish the run in --out: measure its missing cells.")
    ] = False,
) -> None:
    """Replay a trace against targets at each load, and report.

    Without --concurrency, --rate or --replay the trace is replayed at its own times. Several loads, or several targets,
    are measured one after the other. Metrics are listed in the README, under "Metrics".
    """
    from llm_bench import report
    from llm_bench import run as runs
    from llm_bench import targets as known
    from llm_bench.cell import Options
    from llm_bench.exchange import Timeouts

    if too_long not in ("refuse", "skip", "clip"):
        raise BenchError(f"--too-long {too_long!r}: expected refuse, skip or clip")
    _check_numbers(context.params)
    loads = _loads(concurrency, rate, replay, speed, burstiness, constant, max_in_flight)
    names = report.parse_metrics(metrics)
    report.check_format(format)
    chosen = known.parse(targets, targets_file, _given(context.params))
    limits = (connect_timeout, ttft_timeout, stall_timeout, total_timeout)
    if resume and out is None:
        raise BenchError("--resume: give the run's folder with --out, and what it was begun with")
    crew = 0 if workers == "auto" else _numbers(workers, "workers", int)[0]
    job = runs.Job(chosen, loads, trace, trace_format, block_size, skip_bad, crew, resume)
    options = Options(
        out=out or _new_folder([t.name for t in chosen]),
        requests=requests,
        duration_s=duration,
        warmup=warmup,
        drain_s=drain,
        loop_trace=loop_trace,
        seed=seed,
        retries=retries,
        too_long=too_long,
        reuse_prompts=reuse_prompts,
        stream=not no_stream,
        keep_bytes=keep_bytes,
        connect_per_request=connect_per_request,
        spin_us=spin,
        ready_s=ready_timeout,
        timeouts=Timeouts(*(limit or None for limit in limits)),
    )
    say, live = terminal.voice()
    ended = runs.run(job, options, say, live)
    say(f"records: {options.out}")
    found = report.load_run(options.out)
    terminal.show(report.render(found, names, format), f"; the records are whole: llm-bench report {options.out}")
    raise typer.Exit(_exit_code(ended, report.verdict(found), fail_on_error_rate, fail_on_doubt, say))


# Flags that are fields of a target -> the field's name.
_FIELDS = {name: name for name in ("api", "model", "key_env", "tokenizer", "max_model_len", "insecure")} | {
    "ca": "cafile"
}


def _given(params: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a target that were given as flags."""
    return {field: params[flag] for flag, field in _FIELDS.items() if params[flag]}


def _exit_code(ended: Any, verdict: Any, limit: float, fail_on_doubt: bool, say: Callable[[str], None]) -> int:
    if ended.interrupted:
        return 130
    if ended.gone:
        return 4
    if ended.died:
        return 5
    bad = [name for name, ok, rate in verdict.cells if not ok or rate > limit]
    if bad:
        say(f"failed: no ok request, or an error rate over {limit:.0%}, in {', '.join(bad)}")
        return 1
    return 3 if fail_on_doubt and verdict.doubts else 0


def _new_folder(names: list[str]) -> Path:
    from datetime import datetime

    stem = f"runs/{datetime.now():%Y%m%d-%H%M%S}-{'-'.join(names)[:60]}"
    stem = "".join(c if c.isalnum() or c in "-_./=" else "_" for c in stem)
    return next(path for path in map(Path, (stem, *(f"{stem}-{i}" for i in range(2, 1000)))) if not path.exists())


@app.command()
def report(
    runs: Annotated[list[Path] | None, typer.Argument(help="Run folders; default: the newest in runs/.")] = None,
    metrics: Metrics = "",
    format: Format = "terminal",  # noqa: A002
    fail_on_doubt: Annotated[bool, typer.Option("--fail-on-doubt", help="Exit 3 when there is any doubt.")] = False,
) -> None:
    """Read what runs recorded, and say what it means."""
    from llm_bench import report as reports

    names = reports.parse_metrics(metrics)
    reports.check_format(format)
    found = [reports.load_run(path) for path in runs or [reports.newest(Path("runs"))]]
    terminal.show(reports.render_all(found, names, format))
    if fail_on_doubt and any(reports.verdict(run).doubts for run in found):
        raise typer.Exit(3)


@targets_app.callback()
def list_targets(context: typer.Context, targets_file: TargetsFile = Path("targets.toml")) -> None:
    from llm_bench import targets as known

    if context.invoked_subcommand is None:
        found = known.parse(",".join(known.names(targets_file)), targets_file, {})
        lines = [f"{t.name}  {t.url or 'built in, started for a run'}  {t.api}\n" for t in found]
        terminal.show("".join(lines))


@targets_app.command("check")
def check(
    context: typer.Context,
    targets: Annotated[str, typer.Argument(help="name,name=url,url: as for `run --targets`.")],
    api: Api = "",
    model: Model = "",
    key_env: KeyEnv = "",
    tokenizer: Tokenizer = "",
    max_model_len: MaxLen = 0,
    ca: Ca = "",
    insecure: Insecure = False,
    targets_file: TargetsFile = Path("targets.toml"),
    ready_timeout: Ready = 30.0,
) -> None:
    """Ask each target what a measurement needs to know.

    Is it reachable, which models has it, does it count its tokens, can lengths be pinned, how far away is it.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from llm_bench import probe, prompts
    from llm_bench import targets as known

    _check_numbers(context.params)
    say, _ = terminal.voice()
    chosen = known.parse(targets, targets_file, _given(context.params))
    for declared in chosen:
        if declared.tokenizer:
            prompts.exact(declared.tokenizer)  # refused here, not in a run
    for declared in chosen:
        with known.running(declared, say) as target:
            found = probe.probe(target, say, ready_timeout)
        table = Table(title=escape(target.name), title_justify="left", show_header=False)
        for row in probe.check_rows(target, found):
            table.add_row(*map(escape, row))
        console = Console()
        with console.capture() as shown:
            console.print(table)
        terminal.show(shown.get())


@app.command()
def selfcheck() -> None:
    """Measure this client against a server with known times.

    How late its stamps are, how late it sends, what a core of this machine carries. `run` reads the result, and says of
    a cell that came close to it that the client was the limit. A minute; best on an idle machine.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from llm_bench import calibration
    from llm_bench import selfcheck as check
    from llm_bench.host import host

    say, live = terminal.voice()
    before = host()
    found = check.run(check.STEPS, say, live)
    table = Table(
        title="This client on this machine", title_justify="left", box=box.SIMPLE, padding=(0, 0, 0, 1), pad_edge=False
    )
    for heading in check.HEADINGS:
        table.add_column(heading, justify="left" if heading == "step" else "right", no_wrap=True)
    for row in check.rows(found):
        table.add_row(*row)
    console = Console(width=80)  # a wider terminal shows no more, and a narrower one must cut no number
    with console.capture() as shown:
        console.print(table)
    terminal.show(shown.get() + check.LEGEND + check.summary(found, check.STEPS))
    if warning := check.busy({name: found[name] for name in check.FLOOR}, before["load_average"], before["cores"]):
        say(warning)
    calibration.save({name: f._asdict() for name, f in found.items()}, check.ceiling(found))
    say(f"kept in {calibration.store()}")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def serve(context: typer.Context) -> None:
    """Start the reference engine alone; --help lists its knobs."""
    import subprocess
    from importlib.util import find_spec

    from llm_bench.targets import ENGINE_NEEDS

    engine = [sys.executable, "-m", "reference_engine", *context.args]
    if not {"-h", "--help"}.isdisjoint(context.args):
        shown = subprocess.run(engine, capture_output=True, text=True, check=False)
        terminal.show(shown.stdout.replace("python -m reference_engine", "llm-bench serve"))
        raise typer.Exit(shown.returncode)
    simulated = any(arg.startswith("sim:") for arg in context.args)
    missing = [name for name in ENGINE_NEEDS if find_spec(name) is None and not (simulated and name == "torch")]
    if missing:
        raise BenchError(
            f"serve: the engine needs {', '.join(missing)}: in the project's folder, "
            "pip install --constraint constraints.txt '.[engine]'"
        )
    os.execv(sys.executable, engine)


def main() -> None:
    """Entry point: errors of the user's are one line and exit code 2, never a traceback."""
    terminal.prepare()
    try:
        app()
    except BenchError as e:
        terminal.fail(str(e))
        sys.exit(e.exit_code)
    except Exception as e:  # noqa: BLE001  # ours: the whole traceback, and a code that is no verdict on the target
        import traceback

        if terminal.is_full(e):  # typer's own printing of a help text
            terminal.drop_stdout()
            terminal.fail(f"standard output cannot be written: {e}")
            sys.exit(1)
        traceback.print_exc()
        sys.exit(5)


if __name__ == "__main__":
    main()
