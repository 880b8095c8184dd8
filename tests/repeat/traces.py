"""Traces made by hand, of any layout, in the order in which a pipeline computes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megastable_tools.repeat.trace_file import StepTrace, TracedOperation

PARTS = ("mlp.down", "attention.out", "mlp.gate_up")  # not in the order of the alphabet


def of_rank(stage: int, stages: int, micro_batches: int) -> list[TracedOperation]:
    """What a rank does in a step: a stage that is not the last one does all forward passes before the first backward
    pass. Two blocks for each stage."""
    blocks = [2 * stage, 2 * stage + 1]

    def forward(m: int) -> list[TracedOperation]:
        return [
            TracedOperation("forward", m, 1 + n, f"blocks.{n}.{part} output")
            for n in blocks for part in PARTS
        ]  # fmt: skip

    def backward(m: int) -> list[TracedOperation]:
        return [
            TracedOperation("backward", m, -1 - n, f"blocks.{n}.{part} output gradient")
            for n in reversed(blocks) for part in reversed(PARTS)
        ]  # fmt: skip

    data = [TracedOperation("data", m, 0, "tokens") for m in range(micro_batches)]
    if stage == stages - 1:
        passes = [o for m in range(micro_batches) for o in (*forward(m), *backward(m))]
    else:
        passes = [o for m in range(micro_batches) for o in forward(m)]
        passes += [o for m in range(micro_batches) for o in backward(m)]
    gradients = [TracedOperation("reduction", -1, 1 + n, f"gradient of blocks.{n}.weight") for n in blocks]
    norm = TracedOperation("norm", -1, 9, "gradient norm")
    masters = [TracedOperation("update", -1, 1 + n, f"fp32 master of blocks.{n}.weight") for n in blocks]
    copies = [TracedOperation("weights", -1, 1 + n, f"computing copy of blocks.{n}.weight") for n in blocks]
    return [*data, *passes, *gradients, norm, *masters, *copies]


def steps_of(count: int, stages: int, data: int, micro_batches: int, seed: int = 0) -> list[list[StepTrace]]:
    """Steps 1 to `count` of stages x data ranks, stage by stage, with random fingerprints."""
    random = np.random.default_rng(seed)
    found = []
    for step in range(1, count + 1):
        ranks = []
        for rank in range(stages * data):
            operations = tuple(of_rank(rank // data, stages, micro_batches))
            ranks.append(StepTrace(step, operations, random.integers(-(2**63), 2**63, len(operations))))
        found.append(ranks)
    return found


def changed(trace: StepTrace, where: Sequence[int]) -> StepTrace:
    """The same with other fingerprints at these operations."""
    prints = trace.fingerprints.copy()
    prints[list(where)] ^= 1
    return StepTrace(trace.step, trace.operations, prints, trace.moments, trace.losses)
