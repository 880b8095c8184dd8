"""Measures samples on the engine's current state, for attribution. Collective; leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from megastable.attribution import conclusion, groups
from megastable.attribution.conclusion import Conclusion
from megastable.attribution.examination import Examination
from megastable.attribution.likeness import READ
from megastable.attribution.scores import ScoredSamples
from megastable.base.collectives import agree, first
from megastable.base.errors import MegastableError
from megastable.config.stability import AttributionConfig
from megastable.data.loader import Loader, MicroBatch
from megastable.data.skips import Selection, Skips
from megastable.engine.engine import Engine

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
T = TypeVar("T")

RECORDED = 2**16  # samples of the recorded steps for comparison: more add nothing, and take seconds
SEARCHED = 2**17  # positions before the current one in which samples of a rare corpus are searched
CONTROLS = 3  # harmless samples of its own corpus that a sample's gradient is compared with
BATCHES = 4  # whose gradients are measured if no loss is bad: a bad batch shows within a few steps


@dataclass(frozen=True)
class Trained:
    """A step of this process: its positions and per-sample losses, int64 and fp64 [global batch]; scheduled: its
    learning rate before cuts and caps, None if unknown."""

    step: int
    positions: Int64s
    losses: Floats
    applied: bool
    scheduled: float | None = None


class Known(NamedTuple):
    """Harmless samples, oldest first: positions, losses on the good state or shortly before, corpora; each [n]."""

    positions: Int64s
    losses: Floats
    corpora: Int64s


class GradientNorms(NamedTuple):
    """Norms of gradients on the good state: of an ordinary batch and of an ordinary sample alone; of some batches [n].
    budget: how many more may be measured."""

    whole: float
    alone: float
    batches: list[Trained]
    norms: Floats
    budget: int

    @property
    def extraordinary(self) -> npt.NDArray[np.bool_]:
        """Which of the batches are: bool [n]."""
        return np.asarray(self.norms > conclusion.BATCH_RATIO * self.whole)


def harmless(steps: Sequence[Trained], selection: Skips | Selection) -> tuple[Int64s, Floats]:
    """Positions and losses of the samples of some steps, without those skipped by now: they may have been convicted
    since, in a later epoch."""
    positions = np.concatenate([np.empty(0, np.int64), *(t.positions for t in steps)])
    losses = np.concatenate([np.empty(0), *(t.losses for t in steps)])
    kept = ~selection.mask(positions)
    return positions[kept], losses[kept]


class Laboratory:
    """Measures samples on the current state of `engine`, reading them through `loader`."""

    def __init__(self, config: AttributionConfig, engine: Engine, loader: Loader) -> None:
        self.config, self.engine, self.loader = config, engine, loader

    @property
    def batch(self) -> int:
        """Samples of a step where the run stands: those before had as many, or fewer during a batch warm-up."""
        return self.loader.batch

    def losses(self, positions: Int64s) -> Floats:
        """Per-sample cross-entropy, fp64 [n], by forward passes alone, a global batch at a time.

        Raises DataError on every rank if one cannot read its part.
        """
        unit, found = self.loader.unit, [np.empty(0)]
        for part in np.split(positions, range(self.batch, positions.size, self.batch)):
            if part.size:
                padded = np.concatenate([part, np.repeat(part[-1:], -part.size % unit)])
                found.append(self.engine.evaluate(self._read(padded)).numpy()[: part.size])
        return np.concatenate(found)

    def gradient_norm(self, positions: Int64s) -> float:
        """Norm of the mean gradient of some samples, by a batch full of copies; nan if fp16 overflows.

        positions: weighted evenly if as many copies as the batch has room for are whole micro-batches on every rank.
        Raises DataError as `losses` does.
        """
        even = positions.size * max(1, self.batch // positions.size)
        size = self.batch if even % self.loader.unit else even
        measured = self.engine.measure(self._read(np.resize(positions, size)))
        return math.nan if measured.overflow else measured.grad_norm

    def corpora(self, positions: Int64s) -> Int64s:
        return self.loader.source.order.locate(positions).corpus

    def tokens(self, positions: Int64s) -> npt.NDArray[np.int32]:
        """The first `READ` + 1 of each sample, or all: int32 [n, l]; read by every rank, a global batch at a time.

        Raises DataError as `losses` does.
        """
        return agree(lambda: self._read_tokens(positions))

    def _read_tokens(self, positions: Int64s) -> npt.NDArray[np.int32]:
        source = self.loader.source
        found = np.empty((positions.size, min(source.order.sequence_length, READ) + 1), np.int32)
        for begin in range(0, positions.size, self.batch):
            part = slice(begin, begin + self.batch)
            found[part] = source.samples(positions[part])[:, : found.shape[1]]
        return found

    def samples(self, positions: Int64s, z: Floats) -> ScoredSamples:
        """Prepare samples for scoring. z: of their losses [n]; unknown ones do not count. Raises DataError as `losses`
        does."""
        return ScoredSamples(self.tokens(positions), np.nan_to_num(z, nan=0.0), self.corpora(positions))

    def examine(
        self,
        window: Sequence[Trained],
        history: Sequence[Trained],
        cursor: int,
        selection: Skips | Selection,
        adjacent: bool = False,
    ) -> Conclusion:
        """Find the guilty samples of `window` (the steps since the onset), and of what follows it.

        history: steps that led to the current state without trouble; cursor: the position of the state; selection: what
        is skipped already. adjacent: the window lies next to what a recent incident skipped. Raises DataError as
        `losses` does.
        """
        return self.led(
            lambda laboratory: Examination(
                laboratory, window, history, cursor, selection, adjacent
            ).conclude()
        )

    def led(self, work: Callable[[Laboratory], T]) -> T:
        """Run `work` on rank 0 alone, with a laboratory whose measurements involve all ranks; its result, or its
        MegastableError, on every rank.

        Measurements are the same on all ranks, but what is computed from them need not be: different CPUs round a
        logarithm differently, and a rank that measures one sample more than the others would hang.
        """
        if dist.get_world_size() == 1:
            return work(self)
        if dist.get_rank() == 0:
            return Leading(self).lead(work)
        # Requests of rank 0, until it is done.
        while (asked := first(_nothing)) is not None:
            measure, positions = asked
            getattr(self, measure)(positions)
        return first(_nothing)

    def known(
        self, history: Sequence[Trained], corpora: Int64s, cursor: int, selection: Skips | Selection
    ) -> Known:
        """Harmless samples for comparison with samples of `corpora`."""
        return self._more(self._known(history, selection), corpora, cursor, selection)

    def _read(self, positions: Int64s) -> list[MicroBatch]:
        return agree(lambda: self.loader.read(positions))

    def _known(self, history: Sequence[Trained], selection: Skips | Selection) -> Known:
        """Samples recorded in `history`: losses when not trained on yet, just like the suspects."""
        steps: list[Trained] = []
        for step in reversed(history):
            if len(steps) * self.batch >= RECORDED:
                break
            steps.insert(0, step)
        positions, losses = harmless(steps, selection)
        return Known(positions, losses, self.corpora(positions))

    def _more(self, known: Known, corpora: Int64s, cursor: int, selection: Skips | Selection) -> Known:
        """Add samples for those of `corpora` with few recorded (rare, or right after a start): the latest before
        `cursor`, measured. They were trained on, most of them long ago."""
        count = self.config.reference
        few = [c for c in np.unique(corpora).tolist() if (known.corpora == c).sum() < count]
        reach, kept, of = 0, np.empty(0, np.int64), np.empty(0, np.int64)
        while few and reach < min(cursor, SEARCHED) and any((of == c).sum() < count for c in few):
            reach = min(cursor, max(4 * reach, 4 * count))
            kept, _ = selection.next_kept(cursor - reach, reach)
            kept = kept[kept < cursor]
            of = self.corpora(kept)
        found = [np.empty(0, np.int64), *(kept[of == c][-count:] for c in few)]
        # No more than recorded: those are the better reference, and were tried first.
        found = [f for f, c in zip(found[1:], few, strict=True) if f.size > (known.corpora == c).sum()]
        if not found:
            return known
        positions = np.concatenate(found)
        measured = Known(positions, self.losses(positions), self.corpora(positions))
        left = ~np.isin(known.corpora, measured.corpora)
        return Known(*(np.concatenate([new, old[left]]) for old, new in zip(known, measured, strict=True)))

    def batch_norms(self, steps: Sequence[Trained], known: Known) -> GradientNorms | None:
        """Gradients of a few batches of `steps` on the good state, the refused ones first, and of ordinary ones; None
        if the ordinary are unknown.

        Costs two steps, and one per batch: at most half of the rest of `gradients`.
        """
        budget = self.config.gradients - 2
        if budget < 2 or known.positions.size < groups.ENOUGH:
            return None
        calm = known.positions[np.argsort(np.abs(known.losses - np.median(known.losses)), kind="stable")]
        # Samples of ordinary loss, for a gradient of ordinary size.
        whole, alone = self.gradient_norm(known.positions[-self.batch :]), self.gradient_norm(calm[:1])
        batches = sorted(steps, key=lambda t: t.applied)[: min(BATCHES, budget // 2)]
        norms = np.array([self.gradient_norm(t.positions) for t in batches])
        return GradientNorms(whole, alone, batches, norms, budget - len(batches))

    def by_gradient(self, found: GradientNorms, known: Known) -> tuple[Int64s, float]:
        """The sample of the worst batch with an extraordinary gradient, found by halving, and its norm; else none.

        Rare text is not learnt yet and has large gradients, so a corpus is compared with itself. A batch is halved down
        to one sample even beyond the budget, as its neighbours are innocent.
        """
        nobody = np.empty(0, np.int64), math.nan
        worst = int(np.argmax(np.nan_to_num(found.norms, nan=-1.0, posinf=np.inf)))
        if not found.extraordinary[worst]:
            return nobody
        batch = found.batches[worst].positions
        budget = max(found.budget, conclusion.halvings(batch.size))
        one, norm = conclusion.narrow(batch, float(found.norms[worst]), self.gradient_norm, budget)
        usual = conclusion.usual_norm(found.whole, found.alone, self.batch, 1)
        if one.size > 1 or not norm > conclusion.GRADIENT_RATIO * usual:
            return nobody
        own = known.positions[known.corpora == self.corpora(one)]
        if own.size < groups.ENOUGH:
            return nobody
        alone = float(np.median([self.gradient_norm(p[None]) for p in own[-CONTROLS:]]))
        usual = conclusion.usual_norm(found.whole, alone, self.batch, 1)
        return (one, norm) if norm > conclusion.GRADIENT_RATIO * usual else nobody


class Leading(Laboratory):
    """The laboratory of rank 0 while it decides alone: makes the other ranks join every measurement (`led`)."""

    def __init__(self, of: Laboratory) -> None:
        super().__init__(of.config, of.engine, of.loader)
        self._of = of

    def lead(self, work: Callable[[Laboratory], T]) -> T:
        """Run it, and send the others the outcome."""

        def outcome() -> T:
            if error is not None:
                raise error
            return found[0]

        found, error = list[T](), None
        try:
            found.append(work(self))
        except MegastableError as raised:
            if raised.collective:  # raised in a measurement: the others have it, too
                raise
            error = raised
        first(_nothing)
        return first(outcome)

    def led(self, work: Callable[[Laboratory], T]) -> T:
        return work(self)

    def losses(self, positions: Int64s) -> Floats:
        self._tell("losses", positions)
        return self._of.losses(positions)

    def gradient_norm(self, positions: Int64s) -> float:
        self._tell("gradient_norm", positions)
        return self._of.gradient_norm(positions)

    def tokens(self, positions: Int64s) -> npt.NDArray[np.int32]:
        self._tell("tokens", positions)
        return self._of.tokens(positions)

    def _tell(self, measure: str, positions: Int64s) -> None:
        first(lambda: (measure, positions))


def _nothing() -> Any:
    return None
