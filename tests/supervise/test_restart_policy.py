"""What the supervisor does about failed processes: none, data, code, a host; pauses, and hosts that are left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megastable.base.errors import NO_SPACE
from megastable.supervise.exit_cause import End
from megastable.supervise.restart_policy import (
    MOST,
    Failure,
    HostBar,
    choose_remedy,
    exclusions_after,
    in_force,
    next_exclusion,
    pause_seconds,
)
from megastable_guard.actions import Action, Cause, Remedy
from megastable_guard.guard_config import PolicyConfig

CONFIG = PolicyConfig()


def failed(
    *places: tuple[str, int | None, int], host: str | None = "a", skipped: bool = False
) -> list[Failure]:
    return [Failure(what, step, host, clock, skipped) for what, step, clock in places]


def after(failures: list[Failure], hosts: int = 1, **limits: int) -> tuple[Action, Cause, bool]:
    remedy = choose_remedy(failures, hosts, CONFIG.model_copy(update=limits))
    return remedy.action, remedy.cause, remedy.skip


SAME = failed(*[("ValueError: x", 8, 7)] * 3)
SKIPPED = [*SAME[:2], *failed(("ValueError: x", 8, 7), skipped=True)]
BARREN = failed(*[("code 1", None, 0)] * CONFIG.barren)
KILLS = failed(("SIGKILL", 8, 7), ("code 1", 30, 29), ("hang in step", 50, 49))
MANY = failed(*(("SIGKILL", step + 1, step) for step in range(0, 60, 10)))
AGAIN = (Action.RESTART, Cause.PROCESS, False)


@pytest.mark.parametrize(
    ("failures", "more", "remedy"),
    [
        (failed(*[("SIGKILL", clock + 1, clock) for clock in (7, 19, 20, 33)]), {}, AGAIN),  # no pattern
        # The same failure at the same step is data and then code.
        (SAME[:2], {}, AGAIN), (SAME, {}, (Action.RESTART, Cause.DATA, True)),
        ([*SKIPPED, SAME[0]], {}, (Action.STOP, Cause.CODE, False)),
        ([*SKIPPED, *failed(("ValueError: x", 9, 8))], {}, AGAIN),
        # What never begins is given up; new ground forgives.
        (BARREN[:-1], {}, AGAIN), (BARREN, {}, (Action.STOP, Cause.PROCESS, False)),
        ([*BARREN[:-1], *failed(("SIGKILL", 3, 2))], {}, AGAIN),
        # One host among several is left.
        (KILLS, {"hosts": 4}, (Action.STOP, Cause.HARDWARE, False)), (KILLS, {}, AGAIN),
        ([*KILLS[:2], *failed(("hang in step", 50, 49), host="b")], {"hosts": 4}, AGAIN),
        (failed(("x", 8, 7), ("x", 30, 29), ("x", 50, 49), host=None), {"hosts": 4}, AGAIN),
        # Restarts have a budget that comes back.
        (MANY, {"restarts": 5}, (Action.STOP, Cause.PROCESS, False)),
        (MANY, {"restarts": 5, "budget_window": 40}, AGAIN),
    ],
)  # fmt: skip
def test_after_failure(
    failures: list[Failure], more: dict[str, int], remedy: tuple[Action, Cause, bool]
) -> None:
    assert after(failures, **more) == remedy


def test_after_failure_of_several_hosts_is_data_then_the_host() -> None:
    raised = [Failure("ValueError: x", 8, "a", 7, code=1)] * 3
    assert after(raised, hosts=4) == (Action.RESTART, Cause.DATA, True)
    again = [*raised[:2], replace(raised[0], skipped=True), raised[0]]
    assert after(again, hosts=4) == (Action.STOP, Cause.HARDWARE, False)
    assert after(again) == (Action.STOP, Cause.CODE, False)
    moved = [*again[:2], replace(again[2], host="b"), replace(again[3], host="b")]
    assert after(moved, hosts=4) == (Action.STOP, Cause.CODE, False)
    assert after(failed(*[("SIGKILL", 8, 7)] * 3), hosts=4) == (Action.STOP, Cause.HARDWARE, False)


def test_after_failure_blames_no_host_for_a_full_disk() -> None:
    """All of them write to it, and rank 0 says so each time."""
    full = [
        Failure("SpaceError: x", step + 1, "a", step, code=NO_SPACE) for step in range(CONFIG.same_host + 1)
    ]
    assert after(full, hosts=4) == (Action.RESTART, Cause.STORAGE, False)
    kill = failed(("SIGKILL", 8, 7))
    assert after([*full, *kill], hosts=4)[:2] == (Action.RESTART, Cause.PROCESS)
    assert after([*full, *kill * CONFIG.same_host], hosts=4)[:2] == (Action.STOP, Cause.HARDWARE)


def test_pause_grows_where_nothing_is_gained() -> None:
    barren = failed(*[("code 1", None, 0)] * 8)
    assert [pause_seconds(barren[:n], 10.0) for n in range(1, 9)] == [0, 1, 2, 4, 8, 10, 10, 10]
    assert pause_seconds([*barren, *failed(("SIGKILL", 3, 2))], 10.0) == 0


RESTART = Remedy(Action.RESTART, Cause.PROCESS, "")
FAULTY = Remedy(Action.STOP, Cause.HARDWARE, "")


@pytest.mark.parametrize(
    ("end", "remedy", "wholly"),
    [
        (End(what="host gone", host="b"), RESTART, False),
        (End(what="rank lost", host="b"), RESTART, False),
        (End(what="hang in step", hung=True, host="b"), RESTART, False),
        (End(what="SIGKILL", host="b"), FAULTY, True),
        (End(what="SIGKILL", host="b"), RESTART, None),  # a process
        (End(what="hang in step", hung=True), RESTART, None),  # nobody in particular
        (End(what="host gone"), RESTART, None),  # unknown
        (End(what="host gone", host="b", gone=("b",)), RESTART, False),
    ],
)
def test_bars_after_what_speaks_against_a_host(end: End, remedy: Remedy, wholly: bool | None) -> None:
    bars = exclusions_after(end, remedy, {}, 600.0, 1000.0)
    assert bars == ({} if wholly is None else {"b": HostBar(1600.0, wholly, 1)})


def test_bars_after_a_loss_double_and_are_of_all_hosts_that_are_gone() -> None:
    end = End(what="host gone", gone=("b", "c"))
    bars = exclusions_after(end, RESTART, {"c": HostBar(900.0, False, 2)}, 600.0, 1000.0)
    assert bars == {"b": HostBar(1600.0, False, 1), "c": HostBar(3400.0, False, 3)}
    assert in_force(bars | {"d": HostBar(999.0, True, 1)}, 1600.0) == {"c": False}


def test_next_bar_forgets_strikes_after_a_bar_of_peace() -> None:
    before = HostBar(1000.0, False, 2)
    assert next_exclusion(before, False, 600.0, 2200.0) == HostBar(4600.0, False, 3)
    assert next_exclusion(before, False, 600.0, 2201.0) == HostBar(2801.0, False, 1)
    assert next_exclusion(HostBar(1000.0, False, 50), True, 600.0, 1000.0).until == 1000.0 + 600.0 * 2**MOST
