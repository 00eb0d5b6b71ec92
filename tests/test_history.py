"""A metric over runs: order, change points, what is marked, what is left out."""

import json
from pathlib import Path
from typing import Any

import pytest

from llm_bench import history, results
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
