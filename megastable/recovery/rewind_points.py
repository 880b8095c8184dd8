"""Keeps snapshots, and what was trained on since the oldest: takes them, proves one good, restores it. Collective."""

from __future__ import annotations

import math
import socket
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from megastable.attribution import conclusion
from megastable.attribution.conclusion import Conclusion
from megastable.attribution.examination import examine
from megastable.attribution.sample_replay import Laboratory, Trained, harmless
from megastable.base import free_memory
from megastable.base.collectives import agree, gathered
from megastable.base.fingerprint import Marks
from megastable.base.rng import rng_state
from megastable.checkpoint import snapshot_budget
from megastable.checkpoint.origin import Origin
from megastable.checkpoint.snapshot import Ring, Snapshot
from megastable.checkpoint.snapshot_budget import NO_SNAPSHOTS, SnapshotBudget
from megastable.checkpoint.store import RunState
from megastable.data.skips import Selection
from megastable.recovery.run_parts import RunParts
from megastable.run.events.stability_events import NoSnapshots, SnapshotRejected
from megastable_guard.detector_state import DetectorState

Floats = npt.NDArray[np.float64]
TOLD = 4  # ranks named in a sentence
ALARM = 64  # steps, at least, that an alarm takes since the onset


class RewindState(NamedTuple):
    """What a snapshot keeps besides the engine's state. watches: `Watch.state_dict`, by name. adjusted: what it was
    trained with, of `Adjustments`."""

    state: RunState
    random: dict[str, Any]
    detector: DetectorState
    watches: Mapping[str, Mapping[str, Any]]
    adjusted: tuple[str, ...] = ()


class Points:
    """Of one process, which resumed where `origin` says, after a step of the scheduled rate `resumed_rate`, None if
    that is unknown. marks: fingerprints of the state, if there are any yet. may_look: whether there is room for the
    current state besides the points. laboratory: measures samples on the engine's state."""

    def __init__(
        self,
        parts: RunParts,
        origin: Origin,
        marks: Callable[[], Marks | None] = lambda: None,
        resumed_rate: float | None = None,
    ) -> None:
        self.config, self.engine, self.log = parts.config.stability, parts.engine, parts.log
        self.origin, self.marks = origin, marks
        self.laboratory = Laboratory(self.config.attribution, parts.engine, parts.loader)
        c = self.config.snapshots
        budget = budget_snapshots(parts) if parts.acts and c.interval else NO_SNAPSHOTS
        self.ring, self.may_look = Ring(parts.engine, budget.points, c.interval), budget.aside
        self._resumed_rate = resumed_rate
        # As many steps as the ring reaches back, whichever snapshots it keeps, or as what is waited for may last.
        reach = max(2**c.keep * max(1, c.interval), self.config.policy.wait + ALARM)
        self.trained: deque[Trained] = deque(maxlen=min(512, reach))
        self.finite: Snapshot | None = None  # the newest that `back` passed over although finite

    def take(
        self,
        state: RunState,
        detector: DetectorState,
        watches: Mapping[str, Mapping[str, Any]],
        counters: dict[str, Any] | None = None,
    ) -> None:
        """Keep a snapshot of the engine's state, which is that after `state`. counters: if the engine's have advanced
        already, as after a refused step."""
        if state.step not in self.ring.steps:
            # Checkpoints fill in `stability` themselves; the vitals can be shared, as they are replaced as a whole.
            light = state.model_copy(update={"stability": {}, "vitals": None}).model_copy(deep=True)
            light.vitals = state.vitals
            extra = RewindState(light, rng_state(), detector, watches, self.engine.adjustments.now)
            self.ring.take(state.step, extra, counters, self.marks())

    @property
    def oldest(self) -> int | None:
        return self.ring.steps[0] if self.ring.steps else None

    def since(self, onset: int) -> list[Trained]:
        return [t for t in self.trained if t.step >= onset]

    def forget_after(self, step: int) -> None:
        """Drop the points and the samples of undone steps."""
        self.ring.forget_from(step + 1)
        while self.trained and self.trained[-1].step > step:
            self.trained.pop()

    # The scheduled learning rate

    @property
    def newest_rate(self) -> float | None:
        """At which the last step was scheduled, if known."""
        return self.rate_before(self.trained[-1].step if self.trained else self.origin.step)

    def rate_before(self, step: int) -> float | None:
        """The scheduled rate at which the state after `step` was last trained."""
        known = (t.scheduled for t in reversed(self.trained) if t.step <= step and t.scheduled is not None)
        return next(known, self._resumed_rate if step == self.origin.step else None)

    def highest_rate_since(self, step: int) -> float | None:
        return max((t.scheduled for t in self.since(step) if t.scheduled is not None), default=None)

    # Rewinding

    def back(self, onset: int, older: int, left_out: Selection) -> Snapshot | None:
        """Restore the newest point before `onset` that is still good; older: skip so many. Bad ones are dropped, and a
        checkpoint that one of them proves bad is convicted."""
        self.finite = None
        while (snapshot := self.ring.before(onset, older)) is not None:
            if why := self._changed(snapshot):
                text = f"  the snapshot of step {snapshot.step} {why}: further back"
            else:
                finite, good = self._tried(snapshot, left_out, self.origin.blame)
                if good:
                    return snapshot
                if finite and self.finite is None:
                    self.finite = snapshot
                why = "is worse on what it was trained on" if finite else "is not finite"
                text = f"  the state after step {snapshot.step} {why} already: further back"
            self.log.emit(SnapshotRejected(step=snapshot.step, reason=why), say=text)
            self.ring.forget_from(snapshot.step)
            onset = snapshot.step
        return None

    def look(self, onset: int, left_out: Selection) -> Snapshot | None:
        """As `back`, for inspection only: the run may stay where it is, so no point is dropped and no checkpoint
        convicted."""
        while (snapshot := self.ring.before(onset)) is not None:
            if not self._changed(snapshot) and self._tried(snapshot, left_out, self.origin.worse)[1]:
                return snapshot
            onset = snapshot.step
        return None

    def _changed(self, snapshot: Snapshot) -> str:
        """Where memory holds other bytes than were copied into it: the end of a sentence; empty if nowhere."""
        everyone = gathered((self.ring.intact(snapshot), socket.gethostname()))
        bad = [(rank, host) for rank, (intact, host) in enumerate(everyone) if not intact]
        if not bad:
            return ""
        told = ", ".join(f"rank {rank} on {host}" for rank, host in bad[:TOLD])
        more = f" and {len(bad) - TOLD} more" if len(bad) > TOLD else ""
        return f"has other bytes than were copied into it, in the memory of {told}{more}"

    def _tried(
        self, snapshot: Snapshot, left_out: Selection, blame: Callable[[int, Callable[[int], Floats]], str]
    ) -> tuple[bool, bool]:
        """Whether a point, which the engine has restored, is finite, and whether it is good."""
        self.restore(snapshot)
        adjusted, switch = self.engine.adjustments.now, self.engine.adjustments.switch
        switch(snapshot.extra.adjusted)  # with others a good state may look bad
        try:
            recorded, now = self._reference(snapshot, left_out)
            norms = self.engine.flat_state().norms()
            finite = math.isfinite(norms.parameters + norms.second_moment)
            blamed = blame(snapshot.step, lambda at: self._latest(at, left_out)) if finite else ""
        finally:
            switch(adjusted)
        return finite, finite and not blamed and not conclusion.is_worse(now[: recorded.size], recorded)

    def restore(self, snapshot: Snapshot) -> None:
        self.ring.restore(snapshot)
        self.engine.refresh_weights()

    def before_region(self, found: Conclusion, snapshot: Snapshot) -> Snapshot:
        """The point to resume from: `snapshot`, which the engine holds, or, if that was already trained on the bad
        region, the newest one before it, restored into the engine."""
        if found.region is None or found.region.first >= snapshot.extra.state.cursor:
            return snapshot
        touched = [t.step for t in self.trained if t.applied and np.isin(t.positions, found.convicted).any()]
        older = self.ring.before(min(touched)) if touched else None
        if older is None or older.step >= snapshot.step:
            return snapshot
        # The state it was copied from led to a proven one, but its memory may have failed since.
        whole = all(bool(torch.isfinite(t).all()) for t in older.tensors.values() if t.is_floating_point())
        if not all(gathered(whole)) or self._changed(older):
            return snapshot
        self.restore(older)
        self.log.say(
            f"  the bad region begins before step {snapshot.step}: further back, to step {older.step}"
        )
        return older

    # On the restored state

    def examine(
        self, window: list[Trained], snapshot: Snapshot, left_out: Selection, adjacent: bool
    ) -> Conclusion:
        """Find the guilty samples of `window`."""
        history = [t for t in self.trained if t.applied and t.step <= snapshot.step]
        return examine(self.laboratory, window, history, snapshot.extra.state.cursor, left_out, adjacent)

    def _reference(self, snapshot: Snapshot, left_out: Selection) -> tuple[Floats, Floats]:
        """Of harmless samples from before a snapshot: losses when trained on, losses on its state.

        Right after a start the former are unknown, and empty.
        """
        count = self.config.attribution.reference
        before = [t for t in self.trained if t.step <= snapshot.step and t.applied]
        positions, recorded = harmless(before, left_out)
        positions, recorded = positions[-count:], recorded[-count:]
        if not positions.size:
            return recorded, self._latest(snapshot.extra.state.cursor, left_out)
        return recorded, self.laboratory.losses(positions)

    def _latest(self, cursor: int, left_out: Selection) -> Floats:
        """Losses of the latest harmless samples before a position, on the current state."""
        count = self.config.attribution.reference
        latest, _ = left_out.next_kept(max(0, cursor - count), count)
        return self.laboratory.losses(latest[latest < cursor])


def budget_snapshots(parts: RunParts) -> SnapshotBudget:
    """The number of points for which every rank has room, printed with its calculation. Collective."""
    engine, pinned = parts.engine, torch.cuda.is_initialized()
    state = engine.optimizer_state().values()
    everyone = gathered(free_memory.demand(state, engine.flat_state().bytes(), pinned))
    found = agree(lambda: snapshot_budget.plan(everyone, parts.config.stability.snapshots))
    if found.points:
        parts.log.say(found.text)
    else:
        parts.log.emit(NoSnapshots(bytes=found.snapshot, budget=found.budget), say=found.text)
    return found
