"""What a server's management port tells of a model: is it loaded, in which version, by how many workers.

Some have such a port beside the one that answers requests (TorchServe's, 8081), as a rule for their own host alone.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx

from llm_bench import mistaken, talk
from llm_bench.errors import TargetError
from llm_bench.exchange import Timeouts
from llm_bench.protocol import Loaded, Management, path_for
from llm_bench.targets import Target

PAGE_S = 5.0
AGAIN_S = 0.5


class Managed(NamedTuple):
    models: tuple[str, ...] = ()
    version: str = ""
    workers: str = ""  # in words


def ask(target: Target, say: Callable[[str], None], ready_s: float, timeouts: Timeouts, notes: list[str]) -> Managed:
    """Waits `ready_s` for a first ready worker of the target's model, or of the first that is listed.

    Raises TargetError where none comes, or where a `management` that the target declares does not answer.
    """
    row = target.dialect.site.managed
    if row is None:
        return Managed()
    its_key = target.management_key_env or target.key_env
    asked = replace(target, url=target.management or _beside(target.url, row.port), key_env=its_key)
    if not target.management:  # a port that nobody named gets no key
        asked = replace(asked, key_env="", headers={})
    with talk.client_of(asked, timeouts) as client:
        status, body, why = _page(client, asked.url + row.models)
        models = tuple(listed.model for listed in row.listed(body)) if status == 200 else ()
        if not models:
            why = why or ("it lists no model" if status == 200 else f"HTTP {status}")
            wants_key = mistaken.wants_key(status, body)
            if target.management:
                right = _key_words(target) if wants_key else "expected its models"
                raise TargetError(f"target {target.name}: its management API at {asked.url}: {why}; {right}")
            unknown = "the model's version and workers are not known"
            if wants_key:
                notes.append(
                    f"the management API at {asked.url} wants a key ({why}): {unknown}; declare it by `management` and "
                    "`management_key_env`, the key's variable, in the target's table of targets.toml"
                )
            else:
                notes.append(
                    f"no management API at {asked.url} ({why}): {unknown}; give `management`, its URL, where it is "
                    "elsewhere"
                )
            return Managed()
        model = target.model or models[0]
        loaded = _ready(client, row, asked, model, say, ready_s) if model in models else None
    if loaded is None:
        return Managed(models)
    words = f"{loaded.ready} of {loaded.workers} ready, batches of at most {loaded.batch}"
    return Managed(models, loaded.version, words)


def _key_words(target: Target) -> str:
    if target.management_key_env:
        return f"the key in the variable {target.management_key_env} was refused"
    name_it = "name its variable by `management_key_env` in the target's table of targets.toml"
    if target.key_env:
        return f"the target's key was refused: where this API has its own, {name_it}"
    return f"it wants a key; {name_it}"


def _ready(
    client: httpx.Client, row: Management, asked: Target, model: str, say: Callable[[str], None], ready_s: float
) -> Loaded | None:
    """The model once a worker of it is ready; None where its page is not what it should be."""
    deadline_s = time.monotonic() + ready_s
    address, waited = asked.url + path_for(row.model, model), False
    while True:
        status, body, _ = _page(client, address)
        loaded = row.loaded(body) if status == 200 else None
        if loaded is None or loaded.ready:
            return loaded
        if time.monotonic() >= deadline_s:
            raise TargetError(
                f"target {asked.name}: no worker of the model {model!r} is ready after {ready_s:g} s (0 of "
                f"{loaded.workers}, {address}); give it workers, or correct --model; --ready-timeout waits longer"
            )
        if not waited:
            say(f"waiting for a worker of {model} at {address}, up to {ready_s:g} s")
            waited = True
        time.sleep(min(AGAIN_S, max(deadline_s - time.monotonic(), 0)))


def _page(client: httpx.Client, address: str) -> tuple[int, bytes, str]:
    """(status, body, "") or (0, b"", what went wrong)."""
    try:
        return *talk.page(client, "GET", address, PAGE_S), ""
    except httpx.HTTPError as e:
        return 0, b"", f"{type(e).__name__}: {e}"


def _beside(url: str, port: int) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"
