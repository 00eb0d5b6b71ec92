"""Do the statistics keep their promises? Each is tried on simulated queues and histories whose truth is known.

    python -m bench.statistics [--full] [--out reports/statistics]

Writes README.md and results.json. Every figure is a function of the seeds: the same on each machine, load or no load.
Without --full a tenth of the runs, in well under a minute, to see that it works.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench import queue_sim
from bench.queue_sim import SERVERS, Stays, rng
from llm_bench import changes, pairs, stats, steady

Row = dict[str, float | int | str]
LOADS = (0.5, 0.8, 0.9)
QS = (0.5, 0.95, 0.99)
PAIRS = 10
GATE_LOAD = 0.8
GATE_REQUESTS = 2000
GATE_WARMUP = 1000
INTERVALS, TRUTH, GATE, REACH, GROWTH, DRIFT, START, HISTORY = range(8)  # the first number of every seed


class Sizes(NamedTuple):
    """How many simulated runs stand behind a figure."""

    runs: int  # of a cell of intervals, growth, drift, start
    comparisons: int  # of two arms
    histories: int
    truth: int  # requests of the run that is the truth


FULL = Sizes(runs=400, comparisons=600, histories=1000, truth=10_000_000)
QUICK = Sizes(runs=40, comparisons=40, histories=60, truth=500_000)


def intervals(size: Sizes, loads: tuple[float, ...] = LOADS, lengths: tuple[int, ...] = (1000, 20_000)) -> list[Row]:
    """How often `stats.interval` prints, and how often what it prints misses the long run's percentile."""
    rows: list[Row] = []
    for load in loads:
        percent = round(100 * load)
        truth = np.quantile(queue_sim.open_loop(rng(TRUTH, percent), size.truth, load).ttft_s, QS)
        for n in lengths:
            printed, wrong, iid_wrong, samples = np.zeros(3), np.zeros(3), np.zeros(3), np.zeros((3, size.runs))
            for run in range(size.runs):
                x = queue_sim.open_loop(rng(INTERVALS, percent, n, run), n, load).ttft_s
                for i, q in enumerate(QS):
                    samples[i, run] = stats.ess(x, q)
                    got = stats.interval(x, q, samples=samples[i, run])
                    if isinstance(got, stats.Interval):
                        printed[i] += 1
                        wrong[i] += not got.low <= truth[i] <= got.high
                    half = 1.96 * math.sqrt(q * (1 - q) / n)
                    low, high = np.quantile(x, (q - half, min(1.0, q + half)))
                    iid_wrong[i] += not low <= truth[i] <= high
            rows += [
                {
                    "load": load, "requests": n, "percentile": stats.percent_name(q), "runs": size.runs,
                    "median ESS": round(float(np.median(samples[i]))), "printed": printed[i] / size.runs,
                    "printed and wrong": wrong[i] / size.runs,
                    "right of printed": 1 - wrong[i] / printed[i] if printed[i] else "–",
                    "wrong if i.i.d.": iid_wrong[i] / size.runs,
                }
                for i, q in enumerate(QS)
            ]  # fmt: skip
    return rows


METRICS: dict[str, Callable[[Stays], float]] = {
    "ttft_p95": lambda s: stats.percentile(s.ttft_s, 0.95),
    "ttft_p50": lambda s: stats.percentile(s.ttft_s, 0.5),
    "tpot_p50": lambda s: stats.percentile(s.end_s - s.begin_s, 0.5),  # what is proportional to service alone
}


def differences(seed: tuple[int, ...], slowdown: float, noise: float, n_pairs: int = PAIRS) -> dict[str, np.ndarray]:
    """Log ratios (n_pairs,) of each metric: one trace a pair for both arms, every run slower or faster by `noise`."""
    out: dict[str, list[float]] = {name: [] for name in METRICS}
    for pair in range(n_pairs):
        random = rng(*seed, pair)
        due, service = queue_sim.trace(random, GATE_WARMUP + GATE_REQUESTS, GATE_LOAD)
        factors = np.exp(noise * random.standard_normal(2)) * (1, 1 + slowdown)
        base, cand = (queue_sim.fcfs(due, service * f).after(GATE_WARMUP) for f in factors)
        for name, metric in METRICS.items():
            out[name].append(math.log(metric(cand) / metric(base)))
    return {name: np.array(d) for name, d in out.items()}


def gate(
    size: Sizes, slowdowns: tuple[float, ...] = (0.0, 0.02, 0.05), noises: tuple[float, ...] = (0.01, 0.02)
) -> list[Row]:
    """What PAIRS pairs say of a candidate whose service is slower, at no margin and at 2%."""
    rows: list[Row] = []
    for noise in noises:
        for slowdown in slowdowns:
            percent = round(1000 * noise), round(1000 * slowdown)
            found = [differences((GATE, *percent, k), slowdown, noise) for k in range(size.comparisons)]
            for name in METRICS:
                d = [f[name] for f in found]
                row: Row = {
                    "run noise": noise, "service slower by": slowdown, "metric": name, "comparisons": len(d),
                    "metric changes by": math.expm1(float(np.mean(d))), "spread of a pair": float(np.std(d)),
                }  # fmt: skip
                for margin in (0.0, 0.02):
                    said = [pairs.compare(x, math.log1p(margin)).verdict for x in d]
                    for verdict in (pairs.FAIL, pairs.PASS):
                        row[f"{verdict} at {margin:.0%}"] = said.count(verdict) / len(d)
                rows.append(row)
    return rows


def reach(size: Sizes) -> list[Row]:
    """Does a change as large as `pairs.detectable` prints fail the gate as often as it says?"""
    rows: list[Row] = []
    for n in (5, 6, 8, 10, 16, 24):
        for shape in ("normal", "t, 5 degrees"):
            random = rng(REACH, n, len(shape))
            count, sd = size.comparisons * (4 if n <= 10 else 1), 0.01
            noise = (
                random.standard_normal((count, n)) if shape == "normal" else random.standard_t(5, (count, n)) * 0.6**0.5
            )
            change = pairs.detectable(np.array([-sd, sd] * 2) * math.sqrt(3) / 2, 0.0, n_pairs=n)
            assert change is not None
            p = [pairs.sign_flip(change + sd * x) for x in noise]
            equal = [pairs.sign_flip(sd * x) for x in noise]
            rows.append({
                "pairs": n, "noise": shape, "comparisons": count, "detectable, in spreads of a pair": change / sd,
                "power there": float(np.mean(np.array(p) <= pairs.ALPHA)),
                "false alarms": float(np.mean(np.array(equal) <= pairs.ALPHA)),
            })  # fmt: skip
    return rows


def growth(size: Sizes) -> list[Row]:
    """How often an open loop is said to grow without bound: never below capacity, above it as soon as can be."""
    rows: list[Row] = []
    for load in (*LOADS, 0.95, 1.0, 1.05, 1.1, 1.25, 2.0):
        for n in (300, 1000, 5000):
            for begins in ("steady", "empty") if load < 1 else ("empty",):
                skip = queue_sim.WARMUP if begins == "steady" else 0
                said: list[steady.Growth] = []
                detrended = 0
                for run in range(size.runs // 2):
                    random = rng(GROWTH, round(100 * load), n, run)
                    at_s, level, due_s = window(queue_sim.fcfs(*queue_sim.trace(random, skip + n, load)), skip)
                    said.append(steady.growth(at_s, level, level, due_s))
                    left = level - np.polyval(np.polyfit(at_s, level, 1), at_s)
                    trend = said[-1].in_system
                    detrended += (
                        trend.z * math.sqrt(stats.ess_of(left, float(np.var(left, ddof=1))) / trend.ess) > 1.645
                    )
                rows.append({
                    "load": load, "requests": n, "begins": begins, "runs": len(said),
                    "Mann-Kendall, ESS of residuals": detrended / len(said),
                    "Mann-Kendall, ESS of values": float(np.mean([g.in_system.p <= steady.ALPHA for g in said])),
                    "growing": float(np.mean([g.growing for g in said])),
                    "growth / arrivals, median": float(np.median([g.per_second for g in said])) / (load * SERVERS),
                    "in truth": max(0.0, 1 - 1 / load),
                })  # fmt: skip
    return rows


def window(stays: Stays, skip: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(moments, in system, due) of the window after `skip` requests or, where 0, after 5% of a run that began empty."""
    end_s = float(stays.due_s[-1])
    start_s = float(stays.due_s[skip]) if skip else 0.05 * end_s
    at_s = np.linspace(start_s, end_s, steady.SAMPLES)
    return at_s, queue_sim.levels(stays, at_s), stays.due_s[(stays.due_s >= start_s) & (stays.due_s <= end_s)]


def drift(size: Sizes) -> list[Row]:
    """How often a closed loop is said to drift, with a server that keeps its pace or loses a share of it."""
    rows: list[Row] = []
    for slots in (8, 32, 64):
        for rounds in (10, 50, 200):
            for slowdown in (0.0, 0.1, 0.3):
                n, said = slots * rounds, []
                for run in range(size.runs // 2):
                    every = queue_sim.closed_loop(
                        rng(DRIFT, slots, rounds, run), n + 2 * slots, slots, slowdown=slowdown
                    )
                    window = every.after(2 * slots)
                    start_s, end_s = float(window.due_s[0]), float(window.due_s[-1])
                    ended = every.end_s[(every.end_s >= start_s) & (every.end_s < end_s)]
                    got = steady.drift(window.e2e_s, ended, start_s, end_s)
                    said.append(got is not None and got.drifting)
                rows.append({
                    "slots": slots, "requests a slot": rounds, "server slower by": slowdown, "runs": len(said),
                    "drifting": float(np.mean(said)),
                })  # fmt: skip
    return rows


def start(size: Sizes) -> list[Row]:
    """Where MSER-5 cuts runs that are steady from their first request, that began empty, or slow."""
    rows: list[Row] = []
    series: dict[str, Callable[[Stays], np.ndarray]] = {"ttft": lambda s: s.ttft_s, "e2e": lambda s: s.e2e_s}
    for load in (*LOADS, 0.95):
        for n in (1000, 5000, 20_000):
            for begins in ("steady", "empty", "15% twice as slow"):
                warmup = 0 if begins == "empty" else queue_sim.WARMUP
                runs = [
                    queue_sim.open_loop(rng(START, round(100 * load), n, run), n, load, warmup=warmup)
                    for run in range(size.runs // 4)
                ]
                for name, of in series.items():
                    slow = np.where(np.arange(n) < 0.15 * n, 1 + (begins not in ("steady", "empty")), 1)
                    got = [steady.mser5(of(stays) * slow, n // 20) for stays in runs]
                    rows.append({
                        "load": load, "requests": n, "begins": begins, "series": name, "runs": len(runs),
                        "cut past 5%": float(np.mean([g.cut > n // 20 for g in got])),
                        "late": float(np.mean([g.late for g in got])),
                        "too short": float(np.mean([g.too_short for g in got])),
                    })  # fmt: skip
    return rows


def history(size: Sizes) -> list[Row]:
    """Change points of white noise, and of steps of some standard deviations."""
    rows: list[Row] = []
    for n in (20, 50, 100):
        for step in (0.0, 1.0, 2.0, 3.0):
            found, exact, more = 0, 0, 0
            for k in range(size.histories if not step else size.histories // 4):
                series = rng(HISTORY, n, int(step), k).standard_normal(n)
                series[n // 2 :] += step
                at = [c.at for c in changes.e_divisive(series, k, permutations=199)]
                found += bool(at)
                exact += any(abs(i - n // 2) <= 2 for i in at)
                more += len(at) > 1
            count = size.histories if not step else size.histories // 4
            rows.append({
                "values": n, "step, in standard deviations": step, "histories": count, "any change": found / count,
                "within 2 of the step": exact / count if step else "–", "more than one": more / count,
            })  # fmt: skip
    return rows


class Section(NamedTuple):
    title: str
    run: Callable[[Sizes], list[Row]]
    says: Callable[[list[Row]], list[str]]


def _worst(rows: list[Row], name: str) -> float:
    return max(float(row[name]) for row in rows)


def _chance(claim: float, count: float) -> float:
    """How far above the true share a share of `count` simulated runs may lie: 99.5%, for the worst of some is shown."""
    return 2.58 * math.sqrt(claim * (1 - claim) / count)


def _held(claim: bool) -> str:
    return "Held" if claim else "**Not held**"


def _of_intervals(rows: list[Row]) -> list[str]:
    worst, right = _worst(rows, "printed and wrong"), [r["right of printed"] for r in rows]
    few = min(float(share) for share in right if share != "–")
    return [
        "Claim: over all runs a printed interval misses the truth in at most 10%. "
        f"{_held(worst <= 0.1)}: at most {worst:.1%}.",
        f"Of the printed ones alone as little as {few:.0%} of a row is right. Where few print they are a selection: "
        "those that by chance show little dependence. The claim is about all runs; the others refuse.",
        "`wrong if i.i.d.`: the usual interval, q ± 1.96 sqrt(q(1-q)/n), of the same runs.",
    ]


def _of_gate(rows: list[Row]) -> list[str]:
    equal = [r for r in rows if not r["service slower by"]]
    none, two = _worst(equal, "FAIL at 0%"), _worst(equal, "FAIL at 2%")
    chance = _chance(0.05, float(equal[0]["comparisons"]))

    def failed(noise: float, slower: float) -> dict[str, float]:
        found = [r for r in rows if (r["run noise"], r["service slower by"]) == (noise, slower)]
        return {str(r["metric"]): float(r["FAIL at 2%"]) for r in found}

    def said(power: dict[str, float]) -> str:
        return ", ".join(f"{name} {share:.3f}" for name, share in power.items())

    return [
        f"Load {GATE_LOAD}, {PAIRS} pairs, {GATE_REQUESTS:,} requests a run. Both arms of a pair have the same "
        "arrivals and services; each run as a whole is faster or slower by the run noise (lognormal).",
        f"Claim: equal arms fail in at most 5%. {_held(two <= 0.05 and none <= 0.05 + chance)}: at a 2% margin at most "
        f"{two:.1%}; with none at most {none:.1%}, where the exact level is 51/1024 = 5.0% and chance ± {chance:.1%}.",
        "Claim: power at least 0.9 for a 5% slowdown at a 2% margin and 1% run noise. "
        f"{_held(min(failed(0.01, 0.05).values()) >= 0.9)}: {said(failed(0.01, 0.05))}. "
        f"With 2% noise: {said(failed(0.02, 0.05))}.",
        "Slower service changes a latency that holds waiting by more than its own share (`metric changes by`). Where "
        f"the change is the margin itself, 2% of tpot_p50, {failed(0.01, 0.02)['tpot_p50']:.1%} fail.",
    ]


def _of_reach(rows: list[Row]) -> list[str]:
    normal = [float(r["power there"]) for r in rows if r["noise"] == "normal"]
    other = [float(r["power there"]) for r in rows if r["noise"] != "normal"]
    return [
        "`detectable` is the change that fails with chance 0.9 where the spread of a pair is known: in truth "
        f"{min(normal):.2f} to {max(normal):.2f} with normal noise, {min(other):.2f} to {max(other):.2f} with heavier "
        "tails. A spread estimated from few pairs is uncertain by itself.",
    ]


def _of_growth(rows: list[Row]) -> list[str]:
    stable = [r for r in rows if float(r["load"]) <= 0.9]
    long = [r for r in stable if r["requests"] == 5000]
    worst, alone = _worst(stable, "growing"), "Mann-Kendall, ESS of values"
    return [
        f"Claim: at load 0.5 to 0.9 at most 5% are called growing. {_held(worst <= 0.05)}: at most {worst:.1%}.",
        f"A trend alone is not enough: at its nominal 5% it calls up to {_worst(stable, alone):.0%} of them growing, "
        "in windows of 300 requests, which a busy queue spends in one swing or two, or in filling; with 5,000 up to "
        f"{_worst(long, alone):.1%}. So what is gained has to exceed chance as well, and to go on.",
        "At load 1.05 and 1.1 `growing` is the power: so small an overload takes thousands of requests to be told from "
        "a swing. At 1.0 the backlog grows as the root of time, which a long run calls stationary.",
    ]


def _of_drift(rows: list[Row]) -> list[str]:
    even = [r for r in rows if not r["server slower by"]]
    worst, chance = _worst(even, "drifting"), _chance(0.05, float(even[0]["runs"]))
    return [
        f"Claim: a server that keeps its pace is called drifting in at most 5% (chance ± {chance:.1%}). "
        f"{_held(worst <= 0.05 + chance)}: at most {worst:.1%}.",
        "`server slower by`: service takes longer by that share at the end than at the start, in a straight line.",
    ]


def _of_start(rows: list[Row]) -> list[str]:
    even = [r for r in rows if r["begins"] == "steady"]
    slow = [r for r in rows if r["begins"] not in ("steady", "empty") and r["series"] == "e2e"]

    def most(name: str, series: str, load: float = 0.9) -> str:
        return f"{_worst([r for r in even if r['series'] == series and float(r['load']) <= load], name):.0%}"

    return [
        "MSER-5 weighs batches as if they were independent, and waits in a busy queue are not. Of runs that are "
        f"steady from their first request, load 0.5 to 0.9, it cuts up to {most('cut past 5%', 'ttft')} past a warm-up "
        f"of 5% by their TTFT and {most('cut past 5%', 'e2e')} by their e2e: no claim of 5% can be made for it.",
        f"`late` asks too that the squared error at the warm-up is over {steady.WORTH:g} times the least: by e2e up "
        f"to {most('late', 'e2e', 0.8)} at load 0.5 and 0.8, {most('late', 'e2e')} at 0.9; by TTFT "
        f"{most('late', 'ttft')}.",
        f"Of runs whose first 15% take twice as long `late` finds {min(float(r['late']) for r in slow):.0%} to "
        f"{_worst(slow, 'late'):.0%} by e2e.",
    ]


def _of_history(rows: list[Row]) -> list[str]:
    noise = [r for r in rows if not r["step, in standard deviations"]]
    worst, chance = _worst(noise, "any change"), _chance(0.05, float(noise[0]["histories"]))
    return [
        f"Claim: white noise shows a change in at most 5% of histories (chance ± {chance:.1%}). "
        f"{_held(worst <= 0.05 + chance)}: at most {worst:.1%}. Steps are in the middle of the history.",
    ]


SECTIONS = {
    "intervals": Section("Printed intervals of percentiles (TTFT)", intervals, _of_intervals),
    "gate": Section("Two arms, pair by pair", gate, _of_gate),
    "reach": Section("The smallest change that can be found", reach, _of_reach),
    "growth": Section("Open loop: does the backlog grow?", growth, _of_growth),
    "drift": Section("Closed loop: do batches drift?", drift, _of_drift),
    "start": Section("Start of the steady state: MSER-5", start, _of_start),
    "history": Section("Change points of a history", history, _of_history),
}


def page(found: dict[str, list[Row]], command: str) -> str:
    """The results as a page."""
    lines = [
        "# Do the statistics keep their promises?",
        "",
        f"Written by `{command}`; do not edit. Queues: {SERVERS} servers, first come first served, lognormal service "
        f"with CV {queue_sim.CV:g}; TTFT is the wait and {queue_sim.TTFT_SHARE:.0%} of the service. A share of 400 "
        "runs is known to about ± 2 points at 5%, ± 5 points at 50%.",
    ]
    for name, rows in found.items():
        lines += ["", f"## {SECTIONS[name].title}", "", *[f"- {line}" for line in SECTIONS[name].says(rows)], ""]
        lines += ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
        lines += ["| " + " | ".join(_cell(v) for v in row.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: float | int | str) -> str:
    if isinstance(value, float):
        return f"{value:.4f}".rstrip("0").rstrip(".") if value else "0"
    return f"{value:,}" if isinstance(value, int) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="as many runs as the claims need: some minutes")
    parser.add_argument("--out", type=Path, help="default: reports/statistics with --full, else build/statistics")
    args = parser.parse_args()
    out = args.out or Path("reports/statistics" if args.full else "build/statistics")
    found = {}
    for name, section in SECTIONS.items():
        print(section.title, flush=True)
        found[name] = section.run(FULL if args.full else QUICK)
        for line in section.says(found[name]):
            print(f"  {line}")
    out.mkdir(parents=True, exist_ok=True)
    command = "python -m bench.statistics" + " --full" * args.full
    (out / "README.md").write_text(page(found, command))
    (out / "results.json").write_text(json.dumps({"command": command, **found}, indent=1, allow_nan=False) + "\n")
    print(out / "README.md")


if __name__ == "__main__":
    main()
