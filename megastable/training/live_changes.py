"""Carries out what people change while the run trains (run/changes.py), and tells what it does after that, and after an
incident is over."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from megastable.base.collectives import run_on_first
from megastable.base.errors import DataError, SpaceError
from megastable.config.tree import RunConfig
from megastable.engine.engine import Engine
from megastable.recovery.incident_log import IncidentLog, drop_closed_after
from megastable.recovery.run_parts import StepResult
from megastable.run.changes import (
    answer_request,
    config_at,
    follow_recipe,
    list_left_out,
    read_requests,
    select_holding,
)
from megastable.run.directory import RunDirectory
from megastable.run.events.people_events import ChangeMade, ChangeMeasured, ChangeRefused
from megastable.run.events.stability_events import Handover, IncidentEvent, IncidentLater
from megastable.run.events.training_events import Resumed, RolledBack, Training, Warned
from megastable.run.log import RunLog
from megastable.training.heartbeat import WatchedFile
from megastable_guard.incident import Breakdown
from megastable_guard.robust import median

LATELY = 20  # applied steps whose median tells the level


class Level:
    """Of the last applied steps."""

    def __init__(self) -> None:
        self._lately = deque[tuple[int, float, float]](maxlen=LATELY)  # step, loss, gradient norm

    def note_step(self, done: StepResult) -> None:
        step, step_measures = done.state.step, done.measured
        while self._lately and self._lately[-1][0] >= step:  # undone
            self._lately.pop()
        if done.applied and math.isfinite(step_measures.loss) and math.isfinite(step_measures.grad_norm):
            self._lately.append((step, step_measures.loss, step_measures.grad_norm))

    def median_since(self, step: int = 0) -> tuple[float, float] | None:
        """Medians of loss and gradient norm, from a step on; None if there were none, as right after a start."""
        recent = [(loss, norm) for applied_step, loss, norm in self._lately if applied_step >= step]
        if not recent:
            return None
        return median([loss for loss, _ in recent]), median([norm for _, norm in recent])


class LiveChanges:
    """Of one rank. made: all changes of the run, in the order in which they were made, the same on every rank."""

    def __init__(
        self, recipe: RunConfig, run: RunDirectory, engine: Engine, log: RunLog, file: WatchedFile
    ) -> None:
        """Collective."""
        self.recipe, self.run, self.engine, self.log, self.file = recipe, run, engine, log, file
        past_answers = run_on_first(lambda: list(run.iterate_events(ChangeMade, ChangeRefused)))
        self.made = [change_event for change_event in past_answers if isinstance(change_event, ChangeMade)]
        self._answered = {str(change_event.get("change")) for change_event in past_answers}
        self._held = list[ChangeMade]()  # what the engine trains with
        self.level = Level()
        self._told_problems = set[str]()

    def follow_recipe(self, changed: Sequence[str], step: int) -> None:
        """The run goes on after `step` with a recipe that differs from that of its last start: "key: old -> new" each.
        Collective. Raises SpaceError."""
        changed_keys = [change_text.partition(":")[0] for change_text in changed]

        def follow() -> list[ChangeMade]:
            recipe_change = follow_recipe(self.recipe, changed_keys, self.made, step)
            if recipe_change is not None:
                self.log.commit_event(recipe_change, say=True)
            return [] if recipe_change is None else [recipe_change]

        self.made += run_on_first(follow)

    def hear_ballot(self, ballot: Sequence[float], step: int) -> None:
        """Rank 0 has told all whether there are new requests, by the gate's sum."""
        if any(ballot):
            self.read_requests(step)

    def read_requests(self, step: int) -> None:
        """Answer the requests that there are after `step`. Collective."""
        self.made += run_on_first(lambda: self._answer(step))

    def begin_step(self, step: int) -> set[str]:
        """Let the engine train with what holds at the step after `step`; the keys of changes that begin there or have
        ended."""
        held, before = select_holding(self.made, step + 1), select_holding(self.made, step)
        if held != self._held:
            self.engine.follow_config(config_at(self.recipe, self.made, step + 1))
            self._held = held
            self._warn(step, list_left_out(self.recipe, held, step + 1))
        if held != before and (ended := [change for change in before if change not in held]):
            keys = ", ".join(dict.fromkeys(key for change in ended for key in change.new))
            self.log.say_line(f"step {step + 1}: {keys} as before the change, which ended")
        return {
            key for change in (*held, *before) if (change in held) != (change in before) for key in change.new
        }

    def _answer(self, step: int) -> list[ChangeMade]:
        """Journal the answers to new requests; the changes that were made."""
        self.file.begin_to_read()
        new_changes = list[ChangeMade]()
        try:
            change_requests, request_problems = read_requests(self.file.path)
        except DataError as error:  # what cannot be read now ends no run
            change_requests, request_problems = [], [str(error)]
        self._warn(step, request_problems)
        for change_request in change_requests:
            if change_request.id not in self._answered:
                answer_event = answer_request(
                    change_request, self.recipe, [*self.made, *new_changes], step, self.level.median_since()
                )
                try:
                    self.log.commit_event(answer_event, say=True)
                except SpaceError:
                    # A restart would train these steps without the change. Tried again after the next step.
                    self.run.waiting.pop()
                    self.file.has_news = True
                    text = f"{self.run.journal} cannot be written to: changes that people ask for wait until it can"
                    self._warn(step, [text])
                    break
                self._answered.add(change_request.id)
                new_changes += [answer_event] if isinstance(answer_event, ChangeMade) else []
        return new_changes

    def _warn(self, step: int, problems: Sequence[str]) -> None:
        for problem in problems:
            if problem not in self._told_problems:
                self._told_problems.add(problem)
                self.log.emit_event(Warned(step=step, text=problem), say=f"WARNING: {problem}")


CHANGED = 100  # steps after a change at which its effect is told
LATER = (100, 500)  # steps after an incident was over


class Effects:
    """Of one rank. Each effect is told once, by whichever process reaches the step; and at the end of the run."""

    def __init__(self, run: RunDirectory, changes: LiveChanges, incidents: IncidentLog, log: RunLog) -> None:
        """Collective."""
        self.changes, self.incidents, self.log = changes, incidents, log
        closed_incidents, self._told = run_on_first(lambda: _recall(run))
        self.incidents.closed |= closed_incidents

    def note_step(self, done: StepResult) -> None:
        """A step is done, and was not undone at once."""
        step = done.state.step
        self.changes.level.note_step(done)
        self._tell_changes(step, CHANGED)
        for incident_number, closed_step in self.incidents.closed.items():
            if (steps_after := step - closed_step) in LATER:
                self._tell_incident(incident_number, step, steps_after)

    def finish_run(self, step: int) -> None:
        """The run ends after `step`."""
        self._tell_changes(step, 1)
        for incident_number, closed_step in self.incidents.closed.items():
            if step > closed_step:
                self._tell_incident(incident_number, step, step - closed_step, at_end=True)

    def _tell_changes(self, step: int, after: int) -> None:
        """Of changes that have held for `after` steps, or until their end."""
        for change in self.changes.made:
            first_step = change.step
            if first_step is None or change.change in self._told:
                continue
            last_step = min(first_step + after - 1, math.inf if change.until is None else change.until)
            if step < max(first_step, last_step):
                continue
            self._told.add(change.change)
            loss, norm = self.changes.level.median_since(first_step) or (None, None)
            change_effect = ChangeMeasured(
                step=step, change=change.change, steps=step - first_step + 1, new=dict(change.new),
                loss_before=change.loss, loss_after=loss, norm_before=change.grad_norm, norm_after=norm,
            )  # fmt: skip
            self.log.emit_event(change_effect, say=True)

    def _tell_incident(self, number: int, step: int, after: int, **more: bool) -> None:
        current_level = self.changes.level.median_since()
        if current_level is None or (number, after) in self._told:
            return
        self._told.add((number, after))
        event = IncidentLater(number=number, step=step, after=after, loss=current_level[0], **more)
        self.log.emit_event(event)


def _recall(run: RunDirectory) -> tuple[dict[int, int], set[object]]:
    """By number, the steps at which incidents were over; and what was told: of which change, of which incident so many
    steps later."""
    closed, told = dict[int, int](), set[object]()
    # Whether the next start goes back on purpose: not one after a crash, which trains the same steps again.
    undone = False
    for event in run.iterate_events(
        IncidentEvent, IncidentLater, ChangeMeasured, RolledBack, Handover, Resumed, Training
    ):
        if isinstance(event, ChangeMeasured):
            told.add(event.change)
        elif isinstance(event, RolledBack | Handover):
            undone = True
        elif isinstance(event, Resumed | Training):  # without a checkpoint there is the latter only
            if undone:
                closed = drop_closed_after(event.step or 0, closed)
            undone = False
        elif isinstance(event, IncidentLater):
            told.add((event.number, event.after))
        elif not isinstance(event, IncidentEvent):
            continue
        elif event.what == "rewound" and event.to_step is not None:
            closed = drop_closed_after(event.to_step, closed)
        elif event.what == "closed" and event.step is not None and event.number is not None:
            of_numbers = event.summary.get("verdict") not in [*Breakdown]
            if event.summary.get("outcome") == "healed" and of_numbers:
                closed[event.number] = event.step
    return closed, told
