"""Head and loss in chunks against the reference (F.linear and loss.py) and against plain torch in fp64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megastable.model import loss as losses
from megastable.model.loss import LossFunction, chunked_objective, project_features
from megastable.model.sizes import choose_predicted_positions, chunk_size
from megastable.parallel.topology import TensorParallel
from tests.tiers import examples

ONE = TensorParallel()
HIDDEN, VOCABULARY, COLUMNS = 16, 50, 64


@dataclass
class Result:
    """What a way to the objective gave, gradients of `upstream` times it."""

    objective: Tensor
    samples: Tensor
    dx: Tensor
    dw: Tensor


def inputs(
    s: int = 7, b: int = 3, h: int = HIDDEN, vocabulary: int = VOCABULARY, columns: int = COLUMNS,
    dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 3.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """x [s, b, h], weight [columns, h], labels [b, s]."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(s, b, h, generator=g).to(dtype).requires_grad_()
    weight = (torch.randn(columns, h, generator=g) * scale * h**-0.5).to(dtype).requires_grad_()
    return x, weight, torch.randint(vocabulary, (b, s), generator=g)


def with_gradients(objective: Tensor, samples: Tensor, x: Tensor, weight: Tensor, upstream: float) -> Result:
    dx, dw = torch.autograd.grad(objective, (x, weight), torch.full_like(objective, upstream))
    return Result(objective.detach(), samples, dx, dw)


def by_chunks(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocabulary: int,
    z_loss: float,
    upstream: float = 1.0,
    **how: Any,
) -> Result:
    objective, samples = chunked_objective(x, weight, labels, vocabulary, z_loss, ONE, **how)
    return with_gradients(objective, samples, x, weight, upstream)


def reference(
    x: Tensor, weight: Tensor, labels: Tensor, vocabulary: int, z_loss: float, upstream: float = 1.0,
    cap: float | None = None,
) -> Result:  # fmt: skip
    loss = LossFunction(vocabulary, z_loss, ONE)
    objective = loss(project_features((x, weight), cap), labels)
    return with_gradients(objective, loss.samples[0], x, weight, upstream)


def exact(
    x: Tensor, weight: Tensor, labels: Tensor, vocabulary: int, z_loss: float, upstream: float = 1.0,
    cap: float | None = None,
) -> Result:  # fmt: skip
    """In fp64, by torch's own functions."""
    x, weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = F.linear(x, weight)[..., :vocabulary]
    logits = logits if cap is None else cap * (logits / cap).tanh()
    square = logits.logsumexp(-1).square()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), reduction="none").view(square.shape)
    samples = torch.stack((loss, square)).mean(1).detach()
    return with_gradients(loss.mean() + z_loss * square.mean(), samples, x, weight, upstream)


def error(got: Tensor, wanted: Tensor) -> float:
    """Relative, of the whole tensor."""
    return ((got.double() - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()


@settings(deadline=None, max_examples=examples(60))
@given(
    s=st.integers(1, 9), b=st.integers(1, 4), h=st.integers(1, 12), vocabulary=st.integers(1, 40),
    padding=st.integers(0, 20), elements=st.integers(1, 1500), block=st.integers(1, 300),
    z_loss=st.sampled_from([0.0, 1e-4, 0.3]), seed=st.integers(0, 99), cap=st.sampled_from([None, None, 1.5, 30.0]),
)  # fmt: skip
def test_chunked_objective_is_the_references(
    s: int, b: int, h: int, vocabulary: int, padding: int, elements: int, block: int, z_loss: float, seed: int,
    cap: float | None,
) -> None:  # fmt: skip
    x, weight, labels = inputs(s, b, h, vocabulary, vocabulary + padding, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "BLOCK", block)
        got = by_chunks(x, weight, labels, vocabulary, z_loss, 2.5, elements=elements, cap=cap)
    for wanted in (
        reference(x, weight, labels, vocabulary, z_loss, 2.5, cap),
        exact(x, weight, labels, vocabulary, z_loss, 2.5, cap),
    ):
        for name, value in vars(wanted).items():
            torch.testing.assert_close(getattr(got, name).double(), value.double(), rtol=2e-5, atol=3e-6)
    assert got.objective.dtype == got.samples.dtype == torch.float32 and got.samples.shape == (2, b)
    assert not got.samples.requires_grad
    assert not got.dw[vocabulary:].any()


@settings(deadline=None, max_examples=examples(10))
@given(
    s=st.integers(1, 99), vocabulary=st.integers(1, 40), padding=st.integers(0, 20), elements=st.integers(1, 1500),
    block=st.integers(1, 300), seed=st.integers(0, 99), cap=st.sampled_from([None, 1.5]), compiled=st.booleans(),
)  # fmt: skip
def test_chunked_entropies_are_exact_and_change_no_other_bit(
    s: int,
    vocabulary: int,
    padding: int,
    elements: int,
    block: int,
    seed: int,
    cap: float | None,
    compiled: bool,
) -> None:
    x, weight, labels = inputs(s, vocabulary=vocabulary, columns=vocabulary + padding, seed=seed)
    how: dict[str, Any] = {"elements": elements, "cap": cap, "compiled": compiled}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "BLOCK", block)
        patch.setattr(losses, "_compiled", lambda function: function)
        got = by_chunks(x, weight, labels, vocabulary, 0.1, entropies=True, **how)
        without = by_chunks(x, weight, labels, vocabulary, 0.1, **how)
    logits = F.linear(x.double(), weight.double())[..., :vocabulary]
    logits = logits if cap is None else cap * (logits / cap).tanh()
    wanted = (
        torch.distributions.Categorical(logits=logits[choose_predicted_positions(s)])
        .entropy()
        .mean(0)
        .detach()
    )
    for plain in (False, True):
        loss = LossFunction(vocabulary, 0.1, ONE, cap=cap, plain=plain, entropies=True)
        loss((x, weight), labels) if plain else loss(project_features((x, weight), cap), labels)
        torch.testing.assert_close(loss.samples[0][2].double(), wanted, rtol=2e-5, atol=3e-6)
    torch.testing.assert_close(got.samples[2].double(), wanted, rtol=2e-5, atol=3e-6)
    assert torch.equal(got.samples[:2], without.samples) and torch.equal(got.objective, without.objective)
    assert torch.equal(got.dx, without.dx) and torch.equal(got.dw, without.dw)


@given(
    tokens=st.integers(1, 5000), columns=st.integers(1, 300), elements=st.integers(1, 100_000)
)  # fmt: skip
def test_chunk_size_stays_below_the_limit_and_equal_if_possible(
    tokens: int, columns: int, elements: int
) -> None:
    size = chunk_size(tokens, columns, elements)
    assert 1 <= size <= tokens and size * columns <= max(elements, columns)
    fewest = math.ceil(tokens / max(elements // columns, 1))
    assert math.ceil(tokens / size) < 2 * fewest or fewest == 1
    if any(tokens % n == 0 for n in range(fewest, 2 * fewest)):
        assert tokens % size == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["x", "weight", "label's row"])
@pytest.mark.parametrize("gradients", [True, False])
def test_chunked_objective_is_never_silent_about_non_finite_numbers(
    bad: float, where: str, gradients: bool
) -> None:
    x, weight, labels = inputs()
    with torch.no_grad():
        {"x": x[2, 1], "weight": weight[5], "label's row": weight[labels[1, 2]]}[where][3] = bad
    loss = LossFunction(VOCABULARY, 0.1, ONE)
    with torch.set_grad_enabled(gradients):
        plain = loss(F.linear(x, weight), labels)
        objective, samples = chunked_objective(x, weight, labels, VOCABULARY, 0.1, ONE, elements=500)
    assert not plain.isfinite() and not objective.isfinite()
    quiet = samples.isfinite() & ~loss.samples[0].isfinite()
    assert not quiet.any(), (samples, loss.samples[0])
    if where == "x":  # of the other samples the losses are told
        assert samples[:, [0, 2]].isfinite().all()


class Sizes(TorchDispatchMode):
    """The most elements of a tensor that any operation gave, and the products done."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.products = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradients", [True, False])
def test_chunked_objective_never_has_all_logits(gradients: bool, dtype: torch.dtype) -> None:
    """And nothing is computed twice: three products for a chunk with gradients, one without."""
    x, weight, labels = inputs(64, 4, 8, 500, 512, dtype)
    elements = 32 * 512
    with Sizes() as sizes, torch.set_grad_enabled(gradients):
        objective, _ = chunked_objective(x, weight, labels, 500, 1e-4, ONE, elements=elements)
        if gradients:
            objective.backward()
    assert sizes.largest <= elements < 256 * 500
    assert sizes.products == 8 * (3 if gradients else 1)


@pytest.mark.slow
@pytest.mark.parametrize("cap", [None, 2.0])
def test_chunked_objective_compiled_is_the_same_and_compiled_once(cap: float | None) -> None:
    """Chunks of 6 and a last of 5: two compilations in all, however many steps, and whatever is in them."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for seed in range(3):
        case = inputs(23, 1, seed=seed)
        got = by_chunks(*case, VOCABULARY, 0.1, elements=6 * COLUMNS, compiled=True, cap=cap)
        wanted = by_chunks(*case, VOCABULARY, 0.1, elements=6 * COLUMNS, cap=cap)
        for name, value in vars(wanted).items():
            torch.testing.assert_close(getattr(got, name), value, rtol=1e-5, atol=1e-7)
    for bad in (math.nan, math.inf):
        x, weight, labels = inputs(23, 1)
        with torch.no_grad():
            x[21, 0, 3] = bad
        got = by_chunks(x, weight, labels, VOCABULARY, 0.1, elements=6 * COLUMNS, compiled=True, cap=cap)
        # An infinite logit is finite once capped; then it is the gradients that tell: 0 times infinity.
        assert not (got.objective.isfinite() and got.samples.isfinite().all() and got.dw.isfinite().all())
        assert cap or not got.samples.isfinite().any()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()
