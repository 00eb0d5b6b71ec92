"""Cells driven from several hosts. Their agents are processes here; two of them have another clock, another network."""

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench import host_link, host_part, hosts, results, targets
from llm_bench import run as runs
from llm_bench.cell import Cell, Options
from llm_bench.errors import BenchError
from llm_bench.fault_doing import Trouble
from llm_bench.host_link import Hello, Pipe
from llm_bench.plan import Load, Plan
from llm_bench.probe import Ask, Probe
from llm_bench.request import Request
from llm_bench.run import Ended
from tests.bench import environment, good, llm_server, prompt_of, rows, trace_file
from tests.scripted import Scripted

AGENT = (sys.executable, "-m", "llm_bench.host_agent")
MINUTES_21_S = 1260
ELSEWHEN = ("unshare", "--time", "--monotonic", str(MINUTES_21_S), "--fork", *AGENT)


def _works(*command: str) -> bool:
    return (
        shutil.which(command[0]) is not None
        and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


@pytest.fixture(scope="module", autouse=True)
def _left_behind(tmp_path_factory) -> Iterator[None]:
    """What hosts that die leave behind goes where the tests' own files go."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("hosts")))
        yield


@contextmanager
def linked(*commands: Sequence[str]) -> Iterator[list[Pipe]]:
    with ExitStack() as stack:
        links = [Pipe(command, f"h{k}") for k, command in enumerate(commands)]
        for link in links:
            stack.callback(link.close)
        yield links


_ELSEWHEN = _works("unshare", "--time", "--monotonic", "9", "--fork", "true")  # time namespaces: Linux, root


class Ran(NamedTuple):
    ended: Ended
    run: results.Run
    said: list[str]

    @property
    def cell(self) -> Any:
        return self.run.cells[0].cell

    @property
    def end(self) -> Any:
        return self.run.cells[0].end


def measured(url: str, folder: Path, trace: Path, load: Load, links: Sequence[Pipe], **options: Any) -> Ran:
    said: list[str] = []
    fleet = hosts.fleet(links, host_link.greet(links))
    target = targets.parse(f"t={url}", folder / "none.toml", {})
    resume = options.pop("resume", False)
    job = runs.Job(target, [load], trace, workers=len(links), fleet=fleet, resume=resume)
    ended = runs.run(job, Options(out=folder / "run", **options), said.append, lambda text: None)
    return Ran(ended, results.load_run(folder / "run"), said)


def asked_of(server: Scripted) -> list[Any]:
    return [s for s in server.requests if "x-request-id" in s.headers]


# ---- the cut


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 400))
def test_slots_over_hosts_are_the_slots(concurrency, workers, conversations):
    workers = min(workers, concurrency, conversations)
    numbers: list[int] = []
    for k in range(workers):
        mine = range(k, conversations, workers)
        slots = host_part.PartSlots(host_part.PartBoard(np.array(mine)), k, workers, list(mine), concurrency)
        assert 0 < len(slots.numbers) <= len(mine)  # no slot without a conversation, no worker without a slot
        numbers += slots.numbers
    assert len(numbers) == len(set(numbers))
    # Where each has conversations enough, 45 over 8 are 45; no slot is made up in any case.
    assert len(numbers) <= min(concurrency, conversations)
    if conversations >= concurrency + workers:
        assert sorted(numbers) == list(range(concurrency))


def _cell(folder: Path, requests: list[Request], load: Load) -> tuple[Cell, Plan]:
    found = Probe(["m"], "m", None, True, True, True, False, Ask("m"), 4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 10.0, 4, [])
    cell = Cell(Options(out=folder), "ab", 0, targets.Target("t", "http://h/v1"), found, requests, load)
    work = Plan(cell.requests, cell.due_ns, folder / "spool", cell.next_payload)
    work.write(cell.first_payloads(lambda text: None))
    return cell, work


@pytest.mark.parametrize("workers", [1, 3, 5])
def test_parts_together_are_the_plan_and_each_says_what_the_plan_says(tmp_path, workers):
    requests = [Request(tokens_in=9, tokens_out=4, session=f"s{i % 7}" if i < 21 else "", turn=i // 7 if i < 21 else 0)
                for i in range(40)]  # fmt: skip
    cell, work = _cell(tmp_path, requests, Load(concurrency=5))
    seen: list[int] = []
    for k in range(workers):
        job = host_part.cut(cell, work, {"cell": cell.name}, k, workers)
        folder = tmp_path / f"h{k}"
        folder.mkdir()
        (folder / "spool").write_bytes(b"".join(host_part.pieces(work, job)))
        there = host_part.cell_of(job, folder)
        part = host_part.PartPlan(job, there, folder / "spool")
        seen += job.rows.tolist()
        assert part.first == work.first[k::workers]
        for row in job.rows.tolist():
            assert (part.due_ns[row], part.next_turn[row]) == (work.due_ns[row], work.next_turn[row])
            if work._offsets[row] != work._offsets[row + 1]:  # known before the start
                assert part.payload(row, None) == work.payload(row, None)
        assert job.facts == {"cell": cell.name, "worker": k}
        part.close()
    work.close()
    assert sorted(seen) == list(range(40))


def test_a_board_tells_each_row_once():
    board = host_part.PartBoard(np.array([3, 6, 9]))
    board.note(2, 6, 600)
    assert [a.tolist() for a in board.news()] == [[6], [600]]
    board.note(2, 3, 300)
    board.note(2, 9, 900)
    assert [a.tolist() for a in board.news()] == [[3, 9], [300, 900]]
    assert [a.tolist() for a in board.news()] == [[], []]


# ---- what hosts can carry


def hello(name: str = "h", ceiling: float | None = 1000.0, files: int = 10_000, ports: int = 10_000) -> Hello:
    known = None if ceiling is None else {"events_per_s": 10 * ceiling, "requests_per_s": ceiling}
    return Hello(name, {}, known, files, ports)


class Away:
    name, here = "10.0.0.7", False


def test_a_load_up_to_the_sum_of_ceilings_is_taken_and_more_is_refused(tmp_path):
    def at(rate: float, *hellos: Hello) -> None:
        cell, work = _cell(tmp_path, [Request(tokens_in=4, tokens_out=10)] * 50, Load(rate=rate))
        work.close()
        hosts.refuse(cell, [], hellos, Trouble())

    at(499.0, hello())  # 10 tokens and a request at 1,000/s each: 2 ms of a core
    at(1990.0, *[hello()] * 4)
    with pytest.raises(BenchError, match=r"2010/s is 10\d% of what selfcheck found 4 workers to carry, 2000/s"):
        at(2010.0, *[hello()] * 4)
    with pytest.raises(BenchError, match="510/s is 102% of what selfcheck found 1 worker to carry, 500/s"):
        at(510.0, hello())
    with pytest.raises(BenchError, match="2 workers"):
        at(900.0, hello(), hello(ceiling=500.0))  # each has half of the plan: the slower one is the limit
    at(5000.0, hello(ceiling=None))  # not known: no refusal, a doubt
    assert hosts.unknown([hello("a", None), hello("b"), hello("a", None)]) == [
        "what a can carry is not known: run `llm-bench selfcheck` there"
    ]
    assert hosts.mean_ceiling([hello(), hello(ceiling=500.0)]) == {"events_per_s": 7500.0, "requests_per_s": 750.0}
    assert hosts.mean_ceiling([hello(), hello(ceiling=None)]) is None


def test_a_ramp_is_driven_to_the_sum_of_ceilings_and_ends_above_it_with_what_was_measured(tmp_path, trio):
    """Three hosts that are known to carry 20 requests/s each, of 10 tokens: 60 in all."""
    rates = [20.0, 40.0, 59.0, 61.0]
    hellos = [h._replace(ceiling=hello(ceiling=40.0).ceiling) for h in host_link.greet(trio)]
    with Scripted(llm_server(lambda n, seen: good(seen, 5))) as server:
        job = runs.Job(
            targets.parse(f"t={server.url}", tmp_path / "none.toml", {}),
            [Load(rate=rate, burstiness=None) for rate in rates],
            trace_file(tmp_path, rows(30, tokens_out=10)),
            workers=3,
            fleet=hosts.fleet(trio, hellos),
        )
        with pytest.raises(BenchError, match=r"61/s is 10\d% of what selfcheck found 3 workers to carry, 60/s"):
            runs.run(job, Options(out=tmp_path / "run"), lambda text: None, lambda text: None)
        sent = {s.headers["x-request-id"] for s in asked_of(server)}
    driven = results.load_run(tmp_path / "run").cells
    assert len(driven) == 3
    for rate, measured_ in zip(rates, driven, strict=False):
        cell = measured_.cell
        assert (cell["outcome"] == "ok").sum() == cell.n == 30
        assert np.ptp(cell["due_ns"]) == pytest.approx(29e9 / rate, abs=2)
        assert {row["worker"] for row in measured_.end["hosts"]} == {0, 1, 2}
        assert measured_.end["ceiling"] == {"events_per_s": 400.0, "requests_per_s": 40.0}
    assert sent == {name for of in driven for name in of.cell["request_id"]}


def test_what_hosts_cannot_do_is_refused_before_any_load(tmp_path):
    cell, work = _cell(tmp_path, [Request(tokens_in=4, tokens_out=1)] * 50, Load(concurrency=50))
    work.close()
    with pytest.raises(BenchError, match=r"h may open 20 connections .* needs more: 40 slots in all"):
        hosts.refuse(cell, [], [hello(files=20), hello(ports=30)], Trouble())
    with pytest.raises(BenchError, match="its proxy is on this machine alone"):
        hosts.refuse(cell, [], [hello()], Trouble(urls=["http://127.0.0.1:1/v1"]))
    cell.target = targets.Target("t", "http://127.0.0.1:8000/v1")
    with pytest.raises(BenchError, match=r"the host 10.0.0.7 would ask itself"):
        hosts.refuse(cell, [Away()], [hello()], Trouble())  # type: ignore[list-item]


def test_another_version_and_no_agent_are_refused():
    other = "from llm_bench import host_agent; host_agent.__version__ = '0.0'; host_agent.main()"
    with linked((sys.executable, "-c", other)) as links, pytest.raises(BenchError, match="runs another version"):
        host_link.greet(links)
    with linked(("true",)) as links, pytest.raises(BenchError, match=r"h0 does not answer \(its process has ended\)"):
        host_link.greet(links)


# ---- drives


@pytest.fixture(scope="module")
def trio() -> Iterator[list[Pipe]]:
    """Three hosts for tests that leave them alive; the clock of the second is 21 minutes ahead, where that can be."""
    with linked((), ELSEWHEN if _ELSEWHEN else (), ()) as links:
        yield links


def test_an_open_loop_over_hosts_on_one_time_grid_though_a_clock_is_21_minutes_ahead(tmp_path, trio):
    with Scripted(llm_server(lambda n, seen: good(seen, 10))) as server:
        ran = measured(server.url, tmp_path, trace_file(tmp_path, rows(120, gap_s=0.01)), Load(speed=1.0), trio)
        sent = asked_of(server)
    assert ran.ended == Ended()
    cell, end = ran.cell, ran.end
    assert len({prompt_of(s) for s in sent}) == len(sent) == cell.n == 120
    assert cell.complete
    assert {s.headers["x-request-id"] for s in sent} == set(cell["request_id"])
    assert (np.sort(cell["due_ns"]) - end["start_ns"]).tolist() == [10_000_000 * i for i in range(120)]  # to the ns
    assert (cell["sent_ns"] >= cell["due_ns"]).all()
    assert (cell["sent_ns"] - cell["due_ns"]).max() < 2 * 10**9
    assert (cell["end_ns"] >= cell["first_byte_ns"]).all()
    assert end["counts"]["ok"] == 120
    assert (cell.gauge[-1, 1], len(cell.gauge)) == (0, 240)
    clocks = [host["offset_ns"] for host in end["hosts"]]
    truth = [0, MINUTES_21_S * 10**9 if _ELSEWHEN else 0, 0]
    errors = [host["error_ns"] + 1_000_000 * _ELSEWHEN for host in end["hosts"]]  # a namespace is set to a microsecond
    assert all(abs(c - t) <= e for c, t, e in zip(clocks, truth, errors, strict=True))
    assert not {"broken identity", "incomplete file", "ended early", "host clocks"} & {
        d.kind for d in ran.run.doubts[0]
    }


def test_a_closed_loop_over_hosts_has_its_slots_and_one_window(tmp_path, trio):
    with Scripted(llm_server(lambda n, seen: good(seen, 30))) as server:
        trace = trace_file(tmp_path, rows(210))
        ran = measured(server.url, tmp_path, trace, Load(concurrency=7), trio, warmup=14)
        assert server.peak == 7
    assert ran.ended == Ended()
    assert sorted(ran.cell["index"]) == list(range(210))
    assert ran.end["start_ns"] < ran.end["window_open_ns"] < ran.end["window_close_ns"]
    assert (ran.cell["end_ns"] < ran.end["window_open_ns"]).sum() >= 14
    assert ran.run.cells[0].window.opened
    assert not {"broken identity", "idle slots"} & {d.kind for d in ran.run.doubts[0]}


def test_conversations_stay_on_their_host_and_hold_the_servers_own_answers(tmp_path, trio):
    table = [{**row, "session_id": f"s{i % 6}", "turn": i // 6} for i, row in enumerate(rows(18))]
    with Scripted(llm_server(lambda n, seen: good(seen, 5))) as server:
        ran = measured(server.url, tmp_path, trace_file(tmp_path, table), Load(concurrency=4), trio, warmup=0)
        sent = asked_of(server)
    assert (ran.cell["outcome"] == "ok").sum() == 18
    assert ran.end["turns_not_sent"] == 0
    later = [s for s in sent if len(s.json()["messages"]) > 1]
    assert len(later) == 12
    assert all(s.json()["messages"][1] == {"role": "assistant", "content": "w0 w1 w2 w3 "} for s in later)


# ---- nothing is lost by our own side


def _agents_driver(link: Pipe) -> int:
    pid = link.process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@contextmanager
def after(condition: Any, do: Any) -> Iterator[None]:
    """Do something once a condition holds, beside the block."""

    def wait() -> None:
        deadline = time.monotonic() + 60
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.02)
        do()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _accounted(ran: Ran, server: Scripted) -> None:
    cell, end = ran.cell, ran.end
    assert {s.headers["x-request-id"] for s in asked_of(server)} <= set(cell["request_id"])
    assert len(cell["request_id"]) == len(set(cell["request_id"]))
    recorded = dict(zip(*np.unique(cell["outcome"], return_counts=True), strict=True))
    assert {name: count for name, count in end["counts"].items() if count} == recorded
    assert end["cut"] == recorded.get("cut_at_end", 0)


@pytest.mark.parametrize("what", ["driver", "host", "stopped host"])
def test_a_lost_host_is_named_and_what_it_had_begun_is_accounted_for(tmp_path, what, monkeypatch):
    monkeypatch.setattr(hosts, "LOST_S", 4.0)
    with Scripted(llm_server(lambda n, seen: good(seen, 30))) as server, linked((), ()) as links:

        def kill() -> None:
            host, driver = links[1].process.pid, _agents_driver(links[1])
            os.kill(driver if what == "driver" else host, signal.SIGSTOP if what == "stopped host" else signal.SIGKILL)
            if what == "stopped host":  # a host that is gone takes its driver with it; this one cannot tell of it
                with suppress(ProcessLookupError):
                    os.kill(driver, signal.SIGKILL)

        begun: list[float] = []
        with after(lambda: len(asked_of(server)) > 60, lambda: (begun.append(time.monotonic()), kill())):
            trace = trace_file(tmp_path, rows(1000, gap_s=0.02))
            ran = measured(server.url, tmp_path, trace, Load(speed=1.0), links)
        assert time.monotonic() - begun[0] < 40
        if what == "stopped host":
            os.kill(links[1].process.pid, signal.SIGCONT)
    assert ran.ended.died.startswith("worker 1 ")
    assert ("killed by signal 9" if what == "driver" else "lost with its host h1 (") in ran.ended.died
    assert any(line.startswith("000-t-replay-x1: worker 1 ") for line in ran.said)
    assert any("lost with worker 1" in error for error in ran.cell["error"])
    _accounted(ran, server)
    assert [host["lost"] for host in ran.end["hosts"]] == [False, what != "driver"]
    assert "ended early" in {d.kind for d in ran.run.doubts[0]}


def test_a_run_whose_host_was_lost_is_resumed(tmp_path):
    trace = trace_file(tmp_path, rows(90, gap_s=0.02))
    with Scripted(llm_server(lambda n, seen: good(seen, 10))) as server:
        with linked((), ()) as links, after(
            lambda: len(asked_of(server)) > 20, lambda: os.kill(links[0].process.pid, signal.SIGKILL)
        ):  # fmt: skip
            ran = measured(server.url, tmp_path, trace, Load(speed=1.0), links)
        assert ran.ended.died
        with linked((), ()) as links:
            again = measured(server.url, tmp_path, trace, Load(speed=1.0), links, resume=True)
    assert again.ended == Ended()
    assert (again.cell["outcome"] == "ok").sum() == 90
    assert list((tmp_path / "run" / "partial").iterdir())


def test_an_interrupted_run_is_cut_and_written_on_every_host(tmp_path, trio):
    with Scripted(llm_server(lambda n, seen: good(seen, 30))) as server, after(
        lambda: len(asked_of(server)) > 40, lambda: os.kill(os.getpid(), signal.SIGINT)
    ):  # fmt: skip
        ran = measured(server.url, tmp_path, trace_file(tmp_path, rows(4000)), Load(concurrency=6), trio)
    assert ran.ended == Ended(interrupted=True)
    assert ran.end["reason"] == "interrupted"
    assert (ran.cell["outcome"] == "ok").sum() > 20
    assert ran.cell.complete
    _accounted(ran, server)


def test_a_full_disk_here_is_one_sentence_and_hosts_keep_what_they_have(tmp_path, capfd):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    trace = trace_file(tmp_path, rows(3000, tokens_out=20))
    with Scripted(llm_server(lambda n, seen: good(seen, 20))) as server, linked((), ()) as links:
        limit = (120_000, before[1])
        with after(lambda: len(asked_of(server)) > 30, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)):
            try:
                with pytest.raises(BenchError, match=r"File too large; what was measured before is readable there"):
                    measured(server.url, tmp_path, trace, Load(concurrency=4), links, warmup=3000)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
    here = results.load_run(tmp_path / "run").cells[0].cell
    assert 10 < here.n < 3000
    said = [line for line in capfd.readouterr().err.splitlines() if "what was measured is in" in line]
    kept = [Path(line.rpartition(" ")[2]) for line in said]
    assert len(kept) == 2
    there = [results.records.read(next(folder.glob("*.arrow"))) for folder in kept]
    assert set(here["request_id"]) < {name for cell in there for name in cell["request_id"]}
    for folder in kept:
        assert not (folder / "spool").exists()
        shutil.rmtree(folder)


def test_a_full_disk_on_a_host_is_named_with_it(tmp_path):
    small = ("bash", "-c", f"ulimit -f 120 && exec {' '.join(AGENT)}")
    with Scripted(llm_server(lambda n, seen: good(seen, 2))) as server, linked((), small) as links:
        trace = trace_file(tmp_path, rows(400, tokens_out=100))
        with pytest.raises(BenchError, match="File too large; what was measured before is readable there"):
            measured(server.url, tmp_path, trace, Load(concurrency=2), links, warmup=0)
    cell = results.load_run(tmp_path / "run").cells[0].cell
    assert len(cell["index"]) == len(set(cell["index"])) > 10
    assert any("lost with worker 1, failed" in error for error in cell["error"])


PARENT = """
import sys
from pathlib import Path
from llm_bench.plan import Load
from tests.test_hosts import linked, measured
with linked((), ()) as links:
    print(*(link.process.pid for link in links), flush=True)
    measured(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), Load(speed=1.0), links)
"""


def test_of_a_killed_parent_records_are_readable_and_no_host_goes_on(tmp_path):
    trace = trace_file(tmp_path, rows(2000, gap_s=0.02))
    with Scripted(llm_server(lambda n, seen: good(seen, 10))) as server:
        command = [sys.executable, "-c", PARENT, server.url, str(tmp_path), str(trace)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
            cwd=Path(__file__).parents[1],
        ) as parent:  # fmt: skip
            assert parent.stdout and parent.stderr
            agents = [int(pid) for pid in parent.stdout.readline().split()]
            deadline = time.monotonic() + 30
            while len(asked_of(server)) < 150 and time.monotonic() < deadline:
                time.sleep(0.02)
            parent.kill()
            said = parent.stderr.read()  # until the agents are gone too
        assert not any(_runs(pid) for pid in agents)
        sent = {s.headers["x-request-id"] for s in asked_of(server)}
    kept = [
        Path(line.rpartition(" ")[2]) for line in said.splitlines() if "the run that asked this host is gone" in line
    ]
    assert len(kept) == 2
    here = results.load_run(tmp_path / "run").cells[0].cell
    assert here.n > 20
    there = [results.records.read(next(folder.glob("*.arrow"))) for folder in kept]
    recorded = {i: ns for cell in there for i, ns in zip(cell["request_id"], cell["first_byte_ns"], strict=True)}
    assert recorded.keys() >= sent  # whole, on their hosts
    assert not any(recorded[i] for i in recorded.keys() - sent)  # cut before the server had read them
    assert set(here["request_id"]) <= sent
    for folder in kept:
        shutil.rmtree(folder)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


# ---- two networks


@contextmanager
def namespaces(count: int) -> Iterator[list[str]]:
    """Network namespaces of their own, each with a pair of addresses 198.18.k.1 (ours) and .2; RFC 2544's range."""
    names = [f"llm-bench-{os.getpid()}-{k}" for k in range(count)]
    with ExitStack() as stack:
        for k, name in enumerate(names):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            ours, theirs = f"lb{os.getpid() % 10**6}a{k}", f"lb{os.getpid() % 10**6}b{k}"
            _ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name)
            _ip("addr", "add", f"198.18.{k}.1/24", "dev", ours)
            _ip("link", "set", ours, "up")
            _ip("-n", name, "addr", "add", f"198.18.{k}.2/24", "dev", theirs)
            _ip("-n", name, "link", "set", theirs, "up")
            _ip("-n", name, "route", "add", "default", "via", f"198.18.{k}.1")
        yield names


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no network namespaces on this machine: ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.mark.skipif(not shutil.which("ip"), reason="no `ip` on this machine")
def test_hosts_with_networks_of_their_own(tmp_path):
    with namespaces(2) as names, ExitStack() as stack:
        server = Scripted(llm_server(lambda n, seen: good(seen, 10)))
        server._socket.close()
        server._socket = socket.create_server(("198.18.0.1", 0), backlog=4096)
        server.url = f"http://198.18.0.1:{server._socket.getsockname()[1]}/v1"
        stack.enter_context(server)
        links = stack.enter_context(linked(*(("ip", "netns", "exec", name, *AGENT) for name in names)))
        for link in links:
            link.here = False
        ran = measured(server.url, tmp_path, trace_file(tmp_path, rows(60, gap_s=0.01)), Load(speed=1.0), links)
    assert ran.ended == Ended()
    assert (ran.cell["outcome"] == "ok").sum() == 60
    assert [host["name"] for host in ran.end["hosts"]] == ["h0", "h1"]
