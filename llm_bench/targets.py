"""What is measured: names, URLs and targets.toml -> Target, checked; servers of our own."""

import difflib
import json
import os
import re
import select
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson

from llm_bench import proxy
from llm_bench.credentials import HIDDEN as HIDDEN  # a name `as` itself: callers find all of a target here
from llm_bench.credentials import LEAST_SECRET as LEAST_SECRET
from llm_bench.credentials import auth_headers as auth_headers
from llm_bench.credentials import certify as certify
from llm_bench.credentials import check_secrets, is_printable, named_key
from llm_bench.credentials import hider as hider
from llm_bench.credentials import tls as tls
from llm_bench.dialect_http import check as check_http
from llm_bench.dialects import DIALECTS
from llm_bench.errors import BenchError, TargetError
from llm_bench.target import Target as Target
from llm_bench.target import hourly_price
from llm_bench.target import httpx_proxy as httpx_proxy
from llm_bench.target import proxy_line as proxy_line
from llm_bench.target import proxy_of as proxy_of

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
MAX_COUNT = 4096  # accelerators of one replica, as capacity's --count
_PORTS = {"http": 80, "https": 443}
_NAME = re.compile(r"[\w.:\[\]-]+", re.A)  # it becomes part of file names
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110 5.6.2
_VERSION = re.compile(r"/v\d+$")
_OURS = {"content-length", "transfer-encoding", "connection", "host", "x-request-id"}  # headers that we must decide


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
        check_secrets(target)
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
            key = f"  key: {named_key(target.key_env)} not set"
        lines.append(f"{target.name}  {target.url or 'built in, started for a run'}  {target.api}{key}")
    return lines


def _named(spec: str, file: Path, flags: Mapping[str, Any]) -> list[Target]:
    declared = _declared(file) if file.exists() else {}
    targets = []
    for item in filter(None, (part.strip() for part in spec.split(","))):
        name, sign, url = item.partition("=") if not item.startswith(("http://", "https://")) else ("", "=", item)
        if sign and not url:
            raise BenchError(f"--targets {name}=: no URL after it; expected {name}=http://host:8000/v1")
        name = name or _address(url)
        if not _NAME.fullmatch(name):
            raise BenchError("--targets: a name has letters, digits, . : - _ only; expected NAME=http://host:8000/v1")
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
            near = [difflib.get_close_matches(key.lower(), known, 1) for key in sorted(unknown)]
            meant = f" ({', '.join(key for found in near for key in found)} is near)" if any(near) else ""
            raise BenchError(f"{where} has unknown keys {sorted(unknown)}{meant}; known: {sorted(known)}")
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
    "count": (int, f"a whole number, 1 to {MAX_COUNT}"),
    "insecure": (bool, "true or false"),
}


def _check_fact(where: str, key: str, value: Any) -> None:
    """Says what a value is, and not the value: it may be a key in the wrong place."""
    want, words = _TYPES.get(key, (str, "a text"))
    if type(value) is not want:
        raise BenchError(f"{where} {key} is of type {type(value).__name__}, expected {words}")
    least, most = {"max_model_len": (0, MAX_MODEL_LEN), "count": (1, MAX_COUNT)}.get(key, (0, 0))
    if most and not least <= int(value) <= most:
        raise BenchError(f"{where} {key} = {value}, expected {words}")
    if key == "price" and value:
        hourly_price(value, f"{where} price")
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
        why = f"has a table {table}, which is of api http" if target.http else f"needs a table {table}"
        raise BenchError(f"{who}: api {target.api} {why}: body = '{{\"prompt\": {{{{prompt|tojson}}}}}}', text = ...")
    if not target.launch:
        for url in target.url.split("|"):
            _check_url(who, url.strip())
            _check_path(who, target.api, url.strip())
    for name, variable in (("key_env (--key-env)", target.key_env), ("management_key_env", target.management_key_env)):
        if variable and not _VARIABLE.fullmatch(variable):
            raise BenchError(f"{who}: {name} is the NAME of an environment variable, such as VLLM_KEY, not a key")
    for name in target.headers:
        if not _HEADER_NAME.fullmatch(name) or name.lower() in _OURS:
            raise BenchError(
                f"{who}: header {name!r} is not the name of a header, or is one that every request has already"
            )
    key_header, _ = DIALECTS[target.api].site.key_header
    if target.key_env and key_header.lower() in {name.lower() for name in target.headers}:
        raise BenchError(f"{who}: both key_env and a header {key_header}; keep one of them")
    if target.management and not DIALECTS[target.api].site.managed:
        able = ", ".join(name for name, row in DIALECTS.items() if row.site.managed)
        raise BenchError(f"{who}: `management` is of a server with a management API (api {able}), not of {target.api}")
    if target.management:
        _check_url(f"{who}: management", target.management)
    if target.management_key_env and not target.management:
        raise BenchError(f"{who}: `management_key_env` without `management`: a port that nobody named gets no key")
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
        what = (
            "cannot accept unchecked certificates: give --ca FILE"
            if target.insecure
            else "cannot go through a proxy: give --proxy none"
        )
        raise BenchError(f"{who}: gRPC {what}")
    return replace(target, url="|".join(target.urls), management=target.management.rstrip("/"))


def _check_path(who: str, api: str, url: str) -> None:
    """Of a URL as documents show it, with the path that requests are sent to, which a protocol adds by itself.

    Of another protocol's path, and of the list of models, only behind the version: a gateway's own may be called so.
    Who means it of the protocol's own path too ends it in a slash.
    """
    own = DIALECTS[api]
    if not own.path or own.transport == "grpc" or url.endswith("/"):  # the whole address is right, or no path at all
        return
    others = {name: row for name, row in DIALECTS.items() if row.site.base and row.transport == own.transport}
    added = [(api, path, "") for path in (own.path, own.whole_path)]
    added += [(name, row.path, row.site.base) for name, row in others.items()]
    added += [(api, own.site.models.partition(" ")[2], own.site.base)] if own.site.base else []
    for name, path, base in added:
        found = re.search(f"{re.escape(path).replace(re.escape('{model}'), '[^/]+')}$", url) if path else None
        before = url[: found.start()] if found else ""
        if found and before.endswith(base):
            right = f'url = "{before}"' + ("" if name == api else f', api = "{name}"')
            model = ", the model in `model`" if "{model}" in path else ""
            meant = "" if _VERSION.search(before) else "; a gateway's own path of that name ends in /"
            raise BenchError(
                f"{who}: {found[0]} is what api {name} adds to a URL by itself; expected {right}{model}{meant}"
            )


def _check_url(who: str, url: str) -> None:
    """The URL itself is not repeated: what is wrong with it may be a key in it."""
    if not url:
        raise BenchError(f'{who}: it has no url; expected url = "http://host:8000/v1"')
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
    if not sound or not is_printable(url) or " " in url:
        raise BenchError(f"{who}: what is given is not a URL; expected http://host:8000/v1")


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
