"""Are recovery times found as they were scripted? Each kind of fault, done to an engine whose recovery is known.

    python -m bench.recovery [--only net:stall,engine:oom] [--out reports/recovery]

Each kind has an engine (`sim:fast`, or steps of 20 ms) and a client of its own: 40 requests a second, evenly, the fault
after 5 s. What the client says of it is held against what was scripted: the times of the fault itself, or the number of
requests and steps that it strikes. Exit code: 0 all are within 5% or 100 ms, 1 one is not, 3 one is not and this client
was its limit by its own account, or others were at work on the machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench.process import machine
from llm_bench import recovery_words, results
from llm_bench.recovery import Recovery
from llm_bench.results import Asked
from reference_engine.cost_model import Costs
from reference_engine.faults import read, struck

RATE, DURATION_S, FAULT_S = 40, 11, 5  # few enough that what waited is answered at once
WITHIN, LEAST_S = 0.05, 0.1  # of the known time, or so much: whichever is more
IDLE_LOAD = 0.25  # load average a core, before: above, others' work is in the figures
LONG_STEP_S = 0.02  # where steps are what is counted: beside it what the engine adds to each is little


class Kind(NamedTuple):
    """A fault with a known end. `{pid}` and `{root}` in its text are the engine's."""

    faults: tuple[str, ...]  # the first is judged; each is WHEN after it, and WHAT
    known_s: float
    why: str
    tokens: int = 8  # of each answer
    flags: tuple[str, ...] = ()
    model: str = "sim:fast"


def _of_requests(body: dict[str, Any]) -> float:
    """Seconds from the first request to the last that a fault of so many requests strikes, and the gap after it."""
    fault, number = read(body), 0
    while fault.active:
        struck([fault], fault.of)
        number += 1
    return number / RATE


def _engine(
    order: str, known_s: float | None = None, why: str = "the last request that it strikes", **kind: Any
) -> Kind:
    name, *fields = order.split(",")
    body: dict[str, Any] = {"kind": name}
    for key, value in (field.split("=") for field in fields):
        body[key] = json.loads(value) if value[0].isdigit() else value
    return Kind((f"0s:engine:{order}",), _of_requests(body) if known_s is None else known_s, why, **kind)


def _net(order: str, known_s: float = 1.5, **kind: Any) -> Kind:
    return Kind((f"0s:net:{order}",), known_s, "the fault's own time", **kind)


ANEW = ("--connect-per-request",)  # a drop is of new connections; a reset of a used one is tried again
STOPPED = "stopped for so long"
LONG = "sim:steps.json"  # of LONG_STEP_S each
KINDS: dict[str, Kind] = {
    "http": Kind(('0s:POST {root}/fault {{"kind": "stall", "seconds": 1.5}}',), 1.5, "a stall of 1.5 s, by POST"),
    "cmd": Kind(("0s:cmd:sh -c 'kill -STOP {pid}; sleep 1.5; kill -CONT {pid}'",), 1.5, STOPPED),
    "sh": Kind(("0s:sh:kill -STOP {pid}; sleep 1.5; kill -CONT {pid}",), 1.5, STOPPED),
    "signal": Kind(("0s:signal:STOP:{pid}", "1.5s:signal:CONT:{pid}"), 1.5, STOPPED),
    "net:delay": _net("delay=100ms,for=1.5s"),
    "net:bandwidth": _net("bandwidth=16kbit,for=1.5s"),
    "net:stall": _net("stall,for=1.5s"),
    "net:drop": _net("drop,for=1.5s", flags=ANEW),
    "net:blackhole": _net("drop=blackhole,for=1.5s", flags=ANEW),
    "net:reset": _net("reset", 0.0, tokens=100),
    "net:resets": _net("reset,for=1.5s"),
    "engine:stall": _engine("stall,seconds=1.5", 1.5, "the fault's own time"),
    "engine:slow_step": _engine("slow_step,steps=15,factor=5", 15 * 5 * LONG_STEP_S, "15 steps of 100 ms", model=LONG),
    "engine:crash": _engine("crash", 0.1, "restarted after 0.1 s"),
    "engine:oom": _engine("oom,steps=60,calls=1000", 60 / RATE, "60 steps, each the first of a request"),
    "engine:memory_pressure": _engine(
        "memory_pressure,steps=75,share=1", 75 * LONG_STEP_S, "75 steps of 20 ms, one answer at a time", model=LONG
    ),
    "engine:500": _engine("http_error,status=500,requests=60"),
    "engine:429": _engine("http_error,status=429,requests=60"),
    "engine:503": _engine("http_error,status=503,requests=30,share=0.5,seed=1"),
    "engine:reset": _engine("http_error,status=reset,requests=30,share=0.5,seed=2", flags=ANEW),
    "engine:delay_headers": _engine("delay_headers,seconds=0.5,requests=60"),
    "engine:cut_stream": _engine("cut_stream,requests=30,share=0.5,seed=3"),
    "engine:error_event": _engine("error_event,requests=60"),
}


class Found(NamedTuple):
    name: str
    known_s: float
    found_s: float | None
    verdict: str
    why: str
    limited: bool  # this client was the limit, by its own doubts

    @property
    def within(self) -> bool:
        return self.found_s is not None and abs(self.found_s - self.known_s) <= max(WITHIN * self.known_s, LEAST_S)


@contextmanager
def engine(model: str, folder: Path) -> Iterator[tuple[str, int]]:
    """(URL, process id) of one that obeys faults, and has a seat for everybody."""
    costs = Costs(overhead_s=LONG_STEP_S, weights_s=0, token_s=0, context_s=0, pair_s=0)
    (folder / "steps.json").write_text(json.dumps(costs._asdict()))
    model = model.replace("steps.json", str(folder / "steps.json"))
    command = [sys.executable, "-m", "reference_engine", "--model", model, "--port", "0", "--max-num-seqs", "256"]
    command += ["--allow-faults", "--exit-with-stdin"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as child:  # fmt: skip
        assert child.stdin and child.stdout
        try:
            yield str(json.loads(child.stdout.readline())["listening"]), child.pid
        finally:
            child.stdin.close()


def one(name: str, folder: Path) -> Found:
    """One kind. Raises RuntimeError where the client did not measure."""
    kind, trace, out = KINDS[name], folder / "trace.jsonl", folder / "run"
    row = json.dumps({"input_length": 16, "output_length": kind.tokens})
    head = json.dumps({"llm_bench_trace": 1, "unit": "s"})
    trace.write_text("\n".join([head, *[row] * (RATE * DURATION_S + 60)]) + "\n")
    with engine(kind.model, folder) as (url, pid):
        command = [sys.executable, "-m", "llm_bench.cli", "run", "--targets", f"t={url}", "--trace", str(trace)]
        command += ["--rate", str(RATE), "--constant", "--duration", str(DURATION_S), "--out", str(out)]
        command += ["--fail-on-error-rate", "1", *kind.flags]
        for text in kind.faults:
            after, _, what = text.format(pid=pid, root=url.removesuffix("/v1")).partition(":")
            command += ["--fault", f"{FAULT_S + float(after.removesuffix('s')):g}s:{what}"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"exit {ran.returncode} of {' '.join(command)}: {ran.stdout}{ran.stderr}")
    (sheet,) = results.sheets(results.load_run(out), Asked(("ttft_p95",)))
    return found_of(name, recovery_words.recoveries(sheet)[0], limited=bool(sheet.client_limited))


def found_of(name: str, said: Recovery, *, limited: bool) -> Found:
    return Found(name, round(KINDS[name].known_s, 4), said.after_s, said.verdict, said.why, limited)


def table(rows: Sequence[Found]) -> str:
    """As Markdown."""
    lines = ["| kind | known s | found s | difference s | within 5% or 100 ms | verdict |", "|---|--:|--:|--:|---|---|"]
    for row in rows:
        found = "–" if row.found_s is None else f"{row.found_s:.3f}"
        apart = "–" if row.found_s is None else f"{row.found_s - row.known_s:+.3f}"
        verdict = row.verdict + (f": {row.why}" if row.why else "")
        lines.append(
            f"| {row.name} | {row.known_s:.3f} | {found} | {apart} | {'yes' if row.within else 'NO'} | {verdict} |"
        )
    return "\n".join(lines) + "\n"


def page(rows: Sequence[Found], facts: dict[str, Any]) -> str:
    of = "\n".join(
        f"- {name}: {KINDS[name].why}: `{'`, `'.join(KINDS[name].faults)}`" for name in (r.name for r in rows)
    )
    return (
        "# Recovery times against what was scripted\n\nWritten by `python -m bench.recovery`; do not edit. "
        f"{RATE} requests/s, evenly, at `sim:fast`, or at steps of 20 ms where steps are counted; the fault after "
        f"{FAULT_S} s.\n\n{table(rows)}\n"
        f"Known by:\n\n{of}\n\nMachine: {facts['cpu']}, {facts['cores']} cores, "
        f"load {facts['load_before']:.2f} before, Python {facts['python']}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.recovery", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", help=f"kinds, by commas: {', '.join(KINDS)}")
    parser.add_argument("--out", type=Path, help="folder for README.md and results.json")
    given = parser.parse_args()
    names = given.only.split(",") if given.only else list(KINDS)
    if unknown := [name for name in names if name not in KINDS]:
        parser.error(f"--only {unknown[0]!r}: expected of {', '.join(KINDS)}")
    facts, rows = machine(), []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
            rows.append(one(name, Path(folder)))
        print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(rows), end="")
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "README.md").write_text(page(rows, facts))
        found = [row._asdict() | {"within": row.within} for row in rows]
        (given.out / "results.json").write_text(json.dumps({"machine": facts, "kinds": found}, indent=1) + "\n")
    bad = [row for row in rows if not row.within]
    busy = facts["load_before"] > IDLE_LOAD * (os.cpu_count() or 1) or all(row.limited for row in bad)
    sys.exit(0 if not bad else 3 if busy else 1)


if __name__ == "__main__":
    main()
