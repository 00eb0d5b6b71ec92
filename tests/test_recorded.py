"""What a run records, end to end: lengths asked and counted, bytes, first attempts, secrets that are not there."""

import json
import subprocess

import numpy as np
import pytest

from llm_bench import records
from llm_bench.cell import RAW_LIMIT, RAW_TOTAL
from llm_bench.prompts import prompt_hash
from tests.bench import bench, command, environment, good, llm_server, prompt_of, rows, trace_file
from tests.scripted import END, FINISH, SSE_HEAD, Scripted, http_response, sse, token, usage


def measured(tmp_path, script, *arguments, of=None, **facts):
    """A run of six rows, one slot, no warm-up."""
    trace = trace_file(tmp_path, of or [{**row, **facts} for row in rows(6)])
    with Scripted(llm_server(script)) as server:
        ran = bench(server.url, tmp_path, trace, "--concurrency", "1", "--warmup", "0", *arguments)
    return ran, [s for s in server.requests if "x-request-id" in s.headers]


@pytest.mark.parametrize(
    ("extra", "tokens", "asked_out"),
    [
        ({"max_tokens": 2, "min_tokens": 2}, 2, 2),
        ({"max_completion_tokens": 2, "min_tokens": 2, "max_tokens": 2}, 2, 2),
        ({"ignore_eos": False}, 3, 4),
        ({"min_tokens": 0}, 3, 4),
        ({"stop": ["x"]}, 3, 4),
    ],
)
def test_a_row_whose_own_body_asks_for_less_is_no_short_output(tmp_path, extra, tokens, asked_out):
    script = [(0, SSE_HEAD), *((2, sse(token("w "))) for _ in range(tokens))]
    script += [(3, sse(FINISH, usage(12, tokens), "[DONE]") + END)]
    ran, _ = measured(tmp_path, script, extra=extra)
    cell = ran.records()
    assert (cell["outcome"] == "ok").all(), set(cell["error"])
    assert set(cell["asked_out"]) == {asked_out}


def test_an_answer_shorter_than_pinned_is_a_failure(tmp_path):
    script = [(0, SSE_HEAD), (2, sse(token("w "))), (3, sse(FINISH, usage(12, 1), "[DONE]") + END)]
    ran, _ = measured(tmp_path, script)
    cell = ran.records()
    assert set(cell["error_kind"]) == {"short_output"}
    assert set(cell["error"]) == {"1 of 4 tokens"}
    assert set(cell["first_attempt"]) == {"short_output"}


@pytest.mark.parametrize(("tokens", "kind"), [(8, ""), (7, "short_output")])
def test_several_choices_are_all_counted(tmp_path, tokens, kind):
    def of(choice, text, finish_reason=None):
        return {"choices": [{"index": choice, "delta": {"content": text}, "finish_reason": finish_reason}]}

    both = [sse(of(0, "a"), of(1, "b"))] * 3 + [sse(of(0, "a", "length"), of(1, "b", "length"))]
    script = [(0, SSE_HEAD), *((k, data) for k, data in enumerate(both))]
    script += [(5, sse(usage(12, tokens), "[DONE]") + END)]
    ran, _ = measured(tmp_path, script, extra={"n": 2})
    assert set(ran.records()["error_kind"]) == {kind}


def test_a_choice_that_never_came_is_missed(tmp_path):
    ran, _ = measured(tmp_path, lambda n, seen: good(seen), extra={"n": 2})
    assert (ran.records()["outcome"] == "failed").all()


@pytest.mark.parametrize("probed", [True, False])
def test_an_end_without_finish_reason_is_unproven_only_where_the_target_never_sends_one(tmp_path, probed):
    plain = [(0, SSE_HEAD), *((k, sse(token("w "))) for k in range(4)), (5, sse("[DONE]") + END)]

    def answer(number, seen):
        if seen.method == "GET":
            return [(0, http_response(200, b'{"data": [{"id": "m"}]}'))]
        return good(seen) if probed and "x-request-id" not in seen.headers else plain

    with Scripted(answer) as server:
        ran = bench(server.url, tmp_path, trace_file(tmp_path, rows(6)), "--concurrency", "1", "--warmup", "0")
    cell = ran.records()
    if probed:
        assert set(cell["error_kind"]) == {"truncated_stream"}
    else:
        assert (cell["outcome"] == "ok").all()
        assert all("end unproven" in labels for labels in cell.labels)


def test_each_lap_of_a_loop_has_its_own_prompts_and_shares_within_itself(tmp_path):
    trace = trace_file(tmp_path, [{**row, "hash_ids": [1, 2, 10 + i]} for i, row in enumerate(rows(6))], block_size=4)
    with Scripted(llm_server(lambda n, seen: good(seen))) as server:
        ran = bench(server.url, tmp_path, trace, "--concurrency", "1", "--loop-trace", "--requests", "18")
    assert ran.rc == 0, ran.err
    asked = [prompt_of(s) for s in server.requests if "x-request-id" in s.headers]
    assert len(set(asked)) == 18
    laps = [{tuple(prompt.split()[:8]) for prompt in asked[k : k + 6]} for k in (0, 6, 12)]
    assert [len(lap) for lap in laps] == [1, 1, 1]  # blocks 1 and 2 are one text in a lap
    assert len(set.union(*laps)) == 3  # and another in the next: else the second lap would be read from the cache


def test_requests_cap_a_loop_that_a_duration_would_end_later(tmp_path):
    ran, seen = measured(tmp_path, lambda n, seen: good(seen), "--loop-trace", "--requests", "9", "--duration", "60")
    assert len(seen) == ran.records().n == 9


def tokenizer_file(tmp_path):
    """A word is a token, as here: whatever stands between blanks."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from llm_bench.prompts import WORDS

    vocabulary = {word: i for i, word in enumerate(["?", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_counts_the_answers_of_a_server_that_does_not(tmp_path):
    pytest.importorskip("tokenizers")
    script = [(0, SSE_HEAD), (2, sse(token("one two "))), (6, sse(token("three four "), FINISH, "[DONE]") + END)]

    def answer(number, seen):
        return [(0, http_response(200, b'{"data": [{"id": "m"}]}'))] if seen.method == "GET" else script

    with Scripted(answer) as server:
        trace = trace_file(tmp_path, rows(6))
        ran = bench(
            server.url, tmp_path, trace, "--concurrency", "1", "--warmup", "0",
            "--tokenizer", str(tokenizer_file(tmp_path)),
        )  # fmt: skip
    cell = ran.records()
    assert (cell["tokens_out"] == 4).all()  # in two events: an estimate would say 2
    assert (cell["tokens_out_from"] == "tokenizer").all()
    assert {len(prompt_of(s).split()) for s in server.requests if "x-request-id" in s.headers} == {12}


def test_bytes_body_hash_and_raw_answer_are_recorded(tmp_path):
    failure = http_response(500, b'{"error": "out of order"}')
    ran, seen = measured(
        tmp_path, lambda n, s: [(0, failure)] if n % 2 else good(s), "--keep-bytes", "50", "--fail-on-error-rate", "1"
    )
    cell = ran.records()
    by_index = np.argsort(cell["index"])
    failed = cell["outcome"] == "failed"
    assert failed.sum() == 3
    assert (cell["bytes_in"][failed] == len(failure)).all()
    assert (cell["bytes_in"][~failed] > 300).all()
    assert cell["prompt_hash"][by_index].tolist() == [prompt_hash(s.body) for s in seen]
    assert set(cell["raw"][failed]) == {b'{"error": "out of order"}'}
    kept = [len(raw) for raw in cell["raw"][~failed]]
    assert sorted(kept) == [0, 0, 50]
    assert cell["raw"][~failed][0].startswith(b"data: ") or b"data: " in cell["raw"][~failed][0]


def test_raw_answers_of_failures_fill_no_disk(tmp_path):
    failure = [(0, http_response(500, b"x" * 100_000))]
    ran, _ = measured(tmp_path, failure, of=rows(24))
    kept = [len(raw) for raw in ran.records()["raw"]]
    assert sum(kept) == RAW_TOTAL
    assert max(kept) == RAW_LIMIT
    assert all(ran.records()["error"])


def test_waiting_for_a_connection_is_recorded_where_there_was_a_new_one(tmp_path):
    ran, _ = measured(tmp_path, lambda n, seen: [*good(seen), "close"] if n == 2 else good(seen))
    cell = ran.records()
    opened = np.flatnonzero(cell["connect_ns"] > 0)
    assert opened[0] == 0
    assert cell["reconnects"].tolist() == [0, 0, 0, 1, 0, 0]
    assert set(opened) <= {0, 3}  # a close that crosses the next request is found after its sending: no part of lag
    assert (cell["connect_ns"] <= cell["sent_ns"] - cell["ready_ns"]).all()


def test_a_first_attempt_has_the_outcome_it_had(tmp_path):
    empty = [(0, SSE_HEAD + sse(FINISH, "[DONE]") + END)]
    busy = [(0, http_response(503, b"busy"))]
    ran, _ = measured(
        tmp_path, lambda n, seen: (good(seen), empty, busy, good(seen))[min(n, 3)], "--retries", "1",
        "--fail-on-error-rate", "1",
    )  # fmt: skip
    assert ran.records()["first_attempt"].tolist() == ["ok", "empty_output", "http_503", "ok", "ok", "ok"]


def test_a_closed_loop_begins_staggered_and_warms_up_for_two_rounds(tmp_path):
    def answer(number, seen):
        if seen.method == "GET":
            return llm_server([])(number, seen)
        return good(seen, 300)

    with Scripted(answer) as server:
        trace = trace_file(tmp_path, rows(48, tokens_out=32))
        ran = bench(server.url, tmp_path, trace, "--concurrency", "4")
    cell = ran.records()
    due_ns = dict(zip(cell["request_id"], cell["due_ns"], strict=True))
    first = {}  # connection -> when a slot was to send its first request on it
    for seen in server.requests:
        if "x-request-id" in seen.headers:
            first.setdefault(seen.connection, due_ns[seen.headers["x-request-id"]])
    gaps_ms = np.diff(sorted(first.values())) / 1e6
    assert len(gaps_ms) == 3
    assert (gaps_ms >= 75).all(), gaps_ms  # 300 ms, what one takes alone, over four slots
    assert "warm-up 8 requests" in ran.err
    assert "after 8 requests" in ran.cell()["window"]["rule"]
    assert ran.cell()["window"]["warmup_requests"] >= 8


def test_what_the_client_took_itself_is_recorded(tmp_path):
    with Scripted(llm_server(lambda n, seen: good(seen, 30))) as server:
        ran = bench(server.url, tmp_path, trace_file(tmp_path, rows(30)), "--concurrency", "1")
    end = ran.cell()["end"]
    assert 0 < end["client_cpu_share"] < 1
    assert 0 < end["loop_lag_p99_ms"] < 5000  # a bound of its unit, not of a quiet machine


def test_a_key_that_the_server_repeats_is_stored_and_printed_nowhere(tmp_path):
    key, header = "sk-very-secret-0123456789", "another-secret-98765"
    (tmp_path / "targets.toml").write_text("")

    def echo(number, seen):
        if number % 2:
            return good(seen)
        text = f"denied: {seen.headers['authorization']} {seen.headers['x-team']} " + "y" * 240 + key
        return [(0, http_response(500, json.dumps({"error": {"message": text}}).encode()))]

    with Scripted(llm_server(echo)) as server:
        (tmp_path / "targets.toml").write_text(
            f'[targets.t]\nurl = "{server.url}"\nkey_env = "BENCH_KEY"\nheaders = {{ X-Team = "{header}" }}\n'
        )
        ran = bench(
            server.url, tmp_path, trace_file(tmp_path, rows(8)), "--concurrency", "1", "--warmup", "0",
            "--keep-bytes", "100000", "--fail-on-error-rate", "1", BENCH_KEY=key,
        )  # fmt: skip
    assert ran.rc == 0, ran.err
    errors = ran.records()["error"][ran.records()["outcome"] == "failed"]
    assert len(errors) == 4
    assert all("denied: [key] [key]" in error for error in errors)
    for secret in (key, header, key[:14]):
        assert secret not in ran.out + ran.err
        for path in ran.folder.rglob("*"):
            assert secret.encode() not in path.read_bytes(), path


def test_a_disk_that_is_full_is_one_sentence_and_what_was_flushed_is_readable(tmp_path):
    failure = [(10, http_response(500, b"x" * 2000))]
    with Scripted(llm_server(failure)) as server:
        arguments = command("run", "--targets", f"t={server.url}", "--trace", trace_file(tmp_path, rows(300)),
                            "--concurrency", "1", "--out", tmp_path / "run")  # fmt: skip
        done = subprocess.run(
            ["bash", "-c", f"ulimit -f 200; {' '.join(arguments)}"], capture_output=True, text=True, check=False,
            env=environment(),
        )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "File too large; what was measured before is readable there" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    cell = records.read(next((tmp_path / "run").glob("*.arrow")))
    assert 0 < cell.n < 300
    assert not cell.complete


@pytest.mark.parametrize("kilobytes", [1, 8], ids=["run.json", "the plan's bytes"])
def test_a_disk_that_is_full_before_the_first_record_promises_none_and_the_run_is_resumed_with_room(
    tmp_path, kilobytes
):
    with Scripted(llm_server(lambda n, seen: good(seen))) as server:
        trace = trace_file(tmp_path, rows(60, tokens_in=200))
        arguments = command(
            "run", "--targets", f"t={server.url}", "--trace", trace, "--concurrency", "1", "--out", tmp_path / "run"
        )
        done = subprocess.run(
            ["bash", "-c", f"ulimit -f {kilobytes}; {' '.join(arguments)}"],
            capture_output=True,
            text=True,
            check=False,
            env=environment(),
        )
        assert done.returncode == 2, done.stderr
        assert done.stderr.splitlines()[-1].endswith("File too large; nothing had been measured")
        assert "Traceback" not in done.stderr
        assert not [s for s in server.requests if "x-request-id" in s.headers]
        again = bench(server.url, tmp_path, trace, "--concurrency", "1", "--resume")
    assert again.rc == 0, again.err
    assert again.records().n == 60
