"""Metrics over runs: order, change points, what is marked, what is left out, what is held of many."""

import json
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from llm_bench import history, results, trend
from llm_bench.book import Book
from llm_bench.errors import BenchError
from llm_bench.history import History
from tests import sample_arms
from tests.sample_arms import ANCHOR_NS, BASE, LOAD, SLOW, START_NS, target, write_arms, write_book
from tests.test_gate_report import invoke, refused

DAY_NS = 86_400 * 10**9


def made(folder: Path, name: str, ttft_ms: float, day: int, **head: Any) -> Path:
    anchor = [ANCHOR_NS + day * DAY_NS, START_NS]
    return write_arms(folder / name, {"t": [ttft_ms]}, interleaved=False, anchor=anchor, **head)


def told(*folders: Path, metric: str = "ttft_p95", **where: str) -> list[History]:
    return history.histories([results.load_run(f) for f in folders], metric, **where)


@pytest.fixture(scope="module")
def months(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Sixteen runs, given in an order that is not theirs; slower by 6% from the ninth on."""
    folder = tmp_path_factory.mktemp("months")
    names = [f"r{(7 * day) % 16:02d}" for day in range(16)]
    return sorted(made(folder, name, (BASE + SLOW)[day], day) for day, name in enumerate(names))


def test_runs_are_ordered_by_when_they_were_made_and_the_change_is_found(months: list[Path]) -> None:
    (got,) = told(*months)
    assert [p.run for p in got.points] == [f"r{(7 * day) % 16:02d}" for day in range(16)]
    assert [p.value for p in got.points] == pytest.approx([1.177 * v for v in BASE + SLOW], rel=1e-3)
    (change,) = got.found
    assert (change.at, got.known[change.at].run) == (8, "r08")
    assert change.p == 1 / 400
    assert change.share == pytest.approx(sum(SLOW) / sum(BASE) - 1, abs=1e-3)
    assert history.sentences(got) == ["from r08 (2023-11-22 22:13) on worse: 117.7 to 124.8, +6.01%, p = 0.0025"]
    (row,) = [row for row in history.rows(got)[1] if row[0]]
    assert row[:3] == ["→", "2023-11-22 22:13", "r08"]


def test_more_throughput_is_better_and_a_share_moves_in_points(tmp_path: Path) -> None:
    folders = []
    for day in range(12):
        rows = sample_arms.rows(failed=0 if day < 6 else 12, salt=1000, tokens=4 if day < 6 else 6)
        head = {"target": target("t"), "load": LOAD, "anchor": [ANCHOR_NS + day * DAY_NS, START_NS]}
        sample_arms.write(tmp_path / f"{day:02d}", "000-t", rows, **head)
        folders.append(tmp_path / f"{day:02d}")
    (errors,), (tokens,) = (told(*folders, metric=name) for name in ("error_rate", "tokens_per_second"))
    assert history.sentences(errors) == ["from 06 (2023-11-20 22:13) on worse: 0.00% to 10.00%, +10pp, p = 0.005"]
    assert "on better: " in history.sentences(tokens)[0]


def test_under_twice_the_least_segment_no_change_is_looked_for(months: list[Path]) -> None:
    (got,) = told(*months[:9])
    assert got.found == []
    assert history.sentences(got) == ["no verdict: 9 runs have the figure, 10 are needed for a change point"]
    steady = [m for m in months if results.load_run(m).cells[0].cell.header["anchor"][0] < ANCHOR_NS + 8 * DAY_NS]
    (quiet,) = told(*steady, *steady)
    assert history.sentences(quiet)[0].startswith("no change point in 16 runs (E-divisive")


def test_doubtful_runs_are_marked_and_stay(tmp_path: Path) -> None:
    folders = [made(tmp_path, f"r{day}", BASE[day], day) for day in range(3)]
    doubts = [{"kind": kind, "text": "so"} for kind in ("client busy", "retries")]
    write_book(folders[1], cells=[{"name": "000-t", "end": {"reason": "exhausted"}, "doubts": doubts}])
    (got,) = told(*folders)
    assert [p.doubts for p in got.points] == [[], ["client busy"], []]
    assert len(got.known) == 3
    assert "! client busy" in history.text([got])


def test_a_run_of_other_work_is_marked_where_it_begins(tmp_path: Path) -> None:
    folders = [made(tmp_path, f"r{day}", BASE[day], day, settings={"seed": day // 2}, version="1") for day in range(4)]
    (got,) = told(*folders)
    assert [p.doubts for p in got.points] == [[], [], ["not the same work as before: seed"], []]


def test_a_new_version_of_ours_is_no_other_work(tmp_path: Path) -> None:
    folders = [made(tmp_path, f"r{day}", 100.0, day, work_hash=f"{day}0", version=f"{day}") for day in range(3)]
    assert [p.doubts for p in told(*folders)[0].points] == [[], [], []]


def test_a_run_is_one_point_however_often_it_repeats(tmp_path: Path) -> None:
    folder = write_arms(tmp_path / "r", {"t": BASE}, interleaved=False)
    (got,) = told(folder)
    assert [(p.cells, p.value) for p in got.points] == [(8, pytest.approx(1.177 * sum(BASE) / 8, rel=1e-3))]


def test_each_target_at_each_load_has_a_history_and_can_be_chosen(tmp_path: Path) -> None:
    other = LOAD | {"label": "c=8"}
    a = write_arms(tmp_path / "a", {"x": BASE[:1], "y": BASE[:1]}, [LOAD, other])
    b = write_arms(tmp_path / "b", {"x": BASE[:1]}, interleaved=False)
    assert [(h.target, h.load, len(h.points)) for h in told(a, b)] == [
        ("x", "rate=100/s", 2), ("y", "rate=100/s", 1), ("x", "c=8", 1), ("y", "c=8", 1),
    ]  # fmt: skip
    assert [(h.target, h.load) for h in told(a, b, target="x", load="c=8")] == [("x", "c=8")]
    with pytest.raises(BenchError, match="no run has z at any load; they have x at rate=100/s"):
        told(a, b, target="z")


def test_a_figure_that_is_not_defined_is_left_out_with_its_reason(tmp_path: Path) -> None:
    folders = [made(tmp_path, f"r{day}", BASE[day], day) for day in range(2)]
    (got,) = told(*folders, metric="goodput")
    assert [p.value for p in got.points] == [None, None]
    shown = history.text([got])
    assert "at rate=100/s, 2 runs" in shown and "1 run\n" in history.text(told(folders[0]))
    assert "no run has the figure" in shown and "no limits were given: --slo" in shown
    assert "0 runs have the figure, 10 are needed" in shown


def test_a_run_without_its_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="nor a record file says when it was made"):
        told(made(tmp_path, "r", 100.0, 0) and write_arms(tmp_path / "q", {"t": [1.0]}, interleaved=False, anchor=None))
    folder = write_arms(tmp_path / "p", {"t": [1.0]}, interleaved=False, anchor=None)
    write_book(folder, anchor=[ANCHOR_NS, START_NS])
    assert told(folder)[0].points[0].at_ns == ANCHOR_NS


def test_what_is_no_run_is_said_and_left_out(months: list[Path], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no run")
    got = invoke("history", *months, tmp_path, "--metric", "ttft_p95", "--load", "rate=100/s")
    assert got.exit_code == 0 and "on worse: 117.7 to 124.8" in got.output
    assert "no such run folder" in refused("history", tmp_path / "none", "--metric", "ttft_p95")
    assert "nearest: " in refused("history", *months, "--metric", "ttft_p96")
    assert "expected one of terminal, md, json" in refused("history", *months, "--metric", "ttft_p95", "--format", "x")


def test_json_is_strict_and_says_where_it_changed(months: list[Path]) -> None:
    got = invoke("history", *months, "--metric", "ttft_p95", "--format", "json").output
    (found,) = json.loads(got, parse_constant=lambda word: pytest.fail(word))["histories"]
    assert len(found["points"]) == 16
    (change,) = found["change_points"]
    assert (change["from"], change["at"], change["p"]) == ("r08", 8, 0.0025)
    md = invoke("history", *months, "--metric", "ttft_p95", "--format", "md").output
    assert md.startswith("### ttft\\_p95 of t at rate=100/s, 16 runs\n") and "on worse" in md


def test_several_histories_are_a_line_each_and_run_by_run_when_asked(tmp_path: Path) -> None:
    targets = {"x": BASE[:1], "y": SLOW[:1], "z": BASE[:1]}
    loads = [LOAD, LOAD | {"label": "c=8"}]
    runs = [
        write_arms(tmp_path / f"r{day}", targets, loads, anchor=[ANCHOR_NS + day * DAY_NS, START_NS])
        for day in range(8)
    ]
    words = ("history", *runs, "--metric", "ttft_p95")
    short = invoke(*words).output
    assert len(short.splitlines()) <= 12
    assert [line.split()[:3] for line in short.splitlines()[2:8]] == [
        [t, at, "8"] for at in ("rate=100/s", "c=8") for t in targets
    ]
    assert short.count("are needed for a change point") == 1
    assert "no verdict on 6 of 6: at most 8 runs" in short and "--details" in short
    long = invoke(*words, "--details").output
    assert "ttft_p95 of x at rate=100/s, 8 runs" in long and len(long.splitlines()) > 70
    assert invoke(*words, "--format", "md").output.startswith("| target | load | runs |")


def test_what_changed_among_several_is_said_with_its_target(months: list[Path], tmp_path: Path) -> None:
    other = [
        write_arms(tmp_path / f"u{day}", {"u": [100.0]}, interleaved=False, anchor=[ANCHOR_NS + day * DAY_NS, START_NS])
        for day in range(2)
    ]
    shown = history.text(told(*months, *other))
    assert "  t at rate=100/s: from r08 (2023-11-22 22:13) on worse: 117.7 to 124.8" in shown
    assert "no verdict on 1 of 2: at most 2 runs" in shown


def test_a_line_of_values_spans_from_the_least_to_the_largest() -> None:
    assert history.line_of([0, 1, 2, 3, 4, 5, 6, 7]) == history.BARS
    assert history.line_of([5.0, 5.0]) == "▅▅"


# ---- many runs


def test_of_an_iterator_of_runs_one_is_in_memory_at_a_time(months: list[Path]) -> None:
    seen: list[weakref.ref[results.Run]] = []
    alive: list[int] = []

    def runs() -> Iterator[results.Run]:
        for folder in months:
            alive.append(sum(ref() is not None for ref in seen))
            run = results.load_run(folder)
            seen.append(weakref.ref(run))
            yield run
            del run

    found = history.histories(runs(), ["ttft_p95", "tokens_per_second"])
    assert [h.metric.name for h in found] == ["ttft_p95", "tokens_per_second"]
    assert [len(h.points) for h in found] == [16, 16]
    assert max(alive) <= 1  # the one before, until the next is there


def test_several_metrics_are_the_same_as_each_alone(months: list[Path]) -> None:
    runs = [results.load_run(m) for m in months]
    names = ["ttft_p95", "e2e_mean", "goodput"]
    assert history.histories(runs, names) == [h for name in names for h in history.histories(runs, name)]
    text = history.text(history.histories(runs, names))
    assert [line.split(" of ")[0] for line in text.splitlines() if line.endswith("16 runs")] == names


def test_levels_are_the_means_between_changes(months: list[Path]) -> None:
    (got,) = told(*months)
    values = [p.value for p in got.known if p.value is not None]
    assert got.levels == pytest.approx([sum(values[:8]) / 8] * 8 + [sum(values[8:]) / 8] * 8)
    (few,) = told(*months[:3])
    assert few.levels == pytest.approx([sum(p.value or 0 for p in few.known) / 3] * 3)


# ---- as Parquet


def test_the_table_has_a_row_a_metric_and_run_and_says_where_it_changed(months: list[Path], tmp_path: Path) -> None:
    found = history.histories((results.load_run(m) for m in months), ["ttft_p95", "goodput"])
    assert history.write_parquet(found, tmp_path / "h.parquet") == 32
    table = parquet.read_table(tmp_path / "h.parquet")
    rows = table.to_pylist()
    assert [r["run"] for r in rows[:16]] == [f"r{(7 * day) % 16:02d}" for day in range(16)]
    (change,) = [r for r in rows if r["changed"]]
    assert (change["run"], change["metric"], change["p"], change["better"]) == ("r08", "ttft_p95", 0.0025, "lower")
    assert change["level"] == pytest.approx(124.8, abs=0.1) and rows[0]["level"] == pytest.approx(117.7, abs=0.1)
    assert rows[0]["made"].isoformat() == "2023-11-14T22:13:20+00:00"
    assert (rows[16]["value"], rows[16]["level"], rows[16]["reason"]) == (None, None, "no limits were given: --slo")
    assert json.loads(table.schema.metadata[b"llm_bench"]) == {"version": 1, "of": "history"}
    assert all(field.metadata[b"definition"] for field in table.schema)
    assert not list(tmp_path.glob("*.part"))


def test_a_table_that_cannot_be_written_leaves_nothing(months: list[Path], tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"h\.parquet: cannot be written: .*No such file or directory"):
        history.write_parquet(told(*months[:2]), tmp_path / "none" / "h.parquet")
    (tmp_path / "h.parquet").mkdir()
    with pytest.raises(BenchError, match="cannot be written"):
        history.write_parquet(told(*months[:2]), tmp_path / "h.parquet")
    assert not list(tmp_path.glob("*.part"))


def test_no_histories_are_a_table_without_rows() -> None:
    assert history.table([]).num_rows == 0


def test_the_command_writes_a_page_and_a_table_of_several_metrics(months: list[Path], tmp_path: Path) -> None:
    words = ("history", *months, "--metric", "ttft_p95,tokens_per_second")
    assert invoke(*words, "--format", "html", "-o", tmp_path / "t.html").exit_code == 0
    assert (tmp_path / "t.html").read_text().count("<figure>") == 2
    assert invoke(*words, "--format", "parquet", "-o", tmp_path / "h.parquet").exit_code == 0
    assert parquet.read_table(tmp_path / "h.parquet").num_rows == 32
    assert invoke(*words).output.count("of t at rate=100/s, 16 runs") == 2
    assert "expected -o FILE" in refused(*words, "--format", "parquet")
    assert "--metric: no name" in refused("history", *months, "--metric", ",")


# ---- versions on disk

OLD = Path(__file__).parent / "fixtures" / "run-before-tokens-counted"


def test_a_run_of_an_earlier_version_stands_in_a_history(tmp_path: Path) -> None:
    (got,) = history.histories([results.load_run(OLD)], "e2e_mean")
    assert [p.value for p in got.points] == [pytest.approx(0.3847199130434782)]
    assert results.NEWER not in got.points[0].doubts


def test_a_run_of_a_later_version_is_read_with_a_doubt(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    shutil.copytree(OLD, folder)
    book = json.loads((folder / "run.json").read_text())
    assert book["llm_bench_run"] == results.FORMAT
    (folder / "run.json").write_text(json.dumps(book | {"llm_bench_run": results.FORMAT + 1, "tides": "high"}))
    run = results.load_run(folder)
    (doubt,) = [d for d in run.doubts[0] if d.kind == results.NEWER]
    assert doubt.text == "run.json is of format 2, this version of llm-bench knows 1 and reads what it knows"
    (got,) = history.histories([run], "e2e_mean")
    assert results.NEWER in got.points[0].doubts and got.points[0].value is not None


def test_records_with_a_column_more_are_read_and_with_another_meaning_are_refused(tmp_path: Path) -> None:
    def rewritten(name: str, change: Callable[[pa.Table], pa.Table]) -> Path:
        folder = tmp_path / name
        shutil.copytree(OLD, folder)
        (path,) = folder.glob("*.arrow")
        table = pa.ipc.open_stream(path.read_bytes()).read_all()
        metadata = table.schema.metadata
        table = change(table).replace_schema_metadata(metadata)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
        return folder

    more = rewritten("more", lambda t: t.append_column("tides", pa.array(["high"] * t.num_rows)))
    (got,) = history.histories([results.load_run(more)], "e2e_mean")
    assert got.points[0].value == pytest.approx(0.3847199130434782)
    at = results.load_run(OLD).cells[0].cell.table.schema.names.index("due_ns")
    other = rewritten("other", lambda t: t.set_column(at, "due_ns", t["due_ns"].cast(pa.float64())))
    with pytest.raises(BenchError, match=r"columns missing or of another type: \['due_ns'\]; another version wrote it"):
        results.load_run(other)


def test_the_book_writes_the_format_that_reports_know(tmp_path: Path) -> None:
    written = Book(tmp_path, {})
    try:
        assert written.facts["llm_bench_run"] == results.FORMAT
    finally:
        written.close()


def test_a_change_where_the_work_changed_too_says_so(tmp_path: Path) -> None:
    figures = BASE[:6] + SLOW[:6]
    folders = [made(tmp_path, f"r{day:02d}", v, day, settings={"seed": day // 6}) for day, v in enumerate(figures)]
    (got,) = told(*folders)
    assert [c.at for c in got.found] == [6]
    assert history.sentences(got)[0].endswith("; not the same work as before: seed")
    page = trend.page([got])
    assert "in 1 history that is long enough. At 1 of these the work changed too" in page


def test_a_change_of_equal_work_says_nothing_of_it(months: list[Path]) -> None:
    (got,) = told(*months)
    assert [history.other_work(got, c) for c in got.found] == [""]
    assert "the work changed" not in trend.page([got])


@pytest.mark.parametrize("at_ns", [-1, 10**24])
def test_a_time_of_no_clock_is_refused(tmp_path: Path, at_ns: int) -> None:
    folder = made(tmp_path, "r", 100.0, 0)
    write_book(folder, anchor=[at_ns, 1])
    with pytest.raises(BenchError, match=rf"r: made {at_ns} ns after 1970 \(anchor\), expected 0 to the year 9999"):
        told(folder)
    write_book(folder, anchor=[history.LAST_NS, 1])
    (last,) = told(folder)
    assert "9999-12-31 23:59" in history.text([last])
    assert history.table([last]).num_rows == 1


def test_a_run_given_twice_is_refused(months: list[Path]) -> None:
    again = months[0].parent / "." / months[0].name
    assert "given twice" in refused("history", *months, again, "--metric", "ttft_p95")
