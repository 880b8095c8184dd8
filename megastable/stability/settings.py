"""The thresholds of the stability system, each with the reason of its default. Part of the tree of config.py."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megastable.part import Fraction, Part


class DetectorConfig(Part):
    """What counts as a deviation; see detector.py. Lengths are in observations: steps, or lines of a sparse trace.

    The figures below are from public traces of real runs: 29,000 healthy steps, seven onsets of spikes and a slow
    divergence (docs/stability.md).

    Residuals are in sigma, the scatter of the last `window` accepted values: long enough for a steady estimate, short
    enough to follow the trend. min_values, warmup_steps: nothing is judged before both, unless the loss rises by
    `explosion` nats above all that was seen. loss_floor (nats), norm_floor (log units): the scatter is taken as at
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


class PolicyConfig(Part):
    """What is done about one, and how often; see policy.py.

    discards: whole batches refused in one incident before the ladder is climbed; the fifth would cost more data than
    a rewind costs steps. rewinds, swaps, handovers per `budget_window` steps of new ground: what PaLM needed in a whole
    run (arXiv:2204.02311 section 5.1, about 20 times) is far below; more means that the cause is not the data. cuts: of
    the whole run, an eighth of the rate is no training any more. fallbacks: from FP8, of the whole run; the last one
    is for good: what was tried so often is no bad luck. fp8_rest: steps of new ground without it after the first, twice
    as many after each further one; an incident is over long before. recur_steps: an incident with nobody guilty so soon
    after another is one of the learning rate. verify_steps: after an action the loss must be back on its trend within
    so many steps. Spikes that heal do so in 10 to 30 steps on the public traces (docs/stability.md).
    """

    discards: PositiveInt = 4
    non_finite: PositiveInt = 3  # discards for non-finite numbers in one incident before a rewind
    budget_window: PositiveInt = 2000
    rewinds: NonNegativeInt = 8
    cuts: NonNegativeInt = 3
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


class SnapshotConfig(Part):
    """Rewind points in host memory; see snapshot.py.

    interval: steps between two. A rewind loses half of it on average, at most `interval` + the steps until something
    is noticed; a copy of 12 bytes a parameter costs about a hundredth of a step. keep: how many, the newest and
    ever older ones: a slow divergence is noticed late.
    """

    interval: NonNegativeInt = 10  # 0 = none
    keep: PositiveInt = 4
    memory_gib: PositiveFloat | None = None  # host memory per rank; None = a quarter of what is free


class AttributionConfig(Part):
    """Who is guilty; see attribution.py."""

    threshold: PositiveFloat = 6.0  # robust z of a sample's loss among its corpus's
    gradients: NonNegativeInt = 16  # gradients measured at most where no loss is bad; each costs a step
    window: PositiveInt = (
        16  # steps since the onset whose samples are suspects; later ones follow from the first
    )
    reference: PositiveInt = (
        128  # harmless samples measured: of before the rewind point, of a corpus with few recorded
    )
    ahead: NonNegativeInt = 16  # steps looked ahead at most, for the end of a bad region


class StabilityConfig(Part):
    enabled: bool = True  # False: only non-finite updates are refused
    dry_run: bool = False  # report what would be done; refuse nothing but non-finite updates
    max_discards: PositiveInt = 20  # updates refused in a row before the run stops as unstable
    detector: DetectorConfig = DetectorConfig()
    policy: PolicyConfig = PolicyConfig()
    snapshots: SnapshotConfig = SnapshotConfig()
    attribution: AttributionConfig = AttributionConfig()
