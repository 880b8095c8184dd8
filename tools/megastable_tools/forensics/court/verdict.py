"""Candidates of a court, and the judgement: what a run did, what would have been best, and whether that was as good.

Candidates are branches that are trained from the same state, the least intrusive first. "nothing" trains on the data as
it was, "other data" has harmless samples in the places of the suspects. Every other one has the data as it was, and a
remedy: those that a run tries itself (`stability.policy.remedies`), by the same names, whatever its recipe and its
budgets allow; and a cut of the rate as deep as two.

    difference  by how much the data to come is harder after a branch than after the control, "other data"; nats, with
                its standard error: both are measured on the same samples
    learnt      by how much suspects that no branch was trained on are easier after it than after the control; as in a
                trial of the run (megastable_guard/trials.py), noise that became less surprising was not learnt

The best branch is chosen as a run chooses its remedy (megastable_guard/trials.py). Remedies count only where training
on other data harms, too: a lower rate would win over a few steps in any case, as noise shrinks with it.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import numpy.typing as npt

from megastable.base.errors import ConfigError
from megastable.config.tree import RunConfig
from megastable_guard.guard_config import RemedyName
from megastable_guard.policy import ADJUSTED, ONCE, REWARM_FROM
from megastable_guard.policy_state import warmup_share
from megastable_guard.trials import (
    NOTHING,
    OTHER_DATA,
    SURE,
    TOLERANCE,
    BranchLosses,
    HarmTrial,
    choose_remedy,
    harms_anyway,
    judge_trial,
    mean_difference,
)

CUT_TWICE = "cut_lr_twice"
ADJUSTMENTS = frozenset({*ONCE, "other_kernels", *ADJUSTED})  # those that not every recipe has
ORDER = (NOTHING, OTHER_DATA, *get_args(RemedyName), CUT_TWICE)

# The rate of an update: from the usual one, the updates of the branch so far, and the rate at its beginning.
ChangeRate = Callable[[float, int, float], float]


def keep_rate(usual: float, updates: int, first: float) -> float:
    return usual


@dataclass(frozen=True)
class Candidate:
    """adjustment: of engine/adjustments.py, or ""."""

    name: str
    about: str
    change_rate: ChangeRate = keep_rate
    adjustment: str = ""
    leaves_fp8: bool = False
    leaves_kernels: bool = False

    @property
    def is_remedy(self) -> bool:
        return self.name not in (NOTHING, OTHER_DATA)


def list_candidates(config: RunConfig, adjustments: Collection[str]) -> list[Candidate]:
    """All that a run with this recipe could do, the least intrusive first. adjustments: that are possible."""
    c = config.stability.policy

    def warm_up(usual: float, updates: int, first: float) -> float:
        return usual * warmup_share(0, updates, c.rewarm_steps, REWARM_FROM)

    cut_factor, rewarm_text = c.cut_factor, f"the rate warms up again, over {c.rewarm_steps} updates"
    reset_text = f"the optimizer's moments begin again at zero, and {rewarm_text}"
    all_candidates = [
        Candidate(NOTHING, "the data as it was"),
        Candidate(OTHER_DATA, "harmless samples in the places of the suspects"),
        Candidate("cap_lr", "the rate no higher than at first", lambda usual, _, first: min(usual, first)),
        Candidate("rewarm", rewarm_text, warm_up),
        Candidate("reset_bias", "the biases of all experts begin again at zero"),
        Candidate("past_routing", "experts are chosen by router weights of 8 to 16 updates ago"),
        Candidate("reset_moments", reset_text, warm_up),
        *(
            Candidate(name, about.removesuffix(" for the rest of the run"), adjustment=name)
            for name, about in ADJUSTED.items()
        ),
        Candidate("leave_fp8", f"without FP8, in {config.precision.kind}", leaves_fp8=True),
        Candidate("other_kernels", "by plain PyTorch in place of all kernels", leaves_kernels=True),
        Candidate("cut_lr", f"the rate x {cut_factor:g}", lambda usual, *_: cut_factor * usual),
        Candidate(CUT_TWICE, f"the rate x {cut_factor**2:g}", lambda usual, *_: cut_factor**2 * usual),
    ]
    impossible = ADJUSTMENTS.difference(adjustments) | (
        {"leave_fp8"} if config.precision.fp8 is None else set()
    )
    possible_candidates = [
        all_candidate for all_candidate in all_candidates if all_candidate.name not in impossible
    ]
    return sorted(possible_candidates, key=lambda candidate: ORDER.index(candidate.name))


def choose_candidates(every: Sequence[Candidate], only: Sequence[str], choice: str) -> list[Candidate]:
    """The candidates with the names `only`, or all without any, and those that a verdict on `choice` needs. Raises
    ConfigError for a name that there is not."""
    candidate_names = [candidate.name for candidate in every]
    if unknown_names := [candidate_name for candidate_name in only if candidate_name not in candidate_names]:
        raise ConfigError(f"--only {unknown_names[0]!r}: choose from {', '.join(candidate_names)}")
    wanted_names = {*(only or candidate_names), choice, NOTHING, OTHER_DATA}
    return [candidate for candidate in every if candidate.name in wanted_names]


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
        coming_losses = BranchLosses(outcome.coming, control.coming, before, before)
        held_out = outcome.held_out, control.held_out
        return judge_trial(coming_losses, held_out, vocabulary, suspects, outcome.losses.size, repetition)

    by_name = {outcome.candidate.name: outcome for outcome in outcomes}
    control, steps = by_name[OTHER_DATA], by_name[NOTHING].losses.size
    harmed_anyway = harms_anyway(control.coming, before)
    counting = [outcome for outcome in outcomes if harmed_anyway or not outcome.candidate.is_remedy]
    counting_losses = {outcome.candidate.name: outcome.coming for outcome in counting}
    best_branch = choose_remedy(counting_losses, steps).chosen
    worse_nats, worse_error = _compare(by_name[choice].coming, by_name[best_branch].coming)
    branch_rows = list[CourtRow]()
    for branch_place, outcome in enumerate(outcomes):
        candidate, branch_trial = outcome.candidate, try_suspects(outcome)
        mean_loss = float(outcome.coming.mean()) if np.isfinite(outcome.coming).all() else math.inf
        difference, difference_error = _compare(outcome.coming, control.coming)
        branch_rows.append(CourtRow(
            candidate.name, candidate.about, branch_place, candidate.name in counting_losses, mean_loss,
            difference, difference_error, branch_trial.learnt, branch_trial.learnt_error,
            float(np.max(outcome.norms, initial=0.0)), outcome.losses.tolist(), outcome.norms.tolist(),
        ))  # fmt: skip
    trial = try_suspects(by_name[NOTHING])
    return CourtVerdict(branch_rows, choice, best_branch, worse_nats, worse_error, harmed_anyway, trial)


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
