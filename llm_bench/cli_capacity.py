"""`llm-bench capacity`: its options as typed, made into what a plan is asked."""

import datetime
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llm_bench import terminal
from llm_bench.errors import BenchError
from llm_bench.options import Deadlines, SloText, check_numbers

if TYPE_CHECKING:
    from llm_bench.capacity_ask import Ask, Demand, Hardware, WhatIf
    from llm_bench.results import Run

_NUMBER = r"(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|\.\d+)"
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
# Every number of this command -> (least, most).
LIMITS: dict[str, tuple[float, float]] = {
    "target_rate": (1e-9, 1e9),
    "spares": (0, 1_000_000),
    "count": (1, 4096),
    "memory_gib": (1e-3, 1e6),
    "memory_fraction": (1e-3, 1),
    "weights_gib": (0, 1e6),
    "workspace_gib": (0, 1e6),
    "kv_bytes": (1e-3, 1e12),
    "kv_copies": (1e-3, 4096),
    "parameters": (1, 1e15),
    "block_size": (1, 10_000_000),
    "utilization": (1e-3, 1),
    "peak_to_mean": (1, 1e6),
    "peak_window": (1e-3, 1e7),
}
_WHAT_IF = {
    "tokens_per_second": ("tokens_per_second", "tokens/s"),
    "tokens_out": ("tokens_out", "tokens"),
    "e2e": ("stay_s", "s"),
    "in_flight": ("in_flight", ""),
    "resident_tokens": ("resident_tokens", "tokens"),
}


def capacity(
    context: typer.Context,
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Run folders of one server, or of its settings, e.g. runs/x; default: the newest in runs/."
        ),
    ] = None,
    slo: SloText = "",
    deadlines: Deadlines = "",
    what_if: Annotated[
        str | None,
        typer.Option(
            help="Arithmetic alone, no run: 'tokens_per_second=18000 tokens_out=450 utilization=0.7 e2e=6s', with or "
            "without the quotes; also in_flight=64, resident_tokens=1200."
        ),
    ] = None,
    target_rate: Annotated[
        float | None,
        typer.Option(help="Mean requests/s that the fleet must carry, e.g. 28; needs an SLO, or --what-if."),
    ] = None,
    peak_to_mean: Annotated[
        float | None, typer.Option(help="Peak over mean rate, e.g. 2.5; default: that of --trace, else 1.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Trace whose peak over its mean rate is planned for, e.g. prod.jsonl.")
    ] = None,
    peak_window: Annotated[
        float, typer.Option(help="Seconds of the windows in which --trace is counted, e.g. 60.")
    ] = 60.0,
    spares: Annotated[int, typer.Option(help="Replicas beside those that carry the rate, e.g. 1.")] = 0,
    replica_warmup: Annotated[str, typer.Option(help="Time until a new replica is ready, e.g. 90s or 5m.")] = "",
    growth: Annotated[str, typer.Option(help="Growth of the rate, e.g. 5%/month or 40%/year.")] = "",
    as_of: Annotated[
        str, typer.Option(help="Day from which growth counts, e.g. 2026-01-31; default: in days alone.")
    ] = "",
    model_config: Annotated[
        Path | None, typer.Option(help="The model's file, e.g. config.json: its KV cache and weights.")
    ] = None,
    accelerator: Annotated[
        str,
        typer.Option(help="A100, H100, H200, B200, L40S, L4, MI300X or MI325X; default: as the run's targets declare."),
    ] = "",
    count: Annotated[
        int,
        typer.Option(
            help="Accelerators of one replica (tensor parallel), e.g. 4; default: as the run's targets declare, else 1."
        ),
    ] = 1,
    memory_gib: Annotated[
        float | None, typer.Option(help="GiB of one accelerator, instead of the table's, e.g. 79.6.")
    ] = None,
    memory_fraction: Annotated[
        float, typer.Option(help="Share of the memory that the server may use, e.g. 0.9.")
    ] = 0.9,
    workspace_gib: Annotated[
        float, typer.Option(help="GiB on each accelerator for activations, graphs, buffers, e.g. 4.")
    ] = 4.0,
    parameters: Annotated[
        float | None, typer.Option(help="Weights, e.g. 8.03e9; default: counted from the config.")
    ] = None,
    weights_precision: Annotated[
        str, typer.Option(help="bf16, fp16, fp32, fp8, int8 or int4; default: what the config says, else bf16.")
    ] = "",
    weights_gib: Annotated[
        float | None, typer.Option(help="GiB of weights as loaded, all accelerators together, e.g. 15.")
    ] = None,
    kv_dtype: Annotated[str, typer.Option(help="Precision of the cache: bf16, fp16, fp32, fp8 or int8.")] = "bf16",
    kv_bytes: Annotated[
        float | None, typer.Option(help="Bytes of a cached token, instead of the config's, e.g. 131072.")
    ] = None,
    kv_copies: Annotated[
        float | None,
        typer.Option(help="Copies of the cache on a replica's accelerators, e.g. 2; 1: split evenly."),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens of a cache block, e.g. 16.")] = 16,
    utilization: Annotated[
        float, typer.Option(help="Share of a ceiling, and of a closed loop's rate, to plan with, e.g. 0.7.")
    ] = 0.7,
    price: Annotated[
        str,
        typer.Option(help="Price of one accelerator, e.g. 2.50/h or $2.50/h; default: as the run's targets declare."),
    ] = "",
    price_source: Annotated[
        str, typer.Option(help="Source and date of the price, e.g. 'list of 2026-01'; printed beside it.")
    ] = "",
    telemetry_cost: Annotated[str, typer.Option(help="Telemetry and gateway of the fleet, e.g. 1.20/h.")] = "",
    telemetry_source: Annotated[str, typer.Option(help="Its source and date, e.g. 'invoice of 2026-01'.")] = "",
    at_load: Annotated[
        str, typer.Option(help="Loads at which to read the curves, e.g. 32,48: up to twice the largest measured.")
    ] = "",
    window_delay: Annotated[
        str, typer.Option(help="Batch window of each run, in order, e.g. 0ms,2ms: what it buys and costs.")
    ] = "",
    format: Annotated[str, typer.Option(help="terminal, md or json.")] = "terminal",  # noqa: A002
) -> None:
    """What one replica carries, how many are needed, what they cost.

    Limits are those of --slo, else the ones that the run was made with; without any, only ceilings are given. A
    rate proven in a closed loop is multiplied by --utilization, since users come at random; one proven in an open loop
    or a replay is planned with as it is.

    Example: llm-bench capacity runs/x --slo 'ttft_p95<800ms,error_rate<1%' --target-rate 28 --spares 1 --price 2.50/h
    """
    from llm_bench import capacity_plan, capacity_report, objectives, results

    check_numbers(context.params, LIMITS)
    capacity_report.check_format(format)
    agreed = objectives.parse(slo, deadlines)
    if not what_if and any("=" in text and not Path(text).exists() for text in runs or []):
        raise BenchError(f"{' '.join(runs or [])}: figures without a run go after --what-if")
    if what_if is not None and not what_if.strip():
        raise BenchError("--what-if '': expected figures such as tokens_per_second=18000 tokens_out=450")
    twice = [run for run in runs or [] if (runs or []).count(run) > 1]
    if twice and not what_if:
        raise BenchError(f"{twice[0]}: given twice; expected each run once")
    pairs = [what_if, *(runs or [])] if what_if else []
    assumed, share = _assumed(pairs)
    planned_with = utilization if share is None else share
    if what_if:
        sections = capacity_plan.what_if(assumed, _ask(context.params, agreed, planned_with))
    else:
        found = [results.load_run(Path(path)) for path in runs or [str(results.newest(Path("runs")))]]
        params = {**context.params, **_declared(context, found)}
        check_numbers(params, LIMITS)
        sections = capacity_plan.plan(found, _ask(params, agreed, planned_with))
    terminal.show(capacity_report.render(sections, format))


# ---- what is typed


def _declared(context: typer.Context, runs: Sequence["Run"]) -> dict[str, Any]:
    """What the targets of the runs declare of their hardware, for the flags that are not given.

    A target that declares nothing, or another one, leaves that flag as it is: one answer is of one kind of replica. So
    does one of another accelerator than the one that is asked for: its number and its price are not of that one.
    """
    from llm_bench.accelerators import ACCELERATORS

    targets = [m.cell.header.get("target") or {} for run in runs for m in run.cells]
    found: dict[str, Any] = {}
    typed = context.params["accelerator"].strip().upper()
    kinds = {said.strip().upper() for target in targets if type(said := target.get("accelerator")) is str and said}
    if (typed or context.params["memory_gib"] is not None) and kinds - {typed}:
        return found
    for name, kind in (("accelerator", str), ("count", int), ("price", str)):
        values = {value if type(value := target.get(name)) is kind else None for target in targets}
        source = context.get_parameter_source(name)
        if source is not None and source.name == "DEFAULT" and len(values) == 1 and (value := values.pop()):
            found[name] = value
    says_nothing = not context.params["model_config"] and context.params["kv_bytes"] is None
    if says_nothing or found.get("accelerator", "").strip().upper() not in ACCELERATORS:
        found.pop("accelerator", None)  # without what a cached token takes, or its memory
    if "price" in found and not context.params["price_source"]:
        found["price_source"] = "the target's own declaration"
    return found


def _ask(params: Mapping[str, Any], agreed: Any, utilization: float) -> "Ask":
    from llm_bench.capacity import Prices
    from llm_bench.capacity_ask import Ask
    from llm_bench.target import hourly_price

    prices, money = None, ""
    if params["telemetry_cost"] and not params["price"]:
        raise BenchError("--telemetry-cost without --price: a fleet's cost needs both")
    if params["price"]:
        money, hourly = hourly_price(params["price"], "--price")
        other_money, other = hourly_price(params["telemetry_cost"] or "0/h", "--telemetry-cost")
        if other_money not in ("", money):
            raise BenchError(f"--telemetry-cost in {other_money}, --price in {money or 'no currency'}: expected one")
        named = {"price": params["price_source"], "telemetry and gateway": params["telemetry_source"]}
        sources = {f"{name} from": source for name, source in named.items() if source}
        if "price from" not in sources:
            sources = {"price": "as given, without a source (--price-source)", **sources}
        prices = Prices(params["count"], hourly, other, sources)
    delays = tuple(1e3 * duration(part, "--window-delay") for part in params["window_delay"].split(",") if part.strip())
    at_loads = tuple(_plain(part, "", "--at-load") for part in params["at_load"].split(",") if part.strip())
    return Ask(agreed, _hardware(params), _demand(params), prices, money, utilization, at_loads, delays)


def _demand(params: Mapping[str, Any]) -> "Demand":
    from llm_bench.capacity_ask import Demand

    needs = ("growth", "replica_warmup", "peak_to_mean", "trace", "spares")
    idle = [name for name in needs if params[name]]
    if params["target_rate"] is None:
        if idle:
            raise BenchError(f"--{idle[0].replace('_', '-')} without --target-rate: expected the rate of the fleet too")
        return Demand()
    if params["trace"] is not None and params["peak_to_mean"] is not None:
        raise BenchError("--peak-to-mean and --trace: expected one of them")
    demand = Demand(params["target_rate"], spares=params["spares"])
    if params["peak_to_mean"] is not None:
        demand = demand._replace(peak=params["peak_to_mean"], peak_text="peak over mean, as given")
    if params["trace"] is not None:
        demand = demand._replace(**_peak(params["trace"], params["peak_window"]))
    if params["replica_warmup"]:
        demand = demand._replace(warmup_s=duration(params["replica_warmup"], "--replica-warmup"))
    if params["growth"]:
        demand = demand._replace(growth=growth_of(params["growth"]))
    if params["as_of"]:
        try:
            demand = demand._replace(as_of=datetime.date.fromisoformat(params["as_of"]))
        except ValueError:
            raise BenchError(f"--as-of {params['as_of']!r}: expected a day such as 2026-01-31") from None
    return demand


def _peak(path: Path, window_s: float) -> dict[str, Any]:
    from llm_bench import capacity as arithmetic
    from llm_bench import trace

    times = [request.at_s for request in trace.read(path).requests if request.at_s is not None]
    found = arithmetic.peak_to_mean(times, window_s)
    if found is None:
        raise BenchError(
            f"--trace {path}: {len(times)} timed requests do not span ten windows of {window_s:g} s, so that no peak "
            "can be told from a mean; give --peak-to-mean, or a shorter --peak-window"
        )
    ratio, windows = found
    return {"peak": ratio, "peak_text": f"fullest of {windows:,} windows of {window_s:g} s over their mean, {path}"}


def _hardware(params: Mapping[str, Any]) -> "Hardware | None":
    """Of --model-config or --kv-bytes with the memory. None where neither is given."""
    from llm_bench import accelerators, kv_cache
    from llm_bench.capacity_ask import Hardware

    if params["model_config"] is None and params["kv_bytes"] is None:
        if idle := [name for name in ("accelerator", "memory_gib", "parameters", "weights_gib") if params[name]]:
            raise BenchError(
                f"--{idle[0].replace('_', '-')} without --model-config or --kv-bytes: expected one of them too, by "
                "which it is known what a cached token takes"
            )
        return None
    device = accelerators.find(params["accelerator"]) if params["accelerator"] else None
    if device is None and params["memory_gib"] is None:
        raise BenchError("--model-config without memory: give --accelerator, or --memory-gib of one")
    kv_bytes = _of_table(params["kv_dtype"], kv_cache.KV_BYTES, "--kv-dtype")
    config, where = read_config(params["model_config"]) if params["model_config"] else ({}, "--kv-bytes")
    stored = kv_cache.stored_in(config)
    known = params["weights_precision"] or params["weights_gib"] is not None or stored
    if not known and (named := kv_cache.quantised_as(config)):
        raise BenchError(
            f"--model-config {where}: quantised in a way that is not known here ({named}): give --weights-precision "
            "or --weights-gib"
        )
    precision = params["weights_precision"] or stored or "bf16"
    weight_bytes = _of_table(precision, kv_cache.WEIGHT_BYTES, "--weights-precision")
    shape = kv_cache.shape_of(config, where) if params["kv_bytes"] is None else None
    count, gib = params["count"], kv_cache.GIB
    each = params["memory_gib"] * gib if params["memory_gib"] is not None else device.memory_bytes if device else 0.0
    source = "--memory-gib" if params["memory_gib"] is not None or device is None else f"{device.name}, {device.source}"
    weights, text = _weights(params, config, where, precision, weight_bytes)
    memory = kv_cache.Memory(count * each, params["memory_fraction"], weights, count * params["workspace_gib"] * gib)
    copies = params["kv_copies"]
    if copies is None:
        copies = kv_cache.copies(shape, count) if shape else 1.0
    return Hardware(
        memory,
        f"{count} x {kv_cache.size(each)}, {source}",
        text,
        count,
        device,
        shape,
        params["kv_bytes"],
        kv_bytes,
        copies,
        params["block_size"],
        kv_cache.context_of(config),
    )


def _weights(
    params: Mapping[str, Any], config: Mapping[str, Any], where: str, precision: str, each: float
) -> tuple[float, str]:
    from llm_bench import kv_cache

    if params["weights_gib"] is not None:
        return params["weights_gib"] * kv_cache.GIB, "--weights-gib"
    if params["parameters"] is not None:
        return params["parameters"] * each, f"{params['parameters']:,.0f} parameters as given, {precision}"
    if not config:
        raise BenchError("--kv-bytes without --model-config: give --parameters or --weights-gib too")
    number = kv_cache.parameters_of(config, where)
    return number * each, f"{number:,} parameters counted from {where}, {precision}"


def read_config(path: Path) -> tuple[dict[str, Any], str]:
    """(config.json as an object, its name). Raises BenchError for a file that is none."""
    import json

    try:
        found = json.loads(path.read_bytes())
    except OSError as e:
        raise BenchError(f"--model-config {path}: cannot be read: {e.strerror or e}") from None
    except (ValueError, RecursionError) as e:
        raise BenchError(f"--model-config {path}: not JSON ({e})") from None
    if not isinstance(found, dict):
        raise BenchError(f"--model-config {path}: expected an object, the config.json of a transformers model")
    return found, str(path)


def _of_table(name: str, table: Mapping[str, float], option: str) -> float:
    if name not in table:
        raise BenchError(f"{option} {name!r}: expected one of {', '.join(table)}")
    return table[name]


def _assumed(pairs: Sequence[str]) -> tuple["WhatIf", float | None]:
    """(the figures, utilization where it is among them) of texts of `name=value`, parted by blanks or commas."""
    from llm_bench.capacity_ask import WhatIf

    found: dict[str, float] = {}
    share = None
    parts = (part.strip(" ,") for text in pairs for part in re.split(r"[\s,]+(?=\w+\s*=)", text))
    for pair in filter(None, parts):
        name, sign, text = (part.strip() for part in pair.partition("="))
        known = [*_WHAT_IF, "utilization"]
        if not sign or name not in known:
            example = "--what-if 'tokens_per_second=18000 tokens_out=450'"
            raise BenchError(
                f"--what-if {pair!r}: expected name=value as in {example}, with a name of {', '.join(known)}"
            )
        if name == "utilization":
            share = _plain(text, pair, like="0.7")
            check_numbers({"utilization": share}, LIMITS)
            continue
        field, unit = _WHAT_IF[name]
        if field in found:
            raise BenchError(f"--what-if {pair!r}: {name} is given twice")
        found[field] = duration(text, "--what-if e2e") if unit == "s" else _plain(text.removesuffix(unit), pair)
    return WhatIf(**found), share


def _plain(text: str, pair: str, option: str = "--what-if", like: str = "450") -> float:
    match = re.fullmatch(_NUMBER, text.strip())
    value = float(match["number"]) if match else 0.0
    if not 0 < value < 1e15:
        raise BenchError(f"{option} {pair or text!r}: expected a number above 0, such as {like}")
    return value


def duration(text: str, option: str) -> float:
    """`90s`, `5m`, `250ms`, `1.5h` in seconds. Raises BenchError."""
    match = re.fullmatch(_NUMBER + r"\s*(?P<unit>ms|s|m|h)", text.strip())
    if match is None or float(match["number"]) > 1e9:
        raise BenchError(f"{option} {text!r}: expected a time such as 250ms, 90s, 5m or 1h")
    return float(match["number"]) * _SECONDS[match["unit"]]


def growth_of(text: str) -> Any:
    """`5%/month` as Growth. Raises BenchError."""
    from llm_bench.capacity import DAYS, Growth

    match = re.fullmatch(_NUMBER + r"\s*%\s*/\s*(?P<period>[a-z]+)", text.strip())
    if match is None or match["period"] not in DAYS or float(match["number"]) > 10_000:
        raise BenchError(f"--growth {text!r}: expected a share a period such as 5%/month; periods: {', '.join(DAYS)}")
    return Growth(float(match["number"]) / 100, match["period"])
