"""Searches for the samples of a trickle: a few bad ones among many, since its onset and ahead. Collective.

Losses convict the first ones: far out when trained on, and still half as far. Samples with similar tokens join them
(scores.py): in heavy-tailed text few of a kind are far out individually, and later ones are easier, as the kind is
learnt from the first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.config.stability import StabilityConfig
from megastable.data.skips import Selection
from megastable.recovery.sample_replay import Laboratory
from megastable.stability import groups, scores, suspects
from megastable.stability.actions import Cause
from megastable.stability.attribution import Conclusion
from megastable.stability.sample_history import Waiting
from megastable.stability.scores import LikenessKind, Scale, ScoredSamples
from megastable.stability.suspects import Seen

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

CALIBRATING = 2048  # harmless samples whose tokens are read: half of them calibrate chance likeness
READ = 4096  # the latest samples since the onset: most that are read
# Clean batches ahead that end a trickle: this many, or this multiple of the mean distance.
CLEAN, GAPS = 4, 3
HARDER = 0.5  # least sigma that a new kind lies above its corpus: all new text is a little harder


class Ahead(NamedTuple):
    """The next samples. alone: which are bad by their own loss; like: which are of the kind; [n]."""

    seen: Seen
    texts: ScoredSamples
    alone: Bools
    like: Bools


class Trickle:
    """Searches `met`, the samples since the onset of `case`. usual: earlier harmless ones; cursor: where the run
    continues. looked: batches ahead that were measured."""

    def __init__(
        self, laboratory: Laboratory, config: StabilityConfig, met: Seen, usual: Seen, case: Waiting, cursor: int,
        selection: Selection,
    ) -> None:  # fmt: skip
        self.lab, self.config, self.met, self.usual, self.case = laboratory, config, met, usual, case
        self.cursor, self.selection, self.looked = cursor, selection, 0
        self.threshold, self.innocent = config.attribution.threshold, config.attribution.innocent
        self.known = groups.by_corpus(usual.losses, usual.corpora)

    def conclude(self, budget: int) -> Conclusion:
        """Find the guilty samples. budget: batches ahead that may be measured."""
        if self.case.kind == "kind":
            return self._told(self.met.of(np.empty(0, np.int64)), budget)
        suspected = suspects.suspects(self.met, self.usual, self.threshold)
        again = self.met.of(suspected[: self.config.samples.measured])
        again = again._replace(losses=self.lab.losses(again.positions))
        first = again.of(suspects.still_bad(again, self.usual, self.threshold))
        if not first.positions.size:
            return _nobody(
                f"{suspected.size} of {self.met.positions.size} samples were far out when they were trained on, none "
                "of them is by now"
            )
        return self._told(first, budget)

    def _told(self, first: Seen, budget: int) -> Conclusion:
        """first: samples convicted by loss; if none, the case names the suspects of a kind."""
        latest = self.usual.of(np.arange(self.usual.positions.size)[-CALIBRATING:])
        z = groups.deviations(self.usual.losses, self.usual.corpora)[-CALIBRATING:]
        scale = Scale(self.lab.samples(latest.positions, z))
        read = np.arange(self.met.positions.size) >= self.met.positions.size - READ
        chosen = first.positions if first.positions.size else np.array(self.case.positions, np.int64)
        near = self.met.of(np.flatnonzero(read | np.isin(self.met.positions, chosen)))
        texts = self._texts(near)
        by_loss = np.isin(near.positions, first.positions)
        accused, alarmed = np.isin(near.positions, chosen), bool(by_loss.any())
        met, kind = scores.joined(scale, texts, by_loss, self.innocent, accused)
        if not alarmed and met.sum() < groups.CROWD:
            return _nobody(f"only {met.sum()} samples can be told to be of one kind")
        ahead = self._ahead(kind, int(met.sum()), budget)
        if not alarmed and self.looked < CLEAN:
            return _nobody(f"{met.sum()} samples are of one kind, but the budget for looking ahead is spent")
        count, like = ahead.like.size, ahead.like
        if ahead.alone.sum() > suspects.HALF * count:
            return _nobody(
                f"{ahead.alone.sum()} of the {count} samples that come next are as bad: that is no matter of "
                "single samples, but of the state"
            )
        # A few are always far out: without an alarm that is no evidence.
        alone = ahead.alone & (like | alarmed)
        others = texts.of(met & ~by_loss).with_(ahead.texts.of(like & ~alone))
        # What is everywhere ahead is no trickle; and likeness to the guilty alone is no guilt without a worse loss.
        error, significance = groups.shared_error(self.known), self.config.attribution.significance
        worse = scores.worse(scale, others, significance, error)
        if not alarmed:
            worse = worse and float(np.median(others.z)) >= HARDER
        if like.sum() > suspects.HALF * count or not worse:
            if not alarmed:
                return _nobody(
                    f"{met.sum()} samples are of one kind, and {like.sum()} of the {count} that come next, but no "
                    "worse than others, or that is how most are from here on"
                )
            met, like = by_loss, np.zeros_like(like)
        met = by_loss | (met & scores.hard(scale, texts))
        bad = alone | (like & scores.hard(scale, ahead.texts))
        guilty = near.of(np.flatnonzero(met))
        everyone = guilty.with_(ahead.seen.of(np.flatnonzero(bad)))
        if not everyone.positions.size:
            return _nobody(f"of {accused.sum()} samples of one kind none is harder than usual")
        worst = suspects.numbers(everyone, self.usual)
        told = (
            f"{guilty.positions.size} of {self.met.positions.size} samples since step {self.case.first} are of a kind "
            "that was not there before and is worse as a group than harmless ones"
        )
        if alarmed:
            more = guilty.positions.size - first.positions.size
            joined = f", {more} are like them," if more else ""
            told = (
                f"{first.positions.size} of {self.met.positions.size} samples since step {self.case.first} are bad on "
                f"the present state, too{joined}"
            )
        reason = (
            f"{told} and {bad.sum()} of the {count} that come next: the worst has a loss of {worst[0].loss:.2f} "
            f"({worst[0].z:.0f} robust deviations above {np.isin(self.usual.corpora, everyone.corpora).sum()} harmless "
            "ones)"
        )
        return Conclusion(Cause.DATA, sorted(everyone.positions.tolist()), worst, reason)

    def _ahead(self, kind: LikenessKind, met: int, budget: int) -> Ahead:
        """Read ahead until no more samples are bad. met: number of bad ones since the onset."""
        nobody = self.met.of(np.empty(0, np.int64))
        ahead = Ahead(nobody, self._texts(nobody), np.empty(0, dtype=bool), np.empty(0, dtype=bool))
        clean, cursor = 0, self.cursor
        gap = (self.case.last - self.case.first + 1) / met
        while self.looked < budget and clean < max(CLEAN, GAPS * gap):
            self.looked += 1
            positions, cursor = self.selection.next_kept(cursor, self.lab.batch)
            batch = Seen(positions, self.lab.losses(positions), self.lab.corpora(positions))
            texts, seen = self._texts(batch), ahead.seen.with_(batch)
            # All that were met are judged together.
            found = suspects.suspects(self.met.with_(seen), self.usual, self.threshold)
            alone = np.isin(np.arange(seen.positions.size), found - self.met.positions.size)
            like = np.append(ahead.like, kind.members(texts))
            clean = 0 if (alone | like)[-positions.size :].any() else clean + 1
            ahead = Ahead(seen, ahead.texts.with_(texts), alone, like)
        return ahead

    def _texts(self, seen: Seen) -> ScoredSamples:
        return self.lab.samples(seen.positions, groups.far_out(seen.losses, seen.corpora, self.known))


def _nobody(reason: str) -> Conclusion:
    return Conclusion(Cause.STATE, [], [], reason)
