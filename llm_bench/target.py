"""One server, as the user declares it, and the way to it: straight, or through a proxy that was asked for."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from llm_bench import proxy
from llm_bench.dialects import Dialect, spoken
from llm_bench.errors import BenchError
from llm_bench.proxy import Proxy

_PRICE = re.compile(
    r"(?P<money>[^\W\d_]{0,4}[$£¥€₹₩₿]?)\s*(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|\.\d+)\s*/\s*h(?:our)?"
)


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
    # What it runs on and costs, for `capacity`: kept with the run, and what its flags say comes first.
    accelerator: str = ""  # as for capacity's --accelerator; one that is not in its table is kept as it is
    count: int = 0  # accelerators of one replica; 0: not said
    price: str = ""  # of one accelerator, as 2.50/h
    extra: Mapping[str, Any] = field(default_factory=dict)  # into every request's body
    http: Mapping[str, str] = field(default_factory=dict)  # of api http: what is said and how an answer is read
    cafile: str = ""  # https with a private authority
    insecure: bool = False  # https with any certificate
    cert: str = ""  # PEM file of this client's own certificate, for https that asks for one (mTLS)
    key: str = ""  # PEM file of its private key, where that is not in `cert`; no API key
    proxy: str = ""  # URL of an HTTP proxy, "env": as the environment says, "none": straight; "": nothing was asked
    metrics: str = ""  # URL of its metrics, several with | between them; "auto": /metrics at the root of each URL
    management: str = ""  # URL of its management API, where its protocol has one; "": that protocol's port, same host
    management_key_env: str = ""  # variable of that API's own key; "": the same as `key_env`
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


def hourly_price(text: str, where: str) -> tuple[str, float]:
    """(currency or "", amount an hour) of `2.50/h`, `$2.50/h`, `EUR 2.50/h`. Raises BenchError, which names `where`."""
    match = _PRICE.fullmatch(text.strip())
    if match is None or float(match["number"]) > 1e9:
        raise BenchError(f"{where} {text!r}: expected an amount an hour such as 2.50/h or $2.50/h")
    return match["money"], float(match["number"])
