"""What is asked before a run: as few requests as its figures rest on, as many at once as do not disturb each other."""

import json
import subprocess

import pytest

from llm_bench import probe, probe_prompts, talk
from llm_bench.bodies import Ask
from llm_bench.errors import TargetError
from llm_bench.exchange import Timeouts
from llm_bench.probe import AGREEMENT, RTT_LEAST, RTT_PROBES
from llm_bench.prompts import Sizer
from llm_bench.request import Request
from llm_bench.targets import Target
from tests.bench import bench, command, environment, rows, trace_file
from tests.scripted import END, SSE_HEAD, Scripted, Seen, http_response, sse, token

DELAY_MS = 50.0
MODELS = b'{"data": [{"id": "m", "max_model_len": 4096}]}'


def chat(seen: Seen):
    """A whole answer, of as many tokens as are asked for."""
    body = seen.json()
    asked, words = int(body.get("max_tokens", 4)), len(body["messages"][-1]["content"].split())
    finish = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    usage = {"prompt_tokens": words + 7, "completion_tokens": asked, "total_tokens": words + 7 + asked}
    events = [token("w ")] * asked + [finish, {"choices": [], "usage": usage}, "[DONE]"]
    return SSE_HEAD + sse(*events) + END


def far(number, seen):
    """A server that takes DELAY_MS for anything."""
    if seen.method == "POST":
        return [(DELAY_MS, chat(seen))]
    return [(DELAY_MS, http_response(200, MODELS if seen.path.endswith("/models") else b'{"version": "1"}'))]


def rounds(requests) -> int:
    """Of the longest chain of requests each of which was sent after the answer to the one before."""
    depth: list[int] = []
    for seen in requests:
        before = [d for d, other in zip(depth, requests, strict=False) if seen.at_ns - other.at_ns > 0.9e6 * DELAY_MS]
        depth.append(1 + max(before, default=0))
    return max(depth)


def asked_of(server) -> list[str]:
    return [seen.json()["messages"][-1]["content"] for seen in server.requests if seen.method == "POST"]


@pytest.mark.parametrize("compared", [False, True])
def test_a_far_server_is_asked_few_rounds_before_a_run(compared):
    trips = 1 + RTT_LEAST  # the first is dearer by the connection
    # The list of models; round trips, beside which the build is asked; two questions alone; all else at once.
    most = 1 + trips + 2 + 1
    for _ in range(3):  # a machine that stalls takes apart what was sent at once
        with Scripted(far) as server:
            found = probe.probe(Target("t", server.url), lambda text: None, 5.0, compared=compared)
            requests, prompts = list(server.requests), asked_of(server)
        if rounds(requests) <= most:
            break
    assert rounds(requests) <= most
    assert len(requests) == 1 + 1 + trips + 2 + 2 + (len(AGREEMENT) if compared else 0)
    assert set(AGREEMENT) <= set(prompts) or not compared
    assert (found.lengths_pinned, found.usage_in_stream, found.finish_reason_seen) == (True, True, True)
    assert (found.sizer, found.sized, len(found.agreement)) == (Sizer(7.0, 1.0), True, 5 if compared else 0)
    assert (found.rtt_probes, found.told) == (RTT_LEAST, {"engine_version": "1"})
    assert found.rtt_ms >= DELAY_MS
    assert found.prefix_cache == found.continuous_usage == ""  # of no use to a run
    assert not [note for note in found.notes if "not" in note]


def test_what_is_timed_is_asked_alone():
    """The second question gives the times of a request alone; nothing else is in flight with it."""
    with Scripted(far) as server:
        probe.probe(Target("t", server.url), lambda text: None, 5.0, compared=True)
        requests = list(server.requests)
    asked = next(seen for seen in requests if seen.method == "POST" and seen.json()["max_tokens"] == 32)
    near = [seen for seen in requests if seen is not asked and abs(seen.at_ns - asked.at_ns) < 0.9e6 * DELAY_MS]
    assert near == []


def test_a_near_server_is_timed_as_often_as_it_takes_no_time():
    def near(number, seen):
        return [(0, far(number, seen)[0][1])]

    with Scripted(near) as server:
        found = probe.probe(Target("t", server.url), lambda text: None, 5.0)
    assert RTT_LEAST <= found.rtt_probes <= RTT_PROBES


def test_targets_are_sized_by_the_same_texts():
    """Equal tokenizers then count the same, whatever words cost."""
    texts = []
    for _ in range(2):
        with Scripted(far) as server:
            probe.probe(Target("t", server.url), lambda text: None, 5.0)
            texts.append({text for text in asked_of(server) if len(text.split()) in (16, 256)})
    assert len(texts[0]) == 2
    assert texts[0] == texts[1]


def test_a_whole_probe_asks_each_question_alone():
    with Scripted(far) as server:
        found = probe.probe(Target("t", server.url), lambda text: None, 5.0, compared=True, whole=True)
        requests = list(server.requests)
        generated = [seen for seen in requests if seen.method == "POST"]
    assert rounds(generated) == len(generated)
    assert found.rtt_probes == RTT_PROBES
    assert found.prefix_cache == probe_prompts.UNDECIDED
    assert found.continuous_usage == "no"


def test_what_no_cell_needs_is_asked_when_the_load_is_over_and_kept_with_the_run(tmp_path):
    def answer(number, seen):
        return [(0, chat(seen) if seen.method == "POST" else http_response(200, MODELS))]

    trace = trace_file(tmp_path, rows(3))
    with Scripted(answer) as server:
        asked = ["run", "--targets", f"t={server.url}", "--trace", str(trace), "--concurrency", "1"]
        asked += ["--out", str(tmp_path / "run")]
        done = subprocess.run(command(*asked), env=environment(), capture_output=True, text=True, timeout=180)
        texts = asked_of(server)
    assert done.returncode == 0, done.stderr
    learnt = json.loads((tmp_path / "run/run.json").read_text())["learnt"]["t"]
    assert (learnt["prefix_cache"], learnt["continuous_usage"]) == (probe_prompts.UNDECIDED, "no")
    assert learnt["prefix_cache_seen"].startswith("it counts no cached tokens")
    assert "t: prefix cache undecided, usage in every event no" in done.stderr
    page = tmp_path / "page.html"
    report = command("report", tmp_path / "run", "--format", "html", "-o", page)
    assert subprocess.run(report, env=environment(), capture_output=True, timeout=180, check=False).returncode == 0
    assert "t: after the load.prefix_cache" in page.read_text().replace("<wbr>", "")
    repeated = [place for place, text in enumerate(texts) if texts.count(text) == 2 and len(text.split()) == 256]
    assert repeated and min(repeated) > 2 + 2 + 3  # behind two questions, two prompts that were sized, and the load


def test_a_target_that_answers_no_more_when_the_load_is_over_leaves_what_it_could_say_unknown():
    with Scripted(far) as server:
        target = Target("t", server.url)
        found = probe.probe(target, lambda text: None, 5.0)
    assert probe.afterwards(target, found) == {}


def test_a_target_that_hangs_when_the_load_is_over_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(probe, "AFTERWARDS_S", 0.2)
    with Scripted(far) as server:
        found = probe.probe(Target("t", server.url), lambda text: None, 5.0)
    with Scripted(["hang"]) as server:
        assert "continuous_usage" not in probe.afterwards(Target("t", server.url), found)


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_takes_one_request_at_a_time_is_asked_again(status):
    refused = []
    with Scripted(lambda number, seen: answer(number, seen)) as server:

        def answer(number, seen):
            if seen.method == "POST" and server.in_flight > 1:
                refused.append(number)
                return [(0, http_response(status, b'{"error": {"message": "busy"}}'))]
            return far(number, seen)

        found = probe.probe(Target("t", server.url), lambda text: None, 5.0, compared=True)
    assert refused
    assert (found.sized, len(found.agreement)) == (True, len(AGREEMENT))


@pytest.mark.parametrize("last", [b"", END])
def test_a_cut_behind_the_last_word_is_as_good_before_a_run_as_in_it(last):
    def answer(number, seen):
        return [(0, chat(seen).removesuffix(END) + last), "close"] if seen.method == "POST" else far(number, seen)

    with Scripted(answer) as server:
        assert probe.probe(Target("t", server.url), lambda text: None, 5.0).lengths_pinned


def test_a_cut_before_it_is_a_truncated_stream_and_no_failed_connection():
    def answer(number, seen):
        return [(0, SSE_HEAD + sse(token("w "))), "close"] if seen.method == "POST" else far(number, seen)

    with Scripted(answer) as server, pytest.raises(TargetError, match="truncated_stream: ended without finish_reason"):
        probe.probe(Target("t", server.url), lambda text: None, 5.0)


def test_answers_come_in_the_order_of_their_requests():
    def slower(number, seen):
        return [(200.0 / len(asked_words(seen)), chat(seen))]

    def asked_words(seen):
        return seen.json()["messages"][-1]["content"].split()

    requests = [Request(tokens_in=n, tokens_out=1, prompt="w " * n) for n in (1, 2, 4)]
    with Scripted(slower) as server, talk.client_of(Target("t", server.url), Timeouts()) as client:
        found = talk.ask_together(client, Target("t", server.url), requests, Ask("m"), Timeouts())
    assert [got.tokens_in for got, _ in found] == [8, 9, 11]


def test_what_is_raised_aside_is_raised_where_its_result_is_asked_for():
    def fails():
        raise ValueError("no")

    future = talk.aside(fails)
    with pytest.raises(ValueError, match="no"):
        future.result()


def counting(counts: bool):
    """Of two servers alike, the one that says what prompts cost, and the one that does not."""

    def answer(number, seen):
        if seen.method == "GET":
            return [(0, http_response(200, MODELS))]
        whole = chat(seen)
        if not counts:  # a key of the same length, so that chunks keep theirs
            whole = whole.replace(b'"prompt_tokens"', b'"prompt_unsaid"')
        return [(0, whole)]

    return answer


def test_a_target_that_counts_no_prompt_tokens_gets_texts_as_long_as_the_others():
    found = {}
    for name in ("silent", "counts"):
        with Scripted(counting(name == "counts")) as server:
            found[name] = probe.probe(Target(name, server.url), lambda text: None, 5.0)
    assert (found["silent"].sizer, found["silent"].sized) == (Sizer(), False)
    alike = probe.sized_alike(found)
    assert alike["counts"] == found["counts"]
    assert (alike["silent"].sizer, alike["silent"].sized) == (Sizer(7.0, 1.0), False)
    assert "prompt tokens are not reported: prompts are as long as those of counts, unchecked" in alike["silent"].notes
    assert probe.sized_alike({"silent": found["silent"]}) == {"silent": found["silent"]}


def test_a_target_that_counts_no_prompt_tokens_is_no_doubt_where_no_figure_has_them(tmp_path):
    with Scripted(counting(False)) as server:
        ran = bench(server.url, tmp_path, trace_file(tmp_path, rows(20)), "--concurrency", "1")
    assert ran.rc == 0, ran.err
    assert "planned prompt tokens" not in {doubt["kind"] for doubt in ran.cell()["doubts"]}
    said = subprocess.run(
        command("report", ran.folder, "--format", "md"),
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
    )
    assert "requests the server says no prompt tokens: whether they were as long as planned is unknown" in said.stdout


def test_of_two_servers_alike_one_that_does_not_count_is_unknown_and_not_different(tmp_path):
    trace = trace_file(tmp_path, rows(12, tokens_in=40))
    with Scripted(counting(True)) as one, Scripted(counting(False)) as other:
        asked = ("--targets", f"a={one.url},b={other.url}", "--trace", str(trace), "--concurrency", "1")
        for arguments in (("run", *asked, "--out", "run"), ("compare", "run")):
            ran = subprocess.run(
                command(*arguments), capture_output=True, text=True, cwd=tmp_path, env=environment(), check=False
            )
            assert ran.returncode == 0, ran.stderr
            assert "targets differ" not in ran.stdout
            assert "counts no prompt tokens" not in ran.stdout
            if arguments[0] == "run":
                assert "b: prompt tokens are not reported: prompts are as long as those of a, unchecked" in ran.stderr
    (line,) = [line.split() for line in ran.stdout.splitlines() if line.split()[:2] == ["prompt", "tokens"]]
    assert line == ["prompt", "tokens", "40", "a", "request", "unknown"]
