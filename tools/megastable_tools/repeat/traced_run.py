"""Trains a few steps from the beginning of a recipe, with a trace of all that is computed. Started by
`megastable repeat` on every rank:

    deepspeed --module megastable_tools.repeat.traced_run RECIPE [KEY=VALUE ...] run.dir=FOLDER

The steps are those of a run of the recipe from its first one on: data, initial weights, learning rate, update. Without
the guard, evaluations and checkpoints. FOLDER has the request (trace_request.py), and gets the traces.
"""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megastable.base.deterministic import exact
from megastable.base.errors import OK, ConfigError
from megastable.config import deepspeed_json
from megastable.config.tree import RunConfig
from megastable.data.loader import Loader
from megastable.data.skips import Skips
from megastable.engine.engine import Engine
from megastable.optim.schedule import scheduled_rate
from megastable.parallel.layout import Layout
from megastable.parallel.topology import Topology
from megastable.training import rank_process
from megastable.training.startup import open_data
from megastable_tools.repeat.operation_watch import OperationWatch
from megastable_tools.repeat.trace_file import CPU, TraceHeader, TraceWriter
from megastable_tools.repeat.trace_request import TraceRequest


def trace(config: RunConfig, recipe_path: Path, attempt: int | None = None) -> int:
    """On every rank; the process group exists already. The exit code."""
    folder = config.run.dir
    assert folder is not None, "started by hand"
    request = TraceRequest.load(folder)
    config, corpora = open_data(config)
    world, p = dist.get_world_size(), config.parallel
    layout = Layout(p.tensor, p.pipeline, deepspeed_json.data_parallel(config, world), p.context)
    topology = Topology(layout, dist.get_rank(), config.run.timeout)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(config.run.seed + topology.rank)  # as a run does
    engine = Engine(config, deepspeed_json.build(config, world), topology)
    header = TraceHeader(
        topology.rank, world, socket.gethostname(), _device(engine.device), str(engine.kernels),
        exact(config.run.deterministic, engine.device), vars(layout) | {"zero": p.zero},
    )  # fmt: skip
    watch = OperationWatch(engine, request, folder)
    with ExitStack() as during:
        loader = during.enter_context(
            Loader(
                corpora.train, Skips.of(config.data.skip), 0, config.batches, config.train.micro_batch,
                topology.sample_rank, layout.samples, config.data.keep_documents_apart, config.data.prefetch,
                pin_memory=engine.device.type == "cuda", part=(topology.context_rank, layout.context),
                pieces=config.pieces,
            )
        )  # fmt: skip
        writer = during.enter_context(TraceWriter(folder, header))
        during.enter_context(watch.hooks())
        watch.start()
        writer.write(watch.take())
        _train(config, engine, loader, watch, writer)
    return OK


def _train(
    config: RunConfig, engine: Engine, loader: Loader, watch: OperationWatch, writer: TraceWriter
) -> None:
    trained, plant = 0, watch.request.plant
    for step in range(1, watch.request.steps + 1):
        batch = next(loader)
        tokens = batch.positions.size * config.model.sequence_length
        lr = scheduled_rate(config, engine.updates, trained, tokens)
        watch.begin(step, batch.micro_batches)
        _, applied = engine.train_step(batch.micro_batches, lr, watch.judged)
        trained += tokens if applied else 0
        watch.updated()
        writer.write(watch.take())
        if plant is not None and (plant.step, plant.rank) == (step, dist.get_rank()) and not watch.planted:
            raise ConfigError(
                f"--plant: nothing can be planted at {plant.name!r}: this layout has no such operation, or it is "
                "computed for the trace only, as kernels.loss=chunked makes logits piece by piece; choose another, or "
                "kernels.loss=reference"
            )


def _device(device: torch.device) -> str:
    """In words, with what decides how a CPU sums."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{CPU}, {torch.get_num_threads()} threads"


def main() -> None:
    """The entry point of every rank."""
    rank_process.main(trace)


if __name__ == "__main__":
    main()
