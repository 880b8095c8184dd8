"""One search for the samples of a trickle: few among many, since its onset and ahead. Collective.

Losses convict the first ones: far out when they were met, and half as far still. Who is like these by its tokens joins
them (scores.py): in heavy-tailed text few of a kind are far out by themselves, and the later ones are easier, as the
kind is learnt from the first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megastable.data.skips import Selection
from megastable.evidence import Laboratory
from megastable.stability import groups, samples, scores
from megastable.stability.actions import Cause
from megastable.stability.attribution import Conclusion
from megastable.stability.samples import Seen, Waiting
from megastable.stability.scores import Samples, Scale
from megastable.stability.settings import StabilityConfig

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

CALIBRATING = 1024  # harmless samples whose tokens are read
READ = 4096  # of the samples since the onset, the latest: so many are read
CLEAN, GAPS = (
    4,
    3,
)  # batches ahead without a bad sample until it is over: so many, or so many times the mean distance


class Trickle:
    """Of `met`, the samples since the onset of `case`. usual: harmless ones of before; cursor: where the run goes on.
    looked: batches ahead that were measured."""

    def __init__(
        self, laboratory: Laboratory, config: StabilityConfig, met: Seen, usual: Seen, case: Waiting, cursor: int,
        selection: Selection,
    ) -> None:  # fmt: skip
        self.lab, self.config, self.met, self.usual, self.case = laboratory, config, met, usual, case
        self.cursor, self.selection, self.looked = cursor, selection, 0
        self.threshold, self.innocent = config.attribution.threshold, config.attribution.innocent

    def conclude(self, budget: int) -> Conclusion:
        """Who is guilty. budget: batches ahead that may be measured."""
        suspected = samples.suspects(self.met, self.usual, self.threshold)
        again = self.met.of(suspected[: self.config.samples.measured])
        again = again._replace(losses=self.lab.losses(again.positions))
        first = again.of(samples.still_bad(again, self.usual, self.threshold))
        if not first.positions.size:
            return _nobody(
                f"{suspected.size} of {self.met.positions.size} samples were far out when they were trained on, none "
                "of them is by now"
            )
        latest = self.usual.of(np.arange(self.usual.positions.size)[-CALIBRATING:])
        z = groups.deviations(self.usual.losses, self.usual.corpora)[-CALIBRATING:]
        scale = Scale(self._samples(latest, z))
        read = np.arange(self.met.positions.size) >= self.met.positions.size - READ
        near = self.met.of(np.flatnonzero(read | np.isin(self.met.positions, first.positions)))
        texts = self._samples(near, self._z(near))
        met = scores.joined(scale, texts, np.isin(near.positions, first.positions), self.innocent)
        ahead, bad, by_loss = self._ahead(scale, texts.of(met), budget)
        if by_loss > samples.HALF * ahead.positions.size:
            return _nobody(
                f"{by_loss} of the {ahead.positions.size} samples that come next are as bad: that is no matter of "
                "single samples, but of the state"
            )
        guilty = near.of(np.flatnonzero(met))
        everyone = guilty.with_(ahead.of(np.flatnonzero(bad)))
        worst = samples.numbers(everyone, self.usual)
        like = guilty.positions.size - first.positions.size
        others = f", {like} are like them," if like else ""
        reason = (
            f"{first.positions.size} of {self.met.positions.size} samples since step {self.case.first} are bad on the "
            f"present state, too{others} and {bad.sum()} of the {ahead.positions.size} that come next: the worst has a "
            f"loss of {worst[0].loss:.2f} ({worst[0].z:.0f} robust deviations above "
            f"{np.isin(self.usual.corpora, everyone.corpora).sum()} harmless ones)"
        )
        return Conclusion(Cause.DATA, sorted(everyone.positions.tolist()), worst, reason)

    def _ahead(self, scale: Scale, convicted: Samples, budget: int) -> tuple[Seen, Bools, int]:
        """The samples that come next until no more are bad; which of them are; and how many of these by their loss."""
        ahead, bad = self.met.of(np.empty(0, np.int64)), np.empty(0, dtype=bool)
        alone, clean, cursor = bad, 0, self.cursor
        gap = (self.case.last - self.case.first + 1) / max(1, convicted.z.size)
        while self.looked < budget and clean < max(CLEAN, GAPS * gap):
            self.looked += 1
            positions, cursor = self.selection.next_kept(cursor, self.lab.batch)
            batch = Seen(positions, self.lab.losses(positions), self.lab.corpora(positions))
            ahead = ahead.with_(batch)
            # All that were met are judged together.
            found = samples.suspects(self.met.with_(ahead), self.usual, self.threshold)
            alone = np.isin(np.arange(ahead.positions.size), found - self.met.positions.size)
            like = scores.like(scale, self._samples(batch, self._z(batch)), convicted, self.innocent)
            bad = alone | np.append(bad, like)
            clean = 0 if bad[-positions.size :].any() else clean + 1
        return ahead, bad, int(alone.sum())

    def _samples(self, seen: Seen, z: npt.NDArray[np.float64]) -> Samples:
        return Samples(self.lab.tokens(seen.positions), np.nan_to_num(z, nan=0.0), seen.corpora)

    def _z(self, seen: Seen) -> npt.NDArray[np.float64]:
        usual = self.usual
        return groups.compare(seen.losses, seen.corpora, usual.losses, usual.corpora)[0]


def _nobody(reason: str) -> Conclusion:
    return Conclusion(Cause.STATE, [], [], reason)
