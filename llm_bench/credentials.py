"""Who we are to a target, and whom we believe: keys and certificates, checked before use and shown to nobody else."""

import json
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llm_bench.dialects import DIALECTS
from llm_bench.errors import BenchError
from llm_bench.target import Target, proxy_of

HIDDEN = "[key]"  # stands where a secret stood
LEAST_SECRET = 6  # characters: a shorter value stands in ordinary text by chance


def check_secrets(target: Target) -> None:
    """Raises BenchError for a key that is not set, or a header's value that HTTP libraries would send differently."""
    who = f"target {target.name}"
    for name, key_env in (("key_env (--key-env)", target.key_env), ("management_key_env", target.management_key_env)):
        if key_env and key_env not in os.environ:
            raise BenchError(f"{who}: {named_key(key_env)}, which {name} names, is not set")
        if key_env:
            _check_secret(f"{who}: the key in the variable {key_env}", os.environ[key_env])
    for name, value in target.headers.items():
        _check_secret(f"{who}: the value of header {name}", value)


def named_key(key_env: str) -> str:
    """How a variable that is not set is called: some keys would pass for a name, few are in capitals only."""
    return f"${key_env}" if key_env.isupper() else "the environment variable"


def _check_secret(what: str, value: Any) -> None:
    """A header's value that every HTTP library sends alike. Says what is wrong with it, never the value."""
    if not isinstance(value, str):
        raise BenchError(f"{what} is not text")
    if not value:
        raise BenchError(f"{what} is empty")
    if value != value.strip():
        raise BenchError(f"{what} begins or ends with a blank or a line end")
    if not is_printable(value):
        raise BenchError(f"{what} is not one line of printable ASCII")


def is_printable(text: str) -> bool:
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
        # Engines that speak another's protocol, as vLLM Anthropic's, look for the key where OpenAI's routes have it.
        if "authorization" not in {n.lower() for n, _ in headers} and not _is_the_vendor(target):
            headers.append(("Authorization", f"Bearer {os.environ[target.key_env]}"))
    return headers


def _is_the_vendor(target: Target) -> bool:
    """Is it the protocol's own maker, who takes a key in one header, and may refuse two?"""
    return any((urlsplit(url).hostname or "").endswith("anthropic.com") for url in target.urls)


def hider(target: Target) -> Callable[[str], str]:
    """A function that puts HIDDEN in place of the target's secrets in a text: servers repeat keys in their errors.

    Secrets are the key, header values, and what follows a scheme in one ("Bearer ..."), from LEAST_SECRET characters
    on; a proxy's password too. A text may be cut in the middle of one: from its first half on it is a secret too.
    """
    found: set[str] = set()
    values = [value for _, value in _secret_headers(target)]
    if target.management_key_env in os.environ:  # other hosts, which drive the load, are not given it
        values.append(os.environ[target.management_key_env])
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
