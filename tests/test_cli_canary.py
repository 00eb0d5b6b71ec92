"""One command for what `run --interleave` and `gate` say together, and what to do about it."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from llm_bench import run as runs
from llm_bench.cli import app
from llm_bench.errors import BenchError
from tests.bench import good, llm_server, rows, trace_file
from tests.sample_arms import BASE, NOISY, SAME, SLOW, write_arms
from tests.scripted import Scripted

WORDS = ["--trace", "t.jsonl", "--rate", "100", "--pairs", "8", "--rule", "ttft_p95<=+2%"]


def invoke(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["canary", *map(str, words)])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What was to be measured; instead of measuring it, `arms` is written where the run would lie."""
    seen: dict[str, Any] = {"arms": {}, "ended": runs.Ended()}

    def measured(job: runs.Job, options: Any, *_: Any) -> runs.Ended:
        seen.update(job=job, options=options)
        write_arms(options.out, seen["arms"])
        return seen["ended"]

    monkeypatch.setattr(runs, "run", measured)
    return seen


@pytest.mark.parametrize(
    ("candidate", "action", "code"), [(SAME, "PROMOTE", 0), (SLOW, "ROLL BACK", 1), (NOISY, "INCONCLUSIVE", 3)]
)
def test_the_gates_verdict_is_what_to_do(
    asked: dict[str, Any], candidate: Sequence[float], action: str, code: int, tmp_path: Path
) -> None:
    asked["arms"] = {"base": BASE, "candidate": candidate}
    files = {name: tmp_path / f"c.{name}" for name in ("markdown", "json", "junit")}
    outputs = [word for name, path in files.items() for word in (f"--{name}", path)]
    got = invoke("--base", "http://a:1/v1", "--candidate", "http://b:1/v1", *WORDS, "--out", tmp_path / "run", *outputs)
    assert got.exit_code == code, got.output
    assert got.stdout.startswith(f"canary: {action}\n")
    assert files["markdown"].read_text().startswith(f"canary: {action}\n")
    verdict = json.loads(files["json"].read_text())["verdict"]
    assert {"PASS": "PROMOTE", "FAIL": "ROLL BACK"}.get(verdict, verdict) == action
    assert ElementTree.parse(files["junit"]).getroot().tag == "testsuites"


def test_the_arms_take_turns_and_a_bare_url_has_the_arms_name(asked: dict[str, Any], tmp_path: Path) -> None:
    asked["arms"] = {"base": BASE, "new": SAME}
    invoke("--base", "http://a:1/v1", "--candidate", "new=http://b:1/v1", *WORDS, "--out", tmp_path / "run")
    assert [(t.name, t.url) for t in asked["job"].targets] == [("base", "http://a:1/v1"), ("new", "http://b:1/v1")]
    rounds = asked["options"].rounds
    assert (rounds.repeat, rounds.interleave, rounds.same_salt) == (8, True, False)


@pytest.mark.parametrize(
    ("ended", "code"),
    [(runs.Ended(interrupted=True), 130), (runs.Ended(gone="base"), 4), (runs.Ended(died="worker 1"), 5)],
)
def test_a_canary_that_was_cut_short_judges_nothing(
    asked: dict[str, Any], ended: runs.Ended, code: int, tmp_path: Path
) -> None:
    asked.update(arms={"base": BASE, "candidate": SLOW}, ended=ended)
    got = invoke("--base", "http://a:1/v1", "--candidate", "http://b:1/v1", *WORDS, "--out", tmp_path / "run")
    assert got.exit_code == code
    assert "canary" not in got.stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--rule", "ttft_p95<=+2"], "ttft_p95<=+2"),
        (["--accept", "bad luck"], "bad luck"),
        (["--rate", "2", "--concurrency", "3"], "give one of them"),
        (["--resume"], "--resume"),
        (["--candidate", "a=http://b:1/v1,c=http://d:1/v1"], "one target each"),
        (["--rule", "goodput>=-5%"], "--slo"),
        (["--pairs", "4"], "--pairs 4: expected 5 or more"),
        (["--concurrency", "1,2,4", "--pairs", "5"], "--pairs 5: expected 6 or more"),
    ],
)
def test_what_cannot_be_judged_is_refused(asked: dict[str, Any], words: list[str], text: str) -> None:
    asked["arms"] = {"base": BASE, "candidate": SAME}
    base = ["--base", "http://a:1/v1", "--candidate", "http://b:1/v1", "--trace", "t.jsonl", "--rule", "e2e_p50<=+5%"]
    with pytest.raises(BenchError, match=re.escape(text)) as caught:
        raise invoke(*base, *words).exception  # type: ignore[misc]
    assert caught.value.exit_code == 2
    assert "job" not in asked  # before anything is measured


def test_two_servers_are_measured_in_turn_and_judged(tmp_path: Path) -> None:
    """Requests so few are no window: no verdict, and why not; every run is kept."""
    with Scripted(llm_server(lambda _, seen: good(seen))) as a, Scripted(llm_server(lambda _, seen: good(seen))) as b:
        words = ["--trace", trace_file(tmp_path, rows(4)), "--concurrency", "1", "--pairs", "5", "--warmup", "0"]
        got = invoke("--base", a.url, "--candidate", b.url, *words, "--rule", "e2e_p50<=+5%", "--out", tmp_path / "run")
    assert got.exit_code == 3
    assert "doubt: too short" in got.stdout
    assert len(list((tmp_path / "run").glob("*.arrow"))) == 10
