"""Which build of what is measured: as the user declares it and as the server tells, and whether both agree."""

import time
from collections.abc import Mapping

import httpx

from llm_bench import talk, targets
from llm_bench.dialects import DIALECTS
from llm_bench.errors import TargetError
from llm_bench.protocol import json_of, same_build
from llm_bench.targets import Target

FACTS = ("revision", "engine_version", "precision", "image")  # fields of Target, keys of what a server tells
LONGEST_S = 5.0  # all pages together
MOST_CHARACTERS = 200  # of a fact


def told(client: httpx.Client, target: Target) -> dict[str, str]:
    """What the server tells of itself, by FACTS; {} where no page of its protocol does."""
    deadline_s = time.monotonic() + LONGEST_S
    for path, read in DIALECTS[target.api].site.about:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            break
        try:
            status, body = talk.page(client, "GET", targets.root_of(target.url) + path, left_s)
        except httpx.HTTPError:
            continue
        facts = read(json_of(body)) if status // 100 == 2 else {}
        if facts:
            return {name: value[:MOST_CHARACTERS] for name, value in facts.items()}
    return {}


def check(target: Target, facts: Mapping[str, str]) -> None:
    """Raises TargetError where the server tells another build than the one declared."""
    for name in FACTS:
        declared, found = getattr(target, name), facts.get(name, "")
        if declared and found and not same_build(declared, found):
            raise TargetError(
                f"target {target.name}: {name.replace('_', ' ')} {declared!r} is declared, {target.url} says "
                f"{found!r}: declare what is measured, under a name of its own"
            )


def check_alike(target: Target, first: Mapping[str, str], other_url: str, other: Mapping[str, str]) -> None:
    """Raises TargetError where two URLs of one target tell different builds."""
    for name in FACTS:
        x, y = first.get(name, ""), other.get(name, "")
        if x and y and not same_build(x, y):
            raise TargetError(
                f"target {target.name}: {name.replace('_', ' ')} {x!r} at {target.url}, {y!r} at {other_url}: "
                "one name is one build; give each a name of its own"
            )
