"""What a gRPC message costs this client, and how late it is stamped, beside a server-sent event over HTTP.

    python -m bench.grpc_path [--streams 1,64,256] [--tokens 40] [--gap-ms 50] [--repeats 3]

A server of its own process writes each token with the time of its writing in it; lateness is the client's stamp minus
that, so the server's own way to the socket is in it: an upper bound. CPU is this process's, reading the answers
included, of the median repeat. Prints a table, and one line of JSON last.
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from statistics import median
from typing import Any

import numpy as np

from llm_bench import answer, clock
from llm_bench.bodies import Ask
from llm_bench.dialects import DIALECTS
from llm_bench.exchange import Exchange, Timeouts
from llm_bench.kserve_messages import FINAL, field, tensor, varint
from llm_bench.request import Request
from llm_bench.targets import Target
from llm_bench.transport import TRANSPORTS, Asked

APIS = {"grpc": "kserve-grpc", "http": "openai-chat"}
SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


# ---- the server


def _message(outputs: Sequence[tuple[str, str, Any]], final: bool) -> bytes:
    tensors = [tensor(name, datatype, [1], [value]) for name, datatype, value in outputs]
    parts = [field(1, "m"), field(4, field(1, FINAL) + field(2, field(1, final)))]
    parts += [field(5, field(1, t.name) + field(2, t.datatype) + field(3, varint(1))) for t in tensors]
    return field(2, b"".join([*parts, *(field(6, t.raw) for t in tensors)]))


async def _paced(tokens: int, gap_s: float) -> AsyncIterator[tuple[str, str]]:
    """(now in ns, finish reason) of each token, each at its own time."""
    begun_s = time.monotonic()
    for k in range(tokens):
        await asyncio.sleep(max(0.0, begun_s + (k + 1) * gap_s - time.monotonic()))
        yield f" {time.monotonic_ns()}", "length" if k == tokens - 1 else ""


async def _serve_grpc(tokens: int, gap_s: float) -> None:
    import grpc
    import grpc.aio

    async def stream(requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for text, finish in _paced(tokens, gap_s):
            counted = ("num_output_tokens", "UINT32", 1)
            yield _message(
                [("text_output", "BYTES", text), ("finish_reason", "BYTES", finish or "None"), counted], False
            )
        yield _message([], True)

    server = grpc.aio.server()
    handlers = {"ModelStreamInfer": grpc.stream_stream_rpc_method_handler(stream)}
    service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers)
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


async def _serve_http(tokens: int, gap_s: float) -> None:
    def chunk(data: str) -> bytes:
        event = f"data: {data}\n\n".encode()
        return b"%x\r\n%b\r\n" % (len(event), event)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # the client leaves
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
                writer.write(SSE_HEAD)
                async for text, finish in _paced(tokens, gap_s):
                    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish or None}
                    writer.write(chunk(json.dumps({"id": "x", "choices": [choice]})))
                writer.write(chunk("[DONE]") + b"0\r\n\r\n")

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# ---- the client


async def _drive(kind: str, port: int, streams: int) -> tuple[list[Any], float]:
    """(lateness in ns of each stream's tokens, CPU seconds) of so many streams at once, on warm connections."""
    row = DIALECTS[APIS[kind]]
    url = f"http://127.0.0.1:{port}" + row.site.base
    sender = TRANSPORTS[row.transport].open(Asked(Target("t", url, api=APIS[kind]), url, row, "m", True, Timeouts()))
    body = row.encode(Request(tokens_in=4, tokens_out=4, prompt="one two three four"), Ask("m"))

    async def wave() -> list[Exchange]:
        payloads = [TRANSPORTS[row.transport].frame(f"r-{k}", body) for k in range(streams)]
        return list(await asyncio.gather(*map(sender.send, payloads)))

    await wave()
    begun_s = time.process_time()
    exchanges = await wave()
    late = [_late_ns(exchange, kind) for exchange in exchanges]  # in the CPU too, as a run's clerk reads them
    cpu_s = time.process_time() - begun_s
    sender.close()
    await asyncio.sleep(0)
    return late, cpu_s


def _late_ns(exchange: Exchange, kind: str) -> Any:
    got = answer.read(exchange, DIALECTS[APIS[kind]], streamed=True, asked_out=None, pinned=False)
    assert got.outcome == "ok", got.error
    return np.array(got.event_ns) - np.array([int(word) for word in got.text.split()])


def measure(kind: str, streams: int, tokens: int, gap_ms: float, repeats: int) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "bench.grpc_path",
        "--serve",
        kind,
        "--tokens",
        str(tokens),
        "--gap-ms",
        str(gap_ms),
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        port = int(server.stdout.readline())
        runs = [clock.run(_drive(kind, port, streams)) for _ in range(repeats)]
    finally:
        server.kill()
        server.wait()
        assert server.stdout
        server.stdout.close()
    late_ms = np.concatenate([one for late, _ in runs for one in late]) / 1e6
    return {
        "over": kind,
        "streams": streams,
        "cpu_us_a_token": median(cpu_s for _, cpu_s in runs) / (streams * tokens) * 1e6,
        **{f"late_p{q}_ms": float(np.percentile(late_ms, q)) for q in (50, 95, 99)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", default="1,64,256")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--gap-ms", type=float, default=50.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--serve", choices=list(APIS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve = _serve_grpc if asked.serve == "grpc" else _serve_http
        asyncio.run(serve(asked.tokens, asked.gap_ms / 1e3))
        return
    counts = [int(word) for word in asked.streams.split(",")]
    rows = [measure(kind, n, asked.tokens, asked.gap_ms, asked.repeats) for n in counts for kind in APIS]
    print(f"{'over':6}{'streams':>8}{'CPU us a token':>16}{'late p50 ms':>13}{'p95':>8}{'p99':>8}")
    for row in rows:
        late = [row[f"late_p{q}_ms"] for q in (50, 95, 99)]
        print(
            f"{row['over']:6}{row['streams']:>8}{row['cpu_us_a_token']:>16.0f}{late[0]:>13.2f}{late[1]:>8.2f}{late[2]:>8.2f}"
        )
    print(json.dumps({"bench": "grpc_path", "tokens": asked.tokens, "gap_ms": asked.gap_ms, "rows": rows}))


if __name__ == "__main__":
    main()
