"""Records come back as written, in due order, from whole files and from files cut anywhere."""

import math
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
    lists = ("event_ns", "event_tokens", "event_choice", "labels")
    for f in fields(Record):
        if f.name in lists:
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
    for name in disk.columns:
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
