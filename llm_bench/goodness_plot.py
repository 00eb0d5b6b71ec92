"""plot(original, synthetic, path): a page of four pictures: lengths, rate profile, dispersion, prefix hits."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llm_bench.containers import new_file
from llm_bench.errors import BenchError
from llm_bench.goodness import PARTS, capacities, compare, hit_curve, profile
from llm_bench.request import Trace
from llm_bench.ticks import dejitter
from llm_bench.workload import dispersion, lengths, stamps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

SCALES_S = tuple(float(f"{10 ** (k / 4):.3g}") for k in range(-4, 11))  # 0.1 s to 316 s
COLOURS = {"original": "black", "synthetic": "tab:orange"}
SUFFIXES = (".png", ".svg")


def plot(original: Trace, synthetic: Trace, path: Path | str) -> None:
    """The page as PNG or SVG, by the path's suffix. Raises BenchError without matplotlib, or for another suffix."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise BenchError(f"--plot {path}: expected a name that ends in {' or '.join(SUFFIXES)}")
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise BenchError("--plot: pictures need matplotlib: pip install 'llm-bench[plots]'") from None
    stretched = compare(original, synthetic).stretched
    both = [dejitter(t.requests, "auto", seed=0)[0] for t in (original, synthetic)]
    times = [stamps(both[0]), stamps(both[1]) * stretched]
    figure = Figure(figsize=(11, 8.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    _lengths(axes[0, 0], lengths(both[0]), lengths(both[1]))
    _profile(axes[0, 1], times)
    _dispersion(axes[1, 0], times)
    n = min(map(len, both))
    sizes = capacities(both[0][:n])
    curves = [hit_curve(r[:n], sizes) if any(x.hash_ids for x in r[:n]) else None for r in both]
    _hits(axes[1, 1], sizes, curves)
    counts = " and ".join(f"{len(r):,}" for r in both)
    told = f"; synthetic times × {stretched:.3g}" if stretched != 1 else ""
    figure.suptitle(f"{Path(original.path).name}: original and synthetic ({counts} requests{told})")
    # neither a date nor random ids: the same figure is the same file
    with matplotlib.rc_context({"svg.hashsalt": "llm-bench"}), new_file(path, "--plot") as part:
        figure.savefig(part, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})


def _lengths(ax: "Axes", before: tuple[np.ndarray, np.ndarray], now: tuple[np.ndarray, np.ndarray]) -> None:
    """Quantile against quantile, from 0.5% to 99.5%; on the diagonal the two distributions are one."""
    steps = np.linspace(0.005, 0.995, 199)
    ends = []
    for x, y, colour, name in zip(before, now, ("tab:blue", "tab:green"), ("input", "output"), strict=True):
        if len(x) and len(y):
            at, to = np.quantile(x, steps), np.quantile(y, steps)
            ax.plot(at, to, ".", color=colour, markersize=5, label=f"{name} tokens")
            ends += [max(float(min(at[0], to[0])), 1.0), float(max(at[-1], to[-1]))]
    if ends:
        ax.plot([min(ends), max(ends)], [min(ends), max(ends)], color="grey", linewidth=0.8, zorder=0)
        ax.legend()
    ax.set(title="Lengths, quantile against quantile", xlabel="original (tokens)", ylabel="synthetic (tokens)")
    _logarithmic(ax, ax.xaxis, ax.yaxis)


def _profile(ax: "Axes", times: list[np.ndarray]) -> None:
    for at_s, (name, colour) in zip(times, COLOURS.items(), strict=True):
        if len(at_s) and at_s[-1]:
            rate = profile(at_s) * (len(at_s) / at_s[-1])
            ax.stairs(rate, np.linspace(0, 100, PARTS + 1), color=colour, label=name)
    ax.set(title="Rate over the span", xlabel="share of the span (%)", ylabel="requests/s")
    ax.set_ylim(bottom=0)
    _legend(ax, "no times")


def _dispersion(ax: "Axes", times: list[np.ndarray]) -> None:
    for at_s, (name, colour) in zip(times, COLOURS.items(), strict=True):
        points = [(w, d) for w in SCALES_S if (d := dispersion(at_s, w)) is not None]
        if points:
            ax.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colour, label=name)
    ax.axhline(1, color="grey", linewidth=0.8, zorder=0)
    ax.set(title="Index of dispersion of counts (1: Poisson)", xlabel="window (s)", ylabel="variance / mean")
    _logarithmic(ax, ax.xaxis, ax.yaxis)
    _legend(ax, "no times")


def _hits(ax: "Axes", sizes: list[int], curves: list[list[float] | None]) -> None:
    highest = 0.0
    for curve, (name, colour) in zip(curves, COLOURS.items(), strict=True):
        if curve:
            ax.plot(sizes, [100 * x for x in curve], marker="o", markersize=4, color=colour, label=name)
            highest = max(highest, 100 * curve[-1])
    ax.set(title="Prefix hits under LRU", xlabel="cache (blocks)", ylabel="blocks hit (%)")
    ax.set_ylim(0, 1.1 * highest or 1)
    _logarithmic(ax, ax.xaxis)
    _legend(ax, "prompts share no known prefix")


def _logarithmic(ax: "Axes", *axes: "Axis") -> None:
    """Log axes with plain numbers: 6, not 6 × 10^0; of a short axis 1, 2, 5 of each decade are named too."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in axes:
        (ax.set_xscale if axis is ax.xaxis else ax.set_yscale)("log")
        low, high = sorted(axis.get_view_interval())
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
        axis.set_minor_formatter(NullFormatter())


def _legend(ax: "Axes", without: str) -> None:
    if ax.get_legend_handles_labels()[0]:
        ax.legend()
    else:
        ax.text(0.5, 0.5, without, transform=ax.transAxes, ha="center", color="grey")
        ax.set_axis_off()
