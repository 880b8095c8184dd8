"""Several hosts with an agent on each: starts the agents, knows which hosts are there, starts and follows attempts."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from megastable import __version__
from megastable.base import durable
from megastable.base.errors import ConfigError
from megastable.cluster.child_process import ChildProcess
from megastable.cluster.fleet import Attempt
from megastable.cluster.host_burn_in import BurnInAnswer, HostBurnIns
from megastable.cluster.host_survey import survey
from megastable.cluster.hostfile import HostSlots, include, lines
from megastable.cluster.launcher import TrainingCommand, command
from megastable.cluster.local_attempt import Fate, KernelView
from megastable.cluster.preflight import HostFinding, Wanted, compare
from megastable.cluster.reach import Reach, python, reason_of
from megastable.cluster.store import AgentLink, Store
from megastable.run.directory import RunDirectory
from megastable.run.machine_state import HostReading
from megastable.run.rank_ipc import folder_of, log_of
from megastable.run.wire import Message

# Variables with these beginnings go to ranks on other hosts.
EXPORTED = ("MLFLOW", "NCCL", "PYTHON", "MV2", "UCX", "DS_ACCELERATOR", "GLOO", "TORCH", "OMP_")
VARIABLES = ".deepspeed_env"
FRESH = 5.0  # seconds since an agent's last word within which it counts as there
AGAIN = 5.0  # ... between two tries to start one
AT_ONCE = 64  # tries by ssh at a time
STARTED = 30.0  # ... for one try
TOLD = 3.0  # ... between two times that it is told the same
FIRST_LOOK = 20.0  # ... for agents with processes of an earlier supervisor to connect
KILLED = 15.0  # seconds for the agents to kill an attempt
SEEN = 3.0  # ... to tell the state of their processes
FROZEN = 3.0  # ... between two looks, after which this process itself was stopped
RETOLD = 2.0  # ... between two orders to start


class Hosts:
    """Of one run. reach: how agents are started. silence: seconds without a word after which a host that does not
    answer either counts as gone. shares: whether hosts are reached from here, and ranks get variables of this process's
    environment."""

    def __init__(
        self,
        run: RunDirectory,
        store: Store,
        hosts: Sequence[HostSlots],
        reach: Reach,
        silence: float,
        shares: bool,
        training: TrainingCommand,
    ) -> None:
        self.run, self.store, self.hosts, self.reach, self.silence = run, store, list(hosts), reach, silence
        self.shares = shares
        self.training = training
        self.names = [host.name for host in self.hosts]
        self._tries: dict[str, ChildProcess] = {}
        self._tried: dict[str, float] = {}
        self._failed: dict[str, str] = {}  # why the last try to start an agent did
        self._told: dict[str, float] = {}
        self._training: Sequence[str] = self.names  # the hosts of the newest attempt
        self._burn_ins = HostBurnIns(reach)

    # Agents

    def agent(self, name: str) -> AgentLink | None:
        """The agent of a host, if it is there now."""
        found = self.store.agents.get(name)
        if found is None or found.closed is not None or time.monotonic() - found.at >= FRESH:
            return None
        self._failed.pop(name, None)
        return found

    def revive(self, name: str) -> str:
        """Try to start an agent on a host that has none; why there is none."""
        now = time.monotonic()
        running = self._tries.get(name)
        if running is not None and (result := running.poll()) is not None:
            del self._tries[name]
            self._failed[name] = reason_of(result, STARTED) or ""
        elif running is None and now - self._tried.get(name, -AGAIN) >= AGAIN and self._may_try():
            self._tried[name] = now
            # An agent in the foreground keeps what started it busy for as long as it lives.
            limit = STARTED if self.reach.detached else float("inf")
            try:
                self._tries[name] = ChildProcess(self.reach.words(name, self._agent_words(name)), limit)
            except (ConfigError, OSError) as error:
                self._failed[name] = str(error)
        return self._failed.get(name) or "its agent has not connected"

    def _may_try(self) -> bool:
        """Whether another ssh may start now. An srun stays for as long as its agent lives."""
        return not self.reach.detached or len(self._tries) < AT_ONCE

    def _agent_words(self, name: str) -> list[str]:
        words = python("megastable.cluster.agent", str(self.run.root), "--name", name)
        if not self.reach.detached:
            return words
        # The agent must outlive the ssh that starts it. Its own words go where those of the ranks do.
        log = self.run.logs / f"agent-{name}.log"
        folder, file = shlex.quote(str(self.run.logs)), shlex.quote(str(log))
        return ["sh", "-c", f"mkdir -p {folder} && setsid {shlex.join(words)} </dev/null >>{file} 2>&1 &"]

    def unreachable(self, name: str) -> bool:
        """Whether the last try to reach a host failed; also because there is no way to it."""
        return bool(self._failed.get(name))

    # Fleet

    def found(self, names: Sequence[str]) -> Attempt | None:
        until = time.monotonic() + FIRST_LOOK
        names = names or self.names
        while any(self.agent(name) is None or not self._state(name) for name in names):
            for name in names:
                if self.agent(name) is None:
                    self.revive(name)
            if time.monotonic() > until:
                break
            time.sleep(0.1)
        states = [self._state(name) for name in names]
        running = [int(state["attempt"]) for state in states if state.get("running")]
        if not running:
            return None
        self._training = tuple(names)
        return RemoteAttempt(self, max(running), names, {})

    def left(self, number: int, names: Sequence[str]) -> Attempt:
        attempt = RemoteAttempt(self, number, names or self.names, {})
        attempt.look()
        known = any(self._state(name).get("attempt") == number for name in attempt.names)
        if not known and len(attempt.names) > 1:
            # A scheduler has ended all of it, and begun the job again, perhaps on other hosts.
            attempt.gone.clear()
        return attempt

    def _state(self, name: str) -> Message:
        found = self.store.agents.get(name)
        return {} if found is None else found.state

    def missing(self, attempt: int) -> Mapping[str, str]:
        found = {}
        for name in self.names:
            agent = self.agent(name)
            if agent is None:
                found[name] = self.revive(name)
            elif agent.hello.get("version") != __version__:
                self._tell(name, {"quit": 0})
                found[name] = "its agent is of another version of megastable, and ends"
            elif agent.state.get("ended", -1) < attempt:
                self._tell(name, {"end": attempt})
                found[name] = f"processes of attempt {attempt} may still be there"
        return found

    def _tell(self, name: str, message: dict[str, object]) -> None:
        now = time.monotonic()
        if now - self._told.get(name, -TOLD) >= TOLD and self.store.send(name, message):
            self._told[name] = now

    def ranks(self, names: Sequence[str]) -> int:
        return sum(len(host.slots) for host in self.hosts if host.name in names)

    def preflight(self, names: Sequence[str], hurry: Callable[[], bool]) -> Sequence[HostFinding]:
        if not self.shares:
            return ()  # there is no way to the others
        found = survey(names, self.reach, self.run.root, full=False, hurry=hurry)
        if hurry():
            return ()
        slots = {host.name: host.slots for host in self.hosts if host.name in names}
        cpu = collect_exported_variables().get("DS_ACCELERATOR") == "cpu"
        return compare(found.reports, Wanted(slots, found.token, found.offsets, cpu=cpu))

    @property
    def burns_in(self) -> bool:
        return self.shares

    def burn_in(self, name: str, seconds: float) -> BurnInAnswer | None:
        return self._burn_ins.poll(name, seconds)

    def start(self, number: int, names: Sequence[str]) -> Attempt:
        by_name = {host.name: host for host in self.hosts}
        hosts = [by_name[name] for name in names]
        first = self.store.agents[names[0]]  # it was there when it was chosen
        slots = folder_of(self.run, number).with_suffix(".hostfile")
        slots.parent.mkdir(exist_ok=True)
        durable.write_file(slots, lines(hosts).encode())
        variables = collect_exported_variables() if self.shares else {}
        meeting = ["--master_addr", first.local] if not _has(self.training.given, "--master_addr") else []
        wanted = {}
        for index, name in enumerate(names):
            where = ["--hostfile", str(slots), *include(hosts), "--no_ssh", "--node_rank", str(index)]
            words = command(
                self.run, number, self.training, [*where, *meeting], port=int(first.state["port"])
            )
            log = self.log(number, name, names[0]).relative_to(self.run.root)
            wanted[name] = {
                "launch": {
                    "attempt": number, "words": words[1:], "environment": variables, "log": str(log),
                }
            }  # fmt: skip
        self._told.clear()
        self._training = tuple(names)
        return RemoteAttempt(self, number, names, wanted)

    def log(self, number: int, name: str, first: str) -> Path:
        """The output of an attempt on a host. first: the host of rank 0."""
        return log_of(self.run, number, "" if name == first else name)

    def stop_asked(self) -> str | None:
        return next((name for name in self._training if self._state(name).get("stop")), None)

    def called(self, hostname: str) -> str:
        if hostname in self.names:
            return hostname  # our ranks know it from their agent
        agents = list(self.store.agents.values())
        names = [agent.name for agent in agents if agent.hello.get("hostname") == hostname]
        return names[0] if len(names) == 1 else hostname

    def clock(self, hostname: str) -> float:
        found = self.store.agents.get(self.called(hostname))
        return 0.0 if found is None else found.clock

    def readings(self) -> Mapping[str, HostReading]:
        found = {}
        for name in self.names:
            if (agent := self.agent(name)) is not None and agent.machine:
                with suppress(ValidationError):  # of another version
                    found[name] = HostReading.model_validate(agent.machine)
        return found

    def close(self, code: int) -> None:
        for name in self.names:
            self.store.send(name, {"quit": code})
        until = time.monotonic() + FRESH
        while any(self.agent(name) for name in self.names) and time.monotonic() < until:
            time.sleep(0.05)
        for running in self._tries.values():
            running.kill()
        self._burn_ins.close()


class RemoteAttempt:
    """An attempt on several hosts, as their agents and ranks report it. names: the hosts, that of rank 0 first. wanted:
    the order to start it, by host; empty if it runs already."""

    def __init__(
        self, hosts: Hosts, number: int, names: Sequence[str], wanted: Mapping[str, Message]
    ) -> None:
        self.hosts, self.number, self._wanted = hosts, number, wanted
        self.names: Sequence[str] = tuple(names)
        self.fates: dict[int, Fate] = {}
        self.gone: dict[str, str] = {}
        self._codes: dict[str, int] = {}  # of the launchers that ended, in the order seen
        self._ordered: dict[str, float] = {}
        # Where it has begun: all of one that ran already.
        self._begun = set[str]() if wanted else set(names)
        self._began = self._looked = time.monotonic()
        self._over = False

    @property
    def code(self) -> int | None:
        bad = [code for code in self._codes.values() if code]
        return bad[0] if bad else (0 if len(self._codes) == len(self.names) else None)

    def look(self) -> bool:
        now = time.monotonic()
        if now - self._looked > FROZEN:
            self._began = now  # what was said meanwhile is yet to be read
        self._looked = now
        running = False
        for name in self.names:
            agent = self.hosts.agent(name)
            if agent is None:
                self._judge(name)
                running = running or name not in self.gone
                continue
            state = agent.state
            if not state:
                running = True  # it has only just connected
                continue
            if state["attempt"] != self.number and name in self._begun:
                # Never begun anew there: the ranks elsewhere have lost these.
                self.gone.setdefault(
                    name,
                    f"has lost all processes of attempt {self.number}: it was restarted, or they were killed",
                )
                continue
            self.gone.pop(name, None)
            if state["attempt"] != self.number:
                self._order(name)
                running = True
                continue
            self._begun.add(name)
            self._take(name, state)
            running = running or bool(state["running"])
        return running

    def _take(self, name: str, state: Message) -> None:
        if self._over:
            return  # from here on we are the ones who kill
        for rank, (code, signal) in state["fates"].items():
            self.fates.setdefault(int(rank), Fate(code, signal, name))
        code = state["code"] if not state["problem"] else 127
        if code is not None and not state["running"]:
            self._codes.setdefault(name, code)

    def _order(self, name: str) -> None:
        now = time.monotonic()
        if name in self._wanted and now - self._ordered.get(name, -RETOLD) >= RETOLD:
            self._ordered[name] = now
            self.hosts.store.send(name, dict(self._wanted[name]))

    def _judge(self, name: str) -> None:
        """A host whose agent is silent: try to reach it, and after a while of both in vain believe that it is gone."""
        why = self.hosts.revive(name)
        silent = time.monotonic() - self.heard(name)
        if silent <= self.hosts.silence:
            return
        if self.hosts.unreachable(name):
            self.gone.setdefault(name, f"is gone: no word from it for {silent:.0f} s; {why}")

    def heard(self, name: str) -> float:
        """When a host last gave a sign of life, by its agent or by a rank; time.monotonic()."""
        agent = self.hosts.store.agents.get(name)
        known = {name}
        if agent is not None and self.hosts.called(hostname := str(agent.hello["hostname"])) == name:
            known.add(hostname)
        ranks = [rank.at for rank in list(self.hosts.store.ranks.values()) if rank.host in known]
        return max([self._began, *ranks, *([agent.at] if agent is not None else [])])

    def witness(self) -> tuple[str, Path]:
        first = self.names[0]
        name = next((name for name, code in self._codes.items() if code), first)
        return name, self.hosts.log(self.number, name, first)

    def end(self) -> None:
        self._over = True
        until = time.monotonic() + KILLED
        for name in self.names:
            self.hosts.store.send(name, {"end": self.number})
        while time.monotonic() < until:
            agents = [agent for name in self.names if (agent := self.hosts.agent(name)) is not None]
            if all(agent.state.get("ended", 0) >= self.number for agent in agents):
                return
            time.sleep(0.05)

    def states(self) -> dict[int, KernelView]:
        found: dict[int, KernelView] = {}
        asked = [a for name in self.names if (a := self.hosts.agent(name)) is not None]
        for agent in asked:
            agent.inbox.clear()
            self.hosts.store.send(agent.name, {"states": True})
        until = time.monotonic() + SEEN
        while time.monotonic() < until and not all(agent.inbox for agent in asked):
            time.sleep(0.05)
        for agent in asked:
            for message in list(agent.inbox):
                found |= {
                    int(rank): KernelView(agent.name, f"{agent.name}: {text}")
                    for rank, text in message.get("states", {}).items()
                }
        return found


def _has(given: Sequence[str], flag: str) -> bool:
    return any(word == flag or word.startswith(f"{flag}=") for word in given)


def collect_exported_variables(
    environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> dict[str, str]:
    """The variables that ranks on other hosts get, as from the deepspeed launcher: those of communication and of
    Python, and what the file .deepspeed_env names. Raises ConfigError for a line of it that is not NAME=VALUE."""
    environment = os.environ if environment is None else environment
    folder = Path.cwd() if folder is None else folder
    found = {name: value for name, value in environment.items() if name.startswith(EXPORTED)}
    found["PYTHONPATH"] = ":".join(filter(None, [str(folder), environment.get("PYTHONPATH", "")]))
    named = environment.get("DS_ENV_FILE")
    for path in [Path(named)] if named else [Path.home() / VARIABLES, folder / VARIABLES]:
        if path.is_file():
            found |= _read_variables(path)
    return found


def _read_variables(path: Path) -> dict[str, str]:
    found = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            name, equals, value = line.partition("=")
            if not equals or not name.strip():
                raise ConfigError(f"{path}: line {number} is not NAME=VALUE: {line}")
            found[name.strip()] = value
    return found
