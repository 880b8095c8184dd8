"""Collects evidence against the checkpoint that this process resumed from, and how far back the next one must go.

A state that no step of this process has proven may itself be bad: saved when already bad, or by a version whose
checkpoints hold no vitals. Then no sample and no rate is to blame, and every resume from it meets the same trouble.
Collective where it measures or writes; decides from numbers that all ranks have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from megastable.base.collectives import run_on_first
from megastable.base.errors import CheckpointError
from megastable.checkpoint import markers, store
from megastable.checkpoint.held_points import find_tried_steps
from megastable.checkpoint.store import RunState
from megastable.checkpoint.vitals import fallen_behind
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import Handover
from megastable.run.events.training_events import CheckpointSuspect, Training, Warned
from megastable.run.log import RunLog

Floats = npt.NDArray[np.float64]

# Keys that change losses, so that they say nothing about the state; and keys that cause trouble right after a start. If
# changed since the checkpoint, it is not blamed.
MEASURES = ("precision", "data", "kernels", "deepspeed", "model", "train.sequence_warmup")
CAUSES = (*MEASURES, "optimizer", "schedule", "train.global_batch", "train.batch_warmup")


class Origin:
    """Of one process. step: of the checkpoint it resumed from, 0 = none; proven: the step up to which the checkpoint
    may be to blame for trouble; reason: why it is quarantined, "" = it is not."""

    def __init__(
        self, run: RunDirectory, config: RunConfig, state: RunState, changed: Sequence[str], log: RunLog
    ) -> None:
        """state: that the process resumes from, of a checkpoint or a new run. changed: differences from the recipes of
        the last start and of the checkpoint, as "key: old -> new"."""
        self._run, self._config, self._log = run, config.checkpoint.vitals, log
        self._verify = config.stability.policy.verify_steps
        self._batch = state.batch or config.batches.value_at(state.cursor)
        self._other_measure, self._other_cause = (
            any(change_text.startswith(key_prefix) for change_text in changed for key_prefix in key_prefixes)
            for key_prefixes in (MEASURES, CAUSES)
        )
        self.step, self.proven = state.step, state.step + self._verify
        self._recent, self._cursor = list(state.recent_losses), state.cursor
        self._returns = 0
        checkpoint_path = run.checkpoints / store.name_of(state.step)
        self._accepted = run_on_first(lambda: markers.read_acceptance(checkpoint_path) is not None)
        self.reason = ""

    def blame_checkpoint(self, step: int, measure: Callable[[int], Floats]) -> str:
        """As `explain_worse_state`; a bad state that was resumed from quarantines the checkpoint."""
        worse_reason = self.explain_worse_state(step, measure)
        if worse_reason and step == self.step:
            self.reason = worse_reason
            self._quarantine(f"the state that it holds was bad when it was saved: {worse_reason}")
        return worse_reason

    def explain_worse_state(self, step: int, measure: Callable[[int], Floats]) -> str:
        """Whether the state after `step`, which the engine holds, is worse than its checkpoint's vitals say: a
        sentence, or "".

        measure(position): the losses of the latest samples before a position, in their order.
        """
        if not self.step or step > self.proven or self._other_measure or self._accepted:
            return ""
        return fallen_behind(measure(self._cursor), self._recent, self._batch, self._config)

    def note_return(self, step: int, onset: int) -> bool:
        """Called at every rewind to the state after `step` with no bad sample for the trouble at `onset`. Whether
        the checkpoint is the suspect: trouble came back at once, on the very state resumed from."""
        if not self.step or step > self.step or onset > self.proven or self._other_cause or self._accepted:
            return False
        self._returns += 1
        return self._returns > 1

    def suspect_checkpoint(self) -> str:
        """Blame the checkpoint, without a proof that would mark it; returns why."""
        self.reason = "the trouble came back at once, on its very state, with no bad sample"
        return self.reason

    def find_step_before(self, onset: int, clock: int) -> int:
        """The step that the next process's checkpoint must precede. onset: of the trouble; clock: the farthest step.

        A process that resumed after a handover, and hands over again without new ground, goes further back: the same
        checkpoint would lead to the same end.
        """
        read_events = self._run.iterate_events
        tried_steps = run_on_first(
            lambda: find_tried_steps(read_events(Handover, Training), clock, self._verify)
        )
        return min([onset, *tried_steps, *[self.step] * bool(self.reason and self.step)])

    def _quarantine(self, reason: str) -> None:
        checkpoint_name = store.name_of(self.step)
        checkpoint_path = self._run.checkpoints / checkpoint_name

        def mark() -> bool:
            if not checkpoint_path.is_dir():
                return False  # deleted by retention
            markers.mark_bad(checkpoint_path, reason)
            return True

        try:
            was_marked = run_on_first(mark)
        except CheckpointError as error:
            warning_text = f"{error}: it is put aside by the restart all the same"
            self._log.emit_event(Warned(step=self.step, text=warning_text))
            return
        if was_marked:
            self._log.emit_event(CheckpointSuspect(name=checkpoint_name, reason=reason))
