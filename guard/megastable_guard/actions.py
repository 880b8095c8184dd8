"""What passes between the guard and a run: the numbers of a step, the detector's verdict, the policy's action and
remedy. Plain numbers, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class Signals:
    """One step before its update.

    loss: mean cross-entropy of the global batch, nats per token. grad_norm: global L2 norm before clipping, inf if a
    gradient is not finite, None if a trace has none. lr: rate of the coming update, None if unknown.
    mixed: the data mix changes on purpose from this step on.
    """

    step: int
    loss: float
    grad_norm: float | None = None
    lr: float | None = None
    mixed: bool = False


class Verdict(StrEnum):
    """The detector's judgement of a step, against the accepted steps before it."""

    HEALTHY = "healthy"
    NON_FINITE = "non_finite"  # loss or gradient norm is nan or inf
    OUTLIER = "outlier"  # this step stands out by itself: a hard batch, or the first of a spike
    SPIKE = "spike"  # several do: the loss or the norm has jumped and stays up
    DRIFT = "drift"  # slow departure from the trend: a divergence
    PLATEAU = "plateau"  # settled above the level that was reached before
    OSCILLATION = "oscillation"  # wider swings up and down than before
    SHIFT = "shift"  # another level or scatter of the loss, with an ordinary gradient norm: other data
    DAMAGE = "damage"  # the probe samples, which are never trained on, are harder than before
    CORRUPTED = "corrupted"  # copies of the state that must be equal differ, or a gradient is proven wrong


@dataclass(frozen=True)
class Finding:
    """A verdict with its evidence.

    severity: of the strongest test relative to its threshold: 1 = just beyond, 0 = healthy. onset: the first step
    that belongs to it (`step` itself for an outlier). reason: a sentence with the numbers. on_trend: whether loss
    and norm are at their trend. reset: the detector's baseline is reset here.
    """

    step: int
    verdict: Verdict
    severity: float
    onset: int
    reason: str = ""
    on_trend: bool = True
    reset: bool = False


class Action(StrEnum):
    APPLY = "apply"
    DISCARD = "discard"  # this update is refused; the data moves on
    SKIP = "skip"  # samples are skipped from here on; nothing is undone
    WAIT = "wait"  # single updates are refused until it goes away by itself, as it did in a branch
    REWIND = "rewind"  # back to a snapshot before the onset, then skip or defer
    FALL_BACK = "fall_back"  # rewind, and continue without FP8, or without a kernel
    CAP_LR = "cap_lr"  # rewind, and continue with a rate no higher than that of the good state
    CUT_LR = "cut_lr"  # rewind, and continue with a smaller rate
    ADJUST = "adjust"  # rewind, and continue with another warm-up, moments, clipping, z-loss, beta2 or clamp
    SWAP_CORPUS = "swap_corpus"  # rewind, and continue without a corpus
    HANDOVER = "handover"  # end the process: restart from a checkpoint before the onset
    RESTART = "restart"  # restart the processes from the newest good checkpoint
    ALERT = "alert"  # no further automatic action: train on, refuse single updates, notify a person
    STOP = "stop"  # end the run: a person is needed

    @property
    def ends(self) -> bool:
        return self in (Action.HANDOVER, Action.STOP)

    @property
    def rewinds(self) -> bool:
        return self in (
            Action.REWIND, Action.FALL_BACK, Action.CAP_LR, Action.CUT_LR, Action.ADJUST, Action.SWAP_CORPUS
        )  # fmt: skip


class Cause(StrEnum):
    DATA = "data"  # samples that are bad on the good state, too
    NEW_DATA = "new_data"  # samples that are new, not bad: the run learns from them
    NUMERICS = "numerics"  # the same step is harmless without FP8, or by other kernels
    STATE = "state"  # the same data is harmless on the good state
    MOMENTS = (
        "moments"  # others, or a lower beta2, were clearly better in a branch: Adam's moments were stale
    )
    LEARNING_RATE = "learning_rate"  # a lower rate was clearly better in a branch
    HARDWARE = "hardware"  # the same data on the same state gave another result
    PROCESS = "process"  # a process died, was killed or hung
    STORAGE = "storage"  # a checkpoint or a shard was damaged, or the disk is full
    CODE = "code"  # it fails at the same step with other data, too
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Decision:
    """The action on a step, and why. healed: the previous action is now proven."""

    action: Action
    finding: Finding
    reason: str
    healed: bool = False

    @property
    def applies(self) -> bool:
        """Whether the update is applied. In an alert every finite update is; a non-finite one never is."""
        is_finite = self.finding.verdict is not Verdict.NON_FINITE
        return self.action is Action.APPLY or (self.action is Action.ALERT and is_finite)


@dataclass(frozen=True)
class Remedy:
    """The action on an incident or a failure, and why. cause: its diagnosis.

    skip: for a failure, the samples of its step are skipped first. release: positions of samples that were taken away
    lately without a clear trial, and have turned out to be harmless.
    """

    action: Action
    cause: Cause
    reason: str
    skip: bool = False
    release: tuple[int, ...] = ()
