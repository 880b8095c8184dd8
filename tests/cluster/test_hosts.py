"""An attempt through an agent: started, watched, ended, found again; on one host, reached as this one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megastable.cluster.fleet import Attempt
from megastable.cluster.hostfile import HostSlots
from megastable.cluster.hosts import Hosts
from megastable.cluster.launcher import TrainingCommand
from megastable.cluster.store import AgentLink, Store
from megastable.run.directory import RunDirectory
from megastable.run.rank_ipc import mark
from tests.patience import until

# A rank: it runs until it is told how to end.
RANK = """
import os, sys, time, pathlib, signal
run = next(pathlib.Path(word.partition("=")[2]) for word in sys.argv if word.startswith("run.dir="))
(run / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
while not (run / "finish").exists():
    time.sleep(0.02)
sys.exit(int((run / "finish").read_text()))
"""


class ThisHost:
    """Runs the command here."""

    detached = True

    def words(self, host: str, command: Sequence[str]) -> list[str]:
        return list(command)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDirectory]:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "waiting_rank.py").write_text(RANK)
    (tmp_path / "run" / "logs").mkdir(parents=True)
    paths = [str(tmp_path / "code"), os.getcwd(), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, paths)))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    yield RunDirectory(tmp_path / "run")
    for process in psutil.process_iter():
        try:
            if any(str(tmp_path) in word for word in process.cmdline()):
                process.kill()
        except psutil.Error:
            continue


def hosts(run: RunDirectory, store: Store, silence: float = 2.0) -> Hosts:
    there = [HostSlots("first", (0, 1))]
    return Hosts(
        run, store, there, ThisHost(), silence, True, TrainingCommand("recipe.yaml", module="waiting_rank")
    )


def ready(fleet: Hosts, attempt: int) -> None:
    until(lambda: not fleet.missing(attempt))


def under_way(run: RunDirectory, store: Store) -> tuple[Hosts, Attempt, AgentLink]:
    """An attempt of two ranks, both of which run."""
    fleet = hosts(run, store)
    ready(fleet, 0)
    attempt = fleet.start(1, ["first"])
    until(lambda: attempt.look() and len(pids(run)) == 2)
    agent = fleet.agent("first")
    assert agent is not None
    return fleet, attempt, agent


def pids(run: RunDirectory) -> list[int]:
    return [int(path.read_text()) for path in sorted(run.root.glob("pid-*")) if path.read_text()]


def alive(pid: int) -> bool:
    """Not a zombie either: who adopts the orphans may be slow to reap them."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def over(attempt: Attempt) -> None:
    until(lambda: not attempt.look())


@pytest.mark.slow
def test_an_attempt_from_start_to_end(run: RunDirectory) -> None:
    with Store(run) as store:
        fleet = hosts(run, store)
        assert fleet.found(()) is None
        ready(fleet, 0)
        attempt = fleet.start(1, ["first"])
        until(lambda: attempt.look() and len(pids(run)) == 2)
        assert attempt.code is None and not attempt.gone
        assert set(attempt.states()) == {0, 1}
        (run.root / "finishing").write_text("0")
        (run.root / "finishing").rename(run.root / "finish")  # with its content: ranks read it at once
        over(attempt)
        assert attempt.code == 0 and not any(fate.signal for fate in attempt.fates.values())

        # The next one: a rank is killed, the other one is stopped; both are gone before the third begins
        (run.root / "finish").unlink()
        for path in run.root.glob("pid-*"):
            path.unlink()
        ready(fleet, 1)
        attempt = fleet.start(2, ["first"])
        until(lambda: attempt.look() and len(pids(run)) == 2)
        first, second = pids(run)
        assert set(attempt.states()) == {0, 1}  # looks for them: else that is done every two seconds
        os.kill(first, signal.SIGSTOP)
        os.kill(second, signal.SIGKILL)
        until(lambda: attempt.look() and attempt.fates)
        assert (attempt.fates[1].signal, attempt.fates[1].host) == (9, "first")
        assert attempt.states()[0].host == "first" and "stopped by a signal" in attempt.states()[0].text
        attempt.end()
        ready(fleet, 2)
        assert not alive(first)
        fleet.close(0)
        until(lambda: fleet.agent("first") is None)


@pytest.mark.slow
def test_agents_and_supervisors_come_and_go(run: RunDirectory) -> None:
    """The ranks go on: a new agent finds them, and so does a new supervisor; then the ranks end unseen by it."""
    with Store(run) as store:
        fleet, attempt, agent = under_way(run, store)
        os.kill(agent.hello["pid"], signal.SIGKILL)
        until(lambda: attempt.look() and (a := fleet.agent("first")) and a.hello["pid"] != agent.hello["pid"])
        assert not attempt.gone and all(map(alive, pids(run)))
    with Store(run) as store:
        fleet = hosts(run, store)
        found = fleet.found(())
        assert found is not None and found.number == 1 and found.look()
        os.kill(pids(run)[0], signal.SIGKILL)
        over(found)
        # On a busy machine the launcher may have reaped the rank before the agent looked.
        assert found.fates[0].signal in (9, None)
        fleet.close(0)


@pytest.mark.slow
def test_a_silent_host_is_gone_and_comes_back(run: RunDirectory) -> None:
    with Store(run) as store:
        fleet, attempt, agent = under_way(run, store)
        os.kill(agent.hello["pid"], signal.SIGSTOP)  # silent; and what is to reach it, fails:
        fleet.reach = Unreachable()
        until(lambda: not attempt.look() or attempt.gone)
        assert "Connection timed out" in attempt.gone["first"]
        assert "Connection timed out" in fleet.missing(1)["first"]
        os.kill(agent.hello["pid"], signal.SIGCONT)
        until(lambda: attempt.look() and not attempt.gone)
        attempt.end()
        ready(fleet, 1)
        assert not any(map(alive, pids(run)))
        fleet.close(0)


def test_a_host_that_lost_its_processes_is_named_at_once_and_not_begun_anew(run: RunDirectory) -> None:
    """As by a restart: the agent of before goes with all processes, the next one finds nothing."""
    with Store(run) as store:
        fleet, attempt, agent = under_way(run, store)
        for process in (psutil.Process(agent.hello["pid"]), *marked(run)):
            process.kill()
        until(lambda: not attempt.look() and attempt.gone)
        assert attempt.gone == {
            "first": "has lost all processes of attempt 1: it was restarted, or they were killed"
        }
        ready(fleet, 1)
        assert not marked(run)
        # So does a supervisor that starts now
        assert fleet.found(()) is None and "first" in fleet.left(1, ()).gone
        fleet.close(0)


def marked(run: RunDirectory) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if mark(run, 1) in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_not_all_agents_of_many_hosts_are_started_at_once(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megastable.cluster.hosts.AT_ONCE", 3)
    with Store(run) as store:
        many = [HostSlots(f"host{number}", (0,)) for number in range(10)]
        fleet = Hosts(run, store, many, Slowly(), 30.0, True, TrainingCommand("recipe.yaml", module="module"))
        seen = set[str]()

        def look() -> bool:
            fleet.missing(0)
            assert len(fleet._tries) <= 3
            seen.update(fleet._tries)
            return len(seen) == 10

        until(look)
        fleet.close(0)


class Slowly:
    detached = True

    def words(self, host: str, command: Sequence[str]) -> list[str]:
        return ["sleep", "0.2"]


class Unreachable:
    detached = True

    def words(self, host: str, command: Sequence[str]) -> list[str]:
        text = f"ssh: connect to host {host} port 22: Connection timed out"
        return [sys.executable, "-c", f"import sys; sys.exit({text!r})"]
