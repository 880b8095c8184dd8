"""Settings of the guard, each with the reason of its default."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megastable_guard.section import Fraction, Section


class DetectorConfig(Section):
    """What counts as a deviation (megastable_guard/detector.py). Lengths are in observations: steps, or lines of
    a sparse trace. Sigma is the scatter of the last `window` accepted values.

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
    recovered: PositiveFloat = 1.0
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
    "cap_lr", "rewarm", "reset_bias", "past_routing", "reset_moments", "clip", "qk_clip", "z_loss", "hold_router",
    "router_z_loss", "balance_loss", "no_balance_loss", "router_rate", "beta2", "leave_fp8", "other_kernels",
    "swiglu_clamp", "cut_lr",
]  # fmt: skip


class PolicyConfig(Section):
    """Remedies for a deviation, and their budgets (megastable_guard/policy.py).

    Budgets are per `budget_window` steps of new ground. PaLM needed far less in a whole run (arXiv:2204.02311, section
    5.1: about 20 rewinds); more means that the cause is not the data. A spent budget pauses the remedy, not the run,
    which trains on with refusals only and alerts a person.

    Which remedy is taken, `remedies`, is decided by trying them (megastable_guard/trials.py).
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
    good state, if the rate jumped, or the limit that was lifted last; a warm-up from a tenth of the rate; biases of
    experts of zero; choices of experts by older weights of routers; the warm-up and moments of zero (SPAM,
    arXiv:2501.06842); clipping at a quarter of `optimizer.clip`; QK-clip at 100; ten times the z-loss; no growth of
    routers' weights; ten times the z-loss of routers, or their balance loss, or none, or three tenths of their rate; a
    lower beta2; no FP8; plain PyTorch in place of all kernels; `model.swiglu_clamp` at 10; `cut_factor` times the rate.
    The least intrusive first."""
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
    """An incident without a bad sample this soon after another, or after a lifted limit, is a recurrence. [steps]"""
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


class GuardConfig(Section):
    """What `StepJudge` needs of a run's `stability`."""

    detector: DetectorConfig = DetectorConfig()
    policy: PolicyConfig = PolicyConfig()
