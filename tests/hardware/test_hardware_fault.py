from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megastable.hardware.hardware_fault import FOUND, SEVERAL, WINDOW, FaultCounts, HardwareFault, read_counts
from megastable.hardware.state_watch import find_minority
from megastable.run.events.event import Event
from megastable.run.events.stability_events import (
    GradientsDoubted,
    HostFaulty,
    ReplayDiffers,
    StateChanged,
)

HOSTS = ["node-0", "node-1", "node-2", "node-3"]


def fault(*ranks: int, lasting: bool = False) -> HardwareFault:
    hosts = sorted({HOSTS[rank] for rank in ranks})
    return HardwareFault(0, lasting, list(ranks), hosts, "it was wrong")


def test_faults_of_one_rank_that_come_again_and_again_are_no_chance() -> None:
    counts = FaultCounts()
    for step in range(SEVERAL - 1):
        assert not counts.count_fault(fault(1), step).lasting
        assert not counts.count_fault(fault(2), step).lasting
    found = counts.count_fault(fault(1), 9)
    assert found.excludes_host and list(found.ranks) == [1] and "3 times" in found.reason


def test_what_was_sent_or_is_of_several_hosts_counts_for_nobody() -> None:
    counts = FaultCounts()
    for step in range(3 * SEVERAL):
        assert not counts.count_fault(fault(1, 2), step).lasting
        assert not counts.count_fault(replace(fault(1), link=True), step).lasting


def test_chances_are_forgotten() -> None:
    counts = FaultCounts()
    for number in range(3 * SEVERAL):
        assert not counts.count_fault(fault(1), number * (WINDOW // 2 + 1)).lasting


def found(kind: type[Event], step: int, *ranks: int, **fields: Any) -> Event:
    return kind(step=step, ranks=list(ranks), hosts=[HOSTS[rank] for rank in ranks], reason="x", **fields)


def test_a_new_process_counts_on() -> None:
    events = [
        found(StateChanged, 900, 1), found(StateChanged, 900, 1), found(StateChanged, 910, 2),
        found(GradientsDoubted, 920, 1, verdict="transient"), found(GradientsDoubted, 930, 3, verdict="persistent"),
        found(GradientsDoubted, 933, 1, verdict="sum"), found(GradientsDoubted, 934, 1, 2, verdict="transient"),
        found(ReplayDiffers, 940, 0, verdict="transient"), found(ReplayDiffers, 950, 0, verdict="persistent"),
    ]  # fmt: skip
    assert all(isinstance(event, FOUND) for event in events)
    assert read_counts(events, HOSTS) == ({(900, 1), (910, 2), (920, 1)}, {(940, 0)})
    # The second process resumed from a checkpoint of before.
    assert FaultCounts(read_counts(events, HOSTS)[0]).count_fault(fault(1), 850).excludes_host
    assert not FaultCounts(read_counts(events, HOSTS)[0]).count_fault(fault(2), 850).lasting
    assert not FaultCounts(read_counts(events, HOSTS)[0]).count_fault(fault(1), 900 + WINDOW).lasting


def test_faults_of_another_host_or_before_it_was_blamed_do_not_count() -> None:
    events = [found(StateChanged, step, 1) for step in (1, 2)]
    assert read_counts(events, ["node-0", "spare", "node-2", "node-3"]) == (set(), set())
    assert read_counts(events, ["node-0"]) == (set(), set())
    assert read_counts([*events, found(HostFaulty, 3, 1), found(StateChanged, 4, 1)], HOSTS) == (
        {(4, 1)},
        set(),
    )


PRINTS = st.integers(-(1 << 63), (1 << 63) - 1)


@given(st.integers(2, 9), st.integers(0, 8), PRINTS, PRINTS)
def test_a_minority_is_named_and_two_are_not_judged(ranks: int, where: int, usual: int, wrong: int) -> None:
    held = dict.fromkeys(range(10, 10 + ranks), usual)
    odd = 10 + where % ranks
    held[odd] = wrong if wrong != usual else usual ^ 1
    found = find_minority(held)
    if ranks == 2:
        assert found == ((10, 11), False)
    else:
        assert found == ((odd,), True)


def test_without_a_majority_all_are_named() -> None:
    assert find_minority({0: 1, 1: 1, 2: 2, 3: 2}) == ((0, 1, 2, 3), False)
    assert find_minority({0: 1, 1: 1, 2: 1, 3: 2, 4: 3}) == ((3, 4), True)
