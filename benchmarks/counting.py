"""Count every collective of a training step on this rank.

torch passes communication between ranks to its process groups by operators of its own (`c10d::...`), for any caller:
`Count` intercepts them. The groups' sequence numbers verify that it misses none.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _world
from torch.utils._python_dispatch import TorchDispatchMode

from megastable.config.tree import RunConfig

Message = tuple[
    str, str, int
]  # kind of group, collective, bytes that a rank gives to one call (for a receive: gets)

NAMES = {
    "allreduce_": "all-reduce", "_allgather_base_": "all-gather", "allgather_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter", "reduce_scatter_": "reduce-scatter", "broadcast_": "broadcast",
    "send": "send", "recv_": "receive", "reduce_": "reduce", "alltoall_base_": "all-to-all",
}  # fmt: skip
# For these operators the tensor is the first argument; for all others it is the second.
IN_PLACE = (
    "allreduce_",
    "allreduce_coalesced_",
    "broadcast_",
    "reduce_",
    "send",
    "recv_",
    "recv_any_source_",
)


class Count(TorchDispatchMode):
    """Counts communication while entered, by (name of the group, operation, bytes)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.partition("::")[2]
            boxed = next(a for a in args if isinstance(a, torch.ScriptObject))
            given = args[0] if name in IN_PLACE else args[1]
            group = dist.ProcessGroup.unbox(boxed).group_name
            self.calls[group, NAMES.get(name, name), 0 if name == "barrier" else _bytes(given)] += 1
        return func(*args, **(kwargs or {}))


def _bytes(given: Any) -> int:
    if isinstance(given, Tensor):
        return given.numel() * given.element_size()
    return sum(map(_bytes, given)) if isinstance(given, list | tuple) else 0


def numbers() -> dict[str, int]:
    """Number of collectives that every group of this rank has seen."""
    return {
        group.group_name: group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        for group in _world.pg_map
    }


@dataclass(frozen=True)
class Counted:
    """One step on one rank. missed: calls that the groups counted, but `Count` did not."""

    stage: int
    messages: dict[Message, int]
    missed: int


def count(config: RunConfig, world: int, zero: dict[str, Any], warm: int = 2) -> Counted:
    """Train `warm` steps on random tokens, and count the next one. Collective, in a process group of `world` ranks.

    zero: overrides for the section `zero_optimization` of DeepSpeed's configuration.
    """
    from megastable.config import deepspeed_json
    from megastable.data.loader import MicroBatch
    from megastable.engine.engine import Engine
    from megastable.parallel.layout import Layout
    from megastable.parallel.topology import Topology

    p, t, m = config.parallel, config.train, config.model
    settings = deepspeed_json.build(config, world)
    settings["zero_optimization"] |= zero
    layout = Layout(p.tensor, p.pipeline, deepspeed_json.data_parallel(config, world), p.context)
    topology = Topology(layout, dist.get_rank(), timeout=120)
    engine = Engine(config, settings, topology)
    drawn = torch.Generator().manual_seed(0)
    index = torch.arange(t.global_batch).view(-1, layout.samples, t.micro_batch)[:, topology.sample_rank]
    part = m.sequence_length // p.context
    own = slice(topology.context_rank * part, (topology.context_rank + 1) * part)
    assert m.vocab_size is not None
    for step in range(warm + 1):
        tokens = torch.randint(0, m.vocab_size, (t.global_batch, m.sequence_length + 1), generator=drawn)
        segments = None
        if config.data.keep_documents_apart:
            segments = (torch.rand(tokens[:, 1:].shape, generator=drawn) < 0.1).cumsum(1).int()
        batches = [
            MicroBatch(
                tokens[i, :-1][:, own], tokens[i, 1:][:, own], i, None if segments is None else segments[i]
            )
            for i in index
        ]
        before, counter = numbers(), Count()
        with counter:
            _, applied = engine.train_step(batches, 1e-4, lambda measured: measured.finite)
        assert applied, f"step {step} was not finite"
    after = numbers()
    missed = sum(after[name] - before[name] for name in after) - counter.calls.total()
    kinds = _kinds(engine)
    messages: Counter[Message] = Counter()
    for (group, collective, size), calls in counter.calls.items():
        # DeepSpeed's stages communicate through the world's group.
        kind = "pipeline" if collective in ("send", "receive") else kinds.get(group, f"group {group}")
        messages[kind, collective, size] += calls
    return Counted(topology.stage, dict(messages), missed)


def _kinds(engine: Any) -> dict[str, str]:
    """The purpose of each group of this rank, by name."""
    from megastable.optim.pieces import PieceOptimizer

    t = engine.topology
    groups = {"tensor": [t.tensor_group], "data": [t.data_group], "context": [t.context_group]}
    inner = engine.optimizer.optimizer
    groups["stage"] = [inner.at.stage_group] if isinstance(inner, PieceOptimizer) else []
    if t.layout.pipeline > 1:
        grid = engine.ds.grid
        groups["tensor"].append(grid.get_slice_parallel_group())
        groups["data"].append(grid.get_data_parallel_group())
        groups["pipeline"] = [grid.get_pipe_parallel_group()]
        groups["model"] = [grid.get_model_parallel_group()]
        groups["tied"] = [engine.tied.group] if engine.tied is not None else []
    world = dist.group.WORLD
    assert world is not None
    found = {world.group_name: "world"}
    return found | {
        group.group_name: kind for kind, held in groups.items() for group in held if group is not None
    }
