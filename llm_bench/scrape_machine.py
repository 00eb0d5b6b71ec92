"""Readers of the machine that a scrape runs on: CPU time of it and of a local server's processes, NVML's figures.

NVML by nvidia-ml-py (`gpu` extra); not tried on a real GPU yet.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from llm_bench.errors import BenchError
from llm_bench.server_metrics import Values


def host_reader(port: int) -> Callable[[], Values]:
    """CPU time of the machine and, where a server listens on `port` of its loopback, of its processes. Linux alone."""
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    listeners = listening(port) if port else []

    def read() -> Values:
        user, nice, system, _, _, irq, soft, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
        found = {"host:cpu_s": (user + nice + system + irq + soft) * tick_s}
        if listeners:
            cpu, pages = 0, 0
            for stat in _with_children(listeners):
                # 14 utime, 15 stime, 16 and 17 those of children that have ended, 24 rss; counted from 1.
                cpu += sum(map(int, stat[11:15]))
                pages += int(stat[21])
            found |= {"host:server_cpu_s": cpu * tick_s, "host:server_rss_bytes": float(pages * page_bytes)}
        return found

    return read


def listening(port: int) -> list[int]:
    """The processes of ours that listen on a TCP port of this machine; none where they are another user's."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for row in Path(table).read_text().splitlines()[1:]:
                fields = row.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:  # 0A: listening
                    sockets.add(f"socket:[{fields[9]}]")
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is not ours
            if any(os.readlink(fd) in sockets for fd in (folder / "fd").iterdir()):  # noqa: PTH115
                found.append(int(folder.name))
    return found


def _with_children(roots: Sequence[int]) -> list[list[str]]:
    """/proc/PID/stat of the processes and all that they have started, from the third field on."""
    stats: dict[int, list[str]] = {}
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()  # a name may hold blanks
            stats[int(folder.name)] = fields
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found: dict[int, list[str]] = {}
    left = list(roots)
    while left:
        pid = left.pop()
        if pid in stats and pid not in found:
            found[pid] = stats[pid]
            left += children.get(pid, [])
    return list(found.values())


def gpu_reader() -> Callable[[], Values]:
    """NVML's figures of every GPU of this machine. Raises BenchError without nvidia-ml-py, a driver or a GPU."""
    try:
        import pynvml
    except ImportError:
        raise BenchError("--gpu needs nvidia-ml-py: in the project's folder, pip install '.[gpu]'") from None
    try:
        pynvml.nvmlInit()
        handles = list(_handles(pynvml))
    except pynvml.NVMLError as e:
        raise BenchError(f"--gpu: NVML: {e}; expected an NVIDIA driver on this machine") from None
    if not handles:
        raise BenchError("--gpu: NVML finds no GPU on this machine that this user may read")

    def read() -> Values:
        found = {number: _gpu(pynvml, number, handle) for number, handle in handles}
        for metric in OF_ALL:  # the energy of some GPUs would pass for that of all
            if any(metric not in of for of in found.values()):
                for of in found.values():
                    of.pop(metric, None)
        if not any(found.values()):
            raise ValueError(f"NVML: its {len(found)} GPUs tell nothing of what is read here")
        return {f'{metric}{{gpu="{number}"}}': value for number, of in found.items() for metric, value in of.items()}

    return read


def _handles(pynvml: Any) -> Iterator[tuple[int, Any]]:
    """(number, handle) of every GPU that this user may read: NVML counts those of others too."""
    for number in range(pynvml.nvmlDeviceGetCount()):
        with suppress(pynvml.NVMLError_NoPermission):
            yield number, pynvml.nvmlDeviceGetHandleByIndex(number)


def _gpu(pynvml: Any, number: int, handle: Any) -> Values:
    """A GPU's figures, as far as it has them. Raises ValueError where it fails, as one that fell off the bus does."""
    found: Values = {}
    for figures in _FIGURES:
        try:
            found |= figures(pynvml, handle)
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission):
            pass  # this one is not to be had: no use under MIG, no energy before Volta
        except pynvml.NVMLError as e:
            raise ValueError(f"NVML: GPU {number}: {e}") from None
    return found


def _use(pynvml: Any, handle: Any) -> Values:
    use = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return {"nvml:busy": use.gpu / 100, "nvml:memory_busy": use.memory / 100}


def _memory(pynvml: Any, handle: Any) -> Values:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return {"nvml:memory_used": memory.used / memory.total}


def _power(pynvml: Any, handle: Any) -> Values:
    return {"nvml:power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3}


def _energy(pynvml: Any, handle: Any) -> Values:
    return {"nvml:energy_j": pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3}


_FIGURES: tuple[Callable[[Any, Any], Values], ...] = (_use, _memory, _power, _energy)
OF_ALL = ("nvml:power_w", "nvml:energy_j")  # sums over GPUs: said where every one of them has it
