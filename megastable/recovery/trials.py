"""Holds a trial before anything is taken away: the same steps from a good state with the suspects, and without them.
Collective; leaves no trace. attribution/harm.py decides."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from megastable.attribution.branches import BranchStart, TrainedBranch, train_branch
from megastable.attribution.harm import (
    BranchLosses,
    HarmTrial,
    choose_held_out,
    judge_trial,
    mean_difference,
    replace_samples,
)
from megastable.base.collectives import first
from megastable.base.errors import DataError
from megastable.checkpoint.store import RunState
from megastable.config.tree import RunConfig
from megastable.data.skips import Selection
from megastable.engine.engine import Engine
from megastable.recovery.rewind_points import Points
from megastable.recovery.sample_replay import Trained, harmless
from megastable.recovery.snapshot import Snapshot
from megastable.run.events.stability_events import BranchesTried
from megastable.run.events.training_events import Warned
from megastable.run.log import RunLog
from megastable.stability.attribution import Conclusion

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
T = TypeVar("T")

STEPS = 16  # of a branch since the first step with a suspect; half of them if few are suspected
LONGEST = 48  # steps of a branch, with those before the first suspect
PHASES = "try suspects", "try suspects, next step"
COMING = 64  # samples of the data to come that a trial is measured on
FARTHEST = 256  # batches ahead from which they are taken


@dataclass(frozen=True)
class Outlook:
    """Samples of the data to come, by position, and their losses where the run stands; [n], nats."""

    positions: Int64s
    losses: Floats


class MeasuredBranch(NamedTuple):
    """measured: losses of the measured samples at the end of a branch; [n], nats."""

    trained: TrainedBranch
    measured: Floats


def mean_loss(losses: Floats) -> float:
    """As the journal has it."""
    return round(float(losses.mean()), 4)


def describe_branch(
    name: str, branch: MeasuredBranch, coming: Floats, control: Floats, cost: int
) -> dict[str, Any]:
    """For the journal. coming, control: losses of the data to come at its end, and at that of the control."""
    difference, error = mean_difference(coming, control)
    return {
        "name": name, "cost": cost, "loss": mean_loss(coming),
        "difference": round(difference, 4), "error": round(error, 4),
        "losses": branch.trained.losses.round(4).tolist(), "norms": branch.trained.norms.round(4).tolist(),
    }  # fmt: skip


class Trials:
    """points: of which one is in the engine when a trial is held. limit_rate: the rate of an update after cuts and
    caps, from the number of applied ones and the scheduled rate. phase: the heartbeat's."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        points: Points,
        limit_rate: Callable[[int, float], float],
        log: RunLog,
        phase: Callable[[str], None],
    ) -> None:
        self.config, self.engine, self.points = config, engine, points
        self.laboratory, self.loader = points.laboratory, points.laboratory.loader
        self.limit_rate, self.log, self.phase = limit_rate, log, phase

    def look_ahead(self, state: RunState, left_out: Selection) -> Outlook | None:
        """Measure the data to come on the state that the engine holds, where the run stands: samples evenly spread over
        what is left of the run, `FARTHEST` batches at most, beyond the reach of a branch. None: there are none, or they
        cannot be read."""
        steps = min(FARTHEST, self.config.train.steps - state.step - STEPS)
        if steps < 1:
            return None

        def measure() -> Outlook:
            _, cursor = left_out.next_kept(state.cursor, STEPS * self.loader.batch)
            ahead, _ = left_out.next_kept(cursor, steps * self.loader.batch)
            chosen = np.linspace(0, ahead.size - 1, min(COMING, ahead.size)).round().astype(np.int64)
            return Outlook(ahead[chosen], self.laboratory.losses(ahead[chosen]))

        return self._unless_unreadable(state.step, measure)

    def hold(
        self,
        found: Conclusion,
        window: Sequence[Trained],
        snapshot: Snapshot,
        left_out: Selection,
        outlook: Outlook | None,
    ) -> HarmTrial | None:
        """Try the suspects of a conclusion: its bad samples, or without any all samples of `window`. The engine holds
        `snapshot`, before and after. None: there is nothing to compare, or it cannot be read."""
        if outlook is None:
            return None
        step = window[-1].step
        return self._unless_unreadable(
            step, lambda: self._compare(found, window, snapshot, left_out, outlook)
        )

    def _unless_unreadable(self, step: int, work: Callable[[], T]) -> T | None:
        """The result of `work`; None on all ranks if it cannot read samples, which training may never do."""
        try:
            return work()
        except DataError as error:
            text = f"suspects are not tried: {error}"
            self.log.emit(Warned(step=step, text=text), say=f"WARNING: {text}")
            return None

    def _compare(
        self,
        found: Conclusion,
        window: Sequence[Trained],
        snapshot: Snapshot,
        left_out: Selection,
        outlook: Outlook,
    ) -> HarmTrial | None:
        begin, suspects = time.perf_counter(), np.array(found.convicted, dtype=np.int64)
        if not suspects.size:
            suspects = np.concatenate([t.positions for t in window])
        batches = self._next_batches(snapshot, suspects, left_out, STEPS // 2 if found.few else STEPS)
        suspects = np.sort(np.intersect1d(suspects, np.concatenate(batches)))
        applied = [t for t in self.points.trained if t.applied and t.step <= snapshot.step]
        fillers = harmless(applied, left_out)[0]
        fillers = fillers[~np.isin(fillers, found.convicted)][-suspects.size :]
        n = outlook.positions.size
        if not suspects.size or not fillers.size:
            return None
        held_out = choose_held_out(suspects)
        measured = np.concatenate([outlook.positions, held_out])
        before = self.laboratory.losses(outlook.positions)
        with_them = self._live(snapshot, replace_samples(batches, held_out, fillers), measured)
        control = self._live(snapshot, replace_samples(batches, suspects, fillers), measured)
        if not first(lambda: bool(np.isfinite(control.measured).all())):
            return None  # not even harmless samples can be trained on from here
        coming = BranchLosses(with_them.measured[:n], control.measured[:n], before, outlook.losses)
        held = with_them.measured[n:], control.measured[n:]
        vocabulary = self.config.model.vocab_size
        assert vocabulary is not None
        trial = first(lambda: judge_trial(coming, held, vocabulary, suspects.size, len(batches)))
        described = (
            describe_branch("with the suspects", with_them, coming.after, coming.control, 0),
            describe_branch("without the suspects", control, coming.control, coming.control, 1),
        )
        self.log.emit(
            BranchesTried(
                step=window[-1].step, snapshot=snapshot.step, reason=trial.reason, branches=described,
                before=mean_loss(before), present=mean_loss(outlook.losses),
                seconds=round(time.perf_counter() - begin, 3), **trial.facts,
            )
        )  # fmt: skip
        return trial

    def _next_batches(
        self, snapshot: Snapshot, suspects: Int64s, left_out: Selection, steps: int
    ) -> list[Int64s]:
        """The batches that follow a snapshot, as the run reads them, until `steps` steps after the first suspect."""
        cursor, found, since = snapshot.extra.state.cursor, list[Int64s](), 0
        while since < steps and len(found) < LONGEST:
            positions, cursor = left_out.next_kept(cursor, self.loader.batches.at(cursor))
            found.append(positions)
            since += bool(since) or bool(np.isin(positions, suspects).any())
        return found

    def _live(self, snapshot: Snapshot, batches: Sequence[Int64s], measured: Int64s) -> MeasuredBranch:
        """A branch, and the losses of the measured samples at its end; the engine holds the snapshot again."""
        saved: RunState = snapshot.extra.state
        start = BranchStart(saved.updates, saved.trained_tokens)
        try:
            trained = train_branch(
                self.config, self.engine, self.loader, start, batches, self.limit_rate, self._tell_progress
            )
            return MeasuredBranch(trained, self.laboratory.losses(measured))
        finally:
            self.points.restore(snapshot)

    def _tell_progress(self, step: int) -> None:
        """A trial is as many steps long as a hang would be: the supervisor must see that it moves."""
        self.phase(PHASES[step % 2])
