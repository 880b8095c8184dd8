"""Finds bad samples among many: individual outliers, and crowds in which no sample is extraordinary alone. Pure.

Text has heavy tails: among thousands of harmless samples some are far out, and a fixed bound finds a bad one in every
large batch. So a suspect is measured by how often harmless samples of its corpus are as bad (a conformal p-value), and
only as many are bad as chance does not explain (Benjamini and Hochberg 1995): if all are harmless, some are called bad
in at most the stated share of the cases, for any distribution (Bates, Candes, Lei, Romano and Sesia, "Testing for
outliers with conformal p-values", Annals of Statistics 2023).

Individuals (`bad_by_loss`): as bad as hardly any harmless sample, by the loss alone.
Crowds: first the window as a whole must be worse than as many harmless samples drawn at random (`group_test`, a
permutation test); then a score names those that differ from harmless samples (`Score`). It learns from the suspects
themselves, and is calibrated on harmless samples that it did not learn from (`name_crowd`), which preserves the false
discovery rate. Three kinds of evidence are in it:

- z of the loss among harmless samples of the corpus;
- the part of the loss that the sample's words do not explain (`Words`): a page of rare names is hard, and harmless. The
  unexplained part scatters half as much;
- how much more likely its tokens are in a mixture of harmless text and some suspects than in harmless text alone
  (`Resemblance`), nats per token. After AdaDetect, which learns a novelty score from the very samples in question and
  preserves its error rate: Marandon, Lei, Mary and Roquain, "Adaptive novelty detection with false discovery rate
  guarantee", Annals of Statistics 2024.

Each in robust deviations of harmless samples of its corpus, clipped at `LOW` and `HIGH`, and added: none decides alone.
One half of the harmless samples is for learning, the other for calibration. Tokens cost no model time; their statistics
are counts of them and of pairs of neighbours, in `BUCKETS` hashed buckets each; tokens are [n, L + 1], as
`Source.read_samples` returns them, or their first `READ` + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

SCALE_FLOOR = 0.05  # nats: minimum spread of samples of one kind of text; a smaller MAD is chance
ENOUGH = 48  # harmless samples required to judge a corpus
GROUP = 64  # harmless samples per median and MAD: fewer are too noisy, more span a falling loss
FALSE = 0.03  # false discovery rate; also how often any is called bad if all are harmless
# If at least `CROWD` are bad at once, the false discovery rate is `CROWD_FALSE`: chance brings 6 where 1.5 are expected
# once in 200 times.
CROWD, CROWD_FALSE = 6, 0.25
MOST = 0.7  # if at least half of all suspects are bad, the threshold of a loss is so many times as high
TAIL = 3.0  # power of the tail beyond the worst harmless sample: Student t, 3 degrees; text is lighter
TAIL_KNOWN = 100  # harmless samples required for the worst of them to mark the start of that tail
MEDIAN_ERROR = 1.2533  # standard error of a median of n normal numbers, times sqrt(n)
DRAWS = 9999  # random groups of harmless samples to compare a window with
SUSPECTED = 0.1  # share of harmless samples as bad as those suspected at first


@dataclass(frozen=True)
class Usual:
    """z of harmless samples of a corpus among their contemporaries, oldest first, fp64 [m]; centre and scale of the
    latest of them, nats; error: standard error of the centre, in scales."""

    z: Floats
    centre: float
    scale: float
    error: float


def standardize(known: Floats) -> Usual:
    """The baseline from losses [m], oldest first.

    Losses fall and spread over time: contemporaries are compared with a line through the medians of their halves.
    """
    z, loss_centre, group_scale = [], 0.0, 1.0
    for loss_group in np.array_split(known, max(1, min(8, known.size // GROUP))):
        early_median, late_median = (float(np.median(half)) for half in np.array_split(loss_group, 2))
        line = (early_median + late_median) / 2 + (late_median - early_median) * np.linspace(
            -1.0, 1.0, loss_group.size
        )
        group_scale = max(SCALE_FLOOR, 1.4826 * float(np.median(np.abs(loss_group - line))))
        loss_centre = float(line[-1])  # the median of the late half
        z.append((loss_group - line) / group_scale)
    return Usual(np.concatenate(z), loss_centre, group_scale, MEDIAN_ERROR / np.sqrt(loss_group.size / 2))


class UsualLosses:
    """What is usual for each corpus of which at least `ENOUGH` harmless samples are known.

    Args:
        losses: of harmless samples, fp64 [m], nats, oldest first; each from before its sample was trained on, as later
            ones do not represent new text.
        corpora: of these samples, int64 [m].
    """

    def __init__(self, losses: Floats, corpora: Int64s) -> None:
        self.of = dict[int, Usual]()
        self.z = np.full(losses.shape, np.nan)  # among their contemporaries; nan for corpora with too few
        for corpus_index in np.unique(corpora).tolist():
            are_known = np.isfinite(losses) & (corpora == corpus_index)
            if are_known.sum() >= ENOUGH:
                self.of[corpus_index] = standardize(losses[are_known])
                self.z[are_known] = self.of[corpus_index].z

    def far_out(self, losses: Floats, corpora: Int64s) -> Floats:
        """How far out each loss [n] is for its corpus, fp64 [n]: (x - median) / (1.4826 MAD), Iglewicz and Hoaglin
        1993, of the latest harmless ones. nan if too few are known, inf if the loss is not finite."""
        z = np.full(losses.shape, np.nan)
        for corpus, corpus_usual in self.of.items():
            of_corpus = corpora == corpus
            z[of_corpus] = (losses[of_corpus] - corpus_usual.centre) / corpus_usual.scale
        return np.where(np.isfinite(losses), z, np.inf)

    def compare_losses(self, losses: Floats, corpora: Int64s, shift: float = 0.0) -> tuple[Floats, Floats]:
        """How far out each loss [n] is for its corpus, beyond `shift`, and how often a harmless one is as far out: z
        and p, fp64 [n]; p is 1 where z is nan, and 0 if the loss is not finite."""
        z, p_values = self.far_out(losses, corpora) - shift, np.ones(losses.shape)
        # The scatter differs between corpora, and is soon known; their tails are known late, but differ less.
        every_z = np.concatenate([np.empty(0), *(corpus_usual.z for corpus_usual in self.of.values())])
        for corpus, corpus_usual in self.of.items():
            of_corpus = corpora == corpus
            p_values[of_corpus] = chance_of(
                z[of_corpus], corpus_usual.z if corpus_usual.z.size >= TAIL_KNOWN else every_z
            )
        p_values[~np.isfinite(losses)] = 0.0
        return z, p_values

    def shared_error(self, corpora: Int64s | None = None) -> float:
        """Standard error that the z of all samples of a corpus share, for the one with the fewest samples among
        `corpora`; None: among all."""
        chosen_usuals = (
            own for corpus, own in self.of.items() if corpora is None or (corpora == corpus).any()
        )
        return max((chosen_usual.error for chosen_usual in chosen_usuals), default=0.0)


def shared_shift(z: Floats, bad: Bools) -> float:
    """How far all samples of a window [n] lie above their records, in z: the median of those that are not bad, as
    measured on the same state; 0 if these are few, or fewer than the bad ones, or do not lie higher."""
    other_z = z[~bad & np.isfinite(z)]
    return max(0.0, float(np.median(other_z))) if other_z.size >= max(ENOUGH // 2, bad.sum()) else 0.0


def chance_of(z: Floats, usual: Floats) -> Floats:
    """For each z, how often a harmless sample [m] is as bad, or slightly more.

    Adds one standard error, as one reference serves many suspects.
    """
    counts_beyond = _count_beyond(z, usual)
    share_beyond = np.minimum(1.0, (counts_beyond + np.sqrt(counts_beyond)) / (usual.size + 1))
    if usual.size < TAIL_KNOWN:
        return np.asarray(share_beyond)
    worst_harmless = max(1.0, float(usual.max()))
    return np.asarray(share_beyond * (worst_harmless / np.maximum(z, worst_harmless)) ** TAIL)


def _count_beyond(suspects: Floats, harmless: Floats) -> Int64s:
    """How many harmless samples [m] are as bad as each suspect [n], and one."""
    return np.asarray(1 + harmless.size - np.searchsorted(np.sort(harmless), suspects, side="left"))


def bad_by_loss(z: Floats, p: Floats, threshold: float) -> Bools:
    """The suspects [n] that are bad (z above `threshold`) in excess of what harmless samples explain.

    A few must be as bad as hardly any harmless sample; many may be as bad as some are. If most are far out together,
    the individual threshold is lower.
    """
    known_z = np.nan_to_num(z, nan=0.0)
    most = known_z > MOST * threshold
    far = most if 2 * most.sum() >= max(z.size, 2 * CROWD) else known_z > threshold
    bad, known_p = np.zeros(z.shape, dtype=bool), np.where(np.isnan(z), np.nan, p)
    for false_share, least_count in ((FALSE, 1), (CROWD_FALSE, CROWD)):
        are_named = far & fewer_false(known_p, false_share)
        if are_named.sum() >= least_count:
            bad |= are_named
    return bad


def fewer_false(p: Floats, false_rate: float, nulls: float | None = None) -> Bools:
    """Which p-values [n] are named if the share `false_rate` may be false (Benjamini and Hochberg 1995). nulls:
    how many are harmless; None: as many as are known."""
    ascending_p = np.sort(p[~np.isnan(p)])
    nulls = max(1, ascending_p.size) if nulls is None else nulls
    passed_indices = np.flatnonzero(ascending_p <= false_rate * np.arange(1, ascending_p.size + 1) / nulls)
    return (
        np.asarray(p <= ascending_p[passed_indices[-1]])
        if passed_indices.size
        else np.zeros(p.shape, dtype=bool)
    )


# Crowds


def robust_scale(values: Floats) -> tuple[float, float]:
    """Median and 1.4826 MAD."""
    median_value = float(np.median(values))
    return median_value, max(1e-6, 1.4826 * float(np.median(np.abs(values - median_value))))


def group_test(suspects: Floats, harmless: Floats, error: float) -> float:
    """How often as many random harmless samples, out of [m], are on average as bad as the suspects [n]: a permutation
    test with `DRAWS` draws (at least 1 / 10,000). error: standard error of the suspects' common reference."""
    if not suspects.size or harmless.size < ENOUGH:
        return 1.0
    random = np.random.default_rng(0)  # the same on all ranks
    suspect_count, suspect_mean = suspects.size, float(suspects.mean())
    if suspect_count <= 512:
        drawn_means = random.choice(harmless, (DRAWS, suspect_count)).mean(axis=1)
    else:  # the mean of this many is normal
        drawn_means = random.normal(harmless.mean(), harmless.std() / np.sqrt(suspect_count), DRAWS)
    drawn_means = drawn_means + random.normal(0.0, error, DRAWS)
    return float(1 + (drawn_means >= suspect_mean).sum()) / (DRAWS + 1)


def name_crowd(suspects: Floats, harmless: Floats, false_rate: float) -> Bools:
    """The suspects [n] that differ from harmless samples [m], with a share of false ones of at most `false_rate`.

    Conformal p-values; Benjamini and Hochberg's procedure with Storey's estimate of how many are harmless ("A direct
    approach to false discovery rates", JRSS B 2002), which is less strict if most are bad.
    """
    if not suspects.size or harmless.size < ENOUGH:
        return np.zeros(suspects.shape, dtype=bool)
    p = conformal(suspects, harmless)
    harmless_count = min(float(suspects.size), (1 + float((p > 0.5).sum())) / 0.5)
    return fewer_false(p, false_rate, harmless_count) & (p <= 0.5)


def bar_between(bad: Floats, harmless: Floats) -> float:
    """The bar between two kinds, equally far from both in their own robust deviations: if they lie far apart, the false
    discoveries that a rate allows would all lie in between."""
    (bad_median, bad_scale), (usual_median, usual_scale) = robust_scale(bad), robust_scale(harmless)
    bad_scale = max(bad_scale, usual_scale / 2)
    return (bad_median * usual_scale + usual_median * bad_scale) / (bad_scale + usual_scale)


def conformal(suspects: Floats, harmless: Floats) -> Floats:
    """How often a harmless sample [m] is as bad as each suspect: fp64 [n]."""
    return np.asarray(_count_beyond(suspects, harmless) / (harmless.size + 1))


def suspect_worst(badness: Floats, harmless: Floats) -> Bools:
    """The samples [n] that are suspected at first: as bad as the worst tenth of harmless samples; if that is hardly
    any, the worst few."""
    p_values = conformal(badness, harmless)
    are_chosen = p_values <= SUSPECTED
    return are_chosen if are_chosen.sum() >= 2 else p_values <= np.sort(p_values)[min(3, p_values.size - 1)]


Tokens = npt.NDArray[np.signedinteger[Any]]

LOW, HIGH = -2.0, 6.0  # robust deviations
EDGES = (0.005, 0.995)  # quantiles of harmless words, beyond which the line is not extrapolated
STRAY = 0.005  # share of harmless samples that look bad
BUCKETS = 1 << 16  # of single tokens, and as many of pairs
READ = 1024  # tokens of a sample that are read: its beginning shows its kind
HALF = 0.5  # count of a token or pair that never occurred
PART = 256  # samples with features in memory at a time
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, for multiplicative hashing


def hash_words(tokens: Tokens) -> Int64s:
    """The bucket of each token of n samples except the first, which is not predicted: int64 [n, L], below BUCKETS."""
    return _bucket(tokens[:, 1 : READ + 1].astype(np.uint64))


def hash_pairs(tokens: Tokens) -> Int64s:
    """The bucket of each token together with the one before it: int64 [n, L], BUCKETS to 2 BUCKETS."""
    read_tokens = tokens[:, : READ + 1].astype(np.uint64)
    return _bucket(read_tokens[:, 1:] + read_tokens[:, :-1] * GOLDEN) + BUCKETS


def _bucket(numbers: npt.NDArray[np.uint64]) -> Int64s:
    with np.errstate(over="ignore"):
        mixed_bits = (numbers + np.uint64(1)) * GOLDEN
        mixed_bits ^= mixed_bits >> np.uint64(31)
        mixed_bits *= GOLDEN
    return np.asarray(mixed_bits >> np.uint64(48), dtype=np.int64)


class Words:
    """How rare tokens are in harmless samples. rarity: -log frequency of each bucket, nats, fp64 [BUCKETS]."""

    def __init__(self, harmless: Tokens) -> None:
        bucket_counts = np.bincount(hash_words(harmless).ravel(), minlength=BUCKETS) + HALF
        seen_buckets = max(1, int((bucket_counts > HALF).sum()))
        # Buckets without any token of the vocabulary get no share.
        self.rarity = -np.log(bucket_counts / (bucket_counts.sum() - HALF * (BUCKETS - 2 * seen_buckets)))

    def surprisal(self, tokens: Tokens) -> Floats:
        """Surprisal of n samples, nats per token: fp64 [n]."""
        return np.asarray(self.rarity[hash_words(tokens)].mean(axis=1))


class Resemblance:
    """How much samples resemble some suspects rather than harmless text."""

    def __init__(self, suspects: Tokens, harmless: Tokens) -> None:
        harmless_counts = _counts(harmless) + HALF
        self._usual, self._suspects = harmless_counts / harmless_counts.sum(), _counts(suspects)

    def measure_likeness(self, tokens: Tokens, among: Bools | None = None) -> Floats:
        """Resemblance of n samples, nats per token: fp64 [n]. among: which of them are suspects themselves; each is
        left out of those that it is compared with, otherwise every sample would resemble itself."""
        likeness_scores, total_suspects = np.empty(len(tokens)), self._suspects.sum()
        parts = (tokens[at : at + PART] for at in range(0, len(tokens), PART))
        bucket_rows = (
            row
            for token_part in parts
            for row in np.concatenate([hash_words(token_part), hash_pairs(token_part)], axis=1)
        )
        for row, at in enumerate(bucket_rows):
            own, own_counts = np.unique(at, return_counts=True)
            suspect_counts, total_count = self._suspects[own], total_suspects
            if among is not None and among[row]:
                suspect_counts, total_count = suspect_counts - own_counts, total_count - at.size
            share = suspect_counts / total_count if total_count > 0 else self._usual[own]
            # Equal parts of suspects and harmless text: bounded from below, so that no single pair clears a sample.
            likeness_scores[row] = (np.log((share / self._usual[own] + 1) / 2) * own_counts).sum() / max(
                1, at.size
            )
        return likeness_scores


def _counts(tokens: Tokens) -> Floats:
    bucket_counts = np.zeros(2 * BUCKETS)
    for token_part in np.array_split(tokens, max(1, len(tokens) // PART)):
        bucket_counts += np.bincount(
            np.concatenate([hash_words(token_part), hash_pairs(token_part)], axis=1).ravel(),
            minlength=2 * BUCKETS,
        )
    return bucket_counts


class ScoredSamples(NamedTuple):
    """tokens: [n, L + 1]; z: of their losses, fp64 [n]; corpora: int64 [n]."""

    tokens: Tokens
    z: Floats
    corpora: Int64s

    def select_samples(self, chosen: Bools | Int64s | slice) -> ScoredSamples:
        return ScoredSamples(self.tokens[chosen], self.z[chosen], self.corpora[chosen])


class CorpusBaseline:
    """Statistics of harmless samples of one corpus."""

    def __init__(self, harmless: ScoredSamples) -> None:
        self.learnt, self.kept = (
            harmless.select_samples(slice(0, None, 2)),
            harmless.select_samples(slice(1, None, 2)),
        )
        learnt_tokens, z = self.learnt.tokens, self.learnt.z
        self.words = Words(learnt_tokens)
        word_surprisal = self.words.surprisal(learnt_tokens)
        self._edges = np.quantile(word_surprisal, EDGES)
        word_surprisal = np.clip(word_surprisal, *self._edges)
        inner = np.abs(z) < HIGH  # a single outlier must not bend the line
        spread = float(word_surprisal[inner].var()) if inner.any() else 0.0
        self._slope = (
            float(np.cov(word_surprisal[inner], z[inner], bias=True)[0, 1]) / spread if spread > 1e-9 else 0.0
        )
        self._middle, self._scale = robust_scale(z - self._slope * word_surprisal)
        # Error of a badness per error of z, which enters it twice.
        self.amplified = 1 + 1 / self._scale
        self.badness = self.measure_badness(self.kept)

    def measure_badness(self, samples: ScoredSamples) -> Floats:
        """Badness of samples by themselves: fp64 [n]."""
        word_surprisal = np.clip(self.words.surprisal(samples.tokens), *self._edges)
        unexplained = (samples.z - self._slope * word_surprisal - self._middle) / self._scale
        return np.asarray(np.clip(samples.z, LOW, HIGH) + np.clip(unexplained, LOW, HIGH))


class Scale:
    """Baselines of the corpora with enough samples. harmless: oldest first."""

    def __init__(self, harmless: ScoredSamples) -> None:
        corpora, counts = np.unique(harmless.corpora, return_counts=True)
        known_corpora = corpora[counts >= 2 * ENOUGH].tolist()
        self.usual = {
            corpus_index: CorpusBaseline(harmless.select_samples(harmless.corpora == corpus_index))
            for corpus_index in known_corpora
        }

    def can_judge(self, corpora: Int64s) -> Bools:
        """Which of n samples can be judged."""
        return np.isin(corpora, list(self.usual))

    def badness(self, samples: ScoredSamples) -> Floats:
        """Badness of samples by themselves, fp64 [n]; 0 for a corpus with too few samples."""
        badness_scores = np.zeros(samples.z.shape)
        for corpus_index, corpus_baseline in self.usual.items():
            of_corpus = samples.corpora == corpus_index
            badness_scores[of_corpus] = corpus_baseline.measure_badness(samples.select_samples(of_corpus))
        return badness_scores

    def harmless_badness(self, corpora: Int64s) -> tuple[Floats, float]:
        """The badness of the calibration samples of these corpora, and its maximum error per error of z."""
        own_baselines = [
            usual for corpus_index, usual in self.usual.items() if (corpora == corpus_index).any()
        ]
        all_badness = np.concatenate([np.empty(0), *(own_baseline.badness for own_baseline in own_baselines)])
        return all_badness, max((usual.amplified for usual in own_baselines), default=0.0)


class Score:
    """Badness and likeness to some suspects together; without `losses`, likeness alone, and not clipped.

    Args:
        suspects: [n].
        among: which of them the others may be like, bool [n].
    """

    def __init__(self, scale: Scale, suspects: ScoredSamples, among: Bools, losses: bool = True) -> None:
        self._scale, self._resemblance = scale, dict[int, tuple[Resemblance, float, float]]()
        self._losses = losses
        chosen_suspects, harmless_scores = suspects.select_samples(among), [np.empty(0)]
        for corpus_index in np.unique(chosen_suspects.corpora).tolist():
            if (corpus_baseline := scale.usual.get(corpus_index)) is None:
                continue
            suspect_resemblance = Resemblance(chosen_suspects.tokens, corpus_baseline.learnt.tokens)
            likeness = suspect_resemblance.measure_likeness(corpus_baseline.kept.tokens)
            likeness_median, width = robust_scale(likeness)
            self._resemblance[corpus_index] = suspect_resemblance, likeness_median, width
            harmless_scores.append(
                self._together(corpus_baseline.badness, (likeness - likeness_median) / width)
            )
        self.harmless = np.concatenate(harmless_scores)  # scores of the calibration samples, fp64 [m]
        self.suspects = self.score_samples(suspects, among)

    def score_samples(self, samples: ScoredSamples, among: Bools | None = None) -> Floats:
        """Scores of samples, fp64 [k]; -inf for other corpora than those of the chosen suspects. among: which of the
        samples are chosen ones themselves."""
        scores = np.full(samples.z.shape, -np.inf)
        badness = self._scale.badness(samples) if self._losses else np.zeros(samples.z.shape)
        for corpus_index, (suspect_resemblance, likeness_median, likeness_scale) in self._resemblance.items():
            of_corpus = samples.corpora == corpus_index
            own_suspects = None if among is None else among[of_corpus]
            likeness_scores = suspect_resemblance.measure_likeness(samples.tokens[of_corpus], own_suspects)
            scores[of_corpus] = self._together(
                badness[of_corpus], (likeness_scores - likeness_median) / likeness_scale
            )
        return scores

    def _together(self, badness: Floats, likeness: Floats) -> Floats:
        if not self._losses:
            return np.maximum(likeness, LOW)
        return np.asarray(badness + np.clip(likeness, LOW, HIGH))

    def name_bad(self, false_rate: float) -> Bools:
        """The bad ones of the suspects, bool [n], with a share of false ones of at most `false_rate`."""
        are_named = name_crowd(self.suspects, self.harmless, false_rate)
        if are_named.sum() > 1:
            are_named &= self.suspects >= bar_between(self.suspects[are_named], self.harmless)
        return are_named

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


def judge_suspects(
    scale: Scale, suspects: ScoredSamples, alone: Bools, error: float, significance: float, false_rate: float
) -> Judged:
    """The bad samples of a window. alone: those that are bad by their loss alone, bool [n]. error: common standard
    error of z. significance: of the group test; false_rate: maximum share of harmless ones among the named.

    The worst samples are suspected first; a second round looks for the like of those that it names.
    """
    can_judge = scale.can_judge(suspects.corpora)
    badness, (harmless, error_factor) = scale.badness(suspects), scale.harmless_badness(suspects.corpora)
    p_value = group_test(badness[can_judge], harmless, error * error_factor)
    bad = alone
    if p_value <= significance:
        first_suspects = np.zeros(alone.shape, dtype=bool)
        first_suspects[can_judge] = suspect_worst(badness[can_judge], harmless)
        bad = bad | Score(scale, suspects, first_suspects).name_bad(false_rate)
    if not bad.any():
        return Judged(bad, p_value)
    suspect_score = Score(scale, suspects, bad)
    if p_value <= significance:
        bad = alone | suspect_score.name_bad(false_rate)
    return (
        Judged(bad, p_value, suspect_score, _bar(suspect_score, bad)) if bad.any() else Judged(bad, p_value)
    )


def judge_alike(scale: Scale, suspects: ScoredSamples, suspected: Bools, false_rate: float) -> Judged:
    """The bad samples of a window whose gradient, not losses, makes some of them suspected, bool [n].

    Bad samples need not be hard: one repeated sentence is easy, and its gradients add up. So only their likeness to
    each other, and difference from harmless samples, identifies them; fewer than `CROWD` are not named.
    """
    are_bad, suspect_score = suspected & scale.can_judge(suspects.corpora), None
    for _ in range(2):
        if are_bad.any():
            suspect_score = Score(scale, suspects, are_bad, losses=False)
            are_bad = suspect_score.name_bad(false_rate)
    if suspect_score is None or are_bad.sum() < CROWD:
        return Judged(np.zeros(suspected.shape, dtype=bool), 1.0)
    # The minimum of a few very similar samples is too strict for the rest of their region; harmless ones lie far below.
    return Judged(are_bad, 1.0, suspect_score, (_bar(suspect_score, are_bad) + suspect_score.usual) / 2)


def _bar(score: Score, bad: Bools) -> float:
    return max(score.usual, float(score.suspects[bad].min()))
