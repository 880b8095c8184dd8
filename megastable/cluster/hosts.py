"""Several hosts with an agent on each: starts the agents, knows which hosts are there, starts and follows attempts,
and burns in hosts that stand by.
"""

from __future__ import annotations

import os
import secrets
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from megastable import __version__
from megastable.base import durable
from megastable.base.errors import ConfigError
from megastable.base.text import make_visible
from megastable.cluster.child_process import ChildProcess
from megastable.cluster.fleet import Attempt, BurnInAnswer, Fate, Fleet, KernelView
from megastable.cluster.host_check import BURN_IN
from megastable.cluster.host_survey import HostBurnIn, survey_hosts
from megastable.cluster.launcher import (
    HostSlots,
    TrainingCommand,
    build_attempt_command,
    build_include_arguments,
    format_hostfile,
)
from megastable.cluster.preflight import HostFinding, Wanted, compare_reports
from megastable.cluster.reach import CONNECT, KEPT, Reach, build_python_command, describe_failure
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


class Hosts(Fleet):
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
        self.shares = self.burns_in = shares
        self.training = training
        self.names = [host.name for host in self.hosts]
        self._tries: dict[str, ChildProcess] = {}
        self._tried: dict[str, float] = {}
        self.failed: dict[str, str] = {}  # why the last try to start an agent did
        self._told: dict[str, float] = {}
        self._training: Sequence[str] = self.names  # the hosts of the newest attempt
        self._burn_ins = HostBurnIns(reach)

    # Agents

    def find_agent(self, name: str) -> AgentLink | None:
        """The agent of a host, if it is there now."""
        agent_link = self.store.agents.get(name)
        if agent_link is None or agent_link.closed is not None or time.monotonic() - agent_link.at >= FRESH:
            return None
        self.failed.pop(name, None)
        return agent_link

    def start_agent(self, name: str) -> str:
        """Try to start an agent on a host that has none; why there is none."""
        now = time.monotonic()
        running_try = self._tries.get(name)
        # An srun stays for as long as its agent lives.
        too_many_tries = self.reach.detached and len(self._tries) >= AT_ONCE
        if running_try is not None and (try_result := running_try.poll()) is not None:
            del self._tries[name]
            self.failed[name] = describe_failure(try_result, STARTED) or ""
        elif running_try is None and now - self._tried.get(name, -AGAIN) >= AGAIN and not too_many_tries:
            self._tried[name] = now
            # An agent in the foreground keeps what started it busy for as long as it lives.
            try_limit = STARTED if self.reach.detached else float("inf")
            try:
                agent_command = self.reach.build_command(name, self._agent_words(name))
                self._tries[name] = ChildProcess(agent_command, try_limit)
            except (ConfigError, OSError) as error:
                self.failed[name] = str(error)
        return self.failed.get(name) or "its agent has not connected"

    def _agent_words(self, name: str) -> list[str]:
        agent_words = build_python_command("megastable.cluster.agent", str(self.run.root), "--name", name)
        if not self.reach.detached:
            return agent_words
        # The agent must outlive the ssh that starts it. Its own words go where those of the ranks do.
        folder, log_file = (shlex.quote(str(p)) for p in (self.run.logs, self.run.logs / f"agent-{name}.log"))
        start = f"mkdir -p {folder} && setsid {shlex.join(agent_words)} </dev/null >>{log_file} 2>&1 &"
        return ["sh", "-c", start]

    # Fleet

    def find_running_attempt(self, names: Sequence[str]) -> Attempt | None:
        end_time = time.monotonic() + FIRST_LOOK
        names = names or self.names
        while any(self.find_agent(host_name) is None or not self._state(host_name) for host_name in names):
            for host_name in names:
                if self.find_agent(host_name) is None:
                    self.start_agent(host_name)
            if time.monotonic() > end_time:
                break
            time.sleep(0.1)
        agent_states = [self._state(host_name) for host_name in names]
        running_attempts = [int(state["attempt"]) for state in agent_states if state.get("running")]
        if not running_attempts:
            return None
        self._training = tuple(names)
        return RemoteAttempt(self, max(running_attempts), names, {})

    def find_ended_attempt(self, number: int, names: Sequence[str]) -> Attempt:
        attempt = RemoteAttempt(self, number, names or self.names, {})
        attempt.poll_processes()
        is_known = any(self._state(host_name).get("attempt") == number for host_name in attempt.names)
        if not is_known and len(attempt.names) > 1:
            # A scheduler has ended all of it, and begun the job again, perhaps on other hosts.
            attempt.gone.clear()
        return attempt

    def _state(self, name: str) -> Message:
        agent_link = self.store.agents.get(name)
        return {} if agent_link is None else agent_link.state

    def list_missing_hosts(self, attempt: int) -> Mapping[str, str]:
        missing_reasons = {}
        for host_name in self.names:
            agent = self.find_agent(host_name)
            if agent is None:
                missing_reasons[host_name] = self.start_agent(host_name)
            elif agent.hello.get("version") != __version__:
                self._tell(host_name, {"quit": 0})
                missing_reasons[host_name] = "its agent is of another version of megastable, and ends"
            elif agent.state.get("ended", -1) < attempt:
                self._tell(host_name, {"end": attempt})
                missing_reasons[host_name] = f"processes of attempt {attempt} may still be there"
        return missing_reasons

    def _tell(self, name: str, message: dict[str, object]) -> None:
        now = time.monotonic()
        if now - self._told.get(name, -TOLD) >= TOLD and self.store.send_to_agent(name, message):
            self._told[name] = now

    def count_ranks(self, names: Sequence[str]) -> int:
        return sum(len(host.slots) for host in self.hosts if host.name in names)

    def check_hosts(self, names: Sequence[str], hurry: Callable[[], bool]) -> Sequence[HostFinding]:
        if not self.shares:
            return ()  # there is no way to the others
        host_survey = survey_hosts(names, self.reach, self.run.root, full=False, hurry=hurry)
        if hurry():
            return ()
        slots_by_host = {host.name: host.slots for host in self.hosts if host.name in names}
        on_cpu = collect_exported_variables().get("DS_ACCELERATOR") == "cpu"
        wanted = Wanted(slots_by_host, host_survey.token, host_survey.offsets, cpu=on_cpu)
        return compare_reports(host_survey.reports, wanted)

    def poll_burn_in(self, name: str, seconds: float) -> BurnInAnswer | None:
        return self._burn_ins.poll_burn_in(name, seconds)

    def start_attempt(self, number: int, names: Sequence[str]) -> Attempt:
        by_name = {host.name: host for host in self.hosts}
        hosts = [by_name[name] for name in names]
        first = self.store.agents[names[0]]  # it was there when it was chosen
        slots = folder_of(self.run, number).with_suffix(".hostfile")
        slots.parent.mkdir(exist_ok=True)
        durable.write_file(slots, format_hostfile(hosts).encode())
        variables = collect_exported_variables() if self.shares else {}
        where = ["--hostfile", str(slots), *build_include_arguments(hosts), "--no_ssh"]
        if not any(word.partition("=")[0] == "--master_addr" for word in self.training.given):
            where += ["--master_addr", first.local]
        port, wanted = int(first.state["port"]), {}
        for index, name in enumerate(names):
            placed = [*where, "--node_rank", str(index)]
            words = build_attempt_command(self.run, number, self.training, placed, port)
            log = str(self.log_of_host(number, name, names[0]).relative_to(self.run.root))
            launch = {"attempt": number, "words": words[1:], "environment": variables, "log": log}
            wanted[name] = {"launch": launch}
        self._told.clear()
        self._training = tuple(names)
        return RemoteAttempt(self, number, names, wanted)

    def log_of_host(self, number: int, name: str, first: str) -> Path:
        """The output of an attempt on a host. first: the host of rank 0."""
        return log_of(self.run, number, "" if name == first else name)

    def find_host_asked_to_stop(self) -> str | None:
        return next((host_name for host_name in self._training if self._state(host_name).get("stop")), None)

    def name_of_host(self, hostname: str) -> str:
        if hostname in self.names:
            return hostname  # our ranks know it from their agent
        agent_links = list(self.store.agents.values())
        matching_names = [agent.name for agent in agent_links if agent.hello.get("hostname") == hostname]
        return matching_names[0] if len(matching_names) == 1 else hostname

    def clock_offset(self, hostname: str) -> float:
        agent_link = self.store.agents.get(self.name_of_host(hostname))
        return 0.0 if agent_link is None else agent_link.clock

    def latest_readings(self) -> Mapping[str, HostReading]:
        reading_by_host = {}
        for host_name in self.names:
            if (agent := self.find_agent(host_name)) is not None and agent.machine:
                with suppress(ValidationError):  # of another version
                    reading_by_host[host_name] = HostReading.model_validate(agent.machine)
        return reading_by_host

    def close(self, code: int) -> None:
        for host_name in self.names:
            self.store.send_to_agent(host_name, {"quit": code})
        end_time = time.monotonic() + FRESH
        while any(self.find_agent(host_name) for host_name in self.names) and time.monotonic() < end_time:
            time.sleep(0.05)
        for running_try in self._tries.values():
            running_try.kill()
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
        self.asked = False  # agents count signals to their launchers as their own
        self._codes: dict[str, int] = {}  # of the launchers that ended, in the order seen
        self._ordered: dict[str, float] = {}
        # Where it has begun: all of one that ran already.
        self._begun = set[str]() if wanted else set(names)
        self._began = self._looked = time.monotonic()
        self._over = False

    @property
    def code(self) -> int | None:
        failure_codes = [code for code in self._codes.values() if code]
        return failure_codes[0] if failure_codes else (0 if len(self._codes) == len(self.names) else None)

    def poll_processes(self) -> bool:
        now = time.monotonic()
        if now - self._looked > FROZEN:
            self._began = now  # what was said meanwhile is yet to be read
        self._looked = now
        anything_runs = False
        for host_name in self.names:
            agent = self.hosts.find_agent(host_name)
            if agent is None:
                self._judge(host_name)
                anything_runs = anything_runs or host_name not in self.gone
                continue
            agent_state = agent.state
            if not agent_state:
                anything_runs = True  # it has only just connected
                continue
            if agent_state["attempt"] != self.number and host_name in self._begun:
                # Never begun again there: the ranks elsewhere have lost these.
                why = "it was restarted, or they were killed"
                self.gone.setdefault(host_name, f"has lost all processes of attempt {self.number}: {why}")
                continue
            self.gone.pop(host_name, None)
            if agent_state["attempt"] != self.number:
                self._order(host_name)
                anything_runs = True
                continue
            self._begun.add(host_name)
            self._take(host_name, agent_state)
            anything_runs = anything_runs or bool(agent_state["running"])
        return anything_runs

    def _take(self, name: str, state: Message) -> None:
        if self._over:
            return  # from here on we are the ones who kill
        for rank, (launcher_code, signal) in state["fates"].items():
            self.fates.setdefault(int(rank), Fate(launcher_code, signal, name))
        launcher_code = state["code"] if not state["problem"] else 127
        if launcher_code is not None and not state["running"]:
            self._codes.setdefault(name, launcher_code)

    def _order(self, name: str) -> None:
        now = time.monotonic()
        if name in self._wanted and now - self._ordered.get(name, -RETOLD) >= RETOLD:
            self._ordered[name] = now
            self.hosts.store.send_to_agent(name, dict(self._wanted[name]))

    def _judge(self, name: str) -> None:
        """A host whose agent is silent: try to reach it, and after a while of both in vain believe that it is gone."""
        revive_failure = self.hosts.start_agent(name)
        silent_seconds = time.monotonic() - self.last_sign_of_life(name)
        # It also fails because there is no way to it.
        if silent_seconds > self.hosts.silence and self.hosts.failed.get(name):
            silence_text = f"no word from it for {silent_seconds:.0f} s"
            self.gone.setdefault(name, f"is gone: {silence_text}; {revive_failure}")

    def last_sign_of_life(self, name: str) -> float:
        """When a host last gave a sign of life, by its agent or by a rank; time.monotonic()."""
        agent = self.hosts.store.agents.get(name)
        known_names = {name}
        if agent is not None and self.hosts.name_of_host(hostname := str(agent.hello["hostname"])) == name:
            known_names.add(hostname)
        rank_times = [rank.at for rank in list(self.hosts.store.ranks.values()) if rank.host in known_names]
        return max([self._began, *rank_times, *([agent.at] if agent is not None else [])])

    def find_failed_log(self) -> tuple[str, Path]:
        failed_host = next((host for host, code in self._codes.items() if code), self.names[0])
        return failed_host, self.hosts.log_of_host(self.number, failed_host, self.names[0])

    def kill_all(self) -> None:
        self._over = True
        end_time = time.monotonic() + KILLED
        for host_name in self.names:
            self.hosts.store.send_to_agent(host_name, {"end": self.number})
        while time.monotonic() < end_time:
            if all(agent.state.get("ended", 0) >= self.number for agent in self._list_agents()):
                return
            time.sleep(0.05)

    def _list_agents(self) -> list[AgentLink]:
        return [agent for name in self.names if (agent := self.hosts.find_agent(name)) is not None]

    def read_kernel_views(self) -> dict[int, KernelView]:
        kernel_views: dict[int, KernelView] = {}
        asked_agents = self._list_agents()
        for asked_agent in asked_agents:
            asked_agent.inbox.clear()
            self.hosts.store.send_to_agent(asked_agent.name, {"states": True})
        end_time = time.monotonic() + SEEN
        while time.monotonic() < end_time and not all(agent.inbox for agent in asked_agents):
            time.sleep(0.05)
        for asked_agent in asked_agents:
            for message in list(asked_agent.inbox):
                for rank, state_text in message.get("states", {}).items():
                    kernel_views[int(rank)] = KernelView(
                        asked_agent.name, f"{asked_agent.name}: {state_text}"
                    )
        return kernel_views


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
    file_variables = {}
    for line_number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            variable_name, equals, value = line.partition("=")
            if not equals or not variable_name.strip():
                raise ConfigError(f"{path}: line {line_number} is not NAME=VALUE: {line}")
            file_variables[variable_name.strip()] = value
    return file_variables


UNMADE_AGAIN = 60.0  # seconds before one that could not be made is tried again


class HostBurnIns:
    """reach: how hosts are reached. Without an agent: a burn-in ends by itself if nobody waits for it any more."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._running: dict[str, ChildProcess] = {}
        self._next: dict[str, float] = {}  # when one that could not be made is tried again

    def poll_burn_in(self, host: str, seconds: float) -> BurnInAnswer | None:
        """What a burn-in of `seconds` found; None while it goes on. Starts it. Poll often."""
        running_child, now = self._running.get(host), time.monotonic()
        if running_child is None:
            if now < self._next.get(host, now):
                return None
            options = ["--seconds", str(seconds), "--seed", str(secrets.randbits(32))]
            try:
                python_command = build_python_command("megastable.cluster.burn_in", *options)
                command = self._reach.build_command(host, python_command)
                self._running[host] = ChildProcess(command, seconds + BURN_IN + CONNECT, kept=KEPT)
            except (OSError, ValueError) as error:
                return self._unmade(host, f"could not be started: {error}")
            return None
        child_result = running_child.poll()
        if child_result is None:
            return None
        del self._running[host]
        if failure_reason := describe_failure(child_result, seconds + BURN_IN + CONNECT):
            return self._unmade(host, failure_reason)
        try:
            burn_in_report = HostBurnIn.model_validate_json(child_result.tail.strip().splitlines()[-1])
        except (IndexError, ValidationError):
            return self._unmade(host, "its report cannot be read")
        if burn_in_report.in_use:
            return self._unmade(host, burn_in_report.in_use)
        return BurnInAnswer(found="; ".join(make_visible(text, 1000) for text in burn_in_report.found))

    def _unmade(self, host: str, reason: str) -> BurnInAnswer:
        self._next[host] = time.monotonic() + UNMADE_AGAIN
        return BurnInAnswer(unmade=make_visible(reason, 400))

    def close(self) -> None:
        for running_child in self._running.values():
            running_child.kill()
        self._running.clear()
