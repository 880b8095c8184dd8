"""Searches for the guilty samples of an incident, up to the ends of a bad region. Collective.

Measures with sample_replay.py; stability/ decides: individuals and crowds (groups.py, scores.py). Extent of a bad
region: growth.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megastable.data.skips import Selection, Skips
from megastable.recovery.growth import Growth
from megastable.stability import attribution, groups, region, scores
from megastable.stability.attribution import Conclusion, Suspect
from megastable.stability.region import Region
from megastable.stability.scores import Conviction, Scale, Score, ScoredSamples

if TYPE_CHECKING:
    from megastable.recovery.sample_replay import GradientNorms, Known, Laboratory, Trained

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

SHOWN = 2  # guilty samples whose own gradients are measured, as evidence
CALIBRATING = 1024  # harmless samples per corpus whose tokens are read
# Share of bad samples below which no region is searched for; they are individuals.
THINNEST, FEW = 0.125, 3
PULL = 2.0  # of the gradient norm of an ordinary batch, above which a batch ahead is bad: clean ones have up to 1.5


class Examination:
    """For `window`, the steps since the onset. history, between: applied steps before it, up to the current state and
    after it. cursor: the current state's position; selection: what is skipped already."""

    def __init__(
        self,
        laboratory: Laboratory,
        window: Sequence[Trained],
        history: Sequence[Trained],
        between: Sequence[Trained],
        cursor: int,
        selection: Skips | Selection,
        adjacent: bool,
    ) -> None:
        self.lab, self.config, self.size = laboratory, laboratory.config, laboratory.batch
        self.window, self.steps = window, window[: self.config.window]
        self.behind = [*history, *between][::-1]
        self.between, self.selection, self.adjacent = len(between), selection, adjacent
        self.forwards = 0
        self.alone = np.empty(0, np.int64)  # convicted individually by loss
        self.shared = 0.0  # z by which the current state puts ordinary samples above their recorded losses
        self.together: float | None = None  # gradient of a batch of the guilty, relative to an ordinary one's
        self.pull = math.inf  # gradient norm above which a batch ahead continues the region
        self.positions = np.concatenate([t.positions for t in self.steps])
        self.corpora = laboratory.corpora(self.positions)
        self.losses = self._losses(self.positions)
        self.known: Known = laboratory.known(history, self.corpora, cursor, selection)
        self.usual = groups.by_corpus(self.known.losses, self.known.corpora)
        self.known_z = groups.deviations(self.known.losses, self.known.corpora)
        self.scale = Scale(self._harmless())

    # Measuring

    def _losses(self, positions: Int64s) -> Floats:
        self.forwards += math.ceil(positions.size / self.size)
        return self.lab.losses(positions)

    def norm(self, positions: Int64s) -> float:
        """Norm of a batch's gradient."""
        self.forwards += region.FORWARD
        return self.lab.gradient_norm(positions)

    def _harmless(self) -> ScoredSamples:
        """Samples for calibration: the latest, except those right before the window, as a region may begin before it is
        noticed."""
        chosen = list[Int64s]()
        for corpus in np.unique(self.corpora).tolist():
            mine = np.flatnonzero((self.known.corpora == corpus) & np.isfinite(self.known_z))
            late = min(self.config.behind * self.size, max(0, mine.size - 4 * groups.ENOUGH))
            chosen.append(mine[: mine.size - late][-CALIBRATING:])
        at = np.concatenate([np.empty(0, np.int64), *chosen])
        return self.lab.samples(self.known.positions[at], self.known_z[at])

    def _z(self, positions: Int64s, losses: Floats) -> Floats:
        return groups.far_out(losses, self.lab.corpora(positions), self.usual)

    # Judging

    def judge(self, shift: float = 0.0) -> tuple[Conviction, Floats]:
        """The conviction of the window, and z. shift: of harmless samples on the same state from what was recorded, in
        z, beyond what they share with all of the window."""
        c, significance = self.config, self.config.significance
        if self.adjacent:
            significance = c.adjacent_significance
        losses = groups.lowered(self.losses, self.corpora, self.usual, self.shared)
        z, p = groups.compare(losses, self.corpora, self.known.losses, self.known.corpora)
        if shift > 0:
            z = z - shift
            p = np.where(z > c.threshold, p, 1.0)
        alone = groups.guilty_by_loss(z, p, c.threshold)
        self.alone = self.positions[alone]
        error = groups.shared_error({k: u for k, u in self.usual.items() if (self.corpora == k).any()})
        suspects = self.lab.samples(self.positions, z)
        return scores.judge(self.scale, suspects, alone, error, significance, c.innocent), z

    def conclude(self) -> Conclusion:
        """Run all experiments."""
        judged, z = self.judge()
        if judged.guilty.any() and (shared := groups.shared_shift(z, judged.guilty)) > 0:
            self.shared = shared
            judged, z = self.judge()
        guilty, inferred, found = self.positions[judged.guilty], np.empty(0, np.int64), None
        norms, by_gradient = dict[int, float](), not guilty.size
        gradients = self.lab.batch_norms(self.steps, self.known)
        if gradients is not None and gradients.extraordinary.any():
            self.pull = PULL * gradients.whole
        crowd = self._alike(judged.guilty, gradients)
        if crowd is not None:
            judged, by_gradient = crowd, True
            guilty = self.positions[judged.guilty]
        elif by_gradient and gradients is not None:
            guilty, norms = self._by_gradient(z, gradients)
            if guilty.size:
                judged = self._accuse(np.isin(self.positions, guilty))
        measured = dict(
            zip(self.positions.tolist(), zip(self.losses.tolist(), z.tolist(), strict=True), strict=True)
        )
        if guilty.size >= (FEW if by_gradient else 1) and judged.score is not None and self.config.region:
            judged, guilty, growth = self._grown(judged, guilty, by_gradient)
            if growth is not None and growth.ahead.endless:
                # Equally bad everywhere: the state is to blame. Unless some are worse than all of these.
                if not by_gradient:
                    judged, _ = self.judge(growth.level())
                    guilty = self.positions[judged.guilty]
                if crowd is not None:
                    guilty = np.empty(0, np.int64)  # similar samples are everywhere, also before
            elif growth is not None and guilty.size:
                guilty, inferred, found = growth.named(guilty)
                measured |= growth.measured
        if guilty.size and not by_gradient:
            worst = sorted(guilty.tolist(), key=lambda p: -measured[p][1] if p in measured else 0.0)
            for p in worst[: min(SHOWN, self.config.gradients)]:
                norms[p] = self.lab.gradient_norm(np.array([p]))
        norms = {p: norm for p, norm in norms.items() if not math.isnan(norm)}
        suspects = [Suspect(p, loss, deviation, norms.get(p)) for p, (loss, deviation) in measured.items()]
        return self._told(suspects, guilty, inferred, found, judged)

    def _grown(
        self, judged: Conviction, guilty: Int64s, by_gradient: bool
    ) -> tuple[Conviction, Int64s, Growth | None]:
        """How far the guilty extend, None if unknown; and which they are.

        If clean samples ahead lie higher, too, the state is to blame: results so far, including the region and its
        ends, are discarded, and all is judged again, once.
        """
        growth = Growth(self, judged, guilty, self.forwards)
        shift = growth.shift()
        if by_gradient or not shift > 0:
            return judged, guilty, growth
        self.shared += shift
        judged, _ = self.judge()
        guilty = self.positions[judged.guilty]
        if judged.score is None:
            return judged, guilty, None
        again = Growth(self, judged, guilty, growth.begin)
        return judged, guilty, None if again.shift() > 0 else again

    def _accuse(self, guilty: Bools) -> Conviction:
        """Samples convicted by their gradient, to search for similar ones."""
        _, z = self.judge()
        score = Score(self.scale, self.lab.samples(self.positions[guilty], z[guilty]))
        if not score.harmless.size:
            return Conviction(guilty, 1.0, None, np.inf)
        return Conviction(guilty, 1.0, score, float(np.quantile(score.harmless, 1 - region.STRAY)))

    def _alike(self, guilty: Bools, gradients: GradientNorms | None) -> Conviction | None:
        """Samples that are bad together: a batch has an extraordinary gradient, and many of its samples are alike. None
        if that convicts none beyond `guilty`, those convicted by loss."""
        if gradients is None or not gradients.extraordinary.any():
            return None
        batches = [
            t.positions for t, bad in zip(gradients.batches, gradients.extraordinary, strict=True) if bad
        ]
        accused = guilty if guilty.sum() >= groups.CROWD else np.isin(self.positions, np.concatenate(batches))
        suspects = self.lab.samples(self.positions, np.zeros(self.positions.size))
        judged = scores.judge_alike(self.scale, suspects, accused, self.config.innocent)
        everyone = judged.guilty | guilty
        # Losses are the better evidence where both tell.
        if judged.score is None or everyone.sum() == guilty.sum():
            return None
        self.together = float(np.nanmax(gradients.norms)) / gradients.whole
        return judged._replace(guilty=everyone)

    def _by_gradient(self, z: Floats, gradients: GradientNorms) -> tuple[Int64s, dict[int, float]]:
        guilty, norm = self.lab.by_gradient(gradients, self.known)
        norms = dict.fromkeys(guilty.tolist(), norm)
        if guilty.size:
            # The gradient convicts one sample, the loss those like it.
            like = attribution.LIKE * float(np.nanmin(z[np.isin(self.positions, guilty)], initial=np.inf))
            if math.isfinite(like) and like > attribution.TELLING:
                losses = groups.lowered(self.losses, self.corpora, self.usual, self.shared)
                _, p = groups.compare(losses, self.corpora, self.known.losses, self.known.corpora)
                bad = groups.guilty_by_loss(z, p, min(like, self.config.threshold))
                guilty = np.union1d(guilty, self.positions[bad])
        return guilty, norms

    def _told(
        self,
        suspects: list[Suspect],
        guilty: Int64s,
        inferred: Int64s,
        found: Region | None,
        judged: Conviction,
    ) -> Conclusion:
        steps, window = self.steps, self.window
        examined = (
            f"the first {len(steps)} of {len(window)}" if len(steps) < len(window) else f"the {len(steps)}"
        )
        kinds = int(np.isin(self.known.corpora, self.corpora).sum())
        told = attribution.conclude(
            suspects, guilty.tolist(), kinds,
            f"{examined} steps since the onset", judged.p, inferred.tolist(), found,
            self.together,
        )  # fmt: skip
        expected = np.full(self.losses.shape, np.nan)
        for corpus, usual in self.usual.items():
            # A shift shared by all is due to the state, and no evidence for a sample.
            expected[self.corpora == corpus] = usual.centre + self.shared * usual.scale
        tripped = np.concatenate([t.losses for t in steps])
        told = replace(told, alone=np.intersect1d(guilty, self.alone).tolist())
        return attribution.weighed(told, judged.p, attribution.odds_of_data(self.losses, tripped, expected))
