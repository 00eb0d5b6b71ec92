"""`llm-bench diagnose`: where the time of a run went, and what held it back."""

from pathlib import Path
from typing import Annotated

import typer

from llm_bench import terminal
from llm_bench.options import check_word


def diagnose(
    run: Annotated[Path | None, typer.Argument(help="Run folder, e.g. runs/x; default: the newest in runs/.")] = None,
    format: Annotated[str, typer.Option("--format", help="terminal, md or json.")] = "terminal",  # noqa: A002
) -> None:
    """Say where the time of each cell went, and what held it back.

    Each finding comes with its evidence. How sure a finding is depends on what was seen: records alone, the
    server's own account in its answers, its metrics (run --metrics-url), its GPUs (run --gpu). What could not be
    judged is listed with what is missing, and so is a cell in which nothing was found. Repeats of a cell are reported
    together; --format json has each alone.

    Example: llm-bench diagnose runs/x, of a run that was made with --metrics-url auto
    """
    from llm_bench import diagnose_report, results

    check_word("format", format, list(diagnose_report.FORMS))
    found = results.load_run(run or results.newest(Path("runs")))
    terminal.show(diagnose_report.FORMS[format](found, diagnose_report.diagnosed(found)))
