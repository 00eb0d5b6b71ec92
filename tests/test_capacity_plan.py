"""Every figure of a capacity report, recomputed by hand from a small sweep and from given figures."""

import datetime
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_bench import accelerators, capacity_plan, capacity_report, kv_cache
from llm_bench.capacity import Growth, Prices
from llm_bench.capacity_ask import Ask, Demand, Figure, Hardware, Section, Table, WhatIf, digits
from llm_bench.errors import BenchError
from llm_bench.kv_cache import GIB, Memory
from llm_bench.objectives import parse
from llm_bench.results import Run
from tests.sample import record
from tests.test_carried import closed, run_of, slots, sweep
from tests.test_kv_cache import DEEPSEEK_V3, LLAMA3_8B, MISTRAL_7B

SLO = parse("ttft_p95<100ms,error_rate<5%")
WEIGHTS = 8_030_261_248 * 2
ASSUMED = WhatIf(tokens_per_second=18_000, tokens_out=450, stay_s=6)


def hardware(config: dict[str, Any] = LLAMA3_8B, count: int = 1, **parts: Any) -> Hardware:
    """24 GiB an accelerator, 0.9 of it, 1 GiB of workspace on each."""
    shape = kv_cache.shape_of(config)
    memory = Memory(count * 24 * GIB, 0.9, WEIGHTS, count * GIB)
    given = Hardware(memory, "24 GiB", "weights", count, None, shape, None, 2, kv_cache.copies(shape, count), 16, 8192)
    return given._replace(**parts)


def figures(sections: list[Section], ending: str) -> dict[str, float | None]:
    """Values of the one section whose key ends so."""
    (section,) = [s for s in sections if s.key.endswith(ending)]
    return {f.key: f.value for f in section.figures}


def notes(sections: list[Section], ending: str) -> str:
    (section,) = [s for s in sections if s.key.endswith(ending)]
    return "\n".join(section.notes)


# ---- arithmetic alone


def test_the_worked_example_is_what_is_printed():
    sections = capacity_plan.what_if(ASSUMED, Ask(utilization=0.7))
    assert figures(sections, "ceilings") == {"token_rate": 40}
    assert figures(sections, "sustainable") == pytest.approx({"sustainable": 28, "concurrency": 168})
    text = capacity_report.render(sections, "terminal")
    assert "40 answers/s  = 18,000 tokens/s / 450 tokens an answer" in text
    assert "28 answers/s  = 40/s x 0.7 (token rate)" in text
    assert "168 requests  = 28/s x 6 s (Little's law)" in text
    assert "none of this was measured" in text


def test_the_lower_of_two_ceilings_binds_and_is_named():
    # 24 x 0.9 GiB - 16,060,522,496 bytes - 1 GiB; 1,200 tokens are 75 blocks: 157,286,400 bytes.
    left = 24 * GIB * 0.9 - WEIGHTS - GIB
    sections = capacity_plan.what_if(ASSUMED._replace(resident_tokens=1200), Ask(hardware=hardware()))
    kv = figures(sections, "kv_memory")
    assert kv["kv_bytes_per_token"] == 131_072
    assert kv["for_cache"] == pytest.approx(left)
    assert kv["sequence_bytes"] == 75 * 16 * 131_072
    assert kv["sequences"] == pytest.approx(left / 157_286_400)
    assert figures(sections, "ceilings") == pytest.approx({"token_rate": 40, "KV_memory": left / 157_286_400 / 6})
    assert "KV memory binds: 6.42/s is the lowest of 2" in notes(sections, "ceilings")
    assert figures(sections, "sustainable")["sustainable"] == pytest.approx(0.7 * left / 157_286_400 / 6)


def test_a_limit_on_requests_in_flight_is_a_ceiling_too():
    sections = capacity_plan.what_if(WhatIf(in_flight=64, stay_s=3), Ask())
    assert figures(sections, "ceilings")["concurrency_limit"] == pytest.approx(21.3333, abs=1e-4)
    with pytest.raises(BenchError, match="none of these pairs"):
        capacity_plan.what_if(WhatIf(tokens_out=450), Ask())


def test_the_table_of_contexts_ends_at_the_models_own():
    sections = capacity_plan.what_if(ASSUMED, Ask(hardware=hardware()))
    (section,) = [s for s in sections if s.key == "kv_memory"]
    left = 24 * GIB * 0.9 - WEIGHTS - GIB
    assert section.tables[0].rows == [
        (1024, "0.125 GiB (0.1342 GB)", math.floor(left / (GIB / 8))),
        (4096, "0.5 GiB (0.5369 GB)", math.floor(left / (GIB / 2))),
    ]


def test_what_does_not_fit_and_what_is_copied_is_said():
    small = hardware()._replace(memory=Memory(10 * GIB, 0.9, WEIGHTS, 0))
    sections = capacity_plan.what_if(ASSUMED._replace(resident_tokens=100), Ask(hardware=small))
    assert figures(sections, "kv_memory")["sequences"] == 0
    assert "weights alone do not fit" in notes(sections, "kv_memory")
    latent = capacity_plan.what_if(ASSUMED._replace(resident_tokens=16), Ask(hardware=hardware(DEEPSEEK_V3, 8)))
    assert figures(latent, "kv_memory")["sequence_bytes"] == 16 * 70_272 * 8
    assert "lies 8 times on the 8 accelerators" in notes(latent, "kv_memory")


def test_memory_bandwidth_is_a_roof():
    h100 = accelerators.find("H100")
    sections = capacity_plan.what_if(ASSUMED._replace(resident_tokens=1200), Ask(hardware=hardware(accelerator=h100)))
    kv = figures(sections, "kv_memory")
    assert kv["sequences"] is not None
    step = (WEIGHTS + kv["sequences"] * 157_286_400) / 3350e9
    assert kv["memory_roof"] == pytest.approx(kv["sequences"] / step)
    assert figures(sections, "ceilings")["memory_bandwidth"] == pytest.approx(kv["memory_roof"] / 450)  # 18,000 is more
    modest = ASSUMED._replace(resident_tokens=1200, tokens_per_second=0.9 * kv["memory_roof"])
    less = capacity_plan.what_if(modest, Ask(hardware=hardware(accelerator=h100)))
    assert "memory_bandwidth" not in figures(less, "ceilings")


def test_a_fleet_and_its_cost_by_hand():
    demand = Demand(100, 1.5, "as given", 1, 300, Growth(0.05, "month"), datetime.date(2026, 1, 31))
    prices = Prices(4, 2.5, 10, {"price from": "the list of 2026-01"})
    sections = capacity_plan.what_if(ASSUMED, Ask(demand=demand, prices=prices, money="$", utilization=0.7))
    fleet = figures(sections, "fleet")
    # 150/s over 28/s: 5.36, six; 28 x 6 = 168/s. With two of seven gone 140/s: 10/s too little for 300 s.
    days = fleet.pop("exhausted")
    assert fleet == pytest.approx(
        {"target": 150, "active": 6, "total": 7, "in_flight": 900, "failures": 1, "queued": 3000}
    )
    assert days == pytest.approx(math.log(168 / 150) / math.log(1.05) * 30.436875)
    text = capacity_report.render(sections, "md")
    assert str(datetime.date(2026, 1, 31) + datetime.timedelta(days=int(days))) in text
    # 7 replicas x 4 x 2.50 + 10 = 80 an hour; 100/s x 450 x 3,600 s = 162 million tokens.
    assert figures(sections, "cost") == pytest.approx(
        {"per_hour": 80, "per_million": 80 / 162, "per_request": 80 / 360_000, "idle": 1 - 100 / 196}
    )
    assert "price from: the list of 2026-01" in text
    assert "within the SLO" not in text  # nothing was measured, and no limit given
    plain = capacity_plan.what_if(ASSUMED, Ask(demand=demand, prices=prices))
    for section in plain:
        assert all(figure.unit not in ("", "1") for figure in section.figures), section.title


def test_more_demand_than_the_active_replicas_carry_is_said():
    # Sized for the mean of 28, asked for 28 x 1 and growing never; a demand over it cannot come from one rate.
    ask = Ask(demand=Demand(28, growth=Growth(0, "year")), utilization=0.7)
    sections = capacity_plan.what_if(ASSUMED, ask)
    assert figures(sections, "fleet")["exhausted"] is None
    assert figures(sections, "fleet")["active"] == 1
    assert "with 1 gone: 0/s of 28/s" in notes(sections, "fleet")


# ---- from a run


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return sweep(tmp_path_factory.mktemp("runs") / "sweep")


def test_a_sweep_by_hand(measured):
    ask = Ask(SLO, hardware(), Demand(100, spares=1), Prices(2, 2.5), "$")
    sections = capacity_plan.plan([measured], ask)
    within = figures(sections, "within_slo")
    assert within == pytest.approx({"rate_within_slo": 40, "planned": 28, "missed_at": 8}, rel=0.02)
    rate = within["planned"]
    assert rate is not None
    # c=4 makes 200 tokens/s, 5 an answer. Its sequences hold 101 to 104 tokens, 7 blocks of 16, for the 100 ms.
    kv = figures(sections, "kv_memory")
    assert kv["sequence_bytes"] == pytest.approx(7 * 16 * 131_072)
    left = 24 * GIB * 0.9 - WEIGHTS - GIB
    assert kv["sequences"] == pytest.approx(left / (7 * 16 * 131_072))
    assert figures(sections, "ceilings") == pytest.approx(
        {"token_rate": 40, "KV_memory": left / (7 * 16 * 131_072) / 0.1, "sustainable": 28}, rel=0.02
    )
    assert "token rate binds" in notes(sections, "ceilings")
    # 100/s over 28/s of one: four, and a spare; five of two accelerators at 2.50 an hour.
    assert figures(sections, "fleet") == pytest.approx(
        {"target": 100, "active": 4, "total": 5, "in_flight": 10, "failures": 1}
    )
    assert figures(sections, "cost") == pytest.approx(
        {"per_hour": 25, "per_million": 25 / 1.8, "per_request": 25 / 360_000, "idle": 1 - 100 / (5 * rate)}
    )
    (loads,) = [s for s in sections if s.key.endswith("loads")]
    assert [(row[0], row[2]) for row in loads.tables[0].rows] == [("c=2", "MET"), ("c=4", "MET"), ("c=8", "MISSED")]
    two = loads.tables[0].rows[0]
    assert two[3:8] == pytest.approx((20, 20, 100, 0.1, 2), rel=0.02)
    assert isinstance(two[5], float)
    assert two[8:] == pytest.approx((5 / (two[5] * 3600) * 1e6,) * 2)
    assert loads.tables[0].rows[2][4] == 0
    assert loads.tables[0].rows[2][9] is None  # nothing within the SLO: no cost of it
    assert "LLM decoding" in str(loads.figures[0].how)


def test_of_a_target_with_several_urls_it_is_said_what_one_replica_is(tmp_path, measured):
    cells = {"000-a-c=4": (slots(400, 4, 100, 20), closed(4))}
    run = run_of(tmp_path / "r", cells, target={"name": "a", "url": "http://x/v1|http://y/v1", "api": "openai-chat"})
    assert "called one replica below is all 2 together" in notes(capacity_plan.plan([run], Ask(SLO)), "loads")
    assert "together" not in notes(capacity_plan.plan([measured], Ask(SLO)), "loads")


def test_no_proven_load_no_number_of_replicas(measured):
    sections = capacity_plan.plan([measured], Ask(parse("ttft_p95<1ms"), demand=Demand(100)))
    assert figures(sections, "within_slo")["rate_within_slo"] is None
    assert "no number of replicas can be given" in notes(sections, "fleet")
    text = capacity_report.render(sections, "terminal")
    assert "rate within the SLO of one replica  –  = no load is proven to meet it" in text


def test_an_undecided_load_leaves_a_bracket(tmp_path):
    cells = {"000-a-c=2": (slots(400, 2, 100, 20), closed(2)), "001-a-c=8": (slots(30, 8, 100, 20), closed(8))}
    run = run_of(tmp_path / "r", cells)
    sections = capacity_plan.plan([run], Ask(SLO, demand=Demand(100)))
    said = notes(sections, "within_slo")
    assert "no load measured misses the SLO" in said
    assert "undecided: c=8" in said
    assert figures(sections, "fleet")["active"] == 8  # by 0.7 of the 20/s that c=2 proves


def test_a_replica_that_might_do_is_named_when_a_missed_load_carried_more(tmp_path):
    slow = slots(400, 8, 160, 120)  # 50/s, first token after 120 ms
    run = run_of(tmp_path / "r", {"000-a-c=2": (slots(400, 2, 100, 20), closed(2)), "001-a-c=8": (slow, closed(8))})
    sections = capacity_plan.plan([run], Ask(SLO, demand=Demand(100)))
    assert figures(sections, "fleet")["active"] == 8
    assert "3 might do" in notes(sections, "fleet")  # 100 / (50 x 0.7)


def test_a_run_that_carried_more_than_memory_allows_is_a_doubt(measured):
    tight = hardware()._replace(memory=Memory(WEIGHTS + 3 * 7 * 16 * 131_072, 1.0, WEIGHTS, 0))
    sections = capacity_plan.plan([measured], Ask(SLO, tight))
    assert figures(sections, "ceilings")["KV_memory"] == pytest.approx(30)  # three fit, for 0.1 s each
    assert "doubt" in notes(sections, "ceilings")
    assert "KV memory binds" in notes(sections, "ceilings")


def two_mixes(tmp_path: Path) -> Run:
    """c=2 within the SLO, whose contexts grow over a block's edge; c=4 beyond it, with longer ones."""
    short, long = slots(400, 2, 100, 20), slots(400, 4, 100, 50)
    for row in short:
        row.tokens_in = 30  # 31, 32, 33, 34 tokens for 20 ms each: 2, 2, 3 and 3 blocks of 16
    return run_of(tmp_path / "r", {"000-a-c=2": (short, closed(2)), "001-a-c=4": (long, closed(4))})


def test_what_a_sequence_holds_is_measured_at_the_load_that_is_planned_with(tmp_path):
    run = two_mixes(tmp_path)
    left = 24 * GIB * 0.9 - WEIGHTS - GIB
    sections = capacity_plan.plan([run], Ask(parse("ttft_p95<40ms"), hardware()))
    each = 2.5 * 16 * 131_072
    kv = figures(sections, "kv_memory")
    assert (kv["sequence_bytes"], kv["sequences"]) == pytest.approx((each, left / each))
    assert figures(sections, "ceilings")["KV_memory"] == pytest.approx(left / each / 0.1)  # for 100 ms from being sent
    assert "sequences and stays: of c=2" in notes(sections, "kv_memory")
    # No load within the SLO: of the one that made most, 101 to 104 tokens in 7 blocks.
    none = capacity_plan.plan([run], Ask(parse("ttft_p95<1ms"), hardware()))
    assert figures(none, "kv_memory")["sequence_bytes"] == pytest.approx(7 * 16 * 131_072)
    assert "sequences and stays: of c=4" in notes(none, "kv_memory")


def test_a_server_that_tells_its_queue_holds_blocks_from_then_on(tmp_path):
    rows = slots(400, 4, 100, 60)
    for row in rows:
        row.tokens_in, row.server_queue_ms = 30, 50.0
    sections = capacity_plan.plan([run_of(tmp_path / "r", {"000-a-c=4": (rows, closed(4))})], Ask(SLO, hardware()))
    # 10 ms of prefill with 30 tokens, then 31 to 34 for 10 ms each: 2, 2, 2, 3, 3 blocks over 50 ms.
    each = 2.4 * 16 * 131_072
    kv = figures(sections, "kv_memory")
    assert kv["sequence_bytes"] == pytest.approx(each)
    assert figures(sections, "ceilings")["KV_memory"] == pytest.approx((kv["sequences"] or 0) / 0.05)


def test_answers_that_came_whole_have_no_ceiling_by_memory(tmp_path):
    rows = [record(i, i // 4 * 100 + i % 4 * 25, end=i // 4 * 100 + i % 4 * 25 + 100, tokens_out=5) for i in range(400)]
    run = run_of(tmp_path / "r", {"000-a-c=4": (rows, closed(4))})
    sections = capacity_plan.plan([run], Ask(parse("e2e_p95<200ms"), hardware()))
    assert "sequence_bytes" not in figures(sections, "kv_memory")
    assert "no sequence streamed its tokens in the window" in notes(sections, "kv_memory")
    assert "KV_memory" not in figures(sections, "ceilings")


def test_cached_blocks_are_taken_off_where_no_layer_slides(tmp_path):
    rows = slots(400, 4, 100, 20)
    for row in rows:
        row.tokens_cached = 48
    run = run_of(tmp_path / "r", {"000-a-c=4": (rows, closed(4))})
    sections = capacity_plan.plan([run], Ask(SLO, hardware()))
    assert figures(sections, "kv_memory")["sequence_bytes"] == pytest.approx(4 * 16 * 131_072)
    assert "taken off (7 blocks with them)" in notes(sections, "kv_memory")
    # 48 of 100 prompt tokens from the cache, 5 tokens an answer: 9.6 million for a million tokens out, 10.4 computed.
    loads = figures(sections, "loads")
    assert (loads["cached"], loads["computed"]) == pytest.approx((9.6e6, 10.4e6))
    sliding = capacity_plan.plan([run], Ask(SLO, hardware(MISTRAL_7B)))
    assert figures(sliding, "kv_memory")["sequence_bytes"] == pytest.approx(7 * 16 * 131_072)
    assert "not taken off" in notes(sliding, "kv_memory")


def test_curves_are_said_with_their_intervals_and_refused_past_twice_the_load(tmp_path):
    cells = {}
    for i, n in enumerate((1, 2, 4, 8, 16, 32)):
        stay = 100.0 if n <= 8 else 100.0 * n / 8
        cells[f"{i:03d}-a-c={n}"] = (slots(max(200, 12 * n), n, stay, 0.2 * stay), closed(n))
    run = run_of(tmp_path / "r", cells)
    sections = capacity_plan.plan([run], Ask(at_loads=(8.0, 64.0)))
    curves = figures(sections, "curves")
    assert curves["throughput_ceiling"] == pytest.approx(400, rel=0.02)  # 8 slots, 100 ms, 5 tokens
    assert curves["throughput_knee"] == pytest.approx(8, rel=0.03)
    assert curves["tpot_knee"] == pytest.approx(8, rel=0.03)
    (section,) = [s for s in sections if s.key.endswith("curves")]
    values = {(row[0], row[1]): row[2] for row in section.tables[0].rows}
    assert values["mean TTFT", 64.0] == pytest.approx(0.16, rel=0.03)
    with pytest.raises(BenchError, match="load 65 is refused"):
        capacity_plan.plan([run], Ask(at_loads=(65.0,)))


def test_a_run_of_single_passes_has_a_ceiling_of_answers_and_a_cost_an_answer(tmp_path):
    def loop(slots_: int, stay: float) -> list[Any]:
        starts = [(i // slots_ * stay + i % slots_ * stay / slots_) for i in range(400)]
        return [record(i, at, end=at + stay, tokens_out=-1, text_bytes=0) for i, at in enumerate(starts)]

    cells = {"000-a-c=4": (loop(4, 100), closed(4)), "001-a-c=8": (loop(8, 195), closed(8))}
    run = run_of(tmp_path / "r", cells)
    ask = Ask(parse("e2e_p95<300ms,error_rate<5%"), demand=Demand(50), prices=Prices(1, 3.6), money="$")
    sections = capacity_plan.plan([run], ask)
    assert figures(sections, "ceilings")["pass_rate"] == pytest.approx(41, rel=0.02)
    assert figures(sections, "ceilings")["sustainable"] == pytest.approx(0.7 * 41, rel=0.02)
    text = " ".join(capacity_report.render(sections, "terminal").split())
    assert "single pass: one result a request, nothing is decoded" in text
    assert "(Triton, TorchServe, MLServer)" in text
    assert "saturated: from c=4 to c=8" in text
    cost = figures(sections, "cost")  # two replicas: 7.20 an hour, for 50 answers a second
    assert (cost["per_hour"], cost["per_million"]) == (7.2, None)
    assert cost["per_request"] == pytest.approx(7.2 / (50 * 3600))


# ---- limits, or none


def test_without_limits_there_are_ceilings_and_nothing_else_is_claimed(measured):
    sections = capacity_plan.plan([measured], Ask())
    text = capacity_report.render(sections, "terminal")
    assert "without limits no load is proven, and only ceilings can be given" in " ".join(text.split())
    assert "ceiling by token rate" in text
    for claim in ("MET", "proven at", "rate within the SLO of", "goodput"):
        assert claim not in text
    with pytest.raises(BenchError, match="--target-rate without --slo, and the run keeps none"):
        capacity_plan.plan([measured], Ask(demand=Demand(100)))


def test_the_slo_that_a_run_was_made_with_is_taken_where_none_is_given(tmp_path):
    cells = {"000-a-c=4": (slots(400, 4, 100, 20), closed(4))}
    made = run_of(tmp_path / "a", cells)
    made.facts = {"settings": {"slo": "ttft_p95<100ms,error_rate<5%"}}
    sections = capacity_plan.plan([made], Ask(demand=Demand(100)))
    assert notes(sections, "limits") == "ttft_p95<100ms,error_rate<5%, as the run was made with"
    assert figures(sections, "fleet")["active"] == 4
    other = run_of(tmp_path / "b", cells)
    other.facts = {"settings": {"slo": "ttft_p95<1ms"}}
    with pytest.raises(BenchError, match=r"made with different SLOs .*: give --slo"):
        capacity_plan.plan([made, other], Ask())
    assert capacity_plan.plan([made, other], Ask(SLO))


def test_what_is_undecided_says_what_would_decide_it_and_claims_no_rate(tmp_path):
    run = run_of(tmp_path / "r", {"000-a-c=2": (slots(60, 2, 100, 20), closed(2))})
    sections = capacity_plan.plan([run], Ask(parse("ttft_p95<100ms,error_rate<1%")))
    assert "requests would decide it" in notes(sections, "loads")
    said = notes(sections, "within_slo")
    assert "this or more" not in said
    assert "none to miss it: nothing is known of the rate" in said


# ---- which rate


def test_of_a_ceiling_that_may_be_higher_no_share_is_planned_with(tmp_path):
    cells = {"000-a-c=2": (slots(400, 2, 100, 20), closed(2)), "001-a-c=4": (slots(400, 4, 100, 20), closed(4))}
    run = run_of(tmp_path / "r", cells)
    sections = capacity_plan.plan([run], Ask(SLO, hardware()))
    ceilings = figures(sections, "ceilings")
    assert ceilings["token_rate"] == pytest.approx(40, rel=0.02)
    assert ceilings["sustainable"] is None
    assert "which of them binds is not known" in notes(sections, "ceilings")


def poisson(n: int, rate: float, stay: float) -> list[Any]:
    due = np.cumsum(np.random.Generator(np.random.PCG64(5)).exponential(1000 / rate, n))
    return [record(i, at, events=[at + 0.2 * stay, at + stay]) for i, at in enumerate(due)]


def at_rate(rate: float, **parts: object) -> dict[str, object]:
    return {"kind": "open", "rate": rate, "label": f"rate={rate:g}/s", "warmup": None, **parts}


def test_arrivals_that_were_carried_are_planned_with_as_they_are(tmp_path):
    run = run_of(tmp_path / "r", {"000-a": (poisson(800, 50, 40), at_rate(50.0))})
    sections = capacity_plan.plan([run], Ask(SLO, demand=Demand(200)))
    within = figures(sections, "within_slo")
    assert within == {"rate_within_slo": pytest.approx(50, rel=0.1)}
    assert "closed loop" not in notes(sections, "within_slo")
    assert figures(sections, "fleet")["active"] == math.ceil(200 / (within["rate_within_slo"] or 1))
    even = run_of(tmp_path / "e", {"000-a": (poisson(800, 50, 40), at_rate(50.0, burstiness=None))})
    assert "evenly spaced" in notes(capacity_plan.plan([even], Ask(SLO)), "within_slo")


def test_a_closed_loop_says_that_users_come_at_random(measured):
    said = notes(capacity_plan.plan([measured], Ask(SLO)), "within_slo")
    assert "users come at random and queue" in said
    assert "--rate or --replay" in said
    more = capacity_plan.plan([measured], Ask(SLO, utilization=0.5, demand=Demand(100)))
    assert figures(more, "within_slo")["planned"] == pytest.approx(20, rel=0.02)
    assert figures(more, "fleet")["active"] in (5, 6)  # 100/s over 0.5 x 40/s


def test_an_overloaded_cell_is_no_ceiling_and_names_what_was_offered_and_served(tmp_path):
    rows = [record(i, 10 * i, events=[50 * i + 5, 50 * i + 25]) for i in range(400)]
    run = run_of(tmp_path / "r", {"000-a": (rows, at_rate(100.0))})
    sections = capacity_plan.plan([run], Ask(SLO))
    (loads,) = [s for s in sections if s.key.endswith("loads")]
    row = dict(zip(loads.tables[0].heads, loads.tables[0].rows[0], strict=True))
    assert row["offered/s"] == pytest.approx(100, rel=0.01)
    assert row["served/s"] == pytest.approx(20, rel=0.05)
    assert "is shorter than the mean stay of its requests" in notes(sections, "loads")
    assert figures(sections, "token_rate") == {"token_rate": None}
    assert not [s for s in sections if s.key.endswith("ceilings")]
    (within,) = [s for s in sections if s.key.endswith("within_slo")]
    missed = next(f for f in within.figures if f.key == "missed_at")
    assert missed.value == pytest.approx(100, rel=0.01)
    assert re.match(r"rate=100/s, (19|20)\.?\d*/s served: the backlog grows by", missed.how)


def test_what_ended_beside_a_ceiling_is_explained_where_it_is_more(tmp_path):
    run = run_of(tmp_path / "r", {"000-a-c=4": (slots(400, 4, 100, 20), closed(4))})
    sections = capacity_plan.plan([run], Ask(SLO))
    (loads,) = [s for s in sections if s.key.endswith("loads")]
    served = dict(zip(loads.tables[0].heads, loads.tables[0].rows[0], strict=True))["served/s"]
    ceiling = figures(sections, "ceilings")["token_rate"]
    assert isinstance(served, float)
    assert ceiling == pytest.approx(served, rel=0.02)
    assert ("over the ceiling by token rate" in notes(sections, "ceilings")) == (served > 1.001 * ceiling)


# ---- several runs


def test_the_cheapest_setting_within_the_slo_is_named_with_what_sets_it_apart(tmp_path):
    fast = run_of(
        tmp_path / "fast", {"000-a-c=4": (slots(400, 4, 100, 20), closed(4))}, settings={"delay": 2, "out": "x"}
    )
    slow = run_of(
        tmp_path / "slow", {"000-a-c=4": (slots(400, 4, 200, 20), closed(4))}, settings={"delay": 0, "out": "y"}
    )
    sections = capacity_plan.plan([slow, fast], Ask(SLO, prices=Prices(1, 3.6)))
    (section,) = [s for s in sections if s.key == "settings"]
    assert [row[:4] for row in section.tables[0].rows] == [
        ("slow", "a", "settings.delay 0", "c=4"),
        ("fast", "a", "settings.delay 2", "c=4"),
    ]
    # 0.7 x 40/s of 5 tokens for 3.60 an hour: 0.504 million tokens, 7.14 a million; half as many cost twice as much.
    assert [row[5] for row in section.tables[0].rows] == pytest.approx([10 / 0.7, 5 / 0.7], rel=0.02)
    assert notes(sections, "settings").startswith("cheapest: fast, a (settings.delay 2)")
    without = capacity_plan.plan([slow, fast], Ask(SLO))
    assert "without prices" in notes(without, "settings")
    nothing = capacity_plan.plan([slow, fast], Ask(parse("ttft_p95<1ms")))
    assert notes(nothing, "settings") == "no setting is proven to meet the SLO"
    unjudged = capacity_plan.plan([slow, fast], Ask(prices=Prices(1, 3.6)))
    assert notes(unjudged, "settings") == "no setting is proven to meet the SLO"


def test_the_batch_window_is_traded_at_each_load_that_all_runs_have(tmp_path):
    base = run_of(tmp_path / "base", {"000-a-c=4": (slots(800, 4, 100, 20), closed(4))})
    more = run_of(tmp_path / "more", {"000-a-c=4": (slots(800, 4, 80, 40), closed(4))})
    sections = capacity_plan.plan([more, base], Ask(SLO, delays_ms=(2.0, 0.0)))
    said = notes(sections, "batch_window")
    assert "2 ms buys 25%" in said  # 250 against 200 tokens/s
    assert "costs 20 ms" in said
    assert "60 ms of budget left" in said
    assert "the longest window proven to meet the SLO is 2 ms" in said
    other = run_of(tmp_path / "other", {"000-a-c=8": (slots(800, 8, 80, 40), closed(8))})
    assert notes(capacity_plan.plan([base, other], Ask(SLO, delays_ms=(0.0, 2.0))), "batch_window") == (
        "a, c=4: not measured by every run"
    )
    with pytest.raises(BenchError, match="1 delay for 2 runs"):
        capacity_plan.plan([more, base], Ask(SLO, delays_ms=(2.0,)))


# ---- formats


def test_every_format_has_every_figure(measured):
    sections = capacity_plan.plan([measured], Ask(SLO, hardware(), Demand(100, spares=1), Prices(2, 2.5), "$"))
    terminal, md = (capacity_report.render(sections, f) for f in ("terminal", "md"))
    document = json.loads(capacity_report.render(sections, "json"))
    for section in sections:
        stored = document["sections"][section.key]
        for figure in section.figures:
            assert stored["figures"][figure.key]["value"] == figure.value
            assert capacity_report.shown(figure) in terminal
            assert capacity_report.shown(figure) in md
    assert document["llm_bench_capacity"] == capacity_report.SCHEMA
    with pytest.raises(BenchError, match="expected one of terminal, md, json"):
        capacity_report.render(sections, "csv")


@pytest.mark.parametrize(("figure", "said"), [
    (Figure("k", "n", 28.0, "/s"), "28/s"),
    (Figure("k", "n", 0.25, "share"), "25.00%"),
    (Figure("k", "n", 131_072.0, "bytes"), "131,072 bytes"),
    (Figure("k", "n", 16 * GIB, "bytes"), "16 GiB (17.18 GB)"),
    (Figure("k", "n", 168.0, "1"), "168"),
    (Figure("k", "n", 12.5, ""), "12.5"),
    (Figure("k", "n", None, "/s"), "–"),
])  # fmt: skip
def test_figures_in_words(figure, said):
    assert capacity_report.shown(figure) == said


def test_digits_and_markdown_that_a_name_cannot_break():
    assert [digits(x) for x in (28.0, 1234.6, 0.33333, None, 18_000)] == ["28", "1,235", "0.3333", "–", "18,000"]
    odd = Section("k", "a | b", [Figure("f", "<x>", 1.0, "1", "p | q")], [Table(("h",), [("v|w",)])], ["n\nm"])
    text = capacity_report.markdown([odd])
    assert "a \\| b" in text
    assert "&lt;x>" in text
    assert "v\\|w" in text
    assert "- n m" in text


def test_tokens_within_the_limits_are_counted_and_not_the_answers_that_have_them(tmp_path):
    """Every second of 400 requests fails: the tokens of the others are all within, and cost no more for it. Three of
    four are slow, and four times as long: a quarter of the answers is within, and a 13th of the tokens.
    """
    rows = [
        r if i % 2 else record(i, 25.0 * i, end=25.0 * i + 1, outcome="failed") for i, r in enumerate(paced(400, 20))
    ]
    late = paced(400, 20, slow=lambda i: i % 4)
    load = {"kind": "open", "rate": 40, "label": "rate=40/s"}
    for folder, made, tokens, within in (("a", rows, 100, 100), ("b", late, 650, 50)):
        run = run_of(tmp_path / folder, {f"000-a-{folder}": (made, load)})
        sections = capacity_plan.plan([run], Ask(slo=parse("ttft_p95<100ms"), prices=Prices(1, 3.6)))
        (section,) = [s for s in sections if s.key.endswith("loads")]
        each, good = section.tables[0].rows[0][-2:]
        assert each == pytest.approx(3.6 / (3600 * tokens) * 1e6, rel=0.1)
        assert good == pytest.approx(3.6 / (3600 * within) * 1e6, rel=0.1)


def paced(n: int, ttft: float, slow: Any = lambda _: False) -> list[Any]:
    """One every 25 ms, of 5 tokens; the slow ones have their first after 200 ms, and 20 of them."""
    rows = []
    for i in range(n):
        first, tokens = (200, 20) if slow(i) else (ttft, 5)
        rows.append(record(i, 25.0 * i, events=[25.0 * i + first + k for k in range(tokens)]))
    return rows
