"""The whole bench against a scripted server: `bench(server, folder, ...)` runs the command line as a user would."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.scripted import Script, Seen, chat_script, http_response

Measured = Callable[[int, Seen], Script]


def llm_server(measured: Measured | Script, *, max_model_len: int | None = None) -> Callable[[int, Seen], Script]:
    """A server that answers /models and probes as a good one does, and measured requests (0, 1, ...) as told.

    A measured request is one with the X-Request-Id that the bench gives to each.
    """
    count = iter(range(1 << 62))

    def answer(_: int, seen: Seen) -> Script:
        if seen.method == "GET":
            row: dict[str, Any] = {"id": "m", "object": "model"}
            if max_model_len:
                row["max_model_len"] = max_model_len
            return [(0, http_response(200, json.dumps({"object": "list", "data": [row]}).encode()))]
        if "x-request-id" in seen.headers:
            return measured(next(count), seen) if callable(measured) else measured
        return good(seen)

    return answer


def prompt_of(seen: Seen) -> str:
    body = seen.json()
    return str(body["prompt"] if "prompt" in body else body["messages"][-1]["content"])


def good(seen: Seen, ttft_ms: float = 0.0, itl_ms: float = 0.0) -> Script:
    """An answer of exactly as many tokens as asked; a prompt token a word. Its finish_reason is `length`."""
    tokens = seen.json().get("max_tokens", 4)
    prompt_tokens = len(prompt_of(seen).split())
    return [
        (item[0], item[1].replace(b'"finish_reason": "stop"', b'"finish_reason": "length"'))
        if isinstance(item, tuple)
        else item
        for item in _rechunked(chat_script([f"w{i} " for i in range(tokens)], ttft_ms, itl_ms, prompt_tokens))
    ]


def _rechunked(script: Script) -> Script:
    """The finish event grows by two bytes when its reason is replaced, so its chunk's size must be written anew."""
    from tests.scripted import FINISH, sse

    whole = sse(FINISH)
    grown = sse({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    return [(i[0], i[1].replace(whole, grown)) if isinstance(i, tuple) else i for i in script]


class Ran(NamedTuple):
    rc: int
    out: str
    err: str
    folder: Path

    @property
    def document(self) -> dict[str, Any]:
        run: dict[str, Any] = json.loads(self.out.splitlines()[-1])["runs"][0]
        return run

    def cell(self, number: int = 0) -> dict[str, Any]:
        cell: dict[str, Any] = self.document["cells"][number]
        return cell

    def value(self, metric: str, number: int = 0) -> Any:
        return self.cell(number)["metrics"][metric]["value"]

    def records(self, number: int = 0) -> Any:
        from llm_bench import records

        return records.read(self.folder / f"{self.cell(number)['name']}.arrow")


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "llm_bench.cli", *map(str, arguments)]


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **variables}


def bench(url: str, folder: Path, trace: Path, *arguments: str, timeout_s: float = 180.0, **variables: str) -> Ran:
    """`llm-bench run --targets t=URL ... --format json`, in `folder`; its records go to folder/run.

    By one worker where nothing else is asked for: how many cores this machine has decides no test.
    """
    out = folder / "run"
    workers = () if "--workers" in arguments else ("--workers", "1")
    done = subprocess.run(
        command(
            "run", "--targets", f"t={url}", "--trace", trace, "--out", out, "--format", "json", *workers, *arguments
        ),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=folder,
        env=environment(**variables),
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr, out)


def trace_file(folder: Path, rows: Sequence[dict[str, Any]], **header: Any) -> Path:
    """A trace of our own format."""
    path = folder / "trace.jsonl"
    lines = [json.dumps({"llm_bench_trace": 1, **header}), *map(json.dumps, rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def rows(n: int, tokens_in: int = 12, tokens_out: int = 4, gap_s: float | None = None) -> list[dict[str, Any]]:
    times = [{} if gap_s is None else {"timestamp": round(i * gap_s, 6)} for i in range(n)]
    return [{**t, "input_length": tokens_in, "output_length": tokens_out} for t in times]
