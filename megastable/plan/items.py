"""What a rank's memory is made of: pieces of a kind, there at some moments of a step, and their sum. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Kind = Literal["weights", "gradients", "master", "moments", "activations", "logits", "buffers"]
# Of a step: before the last block of a micro-batch, where layer_stats.py looks at its attention; the loss; in the
# backward pass loss and head, the last blocks, the first block and embedding; the update. Between two steps. And before
# the first one: layers are built, then the optimizer's state.
Phase = Literal["watch", "loss", "head", "backward", "end", "update", "between", "layers", "optimizer"]
Device = Literal["cuda", "cpu"]
KINDS: tuple[Kind, ...] = ("weights", "gradients", "master", "moments", "activations", "logits", "buffers")
STEP: tuple[Phase, ...] = ("watch", "loss", "head", "backward", "end", "update", "between")
BUILDING: tuple[Phase, ...] = ("layers", "optimizer")
PHASES = (*STEP, *BUILDING)
WAITING: tuple[Phase, ...] = ("loss", "head", "backward")  # all that waits for the backward pass does so
PASSES: tuple[Phase, ...] = ("watch", *WAITING, "end")
BACK: tuple[Phase, ...] = ("head", "backward", "end")


@dataclass(frozen=True)
class Item:
    """Bytes of one kind on a rank. phases: when they are there."""

    kind: Kind
    name: str
    bytes: int
    phases: tuple[Phase, ...] = STEP


@dataclass(frozen=True)
class Host:
    """In host memory of one rank. snapshot: one rewind point; points: as many as the recipe keeps; checkpoint: the
    copy that is written behind the steps. building: at most, before the first step, when none of these is there."""

    snapshot: int
    points: int
    checkpoint: int
    building: int


@dataclass(frozen=True)
class Footprint:
    """What a rank of pipeline stage `stage` takes; items: all of it, with names."""

    stage: int
    items: tuple[Item, ...]
    host: Host

    def at(self, phase: Phase) -> dict[Kind, int]:
        """Bytes by kind at a moment."""
        found = dict.fromkeys(KINDS, 0)
        for item in self.items:
            if phase in item.phases:
                found[item.kind] += item.bytes
        return found

    @cached_property
    def peak(self) -> Phase:
        """The moment at which most is there."""
        sums = dict.fromkeys(PHASES, 0)
        for item in self.items:
            for phase in item.phases:
                sums[phase] += item.bytes
        return max(PHASES, key=sums.__getitem__)

    @cached_property
    def kinds(self) -> dict[Kind, int]:
        """Bytes by kind at the peak; they add up to `total`."""
        return self.at(self.peak)

    @cached_property
    def total(self) -> int:
        """Bytes on the device at the peak."""
        return sum(self.kinds.values())

    @property
    def building(self) -> int:
        """Bytes on the device at the most before the first step."""
        return max(sum(self.at(phase).values()) for phase in BUILDING)

    @property
    def held(self) -> int:
        """Bytes on the device between two steps."""
        return sum(self.at("between").values())

    def largest(self, number: int = 5) -> list[Item]:
        """What most of the peak is."""
        there = [item for item in self.items if self.peak in item.phases]
        return sorted(there, key=lambda item: -item.bytes)[:number]
