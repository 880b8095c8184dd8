"""The account of evidence: stated weights, bounded sums, facts that count once."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.stability import odds
from megastable.stability.actions import Cause
from megastable.stability.odds import (
    CERTAIN,
    HYPOTHESES,
    ONCE,
    WEIGHTS,
    Account,
    Clue,
    Examined,
    clues,
    weigh,
)

CLUES = st.tuples(st.sampled_from(Clue), st.floats(0, 6))


def account(*clues: tuple[Clue, float]) -> Account:
    found = Account(since=0, clock=0)
    for clock, (clue, power) in enumerate(clues, 1):
        found = weigh(found, clock, clue, power)
    return found


def test_before_anything_is_known_the_schedule_was_chosen_with_care() -> None:
    start = account()
    assert [start.odds(cause) for cause in HYPOTHESES] == [-1.0, 0.0, 0.0]
    assert start.odds(Cause.HARDWARE) == -CERTAIN


@given(st.lists(CLUES, max_size=30))
def test_no_sum_leaves_its_bounds_and_only_one_cause_is_favoured(clues: list[tuple[Clue, float]]) -> None:
    found = account(*clues)
    assert all(abs(x) <= CERTAIN for x in found.sums)
    assert sum(found.odds(cause) > 0 for cause in HYPOTHESES) <= 1
    assert 0 <= found.clock <= len(clues)
    assert Account.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize("clue", ONCE)
def test_a_fact_counts_once(clue: Clue) -> None:
    once = account((clue, 1.0))
    assert weigh(once, 9, clue, 1.0) == once


@given(st.lists(CLUES, max_size=10), st.floats(0, 6))
def test_recurrences_next_to_what_was_left_out_say_nothing_of_the_rate_itself(
    clues: list[tuple[Clue, float]], power: float
) -> None:
    before = account(*clues)
    assert weigh(before, 99, Clue.ADJACENT, power).sums[0] == before.sums[0]
    assert weigh(before, 99, Clue.FAR, 0.0).sums[0] == before.sums[0]  # nor where nobody was examined


def test_the_table_says_what_the_weights_are() -> None:
    """Of the docstring: every clue has a line, with its numbers."""
    lines = re.findall(r"^\| (.+?) \| (\S+) \| (\S+) \| (\S+) \|$", odds.__doc__ or "", re.M)[1:]
    told = [tuple({"-p": -1.0, "+p": 1.0}.get(x) or float(x) for x in line[1:]) for line in lines[1:]]
    assert sorted(told) == sorted(
        weights if clue is not Clue.FAR else (1.0, -1.0, 0.0) for clue, weights in WEIGHTS.items()
    )


def test_however_often_the_same_test_is_done_it_is_ten_thousand_to_one_at_most() -> None:
    assert account(*[(Clue.GUILTY, 12.0)] * 9).odds(Cause.DATA) == 4.0
    assert account(*[(Clue.NOBODY, 12.0)] * 9).sums == (-1.0, 0.0, -4.0)


def test_a_cap_is_no_excuse_before_anything_came_back() -> None:
    first, second = (
        [clue for clue, _ in clues(Cause.STATE, Examined(odds=2.0), again, False, True)]
        for again in (False, True)
    )
    assert Clue.CAPPED not in first and Clue.CAPPED in second
