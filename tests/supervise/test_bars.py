"""For how long a host that failed is left out."""

from __future__ import annotations

import pytest

from megastable.stability.actions import Action, Cause, Remedy
from megastable.supervise.bars import HostBar, bar_after, in_force
from megastable.supervise.exit_cause import End

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
        (End(what="host gone"), RESTART, None),  # two at once
    ],
)
def test_what_speaks_against_a_host(end: End, remedy: Remedy, wholly: bool | None) -> None:
    bar = bar_after(end, remedy, None, 600.0, 1000.0)
    assert bar == (None if wholly is None else HostBar(1600.0, wholly, 1))


def test_it_doubles_and_ends() -> None:
    end = End(what="host gone", host="b")
    bar = bar_after(end, RESTART, HostBar(0.0, False, 2), 600.0, 1000.0)
    assert bar == HostBar(3400.0, False, 3)
    assert in_force({"b": bar, "c": HostBar(999.0, True, 1)}, 1000.0) == {"b": False}
    assert in_force({"b": bar}, 3400.0) == {}
