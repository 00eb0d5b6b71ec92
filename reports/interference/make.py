"""The traces of this example, and its figure: `python reports/interference/make.py traces`, `… figure RUN...`.

chat: short prompts and answers, Poisson arrivals. batch: two long prompts, hardly an answer. Seeded.
"""

import json
import sys
from pathlib import Path

import numpy as np

from llm_bench.repeats import groups
from llm_bench.results import Asked, load_run, sheets

HERE = Path(__file__).parent
SECONDS, CHAT_RATE = 4, 24.0
BATCH_AT = [0.5, 2.3]


def poisson(rate: float, count: int, random: np.random.Generator) -> list[float]:
    gaps = random.exponential(1 / rate, count - 1)
    return [0.0, *np.cumsum(gaps * (count - 1) / rate / gaps.sum()).round(6).tolist()]


def write(name: str, at: list[float], inputs: np.ndarray, outputs: np.ndarray) -> None:
    head = {"llm_bench_trace": 1, "unit": "s", "about": f"{name}, reports/interference/make.py"}
    rows = [
        {"timestamp": t, "input_length": i, "output_length": o}
        for t, i, o in zip(at, inputs.tolist(), outputs.tolist(), strict=True)
    ]
    (HERE / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [head, *rows]))


def traces() -> None:
    random = np.random.Generator(np.random.PCG64(10))
    chat = round(SECONDS * CHAT_RATE)
    write("chat", poisson(CHAT_RATE, chat, random), random.integers(64, 257, chat), random.integers(24, 65, chat))
    write("batch", BATCH_AT, random.integers(18_000, 22_001, len(BATCH_AT)), np.full(len(BATCH_AT), 8))


METRICS = {"ttft_p95": "TTFT p95", "tpot_p95": "TPOT p95", "stall_p95": "longest gap p95"}


def figure(runs: list[Path]) -> None:
    """The factors of `chat`, with their intervals, a panel a metric and a row a run folder."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "interference"  # else ids differ from run to run
    from matplotlib import pyplot as plt

    fig, panels = plt.subplots(1, len(METRICS), figsize=(9, 0.5 * len(runs) + 1.3), sharey=True, sharex=True)
    for row, path in enumerate(runs):
        together = groups(sheets(load_run(path), Asked(list(METRICS))))[0]
        factors = {f.name: f for f in together.by_class["chat"].factors}
        for ax, name in zip(panels, METRICS, strict=True):
            f = factors[name]
            if f.interval is not None:
                ax.plot(f.interval, [row, row], color="#0072b2", lw=2, solid_capstyle="butt")
            ax.plot([f.value], [row], "o", color="#0072b2", ms=5)
            ax.annotate(f"{f.value:.3g}", (f.value, row), (0, 7), textcoords="offset points", ha="center", fontsize=9)
    for ax, said in zip(panels, METRICS.values(), strict=True):
        ax.set(xscale="log", xlim=(0.8, 120), ylim=(len(runs) - 0.4, -0.7), title=said)
        ax.set_xticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"])
        ax.minorticks_off()
        ax.axvline(1, color="#888", lw=1)
        ax.grid(axis="x", color="#ddd", lw=0.8)
        ax.set_axisbelow(True)
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.tick_params(left=False)
    panels[0].set_yticks(range(len(runs)), [path.name.replace("-", " ") for path in runs])
    panels[len(METRICS) // 2].set_xlabel("chat beside batch / chat alone (geometric mean of the runs, 95% interval)")
    fig.tight_layout()
    fig.savefig(HERE / "factors.svg", metadata={"Date": None})


if __name__ == "__main__":
    if sys.argv[1:2] == ["figure"]:
        figure([Path(arg) for arg in sys.argv[2:]])
    else:
        traces()
