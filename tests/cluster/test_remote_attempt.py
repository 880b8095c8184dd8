"""An attempt on several hosts, as their agents tell of it: what a host is believed to be that comes back without it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megastable.cluster.hostfile import HostSlots
from megastable.cluster.hosts import Hosts, RemoteAttempt
from megastable.cluster.launcher import TrainingCommand
from megastable.cluster.reach import Local
from megastable.cluster.store import Store
from megastable.run.directory import RunDirectory
from megastable.run.wire import Message, StoreClient
from tests.patience import PATIENCE, until

NAMES = ("first", "second")
NOTHING: Message = {"attempt": None, "running": False, "code": None, "problem": "", "fates": {}, "ended": 0}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Store(RunDirectory(tmp_path)) as store:
        there = [HostSlots(name, (0,)) for name in NAMES]
        yield Hosts(
            store.run,
            store,
            there,
            Local("first"),
            60.0,
            False,
            TrainingCommand("recipe.yaml", module="module"),
        )


def agent(hosts: Hosts, name: str) -> StoreClient:
    hello = {"role": "agent", "name": name, "hostname": name, "time": time.time()}
    return StoreClient(hosts.store.address, hello)


def says(hosts: Hosts, link: StoreClient, name: str, **state: object) -> None:
    """Returns when the supervisor has heard it."""
    told = NOTHING | state
    link.send({"state": told, "time": time.time()})
    until(lambda: hosts.store.agents[name].state == told)


def test_a_host_that_comes_back_without_its_processes_ends_the_attempt(hosts: Hosts) -> None:
    """The others would wait for its ranks; and an order to begin again would start ranks that nobody waits for."""
    links = {name: agent(hosts, name) for name in NAMES}
    order: Message = {"launch": {"attempt": 3}}
    attempt = RemoteAttempt(hosts, 3, NAMES, dict.fromkeys(NAMES, order))
    for name, link in links.items():
        says(hosts, link, name, attempt=2, code=1)  # of before
        assert attempt.look() and not attempt.gone
        assert link.receive(PATIENCE) == [order]
        says(hosts, link, name, attempt=3, running=True)
    assert attempt.look() and not attempt.gone

    links["second"].close()
    new = agent(hosts, "second")
    until(lambda: not hosts.store.agents["second"].state)
    assert attempt.look() and not attempt.gone  # it has not said yet what it found there
    says(hosts, new, "second", running=True, attempt=3)  # all of it: only the agent had died
    assert attempt.look() and not attempt.gone
    says(hosts, new, "second")
    assert attempt.look()
    assert (
        list(attempt.gone) == ["second"] and "has lost all processes of attempt 3" in attempt.gone["second"]
    )
    assert new.receive(0.1) == []


def test_a_supervisor_that_takes_over_notices_a_host_without_processes(hosts: Hosts) -> None:
    links = {name: agent(hosts, name) for name in NAMES}
    says(hosts, links["first"], "first", attempt=3, running=True)
    says(hosts, links["second"], "second")
    attempt = hosts.found(())
    assert attempt is not None and attempt.number == 3
    assert attempt.look() and list(attempt.gone) == ["second"]


def test_where_a_scheduler_has_replaced_a_host_the_other_is_not_to_blame(hosts: Hosts) -> None:
    """It ended the attempt everywhere."""
    links = {name: agent(hosts, name) for name in NAMES}
    says(hosts, links["first"], "first")
    assert not hosts.left(3, NAMES).gone
    assert not hosts.left(3, ("first", "another")).gone
    says(hosts, links["second"], "second", attempt=3, code=1)
    assert hosts.left(3, NAMES).gone.keys() == {"first"}
    assert hosts.left(3, (*NAMES, "another")).gone.keys() == {"first"}


def test_a_supervisor_that_was_stopped_for_a_while_does_not_believe_that_all_hosts_are_gone(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its store has not yet read what they said meanwhile."""
    links = {name: agent(hosts, name) for name in NAMES}
    attempt = RemoteAttempt(hosts, 3, NAMES, {})
    for name, link in links.items():
        says(hosts, link, name, attempt=3, running=True)
    assert attempt.look() and not attempt.gone
    hosts.silence = 6.0
    monkeypatch.setattr(hosts, "revive", lambda name: "ssh: no route")
    monkeypatch.setattr(hosts, "unreachable", lambda name: True)
    now = time.monotonic

    def later(seconds: float) -> None:
        monkeypatch.setattr("megastable.cluster.hosts.time.monotonic", lambda: now() + seconds)

    later(60.0)
    assert attempt.look() and not attempt.gone
    for seconds in range(61, 66):
        later(float(seconds))
        assert attempt.look() and not attempt.gone
    for seconds in range(66, 70):
        later(float(seconds))
        attempt.look()
    assert list(attempt.gone) == list(NAMES)  # they are silent indeed


def test_hosts_that_give_themselves_the_same_name_are_told_apart(hosts: Hosts) -> None:
    """As clones of one image do: their ranks have the name of the host file from their agent."""
    for name in NAMES:
        hello = {
            "role": "agent",
            "name": name,
            "hostname": "clone",
            "time": time.time() + 3600 * (name == "first"),
        }
        says(hosts, StoreClient(hosts.store.address, hello), name, attempt=3, running=True)
    assert [hosts.called(name) for name in (*NAMES, "clone")] == [*NAMES, "clone"]
    assert (
        3500 < hosts.clock("first") < 3700 and abs(hosts.clock("second")) < 60 and hosts.clock("clone") == 0.0
    )


def test_the_host_file_of_a_user_stays(hosts: Hosts) -> None:
    for name in NAMES:
        says(hosts, agent(hosts, name), name, port=29500)
    theirs = hosts.run.root / "hostfile"
    theirs.write_text("first slots=1\nsecond slots=1\nthird slots=1\n")
    attempt = hosts.start(4, ["second"])
    assert attempt.names == ("second",) and theirs.read_text().count("slots") == 3
    words = list(map(str, attempt._wanted["second"]["launch"]["words"]))  # type: ignore[attr-defined]
    assert Path(words[words.index("--hostfile") + 1]).read_text() == "second slots=1\n"
    hosts.run.logs.joinpath("attempt-0005.hostfile").mkdir(parents=True)
    with pytest.raises(OSError, match="hostfile"):
        hosts.start(5, NAMES)
