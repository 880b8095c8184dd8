"""Where a supervised run takes place, from the arguments for the deepspeed launcher."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address

import psutil

from megastable.base.errors import ConfigError
from megastable.base.text import visible
from megastable.cluster.hostfile import HostSlots, placement
from megastable.cluster.reach import Local, Reach, Srun, Ssh, allocated
from megastable.cluster.timed_probe import TimedProbe

LOOPBACK = "127.0.0.1"
RESOLVED = 3.0  # seconds for the addresses of all hosts
FAMILIES = (socket.AF_INET, socket.AF_INET6)
# What says where, as opposed to how; those with a value, and those without.
WHERE = ("-H", "--hostfile", "-i", "--include", "-e", "--exclude", "--num_nodes", "--num_gpus", "--num_accelerators",
         "--node_rank", "--launcher", "--launcher_args", "--ssh_port")  # fmt: skip
WAYS = ("--no_ssh", "--no_ssh_check", "--force_multi")


@dataclass(frozen=True)
class HostChoice:
    """hosts: empty for this host alone. given: arguments for the launcher that are left to it. node: which of the
    hosts this process is on, where each starts its own; 0: the one that supervises."""

    hosts: Sequence[HostSlots]
    reach: Reach
    given: Sequence[str]
    node: int = 0

    @property
    def by_themselves(self) -> bool:
        """Whether every host starts its own process."""
        return isinstance(self.reach, Local) and self.reach.only is not None


def placed(given: Sequence[str], environment: Mapping[str, str]) -> HostChoice:
    """Raises ConfigError for arguments that contradict each other, or a bad host file."""
    by_slurm = "slurm" in _values(given, "--launcher")
    nodes = allocated(environment) if by_slurm else None
    if by_slurm and nodes is None:
        raise ConfigError(
            "--launcher slurm: there is no allocation (SLURM_JOB_NODELIST): use sbatch or salloc"
        )
    place = placement(given, environment, nodes)
    gpus = environment.get("SLURM_GPUS_ON_NODE", "") if by_slurm else ""
    hosts = [_counted(host, gpus) for host in place.hosts]
    how = _how(given)
    if place.no_ssh and len(hosts) > 1:
        return HostChoice(_known(hosts), Local(hosts[0].name), how, place.node_rank)
    if by_slurm:
        if len(hosts) == 1:
            return HostChoice([], Local(), ["--num_gpus", str(len(_known(hosts)[0].slots)), *how])
        return HostChoice(_known(hosts), Srun(), how)
    if not place.several or len(hosts) == 1:
        return HostChoice([], Local(), given)  # the launcher starts it here, without ssh
    if place.launcher != "pdsh":
        raise ConfigError(
            f"--launcher {place.launcher}: supervised runs know pdsh (they use ssh) and slurm (srun)"
        )
    _refuse_two_names_of_here(hosts)
    return HostChoice(_known(hosts), Ssh(place.ssh_port), how)


def _refuse_two_names_of_here(hosts: Sequence[HostSlots]) -> None:
    """This host can have one agent, so the run would wait for the other for ever. Two names of another host, and a name
    of this one that only ssh knows, are found by `megastable preflight`."""
    names = [host.name for host in hosts]
    own = {one.address for of in psutil.net_if_addrs().values() for one in of}
    # A name server that does not answer holds nobody up: what it would have known counts as other hosts.
    known, _ = TimedProbe(lambda: [name for name in names if _leads_here(name, own)], RESOLVED).result()
    here = [
        name for name in names
        if name in ("localhost", socket.gethostname(), *(known or ()))
        or _leads_here(name, own, socket.AI_NUMERICHOST)
    ]  # fmt: skip
    if len(here) > 1:
        raise ConfigError(
            f"{here[0]} and {here[1]} are both this host: name it once, with all its GPUs in one line, by a name that "
            "the other hosts know it by"
        )


def _leads_here(name: str, own: Collection[str], flags: int = 0) -> bool:
    """Whether all addresses of a host are among our `own`. AI_NUMERICHOST: only where the name is an address."""
    try:
        found = {str(place[0]) for *_, place in socket.getaddrinfo(name, None, flags=flags)}
    except (OSError, UnicodeError):
        return False
    return all(address in own or ip_address(address).is_loopback for address in found)


def _counted(host: HostSlots, gpus: str) -> HostSlots:
    return HostSlots(host.name, tuple(range(int(gpus)))) if not host.slots and gpus.isdecimal() else host


def _known(hosts: Sequence[HostSlots]) -> list[HostSlots]:
    for host in hosts:
        if not host.slots:
            raise ConfigError(f"how many ranks on {host.name}? Say --num_gpus N")
    return list(hosts)


def _values(given: Sequence[str], flag: str) -> list[str]:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(flag, action="append", default=[], dest="found")
    return [str(value).lower() for value in parser.parse_known_args(list(given))[0].found]


def _how(given: Sequence[str]) -> list[str]:
    """The launcher's arguments without those that say where."""
    parser = argparse.ArgumentParser(add_help=False)
    for flag in WHERE:
        parser.add_argument(flag)
    for flag in WAYS:
        parser.add_argument(flag, action="store_true")
    return parser.parse_known_args(list(given))[1]


def interface(wanted: str | None, place: HostChoice) -> str:
    """The address to listen on. wanted: supervise.interface. Raises ConfigError."""
    if wanted is not None:
        return _address(wanted)
    if not place.hosts:
        return LOOPBACK
    here = socket.gethostname()
    names = [here] if place.by_themselves else [host.name for host in place.hosts if host.name != here]
    for name in names:
        if (found := _towards(name)) is not None:
            return found
    for name in [] if place.by_themselves else names:
        if (why := _unresolved(name)) is not None:
            raise ConfigError(
                f"host {visible(name, 100)}: its name leads to no address ({why}): correct it in the hostfile, or make "
                "it known here; if only ssh knows it, name the interface that all hosts reach, "
                "supervise.interface=eth0"
            )
    raise ConfigError(
        "no network interface leads to another host of the run: name one that all hosts reach, supervise.interface=eth0"
    )


def _towards(name: str) -> str | None:
    """Our own address on the way to a host, IPv4 before IPv6; None if there is none that others could use."""
    for family in FAMILIES:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as s:
                s.connect((name, 9))  # sends nothing
                found = str(s.getsockname()[0])
        except OSError:
            continue
        if _is_usable(found) and not ip_address(found).is_loopback:
            return found
    return None


def _unresolved(name: str) -> str | None:
    """Why a name has no address; None if it has one."""
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeError as error:
        return str(error)
    return None


def _address(wanted: str) -> str:
    """Of an interface, IPv4 before IPv6, or `wanted` itself if it is an address of this host."""
    addresses = {
        name: [one.address for family in FAMILIES for one in of if one.family == family]
        for name, of in psutil.net_if_addrs().items()
    }
    here = [address for of in addresses.values() for address in of]
    with suppress(ValueError):
        wanted = str(ip_address(wanted))  # an IPv6 address can be written in many ways
    if _is_usable(wanted) and wanted in here:
        return wanted
    if usable := [address for address in addresses.get(wanted, []) if _is_usable(address)]:
        return usable[0]
    links = {address.partition("%")[0] for address in here}
    if addresses.get(wanted) or wanted.partition("%")[0] in links:
        raise ConfigError(
            f"supervise.interface={wanted}: only a link-local IPv6 address (fe80::...), which other hosts cannot use: "
            "name an interface with another address"
        )
    known = ", ".join(sorted(name for name, of in addresses.items() if any(map(_is_usable, of))))
    raise ConfigError(f"supervise.interface={wanted}: no such interface or address here; there are {known}")


def _is_usable(address: str) -> bool:
    """Whether it is an address by which other hosts can reach this one: of a link-local one they would have to know
    the name of their own interface, too."""
    try:
        found = ip_address(address)
    except ValueError:
        return False
    return found.version == 4 or not found.is_link_local
