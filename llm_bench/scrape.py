"""What a server says of itself while it is measured: a process beside the run reads its metrics at a steady interval.

A process of its own, so that no stamp of the run waits for the parsing of a page; on the run's clock. What it reads is
in `NAME.scrape.jsonl` at once, a line a scrape with what has changed since the line before; a torn last line is left
out. Its own cost is the last line. Beside pages it reads this machine (`scrape_machine`).
"""

import http.client
import ipaddress
import json
import math
import os
import select
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit

import orjson

from llm_bench import server_metrics, server_names, targets
from llm_bench.clock import now_ns
from llm_bench.errors import BenchError
from llm_bench.scrape_machine import gpu_reader, host_reader
from llm_bench.server_metrics import Figures, Point, Values, figures
from llm_bench.targets import Target

EVERY_S = 1.0
AUTO = "auto"  # in place of a URL: /metrics at the root of each of the target's URLs
LARGEST_VALUE = 1e300  # of a sample
LARGEST_PAGE = 16_000_000  # bytes; Ray's page for one small app has 0.6 MB
READY_S = 15.0  # for the first round: a page a server, asked at once
SOURCES_MOST = 256
HOST, GPU = "host", "gpu"  # sources that are no URL
_ELSEWHERE = (
    "give the whole address, such as http://host:8002/metrics, Triton's; MLServer's and TorchServe's are at port 8082"
)
_LIKELY = {"HTTP 404": f"; {_ELSEWHERE}", "HTTP 501": "; llama.cpp has its page where it is started with --metrics"}
NO_ANSWER_S = 5.0  # the longest that a page is waited for, whatever the interval


class Asked(NamedTuple):
    """What the command line asks for. `urls`: with | between them, AUTO, or "" for none."""

    urls: str = ""
    every_s: float = EVERY_S
    gpu: bool = False


def metrics_urls(asked: str, target: Target) -> list[str]:
    """The URLs to scrape of a target. Raises BenchError for what is no URL, or holds what may be a secret."""
    if asked.strip() == AUTO:
        if target.dialect.transport == "grpc":
            raise BenchError(f"target {target.name}: --metrics-url {AUTO}: a gRPC port has no pages; {_ELSEWHERE}")
        return [f"{parts.scheme}://{parts.netloc}/metrics" for parts in map(urlsplit, target.urls)]
    urls = [url.strip() for url in asked.split("|")] if asked else []
    for url in urls:
        try:
            parts = urlsplit(url)
            sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            sound = False
        if not sound or "@" in url or "?" in url or not url.isascii() or not url.isprintable() or " " in url:
            raise BenchError(
                f"target {target.name}: --metrics-url: expected {AUTO}, or URLs without user, key or query, such as "
                "http://host:8000/metrics, several with | between them"
            )
    if len(urls) > SOURCES_MOST:
        raise BenchError(f"target {target.name}: --metrics-url: {len(urls)} URLs, expected at most {SOURCES_MOST}")
    return urls


@contextmanager
def beside(target: Target, asked: Asked, path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Scrapes from before the block to after it, into `path`; does nothing where nothing is asked for.

    Raises BenchError where the first scrape finds nothing to read: a run that was to be explained would not be.
    """
    urls = metrics_urls(asked.urls, target)
    if not urls and not asked.gpu:
        yield
        return
    work = {"path": str(path), "urls": urls, "every_s": asked.every_s, "gpu": asked.gpu, "insecure": target.insecure}
    work |= {"cafile": target.cafile, "server": local_address(target), "headers": [_headers(u, target) for u in urls]}
    child = subprocess.Popen(
        [sys.executable, "-m", "llm_bench.scrape"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is the run's to handle
    )
    assert child.stdin and child.stdout
    try:
        with suppress(BrokenPipeError):
            child.stdin.write(json.dumps(work).encode() + b"\n")  # keys go this way: a command line can be read by all
            child.stdin.flush()
        _hear(child.stdout, target, say)
        yield
    finally:
        with suppress(BrokenPipeError):
            child.stdin.close()  # the word to take a last scrape and to end
        try:
            child.wait(NO_ANSWER_S + 2)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()


def _hear(out: IO[bytes], target: Target, say: Callable[[str], None]) -> None:
    """What the first round of scrapes found."""
    ready, _, _ = select.select([out], [], [], READY_S)
    line = out.readline() if ready else b""
    try:
        first = dict(orjson.loads(line))
    except (orjson.JSONDecodeError, ValueError):
        raise BenchError(
            f"target {target.name}: the scraper did not start (no word from it in {READY_S:g} s)"
        ) from None
    hide = targets.hider(target)
    if first["errors"]:
        source, why = next(iter(first["errors"].items()))
        raise BenchError(f"target {target.name}: {source}: {hide(why)}{_LIKELY.get(why[:8], '')}")
    for line_ in first["said"]:
        say(f"{target.name}: {hide(line_)}")


def local_address(target: Target) -> int:
    """The port of a target on this machine's loopback, 0 where it is elsewhere: whose processes can be looked at."""
    parts = urlsplit(target.urls[0])
    host = parts.hostname or ""
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    return (parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)) if local else 0


def _headers(url: str, target: Target) -> list[tuple[str, str]]:
    """The target's own headers, its key among them, only for its own hosts: no other one gets them."""
    hosts = {urlsplit(u).hostname for u in target.urls}
    return targets.auth_headers(target) if urlsplit(url).hostname in hosts else []


# ---- the process beside the run


def main() -> None:
    """Reads its work as one line of JSON from stdin, and scrapes until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    work = json.loads(sys.stdin.buffer.readline())
    begun_s = time.process_time()
    log = _Log(Path(work["path"]))
    sources: list[tuple[str, Callable[[], Values]]] = []
    for url, headers in zip(work["urls"], work["headers"], strict=True):
        sources.append((url, _page_of(url, headers, work)))
    if os.path.exists("/proc/stat"):  # noqa: PTH110
        sources.append((HOST, host_reader(work["server"])))
    errors: dict[str, str] = {}
    if work["gpu"]:
        try:
            sources.append((GPU, gpu_reader()))
        except BenchError as e:
            errors[GPU] = str(e)
    log.write({"llm_bench_scrape": 1, "every_s": work["every_s"], "sources": [name for name, _ in sources]})
    stop, start_ns = threading.Event(), now_ns()
    runs = [_Scraper(log, number, read) for number, (_, read) in enumerate(sources)]
    errors |= {name: why for (name, _), run in zip(sources, runs, strict=True) if (why := run.once())}
    said = [
        f"{name}: no metric that is known of it; known are those of {', '.join(_servers())}"
        for (name, _), run in zip(sources, runs, strict=True)
        if not run.errors and not run.known and name not in (HOST, GPU)
    ]
    sys.stdout.write(json.dumps({"errors": errors, "said": said}) + "\n")
    sys.stdout.flush()
    threads = [
        threading.Thread(target=run.run, args=(stop, start_ns, round(work["every_s"] * 1e9)), daemon=True)
        for run in runs
    ]
    for thread in threads:
        thread.start()
    sys.stdin.buffer.read()
    stop.set()
    for thread in threads:
        thread.join(NO_ANSWER_S + 1)
    scrapes, skipped = sum(run.scrapes for run in runs), sum(run.skipped for run in runs)
    log.write(
        {"cpu_s": time.process_time() - begun_s, "scrapes": scrapes, "skipped": skipped, "ran_ns": now_ns() - start_ns}
    )


def _servers() -> list[str]:
    return list(dict.fromkeys(server for metric in server_names.METRICS_OF.values() for server in metric.names))


class _Log:
    """Appends whole lines; a full disk ends it, and not the run."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._lock = threading.Lock()

    def write(self, line: Mapping[str, Any]) -> None:
        with self._lock, suppress(OSError):
            self._file.write(orjson.dumps(line) + b"\n")


class _Scraper:
    """One source, asked on a grid of times: no scrape shifts the next, and one that would come late is left out."""

    def __init__(self, log: _Log, number: int, read: Callable[[], Values]) -> None:
        self._log, self._number, self._read = log, number, read
        self._last: dict[str, float | None] = {}  # None: no number
        self.scrapes = self.skipped = self.errors = 0
        self.known = False

    def run(self, stop: threading.Event, start_ns: int, every_ns: int) -> None:
        tick = 1
        while not stop.wait(max(0, start_ns + tick * every_ns - now_ns()) / 1e9):
            self.once()
            after = (now_ns() - start_ns) // every_ns + 1
            self.skipped += after - tick - 1
            tick = after
        self.once()  # the window may have ended since the last

    def once(self) -> str:
        """One scrape to the log. Returns what was wrong with it, in words."""
        asked_ns, error, page = now_ns(), "", Values()
        try:
            page = self._read()
        except (OSError, http.client.HTTPException, ValueError) as e:
            # A ValueError's words are ours; the others' need their kind: a time-out has no words at all.
            error = str(e) if isinstance(e, ValueError) else f"{type(e).__name__}: {e}".removesuffix(": ")
        line: dict[str, Any] = {"k": self._number, "at": asked_ns, "took": now_ns() - asked_ns}
        self.scrapes += 1
        if error:
            self.errors += 1
            self._log.write({**line, "error": error[:300]})
            return error
        # NaN and infinities become null: the number before is not of this moment.
        found = {key: value if abs(value) < LARGEST_VALUE else None for key, value in page.items()}
        line["v"] = {key: value for key, value in found.items() if key not in self._last or self._last[key] != value}
        if gone := [key for key in self._last if key not in found]:
            line["gone"] = gone
        self._last, self.known = found, self.known or bool(found)
        self._log.write(line)
        return ""


def _page_of(url: str, headers: Sequence[tuple[str, str]], work: Mapping[str, Any]) -> Callable[[], Values]:
    """Reads a URL's page on a connection that is kept open. It raises OSError, HTTPException or ValueError."""
    parts = urlsplit(url)
    kept: list[http.client.HTTPConnection] = []

    def connect() -> http.client.HTTPConnection:
        if parts.scheme == "http":
            return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=NO_ANSWER_S)
        context = ssl.create_default_context(cafile=work["cafile"] or None)
        if work["insecure"]:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=NO_ANSWER_S, context=context)

    def ask(connection: http.client.HTTPConnection) -> tuple[int, bytes]:
        # Only the classic text is asked for: OpenMetrics puts timestamps and exemplars into it.
        connection.request("GET", parts.path or "/", headers={"Accept": "text/plain;version=0.0.4", **dict(headers)})
        answer = connection.getresponse()
        return answer.status, answer.read(LARGEST_PAGE + 1)

    def read() -> Values:
        fresh = not kept
        connection = kept.pop() if kept else connect()
        try:
            status, page = ask(connection)
        except (OSError, http.client.HTTPException):
            connection.close()
            if fresh:
                raise
            connection = connect()  # a kept-alive connection may have been closed by the server
            status, page = ask(connection)
        if len(page) > LARGEST_PAGE:
            connection.close()
            raise ValueError(f"a page of over {LARGEST_PAGE} bytes")
        kept.append(connection)
        if status != http.HTTPStatus.OK:
            raise ValueError(f"HTTP {status}, expected 200 and Prometheus text")
        return server_metrics.read(page)

    return read


# ---- read back


class Source(NamedTuple):
    """One URL, or HOST, or GPU."""

    name: str
    points: list[Point]
    errors: list[str]
    took_ns: int  # the longest scrape


class Scrape(NamedTuple):
    every_s: float
    sources: list[Source]
    cpu_s: float | None  # of the scraper; None where it was killed
    skipped: int  # scrapes that were due while the one before was not answered yet
    ran_ns: int

    @property
    def replicas(self) -> list[Source]:
        return [s for s in self.sources if s.name not in (HOST, GPU)]

    def figures(self, start_ns: int, end_ns: int) -> dict[str, Figures]:
        """By source, of those that were scraped twice or more in or around the window."""
        found = ((s.name, figures(s.points, start_ns, end_ns)) for s in self.sources)
        return {name: of for name, of in found if of is not None}

    @property
    def cost(self) -> str:
        """What scraping took, in words."""
        if self.cpu_s is None or not self.ran_ns:
            return "the scraper was killed: its cost is not known"
        longest = max((s.took_ns for s in self.sources), default=0) / 1e6
        late = f", {self.skipped} were left out" if self.skipped else ""
        return f"scraping took {self.cpu_s / (self.ran_ns / 1e9):.1%} of a core, at most {longest:.0f} ms each{late}"


def path_of(folder: Path, name: str) -> Path:
    """Where the scrape of a cell lies."""
    return folder / f"{name}.scrape.jsonl"


def read(path: Path) -> Scrape:
    """What was scraped into a file. Raises BenchError for a file that is none; a torn last line is left out."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as e:
        raise BenchError(f"{path}: cannot be read: {e.strerror}") from None
    lines.pop()  # empty, or torn
    try:
        head, *rest = [orjson.loads(line) for line in lines]
        if head["llm_bench_scrape"] != 1:
            raise ValueError("another version wrote it")
        names, every_s = list(map(str, head["sources"])), float(head["every_s"])
        return _put_together(names, every_s, rest)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as e:
        raise BenchError(f"{path}: no scrape of llm-bench: {type(e).__name__}: {e}") from None


def _put_together(names: Sequence[str], every_s: float, lines: Sequence[Mapping[str, Any]]) -> Scrape:
    now: list[Values] = [{} for _ in names]
    points: list[list[Point]] = [[] for _ in names]
    errors: list[list[str]] = [[] for _ in names]
    took, end = [0] * len(names), dict[str, Any]()
    for line in lines:
        if "k" not in line:
            end = dict(line)
            continue
        k = line["k"]
        took[k] = max(took[k], line["took"])
        if "error" in line:
            errors[k].append(line["error"])
            continue
        for key in line.get("gone", ()):
            now[k].pop(key, None)  # files of before have no word of a key that never was a number
        now[k] |= {str(key): math.nan if value is None else float(value) for key, value in line["v"].items()}
        points[k].append(Point(line["at"] + line["took"] // 2, dict(now[k])))
    sources = [Source(*of) for of in zip(names, points, errors, took, strict=True)]
    cpu_s = end.get("cpu_s")
    return Scrape(
        every_s, sources, None if cpu_s is None else float(cpu_s), end.get("skipped", 0), end.get("ran_ns", 0)
    )


if __name__ == "__main__":
    main()
