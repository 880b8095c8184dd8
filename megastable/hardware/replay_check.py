"""Computes a micro-batch of the step again at an interval, on its own rank and on the next data rank, and compares;
and lets every device compute products with known answers. Finds chips that lie now and then, or always. Collective."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megastable.base.collectives import gathered
from megastable.base.deterministic import exact
from megastable.base.fingerprint import fingerprint
from megastable.base.hardware import kind_of
from megastable.base.text import ranks_on
from megastable.config.tree import RunConfig
from megastable.data.loader import Loader, MicroBatch, Step
from megastable.engine.engine import Engine
from megastable.engine.gradient_digest import GradientDigest, gradient_digest
from megastable.engine.self_test import wrong_product
from megastable.engine.watch import Watch
from megastable.hardware.gradient_proof import Digest, alike, prove
from megastable.hardware.hardware_fault import FaultCounts, HardwareFault
from megastable.model.kernels import DTYPES
from megastable.run.events.stability_events import ReplayDiffers
from megastable.run.log import RunLog

SLOTS = 8  # sums of checks that are compared where kernels sum in any order
WIDTH = 2 + SLOTS + 1  # numbers of a digest
WATCHED = 10  # steps after one, which are all checked
TURNS = 2  # other ranks that compute the same samples: with a third result it is known which one is wrong

Told = tuple[str, list[int], list[str], str]
"""Transient or persistent, ranks, the hosts of all ranks, and a sentence."""


class ReplayCheck(Watch):
    """Of one process, which resumes after `step` steps. counts: of what earlier replays found."""

    name = "replays"

    def __init__(
        self, config: RunConfig, engine: Engine, loader: Loader, step: int, log: RunLog, counts: FaultCounts
    ) -> None:
        self.engine, self.loader, self.log = engine, loader, log
        self.every = config.stability.hardware.replay_interval
        self._model, self._micro_batch = config.model, config.train.micro_batch
        self._dtype = DTYPES[config.precision.kind]
        self._exact = exact(config.run.deterministic, engine.device)
        self._maker = kind_of(engine.device)
        self._right = step
        self._again = step  # until which it is due at every step
        self._counts = counts

    def due(self, step: int) -> bool:
        return bool(self.every) and (step % self.every == 0 or step <= self._again)

    def rewound(self, step: int, saved: Mapping[str, Any] | None) -> None:
        self._right = min(self._right, step)

    def check(self, batch: Step, step: int) -> HardwareFault | None:
        """Of the samples of `step`, on the current state."""
        faulty = wrong_product(
            self._model, self.engine.topology.layout.tensor, self._dtype, self.engine.device
        )
        own = self._computed(batch, 0)
        other = self._computed(batch, 1)  # without other data ranks its own samples once more
        packed = torch.cat((_packed(own), _packed(other), torch.tensor([self._maker, bool(faulty)])))
        rows = _everyones(packed.double().to(self.engine.device)).cpu().tolist()
        if any(row[-1] for row in rows):
            return self._said(step, *self._tested(faulty))
        if self._all_alike(rows):
            self._right = step
            return None
        return self._said(step, *self._proven(batch, own, other))

    def _computed(self, batch: Step, turn: int) -> GradientDigest:
        """Of the first micro-batch of the data rank that is `turn` further."""
        if not turn or self.engine.topology.layout.samples == 1:
            return gradient_digest(self.engine, batch.micro_batches[:1])
        return gradient_digest(self.engine, self._turned(batch, turn))

    def _turned(self, batch: Step, turn: int) -> Sequence[MicroBatch]:
        ranks = self.engine.topology.layout.samples
        shape = 1, ranks, self._micro_batch
        positions = batch.positions[: ranks * self._micro_batch].reshape(shape)
        return self.loader.read(np.roll(positions, -turn, 1).ravel())

    def _all_alike(self, rows: Sequence[Sequence[float]]) -> bool:
        """Whether everyone's samples gave the same on the rank before it."""
        layout = self.engine.topology.layout
        held = [(_unpacked(row[:WIDTH], row[-2]), _unpacked(row[WIDTH : 2 * WIDTH], row[-2])) for row in rows]
        for ranks in layout.groups("data"):
            for place, rank in enumerate(ranks):
                by = ranks[(place - layout.context) % len(ranks)]
                if not alike(held[rank][0], held[by][1], self._exact):
                    return False
        return True

    def _tested(self, faulty: str) -> Told:
        everyone = gathered((socket.gethostname(), faulty))
        found = {rank: text for rank, (_, text) in enumerate(everyone) if text}
        hosts = [host for host, _ in everyone]
        reason = f"{ranks_on(list(found), hosts)}: {next(iter(found.values()))}"
        return "persistent", list(found), hosts, reason

    def _proven(self, batch: Step, own: GradientDigest, other: GradientDigest) -> Told:
        """Verdict, ranks and a sentence, from computing both once more, and on a third rank."""
        layout = self.engine.topology.layout
        others = layout.samples - 1
        further = [self._computed(batch, turn) for turn in range(2, 1 + min(TURNS, others))]
        turns = [other, *further] if others else []
        again, other_again = self._computed(batch, 0), self._computed(batch, 1)
        faulty = wrong_product(self._model, layout.tensor, self._dtype, self.engine.device)
        digests = [self._summed(digest) for digest in (own, again, *turns)]
        flickers = not alike(self._summed(other), self._summed(other_again), self._exact)
        everyone = gathered((socket.gethostname(), digests, flickers, faulty, _unlike(own, again)))
        if any(host[3] for host in everyone):
            return self._tested(faulty)
        hosts = [host for host, *_ in everyone]
        told = {rank: held for rank, (_, held, *_) in enumerate(everyone)}
        proof = prove(told, layout.groups("data"), layout.context, self._exact)
        where = "" if proof is None or not proof.proven else everyone[proof.ranks[0]][4]
        if proof is not None:  # what one of a replica computes wrong changes the gradients of others
            proof = proof._replace(ranks=layout.replicas(proof.ranks))
        what = "a micro-batch computed again gives another gradient"
        if proof is not None and proof.proven and not proof.lasting:
            reason = f"{what}{where}: {ranks_on(proof.ranks, hosts)}, by chance"
            return "transient", list(proof.ranks), hosts, reason
        if flickering := [rank for rank, held in enumerate(everyone) if held[2]]:
            flickering = list(layout.replicas(flickering))
            who = ranks_on(flickering, hosts)
            return "transient", flickering, hosts, f"{what} on another rank: {who}, by chance"
        if proof is None:
            return "transient", [], hosts, f"{what}, not once more: which rank was wrong is not known"
        who = ranks_on(proof.ranks, hosts)
        if proof.proven:
            return "persistent", list(proof.ranks), hosts, f"{what}: {who} every time, other ranks do not"
        reason = f"{what}: {who} get different results for the same samples, every time"
        return "persistent", [], hosts, reason

    def _summed(self, digest: GradientDigest) -> Digest:
        return _unpacked(_packed(digest).tolist(), self._maker)

    def _said(
        self, step: int, verdict: str, ranks: list[int], hosts: Sequence[str], reason: str
    ) -> HardwareFault:
        """Told, and counted."""
        self._again = step + WATCHED
        where = sorted({hosts[rank] for rank in ranks})
        fault = HardwareFault(self._right, verdict == "persistent", ranks, where, reason)
        fault = self._counts.counted(fault, step)
        verdict = "persistent" if fault.lasting else verdict
        theirs = [hosts[rank] for rank in fault.ranks]
        self.log.emit(
            ReplayDiffers(
                step=step, verdict=verdict, ranks=list(fault.ranks), hosts=theirs, reason=fault.reason
            ),
            say=True,
        )
        return fault


def _packed(digest: GradientDigest) -> Tensor:
    """fp64 [WIDTH], on the CPU."""
    bits = int(fingerprint([digest.bits]))
    slots = torch.zeros(SLOTS, dtype=torch.float64)
    slots.index_add_(0, torch.arange(len(digest.checks)) % SLOTS, digest.checks)
    halves = torch.tensor([bits >> 32 & 0xFFFFFFFF, bits & 0xFFFFFFFF], dtype=torch.float64)
    return torch.cat((halves, slots, digest.squares.sum()[None]))


def _unpacked(row: Sequence[float], maker: float) -> Digest:
    return Digest(tuple(row[2 : 2 + SLOTS]), (row[-1],), (int(row[0]), int(row[1])), int(maker))


def _everyones(row: Tensor) -> Tensor:
    """fp64 [ranks, numbers]."""
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows)


def _unlike(one: GradientDigest, two: GradientDigest) -> str:
    """The last parameter, the first that the backward pass comes to, whose gradients differ: the end of a phrase."""
    odd = (one.bits != two.bits).nonzero().flatten().tolist()
    return f" ({one.names[odd[-1]]} and {len(odd) - 1} more parameters)" if odd else ""
