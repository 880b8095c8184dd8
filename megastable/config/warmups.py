"""Defines the warm-ups of batch size and sequence length: step functions of the data position. Pure.

The cursor alone decides how many samples a step trains on, and a sample's position into pieces of which length it is
cut. So a resumed or rewound run, one with other skips and one on other ranks trains on the same samples in the same
steps. Position x sequence length = tokens seen.

Batch size: as Megatron-LM's --rampup-batch-size. Sequence length: Li et al., arXiv:2108.06084, whose linear pacing is
rounded down to halvings of the full length: all pieces of a sample are equally long, and there are few lengths, each of
which is a change of the loss.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import Field, PositiveInt

from megastable_guard.section import Section


class BatchWarmup(Section):
    """The global batch grows from `start` to `train.global_batch` in equal increments, spread evenly over the first
    `tokens` of the run. `increment` divides the difference; every size that occurs is a multiple of `train.micro_batch`
    x the data-parallel ranks that do not share samples."""

    start: PositiveInt = Field(examples=[8])
    """The first global batch. [samples]"""
    tokens: PositiveInt = Field(examples=[1_000_000])
    """Position from which the global batch is `train.global_batch`. [tokens]"""
    increment: PositiveInt | None = Field(default=None, examples=[8])
    """By how much it grows at a time; null: `start`. [samples]"""


class SequenceWarmup(Section):
    """Samples of the first `tokens` of the run are cut into pieces that do not attend to each other (arXiv:2108.06084):
    `start` tokens long, then twice as long and so on, up to `model.sequence_length`, which is `start` times a power of
    2. No token is lost, and tokens per step stay the same."""

    start: PositiveInt = Field(examples=[64])
    """Length of the first pieces. [tokens]"""
    tokens: PositiveInt = Field(examples=[1_000_000])
    """Position from which samples are whole. [tokens]"""


@dataclass(frozen=True)
class Stages:
    """A step function of the data position: values[i] from position firsts[i] on; firsts ascend from 0."""

    firsts: tuple[int, ...]
    values: tuple[int, ...]

    @classmethod
    def of_constant(cls, value: int) -> Stages:
        return cls((0,), (value,))

    def value_at(self, position: int) -> int:
        return self.values[bisect_right(self.firsts, position) - 1]

    def from_position(self, position: int) -> Iterator[tuple[int, int | None]]:
        """The value at `position`, and each one after it, with the position at which it ends; None for the last."""
        stage_ends = (*self.firsts[1:], None)
        for stage_value, stage_end in zip(self.values, stage_ends, strict=True):
            if stage_end is None or position < stage_end:
                yield stage_value, stage_end

    # Of batch sizes

    def reach_after(self, cursor: int, steps: int) -> int:
        """The cursor after `steps` steps from `cursor` on, if nothing is skipped."""
        for batch_size, stage_end in self.from_position(cursor):
            steps_here = (
                steps if stage_end is None else min(steps, max(0, -((cursor - stage_end) // batch_size)))
            )
            cursor, steps = cursor + steps_here * batch_size, steps - steps_here
        return cursor

    def count_steps(self, cursor: int, end: int) -> int:
        """How many steps from `cursor` on are over at position `end`, if nothing is skipped."""
        step_count = 0
        for batch_size, stage_end in self.from_position(cursor):
            fitting_steps = max(0, (end - cursor) // batch_size)
            begun_steps = None if stage_end is None else max(0, -((cursor - stage_end) // batch_size))
            if begun_steps is None or fitting_steps < begun_steps:
                return step_count + fitting_steps
            cursor, step_count = cursor + begun_steps * batch_size, step_count + begun_steps
        return step_count


def stage_batches(full: int, warmup: BatchWarmup | None, sequence_length: int) -> Stages:
    """The global batch of the step that begins at a cursor. [samples]"""
    if warmup is None:
        return Stages.of_constant(full)
    sizes = tuple(range(warmup.start, full + 1, warmup.increment or warmup.start))
    each = (len(sizes) - 1) * sequence_length
    return Stages(tuple(-(-i * warmup.tokens // each) for i in range(len(sizes))), sizes)


def stage_pieces(full: int, warmup: SequenceWarmup | None) -> Stages:
    """The length of the pieces of the sample at a position, whose length is `full`. [tokens]"""
    if warmup is None:
        return Stages.of_constant(full)
    lengths = tuple(warmup.start << i for i in range((full // warmup.start).bit_length()))
    each = (full - warmup.start) * full
    return Stages(tuple(-(-(n - warmup.start) * warmup.tokens // each) for n in lengths), lengths)
