"""How tokens arrive: by a timer, or so many an event."""

from llm_bench.evidence import Case, Finding, Sure, flushes

TIMER_MS, TIMER_SPREAD, TIMER_TOKENS = 15.0, 0.15, 1.5  # interval, its quartiles apart, tokens a flush
TIMER_VARIES = 0.15  # spread of the tokens a flush from which on they do not set the interval


def timer(case: Case) -> Finding | None:
    found = _batched_stream(case)
    return found[1] if found and found[0] else None


def packed(case: Case) -> Finding | None:
    found = _batched_stream(case)
    return found[1] if found and not found[0] else None


def _batched_stream(case: Case) -> tuple[bool, Finding] | None:
    """(is it a timer, finding) where events come in flushes of several tokens at a steady interval."""
    found = flushes(case.cell, case.ok)
    if found is None or found.every_ms < TIMER_MS or found.spread > TIMER_SPREAD or found.tokens < TIMER_TOKENS:
        return None
    seen = (
        f"tokens come every {found.every_ms:.1f} ms (quartiles {found.spread:.0%} apart), {found.tokens:.1f} at a time"
    )
    others = [f for other in case.siblings if (f := flushes(other.cell, other.ok)) and f.tokens >= TIMER_TOKENS]
    steady = [f for f in others if _near(f.every_ms, found.every_ms, 0.1)]
    sized = [f for f in others if _near(f.tokens, found.tokens, 0.1) and not _near(f.every_ms, found.every_ms, 0.2)]
    timer = found.varies >= TIMER_VARIES or any(not _near(f.tokens, found.tokens, 0.2) for f in steady)
    zero = case.metric("zero_gap_share") or 0.0
    if timer and not sized:
        how = (
            f"at a time {found.varies:.0%} more or fewer" if found.varies >= TIMER_VARIES else "as many at other loads"
        )
        how = how.replace("as many", "not as many")
        several = f", {found.events:.1f} events a time; {zero:.0%} of the gaps are 0" if found.events > 1.2 else ""
        sure: Sure = "likely" if found.events > 1.2 or steady else "possible"
        text = f"{seen}, {how}, at the same interval{several}"
        check = "Look for a flush interval in the gateway or serving layer (Ray Serve LLM: 50 ms); ITL and TPOT are its"
        return True, Finding(text, sure, "records", f"{check}, not the engine's. Speculative decoding looks alike")
    why = "the same number at another interval at another load" if sized else "a timer, or a fixed number an event"
    check = (
        "Ask for one token an event (vLLM: --stream-interval 1) to see the engine's own gaps; tpot is right as it is"
    )
    return False, Finding(f"{seen}: {why}", "likely" if sized else "possible", "records", check)


def _near(a: float, b: float, share: float) -> bool:
    return abs(a - b) <= share * max(a, b)
