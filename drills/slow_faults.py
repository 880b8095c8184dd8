"""Faults that act a little at every step, until the loss shows them: what slow signals are to warn of before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drills.plan import Fault
from megastable.data.loader import MicroBatch
from megastable.engine.engine import Engine
from megastable.parallel.fragments import Fragment, rectangles

DYING = "blocks.1."  # the last block of a drill's model
RARE = 512  # token ids from here on, half of the vocabulary: those of rare pieces of words
# Share of them that come at first, three tokens of a step: of two some looks see none, of five the loss shows it soon.
TRICKLE = 0.006
FEW, RAMP = 100, 100  # for so many steps; then ever more, up to all

Before = Callable[[Engine, int], None]  # (engine, its step): what happens before it


def _before_steps(fault: Fault, happens: Before) -> None:
    real = Engine.train_step

    def train_step(self: Engine, *args: Any, **options: Any) -> Any:
        step = self.ds.global_steps + 1
        if not self._probing and fault.step <= step < fault.step + fault.steps:
            happens(self, step)
            self.refresh_weights()
        return real(self, *args, **options)

    Engine.train_step = train_step  # type: ignore[method-assign]


def growing_gains(fault: Fault) -> None:
    """The gains of QK-norm: attention gets ever sharper."""

    def happens(engine: Engine, step: int) -> None:
        for _, piece in _weights(engine, "q_norm.weight", "k_norm.weight"):
            piece.mul_(fault.factor)

    _before_steps(fault, happens)


def growing_logits(fault: Fault) -> None:
    """The projections to q and k."""

    def happens(engine: Engine, step: int) -> None:
        for f, piece in _weights(engine, "attention.qkv.weight"):
            for r in rectangles(f):
                rows = torch.arange(r.rows.start, r.rows.stop) < sum(f.sections[:2])
                r.of(piece)[rows] *= fault.factor

    _before_steps(fault, happens)


def growing_outputs(fault: Fault) -> None:
    """The output weights of a block's MLP."""

    def happens(engine: Engine, step: int) -> None:
        for _, piece in _weights(engine, f"{DYING}mlp.down.weight"):
            piece.mul_(fault.factor)

    _before_steps(fault, happens)


def dying_block(fault: Fault) -> None:
    """The output weights of a block are not trained any more, and decay."""
    first: dict[tuple[int, int], Tensor] = {}

    def happens(engine: Engine, step: int) -> None:
        for f, piece in _weights(engine, f"{DYING}attention.out.weight", f"{DYING}mlp.down.weight"):
            held = first.setdefault((f.group, f.offset), piece.clone())
            piece.copy_(held * fault.factor ** (step - fault.step + 1))

    _before_steps(fault, happens)


def rare_tokens(fault: Fault) -> None:
    """Some tokens are absent (others stand in for them), then come one by one, then ever more often."""
    real = Engine.train_step

    def train_step(self: Engine, micro_batches: Sequence[MicroBatch], *args: Any, **options: Any) -> Any:
        share = share_of(self.ds.global_steps + 1, fault.step)
        written = [_written(m, share) for m in micro_batches]
        return real(self, written, *args, **options)

    Engine.train_step = train_step  # type: ignore[method-assign]


def share_of(step: int, begin: int) -> float:
    """The share of rare tokens that are not replaced."""
    many = step - begin - FEW
    return 0.0 if step < begin else TRICKLE if many < 0 else min(1.0, TRICKLE + many / RAMP)


def _written(batch: MicroBatch, share: float) -> MicroBatch:
    whole = torch.cat((batch.tokens, batch.labels[:, -1:]), 1)
    # By the samples' positions: the same under every layout, and when a step is repeated.
    drawn = [
        torch.rand(whole.shape[1], generator=torch.Generator().manual_seed(p))
        for p in batch.positions.tolist()
    ]
    whole = torch.where((whole >= RARE) & (torch.stack(drawn) >= share), whole % RARE, whole)
    return replace(batch, tokens=whole[:, :-1].contiguous(), labels=whole[:, 1:].contiguous())


def _weights(engine: Engine, *endings: str) -> list[tuple[Fragment, Tensor]]:
    """The pieces of this rank's master weights of those names."""
    flat = engine.flat_state()
    found = [(f, flat.piece(f, "weight")) for f in flat.fragments if f.name.endswith(endings)]
    return [(f, piece) for f, piece in found if piece is not None]
