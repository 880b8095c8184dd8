"""What a block keeps for its backward pass on a GPU, tensor by tensor, beside the planner's formulas."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megastable.config.tree import RunConfig
from megastable.model.gpt import Block
from megastable.model.kernels import Kernels
from megastable.parallel.topology import TensorParallel
from megastable_tools.plan import activations
from tests.gpu_static import fake

SHAPES: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "all heads": {"kv_heads": 8},
    "no QK-norm": {"qk_norm": False},
    "OLMo 2": {"qk_norm": "full", "norms": "after"},
    "norms on both sides": {"norms": "both", "zero_centered_norms": True},
    "DeepNorm": {"norms": "deep"},
    "clamped": {"swiglu_clamp": 7.0},
}


def ref(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


class Storages(TorchDispatchMode):
    """Every storage that is made inside, while it lives. A view makes none."""

    supports_higher_order_operators = True  # attention, made again in a compiled graph

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {ref(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and ref(tensor) not in given:
                self.seen.setdefault(ref(tensor), tensor.untyped_storage().nbytes())
        return made

    def living(self) -> int:
        gc.collect()
        return sum(size for ref, size in self.seen.items() if not ref.expired())


def made(leaf: torch.Tensor, storages: Storages) -> torch.Tensor:
    """The input of a block, from the layer before it: the block's to keep."""
    with storages:
        return leaf * 1


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_planner_knows_what_a_block_keeps(
    name: str, recompute: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """what a block keeps for its backward pass is what the planner says, to 1 %"""
    shape = dict(layers=2, hidden=512, heads=8, kv_heads=2, ffn=1536, sequence_length=512, vocab_size=1000)
    config = RunConfig.model_validate(
        {
            "model": shape | SHAPES[name],
            "train": {"global_batch": 4, "micro_batch": 2},
            "parallel": {"recompute": recompute},
            "kernels": {"compile": compiled},
        }
    )
    block = fake.on_gpu(
        Block(config.model, TensorParallel(), 0, recompute, Kernels("sdpa", "chunked", compiled))
    )

    storages = Storages()
    with fake.mode:
        leaf = torch.empty(512, 2, 512, device=fake.GPU, dtype=torch.bfloat16, requires_grad=True)
        block(leaf * 1)  # compiles, and makes what all blocks share
        # A mode around it would keep dynamo from what is compiled: there it goes inside.
        if compiled:
            monkeypatch.setattr(fake, "inside", storages)
        with contextlib.nullcontext() if compiled else storages:
            y = block(made(leaf, storages))
        kept = storages.living() - y.untyped_storage().nbytes()
    planned = activations.count_kept_bytes(
        activations.list_block_operations(
            config, activations.PlannedKernels("sdpa", "chunked", compiled, gpu=True)
        )
    )
    assert planned == pytest.approx(kept, rel=0.01)
