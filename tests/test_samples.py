"""The sample traces: each is what its script makes, and the workloads have the figures of what they stand for."""

import json
import runpy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llm_bench import prefixes
from llm_bench.errors import BenchError
from llm_bench.fit import fit
from llm_bench.goodness import compare
from llm_bench.model_file import load
from llm_bench.request import Trace
from llm_bench.synth import synth
from llm_bench.trace import read
from llm_bench.workload import Workload, describe, spearman

TRACES = Path(__file__).parents[1] / "traces"
SHARED = Path(__file__).parents[2] / "shared"
WORKLOADS = ("chat", "code", "rag", "long-context", "agentic", "reasoning")
# The whole distributions that four of them stand for, as presets_quantiles.json names them.
SOURCES = {
    "chat": "azure-conv-2023",
    "code": "azure-code-2023",
    "rag": "ragpulse",
    "long-context": "mooncake-conversation (dejittered +U(0,3s))",
}


def workload(name: str) -> Workload:
    return describe(read(TRACES / f"workload-{name}.jsonl"))


def test_the_samples_are_what_their_script_makes(tmp_path: Path) -> None:
    """Those of workloads are what `llm-bench trace synth` makes of their models, by the options that they name."""
    runpy.run_path(str(TRACES / "make_samples.py"))["main"](tmp_path)
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == sorted(path.name for path in TRACES.iterdir() if path.suffix in (".jsonl", ".csv"))
    for name in made:
        assert (tmp_path / name).read_bytes() == (TRACES / name).read_bytes(), name


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_reads_without_a_fault_and_names_its_source_and_how_it_was_made(name: str) -> None:
    trace = read(TRACES / f"workload-{name}.jsonl")
    assert 200 <= len(trace.requests) <= 400 and not trace.skipped
    found = prefixes.faults(trace.requests)
    assert not any((found.several_parents, found.partial_reused, found.miscounted, found.wide))
    with (TRACES / f"workload-{name}.jsonl").open() as file:
        about = json.loads(next(file))["about"]
    model = load(TRACES / f"models/{name}.json")
    options = runpy.run_path(str(TRACES / "make_samples.py"))["WORKLOADS"][name]
    assert about == f"synthetic, of {model.source}, {model.date}: llm-bench trace synth {name}.json {options}"


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_large_synthesis_has_the_quantiles_that_its_model_publishes(name: str) -> None:
    """Shares of n draws up to a quantile are off by over 1.95 / sqrt(n) once in 1,000 by chance (Massart 1990)."""
    model = load(TRACES / f"models/{name}.json")
    law = model.streams[0].law
    assert law is not None
    made = synth(replace(model, block_size=0), seed=2, count=20_000)  # lengths are drawn before blocks are dealt
    first = [r for r in made if not r.turn]
    later = [r for r in made if r.turn]
    drawn: dict[str, Sequence[float]] = {
        "tokens_in": [r.tokens_in for r in first],
        "tokens_out": [r.tokens_out or 0 for r in made],
        "tokens_new": [r.tokens_new for r in later],
        "think_s": [r.think_s or 0.0 for r in later],
        "turns": list(Counter(r.session for r in made).values())[:-3] if later else [],  # the last ones are cut
    }
    for key, values in drawn.items():
        ranked, table = np.sort(values), getattr(law, key)
        assert bool(table) == bool(len(ranked)), key
        for level, value in table:
            below, up_to = (np.searchsorted(ranked, value, side) / len(ranked) for side in ("left", "right"))
            assert below - 1.95 / len(ranked) ** 0.5 <= level <= up_to + 1.95 / len(ranked) ** 0.5, (key, level)
        if table:
            assert table[0][1] <= ranked[0] and ranked[-1] <= table[-1][1]
    if not later:
        rho = spearman(np.array(drawn["tokens_in"], float), np.array(drawn["tokens_out"], float))
        assert rho == pytest.approx(law.spearman, abs=0.03)


def test_a_model_that_is_taken_for_a_trace_is_told() -> None:
    with pytest.raises(BenchError, match="a model, not a trace; make one from it with: llm-bench trace synth"):
        read(TRACES / "models/chat.json")


def test_models_share_prefixes_as_their_sources_do() -> None:
    for name, hits, requests in (("rag", 0.314, 1000), ("long-context", 0.374, 12_031)):
        model = load(TRACES / f"models/{name}.json")
        saved, total = prefixes.prefix_bound(synth(model, seed=1, count=requests))
        assert saved / total == pytest.approx(hits, abs=0.015), name


@pytest.mark.parametrize("name", SOURCES)
def test_models_have_the_published_quantiles(name: str) -> None:
    path = SHARED / "traces/presets_quantiles.json"
    if not path.exists():
        pytest.skip("presets_quantiles.json is not beside this checkout")
    source, model = json.loads(path.read_text())[SOURCES[name]], load(TRACES / f"models/{name}.json")
    law = model.streams[0].law
    assert law is not None and model.conversations == law.rows == source["n"]
    assert law.spearman == source["spearman"] and model.rate == pytest.approx(source["mean_rate_per_s"], rel=0.001)
    for table, key in ((law.tokens_in, "input_quantiles"), (law.tokens_out, "output_quantiles")):
        assert [value for _, value in table] == [source[key][round(100 * level)] for level, _ in table]


@pytest.mark.parametrize("name", SOURCES)
def test_lengths_are_those_of_the_source_as_far_as_300_rows_can_be(name: str) -> None:
    path = SHARED / "traces/presets_quantiles.json"
    if not path.exists():
        pytest.skip("presets_quantiles.json is not beside this checkout")
    source, sample = json.loads(path.read_text())[SOURCES[name]], read(TRACES / f"workload-{name}.jsonl").requests
    for key, values in (
        ("input_quantiles", sorted(r.tokens_in for r in sample)),
        ("output_quantiles", sorted(r.tokens_out or 0 for r in sample)),
    ):
        # Share of the sample up to each of the source's quantiles: 1.63 / sqrt(n) off once in 100 by chance.
        below = [
            (sum(x <= q for x in values) / len(values), sum(x < q for x in values) / len(values)) for q in source[key]
        ]
        off = max(max(low - k / 100, k / 100 - high) for k, (high, low) in enumerate(below))
        assert off < 1.63 / len(values) ** 0.5 + 0.03  # and the table has eight points
    rho = describe(read(TRACES / f"workload-{name}.jsonl")).spearman
    assert rho == pytest.approx(source["spearman"], abs=2 / len(sample) ** 0.5)


def test_the_code_workload_is_bursty_and_the_chat_workload_is_not() -> None:
    code, chat = workload("code").arrivals, workload("chat").arrivals
    assert code.cv_window is not None and 2 < code.cv_window[1] < 6.5
    assert chat.cv_window is not None and 0.9 < chat.cv_window[1] < 1.1
    assert code.rate == pytest.approx(2.57, rel=0.2) and chat.rate == pytest.approx(5.53, rel=0.2)


def test_retrieval_and_long_contexts_share_prefixes() -> None:
    rag, long = workload("rag"), workload("long-context")
    assert rag.sharing is not None and rag.sharing.token_hits_full == pytest.approx(0.314, abs=0.03)
    assert long.sharing is not None and long.sharing.token_hits_full == pytest.approx(0.374, abs=0.05)
    assert long.tokens_in is not None and long.tokens_in.p50 > 5000


def test_the_agent_calls_tools_turn_after_turn_in_a_growing_context() -> None:
    agentic = workload("agentic")
    assert agentic.sessions is not None and agentic.sessions.turns.p50 == pytest.approx(33, abs=5)
    assert agentic.sessions.think_s is not None and agentic.sessions.think_s.p50 == pytest.approx(5.2, rel=0.2)
    assert agentic.tokens_in is not None and agentic.tokens_out is not None
    assert agentic.tokens_in.mean / agentic.tokens_out.mean == pytest.approx(131, rel=0.1)


def test_reasoning_answers_are_longer_than_their_prompts() -> None:
    reasoning = workload("reasoning")
    assert reasoning.tokens_in is not None and reasoning.tokens_out is not None
    assert reasoning.tokens_in.p50 == pytest.approx(163, rel=0.2)
    assert reasoning.tokens_out.p50 == pytest.approx(1165, rel=0.1)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_can_be_fitted_and_made_anew(name: str) -> None:
    before = read(TRACES / f"workload-{name}.jsonl")
    made = synth(fit(before), seed=1, count=len(before.requests))
    again = compare(before, Trace(made, "llm-bench", "", [], {}))
    for d in (again.tokens_in, again.tokens_out):
        assert d is not None and d.ks < 0.1
    small = synth(fit(before), seed=1, lengths=0.1)
    assert max(r.tokens_in for r in small) < 14_000
