"""Clients that come and go at random, for minutes: memory must stay, every seat and block come back, no answer suffer.

`python -m bench.endurance` starts `python -m reference_engine` and lets 500 clients at it, each for one request after
another: half of them stay to the end and check every byte, the others leave in their connect, in the queue, within the
headers or after some tokens, by close or by reset. Exit code 1 if an answer was wrong, anything was not given back, or
memory grew more than what is allowed for.
"""

import argparse
import asyncio
import json
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LINGER_0 = struct.pack("ii", 1, 0)  # close sends a reset
STAYS = 0.5  # of requests
SETTLE_S = 10.0  # that the engine may take to notice the last who left
# Resident memory may rise so much after the warm-up: an allocator's rest, not what clients leave. A leak of one
# sequence (some kB) by each of the thousands that came would be over it within a minute.
GROWTH_BYTES = 20 * 2**20
WAYS = ("connect", "headers", "tokens")  # how far one that leaves comes


class Found(NamedTuple):
    outcomes: dict[str, int]
    rss_before_bytes: int  # after a first wave, as large as all that follow
    rss_after_bytes: int
    free_blocks: int
    num_blocks: int
    check: str  # the engine's own of its invariants
    wrong: list[str]  # what answers that were read to their end had in them that they should not, at most 10

    @property
    def faults(self) -> list[str]:
        grown, missing = self.rss_after_bytes - self.rss_before_bytes, self.num_blocks - self.free_blocks
        found = (
            (grown > GROWTH_BYTES, f"memory grew by {grown / 2**20:.1f} MiB"),
            (missing != 0, f"{missing} blocks are missing"),
            (self.check != "ok", f"check: {self.check}"),
        )
        return [*self.wrong, *(text for is_so, text in found if is_so)]


class Client:
    """Everything that the clients share."""

    def __init__(self, port: int, tokens: int) -> None:
        self.port = port
        self.tokens = tokens
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def one(self, random: np.random.Generator) -> None:
        """A request of which this client sees as much as it wants to."""
        way = "stays" if random.random() < STAYS else str(random.choice(WAYS))
        whole = way != "tokens" and random.random() < 0.2
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError as error:
            self._note("no connection", str(error))
            return
        try:
            if way != "connect":
                writer.write(self._request(random, whole))
            if way == "headers":
                await asyncio.sleep(float(random.random()) * 0.02)
            elif way == "tokens":
                for _ in range(int(random.integers(1, self.tokens))):
                    await reader.readuntil(b'"choices"')
            elif way == "stays":
                self._judge(await reader.read(-1), whole)
            self.outcomes[way] += 1
        except (OSError, asyncio.IncompleteReadError) as error:
            self._note("broken off", repr(error))
        finally:
            _leave(writer, bool(random.random() < 0.5))

    def _request(self, random: np.random.Generator, whole: bool) -> bytes:
        prompt = [1 + int(random.integers(200)) for _ in range(int(random.integers(1, 40)))]
        body = json.dumps({"prompt": prompt, "max_tokens": self.tokens, "stream": not whole, "ignore_eos": True})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        return (head + body).encode()

    def _judge(self, answer: bytes, whole: bool) -> None:
        """An answer that was read to its end."""
        if whole:
            good = answer.startswith(b"HTTP/1.1 200") and b'"completion_tokens":%d,' % self.tokens in answer
        else:
            good = answer.count(b'"choices"') == self.tokens and answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        if not good:
            self._note("wrong", f"{answer[:40]!r} ... {answer[-60:]!r}")

    def _note(self, outcome: str, text: str) -> None:
        self.outcomes[outcome] += 1
        self.wrong = [*self.wrong, f"{outcome}: {text}"][:10]


def _leave(writer: asyncio.StreamWriter, reset: bool) -> None:
    if reset and (sock := writer.get_extra_info("socket")):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)
        writer.transport.abort()
    else:
        writer.close()


async def endure(port: int, pid: int, clients: int, seconds: float, tokens: int, seed: int = 0) -> Found:
    """Let `clients` at the engine for a warm-up wave of one request each, then for `seconds`."""
    client = Client(port, tokens)
    randoms = [np.random.Generator(np.random.PCG64(s)) for s in np.random.SeedSequence(seed).spawn(clients)]
    await asyncio.gather(*(client.one(random) for random in randoms))
    await _settled(port)
    before = _rss(pid)
    deadline = time.monotonic() + seconds

    async def keep(random: np.random.Generator) -> None:
        while time.monotonic() < deadline:
            await client.one(random)

    await asyncio.gather(*map(keep, randoms))
    state = await _settled(port)
    return Found(
        dict(client.outcomes), before, _rss(pid), state["free_blocks"], state["config"]["num_blocks"],
        str(state["check"]), client.wrong,
    )  # fmt: skip


async def _settled(port: int) -> dict[str, Any]:
    """The engine's state once it has noticed who left; after SETTLE_S as it is then."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/engine HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        state: dict[str, Any] = json.loads((await reader.read(-1)).partition(b"\r\n\r\n")[2])
        writer.close()
        if not (state["running"] or state["waiting"]) or time.monotonic() > deadline:
            return state
        await asyncio.sleep(0.05)


def _rss(pid: int) -> int:
    """0 where there is no /proc."""
    try:
        return int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0]) * 1024
    except OSError:
        return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.endurance", description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--tokens", type=int, default=20, help="of each answer")
    options = parser.parse_args(argv)
    command = [sys.executable, "-m", "reference_engine", "--model", options.model, "--port", "0", "--exit-with-stdin"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as engine:
        assert engine.stdin and engine.stdout
        try:
            port = int(json.loads(engine.stdout.readline())["listening"].split(":")[2].split("/")[0])
            found = asyncio.run(endure(port, engine.pid, options.clients, options.seconds, options.tokens))
        finally:
            engine.stdin.close()
    print(f"{sum(found.outcomes.values())} requests of {options.clients} clients: {found.outcomes}")
    print(f"resident {found.rss_before_bytes / 2**20:.1f} -> {found.rss_after_bytes / 2**20:.1f} MiB, "
          f"{found.free_blocks} of {found.num_blocks} blocks free, check {found.check}")  # fmt: skip
    for fault in found.faults:
        print(f"FAULT {fault}")
    return int(bool(found.faults))


if __name__ == "__main__":
    sys.exit(main())
