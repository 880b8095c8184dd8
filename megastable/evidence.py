"""What attribution needs to know: how samples look on the state that the engine holds. Collective; leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.data.loader import Loader, MicroBatch
from megastable.data.skips import Selection, Skips
from megastable.engine import Engine
from megastable.ranks import agree
from megastable.stability import attribution
from megastable.stability.attribution import Conclusion, Suspect
from megastable.stability.settings import AttributionConfig

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

RECORDED = (
    2**16
)  # samples of the recorded steps that are compared with: more tell nothing more, and take seconds
SEARCHED = 2**17  # positions before the present one among which samples of a rare corpus are looked for
BATCHES = 4  # whose gradients are measured where no loss is bad: what a bad one does shows within a few steps
SHOWN = 2  # guilty samples whose own gradients are measured, as evidence


@dataclass(frozen=True)
class Trained:
    """A step of this process: its positions and per-sample losses, int64 and fp64 [global batch]."""

    step: int
    positions: Int64s
    losses: Floats
    applied: bool


class Known(NamedTuple):
    """Harmless samples, oldest first: positions, losses on the good state or shortly before it, corpora; each [n]."""

    positions: Int64s
    losses: Floats
    corpora: Int64s


def harmless(steps: Sequence[Trained], selection: Skips | Selection) -> tuple[Int64s, Floats]:
    """Positions and losses of what some steps trained on, but for what is left out by now: it may have been convicted
    since, in a later epoch."""
    positions = np.concatenate([np.empty(0, np.int64), *(t.positions for t in steps)])
    losses = np.concatenate([np.empty(0), *(t.losses for t in steps)])
    kept = ~selection.mask(positions)
    return positions[kept], losses[kept]


class Laboratory:
    """Measures samples on the present state of `engine`, reading them through `loader`."""

    def __init__(self, config: AttributionConfig, engine: Engine, loader: Loader, batch: int) -> None:
        self.config, self.engine, self.loader, self.batch = config, engine, loader, batch
        self.order = loader.source.order

    def losses(self, positions: Int64s) -> Floats:
        """Per-sample cross-entropy, fp64 [n], by forward passes alone; read and moved a global batch at a time.

        Raises DataError, on every rank, where one cannot read its part.
        """
        unit, found = self.loader.unit, [np.empty(0)]
        for part in np.split(positions, range(self.batch, positions.size, self.batch)):
            if part.size:
                padded = np.concatenate([part, np.repeat(part[-1:], -part.size % unit)])
                found.append(self.engine.evaluate(self._read(padded)).numpy()[: part.size])
        return np.concatenate(found)

    def gradient_norm(self, positions: Int64s) -> float:
        """Of the mean gradient of some samples, by a batch full of copies; nan where fp16 has no room for it.

        positions: a number of them that divides the global batch is weighted evenly. Raises DataError as `losses` does.
        """
        measured = self.engine.measure(self._read(np.resize(positions, self.batch)))
        return math.nan if measured.overflow else measured.grad_norm

    def corpora(self, positions: Int64s) -> Int64s:
        return self.order.locate(positions).corpus

    def examine(
        self,
        window: Sequence[Trained],
        history: Sequence[Trained],
        cursor: int,
        selection: Skips | Selection,
        recurred: bool,
    ) -> Conclusion:
        """Who of `window` (the steps since the onset) is guilty; beyond its end, too, where it ends in bad data.

        history: steps that led to the present state without a complaint; cursor: the position that it has come to;
        selection: what is skipped already. Raises DataError as `losses` does.
        """
        steps = window[: self.config.window]
        positions = np.concatenate([t.positions for t in steps])
        corpora, losses = self.corpora(positions), self.losses(positions)
        known = self._known(history, selection)
        end = int(positions.max()) + 1

        def judge(threshold: float) -> tuple[Floats, npt.NDArray[np.bool_]]:
            """On until a clean batch."""
            nonlocal known, positions, losses, corpora, end
            for ahead in range(self.config.ahead + 1):
                known = self._more(known, corpora, cursor, selection)
                z, p = attribution.compare(losses, corpora, known.losses, known.corpora)
                bad = attribution.guilty_by_loss(z, p, threshold)
                if not bad[-self.batch :].any() or ahead == self.config.ahead:
                    break
                more, end = selection.next_kept(end, self.batch)
                positions, losses = (
                    np.concatenate([positions, more]),
                    np.concatenate([losses, self.losses(more)]),
                )
                corpora = np.concatenate([corpora, self.corpora(more)])
            return z, bad

        z, bad = judge(self.config.threshold)
        guilty = positions[bad]
        if guilty.size:
            worst = guilty[np.argsort(-z[bad], kind="stable")][: min(SHOWN, self.config.gradients)]
            norms = {p: self.gradient_norm(np.array([p])) for p in worst.tolist()}
        else:
            guilty, norm = self._by_gradient(steps, known)
            norms = {int(guilty[0]): norm} if guilty.size == 1 else {}
            if guilty.size:
                # What its gradient proves of one, its loss says of its like.
                like = attribution.LIKE * float(np.nanmin(z[np.isin(positions, guilty)], initial=np.inf))
                if math.isfinite(like) and like > attribution.TELLING:
                    z, bad = judge(min(like, self.config.threshold))
                    guilty = np.union1d(guilty, positions[bad])
        norms = {p: norm for p, norm in norms.items() if not math.isnan(norm)}
        suspects = [
            Suspect(position, loss, deviation, norms.get(position))
            for position, loss, deviation in zip(positions.tolist(), losses.tolist(), z.tolist(), strict=True)
        ]
        examined = (
            f"the first {len(steps)} of {len(window)}" if len(steps) < len(window) else f"the {len(steps)}"
        )
        kinds = int(np.isin(known.corpora, corpora).sum())
        return attribution.conclude(
            suspects, guilty.tolist(), recurred, kinds, f"{examined} steps since the onset"
        )

    def _read(self, positions: Int64s) -> list[MicroBatch]:
        return agree(lambda: self.loader.read(positions))

    def _known(self, history: Sequence[Trained], selection: Skips | Selection) -> Known:
        """What was recorded of `history`: losses of samples not trained on yet, just as the suspects are not."""
        steps: list[Trained] = []
        for step in reversed(history):
            if len(steps) * self.batch >= RECORDED:
                break
            steps.insert(0, step)
        positions, losses = harmless(steps, selection)
        return Known(positions, losses, self.corpora(positions))

    def _more(self, known: Known, corpora: Int64s, cursor: int, selection: Skips | Selection) -> Known:
        """For those of `corpora` of which little was recorded (a rare one, or right after a start): its latest samples
        before `cursor`, measured. They were trained on, most of them long ago."""
        count = self.config.reference
        few = [c for c in np.unique(corpora).tolist() if (known.corpora == c).sum() < count]
        reach, kept, of = 0, np.empty(0, np.int64), np.empty(0, np.int64)
        while few and reach < min(cursor, SEARCHED) and any((of == c).sum() < count for c in few):
            reach = min(cursor, max(4 * reach, 4 * count))
            kept, _ = selection.next_kept(cursor - reach, reach)
            kept = kept[kept < cursor]
            of = self.corpora(kept)
        found = [np.empty(0, np.int64), *(kept[of == c][-count:] for c in few)]
        # No more than was recorded: those are the better measure, and have been tried before.
        found = [f for f, c in zip(found[1:], few, strict=True) if f.size > (known.corpora == c).sum()]
        if not found:
            return known
        positions = np.concatenate(found)
        measured = Known(positions, self.losses(positions), self.corpora(positions))
        left = ~np.isin(known.corpora, measured.corpora)
        return Known(*(np.concatenate([new, old[left]]) for old, new in zip(known, measured, strict=True)))

    def _by_gradient(self, steps: Sequence[Trained], known: Known) -> tuple[Int64s, float]:
        """Who of the batches of `steps` has an extraordinary gradient on the good state, and its norm; else nobody.

        Takes at most `gradients` steps' time: two for what is ordinary, at most half of the rest for the batches, the
        refused ones first, the others to halve the worst of them.
        """
        nobody, budget = (np.empty(0, np.int64), math.nan), self.config.gradients - 2
        if budget < 2 or known.positions.size < attribution.ENOUGH:
            return nobody
        calm = known.positions[np.argsort(np.abs(known.losses - np.median(known.losses)), kind="stable")]
        # Samples of ordinary loss, for a gradient of ordinary size.
        whole, alone = self.gradient_norm(known.positions[-self.batch :]), self.gradient_norm(calm[:1])
        batches = sorted(steps, key=lambda t: t.applied)[: min(BATCHES, budget // 2)]
        norms = np.array([self.gradient_norm(t.positions) for t in batches])
        worst = int(np.argmax(np.nan_to_num(norms, nan=-1.0, posinf=np.inf)))
        if not norms[worst] > attribution.BATCH_RATIO * whole:
            return nobody
        group, norm = attribution.narrow(
            batches[worst].positions, float(norms[worst]), self.gradient_norm, budget - len(batches)
        )
        usual = attribution.usual_norm(whole, alone, self.batch, group.size)
        return (group, norm) if norm > attribution.GRADIENT_RATIO * usual else nobody
