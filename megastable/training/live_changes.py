"""Carries out what people change while the run trains (run/changes.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megastable.base.collectives import first
from megastable.base.errors import DataError
from megastable.config.tree import RunConfig
from megastable.engine.engine import Engine
from megastable.recovery.run_parts import StepResult
from megastable.run.changes import answer, config_at, follow_recipe, holding, read_requests
from megastable.run.directory import RunDirectory
from megastable.run.events.people_events import ChangeMade, ChangeMeasured, ChangeRefused
from megastable.run.events.training_events import Warned
from megastable.run.log import RunLog
from megastable.training.effects import Level
from megastable.training.heartbeat import WatchedFile

AFTER = 100  # steps after a change at which its effect is told


class LiveChanges:
    """Of one rank. made: all changes of the run, in the order in which they were made, the same on every rank."""

    def __init__(
        self, recipe: RunConfig, run: RunDirectory, engine: Engine, log: RunLog, file: WatchedFile
    ) -> None:
        """Collective."""
        self.recipe, self.engine, self.log, self.file = recipe, engine, log, file
        told = first(lambda: list(run.events(ChangeMade, ChangeRefused, ChangeMeasured)))
        self.made = [event for event in told if isinstance(event, ChangeMade)]
        self._measured = {event.change for event in told if isinstance(event, ChangeMeasured)}
        self._answered = {event.change for event in told if not isinstance(event, ChangeMeasured)}
        self._held = list[ChangeMade]()  # what the engine trains with
        self.level = Level()
        self._told_problems = set[str]()

    def follow_recipe(self, changed: Sequence[str], step: int) -> None:
        """The run goes on after `step` with a recipe that differs from that of its last start: "key: old -> new" each.
        Collective."""
        keys = [text.partition(":")[0] for text in changed]
        event = first(lambda: follow_recipe(self.recipe, keys, self.made, step))
        if event is not None:
            self.log.emit(event, say=True)
            self.made.append(event)

    def read(self, step: int) -> None:
        """Answer the requests that there are after `step`. Collective."""
        self.made += first(lambda: self._answer(step))

    def begin(self, step: int) -> bool:
        """Let the engine train with what holds at the step after `step`; whether that differs from what held before."""
        held, before = holding(self.made, step + 1), holding(self.made, step)
        if held != self._held:
            self.engine.follow(config_at(self.recipe, self.made, step + 1))
            self._held = held
        if held != before and (ended := [change for change in before if change not in held]):
            keys = ", ".join(dict.fromkeys(key for change in ended for key in change.new))
            self.log.say(f"step {step + 1}: {keys} as before the change, which ended")
        return held != before

    def stepped(self, done: StepResult) -> None:
        """A step is done: tell what the run did after a change."""
        self.level.stepped(done)
        self._tell_effects(done.state.step, AFTER)

    def finish(self, step: int) -> None:
        """The run ends after `step`."""
        self._tell_effects(step, 1)

    def _tell_effects(self, step: int, after: int) -> None:
        """Of changes that have held for `after` steps, or until their end."""
        for change in self.made:
            begin = change.step
            if begin is None or change.change in self._measured:
                continue
            last = min(begin + after - 1, math.inf if change.until is None else change.until)
            if step < max(begin, last):
                continue
            self._measured.add(change.change)
            level = self.level.since(begin)
            self.log.emit(
                ChangeMeasured(
                    step=step, change=change.change, steps=step - begin + 1, new=dict(change.new),
                    loss_before=change.loss, norm_before=change.grad_norm,
                    **({} if level is None else {"loss_after": level[0], "norm_after": level[1]}),
                ),
                say=True,
            )  # fmt: skip

    def _answer(self, step: int) -> list[ChangeMade]:
        """Journal the answers to new requests; the changes that were made."""
        self.file.begin_to_read()
        made = list[ChangeMade]()
        try:
            requests, problems = read_requests(self.file.path)
        except DataError as error:  # what cannot be read now ends no run
            requests, problems = [], [str(error)]
        for problem in problems:
            if problem not in self._told_problems:
                self._told_problems.add(problem)
                self.log.emit(Warned(step=step, text=problem), say=f"WARNING: {problem}")
        for request in requests:
            if request.id not in self._answered:
                self._answered.add(request.id)
                event = answer(request, self.recipe, [*self.made, *made], step, self.level.since())
                self.log.emit(event, say=True)
                made += [event] if isinstance(event, ChangeMade) else []
        return made
