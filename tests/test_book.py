"""run.json: one run at a time holds a folder, and a run is finished only with the work it was begun with."""

import errno
import fcntl
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from llm_bench import book
from llm_bench.book import Book
from llm_bench.errors import BenchError
from llm_bench.records import Writer
from tests.bench import bench, command, environment, good, llm_server, rows, trace_file
from tests.scripted import Scripted, http_response

ASKED = {
    "settings": {"out": "run", "seed": 0, "ready_s": 30.0},
    "targets": ["t"],
    "declared": [{"name": "t", "url": "http://127.0.0.1:9/v1"}],
    "loads": ["c=1", "c=2"],
    "trace": {"path": "a.jsonl", "rows": 3},
    "hashes": {"trace": "0011", "tokenizers": {"t": "2233"}},
}
PRIVATE = {"t": {"X-Route": "small"}}
PROBED = {"t": {"model": "m", "max_model_len": 4096, "ask": {"pin_lengths": True}}}
NAME = "000-t-c=1"


def _written(folder: Path, *, ended: bool = True, workers: int = 1) -> Path:
    """A run of two loads of which the first is done (or was killed, not `ended`), with its record files."""
    with closing(Book(folder, ASKED, PRIVATE)) as run:
        run.begin(PROBED)
        run.begin_cell(NAME, {"target": "t", "load": {}})
        for k in range(workers):
            Writer(folder / (f"{NAME}.w{k}.arrow" if workers > 1 else f"{NAME}.arrow"), run.header({})).close()
        if ended:
            run.end_cell(NAME, {"reason": "exhausted", "workers": workers})
    return folder


def _resumed(folder: Path, asked=ASKED, private=PRIVATE, probed=PROBED) -> Book:
    with closing(Book(folder, asked, private, resume=True)) as run:
        run.begin(probed)
    return run


# ---- one at a time


def test_a_folder_is_held_for_the_life_of_a_run(tmp_path):
    with closing(Book(tmp_path, ASKED)):
        for resume in (False, True):
            with pytest.raises(BenchError, match="another llm-bench is measuring into it"):
                Book(tmp_path, ASKED, resume=resume)
    Book(tmp_path, ASKED, resume=True).close()


def test_the_lock_of_a_killed_run_is_gone_with_it(tmp_path):
    held = "import sys, time; from pathlib import Path; from llm_bench.book import Book; "
    held += f"b = Book(Path(sys.argv[1]), {ASKED!r}); print('held', flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", held, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(BenchError, match="another llm-bench"):
            Book(tmp_path, ASKED, resume=True)
        other.kill()
    Book(tmp_path, ASKED, resume=True).close()


def test_a_refused_folder_is_left_as_it_was_and_free(tmp_path):
    (tmp_path / "mine.txt").touch()
    with pytest.raises(BenchError, match="not empty"):
        Book(tmp_path, ASKED)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
    folder = _written(tmp_path / "run")
    for _ in range(2):
        with pytest.raises(BenchError, match="--resume to finish"):
            Book(folder, ASKED)


def _refused(folder: Path) -> Path:
    """What a run of a started target leaves that was refused after its book was opened."""
    Book(folder, ASKED, PRIVATE).close()
    (folder / "t.log").write_text("listening")
    (folder / "run.part").touch()
    return folder


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_ended_before_its_first_cell_leaves_a_folder_that_can_be_used(tmp_path, resume):
    before = json.loads((_refused(tmp_path) / "run.json").read_text())["run_id"]
    for seed in (1, 2):  # refused again and again, with other work each time
        Book(tmp_path, ASKED | {"settings": {"seed": seed}}, resume=resume).close()
    with closing(Book(tmp_path, ASKED, PRIVATE, resume=resume)) as run:
        run.begin(PROBED)
        run.begin_cell(NAME, {"target": "t", "load": {}})
    assert run.run_id != before
    with pytest.raises(BenchError, match="the folder is not empty"):  # now there is something to lose
        Book(tmp_path, ASKED)


def test_a_run_that_was_killed_while_it_wrote_its_first_book_leaves_a_folder_that_can_be_used(tmp_path):
    (tmp_path / "run.part").write_text('{"llm_ben')
    with pytest.raises(BenchError, match="the folder is not empty"):  # without a lock it is someone else's
        Book(tmp_path, ASKED)
    (tmp_path / ".lock").touch()
    Book(tmp_path, ASKED).close()
    assert json.loads((tmp_path / "run.json").read_text())["cells"] == []


@pytest.mark.parametrize("file", ["mine.txt", "000-t-c=1.arrow", "other.log"])
def test_a_file_beside_a_run_without_a_cell_is_not_ours_to_write_around(tmp_path, file):
    (_refused(tmp_path) / file).touch()
    with pytest.raises(BenchError, match="the folder is not empty"):
        Book(tmp_path, ASKED)


def test_what_was_set_aside_is_something_to_lose(tmp_path):
    facts = json.loads((_refused(tmp_path) / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(facts | {"set_aside": [{"name": NAME}]}))
    with pytest.raises(BenchError, match="the folder is not empty"):
        Book(tmp_path, ASKED)


def test_without_locks_nothing_that_another_may_be_about_to_measure_is_overwritten(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", none)
    _written(tmp_path / "done")
    for folder in (_refused(tmp_path / "begun"), tmp_path / "done"):
        with pytest.raises(BenchError, match="the folder is not empty"):
            Book(folder, ASKED)
    Book(tmp_path / "done", ASKED, PRIVATE, resume=True).close()


REFUSALS = {  # what is refused only once a target has been asked: arguments, and what is said
    "a context that no request fits": (["run", "--concurrency", "1", "--max-model-len", "5"], "context"),
    "a budget that is too small": (
        ["search", "--slo", "e2e_p95<1s", "--by", "rate", "--budget", "1s", "--requests", "10000"],
        "--budget",
    ),
    "nobody there": (["run", "--concurrency", "1", "--ready-timeout", "0.2"], "is not ready"),
    "no candidate there": (
        ["canary", "--rule", "e2e_p50<=+5%", "--concurrency", "1", "--ready-timeout", "0.2", "--candidate", "b=NOBODY"],
        "target b: http://127.0.0.1:1/v1 is not ready",
    ),
}
NOBODY = "http://127.0.0.1:1/v1"


@pytest.mark.parametrize("kind", REFUSALS)
def test_whatever_is_refused_before_the_first_cell_the_same_command_mended_goes_into_the_same_folder(tmp_path, kind):
    arguments, said = REFUSALS[kind]
    trace, out = trace_file(tmp_path, rows(30)), tmp_path / "run"
    with Scripted(llm_server(lambda n, seen: good(seen))) as server:
        url, asks = NOBODY if kind == "nobody there" else server.url, "--base" if "canary" in arguments else "--targets"
        arguments = [argument.replace("NOBODY", NOBODY) for argument in arguments]
        whole = command(*arguments, asks, f"t={url}", "--trace", trace, "--out", out)
        for _ in range(2):
            done = subprocess.run(whole, capture_output=True, text=True, env=environment(), check=False)
            assert done.returncode in (2, 4), done.stderr
            assert said in done.stderr.splitlines()[-1]
            assert "not empty" not in done.stderr
        ran = bench(server.url, tmp_path, trace, "--concurrency", "1")
    assert ran.rc == 0, ran.err


def test_a_second_run_into_the_folder_of_one_that_measures_is_refused(tmp_path):
    arguments = ("--concurrency", "2", "--out", tmp_path / "run")
    with Scripted(llm_server(lambda n, seen: good(seen, 30))) as server:
        whole = command("run", "--targets", f"t={server.url}", "--trace", trace_file(tmp_path, rows(300)), *arguments)
        first = subprocess.Popen(whole, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment())
        while not (tmp_path / "run" / "run.json").exists():
            assert first.poll() is None
        second = subprocess.run([*whole, "--resume"], capture_output=True, text=True, env=environment(), check=False)
        first.communicate(timeout=180)
    assert first.returncode == 0
    assert second.returncode == 2
    assert "another llm-bench is measuring" in second.stderr.splitlines()[-1]


# ---- the same work


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hashes": {"trace": "ffff", "tokenizers": {"t": "2233"}}}, "hashes.trace has changed"),
        ({"hashes": {"trace": "0011", "tokenizers": {"t": "ffff"}}}, "hashes.tokenizers.t has changed"),
        ({"settings": {"out": "run", "seed": 1, "ready_s": 30.0}}, "settings.seed has changed from 0 to 1"),
    ],
)
def test_other_work_is_no_resumption(tmp_path, changed, said):
    folder = _written(tmp_path, ended=False)
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(BenchError, match=said):
        _resumed(folder, ASKED | changed)
    assert sorted(p.name for p in tmp_path.iterdir()) == before  # nothing was moved


@pytest.mark.parametrize("change", [{"model": "n"}, {"max_model_len": 8}, {"ask": {"pin_lengths": False}}])
def test_another_server_behind_the_same_name_is_no_resumption(tmp_path, change):
    folder = _written(tmp_path, ended=False)
    with pytest.raises(BenchError, match=f"probed.t.{next(iter(change))}.* has changed"):
        _resumed(folder, probed={"t": PROBED["t"] | change})
    assert (folder / f"{NAME}.arrow").exists()


def test_another_header_value_is_no_resumption_and_no_value_is_kept(tmp_path):
    folder = _written(tmp_path)
    with pytest.raises(BenchError, match=r"hashes\.headers.t.X-Route has changed") as refused:
        _resumed(folder, private={"t": {"X-Route": "huge"}})
    assert "huge" not in str(refused.value)
    assert "small" not in (folder / "run.json").read_text()
    _resumed(folder)


def test_another_version_or_cpu_is_no_resumption(tmp_path, monkeypatch):
    folder = _written(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(book, "__version__", "99")
        with pytest.raises(BenchError, match=r"version has changed from .* to '99'"):
            _resumed(folder)
    facts = json.loads((folder / "run.json").read_text())
    facts["host"]["cpu"] = "another"
    (folder / "run.json").write_text(json.dumps(facts))
    with pytest.raises(BenchError, match="cpu has changed from 'another'"):
        _resumed(folder)


def test_another_version_of_what_stamps_or_packs_is_no_resumption(tmp_path):
    folder = _written(tmp_path)
    facts = json.loads((folder / "run.json").read_text())
    facts["versions"]["numpy"] = "1.0"
    (folder / "run.json").write_text(json.dumps(facts))
    with pytest.raises(BenchError, match=r"versions\.numpy has changed from '1\.0'"):
        _resumed(folder)


def test_an_slo_may_change_and_the_last_one_is_kept(tmp_path):
    folder = _written(tmp_path)
    judged = {"settings": ASKED["settings"] | {"slo": "ttft_p95<1s", "deadlines": ""}}
    _resumed(folder, ASKED | judged)
    assert json.loads((folder / "run.json").read_text())["settings"]["slo"] == "ttft_p95<1s"


def test_a_trace_that_was_packed_anew_is_the_same_work(tmp_path):
    folder = _written(tmp_path)
    packed = {"trace": ASKED["trace"] | {"path": "a.jsonl.gz", "bytes": 7, "sha256": "00"}}
    assert _resumed(folder, ASKED | packed).is_done(NAME)


def test_a_run_that_was_moved_can_be_finished(tmp_path):
    folder = _written(tmp_path / "here").rename(tmp_path / "there")
    moved = {"settings": {"out": "there", "seed": 0, "ready_s": 99.0}, "trace": {"path": "../a.jsonl", "rows": 3}}
    run = _resumed(folder, ASKED | moved)
    assert run.is_done(NAME)
    assert run.header({})["settings"]["out"] == "there"


def test_a_changed_trace_or_model_is_named_on_the_command_line(tmp_path):
    model = ["m"]
    answer = llm_server(lambda n, seen: good(seen))

    def listing(number, seen):
        if seen.method == "GET":
            return [(0, http_response(200, json.dumps({"data": [{"id": model[0]}]}).encode()))]
        return answer(number, seen)

    with Scripted(listing) as server:
        trace = trace_file(tmp_path, rows(6))
        assert bench(server.url, tmp_path, trace, "--concurrency", "1").rc == 0
        text = trace.read_text()
        trace.write_text(text.replace(f": {rows(1)[0]['output_length']}", ": 7"))
        assert trace.read_text() != text
        other = bench(server.url, tmp_path, trace, "--concurrency", "1", "--resume")
        trace.write_text(text)
        model[0] = "n"
        served = bench(server.url, tmp_path, trace, "--concurrency", "1", "--resume")
    assert (other.rc, served.rc) == (2, 2)
    assert "hashes.trace has changed" in other.err
    assert "probed.t.model has changed from 'm' to 'n'" in served.err


def test_arrivals_of_another_shape_are_other_work(tmp_path):
    with Scripted(llm_server(lambda n, seen: good(seen))) as server:
        trace = trace_file(tmp_path, rows(6))
        assert bench(server.url, tmp_path, trace, "--rate", "50").rc == 0
        other = bench(server.url, tmp_path, trace, "--rate", "50", "--constant", "--resume")
    assert other.rc == 2
    assert "hashes.loads has changed" in other.err


# ---- a cell whose files are gone; a book that was edited


@pytest.mark.parametrize("workers", [1, 3])
def test_a_done_cell_whose_file_is_gone_is_measured_again(tmp_path, workers):
    folder = _written(tmp_path, workers=workers)
    assert _resumed(folder).is_done(NAME)
    next(folder.glob("*.arrow")).unlink()
    run = _resumed(folder)
    assert not run.is_done(NAME)
    assert run.attempt(NAME) == 1  # with prompts of its own
    assert not list(folder.glob("*.arrow"))


def test_cells_that_are_one_measurement_are_measured_again_together(tmp_path):
    names = ["000-a-c=1-p0", "001-b-c=1-p0", "002-b-c=1-p1", "003-a-c=1-p1"]
    with closing(Book(tmp_path, ASKED)) as run:
        run.begin(PROBED)
        for name in names[:3]:
            run.begin_cell(name, {"target": name[4], "load": {}})
            Writer(tmp_path / f"{name}.arrow", run.header({})).close()
            run.end_cell(name, {"reason": "exhausted"})
    with closing(Book(tmp_path, ASKED, resume=True)) as again:
        again.begin(PROBED, [names[:2], names[2:]])
    assert [again.is_done(name) for name in names] == [True, True, False, False]
    assert [again.attempt(name) for name in names] == [0, 0, 1, 0]
    assert not (tmp_path / f"{names[2]}.arrow").exists()


def test_cells_stand_in_their_order_whenever_they_were_measured(tmp_path):
    run = _resumed(_written(tmp_path, ended=False))
    for name in ("001-t-c=2", NAME):
        run.begin_cell(name, {})
    assert [cell["name"] for cell in json.loads(run.path.read_text())["cells"]] == [NAME, "001-t-c=2"]


def test_nothing_set_aside_is_overwritten(tmp_path):
    folder = _written(tmp_path, ended=False)
    (folder / "partial").mkdir()
    (folder / "partial" / f"0-{NAME}.arrow").write_text("precious")
    _resumed(folder)
    assert (folder / "partial" / f"0-{NAME}.arrow").read_text() == "precious"
    assert (folder / "partial" / f"1-{NAME}.arrow").exists()


def test_a_file_in_the_place_of_partial_is_one_sentence(tmp_path):
    folder = _written(tmp_path, ended=False)
    (folder / "partial").write_text("")
    with pytest.raises(BenchError, match="partial: what unfinished cells left cannot be moved there"):
        _resumed(folder)


ODD = (None, 3, -1.5, True, "x", "", [], [3], [None], {}, {"a": 1}, [{}], [[]])


@pytest.mark.parametrize("key", [
    "run_id", "salt", "host", "settings", "trace", "hashes", "probed", "cells", "set_aside", "resumed", "version",
    "versions", "targets", "declared", "loads", "anchor", "command",
])  # fmt: skip
@pytest.mark.parametrize("value", ODD, ids=repr)
def test_an_edited_book_is_refused_or_resumed(tmp_path, key, value):
    folder = _written(tmp_path)
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(facts | {key: value}))
    _check_refused_or_resumed(folder)


@pytest.mark.parametrize("key", ["name", "end", "load", "file"])
@pytest.mark.parametrize(
    "value", [*ODD, "../x", "run", "a\x00b", {"reason": 3}, {"reason": "exhausted", "workers": "x"}]
)
def test_an_edited_cell_is_refused_or_resumed(tmp_path, key, value):
    folder = _written(tmp_path)
    facts = json.loads((folder / "run.json").read_text())
    facts["cells"][0][key] = value
    (folder / "run.json").write_text(json.dumps(facts))
    _check_refused_or_resumed(folder)


def _check_refused_or_resumed(folder: Path) -> None:
    """Either a sentence that says what to do, or a run that goes on and can be read back."""
    try:
        run = _resumed(folder)
    except BenchError as e:
        refusal = str(e)
    else:
        refusal = "give a new --out"
        run.begin_cell("001-t-c=2", run.header({})["settings"])
        _resumed(folder)
    assert "give a new --out" in refusal


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"[]", b"{", b"[" * 100_000, b'{"cells": 1e999}', b"9" * 5000])
def test_a_book_of_garbage_is_refused(tmp_path, text):
    (tmp_path / "run.json").write_bytes(text)
    with pytest.raises(BenchError, match="cannot be resumed"):
        Book(tmp_path, ASKED, resume=True)


def test_a_cell_that_is_listed_twice_is_refused(tmp_path):
    folder = _written(tmp_path)
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(facts | {"cells": facts["cells"] * 2}))
    with pytest.raises(BenchError, match=f"{NAME} is listed twice; it cannot be resumed"):
        _resumed(folder)


def test_a_folder_in_the_place_of_the_book_is_refused(tmp_path):
    (tmp_path / "run.json").mkdir()
    with pytest.raises(BenchError, match="cannot be resumed"):
        Book(tmp_path, ASKED, resume=True)
    (tmp_path / "run" / "run.part").mkdir(parents=True)
    with pytest.raises(BenchError, match="not empty"):
        Book(tmp_path / "run", ASKED)
