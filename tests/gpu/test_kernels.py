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
from megastable.model.attention_scores import FULL
from megastable.model.chunked import chunked_objective
from megastable.model.cores import CORES, reference_attention
from megastable.model.gpt import GPT
from megastable.model.kernels import Kernels
from megastable.model.loss import LossFunction, project
from megastable.parallel.topology import TensorParallel

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


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_chunked_loss(dtype: torch.dtype, compiled: bool, gpu: torch.device) -> None:
    s, b, h, vocabulary, z = 384, 3, 256, 5000, 1e-3
    generator = torch.Generator(gpu).manual_seed(0)
    x = torch.randn(s, b, h, generator=generator, device=gpu).to(dtype).requires_grad_()
    weight = (0.1 * torch.randn(5120, h, generator=generator, device=gpu)).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (b, s), generator=generator, device=gpu)
    tp = TensorParallel()
    objective, samples = chunked_objective(
        x, weight, labels, vocabulary, z, tp, compiled, elements=5000 * 500
    )
    got = [objective, samples, *torch.autograd.grad(objective, (x, weight))]

    wide = [t.detach().float().requires_grad_() for t in (x, weight)]
    function = LossFunction(vocabulary, z, tp)
    right = function(project((wide[0], wide[1])), labels)
    wanted = [right, function.samples[0], *torch.autograd.grad(right, wide)]
    for mine, its in zip(got, wanted, strict=True):
        assert error(mine, its) < (BF16 if dtype == torch.bfloat16 else 1e-4)


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
            # Of blocks one; of the loss, and of FlexAttention's mask, which are compiled by themselves, one each.
            assert 1 <= graphs[0] <= 3 and len(set(graphs)) == 1
        results.append([objective.detach(), *(p.grad for p in model.parameters())])
    for got, wanted in zip(results[1], results[0], strict=True):
        assert got is not None and wanted is not None
        assert error(got, wanted) < 4 * BF16
