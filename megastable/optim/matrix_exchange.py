"""Apply a function to whole matrices that lie in pieces on the ranks of a pipeline stage.

Two all-to-alls a round (`ownership.plan`): pieces to the matrices' owners, and those of the results back. Messages have
the dtype in which the owner computes: bf16 halves them, and rounding before the message gives the same bits as after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megastable.optim.matrices import Matrix
from megastable.optim.ownership import MatrixPiece, Round

Messages = list[list[MatrixPiece]]  # by the other rank


class _Traffic(NamedTuple):
    """This rank's part of a round: its matrices with their number of shards; messages sent and received on the way
    there, and the same on the way back."""

    matrices: list[tuple[Matrix, int]]
    sent: Messages
    received: Messages
    returned: Messages
    results: Messages


class Exchange:
    """The exchange of one flat buffer. rank: in `group`, all ranks of the stage; dtype: of the messages."""

    def __init__(self, rounds: Sequence[Round], rank: int, group: Any, dtype: torch.dtype) -> None:
        self.group, self.dtype = group, dtype
        self._rounds = [_traffic(each, rank) for each in rounds]

    @torch.no_grad()
    def run(
        self,
        read: Callable[[MatrixPiece, Tensor], None],
        function: Callable[[Tensor], Tensor],
        write: Callable[[MatrixPiece, Tensor], None],
        device: torch.device,
    ) -> None:
        """Replace every matrix by `function` of it: `read` fills in a piece of this rank, `write` gets its result.

        function: [rows, columns] -> the same shape. Pieces are flat; everything is in `dtype`. Collective.
        """
        for held in self._rounds:
            given = torch.empty(_size(held.sent), dtype=self.dtype, device=device)
            for piece, to in _laid_out(held.sent, given):
                read(piece, to)
            got = self._exchanged(given, held.sent, held.received)
            del given
            shards = {m: got.new_empty(n, m.numel // n) for m, n in held.matrices}
            for piece, part in _laid_out(held.received, got):
                shards[piece.matrix][piece.shard, piece.start : piece.start + piece.numel] = part
            for matrix, flat in shards.items():
                flat.copy_(_shards(function(_whole(matrix, flat)), matrix, len(flat)))
            given = got.new_empty(_size(held.returned))
            for piece, to in _laid_out(held.returned, given):
                to.copy_(shards[piece.matrix][piece.shard, piece.start : piece.start + piece.numel])
            shards.clear()
            got = self._exchanged(given, held.returned, held.results)
            for piece, part in _laid_out(held.results, got):
                write(piece, part)

    def _exchanged(self, given: Tensor, sent: Messages, received: Messages) -> Tensor:
        if len(sent) == 1:
            return given
        got = given.new_empty(_size(received))
        dist.all_to_all_single(got, given, _sizes(received), _sizes(sent), group=self.group)
        return got


def _traffic(held: Round, rank: int) -> _Traffic:
    ranks = range(len(held.matrices))
    return _Traffic(
        [(m, 1 + max(piece.shard for piece in held.pieces[m])) for m in held.matrices[rank]],
        [held.message(rank, owner, back=False) for owner in ranks],
        [held.message(holder, rank, back=False) for holder in ranks],
        [held.message(holder, rank, back=True) for holder in ranks],
        [held.message(rank, owner, back=True) for owner in ranks],
    )


def _sizes(messages: Messages) -> list[int]:
    return [sum(piece.numel for piece in message) for message in messages]


def _size(messages: Messages) -> int:
    return sum(_sizes(messages))


def _laid_out(messages: Messages, flat: Tensor) -> Iterator[tuple[MatrixPiece, Tensor]]:
    """Every piece with its elements in `flat`, where the messages follow one another."""
    begin = 0
    for message in messages:
        for piece in message:
            yield piece, flat[begin : begin + piece.numel]
            begin += piece.numel


def _whole(matrix: Matrix, shards: Tensor) -> Tensor:
    """[rows, columns] from its flat shards."""
    if matrix.dim == 1:
        return shards.view(len(shards), matrix.rows, -1).transpose(0, 1).reshape(matrix.rows, matrix.columns)
    return shards.view(matrix.rows, matrix.columns)


def _shards(whole: Tensor, matrix: Matrix, shards: int) -> Tensor:
    """The inverse of `_whole`."""
    if matrix.dim == 1:
        whole = whole.view(matrix.rows, shards, -1).transpose(0, 1)
    return whole.reshape(shards, -1)
