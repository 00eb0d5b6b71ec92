"""What a run's cells say of capacity: offered and served, the rate within the SLO, the ceiling, what sequences held."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np

from llm_bench import energy, metrics, objectives, slo, windows
from llm_bench.client import BUSY, CLIENT_LIMITED, LIMITED
from llm_bench.columns import Cell
from llm_bench.energy import Energy
from llm_bench.evidence import Work, work_of
from llm_bench.identities import little
from llm_bench.objectives import Judged, Slo
from llm_bench.results import Measured, Run
from llm_bench.search import Plan, points
from llm_bench.search_evidence import seen
from llm_bench.series import due_in, outcome_in
from llm_bench.windows import Window

Judgement = Literal["MET", "MISSED", "UNDECIDED", "not judged"]  # the last: no limit was given

FULL_STAYS = 5.0  # times its requests stay, from which on a window of a growing backlog shows a full server's rate
FLAT = 1.1  # tokens/s at twice the slots or more, against which a server is shown to be saturated
IDLE_SLOTS = "idle slots"  # of CLIENT_CHECKS: slots that the client did not keep at the server


class Carried(NamedTuple):
    """One cell as evidence. Figures are None where the cell does not give them."""

    run: str
    target: str
    kind: str  # closed, open or replay
    even: bool  # an open loop's arrivals were evenly spaced
    load: str
    level: float  # slots, requests/s or speed: what orders the loads of one kind
    state: str  # of its window
    verdict: Judgement
    why: str
    offered: float | None  # arrivals a second (arrival_rate); None for a closed loop, which offers what is served
    served: float | None  # ok answers ended a second (requests_per_second)
    rate: float | None  # answers a second that it is evidence of
    goodput: float | None  # of those due, the ones that met every per-request limit, a second
    tokens_per_second: float | None
    tokens_within: float | None  # of tokens_per_second, the part of those that are goodput
    tokens_out: float | None  # of a mean ok answer: of those that ended in the window or, where it is short, due in it
    tokens_in: float | None
    cached_share: float | None
    stay_s: float | None  # mean, from the last byte sent to the end
    window_s: float
    in_flight: float | None
    steady: bool  # its figures are of a steady state, over at least as long as its requests stay
    ttft_s: float | None  # means, for curves
    tpot_s: float | None
    wasted: float | None  # tokens of failed and cancelled requests in the window
    little: str
    doubts: tuple[str, ...]  # kinds
    work: Work = "decoding"
    energy: Energy | None = None  # of this machine's GPUs, where they were scraped
    by_client: bool = False  # its backlog grows, by no more than this client's lateness explains

    @property
    def client_full(self) -> str:
        """Doubts by which this client, and not the server, may have set the rate; "" without."""
        return ", ".join(kind for kind in self.doubts if kind in (BUSY, LIMITED, IDLE_SLOTS))

    def planned(self, utilization: float) -> float | None:
        """The rate of random arrivals to plan one replica with.

        A closed loop sends when it is answered, so that nothing queues in front of it; users come when they like, and
        wait the longer the nearer their rate is to it. An open loop or a replay had its queue measured.
        """
        return self.rate if self.rate is None or self.kind != "closed" else self.rate * utilization


class Bracket(NamedTuple):
    """The rate within the SLO of one target under one kind of load: at least `low`, below `high` where that is known.

    `low`: of the loads below `high` that are proven to meet every limit, the one that carried most.
    """

    target: str
    kind: str
    low: Carried | None
    high: Carried | None
    cells: tuple[Carried, ...]  # by load

    @property
    def undecided(self) -> list[Carried]:
        """Loads between the bounds of which nothing can be said."""
        least = self.low.level if self.low else -np.inf
        most = self.high.level if self.high else np.inf
        return [c for c in self.cells if c.verdict == "UNDECIDED" and least < c.level < most]


def evidence(run: Run, agreed: Slo) -> list[Carried]:
    """Each cell of the run. Without limits nothing is judged, and nothing is proven."""
    limited = [{d.kind for d in found} for found in run.doubts]
    found = [_carried(run, m, agreed, kinds) for m, kinds in zip(run.cells, limited, strict=True)]
    return _together(run, found, agreed) if agreed.limits else found


def _together(run: Run, found: list[Carried], agreed: Slo) -> list[Carried]:
    """Cells of one load have the verdict of all of them: to take the luckiest of several would prove too much."""
    by_load: dict[tuple[str, str, str], list[int]] = {}
    for i, c in enumerate(found):
        by_load.setdefault((c.target, c.kind, c.load), []).append(i)
    for places in (p for p in by_load.values() if len(p) > 1):
        plan = Plan("concurrency" if found[places[0]].kind == "closed" else "rate", agreed.limits)
        cells = [
            seen(
                str(i),
                found[i].level,
                run.cells[i].cell,
                run.cells[i].window,
                agreed,
                reason=str(run.cells[i].end.get("reason") or ""),
                client_limited=bool(set(found[i].doubts) & set(CLIENT_LIMITED)),
            )
            for i in places
        ]
        (point,) = points(plan, cells)
        for i in places:
            found[i] = found[i]._replace(verdict=point.verdict, why=f"its {len(places)} cells together: {point.why}")
    return found


def _carried(run: Run, m: Measured, agreed: Slo, doubts: set[str]) -> Carried:
    cell, window = m.cell, m.window
    load = cell.header.get("load") or {}
    kind = str(load.get("kind"))
    client_limited = bool(doubts & set(CLIENT_LIMITED))
    by_client = windows.by_client(cell, window, client_limited)
    judged = objectives.judge(cell, window, agreed, client_limited=client_limited, by_client=by_client)
    verdict, why = _verdict(judged, window, by_client)

    def figure(name: str) -> float | None:
        return metrics.compute(name, cell, window, agreed.context()).value

    ok = outcome_in(cell, "ok")
    due = ok & due_in(cell, window)
    said = cell["tokens_in"][due]
    known_in = np.where(said >= 0, said, cell["planned_in"][due])
    law = little(cell, window)
    ended = ok & (cell["end_ns"] >= window.start_ns) & (cell["end_ns"] < window.end_ns)
    steady = window.state in ("", windows.STATIONARY) and window.seconds >= law.stay_s
    # Those whose tokens are the token rate's; in a window too short for the long ones the short stand for nobody.
    tokens = cell["tokens_out"][ended if window.seconds >= FULL_STAYS * law.stay_s else due]
    limits = agreed.context().limits
    met = slo.met_in(cell, window, limits, agreed.context()) if limits else None
    within, per_second = None if met is None else _share_of_tokens(cell, window, met), figure("tokens_per_second")
    offered, served = None if kind == "closed" else figure("arrival_rate"), figure("requests_per_second")
    return Carried(
        run=run.path.name,
        target=m.target,
        kind=kind,
        even=kind == "open" and "burstiness" in load and load["burstiness"] is None,
        load=m.load,
        level=float(load.get("concurrency") or load.get("rate") or load.get("speed") or 0),
        state=window.state if window.opened else windows.TOO_SHORT,
        verdict=verdict,
        why=why,
        offered=offered,
        served=served,
        rate=_rate(cell, window, offered, served) if window.opened else None,
        goodput=None if met is None else int(met.sum()) / window.seconds,
        tokens_per_second=per_second,
        tokens_within=None if per_second is None or within is None else per_second * within,
        tokens_out=float(tokens.mean()) if len(tokens) and (tokens >= 0).all() else None,
        tokens_in=float(known_in.mean()) if len(known_in) and (known_in >= 0).all() else None,
        cached_share=figure("cached_prompt_share"),
        stay_s=law.stay_s or None,
        window_s=window.seconds,
        in_flight=law.records or None,
        steady=steady,
        ttft_s=_seconds(figure("ttft_mean")),
        tpot_s=_seconds(figure("tpot_mean")),
        wasted=figure("wasted_tokens"),
        little=law.text if law.rate else "",
        doubts=tuple(sorted(doubts)),
        work=work_of(cell, window),
        energy=energy.of(cell, window, m.scraped),
        by_client=by_client,
    )


def _share_of_tokens(cell: Cell, window: Window, met: np.ndarray) -> float | None:
    """Of the output tokens of answers due in the window, cut ones too, those of `met`; None where not all are known.

    Of an overloaded server answers that are due in a window end long after it: their tokens over its seconds would be
    more than it makes.
    """
    due = due_in(cell, window) & outcome_in(cell, "ok", "cut_at_end")
    tokens = cell["tokens_out"][due]
    known = (tokens >= 0).all() and tokens.any()
    return float(cell["tokens_out"][met].sum() / tokens.sum()) if known else None


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _rate(cell: Cell, window: Window, offered: float | None, served: float | None) -> float | None:
    """What was served; of an open loop whose backlog does not grow, the arrivals times the share that ended well: those
    that end in a window began before it opened.
    """
    if offered is None or window.state == windows.GROWING:
        return served
    due = due_in(cell, window)
    decided = int((due & outcome_in(cell, "ok", "failed", "dropped")).sum())
    return offered * int((due & outcome_in(cell, "ok")).sum()) / decided if decided else None


def _verdict(judged: Sequence[Judged], window: Window, by_client: bool) -> tuple[Judgement, str]:
    """A cell carries its load within the SLO where every limit is met and its state is stationary.

    `by_client`: that its backlog grows may be this client's doing, and is no miss.
    """
    growing = f"the backlog grows by {window.growth:.3g} requests/s" if window.state == windows.GROWING else ""
    if by_client:
        growing += f", {windows.BY_CLIENT}"
    if not judged:
        return "not judged", growing or "no limit was given"
    if growing and not by_client:
        return "MISSED", growing
    said = [(j.verdict, f"{j.limit.text}: {j.why}") for j in judged]
    missed = [why for verdict, why in said if verdict == "MISSED"]
    if missed:
        return "MISSED", "; ".join(missed)
    open_ = [why for verdict, why in said if verdict == "UNDECIDED"]
    if by_client:
        open_.insert(0, f"{growing}: measure it again with a client that keeps up")
    elif not window.opened or window.state not in ("", windows.STATIONARY):
        cell = f"the cell is {window.state or 'without a window'}: {window.evidence or window.rule}"
        open_.insert(0, f"{cell}; more --requests or a longer --warmup makes it steady")
    if open_:
        return "UNDECIDED", "; ".join(open_)
    return "MET", "; ".join(why for _, why in said)


def brackets(cells: Sequence[Carried]) -> list[Bracket]:
    """The cells by target and kind of load, each with its bounds."""
    groups: dict[tuple[str, str], list[Carried]] = {}
    for cell in cells:
        groups.setdefault((cell.target, cell.kind), []).append(cell)
    return [_bracket(target, kind, mine) for (target, kind), mine in groups.items()]


def _bracket(target: str, kind: str, cells: list[Carried]) -> Bracket:
    ordered = sorted(cells, key=lambda c: c.level)
    high = next((c for c in ordered if c.verdict == "MISSED"), None)
    below = [c for c in ordered if high is None or c.level < high.level]
    met = [c for c in below if c.verdict == "MET" and c.rate and c.state in ("", windows.STATIONARY)]
    # Beyond its knee a closed loop may carry less at more slots: the most that was carried within the SLO counts.
    return Bracket(target, kind, max(met, key=lambda c: (c.rate or 0, c.level), default=None), high, tuple(ordered))


# ---- the most that was made


class Busiest(NamedTuple):
    """The cell that made most, and whether more load was shown to bring no more."""

    cell: Carried
    saturated: bool
    text: str


def busiest(cells: Sequence[Carried]) -> Busiest | str:
    """Of cells of one kind of load; a str says why none of them tells what a server can make.

    What is made are output tokens or, of single passes, answers. Slots show saturation where more of them make no more,
    arrivals where their backlog grows for many stays.
    """
    known = [c for c in cells if made(c)]
    if not known and any(c.served for c in cells):
        return "how many tokens its answers have is not known"
    steady = [c for c in known if c.steady]
    growing = [c for c in known if c.state == windows.GROWING and not c.by_client]
    full = [c for c in growing if c.window_s >= FULL_STAYS * (c.stay_s or np.inf)]
    most = max([*steady, *full], key=made, default=None)
    if most is None:
        return "no load was steady for as long as its requests stay: its tokens/s are not those of a steady state"
    if most in full and not most.client_full:
        stays = most.window_s / (most.stay_s or np.inf)
        return Busiest(most, True, f"saturated: its backlog grew, over {stays:.3g} times what its requests stay")
    pairs = combinations(sorted(steady, key=lambda c: c.level), 2)
    unit = "answers/s" if most.work == "single pass" else "tokens/s"
    for a, b in sorted(pairs, key=lambda pair: -made(pair[0])):
        if b.kind == "closed" and b.level >= 2 * a.level and made(b) <= FLAT * made(a) and not b.client_full:
            text = f"saturated: from {a.load} to {b.load} it went from {made(a):.4g} to {made(b):.4g} {unit}"
            return Busiest(most, True, text)
    why = (
        f"this client may have been the limit ({most.client_full})"
        if most.client_full
        else "the most of any steady load"
    )
    return Busiest(most, False, f"{why}, not shown to be saturated: the ceiling is this or more")


def made(cell: Carried) -> float:
    """Output tokens a second or, of single passes, answers; 0 where that is not known."""
    if cell.work == "single pass":
        return cell.served or 0.0
    return (cell.tokens_per_second or 0.0) if cell.tokens_out else 0.0


# ---- what active sequences hold


class Resident(NamedTuple):
    """Time-weighted blocks of active sequences: `seconds[b]` is how long sequences held b blocks, all together."""

    block_size: int
    seconds: np.ndarray
    private: np.ndarray  # the same without the blocks that the server said it took from its cache
    sequences: int
    active_s: float  # mean time that a sequence due in the window holds blocks
    begins: str  # in words: from when on a sequence counts
    left_out: str  # requests of which nothing is known, and why

    @property
    def blocks(self) -> float:
        return _mean(self.seconds)

    @property
    def private_blocks(self) -> float:
        return _mean(self.private)

    @property
    def most(self) -> int:
        """Blocks of the longest, which would be the figure of a plan by the maximum."""
        return int(np.flatnonzero(self.seconds).max())

    @property
    def shared(self) -> bool:
        return bool(self.private_blocks < self.blocks)


def _mean(seconds: np.ndarray) -> float:
    return float((np.arange(len(seconds)) * seconds).sum() / seconds.sum())


def resident(cell: Cell, window: Window, block_size: int) -> Resident | str:
    """What sequences held in the window: the integral of prompt + generated so far over time, rounded up to blocks.

    A sequence is active from when the server says that it left its queue to its last token. Where no server says so,
    what it holds is read from its first token on and how long from the last byte sent: before the first token it may
    have waited with nothing, and both readings err towards fewer that fit. A str says why there is no such figure.
    """
    rows = outcome_in(cell, "ok", "cut_at_end") & (cell.choices == 1)
    said, planned = cell["tokens_in"], cell["planned_in"]
    prompt = np.where(said >= 0, said, planned)
    usable = rows & (cell.counts > 0) & (prompt >= 0)
    left = int((rows & ~usable).sum())
    several = int((outcome_in(cell, "ok", "cut_at_end") & (cell.choices > 1)).sum())
    queue = cell["server_queue_ms"]
    told = bool(usable.any()) and not bool(np.isnan(queue[usable]).any())
    begun = windows.left_ns(cell)
    cached_blocks = np.maximum(cell["tokens_cached"], 0) // block_size
    held: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # seconds, tokens held, cached blocks
    for row, start, until, generated in _between_tokens(cell):
        keep = usable[row]
        seconds = _overlap(start, until, window)[keep]
        held.append((seconds, (prompt[row] + generated)[keep], cached_blocks[row][keep]))
    if told:
        admitted = np.where(cell["sent_ns"] > 0, cell["sent_ns"], 0) + np.nan_to_num(queue * 1e6).astype(np.int64)
        begun = np.minimum(admitted, cell.first_ns)
        seconds = _overlap(begun[usable], cell.first_ns[usable], window)
        held.append((seconds, prompt[usable].astype(float), cached_blocks[usable]))
    seconds, tokens, cached = (
        (np.concatenate(parts) for parts in zip(*held, strict=True)) if held else (np.zeros(0),) * 3
    )
    some = seconds > 0
    seconds, tokens, cached = seconds[some], tokens[some], cached[some]
    if not len(seconds):
        return "no sequence streamed its tokens in the window: how long what was held is not known"
    blocks = np.ceil(np.round(tokens / block_size, 9)).astype(np.int64)
    private = np.maximum(blocks - cached.astype(np.int64), 0)
    why = [f"{left} not streamed or of unknown prompt"] if left else []
    why += [f"{several} of several choices"] if several else []
    mine = usable & due_in(cell, window)
    begins = "from when the server says it left its queue" if told else "from its first token"
    return Resident(
        block_size,
        np.bincount(blocks, seconds),
        np.bincount(private, seconds),
        int(usable.sum()),
        float((cell.last_ns - begun)[mine].mean()) / 1e9 if mine.any() else 0.0,
        begins,
        ", ".join(why),
    )


def _between_tokens(cell: Cell) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """(row, its ns, the next one's ns, tokens generated up to and with it) of each token-bearing event.

    The last lasts no time: a sequence's blocks are freed with its last token.
    """
    for piece in cell.pieces():
        many = np.diff(piece.offsets)
        out = cell["tokens_out"][piece.rows]
        sizes = np.repeat(np.where(out > 0, out / np.maximum(many, 1), 1.0), many)
        if piece.tokens is not None:
            sizes = np.where(piece.tokens > 0, piece.tokens, sizes)
        before = np.concatenate([[0.0], np.cumsum(sizes)])
        generated = before[1:] - np.repeat(before[piece.offsets[:-1]], many)
        until = np.append(piece.ns[1:], 0)
        last = piece.offsets[1:][many > 0] - 1
        until[last] = piece.ns[last]
        yield np.repeat(piece.rows, many), piece.ns, until, generated


def _overlap(start_ns: np.ndarray, end_ns: np.ndarray, window: Window) -> np.ndarray:
    inside = np.minimum(end_ns, window.end_ns) - np.maximum(start_ns, window.start_ns)
    return np.asarray(np.maximum(inside, 0) / 1e9)
