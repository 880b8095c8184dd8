"""Who of many is guilty: individuals that no harmless sample is like, and crowds of which none is extraordinary alone.

Text has heavy tails: among thousands of harmless samples some are far out, and a fixed bound finds a culprit in every
large batch. So a suspect is measured by how often harmless samples of its corpus are as bad (a conformal p-value), and
guilty are so many of them as chance alone would hardly bring (Benjamini and Hochberg 1995): where all are harmless,
some are called guilty in at most the stated share of the cases, whatever the distribution (Bates, Candes, Lei, Romano
and Sesia, "Testing for outliers with conformal p-values", Annals of Statistics 2023).

Individuals (`guilty_by_loss`): as bad as hardly any harmless sample, by its loss alone.
Crowds: first the window as a whole must be worse than as many harmless samples drawn at random are (`group_test`, a
permutation test); then those are named that a score tells from harmless samples (scores.py). The score learns from the
suspects themselves, and is calibrated on harmless samples that it did not learn from (`crowd`; AdaDetect, see
likeness.py): the false discovery rate stays what it says.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

SCALE_FLOOR = 0.05  # nats: samples of one kind of text lie at least so far apart; a MAD below it is luck
ENOUGH = 48  # harmless samples of a corpus, below which nothing is said of it
GROUP = 64  # harmless samples that a median and a MAD are taken of: fewer make both luck, more span a falling loss
FALSE = 0.03  # share of the guilty that may be innocent; and how often some are guilty where nobody is
# The same for so many at once: chance brings 6 where 1.5 are expected once in 200 times.
CROWD, CROWD_FALSE = 6, 0.25
MOST = 0.7  # of the threshold, beyond which suspects are bad where at least half of all are
TAIL = 3.0  # beyond the worst harmless sample, chances fall with this power: Student t, 3 degrees; text is not as bad
TAIL_KNOWN = 100  # harmless samples from which on the worst of them says where that tail begins
MEDIAN_ERROR = 1.2533  # standard error of a median of n normal numbers, times sqrt(n)
DRAWS = 9999  # random groups of harmless samples that a window is compared with
ACCUSED = (
    0.1  # share of harmless samples that are as bad as those whose tokens are taken for those of the guilty
)


@dataclass(frozen=True)
class Usual:
    """z of harmless samples of a corpus among their contemporaries, oldest first, fp64 [m]; centre and scale of the
    latest of them, nats; error: standard error of the centre, in scales."""

    z: Floats
    centre: float
    scale: float
    error: float


def standardize(known: Floats) -> Usual:
    """Of losses [m], oldest first.

    Losses fall, and come apart: contemporaries are compared with a line through the medians of their halves.
    """
    z, centre, scale = [], 0.0, 1.0
    for group in np.array_split(known, max(1, min(8, known.size // GROUP))):
        early, late = (float(np.median(half)) for half in np.array_split(group, 2))
        line = (early + late) / 2 + (late - early) * np.linspace(-1.0, 1.0, group.size)
        scale = max(SCALE_FLOOR, 1.4826 * float(np.median(np.abs(group - line))))
        centre = float(line[-1])  # the median of the late half
        z.append((group - line) / scale)
    return Usual(np.concatenate(z), centre, scale, MEDIAN_ERROR / np.sqrt(group.size / 2))


def by_corpus(harmless: Floats, of: Int64s) -> dict[int, Usual]:
    """`standardize` for each corpus of which enough is known. harmless: losses [m], oldest first, each when its sample
    was not trained on yet (one that was is no measure of new text), of: their corpora."""
    finite = np.isfinite(harmless)
    known = {int(c): harmless[finite & (of == c)] for c in np.unique(of)}
    return {c: standardize(losses) for c, losses in known.items() if losses.size >= ENOUGH}


def deviations(harmless: Floats, of: Int64s) -> Floats:
    """z of harmless samples among their contemporaries, fp64 [m]; nan of corpora of which too little is known."""
    z = np.full(harmless.shape, np.nan)
    for corpus, usual in by_corpus(harmless, of).items():
        z[np.isfinite(harmless) & (of == corpus)] = usual.z
    return z


def compare(losses: Floats, corpora: Int64s, harmless: Floats, of: Int64s) -> tuple[Floats, Floats]:
    """How far out each loss [n] is for its corpus, and how often a harmless one is as far out: z and p, fp64 [n].

    harmless, of: as `by_corpus`. z: (x - median) / (1.4826 MAD), Iglewicz and Hoaglin 1993, of the latest harmless
    ones. nan and 1 where fewer than `ENOUGH` of the corpus are known; inf and 0 where a loss is not finite.
    """
    usual = by_corpus(harmless, of)
    z, p = far_out(losses, corpora, usual), np.ones(losses.shape)
    # How corpora scatter differs, and is soon known; how far their tails reach is not, but differs less.
    everyone = np.sort(np.concatenate([np.empty(0), *(own.z for own in usual.values())]))
    for corpus, own in usual.items():
        members = corpora == corpus
        p[members] = chances(z[members], np.sort(own.z) if own.z.size >= TAIL_KNOWN else everyone)
    p[~np.isfinite(losses)] = 0.0
    return z, p


def far_out(losses: Floats, corpora: Int64s, usual: dict[int, Usual]) -> Floats:
    """The z of `compare` alone, fp64 [n]: among what `by_corpus` knows."""
    z = np.full(losses.shape, np.nan)
    for corpus, own in usual.items():
        members = corpora == corpus
        z[members] = (losses[members] - own.centre) / own.scale
    return np.where(np.isfinite(losses), z, np.inf)


def shared_error(usual: dict[int, Usual]) -> float:
    """Standard error that the z of all samples of a corpus share, of the corpus of which least is known."""
    return max((own.error for own in usual.values()), default=0.0)


def shared_shift(z: Floats, guilty: Bools) -> float:
    """How far all samples of a window [n] lie above what was recorded, in z: the median of those that are not guilty,
    as the same state measured them; 0 where these are few, or fewer than the guilty, or do not lie higher."""
    rest = z[~guilty & np.isfinite(z)]
    return max(0.0, float(np.median(rest))) if rest.size >= max(ENOUGH // 2, guilty.sum()) else 0.0


def lowered(losses: Floats, corpora: Int64s, usual: dict[int, Usual], shift: float) -> Floats:
    """Losses [n], less `shift` in units of what their corpora scatter."""
    scales = np.zeros(losses.shape)
    for corpus, own in usual.items():
        scales[corpora == corpus] = own.scale
    return losses - shift * scales


def chances(z: Floats, usual: Floats) -> Floats:
    """Of each z, how often a harmless sample is as bad, or a little more often; usual: ascending.

    Luck is allowed one standard error, as one reference serves many suspects.
    """
    beyond = 1 + usual.size - np.searchsorted(usual, z, side="left")
    share = np.minimum(1.0, (beyond + np.sqrt(beyond)) / (usual.size + 1))
    if usual.size < TAIL_KNOWN:
        return np.asarray(share)
    worst = max(1.0, float(usual[-1]))
    return np.asarray(share * (worst / np.maximum(z, worst)) ** TAIL)


def guilty_by_loss(z: Floats, p: Floats, threshold: float) -> Bools:
    """The suspects [n] that are bad (z above `threshold`), and more of them than harmless samples account for.

    Few must be as bad as hardly any harmless sample is; many may be as bad as some are. Where most are far out
    together, none must be as far by itself.
    """
    known = np.nan_to_num(z, nan=0.0)
    most = known > MOST * threshold
    bad = most if 2 * most.sum() >= max(z.size, 2 * CROWD) else known > threshold
    guilty, known_p = np.zeros(z.shape, dtype=bool), np.where(np.isnan(z), np.nan, p)
    for innocent, least in ((FALSE, 1), (CROWD_FALSE, CROWD)):
        named = bad & fewer_false(known_p, innocent)
        if named.sum() >= least:
            guilty |= named
    return guilty


def fewer_false(p: Floats, innocent: float) -> Bools:
    """Which p-values [n] are named where the share `innocent` of those may be false (Benjamini and Hochberg 1995)."""
    ascending = np.sort(p[~np.isnan(p)])
    passed = np.flatnonzero(ascending <= innocent * np.arange(1, ascending.size + 1) / max(1, ascending.size))
    return np.asarray(p <= ascending[passed[-1]]) if passed.size else np.zeros(p.shape, dtype=bool)


# Crowds


def robust(values: Floats) -> tuple[float, float]:
    """Median and 1.4826 MAD."""
    middle = float(np.median(values))
    return middle, max(1e-6, 1.4826 * float(np.median(np.abs(values - middle))))


def group_test(suspects: Floats, harmless: Floats, error: float) -> float:
    """How often as many samples, drawn at random from harmless ones [m], are on average as bad as the suspects [n]: a
    permutation test with `DRAWS` draws (the least that it can say is 1 / 10,000). error: standard error of what the
    suspects are measured from, which all of them share."""
    if not suspects.size or harmless.size < ENOUGH:
        return 1.0
    random = np.random.default_rng(0)  # the same on all ranks
    size, mean = suspects.size, float(suspects.mean())
    if size <= 512:
        drawn = random.choice(harmless, (DRAWS, size)).mean(axis=1)
    else:  # of so many the mean is normal
        drawn = random.normal(harmless.mean(), harmless.std() / np.sqrt(size), DRAWS)
    drawn = drawn + random.normal(0.0, error, DRAWS)
    return float(1 + (drawn >= mean).sum()) / (DRAWS + 1)


def crowd(suspects: Floats, harmless: Floats, innocent: float) -> Bools:
    """Which suspects [n] are told from harmless samples [m], of which at most the share `innocent` is.

    Conformal p-values; Benjamini and Hochberg's procedure with Storey's estimate of how many are harmless ("A direct
    approach to false discovery rates", JRSS B 2002): where most are guilty it need not be as strict.
    """
    if not suspects.size or harmless.size < ENOUGH:
        return np.zeros(suspects.shape, dtype=bool)
    p = conformal(suspects, harmless)
    nulls = min(float(suspects.size), (1 + float((p > 0.5).sum())) / 0.5)
    ascending = np.sort(p)
    passed = np.flatnonzero(ascending <= innocent * np.arange(1, p.size + 1) / nulls)
    return np.asarray(p <= min(0.5, ascending[passed[-1]])) if passed.size else np.zeros(p.shape, dtype=bool)


def between(guilty: Floats, harmless: Floats) -> float:
    """The bar between two kinds, as far from either in its own robust deviations: where they lie far apart the false
    discoveries that a rate allows would all be in between."""
    (middle, scale), (usual, width) = robust(guilty), robust(harmless)
    scale = max(scale, width / 2)
    return (middle * width + usual * scale) / (scale + width)


def conformal(suspects: Floats, harmless: Floats) -> Floats:
    """How often a harmless sample is as bad as each suspect: fp64 [n]."""
    ascending = np.sort(harmless)
    beyond = 1 + ascending.size - np.searchsorted(ascending, suspects, side="left")
    return np.asarray(beyond / (ascending.size + 1))


def accused(badness: Floats, harmless: Floats) -> Bools:
    """The suspects [n] whose tokens are taken for those of the guilty, to begin with: as bad as a tenth of harmless
    samples; where that is hardly anybody, the worst few."""
    p = conformal(badness, harmless)
    chosen = p <= ACCUSED
    return chosen if chosen.sum() >= 2 else p <= np.sort(p)[min(3, p.size - 1)]
