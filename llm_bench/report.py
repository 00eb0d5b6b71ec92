"""A run's records as a report in one of FORMATS. What is printed is what `metrics` computed."""

from collections.abc import Callable, Sequence

from llm_bench import export, html_report, markdown, metrics, terminal_report
from llm_bench.errors import BenchError
from llm_bench.results import Asked, Run
from llm_bench.words import or_default


def parse_metrics(text: str) -> list[str]:
    """`ttft_p95,tokens_per_second` -> names; "" -> [], each run's own default. Raises BenchError for an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        metrics.parse(name)
    return list(dict.fromkeys(names))


FORMATS: dict[str, Callable[[Sequence[Run], Asked], str]] = {
    "terminal": lambda runs, asked: "\n".join(terminal_report.text(run, or_default(asked, run)) for run in runs),
    "md": lambda runs, asked: "\n".join(markdown.text(run, or_default(asked, run)) for run in runs),
    "json": export.json_text,
    "csv": export.csv_text,
    "html": html_report.page,
}


def check_format(name: str) -> None:
    if name not in FORMATS:
        raise BenchError(f"--format {name!r}: expected one of {', '.join(FORMATS)}")


def render(runs: Sequence[Run], asked: Asked, format: str) -> str:  # noqa: A002
    """The runs as text in one of FORMATS; JSON is one line. Raises BenchError for an unknown format."""
    check_format(format)
    return FORMATS[format](runs, asked)
