"""The matrices that Muon orthogonalizes, and where a rank's pieces of parameters lie in them. Pure; without torch.

A fused weight is several matrices: queries, keys and values, or gate and up, are orthogonalized each for itself, as
they would be without the fusion. Embedding, head, norms and biases are no matrices in this sense: Muon leaves them to
AdamW (Jordan et al., Muon, 2024; Moonlight, arXiv:2502.16982 section 2.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

ITERATIONS = 5  # of Newton-Schulz
BY_ADAMW = ("embedding.weight", "head.weight")  # of one row per token: no linear map of activations


class Located(Protocol):
    """The part of a `Placement` that counts here."""

    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int | None: ...
    @property
    def sections(self) -> tuple[int, ...]: ...


class Held(Protocol):
    """The part of a `Fragment` that counts here."""

    @property
    def placement(self) -> Located: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def numel(self) -> int: ...
    @property
    def counted(self) -> bool: ...


@dataclass(frozen=True)
class Matrix:
    """Rows [row, row + rows) and columns [column, column + columns) of the whole parameter `name`.

    dim: the dimension that tensor parallelism splits, None = replicated.
    """

    name: str
    dim: int | None
    row: int
    column: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def flops(self) -> int:
        """Floating-point operations of its orthogonalization: three products an iteration."""
        short, long = sorted((self.rows, self.columns))
        return ITERATIONS * (4 * short**2 * long + 2 * short**3)

    @property
    def scale(self) -> float:
        """Factor that gives an orthogonal matrix the RMS of AdamW's updates, about 0.2 (arXiv:2502.16982, 2.2)."""
        return 0.2 * max(self.rows, self.columns) ** 0.5


def is_orthogonalized(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon's rule is for the parameter `name` of this shape; otherwise it is AdamW's."""
    return len(shape) == 2 and name not in BY_ADAMW


def matrices(placement: Located, shape: Sequence[int]) -> list[Matrix]:
    """The matrices of a whole parameter of `shape` [rows, columns], in order."""
    rows, columns = shape
    name, dim = placement.name, placement.dim
    if dim is None:
        return [Matrix(name, None, 0, 0, rows, columns)]
    found, begin = [], 0
    for size in placement.sections:
        found.append(
            Matrix(name, dim, begin, 0, size, columns)
            if dim == 0
            else Matrix(name, dim, 0, begin, rows, size)
        )
        begin += size
    return found


@dataclass(frozen=True)
class Part:
    """`numel` elements of a matrix on a rank: at `offset` of its flat buffer, and from `start` on of the flattened
    shard `shard` of the matrix (0 where it is replicated)."""

    matrix: Matrix
    shard: int
    start: int
    offset: int
    numel: int


def parts(fragment: Held, tensor: int, tensor_rank: int) -> Iterator[Part]:
    """A fragment's elements by matrix. tensor: ranks of the tensor group, of which `tensor_rank` holds the fragment.

    Raises ValueError for several matrices side by side in shards of columns, which no layer has.
    """
    placement, size = fragment.placement, list(fragment.shape)
    split = 1 if placement.dim is None else tensor
    if placement.dim is not None:
        size[placement.dim] *= split
    if placement.dim == 1 and len(placement.sections) > 1:
        raise ValueError(
            f"{placement.name}: several matrices side by side, split along their columns: fuse them along the rows"
        )
    begin, end = fragment.start, fragment.start + fragment.numel
    first = 0  # of the matrix, in the flattened shard of the parameter
    for matrix in matrices(placement, size):
        last = first + matrix.numel // split
        low, high = max(begin, first), min(end, last)
        if low < high:
            at = fragment.offset + low - begin
            yield Part(matrix, tensor_rank if split > 1 else 0, low - first, at, high - low)
        first = last
