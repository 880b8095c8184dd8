"""Muon: momentum, orthogonalized, for the weight matrices of the blocks; AdamW for everything else.

Jordan et al., Muon, 2024; as scaled up in Moonlight, arXiv:2502.16982 section 2.2: decoupled weight decay, and updates
with the RMS of AdamW's, so that one learning rate serves both. The momentum is an average of gradients, as Adam's:
Newton-Schulz takes no notice of its scale. Nesterov's form is what is orthogonalized.

A matrix is orthogonalized as a whole by one rank of its pipeline stage (ownership.py), which gets its pieces and sends
back those of the result (`Exchange`): the result does not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megastable.base.collectives import gather_objects
from megastable.base.products import is_cast, mm
from megastable.optim.adam_pieces import AdamPieces
from megastable.optim.ownership import ITERATIONS, Matrix, MatrixPiece, Round, plan_rounds
from megastable.optim.pieces import MOMENTS, Piece, Surroundings, chunk_size, split_in_chunks
from megastable.parallel.sharding import Fragment

# Apply a function to whole matrices that lie in pieces on the ranks of a pipeline stage.
#
# Two all-to-alls a round (`ownership.plan_rounds`): pieces to the matrices' owners, and those of the results back.
# Messages have the dtype in which the owner computes: bf16 halves them, and rounding before the message gives the same
# bits as after.


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
        self._rounds = [_traffic(exchange_round, rank) for exchange_round in rounds]

    @torch.no_grad()
    def exchange_matrices(
        self,
        read: Callable[[MatrixPiece, Tensor], None],
        function: Callable[[Tensor], Tensor],
        write: Callable[[MatrixPiece, Tensor], None],
        device: torch.device,
    ) -> None:
        """Replace every matrix by `function` of it: `read` fills in a piece of this rank, `write` gets its result.

        function: [rows, columns] -> the same shape. Pieces are flat; everything is in `dtype`. Collective.
        """
        for round_traffic in self._rounds:
            given_elements = torch.empty(sum(_sizes(round_traffic.sent)), dtype=self.dtype, device=device)
            for piece, target_slice in _laid_out(round_traffic.sent, given_elements):
                read(piece, target_slice)
            received_elements = self._exchanged(given_elements, round_traffic.sent, round_traffic.received)
            del given_elements
            shards_by_matrix = {
                m: received_elements.new_empty(n, m.numel // n) for m, n in round_traffic.matrices
            }
            for piece, received_part in _laid_out(round_traffic.received, received_elements):
                own_range = slice(piece.start, piece.start + piece.numel)
                shards_by_matrix[piece.matrix][piece.shard, own_range] = received_part
            for matrix, flat_shards in shards_by_matrix.items():
                flat_shards.copy_(_shards(function(_whole(matrix, flat_shards)), matrix, len(flat_shards)))
            given_elements = received_elements.new_empty(sum(_sizes(round_traffic.returned)))
            for piece, target_slice in _laid_out(round_traffic.returned, given_elements):
                own_range = slice(piece.start, piece.start + piece.numel)
                target_slice.copy_(shards_by_matrix[piece.matrix][piece.shard, own_range])
            shards_by_matrix.clear()
            received_elements = self._exchanged(given_elements, round_traffic.returned, round_traffic.results)
            for piece, received_part in _laid_out(round_traffic.results, received_elements):
                write(piece, received_part)

    def _exchanged(self, given: Tensor, sent: Messages, received: Messages) -> Tensor:
        if len(sent) == 1:
            return given
        received_sizes = _sizes(received)
        received_elements = given.new_empty(sum(received_sizes))
        dist.all_to_all_single(received_elements, given, received_sizes, _sizes(sent), group=self.group)
        return received_elements


def _traffic(held: Round, rank: int) -> _Traffic:
    all_ranks = range(len(held.matrices))
    return _Traffic(
        [(m, 1 + max(piece.shard for piece in held.pieces[m])) for m in held.matrices[rank]],
        [held.list_message(rank, all_rank, back=False) for all_rank in all_ranks],
        [held.list_message(holder, rank, back=False) for holder in all_ranks],
        [held.list_message(holder, rank, back=True) for holder in all_ranks],
        [held.list_message(rank, owner, back=True) for owner in all_ranks],
    )


def _sizes(messages: Messages) -> list[int]:
    return [sum(piece.numel for piece in message) for message in messages]


def _laid_out(messages: Messages, flat: Tensor) -> Iterator[tuple[MatrixPiece, Tensor]]:
    """Every piece with its elements in `flat`, where the messages follow one another."""
    piece_begin = 0
    for message in messages:
        for piece in message:
            yield piece, flat[piece_begin : piece_begin + piece.numel]
            piece_begin += piece.numel


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


class Muon(AdamPieces):
    """w -= lr (0.2 sqrt(max(rows, columns)) NS(u) + decay w) with u = (1 - mu) g + mu m, m = mu m + (1 - mu) g.

    "exp_avg" is the momentum m; groups that are not to "orthogonalize" have AdamW's moments. dtype: in which matrices
    are sent and orthogonalized, bf16 or fp32.
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float, momentum: float, betas: tuple[float, float], eps: float,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__(params, lr=lr, betas=betas, eps=eps)
        self.momentum, self.dtype = momentum, dtype
        self._exchanges: dict[Tensor, Exchange] = {}

    def kinds_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return MOMENTS[:1] if group["orthogonalize"] else MOMENTS

    def attach_buffers(
        self, masters: Sequence[Tensor], fragments: Sequence[Fragment], at: Surroundings
    ) -> None:
        super().attach_buffers(masters, fragments, at)
        alone = not dist.is_initialized()
        held = [list(fragments)] if alone else gather_objects(list(fragments), at.stage_group)
        rank = 0 if alone else dist.get_rank(at.stage_group)
        self._exchanges = {}
        for index, master in enumerate(masters):
            rounds = plan_rounds([[f for f in of if f.group == index] for of in held], at.tensor[1])
            self._exchanges[master] = Exchange(rounds, rank, at.stage_group, self.dtype)

    def update(self, pieces: Sequence[Piece], step: int) -> None:
        for piece in pieces:
            if not piece.group["orthogonalize"]:
                for part_range in split_in_chunks(piece):
                    self.apply_adamw(piece, part_range, piece.group["lr"], step)
        # Also where this rank has no piece: it may own matrices.
        for param_group in self.param_groups:
            for master in param_group["params"] if param_group["orthogonalize"] else ():
                buffer_names = {f.name for f in self._fragments[master]}
                self._muon(master, {piece.name: piece for piece in pieces if piece.name in buffer_names})

    def _muon(self, master: Tensor, held: Mapping[str, Piece]) -> None:
        """Update a flat buffer; held: its pieces by name. Collective over the stage."""

        def read(of: MatrixPiece, to: Tensor) -> None:
            piece, piece_begin = _within(of, held)
            momentum = self.momentum
            part_ranges = _chunks(piece, piece_begin, of.numel)
            for part_range, target_part in zip(part_ranges, to.split(chunk_size(to)), strict=True):
                fresh_gradient = piece.gradient[part_range] * (1 - momentum)
                momentum_average = piece.state["exp_avg"][part_range].mul_(momentum).add_(fresh_gradient)
                target_part.copy_(fresh_gradient.add_(momentum_average * momentum))

        def write(of: MatrixPiece, result: Tensor) -> None:
            piece, piece_begin = _within(of, held)
            part_ranges = _chunks(piece, piece_begin, of.numel)
            for part_range, result_part in zip(part_ranges, result.split(chunk_size(result)), strict=True):
                weight_change = piece.weight[part_range] * piece.group["weight_decay"]
                weight_change.add_(result_part.float() * of.matrix.scale).mul_(-piece.group["lr"])
                self.move_weights(piece, weight_change, part_range)

        self._exchanges[master].exchange_matrices(read, orthogonalize_matrix, write, master.device)


def _within(of: MatrixPiece, held: Mapping[str, Piece]) -> tuple[Piece, int]:
    """The piece of the parameter in which a matrix's piece lies, and where it begins there."""
    piece = held[of.matrix.name]
    return piece, of.offset - piece.fragment.offset


def _chunks(piece: Piece, begin: int, numel: int) -> Iterator[slice]:
    """Slices of `numel` elements of a piece whose intermediate results fit in a cache."""
    size, end = chunk_size(piece.weight), begin + numel
    return (slice(at, min(at + size, end)) for at in range(begin, end, size))


COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, x^3 and x^5: steepest at zero


@torch.no_grad()
def orthogonalize_matrix(x: Tensor) -> Tensor:
    """About U V^T of x = U S V^T, in the dtype of x (fp32 or bf16); zero if x is zero. x: [rows, columns], finite."""
    is_tall = x.shape[0] > x.shape[1]
    x = x.t().contiguous() if is_tall else x
    lowest_value, highest_value = torch.aminmax(x)
    _, exponent = torch.frexp(torch.maximum(highest_value, -lowest_value).float())
    # By a power of two, which rounds nothing: the squares of small gradients would underflow.
    x = x * torch.exp2(-exponent.float().clamp_min(-126))
    matrix_norm = torch.linalg.vector_norm(x)
    x = x / torch.where(matrix_norm > 0, matrix_norm, 1.0)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram_matrix = mm(x, x.t())
        x = _plus(x, a, _plus(gram_matrix, b, gram_matrix, gram_matrix, c), x, 1.0)
    return x.t().contiguous() if is_tall else x


def _plus(c: Tensor, beta: float, a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """beta c + alpha a b, rounded once."""
    if is_cast(a):
        return torch.addmm(c.float(), a.float(), b.float(), beta=beta, alpha=alpha).to(a.dtype)
    return torch.addmm(c, a, b, beta=beta, alpha=alpha)
