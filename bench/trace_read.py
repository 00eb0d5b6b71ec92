"""How fast a trace is read: a CSV like Azure's is made, read and timed, alone in its process; one JSON line.

python -m bench.trace_read [ROWS]
"""

import json
import resource
import sys
import tempfile
import time
from datetime import date, timedelta
from pathlib import Path

from llm_bench.trace import read

ROWS = 1_000_000
CHUNK_ROWS = 10_000  # written at once, so that making the file takes no memory that the peak would show


def make(path: Path, rows: int) -> None:
    """Rows 0.37 s apart, stamps of seven decimals, CRLF: the shape of AzureLLMInferenceTrace_conv.csv."""
    with path.open("w", newline="") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\r\n")
        for start in range(0, rows, CHUNK_ROWS):
            file.writelines(_row(i) for i in range(start, min(start + CHUNK_ROWS, rows)))


def _row(i: int) -> str:
    seconds, ticks = divmod(i * 3_700_001, 10**7)
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    day, hour = divmod(hours, 24)
    stamp = f"{date(2023, 11, 16) + timedelta(day)} {hour:02}:{minute:02}:{second:02}.{ticks:07}"
    return f"{stamp},{i % 4000 + 1},{i % 600 + 1}\r\n"


def main(rows: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "azure.csv"
        make(path, rows)
        size, before = path.stat().st_size, _peak_mib()
        start, cpu = time.perf_counter(), time.process_time()
        trace = read(path)
        took_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    assert len(trace.requests) == rows
    figures = {"rows": rows, "file_mib": size / 2**20, "seconds": took_s, "cpu_s": cpu_s, "rows_per_s": rows / took_s}
    figures |= {"peak_mib": _peak_mib(), "peak_mib_before": before}
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}))


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts it in KiB


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else ROWS)
