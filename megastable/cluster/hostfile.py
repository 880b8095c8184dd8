"""Reads the deepspeed launcher's arguments and hostfile into the hosts that it would use. Pure, but for the file.

The same rules as DeepSpeed 0.19.8 (deepspeed/launcher/runner.py: parse_args, _parse_hostfile, parse_resource_filter,
apply_num_nodes_and_gpus), which cannot be imported here: it imports torch. Stricter where DeepSpeed goes on with
something else than was asked: a hostfile that was named and is not there, a host with no slots.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megastable.base.errors import ConfigError
from megastable.base.text import visible

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
    for name in VALUES:
        parser.add_argument(name)
    for name in SWITCHES:
        parser.add_argument(name, action="store_true")
    return parser


def placement(
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
            f"arguments after --: {visible(unknown[0] if unknown else '--help')} is none of the deepspeed launcher's; "
            "`deepspeed --help` has all of them"
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
    path = Path(args.hostfile)
    try:
        if path.is_file():
            return {
                name: tuple(range(slots))
                for name, slots in parse_hostfile(path.read_text(encoding="utf-8"), str(path)).items()
            }
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {path}: cannot be read: {error}") from None
    if args.hostfile != DEFAULT:
        raise ConfigError(f"--hostfile {path}: there is no such file")
    return None if allocated is None else dict.fromkeys(allocated, ())


def parse_hostfile(text: str, file: str) -> dict[str, int]:
    """Slots by host, in order. Raises ConfigError with `file` and line."""
    found: dict[str, int] = {}
    # As readlines does; splitlines would also split at characters that \s+ matches within a line.
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        where, match = f"{file}, line {number}", ENTRY.search(line)
        if match is None:
            raise ConfigError(
                f"{where}: {visible(line, 80)!r} is not `HOST slots=NUMBER`, e.g. node-01 slots=8"
            )
        name, slots = match.groups()
        if name in found:
            raise ConfigError(f"{where}: {visible(name)} is listed twice: write all its GPUs into one line")
        found[name] = _few(int(slots), f"{where}: slots")
    if not found:
        raise ConfigError(f"{file}: lists no host: one line per host, e.g. node-01 slots=8")
    return found


def _few(slots: int, where: str) -> int:
    if not 0 < slots <= MOST:
        raise ConfigError(f"{where}={slots}: a number of GPUs from 1 to {MOST}")
    return slots


def _without_hostfile(args: Any, environment: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """This host, or as many like it as there are pods."""
    if args.num_nodes > 1:
        if not args.no_ssh:
            raise ConfigError(f"--num_nodes {args.num_nodes}: without --hostfile there is this host only")
        return {f"host-{n}": () for n in range(args.num_nodes)}
    slots: tuple[int, ...] = ()
    if not (args.include or args.exclude or args.num_gpus > 0):
        shown = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if all(device.strip().isdecimal() for device in shown):
            slots = tuple(sorted({int(device) for device in shown}))
    return {LOCAL: slots}


def filter_hosts(
    pool: Mapping[str, tuple[int, ...]], include: str, exclude: str
) -> dict[str, tuple[int, ...]]:
    """The hosts of `pool` that --include keeps or --exclude leaves, in the order of `pool`.

    Slots () of a host are unknown: any may be included, and none excluded. Raises ConfigError.
    """
    if include and exclude:
        raise ConfigError("--include: not with --exclude")
    option, text = ("--include", include) if include else ("--exclude", exclude)
    found = {} if include else dict(pool)
    for name, slots in _specified(text, option).items():
        if name not in pool:
            raise ConfigError(f"{option} {visible(text)}: {visible(name)!r} is not in the hostfile")
        known = pool[name]
        if missing := [slot for slot in slots if known and slot not in known]:
            raise ConfigError(
                f"{option} {visible(text)}: {visible(name)} has slots 0 to {len(known) - 1}, not {missing[0]}"
            )
        if include:
            found[name] = slots or known
        elif slots and not known:
            raise ConfigError(
                f"{option} {visible(text)}: the slots of {visible(name)} are unknown: use --include"
            )
        elif slots and (rest := tuple(slot for slot in known if slot not in slots)):
            found[name] = rest
        else:
            del found[name]
    return {name: found[name] for name in pool if name in found}


def _specified(text: str, option: str) -> dict[str, tuple[int, ...]]:
    """NAME[:SLOT[,SLOT ...]] separated by @, as slots by name; none: all of them."""
    found: dict[str, set[int]] = {}
    for part in text.split("@"):
        name, colon, slots = part.partition(":")
        try:
            numbers = {int(slot) for slot in slots.split(",")} if colon else set[int]()
        except ValueError:
            raise ConfigError(
                f"{option} {visible(text)}: {visible(part)!r} is not NAME or NAME:SLOT,SLOT, e.g. node-01:0,2"
            ) from None
        found.setdefault(name, set()).update(numbers)
    return {name: tuple(sorted(numbers)) for name, numbers in found.items()}


def lines(hosts: Sequence[HostSlots]) -> str:
    """A host file of them."""
    return "".join(f"{host.name} slots={max(host.slots) + 1}\n" for host in hosts)


def include(hosts: Sequence[HostSlots]) -> list[str]:
    """The launcher's arguments for those of them that do not use all slots of `lines`."""
    if all(host.slots == tuple(range(len(host.slots))) for host in hosts):
        return []
    return ["--include", "@".join(f"{host.name}:{','.join(map(str, host.slots))}" for host in hosts)]
