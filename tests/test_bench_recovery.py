"""`python -m bench.recovery`: every kind of fault has a row with a known end; the page says who missed it."""

import pytest

from bench import recovery
from bench.recovery import KINDS, Found, _of_requests
from llm_bench import faults
from reference_engine.faults import FAULTS as OF_ENGINE


def parsed(name: str) -> tuple[faults.Fault, ...]:
    return faults.parse([text.format(pid=4711, root="http://127.0.0.1:8000") for text in KINDS[name].faults])


def test_every_kind_of_fault_has_a_row() -> None:
    of = [fault for name in KINDS for fault in parsed(name)]
    assert {fault.kind for fault in of} == set(faults.FAULTS)
    assert {fault.args["do"] for fault in of if fault.kind == "net"} == set(faults.NET)
    assert {fault.args["body"]["kind"] for fault in of if fault.kind == "engine"} == set(OF_ENGINE)
    statuses = {str(fault.args["body"].get("status")) for fault in of if fault.kind == "engine"} - {"None"}
    assert statuses == {"429", "500", "503", "reset"}


@pytest.mark.parametrize("name", KINDS)
def test_a_fault_is_over_early_enough_to_be_judged(name: str) -> None:
    first = parsed(name)[0]
    assert first.at_ns == 0
    assert 0 <= KINDS[name].known_s <= recovery.DURATION_S - recovery.FAULT_S - 3  # three windows of a second


def test_the_last_request_that_is_struck_is_known_by_the_engines_own_draw() -> None:
    assert _of_requests({"kind": "http_error", "requests": 40}) == 40 / recovery.RATE
    half = _of_requests({"kind": "http_error", "requests": 40, "share": 0.5, "seed": 1})
    assert 60 < half * recovery.RATE < 110
    assert half != _of_requests({"kind": "http_error", "requests": 40, "share": 0.5, "seed": 2})


@pytest.mark.parametrize(
    ("known_s", "found_s", "within"),
    [
        (4.0, 4.19, True),
        (4.0, 4.21, False),
        (4.0, 3.79, False),
        (0.1, 0.19, True),
        (0.1, 0.21, False),
        (1.0, None, False),
    ],
)
def test_within_is_5_percent_or_100_ms(known_s: float, found_s: float | None, within: bool) -> None:
    found = Found("sh", known_s, found_s, "RECOVERED", "", limited=False)
    assert found.within is within
    assert ("| yes |" if within else "| NO |") in recovery.table([found])


def test_a_page_names_machine_and_script() -> None:
    facts = {"cpu": "x", "cores": 2, "load_before": 0.0, "python": "3"}
    text = recovery.page([Found("net:stall", 1.5, None, "UNDECIDED", "too few", limited=False)], facts)
    assert "| net:stall | 1.500 | – | – | NO | UNDECIDED: too few |" in text
    assert "0s:net:stall,for=1.5s" in text
    assert "Machine: x, 2 cores" in text
