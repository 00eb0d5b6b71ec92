"""What a gate found, in each format: one set of numbers, strict JSON, XML that parses, Markdown that holds."""

import json
import math
import os
import re
import subprocess
import textwrap
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from llm_bench import cli_gate, gate_report, grid, pairs, results, rules
from llm_bench.errors import BenchError
from llm_bench.gate import Objection
from llm_bench.results import Asked
from tests.sample_arms import BASE, NOISY, SAME, SLOW, write_arms, write_book
from tests.test_gate import judged

RULES = ("ttft_p95<=+3%", "tokens_per_second>=-3%", "error_rate<=+0.5pp")

app = typer.Typer()
app.command()(cli_gate.gate)
app.command()(cli_gate.compare)
app.command()(cli_gate.history)


def invoke(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(w) for w in words])


def refused(*words: str | Path) -> str:
    """The error's sentence, which `main` prints before it exits with its code."""
    got = invoke(*words)
    assert isinstance(got.exception, BenchError), got.output
    assert got.exception.exit_code == 2
    return str(got.exception)


def gate_words(folder: Path, *more: str | Path) -> list[str | Path]:
    rules = [word for rule in RULES for word in ("--rule", rule)]
    return ["gate", folder, "--baseline", "base", "--candidate", "cand", *rules, *more]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, candidate in (("same", SAME), ("slow", SLOW), ("noisy", NOISY)):
        write_arms(folder / name, {"base": BASE, "cand": candidate})
    return folder


@pytest.mark.parametrize(
    ("run", "verdict", "code"), [("same", "PASS", 0), ("slow", "FAIL", 1), ("noisy", "INCONCLUSIVE", 3)]
)
def test_the_exit_code_is_the_verdict(runs: Path, run: str, verdict: str, code: int) -> None:
    for format_ in ("terminal", "md", "json"):
        got = invoke(*gate_words(runs / run, "--format", format_))
        assert got.exit_code == code, got.output
        assert verdict in got.output


def test_json_is_strict_and_its_numbers_are_those_worked_by_hand(runs: Path) -> None:
    got = invoke(*gate_words(runs / "slow", "--format", "json"))
    found = json.loads(got.output, parse_constant=lambda word: pytest.fail(word))
    first = found["tests"][0]
    d = np.log(np.array(SLOW) / BASE)
    assert first["change"] == pytest.approx(math.expm1(d.mean()), abs=1e-6)
    assert first["bound_95"] == pytest.approx(math.expm1(pairs.bound(d) or 0), abs=1e-6)
    assert first["interval_95"] == pytest.approx([math.expm1(-(pairs.bound(-d, 0.025) or 0)),
                                                  math.expm1(pairs.bound(d, 0.025) or 0)], abs=1e-6)  # fmt: skip
    assert (first["p"], first["p_holm"]) == (1 / 256, 3 / 256)
    assert first["smallest_change_found"] == pytest.approx(
        math.expm1(pairs.detectable(d, math.log(1.03), alpha=0.05 / 3) or 0), abs=1e-6
    )
    assert [p["pair"] for p in first["pairs"]] == list(range(8))
    ratios = [p["candidate"] / p["baseline"] for p in first["pairs"]]
    assert ratios == pytest.approx((np.array(SLOW) / BASE).tolist(), rel=1e-5)
    assert first["candidate"] / first["baseline"] - 1 == pytest.approx(first["change"])
    rate = found["tests"][2]
    assert (rate["in_points"], rate["margin"], rate["change"]) == (True, 0.005, 0)


def test_both_means_have_their_unit_and_it_is_said_what_means_they_are(runs: Path) -> None:
    got = judged(runs / "slow", *RULES)
    rows = gate_report.rows(got)[1]
    assert [[cell.split()[-1] for cell in row[2:4]] for row in rows[:2]] == [["ms"] * 2, ["tokens/s"] * 2]
    assert "geometric for %, where a report's are arithmetic" in gate_report.text(got)


def test_help_lists_the_kinds_that_can_be_accepted() -> None:
    shown = " ".join(re.sub(r"[│|]", " ", invoke("gate", "--help").output).split())
    for kind in rules.ACCEPTABLE:
        assert f"'{kind}'" in shown


def test_all_formats_say_one_set_of_numbers(runs: Path) -> None:
    got = judged(runs / "slow", *RULES)
    for cell in (text for row in gate_report.rows(got)[1] for text in row):
        assert cell in gate_report.text(got)
        assert grid.escaped(cell) in gate_report.markdown(got)
    for test in got.tests:
        assert f"{test.name}: {test.verdict}: {test.why}" in gate_report.text(got)


# ---- JUnit


def suites(text: str) -> dict[str, list[ElementTree.Element]]:
    root = ElementTree.fromstring(text)
    assert root.tag == "testsuites"
    found = {}
    for suite in root:
        cases = list(suite)
        assert int(suite.attrib["tests"]) == len(cases)
        assert int(suite.attrib["failures"]) == len(suite.findall("testcase/failure"))
        assert int(suite.attrib["errors"]) == len(suite.findall("testcase/error"))
        found[suite.attrib["name"]] = cases
    return found


@pytest.mark.parametrize(("run", "tag"), [("same", "system-out"), ("slow", "failure"), ("noisy", "error")])
def test_junit_has_a_case_a_test_and_undecided_is_no_success(runs: Path, run: str, tag: str) -> None:
    got = judged(runs / run, *RULES)
    ((suite, cases),) = suites(gate_report.junit(got)).items()
    assert suite == "llm-bench gate cand against base"
    assert [case.attrib["name"] for case in cases] == [test.name for test in got.tests]
    (said,) = cases[0]
    assert (said.tag, said.text is not None and got.tests[0].why in said.text) == (tag, True)


def test_junit_survives_what_xml_cannot_say(runs: Path) -> None:
    got = judged(runs / "same", *RULES)
    foul = 'a\x00\x1b[31m<b>&"]]>\ud800￿ é 🚀'
    got = got._replace(tests=[got.tests[0]._replace(why=foul, verdict="FAIL", load=foul)], candidate=foul)
    ((_, (case,)),) = suites(gate_report.junit(got)).items()
    assert case[0].attrib["message"] == 'a��[31m<b>&"]]>�� é 🚀'


def test_a_load_that_one_arm_lacks_is_a_case_too(runs: Path) -> None:
    got = judged(runs / "same", *RULES)
    got = got._replace(objections=[Objection("c=9", "cand", "missing cell", "it has no pair 0")])
    ((_, cases),) = suites(gate_report.junit(got)).items()
    assert (cases[-1].attrib["name"], cases[-1][0].tag) == ("missing cell at c=9", "error")
    assert "doubt: missing cell: cand at c=9: it has no pair 0" in gate_report.text(got)


# ---- charts of a CI


def test_figures_for_charts_are_the_candidates_and_of_one_direction_a_file(runs: Path, tmp_path: Path) -> None:
    small, big = tmp_path / "small.json", tmp_path / "big.json"
    assert invoke(*gate_words(runs / "slow", "--smaller-json", small, "--bigger-json", big)).exit_code == 1
    smaller, bigger = (json.loads(path.read_text()) for path in (small, big))
    assert [entry["name"] for entry in smaller] == ["ttft_p95 at rate=100/s", "error_rate at rate=100/s"]
    assert [entry["name"] for entry in bigger] == ["tokens_per_second at rate=100/s"]
    for entry in smaller + bigger:
        assert list(entry) == ["name", "unit", "value", "range", "extra"]
        assert isinstance(entry["value"], float) and all(isinstance(entry[k], str) for k in entry if k != "value")
        assert re.fullmatch(r"± [\d.e-]+", entry["range"])
    tests = json.loads(gate_report.json_text(judged(runs / "slow", *RULES)))["tests"]
    assert smaller[0]["value"] == tests[0]["candidate"]
    assert smaller[0]["extra"].startswith("+6.01% against base, ttft_p95<=+3%: FAIL\n")


# ---- Markdown


def test_markdown_of_foreign_text_is_text() -> None:
    foul = "| a <script>x</script> [l](http://e) `c` *b* _i_ @someone #12\n# head \x1b[0m & \\"
    shown = grid.escaped(foul)
    assert "\n" not in shown and "<" not in shown and "\x1b" not in shown and "@s" not in shown
    for special in "|[]`*_#":
        assert all(shown[m.start() - 1] == "\\" for m in re.finditer(re.escape(special), shown)), special
    table = grid.markdown(["a|b", "c"], [["1|2", "x\ny"]])
    lines = [re.sub(r"\\\|", "", line) for line in table.splitlines()]
    assert [line.count("|") for line in lines] == [3, 3, 3]


def test_a_servers_error_text_does_not_run_in_a_pull_request(tmp_path: Path) -> None:
    run = results.load_run(write_arms(tmp_path, {"base": BASE, "cand": SAME}))
    entries = [{"name": m.name, "target": m.target, "end": {"reason": "exhausted"},
                "doubts": [{"kind": "failed requests", "text": "<img src=x onerror=alert(1)> | @all\n\n# h"}]}
               for m in run.cells]  # fmt: skip
    write_book(tmp_path, cells=entries)
    shown = gate_report.markdown(judged(tmp_path, "ttft_p95<=+3%"))
    assert "&lt;img src=x onerror=alert(1)&gt; \\| @\u200ball  \\# h (15 more such)" in shown
    assert "<img" not in shown


# ---- the terminal


def test_columns_of_a_table_are_as_wide_as_their_cells() -> None:
    lines = grid.terminal(["name", "n"], [["a", "1"], ["東京", "1000"]], left=(0,)).splitlines()
    assert lines == ["  name     n", "  ────  ────", "  a        1", "  東京  1000"]


def test_doubts_are_said_once_a_kind_with_why_some_are_no_reason(runs: Path) -> None:
    same = [Objection("c=1", f"cand, pair {k}", "retries", "3 of 9") for k in range(3)]
    other = Objection("", "base, cand", "not interleaved", "apart")
    assert gate_report.counted([*same, other], ["not interleaved"]) == [
        "retries: cand, pair 0 at c=1: 3 of 9 (2 more such); no reason against a verdict: latency runs from the first "
        "attempt, so that it holds them",
        "not interleaved: base, cand: apart; accepted",
    ]
    assert "no doubts" in gate_report.text(judged(runs / "same", *RULES))


# ---- the commands


def test_what_a_gate_lacks_is_refused_with_what_to_give(runs: Path, tmp_path: Path) -> None:
    assert "give --rule, such as" in refused("gate", runs / "same", "--baseline", "base", "--candidate", "cand")
    assert "give --baseline and --candidate" in refused("gate", runs / "same", "--rule", "ttft_p95<=+3%")
    assert "give the RUN of equal arms" in refused("gate", "--self-test")
    assert "equal arms are for --self-test" in refused(
        "gate", runs / "same", "--baseline", "base", "--candidate", "base", "--rule", "ttft_p95<=+3%"
    )
    assert "goodput needs the limits of --slo" in refused(*gate_words(runs / "same", "--rule", "goodput>=-3%"))
    assert "--format 'xml': expected one of terminal, md, json" in refused(
        *gate_words(runs / "same", "--format", "xml")
    )
    assert "cannot be written: No such file" in refused(
        *gate_words(runs / "same", "--junit", tmp_path / "no" / "j.xml")
    )
    assert "no such run folder" in refused(*gate_words(tmp_path / "none"))
    assert "need 9 at least" in refused(
        *gate_words(runs / "same", *[w for k in range(10) for w in ("--rule", f"{METRICS[k]}<=+3%")])
    )


METRICS = [f"{series}_{reducer}" for series in ("e2e", "tpot") for reducer in ("p50", "p90", "p95", "mean", "max")]


def test_a_rule_on_goodput_takes_the_limits_given(runs: Path) -> None:
    got = invoke(*gate_words(runs / "same", "--rule", "goodput>=-5%", "--slo", "ttft_p95<110ms", "--format", "json"))
    goodput = json.loads(got.output)["tests"][3]
    assert goodput["baseline"] > 0
    assert (got.exit_code, goodput["verdict"]) == (0, "PASS")


def test_the_limits_that_a_run_was_made_with_are_those_of_its_goodput(tmp_path: Path) -> None:
    folder = write_arms(tmp_path / "run", {"base": BASE, "cand": SAME})
    cells = [{"name": m.name, "end": {"reason": "exhausted"}} for m in results.load_run(folder).cells]
    write_book(folder, cells=cells, settings={"slo": "ttft_p95<110ms"})
    got = invoke(*gate_words(folder, "--rule", "goodput>=-5%", "--format", "json"))
    assert json.loads(got.output)["tests"][3]["baseline"] > 0


def test_files_are_written_beside_what_is_shown(runs: Path, tmp_path: Path) -> None:
    files = {option: tmp_path / option for option in ("--markdown", "--junit", "--json")}
    got = invoke(*gate_words(runs / "slow", *[w for pair in files.items() for w in pair]))
    assert got.exit_code == 1
    assert files["--markdown"].read_text().startswith("### Gate: FAIL: cand against base")
    assert json.loads(files["--json"].read_text())["verdict"] == "FAIL"
    assert suites(files["--junit"].read_text())


def test_stored_runs_are_compared_by_their_folders(tmp_path: Path) -> None:
    for name, ttfts in (("old", BASE), ("new", SLOW)):
        write_arms(tmp_path / name, {"t": ttfts}, interleaved=False)
    words = ("gate", "--baseline", tmp_path / "old", "--candidate", tmp_path / "new", "--rule", "ttft_p95<=+3%")
    got = invoke(*words)
    assert got.exit_code == 3 and "doubt: not interleaved" in got.output
    assert invoke(*words, "--accept", "not interleaved").exit_code == 1


@pytest.mark.parametrize("name", ["same", "slow"])
def test_a_self_test_of_two_targets_says_false_alarms_and_what_can_be_found(runs: Path, name: str) -> None:
    got = invoke("gate", "--self-test", runs / name)
    flat = " ".join(got.output.split())
    assert got.exit_code == (0 if name == "same" else 1), got.output
    assert "False alarms:" in flat and "(5% allowed)" in flat and "no request was sent anew" in flat
    found = json.loads(invoke("gate", "--self-test", runs / name, "--format", "json").output)
    assert found["relabelled"]["failed_at_zero"] <= 0.05
    assert invoke("gate", "--self-test", runs / name, "--format", "md").output.startswith("### Gate on equal arms: ")


def test_a_self_test_of_one_target_takes_its_repeats_two_by_two(tmp_path: Path) -> None:
    write_arms(tmp_path / "one", {"t": [*BASE, *SAME]}, interleaved=False)
    got = invoke("gate", "--self-test", tmp_path / "one")
    assert got.exit_code == 0 and "t/2 against t/1" in got.output
    write_arms(tmp_path / "three", dict.fromkeys("abc", BASE))
    assert "3 targets; give --baseline and --candidate" in refused("gate", "--self-test", tmp_path / "three")
    words = ("--baseline", "a", "--candidate", "c")
    assert "c against a" in invoke("gate", "--self-test", tmp_path / "three", *words).output


def test_the_gate_and_the_report_have_the_same_figures(runs: Path) -> None:
    run = results.load_run(runs / "slow")
    of_report = [
        (s.measured.target, s.measured.pair, s.values[0].value) for s in results.sheets(run, Asked(["ttft_p95"]))
    ]
    of_pairs = json.loads(gate_report.json_text(judged(runs / "slow", "ttft_p95<=+3%")))["tests"][0]["pairs"]
    of_gate = [(arm, p["pair"], p[key]) for p in of_pairs for arm, key in (("base", "baseline"), ("cand", "candidate"))]
    assert sorted(of_gate) == sorted(of_report)


def test_an_interrupted_run_is_no_pass(tmp_path: Path) -> None:
    folder = write_arms(tmp_path / "run", {"base": BASE, "cand": SAME})
    cells = [{"name": m.name, "target": m.target, "load": {"label": m.load}, "end": {"reason": "exhausted"}}
             for m in results.load_run(folder).cells]  # fmt: skip
    write_book(folder, cells=cells, targets=["base", "cand"], loads=["rate=100/s", "rate=200/s"])
    got = invoke(*gate_words(folder))
    assert got.exit_code == 3
    assert "doubt: missing cell: base at rate=200/s" in got.output


@pytest.mark.parametrize(("codes", "code"), [([0], 0), ([1], 1), ([3, 3], 3), ([3, 0], 0), ([3, 1], 1), ([2], 2)])
def test_the_worked_example_for_a_ci_lets_nothing_but_a_pass_through(
    tmp_path: Path, codes: list[int], code: int
) -> None:
    """The recipe's own shell, as GitHub runs it, with what llm-bench says given: asked for no more often than that."""
    text = (Path(__file__).parents[1] / "docs" / "ci.md").read_text()
    assert "allow_failure" not in text
    recipe = textwrap.dedent(
        text.split("name: Measure in pairs and judge\n        run: |\n")[1].split("      - uses")[0]
    )
    tool = tmp_path / "llm-bench"
    tool.write_text('#!/bin/sh\n[ "$1" = gate ] || exit 0\nread -r c < codes\nsed -i 1d codes\nexit "$c"\n')
    tool.chmod(0o755)
    (tmp_path / "codes").write_text("".join(f"{c}\n" for c in codes))
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TRACE": "t", "GITHUB_STEP_SUMMARY": "summary"}
    done = subprocess.run(["bash", "-eo", "pipefail", "-c", recipe], cwd=tmp_path, env=env, timeout=180)
    assert done.returncode == code
    assert (tmp_path / "codes").read_text() == ""


def test_the_worked_examples_use_options_that_there_are() -> None:
    text = (Path(__file__).parents[1] / "docs" / "ci.md").read_text().replace("\\\n", " ")
    text = re.sub(r"\n {6}--", " --", text)
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    lines = [line for line in text.splitlines() if re.search(r"llm-bench (gate|compare|history) ", line)]
    assert len(lines) >= 7
    for line in lines:
        name, words = re.findall(r"llm-bench (\w+) (.*)", line)[0]
        known = {option for param in commands[name].params for option in param.opts}
        assert set(re.findall(r"--[a-z-]+", words)) <= known, line
    for needed, tests in re.findall(r"(\d+) for (?:up to )?(\d+)", text):
        assert (pairs.needed(int(tests)), pairs.needed(int(tests) + 1)) == (int(needed), int(needed) + 1)
