"""Shards as actors of a local Ray of several processes. `pip install '.[ray]'`, then `make test-ray`."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llm_bench import host_link, ray_hosts
from llm_bench.errors import BenchError
from llm_bench.host_link import Host
from llm_bench.plan import Load
from llm_bench.ray_hosts import RayLink
from llm_bench.run import Ended
from tests.bench import good, llm_server, rows, trace_file
from tests.scripted import Scripted
from tests.test_hosts import after, asked_of, measured


def test_without_ray_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BenchError, match=r"--ray needs the extra"), ray_hosts.connected("auto", 1):
        pass


@pytest.fixture
def links(monkeypatch, tmp_path) -> Iterator[list[RayLink]]:
    """Three actors on a Ray of our own; it ends with the test, since tests kill what is in it."""
    pytest.importorskip("ray", reason="ray is not installed (extra: ray)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)]))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # what a lost host leaves behind
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")  # the names of its sockets may be no longer
    with ray_hosts.connected("auto", 3) as found:
        yield found


pytestmark = pytest.mark.filterwarnings("default")  # Ray's own, of its imports


def test_three_actors_are_one_measurement(links, tmp_path):
    with Scripted(llm_server(lambda n, seen: good(seen, 20))) as server:
        trace = trace_file(tmp_path, rows(150))
        ran = measured(server.url, tmp_path, trace, Load(concurrency=7), links, warmup=14)
        assert server.peak == 7
    assert ran.ended == Ended()
    assert sorted(ran.cell["index"]) == list(range(150))
    assert ran.cell.complete
    assert ran.end["counts"]["ok"] == 150
    for host in ran.end["hosts"]:  # they are on this machine: what is found has to hold the truth
        assert abs(host["offset_ns"]) <= host["error_ns"] < 100_000_000
    # The same actors drive the next cell, and one that is lost is named within seconds.
    begun: list[float] = []
    agent = int(Host(1, links[1]).call("hello")["pid"])
    with Scripted(llm_server(lambda n, seen: good(seen, 20))) as server:
        (tmp_path / "more").mkdir()
        trace = trace_file(tmp_path, rows(3000, gap_s=0.02))
        with after(
            lambda: len(asked_of(server)) > 60,
            lambda: (begun.append(time.monotonic()), os.kill(_parent(agent), signal.SIGKILL)),  # the actor itself
        ):
            ran = measured(server.url, tmp_path / "more", trace, Load(speed=1.0), links)
        assert time.monotonic() - begun[0] < host_link.LOST_S + 5
    assert ran.ended.died.startswith("worker 1 lost with its host ")
    sent = {s.headers["x-request-id"] for s in asked_of(server)}
    assert sent <= set(ran.cell["request_id"])
    recorded = dict(zip(*np.unique(ran.cell["outcome"], return_counts=True), strict=True))
    assert {name: count for name, count in ran.end["counts"].items() if count} == recorded
    assert recorded["cut_at_end"] > 0


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_an_interrupt_ends_all(links, tmp_path):
    with Scripted(llm_server(lambda n, seen: good(seen, 20))) as server:
        trace = trace_file(tmp_path, rows(3000))
        with after(lambda: len(asked_of(server)) > 60, lambda: os.kill(os.getpid(), signal.SIGINT)):
            ran = measured(server.url, tmp_path, trace, Load(concurrency=6), links)
    assert ran.ended == Ended(interrupted=True)
    assert ran.cell.complete
    assert (ran.cell["outcome"] == "ok").sum() > 40


def test_no_cluster_at_an_address_is_a_sentence():
    pytest.importorskip("ray", reason="ray is not installed (extra: ray)")
    with pytest.raises(BenchError, match="on a node of the cluster"), ray_hosts.connected("ray://10.0.0.1:10001", 1):
        pass
