"""Decides whether suspected samples do harm, from two branches of the run that began on the same state.

One branch trains on the suspects, the control trains on as many harmless samples in their places; all else is the
same. Both are measured on the same samples, which neither was trained on, so that the difference has little noise:

    cost    by how much the data to come is harder after the suspects than after the control. A spread of it counts
            every kind of text by its share: forgetting prose is no harm where only code is to come
    learnt  by how much suspects that neither branch was trained on are easier after the others. What says the same
            again and again is learnt by heart, and teaches nothing (`find_repetition`: how far text can be compressed,
            against as much ordinary text); what stays as hard as guessing is noise, which only became less surprising.
            Neither is a gain of the data to come

| cost | learnt | verdict |
|---|---|---|
| clearly below 0 | any | new: trained through |
| none | clearly something | new: trained through |
| clearly above 0 | nothing | bad: skipped |
| clearly above 0 | something | mixed: deferred |
| none | nothing | noise: skipped only where the suspects are gross and few |

Gross and few suspects are trained on only where the data to come gets easier.

Pure. `branches.py` trains the branches.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

SURE = 3.0  # standard errors of a mean difference, beyond which it is clear
HARM = 0.01  # nats: smaller costs are those of another choice of control
GAIN = 0.005  # nats of the data to come, at least, for suspects that pay
LEARNT = 0.05  # nats, at least: other text of the same language teaches a little
GUESSING = 0.95  # of the entropy of guessing, above which a loss shows no knowledge
HELD_OUT = 64  # most suspects that neither branch is trained on
# Of the compressed size of ordinary text. One sentence 48 times is at 0.07, one character at 0.05, log lines of a few
# templates at 0.23, code and another language at 0.9 to 1 (the drills' texts, 128 or 64 tokens a sample).
LITTLE = 0.125
# Samples that are compressed together, and tokens of each: 16 KiB, half of what zlib looks back on.
COMPRESSED, TOKENS = 64, 128


class TrialVerdict(StrEnum):
    NEW = "new"  # the run learns from them
    BAD = "bad"  # they do harm, and nothing is learnt from them
    MIXED = "mixed"  # something is learnt from them, but it costs more
    NOISE = "noise"  # neither


class BranchLosses(NamedTuple):
    """Losses of samples of the data to come, [n] nats each: after the suspects, after the control, on the state that
    both began with, and where the run stands."""

    after: Floats
    control: Floats
    before: Floats
    present: Floats


@dataclass(frozen=True)
class HarmTrial:
    """What two branches of `steps` steps have shown. cost, learnt: nats, each with its standard error; nan if there was
    nothing to measure it on. suspects: how many were trained on, or held out, in them. pays: the data to come gets
    easier by them. damaged: the state where the run stands is worse than all others: that is not the work of these
    steps, and training on would not undo it."""

    verdict: TrialVerdict
    cost: float
    cost_error: float
    learnt: float
    learnt_error: float
    suspects: int
    steps: int
    pays: bool
    damaged: bool

    @property
    def facts(self) -> dict[str, Any]:
        """For the journal. Numbers that do not exist, or are not finite, are left out."""
        numbers = dict(
            cost=self.cost, cost_error=self.cost_error, learnt=self.learnt, learnt_error=self.learnt_error
        )
        told = {name: round(value, 4) for name, value in numbers.items() if math.isfinite(value)}
        return told | dict(
            verdict=self.verdict, steps=self.steps, suspects=self.suspects, damaged=self.damaged
        )

    @property
    def reason(self) -> str:
        """As a sentence."""
        told = {
            TrialVerdict.NEW: "they are new, not bad",
            TrialVerdict.BAD: "they do harm",
            TrialVerdict.MIXED: "something is learnt from them, but it costs more",
            TrialVerdict.NOISE: "they do no harm that can be measured",
        }[self.verdict]
        held = (
            ""
            if math.isnan(self.learnt)
            else f", and others of their kind are {self.learnt:+.3f} ± {self.learnt_error:.3f} nats easier"
        )
        return (
            f"{self.steps} steps with {self.suspects} suspects, and the same steps without, from the same state: with "
            f"them the data to come is {self.cost:+.3f} ± {self.cost_error:.3f} nats harder{held}: {told}"
        )


def mean_difference(one: Floats, other: Floats) -> tuple[float, float]:
    """Mean of `one - other`, and its standard error; nan without samples. A state that is no longer finite is worse
    than any other."""
    if not one.size:
        return math.nan, math.nan
    for losses, worse in ((one, math.inf), (other, -math.inf)):
        if not np.isfinite(losses).all():
            return worse, 0.0
    difference = one - other
    error = float(difference.std(ddof=1)) / math.sqrt(one.size) if one.size > 1 else math.inf
    return float(difference.mean()), error


def judge_trial(
    coming: BranchLosses,
    held_out: tuple[Floats, Floats],
    vocabulary: int,
    suspects: int,
    steps: int,
    repetition: tuple[bool, Bools] | None = None,
) -> HarmTrial:
    """The verdict on suspects.

    Args:
        coming: losses of samples of the data to come.
        held_out: losses of suspects that neither branch was trained on, after the others and after the control; [m]
            nats each.
        vocabulary: how many tokens there are.
        suspects: how many the first branch was trained on, and held out.
        steps: length of each branch.
        repetition: as of `find_repetition`, with the samples of the data to come [n]; None: there is none.
    """
    by_heart, coming_by_heart = repetition or (False, np.zeros(coming.after.shape, dtype=bool))
    guessing = GUESSING * math.log(vocabulary)
    gained = _without_gains(coming.after, coming.control, coming_by_heart | (coming.after > guessing))
    cost, error = mean_difference(gained, coming.control)
    after, control = held_out
    learnt, learnt_error = mean_difference(
        control, _without_gains(after, control, by_heart | (after > guessing))
    )
    learns = learnt > max(LEARNT, SURE * learnt_error)  # nan is not
    pays = cost < -max(GAIN, SURE * error)
    if cost > max(HARM, SURE * error):
        verdict = TrialVerdict.MIXED if learns else TrialVerdict.BAD
    else:
        verdict = TrialVerdict.NEW if learns or pays else TrialVerdict.NOISE
    others = np.maximum(np.maximum(coming.after, coming.control), coming.before)
    damage, damage_error = mean_difference(coming.present, others)
    damaged = damage > max(HARM, SURE * damage_error)
    return HarmTrial(verdict, cost, error, learnt, learnt_error, suspects, steps, pays, damaged)


def _without_gains(after: Floats, control: Floats, empty: Bools) -> Floats:
    """`after`, but as the control where a sample became easier that is `empty`: nobody gains from that."""
    return np.where(empty & (control > after), control, after)


def is_harmless(trial: HarmTrial, few: bool) -> bool:
    """Whether suspects are trained on all the same. few: they are, and each is far out by itself."""
    return trial.pays or (not few and trial.verdict in (TrialVerdict.NEW, TrialVerdict.NOISE))


def is_clear(trial: HarmTrial) -> bool:
    """Whether a trial shows that suspects do harm."""
    return trial.verdict in (TrialVerdict.BAD, TrialVerdict.MIXED)


def choose_held_out(suspects: Int64s) -> Int64s:
    """Every other one of some suspects, ascending, evenly spread and at most `HELD_OUT`: neighbours may be of one
    text."""
    half = suspects[1::2]
    chosen = np.linspace(0, half.size - 1, min(half.size, HELD_OUT)).round().astype(np.int64)
    return half[chosen]


def replace_samples(batches: list[Int64s], replaced: Int64s, fillers: Int64s) -> list[Int64s]:
    """The batches with the next filler in the place of every sample of `replaced`. Fillers are used again when all have
    been."""
    found, used = list[Int64s](), 0
    for batch in batches:
        at = np.flatnonzero(np.isin(batch, replaced))
        batch = batch.copy()
        batch[at] = fillers[(used + np.arange(at.size)) % fillers.size]
        used += at.size
        found.append(batch)
    return found


def find_repetition(suspects: Int32s, ordinary: Int32s, coming: Int32s) -> tuple[bool, Bools]:
    """Whether suspects say next to nothing, and which samples of the data to come do not say more, once the suspects
    are known.

    Args:
        suspects, ordinary: token ids, [n, l] and [m, l]; the first `COMPRESSED` of them and `TOKENS` of each count.
        coming: token ids, [k, l].

    Returns:
        The answers; bool and [k]. Without ordinary text: False.
    """
    none = np.zeros(len(coming), dtype=bool)
    count = min(len(suspects), len(ordinary), COMPRESSED)
    if not count:
        return False, none
    parts = suspects[:count, :TOKENS], ordinary[:count, :TOKENS], coming[:, :TOKENS]
    # Numbered anew, so that any vocabulary fits: there are fewer than 2^16 tokens in all.
    _, numbers = np.unique(np.concatenate(parts), return_inverse=True)
    known, usual, following = np.split(
        numbers.reshape(-1, parts[0].shape[1]).astype("<u2"), [count, 2 * count]
    )
    size, usual_size = _compressed_size(known), _compressed_size(usual)
    if size > LITTLE * usual_size:
        return False, none
    said = [_compressed_size(np.vstack([known, row])) - size for row in following]
    return True, np.array(said) < 2 * LITTLE * usual_size / count


def _compressed_size(numbers: npt.NDArray[np.uint16]) -> int:
    return len(zlib.compress(numbers.tobytes(), 9))
