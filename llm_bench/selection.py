"""Which rows of a trace are sent, and at what lengths: a part of its time, whole conversations, what fits a context.

Every function keeps the order of the rows, and gives each of those that it keeps once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction

from llm_bench.errors import BenchError
from llm_bench.request import MOST_TOKENS, Request

TOO_LONG = ("refuse", "skip", "clip", "scale")
SMALLEST_FACTOR, LARGEST_FACTOR = Fraction(1, MOST_TOKENS), 1000  # of lengths: what is beyond is a slip of the pen
SCALINGS = 100  # tries: each is smaller, and a second is needed only where tokens cannot be split any further


def conversations(requests: Sequence[Request]) -> list[list[int]]:
    """The rows of each conversation, in the order in which they begin."""
    found: dict[str | int, list[int]] = {}
    for i, request in enumerate(requests):
        found.setdefault(request.session or i, []).append(i)
    return list(found.values())


def successive(requests: Sequence[Request]) -> list[tuple[int, int]]:
    """(row of a turn, row of the turn after it), of all conversations."""
    found: list[tuple[int, int]] = []
    last: dict[str, int] = {}
    for i, request in enumerate(requests):
        if request.session:
            if request.session in last:
                found.append((last[request.session], i))
            last[request.session] = i
    return found


def between(requests: Sequence[Request], from_s: float | None, to_s: float | None) -> list[Request]:
    """The conversations that begin at from_s or later and before to_s, whole; times count from the first one kept.

    Seconds since the trace's first request. Raises BenchError where the trace has no times, or none is left.
    """
    if from_s is None and to_s is None:
        return list(requests)
    shown = " ".join(f"{n} {s:g}" for n, s in (("--from", from_s), ("--to", to_s)) if s is not None)
    low, high = from_s or 0.0, float("inf") if to_s is None else to_s
    if low >= high:
        raise BenchError(f"{shown}: no time lies between them")
    kept: set[int] = set()
    for rows in conversations(requests):
        begins_s = requests[rows[0]].at_s
        if begins_s is None:
            raise BenchError(f"{shown}: the trace's row at line {requests[rows[0]].line} has no time; use --limit")
        if low <= begins_s < high:
            kept.update(rows)
    if not kept:
        last_s = max((r.at_s for r in requests if r.at_s is not None), default=0.0)
        raise BenchError(f"{shown}: no conversation begins there; the trace's requests lie between 0 and {last_s:g} s")
    return _from_zero([requests[i] for i in sorted(kept)])


def _from_zero(requests: list[Request]) -> list[Request]:
    """Their times count from the first one's, exact to 1 ns."""
    first_ns = round((requests[0].at_s or 0.0) * 1e9)
    return [r if r.at_s is None else replace(r, at_s=(round(r.at_s * 1e9) - first_ns) / 1e9) for r in requests]


def at_most(requests: Sequence[Request], limit: int | None) -> list[Request]:
    """The first conversations, whole, that have no more than `limit` rows together.

    It stops at the first that does not fit: to go on with shorter ones would change the mix. Raises BenchError where
    that is the very first.
    """
    if limit is None or len(requests) <= limit:
        return list(requests)
    kept: set[int] = set()
    for rows in conversations(requests):
        if len(kept) + len(rows) > limit:
            break
        kept.update(rows)
    if not kept:
        first = sum(r.session == requests[0].session for r in requests)
        raise BenchError(f"--limit {limit}: the first conversation alone has {first} turns; give {first} or more")
    return [requests[i] for i in sorted(kept)]


def classes(requests: Sequence[Request]) -> list[str]:
    """The classes of a mixed trace, in the order in which they appear.

    Raises BenchError where there are not two at least, where a row has none, or a conversation has turns of several.
    """
    of_session: dict[str, Request] = {}
    found: dict[str, None] = {}
    for request in requests:
        if not request.request_class:
            raise BenchError(f"--alone-too: the trace's row at line {request.line} has no class, expected one in each")
        first = of_session.setdefault(request.session, request) if request.session else request
        if first.request_class != request.request_class:
            raise BenchError(
                f"--alone-too: the conversation {request.session!r} has turns of the classes {first.request_class!r} "
                f"(line {first.line}) and {request.request_class!r} (line {request.line}), expected one class"
            )
        found[request.request_class] = None
    if len(found) < 2:
        raise BenchError(f"--alone-too: the trace has only the class {next(iter(found), '')!r}, expected two or more")
    return list(found)


# -- lengths ----------------------------------------------------------------------------------------------------------


def factor(text: str) -> Fraction:
    """`0.03125`, `1/32`: exactly. Raises BenchError."""
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise BenchError(f"--scale-lengths {text!r}: expected a number or a fraction, as 0.5 or 1/32") from None
    if not SMALLEST_FACTOR <= value <= LARGEST_FACTOR:
        raise BenchError(f"--scale-lengths {text}: expected more than 0, {LARGEST_FACTOR} at most")
    return value


def scaled(requests: Sequence[Request], by: Fraction) -> tuple[list[Request], Fraction]:
    """All lengths of the trace times one factor, and the factor: the next lower one at which a block is whole tokens.

    Blocks of b tokens become blocks of c = floor(b · by), and the factor c/b: a prompt of n tokens has ceil(n · c/b),
    hence as many blocks as before, and what two requests share stays shared. Ends are rounded up, not lengths, so that
    prompt and answer together have ceil((in + out) · by); an answer has a token at least, and a turn holds what was
    said before it.

    Raises BenchError where a request brings its own text, or a block would have no token.
    """
    for r in requests:
        if brings_text(r):
            raise BenchError(f"line {r.line} brings its own text: only lengths can be scaled")
    for size in {r.block_size for r in requests if r.hash_ids}:  # one: a trace has one header
        block = int(size * by)
        if block < 1:
            raise BenchError(f"a hash block of {size} tokens times {float(by):.3g} has less than one token")
        by = Fraction(block, size)
    out: list[Request] = []
    said: dict[str, int] = {}  # tokens of the conversation so far
    for r in requests:
        tokens_in = _ceil(r.tokens_in, by)
        before = said.get(r.session, 0) if r.turn else 0
        if not r.hash_ids and r.tokens_in:
            tokens_in = max(tokens_in, before)
        answer = None if r.tokens_out is None else max(_ceil(r.tokens_in + r.tokens_out, by) - tokens_in, 1)
        if max(tokens_in, answer or 0) > MOST_TOKENS:
            raise BenchError(
                f"line {r.line}: {r.tokens_in} tokens times {float(by):g}, expected {MOST_TOKENS:,} at most"
            )
        if r.session:
            said[r.session] = tokens_in + (answer or 0)
        added = max(tokens_in - before, 0) if r.turn else 0
        size = int(r.block_size * by) if r.hash_ids else 0
        out.append(replace(r, tokens_in=tokens_in, tokens_out=answer, tokens_new=added, block_size=size))
    return out, by


def _ceil(tokens: int, by: Fraction) -> int:
    return -(-tokens * by.numerator // by.denominator)


SERVER_BLOCK = 16  # tokens: of vLLM's prefix cache, and of the reference engine's


def in_words(requests: Sequence[Request], by: Fraction) -> str:
    """What `scaled` did by the factor that it gave, to requests as they were."""
    sizes = {r.block_size for r in requests if r.hash_ids}
    small = [int(size * by) for size in sizes if int(size * by) < SERVER_BLOCK]
    loses = f" (a server whose cache has blocks of {SERVER_BLOCK} finds less sharing in them)" if small else ""
    blocks = "".join(f"; hash blocks of {size} tokens became blocks of {int(size * by)}" for size in sorted(sizes))
    return f"all lengths of the trace were multiplied by {float(by):.6g}{blocks}{loses}"


def fit_context(requests: Sequence[Request], limit: int | None, policy: str) -> tuple[list[Request], str]:
    """Requests that fit a context of `limit` tokens, and what was done to the others in words ("" when nothing).

    policy: refuse | skip (with the whole conversation) | clip (the prompt is shortened, never the answer) | scale (all
    lengths of the trace, by the factor at which the longest fits). Raises BenchError under `refuse`, under `clip` where
    the answer alone is over the limit, and under `scale` where nothing can be scaled so far.
    """
    if limit is None:
        return list(requests), ""
    over = {i for i, r in enumerate(requests) if _total(r) > limit}
    if not over:
        return list(requests), ""
    worst = requests[max(over, key=lambda i: _total(requests[i]))]
    found = (
        f"{len(over)} of {len(requests)} requests ({len(over) / len(requests):.1%}) are over the target's context of "
        f"{limit} tokens (the longest, line {worst.line}: {worst.tokens_in} in + {worst.tokens_out or 0} out)"
    )
    if policy == "refuse":
        raise BenchError(f"{found}; --too-long skip, clip or scale says what to do with them")
    if policy == "skip":
        gone = {requests[i].session for i in over} - {""}
        kept = [r for i, r in enumerate(requests) if i not in over and r.session not in gone]
        if not kept:
            raise BenchError(f"{found}; skipping them leaves no request")
        return kept, f"{found}: skipped, with the rest of their conversations: {len(requests) - len(kept)} requests"
    if policy == "scale":
        smaller, by = _scaled_to(requests, limit, found)
        return smaller, f"{found}: {in_words(requests, by)}"
    assert policy == "clip", policy
    clipped = list(requests)
    for i in over:
        r = requests[i]
        room = limit - (r.tokens_out or 0)
        if room < 1 or brings_text(r) or r.turn:
            why = "its answer alone is over it" if room < 1 else "its text is given or it is a session's later turn"
            raise BenchError(f"{found}; line {r.line} cannot be clipped: {why}; use --too-long skip")
        blocks = -(-room // r.block_size) if r.block_size else 0
        clipped[i] = replace(r, tokens_in=room, hash_ids=r.hash_ids[:blocks])
    return clipped, f"{found}: their prompts were clipped"


def _scaled_to(requests: Sequence[Request], limit: int, found: str) -> tuple[list[Request], Fraction]:
    by = Fraction(1)
    smaller = list(requests)
    for _ in range(SCALINGS):
        longest = max(map(_total, smaller))
        if longest <= limit:
            return smaller, by
        try:
            smaller, by = scaled(requests, by * Fraction(limit, longest))
        except BenchError as e:
            raise BenchError(f"{found}; the trace cannot be scaled: {e}; use --too-long skip") from None
    raise BenchError(f"{found}; the trace cannot be scaled to it: its conversations have too many turns")


def _total(request: Request) -> int:
    return request.tokens_in + (request.tokens_out or 0)


def brings_text(r: Request) -> bool:
    """Is what it says given, and not only how long it is?"""
    given: Iterable[object] = (r.prompt, r.messages, r.prompt_token_ids, r.body)
    return any(text is not None for text in given)
