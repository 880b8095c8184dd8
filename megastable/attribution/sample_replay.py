"""Measures samples on the engine's current state, for attribution, and trains branches of the run: some steps on given
samples, of which nothing remains once the state is restored. Collective."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from megastable.base.collectives import run_on_all, run_on_first
from megastable.base.errors import MegastableError
from megastable.config.stability import AttributionConfig
from megastable.config.tree import RunConfig
from megastable.data.loader import Loader, MicroBatch
from megastable.data.skips import Selection, Skips
from megastable.engine.engine import Engine
from megastable.optim.schedule import scheduled_rate
from megastable_guard import scores
from megastable_guard.scores import READ, ScoredSamples

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
T = TypeVar("T")

RECORDED = 2**16  # samples of the recorded steps for comparison: more add nothing, and take seconds
SEARCHED = 2**17  # positions before the current one in which samples of a rare corpus are searched
BATCHES = 4  # whose gradients are measured: a bad batch shows within a few steps
BATCH_RATIO = 1.5  # gradient norm relative to an ordinary batch's: means scatter little


@dataclass(frozen=True)
class Trained:
    """A step of this process: its positions and per-sample losses, int64 and fp64 [global batch]; scheduled: its
    learning rate before cuts and caps, None if unknown."""

    step: int
    positions: Int64s
    losses: Floats
    applied: bool
    scheduled: float | None = None


class Known(NamedTuple):
    """Harmless samples, oldest first: positions, losses on the good state or shortly before, corpora; each [n]."""

    positions: Int64s
    losses: Floats
    corpora: Int64s


class ExtraordinaryBatches(NamedTuple):
    """Batches with an extraordinary gradient on the good state: positions of their samples; ratio: the largest norm,
    relative to an ordinary one."""

    positions: Int64s
    ratio: float


def collect_harmless(steps: Sequence[Trained], selection: Skips | Selection) -> tuple[Int64s, Floats]:
    """Positions and losses of the samples of some steps, without those skipped by now: they may have been found bad
    since, in a later epoch."""
    all_positions = np.concatenate(
        [np.empty(0, np.int64), *(trained_step.positions for trained_step in steps)]
    )
    all_losses = np.concatenate([np.empty(0), *(trained_step.losses for trained_step in steps)])
    are_kept = ~selection.mask_skipped(all_positions)
    return all_positions[are_kept], all_losses[are_kept]


class Laboratory:
    """Measures samples on the current state of `engine`, reading them through `loader`."""

    def __init__(self, config: AttributionConfig, engine: Engine, loader: Loader) -> None:
        self.config, self.engine, self.loader = config, engine, loader
        self._leads = False  # whether this rank decides alone, and the others join its measurements

    @property
    def batch(self) -> int:
        """Samples of a step where the run stands: those before had as many, or fewer during a batch warm-up."""
        return self.loader.batch

    def measure_losses(self, positions: Int64s) -> Floats:
        """Per-sample cross-entropy, fp64 [n], by forward passes alone, a global batch at a time.

        Raises DataError on every rank if one cannot read its part.
        """
        self._tell("measure_losses", positions)
        loader_unit, loss_parts = self.loader.unit, [np.empty(0)]
        for part in np.split(positions, range(self.batch, positions.size, self.batch)):
            if part.size:
                padded_positions = np.concatenate([part, np.repeat(part[-1:], -part.size % loader_unit)])
                loss_parts.append(
                    self.engine.evaluate_samples(self._read(padded_positions)).numpy()[: part.size]
                )
        return np.concatenate(loss_parts)

    def measure_gradient_norm(self, positions: Int64s) -> float:
        """Norm of the mean gradient of some samples, by a batch full of copies; nan if fp16 overflows.

        positions: weighted evenly if as many copies as the batch has room for are whole micro-batches on every rank.
        Raises DataError as `measure_losses` does.
        """
        self._tell("measure_gradient_norm", positions)
        even_size = positions.size * max(1, self.batch // positions.size)
        copied_size = self.batch if even_size % self.loader.unit else even_size
        measured = self.engine.measure_step(self._read(np.resize(positions, copied_size)))
        return math.nan if measured.overflow else measured.grad_norm

    def find_corpora(self, positions: Int64s) -> Int64s:
        return self.loader.source.order.locate_samples(positions).corpus

    def read_tokens(self, positions: Int64s) -> npt.NDArray[np.int32]:
        """The first `READ` + 1 of each sample, or all: int32 [n, l]; read by every rank, a global batch at a time.

        Raises DataError as `measure_losses` does.
        """
        self._tell("read_tokens", positions)
        return run_on_all(lambda: self._read_tokens(positions))

    def _read_tokens(self, positions: Int64s) -> npt.NDArray[np.int32]:
        source = self.loader.source
        read_tokens = np.empty((positions.size, min(source.order.sequence_length, READ) + 1), np.int32)
        for part_begin in range(0, positions.size, self.batch):
            part_slice = slice(part_begin, part_begin + self.batch)
            read_tokens[part_slice] = source.read_samples(positions[part_slice])[:, : read_tokens.shape[1]]
        return read_tokens

    def prepare_samples(self, positions: Int64s, z: Floats) -> ScoredSamples:
        """Prepare samples for scoring. z: of their losses [n]; unknown ones do not count. Raises DataError as
        `measure_losses` does."""
        return ScoredSamples(
            self.read_tokens(positions), np.nan_to_num(z, nan=0.0), self.find_corpora(positions)
        )

    def run_on_rank0(self, work: Callable[[Laboratory], T]) -> T:
        """Run `work` with this laboratory on rank 0 alone, whose measurements the other ranks join; its result, or its
        MegastableError, on every rank.

        Measurements are the same on all ranks, but what is computed from them need not be: different CPUs round a
        logarithm differently, and a rank that measures one sample more than the others would hang.
        """
        if dist.get_world_size() == 1 or self._leads:
            return work(self)
        if dist.get_rank() == 0:
            return self._lead(work)
        # Requests of rank 0, until it is done.
        while (asked_for := run_on_first(_nothing)) is not None:
            method_name, sample_positions = asked_for
            getattr(self, method_name)(sample_positions)
        return run_on_first(_nothing)

    def _lead(self, work: Callable[[Laboratory], T]) -> T:
        """Run it, and send the others the outcome."""

        def tell_outcome() -> T:
            if raised_error is not None:
                raise raised_error
            return work_results[0]

        work_results, raised_error, self._leads = list[T](), None, True
        try:
            work_results.append(work(self))
        except MegastableError as raised:
            if raised.collective:  # raised in a measurement: the others have it, too
                raise
            raised_error = raised
        finally:
            self._leads = False
        run_on_first(_nothing)
        return run_on_first(tell_outcome)

    def _tell(self, measure: str, positions: Int64s) -> None:
        """Make the other ranks join a measurement, if this one leads."""
        if self._leads:
            run_on_first(lambda: (measure, positions))

    def find_harmless(
        self, history: Sequence[Trained], corpora: Int64s, cursor: int, selection: Skips | Selection
    ) -> Known:
        """Harmless samples for comparison with samples of `corpora`: those recorded in `history`, with losses
        when not trained on yet, just like the suspects'. For corpora with few recorded (rare, or right after a start)
        the latest before position `cursor`, measured: they were trained on, most of them long ago."""
        positions, losses = collect_harmless(history[-math.ceil(RECORDED / self.batch) :], selection)
        known, count = Known(positions, losses, self.find_corpora(positions)), self.config.reference
        few = [c for c in np.unique(corpora).tolist() if (known.corpora == c).sum() < count]
        reach, kept, of = 0, np.empty(0, np.int64), np.empty(0, np.int64)
        while few and reach < min(cursor, SEARCHED) and any((of == c).sum() < count for c in few):
            reach = min(cursor, max(4 * reach, 4 * count))
            kept, _ = selection.next_kept(cursor - reach, reach)
            kept = kept[kept < cursor]
            of = self.find_corpora(kept)
        found = [kept[of == c][-count:] for c in few]
        # No more than recorded: those are the better reference, and were tried first.
        found = [f for f, c in zip(found, few, strict=True) if f.size > (known.corpora == c).sum()]
        if not found:
            return known
        positions = np.concatenate(found)
        measured = Known(positions, self.measure_losses(positions), self.find_corpora(positions))
        left = ~np.isin(known.corpora, measured.corpora)
        return Known(*(np.concatenate([new, old[left]]) for old, new in zip(known, measured, strict=True)))

    def _read(self, positions: Int64s) -> list[MicroBatch]:
        return run_on_all(lambda: self.loader.read_micro_batches(positions))

    def find_extraordinary(self, steps: Sequence[Trained], known: Known) -> ExtraordinaryBatches | None:
        """Measure gradients of a few batches of `steps` on the good state, the refused ones first, and of an ordinary
        one. Each costs a step. None: all are ordinary, or what is ordinary is unknown."""
        batches = sorted(steps, key=lambda t: t.applied)[: max(0, min(BATCHES, self.config.gradients - 1))]
        if not batches or known.positions.size < scores.ENOUGH:
            return None
        whole = self.measure_gradient_norm(known.positions[-self.batch :])
        norms = np.array([self.measure_gradient_norm(t.positions) for t in batches])
        far = [
            t.positions
            for t, batch_norm in zip(batches, norms, strict=True)
            if batch_norm > BATCH_RATIO * whole
        ]
        return ExtraordinaryBatches(np.concatenate(far), float(np.nanmax(norms)) / whole) if far else None


def _nothing() -> Any:
    return None


class BranchStart(NamedTuple):
    """Where a branch begins: applied updates so far, and the tokens of them."""

    updates: int
    trained_tokens: int


class TrainedBranch(NamedTuple):
    """Mean loss (nats) and gradient norm of every step of a branch; [steps]. measured: losses of some samples at its
    end; [n], nats."""

    losses: Floats
    norms: Floats
    measured: Floats = np.empty(0)


def train_branch(
    config: RunConfig,
    engine: Engine,
    loader: Loader,
    start: BranchStart,
    batches: Sequence[Int64s],
    limit_rate: Callable[[int, float], float],
    tell_progress: Callable[[int], None] = lambda step: None,
    applied: Sequence[bool] | None = None,
) -> TrainedBranch:
    """Train on `batches` from the state that the engine holds, which is `start`. Only finite updates are applied. The
    caller restores the engine's state and counters.

    Args:
        batches: positions of the samples of each step, int64 [global batch].
        limit_rate: the rate after cuts and caps, from the applied updates and the scheduled rate.
        tell_progress: called before each step with its number, from 0.
        applied: which updates may be; None: all.

    Raises:
        DataError: on every rank, if one cannot read its part.
    """
    updates, trained_tokens = start
    engine_before = engine.measured, engine.applied, engine.kept, engine.counters_before
    step_losses, step_norms = list[float](), list[float]()
    try:
        for step, sample_positions in enumerate(batches):
            tell_progress(step)
            micro_batches = run_on_all(partial(loader.read_micro_batches, sample_positions))
            token_count = sample_positions.size * config.model.sequence_length
            limited_rate = limit_rate(updates, scheduled_rate(config, updates, trained_tokens, token_count))
            is_allowed = applied is None or applied[step]
            measured, was_applied = engine.train_step(
                micro_batches, limited_rate, lambda m, allowed=is_allowed: allowed and m.finite
            )
            updates, trained_tokens = updates + was_applied, trained_tokens + was_applied * token_count
            step_losses.append(measured.loss)
            step_norms.append(measured.grad_norm)
    finally:
        engine.measured, engine.applied, engine.kept, engine.counters_before = engine_before
    return TrainedBranch(np.array(step_losses), np.array(step_norms))
