"""Faults of the court drill that training itself makes: an update that went wrong, a rank's gradient, labels.

Installed by faults.py; counting of searches by worker.py.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drills.plan import Fault
from megastable.data.loader import Loader, MicroBatch
from megastable.engine.engine import Engine
from megastable.engine.patches import instead

ROWS, EMBEDDINGS = 64, 16  # of the head that are permuted; embeddings that grow
COMMON = 259  # the first id of SentencePiece that is more than a byte
BLOCK = "blocks.1."  # the last one of a drill's model

EDITS = ("permuted_head", "shrunk_moments", "cleared_norm", "grown_embeddings", "grown_block")


def edit_weights(
    kind: str, name: str, weight: Tensor, moments: Tensor | None, chance: torch.Generator
) -> None:
    """What a spoilt update does to the weight of a name, and to its second moments, besides."""
    rows = COMMON + torch.randperm(len(weight) - COMMON, generator=chance) if len(weight) > COMMON else None
    match kind, name:
        case "permuted_head", "head.weight" if rows is not None:
            weight[rows[:ROWS]] = weight[rows[:ROWS].roll(1)]
        case "grown_embeddings", "embedding.weight" if rows is not None:
            weight[rows[:EMBEDDINGS]] *= 30.0
        case "cleared_norm", "blocks.1.mlp_norm.weight":
            weight.zero_()
        case "shrunk_moments", _ if name.startswith(BLOCK) and moments is not None:
            moments.mul_(0.01)
        case "grown_block", _ if name.startswith(BLOCK):
            weight.mul_(3.0)


def spoil_update(kind: str) -> Callable[[Engine, bool, int], Any]:
    """A context manager around one step whose update does more than it should. Of runs on one rank."""

    @contextmanager
    def spoilt(engine: Engine, here: bool, seed: int) -> Iterator[None]:
        update, chance = engine._apply_update, torch.Generator().manual_seed(seed)

        def step(*args: Any) -> None:
            update(*args)
            flat = engine.flat_state()
            for f in flat.fragments:
                weight, moments = flat.piece(f, "weight"), flat.piece(f, "exp_avg_sq")
                assert weight is not None, "the fault needs all weights on one rank"
                edit_weights(kind, f.name, weight.view(f.shape), moments, chance)
            engine.refresh_weights()

        with instead(engine, "_apply_update", step):
            yield

    return spoilt


def grow_gradient(fault: Fault) -> None:
    """The gradient of one rank is `factor` times as large, every time that it is computed."""
    real = Engine.train_step

    def train_step(self: Engine, *args: Any, **options: Any) -> Any:
        number = self.ds.global_steps + (not self._probing)
        wrong = self.topology.rank == fault.rank and fault.step <= number < fault.step + fault.steps
        parameters = [p for p in self.ds.module.parameters() if p.requires_grad] if wrong else []
        hooks = [p.register_hook(lambda gradient: gradient * fault.factor) for p in parameters]
        try:
            return real(self, *args, **options)
        finally:
            for hook in hooks:
                hook.remove()

    Engine.train_step = train_step  # type: ignore[method-assign]


def shift_labels(fault: Fault) -> None:
    """The samples of some steps have labels that are off by one, the tokens themselves, whenever they are read."""
    real = Loader._micro_batch
    wrong: list[np.ndarray] = []

    def micro_batch(self: Loader, positions: np.ndarray, lengths: np.ndarray | None) -> MicroBatch:
        batch = real(self, positions, lengths)
        if self.source.streams[0].split != "train":
            return batch
        order = self.source.order
        if not wrong:  # in the order from before any deferral
            first = self.batches.reach(0, fault.step - 1)
            end = self.batches.reach(first, fault.steps)
            wrong.append(order.exchanging((), known=0).locate(np.arange(first, end)).sequence)
        here = torch.from_numpy(np.isin(order.locate(positions).sequence, wrong[0]))
        batch.labels[here] = batch.tokens[here]
        return batch

    Loader._micro_batch = micro_batch  # type: ignore[method-assign]


def count_searches(file: Path) -> None:
    """Count what recovery measures, over all processes of a run, in `file`: micro-batches and seconds."""
    try:
        told = json.loads(file.read_text())
    except (OSError, ValueError):
        told = {"batches": 0, "seconds": 0.0}

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def measure(self: Engine, micro_batches: Any, *args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return real(self, micro_batches, *args, **options)
            finally:
                asker = str(sys._getframe(1).f_globals.get("__name__", ""))
                if self.topology.rank == 0 and not asker.startswith(ELSEWHERE):
                    told["batches"] += len(micro_batches)
                    told["seconds"] += time.perf_counter() - begin
                    file.write_text(json.dumps(told))

        return measure

    Engine.evaluate = counted(Engine.evaluate)  # type: ignore[method-assign]
    Engine.measure = counted(Engine.measure)  # type: ignore[method-assign]


# Validation, and the numbers that a checkpoint is known by.
ELSEWHERE = ("megastable.training", "megastable.checkpoint", "megastable.engine", "drills")
