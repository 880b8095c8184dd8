"""Agents and hosts: one real agent and its ranks; attempts as agents tell of them; burn-ins of hosts that stand by."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megastable.base import errors
from megastable.base.process import STOPS
from megastable.cluster import agent as agents
from megastable.cluster import hosts as module
from megastable.cluster.fleet import Attempt, BurnInAnswer
from megastable.cluster.host_survey import HostBurnIn
from megastable.cluster.hosts import HostBurnIns, Hosts, RemoteAttempt
from megastable.cluster.launcher import HostSlots, TrainingCommand
from megastable.cluster.reach import Local
from megastable.cluster.store import AgentLink, Store
from megastable.cluster.this_host import list_attempts_here
from megastable.run.directory import RunDirectory
from megastable.run.events.supervisor_events import SupervisorEvent
from megastable.run.log import RunLog
from megastable.run.rank_ipc import FLAG, make_mark
from megastable.run.wire import Message, StoreClient
from tests.patience import PATIENCE, until

ROOT = Path(__file__).resolve().parents[2]
RECIPE = str(ROOT / "launch/recipes/quickstart.yaml")


class Started:
    """Agents of runs, as processes."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def __call__(self, run: Path, name: str = "first") -> subprocess.Popen[str]:
        return self.command(sys.executable, "-m", "megastable.cluster.agent", str(run), "--name", name)

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


def fleet_elsewhere(store: Store) -> Hosts:
    training = TrainingCommand("recipe.yaml", module="module")
    return Hosts(store.run, store, [HostSlots("first", (0,))], Local("elsewhere"), 60.0, False, training)


def pid(store: Store) -> int | None:
    found = store.agents.get("first")
    return None if found is None or not found.state else int(found.hello["pid"])


def test_agent_asked_to_stop_tells_every_supervisor_and_goes_on(tmp_path: Path, start: Started) -> None:
    """Until the supervisor says that the run is over; one that comes later has another address and another token."""
    process = start(tmp_path)
    with Store(RunDirectory(tmp_path)) as store:
        fleet = fleet_elsewhere(store)
        until(lambda: pid(store) == process.pid)
        assert fleet.find_host_asked_to_stop() is None
        address = store.address
    with Store(RunDirectory(tmp_path)) as store:
        fleet = fleet_elsewhere(store)
        assert store.address.token != address.token
        until(lambda: pid(store) == process.pid)
        process.send_signal(signal.SIGTERM)
        until(lambda: fleet.find_host_asked_to_stop() == "first")
        assert process.poll() is None
        fleet.close(errors.STOPPED)
        assert process.wait(PATIENCE) == errors.STOPPED


@pytest.mark.slow
def test_agent_ends_where_another_one_is_on_the_host(tmp_path: Path, start: Started) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    first = start(tmp_path / "run")
    with Store(RunDirectory(tmp_path / "run")) as store:
        until(lambda: pid(store) == first.pid)
        second = start(tmp_path / "link", "second")
        assert second.wait(PATIENCE) == errors.OK and "is on this host already" in second.communicate()[0]
        assert list(store.agents) == ["first"] and pid(store) == first.pid
        # Given by a person as the command of another host, it would never come: that is refused.
        words = [sys.executable, "launch/supervise.py", RECIPE, f"run.dir={tmp_path / 'run'}"]
        where = ["--no_ssh", "--num_nodes", "3", "--num_gpus", "1", "--node_rank", "2"]
        refused = start.command(*words, "--", *where)
        assert refused.wait(PATIENCE) == errors.BAD_INPUT
        assert "is on this host already" in refused.communicate()[0]
        fleet_elsewhere(store).close(errors.OK)
        assert first.wait(PATIENCE) == errors.OK


def test_agent_ends_well_if_nobody_told_it_that_the_run_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a pod whose connection was down in that moment: Kubernetes would start it again, to wait again."""
    monkeypatch.setattr(agents, "ORPHANED", 0.0)
    monkeypatch.setattr(agents, "AGAIN", 0.01)
    run, before = RunDirectory(tmp_path), {number: signal.getsignal(number) for number in STOPS}
    log = RunLog(run, print)
    try:
        assert agents.Agent(run, "first").serve_until_told() == errors.FAILED
        for what, code, expected in (
            ("started", None, errors.FAILED),
            ("ended", errors.UNSTABLE, errors.FAILED),
            ("ended", errors.OK, errors.OK),
            ("started", None, errors.FAILED),
        ):
            log.emit_event(SupervisorEvent(what=what, pid=1, host="x", code=code))
            assert agents.Agent(run, "first").serve_until_told() == expected
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_alive_here_passes_over_processes_of_other_users(tmp_path: Path) -> None:
    """Whoever is on the host can write a mark into his own arguments; nothing of ours can end such a process."""
    run = RunDirectory(tmp_path)

    def wait_as(user: int, rank: int) -> subprocess.Popen[bytes]:
        words = ["sh", "-c", "read line", "sh", f"{FLAG}={make_mark(run, rank)}"]
        return subprocess.Popen(words, stdin=subprocess.PIPE, user=user)

    with wait_as(65534, 9) as theirs, wait_as(os.getuid(), 3) as mine:  # which end with their input
        until(lambda: list_attempts_here(run) == [3])
        assert theirs.poll() is None and mine.poll() is None


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

    def build_command(self, host: str, command: Sequence[str]) -> list[str]:
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


def fleet_of(run: RunDirectory, store: Store) -> Hosts:
    training = TrainingCommand("recipe.yaml", module="waiting_rank")
    return Hosts(run, store, [HostSlots("first", (0, 1))], ThisHost(), 2.0, True, training)


def under_way(run: RunDirectory, store: Store) -> tuple[Hosts, Attempt, AgentLink]:
    """An attempt of two ranks, both of which run."""
    fleet = fleet_of(run, store)
    until(lambda: not fleet.list_missing_hosts(0))
    attempt = fleet.start_attempt(1, ["first"])
    until(lambda: attempt.poll_processes() and len(pids(run)) == 2)
    agent = fleet.find_agent("first")
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


@pytest.mark.slow
def test_remote_attempt_from_start_to_end(run: RunDirectory) -> None:
    with Store(run) as store:
        fleet, attempt, _ = under_way(run, store)
        assert attempt.code is None and not attempt.gone and set(attempt.read_kernel_views()) == {0, 1}
        # A signal to a launcher ends nobody: the supervisor is told, as of one to the agent.
        assert fleet.find_host_asked_to_stop() is None
        launchers = [process for process in marked(run) if process.pid not in pids(run)]
        launchers[-1].send_signal(signal.SIGTERM)
        until(lambda: attempt.poll_processes() and fleet.find_host_asked_to_stop() == "first")
        (run.root / "finishing").write_text("0")
        (run.root / "finishing").rename(run.root / "finish")  # with its content: ranks read it at once
        until(lambda: not attempt.poll_processes())
        assert attempt.code == 0 and not any(fate.signal for fate in attempt.fates.values())

        # The next one: a rank is killed, the other one is stopped; both are gone before the third begins
        for path in (run.root / "finish", *run.root.glob("pid-*")):
            path.unlink()
        until(lambda: not fleet.list_missing_hosts(1))
        attempt = fleet.start_attempt(2, ["first"])
        until(lambda: attempt.poll_processes() and len(pids(run)) == 2)
        first, second = pids(run)
        assert set(attempt.read_kernel_views()) == {
            0,
            1,
        }  # looks for them: else that is done every two seconds
        os.kill(first, signal.SIGSTOP)
        os.kill(second, signal.SIGKILL)
        until(lambda: attempt.poll_processes() and attempt.fates)
        assert (attempt.fates[1].signal, attempt.fates[1].host) == (9, "first")
        assert (
            attempt.read_kernel_views()[0].host == "first"
            and "stopped by a signal" in attempt.read_kernel_views()[0].text
        )
        attempt.kill_all()
        until(lambda: not fleet.list_missing_hosts(2))
        assert not alive(first)
        fleet.close(0)
        until(lambda: fleet.find_agent("first") is None)


def test_remote_attempt_names_a_host_that_lost_its_processes_at_once(run: RunDirectory) -> None:
    """As by a restart: the agent of before goes with all processes, the next one finds nothing."""
    with Store(run) as store:
        fleet, attempt, agent = under_way(run, store)
        for process in (psutil.Process(agent.hello["pid"]), *marked(run)):
            process.kill()
        until(lambda: not attempt.poll_processes() and attempt.gone)
        assert attempt.gone == {
            "first": "has lost all processes of attempt 1: it was restarted, or they were killed"
        }
        until(lambda: not fleet.list_missing_hosts(1))
        assert not marked(run)
        # So does a supervisor that starts now
        assert fleet.find_running_attempt(()) is None and "first" in fleet.find_ended_attempt(1, ()).gone
        fleet.close(0)


def marked(run: RunDirectory) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if make_mark(run, 1) in " ".join(process.cmdline()):
                found.append(process)
    return found


NAMES = ("first", "second")
NOTHING: Message = {"attempt": None, "running": False, "code": None, "problem": "", "fates": {}, "ended": 0}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Store(RunDirectory(tmp_path)) as store:
        there = [HostSlots(name, (0,)) for name in NAMES]
        training = TrainingCommand("recipe.yaml", module="module")
        yield Hosts(store.run, store, there, Local("first"), 60.0, False, training)


def agent(hosts: Hosts, name: str) -> StoreClient:
    hello = {"role": "agent", "name": name, "hostname": name, "time": time.time()}
    return StoreClient(hosts.store.address, hello)


def says(hosts: Hosts, link: StoreClient, name: str, **state: object) -> None:
    """Returns when the supervisor has heard it."""
    told = NOTHING | state
    link.send_message({"state": told, "time": time.time()})
    until(lambda: hosts.store.agents[name].state == told)


def test_remote_attempt_ends_when_a_host_comes_back_without_its_processes(hosts: Hosts) -> None:
    """The others would wait for its ranks; and an order to begin again would start ranks that nobody waits for."""
    links = {name: agent(hosts, name) for name in NAMES}
    order: Message = {"launch": {"attempt": 3}}
    attempt = RemoteAttempt(hosts, 3, NAMES, dict.fromkeys(NAMES, order))
    for name, link in links.items():
        says(hosts, link, name, attempt=2, code=1)  # of before
        assert attempt.poll_processes() and not attempt.gone
        assert link.receive_messages(PATIENCE) == [order]
        says(hosts, link, name, attempt=3, running=True)
    assert attempt.poll_processes() and not attempt.gone

    links["second"].close()
    new = agent(hosts, "second")
    until(lambda: not hosts.store.agents["second"].state)
    assert attempt.poll_processes() and not attempt.gone  # it has not said yet what it found there
    says(hosts, new, "second", running=True, attempt=3)  # all of it: only the agent had died
    assert attempt.poll_processes() and not attempt.gone
    says(hosts, new, "second")
    assert attempt.poll_processes()
    assert (
        list(attempt.gone) == ["second"] and "has lost all processes of attempt 3" in attempt.gone["second"]
    )
    assert new.receive_messages(0.1) == []


def test_left_blames_no_host_where_a_scheduler_replaced_another(hosts: Hosts) -> None:
    """It ended the attempt everywhere."""
    links = {name: agent(hosts, name) for name in NAMES}
    says(hosts, links["first"], "first")
    assert not hosts.find_ended_attempt(3, NAMES).gone
    assert not hosts.find_ended_attempt(3, ("first", "another")).gone
    says(hosts, links["second"], "second", attempt=3, code=1)
    assert hosts.find_ended_attempt(3, NAMES).gone.keys() == {"first"}
    assert hosts.find_ended_attempt(3, (*NAMES, "another")).gone.keys() == {"first"}


def test_remote_attempt_does_not_believe_all_hosts_gone_after_a_stop_of_its_own(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its store has not yet read what they said meanwhile."""
    links = {name: agent(hosts, name) for name in NAMES}
    attempt = RemoteAttempt(hosts, 3, NAMES, {})
    for name, link in links.items():
        says(hosts, link, name, attempt=3, running=True)
    assert attempt.poll_processes() and not attempt.gone
    hosts.silence = 6.0
    monkeypatch.setattr(hosts, "start_agent", lambda name: "ssh: no route")
    hosts.failed = dict.fromkeys(NAMES, "ssh: no route")
    now = time.monotonic

    def later(seconds: float) -> None:
        monkeypatch.setattr("megastable.cluster.hosts.time.monotonic", lambda: now() + seconds)

    later(60.0)
    assert attempt.poll_processes() and not attempt.gone
    for seconds in range(61, 66):
        later(float(seconds))
        assert attempt.poll_processes() and not attempt.gone
    for seconds in range(66, 70):
        later(float(seconds))
        attempt.poll_processes()
    assert list(attempt.gone) == list(NAMES)  # they are silent indeed


def test_hosts_tell_apart_those_that_give_themselves_the_same_name(hosts: Hosts) -> None:
    """As clones of one image do: their ranks have the name of the host file from their agent."""
    for name in NAMES:
        now = time.time() + 3600 * (name == "first")
        hello = {"role": "agent", "name": name, "hostname": "clone", "time": now}
        says(hosts, StoreClient(hosts.store.address, hello), name, attempt=3, running=True)
    assert [hosts.name_of_host(name) for name in (*NAMES, "clone")] == [*NAMES, "clone"]
    assert 3500 < hosts.clock_offset("first") < 3700 and abs(hosts.clock_offset("second")) < 60


def test_start_leaves_the_host_file_of_a_user(hosts: Hosts) -> None:
    for name in NAMES:
        says(hosts, agent(hosts, name), name, port=29500)
    theirs = hosts.run.root / "hostfile"
    theirs.write_text("first slots=1\nsecond slots=1\nthird slots=1\n")
    attempt = hosts.start_attempt(4, ["second"])
    assert attempt.names == ("second",) and theirs.read_text().count("slots") == 3
    words = list(map(str, attempt._wanted["second"]["launch"]["words"]))  # type: ignore[attr-defined]
    assert Path(words[words.index("--hostfile") + 1]).read_text() == "second slots=1\n"
    hosts.run.logs.joinpath("attempt-0005.hostfile").mkdir(parents=True)
    with pytest.raises(OSError, match="hostfile"):
        hosts.start_attempt(5, NAMES)


class Saying:
    """Reaches hosts on which a burn-in prints a text."""

    def __init__(self, text: str, code: int = 0) -> None:
        self.text, self.code, self.asked = text, code, 0
        self.detached = True

    def build_command(self, host: str, command: Sequence[str]) -> list[str]:
        self.asked += 1
        return [sys.executable, "-c", f"print({self.text!r}); raise SystemExit({self.code})"]


def polled(burn_ins: HostBurnIns, host: str = "b") -> BurnInAnswer:
    return until(lambda: burn_ins.poll_burn_in(host, 0.0))  # type: ignore[return-value]


def report(**told: object) -> str:
    burned = HostBurnIn.model_validate({"seed": 1, "seconds": 1.0} | told)
    return f"a warning of a library\n{burned.model_dump_json()}"


@pytest.mark.parametrize(
    ("text", "code", "why"),
    [
        (report(in_use="5 GB are used by others"), 0, "5 GB are used by others"),
        ("ssh: connect to host b: No route to host", 255, "No route to host"),
        ("{}", 0, "cannot be read"),
        ("", 0, "cannot be read"),
    ],
    ids=["in-use", "unreachable", "unreadable", "silent"],
)
def test_host_burn_ins_are_tried_again_later_if_they_could_not_be_made(
    text: str, code: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = report(found=["cuda:0: wrong", "cuda:1: too"], undiagnosed="x")
    assert polled(HostBurnIns(Saying(wrong))) == BurnInAnswer(found="cuda:0: wrong; cuda:1: too")
    reach = Saying(text, code)
    burn_ins = HostBurnIns(reach)
    answer = polled(burn_ins)
    assert why in answer.unmade and not answer.found
    for _ in range(20):
        assert burn_ins.poll_burn_in("b", 0.0) is None
    assert reach.asked == 1
    monkeypatch.setattr(module, "UNMADE_AGAIN", 0.0)
    polled(burn_ins, "c")
    assert polled(burn_ins, "c").unmade and reach.asked == 3
