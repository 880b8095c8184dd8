"""Checks at the gate that the sum of the gradients is right, that no rank's gradient stands out, and that pipeline
stages received what was sent to them; a doubt is proven, or removed, by repeating the step. Collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megastable.base.collectives import gathered
from megastable.base.hardware import kind_of
from megastable.data.loader import Step
from megastable.engine.engine import Engine
from megastable.engine.gradient_digest import Digest
from megastable.engine.local_gradients import bound_rounding, read_columns
from megastable.engine.measured import Measured
from megastable.engine.watch import Watch
from megastable.hardware.gradient_consistency import Consistency, Doubt, find_wrong_sums
from megastable.hardware.hardware_fault import FaultLog, HardwareFault
from megastable.hardware.recomputation import GradientFault, Recomputation, find_causes
from megastable.run.events.stability_events import GradientsDoubted, MessagesDiffer


class Suspicion(NamedTuple):
    """Why an update was refused: a sentence. sums: data ranks that received a wrong sum; doubts: about gradients;
    messages: whether one between stages was wrong."""

    reason: str
    sums: Sequence[int] = ()
    doubts: Sequence[Doubt] = ()
    messages: bool = False


class MessageWatch(Watch):
    """Of one process. Without pipeline parallelism it does nothing."""

    name = "messages"

    def __init__(self, engine: Engine, faults: FaultLog) -> None:
        self.engine, self._faults, self.messages = engine, faults, engine.zero.messages

    def ballot(self, step: int) -> Sequence[float]:
        """What was sent less what has arrived."""
        return () if self.messages is None else (self.messages.left,)

    def judge(self, measured: Measured) -> Suspicion | None:
        """Whether a message was changed on its way."""
        reason = "a message between stages did not arrive as it was sent"
        return Suspicion(reason, messages=True) if any(measured.ballot.get(self.name, ())) else None

    def prove(self, suspicion: Suspicion, batch: Step, step: int) -> HardwareFault:
        """Which one. Collective."""
        assert self.messages is not None
        everyone, found = gathered(self.messages.by_stage()), dict[int, int]()  # sender, by receiver
        for ranks in self.engine.topology.layout.groups("pipeline"):
            for stage, rank in enumerate(ranks):
                for other, arrived in everyone[rank][1].items():
                    if everyone[ranks[other]][0].get(stage) != arrived:
                        found[rank] = ranks[other]
        name = self._faults.name_ranks
        pairs = [f"{name([to])} received from {name([by])}" for to, by in found.items()]
        what = ", and what ".join(pairs) or "a stage received from another one"
        reason = f"what {what} is not what was sent: a link or a chip lies"
        fault = self._faults.make_fault(step - 1, sorted(found), reason, link=True)
        return self._faults.report(MessagesDiffer, step, fault)


class GradientWatch(Watch):
    """Of one process. Where nothing measures gradients it does nothing. Every process begins without a baseline.
    Its numbers are not in the ballot but in `Measured.gradients`."""

    name = "gradients"

    def __init__(self, engine: Engine, recomputation: Recomputation) -> None:
        self.engine, self._recomputation, self._faults = engine, recomputation, recomputation.faults
        self.local = engine.zero.local
        mutual = engine.topology.layout.data > 1
        self.baseline, self._of = Consistency(mutual), "data rank" if mutual else "rank"
        self._cleared = -1  # a step that a repetition has cleared

    def judge(self, measured: Measured, step: int) -> Suspicion | None:
        """What the columns of a step show, before its update."""
        if self.local is None:
            return None
        self.local.keep()
        cleared, self._cleared = self._cleared == step, -1
        if cleared:
            return None
        found = read_columns(measured.gradients)
        sums, doubts = find_wrong_sums(found), self.baseline.find_doubts(found)
        reasons = [f"data rank {d} received what is not the sum of the gradients" for d in sums]
        reasons += [f"the gradient of {self._of} {doubt.rank} {doubt.reason}" for doubt in doubts]
        return Suspicion("; ".join(reasons), sums, doubts) if reasons else None

    def after_update(self, measured: Measured, step: int, rate: float) -> None:
        if self.local is not None and measured.finite:
            self.baseline.accept(read_columns(measured.gradients))

    def rewound(self, step: int, saved: Mapping[str, Any] | None) -> None:
        if self.local is not None:
            self.local.forget()  # the next step may be the last one once more

    def prove(self, suspicion: Suspicion, batch: Step, step: int) -> HardwareFault | None:
        """Whether hardware is the cause of a refused update; if not, the same step is not refused again. The state must
        be that before the step."""
        kinds = sorted({str(doubt.kind) for doubt in suspicion.doubts})
        look = self._find_receivers if suspicion.sums else self._repeat
        fault = look(suspicion, batch, step)
        if fault is not None:
            return self._faults.report(GradientsDoubted, step, fault, verdict=fault.verdict, kinds=kinds)
        cleared = self._faults.make_fault(step, (), self._explain_cleared(suspicion))
        self._faults.report(GradientsDoubted, step, cleared, verdict="data", kinds=kinds)
        self._cleared = step
        self.baseline.clear(suspicion.doubts)
        return None

    def _explain_cleared(self, suspicion: Suspicion) -> str:
        if suspicion.sums:
            return "the checksums of all groups together are off by more than rounding, those of none alone"
        why = "and on another rank, so it is the data, or chance"
        if not self._recomputation.others:
            why = "so it is the data, chance, or a chip that does so every time, which nobody else can tell"
        return f"{suspicion.reason}: the same when repeated, {why}; the step is done again"

    def _find_receivers(self, suspicion: Suspicion, batch: Step, step: int) -> HardwareFault | None:
        """The ranks that hold a wrong sum."""
        assert self.local is not None
        everyone, found = gathered((self._digest(), float(self.local.total))), dict[int, str]()
        for ranks in self.engine.topology.layout.groups("data"):
            for d in suspicion.sums:
                digests = [everyone[rank][0] for rank in ranks]
                excess = abs(sum(digest.checks[d] for digest in digests) - everyone[ranks[d]][1])
                most = bound_rounding(sum(digest.squares[d] for digest in digests), len(ranks))
                if not excess <= most:
                    who = self._faults.name_ranks([ranks[d]])
                    off = f"off by {excess:.3g}, where rounding explains {most:.2g}"
                    found[ranks[d]] = f"what {who} received is {off}"
        if not found:
            return None
        texts = "; ".join(text for _, text in sorted(found.items()))
        reason = f"the sum of the gradients is not that of its parts, a link or a chip lies: {texts}"
        return self._faults.make_fault(step - 1, sorted(found), reason, link=True)

    def _repeat(self, suspicion: Suspicion, batch: Step, step: int) -> HardwareFault | None:
        """What repeating the step shows."""
        recomputation, first, sent = self._recomputation, self._digest(), self._sent()
        self.engine.measure(batch.micro_batches)
        computed, again = [[first, self._digest()]], self._sent()
        changed = {stage for stage, mark in sent.items() if again.get(stage) != mark}
        for turn in range(1, 1 + recomputation.others):
            self.engine.measure(recomputation.read_turned(batch.positions, turn))
            computed.append([self._digest()])
        proof, moved = recomputation.compare(computed, changed)
        if proof is None:
            return None
        return recomputation.conclude(self._find_origin(proof, moved), step - 1, suspicion.reason)

    def _sent(self) -> dict[int, int]:
        """Fingerprints of what was sent in the last pass, by the stage that received it."""
        messages = self.engine.zero.messages
        return {} if messages is None else messages.by_stage()[0]

    def _find_origin(self, proof: GradientFault, moved: Sequence[set[int]]) -> GradientFault:
        """Those that may have caused it, in place of all whose gradient was another one. moved: by rank, stages to
        which it sent something else."""
        layout = self.engine.topology.layout
        if proof.product or (layout.pipeline == 1 and not proof.lasting):
            return proof
        if proof.lasting or self.engine.zero.messages is None:
            return proof._replace(ranks=layout.replicas(proof.ranks))
        tied = self.engine.tied is not None
        return proof._replace(ranks=find_causes(proof.ranks, layout.groups("pipeline"), moved, tied))

    def _digest(self) -> Digest:
        """Of the last backward pass."""
        assert self.local is not None
        checks, squares = self.local.digest.tolist()
        return Digest(tuple(checks), tuple(squares), maker=kind_of(self.engine.device))
