"""The order of the passes of interleaved 1F1B, in which every pipeline stage holds several chunks of the model. Pure.

With p stages and v chunks a micro-batch goes round the stages v times. A stage takes p micro-batches through its first
chunk, the same ones through its second, and so on; backward passes go the other way round. It begins with as many
forward passes as fill the pipeline, and then does one of each in turn: the pipeline fills and drains in chunks, so the
bubble is (p - 1) (F + B) / v in place of (p - 1) (F + B). Source: Narayanan et al., arXiv:2104.04473, section 2.2.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple


class Pass(NamedTuple):
    """The forward or the backward pass of a micro-batch through one chunk of a stage."""

    is_forward: bool
    chunk: int
    micro_batch: int


def count_first_passes(stages: int, stage: int, chunks: int, micro_batches: int) -> int:
    """Forward passes of a stage before its first backward pass but one: in flight are one more."""
    whole_rounds = -(-micro_batches // stages)
    return min(2 * (stages - 1 - stage) + (chunks - 1) * stages, whole_rounds * stages * chunks)


def list_passes(stages: int, stage: int, chunks: int, micro_batches: int) -> list[Pass]:
    """The passes of `stage` in a step. Those of a chunk go by micro-batch, forward and backward.

    Micro-batches that are missing from the last round of `stages` leave gaps: what is left is still an order in which
    every pass finds what it needs.
    """
    forward_passes, backward_passes = (
        [
            Pass(is_forward, chunk if is_forward else chunks - 1 - chunk, first_batch + place)
            for first_batch in range(0, micro_batches, stages)
            for chunk in range(chunks)
            for place in range(stages)
        ]
        for is_forward in (True, False)
    )
    first_count = count_first_passes(stages, stage, chunks, micro_batches)
    turns = zip(forward_passes[first_count:], backward_passes, strict=False)
    left_count = len(backward_passes) - first_count
    all_passes: Iterator[Pass] = chain(
        forward_passes[:first_count], chain.from_iterable(turns), backward_passes[left_count:]
    )
    return [one_pass for one_pass in all_passes if one_pass.micro_batch < micro_batches]
