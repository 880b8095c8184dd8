"""Which branch was best, whether a run chose well, and which branch is like what a run did."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megastable.base.errors import ConfigError
from megastable.config.tree import RunConfig
from megastable_tools.forensics.court.candidates import choose_candidates, list_candidates
from megastable_tools.forensics.court.court_case import choose_branch_like
from megastable_tools.forensics.court.verdict import (
    BranchOutcome,
    CourtVerdict,
    describe_verdict,
    judge_branches,
)

BEFORE = np.linspace(2.0, 3.0, 64)
EVERY = {candidate.name: candidate for candidate in list_candidates(RunConfig(), {"reset_moments", "clip"})}


def judge(choice: str, **costs: float) -> CourtVerdict:
    """costs: by how many nats the data to come is harder after a branch than before it; _ stands for a space."""
    steps = np.zeros(4)
    outcomes = [
        BranchOutcome(EVERY[name], BEFORE + cost, BEFORE[:8] + cost, steps, steps)
        for name, cost in (
            (name if name in EVERY else name.replace("_", " "), cost) for name, cost in costs.items()
        )
    ]
    return judge_branches(outcomes, BEFORE, choice, 1000, 8)


@pytest.mark.parametrize(("choice", "good"), [("nothing", False), ("other data", True), ("cut_lr", True)])
def test_a_remedy_counts_for_nothing_where_other_data_does_no_harm(choice: str, good: bool) -> None:
    found = judge(choice, nothing=0.1, other_data=-0.1, cut_lr=-0.2)
    assert (found.best, found.is_good, found.harmed_anyway) == ("other data", good, False)
    assert [row.counts for row in found.rows] == [True, True, False]
    assert found.trial.verdict == "bad" and "remedies do not count" in describe_verdict(found)


@pytest.mark.parametrize(("choice", "good"), [("nothing", False), ("other data", False), ("cut_lr", True)])
def test_a_remedy_is_best_where_other_data_does_harm_too(choice: str, good: bool) -> None:
    found = judge(choice, nothing=0.5, other_data=0.4, cut_lr=-0.2)
    assert (found.best, found.is_good, found.harmed_anyway) == ("cut_lr", good, True)


def test_the_least_intrusive_of_those_that_are_as_good_is_best() -> None:
    found = judge("clip", nothing=0.5, other_data=0.4, cap_lr=0.1, clip=-0.195, cut_lr=-0.2)
    assert (found.best, found.is_good) == ("clip", True)
    assert judge("other data", nothing=0.005, other_data=0.0).best == "nothing"


def test_a_state_that_is_not_finite_is_worse_than_any_other() -> None:
    found = judge("nothing", nothing=math.nan, other_data=math.nan, cut_lr=0.3)
    assert (found.best, found.is_good, found.rows[0].loss) == ("cut_lr", False, math.inf)
    assert judge("other data", nothing=math.nan, other_data=0.0).best == "other data"


def test_only_some_candidates() -> None:
    every = list_candidates(RunConfig(), {"reset_moments", "clip", "z_loss", "beta2"})
    assert [c.name for c in choose_candidates(every, ["cut_lr"], "clip")] == [
        "nothing",
        "other data",
        "clip",
        "cut_lr",
    ]
    assert choose_candidates(every, [], "nothing") == every
    with pytest.raises(ConfigError, match="--only 'half': choose from nothing, other data, cap_lr"):
        choose_candidates(every, ["half"], "nothing")


def test_the_rate_of_the_candidates() -> None:
    rates = {name: candidate.change_rate for name, candidate in EVERY.items()}
    assert rates["nothing"](3.0, 5, 2.0) == 3.0 and rates["cap_lr"](3.0, 5, 2.0) == 2.0
    assert rates["cut_lr"](3.0, 5, 2.0) == 1.5 and rates["cut_lr_twice"](3.0, 5, 2.0) == 0.75
    assert rates["rewarm"](3.0, 0, 2.0) == pytest.approx(0.3) and 0.3 < rates["rewarm"](3.0, 5, 2.0) < 3.0


@pytest.mark.parametrize(
    ("actions", "won", "took_away", "branch"),
    [
        (["rewind"], [], True, "other data"),
        (["rewind"], [], False, "nothing"),
        (["skip"], [], True, "nothing"),
        (["skip", "rewind"], [], True, "other data"),
        (["apply"], [], False, "nothing"),
        (["handover"], [], True, "other data"),
        (["rewind", "cut_lr"], [], True, "cut_lr"),
        (["rewind", "cap_lr"], ["cap_lr"], False, "cap_lr"),
        (["rewind", "adjust"], ["other data", "z_loss"], False, "z_loss"),
        (["fall_back"], [], False, "leave_fp8"),
        (["swap_corpus"], [], True, "other data"),
        ([], [], False, "nothing"),
    ],
)
def test_the_branch_that_is_like_what_a_run_did(
    actions: list[str], won: list[str], took_away: bool, branch: str
) -> None:
    assert choose_branch_like(actions, won, took_away) == branch
