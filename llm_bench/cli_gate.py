"""`llm-bench gate`, `compare` and `history`: what changed between arms, and over runs."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from llm_bench import terminal
from llm_bench.errors import BenchError
from llm_bench.options import Deadlines, Metrics, Output, SloText

TextFormat = Annotated[str, typer.Option("--format", help="terminal, md or json.")]
FORMATS = ("terminal", "md", "json")
HISTORY_FORMATS = (*FORMATS, "html", "parquet")


def gate(
    run: Annotated[Path | None, typer.Argument(help="Run made with --interleave --repeat N.")] = None,
    baseline: Annotated[str, typer.Option(help="Target of RUN or, without RUN, the folder of a stored run.")] = "",
    candidate: Annotated[str, typer.Option(help="The same, for what is to be judged.")] = "",
    rule: Annotated[
        list[str] | None,
        typer.Option(help="ttft_p95<=+5%, tokens_per_second>=-3%, error_rate<=+0.5pp; may be given again."),
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            help="Kind of doubt to accept as intended: 'not interleaved', 'targets differ', 'network path', 'delivered "
            "tokens', 'prompt tokens', 'repeated prompts' or 'cached prompts'; may be given again."
        ),
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="RUN has equal arms: print false alarms and the smallest change found.")
    ] = False,
    slo: SloText = "",
    deadlines: Deadlines = "",
    format: TextFormat = "terminal",  # noqa: A002
    markdown: Annotated[Path | None, typer.Option(help="Write Markdown there, for a pull request.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML there; INCONCLUSIVE is an error in it.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write everything as JSON there.")] = None,
    smaller_json: Annotated[
        Path | None, typer.Option(help="Write figures for CI charts: those where smaller is better.")
    ] = None,
    bigger_json: Annotated[Path | None, typer.Option(help="The same, where bigger is better.")] = None,
) -> None:
    """Judge a candidate against a baseline, pair by pair.

    Exit codes: PASS 0, FAIL 1, INCONCLUSIVE 3. The unit is the pair of runs, not the request; the test is exact
    sign flips at 0.05, by Holm over all rules and loads. A doubt makes a verdict INCONCLUSIVE where it could have
    produced it. Too few pairs are refused (2). With --self-test: 0; 1 where equal arms FAIL; 3 where doubts forbid a
    verdict or a figure is undefined.
    """
    from llm_bench import equal_arms, gate_report, objectives, rules
    from llm_bench import gate as gates

    check_format(format)
    accepted = gates.check_accepted(accept or [])
    asked = rules.parse(rule or (equal_arms.DEFAULT_RULES if self_test else []))
    given = objectives.parse(slo, deadlines)
    if not asked:
        raise BenchError("gate: give --rule, such as --rule 'ttft_p95<=+5%'")
    arms = _arms(run, baseline, candidate, self_test=self_test)
    judged = judge(*arms, asked, accepted, given)
    if self_test:
        relabelled = equal_arms.relabel(judged)
        said: dict[str, Callable[[], str]] = {
            "terminal": lambda: equal_arms.text(judged, relabelled),
            "md": lambda: equal_arms.markdown(judged, relabelled),
            "json": lambda: equal_arms.json_text(judged, relabelled),
        }
        code = equal_arms.exit_code(judged)
    else:
        said = {
            "terminal": lambda: gate_report.text(judged),
            "md": lambda: gate_report.markdown(judged),
            "json": lambda: gate_report.json_text(judged),
        }
        code = gates.EXIT_CODES[judged.verdict]
    write(markdown, said["md"])
    write(json, said["json"])
    write(junit, lambda: gate_report.junit(judged))
    write(smaller_json, lambda: gate_report.chart_json(judged, "lower"))
    write(bigger_json, lambda: gate_report.chart_json(judged, "higher"))
    terminal.show(said[format]())
    raise typer.Exit(code)


def judge(mine: Any, theirs: Any, asked: Any, accepted: Any, given: Any) -> Any:
    """gate.Judged of two pairing.Arms by rules. Raises BenchError where they have no load in common."""
    from llm_bench import gate as gates
    from llm_bench import pairing, rules

    agreed = theirs.run.agreed(given)
    for one in asked:
        if one.metric.name in rules.NEEDS_SLO and not agreed.limits:
            raise BenchError(f"--rule {one.text!r}: {one.metric.name} needs the limits of --slo")
    paired = pairing.pair_up(mine, theirs)
    if not paired.pairs:
        raise BenchError(
            f"{mine.name} and {theirs.name} have no load in common, expected pairs of one load; they have "
            f"{', '.join(mine.loads)} and {', '.join(theirs.loads)}"
        )
    return gates.judge(paired.pairs, (mine.name, theirs.name), asked, paired.objections, accepted, agreed.context())


def _arms(run: Path | None, baseline: str, candidate: str, *, self_test: bool) -> tuple[Any, Any]:
    """pairing.Arms: two targets of a run, or the runs in two folders. Raises BenchError where they are not said."""
    from llm_bench import pairing, results

    if self_test:
        if run is None:
            raise BenchError("gate --self-test: give the RUN of equal arms")
        return _equal(results.load_run(run), baseline, candidate)
    if not baseline or not candidate:
        raise BenchError("gate: give --baseline and --candidate, two targets of RUN or two folders of runs")
    if baseline == candidate:
        raise BenchError(f"gate: {baseline} against itself; equal arms are for --self-test")
    if run is not None:
        found = results.load_run(run)
        return pairing.arm(found, baseline), pairing.arm(found, candidate)
    mine, theirs = (pairing.only_arm(results.load_run(Path(path))) for path in (baseline, candidate))
    if mine.name == theirs.name:
        mine, theirs = mine._replace(name=baseline), theirs._replace(name=candidate)
    return mine, theirs


def _equal(run: Any, baseline: str, candidate: str) -> tuple[Any, Any]:
    """The two arms of a run that are one server: those named, its two targets, or its only one in halves."""
    from llm_bench import pairing

    names = [n for n in (baseline, candidate) if n] or list(dict.fromkeys(m.target for m in run.cells))
    if len(names) == 1:
        return pairing.halves(pairing.arm(run, names[0]))
    if len(names) != 2 or names[0] == names[1]:
        raise BenchError(f"{run.path}: {len(names)} targets; give --baseline and --candidate, two that are equal")
    return pairing.arm(run, names[0]), pairing.arm(run, names[1])


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; if there is only one, its targets are compared.")],
    metrics: Metrics = "",
    slo: SloText = "",
    deadlines: Deadlines = "",
    format: TextFormat = "terminal",  # noqa: A002
) -> None:
    """Put runs or targets side by side: their work, then figures.

    The first line says when it was not the same work, or not interleaved. An interval of a change is shown only where
    interleaved pairs carry one; a verdict is `gate`'s.
    """
    from llm_bench import compare as comparing
    from llm_bench import objectives, report, results

    check_format(format)
    names, given = report.parse_metrics(metrics), objectives.parse(slo, deadlines)
    found = [results.load_run(path) for path in runs]
    compared = comparing.compare(found, names, found[0].agreed(given).context())
    forms = {"terminal": comparing.text, "md": comparing.markdown, "json": comparing.json_text}
    terminal.show(forms[format](compared))


def history(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, e.g. runs/*; they are ordered by when they were made.")
    ],
    metric: Annotated[str, typer.Option(help="Names of docs/reference.md, e.g. ttft_p95,tokens_per_second.")],
    target: Annotated[str, typer.Option(help="Only of this target.")] = "",
    load: Annotated[str, typer.Option(help="Only at this load, as reports label it, e.g. c=8.")] = "",
    details: Annotated[bool, typer.Option("--details", help="Show every run, even of several histories.")] = False,
    slo: SloText = "",
    deadlines: Deadlines = "",
    format: Annotated[str, typer.Option("--format", help="terminal, md, json, html or parquet.")] = "terminal",  # noqa: A002
    output: Output = None,
) -> None:
    """Show metrics over runs, and where they changed for good.

    Change points by E-divisive with permutations (Matteson and James, JASA 109, 2014). html is one page with a panel a
    metric; parquet has a row a metric and run, for pandas or duckdb. A run is read, reduced and let go before the next.
    """
    from llm_bench import history as past
    from llm_bench import objectives, report, trend

    check_format(format, HISTORY_FORMATS)
    if format == "parquet" and output is None:
        raise BenchError("--format parquet: expected -o FILE, since a terminal cannot show it")
    names, agreed = report.parse_metrics(metric), objectives.parse(slo, deadlines)
    if not names:
        raise BenchError("--metric: no name, expected one or more, such as ttft_p95,tokens_per_second")
    twice = [path for path, times in Counter(path.resolve() for path in runs).items() if times > 1]
    if twice:  # a run that counts twice is evidence of nothing
        raise BenchError(f"{twice[0]}: given twice; expected each run once")
    found = past.histories(_readable(runs), names, target, load, agreed.context())
    said: dict[str, Callable[[], str]] = {
        "terminal": lambda: past.text(found, details),
        "md": lambda: past.markdown(found, details),
        "json": lambda: past.json_text(found),
        "html": lambda: trend.page(found),
    }
    if format == "parquet" and output is not None:
        past.write_parquet(found, output)
    elif output is not None:
        terminal.save(output, said[format]())
    else:
        terminal.show(said[format]())


def _readable(paths: Sequence[Path]) -> Iterator[Any]:
    """The runs among the folders, one by one; what is none is said and left out. Raises BenchError for none."""
    from llm_bench import results

    say, _ = terminal.voice()
    any_found, refused = False, list[BenchError]()
    for path in paths:
        try:
            run = results.load_run(path)
        except BenchError as e:
            refused.append(e)
            continue
        any_found = True
        yield run
        del run  # else it would stay until the next is read
    if refused and not any_found:
        raise refused[0]
    for error in refused:
        say(f"left out: {error}")


def check_format(name: str, known: Sequence[str] = FORMATS) -> None:
    if name not in known:
        raise BenchError(f"--format {name!r}: expected one of {', '.join(known)}")


def write(path: Path | None, text: Callable[[], str]) -> None:
    if path is None:
        return
    try:
        path.write_text(text(), encoding="utf-8")
    except OSError as e:
        raise BenchError(f"{path}: cannot be written: {e.strerror}") from None
