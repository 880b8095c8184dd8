"""What branches of the run that began on the same state have shown: whether suspected samples do harm, which remedy
helps, and whether a corpus is left out. Pure; recovery/replay_trials.py of megastable trains the branches, and
sample_examiner.py those of the loop guard.

**Suspects.** One branch trains on the suspects, the control trains on as many harmless samples in their places; all
else is the same. Both are measured on the same samples, which neither was trained on, so that the difference has little
noise:

    cost    by how much the data to come is harder after the suspects than after the control. A spread of it counts
            every kind of text by its share: forgetting prose is no harm where only code is to come
    learnt  by how much suspects that neither branch was trained on are easier after the others. What says the same
            again and again is memorised, and teaches nothing (`find_repetition`: how far text can be compressed,
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

**Remedies.** The branch "other data" has harmless samples in the places of the suspects, "nothing" has the data as it
was; every other one has the data as it was, and a remedy. Remedies are tried only where other data does not help:
training on from the good state makes the model worse, whatever it reads. Without that condition a lower rate would
always win over a few steps, as noise shrinks with it. The least intrusive branch wins that is not clearly worse than
the best. A remedy must also be clearly better than both branches without one.

**A corpus** of which samples were bad again and again is left out if that clearly helps the others: the branch without
any of its samples against the one without the bad ones, on the data to come of the other corpora.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping
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
GAIN = 0.005  # nats of the data to come, at least, for suspects that pay, and for remedies that end a warning
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
        all_numbers = dict(
            cost=self.cost, cost_error=self.cost_error, learnt=self.learnt, learnt_error=self.learnt_error
        )
        told_facts = {
            fact_name: round(value, 4) for fact_name, value in all_numbers.items() if math.isfinite(value)
        }
        return told_facts | dict(
            verdict=self.verdict, steps=self.steps, suspects=self.suspects, damaged=self.damaged
        )

    @property
    def reason(self) -> str:
        told = {
            TrialVerdict.NEW: "they are new, not bad",
            TrialVerdict.BAD: "they do harm",
            TrialVerdict.MIXED: "something is learnt from them, but it costs more",
            TrialVerdict.NOISE: "they do no harm that can be measured",
        }[self.verdict]
        learnt_text = (
            ""
            if math.isnan(self.learnt)
            else f", and others of their kind are {self.learnt:+.3f} ± {self.learnt_error:.3f} nats easier"
        )
        return (
            f"{self.steps} steps with {self.suspects} suspects, and the same steps without, from the same state: with "
            f"them the data to come is {self.cost:+.3f} ± {self.cost_error:.3f} nats harder{learnt_text}: {told}"
        )


def mean_difference(one: Floats, other: Floats) -> tuple[float, float]:
    """Mean of `one - other`, and its standard error; nan without samples. A state that is no longer finite is worse
    than any other."""
    if not one.size:
        return math.nan, math.nan
    for sample_losses, worse in ((one, math.inf), (other, -math.inf)):
        if not np.isfinite(sample_losses).all():
            return worse, 0.0
    paired_difference = one - other
    error = float(paired_difference.std(ddof=1)) / math.sqrt(one.size) if one.size > 1 else math.inf
    return float(paired_difference.mean()), error


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
    memorised, coming_memorised = repetition or (False, np.zeros(coming.after.shape, dtype=bool))
    guessing_loss = GUESSING * math.log(vocabulary)
    counted_losses = _without_gains(
        coming.after, coming.control, coming_memorised | (coming.after > guessing_loss)
    )
    mean_cost, cost_error = mean_difference(counted_losses, coming.control)
    after, control = held_out
    mean_learnt, learnt_error = mean_difference(
        control, _without_gains(after, control, memorised | (after > guessing_loss))
    )
    does_learn = mean_learnt > max(LEARNT, SURE * learnt_error)  # nan is not
    does_pay = mean_cost < -max(GAIN, SURE * cost_error)
    if mean_cost > max(HARM, SURE * cost_error):
        verdict = TrialVerdict.MIXED if does_learn else TrialVerdict.BAD
    else:
        verdict = TrialVerdict.NEW if does_learn or does_pay else TrialVerdict.NOISE
    others = np.maximum(np.maximum(coming.after, coming.control), coming.before)
    mean_damage, damage_error = mean_difference(coming.present, others)
    is_damaged = mean_damage > max(HARM, SURE * damage_error)
    return HarmTrial(
        verdict, mean_cost, cost_error, mean_learnt, learnt_error, suspects, steps, does_pay, is_damaged
    )


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
    every_other = suspects[1::2]
    chosen_indices = (
        np.linspace(0, every_other.size - 1, min(every_other.size, HELD_OUT)).round().astype(np.int64)
    )
    return every_other[chosen_indices]


def replace_samples(batches: list[Int64s], replaced: Int64s, fillers: Int64s) -> list[Int64s]:
    """The batches with the next filler in the place of every sample of `replaced`. Fillers are used again when all have
    been."""
    new_batches, used = list[Int64s](), 0
    for batch in batches:
        replaced_indices = np.flatnonzero(np.isin(batch, replaced))
        batch = batch.copy()
        batch[replaced_indices] = fillers[(used + np.arange(replaced_indices.size)) % fillers.size]
        used += replaced_indices.size
        new_batches.append(batch)
    return new_batches


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
    # Numbered again, so that any vocabulary fits: there are fewer than 2^16 tokens in all.
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


NOTHING, OTHER_DATA = "nothing", "other data"
WITHOUT_BAD, WITHOUT_CORPUS = "without the suspects", "without the corpus"
# Of tokens that count as rare until now: how often in the window, times as often as before, and how many at most.
FREQUENT, MORE_OFTEN, NAMED = 4, 4.0, 16
TOLERANCE = 0.01  # nats: smaller differences are those of another choice of samples


@dataclass(frozen=True)
class RemedyTrial:
    """What branches with remedies have shown. chosen: the name of a branch. gain: nats by which the data to come is
    easier after it than after the better of the branches without a remedy, with its standard error. persists: whether
    what was warned of is still there after other data, which therefore is no such branch."""

    chosen: str
    gain: float
    gain_error: float
    steps: int
    persists: bool = False

    @property
    def has_remedy(self) -> bool:
        return self.chosen not in (NOTHING, OTHER_DATA)

    @property
    def reason(self) -> str:
        if not self.has_remedy:
            return f"{self.steps} steps from the same state: no remedy is clearly better than {self.chosen}"
        return (
            f"{self.steps} steps from the same state, with the same data: with this remedy the data to come is "
            f"{self.gain:.3f} ± {self.gain_error:.3f} nats easier than without any, "
            f"{'which other data does not mend' if self.persists else 'and with other data'}"
        )


@dataclass(frozen=True)
class CorpusTrial:
    """What branches without a corpus, and without its bad samples alone, have shown. gain: nats by which the data to
    come of the other corpora is easier after the first than more of these explain, with its standard error. helps:
    clearly."""

    corpus: str
    helps: bool
    gain: float
    gain_error: float
    steps: int

    @property
    def chosen(self) -> str:
        return WITHOUT_CORPUS if self.helps else WITHOUT_BAD

    @property
    def reason(self) -> str:
        verdict_text = "it is left out" if self.helps else "it is kept"
        return (
            f"{self.steps} steps without corpus {self.corpus}, and the same steps without its bad samples alone, from "
            f"the same state: without it the data to come of the other corpora is {self.gain:.3f} ± "
            f"{self.gain_error:.3f} nats easier than reading more of them explains: {verdict_text}"
        )


def judge_corpus(
    corpus: str, without: Floats, control: Floats, before: Floats, more: float, steps: int
) -> CorpusTrial:
    """Whether a corpus is to be left out. Whatever it is, others are learnt faster without it, as more of them is read:
    at most in proportion.

    Args:
        without, control, before: losses of the data to come of the other corpora, [n] nats: after `steps` steps without
            the corpus, after the same without its bad samples, and on the state that both began with.
        more: samples of other corpora in the first branch, over those in the second.
    """
    learnt, _ = mean_difference(before, control)
    expected_losses = before - more * (before - control) if learnt > 0 else control
    mean_gain, gain_error = mean_difference(expected_losses, without)
    does_help = bool(np.isfinite(without).all()) and mean_gain > max(GAIN, SURE * gain_error)
    return CorpusTrial(corpus, does_help, mean_gain, gain_error, steps)


def find_rare_tokens(window: Int32s, ordinary: Int32s) -> list[int]:
    """Tokens that are far more frequent than before: Adam's second moments of their rows have decayed, and cannot have
    kept up (Wortsman et al., arXiv:2304.13013, section 3). The most frequent first, `NAMED` at most.

    Args:
        window, ordinary: token ids of samples in question, and of harmless ones; [n, l] and [m, l].
    """
    id_count = int(max(window.max(initial=-1), ordinary.max(initial=-1))) + 1
    window_counts, usual_counts = (
        np.bincount(token_ids.ravel(), minlength=id_count) for token_ids in (window, ordinary)
    )
    expected_counts = usual_counts * (window.size / max(1, ordinary.size))
    rare_ids = np.flatnonzero(
        (window_counts >= FREQUENT) & (window_counts >= MORE_OFTEN * (expected_counts + 1))
    )
    return rare_ids[np.argsort(-window_counts[rare_ids], kind="stable")][:NAMED].tolist()


def harms_anyway(control: Floats, before: Floats) -> bool:
    """Whether training on harmless data makes the data to come harder. control: its losses after that; before: on the
    state that it began with; [n] nats each."""
    mean_harm, harm_error = mean_difference(control, before)
    return mean_harm > max(HARM, SURE * harm_error)


def choose_remedy(branches: Mapping[str, Floats], steps: int, healing: Collection[str] = ()) -> RemedyTrial:
    """The branch to go on with.

    Args:
        branches: losses of the data to come at the end of each, [n] nats, by name, the least intrusive first; those of
            `NOTHING` and `OTHER_DATA` among them.
        steps: their length.
        healing: in whose branches what was warned of is over. That is evidence of its own: of remedies that end it a
            smaller gain is enough, other data that does not is no rival, and what ends with nothing needs none.
    """
    if NOTHING in healing:
        return RemedyTrial(NOTHING, 0.0, 0.0, steps)
    persists = bool(healing) and OTHER_DATA not in healing
    if persists:
        branches = {
            branch_name: losses for branch_name, losses in branches.items() if branch_name != OTHER_DATA
        }
    best_name = min(branches, key=lambda name: _level(branches[name]))
    rival_names = branches.keys() & {NOTHING, OTHER_DATA}
    without_remedy = min(sorted(rival_names), key=lambda name: _level(branches[name]))
    for branch_name, losses in branches.items():
        mean_gain, gain_error = mean_difference(branches[without_remedy], losses)
        least_gain = GAIN if branch_name in healing else HARM
        if branch_name not in rival_names and not mean_gain > max(least_gain, SURE * gain_error):
            continue
        mean_behind, behind_error = mean_difference(losses, branches[best_name])
        if mean_behind <= max(GAIN if best_name in healing else TOLERANCE, SURE * behind_error):
            return RemedyTrial(branch_name, mean_gain, gain_error, steps, persists)
    return RemedyTrial(without_remedy, 0.0, 0.0, steps)


def _level(losses: Floats) -> float:
    return float(losses.mean()) if np.isfinite(losses).all() else math.inf
