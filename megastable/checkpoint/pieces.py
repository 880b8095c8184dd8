"""Description of one rank's part of a checkpoint: rank-00000.json beside rank-00000.safetensors.

A piece is a range of one parameter's flattened tensor-parallel shard. Replicas are written once, by the rank that
counts them, and padding is not written: the same weights under two layouts are the same bytes in other files.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError, model_validator
from torch import Tensor

from megastable.base.errors import CheckpointError
from megastable.parallel.sharding import Placement

FORMAT: Final = 2  # of checkpoints
CHUNK = 1 << 22  # elements examined at a time


def part_name(rank: int) -> str:
    """Name of a rank's files, without suffix."""
    return f"rank-{rank:05d}"


def entry_name(kind: str, name: str) -> str:
    """Name of a piece's tensor in the .safetensors file."""
    return f"{kind}/{name}"


class PieceStatistics(BaseModel):
    """Statistics of a piece. nonfinite: number of non-finite elements; norm: L2; the others cover all elements, NaN and
    infinities included."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    nonfinite: int
    norm: float
    absmax: float
    mean: float


class ShardPiece(BaseModel):
    """`numel` elements of a parameter, from `start` of its flattened shard on. name, dim, sections: its `Placement`;
    shape: of the shard. statistics: by kind ("weight", "exp_avg", "exp_avg_sq")."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    dim: NonNegativeInt | None
    sections: tuple[PositiveInt, ...]
    shape: tuple[PositiveInt, ...]
    start: NonNegativeInt
    numel: PositiveInt
    statistics: dict[str, PieceStatistics]

    @model_validator(mode="after")
    def _lies_in_its_shard(self) -> Self:
        if self.end > math.prod(self.shape) or (self.dim is not None and self.dim >= len(self.shape)):
            raise ValueError(f"a piece up to element {self.end} of {self.shape}, split along {self.dim}")
        return self

    @property
    def end(self) -> int:
        return self.start + self.numel

    @property
    def placement(self) -> Placement:
        return Placement(self.name, self.dim, self.sections)


class Pieces(BaseModel):
    """All pieces of a rank; kinds: of their tensors, not every piece has all of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[2] = FORMAT
    rank: NonNegativeInt
    stage: NonNegativeInt
    tensor_rank: NonNegativeInt
    kinds: tuple[str, ...]
    pieces: tuple[ShardPiece, ...]

    @property
    def finite(self) -> bool:
        return not any(s.nonfinite for piece in self.pieces for s in piece.statistics.values())


def statistics_of(flat: Tensor) -> PieceStatistics:
    """flat: fp32 [n]. Chunks are summed in fp32, which is twenty times faster on a CPU, and added up in fp64."""
    square = total = absmax = 0.0
    for chunk in flat.split(CHUNK) if flat.numel() else ():
        low, high = map(float, torch.aminmax(chunk))  # nan if there is one
        norm = float(torch.linalg.vector_norm(chunk))
        if math.isinf(norm):  # squares may overflow fp32 even if no number does
            norm = float(torch.linalg.vector_norm(chunk, dtype=torch.float64))
        square += norm * norm
        total += float(chunk.sum())
        largest = max(-low, high)
        absmax = largest if largest > absmax or math.isnan(largest) else absmax
    broken = 0 if math.isfinite(square) else flat.numel() - int(flat.isfinite().sum())
    return PieceStatistics(
        nonfinite=broken, norm=math.sqrt(square), absmax=absmax, mean=total / max(1, flat.numel())
    )


def unmeasured(flat: Tensor) -> PieceStatistics:
    """Instead of `statistics_of`, where these would cost too much: nan."""
    return PieceStatistics(nonfinite=0, norm=math.nan, absmax=math.nan, mean=math.nan)


def read_pieces(path: Path) -> Pieces:
    """Read a rank's description. Raises CheckpointError."""
    try:
        return Pieces.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise CheckpointError(f"{path}: damaged ({str(error).splitlines()[0]})") from None
