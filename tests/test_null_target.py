import asyncio
import http.client
import json
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_bench.clock import now_ns
from llm_bench.exchange import COMPLETE, Exchange, Timeouts
from llm_bench.http1 import events
from llm_bench.null_target import SERVICES, NullTarget, Queue, Times, main
from llm_bench.wire import Wire, run
from tests.quiet import undisturbed

PATHS = {"chat": "/chat/completions", "text": "/completions"}


@contextmanager
def null_target(*arguments: str) -> Iterator[str]:
    command = [sys.executable, "-m", "llm_bench.null_target", "--port", "0", *arguments]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        yield json.loads(child.stdout.readline())["listening"]
    finally:
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
        child.stdout.close()


def payload(body: dict[str, Any], request_id: str = "r") -> bytes:
    data = json.dumps(body).encode()
    return b"X-Request-Id: %b\r\nContent-Length: %d\r\n\r\n%b" % (request_id.encode(), len(data), data)


def chat(max_tokens: int = 3, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": max_tokens, "stream": True} | more


def bears_token(data: bytes) -> bool:
    return b'"word ' in data


def wire_to(url: str, route: str = "chat") -> Wire:
    return Wire(url, PATHS[route], [], Timeouts(), bears_token)


async def exchange_with(url: str, body: dict[str, Any], route: str = "chat") -> Exchange:
    wire = wire_to(url, route)
    exchange = await wire.send(payload(body))
    wire.close()
    return exchange


def data_of(exchange: Exchange) -> list[Any]:
    assert exchange.ended == COMPLETE, exchange.error
    return [d if d == b"[DONE]" else json.loads(d) for d in events(exchange.read_ns, exchange.pieces).data]


def test_a_chat_stream_has_role_tokens_finish_usage_and_done_in_this_order() -> None:
    with null_target() as url:
        got = data_of(run(exchange_with(url, chat(3, stream_options={"include_usage": True}))))
    deltas = [e["choices"][0]["delta"] for e in got[:5]]
    assert deltas == [{"role": "assistant", "content": ""}, *[{"content": "word "}] * 3, {}]
    assert [e["choices"][0]["finish_reason"] for e in got[:5]] == [None] * 4 + ["length"]
    assert got[5]["choices"] == []
    assert got[5]["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert got[6:] == [b"[DONE]"]


def test_without_include_usage_there_is_none_and_tokens_share_events_as_asked() -> None:
    with null_target("--tokens-per-event", "4") as url:
        got = data_of(run(exchange_with(url, {"prompt": "a b", "max_tokens": 10, "stream": True}, "text")))
    assert [e["choices"][0]["text"] for e in got[:-1]] == ["word " * 4, "word " * 4, "word " * 2, ""]
    assert all("usage" not in e for e in got[:-1])


@pytest.mark.parametrize("route", PATHS)
def test_an_answer_in_one_piece_counts_its_words(route: str) -> None:
    ask = (
        {"prompt": [1, 2, 3, 4]}
        if route == "text"
        else {"messages": [{"content": [{"text": "x y"}]}, {"content": "z"}]}
    )
    with null_target() as url:
        exchange = run(exchange_with(url, {**ask, "max_tokens": 5}, route))
    body = json.loads(b"".join(exchange.pieces))
    words = 4 if route == "text" else 3
    assert body["usage"] == {"prompt_tokens": words, "completion_tokens": 5, "total_tokens": words + 5}


def test_a_port_that_there_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for port in ("-1", "65536"):
        with pytest.raises(SystemExit) as ended:
            main(["--port", port])
        assert ended.value.code == 2
        assert "expected a --port of 0 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize("stream", [True, False])
@undisturbed
def test_events_leave_at_the_known_times_and_the_truth_says_when(tmp_path: Path, stream: bool) -> None:
    truth = tmp_path / "truth.jsonl"
    truth.unlink(missing_ok=True)
    with null_target("--ttft-ms", "60", "--itl-ms", "20", "--truth", str(truth)) as url:
        exchange = run(exchange_with(url, chat(4, stream=stream)))
    line = json.loads(truth.read_text())
    assert line["request_id"] == "r"
    offsets = [(at - line["read_ns"]) / 1e6 for at in line["write_ns"]]
    planned = [60, 80, 100, 120] if stream else [120]
    assert len(offsets) == len(planned)
    assert all(0 <= at - due < 15 for at, due in zip(offsets, planned, strict=True)), offsets
    # One clock on one machine: sent <= read <= written <= received. That it holds is what makes the target a truth.
    assert exchange.sent_ns - 1_000_000 < line["read_ns"]
    said = events(exchange.read_ns, exchange.pieces)
    got = [ns for ns, data in zip(said.ns, said.data, strict=True) if bears_token(data)]
    if stream:
        assert all(0 <= (r - w) / 1e6 < 15 for r, w in zip(got, line["write_ns"], strict=True))


def test_a_queue_serves_first_come_first_served_by_hand() -> None:
    queue = Queue(2, "constant", 100, seed=0)
    assert [queue.place(at) for at in (0, 10, 20, 30, 500)] == [(0, 100), (10, 110), (100, 200), (110, 210), (500, 600)]


@pytest.mark.parametrize(("service", "spread"), [("exponential", 1), ("constant", 0), ("lognormal", 1)])
def test_services_have_the_mean_and_spread_they_are_said_to_have(service: str, spread: float) -> None:
    draw = random.Random(3)
    taken = np.array([SERVICES[service](draw) for _ in range(200_000)])
    assert taken.mean() == pytest.approx(1, abs=0.01)
    assert taken.std() == pytest.approx(spread, abs=0.03)


def test_the_wait_is_in_the_first_token_and_the_last_leaves_when_the_service_ends() -> None:
    async def made() -> list[Times]:
        target = NullTarget(Times(ttft_ns=5), queue=Queue(1, "constant", 100, seed=0))
        return [target.times_of(0, 6), target.times_of(10, 1), target.times_of(20, 2)]

    # Services of 0 to 100, 100 to 200, 200 to 300; six tokens: five gaps between 5 and 100.
    assert run(made()) == [Times(5, 19), Times(190, 0), Times(185, 95)]


@undisturbed
def test_two_that_come_together_are_served_after_each_other(tmp_path: Path) -> None:
    async def main(url: str) -> list[Exchange]:
        wire = wire_to(url)
        got = await asyncio.gather(*(wire.send(payload(chat(2), str(i))) for i in range(2)))
        wire.close()
        return list(got)

    truth = tmp_path / "truth.jsonl"
    truth.unlink(missing_ok=True)
    with null_target("--servers", "1", "--service", "constant", "--service-ms", "60", "--truth", str(truth)) as url:
        got = run(main(url))
    assert {e.ended for e in got} == {COMPLETE}
    first, second = map(json.loads, truth.read_text().splitlines())
    begun_ns = first["read_ns"]
    for line, planned in ((first, (0, 60)), (second, (60, 120))):
        offsets = [(at - begun_ns) / 1e6 for at in line["write_ns"]]
        assert all(0 <= at - due < 15 for at, due in zip(offsets, planned, strict=True)), offsets


def test_a_queue_that_cannot_be_is_refused() -> None:
    asked = [sys.executable, "-m", "llm_bench.null_target", "--servers", "2", "--service-ms", "0"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert (done.returncode, "--service-ms above 0" in done.stderr) == (2, True)


def test_256_streams_at_once_are_all_complete_and_keep_their_pace() -> None:
    async def main(url: str) -> list[Exchange]:
        wire = wire_to(url)
        begun = now_ns()
        got = await asyncio.gather(*(wire.send(payload(chat(20), str(i))) for i in range(256)))
        assert (now_ns() - begun) / 1e9 < 60
        assert len(wire.idle) == 256  # each had a connection of its own, and each is kept
        wire.close()
        return list(got)

    with null_target("--ttft-ms", "300", "--itl-ms", "10") as url:
        got = run(main(url))
    assert {e.ended for e in got} == {COMPLETE}
    for e in got:
        said = events(e.read_ns, e.pieces)
        tokens_ns = [ns for ns, data in zip(said.ns, said.data, strict=True) if bears_token(data)]
        assert len(tokens_ns) == 20
        assert tokens_ns[0] - e.sent_ns >= 300e6 - 20e6  # the write may be stamped after the server has read it


def test_models_health_and_refusals_over_one_kept_connection() -> None:
    with null_target() as url:
        host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
        line = http.client.HTTPConnection(host, int(port))

        def ask(method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
            line.request(method, path, body)
            answer = line.getresponse()
            return answer.status, json.loads(answer.read())

        assert ask("GET", "/v1/models")[1]["data"][0]["id"] == "null"
        assert ask("GET", "/health")[0] == 200
        assert ask("GET", "/nowhere")[0] == 404
        assert ask("POST", "/v1/chat/completions", b"{")[0] == 400
        assert ask("POST", "/v1/chat/completions", b"[1]")[0] == 400
        status, body = ask("POST", "/v1/completions", b'{"prompt": "x", "max_tokens": -1}')
        assert (status, "-1" in body["error"]["message"]) == (400, True)
        for wrong in (b'{"max_tokens": 1000001}', b'{"stream": true, "stream_options": [1]}'):
            assert ask("POST", "/v1/completions", wrong)[0] == 400
        nested = b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}"
        assert ask("POST", "/v1/completions", nested)[0] in (200, 400)  # too deep or not is Python's to say
        line.close()


@pytest.mark.parametrize("how", ["</dev/null", "<&-", "</dev/null 2>&-"])
def test_it_ends_cleanly_whatever_its_stdin_is(how: str) -> None:
    command = f"exec {sys.executable} -m llm_bench.null_target --exit-with-stdin {how}"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "listening" in done.stdout


def test_a_closed_standard_output_is_refused() -> None:
    """The address would be told to nobody."""
    command = f"exec {sys.executable} -m llm_bench.null_target --exit-with-stdin </dev/null >&-"
    done = subprocess.run(["/bin/sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "standard output is closed; expected it open" in done.stderr


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--port", "{taken}"], "--port {taken}: "),
        (["--truth", "/no/such/folder/truth"], "--truth /no/such/folder/truth: No such file or directory"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(flags: list[str], named: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        command = [sys.executable, "-m", "llm_bench.null_target", *(flag.format(taken=taken) for flag in flags)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert named.format(taken=taken) in done.stderr


@pytest.mark.parametrize("flags", [["--ttft-ms", "nan"], ["--itl-ms", "inf"], ["--servers", "1", "--service-ms", "nan"],
                                   ["--servers", "99999999999"]])  # fmt: skip
def test_times_and_counts_that_cannot_be_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    assert "expected" in capsys.readouterr().err


def test_it_ends_when_its_stdin_is_closed() -> None:
    command = [sys.executable, "-m", "llm_bench.null_target", "--exit-with-stdin"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    assert b"listening" in child.stdout.readline()
    child.stdin.close()
    assert child.wait(60) == 0
    child.stdout.close()
