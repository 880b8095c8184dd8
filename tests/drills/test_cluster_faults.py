"""Every kind of fault of a cluster, on real hosts: it hurts, and where it ends the hurt is over."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drills import cluster_faults
from drills.chaos import (
    PHASES,
    STARTING,
    ClusterOutcome,
    Planned,
    judge_fault,
    plan_faults,
)
from drills.cluster_faults import KINDS, NAMES, Cluster, Kind, choose_kinds
from drills.hosts import Host, Hosts
from drills.namespaces import Started, find_missing
from tests.patience import PATIENCE, until

SUPERVISOR, RANK, AGENT = "sleep 9001", "sleep 9002", "-m megastable.supervise.agent"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := find_missing():
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
        return hosts["first"].start_process(SUPERVISOR.split())

    made = Cluster(hosts, "first", supervise)
    made.start_supervisor()
    for number, host in enumerate(hosts):
        host.start_process(RANK.split(), environment={"RANK": str(number)})
        host.start_process([sys.executable, "-c", "import time; time.sleep(9004)"])
        host.start_process([sys.executable, *AGENT.split(), "RUN"], folder=tmp_path)
        until(lambda host=host: host.ranks() and agents(host))
    yield made
    for host in hosts:
        for process in [*host.find_processes("900"), *agents(host)]:
            process.kill()
        host.join_link()


def agents(host: Host) -> list[psutil.Process]:
    """Not the shell that starts one, nor what has just ended."""

    def command(process: psutil.Process) -> list[str]:
        try:
            return process.cmdline()
        except psutil.Error:
            return []

    return [process for process in host.find_processes(AGENT) if command(process)[1:3] == AGENT.split()]


def unreachable(cluster: Cluster, host: Host) -> bool:
    other = next(other for other in cluster.hosts if other is not host)
    return other.run_process(["ssh", "-o", "ConnectTimeout=1", host.name, "true"], PATIENCE).returncode != 0


def unwritable(cluster: Cluster, host: Host) -> bool:
    try:
        host.run_process(
            ["dd", "if=/dev/zero", f"of={cluster.hosts.shared.folder}/probe", "count=1", "conv=fsync"], 0.5
        )
    except Exception:
        return True
    return False


def first_supervisor_gone(cluster: Cluster, host: Host) -> bool:
    return not host.on or not host.find_processes(SUPERVISOR)


def stopped(cluster: Cluster, host: Host) -> bool:
    return any(rank.status() == psutil.STATUS_STOPPED for rank in host.ranks().values())


def queued(cluster: Cluster, host: Host) -> bool:
    return "tbf" in host.run_process(["tc", "qdisc", "show", "dev", "eth0"], PATIENCE).stdout


HURTS: dict[str, Callable[[Cluster, Host], bool]] = {
    "killed-rank": lambda cluster, host: not host.find_processes(RANK),
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
    "full-disk": lambda cluster, host: cluster.hosts.shared.free_bytes() == 0,
    "stalled-disk": unwritable,
}
LASTING = {"killed-rank", "stopped-rank", "killed-agent", "cut-link"}  # the run has to go on by itself


@pytest.mark.quick("full-disk", "killed-agent")
@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_kind_hurts_until_it_is_mended(kind: Kind, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_faults, "LONGEST", 5.0)
    if reason := kind.impossible(cluster.hosts):
        pytest.skip(reason)
    hurts = HURTS[kind.name]
    host = cluster.hosts[kind.possible_hosts([host.name for host in cluster.hosts], "first")[-1]]
    others = [other for other in cluster.hosts if other is not host]
    until(lambda: not hurts(cluster, host))
    assert kind.strike(cluster, host)
    until(lambda: hurts(cluster, host))
    assert all(len(other.ranks()) == 1 and len(agents(other)) == 1 for other in others)
    kind.mend(cluster, host)
    until(lambda: hurts(cluster, host) is (kind.name in LASTING))


# Pure


@pytest.mark.parametrize(
    ("name", "verdict", "blamed", "right"),
    [
        ("killed-rank", "rank 1 on second was killed by SIGKILL", "second", True),
        ("killed-rank", "rank 0 on first was killed by SIGKILL", "first", False),
        ("killed-rank", "rank 1 on second was killed by SIGKILL", None, False),
        ("killed-rank", "rank 1 on second: out of memory", "second", False),
        ("flapping-link", "", None, True),
        ("flapping-link", "host second is gone", "second", True),
        ("flapping-link", "host second is gone", "first", False),
        ("full-disk", "no space left", None, True),
        ("killed-head", "host second has lost all processes", "second", True),
        ("killed-head", "", None, False),
    ],
)
def test_kind_accepts_right_verdicts(name: str, verdict: str, blamed: str | None, right: bool) -> None:
    (kind,) = choose_kinds([name])
    assert kind.accepts_verdict(verdict, blamed, "second") is right


HOSTS = ["first", "second", "third"]
SAID = {"found": 2.04, "verdict": "rank 1 on second was killed by SIGKILL", "blamed": "second"}
ENDED: dict[str, Any] = {"exit": 0, "same": True, "cost": 31.26}


def planned(kind: str = "killed-rank", seconds: float = 0.0) -> Planned:
    return Planned(number=3, kind=kind, host="second", phase="step", step=17, seconds=seconds)


def became(kind: str = "killed-rank", seconds: float = 0.0, **changes: Any) -> ClusterOutcome:
    said: Any = tuple({**SAID, **changes}[name] for name in SAID)
    ended = {name: changes.get(name, value) for name, value in ENDED.items()}
    return judge_fault(choose_kinds([kind])[0], planned(kind, seconds), said, **ended)


@given(seed=st.integers(), faults=st.integers(0, 40), steps=st.integers(1, 500), hosts=st.integers(2, 3))
def test_plan_is_fair_and_possible(seed: int, faults: int, steps: int, hosts: int) -> None:
    names = HOSTS[:hosts]
    found = plan_faults(KINDS, names, seed, faults, steps)
    assert found == plan_faults(KINDS, names, seed, faults, steps)
    assert [one.number for one in found] == list(range(1, faults + 1))
    for attribute, values in (("kind", NAMES), ("phase", (STARTING, *PHASES))):
        early = {kind.name for kind in KINDS if kind.early}  # they strike in a step
        counts = Counter(
            getattr(one, attribute) for one in found if attribute == "kind" or one.kind not in early
        )
        assert max(counts[value] for value in values) - min(counts[value] for value in values) <= 1
        assert set(counts) <= set(values)
    for kind in KINDS:
        mine = [one for one in found if one.kind == kind.name]
        places = kind.possible_hosts(names, "first")
        hit = Counter(one.host for one in mine)
        assert set(hit) <= set(places) and max(hit[p] for p in places) - min(hit[p] for p in places) <= 1
        least, most = kind.seconds or (0, 0)
        assert all(least <= one.seconds <= most for one in mine)
    assert all(0 < one.step <= steps for one in found if one.phase != STARTING)
    assert all(one.step == 0 for one in found if one.phase == STARTING)
    if steps >= 10:
        assert all(steps / 10 <= one.step <= steps * 0.9 for one in found if one.step)


def test_judge_looks_at_verdict_and_end() -> None:
    good = became()
    assert (good.expected, good.verdict_right, good.end_right, good.right) == ("second", True, True, True)
    assert not became(blamed="first").right and became(blamed="first").end_right
    for changes in (
        {"same": False},
        {"same": None},
        {"exit": 76, "same": None},
        {"exit": None, "same": None},
    ):
        assert (became(**changes).verdict_right, became(**changes).end_right) == (True, False)
    # All hosts back, and nothing noticed: right where that may be, and the bytes are the same.
    silent = {"found": None, "verdict": "", "blamed": None}
    assert became("flapping-link", 2, **silent).right and not became(**silent).right
    assert not became("flapping-link", 2, **silent, same=False).right
    # A host that stays away cannot end with the same bytes.
    gone = {"verdict": "host second is gone"}
    assert became("cut-link", **gone, exit=80, same=None).right
    assert not became("cut-link", **gone).right and not became("cut-link", **gone, exit=1, same=None).right
