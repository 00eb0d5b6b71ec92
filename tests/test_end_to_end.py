"""The command line against servers that misbehave in every way of the field, over real sockets."""

import json
import signal
import subprocess
import time
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest

from llm_bench import records
from tests.bench import bench, command, environment, good, llm_server, prompt_of, rows, trace_file
from tests.quiet import undisturbed
from tests.scripted import END, FINISH, SSE_HEAD, Scripted, http_response, sse, token, usage

LATE_MS = 200.0  # how much later than scripted a median may be on a loaded machine; never earlier


def near(value, truth_ms):
    return truth_ms <= value <= truth_ms + LATE_MS


def test_a_good_server_is_measured_and_everything_it_sent_is_accounted_for(tmp_path):
    with Scripted(llm_server(lambda n, seen: good(seen, ttft_ms=40, itl_ms=40))) as server:
        ran = bench(server.url, tmp_path, trace_file(tmp_path, rows(30)), "--concurrency", "2")
    assert ran.rc == 0, ran.err
    cell = ran.records()
    assert cell.n == 30
    assert (cell["outcome"] == "ok").all()
    assert (cell["tokens_out"] == 4).all()
    assert (cell["tokens_in"] == 12).all()
    assert (cell["tokens_out_from"] == "usage").all()
    assert near(ran.value("ttft_p50"), 40)
    assert ran.value("tpot_p50") == pytest.approx(40, abs=25)
    assert ran.value("error_rate") == 0
    measured = [s for s in server.requests if "x-request-id" in s.headers]
    assert sorted(s.headers["x-request-id"] for s in measured) == sorted(cell["request_id"])
    assert len({prompt_of(s) for s in measured}) == 30


def test_a_role_only_first_chunk_is_no_first_token(tmp_path):
    role = sse({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    script = [(4, SSE_HEAD + role), (105, sse(token("w0 "))), (145, sse(token("w1 ")))]
    script += [(185, sse(token("w2 "))), (186, sse(FINISH)), (485, sse(usage(12, 3), "[DONE]") + END)]
    with Scripted(llm_server(script)) as server:
        trace = trace_file(tmp_path, rows(6, tokens_out=3))
        ran = bench(server.url, tmp_path, trace, "--concurrency", "1", "--metrics", "ttft_sent_p50,tpot_p50,e2e_p50")
    assert near(ran.value("ttft_sent_p50"), 105)
    assert ran.value("tpot_p50") == pytest.approx(40, abs=25)
    assert near(ran.value("e2e_p50"), 185)  # to the last token: the usage event 300 ms later does not stretch it


@pytest.mark.parametrize(
    ("script", "kind", "text"),
    [
        ([(0, SSE_HEAD + sse(FINISH, "[DONE]") + END)], "empty_output", ""),
        (
            [(0, SSE_HEAD + sse(token("a"), {"error": {"message": "worker lost", "code": 500}}, "[DONE]") + END)],
            "server_error_in_stream",
            "worker lost",
        ),
        ([(0, SSE_HEAD + sse(token("a"), token("b"))), "close"], "truncated_stream", ""),
        ([(0, SSE_HEAD + sse(token("a"))), "reset"], "truncated_stream", ""),
        ([(0, http_response(500, b'{"error": {"message": "out of memory"}}'))], "http_5xx", "out of memory"),
        ([(0, http_response(503, b'{"error": {"message": "busy"}}'))], "rejected", "busy"),
        ([(0, http_response(404, b'{"detail": "no such model"}'))], "http_4xx", "no such model"),
        ([(0, b"SSH-2.0-OpenSSH_9.2\r\n"), "close"], "protocol_error", ""),
    ],
    ids=["empty 200", "error in stream", "closed", "reset", "500", "503", "404", "not http"],
)
def test_what_is_no_success_is_a_failure_with_a_name_and_exit_code_1(tmp_path, script, kind, text):
    with Scripted(llm_server(script)) as server:
        ran = bench(server.url, tmp_path, trace_file(tmp_path, rows(4)), "--concurrency", "1")
    assert ran.rc == 1
    cell = ran.records()
    assert (cell["outcome"] == "failed").all()
    assert set(cell["error_kind"]) == {kind}
    assert all(text in error and error for error in cell["error"])
    assert ran.value("error_rate") == 1.0
    assert ran.value("ttft_p50") is None  # nothing succeeded: no latency, and no zero


def test_failures_stay_out_of_the_latencies_and_in_the_all_requests_reading(tmp_path):
    empty = [(0, SSE_HEAD + sse(FINISH, "[DONE]") + END)]
    with Scripted(llm_server(lambda n, seen: empty if n % 5 < 2 else good(seen, 20 + 10 * (n % 5)))) as server:
        ran = bench(
            server.url, tmp_path, trace_file(tmp_path, rows(25)), "--concurrency", "1", "--warmup", "0",
            "--metrics", "ttft_p50,ttft_p95,error_rate",
        )  # fmt: skip
    assert ran.rc == 0
    assert ran.value("error_rate") == pytest.approx(0.4, abs=0.05)
    assert near(ran.value("ttft_p50"), 50)
    assert ran.cell()["metrics"]["ttft_p95"]["all_requests"] == "error"


def test_without_usage_tokens_are_events_and_labelled_an_estimate(tmp_path):
    script = [(0, SSE_HEAD), (5, sse(token("a"))), (9, sse(token("b"))), (12, sse(token("c"), FINISH, "[DONE]") + END)]

    def answer(number, seen):
        if seen.method == "GET":
            return [(0, http_response(200, b'{"data": [{"id": "m"}]}'))]
        return script

    with Scripted(answer) as server:
        ran = bench(server.url, tmp_path, trace_file(tmp_path, rows(8)), "--concurrency", "1")
    cell = ran.records()
    assert (cell["tokens_out"] == 3).all()
    assert (cell["tokens_out_from"] == "events").all()
    assert "estimated tokens" in {d["kind"] for d in ran.cell()["doubts"]}
    assert any("estimate" in label for label in ran.cell()["metrics"]["tokens_per_second"]["labels"])


@pytest.mark.parametrize("ends_itself", [False, True])
def test_a_server_that_refuses_unknown_fields_is_asked_without_them_and_its_lengths_are_seen_from_what_came(
    tmp_path, ends_itself
):
    def answer(number, seen):
        if seen.method == "GET":
            return [(0, http_response(200, b'{"data": [{"id": "m"}]}'))]
        body = seen.json()
        if "ignore_eos" in body:
            return [(0, http_response(422, b'{"detail": [{"msg": "extra fields not permitted"}]}'))]
        return good(seen._replace(body=json.dumps(body | {"max_tokens": body["max_tokens"] - ends_itself}).encode()))

    with Scripted(answer) as server:
        ran = bench(server.url, tmp_path, trace_file(tmp_path, rows(8)), "--concurrency", "1")
    assert ran.rc == 0
    assert (ran.records()["outcome"] == "ok").all()  # the refused probe is no measured request
    assert "lengths are not pinned" in ran.err
    doubted = [d["text"] for d in ran.cell()["doubts"] if d["kind"] == "lengths not pinned"]
    assert all("have another length than asked, by 1 token in" in text for text in doubted)
    assert bool(doubted) is ends_itself  # where all came as asked nothing is in doubt


def test_a_kept_alive_socket_that_the_server_closes_is_a_reconnect_and_no_error(tmp_path):
    with Scripted(llm_server(lambda n, seen: [*good(seen), "close"])) as server:
        ran = bench(server.url, tmp_path, trace_file(tmp_path, rows(12)), "--concurrency", "2")
    cell = ran.records()
    assert (cell["outcome"] == "ok").all()
    assert cell["reconnects"].sum() >= 8


def _rejecting():
    tries: dict[str, int] = {}

    def measured(number, seen):
        tries[prompt_of(seen)] = tries.get(prompt_of(seen), 0) + 1
        row = len(tries) - 1
        if row < 4 and tries[prompt_of(seen)] == 1:
            return [(0, http_response(503, b'{"error": "busy"}'))]
        if row < 6 and tries[prompt_of(seen)] == 1:
            return [(0, http_response(429, b'{"error": "slow down"}', {"Retry-After": "1"}))]
        return good(seen, 20)

    return measured


def test_a_rejected_request_is_a_failure_unless_retries_are_asked_for(tmp_path):
    with Scripted(llm_server(_rejecting())) as server:
        ran = bench(server.url, tmp_path, trace_file(tmp_path, rows(10)), "--concurrency", "1", "--warmup", "0")
    cell = ran.records()
    assert ran.rc == 1  # 60% failed
    assert sorted(cell["status"]) == [200] * 4 + [429] * 2 + [503] * 4
    assert (cell["attempts"] == 1).all()


@undisturbed
def test_with_retries_first_attempts_stay_visible_and_latency_runs_from_the_first(tmp_path):
    tmp_path = Path(mkdtemp(dir=tmp_path))  # of this try
    with Scripted(llm_server(_rejecting())) as server:
        trace = trace_file(tmp_path, rows(10))
        ran = bench(server.url, tmp_path, trace, "--concurrency", "1", "--warmup", "0", "--retries", "1")
    cell = ran.records()
    assert ran.rc == 0
    assert (cell["outcome"] == "ok").all()
    assert cell["attempts"].sum() == 16
    assert sum(first == "ok" for first in cell["first_attempt"]) == 4
    first_event = cell.event_ns[cell.offsets[:-1]]
    ttft_ms = (first_event - cell["sent_ns"]) / 1e6
    waited = np.array([s != "ok" for s in cell["first_attempt"]])
    assert (ttft_ms[waited] >= 500).all()
    assert (cell["retry_wait_ns"][~waited] == 0).all()
    waits_s = np.sort(cell["retry_wait_ns"][waited] / 1e9)
    assert 0.5 <= waits_s[0] <= waits_s[3] < 1.0 <= waits_s[4]  # two 429 said 1 s; four 503 said nothing
    assert "retries" in {d["kind"] for d in ran.cell()["doubts"]}


def test_time_outs_have_names_and_the_limits_are_printed(tmp_path):
    silent = [(0, SSE_HEAD + sse({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})), "hang"]
    stalled = [(0, SSE_HEAD + sse(token("a"))), "hang"]
    with Scripted(llm_server(lambda n, seen: (silent, stalled, good(seen))[n % 3])) as server:
        ran = bench(
            server.url, tmp_path, trace_file(tmp_path, rows(6)), "--concurrency", "6", "--warmup", "0",
            "--ttft-timeout", "2.5", "--stall-timeout", "2", "--fail-on-error-rate", "1",
        )  # fmt: skip
    cell = ran.records()
    assert sorted(cell["error_kind"]) == ["", "", "stall_timeout", "stall_timeout", "ttft_timeout", "ttft_timeout"]
    assert all(cell["error"][cell["outcome"] == "failed"])
    assert "connect 10 s, ttft 2.5 s, stall 2 s, total 3600 s" in ran.err
    took_ms = (cell["end_ns"] - cell["sent_ns"]) / 1e6
    assert all(2500 <= ms < 5000 for ms in took_ms[cell["error_kind"] == "ttft_timeout"])


@undisturbed
def test_no_more_than_n_are_in_flight_and_no_fewer(tmp_path):
    tmp_path = Path(mkdtemp(dir=tmp_path))  # of this try
    with Scripted(llm_server(lambda n, seen: good(seen, 250))) as server:
        metrics = "in_flight,concurrency_effective"
        ran = bench(server.url, tmp_path, trace_file(tmp_path, rows(400)), "--concurrency", "45", "--metrics", metrics)
        assert server.peak == 45
    assert ran.cell()["end"]["peak_in_flight"] == 45
    assert 35 < ran.value("in_flight") < 45.05  # between an answer's end and the next request none is in flight
    assert ran.value("concurrency_effective") == pytest.approx(45, rel=0.15)


def test_cells_and_runs_do_not_meet_each_others_cache_unless_asked_to(tmp_path):
    def prompts(name, *more):
        folder = tmp_path / name
        folder.mkdir()
        with Scripted(llm_server(lambda n, seen: good(seen))) as server:
            bench(server.url, folder, trace_file(folder, rows(5)), "--concurrency", "1,2", *more)
        return [prompt_of(s) for s in server.requests if "x-request-id" in s.headers]

    first, second = prompts("a"), prompts("b")
    assert len({p.split()[0] + p.split()[1] for p in first + second}) == 20  # from the first words on
    again = [prompts("c", "--reuse-prompts"), prompts("d", "--reuse-prompts")]
    assert sorted(again[0]) == sorted(again[1])  # two slots may overtake each other
    assert sorted(again[0][:5]) == sorted(again[0][5:])


def test_requests_over_the_context_stop_the_run_before_any_load(tmp_path):
    trace = trace_file(tmp_path, [*rows(3), *rows(1, tokens_in=500)])
    with Scripted(llm_server(lambda n, seen: good(seen), max_model_len=100)) as server:
        ran = bench(server.url, tmp_path, trace, "--concurrency", "1")
    assert ran.rc == 2
    assert "1 of 4 requests (25.0%) are over the target's context of 100 tokens" in ran.err
    assert "Traceback" not in ran.err
    assert not [s for s in server.requests if "x-request-id" in s.headers]


def test_skipping_what_is_too_long_is_said_and_stays_a_doubt(tmp_path):
    trace = trace_file(tmp_path, [*rows(8), *rows(1, tokens_in=500)])
    with Scripted(llm_server(lambda n, seen: good(seen), max_model_len=100)) as server:
        ran = bench(server.url, tmp_path, trace, "--concurrency", "1", "--too-long", "skip")
    assert ran.rc == 0
    assert ran.records().n == 8
    assert any("skipped" in d["text"] for d in ran.cell()["doubts"])


def test_a_replay_keeps_the_traces_times_at_its_speed(tmp_path):
    trace = tmp_path / "azure.csv"
    stamps = ("23:59:59.9500000", "00:00:00.0500000", "00:00:00.1500000", "00:00:00.3500000")
    days = ("2024-02-28", "2024-02-29", "2024-02-29", "2024-02-29")
    lines = [f"{d} {s},12,4" for d, s in zip(days, stamps, strict=True)]
    trace.write_bytes("\r\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]).encode())
    with Scripted(llm_server(lambda n, seen: good(seen))) as server:
        ran = bench(server.url, tmp_path, trace, "--replay", "--speed", "2")
    cell = ran.records()
    offsets_ms = (cell["due_ns"] - cell["due_ns"][0]) / 1e6
    assert offsets_ms.tolist() == [0.0, 50.0, 100.0, 200.0]
    assert ((cell["sent_ns"] - cell["due_ns"]) >= 0).all()


def test_waiting_for_the_cap_is_in_the_latency(tmp_path):
    trace = trace_file(tmp_path, rows(6, gap_s=0.02, tokens_out=1))
    with Scripted(llm_server(lambda n, seen: good(seen, 60))) as server:
        ran = bench(
            server.url, tmp_path, trace, "--replay", "--max-in-flight", "1", "--warmup", "0", "--format", "json",
            "--metrics", "ttft_max,ttft_sent_max,lag_max",
        )  # fmt: skip
        assert server.peak == 1
    cell = ran.records()
    ttft_ms = (cell.event_ns[cell.offsets[:-1]] - cell["due_ns"]) / 1e6
    # Served one after the other, 60 ms each, and due every 20 ms: each waits 40 ms longer than the one before.
    assert all(ms >= 60 + 40 * k for k, ms in enumerate(ttft_ms))
    assert (cell["sent_ns"][1:] >= cell["end_ns"][:-1]).all()
    sent_ms = (cell.event_ns[cell.offsets[:-1]] - cell["sent_ns"]) / 1e6
    assert [ran.value("ttft_max"), ran.value("ttft_sent_max")] == pytest.approx([ttft_ms.max(), sent_ms.max()])


def test_a_later_turn_holds_the_live_answer_and_waits_for_it(tmp_path):
    turns = [
        {"input_length": 10, "output_length": 4, "session_id": "a"},
        {"input_length": 30, "output_length": 4, "session_id": "a"},
        {"input_length": 50, "output_length": 4, "session_id": "a"},
    ]
    with Scripted(llm_server(lambda n, seen: good(seen, 20))) as server:
        ran = bench(server.url, tmp_path, trace_file(tmp_path, turns), "--concurrency", "1", "--warmup", "0")
    assert ran.rc == 0, ran.err
    asked = [s.json()["messages"] for s in server.requests if "x-request-id" in s.headers]
    assert [len(messages) for messages in asked] == [1, 3, 5]
    assert asked[1][0] == asked[0][0]
    assert asked[1][1] == {"role": "assistant", "content": "w0 w1 w2 w3 "}
    assert asked[2][:3] == asked[1]
    assert len(asked[1][2]["content"].split()) == 16  # 30 - (10 + 4)
    cell = ran.records()
    assert (np.diff(cell["sent_ns"]) > 20e6).all()


def test_a_cancelled_request_reaches_the_server_as_a_closed_connection(tmp_path):
    trace = trace_file(tmp_path, [{**row, "cancel_after_s": 0.05} for row in rows(4)])
    with Scripted(llm_server(lambda n, seen: good(seen, 500))) as server:
        ran = bench(
            server.url, tmp_path, trace, "--concurrency", "1", "--warmup", "0", "--metrics", "cancel_rate,error_rate"
        )
        until_s = time.monotonic() + 30
        while len(server.closed) < 4 and time.monotonic() < until_s:  # the run's end may be known here before its close
            time.sleep(0.01)
        assert len(server.closed) >= 4
    assert (ran.records()["outcome"] == "cancelled").all()
    assert ran.value("cancel_rate") == 1.0
    assert ran.value("error_rate") is None  # a cancellation is neither a success nor a failure


def test_an_unreachable_target_is_one_sentence_and_exit_code_4(tmp_path):
    ran = bench(
        "http://127.0.0.1:9/v1", tmp_path, trace_file(tmp_path, rows(3)), "--concurrency", "1", "--ready-timeout", "0.3"
    )
    assert ran.rc == 4
    assert "is not ready after 0.3 s" in ran.err
    assert "Traceback" not in ran.err


def test_a_target_that_goes_away_ends_the_run_with_what_was_measured(tmp_path):
    script = "import sys; sys.path.insert(0, {root!r})\nfrom tests.bench import good, llm_server\n"
    script += "from tests.scripted import Scripted\nimport time, os\n"
    script += "def answer(n, seen):\n    if n >= 30: os._exit(0)\n    return good(seen, 5)\n"
    script += "with Scripted(llm_server(answer)) as s:\n    print(s.url, flush=True)\n    time.sleep(60)\n"
    root = environment()["PYTHONPATH"]
    server = subprocess.Popen(
        [*command()[:1], "-c", script.format(root=root)], stdout=subprocess.PIPE, text=True, env=environment()
    )
    try:
        url = server.stdout.readline().strip()
        ran = bench(url, tmp_path, trace_file(tmp_path, rows(4000)), "--concurrency", "1,2")
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    assert ran.rc == 4
    assert "no longer answers" in ran.err
    cell = ran.records()
    assert (cell["outcome"] == "ok").sum() == 30
    assert cell.n < 200  # refused connections do not burn the trace
    assert len(ran.document["cells"]) == 1


def _started(url, tmp_path, n=4000):
    trace = trace_file(tmp_path, rows(n))
    return subprocess.Popen(
        command("run", "--targets", f"t={url}", "--trace", trace, "--concurrency", "4,8", "--out", tmp_path / "run",
                "--workers", "1", "--format", "json"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment(),
    )  # fmt: skip


def _wait_for_records(tmp_path, at_least=4096):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = list((tmp_path / "run").glob("*.arrow"))
        if found and found[0].stat().st_size > at_least + 4096:
            return
        time.sleep(0.05)
    pytest.fail("no records appeared")


def test_ctrl_c_cuts_writes_and_reports(tmp_path):
    with Scripted(llm_server(lambda n, seen: good(seen, 20, 5))) as server:
        running = _started(server.url, tmp_path)
        _wait_for_records(tmp_path)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=180)
    assert running.returncode == 130, err
    assert "Traceback" not in err
    document = json.loads(out.splitlines()[-1])["runs"][0]
    assert len(document["cells"]) == 1
    cell = records.read(tmp_path / "run" / f"{document['cells'][0]['name']}.arrow")
    assert cell.complete
    assert set(cell["outcome"]) <= {"ok", "cut_at_end"}
    assert (cell["outcome"] == "cut_at_end").sum() <= 4
    assert document["cells"][0]["end"]["reason"] == "interrupted"


def test_a_killed_run_can_be_read(tmp_path):
    with Scripted(llm_server(lambda n, seen: good(seen, 10))) as server:
        running = _started(server.url, tmp_path)
        _wait_for_records(tmp_path, 30_000)
        time.sleep(0.6)
        sent = sum("x-request-id" in s.headers for s in server.requests)
        running.kill()
        running.communicate(timeout=180)
    done = subprocess.run(
        command("report", tmp_path / "run", "--format", "json"), capture_output=True, text=True, check=False,
        env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cell = json.loads(done.stdout.splitlines()[-1])["runs"][0]["cells"][0]
    assert not cell["complete"]
    assert "incomplete file" in {d["kind"] for d in cell["doubts"]}
    kept = records.read(next((tmp_path / "run").glob("*.arrow"))).n
    assert kept > sent - 4 - 150  # at most 0.25 s and a tick of 400 requests a second


def test_a_key_appears_in_no_file_and_no_output(tmp_path):
    key = "sk-very-secret-0123456789"
    with Scripted(llm_server(lambda n, seen: http_500(seen) if n == 2 else good(seen))) as server:
        ran = bench(
            server.url, tmp_path, trace_file(tmp_path, rows(6)), "--concurrency", "1", "--key-env", "BENCH_KEY",
            BENCH_KEY=key,
        )  # fmt: skip
    assert all(s.headers["authorization"] == f"Bearer {key}" for s in server.requests)
    assert key not in ran.out + ran.err
    for path in ran.folder.rglob("*"):
        assert key.encode() not in path.read_bytes(), path


def http_500(seen):
    return [(0, http_response(500, b'{"error": "oops"}'))]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--concurrency", "0"], "expected a number from 1 to 100,000"),
        (["--concurrency", "a"], "expected numbers"),
        (["--concurrency", "1", "--rate", "2"], "--concurrency and --rate"),
        (["--concurrency", "1", "--metrics", "ttft_p96"], "ttft_p9"),
        (["--concurrency", "1", "--metrics", "tttf_p95"], "ttft"),
        (["--concurrency", "1", "--format", "yaml"], "yaml"),
        (["--concurrency", "1", "--too-long", "drop"], "refuse, skip, clip or scale"),
        (["--concurrency", "1", "--key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY"),
        (["--concurrency", "1", "--api", "smtp"], "openai-chat"),
        (["--concurrency", "1", "--max-in-flight", "4"], "--max-in-flight"),
        (["--replay"], "no time"),
        (["--concurrency", "1", "--loop-trace"], "--duration or --requests"),
        (["--concurrency", "1", "--tokenizer", "no-such-file.json"], "no-such-file.json"),
        (["--rate", "1e-12"], "--rate 1e-12: expected a number from 1e-06 to 1,000,000.0"),
        (["--rate", "5", "--drain", "nan"], "--drain nan"),
    ],
)
def test_wrong_arguments_are_one_sentence_and_exit_code_2_before_anything_is_sent(tmp_path, arguments, said):
    with Scripted(llm_server(lambda n, seen: good(seen))) as server:
        ran = bench(server.url, tmp_path, trace_file(tmp_path, rows(3)), *arguments)
    assert ran.rc == 2, ran.err
    assert said in ran.err
    assert "Traceback" not in ran.err
    assert not [s for s in server.requests if "x-request-id" in s.headers]


def test_a_bad_row_is_named_by_file_and_line(tmp_path):
    trace = trace_file(tmp_path, rows(3))
    trace.write_text(trace.read_text() + '{"input_length": -4, "output_length": 2}\n')
    with Scripted(llm_server(lambda n, seen: good(seen))) as server:
        ran = bench(server.url, tmp_path, trace, "--concurrency", "1")
    assert ran.rc == 2
    assert f"{trace}:5" in ran.err


def test_an_existing_run_is_never_overwritten(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("keep")
    ran = bench("http://127.0.0.1:9/v1", tmp_path, trace_file(tmp_path, rows(3)), "--concurrency", "1")
    assert ran.rc == 2
    assert "nothing is overwritten" in ran.err
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["mine.txt"]


def test_an_unknown_target_says_what_to_write(tmp_path):
    done = subprocess.run(
        command("run", "--targets", "vllm", "--trace", trace_file(tmp_path, rows(3)), "--concurrency", "1"),
        capture_output=True, text=True, check=False, cwd=tmp_path, env=environment(),
    )  # fmt: skip
    assert done.returncode == 2
    assert "targets.vllm.url" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_256_streams_to_the_null_target_all_accounted_for(tmp_path):
    trace = trace_file(tmp_path, rows(2600, tokens_out=16))
    done = subprocess.run(
        command("run", "--targets", "null", "--trace", trace, "--concurrency", "256", "--out", tmp_path / "run",
                "--workers", "1", "--format", "json"),
        capture_output=True, text=True, check=False, cwd=tmp_path, env=environment(), timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cell = records.read(next((tmp_path / "run").glob("*.arrow")))
    assert cell.n == 2600
    assert (cell["outcome"] == "ok").all()
    assert (cell["tokens_out"] == 16).all()


def test_two_arms_take_turns_and_their_repeats_are_one_line_each(tmp_path):
    with Scripted(llm_server(lambda n, seen: good(seen, 5))) as server:
        two = f"a={server.url},b={server.url}"
        whole = command("run", "--targets", two, "--trace", trace_file(tmp_path, rows(12)), "--concurrency", "1",
                        "--interleave", "--repeat", "5", "--out", tmp_path / "run", "--metrics", "ttft_p50",
                        "--slo", "ttft_p50<900ms", "--fail-on-slo")  # fmt: skip
        ran = subprocess.run(whole, capture_output=True, text=True, env=environment(), check=False, timeout=180)
    assert "5 pairs at each load, the targets in turn: a b, then b a" in ran.stderr
    arms = "".join(records.read(path).header["arm"] for path in sorted((tmp_path / "run").glob("*.arrow")))
    assert arms == "abbaabbaab"
    assert ran.stdout.count("c=1, 5 runs") == 4  # in each target's table, and above what is said of it
    assert "SLO ttft_p50<900ms" in ran.stdout
    later = subprocess.run(
        command("report", tmp_path / "run", "--format", "json"), capture_output=True, text=True, env=environment(),
        check=False,
    )  # fmt: skip
    (run,) = json.loads(later.stdout.splitlines()[-1])["runs"]
    assert [len(group["cells"]) for group in run["repeats"]] == [5, 5]
    assert {limit["limit"] for cell in run["cells"] for limit in cell["slo"]} == {
        "ttft_p50<900ms"
    }  # as it was run with


def test_same_salt_on_one_server_is_refused_in_a_sentence(tmp_path):
    with Scripted(llm_server(lambda n, seen: good(seen))) as server:
        two = f"a={server.url},b={server.url}"
        whole = command("run", "--targets", two, "--trace", trace_file(tmp_path, rows(3)), "--concurrency", "1",
                        "--interleave", "--same-salt", "--out", tmp_path / "run")  # fmt: skip
        ran = subprocess.run(whole, capture_output=True, text=True, env=environment(), check=False, timeout=180)
    assert ran.returncode == 2
    assert "the second would meet the first one's cache" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_targets_that_are_compared_are_asked_the_same_greedy_questions(tmp_path):
    with (
        Scripted(llm_server(lambda n, seen: good(seen))) as one,
        Scripted(llm_server(lambda n, seen: good(seen))) as two,
    ):
        both = f"a={one.url},b={two.url}"
        ran = bench(one.url, tmp_path, trace_file(tmp_path, rows(4)), "--concurrency", "1", "--targets", both)
    assert ran.rc == 0, ran.err
    (run,) = json.loads(ran.out.splitlines()[-1])["runs"]
    assert run["agreement"] == ["a and b gave the same greedy answer to 5 of 5 fixed prompts"]
    asked = [json.loads(seen.body) for seen in one.requests if b"planets" in (seen.body or b"")]
    assert [body["temperature"] for body in asked] == [0]


def test_a_connection_for_each_request_where_that_is_asked_for(tmp_path):
    for flags, connections in (([], 1), (["--connect-per-request"], 12)):
        with Scripted(llm_server(lambda n, seen: good(seen))) as server:
            folder = tmp_path / str(len(flags))
            folder.mkdir()
            ran = bench(server.url, folder, trace_file(folder, rows(12)), "--concurrency", "1", *flags)
        assert ran.rc == 0, ran.err
        load = [seen.connection for seen in server.requests if "x-request-id" in seen.headers]
        assert (len(load), len(set(load))) == (12, connections)


def test_whole_answers_with_a_length_share_a_connection_and_have_no_first_token(tmp_path):
    def whole(_, seen):
        if seen.method == "GET":
            return [(0, http_response(200, json.dumps({"object": "list", "data": [{"id": "m"}]}).encode()))]
        assert not seen.json().get("stream")
        choice = {"index": 0, "message": {"role": "assistant", "content": "a b c d"}, "finish_reason": "length"}
        words = len(prompt_of(seen).split())
        counts = {"prompt_tokens": words, "completion_tokens": 4, "total_tokens": words + 4}
        return [(20, http_response(200, json.dumps({"choices": [choice], "usage": counts}).encode()))]

    with Scripted(whole) as server:
        ran = bench(
            server.url, tmp_path, trace_file(tmp_path, rows(12)), "--concurrency", "1", "--no-stream",
            "--metrics", "ttft_p50,tpot_p50,e2e_p50",
        )  # fmt: skip
    assert ran.rc == 0, ran.err
    load = [seen.connection for seen in server.requests if "x-request-id" in seen.headers]
    assert (len(load), len(set(load))) == (12, 1)
    cell = ran.records()
    assert (cell["outcome"] == "ok").all()
    assert (cell["tokens_out"] == 4).all()
    assert (ran.value("ttft_p50"), ran.value("tpot_p50")) == (None, None)  # undefined, and not 0
    assert ran.value("e2e_p50") >= 20
