"""The reference engine beside llama.cpp and vLLM on this machine's CPU, through HTTP, `llm-bench run` as the client.

    python -m bench.engine [--engines torch,native] [--vllm VENV] [--concurrency 1,8,32] [--out reports/engine]

A 109M-parameter Llama of random float32 weights, 64 tokens in, 64 out, all requests of a cell offered at once with so
many in flight. While one engine is measured the others are stopped (SIGSTOP). Before each cell a probe says what this
machine gives at that minute on one thread: GB/s of reading weights, and GFLOP/s of a matrix product. On a machine
that is not idle only CPU-seconds and shares of the probe mean something.
"""

import argparse
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from bench import engine_model
from bench.engine_table import ceiling, render
from bench.process import machine
from llm_bench import __version__, records
from reference_engine import native

REPOSITORY = Path(__file__).resolve().parents[1]
TOKENS = 64  # in, and out
NEAR_TOKENS = 2  # of the prompt: engines split the same text in slightly different places
WAVES = {1: 4, 8: 2, 32: 2}  # requests of a cell, in multiples of its concurrency
START_LIMIT_S, CELL_LIMIT_S = 300, 600
SAMPLE_S = 0.05
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
TICKS = os.sysconf("SC_CLK_TCK")
MATRIX_BYTES = 4 * (16 << 10) * (1 << 10)  # of the probe: float32
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


class Place(NamedTuple):
    """What an engine is started with."""

    folder: Path  # the Hugging Face folder
    file: Path  # the GGUF file
    vllm: Path | None  # an environment with vllm-cpu
    port: int  # a free one, for those who want to be told


class Row(NamedTuple):
    """An engine. A command that is None cannot be had here."""

    label: str
    command: Callable[[Place], list[str] | None]
    env: Mapping[str, str] = MappingProxyType({})
    heeds_isa: bool = True  # what --isa sets reaches it
    says: bool = True  # prints {"listening": URL} and ends with its stdin; else it is asked at Place.port


def _ours(*flags: str, threads: int = 1) -> Callable[[Place], list[str]]:
    return lambda place: [
        sys.executable, "-m", "reference_engine", "--model", str(place.folder), "--port", "0", "--exit-with-stdin",
        "--device", "cpu", "--threads", str(threads), *flags,
    ]  # fmt: skip


def _llamacpp(threads: int) -> Callable[[Place], list[str]]:
    return lambda place: [sys.executable, "-m", "bench.serve_llamacpp", str(place.file), "32", str(threads)]


def _vllm(place: Place) -> list[str] | None:
    if place.vllm is None:
        return None
    return [
        f"{place.vllm}/bin/vllm", "serve", str(place.folder), "--served-model-name", "m", "--host", "127.0.0.1",
        "--port", str(place.port), "--dtype", "float32", "--max-model-len", "1024", "--enforce-eager",
        "--max-num-batched-tokens", "512", "--max-num-seqs", "64",
    ]  # fmt: skip


ENGINES: dict[str, Row] = {
    "torch": Row("ours, torch", _ours("--cpu-kernels", "torch")),
    "native": Row("ours, native", _ours("--cpu-kernels", "native")),
    "int8": Row("ours, native int8", _ours("--cpu-kernels", "native", "--quantization", "int8")),
    "int8-weights": Row(
        "ours, native int8 weights", _ours("--cpu-kernels", "native", "--quantization", "int8-weights")
    ),
    "native-2": Row("ours, native, 2 threads", _ours("--cpu-kernels", "native", threads=2)),
    "llama.cpp": Row("llama.cpp", _llamacpp(1), heeds_isa=False),
    "llama.cpp-2": Row("llama.cpp, 2 threads", _llamacpp(2), heeds_isa=False),
    "vllm": Row("vLLM", _vllm, QUIET | {"VLLM_CPU_KVCACHE_SPACE": "1"}, says=False),
}
DEFAULT = "torch,native,int8,native-2,llama.cpp,vllm"


# Every engine and the probe as on a processor without AVX-512; llama.cpp's wheel has no switch, and stays as built.
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    native.EXTRA_FLAGS: "-mno-avx512f",  # the reference engine's kernels
}
# vLLM chooses its own kernels by what torch says; as sitecustomize on PYTHONPATH this reaches its worker processes too.
# Python only prints what goes wrong in there, and goes on.
_NO_AVX512 = """\
import os, sys

try:
    import torch

    for name in ("_is_avx512_supported", "_is_avx512_bf16_supported"):
        getattr(torch.cpu, name)  # to set what nobody asks would hide nothing
        setattr(torch.cpu, name, lambda: False)
except Exception as problem:
    print(f"bench.engine: AVX-512 cannot be hidden from vLLM: {problem!r}", file=sys.stderr, flush=True)
    os._exit(1)
"""


def rows_for(isa: str | None, folder: Path) -> dict[str, Row]:
    """ENGINES; with an `isa` labelled where it does not reach, and vLLM held to it by a file in `folder`."""
    if isa is None:
        return dict(ENGINES)
    (folder / "sitecustomize.py").write_text(_NO_AVX512)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    rows = {n: r if r.heeds_isa else r._replace(label=f"{r.label}, as built") for n, r in ENGINES.items()}
    return rows | {"vllm": rows["vllm"]._replace(env={**rows["vllm"].env, "PYTHONPATH": path})}


class Probe(NamedTuple):
    """Of one thread, by processor time: a busy neighbour takes wall time, and of these little."""

    gemv_bytes_per_s: float
    gemm_flop_per_s: float


def cache_bytes() -> int:
    """Of this processor's largest cache; 0 if the machine does not say."""
    said = [path.read_text().strip() for path in CACHES.glob("index*/size")]
    return max((int(size.removesuffix("K")) * 1024 for size in said), default=0)


def probe_matrices(cache: int) -> int:
    """So many of 64 MiB are read in turn that none is still in a cache of so many bytes when its turn comes again."""
    return max(4, -(-2 * cache // MATRIX_BYTES))


def probe() -> Probe:
    """The best of a few products each; the vectors go through twice what the largest cache holds."""
    torch.set_num_threads(1)
    matrices, vector = torch.ones(probe_matrices(cache_bytes()), 16 << 10, 1 << 10), torch.ones(1 << 10)
    square = torch.ones(1024, 1024)

    def best(work: Callable[[int], object], times: int) -> float:
        spent = []
        for i in range(times):
            begun = time.process_time()
            work(i)
            spent.append(time.process_time() - begun)
        return min(spent)

    # Of several ways the fastest: no engine may be above what is called a ceiling, and on some processors torch's own
    # products are not the best.
    reads = (lambda i: torch.mv(matrices[i % len(matrices)], vector), lambda i: matrices[i % len(matrices)].sum())
    products: list[Callable[[int], object]] = [lambda i: torch.mm(square, square)]
    try:
        native.set_threads(1)
        panels = native.pack(square)
        products.append(lambda i: native.product(square, panels, len(square), None))
    except native.NativeError:
        pass
    gemv_s = min(best(read, 3 * len(matrices)) for read in reads)
    gemm_s = min(best(product, 6) for product in products)
    return Probe(matrices[0].numel() * 4 / gemv_s, 2 * 1024**3 / gemm_s)


class Server(NamedTuple):
    url: str  # http://127.0.0.1:PORT/v1
    group: int  # its process group, which is its session too
    start_s: float


@contextmanager
def serving(row: Row, command: Sequence[str], port: int, log: Path) -> Iterator[Server]:
    """A server in a session of its own; all of it is ended with the block."""
    begun = time.monotonic()
    with log.open("wb") as errors:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE if row.says else errors, stderr=errors,
            env={**os.environ, **row.env}, cwd=REPOSITORY, start_new_session=True,
        )  # fmt: skip
    try:
        url = _said(child) if row.says else _answers(f"http://127.0.0.1:{port}/v1", child)
        yield Server(url, child.pid, time.monotonic() - begun)
    finally:
        os.killpg(child.pid, signal.SIGCONT)
        os.killpg(child.pid, signal.SIGTERM)
        try:
            child.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe:
                pipe.close()


def start(stack: ExitStack, rows: Mapping[str, Row], place: Place, logs: Path) -> dict[str, Server]:
    """Those of `rows` that can be had here, until `stack` is closed.

    Raises SystemExit with the end of its log for one that does not start.
    """
    servers: dict[str, Server] = {}
    for name, row in rows.items():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = row.command(place._replace(port=port))
        if command is None:
            continue
        try:
            servers[name] = stack.enter_context(serving(row, command, port, logs / name))
        except RuntimeError as error:
            raise SystemExit(f"{error}\n{(logs / name).read_text(errors='replace')[-2000:]}") from error
    return servers


def _said(child: "subprocess.Popen[bytes]") -> str:
    assert child.stdout
    ready, _, _ = select.select([child.stdout], [], [], START_LIMIT_S)
    line = child.stdout.readline() if ready else b""
    if not line:
        raise RuntimeError(f"did not start: {child.args!r}")
    url: str = json.loads(line)["listening"]
    return url


def _answers(url: str, child: "subprocess.Popen[bytes]") -> str:
    end = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end and child.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/models", timeout=2):
                return url
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"did not start: {child.args!r}")


def members(session: int) -> list[int]:
    """Processes of a session: a server and all that it started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if int(fields[3]) == session:
            found.append(int(path.parent.name))
    return found


def cpu_s(pids: Sequence[int]) -> float:
    """Processor time that these have used, with what their ended children used."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15]))
    return total / TICKS


def run_cell(server: Server, words: Path, concurrency: int, requests: int, folder: Path) -> dict[str, Any]:
    """One run of the client, from the first request sent to the last token, and the server's processor time."""
    trace = folder / "trace.jsonl"
    row = json.dumps({"input_length": TOKENS, "output_length": TOKENS})
    trace.write_text("\n".join(['{"llm_bench_trace": 1}', *[row] * requests]) + "\n")
    command = [
        sys.executable, "-m", "llm_bench.cli", "run", "--targets", f"m={server.url}", "--trace", str(trace), "--rate",
        "1000000", "--constant", "--max-in-flight", str(concurrency), "--out", str(folder / "run"), "--format", "json",
        "--api", "openai-completions", "--tokenizer", str(words),
    ]  # fmt: skip
    pids, samples, done = members(server.group), [], threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_S):
            samples.append((time.monotonic_ns(), cpu_s(pids)))

    watcher = threading.Thread(target=sample)
    watcher.start()
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=CELL_LIMIT_S, check=False,
                             cwd=REPOSITORY)  # fmt: skip
    finally:
        done.set()
        watcher.join()
    if ran.returncode:
        raise RuntimeError(f"llm-bench: exit code {ran.returncode}: {ran.stderr[-2000:]}")
    (path,) = (folder / "run").glob("*.arrow")
    cell = records.read(path)
    found = {key: sorted({str(x) for x in cell[key]}) for key in ("outcome", "tokens_in", "tokens_out")}
    near = np.abs(cell["tokens_in"] - TOKENS).max() <= NEAR_TOKENS
    if not near or (found["outcome"], found["tokens_out"]) != (["ok"], [str(TOKENS)]):
        raise RuntimeError(f"{server.url}: not the same work for all: {found}")
    first, last = int(cell["sent_ns"].min()), int(cell.event_ns.max())
    at, used = np.array(samples).T
    spent = float(np.interp(last, at, used) - np.interp(first, at, used))
    tokens = int(cell["tokens_out"].sum())
    firsts = cell.event_ns[cell.offsets[:-1]] - cell["sent_ns"]
    return {
        "requests": requests, "tokens": tokens,
        "wall_s": (last - first) / 1e9, "cpu_s": spent, "ttft_p50_ms": float(np.median(firsts)) / 1e6,
    }  # fmt: skip


def measure(
    servers: dict[str, Server], words: Path, concurrencies: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """Cell after cell; at each concurrency the engines take turns, and only one of them runs. words: tokenizer.json."""
    for server in servers.values():
        os.killpg(server.group, signal.SIGSTOP)
    cells = []
    for concurrency in concurrencies:
        for repeat in range(repeats):
            for name, server in servers.items():
                os.killpg(server.group, signal.SIGCONT)
                found = probe()
                with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                    requests = concurrency * WAVES.get(concurrency, 2)
                    cell = run_cell(server, words, concurrency, requests, Path(folder))
                os.killpg(server.group, signal.SIGSTOP)
                cell |= {"engine": name, "concurrency": concurrency, "repeat": repeat, "load": os.getloadavg()[0]}
                cell |= found._asdict()
                cell["ceiling_tokens_per_s"] = ceiling(concurrency, engine_model.parameters(), TOKENS, *found)
                cells.append(cell)
                rate, each = cell["tokens"] / cell["wall_s"], cell["tokens"] / cell["cpu_s"]
                said = f"{name} c={concurrency}: {rate:.1f} tok/s, {each:.1f} per CPU-s"
                print(said, file=sys.stderr, flush=True)
    return cells


def versions(vllm: Path | None) -> dict[str, str]:
    from importlib.metadata import version

    found = {"llm-bench": __version__, "torch": torch.__version__, "xllamacpp": version("xllamacpp")}
    if vllm:
        (package,) = vllm.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
        found["vllm-cpu"] = package.name.removesuffix(".dist-info").removeprefix("vllm_cpu-")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__.partition("\n")[0])
    parser.add_argument("--engines", default=DEFAULT, help=f"of {', '.join(ENGINES)} (default: %(default)s)")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--vllm", type=Path, help="an environment with vllm-cpu; without it vLLM is left out")
    parser.add_argument("--isa", choices=("avx2",), help="all but llama.cpp as on a processor that has no more")
    parser.add_argument("--model", type=Path, default=REPOSITORY / "build/bench", help="where the model is, or is made")
    parser.add_argument("--out", type=Path, help="write README.md and results.json there (default: only print)")
    asked = parser.parse_args()
    names = asked.engines.split(",")
    if unknown := set(names) - ENGINES.keys():
        parser.error(f"--engines {sorted(unknown)}: known are {', '.join(ENGINES)}")
    if asked.isa and not AVX2.items() <= os.environ.items():  # torch reads them once, when it is imported
        os.execve(sys.executable, [sys.executable, "-m", "bench.engine", *sys.argv[1:]], {**os.environ, **AVX2})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended too
    folder, file = engine_model.make(asked.model)
    facts: dict[str, Any] = {"machine": machine(), "versions": versions(asked.vllm), "tokens": TOKENS, "isa": asked.isa}
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="bench-") as logs:
        known = rows_for(asked.isa, Path(logs))
        rows = {name: known[name] for name in names}
        servers = start(stack, rows, Place(folder, file, asked.vllm, 0), Path(logs))
        facts["labels"] = {name: row.label for name, row in rows.items()}
        facts["missing"] = [name for name in names if name not in servers]
        facts["start_s"] = {name: server.start_s for name, server in servers.items()}
        facts["cells"] = measure(
            servers, folder / "tokenizer.json", [int(c) for c in asked.concurrency.split(",")], asked.repeats
        )
    facts["machine"]["load_after"] = os.getloadavg()[0]
    told = ["--engines", asked.engines, "--concurrency", asked.concurrency, "--repeats", str(asked.repeats)]
    told += ["--isa", asked.isa] if asked.isa else []
    facts["command"] = " ".join([*told, *(["--vllm VENV"] if asked.vllm else [])])
    page = render(facts)
    print(page)
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "results.json").write_text(json.dumps(facts, indent=1) + "\n")
        (asked.out / "README.md").write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
