"""Which rank orthogonalizes which matrix, and the messages that follow. Pure; without torch.

Under ZeRO and tensor parallelism a matrix lies in pieces on the ranks of a pipeline stage. Every matrix gets one owner,
which receives all its pieces, so that the result is that of the whole matrix, under every layout, and is computed once.
All ranks derive the same plan from all ranks' fragments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

# The matrices that Muon orthogonalizes, and where a rank's pieces of parameters lie in them. Pure; without torch.
#
# A fused weight is several matrices: queries, keys and values, or gate and up, are orthogonalized each for itself, as
# they would be without the fusion. Embedding, head, norms and biases are no matrices in this sense: Muon leaves them
# to AdamW (Jordan et al., Muon, 2024; Moonlight, arXiv:2502.16982 section 2.2).


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
        short_side, long_side = sorted((self.rows, self.columns))
        return ITERATIONS * (4 * short_side**2 * long_side + 2 * short_side**3)

    @property
    def scale(self) -> float:
        """Factor that gives an orthogonal matrix the RMS of AdamW's updates, about 0.2 (arXiv:2502.16982, 2.2)."""
        return 0.2 * max(self.rows, self.columns) ** 0.5


def is_orthogonalized(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon's rule is for the parameter `name` of this shape; otherwise it is AdamW's."""
    return len(shape) == 2 and name not in BY_ADAMW


def split_in_matrices(placement: Located, shape: Sequence[int]) -> list[Matrix]:
    """The matrices of a whole parameter of `shape` [rows, columns], in order."""
    rows, columns = shape
    name, dim = placement.name, placement.dim
    if dim is None:
        return [Matrix(name, None, 0, 0, rows, columns)]
    found_matrices, section_begin = [], 0
    for section_size in placement.sections:
        if dim == 0:
            found_matrices.append(Matrix(name, dim, section_begin, 0, section_size, columns))
        else:
            found_matrices.append(Matrix(name, dim, 0, section_begin, rows, section_size))
        section_begin += section_size
    return found_matrices


class MatrixPiece(NamedTuple):
    """`numel` elements of a matrix on a rank of the stage: at `offset` of its flat buffer, and from `start` on of the
    flattened shard `shard` of the matrix (0 where it is replicated). counted: False for a replica that another rank
    sends: this rank only gets the result."""

    rank: int
    matrix: Matrix
    shard: int
    start: int
    offset: int
    numel: int
    counted: bool


def split_fragment(fragment: Held, tensor: int, rank: int) -> Iterator[MatrixPiece]:
    """A fragment's elements by matrix. tensor: ranks of the tensor group; rank: of the stage, which holds the fragment.

    Raises ValueError for several matrices side by side in shards of columns, which no layer has.
    """
    placement, whole_shape = fragment.placement, list(fragment.shape)
    shard_count = 1 if placement.dim is None else tensor
    if placement.dim is not None:
        whole_shape[placement.dim] *= shard_count
    if placement.dim == 1 and len(placement.sections) > 1:
        raise ValueError(
            f"{placement.name}: several matrices side by side, split along their columns: fuse them along the rows"
        )
    fragment_begin, fragment_end = fragment.start, fragment.start + fragment.numel
    matrix_begin = 0  # of the matrix, in the flattened shard of the parameter
    for matrix in split_in_matrices(placement, whole_shape):
        matrix_end = matrix_begin + matrix.numel // shard_count
        part_begin, part_end = max(fragment_begin, matrix_begin), min(fragment_end, matrix_end)
        if part_begin < part_end:
            buffer_offset = fragment.offset + part_begin - fragment_begin
            place = rank % shard_count, part_begin - matrix_begin, buffer_offset, part_end - part_begin
            yield MatrixPiece(rank, matrix, *place, fragment.counted)
        matrix_begin = matrix_end


# Elements that a rank sends or receives at a time, unless one matrix has more: 128 MiB in bf16.
LIMIT = 1 << 26


@dataclass(frozen=True)
class Round:
    """An exchange of some of the matrices, there and back. matrices: by owner; pieces: by matrix, in the order of a
    message."""

    matrices: tuple[tuple[Matrix, ...], ...]
    pieces: dict[Matrix, tuple[MatrixPiece, ...]]

    def list_message(self, holder: int, owner: int, *, back: bool) -> list[MatrixPiece]:
        """The pieces that `holder` sends to `owner`, or gets `back` from it, in order."""
        return [
            piece
            for matrix in self.matrices[owner]
            for piece in self.pieces[matrix]
            if piece.rank == holder and (back or piece.counted)
        ]

    def count_given(self, rank: int, *, back: bool) -> int:
        """Elements that `rank` gives to the all-to-all, to itself included."""
        all_ranks = range(len(self.matrices))
        if back:
            rank_messages = [self.list_message(all_rank, rank, back=True) for all_rank in all_ranks]
        else:
            rank_messages = [self.list_message(rank, owner, back=False) for owner in all_ranks]
        return sum(piece.numel for rank_message in rank_messages for piece in rank_message)


def plan_rounds(held: Sequence[Sequence[Held]], tensor: int, limit: int = LIMIT) -> list[Round]:
    """The rounds of one flat buffer. held: the fragments in it of every rank of the stage, rank = data rank x tensor +
    tensor rank.

    Owners are balanced by floating-point operations (see `assign_owners`). A rank gives and gets at most `limit`
    elements in a round, or one matrix. Raises ValueError if the ranks do not hold every matrix exactly once.
    """
    pieces = _pieces(held, tensor)
    owner = assign_owners(pieces, len(held))
    return [
        Round(
            tuple(tuple(m for m in batch if owner[m] == rank) for rank in range(len(held))),
            {m: pieces[m] for m in batch},
        )
        for batch in _batches(pieces, owner, limit)
    ]


def assign_owners(pieces: dict[Matrix, tuple[MatrixPiece, ...]], ranks: int) -> dict[Matrix, int]:
    """The owner of every matrix: the largest first, each to the rank that holds most of it, as long as that rank stays
    within its fair share of the operations; otherwise to the one with the least work.

    No rank gets more than its share and one matrix.
    """
    share = sum(m.flops for m in pieces) / ranks
    load, owner_by_matrix = [0] * ranks, {}
    for matrix in sorted(pieces, key=lambda m: -m.flops):
        here = [0] * ranks
        for piece in pieces[matrix]:
            here[piece.rank] += piece.numel
        best_rank = min(range(ranks), key=lambda r: (max(load[r] + matrix.flops, share), -here[r], r))
        load[best_rank] += matrix.flops
        owner_by_matrix[matrix] = best_rank
    return owner_by_matrix


def _pieces(held: Sequence[Sequence[Held]], tensor: int) -> dict[Matrix, tuple[MatrixPiece, ...]]:
    """All pieces by matrix, sorted by shard and start."""
    pieces_by_matrix: dict[Matrix, list[MatrixPiece]] = defaultdict(list)
    for rank, fragments in enumerate(held):
        for fragment in fragments:
            if is_orthogonalized(fragment.placement.name, fragment.shape):
                for piece in split_fragment(fragment, tensor, rank):
                    pieces_by_matrix[piece.matrix].append(piece)
    for matrix, pieces in pieces_by_matrix.items():
        pieces.sort(key=lambda p: (p.shard, p.start, p.rank))
        counted_pieces = [p for p in pieces if p.counted]
        shard_size = matrix.numel // (1 if matrix.dim is None else tensor)  # of a shard
        piece_starts = [
            counted_piece.shard * shard_size + counted_piece.start for counted_piece in counted_pieces
        ]
        piece_ends = [p.shard * shard_size + p.start + p.numel for p in counted_pieces]
        if [*piece_starts, matrix.numel] != [0, *piece_ends]:
            raise ValueError(
                f"{matrix.name}: its pieces on the ranks of the stage do not make up the matrix of {matrix.rows} x "
                f"{matrix.columns} exactly once"
            )
    return {matrix: tuple(pieces) for matrix, pieces in pieces_by_matrix.items()}


def _batches(
    pieces: dict[Matrix, tuple[MatrixPiece, ...]], owner: dict[Matrix, int], limit: int
) -> list[list[Matrix]]:
    """The matrices by round, every owner's largest ones first."""
    turn_by_matrix: dict[Matrix, int] = {}
    owned_counts: dict[int, int] = defaultdict(int)
    for matrix in owner:
        turn_by_matrix[matrix] = owned_counts[owner[matrix]]
        owned_counts[owner[matrix]] += 1
    batches: list[list[Matrix]] = []
    round_traffic: dict[tuple[str, int], int] = {}
    for matrix in sorted(owner, key=lambda m: turn_by_matrix[m]):
        added_traffic = {("owned", owner[matrix]): matrix.numel}
        for piece in pieces[matrix]:
            added_traffic["held", piece.rank] = added_traffic.get(("held", piece.rank), 0) + piece.numel
        if not batches or any(round_traffic.get(key, 0) + n > limit for key, n in added_traffic.items()):
            batches.append([])
            round_traffic = {}
        batches[-1].append(matrix)
        for key, n in added_traffic.items():
            round_traffic[key] = round_traffic.get(key, 0) + n
    return batches
