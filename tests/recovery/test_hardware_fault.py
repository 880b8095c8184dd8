from __future__ import annotations

from megastable.recovery.hardware_fault import SEVERAL, WINDOW, FaultCounts, HardwareFault


def fault(*ranks: int, lasting: bool = False) -> HardwareFault:
    return HardwareFault(0, lasting, list(ranks), ["node-1"], "it was wrong")


def test_faults_of_one_rank_that_come_again_and_again_are_no_chance() -> None:
    counts = FaultCounts()
    for step in range(SEVERAL - 1):
        assert not counts.counted(fault(1), step).lasting
        assert not counts.counted(fault(2), step).lasting
    found = counts.counted(fault(1, 3), 9)
    assert found.accused and list(found.ranks) == [1] and "3 times" in found.reason


def test_chances_are_forgotten() -> None:
    counts = FaultCounts()
    for number in range(3 * SEVERAL):
        assert not counts.counted(fault(1), number * (WINDOW // 2 + 1)).lasting


def test_a_host_must_leave_only_if_it_is_known_which() -> None:
    assert fault(1, lasting=True).accused
    assert not fault(lasting=True).accused and not fault(1).accused
    assert not HardwareFault(0, True, [1, 2], ["node-1", "node-2"], "one of them was wrong").accused
