"""Options that several commands share, and the range of every number that may be given."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from llm_bench.errors import BenchError


def _there(file: Path) -> Path:
    if file != Path("targets.toml") and not file.exists():  # the default need not be there
        raise BenchError(f"--targets-file {file}: there is no such file")
    return file


TargetsFile = Annotated[Path, typer.Option(callback=_there, help="File of declared targets.")]
Api = Annotated[str, typer.Option(help="Protocol, by its name in docs/reference.md; default: openai-chat.")]
Model = Annotated[str, typer.Option(help="Model name to ask for; default: the first that the target lists.")]
KeyEnv = Annotated[str, typer.Option(help="Environment variable that holds the targets' API key.")]
Tokenizer = Annotated[str, typer.Option(help="tokenizer.json: prompts of an exact token count.")]
Ca = Annotated[str, typer.Option(help="PEM file of a private authority for https.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Accept any https certificate; the records say so.")]
Proxy = Annotated[str, typer.Option(help="http://HOST:PORT, env (as HTTP_PROXY and NO_PROXY say) or none.")]
MaxLen = Annotated[int, typer.Option(help="Context limit in tokens; default: what the target says.")]
Ready = Annotated[float, typer.Option(help="Seconds to wait for a target that is still starting.")]
Metrics = Annotated[str, typer.Option(help="Comma-separated names of docs/reference.md, e.g. ttft_p95.")]
SloText = Annotated[str, typer.Option("--slo", help="Limits, e.g. ttft_p95<800ms,error_rate<1%, or a preset's name.")]
Deadlines = Annotated[str, typer.Option(help="Deadlines of tokens, e.g. ttft=800ms,tpot=50ms; default: from --slo.")]
FailOnSlo = Annotated[
    bool, typer.Option("--fail-on-slo", help="Exit 1 when a limit is missed, 3 when one is undecided.")
]
TraceFormat = Annotated[
    str | None, typer.Option("--format-of-trace", help="Format of the trace; default: detected from its keys.")
]
Unit = Annotated[str | None, typer.Option(help="Unit of its times: s, ms, us, ns or date-time; default: the format's.")]
Turns = Annotated[str | None, typer.Option(help="A turn's length: cumulative (whole prompt) or new (what is added).")]
BlockSize = Annotated[int | None, typer.Option(help="Tokens in a hash block; default: the format's.")]
SkipBad = Annotated[int, typer.Option(help="Tolerate up to N bad rows; they are counted.")]
Map = Annotated[str, typer.Option("--map", help="Columns of a plain table: at=ts,in=prompt_tokens,out=gen_tokens.")]
Dejitter = Annotated[
    str, typer.Option(help="Spread times that stand on ticks: auto, even, off, or the tick's length in seconds.")
]
As = Annotated[
    str, typer.Option("--as", help="Also show what other tools would have printed: vllm,sglang,guidellm ...")
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the report to a file; parquet needs one: a row a request.")
]
Format = Annotated[str, typer.Option(help="terminal, md, json, csv, html or parquet.")]
# Of the load and of what is sent.
Burstiness = Annotated[float, typer.Option(help="Gamma shape of --rate's gaps: 1 Poisson, 0.25 CV 2.")]
Constant = Annotated[bool, typer.Option("--constant", help="Space --rate's arrivals evenly.")]
Concurrency = Annotated[str, typer.Option(help="Closed loop: this many slots, e.g. 1,8,32.")]
Rate = Annotated[str, typer.Option(help="Open loop: requests per second, e.g. 1,2,4.")]
Replay = Annotated[bool, typer.Option("--replay", help="The trace's own times (the default where it has them).")]
Speed = Annotated[float, typer.Option(help="Replay this many times as fast: 2 takes half as long.")]
MaxInFlight = Annotated[
    int | None, typer.Option(help="Open loop: at most N requests in flight; the rest queue, which shows as lag.")
]
Requests = Annotated[int | None, typer.Option(help="Send the first N rows, warm-up included; default: all.")]
Limit = Annotated[int | None, typer.Option(help="First rows of the trace, at most N, in whole conversations.")]
Duration = Annotated[float | None, typer.Option(help="Seconds: of the window (closed) or of sending (open).")]
Warmup = Annotated[float | None, typer.Option(help="Requests (closed; 2 x slots) or seconds (open; 5% of the span).")]
Drain = Annotated[
    float | None, typer.Option(help="Seconds to wait for the last answers; default: until their own time-outs.")
]
LoopTrace = Annotated[bool, typer.Option("--loop-trace", help="Repeat the trace, each lap with new prompts.")]
Retries = Annotated[
    int, typer.Option(help="Retries of 429, 5xx and refused connections; latency runs from the first attempt.")
]
TooLong = Annotated[str, typer.Option(help="Requests over the context limit: refuse, skip, clip or scale.")]
ScaleLengths = Annotated[
    str, typer.Option(help="Multiply all lengths of the trace, e.g. 0.5 or 1/32; sharing is kept.")
]
SameSalt = Annotated[
    bool, typer.Option("--same-salt", help="The same prompts in both arms of a pair; for separate servers only.")
]
NoStream = Annotated[bool, typer.Option("--no-stream", help="Ask for whole answers: no TTFT, no TPOT.")]
ConnectTimeout = Annotated[float, typer.Option(help="Seconds; 0: none.")]
TtftTimeout = Annotated[float, typer.Option(help="Seconds from sending to the first token; 0: none.")]
StallTimeout = Annotated[float, typer.Option(help="Seconds without a byte after the first token; 0: none.")]
TotalTimeout = Annotated[float, typer.Option(help="Seconds for a whole request, retries included; 0: none.")]
Workers = Annotated[
    str, typer.Option(help="Processes that share each cell: a number, or auto; a cap needs one process.")
]
ScrapeEvery = Annotated[float, typer.Option(help="Seconds between scrapes.")]
Gpu = Annotated[bool, typer.Option("--gpu", help="Read this machine's GPUs too (NVML; needs the extra gpu).")]
Fault = Annotated[
    list[str], typer.Option("--fault", help="WHEN:WHAT in each cell, such as 30s:engine:crash; may be given again.")
]
MetricsUrl = Annotated[
    str, typer.Option(help="Scrape the servers' metrics beside the run: URL|URL, or auto (/metrics of each).")
]


_SECONDS = (0, 1_000_000)  # eleven days; some libraries keep time-outs as milliseconds in 31 bits
# Every option that takes a number -> (least, most). What is outside has no meaning or would not fit where it goes.
LIMITS: dict[str, tuple[float, float]] = {
    "concurrency": (1, 100_000),
    "rate": (1e-6, 1e6),  # requests/s
    "burstiness": (1e-3, 1e6),
    "speed": (1e-6, 1e6),
    "max_in_flight": (1, 1_000_000),
    "requests": (1, 10_000_000),
    "limit": (1, 10_000_000),
    "from_s": (0, 1e9),
    "to_s": (1e-9, 1e9),
    "duration": (1e-3, 1_000_000),
    "warmup": (0, 1_000_000),
    "drain": _SECONDS,
    "seed": (0, 2**63 - 1),
    "retries": (0, 100),
    "block_size": (1, 10_000_000),
    "skip_bad": (0, 10_000_000),
    "max_model_len": (0, 100_000_000),
    "ready_timeout": _SECONDS,
    "connect_timeout": _SECONDS,
    "ttft_timeout": _SECONDS,
    "stall_timeout": _SECONDS,
    "total_timeout": _SECONDS,
    "keep_bytes": (0, 1_000_000_000),
    "repeat": (1, 1000),
    "workers": (1, 1024),
    "spin": (0, 1000),
    "scrape_every": (0.05, 3600),
    "fail_on_error_rate": (0, 1),
}


# Of options whose own name is a word of Python, or of a function here.
_NAMES = {"from_s": "from", "to_s": "to", "least": "min", "most": "max"}


def check_number(name: str, value: float, limits: Mapping[str, tuple[float, float]] = LIMITS) -> None:
    least, most = limits[name]
    if not least <= value <= most:  # nan too is outside
        option = _NAMES.get(name, name).replace("_", "-")
        raise BenchError(f"--{option} {value}: expected a number from {least:,} to {most:,}")


def check_numbers(given: Mapping[str, Any], limits: Mapping[str, tuple[float, float]] = {}) -> None:
    """Of a command's parameters; `limits`: of those that only this command has. Raises BenchError."""
    for name, value in given.items():
        if type(value) in (int, float):
            check_number(name, value, {**LIMITS, **limits})


def numbers(text: str, name: str, kind: Callable[[str], Any]) -> list[Any]:
    option = f"--{name}"
    try:
        values = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise BenchError(f"{option} {text!r}: expected numbers such as 1,8,32") from None
    if not values:
        raise BenchError(f"{option} {text!r}: expected a number")
    for value in values:
        check_number(name, value)
    if len(set(values)) < len(values):
        raise BenchError(f"{option} {text!r}: a load is named twice")
    return values


# Flags that are fields of a target -> the field's name.
_FIELDS = {name: name for name in ("api", "model", "key_env", "tokenizer", "max_model_len", "insecure", "proxy")} | {
    "ca": "cafile"
}


def given(params: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a target that were given as flags."""
    return {field: params[flag] for flag, field in _FIELDS.items() if params[flag]}


# Fields of run.Job and of cell.Options that are a flag's value as it stands -> the parameter.
JOB = {"format": "trace_format"} | {
    name: name for name in "trace block_size unit turns skip_bad from_s to_s limit dejitter resume".split()
}
CELLS = {
    "duration_s": "duration",
    "drain_s": "drain",
    "spin_us": "spin",
    "ready_s": "ready_timeout",
    "scrape_every_s": "scrape_every",
} | {
    name: name
    for name in "requests warmup loop_trace seed retries too_long scale_lengths history token_ids keep_model "
    "reuse_prompts keep_bytes connect_per_request metrics_url gpu slo deadlines".split()
}


def fields(params: Mapping[str, Any], flags: Mapping[str, str], but: Sequence[str] = ()) -> dict[str, Any]:
    """Of a command's parameters those that are fields as they stand: each command has some of `flags`."""
    return {field: params[flag] for field, flag in flags.items() if flag in params and flag not in but}


def crew(workers: str) -> int:
    """Worker processes of --workers; 0: auto. Raises BenchError."""
    return 0 if workers == "auto" else int(numbers(workers, "workers", int)[0])


def columns(text: str) -> Mapping[str, str] | None:
    """`at=ts,in=prompt_tokens` -> {"at": "ts", ...}. Raises BenchError; which names there are is the reader's word."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    for name, sign, column in pairs:
        if not (name.strip() and sign and column.strip()):
            raise BenchError(
                f"--map {text!r}: expected name=column pairs such as at=ts,in=prompt_tokens,out=gen_tokens"
            )
    found = {name.strip(): column.strip() for name, _, column in pairs}
    if len(found) < len(pairs):
        raise BenchError(f"--map {text!r}: a name is given twice")
    return found or None


def check_word(option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise BenchError(f"--{option} {value!r}: expected {', '.join(known[:-1])} or {known[-1]}")
