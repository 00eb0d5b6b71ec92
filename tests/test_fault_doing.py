"""Faults are done when they are due, by a process beside, and what came of them is written down; the TCP proxy too."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from llm_bench import fault_doing, faults
from llm_bench.clock import now_ns
from llm_bench.errors import BenchError, TargetError
from llm_bench.fault_doing import allowing, beside, check
from llm_bench.fault_proxy import Net
from llm_bench.faults import Done, Log, parse
from llm_bench.targets import Target
from tests.bench import bench, rows, trace_file
from tests.scripted import Script, Scripted, Seen, http_response, unused_port

QUIET = "http://127.0.0.1:1/v1"


def target(url: str = QUIET, **fields: Any) -> Target:
    return Target("t", url, **fields)


def until(condition: Callable[[], Any]) -> None:
    """Waits for what comes by itself, however busy this machine is."""
    limit_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit_s, "waited in vain"
        time.sleep(0.01)


NEVER = "900s"  # within a cell of these tests


def done(folder: Path, texts: Sequence[str], of: Target) -> Log:
    """What became of faults in a cell that ends when all but those of NEVER have been done."""
    path, soon = faults.path_of(folder, "c"), sum(not text.startswith(NEVER) for text in texts)
    with beside(of, parse(texts), path, lambda text: None) as trouble:
        trouble.begun(now_ns())
        until(lambda: path.exists() and path.read_bytes().count(b"\n") == 1 + soon)
    return faults.read(path)


def test_each_fault_is_done_at_its_time_on_the_runs_clock(tmp_path: Path) -> None:
    with Scripted(lambda n, seen: [(0, http_response(200 if seen.path == "/v1/ok" else 404, b"no such"))]) as server:
        url = server.url
        log = done(tmp_path, [f"100ms:POST {url}/ok {{}}", "200ms:cmd:echo hi", f"50ms:GET {url}/x"], target(url))
    of = {d.what.split()[0]: d for d in log.done}
    assert [d.planned_ns - log.start_ns for d in log.done] == [50_000_000, 100_000_000, 200_000_000]
    assert all(d.begun_ns >= d.planned_ns for d in log.done)
    assert all(d.ended_ns >= d.begun_ns for d in log.done)
    assert (of["POST"].ok, of["POST"].result) == (True, "HTTP 200")
    assert (of["GET"].ok, of["GET"].result) == (False, "HTTP 404 no such")
    assert (of["cmd:echo"].ok, of["cmd:echo"].result) == (True, "exit code 0: hi")
    assert {seen.path for seen in server.requests} == {"/v1/ok", "/v1/x"}
    assert log.added_ms is None


def test_what_fails_is_said_and_harms_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/shell\n")
    script.chmod(0o755)
    texts = ["0s:POST http://127.0.0.1:1/", f"0s:cmd:{script}", "0s:sh:echo a; echo b >&2; exit 3", f"{NEVER}:cmd:true"]
    log = done(tmp_path, texts, target())
    said = {d.what: (d.ok, d.result) for d in log.done}
    assert said["sh:echo a; echo b >&2; exit 3"] == (False, "exit code 3: a b")
    assert said["cmd:true"] == (False, "not done: the cell had ended before")
    assert said[f"cmd:{script}"][1].startswith("FileNotFoundError")
    assert said["POST http://127.0.0.1:1/"][1].startswith("ConnectionRefusedError")
    assert not any(ok for ok, _ in said.values())
    assert [d.begun_ns for d in log.done if d.what == "cmd:true"] == [0]


def test_a_signal_reaches_its_process(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        shell = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
        assert shell.stdout
        try:
            grandchild = int(shell.stdout.readline())
            log = done(tmp_path, [f"0s:signal:TERM:{grandchild}", f"0s:signal:KILL:{other.pid}"], target())
            found = {d.what.split(":")[1]: (d.ok, d.result) for d in log.done}
            assert found["TERM"] == (True, "SIGTERM sent")
            assert found["KILL"] == (False, f"not done: {other.pid} is of this run itself")  # a child of ours
            assert shell.wait(60) in (0, 143)
            assert other.poll() is None
        finally:
            other.kill()
            shell.kill()
            shell.wait()
            shell.stdout.close()


def test_what_was_to_go_on_goes_on_when_the_cell_ends_first(tmp_path: Path) -> None:
    shell = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    assert shell.stdout
    try:
        pid = int(shell.stdout.readline())
        log = done(
            tmp_path, [f"0s:signal:STOP:{pid}", f"{NEVER}:signal:CONT:{pid}", f"{NEVER}:signal:TERM:{pid}"], target()
        )
        assert {d.what.split(":")[1]: d.ok for d in log.done} == {"STOP": True, "CONT": True, "TERM": False}
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T"
    finally:
        os.kill(pid, signal.SIGKILL)
        shell.wait()
        shell.stdout.close()


def test_our_own_process_is_refused_before_any_load() -> None:
    for pid in {os.getpid(), os.getppid()} - {0, 1}:  # a container may have no other parent
        with pytest.raises(BenchError, match="is this run itself"):
            check(parse([f"1s:signal:TERM:{pid}"]), target())


def test_what_this_machine_cannot_do_is_refused_before_any_load(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("no program")
    with subprocess.Popen(["true"]) as gone:
        pass
    for text, why in (
        ("cmd:no-such-program now", "no program 'no-such-program' is found in PATH"),
        (f"cmd:{tmp_path}/none", f"no program '{tmp_path}/none' is found there"),
        (f"cmd:{plain}", f"{plain} cannot be executed"),
        ("sh:kill $(cat pid", "the shell cannot read it"),
        (f"signal:TERM:{gone.pid}", f"there is no process {gone.pid} on this machine"),
    ):
        with pytest.raises(BenchError) as e:
            check(parse([f"1s:{text}"]), target())
        assert str(e.value).startswith(f"--fault {f'1s:{text}'!r}: {why}")
        assert "expected" in str(e.value)


def test_another_users_process_is_refused_before_any_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    with pytest.raises(BenchError, match="4711 belongs to another user"):
        check(parse(["1s:signal:TERM:4711"]), target())


def test_on_the_command_line_that_is_one_sentence_and_nothing_is_sent(tmp_path: Path) -> None:
    with Scripted(lambda n, seen: [(0, http_response(404, b"{}"))]) as server:
        ran = bench(server.url, tmp_path, trace_file(tmp_path, rows(3)), "--rate", "9", "--fault", "1s:cmd:no-such a")
        assert server.requests == []
    assert ran.rc == 2
    assert "--fault '1s:cmd:no-such a': no program 'no-such' is found in PATH" in ran.err
    assert "Traceback" not in ran.err


def test_a_key_goes_to_the_targets_own_host_alone_and_is_written_nowhere(tmp_path: Path) -> None:
    key = "sk-secret-0123456789"

    def echo(_: int, seen: Seen) -> Any:
        return [(0, http_response(500, seen.headers.get("authorization", "none").encode()))]

    with Scripted(echo) as server:
        own = target(server.url, headers={"Authorization": f"Bearer {key}"})
        there = server.url.replace("127.0.0.1", "localhost")
        done(tmp_path, [f"0s:GET {server.url}/a", f"0s:GET {there}/b"], own)
    got = {seen.path: seen.headers.get("authorization") for seen in server.requests}
    assert got == {"/v1/a": f"Bearer {key}", "/v1/b": None}
    assert key not in faults.path_of(tmp_path, "c").read_text()


def test_an_engine_without_faults_is_refused_before_any_load(tmp_path: Path) -> None:
    with Scripted(lambda n, seen: [(0, http_response(404, b"{}"))]) as server:
        with pytest.raises(BenchError, match=r"answers HTTP 404: it serves no faults.*--allow-faults"):
            done(tmp_path, ["0s:engine:crash"], target(server.url))
        assert [seen.path for seen in server.requests] == ["/fault"]
    with pytest.raises(TargetError, match="ConnectError"):
        done(tmp_path, ["0s:engine:crash"], target())


def test_a_fault_of_the_engine_is_planted_at_its_own_address(tmp_path: Path) -> None:
    with Scripted(lambda n, seen: [(0, http_response(200, b"{}"))]) as server:
        log = done(tmp_path, ["0s:engine:stall,seconds=2"], target(server.url))
    assert [d.ok for d in log.done] == [True]
    planted, lifted = server.requests[-2:]
    assert (planted.method, planted.path, planted.json()) == ("POST", "/fault", {"kind": "stall", "seconds": 2})
    assert (lifted.method, lifted.path) == ("DELETE", "/fault")  # or it would be in what the next cell has before


@pytest.fixture(scope="module")
def described() -> bytes:
    """What our engine says of itself."""
    pytest.importorskip("aiohttp")
    from reference_engine import openapi, server

    return json.dumps(openapi.document(list(server.ROUTES), 256, 1000)).encode()


@pytest.mark.parametrize(
    ("order", "why"),
    [
        ("fire", "this engine has no fault 'fire', expected one of oom, memory_pressure, "),
        ("stall,steep=2", "stall has no field 'steep', expected of at_step, steps, seconds"),
        ("stall,seconds=-1", "seconds is -1, expected a number from 0 to 600"),
        ("stall,seconds=long", "seconds is 'long', expected a number"),
        ("stall,seconds=NaN", "seconds is nan, expected a number"),
        ("crash,steps=1.5", "steps is 1.5, expected a whole number from 1 to 1e+06"),
        ("crash,steps=true", "steps is True, expected a whole number"),
        ("http_error,status=404", "status is 404, expected one of 500, 429, 503, reset"),
        ("cut_stream,how=hard", "how is 'hard', expected one of rst, fin, half_chunk"),
    ],
)
def test_an_order_that_the_engine_would_refuse_is_refused_before_any_load(
    tmp_path: Path, described: bytes, order: str, why: str
) -> None:
    def answer(_: int, seen: Seen) -> Script:
        return [(0, http_response(200, described if seen.path == "/openapi.json" else b"{}"))]

    with Scripted(answer) as server:
        with pytest.raises(BenchError) as e:
            done(tmp_path, [f"0s:engine:{order}"], target(server.url))
        assert {seen.method for seen in server.requests} == {"GET"}
        assert why in str(e.value)
        good = ["engine:http_error,status=503,share=0.5", "engine:stall,seconds=2", "engine:cut_stream,how=fin,seed=3"]
        assert all(d.ok for d in done(tmp_path, [f"0s:{text}" for text in good], target(server.url)).done)


def test_our_own_engine_serves_faults_where_it_is_to_have_some() -> None:
    ours = target("", launch=("-m", "reference_engine", "--port", "0"))
    assert allowing(ours, parse(["1s:engine:oom"])).launch[-1] == "--allow-faults"
    assert allowing(ours, parse(["1s:cmd:true"])) == ours
    assert allowing(target(), parse(["1s:engine:oom"])) == target()


@pytest.mark.parametrize(
    ("fields", "why"),
    [({"url": "https://h/v1"}, "is asked by https"), ({"proxy": "http://p:1"}, "through an HTTP proxy")],
)
def test_a_net_fault_is_refused_where_no_proxy_can_stand_between(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(BenchError, match=why):
        check(parse(["1s:net:stall"]), target(**{"url": "http://h/v1", **fields}))


def test_nothing_asked_for_is_nothing_done(tmp_path: Path) -> None:
    with beside(target(), (), tmp_path / "x", print) as trouble:
        trouble.begun(1)
        assert (trouble.urls, trouble.patience_ns) == ((), 0)
    assert not list(tmp_path.iterdir())
    assert fault_doing.ended(tmp_path / "x", ()) == {}


def test_a_lost_or_torn_log_ends_no_run_and_says_what_it_lacks(tmp_path: Path) -> None:
    planned = parse(["0s:cmd:true", "1s:cmd:false"])
    found = faults.of_end(fault_doing.ended(tmp_path / "none", planned))
    assert found is not None
    assert [(d.what, d.ok) for d in found.done] == [("cmd:true", False), ("cmd:false", False)]
    path = tmp_path / "torn"
    there = Done("cmd:true", "cmd", 5, 6, 7, True, "exit code 0")
    head = {"llm_bench_faults": 1, "start_ns": 5, "added_ms": None}
    path.write_text("".join(json.dumps(line) + "\n" for line in (head, there._asdict())) + '{"what"')
    found = faults.of_end(fault_doing.ended(path, planned))
    assert found is not None
    assert [(d.what, d.ok, d.begun_ns) for d in found.done] == [("cmd:true", True, 6), ("cmd:false", False, 0)]
    assert "died before it could say" in found.done[1].result


def test_a_drive_that_never_began_leaves_a_log_of_nothing_done(tmp_path: Path) -> None:
    path = tmp_path / "c.faults.jsonl"
    with beside(target(), parse(["0s:cmd:true"]), path, print):
        pass
    assert [(d.begun_ns, d.ok) for d in faults.read(path).done] == [(0, False)]


# ---- the proxy


@contextmanager
def echo() -> Iterator[int]:
    """A server that sends back what it gets; ends with its connections."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:

        def serve(connection: socket.socket) -> None:
            with connection:
                try:
                    while data := connection.recv(1 << 16):
                        connection.sendall(data)
                except OSError:
                    pass  # reset, as was asked

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def net() -> Iterator[tuple[Net, int]]:
    with echo() as port:
        made = Net([f"http://127.0.0.1:{port}/v1"])
        yield made, int(made.urls[0].split(":")[2].split("/")[0])
        made.close()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 30)


def ping(connection: socket.socket, data: bytes = b"ping", limit_s: float = 30.0) -> float:
    """Seconds of a round trip. Raises OSError, TimeoutError after `limit_s`."""
    connection.settimeout(limit_s)
    begun, left = time.monotonic(), len(data)
    connection.sendall(data)
    while left:
        got = connection.recv(left)
        if not got:
            raise ConnectionError("closed")
        left -= len(got)
    return time.monotonic() - begun


def _answers(connection: socket.socket) -> bool:
    try:
        ping(connection, limit_s=1.0)
    except TimeoutError:
        return False
    return True


def test_the_proxy_forwards_and_its_own_cost_is_known(net: tuple[Net, int]) -> None:
    made, port = net
    assert made.urls == [f"http://127.0.0.1:{port}/v1"]
    assert made.added_ms >= 0
    for _ in range(40):  # a connection's first bytes come before the one to the target is made
        with connect(port) as one:
            ping(one)


def test_both_ways_end_as_they_would_without_it(net: tuple[Net, int]) -> None:
    with connect(net[1]) as one:
        one.sendall(b"last words")
        one.shutdown(socket.SHUT_WR)
        one.settimeout(30)
        said = b""
        while data := one.recv(100):
            said += data
        assert said == b"last words"


def test_much_data_comes_whole(net: tuple[Net, int]) -> None:
    data = os.urandom(1 << 22)
    with connect(net[1]) as one:
        one.settimeout(30)
        sender = threading.Thread(target=one.sendall, args=(data,))
        sender.start()
        got = bytearray()
        while len(got) < len(data):
            got += one.recv(1 << 16)
        sender.join()
    assert bytes(got) == data


def test_a_delay_is_added_each_way_and_lifted(net: tuple[Net, int]) -> None:
    made, port = net
    with connect(port) as one:
        ping(one)
        number = made.order("delay", 0.2)
        assert ping(one) >= 0.4
        made.lift(number)
        until(lambda: ping(one) < 0.4)


def test_a_stall_holds_everything_back_and_loses_nothing(net: tuple[Net, int]) -> None:
    made, port = net
    with connect(port) as one:
        ping(one)
        number = made.order("stall", None)
        with pytest.raises(TimeoutError):
            ping(one, b"held", 0.2)
        made.lift(number)
        one.settimeout(30)
        assert one.recv(10) == b"held"


def test_a_bandwidth_is_that_of_the_whole_line(net: tuple[Net, int]) -> None:
    made, port = net
    number = made.order("bandwidth", 100_000.0)  # bytes a second, each way
    with connect(port) as one:
        begun = time.monotonic()
        one.sendall(b"x" * 30_000)
        one.settimeout(30)
        left = 30_000
        while left:
            left -= len(one.recv(left))
        seconds = time.monotonic() - begun
    made.lift(number)
    assert seconds >= 0.27  # 0.3 s up, and down again meanwhile


def test_drop_refuses_new_connections_and_keeps_old_ones(net: tuple[Net, int]) -> None:
    made, port = net
    with connect(port) as old:
        ping(old)
        number = made.order("drop", "refuse")
        with pytest.raises(ConnectionRefusedError):
            connect(port)
        ping(old)
        made.lift(number)
    with connect(port) as fresh:
        ping(fresh)


def test_a_black_hole_takes_connections_and_answers_nothing(net: tuple[Net, int]) -> None:
    made, port = net
    number = made.order("drop", "blackhole")
    with connect(port) as one:
        with pytest.raises(TimeoutError):
            ping(one, limit_s=0.2)
        made.lift(number)
        one.settimeout(30)
        with pytest.raises(ConnectionResetError):
            one.recv(1)


def test_a_reset_ends_every_connection_at_once(net: tuple[Net, int]) -> None:
    made, port = net
    several = [connect(port) for _ in range(5)]
    for one in several:
        ping(one)
    made.lift(made.order("reset", None))
    for one in several:
        one.settimeout(30)
        with one, pytest.raises(ConnectionResetError):
            one.recv(1)
    with connect(port) as fresh:
        ping(fresh)


def _first_byte(port: int) -> bytes:
    with connect(port) as one:  # the reset may come before this returns
        return one.recv(1)


def test_a_target_that_is_not_there_resets_its_clients() -> None:
    made = Net([f"http://127.0.0.1:{unused_port()}/v1"])
    try:
        with pytest.raises(ConnectionResetError):
            _first_byte(int(made.urls[0].split(":")[2].split("/")[0]))
    finally:
        made.close()


def test_net_faults_last_as_long_as_asked(tmp_path: Path) -> None:
    with echo() as port:
        said: list[str] = []
        path = faults.path_of(tmp_path, "c")
        planned = parse(["0s:net:delay=100ms,for=2s", "5s:net:stall"])
        with beside(target(f"http://127.0.0.1:{port}/v1"), planned, path, said.append) as trouble:
            trouble.begun(now_ns())
            with connect(int(trouble.urls[0].split(":")[2].split("/")[0])) as one:
                until(lambda: ping(one) >= 0.2)
                until(lambda: ping(one) < 0.2)
                until(lambda: not _answers(one))
    log = faults.read(path)
    delay, stall = log.done
    assert delay.ended_ns - delay.begun_ns >= 2e9
    assert (delay.ok, stall.ok, stall.result) == (True, True, "until the cell's end")
    assert log.added_ms is not None
    assert "which adds about" in said[0]
    assert json.loads(json.dumps(fault_doing.ended(path, planned)))["faults"]["done"][0]["ok"] is True


def test_the_log_ends_with_its_parent(tmp_path: Path) -> None:
    """A run that is killed takes what does its faults with it."""
    path = tmp_path / "c.faults.jsonl"
    code = (
        "import sys, time; from pathlib import Path; from llm_bench import clock, fault_doing, faults, targets\n"
        f"t = targets.Target('t', {QUIET!r}); planned = faults.parse(['60s:cmd:true'])\n"
        f"with fault_doing.beside(t, planned, Path({str(path)!r}), print) as trouble:\n"
        "    trouble.begun(clock.now_ns()); print('up', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as run:
        assert run.stdout
        assert run.stdout.readline() == b"up\n"
        run.send_signal(signal.SIGKILL)
    until(lambda: path.exists() and path.read_bytes() and faults.read(path).done)
    assert [d.result for d in faults.read(path).done] == ["not done: the cell had ended before"]
