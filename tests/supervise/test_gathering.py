"""Which hosts train next: those that come, go and stand by, as the supervisor gathers them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from megastable.base.errors import HOST_GONE, ConfigError
from megastable.cluster.fleet import BurnInAnswer
from megastable.cluster.preflight import HostFinding
from megastable.cluster.this_host import Here
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.events.supervisor_events import (
    Ended,
    HostLeftOut,
    HostProven,
    HostsAwaited,
    Launched,
)
from megastable.supervise import gathering as module
from megastable.supervise.gathering import SETTLE, Gathering, RunExit, choose_lineup
from megastable.supervise.restart_policy import HostBar
from megastable.supervise.supervisor_journal import SupervisorJournal
from tests.conftest import tiny
from tests.supervise.runs import Quiet


class Somewhere(Here):
    """Hosts of two ranks each, of which some are away, and some are refused."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.away: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.slots: dict[str, int] = {}
        self.burned: dict[str, list[BurnInAnswer | None]] = {}

    def count_ranks(self, names: Sequence[str]) -> int:
        return sum(self.slots.get(name, 2) for name in names)

    def list_missing_hosts(self, attempt: int) -> Mapping[str, str]:
        return dict(self.away)

    def check_hosts(self, names: Sequence[str], hurry: Callable[[], bool]) -> Sequence[HostFinding]:
        return [HostFinding(n, "gpus", "refuse", text) for n, text in self.refused.items() if n in names]

    burns_in = True

    def poll_burn_in(self, name: str, seconds: float) -> BurnInAnswer | None:
        return self.burned[name].pop(0) if self.burned.get(name) else None


class Place(Quiet):
    def __init__(self, config: RunConfig, hosts: str, run: RunDirectory) -> None:
        super().__init__()
        self.fleet = Somewhere(hosts)
        self.journal = SupervisorJournal(run, self, lambda: False)
        self.config, self.looks = config, 0

    def look(self) -> None:
        self.looks += 1

    def gathering(self) -> Gathering:
        return Gathering(self.config, self.fleet, self.journal, self.print_line, lambda: False, self.look)

    def launched(self, *hosts: str) -> None:
        self.journal.journal_event(Launched(attempt=1, command=[], log="x", hosts=hosts))
        self.journal.read_new_events()


@pytest.fixture
def place(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "LOOK", 0.01)
    monkeypatch.setattr(module, "SHOWN", 0.0)
    monkeypatch.setattr(module, "GROWTH", 0.0)
    monkeypatch.setattr(module, "SETTLE", 0.05)

    def make(hosts: str, **supervise: Any) -> Place:
        limits = {"wait_for_hosts": 0.3, "shrink_after": None} | supervise
        config = tiny(
            corpus, tmp_path / "run", supervise=limits, train={"global_batch": 12, "micro_batch": 1}
        )
        run = RunDirectory(tmp_path / "run")
        run.root.mkdir()
        return Place(config, hosts, run)

    return make


def test_hosts_takes_a_spare_that_stands_by(place: Any) -> None:
    p = place("abcs", spares=1)
    g = p.gathering()
    assert g.gather_hosts() == ("a", "b", "c") and p.said == []
    p.launched("a", "b", "c")
    g.leave_out("b", HostBar(time.time() + 60, False, 1), "host gone")
    p.fleet.away = {"b": "ssh: no route"}
    assert g.gather_hosts() == ("a", "s", "c") and "s takes the place of b" in p.said
    (event,) = p.journal.run.iterate_events(HostLeftOut)
    assert event["host"] == "b" and not event["wholly"]


def test_hosts_shrinks_as_far_as_the_batch_allows_and_grows_when_the_bar_is_over(place: Any) -> None:
    p = place("abcde", shrink_after=0.1)  # 12 samples: five hosts with ten ranks cannot share them
    p.fleet.slots = dict.fromkeys("abcde", 1)
    p.config = p.config.model_copy(update={"train": p.config.train.model_copy(update={"global_batch": 20})})
    g = p.gathering()
    assert g.gather_hosts() == tuple("abcde")
    p.launched(*"abcde")
    g.leave_out("b", HostBar(time.time() + 0.5, False, 1), "host gone")
    p.fleet.away = {"b": "ssh: no route"}
    assert g.gather_hosts() == ("a", "c", "d", "e") and p.said[-1].startswith("going on with 4 of 5 hosts")
    p.launched("a", "c", "d", "e")
    p.fleet.away = {"b": "", "c": ""}
    assert g.gather_hosts() == ("a", "d")  # three cannot share 20
    p.launched("a", "d")
    p.fleet.away = {}
    grown, began = 0, time.monotonic()
    while not grown and time.monotonic() < began + 30:
        grown = g.count_possible_hosts(1, ("a", "d"))
        if grown == 5:
            assert time.time() >= p.journal.state.bars["b"].until
    assert grown in (4, 5)


def test_hosts_ends_the_run_if_one_stays_away(place: Any) -> None:
    p = place("abc")
    p.fleet.away = {"b": "ssh: no route"}
    end = p.gathering().gather_hosts()
    assert isinstance(end, RunExit) and end.code == HOST_GONE and "b did not come within" in end.reason
    assert p.looks and [event["hosts"] for event in p.journal.run.iterate_events(HostsAwaited)] == [["b"]]


def test_hosts_replaces_by_a_spare_what_the_check_refuses(place: Any) -> None:
    p = place("abcs", spares=1)
    p.fleet.refused = {"b": "GPU 3 has fallen off the bus"}
    assert p.gathering().gather_hosts() == ("a", "c", "s")
    assert p.journal.state.bars["b"].wholly
    p.fleet.refused = {"a": "no GPU"}
    with pytest.raises(ConfigError, match="a: no GPU"):
        p.gathering().gather_hosts()


def test_gathering_refuses_spares_that_leave_nobody_or_do_not_fit(place: Any) -> None:
    p = place("as", spares=2)
    with pytest.raises(ConfigError, match="of 2 hosts none is left to train"):
        p.gathering()
    p.config = p.config.model_copy(update={"supervise": p.config.supervise.model_copy(update={"spares": 1})})
    p.fleet.slots = {"s": 1}
    with pytest.raises(ConfigError, match="slots differ: a 2, s 1"):
        p.gathering()


def growing(place: Any, **supervise: Any) -> Any:
    """A run of a, b, c, of which b is away, and has been seen to be back."""
    p = place("abc", **{"shrink_after": 0.2, "cool_off": 60.0} | supervise)
    p.launched("a", "b", "c")
    g = p.gathering()
    p.fleet.away = {"b": "ssh: no route"}
    assert g.gather_hosts() == ("a", "c")
    p.launched("a", "c")
    p.fleet.away = {}
    return p, g


def asked_to_grow(g: Gathering, names: tuple[str, ...] = ("a", "c"), seconds: float = 5.0) -> int:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if more := g.count_possible_hosts(2, names):
            return more
    return 0


def test_hosts_strikes_a_host_that_goes_again_as_the_run_grows(place: Any) -> None:
    p, g = growing(place)
    g.config = p.config.model_copy(
        update={"supervise": p.config.supervise.model_copy(update={"shrink_after": 30.0})}
    )
    assert asked_to_grow(g) == 3
    p.fleet.away = {"b": "ssh: no route"}
    began = time.monotonic()
    assert g.gather_hosts() == ("a", "c") and time.monotonic() - began < 10
    assert p.journal.state.bars["b"].strikes == 1
    p.fleet.away = {}
    assert asked_to_grow(g, seconds=0.5) == 0  # its cool-off


def test_hosts_tries_no_size_again_that_twice_failed_before_its_first_step(place: Any) -> None:
    p, g = growing(place)
    p.fleet.away = {"b": "ssh: no route"}
    told = {"what": "OutOfMemoryError", "failure": "x", "code": 1, "host": "a", "trained": False, "step": 1}
    for _ in range(2):
        assert g.gather_hosts() == ("a", "c")
        p.journal.journal_event(Ended(attempt=1, clock=0, **told))
        p.journal.read_new_events()
    assert [f.host for f in p.journal.state.failures] == [None, None]
    end = g.gather_hosts()
    assert isinstance(end, RunExit) and end.code == HOST_GONE


def test_hosts_takes_back_a_host_that_computed_wrong_after_a_burn_in(place: Any) -> None:
    p, g = growing(place, cool_off=0.0, burn_in=5.0, wait_for_hosts=5.0)
    p.launched("a", "b", "c")
    g.leave_out_faulty_host("b", "computes wrong")
    assert g.gather_hosts() == ("a", "c")  # its time is over, but nothing is proven
    p.launched("a", "c")
    busy = BurnInAnswer(unmade="cuda:0: in use")
    p.fleet.burned["b"] = [None, busy, busy, None, BurnInAnswer(found="cuda:0: matrix products wrong"), None]
    assert asked_to_grow(g, seconds=0.5) == 0
    assert [text for text in p.said if "no burn-in" in text] == ["WARNING: b: no burn-in: cuda:0: in use"]
    assert p.journal.state.bars["b"].burn_in == 5.0 and p.journal.state.bars["b"].wholly
    assert [e.reason for e in p.journal.run.iterate_events(HostLeftOut)][
        -1
    ] == "cuda:0: matrix products wrong"
    g = p.gathering()  # another supervisor knows it from the journal
    p.fleet.burned["b"] = [None, BurnInAnswer()]
    assert asked_to_grow(g) == 3
    (event,) = p.journal.run.iterate_events(HostProven)
    assert event.host == "b" and event.seconds == 5.0
    assert g.gather_hosts() == ("a", "b", "c")


HOSTS = ["a", "b", "c", "s"]  # s is a spare
SHRINK = 120.0


def fits(names: Sequence[str]) -> bool:
    return len(names) != 2  # as with a global batch that two cannot share


@pytest.mark.parametrize(
    ("there", "more", "chosen"),
    [
        ("abcs", {}, "abc"), ("abcs", {"last": ""}, "abc"),
        ("abcs", {"last": "asc"}, "asc"),  # who trains goes on: the host of before is the spare now
        # A spare takes the place of one that failed, also if that is back already ...
        ("acs", {"b": False}, "asc"), ("bcs", {"a": False}, "sbc"), ("abcs", {"b": False}, "asc"),
        ("abcs", {"b": True}, "asc"),
        # ... but not of one that is only late.
        ("acs", {}, ""), ("acs", {"waited": SETTLE}, "asc"), ("acs", {"waited": SETTLE, "last": ""}, "acs"),
        # Without a spare the same host is waited for until the run shrinks; two cannot share the batch.
        ("ac", {"b": False, "waited": SHRINK - 1}, ""), ("abc", {"b": False, "waited": 60.0}, "abc"),
        ("ac", {"waited": SHRINK}, "a"), ("ac", {"waited": inf, "shrink_after": None}, ""), ("", {"waited": inf}, ""),
        # A faulty host is not used even if fewer remain.
        ("abcs", {"b": True, "wanted": 4, "last": "abcs"}, ""),
        ("abcs", {"waited": SETTLE, "b": True, "wanted": 4, "last": "abcs"}, "acs"),  # nobody else to wait for
        ("abc", {"waited": SETTLE, "b": True}, ""),  # the spare may still come
        ("bca", {"wanted": 4, "waited": SHRINK, "last": "abcs"}, "abc"),  # the order of the host file
    ],
)  # fmt: skip
def test_lineup_of_hosts_that_are_there(there: str, more: dict[str, Any], chosen: str) -> None:
    given = {"wanted": 3, "waited": 0.0, "last": "abc", "shrink_after": SHRINK} | more
    barred = {name: given.pop(name) for name in "abc" if name in given}
    assert "".join(choose_lineup(HOSTS, there=there, barred=barred, fits=fits, **given)) == chosen


@drawn(
    there=st.sets(st.sampled_from(HOSTS)),
    barred=st.dictionaries(st.sampled_from(HOSTS), st.booleans()),
    last=st.permutations(HOSTS).map(lambda names: names[:3]) | st.just([]),
    waited=st.sampled_from([0.0, SETTLE, SHRINK, inf]),
    shrink_after=st.sampled_from([None, 0.0, SHRINK]),
)
def test_lineup_has_only_hosts_that_are_there_and_may_be_used(
    there: set[str], barred: dict[str, bool], last: list[str], waited: float, shrink_after: float | None
) -> None:
    chosen = choose_lineup(HOSTS, 3, there, barred, last, waited, shrink_after, fits)
    assert set(chosen) <= there and len(set(chosen)) == len(chosen) <= 3
    assert not any(barred.get(host) for host in chosen)
    if chosen and len(chosen) < 3:
        assert shrink_after is not None and fits(chosen)
        assert waited >= SETTLE or shrink_after == 0
    if len(chosen) == 3 and last:
        # Whoever stays keeps its place, so that the ranks of a host stay where its memory is.
        assert all(host == new or host not in chosen for host, new in zip(last, chosen, strict=True))
    usable = [host for host in HOSTS if not barred.get(host) and host in there]
    if len(usable) >= 3 and waited >= SETTLE:
        assert len(chosen) == 3
        # The last choice only where it is needed.
        soft = [host for host in chosen if host in barred]
        assert not soft or not [h for h in usable if h not in barred and h not in chosen]
    if not chosen and waited == inf and shrink_after is not None:
        assert not any(fits(usable[:n]) for n in range(1, len(usable) + 1))
