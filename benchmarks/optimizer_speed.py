"""Measure what optimizers add to a step: engines of the same model, in turns on the same batch.

    measured = measure([config, other], rounds=5)    # in a process group of one; CPU or GPU

Differences are taken within a round, so that the machine's other load affects all alike. The data are random tokens,
and the learning rate is nearly zero: the work does not depend on either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.common import machine
from megastable.config import deepspeed_json
from megastable.config.tree import RunConfig
from megastable.data.loader import MicroBatch
from megastable.engine.engine import Engine
from megastable.engine.measured import Measured
from megastable.parallel.layout import Layout
from megastable.parallel.topology import Topology

RATE = 1e-9
WARM = 2  # rounds before the measured ones: moments and kernels exist


@dataclass(frozen=True)
class OptimizerTime:
    """Seconds by round: of whole steps, and of their updates (clipping, optimizer, weights in compute precision)."""

    name: str
    steps: list[float]
    updates: list[float]

    def extra(self, first: OptimizerTime) -> tuple[float, float]:
        """What its step and its update take longer than `first`'s, as shares of its step: medians over rounds."""
        pairs = zip(self.steps, self.updates, first.steps, first.updates, strict=True)
        shares = [((step - s) / s, (update - u) / s) for step, update, s, u in pairs]
        return median(share for share, _ in shares), median(share for _, share in shares)


@dataclass(frozen=True)
class OptimizerTimes:
    """tokens: of a step, on the one rank."""

    times: list[OptimizerTime]
    tokens: int
    machine: dict[str, Any]


def measure(
    configs: Sequence[tuple[str, RunConfig]], rounds: int, advance: Callable[[], None] = lambda: None
) -> OptimizerTimes:
    """Times of named configs, which differ in their optimizer. model.vocab_size must be known."""
    engines = [_Timed(config) for _, config in configs]
    c = configs[0][1]
    t, length, vocabulary = c.train, c.model.sequence_length, c.model.vocab_size
    assert vocabulary is not None
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (t.global_batch, length + 1), generator=drawn)
    batches = [
        MicroBatch(tokens[i, :-1], tokens[i, 1:], i, None)
        for i in torch.arange(t.global_batch).view(-1, t.micro_batch)
    ]
    for number in range(WARM + rounds):
        for engine in engines:
            engine.step(batches, keep=number >= WARM)
            advance()
    times = [
        OptimizerTime(name, engine.steps, engine.updates)
        for (name, _), engine in zip(configs, engines, strict=True)
    ]
    return OptimizerTimes(times, t.global_batch * length, machine(engines[0].engine.device))


def steps_needed(candidates: int, rounds: int) -> int:
    """Number of calls of `advance` by `measure`."""
    return candidates * (WARM + rounds)


class _Timed:
    """An engine with stopwatches."""

    def __init__(self, config: RunConfig) -> None:
        self.engine = Engine(
            config, deepspeed_json.build(config, 1), Topology(Layout(), 0, config.run.timeout)
        )
        self.steps: list[float] = []
        self.updates: list[float] = []
        self._update, self._spent = self.engine._apply_update, 0.0
        self.engine._apply_update = self._timed  # type: ignore[method-assign]

    def _timed(self, measured: Measured, norm: Any) -> None:
        begin = self._now()
        self._update(measured, norm)
        self._spent = self._now() - begin

    def step(self, batches: Sequence[MicroBatch], *, keep: bool) -> None:
        begin = self._now()
        _, applied = self.engine.train_step(batches, RATE, lambda measured: measured.finite)
        assert applied, "the gate dropped a step of the benchmark"
        if keep:
            self.steps.append(self._now() - begin)
            self.updates.append(self._spent)

    def _now(self) -> float:
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
