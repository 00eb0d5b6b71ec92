"""Hosts of a Ray cluster as Links: an actor for each worker, which hands bytes on to an agent of its own.

The agent is a process that the actor starts, so that no thread of Ray's stands in a driver's way and nothing but bytes
passes through Ray. Tried on a local Ray of several processes; untried on a cluster of several machines.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llm_bench.errors import BenchError
from llm_bench.host_link import LostError, Pipe

READY_S = 60.0  # for all actors to be placed: a process each, on machines that may be cold


class Relay:
    """An agent on the host where Ray placed this actor. It runs there, and knows nothing of what it carries."""

    def __init__(self) -> None:
        self.pipe = Pipe()

    def where(self) -> tuple[str, str]:
        """The host's address and the id of its node."""
        import ray

        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()

    def carry(self, question: bytes, timeout_s: float) -> tuple[bytes, str]:
        """The answer; or b"" and why there is none."""
        self.pipe.send(question)
        try:
            return self.pipe.receive(timeout_s), ""
        except LostError as e:
            return b"", str(e)


class RayLink:
    """The way to one actor's agent."""

    def __init__(self, actor: Any, name: str, here: bool) -> None:
        self.name, self.here = name, here
        self._actor, self._answer = actor, None

    def send(self, question: bytes) -> None:
        from llm_bench.host_link import SLOW_S

        self._answer = self._actor.carry.remote(question, SLOW_S)

    def receive(self, timeout_s: float) -> bytes:
        import ray

        try:
            answer, why = ray.get(self._answer, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise LostError(f"not heard from for {timeout_s:g} s") from None
        except ray.exceptions.RayError as e:
            raise LostError(f"Ray says {type(e).__name__}") from None
        if not answer:
            raise LostError(why)
        return bytes(answer)

    def close(self) -> None:
        """The actor ends, and with it its agent's input."""
        import ray

        ray.kill(self._actor)


@contextmanager
def connected(address: str, workers: int) -> Iterator[list[RayLink]]:
    """A Link for each of `workers` actors, each with a core of its own, spread over the hosts of the cluster.

    `address`: of a cluster, as ray:// is not; `auto`: the one that RAY_ADDRESS or this machine has, or else a local one
    that ends with the block. Raises BenchError without ray, without a cluster at the address, and where it has too few
    cores.
    """
    ray = _ray()
    if address.startswith("ray://"):
        raise BenchError(f"--ray {address}: a Ray client's address, whose answers take a detour; run on a node of the "
                         "cluster, with --ray auto")  # fmt: skip
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a benchmark tells nobody
    try:
        started = _init(ray, address, workers)
    except (ConnectionError, ValueError, RuntimeError) as e:
        raise BenchError(f"--ray {address}: no cluster there ({e}); expected HOST:PORT of its head, or auto") from None
    try:
        cores = int(ray.cluster_resources().get("CPU", 0))
        if cores < workers:
            raise BenchError(f"--ray {address}: {workers} workers take a core each, the cluster has {cores}")
        yield from _links(ray, workers)
    finally:
        if started:
            ray.shutdown()


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise BenchError("--ray needs the extra: in the project's folder, pip install '.[ray]'") from None
    return ray


def _init(ray: Any, address: str, workers: int) -> bool:
    """Connect; was it us who did? Ray that is connected already stays so."""
    if ray.is_initialized():
        return False
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    if address != "auto":
        ray.init(address=address, **quiet)
        return True
    try:
        ray.init(address="auto", **quiet)
    except ConnectionError:  # none is running here: one of our own, as large as is asked for
        ray.init(address="local", num_cpus=workers, include_dashboard=False, **quiet)
    return True


def _links(ray: Any, workers: int) -> Iterator[list[RayLink]]:
    relay = ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")(Relay)
    actors = [relay.remote() for _ in range(workers)]
    try:
        placed = _placed(ray, actors)
        mine = ray.get_runtime_context().get_node_id()
        yield [RayLink(actor, address, node == mine) for actor, (address, node) in zip(actors, placed, strict=True)]
    finally:
        for actor in actors:
            ray.kill(actor)


def _placed(ray: Any, actors: Sequence[Any]) -> list[tuple[str, str]]:
    asked, until_s = [actor.where.remote() for actor in actors], time.monotonic() + READY_S
    try:
        return [ray.get(one, timeout=max(until_s - time.monotonic(), 0.1)) for one in asked]
    except ray.exceptions.GetTimeoutError:
        raise BenchError(
            f"--ray: not all of {len(actors)} were placed within {READY_S:g} s: other jobs may hold the cluster's cores"
        ) from None
    except ray.exceptions.RayError as e:
        why = str(e).strip().splitlines()[-1][:200]
        raise BenchError(
            f"--ray: a worker cannot start there: {why}; llm-bench has to be installed on every host"
        ) from None
