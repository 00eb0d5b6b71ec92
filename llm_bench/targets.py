"""What is measured: names, URLs and targets.toml -> Target, checked; keys that are never shown; servers of our own."""

import json
import os
import re
import select
import socket
import ssl
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson

from llm_bench import proxy
from llm_bench.dialect_http import check as check_http
from llm_bench.dialects import DIALECTS, Dialect, spoken
from llm_bench.errors import BenchError, TargetError
from llm_bench.proxy import Proxy

# Targets that need no server of the user's: each is a process of its own that says on stdout where it listens.
_ENGINE = ("-m", "reference_engine", "--port", "0", "--exit-with-stdin")
BUILT_IN: dict[str, tuple[str, ...]] = {
    "reference": _ENGINE,
    # The same engine by how it batches, for a lesson in one command: --targets static,dynamic,continuous
    "static": (*_ENGINE, "--batching", "static"),
    "dynamic": (*_ENGINE, "--batching", "dynamic"),
    "continuous": (*_ENGINE, "--batching", "continuous"),
    "null": ("-m", "llm_bench.null_target", "--port", "0", "--exit-with-stdin"),
}
ENGINE_NEEDS = ("torch", "aiohttp", "prometheus_client")
BUILT_IN_READY_S = 120.0  # importing torch on a busy machine takes tens of seconds
MAX_MODEL_LEN = 10**8  # ten times the longest context of today
HIDDEN = "[key]"  # stands where a secret stood
_PORTS = {"http": 80, "https": 443}
LEAST_SECRET = 6  # characters: a shorter value stands in ordinary text by chance
_NAME = re.compile(r"[\w.:\[\]-]+", re.A)  # it becomes part of file names
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110 5.6.2
_VERSION = re.compile(r"/v\d+$")
_OURS = {"content-length", "transfer-encoding", "connection", "host", "x-request-id"}  # headers that we must decide


@dataclass(frozen=True)
class Target:
    """One server, as the user declares it. A key is named by its environment variable and never held here."""

    name: str
    url: str = ""  # before a dialect's paths, e.g. http://127.0.0.1:8000/v1; several with | are asked in turn
    api: str = "openai-chat"  # a row of DIALECTS
    model: str = ""  # "": the first that /models lists
    key_env: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    tokenizer: str = ""  # path of a tokenizer.json
    max_model_len: int = 0  # 0: as probed
    # What is measured, as declared; what a server says otherwise is refused by the probe.
    revision: str = ""  # of the model
    engine_version: str = ""
    precision: str = ""
    image: str = ""  # of the container, best with its digest
    extra: Mapping[str, Any] = field(default_factory=dict)  # into every request's body
    http: Mapping[str, str] = field(default_factory=dict)  # of api http: what is said and how an answer is read
    cafile: str = ""  # https with a private authority
    insecure: bool = False  # https with any certificate
    cert: str = ""  # PEM file of this client's own certificate, for https that asks for one (mTLS)
    key: str = ""  # PEM file of its private key, where that is not in `cert`; no API key
    proxy: str = ""  # URL of an HTTP proxy, "env": as the environment says, "none": straight; "": nothing was asked
    metrics: str = ""  # URL of its metrics, several with | between them; "auto": /metrics at the root of each URL
    management: str = ""  # URL of its management API, where its protocol has one; "": that protocol's port, same host
    launch: tuple[str, ...] = ()  # arguments of a server of ours

    @property
    def urls(self) -> list[str]:
        return [url.strip().rstrip("/") for url in self.url.split("|")]

    @property
    def dialect(self) -> Dialect:
        """How it is spoken to; of a checked target."""
        return spoken(self.api, self.http)

    def public(self) -> dict[str, Any]:
        """As stored in headers: header values may be secrets, their names are not; a proxy without its user."""
        return asdict(self) | {"headers": sorted(self.headers), "proxy": self.by_proxy()}

    def by_proxy(self) -> str:
        """What is asked through, in words without a secret; "" where the way is straight."""
        ways = [proxy_of(self, url) for url in self.urls]
        shown = [f"{p.shown} ({p.variable})" if p and p.variable else p.shown if p else "none" for p in ways]
        return ", ".join(dict.fromkeys(shown)) if any(ways) else ""


def names(file: Path) -> list[str]:
    """Of every target that can be given by its name alone. Raises BenchError as `parse` does."""
    return list(dict.fromkeys([*(_declared(file) if file.exists() else {}), *BUILT_IN]))


def parse(spec: str, file: Path, flags: Mapping[str, Any]) -> list[Target]:
    """`vllm,mine=http://host:8000/v1,reference` -> Targets; bare names are looked up in `file` or built in.

    `a=vllm` is the target vllm under another name, and a server of its own where it is built in.

    `flags` are fields given on the command line: they hold for every target, over what the file declares.

    Raises BenchError for an unknown name, a URL that is none, an unknown api or key, an environment that names a proxy
    which nobody asked for. What may be a key is not repeated.
    """
    targets = [_checked(target) for target in _named(spec, file, flags)]
    for target in targets:
        _check_secrets(target)
        _check_proxy(target)
    return targets


def listing(file: Path) -> list[str]:
    """A line for every target that can be given by its name alone; a key that is not set is said, and no error.

    Raises BenchError as `parse` does for all else that is wrong with a declaration.
    """
    lines = []
    for target in map(_checked, _named(",".join(names(file)), file, {})):
        key = ""
        if target.key_env in os.environ:
            key = f"  key: ${target.key_env}"
        elif target.key_env:
            key = f"  key: {_named_key(target.key_env)} not set"
        lines.append(f"{target.name}  {target.url or 'built in, started for a run'}  {target.api}{key}")
    return lines


def _named(spec: str, file: Path, flags: Mapping[str, Any]) -> list[Target]:
    declared = _declared(file) if file.exists() else {}
    targets = []
    for item in filter(None, (part.strip() for part in spec.split(","))):
        name, sign, url = item.partition("=") if not item.startswith(("http://", "https://")) else ("", "=", item)
        if sign and not url:
            raise BenchError(f"--targets {name}=: no URL after it; right: {name}=http://host:8000/v1")
        name = name or _address(url)
        if not _NAME.fullmatch(name):
            raise BenchError("--targets: a name has letters, digits, . : - _ only; right: NAME=http://host:8000/v1")
        if not sign and name not in declared and name not in BUILT_IN:
            known = ", ".join([*declared, *BUILT_IN])
            key = name if name.replace("-", "_").isidentifier() else f'"{name}"'
            raise BenchError(
                f"--targets {name}: no such target (known: {known}). Write {file} with:  "
                f'targets.{key}.url = "http://127.0.0.1:8000/v1"   or give {name}=URL'
            )
        base = url if url in declared or url in BUILT_IN else name  # a=reference,b=reference: two of one kind
        facts: dict[str, Any] = {**declared.get(base, {}), **flags}
        if url and url != base:
            facts["url"] = url
        elif base in BUILT_IN and base not in declared:
            facts["launch"] = BUILT_IN[base]
        targets.append(Target(name=name, **facts))
    names = [t.name for t in targets]
    if not names:
        raise BenchError("--targets names no target; give e.g. reference, or mine=http://127.0.0.1:8000/v1")
    if twice := {n for n in names if names.count(n) > 1}:
        raise BenchError(f"--targets names {sorted(twice)} twice; give each its own name: a=URL,b=URL")
    return targets


def _declared(file: Path) -> dict[str, dict[str, Any]]:
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as e:
        raise BenchError(f"{file}: not TOML: {e}") from None
    except OSError as e:
        raise BenchError(f"{file}: cannot be read: {e.strerror}") from None
    known = {f.name for f in fields(Target)} - {"name", "launch"}
    tables = document.get("targets", {})
    if not isinstance(tables, dict) or set(document) - {"targets"}:
        raise BenchError(f"{file}: expected only tables [targets.NAME], found {sorted(document)}")
    out: dict[str, dict[str, Any]] = {}
    for name, table in tables.items():
        where = f"{file}: [targets.{name}]"
        if not _NAME.fullmatch(name):
            raise BenchError(f"{where}: a name has letters, digits, . : - _ only")
        if not isinstance(table, dict):
            raise BenchError(f"{file}: targets.{name} is not a table; write [targets.{name}]")
        facts = {key.replace("-", "_"): value for key, value in table.items()}
        if unknown := set(facts) - known:
            raise BenchError(f"{where} has unknown keys {sorted(unknown)}; known: {sorted(known)}")
        for key, value in facts.items():
            _check_fact(where, key, value)
        out[name] = facts
    return out


# key of a target's table -> its type in TOML, in words
_TYPES: dict[str, tuple[type[Any], str]] = {
    "headers": (dict, "a table of texts"),
    "extra": (dict, "a table"),
    "http": (dict, "a table of texts"),
    "max_model_len": (int, f"a whole number, 0 to {MAX_MODEL_LEN}"),
    "insecure": (bool, "true or false"),
}


def _check_fact(where: str, key: str, value: Any) -> None:
    """Says what a value is, and not the value: it may be a key in the wrong place."""
    want, words = _TYPES.get(key, (str, "a text"))
    if type(value) is not want:
        raise BenchError(f"{where} {key} is of type {type(value).__name__}, expected {words}")
    if key == "max_model_len" and not 0 <= int(value) <= MAX_MODEL_LEN:
        raise BenchError(f"{where} {key} = {value}, expected {words}")
    if key == "http":
        try:
            check_http(value)
        except ValueError as e:
            raise BenchError(f"{where[:-1]}.http]: {e}") from None
    for name, part in dict(value).items() if key == "extra" else ():
        try:  # what one of the two would bend silently, the other refuses: nan; dates, numbers over 64 bits
            json.dumps(part, allow_nan=False)
            orjson.dumps(part, option=orjson.OPT_PASSTHROUGH_DATETIME)
        except (TypeError, ValueError) as e:
            raise BenchError(f"{where} extra.{name}: {e}; expected what a JSON body can hold") from None


def _address(url: str) -> str:
    """host:port of a bare URL, its target's name. A user or key in it is no part of the name."""
    return url.partition("://")[2].partition("/")[0].partition("?")[0].rpartition("@")[2]


def _checked(target: Target) -> Target:
    who = f"target {target.name}"
    if target.api not in DIALECTS:
        raise BenchError(f"{who}: unknown api {target.api!r}; known: {', '.join(DIALECTS)}")
    if bool(target.http) is not bool(DIALECTS[target.api].made):
        table = f"[{who.replace(' ', 's.')}.http]"
        why = f"has a table {table}, which is of api http" if target.http else f"is worded by a table {table} alone"
        raise BenchError(f"{who}: api {target.api} {why}: body = '{{\"prompt\": {{{{prompt|tojson}}}}}}', text = ...")
    if not target.launch:
        for url in target.urls:
            _check_url(who, url)
    if target.key_env and not _VARIABLE.fullmatch(target.key_env):
        raise BenchError(f"{who}: key_env (--key-env) is the NAME of an environment variable, as VLLM_KEY; no key")
    for name in target.headers:
        if not _HEADER_NAME.fullmatch(name) or name.lower() in _OURS:
            raise BenchError(f"{who}: header {name!r} is no name of a header, or one that every request has already")
    key_header, _ = DIALECTS[target.api].site.key_header
    if target.key_env and key_header.lower() in {name.lower() for name in target.headers}:
        raise BenchError(f"{who}: both key_env and a header {key_header}; keep one of them")
    if target.management and not DIALECTS[target.api].site.managed:
        able = ", ".join(name for name, row in DIALECTS.items() if row.site.managed)
        raise BenchError(f"{who}: `management` is of a server with a management API (api {able}), not of {target.api}")
    if target.management:
        _check_url(f"{who}: management", target.management)
    if target.key and not target.cert:
        raise BenchError(
            f"{who}: `key` without `cert`: they are PEM files of a client certificate and its key; the API key's "
            "variable is named by key_env (--key-env)"
        )
    if target.cert and not all(url.startswith("https") for url in target.urls):
        raise BenchError(f"{who}: `cert` is for https; give an https:// URL, or leave it out")
    if target.cafile or target.cert:
        tls(target)
    if DIALECTS[target.api].transport == "grpc" and (target.insecure or target.proxy not in ("", "none")):
        what = "believes no certificate unseen: --ca FILE" if target.insecure else "goes through no proxy: --proxy none"
        raise BenchError(f"{who}: gRPC {what}")
    return replace(target, url="|".join(target.urls), management=target.management.rstrip("/"))


def _check_url(who: str, url: str) -> None:
    """The URL itself is not repeated: what is wrong with it may be a key in it."""
    if "@" in url:  # it would be stored with the command line and shown in `ps`
        raise BenchError(f"{who}: the URL holds a user or key; name the key's variable: --key-env")
    if "?" in url or "#" in url:
        table = who.removesuffix(": management").replace(" ", "s.")
        raise BenchError(
            f"{who}: the URL holds a query, which would be stored and may be a key; send it as a header "
            f"([{table}.headers] in targets.toml), or name the key's variable: --key-env"
        )
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, half an IPv6 address
        sound = False
    if not sound or not _printable(url) or " " in url:
        raise BenchError(f"{who}: what is given is no URL; right: http://host:8000/v1")


def _check_secrets(target: Target) -> None:
    who, key_env = f"target {target.name}", target.key_env
    if key_env and key_env not in os.environ:
        raise BenchError(f"{who}: {_named_key(key_env)}, which key_env (--key-env) names, is not set")
    if key_env:
        _check_secret(f"{who}: the key in the variable {key_env}", os.environ[key_env])
    for name, value in target.headers.items():
        _check_secret(f"{who}: the value of header {name}", value)


def _named_key(key_env: str) -> str:
    """How a variable that is not set is called: some keys would pass for a name, few are in capitals only."""
    return f"${key_env}" if key_env.isupper() else "the environment variable"


def _check_proxy(target: Target) -> None:
    """No load goes through a proxy, or past one, by accident."""
    for url in [] if target.launch else target.urls:
        proxy_of(target, url)
        name = proxy.variable(url)
        if name and not target.proxy and not proxy.is_local(url):
            raise BenchError(
                f"target {target.name}: {name} is set, and through a proxy other things are measured than without; "
                "say which is meant: --proxy env (through it) or --proxy none (straight to the target)"
            )


def _check_secret(what: str, value: Any) -> None:
    """A header's value that every HTTP library sends alike. Says what is wrong with it, never the value."""
    if not isinstance(value, str):
        raise BenchError(f"{what} is no text")
    if not value:
        raise BenchError(f"{what} is empty")
    if value != value.strip():
        raise BenchError(f"{what} begins or ends with a blank or a line end")
    if not _printable(value):
        raise BenchError(f"{what} is not one line of printable ASCII")


def _printable(text: str) -> bool:
    return text.isascii() and text.isprintable()


def tls(target: Target) -> ssl.SSLContext:
    """What https is checked against, and who we are. Raises BenchError for a `cafile`, `cert` or `key` that is none."""
    if not target.cafile and not any(url.startswith("https") for url in target.urls):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # believes nobody; the system's list takes 20 ms to load
    try:
        context = ssl.create_default_context(cafile=target.cafile or None)
    except OSError as e:
        why = "no certificates in it" if isinstance(e, ssl.SSLError) else e.strerror
        raise BenchError(f"target {target.name}: cafile {target.cafile}: {why}; expected a PEM file") from None
    if target.insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if target.cert:
        certify(target, context)
    return context


def certify(target: Target, context: ssl.SSLContext) -> None:
    """Lets a context show the client certificate. Raises BenchError; it names no file of `key`, which may be a key."""
    asked: list[bool] = []

    def password() -> str:  # asked for at the terminal otherwise, in the middle of a run
        asked.append(True)
        return ""

    try:
        context.load_cert_chain(target.cert, target.key or None, password=password)
    except (OSError, ValueError) as e:
        why = "its key has a password" if asked else _unusable(target, e)
        files = "cert and key: PEM files that belong together, the key without a password"
        raise BenchError(
            f"target {target.name}: its client certificate cannot be used ({why}); expected {files}"
        ) from None


def _unusable(target: Target, error: Exception) -> str:
    """Which of a client certificate's files is not what it should be, by its key in the target's table."""
    of_key = "key" if target.key else "cert"
    wanted = (("cert", target.cert, b"CERTIFICATE"), (of_key, target.key or target.cert, b"PRIVATE KEY"))
    for name, file, mark in wanted:
        try:
            body = Path(file).read_bytes()
        except (OSError, ValueError) as e:
            return f"the file of `{name}`: {(getattr(e, 'strerror', '') or 'cannot be read').lower()}"
        if mark not in body:
            return f"no {'certificate' if b'CERT' in mark else 'private key'} in the file of `{name}`"
    return str(getattr(error, "reason", "") or getattr(error, "strerror", "") or error).lower().replace("_", " ")


def auth_headers(target: Target) -> list[tuple[str, str]]:
    """Extra headers of every request, the key among them. Never stored, never printed."""
    theirs = {name.lower() for name in target.headers}
    of_protocol = [(n, value) for n, value in DIALECTS[target.api].site.headers if n.lower() not in theirs]
    return of_protocol + _secret_headers(target)


def _secret_headers(target: Target) -> list[tuple[str, str]]:
    headers = list(target.headers.items())
    if target.key_env:
        name, form = DIALECTS[target.api].site.key_header
        headers.append((name, form.format(key=os.environ[target.key_env])))
    return headers


def hider(target: Target) -> Callable[[str], str]:
    """A function that puts HIDDEN in place of the target's secrets in a text: servers repeat keys in their errors.

    Secrets are the key, header values, and what follows a scheme in one ("Bearer ..."), from LEAST_SECRET characters
    on; a proxy's password too. A text may be cut in the middle of one: from its first half on it is a secret too.
    """
    found: set[str] = set()
    values = [value for _, value in _secret_headers(target)]
    for url in target.urls:
        if (through := proxy_of(target, url)) is not None:
            values += [through.authorization, through.password]
    for value in values:
        found |= {value, *value.split()[1:]}
    found |= {json.dumps(value)[1:-1] for value in found}  # as JSON repeats it
    secrets = sorted((s for s in found if len(s) >= LEAST_SECRET), key=len, reverse=True)

    def hide(text: str) -> str:
        for secret in secrets:
            head = secret[: max(LEAST_SECRET, len(secret) // 2)]
            at = text.find(head)
            while at >= 0:
                end = at + len(head)
                while end - at < len(secret) and text[end : end + 1] == secret[end - at]:
                    end += 1
                text = text[:at] + HIDDEN + text[end:]
                at = text.find(head, at + len(HIDDEN))
        return text

    return hide


def proxy_of(target: Target, url: str) -> Proxy | None:
    """The proxy through which a URL of the target is asked; None: straight. A server of ours is on this machine.

    Raises BenchError for what names no HTTP proxy.
    """
    if target.launch or target.proxy in ("", "none"):
        return None
    if target.proxy == "env":
        return proxy.of_environment(url)
    return proxy.read(target.proxy, f"target {target.name}: proxy (--proxy)")


def httpx_proxy(target: Target) -> httpx.Proxy | None:
    """The same for httpx, of the target's first URL."""
    through = proxy_of(target, target.urls[0])
    if through is None:
        return None
    said = through.authorization
    return httpx.Proxy(through.shown, headers={"Proxy-Authorization": said} if said else None)


def proxy_line(target: Target) -> str:
    """What is to be said of proxies before the first probe; "" where there is none."""
    if by := target.by_proxy():
        return f"{target.name}: probes and load go through the proxy {by}"
    if name := unused_proxy(target.urls[0]):
        return f"{target.name}: {name} of the environment is not used: probes and load go straight to the target"
    return ""


def unused_proxy(url: str) -> str:
    """The environment's proxy variable that others would obey for this URL, "" for none. Its value may hold a key."""
    return proxy.variable(url)


def root_of(url: str) -> str:
    """A target's URL without the version that OpenAI's end in: where servers have their own pages."""
    return _VERSION.sub("", url)


def asked_first(target: Target, url: str) -> tuple[str, str]:
    """(method, address) of what tells whether a target's server is there, and where it can be, which models it has."""
    site = DIALECTS[target.api].site
    if site.models:
        method, _, path = site.models.partition(" ")
        return method, url + path
    if not site.at_origin:
        return "GET", url + site.ready
    parts = urlsplit(url)
    return "GET", f"{parts.scheme}://{parts.netloc}{site.ready}"


def reachable(target: Target) -> bool:
    """Does anything still listen there? Asked when a run meets one refused connection after another."""
    _, address = asked_first(target, target.urls[0])
    if target.dialect.transport == "grpc":  # speaks no HTTP/1.1: that it accepts is all that can be asked in passing
        return _accepts(address)
    try:
        httpx.get(address, timeout=5.0, verify=tls(target), trust_env=False, proxy=httpx_proxy(target))
    except httpx.TransportError:
        return False
    except httpx.HTTPError:
        return True  # an answer that cannot be read is one
    return True


def _accepts(url: str) -> bool:
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or _PORTS[parts.scheme]), 5.0).close()
    except OSError:
        return False
    return True


@contextmanager
def running(target: Target, say: Callable[[str], None], log: Path | None = None) -> Iterator[Target]:
    """The target with its URL; a built-in one is started, its stderr kept in `log`, and ended when the block is left.

    The child watches its stdin: if this process dies in any way, the pipe closes and the child ends.
    """
    if not target.launch:
        yield target
        return
    missing = [name for name in ENGINE_NEEDS if "reference_engine" in target.launch and find_spec(name) is None]
    if missing:
        raise TargetError(
            f"target {target.name}: the bundled engine needs {', '.join(missing)}: in the project's folder, "
            "pip install --constraint constraints.txt '.[engine]'"
        )
    say(f"starting {target.name}: python {' '.join(target.launch)}" + (f", its log in {log}" if log else ""))
    with log.open("wb") if log else tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, *target.launch],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C is ours to handle: the engine must live until the run is cut and written
        )
    try:
        yield replace(target, url=_announced(child, target, log))
    finally:
        assert child.stdin and child.stdout
        child.stdin.close()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()


def _announced(child: "subprocess.Popen[bytes]", target: Target, log: Path | None) -> str:
    """The URL that a server of ours prints as one JSON line once it listens."""
    assert child.stdout
    ready, _, _ = select.select([child.stdout], [], [], BUILT_IN_READY_S)
    line = child.stdout.readline() if ready else b""
    try:
        return str(orjson.loads(line)["listening"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        said = log.read_text(errors="replace").strip().splitlines()[-1:] if log else []
        raise TargetError(f"target {target.name}: did not start ({''.join(said) or 'no word from it'})") from None
