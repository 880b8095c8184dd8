"""Score how bad samples look: three kinds of evidence in one number, calibrated on harmless samples.

- z of the loss among harmless samples of the corpus (groups.py);
- the part of the loss that the sample's words do not explain (`Words`): a page of rare names is hard, and harmless. The
  unexplained part scatters half as much;
- how much more likely its tokens are in a mixture of harmless text and some suspects than in harmless text alone
  (`Resemblance`), nats per token. After AdaDetect, which learns a novelty score from the very samples in question and
  preserves its error rate: Marandon, Lei, Mary and Roquain, "Adaptive novelty detection with false discovery rate
  guarantee", Annals of Statistics 2024.

Each in robust deviations of harmless samples of its corpus, clipped at `LOW` and `HIGH`, and added: none decides alone.
One half of the harmless samples is for learning, the other for calibration. Tokens cost no model time; their statistics
are counts of them and of pairs of neighbours, in `BUCKETS` hashed buckets each. Pure; tokens are [n, L + 1], as
`Source.samples` returns them, or their first `READ` + 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.attribution.groups import CROWD, ENOUGH, between, crowd, group_test, robust, suspect_worst

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Tokens = npt.NDArray[np.signedinteger[Any]]

LOW, HIGH = -2.0, 6.0  # robust deviations
EDGES = (0.005, 0.995)  # quantiles of harmless words, beyond which the line is not extrapolated
STRAY = 0.005  # share of harmless samples that look bad
BUCKETS = 1 << 16  # of single tokens, and as many of pairs
READ = 1024  # tokens of a sample that are read: its beginning shows its kind
HALF = 0.5  # count of a token or pair that never occurred
PART = 256  # samples with features in memory at a time
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, for multiplicative hashing


def words(tokens: Tokens) -> Int64s:
    """The bucket of each token of n samples except the first, which is not predicted: int64 [n, L], below BUCKETS."""
    return _bucket(tokens[:, 1 : READ + 1].astype(np.uint64))


def pairs(tokens: Tokens) -> Int64s:
    """The bucket of each token together with the one before it: int64 [n, L], BUCKETS to 2 BUCKETS."""
    known = tokens[:, : READ + 1].astype(np.uint64)
    return _bucket(known[:, 1:] + known[:, :-1] * GOLDEN) + BUCKETS


def _bucket(numbers: npt.NDArray[np.uint64]) -> Int64s:
    with np.errstate(over="ignore"):
        mixed = (numbers + np.uint64(1)) * GOLDEN
        mixed ^= mixed >> np.uint64(31)
        mixed *= GOLDEN
    return np.asarray(mixed >> np.uint64(48), dtype=np.int64)


class Words:
    """How rare tokens are in harmless samples. rarity: -log frequency of each bucket, nats, fp64 [BUCKETS]."""

    def __init__(self, harmless: Tokens) -> None:
        counts = np.bincount(words(harmless).ravel(), minlength=BUCKETS) + HALF
        seen = max(1, int((counts > HALF).sum()))
        # Buckets without any token of the vocabulary get no share.
        self.rarity = -np.log(counts / (counts.sum() - HALF * (BUCKETS - 2 * seen)))

    def surprisal(self, tokens: Tokens) -> Floats:
        """Surprisal of n samples, nats per token: fp64 [n]."""
        return np.asarray(self.rarity[words(tokens)].mean(axis=1))


class Resemblance:
    """How much samples resemble some suspects rather than harmless text."""

    def __init__(self, suspects: Tokens, harmless: Tokens) -> None:
        counts = _counts(harmless) + HALF
        self._usual, self._suspects = counts / counts.sum(), _counts(suspects)

    def of(self, tokens: Tokens, among: Bools | None = None) -> Floats:
        """Resemblance of n samples, nats per token: fp64 [n]. among: which of them are suspects themselves; each is
        left out of those that it is compared with, otherwise every sample would resemble itself."""
        found, total_suspects = np.empty(len(tokens)), self._suspects.sum()
        parts = (tokens[at : at + PART] for at in range(0, len(tokens), PART))
        buckets = (row for part in parts for row in np.concatenate([words(part), pairs(part)], axis=1))
        for row, at in enumerate(buckets):
            own, counts = np.unique(at, return_counts=True)
            theirs, total = self._suspects[own], total_suspects
            if among is not None and among[row]:
                theirs, total = theirs - counts, total - at.size
            share = theirs / total if total > 0 else self._usual[own]
            # Equal parts of suspects and harmless text: bounded from below, so that no single pair clears a sample.
            found[row] = (np.log((share / self._usual[own] + 1) / 2) * counts).sum() / max(1, at.size)
        return found


def _counts(tokens: Tokens) -> Floats:
    found = np.zeros(2 * BUCKETS)
    for part in np.array_split(tokens, max(1, len(tokens) // PART)):
        found += np.bincount(
            np.concatenate([words(part), pairs(part)], axis=1).ravel(), minlength=2 * BUCKETS
        )
    return found


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
        self.words = Words(tokens)
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

    def harmless(self, corpora: Int64s) -> tuple[Floats, float]:
        """The badness of the calibration samples of these corpora, and its maximum error per error of z."""
        mine = [usual for c, usual in self.usual.items() if (corpora == c).any()]
        badness = np.concatenate([np.empty(0), *(usual.badness for usual in mine)])
        return badness, max((usual.amplified for usual in mine), default=0.0)


class Score:
    """Badness and likeness to some suspects together; without `losses`, likeness alone, and not clipped.

    Args:
        suspects: [n].
        among: which of them the others may be like, bool [n].
    """

    def __init__(self, scale: Scale, suspects: ScoredSamples, among: Bools, losses: bool = True) -> None:
        self._scale, self._resemblance = scale, dict[int, tuple[Resemblance, float, float]]()
        self._losses = losses
        chosen, harmless = suspects.of(among), [np.empty(0)]
        for corpus in np.unique(chosen.corpora).tolist():
            if (usual := scale.usual.get(corpus)) is None:
                continue
            resemblance = Resemblance(chosen.tokens, usual.learnt.tokens)
            likeness = resemblance.of(usual.kept.tokens)
            middle, width = robust(likeness)
            self._resemblance[corpus] = resemblance, middle, width
            harmless.append(self._together(usual.badness, (likeness - middle) / width))
        self.harmless = np.concatenate(harmless)  # scores of the calibration samples, fp64 [m]
        self.suspects = self.of(suspects, among)

    def of(self, samples: ScoredSamples, among: Bools | None = None) -> Floats:
        """Scores of samples, fp64 [k]; -inf for other corpora than those of the chosen suspects. among: which of the
        samples are chosen ones themselves."""
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

    def name(self, innocent: float) -> Bools:
        """The bad ones of the suspects, bool [n], with a share of false ones of at most `innocent`."""
        named = crowd(self.suspects, self.harmless, innocent)
        if named.sum() > 1:
            named &= self.suspects >= between(self.suspects[named], self.harmless)
        return named

    @property
    def usual(self) -> float:
        """A score that few harmless samples reach."""
        return float(np.quantile(self.harmless, 1 - STRAY)) if self.harmless.size else np.inf


class Judged(NamedTuple):
    """bad: bool [n]. p: of the group test. score: that names them, None if no sample is bad; bar: a score beyond which
    further samples are like them."""

    bad: Bools
    p: float
    score: Score | None = None
    bar: float = np.inf


def judge(
    scale: Scale, suspects: ScoredSamples, alone: Bools, error: float, significance: float, innocent: float
) -> Judged:
    """The bad samples of a window. alone: those that are bad by their loss alone, bool [n]. error: common standard
    error of z. significance: of the group test; innocent: maximum share of harmless ones among the named.

    The worst samples are suspected first; a second round looks for the like of those that it names.
    """
    known = scale.judges(suspects.corpora)
    badness, (harmless, amplified) = scale.badness(suspects), scale.harmless(suspects.corpora)
    p = group_test(badness[known], harmless, error * amplified)
    bad = alone
    if p <= significance:
        first = np.zeros(alone.shape, dtype=bool)
        first[known] = suspect_worst(badness[known], harmless)
        bad = bad | Score(scale, suspects, first).name(innocent)
    if not bad.any():
        return Judged(bad, p)
    score = Score(scale, suspects, bad)
    if p <= significance:
        bad = alone | score.name(innocent)
    return Judged(bad, p, score, _bar(score, bad)) if bad.any() else Judged(bad, p)


def judge_alike(scale: Scale, suspects: ScoredSamples, suspected: Bools, innocent: float) -> Judged:
    """The bad samples of a window whose gradient, not losses, makes some of them suspected, bool [n].

    Bad samples need not be hard: one repeated sentence is easy, and its gradients add up. So only their likeness to
    each other, and difference from harmless samples, identifies them; fewer than `CROWD` are not named.
    """
    bad, score = suspected & scale.judges(suspects.corpora), None
    for _ in range(2):
        if bad.any():
            score = Score(scale, suspects, bad, losses=False)
            bad = score.name(innocent)
    if score is None or bad.sum() < CROWD:
        return Judged(np.zeros(suspected.shape, dtype=bool), 1.0)
    # The minimum of a few very similar samples is too strict for the rest of their region; harmless ones lie far below.
    return Judged(bad, 1.0, score, (_bar(score, bad) + score.usual) / 2)


def _bar(score: Score, bad: Bools) -> float:
    return max(score.usual, float(score.suspects[bad].min()))
