"""Text of servers, traces and names acts nowhere: not on a terminal, not in Markdown, in no format of any report."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet as pq
from typer.testing import CliRunner

from llm_bench import objectives, parquet, printable, report, results, terminal
from llm_bench.cli import app
from llm_bench.results import Asked, Run
from tests import sample_arms
from tests.bench import bench, good, llm_server, rows, trace_file
from tests.sample import START_NS, record
from tests.scripted import Scripted, http_response
from tests.test_carried import slots
from tests.test_report import write_cell

# Clears the screen, sets a title, colours; C1; line ends of any kind; right to left; what UTF-8 cannot say is in names.
ACTS = "\x1b[2J\x1b]0;owned\x07\x1b[31m\x00\x08\x7f\x9b31m\x85\r\n\r\t\x0b\x0c\u2028\u2029\u202eabc\u202c\u2066x\u2069"
MARKS = "![i](https://x.example/i.png) [l](javascript:1) @octocat `c` <script>x</script> | a *b* _c_ ~~d~~ # e"
EVIL = f"{ACTS}{MARKS}\nno doubts"
RAW = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
OURS = re.compile("\x1b\\[[0-9;]*m")


def acting(text: str) -> list[str]:
    return sorted(set(RAW.findall(text)))


# ---- the text itself


@given(st.text(st.characters()))
def test_what_is_cleaned_is_one_line_that_does_not_act(text: str) -> None:
    found = printable.clean(text)
    assert not acting(found) and "\n" not in found
    assert printable.clean(found) == found
    assert printable.lines(text).count("\n") == text.count("\n")
    assert not acting(printable.lines(text, colour=True).replace("\x1b", "")) or "\x1b" in text


@given(st.text(st.characters(exclude_categories=["C", "Z"])))
def test_letters_of_any_script_stay_as_they_are(text: str) -> None:
    assert printable.clean(text) == text


def test_what_acts_is_seen_as_it_would_be_typed() -> None:
    assert printable.clean("a\x1b[2Jb\x9bc\x7f\u202ed\ud800") == "a\\x1b[2Jb\\u009bc\\u007f\\u202ed\\ud800"
    assert printable.clean("one\r\ntwo\tthree\rfour") == "one two three\\x0dfour"


def test_lines_and_our_own_colours_stay() -> None:
    assert printable.lines("\x1b[1ma\x1b[0m\nb\x1b[2J", colour=True) == "\x1b[1ma\x1b[0m\nb\\x1b[2J"
    assert printable.lines("\x1b[1ma\x1b[0m\nb") == "\\x1b[1ma\\x1b[0m\nb"


@given(st.text(st.characters()))
def test_a_json_text_means_the_same_afterwards(text: str) -> None:
    assert json.loads(printable.lines(json.dumps(text))) == text


def test_every_text_of_a_json_value_is_cleaned() -> None:
    assert printable.cleaned({"a\x1b": ["b\n", {"c": "\x07"}, 1, None]}) == {"a\\x1b": ["b ", {"c": "\\x07"}, 1, None]}


@pytest.mark.parametrize(
    ("n", "said"),
    [(1, "1 request"), (2, "2 requests"), (0, "0 requests"), (1000, "1,000 requests"), ("0.6", "0.6 requests"),
     (f"{0.6:.0f}", "1 request"), ("1.5", "1.5 requests")],
)  # fmt: skip
def test_counts_are_of_one_where_they_read_so(n: int | str, said: str) -> None:
    assert printable.counted(n, "request") == said


# ---- reports


def hostile(folder: Path) -> Path:
    """A run of two targets and two runs of each, all of whose foreign texts are EVIL; one cell is of another run."""
    texts: dict[str, Any] = {"error": EVIL, "finish_reason": EVIL, "labels": [EVIL], "request_class": EVIL}
    load = {"kind": "open", "label": EVIL, "rate": 100.0, "warmup": 0.0}
    entries = []
    for k in range(4):
        name = f"{EVIL}{k % 2}"
        made = [record(i, 10 * i, events=[10 * i + 5, 10 * i + 9], **texts) for i in range(60)]
        made += [record(60 + i, 600 + i, end=700, outcome="failed", error_kind=EVIL, **texts) for i in range(3)]
        made += [record(64, 640, events=[645, 650], request_class="chat")]
        target = {"name": name, "model": EVIL, "url": f"http://x/{EVIL}", "proxy": EVIL, EVIL: EVIL}
        head: dict[str, Any] = {"target": target, "probe": {EVIL: EVIL, "model": EVIL}, "settings": {EVIL: EVIL}}
        write_cell(folder, f"00{k}-a", made, load=load, pair=k // 2, run_id=EVIL * (1 + k // 3), **head)
        entries.append({"name": f"00{k}-a", "target": name, "load": load, "pair": k // 2})
        entries[-1]["doubts"] = [{"kind": EVIL, "text": EVIL}]
    entries.append({"name": "009-lost", "target": EVIL, "load": load})
    facts: dict[str, Any] = dict.fromkeys(("version", "run_id", EVIL), EVIL)
    facts |= {"host": {EVIL: EVIL, "cpu": EVIL, "cores": EVIL}, "settings": {EVIL: EVIL, "slo": "ttft_p95<1s"}}
    facts |= {
        "anchor": [sample_arms.ANCHOR_NS, START_NS],
        "command": [EVIL],
        "loads": [EVIL],
        "targets": [EVIL],
        "cells": entries,
    }
    facts |= {"declared": [{"name": EVIL, "url": EVIL}], "hashes": {"trace": EVIL, "tokenizers": {EVIL: EVIL}}}
    facts |= {"trace": {"path": EVIL, "sha256": EVIL, "notes": [EVIL], EVIL: {EVIL: [EVIL]}}}
    (folder / "run.json").write_text(json.dumps(facts))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its name is foreign text too."""
    return hostile(tmp_path_factory.mktemp("runs") / "run\x1b[31m\n|![x](y)<b>")


def loaded(folder: Path) -> Run:
    """As from a folder whose name is not UTF-8: half a surrogate pair stands for its byte."""
    run = results.load_run(folder)
    return replace(run, path=run.path.with_name(run.path.name + os.fsdecode(b"\xff")))


ASKED = Asked(["ttft_p50", "slo_attainment"], objectives.parse("ttft_p95<1s,chat:ttft_p95<1s"), tools=("vllm",))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("format_", report.FORMATS)
def test_nothing_foreign_acts_in_any_format(folder: Path, format_: str, alone: bool) -> None:
    text = report.render([loaded(folder)], ASKED._replace(runs=alone), format_)
    assert acting(text) == []
    if format_ != "json":  # where it stands as JSON escapes it
        assert "\\x1b[2J\\x1b]0;owned\\x07" in re.sub(r"\\([\\\[\]])", r"\1", text)  # and is seen, in Markdown escaped
    assert not re.search("^no doubts", text, re.M)  # no line of a report is of a server's making
    text.encode()


def test_a_coloured_terminal_has_our_colours_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    text = report.render([loaded(folder)], ASKED, "terminal")
    assert OURS.search(text)
    assert acting(OURS.sub("", text)) == []
    assert "\x1b[31m\\x00" not in text


def test_foreign_text_is_text_alone_in_markdown(folder: Path) -> None:
    text = report.render([loaded(folder)], ASKED, "md")
    bare = re.sub(r"\\[\\`*_\[\]|~#]", "", text)  # without what is escaped
    for acts in ("![", "](", "`", "<", "@octocat", "~~", "*b*", "_c_"):
        assert acts not in bare, acts
    tables = [line for line in bare.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in tables if "ttft_p50" in line or "runs" in line}) == 1
    assert "ttft_p50" in text  # a name stays readable


def test_parquet_takes_any_name(folder: Path, tmp_path: Path) -> None:
    parquet.write([loaded(folder)], Asked(), tmp_path / "x.parquet")
    table: pa.Table = pq.read_table(tmp_path / "x.parquet", columns=["run", "target"])
    assert acting(" ".join(table["run"].unique().to_pylist() + table["target"].unique().to_pylist())) == []


# ---- commands


def said(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.output


@pytest.mark.parametrize("format_", ["terminal", "md", "json"])
def test_nothing_foreign_acts_in_what_other_commands_say(folder: Path, format_: str) -> None:
    for arguments in (["diagnose"], ["compare"], ["history", "--metric", "ttft_p50"]):
        assert acting(said(arguments[0], folder, *arguments[1:], "--format", format_)) == [], arguments


def test_nothing_foreign_acts_in_a_gate_or_a_capacity_plan(tmp_path: Path) -> None:
    arms = {"a": sample_arms.BASE, "b": sample_arms.SAME}
    load = {**sample_arms.LOAD, "label": EVIL}
    gated = sample_arms.write_arms(tmp_path / "arms", arms, [load], settings={EVIL: EVIL}, version=EVIL)
    for format_ in ("terminal", "md", "json"):
        text = said(
            "gate", gated, "--baseline", "a", "--candidate", "b", "--rule", "ttft_p95<=+5%", "--format", format_
        )
        assert acting(text) == []
        assert "PASS" in text or "INCONCLUSIVE" in text
    for k, slots_ in enumerate((2, 4)):
        load = {"kind": "closed", "concurrency": slots_, "label": f"c={slots_}{EVIL}", "warmup": None}
        write_cell(tmp_path / "sweep", f"00{k}-a", slots(400, slots_, 100, 20), load=load, target={"name": EVIL})
    assert acting(said("capacity", tmp_path / "sweep", "--slo", "ttft_p95<1s")) == []


@pytest.mark.parametrize("looked_at", [False, True])
def test_a_voice_says_what_is_foreign_without_doing_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, looked_at: bool
) -> None:
    if looked_at:
        monkeypatch.setenv("FORCE_COLOR", "1")
    say, live = terminal.voice()
    say(EVIL)
    live(f"[/nothing] [red]{ACTS}")  # markup of rich, which would end in its error
    live("")
    got = capsys.readouterr().err
    assert acting(got.partition("\n")[0]) == []
    assert "\x1b]0;" not in got and "\x1b[2J" not in got and "\x1b[31m" not in got


@pytest.mark.parametrize("broken", [False, True])
def test_a_run_says_nothing_that_a_server_makes_act(tmp_path: Path, broken: bool) -> None:
    """Its model names, its failures while it is probed, its failures under load."""
    failing = [(0, http_response(400, json.dumps({"error": {"message": EVIL}}).encode()))]
    fine = llm_server(lambda n, seen: failing if n % 2 else good(seen))

    def answer(number: int, seen: Any) -> Any:
        if seen.method == "GET":
            return [(0, http_response(200, json.dumps({"data": [{"id": EVIL}, {"id": EVIL * 2}]}).encode()))]
        return failing if broken else fine(number, seen)

    with Scripted(answer) as server:
        trace = trace_file(tmp_path, rows(8))
        ran = bench(server.url, tmp_path, trace, "--concurrency", "1", "--format", "terminal")
    assert ran.rc == (4 if broken else 0)
    assert acting(ran.out + (ran.err if not broken else "")) == []
    assert "\\x1b[2J" in ran.err
    if broken:
        assert acting(ran.err) == []
    else:
        assert "\\x1b[2J" in ran.out
