"""Reads host files and the deepspeed launcher's arguments that choose among hosts and slots, as its runner does."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megastable.base.errors import ConfigError

LINE = re.compile(r"^(\S+)\s+slots=(\d+)")


@dataclass(frozen=True)
class HostSlots:
    """name: as ssh knows it. slots: numbers of its devices that get a rank, ascending."""

    name: str
    slots: tuple[int, ...]


def read(path: Path) -> list[HostSlots]:
    """The hosts of a file of lines `NAME slots=N`. Raises ConfigError."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    found: dict[str, HostSlots] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = LINE.match(line)
        if match is None or not int(match[2]):
            raise ConfigError(f"{path}: line {number} is not NAME slots=N: {line}")
        if match[1] in found:
            raise ConfigError(f"{path}: line {number} names {match[1]} again: one line per host")
        found[match[1]] = HostSlots(match[1], tuple(range(int(match[2]))))
    if not found:
        raise ConfigError(f"{path} names no hosts: it needs lines NAME slots=N")
    return list(found.values())


def chosen(hosts: Sequence[HostSlots], include: str = "", exclude: str = "") -> list[HostSlots]:
    """Those that `--include` or `--exclude` leave: NAME[:SLOT,...], with @ between. Raises ConfigError."""
    if include and exclude:
        raise ConfigError("--include and --exclude exclude each other")
    if not include and not exclude:
        return list(hosts)
    flag, text = ("--include", include) if include else ("--exclude", exclude)
    named = _named(flag, text, {host.name: host for host in hosts})
    left = []
    for host in hosts:
        of = named.get(host.name)
        if include:
            slots = () if of is None else of or host.slots
        else:
            slots = host.slots if of is None else tuple(s for s in host.slots if of and s not in of)
        if slots:
            left.append(HostSlots(host.name, slots))
    if not left:
        raise ConfigError(f"{flag}={text} leaves no host")
    return left


def _named(flag: str, text: str, hosts: Mapping[str, HostSlots]) -> dict[str, tuple[int, ...]]:
    """Slots by host; none: all of it."""
    found: dict[str, set[int]] = {}
    for part in text.split("@"):
        name, _, slots = part.partition(":")
        if name not in hosts:
            raise ConfigError(f"{flag}={text}: there is no host {name!r}; there are {', '.join(hosts)}")
        try:
            numbers = {int(slot) for slot in slots.split(",")} if slots else set[int]()
        except ValueError:
            raise ConfigError(f"{flag}={text}: {part!r} is not NAME:SLOT,SLOT") from None
        if strange := numbers - set(hosts[name].slots):
            raise ConfigError(f"{flag}={text}: {name} has no slot {min(strange)}")
        found[name] = found.get(name, set()) | numbers
    return {name: tuple(sorted(numbers)) for name, numbers in found.items()}


def trimmed(hosts: Sequence[HostSlots], nodes: int = -1, gpus: int = -1) -> list[HostSlots]:
    """What `--num_nodes` and `--num_gpus` leave: the first hosts, and so many slots of each."""
    left = list(hosts[:nodes] if nodes > 0 else hosts)
    return [HostSlots(host.name, tuple(range(gpus))) for host in left] if gpus > 0 else left


def lines(hosts: Sequence[HostSlots]) -> str:
    """A host file of them."""
    return "".join(f"{host.name} slots={max(host.slots) + 1}\n" for host in hosts)


def include(hosts: Sequence[HostSlots]) -> list[str]:
    """The launcher's arguments for those of them that do not use all slots of `lines`."""
    if all(host.slots == tuple(range(len(host.slots))) for host in hosts):
        return []
    return ["--include", "@".join(f"{host.name}:{','.join(map(str, host.slots))}" for host in hosts)]
