"""Which settings set runs apart, and which of them is cheapest within the SLO."""

from llm_bench import knobs
from llm_bench.capacity import Prices
from llm_bench.carried import brackets, evidence
from llm_bench.knobs import Setting, cheapest, compare_settings, differing, settings_of
from llm_bench.objectives import parse
from tests.sample import header
from tests.test_carried import cell_of, closed, run_of, slots

SLO = parse("ttft_p95<100ms")


def test_settings_are_those_of_the_run_and_of_the_target_without_names_and_places(tmp_path):
    target = header()["target"] | {"launch": ["--max-batch", "8"], "extra": {"top_k": 1}, "precision": "fp8"}
    run = run_of(
        tmp_path / "r", {"a": (slots(60, 2, 100, 20), closed(2))}, target=target, settings={"out": "x", "seed": 3}
    )
    found = settings_of(run, "a")
    assert found["target.launch"] == ["--max-batch", "8"]
    assert found["target.extra.top_k"] == 1
    assert found["settings.seed"] == 3
    assert not {"settings.out", "target.url", "target.name"} & set(found)
    assert settings_of(run, "b") == {}


def test_only_what_differs_is_said_and_what_one_lacks_is_none():
    assert differing([{"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}]) == [{"b": 2, "c": None}, {"b": 3, "c": 4}]
    assert differing([{"a": 1}, {"a": 1}]) == [{}, {}]


def test_targets_of_one_run_are_compared_too(tmp_path):
    base = header()["target"]
    first = run_of(tmp_path / "one", {"a": (slots(400, 4, 100, 20), closed(4))}, target=base | {"precision": "bf16"})
    second = run_of(tmp_path / "two", {"a": (slots(400, 4, 50, 20), closed(4))}, target=base | {"precision": "fp8"})
    runs = [first, second]
    ways = compare_settings(runs, [evidence(run, SLO) for run in runs], Prices(1, 3.6), 0.5)
    assert [way.text for way in ways] == ["target.precision bf16", "target.precision fp8"]
    assert cheapest(ways).startswith(
        "cheapest: two, a (target.precision fp8): 5"
    )  # 80/s x 0.5 x 5 tokens, 0.72 million


def test_without_a_proven_rate_nothing_is_cheapest():
    (bracket,) = brackets([cell_of(8, "UNDECIDED"), cell_of(16, "MISSED")])
    way = Setting("r", "a", {}, bracket, 0.0, None)
    assert way.rate == 0
    assert cheapest([way]) == "no setting is proven to meet the SLO"
    assert way.text == "no recorded setting"
    assert knobs.settings_section([way, way], "").notes == ["no setting is proven to meet the SLO"]
