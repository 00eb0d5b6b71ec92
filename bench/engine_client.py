"""The reference engine and llm-bench as processes of their own, each on its core: what is measured, and with what."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from llm_bench import records
from llm_bench.columns import Cell
from reference_engine.config import EngineConfig
from reference_engine.virtual import Arrival

KNOBS = ("num_blocks", "max_num_seqs", "max_num_batched_tokens", "batching", "max_wait_ms", "policy", "seed")


def pinned(command: Sequence[str], core: int | None) -> list[str]:
    """The command on one core; None: wherever the machine puts it."""
    return [*command] if core is None else ["taskset", "-c", str(core), *command]


@contextmanager
def engine(config: EngineConfig, *flags: str, core: int | None = None) -> Iterator[str]:
    """The URL of an engine; it has ended, and its log is whole, once the block is left.

    Raises RuntimeError if it ends before it listens.
    """
    command = [sys.executable, "-m", "reference_engine", "--model", config.model, "--port", "0", "--exit-with-stdin"]
    command += [f"--{name.replace('_', '-')}={getattr(config, name)}" for name in KNOBS]
    command += [f"--{'' if config.prefix_caching else 'no-'}prefix-caching", *flags]
    with subprocess.Popen(
        pinned(command, core), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as child:
        assert child.stdin and child.stdout
        try:
            line = child.stdout.readline()
            if not line:
                child.stdin.close()  # which ends it, should it still be there
                raise RuntimeError(f"exit {child.wait()} before it listened, of {' '.join(command)}")
            yield str(json.loads(line)["listening"])
        finally:
            child.stdin.close()


def drive(url: str, trace: Path, out: Path, *load: str, name: str = "engine", core: int | None = None) -> Cell:
    """The records of one `llm-bench run`. Raises RuntimeError with what it printed if it fails."""
    command = [sys.executable, "-m", "llm_bench.cli", "run", "--targets", f"{name}={url}", "--trace", str(trace)]
    command += [*load, "--out", str(out), "--api", "openai-completions"]
    ran = subprocess.run(pinned(command, core), capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"exit {ran.returncode} of {' '.join(command)}: {ran.stdout}{ran.stderr}")
    (path,) = out.glob("*.arrow")
    return records.read(path)


def write_trace(path: Path, arrivals: Sequence[Arrival]) -> None:
    """As llm-bench's own format."""
    rows = [
        {"timestamp": round(a.at_s, 6), "input_length": len(a.prompt), "output_length": a.max_tokens} for a in arrivals
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in [{"llm_bench_trace": 1, "unit": "s"}, *rows]))
