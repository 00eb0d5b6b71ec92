"""`llm-bench trace`: every command on a file as its user would have it, and what is wrong told in one sentence."""

import csv
import json
import os
import random
import resource
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from llm_bench import trace
from llm_bench.cli import app
from llm_bench.errors import BenchError

KEY = "0123456789abcdef-secret"


def invoke(*arguments):
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


@pytest.fixture
def file(tmp_path):
    """400 requests at about 5/s, half of them sharing a block, in Mooncake's words."""
    draw, at, path = random.Random(1), 0.0, tmp_path / "t.jsonl"
    with path.open("w") as out:
        for i in range(400):
            at += draw.expovariate(5)
            row = {"timestamp": round(at * 1000), "input_length": 512 + draw.randrange(1, 512), "output_length": 50}
            out.write(json.dumps(row | {"hash_ids": [draw.randrange(2) * (i + 1), 1000 + i]}) + "\n")
    return path


def test_inspect_says_what_a_trace_is_in_each_format_and_as_a_picture(file, tmp_path):
    for form, said in (("terminal", "prefix hits of an endless cache"), ("md", "| requests | 400 |")):
        done = invoke("inspect", file, "--format", form)
        assert done.exit_code == 0, done.exception
        assert said in done.stdout
    pytest.importorskip("matplotlib")
    done = invoke("inspect", file, "--format", "json", "--plot", tmp_path / "t.png")
    assert json.loads(done.stdout)["workload"]["n"] == 400
    assert (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"


def test_convert_gives_the_same_requests_and_overwrites_nothing(file, tmp_path):
    out = tmp_path / "own.jsonl.gz"
    assert invoke("convert", file, "-o", out).exit_code == 0
    before, after = trace.read(file), trace.read(out)
    assert after.format == "llm-bench"
    assert [(r.at_s, r.tokens_in, r.hash_ids) for r in before.requests] == [
        (r.at_s, r.tokens_in, r.hash_ids) for r in after.requests
    ]
    again = invoke("convert", file, "-o", out)
    assert isinstance(again.exception, BenchError)
    assert "nothing is overwritten" in str(again.exception)


def test_convert_spreads_ticks_where_asked_and_says_so(tmp_path):
    path = tmp_path / "ticks.csv"
    with path.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["ts", "a", "b"])
        writer.writerows([s, 10, 5] for s in range(40) for _ in range(3))
    options = ["--map", "at=ts,in=a,out=b", "--unit", "s", "--format-of-trace", "plain"]
    assert invoke("convert", path, "-o", tmp_path / "off.jsonl", *options).exit_code == 0
    assert invoke("convert", path, "-o", tmp_path / "even.jsonl", *options, "--dejitter", "even").exit_code == 0
    as_is, even = (trace.read(tmp_path / f"{n}.jsonl").requests for n in ("off", "even"))
    assert [r.at_s for r in as_is[:4]] == [0, 0, 0, 1]
    assert [r.at_s for r in even[:4]] == pytest.approx([0, 1 / 3, 2 / 3, 1])


def test_a_fit_makes_traces_of_other_rates_the_same_for_a_seed(file, tmp_path):
    done = invoke("fit", file, "-o", tmp_path / "m.json")
    assert done.exit_code == 0, done.exception
    assert "prefix" in done.stdout or "cache" in done.stdout
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        arguments = ["--rate", 20, "--duration", 30, "--seed", seed, "-o", tmp_path / f"{name}.jsonl"]
        assert invoke("synth", tmp_path / "m.json", *arguments).exit_code == 0
    a, b, c = ((tmp_path / f"{n}.jsonl").read_bytes() for n in "abc")
    assert a == b != c
    assert 480 < len(trace.read(tmp_path / "a.jsonl").requests) < 720  # 20/s for 30 s


def test_anonymised_files_hold_no_id_and_keep_their_sharing(file, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACE_KEY", KEY)
    done = invoke("anonymise", file, "-o", tmp_path / "safe.jsonl", "--key-env", "TRACE_KEY")
    assert done.exit_code == 0, done.exception
    rows = [line.split("│")[1:4] for line in done.stdout.splitlines() if line.startswith("│")]
    assert len(rows) > 10
    assert all(before.strip() == after.strip() for _, before, after in rows)
    ids = {i for r in trace.read(file).requests for i in r.hash_ids}
    assert not ids & {i for r in trace.read(tmp_path / "safe.jsonl").requests for i in r.hash_ids}


def test_a_mix_has_each_part_as_a_class_with_its_share(file, tmp_path):
    other = tmp_path / "batch.jsonl"
    other.write_text("".join(f'{{"timestamp":{i},"input_length":9,"output_length":2}}\n' for i in range(0, 90000, 100)))
    parts = [f"{file}:0.75:name=chat", f"{other}:0.25:priority=3"]
    done = invoke("mix", *parts, "--rate", 10, "-o", tmp_path / "mix.jsonl")
    assert done.exit_code == 0, done.exception
    requests = trace.read(tmp_path / "mix.jsonl").requests
    chat = sum(r.request_class == "chat" for r in requests) / len(requests)
    assert chat == pytest.approx(0.75, abs=0.01)
    assert {r.priority for r in requests if r.request_class == "batch"} == {3}


@pytest.mark.parametrize(("arguments", "said"), [
    (["inspect", "none.jsonl"], "none.jsonl: cannot be read: No such file"),
    (["inspect", "{file}", "--format", "xml"], "--format 'xml': expected terminal, md or json"),
    (["inspect", "{file}", "--plot", "x.gif"], "--plot x.gif: this writes a picture; expected a name that ends in"),
    (["inspect", "{file}", "--map", "at"], "--map 'at': expected name=column pairs"),
    (["inspect", "{file}", "--unit", "h"], "unit"),
    (["inspect", ""], "the name of a file is empty"),
    (["convert", "{file}", "-o", ""], "the name of a file is empty"),
    (["inspect", "{file}", "--plot", "no/such/x.png"], "--plot no/such/x.png: no folder no/such"),
    (["inspect", "{file}", "--plot", "{file}"], "--plot {file}: this writes a picture"),
    (["convert", "{file}", "-o", "no/such/x.jsonl"], "no folder no/such"),
    (["convert", "{file}", "-o", "{tmp}/x.csv"], "-o {tmp}/x.csv: this writes JSONL; expected a name that ends in .js"),
    (["convert", "{file}", "-o", "{tmp}/x.parquet"], "this writes JSONL"),
    (["convert", "{file}", "-o", "{tmp}/x.json"], "this writes JSONL"),
    (["convert", "{file}", "-o", "{tmp}/x.csv.gz"], "this writes JSONL"),
    (["fit", "{file}", "-o", "{tmp}/m.jsonl"], "-o {tmp}/m.jsonl: this writes a model as JSON; expected a name that"),
    (["convert", "{file}", "-o", "{tmp}/x.jsonl", "--dejitter", "often"], "--dejitter 'often'"),
    (["fit", "{file}", "-o", "{tmp}/m.json", "--bins", "0"], "--bins 0"),
    (["synth", "{file}", "-o", "{tmp}/y.jsonl"], "t.jsonl: not JSON: Extra data in line 2, expected a model that"),
    (["synth", __file__, "-o", "{tmp}/y.jsonl"], "expected a model that `trace fit` wrote"),
    (["synth", "{file}", "-o", "{tmp}/y.jsonl", "--start", "5"], "--start is for a folder of ServeGen's clients"),
    (["synth", "{tmp}", "-o", "{tmp}/y.jsonl", "--duration", "9", "--lengths", "0.5"], "--lengths is for a fitted"),
    (["synth", "{tmp}", "-o", "{tmp}/y.jsonl"], "give --duration"),
    (["synth", "{file}", "-o", "{tmp}/y.jsonl", "--lengths", "nan"], "--lengths nan"),
    (["synth", "{file}", "-o", "{tmp}/y.jsonl", "--seed", "-1"], "--seed -1"),
    (["anonymise", "{file}", "-o", "{tmp}/y.jsonl", "--key-env", "NOT_SET_ANYWHERE"], "no such variable is set"),
    (["mix", "{file}", "-o", "{tmp}/y.jsonl"], "no share"),
    (["mix", "{file}:0", "-o", "{tmp}/y.jsonl"], "a share of 0"),
    (["mix", "{file}:1", "-o", "{tmp}/y.jsonl", "--rate", "0"], "--rate 0"),
])  # fmt: skip
def test_what_is_wrong_is_one_sentence_with_exit_code_2(file, tmp_path, arguments, said):
    done = invoke(*(a.format(file=file, tmp=tmp_path) for a in arguments))
    assert isinstance(done.exception, BenchError), done.output
    assert said.format(file=file, tmp=tmp_path) in str(done.exception)
    assert done.exception.exit_code == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.jsonl"]


def test_synth_says_the_rate_that_came_of_the_one_asked_for(file, tmp_path):
    assert invoke("fit", file, "-o", tmp_path / "m.json").exit_code == 0
    done = invoke("synth", tmp_path / "m.json", "--rate", 20, "--duration", 30, "-o", tmp_path / "y.jsonl")
    n = len(trace.read(tmp_path / "y.jsonl").requests)
    assert done.stdout == f"{tmp_path / 'y.jsonl'}: {n:,} requests, {n / 30:.3g}/s\n"


START = """
import resource, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
most = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
from llm_bench.cli import main
main()
"""


def start(*arguments, largest_file=resource.RLIM_INFINITY):
    """The command in a process of its own, whose files the system cuts at so many bytes."""
    words = [sys.executable, "-c", START, str(largest_file), "trace", *map(str, arguments)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("arguments", [
    ["convert", "{file}", "-o", "{tmp}/x.jsonl"],
    ["convert", "{file}", "-o", "{tmp}/x.jsonl.gz"],
    ["fit", "{file}", "-o", "{tmp}/x.json"],
    ["inspect", "{file}", "--plot", "{tmp}/x.png"],
    ["fit", "{file}", "-o", "{tmp}/small.json", "--plot", "{tmp}/x.svg"],
])  # fmt: skip
def test_a_file_that_cannot_be_written_whole_is_named_and_not_left(file, tmp_path, arguments):
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:20]))
    words = [a.format(file=file, tmp=tmp_path) for a in arguments]
    running = start(*words, largest_file=4096)
    _, said = running.communicate(timeout=100)
    assert said.splitlines()[-1] == f"llm-bench: {words[-2]} {words[-1]}: cannot be written: File too large"
    assert running.returncode == 2
    assert {p.name for p in tmp_path.iterdir()} <= {"t.jsonl", "small.json"}


def test_an_interrupted_command_says_so_of_its_own_work(tmp_path):
    slow = tmp_path / "slow.jsonl"
    os.mkfifo(slow)
    running = start("inspect", slow)
    with slow.open("w"):  # open when the command reads it, which waits for what never comes
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=100)
    assert said.splitlines()[-1] == "llm-bench: interrupted; no file is left half written"
    assert running.returncode == 130
