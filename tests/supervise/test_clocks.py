"""A supervisor and a rank 0 whose clocks differ: what is measured is journaled, and the account is right."""

from __future__ import annotations

import time

import pytest

from megastable.base import errors
from megastable.cluster import fleet
from megastable.run.events.supervisor_events import Ended, Launched
from megastable.run.goodput.time_account import TimeKind
from megastable.run.goodput.watching import read_account
from tests.patience import PATIENCE
from tests.supervise.test_ladder import FINISHED, Ladder, ladder  # noqa: F401


@pytest.mark.quick("3600.0")
@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
def test_the_clock_of_rank_0_is_measured_for_every_attempt(
    ahead: float,
    ladder: Ladder,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        fleet.Here, "clock", lambda self, name: {"first": ahead, "here": ahead}.get(name, 7.0)
    )
    crash = {"begin": 0, "until": 7, "code": 1, "words": "RuntimeError: boom", "ahead": ahead}
    code, _ = ladder(crash, FINISHED | {"ahead": ahead}, hosts=("first", "second"))
    assert code == errors.OK and [e["ahead"] for e in ladder.run.events(Launched)] == [ahead, ahead]
    assert all(0 <= e["silent"] < PATIENCE for e in ladder.run.events(Ended))
    account, _ = read_account(ladder.run.root)
    seconds = account.seconds()
    first = next(ladder.run.events(Launched)).time or 0.0
    assert first < account.end <= time.time() < first + 1800
    assert seconds[TimeKind.TRAINING] > 0  # the steps take a hundredth of a second each: no more is known
    assert sum(seconds.values()) == pytest.approx(account.wall)
