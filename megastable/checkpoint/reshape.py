"""A checkpoint read under another layout: whole tensors out of every rank's pieces, exactly.

Beside DeepSpeed's files each rank leaves fragments-RANK.json: which elements of which parameter lie where in its flat
buffers. From those any weight or moment is put together without knowing how ZeRO, the pipeline or the tensor
group cut it, and shared out again for the layout of today. DeepSpeed's universal checkpoint does the same for its own
parameter names; this needs no conversion on the disk, and handles fused and tied weights by their `Placement`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from megastable.errors import CheckpointError
from megastable.flatstate import Fragment
from megastable.parallel.sharding import unshard

PREFIX = "fragments-"


class Pieces(BaseModel):
    """What one rank holds. file: where DeepSpeed put its buffers. precision scale: of fp16, else 1."""

    model_config = ConfigDict(extra="forbid")

    format: int = 1
    file: str
    stage: int
    tensor_rank: int
    loss_scale: float
    fragments: list[Fragment]


def describe(engine: Any) -> Pieces:
    """The pieces of this rank, for `save` to write."""
    return Pieces(
        file=engine.optimizer_file,
        stage=engine.topology.stage,
        tensor_rank=engine.topology.tensor_rank,
        loss_scale=float(getattr(engine.optimizer, "loss_scale", 1.0)),
        fragments=engine.flat_state().fragments,
    )


class WholeState:
    """Whole tensors of a checkpoint, by name and kind ("weight", "exp_avg", "exp_avg_sq"); fp32 on the CPU.

    Files are mapped, not read whole; a tensor is put together when it is asked for. Raises CheckpointError for a
    checkpoint without pieces, or with holes in them.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.ranks = [_read_pieces(path) for path in sorted(checkpoint.glob(f"{PREFIX}*.json"))]
        if not self.ranks or not any(rank.fragments for rank in self.ranks):
            raise CheckpointError(
                f"{checkpoint}: holds no description of its pieces (not written by "
                "megastable): it can be resumed in the layout that wrote it, not in another one"
            )
        self.loss_scale = self.ranks[0].loss_scale
        self._held: dict[str, list[tuple[Pieces, Fragment]]] = {}
        for rank in self.ranks:
            for fragment in rank.fragments:
                self._held.setdefault(fragment.name, []).append((rank, fragment))
        self._buffers: dict[str, tuple[list[Tensor], dict[int, dict[str, Any]]]] = {}

    @property
    def names(self) -> list[str]:
        return sorted(self._held)

    @property
    def adam_step(self) -> float:
        """Adam's count of updates; 0 before the first."""
        _, states = self._open(next(rank.file for rank in self.ranks if rank.fragments))
        return float(states[0]["step"]) if states else 0.0

    def tensor(self, name: str, kind: str) -> Tensor:
        """The whole tensor `name`."""
        held = self._held.get(name)
        if held is None:
            raise CheckpointError(
                f"{self.checkpoint}: holds no parameter {name!r}: it belongs to another model"
            )
        stage = min(rank.stage for rank, _ in held)  # a tied weight lies on two stages, the same on both
        shards: dict[int, Tensor] = {}
        filled: dict[int, int] = {}
        for rank, fragment in held:
            if rank.stage != stage:
                continue
            shard = shards.setdefault(rank.tensor_rank, torch.zeros(fragment.shape).flatten())
            buffer = self._buffer(rank.file, fragment.group, kind)
            shard[fragment.start : fragment.start + fragment.numel] = buffer[
                fragment.offset : fragment.offset + fragment.numel
            ]
            filled[rank.tensor_rank] = filled.get(rank.tensor_rank, 0) + fragment.numel
        first = held[0][1]
        for tensor_rank, shard in shards.items():
            if filled[tensor_rank] != shard.numel():
                raise CheckpointError(
                    f"{self.checkpoint}: {name!r} has only {filled[tensor_rank]} of {shard.numel()} elements"
                )
        return unshard([shards[r].view(first.shape) for r in sorted(shards)], first.placement)

    def _buffer(self, file: str, group: int, kind: str) -> Tensor:
        masters, states = self._open(file)
        buffer = masters[group] if kind == "weight" else states[group][kind]
        return buffer.detach()

    def _open(self, file: str) -> tuple[list[Tensor], dict[int, dict[str, Any]]]:
        if file not in self._buffers:
            # DeepSpeed's own classes are in there; `store.verify` has compared the file with the manifest.
            content = torch.load(self.checkpoint / file, map_location="cpu", weights_only=False, mmap=True)
            state = content["optimizer_state_dict"]
            if "fp32_flat_groups" in state:  # ZeRO-3
                self._buffers[file] = state["fp32_flat_groups"], state["optimizer_state_dict"]["state"]
            else:
                self._buffers[file] = (
                    state["single_partition_of_fp32_groups"],
                    state["base_optimizer_state"]["state"],
                )
        return self._buffers[file]


def same_pieces(checkpoint: Path, engine: Any) -> bool:
    """Whether this rank would write just the pieces that it finds: DeepSpeed's own load needs that.

    The layout alone does not say so: a bucket or sub-group size in the DeepSpeed file moves pieces, too.
    """
    path = checkpoint / f"{PREFIX}{dist.get_rank():05d}.json"
    return path.exists() and _read_pieces(path).fragments == engine.flat_state().fragments


def load(checkpoint: Path, engine: Any, fp16: bool) -> None:
    """Masters, moments and (`fp16`: written in it) loss scale of `checkpoint` into an engine of another layout.

    Not collective: a rank may fail alone. Once all agree, `engine.refresh_weights()` brings the weights up to date.
    """
    state = WholeState(checkpoint)
    last: tuple[str, str, Tensor] | None = None

    def whole(name: str, kind: str) -> Tensor:
        nonlocal last
        if last is None or last[:2] != (
            name,
            kind,
        ):  # a parameter may lie in two fragments, one after the other
            last = (name, kind, state.tensor(name, kind))
        return last[2]

    topology = engine.topology
    engine.flat_state().fill(whole, state.adam_step, topology.tensor_rank, topology.layout.tensor)
    if fp16:
        engine.set_loss_scale(state.loss_scale)


def _read_pieces(path: Path) -> Pieces:
    try:
        return Pieces.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise CheckpointError(f"{path}: damaged ({str(error).splitlines()[0]})") from None
