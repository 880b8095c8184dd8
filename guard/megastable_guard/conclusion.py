"""What is concluded about an incident: its cause, and its bad samples. Pure.

The experiments; of the first two megastable's recovery/replays.py tells the outcome, of the others
attribution/examination.py, and in the loop guard sample_examiner.py, which holds the third alone:
1. the refused step, again, on the very state it was refused on: if two replays agree with each other but not with the
   step, it was the hardware; also if they differ where bits should repeat or where replays of a good state agree;
2. the same without FP8, or by plain PyTorch in place of a kernel: if the spike vanishes, the cause is numerics;
3. every sample since the onset, on the state before it: one that is bad there is bad data, and so is a crowd that is
   worse than harmless batches (scores.py); then its region is followed until it ends;
4. a batch with an extraordinary gradient there: the samples in it that are like each other and unlike harmless ones, if
   losses do not name them.
If no sample is bad: the same data is harmless on the good state, so the state was the cause.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from megastable_guard.actions import Cause
from megastable_guard.policy import FEW

Floats = npt.NDArray[np.float64]

WORSE = 0.05  # nats: a healthy state only improves on what it was trained on


@dataclass(frozen=True)
class Suspect:
    """A sample on the good state. loss: nats per token. z: robust, among harmless samples of its corpus, nan if too few
    are known. gradient_norm: of the sample alone, None if not measured."""

    position: int
    loss: float
    z: float
    gradient_norm: float | None = None


@dataclass(frozen=True)
class Region:
    """Positions [first, end); how: a sentence on how both ends were found. measured: samples measured for it; steps:
    the cost, in steps of time. probes: examined positions, with the number measured there and the number of bad ones,
    ascending."""

    first: int
    end: int
    how: str
    measured: int = 0
    steps: float = 0.0
    probes: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class Conclusion:
    """The cause, the positions of the bad samples (ascending), the worst suspects with their numbers, and a sentence.

    region: the extent of the bad data, None if no sample is bad. later: positions that are suspected, but not bad:
    they are deferred. alone: the bad ones that are so by their own loss, not as part of a crowd. kernels: the names of
    those without which the step is harmless. proven: a trial has clearly shown that the samples do harm, or their step
    was not finite.
    """

    cause: Cause
    bad: list[int]
    suspects: list[Suspect]
    reason: str
    region: Region | None = None
    later: list[int] = field(default_factory=list)
    alone: list[int] = field(default_factory=list)
    kernels: tuple[str, ...] = ()
    proven: bool = False

    @property
    def bad_positions(self) -> list[int]:
        """Positions of the bad samples, ascending."""
        return sorted(self.bad)

    @property
    def few(self) -> bool:
        """Whether a few samples are named, most of them far out by themselves."""
        return 0 < len(self.bad_positions) <= min(FEW, 2 * len(self.alone))

    def explains_losses(self, alarming: float) -> bool:
        """Whether the bad samples are why a loss was `alarming` or more: on the good state most others are below."""
        bad_positions = set(self.bad)
        other_losses = [suspect.loss for suspect in self.suspects if suspect.position not in bad_positions]
        return not other_losses or not float(np.median(other_losses)) >= alarming

    def keep_first(self, most: int) -> Conclusion:
        """With the first `most` samples only."""
        return replace(self, bad=self.bad_positions[:most])

    def keep_individuals(self, met: set[int]) -> Conclusion:
        """Without the samples of `met` that are not bad by themselves; any other bad sample resembles the rest."""
        if not self.alone:
            return replace(self, bad=[])
        return replace(
            self,
            bad=[position for position in self.bad if position in self.alone or position not in met],
        )


def blame_samples(
    suspects: list[Suspect],
    bad: list[int],
    compared_with: int,
    chance: float = 1.0,
    region: Region | None = None,
    together: float | None = None,
) -> Conclusion:
    """The conclusion that some samples are bad.

    Args:
        suspects: all that were measured on the good state.
        bad: positions of some of them, at least one.
        compared_with: how many harmless samples they were compared with.
        chance: how often as many harmless samples are as bad.
        region: of `Conclusion`.
        together: gradient norm of a batch of the bad samples, relative to an ordinary one's.
    """
    ordered_suspects, bad_positions = _worst_first(suspects), set(bad)
    worst_suspect = next(
        ordered_suspect for ordered_suspect in ordered_suspects if ordered_suspect.position in bad_positions
    )
    deviation_text = f"{worst_suspect.z:.0f} robust deviations above {compared_with} harmless ones"
    worst_text = f"the worst has a loss of {worst_suspect.loss:.2f} ({deviation_text})"
    count_text = f"{len(bad)} of {len(suspects)} samples are bad"
    if together is not None:
        blame_reason = (
            f"{count_text} together on the state before the onset, too: a batch of them has {together:.1f} times the "
            "gradient norm of an ordinary one, and they are like each other and unlike harmless samples; by itself "
            f"{worst_text}"
        )
    else:
        blame_reason = f"{count_text} on the state before the onset, too: {worst_text}"
        if worst_suspect.gradient_norm is not None:
            blame_reason += f", and by itself a gradient norm of {worst_suspect.gradient_norm:.3g}"
        if chance < 0.05:
            blame_reason += f"; so many drawn at random are as bad in at most {100 * chance:.2g} % of draws"
    if region is not None:
        blame_reason += f". {region.how[0].upper()}{region.how[1:]}"
    return Conclusion(Cause.DATA, sorted(bad), ordered_suspects, blame_reason, region)


def blame_state(suspects: list[Suspect], steps: str, endless: int | None = None) -> Conclusion:
    """The conclusion that no sample is bad.

    Args:
        suspects: all that were measured on the good state.
        steps: theirs, in words.
        endless: batches after the window for which bad samples went on without an end.
    """
    if endless is not None:
        blame_reason = (
            f"samples of {steps} are bad on the state before it, but so are those of the next "
            f"{endless:,} {'step' if endless == 1 else 'steps'}, as far as was looked: that is no region of bad data"
        )
    else:
        blame_reason = f"none of the {len(suspects)} samples of {steps} is bad on the state before it"
        if unknown_count := sum(math.isnan(s.z) for s in suspects):
            blame_reason += (
                f" ({unknown_count} of them cannot be judged: too few earlier samples of their corpora)"
            )
    return Conclusion(Cause.STATE, [], _worst_first(suspects), blame_reason)


def _worst_first(suspects: list[Suspect]) -> list[Suspect]:
    return sorted(suspects, key=lambda s: math.inf if math.isnan(s.z) else -s.z)


def is_worse(now: Floats, recorded: Floats) -> bool:
    """Whether a state is worse than the states on which harmless samples were trained: then it is not a good state.

    now, recorded: losses [n] of the same samples. Detects the update before the first anomalous step:
    paired differences, their median against its own standard error (1.2533 sigma / sqrt(n)).
    """
    are_finite = np.isfinite(now) & np.isfinite(recorded)
    if not are_finite.any():
        return bool(recorded.size)
    loss_changes = now[are_finite] - recorded[are_finite]
    middle = float(np.median(loss_changes))
    standard_error = (
        1.2533 * 1.4826 * float(np.median(np.abs(loss_changes - middle))) / np.sqrt(loss_changes.size)
    )
    return bool(middle > WORSE + 4 * standard_error)
