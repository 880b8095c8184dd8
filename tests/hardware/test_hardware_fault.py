from __future__ import annotations

from dataclasses import replace
from typing import Any

from megastable.hardware.hardware_fault import FOUND, SEVERAL, WINDOW, FaultCounts, HardwareFault, read_counts
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
        assert not counts.count(fault(1), step).lasting
        assert not counts.count(fault(2), step).lasting
    found = counts.count(fault(1), 9)
    assert found.excludes_host and list(found.ranks) == [1] and "3 times" in found.reason


def test_what_was_sent_or_is_of_several_hosts_counts_for_nobody() -> None:
    counts = FaultCounts()
    for step in range(3 * SEVERAL):
        assert not counts.count(fault(1, 2), step).lasting
        assert not counts.count(replace(fault(1), link=True), step).lasting


def test_one_step_counts_once() -> None:
    counts = FaultCounts()
    for _ in range(3 * SEVERAL):
        assert not counts.count(fault(1), 7).lasting


def test_chances_are_forgotten() -> None:
    counts = FaultCounts()
    for number in range(3 * SEVERAL):
        assert not counts.count(fault(1), number * (WINDOW // 2 + 1)).lasting


def test_a_host_must_leave_only_if_it_is_known_which() -> None:
    assert fault(1, lasting=True).excludes_host
    assert not fault(lasting=True).excludes_host and not fault(1).excludes_host
    assert not HardwareFault(0, True, [1, 2], ["node-1", "node-2"], "one of them was wrong").excludes_host


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
    assert FaultCounts(read_counts(events, HOSTS)[0]).count(fault(1), 850).excludes_host
    assert not FaultCounts(read_counts(events, HOSTS)[0]).count(fault(2), 850).lasting
    assert not FaultCounts(read_counts(events, HOSTS)[0]).count(fault(1), 900 + WINDOW).lasting


def test_faults_of_another_host_or_before_it_was_accused_do_not_count() -> None:
    events = [found(StateChanged, step, 1) for step in (1, 2)]
    assert read_counts(events, ["node-0", "spare", "node-2", "node-3"]) == (set(), set())
    assert read_counts(events, ["node-0"]) == (set(), set())
    assert read_counts([*events, found(HostFaulty, 3, 1), found(StateChanged, 4, 1)], HOSTS) == (
        {(4, 1)},
        set(),
    )


def test_what_earlier_versions_and_others_wrote_does_not_count() -> None:
    events = [
        StateChanged.of({"step": 1, "ranks": [1]}),
        StateChanged.of({"ranks": ["a"], "hosts": [3], "step": "x"}),
    ]
    assert read_counts(events, HOSTS) == (set(), set())
