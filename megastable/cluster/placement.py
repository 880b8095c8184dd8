"""Where a supervised run takes place, from the arguments for the deepspeed launcher."""

from __future__ import annotations

import argparse
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from megastable.base.errors import ConfigError
from megastable.cluster.hostfile import HostSlots, chosen, read, trimmed
from megastable.cluster.reach import Nowhere, Reach, Srun, Ssh

USUAL = Path("/job/hostfile")  # where the deepspeed launcher looks for one
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class HostChoice:
    """hosts: empty for this host alone. given: the launcher's other arguments. node: which of the hosts this process
    is on, where each starts its own; 0: the one that supervises."""

    hosts: Sequence[HostSlots]
    reach: Reach
    given: Sequence[str]
    node: int = 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"arguments for the deepspeed launcher: {message}")


def placed(given: Sequence[str], environment: Mapping[str, str]) -> HostChoice:
    """Raises ConfigError for arguments that contradict each other, or a bad host file."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    for flags, kind, usual in (
        (("-H", "--hostfile"), Path, USUAL), (("-i", "--include"), str, ""), (("-e", "--exclude"), str, ""),
        (("--num_nodes",), int, -1), (("--num_gpus", "--num_accelerators"), int, -1), (("--node_rank",), int, -1),
        (("--ssh_port",), int, None), (("--launcher",), str, "pdsh"), (("--launcher_args",), str, ""),
    ):  # fmt: skip
        parser.add_argument(*flags, type=kind, default=usual)
    for flag in ("--no_ssh", "--no_ssh_check", "--force_multi"):
        parser.add_argument(flag, action="store_true")
    a, rest = parser.parse_known_args(list(given))
    if a.no_ssh:
        return _without_ssh(a, rest)
    if a.launcher.lower() == "slurm":
        hosts, reach = _allocated(a, environment), Srun(environment)
        return HostChoice(hosts, reach, rest) if len(hosts) > 1 else HostChoice([], reach, _local(a, rest))
    if not a.hostfile.is_file():
        if a.hostfile != USUAL or a.num_nodes > 1:
            raise ConfigError(f"{a.hostfile} is not there: it names the hosts, a line NAME slots=N for each")
        return HostChoice([], Ssh(), list(given))
    hosts = trimmed(chosen(read(a.hostfile), a.include, a.exclude), a.num_nodes, a.num_gpus)
    if len(hosts) == 1 and not a.force_multi:
        return HostChoice([], Ssh(), list(given))  # the launcher starts it here, without ssh
    if a.launcher.lower() != "pdsh":
        raise ConfigError(f"--launcher {a.launcher}: supervised runs know pdsh (by ssh) and slurm (by srun)")
    return HostChoice(hosts, Ssh(a.ssh_port), rest)


def _without_ssh(a: Any, rest: Sequence[str]) -> HostChoice:
    if a.hostfile.is_file():
        hosts = trimmed(chosen(read(a.hostfile), a.include, a.exclude), a.num_nodes, a.num_gpus)
    elif a.num_nodes < 1 or a.num_gpus < 1:
        raise ConfigError("--no_ssh needs --hostfile, or --num_nodes and --num_gpus")
    else:
        hosts = [HostSlots(f"node-{index}", tuple(range(a.num_gpus))) for index in range(a.num_nodes)]
    if not 0 <= a.node_rank < len(hosts):
        raise ConfigError(
            f"--no_ssh needs --node_rank, from 0 to {len(hosts) - 1}: which of the hosts this one is"
        )
    return HostChoice(hosts, Nowhere(hosts[0].name), rest, a.node_rank)


def _allocated(a: Any, environment: Mapping[str, str]) -> list[HostSlots]:
    """The nodes of the allocation."""
    nodes = environment.get("SLURM_JOB_NODELIST")
    if nodes is None:
        raise ConfigError(
            "--launcher slurm: there is no allocation (SLURM_JOB_NODELIST): use sbatch or salloc"
        )
    gpus = a.num_gpus if a.num_gpus > 0 else int(environment.get("SLURM_GPUS_ON_NODE", "0"))
    if gpus < 1:
        raise ConfigError("--launcher slurm: how many ranks per host? --num_gpus N")
    try:
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"scontrol show hostnames {nodes} failed: {error}") from None
    hosts = [HostSlots(name, tuple(range(gpus))) for name in listed.stdout.split()]
    return trimmed(chosen(hosts, a.include, a.exclude), a.num_nodes)


def _local(a: Any, rest: Sequence[str]) -> list[str]:
    return [*(["--num_gpus", str(a.num_gpus)] if a.num_gpus > 0 else []), *rest]


def interface(wanted: str | None, hosts: Sequence[HostSlots], reach: Reach) -> str:
    """The address to listen on. wanted: supervise.interface. Raises ConfigError."""
    if wanted is not None:
        addresses = {
            name: [x.address for x in of if x.family == socket.AF_INET]
            for name, of in psutil.net_if_addrs().items()
        }
        if addresses.get(wanted):
            return addresses[wanted][0]
        if any(wanted in of for of in addresses.values()):
            return wanted
        known = ", ".join(sorted(name for name, of in addresses.items() if of))
        raise ConfigError(
            f"supervise.interface={wanted}: no such interface or address here; there are {known}"
        )
    if not hosts:
        return LOOPBACK
    here = socket.gethostname()
    for host in [h.name for h in hosts if h.name != here] if not isinstance(reach, Nowhere) else [here]:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
                s.connect((host, 9))  # sends nothing
                found = str(s.getsockname()[0])
        except OSError:
            continue
        if not found.startswith("127."):
            return found
    raise ConfigError(
        "no network interface leads to another host of the run: name one that all hosts reach, supervise.interface=eth0"
    )
