"""`llm-bench trace`: look at traces, convert, fit, make, anonymise and mix them."""

import gc
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from llm_bench import terminal
from llm_bench.errors import BenchError
from llm_bench.options import BlockSize, Dejitter, Map, SkipBad, TraceFormat, Turns, Unit, check_numbers, columns


class _Commands(TyperGroup):
    def invoke(self, context: Any) -> Any:
        enabled = gc.isenabled()
        gc.disable()  # a command keeps what it reads or makes: walks over millions of rows would free nothing
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            raise terminal.InterruptError("interrupted; no file is left half written") from None
        finally:
            if enabled:
                gc.enable()


app = typer.Typer(
    cls=_Commands, help="Look at traces; convert, fit, make, anonymise and mix them.", no_args_is_help=True
)


def _named(text: str) -> Path:
    """A path that is not empty: Path("") would be the working directory."""
    if not text:
        raise BenchError("the name of a file is empty, expected a path")
    return Path(text)


File = Annotated[
    Path,
    typer.Argument(
        parser=_named, metavar="FILE", help="Trace file of any format; .gz, .bz2 and .zst are read as they are."
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        "--out", "-o", parser=_named, metavar="FILE", help="File to write; .gz is compressed. Nothing is overwritten."
    ),
]
JSONL = (".jsonl", ".jsonl.gz", ".jsonl.bz2", ".jsonl.zst")  # what a trace that is written may be called
Seed = Annotated[int, typer.Option(help="The same seed makes the same trace on any machine.")]
SAME = ("lengths", 1.0)  # lengths as the model has them
TEXT_BLOCK = 16  # tokens: of a block of an anonymised text, as vLLM's prefix cache has them
LIMITS: dict[str, tuple[float, float]] = {
    "bins": (1e-3, 1e9),  # seconds
    "lengths": (1e-6, 1e3),  # factor
    "bucket": (0, 1_000_000),  # tokens
    "start": (0, 1e9),  # seconds
}
Trace = Any  # llm_bench.request.Trace, which a help text need not import


def _how(params: Mapping[str, Any]) -> dict[str, Any]:
    """What `trace.read` is told of a file."""
    check_numbers(params, LIMITS)
    return {
        "format": params.get("trace_format"),
        "block_size": params.get("block_size"),
        "unit": params.get("unit"),
        "turns": params.get("turns"),
        "skip_bad": params.get("skip_bad") or 0,
        "map": columns(params.get("mapping") or ""),
    }


def _read(file: Path, params: Mapping[str, Any]) -> Trace:
    from llm_bench import trace

    return trace.read(file, **_how(params))


def _write(out: Path, trace: Trace, made: str = "", about: str = "") -> None:
    from llm_bench import trace as files

    files.write(out, trace, about)
    terminal.show(f"{out}: {len(trace.requests):,} requests{made}\n")


def _check_new(out: Path, suffixes: tuple[str, ...] = JSONL, content: str = "JSONL", option: str = "-o") -> None:
    """BenchError, before any work, for a file that is there or a name that tells of another content."""
    if not out.name.lower().endswith(suffixes):
        raise BenchError(f"{option} {out}: this writes {content}; expected a name that ends in {' or '.join(suffixes)}")
    if out.exists() or out.is_symlink():
        raise BenchError(f"{option} {out}: it is there already, and nothing is overwritten; give a new name")
    if not out.parent.is_dir():
        raise BenchError(f"{option} {out}: no folder {out.parent}")


def _say_notes(trace: Any) -> None:
    say, _ = terminal.voice()
    for note in [*trace.notes, *(f"{count} rows left out: {reason}" for reason, count in trace.skipped.items())]:
        say(f"trace: {note}")


@app.command()
def inspect(
    context: typer.Context,
    file: File,
    trace_format: TraceFormat = None,
    unit: Unit = None,
    turns: Turns = None,
    block_size: BlockSize = None,
    skip_bad: SkipBad = 0,
    mapping: Map = "",
    format: Annotated[str, typer.Option(help="terminal, md or json.")] = "terminal",  # noqa: A002
    plot: Annotated[
        Path | None, typer.Option(parser=_named, metavar="FILE", help="Also draw it, into this .png or .svg file.")
    ] = None,
) -> None:
    """Show format, unit, rates, burstiness, lengths, sharing, sessions and doubts of a trace."""
    from llm_bench import doctor, trace_plot, trace_report, workload
    from llm_bench import trace as files

    if format not in ("terminal", "md", "json"):
        raise BenchError(f"--format {format!r}: expected terminal, md or json")
    if plot is not None:
        _check_picture(plot)
    found = files.read_sheet(file, **_how(context.params))
    described, findings = workload.describe(found), doctor.examine(found)
    if format == "terminal":
        width = shutil.get_terminal_size((100, 24)).columns
        terminal.show(trace_report.text(found, described, findings, width, sys.stdout.isatty()))
    elif format == "md":
        terminal.show(trace_report.markdown(found, described, findings))
    else:
        terminal.show(_json(trace_report.document(found, described, findings)))
    if plot is not None:
        trace_plot.plot(found, described, plot)


def _check_picture(path: Path) -> None:
    from importlib.util import find_spec

    _check_new(path, (".png", ".svg"), "a picture", "--plot")
    if find_spec("matplotlib") is None:
        raise BenchError("--plot needs matplotlib: in the project's folder, pip install '.[plots]'")


def _json(document: Mapping[str, Any]) -> str:
    import json

    return json.dumps(document, allow_nan=False) + "\n"


@app.command()
def convert(
    context: typer.Context,
    file: File,
    out: Out,
    trace_format: TraceFormat = None,
    unit: Unit = None,
    turns: Turns = None,
    block_size: BlockSize = None,
    skip_bad: SkipBad = 0,
    mapping: Map = "",
    dejitter: Dejitter = "off",
) -> None:
    """Write a trace in this project's own format."""
    from llm_bench import convert as converts

    _check_new(out)
    done = converts.convert(file, out, dejitter=dejitter, **_how(context.params))
    _say_notes(done)
    terminal.show(f"{out}: {done.requests:,} requests\n")


@app.command()
def fit(
    context: typer.Context,
    file: File,
    out: Annotated[Path, typer.Option("--out", "-o", parser=_named, metavar="FILE", help="Model to write, JSON.")],
    trace_format: TraceFormat = None,
    unit: Unit = None,
    turns: Turns = None,
    block_size: BlockSize = None,
    skip_bad: SkipBad = 0,
    mapping: Map = "",
    bins: Annotated[
        float | None, typer.Option(help="Seconds in a bin of the rate; default: from the number of rows.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            parser=_named, metavar="FILE", help="Draw trace and fit side by side, into this .png or .svg file."
        ),
    ] = None,
) -> None:
    """Fit arrivals, lengths, sessions and prefix sharing, and say how good the fit is."""
    from llm_bench import fit as fits
    from llm_bench import goodness, goodness_plot, model_file, synth

    _check_new(out, (".json",), "a model as JSON")
    if plot is not None:
        _check_picture(plot)
    found = _read(file, context.params)
    _say_notes(found)
    model = fits.fit(found, bin_s=bins)
    for note in model.notes:
        terminal.voice()[0](f"fit: {note}")
    made = found._replace(requests=synth.synth(model, seed=1), path="synthetic", notes=[], skipped={})
    terminal.show(goodness.text(goodness.compare(found, made)))
    model_file.save(model, out)
    if plot is not None:
        goodness_plot.plot(found, made, plot)
    terminal.show(f"{out}\n")


@app.command()
def synth(
    context: typer.Context,
    model: Annotated[
        Path,
        typer.Argument(
            parser=_named, metavar="MODEL", help="Model that `trace fit` wrote, or a folder of ServeGen's clients."
        ),
    ],
    out: Out,
    rate: Annotated[float | None, typer.Option(help="Conversations begun per second; default: the model's.")] = None,
    duration: Annotated[
        float | None, typer.Option(help="Seconds of arrivals; default: the trace's conversations.")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Stop at N requests, if that comes first.")] = None,
    lengths: Annotated[float, typer.Option(help="Multiply all lengths, e.g. by 0.1 for a small machine.")] = 1.0,
    start: Annotated[float, typer.Option(help="ServeGen: seconds of the clients' day to begin at.")] = 0.0,
    seed: Seed = 1,
) -> None:
    """Make a trace from a model, at any rate, duration and scale of lengths."""
    from llm_bench import model_file, servegen
    from llm_bench import synth as synths
    from llm_bench.request import Trace

    check_numbers(context.params, LIMITS)
    _check_new(out)
    about = ""
    if model.is_dir():
        if duration is None:
            raise BenchError(f"{model}: a folder of clients has no span of its own; give --duration")
        if lengths != 1.0:
            raise BenchError("--lengths is for a fitted model; a run scales any trace: run --scale-lengths")
        made = servegen.generate(servegen.read_folder(model), duration_s=duration, start_s=start, rate=rate, seed=seed)[
            :requests
        ]
    else:
        if start:
            raise BenchError(f"--start is for a folder of ServeGen's clients; {model} is a fitted model: leave it out")
        loaded = model_file.load(model)
        made = synths.synth(loaded, rate=rate, duration_s=duration, count=requests, seed=seed, lengths=lengths)
        about = _about(loaded, model, context.params)
    _write(out, Trace(made, "llm-bench", str(model), [], {}), _rates(made, duration), about)


def _about(loaded: Any, model: Path, params: Mapping[str, Any]) -> str:
    """Whose figures a synthetic trace has, and the command that makes it; "" of a fitted model, whose trace may be
    anyone's."""
    if not loaded.source:
        return ""
    asked = {name: params[name] for name in ("rate", "duration", "requests", "lengths", "seed")}
    words = [f"--{name} {value:g}" for name, value in asked.items() if value is not None and (name, value) != SAME]
    return f"synthetic, of {loaded.source}, {loaded.date}: llm-bench trace synth {model.name} {' '.join(words)}"


def _rates(made: Sequence[Any], duration_s: float | None) -> str:
    """What chance made of the rates asked for."""
    at_s = [r.at_s for r in made if r.at_s is not None]
    span_s = duration_s if duration_s is not None and at_s and at_s[-1] <= duration_s else max(at_s, default=0.0)
    if not span_s:
        return ""
    begun = sum(r.turn == 0 for r in made)
    conversations = f"; {begun:,} conversations begun, {begun / span_s:.3g}/s" if begun < len(made) else ""
    return f", {len(made) / span_s:.3g}/s{conversations}"


@app.command()
def anonymise(
    context: typer.Context,
    file: File,
    out: Out,
    key_env: Annotated[str, typer.Option(help="Environment variable that holds the secret key.")],
    bucket: Annotated[int, typer.Option(help="Round lengths up to multiples of N tokens; 0: exact.")] = 0,
    tokenizer: Annotated[str, typer.Option(help="tokenizer.json: exact lengths and blocks of texts.")] = "",
    keep_class: Annotated[bool, typer.Option("--keep-class", help="Leave the names of classes as they are.")] = False,
    keep_model: Annotated[bool, typer.Option("--keep-model", help="Leave the names of models as they are.")] = False,
    trace_format: TraceFormat = None,
    unit: Unit = None,
    turns: Turns = None,
    block_size: BlockSize = None,
    skip_bad: SkipBad = 0,
    mapping: Map = "",
) -> None:
    """Make a trace without texts and ids: lengths, times and keyed hashes that keep its sharing."""
    from llm_bench import anonymise as anonymous
    from llm_bench import prompts

    _check_new(out)
    key = anonymous.key_from_env(key_env)
    encode = prompts.encoder(tokenizer) if tokenizer else None
    found = _read(file, context.params)
    safe = anonymous.anonymise(
        found,
        key,
        block_size=block_size or TEXT_BLOCK,
        bucket=bucket,
        encode=encode,
        keep_class=keep_class,
        keep_model=keep_model,
    )
    _say_notes(safe)
    _show_rows(("figure", "before", "after"), anonymous.before_after(found, safe))
    _write(out, safe)


@app.command()
def mix(
    context: typer.Context,
    parts: Annotated[list[str], typer.Argument(help="PATH:SHARE[:priority=N][:name=CLASS], e.g. chat.jsonl:0.8.")],
    out: Out,
    rate: Annotated[float | None, typer.Option(help="Requests per second of the mix; default: the parts' own.")] = None,
    requests: Annotated[int | None, typer.Option(help="Stop at N requests, if that comes first.")] = None,
    dejitter: Dejitter = "auto",
    seed: Seed = 0,
) -> None:
    """Mix several traces into one, each a class with its share of the requests."""
    from llm_bench import mix as mixes

    _check_new(out)
    found = [(_read(Path(part.path), context.params), part) for part in map(mixes.parse_part, parts)]
    mixed = mixes.mix(found, seed=seed, rate=rate, count=requests, dejitter=dejitter)
    _say_notes(mixed)
    _write(out, mixed)


def _show_rows(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    for at, head in enumerate(heads):
        table.add_column(head, justify="right" if at else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console(width=max(80, 4 + sum(3 + max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads)))))
    with console.capture() as shown:
        console.print(table)
    terminal.show(shown.get())
