"""Load a checkpoint of any layout into an engine of any other: weights, moments and fp16's loss scale, bit for bit.

Every rank reads the ranges that it holds. If the tensor-parallel size is the same it reads only those; otherwise it
assembles each of its tensors and cuts out its shard, one tensor in memory at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from megastable.base.errors import CheckpointError
from megastable.checkpoint import store
from megastable.checkpoint.store import RunState
from megastable.checkpoint.whole import WholeState
from megastable.config import recipe
from megastable.config.model import ModelConfig
from megastable.optim.build import interchangeable
from megastable.parallel.fragments import Fragment


def load(checkpoint: Path, state: RunState, engine: Any) -> None:
    """Load `checkpoint`, whose state.json is `state`, into an engine.

    Not collective: a single rank may fail with CheckpointError. Once all agree, `engine.refresh_weights()` updates the
    low-precision weights.
    """
    check_model(checkpoint, engine.config.model)
    check_optimizer(checkpoint, state, engine.config.optimizer.name)
    whole, topology = WholeState(checkpoint), engine.topology
    whole.check_fits(engine.config.model)

    def read(fragment: Fragment, kind: str) -> Tensor:
        return whole.read(
            fragment.name, kind, topology.tensor_rank, topology.layout.tensor, fragment.start, fragment.numel
        )

    engine.flat_state().fill(read, whole.adam_step)
    engine.restore_shared_state(whole.shared)
    if state.layout.precision == engine.config.precision.kind:
        engine.restore_scaler(state.scaler)
    engine.restore_fp8_history(state.fp8)
    engine.updates = state.updates


def check_optimizer(checkpoint: Path, state: RunState, name: str) -> None:
    """Raises CheckpointError if the optimizer `name` cannot continue from the checkpoint's state."""
    if state.adam_step and not interchangeable(state.optimizer, name):
        raise CheckpointError(
            f"{checkpoint} holds the state of optimizer.name={state.optimizer}, which {name} cannot continue. "
            f"Set it back; or begin with the weights alone: `megastable checkpoint export {checkpoint} NEW_RUN`, then "
            f"start NEW_RUN with optimizer.name={name}, and a warm-up of its own: its moments are fresh"
        )


def check_model(checkpoint: Path, model: ModelConfig) -> None:
    """Raises CheckpointError, with the differences, if the weights are of another model."""
    if store.read_contents(checkpoint).fingerprints.get("model") == store.model_fingerprint(model):
        return
    theirs = recipe.load(checkpoint / store.RECIPE).model.model_dump()
    differing = [
        f"model.{key}: {theirs[key]} in the checkpoint, {value} in this run"
        for key, value in model.model_dump().items()
        if theirs.get(key) != value and key not in store.FREE
    ]
    if differing:
        raise CheckpointError(f"{checkpoint} is of another model: {'; '.join(differing)}")
