"""One run: targets x loads, each a cell. Reads the trace, probes the targets, measures cell after cell.

Everything that a cell measured is on disk before the next begins; `run.json` names the cells and how each ended.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from llm_bench import (
    arms,
    doctor,
    fault_doing,
    faults,
    neighbours,
    pairs,
    plan,
    probe,
    prompts,
    scrape,
    scrape_machine,
    selection,
    settling,
    shards,
    targets,
    ticks,
    trace,
)
from llm_bench.beside import Say
from llm_bench.book import Book
from llm_bench.cell import Cell, Options, cell_name
from llm_bench.dialects import DIALECTS, TOKEN_ID_ROWS, unsayable
from llm_bench.errors import BenchError
from llm_bench.measure import Fleet, measure
from llm_bench.neighbours import Neighbour
from llm_bench.order import Watch
from llm_bench.plan import Load
from llm_bench.request import Request, Trace
from llm_bench.targets import Target


@dataclass(frozen=True)
class Job:
    """A whole run: what is measured, with which trace, at which loads."""

    targets: Sequence[Target]
    loads: Sequence[Load]
    trace: Path
    format: str | None = None
    block_size: int | None = None
    unit: str | None = None  # of the trace's times, s or ms; None: the format's
    map: Mapping[str, str] | None = None  # columns of a plain table
    turns: str | None = None  # cumulative or new, how a session's lengths are meant; None: found out
    skip_bad: int = 0
    from_s: float | None = None  # of the trace: conversations that begin from here on
    to_s: float | None = None  # and before this
    limit: int | None = None  # rows of the trace at most, in whole conversations
    dejitter: str = "auto"  # a mode of ticks.dejitter
    limited: Sequence[str] = ()  # classes that limits of the SLO are of
    beside: Sequence[Neighbour] = ()  # other traces that are played beside it
    alone_too: bool = False  # of a mixed trace, each class alone beside the mix
    workers: int = 1  # processes that share each cell; 0: as many as the load seems to need
    resume: bool = False  # finish the run in the folder
    fleet: Fleet | None = None  # drives cells on other hosts


@dataclass(frozen=True)
class Ended:
    """How a run ended, for the exit code."""

    interrupted: bool = False
    gone: str = ""  # the target that no longer answers
    died: str = ""  # "worker 3 killed by signal 9"


class Arm(NamedTuple):
    """A target that has answered, and what it is sent."""

    target: Target
    found: probe.Probe
    requests: list[Request]
    effect: str  # of its context limit on them, in words
    exact: prompts.Exact | None


def run(job: Job, options: Options, say: Say, live: Say) -> Ended:
    """Measure every cell; `say` prints a line that stays, `live` one that is overwritten.

    Raises BenchError, before any load is sent, when something asked for cannot be right, and KeyboardInterrupt for
    SIGINT or SIGTERM outside a cell. In a cell they cut it, and what it measured is written.
    """
    _check_arms(job, options)
    rows, exact = read(job, options, say)
    if any(load.concurrency for load in job.loads) and rows.requests[-1].at_s is not None:
        say("trace: a closed loop does not use its times; its order, lengths, prefixes and sessions are used")
    for load in job.loads:  # a trace without times fails here, not after the first cell
        plan.due_times(rows.requests, load, options.seed)
    loads = _with_classes_alone(job, rows, say) if job.alone_too else list(job.loads)
    if options.requests and not options.loop_trace and len(rows.requests) < options.requests:
        say(f"trace: it has {len(rows.requests)} requests, fewer than --requests {options.requests}: each is sent once")
    for line in _order_in_words(job, options):
        say(line)
    private = {target.name: target.headers for target in job.targets}
    if job.resume and not (options.out / "run.json").exists():
        say(f"--resume: {options.out} holds no run yet: one is begun there")
    with ExitStack() as stack:
        book = stack.enter_context(
            closing(Book(options.out, asked(job, options, rows, loads), private, resume=job.resume))
        )
        shards.hear_signals()
        several = len(job.targets) > 1
        ready = [
            begin(declared, options, rows, exact.get(declared.name), say, stack, compared=several)
            for declared in job.targets
        ]
        ready = sized_alike(ready, say)
        if stopped := _every_cell(job, options, loads, ready, book, say, live):
            return stopped
        try:
            book.keep_learnt({arm.target.name: ask_afterwards(arm, options, say) for arm in ready})
        except KeyboardInterrupt:  # all is measured: whoever does not wait for this still gets the report
            say("not asked any more: whether the targets keep prefixes, and count the tokens of each event")
    return Ended()


def _with_classes_alone(job: Job, rows: Trace, say: Say) -> list[Load]:
    """Each load with all classes, and with each of them alone."""
    names = selection.classes(rows.requests)
    if any(load.concurrency for load in job.loads):
        say(
            "in a closed loop a class measured alone has all the slots: its factor compares one concurrency with and "
            "without the others; --rate and --replay keep the times that it has beside them"
        )
    return [replace(load, class_alone=name) for load in job.loads for name in ("", *names)]


def _every_cell(
    job: Job, options: Options, loads: Sequence[Load], ready: Sequence[Arm], book: Book, say: Say, live: Say
) -> Ended | None:
    """Measure the cells that the book has not, in their order. None: all are measured; else what ended them early."""
    places = arms.schedule(len(ready), len(loads), options.rounds)
    several, interleave = options.rounds.several, options.rounds.interleave
    fastest = min((arm.found for arm in ready), key=lambda found: found.alone_ms / found.alone_tokens)
    names = [
        cell_name(number, job.targets[p.arm], loads[p.load], p.pair if several else None)
        for number, p in enumerate(places)
    ]
    # A pair is one measurement: half of one is no use, and the other half at another time would be no pair.
    together = arms.pairs_of(places, names) if interleave else [[name] for name in names]
    book.begin({arm.target.name: deciding(arm.found) for arm in ready}, together)
    of = {name: unit for unit in together for name in unit}
    for number, (name, place) in enumerate(zip(names, places, strict=True)):
        if book.is_done(name):
            say(f"{name}: done before")
            continue
        arm = ready[place.arm]
        cell = Cell(
            options,
            book.run_id,
            number,
            arm.target,
            arm.found,
            arm.requests,
            loads[place.load],
            arm.exact,
            max(book.attempt(each) for each in of[name]),
            place if several else None,
            fastest if interleave else None,
        )
        end = one(cell, arm, book, say, live, job.workers, fleet=job.fleet)
        book.end_cell(name, end)
        shards.hear_signals()
        if stopped := _stopped(end["reason"], arm, options, say):
            return stopped
        settle(end, arm.target, say)
    return None


def _stopped(reason: str, arm: Arm, options: Options, say: Say) -> Ended | None:
    """What the run ends by, where a cell ended by more than its own end."""
    if reason == "interrupted":
        return Ended(interrupted=True)
    if reason == "target gone":
        say(f"{arm.target.name} no longer answers; what was measured is in {options.out}")
        return Ended(gone=arm.target.name)
    if reason.startswith("worker "):
        say(f"{reason}; what was measured is in {options.out}, --resume measures the rest")
        return Ended(died=reason)
    return None


def ask_afterwards(arm: Arm, options: Options, say: Say) -> dict[str, str]:
    """Of a target that has done its work: what is asked now, so that no request had to wait for it. Says it too."""
    facts = probe.afterwards(arm.target, arm.found, options.timeouts)
    names = {"prefix_cache": "prefix cache", "continuous_usage": "usage in every event"}
    if said := ", ".join(f"{name} {facts[key]}" for key, name in names.items() if key in facts):
        say(f"{arm.target.name}: {said}")
    return facts


def read(job: Job, options: Options, say: Say) -> tuple[Trace, dict[str, prompts.Exact]]:
    """The rows that every cell has, checked against what targets can be told; and the tokenizers of the targets."""
    exact = {t.name: prompts.exact(t.tokenizer, token_ids=options.token_ids) for t in job.targets if t.tokenizer}
    rows = _rows(job, options)
    _check_sayable(job, options, rows)
    there = sorted({request.request_class for request in rows.requests} - {""})
    for name in job.limited:
        if name not in there:
            raise BenchError(f"--slo: a limit of class {name!r}; the trace has {', '.join(there) or 'no classes'}")
    for target in job.targets:
        scrape.metrics_urls(target.metrics or options.metrics_url, target)  # refused now, not at the first cell
    if options.gpu:
        scrape_machine.gpu_reader()
    planned = faults.parse(options.faults)
    for target in job.targets:
        fault_doing.check(planned, target)
    if planned:
        texts = ", ".join(fault.text for fault in planned)
        patience_s = fault_doing.RECOVERY_NS / 1e9
        say(f"faults, in each cell: {texts}; a target that refuses connections has {patience_s:g} s to come back")
    if planned and not options.retries and any(load.concurrency for load in job.loads):
        say("--fault: a closed loop asks a target that refuses again at once, and may empty the trace: give --retries")
    for note in [*rows.notes, *(f"{count} rows left out: {reason}" for reason, count in rows.skipped.items())]:
        say(f"trace: {note}")
    return rows, exact


def begin(
    declared: Target,
    options: Options,
    rows: Trace,
    exact: prompts.Exact | None,
    say: Say,
    stack: ExitStack,
    *,
    compared: bool = False,
) -> Arm:
    """Start a target where it is ours to start, until `stack` ends, and ask it what a measurement has to know."""
    declared = fault_doing.allowing(declared, faults.parse(options.faults))
    target = stack.enter_context(targets.running(declared, say, options.out / f"{declared.name}.log"))
    found = probe.probe(
        target, say, options.ready_s, stream=options.stream, timeouts=options.timeouts, compared=compared
    )
    for note in found.notes:
        say(f"{target.name}: {note}")
    requests, effect = selection.fit_context(rows.requests, found.max_model_len, options.too_long)
    if effect:
        say(f"{target.name}: {effect}")
    return Arm(target, found, requests, effect, exact)


def sized_alike(ready: Sequence[Arm], say: Say) -> list[Arm]:
    """Targets that are compared get texts of one length, where one of them does not count what they cost it."""
    sized = probe.sized_alike({arm.target.name: arm.found for arm in ready})
    alike = [arm._replace(found=sized[arm.target.name]) for arm in ready]
    for before, arm in zip(ready, alike, strict=True):
        for note in arm.found.notes:
            if note not in before.found.notes:
                say(f"{arm.target.name}: {note}")
    return alike


def one(
    cell: Cell,
    arm: Arm,
    book: Book,
    say: Say,
    live: Say,
    workers: int,
    watch: Watch | None = None,
    fleet: Fleet | None = None,
) -> dict[str, Any]:
    """Measure a cell, of which the book then knows that it has begun. Returns how it ended."""
    facts = cell.round_facts()
    book.begin_cell(cell.name, {"target": arm.target.name, "load": cell.load_facts(), **facts})
    planned = faults.parse(cell.options.faults)
    header = {**book.header({"too_long": arm.effect}), **facts}
    try:
        end = measure(cell, header, say, live, workers, watch, planned=planned, fleet=fleet)
    except BenchError:
        shards.hear_signals()
        raise
    if end["turns_not_sent"]:
        say(f"{cell.name}: {end['turns_not_sent']} later turns were not sent: a turn failed or was cut")
    return end


def settle(end: Mapping[str, Any], target: Target, say: Say) -> None:
    """After a cell that cut requests. Last of all: whoever interrupts a run does not wait for its target."""
    if end["cut"] or end["counts"]["cancelled"]:
        settling.settle(target, say)


def _check_arms(job: Job, options: Options) -> None:
    rounds, urls = options.rounds, [url for target in job.targets for url in target.urls if not target.launch]
    if rounds.interleave and len(job.targets) < 2:
        raise BenchError("--interleave: one target, expected two or more that take turns; the same twice: a=URL,b=URL")
    if rounds.same_salt and not rounds.interleave:
        raise BenchError("--same-salt is of the arms of a pair (--interleave)")
    if rounds.same_salt and (twice := {url for url in urls if urls.count(url) > 1}):
        raise BenchError(
            f"--same-salt: {min(twice)} is asked by two targets: the second would meet the first one's cache; "
            "expected separate servers, or no --same-salt"
        )


def _order_in_words(job: Job, options: Options) -> list[str]:
    """Of a run of several rounds: what is measured after what, and what it will not carry."""
    rounds, names = options.rounds, [target.name for target in job.targets]
    if not rounds.interleave:
        again = f"{rounds.repeat} rounds, each of every target at every load, one after the other"
        return [again] if rounds.several else []
    turns = arms.orders(len(names))
    first = ", then ".join(" ".join(names[arm] for arm in turn) for turn in turns[: min(2, rounds.repeat)])
    prompts_ = "the same prompts in both" if rounds.same_salt else "prompts of its own in each"
    lines = [f"{rounds.repeat} pairs at each load, the targets in turn: {first}; {prompts_}, all else equal in a pair"]
    if rounds.repeat % len(turns):
        lines.append(f"{rounds.repeat} pairs are no multiple of {len(turns)}: not every arm is as often the first")
    if rounds.repeat < (needed := pairs.needed(1)):
        lines.append(f"a gate judges {needed} pairs or more, and needs more for several rules or loads")
    return lines


def _rows(job: Job, options: Options) -> Trace:
    """What of the trace every cell has: read, ticks spread, a part taken, scaled; each step in the trace's notes."""
    replay = any(load.speed is not None for load in job.loads)
    chosen = (job.from_s, job.to_s, job.limit) != (None, None, None)
    # The first rows of a file alone would be read faster, but a part of it, or of a tick, needs what follows too.
    first = None if replay or chosen or options.loop_trace or job.beside else options.requests
    rows = _one_file(job, job.trace, options.seed, limit=first, timed=replay)
    if job.beside:
        others = [(_one_file(job, Path(n.path), options.seed, timed=replay), n) for n in job.beside]
        rows = neighbours.together(rows, others, options.seed)
    requests, notes = rows.requests, [*rows.notes, *_speeds(job, rows.requests)]
    if chosen:
        found = len(requests)
        requests = selection.at_most(selection.between(requests, job.from_s, job.to_s), job.limit)
        span_s = max((r.at_s for r in requests if r.at_s is not None), default=0.0)
        notes.append(f"{len(requests):,} of {found:,} rows chosen, in whole conversations, over {span_s:g} s")
    if options.requests and not options.loop_trace:
        requests = requests[: options.requests]
    if options.scale_lengths:
        before = requests
        requests, by = selection.scaled(requests, selection.factor(options.scale_lengths))
        notes.append(selection.in_words(before, by))
    if bodies := sum(r.body is not None for r in requests):
        notes.append(f"{bodies:,} captured bodies are sent as they stand but for model, stream and stream_options")
    if named := sum(bool(r.model or (r.body or {}).get("model")) for r in requests):
        which = "theirs is asked for" if options.keep_model else "the target's own is asked for, unless --keep-model"
        notes.append(f"{named:,} rows name a model: {which}")
    if not requests:
        raise BenchError(f"{job.trace}: no request is left to send")
    return rows._replace(requests=requests, notes=notes)


def _one_file(job: Job, path: Path, seed: int, *, limit: int | None = None, timed: bool) -> Trace:
    """A trace file by the job's reading options, with the doubts about it; `timed`: its times are used."""
    rows = trace.read(
        path,
        format=job.format,
        limit=limit,
        block_size=job.block_size,
        unit=job.unit,
        turns=job.turns,
        map=job.map,
        skip_bad=job.skip_bad,
    )
    requests, notes = rows.requests, list(rows.notes)
    if timed:
        requests, note = ticks.dejitter(requests, job.dejitter, seed)
        notes += [note] if note else []
    rows = rows._replace(requests=requests)
    notes += [f"doubt: {text}" for text in doctor.warnings(rows, timed=timed)]
    return rows._replace(notes=notes)


def _speeds(job: Job, requests: Sequence[Request]) -> list[str]:
    """What each speed makes of the trace's length, so that nobody takes twice as fast for twice as long."""
    span_s = max((r.at_s or 0.0 for r in requests), default=0.0)
    speeds = dict.fromkeys(load.speed for load in job.loads if load.speed not in (None, 1.0))
    return [f"its {span_s:g} s take {span_s / speed:g} s at --speed {speed:g}" for speed in speeds if speed]


def _check_sayable(job: Job, options: Options, rows: Trace) -> None:
    """Refuse, by the trace's line, what a target's protocol cannot say, before any target is asked anything."""
    for target in job.targets:
        for request in rows.requests:
            if why := unsayable(request, target.api, options.keep_model):
                raise BenchError(f"{rows.path}:{request.line}: {why} (target {target.name})")
        if options.token_ids and not DIALECTS[target.api].takes.token_ids:
            raise BenchError(
                f"--token-ids: target {target.name} speaks {target.api}, expected {' or '.join(TOKEN_ID_ROWS)}"
            )
        if options.token_ids and not target.tokenizer:
            raise BenchError(
                f"--token-ids: which ids are words is not known of target {target.name}; give its tokenizer.json "
                "with --tokenizer"
            )
    turns = ((rows.requests[a], rows.requests[b]) for a, b in selection.successive(rows.requests))
    for before, turn in turns:
        if options.history == "live":
            if options.token_ids:
                raise BenchError(
                    f"--token-ids: {rows.path}:{turn.line} is a later turn, and a live answer is text; give "
                    "--history recorded"
                )
        elif before.tokens_out is None and not (turn.hash_ids or selection.brings_text(turn)):
            raise BenchError(
                f"--history recorded: {rows.path}:{before.line} has no output length, so that the answer in the turn "
                "after it cannot be made up; give --history live"
            )


def asked(job: Job, options: Options, rows: Trace, loads: Sequence[Load]) -> dict[str, Any]:
    """What of the command line run.json holds: a run is resumed only where it is the same."""
    trace_facts: dict[str, Any] = {"path": rows.path, "format": rows.format, "notes": rows.notes}
    trace_facts |= {"from_s": job.from_s, "to_s": job.to_s, "limit": job.limit, "dejitter": job.dejitter}
    trace_facts |= _file_facts(job.trace)
    if job.beside:
        trace_facts["beside"] = [n._asdict() | _file_facts(Path(n.path)) for n in job.beside]
    return {
        "settings": options.public(),
        "targets": [target.name for target in job.targets],
        "declared": [target.public() for target in job.targets],
        "loads": [load.label for load in loads],
        "trace": trace_facts | {"rows": len(rows.requests), "skipped": rows.skipped},
        "hashes": {
            "trace": _hash(repr(request).encode() for request in rows.requests),
            "tokenizers": {t.name: _hash([Path(t.tokenizer).read_bytes()]) for t in job.targets if t.tokenizer},
            "loads": _hash(repr(asdict(load)).encode() for load in loads),  # a label does not say everything
        },
    }


def _file_facts(path: Path) -> dict[str, Any]:
    """By which a trace is known again wherever it lies; of a pipe, which can be read once only, nothing."""
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": path.stat().st_size}


def deciding(found: probe.Probe) -> dict[str, Any]:
    """What of a probe's findings decides the work, and is the same at every probe of the same server."""
    asks = found.ask._asdict() | {"extra": dict(found.ask.extra)}
    return {"model": found.model, "max_model_len": found.max_model_len, "ask": asks, "told": dict(found.told)}


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
