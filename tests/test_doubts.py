"""A clean cell raises no doubt; each check fires on its own trouble, with the figures."""

import re
from dataclasses import replace
from typing import Any

import pytest

from llm_bench import windows
from llm_bench.client import CLIENT_LIMITED
from llm_bench.doubts import CHECKS, Doubt, doubts
from llm_bench.metrics import compute_all
from llm_bench.records import Cell
from tests.sample import cell, closed_loop, gauge_of, header, ns, record
from tests.test_windows import held_up, slowing

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
    """Evidence and advice of each kind of doubt."""
    got = raised(c, siblings, names, **end)
    return {d.kind: ". ".join(filter(None, [d.text, d.advice])) for d in got}


def raised(c: Cell, siblings: tuple[Cell, ...] = (), names: tuple[str, ...] = (), **end: Any) -> list[Doubt]:
    window = windows.of(c)
    return doubts(c, window, siblings, compute_all(names, c, window), end)


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


def half_idle(**fields: Any) -> Cell:
    """Two slots, each with a request at the server for 50 of every 100 ms: the client takes 50 to send the next."""
    rows = [
        record(i, 50 * i, sent=50 * i + 50, ready_ns=ns(50 * i), events=[50 * i + 100], **fields) for i in range(60)
    ]
    return cell(rows, gauge_of(rows), load={"kind": "closed", "concurrency": 2, "warmup": None})


def slow_start(slow: int) -> Cell:
    rows = [record(i, 100 * i, events=[100 * i + 50, 100 * i + (900 if i < slow else 130)]) for i in range(100)]
    return cell(rows, load=OPEN)


LATE = [record(i, 100 * i, sent=100 * i + 12, ready_ns=ns(100 * i), events=[100 * i + 99]) for i in range(50)]
TWIN = [record(i, 10 * i, events=[10 * i + 5], prompt_hash=77 + i // 2) for i in range(50)]
PROBE = header()["probe"]
UNPINNED = {"probe": PROBE | {"lengths_pinned": False}}

FAULTS = {
    "start_ns": ns(0),
    "added_ms": 0.04,
    "done": [
        {"what": "1s:net:delay=5ms", "kind": "net", "planned_ns": ns(1000), "begun_ns": ns(1000), "ended_ns": ns(2000)}
        | {"ok": True, "result": ""}
    ],
}
HOST = {
    "worker": 1,
    "name": "west",
    "error_ns": 1000,
    "moved_ns": 0,
    "drift_ppm": None,
    "calibrated": True,
    "lost": False,
}

# kind -> (what found() gives, words that must stand in it)
TROUBLE = {
    "incomplete file": (lambda: found(replace(requests(), complete=False)), "100 whole requests"),
    "ended early": (lambda: found(requests(), reason="target gone"), "the target no longer answered"),
    "faults on purpose": (lambda: found(requests(), faults=FAULTS), "1 was done to this cell (--fault): its figures"),
    "fault proxy": (lambda: found(requests(), faults=FAULTS), "adds about 0.04 ms a round trip"),
    "broken identity": (lambda: found(requests(), counts=COUNTS | {"ok": 101}), "101"),
    "too short": (lambda: found(closed_loop(60, 10)), "31 requests in the window, at least 50"),
    "warming": (
        lambda: found(slow_start(15)),
        "begins after 15 of 100 requests, the warm-up was of 0; e2e is 900.0 ms on average between the two and 130.0",
    ),
    "drift": (lambda: found(slowing(400, 4)), "of the window e2e changed by +"),
    "overloaded": (lambda: found(growing()), "backlog grows 4.01 requests/s where 5.02/s arrive"),
    "not sustained": (lambda: found(queued()), "offered 5.00/s, completed 2.50/s over 2.4 s"),
    "too few requests": (lambda: found(requests(), names=("ttft_p99_9",)), "ttft_p99_9: p99.9 of 100"),
    "cut requests": (lambda: found(growing()), "of 142 were in flight at the end"),
    "failed requests": (lambda: found(failing(4)), "http_5xx 503 x25"),
    "retries": (lambda: found(requests(attempts=2)), "100 of 100 ok requests were not so at first"),
    "client lateness": (lambda: found(cell(LATE, load=OPEN)), "12% of TTFT is this client's own (mean 12.00 of 99"),
    "idle slots": (lambda: found(half_idle()), "on average 1.0 of 2 slots were at the server"),
    "client stalled": (
        lambda: found(requests(), loop_stalls=[[ns(500), 1000.0]]),
        "stood still once in the window, for up to 1000 ms, 10.10% of it",
    ),
    "client busy": (lambda: found(requests(), loop_lag_p99_ms=30.0, client_cpu_share=0.97), "97% of a core"),
    "client limited": (
        lambda: found(requests(), ceiling={"events_per_s": 60}),
        "50 of at most 60 token events/s (those of one read count once) (83%)",
    ),
    "host clocks": (
        lambda: found(requests(), hosts=[HOST | {"error_ns": 9_000_000, "moved_ns": 0}]),
        "requests of worker 1 (west) lie up to 9.0 ms off on the timeline",
    ),
    "host lateness": (
        lambda: found(requests(), hosts=[HOST | {"loop_lag_p99_ms": 30.0, "client_cpu_share": 0.97}]),
        "worker 1 (west) ran 30.0 ms late (p99); worker 1 (west) used 97% of a core",
    ),
    "host not calibrated": (lambda: found(requests(), hosts=[HOST | {"calibrated": False}]), "worker 1 (west)"),
    "delivered tokens": (lambda: found(requests(asked_out=6)), "500 of 600 asked (83.3%)"),
    "lengths not pinned": (
        lambda: found(requests(asked_out=7, head=UNPINNED)),
        "100 of 100 answers (100%) have another length than asked, by 2 tokens in the median and 2 at worst",
    ),
    "prompt tokens": (lambda: found(requests(tokens_in=107)), "(+7.0%)"),
    "planned prompt tokens": (lambda: found(requests(tokens_in=-1)), "no prompt tokens for 100 of 100"),
    "repeated prompts": (lambda: found(cell(TWIN, load=OPEN)), "25 within the cell"),
    "cached prompts": (lambda: found(requests(tokens_cached=98)), "took 98.0% of their tokens"),
    "estimated tokens": (lambda: found(requests(tokens_out_from="events")), "no usage for 100 of 100"),
    "usage disputed": (
        lambda: found(requests(tokens_counted=3)),
        "the server says 500 tokens where its tokenizer counts 300 (+66.7%)",
    ),
    "end unproven": (lambda: found(requests(labels=["end unproven"])), "100 answers"),
    "unreadable events": (lambda: found(requests(labels=["unreadable event"])), "a part of 100 of 100 answers"),
    "burst streams": (lambda: found(requests(events=[20_000] * 5)), "100% of the gaps are 0"),
    "trace changed": (lambda: found(requests(head={"settings": {"too_long": "3 of 9 rows: clipped"}})), "3 of 9"),
    "turns not sent": (lambda: found(requests(), turns_not_sent=7), "7, since"),
    "targets differ": (
        lambda: found(requests(head=with_target(1, model="a")), (requests(head=with_target(2, model="b")),)),
        "model 'a' at t1, 'b' at t2: not the same work",
    ),
    "network path": (
        lambda: found(
            requests(head=with_target(1)), (requests(head=with_target(2) | {"probe": PROBE | {"rtt_ms": 9.1}}),)
        ),
        "0.10 ms to t1, 9.10 ms to t2: over 10% of the smaller TTFT",
    ),
}


def test_every_check_has_its_trouble() -> None:
    assert list(TROUBLE) == list(CHECKS)


@pytest.mark.parametrize("kind", TROUBLE)
def test_each_check_fires_with_its_figures(kind: str) -> None:
    make, words = TROUBLE[kind]
    got = make()
    assert words in got[kind]


def test_a_backlog_that_a_limited_client_made_lowers_nothing_and_asks_for_no_lower_rate() -> None:
    held, own = (
        {d.kind: d for d in raised(made)} for made in (held_up(10, 2000, 2000, 15), held_up(40, 2000, 2000, 15))
    )
    assert set(CLIENT_LIMITED) & held.keys() and set(CLIENT_LIMITED) & own.keys()
    assert held["overloaded"].text.endswith(windows.BY_CLIENT)
    assert (held["overloaded"].effect, held["overloaded"].advice) == ("either way", "")
    assert own["overloaded"].effect == "too low"


def test_evidence_effect_and_advice_are_told_apart_and_make_a_sentence() -> None:
    (doubt,) = (d for d in raised(growing(), reason="exhausted") if d.kind == "overloaded")
    assert doubt.text.endswith("so all other figures depend on how long the run was")
    assert (doubt.effect, doubt.advice) == ("too low", "Lower --rate or --speed")
    assert doubt.sentence == f"{doubt.text}. Latencies are likely too low. Lower --rate or --speed"
    assert Doubt("missing cell", "t at c=8: gone").sentence == "t at c=8: gone. Figures may be off either way"
    early, late = (_effect(requests(asked_out=asked), "delivered tokens") for asked in (6, 4))
    assert (early, late) == ("too low", "too high")  # shorter answers end sooner
    assert _effect(slow_start(15), "warming") == "too high"
    assert _effect(slowing(400, 4), "drift") == "too low"  # a longer run would be slower


def _effect(c: Cell, kind: str) -> str:
    return next(d.effect for d in raised(c) if d.kind == kind)


def test_a_steady_state_that_begins_past_the_half_makes_the_window_too_short() -> None:
    got = found(slow_start(54))
    assert got["too short"].startswith(
        "steady state begins after 50 of 100 requests, the warm-up was of 0: what is left"
    )
    assert "warming" not in got


@pytest.mark.parametrize("kind", TROUBLE)
def test_no_doubt_says_its_kind_twice(kind: str) -> None:
    text = TROUBLE[kind][0]()[kind]
    first_clause = re.split(r"[:.;(]", text.lower())[0]
    assert not all(word[:5] in first_clause for word in kind.split()), text


def test_lateness_is_the_clients_share_of_the_mean_or_a_p99_of_10_ms() -> None:
    def late_by(ms: float, ttft: float = 60.0, one: float = 0.0) -> str:
        rows = [record(i, 100 * i, sent=100 * i + ms, ready_ns=ns(100 * i), events=[100 * i + ttft]) for i in range(50)]
        rows[7].sent_ns += round(one * 1e6)
        return found(cell(rows, load=OPEN)).get("client lateness", "")

    assert late_by(2.9) == ""  # 4.8% of the mean TTFT
    assert late_by(3.1).startswith("5% of TTFT is this client's own (mean 3.10 of 60.00 ms). ")
    assert late_by(0.5, ttft=20.0, one=5.0) == ""  # one request late by over a quarter of its TTFT
    assert late_by(11.0, ttft=1000.0).startswith("p99 of its delay is 11.00 ms. ")
    assert "up to" not in late_by(11.0)


def test_lateness_where_nothing_was_streamed_is_held_against_the_whole_answer() -> None:
    rows = [record(i, 100 * i, sent=100 * i + 9, ready_ns=ns(100 * i), end=100 * i + 90) for i in range(50)]
    assert found(cell(rows, load=OPEN))["client lateness"].startswith("10% of E2E is this client's own")


def test_waiting_for_the_cap_is_no_lateness_of_the_client() -> None:
    assert "client lateness" not in found(queued())


def test_waiting_for_a_new_connection_is_not_put_down_to_the_client() -> None:
    got = found(half_idle(connect_ns=48_000_000))
    assert "connecting anew, not the target, was the limit" in got["idle slots"]
    assert "client lateness" not in got
    assert "the client, not the target, was the limit" in found(half_idle(connect_ns=8_000_000))["idle slots"]


def test_slots_of_users_who_think_and_of_lost_records_are_no_sign_of_a_slow_client() -> None:
    assert "idle slots" in found(half_idle())
    assert "idle slots" not in found(half_idle(session="a"))
    assert "idle slots" not in found(replace(half_idle(), complete=False))
    assert "idle slots" not in found(closed_loop(100, 10))
    assert "idle slots" not in found(closed_loop(15, 10))  # the whole run, ramp and drain included: not all are busy


def stopped(reason: str) -> dict[str, str]:
    rows = [record(i, 100 * i, events=[100 * i + 90]) for i in range(12)]
    rows += [record(12, 1150, end=1200, outcome="cut_at_end"), record(13, 1200, end=1201, outcome="cut_at_end")]
    return found(cell(rows, load=OPEN), names=("ttft_p95",), reason=reason)


def test_a_run_that_was_stopped_gets_no_advice_on_settings() -> None:
    reasons = {"interrupted": "the run was interrupted", "target gone": "the target no longer answered"}
    reasons["worker 1 killed by signal 9"] = "worker 1 died (killed by signal 9)"
    for reason, words in reasons.items():
        got = stopped(reason)
        assert got["cut requests"] == f"2 of 14 were in flight when {words}: neither slow nor fast, left out"
        assert got["ended early"] == f"{words}. Run it again"
        assert got["too short"].endswith(f"at least 20 are needed; {words}")
        assert not any("--" in text for text in got.values()), got
    assert stopped("exhausted")["cut requests"].endswith(
        "in flight at the end: neither slow nor fast, left out. Raise --drain"
    )
    assert "Give more --requests" in stopped("exhausted")["too short"]
    assert "--" not in stopped("")["cut requests"]  # nothing says why they were cut
    assert "--" not in found(replace(closed_loop(60, 10), complete=False))["too short"]


def test_a_window_in_which_nothing_ended_is_said_to_be_short() -> None:
    assert "took longer than the 9.9 s of the window" in found(requests(events=[90_000, 91_000]))["too short"]


def test_failures_leave_the_latencies_to_the_others_if_there_are_any() -> None:
    assert "latencies are of the others" in found(failing(4))["failed requests"]
    assert found(failing(1))["failed requests"] == "100.0% (http_5xx 503 x100): there is no latency to read"


def test_planned_sharing_is_no_doubt() -> None:
    shared = {"plan": {"shares": True}}
    assert "repeated prompts" not in found(cell(TWIN, load=OPEN, **shared))
    assert "cached prompts" not in found(requests(tokens_cached=98, head=shared))
    assert "cached prompts" in found(requests(tokens_cached=98, head={"settings": {"reuse_prompts": True}}))
    assert "cached prompts" not in found(requests(tokens_cached=98, session="a"))


def test_a_cache_that_finds_more_than_the_plan_shares_was_warm() -> None:
    def cached(tokens: int, shareable: list[list[float]], sent: int = 100) -> str:
        head = {"plan": {"shares": True, "requests": 100, "shareable": shareable}}
        return found(requests(sent, tokens_cached=tokens, head=head)).get("cached prompts", "")

    assert not cached(49, [[50, 0.1], [100, 0.4]])  # 10 points are a template's and a count's
    assert "took 51.0% of their tokens" in cached(51, [[50, 0.1], [100, 0.4]])
    assert "of the plan's an endless cache can find 40.0%" in cached(51, [[50, 0.1], [100, 0.4]])
    assert "can find 10.0%" in cached(51, [[25, 0.05], [50, 0.1], [100, 0.6]], sent=40)  # the rest was not sent
    assert not cached(51, [[25, 0.5], [50, 0.1], [100, 0.1]], sent=40)  # where it stopped, more was shared


def test_a_warm_cache_shows_before_the_window_too() -> None:
    head = {"plan": {"shares": True, "shareable": [[100, 0.5]]}}
    rows = [record(i, 100.0 * i, events=[100.0 * i + 50 + 20 * k for k in range(5)], asked_out=5) for i in range(100)]
    for i, row in enumerate(rows):
        rows[i] = replace(row, tokens_cached=0 if i < 40 else row.tokens_in)
    assert "cached prompts" not in found(cell(rows, load=OPEN | {"warmup": 4.0}, **head))  # 60% of all, 100% of it


def test_a_cached_chat_template_is_no_cached_prompt() -> None:
    head = {"probe": {"base_tokens": 30.0, "lengths_pinned": True}}
    assert "cached prompts" not in found(requests(tokens_cached=24, tokens_in=64, planned_in=64, head=head))
    assert "took 28.1%" in found(requests(tokens_cached=48, tokens_in=64, planned_in=64, head=head))["cached prompts"]


def test_prompts_of_an_earlier_cell_are_found_without_any_report_of_a_cache() -> None:
    first, second = cell(TWIN[::2], load=OPEN), requests(prompt_hash=77, n=1, step=9)
    later = cell(
        [record(i, 90_000 + 10 * i, events=[90_005 + 10 * i], prompt_hash=77 + i) for i in range(25)], load=OPEN
    )
    assert "25 of an earlier cell" in found(later, (first,))["repeated prompts"]
    assert "repeated prompts" not in found(first, (later, second))
    elsewhere = cell(TWIN[::2], load=OPEN, **with_target(9))
    assert "repeated prompts" not in found(later, (elsewhere,))


def test_running_out_before_the_duration_is_a_doubt() -> None:
    load = OPEN | {"duration_s": 60.0}
    assert "--loop-trace" in found(requests(head={"load": load}), reason="exhausted")["ended early"]
    assert "ended early" not in found(requests(head={"load": load}), reason="duration")
    # 100 requests 100 ms apart: the last is due at 9.9 s. An open loop that lasts 10 s has run its course.
    for seconds, short in ((10.0, False), (10.8, False), (11.0, True)):
        head = {"load": load | {"duration_s": seconds}}
        assert ("ended early" in found(requests(head=head), reason="exhausted")) == short
        assert "ended early" not in found(requests(head=head), reason="exhausted", start_ns=ns(-1000))
    closed = {"kind": "closed", "concurrency": 10, "duration_s": 0.95}
    assert "ended early" in found(closed_loop(100, 10, load=closed), reason="exhausted")
    looped = {"load": load, "settings": {"loop_trace": True}, "plan": {"requests": 240}}
    assert found(requests(head=looped), reason="exhausted")["ended early"] == (
        "the 240 requests planned at most ran out before --duration was over. Give --requests above that"
    )


def test_an_empty_cell_can_be_doubted_too() -> None:
    assert set(found(cell([], load=OPEN))) == {"too short"}


def test_a_retry_that_failed_all_the_same_hid_nothing() -> None:
    rows = [record(i, 10 * i, outcome="failed", end=10 * i + 5, attempts=2, first_attempt="http_503") for i in range(9)]
    assert "retries" not in found(
        cell([*rows, *(record(i, 10 * i, events=[10 * i + 5]) for i in range(9, 50))], load=OPEN)
    )
    rows[0] = record(0, 0, events=[5], attempts=2, first_attempt="http_503")
    assert found(cell(rows, load=OPEN))["retries"].startswith("1 of 1 ok requests were not so at first")


def test_several_choices_are_asked_for_as_many_tokens_each() -> None:
    two = {"event_choice": [0, 1, 0, 1, 0, 1], "asked_out": 3, "events": [20_000 + k for k in range(6)]}
    assert "delivered tokens" not in found(requests(**two))
    assert "500 of 600" not in found(requests(**two)).get("delivered tokens", "")
    assert "300 of 600 asked" in found(requests(**two, tokens_out=3))["delivered tokens"]


def test_a_client_near_its_ceiling_is_the_limit() -> None:
    # 100 requests of 5 events in 9.9 s: 10 requests/s and 50 events/s.
    assert "client limited" in found(requests(), ceiling={"events_per_s": 62.0})
    assert "client limited" not in found(requests(), ceiling={"events_per_s": 63.0, "requests_per_s": 13.0})
    assert "10 of at most 12 requests/s" in found(requests(), ceiling={"requests_per_s": 12.0})["client limited"]
    assert "client limited" not in found(requests(), ceiling={"requests_per_s": 12.0}, workers=2)
    assert "2 cores" in found(requests(), ceiling={"requests_per_s": 6.0}, workers=2)["client limited"]
    assert "client limited" not in found(requests(), ceiling=None)


def test_the_latest_of_several_event_loops_counts() -> None:
    assert "ran 30.0 ms late" in found(requests(), loop_lag_p99_ms=2.0, worker_loop_lag_ms=[2.0, 30.0])["client busy"]
    assert "client busy" not in found(requests(), loop_lag_p99_ms=2.0, worker_loop_lag_ms=[2.0, 3.0])


def test_stalls_count_where_they_touch_the_window_and_are_longer_than_a_gap() -> None:
    def stalled(*stalls: tuple[float, float], gap: float = 20.0) -> str:
        rows = [record(i, 100 * i, events=[100 * i + 50 + gap * k for k in range(5)]) for i in range(100)]
        return found(cell(rows, load=OPEN), loop_stalls=[[ns(at), ms] for at, ms in stalls]).get("client stalled", "")

    many = [(500 + 100 * k, 19.9) for k in range(9)]
    assert stalled(*many) == ""  # no longer than the gaps between tokens
    assert "1.81%" in stalled(*many, gap=1.0)
    assert stalled(*[(500 + 100 * k, 9.9) for k in range(9)], gap=1.0) == ""  # as any operating system does
    assert stalled((500, 49.0), gap=1.0) == ""  # under half a percent of the window: no percentile is made of it
    assert "once" in stalled((500, 50.0), gap=1.0)
    assert stalled((-400, 399.0), (9_901, 500.0)) == ""  # before the window and after it
    assert "2 times in the window, for up to 400 ms, 4.04% of it" in stalled((-1, 300.0), (0, 400.0))  # two workers


def test_a_cell_without_an_end_is_doubted_whatever_its_records_say() -> None:
    planned = {"plan": {"requests": 150}}
    text = found(requests(head=planned), reason="no end")["ended early"]
    assert text.startswith("it has no end: killed, or stopped by an error; 100 of at most 150 requests are recorded")
    overloaded = found(growing(), reason="no end")["overloaded"]
    assert "Lower" not in overloaded
    assert "records that are lost look like a backlog, and it has no end" in overloaded
    assert "Lower --rate" in found(growing(), reason="exhausted")["overloaded"]


def test_a_dead_worker_is_named_with_what_is_lost() -> None:
    rows = [record(i, 100 * i, events=[100 * i + 90]) for i in range(30)]
    rows.append(record(30, 3000, end=3010, outcome="cut_at_end", labels=["lost with its worker"]))
    got = found(cell(rows, load=OPEN), reason="worker 1 killed by signal 9")["ended early"]
    assert got.startswith("worker 1 died (killed by signal 9); 1 requests that it had begun are lost with it.")


def test_more_records_than_were_planned_break_an_identity_however_the_cell_ended() -> None:
    for reason in ("duration", "interrupted", ""):
        got = found(requests(head={"plan": {"requests": 99}}), reason=reason)
        assert "99 requests were planned, 100 are recorded" in got["broken identity"]


def test_turns_that_were_not_sent_when_the_duration_was_over_say_so() -> None:
    over = "7, since the duration was over"
    longer = "Give a longer --duration"
    assert found(requests(), turns_not_sent=7, reason="duration")["turns not sent"] == f"{over}. {longer}"
    spoiled = found(failing(4), turns_not_sent=7, reason="duration")["turns not sent"]
    assert spoiled == f"{over} or one before them failed or was cut. {longer}"
    assert "duration" not in found(requests(), turns_not_sent=7, reason="exhausted")["turns not sent"]


def lengths(*answers: tuple[int, str], pinned: bool = False, **fields: Any) -> tuple[str, str]:
    """(evidence, effect) of "lengths not pinned" where five tokens were asked and (tokens, counted by whom) came."""
    rows = [
        record(i, 100 * i, events=[100 * i + 50, 100 * i + 60], asked_out=5, tokens_out=n, tokens_out_from=by, **fields)
        for i, (n, by) in enumerate(answers)
    ]
    got = raised(cell(rows, load=OPEN, probe=PROBE | {"lengths_pinned": pinned}))
    return next(((d.text, d.effect) for d in got if d.kind == "lengths not pinned"), ("", ""))


EXACT = {"event_tokens": [2, 3]}
UNKNOWN = "of {} of {} answers the length is unknown, and the target ends them where it likes"
OFF = "{} of {} answers ({}) have another length than asked, by {} in the median and {} at worst"


@pytest.mark.parametrize(("answers", "fields", "said"), [
    ([(5, "usage")] * 8, {}, ("", "")),
    ([(10, "usage")] * 8, {"choices": 2}, ("", "")),  # five of each
    ([(5, "events")] * 8, EXACT, ("", "")),  # every event says its tokens
    ([(5, "usage")] * 6 + [(4, "usage"), (2, "usage")], {}, (OFF.format(2, 8, "25%", "2 tokens", 3), "too low")),
    ([(5, "usage")] * 7 + [(9, "usage")], {}, (OFF.format(1, 8, "12.5%", "4 tokens", 4), "too high")),
    ([(4, "usage"), (6, "usage")] * 4, {}, (OFF.format(8, 8, "100%", "1 token", 1), "either way")),
    ([(5, "events")] * 8, {}, (UNKNOWN.format(8, 8), "too low")),  # as many events as tokens, by luck
    ([(5, "tokenizer")] * 8, {}, (UNKNOWN.format(8, 8), "too low")),  # an end token has no text
    ([(5, "events")] * 8, {"event_tokens": [2, 0]}, (UNKNOWN.format(8, 8), "too low")),
    ([(5, "events")] * 8, {"event_tokens": [5, 0]}, (UNKNOWN.format(8, 8), "too low")),
    ([(-1, "")] * 8, {}, (UNKNOWN.format(8, 8), "too low")),
    ([(5, "usage")] * 6 + [(5, "events")] * 2, {}, (UNKNOWN.format(2, 8), "too low")),
    (
        [(5, "usage")] * 5 + [(3, "usage")] + [(5, "events")] * 2, {},
        (f"{OFF.format(1, 8, '12.5%', '2 tokens', 2)}; {UNKNOWN.format(2, 8)}", "too low"),
    ),
    (  # longer, as far as is known; the others may have ended early
        [(5, "usage")] * 5 + [(7, "usage")] + [(5, "events")] * 2, {},
        (f"{OFF.format(1, 8, '12.5%', '2 tokens', 2)}; {UNKNOWN.format(2, 8)}", "either way"),
    ),
])  # fmt: skip
def test_lengths_that_could_not_be_pinned_are_doubted_only_as_far_as_they_came_otherwise_or_are_unknown(
    answers: list[tuple[int, str]], fields: dict[str, Any], said: tuple[str, str]
) -> None:
    assert lengths(*answers, **fields) == said
    assert lengths(*answers, pinned=True, **fields) == ("", "")


def test_answers_that_were_asked_for_no_length_and_such_as_failed_say_nothing_of_lengths() -> None:
    assert "lengths not pinned" not in found(requests(asked_out=-1, head=UNPINNED))
    rows = [record(i, 100 * i, events=[100 * i + 50], asked_out=1) for i in range(8)]
    rows += [record(8, 800, outcome="failed", asked_out=5, tokens_out=3), record(9, 900, outcome="cut_at_end")]
    assert "lengths not pinned" not in found(cell(rows, load=OPEN, **UNPINNED))


def test_a_usage_above_what_was_asked_is_not_put_down_to_early_ends() -> None:
    assert "ends answers itself" in found(requests(asked_out=6, head=UNPINNED))["delivered tokens"]
    assert "its usage counts more than the answer" in found(requests(asked_out=4, head=UNPINNED))["delivered tokens"]


def test_delivered_tokens_are_counted_where_every_event_says_its_own() -> None:
    said = {"tokens_out_from": "events", "asked_out": 6}
    assert "delivered tokens" not in found(requests(**said))
    assert found(requests(event_tokens=[1] * 5, **said))["delivered tokens"].startswith("500 of 600 asked (83.3%)")


@pytest.mark.parametrize(("said", "counted", "doubted"), [
    (100, 100, False), (101, 100, False), (103, 100, False), (104, 100, True), (99, 100, False), (97, 100, True),
    (200, 100, True), (100, -1, False),
])  # fmt: skip
def test_usage_is_held_against_the_tokenizer_but_for_an_end_token_without_text(
    said: int, counted: int, doubted: bool
) -> None:
    got = found(requests(tokens_out=said, asked_out=said, tokens_counted=counted))
    assert ("usage disputed" in got) is doubted


def test_answers_that_come_in_one_read_are_not_held_against_the_ceiling_of_single_events() -> None:
    at_once = cell([record(i, 100 * i, events=[100 * i + 50] * 50, asked_out=50) for i in range(100)], load=OPEN)
    assert "client limited" not in found(at_once, ceiling={"events_per_s": 60})
    assert "client limited" in found(at_once, ceiling={"events_per_s": 60, "requests_per_s": 1})


@pytest.mark.parametrize(
    ("names", "doubted"),
    [((), True), (("ttft_p50", "tokens_per_second"), False), (("ttft_p50", "total_tokens_per_second"), True)],
)
def test_prompts_that_nobody_counted_are_a_doubt_of_the_figures_that_have_them_in_it(names, doubted) -> None:
    assert ("planned prompt tokens" in found(requests(tokens_in=-1), names=names)) is doubted


@pytest.mark.parametrize(("choices", "doubted"), [(2, False), (1, True), (3, True), (-1, True)])
def test_whole_answers_of_several_choices_are_held_against_what_was_asked_of_all(choices: int, doubted: bool) -> None:
    """They have no events that would tell of choices."""
    got = found(requests(events=(), asked_out=5, tokens_out=10, choices=choices))
    assert ("delivered tokens" in got) is doubted
