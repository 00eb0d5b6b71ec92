"""A clean cell raises no doubt; each check fires on its own trouble, with the figures."""

from dataclasses import replace
from typing import Any

import pytest

from llm_bench import windows
from llm_bench.doubts import CHECKS, Doubt, doubts
from llm_bench.metrics import compute_all
from llm_bench.records import Cell
from tests.sample import cell, closed_loop, header, ns, record

OPEN = {"kind": "open", "rate": 10.0, "warmup": 0.0}
COUNTS = {"ok": 100, "failed": 0, "cancelled": 0, "cut_at_end": 0, "dropped": 0}


def requests(n: int = 100, step: float = 100.0, head: dict[str, Any] | None = None, **fields: Any) -> Cell:
    """`n` requests `step` ms apart, each of five tokens 20 ms apart after 50 ms."""
    dues = [step * i for i in range(n)]
    rows = [
        record(i, due, **({"events": [due + 50 + 20 * k for k in range(5)], "asked_out": 5} | fields))
        for i, due in enumerate(dues)
    ]
    return cell(rows, **({"load": OPEN} | (head or {})))


def found(c: Cell, siblings: tuple[Cell, ...] = (), names: tuple[str, ...] = (), **end: Any) -> dict[str, str]:
    window = windows.of(c)
    got = doubts(c, window, siblings, compute_all(names, c, window), end)
    assert all(isinstance(d, Doubt) for d in got)
    return dict(got)


def with_target(i: int, **target: Any) -> dict[str, Any]:
    return {"target": header()["target"] | {"name": f"t{i}", "url": f"http://127.0.0.1:{i}"} | target}


def test_a_clean_cell_raises_no_doubt() -> None:
    assert found(requests(), reason="exhausted", counts=COUNTS) == {}
    assert found(closed_loop(100, 10), reason="exhausted") == {}


def failing(every: int) -> Cell:
    rows = [record(i, 10 * i, events=[10 * i + 5]) for i in range(100) if i % every]
    rows += [record(i, 10 * i, outcome="failed", end=10 * i + 1) for i in range(0, 100, every)]
    return cell(rows, load=OPEN)


def queued() -> Cell:
    rows = [record(i, 200 * i, sent=400 * i, events=[400 * i + 400]) for i in range(6)]
    return cell(rows, load=OPEN | {"max_in_flight": 1})


def growing() -> Cell:
    served = [record(k, 200 * k, events=[1000 * k + 1000]) for k in range(30)]
    cut = [record(k, 200 * k, end=30_000, outcome="cut_at_end") for k in range(30, 150)]
    return cell(served + cut, load={"kind": "open", "rate": 5.0, "warmup": None})


LATE = [record(i, 100 * i, sent=100 * i + 12, ready_ns=ns(100 * i), events=[100 * i + 99]) for i in range(50)]
TWIN = [record(i, 10 * i, events=[10 * i + 5], prompt_hash=77 + i // 2) for i in range(50)]
PROBE = header()["probe"]

# kind -> (what found() gives, words that must stand in it)
TROUBLE = {
    "incomplete file": (lambda: found(replace(requests(), complete=False)), "100 whole requests"),
    "ended early": (lambda: found(requests(), reason="target gone"), "target gone"),
    "broken identity": (lambda: found(requests(), counts=COUNTS | {"ok": 101}), "101"),
    "too short": (lambda: found(closed_loop(60, 10)), "31 requests in the window, at least 50"),
    "overloaded": (lambda: found(growing()), "backlog grows 4.00 requests/s"),
    "not sustained": (lambda: found(queued()), "offered 5.00/s, completed 2.50/s over 2.4 s"),
    "too few requests": (lambda: found(requests(), names=("ttft_p99_9",)), "ttft_p99_9: p99.9 of 99"),
    "cut requests": (lambda: found(growing()), "of 141 requests were cut"),
    "failed requests": (lambda: found(failing(4)), "http_5xx 25"),
    "retries": (lambda: found(requests(attempts=2)), "99 requests needed more than one attempt"),
    "client lateness": (lambda: found(cell(LATE, load=OPEN)), "12.00 ms late (p99, 12% of the median TTFT)"),
    "client busy": (lambda: found(requests(), loop_lag_p99_ms=30.0, client_cpu_share=0.97), "97% of a core"),
    "delivered tokens": (lambda: found(requests(asked_out=6)), "495 tokens were delivered of 594 asked (83.3%)"),
    "lengths not pinned": (lambda: found(requests(head={"probe": PROBE | {"lengths_pinned": False}})), "pinned"),
    "prompt tokens": (lambda: found(requests(tokens_in=107)), "(+7.0%)"),
    "repeated prompts": (lambda: found(cell(TWIN, load=OPEN)), "25 prompts repeat within"),
    "cached prompts": (lambda: found(requests(tokens_cached=98)), "took 98.0% of the prompt tokens"),
    "estimated tokens": (lambda: found(requests(tokens_out_from="events")), "99 of 99 requests are estimates"),
    "end unproven": (lambda: found(requests(labels=["end unproven"])), "99 answers"),
    "burst streams": (lambda: found(requests(events=[20_000] * 5)), "100% of the gaps are 0"),
    "trace changed": (lambda: found(requests(head={"settings": {"too_long": "3 of 9 rows: clipped"}})), "3 of 9"),
    "turns not sent": (lambda: found(requests(), turns_not_sent=7), "7 later turns"),
    "targets differ": (
        lambda: found(requests(head=with_target(1, model="a")), (requests(head=with_target(2, model="b")),)),
        "model 'a' here, 'b' at t2",
    ),
    "network path": (
        lambda: found(
            requests(head=with_target(1)), (requests(head=with_target(2) | {"probe": PROBE | {"rtt_ms": 9.1}}),)
        ),
        "0.10 ms here and 9.10 ms to t2",
    ),
}


def test_every_check_has_its_trouble() -> None:
    assert list(TROUBLE) == list(CHECKS)


@pytest.mark.parametrize("kind", TROUBLE)
def test_each_check_fires_with_its_figures(kind: str) -> None:
    make, words = TROUBLE[kind]
    got = make()
    assert words in got[kind]


def test_planned_sharing_is_no_doubt() -> None:
    shared = {"plan": {"shares": True}}
    assert "repeated prompts" not in found(cell(TWIN, load=OPEN, **shared))
    assert "cached prompts" not in found(requests(tokens_cached=98, head=shared))
    assert "cached prompts" in found(requests(tokens_cached=98, head={"settings": {"reuse_prompts": True}}))
    assert "cached prompts" not in found(requests(tokens_cached=98, session="a"))


def test_a_cached_chat_template_is_no_cached_prompt() -> None:
    head = {"probe": {"base_tokens": 30.0, "lengths_pinned": True}}
    assert "cached prompts" not in found(requests(tokens_cached=24, tokens_in=64, planned_in=64, head=head))
    assert "took 28.1%" in found(requests(tokens_cached=48, tokens_in=64, planned_in=64, head=head))["cached prompts"]


def test_prompts_of_an_earlier_cell_are_found_without_any_report_of_a_cache() -> None:
    first, second = cell(TWIN[::2], load=OPEN), requests(prompt_hash=77, n=1, step=9)
    later = cell(
        [record(i, 90_000 + 10 * i, events=[90_005 + 10 * i], prompt_hash=77 + i) for i in range(25)], load=OPEN
    )
    assert "25 were sent in an earlier cell" in found(later, (first,))["repeated prompts"]
    assert "repeated prompts" not in found(first, (later, second))
    elsewhere = cell(TWIN[::2], load=OPEN, **with_target(9))
    assert "repeated prompts" not in found(later, (elsewhere,))


def test_running_out_before_the_duration_is_a_doubt() -> None:
    load = OPEN | {"duration_s": 60.0}
    assert "--loop-trace" in found(requests(head={"load": load}), reason="exhausted")["ended early"]
    assert "ended early" not in found(requests(head={"load": load}), reason="duration")


def test_an_empty_cell_can_be_doubted_too() -> None:
    assert set(found(cell([], load=OPEN))) == {"too short"}
