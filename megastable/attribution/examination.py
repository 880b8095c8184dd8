"""Searches for the bad samples of an incident, up to the ends of a bad region. Collective.

Measures with sample_replay.py; megastable_guard/scores.py tells individuals and crowds. The batches after the window
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

from megastable.attribution.sample_replay import Known, Laboratory, Trained
from megastable.base.errors import DataError
from megastable.base.text import count_noun
from megastable.data.skips import Selection, Skips
from megastable_guard import scores
from megastable_guard.conclusion import Conclusion, Region, Suspect, blame_samples, blame_state
from megastable_guard.scores import STRAY, Judged, Scale, ScoredSamples

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


def examine_window(
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
        DataError: as `Laboratory.measure_losses`.
    """
    return laboratory.run_on_rank0(
        lambda lab: Examination(lab, window, history, cursor, selection, adjacent).reach_conclusion()
    )


class Examination:
    """For `window`, the steps since the onset; see `examine_window`."""

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
        self.together: float | None = (
            None  # gradient of a batch of bad samples, relative to an ordinary one's
        )
        self.positions = np.concatenate([trained_step.positions for trained_step in self.steps])
        self.corpora = laboratory.find_corpora(self.positions)
        self.losses = self.lab.measure_losses(self.positions)
        self.known: Known = laboratory.find_harmless(history, self.corpora, cursor, selection)
        self.usual = scores.UsualLosses(self.known.losses, self.known.corpora)
        self.scale = Scale(self._harmless())

    def _harmless(self) -> ScoredSamples:
        """Samples for calibration: the latest, except those right before the window, as a region may begin before it is
        noticed."""
        chosen_parts = list[Int64s]()
        for corpus_index in np.unique(self.corpora).tolist():
            own_indices = np.flatnonzero((self.known.corpora == corpus_index) & np.isfinite(self.usual.z))
            late_count = min(self.config.behind * self.size, max(0, own_indices.size - 4 * scores.ENOUGH))
            chosen_parts.append(own_indices[: own_indices.size - late_count][-CALIBRATING:])
        chosen_indices = np.concatenate([np.empty(0, np.int64), *chosen_parts])
        return self.lab.prepare_samples(self.known.positions[chosen_indices], self.usual.z[chosen_indices])

    def judge_window(self) -> tuple[Judged, Floats]:
        """The bad samples of the window, and z."""
        c = self.config
        z, p_values = self.usual.compare_losses(self.losses, self.corpora, self.shared)
        bad_alone = scores.bad_by_loss(z, p_values, c.threshold)
        self.alone = self.positions[bad_alone]
        significance = c.adjacent_significance if self.adjacent else c.significance
        scored_suspects, shared_error = (
            self.lab.prepare_samples(self.positions, z),
            self.usual.shared_error(self.corpora),
        )
        return scores.judge_suspects(
            self.scale, scored_suspects, bad_alone, shared_error, significance, c.false_discovery_rate
        ), z

    def reach_conclusion(self) -> Conclusion:
        # Losses come first. The state that is measured on is older than the records, or a little damaged, so that it
        # may put every sample above its record. What the ordinary samples of the window share is no evidence against
        # any of them: if somebody is bad, the window is judged once more, beyond that common shift.
        judged, z = self.judge_window()
        if judged.bad.any() and (shared_shift := scores.shared_shift(z, judged.bad)) > 0:
            self.shared = shared_shift
            judged, z = self.judge_window()
        # Samples may also be bad together only, however easy each is: the gradients of one repeated sentence add up.
        alike_judgement = self._judge_alike(judged.bad)
        judged = alike_judgement or judged
        # The batches behind the window end the region. They are also the better reference, as they were measured on the
        # same state and nobody has trained on them.
        followed_region = self._follow(judged)
        if alike_judgement is None and (shift_ahead := self._shift_ahead(followed_region.beyond)) > 0:
            # What lies ahead is high as well: the state is to blame, except for samples that are worse than that.
            self.shared += shift_ahead
            judged, z = self.judge_window()
            followed_region = self._follow(judged)
        every_suspect = [*_suspects(self.positions, self.losses, z), *followed_region.measured]
        measured = {suspect.position: suspect for suspect in every_suspect}
        if alike_judgement is None:
            worst_positions = sorted(followed_region.bad.tolist(), key=lambda position: -measured[position].z)
            for position in worst_positions[: min(SHOWN, self.config.gradients)]:
                gradient_norm = self.lab.measure_gradient_norm(np.array([position]))
                if not math.isnan(gradient_norm):
                    measured[position] = replace(measured[position], gradient_norm=gradient_norm)
        all_suspects = list(measured.values())
        if not followed_region.bad.size:
            part_text = f"first {len(self.steps)} of " if len(self.steps) < len(self.window) else ""
            steps_text = f"the {part_text}{len(self.window)} steps since the onset"
            return blame_state(all_suspects, steps_text, self.endless)
        compared_count = int(np.isin(self.known.corpora, self.corpora).sum())
        blamed_samples = blame_samples(
            all_suspects,
            followed_region.bad.tolist(),
            compared_count,
            judged.p,
            followed_region.region,
            self.together,
        )
        return replace(blamed_samples, alone=np.intersect1d(followed_region.bad, self.alone).tolist())

    def _follow(self, judged: Judged) -> Followed:
        """Measure the batches that follow the window, one after another until the region of its bad samples is over.
        None are bad if it does not end: what goes on is no region, but how things are from here on."""
        bad = self.positions[judged.bad]
        if not bad.size or judged.score is None or not self.config.region:
            return Followed(bad)
        found_bad, probes, measured_suspects = [bad], list[tuple[int, int, int]](), list[Suspect]()
        last_scores = deque[Floats](maxlen=CLEAN)
        cursor, clean = int(max(trained_step.positions.max() for trained_step in self.steps)) + 1, 0
        most_batches, most_stray = min(FARTHEST, FORWARD * self.config.region), most_strays(self.size)
        while clean < CLEAN and len(probes) < most_batches:
            try:
                positions_ahead, cursor = self.selection.next_kept(cursor, self.size)
            except DataError:
                break  # all that is left is skipped
            losses_ahead = self.lab.measure_losses(positions_ahead)
            z = self.usual.far_out(losses_ahead, self.lab.find_corpora(positions_ahead)) - self.shared
            named_positions = positions_ahead[
                judged.score.score_samples(self.lab.prepare_samples(positions_ahead, z)) >= judged.bar
            ]
            clean = clean + 1 if named_positions.size <= most_stray else 0
            found_bad.append(named_positions)
            last_scores.append(z)
            probes.append((int(positions_ahead[0]), positions_ahead.size, int(named_positions.size)))
            measured_suspects += _suspects(positions_ahead, losses_ahead, z)
        last_z = np.concatenate([np.empty(0), *last_scores])
        self.endless = len(probes) if clean < CLEAN else None
        if self.endless is not None:
            return Followed(np.empty(0, np.int64), None, tuple(measured_suspects), last_z)
        region_batches = len(probes) - clean
        # The first clean batch may begin with the region's last sample; in the others single samples are strays.
        all_bad = np.unique(np.concatenate(found_bad[: region_batches + 2]))
        how_ended = "nothing is bad beyond the window"
        if region_batches:
            how_ended = f"it goes on for {region_batches} {'batch' if region_batches == 1 else 'batches'}"
        how_ended += f": the next {clean} batches have at most {count_noun(most_stray, 'such sample')} each"
        steps = round(len(probes) / FORWARD, 1)
        region = Region(
            int(all_bad[0]), int(all_bad[-1]) + 1, how_ended, len(measured_suspects), steps, tuple(probes)
        )
        return Followed(all_bad, region, tuple(measured_suspects), last_z)

    def _shift_ahead(self, z: Floats) -> float:
        """How far the last samples ahead lie above what was recorded, in z, if significantly: 0 otherwise. They are the
        better reference: measured on the same state, and none was trained on."""
        z = z[np.isfinite(z)]
        if z.size < scores.ENOUGH // 2:
            return 0.0
        median_z, z_scale = scores.robust_scale(z)
        standard_error = math.hypot(
            self.usual.shared_error(), scores.MEDIAN_ERROR * z_scale / math.sqrt(z.size)
        )
        return median_z if median_z > 3 * standard_error else 0.0

    def _judge_alike(self, bad: Bools) -> Judged | None:
        """Samples that are bad together: a batch has an extraordinary gradient, and many of its samples are alike. None
        if that names none beyond `bad`, those that are bad by loss."""
        extraordinary_batches = self.lab.find_extraordinary(self.steps, self.known)
        if extraordinary_batches is None:
            return None
        are_suspected = (
            bad if bad.sum() >= scores.CROWD else np.isin(self.positions, extraordinary_batches.positions)
        )
        scored_suspects = self.lab.prepare_samples(self.positions, np.zeros(self.positions.size))
        window_judgement = scores.judge_alike(
            self.scale, scored_suspects, are_suspected, self.config.false_discovery_rate
        )
        all_bad = window_judgement.bad | bad
        # Losses are the better evidence where both tell.
        if window_judgement.score is None or all_bad.sum() == bad.sum():
            return None
        self.together = extraordinary_batches.ratio
        return window_judgement._replace(bad=all_bad)


def most_strays(size: int) -> int:
    """Most bad samples of a clean batch: one, and of a large one what harmless samples bring, two deviations added."""
    usual_strays = STRAY * size
    return max(1, int(usual_strays + 2 * math.sqrt(usual_strays)))


def _suspects(positions: Int64s, losses: Floats, z: Floats) -> list[Suspect]:
    return [
        Suspect(*suspect_fields)
        for suspect_fields in zip(positions.tolist(), losses.tolist(), z.tolist(), strict=True)
    ]
