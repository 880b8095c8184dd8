"""Trains a branch of the run: some steps on given samples, of which nothing remains once the state is restored.
Collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.base.collectives import agree
from megastable.config.tree import RunConfig
from megastable.data.loader import Loader
from megastable.engine.engine import Engine
from megastable.optim.schedule import scheduled_rate

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class BranchStart(NamedTuple):
    """Where a branch begins: applied updates so far, and the tokens of them."""

    updates: int
    trained_tokens: int


class TrainedBranch(NamedTuple):
    """Mean loss (nats) and gradient norm of every step of a branch; [steps]. measured: losses of some samples at its
    end; [n], nats."""

    losses: Floats
    norms: Floats
    measured: Floats = np.empty(0)


def train_branch(
    config: RunConfig,
    engine: Engine,
    loader: Loader,
    start: BranchStart,
    batches: Sequence[Int64s],
    limit_rate: Callable[[int, float], float],
    tell_progress: Callable[[int], None] = lambda step: None,
    applied: Sequence[bool] | None = None,
) -> TrainedBranch:
    """Train on `batches` from the state that the engine holds, which is `start`. Only finite updates are applied. The
    caller restores the engine's state and counters.

    Args:
        batches: positions of the samples of each step, int64 [global batch].
        limit_rate: the rate after cuts and caps, from the applied updates and the scheduled rate.
        tell_progress: called before each step with its number, from 0.
        applied: which updates may be; None: all.

    Raises:
        DataError: on every rank, if one cannot read its part.
    """
    updates, tokens = start
    before = engine.measured, engine.applied, engine.kept, engine.counters_before
    losses, norms = list[float](), list[float]()
    try:
        for step, positions in enumerate(batches):
            tell_progress(step)
            micro_batches = agree(partial(loader.read, positions))
            size = positions.size * config.model.sequence_length
            rate = limit_rate(updates, scheduled_rate(config, updates, tokens, size))
            allowed = applied is None or applied[step]
            measured, done = engine.train_step(
                micro_batches, rate, lambda m, allowed=allowed: allowed and m.finite
            )
            updates, tokens = updates + done, tokens + done * size
            losses.append(measured.loss)
            norms.append(measured.grad_norm)
    finally:
        engine.measured, engine.applied, engine.kept, engine.counters_before = before
    return TrainedBranch(np.array(losses), np.array(norms))
