"""Muon: momentum, orthogonalized, for the weight matrices of the blocks; AdamW for everything else.

Jordan et al., Muon, 2024; as scaled up in Moonlight, arXiv:2502.16982 section 2.2: decoupled weight decay, and updates
with the RMS of AdamW's, so that one learning rate serves both. The momentum is an average of gradients, as Adam's:
Newton-Schulz takes no notice of its scale. Nesterov's form is what is orthogonalized.

A matrix is orthogonalized as a whole by one rank of its pipeline stage (ownership.py), which gets its pieces and sends
back those of the result (matrix_exchange.py): the result does not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megastable.base.collectives import gathered
from megastable.base.products import is_cast, mm
from megastable.optim.adam_pieces import AdamPieces, chunk_size, chunks
from megastable.optim.matrices import ITERATIONS
from megastable.optim.matrix_exchange import Exchange
from megastable.optim.ownership import MatrixPiece, plan
from megastable.optim.pieces import MOMENTS, Piece, Surroundings
from megastable.parallel.fragments import Fragment


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

    def attach(self, masters: Sequence[Tensor], fragments: Sequence[Fragment], at: Surroundings) -> None:
        super().attach(masters, fragments, at)
        alone = not dist.is_initialized()
        held = [list(fragments)] if alone else gathered(list(fragments), at.stage_group)
        rank = 0 if alone else dist.get_rank(at.stage_group)
        self._exchanges = {}
        for index, master in enumerate(masters):
            rounds = plan([[f for f in of if f.group == index] for of in held], at.tensor[1])
            self._exchanges[master] = Exchange(rounds, rank, at.stage_group, self.dtype)

    def update(self, pieces: Sequence[Piece], step: int) -> None:
        for piece in pieces:
            if not piece.group["orthogonalize"]:
                for at in chunks(piece):
                    self.adamw(piece, at, piece.group["lr"], step)
        # Also where this rank has no piece: it may own matrices.
        for group in self.param_groups:
            for master in group["params"] if group["orthogonalize"] else ():
                here = {f.name for f in self._fragments[master]}
                self._muon(master, {piece.name: piece for piece in pieces if piece.name in here})

    def _muon(self, master: Tensor, held: Mapping[str, Piece]) -> None:
        """Update a flat buffer; held: its pieces by name. Collective over the stage."""

        def read(of: MatrixPiece, to: Tensor) -> None:
            piece, begin = _within(of, held)
            momentum = self.momentum
            for part, target in zip(_chunks(piece, begin, of.numel), to.split(chunk_size(to)), strict=True):
                fresh = piece.gradient[part] * (1 - momentum)
                average = piece.state["exp_avg"][part].mul_(momentum).add_(fresh)
                target.copy_(fresh.add_(average * momentum))

        def write(of: MatrixPiece, result: Tensor) -> None:
            piece, begin = _within(of, held)
            for part, given in zip(
                _chunks(piece, begin, of.numel), result.split(chunk_size(result)), strict=True
            ):
                change = (piece.weight[part] * piece.group["weight_decay"]).add_(
                    given.float() * of.matrix.scale
                )
                self.move(piece, change.mul_(-piece.group["lr"]), part)

        self._exchanges[master].run(read, orthogonalized, write, master.device)


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
def orthogonalized(x: Tensor) -> Tensor:
    """About U V^T of x = U S V^T, in the dtype of x (fp32 or bf16); zero if x is zero. x: [rows, columns], finite."""
    tall = x.shape[0] > x.shape[1]
    x = x.t().contiguous() if tall else x
    low, high = torch.aminmax(x)
    _, exponent = torch.frexp(torch.maximum(high, -low).float())
    # By a power of two, which rounds nothing: the squares of small gradients would underflow.
    x = x * torch.exp2(-exponent.float().clamp_min(-126))
    norm = torch.linalg.vector_norm(x)
    x = x / torch.where(norm > 0, norm, 1.0)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = mm(x, x.t())
        x = _plus(x, a, _plus(gram, b, gram, gram, c), x, 1.0)
    return x.t().contiguous() if tall else x


def _plus(c: Tensor, beta: float, a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """beta c + alpha a b, rounded once."""
    if is_cast(a):
        return torch.addmm(c.float(), a.float(), b.float(), beta=beta, alpha=alpha).to(a.dtype)
    return torch.addmm(c, a, b, beta=beta, alpha=alpha)
