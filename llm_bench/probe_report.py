"""What probes found, in words: of one target, of several side by side, and where their greedy answers part."""

from collections.abc import Sequence

from llm_bench import perplexity, pins
from llm_bench.mistaken import some
from llm_bench.perplexity import Scored
from llm_bench.probe import AGREEMENT, Probe
from llm_bench.same_work import costs_apart, parting
from llm_bench.targets import Target

Found = tuple[Target, Probe]
_YES = {True: "yes", False: "no"}
_AROUND = 12  # characters shown of a text before and after where it parts


def check_rows(target: Target, found: Probe) -> list[tuple[str, str]]:
    """Of one target: question, answer."""
    return [
        ("url", target.url),
        ("protocol (api)", target.api),
        ("models", some(found.models) or "none listed"),
        ("context limit", str(found.max_model_len or "not said; declare max_model_len")),
        *[(fact.replace("_", " "), _build(target, found, fact)) for fact in pins.FACTS],
        ("usage in streams", _YES[found.usage_in_stream]),
        ("lengths can be pinned", _YES[found.lengths_pinned]),
        ("says finish_reason", _YES[found.finish_reason_seen]),
        ("usage in every event", found.continuous_usage or "not streamed"),
        ("reports cached tokens", _YES[found.cached_reported]),
        ("prefix cache", found.prefix_cache or "not asked"),
        ("tokens of a prompt", _sizes(found)),
        ("round trip", "unknown" if found.rtt_ms is None else f"{found.rtt_ms:.2f} ms (median of {found.rtt_probes})"),
        ("connect", "unknown" if found.connect_ms is None else f"{found.connect_ms:.2f} ms"),
        ("TTFT of a short probe", "not streamed" if found.ttft_ms is None else f"{found.ttft_ms:.1f} ms"),
        (
            "TPOT of a short probe",
            ("not streamed" if found.ttft_ms is None else "unknown")
            if found.tpot_ms is None
            else f"{found.tpot_ms:.2f} ms",
        ),
        *([("workers", found.workers)] if found.workers else []),
        *[("note", note) for note in _notes(found)],
    ]


def _notes(found: Probe) -> list[str]:
    cache = [f"prefix cache {found.prefix_cache}: {found.prefix_cache_seen}"] if found.prefix_cache else []
    return [*found.notes, *cache]


def _sizes(found: Probe) -> str:
    if not found.sized:
        return "not reported: a word is taken for one"
    return f"{found.tokens_per_word:.3g} a word, {found.base_tokens:+.1f} for the template"


def _build(target: Target, found: Probe, fact: str) -> str:
    """A fact of the build, and whose word it is."""
    declared, told = getattr(target, fact), found.told.get(fact, "")
    if told:
        return f"{told} (as declared)" if declared else told
    return f"{declared} (declared)" if declared else "not said"


def side_by_side(found: Sequence[Found]) -> list[list[str]]:
    """Of several targets: a row a question, a column a target. What is noted of each stands in `note_lines`."""
    answers = [dict(check_rows(*one)) for one in found]
    questions = dict.fromkeys(question for of in answers for question in of if question != "note")
    return [[question, *(of.get(question, "–") for of in answers)] for question in questions]


def note_lines(found: Sequence[Found]) -> list[str]:
    """What is noted, each once, with the names of the targets that it holds for: a table's cells are too narrow."""
    names: dict[str, list[str]] = {}
    for target, of in found:
        for note in _notes(of):
            names.setdefault(note, []).append(target.name)
    return [f"{', '.join(whose)}: {note}" for note, whose in names.items()]


def agreement_lines(found: Sequence[Found]) -> list[str]:
    """How each other target's greedy answers go with the first one's. A figure, no check: builds round differently."""
    (first, mine), *others = found
    lines: list[str] = []
    for target, theirs in others:
        pair = f"{first.name} and {target.name}"
        if not mine.answers or not theirs.answers:
            lines.append(f"{pair}: no greedy answers to compare: not every fixed prompt was answered")
            continue
        places = [parting(x, y) for x, y in zip(mine.answers, theirs.answers, strict=True)]
        same = sum(place is None for place in places)
        lines.append(f"{pair}: {same} of {len(places)} greedy answers are the same")
        for prompt, x, y, place in zip(AGREEMENT, mine.answers, theirs.answers, places, strict=True):
            if place is not None:
                lines.append(f"  {prompt!r} parts at character {place}: {_at(x, place)} against {_at(y, place)}")
        if apart := costs_apart(mine.agreement_tokens, theirs.agreement_tokens):
            lines.append(f"{pair}: differing tokenizers: {apart}")
        if silent := [of.name for of, said in ((first, mine), (target, theirs)) if not said.agreement_tokens]:
            unknown = "whether they share a tokenizer is unknown"
            lines.append(f"{pair}: {unknown}: {' and '.join(silent)} reported no prompt tokens")
    return lines


def scoring_lines(found: Sequence[tuple[str, Scored | str]]) -> list[str]:
    """(name, the bundled text as that target has it, or why it has not): of each, and of each beside the first."""
    lines = [f"the bundled text of {len(perplexity.TEXT.encode())} bytes, as likely as each finds it:"]
    scored = [(name, of) for name, of in found if isinstance(of, Scored)]
    for name, of in found:
        if isinstance(of, str):
            lines.append(f"  {name}: not scored: {of}")
        else:
            figures = f"perplexity {of.perplexity:.5g} over {len(of.logprobs)} tokens"
            lines.append(f"  {name}: {figures}, {of.bits_per_byte:.4f} bits a byte")
    return lines + [_apart(scored[0], other) for other in scored[1:]]


def _apart(a: tuple[str, Scored], b: tuple[str, Scored]) -> str:
    (mine, x), (theirs, y) = a, b
    bits = f"{y.bits_per_byte - x.bits_per_byte:+.4f} bits a byte"
    most = perplexity.furthest(x, y)
    if most is None:
        return f"{mine} and {theirs}: {bits}; perplexities do not compare, the text has other tokens there"
    place, nats = most
    token = f"{nats:.3g} nats apart at most, at token {place} ({x.tokens[place]!r})"
    return f"{mine} and {theirs}: perplexity {y.perplexity - x.perplexity:+.4g}, {bits}; {token}"


def _at(text: str, place: int) -> str:
    end = text[place : place + _AROUND]
    return repr(text[max(0, place - _AROUND) : place] + end) if end else f"{text[max(0, place - _AROUND) :]!r}, its end"
