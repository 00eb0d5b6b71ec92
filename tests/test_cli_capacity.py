"""`llm-bench capacity` at its edges: what is typed, what is refused, and that its arithmetic is that of METRICS.md."""

import json
import re
import typing
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from llm_bench import cli_capacity
from llm_bench.cli_capacity import LIMITS, capacity, duration, growth_of, read_config
from llm_bench.errors import BenchError
from llm_bench.target import hourly_price
from tests.test_carried import sweep
from tests.test_kv_cache import LLAMA3_8B

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(capacity)
WORKED = ["--what-if", "tokens_per_second=18000", "tokens_out=450", "utilization=0.7", "e2e=6s"]


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def shown(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.exception
    return " ".join(result.stdout.split())  # however it was wrapped


def refused(*arguments: object) -> str:
    result = invoke(*arguments)
    assert isinstance(result.exception, BenchError), result.stdout
    return str(result.exception)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(LLAMA3_8B))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "sweep"
    sweep(folder)
    return folder


def test_the_worked_example_as_typed():
    document = json.loads(shown(*WORKED, "--format", "json"))["sections"]
    assert document["ceilings"]["figures"]["token_rate"]["value"] == 40
    planned = document["sustainable"]["figures"]
    assert planned["sustainable"]["value"] == pytest.approx(28)
    assert planned["concurrency"]["value"] == pytest.approx(168)
    quoted = json.loads(shown("--what-if", " ".join(WORKED[1:]), "--format", "json"))
    assert quoted["sections"] == document
    units = json.loads(
        shown("--what-if", "tokens_per_second=18000 tokens/s, tokens_out=450 tokens e2e=6 s", "--format", "json")
    )
    assert units["sections"] == document
    commas = json.loads(shown("--what-if", "tokens_per_second=18000,tokens_out=450,e2e=6000ms", "--format", "json"))
    assert commas["sections"] == document
    assert "21.33 answers/s" in shown("--what-if", "in_flight=64", "e2e=3s")


def test_a_run_to_the_end(run, model):
    text = shown(
        run, "--slo", "ttft_p95<100ms,error_rate<5%", "--target-rate", 100, "--spares", 1, "--model-config", model,
        "--accelerator", "h100", "--count", 2, "--price", "$2.50/h", "--price-source", "list of 2026-01",
        "--telemetry-cost", "$1/h", "--replica-warmup", "5m", "--growth", "5%/month", "--as-of", "2026-01-31",
    )  # fmt: skip
    assert "rate within the SLO of one replica, in a closed loop 40 answers/s" in text
    assert "rate planned with 28 answers/s = 40/s x 0.7 (--utilization)" in text
    assert "4 replicas = ceil(100/s / 28/s)" in text
    assert "131,072 bytes" in text
    assert "26 $/h = 2 x 2.5/h x 5 replicas + 1/h" in text
    assert "2 x 79.65 GiB (85.52 GB), H100" in text
    assert "price from: list of 2026-01" in text
    for format_ in ("md", "json"):
        assert shown(run, "--slo", "ttft_p95<100ms", "--format", format_)


def test_what_would_have_no_effect_and_what_is_given_twice_is_refused(run, model):
    assert "--accelerator without --model-config or --kv-bytes" in refused(run, "--accelerator", "H100")
    assert "--memory-gib without --model-config or --kv-bytes" in refused(*WORKED, "--memory-gib", 24)
    assert "given twice; expected each run once" in refused(run, run)


def test_a_curve_that_was_asked_for_and_cannot_be_is_said(run):
    assert "--at-load cannot be answered" in shown(run, "--at-load", 16)
    assert "a curve needs" not in shown(run)


def test_the_peak_is_given_or_of_a_trace(tmp_path):
    trace = tmp_path / "t.jsonl"
    times = [10.0 * i for i in range(13)] + [21.0, 22.0, 23.0, 24.0]
    rows = [{"timestamp": 1000 * t, "input_length": 10, "output_length": 5, "hash_ids": [1]} for t in sorted(times)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = json.loads(
        shown(*WORKED, "--target-rate", 100, "--trace", trace, "--peak-window", 10, "--format", "json")
    )
    target = document["sections"]["fleet"]["figures"]["target"]
    assert target["value"] == pytest.approx(100 * 5 / (16 / 12))
    assert "fullest of 12 windows of 10 s" in target["how"]
    assert "do not span ten windows of 60 s" in refused(*WORKED, "--target-rate", 1, "--trace", trace)
    assert "expected one of them" in refused(*WORKED, "--target-rate", 1, "--trace", trace, "--peak-to-mean", 2)
    assert "fleet" in shown(*WORKED, "--target-rate", 1, "--peak-to-mean", 2, "--format", "json")


def test_what_a_config_does_not_say_may_be_given(model):
    base = [*WORKED, "resident_tokens=1200", "--memory-gib", "24", "--format", "json"]
    kv = json.loads(shown(*base, "--kv-bytes", 1000, "--weights-gib", 1))["sections"]["kv_memory"]["figures"]
    assert kv["sequence_bytes"]["value"] == 1200 * 1000
    assert kv["weights"]["value"] == 2**30
    kv = json.loads(shown(*base, "--model-config", model, "--kv-dtype", "fp8", "--weights-precision", "int4"))
    figures = kv["sections"]["kv_memory"]["figures"]
    assert figures["kv_bytes_per_token"]["value"] == 65_536
    assert figures["weights"]["value"] == 8_030_261_248 / 2
    kv = json.loads(shown(*base, "--model-config", model, "--count", 16, "--parameters", "7e9"))
    figures = kv["sections"]["kv_memory"]["figures"]
    assert figures["sequence_bytes"]["value"] == 2 * 1200 * 131_072  # 8 KV heads on 16 accelerators
    assert figures["weights"]["value"] == 14e9
    one = json.loads(shown(*base, "--model-config", model, "--count", 16, "--kv-copies", 1))
    assert one["sections"]["kv_memory"]["figures"]["sequence_bytes"]["value"] == 1200 * 131_072


@pytest.mark.parametrize(("arguments", "said"), [
    (["--what-if", "tokens_per_second"], "expected name=value"),
    (["--what-if", "tokens_in=3"], "with a name of tokens_per_second"),
    (["--what-if", "tokens_per_second=18,000 tokens_out=450"], "expected a number above 0"),
    (["--what-if", "tokens_out=0"], "expected a number above 0"),
    (["--what-if", "e2e=6"], "expected a time such as"),
    (["--what-if", "tokens_out=3", "tokens_out=4"], "given twice"),
    (["--what-if", "tokens_out=450"], "none of these pairs"),
    (["--what-if", "utilization=1.5"], "--utilization 1.5"),
    (["tokens_out=450"], "go after --what-if"),
    (["nowhere"], "no such run folder"),
    ([*WORKED, "--spares", "1"], "--spares without --target-rate"),
    ([*WORKED, "--growth", "5%/month"], "--growth without --target-rate"),
    ([*WORKED, "--target-rate", "1", "--growth", "5%"], "5%/month"),
    ([*WORKED, "--target-rate", "1", "--growth", "5%/fortnight"], "periods: day, week"),
    ([*WORKED, "--target-rate", "1", "--replica-warmup", "5"], "expected a time"),
    ([*WORKED, "--target-rate", "1", "--as-of", "tomorrow"], "expected a day"),
    ([*WORKED, "--target-rate", "0"], "--target-rate 0"),
    ([*WORKED, "--price", "2.50"], "an amount an hour"),
    ([*WORKED, "--price=-1/h"], "an amount an hour"),  # a sign is no currency
    ([*WORKED, "--price", "<b>1/h"], "an amount an hour"),
    (["--what-if", "utilization=70%"], "such as 0.7"),
    ([*WORKED, "--telemetry-cost", "1/h"], "without --price"),
    ([*WORKED, "--price", "$1/h", "--telemetry-cost", "€1/h"], "expected one"),
    ([*WORKED, "--format", "csv"], "expected one of terminal, md, json"),
    ([*WORKED, "--kv-bytes", "1000"], "without memory"),
    ([*WORKED, "--kv-bytes", "1000", "--memory-gib", "24"], "--parameters or --weights-gib"),
    ([*WORKED, "--kv-bytes", "1000", "--accelerator", "H1000"], "nearest: H100"),
    ([*WORKED, "--model-config", "none.json", "--accelerator", "H100"], "cannot be read"),
    ([*WORKED, "--slo", "ttft<1"], "a series needs a reducer"),
])  # fmt: skip
def test_what_is_wrong_is_refused_in_words(arguments, said):
    assert said in refused(*arguments)


def test_precisions_and_configs_that_are_none_are_refused(model, tmp_path):
    base = [*WORKED, "--model-config", model, "--accelerator", "H100"]
    assert "expected one of fp32, bf16" in refused(*base, "--kv-dtype", "int3")
    assert "expected one of fp32, bf16" in refused(*base, "--weights-precision", "q4")
    odd = tmp_path / "odd.json"
    odd.write_text(json.dumps({**json.loads(Path(model).read_text()), "quantization_config": {"quant_method": "fp4x"}}))
    odd_base = [*WORKED, "--model-config", odd, "--accelerator", "H100"]
    assert "quantised in a way that is not known here (fp4x): give --weights-precision" in refused(*odd_base)
    assert shown(*odd_base, "--weights-precision", "int4")
    broken = tmp_path / "config.json"
    for text, said in (("{", "not JSON"), ("[1]", "expected an object"), ("{}", "no num_hidden_layers")):
        broken.write_text(text)
        assert said in refused(*WORKED, "--model-config", broken, "--accelerator", "H100")
    broken.write_bytes(b"\xff")
    with pytest.raises(BenchError, match="not JSON"):
        read_config(broken)


def test_times_prices_and_growth_are_read():
    assert [duration(t, "--x") for t in ("250ms", "90s", "5m", "1.5h")] == [0.25, 90, 300, 5400]
    assert [hourly_price(t, "--x") for t in ("2.50/h", "$2.50/h", "EUR 3/hour", ".5 / h", "US$2/h", "€2/h")] == [
        ("", 2.5), ("$", 2.5), ("EUR", 3), ("", 0.5), ("US$", 2), ("€", 2),
    ]  # fmt: skip
    found = growth_of("5%/month")
    assert (found.share, found.period) == (0.05, "month")


@given(st.text(max_size=20) | st.from_regex(r"[0-9.%$]{1,6}/?[a-z]{0,6}", fullmatch=True))
def test_no_text_is_a_traceback(text):
    for read in (lambda: duration(text, "--x"), lambda: hourly_price(text, "--x"), lambda: growth_of(text),
                 lambda: cli_capacity._assumed([text])):  # fmt: skip
        try:
            read()
        except BenchError:
            continue


def test_a_fleet_is_refused_without_limits(run):
    assert "--target-rate without --slo" in refused(run, "--target-rate", 100)


def test_every_help_text_has_an_example():
    others = ("help", "slo", "deadlines", "format", "install_completion", "show_completion")  # of all commands
    for parameter in typer.main.get_command(app).params:
        if parameter.name not in others:
            assert re.search(r"e\.g\.|\d", parameter.help), parameter.name
    assert "Example: llm-bench capacity" in (capacity.__doc__ or "")


def test_every_number_has_its_limits():
    hints = typing.get_type_hints(capacity)
    numbers = {name for name, kind in hints.items() if kind in (int, float, int | None, float | None)}
    assert len(numbers) > 10
    assert numbers <= set(LIMITS)
    for name in numbers:
        option = "--" + name.replace("_", "-")
        assert option in refused(*WORKED, option, LIMITS[name][0] - 1)


def declaring(folder: Path, facts: list[dict[str, Any]]) -> Path:
    """A sweep whose cells are of targets that declare `facts`, in turn."""
    import pyarrow as pa

    sweep(folder)
    for k, path in enumerate(sorted(folder.glob("*.arrow"))):
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
            header = json.loads((reader.schema.metadata or {})[b"llm_bench"])
            batches = list(reader)
            header["target"] |= facts[k % len(facts)]
            schema = reader.schema.with_metadata({"llm_bench": json.dumps(header)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as writer:
            for batch in batches:
                writer.write_batch(batch.replace_schema_metadata(schema.metadata))
        path.write_bytes(sink.getvalue().to_pybytes())
    return folder


def test_what_a_target_declares_stands_for_flags_that_are_not_given(tmp_path, model):
    run = declaring(tmp_path / "run", [{"accelerator": "H100", "count": 2, "price": "$2.50/h"}])
    asked = ("--slo", "ttft_p95<100ms", "--target-rate", 100)
    given = ("--accelerator", "H100", "--count", 2, "--price", "$2.50/h")
    given += ("--price-source", "the target's own declaration")
    assert shown(run, *asked, "--model-config", model) == shown(run, *asked, "--model-config", model, *given)
    assert "price from: the target's own declaration" in shown(run, *asked)
    first = shown(run, *asked, "--price", "$9/h")  # a flag comes first
    assert "price: as given, without a source" in first
    assert first == shown(run, *asked, "--price", "$9/h", "--count", 2)


def test_what_targets_declare_differently_or_not_at_all_is_left_to_the_flags(tmp_path):
    asked = ("--slo", "ttft_p95<100ms", "--target-rate", 100)
    for name, facts in {"apart": [{"price": "$1/h"}, {"price": "$2/h"}], "one": [{"price": "$1/h"}, {}]}.items():
        run = declaring(tmp_path / name, facts)
        assert "$" not in shown(run, *asked)
    run = declaring(tmp_path / "unknown", [{"accelerator": "RTX 9", "count": 0}])
    assert shown(run, *asked) == shown(declaring(tmp_path / "unknown2", [{}]), *asked).replace("unknown2", "unknown")


def test_of_other_hardware_than_is_asked_for_nothing_declared_is_taken(tmp_path, model):
    declared = [{"accelerator": "H100", "count": 8, "price": "$2.50/h"}]
    run, bare = declaring(tmp_path / "run", declared), declaring(tmp_path / "bare", [{}])
    asked = ("--slo", "ttft_p95<100ms", "--target-rate", 100, "--model-config", model)
    for other in (("--accelerator", "L4"), ("--memory-gib", 24)):
        assert shown(run, *asked, *other) == shown(bare, *asked, *other).replace("bare", "run")
    same = shown(run, *asked, "--accelerator", "h100", "--memory-gib", 79.6)  # its own, as its driver reports it
    assert "8 x 79.6 GiB" in same
    assert "8 x 2.5/h" in same
    apart = declaring(
        tmp_path / "apart", [{"accelerator": "H100", "price": "$2/h"}, {"accelerator": "L4", "price": "$2/h"}]
    )
    assert "$" not in shown(apart, *asked, "--accelerator", "L4")
    unnamed = declaring(tmp_path / "unnamed", [{"count": 8, "price": "$2.50/h"}])  # the kind is what was left out
    assert "8 x 2.5/h" in shown(unnamed, *asked, "--accelerator", "L4")
