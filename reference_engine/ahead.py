"""The step after this one, launched before this one's tokens are read: the device computes while the host schedules.

What will be asked next is mostly known: the same sequences, one position on, with tokens that the device already has.
So that step is launched at once, and `execute`, when it is then asked for, finds it under way. It is only ever a guess.
A row counts if its sequence is asked for at just that position, with the same blocks and the token that was guessed;
one whose sequence has vanished (ended, aborted, preempted) is dropped. What it wrote does no harm: the place was its
sequence's own and not published when it was launched, and whoever gets the block writes later, in the order of one
stream. So nothing that is computed depends on whether a guess was right.

Untried on a GPU.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from reference_engine import gpu, graphs, model, sampler
from reference_engine.batch import Batch
from reference_engine.graphs import Graphs, Launch, Row
from reference_engine.sequence import Sequence

if TYPE_CHECKING:
    from reference_engine.runner import ModelRunner

Work = list[tuple[Sequence, int]]
Eager = Callable[[Work], tuple[list[int], torch.Tensor]]  # -> which items get a token, and those, on the device


class Flight(NamedTuple):
    """A guess under way."""

    launch: Launch
    places: dict[Sequence, tuple[int, Row]]  # in `made`
    given: dict[Sequence, int]  # the token that each was guessed to go on from, once it was read


class Stepper:
    """Computes steps on the device, decodes by graphs; one thread's."""

    def __init__(self, captured: Graphs, eager: Eager, seed: int, ahead: bool) -> None:
        self.graphs, self._eager, self._seed, self._ahead = captured, eager, seed, ahead
        self._flight: Flight | None = None
        self.guessed = self.wasted = 0  # rows

    def execute(self, work: Work) -> list[int | None]:
        """One token for each sequence whose end the work reaches."""
        flight, self._flight = self._flight, None
        places = [_claimed(flight, s, n) for s, n in work]
        launches = [flight.launch] if flight and any(p is not None for p in places) else []
        if flight:
            self.wasted += len(flight.places) - sum(p is not None for p in places)
        rest = [i for i, place in enumerate(places) if place is None]
        if rest:
            launches.append(self._launch([work[i] for i in rest], rest, places, alone=not launches))
        if self._ahead:
            self._flight = self._guess(work, places)
        read: dict[int, int] = {}
        for launch in launches:
            read |= launch.read()
        tokens = [None if place is None else read[place] for place in places]
        if self._flight:
            self._flight.given.update((s, t) for (s, _), t in zip(work, tokens, strict=True) if t is not None)
        return tokens

    def _launch(self, work: Work, numbers: list[int], places: list[int | None], alone: bool) -> Launch:
        """What was not under way; fills in the places of its tokens. `alone`: no guess holds the graphs' places."""
        if alone and all(n == 1 and not s.adapter for s, n in work):
            rows = [self._row(s, s.token_ids[s.computed], -1, s.computed, 0) for s, _ in work]
            launch = self.graphs.launch(rows)
            if launch:
                for row, (i, (s, _)) in enumerate(zip(numbers, work, strict=True)):
                    places[i] = row if s.computed + 1 == len(s.token_ids) else None
                return launch
        ends, made = self._eager(work)
        launch = self.graphs.beside(made)
        for k, end in enumerate(ends):
            places[numbers[end]] = launch.place + k
        return launch

    def _guess(self, work: Work, places: list[int | None]) -> Flight | None:
        """The next step: everyone who is not at his end. None if that cannot be, or another step is likelier."""
        if any(place is None for place in places):
            return None  # the rest of a prompt comes next, and the decodes better with it
        rows: dict[Sequence, tuple[int, Row]] = {}
        for (s, _), place in zip(work, places, strict=True):
            position = len(s.token_ids)
            if s.output_len + 1 >= s.params.max_tokens:
                continue
            if s.adapter or position >= len(s.blocks) * self.graphs.block_size or position >= self.graphs.context:
                return None  # a step without it would have to be followed by one for it
            assert place is not None
            rows[s] = (len(rows), self._row(s, 0, place, position, 1))
        launch = self.graphs.launch([row for _, row in rows.values()]) if rows else None
        if launch is None:
            return None
        self.guessed += len(rows)
        return Flight(launch, rows, {})

    def _row(self, s: Sequence, token: int, source: int, position: int, later: int) -> Row:
        """`later`: how many tokens its answer will be longer by then."""
        params = s.params
        u = sampler.uniform(s, self._seed, later) if params.temperature > 0 else 0.0
        early = s.output_len + later < params.min_tokens
        return Row(token, source, position, s.blocks, early, params.temperature, params.top_p, u)


def _claimed(flight: Flight | None, s: Sequence, n: int) -> int | None:
    """Where the token of this work is being made; None: the guess was not this."""
    found = flight.places.get(s) if flight else None
    if not flight or not found or n != 1:
        return None
    place, row = found
    same = row.position == s.computed == len(s.token_ids) - 1 and row.blocks is s.blocks
    return place if same and flight.given.get(s) == s.token_ids[-1] else None


def make(runner: "ModelRunner", most_rows: int, ahead: bool) -> Stepper:
    """For the runner's model as it is now, all graphs captured. `most_rows`: sequences of a step."""
    own, eos_ids = runner.model, torch.tensor(sorted(runner.eos_ids), dtype=torch.int64, device=runner.device)

    def compute(batch: Batch, draws: gpu.Draws, out: torch.Tensor) -> None:
        gpu.sample(own.head.times(model.hidden(own, batch, slice(None))).float(), draws, eos_ids, out)

    def eager(work: Work) -> tuple[list[int], torch.Tensor]:
        batch = model.lay_out(own, work)
        draws = _draws([work[i][0] for i in batch.sampled], runner.seed, runner.device)
        made = torch.empty(len(batch.sampled), dtype=torch.int64, device=runner.device)
        with torch.inference_mode():
            gpu.sample(model.forward(own, batch, runner.adapters), draws, eos_ids, made)
        return batch.sampled, made

    device = graphs.cuda() if runner.device.type == "cuda" else graphs.in_place()
    made = Graphs(own, most_rows, compute, device)
    made.capture()
    return Stepper(made, eager, runner.seed, ahead)


def _draws(sequences: list[Sequence], seed: int, device: torch.device) -> gpu.Draws:
    asked = [s.params for s in sequences]
    uniforms = [sampler.uniform(s, seed) if p.temperature > 0 else 0.0 for s, p in zip(sequences, asked, strict=True)]
    early = [s.output_len < s.params.min_tokens for s in sequences]
    doubles = torch.tensor([[p.temperature for p in asked], [p.top_p for p in asked], uniforms], dtype=torch.float64)
    # Not waited for by us: that would be for the guess under way as well, which comes first on the stream. CUDA may
    # still wait where it stages pageable memory; untried.
    not_yet, wide = (t.to(device, non_blocking=True) for t in (torch.tensor(early, dtype=torch.int32), doubles))
    return gpu.Draws(not_yet, *wide)
