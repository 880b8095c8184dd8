"""The deepspeed launcher: builds its command lines, and reads from its arguments and hostfile where a run takes place.

Hostfile and arguments have the rules of DeepSpeed 0.19.8 (deepspeed/launcher/runner.py: parse_args, _parse_hostfile,
parse_resource_filter, apply_num_nodes_and_gpus), which cannot be imported here: it imports torch. Stricter where
DeepSpeed goes on with something else than was asked: a hostfile that was named and is not there, a host with no slots.
"""

from __future__ import annotations

import argparse
import re
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NoReturn

import psutil

from megastable.base.errors import ConfigError
from megastable.base.text import make_visible
from megastable.cluster.child_process import TimedProbe
from megastable.cluster.reach import Local, Reach, Srun, Ssh, list_allocated_nodes
from megastable.config.supervise import redact_override
from megastable.run.directory import RunDirectory
from megastable.run.rank_ipc import FLAG, make_mark

# Not the `deepspeed` script beside the interpreter: there is none if DeepSpeed is on PYTHONPATH.
LAUNCHER = (sys.executable, "-m", "deepspeed.launcher.runner")
MODULE = "megastable.train"  # default module to train with


@dataclass(frozen=True)
class TrainingCommand:
    """What a person asked for. overrides: of the recipe; given: arguments for the deepspeed launcher; module: what
    trains."""

    recipe: str
    overrides: Sequence[str] = ()
    given: Sequence[str] = ()
    module: str = MODULE


def build_attempt_command(
    run: RunDirectory,
    number: int,
    training: TrainingCommand,
    placed: Sequence[str] = (),
    port: int | None = None,
) -> list[str]:
    """The command that starts an attempt.

    Args:
        run: The run.
        number: Of the attempt.
        training: What is started.
        placed: Further arguments for the launcher, before those given: where the ranks are.
        port: Where the ranks meet; one that is free here if not given.
    """
    # The ranks send no notifications: they need no password, and other users see their arguments.
    overrides, given = list(map(redact_override, training.overrides)), [*placed, *training.given]
    launcher_words = build_launcher_command(training.module, training.recipe, overrides, given, port)
    return [*launcher_words, f"run.dir={run.root}", f"{FLAG}={make_mark(run, number)}"]


def build_launcher_command(
    module: str, recipe: str, overrides: Sequence[str], given: Sequence[str], port: int | None = None
) -> list[str]:
    """The deepspeed launcher of this interpreter, with a port of its own; given: further arguments for it."""
    elsewhere = any(a.startswith(("--hostfile", "-H", "--num_nodes")) for a in given)
    ports = []
    # Free ports of another host are unknown here: the launcher's default.
    if not any(a.startswith("--master_port") for a in given) and (port is not None or not elsewhere):
        ports = ["--master_port", str(find_free_port() if port is None else port)]
    quiet = [] if any(a in ("--quiet", "-q") or a.startswith("--log_level") for a in given) else ["--quiet"]
    return [*LAUNCHER, *quiet, *ports, *given, "--module", module, recipe, *overrides]


def find_free_port() -> int:
    """A port that is free on this host now."""
    with socket.socket() as bound_socket:
        bound_socket.bind(("", 0))
        return int(bound_socket.getsockname()[1])


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


def choose_hosts(given: Sequence[str], environment: Mapping[str, str]) -> HostChoice:
    """Raises ConfigError for arguments that contradict each other, or a bad host file."""
    by_slurm = str(_parser().parse_known_args(list(given))[0].launcher).lower() == "slurm"
    slurm_nodes = list_allocated_nodes(environment) if by_slurm else None
    if by_slurm and slurm_nodes is None:
        raise ConfigError(
            "--launcher slurm: there is no allocation (SLURM_JOB_NODELIST): use sbatch or salloc"
        )
    launch_placement = read_launch_placement(given, environment, slurm_nodes)
    slurm_gpus = environment.get("SLURM_GPUS_ON_NODE", "") if by_slurm else ""
    slots = tuple(range(int(slurm_gpus))) if slurm_gpus.isdecimal() else ()
    hosts = [HostSlots(host.name, host.slots or slots) for host in launch_placement.hosts]
    other_arguments = _how(given)
    if launch_placement.no_ssh and len(hosts) > 1:
        return HostChoice(_known(hosts), Local(hosts[0].name), other_arguments, launch_placement.node_rank)
    if by_slurm:
        if len(hosts) == 1:
            return HostChoice([], Local(), ["--num_gpus", str(len(_known(hosts)[0].slots)), *other_arguments])
        return HostChoice(_known(hosts), Srun(), other_arguments)
    if not launch_placement.several or len(hosts) == 1:
        return HostChoice([], Local(), given)  # the launcher starts it here, without ssh
    if launch_placement.launcher != "pdsh":
        raise ConfigError(
            f"--launcher {launch_placement.launcher}: supervised runs know pdsh (they use ssh) and slurm (srun)"
        )
    _refuse_two_names_of_here(hosts)
    return HostChoice(_known(hosts), Ssh(launch_placement.ssh_port), other_arguments)


def _refuse_two_names_of_here(hosts: Sequence[HostSlots]) -> None:
    """This host can have one agent, so the run would wait for the other for ever. Two names of another host, and a name
    of this one that only ssh knows, are found by `megastable preflight`."""
    names = [host.name for host in hosts]
    own = {one.address for of in psutil.net_if_addrs().values() for one in of}
    # A name server that does not answer holds nobody up: what it would have known counts as other hosts.
    known, _ = TimedProbe(lambda: [name for name in names if _leads_here(name, own)], RESOLVED).read_answer()
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
        found = socket.getaddrinfo(name, None, flags=flags)
    except (OSError, UnicodeError):
        return False
    addresses = {str(socket_address[0]) for *_, socket_address in found}
    return all(address in own or ip_address(address).is_loopback for address in addresses)


def _known(hosts: Sequence[HostSlots]) -> list[HostSlots]:
    for host in hosts:
        if not host.slots:
            raise ConfigError(f"how many ranks on {host.name}? Say --num_gpus N")
    return list(hosts)


def _how(given: Sequence[str]) -> list[str]:
    """The launcher's arguments without those that say where."""
    parser = argparse.ArgumentParser(add_help=False)
    for flag in WHERE:
        parser.add_argument(flag)
    for flag in WAYS:
        parser.add_argument(flag, action="store_true")
    return parser.parse_known_args(list(given))[1]


def choose_interface(wanted: str | None, place: HostChoice) -> str:
    """The address to listen on. wanted: supervise.interface. Raises ConfigError."""
    if wanted is not None:
        return _address(wanted)
    if not place.hosts:
        return LOOPBACK
    own_hostname = socket.gethostname()
    other_names = [host.name for host in place.hosts if host.name != own_hostname]
    for host_name in [own_hostname] if place.by_themselves else other_names:
        if (own_address := _towards(host_name)) is not None:
            return own_address
    for host_name in [] if place.by_themselves else other_names:
        try:
            socket.getaddrinfo(host_name, None)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(
                f"host {make_visible(host_name, 100)}: its name leads to no address ({reason}): correct it "
                "in the hostfile, or make it known here; if only ssh knows it, name the interface that all hosts "
                "reach, supervise.interface=eth0"
            ) from None
    raise ConfigError(
        "no network interface leads to another host of the run: name one that all hosts reach, supervise.interface=eth0"
    )


def _towards(name: str) -> str | None:
    """Our own address on the way to a host, IPv4 before IPv6; None if there is none that others could use."""
    for family in FAMILIES:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe_socket:
                probe_socket.connect((name, 9))  # sends nothing
                own_address = str(probe_socket.getsockname()[0])
        except OSError:
            continue
        if _is_usable(own_address) and not ip_address(own_address).is_loopback:
            return own_address
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
    known = ", ".join(
        sorted(address_name for address_name, of in addresses.items() if any(map(_is_usable, of)))
    )
    raise ConfigError(f"supervise.interface={wanted}: no such interface or address here; there are {known}")


def _is_usable(address: str) -> bool:
    """Whether it is an address by which other hosts can reach this one: of a link-local one they would have to know
    the name of their own interface, too."""
    try:
        parsed_address = ip_address(address)
    except ValueError:
        return False
    return parsed_address.version == 4 or not parsed_address.is_link_local


DEFAULT = "/job/hostfile"
LOCAL = "localhost"
ENTRY = re.compile(r"^(\S+)\s+slots=(\d+)")
MOST = 4096  # slots of a host: more is a slip
# The launcher's other arguments. They are known so that their values are not taken for something else, and so that
# the same abbreviations are unique.
VALUES = (
    "--master_port", "--master_addr", "--launcher_args", "--enable_each_rank_log", "--autotuning",
    "--bind_core_list", "--venv_script", "--log_level",
)  # fmt: skip
SWITCHES = (
    "--module", "--no_python", "--no_local_rank", "--no_ssh_check", "--force_multi", "--save_pid",
    "--bind_cores_to_rank",
)  # fmt: skip


@dataclass(frozen=True)
class HostSlots:
    """A host by the name that the hostfile has, and its GPUs by local number; none: as many as it has."""

    name: str
    slots: tuple[int, ...]


@dataclass(frozen=True)
class LaunchPlacement:
    """Where the launcher would start ranks. hosts: in the order of ranks; the first is rank 0's.

    several: by a hostfile; else on this host only. node_rank: the index of this host, -1 unless each host is started by
    itself (`no_ssh`). launcher: in lower case.
    """

    hosts: tuple[HostSlots, ...]
    several: bool
    ssh_port: int | None
    no_ssh: bool
    node_rank: int
    launcher: str
    num_gpus: int


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"arguments after --: {message}; `deepspeed --help` has all of them")


def _parser() -> _Parser:
    parser = _Parser(prog="deepspeed", add_help=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-H", "--hostfile", default=DEFAULT)
    parser.add_argument("-i", "--include", default="")
    parser.add_argument("-e", "--exclude", default="")
    parser.add_argument("--num_nodes", type=int, default=-1)
    parser.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1)
    parser.add_argument("--node_rank", type=int, default=-1)
    parser.add_argument("--launcher", default="pdsh")
    parser.add_argument("--no_ssh", action="store_true")
    parser.add_argument("--ssh_port", type=int)
    parser.add_argument("-q", "--quiet", action="store_true")
    for option_name in VALUES:
        parser.add_argument(option_name)
    for option_name in SWITCHES:
        parser.add_argument(option_name, action="store_true")
    return parser


def read_launch_placement(
    given: Sequence[str], environment: Mapping[str, str], allocated: Sequence[str] | None = None
) -> LaunchPlacement:
    """What the launcher's arguments `given` mean.

    environment: CUDA_VISIBLE_DEVICES names the slots of this host, if neither arguments nor a hostfile do. allocated:
    hosts that a scheduler has given us; they stand for a hostfile where there is none. Without either, --num_nodes N
    with --no_ssh means N hosts that each run this command; they are named host-0, host-1 and so on.

    Raises ConfigError.
    """
    args, unknown = _parser().parse_known_args(list(given))
    if unknown or args.help:
        raise ConfigError(
            f"arguments after --: {make_visible(unknown[0] if unknown else '--help')} is none of the deepspeed "
            "launcher's; `deepspeed --help` has all of them"
        )
    filtered = bool(args.include or args.exclude)
    if filtered and (args.num_nodes >= 0 or args.num_gpus >= 0):
        raise ConfigError("--include and --exclude: not with --num_nodes and --num_gpus")
    pool = _pool(args, environment, allocated)
    several = pool is not None
    if pool is None:
        pool = _without_hostfile(args, environment)
    active = pool if args.num_nodes <= 0 else dict(list(pool.items())[: args.num_nodes])
    if filtered:
        active = filter_hosts(active, args.include, args.exclude)
    if args.num_gpus > 0:
        active = dict.fromkeys(active, tuple(range(_few(args.num_gpus, "--num_gpus"))))
    if not active:
        raise ConfigError("--include and --exclude leave no host")
    if args.no_ssh and not 0 <= args.node_rank < len(active):
        raise ConfigError(
            f"--no_ssh: --node_rank {args.node_rank} is not the index of one of {len(active)} hosts (0 to "
            f"{len(active) - 1})"
        )
    hosts = tuple(HostSlots(name, slots) for name, slots in active.items())
    return LaunchPlacement(
        hosts, several, args.ssh_port, args.no_ssh, args.node_rank, args.launcher.lower(), args.num_gpus
    )


def _pool(
    args: Any, environment: Mapping[str, str], allocated: Sequence[str] | None
) -> dict[str, tuple[int, ...]] | None:
    """Slots by host, from the hostfile or the scheduler; None without either."""
    hostfile_path = Path(args.hostfile)
    try:
        if hostfile_path.is_file():
            counts = parse_hostfile(hostfile_path.read_text(encoding="utf-8"), str(hostfile_path))
            return {host_name: tuple(range(count)) for host_name, count in counts.items()}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {hostfile_path}: cannot be read: {error}") from None
    if args.hostfile != DEFAULT:
        raise ConfigError(f"--hostfile {hostfile_path}: there is no such file")
    return None if allocated is None else dict.fromkeys(allocated, ())


def parse_hostfile(text: str, file: str) -> dict[str, int]:
    """Slots by host, in order. Raises ConfigError with `file` and line."""
    slots_by_host: dict[str, int] = {}
    # As readlines does; splitlines would also split at characters that \s+ matches within a line.
    for line_number, line in enumerate(text.split("\n"), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        line_place, line_match = f"{file}, line {line_number}", ENTRY.search(line)
        if line_match is None:
            line_text = repr(make_visible(line, 80))
            raise ConfigError(f"{line_place}: {line_text} is not `HOST slots=NUMBER`, e.g. node-01 slots=8")
        host_name, slots = line_match.groups()
        if host_name in slots_by_host:
            twice = f"{make_visible(host_name)} is listed twice"
            raise ConfigError(f"{line_place}: {twice}: write all its GPUs into one line")
        slots_by_host[host_name] = _few(int(slots), f"{line_place}: slots")
    if not slots_by_host:
        raise ConfigError(f"{file}: lists no host: one line per host, e.g. node-01 slots=8")
    return slots_by_host


def _few(slots: int, where: str) -> int:
    if not 0 < slots <= MOST:
        raise ConfigError(f"{where}={slots}: a number of GPUs from 1 to {MOST}")
    return slots


def _without_hostfile(args: Any, environment: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """This host, or as many like it as there are pods."""
    if args.num_nodes > 1:
        if not args.no_ssh:
            raise ConfigError(f"--num_nodes {args.num_nodes}: without --hostfile there is this host only")
        return {f"host-{node_number}": () for node_number in range(args.num_nodes)}
    slots: tuple[int, ...] = ()
    if not (args.include or args.exclude or args.num_gpus > 0):
        visible_devices = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if all(visible_device.strip().isdecimal() for visible_device in visible_devices):
            slots = tuple(sorted({int(device) for device in visible_devices}))
    return {LOCAL: slots}


def filter_hosts(
    pool: Mapping[str, tuple[int, ...]], include: str, exclude: str
) -> dict[str, tuple[int, ...]]:
    """The hosts of `pool` that --include keeps or --exclude leaves, in the order of `pool`.

    Slots () of a host are unknown: any may be included, and none excluded. Raises ConfigError.
    """
    if include and exclude:
        raise ConfigError("--include: not with --exclude")
    option = f"--include {make_visible(include)}" if include else f"--exclude {make_visible(exclude)}"
    filtered_slots = {} if include else dict(pool)
    for host_name, slots in _specified(include or exclude, option).items():
        shown_name = make_visible(host_name)
        if host_name not in pool:
            raise ConfigError(f"{option}: {shown_name!r} is not in the hostfile")
        host_slots = pool[host_name]
        if missing_slots := [slot for slot in slots if host_slots and slot not in host_slots]:
            has_slots = f"{shown_name} has slots 0 to {len(host_slots) - 1}"
            raise ConfigError(f"{option}: {has_slots}, not {missing_slots[0]}")
        if include:
            filtered_slots[host_name] = slots or host_slots
        elif slots and not host_slots:
            raise ConfigError(f"{option}: the slots of {shown_name} are unknown: use --include")
        elif slots and (slots_left := tuple(host_slot for host_slot in host_slots if host_slot not in slots)):
            filtered_slots[host_name] = slots_left
        else:
            del filtered_slots[host_name]
    return {host_name: filtered_slots[host_name] for host_name in pool if host_name in filtered_slots}


def _specified(text: str, option: str) -> dict[str, tuple[int, ...]]:
    """NAME[:SLOT[,SLOT ...]] separated by @, as slots by name; none: all of them."""
    slots_by_host: dict[str, set[int]] = {}
    for host_part in text.split("@"):
        host_name, colon, slots = host_part.partition(":")
        try:
            slot_numbers = {int(slot) for slot in slots.split(",")} if colon else set[int]()
        except ValueError:
            raise ConfigError(
                f"{option}: {make_visible(host_part)!r} is not NAME or NAME:SLOT,SLOT, e.g. node-01:0,2"
            ) from None
        slots_by_host.setdefault(host_name, set()).update(slot_numbers)
    return {host_name: tuple(sorted(slot_numbers)) for host_name, slot_numbers in slots_by_host.items()}


def format_hostfile(hosts: Sequence[HostSlots]) -> str:
    """A host file of them."""
    return "".join(f"{host.name} slots={max(host.slots) + 1}\n" for host in hosts)


def build_include_arguments(hosts: Sequence[HostSlots]) -> list[str]:
    """The launcher's arguments for those of them that do not use all slots of `format_hostfile`."""
    if all(host.slots == tuple(range(len(host.slots))) for host in hosts):
        return []
    return ["--include", "@".join(f"{host.name}:{','.join(map(str, host.slots))}" for host in hosts)]
