"""What probes found, in words: of one target, side by side, and where greedy answers part."""

import json
import math
import re
import subprocess
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from llm_bench import probe, probe_report
from llm_bench.cli import app
from llm_bench.errors import TargetError
from llm_bench.perplexity import TEXT, Scored
from llm_bench.probe import AGREEMENT
from llm_bench.same_work import costs_apart, parting
from llm_bench.targets import Target
from tests.bench import command, environment
from tests.fixtures.protocols import SPEAKS, script, serve
from tests.scripted import Scripted, unused_port


def saying(name, texts, prompt_tokens=None):
    """A server whose answers to the fixed prompts are these, each at the price given."""
    good = serve(name)

    def answer(number, seen):
        if seen.method == "POST" and seen.body:
            for i, prompt in enumerate(AGREEMENT):
                if json.dumps(prompt)[1:-1].encode() in seen.body:
                    cost = (prompt_tokens or [9] * len(AGREEMENT))[i]
                    return script(name, SPEAKS[name].stream(texts[i].split("|"), cost))
        return good(number, seen)

    return answer


SAME = ["a|b", "c", "d|e|f", "g", "h|i"]


def found(server, name, target_name="x") -> probe_report.Found:
    target = Target(target_name, server.url.removesuffix("/v1") + ("/v1" if "openai" in name else ""), api=name)
    return target, probe.probe(target, lambda text: None, 5.0, compared=True, whole=True)


def test_what_is_known_of_a_build_says_whose_word_it_is():
    with Scripted(serve("tgi")) as server:
        target, of = found(server, "tgi")
    rows = dict(probe_report.check_rows(target, of))
    assert (rows["revision"], rows["precision"], rows["image"]) == ("abc123", "torch.float16", "sha-1")
    declared = Target("x", target.url, api="tgi", revision="abc", engine_version="9")
    rows = dict(probe_report.check_rows(declared, of._replace(told={"revision": "abc123"})))
    assert (rows["revision"], rows["engine version"]) == ("abc123 (as declared)", "9 (declared)")
    assert rows["image"] == "not said"


def test_several_targets_stand_side_by_side_with_the_notes_of_each():
    with Scripted(serve("tgi")) as one, Scripted(serve("openai-chat")) as other:
        both = [found(one, "tgi", "a"), found(other, "openai-chat", "b")]
    table = probe_report.side_by_side(both)
    rows = {row[0]: row[1:] for row in table}
    assert rows["protocol (api)"] == ["tgi", "openai-chat"]
    assert rows["lengths can be pinned"] == ["no", "yes"]
    assert {len(row) for row in table} == {3}
    assert probe_report.note_lines(both)[0].startswith("a: lengths are not pinned: tgi has no way to ask for it")


def test_a_note_of_several_targets_is_said_once_and_a_row_of_one_is_a_dash_for_others():
    with Scripted(serve("tgi")) as one:
        target, of = found(one, "tgi", "a")
    busy = of._replace(workers="1 of 1 ready, batches of at most 4", notes=[*of.notes, "alone"])
    several = [(target, of), (replace(target, name="b"), busy)]
    assert {row[0]: row[1:] for row in probe_report.side_by_side(several)}["workers"] == ["–", busy.workers]
    lines = probe_report.note_lines(several)
    assert sorted(line.partition(":")[0] for line in lines) == ["a, b"] * (len(of.notes) + 1) + ["b"]


def test_a_target_that_counts_no_prompt_tokens_is_not_said_to_cost_one_a_word():
    with Scripted(serve("ray-serve")) as one:
        target, of = found(one, "ray-serve")
    assert (of.sized, of.tokens_per_word) == (False, 1.0)
    assert dict(probe_report.check_rows(target, of))["tokens of a prompt"] == "not reported: a word is taken for one"


def test_where_greedy_answers_part_is_said_with_both_texts_and_what_prompts_cost():
    other = ["a|b", "c", "d|e|X", "g", "h"]
    with Scripted(saying("tgi", SAME)) as one, Scripted(saying("openai-completions", other)) as two:
        pair = [found(one, "tgi", "a"), found(two, "openai-completions", "b")]
    assert probe_report.agreement_lines(pair) == [
        "a and b: 3 of 5 greedy answers are the same",
        f"  {AGREEMENT[2]!r} parts at character 2: 'def' against 'deX'",
        f"  {AGREEMENT[4]!r} parts at character 1: 'hi' against 'h', its end",
    ]
    assert len(pair[0][1].agreement) == len(AGREEMENT)
    assert "answers" not in pair[0][1].public()


def test_tokenizers_differ_where_prompts_cost_more_than_a_template_apart():
    with (
        Scripted(saying("tgi", SAME, [5, 6, 7, 8, 9])) as one,
        Scripted(saying("tgi", SAME, [6, 7, 8, 9, 10])) as two,
        Scripted(saying("tgi", SAME, [5, 6, 9, 8, 9])) as three,
    ):
        a, b, c = found(one, "tgi", "a"), found(two, "tgi", "b"), found(three, "tgi", "c")
    assert probe_report.agreement_lines([a, b]) == ["a and b: 5 of 5 greedy answers are the same"]
    said = probe_report.agreement_lines([a, c])[-1]
    assert said == (
        "a and c: differing tokenizers: the same prompts cost 5, 6, 7, 8, 9 tokens here, 5, 6, 9, 8, 9 there"
    )


def test_a_target_that_left_a_prompt_unanswered_has_nothing_to_compare():
    with Scripted(serve("tgi")) as one:
        a = found(one, "tgi", "a")
    assert "no greedy answers to compare" in probe_report.agreement_lines([a, (a[0], a[1]._replace(answers=()))])[0]


def test_scores_of_the_bundled_text_stand_beside_the_first_one_that_has_them():
    """By hand: ln 2 a token is a perplexity of 2; over as many bytes as tokens, 1 bit a byte."""
    x = Scored(("<s>", "a", "b"), (-math.log(2),) * 2, 2)
    y = x._replace(logprobs=(-math.log(2), -math.log(8)))
    other = Scored(("<s>", "ab"), (-math.log(16),), 2)
    head, *lines = probe_report.scoring_lines([("n", "HTTP 404"), ("a", x), ("b", y), ("c", other)])
    assert head.startswith(f"the bundled text of {len(TEXT)} bytes")
    assert lines == [
        "  n: not scored: HTTP 404",
        "  a: perplexity 2 over 2 tokens, 1.0000 bits a byte",
        "  b: perplexity 4 over 2 tokens, 2.0000 bits a byte",
        "  c: perplexity 16 over 1 tokens, 2.0000 bits a byte",
        "a and b: perplexity +2, +1.0000 bits a byte; 1.39 nats apart at most, at token 2 ('b')",
        "a and c: +1.0000 bits a byte; perplexities do not compare, the text has other tokens there",
    ]
    assert len(probe_report.scoring_lines([("a", "x"), ("b", "y")])) == 3


@given(st.text(max_size=9), st.text(max_size=9), st.text(max_size=9))
def test_two_texts_part_where_their_common_beginning_ends(start, x, y):
    place = parting(start + x, start + y)
    assert (place is None) is (x == y)
    if place is not None:
        assert place >= len(start)
        assert (start + x)[:place] == (start + y)[:place]
        assert (start + x)[place : place + 1] != (start + y)[place : place + 1]


@pytest.mark.parametrize(("x", "y"), [([], []), ([1, 2], [3, 4]), ([1], [1, 2]), ([1, 5], [])])
def test_a_template_between_two_costs_is_no_difference(x, y):
    assert costs_apart(x, y) == ""


def test_the_command_shows_a_table_and_the_agreement_and_refuses_one_target_alone(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with Scripted(serve("tgi")) as one, Scripted(serve("openai-chat")) as two:
        (tmp_path / "targets.toml").write_text(
            f'[targets.a]\nurl = "{one.url.removesuffix("/v1")}"\napi = "tgi"\n\n[targets.b]\nurl = "{two.url}"\n'
        )
        ran = CliRunner().invoke(app, ["targets", "check", "a,b", "--agree"])
        assert ran.exit_code == 0, ran.output
        assert "openai-chat" in ran.output
        assert "greedy answers are the same" in ran.output
        assert "  a: not scored: the protocol tgi has no way to ask for it\n" in ran.output
        assert "  b: not scored: HTTP 404: The model `nope` does not exist.\n" in ran.output
        assert re.search(r"^note of a: lengths are not pinned: tgi has no way", ran.output, re.MULTILINE)
        alone = CliRunner().invoke(app, ["targets", "check", "a", "--agree"])
    assert "--agree: one target, a, expected two or more" in str(alone.exception)


def test_five_targets_fit_a_terminal_of_eighty_columns(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    with Scripted(serve("tgi")) as server:
        url = server.url.removesuffix("/v1")
        asked = ",".join(f"{name}={url}" for name in "abcde")
        ran = CliRunner().invoke(app, ["targets", "check", asked, "--api", "tgi"])
    assert ran.exit_code == 0, ran.output
    table = [line for line in ran.output.splitlines() if line[:1] in "┏┃┡│└"]
    assert max(map(len, table)) <= 80
    assert sum("lengths are not" in line for line in ran.output.splitlines()) == 1  # under the table, once
    assert "note of a, b, c, d, e: lengths are not pinned: tgi has no way to ask for it" in ran.output
    assert "…" not in ran.output


def test_one_target_that_is_not_there_takes_nothing_from_the_others(tmp_path):
    """The good ones stand in the table, each other one is a sentence, and the exit code is that of what was refused."""
    with Scripted(serve("tgi")) as one:
        url = one.url.removesuffix("/v1")
        asked = f"a={url},gone=http://127.0.0.1:{unused_port()},b={url},none=http://127.0.0.1:{unused_port()}"
        ran = subprocess.run(
            command("targets", "check", asked, "--api", "tgi", "--ready-timeout", "0.1"),
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment(COLUMNS="200"),
            check=False,
        )
    assert ran.returncode == TargetError.exit_code
    head = next(line for line in ran.stdout.splitlines() if line.startswith("┃"))
    assert head.replace("┃", "").split() == ["a", "b"]
    assert "note of a, b: lengths are not pinned" in ran.stdout
    said = [line for line in ran.stderr.splitlines() if "is not ready after 0.1 s" in line]
    assert [line.partition("target ")[2].partition(":")[0] for line in said] == ["gone", "none"]
    assert "Traceback" not in ran.stderr


def test_tokenizers_of_which_one_is_not_counted_are_unknown_and_not_different():
    with Scripted(saying("tgi", SAME, [5, 6, 7, 8, 9])) as one:
        a = found(one, "tgi", "a")
    silent = (replace(a[0], name="b"), a[1]._replace(agreement_tokens=()))
    assert probe_report.agreement_lines([a, silent]) == [
        "a and b: 5 of 5 greedy answers are the same",
        "a and b: whether they share a tokenizer is unknown: b reported no prompt tokens",
    ]
