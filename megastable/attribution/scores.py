"""Score how bad samples look: three kinds of evidence in one number, calibrated on harmless samples.

- z of the loss among harmless samples of the corpus (groups.py);
- the part of the loss that the sample's words do not explain: rare words make a sample hard, and harmless;
- the similarity of its tokens to those of the accused (likeness.py).

Each in robust deviations of harmless samples of its corpus, clipped at `LOW` and `HIGH`, and added: none decides alone.
One half of the harmless samples is for learning, the other for calibration. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.attribution.groups import (
    CROWD,
    ENOUGH,
    accused,
    between,
    crowd,
    group_test,
    robust,
)  # fmt: skip
from megastable.attribution.likeness import Resemblance, Tokens, Words
from megastable.attribution.region import STRAY

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

LOW, HIGH = -2.0, 6.0  # robust deviations
EDGES = (0.005, 0.995)  # quantiles of harmless words, beyond which the line is not extrapolated


class ScoredSamples(NamedTuple):
    """tokens: [n, L + 1]; z: of their losses, fp64 [n]; corpora: int64 [n]."""

    tokens: Tokens
    z: Floats
    corpora: Int64s

    def of(self, chosen: Bools | Int64s | slice) -> ScoredSamples:
        return ScoredSamples(self.tokens[chosen], self.z[chosen], self.corpora[chosen])


class CorpusBaseline:
    """Statistics of harmless samples of one corpus."""

    def __init__(self, harmless: ScoredSamples) -> None:
        self.learnt, self.kept = harmless.of(slice(0, None, 2)), harmless.of(slice(1, None, 2))
        tokens, z = self.learnt.tokens, self.learnt.z
        self.words = Words.of(tokens)
        hard = self.words.surprisal(tokens)
        self._edges = np.quantile(hard, EDGES)
        hard = np.clip(hard, *self._edges)
        inner = np.abs(z) < HIGH  # a single outlier must not bend the line
        spread = float(hard[inner].var()) if inner.any() else 0.0
        self._slope = float(np.cov(hard[inner], z[inner], bias=True)[0, 1]) / spread if spread > 1e-9 else 0.0
        self._middle, self._scale = robust(z - self._slope * hard)
        # Error of a badness per error of z, which enters it twice.
        self.amplified = 1 + 1 / self._scale
        self.badness = self.of(self.kept)

    def of(self, samples: ScoredSamples) -> Floats:
        """Badness of samples by themselves: fp64 [n]."""
        hard = np.clip(self.words.surprisal(samples.tokens), *self._edges)
        unexplained = (samples.z - self._slope * hard - self._middle) / self._scale
        return np.asarray(np.clip(samples.z, LOW, HIGH) + np.clip(unexplained, LOW, HIGH))


class Scale:
    """Baselines of the corpora with enough samples. harmless: oldest first."""

    def __init__(self, harmless: ScoredSamples) -> None:
        corpora, counts = np.unique(harmless.corpora, return_counts=True)
        enough = corpora[counts >= 2 * ENOUGH].tolist()
        self.usual = {c: CorpusBaseline(harmless.of(harmless.corpora == c)) for c in enough}

    def judges(self, corpora: Int64s) -> Bools:
        """Which of n samples can be judged."""
        return np.isin(corpora, list(self.usual))

    def badness(self, samples: ScoredSamples) -> Floats:
        """Badness of samples by themselves, fp64 [n]; 0 for a corpus with too few samples."""
        found = np.zeros(samples.z.shape)
        for corpus, usual in self.usual.items():
            members = samples.corpora == corpus
            found[members] = usual.of(samples.of(members))
        return found

    def harmless(self, corpora: Int64s) -> Floats:
        """The badness of the calibration samples of these corpora."""
        mine = [usual.badness for c, usual in self.usual.items() if (corpora == c).any()]
        return np.concatenate([np.empty(0), *mine])

    def amplified(self, corpora: Int64s) -> float:
        """Maximum error of the badness of these corpora per error of z."""
        return max((usual.amplified for c, usual in self.usual.items() if (corpora == c).any()), default=0.0)


class Score:
    """Badness and likeness to the `accused` samples together; without `losses`, likeness alone, and not clipped.
    harmless: scores of the calibration samples, fp64 [m]."""

    def __init__(self, scale: Scale, accused: ScoredSamples, losses: bool = True) -> None:
        self._scale, self._resemblance = scale, dict[int, tuple[Resemblance, float, float]]()
        self._losses = losses
        harmless = [np.empty(0)]
        for corpus in np.unique(accused.corpora).tolist():
            if (usual := scale.usual.get(corpus)) is None:
                continue
            resemblance = Resemblance.to(accused.tokens, usual.learnt.tokens)
            likeness = resemblance.of(usual.kept.tokens)
            middle, width = robust(likeness)
            self._resemblance[corpus] = resemblance, middle, width
            harmless.append(self._together(usual.badness, (likeness - middle) / width))
        self.harmless = np.concatenate(harmless)

    def of(self, samples: ScoredSamples, among: Bools | None = None) -> Floats:
        """Scores of samples, fp64 [n]; -inf for other corpora than those of the accused. among: which of the samples
        are accused themselves."""
        scores = np.full(samples.z.shape, -np.inf)
        badness = self._scale.badness(samples) if self._losses else np.zeros(samples.z.shape)
        for corpus, (resemblance, middle, width) in self._resemblance.items():
            mine = samples.corpora == corpus
            own = None if among is None else among[mine]
            alike = resemblance.of(samples.tokens[mine], own)
            scores[mine] = self._together(badness[mine], (alike - middle) / width)
        return scores

    def _together(self, badness: Floats, likeness: Floats) -> Floats:
        if not self._losses:
            return np.maximum(likeness, LOW)
        return np.asarray(badness + np.clip(likeness, LOW, HIGH))


class Conviction(NamedTuple):
    """guilty: bool [n]. p: of the group test. score: that names them, None if no sample is guilty; bar: a score beyond
    which further samples are like them."""

    guilty: Bools
    p: float
    score: Score | None
    bar: float


def judge(
    scale: Scale, suspects: ScoredSamples, alone: Bools, error: float, significance: float, innocent: float
) -> Conviction:
    """The guilty samples of a window. alone: those convicted by their loss alone, bool [n]. error: common standard
    error of z. significance: of the group test; innocent: maximum share of innocent ones among the named.

    The worst samples are accused first; the named ones are the accused of a second round.
    """
    known = scale.judges(suspects.corpora)
    badness, harmless = scale.badness(suspects), scale.harmless(suspects.corpora)
    p = group_test(badness[known], harmless, error * scale.amplified(suspects.corpora))
    guilty = alone
    if p <= significance:
        first = np.zeros(alone.shape, dtype=bool)
        first[known] = accused(badness[known], harmless)
        guilty = guilty | _named(Score(scale, suspects.of(first)), suspects, first, innocent)
    if not guilty.any():
        return Conviction(guilty, p, None, np.inf)
    score, among = Score(scale, suspects.of(guilty)), guilty
    if p <= significance:
        guilty = alone | _named(score, suspects, among, innocent)
    return _judged(guilty, p, score, suspects, among)


def judge_alike(scale: Scale, suspects: ScoredSamples, accused: Bools, innocent: float) -> Conviction:
    """The guilty samples of a window whose gradient, not losses, accuses some of them, bool [n].

    Bad samples need not be hard: one repeated sentence is easy, and its gradients add up. So only their likeness to
    each other, and difference from harmless samples, identifies them; fewer than `CROWD` are not convicted.
    """
    guilty = accused & scale.judges(suspects.corpora)
    score, among = Score(scale, suspects.of(guilty), losses=False), guilty
    for _ in range(2):
        if not guilty.any():
            break
        score, among = Score(scale, suspects.of(guilty), losses=False), guilty
        guilty = _named(score, suspects, among, innocent)
    if guilty.sum() < CROWD:
        guilty = np.zeros(accused.shape, dtype=bool)
    found = _judged(guilty, 1.0, score, suspects, among)
    if not guilty.any():
        return found
    # The minimum of a few very similar samples is too strict for the rest of their region; harmless ones lie far below.
    return found._replace(bar=(found.bar + float(np.quantile(score.harmless, 1 - STRAY))) / 2)


def _judged(guilty: Bools, p: float, score: Score, suspects: ScoredSamples, among: Bools) -> Conviction:
    if not guilty.any():
        return Conviction(guilty, p, None, np.inf)
    scores = score.of(suspects, among)[guilty]
    usual = float(np.quantile(score.harmless, 1 - STRAY)) if score.harmless.size else np.inf
    return Conviction(guilty, p, score, max(usual, float(scores.min())))


def _named(score: Score, suspects: ScoredSamples, among: Bools, innocent: float) -> Bools:
    scores = score.of(suspects, among)
    named = crowd(scores, score.harmless, innocent)
    return named & (scores >= between(scores[named], score.harmless)) if named.sum() > 1 else named
