"""Checks of the work of a cell: whether prompts and answers are what was planned, and counted by who knows."""

import math
from collections.abc import Callable

import numpy as np

from llm_bench import printable, windows
from llm_bench.columns import Cell
from llm_bench.facts import EITHER_WAY, TOO_HIGH, TOO_LOW, Facts, Finding
from llm_bench.metrics import WHOLE, Value
from llm_bench.same_work import MAX_TOKENS_OFF
from llm_bench.series import NOTHING, ONE_STAMP, SERIES, exactly_counted, outcome_in, single_pass

MAX_CACHED_SHARE = 0.01
MAX_OVER_PLAN = 0.1  # of the prompt tokens: a target's template and its count of tokens are not the plan's
MAX_BURST_SHARE = 0.5
MAX_REPEATED = 0.01  # of the prompts: traces have a few of one word, which can be told apart by no salt


def _delivered(f: Facts) -> Finding | None:
    rows = f.ok & (f.cell["asked_out"] > 0) & (f.cell["tokens_out"] >= 0)
    rows &= exactly_counted(f.cell) | ~f.cell.among("tokens_out_from", "events")
    asked, got = int((f.cell["asked_out"] * f.cell.choices)[rows].sum()), int(f.cell["tokens_out"][rows].sum())
    if not asked or abs(got / asked - 1) <= MAX_TOKENS_OFF:
        return None
    pinned = f.header("probe").get("lengths_pinned")
    cause = "although a probe showed that lengths can be pinned" if pinned else "the server ends answers itself"
    if got > asked:
        cause = "the server goes on past max_tokens, or its usage counts more than the answer"
    effect = TOO_LOW if got < asked else TOO_HIGH
    return Finding(f"{got} of {asked} asked ({got / asked:.1%}): {cause}", effect, "Compare tokens, not requests")


def _not_pinned(f: Facts) -> Finding | None:
    """Lengths as they came to be, where the target could not be made to keep them: as asked, they leave no doubt."""
    rows = f.ok & (f.cell["asked_out"] > 0)
    if f.header("probe").get("lengths_pinned", True) or not rows.any():
        return None
    known, many = rows & exactly_counted(f.cell), int(rows.sum())
    off = (f.cell["tokens_out"] - f.cell["asked_out"] * f.cell.choices)[known]
    apart, unknown = np.abs(off[off != 0]), many - int(known.sum())
    found = []
    if len(apart):
        found.append(
            f"{len(apart)} of {many} answers ({100 * len(apart) / many:.3g}%) have another length than asked, "
            f"by {printable.counted(f'{np.median(apart):g}', 'token')} in the median and {apart.max()} at worst"
        )
    if unknown:
        found.append(f"of {unknown} of {many} answers the length is unknown, and the target ends them where it likes")
    # Answers of unknown length end early, if anything: they may make up for those known to be longer.
    surely_longer = off.sum() > 0 and not unknown
    effect = TOO_LOW if off.sum() < 0 else TOO_HIGH if surely_longer else EITHER_WAY
    if not found:
        return None
    if not len(apart):
        return Finding(found[0], TOO_LOW, "Let it send usage")
    return Finding("; ".join(found), effect, "Compare tokens/s")


def _prompt_tokens(f: Facts) -> Finding | None:
    rows = f.ok & (f.cell["tokens_in"] >= 0) & (f.cell["planned_in"] > 0)
    planned, got = int(f.cell["planned_in"][rows].sum()), int(f.cell["tokens_in"][rows].sum())
    if not planned or abs(got / planned - 1) <= MAX_TOKENS_OFF:
        return None
    found = f"the server counted {got} where {planned} were planned ({got / planned - 1:+.1%})"
    effect = TOO_LOW if got < planned else TOO_HIGH
    return Finding(found, effect, "Give --tokenizer, so that prompts are sized exactly")


def _planned_prompts(f: Facts) -> Finding | None:
    """Plans stand in for what the server did not count: beside a target that counts, that is another measure.

    A reason to distrust the figures that have prompt tokens in them: where others were asked for, what is unknown is in
    none of them. Where none was named (a gate asks so), any may be read: `rules.CONCERNS` says which this is about.
    """
    rows = f.ok & (f.cell["tokens_in"] < 0) & (f.cell["planned_in"] > 0)
    if single_pass(f.cell) or not rows.any() or (f.values and not any(map(_has_prompts, f.values))):
        return None
    found = (
        f"the server said no prompt tokens for {int(rows.sum())} of {int(f.ok.sum())} requests: planned ones stand in"
    )
    return Finding(found, EITHER_WAY, "Read tokens_per_second, which has none in it, or let it send usage")


def _has_prompts(value: Value) -> bool:
    return value.name in WHOLE and WHOLE[value.name].prompts


def _repeated(f: Facts) -> Finding | None:
    """The same bodies sent twice to one server: a prefix cache answers the second."""
    if _sharing_planned(f):
        return None
    mine = _hashes(f.cell)
    within = len(mine) - len(np.unique(mine))
    url, began = f.header("target").get("url"), int(f.cell["due_ns"][0]) if f.cell.n else 0
    earlier = [
        c for c in f.siblings if c.n and c["due_ns"][0] < began and (c.header.get("target") or {}).get("url") == url
    ]
    across = int(np.isin(mine, np.concatenate([_hashes(c) for c in earlier])).sum()) if earlier else 0
    if within + across <= MAX_REPEATED * len(mine):
        return None
    found = f"{within} within the cell and {across} of an earlier cell of the run: a prefix cache makes them faster"
    return Finding(found, TOO_LOW, "Use a trace with distinct ones")


def _hashes(cell: Cell) -> np.ndarray:
    hashes = cell["prompt_hash"][windows.attempted(cell)]
    return np.asarray(hashes[hashes != 0])


def _sharing_planned(f: Facts) -> bool:
    """By the trace. Prompts reused because the user asked for it are no such plan: their cells are not comparable."""
    plan = f.header("plan")
    return bool(plan.get("shares") or plan.get("sessions") or windows.has_sessions(f.cell))


def _cached(f: Facts) -> Finding | None:
    """Cached tokens beyond the chat template, which stands before every prompt and which any prefix cache keeps, and
    beyond what the plan shares: that one is of all requests, those before the window too."""
    planned = _sharing_planned(f)
    counted = outcome_in(f.cell, "ok") if planned else f.ok
    rows = counted & (f.cell["tokens_cached"] >= 0) & (f.cell["tokens_in"] > 0)
    most = _shareable(f) if planned else 0.0
    if not rows.any() or most is None:
        return None
    template = math.ceil(max(f.header("probe").get("base_tokens") or 0.0, 0.0))
    share = float(np.maximum(f.cell["tokens_cached"][rows] - template, 0).sum() / f.cell["tokens_in"][rows].sum())
    if share <= most + (MAX_OVER_PLAN if planned else MAX_CACHED_SHARE):
        return None
    allowed = f"of the plan's an endless cache can find {most:.1%}" if planned else "the trace plans no sharing"
    return Finding(
        f"the server took {share:.1%} of their tokens from its cache, the template's {template} left out, and "
        f"{allowed}: TTFT and throughput are not comparable with a cold run",
        TOO_LOW,
        "Restart the server",
    )


def _shareable(f: Facts) -> float | None:
    """The most that the plan lets a cache find of as many requests as were sent; None where it does not say."""
    parts = f.header("plan").get("shareable")
    if not parts:
        return None
    sent = int(windows.attempted(f.cell).sum())
    last = next((i for i, (requests, _) in enumerate(parts) if requests >= sent), len(parts) - 1)
    return float(max(share for _, share in parts[max(last - 1, 0) : last + 1]))


def _estimated(f: Facts) -> Finding | None:
    if single_pass(f.cell):
        return None  # there is nothing to count
    rows = int((f.ok & ~f.cell.among("tokens_out_from", "usage")).sum())
    if not rows:
        return None
    return Finding(
        f"the server sent no usage for {rows} of {int(f.ok.sum())} requests",
        EITHER_WAY,
        "Let it send usage, or give --tokenizer",
    )


def _usage(f: Facts) -> Finding | None:
    """Usage against the tokenizer, in the first answers of a cell. A server may count an end token that has no text."""
    rows = f.ok & (f.cell["tokens_counted"] > 0) & f.cell.among("tokens_out_from", "usage")
    said, counted = (int(f.cell[name][rows].sum()) for name in ("tokens_out", "tokens_counted"))
    if not counted or abs(said - counted) - int(rows.sum()) * (said > counted) <= MAX_TOKENS_OFF * counted:
        return None
    found = f"the server says {said:,} tokens where its tokenizer counts {counted:,} ({said / counted - 1:+.1%})"
    return Finding(found, EITHER_WAY, "Check that --tokenizer is the target's: throughput is in the server's tokens")


def _end_unproven(f: Facts) -> Finding | None:
    rows = int((f.ok & f.cell.labelled("end unproven")).sum())
    found = f"{rows} answers ended without a finish_reason: a cut answer would look the same"
    return Finding(found, TOO_LOW, "Compare their tokens with what was asked") if rows else None


def _unreadable(f: Facts) -> Finding | None:
    rows = int((f.ok & f.cell.labelled("unreadable event")).sum())
    if not rows:
        return None
    found = f"a part of {rows} of {int(f.ok.sum())} answers could not be read: tokens may be missing from them"
    return Finding(found, EITHER_WAY, "Look at their bytes: --keep-bytes")


def _burst(f: Facts) -> Finding | None:
    zero = f.figure("zero_gap_share")
    hidden = f.ok & SERIES["tpot"].of(f.cell, NOTHING).why[ONE_STAMP] & (f.cell["tokens_out"] >= 2)
    share = int(hidden.sum()) / max(int(f.ok.sum()), 1)
    if (zero or 0.0) <= MAX_BURST_SHARE and share <= MAX_BURST_SHARE:
        return None
    return Finding(
        f"{zero or 0.0:.0%} of the gaps are 0 and {share:.0%} of the answers came at once: "
        "ITL and TPOT say how they were delivered, not made",
        EITHER_WAY,
        "Look for a proxy that buffers, or a stream interval",
    )


def _too_long(f: Facts) -> Finding | None:
    effect = str(f.header("settings").get("too_long", ""))
    return (
        None
        if effect in ("", "refuse", "skip", "clip")
        else Finding(effect, TOO_LOW, "Use a trace that fits, or a target with a longer context")
    )


def _turns(f: Facts) -> Finding | None:
    lost = f.end.get("turns_not_sent") or 0
    causes = ["the duration was over"] if f.reason == "duration" else []
    if not causes or outcome_in(f.cell, "failed", "cut_at_end").any():
        causes.append("one before them failed or was cut")
    advice = "Give a longer --duration" if f.reason == "duration" else "Look at the failures first"
    return Finding(f"{lost}, since {' or '.join(causes)}", TOO_LOW, advice) if lost else None


WORK_CHECKS: dict[str, Callable[[Facts], Finding | None]] = {
    "delivered tokens": _delivered,
    "lengths not pinned": _not_pinned,
    "prompt tokens": _prompt_tokens,
    "planned prompt tokens": _planned_prompts,
    "repeated prompts": _repeated,
    "cached prompts": _cached,
    "estimated tokens": _estimated,
    "usage disputed": _usage,
    "end unproven": _end_unproven,
    "unreadable events": _unreadable,
    "burst streams": _burst,
    "trace changed": _too_long,
    "turns not sent": _turns,
}
