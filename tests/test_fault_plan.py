"""`--fault WHEN:WHAT` as typed, and its log as found again; tests/test_faults.py is of the faults of our engine."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench import faults
from llm_bench.errors import BenchError
from llm_bench.fault_doing import DOERS
from llm_bench.faults import FAULTS, NET, Done, Log, parse


@pytest.mark.parametrize("kind", FAULTS)
def test_the_example_of_each_kind_is_right_and_somebody_does_it(kind: str) -> None:
    (fault,) = parse([f"30s:{FAULTS[kind].example}"])
    assert (fault.kind, fault.at_ns, fault.what) == (kind, 30 * 10**9, FAULTS[kind].example)
    assert json.loads(json.dumps(fault.args)) == fault.args  # it goes to another process so
    assert kind in DOERS


@pytest.mark.parametrize(
    ("text", "args"),
    [
        (
            '1s:POST http://h:1/fault?a=b {"kind": "oom", "steps": 3}',
            {"method": "POST", "url": "http://h:1/fault?a=b", "body": '{"kind": "oom", "steps": 3}'},
        ),
        ("1s:DELETE https://h/fault", {"method": "DELETE", "url": "https://h/fault", "body": ""}),
        ("1s:cmd:pkill -f 'a b'", {"words": ["pkill", "-f", "a b"]}),
        ("1s:sh:a | b: c", {"text": "a | b: c"}),
        ("1s:signal:SIGKILL:77", {"signal": 9, "pid": 77}),
        ("1s:net:delay=50ms,for=5s", {"do": "delay", "value": 0.05, "for_s": 5.0}),
        ("1s:net:bandwidth=1Mbit", {"do": "bandwidth", "value": 125_000.0, "for_s": None}),
        ("1s:net:drop", {"do": "drop", "value": "refuse", "for_s": None}),
        ("1s:net:drop=blackhole, for=2min", {"do": "drop", "value": "blackhole", "for_s": 120.0}),
        ("1s:net:reset", {"do": "reset", "value": None, "for_s": None}),
        ("1s:engine:stall,seconds=2.5", {"body": {"kind": "stall", "seconds": 2.5}}),
        ("1s:engine:http_error,status=503,share=0.5", {"body": {"kind": "http_error", "status": 503, "share": 0.5}}),
        ("1s:engine:cut_stream,how=fin", {"body": {"kind": "cut_stream", "how": "fin"}}),
    ],
)
def test_what_is_typed_is_what_is_done(text: str, args: dict[str, object]) -> None:
    assert dict(parse([text])[0].args) == args


@given(st.integers(0, 86_400_000))
def test_times_are_exact_and_faults_are_in_their_order(ms: int) -> None:
    early, late = parse([f"{ms}ms:engine:oom", "0.5s:engine:crash"])
    assert {early.at_ns, late.at_ns} == {ms * 10**6, 500_000_000}
    assert early.at_ns <= late.at_ns


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("engine:crash", "500ms, 30s or 2min"),
        ("30:engine:crash", "500ms, 30s or 2min"),
        ("-1s:engine:crash", "500ms, 30s or 2min"),
        ("2d:engine:crash", "500ms, 30s or 2min"),
        ("100000s:engine:crash", "at most a day"),
        ("30s", "expected WHEN:WHAT"),
        ("30s:http:x", "expected WHEN:WHAT"),
        ("30s:bang:x", "expected WHEN:WHAT"),
        ("30s:POST nowhere", "METHOD URL"),
        ("30s:POST http://user:key@h/", "without user or key"),
        ("30s:POST http://h:99999/", "METHOD URL"),
        ("30s:POST http://h/ {oom}", "the body is not JSON"),
        ("30s:cmd:", "no command"),
        ("30s:cmd:a 'b", "as a shell would split it"),
        ("30s:sh:", "nothing for the shell"),
        ("30s:signal:TERM:1", "2 or more"),
        ("30s:signal:TERM:-5", "2 or more"),
        ("30s:signal:TERM:server", "2 or more"),
        ("30s:signal:BANG:77", "expected one of TERM"),
        ("30s:net:lag=3", "expected one of delay=50ms"),
        ("30s:net:delay", "delay is ''"),
        ("30s:net:delay=50", "delay is '50'"),
        ("30s:net:delay=50ms,for=5", "for is '5'"),
        ("30s:net:delay=50ms,5s", "expected for=TIME once"),
        ("30s:net:delay=50ms,for=0s", "for is '0s', which is no fault"),
        ("30s:net:delay=0ms", "delay is '0ms', which is no fault"),
        ("30s:signal:TERM:4194305", "2 or more"),
        ("30s:cmd:kill $(cat pid)", "$(cat is for a shell, and cmd: has none: expected sh:kill $(cat pid)"),
        ('30s:cmd:kill "$PID"', "is for a shell"),
        ("30s:cmd:kill `cat pid`", "is for a shell"),
        ("30s:cmd:a | b", "| is for a shell"),
        ("30s:cmd:a && b", "&& is for a shell"),
        ("30s:cmd:a; b", "a; is for a shell"),
        ("30s:cmd:a 2>&1", "2>&1 is for a shell"),
        ("30s:cmd:a >log", ">log is for a shell"),
        ("30s:cmd:~/stop.sh", "~/stop.sh is for a shell"),
        ("30s:cmd:A=1 b", "A=1 is for a shell"),
        ("30s:net:stall,for=1s,for=2s", "expected for=TIME once"),
        ("30s:net:stall=3s", "has no value"),
        ("30s:net:bandwidth=0Mbit", "bits a second"),
        ("30s:net:bandwidth=1MB", "bits a second"),
        ("30s:net:drop=hard", "refuse or blackhole"),
        ("30s:engine:", "a kind of the bundled engine's"),
        ("30s:engine:stall,2", "expected field=value"),
        ("30s:engine:stall,kind=oom", "expected field=value"),
        ("30s:cmd:a\x1bb", "cannot be printed"),
    ],
)
def test_what_is_wrong_is_said_with_what_would_be_right(text: str, right: str) -> None:
    with pytest.raises(BenchError) as e:
        parse([text])
    assert str(e.value).startswith("--fault ")
    assert right in str(e.value)


@pytest.mark.parametrize(
    "text",
    [
        "curl http://h/x?a=1&b=2",
        "sh -c 'kill $(cat pid); a | b'",
        "grep '|' a",
        "find . -exec rm {} \\;",
        "a --b=c",
        "a b>c",
    ],
)
def test_a_command_may_hold_what_a_shell_would_not_read(text: str) -> None:
    assert parse([f"1s:cmd:{text}"])[0].kind == "cmd"


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ("2s:net:delay=50ms,for=3s", "4s:net:stall,for=1s", "still lasts then (until 5s)"),
        ("2s:net:drop", "30s:net:reset", "still lasts then (to the cell's end)"),
        ("2s:net:reset,for=3s", "4s:net:stall,for=1s", "still lasts then (until 5s)"),
        ("2s:net:delay=50ms,for=3s", "5s:net:stall,for=1s", ""),
        ("2s:net:delay=50ms,for=3s", "2s:net:bandwidth=1Mbit,for=3s", ""),
        ("2s:net:reset", "3s:net:stall,for=1s", ""),
        ("2s:engine:stall,seconds=9", "3s:net:stall,for=1s", ""),
    ],
)
def test_net_faults_that_overlap_are_refused_in_whichever_order_they_are_typed(
    first: str, second: str, said: str
) -> None:
    for texts in ([first, second], [second, first]):
        if not said:
            assert len(parse(texts)) == 2
            continue
        with pytest.raises(BenchError) as e:
            parse(texts)
        assert str(e.value).startswith(f"--fault {second!r}: {first!r} {said}")


def test_three_net_faults_of_which_the_first_outlasts_the_second_are_refused() -> None:
    with pytest.raises(BenchError, match="still lasts"):
        parse(["2s:net:delay=50ms,for=9s", "2s:net:bandwidth=1Mbit,for=1s", "4s:net:stall,for=1s"])


def test_more_than_can_be_told_apart_are_refused() -> None:
    with pytest.raises(BenchError, match="at most 100"):
        parse(["1s:engine:oom"] * 101)


@given(st.text(max_size=40))
def test_any_text_is_a_fault_or_a_mistake(text: str) -> None:
    for form in (
        text,
        f"1s:{text}",
        *(f"1s:{kind}:{text}" for kind in (*FAULTS, "POST")),
        *(f"1s:net:{n}={text}" for n in NET),
    ):
        try:
            parse([form])
        except BenchError as e:
            assert str(e).startswith("--fault")  # noqa: PT017 - both ways are right


DONE = Done("engine:oom", "engine", 5, 6, 7, True, "HTTP 200")


def test_a_log_is_found_again_without_a_torn_line(tmp_path: Path) -> None:
    path = faults.path_of(tmp_path, "000-a")
    assert path.name == "000-a.faults.jsonl"
    late = DONE._replace(begun_ns=3, planned_ns=3)
    lines = [{"llm_bench_faults": 1, "start_ns": 1, "added_ms": 0.25}, DONE._asdict(), late._asdict()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"what": "eng')
    found = faults.read(path)
    assert found == Log(1, 0.25, (late, DONE))
    assert faults.of_end({"faults": json.loads(json.dumps(faults.document(found)))}) == found


@pytest.mark.parametrize("text", ["", "{}\n", "[]\n", "x\n", '{"llm_bench_faults": 2}\n'])
def test_what_is_no_log_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(BenchError, match="no faults of llm-bench"):
        faults.read(path)
    with pytest.raises(BenchError, match="cannot be read"):
        faults.read(tmp_path / "none.jsonl")


@pytest.mark.parametrize("end", [{}, {"faults": None}, {"faults": []}, {"faults": {"done": [{}]}}])
def test_a_cell_whose_end_tells_of_none_has_none(end: dict[str, object]) -> None:
    assert faults.of_end(end) is None


@pytest.mark.parametrize("what", ["signal:CONT:9", "signal:SIGCONT:9", "signal: CONT:9"])
def test_what_lets_go_on_is_a_remedy_however_it_is_typed(what: str) -> None:
    fault = faults.parse([f"1s:{what}"])[0]
    assert faults.Done(fault.what, fault.kind, 0, 1, 2, True, "").is_remedy
