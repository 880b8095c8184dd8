"""Compares at an interval what several ranks must hold alike, in the sum that every step makes anyway, and finds out
which tensor differs on which rank. Collective."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megastable.base.collectives import gathered
from megastable.base.fingerprint import Marks
from megastable.base.text import ranks_on
from megastable.config.stability import HardwareConfig
from megastable.engine.engine import Engine
from megastable.engine.measured import Measured
from megastable.engine.replicas import COPIES, Replicas
from megastable.engine.watch import Watch
from megastable.hardware.equality import COLUMNS, columns, equal, odd_ones
from megastable.hardware.hardware_fault import HardwareFault
from megastable.hardware.state_watch import StateWatch
from megastable.run.events.stability_events import ReplicasDiffer, WrongCopy
from megastable.run.log import RunLog

TOLD = 3  # tensors named in a sentence


class Open(NamedTuple):
    """Copies that differed after `step`. held: by kind, name and group, each rank's fingerprint."""

    step: int
    held: dict[tuple[str, str, tuple[int, ...]], dict[int, int]]


class ReplicaWatch(Watch):
    """Of one process, which resumes after `step` steps. A checkpoint of copies that differ is never committed, so all
    is equal then. state: knows the fingerprints of the weights, where it has looked at them before."""

    name = "replicas"

    def __init__(
        self, config: HardwareConfig, engine: Engine, step: int, log: RunLog, state: StateWatch
    ) -> None:
        self.every, self.replicas, self.log = config.fingerprint_interval, Replicas(engine), log
        self._state = state
        self._equal = dict.fromkeys(self.replicas.kinds, step)  # after which step they were, by kind
        self._step, self._asked = step, tuple[str, ...]()
        self._open: Open | None = None

    def ballot(self, step: int) -> Sequence[float]:
        self._step, self._asked = step, tuple(kind for kind in self.replicas.kinds if self._due(kind, step))
        return self._row(self._state.weights)

    def check(self, step: int) -> HardwareFault | None:
        """Compare all now, after `step` steps. Collective."""
        self._step, self._asked = step, tuple(self.replicas.kinds)
        if not self.every or not self._asked:
            return None
        row = torch.tensor(self._row(), dtype=torch.float64, device=self.replicas.engine.device)
        dist.all_reduce(row)
        return self._judge(row.tolist())

    def _row(self, weights: Marks | None = None) -> tuple[float, ...]:
        """This rank's columns of what is asked for."""
        groups = {kind: self.replicas.group(kind) for kind in self._asked}
        held = [
            self.replicas.fingerprint(kind, weights) for kind, group in groups.items() if group is not None
        ]
        values = iter(torch.stack(held).tolist() if held else [])
        row: list[float] = []
        for kind, own in groups.items():
            for group in range(len(self.replicas.kinds[kind])):
                row += columns(next(values)) if group == own else [0.0] * COLUMNS
        return tuple(row)

    def _due(self, kind: str, step: int) -> bool:
        return bool(self.every) and (kind == COPIES or step % self.every == 0)

    def judge(self, measured: Measured) -> HardwareFault | None:
        """Collective if anything differs."""
        return self._judge(measured.ballot.get(self.name, ()))

    def _judge(self, sums: Sequence[float]) -> HardwareFault | None:
        asked, self._asked = self._asked, ()
        groups = [(kind, ranks) for kind in asked for ranks in self.replicas.kinds[kind]]
        parts = (sums[i : i + COLUMNS] for i in range(0, len(sums), COLUMNS))
        unequal = [of for of, part in zip(groups, parts, strict=True) if not equal(part, len(of[1]))]
        if unequal:
            return self._named(self._step, unequal)
        self._equal |= dict.fromkeys(asked, self._step)
        return None

    def explained(self) -> None:
        """It is known why copies differ."""
        self._open = None

    def look_again(self) -> None:
        """Tell which copies were wrong, now that the same step has been done again: what it gives is right, and what a
        rank held then, but for one bit in 2^64, is right only if it is that. Collective."""
        found = self._open
        if found is None or found.step != self._step:
            return
        self._open = None
        rank = self.replicas.engine.topology.rank
        mine = [key for key, held in found.held.items() if rank in held]
        now = {kind: self.replicas.by_name(kind) for kind in {kind for kind, *_ in mine}}
        right = {key for key in mine if now[key[0]].get(key[1]) == found.held[key][rank]}
        everyone = gathered((socket.gethostname(), right))
        wrong: dict[int, str] = {}
        for (kind, name, ranks), held in found.held.items():
            odd = [r for r in ranks if r in held and (kind, name, ranks) not in everyone[r][1]]
            # Where kernels sum in any order, or the fault has spread to all, nothing is as it was.
            if len(odd) < len(held):
                wrong |= {r: f"{name} ({kind})" for r in odd if r not in wrong}
        if wrong:
            hosts, held_by = [host for host, _ in everyone], sorted(wrong)
            what, who = wrong[held_by[0]], ranks_on(held_by, hosts)
            reason = f"step {found.step} done again gives another {what} than {who} held"
            told = self._suspects(held_by, found)
            if told != held_by:
                reason += f", made from gradients of {ranks_on(told, hosts)}"
            where = [hosts[r] for r in told]
            self.log.emit(WrongCopy(step=found.step, ranks=told, hosts=where, reason=reason), say=True)

    def _suspects(self, holders: Sequence[int], found: Open) -> list[int]:
        """A rank whose copy alone is wrong; if its data ranks were not compared, as of replicas on tensor ranks, each
        of these may have sent the gradient that is wrong in it."""
        suspects = set(holders)
        for ranks in self.replicas.engine.topology.layout.groups("data"):
            here = suspects.intersection(ranks)
            if here and not any(set(ranks) <= set(group) for *_, group in found.held):
                suspects.update(ranks)
        return sorted(suspects)

    def rewound(self, step: int, saved: Mapping[str, Any] | None) -> None:
        self._equal, self._asked = {kind: min(at, step) for kind, at in self._equal.items()}, ()

    def _named(self, step: int, unequal: Sequence[tuple[str, list[int]]]) -> HardwareFault:
        kinds = sorted({kind for kind, _ in unequal})
        everyone = gathered((socket.gethostname(), {kind: self.replicas.by_name(kind) for kind in kinds}))
        found: dict[tuple[tuple[int, ...], bool], list[str]] = {}
        differing: dict[tuple[str, str, tuple[int, ...]], dict[int, int]] = {}
        for kind, ranks in unequal:
            for name in sorted(everyone[ranks[0]][1][kind]):
                held = {rank: everyone[rank][1][kind].get(name, 0) for rank in ranks}
                if len(set(held.values())) > 1:
                    odd, proven = odd_ones(held)
                    found.setdefault((odd, proven), []).append(f"{name} ({kind})")
                    differing[kind, name, tuple(ranks)] = held
        texts = []
        for (ranks_, proven), names in found.items():
            hosts = sorted({everyone[rank][0] for rank in ranks_})
            told = ", ".join(names[:TOLD]) + (f" and {len(names) - TOLD} more" if len(names) > TOLD else "")
            who = f"rank {ranks_[0]}" if len(ranks_) == 1 else f"ranks {', '.join(map(str, ranks_))}"
            texts.append(
                f"{told}: {who} on {', '.join(hosts)} "
                + (
                    "differs from the other copies"
                    if proven
                    else "differ, which of them is wrong is not known"
                )
            )
        reason = f"copies that must be equal differ after step {step}: " + "; ".join(texts)
        ranks = sorted({rank for odd, proven in found if proven for rank in odd})
        self._open = Open(step, differing) if differing else None
        last = min(self._equal[kind] for kind in kinds)
        hosts = [everyone[rank][0] for rank in ranks]
        self.log.emit(
            ReplicasDiffer(step=step, proven=last, ranks=ranks, hosts=hosts, reason=reason), say=True
        )
        return HardwareFault(last, False, ranks, sorted(set(hosts)), reason)
