"""A picture of a trace: arrivals, gaps, lengths, prefix hits and turns, one panel for each that the trace has."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llm_bench import prefixes, ticks
from llm_bench.containers import new_file
from llm_bench.errors import BenchError
from llm_bench.request import Trace
from llm_bench.sheet import Rows, Sheet, prompts, sheet
from llm_bench.workload import Workload, lengths, pairs, stamps, turn_counts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

# Okabe and Ito's colours, told apart by colour-blind eyes (jfly.uni-koeln.de/color)
BLUE, VERMILLION, GREEN, ORANGE, GREY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#555555"
SUFFIXES = (".png", ".svg")
PANEL_INCHES = (4.8, 3.4)
MOST_BINS = 120
SCATTER_MOST = 3000  # points; more of them hide each other, and hexagons count them
CURVE_POINTS = 2000
SPREAD_LABEL = "at random inside ticks"


class _Shown(NamedTuple):
    rows: Rows
    workload: Workload
    at_s: np.ndarray
    spread_s: np.ndarray | None  # the same inside their ticks


def plot(trace: Trace | Sheet, workload: Workload, path: Path) -> None:
    """One figure of the panels that apply, written as PNG or SVG by the path's suffix; the same bytes each time.

    Raises BenchError for another suffix, a path that cannot be written, or without matplotlib.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise BenchError(f"--plot {path}: a picture ends in {' or '.join(SUFFIXES)}")
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise BenchError("--plot: a picture needs matplotlib: pip install 'llm-bench[plots]'") from None
    rows_shown = sheet(trace).rows
    at_s = stamps(rows_shown)
    tick = workload.arrivals.tick_s
    shown = _Shown(rows_shown, workload, at_s, None if tick is None else ticks.spread(at_s, tick, 0))
    panels = [draw for applies, draw in PANELS if applies(workload)]
    columns = 3 if len(panels) > 4 else min(2, len(panels)) or 1
    rows = -(-len(panels) // columns) or 1
    with matplotlib.rc_context({"svg.hashsalt": "llm-bench", "axes.titlesize": 10, "font.size": 8.5}):
        figure = Figure((columns * PANEL_INCHES[0], rows * PANEL_INCHES[1] + 0.4), dpi=130, layout="constrained")
        FigureCanvasAgg(figure)
        rate = workload.arrivals.rate
        about = [Path(trace.path).name, trace.format, f"{workload.n:,} requests"]
        about += [f"{rate:.3g}/s over {workload.arrivals.span_s:,.0f} s"] if rate is not None else []
        figure.suptitle("  ·  ".join(about), fontsize=11, parse_math=False)
        for at, draw in enumerate(panels, 1):
            axes = figure.add_subplot(rows, columns, at)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(color="#dddddd", linewidth=0.6)
            axes.set_axisbelow(True)
            draw(axes, shown)
        dated = {"Date": None} if path.suffix.lower() == ".svg" else {}
        with new_file(path, "--plot") as part:
            figure.savefig(part, metadata=dated)


def _arrivals(axes: "Axes", shown: _Shown) -> None:
    """Bins of whole ticks, so that no bin has one tick more than the next; never finer than 20 arrivals on average."""
    span, tick = shown.workload.arrivals.span_s, shown.workload.arrivals.tick_s
    bins = int(np.clip(len(shown.at_s) / 20, 10, MOST_BINS))
    width = span / bins
    if tick is not None:
        width = max(1, round(width / tick)) * tick
    edges, top = np.arange(0, span + width, width), 0.0
    several = ((shown.at_s, BLUE, "as recorded", 1.2), (shown.spread_s, ORANGE, SPREAD_LABEL, 0.9))
    for at_s, colour, label, line in several:
        if at_s is not None:
            counts = np.histogram(at_s, edges)[0] / width
            whole = edges[1:] <= span  # a cut bin would show a rate that never was
            edges_shown = edges[: whole.sum() + 1]
            axes.stairs(counts[whole], edges_shown, baseline=None, color=colour, label=label, linewidth=line)
            top = max(top, float(counts[whole].max(initial=0)))
    mean = shown.workload.arrivals.rate
    if mean is not None:
        axes.axhline(mean, color=GREY, linestyle=":", linewidth=1, label=f"mean {mean:.3g}/s")
    axes.set(
        title=f"Arrivals in {width:.3g} s bins", xlabel="time, s", ylabel="requests/s", ylim=(0, 1.25 * top or None)
    )
    axes.legend(loc="upper center", ncols=3, frameon=False, columnspacing=1, handlelength=1.4)


def _gaps(axes: "Axes", shown: _Shown) -> None:
    """P(gap > x): a Poisson stream lies on the dashed line; a longer tail is burstier."""
    several = ((shown.at_s, BLUE, "as recorded"), (shown.spread_s, ORANGE, SPREAD_LABEL))
    mean = shown.workload.arrivals.span_s / (len(shown.at_s) - 1)
    least, left = 1.0, mean / 1000
    for at_s, colour, label in several:
        if at_s is None:
            continue
        gaps = np.sort(np.diff(at_s))
        beyond = 1 - np.arange(1, len(gaps) + 1) / len(gaps)
        kept = (gaps > 0) & (beyond > 0)
        if not kept.any():
            continue
        least = min(least, float(beyond[kept][-1]))
        cv = ticks.inter_arrival_cv(at_s)
        some = _some(int(kept.sum()))
        x = np.append(min(left, gaps[kept][0]), gaps[kept][some])
        y = np.append(float((gaps > 0).mean()), beyond[kept][some])
        axes.step(x, y, where="post", color=colour, label=f"{label}, CV {cv:.2f}", linewidth=1.4)
    x = np.geomspace(left, mean * 12, 300)
    axes.plot(x, np.exp(-x / mean), color=GREY, linestyle="--", linewidth=1, label="exponential, CV 1")
    axes.set(title="Gaps between arrivals", xlabel="gap, s", ylabel="share of gaps longer", xscale="log", yscale="log")
    axes.set_ylim(least / 2, 1.5)
    axes.legend(loc="lower left", frameon=True, framealpha=0.85, edgecolor="none")


def _lengths(axes: "Axes", shown: _Shown) -> None:
    for values, colour, label in zip(lengths(shown.rows), (BLUE, VERMILLION), ("prompt", "answer"), strict=True):
        if len(values):
            ranked = np.sort(values)
            share = np.arange(1, len(ranked) + 1) / len(ranked)
            some = _some(len(ranked))
            axes.step(ranked[some], share[some], where="post", color=colour, label=label, linewidth=1.4)
    axes.set(title="Lengths", xlabel="tokens", ylabel="share at most so long", xscale="log", ylim=(0, 1.02))
    _plain(axes.xaxis)
    axes.legend(loc="upper left", frameon=True, framealpha=0.85, edgecolor="none")


def _both(axes: "Axes", shown: _Shown) -> None:
    x, y = pairs(shown.rows)
    rho = shown.workload.spearman
    axes.set(title="Answer against prompt" + (f", Spearman {rho:.2f}" if rho is not None else ""))
    axes.set(xlabel="prompt tokens", ylabel="answer tokens", xscale="log", yscale="log")
    if len(x) <= SCATTER_MOST:
        axes.scatter(x, y, s=9, color=BLUE, alpha=0.5, linewidths=0)
    else:
        axes.grid(visible=False)
        hexagons = axes.hexbin(x, y, gridsize=45, xscale="log", yscale="log", bins="log", cmap="cividis", mincnt=1)
        axes.figure.colorbar(hexagons, ax=axes, label="requests")
    _plain(axes.xaxis)
    _plain(axes.yaxis)


def _hits(axes: "Axes", shown: _Shown) -> None:
    sharing = shown.workload.sharing
    assert sharing is not None, "a panel of what the trace has not"
    sizes = np.unique(np.geomspace(1, max(sharing.distinct, 2), 200).round().astype(int))
    shares = prefixes.lru_curve(prefixes.blocks(prompts(shown.rows)), sizes.tolist())
    axes.plot(sizes, 100 * np.array(shares), color=GREEN, label="LRU", linewidth=1.6)
    bound = 100 * sharing.block_hits
    axes.axhline(bound, color=GREY, linestyle="--", linewidth=1, label=f"endless cache, {bound:.1f}%")
    axes.set(title="Prefix hits by cache size", xlabel=f"cache, blocks of {sharing.block_size} tokens")
    axes.set(ylabel="blocks hit, %", xscale="log", ylim=(0, max(1.0, bound * 1.3)))
    axes.legend(loc="upper left", ncols=2, frameon=False)
    _plain(axes.xaxis)


def _some(n: int) -> np.ndarray:
    """Places of 0 ... n - 1 that a curve needs: evenly over all, and each of the tail. A million would fill an SVG."""
    return np.unique(np.concatenate([np.linspace(0, n - 1, CURVE_POINTS).astype(int), np.arange(max(0, n - 200), n)]))


def _plain(axis: "Axis") -> None:
    """A log axis in plain numbers: powers of ten, and between them 2 and 5 where there is hardly a power to see."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1,) if high > 50 * low else (1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _turns(axes: "Axes", shown: _Shown) -> None:
    from matplotlib.ticker import MaxNLocator

    turns = turn_counts(shown.rows).astype(int)
    counts = np.bincount(turns)[1:]
    axes.set(title=f"Turns of {len(turns):,} sessions", xlabel="turns", ylabel="sessions")
    if len(counts) <= 40:
        axes.bar(np.arange(1, len(counts) + 1), counts, color=BLUE, width=0.8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        return
    beyond = 1 - np.concatenate([[0], np.cumsum(counts)[:-1]]) / counts.sum()
    axes.step(np.arange(1, len(counts) + 1), beyond, where="post", color=BLUE, linewidth=1.4)
    axes.set(ylabel="share of sessions with at least so many", xscale="log", yscale="log")
    _plain(axes.xaxis)


# (whether a workload has it, how it is drawn), in reading order
PANELS: list[tuple[Callable[[Workload], bool], Callable[["Axes", _Shown], None]]] = [
    (lambda w: w.arrivals.rate is not None, _arrivals),
    (lambda w: w.arrivals.cv is not None, _gaps),
    (lambda w: bool(w.tokens_in or w.tokens_out), _lengths),
    (lambda w: w.spearman is not None, _both),
    (lambda w: w.sharing is not None, _hits),
    (lambda w: w.sessions is not None, _turns),
]
