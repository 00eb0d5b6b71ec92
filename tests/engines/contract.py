"""What every row owes on a real server that speaks it: the part of tests/test_dialect_contract.py that a server which
does as it likes can be held to, a small load, and what `targets check` says of it.
"""

import asyncio
import itertools
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llm_bench import answer, clock, exchange
from llm_bench.bodies import Ask
from llm_bench.dialects import DIALECTS
from llm_bench.exchange import Exchange, Timeouts
from llm_bench.request import Request
from llm_bench.targets import Target
from llm_bench.transport import TRANSPORTS, Asked
from tests.bench import bench, command, environment, rows, trace_file
from tests.engines.serve import Spoken
from tests.engines.served import lm

TOKENS, MANY = 12, 8
LONG = 48  # tokens of a stream that comes in several reads, but where the machine is busy
PROMPT = "the tide is low at noon and the boats lie on the sand"
LIMITS = Timeouts(ttft_s=60.0, stall_s=60.0, total_s=120.0)
LOAD_LIMIT_S = 300


class Site(NamedTuple):
    """A server that is up, in one of its protocols."""

    name: str  # of the engine
    root: str  # http://127.0.0.1:PORT
    spoken: Spoken
    folder: Path  # an empty one

    @property
    def url(self) -> str:
        return self.root + DIALECTS[self.spoken.api].site.base

    def target(self, model: str = "") -> Target:
        return Target("t", self.url, api=self.spoken.api, model=model or self.spoken.model, extra=self.spoken.extra)

    def flags(self) -> list[str]:
        return ["--api", self.spoken.api, *(["--model", self.spoken.model] if self.spoken.model else [])]


def sent(
    site: Site,
    requests: Sequence[Request],
    *,
    stream: bool | None = None,
    model: str = "",
    cancel_s: float | None = None,
) -> list[Exchange]:
    """All of them at once, as a run sends them."""
    row, target = DIALECTS[site.spoken.api], site.target(model)
    transport = TRANSPORTS[row.transport]
    stream = row.comes.streams if stream is None else stream
    ask = Ask(target.model, stream=stream, extra=target.extra)

    async def all_of_them() -> list[Exchange]:
        sender = transport.open(Asked(target, target.url, row, target.model, stream, LIMITS))
        try:
            payloads = [transport.frame(f"r-{i}", row.encode(request, ask)) for i, request in enumerate(requests)]
            return await asyncio.gather(*(sender.send(payload, cancel_s) for payload in payloads))
        finally:
            sender.close()

    return clock.run(all_of_them())


def read(site: Site, got: Exchange, asked: int, *, stream: bool | None = None) -> answer.Answer:
    row = DIALECTS[site.spoken.api]
    stream = row.comes.streams if stream is None else stream
    return answer.read(got, row, streamed=stream, asked_out=asked, pinned=site.spoken.pins, finish_expected=False)


def asking(tokens: int = TOKENS, prompt: str = PROMPT) -> Request:
    return Request(tokens_in=12, tokens_out=tokens, prompt=prompt)


def answers(site: Site, request: Request, **how: Any) -> tuple[answer.Answer, Exchange]:
    (got,) = sent(site, [request], **how)
    return read(site, got, request.tokens_out or 0, stream=how.get("stream")), got


def a_stream_is_read_token_by_token(site: Site) -> None:
    """Where others have the processors, a server's front end may hand a whole short answer over at once: as any reader
    sees, and no fault of ours. A long one outlasts that.
    """
    if not DIALECTS[site.spoken.api].comes.streams:
        return
    assert any(_comes_in_parts(site, tokens) for tokens in (LONG, site.spoken.lasts))


def _comes_in_parts(site: Site, tokens: int) -> bool:
    got, seen = answers(site, asking(tokens))
    assert (got.outcome, got.error, got.labels) == ("ok", "", [])
    assert got.finish_reason in (site.spoken.finish, "stop")
    assert got.text
    assert got.tokens_out_from == ("usage" if site.spoken.counts else "events")
    assert (got.tokens_in > 0) == site.spoken.counts
    if site.spoken.pins:
        assert (got.tokens_out, got.finish_reason) == (tokens, site.spoken.finish)
        assert len(got.event_ns) <= tokens  # a token may be half a character
    assert len(got.event_ns) > 1
    assert seen.sent_ns < got.event_ns[0]
    assert all(b >= a for a, b in itertools.pairwise(got.event_ns))
    in_parts = got.event_ns[-1] > got.event_ns[0]
    if in_parts:  # else the end may have come with the first token, which is then not looked for
        assert seen.first_token_ns == got.event_ns[0]
    return in_parts


def a_whole_answer_is_ok_and_has_no_stamps(site: Site) -> None:
    got, _ = answers(site, asking(), stream=False)
    assert (got.outcome, got.error, got.event_ns) == ("ok", "", [])
    assert got.text or DIALECTS[site.spoken.api].comes.single_pass
    if site.spoken.pins and site.spoken.counts:
        assert (got.tokens_out, got.tokens_out_from) == (TOKENS, "usage")


def many_at_once_are_all_answered(site: Site) -> None:
    got = [read(site, one, TOKENS) for one in sent(site, [asking()] * MANY)]
    assert [(one.outcome, one.error) for one in got] == [("ok", "")] * MANY


def a_model_that_is_not_there_is_refused_in_the_servers_words(site: Site) -> None:
    got, _ = answers(site, asking(), model="nope")
    if site.spoken.unknown is None:
        assert got.outcome == "ok"
        return
    assert (got.outcome, got.error_kind) == ("failed", site.spoken.unknown[0])
    assert site.spoken.unknown[1] in got.error


def an_answer_that_does_not_fit_is_refused_in_the_servers_words(site: Site) -> None:
    if site.spoken.too_long is None:
        return
    got, _ = answers(site, asking(6000))
    assert (got.outcome, got.error_kind) == ("failed", site.spoken.too_long[0])
    assert site.spoken.too_long[1] in got.error


def a_failure_half_way_fails_it_and_keeps_its_tokens(site: Site) -> None:
    if site.spoken.breaks is None:
        return
    got, _ = answers(site, asking(prompt=f"{PROMPT} {lm.BREAKS}"))
    assert (got.outcome, got.error_kind) == ("failed", site.spoken.breaks[0])
    assert site.spoken.breaks[1] in got.error
    assert 1 <= len(got.event_ns) <= 3


def a_cancelled_stream_is_no_failure_and_the_next_is_answered(site: Site) -> None:
    if not DIALECTS[site.spoken.api].comes.streams:
        return
    got, seen = answers(site, asking(site.spoken.lasts), cancel_s=0.3)
    assert (got.outcome, got.error_kind) == ("cancelled", "")
    assert seen.ended == exchange.CANCELLED
    again, _ = answers(site, asking())
    assert (again.outcome, again.error) == ("ok", "")


def targets_check_says_what_it_is(site: Site) -> None:
    done = _check(site, site.spoken.api)
    assert done.returncode == 0, done.stderr
    shown = _rows(done.stdout)
    assert shown["usage in streams"] == ("yes" if site.spoken.counts else "no")
    assert shown["lengths can be pinned"] == ("yes" if site.spoken.pins else "no")


def another_protocol_ends_in_one_sentence(site: Site) -> None:
    if not site.spoken.wrong:
        return
    done = _check(site, site.spoken.wrong)
    assert done.returncode == 4, done.stdout
    said = done.stderr.strip().splitlines()
    assert said[-1].startswith("llm-bench: target t:"), said
    assert "Traceback" not in done.stderr


def a_small_load_is_measured_without_an_error(site: Site) -> None:
    trace = trace_file(site.folder, rows(12, tokens_in=20, tokens_out=TOKENS))
    ran = bench(site.url, site.folder, trace, *site.flags(), "--concurrency", "1,4", timeout_s=LOAD_LIMIT_S)
    assert ran.rc == 0, ran.err
    for number in (0, 1):
        cell = ran.records(number)
        assert cell["outcome"].tolist() == ["ok"] * 12, set(cell["error"])
        if site.spoken.pins:
            assert cell["tokens_out"].tolist() == [TOKENS] * 12
        _account(site, (1, 4)[number], cell)


def _account(site: Site, concurrency: int, cell: Any) -> None:
    """The server's own account of TTFT and TPOT beside ours, where it gives one.

    Of streams that came token by token: on a busy machine vLLM's front end hands many over at once, as any reader sees.
    """
    gaps = [np.diff(cell.event_ns[begin:end]) for begin, end in itertools.pairwise(cell.offsets)]
    seen = np.array([bool(of.size) and np.count_nonzero(of) > of.size / 2 for of in gaps])
    if not seen.any():
        return
    first, last = cell.event_ns[cell.offsets[:-1][seen]], cell.event_ns[cell.offsets[1:][seen] - 1]
    ours = {
        "server_ttft_ms": (first - cell["sent_ns"][seen]) / 1e6,
        "server_tpot_ms": (last - first) / 1e6 / (cell["tokens_out"][seen] - 1),
    }
    for name, mine in ours.items():
        theirs = cell[name][seen]
        if theirs.size and (theirs >= 0).all():
            beyond = mine - theirs
            ACCOUNTS.append(
                (site.name, site.spoken.api, concurrency, name, statistics.median(theirs), statistics.median(beyond))
            )


# (engine, api, concurrency, what, ms as the server has it, ms by which ours is above it): filled as servers are tried
ACCOUNTS: list[tuple[str, str, int, str, float, float]] = []


def _check(site: Site, api: str) -> "subprocess.CompletedProcess[str]":
    url = site.root + DIALECTS[api].site.base
    model = ["--model", site.spoken.model] if site.spoken.model else []
    asked = command("targets", "check", f"t={url}", "--api", api, *model)
    return subprocess.run(
        asked, capture_output=True, text=True, timeout=120, cwd=site.folder, env=environment(COLUMNS="200"), check=False
    )


def _rows(printed: str) -> dict[str, str]:
    """Question -> answer of a check's table."""
    cells = [[part.strip() for part in line.split("│")] for line in printed.splitlines()]
    return {row[1]: row[2] for row in cells if len(row) == 4}


CHECKS: dict[str, Callable[[Site], None]] = {
    check.__name__: check
    for check in (
        a_stream_is_read_token_by_token,
        a_whole_answer_is_ok_and_has_no_stamps,
        many_at_once_are_all_answered,
        a_model_that_is_not_there_is_refused_in_the_servers_words,
        an_answer_that_does_not_fit_is_refused_in_the_servers_words,
        a_failure_half_way_fails_it_and_keeps_its_tokens,
        a_cancelled_stream_is_no_failure_and_the_next_is_answered,
        targets_check_says_what_it_is,
        another_protocol_ends_in_one_sentence,
        a_small_load_is_measured_without_an_error,
    )
}
