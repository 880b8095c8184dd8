"""Ways to run a command on a host of the run: ssh, srun, or not at all. Pure: they build command lines."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

CONNECT = 5  # seconds for ssh to connect


class Reach(Protocol):
    """detached: whether what it starts must leave its session, so as to outlive it."""

    detached: bool

    def words(self, host: str, command: Sequence[str]) -> list[str] | None:
        """The command line that runs `command` on a host; None if that cannot be done from here."""


@dataclass(frozen=True)
class Ssh:
    """Without a password, as the deepspeed launcher's. port: None for ssh's own."""

    port: int | None = None
    detached = True

    def words(self, host: str, command: Sequence[str]) -> list[str] | None:
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT}", "-o", "ConnectionAttempts=1"]
        port = [] if self.port is None else ["-p", str(self.port)]
        return ["ssh", "-n", *options, *port, host, shlex.join(command)]


@dataclass(frozen=True)
class Srun:
    """Within an allocation of Slurm. environment: of the batch script."""

    environment: Mapping[str, str]
    detached = False  # Slurm ends what outlives its step

    def words(self, host: str, command: Sequence[str]) -> list[str] | None:
        cores = self.environment.get("SLURM_CPUS_ON_NODE")
        # Without it the step has one core of the node, and without --overlap it waits for the others to end.
        width = [f"--cpus-per-task={cores}"] if cores else []
        return [
            "srun",
            "--overlap",
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={host}",
            "--no-kill",
            *width,
            *command,
        ]


@dataclass(frozen=True)
class Nowhere:
    """Hosts whose agents somebody else starts, as pods start theirs; but for `here`."""

    here: str
    detached = True

    def words(self, host: str, command: Sequence[str]) -> list[str] | None:
        return list(command) if host == self.here else None
