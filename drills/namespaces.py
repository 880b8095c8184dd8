"""Processes in namespaces of their own: what makes them, enters them and ends them.

A namespace lives as long as a process in it. Its first process here is a shell that reads from a pipe of whoever made
it: when that one ends, in whatever way, the pipe closes, the shell ends, and the kernel ends the rest. So nothing
depends on a clean-up that runs.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

from megastable.base.errors import ConfigError

TOOLS = "unshare nsenter setpriv env ip tc mount hostname ssh ssh-keygen sshd fsfreeze mkfs.ext4".split()
PACKAGES = "util-linux iproute2 openssh-server openssh-client e2fsprogs hostname"
SECONDS = 30.0  # for a command that sets something up, and for a first process to be ready
READY = "ready"  # what a first process prints
# Ends with the pipe. PIPEs are closed in all other children of the process that made it.
WAIT = f"echo {READY} && read -r _"
# A group of its own in the session of whoever starts it, not a new session: when that one ends, the kernel lets what is
# stopped in the group go on (setpgid(2), orphaned process groups).
GROUP = 0
ROOM = "unshare --mount --net --propagation private --".split()
HOST = "unshare --mount --net --pid --uts --ipc --fork --kill-child --mount-proc --".split()
# What hosts are made of. Where one of these is forbidden, as in most containers, so are hosts.
TRIAL = """
ip link add try0 type bridge && ip link add try1 master try0 type veth peer name try2
mount -t tmpfs tmpfs /run && mount -t sysfs sysfs /sys && hostname try
"""


@cache
def find_missing() -> str | None:
    """Why hosts cannot be made here, if so."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if absent_tools := [tool for tool in TOOLS if not shutil.which(tool)]:
        return f"not installed: {', '.join(absent_tools)} (Debian: apt-get install {PACKAGES})"
    trial = subprocess.run(
        [*HOST, "sh", "-ec", TRIAL], capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL
    )
    return f"namespaces may not be made here: {trial.stderr.strip()}" if trial.returncode else None


def enter_command(pid: int, *kinds: str) -> list[str]:
    """The start of a command that runs in the namespaces of process `pid`: mount, net, pid, uts, ipc."""
    return ["nsenter", f"--target={pid}", *(f"--{kind}" for kind in kinds), "--"]


def run_command(words: Sequence[str | Path]) -> str:
    """What a command prints that sets something up. Raises ConfigError with what it complained about."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{' '.join(map(str, words))}: no end within {SECONDS:.0f} s") from None
    except OSError as error:
        raise ConfigError(str(error)) from None
    if done.returncode:
        raise ConfigError(f"{' '.join(map(str, words))}: {done.stderr.strip() or f'code {done.returncode}'}")
    return done.stdout


class First:
    """The first process of new namespaces: runs `script` (bash), then waits. pid: in our own process namespace."""

    def __init__(self, namespaces: Sequence[str], script: str, *arguments: str | Path) -> None:
        self._outer = subprocess.Popen(
            [*namespaces, "bash", "-ec", f"{script}\n{WAIT}", "bash", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert self._outer.stdout is not None and self._outer.stderr is not None
        self.pid = self._outer.pid
        if self._outer.stdout.readline().strip() != READY:
            _, complaint = self._outer.communicate()
            raise ConfigError(f"{' '.join(namespaces)}: {complaint.strip()}")
        # `unshare --fork` waits for the first process of a new process namespace; else it has become that process.
        if "--fork" in namespaces:
            (self.pid,) = children(self._outer.pid)

    @property
    def alive(self) -> bool:
        return self._outer.poll() is None

    def kill(self) -> None:
        """Kill it, and with it all processes of its process namespace, if it has one."""
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """The same; return when they are gone."""
        self.kill()
        self._outer.communicate()


class Started:
    """A process in other namespaces. Signals reach the process itself, not the `nsenter` that waits for it."""

    def __init__(self, words: Sequence[str | Path], environment: Mapping[str, str], output: int) -> None:
        self._nsenter = subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            process_group=GROUP,
        )  # fmt: skip
        wait_until = time.monotonic() + SECONDS
        while not (child_ids := children(self._nsenter.pid)) and self.poll() is None:
            if time.monotonic() > wait_until:
                raise ConfigError(f"{' '.join(map(str, words))}: did not start")
            time.sleep(0.005)
        self.process = None
        with suppress(IndexError, psutil.NoSuchProcess):  # it has ended already
            self.process = psutil.Process(child_ids[0])

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._nsenter.poll()

    def wait(self, seconds: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        return self._nsenter.wait(seconds)

    def resume(self) -> None:
        """Let `nsenter` notice how it ended: it stops when the process is stopped. A process that nobody reaps holds up
        the end of its namespace."""
        if self.poll() is None:
            self._nsenter.send_signal(signal.SIGCONT)

    def send(self, number: signal.Signals) -> bool:
        """Whether it was there to be sent to."""
        if self.process is None or self.poll() is not None:
            return False
        try:
            self.process.send_signal(number)
        except psutil.NoSuchProcess:
            return False
        return True


def children(pid: int) -> list[int]:
    """Process ids, oldest first; none if it is gone."""
    try:
        return [int(id_text) for id_text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
