"""Several processes, one measurement; runs that are finished later; the client's own limits. On the command line."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from llm_bench import calibration, clock, probe, records, results, selfcheck, settling, shards, targets
from llm_bench.beside import TICK_S
from llm_bench.cell import Cell, Options
from llm_bench.measure import measure
from llm_bench.plan import Load
from llm_bench.request import Request
from llm_bench.sizing import announcement, crew
from tests.bench import bench, command, environment, good, llm_server, prompt_of, rows, trace_file
from tests.scripted import Script, Scripted, Seen, http_response


@pytest.mark.parametrize(("concurrency", "workers"), [(45, 8), (3, 8), (1, 8)])
def test_concurrency_over_workers_is_the_concurrency(tmp_path, concurrency, workers):
    with Scripted(llm_server(lambda n, seen: good(seen, 150))) as server:
        trace = trace_file(tmp_path, rows(9 * concurrency))
        ran = bench(
            server.url, tmp_path, trace, "--concurrency", f"{concurrency}", "--workers", f"{workers}",
            "--metrics", "in_flight,error_rate",
        )  # fmt: skip
        assert server.peak == concurrency
    assert ran.rc == 0, ran.err
    cell = records.read_cell(ran.folder, ran.cell()["name"])
    assert cell.n == 9 * concurrency
    assert sorted(cell["index"]) == list(range(9 * concurrency))  # each request once, whoever sent it
    assert (cell["outcome"] == "ok").all()
    assert ran.value("in_flight") == pytest.approx(concurrency, rel=0.1)
    assert "broken identity" not in {d["kind"] for d in ran.cell()["doubts"]}


def test_an_open_loop_is_shared_without_a_request_lost_or_sent_twice(tmp_path):
    with Scripted(llm_server(lambda n, seen: good(seen, 10))) as server:
        trace = trace_file(tmp_path, rows(120, gap_s=0.01))
        ran = bench(server.url, tmp_path, trace, "--replay", "--workers", "3", "--warmup", "0")
        sent = [s for s in server.requests if "x-request-id" in s.headers]
    assert ran.rc == 0, ran.err
    cell = records.read_cell(ran.folder, ran.cell()["name"])
    assert len(sent) == len({prompt_of(s) for s in sent}) == cell.n == 120
    due_ms = (np.sort(cell["due_ns"]) - cell["due_ns"].min()) / 1e6
    assert due_ms.tolist() == pytest.approx([10.0 * i for i in range(120)])  # one clock, one start
    assert len(list(ran.folder.glob("*.arrow"))) == 3


def _running(folder: Path, url: str, *more: str):
    trace = trace_file(folder, rows(4000))
    return subprocess.Popen(
        command("run", "--targets", f"t={url}", "--trace", trace, "--concurrency", "6", "--out", folder / "run",
                "--format", "json", *more),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment(),
    )  # fmt: skip


def _children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _wait(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_a_killed_worker_is_named_and_what_it_had_begun_is_accounted_for(tmp_path):
    with Scripted(llm_server(lambda n, seen: good(seen, 30))) as server:
        running = _running(tmp_path, server.url, "--workers", "3")
        _wait(lambda: sum("x-request-id" in s.headers for s in server.requests) > 60)
        os.kill(_children(running.pid)[1], signal.SIGKILL)
        begun = time.monotonic()
        out, err = running.communicate(timeout=180)
        assert time.monotonic() - begun < 30  # 4,000 requests take longer
        sent = [s.headers["x-request-id"] for s in server.requests if "x-request-id" in s.headers]
    assert running.returncode == 5, err
    assert "worker 1 killed by signal 9" in err
    assert "Traceback" not in err
    document = json.loads(out.splitlines()[-1])["runs"][0]
    cell = records.read_cell(tmp_path / "run", document["cells"][0]["name"])
    assert sorted(set(sent) - set(cell["request_id"])) == []  # all that the server saw has a record
    assert len(cell["request_id"]) == len(set(cell["request_id"]))
    lost = [error for error in cell["error"] if "lost with worker 1" in error]
    assert len(lost) >= 1
    assert set(cell["outcome"]) <= {"ok", "cut_at_end", "dropped"}
    assert document["cells"][0]["end"]["reason"] == "worker 1 killed by signal 9"
    assert document["cells"][0]["doubts"]
    end = document["cells"][0]["end"]
    recorded = dict(zip(*np.unique(cell["outcome"], return_counts=True), strict=True))
    assert {name: count for name, count in end["counts"].items() if count} == recorded  # the dead worker's too
    assert end["cut"] == recorded.get("cut_at_end", 0)


def test_workers_cut_and_write_when_the_run_is_interrupted(tmp_path):
    with Scripted(llm_server(lambda n, seen: good(seen, 30))) as server:
        running = _running(tmp_path, server.url, "--workers", "2")
        _wait(lambda: sum("x-request-id" in s.headers for s in server.requests) > 40)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=180)
    assert running.returncode == 130, err
    cell = json.loads(out.splitlines()[-1])["runs"][0]["cells"][0]
    assert cell["end"]["reason"] == "interrupted"
    pooled = records.read_cell(tmp_path / "run", cell["name"])
    assert (pooled["outcome"] == "ok").sum() > 20
    assert "broken identity" not in {d["kind"] for d in cell["doubts"]}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_two_cells_ends_the_run_and_the_first_cell_stands(tmp_path, number):
    """Where a closed uvloop has left its handlers, which tell nobody: at what is asked after a cell that cut one."""
    ours = 0

    def answer(n: int, seen: Seen) -> Script:
        nonlocal ours
        ours += "x-request-id" in seen.headers
        if ours == 6 and "x-request-id" not in seen.headers:
            running.send_signal(number)
            ours += 1  # once
        return served(n, seen)

    served = llm_server(lambda n, seen: ["hang"] if n % 6 == 5 else good(seen))
    with Scripted(answer) as server:
        running = subprocess.Popen(
            command("run", "--targets", f"t={server.url}", "--trace", trace_file(tmp_path, rows(6)), "--repeat", "10",
                    "--concurrency", "1", "--workers", "1", "--drain", "0.1", "--out", tmp_path / "run"),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment(),
        )  # fmt: skip
        _, err = running.communicate(timeout=120)
    assert running.returncode == 130, err
    assert "Traceback" not in err
    (cell,) = json.loads((tmp_path / "run" / "run.json").read_text())["cells"]
    assert (cell["end"]["reason"], cell["end"]["cut"]) == ("exhausted", 1)


def test_a_signal_is_deferred_from_the_end_of_a_drive_until_the_book_has_it(tmp_path):
    before = {number: signal.getsignal(number) for number in shards.STOPPING}
    try:
        with Scripted(llm_server(lambda n, seen: good(seen))) as server:
            end = measure(_cell(server.url, tmp_path, 6, 1), {}, lambda text: None, lambda text: None)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            shards.hear_signals()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        shards.hear_signals()  # once is enough
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert end["reason"] == "exhausted"


def test_a_second_interrupt_kills_a_worker_that_does_not_end_and_the_run_counts_as_interrupted(tmp_path):
    with Scripted(llm_server(lambda n, seen: good(seen, 30))) as server:
        running = _running(tmp_path, server.url, "--workers", "2")
        _wait(lambda: sum("x-request-id" in s.headers for s in server.requests) > 40)
        os.kill(_children(running.pid)[1], signal.SIGSTOP)
        running.send_signal(signal.SIGINT)
        time.sleep(0.8)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=180)
    assert running.returncode == 130, err
    assert "worker 1 killed by signal 9" in err
    assert "Traceback" not in err
    cell = json.loads(out.splitlines()[-1])["runs"][0]["cells"][0]
    assert cell["end"]["reason"] == "interrupted"
    pooled = records.read_cell(tmp_path / "run", cell["name"])
    assert any("lost with worker 1" in error for error in pooled["error"])
    assert sum(cell["end"]["counts"].values()) == pooled.n


def test_a_resumed_run_measures_what_is_missing_and_nothing_twice(tmp_path):
    trace = trace_file(tmp_path, rows(60))
    arguments = ("--concurrency", "1,2,3", "--seed", "4")
    with Scripted(llm_server(lambda n, seen: good(seen, 5))) as server:
        whole = bench(server.url, tmp_path, trace, *arguments)
        assert whole.rc == 0, whole.err
        names = [cell["name"] for cell in whole.document["cells"]]
        book = whole.folder / "run.json"
        facts = json.loads(book.read_text())
        facts["cells"][1]["end"] = {"reason": "interrupted"}  # as a Ctrl-C in the second cell leaves it,
        del facts["cells"][2]  # and the third never begun
        book.write_text(json.dumps(facts))
        (whole.folder / f"{names[2]}.arrow").unlink()
        (whole.folder / f"{names[2]}.gauge.npy").unlink()
        kept = (whole.folder / f"{names[0]}.arrow").read_bytes()
        before = {prompt_of(s) for s in server.requests if "x-request-id" in s.headers}
        count = len(server.requests)
        again = bench(server.url, tmp_path, trace, *arguments, "--resume")
        later = [s for s in server.requests[count:] if "x-request-id" in s.headers]
    assert again.rc == 0, again.err
    assert f"{names[0]}: done before" in again.err
    assert (whole.folder / f"{names[0]}.arrow").read_bytes() == kept
    assert [cell["name"] for cell in again.document["cells"]] == names
    assert len(later) == 120  # two cells of 60
    redone = [s for s in later if "-1-1-" in s.headers["x-request-id"]]
    assert len(redone) == 60
    assert not {prompt_of(s) for s in redone} & before  # the cut cell's prompts may be in the server's cache
    assert [p.name for p in (whole.folder / "partial").iterdir()]
    nothing_left = bench("http://127.0.0.1:9/v1", tmp_path, trace, *arguments, "--resume", "--ready-timeout", "0.1")
    assert nothing_left.rc != 0  # another URL is another run


def test_a_run_is_resumed_only_as_it_was_begun(tmp_path):
    trace = trace_file(tmp_path, rows(8))
    with Scripted(llm_server(lambda n, seen: good(seen))) as server:
        bench(server.url, tmp_path, trace, "--concurrency", "1")
        other = bench(server.url, tmp_path, trace, "--concurrency", "1", "--retries", "2", "--resume")
        assert other.rc == 2
        assert "settings.retries has changed from 0 to 2" in other.err
        more = bench(server.url, tmp_path, trace, "--concurrency", "1,2", "--resume")
        assert more.rc == 2
        assert "loads has changed" in more.err
        same = bench(server.url, tmp_path, trace, "--concurrency", "1", "--resume")
    assert same.rc == 0, same.err
    assert "done before" in same.err


def test_a_book_that_is_none_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"cells": 3}')
    ran = bench("http://127.0.0.1:9/v1", tmp_path, trace_file(tmp_path, rows(2)), "--concurrency", "1", "--resume")
    assert ran.rc == 2
    assert "cannot be resumed" in ran.err


def test_the_drain_is_kept_by_a_worker_whose_requests_hang_while_others_take_the_rest(tmp_path):
    with Scripted(llm_server(lambda n, seen: ["hang"] if n == 0 else good(seen, 20))) as server:
        begun = time.monotonic()
        ran = bench(
            server.url, tmp_path, trace_file(tmp_path, rows(20)), "--concurrency", "2", "--workers", "2",
            "--drain", "0.5",
        )  # fmt: skip
        assert time.monotonic() - begun < 45
    cell = records.read_cell(ran.folder, ran.cell()["name"])
    assert sorted(cell["outcome"]) == ["cut_at_end"] + ["ok"] * 19


def test_a_full_disk_in_a_worker_is_one_sentence_and_what_was_begun_is_accounted_for(tmp_path):
    trace = trace_file(tmp_path, rows(240, tokens_out=100))
    with Scripted(llm_server(lambda n, seen: good(seen, 5))) as server:
        line = " ".join(
            command("run", "--targets", f"t={server.url}", "--trace", trace, "--concurrency", "2", "--workers", "2",
                    "--out", tmp_path / "run", "--warmup", "0")
        )  # fmt: skip
        done = subprocess.run(
            ["bash", "-c", f"ulimit -f 120 && exec {line}"], capture_output=True, text=True, check=False, cwd=tmp_path,
            env=environment(), timeout=180,
        )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "File too large; what was measured before is readable there" in done.stderr
    assert "Traceback" not in done.stderr
    cell = records.read_cell(tmp_path / "run", next(iter(records.files_of(tmp_path / "run"))))
    assert len(cell["index"]) == len(set(cell["index"])) > 10
    assert any("failed" in error for error in cell["error"])


# ---- the client's own limits


def _cell(
    url: str, out: Path, requests: int, load: Load | int, tokens: int = 4, prompts_of: Sequence[int] = ()
) -> Cell:
    load = Load(concurrency=load) if isinstance(load, int) else load
    target = targets.Target("t", url)
    found = probe.probe(target, lambda text: None, 5.0)
    rows_ = [Request(tokens_in=8, tokens_out=tokens) for _ in range(requests)]
    rows_ += [Request(tokens_in=8, tokens_out=tokens, prompt="x" * size) for size in prompts_of]
    return Cell(Options(out=out), "x", 0, target, found, rows_, load)


def test_a_loop_that_is_blocked_makes_the_cell_client_limited(tmp_path):
    def live(text: str) -> None:  # called in the event loop, four times a second
        if text:
            time.sleep(0.03)

    with Scripted(llm_server(lambda n, seen: good(seen, 400))) as server:
        cell = _cell(server.url, tmp_path, 16, 2)
        end = measure(cell, {}, lambda text: None, live)
    assert end["loop_lag_p99_ms"] > 10
    long = [ms for at_ns, ms in end["loop_stalls"] if at_ns > end["start_ns"] and ms > 10]
    assert len(long) == len(end["loop_stalls"])
    assert len(long) >= 2
    (tmp_path / "run.json").write_text(json.dumps({"cells": [{"name": cell.name, "end": end}]}))
    assert results.verdict(results.load_run(tmp_path)).client_limited


def test_auto_workers_follow_the_load_and_the_calibration(tmp_path, monkeypatch):
    monkeypatch.setattr("llm_bench.sizing.cores", lambda: 9)
    monkeypatch.setattr(calibration, "ceiling", lambda: {"events_per_s": 1000.0, "requests_per_s": 1000.0})
    with Scripted(llm_server(lambda n, seen: good(seen, 30, 10))) as server:
        small, large = _cell(server.url, tmp_path, 10, 1), _cell(server.url, tmp_path, 5000, 500)
    assert crew(small, 0) == 1
    assert crew(large, 0) == 8  # all but one core
    assert crew(large, 3) == 3
    assert crew(small, 3) == 1  # one slot cannot be shared


def test_a_cap_is_held_by_one_worker_and_it_says_so(tmp_path):
    with Scripted(llm_server(lambda n, seen: good(seen))) as server:
        cell = _cell(server.url, tmp_path, 100, Load(rate=1000.0, max_in_flight=8))
    assert (crew(cell, 3), crew(cell, 0)) == (1, 1)
    assert any("a cap is held by one worker" in line for line in announcement(cell, 1, 3))
    assert not any("a cap is held" in line for line in announcement(cell, 1, 0))


def test_the_share_of_a_core_is_of_the_time_in_which_it_sent(tmp_path):
    """One straggler, 3 s long, must not make a busy client look idle."""
    with Scripted(llm_server(lambda n, seen: good(seen, 3000 if n == 0 else 2))) as server:
        cell = _cell(server.url, tmp_path, 300, 8)
        end = measure(cell, {}, lambda text: None, lambda text: None)
    sending_s = (records.read(tmp_path / f"{cell.name}.arrow")["sent_ns"].max() - end["start_ns"]) / 1e9
    # Its last look while it sent is up to a tick later, and some of the CPU time is of after it: half of it is plenty.
    assert end["client_cpu_share"] > 0.5 * end["client_cpu_s"] / (sending_s + 2 * TICK_S)


def test_a_calibration_counts_on_this_machine_and_version_only(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibration.ceiling() is None
    calibration.save({}, {"events_per_s": 10.0, "requests_per_s": 5.0})
    assert calibration.ceiling() == {"events_per_s": 10.0, "requests_per_s": 5.0}
    document = json.loads(calibration.store().read_text())
    for changed in ({"version": "0"}, {"host": {"cpu": "another"}}, {"ceiling": {"events_per_s": "x"}}):
        calibration.store().write_text(json.dumps(document | changed))
        assert calibration.ceiling() is None


def test_selfcheck_compares_with_the_servers_own_stamps():
    steps = {
        "few": selfcheck.Step(Load(concurrency=4), 12, 6, 30.0, 10.0),
        "fast": selfcheck.Step(Load(rate=200.0), 40, 1),
    }
    found = selfcheck.run(steps, lambda text: None, lambda text: None)
    few, fast = found["few"], found["fast"]
    assert (few.ok, few.failed, fast.ok, fast.failed) == (12, 0, 40, 0)
    assert few.ttft_error_ms is not None
    assert few.gap_error_ms is not None
    # After the server's write, by the kernel's stamps: how busy this machine is adds little to a median.
    assert 0 < few.ttft_error_ms[0] < 25
    assert 0 <= few.gap_error_ms[0] < 25
    assert fast.ttft_error_ms is None  # all at once: there is no time to compare
    assert fast.lag_ms[0] >= 0
    assert few.cpu_per_1k_events_s > 0
    assert [row[0] for row in selfcheck.rows(found)] == ["few", "fast"]


def test_a_file_limit_too_low_is_one_sentence_that_names_it(tmp_path):
    trace = trace_file(tmp_path, rows(3000))
    line = " ".join(command("run", "--targets", "null", "--trace", trace, "--concurrency", "2000", "--workers", "1"))
    done = subprocess.run(
        ["bash", "-c", f"ulimit -n 200 && exec {line}"], capture_output=True, text=True, check=False, cwd=tmp_path,
        env=environment(),
    )  # fmt: skip
    assert done.returncode == 2
    assert "200" in done.stderr
    assert "ulimit -n" in done.stderr
    assert "Traceback" not in done.stderr


def test_2000_streams_on_one_worker_without_an_error(tmp_path):
    trace = trace_file(tmp_path, rows(6000, tokens_out=8))
    done = subprocess.run(
        command("run", "--targets", "null", "--trace", trace, "--concurrency", "2000", "--workers", "1",
                "--out", tmp_path / "run", "--format", "json", "--warmup", "0"),
        capture_output=True, text=True, check=False, cwd=tmp_path, env=environment(), timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cell = records.read(next((tmp_path / "run").glob("*.arrow")))
    assert cell.n == 6000
    assert (cell["outcome"] == "ok").all()


def test_prompts_of_a_mebibyte_are_made_before_the_clock_starts_and_arrive_whole(tmp_path):
    sizes = [1 << 20 if i % 4 == 0 else 100 for i in range(24)]
    made_ns = []
    with Scripted(llm_server(lambda n, seen: good(seen, 20))) as server:
        cell = _cell(server.url, tmp_path, 0, 8, prompts_of=sizes)
        encode = cell.dialect.encode
        cell.dialect = cell.dialect._replace(encode=lambda *what: (made_ns.append(clock.now_ns()), encode(*what))[1])
        end = measure(cell, {}, lambda text: None, lambda text: None)
        arrived = [prompt_of(seen) for seen in server.requests if "x-request-id" in seen.headers]
    assert end["counts"]["ok"] == len(made_ns) == 24
    assert max(made_ns) < end["start_ns"]
    assert sorted(map(len, arrived)) == sorted(sizes)
    written = records.read(tmp_path / f"{cell.name}.arrow")
    assert (np.sort(written["bytes_out"])[-6:] > 1 << 20).all()


# ---- several addresses of one target; between cells


def test_the_addresses_of_one_target_are_asked_in_turn(tmp_path):
    with (
        Scripted(llm_server(lambda n, seen: good(seen, 5))) as one,
        Scripted(llm_server(lambda n, seen: good(seen, 5))) as two,
    ):
        ran = bench(f"{one.url}|{two.url}", tmp_path, trace_file(tmp_path, rows(30)), "--concurrency", "2")
        shares = [sum("x-request-id" in s.headers for s in server.requests) for server in (one, two)]
    assert ran.rc == 0, ran.err
    assert shares == [15, 15]
    assert (ran.records()["outcome"] == "ok").all()


def test_workers_begin_their_turn_at_different_addresses(tmp_path):
    with (
        Scripted(llm_server(lambda n, seen: good(seen, 2500))) as one,
        Scripted(llm_server(lambda n, seen: good(seen, 2500))) as two,
    ):
        bench(f"{one.url}|{two.url}", tmp_path, trace_file(tmp_path, rows(2)), "--concurrency", "2", "--workers", "2")
        shares = [sum("x-request-id" in s.headers for s in server.requests) for server in (one, two)]
    assert shares == [1, 1]


def test_a_second_address_that_is_not_there_ends_the_run_before_any_load(tmp_path):
    with Scripted(llm_server(lambda n, seen: good(seen))) as server:
        trace = trace_file(tmp_path, rows(3))
        ran = bench(
            f"{server.url}|http://127.0.0.1:9/v1", tmp_path, trace, "--concurrency", "1", "--ready-timeout", "0.2"
        )
        assert ran.rc == 4
        assert "127.0.0.1:9" in ran.err
        assert not [s for s in server.requests if "x-request-id" in s.headers]


def _telling(running: list[float]):
    """A server whose /metrics gives the next of `running`, the last for ever."""
    answer = llm_server(lambda n, seen: good(seen, 500))

    def told(number, seen):
        if seen.path == "/metrics":
            now = running.pop(0) if len(running) > 1 else running[0]
            return [(0, http_response(200, f'# HELP x\nvllm:num_requests_running{{m="a"}} {now}\n'.encode()))]
        return answer(number, seen)

    return told


@pytest.mark.parametrize(("running", "said"), [([2.0, 1.0, 0.0], ""), ([3.0], "still works on 3 requests")])
def test_the_next_cell_waits_until_the_target_has_let_go_of_what_was_cut(tmp_path, monkeypatch, running, said):
    with Scripted(_telling(running)) as server:
        texts: list[str] = []
        settling.settle(targets.Target("t", server.url), texts.append, limit_s=2.5 if said else 60.0)
        looks = sum(s.path == "/metrics" for s in server.requests)
    assert looks >= 3
    assert said in "".join(texts)
    assert bool(texts) is bool(said)


def test_a_target_that_does_not_tell_is_named(tmp_path):
    trace = trace_file(tmp_path, [{**row, "cancel_after_s": 0.05} for row in rows(3)])
    with Scripted(llm_server(lambda n, seen: good(seen, 300))) as server:
        ran = bench(server.url, tmp_path, trace, "--concurrency", "1", "--warmup", "0")
    assert "could not be checked" in ran.err


def test_who_interrupts_a_run_does_not_wait_for_its_target(tmp_path):
    with Scripted(_telling([3.0])) as server:  # for ever at work on what was cut
        running = _running(tmp_path, server.url)
        _wait(lambda: sum("x-request-id" in s.headers for s in server.requests) > 8)
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=180)
    assert running.returncode == 130, err
    assert not [s for s in server.requests if s.path == "/metrics"]  # by which it would have waited
