"""What sequences held by the records, beside what the server's own gauge says its KV memory held: do the two agree?"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from llm_bench import carried
from llm_bench.capacity_ask import Figure, Section, Table, digits
from llm_bench.carried import Resident
from llm_bench.printable import counted
from llm_bench.results import Measured
from llm_bench.server_metrics import Figures, total

AGREE = 0.1  # of the gauge; two hold that near the same
BLOCK = 16  # tokens, where the server does not say: what vLLM, SGLang and others have by default
FEW_SCRAPES = 5  # or more make a mean
OTHERS = 1.15  # times the sequences that this client had: others' are in the server's memory too
HEADS = (
    "load",
    "scrapes",
    "sequences held, tokens: by the records",
    "KV memory in use",
    "of tokens",
    "held, tokens: by the gauge",
    "gauge against records",
)


def section(cells: Sequence[Measured], planned: float | None = None) -> Section | None:
    """A row for each cell whose server exported how full its KV memory was; None where none did.

    By the records: the integral of prompt + generated so far over time, between the very scrapes that the gauge's mean
    is of. By the gauge: the share in use times what the memory holds in all, where the server says that. `planned`: the
    tokens that it holds by the model and the memory that a plan was given.
    """
    rows: list[tuple[str | float | None, ...]] = []
    notes: dict[str, list[str]] = {}
    pools = []
    for m in cells:
        server = _server(m)
        if server is None:
            continue
        row, said = _row(m, server)
        rows.append(row)
        pools.append(server.value("kv_pool"))
        for line in said:
            notes.setdefault(line, []).append(m.load)
    if not rows:
        return None
    texts = [f"{', '.join(dict.fromkeys(loads))}: {line}" for line, loads in notes.items()]
    pool = next(filter(None, pools), None)
    figures = _planned(pool, planned) if pool and planned else []
    return Section(
        "kv_gauge", "KV memory: the records against the server's gauge", figures, [Table(HEADS, rows)], texts
    )


def _planned(pool: float, planned: float) -> list[Figure]:
    how = "by the model, the memory and the precision given"
    agrees = (
        "as the plan has it"
        if abs(pool / planned - 1) <= AGREE
        else (
            f"{pool / planned:.3g} times what the plan has: the server was given another share of the memory, another "
            "precision, or is not what --model-config and --accelerator say; the ceiling by KV memory is of the plan"
        )
    )
    return [
        Figure("planned_tokens", "tokens that the plan's KV memory holds", planned, "tokens", how),
        Figure("pool_tokens", "tokens that the server's holds, by its word", pool, "tokens", agrees),
    ]


def _server(m: Measured) -> Figures | None:
    """All replicas together, where each says how full its KV memory is."""
    if m.scraped is None:
        return None
    found: Mapping[str, Figures] = m.scraped.figures(m.window.start_ns, m.window.end_ns)
    replicas = [found[s.name] for s in m.scraped.replicas if s.name in found]
    if len(replicas) < len(m.scraped.replicas):
        return None
    server = total(replicas)
    return server if server is not None and server.value("kv_usage") is not None else None


def _row(m: Measured, server: Figures) -> tuple[tuple[str | float | None, ...], list[str]]:
    usage, pool, size = (server.value(name) for name in ("kv_usage", "kv_pool", "kv_block"))
    assert usage is not None
    gauge = usage * pool if pool else None
    if server.apart:
        why = f"{server.edges()}: the records of one time are no measure of them"
        return (m.load, float(server.scrapes), None, f"{usage:.2%}", pool, gauge, "–"), [why]
    span = replace(m.window, start_ns=server.start_ns, end_ns=server.end_ns)
    held = carried.resident(m.cell, span, round(size or BLOCK))
    begin: tuple[str | float | None, ...] = (m.load, float(server.scrapes))
    if isinstance(held, str):
        return (*begin, None, f"{usage:.2%}", pool, gauge, "–"), [held]
    mine = tokens_held(held, server.seconds)
    notes = [f"a sequence counts {held.begins}, in blocks of {counted(held.block_size, 'token')}"]
    notes += [f"left out of the records' figure: {held.left_out}"] if held.left_out else []
    if server.scrapes < FEW_SCRAPES:
        notes.append(f"{server.scrapes} scrapes are few: a shorter --scrape-every makes the gauge's mean a better one")
    if gauge is None:
        notes.append(f"{server.of['kv_usage'].name} is a share of a memory whose size the server does not say")
        if usage:
            notes.append(f"both agree if it holds {digits(mine / usage)} tokens: compare with the server's log")
        return (*begin, mine, f"{usage:.2%}", None, None, "–"), notes
    apart = gauge / mine - 1 if mine else float("inf")
    notes.append(_suggests(apart, held, server, gauge))
    return (*begin, mine, f"{usage:.2%}", pool, gauge, f"{apart:+.1%}"), notes


def tokens_held(held: Resident, seconds: float, *, shared: bool = True) -> float:
    """Mean tokens, in whole blocks, that all sequences held at a time; `shared` False: without those of the cache."""
    of = held.seconds if shared else held.private
    return float(sum(blocks * s for blocks, s in enumerate(of.tolist()))) * held.block_size / seconds


def _suggests(apart: float, held: Resident, server: Figures, gauge: float) -> str:
    """What the difference may come of, by what else is known."""
    if abs(apart) <= AGREE:
        return "the two agree: what fits in KV memory can be computed from these records"
    running, had = server.value("running"), float(held.seconds.sum()) / server.seconds
    if apart > 0:
        if running is not None and running > OTHERS * had:
            ran = counted(digits(running), "sequence")
            return (
                f"the server ran {ran}, the records have {digits(had)} that held something: others' requests are in "
                "its memory, or the time before the first token, which is not told"
            )
        return (
            "the server holds more than its sequences need by now: room kept for answers not yet made, or blocks of "
            "its cache that count as in use. What fits is less than computed from the records, by about that share"
        )
    if held.shared:
        once = tokens_held(held, server.seconds, shared=False)
        between = "and the gauge lies between" if gauge > once else "and the gauge is below even that"
        between = "with which the gauge agrees" if abs(gauge / once - 1) <= AGREE else between
        return (
            "the server says that it took prompts from its cache, and blocks that several sequences share are held "
            f"once: without those the records have {digits(once)} tokens, {between}"
        )
    return (
        "the server holds less than its sequences have: it shares blocks between them and does not say so, keeps a "
        "window of each alone, or some waited without memory (preempted) while the records count them"
    )
