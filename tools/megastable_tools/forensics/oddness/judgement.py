"""Judge how unusual a piece is, by the tails of each feature among ordinary pieces, and label its kind.

A feature's tail is assumed exponential and extrapolated from its quantiles between 88 % and 97 %, which 1 or 2 % of
junk hardly move; `Feature.scale` is chosen so that real text has about such tails. The score is -log10 of the
share of ordinary pieces beyond, for the most significant feature, less log10 of the number of features. It
assumes that the far tail continues like the near one: a score of 3 is close to "one in a thousand", one of 10 means
"far beyond anything usual" and no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megastable_tools.forensics.oddness.features import FEATURES, NAMES, Features, Floats
from megastable_tools.forensics.oddness.kinds import KINDS, MADE_BY, looks_like

MOST = 30.0  # maximum score
CLASSES = np.array([8, 16, 32, 64, 128, 256])  # lower bounds of the length classes, in tokens
QUANTILES = (0.25, 0.5, 0.75)  # of ordinary pieces
JUDGED = np.array([number for number, feature in enumerate(FEATURES) if feature.judged and feature.side])
TAIL = (0.88, 0.94, 0.97)
MANY = np.float32(np.log10(len(JUDGED)))  # subtracted from a score, for the number of features tested
# bool [kinds, judged features]: whether the feature explains the kind.
EXPLAINS = np.array([[NAMES[number] in MADE_BY.get(kind, ()) for number in JUDGED] for kind in KINDS])


@dataclass(frozen=True)
class Judgement:
    """Judgement of k pieces. score: float32 [k], about -log10 of the share of ordinary pieces that are as odd, 0 to
    MOST; kind: int16 [k], the index in KINDS; feature: int16 [k], the index in FEATURES of the one that explains it:
    the oddest of those that define the kind, or of all if none of these is odd."""

    score: Floats
    feature: npt.NDArray[np.int16]
    kind: npt.NDArray[np.int16]


@dataclass(frozen=True)
class UsualFeatures:
    """Baseline by length class c and feature f.

    quantiles: float32 [c, f, 3], plain QUANTILES; edge, scale: float32 [c, f], where the odd tail begins, and
    over what distance it falls to 1/e, both of `Feature.oddness`.
    """

    quantiles: npt.NDArray[np.float32]
    edge: npt.NDArray[np.float32]
    scale: npt.NDArray[np.float32]

    @classmethod
    def nothing(cls) -> UsualFeatures:
        """The baseline of no pieces: nothing is odd by it."""
        return cls.of(np.zeros(0, dtype=np.int64), {name: np.zeros(0, dtype=np.float32) for name in NAMES})

    @classmethod
    def of(cls, lengths: npt.NDArray[np.int64], features: Features) -> UsualFeatures:
        """From ordinary pieces (1 or 2 % of junk do not matter): lengths [k] and features [k] of each.

        A class without pieces takes the numbers of the next longer one, or else of the next shorter one.
        """
        shape = (len(CLASSES) + 1, len(FEATURES))
        quantiles = np.zeros((*shape, len(QUANTILES)), dtype=np.float32)
        edge = np.full(shape, np.inf, dtype=np.float32)
        scale = np.ones(shape, dtype=np.float32)
        classes = length_class(lengths)
        there = np.unique(classes)
        for c in there:
            for f, feature in enumerate(FEATURES):
                values = features[feature.name][classes == c]
                quantiles[c, f] = np.quantile(values, QUANTILES)
                low, mid, high = np.quantile(feature.oddness(values), TAIL)
                edge[c, f] = mid
                scale[c, f] = max((high - low) / np.log((1 - TAIL[0]) / (1 - TAIL[2])), feature.grain)
        for c in np.setdiff1d(np.arange(shape[0]), there):
            if there.size:
                nearest = there[there > c][0] if (there > c).any() else there[-1]
                quantiles[c], edge[c], scale[c] = quantiles[nearest], edge[nearest], scale[nearest]
        return cls(quantiles, edge, scale)

    def scores(self, lengths: npt.NDArray[np.int64], features: Mapping[str, Floats]) -> Floats:
        """-log10 of the share of ordinary pieces beyond each value, 0 outside the tails: float32 [f, k]."""
        classes = length_class(lengths)
        found = np.zeros((len(FEATURES), len(lengths)), dtype=np.float32)
        for f, feature in enumerate(FEATURES):
            if not feature.side:
                continue
            beyond = feature.oddness(features[feature.name]) - self.edge[:, f].take(classes)
            decades = beyond / (self.scale[:, f].take(classes) * np.float32(np.log(10)))
            found[f] = np.where(beyond > 0, decades - np.float32(np.log10(1 - TAIL[1])), 0)
        return np.minimum(found, MOST + MANY)


def judge(usual: UsualFeatures, lengths: npt.NDArray[np.int64], features: Features) -> Judgement:
    """How unusual each piece is, by which feature, and its kind."""
    scores = usual.scores(lengths, features)
    judged = scores[JUDGED]
    score = np.clip(judged.max(axis=0) - MANY, 0, MOST)
    medians = usual.quantiles[:, :, QUANTILES.index(0.5)][length_class(lengths)]
    kind = looks_like(score, medians, scores, features)
    explaining = np.where(EXPLAINS[kind].T, judged, 0)
    oddest = np.where(explaining.any(axis=0), explaining.argmax(axis=0), judged.argmax(axis=0))
    feature = JUDGED[oddest]
    return Judgement(score, feature.astype(np.int16), kind)


def length_class(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
    """The length class of pieces of this many tokens."""
    return np.searchsorted(CLASSES, lengths, side="right")


__all__ = ["CLASSES", "MOST", "NAMES", "Judgement", "UsualFeatures", "judge", "length_class"]
