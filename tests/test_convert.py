"""convert: the bytes that read and write make of a file, without its rows in memory."""

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_bench import convert as converts
from llm_bench import ticks, trace
from llm_bench.convert import convert
from llm_bench.errors import BenchError

SHARED = Path(__file__).parents[2] / "shared/traces"
HEADER = {"llm_bench_trace": 1, "block_size": 16}


def held(path: Path, out: Path, dejitter: str, **how: Any) -> tuple[bytes, list[str], dict[str, int]] | str:
    """What convert has to give, by way of all requests in memory."""
    try:
        found = trace.read(path, **how)
        requests, done = ticks.dejitter(found.requests, dejitter)
        trace.write(out, found._replace(requests=requests))
    except BenchError as e:
        return str(e)
    return out.read_bytes(), found.notes + [done] * bool(done), found.skipped


def streamed(path: Path, out: Path, dejitter: str, **how: Any) -> tuple[bytes, list[str], dict[str, int]] | str:
    try:
        done = convert(path, out, dejitter=dejitter, **how)
    except BenchError as e:
        return str(e)
    return out.read_bytes(), done.notes, done.skipped


def check_same(path: Path, folder: Path, dejitter: str = "off", **how: Any) -> None:
    out = folder / "out.jsonl"
    one = held(path, out, dejitter, **how)
    out.unlink(missing_ok=True)
    two = streamed(path, out, dejitter, **how)
    out.unlink(missing_ok=True)
    assert two == one


ROWS = st.lists(
    st.fixed_dictionaries(
        {"input_length": st.integers(0, 40), "timestamp": st.integers(0, 12).map(lambda x: x / 4)},
        optional={
            "output_length": st.integers(0, 9),
            "class": st.sampled_from("ab"),
            "blocks": st.booleans(),
            "session_id": st.sampled_from(["s", "t"]),
            "cancel_after_s": st.just(1.5),
        },
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(
    rows=ROWS,
    kind=st.sampled_from(["as they are", "in order", "without times", "alone"]),
    dejitter=st.sampled_from(["off", "auto", "even", "2.5"]),
    skip_bad=st.integers(0, 2),
)
def test_any_rows_are_converted_as_if_all_of_them_were_held(
    rows: list[dict[str, Any]], kind: str, dejitter: str, skip_bad: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for at, row in enumerate(rows):
        blocks = -(-row["input_length"] // 16)
        last = 1000 + row["input_length"]  # an id is one text: the last block of each length has its own
        if row.pop("blocks", False):
            row["hash_ids"] = [7 * (at % 2), 8, 9][: max(blocks - 1, 0)] + [last] * (blocks > 0)
        if kind != "as they are":
            row.pop("session_id", None)
        if kind == "without times":
            row.pop("timestamp", None)
    if kind == "in order":
        rows.sort(key=lambda row: row["timestamp"])
    folder = tmp_path_factory.mktemp("rows")
    path = folder / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [HEADER, *rows]))
    check_same(path, folder, dejitter, skip_bad=skip_bad)


@pytest.mark.parametrize("dejitter", ["off", "auto"])
def test_each_public_excerpt_is_converted_alike(tmp_path: Path, dejitter: str) -> None:
    if not SHARED.exists():
        pytest.skip("the public excerpts are not beside this checkout")
    files = [path for path in sorted(SHARED.iterdir()) if path.suffix in (".csv", ".jsonl")]
    assert len(files) > 10
    for path in files:
        check_same(path, tmp_path, dejitter)


def azure(path: Path, rows: int) -> Path:
    with path.open("w") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
        for i in range(rows):
            file.write(
                f"2023-11-16 {i // 3600 % 24:02}:{i // 60 % 60:02}:{i % 60:02}.{i % 10_000_000:07},{i % 900},9\n"
            )
    return path


# Not ru_maxrss: a process begins with its parent's, and that of these tests is larger than any conversion's.
PEAK = """
import sys
from pathlib import Path
from llm_bench.convert import convert
convert(Path(sys.argv[1]), Path(sys.argv[2]))
print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_memory_is_the_same_for_ten_times_the_rows(tmp_path: Path) -> None:
    peaks = []
    for rows in (3_000, 30_000):  # those held would be 14 MiB more
        path = azure(tmp_path / f"{rows}.csv", rows)
        call = [sys.executable, "-c", PEAK, str(path), str(tmp_path / f"{rows}.jsonl")]
        peaks.append(int(subprocess.run(call, capture_output=True, text=True, check=True).stdout) / 1024)
    assert peaks[1] - peaks[0] < 4, peaks


def test_rows_out_of_order_wait_on_disk_and_are_written_in_order(tmp_path: Path) -> None:
    path = tmp_path / "late.jsonl"
    rows = [{"timestamp": (i * 7919) % 5000, "input_length": 5, "output_length": 1 + i % 50} for i in range(5000)]
    path.write_text("".join(json.dumps(row) + "\n" for row in [{"llm_bench_trace": 1}, *rows]))
    check_same(path, tmp_path)
    assert sorted(tmp_path.iterdir()) == [path]


def test_the_middle_of_gaps_is_found_over_several_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converts, "CHUNK", 7)
    path = tmp_path / "ticks.jsonl"
    stamps = [3 * (i // 4) + 6 * (i // 12) for i in range(100)]
    rows = [{"timestamp": at, "input_length": 5, "output_length": 1} for at in stamps]
    path.write_text("".join(json.dumps(row) + "\n" for row in [{"llm_bench_trace": 1}, *rows]))
    check_same(path, tmp_path)
    assert "4 rows share one instant" in " ".join(convert(path, tmp_path / "o.jsonl").notes)


def test_a_pipe_is_read_once_and_that_its_rows_were_held_is_said(tmp_path: Path) -> None:
    pipe, out = tmp_path / "pipe", tmp_path / "out.jsonl"
    os.mkfifo(pipe)
    text = azure(tmp_path / "t.csv", 50).read_text()
    writer = threading.Thread(target=lambda: pipe.write_text(text))
    writer.start()
    done = convert(pipe, out)
    writer.join()
    assert done.requests == 49  # the first row has no prompt
    assert "a pipe is read once: all 49 requests were in memory" in done.notes[-1]


def changed(by: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    path, out = azure(tmp_path / "t.csv", 5000), tmp_path / "out.jsonl"
    lines = converts._lines

    def later(source: trace.Source, *rest: Any) -> Any:
        by(path)
        return lines(source, *rest)

    monkeypatch.setattr(converts, "_lines", later)
    with pytest.raises(BenchError, match=said):
        convert(path, out)
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_file_that_grows_meanwhile_is_told_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def grow(path: Path) -> None:
        with path.open("a") as file:
            file.write("2023-11-16 23:00:00.0000000,5,5\n")

    changed(grow, tmp_path, monkeypatch, r"t\.csv: it changed while it was read")


def test_a_file_that_is_cut_meanwhile_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed(lambda path: os.truncate(path, 40), tmp_path, monkeypatch, r"t\.csv:")


def test_a_missing_file_and_a_full_disk_are_told_as_by_read_and_write(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot be read"):
        convert(tmp_path / "none.csv", tmp_path / "out.jsonl")
    path = azure(tmp_path / "t.csv", 20_000)
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
    limit += "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
    call = f"{limit} from llm_bench.cli import main; sys.argv = ['llm-bench', *sys.argv[1:]]; main()"
    asked = ["trace", "convert", str(path), "-o", str(tmp_path / "out.jsonl")]
    done = subprocess.run([sys.executable, "-c", call, *asked], capture_output=True, text=True)
    assert done.returncode == 2 and "cannot be written" in done.stderr, done.stderr
    assert sorted(tmp_path.iterdir()) == [path]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 100_000
