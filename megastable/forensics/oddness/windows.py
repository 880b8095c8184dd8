"""Pieces judged by their worst part: damage that fills a piece by half is told by the half that is full of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megastable.forensics.oddness.features import NAMES, Features, Floats
from megastable.forensics.oddness.judgement import Judgement
from megastable.forensics.oddness.kinds import ODD
from megastable.forensics.oddness.tables import Int64s, Keys
from megastable.forensics.oddness.yardstick import Raw, Yardstick

SHORTEST = 64  # tokens of a piece that is looked at by halves: what is shorter than half of it says little


@dataclass(frozen=True)
class Judged:
    """Of k pieces. features: name -> float32 [k], of the whole pieces; worst: the judgement of the worst part of each,
    which is tokens [first, first + tokens), int64 [k] both; value: float32 [k], what its feature is there."""

    features: Features
    worst: Judgement
    value: Floats
    first: Int64s
    tokens: Int64s


def judge_pieces(yardstick: Yardstick, tokens: Raw, edges: Int64s, keys: Keys) -> Judged:
    """Measure and judge pieces, the odd ones by their halves, too; arguments as those of `Yardstick.measure`.

    Damage as long as a piece, wherever it begins, fills one of the halves that it touches. So neither its score nor
    its kind depends on where the pieces are cut.
    """
    features = yardstick.measure(tokens, edges, keys)
    whole = yardstick.judge(features)
    lengths = np.diff(edges)
    score, feature, kind = whole.score.copy(), whole.feature.copy(), whole.kind.copy()
    value = _at(features, feature)
    first, count = edges[:-1].copy(), lengths.copy()
    odd = np.flatnonzero((score >= ODD) & (lengths >= SHORTEST))
    if odd.size:
        halves = np.stack([edges[odd], (edges[odd] + edges[odd + 1]) // 2, edges[odd + 1]], axis=1)
        place = np.concatenate([np.arange(a, b) for a, b in halves[:, [0, 2]].tolist()])
        sizes = np.diff(halves, axis=1).ravel()
        found = yardstick.measure(tokens[place], np.append(0, np.cumsum(sizes)), np.repeat(keys[odd], 2))
        parts = yardstick.judge(found)
        worse = 2 * np.arange(odd.size) + (parts.score[1::2] > parts.score[::2])
        better = parts.score[worse] > score[odd]
        at, worse = odd[better], worse[better]
        score[at], feature[at], kind[at] = parts.score[worse], parts.feature[worse], parts.kind[worse]
        value[at] = _at(found, parts.feature)[worse]
        first[at], count[at] = halves[:, :2].ravel()[worse], sizes[worse]
    return Judged(features, Judgement(score, feature, kind), value, first, count)


def _at(features: Features, chosen: npt.NDArray[np.int16]) -> Floats:
    """Of each piece [k] the value of the feature that is chosen for it."""
    table = np.stack([features[name] for name in NAMES])
    return np.asarray(table[chosen, np.arange(chosen.size)])
