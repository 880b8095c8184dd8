"""Head and loss in chunks against the reference (F.linear and loss.py) and against plain torch in fp64."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megastable.model import chunked
from megastable.model.chunked import chunked_objective
from megastable.model.loss import LossFunction, project
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
    objective = loss(project((x, weight), cap), labels)
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
def test_objective_samples_and_gradients_are_the_references(
    s: int, b: int, h: int, vocabulary: int, padding: int, elements: int, block: int, z_loss: float, seed: int,
    cap: float | None,
) -> None:  # fmt: skip
    x, weight, labels = inputs(s, b, h, vocabulary, vocabulary + padding, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "BLOCK", block)
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
def test_entropies_of_predictions_are_exact_and_change_no_bit_of_the_rest(
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
        patch.setattr(chunked, "BLOCK", block)
        patch.setattr(chunked, "_compiled", lambda function: function)
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
        loss((x, weight), labels) if plain else loss(project((x, weight), cap), labels)
        torch.testing.assert_close(loss.samples[0][2].double(), wanted, rtol=2e-5, atol=3e-6)
    torch.testing.assert_close(got.samples[2].double(), wanted, rtol=2e-5, atol=3e-6)
    assert torch.equal(got.samples[:2], without.samples) and torch.equal(got.objective, without.objective)
    assert torch.equal(got.dx, without.dx) and torch.equal(got.dw, without.dw)


class Living(TorchDispatchMode):
    """Counts the bytes of the tensors that are made within it. most: alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        out = function(*given, **(named or {}))
        if isinstance(out, Tensor) and not function.is_view and all(out is not one for one in given):
            self._made.append(weakref.ref(out))
            self.most = max(self.most, sum(t.nbytes for made in self._made if (t := made()) is not None))
        return out


@pytest.mark.parametrize(("cap", "blocks"), [(None, 2), (30.0, 3)])
def test_entropies_take_the_memory_that_is_said(
    cap: float | None, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "BLOCK", 8 * 512)
    logits = torch.randn(32, 512, dtype=torch.bfloat16)
    with Living() as living:
        chunked.own_entropy(logits, cap)
    small = 4 * len(logits) * 4  # numbers of a token
    assert blocks * 8 * 512 * 4 <= living.most <= blocks * 8 * 512 * 4 + small


@given(
    tokens=st.integers(1, 5000), columns=st.integers(1, 300), elements=st.integers(1, 100_000)
)  # fmt: skip
def test_chunks_stay_below_the_limit_and_are_equal_where_they_can_be(
    tokens: int, columns: int, elements: int
) -> None:
    size = chunk_size(tokens, columns, elements)
    assert 1 <= size <= tokens and size * columns <= max(elements, columns)
    fewest = math.ceil(tokens / max(elements // columns, 1))
    assert math.ceil(tokens / size) < 2 * fewest or fewest == 1
    if any(tokens % n == 0 for n in range(fewest, 2 * fewest)):
        assert tokens % size == 0


@pytest.mark.parametrize("elements", [2**22, 2**14], ids=["one chunk", "chunks"])
def test_in_bf16_it_is_about_as_exact_as_the_reference(elements: int) -> None:
    """Both multiply in bf16; what may differ is how often a gradient is rounded."""
    case = inputs(96, 3, 64, 500, 512, torch.bfloat16)
    got = by_chunks(*case, 500, 1e-2, elements=elements)
    plain, wanted = reference(*case, 500, 1e-2), exact(*case, 500, 1e-2)
    for name in vars(wanted):
        ours, theirs = (error(getattr(r, name), getattr(wanted, name)) for r in (got, plain))
        assert ours <= 1.5 * theirs + 1e-6, (name, ours, theirs)
    assert got.dx.dtype == got.dw.dtype == torch.bfloat16


@pytest.mark.parametrize("elements", [2**22, 2**12], ids=["one chunk", "chunks"])
def test_fp16_gradients_survive_a_loss_scale(elements: int) -> None:
    """Most probabilities are below what fp16 can hold once they are divided by the number of tokens."""
    case = inputs(256, 4, HIDDEN, 200, 200, torch.float16, scale=0.5)
    got = by_chunks(*case, 200, 1e-4, 65536.0, elements=elements)
    plain, wanted = reference(*case, 200, 1e-4, 65536.0), exact(*case, 200, 1e-4, 65536.0)
    for name in ("dx", "dw"):
        ours, theirs = (error(getattr(r, name), getattr(wanted, name)) for r in (got, plain))
        assert ours <= 1.5 * theirs, (name, ours, theirs)
    assert got.dx.dtype == got.dw.dtype == torch.float16


def test_in_fp16_a_sum_over_many_tokens_does_not_overflow_before_it_is_scaled() -> None:
    """20,000 tokens with the same rare label and x of 8: 160,000 before the division by their number."""
    x = torch.full((20_000, 1, 2), 8.0, dtype=torch.float16)
    weight = torch.zeros(4, 2, dtype=torch.float16, requires_grad=True)
    labels = torch.full((1, 20_000), 3)
    for elements in (2**20, 2**14):
        objective, _ = chunked_objective(x, weight, labels, 4, 0.0, ONE, elements=elements)
        (dw,) = torch.autograd.grad(objective, weight)
        torch.testing.assert_close(dw, torch.tensor([[2.0, 2], [2, 2], [2, 2], [-6, -6]]).half())


@pytest.mark.parametrize(("needs_x", "needs_weight"), [(True, False), (False, True), (False, False)])
def test_only_the_gradients_that_are_asked_for(needs_x: bool, needs_weight: bool) -> None:
    x, weight, labels = inputs()
    wanted = reference(x, weight, labels, VOCABULARY, 0.1)
    x, weight = x.detach().requires_grad_(needs_x), weight.detach().requires_grad_(needs_weight)
    objective, _ = chunked_objective(x, weight, labels, VOCABULARY, 0.1, ONE, elements=500)
    torch.testing.assert_close(objective.detach(), wanted.objective)
    assert objective.requires_grad == (needs_x or needs_weight)
    if objective.requires_grad:
        objective.backward()
    for tensor, gradient in ((x, wanted.dx), (weight, wanted.dw)):
        assert (tensor.grad is not None) == tensor.requires_grad
        if tensor.grad is not None:
            torch.testing.assert_close(tensor.grad, gradient)


def test_a_view_of_a_tied_weight_and_micro_batches_add_up() -> None:
    """The embedding's own weight is the head's, and two micro-batches come before one step."""

    def train(head: Any) -> Tensor:
        weight = torch.nn.Parameter(inputs()[1].detach().clone())
        for seed in (1, 2):
            labels = inputs(seed=seed)[2]
            head(F.embedding(labels.t(), weight), weight.view_as(weight), labels).backward()
        assert weight.grad is not None
        return weight.grad

    got = train(lambda x, w, labels: chunked_objective(x, w, labels, VOCABULARY, 0.1, ONE, elements=500)[0])
    wanted = train(lambda x, w, labels: LossFunction(VOCABULARY, 0.1, ONE)(F.linear(x, w), labels))
    torch.testing.assert_close(got, wanted)


def test_backward_twice_and_inputs_untouched() -> None:
    x, weight, labels = inputs()
    before = x.detach().clone(), weight.detach().clone()
    objective, _ = chunked_objective(x, weight, labels, VOCABULARY, 0.1, ONE, elements=500)
    first = torch.autograd.grad(objective, (x, weight), retain_graph=True)
    second = torch.autograd.grad(objective, (x, weight))
    for tensors in ((first, second), (before, (x, weight))):
        assert all(torch.equal(a, b) for a, b in zip(*tensors, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["x", "weight", "label's row"])
@pytest.mark.parametrize("gradients", [True, False])
def test_what_is_not_finite_is_never_a_silent_number(bad: float, where: str, gradients: bool) -> None:
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


@pytest.mark.parametrize("padding", [1e4, math.inf, math.nan])
def test_padding_of_the_vocabulary_takes_no_part(padding: float) -> None:
    x, weight, labels = inputs()
    wanted = by_chunks(x, weight, labels, VOCABULARY, 0.1)
    with torch.no_grad():
        weight[VOCABULARY:] = padding
    for name, value in vars(by_chunks(x, weight, labels, VOCABULARY, 0.1)).items():
        assert torch.equal(value, getattr(wanted, name)), name


@pytest.mark.parametrize("label", [-1, VOCABULARY, COLUMNS])
def test_a_label_that_is_no_token_is_heard(label: int) -> None:
    x, weight, labels = inputs()
    labels[1, 2] = label
    objective, samples = chunked_objective(x, weight, labels, VOCABULARY, 0.1, ONE)
    assert not objective.isfinite() and not samples[0, 1].isfinite()


def test_large_logits_do_not_overflow() -> None:
    case = inputs(scale=1e4)
    got, wanted = by_chunks(*case, VOCABULARY, 0.0), exact(*case, VOCABULARY, 0.0)
    for name, value in vars(wanted).items():
        torch.testing.assert_close(getattr(got, name).double(), value, rtol=1e-5, atol=1e-2)


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
def test_the_logits_never_exist_as_a_whole(gradients: bool, dtype: torch.dtype) -> None:
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
def test_compiled_it_is_the_same_and_is_not_compiled_again(cap: float | None) -> None:
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_where_products_can_be_in_fp32_there_is_one_sum(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, without one: the products that only its cuBLAS writes in fp32 are made of fp32 factors."""

    def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        return a.to(out_dtype) @ b.to(out_dtype)

    def addmm(total: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        return out.copy_(total + mm(a, b, out_dtype))

    monkeypatch.setattr(chunked, "_wide_products", lambda _: True)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    generator = torch.Generator().manual_seed(0)
    parts = [
        tuple(torch.randn(6, n, generator=generator).to(dtype) for n in (50, 8))
        for _ in range(2)  # chunks
    ]
    dw = chunked._WeightGradient(torch.empty(50, 8, dtype=dtype), many=True)
    dw.add(*parts[0])
    first = dw.total
    assert first is not None and first.dtype == torch.float32
    dw.add(*parts[1])
    assert dw.total is first
    wanted = sum(gradient.double().t() @ x.double() for gradient, x in parts)
    torch.testing.assert_close(first.double(), wanted, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_memory_held_before_does_not_matter(dtype: torch.dtype) -> None:
    """With NaN in all memory that is taken; 250 columns of 256 are no multiple of what products take at once."""
    given = inputs(64, 2, 32, 250, 256, dtype)
    plain = by_chunks(*given, 250, 1e-4)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        filled = by_chunks(*given, 250, 1e-4)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in ((plain.objective, filled.objective), (plain.dx, filled.dx), (plain.dw, filled.dw)):
        assert torch.isfinite(other).all()
        assert torch.equal(one, other)
