"""Hosts that come, go and stand by, as the supervisor gathers them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megastable.base.errors import HOST_GONE, ConfigError
from megastable.cluster import lineup
from megastable.cluster.fleet import Here
from megastable.cluster.host_burn_in import BurnInAnswer
from megastable.cluster.preflight import HostFinding
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.events.event import Event
from megastable.run.events.supervisor_events import (
    Ended,
    HostLeftOut,
    HostProven,
    HostsAwaited,
    Launched,
)
from megastable.supervise import gathering as module
from megastable.supervise.bars import HostBar
from megastable.supervise.gathering import Gathering, RunExit
from megastable.supervise.supervisor_journal import SupervisorJournal
from tests.conftest import tiny


class Somewhere(Here):
    """Hosts of two ranks each, of which some are away, and some are refused."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.away: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.slots: dict[str, int] = {}
        self.burned: dict[str, list[BurnInAnswer | None]] = {}

    def ranks(self, names: Sequence[str]) -> int:
        return sum(self.slots.get(name, 2) for name in names)

    def missing(self, attempt: int) -> Mapping[str, str]:
        return dict(self.away)

    def preflight(self, names: Sequence[str], hurry: Callable[[], bool]) -> Sequence[HostFinding]:
        return [HostFinding(n, "gpus", "refuse", text) for n, text in self.refused.items() if n in names]

    burns_in = True

    def burn_in(self, name: str, seconds: float) -> BurnInAnswer | None:
        return self.burned[name].pop(0) if self.burned.get(name) else None


class Place:
    def __init__(self, config: RunConfig, hosts: str, run: RunDirectory) -> None:
        self.said: list[str] = []
        self.fleet = Somewhere(hosts)
        self.journal = SupervisorJournal(run, self, lambda: False)
        self.config, self.looks = config, 0

    def say(self, text: str) -> None:
        self.said.append(text)

    def event(self, event: Event) -> None: ...

    def output(self, text: str) -> None: ...

    def tick(self) -> None: ...

    def look(self) -> None:
        self.looks += 1

    def gathering(self) -> Gathering:
        return Gathering(self.config, self.fleet, self.journal, self.say, lambda: False, self.look)

    def launched(self, *hosts: str) -> None:
        self.journal.emit(Launched(attempt=1, command=[], log="x", hosts=hosts))
        self.journal.listen()


@pytest.fixture
def place(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "LOOK", 0.01)
    monkeypatch.setattr(module, "SHOWN", 0.0)
    monkeypatch.setattr(module, "GROWTH", 0.0)
    monkeypatch.setattr(module, "SETTLE", 0.05)
    monkeypatch.setattr(lineup, "SETTLE", 0.05)

    def make(hosts: str, **supervise: Any) -> Place:
        limits = {"wait_for_hosts": 0.3, "shrink_after": None} | supervise
        config = tiny(
            corpus, tmp_path / "run", supervise=limits, train={"global_batch": 12, "micro_batch": 1}
        )
        run = RunDirectory(tmp_path / "run")
        run.root.mkdir()
        return Place(config, hosts, run)

    return make


def test_a_spare_stands_by_and_takes_a_place(place: Any) -> None:
    p = place("abcs", spares=1)
    g = p.gathering()
    assert g.hosts() == ("a", "b", "c") and p.said == []
    p.launched("a", "b", "c")
    g.leave_out("b", HostBar(time.time() + 60, False, 1), "host gone")
    p.fleet.away = {"b": "ssh: no route"}
    assert g.hosts() == ("a", "s", "c") and "s takes the place of b" in p.said
    (event,) = p.journal.run.events(HostLeftOut)
    assert event["host"] == "b" and not event["wholly"]


def test_a_spare_that_is_not_there_is_told_of_once(place: Any) -> None:
    p = place("abcs", spares=1)
    g = p.gathering()
    p.fleet.away = {"s": "ssh: no route"}
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        assert g.more(1, ("a", "b", "c")) == 0
    assert [text for text in p.said if "stands by" in text] == [
        "WARNING: s, which stands by, is not there: ssh: no route"
    ]
    p.fleet.away = {}
    g.more(1, ("a", "b", "c"))
    assert p.said[-1] == "s stands by again"


def test_it_shrinks_as_far_as_the_batch_allows_and_grows_when_the_bar_is_over(place: Any) -> None:
    p = place("abcde", shrink_after=0.1)  # 12 samples: five hosts with ten ranks cannot share them
    p.fleet.slots = dict.fromkeys("abcde", 1)
    p.config = p.config.model_copy(update={"train": p.config.train.model_copy(update={"global_batch": 20})})
    g = p.gathering()
    assert g.hosts() == tuple("abcde")
    p.launched(*"abcde")
    g.leave_out("b", HostBar(time.time() + 0.5, False, 1), "host gone")
    p.fleet.away = {"b": "ssh: no route"}
    assert g.hosts() == ("a", "c", "d", "e") and p.said[-1].startswith("going on with 4 of 5 hosts")
    p.launched("a", "c", "d", "e")
    p.fleet.away = {"b": "", "c": ""}
    assert g.hosts() == ("a", "d")  # three cannot share 20
    p.launched("a", "d")
    p.fleet.away = {}
    grown, began = 0, time.monotonic()
    while not grown and time.monotonic() < began + 30:
        grown = g.more(1, ("a", "d"))
        if grown == 5:
            assert time.time() >= p.journal.state.bars["b"].until
    assert grown in (4, 5)


def test_one_that_stays_away_ends_the_run(place: Any) -> None:
    p = place("abc")
    p.fleet.away = {"b": "ssh: no route"}
    end = p.gathering().hosts()
    assert isinstance(end, RunExit) and end.code == HOST_GONE and "b did not come within" in end.reason
    assert p.looks and [event["hosts"] for event in p.journal.run.events(HostsAwaited)] == [["b"]]


def test_a_host_that_the_check_refuses_is_replaced_by_a_spare_or_refused(place: Any) -> None:
    p = place("abcs", spares=1)
    p.fleet.refused = {"b": "GPU 3 has fallen off the bus"}
    assert p.gathering().hosts() == ("a", "c", "s")
    assert p.journal.state.bars["b"].wholly
    p.fleet.refused = {"a": "no GPU"}
    with pytest.raises(ConfigError, match="a: no GPU"):
        p.gathering().hosts()


def test_while_a_host_is_refused_nobody_is_waited_for(place: Any) -> None:
    p = place("abc", shrink_after=60.0)
    p.launched("a", "b", "c")
    p.fleet.away = {"c": "ssh: no route"}

    def look() -> None:
        p.fleet.away, p.fleet.refused = {}, {"b": "GPU 3 has fallen off the bus"}

    p.look = look
    assert p.gathering().hosts() == ("a", "c")
    assert [text for text in p.said if text.startswith("waiting")] == ["waiting for c (ssh: no route)"]
    assert [event["hosts"] for event in p.journal.run.events(HostsAwaited)] == [["c"], []]


def test_spares_that_leave_nobody_or_do_not_fit(place: Any) -> None:
    p = place("as", spares=2)
    with pytest.raises(ConfigError, match="of 2 hosts none is left to train"):
        p.gathering()
    p.config = p.config.model_copy(update={"supervise": p.config.supervise.model_copy(update={"spares": 1})})
    p.fleet.slots = {"s": 1}
    with pytest.raises(ConfigError, match="slots differ: a 2, s 1"):
        p.gathering()


def test_what_can_be_done_without(place: Any) -> None:
    p = place("abc", shrink_after=60.0)
    p.launched("a", "b", "c")
    assert p.gathering().can_do_without("b")
    p.config = p.config.model_copy(
        update={"supervise": p.config.supervise.model_copy(update={"shrink_after": None})}
    )
    assert not p.gathering().can_do_without("b")


def growing(place: Any, **supervise: Any) -> Any:
    """A run of a, b, c, of which b is away, and has been seen to be back."""
    p = place("abc", **{"shrink_after": 0.2, "cool_off": 60.0} | supervise)
    p.launched("a", "b", "c")
    g = p.gathering()
    p.fleet.away = {"b": "ssh: no route"}
    assert g.hosts() == ("a", "c")
    p.launched("a", "c")
    p.fleet.away = {}
    return p, g


def asked_to_grow(g: Gathering, names: tuple[str, ...] = ("a", "c"), seconds: float = 5.0) -> int:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if more := g.more(2, names):
            return more
    return 0


@pytest.mark.slow
def test_a_newcomer_that_the_check_refuses_is_left_out_before_anybody_stops(place: Any) -> None:
    p, g = growing(place)
    p.fleet.refused = {"b": "GPU 3 has fallen off the bus", "a": "busy: it trains"}
    assert asked_to_grow(g, seconds=1.0) == 0
    assert (
        p.journal.state.bars["b"].wholly and p.said[-1] == "b: GPU 3 has fallen off the bus: it is left out"
    )


def test_a_host_that_goes_again_as_the_run_grows_gets_a_strike_and_is_not_awaited(place: Any) -> None:
    p, g = growing(place)
    g.config = p.config.model_copy(
        update={"supervise": p.config.supervise.model_copy(update={"shrink_after": 30.0})}
    )
    assert asked_to_grow(g) == 3
    p.fleet.away = {"b": "ssh: no route"}
    began = time.monotonic()
    assert g.hosts() == ("a", "c") and time.monotonic() - began < 10
    assert p.journal.state.bars["b"].strikes == 1
    p.fleet.away = {}
    assert asked_to_grow(g, seconds=0.5) == 0  # its cool-off


def test_who_has_been_away_for_long_is_not_awaited_again(place: Any) -> None:
    p, g = growing(place, wait_for_hosts=20.0)
    p.fleet.away = {"b": "ssh: no route"}
    time.sleep(0.01)
    g._missed(p.fleet.away)
    g._away["b"] -= 100
    g.config = p.config.model_copy(
        update={"supervise": p.config.supervise.model_copy(update={"shrink_after": 90.0})}
    )
    began = time.monotonic()
    assert g.hosts() == ("a", "c") and time.monotonic() - began < 10


def test_a_host_that_trains_under_a_bar_does_not_keep_the_run_small(place: Any) -> None:
    _, g = growing(place)
    g.leave_out("a", HostBar(time.time() + 600, False, 1), "hang")
    assert asked_to_grow(g) == 3


def test_a_size_that_twice_failed_before_its_first_step_is_not_tried_again(place: Any) -> None:
    p, g = growing(place)
    p.fleet.away = {"b": "ssh: no route"}
    for _ in range(2):
        assert g.hosts() == ("a", "c")
        p.journal.emit(
            Ended(
                attempt=1,
                clock=0,
                what="OutOfMemoryError",
                failure="x",
                code=1,
                host="a",
                trained=False,
                step=1,
            )
        )
        p.journal.listen()
    assert [f.host for f in p.journal.state.failures] == [None, None]
    end = g.hosts()
    assert isinstance(end, RunExit) and end.code == HOST_GONE


def test_a_spare_takes_the_place_of_a_host_that_does_not_exist_any_more(place: Any) -> None:
    p = place("abcs", spares=1)
    p.fleet.away = {"b": "ssh: Could not resolve hostname b"}
    assert p.gathering().hosts() == ("a", "c", "s")
    p.fleet.away["s"] = "ssh: no route"
    with pytest.raises(ConfigError, match="host b: ssh: Could not resolve"):
        p.gathering().hosts()


def test_what_was_launched_before_a_takeover_counts(place: Any) -> None:
    p, _ = growing(place)
    p.fleet.refused = {"b": "GPU 3 has fallen off the bus"}
    assert p.gathering().hosts() == ("a", "c")  # another supervisor's: not the end of the run
    assert p.journal.state.bars["b"].wholly


def test_a_host_that_computed_wrong_comes_back_after_a_burn_in(place: Any) -> None:
    p, g = growing(place, cool_off=0.0, burn_in=5.0, wait_for_hosts=5.0)
    p.launched("a", "b", "c")
    g.computes_wrong("b", "computes wrong")
    assert g.hosts() == ("a", "c")  # its time is over, but nothing is proven
    p.launched("a", "c")
    busy = BurnInAnswer(unmade="cuda:0: in use")
    p.fleet.burned["b"] = [None, busy, busy, None, BurnInAnswer(found="cuda:0: matrix products wrong"), None]
    assert asked_to_grow(g, seconds=0.5) == 0
    assert [text for text in p.said if "no burn-in" in text] == ["WARNING: b: no burn-in: cuda:0: in use"]
    assert p.journal.state.bars["b"].burn_in == 5.0 and p.journal.state.bars["b"].wholly
    assert [e.reason for e in p.journal.run.events(HostLeftOut)][-1] == "cuda:0: matrix products wrong"
    g = p.gathering()  # another supervisor knows it from the journal
    p.fleet.burned["b"] = [None, BurnInAnswer()]
    assert asked_to_grow(g) == 3
    (event,) = p.journal.run.events(HostProven)
    assert event.host == "b" and event.seconds == 5.0
    assert g.hosts() == ("a", "b", "c")


@pytest.mark.parametrize(("burns_in", "seconds"), [(False, 5.0), (True, 0.0)])
def test_where_no_burn_in_can_be_made_its_time_is_enough(place: Any, burns_in: bool, seconds: float) -> None:
    p, g = growing(place, cool_off=0.0, burn_in=seconds)
    p.fleet.burns_in = burns_in
    p.launched("a", "b", "c")
    g.computes_wrong("b", "computes wrong")
    assert p.journal.state.bars["b"].burn_in == 0.0
    assert g.hosts() == ("a", "b", "c")


def test_a_host_that_is_left_out_is_named_when_nobody_comes(place: Any) -> None:
    p = place("ab", burn_in=5.0)
    p.launched("a", "b")
    g = p.gathering()
    g.computes_wrong("b", "computes wrong")
    end = g.hosts()
    assert isinstance(end, RunExit) and "b did not come" in end.reason and "left out" in end.reason
