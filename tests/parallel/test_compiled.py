"""Blocks that are compiled on several ranks, or looked at by the probe: the numbers of blocks as written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from megastable.config.tree import RunConfig
from tests.distributed import run_ranks
from tests.engine.engines import build_engine, take_batch
from tests.parallel.compiling import without_kernels
from tests.parallel.test_layouts import OLMO2, batches, config

COMPILED: dict[str, tuple[int, dict[str, Any]]] = {
    "sequence-tp2-selective": (
        2, {"tensor": 2, "sequence": True, "recompute": "selective", "model": OLMO2},
    ),
    "context2-full": (2, {"context": 2, "recompute": "full"}),
    "ring2-selective-dropout": (
        2, {"context": 2, "context_by": "ring", "recompute": "selective", "model": {"dropout": 0.1}},
    ),
    "pp2": (2, {"pipeline": 2}),
}  # fmt: skip


def with_compile(c: RunConfig, compiled: bool) -> RunConfig:
    return c.model_copy(update={"kernels": c.kernels.model_copy(update={"compile": compiled})})


def train_both(
    c: RunConfig,
) -> list[tuple[list[float], list[int], int, dict[str, dict[str, float]]]]:
    """Of a rank, written out and compiled: losses and norms, graphs after every step, graph breaks; and what the probe
    found in the second step."""
    from torch._dynamo.utils import counters

    with without_kernels():
        found = []
        for compiled in (False, True):
            engine = build_engine(with_compile(c, compiled))
            counters.clear()
            numbers, graphs = [], []
            for step, batch in enumerate(batches(apart=True)[:3]):
                micro = take_batch(engine, batch)
                if step == 1:
                    engine.probe.watch_step()  # which leaves what is compiled alone
                measured, _ = engine.train_step(micro, 1e-3, lambda m: m.finite)
                if step == 1:
                    layers = engine.collect_statistics().layers
                numbers += [measured.loss, measured.grad_norm, float(engine.evaluate_samples(micro).mean())]
                graphs.append(counters["stats"]["unique_graphs"])
            found.append((numbers, graphs, sum(counters["graph_break"].values()), layers))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_blocks_are_one_graph_with_the_numbers_of_the_blocks(name: str) -> None:
    world, options = COMPILED[name]
    for written, compiled in run_ranks(world, train_both, config(**options, micro_batch=4)):
        assert written[1] == [0] * 3 and compiled[2] == 0
        assert compiled[1][0] > 0 and len(set(compiled[1])) == 1, "compiled again"
        assert compiled[0] == pytest.approx(written[0], rel=1e-5)
        for layer, row in written[3].items():
            assert compiled[3][layer] == pytest.approx(row, rel=1e-4), layer


WATCHED: dict[str, tuple[int, dict[str, Any]]] = {
    "context2-olmo2-full": (2, {"context": 2, "recompute": "full", "model": OLMO2, "precision": "bf16"}),
    "tp2-pp2-sequence-selective": (
        4, {"tensor": 2, "pipeline": 2, "sequence": True, "recompute": "selective", "micro_batch": 2},
    ),
    "zero3-fp16": (2, {"zero": 3, "precision": "fp16"}),
}  # fmt: skip


def saved_bytes(step: Callable[[], Any], parameters: Iterable[torch.Tensor]) -> int:
    """What autograd keeps for the backward passes of a step, every storage once, without the weights."""
    kept: dict[int, torch.Tensor] = {}
    weights = {p.untyped_storage().data_ptr() for p in parameters}

    def pack(x: torch.Tensor) -> torch.Tensor:
        # Held until the end of the step, so that no other tensor gets its address.
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        step()
    return sum(x.untyped_storage().nbytes() for address, x in kept.items() if address not in weights)


def step_both_ways(c: RunConfig) -> list[dict[str, Any]]:
    """Of a rank: the same step from the same state, as it is and looked at."""
    from megastable.engine.flatstate import KINDS

    with without_kernels():
        engine = build_engine(c)
        first, second = (take_batch(engine, batch) for batch in batches(apart=True)[:2])
        engine.train_step(first, 1e-3, lambda m: m.finite)
        state = {name: t.clone() for name, t in engine.optimizer_state().items()}
        found = []
        for watched in (False, True):
            engine.restore_optimizer_state(state)
            engine.refresh_weights()
            seen: dict[str, Any] = {}

            def judge(_: Any, seen: dict[str, Any] = seen) -> bool:
                pieces = engine.zero.view_gradients(engine.flat_state().fragments)
                seen["gradients"] = {str(key): piece.clone() for key, piece in pieces.items()}
                return True

            def step(seen: dict[str, Any] = seen, judge: Any = judge) -> None:
                seen["measured"], _ = engine.train_step(second, 1e-3, judge)

            if watched:
                engine.probe.watch_step()
            random = torch.get_rng_state()
            seen["bytes"] = saved_bytes(step, engine.ds.module.parameters())
            assert torch.equal(torch.get_rng_state(), random)
            seen["layers"], flat = engine.collect_statistics().layers, engine.flat_state()
            seen["state"] = {
                f"{kind}/{n}": t.clone() for kind in KINDS for n, t in flat.gather_shards(kind).items()
            }
            found.append(seen)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", WATCHED)
def test_watched_step_is_the_step_bit_for_bit_and_takes_no_more_memory(name: str) -> None:
    """Compiled (but under ZeRO 3): what is looked at must not run in another way."""
    world, parts = WATCHED[name]
    c = with_compile(config(**{"micro_batch": 4} | parts), parts.get("zero", 1) < 3)
    for plain, watched in run_ranks(world, step_both_ways, c):
        assert torch.equal(plain["measured"].losses, watched["measured"].losses)
        assert plain["measured"].grad_norm == watched["measured"].grad_norm
        for kind in ("gradients", "state"):
            assert plain[kind].keys() == watched[kind].keys()
            assert all(torch.equal(tensor, watched[kind][key]) for key, tensor in plain[kind].items())
        assert watched["bytes"] == plain["bytes"] > 0
        assert not plain["layers"] and watched["layers"]["blocks.0"]["attention_entropy"] > 0
