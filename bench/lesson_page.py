"""Lessons as data, as a page, as figures; what a lesson says is made in bench.lessons."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

IDLE_LOAD = 0.25  # load average a core, before: above, others' work is in the figures
# Okabe and Ito's colours, told apart by colour-blind eyes (jfly.uni-koeln.de/color)
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#555555")
MARKS = "osD^v"
PANEL_INCHES = (4.4, 2.9)


class Panel(NamedTuple):
    """Lines over numbers, or bars over words: series name -> a value for each of x."""

    x_name: str
    y_name: str
    x: Sequence[float | str]
    series: dict[str, list[float]]
    log_x: bool = False
    log_y: bool = False


class Lesson(NamedTuple):
    title: str
    question: str
    setup: str
    columns: list[str]
    rows: list[list[str]]
    teaches: list[str]
    panels: list[Panel]


def as_json(lessons: dict[str, Lesson]) -> dict[str, Any]:
    """What json.dumps takes; `read` is its inverse."""
    return {
        name: lesson._asdict() | {"panels": [[*panel] for panel in lesson.panels]} for name, lesson in lessons.items()
    }


def read(path: Path) -> dict[str, Lesson]:
    said = json.loads(path.read_text())
    return {
        name: Lesson(**lesson | {"panels": [Panel(*panel) for panel in lesson["panels"]]})
        for name, lesson in said.items()
    }


def read_measured(path: Path) -> dict[str, Any] | None:
    """What bench.lesson_measured found; None before it was ever run."""
    return dict(json.loads(path.read_text())) if path.exists() else None


_HEAD = """# Lessons

What each choice of a serving engine costs and buys. Written by `python -m bench.lessons` (`make lessons`); do not edit.

The engine's own scheduler, blocks, policies and batching are simulated; only the time of a step comes from a cost
model (`sim:8b-h100`: overhead + max(weights, arithmetic) + contexts + attention, each step 3% more or less at
random) on a clock that jumps. So the times are those of a machine that was not there, the same on each computer that
repeats them: what the scheduler makes of them is real, the shape of a curve more than its figures.
"""


def render(lessons: dict[str, Lesson], measured: dict[str, Any] | None) -> str:
    """The page. `measured`: what bench.lesson_measured found."""
    parts = [_HEAD, *(f"- [{lesson.title}](#{_anchor(lesson.title)})" for lesson in lessons.values())]
    if measured:
        parts.append(f"- [{_MEASURED}](#{_anchor(_MEASURED)})")
    for name, lesson in lessons.items():
        parts += ["", f"## {lesson.title}", "", f"**{lesson.question}** {lesson.setup}", ""]
        parts += [f"![{lesson.title}]({name}.svg)", "", *_table(lesson.columns, lesson.rows), ""]
        parts += [f"- {sentence}" for sentence in lesson.teaches]
        parts += ["", f"Again: `python -m bench.lessons --only {name}`"]
    if measured:
        parts += ["", f"## {_MEASURED}", "", *_measured(measured)]
    return "\n".join(parts) + "\n"


_MEASURED = "The same over HTTP"


def _measured(facts: dict[str, Any]) -> list[str]:
    """The virtual figure beside the measured one, and their ratio."""
    machine = facts["machine"]
    rows = [
        [mode, metric, f"{virtual:,.4g}", f"{measured:,.4g}", f"{measured / virtual:.3f}"]
        for mode, metrics in facts["modes"].items()
        for metric, (virtual, measured) in metrics.items()
    ]
    busy = machine["load_before"] > IDLE_LOAD * machine["cores"]
    return [
        "**Is the figure of the virtual clock what a client measures?** Three servers, one after the other, each "
        f"`python -m reference_engine --model {facts['model']} --batching MODE` in real time, and `llm-bench run "
        f"--replay` of {facts['requests']} requests at {facts['rate']:g} a second. Then the same requests on the "
        "virtual clock, due at the same moments, of the lengths that the server counted. "
        f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}; load average before: "
        f"{machine['load_before']:.2f}.",
        "",
        *_table(["mode", "metric", "virtual", "measured", "measured / virtual"], rows),
        "",
        f"- What a client measures is {facts['least']:.3f} to {facts['greatest']:.3f} times the virtual figure: the "
        "engine's own work, the sockets and the client come on top of a machine that is there on paper only."
        + " So does what else ran here: this machine was busy before it began. Measure again on an idle one."
        * busy,
        f"- {facts['ok']} of {facts['sent']} requests were ok; the client saw {facts['tokens'][0]:,} tokens, the "
        f"servers counted {facts['tokens'][1]:,}.",
        "",
        "Again: `python -m bench.lessons --only batching --measured`. By hand, with a model that computes: `llm-bench "
        "run --targets static,dynamic,continuous --trace traces/sample-chat.jsonl --rate 4`",
    ]


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _anchor(title: str) -> str:
    """As GitHub makes one of a heading."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c == "-")


def draw(panels: list[Panel], path: Path) -> None:
    """An SVG or PNG by the path's suffix; the same bytes each time. Needs matplotlib (extra `plots`)."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    style: Any = {"svg.hashsalt": "lessons", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        width = PANEL_INCHES[0] * max(len(panels), 1.4)
        canvas = Canvas((width, PANEL_INCHES[1]), dpi=110, layout="constrained", facecolor="white")
        FigureCanvasAgg(canvas)
        for i, panel in enumerate(panels, 1):
            axes = canvas.add_subplot(1, len(panels), i)
            _bars(axes, panel) if isinstance(panel.x[0], str) else _lines(axes, panel)
            axes.set_xlabel(panel.x_name)
            axes.set_ylabel(panel.y_name)
            axes.grid(axis="y", color="#dddddd", linewidth=0.6)
            axes.set_axisbelow(True)
            if panel.log_y:
                axes.set_yscale("log")
            else:
                axes.set_ylim(bottom=0)
            if len(panel.series) > 1:
                handles, labels = axes.get_legend_handles_labels()  # the same in each panel that has several
        if max(len(panel.series) for panel in panels) > 1:
            canvas.legend(handles, labels, loc="outside upper center", ncols=5, frameon=False, fontsize=8.5)
        canvas.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})


def _lines(axes: Any, panel: Panel) -> None:
    for (name, values), colour, mark in zip(panel.series.items(), COLOURS, MARKS, strict=False):
        axes.plot(panel.x, values, color=colour, marker=mark, markersize=4, linewidth=1.4, label=name)
    if panel.log_x:
        from matplotlib.ticker import NullLocator, ScalarFormatter

        axes.set_xscale("log", base=2)
        axes.set_xticks(panel.x)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())


def _bars(axes: Any, panel: Panel) -> None:
    width = 0.8 / len(panel.series)
    for i, ((name, values), colour) in enumerate(zip(panel.series.items(), COLOURS, strict=False)):
        axes.bar([at + (i - (len(panel.series) - 1) / 2) * width for at in range(len(values))], values, width * 0.92,
                 color=colour, label=name)  # fmt: skip
    axes.set_xticks(range(len(panel.x)), panel.x)
