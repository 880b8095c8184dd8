"""Searches for the guilty samples of an incident, up to the ends of a bad region. Collective.

Measures with sample_replay.py; stability/ decides: individuals and crowds (groups.py, scores.py). Extent of a bad
region: the batches after the window, one by one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.attribution import conclusion, groups, region, scores
from megastable.attribution.conclusion import Conclusion, Suspect
from megastable.attribution.region import Region
from megastable.attribution.scores import Conviction, Scale, Score, ScoredSamples
from megastable.base.errors import DataError
from megastable.base.text import plural
from megastable.data.skips import Selection, Skips

if TYPE_CHECKING:
    from megastable.attribution.sample_replay import GradientNorms, Known, Laboratory, Trained

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

SHOWN = 2  # guilty samples whose own gradients are measured, as evidence
CALIBRATING = 1024  # harmless samples per corpus whose tokens are read
FEW = 3  # samples that are found by their gradient, for which no region is searched: they are individuals


class Followed(NamedTuple):
    """guilty: positions; region: their extent; measured: loss and z of samples ahead, by position; beyond: z of the
    last batches ahead."""

    guilty: Int64s
    region: Region | None
    measured: dict[int, tuple[float, float]]
    beyond: Floats


NOBODY = Followed(np.empty(0, np.int64), None, {}, np.empty(0))


class Examination:
    """For `window`, the steps since the onset. history: applied steps up to the current state, before it. cursor: the
    current state's position; selection: what is skipped already."""

    def __init__(
        self,
        laboratory: Laboratory,
        window: Sequence[Trained],
        history: Sequence[Trained],
        cursor: int,
        selection: Skips | Selection,
        adjacent: bool,
    ) -> None:
        self.lab, self.config, self.size = laboratory, laboratory.config, laboratory.batch
        self.window, self.steps = window, window[: self.config.window]
        self.selection, self.adjacent = selection, adjacent
        self.alone = np.empty(0, np.int64)  # convicted individually by loss
        self.shared = 0.0  # z by which the current state puts ordinary samples above their recorded losses
        self.endless: int | None = (
            None  # batches after the window that a region was followed for without an end
        )
        self.together: float | None = None  # gradient of a batch of the guilty, relative to an ordinary one's
        self.positions = np.concatenate([t.positions for t in self.steps])
        self.corpora = laboratory.corpora(self.positions)
        self.losses = self.lab.losses(self.positions)
        self.known: Known = laboratory.known(history, self.corpora, cursor, selection)
        self.usual = groups.by_corpus(self.known.losses, self.known.corpora)
        self.known_z = groups.deviations(self.known.losses, self.known.corpora)
        self.scale = Scale(self._harmless())

    # Measuring

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

    def judge(self) -> tuple[Conviction, Floats]:
        """The conviction of the window, and z."""
        c, significance = self.config, self.config.significance
        if self.adjacent:
            significance = c.adjacent_significance
        losses = groups.lowered(self.losses, self.corpora, self.usual, self.shared)
        z, p = groups.compare(losses, self.corpora, self.known.losses, self.known.corpora)
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
        guilty, found = self.positions[judged.guilty], None
        norms, by_gradient = dict[int, float](), not guilty.size
        gradients = self.lab.batch_norms(self.steps, self.known)
        crowd = self._alike(judged.guilty, gradients)
        if crowd is not None:
            judged, by_gradient = crowd, True
            guilty = self.positions[judged.guilty]
        elif by_gradient and gradients is not None:
            guilty, norms = self._by_gradient(z, gradients)
            if guilty.size:
                judged = self._accuse(np.isin(self.positions, guilty))
        ahead: dict[int, tuple[float, float]] = {}
        if guilty.size >= (FEW if by_gradient else 1) and judged.score is not None and self.config.region:
            followed = self._follow(judged, guilty)
            if not by_gradient and (shift := self._shift(followed.beyond)) > 0:
                # What lies ahead is high as well: the state is to blame, except for samples that are worse than that.
                self.shared += shift
                judged, z = self.judge()
                guilty = self.positions[judged.guilty]
                followed = self._follow(judged, guilty) if judged.score is not None else NOBODY
            guilty, found = followed.guilty, followed.region
            ahead = followed.measured
        measured = _by_position(self.positions, self.losses, z) | ahead
        if guilty.size and not by_gradient:
            worst = sorted(guilty.tolist(), key=lambda p: -measured[p][1] if p in measured else 0.0)
            for p in worst[: min(SHOWN, self.config.gradients)]:
                norms[p] = self.lab.gradient_norm(np.array([p]))
        norms = {p: norm for p, norm in norms.items() if not math.isnan(norm)}
        suspects = [Suspect(p, loss, deviation, norms.get(p)) for p, (loss, deviation) in measured.items()]
        return self._told(suspects, guilty, found, judged)

    def _follow(self, judged: Conviction, guilty: Int64s) -> Followed:
        """Measure the batches that follow the window, one after another until the region is over. None are bad if it
        does not end: what goes on is no region, but how things are from here on."""
        assert judged.score is not None
        bad, probes, measured = [guilty], list[tuple[int, int, int]](), dict[int, tuple[float, float]]()
        beyond = deque[Floats](maxlen=region.CLEAN)
        cursor, clean = int(max(t.positions.max() for t in self.steps)) + 1, 0
        most, strays = min(region.FARTHEST, region.FORWARD * self.config.region), region.strays(self.size)
        while clean < region.CLEAN and len(probes) < most:
            try:
                ahead, cursor = self.selection.next_kept(cursor, self.size)
            except DataError:
                break  # all that is left is skipped
            losses = self.lab.losses(ahead)
            z = self._z(ahead, losses) - self.shared
            named = ahead[judged.score.of(self.lab.samples(ahead, z)) >= judged.bar]
            clean = clean + 1 if named.size <= strays else 0
            bad.append(named)
            beyond.append(z)
            probes.append((int(ahead[0]), ahead.size, int(named.size)))
            measured |= _by_position(ahead, losses, z)
        last = np.concatenate([np.empty(0), *beyond])
        self.endless = len(probes) if clean < region.CLEAN else None
        if self.endless is not None:
            return Followed(np.empty(0, np.int64), None, measured, last)
        reach = len(probes) - clean
        # The first clean batch may begin with the region's last sample; in the others single samples are strays.
        every = np.unique(np.concatenate(bad[: reach + 2]))
        how = "nothing is bad beyond the window"
        if reach:
            how = f"it goes on for {reach} {'batch' if reach == 1 else 'batches'}"
        how += f": the next {clean} batches have at most {plural(strays, 'such sample')} each"
        steps = round(len(probes) / region.FORWARD, 1)
        found = Region(int(every[0]), int(every[-1]) + 1, how, len(measured), steps, tuple(probes))
        return Followed(every, found, measured, last)

    def _shift(self, z: Floats) -> float:
        """How far the last samples ahead lie above what was recorded, in z, if significantly: 0 otherwise. They are the
        better reference: measured on the same state, and none was trained on."""
        z = z[np.isfinite(z)]
        if z.size < groups.ENOUGH // 2:
            return 0.0
        middle, width = groups.robust(z)
        noise = math.hypot(groups.shared_error(self.usual), groups.MEDIAN_ERROR * width / math.sqrt(z.size))
        return middle if middle > 3 * noise else 0.0

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
            like = conclusion.LIKE * float(np.nanmin(z[np.isin(self.positions, guilty)], initial=np.inf))
            if math.isfinite(like) and like > conclusion.TELLING:
                losses = groups.lowered(self.losses, self.corpora, self.usual, self.shared)
                _, p = groups.compare(losses, self.corpora, self.known.losses, self.known.corpora)
                bad = groups.guilty_by_loss(z, p, min(like, self.config.threshold))
                guilty = np.union1d(guilty, self.positions[bad])
        return guilty, norms

    def _told(
        self,
        suspects: list[Suspect],
        guilty: Int64s,
        found: Region | None,
        judged: Conviction,
    ) -> Conclusion:
        steps, window = self.steps, self.window
        examined = (
            f"the first {len(steps)} of {len(window)}" if len(steps) < len(window) else f"the {len(steps)}"
        )
        kinds = int(np.isin(self.known.corpora, self.corpora).sum())
        told = conclusion.conclude(
            suspects, guilty.tolist(), kinds,
            f"{examined} steps since the onset", judged.p, found,
            self.together, self.endless,
        )  # fmt: skip
        return replace(told, alone=np.intersect1d(guilty, self.alone).tolist())


def _by_position(positions: Int64s, losses: Floats, z: Floats) -> dict[int, tuple[float, float]]:
    return dict(zip(positions.tolist(), zip(losses.tolist(), z.tolist(), strict=True), strict=True))
