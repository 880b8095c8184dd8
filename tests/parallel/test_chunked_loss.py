"""Head and loss in chunks on two and four tensor ranks against the reference on one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megastable.model import chunked
from megastable.model.chunked import chunked_objective
from megastable.model.loss import LossFunction
from megastable.model.sizes import chunk_size
from megastable.parallel.mappings import enter
from megastable.parallel.topology import TensorParallel
from tests.distributed import run_ranks

S, B, HIDDEN, COLUMNS = 11, 2, 16, 64
# Of four ranks the last two, of two ranks the last one have only padding of a vocabulary of 20.
VOCABULARIES = (50, 64, 20)


def _inputs(vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """x [s, b, h], the whole weight, labels [b, s]: the same on every rank."""
    g = torch.Generator().manual_seed(vocabulary)
    x = torch.randn(S, B, HIDDEN, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(COLUMNS, HIDDEN, generator=g).to(dtype).requires_grad_()
    return x, weight, torch.randint(vocabulary, (B, S), generator=g)


class _Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def _compare(tp: TensorParallel, vocabulary: int, z_loss: float, elements: int, compiled: bool) -> None:
    x, weight, labels = _inputs(vocabulary)
    loss = LossFunction(vocabulary, z_loss, TensorParallel())
    plain = loss(F.linear(x, weight), labels)
    wanted_dx, wanted_dw = torch.autograd.grad(plain, (x, weight), torch.tensor(3.0))
    own = weight.detach().chunk(tp.size)[tp.rank].requires_grad_()
    entered = enter(x, tp)
    with _Collectives() as collectives:
        objective, samples = chunked_objective(
            entered, own, labels, vocabulary, z_loss, tp, compiled, elements
        )
    assert collectives.count == math.ceil(S * B / chunk_size(S * B, COLUMNS // tp.size, elements))
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
    entropies = torch.distributions.Categorical(logits=exact).entropy().mean(0).detach()
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


def _in_bf16(tp: TensorParallel) -> None:
    """As exact as the reference on the same ranks."""
    x, weight, labels = _inputs(50, torch.bfloat16)
    wide_x, wide_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    logits = F.linear(wide_x, wide_weight)[..., :50]
    exact = (
        F.cross_entropy(logits.flatten(0, 1), labels.t().flatten())
        + 0.1 * logits.logsumexp(-1).square().mean()
    )
    exact_dx, exact_dw = torch.autograd.grad(exact, (wide_x, wide_weight))
    own = weight.detach().chunk(tp.size)[tp.rank].requires_grad_()
    errors = []
    for objective in (
        LossFunction(50, 0.1, tp)(F.linear(enter(x, tp), own), labels),
        chunked_objective(enter(x, tp), own, labels, 50, 0.1, tp, elements=100)[0],
    ):
        dx, dw = torch.autograd.grad(objective, (x, own))
        pairs = (dx, exact_dx), (dw, exact_dw.chunk(tp.size)[tp.rank])
        errors.append([float((got - wanted).norm()) for got, wanted in pairs])
    for theirs, ours in zip(*errors, strict=True):
        assert ours <= 1.5 * theirs, errors


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


def _label_that_no_rank_has(tp: TensorParallel) -> None:
    x, weight, labels = _inputs(20)
    labels[1, 3] = 20  # a column of padding
    own = weight.detach().chunk(tp.size)[tp.rank]
    assert not chunked_objective(x, own, labels, 20, 0.1, tp)[0].isfinite()


def _on_a_rank() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    # What torch.compile would compile, as it stands: a compilation on every rank takes longer than all the rest.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "_compiled", lambda function: function)
        for tp in (
            TensorParallel(pairs[rank // 2], rank % 2, 2),
            TensorParallel(dist.group.WORLD, rank, world),
        ):
            for vocabulary in VOCABULARIES:
                for z_loss in (0.0, 0.3):
                    for elements, compiled in ((2**20, False), (100, False), (100, True)):
                        _compare(tp, vocabulary, z_loss, elements, compiled)
            _in_bf16(tp)
            for bad in (math.nan, math.inf, -math.inf):
                for where in ("x", "weight", "label's row"):
                    _what_is_not_finite_is_heard_by_all(tp, bad, where)
            _label_that_no_rank_has(tp)


@pytest.mark.slow
def test_tensor_ranks_agree_with_one_process() -> None:
    run_ranks(4, _on_a_rank)
