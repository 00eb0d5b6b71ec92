"""A file appears when it is whole; what is no regular file stays what it is."""

import os
import stat
import threading
from pathlib import Path

import pytest

from llm_bench import files
from llm_bench.terminal import save


def test_a_file_is_there_when_it_is_whole_and_else_what_was_there_before(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("before")
    with files.whole(path) as part:
        part.write_text("half")
        assert path.read_text() == "before"
    assert path.read_text() == "half"

    def fail() -> None:
        with files.whole(path) as part:
            part.write_text("of no use")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert path.read_text() == "half"
    assert [*tmp_path.iterdir()] == [path]


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    save(pipe, "a report")
    reader.join()
    assert got == ["a report"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_followed_and_stays_a_link(tmp_path: Path, there: bool) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    if there:
        real.write_text("before")
    link.symlink_to(real)
    save(link, "a report")
    assert link.is_symlink()
    assert real.read_text() == "a report"
    assert sorted(tmp_path.iterdir()) == [link, real]
