"""Trains on from a checkpoint of a run, of any layout, as a single process, and writes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from megastable.attribution.sample_replay import BranchStart, Laboratory, TrainedBranch, train_branch
from megastable.base.errors import CheckpointError
from megastable.checkpoint import markers, store
from megastable.checkpoint.snapshot import Ring, Snapshot
from megastable.checkpoint.store import RunState
from megastable.checkpoint.whole import load_into, policy_of, run_of
from megastable.config import deepspeed_json, recipe
from megastable.config.tree import RunConfig
from megastable.data.loader import Loader, RankPart
from megastable.data.samples import Source
from megastable.data.skips import Selection
from megastable.engine.distributed import start_distributed, stop_distributed
from megastable.engine.engine import Engine
from megastable.engine.numerics import Numerics
from megastable.optim.schedule import scheduled_rate
from megastable.parallel.layout import Layout
from megastable.parallel.topology import Topology
from megastable.run.directory import RunDirectory
from megastable.run.membership import check_alone
from megastable_guard.policy import Policy
from megastable_guard.policy_state import PolicyState

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
LimitRate = Callable[[int, float], float]

ALONE = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}  # fmt: skip
LAYOUT = {
    "tensor": 1, "pipeline": 1, "context": 1, "replicas": 1, "expert": 1, "sequence": False, "tensor_overlap": 1,
    "schedule": "1f1b", "model_chunks": 1,
}  # fmt: skip


class ReplayedStep(NamedTuple):
    """A step as the run did it: positions of its samples, int64 [global batch], the recorded rate, and whether the
    update was applied."""

    positions: Int64s
    rate: float
    applied: bool


class KeptState(NamedTuple):
    """A state to come back to, and where it stands."""

    snapshot: Snapshot
    start: BranchStart


def find_checkpoint(run: RunDirectory, before: int | None = None) -> Path:
    """The newest good checkpoint of a run, from before the step `before` if that is given. Raises CheckpointError if
    there is none."""
    problems_found = list[str]()
    for path in store.newest_first(run.checkpoints):
        if before is not None and store.step_of(path) >= before:
            continue
        damage_ruling = markers.read_bad_ruling(path)
        if damage_ruling is not None and markers.read_acceptance(path) is None:
            problems_found.append(f"{path.name} was quarantined: {damage_ruling.reason}")
        elif checkpoint_problems := store.list_problems(path):
            problems_found.append(checkpoint_problems[0])
        else:
            return path
    place_named = "" if before is None else f" from before step {before}"
    reason_named = f": {problems_found[0]}" if problems_found else store.describe_others(run.checkpoints)
    raise CheckpointError(f"{run.root} has no good checkpoint{place_named}{reason_named}")


def recipe_of(checkpoint: Path, now: RunConfig) -> RunConfig:
    """The recipe that wrote a checkpoint, for one process, with the corpora where they are now."""
    recipe_tree = run_of(checkpoint).model_dump(mode="json")
    recipe_tree["parallel"] |= LAYOUT
    recipe_tree["data"]["corpora"] = now.model_dump(mode="json")["data"]["corpora"]
    return recipe.validate_tree(recipe_tree, f"{checkpoint / store.RECIPE}, for one process")


@contextmanager
def single_process(config: RunConfig) -> Iterator[None]:
    """Make this process the only rank of a group, unless it is one. Raises ConfigError if it is one of several."""
    if dist.is_initialized():
        yield
        return
    check_alone(os.environ)
    environment_before = dict(os.environ)
    os.environ.update(ALONE)
    try:
        start_distributed(config.run.timeout, config.run.deterministic)
        try:
            yield
        finally:
            stop_distributed()
    finally:
        os.environ.clear()
        os.environ.update(environment_before)


class OfflineRun:
    """A run that stands at `checkpoint`. state: of the checkpoint; start: where the engine stands now.

    limit_rate: the rate after the cuts and caps that held at the checkpoint.
    """

    def __init__(self, checkpoint: Path, config: RunConfig, source: Source, selection: Selection) -> None:
        """Raises CheckpointError and ConfigError."""
        self.checkpoint, self.config = checkpoint, config
        self.state: RunState = store.read_state(checkpoint)
        alone = Topology(Layout(1, 1, 1, 1), 0, config.run.timeout)
        self.engine = Engine(config, deepspeed_json.build_deepspeed_json(config, 1), alone)
        self.loader = Loader(
            source, selection, self.state.cursor, config.batches, RankPart(config.train.micro_batch),
            config.data.model_copy(update={"prefetch": 2}),  # few batches are read
            pin_memory=self.engine.device.type == "cuda", pieces=config.pieces,
        )  # fmt: skip
        self.laboratory = Laboratory(config.stability.attribution, self.engine, self.loader)
        self._ring = Ring(self.engine, 0, 0)
        self.start = BranchStart(self.state.updates, self.state.trained_tokens)
        policy = Policy(config.stability.policy, policy_of(self.state), self.engine.fp8 is not None)
        self._acts = config.stability.enabled and not config.stability.dry_run
        self.limit_rate: LimitRate = policy.limit_rate if self._acts else lambda updates, rate: rate
        self._policy = policy

    def load_checkpoint(self) -> None:
        """Fill the engine from the checkpoint. Raises CheckpointError."""
        load_into(self.engine, self.checkpoint, self.state)
        self.engine.refresh_weights()
        self.compute_as_usual()

    @property
    def possible(self) -> set[str]:
        """Adjustments that this run can make, and whether it has kernels to leave."""
        kernels_left = self._policy.state.kernels if self._acts else []
        has_kernels = {*self.engine.numerics.kernels.values()} - {*kernels_left}
        return {*self.engine.adjustments.possible, *(["other_kernels"] if has_kernels else [])}

    def compute_as_usual(
        self, adjustment: str = "", leave_fp8: bool = False, leave_kernels: bool = False
    ) -> None:
        """Compute as the run did at the checkpoint: without the kernels that it had left, maybe without FP8, and with
        its adjustments; but for one more of them, FP8, and all kernels."""
        engine, policy = self.engine, self._policy
        uses_fp8 = engine.fp8 is not None and not leave_fp8 and (policy.fp8 or not self._acts)
        kept_policy = policy.state if self._acts else PolicyState()
        kernels_left = engine.numerics.kernels.values() if leave_kernels else kept_policy.kernels
        engine.numerics.switch_to(Numerics(uses_fp8, engine.numerics.kinds_of(kernels_left)))
        engine.adjustments.switch_to({*kept_policy.adjusted, *filter(None, [adjustment])})

    def close(self) -> None:
        self.loader.close()

    def replay_steps(self, steps: Sequence[ReplayedStep], advance: Callable[[int], None]) -> Floats:
        """Do some steps as the run did them; their losses, [steps] nats. The engine stands after them.

        Raises DataError if a sample cannot be read.
        """
        step_losses = list[float]()
        for step in steps:
            replay_rate = recall_rate(self.first_rate(step.positions), step.rate)
            step_measured, applied = self.engine.train_step(
                self.loader.read_micro_batches(step.positions), replay_rate, lambda _, step=step: step.applied
            )
            step_tokens = step.positions.size * self.config.model.sequence_length
            updates, trained_tokens = self.start
            self.start = BranchStart(updates + applied, trained_tokens + applied * step_tokens)
            step_losses.append(step_measured.loss)
            advance(1)
        return np.array(step_losses)

    def keep_state(self) -> KeptState:
        """A copy of the engine's state."""
        return KeptState(self._ring.copy_aside(0), self.start)

    def restore_state(self, kept: KeptState) -> None:
        """The engine's state as it was then."""
        self.compute_as_usual()
        self._ring.restore_snapshot(kept.snapshot)
        self.engine.refresh_weights()
        self.start = kept.start

    def first_rate(self, batch: Int64s) -> float:
        """The rate of the next update."""
        updates, tokens = self.start
        batch_tokens = batch.size * self.config.model.sequence_length
        return self.limit_rate(updates, scheduled_rate(self.config, updates, tokens, batch_tokens))

    def train_on(
        self, batches: Sequence[Int64s], limit_rate: LimitRate, advance: Callable[[int], None]
    ) -> TrainedBranch:
        """Train a branch: the caller restores the state. Raises DataError if a sample cannot be read."""
        return train_branch(
            self.config, self.engine, self.loader, self.start, batches, limit_rate, lambda step: advance(1)
        )


def recall_rate(usual: float, recorded: float) -> float:
    """The rate of a step that was recorded, which is in fp32: the usual one, if that is what was recorded."""
    return usual if np.float32(usual) == np.float32(recorded) else recorded
