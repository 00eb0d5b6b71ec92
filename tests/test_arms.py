"""Repeats and arms that take turns: their order, what is equal in a pair, a pair cut in the middle."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench import arms, book, objectives, records, results, targets
from llm_bench.arms import Place, Rounds
from llm_bench.cell import Options
from llm_bench.errors import BenchError
from llm_bench.plan import Load
from llm_bench.records import Cell
from llm_bench.run import Job, run
from llm_bench.targets import BUILT_IN, Target
from tests.bench import good, llm_server, prompt_of, rows, trace_file
from tests.scripted import Scripted, Seen

# ---- the order


@given(st.integers(2, 9))
def test_each_arm_is_as_often_in_each_place_and_behind_each_other_arm(k: int) -> None:
    turns = arms.orders(k)
    assert all(sorted(turn) == list(range(k)) for turn in turns)
    places = Counter((place, arm) for turn in turns for place, arm in enumerate(turn))
    assert set(places.values()) == {len(turns) // k} and len(places) == k * k
    behind = Counter(step for turn in turns for step in pairwise(turn))
    assert len(set(behind.values())) == 1 and len(behind) == k * (k - 1)


def test_two_arms_are_measured_a_b_b_a_one_load_after_the_other() -> None:
    found = arms.schedule(2, 2, Rounds(4, interleave=True))
    assert [(p.load, p.pair, p.arm) for p in found] == [
        (load, pair, arm)
        for load in (0, 1)
        for pair, turn in enumerate(("01", "10", "01", "10"))
        for arm in map(int, turn)
    ]
    assert [p.order for p in found] == [0, 1] * 8


def test_repeats_without_turns_are_rounds_of_all_cells() -> None:
    assert arms.schedule(2, 2, Rounds()) == [Place(0, 0, 0, 0), Place(1, 0, 0, 0), Place(0, 0, 1, 1), Place(1, 0, 1, 1)]
    thrice = arms.schedule(2, 2, Rounds(3))
    assert [p._replace(pair=0) for p in thrice] == arms.schedule(2, 2, Rounds()) * 3
    assert [p.pair for p in thrice] == [0] * 4 + [1] * 4 + [2] * 4


def test_every_pair_has_arrivals_of_its_own_and_the_first_the_runs() -> None:
    seeds = [arms.arrivals_seed(7, pair) for pair in range(100)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 100
    assert seeds[1:3] == [369571992, 1009178997]  # on any machine


@given(st.integers(0, 999), st.integers(0, 999), st.integers(0, 9), st.integers(0, 9))
def test_salts_are_of_one_length_and_no_two_are_alike(load: int, pair: int, arm: int, attempt: int) -> None:
    mine = arms.salt("x", Place(load, pair, arm, 0), attempt, same=False)
    others = [Place(load + 1, pair, arm, 0), Place(load, pair + 1, arm, 0), Place(load, pair, arm + 1, 0)]
    salts = {mine, *(arms.salt("x", p, attempt, same=False) for p in others)}
    salts.add(arms.salt("x", Place(load, pair, arm, 1), attempt + 1, same=False))
    assert len(salts) == 5
    assert len({len(salt) for salt in salts}) == 1
    same = {arms.salt("x", Place(load, pair, k, 0), attempt, same=True) for k in (arm, arm + 1)}
    assert len(same) == 1


# ---- what is sent


class Played(NamedTuple):
    folder: Path
    seen: list[tuple[str, Seen]]  # server and measured request, in the order in which they came
    said: list[str]

    @property
    def cells(self) -> list[Cell]:
        return [records.read(path) for path in sorted(self.folder.glob("*.arrow"))]

    @property
    def book(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "run.json").read_text()))

    def prompts(self, cell: int) -> list[str]:
        ids = set(self.cells[cell]["request_id"].tolist())
        return [prompt_of(seen) for _, seen in self.seen if seen.headers["x-request-id"] in ids]


def play(
    folder: Path, rounds: Rounds, loads: Sequence[Load] = (Load(concurrency=1),), *, n: int = 4,
    one_server: bool = False, options: Mapping[str, Any] | None = None,
) -> Played:  # fmt: skip
    """Two targets, each a server of its own but for `one_server`."""
    said: list[str] = []
    seen: list[tuple[str, Seen]] = []

    def answer(name: str) -> Any:
        def measured(_: int, request: Seen) -> Any:
            seen.append((name, request))
            return good(request)

        return llm_server(measured)

    with ExitStack() as stack:
        servers = [stack.enter_context(Scripted(answer(name))) for name in ("a", "b")]
        urls = [servers[0].url, servers[0 if one_server else 1].url]
        two = [Target(name, url) for name, url in zip(("a", "b"), urls, strict=True)]
        asked = Options(folder / "run", warmup=0, rounds=rounds, **(options or {}))
        job = Job(two, loads, trace_file(folder, rows(n)))
        run(job, asked, said.append, lambda text: None)
    return Played(folder / "run", seen, said)


def test_the_arms_of_a_pair_do_the_same_work_with_prompts_of_their_own(tmp_path: Path) -> None:
    played = play(tmp_path, Rounds(2, interleave=True), [Load(concurrency=1), Load(rate=200.0)])
    assert "".join(name for name, _ in played.seen) == "".join(4 * arm for arm in "abbaabba")
    heads = [cell.header for cell in played.cells]
    assert [(h["load"]["label"], h["pair"], h["arm"], h["order"], h["repeat"]) for h in heads] == [
        (load, pair, arm, order, 2)
        for load in ("c=1", "rate=200/s")
        for pair, turn in enumerate(("ab", "ba"))
        for order, arm in enumerate(turn)
    ]
    assert len({h["cell"] for h in heads}) == 8
    assert all(book._CELL.fullmatch(h["cell"]) for h in heads)
    for one, other in zip(heads[::2], heads[1::2], strict=True):
        assert one["work_hash"] == other["work_hash"]
        assert one["plan"]["hash"] != other["plan"]["hash"]
    for cell in played.cells:
        assert cell["planned_in"].tolist() == [12] * 4
        assert cell["asked_out"].tolist() == [4] * 4
    firsts = [" ".join(prompt.split()[:3]) for k in range(8) for prompt in played.prompts(k)]
    assert len(set(firsts)) == 32  # no arm meets what another left in a cache
    assert len({len(prompt) for k in range(8) for prompt in played.prompts(k)}) == 1


def test_arrivals_are_those_of_the_pair(tmp_path: Path) -> None:
    played = play(tmp_path, Rounds(3, interleave=True), [Load(rate=300.0)], n=6)
    offsets = [tuple((cell["due_ns"] - cell["due_ns"][0]).tolist()) for cell in played.cells]
    assert offsets[::2] == offsets[1::2]
    assert len(set(offsets)) == 3
    assert [h.header["arrivals_seed"] for h in played.cells[::2]] == [arms.arrivals_seed(0, pair) for pair in range(3)]
    assert len({cell.header["work_hash"] for cell in played.cells}) == 3


def test_a_slow_arm_is_planned_and_driven_as_the_fast_one_is(tmp_path: Path) -> None:
    """How many requests could be needed, how many workers, how the first wave is spread: by one probe for both."""
    with Scripted(llm_server(lambda n, seen: good(seen))) as fast, Scripted(late) as slow:
        job = Job([Target("a", slow.url), Target("b", fast.url)], [Load(concurrency=2)], trace_file(tmp_path, rows(4)))
        asked = Options(tmp_path / "run", duration_s=0.3, loop_trace=True, rounds=Rounds(1, interleave=True))
        run(job, asked, print, lambda text: None)
    one, other = (records.read(path).header for path in sorted((tmp_path / "run").glob("*.arrow")))
    assert one["probe"]["alone_ms"] > 40 > other["probe"]["alone_ms"]
    assert one["work_hash"] == other["work_hash"]
    assert one["plan"]["requests"] == other["plan"]["requests"]


def late(number: int, seen: Seen) -> Any:
    """40 ms later in everything."""
    return llm_server(lambda n, seen: good(seen, 40))(number, seen) if seen.method == "GET" else good(seen, 40)


def test_one_salt_for_servers_that_share_no_cache(tmp_path: Path) -> None:
    played = play(tmp_path, Rounds(2, interleave=True, same_salt=True))
    assert [played.prompts(k) for k in (0, 2)] == [played.prompts(k) for k in (1, 3)]
    assert set(played.prompts(0)).isdisjoint(played.prompts(2))
    (tmp_path / "one").mkdir()
    with pytest.raises(BenchError, match=r"is asked by two targets: the second would meet the first one's cache"):
        play(tmp_path / "one", Rounds(2, interleave=True, same_salt=True), one_server=True)
    assert not (tmp_path / "one" / "run").exists()


def test_prompts_that_are_kept_are_those_of_seed_pair_and_arm(tmp_path: Path) -> None:
    both = []
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        played = play(tmp_path / name, Rounds(1, interleave=True), options={"reuse_prompts": True})
        both.append([played.prompts(k) for k in (0, 1)])
    assert both[0] == both[1]
    assert set(both[0][0]).isdisjoint(both[0][1])


def test_the_same_server_under_two_names_is_a_pair_of_arms(tmp_path: Path) -> None:
    played = play(tmp_path, Rounds(2, interleave=True), one_server=True)
    found = results.load_run(played.folder)
    assert "repeated prompts" not in {doubt.kind for of_cell in found.doubts for doubt in of_cell}
    assert [cell.header["arm"] for cell in played.cells] == ["a", "b", "b", "a"]


@pytest.mark.parametrize(
    ("rounds", "said"),
    [(Rounds(2, interleave=True), "one target, expected two or more"), (Rounds(2, same_salt=True), "--interleave")],
)
def test_what_makes_no_pair_is_refused_before_anything_is_sent(tmp_path: Path, rounds: Rounds, said: str) -> None:
    job = Job([Target("t", "http://127.0.0.1:9/v1")], [Load(concurrency=1)], trace_file(tmp_path, rows(3)))
    with pytest.raises(BenchError, match=said):
        run(job, Options(tmp_path / "run", rounds=rounds), print, lambda text: None)
    assert not (tmp_path / "run").exists()


def test_the_order_and_what_it_will_not_carry_are_said(tmp_path: Path) -> None:
    said = play(tmp_path, Rounds(3, interleave=True), n=2).said
    assert any(
        "3 pairs at each load, the targets in turn: a b, then b a; prompts of its own in each" in s for s in said
    )
    assert any("3 pairs are no multiple of 2: not every arm is as often the first" in s for s in said)
    assert any("a gate judges 5 pairs or more" in s for s in said)


def test_a_run_that_repeats_nothing_is_as_it_was(tmp_path: Path) -> None:
    played = play(tmp_path, Rounds())
    assert [cell.header["cell"] for cell in played.cells] == ["000-a-c=1", "001-b-c=1"]
    assert not {"pair", "arm", "order"} & played.cells[0].header.keys()
    assert not any("pairs" in line or "rounds" in line for line in played.said)


def test_repeats_alone_are_rounds_with_a_number(tmp_path: Path) -> None:
    played = play(tmp_path, Rounds(2))
    assert [(c.header["arm"], c.header["pair"]) for c in played.cells] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert len({prompt for k in range(4) for prompt in played.prompts(k)}) == 16


# ---- cut in the middle


def test_half_a_pair_is_measured_again_whole_with_other_prompts(tmp_path: Path) -> None:
    rounds = Rounds(3, interleave=True)
    with Scripted(llm_server(lambda n, seen: good(seen))) as server:
        job = Job(
            [Target("a", server.url), Target("b", server.url)], [Load(concurrency=1)], trace_file(tmp_path, rows(4))
        )
        asked = Options(tmp_path / "run", warmup=0, rounds=rounds)
        run(job, asked, print, lambda text: None)
        names = sorted(path.stem for path in (tmp_path / "run").glob("*.arrow"))
        # As if the run had been killed in the second arm of the second pair: a cell without an end, and none behind it.
        path = tmp_path / "run" / "run.json"
        facts = json.loads(path.read_text())
        del facts["cells"][4:], facts["cells"][3]["end"]
        path.write_text(json.dumps(facts))
        for name in names[4:]:
            for file in (tmp_path / "run").glob(f"{name}.*"):
                file.unlink()
        first = {name: records.read(tmp_path / "run" / f"{name}.arrow") for name in names[:4]}
        server.requests.clear()
        said: list[str] = []
        run(Job(**{**vars(job), "resume": True}), asked, said.append, lambda text: None)
    assert [line for line in said if "done before" in line] == [f"{name}: done before" for name in names[:2]]
    again = {name: records.read(tmp_path / "run" / f"{name}.arrow") for name in names}
    assert [again[name].header["arm"] for name in names] == list("abbaab")
    assert sum("x-request-id" in s.headers for s in server.requests) == 4 * 4  # two whole pairs
    for name in names[2:4]:
        assert set(first[name]["prompt_hash"]).isdisjoint(again[name]["prompt_hash"])
        assert first[name].header["work_hash"] == again[name].header["work_hash"]
    aside = json.loads(path.read_text())["set_aside"]
    assert [cell["name"] for cell in aside] == names[2:4]
    assert sorted(p.name for p in (tmp_path / "run" / "partial").glob("*.arrow")) == [
        f"0-{n}.arrow" for n in names[2:4]
    ]


def test_what_was_not_run_is_counted_by_target_and_load(tmp_path: Path) -> None:
    played = play(tmp_path, Rounds(3, interleave=True), n=2)
    path = played.folder / "run.json"
    facts = played.book
    for cell in facts["cells"][3:]:
        for file in played.folder.glob(f"{cell['name']}.*"):
            file.unlink()
    del facts["cells"][4:], facts["cells"][3]["end"]
    path.write_text(json.dumps(facts))
    missing = {m.text for m in results.load_run(played.folder).missing}
    assert "a at c=1: run 2 of it: it was begun and left no records" in missing
    why = "when the run last wrote down where it was"
    assert {
        f"a at c=1: 1 of 3 runs of it were not run {why}",
        f"b at c=1: 1 of 3 runs of it were not run {why}",
    } < missing


# ---- what run.json holds


def test_run_json_knows_the_file_the_software_and_the_slo(tmp_path: Path) -> None:
    options = {"slo": "ttft_p95<800ms", "deadlines": "ttft=1s,tpot=50ms"}
    played = play(tmp_path, Rounds(), options=options)
    text = (tmp_path / "trace.jsonl").read_bytes()
    assert played.book["trace"]["sha256"] == hashlib.sha256(text).hexdigest()
    assert played.book["trace"]["bytes"] == len(text)
    assert {"python", "numpy", "pyarrow", "httptools", "orjson"} <= played.book["versions"].keys()
    assert {key: played.book["settings"][key] for key in options} == options
    found = results.load_run(played.folder)
    assert found.agreed() == objectives.parse(*options.values())
    assert found.agreed(objectives.parse("ttft_p95<1ms")) == objectives.parse("ttft_p95<1ms")
    assert found.agreed(objectives.parse("", "ttft=2s,tpot=9ms")).deadlines == (2000, 9)
    assert found.agreed(objectives.parse("", "ttft=2s,tpot=9ms")).limits == found.agreed().limits


def test_a_stored_slo_that_is_none_is_refused_by_the_name_of_its_file(tmp_path: Path) -> None:
    played = play(tmp_path, Rounds(), options={"slo": "ttft_p95<800"})
    with pytest.raises(BenchError, match=r"run\.json: settings: --slo 'ttft_p95<800'.*; give --slo"):
        results.load_run(played.folder).agreed()


# ---- other names


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_target_under_two_names_is_two_servers(tmp_path: Path, name: str) -> None:
    two = targets.parse(f"base={name},cand={name}", tmp_path / "none.toml", {})
    assert [t.name for t in two] == ["base", "cand"]
    assert {t.launch for t in two} == {BUILT_IN[name]}
    assert {t.url for t in two} == {""}


def test_a_declared_target_under_another_name_is_asked_as_it_is_declared(tmp_path: Path) -> None:
    file = tmp_path / "targets.toml"
    file.write_text('[targets.mine]\nurl = "http://h:1/v1"\nmodel = "m"\n')
    (other,) = targets.parse("cand=mine", file, {})
    assert (other.name, other.url, other.model, other.launch) == ("cand", "http://h:1/v1", "m", ())


def test_two_servers_of_one_kind_are_up_at_once_and_take_turns(tmp_path: Path) -> None:
    two = targets.parse("a=null,b=null", tmp_path / "none.toml", {})
    job = Job(two, [Load(concurrency=2)], trace_file(tmp_path, rows(12)))
    rounds = Rounds(2, interleave=True, same_salt=True)
    run(job, Options(tmp_path / "run", rounds=rounds), print, lambda text: None)
    cells = [records.read(path) for path in sorted((tmp_path / "run").glob("*.arrow"))]
    assert [cell.header["arm"] for cell in cells] == ["a", "b", "b", "a"]
    assert len({cell.header["target"]["url"] for cell in cells}) == 2
    assert all((cell["outcome"] == "ok").all() for cell in cells)
    assert cells[0].header["plan"]["hash"] == cells[1].header["plan"]["hash"] != cells[2].header["plan"]["hash"]
