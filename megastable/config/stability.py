"""Defines the thresholds of the stability system, each with the reason of its default. Part of config/tree.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megastable.config.section import Fraction, Section


class DetectorConfig(Section):
    """What counts as a deviation (guard/detector.py). Lengths are in observations: steps, or lines of a sparse
    trace. Sigma is the scatter of the last `window` accepted values.

    The defaults are from public traces of real runs: 48,000 healthy steps, seven onsets of spikes and a slow divergence
    (docs/stability-method.md has what was chosen on which, and what is missed).

    Start: nothing is judged before `min_values` and `warmup_steps`, but a rise of more than half of `explosion` above
    the lowest level that does not turn within `start_patience` (start-ups without warm-up rise by up to 40 nats, and
    turn within 30), and one value alone that is beyond `explosion`.

    Outlier, refused (severity 1): loss and norm of the same step beyond `outlier_loss` and `outlier_norm`; or one alone
    beyond `lone` and beyond `record_margin` times the farthest harmless jump of its kind in this run. Single gradient
    norms at 13 times the usual and single hard batches at 15 sigma pass without harm.

    Cumulative sums: a term is the residual, clipped at `_clip`, less `_allowance`; the alarm is at `_limit`; the
    largest term does not count. Within five steps spikes reach 4.8 (loss) or 4.0 (joint), healthy runs 3.7 and 2.1
    ever. A slow divergence reaches a drift of 45 in 100 steps, healthy runs 3.6 ever. Swings of 4 sigma are noticed;
    healthy runs reach an oscillation of 1.5 ever. The limits are for `false_alarms` = 1; another rate moves them.
    Residuals are divided by the root of their long-run variance, as neighbours correlate (1.5 to 3.5 in the first
    thousand steps of real healthy runs, 1 to 2 later).

    An alarm that only the loss raises is one of the training if the gradient norm is up by `heat` (spikes of real runs:
    2.9 and more; a rise that healed in 5 steps: 1.9), if the loss has jumped by `gross`, by `gross_sigma` and by the
    farthest harmless jump of the run, twice at least, or if it climbs. Where no norm was recorded, 4 sigma since the
    onset, and 3 of the latest scatter, are a spike, too. Otherwise it is a shift of the data.
    """

    window: int = Field(default=100, ge=30)
    """Accepted values that trend and scatter are estimated from: enough for a steady estimate, few enough to follow.
    [observations]"""
    min_values: int = Field(default=20, ge=9, le=30)
    """Accepted values before anything is judged. [observations]"""
    warmup_steps: NonNegativeInt = 50
    """Steps before anything is judged. [steps]"""
    explosion: PositiveFloat = 2.0
    """At the start: a rise of the loss that is refused at once. [nats]"""
    start_patience: int = Field(default=100, ge=20)
    """At the start: how long a rise may take to turn. [observations]"""
    false_alarms: PositiveFloat = 1.0
    """Rewinds accepted per 10,000 healthy steps; checked on noise of every kind by `megastable bench noise`."""
    scatter_memory: PositiveInt = 1000
    """Span over which the long-run variance is measured. [observations]"""
    scatter_usual: PositiveFloat = 2.5
    """Long-run variance that the limits are calibrated for."""
    scatter_most: PositiveFloat = 3.0
    """Largest divisor of residuals."""
    heat: PositiveFloat = 2.4
    """Mean log gradient norm since the onset that confirms an alarm of the loss. [sigma]"""
    gross: PositiveFloat = 0.6
    """Jump of the loss that is an alarm without confirmation by the norm. [nats]"""
    gross_sigma: PositiveFloat = 5.0
    """As `gross`, relative to the scatter. [sigma]"""
    settle: int = Field(default=40, ge=20)
    """Time after a shift until the new level is accepted. [observations]"""
    loss_floor: PositiveFloat = 0.005
    """Least scatter of the loss, so that the first wiggle of a constant series is ignored. [nats]"""
    norm_floor: PositiveFloat = 0.2
    """Least scatter of the log gradient norm: half as much again is 10 sigma late in a quiet run, and harmless. [log
    units]"""

    outlier_loss: PositiveFloat = 6.0
    """Loss of an outlier, if the norm is one, too. [sigma]"""
    outlier_norm: PositiveFloat = 4.0
    """Log gradient norm of an outlier, if the loss is one, too. [sigma]"""
    lone: PositiveFloat = 20.0
    """Outlier of either alone. [sigma]"""
    lone_without_norm: PositiveFloat = 8.0
    """Outlier of the loss if no norm can confirm it. [sigma]"""
    notice: PositiveFloat = 6.0
    """Loss that is reported, with a severity below 1, if no harmless one was farther out. [sigma]"""
    record_margin: PositiveFloat = 2.0
    """Times the farthest harmless jump that an outlier of one alone must exceed."""
    record_half_life: PositiveInt = 10000
    """Half-life with which the farthest harmless jump is forgotten. [observations]"""

    spike_clip: PositiveFloat = 6.0
    """Sum of the loss: largest residual that counts. [sigma]"""
    spike_allowance: PositiveFloat = 2.0
    """Sum of the loss: subtracted from each residual. [sigma]"""
    spike_limit: PositiveFloat = 4.0
    """Sum of the loss: alarm of a spike. [sigma]"""
    joint_loss_clip: PositiveFloat = 2.0
    """Sum of loss and log gradient norm: largest residual of the loss that counts. [sigma]"""
    joint_norm_clip: PositiveFloat = 4.0
    """Sum of loss and log gradient norm: largest residual of the norm that counts. [sigma]"""
    joint_allowance: PositiveFloat = 2.5
    """Sum of loss and log gradient norm: subtracted from each pair. [sigma]"""
    joint_limit: PositiveFloat = 3.2
    """Sum of loss and log gradient norm: alarm of a spike. [sigma]"""
    tame: PositiveFloat = 10.0
    """Beyond this farthest harmless jump of the norm, the norm is scaled down in proportion. [sigma]"""
    level: PositiveInt = 30
    """Values whose median is a level; drift is counted from the best one. [observations]"""
    drift_clip: PositiveFloat = 3.0
    """Sum above the best level: largest residual that counts. [scatters of neighbours]"""
    drift_allowance: PositiveFloat = 1.7
    """Sum above the best level: subtracted from each residual. [scatters of neighbours]"""
    drift_limit: PositiveFloat = 10.0
    """Sum above the best level: alarm of a drift. [scatters of neighbours]"""
    forget: NonNegativeFloat = 0.001
    """How fast best level and smallest scatter are forgotten, for data whose difficulty wanders. [sigma per
    observation]"""
    oscillation_clip: PositiveFloat = 4.0
    """Sums on either side: largest residual that counts. [smallest scatters]"""
    oscillation_allowance: PositiveFloat = 0.9
    """Sums on either side: subtracted from each residual. [smallest scatters]"""
    oscillation_limit: PositiveFloat = 3.0
    """Sums on either side: alarm of an oscillation, if both reach it. [smallest scatters]"""

    renewal: Fraction = 0.6
    """Share of the limits at which a further jump during an excursion is noticed."""
    recovery: PositiveInt = 4
    """Latest residuals whose median decides whether an excursion is over. [observations]"""
    calm: PositiveFloat = 1.0
    """An excursion is over when that median is below this. [sigma]"""
    lasting: PositiveInt = 50
    """A longer excursion is a plateau; spikes that heal do so in 10 to 30 steps. [observations]"""
    adapt: PositiveInt = 150
    """Length of an excursion after which its level is accepted. [observations]"""
    relearn: int = Field(default=50, ge=30)
    """Latest values from which a new level is learnt. [observations]"""
    fall_allowance: PositiveFloat = 1.5
    """Sum of a sudden fall of the loss, as of a shard of easy text: subtracted from each residual. [sigma]"""
    drop_memory: PositiveInt = 300
    """How long a return to the level before such a fall is no spike. [observations]"""


# In the order of their intrusiveness.
RemedyName = Literal[
    "cap_lr", "rewarm", "reset_moments", "clip", "qk_clip", "z_loss", "beta2", "leave_fp8", "other_kernels",
    "swiglu_clamp", "cut_lr",
]  # fmt: skip


class PolicyConfig(Section):
    """Remedies for a deviation, and their budgets (guard/policy.py).

    Budgets are per `budget_window` steps of new ground. PaLM needed far less in a whole run (arXiv:2204.02311, section
    5.1: about 20 rewinds); more means that the cause is not the data. A spent budget pauses the remedy, not the run,
    which trains on with refusals only and alerts a person.

    Which remedy is taken, `remedies`, is decided by trying them (attribution/remedies.py).
    """

    discards: PositiveInt = 4
    """Refused updates within 16 steps that lead to a rewind: more would cost more data than a rewind costs steps.
    [updates]"""
    non_finite: PositiveInt = 3
    """As `discards`, for non-finite updates. [updates]"""
    budget_window: PositiveInt = 2000
    """Window of the budgets. [steps]"""
    rewinds: NonNegativeInt = 8
    """Budget of rewinds."""
    data_rewinds: NonNegativeInt = 32
    """Budget of rewinds for samples that a trial clearly found bad: many, for corpora with some per cent of them."""
    remedies: tuple[RemedyName, ...] = get_args(RemedyName)
    """What is tried where other data does not help, each in a branch from the same state: no more than the rate of the
    good state, if the rate jumped, or the limit that was lifted last; a warm-up from a tenth of the rate; the same and
    moments of zero (SPAM, arXiv:2501.06842); clipping at a quarter of `optimizer.clip`; QK-clip at 100; ten times the
    z-loss; a lower beta2; no FP8; plain PyTorch in place of all kernels; `model.swiglu_clamp` at 10; `cut_factor` times
    the rate. In the order of their intrusiveness."""
    last_resort: Literal["train_on", "stop"] = "train_on"
    """Reaction when no remedy is left; `stop` ends the run with exit code 76."""
    cuts: NonNegativeInt = 3
    """Learning-rate limits in a run: an eighth of the rate hardly trains. The last one is permanent."""
    cut_rest: NonNegativeInt = 200
    """When a limit is lifted, twice as long after each return; 0: never. [steps]"""
    fallbacks: NonNegativeInt = 3
    """Times that a run leaves FP8, the last one permanently; 0: never, and no kernel either."""
    fp8_rest: NonNegativeInt = 200
    """Without FP8 after the first time, twice as long after each further one; 0: permanently. [steps]"""
    swaps: NonNegativeInt = 2
    """Budget of corpora left out."""
    handovers: NonNegativeInt = 2
    """Budget of resumes from an older checkpoint."""
    recur_steps: PositiveInt = 200
    """An incident without a conviction this soon after another, or after a lifted limit, is a recurrence. [steps]"""
    wait: Annotated[int, Field(ge=0, le=400)] = 0
    """For how long trouble is left to itself that a branch without any change makes again, and heals: updates that
    stand out are refused, and what is not over in time is rewound; 0: never. [steps]"""
    verify_steps: PositiveInt = 30
    """How soon the loss must be back on its trend after an action; spikes that heal do so in 10 to 30 steps. [steps]"""
    swap_after: PositiveInt = 4
    """Data incidents of a corpus, by clear trials, after which the next one tries the run without it. [incidents]"""
    swap_most: Fraction = 0.5
    """Largest share of the blend that may be left out."""
    hardware: PositiveInt = 3
    """Irreproducible incidents in a window that blame a host. [incidents]"""
    restarts: NonNegativeInt = 20
    """Budget of restarts after failures of processes or hosts."""
    barren: PositiveInt = 5
    """Failures in a row without a step of new ground that are not transient. [failures]"""
    same_place: PositiveInt = 3
    """Failures at the same step, alike, that are due to data or code. [failures]"""
    same_host: PositiveInt = 3
    """Failures of one of several hosts in a window that blame the host. [failures]"""
    cut_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """What a cut multiplies the learning rate by; GLM-130B (arXiv:2210.02414) and OPT-175B (arXiv:2205.01068) halved it
    by hand."""
    rewarm_steps: NonNegativeInt = 50
    """Warm-up from a tenth of the cut rate back to it. [updates]"""
    rewind_warmup: NonNegativeInt = 0
    """Warm-up after every rewind, from `rewind_warmup_from` of the rate back to it; 0: none. [updates]"""
    rewind_warmup_from: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of the rate at which the warm-up after a rewind begins."""


class MemoryCopyConfig(Section):
    """Copies of the newest snapshot in the memories of two hosts, which outlive the processes (docs/clusters.md,
    "Memory that survives a host"). A copy takes 12 bytes a parameter, at its host and at another one; while a new one
    is made there are two."""

    mode: Literal["auto", "always", "never"] = "auto"
    """auto: under a supervisor, on several hosts: only then is there somebody to go on at once, and a host to lose;
    always: also without, and on one host, against the death of its processes."""
    folder: Path = Path("/dev/shm")
    """Where; variables of the environment are replaced. Memory, or a disk of the host itself."""
    bandwidth: PositiveFloat = 0.25
    """Most that a rank sends; 10 GB, as of 7B parameters on 8 ranks, take 40 s. [GB/s]"""
    memory_gib: PositiveFloat | None = Field(default=None, examples=[64.0])
    """Memory for it per rank; null: a quarter of what is free. [GiB]"""
    days: PositiveFloat = 3.0
    """Time after which what a run has left is removed by the next run of the same user. [days]"""


class SnapshotConfig(Section):
    """Snapshots in host memory (checkpoint/snapshot.py). A rewind loses half of `interval` on average, at most
    `interval` plus the steps until detection; a copy, 12 bytes a parameter, costs about a hundredth of a step."""

    interval: NonNegativeInt = 10
    """Steps between snapshots; 0: none. [steps]"""
    keep: int = Field(default=4, ge=1, le=1000)
    """Number of snapshots, the newest and ever older ones, as a slow divergence is noticed late. [snapshots]"""
    memory_gib: PositiveFloat | None = Field(default=None, examples=[64.0])
    """Host memory per rank; null: a quarter of what is free. [GiB]"""
    copies: MemoryCopyConfig = MemoryCopyConfig()


class HardwareConfig(Section):
    """Silent corruption (hardware/hardware_watch.py)."""

    fingerprint_interval: NonNegativeInt = 20
    """Steps between two comparisons of the state that several ranks must hold alike; 0: none. Weights in compute
    precision, which the next update overwrites, are compared in every step. [steps]"""
    replay_interval: NonNegativeInt = 200
    """Steps between two replays: a micro-batch is computed again on its own rank and on the next one, and every device
    computes products with known answers; 0: none. [steps]"""
    messages: bool = True
    """Check before every update that pipeline stages received what was sent to them."""
    state: bool = True
    """Check before every update that masters, moments and weights are what the last one left."""
    gradients: bool = True
    """Check in every step the sum of the gradients, and the gradient of each data rank against the others (of each rank
    against its first moments, if there is one data rank): a doubt refuses the update until repeating the step has shown
    who is right."""


class AttributionConfig(Section):
    """Finding the guilty samples (attribution/examination.py, groups.py, scores.py)."""

    threshold: PositiveFloat = 6.0
    """Robust z of a sample's loss within its corpus from which it may be convicted individually. [sigma]"""
    significance: Fraction = 0.001
    """How often a window of harmless samples passes for a bad crowd (permutation test)."""
    adjacent_significance: Fraction = 0.05
    """As `significance`, next to samples just skipped, where data is the likely cause."""
    innocent: Fraction = 0.03
    """Share of innocent samples among the convicted of a crowd (false discovery rate)."""
    gradients: NonNegativeInt = 16
    """Most gradients measured; each costs a step. They find text that is too easy to show in the loss."""
    window: PositiveInt = 16
    """Steps since the onset whose samples are suspects; later ones follow from the first. [steps]"""
    reference: PositiveInt = 128
    """Harmless samples from before the snapshot to measure, for a corpus with few recorded. [samples]"""
    behind: NonNegativeInt = 16
    """Steps before the snapshot not used for harmless tails: the region may have begun there. [steps]"""
    region: NonNegativeInt = 40
    """Time to find the ends of a bad region and its guilty samples; a forward pass of a batch is a third of a step.
    What does not end in that time is no region, and nobody is convicted. 0: nothing beyond the window is looked
    at. [steps]"""


class SampleConfig(Section):
    """Batches that are elevated together, and refused ones (recovery/sample_watch.py)."""

    examinations: PositiveFloat = 1.0
    """Groups of batches examined in vain, per 10,000 healthy steps; each takes some steps of time."""
    quiet_steps: PositiveInt = 4
    """Steps on trend before a refused batch is examined. [steps]"""


class SignsConfig(Section):
    """Signs of a learning rate that is too high, or too low, from the start (warnings/signs.py). Each is a warning,
    given once; nothing acts on it.

    Chosen on runs of 3 layers of 128 on Python source, measured on two other texts (docs/stability-method.md, with the
    error rates). The first look at every block is what later ones are compared with. Healthy runs, too, grow 46 times
    over it, to an rms of 1.7; `rms` is the geometric middle of that and the 222 of the run `no-qk-norm` at step 20.
    Models narrower than `narrowest` tolerate a thousandfold growth.
    """

    enabled: bool = True
    """Look for them."""
    norms: tuple[PositiveInt, ...] = (1, 2, 5, 10, 20, 50)
    """Steps after which weights and update are measured; []: never. [steps]"""
    looks: tuple[PositiveInt, ...] = (1, 20, 50, 100)
    """Steps after which every block is measured; []: never. [steps]"""
    change: PositiveFloat = 0.25
    """Change of a layer's output by one update, relative to itself."""
    growth: PositiveFloat = 40.0
    """Growth of the residual stream since the first measurement; a sign only together with `rms`."""
    rms: PositiveFloat = 20.0
    """Root mean square of the residual stream."""
    narrowest: PositiveInt = 128
    """Least width of a model that is judged by its residual stream."""
    collapse: Fraction = 0.25
    """Remaining share of a block's first attention entropy."""
    below_unigram: NonNegativeFloat = 0.3
    """How far the loss must be below the unigram entropy once the learning rates of all updates add up to `rate_sum`.
    [nats]"""
    rate_sum: PositiveFloat = 0.25
    """Sum of learning rates at which that is checked."""
    updates: PositiveInt = 20
    """Least number of updates before that check. [updates]"""
    peak: PositiveFloat = 0.95
    """Ratio of update to weight half a warm-up after its end, relative to that at its end; a sign only of updates of at
    least half of `change`."""
    slow_share: Fraction = 0.4
    """Share of the fall of the loss that is in the second half of the sum of rates, while the loss is above the unigram
    entropy."""
    slow_updates: PositiveInt = 200
    """Number of updates at which that is checked, or twice the warm-up if that is longer. [updates]"""
    sample: PositiveInt = 250_000
    """Part of the corpus that the unigram entropy is measured on. [tokens]"""


class TrendsConfig(Section):
    """Slow-moving signals, judged through the whole run (warnings/trends.py). Each is a warning with a remedy; nothing
    acts on it.

    A look measures one sample of each data rank, and norms of parameters: `interval` bounds the cost. The limits were
    chosen on small runs (docs/stability-method.md).
    """

    enabled: bool = True
    """Look for them."""
    interval: PositiveInt = 25
    """Steps between two looks. [steps]"""
    start: NonNegativeInt = 100
    """Steps before the first look; `signs` are about these. There is none while the learning rate warms up either.
    [steps]"""
    window: int = Field(default=16, ge=6)
    """Looks over which growth is extrapolated. [looks]"""
    confirm: PositiveInt = 2
    """Looks, or evaluations, in a row beyond a limit that are a warning; and well within it, before it is over."""
    forget: Fraction = 0.005
    """How fast the best level of a block is forgotten at each look: slower changes are no trend."""
    entropy_left: Annotated[float, Field(gt=0, lt=1)] = 0.6
    """Remaining share of a block's best attention entropy."""
    focus_left: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Remaining share of what a block's attention entropy was at most below that of uniform attention."""
    focus_floor: PositiveFloat = 0.25
    """How far it must have been below it. [nats]"""
    logit_floor: PositiveFloat = 20.0
    """Largest attention logit below which its growth is not judged."""
    logit_horizon: PositiveInt = 2000
    """Within how many steps the largest attention logit would reach 10,000, at its present growth. [steps]"""
    output_growth: PositiveFloat = 5.0
    """Growth of the root mean square of a sub-layer's output (qkv, attention, MLP) over its lowest level."""
    output_horizon: PositiveInt = 2000
    """Within how many steps it would grow a hundredfold, at its present growth; both must be exceeded. [steps]"""
    straightness: PositiveFloat = 1.1
    """Growth of a norm, relative to the sum of all updates. The optimizer alone gives at most 1, if every update points
    straight outwards: more means that something else changes the weights."""
    gradient_growth: PositiveFloat = 2.0
    """Gradient norm before clipping, relative to its lowest level."""
    update_change: PositiveFloat = 0.5
    """Change of a layer's output by one update, relative to itself."""
    update_least: PositiveFloat = 0.01
    """Root mean square of an update, relative to the learning rate: of optimizers with updates like Adam's."""
    stale_share: Fraction = 0.002
    """Share of the rows of embedding or head with a gradient whose second moment is below a hundredth of its square."""
    stale_factor: PositiveFloat = 4.0
    """As `stale_share`, times the usual share of this run."""
    layer_gradient: Fraction = 0.4
    """Remaining share of the gradient of a block's input weights, relative to that of its output weights."""
    layer_added: Fraction = 0.002
    """RMS of what a block adds to the residual stream, relative to the stream."""
    overfit: PositiveFloat = 0.02
    """Rise of the validation loss above its best, and fall of the training loss since then. [nats]"""
    swing: PositiveFloat = 0.05
    """Rise of the validation loss between two turning points, and fall: two of each in the last eight evaluations are a
    warning. [nats]"""


class StabilityConfig(Section):
    """Detection, remedies and attribution (docs/stability.md)."""

    enabled: bool = True
    """false: only non-finite updates are refused."""
    dry_run: bool = False
    """Report what would be done; refuse only non-finite updates."""
    max_discards: PositiveInt = 20
    """Updates refused in a row before the run stops as unstable. [updates]"""
    detector: DetectorConfig = DetectorConfig()
    policy: PolicyConfig = PolicyConfig()
    snapshots: SnapshotConfig = SnapshotConfig()
    hardware: HardwareConfig = HardwareConfig()
    attribution: AttributionConfig = AttributionConfig()
    samples: SampleConfig = SampleConfig()
    signs: SignsConfig = SignsConfig()
    trends: TrendsConfig = TrendsConfig()
