"""The same server and the same work for us and for each rival, in one table: what a client costs, and what it adds.

    python -m bench.client [--rivals installed|none|aiperf,guidellm] [--streams 64,256] [--requests N] [--repeats 3]

The server's times are known (`llm_bench.null_target --truth`): a client's percentiles are held against them. Cost is
marginal: two sizes, their difference, so that start-up is not in it. bench/README.md says what each column means.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench import process, rivals, table, tokenizer
from bench.ours import ROWS, points
from bench.rivals import RIVALS
from bench.row import Claim, Rival, Work
from llm_bench import __version__

PROMPT_TOKENS = 32
SERVER_CORE, CLIENT_CORE = 0, 1
REPOSITORY = Path(__file__).resolve().parents[1]


class Load(NamedTuple):
    """One workload; two sizes of it are run, and their difference is what an event costs."""

    name: str
    ttft_ms: float
    itl_ms: float
    concurrency: int
    tokens: int
    sizes: tuple[int, int]  # requests


class Truth(NamedTuple):
    """What the server says. `answers` is all, probes and warm-ups included; the rest is of the last N by time."""

    answers: int
    events: int  # of all answers: processor time was spent on all
    first_ns: int  # when the first of the last N requests was read
    events_per_s: float | None  # of those N, from there to the last event's write
    ttft_ms: tuple[float | None, float | None]
    gap_ms: tuple[float | None, float | None]
    mean_gap_ms: tuple[float | None, float | None]
    late_ms: float  # p99 of the server's own lateness against its schedule
    by_id: dict[str, tuple[int, list[int]]]  # when read, when each event was written


def read_truth(lines: Iterable[str], load: Load, requests: int) -> Truth:
    """A tool's own probes and warm-ups come first, so the measured requests are the last N that were read."""
    answers = sorted((json.loads(line) for line in lines), key=lambda a: a["read_ns"])
    if not answers:
        raise ValueError("the server saw no request")
    measured = answers[-requests:]
    writes = [np.array(a["write_ns"]) for a in measured]
    reads = np.array([a["read_ns"] for a in measured])
    firsts = np.array([w[0] for w in writes])
    gaps = np.concatenate([np.diff(w) for w in writes])
    means = [(w[-1] - w[0]) / (len(w) - 1) for w in writes if len(w) > 1]
    due = [r + (load.ttft_ms + load.itl_ms * np.arange(len(w))) * 1e6 for r, w in zip(reads, writes, strict=True)]
    late = np.concatenate(writes) - np.concatenate(due)
    span_s = float(max(w[-1] for w in writes) - reads[0]) / 1e9
    return Truth(
        answers=len(answers),
        events=sum(len(a["write_ns"]) for a in answers),
        first_ns=int(reads[0]),
        events_per_s=sum(map(len, writes)) / span_s if span_s else None,
        ttft_ms=points(firsts - reads),
        gap_ms=points(gaps),
        mean_gap_ms=points(means),
        late_ms=float(np.percentile(late, 99)) / 1e6,
        by_id={a["request_id"]: (a["read_ns"], a["write_ns"]) for a in measured},
    )


def once(name: str, row: Rival, load: Load, requests: int, home: Path, words: Path, limit_s: float) -> dict[str, Any]:
    """One run of one client, as facts for results.json. A client that fails is a result too: `note` says how."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        out = Path(folder)
        with process.server(SERVER_CORE, out / "truth.jsonl", load.ttft_ms, load.itl_ms) as server:
            work = Work(server.url, load.concurrency, requests, load.tokens, PROMPT_TOKENS, words, out)
            command = row.command(home / name, work)
            env = rivals.environment(row)
            if name in ROWS:
                env["PYTHONPATH"] = str(REPOSITORY)
            ran = process.run(command, CLIENT_CORE, limit_s, out / "printed", env, out)
        places = {folder: "OUT", str(home): "HOME", sys.executable: "python", f"{REPOSITORY}/": ""}
        places[work.base] = "URL"
        shown = [_anywhere(word, places) for word in command]
        facts: dict[str, Any] = {"client": name, "load": load.name, "requests": requests, "command": shown}
        facts |= {"cpu_s": ran.cpu_s, "wall_s": ran.wall_s, "peak_rss_bytes": ran.peak_rss_bytes}
        facts |= {"processes": ran.processes, "exit_code": ran.exit_code, "note": ""}
        printed = (out / "printed").read_text(errors="replace")
        try:
            truth = read_truth((out / "truth.jsonl").read_text().splitlines(), load, requests)
            facts |= beside(truth, Claim(None), load) | {"start_s": (truth.first_ns - ran.begun_ns) / 1e9}
            facts |= beside(truth, row.read(out, printed), load)
        except (OSError, ValueError, LookupError) as e:
            last = printed.strip().splitlines()[-1:] or ["nothing printed"]
            facts["note"] = f"no result: {type(e).__name__}: {e}; its last line: {_anywhere(last[0][:200], places)}"
        if ran.timed_out:
            facts["note"] = f"stopped after {limit_s:g} s. {facts['note']}".strip()
        return facts


def _anywhere(word: str, places: dict[str, str]) -> str:
    """A word of a command line without what differs from machine to machine."""
    for place, name in places.items():
        word = word.replace(place, name)
    return word


def beside(truth: Truth, claim: Claim, load: Load) -> dict[str, Any]:
    """A client's percentiles minus the server's, ms; None where either has none."""
    gaps = truth.gap_ms if claim.gap_of == "events" else truth.mean_gap_ms
    facts: dict[str, Any] = {
        "claimed": claim.ok, "served": truth.answers, "events": truth.events, "server_late_p99_ms": truth.late_ms,
        "events_per_s": truth.events_per_s, "gap_of": claim.gap_of,
    }  # fmt: skip
    for kind, said, true in (("ttft", claim.ttft_ms, truth.ttft_ms), ("gap", claim.gap_ms, gaps)):
        for q, a, b in zip(("p50", "p99"), said, true, strict=True):
            facts[f"{kind}_error_{q}_ms"] = None if a is None or b is None else a - b
    if claim.stamps:
        both = [(claim.stamps[i], true) for i, true in truth.by_id.items() if i in claim.stamps]
        on_the_way = np.array([read - sent for (sent, _), (read, _) in both])
        back = np.concatenate([came - written for (_, came), (_, written) in both])
        for name, ns in (("read_after_sent", on_the_way), ("stamp_after_write", back)):
            facts[f"{name}_p50_ms"], facts[f"{name}_p99_ms"] = points(ns)
    return facts


_FROM_LARGE = (
    "start_s", "ttft_error_p50_ms", "ttft_error_p99_ms", "gap_error_p50_ms", "gap_error_p99_ms", "events_per_s",
    "server_late_p99_ms", "read_after_sent_p50_ms", "read_after_sent_p99_ms", "stamp_after_write_p50_ms",
    "stamp_after_write_p99_ms",
)  # fmt: skip


def summary(small: list[dict[str, Any]], large: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one client at one load: median, least and greatest of its repeats; pair k is small[k] with large[k]."""
    found: dict[str, Any] = {}

    def put(name: str, values: list[float | None]) -> None:
        known = [v for v in values if v is not None]
        found[name] = [statistics.median(known), min(known), max(known)] if known else None

    for key, name, unit in (("cpu_s", "cpu_s_per_1k", 1.0), ("peak_rss_bytes", "kib_per_1k", 1 / 1024)):
        put(name, [_marginal(a, b, key, unit) for a, b in zip(small, large, strict=True)])
    put("peak_mib", [run["peak_rss_bytes"] / 2**20 for run in large])
    for key in _FROM_LARGE:
        put(key, [run.get(key) for run in large])
    found["claimed"] = [run.get("claimed") for run in small + large]
    found["served"] = [run.get("served") for run in small + large]
    found["asked"] = [run["requests"] for run in small + large]
    found["exit_codes"] = sorted({run["exit_code"] for run in small + large})
    found["gap_of"] = large[0].get("gap_of", "events")
    found["notes"] = sorted({run["note"] for run in small + large if run["note"]})
    return found


def _marginal(small: dict[str, Any], large: dict[str, Any], key: str, unit: float) -> float | None:
    events = large.get("events", 0) - small.get("events", 0)
    return (large[key] - small[key]) * unit / events * 1000 if events > 0 else None


def loads(streams: Iterable[int], requests: int | None) -> list[Load]:
    """Paced: 50 ms, then 50 tokens/s, an event a read. Max-rate: whole answers at once."""
    found = []
    for n in streams:
        large = requests or max(4 * n, 512)
        found.append(Load(f"paced, {n} streams", 50.0, 20.0, n, 64, (max(n, large // 4), max(2 * n, large))))
    large = requests or 8000  # a second of ours: less drowns in the noise of two starts
    return [*found, Load("max-rate, 32 streams", 0.0, 0.0, 32, 100, (max(64, large // 4), max(128, large)))]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.client", description=__doc__.partition("\n")[0])
    parser.add_argument("--rivals", default="installed", help="installed, none, or names of bench.rivals")
    parser.add_argument("--streams", default="64,256", help="of the paced load")
    parser.add_argument("--requests", type=int, help="of the larger size")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--home", type=Path, default=rivals.HOME, help="where the rivals are installed")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of one run")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "reports/client")
    asked = parser.parse_args()
    if {SERVER_CORE, CLIENT_CORE} - os.sched_getaffinity(0):
        parser.error("two cores are needed: one for the server, one for the client")
    names = {"installed": [*RIVALS], "none": []}.get(asked.rivals, asked.rivals.split(","))
    if unknown := set(names) - RIVALS.keys():
        parser.error(f"--rivals {sorted(unknown)}: known are {', '.join(RIVALS)}")
    versions = {name: rivals.version(name, asked.home) for name in names}
    missing = {name for name in names if not versions[name]}
    rows = ROWS | {name: RIVALS[name] for name in names if name not in missing}
    words = tokenizer.write(asked.home / "tokenizer")
    process.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended too
    facts: dict[str, Any] = {"machine": process.machine(), "versions": versions | dict.fromkeys(ROWS, __version__)}
    told = {"rivals": asked.rivals, "streams": asked.streams, "repeats": asked.repeats} | (
        {"requests": asked.requests} if asked.requests else {}
    )
    facts |= {"command": [f"--{name} {value}" for name, value in told.items()], "runs": [], "summaries": {}}
    asked.out.mkdir(parents=True, exist_ok=True)
    for load in loads(map(int, asked.streams.split(",")), asked.requests):
        runs: dict[str, tuple[list[Any], list[Any]]] = {name: ([], []) for name in rows}
        for repeat in range(asked.repeats):  # interleaved: a machine that slows down slows everybody
            for name, row in rows.items():
                for size in (0, 1):
                    done = once(name, row, load, load.sizes[size], asked.home, words, asked.limit)
                    runs[name][size].append(done)
                    facts["runs"].append(done | {"repeat": repeat})
                    cost = f"{done['cpu_s']:.2f} CPU-s of {done['wall_s']:.1f} s, exit {done['exit_code']}"
                    print(f"{load.name}: {name}, {done['requests']}: {cost} {done['note']}", file=sys.stderr)
        facts["summaries"][load.name] = {name: summary(*pair) for name, pair in runs.items()}
        facts["missing"] = sorted(missing)
        facts["machine"]["load_after"] = os.getloadavg()[0]
        (asked.out / "results.json").write_text(json.dumps(facts, indent=1) + "\n")
        (asked.out / "README.md").write_text(table.render(facts))  # after each load: a later failure loses nothing
    print(table.render(facts))
    return 0 if all(not s["notes"] for n, s in facts["summaries"][load.name].items() if n in ROWS) else 1


if __name__ == "__main__":
    sys.exit(main())
