"""AdamW with bf16 moments: the rule, its rounding, and what rounding must not do."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megastable.optim import adamw
from megastable.optim.adamw import LANES, AdamW, FusedAdamW
from tests.tiers import examples

MOMENTS = ("exp_avg", "exp_avg_sq")


def optimizer_of(p: Tensor, **settings: object) -> AdamW:
    return AdamW([nn.Parameter(p)], **settings)  # type: ignore[arg-type]


def step(optimizer: torch.optim.Optimizer, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and moments after one more step."""
    (p,) = optimizer.param_groups[0]["params"]
    p.grad = gradient
    optimizer.step()
    return p.detach(), *(optimizer.state[p][kind] for kind in MOMENTS)


def words(p: Tensor, g: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The random bits of the two moments, in numpy's own 32-bit arithmetic."""
    with np.errstate(over="ignore"):
        h = p.numpy().view(np.uint32) * np.uint32(adamw.OF_WEIGHT)
        h = h + g.numpy().view(np.uint32) * np.uint32(adamw.OF_GRADIENT)
        h = h + np.uint32(adamw.key_of(count) % 2**32)
        h = (h ^ (h >> 16)) * np.uint32(adamw.SPREADING)
    return (h ^ (h >> 16)) & 0xFFFF, h >> 16


def rounded(x: np.ndarray, bits: np.ndarray) -> Tensor:
    whole = (x.astype(np.float32).view(np.uint32) + bits.astype(np.uint32)) & np.uint32(0xFFFF0000)
    return torch.from_numpy(whole.view(np.float32)).bfloat16()


@settings(max_examples=examples(10))
@given(
    seed=st.integers(0, 1000), size=st.integers(1, 3000), beta2=st.sampled_from([0.95, 0.999]),
    decay=st.sampled_from([0.0, 0.1]), scale=st.sampled_from([1e-12, 1e-4, 1.0, 1e6]),
)  # fmt: skip
def test_a_step_is_that_of_adamw_in_double_precision(
    seed: int, size: int, beta2: float, decay: float, scale: float
) -> None:
    random = torch.Generator().manual_seed(seed)
    optimizer = optimizer_of(
        torch.randn(size, generator=random), lr=1e-3, betas=(0.9, beta2), weight_decay=decay
    )
    (p,) = optimizer.param_groups[0]["params"]
    m, v = np.zeros(size), np.zeros(size)
    for count in range(1, 5):
        gradient = torch.randn(size, generator=random) * scale
        of_m, of_v = words(p.detach(), gradient, count)
        w, g = p.detach().double().numpy(), gradient.double().numpy()
        m, v = 0.9 * m + 0.1 * g, beta2 * v + (1 - beta2) * g * g
        a = m / (1 - 0.9**count) / (np.sqrt(v / (1 - beta2**count)) + 1e-8)
        found = step(optimizer, gradient)
        expected = (1 - 1e-3 * decay) * w - 1e-3 * a
        assert np.abs(found[0].numpy() - expected).max() <= 3e-7 * (1 + np.abs(w).max())
        for exact, bits, held in zip((m, v), (of_m, of_v), found[1:], strict=True):
            assert held.dtype == torch.bfloat16
            differs = (rounded(exact, bits) != held).numpy()
            # The last bit of fp32 arithmetic tips a number over now and then.
            assert differs.sum() <= 2 + 0.001 * size
            error = np.abs(held.double().numpy() - exact)
            assert (error <= 2.0**-7 * np.abs(exact) + 1e-40).all()
        m, v = (held.double().numpy() for held in found[1:])


@pytest.mark.parametrize("size", [1, 7, adamw.CHUNKS["cpu"] + 3])
def test_chunks_and_places_do_not_matter(size: int) -> None:
    """Copies of a weight, wherever the layout has put them, stay the same bit for bit."""
    p, g = torch.randn(size), torch.randn(size)
    order = torch.randperm(size)
    one, other, alone = optimizer_of(p.clone()), optimizer_of(p[order]), optimizer_of(p[-1:].clone())
    for count in range(3):
        a, b, c = step(one, g * count), step(other, g[order] * count), step(alone, g[-1:] * count)
        for x, y, z in zip(a, b, c, strict=True):
            assert torch.equal(x[order], y) and torch.equal(x[-1:], z)


def test_rounding_is_right_on_average() -> None:
    """Over elements, and over the steps of an element that stands still."""
    g = torch.randn(400_000) * 1e-3
    g[g == 0] = 1e-3  # its error is relative
    _, m, v = step(optimizer_of(torch.randn(400_000)), g)
    for exact, held in ((0.1 * g.double(), m), (0.001 * g.double().square(), v)):
        error = (held.double() - exact) / exact
        assert error.std() > 1e-3  # it does round
        assert abs(error.mean()) < 5 * error.std() / math.sqrt(len(g))
    still = optimizer_of(torch.full((64,), 0.37), lr=0.0, betas=(0.0, 0.0))
    held = torch.stack([step(still, torch.linspace(1, 2, 64))[1].double() for _ in range(2000)])
    exact = torch.linspace(1, 2, 64).double()
    assert (held.mean(0) - exact).abs().max() < 5 * 2**-8 / math.sqrt(2000)


def to_nearest(v: Tensor, g: Tensor, beta2: float) -> Tensor:
    return (v.float() * beta2 + (1 - beta2) * g * g).bfloat16()


def test_a_second_moment_falls_where_rounding_to_nearest_stands_still() -> None:
    optimizer = optimizer_of(torch.randn(1000), lr=1e-4, betas=(0.9, 0.999))
    _, _, v = step(optimizer, torch.full((1000,), 30.0))
    nearest, exact = v.clone(), v.double()
    started = nearest.clone()
    small = torch.full((1000,), 0.3)
    for _ in range(2000):
        _, _, v = step(optimizer, small)
        nearest = to_nearest(nearest, small, 0.999)
        exact = 0.999 * exact + 0.001 * 0.09
    assert torch.equal(nearest, started)
    assert float(v.double().mean()) == pytest.approx(float(exact.mean()), rel=0.01)
    assert ((v.double() - exact).abs() < 0.35 * exact).all()


def bits(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64).to(torch.int32).view(torch.float32)


def test_what_is_not_a_number_stays_that() -> None:
    """Nans with all bits set would carry into numbers; those with few are not to become infinite."""
    bad = torch.cat((bits(0x7FFFFFFF, 0xFFFFFFFF - 2**32, 0x7F800001), torch.tensor([math.inf, -math.inf])))
    for found in step(optimizer_of(torch.ones(5)), bad):
        assert found.isnan().all()
    optimizer = optimizer_of(torch.ones(5))
    step(optimizer, torch.ones(5))
    for found in step(optimizer, bad):
        assert found.isnan().all()


def test_a_saved_state_goes_on_with_the_same_bits() -> None:
    p, gradients = torch.randn(500), torch.randn(6, 500)
    one = optimizer_of(p.clone())
    for g in gradients[:3]:
        step(one, g)
    other = optimizer_of(one.param_groups[0]["params"][0].detach().clone())
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for g in gradients[3:]:
        a, b = step(one, g), step(other, g)
        assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_low_precision_weights_are_refused() -> None:
    with pytest.raises(TypeError, match=r"bfloat16.*needs fp32"):
        step(optimizer_of(torch.ones(3).bfloat16()), torch.ones(3).bfloat16())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
def test_compiled_is_the_same_rule() -> None:
    """But for the last bit of fp32, which the compiler's fused multiply-add tips; a new rate compiles nothing again."""
    p, random = torch.randn(5000), torch.Generator().manual_seed(0)
    plain, compiled = optimizer_of(p.clone()), optimizer_of(p.clone(), compiled=True)
    frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for count in range(4):
        g = torch.randn(5000, generator=random)
        for optimizer in (plain, compiled):
            optimizer.param_groups[0]["lr"] = 1e-3 / (1 + count)
        a, b = step(plain, g), step(compiled, g)
        assert torch.allclose(a[0], b[0], atol=1e-6)
        for x, y in zip(a[1:], b[1:], strict=True):
            assert ((x.float() - y.float()).abs() <= 2**-7 * x.float().abs()).all()
            if not count:
                assert (x != y).float().mean() < 0.002
        # From the same state again: a tipped bit changes what the next step hashes.
        for kind, x in zip(MOMENTS, a[1:], strict=True):
            compiled.state[compiled.param_groups[0]["params"][0]][kind].copy_(x)
        compiled.param_groups[0]["params"][0].data.copy_(a[0])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == frames + 1
    bad = bits(0x7FFFFFFF, 0x7F800001).repeat(2500)
    assert all(found.isnan().all() for found in step(compiled, bad))


def test_betas_and_eps_are_constants_of_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As inputs they are no part of what a kernel on the disk is found by, and the kernel is made for their values."""
    seen: list[Any] = []
    compiler = torch.compile

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        seen.extend(inputs)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda f, **options: compiler(f, backend=backend, **options))
    adamw._compiled.cache_clear()
    step(optimizer_of(torch.randn(100), compiled=True), torch.randn(100))
    adamw._compiled.cache_clear()
    assert seen and not [x for x in seen if isinstance(x, Tensor) and x.dtype == torch.float64]


N, UPDATES = 501, 8  # 5 elements behind the last whole vector


def train_fused(before: int, behind: int, fused: type[torch.optim.Optimizer] = FusedAdamW) -> list[Tensor]:
    """The same N elements after some steps, with other elements before and behind them in the buffer."""
    g = torch.Generator().manual_seed(0)
    own = slice(before, before + N)
    p = torch.ones(before + N + behind)
    p[own] = torch.randn(N, generator=g)
    settings = {"fused": True} if fused is torch.optim.AdamW else {}
    optimizer = fused([p.requires_grad_()], lr=3e-3, betas=(0.9, 0.95), eps=1e-8, **settings)  # type: ignore[call-arg]
    for _ in range(UPDATES):
        p.grad = torch.ones_like(p)
        p.grad[own] = torch.randn(N, generator=g) * 1e-2
        optimizer.step()
    state = optimizer.state[p]
    assert state["step"] == UPDATES
    return [x.detach()[own].clone() for x in (p, state["exp_avg"], state["exp_avg_sq"])]


def test_fused_adamw_updates_an_element_alike_at_every_place() -> None:
    wanted = train_fused(0, -N % LANES)
    for before in range(LANES):
        for behind in (0, 1, LANES):
            for x, y in zip(train_fused(before, behind), wanted, strict=True):
                assert torch.equal(x, y), (before, behind)


@pytest.mark.parametrize("behind", [0, -N % LANES])
def test_fused_adamw_is_torchs(behind: int) -> None:
    for x, y in zip(train_fused(0, behind), train_fused(0, behind, torch.optim.AdamW), strict=True):
        whole = N - N % LANES if behind == 0 else N
        assert torch.equal(x[:whole], y[:whole])
        torch.testing.assert_close(x, y, rtol=1e-6, atol=0)


def test_fused_adamw_refuses_what_is_not_contiguous() -> None:
    strided = torch.ones(3, 5).t().requires_grad_()
    with pytest.raises(ValueError, match=r"\(5, 3\).*not contiguous"):
        FusedAdamW([torch.ones(2, requires_grad=True), strided], lr=0.1, betas=(0.9, 0.95), eps=1e-8)


def make_moments(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and gradients of three steps, and where low weights go."""
    random = torch.Generator().manual_seed(size)
    return (
        torch.randn(size, generator=random),
        torch.randn(3, size, generator=random),
        torch.empty(size, dtype=dtype),
    )


def train_in_one_pass(
    optimizer_class: type[AdamW | FusedAdamW], size: int, factor: float, folded: bool
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Weight and moments after three steps, low weights, and the last gradient; folded: all in the optimizer's pass."""
    weights, gradients, low = make_moments(size, torch.bfloat16)
    p = nn.Parameter(weights)
    optimizer = optimizer_class([p], lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for gradient in gradients:
        p.grad = gradient.clone()
        if folded:
            optimizer.gradient_factor, optimizer.low_weights = factor, {p: low}
        elif factor != 1:
            p.grad.mul_(factor)
        optimizer.step()
        if not folded:
            low.copy_(p.detach())
    return [p.detach(), *(optimizer.state[p][kind] for kind in MOMENTS)], low, p.grad


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("optimizer_class", [AdamW, FusedAdamW])
@pytest.mark.parametrize("factor", [1.0, 0.37])
@pytest.mark.parametrize("size", [7, 64, 3 * 48 + 5])
def test_one_pass_gives_the_bits_of_three(
    optimizer_class: type[AdamW | FusedAdamW],
    factor: float,
    size: int,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clipping, update and the cast to bf16; with two threads each takes chunks of the largest."""
    wanted, wanted_low, _ = train_in_one_pass(optimizer_class, size, factor, folded=False)
    for chunks in (adamw.CHUNKS, adamw.FUSED_CHUNKS):
        monkeypatch.setitem(chunks, "cpu", 48)
    monkeypatch.setattr(adamw, "SHARED", 50)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found, low, gradient = train_in_one_pass(optimizer_class, size, factor, folded=True)
    finally:
        torch.set_num_threads(threads_before)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    assert torch.equal(low, wanted_low)
    if size > 2 * 50 or optimizer_class is AdamW:  # chunks are clipped in a cache
        assert torch.equal(gradient, make_moments(size, torch.float32)[1][-1])


def test_threads_share_only_what_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, real = [], adamw.share_items

    def share(update: Any, chunks: Any) -> None:
        shared.append(len(chunks))
        real(update, chunks)

    monkeypatch.setattr(adamw, "share_items", share)
    threads_before = torch.get_num_threads()
    try:
        for threads, size in ((1, 2 * adamw.SHARED), (2, 2 * adamw.SHARED - 1), (2, 2 * adamw.SHARED)):
            torch.set_num_threads(threads)
            p = nn.Parameter(torch.zeros(size))
            p.grad = torch.zeros(size)
            FusedAdamW([p], lr=1e-2, betas=(0.9, 0.95), eps=1e-8).step()
    finally:
        torch.set_num_threads(threads_before)
    assert shared == [2 * adamw.SHARED // adamw.FUSED_CHUNKS["cpu"]]


def test_the_formula_for_a_compiler_is_torchs() -> None:
    """fp32 moments on a GPU: the plain formula against torch's kernel, and both against fp64."""
    check_formula(adamw.fp32_update)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
def test_a_compiled_update_is_one_pass() -> None:
    """One kernel, which reads four numbers of an element and writes three and the bf16 weight: 30 bytes."""
    from torch._inductor import config, metrics

    metrics.reset()
    adamw._compiled.cache_clear()
    with config.patch(force_disable_caches=True):  # what comes from a cache is not counted
        check_formula(adamw._compiled(adamw.fp32_update))
    assert metrics.generated_kernel_count == 1


SIZE = 4096


def check_formula(update_function: Callable[..., None]) -> None:
    weights, gradients, low = make_moments(SIZE, torch.bfloat16)
    group = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    p, fused = nn.Parameter(weights.clone()), weights.clone()
    m, v, fused_m, fused_v = (torch.zeros(SIZE) for _ in range(4))
    exact_w, exact_m, exact_v = weights.double(), torch.zeros(SIZE).double(), torch.zeros(SIZE).double()
    for count, gradient in enumerate(gradients, 1):
        step_count = torch.tensor(float(count))
        numbers = adamw.count_factors(step_count, group, 0.37)
        update_function(p.detach(), gradient, m, v, [low], numbers, 0.9, 0.95, 1e-8)
        adamw.update_fused(
            (fused, gradient * 0.37, fused_m, fused_v), step_count, 1e-2, (0.9, 0.95), 1e-8, 0.1
        )
        exact_g = gradient.double() * 0.37
        exact_m, exact_v = 0.9 * exact_m + 0.1 * exact_g, 0.95 * exact_v + 0.05 * exact_g.square()
        root = (exact_v / (1 - 0.95**count)).sqrt() + 1e-8
        exact_w = exact_w * (1 - 1e-3) - 1e-2 * exact_m / (1 - 0.9**count) / root
        for found, torchs, exact in (
            (p.detach(), fused, exact_w),
            (m, fused_m, exact_m),
            (v, fused_v, exact_v),
        ):
            largest = exact.abs().max()
            error, torchs_error = ((x.double() - exact).abs().max() / largest for x in (found, torchs))
            assert error < 3e-7 and torchs_error < 3e-7
        assert torch.equal(low, p.detach().bfloat16())
