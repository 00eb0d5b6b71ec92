"""bench.control_path in small: nothing is lost between the cut and the merge, and a part costs what it is large."""

import numpy as np
import pytest

from bench import control_path
from llm_bench import host_part, records


@pytest.mark.parametrize("shards", [1, 7, 64])
def test_what_is_cut_is_collected_and_merged(tmp_path, shards):
    count = 5000
    found = control_path.run(shards, count, tmp_path, lambda text: None)
    assert (found["lost"], found["complete"]) == (0, True)
    assert [step["name"] for step in found["steps"]] == ["plan", "cut", "collect", "merge", "figures"]
    assert found["figures"]["requests_per_second"] == pytest.approx(control_path.RATE, rel=0.5)
    cell = records.read_cell(tmp_path, next(iter(records.files_of(tmp_path))))
    assert (np.diff(cell["due_ns"]) == 10_000).all()  # one grid, though every second host is 21 minutes ahead
    assert sorted(cell["index"]) == list(range(count))


def test_a_part_is_cut_without_a_look_at_the_rest(tmp_path):
    """Else 256 parts of 10,000,000 requests would cost 256 walks over all of them."""

    class Counted(list):  # type: ignore[type-arg]
        looks = 0

        def __getitem__(self, at):
            Counted.looks += 1 if isinstance(at, int) else 0
            return super().__getitem__(at)

        def __iter__(self):
            raise AssertionError("walked over whole")

    cell, work = control_path._planned(10_000, tmp_path)
    for name in ("due_ns", "next_turn", "think_ns"):
        setattr(work, name, Counted(getattr(work, name)))
    job = host_part.cut(cell, work, {}, 3, 100)
    work.close()
    assert len(job.rows) == 100
    assert Counted.looks == 400  # two for the next turn: to walk, and to tell


@pytest.mark.parametrize("asked", [("0", "10"), ("5", "4"), ("-1", "9")])
def test_shards_that_cannot_each_have_a_record_are_refused(asked, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["control_path", "--shards", asked[0], "--records", asked[1]])
    with pytest.raises(SystemExit, match="2"):
        control_path.main()
    assert f"--shards {asked[0]} of --records {asked[1]}: expected 1 or more" in capsys.readouterr().err
