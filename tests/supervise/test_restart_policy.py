"""What the supervisor does about failed processes: none, data, code, a host; and how long it waits."""

from __future__ import annotations

from dataclasses import replace

from megastable.base.errors import NO_SPACE
from megastable.supervise.restart_policy import Failure, after_failure, pause
from megastable_guard.actions import Action, Cause
from megastable_guard.guard_config import PolicyConfig

CONFIG = PolicyConfig()


def failed(
    *places: tuple[str, int | None, int], host: str | None = "a", skipped: bool = False
) -> list[Failure]:
    return [Failure(what, step, host, clock, skipped) for what, step, clock in places]


def after(failures: list[Failure], hosts: int = 1, **limits: int) -> tuple[Action, Cause, bool]:
    remedy = after_failure(failures, hosts, CONFIG.model_copy(update=limits))
    return remedy.action, remedy.cause, remedy.skip


def test_what_has_no_pattern_is_met_with_a_restart() -> None:
    kills = [("SIGKILL", clock + 1, clock) for clock in (7, 19, 20, 33)]
    assert after(failed(*kills)) == (Action.RESTART, Cause.PROCESS, False)


def test_the_same_failure_at_the_same_step_is_data_and_then_code() -> None:
    same = failed(*[("ValueError: x", 8, 7)] * 3)
    assert after(same[:2]) == (Action.RESTART, Cause.PROCESS, False)
    assert after(same) == (Action.RESTART, Cause.DATA, True)
    skipped = [*same[:2], *failed(("ValueError: x", 8, 7), skipped=True)]
    assert after([*skipped, same[0]]) == (Action.STOP, Cause.CODE, False)
    assert after([*skipped, *failed(("ValueError: x", 9, 8))]) == (Action.RESTART, Cause.PROCESS, False)


def test_of_several_hosts_an_error_at_one_place_is_data_then_the_host_and_a_kill_is_the_host() -> None:
    raised = [Failure("ValueError: x", 8, "a", 7, code=1)] * 3
    assert after(raised, hosts=4) == (Action.RESTART, Cause.DATA, True)
    again = [*raised[:2], replace(raised[0], skipped=True), raised[0]]
    assert after(again, hosts=4) == (Action.STOP, Cause.HARDWARE, False)
    assert after(again) == (Action.STOP, Cause.CODE, False)
    moved = [*again[:2], replace(again[2], host="b"), replace(again[3], host="b")]
    assert after(moved, hosts=4) == (Action.STOP, Cause.CODE, False)
    assert after(failed(*[("SIGKILL", 8, 7)] * 3), hosts=4) == (Action.STOP, Cause.HARDWARE, False)


def test_another_failure_in_between_is_no_row() -> None:
    mixed = failed(("KeyError: x", 8, 7), ("KeyError: x", 8, 7), ("SIGKILL", 8, 7), ("KeyError: x", 8, 7))
    assert after(mixed) == (Action.RESTART, Cause.PROCESS, False)


def test_what_never_begins_is_given_up() -> None:
    barren = failed(*[("code 1", None, 0)] * CONFIG.barren)
    assert after(barren[:-1]) == (Action.RESTART, Cause.PROCESS, False)
    assert after(barren) == (Action.STOP, Cause.PROCESS, False)
    assert after([*barren[:-1], *failed(("SIGKILL", 3, 2))])[0] is Action.RESTART  # new ground


def test_one_host_among_several_is_left() -> None:
    kills = failed(("SIGKILL", 8, 7), ("code 1", 30, 29), ("hang in step", 50, 49))
    assert after(kills, hosts=4) == (Action.STOP, Cause.HARDWARE, False)
    assert after(kills, hosts=1) == (Action.RESTART, Cause.PROCESS, False)
    elsewhere = [*kills[:2], *failed(("hang in step", 50, 49), host="b")]
    assert after(elsewhere, hosts=4)[0] is Action.RESTART
    assert after(failed(("x", 8, 7), ("x", 30, 29), ("x", 50, 49), host=None), hosts=4)[0] is Action.RESTART


def test_a_full_disk_is_no_fault_of_a_host() -> None:
    """All of them write to it, and rank 0 says so each time."""
    full = [
        Failure("SpaceError: x", step + 1, "a", step, code=NO_SPACE) for step in range(CONFIG.same_host + 1)
    ]
    assert after(full, hosts=4) == (Action.RESTART, Cause.STORAGE, False)
    kill = failed(("SIGKILL", 8, 7))
    assert after([*full, *kill], hosts=4)[:2] == (Action.RESTART, Cause.PROCESS)
    assert after([*full, *kill * CONFIG.same_host], hosts=4)[:2] == (Action.STOP, Cause.HARDWARE)


def test_restarts_have_a_budget_that_comes_back() -> None:
    kills = failed(*(("SIGKILL", step + 1, step) for step in range(0, 60, 10)))
    assert after(kills, restarts=5)[:2] == (Action.STOP, Cause.PROCESS)
    assert after(kills, restarts=5, budget_window=40)[0] is Action.RESTART


def test_it_waits_longer_and_longer_where_nothing_is_gained() -> None:
    barren = failed(*[("code 1", None, 0)] * 8)
    assert [pause(barren[:n], 10.0) for n in range(1, 9)] == [0, 1, 2, 4, 8, 10, 10, 10]
    assert pause([*barren, *failed(("SIGKILL", 3, 2))], 10.0) == 0
