"""Judge how unusual a piece is, by the tails of each feature among ordinary pieces, and label its kind.

A feature's tail is assumed exponential and extrapolated from its quantiles between 88 % and 97 %, which 1 or 2 % of
junk hardly move; `Feature.scale` is chosen so that real text has about such tails. The score is -log10 of the
share of ordinary pieces beyond, for the most significant feature, less log10 of the number of features. It
assumes that the far tail continues like the near one: a score of 3 is close to "one in a thousand", one of 10 means
"far beyond anything usual" and no more. The kind follows from a small table of rules; the first that holds wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megastable_tools.forensics.oddness.features import FEATURES, NAMES, Features, Floats

ODD = 1.0  # minimum score of a piece that is not usual
KINDS = (
    "usual", "outside of the vocabulary", "binary data", "wrong encoding", "repetition", "encoded data",
    "random tokens", "shuffled text", "another language or register", "odd",
)  # fmt: skip
# The features that define a kind and explain its pieces. For other kinds, the oddest feature.
MADE_BY: dict[str, tuple[str, ...]] = {
    "outside of the vocabulary": ("outside",),
    "binary data": ("replacements", "controls", "nulls"),
    "wrong encoding": ("nulls", "latin1", "replacements", "foreign"),
    "repetition": ("repeats", "period", "run"),
    "encoded data": ("unbroken",),
    "random tokens": ("unlikely", "order"),
    "shuffled text": ("order", "unlikely"),
    "another language or register": ("unlikely", "order", "foreign"),
}


def looks_like(
    score: Floats,
    medians: npt.NDArray[np.float32],
    scores: npt.NDArray[np.float32],
    features: Mapping[str, Floats],
) -> npt.NDArray[np.int16]:
    """The index in KINDS of each of k pieces. score: [k]; medians: [k, f], the baseline of each; scores: [f, k], of
    every feature; features: name -> [k], with "length"."""
    f = features
    usual = {name: medians[:, feature_number] for feature_number, name in enumerate(NAMES)}
    odd = {name: scores[feature_number] > 0 for feature_number, name in enumerate(NAMES)}
    # Text with two bytes per character has a NUL for each.
    doubled_bytes = (f["nulls"] > 0.4) & (f["nulls"] < 0.6)
    kind_rules = {
        "usual": score < ODD,
        "outside of the vocabulary": f["outside"] > 0,
        "binary data": ((f["replacements"] > 0.05) | (f["controls"] > 0.02) | (f["nulls"] > 0.05))
        & ~doubled_bytes,
        # The last: U+6100 for "a", whose UTF-8 always ends with the same byte.
        "wrong encoding": doubled_bytes
        | (odd["latin1"] & (f["latin1"] > 0.01))
        | (odd["replacements"])
        | ((f["foreign"] > 0.95) & (f["top"] > 0.25)),
        "repetition": (odd["repeats"] & (f["repeats"] > 0.5))
        | (odd["period"] & (f["period"] > 0.7))
        | (f["run"] > 0.3 * f["length"]),
        "encoded data": (f["spaces"] < 0.06)
        & (f["letters"] + f["digits"] > 0.8)
        & ((f["capitals"] > 0.2) | (f["digits"] > 0.2)),
        "random tokens": odd["surprise"]
        & (f["gain"] < 0.15 * usual["gain"])
        & (f["entropy"] > usual["entropy"])
        & (f["pairs"] < 0.05),
        "shuffled text": (odd["gain"] | odd["order"]) & ~odd["surprise"] & (f["gain"] < 0.25 * usual["gain"]),
        "another language or register": odd["surprise"] | odd["unlikely"] | odd["foreign"],
    }
    kind_numbers = [KINDS.index(rule_name) for rule_name in kind_rules]
    return np.select(list(kind_rules.values()), kind_numbers, KINDS.index("odd")).astype(np.int16)


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
    over what distance it falls to 1/e, both of `Feature.scale_oddness`.
    """

    quantiles: npt.NDArray[np.float32]
    edge: npt.NDArray[np.float32]
    scale: npt.NDArray[np.float32]

    @classmethod
    def of_no_pieces(cls) -> UsualFeatures:
        """The baseline of no pieces: nothing is odd by it."""
        no_features = {name: np.zeros(0, dtype=np.float32) for name in NAMES}
        return cls.learn_usual(np.zeros(0, dtype=np.int64), no_features)

    @classmethod
    def learn_usual(cls, lengths: npt.NDArray[np.int64], features: Features) -> UsualFeatures:
        """From ordinary pieces (1 or 2 % of junk do not matter): lengths [k] and features [k] of each.

        A class without pieces takes the numbers of the next longer one, or else of the next shorter one.
        """
        table_shape = (len(CLASSES) + 1, len(FEATURES))
        quantiles = np.zeros((*table_shape, len(QUANTILES)), dtype=np.float32)
        tail_edge = np.full(table_shape, np.inf, dtype=np.float32)
        scale = np.ones(table_shape, dtype=np.float32)
        length_classes = length_class(lengths)
        classes_there = np.unique(length_classes)
        for c in classes_there:
            for feature_number, feature in enumerate(FEATURES):
                class_values = features[feature.name][length_classes == c]
                quantiles[c, feature_number] = np.quantile(class_values, QUANTILES)
                low, middle_quantile, high = np.quantile(feature.scale_oddness(class_values), TAIL)
                tail_edge[c, feature_number] = middle_quantile
                fall = (high - low) / np.log((1 - TAIL[0]) / (1 - TAIL[2]))
                scale[c, feature_number] = max(fall, feature.grain)
        for c in np.setdiff1d(np.arange(table_shape[0]), classes_there):
            if classes_there.size:
                longer_classes = classes_there[classes_there > c]
                nearest = longer_classes[0] if longer_classes.size else classes_there[-1]
                quantiles[c], tail_edge[c], scale[c] = quantiles[nearest], tail_edge[nearest], scale[nearest]
        return cls(quantiles, tail_edge, scale)

    def score_features(self, lengths: npt.NDArray[np.int64], features: Mapping[str, Floats]) -> Floats:
        """-log10 of the share of ordinary pieces beyond each value, 0 outside the tails: float32 [f, k]."""
        length_classes = length_class(lengths)
        feature_scores = np.zeros((len(FEATURES), len(lengths)), dtype=np.float32)
        for f, feature in enumerate(FEATURES):
            if not feature.side:
                continue
            beyond_edge = feature.scale_oddness(features[feature.name]) - self.edge[:, f].take(length_classes)
            tail_decades = beyond_edge / (self.scale[:, f].take(length_classes) * np.float32(np.log(10)))
            feature_scores[f] = np.where(beyond_edge > 0, tail_decades - np.float32(np.log10(1 - TAIL[1])), 0)
        return np.minimum(feature_scores, MOST + MANY)


def judge_features(usual: UsualFeatures, lengths: npt.NDArray[np.int64], features: Features) -> Judgement:
    """How unusual each piece is, by which feature, and its kind."""
    feature_scores = usual.score_features(lengths, features)
    judged_scores = feature_scores[JUDGED]
    piece_score = np.clip(judged_scores.max(axis=0) - MANY, 0, MOST)
    medians = usual.quantiles[:, :, QUANTILES.index(0.5)][length_class(lengths)]
    piece_kind = looks_like(piece_score, medians, feature_scores, features)
    explaining = np.where(EXPLAINS[piece_kind].T, judged_scores, 0)
    oddest_index = np.where(explaining.any(axis=0), explaining.argmax(axis=0), judged_scores.argmax(axis=0))
    oddest_feature = JUDGED[oddest_index]
    return Judgement(piece_score, oddest_feature.astype(np.int16), piece_kind)


def length_class(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
    """The length class of pieces of this many tokens."""
    return np.searchsorted(CLASSES, lengths, side="right")
