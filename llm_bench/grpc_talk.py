"""What a gRPC target is asked before any load: an httpx transport, so that probes ask it as they ask any other.

The pages of KServe's HTTP protocol are answered by the calls of the same meaning, an inference by its own call, whose
answer has the frames and stamps that `grpc_wire` gives a measured one.
"""

import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import orjson

from llm_bench import grpc_wire
from llm_bench.errors import TargetError
from llm_bench.grpc_frames import GRPC_STATUS, Status, frame, status_frame
from llm_bench.kserve_messages import field, model_metadata, repository_index, server_metadata, server_ready

SERVICE = "/inference.GRPCInferenceService/"
HANDSHAKE_S = 2.0  # for connecting, and for each word of the server's
_MODEL = "/v2/models/"


class _Page(NamedTuple):
    method: str  # of the service
    read: Callable[[bytes], Any]  # the answer as the page's JSON


_PAGES = {
    "/v2": _Page("ServerMetadata", server_metadata),
    "/v2/health/live": _Page("ServerLive", server_ready),
    "/v2/health/ready": _Page("ServerReady", server_ready),
    "/v2/repository/index": _Page("RepositoryIndex", repository_index),
}
_MODEL_PAGE = _Page("ModelMetadata", model_metadata)


class GrpcPages(httpx.BaseTransport):
    """`name` and `url` are the target's; `headers` go as metadata. Raises BenchError as GrpcWire does."""

    def __init__(
        self,
        name: str,
        url: str,
        headers: Sequence[tuple[str, str]],
        cafile: str = "",
        certificate: str = "",
        key: str = "",
    ) -> None:
        grpc = grpc_wire.library()
        address, secure = grpc_wire.address_of(url)
        args = grpc_wire.options(None)
        self._grpc, self._name, self._url = grpc, name, url
        self._files = (cafile, certificate, key) if secure else None
        self._metadata = grpc_wire.metadata_of(headers)
        if secure:
            trust = grpc_wire.credentials(cafile, certificate, key)
            self._channel = grpc.secure_channel(address, trust, args)
        else:
            self._channel = grpc.insecure_channel(address, args)

    def close(self) -> None:
        self._channel.close()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Raises httpx.TransportError where the connection failed, or nothing came in time."""
        path = request.url.path.rstrip("/")
        limit_s = request.extensions.get("timeout", {}).get("read")
        if path.startswith(SERVICE):
            return self._infer(path, request.read(), limit_s)
        page, message = _PAGES.get(path), b""
        if path.startswith(_MODEL) and path.count("/") == 3:
            page, message = _MODEL_PAGE, field(1, request.url.path.removeprefix(_MODEL))
        if page is None:
            return httpx.Response(404, json={"error": f"{path} is not a call of KServe's gRPC service"})
        answers = self._messages(SERVICE + page.method, message, limit_s)
        try:
            said = page.read(b"".join(answers))
        except _CallError as e:
            return httpx.Response(e.status, json=Status(e.code, e.text).page)
        except ValueError as e:
            return httpx.Response(502, json={"error": f"{page.method}: {e}"})
        if said is False:
            return httpx.Response(503, json={"error": f"{page.method} says no"})
        return httpx.Response(200, content=orjson.dumps(said), headers={"Content-Type": "application/json"})

    def _infer(self, path: str, message: bytes, limit_s: float | None) -> httpx.Response:
        """As the messages come: the HTTP status is known with the first, or with the end of a call without one."""
        messages = self._messages(path, message, limit_s)
        try:
            first = [next(messages)]
        except StopIteration:
            first = []
        except _CallError as e:
            # A stream, which is read once as it comes: httpx has read `content` already, and would refuse.
            return httpx.Response(e.status, headers=_CHUNKED, stream=httpx.ByteStream(status_frame(e.code, e.text)))
        return httpx.Response(200, headers=_CHUNKED, stream=_Frames(first, messages))

    def _messages(self, path: str, message: bytes, limit_s: float | None) -> Iterator[bytes]:
        """Raises _CallError where the server ends the call with an error, httpx.TransportError where nobody does."""
        try:
            yield from self._channel.unary_stream(path)(message, metadata=self._metadata, timeout=limit_s)
        except self._grpc.RpcError as e:
            code, text = int(e.code().value[0]), e.details() or ""
            if code != _DEADLINE_EXCEEDED and not grpc_wire.connection_failed(code, text):
                raise _CallError(code, text) from None
            if code == _DEADLINE_EXCEEDED:
                raise httpx.ReadTimeout(f"no answer within {limit_s:g} s") from None
            if "refused" not in text and (grpc_wire.is_no_grpc(text) or _answers_http(self._url)):
                raise TargetError(
                    f"target {self._name}: {self._url} speaks HTTP/1.1, no gRPC: give the port of its gRPC server "
                    "(Triton's is 8001, MLServer's 8081), or --api kserve-http"
                ) from None
            said = _handshake(self._url, *self._files) if self._files else ""
            raise httpx.ConnectError(f"{GRPC_STATUS[code][0]}: {said or text}") from None


def _answers_http(url: str) -> bool:
    """Some servers of HTTP/1.1 close at once when they are spoken to in HTTP/2."""
    try:
        httpx.get(url, timeout=2.0, verify=False, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    return True


def _handshake(url: str, cafile: str, certificate: str, key: str) -> str:
    """How a server ends TLS, in OpenSSL's words; "" where it does not end it.

    grpcio tells of the last address that it tried, which may be another one, and of no alert.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        context = ssl.create_default_context(cafile=cafile or None)
        context.set_alpn_protocols(["h2"])
        if certificate:
            context.load_cert_chain(certificate, key, password=lambda: "")  # a terminal is not asked for one
        with (
            socket.create_connection((host, parts.port or 443), HANDSHAKE_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            # What a server thinks of our certificate comes after the handshake (TLS 1.3), or its settings do.
            return "" if secure.recv(1) else "Socket closed after the handshake"
    except (ssl.SSLError, ConnectionResetError) as e:
        return str(e)
    except (OSError, ValueError):
        return ""


_DEADLINE_EXCEEDED = 4
_CHUNKED = {"Transfer-Encoding": "chunked"}  # the status frame proves that the answer is whole, as a last chunk does


class _CallError(Exception):
    """The server's own end of a call that failed."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text
        self.name, self.status = GRPC_STATUS.get(code, (str(code), 500))


class _Frames(httpx.SyncByteStream):
    """Each message in its frame, and the status as the last frame."""

    def __init__(self, first: list[bytes], rest: Iterator[bytes]) -> None:
        self._first, self._rest = first, rest

    def __iter__(self) -> Iterator[bytes]:
        yield from map(frame, self._first)
        try:
            for message in self._rest:
                yield frame(message)
        except _CallError as e:
            yield status_frame(e.code, e.text)
        else:
            yield status_frame(0, "")
