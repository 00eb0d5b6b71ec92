"""The command line: parse, call one function, print. The help texts are the manual; README's blocks come from them."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from llm_bench import __version__, cli_diagnose, cli_gate, cli_trace, terminal
from llm_bench.cli_canary import canary
from llm_bench.cli_capacity import capacity
from llm_bench.cli_run import run, slo_code
from llm_bench.cli_search import search
from llm_bench.errors import BenchError
from llm_bench.options import (
    Api,
    As,
    Ca,
    Deadlines,
    FailOnSlo,
    Format,
    Insecure,
    KeyEnv,
    MaxLen,
    Metrics,
    Model,
    Output,
    Proxy,
    Ready,
    SloText,
    TargetsFile,
    Tokenizer,
    check_numbers,
    given,
)

if TYPE_CHECKING:
    from llm_bench.perplexity import Scored
    from llm_bench.probe import Probe
    from llm_bench.targets import Target


class _Commands(TyperGroup):
    def invoke(self, context: Any) -> Any:
        try:
            return super().invoke(context)
        except KeyboardInterrupt:  # typer itself would end without a word
            raise terminal.InterruptError("interrupted; what was measured before is on disk") from None


app = typer.Typer(
    name="llm-bench",
    cls=_Commands,
    help="Load-test LLM serving engines: replay a trace, record what users feel, report what the data carry.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(cli_trace.app, name="trace")
targets_app = typer.Typer(help="List the declared targets, or check them.", invoke_without_command=True)
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


app.command()(run)
app.command()(search)
app.command()(capacity)
app.command()(canary)
app.command()(cli_gate.gate)
app.command()(cli_gate.compare)
app.command()(cli_gate.history)
app.command()(cli_diagnose.diagnose)


@app.command()
def report(
    runs: Annotated[list[Path] | None, typer.Argument(help="Run folders; default: the newest in runs/.")] = None,
    metrics: Metrics = "",
    slo: SloText = "",
    deadlines: Deadlines = "",
    others: As = "",
    format: Format = "terminal",  # noqa: A002
    output: Output = None,
    each_run: Annotated[bool, typer.Option("--runs", help="Each repeat alone, instead of all together.")] = False,
    fail_on_slo: FailOnSlo = False,
    fail_on_doubt: Annotated[bool, typer.Option("--fail-on-doubt", help="Exit 3 when there is any doubt.")] = False,
) -> None:
    """Read what runs recorded, and say what it means."""
    from llm_bench import as_tools, objectives, parquet, results
    from llm_bench import report as reports

    asked = results.Asked(
        reports.parse_metrics(metrics), objectives.parse(slo, deadlines), as_tools.parse(others), each_run
    )
    if format == "parquet" and output is None:
        raise BenchError("--format parquet: expected -o FILE, since a terminal cannot show it")
    if format != "parquet":
        reports.check_format(format)
    found = [results.load_run(path) for path in runs or [results.newest(Path("runs"))]]
    if fail_on_slo and not all(run.agreed(asked.slo).limits for run in found):
        raise BenchError("--fail-on-slo: no limit is given, nor kept with the run; give --slo, such as ttft_p95<800ms")
    if format == "parquet" and output is not None:
        parquet.write(found, asked, output)
    elif output is not None:
        terminal.save(output, reports.render(found, asked, format))
    else:
        terminal.show(reports.render(found, asked, format))
    verdicts = [results.verdict(run, run.agreed(asked.slo)) for run in found]
    codes = {slo_code(verdict) for verdict in verdicts if fail_on_slo}
    if code := 1 if 1 in codes else 3 if 3 in codes or (fail_on_doubt and any(v.doubts for v in verdicts)) else 0:
        raise typer.Exit(code)


@targets_app.callback()
def list_targets(context: typer.Context, targets_file: TargetsFile = Path("targets.toml")) -> None:
    from llm_bench import targets as known

    if context.invoked_subcommand is None:
        terminal.show("".join(f"{line}\n" for line in known.listing(targets_file)))
    context.default_map = {"check": {"targets_file": targets_file}}  # said before the command it means the same


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
    proxy: Proxy = "",
    targets_file: TargetsFile = Path("targets.toml"),
    ready_timeout: Ready = 30.0,
    agree: Annotated[bool, typer.Option("--agree", help="Also show where answers differ, and perplexity.")] = False,
) -> None:
    """Ask each target what a measurement needs to know.

    Is it reachable, which models and which build does it have, does it count its tokens, can lengths be pinned, how far
    away is it. Several targets stand side by side; one that is absent, or not what it should be, gets a sentence.
    """
    from llm_bench import probe, prompts, scoring_ask
    from llm_bench import targets as known

    check_numbers(context.params)
    say, _ = terminal.voice()
    chosen = known.parse(targets, targets_file, given(context.params))
    if agree and len(chosen) < 2:
        raise BenchError(f"--agree: one target, {chosen[0].name}, expected two or more, such as a=URL,b=URL")
    for declared in chosen:
        if declared.tokenizer:
            prompts.exact(declared.tokenizer)  # refused here, not in a run
    found, scored, refused = [], [], []
    for declared in chosen:
        try:
            with known.running(declared, say) as target:
                found.append((target, probe.probe(target, say, ready_timeout, compared=len(chosen) > 1, whole=True)))
                if agree:
                    say(f"{target.name}: scoring the bundled text")
                    scored.append((target.name, scoring_ask.ask(target, found[-1][1].model)))
        except BenchError as e:  # the others are shown all the same
            refused.append(e)
    if found:
        _show_found(found, scored, agree and len(found) > 1)
    for refusal in refused[:-1]:
        terminal.fail(str(refusal))
    if refused:
        raise refused[-1]


def _show_found(found: list[tuple["Target", "Probe"]], scored: list[tuple[str, "Scored | str"]], agree: bool) -> None:
    """Targets side by side, a column each, then what is noted of them."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    from llm_bench import probe_report

    # Folded: a URL or a version that a narrow column cuts short would be another one.
    table = Table(*(Column(escape(name), overflow="fold") for name in ("", *(target.name for target, _ in found))))
    for row in probe_report.side_by_side(found):
        table.add_row(*map(escape, row))
    console = Console()
    with console.capture() as shown:
        console.print(table)
    lines = [f"note of {line}" for line in probe_report.note_lines(found)]
    lines += probe_report.agreement_lines(found) + probe_report.scoring_lines(scored) if agree else []
    terminal.show(shown.get() + "".join(f"{line}\n" for line in lines))


@app.command()
def selfcheck() -> None:
    """Measure this client against a server with known times.

    How late its stamps are, how late it sends, what a core of this machine carries. `run` reads the result and says
    when a cell came so close to it that the client was the limit. Takes a minute; best on an idle machine.
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
        say(f"{warning}; not kept")
        raise typer.Exit(3)
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
            sys.exit(terminal.OutputError.exit_code)
        traceback.print_exc()
        sys.exit(5)


if __name__ == "__main__":
    main()
