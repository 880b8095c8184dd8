"""Judges the branches of a court: what a run did, what would have been best, and whether that was about as good.

    difference  by how much the data to come is harder after a branch than after the control, "other data"; nats, with
                its standard error: both are measured on the same samples
    learnt      by how much suspects that no branch was trained on are easier after it than after the control; as in a
                trial of the run (attribution/harm.py), noise that became less surprising was not learnt

The best branch is chosen as a run chooses its remedy (attribution/remedies.py). Remedies count only where training on
other data harms, too: a lower rate would win over a few steps in any case, as noise shrinks with it.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megastable.attribution.harm import SURE, BranchLosses, HarmTrial, judge_trial, mean_difference
from megastable.attribution.remedies import NOTHING, OTHER_DATA, TOLERANCE, choose_remedy, harms_anyway
from megastable_tools.forensics.court.candidates import Candidate

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class BranchOutcome:
    """A branch. coming, held_out: losses of the data to come, and of suspects that no branch was trained on, at its
    end; [n] and [m] nats. losses, norms: of its steps."""

    candidate: Candidate
    coming: Floats
    held_out: Floats
    losses: Floats
    norms: Floats


@dataclass(frozen=True)
class CourtRow:
    """A branch in numbers; nats, nan where there is nothing to measure, infinite where the state is not finite.
    intrusive: its place, from 0. counts: whether it may be the best one."""

    name: str
    about: str
    intrusive: int
    counts: bool
    loss: float
    difference: float
    difference_error: float
    learnt: float
    learnt_error: float
    highest_norm: float
    losses: list[float]
    norms: list[float]

    @property
    def facts(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class CourtVerdict:
    """rows: of all branches, the least intrusive first. choice: what the run did; best: what would have been best.
    worse: by how many nats the data to come is harder after the choice, with its standard error. harmed_anyway:
    training on other data harms, too, so that remedies count. trial: the verdict on the suspects."""

    rows: list[CourtRow]
    choice: str
    best: str
    worse: float
    worse_error: float
    harmed_anyway: bool
    trial: HarmTrial

    @property
    def is_good(self) -> bool:
        """Whether the choice was about as good as the best one."""
        return not self.worse > max(TOLERANCE, SURE * self.worse_error)


def judge_branches(
    outcomes: Sequence[BranchOutcome],
    before: Floats,
    choice: str,
    vocabulary: int,
    suspects: int,
    repetition: tuple[bool, npt.NDArray[np.bool_]] | None = None,
) -> CourtVerdict:
    """The verdict on a run that did as the branch `choice` does.

    Args:
        outcomes: the least intrusive first; those of `NOTHING` and `OTHER_DATA` among them.
        before: losses of the data to come on the state that all began with, [n] nats.
        vocabulary: how many tokens there are.
        suspects: how many the branches have, with those held out.
        repetition: as of `find_repetition`, None: there is none.
    """

    def try_suspects(outcome: BranchOutcome) -> HarmTrial:
        coming = BranchLosses(outcome.coming, control.coming, before, before)
        held_out = outcome.held_out, control.held_out
        return judge_trial(coming, held_out, vocabulary, suspects, outcome.losses.size, repetition)

    by_name = {outcome.candidate.name: outcome for outcome in outcomes}
    control, steps = by_name[OTHER_DATA], by_name[NOTHING].losses.size
    harmed_anyway = harms_anyway(control.coming, before)
    counting = {
        name: outcome.coming
        for name, outcome in by_name.items()
        if harmed_anyway or not outcome.candidate.is_remedy
    }
    best = choose_remedy(counting, steps).chosen
    worse, worse_error = _compare(by_name[choice].coming, by_name[best].coming)
    rows = [
        _row(place, outcome, control, try_suspects(outcome), outcome.candidate.name in counting)
        for place, outcome in enumerate(outcomes)
    ]
    trial = try_suspects(by_name[NOTHING])
    return CourtVerdict(rows, choice, best, worse, worse_error, harmed_anyway, trial)


def describe_verdict(found: CourtVerdict) -> str:
    """As a sentence."""
    worse = f"{found.worse:+.3f} ± {found.worse_error:.3f} nats"
    if found.choice == found.best:
        what = f"the run chose well: no branch is clearly better than what it did, {found.choice!r}"
    elif found.is_good:
        what = f"the run chose well: what it did, {found.choice!r}, is as good as {found.best!r} ({worse})"
    else:
        what = f"the run did not choose well: after what it did, {found.choice!r}, the data to come is {worse} harder "
        what += f"than after {found.best!r}"
    if found.harmed_anyway:
        return f"{what}. Other data does harm, too, so remedies count"
    return f"{what}. Other data does no harm, so remedies do not count: a lower rate wins over a few steps in any case"


def _compare(one: Floats, other: Floats) -> tuple[float, float]:
    """As `mean_difference`; 0 between two states that are not finite."""
    if not np.isfinite(one).all() and not np.isfinite(other).all():
        return 0.0, 0.0
    return mean_difference(one, other)


def _level(losses: Floats) -> float:
    return float(losses.mean()) if np.isfinite(losses).all() else math.inf


def _row(
    place: int, outcome: BranchOutcome, control: BranchOutcome, trial: HarmTrial, counts: bool
) -> CourtRow:
    candidate = outcome.candidate
    difference, error = _compare(outcome.coming, control.coming)
    return CourtRow(
        candidate.name, candidate.about, place, counts, _level(outcome.coming), difference, error, trial.learnt,
        trial.learnt_error, float(np.max(outcome.norms, initial=0.0)), outcome.losses.tolist(), outcome.norms.tolist(),
    )  # fmt: skip
