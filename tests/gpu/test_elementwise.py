"""Own elementwise kernels on a GPU: against plain code in fp32, bits that repeat, in compiled blocks, and measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from megastable.config.model import ModelConfig
from megastable.config.tree import RunConfig
from megastable.engine import elementwise_choice
from megastable.model.elementwise import PARTS
from megastable.model.gpt import GPT
from megastable.model.kernels import Kernels
from megastable.model.loss import LossFunction
from megastable.parallel.topology import TensorParallel
from tests.gpu.test_kernels import BF16, error

SHAPES: dict[str, dict[str, Any]] = {
    "width 64": {"hidden": 1024, "heads": 16, "kv_heads": 8, "ffn": 2816},
    "width 128": {"hidden": 2048, "heads": 16, "kv_heads": 4, "ffn": 6144},
    "odd widths": {"hidden": 720, "heads": 6, "kv_heads": 2, "ffn": 1000, "zero_centered_norms": True},
    "one key head, not normed": {"hidden": 512, "heads": 8, "kv_heads": 1, "ffn": 512, "qk_norm": False},
    "rows of 8,192": {"hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 1024},
}


def run_of(shape: str, kind: str) -> RunConfig:
    model = {"layers": 1, "sequence_length": 777, "vocab_size": 1000} | SHAPES[shape]
    return RunConfig.model_validate(
        {"model": model, "precision": {"kind": kind}, "train": {"micro_batch": 3}}
    )


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("part", PARTS)
def test_kernels_have_the_numbers_of_plain_code(part: str, shape: str, kind: str, gpu: torch.device) -> None:
    case = elementwise_choice.make_case(part, run_of(shape, kind), gpu)
    assert elementwise_choice.find_error(case) < (1e-5 if kind == "fp32" else 2 * BF16)
    for one, other in zip(case.differentiate(case.own), case.differentiate(case.own), strict=True):
        assert torch.equal(one, other)  # no atomics


@pytest.mark.parametrize("apart", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_blocks_with_them_are_blocks_without(recompute: str, apart: bool, gpu: torch.device) -> None:
    config = ModelConfig(
        layers=2, hidden=256, heads=4, kv_heads=2, ffn=512, sequence_length=256, vocab_size=1000
    )
    tokens = torch.randint(1000, (2, 257), generator=torch.Generator().manual_seed(1)).to(gpu)
    segments = (torch.arange(256, device=gpu) // 100).to(torch.int32).expand(2, -1).contiguous()
    results = []
    for kernels in (Kernels("sdpa", "chunked"), Kernels("sdpa", "chunked", True, elementwise=PARTS)):
        counters.clear()
        loss = LossFunction(1000, 1e-4, TensorParallel(), kernels.compile)
        model = GPT(config, TensorParallel(), recompute, 3, loss, kernels).to(gpu, torch.bfloat16)
        objective = model((tokens[:, :-1], segments) if apart else tokens[:, :-1], tokens[:, 1:])
        objective.backward()
        assert not counters["graph_break"]
        results.append([objective.detach(), *(p.grad for p in model.parameters())])
    for got, wanted in zip(results[1], results[0], strict=True):
        assert got is not None and wanted is not None
        assert error(got, wanted) < 4 * BF16


def test_measurement_has_a_time_for_each_part(gpu: torch.device) -> None:
    """and no part is wrong, or does not work"""
    asked = Kernels("sdpa", "chunked", True, elementwise=PARTS)
    kept = elementwise_choice.keep_faster_parts(asked, run_of("width 64", "bf16"), gpu)
    assert not kept.notes and [timing.part for timing in kept.measured] == list(PARTS)
    print(*kept.measured, sep="\n")
