"""What can be done about a step, and why: the rungs of the ladder, the causes, a decision, a remedy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megastable.stability.signals import Finding, Verdict


class Action(StrEnum):
    APPLY = "apply"
    DISCARD = "discard"  # this update is refused; the data moves on
    SKIP = "skip"  # samples are left out from here on; nothing is undone
    REWIND = "rewind"  # back to a snapshot before the onset, skip or defer, go on
    FALL_BACK = "fall_back"  # rewind, and go on without FP8
    CAP_LR = "cap_lr"  # rewind, and go on with a rate no higher than that of the good state
    CUT_LR = "cut_lr"  # rewind, and go on with a smaller rate
    SWAP_CORPUS = "swap_corpus"  # rewind, and go on without a corpus
    HANDOVER = "handover"  # end the process: restart from a checkpoint before the onset
    RESTART = "restart"  # start the processes again, from the newest good checkpoint
    ALERT = "alert"  # nothing more is done automatically: train on, refuse single updates, tell a person
    STOP = "stop"  # end the run: a person is needed

    @property
    def ends(self) -> bool:
        return self in (Action.HANDOVER, Action.STOP)

    @property
    def rewinds(self) -> bool:
        return self in (Action.REWIND, Action.FALL_BACK, Action.CAP_LR, Action.CUT_LR, Action.SWAP_CORPUS)


class Cause(StrEnum):
    DATA = "data"  # samples that are bad on the good state, too
    NUMERICS = "numerics"  # the same step without FP8 is harmless
    STATE = "state"  # the same data is harmless on the good state
    LEARNING_RATE = "learning_rate"  # it recurs with other data, or came with a jump of the rate
    HARDWARE = "hardware"  # the same data on the same state gave something else
    PROCESS = "process"  # a process died, was killed or hung
    STORAGE = "storage"  # a checkpoint or a shard was damaged, or the disk is full
    CODE = "code"  # it fails at the same step with other data, too
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Decision:
    """What to do about a step, and why. healed: the last action is proven by now."""

    action: Action
    finding: Finding
    reason: str
    healed: bool = False

    @property
    def applies(self) -> bool:
        """Whether the update is applied. In an alert everything finite is; what is not never is."""
        finite = self.finding.verdict is not Verdict.NON_FINITE
        return self.action is Action.APPLY or (self.action is Action.ALERT and finite)


@dataclass(frozen=True)
class Remedy:
    """What is done about an incident or a failure, and why. cause: what it is called.

    skip: of a failure, the samples of its step are skipped first. release: positions of samples that were convicted
    earlier in this chain of incidents, by weak evidence, and are innocent after all.
    """

    action: Action
    cause: Cause
    reason: str
    skip: bool = False
    release: tuple[int, ...] = ()
