"""A server's metrics beside a run: what is read back is what the server said, when it said it, whatever happens."""

import json
import math
import os
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llm_bench import scrape
from llm_bench.clock import now_ns
from llm_bench.errors import BenchError
from llm_bench.scrape import AUTO, Asked, beside, local_address, metrics_urls, path_of, read
from llm_bench.scrape_machine import gpu_reader, listening
from llm_bench.targets import Target
from tests.scripted import Scripted, Seen, http_response

PAGE = 'vllm:num_requests_running{{engine="0"}} 3\nvllm:generation_tokens_total{{engine="0"}} {}\nother 1\n'


def counting(number: int, _: Seen) -> list[tuple[float, bytes]]:
    """A page whose counter rises by 10 at each scrape."""
    return [(0, http_response(200, PAGE.format(10 * number).encode()))]


def target(url: str, **fields: object) -> Target:
    return Target("t", url, **fields)  # type: ignore[arg-type]


def test_what_a_server_says_is_on_the_runs_clock_beside_the_records(tmp_path: Path) -> None:
    path, said = path_of(tmp_path, "000-t-c=1"), list[str]()
    with Scripted(counting) as server:
        begun_ns = now_ns()
        with beside(target(server.url), Asked(AUTO, 0.05), path, said.append):
            assert len(read(path).sources[0].points) >= 1  # before the run begins, and on disk
            until_s = time.monotonic() + 30
            while len(server.requests) < 3 and time.monotonic() < until_s:
                time.sleep(0.02)
        ended_ns = now_ns()
    found = read(path)
    page = found.sources[0]
    assert page.name == server.url.removesuffix("/v1") + "/metrics"
    assert all(begun_ns < p.at_ns < ended_ns for p in page.points)
    tokens = [p.values['vllm:generation_tokens_total{engine="0"}'] for p in page.points]
    assert tokens == [10 * k for k in range(len(tokens))]
    assert len(tokens) == len(server.requests) >= 3
    assert {p.values['vllm:num_requests_running{engine="0"}'] for p in page.points} == {3}
    figures = found.figures(begun_ns, ended_ns)[page.name]
    assert figures.value("generated_tokens") == 10 * (len(tokens) - 1)
    assert said == []
    assert path.read_text().count("num_requests_running") == 1  # what does not change is written once
    assert found.cpu_s is not None
    assert found.cpu_s > 0
    assert "of a core" in found.cost


def test_nothing_asked_for_is_nothing_done(tmp_path: Path) -> None:
    with beside(target("http://127.0.0.1:1/v1"), Asked(), tmp_path / "x.jsonl", print):
        pass
    assert not list(tmp_path.iterdir())


def test_a_page_that_is_not_there_stops_the_run_before_it_begins(tmp_path: Path) -> None:
    with Scripted(lambda n, seen: [(0, http_response(404, b"{}"))]) as server:
        url = server.url + "/metrics"
        with (
            pytest.raises(BenchError, match=r"target t: http://\S*/v1/metrics: HTTP 404, expected 200"),
            beside(target(server.url), Asked(url, 1.0), tmp_path / "x.jsonl", print),
        ):
            raise AssertionError("the run began")


def test_a_page_looked_for_at_the_wrong_port_is_told_where_some_servers_have_theirs(tmp_path: Path) -> None:
    with (
        Scripted(lambda n, seen: [(0, http_response(404, b"{}"))]) as server,
        pytest.raises(BenchError, match=r"HTTP 404, expected 200 and Prometheus text; give the whole address, such as"),
        beside(target(server.url), Asked(AUTO, 1.0), tmp_path / "x.jsonl", print),
    ):
        raise AssertionError("the run began")
    with pytest.raises(BenchError, match=r"target t: --metrics-url auto: a gRPC port has no pages; give the whole"):
        metrics_urls(AUTO, target("http://h:8001", api="kserve-grpc"))


def test_a_page_without_known_names_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    with (
        Scripted(lambda n, seen: [(0, http_response(200, b"up 1\n"))]) as server,
        beside(target(server.url), Asked(AUTO, 1.0), tmp_path / "x.jsonl", said.append),
    ):
        pass
    assert len(said) == 1
    assert "no metric that is known of it" in said[0]


def test_a_server_that_goes_away_is_said_and_what_it_said_before_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.scrape.jsonl"
    with Scripted(counting) as server:
        context = beside(target(server.url), Asked(AUTO, 0.05), path, print)
        context.__enter__()
    time.sleep(0.3)
    context.__exit__(None, None, None)
    page = read(path).sources[0]
    assert page.points
    assert "ConnectionRefused" in page.errors[-1]


def test_the_targets_key_goes_to_its_own_host_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRAPE_TEST_KEY", "sesame-123")
    path = tmp_path / "x.jsonl"
    with Scripted(counting) as server:
        port = server.url.rpartition(":")[2].split("/")[0]
        one = target(server.url, key_env="SCRAPE_TEST_KEY")
        with beside(one, Asked(f"http://127.0.0.1:{port}/metrics|http://localhost:{port}/metrics", 9), path, print):
            pass
        keys = {seen.headers["host"].split(":")[0]: seen.headers.get("authorization") for seen in server.requests}
    assert keys == {"127.0.0.1": "Bearer sesame-123", "localhost": None}
    assert "sesame" not in path.read_text()


@pytest.mark.parametrize(
    "url",
    ["host:8000/metrics", "ftp://h/metrics", "http://", "http://u:p@h/m", "http://h/m?key=k", "http://h:0/", "a|b"],
)
def test_what_is_no_url_or_holds_a_secret_is_refused(url: str) -> None:
    with pytest.raises(BenchError, match="--metrics-url: expected auto, or URLs without user, key or query"):
        metrics_urls(url, target("http://h/v1"))


def test_urls_by_hand_and_of_each_replica() -> None:
    two = target("http://a:8000/v1|http://b:8000/v1")
    assert metrics_urls(AUTO, two) == ["http://a:8000/metrics", "http://b:8000/metrics"]
    assert metrics_urls("http://a:8002/metrics | http://b:8002/metrics", two)[1] == "http://b:8002/metrics"
    assert metrics_urls("", two) == []


LINES = [
    {"llm_bench_scrape": 1, "every_s": 1.0, "sources": ["u", "host"]},
    {"k": 0, "at": 100, "took": 20, "v": {"a": 1.0, "b": 2.0}},
    {"k": 0, "at": 200, "took": 20, "v": {"a": 3.0}},
    {"k": 0, "at": 300, "took": 40, "error": "TimeoutError"},
    {"k": 0, "at": 400, "took": 20, "v": {}, "gone": ["b"]},
]


def written(path: Path, lines: list[dict[str, object]], end: str = "\n") -> Path:
    path.write_text("\n".join(map(json.dumps, lines)) + end)
    return path


def test_lines_hold_what_changed(tmp_path: Path) -> None:
    source = read(written(tmp_path / "x", LINES)).sources[0]
    assert [(p.at_ns, dict(p.values)) for p in source.points] == [
        (110, {"a": 1.0, "b": 2.0}),
        (210, {"a": 3.0, "b": 2.0}),
        (410, {"a": 3.0}),
    ]
    assert source.errors == ["TimeoutError"]


def test_a_gauge_that_is_no_number_for_a_while_says_nothing_then_and_may_go(tmp_path: Path) -> None:
    """NaN from the start and gone, a number that becomes NaN and comes back, an infinity."""
    pages = [b"N", b"1", b"N", b"3", b""]

    def page(n: int, _: object) -> list[tuple[float, bytes]]:
        value = pages[min(n, len(pages) - 1)].replace(b"N", b"NaN")
        lines = b"vllm:num_requests_waiting " + value if value else b""
        others = b"vllm:num_requests_running " + (b"+Inf" if n == 1 else b"2")
        return [(0, http_response(200, lines + b"\n" + others + b"\n"))]

    path = tmp_path / "x.scrape.jsonl"
    with Scripted(page) as server, beside(target(server.url), Asked(AUTO, 0.1), path, print):
        until_s = time.monotonic() + 60
        while len(path.read_bytes().splitlines()) < 12:  # two lines a round, one of the host
            assert time.monotonic() < until_s, "waited in vain"
            time.sleep(0.05)
    points = [p.values for p in read(path).sources[0].points]
    waiting = [p.get("vllm:num_requests_waiting") for p in points]
    assert [None if v is None or v != v else v for v in waiting[:5]] == [None, 1.0, None, 3.0, None]
    assert [v == 2.0 for v in (p["vllm:num_requests_running"] for p in points)][:3] == [True, False, True]
    figures_ = read(path).figures(0, 2**62)
    waited = next(iter(figures_.values())).of["waiting"]
    assert (waited.least, waited.most) == (1.0, 3.0)


def test_what_stays_no_number_is_written_once(tmp_path: Path) -> None:
    page = b"vllm:num_requests_waiting NaN\nvllm:num_requests_running +Inf\n"
    path = tmp_path / "x.scrape.jsonl"
    always = Scripted(lambda *_: [(0, http_response(200, page))])
    with always as server, beside(target(server.url), Asked(AUTO, 0.05), path, print):
        until_s = time.monotonic() + 30
        while len(server.requests) < 4 and time.monotonic() < until_s:
            time.sleep(0.02)
    points = read(path).sources[0].points
    assert len(points) >= 4
    assert all(len(p.values) == 2 and all(map(math.isnan, p.values.values())) for p in points)
    assert [path.read_text().count(name) for name in ("num_requests_waiting", "num_requests_running")] == [1, 1]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    whole = read(written(tmp_path / "x", LINES)).sources[0].points
    torn = read(written(tmp_path / "y", LINES, '\n{"k": 0, "at": 500, "took": 2, "v": {"a"'))
    assert torn.sources[0].points == whole
    assert torn.cpu_s is None
    assert torn.cost == "the scraper was killed: its cost is not known"


@pytest.mark.parametrize("text", ["", "{}\n", "[]\n", "x\n", '{"llm_bench_scrape": 2}\n', "\xff\n"])
def test_what_is_no_scrape_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.scrape.jsonl"
    path.write_text(text)
    with pytest.raises(BenchError, match=r"x\.scrape\.jsonl: no scrape of llm-bench"):
        read(path)


@pytest.mark.parametrize("line", [{"k": 7, "at": 1, "took": 1, "v": {}}, {"k": 0, "at": 1, "took": 1, "v": {"a": "b"}}])
def test_a_bad_line_is_refused(tmp_path: Path, line: dict[str, object]) -> None:
    with pytest.raises(BenchError, match="no scrape"):
        read(written(tmp_path / "x", [LINES[0], line]))


def test_the_processes_behind_a_port_of_this_machine_are_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listening(port) == [os.getpid()]
        assert local_address(target(f"http://127.0.0.1:{port}/v1")) == port
    assert local_address(target("http://example.com:8000/v1")) == 0
    assert local_address(target("http://10.0.0.1/v1")) == 0


def test_the_servers_cpu_time_and_memory_are_read_where_it_is_local(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with Scripted(counting) as server, beside(target(server.url), Asked(AUTO, 0.1), path, print):
        until_s = time.process_time() + 0.2
        while time.process_time() < until_s:  # the scripted server is a thread of this process
            sum(range(1000))
    host = next(s for s in read(path).sources if s.name == scrape.HOST)
    figures = scrape.figures(host.points, 0, 1 << 62)
    assert figures is not None
    assert (figures.value("server_cpu") or 0) >= 0.1
    assert (figures.value("server_memory") or 0) > 1e6


class NvmlError(Exception):
    """As of nvidia-ml-py: a class an error, all under one."""


class NotSupportedError(NvmlError):
    pass


class NoPermissionError(NvmlError):
    pass


class GpuIsLostError(NvmlError):
    pass


Card = dict[str, Any]  # call -> what it returns, or raises
CARD: Card = {
    "UtilizationRates": SimpleNamespace(gpu=90, memory=50),
    "MemoryInfo": SimpleNamespace(used=20, total=80),
    "PowerUsage": 350_000,
    "TotalEnergyConsumption": 5000,
}


def nvml(monkeypatch: pytest.MonkeyPatch, *cards: Card | NvmlError) -> Any:
    """The real library's calls, units and errors, answered by hand: no GPU was tried."""

    def told(value: Any) -> Any:
        if isinstance(value, NvmlError):
            raise value
        return value

    calls = {f"nvmlDeviceGet{call}": lambda card, call=call: told(card[call]) for call in CARD}
    stub = SimpleNamespace(
        NVMLError=NvmlError,
        NVMLError_NotSupported=NotSupportedError,
        NVMLError_NoPermission=NoPermissionError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(cards),
        nvmlDeviceGetHandleByIndex=lambda i: told(cards[i]),
        **calls,
    )
    monkeypatch.setitem(sys.modules, "pynvml", stub)
    return stub


def test_nvml_is_read_under_our_names(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(monkeypatch, CARD, CARD | {"UtilizationRates": SimpleNamespace(gpu=91, memory=40), "PowerUsage": 1})
    assert gpu_reader()() == {
        'nvml:busy{gpu="0"}': 0.9, 'nvml:memory_busy{gpu="0"}': 0.5, 'nvml:memory_used{gpu="0"}': 0.25,
        'nvml:power_w{gpu="0"}': 350.0, 'nvml:energy_j{gpu="0"}': 5.0,
        'nvml:busy{gpu="1"}': 0.91, 'nvml:memory_busy{gpu="1"}': 0.4, 'nvml:memory_used{gpu="1"}': 0.25,
        'nvml:power_w{gpu="1"}': 0.001, 'nvml:energy_j{gpu="1"}': 5.0,
    }  # fmt: skip


@pytest.mark.parametrize("why", [NotSupportedError("Not Supported"), NoPermissionError("Insufficient Permissions")])
@pytest.mark.parametrize(("call", "gone"), [
    ("UtilizationRates", ("busy", "memory_busy")),  # under MIG
    ("MemoryInfo", ("memory_used",)),  # of a GPU that shares the CPU's memory
    ("PowerUsage", ("power_w",)),
    ("TotalEnergyConsumption", ("energy_j",)),  # before Volta
])  # fmt: skip
def test_what_a_gpu_does_not_tell_takes_nothing_else_away(
    monkeypatch: pytest.MonkeyPatch, why: NvmlError, call: str, gone: tuple[str, ...]
) -> None:
    nvml(monkeypatch, CARD | {call: why})
    (names,) = {tuple(name.partition("{")[0] for name in gpu_reader()())}
    whole = ("nvml:busy", "nvml:memory_busy", "nvml:memory_used", "nvml:power_w", "nvml:energy_j")
    assert names == tuple(name for name in whole if name.removeprefix("nvml:") not in gone)


def test_energy_of_some_gpus_does_not_pass_for_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(monkeypatch, CARD, CARD | {"TotalEnergyConsumption": NotSupportedError()})
    found = gpu_reader()()
    assert not [name for name in found if "energy" in name]
    assert [found[f'nvml:power_w{{gpu="{k}"}}'] for k in (0, 1)] == [350, 350]  # by which it is reckoned then


def test_a_gpu_that_is_lost_while_it_is_read_fails_the_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = dict(CARD)
    nvml(monkeypatch, CARD, lost)
    read_ = gpu_reader()
    assert len(read_()) == 10
    for call in CARD:
        lost |= dict(CARD) | {call: GpuIsLostError("GPU is lost")}
        with pytest.raises(ValueError, match="NVML: GPU 1: GPU is lost"):
            read_()


def test_gpus_of_others_are_left_out_and_none_at_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(monkeypatch, NoPermissionError(), CARD)
    assert {name.partition("{")[2] for name in gpu_reader()()} == {'gpu="1"}'}
    nvml(monkeypatch, NoPermissionError())
    with pytest.raises(BenchError, match="no GPU on this machine that this user may read"):
        gpu_reader()
    nvml(monkeypatch, GpuIsLostError("GPU is lost"))
    with pytest.raises(BenchError, match="NVML: GPU is lost; expected an NVIDIA driver"):
        gpu_reader()
    nvml(monkeypatch, dict.fromkeys(CARD, NotSupportedError()))
    with pytest.raises(ValueError, match="tell nothing"):
        gpu_reader()()


def test_gpus_without_the_library_are_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(BenchError, match=r"--gpu needs nvidia-ml-py: in the project's folder, pip install '\.\[gpu\]'"):
        gpu_reader()
