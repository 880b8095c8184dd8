"""Small models in many layouts, trained on ranks of this machine, to count or measure what a step takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import launch_ranks
from megastable.base.errors import ConfigError
from megastable.config import deepspeed_json
from megastable.config.tree import RunConfig
from megastable.data.loader import MicroBatch
from megastable.parallel.layout import Layout
from megastable.parallel.topology import Topology

TP2, PP2 = {"tensor": 2}, {"pipeline": 2}
SP2 = TP2 | {"sequence": True}
Section = dict[str, Any]


@dataclass(frozen=True)
class LayoutCase:
    """A layout with its number of ranks, and other settings, which override those of `base`, by section.

    global_batch: None: of `accumulation` micro-batches. zero: overrides of DeepSpeed's section zero_optimization.
    elements: logits of a chunk.
    """

    world: int = 1
    parallel: Section = field(default_factory=dict)
    model: Section = field(default_factory=dict)
    precision: Section = field(default_factory=dict)
    optimizer: Section = field(default_factory=dict)
    kernels: Section = field(default_factory=dict)
    micro_batch: int = 2
    global_batch: int | None = None
    accumulation: int = 2
    apart: bool = False
    zero: Section = field(default_factory=dict)
    elements: int = 200_000
    base: Mapping[str, Section] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        parallel_section = self.parallel
        tensor, pipeline = parallel_section.get("tensor", 1), parallel_section.get("pipeline", 1)
        data, context = self.world // (tensor * pipeline), parallel_section.get("context", 1)
        sharing_ranks = parallel_section.get("replicas", 1), parallel_section.get("expert", 1)
        return Layout(tensor, pipeline, data, context, *sharing_ranks)

    @property
    def config(self) -> RunConfig:
        global_batch = self.global_batch or self.micro_batch * self.accumulation * self.layout.samples
        sections = {name: getattr(self, name) for name in ("model", "precision", "optimizer", "kernels")}
        return RunConfig.model_validate(
            {
                "parallel": self.parallel,
                "train": {"global_batch": global_batch, "micro_batch": self.micro_batch},
                "data": {"keep_documents_apart": self.apart},
                **{name: self.base.get(name, {}) | section for name, section in sections.items()},
            }
        )

    @property
    def deepspeed(self) -> Section:
        """DeepSpeed's settings."""
        settings = deepspeed_json.build_deepspeed_json(self.config, self.world)
        return {**settings, "zero_optimization": settings["zero_optimization"] | self.zero}

    def join_group(self) -> Topology:
        """On a rank of the process group."""
        from megastable.model import sizes

        sizes.CPU_ELEMENTS = sizes.GPU_ELEMENTS = self.elements  # several chunks of a small model, too
        return Topology(self.layout, dist.get_rank(), timeout=120)

    def draw_batches(self, sample_rank: int) -> list[MicroBatch]:
        """The random micro-batches of a step on a rank."""
        model_config, batch_size = self.config.model, self.micro_batch
        drawn = torch.Generator().manual_seed(sample_rank)
        assert model_config.vocab_size is not None
        found = []
        for batch_number in range(deepspeed_json.count_micro_batches(self.config, self.world)):
            # A context-parallel rank has a part of the tokens.
            token_count = model_config.sequence_length // self.layout.context
            tokens = torch.randint(0, model_config.vocab_size, (batch_size, token_count + 1), generator=drawn)
            segments = None
            if self.apart:
                segments = (torch.rand(tokens[:, 1:].shape, generator=drawn) < 0.02).cumsum(1).int()
            index = torch.arange(batch_size) + batch_number * batch_size
            found.append(MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), index, segments))
        return found


def run_layouts(
    layouts: Mapping[str, LayoutCase],
    names: Sequence[str],
    function: Callable[[LayoutCase], Any],
    say: Callable[[str], None],
) -> Iterator[tuple[str, LayoutCase, list[Any]]]:
    """Call a function on every rank of layouts, each in processes of its own.

    Args:
        layouts: by name.
        names: of those to run; none: all.
        function: a module-level one.
        say: is told of each.

    Yields:
        Name, layout, and what the function returned, by rank.

    Raises:
        ConfigError: for an unknown name. MegastableError: if a rank fails.
    """
    for name in names:
        if name not in layouts:
            raise ConfigError(f"--layout {name!r}: choose among {', '.join(map(repr, layouts))}")
    for name in names or layouts:
        say(name)
        yield name, layouts[name], launch_ranks(layouts[name].world, function, layouts[name])
