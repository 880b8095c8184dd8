"""Judge pieces by their worst part: damage that fills half of a piece shows in that half."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megastable_tools.forensics.oddness.features import NAMES, Features, Floats
from megastable_tools.forensics.oddness.judgement import Judgement
from megastable_tools.forensics.oddness.kinds import KINDS, ODD
from megastable_tools.forensics.oddness.tables import Int64s, Keys
from megastable_tools.forensics.oddness.yardstick import Raw, Yardstick

Span = tuple[int, int]

# The score at which a half overrides its piece, by kind. Sound pieces have a half with a score of 3 two or three times
# as often as they have that score themselves. Nearly all of these halves are only unusual, or repetitive like tables:
# ordinary ones reach 4.6 in the standard library's source and 5.4 in C headers.
COUNTS = {"another language or register": np.inf, "odd": np.inf, "repetition": 6.0}
COUNTS_FROM = np.array([COUNTS.get(kind, ODD) for kind in KINDS])

WINDOW, STRIDE = 64, 16  # tokens: to locate odd spans in a document
AT_ONCE = 4096  # windows measured at a time
SHORTEST = 64  # tokens: shorter pieces are not halved


@dataclass(frozen=True)
class JudgedPieces:
    """Judgement of k pieces. features: name -> float32 [k], of the whole pieces; worst: of the worst part of each,
    which is tokens [first, first + tokens), int64 [k] both; value: float32 [k], its feature's value there."""

    features: Features
    worst: Judgement
    value: Floats
    first: Int64s
    tokens: Int64s


def judge_pieces(yardstick: Yardstick, tokens: Raw, edges: Int64s, keys: Keys) -> JudgedPieces:
    """Measure and judge pieces, the odd ones also by their halves; arguments as for `Yardstick.measure`.

    Damage as long as a piece, wherever it begins, fills one of the halves that it touches. So neither its score nor
    its kind depends on the cuts between pieces, for kinds that a half can show (COUNTS).
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
        said = np.where(parts.score >= COUNTS_FROM[parts.kind], parts.score, 0)
        worse = 2 * np.arange(odd.size) + (said[1::2] > said[::2])
        better = said[worse] > score[odd]
        at, worse = odd[better], worse[better]
        score[at], feature[at], kind[at] = parts.score[worse], parts.feature[worse], parts.kind[worse]
        value[at] = _at(found, parts.feature)[worse]
        first[at], count[at] = halves[:, :2].ravel()[worse], sizes[worse]
    return JudgedPieces(features, Judgement(score, feature, kind), value, first, count)


def spans_of(yardstick: Yardstick, tokens: Raw, key: int, least: float) -> list[Span]:
    """Where a document [n] has a score of at least `least`, with its key as for `Yardstick.measure`: [first, end) of
    its tokens, ascending; at least around the worst window.

    Windows of WINDOW tokens begin every STRIDE. A window across the edge of damage is half sound, and its score about
    half as high: a token is odd if most of the windows that hold it have half of `least`, and a nearby one all of it.
    A stretch shorter than a window between two odd spans, or at an end, cannot be distinguished and counts as odd.
    """
    count = len(tokens)
    firsts = np.unique(np.append(np.arange(0, max(count - WINDOW, 0), STRIDE), max(count - WINDOW, 0)))
    ends = np.minimum(firsts + WINDOW, count)
    scores = np.empty(firsts.size, np.float32)
    for some in np.split(np.arange(firsts.size), range(AT_ONCE, firsts.size, AT_ONCE)):
        place = np.concatenate([np.arange(firsts[n], ends[n]) for n in some])
        edges = np.append(0, np.cumsum(ends[some] - firsts[some]))
        measured = yardstick.measure(tokens[place], edges, np.full(some.size, key, np.uint64))
        scores[some] = yardstick.judge(measured).score
    sure = scores >= min(least, float(scores.max()))
    odd = sure | (scores >= max(least / 2, ODD))
    change = np.zeros((3, count + 1), np.int64)
    for row, windows in enumerate((odd, ~odd, sure)):
        np.add.at(change[row], firsts[windows], 1)
        np.add.at(change[row], ends[windows], -1)
    votes = change.cumsum(axis=1)[:, :-1]
    inside = np.append(False, np.append(votes[0] > votes[1], False))
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    found = [(a, b) for a, b in edges.reshape(-1, 2).tolist() if votes[2, a:b].any()]
    if not found:  # the worst window is outvoted everywhere
        worst = int(scores.argmax())
        found = [(int(firsts[worst]), int(ends[worst]))]
    spans = list[Span]()
    for first, end in found:
        begin = spans.pop()[0] if spans and first - spans[-1][1] < WINDOW else 0 if first < WINDOW else first
        spans.append((begin, count if count - end < WINDOW else end))
    return spans


def _at(features: Features, chosen: npt.NDArray[np.int16]) -> Floats:
    """For each piece [k] the value of its chosen feature."""
    table = np.stack([features[name] for name in NAMES])
    return np.asarray(table[chosen, np.arange(chosen.size)])
