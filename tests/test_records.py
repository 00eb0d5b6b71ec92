"""Records come back as written, in due order, from whole files and from files cut anywhere."""

import math
import resource
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from llm_bench import records
from llm_bench.errors import BenchError
from llm_bench.records import Record, Writer
from tests.sample import header, ns, record

ROWS = [
    record(2, 20, events=[25, 30, 35], event_tokens=[1, 2, 1], labels=["no [DONE]"], raw=b"\xff\x00"),
    record(0, 0, events=[5, 6], event_choice=[0, 1], prompt_hash=-(2**63)),
    record(3, 30, outcome="failed", error="HTTP 503: naïve – 忙"),
    record(1, 10, outcome="dropped"),
    record(4, 40, events=[41.000001], server_queue_ms=2.5, tokens_out=2**40),
]

LISTS = ("event_ns", "event_tokens", "event_choice", "labels")


def write(path: Path, rows: list[Record], each: bool = False) -> Path:
    writer = Writer(path, header())
    for row in rows:
        writer.write(row)
        if each:
            writer.flush()
    writer.close()
    return path


def test_every_field_comes_back_in_due_order(tmp_path: Path) -> None:
    cell = records.read(write(tmp_path / "a.arrow", ROWS))
    assert cell.complete
    assert cell.header == header()
    assert cell["index"].tolist() == [0, 1, 2, 3, 4]
    for f in fields(Record):
        if f.name in LISTS:
            continue
        expected = [getattr(r, f.name) for r in sorted(ROWS, key=lambda r: r.due_ns)]
        got = cell[f.name].tolist()
        same = [
            a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))
            for a, b in zip(expected, got, strict=True)
        ]
        assert all(same), (f.name, got)
    assert cell.offsets.tolist() == [0, 2, 2, 5, 5, 6]
    assert cell.event_ns.tolist() == [ns(5), ns(6), ns(25), ns(30), ns(35), ns(41.000001)]
    assert cell.event_tokens.tolist() == [0, 0, 1, 2, 1, 0]
    assert cell.event_choice.tolist() == [0, 1, 0, 0, 0, 0]
    assert cell.labels == [[], [], ["no [DONE]"], [], []]


def test_columns_from_memory_are_those_from_disk(tmp_path: Path) -> None:
    disk, memory = records.read(write(tmp_path / "a.arrow", ROWS, each=True)), records.from_records(ROWS, header())
    assert disk.header == memory.header
    for name in [f.name for f in fields(Record) if f.name not in LISTS]:
        np.testing.assert_array_equal(disk[name], memory[name])
    for name in ("offsets", "event_ns", "event_tokens", "event_choice"):
        np.testing.assert_array_equal(getattr(disk, name), getattr(memory, name))


def test_requests_due_at_once_come_in_the_order_of_the_plan() -> None:
    assert records.from_records([record(i) for i in (3, 1, 2)])["index"].tolist() == [1, 2, 3]


def test_a_file_cut_at_any_byte_gives_the_flushed_rows_or_says_that_it_is_none(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.arrow", ROWS, each=True).read_bytes()
    cut = tmp_path / "cut.arrow"
    seen = set()
    for size in range(0, len(whole), 7):
        cut.write_bytes(whole[:size])
        try:
            cell = records.read(cut)
        except BenchError as e:
            assert "not a record file" in str(e)  # noqa: PT017
            assert not seen, "the header was whole before and is not now"
            continue
        assert not cell.complete
        # Rows are as they were flushed: the first k of ROWS.
        assert sorted(cell["index"]) == sorted(r.index for r in ROWS[: cell.n])
        seen.add(cell.n)
    assert seen == {0, 1, 2, 3, 4, 5}
    cut.write_bytes(whole)
    assert records.read(cut).complete


def test_what_is_flushed_is_readable_before_close(tmp_path: Path) -> None:
    now = [0.0]
    writer = Writer(tmp_path / "a.arrow", header(), now=lambda: now[0])
    writer.write(ROWS[0])
    assert records.read(tmp_path / "a.arrow").n == 0
    now[0] = records.FLUSH_S
    writer.write(ROWS[1])
    cell = records.read(tmp_path / "a.arrow")
    assert (cell.n, cell.complete) == (2, False)
    writer.write(ROWS[2])
    writer.flush()
    assert records.read(tmp_path / "a.arrow").n == 3
    writer.close()


def test_an_empty_cell_is_a_cell(tmp_path: Path) -> None:
    cell = records.read(write(tmp_path / "a.arrow", []))
    assert (cell.n, cell.complete, len(cell.event_ns), cell.offsets.tolist()) == (0, True, 0, [0])


@pytest.mark.parametrize("content", [b"", b"{}\n", b"\xff" * 64, b"ARROW1\0\0" + bytes(32)])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.arrow").write_bytes(content)
    with pytest.raises(BenchError, match=r"a\.arrow: not a record file"):
        records.read(tmp_path / "a.arrow")


@pytest.mark.parametrize("name", [f.name for f in fields(Record) if f.name not in records.REQUIRED])
def test_a_field_that_an_older_version_did_not_record_is_unknown(tmp_path: Path, name: str) -> None:
    whole = write(tmp_path / "a.arrow", ROWS)
    with pa.ipc.open_stream(whole) as reader:
        table = reader.read_all()
    with pa.ipc.new_stream(tmp_path / "b.arrow", table.drop_columns([name]).schema) as old:
        old.write_table(table.drop_columns([name]))
    old_cell, unknown = records.read(tmp_path / "b.arrow"), getattr(Record(0, "", "ok", 0), name)
    if name in LISTS:
        found = (
            [x for row in old_cell.labels for x in row] if name == "labels" else getattr(old_cell, name).nonzero()[0]
        )
        assert len(found) == 0
    else:
        assert all(v == unknown or (v != v and unknown != unknown) for v in old_cell[name].tolist())


def test_an_arrow_stream_of_someone_else_is_refused(tmp_path: Path) -> None:
    def stream(schema: pa.Schema) -> Path:
        with pa.ipc.new_stream(tmp_path / "b.arrow", schema):
            return tmp_path / "b.arrow"

    with pytest.raises(BenchError, match="not a record file"):
        records.read(stream(pa.schema([("x", pa.int64())])))
    other = pa.schema([("x", pa.int64())], {"llm_bench": "{}"})
    with pytest.raises(BenchError, match="another version"):
        records.read(stream(other))
    with pytest.raises(BenchError, match="cannot be read"):
        records.read(tmp_path / "none.arrow")


def test_the_gauge_is_read_beside_the_records_and_half_of_one_is_no_gauge(tmp_path: Path) -> None:
    path = write(tmp_path / "a.b.arrow", ROWS)
    gauge = tmp_path / "a.b.gauge.npy"
    np.save(gauge, np.array([[ns(0), 1], [ns(5), 0]], np.int64))
    assert records.read(path).gauge.tolist() == [[ns(0), 1], [ns(5), 0]]
    gauge.write_bytes(gauge.read_bytes()[:-9])
    cell = records.read(path)
    assert (len(cell.gauge), cell.complete) == (0, False)


class Full:
    """A disk that takes so many bytes more: what a file gets is cut there, as by a quota."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.limit = path, size

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.path.stat().st_size + self.limit, self.before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


def test_a_full_disk_costs_the_last_batch_and_is_said_once(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    writer = Writer(path, header())
    writer.write(ROWS[0])
    writer.flush()
    whole = path.stat().st_size
    with Full(path, 100):
        writer.write(ROWS[1])
        with pytest.raises(OSError, match="File too large") as caught:
            writer.flush()
        assert caught.value.errno in records.DISK_ERRORS
        assert path.stat().st_size == whole  # half a batch is worth nothing, and would hide what follows
    writer.write(ROWS[2])  # there is room again: what came between is missing all the same
    for again in (writer.flush, writer.close):
        with pytest.raises(OSError, match="File too large") as repeated:
            again()
        assert repeated.value is caught.value
    cell = records.read(path)
    assert (cell.n, cell.complete) == (1, False)
    assert path.stat().st_size == whole


def test_a_disk_that_is_full_at_once_leaves_no_file_and_what_is_beside_it_readable(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"  # an empty NAME.lost.arrow would make the whole run unreadable
    path.touch()
    with Full(path, 10), pytest.raises(OSError, match="File too large"):
        Writer(path, header())
    assert not path.exists()


def test_what_a_full_disk_left_is_said_by_whether_there_is_a_request(tmp_path: Path) -> None:
    assert records.left(tmp_path) == "nothing had been measured"
    (tmp_path / "000-t-c=1.w0.arrow").touch()
    writer = Writer(tmp_path / "000-t-c=1.w1.arrow", header())
    assert records.left(tmp_path) == "nothing had been measured"  # a header alone is no request
    writer.write(record(0))
    writer.close()
    assert records.left(tmp_path) == "what was measured before is readable there"


def test_a_header_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="the settings cannot be stored"):
        Writer(tmp_path / "a.arrow", {"speed": math.nan})
    assert not (tmp_path / "a.arrow").exists()


def at(*steps: tuple[float, int]) -> np.ndarray:
    return np.array([[ns(ms), level] for ms, level in steps], np.int64)


def test_a_cell_of_workers_is_pooled_in_due_order_with_the_sum_of_their_gauges(tmp_path: Path) -> None:
    write(tmp_path / "a.w0.arrow", [record(2, 20, events=[25]), record(0, 0, events=[5, 6])])
    write(tmp_path / "a.w1.arrow", [record(1, 10, events=[11, 12, 13], event_choice=[0, 1, 0])])
    write(tmp_path / "a.w10.arrow", [])  # it had nothing to do, and no gauge
    write(tmp_path / "a.lost.arrow", [record(3, 30, outcome="failed")])
    write(tmp_path / "ab.arrow", ROWS)
    np.save(tmp_path / "a.w0.gauge.npy", at((0, 1), (6, 0), (20, 1), (25, 0)))
    np.save(tmp_path / "a.w1.gauge.npy", at((10, 1), (20, 0)))
    cell = records.read_cell(tmp_path, "a")
    assert cell["index"].tolist() == [0, 1, 2, 3]
    assert cell.counts.tolist() == [2, 3, 1, 0]
    assert cell.event_ns.tolist() == [ns(t) for t in (5, 6, 11, 12, 13, 25)]
    assert cell.event_choice.tolist() == [0, 0, 0, 1, 0, 0]
    assert cell.choices.tolist() == [1, 2, 1, 1]
    assert cell.gauge.tolist() == at((0, 1), (6, 0), (10, 1), (20, 2), (20, 1), (25, 0)).tolist()
    assert cell.complete
    (tmp_path / "a.w1.gauge.npy").unlink()  # its worker was killed
    assert len(records.read_cell(tmp_path, "a").gauge) == 0
    assert records.read_cell(tmp_path, "ab").n == 5
    with pytest.raises(BenchError, match="no record file of a cell"):
        records.read_cell(tmp_path, "b")


def write_with(path: Path, **head: object) -> Path:
    writer = Writer(path, header() | {"run_id": "r", "cell": "a", "plan": {"hash": "h"}, "workers": 3} | head)
    writer.close()
    return path


def test_a_missing_file_of_a_worker_is_named(tmp_path: Path) -> None:
    for k in (0, 2):
        write_with(tmp_path / f"a.w{k}.arrow")
    cell = records.read_cell(tmp_path, "a")
    assert (cell.absent, cell.complete) == (("a.w1.arrow",), False)
    write_with(tmp_path / "a.w1.arrow")
    cell = records.read_cell(tmp_path, "a")
    assert (cell.absent, cell.complete) == ((), True)


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ({"run_id": "s"}, "run_id is 's', and 'r' in"),
        ({"cell": "b"}, "cell is 'b', and 'a' in"),
        ({"plan": {"hash": "i"}}, "plan.hash is 'i', and 'h' in"),
        ({"workers": 2}, "workers is 2, and 3 in"),
    ],
)
def test_files_of_two_runs_are_not_pooled(tmp_path: Path, head: dict[str, object], said: str) -> None:
    first, other = write_with(tmp_path / "a.w0.arrow"), write_with(tmp_path / "a.w1.arrow", **head)
    with pytest.raises(BenchError) as refused:
        records.read_cell(tmp_path, "a")
    assert all(words in str(refused.value) for words in (str(first), str(other), said))


def test_record_files_are_grouped_by_their_cell(tmp_path: Path) -> None:
    names = ["000-t-c=1.5.w0", "000-t-c=1.5.w11", "000-t-c=1.5.w2", "000-t-c=1.5.lost", "001-t.wx", "002-t"]
    for name in names:
        (tmp_path / f"{name}.arrow").write_bytes(b"")
    found = {cell: [path.stem for path in paths] for cell, paths in records.files_of(tmp_path).items()}
    assert found == {
        "000-t-c=1.5": ["000-t-c=1.5.w0", "000-t-c=1.5.w2", "000-t-c=1.5.w11", "000-t-c=1.5.lost"],
        "001-t.wx": ["001-t.wx"],
        "002-t": ["002-t"],
    }


@pytest.mark.parametrize(
    "gauge",
    [
        np.array([1, 2, 3]),
        np.array([[1, 2, 3]]),
        np.array([[1.0, np.nan]]),
        np.array(["a"]),
        np.array([[5, 1], [4, 0]]),
        np.array([[1, -1]]),
    ],
)
def test_what_is_no_gauge_is_refused(tmp_path: Path, gauge: np.ndarray) -> None:
    path = write(tmp_path / "a.arrow", ROWS)
    np.save(tmp_path / "a.gauge.npy", gauge)
    with pytest.raises(BenchError, match=r"a\.gauge\.npy: expected"):
        records.read(path)


def test_lists_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"a\.arrow: event_tokens of a record is neither empty nor as long"):
        records.read(write(tmp_path / "a.arrow", [record(0, 0, events=[1, 2], event_tokens=[1])]))


def test_labels_and_words_are_found_without_reading_them_all(tmp_path: Path) -> None:
    cell = records.read(write(tmp_path / "a.arrow", ROWS, each=True))
    assert cell.labelled("no [DONE]").tolist() == [False, False, True, False, False]
    assert cell.labelled("no").tolist() == [False] * 5
    assert cell.among("outcome", "failed", "dropped").tolist() == [False, True, False, True, False]
    assert cell.at("error", 3) == "HTTP 503: naïve – 忙"
    empty = records.from_records([])
    assert (empty.labelled("x").tolist(), empty.among("outcome", "ok").tolist(), empty["outcome"].tolist()) == (
        [],
        [],
        [],
    )


FLIPS = """
import random, sys
from pathlib import Path
from llm_bench import report, results
from llm_bench.errors import BenchError
whole, draw, read = Path(sys.argv[1]), random.Random(int(sys.argv[2])), 0
data, folder = (whole / "000-a.arrow").read_bytes(), whole.parent / "flipped"
folder.mkdir()
for _ in range(int(sys.argv[3])):
    flipped = bytearray(data)
    for _ in range(draw.choice((1, 4, 20))):
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    (folder / "000-a.arrow").write_bytes(flipped)
    try:
        report.render([results.load_run(folder)], results.Asked(["ttft_p95", "error_rate", "itl_p50"]), "json")
        read += 1
    except BenchError as e:
        assert str(e)
print(read)
"""


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_file_with_flipped_bits_is_read_or_refused_and_never_ends_the_process(tmp_path: Path, seed: int) -> None:
    (tmp_path / "run").mkdir()
    rows = [record(i, 10 * i, events=[10 * i + k for k in range(1, 6)]) for i in range(40)]
    write(tmp_path / "run" / "000-a.arrow", [*rows, record(40, 400, outcome="failed", error="naïve – 忙")], each=True)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FLIPS, str(tmp_path / "run"), str(seed), "60"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 5
