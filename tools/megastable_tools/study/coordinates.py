"""Measures the scale of activations in the first steps of a model: a coordinate check (Yang et al., arXiv:2203.03466,
appendix D.1).

Root mean squares on one fixed batch, before each step and after the last, of what every part of the model gives, and of
its change since initialization. With an optimizer's groups and rates as in a run, without warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megastable_tools.study.trial import SavedResult

if TYPE_CHECKING:
    from torch import Tensor

    from megastable.config.tree import RunConfig
    from megastable.engine.engine import Engine

# A run of its own kind: no kernels that hide what is measured, and nothing that is recomputed.
OPEN = ("kernels.compile=false", "kernels.loss=reference", "parallel.recompute=none")


@dataclass(frozen=True)
class Coordinates(SavedResult):
    """Of one model. rms, change: by place, one number for each step from 0 (initialization) on. losses: of the training
    steps, nats per token."""

    rms: dict[str, list[float]]
    change: dict[str, list[float]]
    losses: list[float]


def measure(recipe: str, overrides: tuple[str, ...], steps: int, output: Path) -> None:
    """Train `steps` steps in this process, its own process group, and write the `Coordinates`. Raises ConfigError and
    DataError."""
    from megastable.config import deepspeed_json
    from megastable.config import recipe as recipes
    from megastable.data.corpora import open_corpora
    from megastable.data.loader import Loader
    from megastable.data.skips import Skips
    from megastable.engine.distributed import start_distributed, stop_distributed
    from megastable.engine.engine import Engine
    from megastable.parallel.layout import Layout
    from megastable.parallel.topology import Topology

    config = recipes.load(recipe, overrides)
    corpora = open_corpora(config.data.corpora, config.model.sequence_length, config.run.seed, [])
    size = config.model.vocab_size or corpora.vocab_size
    config = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": size})})
    start_distributed(config.run.timeout)
    engine = Engine(config, deepspeed_json.build(config, 1), Topology(Layout(), 0, config.run.timeout))
    t = config.train
    with Loader(
        corpora.train, Skips.of([]), 0, t.global_batch, t.micro_batch, 0, 1, config.data.keep_documents_apart, 1,
        pin_memory=False,
    ) as loader:  # fmt: skip
        batches = [next(loader).micro_batches for _ in range(steps)]
    probe = batches[0]
    first, losses = activations(engine, config, probe), list[float]()
    rms = {place: [_rms(x)] for place, x in first.items()}
    change = {place: [0.0] for place in first}
    for batch in batches:
        measured, _ = engine.train_step(batch, config.optimizer.lr, lambda measured: measured.finite)
        losses.append(measured.loss)
        for place, x in activations(engine, config, probe).items():
            rms[place].append(_rms(x))
            change[place].append(_rms(x - first[place]))
    Coordinates(rms, change, losses).save(output)
    stop_distributed()


def activations(engine: Engine, config: RunConfig, probe: Any) -> dict[str, Tensor]:
    """What the parts of the model give on a batch, without an update: fp32 on the CPU, micro-batches one after the
    other. Places: embedding, N.attention, N.mlp, N.stream for block N from 1 on, logits."""
    with _recording(engine, config) as found:
        engine.evaluate(probe)
    return found


@contextmanager
def _recording(engine: Engine, config: RunConfig) -> Iterator[dict[str, Tensor]]:
    """Fills a dictionary while the model computes. With `OPEN` kernels only."""
    import torch

    from megastable.model.gpt import Block, Embedding, open_stream

    parts: dict[str, list[Tensor]] = {}
    found: dict[str, Tensor] = {}

    def keep(place: str) -> Any:
        def hook(module: Any, given: Any, output: Any) -> None:
            x, *_ = open_stream(output)
            parts.setdefault(place, []).append(x.detach().float().flatten().cpu())

        return hook

    module, handles = engine.ds.module, []
    for part in module.modules():
        if isinstance(part, Embedding):
            handles.append(part.register_forward_hook(keep("embedding")))
        elif isinstance(part, Block):
            number = int(part.name.rpartition(".")[2]) + 1
            for inner, of in ((part.attention, "attention"), (part.mlp, "mlp"), (part, "stream")):
                handles.append(inner.register_forward_hook(keep(f"{number}.{of}")))
    loss, vocabulary = module.loss, config.model.vocab_size
    see = keep("logits")

    def watched(given: Any, labels: Tensor) -> Any:
        see(None, None, given[..., :vocabulary])
        return loss(given, labels)

    module.loss = watched
    try:
        yield found
    finally:
        module.loss = loss
        for handle in handles:
            handle.remove()
    found.update({place: torch.cat(pieces) for place, pieces in parts.items()})


def _rms(x: Tensor) -> float:
    return math.sqrt(float(x.double().square().mean()))
