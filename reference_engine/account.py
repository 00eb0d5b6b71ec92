"""Where one request's time went on the server, in parts that add up to the whole exactly."""

from typing import Any, NamedTuple

from reference_engine.scheduler import Output
from reference_engine.sequence import Sequence


class Account(NamedTuple):
    """Nanoseconds of CLOCK_MONOTONIC between stamps that follow each other, so the sum is `sent - received`.

    A request of several choices has the account of the one that ended last.
    """

    http_in: int  # headers were read -> handed to the scheduler: body, JSON, chat template, tokens
    queue: int  # -> first given a token budget: inbox, batch window, seats, blocks
    prefill: int  # -> end of the step that made the first token, less what was lost in between
    decode: int  # first token -> end of the step that made the last, less what was lost in between
    preempted: int  # each preemption -> given a budget again
    recompute: int  # back again -> end of the step by which what had been computed is so again
    http_out: int  # last token -> these figures are written: the event loop's turn, detokenizing; or: -> cut off

    @property
    def total(self) -> int:
        return sum(self)


def account(received_ns: int, enqueued_ns: int, sequence: Sequence, last: Output | None, sent_ns: int) -> Account:
    """`last`: its last output with a token, which need not be the engine's; None if there was none.

    A request that ended without a token ended in its queue or in its prefill, and that part takes the rest.
    """
    http_in = enqueued_ns - received_ns
    if last is None:
        scheduled_ns = sequence.scheduled_ns
        if not scheduled_ns or scheduled_ns > sent_ns:  # the step loop may schedule it this very moment
            return Account(http_in, sent_ns - enqueued_ns, 0, 0, 0, 0, 0)
        return Account(http_in, scheduled_ns - enqueued_ns, sent_ns - scheduled_ns, 0, 0, 0, 0)
    lost_ns, first_ns = sequence.lost_to_first_ns, sequence.first_token_ns
    return Account(
        http_in=http_in,
        queue=sequence.scheduled_ns - enqueued_ns,
        prefill=first_ns - sequence.scheduled_ns - lost_ns,
        decode=last.at_ns - first_ns - (last.preempted_ns + last.recompute_ns - lost_ns),
        preempted=last.preempted_ns,
        recompute=last.recompute_ns,
        http_out=sent_ns - last.at_ns,
    )


def timings_of(parts: Account, sequence: Sequence, tokens: int) -> dict[str, Any]:
    """The account as it goes out: llama.cpp's names where the meaning is the same, then ours; `parts_ns` are exact.

    ttft_ms and e2e_ms count from the request's arrival, prompt_ms is the prefill alone. predicted_ms is first to last
    token with what was lost in between, as a client sees it.
    """
    lost_ns = sequence.lost_to_first_ns
    to_first = parts.http_in + parts.queue + parts.prefill + lost_ns
    predicted = parts.decode + parts.preempted + parts.recompute - lost_ns
    return {
        "prompt_n": sequence.prompt_len,
        "prompt_ms": parts.prefill / 1e6,
        "predicted_n": tokens,
        "predicted_ms": predicted / 1e6,
        "predicted_per_token_ms": predicted / 1e6 / (tokens - 1) if tokens > 1 else None,
        "cache_n": sequence.cached,
        "queue_ms": parts.queue / 1e6,
        "ttft_ms": to_first / 1e6,
        "e2e_ms": parts.total / 1e6,
        "preemptions": sequence.preemptions,
        "parts_ns": parts._asdict(),
        "total_ns": parts.total,
    }


def server_timing(parts: Account) -> str:
    """The header of that name (W3C Server Timing), in milliseconds."""
    return ", ".join(f"{name};dur={ns / 1e6:.3f}" for name, ns in parts._asdict().items())
