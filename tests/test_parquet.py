"""The Parquet export: one row a request, what the records and METRICS say of it, null with the reason where nothing."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from llm_bench import objectives, parquet, results
from llm_bench.errors import BenchError
from llm_bench.records import SCHEMA, Record
from llm_bench.results import Asked
from llm_bench.series import SERIES
from tests.sample import cell, ns, record
from tests.test_report import FIVE, write_cell


@pytest.fixture
def run(tmp_path: Path) -> results.Run:
    write_cell(tmp_path / "five", "000-a", FIVE[::-1])  # in the file as they ended
    return results.load_run(tmp_path / "five")


def written(runs: list[results.Run], path: Path, asked: Asked = Asked()) -> pa.Table:  # noqa: B008
    assert parquet.write(runs, asked, path) == sum(m.cell.n for run in runs for m in run.cells)
    assert not list(path.parent.glob("*.part"))
    return pq.read_table(path)


def test_a_row_is_a_request_with_its_record_and_its_series(run: results.Run, tmp_path: Path) -> None:
    rows = written([run], tmp_path / "x.parquet").to_pylist()
    assert [row["index"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["ttft"] for row in rows] == [50, 80, None, 30, 70]
    assert [row["ttft_sent"] for row in rows] == [40, 80, None, 30, 70]
    assert [row["tpot"] for row in rows] == [10, 12, None, None, 50]
    assert [row["e2e"] for row in rows] == [70, 140, 10, 30, 120]
    assert [row["tpot_reason"] for row in rows] == [None, None, "under 2 tokens", "under 2 tokens", None]
    assert [row["ttft_reason"] for row in rows] == [None, None, "not streamed", None, None]
    first = rows[0]
    assert (first["run"], first["cell"], first["target"], first["load"]) == ("five", "000-a", "a", "rate=5/s")
    assert all(row["in_window"] for row in rows)
    assert first["event_ns"] == [ns(50), ns(60), ns(70)]
    assert (first["due_ns"], first["sent_ns"]) == (ns(0), ns(10))
    assert (rows[2]["outcome"], rows[2]["error"]) == ("failed", "HTTP 503: busy | later")


def test_what_is_unknown_is_null(tmp_path: Path) -> None:
    rows = [record(0, 0, outcome="dropped", tokens_out=-1), record(1, 10, events=[20], asked_out=0, tokens_cached=0)]
    write_cell(tmp_path / "run", "000-a", rows)
    dropped, ok = written([results.load_run(tmp_path / "run")], tmp_path / "x.parquet").to_pylist()
    for name in ("sent_ns", "ready_ns", "first_byte_ns", "end_ns", "first_answer_ns", "status", "tokens_out"):
        assert dropped[name] is None, name
    assert dropped["tokens_cached"] is None
    assert (ok["tokens_cached"], ok["asked_out"], ok["status"]) == (0, 0, 200)
    assert (dropped["ttft_sent"], dropped["lag"], dropped["lag_reason"]) == (None, None, "stamp missing")
    for name in SERIES:
        for row in (dropped, ok):
            if name not in parquet.POOLED:
                assert (row[name] is None) == (row[f"{name}_reason"] is not None), name
                assert row[name] is None or math.isfinite(row[name])


def test_every_series_is_the_one_of_a_report_whatever_the_size_of_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        record(
            i, 10 * i, sent=10 * i + i % 3, events=[10 * i + 20 + i % 7, 10 * i + 40, 10 * i + 90], server_queue_ms=i
        )
        for i in range(50)
    ]
    write_cell(tmp_path / "run", "000-a", rows[::-1])
    run, asked = results.load_run(tmp_path / "run"), Asked(slo=objectives.parse("ttft_p95<30ms,tpot_p95<35ms"))
    whole = written([run], tmp_path / "x.parquet", asked)
    made = run.cells[0].cell
    for name, series in SERIES.items():
        if name not in parquet.POOLED:
            expected = series.of(made, asked.slo.context()).values.tolist()
            assert [math.nan if v is None else v for v in whole[name].to_pylist()] == pytest.approx(
                expected, nan_ok=True
            )
    assert whole["on_time_share"].null_count == 0  # the deadlines are those of the SLO
    monkeypatch.setattr(parquet, "ROWS", 7)
    assert written([run], tmp_path / "y.parquet", asked).equals(whole)
    assert pq.ParquetFile(tmp_path / "y.parquet").num_row_groups == 8


def test_runs_and_cells_stand_in_one_file(run: results.Run, tmp_path: Path) -> None:
    write_cell(tmp_path / "other", "000-a", FIVE)
    write_cell(tmp_path / "other", "001-b", FIVE[:2], load={"kind": "closed", "concurrency": 2, "warmup": None})
    made = written([run, results.load_run(tmp_path / "other")], tmp_path / "x.parquet")
    found = [(row["run"], row["cell"]) for row in made.select(["run", "cell"]).to_pylist()]
    assert found == [("five", "000-a")] * 5 + [("other", "000-a")] * 5 + [("other", "001-b")] * 2


def test_units_definitions_and_windows_are_in_the_metadata(run: results.Run, tmp_path: Path) -> None:
    schema = written([run], tmp_path / "x.parquet").schema
    assert schema.field("ttft").metadata == {
        b"unit": b"ms",
        b"definition": b"first token from due time, queueing included",
    }
    assert all(field.metadata[b"definition"] for field in schema)
    assert schema.field("due_ns").metadata[b"unit"].startswith(b"ns of the client's monotonic clock")
    told: dict[str, Any] = json.loads(schema.metadata[b"llm_bench"])
    (of_run,) = told["runs"]
    (of_cell,) = of_run["cells"]
    assert (told["version"], of_run["run"], of_cell["window"]["start_ns"]) == (1, "five", ns(0))
    assert of_cell["header"]["started"]["anchor"] == [1_700_000_000_000_000_000, ns(0)]


def test_every_field_of_a_record_is_a_column_or_a_series() -> None:
    left = set(SCHEMA.names) - set(parquet.COLUMNS.names)
    told = {f"server_{name}_ms" for name in ("ttft", "tpot", "queue", "prefill", "decode")}
    assert left == told | {"server_batch"}
    assert set(Record.__dataclass_fields__) == set(SCHEMA.names)


def test_an_empty_cell_gives_no_row(tmp_path: Path) -> None:
    write_cell(tmp_path / "run", "000-a", [])
    assert written([results.load_run(tmp_path / "run")], tmp_path / "x.parquet").num_rows == 0
    assert cell([]).n == 0


def test_a_file_that_cannot_be_written_is_one_line_and_leaves_nothing(run: results.Run, tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "x.parquet", tmp_path / "five"):
        with pytest.raises(BenchError, match="cannot be written: "):
            parquet.write([run], Asked(), path)
    assert not list(tmp_path.glob("*.part"))
