"""Checks at the gate that the sum of the gradients is right, and that no rank's gradient stands out; a doubt is proven,
or removed, by repeating the step. Collective."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from megastable.base.collectives import gathered
from megastable.base.deterministic import exact
from megastable.base.hardware import kind_of
from megastable.base.text import ranks_on
from megastable.config.tree import RunConfig
from megastable.data.loader import Loader, Step
from megastable.engine.engine import Engine
from megastable.engine.measured import Measured
from megastable.engine.self_test import wrong_product
from megastable.engine.watch import Watch
from megastable.guard.gradient_consistency import (
    Consistency,
    Doubt,
    bound,
    rows,
    wrong_sums,
)
from megastable.hardware.gradient_proof import Digest, GradientFault, causes, prove
from megastable.hardware.hardware_fault import HardwareFault
from megastable.model.kernels import DTYPES
from megastable.run.events.stability_events import GradientsDoubted
from megastable.run.log import RunLog

TURNS = 2  # other ranks that compute the same samples: with a third result it is known which one is wrong


@dataclass(frozen=True)
class Suspicion:
    """Why an update was refused. sums: data ranks that received a wrong sum; doubts: about gradients, of data ranks or
    (`of`) of ranks; messages: whether one between stages was wrong."""

    sums: list[int]
    doubts: list[Doubt]
    of: str = "data rank"
    messages: bool = False

    @property
    def told(self) -> str:
        """A sentence."""
        messages = ["a message between stages did not arrive as it was sent"] if self.messages else []
        sums = [f"data rank {d} received what is not the sum of the gradients" for d in self.sums]
        doubts = [f"the gradient of {self.of} {doubt.rank} {doubt.reason}" for doubt in self.doubts]
        return "; ".join([*messages, *sums, *doubts])


class GradientWatch(Watch):
    """Of one process. Where nothing measures gradients it does nothing. Every process begins without a baseline.
    Its numbers are not in the ballot but in `Measured.gradients`."""

    name = "gradients"

    def __init__(self, config: RunConfig, engine: Engine, loader: Loader, log: RunLog) -> None:
        self.engine, self.loader, self.log = engine, loader, log
        self.local = engine.zero.local
        mutual = engine.topology.layout.data > 1
        self.usual, self._of = Consistency(mutual), "data rank" if mutual else "rank"
        self._exact = exact(config.run.deterministic, engine.device)
        self._micro_batch = config.train.micro_batch
        self._maker = kind_of(engine.device)
        self._cleared = -1  # a step that a repetition has cleared
        self._product = partial(
            wrong_product,
            config.model,
            engine.topology.layout.tensor,
            DTYPES[config.precision.kind],
            engine.device,
        )

    def judge(self, measured: Measured, step: int) -> Suspicion | None:
        """What the columns of a step show, before its update."""
        if self.local is None:
            return None
        self.local.keep()
        cleared, self._cleared = self._cleared == step, -1
        found = rows(measured.gradients)
        sums = [] if cleared else wrong_sums(found)
        doubts = [] if cleared else self.usual.doubts(found)
        return Suspicion(sums, doubts, self._of) if sums or doubts else None

    def after_update(self, measured: Measured, step: int, rate: float) -> None:
        if self.local is not None and measured.finite:
            self.usual.accept(rows(measured.gradients))

    def rewound(self, step: int, saved: Mapping[str, Any] | None) -> None:
        if self.local is not None:
            self.local.forget()  # the next step may be the last one once more

    def prove(self, suspicion: Suspicion, batch: Step, step: int) -> HardwareFault | None:
        """Whether hardware is the cause of a refused update; if not, the same step is not refused again. The state must
        be that before the step."""
        if suspicion.sums:
            ranks, hosts, reason = self._receivers(suspicion.sums)
            verdict = "sum" if ranks else "data"
        else:
            verdict, ranks, hosts, reason = self._repeated(suspicion.doubts, batch)
        kinds = sorted({str(doubt.kind) for doubt in suspicion.doubts})
        theirs = [hosts[rank] for rank in ranks]
        self.log.emit(
            GradientsDoubted(
                step=step, verdict=verdict, kinds=kinds, ranks=ranks, hosts=theirs, reason=reason
            ),
            say=True,
        )
        if verdict != "data":
            lasting, link = verdict == "persistent", verdict == "sum"
            return HardwareFault(step - 1, lasting, ranks, sorted(set(theirs)), reason, link)
        self._cleared = step
        self.usual.clear(suspicion.doubts)
        return None

    def _receivers(self, slices: Sequence[int]) -> tuple[list[int], list[str], str]:
        """The ranks that hold a wrong sum, the hosts of all, and a sentence."""
        assert self.local is not None
        everyone = gathered((socket.gethostname(), self._digest(), float(self.local.total)))
        layout, found, hosts = self.engine.topology.layout, {}, [host for host, *_ in everyone]
        for ranks in layout.groups("data"):
            for d in slices:
                sent = sum(everyone[rank][1][0][d] for rank in ranks)
                squares = sum(everyone[rank][1][1][d] for rank in ranks)
                excess = sent - everyone[ranks[d]][2]
                if not abs(excess) <= bound(squares, len(ranks)):
                    found[ranks[d]] = abs(excess), bound(squares, len(ranks))
        texts = [
            f"what {ranks_on([rank], hosts)} received is off by {excess:.3g}, where rounding explains {most:.2g}"
            for rank, (excess, most) in sorted(found.items())
        ]
        if not texts:
            return (
                [],
                hosts,
                "the checksums of all groups together are off by more than rounding, those of none alone",
            )
        text = f"the sum of the gradients is not that of its parts, a link or a chip lies: {'; '.join(texts)}"
        return sorted(found), hosts, text

    def _repeated(self, doubts: Sequence[Doubt], batch: Step) -> tuple[str, list[int], list[str], str]:
        """Verdict, ranks, the hosts of all and a sentence, from repeating the step."""
        assert self.local is not None
        layout = self.engine.topology.layout
        digests, sent = [self._digest()], [self._sent()]
        for turn in range(1 + min(TURNS, layout.samples - 1)):
            shape = -1, layout.samples, self._micro_batch
            turned = np.roll(batch.positions.reshape(shape), -turn, 1).ravel()
            self.engine.measure(self.loader.read(turned) if turn else batch.micro_batches)
            digests.append(self._digest())
            sent.append(self._sent())
        moved = {stage for stage, mark in sent[0].items() if sent[1].get(stage) != mark}
        everyone = gathered((socket.gethostname(), digests, moved, self._product()))
        told = {rank: held for rank, (_, held, *_) in enumerate(everyone)}
        proof = prove(told, layout.groups("data"), layout.context, self._exact)
        why, hosts = Suspicion([], list(doubts), self._of).told, [host for host, *_ in everyone]
        if odd := [rank for rank, (*_, wrong) in enumerate(everyone) if wrong]:
            return "persistent", odd, hosts, f"{why}: {ranks_on(odd, hosts)}: {everyone[odd[0]][3]}"
        if proof is None:
            if layout.samples == 1:
                reason = (
                    "so it is the data, chance, or a chip that does so every time, which nobody else can tell"
                )
            else:
                reason = "and on another rank, so it is the data, or chance"
            return "data", [], hosts, f"{why}: the same when repeated, {reason}; the step is done again"
        proof = self._traced(proof, [moved for *_, moved, _ in everyone])
        who = ranks_on(proof.ranks, hosts)
        if not proof.lasting:
            return "transient", list(proof.ranks), hosts, f"{why}: {who} got {proof.what}, not when repeated"
        if proof.proven:
            return (
                "persistent",
                list(proof.ranks),
                hosts,
                f"{why}: {who} gets {proof.what} every time, other ranks do not",
            )
        return "persistent", [], hosts, f"{why}: {who} get different results for the same samples, every time"

    def _sent(self) -> dict[int, int]:
        """Fingerprints of what was sent in the last pass, by the stage that received it."""
        messages = self.engine.zero.messages
        return {} if messages is None else messages.by_stage()[0]

    def _traced(self, proof: GradientFault, moved: Sequence[set[int]]) -> GradientFault:
        """Those that may have caused it, in place of all whose gradient was another one. moved: by rank, stages to
        which it sent something else."""
        layout = self.engine.topology.layout
        if proof.lasting or (layout.pipeline > 1 and self.engine.zero.messages is None):
            return proof._replace(ranks=layout.replicas(proof.ranks))
        if layout.pipeline == 1:
            return proof
        tied = self.engine.tied is not None
        return proof._replace(ranks=causes(proof.ranks, layout.groups("pipeline"), moved, tied))

    def _digest(self) -> Digest:
        """Of the last backward pass."""
        assert self.local is not None
        checks, squares = self.local.digest.tolist()
        return Digest(tuple(checks), tuple(squares), maker=self._maker)
