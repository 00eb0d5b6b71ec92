"""The parts of a cell's time add up to what the client measured; what nobody says is said to be unknown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench import windows
from llm_bench.columns import Cell
from llm_bench.decompose import Decomposition, Part, decompose, pooled
from llm_bench.server_metrics import Figure, Figures, total
from tests.sample import START_NS, cell, header, record

SAID = {"server_queue_ms": 20.0, "server_prefill_ms": 25.0, "server_decode_ms": 40.0}


def requests(n: int = 40, rtt_ms: float | None = 1.0, **fields: object) -> Cell:
    """Each due every 100 ms, sent 2 ms late, first token 50 ms after that, then two more 20 ms apart: e2e 92 ms."""
    rows = [
        record(i, 100 * i, sent=100 * i + 2, events=[100 * i + 52 + 20 * k for k in range(3)], **fields)
        for i in range(n)
    ]
    probe = header()["probe"] | {"rtt_ms": rtt_ms}
    return cell(rows, load={"kind": "open", "rate": 10.0, "warmup": 0.0}, probe=probe)


def parts(c: Cell, scraped: Figures | None = None) -> Decomposition:
    found = decompose(c, windows.of(c), scraped)
    assert found is not None
    return found


def scraped(observed: float = 40, **means: float) -> Figures:
    of = {m: Figure(m, f"vllm:{m}_seconds", ms, observed) for m, ms in means.items()}
    return Figures(of, START_NS, START_NS + 5_000_000_000, 6, True)


def test_the_servers_account_in_its_answers_leaves_what_is_between() -> None:
    found = parts(requests(**SAID))
    assert {p.name: p.ms for p in found.parts} == {
        "client lag": pytest.approx(2),
        "network": 1.0,
        "queue": 20.0,
        "prefill": 25.0,
        "decode": 40.0,
    }
    assert found.e2e_ms == pytest.approx(92)
    assert found.rest_ms == pytest.approx(92 - 2 - 1 - 20 - 25 - 40)  # 4 ms of HTTP and tokenizing
    assert found.error == pytest.approx(4 / 92)
    assert found.adds_up
    assert found.notes == []


def test_histograms_stand_in_and_say_of_which_requests_they_are() -> None:
    found = parts(requests(), scraped(queue_time=20.0, prefill_time=25.0, decode_time=40.0))
    assert found.rest_ms == pytest.approx(4)
    assert found.parts[2].source == "the server's histogram vllm:queue_time_seconds"
    assert found.notes == [
        "histograms: 6 scrapes over 5.0 s within the window, of the requests that ended between them"
    ]


def test_histograms_of_other_peoples_requests_too_are_a_note() -> None:
    found = parts(requests(), scraped(90, queue_time=20.0, prefill_time=25.0, decode_time=40.0))
    assert "counted 90 requests where this client had 40 end" in found.notes[1]


def test_of_replicas_scraped_at_other_times_it_is_not_said_how_many_requests_were_ours() -> None:
    a = scraped(10, queue_time=20.0, prefill_time=25.0, decode_time=40.0)
    b = a._replace(end_ns=START_NS + 1_000_000_000, scrapes=2)
    found = parts(requests(), total([a, b]))
    assert found.notes == [
        "histograms: replicas scraped over 1.0 to 5.0 s, not at the same times, within the window, "
        "of the requests that ended between them"
    ]


def test_without_any_account_only_the_clients_own_stamps_are_parts() -> None:
    found = parts(requests())
    assert found.ms("decode") == pytest.approx(40)  # first to last token
    assert found.ms("queue") is None
    assert found.ms("prefill") is None
    assert all("says nothing" in p.why for p in found.parts if p.ms is None)
    assert found.rest_ms == pytest.approx(92 - 2 - 1 - 40)
    assert not found.adds_up


def test_time_to_first_token_less_the_queue_is_prefill() -> None:
    found = parts(requests(server_queue_ms=20.0, server_ttft_ms=45.0, server_decode_ms=40.0))
    assert found.ms("prefill") == 25.0
    assert "less the queue" in found.parts[3].source


def test_time_to_first_token_alone_is_both() -> None:
    found = parts(requests(server_ttft_ms=45.0))
    assert found.ms("queue and prefill") == 45.0
    assert found.ms("queue") is None


def test_an_unmeasured_round_trip_is_unknown() -> None:
    found = parts(requests(rtt_ms=None, **SAID))
    assert found.ms("network") is None
    assert found.rest_ms == pytest.approx(5)


def test_a_server_that_was_restarted_gives_no_mean() -> None:
    figures = scraped(queue_time=20.0)
    torn = figures._replace(of={"queue_time": figures.of["queue_time"]._replace(resets=1)})
    found = parts(requests(), torn)
    assert found.ms("queue") is None
    assert {p.name: p.why for p in found.parts}["queue"] == (
        "vllm:queue_time_seconds fell 1 time: the server was started anew, or several answer at this URL"
    )


def test_no_ok_request_is_no_decomposition() -> None:
    c = cell([record(i, 10 * i, outcome="failed") for i in range(30)])
    assert decompose(c, windows.of(c)) is None


def test_answers_that_are_not_streamed_have_no_decode_of_their_own() -> None:
    c = cell([record(i, 100 * i, end=100 * i + 80, tokens_out=3) for i in range(40)])
    found = parts(c)
    assert found.e2e_ms == pytest.approx(80)
    assert found.ms("decode") is None


@given(*[st.floats(0, 1e4)] * 3)
def test_parts_and_rest_are_the_whole(queue: float, prefill: float, decode: float) -> None:
    c = requests(30, server_queue_ms=queue, server_prefill_ms=prefill, server_decode_ms=decode)
    found = parts(c)
    assert sum(p.ms or 0.0 for p in found.parts) + found.rest_ms == pytest.approx(found.e2e_ms)


def test_runs_of_a_load_are_one_by_their_requests_and_what_one_does_not_say_is_not_known():
    def run(e2e: float, requests: int, queue: float | None) -> Decomposition:
        parts = [
            Part("queue", queue, "" if queue is None else "s", "silent" if queue is None else ""),
            Part("decode", 50.0),
        ]
        return Decomposition(e2e, requests, parts, e2e - (queue or 0.0) - 50.0, ["note"])

    both = pooled([run(100.0, 30, 10.0), run(200.0, 10, 50.0)])
    assert both is not None
    assert (both.e2e_ms, both.requests, both.ms("queue"), both.rest_ms) == (125.0, 40, 20.0, 55.0)
    assert both.notes == ["note"]
    half = pooled([run(100.0, 30, 10.0), run(200.0, 10, None)])
    assert half is not None
    assert (half.unknown, half.parts[0].why, half.rest_ms) == (["queue"], "silent", 75.0)
    other = Decomposition(1.0, 1, [Part("queue and prefill", 1.0)], 0.0, [])
    assert pooled([run(100.0, 30, 10.0), other]) is None
