"""Memory items of a rank: pieces of a kind, present in some phases of a step, and their sum. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Kind = Literal["weights", "gradients", "master", "moments", "activations", "logits", "buffers"]
# Phases of a step: before the last block of a micro-batch, where layer_stats.py examines its attention; the loss; in
# the backward pass loss and head, the last blocks, the first block and embedding; the update. Then between two steps,
# and before the first one: building the layers, then the optimizer's state.
Phase = Literal["watch", "loss", "head", "backward", "end", "update", "between", "layers", "optimizer"]
Device = Literal["cuda", "cpu"]
KINDS: tuple[Kind, ...] = ("weights", "gradients", "master", "moments", "activations", "logits", "buffers")
STEP: tuple[Phase, ...] = ("watch", "loss", "head", "backward", "end", "update", "between")
BUILDING: tuple[Phase, ...] = ("layers", "optimizer")
PHASES = (*STEP, *BUILDING)
WAITING: tuple[Phase, ...] = ("loss", "head", "backward")  # phases in which saved activations are in memory
PASSES: tuple[Phase, ...] = ("watch", *WAITING, "end")
BACK: tuple[Phase, ...] = ("head", "backward", "end")


@dataclass(frozen=True)
class Item:
    """Bytes of one kind on a rank. phases: in which they are allocated."""

    kind: Kind
    name: str
    bytes: int
    phases: tuple[Phase, ...] = STEP


@dataclass(frozen=True)
class Host:
    """Host memory of one rank. snapshot: one snapshot; points: number of snapshots that the recipe keeps; checkpoint:
    the copy that is written in the background. building: the peak before the first step, when none of these exists."""

    snapshot: int
    points: int
    checkpoint: int
    building: int


@dataclass(frozen=True)
class Footprint:
    """Memory of a rank of pipeline stage `stage`; items: all of it, by name."""

    stage: int
    items: tuple[Item, ...]
    host: Host

    def at(self, phase: Phase) -> dict[Kind, int]:
        """Bytes by kind in a phase."""
        found = dict.fromkeys(KINDS, 0)
        for item in self.items:
            if phase in item.phases:
                found[item.kind] += item.bytes
        return found

    @cached_property
    def peak(self) -> Phase:
        """The phase with the most bytes."""
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
        """Peak of bytes on the device before the first step."""
        return max(sum(self.at(phase).values()) for phase in BUILDING)

    @property
    def held(self) -> int:
        """Bytes on the device between two steps."""
        return sum(self.at("between").values())

    def largest(self, number: int = 5) -> list[Item]:
        """The largest items at the peak."""
        there = [item for item in self.items if self.peak in item.phases]
        return sorted(there, key=lambda item: -item.bytes)[:number]
