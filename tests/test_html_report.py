"""The HTML report: the same numbers as every other format, nothing but text of what others wrote, one file alone."""

import csv
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_bench import html_report, objectives, report, results, words
from llm_bench.objectives import Slo
from llm_bench.records import Record, Writer
from llm_bench.results import Asked, Run
from llm_bench.words import number
from tests.sample import START_NS, header, record
from tests.test_repeats import repeated

SLO = objectives.parse("ttft_p95<160ms,tpot_p95<9ms,error_rate<2%,chat:ttft_p50<=60ms")
EVIL = "</script></style></title></svg>\"'><img src=x onerror=window.hacked=1><script>window.hacked=1</script>{{ 7*7 }}"
# Every element that the page is made of; what a foreign text would add is not among them.
ELEMENTS = set(
    "html head meta title style body main article header h1 h2 h3 p span nav a section div ul li strong".split()
)
ELEMENTS |= set("table caption thead tbody tr th td small wbr figure figcaption svg desc path text rect circle".split())
ELEMENTS |= set("details summary b bdi dl dt dd script".split())


def write_cell(folder: Path, name: str, rows: Sequence[Record], **head: Any) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    writer = Writer(folder / f"{name}.arrow", header(**head))
    for row in rows:
        writer.write(row)
    writer.close()


def rows_of(rate: float, speed: float, n: int, seed: int, capacity: int = 12) -> list[Record]:
    """An open loop at a server with `capacity` places: what waits for one waits in the target's queue."""
    rng, work = (
        np.random.Generator(np.random.PCG64([seed, k])) for k in (int(1000 * speed), 0)
    )  # arms do the same work
    due = np.cumsum(work.exponential(1000 / rate, n))
    free = [0.0] * capacity
    found = []
    for i in range(n):
        batch = i % 3 == 0
        tokens = int(work.geometric(1 / (40 if batch else 15)))
        prompt = int(work.lognormal(6 if batch else 4.5, 0.6)) + 1
        place = int(np.argmin(free))
        begun = max(due[i] + 0.3, free[place])
        first = begun + speed * (12 + 0.06 * prompt)
        stamps = first + np.cumsum(np.append(0, rng.gamma(9, speed * 0.9, tokens - 1)))
        free[place] = float(stamps[-1])
        base: dict[str, Any] = {
            "prompt_hash": int(work.integers(1, 1 << 62)) ^ int(1000 * speed),
            "request_class": "batch" if batch else "chat",
            "tokens_in": prompt,
            "planned_in": prompt,
        }
        at: dict[str, Any] = {"due": float(due[i]), "sent": float(due[i]) + 0.3}
        if rng.random() < 0.004 * rate / 20:
            found.append(record(i, **at, end=begun + 5, outcome="failed", **base))
        elif rng.random() < 0.002:
            kind = {"error_kind": "truncated_stream", "error": "the stream broke off", "status": 200}
            found.append(record(i, **at, events=stamps[:2].tolist(), outcome="failed", **base, **kind))
        else:
            found.append(record(i, **at, events=stamps.tolist(), **base))
    return found


def rich(folder: Path, n: int = 300, rates: Sequence[float] = (15, 30, 45)) -> Path:
    """Two targets at several rates: classes, failures, a queue; run.json with all that a run writes."""
    cells = []
    for at, (target, speed) in enumerate([("base", 1.0), ("cand", 0.8)]):
        for k, rate in enumerate(rates):
            name = f"{at * len(rates) + k:03d}-{target}-rate={rate:g}"
            load = {"kind": "open", "label": f"rate={rate:g}/s", "rate": rate, "warmup": None}
            write_cell(folder, name, rows_of(rate, speed, n, k), target={"name": target}, load=load)
            cells.append({"name": name, "target": target, "load": load, "end": {"reason": "exhausted"}})
    facts = {
        "version": "0.1.0",
        "run_id": "0123abcd",
        "anchor": [1_700_000_000_000_000_000, START_NS],
        "command": ["run", "--rate", "15,30,45"],
        "host": {"cpu": "a processor", "cores": 8, "system": "Linux 6", "python": "3.11.7", "load_average": 0.2},
        "settings": {"seed": 0, "stream": True, "drain_s": None, "timeouts": {"ttft_s": 300.0}},
        "targets": ["base", "cand"],
        "declared": [{"name": "base", "url": "http://127.0.0.1:1", "api": "openai-chat", "model": "m"}],
        "loads": [f"rate={rate:g}/s" for rate in rates],
        "trace": {"path": "traces/chat.jsonl", "format": "llm-bench", "notes": ["times read as s"], "rows": n},
        "hashes": {"trace": "475ff74bcad0fa67"},
        "cells": cells,
    }
    (folder / "run.json").write_text(json.dumps(facts))
    return folder


def hostile(folder: Path) -> Path:
    """A run whose every free text is EVIL."""
    texts = {"error": EVIL, "request_class": EVIL, "session": "", "finish_reason": EVIL, "labels": [EVIL]}
    rows = [record(i, 10 * i, events=[10 * i + 5, 10 * i + 9], **texts) for i in range(60)]
    rows += [record(60 + i, 600 + i, end=700, outcome="failed", error_kind=EVIL, **texts) for i in range(3)]
    rows += [
        record(64, 640, events=[645, 650], request_class="chat"),
        record(65, 650, events=[655], outcome="cut_at_end"),
    ]
    load = {"kind": "open", "label": EVIL, "rate": 5.0, "warmup": 0.0}
    head: dict[str, Any] = {"target": {"name": EVIL, "model": EVIL, EVIL: EVIL}, "probe": {EVIL: EVIL, "model": EVIL}}
    for name in ("000-a", "001-a"):
        write_cell(folder, name, rows, load=load, settings={EVIL: EVIL}, **head)
    cells = [
        {"name": name, "target": EVIL, "load": load, "doubts": [{"kind": EVIL, "text": EVIL}]}
        for name in ("000-a", "001-a")
    ]
    facts: dict[str, Any] = dict.fromkeys(("version", "run_id", EVIL), EVIL)
    facts |= {key: {EVIL: EVIL} for key in ("host", "settings", "hashes")}
    facts |= {key: [EVIL] for key in ("command", "loads", "targets")} | {"anchor": [EVIL, 1], "cells": cells}
    facts |= {
        "learnt": {EVIL: {EVIL: EVIL}},
        "declared": [{"name": EVIL, "url": EVIL}],
        "hashes": {"trace": EVIL, "tokenizers": {EVIL: EVIL}},
    }
    facts |= {"trace": {"path": EVIL, "sha256": EVIL, "notes": [EVIL], EVIL: {EVIL: [EVIL]}}}
    (folder / "run.json").write_text(json.dumps(facts))
    return folder


def write_pages(out: Path) -> list[Path]:
    """The pages that `tests.pages` opens in a browser."""
    made = []
    for name, make, slo, n in (("rich", rich, SLO, 1500), ("hostile", hostile, Slo(), 0)):
        folder = out / f"{name} <b>&amp;"  # a folder's name is text too
        for left in folder.glob("*"):
            left.unlink()
        run = results.load_run(make(folder, n) if n else make(folder))
        made.append(out / f"{name}.html")
        made[-1].write_text(html_report.page([run], Asked(slo=slo)))
    return made


class Page(HTMLParser):
    """What a browser would find: elements, tables as (text, small lines, data-sort), text outside scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[tuple[str, list[str], str | None]]]] = {}
        self.text: list[str] = []
        self._inside: list[str] = []
        self._rows: list[list[tuple[str, list[str], str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "wbr"):
            self._inside.append(tag)
        if tag == "table":
            self._rows = []
        if tag == "tr":
            self._rows.append([])
        if tag in ("td", "th"):
            self._rows[-1].append(("", [], dict(attrs).get("data-sort")))
        if tag == "small":
            self._rows[-1][-1][1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._inside.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        inside = self._inside[-1] if self._inside else ""
        if inside not in ("script", "style"):
            self.text.append(data)
        if inside == "caption":
            self.tables[data] = self._rows
        elif inside == "small":
            self._rows[-1][-1][1][-1] += data
        elif inside in ("td", "th"):
            text, small, sort = self._rows[-1][-1]
            self._rows[-1][-1] = (text + data, small, sort)


def page_of(run: Run, asked: Asked) -> Page:
    return Page(html_report.page([run], asked))


@pytest.fixture(scope="module")
def rich_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return results.load_run(rich(tmp_path_factory.mktemp("html") / "rich"))


NAMES = ["ttft_p50", "ttft_p95", "tpot_p95", "itl_p99", "tokens_per_second", "requests_per_second", "error_rate"]


def test_one_set_of_numbers_in_all_formats(rich_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(NAMES, SLO)
    cells = json.loads(report.render([rich_run], asked, "json"))["runs"][0]["cells"]
    lines = list(csv.DictReader(report.render([rich_run], asked, "csv").splitlines()))
    by_csv = {(r["target"], r["load"], r["class"], r["metric"]): r for r in lines}
    monkeypatch.setenv("COLUMNS", "400")
    drawn = [line.split("│") for line in report.render([rich_run], asked, "terminal").splitlines() if "│" in line]
    terminal = [[part.strip() for part in line[1:-1]] for line in drawn]
    marked = [line.split(" | ") for line in report.render([rich_run], asked, "md").splitlines() if line[:6] == "| rate"]
    head, *rows = page_of(rich_run, asked).tables["Figures by target and load"]
    assert [text for text, _, _ in head][-len(NAMES) :] == NAMES
    shown = [line for line in terminal if line[0].startswith("rate=")]
    assert len(cells) == len(rows) == len(shown) == len(marked) == 6
    for cell, row, printed, md in zip(cells, rows, shown, marked, strict=True):
        assert (row[0][0], row[0][1]) == (cell["load"], [cell["target"]])
        assert int(row[1][0]) == cell["outcomes"]["ok"]
        for at, name in enumerate(NAMES, -len(NAMES)):
            value, (text, small, sort) = cell["metrics"][name], row[at]
            assert (
                float(sort or "nan") == value["value"] == float(by_csv[cell["target"], cell["load"], "", name]["value"])
            )
            assert text == printed[at] == number(value["value"], value["unit"])
            assert md[at].split(" (")[0].rstrip(" |") == text
            if value["ess"] is not None:
                assert small[0] == f"n {value['n']}, ESS {value['ess']:.0f}"
                assert small[0] in md[at]
            if value["interval_95"]:
                low, high = (number(edge, value["unit"]) for edge in value["interval_95"])
                assert small[1] == f"{low} to {high}"
                assert small[1] in md[at]


def test_classes_have_a_table_with_the_numbers_of_the_others(rich_run: Run) -> None:
    asked = Asked(["ttft_p95"], SLO)
    cells = json.loads(report.render([rich_run], asked, "json"))["runs"][0]["cells"]
    _, *rows = page_of(rich_run, asked).tables["Figures by class of request"]
    expected = [
        (name, [f"{cell['target']} at {cell['load']}"], of["metrics"]["ttft_p95"]["value"])
        for cell in cells
        for name, of in cell["classes"].items()
    ]
    assert [(row[0][0], row[0][1], float(row[-1][2] or "nan")) for row in rows] == expected


def test_the_verdict_comes_first_with_each_limit_failure_and_doubt(rich_run: Run) -> None:
    page = page_of(rich_run, Asked(slo=SLO))
    text = " ".join("".join(page.text).split())
    sheets = results.sheets(rich_run, Asked(NAMES, SLO))
    before, _, _ = text.partition("Figures by target and load")
    for sheet in sheets:
        assert all(j.why in before for j in sheet.judged)
        assert all(f.text in before for f in sheet.failures)
        assert all(d.text in before for d in sheet.doubts)
    verdicts = [j.verdict for sheet in sheets for j in sheet.judged]
    counted = f"{verdicts.count('MET')} met, {verdicts.count('MISSED')} missed, {verdicts.count('UNDECIDED')} undecided"
    assert f"Of {len(verdicts)} limits (each at each load) {counted}." in before
    assert before.index("Held") < before.index("Did not hold") < before.index("In doubt")
    assert set(verdicts) == {"MET", "MISSED", "UNDECIDED"}  # else the test shows less than it says


def test_foreign_text_stays_text(tmp_path: Path) -> None:
    folder = hostile(tmp_path / "<img src=x onerror=alert(1)>")
    page = page_of(results.load_run(folder), Asked())
    assert {tag for tag, _ in page.elements} <= ELEMENTS
    assert sum(tag == "script" for tag, _ in page.elements) == sum(tag == "style" for tag, _ in page.elements) == 1
    names = {name for _, attrs in page.elements for name in attrs}
    assert not {name for name in names if name.startswith("on")} | (names & {"href", "src", "style"} - {"href"})
    assert all((attrs["href"] or "").startswith("#r0-") for _, attrs in page.elements if "href" in attrs)
    text = "".join(page.text)
    assert text.count(EVIL) > 20
    assert "49" not in re.findall(
        r"\d+", text.split("Settings and environment")[1]
    )  # no template in a text is filled in


def test_every_picture_is_whole_and_says_what_it_shows(rich_run: Run, tmp_path: Path) -> None:
    for run in (rich_run, results.load_run(hostile(tmp_path / "hostile"))):
        text = html_report.page([run], Asked(slo=SLO))
        pictures = re.findall(r"<svg .*?</svg>", text, re.S)
        assert len(pictures) > 20
        for picture in pictures:
            root = ET.fromstring(picture)
            if root.get("role") == "img":
                assert root.get("aria-label")
                assert (root.findtext("desc") or "").strip()
            assert "nan" not in re.sub(r">[^<]*<", "><", picture).replace("dominant", "")


def test_a_page_needs_no_other_file_and_names_its_own_script(rich_run: Run) -> None:
    text = html_report.page([rich_run], Asked())
    assert not re.findall(r"(?:src|href)=[\"'](?!#)|url\(|@import|https?://(?!127\.)", text)
    page = Page(text)
    (policy,) = [attrs["content"] or "" for tag, attrs in page.elements if attrs.get("http-equiv")]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert text.endswith("</html>\n")


def test_pages_of_several_runs_hold_each(rich_run: Run, tmp_path: Path) -> None:
    other = results.load_run(hostile(tmp_path / "other"))
    page = page_of(rich_run, Asked())
    both = Page(html_report.page([rich_run, other], Asked()))
    ids = [attrs["id"] for _, attrs in both.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {attrs["id"] for _, attrs in page.elements if "id" in attrs} < set(ids)


def test_what_is_not_recorded_is_said_and_not_made_up(tmp_path: Path) -> None:
    write_cell(tmp_path / "run", "000-a", [record(i, 10 * i, events=[10 * i + 5], bytes_out=-1) for i in range(40)])
    page = page_of(results.load_run(tmp_path / "run"), Asked())
    facts = {row[0][0]: row[1][0] for row in page.tables["Environment and trace"]}
    for name in ("llm-bench", "run", "trace", "trace: sha256 of the file", "trace: hash of the requests sent"):
        assert facts[name] == "not recorded"
    head, row = page.tables["Bytes on the wire"]
    assert dict(zip([text for text, _, _ in head], row, strict=True))["bytes sent"][0] == "not recorded"
    assert (row[1][0], row[1][2]) == ("8,000", "8000")  # 40 requests of 200


def test_bytes_on_the_wire_are_those_of_the_window_over_its_length(tmp_path: Path) -> None:
    rows = [record(i, 100 * i, events=[100 * i + 50], bytes_in=12_500, bytes_out=25_000) for i in range(101)]
    write_cell(tmp_path / "run", "000-a", rows)
    _, row = page_of(results.load_run(tmp_path / "run"), Asked()).tables["Bytes on the wire"]
    assert row[2][0] == "1"  # 100 answers end in 10 s: 12,500 bytes x 8 x 10 a second
    assert (row[5][0], row[6][0]) == (f"{101 * 25_000:,}", "2.02")  # the last is sent as the window ends


def test_the_slices_of_a_window_have_its_whole_beside_them(rich_run: Run) -> None:
    page = page_of(rich_run, Asked(NAMES))
    rows = page.tables["By slice of the window"]  # the last cell's
    figures = page.tables["Figures by target and load"]
    head, *parts, whole = rows
    assert len(parts) == 10
    assert sum("the busiest" in row[0][1] for row in parts) == 1
    (busiest,) = [row for row in parts if row[0][1]]
    assert float(busiest[1][2] or 0) == max(float(row[1][2] or 0) for row in parts)
    at = [text for text, _, _ in head].index("tokens_per_second")
    assert whole[at][0] == figures[-1][[text for text, _, _ in figures[0]].index("tokens_per_second")][0]
    mean = np.mean([float(row[at][2] or "nan") for row in parts])
    assert mean == pytest.approx(float(whole[at][2] or "nan"))
    failed = [text for text, _, _ in head].index("failed")
    assert sum(int(row[failed][0]) for row in parts) == int(whole[failed][0])


def test_cells_that_were_not_measured_are_named_with_the_reason(tmp_path: Path) -> None:
    write_cell(tmp_path, "000-a", [record(i, 10 * i, events=[10 * i + 5]) for i in range(40)])
    (tmp_path / "001-a.arrow").write_bytes(b"torn")
    cells = [{"name": f"00{i}-a", "target": "a", "load": {"label": f"c={i}"}} for i in range(2)]
    facts = {"targets": ["a", "b"], "loads": ["c=0", "c=1"], "cells": cells}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    run = results.load_run(tmp_path)
    text = " ".join("".join(page_of(run, Asked(["error_rate"])).text).split())
    before = text.split("Figures by target and load")[0]
    assert before.count("not run") == 2
    assert "a at c=1 it cannot be read: " in before
    assert "b at c=0 not run" in before
    assert "3 cells missing." in before


def test_targets_that_did_other_work_are_said_to_before_all_else(tmp_path: Path) -> None:
    for i, (name, tokens) in enumerate((("a", 2), ("b", 9))):
        rows = [record(j, 10 * j, events=[10 * j + 5 + k for k in range(tokens)]) for j in range(40)]
        load = {"kind": "open", "label": "one", "rate": 100.0, "warmup": 0.0}
        write_cell(tmp_path, f"{i:03d}-{name}", rows, target={"name": name, "url": f"http://{name}"}, load=load)
    text = " ".join("".join(page_of(results.load_run(tmp_path), Asked()).text).split())
    assert "Verdict The targets did not do the same work (targets differ). 0 of 80 requests" in text


@pytest.mark.parametrize("runs", [2, 5])
def test_repeats_have_one_set_of_numbers_in_all_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: int
) -> None:
    """Five runs have an interval of their spread, two have none; the runs alone are there too, counted from 1."""
    monkeypatch.setenv("COLUMNS", "400")
    run, asked = repeated(tmp_path, runs), Asked(["ttft_p50", "error_rate"], objectives.parse("ttft_p50<54.5ms"))
    (of_runs,) = json.loads(report.render([run], asked, "json"))["runs"][0]["repeats"]
    rows = list(csv.DictReader(report.render([run], asked, "csv").splitlines()))
    page = page_of(run, asked)
    _, shown, _ = page.tables["Figures by target and load"]
    _, *alone = page.tables["Each run alone"]
    md, terminal = (report.render([run], asked, format_) for format_ in ("md", "terminal"))
    (line,) = [line for line in md.splitlines() if line.startswith(f"| c=1, {runs} runs")]
    drawn = [[part.strip() for part in line.split("│")] for line in terminal.splitlines() if "│" in line]
    at = next(i for i, cells in enumerate(drawn) if cells[1] == f"c=1, {runs} runs")
    assert (shown[0][0], shown[0][1]) == ("c=1", ["a", f"{runs} runs"])
    for place, name in ((-2, "ttft_p50"), (-1, "error_rate")):
        value = of_runs["metrics"][name]
        text, small, sort = shown[place]
        assert text == number(value["value"], value["unit"]) == drawn[at][place - 1]
        assert text in line
        (of_csv,) = [r for r in rows if (r["metric"], r["runs"], r["load"]) == (name, str(runs), "c=1")]
        assert float(of_csv["value"]) == value["value"] == float(sort or "nan")
        assert (value["interval_95"] is None) == (runs < 5) == (small == []) == (of_csv["interval_low"] == "")
        if value["interval_95"]:
            low, high = (number(edge, value["unit"]) for edge in value["interval_95"])
            assert small == [f"{low} to {high}"]
            assert f"{text} ({low} to {high})" in line
            assert drawn[at + 1][place - 1] == f"{low}–{high}"
    assert [row[0][0] for row in alone] == [f"c=1, run {k + 1}" for k in range(runs)]
    assert [row[-2][0] for row in alone] == [number(50.0 + k, "ms") for k in range(runs)]
    said = " ".join("".join(page.text).split())
    for text in (md, terminal, said):
        assert f"MET in {runs} of {runs} runs, each judged alone" in " ".join(text.split())
        assert f"in 1 of {runs} runs, first in run {runs}: 2.4%" in " ".join(text.split())
        assert "repeat 1" not in text and "run 0" not in text
        assert ("5 are needed for an interval" in " ".join(text.split())) == (runs < 5)


def test_a_doubt_of_many_cells_names_each_target_and_load_once(tmp_path: Path) -> None:
    for i in range(12):
        name, load = "ab"[i // 6], {"kind": "open", "label": f"c={1 + i % 6 // 3}", "rate": 5.0, "warmup": 0.0}
        rows = [record(j, 100 * j, events=[100 * j + 5]) for j in range(40)]
        rows += [record(40 + j, 4000 + j, end=4010, outcome="failed") for j in range(40)]
        write_cell(tmp_path, f"{i:03d}-{name}", rows, target={"name": name}, load=load, pair=i % 3)
    text = " ".join("".join(page_of(results.load_run(tmp_path), Asked(["ttft_p50"])).text).split())
    assert text.count("a at c=1, 3 runs, c=2, 3 runs; b at c=1, 3 runs, c=2, 3 runs in 3 of 3 runs") > 0


def test_a_limit_that_is_not_in_the_picture_is_said_to_be_where_it_is(rich_run: Run) -> None:
    asked = Asked(["ttft_p95"], objectives.parse("ttft_p95<3000s"))
    text = html_report.page([rich_run], asked)
    assert "ttft_p95&lt;3000s lies to the right of the picture." in text  # latency is the x of a distribution
    assert "ttft_p95&lt;3000s lies above the picture." in text  # and the y of the curve


def test_figures_of_other_tools_have_tables_where_they_are_asked_for(rich_run: Run) -> None:
    page = page_of(rich_run, Asked(["ttft_p50"], tools=("vllm",)))
    (table,) = results.sheets(rich_run, Asked(["ttft_p50"], tools=("vllm",)))[-1].as_tools
    head, *rows = page.tables[words.tool_title(table)]
    assert tuple(text for text, _, _ in head) == words.TOOL_HEADS
    assert [tuple(text for text, _, _ in row) for row in rows] == words.tool_rows(table)


def test_every_metric_that_is_shown_is_defined(rich_run: Run) -> None:
    page = Page(html_report.page([rich_run], Asked(["stall_mean", "goodput", "lag_p99"])))
    said = "".join(page.text).split("Definitions")[-1]
    for name in ("stall", "goodput", "lag", "mean", "p95, p99", "in_flight", "payload_share", "ESS", "UNDECIDED"):
        assert f"\n{name}" in said.replace("\n\n", "\n") or name in said.split(), name


def test_cells_of_any_kind_have_a_page(tmp_path: Path) -> None:
    kinds: dict[str, list[Record]] = {
        "empty": [],
        "one": [record(0, 0, events=[5])],
        "at-once": [record(i, 0, events=[0]) for i in range(3)],
        "failed": [record(i, 10 * i, end=10 * i + 1, outcome="failed") for i in range(30)],
        "dropped": [record(i, 10 * i, outcome="dropped") for i in range(30)],
        "cut": [record(i, 10 * i, end=400, outcome="cut_at_end") for i in range(30)],
        "whole": [record(i, 10 * i, end=10 * i + 9, tokens_out=7) for i in range(50)],
        "unknown": [record(i, 10 * i, end=10 * i + 9, tokens_out=-1, tokens_in=-1, planned_in=-1) for i in range(50)],
    }
    for name, rows in kinds.items():
        for load in (
            {"kind": "open", "rate": 5.0, "warmup": 0.0},
            {"kind": "closed", "concurrency": 2, "warmup": None},
        ):
            write_cell(tmp_path / f"{name}-{load['kind']}", "000-a", rows, load=load)
            run = results.load_run(tmp_path / f"{name}-{load['kind']}")
            page = page_of(run, Asked(slo=objectives.parse("ttft_p95<1s,error_rate<1%")))
            assert "Figures by target and load" in page.tables
            assert ("no request was recorded" in "".join(page.text)) == (name == "empty")


def test_a_page_of_many_requests_stays_small(tmp_path: Path) -> None:
    rows = [record(i, i, events=[i + 5 + i % 97, i + 150 + i % 89], tokens_in=1 + i % 5000) for i in range(20_000)]
    write_cell(tmp_path / "run", "000-a", rows)
    text = html_report.page([results.load_run(tmp_path / "run")], Asked())
    assert len(text) < 200_000  # a picture of every request would take a megabyte
    assert "1,500 of 20,000, evenly in due order" in text
