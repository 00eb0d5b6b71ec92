import numpy as np
import pytest

from llm_bench import plan
from llm_bench.errors import BenchError
from llm_bench.exchange import Exchange
from llm_bench.plan import NEVER, Load, Plan
from llm_bench.request import Request


def requests(n, **facts):
    return [Request(tokens_in=10, tokens_out=5, at_s=float(i), line=i + 2, **facts) for i in range(n)]


def test_constant_arrivals_stand_on_an_absolute_grid():
    due = plan.arrivals(1000, 200.0, None, seed=0)
    assert due[0] == 0
    assert due[-1] == 4_995_000_000  # request i is due at i * 5 ms: no error adds up


@pytest.mark.parametrize(("burstiness", "cv"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_burstiness_is_the_gamma_shape_of_the_gaps(burstiness, cv):
    gaps = np.diff(plan.arrivals(200_000, 10.0, burstiness, seed=1)) / 1e9
    assert gaps.mean() == pytest.approx(0.1, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


@pytest.mark.parametrize("burstiness", [0.1, 1.0, 9.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_rate_is_the_one_that_was_asked_for(burstiness, seed):
    due = plan.arrivals(200, 10.0, burstiness, seed)
    assert due[-1] == pytest.approx(19.9e9, abs=2)
    assert (np.diff(due) >= 0).all()


def test_arrivals_are_a_function_of_the_seed():
    assert (plan.arrivals(50, 3.0, 1.0, 7) == plan.arrivals(50, 3.0, 1.0, 7)).all()
    assert (plan.arrivals(50, 3.0, 1.0, 7) != plan.arrivals(50, 3.0, 1.0, 8)).any()


def test_speed_two_takes_half_as_long():
    due = plan.due_times(requests(4), Load(speed=2.0), seed=0)
    assert due.tolist() == [0, 500_000_000, 1_000_000_000, 1_500_000_000]


def test_replay_of_a_trace_without_times_is_refused_with_its_line():
    rows = [Request(tokens_in=1, tokens_out=1, line=7)]
    with pytest.raises(BenchError, match=r"line 7.*--concurrency or --rate"):
        plan.due_times(rows, Load(speed=1.0), seed=0)


def test_turns_follow_each_other_and_only_first_turns_arrive_by_rate(tmp_path):
    rows = [
        Request(10, 5, session="a"),
        Request(10, 5, session="b"),
        Request(30, 5, session="a", turn=1, tokens_new=15, think_s=0.5),
        Request(9, 5),
    ]
    due = plan.due_times(rows, Load(rate=1.0, burstiness=None), seed=0)
    assert due.tolist() == [0, 1_000_000_000, NEVER, 2_000_000_000]
    work = Plan(rows, due, tmp_path / "spool", lambda index, previous: b"turn %d" % index)
    assert work.first == [0, 1, 3]
    assert work.next_turn == [2, NEVER, NEVER, NEVER]
    assert work.think_ns == [NEVER, NEVER, 500_000_000, NEVER]
    assert work.payload(2, Exchange()) == b"turn 2"


def test_payloads_come_back_from_the_spool_and_the_spool_goes_away(tmp_path):
    rows = requests(3)
    work = Plan(rows, plan.due_times(rows, Load(concurrency=1), 0), tmp_path / "spool", lambda i, p: b"")
    work.write(iter([b"one", b"two two", b"3"]))
    assert [work.payload(i, None) for i in range(3)] == [b"one", b"two two", b"3"]
    work.close()
    assert not (tmp_path / "spool").exists()


def test_a_turn_whose_bytes_are_known_needs_no_answer(tmp_path):
    rows = [Request(10, 5, session="a"), Request(30, 5, session="a", turn=1), Request(50, 5, session="a", turn=2)]
    work = Plan(rows, plan.due_times(rows, Load(concurrency=1), 0), tmp_path / "spool", lambda i, p: b"made %d" % i)
    work.write(iter([b"one", b"", b"three"]))
    assert [work.payload(i, Exchange()) for i in range(3)] == [b"one", b"made 1", b"three"]
    work.close()


def test_equal_work_has_an_equal_hash(tmp_path):
    def hash_of(payloads):
        rows = requests(len(payloads))
        work = Plan(rows, plan.due_times(rows, Load(concurrency=1), 0), tmp_path / "spool", lambda i, p: b"")
        work.write(iter(payloads))
        work.close()
        return work.hash

    assert hash_of([b"a", b"b"]) == hash_of([b"a", b"b"]) != hash_of([b"a", b"c"])


def test_going_round_the_trace_keeps_order_shifts_times_and_parts_sessions():
    rows = [Request(1, 1, at_s=0.0, session="s"), Request(2, 1, at_s=2.0)]
    out, laps = plan.repeat(rows, 5)
    assert [r.tokens_in for r in out] == [1, 2, 1, 2, 1]
    assert laps == [0, 0, 1, 1, 2]
    assert [r.at_s for r in out] == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert [r.session for r in out] == ["s", "", "s/1", "", "s/2"]


def test_an_open_loop_with_a_duration_plans_what_is_due_in_it_and_whole_conversations():
    rows = [Request(10, 5, session="a"), Request(10, 5), Request(30, 5, session="a", turn=1), Request(9, 5)]
    due = plan.due_times(rows, Load(rate=1.0, burstiness=None), seed=0)
    assert plan.within(rows, due, 1.0) == [0, 1, 2]
    assert plan.within(rows, due, None) == [0, 1, 2, 3]
    with pytest.raises(BenchError, match="no request is due"):
        plan.within(rows[1:2], np.array([5_000_000_000]), 1.0)


def test_a_class_alone_has_the_rows_of_its_class_and_says_so():
    rows = [Request(1, 1, request_class=c) for c in ("chat", "batch", "chat", "chat")]
    assert plan.of_class(rows, [0, 1, 2], "chat") == [0, 2]
    with pytest.raises(BenchError, match="none of the 1 requests of a cell is of the class 'batch'"):
        plan.of_class(rows, [3], "batch")
    assert Load(rate=4.0, class_alone="chat").label == "rate=4/s [chat alone]"
    assert Load(concurrency=8, class_alone="chat").label == "c=8 [chat alone]"
    assert Load(speed=1.0, max_in_flight=3, class_alone="chat").label == "replay x1 cap=3 [chat alone]"


def test_a_loop_without_an_end_is_refused():
    with pytest.raises(BenchError, match="--duration or --requests"):
        plan.select(requests(3), Load(concurrency=2), count=None, duration_s=None, loop=True, alone_s=0.1)


def test_a_closed_loop_with_a_duration_plans_more_than_can_be_sent():
    rows, _ = plan.select(requests(3), Load(concurrency=4), count=None, duration_s=10.0, loop=True, alone_s=0.5)
    assert len(rows) >= 4 * 10 / 0.5


@pytest.mark.parametrize("burstiness", [None, 1.0])
def test_arrivals_that_end_in_years_are_refused_before_they_overflow(burstiness):
    with pytest.raises(BenchError, match=r"the last of 3 requests would be due after .* \(10 years\)"):
        plan.arrivals(3, 1e-12, burstiness, seed=0)
    assert plan.arrivals(1, 1e-12, burstiness, seed=0).tolist() == [0]


def test_a_replay_that_ends_in_years_is_refused_before_it_overflows():
    with pytest.raises(BenchError, match=r"the last of 4 requests would be due after 3e\+12 s"):
        plan.due_times(requests(4), Load(speed=1e-12), seed=0)


@pytest.mark.parametrize("load", [Load(concurrency=2), Load(rate=50.0), Load(speed=1.0)])
def test_a_number_of_requests_is_a_cap_on_a_loop_with_a_duration_too(load):
    rows, _ = plan.select(requests(3), load, count=7, duration_s=100.0, loop=True, alone_s=0.1)
    assert len(rows) == 7
    short, _ = plan.select(requests(3), load, count=10**6, duration_s=1.0, loop=True, alone_s=0.1)
    assert len(short) < 1000


def test_a_loop_of_more_requests_than_fit_is_refused_or_ends_early(monkeypatch):
    monkeypatch.setattr(plan, "MOST_PLANNED", 500)
    with pytest.raises(BenchError, match=r"rate=50/s for 100 s would be 7,600 requests, expected 500 at most"):
        plan.select(requests(3), Load(rate=50.0), count=None, duration_s=100.0, loop=True, alone_s=0.1)
    rows, _ = plan.select(requests(3), Load(concurrency=2), count=None, duration_s=100.0, loop=True, alone_s=0.1)
    assert len(rows) == 500  # of a closed loop it is an upper count anyway, and running out is a doubt


def test_a_plan_says_what_an_endless_cache_can_find_of_its_first_requests():
    def shared(*ids, **facts):
        return Request(tokens_in=4 * len(ids) - 2, tokens_out=5, hash_ids=ids, block_size=4, **facts)

    rows = [shared(1, 2), shared(1, 2), shared(1, 3, 4), shared(9)]  # of 6, 6, 10 and 2 tokens: 0, 6, 4 and 0 are known
    facts = plan.sharing(rows, [""] * 4)
    assert facts == {"shares": True, "sessions": False, "shareable": [[1, 0.0], [2, 6 / 12], [4, 10 / 24]]}
    apart = plan.sharing(rows, ["lap 0", "lap 1", "lap 0", "lap 1"])  # only the third one meets a block of its lap
    assert apart["shareable"] == [[1, 0.0], [2, 0.0], [4, 4 / 24]]


def test_a_plan_knows_the_history_of_its_conversations():
    turns = [Request(100, 50, session="a"), Request(190, 30, session="a", turn=1, tokens_new=40), Request(10, 5)]
    assert plan.sharing(turns, [""] * 3) == {"shares": False, "sessions": True, "shareable": [[1, 0.0], [3, 150 / 300]]}


def test_a_plan_says_nothing_of_what_given_texts_share_and_of_prompts_that_share_nothing():
    assert plan.sharing([Request(10, 5, session="a"), Request(10, 5, prompt="text")], [""] * 2) == {
        "shares": False,
        "sessions": True,
    }
    assert plan.sharing(requests(2), [""] * 2) == {"shares": False, "sessions": False}
