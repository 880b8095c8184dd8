"""Defines what is told of a trial: branches of a few steps from one state, compared before anything was taken away.

The journal's event is `branches_tried` (run/events/stability_events.py). Suspected samples are tried with a verdict,
remedies with the name of the branch that was chosen; both are told alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from megastable.base.text import count_noun
from megastable.report.postmortem.journal import MARKS, STARTS, Journal
from megastable.run.events.event import Event
from megastable.run.events.stability_events import (
    BranchesTried,
    DiscardExamined,
    IncidentEvent,
    SamplesDropped,
    SamplesExamined,
)

NEAR = 8  # events between a trial and the incident that is opened because of it
EXAMINED = (DiscardExamined, SamplesExamined)  # samples, none of them bad
ENDS = (IncidentEvent, *EXAMINED, SamplesDropped, *STARTS, *MARKS)  # before them was another matter
EXPLANATION = (
    "A branch is a few steps of training from the same state, after which the run stands as it did before. The data to "
    "come: samples from the rest of the run, the same for all branches, and trained on by none; ± is the standard "
    "error of the mean difference."
)
WITH, WITHOUT = "with the suspects", "without the suspects"  # names of branches (recovery/replay_trials.py)
WITHOUT_REMEDY = ("nothing", "other data")  # names of branches (megastable_guard/trials.py)
LABELS = {
    "cap_lr": "rate capped", "cut_lr": "rate cut", "leave_fp8": "without FP8", "rewarm": "warm-up again",
    "reset_bias": "biases reset", "reset_moments": "moments reset", "clip": "tighter clipping",
    "z_loss": "larger z-loss", "beta2": "lower beta2",
    "cut_lr_twice": "rate cut twice", "qk_clip": "QK-clip", "swiglu_clamp": "clamped SwiGLU",
    "other_kernels": "plain PyTorch", "hold_router": "held routers", "router_z_loss": "larger z-loss of routers",
    "past_routing": "choices by older routers",
    "balance_loss": "larger balance loss", "no_balance_loss": "no balance loss", "router_rate": "lower rate of routers",
}  # fmt: skip
HARMLESS = ("new", "noise")  # verdicts after which suspects are trained on, if they are not few and gross


class BranchFacts(BaseModel):
    """A branch. cost: how intrusive it is, from 0, the least. loss: of samples of the data to come at its end, nats per
    token; difference: that minus the control's, and its standard error. losses, norms: of its steps; nats per token,
    and gradient norms before clipping."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    cost: int | None = None
    loss: float | None = None
    difference: float | None = None
    error: float | None = None
    losses: list[float] = []
    norms: list[float] = []

    @property
    def label(self) -> str:
        """Its name in words."""
        return LABELS.get(self.name, self.name.replace("_", " "))

    @property
    def last_norm(self) -> float | None:
        """None if it has no steps."""
        return self.norms[-1] if self.norms else None

    @property
    def is_control(self) -> bool:
        """Whether it is the one that others are compared with."""
        return self.difference == 0 and self.error == 0


class TrialFacts(BaseModel):
    """A trial, on the state after step `snapshot`. step: at which it was held; steps: of each branch. chosen: the name
    of the branch whose data or remedy the run went on with; or of the best one, if no remedy won; "" if not known.
    corpus: that was left out of a branch. tokens: ids of those that were rare until then; texts: theirs, if known.
    before, present: mean loss of the data to come on the snapshot, and where the run stood. overruled: a remedy won in
    a later trial. seconds: duration."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    step: int
    snapshot: int
    steps: int = 0
    suspects: int | None = None
    verdict: str = ""
    chosen: str = ""
    corpus: str = ""
    tokens: list[int] = []
    texts: list[str] = []
    damaged: bool = False
    overruled: bool = False
    before: float | None = None
    present: float | None = None
    seconds: float | None = None
    reason: str = ""
    branches: list[BranchFacts]

    @field_validator("branches")
    @classmethod
    def _some(cls, branches: list[BranchFacts]) -> list[BranchFacts]:
        if not branches:
            raise ValueError("no branches")
        return branches

    @property
    def last(self) -> int:
        """The last step of its longest branch."""
        return self.snapshot + max(len(branch.losses) for branch in self.branches)

    @property
    def control(self) -> BranchFacts | None:
        return next((branch for branch in self.branches if branch.is_control), None)

    @property
    def has_remedy(self) -> bool:
        """Whether remedies were tried, and one won."""
        return self.suspects is None and not self.corpus and self.chosen not in ("", *WITHOUT_REMEDY)

    @property
    def summary(self) -> str:
        """What was tried, on which state, and what came out: a sentence."""
        winner_label = next((branch.label for branch in self.branches if branch.name == self.chosen), "")
        outcome = self.reason.rstrip(".") or ", ".join(branch.label for branch in self.branches)
        if self.has_remedy and winner_label and self.reason:
            outcome = f"{winner_label} won: {self.reason.rstrip('.')}"
        return f"Tried at step {self.step:,}, on the state after step {self.snapshot:,}: {outcome}."

    @property
    def details(self) -> str:
        """How its branches are told apart, and what became of them."""
        told = [f"Each branch has {count_noun(self.steps, 'step')}."]
        if self.suspects is not None:
            told.append("Some suspects are in neither branch, to measure what is learnt from the others.")
        if self.control is not None:
            told.append(f"The control is the branch “{self.control.label}”.")
        known = [(self.before, "before the branches"), (self.present, "where the run stood")]
        losses = [f"{loss:.3f} {where}" for loss, where in known if loss is not None and math.isfinite(loss)]
        if losses:
            told.append(f"The mean loss of the data to come was {' and '.join(losses)}.")
        if self.tokens:
            token_names = ", ".join(f"“{token_text}”" for token_text in self.texts or map(str, self.tokens))
            told.append(f"Tokens that were rare until then, the most frequent first: {token_names}.")
        if self.suspects is None and self.chosen in WITHOUT_REMEDY:
            told.append("No remedy won, so none was taken.")
        elif self.overruled:
            told.append("Then remedies were tried, and one won: the suspects were read again, with it.")
        elif self.chosen:
            told.append("The run went on as in the chosen one.")
        if self.damaged:
            told.append(
                "The state where the run stood was worse than all others, which these steps did not cause."
            )
        return " ".join(told)


def find_trials(journal: Journal, own: Sequence[int]) -> list[TrialFacts]:
    """The trials of an incident, in order; those that cannot be understood are left out.

    Args:
        own: indexes of the incident's events, ascending.
    """
    events, trial_indexes = journal.events, list[int]()
    named_steps = (events[own[0]].get(step_key) for step_key in ("onset", "step"))
    onset_step = next((named_step for named_step in named_steps if type(named_step) is int), None)
    # Samples are tried before the incident of a look back is opened: nothing else may lie between.
    for index in range(own[0] - 1, max(-1, own[0] - 1 - NEAR), -1):
        if isinstance(events[index], ENDS):
            break
        if isinstance(events[index], BranchesTried):
            trial_indexes.append(index)
    trial_indexes += [n for n in range(own[0], own[-1] + 1) if isinstance(events[n], BranchesTried)]
    trials_found = list[tuple[int | None, TrialFacts]]()  # with the index of the attribution that follows
    for index in sorted(trial_indexes):
        known_fields = {
            field_name: value for field_name, value in events[index].fields.items() if value is not None
        }
        try:
            trial = TrialFacts.model_validate(known_fields)
        except ValidationError:
            continue
        if onset_step is None or trial.step >= onset_step:
            trials_found.append((_find_attribution(events, own, index), trial))
    told_trials = list[TrialFacts]()
    for trial_number, (at, trial) in enumerate(trials_found):
        later_trials = [other for other_at, other in trials_found[trial_number + 1 :] if other_at == at]
        cause = None if at is None else events[at].get("cause", "")
        # What is learnt of the suspects does not matter where a remedy wins: they are read again.
        is_overruled = trial.suspects is not None and any(
            later_trial.has_remedy for later_trial in later_trials
        )
        chosen_name = "" if is_overruled else _name_chosen(trial, cause if isinstance(cause, str) else None)
        told_trials.append(trial.model_copy(update={"chosen": chosen_name, "overruled": is_overruled}))
    return told_trials


def _name_chosen(trial: TrialFacts, cause: str | None) -> str:
    """The branch with which the run goes on. cause: that the incident had after the trial; None if it has none yet."""
    if trial.chosen or trial.suspects is None:
        return trial.chosen
    if not trial.verdict or cause is None:
        return ""
    # A few gross samples are skipped although no harm was measured: their cause is data.
    return WITH if trial.verdict in HARMLESS and cause != "data" else WITHOUT


def _find_attribution(events: Sequence[Event], own: Sequence[int], after: int) -> int | None:
    """The index of the event by which an incident was attributed next, or its samples were examined without
    a bad sample."""
    for event_index in range(after + 1, own[-1] + 1):
        event = events[event_index]
        is_attributed = isinstance(event, IncidentEvent) and event.what == "attributed" and event_index in own
        if is_attributed or isinstance(event, EXAMINED):
            return event_index
    return None
