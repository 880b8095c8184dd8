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
from megastable.stability.scores import Kind, Samples, Scale
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
        by_loss = np.isin(near.positions, first.positions)
        met, kind = scores.joined(scale, texts, by_loss, self.innocent)
        ahead, alone, like = self._ahead(scale, kind, int(met.sum()), budget)
        if alone.sum() > samples.HALF * ahead.positions.size:
            return _nobody(
                f"{alone.sum()} of the {ahead.positions.size} samples that come next are as bad: that is no matter of "
                "single samples, but of the state"
            )
        others = near.of(np.flatnonzero(met & ~by_loss)).with_(ahead.of(np.flatnonzero(like & ~alone)))
        # What is everywhere ahead is no trickle; and being like the guilty is no guilt without being worse than others.
        if like.sum() > samples.HALF * ahead.positions.size or not self._worse(scale, others):
            met, like = by_loss, np.zeros_like(like)
        met = by_loss | (met & scores.hard(scale, texts))
        like &= scores.hard(scale, self._samples(ahead, self._z(ahead))) if like.any() else False
        bad = alone | like
        guilty = near.of(np.flatnonzero(met))
        everyone = guilty.with_(ahead.of(np.flatnonzero(bad)))
        worst = samples.numbers(everyone, self.usual)
        more = guilty.positions.size - first.positions.size
        joined = f", {more} are like them," if more else ""
        reason = (
            f"{first.positions.size} of {self.met.positions.size} samples since step {self.case.first} are bad on the "
            f"present state, too{joined} and {bad.sum()} of the {ahead.positions.size} that come next: the worst has a "
            f"loss of {worst[0].loss:.2f} ({worst[0].z:.0f} robust deviations above "
            f"{np.isin(self.usual.corpora, everyone.corpora).sum()} harmless ones)"
        )
        return Conclusion(Cause.DATA, sorted(everyone.positions.tolist()), worst, reason)

    def _ahead(self, scale: Scale, kind: Kind, met: int, budget: int) -> tuple[Seen, Bools, Bools]:
        """The samples that come next until no more are bad; who of them is so by its loss, and who is of the kind. met:
        how many bad ones were, since the onset."""
        ahead, like = self.met.of(np.empty(0, np.int64)), np.empty(0, dtype=bool)
        alone, clean, cursor = like, 0, self.cursor
        gap = (self.case.last - self.case.first + 1) / met
        while self.looked < budget and clean < max(CLEAN, GAPS * gap):
            self.looked += 1
            positions, cursor = self.selection.next_kept(cursor, self.lab.batch)
            batch = Seen(positions, self.lab.losses(positions), self.lab.corpora(positions))
            ahead = ahead.with_(batch)
            # All that were met are judged together.
            found = samples.suspects(self.met.with_(ahead), self.usual, self.threshold)
            alone = np.isin(np.arange(ahead.positions.size), found - self.met.positions.size)
            like = np.append(like, kind.members(self._samples(batch, self._z(batch))))
            clean = 0 if (alone | like)[-positions.size :].any() else clean + 1
        return ahead, alone, like

    def _worse(self, scale: Scale, others: Seen) -> bool:
        usual = groups.by_corpus(self.usual.losses, self.usual.corpora)
        error = max((u.error for u in usual.values()), default=0.0)
        texts = self._samples(others, self._z(others))
        return scores.worse(scale, texts, self.config.attribution.significance, error)

    def _samples(self, seen: Seen, z: npt.NDArray[np.float64]) -> Samples:
        return Samples(self.lab.tokens(seen.positions), np.nan_to_num(z, nan=0.0), seen.corpora)

    def _z(self, seen: Seen) -> npt.NDArray[np.float64]:
        usual = self.usual
        return groups.compare(seen.losses, seen.corpora, usual.losses, usual.corpora)[0]


def _nobody(reason: str) -> Conclusion:
    return Conclusion(Cause.STATE, [], [], reason)
