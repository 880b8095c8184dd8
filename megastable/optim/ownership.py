"""Which rank orthogonalizes which matrix, and the messages that follow. Pure; without torch.

Under ZeRO and tensor parallelism a matrix lies in pieces on the ranks of a pipeline stage. Every matrix gets one owner,
which receives all its pieces, so that the result is that of the whole matrix, under every layout, and is computed once.
All ranks derive the same plan from all ranks' fragments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megastable.optim.matrices import Held, Matrix, is_orthogonalized, parts

# Elements that a rank sends or receives at a time, unless one matrix has more: 128 MiB in bf16.
LIMIT = 1 << 26


class MatrixPiece(NamedTuple):
    """Elements of a matrix on a rank of the stage; see `matrices.Part`. counted: False for a replica that another rank
    sends: this rank only gets the result."""

    rank: int
    matrix: Matrix
    shard: int
    start: int
    offset: int
    numel: int
    counted: bool


@dataclass(frozen=True)
class Round:
    """An exchange of some of the matrices, there and back. matrices: by owner; pieces: by matrix, in the order of a
    message."""

    matrices: tuple[tuple[Matrix, ...], ...]
    pieces: dict[Matrix, tuple[MatrixPiece, ...]]

    def message(self, holder: int, owner: int, *, back: bool) -> list[MatrixPiece]:
        """The pieces that `holder` sends to `owner`, or gets `back` from it, in order."""
        return [
            piece
            for matrix in self.matrices[owner]
            for piece in self.pieces[matrix]
            if piece.rank == holder and (back or piece.counted)
        ]

    def given(self, rank: int, *, back: bool) -> int:
        """Elements that `rank` gives to the all-to-all, to itself included."""
        others = range(len(self.matrices))
        if back:
            messages = [self.message(holder, rank, back=True) for holder in others]
        else:
            messages = [self.message(rank, owner, back=False) for owner in others]
        return sum(piece.numel for message in messages for piece in message)


def plan(held: Sequence[Sequence[Held]], tensor: int, limit: int = LIMIT) -> list[Round]:
    """The rounds of one flat buffer. held: the fragments in it of every rank of the stage, rank = data rank x tensor +
    tensor rank.

    Owners are balanced by floating-point operations (see `owners`). A rank gives and gets at most `limit` elements in a
    round, or one matrix. Raises ValueError if the ranks do not hold every matrix exactly once.
    """
    pieces = _pieces(held, tensor)
    owner = owners(pieces, len(held))
    return [
        Round(
            tuple(tuple(m for m in batch if owner[m] == rank) for rank in range(len(held))),
            {m: pieces[m] for m in batch},
        )
        for batch in _batches(pieces, owner, limit)
    ]


def owners(pieces: dict[Matrix, tuple[MatrixPiece, ...]], ranks: int) -> dict[Matrix, int]:
    """The owner of every matrix: the largest first, each to the rank that holds most of it, as long as that rank stays
    within its fair share of the operations; otherwise to the one with the least work.

    No rank gets more than its share and one matrix.
    """
    share = sum(m.flops for m in pieces) / ranks
    load, found = [0] * ranks, {}
    for matrix in sorted(pieces, key=lambda m: -m.flops):
        here = [0] * ranks
        for piece in pieces[matrix]:
            here[piece.rank] += piece.numel
        best = min(range(ranks), key=lambda r: (max(load[r] + matrix.flops, share), -here[r], r))
        load[best] += matrix.flops
        found[matrix] = best
    return found


def _pieces(held: Sequence[Sequence[Held]], tensor: int) -> dict[Matrix, tuple[MatrixPiece, ...]]:
    """All pieces by matrix, sorted by shard and start."""
    found: dict[Matrix, list[MatrixPiece]] = defaultdict(list)
    for rank, fragments in enumerate(held):
        for fragment in fragments:
            if is_orthogonalized(fragment.placement.name, fragment.shape):
                for part in parts(fragment, tensor, rank % tensor):
                    at = part.shard, part.start, part.offset, part.numel
                    found[part.matrix].append(MatrixPiece(rank, part.matrix, *at, fragment.counted))
    for matrix, pieces in found.items():
        pieces.sort(key=lambda p: (p.shard, p.start, p.rank))
        counted = [p for p in pieces if p.counted]
        size = matrix.numel // (1 if matrix.dim is None else tensor)  # of a shard
        ends = [p.shard * size + p.start + p.numel for p in counted]
        if [p.shard * size + p.start for p in counted] != [0, *ends[:-1]] or ends[-1:] != [matrix.numel]:
            raise ValueError(
                f"{matrix.name}: its pieces on the ranks of the stage do not make up the matrix of {matrix.rows} x "
                f"{matrix.columns} exactly once"
            )
    return {matrix: tuple(pieces) for matrix, pieces in found.items()}


def _batches(
    pieces: dict[Matrix, tuple[MatrixPiece, ...]], owner: dict[Matrix, int], limit: int
) -> list[list[Matrix]]:
    """The matrices by round, every owner's largest ones first."""
    turn: dict[Matrix, int] = {}
    seen: dict[int, int] = defaultdict(int)
    for matrix in owner:
        turn[matrix] = seen[owner[matrix]]
        seen[owner[matrix]] += 1
    batches: list[list[Matrix]] = []
    traffic: dict[tuple[str, int], int] = {}
    for matrix in sorted(owner, key=lambda m: turn[m]):
        more = {("owned", owner[matrix]): matrix.numel}
        for piece in pieces[matrix]:
            more["held", piece.rank] = more.get(("held", piece.rank), 0) + piece.numel
        if not batches or any(traffic.get(key, 0) + n > limit for key, n in more.items()):
            batches.append([])
            traffic = {}
        batches[-1].append(matrix)
        for key, n in more.items():
            traffic[key] = traffic.get(key, 0) + n
    return batches
