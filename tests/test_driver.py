import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_bench.clock import Timer, now_ns
from llm_bench.driver import closed_loop, open_loop, pace
from llm_bench.exchange import CANCELLED, COMPLETE, CONNECT_ERROR, CUT, TOTAL_TIMEOUT, Exchange, Timeouts
from llm_bench.flights import Drive, Flight, Gauge
from llm_bench.retry import Tried, retrying
from llm_bench.wire import Wire, run
from tests.quiet import undisturbed
from tests.scripted import Script, Scripted, Seen, http_response

MS = 1_000_000


@dataclass
class Rows:
    """A plan in memory. The payload of row i is b"i" and what the turn before had been answered."""

    due_ns: list[int]
    first: list[int] = field(default_factory=list)
    next_turn: list[int] = field(default_factory=list)
    think_ns: list[int] = field(default_factory=list)
    cancels: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = len(self.due_ns)
        self.first = self.first or list(range(n))
        self.next_turn = self.next_turn or [-1] * n
        self.think_ns = self.think_ns or [-1] * n

    def __len__(self) -> int:
        return len(self.due_ns)

    def payload(self, index: int, previous: Exchange | None) -> bytes:
        return b"%d<%b" % (index, b"".join(previous.pieces)) if previous else b"%d" % index

    def cancel_s(self, index: int) -> float | None:
        return self.cancels.get(index)


def conversations(*turns: Sequence[int], due_ns: Sequence[int] | None = None, think_ns: int = -1) -> Rows:
    """Rows of conversations given as lists of rows."""
    n = sum(map(len, turns))
    following = [-1] * n
    for rows in turns:
        for a, b in pairwise(rows):
            following[a] = b
    due = list(due_ns) if due_ns else [-1] * n
    return Rows(due, [rows[0] for rows in turns], following, [think_ns] * n)


class Target:
    """`send` as a function passed in: answers after service_ms, one at a time when `serial`; cancelled it says CUT."""

    def __init__(self, service_ms: float | Callable[[int], float] = 0.0, serial: bool = False) -> None:
        self.service_ms = service_ms
        self.lock = asyncio.Lock() if serial else None
        self.sent: list[tuple[int, int]] = []  # (row, ns)
        self.payloads: list[bytes] = []
        self.now = 0
        self.peak = 0

    async def send(self, payload: bytes, cancel_s: float | None) -> Tried:
        row = int(payload.partition(b"<")[0])
        exchange = Exchange(sent_ns=now_ns(), status=200, pieces=[b"answer %d" % row])
        self.sent.append((row, exchange.sent_ns))
        self.payloads.append(payload)
        self.now += 1
        self.peak = max(self.peak, self.now)
        try:
            if self.lock is None:
                await self._serve(row)
            else:
                async with self.lock:
                    await self._serve(row)
            exchange.ended = COMPLETE
        except asyncio.CancelledError:
            exchange.ended, exchange.error = CUT, "cut"
        self.now -= 1
        exchange.end_ns = now_ns()
        return Tried(exchange, 1, exchange, 0)

    async def _serve(self, row: int) -> None:
        service_ms = self.service_ms(row) if callable(self.service_ms) else self.service_ms
        await asyncio.sleep(service_ms / 1e3)


@dataclass
class Result:
    drive: Drive
    flights: list[Flight]
    gauge: Gauge
    target: Target

    def by_row(self) -> dict[int, Flight]:
        return {f.index: f for f in self.flights}

    def exchange(self, row: int) -> Exchange:
        tried = self.by_row()[row].tried
        assert tried is not None
        return tried.exchange

    def lag_ms(self, row: int) -> float:
        return (self.exchange(row).sent_ns - self.by_row()[row].due_ns) / MS


Loop = Callable[..., Awaitable[Drive]]
DEFAULTS: dict[Any, dict[str, Any]] = {
    closed_loop: {"concurrency": 1, "warmup": 0, "ramp_s": 0.0, "duration_s": None, "drain_s": 5.0},
    open_loop: {"max_in_flight": None, "duration_s": None, "drain_s": 5.0},
}


def drive(
    loop: Loop,
    plan: Rows,
    service_ms: float | Callable[[int], float] = 0.0,
    serial: bool = False,
    stop_after_s: float | None = None,
    accept: Callable[[Flight], bool | None] = lambda flight: None,
    target: Target | None = None,
    **more: Any,
) -> Result:
    async def main() -> Result:
        server, gauge, flights, stop = target or Target(service_ms, serial), Gauge(), [], asyncio.Event()
        if stop_after_s is not None:
            asyncio.get_running_loop().call_later(stop_after_s, stop.set)

        def done(flight: Flight) -> bool | None:
            flights.append(flight)
            return accept(flight)

        result = await loop(plan, server.send, done, stop=stop, gauge=gauge, **(DEFAULTS[loop] | more))
        assert asyncio.all_tasks() == {asyncio.current_task()}, "the drive leaves nothing running"
        return Result(result, flights, gauge, server)

    return run(main())


# ---- pacing (case 15)


def test_what_a_dispatch_costs_never_adds_up() -> None:
    """Case 15: 200/s, 1000 requests, each dispatch costs 0.45 ms of a fake clock."""
    clock = 0
    sent: list[int] = []

    async def sleep_until(due_ns: int) -> None:
        nonlocal clock
        clock = max(clock, due_ns)

    def launch(row: int, due_ns: int) -> None:
        nonlocal clock
        clock += 450_000
        sent.append(clock)

    dues = [(i, i * 5 * MS) for i in range(1000)]
    asyncio.run(pace(dues, sleep_until, launch))
    delays = [at - due for at, (_, due) in zip(sent, dues, strict=True)]
    assert dues[-1][1] == 4995 * MS
    assert max(delays) == 450_000
    assert np.polyfit(range(1000), delays, 1)[0] == pytest.approx(0, abs=1e-6)
    assert 999 / ((sent[-1] - sent[0]) / 1e9) == pytest.approx(200.0)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**8)), max_size=50))
def test_a_late_launch_delays_only_those_due_before_it_is_over(steps: list[tuple[int, int]]) -> None:
    dues = sorted(due for due, _ in steps)
    costs = [cost for _, cost in steps]
    clock, begun = 0, []

    async def sleep_until(due_ns: int) -> None:
        nonlocal clock
        clock = max(clock, due_ns)

    def launch(row: int, due_ns: int) -> None:
        nonlocal clock
        begun.append(clock)
        clock += costs[row]

    asyncio.run(pace(enumerate(dues), sleep_until, launch))
    free = 0
    for at, due, cost in zip(begun, dues, costs, strict=True):
        assert at == max(due, free)  # an M/G/1 queue's recursion: no more lateness than the work itself
        free = at + cost


@undisturbed
def test_lateness_does_not_grow_over_a_real_run() -> None:
    got = drive(open_loop, Rows([i * 2 * MS for i in range(500)]), service_ms=20)
    lags = np.array([got.lag_ms(i) for i in range(500)])
    assert lags.min() >= 0
    assert np.median(lags) < 1.0
    span_s = (got.exchange(499).sent_ns - got.exchange(0).sent_ns) / 1e9
    assert 499 / span_s == pytest.approx(500, rel=0.02)
    assert abs(np.median(lags[250:]) - np.median(lags[:250])) < 0.5


@undisturbed
def test_a_burst_is_sent_at_once_and_in_order() -> None:
    got = drive(open_loop, Rows([5 * MS] * 100), service_ms=50)
    assert [row for row, _ in got.target.sent] == list(range(100))
    assert got.target.peak == 100
    assert max(got.lag_ms(i) for i in range(100)) < 40


def test_rows_out_of_time_order_leave_in_time_order() -> None:
    got = drive(open_loop, Rows([20 * MS, 0, 10 * MS]))
    assert [row for row, _ in got.target.sent] == [1, 2, 0]


# ---- the cap of an open loop (cases 16 and 17)


@undisturbed
def test_waiting_at_the_cap_is_part_of_the_latency() -> None:
    """Case 16 at a tenth of its times: 50 req/s, cap 1, service 40 ms."""
    got = drive(open_loop, Rows([i * 20 * MS for i in range(6)]), service_ms=40, max_in_flight=1)
    ends = [got.exchange(i).end_ns for i in range(6)]
    waits = [(f.ready_ns - f.due_ns) / MS for f in got.flights]
    latencies = [(ends[i] - got.by_row()[i].due_ns) / MS for i in range(6)]
    early = 2  # a sleep of asyncio's may end so many ms early; late it is by what this machine does besides
    assert all(wait >= 20 * i - early * (i + 1) for i, wait in enumerate(waits))
    assert all(latency >= 40 + 20 * i - early * (i + 1) for i, latency in enumerate(latencies))
    assert all(0 <= got.by_row()[i].ready_ns - ends[i - 1] < 20 * MS for i in range(1, 6))
    assert [row for row, _ in got.target.sent] == list(range(6))
    assert got.target.peak == got.gauge.peak == 1


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 5), st.lists(st.integers(0, 20), min_size=1, max_size=20))
def test_the_cap_is_never_passed_and_its_queue_keeps_the_order(cap: int, dues_ms: list[int]) -> None:
    dues = sorted(ms * MS for ms in dues_ms)
    got = drive(open_loop, Rows(dues), service_ms=3, max_in_flight=cap)
    assert got.target.peak <= cap
    ready = [f.ready_ns for _, f in sorted(got.by_row().items())]
    assert ready == sorted(ready)
    assert len(ready) == len(dues)
    assert all(f.due_ns <= f.ready_ns for f in got.flights)


def test_a_place_that_became_free_while_the_client_was_late_was_waited_for_until_then() -> None:
    """Row 0 holds the only place, and the loop too, for 30 ms; row 1 was due after 5 and would have queued."""

    def service_ms(row: int) -> float:
        if row == 0:
            time.sleep(0.03)
        return 0.0

    got = drive(open_loop, Rows([0, 5 * MS]), service_ms=service_ms, max_in_flight=1)
    assert got.by_row()[1].ready_ns >= got.exchange(0).end_ns
    assert got.by_row()[0].ready_ns == got.by_row()[0].due_ns


class Behind(Target):
    """A server that ends one request for each five that it gets: overloaded by count, on a machine of any speed."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[asyncio.Future[None]] = []
        self.before: list[int] = []  # in flight when a request came

    async def _serve(self, row: int) -> None:
        self.before.append(len(self.waiting))
        ended = asyncio.get_running_loop().create_future()
        self.waiting.append(ended)
        if len(self.before) % 5 == 0:
            self.waiting.pop(0).set_result(None)
        await ended


def test_an_overloaded_server_gets_every_request_on_time_and_the_rest_is_cut() -> None:
    """Case 17 by count: of 150 requests the server ends 30. One that waited for answers would never send the fifth."""
    got = drive(open_loop, Rows([i * 2 * MS for i in range(150)]), target=Behind(), drain_s=0.0)
    assert [row for row, _ in got.target.sent] == list(range(150))
    assert got.target.before == [i - i // 5 for i in range(150)]  # type: ignore[attr-defined]
    assert min(got.lag_ms(i) for i in range(150)) >= 0
    assert sum(got.exchange(i).ended == COMPLETE for i in range(150)) == 30
    assert (len(got.flights), got.drive.cut, got.gauge.peak) == (150, 120, 121)
    assert got.drive.reason == "exhausted"


def test_a_late_start_of_a_burst_is_no_reason_to_hold_the_next_ones_back() -> None:
    """The client stops for 100 ms in the midst: all that fell due meanwhile leaves then, at its own due time."""
    stopped: list[int] = []

    def service_ms(row: int) -> float:
        if row == 10:
            time.sleep(0.1)
            stopped.append(now_ns())
        return 0.0

    got = drive(open_loop, Rows([i * 2 * MS for i in range(150)]), service_ms=service_ms)
    due_meanwhile = [i for i in range(11, 150) if got.by_row()[i].due_ns <= stopped[0]]
    assert len(due_meanwhile) >= 45
    assert all(got.exchange(i).sent_ns >= stopped[0] for i in due_meanwhile)
    assert [got.by_row()[i].due_ns - got.drive.start_ns for i in range(150)] == [i * 2 * MS for i in range(150)]


def test_a_drain_that_is_too_short_cuts_those_in_flight_and_drops_those_that_queue() -> None:
    got = drive(open_loop, Rows([0] * 5), service_ms=10_000, max_in_flight=2, drain_s=0.1)
    rows = got.by_row()
    assert [rows[i].tried is None for i in range(5)] == [False, False, True, True, True]
    assert {rows[i].ready_ns for i in (2, 3, 4)} == {0}
    assert got.drive.cut == 2


@pytest.mark.parametrize("loop", [closed_loop, open_loop])
def test_without_a_drain_limit_each_request_ends_by_its_own_limits_and_none_is_cut(loop: Loop) -> None:
    """As by default: a limit equal to the total time-out would race the last requests' own alarms, and hide them."""
    plan = Rows([0] * 8)
    plan.payload = lambda index, previous: b"Content-Length: 2\r\n\r\n{}"  # type: ignore[method-assign]

    async def main(url: str) -> tuple[Drive, list[str]]:
        wire = Wire(url, "/c", [], Timeouts(total_s=0.3), None)
        ended: list[str] = []

        def done(flight: Flight) -> None:
            ended.append(flight.tried.exchange.ended if flight.tried else "dropped")

        limit: dict[str, Any] = {"concurrency": 4} if loop is closed_loop else {"max_in_flight": 4}
        options = DEFAULTS[loop] | limit | {"drain_s": None, "stop": asyncio.Event()}
        result = await loop(plan, retrying(wire.send, 0), done, **options)
        wire.close()
        return result, ended

    with Scripted(["hang"]) as server:
        result, ended = run(main(server.url))
    assert ended == [TOTAL_TIMEOUT] * 8
    assert (result.cut, result.reason) == (0, "exhausted")


@undisturbed
def test_a_drain_runs_from_the_last_due_time_and_not_from_the_start_or_the_last_answer() -> None:
    got = drive(open_loop, Rows([0, 200 * MS]), service_ms=lambda row: 60_000 if row else 250, drain_s=0.3)
    assert got.exchange(0).ended == COMPLETE
    assert got.exchange(1).ended == CUT
    last_due_ns = got.by_row()[1].due_ns
    assert got.exchange(1).end_ns - last_due_ns >= 300 * MS
    assert got.exchange(1).end_ns - got.exchange(1).sent_ns < 60_000 * MS


@undisturbed
def test_requests_due_after_the_duration_are_no_part_of_the_drive() -> None:
    got = drive(open_loop, Rows([i * 20 * MS for i in range(20)]), service_ms=5, duration_s=0.105)
    assert sorted(got.by_row()) == [0, 1, 2, 3, 4, 5]
    assert got.drive.reason == "duration"
    assert (got.drive.window_open_ns - got.drive.start_ns, got.drive.window_close_ns - got.drive.start_ns) == (
        0,
        100 * MS,
    )


# ---- the closed loop (cases 19, 21, 22)


@pytest.mark.parametrize("slots", [1, 3, 45, 256])
def test_concurrency_is_what_was_asked_and_never_more(slots: int) -> None:
    got = drive(closed_loop, Rows([-1] * slots * 4), service_ms=20, concurrency=slots, warmup=slots)
    assert got.target.peak == got.gauge.peak == slots
    assert len(got.flights) == got.gauge.ended == slots * 4
    assert got.gauge.now == 0


@undisturbed
def test_256_slots_over_sockets_are_256_requests_at_the_server() -> None:
    plan = Rows([-1] * 768)
    plan.payload = lambda index, previous: b"Content-Length: 2\r\n\r\n{}"  # type: ignore[method-assign]

    async def main(url: str) -> tuple[Drive, list[Flight]]:
        wire = Wire(url, "/c", [], Timeouts(), None)
        flights: list[Flight] = []
        send = retrying(wire.send, 0)
        options = DEFAULTS[closed_loop] | {"concurrency": 256, "stop": asyncio.Event(), "ramp_s": 0.2}
        result = await closed_loop(plan, send, flights.append, **options)
        wire.close()
        return result, flights

    with Scripted([(500, http_response(200, b"{}"))]) as server:
        result, flights = run(main(server.url))
    assert server.peak == server.connections == 256
    assert [f.tried.exchange.ended for f in flights if f.tried] == [COMPLETE] * 768
    assert result.window_open_ns > 0


@undisturbed
def test_a_request_is_due_when_its_slot_became_free() -> None:
    got = drive(closed_loop, Rows([-1] * 5), service_ms=10)
    rows = got.by_row()
    assert rows[0].due_ns == got.drive.start_ns
    for i in range(1, 5):
        assert rows[i].due_ns == got.exchange(i - 1).end_ns
        assert 0 <= got.lag_ms(i) < 10


def test_the_first_wave_is_spread_evenly_over_the_ramp() -> None:
    class Together(Target):
        """Answers nobody before all eight are there."""

        async def _serve(self, row: int) -> None:
            while self.peak < 8:
                await asyncio.sleep(0.01)

    got = drive(closed_loop, Rows([-1] * 8), target=Together(), concurrency=8, ramp_s=0.16)
    offsets = [(got.by_row()[i].due_ns - got.drive.start_ns) / MS for i in range(8)]
    assert offsets == pytest.approx([20 * i for i in range(8)])
    assert [row for row, _ in got.target.sent] == list(range(8))
    assert min(got.lag_ms(i) for i in range(8)) >= 0  # none before its time


def test_the_window_opens_without_draining_once_the_first_wave_has_ended() -> None:
    """Case 21: the first ten are slow; the measured part starts with all slots busy and none of the ten in it."""
    slow_first = drive(
        closed_loop, Rows([-1] * 100), service_ms=lambda row: 200 if row < 10 else 10, concurrency=10, warmup=20
    )
    opened = slow_first.drive.window_open_ns
    assert all(slow_first.exchange(i).end_ns <= opened for i in range(10))
    steps = slow_first.gauge.steps()
    before, after = steps[steps[:, 0] < opened], steps[steps[:, 0] >= opened]
    assert (before[:, 1] > 0)[:-1].all(), "no moment without a request between the start and the window"
    assert after[:, 1].max() == 10
    in_window = [f for f in slow_first.flights if opened <= f.due_ns < slow_first.drive.window_close_ns]
    assert min(f.index for f in in_window) >= 10
    assert sum(f.due_ns < opened for f in slow_first.flights) >= 20


def test_one_slow_answer_of_the_first_wave_holds_the_window_shut_however_many_have_ended() -> None:
    class Slow(Target):
        """Answers row 1 when 20 others have come."""

        async def _serve(self, row: int) -> None:
            await asyncio.sleep(0.01)
            while row == 1 and len(self.sent) <= 20:
                await asyncio.sleep(0.01)

    got = drive(closed_loop, Rows([-1] * 60), target=Slow(), concurrency=2, warmup=2)
    assert got.drive.window_open_ns >= got.exchange(1).end_ns
    assert sum(f.due_ns < got.drive.window_open_ns for f in got.flights) > 10


@undisturbed
def test_the_window_closes_when_a_slot_cannot_be_refilled() -> None:
    """Case 19: eight together, one long: the window is the part with eight in flight."""
    got = drive(closed_loop, Rows([-1] * 16), service_ms=lambda row: 400 if row == 15 else 50, concurrency=8, warmup=8)
    assert got.drive.reason == "exhausted"
    ends = sorted(got.exchange(i).end_ns for i in range(8, 16))
    assert got.drive.window_close_ns == ends[0]
    assert ends[-1] - ends[0] > 300 * MS


def test_a_plan_that_is_too_small_never_opens_its_window() -> None:
    got = drive(closed_loop, Rows([-1] * 8), service_ms=5, concurrency=4, warmup=8)
    assert (got.drive.window_open_ns, len(got.flights)) == (0, 8)


@undisturbed
def test_the_duration_runs_from_the_opening_of_the_window() -> None:
    got = drive(closed_loop, Rows([-1] * 5000), service_ms=10, concurrency=4, warmup=20, duration_s=0.2)
    assert got.drive.reason == "duration"
    window_ms = (got.drive.window_close_ns - got.drive.window_open_ns) / MS
    assert 200 <= window_ms < 300  # late by a turn of the loop
    assert max(f.due_ns for f in got.flights) <= got.drive.window_close_ns
    assert {got.exchange(f.index).ended for f in got.flights} == {COMPLETE}  # drained, not cut


@undisturbed
def test_users_who_think_when_the_duration_is_over_have_not_closed_the_window_before_it() -> None:
    # It opens with the first wave's second turns; by its end all conversations have begun, and both users think.
    plan = conversations([0, 1], [2, 3], [4, 5], [6, 7], think_ns=600 * MS)
    got = drive(closed_loop, plan, service_ms=5, concurrency=2, duration_s=0.1)
    assert (got.drive.reason, got.drive.turns_not_sent, len(got.flights)) == ("duration", 2, 6)
    assert got.drive.window_close_ns - got.drive.window_open_ns >= 100 * MS
    assert got.drive.window_close_ns > max(got.exchange(f.index).end_ns for f in got.flights)


@undisturbed
def test_what_is_still_in_flight_after_the_drain_is_cut() -> None:
    got = drive(closed_loop, Rows([-1] * 3), service_ms=lambda row: 10_000 if row else 10, concurrency=3, drain_s=0.1)
    assert [got.exchange(i).ended for i in range(3)] == [COMPLETE, CUT, CUT]
    assert got.drive.cut == 2


# ---- conversations (case 26)


@pytest.mark.parametrize("loop", [closed_loop, open_loop])
def test_a_turn_is_never_sent_before_the_one_before_has_ended_and_holds_its_answer(loop: Loop) -> None:
    plan = conversations([0, 2, 4], [1, 3], due_ns=[0, 0, -1, -1, -1])
    got = drive(loop, plan, service_ms=20)
    assert b"2<answer 0" in got.target.payloads
    assert b"4<answer 2" in got.target.payloads
    assert b"3<answer 1" in got.target.payloads
    for a, b in ((0, 2), (2, 4), (1, 3)):
        assert got.by_row()[b].due_ns == got.exchange(a).end_ns <= got.exchange(b).sent_ns
    assert got.drive.turns_not_sent == 0


@pytest.mark.parametrize("loop", [closed_loop, open_loop])
@undisturbed
def test_a_turn_waits_for_the_recorded_gap_from_the_previous_end(loop: Loop) -> None:
    got = drive(loop, conversations([0, 1], due_ns=[0, 1 * MS], think_ns=50 * MS), service_ms=20)
    assert got.by_row()[1].due_ns == got.exchange(0).end_ns + 50 * MS
    assert 0 <= got.lag_ms(1) < 15


@pytest.mark.parametrize(("planned_ms", "later"), [(100, True), (5, False)])
@undisturbed
def test_without_a_gap_a_turn_leaves_at_its_own_time_or_when_the_one_before_has_ended(
    planned_ms: int, later: bool
) -> None:
    got = drive(open_loop, conversations([0, 1], due_ns=[0, planned_ms * MS]), service_ms=30)
    own, end = got.drive.start_ns + planned_ms * MS, got.exchange(0).end_ns
    assert got.by_row()[1].due_ns == (own if later else end)


@pytest.mark.parametrize("loop", [closed_loop, open_loop])
def test_a_failed_turn_ends_its_conversation_and_the_rest_is_counted(loop: Loop) -> None:
    plan = conversations([0, 1, 2, 3], [4, 5], due_ns=[0, -1, -1, -1, 0, -1])
    got = drive(loop, plan, accept=lambda flight: flight.index != 1)
    assert sorted(got.by_row()) == [0, 1, 4, 5]
    assert (got.drive.turns_not_sent, got.drive.reason) == (2, "exhausted")


@pytest.mark.parametrize("loop", [closed_loop, open_loop])
def test_a_turn_cancelled_as_planned_does_not_end_its_conversation(loop: Loop) -> None:
    class Leaving(Target):
        """Its user leaves turn 0 before the end."""

        async def send(self, payload: bytes, cancel_s: float | None) -> Tried:
            tried = await super().send(payload, cancel_s)
            if payload == b"0":
                tried.exchange.ended, tried.exchange.status = CANCELLED, 0
            return tried

    got = drive(loop, conversations([0, 1, 2], due_ns=[0, -1, -1]), target=Leaving())
    assert sorted(got.by_row()) == [0, 1, 2]
    assert b"1<answer 0" in got.target.payloads  # what had come of it is what the next turn holds
    assert got.drive.turns_not_sent == 0


@pytest.mark.parametrize("ended", [TOTAL_TIMEOUT, CUT, CONNECT_ERROR])
def test_a_turn_that_ended_otherwise_ends_its_conversation_though_done_has_no_objection(ended: str) -> None:
    async def send(payload: bytes, cancel_s: float | None) -> Tried:
        exchange = Exchange(sent_ns=now_ns(), end_ns=now_ns(), ended=ended, status=200)
        return Tried(exchange, 1, exchange, 0)

    async def main() -> Drive:
        plan = conversations([0, 1], due_ns=[0, -1])
        return await open_loop(plan, send, lambda flight: None, stop=asyncio.Event(), **DEFAULTS[open_loop])

    assert asyncio.run(main()).turns_not_sent == 1


def test_an_answer_without_a_2xx_ends_its_conversation_too() -> None:
    async def send(payload: bytes, cancel_s: float | None) -> Tried:
        exchange = Exchange(sent_ns=now_ns(), end_ns=now_ns(), ended=COMPLETE, status=500)
        return Tried(exchange, 1, exchange, 0)

    async def main() -> Drive:
        plan = conversations([0, 1], due_ns=[0, -1])
        return await open_loop(plan, send, lambda flight: None, stop=asyncio.Event(), **DEFAULTS[open_loop])

    assert asyncio.run(main()).turns_not_sent == 1


def test_a_thinking_user_keeps_its_slot_and_its_turn_is_not_sent_after_the_duration() -> None:
    turns = [[i * 2, i * 2 + 1] for i in range(50)]
    got = drive(
        closed_loop,
        conversations(*turns, think_ns=30 * MS),
        service_ms=5,
        concurrency=2,
        warmup=2,
        duration_s=0.1,
    )
    assert got.target.peak <= 2
    assert got.drive.reason == "duration"
    assert max(f.due_ns for f in got.flights) <= got.drive.window_close_ns
    begun = {f.index // 2 for f in got.flights}
    assert got.drive.turns_not_sent == 2 * len(begun) - len(got.flights)


def test_turns_under_a_cap_queue_like_any_request() -> None:
    plan = conversations([0, 3], [1, 4], [2, 5], due_ns=[0, 0, 0, -1, -1, -1])
    got = drive(open_loop, plan, service_ms=10, max_in_flight=1)
    assert [row for row, _ in got.target.sent] == [0, 1, 2, 3, 4, 5]
    assert got.target.peak == 1


# ---- stopping


@pytest.mark.parametrize("loop", [closed_loop, open_loop])
@undisturbed
def test_stop_sends_nothing_more_and_cuts_at_once(loop: Loop) -> None:
    plan = Rows([i * 20 * MS for i in range(500)])
    begun = now_ns()
    got = drive(loop, plan, service_ms=lambda row: 10 if row < 3 else 60_000, stop_after_s=0.15)
    assert (now_ns() - begun) / 1e9 < 1
    assert got.drive.reason == "interrupted"
    assert got.drive.cut == sum(got.exchange(f.index).ended == CUT for f in got.flights) >= 1
    assert len(got.flights) == len(got.target.sent) < 20


@undisturbed
def test_at_a_stop_the_due_are_dropped_and_those_not_yet_due_are_no_part_of_it() -> None:
    plan = Rows([0, 0, 0, 10 * MS, 10_000 * MS])
    got = drive(open_loop, plan, service_ms=10_000, max_in_flight=1, stop_after_s=0.1)
    assert {i: f.tried is None for i, f in got.by_row().items()} == {0: False, 1: True, 2: True, 3: True}
    assert len(got.flights) == 4


def test_a_stop_during_the_drain_is_an_interruption() -> None:
    got = drive(closed_loop, Rows([-1]), service_ms=10_000, stop_after_s=0.1)
    assert (got.drive.reason, got.drive.cut) == ("interrupted", 1)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([closed_loop, open_loop]),
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 30)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(0, 40),
)
def test_no_request_is_lost_or_reported_twice_wherever_the_stop_falls(
    loop: Loop, shapes: list[tuple[int, int]], width: int, stop_ms: int
) -> None:
    turns, due, row = [], [], 0
    for count, due_ms in shapes:
        turns.append(list(range(row, row + count)))
        due += [due_ms * MS] + [-1] * (count - 1)
        row += count
    limit: dict[str, Any] = {"concurrency": width} if loop is closed_loop else {"max_in_flight": width}
    plan = conversations(*turns, due_ns=due, think_ns=2 * MS)
    got = drive(loop, plan, service_ms=5, stop_after_s=stop_ms / 1e3, **limit)
    rows = [f.index for f in got.flights]
    assert len(rows) == len(set(rows))
    attempted = [f.index for f in got.flights if f.tried is not None]
    assert sorted(attempted) == sorted(r for r, _ in got.target.sent)
    begun = [t for t in turns if t[0] in rows]
    assert got.drive.turns_not_sent == sum(map(len, begun)) - len(rows)
    assert got.gauge.now == 0


@pytest.mark.parametrize("loop", [closed_loop, open_loop])
@pytest.mark.parametrize("where", ["send", "done"])
def test_a_harness_failure_stops_the_drive(loop: Loop, where: str) -> None:
    async def main() -> None:
        target = Target(10_000)

        async def send(payload: bytes, cancel_s: float | None) -> Tried:
            if where == "send":
                raise ZeroDivisionError("ours")
            exchange = Exchange(end_ns=now_ns(), ended=CONNECT_ERROR)
            return Tried(exchange, 1, exchange, 0) if payload == b"0" else await target.send(payload, cancel_s)

        def done(flight: Flight) -> None:
            raise ZeroDivisionError("ours")

        options = DEFAULTS[loop] | ({"concurrency": 4} if loop is closed_loop else {})
        with pytest.raises(ZeroDivisionError, match="ours"):
            await asyncio.wait_for(loop(Rows([0] * 4), send, done, stop=asyncio.Event(), **options), 8)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


@pytest.mark.parametrize("loop", [closed_loop, open_loop])
def test_an_empty_plan_ends_at_once(loop: Loop) -> None:
    got = drive(loop, Rows([]))
    assert (got.drive.reason, got.flights, got.gauge.steps().shape) == ("exhausted", [], (0, 2))


def test_a_planned_cancel_reaches_send() -> None:
    asked: list[float | None] = []

    async def send(payload: bytes, cancel_s: float | None) -> Tried:
        asked.append(cancel_s)
        exchange = Exchange(end_ns=now_ns(), ended=COMPLETE, status=200)
        return Tried(exchange, 1, exchange, 0)

    async def main() -> None:
        plan = Rows([0, 1 * MS], cancels={1: 0.5})
        await open_loop(plan, send, lambda flight: None, stop=asyncio.Event(), **DEFAULTS[open_loop])

    asyncio.run(main())
    assert asked == [None, 0.5]


# ---- Little's law


@pytest.mark.parametrize(("loop", "limits"), [(closed_loop, {"concurrency": 4}), (open_loop, {})])
@undisturbed
def test_the_gauges_integral_is_the_sum_of_the_stays(loop: Loop, limits: dict[str, Any]) -> None:
    got = drive(loop, Rows([i * 10 * MS for i in range(30)]), service_ms=100, **limits)
    steps = got.gauge.steps()
    integral = float((np.diff(steps[:, 0]) * steps[:-1, 1]).sum())
    stays = sum(got.exchange(f.index).end_ns - got.exchange(f.index).sent_ns for f in got.flights)
    assert integral == pytest.approx(stays, rel=0.01)


@undisturbed
def test_a_scripted_server_sees_the_paced_times_of_an_open_loop() -> None:
    plan = Rows([i * 10 * MS for i in range(40)])
    plan.payload = lambda index, previous: b"Content-Length: 2\r\n\r\n{}"  # type: ignore[method-assign]

    def answer(number: int, seen: Seen) -> Script:
        return [(30, http_response(200, b"{}"))]

    async def main(url: str) -> Drive:
        wire = Wire(url, "/c", [], Timeouts(), None)
        send = retrying(wire.send, 0)
        result = await open_loop(plan, send, lambda f: None, stop=asyncio.Event(), **DEFAULTS[open_loop])
        wire.close()
        return result

    with Scripted(answer) as server:
        result = run(main(server.url))
    late_ms = [(seen.at_ns - result.start_ns - i * 10 * MS) / MS for i, seen in enumerate(server.requests)]
    assert min(late_ms) >= 0
    assert float(np.median(late_ms)) < 5


def test_timers_of_two_drives_do_not_meet() -> None:
    async def main() -> tuple[int, int]:
        one, two = Timer(), Timer()
        at: list[int] = []
        start = now_ns()
        one.call_at(start + 10 * MS, lambda: at.append(1))
        two.call_at(start + 5 * MS, lambda: at.append(2))
        one.close()
        await two.sleep_until(start + 20 * MS)
        two.close()
        return len(at), at[0]

    assert asyncio.run(main()) == (1, 2)


# ---- several processes: what one of them does, beside others that are only told of here


class Shared:
    """Slots of a loop whose last conversations others take: `gone` after so many of them, or by the clock."""

    alone = False

    def __init__(self, mine: Sequence[int], gone_after_ns: int = 0) -> None:
        self.numbers: Sequence[int] = range(1)
        self.opened_ns = 0
        self._mine, self._gone_ns = list(mine), now_ns() + gone_after_ns

    def take(self) -> int:
        return self._mine.pop(0) if self._mine else -1

    def gone(self) -> bool:
        return not self._mine and now_ns() >= self._gone_ns

    def leave(self) -> None: ...

    def ended(self, row: int) -> None: ...

    def warm(self, warmup: int) -> bool:
        return False


@undisturbed
def test_the_drain_of_a_shared_closed_loop_begins_when_the_last_conversation_is_taken_by_whom_it_may() -> None:
    begun = now_ns()
    slots = Shared([0, 1], gone_after_ns=300 * MS)
    got = drive(closed_loop, Rows([-1] * 9), service_ms=lambda row: 60_000 if row else 5, slots=slots, drain_s=0.2)
    assert got.exchange(0).ended == COMPLETE
    assert got.exchange(1).ended == CUT
    assert 0.5 <= (now_ns() - begun) / 1e9 < 1.0
    assert got.drive.reason == "exhausted"


@undisturbed
def test_the_drain_of_a_shared_closed_loop_waits_for_the_turns_of_its_own_conversations() -> None:
    plan = conversations([0, 1], [2], think_ns=300 * MS)
    got = drive(closed_loop, plan, service_ms=100, slots=Shared([0]), drain_s=0.15)
    assert [got.exchange(row).ended for row in (0, 1)] == [COMPLETE, COMPLETE]


@undisturbed
def test_the_drain_of_a_shared_open_loop_runs_from_the_last_due_time_of_all() -> None:
    plan = Rows([0, 400 * MS])
    got = drive(open_loop, plan, service_ms=500, firsts=[0], drain_s=0.3)
    assert got.exchange(0).ended == COMPLETE


@pytest.mark.parametrize("loop", [closed_loop, open_loop])
def test_a_stop_before_the_start_sends_nothing(loop: Loop) -> None:
    async def main() -> tuple[Drive, Target]:
        target, stop = Target(), asyncio.Event()
        stop.set()
        return await loop(Rows([0, 0]), target.send, lambda f: None, stop=stop, **DEFAULTS[loop]), target

    result, target = asyncio.run(main())
    assert (result.reason, target.sent) == ("interrupted", [])
