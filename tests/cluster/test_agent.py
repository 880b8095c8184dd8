"""The agent as a process: asked to stop, started twice, and left alone by its supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megastable.base import errors
from megastable.base.stop_signals import STOPS
from megastable.cluster import agent as agents
from megastable.cluster.hostfile import HostSlots
from megastable.cluster.hosts import Hosts
from megastable.cluster.launcher import TrainingCommand
from megastable.cluster.local_attempt import alive_here
from megastable.cluster.reach import Local
from megastable.cluster.store import Store
from megastable.run.directory import RunDirectory
from megastable.run.events.supervisor_events import SupervisorEvent
from megastable.run.log import RunLog
from megastable.run.rank_ipc import FLAG, mark
from tests.patience import PATIENCE, until

ROOT = Path(__file__).resolve().parents[2]
RECIPE = str(ROOT / "launch/recipes/quickstart.yaml")


class Started:
    """Agents of runs, as processes."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def __call__(self, run: Path, name: str = "first") -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "megastable.cluster.agent", str(run), "--name", name]
        return self.command(*words)

    def command(self, *words: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.processes.append(process)
        return process


@pytest.fixture
def start() -> Iterator[Started]:
    started = Started()
    yield started
    for process in started.processes:
        with process:
            process.kill()


def hosts(store: Store) -> Hosts:
    there = [HostSlots("first", (0,))]
    return Hosts(
        store.run,
        store,
        there,
        Local("elsewhere"),
        60.0,
        False,
        TrainingCommand("recipe.yaml", module="module"),
    )


def pid(store: Store) -> int | None:
    found = store.agents.get("first")
    return None if found is None or not found.state else int(found.hello["pid"])


def test_asked_to_stop_it_tells_every_supervisor_and_goes_on(tmp_path: Path, start: Started) -> None:
    """Until the supervisor says that the run is over; one that comes later has another address and another token."""
    process = start(tmp_path)
    with Store(RunDirectory(tmp_path)) as store:
        fleet = hosts(store)
        until(lambda: pid(store) == process.pid)
        assert fleet.stop_asked() is None
        address = store.address
    with Store(RunDirectory(tmp_path)) as store:
        fleet = hosts(store)
        assert store.address.token != address.token
        until(lambda: pid(store) == process.pid)
        process.send_signal(signal.SIGTERM)
        until(lambda: fleet.stop_asked() == "first")
        assert process.poll() is None
        fleet.close(errors.STOPPED)
        assert process.wait(PATIENCE) == errors.STOPPED


def test_asked_to_stop_without_a_supervisor_it_ends(tmp_path: Path, start: Started) -> None:
    """A scheduler would else wait for it until it kills it."""
    process = start(tmp_path)
    until(lambda: catches(process, signal.SIGTERM))
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == errors.STOPPED


def catches(process: subprocess.Popen[str], number: signal.Signals) -> bool:
    """Whether it has a handler for a signal."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def listens(run: RunDirectory) -> bool:
    """Whether an agent of it is there, by what keeps others off."""
    held = agents.only_agent(run)
    if held is not None:
        held.close()
    return held is None


@pytest.mark.slow
def test_a_second_one_is_not_needed_on_the_same_host(tmp_path: Path, start: Started) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    first = start(tmp_path / "run")
    with Store(RunDirectory(tmp_path / "run")) as store:
        until(lambda: pid(store) == first.pid)
        for name in ("first", "second"):
            second = start(tmp_path / "link", name)
            assert second.wait(PATIENCE) == errors.OK
            assert "is on this host already" in second.communicate()[0]
        assert list(store.agents) == ["first"] and pid(store) == first.pid

        # Given by a person as the command of another host, it would never come: that is refused.
        words = [sys.executable, "launch/supervise.py", RECIPE, f"run.dir={tmp_path / 'run'}"]
        where = ["--no_ssh", "--num_nodes", "3", "--num_gpus", "1", "--node_rank", "2"]
        refused = start.command(*words, "--", *where)
        assert refused.wait(PATIENCE) == errors.BAD_INPUT
        said = refused.communicate()[0]
        assert "is on this host already" in said and "Traceback" not in said

        other = start(tmp_path / "other")  # of another run
        until(lambda: listens(RunDirectory(tmp_path / "other")))
        assert other.poll() is None
        hosts(store).close(errors.OK)
        assert first.wait(PATIENCE) == errors.OK


def test_an_agent_that_nobody_told_of_the_end_of_a_complete_run_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a pod whose connection was down in that moment: Kubernetes would start it again, to wait again."""
    monkeypatch.setattr(agents, "ORPHANED", 0.0)
    monkeypatch.setattr(agents, "AGAIN", 0.01)
    run, before = RunDirectory(tmp_path), {number: signal.getsignal(number) for number in STOPS}
    log = RunLog(run, print)
    try:
        assert agents.Agent(run, "first").work() == errors.FAILED
        for what, code, expected in (
            ("started", None, errors.FAILED),
            ("ended", errors.UNSTABLE, errors.FAILED),
            ("ended", errors.OK, errors.OK),
            ("started", None, errors.FAILED),
        ):
            log.emit(SupervisorEvent(what=what, pid=1, host="x", code=code))
            assert agents.Agent(run, "first").work() == expected
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_processes_of_another_user_are_none_of_the_run(tmp_path: Path) -> None:
    """Whoever is on the host can write a mark into his own arguments; nothing of ours can end such a process."""
    run = RunDirectory(tmp_path)

    def wait_as(user: int, rank: int) -> subprocess.Popen[bytes]:
        words = ["sh", "-c", "read line", "sh", f"{FLAG}={mark(run, rank)}"]
        return subprocess.Popen(words, stdin=subprocess.PIPE, user=user)

    with wait_as(65534, 9) as theirs, wait_as(os.getuid(), 3) as mine:  # which end with their input
        until(lambda: alive_here(run) == [3])
        assert theirs.poll() is None and mine.poll() is None
