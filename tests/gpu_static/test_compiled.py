"""torch.compile for a Hopper GPU: blocks without a break, and machine code of all kernels that inductor writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from megastable.config.model import ModelConfig
from megastable.model.gpt import GPT, Block
from megastable.model.kernels import Kernels
from megastable.model.loss import LossFunction
from megastable.optim import adamw
from megastable.parallel.topology import TensorParallel
from tests.gpu_static import fake

S, B, VOCABULARY = 256, 2, 1000


def shape(**others: Any) -> ModelConfig:
    told: dict[str, Any] = dict(
        layers=3, hidden=256, heads=4, kv_heads=2, ffn=512, sequence_length=S, vocab_size=VOCABULARY
    )
    return ModelConfig(**(told | others))


def model_of(config: ModelConfig, recompute: str) -> GPT:
    loss = LossFunction(VOCABULARY, 1e-4, TensorParallel(), True)
    model: GPT = fake.on_gpu(
        GPT(config, TensorParallel(), recompute, 3, loss, Kernels("sdpa", "chunked", True))
    )
    return model


def kernels(codes: list[str]) -> int:
    return sum(code.count("async_compile.triton('") for code in codes)


@pytest.mark.parametrize("apart", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_blocks_compile_forward_and_backward(recompute: str, apart: bool, codes: list[str]) -> None:
    """all blocks are one graph, forward and backward, without a break, and no step compiles again"""
    counters.clear()
    model = model_of(shape(), recompute)
    with fake.mode:
        tokens = torch.zeros(B, S, dtype=torch.long, device=fake.GPU)
        graphs = []
        for _ in range(3):
            segments = torch.zeros(B, S, dtype=torch.int32, device=fake.GPU)
            model((tokens, segments) if apart else tokens, tokens).backward()
            graphs.append(counters["stats"]["unique_graphs"])
    assert not counters["graph_break"]
    assert graphs == [3] * 3  # the block's, the final norm's and the loss's
    assert len(codes) == 5  # the loss has no backward pass of its own
    assert all(p.grad is not None and p.grad.device == fake.GPU for p in model.parameters())


@pytest.mark.parametrize("norms", ["before", "after", "both", "deep"])
def test_what_lies_between_linear_layers_compiles(norms: str, codes: list[str]) -> None:
    """norms, and what lies between Transformer Engine's modules, compile by themselves, as one graph each"""
    counters.clear()
    config = shape(norms=norms, qk_norm="full" if norms == "after" else True)
    block = fake.on_gpu(Block(config, TensorParallel(), 0, "none", Kernels("sdpa", "chunked", True)))
    block.compile_in_pieces()
    with fake.mode:
        x = torch.empty(S, B, 256, device=fake.GPU, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2):
            block(x).sum().backward()
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 3


@pytest.mark.parametrize("apart", [False, True], ids=["causal", "documents"])
def test_blocks_become_machine_code(apart: bool, codes: list[str], tmp_path: Path) -> None:
    """inductor's kernels of a block and the loss, forward and backward, become sm_90 cubins by Triton"""
    model = model_of(shape(layers=1), "none")
    with fake.mode:
        tokens = torch.zeros(B, S, dtype=torch.long, device=fake.GPU)
        segments = torch.zeros(B, S, dtype=torch.int32, device=fake.GPU)
        model((tokens, segments) if apart else tokens, tokens).backward()
    assert any("flex" in code for code in codes) == apart
    made = machine_code(codes, tmp_path)
    assert len(made) == kernels(codes) > 10


def test_the_optimizer_becomes_machine_code(codes: list[str], tmp_path: Path) -> None:
    """AdamW with bf16 moments becomes one sm_90 cubin: a chunk is read and written once"""
    with fake.mode, torch.no_grad():
        n = adamw.CHUNKS["cuda"]

        def flat(dtype: torch.dtype) -> Tensor:
            return torch.empty(n, dtype=dtype, device=fake.GPU)

        numbers = torch.empty(3, device=fake.GPU)
        key = torch.empty((), dtype=torch.int32, device=fake.GPU)
        moments = flat(torch.bfloat16), flat(torch.bfloat16)
        adamw._compiled()(
            flat(torch.float32), flat(torch.float32), *moments, numbers, key, 0.9, 0.95, 1e-8, None
        )
    assert len(machine_code(codes, tmp_path)) == kernels(codes) == 1


def test_the_fingerprint_becomes_machine_code() -> None:
    """the kernel of fingerprints becomes one sm_90 cubin, whatever tensor it is given"""
    from megastable.base.fingerprint import COLUMNS, ROW, ROWS, STEP
    from megastable.base.fingerprint_kernel import add_words_kernel

    words, rest = torch.zeros(4, dtype=torch.int64), torch.zeros(8, dtype=torch.uint8)
    total, made = torch.zeros((), dtype=torch.int64), []
    for first, count, left, start, scale in ((0, 4, 0, 0, 1), (1, 1, 3, STEP, STEP), (0, 1 << 33, 7, 16, 16)):
        given = words[first:], rest[left:], total, count, left, start, scale, ROWS, COLUMNS, ROW
        made.append(add_words_kernel.warmup(*given, num_warps=8, grid=(1,)))
    assert len(made[0].asm["cubin"]) > 1000 and all(each is made[0] for each in made)


def machine_code(codes: list[str], folder: Path) -> dict[str, int]:
    made: dict[str, int] = {}
    for number, code in enumerate(codes):
        own = folder / str(number)
        own.mkdir()
        made |= {f"{number}/{name}": size for name, size in fake.cubins(code, own).items()}
    assert all(size > 1000 for size in made.values())
    return made
