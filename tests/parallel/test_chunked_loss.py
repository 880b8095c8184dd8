"""Head and loss in chunks on two and four tensor ranks against the reference on one."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megastable.model import loss as losses
from megastable.model.loss import LossFunction, chunked_objective
from megastable.model.sizes import choose_predicted_positions
from megastable.parallel.mappings import enter_tensor_region
from megastable.parallel.topology import TensorParallel
from tests.distributed import run_ranks

S, B, HIDDEN, COLUMNS = 11, 2, 16, 64
# Of four ranks the last two, of two ranks the last one have only padding of a vocabulary of 20.
VOCABULARIES = (50, 64, 20)


def _inputs(vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [s, b, h], the whole weight, labels [b, s]: the same on every rank."""
    g = torch.Generator().manual_seed(vocabulary)
    x = torch.randn(S, B, HIDDEN, generator=g).requires_grad_()
    weight = torch.randn(COLUMNS, HIDDEN, generator=g).requires_grad_()
    return x, weight, torch.randint(vocabulary, (B, S), generator=g)


def _compare(tp: TensorParallel, vocabulary: int, z_loss: float, elements: int, compiled: bool) -> None:
    x, weight, labels = _inputs(vocabulary)
    loss = LossFunction(vocabulary, z_loss, TensorParallel())
    plain = loss(F.linear(x, weight), labels)
    wanted_dx, wanted_dw = torch.autograd.grad(plain, (x, weight), torch.tensor(3.0))
    own = weight.detach().chunk(tp.size)[tp.rank].requires_grad_()
    entered = enter_tensor_region(x, tp)
    objective, samples = chunked_objective(entered, own, labels, vocabulary, z_loss, tp, compiled, elements)
    dx, dw = torch.autograd.grad(objective, (x, own), torch.tensor(3.0))
    pairs = (
        (objective, plain),
        (samples, loss.samples[0]),
        (dx, wanted_dx),
        (dw, wanted_dw.chunk(tp.size)[tp.rank]),
    )
    for got, wanted in pairs:
        torch.testing.assert_close(got.detach(), wanted.detach(), rtol=1e-5, atol=1e-6)
    exact = F.linear(x.double(), weight.double())[..., :vocabulary]
    predicted = exact[choose_predicted_positions(S)]
    entropies = torch.distributions.Categorical(logits=predicted).entropy().mean(0).detach()
    measured = chunked_objective(
        entered, own, labels, vocabulary, z_loss, tp, compiled, elements, entropies=True
    )[1]
    split = LossFunction(vocabulary, z_loss, tp, entropies=True)
    split(F.linear(entered, own), labels)
    for found in (measured, split.samples[0]):
        torch.testing.assert_close(found[2].double(), entropies, rtol=2e-5, atol=3e-6)
    assert torch.equal(measured[:2], samples)
    first = torch.stack((objective.detach(), *samples.flatten()))
    dist.broadcast(first, dist.get_global_rank(tp.group, 0), group=tp.group)
    assert torch.equal(first[0], objective) and torch.equal(first[1:], samples.flatten())


def _what_is_not_finite_is_heard_by_all(tp: TensorParallel, bad: float, where: str) -> None:
    x, weight, labels = _inputs(20)
    with torch.no_grad():
        {"x": x[3, 1], "weight": weight[2], "label's row": weight[labels[1, 3]]}[where][3] = bad
    own = weight.detach().chunk(tp.size)[tp.rank].requires_grad_()
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            objective, samples = chunked_objective(x, own, labels, 20, 0.1, tp, elements=100)
        assert not objective.isfinite() and not samples[:, 1].isfinite().any(), (bad, where, samples)
        assert where != "x" or samples[:, 0].isfinite().all()


def _on_a_rank() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    # What torch.compile would compile, as it stands: a compilation on every rank takes longer than all the rest.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "_compiled", lambda function: function)
        for tp in (
            TensorParallel(pairs[rank // 2], rank % 2, 2),
            TensorParallel(dist.group.WORLD, rank, world),
        ):
            for vocabulary in VOCABULARIES:
                for z_loss in (0.0, 0.3):
                    for elements, compiled in ((2**20, False), (100, False), (100, True)):
                        _compare(tp, vocabulary, z_loss, elements, compiled)
            for bad in (math.nan, math.inf, -math.inf):
                for where in ("x", "weight", "label's row"):
                    _what_is_not_finite_is_heard_by_all(tp, bad, where)


@pytest.mark.slow
def test_chunked_objective_on_tensor_ranks_is_that_of_one_process() -> None:
    run_ranks(4, _on_a_rank)
