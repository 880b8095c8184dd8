"""The thresholds of the stability system, each with the reason of its default. Part of the tree of config/tree.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megastable.config.section import Fraction, Section


class DetectorConfig(Section):
    """What counts as a deviation; see detector.py. Lengths are in observations: steps, or lines of a sparse trace.

    The figures below are from public traces of real runs: 48,000 healthy steps, seven onsets of spikes and a slow
    divergence (docs/stability.md has what was chosen on which, and what is missed).

    Residuals are in sigma, the scatter of the last `window` accepted values: long enough for a steady estimate, short
    enough to follow the trend. min_values, warmup_steps: nothing is judged before both, but a rise of
    more than half of `explosion` (nats) above the lowest level that does not turn within start_patience observations
    (start-ups without warm-up rise by up to 40 nats, and turn within 30), and one value alone that is beyond
    `explosion`. loss_floor (nats), norm_floor (log units): the scatter is taken as at
    least that, so that the first wiggle of a constant series is nothing, and a norm that is up by a half neither, which
    late in a quiet run is 10 sigma and means nothing.

    Outlier, refused (severity 1): loss and norm of the same step beyond outlier_loss and outlier_norm; or one alone
    beyond `lone` and beyond record_margin times the farthest harmless jump of its kind that this run has shown, which
    is forgotten with a half-life of record_half_life. Single gradient norms at 13 times the usual and single hard
    batches at 15 sigma pass without harm. lone_without_norm: for the loss, where no norm can confirm it. A loss beyond
    `notice` and beyond that record is mentioned, with a severity below 1.

    Cumulative sums: a term is the residual, at most *_clip, less *_allowance; the alarm is at *_limit; the largest term
    does not count. Within five steps spikes reach 4.8 (loss) or 4.0 (joint), healthy runs 3.7 and 2.1 ever. tame: the
    norm counts less by as much as its farthest harmless jump exceeds this. drift: against the best level, a median of
    `level` values, in units of the scatter of neighbours; a slow divergence reaches 45 in 100 steps, healthy runs 3.6
    ever. forget: in sigma per observation, how fast best level and smallest scatter are given up, for data whose
    difficulty wanders. oscillation: of the residuals on either side over the smallest scatter; swings of 4 sigma are
    noticed, healthy runs reach 1.5 ever.

    false_alarms: rewinds accepted per 10,000 healthy steps. The limits above were chosen for one at most; another
    rate moves them (detector.Limits). Held on noise of every kind: `tools/bench.py noise`. What neighbouring residuals
    are worth is reduced by the root of their long-run variance, measured over scatter_memory observations, over
    scatter_usual (real healthy runs show 1.5 to 3.5 in their first thousand steps, 1 to 2 later), by scatter_most at
    most.

    An alarm that only the loss raises is one of the training if the log gradient norm lies `heat` sigma up on average
    since its onset (spikes of real runs: 2.9 and more; a rise that healed in 5 steps: 1.9), if the loss has jumped by
    `gross` nats, gross_sigma sigma and the farthest harmless jump of the run, twice at least, or if it climbs. Where no
    norm was recorded, 4 sigma since the onset, and 3 of the latest scatter, are a spike, too.
    Otherwise it is a shift: after `settle` observations the level is taken as given.

    renewal: share of the limits at which a further jump during an excursion is noticed.

    recovery: an excursion is over when the median of so many residuals is below `calm`. lasting: one that is longer
    is a plateau; spikes that heal do so in 10 to 30 steps. adapt: after so many the level is taken as given, and learnt
    anew from the last `relearn`. fall_allowance, drop_memory: a sudden fall of the loss, a shard of easy text
    (typically 100M tokens), and for how long the level before it may come back without being a spike.
    indicator_growth: factor between the first and the last third of indicator_window measurements.
    """

    window: int = Field(default=100, ge=30)
    min_values: int = Field(default=20, ge=9, le=30)
    warmup_steps: NonNegativeInt = 50
    explosion: PositiveFloat = 2.0
    start_patience: int = Field(default=100, ge=20)
    false_alarms: PositiveFloat = 1.0
    scatter_memory: PositiveInt = 1000
    scatter_usual: PositiveFloat = 2.5
    scatter_most: PositiveFloat = 3.0
    heat: PositiveFloat = 2.4
    gross: PositiveFloat = 0.6
    gross_sigma: PositiveFloat = 5.0
    settle: int = Field(default=40, ge=20)
    loss_floor: PositiveFloat = 0.005
    norm_floor: PositiveFloat = 0.2

    outlier_loss: PositiveFloat = 6.0
    outlier_norm: PositiveFloat = 4.0
    lone: PositiveFloat = 20.0
    lone_without_norm: PositiveFloat = 8.0
    notice: PositiveFloat = 6.0
    record_margin: PositiveFloat = 2.0
    record_half_life: PositiveInt = 10000

    spike_clip: PositiveFloat = 6.0
    spike_allowance: PositiveFloat = 2.0
    spike_limit: PositiveFloat = 4.0
    joint_loss_clip: PositiveFloat = 2.0
    joint_norm_clip: PositiveFloat = 4.0
    joint_allowance: PositiveFloat = 2.5
    joint_limit: PositiveFloat = 3.2
    tame: PositiveFloat = 10.0
    level: PositiveInt = 30
    drift_clip: PositiveFloat = 3.0
    drift_allowance: PositiveFloat = 1.7
    drift_limit: PositiveFloat = 10.0
    forget: NonNegativeFloat = 0.001
    oscillation_clip: PositiveFloat = 4.0
    oscillation_allowance: PositiveFloat = 0.9
    oscillation_limit: PositiveFloat = 3.0

    renewal: Fraction = 0.6
    recovery: PositiveInt = 4
    calm: PositiveFloat = 1.0
    lasting: PositiveInt = 50
    adapt: PositiveInt = 150
    relearn: int = Field(default=50, ge=30)
    fall_allowance: PositiveFloat = 1.5
    drop_memory: PositiveInt = 300

    indicator_window: int = Field(default=24, ge=9)
    indicator_growth: PositiveFloat = 2.0


class PolicyConfig(Section):
    """What is done about one, and how often; see policy.py.

    discards: the update that would be refused as this many within 16 steps leads to a rewind instead: more would cost
    more data than a rewind costs steps. rewinds, swaps, handovers per `budget_window` steps of new ground: what PaLM
    needed in a whole run (arXiv:2204.02311 section 5.1, about 20 times) is far below; more means that the cause is not
    the data.
    data_rewinds: the same for rewinds after which samples were convicted at `odds_swap`; a corpus with some per cent
    of bad samples needs many. A budget that is spent pauses the remedy, not the run: it trains on with refusals only,
    and a person is told; last_resort=stop ends it with code 76 instead.

    odds_*: log10 odds of the cause against the next best that a remedy needs (odds.py has the account); a rewind
    needs none. odds_cap, odds_fall_back: 10 to 1, as both end by themselves. odds_cut, odds_swap: 100 to 1.
    odds_handover: 10 to 1 that the state is bad, which no data and no rate mends.

    cuts: how often the rate is limited in a run, an eighth of the rate is no training any more; the last one is for
    good. cut_rest: steps of new ground after which a limit is lifted, twice as many after each return; 0 = never.
    fallbacks: from FP8, of the whole run; the last one is for good: what was tried so often is no bad luck. fp8_rest:
    steps of new ground without it after the first, twice as many after each further one; an incident is over long
    before. recur_steps: an incident with nobody guilty so soon after another, or after a limit was lifted, has come
    back. verify_steps: after an action the loss must be back on its trend within so many steps. Spikes that heal do
    so in 10 to 30 steps on the public traces (docs/stability.md).
    """

    discards: PositiveInt = 4
    non_finite: PositiveInt = 3  # the same of updates that are not finite
    budget_window: PositiveInt = 2000
    rewinds: NonNegativeInt = 8
    data_rewinds: NonNegativeInt = 32
    odds_fall_back: float = 1.0
    odds_cap: float = 1.0
    odds_cut: float = 2.0
    odds_swap: float = 2.0
    odds_handover: float = 1.0
    last_resort: Literal["train_on", "stop"] = "train_on"
    cuts: NonNegativeInt = 3
    cut_rest: NonNegativeInt = 200
    fallbacks: NonNegativeInt = 3  # 0 = FP8 is never left
    fp8_rest: NonNegativeInt = 200  # 0 = for good
    swaps: NonNegativeInt = 2
    handovers: NonNegativeInt = 2
    recur_steps: PositiveInt = 200
    verify_steps: PositiveInt = 30
    swap_after: PositiveInt = (
        4  # incidents by data of a corpus in a window before it is left out, if there is another
    )
    swap_most: Fraction = 0.5  # of the blend that may be swapped out: with less left it is another run
    hardware: PositiveInt = 3  # irreproducible incidents in a window: then it is a host, not luck
    restarts: NonNegativeInt = 20  # after failures of processes or hosts, in a window
    barren: PositiveInt = 5  # of them in a row without a step of new ground
    same_place: PositiveInt = 3  # the same failure at the same step so often is data or code, not luck
    same_host: PositiveInt = 3  # failures of one host among several, in a window: then it is the host
    # Of the learning rate; GLM-130B and OPT-175B halved it by hand.
    cut_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    rewarm_steps: NonNegativeInt = 50  # updates from a tenth of the cut rate back to it


class SnapshotConfig(Section):
    """Rewind points in host memory; see snapshot.py.

    interval: steps between two. A rewind loses half of it on average, at most `interval` + the steps until something
    is noticed; a copy of 12 bytes a parameter costs about a hundredth of a step. keep: how many, the newest and
    ever older ones: a slow divergence is noticed late.
    """

    interval: NonNegativeInt = 10  # 0 = none
    keep: PositiveInt = 4
    memory_gib: PositiveFloat | None = None  # host memory per rank; None = a quarter of what is free


class AttributionConfig(Section):
    """Who is guilty; see attribution.py, groups.py, scores.py, region.py.

    threshold: robust z of a sample's loss among its corpus's, from which on it may be guilty by itself. significance:
    how often a window of harmless samples passes for a bad crowd (a permutation test), innocent: share of the named of
    a crowd that may be innocent (false discovery rate); adjacent_significance: the first where the window lies next to
    what was just skipped, as data is the likely cause there. gradients: measured at most where no loss is bad; each
    costs a step. More only to halve one batch down to one sample. window: steps since the onset whose samples are
    suspects; later ones follow from the first. reference: harmless samples measured, of before the rewind point, of a
    corpus with few recorded. behind: steps before the rewind point that are no measure of harmless tails, as the region
    may have begun there. region: steps of time that it may take at most to find where a bad region ends and who is
    guilty inside; a forward pass of a batch is a third of a step. Where likeness tells, a hundred bad samples are
    measured, and the rest is inferred.
    """

    threshold: PositiveFloat = 6.0
    significance: Fraction = 0.001
    adjacent_significance: Fraction = 0.05
    innocent: Fraction = 0.03
    gradients: NonNegativeInt = 16
    window: PositiveInt = 16
    reference: PositiveInt = 128
    behind: NonNegativeInt = 16
    region: NonNegativeInt = 40

    @model_validator(mode="before")
    @classmethod
    def _as_it_was(cls, tree: Any) -> Any:
        """Recipes of before regions were grown have `ahead`, which `region` took the place of."""
        return {k: v for k, v in tree.items() if k != "ahead"} if isinstance(tree, dict) else tree


class SampleConfig(Section):
    """Single samples over time, and refused batches; see samples.py."""

    # Trickles that are none, per 10,000 healthy steps, at most; and as many new kinds of text that are none.
    false_alarms: PositiveFloat = 0.1
    # Groups of batches that are examined for nothing, likewise: it takes some steps of time and convicts nobody.
    examinations: PositiveFloat = 1.0
    known: PositiveInt = 512  # scored samples of a corpus, before which it is not judged
    quiet_steps: PositiveInt = 4  # on the trend, after which a refused batch is examined
    measured: PositiveInt = 256  # suspects measured again at most, the worst first
    # Batches looked ahead at most, for more of the kind; each costs a third of a step. In the whole run one more for
    # every so many steps: 3 % of its time.
    ahead: NonNegativeInt = 32
    ahead_every: PositiveInt = 10


class SignsConfig(Section):
    """Signs of a rate that is too high from the start; see signs.py. Each is a warning, told once; nobody acts on it.

    Chosen on runs of 3 layers of 128 on Python source, measured on two other texts (docs/stability.md, with the error
    rates). norms, looks: the steps after which weights and update are measured, and every block is looked into; () =
    never. The first look is what later ones are compared with. change: of what a layer puts out by one update,
    relative to itself. growth, rms: of the residual stream, both, in models at least `narrowest` wide: narrower ones
    bear a thousandfold growth (docs/stability.md). growth is over the first look, whose scale is that of the initial
    embedding: healthy runs, too, grow 46 times, to 1.7. rms: the geometric middle of that and 222, that of `no-qk-norm`
    at step 20. collapse: share of its first entropy that is left of a block's attention. below_unigram: nats that the
    loss must lie below the unigram entropy when the rates of all updates add up to `rate_sum`, after `updates` at
    least. sample: tokens of the corpus whose unigram entropy that is.
    """

    enabled: bool = True
    norms: tuple[PositiveInt, ...] = (1, 2, 5, 10, 20, 50)
    looks: tuple[PositiveInt, ...] = (1, 20, 50, 100)
    change: PositiveFloat = 0.25
    growth: PositiveFloat = 40.0
    rms: PositiveFloat = 20.0
    narrowest: PositiveInt = 128
    collapse: Fraction = 0.25
    below_unigram: NonNegativeFloat = 0.3
    rate_sum: PositiveFloat = 0.25
    updates: PositiveInt = 20
    sample: PositiveInt = 250_000


class StabilityConfig(Section):
    enabled: bool = True  # False: only non-finite updates are refused
    dry_run: bool = False  # report what would be done; refuse nothing but non-finite updates
    max_discards: PositiveInt = 20  # updates refused in a row before the run stops as unstable
    detector: DetectorConfig = DetectorConfig()
    policy: PolicyConfig = PolicyConfig()
    snapshots: SnapshotConfig = SnapshotConfig()
    attribution: AttributionConfig = AttributionConfig()
    samples: SampleConfig = SampleConfig()
    signs: SignsConfig = SignsConfig()
