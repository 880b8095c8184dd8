"""Experts on several ranks against all of them on each, forward and backward, and what is sent for it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import run_ranks

HIDDEN, TOKENS = 12, 9
CASES: dict[str, tuple[int, dict[str, Any], bool]] = {  # ranks; keys; whether rows are grouped
    "two": (2, {}, False),
    "two-grouped": (2, {"shared": 1}, True),
    "two-capacity": (2, {"capacity": 0.6}, False),
    "four": (4, {"gate": "sigmoid", "scale": 2.5}, False),
    "four-few": (4, {"top_k": 1, "normalize": False}, True),  # most of the experts have no tokens
}


def compare_with_whole(keys: dict[str, Any], grouped: bool) -> dict[str, Any]:
    """Of this rank: its results and gradients, those with all experts here, and the messages of each pass."""
    import torch.distributed as dist

    from megastable.config.model import ModelConfig
    from megastable.model.experts import ExpertMLP
    from megastable.parallel.sharding import is_split, placement_of
    from megastable.parallel.topology import WHOLE, ContextParallel, ExpertParallel, TensorParallel

    rank, ranks = dist.get_rank(), dist.get_world_size()
    experts = {"count": 8, "top_k": 2, "ffn": 8, "balance_loss": 0.3, "router_z_loss": 0.2} | keys
    model = ModelConfig(layers=1, hidden=HIDDEN, heads=2, vocab_size=64, experts=experts)
    dtype = torch.float32 if grouped else torch.float64  # torch groups no products in fp64
    messages, real = Counter[tuple[str, int]](), dist.all_to_all_single

    def count_message(received: Tensor, sent: Tensor, *given: Any, **named: Any) -> Any:
        messages["rows" if sent.is_floating_point() else "counts", sent.numel()] += 1
        return real(received, sent, *given, **named)

    dist.all_to_all_single = count_message
    found: dict[str, Any] = {"messages": []}
    for kind, ep in (("whole", ExpertParallel()), ("parts", ExpertParallel(dist.group.WORLD, ranks, rank))):
        cp = WHOLE if kind == "whole" else ContextParallel(experts=ep)
        mlp = ExpertMLP(
            model, model.experts, TensorParallel(), "mlp", recompute_core=False, cp=cp, grouped=grouped
        )  # type: ignore[arg-type]
        for p in mlp.parameters():
            name = placement_of(p).name
            random = torch.Generator().manual_seed(sum(map(ord, name)) * 31)
            p.data = torch.randn(p.shape, generator=random, dtype=dtype) * 0.4
            assert is_split(p) == (kind == "parts" and ".experts." in name)
        random = torch.Generator().manual_seed(rank)
        x = torch.randn(TOKENS, 2, HIDDEN, generator=random, dtype=dtype, requires_grad=True)
        upstream = torch.randn(x.shape, generator=random, dtype=dtype)
        y = mlp(x)
        found["messages"].append(messages.copy())
        y.backward(upstream)
        found["messages"].append(messages.copy())
        found[kind] = {placement_of(p).name: p.grad for p in mlp.parameters()} | {
            "y": y.detach(),
            "x": x.grad,
        }
    return found


@pytest.mark.quick("two-capacity")
@pytest.mark.parametrize("case", CASES)
def test_experts_on_several_ranks_equal_all_of_them_on_each(case: str) -> None:
    ranks, keys, grouped = CASES[case]
    found = run_ranks(ranks, compare_with_whole, keys, grouped)
    names = sorted(name for name in found[0]["whole"] if ".experts." in name)
    assert len(names) == 2 * 8
    for rank, of in enumerate(found):
        own = [name for name in of["parts"] if ".experts." in name]
        assert own == [f"mlp.experts.{n}.{part}.weight" for n in range(rank * 8 // ranks, (rank + 1) * 8 // ranks)
                       for part in ("gate_up", "down")]  # fmt: skip
        for name, got in of["parts"].items():
            wanted = sum(each["whole"][name] for each in found) if name in own else of["whole"][name]
            allowed = 1e-6 if grouped else 1e-12
            torch.testing.assert_close(got, wanted, rtol=allowed, atol=10 * allowed)
    choices = keys.get("top_k", 2) * 2 * TOKENS
    for of in found:
        whole_forward, whole_backward, forward, backward = of["messages"]
        assert not whole_forward and not whole_backward
        assert forward["counts", 8] == 1 and forward.total() == 3 and backward.total() == 5
        assert ("capacity" in keys) != (("rows", choices * HIDDEN) in forward)
    if "capacity" not in keys:  # what comes back is what was sent, and so are the gradients
        rows = sum((of["messages"][3] for of in found), Counter())
        assert sum(size * count for (kind, size), count in rows.items() if kind == "rows") == (
            4 * ranks * choices * HIDDEN
        )
