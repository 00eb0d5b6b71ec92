"""One request on its way: its choices, the text they become, the events that go out, and its line in the log."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson

from reference_engine.account import Account, account, timings_of
from reference_engine.admission import Refused
from reference_engine.engine import Engine
from reference_engine.openai_api import CHAT, ApiError, Ask, Kind, Shell, StopText, metrics_of, usage_of
from reference_engine.scheduler import Output
from reference_engine.sequence import Sequence
from reference_engine.tokenizer import Detokenizer, Tokenizer


class Choice:
    """One sequence and the text it has become so far."""

    def __init__(self, index: int, sequence: Sequence, tokenizer: Tokenizer) -> None:
        self.index = index
        self.sequence = sequence
        self.tokens = 0
        self.last: Output | None = None  # with a token; the sequence may be a step ahead when a stop string ends it
        self.parts: list[str] = []
        self.finish_reason = ""
        self.detokenizer = Detokenizer(tokenizer, sequence.token_ids)
        self.stops = StopText(sequence.params.stop)

    def take(self, output: Output) -> str:
        """The text that goes out with this token: the end token has none, a stop string ends the choice unseen."""
        self.tokens += 1
        self.last = output
        self.finish_reason = output.finish_reason
        text = "" if output.finish_reason == "stop" else self.detokenizer.push(output.token)
        if output.finish_reason:
            text += self.detokenizer.flush()
        if self.tokens >= self.sequence.params.min_tokens:
            text = self.stops.push(text, last=bool(output.finish_reason))
            if self.stops.found is not None:
                self.finish_reason = "stop"
        return text


class Answer:
    """The choices of one request on their way to its client."""

    def __init__(self, engine: Engine, kind: Kind, ask: Ask, shell: Shell, choices: list[Choice]) -> None:
        self.engine = engine
        self.kind = kind
        self.ask = ask
        self.shell = shell
        self.choices = choices
        self.write: Callable[[bytes], None] | None = None
        self.begun = asyncio.Event()  # its first output, be it an error, is there
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.open = len(choices)
        self.received_ns = choices[0].sequence.arrived_ns
        self.enqueued_ns = 0
        self.sent_ns = 0  # when its account was closed
        self.ended_last = choices[0]

    def submit(self) -> None:
        """Raises EngineDownError. From here on `close` must follow."""
        self.enqueued_ns = self.engine.now_ns()
        for choice in self.choices:
            self.engine.submit(choice.sequence, partial(self._sink, choice))

    def close(self) -> None:
        """However the request was left, also by cancellation, nothing of it goes on running."""
        for choice in self.choices:
            self.engine.abort(choice.sequence)
        if self.done.done() and not self.done.cancelled():
            self.done.exception()  # seen: its client may have left before

    def fail(self, error: Exception) -> None:
        """Whoever waits for its end gets this instead, unless it has ended."""
        if not self.done.done():
            self.done.set_exception(error)

    def said(self) -> dict[str, Any]:
        """What the last event or the body says beside the choices.

        This closes the account, also where nobody asked for it: how long its reader takes is no time of the server's.
        """
        parts = self.account()
        first, *others = self.choices
        usage = usage_of(first.sequence.prompt_len, sum(c.tokens for c in self.choices), first.sequence.cached)
        said: dict[str, Any] = {}
        if self.ask.include_usage or not self.ask.stream:
            said["usage"] = usage
            if first.last and not others:  # several have no one first token
                said |= metrics_of(first.sequence, first.tokens, first.last.at_ns)
        if self.ask.include_timings:
            said["timings"] = timings_of(parts, self.ended_last.sequence, self.ended_last.tokens)
        return said

    def account(self) -> Account:
        """Closed at the first call."""
        self.sent_ns = self.sent_ns or self.engine.now_ns()
        choice = self.ended_last
        return account(self.received_ns, self.enqueued_ns, choice.sequence, choice.last, self.sent_ns)

    def _sink(self, choice: Choice, output: Output) -> None:
        self.begun.set()
        if output.finish_reason in FAILURES:
            self.fail(FAILURES[output.finish_reason](self.engine))
            return
        text = choice.take(output)
        if choice.finish_reason and not output.finish_reason:
            self.engine.abort(choice.sequence, "stop")
        if self.write:
            self.write(self._event(choice, text))
        else:
            choice.parts.append(text)
        if choice.finish_reason:
            self.ended_last = choice
            self.open -= 1
            if not self.open and not self.done.done():
                self.done.set_result(None)

    def _event(self, choice: Choice, text: str) -> bytes:
        usage = b""
        if self.ask.continuous_usage:
            sequence = choice.sequence
            usage = b',"usage":' + orjson.dumps(usage_of(sequence.prompt_len, choice.tokens, sequence.cached))
        event = self.shell.event(choice.index, text, choice.finish_reason, choice.stops.found, usage)
        if choice.tokens == 1 and self.kind is CHAT:
            return self.shell.role_event(choice.index) + event
        return event


def _timed_out(engine: Engine) -> Exception:
    text = f"not begun within {engine.config.queue_timeout} s in the queue"
    return Refused("timeout", text, engine.retry_after_s())


def _out_of_memory(engine: Engine) -> Exception:
    return Refused("oom", "memory did not suffice for this request, even alone", engine.retry_after_s())


def _not_finite(engine: Engine) -> Exception:
    return ApiError(500, "the model came to numbers that are not finite; weights, adapter or dtype are not right")


# Reasons to end that are no answer, as what its client is told.
FAILURES: dict[str, Callable[[Engine], Exception]] = {
    "error": Engine.down_error,
    "timeout": _timed_out,
    "oom": _out_of_memory,
    "nonfinite": _not_finite,
}


class Entry:
    """What is known of a request, as a line of the log."""

    def __init__(self, request_id: str, received_ns: int) -> None:
        self.request_id = request_id
        self.received_ns = received_ns
        self.outcome = ""  # why it has no whole answer; "": it has, and the finish reason says more
        self.answer: Answer | None = None

    def line(self, now_ns: int) -> bytes:
        """JSON. Of a request that never reached the scheduler all the time is http_in."""
        said: dict[str, Any] = {"request_id": self.request_id, "received_ns": self.received_ns}
        if self.answer is None:
            parts = Account(now_ns - self.received_ns, 0, 0, 0, 0, 0, 0)
            said["outcome"] = self.outcome
        else:
            parts = self.answer.account()
            choices = self.answer.choices
            said |= {
                "outcome": self.outcome or self.answer.ended_last.finish_reason or "abort",
                "stream": self.answer.ask.stream,
                "prompt_tokens": choices[0].sequence.prompt_len,
                "completion_tokens": sum(c.tokens for c in choices),
                "cached_tokens": choices[0].sequence.cached,
                "preemptions": sum(c.sequence.preemptions for c in choices),
            }
        return orjson.dumps(said | {"parts_ns": parts._asdict(), "total_ns": parts.total}) + b"\n"
