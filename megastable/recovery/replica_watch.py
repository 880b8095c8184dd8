"""Compares at an interval what several ranks must hold alike, in the sum that every step makes anyway, and finds out
which tensor differs on which rank. Collective."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megastable.base.collectives import gathered
from megastable.config.stability import HardwareConfig
from megastable.engine.engine import Engine
from megastable.engine.replicas import Replicas
from megastable.run.events.stability_events import ReplicasDiffer
from megastable.run.log import RunLog
from megastable.stability.equality import COLUMNS, columns, equal, odd_ones

TOLD = 3  # tensors named in a sentence


@dataclass(frozen=True)
class Difference:
    """What differs. proven: the step after which all was equal; reason: a sentence with tensors, ranks and hosts."""

    proven: int
    reason: str


class ReplicaWatch:
    """Of one process, which resumes after `step` steps. A checkpoint of copies that differ is never committed, so all
    is equal then."""

    def __init__(self, config: HardwareConfig, engine: Engine, step: int, log: RunLog) -> None:
        self.every, self.replicas, self.log = config.fingerprint_interval, Replicas(engine), log
        self.proven = step
        self._sizes = [(kind, len(groups)) for kind, groups in self.replicas.kinds.items()]
        self._asked: int | None = None

    def votes(self, step: int) -> tuple[float, ...]:
        """For the sum of the step after `step`, the last ones of all; () if it is not due. The same number on every
        rank."""
        due = bool(self.every) and bool(self._sizes) and step > self.proven and step % self.every == 0
        self._asked = step if due else None
        return self._columns() if due else ()

    def _columns(self) -> tuple[float, ...]:
        mine = self.replicas.fingerprints()
        values = dict(zip(mine, torch.stack(list(mine.values())).tolist() if mine else (), strict=True))
        row: list[float] = []
        for kind, count in self._sizes:
            own = self.replicas.group(kind)
            for group in range(count):
                row += columns(values[kind]) if group == own else [0.0] * COLUMNS
        return tuple(row)

    def judge(self, votes: Sequence[float]) -> Difference | None:
        """What the summed votes of a step show, before its update. Collective if anything differs."""
        if self._asked is None:
            return None
        step, self._asked = self._asked, None
        sums = votes[len(votes) - COLUMNS * sum(count for _, count in self._sizes) :]
        unequal, begin = [], 0
        for kind, groups in self.replicas.kinds.items():
            for ranks in groups:
                if not equal(sums[begin : begin + COLUMNS], len(ranks)):
                    unequal.append((kind, ranks))
                begin += COLUMNS
        if not unequal:
            self.proven = step
            return None
        return self._named(step, unequal)

    def rewound(self, step: int) -> None:
        """The run is back at an earlier step."""
        self.proven, self._asked = min(self.proven, step), None

    def _named(self, step: int, unequal: Sequence[tuple[str, list[int]]]) -> Difference:
        kinds = sorted({kind for kind, _ in unequal})
        everyone = gathered((socket.gethostname(), {kind: self.replicas.by_name(kind) for kind in kinds}))
        found: dict[tuple[tuple[int, ...], bool], list[str]] = {}
        for kind, ranks in unequal:
            for name in sorted(everyone[ranks[0]][1][kind]):
                held = {rank: everyone[rank][1][kind].get(name, 0) for rank in ranks}
                if len(set(held.values())) > 1:
                    found.setdefault(odd_ones(held), []).append(f"{name} ({kind})")
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
        ranks = sorted({rank for (odd, proven), _ in found.items() if proven for rank in odd})
        self.log.emit(ReplicasDiffer(step=step, proven=self.proven, ranks=ranks, reason=reason), say=True)
        return Difference(self.proven, reason)
