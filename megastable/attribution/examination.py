"""Searches for the bad samples of an incident, up to the ends of a bad region. Collective.

Measures with sample_replay.py; individuals and crowds are told by groups.py and scores.py. The batches after the window
are measured one by one until the region is over.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.attribution import groups, scores
from megastable.attribution.conclusion import Conclusion, Region, Suspect, blame_samples, blame_state
from megastable.attribution.sample_replay import Known, Laboratory, Trained
from megastable.attribution.scores import STRAY, Judged, Scale, ScoredSamples
from megastable.base.errors import DataError
from megastable.base.text import plural
from megastable.data.skips import Selection, Skips

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

SHOWN = 2  # bad samples whose own gradients are measured, as evidence
CALIBRATING = 1024  # harmless samples per corpus whose tokens are read
CLEAN = 3  # batches in a row that end a region
FARTHEST = 256  # batches: what goes on for longer is a new phase
FORWARD = 3  # forward passes in the time of a step


class Followed(NamedTuple):
    """bad: positions; region: their extent; measured: the samples ahead; beyond: z of the last batches ahead."""

    bad: Int64s
    region: Region | None = None
    measured: tuple[Suspect, ...] = ()
    beyond: Floats = np.empty(0)


def examine(
    laboratory: Laboratory,
    window: Sequence[Trained],
    history: Sequence[Trained],
    cursor: int,
    selection: Skips | Selection,
    adjacent: bool = False,
) -> Conclusion:
    """Find the bad samples of `window` (the steps since the onset), and of what follows it; led by rank 0.

    Args:
        history: steps that led to the current state without trouble.
        cursor: the position of the state.
        selection: what is skipped already.
        adjacent: the window lies next to what a recent incident skipped.

    Raises:
        DataError: as `Laboratory.losses`.
    """
    return laboratory.led(
        lambda lab: Examination(lab, window, history, cursor, selection, adjacent).conclude()
    )


class Examination:
    """For `window`, the steps since the onset; see `examine`."""

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
        self.alone = np.empty(0, np.int64)  # bad by their own loss
        self.shared = 0.0  # z by which the current state puts ordinary samples above their recorded losses
        self.endless: int | None = None  # batches after the window for which a region went on without an end
        self.together: float | None = None  # gradient of a batch of the bad, relative to an ordinary one's
        self.positions = np.concatenate([t.positions for t in self.steps])
        self.corpora = laboratory.corpora(self.positions)
        self.losses = self.lab.losses(self.positions)
        self.known: Known = laboratory.known(history, self.corpora, cursor, selection)
        self.usual = groups.UsualLosses(self.known.losses, self.known.corpora)
        self.scale = Scale(self._harmless())

    def _harmless(self) -> ScoredSamples:
        """Samples for calibration: the latest, except those right before the window, as a region may begin before it is
        noticed."""
        chosen = list[Int64s]()
        for corpus in np.unique(self.corpora).tolist():
            mine = np.flatnonzero((self.known.corpora == corpus) & np.isfinite(self.usual.z))
            late = min(self.config.behind * self.size, max(0, mine.size - 4 * groups.ENOUGH))
            chosen.append(mine[: mine.size - late][-CALIBRATING:])
        at = np.concatenate([np.empty(0, np.int64), *chosen])
        return self.lab.samples(self.known.positions[at], self.usual.z[at])

    def judge(self) -> tuple[Judged, Floats]:
        """The bad samples of the window, and z."""
        c = self.config
        z, p = self.usual.compare(self.losses, self.corpora, self.shared)
        alone = groups.bad_by_loss(z, p, c.threshold)
        self.alone = self.positions[alone]
        significance = c.adjacent_significance if self.adjacent else c.significance
        suspects, error = self.lab.samples(self.positions, z), self.usual.error(self.corpora)
        return scores.judge(self.scale, suspects, alone, error, significance, c.innocent), z

    def conclude(self) -> Conclusion:
        """Run all experiments."""
        judged, z = self.judge()
        if judged.bad.any() and (shared := groups.shared_shift(z, judged.bad)) > 0:
            self.shared = shared
            judged, z = self.judge()
        crowd = self._judge_alike(judged.bad)
        judged = crowd or judged
        followed = self._follow(judged)
        if crowd is None and (shift := self._shift_ahead(followed.beyond)) > 0:
            # What lies ahead is high as well: the state is to blame, except for samples that are worse than that.
            self.shared += shift
            judged, z = self.judge()
            followed = self._follow(judged)
        every = [*_suspects(self.positions, self.losses, z), *followed.measured]
        measured = {suspect.position: suspect for suspect in every}
        if crowd is None:
            worst = sorted(followed.bad.tolist(), key=lambda position: -measured[position].z)
            for position in worst[: min(SHOWN, self.config.gradients)]:
                norm = self.lab.gradient_norm(np.array([position]))
                if not math.isnan(norm):
                    measured[position] = replace(measured[position], gradient_norm=norm)
        suspects = list(measured.values())
        if not followed.bad.size:
            part = f"first {len(self.steps)} of " if len(self.steps) < len(self.window) else ""
            steps = f"the {part}{len(self.window)} steps since the onset"
            return blame_state(suspects, steps, self.endless)
        kinds = int(np.isin(self.known.corpora, self.corpora).sum())
        found = blame_samples(
            suspects, followed.bad.tolist(), kinds, judged.p, followed.region, self.together
        )
        return replace(found, alone=np.intersect1d(followed.bad, self.alone).tolist())

    def _follow(self, judged: Judged) -> Followed:
        """Measure the batches that follow the window, one after another until the region of its bad samples is over.
        None are bad if it does not end: what goes on is no region, but how things are from here on."""
        bad = self.positions[judged.bad]
        if not bad.size or judged.score is None or not self.config.region:
            return Followed(bad)
        found, probes, measured = [bad], list[tuple[int, int, int]](), list[Suspect]()
        beyond = deque[Floats](maxlen=CLEAN)
        cursor, clean = int(max(t.positions.max() for t in self.steps)) + 1, 0
        most, strays = min(FARTHEST, FORWARD * self.config.region), most_strays(self.size)
        while clean < CLEAN and len(probes) < most:
            try:
                ahead, cursor = self.selection.next_kept(cursor, self.size)
            except DataError:
                break  # all that is left is skipped
            losses = self.lab.losses(ahead)
            z = self.usual.far_out(losses, self.lab.corpora(ahead)) - self.shared
            named = ahead[judged.score.of(self.lab.samples(ahead, z)) >= judged.bar]
            clean = clean + 1 if named.size <= strays else 0
            found.append(named)
            beyond.append(z)
            probes.append((int(ahead[0]), ahead.size, int(named.size)))
            measured += _suspects(ahead, losses, z)
        last = np.concatenate([np.empty(0), *beyond])
        self.endless = len(probes) if clean < CLEAN else None
        if self.endless is not None:
            return Followed(np.empty(0, np.int64), None, tuple(measured), last)
        reach = len(probes) - clean
        # The first clean batch may begin with the region's last sample; in the others single samples are strays.
        every = np.unique(np.concatenate(found[: reach + 2]))
        how = "nothing is bad beyond the window"
        if reach:
            how = f"it goes on for {reach} {'batch' if reach == 1 else 'batches'}"
        how += f": the next {clean} batches have at most {plural(strays, 'such sample')} each"
        steps = round(len(probes) / FORWARD, 1)
        region = Region(int(every[0]), int(every[-1]) + 1, how, len(measured), steps, tuple(probes))
        return Followed(every, region, tuple(measured), last)

    def _shift_ahead(self, z: Floats) -> float:
        """How far the last samples ahead lie above what was recorded, in z, if significantly: 0 otherwise. They are the
        better reference: measured on the same state, and none was trained on."""
        z = z[np.isfinite(z)]
        if z.size < groups.ENOUGH // 2:
            return 0.0
        middle, width = groups.robust(z)
        noise = math.hypot(self.usual.error(), groups.MEDIAN_ERROR * width / math.sqrt(z.size))
        return middle if middle > 3 * noise else 0.0

    def _judge_alike(self, bad: Bools) -> Judged | None:
        """Samples that are bad together: a batch has an extraordinary gradient, and many of its samples are alike. None
        if that names none beyond `bad`, those that are bad by loss."""
        far = self.lab.find_extraordinary(self.steps, self.known)
        if far is None:
            return None
        suspected = bad if bad.sum() >= groups.CROWD else np.isin(self.positions, far.positions)
        suspects = self.lab.samples(self.positions, np.zeros(self.positions.size))
        judged = scores.judge_alike(self.scale, suspects, suspected, self.config.innocent)
        everyone = judged.bad | bad
        # Losses are the better evidence where both tell.
        if judged.score is None or everyone.sum() == bad.sum():
            return None
        self.together = far.ratio
        return judged._replace(bad=everyone)


def most_strays(size: int) -> int:
    """Most bad samples of a clean batch: one, and of a large one what harmless samples bring, two deviations added."""
    usual = STRAY * size
    return max(1, int(usual + 2 * math.sqrt(usual)))


def _suspects(positions: Int64s, losses: Floats, z: Floats) -> list[Suspect]:
    return [Suspect(*row) for row in zip(positions.tolist(), losses.tolist(), z.tolist(), strict=True)]
