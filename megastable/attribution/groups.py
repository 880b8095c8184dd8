"""Find bad samples among many: individual outliers, and crowds in which no sample is extraordinary alone.

Text has heavy tails: among thousands of harmless samples some are far out, and a fixed bound finds a culprit in every
large batch. So a suspect is measured by how often harmless samples of its corpus are as bad (a conformal p-value), and
only as many are bad as chance does not explain (Benjamini and Hochberg 1995): if all are harmless, some are called bad
in at most the stated share of the cases, for any distribution (Bates, Candes, Lei, Romano and Sesia, "Testing for
outliers with conformal p-values", Annals of Statistics 2023).

Individuals (`bad_by_loss`): as bad as hardly any harmless sample, by the loss alone.
Crowds: first the window as a whole must be worse than as many harmless samples drawn at random (`group_test`, a
permutation test); then a score names those that differ from harmless samples (scores.py). The score learns from the
suspects themselves, and is calibrated on harmless samples that it did not learn from (`crowd`; AdaDetect, see
scores.py), which preserves the false discovery rate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

SCALE_FLOOR = 0.05  # nats: minimum spread of samples of one kind of text; a smaller MAD is chance
ENOUGH = 48  # harmless samples required to judge a corpus
GROUP = 64  # harmless samples per median and MAD: fewer are too noisy, more span a falling loss
FALSE = 0.03  # false discovery rate; also the rate of false convictions if all are harmless
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
    z, centre, scale = [], 0.0, 1.0
    for group in np.array_split(known, max(1, min(8, known.size // GROUP))):
        early, late = (float(np.median(half)) for half in np.array_split(group, 2))
        line = (early + late) / 2 + (late - early) * np.linspace(-1.0, 1.0, group.size)
        scale = max(SCALE_FLOOR, 1.4826 * float(np.median(np.abs(group - line))))
        centre = float(line[-1])  # the median of the late half
        z.append((group - line) / scale)
    return Usual(np.concatenate(z), centre, scale, MEDIAN_ERROR / np.sqrt(group.size / 2))


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
        for corpus in np.unique(corpora).tolist():
            known = np.isfinite(losses) & (corpora == corpus)
            if known.sum() >= ENOUGH:
                self.of[corpus] = standardize(losses[known])
                self.z[known] = self.of[corpus].z

    def far_out(self, losses: Floats, corpora: Int64s) -> Floats:
        """How far out each loss [n] is for its corpus, fp64 [n]: (x - median) / (1.4826 MAD), Iglewicz and Hoaglin
        1993, of the latest harmless ones. nan if too few are known, inf if the loss is not finite."""
        z = np.full(losses.shape, np.nan)
        for corpus, own in self.of.items():
            members = corpora == corpus
            z[members] = (losses[members] - own.centre) / own.scale
        return np.where(np.isfinite(losses), z, np.inf)

    def compare(self, losses: Floats, corpora: Int64s, shift: float = 0.0) -> tuple[Floats, Floats]:
        """How far out each loss [n] is for its corpus, beyond `shift`, and how often a harmless one is as far out: z
        and p, fp64 [n]; p is 1 where z is nan, and 0 if the loss is not finite."""
        z, p = self.far_out(losses, corpora) - shift, np.ones(losses.shape)
        # The scatter differs between corpora, and is soon known; their tails are known late, but differ less.
        everyone = np.concatenate([np.empty(0), *(own.z for own in self.of.values())])
        for corpus, own in self.of.items():
            members = corpora == corpus
            p[members] = chances(z[members], own.z if own.z.size >= TAIL_KNOWN else everyone)
        p[~np.isfinite(losses)] = 0.0
        return z, p

    def error(self, corpora: Int64s | None = None) -> float:
        """Standard error that the z of all samples of a corpus share, for the one with the fewest samples among
        `corpora`; None: among all."""
        chosen = (own for corpus, own in self.of.items() if corpora is None or (corpora == corpus).any())
        return max((own.error for own in chosen), default=0.0)


def shared_shift(z: Floats, bad: Bools) -> float:
    """How far all samples of a window [n] lie above their records, in z: the median of those that are not bad, as
    measured on the same state; 0 if these are few, or fewer than the bad, or do not lie higher."""
    rest = z[~bad & np.isfinite(z)]
    return max(0.0, float(np.median(rest))) if rest.size >= max(ENOUGH // 2, bad.sum()) else 0.0


def chances(z: Floats, usual: Floats) -> Floats:
    """For each z, how often a harmless sample [m] is as bad, or slightly more.

    Adds one standard error, as one reference serves many suspects.
    """
    beyond = _count_beyond(z, usual)
    share = np.minimum(1.0, (beyond + np.sqrt(beyond)) / (usual.size + 1))
    if usual.size < TAIL_KNOWN:
        return np.asarray(share)
    worst = max(1.0, float(usual.max()))
    return np.asarray(share * (worst / np.maximum(z, worst)) ** TAIL)


def _count_beyond(suspects: Floats, harmless: Floats) -> Int64s:
    """How many harmless samples [m] are as bad as each suspect [n], and one."""
    return np.asarray(1 + harmless.size - np.searchsorted(np.sort(harmless), suspects, side="left"))


def bad_by_loss(z: Floats, p: Floats, threshold: float) -> Bools:
    """The suspects [n] that are bad (z above `threshold`) in excess of what harmless samples explain.

    A few must be as bad as hardly any harmless sample; many may be as bad as some are. If most are far out together,
    the individual threshold is lower.
    """
    known = np.nan_to_num(z, nan=0.0)
    most = known > MOST * threshold
    far = most if 2 * most.sum() >= max(z.size, 2 * CROWD) else known > threshold
    bad, known_p = np.zeros(z.shape, dtype=bool), np.where(np.isnan(z), np.nan, p)
    for innocent, least in ((FALSE, 1), (CROWD_FALSE, CROWD)):
        named = far & fewer_false(known_p, innocent)
        if named.sum() >= least:
            bad |= named
    return bad


def fewer_false(p: Floats, innocent: float, nulls: float | None = None) -> Bools:
    """Which p-values [n] are named if the share `innocent` of those may be false (Benjamini and Hochberg 1995). nulls:
    how many are harmless; None: as many as are known."""
    ascending = np.sort(p[~np.isnan(p)])
    nulls = max(1, ascending.size) if nulls is None else nulls
    passed = np.flatnonzero(ascending <= innocent * np.arange(1, ascending.size + 1) / nulls)
    return np.asarray(p <= ascending[passed[-1]]) if passed.size else np.zeros(p.shape, dtype=bool)


# Crowds


def robust(values: Floats) -> tuple[float, float]:
    """Median and 1.4826 MAD."""
    middle = float(np.median(values))
    return middle, max(1e-6, 1.4826 * float(np.median(np.abs(values - middle))))


def group_test(suspects: Floats, harmless: Floats, error: float) -> float:
    """How often as many random harmless samples, out of [m], are on average as bad as the suspects [n]: a permutation
    test with `DRAWS` draws (at least 1 / 10,000). error: standard error of the suspects' common reference."""
    if not suspects.size or harmless.size < ENOUGH:
        return 1.0
    random = np.random.default_rng(0)  # the same on all ranks
    size, mean = suspects.size, float(suspects.mean())
    if size <= 512:
        drawn = random.choice(harmless, (DRAWS, size)).mean(axis=1)
    else:  # the mean of this many is normal
        drawn = random.normal(harmless.mean(), harmless.std() / np.sqrt(size), DRAWS)
    drawn = drawn + random.normal(0.0, error, DRAWS)
    return float(1 + (drawn >= mean).sum()) / (DRAWS + 1)


def crowd(suspects: Floats, harmless: Floats, innocent: float) -> Bools:
    """The suspects [n] that differ from harmless samples [m], with a share of false ones of at most `innocent`.

    Conformal p-values; Benjamini and Hochberg's procedure with Storey's estimate of how many are harmless ("A direct
    approach to false discovery rates", JRSS B 2002), which is less strict if most are bad.
    """
    if not suspects.size or harmless.size < ENOUGH:
        return np.zeros(suspects.shape, dtype=bool)
    p = conformal(suspects, harmless)
    nulls = min(float(suspects.size), (1 + float((p > 0.5).sum())) / 0.5)
    return fewer_false(p, innocent, nulls) & (p <= 0.5)


def between(bad: Floats, harmless: Floats) -> float:
    """The bar between two kinds, equally far from both in their own robust deviations: if they lie far apart, the false
    discoveries that a rate allows would all lie in between."""
    (middle, scale), (usual, width) = robust(bad), robust(harmless)
    scale = max(scale, width / 2)
    return (middle * width + usual * scale) / (scale + width)


def conformal(suspects: Floats, harmless: Floats) -> Floats:
    """How often a harmless sample [m] is as bad as each suspect: fp64 [n]."""
    return np.asarray(_count_beyond(suspects, harmless) / (harmless.size + 1))


def suspect_worst(badness: Floats, harmless: Floats) -> Bools:
    """The samples [n] that are suspected at first: as bad as the worst tenth of harmless samples; if that is hardly
    any, the worst few."""
    p = conformal(badness, harmless)
    chosen = p <= SUSPECTED
    return chosen if chosen.sum() >= 2 else p <= np.sort(p)[min(3, p.size - 1)]
