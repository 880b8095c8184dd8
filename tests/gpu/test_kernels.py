"""Attention and loss as a GPU computes them, against plain references in fp32; compiled blocks against written ones."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend

from megastable.config.model import ModelConfig
from megastable.model import cores
from megastable.model.cores import CORES, reference_attention
from megastable.model.gpt import GPT
from megastable.model.kernels import FULL, Kernels
from megastable.model.loss import LossFunction, chunked_objective
from megastable.parallel.topology import TensorParallel
from tests.model.test_chunked import ONE, VOCABULARY, by_chunks, exact, inputs, reference

ATTENTION = [
    "sdpa",
    pytest.param(
        "te",
        marks=pytest.mark.skipif(find_spec("transformer_engine") is None, reason="no Transformer Engine"),
    ),
]
BF16 = 2**-7  # relative error in norm that rounding to bf16 may leave, here and there twice


def error(got: Tensor, wanted: Tensor) -> float:
    right = wanted.detach().double()
    return float((got.detach().double() - right).norm() / right.norm())


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("attention", ATTENTION)
def test_attention(attention: str, groups: int, width: int, gpu: torch.device) -> None:
    b, heads, s = 2, 8, 1024
    shapes = [(b, heads, s, width), *[(b, heads // groups, s, width)] * 2]
    check_core(attention, shapes, None, gpu)


@pytest.mark.parametrize("groups", [1, 4])
def test_attention_inside_documents(groups: int, gpu: torch.device) -> None:
    b, heads, s, width = 2, 8, 1024, 64
    begins = torch.rand(b, s, generator=torch.Generator().manual_seed(5)) < 0.01
    segments = begins.cumsum(1).to(torch.int32).to(gpu)
    check_core("sdpa", [(b, heads, s, width), *[(b, heads // groups, s, width)] * 2], segments, gpu)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_attention_writes_out_all_scores(
    dtype: torch.dtype, groups: int, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the kernel that does, torch says so where no other fits."""
    monkeypatch.setattr(cores, "FUSED", [kernel for kernel in cores.FUSED if kernel != SDPBackend.MATH])
    q, k, v = (
        torch.randn(2, heads, 512, 64, device=gpu, dtype=dtype) for heads in (8, 8 // groups, 8 // groups)
    )
    got = CORES["sdpa"].run(q, k, v, None)
    assert error(got, reference_attention(q, k, v, None)) < 2 * BF16


def check_core(
    name: str, shapes: list[tuple[int, int, int, int]], segments: Tensor | None, gpu: torch.device
) -> None:
    """Forward and the three gradients; q, k and v lie in memory as in the model: sequence first."""
    generator = torch.Generator(gpu).manual_seed(0)
    inputs = []
    for b, heads, s, width in shapes:
        lying = torch.randn(s, b, heads, width, generator=generator, device=gpu, dtype=torch.bfloat16)
        inputs.append(lying.permute(1, 2, 0, 3).requires_grad_())
    upstream = torch.randn(shapes[0], generator=generator, device=gpu, dtype=torch.bfloat16)

    core = CORES[name]
    q, k, v = inputs
    y = core.run(q, k, v, core.prepare(segments, FULL, q.shape[2], gpu))
    got = [y, *torch.autograd.grad(y, inputs, upstream)]
    wide = q, k, v = [x.detach().float().requires_grad_() for x in inputs]
    right = reference_attention(q, k, v, segments)
    wanted = [right, *torch.autograd.grad(right, wide, upstream.float())]
    for mine, its in zip(got, wanted, strict=True):
        assert mine.dtype == torch.bfloat16 and mine.shape == its.shape
        assert error(mine, its) < 2 * BF16


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("apart", [False, True], ids=["causal", "documents"])
def test_a_compiled_block_is_one_graph_and_stays_it(recompute: str, apart: bool, gpu: torch.device) -> None:
    """No graph break, one graph for all blocks and steps, the numbers of the block as it is written."""
    config = ModelConfig(
        layers=3, hidden=256, heads=4, kv_heads=2, ffn=512, sequence_length=256, vocab_size=1000
    )
    tokens = torch.randint(1000, (2, 257), generator=torch.Generator().manual_seed(1)).to(gpu)
    segments = (torch.arange(256, device=gpu) // 100).to(torch.int32).expand(2, -1).contiguous()
    results = []
    for compiled in (False, True):
        loss = LossFunction(1000, 1e-4, TensorParallel(), compiled)
        model = GPT(config, TensorParallel(), recompute, 3, loss, Kernels("sdpa", "chunked", compiled))
        model = model.to(gpu, torch.bfloat16)
        counters.clear()
        graphs = []
        for _ in range(4):
            model.zero_grad()
            inputs = (tokens[:, :-1], segments.clone()) if apart else tokens[:, :-1]
            objective = model(inputs, tokens[:, 1:])
            objective.backward()
            graphs.append(counters["stats"]["unique_graphs"])
        assert not counters["graph_break"]
        if compiled:
            # Of blocks one; of the final norm, the loss, and FlexAttention's mask, compiled by themselves, one each.
            assert 2 <= graphs[0] <= 4 and len(set(graphs)) == 1
        results.append([objective.detach(), *(p.grad for p in model.parameters())])
    for got, wanted in zip(results[1], results[0], strict=True):
        assert got is not None and wanted is not None
        assert error(got, wanted) < 4 * BF16


# Head and loss in chunks, by the references of tests/model/test_chunked.py


def on(gpu: torch.device, case: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, labels = (t.detach().to(gpu) for t in case)
    return x.requires_grad_(), weight.requires_grad_(), labels


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("elements", [2**22, 2**14], ids=["one chunk", "chunks"])
def test_it_is_about_as_exact_as_the_reference(
    elements: int, dtype: torch.dtype, compiled: bool, gpu: torch.device
) -> None:
    case = on(gpu, inputs(96, 3, 64, 500, 512, dtype))
    got = by_chunks(*case, 500, 1e-2, elements=elements, compiled=compiled)
    plain, wanted = reference(*case, 500, 1e-2), exact(*case, 500, 1e-2)
    for name in vars(wanted):
        ours, theirs = (error(getattr(r, name), getattr(wanted, name)) for r in (got, plain))
        assert ours <= 1.5 * theirs + 1e-6, (name, ours, theirs)


def test_the_host_does_not_wait(gpu: torch.device) -> None:
    x, weight, labels = on(gpu, inputs(dtype=torch.bfloat16))
    by_chunks(x, weight, labels, VOCABULARY, 0.1, elements=500)
    upstream = torch.ones((), device=gpu)
    torch.cuda.set_sync_debug_mode("error")
    try:
        objective, _ = chunked_objective(x, weight, labels, VOCABULARY, 0.1, ONE, elements=500)
        torch.autograd.grad(objective, (x, weight), upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_it_is_ligers(gpu: torch.device) -> None:
    """No padding: Liger knows none."""
    ops = pytest.importorskip("liger_kernel.ops.fused_linear_cross_entropy")
    x, weight, labels = on(gpu, inputs(96, 3, 64, 512, 512, torch.bfloat16))
    theirs = ops.LigerFusedLinearCrossEntropyFunction.apply(
        x.flatten(0, 1), weight, labels.t().reshape(-1), None, None, -100, 1e-2
    )
    objective = theirs[0] if isinstance(theirs, tuple) else theirs
    dx, dw = torch.autograd.grad(objective, (x, weight))
    got = by_chunks(x, weight, labels, 512, 1e-2)
    torch.testing.assert_close(got.objective, objective.detach().float(), rtol=1e-4, atol=1e-4)
    assert error(got.dx, dx.double()) < 2**-6 and error(got.dw, dw.double()) < 2**-6
