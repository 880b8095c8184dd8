"""Actions and causes: the rungs of the ladder, what caused an incident, a decision, a remedy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megastable_guard.signals import Finding, Verdict


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
        finite = self.finding.verdict is not Verdict.NON_FINITE
        return self.action is Action.APPLY or (self.action is Action.ALERT and finite)


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
