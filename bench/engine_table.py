"""results.json of bench.engine as the page reports/engine/README.md, and the ceiling that a probe sets."""

import statistics
from typing import Any

_HEAD = """# The reference engine beside others on a CPU

Written by `python -m bench.engine`; do not edit.

A Llama of 109M random float32 weights (hidden 768, 12 layers, 12 heads, 4 KV heads, vocabulary 8192), {tokens} tokens
in, {tokens} out, greedy, over HTTP with `llm-bench run` as the client. tok/s: output tokens from the first request sent
to the last token. CPU-s: of the whole server. Ceiling: what one thread could give at that minute's probe, weights read
once a step and two operations a weight and token, the prompt's tokens too; attention, sampling and HTTP are not in it.
× is ours, native, over that engine.
"""
OURS = "native"


def ceiling(concurrency: int, parameters: int, tokens: int, bytes_per_s: float, flop_per_s: float) -> float:
    """Output tokens/s of one thread with float32 weights: `tokens` in, `tokens` out, all requests in step."""
    prompt_s = max(4 * parameters / bytes_per_s, 2 * parameters * tokens * concurrency / flop_per_s)
    step_s = max(4 * parameters / bytes_per_s, 2 * parameters * concurrency / flop_per_s)
    return concurrency * tokens / (prompt_s + (tokens - 1) * step_s)  # the prompt's pass gives the first token


def summary(cells: list[dict[str, Any]]) -> dict[str, float]:
    """Of one engine at one concurrency: medians of its repeats."""
    rates = [
        (c["tokens"] / c["wall_s"], c["tokens"] / c["cpu_s"], c["cpu_s"] / c["wall_s"],
         c["tokens"] / c["cpu_s"] / c["ceiling_tokens_per_s"], c["ttft_p50_ms"])
        for c in cells
    ]  # fmt: skip
    names = ("tok_s", "tok_cpu_s", "cores", "of_ceiling", "ttft_p50_ms")
    return dict(zip(names, map(statistics.median, zip(*rates, strict=True)), strict=True))


def render(facts: dict[str, Any]) -> str:
    machine, cells = facts["machine"], facts["cells"]
    said = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    gemv, gemm = ([c[k] for c in cells] for k in ("gemv_bytes_per_s", "gemm_flop_per_s"))
    lines = [
        _HEAD.format(tokens=facts["tokens"]),
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; Python {machine['python']}; {said}. "
        f"Load average before: {machine['load_before']:.2f}, after: {machine['load_after']:.2f}. Probes, one thread: "
        f"{min(gemv) / 1e9:.1f} to {max(gemv) / 1e9:.1f} GB/s, {min(gemm) / 1e9:.0f} to {max(gemm) / 1e9:.0f} GFLOP/s. "
        f"Asked: `python -m bench.engine {facts['command']}`.",
    ]
    if facts.get("isa"):
        but = "What is called *as built* has no such switch, and used all that this one has."
        lines += ["", f"As on a processor that has no more than {facts['isa'].upper()}, the probes too. {but}"]
    for concurrency in sorted({c["concurrency"] for c in cells}):
        here = [c for c in cells if c["concurrency"] == concurrency]
        requests = here[0]["requests"]
        lines += ["", f"## {concurrency} at a time, {requests} requests", ""]
        lines += ["| engine | tok/s | × | tok per CPU-s | × | cores used | of the ceiling, per CPU-s | TTFT p50 ms |"]
        lines += ["|" + "---|" * 8]
        rows = {n: summary([c for c in here if c["engine"] == n]) for n in dict.fromkeys(c["engine"] for c in here)}
        for name, row in rows.items():
            base = rows.get(OURS)
            wall, cpu = ("–" if base is None else f"{base[k] / row[k]:.2f}" for k in ("tok_s", "tok_cpu_s"))
            lines.append(
                f"| {facts['labels'][name]} | {row['tok_s']:.1f} | {wall} | {row['tok_cpu_s']:.1f} | {cpu} "
                f"| {row['cores']:.2f} | {row['of_ceiling']:.0%} | {row['ttft_p50_ms']:.0f} |"
            )
    starts = ", ".join(f"{facts['labels'][n]} {s:.1f} s" for n, s in facts["start_s"].items())
    lines += ["", f"From launch to the first answer: {starts}."]
    lines += [f"{facts['labels'][n]}: not installed." for n in facts["missing"]]
    return "\n".join(lines) + "\n"
