"""A search on a real socket: cells in a folder, the bracket from them, taken up again, ended by what targets do."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import pytest
from typer.testing import CliRunner

from llm_bench import results, search_report, search_run, shards, targets
from llm_bench.cell import Options
from llm_bench.cli import app
from llm_bench.errors import BenchError
from llm_bench.request import Request
from llm_bench.run import Ended, Job
from llm_bench.search import Answer
from llm_bench.search_run import Search
from tests.bench import Measured, command, environment, good, llm_server, prompt_of, rows, trace_file
from tests.quiet import undisturbed
from tests.scripted import Scripted, Seen, http_response


def quiet(_: str) -> None:
    pass


def measured(server: Scripted) -> int:
    return sum("x-request-id" in r.headers for r in server.requests)


def asked(slo: str, **fields: object) -> Search:
    agreed, guards = search_run.guarded(slo)
    base = Search("concurrency", agreed, guards, budget_s=60.0, most=64.0, requests=120)
    return replace(base, **fields)  # type: ignore[arg-type]


def find(
    server: Scripted, folder: Path, wanted: Search, *, resume: bool = False, lines: list[str] | None = None
) -> tuple[Answer, Ended]:
    trace = folder / "trace.jsonl"
    if not trace.exists():
        trace_file(folder, rows(50))
    job = Job(targets.parse(f"t={server.url}", folder / "none.toml", {}), (), trace, resume=resume)
    say = quiet if lines is None else lines.append
    found, ended = search_run.find(job, Options(out=folder / "run"), wanted, say, quiet)
    return found[-1].answer, ended


class Refusing:
    """Answers after 10 ms; more than `places` at a time are refused."""

    def __init__(self, places: int) -> None:
        self._places, self._lock, self._until_ns = places, threading.Lock(), list[int]()

    def __call__(self, _: int, seen: Seen) -> object:
        with self._lock:
            self._until_ns = [ns for ns in self._until_ns if ns > seen.at_ns]
            if len(self._until_ns) >= self._places:
                return [(0, http_response(503, b"busy"))]
            self._until_ns.append(seen.at_ns + 10_000_000)
        return good(seen, ttft_ms=10.0)


def refusing(places: int) -> Measured:
    return Refusing(places)  # type: ignore[return-value]


def test_a_server_with_five_places_is_found_and_every_cell_is_kept(tmp_path):
    lines: list[str] = []
    with Scripted(llm_server(refusing(5))) as server:
        answer, ended = find(server, tmp_path, asked("error_rate<5%"), lines=lines)
    assert ended == Ended()
    assert answer.met is not None
    assert answer.met.load == 5
    slowed = any("this client was the limit" in p.why for p in answer.points)  # by a neighbour: then nothing is missed
    assert slowed or (answer.missed is not None and answer.missed.load == 6)
    run = results.load_run(tmp_path / "run")
    assert len(run.cells) == sum(len(p.cells) for p in answer.points)
    assert run.missing == []
    assert run.agreed().text == "error_rate<5%"
    assert any("so far: met at 4" in line for line in lines)


def test_what_the_server_says_is_scraped_beside_each_cell(tmp_path):
    def answer(number: int, seen: Seen) -> object:
        if seen.path.startswith("/metrics"):
            return [(0, http_response(200, b"vllm:num_requests_running 2\n"))]
        return served(number, seen)

    served = llm_server(refusing(3))
    with Scripted(answer) as server:  # type: ignore[arg-type]
        given = ["--targets", f"t={server.url}", "--trace", trace_file(tmp_path, rows(50)), "--slo", "error_rate<5%"]
        given += ["--by", "concurrency", "--requests", 120, "--max", 64, "--out", tmp_path / "run"]
        given += ["--metrics-url", "auto", "--scrape-every", 0.1]
        done = CliRunner().invoke(app, ["search", *map(str, given)])
    assert done.exit_code in (0, 3), done.output
    cells = results.load_run(tmp_path / "run").cells
    assert len(cells) > 2
    for m in cells:
        assert m.scraped is not None
        assert m.scraped.replicas[0].points[0].values == {"vllm:num_requests_running": 2.0}


def test_gpus_that_cannot_be_read_are_refused_before_the_target_is_asked(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with Scripted(llm_server(refusing(3))) as server:
        job = Job(targets.parse(f"t={server.url}", tmp_path / "none.toml", {}), (), trace_file(tmp_path, rows(50)))
        with pytest.raises(BenchError, match="--gpu needs nvidia-ml-py"):
            search_run.find(job, Options(out=tmp_path / "run", gpu=True), asked("error_rate<5%"), quiet, quiet)
        assert server.requests == []


def test_no_two_cells_send_the_same_prompt(tmp_path):
    with Scripted(llm_server(refusing(2))) as server:
        find(server, tmp_path, asked("error_rate<5%"))
        said = [prompt_of(r) for r in server.requests if "x-request-id" in r.headers]
    assert len(set(said)) == len(said) > 240


def test_a_search_taken_up_again_goes_on_from_its_cells(tmp_path):
    wanted = asked("error_rate<5%")
    with Scripted(llm_server(refusing(5))) as server:
        first, _ = find(server, tmp_path, replace(wanted, most=4.0))
        assert first.end == "at the cap"
        before = measured(server)
        again, _ = find(server, tmp_path, replace(wanted, most=4.0), resume=True)
        assert measured(server) == before
        assert [p.load for p in again.points] == [p.load for p in first.points]
        whole, _ = find(server, tmp_path, wanted, resume=True)
    assert whole.met is not None
    assert whole.met.load == 5
    assert whole.points[0].cells == first.points[0].cells


@pytest.mark.parametrize(("other", "said"), [
    ({"by": "concurrency"}, "--by has changed"),
    ({"burstiness": None}, "--burstiness or --constant has changed"),
    ({"max_in_flight": 3}, "--max-in-flight has changed"),
])  # fmt: skip
def test_cells_of_other_arrivals_are_no_part_of_a_search(tmp_path, other, said):
    wanted = asked("error_rate<5%", by="rate", start=50.0, least=50.0, most=51.0)
    with Scripted(llm_server(refusing(50))) as server:
        find(server, tmp_path, wanted)
        with pytest.raises(BenchError, match=said):
            find(server, tmp_path, replace(wanted, **other), resume=True)


class OneAtATime:
    """Serves one request after the other, 20 ms each: 50 a second."""

    def __init__(self) -> None:
        self._lock, self._free_ns = threading.Lock(), 0

    def __call__(self, _: int, seen: Seen) -> object:
        with self._lock:
            self._free_ns = max(self._free_ns, seen.at_ns) + 20_000_000
            return good(seen, ttft_ms=(self._free_ns - seen.at_ns) / 1e6)


@undisturbed
def test_a_cell_whose_backlog_grows_is_ended_early_and_is_a_miss(tmp_path):
    tmp_path = Path(mkdtemp(dir=tmp_path))  # of this try
    wanted = asked("ttft_p95<60s", by="rate", start=250.0, least=250.0, most=500.0, requests=1000)
    with Scripted(llm_server(OneAtATime())) as server:  # type: ignore[arg-type]
        answer, _ = find(server, tmp_path, wanted)
    assert (answer.end, answer.points[0].verdict) == ("at the floor", "MISSED")
    assert "backlog grew" in answer.points[0].why
    (cell,) = results.load_run(tmp_path / "run").cells
    assert cell.end["reason"] == "overloaded"
    assert cell.cell.n < 900  # of 1,000: the rest was never due


def test_a_server_that_works_on_for_those_who_left_is_waited_for(tmp_path):
    """Probes have no id of ours, and wait in the same queue here."""
    busy = OneAtATime()

    def answer(number: int, seen: Seen) -> object:
        if seen.method == "GET":
            return llm_server([])(number, seen)
        return busy(number, seen)

    wanted = asked("ttft_p95<10s", by="rate", start=240.0, least=30.0, most=500.0, requests=150, tolerance=1.0)
    with Scripted(answer) as server:  # type: ignore[arg-type]
        found, _ = find(server, tmp_path, wanted)
    lowest, *_, highest = found.points
    assert (highest.load, highest.verdict) == (240, "MISSED")
    assert lowest.load == 30
    assert lowest.verdict != "MISSED"  # one that serves 50 a second serves these, when what it held is gone


def test_a_slo_that_no_load_meets_is_said(tmp_path):
    with Scripted(llm_server([(0, http_response(500, b"broken"))])) as server:
        answer, _ = find(server, tmp_path, asked("ttft_p95<60s"))
    assert (answer.end, search_report.code(answer)) == ("at the floor", 1)


def test_a_target_that_dies_ends_the_search_with_what_was_found(tmp_path):
    served = 0

    def dying(_: int, seen: Seen) -> object:
        nonlocal served
        served += 1
        if served == 300:
            threading.Thread(target=server.__exit__, args=(None, None, None)).start()
        return good(seen, ttft_ms=5.0)

    server = Scripted(llm_server(dying))  # type: ignore[arg-type]
    server.__enter__()
    answer, ended = find(server, tmp_path, asked("error_rate<5%"))
    assert ended.gone == "t"
    assert (answer.end, search_report.code(answer)) == ("target gone", 4)
    assert answer.points  # what was found by then is kept


def test_a_budget_too_small_for_one_cell_is_refused_with_what_it_would_take(tmp_path):
    with Scripted(llm_server(refusing(5))) as server, pytest.raises(BenchError, match=r"--budget 2 s: .* about 120 s"):
        find(server, tmp_path, asked("error_rate<5%", by="rate", start=1.0, budget_s=2.0))


def test_an_slo_always_has_a_limit_on_the_error_rate_and_never_two():
    assert search_run.guarded("ttft_p95<1s")[0].text == "ttft_p95<1s,error_rate<1%"
    assert search_run.guarded("ttft_p95<1s")[1] == 1
    own, guards = search_run.guarded("error_rate<5%,ttft_p95<1s")
    assert (own.text, guards) == ("error_rate<5%,ttft_p95<1s", 0)
    with pytest.raises(BenchError, match="needs a limit"):
        search_run.guarded("")


def test_cells_of_one_load_go_on_in_the_trace_and_tear_no_conversation():
    names = ["", "a", "b", "a", "", "b"]
    turns = [0, 0, 0, 1, 0, 1]
    trace = [
        Request(tokens_in=10, tokens_out=1, session=name, turn=turn, line=i)
        for i, (name, turn) in enumerate(zip(names, turns, strict=True))
    ]
    assert [r.line for r in search_run.rotated(trace, 2)] == [2, 4, 5, 0, 1, 3]
    assert search_run.rotated(trace, 0) == search_run.rotated(trace, 6) == trace


def test_the_run_json_of_a_search_holds_its_cells_in_order(tmp_path):
    with Scripted(llm_server(refusing(2))) as server:
        find(server, tmp_path, asked("error_rate<5%"))
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    names = [cell["name"] for cell in facts["cells"]]
    assert [int(re.match(r"\d+", name)[0]) for name in names] == list(range(len(names)))  # type: ignore[index]
    assert [cell["end"]["place"] for cell in facts["cells"]] == list(range(len(names)))


def test_a_signal_while_a_cell_is_written_ends_the_search_and_the_cell_stands(tmp_path):
    """It is deferred from the end of the drive on; what is said then is of a turn that was not sent."""
    turns = [{"input_length": 10 + 20 * (i % 2), "output_length": 4, "session_id": f"s{i // 2}"} for i in range(100)]
    wanted, book = asked("error_rate<50%", most=1.0), tmp_path / "run" / "run.json"
    handlers = {number: signal.getsignal(number) for number in shards.STOPPING}

    def stopping(line: str) -> None:
        if "later turns were not sent" in line:
            os.kill(os.getpid(), signal.SIGTERM)

    with Scripted(llm_server(lambda n, seen: good(seen) if n else [(0, http_response(500, b"broken"))])) as server:
        declared = targets.parse(f"t={server.url}", tmp_path / "none.toml", {})
        job, options = Job(declared, (), trace_file(tmp_path, turns)), Options(out=tmp_path / "run")
        try:
            found, ended = search_run.find(job, options, wanted, stopping, quiet)
            (cell,) = json.loads(book.read_text())["cells"]
            whole, _ = search_run.find(replace(job, resume=True), options, wanted, quiet, quiet)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    assert (ended.interrupted, found[0].answer.end) == (True, "interrupted")
    assert cell["end"]["reason"] == "exhausted"
    assert whole[0].answer.points[0].cells[0] == cell["name"]
    facts = json.loads(book.read_text())
    assert facts["cells"][0] == cell
    assert "set_aside" not in facts


def test_a_signal_before_the_first_cell_ends_a_search_in_words(tmp_path):
    served = llm_server(lambda n, seen: good(seen))

    def answer(number: int, seen: Seen) -> object:
        if not number:
            searching.send_signal(signal.SIGTERM)
        return served(number, seen)

    with Scripted(answer) as server:  # type: ignore[arg-type]
        searching = subprocess.Popen(
            command("search", "--targets", f"t={server.url}", "--trace", trace_file(tmp_path, rows(50)), "--slo",
                    "error_rate<5%", "--by", "concurrency", "--max", "2", "--out", tmp_path / "run"),
            stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment(),
        )  # fmt: skip
        _, err = searching.communicate(timeout=180)
    assert searching.returncode == 130, err
    assert "interrupted; what was measured before is on disk" in err
    assert json.loads((tmp_path / "run" / "run.json").read_text())["cells"] == []
