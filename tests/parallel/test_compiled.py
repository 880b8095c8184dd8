"""Blocks that are compiled on several ranks: one graph with the collectives in it, the numbers of blocks as written."""

from __future__ import annotations

from typing import Any

import pytest

from megastable.config.tree import RunConfig
from megastable.parallel.layout import Layout
from megastable.parallel.topology import Topology
from tests.distributed import run_ranks
from tests.parallel.compiling import without_kernels
from tests.parallel.test_layouts import OLMO2, batches, config, mine
from tests.patience import PATIENCE

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "sequence-tp2-selective": (
        2, {"tensor": 2, "sequence": True, "recompute": "selective", "model": OLMO2},
    ),
    "context2-full": (2, {"context": 2, "recompute": "full"}),
    "pp2": (2, {"pipeline": 2}),
}  # fmt: skip


def both(c: RunConfig, world: int) -> list[tuple[list[float], list[int], int, dict[str, dict[str, float]]]]:
    """Of a rank, written out and compiled: losses and norms, graphs after every step, graph breaks; and what the probe
    found in the second step."""
    import torch.distributed as dist
    from torch._dynamo.utils import counters

    from megastable.config import deepspeed_json
    from megastable.engine.engine import Engine

    p = c.parallel
    layout = Layout(p.tensor, p.pipeline, deepspeed_json.data_parallel(c, world), p.context)
    topology = Topology(layout, dist.get_rank(), timeout=PATIENCE)
    with without_kernels():
        found = []
        for compiled in (False, True):
            part = c.kernels.model_copy(update={"compile": compiled})
            run = c.model_copy(update={"kernels": part})
            engine = Engine(run, deepspeed_json.build(run, world), topology)
            counters.clear()
            numbers, graphs = [], []
            for step, batch in enumerate(batches(apart=True)[:3]):
                micro = mine(batch, topology, run.train.micro_batch)
                if step == 1:
                    engine.probe.watch()  # which leaves what is compiled alone
                measured, _ = engine.train_step(micro, 1e-3, lambda m: m.finite)
                if step == 1:
                    layers = engine.statistics().layers
                numbers += [measured.loss, measured.grad_norm, float(engine.evaluate(micro).mean())]
                graphs.append(counters["stats"]["unique_graphs"])
            found.append((numbers, graphs, sum(counters["graph_break"].values()), layers))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_compiled_layout_is_the_layout(name: str) -> None:
    world, options = LAYOUTS[name]
    for written, compiled in run_ranks(world, both, config(**options, micro_batch=4), world):
        assert written[1] == [0] * 3 and compiled[2] == 0
        assert compiled[1][0] > 0 and len(set(compiled[1])) == 1, "made anew"
        assert compiled[0] == pytest.approx(written[0], rel=1e-5)
        for name, row in written[3].items():
            assert compiled[3][name] == pytest.approx(row, rel=1e-4), name
