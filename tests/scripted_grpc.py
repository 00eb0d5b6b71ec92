"""A gRPC server on a real socket that does what a script says, for any method of any service.

    def answer(number: int, seen: Seen) -> Script:      # number: 0 for the first call the server ever saw
        return [(20, text("a")), (40, text("b", "length")), (40, FINAL_MESSAGE)]

    with ScriptedGrpc(answer) as server:                 # or ScriptedGrpc([...]): the same script for every call
        ... server.url ...                               # http://127.0.0.1:PORT
    server.calls, server.cancelled

A script is a list of (at_ms, message bytes), at_ms after the request was read; a last item (at_ms, Status(...)) ends
the call with an error, else it ends well. Import this after pytest.importorskip("grpc").
"""

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple

import grpc

from llm_bench.grpc_frames import Status
from llm_bench.kserve_messages import FINAL, field, tensor, varint


class Seen(NamedTuple):
    method: str  # with its service
    metadata: dict[str, str]
    request: bytes
    peer: str  # the connection's other end


Script = Sequence[tuple[float, bytes | Status]]
Answer = Script | Callable[[int, Seen], Script]


def response(outputs: Sequence[Any] = (), final: bool | None = None) -> bytes:
    """ModelInferResponse with raw outputs."""
    parts = [field(1, "llm"), field(2, "1"), field(3, "r-0")]
    if final is not None:
        parts.append(field(4, field(1, FINAL) + field(2, field(1, final))))
    for one in outputs:
        shape = b"".join(map(varint, one.shape))
        parts.append(field(5, field(1, one.name) + field(2, one.datatype) + field(3, shape)))
    return b"".join([*parts, *(field(6, one.raw) for one in outputs)])


def text(said: str, finish: str = "None", prompt_tokens: int = 3, tokens: int = 1) -> bytes:
    """A stream's message as Triton's vLLM backend has it."""
    outputs = [
        tensor("text_output", "BYTES", [1], [said]),
        tensor("finish_reason", "BYTES", [1], [finish]),
        tensor("num_input_tokens", "UINT32", [1], [prompt_tokens]),
        tensor("num_output_tokens", "UINT32", [1], [tokens]),
    ]
    return field(2, response(outputs, final=False))


FINAL_MESSAGE = field(2, response(final=True))


def error(said: str) -> bytes:
    """A stream's message that says an error."""
    return field(1, said) + field(2, field(3, "r-0"))


class ScriptedGrpc:
    """The server of this module's docstring; `with ScriptedGrpc(script) as server`."""

    def __init__(self, script: Answer, credentials: Any = None, threads: int = 8, port: int = 0) -> None:
        self._script, self._lock = script, threading.Lock()
        self.calls: list[Seen] = []
        self.cancelled = threading.Event()  # some client has left before its answer's end
        self._server = grpc.server(ThreadPoolExecutor(threads), handlers=[_Any(self)])
        if credentials is None:
            self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
            self.url = f"http://127.0.0.1:{self.port}"
        else:
            self.port = self._server.add_secure_port("127.0.0.1:0", credentials)
            self.url = f"https://localhost:{self.port}"

    def __enter__(self) -> "ScriptedGrpc":
        self._server.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, _: TracebackType | None) -> None:
        self._server.stop(0).wait()

    def handle(self, method: str, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        request = next(requests, b"")
        begun_s = time.monotonic()
        seen = Seen(method, dict(context.invocation_metadata()), request, context.peer())
        with self._lock:
            number = len(self.calls)
            self.calls.append(seen)
        left = threading.Event()
        context.add_callback(left.set)
        for at_ms, what in self._script(number, seen) if callable(self._script) else self._script:
            if left.wait(max(0.0, begun_s + at_ms / 1e3 - time.monotonic())):
                self.cancelled.set()
                return
            if isinstance(what, Status):
                context.abort(next(code for code in grpc.StatusCode if code.value[0] == what.code), what.text)
            yield what


class _Any(grpc.GenericRpcHandler):
    def __init__(self, server: ScriptedGrpc) -> None:
        self._server = server

    def service(self, details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(
            lambda requests, context: self._server.handle(details.method, requests, context)
        )


SERVICE = "/inference.GRPCInferenceService/"
_ASKED = re.compile(rb'"max_tokens":(\d+)')
TEXT_INPUTS = ("text_input", "stream", "sampling_parameters", "return_finish_reason", "return_num_output_tokens")


def described(inputs: Sequence[tuple[str, str, Sequence[int]]]) -> bytes:
    """ModelMetadataResponse."""
    rows = (
        field(1, name) + field(2, datatype) + field(3, b"".join(map(varint, shape))) for name, datatype, shape in inputs
    )
    return field(1, "llm") + b"".join(field(4, row) for row in rows)


def serve(key: str = "", models: Sequence[str] = ("llm",)) -> Callable[[int, Seen], Script]:
    """A good server of KServe v2: a decoupled model `llm`, and one of a single pass by every other name."""
    texts = [(n, "BYTES" if n in ("text_input", "sampling_parameters") else "BOOL", [1]) for n in TEXT_INPUTS]
    index = b"".join(field(1, field(1, name) + field(3, "READY")) for name in models)

    def answer(number: int, seen: Seen) -> Script:
        method = seen.method.removeprefix(SERVICE)
        if key and seen.metadata.get("authorization") != f"Bearer {key}":
            return [(0, Status(16, "no key"))]
        if method == "ServerMetadata":
            return [(0, field(1, "triton") + field(2, "2.51.0"))]
        if method == "RepositoryIndex":
            return [(0, index)]
        if method.startswith("Model") and not any(name.encode() in seen.request for name in models):
            return [(0, Status(5, "no such model"))]
        if method == "ModelMetadata":
            return [(0, described(texts if b"llm" in seen.request else [("IN", "FP32", [-1, 4])]))]
        if method == "ModelInfer":
            return [(0, response([tensor("OUT", "FP32", [1, 1], [0.5])]))]
        if method == "ModelStreamInfer":
            tokens = int(found[1]) if (found := _ASKED.search(seen.request)) else 32
            many = [(0.0, text("w", "length" if k == tokens - 1 else "None")) for k in range(tokens)]
            return [*many, (0, FINAL_MESSAGE)]
        return [(0, Status(12, ""))]

    return answer
