"""Who may import whom: a module imports only what stands above it in this list."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# One import order of llm_bench; DESIGN.md has another, by what modules are for.
LAYERS = """errors limits files printable clock exchange http1 stats steady pairs changes request ticks prefixes fields
captured agentic formats containers sheet arrange trace workload doctor trace_report trace_plot fit
model_file law synth servegen goodness goodness_plot anonymise parts mix neighbours selection prompts
bodies framing protocol dialect_openai dialect_anthropic dialect_chunks dialect_llamacpp
dialect_responses dialect_sglang dialect_tgi dialect_triton dialect_http grpc_frames kserve_messages
dialect_pooling kserve_tensors dialect_kserve dialect_kserve_grpc dialects plain answer null_target host
calibration proxy prometheus server_names server_metrics scrape_machine target credentials targets
grpc_wire grpc_talk statuses talk
mistaken pins probe_management probe_prompts probe_events probe_models probe settling scrape plan
arms shapes columns records retry
arrivals connection wire flights driver shards transport cell beside faults fault_proxy fault_doing order sizing
measure book run windows series outcomes slo metrics decompose energy objectives identities sending facts client
evidence diagnose_client diagnose_memory diagnose_queue diagnose_server diagnose_stream
diagnose_replicas diagnose_failures diagnose same_work host_checks sample_checks work_checks doubts
tool_figures as_tools interference results
repeats recovery recovery_words words timeline svg definitions grid terminal_report markdown export
parquet charts html_facts html_tables html_report report rules gate pairing gate_report equal_arms
compare history trend diagnose_report accelerators kv_cache curves capacity batch_window capacity_ask
search_evidence search carried kv_gauge knobs kv_plan capacity_fleet capacity_plan capacity_report
search_backlog search_report search_run selfcheck terminal options host_clock host_part host_agent
host_link hosts ray_hosts cli_run convert cli_trace cli_gate cli_canary cli_capacity cli_diagnose
cli_search perplexity probe_report scoring_ask cli""".split()

PURE = """printable prometheus server_names server_metrics energy kv_gauge capacity_fleet search_evidence
search_backlog diagnose_client diagnose_memory diagnose_queue diagnose_server diagnose_stream
diagnose_replicas decompose evidence diagnose arms repeats svg definitions grid search capacity_ask
carried knobs kv_plan http1 stats steady pairs changes request ticks prefixes fields captured agentic
formats containers trace workload doctor trace_report fit synth servegen goodness anonymise mix
selection prompts bodies dialects answer plan windows series slo metrics objectives sample_checks
work_checks doubts shapes
columns outcomes identities sending facts client same_work tool_figures as_tools timeline charts rules gate
compare
history kv_cache curves capacity batch_window accelerators sheet arrange law framing protocol
dialect_openai dialect_responses dialect_tgi dialect_triton dialect_sglang dialect_llamacpp
dialect_anthropic dialect_chunks interference neighbours trend grpc_frames kserve_messages
dialect_kserve_grpc faults recovery recovery_words host_clock host_checks dialect_pooling dialect_kserve
dialect_http kserve_tensors perplexity html_facts html_tables plain parts diagnose_failures""".split()
PURE_ENGINE = "sequence admission blocks policies scheduler account faults openapi batcher embeddings kserve".split()
IMPURE = {"socket", "asyncio", "time", "torch", "subprocess", "threading", "httpx", "select"}


def imports(path: Path) -> set[str]:
    """Every module imported anywhere in the file, by full name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_module_of_the_bench_has_its_place_in_the_list():
    assert {p.stem for p in (ROOT / "llm_bench").glob("*.py")} - {"__init__"} == set(LAYERS)


def test_the_design_page_names_every_module_in_import_order():
    page = (ROOT / "DESIGN.md").read_text()
    rows = page[page.index("| module | holds |") : page.index("`reference_engine/`: config")]
    cells = ", ".join(re.findall(r"^\| ([^|]+) \|", rows, re.MULTILINE))
    cells = re.sub(r"(\w+_)\{([^}]*)\}", lambda m: ", ".join(m[1] + end for end in m[2].split(",")), cells)
    named = {name.strip() for name in cells.split(",")}
    assert {name for name in LAYERS if not name.startswith("dialect_")} <= named
    assert {name for name in named if re.fullmatch(r"\w+", name)} - {"module"} <= set(LAYERS)
    order = [name.strip() for name in cells.split(",") if name.strip() in LAYERS]
    for at, name in enumerate(order):
        used = imports(ROOT / "llm_bench" / f"{name}.py")
        assert not [other for other in order[at + 1 :] if f"llm_bench.{other}" in used and other not in order[:at]], (
            name
        )


@pytest.mark.parametrize("name", LAYERS)
def test_a_module_imports_only_what_stands_above_it(name):
    below = LAYERS[LAYERS.index(name) + 1 :]
    used = imports(ROOT / "llm_bench" / f"{name}.py")
    wrong = [other for other in below if f"llm_bench.{other}" in used]
    assert not wrong


def test_bench_and_engine_share_only_a_socket():
    for path in (ROOT / "llm_bench").rglob("*.py"):
        assert not any(m.split(".")[0] in ("reference_engine", "kernels") for m in imports(path)), path
    for path in [*(ROOT / "reference_engine").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        assert not any(m.split(".")[0] == "llm_bench" for m in imports(path)), path


@pytest.mark.parametrize("name", [f"llm_bench/{n}" for n in PURE] + [f"reference_engine/{n}" for n in PURE_ENGINE])
def test_the_pure_core_has_no_clock_socket_or_torch(name):
    assert not {m.split(".")[0] for m in imports(ROOT / f"{name}.py")} & IMPURE


def test_the_wall_clock_is_read_in_one_place_only():
    readers = [
        p.name
        for p in (ROOT / "llm_bench").glob("*.py")
        if any(word in p.read_text() for word in ("time.time(", "time.time_ns(", "time_ns()"))
        and "process_time_ns" not in p.read_text()
    ]
    assert readers in (["clock.py"], [])
