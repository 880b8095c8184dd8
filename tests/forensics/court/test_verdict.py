"""Which branch was best, whether a run chose well, which branch is like what it did; and what skips are given back."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megastable.base.errors import ConfigError
from megastable.config.tree import RunConfig
from megastable.data.order import Order, OrderedCorpus
from megastable.data.skip_ledger import Ledger, release_entries, sample_entries
from megastable.data.skips import Selection
from megastable_guard.trials import HELD_OUT, HarmTrial, TrialVerdict
from megastable_tools.forensics.court.hold_court import choose_branch_like
from megastable_tools.forensics.court.skip_review import (
    SkipGroup,
    choose_tried,
    find_groups,
    is_given_back,
    put_first,
)  # fmt: skip
from megastable_tools.forensics.court.verdict import (
    BranchOutcome,
    CourtVerdict,
    choose_candidates,
    describe_verdict,
    judge_branches,
    list_candidates,
)  # fmt: skip

BEFORE = np.linspace(2.0, 3.0, 64)
EVERY = {candidate.name: candidate for candidate in list_candidates(RunConfig(), {"reset_moments", "clip"})}


def judge(choice: str, **costs: float) -> CourtVerdict:
    """costs: by how many nats the data to come is harder after a branch than before it; _ stands for a space."""
    steps, names = np.zeros(4), {name: name if name in EVERY else name.replace("_", " ") for name in costs}
    outcomes = [
        BranchOutcome(EVERY[names[name]], BEFORE + cost, BEFORE[:8] + cost, steps, steps)
        for name, cost in costs.items()
    ]
    return judge_branches(outcomes, BEFORE, choice, 1000, 8)


@pytest.mark.parametrize(
    ("choice", "costs", "best", "good", "harmed"),
    [
        # A remedy counts for nothing where other data does no harm.
        ("nothing", {"nothing": 0.1, "other_data": -0.1, "cut_lr": -0.2}, "other data", False, False),
        ("other data", {"nothing": 0.1, "other_data": -0.1, "cut_lr": -0.2}, "other data", True, False),
        ("cut_lr", {"nothing": 0.1, "other_data": -0.1, "cut_lr": -0.2}, "other data", True, False),
        # It is best where that does harm, too.
        ("other data", {"nothing": 0.5, "other_data": 0.4, "cut_lr": -0.2}, "cut_lr", False, True),
        ("cut_lr", {"nothing": 0.5, "other_data": 0.4, "cut_lr": -0.2}, "cut_lr", True, True),
        # The least intrusive of those that are as good.
        ("clip", {"nothing": 0.5, "other_data": 0.4, "cap_lr": 0.1, "clip": -0.195, "cut_lr": -0.2}, "clip", True,
         True),
        ("other data", {"nothing": 0.005, "other_data": 0.0}, "nothing", True, False),
        # A state that is not finite is worse than any other.
        ("nothing", {"nothing": math.nan, "other_data": math.nan, "cut_lr": 0.3}, "cut_lr", False, True),
        ("other data", {"nothing": math.nan, "other_data": 0.0}, "other data", True, False),
    ],
)  # fmt: skip
def test_judge_branches(choice: str, costs: dict[str, float], best: str, good: bool, harmed: bool) -> None:
    found = judge(choice, **costs)
    assert (found.best, found.is_good, found.harmed_anyway) == (best, good, harmed)
    assert all(row.counts is (harmed or row.name in ("nothing", "other data")) for row in found.rows)
    assert ("remedies do not count" in describe_verdict(found)) is not harmed
    assert found.rows[0].loss == pytest.approx(
        math.inf if math.isnan(costs["nothing"]) else 2.5 + costs["nothing"]
    )


def test_choose_candidates_takes_those_named_and_those_that_a_verdict_needs() -> None:
    every = list_candidates(RunConfig(), {"reset_moments", "clip", "z_loss", "beta2"})
    names = [c.name for c in choose_candidates(every, ["cut_lr"], "clip")]
    assert names == ["nothing", "other data", "clip", "cut_lr"]
    assert choose_candidates(every, [], "nothing") == every
    with pytest.raises(ConfigError, match="--only 'half': choose from nothing, other data, cap_lr"):
        choose_candidates(every, ["half"], "nothing")


@pytest.mark.parametrize(
    ("actions", "won", "took_away", "branch"),
    [
        (["rewind"], [], True, "other data"), (["rewind"], [], False, "nothing"), (["skip"], [], True, "nothing"),
        (["skip", "rewind"], [], True, "other data"), (["apply"], [], False, "nothing"),
        (["handover"], [], True, "other data"), (["rewind", "cut_lr"], [], True, "cut_lr"),
        (["rewind", "cap_lr"], ["cap_lr"], False, "cap_lr"),
        (["rewind", "adjust"], ["other data", "z_loss"], False, "z_loss"), (["fall_back"], [], False, "leave_fp8"),
        (["swap_corpus"], [], True, "other data"), ([], [], False, "nothing"),
    ],
)  # fmt: skip
def test_choose_branch_like(actions: list[str], won: list[str], took_away: bool, branch: str) -> None:
    assert choose_branch_like(actions, won, took_away) == branch


# What incidents skip


def test_find_groups_names_what_incidents_skip_and_nobody_else() -> None:
    corpora = [OrderedCorpus("one", 4001, 3.0, "1" * 8), OrderedCorpus("two", 801, 1.0, "2" * 8)]
    order = Order(corpora, sequence_length=4, seed=5)
    lines = [
        *sample_entries(order, np.arange(100, 130), "data: bad", (), 1, 11),
        *sample_entries(order, np.arange(120, 160), "data: bad", (), 2, 12),
        *sample_entries(order, np.arange(150, 155), "by a person"),
    ]
    ledger = Ledger([*lines, *release_entries(Ledger(lines), order, np.arange(100, 105), "harmless", 3, 13)])
    groups = find_groups(ledger, order, Selection(order, ledger.exclusions), 200)
    assert [(group.incident, group.step) for group in groups] == [(1, 11), (2, 12)]
    wanted = [[*range(105, 130)], [*range(120, 150), *range(155, 160)]]
    for group, positions in zip(groups, wanted, strict=True):
        places = [order.locate_samples(np.array(some)) for some in (group.positions, positions)]
        found, given = (sorted(zip(of.corpus, of.sequence, strict=True)) for of in places)
        assert found == given and (group.positions >= 200).all()
    ledger = Ledger(
        [*ledger.entries, *release_entries(ledger, order, groups[1].positions, "harmless", 2, 12)]
    )
    left = find_groups(ledger, order, Selection(order, ledger.exclusions), 200)
    # Of those that both name, the later line is the one that counts.
    assert [(group.incident, group.positions.size) for group in left] == [(1, 15)]


@pytest.mark.parametrize("n", [1, 2, 40, 1000])
def test_choose_tried_holds_half_out_and_leaves_half_of_the_places(n: int) -> None:
    tried = choose_tried(SkipGroup(1, 1, np.arange(n)), 128)
    assert 0 < tried.trained.size <= 64 and tried.held_out.size <= min(HELD_OUT, n // 2)
    assert not np.isin(tried.trained, tried.held_out).any()
    batches = put_first([np.full(64, -1), np.full(32, -2), np.full(32, -3)], tried.trained)
    assert [batch.size for batch in batches] == [64, 32, 32]
    first, rest = np.split(np.concatenate(batches), [tried.trained.size])
    assert first.tolist() == tried.trained.tolist() and (rest < 0).all()


@pytest.mark.parametrize(
    ("verdict", "count", "loss", "given_back"),
    [("new", 4, 9.0, True), ("bad", 400, 2.0, False), ("mixed", 400, 2.0, False), ("noise", 400, 4.0, True),
     ("noise", 40, 4.0, True), ("noise", 40, 6.6, False), ("noise", 400, 6.9, False)],
)  # fmt: skip
def test_is_given_back_unless_a_low_rate_may_hide_harm(
    verdict: str, count: int, loss: float, given_back: bool
) -> None:
    trial = HarmTrial(TrialVerdict(verdict), 0.0, 0.1, math.nan, math.nan, count, 16, False, False)
    given = trial, np.full(count, loss), np.linspace(1.0, 3.0, 64), 1000
    assert is_given_back(*given, share=0.5) is given_back
    assert is_given_back(*given, share=0.1) is (verdict == "new")
