"""For how long a host that failed is left out."""

from __future__ import annotations

import pytest

from megastable.supervise.bars import MOST, HostBar, bars_after, in_force, next_bar
from megastable.supervise.exit_cause import End
from megastable_guard.actions import Action, Cause, Remedy

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
def test_what_speaks_against_a_host(end: End, remedy: Remedy, wholly: bool | None) -> None:
    bars = bars_after(end, remedy, {}, 600.0, 1000.0)
    assert bars == ({} if wholly is None else {"b": HostBar(1600.0, wholly, 1)})


def test_all_that_are_lost_at_once_are_barred() -> None:
    end = End(what="host gone", gone=("b", "c"))
    bars = bars_after(end, RESTART, {"c": HostBar(900.0, False, 1)}, 600.0, 1000.0)
    assert bars == {"b": HostBar(1600.0, False, 1), "c": HostBar(2200.0, False, 2)}


def test_strikes_are_forgotten_and_a_bar_ends() -> None:
    assert next_bar(HostBar(1000.0, False, 2), False, 600.0, 2200.0) == HostBar(4600.0, False, 3)
    assert next_bar(HostBar(1000.0, False, 2), False, 600.0, 2201.0) == HostBar(2801.0, False, 1)
    assert next_bar(HostBar(1000.0, False, 50), True, 600.0, 1000.0) == HostBar(
        1000.0 + 600.0 * 2**MOST, True, 51
    )


def test_it_doubles_and_ends() -> None:
    end = End(what="host gone", host="b")
    bar = bars_after(end, RESTART, {"b": HostBar(900.0, False, 2)}, 600.0, 1000.0)["b"]
    assert bar == HostBar(3400.0, False, 3)
    assert in_force({"b": bar, "c": HostBar(999.0, True, 1)}, 1000.0) == {"b": False}
    assert in_force({"b": bar}, 3400.0) == {}
