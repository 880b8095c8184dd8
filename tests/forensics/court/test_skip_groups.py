"""What incidents skip, sample by sample; where it is put to be tried; what of it is given back."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megastable.attribution.harm import HELD_OUT, HarmTrial, TrialVerdict
from megastable.data.order import Order, OrderedCorpus
from megastable.data.skip_ledger import Ledger, released, sample_entries
from megastable.data.skips import Selection
from megastable_tools.forensics.court.skip_groups import (
    SkipGroup,
    choose_tried,
    find_groups,
    is_given_back,
    put_first,
)

LENGTH = 4
CORPORA = [OrderedCorpus("one", 4001, 3.0, "1" * 8), OrderedCorpus("two", 801, 1.0, "2" * 8)]


def test_the_groups_are_what_incidents_skip_and_nobody_else() -> None:
    order = Order(CORPORA, sequence_length=LENGTH, seed=5)
    first, second = np.arange(100, 130), np.arange(120, 160)
    lines = [
        *sample_entries(order, first, "data: bad", (), 1, 11),
        *sample_entries(order, second, "data: bad", (), 2, 12),
        *sample_entries(order, np.arange(150, 155), "by a person"),
    ]
    ledger = Ledger(lines)
    ledger = Ledger([*lines, *released(ledger, order, np.arange(100, 105), "innocent", 3, 13)])
    groups = find_groups(ledger, order, Selection(order, ledger.exclusions), 200)
    assert [(group.incident, group.step) for group in groups] == [(1, 11), (2, 12)]
    wanted = [set(range(105, 130)), set(range(120, 160)) - set(range(150, 155))]
    for group, positions in zip(groups, wanted, strict=True):
        found, given = (
            order.locate(np.array(sorted(some))) for some in (group.positions.tolist(), positions)
        )
        assert sorted(zip(found.corpus, found.sequence, strict=True)) == sorted(
            zip(given.corpus, given.sequence, strict=True)
        )
        assert (group.positions >= 200).all()
    ledger = Ledger([*ledger.entries, *released(ledger, order, groups[1].positions, "harmless", 2, 12)])
    left = find_groups(ledger, order, Selection(order, ledger.exclusions), 200)
    # Of those that both name, the later line is the one that counts.
    assert [(group.incident, group.positions.size) for group in left] == [(1, 15)]


@pytest.mark.parametrize("n", [1, 2, 40, 128, 1000])
def test_half_of_the_samples_are_held_out_and_half_of_the_places_stay(n: int) -> None:
    tried = choose_tried(SkipGroup(1, 1, np.arange(n)), 128)
    assert tried.trained.size <= 64 and tried.held_out.size == min(HELD_OUT, n // 2, tried.held_out.size)
    assert tried.trained.size and not np.isin(tried.trained, tried.held_out).any()
    batches = put_first([np.full(64, -1), np.full(32, -2), np.full(32, -3)], tried.trained)
    assert [batch.size for batch in batches] == [64, 32, 32]
    assert np.concatenate(batches)[: tried.trained.size].tolist() == tried.trained.tolist()
    assert (np.concatenate(batches)[tried.trained.size :] < 0).all()


@pytest.mark.parametrize(
    ("verdict", "count", "loss", "given_back"),
    [
        ("new", 4, 9.0, True),
        ("bad", 400, 2.0, False),
        ("mixed", 400, 2.0, False),
        ("noise", 400, 2.0, True),
        ("noise", 400, 4.0, True),
        ("noise", 40, 2.0, True),
        ("noise", 40, 4.0, True),
        ("noise", 40, 6.6, False),
        ("noise", 400, 6.9, False),
    ],
)
def test_what_does_no_harm_is_given_back_unless_a_low_rate_may_hide_it(
    verdict: str, count: int, loss: float, given_back: bool
) -> None:
    trial = HarmTrial(TrialVerdict(verdict), 0.0, 0.1, math.nan, math.nan, count, 16, False, False)
    given = trial, np.full(count, loss), np.linspace(1.0, 3.0, 64), 1000
    assert is_given_back(*given, share=0.5) is given_back
    assert is_given_back(*given, share=0.1) is (verdict == "new")
