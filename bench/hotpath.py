"""What a token event costs on our way from socket to disk: processor time of each stage, and Python calls.

    python -m bench.hotpath [--events 128] [--answers 64] [--repeats 7]

For answers that come in one read, and for one read an event. Prints a table, and one line of JSON last.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llm_bench import answer, clock
from llm_bench.cell import Cell, Options
from llm_bench.connection import Connection
from llm_bench.dialects import DIALECTS, Ask
from llm_bench.exchange import COMPLETE, Exchange, Timeouts
from llm_bench.flights import Flight
from llm_bench.http1 import Response
from llm_bench.plan import Load
from llm_bench.probe import Probe
from llm_bench.records import Writer
from llm_bench.request import Request
from llm_bench.retry import Tried
from llm_bench.targets import Target
from llm_bench.wire import Wire

URL = "http://127.0.0.1:1/v1"  # never connected to
DIALECT = DIALECTS["openai-chat"]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
STAGES = {  # name -> what is in it
    "read": "data_received: HTTP framing, stamps, the first-token look",
    "framing": "  of it: HTTP framing",
    "record": "Cell.record: the answer read, the row made",
    "events": "  of it: SSE framing, JSON to text, counting",
    "outcome": "  of it: what it amounts to",
    "row": "  of it: the Record",
    "flush": "Arrow flush to disk",
    "total": "total: read + record + flush",
}


def _event(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


def reads_of(tokens: int, one_event: bool) -> list[bytes]:
    """An answer as a server of the field sends it; in one read, or one event a read."""
    said = [_event({"role": "assistant", "content": ""}), *[_event({"content": " word"})] * tokens]
    said.append(_event({}, "length"))
    usage = {"prompt_tokens": 32, "completion_tokens": tokens, "total_tokens": 32 + tokens}
    data = [*(json.dumps(e) for e in said), json.dumps({**_event({}), "choices": [], "usage": usage}), "[DONE]"]
    chunks = [b"%x\r\n%b\r\n" % (len(e), e) for e in (f"data: {d}\n\n".encode() for d in data)]
    parts = [HEAD + chunks[0], *chunks[1:-1], chunks[-1] + b"0\r\n\r\n"]
    return parts if one_event else [b"".join(parts)]


class _NoSocket:
    """The transport of a connection that is fed by hand."""

    def write(self, data: bytes) -> None: ...
    def abort(self) -> None: ...
    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False


class Way:
    """One answer's way, stage by stage. Needs a running loop."""

    def __init__(self, tokens: int, one_event: bool, folder: Path) -> None:
        self.tokens, self.reads = tokens, reads_of(tokens, one_event)
        self.wire = Wire(URL, DIALECT.path, [], Timeouts(), DIALECT.is_token)
        self.connection = Connection(self.wire.pool)
        self.connection.transport = _NoSocket()  # type: ignore[assignment]
        ask = Ask("m")
        found = Probe(
            models=["m"], model="m", max_model_len=None, usage_in_stream=True, lengths_pinned=True,
            finish_reason_seen=True, cached_reported=False, ask=ask, base_tokens=0.0, tokens_per_word=1.0, rtt_ms=None,
            connect_ms=None, ttft_ms=None, tpot_ms=None, alone_ms=1.0, alone_tokens=1, notes=[],
        )  # fmt: skip
        requests = [Request(32, tokens)]
        self.cell = Cell(Options(folder), "run", 0, Target("t", URL), found, requests, Load(concurrency=1))
        self.writer = Writer(folder / f"{one_event}.arrow", {}, now=lambda: 0.0)  # flushed when told to

    def asked(self) -> Exchange:
        exchange = Exchange()
        self.connection.ask(b"", exchange, None)
        return exchange

    def read(self) -> None:
        received = self.connection.data_received
        for data in self.reads:
            received(data)

    def answered(self) -> Exchange:
        exchange = self.asked()
        self.read()
        assert exchange.ended == COMPLETE, exchange.error
        self.wire.pool.idle.clear()
        return exchange

    def flight(self) -> Flight:
        exchange = self.answered()
        return Flight(0, 1, 1, Tried(exchange, 1, exchange, 0))

    def frame(self, response: Response) -> None:
        for data in self.reads:
            response.feed(data)

    def events(self, exchange: Exchange) -> None:
        answer.read_body(exchange, DIALECT, streamed=True)

    def understand(self, exchange: Exchange) -> None:
        got = answer.read(exchange, DIALECT, streamed=True, asked_out=self.tokens, pinned=True)
        assert got.outcome == "ok" and len(got.event_ns) == self.tokens, got

    def record(self, flight: Flight) -> None:
        self.writer.write(self.cell.record(flight))


def nanoseconds(way: Way, answers: int, repeats: int) -> dict[str, float]:
    """Of each stage per token event: the least of `repeats` sums over `answers`, since noise only adds."""

    def least(make: Callable[[], Any], work: Callable[[Any], None]) -> float:
        best = float("inf")
        for _ in range(repeats):
            spent = 0
            for _ in range(answers):
                what = make()
                begun = time.thread_time_ns()
                work(what)
                spent += time.thread_time_ns() - begun
                way.wire.pool.idle.clear()
            best = min(best, spent)
        return best / (answers * way.tokens)

    exchange = way.answered()
    found = {"read": least(way.asked, lambda _: way.read()), "framing": least(Response, way.frame)}
    found["events"] = least(lambda: exchange, way.events)
    understood = least(lambda: exchange, way.understand)
    found["record"] = least(way.flight, way.record)
    found["outcome"] = understood - found["events"]  # differences of bests: noise can make them small
    found["row"] = found["record"] - understood
    way.writer.flush()

    def pending() -> None:
        for _ in range(answers):
            way.record(way.flight())

    flushes = []
    for _ in range(repeats):
        pending()
        begun = time.thread_time_ns()
        way.writer.flush()
        flushes.append(time.thread_time_ns() - begun)
    found["flush"] = min(flushes) / (answers * way.tokens)
    found["total"] = found["read"] + found["record"] + found["flush"]
    return {name: found[name] for name in STAGES}


def calls(way: Way) -> dict[str, float]:
    """Python functions entered per token event, from the first byte read to the record written; C functions beside."""
    counts = {"call": 0, "c_call": 0}

    def seen(frame: object, event: str, argument: object) -> None:
        if event in counts:
            counts[event] += 1

    way.record(way.flight())  # what happens only once happens here
    exchange = way.asked()
    sys.setprofile(seen)
    way.read()
    way.record(Flight(0, 1, 1, Tried(exchange, 1, exchange, 0)))
    sys.setprofile(None)
    way.wire.pool.idle.clear()
    return {"python_calls": counts["call"] / way.tokens, "c_calls": counts["c_call"] / way.tokens}


async def measure(tokens: int, answers: int, repeats: int, folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {"events": tokens, "answers": answers, "repeats": repeats}
    for name, one_event in (("whole", False), ("one_event", True)):
        way = Way(tokens, one_event, folder)
        facts[name] = calls(way) | {f"{k}_ns": round(v, 1) for k, v in nanoseconds(way, answers, repeats).items()}
        way.writer.close()
    return facts


def show(facts: dict[str, Any]) -> str:
    lines = [f"{'ns per token event':58}   whole answer      one event", f"{'':58}{'a read':>15}{'a read':>15}"]
    rows = [(f"{key}_ns", what, 0) for key, what in STAGES.items()]
    rows += [("python_calls", "Python functions entered per token event", 2)]
    rows += [("c_calls", "C functions called per token event", 2)]
    lines += [f"{what:58}{facts['whole'][key]:15.{n}f}{facts['one_event'][key]:15.{n}f}" for key, what, n in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.hotpath", description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, default=128, help="token events of an answer")
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        facts = clock.run(measure(asked.events, asked.answers, asked.repeats, Path(folder)))
    print(show(facts))
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
