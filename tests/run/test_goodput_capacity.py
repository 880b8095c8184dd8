"""Runs on fewer hosts than wanted: what that is worth, and what to grow again costs."""

from __future__ import annotations

import pytest

from tests.run.test_goodput import BEGIN, K, account, at, steps

GROWN = [
    at(100, "supervisor", what="started", pid=1, host="a"),
    at(101, "launched", attempt=1, hosts=["a", "b"]),
    at(105, "training", step=0, cursor=0, world=8),
    at(125, "ended", attempt=1, clock=20, silent=0.0, what="host gone", host="b"),
    at(125.1, "incident", what="opened", number=3, summary={"number": 3, "verdict": "crash", "cause": "hardware"}),
    at(125.2, "restart", attempt=1, reason="host gone", delay=0.0),
    at(130, "hosts_awaited", attempt=1, hosts=["b"], reason="waiting for b (gone)"),
    at(245, "hosts_awaited", attempt=1, hosts=[], reason="going on with 1 of 2 hosts: a"),
    at(246, "launched", attempt=2, hosts=["a"]),
    at(255, "training", step=20, cursor=0, world=4),
    at(297, "stopped", step=60, cursor=80),
    at(298, "ended", attempt=2, clock=60, silent=1.0, code=75, what=""),
    at(299, "restart", attempt=2, reason="2 hosts can take part", delay=0.0),
    at(300, "launched", attempt=3, hosts=["a", "b"]),
    at(310, "training", step=60, cursor=80, world=8),
]  # fmt: skip
GROWN_STEPS = [*steps(1, 20, 105), *steps(21, 60, 255), *steps(61, 100, 310)]


def test_to_begin_again_on_more_hosts_is_charged_to_the_failure_that_took_them() -> None:
    found = account(GROWN, GROWN_STEPS, now=350)
    lost = {(kind, cause): told for (kind, cause, *told) in found.lost()}
    for kind in (K.CHECKPOINTING, K.ENDING, K.START_UP):
        assert lost[(kind, "growing")] == [3, "b"]
    assert "stopped" not in {cause for _, cause in lost}
    assert found.lost()[(K.START_UP, "growing", 3, "b")][0] == 11
    assert found.lost()[(K.CHECKPOINTING, "growing", 3, "b")][0] == 2


def test_a_stop_for_any_other_reason_is_named_by_it() -> None:
    told = "c is 4 times as slow as the others, and is replaced"
    events = [*GROWN[:-3], at(299, "restart", attempt=2, reason=told, delay=0.0), *GROWN[-2:]]
    assert (K.START_UP, told, None, "") in account(events, GROWN_STEPS, now=350).lost()


def test_steps_on_fewer_hosts_than_wanted_are_told_by_their_capacity() -> None:
    found = account(GROWN, GROWN_STEPS, now=350)
    assert found.seconds()[K.TRAINING] == 100 and sum(found.seconds().values()) == found.wall == 250
    assert found.smaller() == pytest.approx(40 * 0.5 / 250)
    assert found.facts()["smaller"] == found.smaller()
    assert {s.missing for s in found.spans() if s.kind is K.TRAINING} == {0.0, 0.5}


@pytest.mark.parametrize("wanted", [None, 4])
def test_hosts_that_were_never_there_are_missing_if_the_journal_says_who_is_wanted(
    wanted: int | None,
) -> None:
    told = {} if wanted is None else {"wanted": wanted}
    events = [BEGIN[0], at(101, "launched", attempt=1, hosts=["a", "b"], **told), BEGIN[2]]
    found = account(events, steps(1, 20, 105), now=125)
    assert found.smaller() == pytest.approx(0.0 if wanted is None else 0.5 * 20 / 25)


def test_hosts_of_unequal_size_are_weighed_by_their_ranks() -> None:
    events = [dict(e) for e in GROWN]
    events[2]["world"] = events[-1]["world"] = 5  # host a has 4, b one
    assert account(events, GROWN_STEPS, now=350).smaller() == pytest.approx(40 * 0.2 / 250)


def test_who_starts_a_smaller_run_misses_nothing() -> None:
    again = at(243, "supervisor", what="started", pid=2, host="a")
    events = [*GROWN[:5], again, *GROWN[8:]]
    assert account(events, GROWN_STEPS[:60], now=299).smaller() == 0
    alone = [at(10, "training", step=0, world=8), at(50, "training", step=20, world=4)]
    assert account(alone, [*steps(1, 20, 10), *steps(21, 40, 50)], now=70).smaller() == 0
