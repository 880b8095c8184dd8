"""Runs a command on many hosts, over ssh, over srun or here: a bounded number at a time, each with a time limit."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megastable.base.errors import ConfigError
from megastable.base.text import make_visible
from megastable.cluster import slurm
from megastable.cluster.child_process import LOOK, ChildProcess, ChildResult

CONNECT = 5  # seconds for a connection: a host that is up answers in milliseconds
AT_ONCE = 64  # processes at a time: 1,000 hosts in about 16 times what one takes, and few enough for one head
KEPT = 1 << 18  # bytes of an answer: a report of 16 GPUs has less than 10,000
LONGEST = 300  # characters of a reason
PACKAGE_ROOT = Path(__file__).absolute().parents[2]
SSH_FAILED = 255  # ssh's own exit code; the command's otherwise


class Reach(Protocol):
    """How to run a command on a host. detached: whether what it starts must leave its session, so as to outlive it."""

    detached: bool

    def build_command(self, host: str, command: Sequence[str]) -> list[str]:
        """The command of this host that does. Raises ConfigError if there is no way to that host."""


@dataclass(frozen=True)
class Ssh:
    """By ssh, without a password, in this folder, with the same modules. port: None = ssh's configuration decides."""

    port: int | None = None
    detached = True

    def build_command(self, host: str, command: Sequence[str]) -> list[str]:
        port_words = [] if self.port is None else ["-p", str(self.port)]
        ssh_options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT}"]
        # `--`: a name of the hostfile must not be an option.
        return ["ssh", *ssh_options, *port_words, "--", host, in_this_folder(command)]


@dataclass(frozen=True)
class Srun:
    """By srun, inside an allocation: one task on that node, beside whatever runs there."""

    detached = False  # Slurm ends what outlives its step

    def build_command(self, host: str, command: Sequence[str]) -> list[str]:
        return [*slurm.build_agent_command(host, os.environ), "sh", "-c", in_this_folder(command)]


@dataclass(frozen=True)
class Local:
    """On this host, whatever the name. only: the one name that it is reached by; others have somebody else to start
    what they need, as pods do."""

    only: str | None = None
    detached = True

    def build_command(self, host: str, command: Sequence[str]) -> list[str]:
        if self.only is not None and host != self.only:
            raise ConfigError(f"{host} cannot be reached from here (--no_ssh)")
        return ["sh", "-c", in_this_folder(command)]


@dataclass(frozen=True)
class HostAnswer:
    """What a command on a host printed (both streams), or the reason why it did not end well. ended: by the clock of
    this host. [seconds since 1970]"""

    output: str
    reason: str | None
    ended: float


def in_this_folder(command: Sequence[str]) -> str:
    """`command` for a shell of another host, with this folder and this package."""
    python_path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
    env_words = ["env", f"PYTHONPATH={python_path}", *command]
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(env_words)}"


def build_python_command(module: str, *arguments: str) -> list[str]:
    """A module of ours, by the interpreter that runs here."""
    return [sys.executable, "-m", module, *arguments]


def run_on_hosts(
    hosts: Iterable[str], reach: Reach, command: Sequence[str], seconds: float,
    *, at_once: int = AT_ONCE, told: Callable[[str, HostAnswer], None] | None = None,
    hurry: Callable[[], bool] = lambda: False,
) -> dict[str, HostAnswer]:  # fmt: skip
    """Run `command` on every host, by name. Ends all of it when interrupted.

    seconds: for each host. told: is told of every answer as it comes. hurry: whether to end what still runs.
    """
    names = list(dict.fromkeys(hosts))
    waiting, running, found = deque(names), dict[str, ChildProcess](), dict[str, HostAnswer]()

    def settle(host: str, output: str, reason: str | None) -> None:
        found[host] = HostAnswer(output, reason, time.time())
        if told is not None:
            told(host, found[host])

    try:
        while waiting or running:
            if hurry():
                for host in (*running, *waiting):
                    settle(host, "", "not waited for")
                break
            while waiting and len(running) < at_once:
                host = waiting.popleft()
                try:
                    running[host] = ChildProcess(reach.build_command(host, command), seconds, kept=KEPT)
                except (OSError, ValueError) as error:
                    settle(host, "", f"could not be started: {error}")
            ended = {host: result for host, one in running.items() if (result := one.poll()) is not None}
            for host, result in ended.items():
                del running[host]
                settle(host, result.tail, describe_failure(result, seconds))
            if running and not ended:
                time.sleep(LOOK)
    finally:
        for one in running.values():
            one.kill()
            one.wait()
    return {host: found[host] for host in names}


def describe_failure(result: ChildResult, seconds: float) -> str | None:
    """Why a command did not end well; None if it did."""
    if result.code == 0:
        return None
    output_lines = [line.strip() for line in result.tail.splitlines() if line.strip()]
    last_line = make_visible(output_lines[-1] if output_lines else "", LONGEST)
    if result.code is None:
        return f"no answer within {seconds:.0f} s" + (f": {last_line}" if last_line else "")
    if result.code == SSH_FAILED and last_line:
        return last_line
    return f"exit code {result.code}" + (f": {last_line}" if last_line else "")


def list_allocated_nodes(environment: Mapping[str, str]) -> list[str] | None:
    """The nodes of this Slurm allocation; None outside of one. Raises ConfigError."""
    node_list = environment.get("SLURM_JOB_NODELIST")
    if not node_list:
        return None
    try:
        child_result = ChildProcess(["scontrol", "show", "hostnames", node_list], 10.0, kept=KEPT).wait()
    except (OSError, ValueError) as error:
        raise ConfigError(f"SLURM_JOB_NODELIST={node_list}: scontrol could not be started: {error}") from None
    if child_result.code != 0:
        why = make_visible(child_result.tail, LONGEST)
        raise ConfigError(f"SLURM_JOB_NODELIST={node_list}: scontrol show hostnames failed: {why}")
    return child_result.tail.split()
