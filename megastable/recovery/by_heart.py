"""Finds samples that were memorized: repeated, very easy, not text. Collective.

Tables and lists have few different tokens, too. A spot (the fewest neighbours that can tell) belongs to the region if
far more of it are below the bar than of harmless samples: wrong for at most one spot in 100, one in 10,000 from 32
samples on. The region is grown ahead until it ends (region.py). Likeness picks the guilty samples where it can
(likeness.py): the first samples were not easy yet when trained on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.data.skips import Selection
from megastable.recovery.sample_replay import Laboratory, Trained
from megastable.stability import groups, region, suspects
from megastable.stability.actions import Cause
from megastable.stability.attribution import Conclusion
from megastable.stability.likeness import ENOUGH_ALIKE, Resemblance, Tokens, separation
from megastable.stability.region import Region
from megastable.stability.suspects import Seen

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

REFERENCE = 256  # harmless samples whose tokens are read
NOBODY = Conclusion(Cause.STATE, [], [], "the samples are easy, but do not repeat themselves")


class Looked(NamedTuple):
    """Samples, their tokens, and which of them are both easy and repetitive."""

    seen: Seen
    tokens: Tokens
    bad: Bools


class ByHeart:
    """Searches the samples since the onset. window: the steps; usual: harmless samples; cursor: where the run
    continues; budget: batches ahead that may be measured, `looked` of which were."""

    def __init__(
        self, laboratory: Laboratory, window: Sequence[Trained], met: Seen, usual: Seen, cursor: int,
        selection: Selection, budget: int, threshold: float,
    ) -> None:  # fmt: skip
        self.lab, self.window, self.met, self.usual = laboratory, window, met, usual
        self.selection, self.budget, self.threshold = selection, budget, threshold
        self.looked, self.size = 0, laboratory.batch
        self.ahead = dict[int, Looked]()
        self._line = np.empty(0, np.int64)  # upcoming positions, as far as requested
        self._cursor = cursor  # the position after those

    def conclude(self) -> Conclusion:
        if not self.met.positions.size or self.usual.positions.size < groups.ENOUGH:
            return NOBODY
        self.harmless = self.lab.tokens(self.usual.positions[-REFERENCE:])
        self.middle = float(np.median(self.usual.losses[-REFERENCE:]))
        met = self._look(self.met)
        here = self._in_spots(met)
        latest = np.isin(
            self.met.positions, np.concatenate([t.positions for t in self.window[-2:]])
        ).nonzero()[0]
        if (
            not latest.size  # all are skipped by now: none will come again
            or here.sum() < suspects.HALF * latest.size
            or not suspects.easy(self.met.of(latest), self.usual, self.threshold)
        ):
            return NOBODY
        side = region.grow(
            self._probe, self.size, suspects.HALF, self.budget, region.FARTHEST, suspects.FEW_AT_MOST
        )
        if side.endless:  # no end was found: only samples already met are convicted
            side = replace(side, reach=0)
        cut = None
        for enough in (ENOUGH_ALIKE, math.inf):
            if cut is None:
                self._look_inside(side.reach, enough - here.sum())
                inside = [met._replace(bad=here)]
                inside += [self.ahead[n] for n in sorted(self.ahead) if n < side.reach]
                cut = self._cut(inside)
        return self._told(inside, cut, side)

    # Measuring

    def _look(self, seen: Seen) -> Looked:
        tokens = self.lab.tokens(seen.positions)
        bad = suspects.repetitive(tokens, self.harmless) & (seen.losses < self.middle)
        return Looked(seen, tokens, bad)

    def _in_spots(self, met: Looked) -> Bools:
        """Which bad samples are in a spot with others."""
        spot = region.spot(self.size, suspects.HALF, suspects.FEW_AT_MOST)
        found, together = np.zeros_like(met.bad), spot.batches * self.size
        for first in range(0, met.bad.size, together):
            part = slice(first, first + together)
            found[part] = met.bad[part] & (met.bad[part].sum() >= spot.least)
        return found

    def _batch(self, number: int) -> Int64s:
        begin, end = number * self.size, (number + 1) * self.size
        if self._line.size < end:  # doubled each time: no position is requested twice
            count = max(end - self._line.size, self._line.size)
            more, self._cursor = self.selection.next_kept(self._cursor, count)
            self._line = np.concatenate([self._line, more])
        return self._line[begin:end]

    def _probe(self, number: int) -> int:
        """Number of bad samples in a batch ahead."""
        more = self._batch(number)
        self.looked += 1
        self.ahead[number] = self._look(Seen(more, self.lab.losses(more), self.lab.corpora(more)))
        return int(self.ahead[number].bad.sum())

    def _look_inside(self, reach: int, enough: float) -> None:
        """Measure evenly spread batches inside until `enough` bad samples are known or the budget is spent."""
        for number in region.spread(0, reach, reach):
            if (
                self.looked >= self.budget
                or sum(b.bad.sum() for n, b in self.ahead.items() if n < reach) >= enough
            ):
                break
            if number not in self.ahead:
                self._probe(number)

    # Judging

    def _cut(self, inside: list[Looked]) -> float | None:
        """The likeness from which a sample of the region is guilty, if likeness separates the two."""
        tokens = np.concatenate([b.tokens for b in inside])
        bad = np.concatenate([b.bad for b in inside])
        self.resemblance = Resemblance.to(tokens[bad], self.harmless[::2])
        every = self.resemblance.of(tokens, bad)
        return separation(every[bad], self.resemblance.of(self.harmless[1::2]), every)

    def _told(self, inside: list[Looked], cut: float | None, side: region.Side) -> Conclusion:
        every = [b.seen for b in inside]
        if cut is not None:
            bad = [self.resemblance.of(b.tokens, b.bad) >= cut for b in inside]
        else:
            bad = [b.bad for b in inside]
        guilty = self.met.of(np.empty(0, np.int64))
        for seen, chosen in zip(every, bad, strict=True):
            guilty = guilty.with_(seen.of(np.flatnonzero(chosen)))
        inferred = list[int]()
        for number in range(side.reach):
            if cut is not None and number not in self.ahead:
                more = self._batch(number)
                inferred += more[self.resemblance.of(self.lab.tokens(more)) >= cut].tolist()
        known = sorted({*guilty.positions.tolist(), *inferred})
        here = int(bad[0].sum())
        few = int(np.median(suspects.different(np.concatenate([b.tokens[b.bad] for b in inside]))))
        usual = int(np.median(suspects.different(self.harmless)))
        how = region.end_in_words(side, known[-1], f"{self.budget} batches (stability.samples.ahead)")
        how += region.inferred_in_words(len(inferred))
        reason = (
            f"{here} of {self.met.positions.size} samples of the {len(self.window)} steps since step "
            f"{self.window[0].step} repeat themselves and are soon learnt by heart, and {len(known) - here} of those "
            f"that come next: the median has {few} different tokens, {usual} are usual. {how[0].upper()}{how[1:]}"
        )
        probes = sorted((int(b.seen.positions[0]), b.bad.size, int(b.bad.sum())) for b in self.ahead.values())
        found = Region(
            known[0], known[-1] + 1, how, self.looked * self.size, round(self.looked / region.FORWARD, 1),
            side.found, tuple(probes),
        )  # fmt: skip
        shown = suspects.numbers(guilty, self.usual)[::-1]
        positions = sorted(guilty.positions.tolist())
        return Conclusion(Cause.DATA, positions, shown, reason, inferred, found)
