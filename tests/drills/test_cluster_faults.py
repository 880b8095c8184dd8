"""Every kind of fault of a cluster, on real hosts: it hurts, and where it ends the hurt is over."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from drills import cluster_faults
from drills.cluster_faults import KINDS, NAMES, Cluster, Kind, Place, choose
from drills.hosts import Host, Hosts
from drills.namespaces import Started, missing
from megastable.base.errors import ConfigError
from tests.patience import PATIENCE, until

SUPERVISOR, RANK, AGENT = "sleep 9001", "sleep 9002", "-m megastable.supervise.agent"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := missing():
        pytest.skip(reason)
    with Hosts(tmp_path_factory.mktemp("cluster"), 2, 64 << 20) as made:
        yield made


@pytest.fixture
def cluster(hosts: Hosts, tmp_path: Path) -> Iterator[Cluster]:
    """Processes that can be found and killed as those of a run."""
    (tmp_path / "megastable/supervise").mkdir(parents=True)
    (tmp_path / "megastable/__init__.py").touch()
    (tmp_path / "megastable/supervise/__init__.py").touch()
    (tmp_path / "megastable/supervise/agent.py").write_text("import time\ntime.sleep(9003)\n")

    def supervise() -> Started:
        return hosts["first"].start(SUPERVISOR.split())

    made = Cluster(hosts, "first", supervise)
    made.start_supervisor()
    for number, host in enumerate(hosts):
        host.start(RANK.split(), environment={"RANK": str(number)})
        host.start([sys.executable, "-c", "import time; time.sleep(9004)"])
        host.start([sys.executable, *AGENT.split(), "RUN"], folder=tmp_path)
        until(lambda host=host: host.ranks() and agents(host))
    yield made
    for host in hosts:
        for process in [*host.find("900"), *agents(host)]:
            process.kill()
        host.join()


def agents(host: Host) -> list[psutil.Process]:
    """Not the shell that starts one, nor what has just ended."""

    def command(process: psutil.Process) -> list[str]:
        try:
            return process.cmdline()
        except psutil.Error:
            return []

    return [process for process in host.find(AGENT) if command(process)[1:3] == AGENT.split()]


def unreachable(cluster: Cluster, host: Host) -> bool:
    other = next(other for other in cluster.hosts if other is not host)
    return other.run(["ssh", "-o", "ConnectTimeout=1", host.name, "true"], PATIENCE).returncode != 0


def unwritable(cluster: Cluster, host: Host) -> bool:
    try:
        host.run(
            ["dd", "if=/dev/zero", f"of={cluster.hosts.shared.folder}/probe", "count=1", "conv=fsync"], 0.5
        )
    except Exception:
        return True
    return False


def first_supervisor_gone(cluster: Cluster, host: Host) -> bool:
    return not host.on or not host.find(SUPERVISOR)


def stopped(cluster: Cluster, host: Host) -> bool:
    return any(rank.status() == psutil.STATUS_STOPPED for rank in host.ranks().values())


def queued(cluster: Cluster, host: Host) -> bool:
    return "tbf" in host.run(["tc", "qdisc", "show", "dev", "eth0"], PATIENCE).stdout


HURTS: dict[str, Callable[[Cluster, Host], bool]] = {
    "killed-rank": lambda cluster, host: not host.find(RANK),
    "stopped-rank": stopped,
    "slow-host": stopped,  # now and then
    "killed-agent": lambda cluster, host: not agents(host),
    "killed-supervisor": first_supervisor_gone,
    "killed-sshd": unreachable,
    "killed-host": unreachable,
    "killed-head": first_supervisor_gone,
    "cut-link": unreachable,
    "flapping-link": unreachable,
    "slow-link": queued,
    "full-disk": lambda cluster, host: cluster.hosts.shared.room() == 0,
    "stalled-disk": unwritable,
}
LASTING = {"killed-rank", "stopped-rank", "killed-agent", "cut-link"}  # the run has to go on by itself


@pytest.mark.quick("full-disk", "killed-agent")
@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_it_hurts_until_it_is_mended(kind: Kind, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_faults, "LONGEST", 5.0)
    if reason := kind.impossible(cluster.hosts):
        pytest.skip(reason)
    hurts = HURTS[kind.name]
    host = cluster.hosts[kind.places([host.name for host in cluster.hosts], "first")[-1]]
    others = [other for other in cluster.hosts if other is not host]
    until(lambda: not hurts(cluster, host))
    assert kind.strike(cluster, host)
    until(lambda: hurts(cluster, host))
    assert all(len(other.ranks()) == 1 and len(agents(other)) == 1 for other in others)
    kind.mend(cluster, host)
    until(lambda: hurts(cluster, host) is (kind.name in LASTING))


@pytest.mark.parametrize("name", ["killed-rank", "stopped-rank", "killed-agent", "killed-supervisor"])
def test_without_a_process_there_is_nothing_to_strike(name: str, cluster: Cluster) -> None:
    host = cluster.hosts["first"]
    for process in [*host.find("900"), *agents(host)]:
        process.kill()
    until(lambda: not host.ranks() and not agents(host) and not host.find(SUPERVISOR))
    assert cluster.supervisor is not None and cluster.supervisor.wait(PATIENCE) == -signal.SIGKILL
    (kind,) = choose([name])
    assert not kind.strike(cluster, host)


def test_an_agent_is_not_the_ssh_that_started_it(cluster: Cluster, tmp_path: Path) -> None:
    first, second = cluster.hosts
    there = f"cd {tmp_path} && {sys.executable} {AGENT} RUN"
    starter = first.start(["ssh", "second", there])
    until(lambda: len(agents(second)) >= 2)
    (kind,) = choose(["killed-agent"])
    assert kind.strike(cluster, first)
    assert starter.poll() is None and len(agents(second)) >= 2
    assert kind.strike(cluster, second)
    assert starter.wait(PATIENCE) != 0


def test_what_is_impossible_here_has_a_reason(hosts: Hosts) -> None:
    reasons = {kind.name: kind.impossible(hosts) for kind in KINDS}
    assert {name for name, reason in reasons.items() if reason is not None} <= {"slow-link", "stalled-disk"}
    assert "" not in reasons.values()


# Pure


def test_kinds_have_names_and_one_place_in_the_tests() -> None:
    assert len(set(NAMES)) == len(NAMES) == 13 and set(HURTS) == set(NAMES)
    assert [kind.name for kind in choose([])] == list(NAMES)
    assert [kind.name for kind in choose(["cut-link", "killed-rank"])] == ["killed-rank", "cut-link"]
    with pytest.raises(ConfigError, match=r"fire: there is no such fault: killed-rank, "):
        choose(["fire"])


def test_where_a_kind_may_happen() -> None:
    hosts = ["first", "second", "third"]
    places = {kind.place: kind.places(hosts, "second") for kind in KINDS}
    assert places == {Place.ANY: hosts, Place.HEAD: ["second"], Place.OTHER: ["first", "third"]}


def test_only_a_cut_link_does_not_come_back() -> None:
    assert [kind.name for kind in KINDS if not kind.back] == ["cut-link"]


@pytest.mark.parametrize(
    ("name", "verdict", "blamed", "right"),
    [
        ("killed-rank", "rank 1 on second was killed by SIGKILL", "second", True),
        ("killed-rank", "rank 1 on second was killed by sigkill", "second", True),
        ("killed-rank", "rank 0 on first was killed by SIGKILL", "first", False),
        ("killed-rank", "rank 1 on second was killed by SIGKILL", None, False),
        ("killed-rank", "rank 1 on second: out of memory", "second", False),
        ("killed-rank", "", None, False),
        ("flapping-link", "", None, True),
        ("flapping-link", "host second is gone", "second", True),
        ("flapping-link", "host second is gone", "first", False),
        ("flapping-link", "", "second", False),
        ("full-disk", "no space left", None, True),
        ("full-disk", "no space left", "second", False),
        ("killed-head", "host second has lost all processes", "second", True),
        ("killed-head", "host second has lost all processes", None, False),
        ("killed-head", "", None, False),
    ],
)
def test_right_verdicts(name: str, verdict: str, blamed: str | None, right: bool) -> None:
    (kind,) = choose([name])
    assert kind.accepts(verdict, blamed, "second") is right
